"""What once went wrong, each with its story."""

from __future__ import annotations

import copy
import dataclasses
import enum
import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from tensordict_lite import (
    DeviceDict,
    DeviceMismatchError,
    Utf8,
    Vocabulary,
    encoder_from_json,
    register_encoder,
    to_device,
)

SIM = torch.device("sim", 0)


class TestPytree:
    def test_a_mapping_that_tree_map_put_in_does_not_shift_the_tensors(self) -> None:
        """Tensors were collected through any mapping but put back through ours only: b came back with a's tensor."""
        d = DeviceDict({"a": 1.0, "b": 2.0})
        odd = pytree.tree_map(lambda t: {"s": t * 10} if t == 1 else t * 10, d)
        assert odd.clone()["b"].item() == 20 and odd.to(SIM)["b"].item() == 20 and odd.copy()["a"] is odd["a"]

    def test_a_dict_left_on_two_devices_can_be_gathered(self) -> None:
        """It took the device of its first tensor, and ``to`` that device then returned it as it was."""
        mixed = pytree.tree_map(lambda t: t.to(SIM) if t.is_floating_point() else t, DeviceDict({"f": [1.0], "i": [1]}))
        assert mixed.device is None
        gathered = mixed.to(SIM)
        gathered._check()
        assert gathered["i"].device == SIM

    def test_nothing_can_be_stored_before_it_is_gathered(self) -> None:
        """The next write gave it a device that some of its tensors were not on."""
        mixed = pytree.tree_map(lambda t: t.to(SIM) if t.is_floating_point() else t, DeviceDict({"f": [1.0], "i": [1]}))
        for key in ("z", ("n", "z")):
            with pytest.raises(DeviceMismatchError, match=r"has tensors on several devices; \.to\(device\) it first"):
                mixed[key] = 1
        assert list(mixed) == ["f", "i"]

    def test_an_exported_program_names_the_public_class(self) -> None:
        assert '"tensordict_lite.DeviceDict"' in pytree.treespec_dumps(pytree.tree_structure(DeviceDict({"x": 1})))
        spec = pytree.tree_structure(DeviceDict(device="meta"))
        assert pytree.tree_unflatten([], pytree.treespec_loads(pytree.treespec_dumps(spec))).device == torch.device(
            "meta"
        )


class TestArguments:
    @pytest.mark.parametrize(
        ("args", "options"),
        [
            ((torch.float16, "sim:0"), {}),
            ((torch.float16, torch.float64), {}),
            (("cpu",), {"device": "sim:0"}),
            ((torch.float16,), {"dtype": torch.float64}),
            ((torch.zeros(1),), {"device": "sim:0"}),
            (("cpu", torch.float16, 1), {}),
            (("cpu",), {"copy": "yes"}),
            (("cpu",), {"memory_format": torch.channels_last}),
        ],
    )
    def test_what_would_be_dropped_silently_is_refused(self, args: Any, options: Any) -> None:
        """``to(torch.float16, "cuda")`` took "cuda" for ``non_blocking`` and stayed on the CPU."""
        with pytest.raises(TypeError, match=r"to\(\) got"):
            DeviceDict({"x": 1.0}).to(*args, **options)


class Items(dict):
    def items(self) -> Any:
        return [(key, torch.zeros(1)) for key in self]


class Lazy(Mapping[str, Any]):
    """Makes a new tensor at each access."""

    def __getitem__(self, key: str) -> Any:
        return torch.ones(1)

    def __iter__(self) -> Iterator[str]:
        return iter(["x"])

    def __len__(self) -> int:
        return 1


class Owner(MutableMapping[str, Any]):
    """Keeps its items in a dict of its own, which ``copy.copy`` shares."""

    def __init__(self, items: Any) -> None:
        self.own = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self.own[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.own[key] = value

    def __delitem__(self, key: str) -> None:
        del self.own[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.own)

    def __len__(self) -> int:
        return len(self.own)


class Table:
    """As a data frame: iterates its columns' names, and has dict's protocol of ``keys``."""

    def keys(self) -> list[str]:
        return ["x1", "x2"]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __getitem__(self, key: str) -> Any:
        return np.ones(2)


@dataclasses.dataclass(frozen=True)
class Embedding:
    """An encoder whose ``==`` raises."""

    table: torch.Tensor

    def encode(self, strings: Any) -> torch.Tensor:
        return self.table[: len(strings)]

    def decode(self, codes: Any) -> list[str]:
        return ["?"] * len(codes)


class TestOddMappings:
    def test_what_is_checked_is_what_is_stored(self) -> None:
        """A dict subclass with its own ``items`` was checked through it and stored past it."""
        d = DeviceDict({"x": 1})
        d.update(Items(y=torch.zeros(1, device="meta")))
        d._check()

    def test_a_mapping_that_makes_its_values_is_read_once(self) -> None:
        for d in (DeviceDict(Lazy(), device=SIM), DeviceDict({"n": Lazy()}, device=SIM)):
            d._check()
        moved = DeviceDict({"x": torch.ones(1, device=SIM)}, on_mismatch="move")
        moved["n"] = Lazy()
        moved._check()

    def test_a_nested_dict_subclass_with_its_own_items_moves_too(self) -> None:
        DeviceDict({"n": Items(x=1)}, device=SIM)._check()

    def test_a_table_is_taken_by_columns(self) -> None:
        """Its two-letter names passed for pairs: {'x': '2'}."""
        d = DeviceDict(Table())  # type: ignore[arg-type]
        assert list(d) == ["x1", "x2"] and d["x1"].tolist() == [1.0, 1.0]

    def test_an_update_whose_encoders_cannot_be_compared_changes_nothing(self) -> None:
        d = DeviceDict({"s": ["a"]}, encoders={"s": Embedding(torch.ones(3))})
        before = d["s"]
        with pytest.raises(RuntimeError, match="ambiguous"):
            d.update(DeviceDict({"s": ["bb"]}, encoders={"s": Embedding(torch.zeros(3))}))
        assert d["s"] is before

    def test_what_is_not_a_mapping_is_said_so(self) -> None:
        with pytest.raises(TypeError, match="allclose compares with a mapping, got int"):
            DeviceDict().allclose(3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="keys are str, got 1 of type int"):
            DeviceDict.unflatten({1: 2})  # type: ignore[dict-item]
        assert DeviceDict.unflatten([("a.b", 2)])["a", "b"].item() == 2  # type: ignore[arg-type]

    def test_unflatten_leaves_the_callers_dict_alone(self) -> None:
        inner = {"x": 1}
        with pytest.raises(ValueError, match="both a field and a nested dict"):
            DeviceDict.unflatten({"a": inner, "a.b": 2})
        assert inner == {"x": 1}

    def test_unflatten_undoes_all_of_flatten(self) -> None:
        d = DeviceDict({"o": {"s": ["a", "b"]}, "k": None}, encoders={"s": Vocabulary(["b", "a"])}, objects="keep")
        back = DeviceDict.unflatten(d.flatten())
        back._check()
        assert back == d and back.decode(("o", "s")) == ["a", "b"] and back["k"] is None

    def test_what_holds_itself(self) -> None:
        loop: Any = {"x": torch.ones(1)}
        loop["again"] = loop
        items: Any = [1]
        items.append(items)
        d = DeviceDict({"n": {"y": 1}})
        for value in (loop, items):
            with pytest.raises(
                ValueError,
                match=r"^'n\.x(\.again\.….again'|' is a list that) is nested more than 64 levels deep, or holds itself",
            ):
                d["n", "x"] = value
        assert list(d["n"]) == ["y"]

    def test_a_copy_of_a_dict_is_one_whatever_it_holds(self) -> None:
        d = DeviceDict({"f": None}, objects="keep", device=SIM)
        again = DeviceDict(d)
        assert again == d and again.device == SIM and DeviceDict(DeviceDict(device=SIM)).device == SIM


class Key(str, enum.Enum):
    X = "x"


class TestPickle:
    def test_keys_that_are_a_kind_of_str(self) -> None:
        for key in (Key.X, np.str_("x")):
            d = DeviceDict({key: 1})
            assert pickle.loads(pickle.dumps(d)) == d

    def test_an_encoder_is_written_once(self) -> None:
        """Every nested dict wrote its encoders again: thirty of them made thirty vocabularies."""
        big = Vocabulary(map(str, range(2000)))
        one = DeviceDict({"a": {"s": "1"}}, encoders={"s": big})
        many = DeviceDict({f"a{i}": {"s": "1"} for i in range(30)}, encoders={"s": big})
        sizes = [len(pickle.dumps(d)) for d in (one, many)]
        assert sizes[1] < sizes[0] + 30 * 1000

    def test_weights_only_takes_the_encoders(self) -> None:
        d = DeviceDict({"s": ["a"], "u": "x"}, encoders={"s": Vocabulary(["a"])})
        file = io.BytesIO()
        torch.save(d, file)
        file.seek(0)
        assert torch.load(file, weights_only=True).decode("s") == ["a"]


class TestValues:
    def test_update_with_keywords_over_a_dict_with_encoders(self) -> None:
        """The keyword's string was labelled with the encoder of the dict's field of that name."""
        d, other = DeviceDict(), DeviceDict({"s": ["cat"]}, encoders={"s": Vocabulary(["cat"])})
        d.update(other, s="dog")
        assert d.decode("s") == "dog"

    def test_no_raw_mapping_gets_in_through_an_object_array(self) -> None:
        d = DeviceDict({"k": np.array({"a": 1}, dtype=object), "n": np.array(None, dtype=object)}, objects="keep")
        d._check()
        assert isinstance(d["k"], np.ndarray) and isinstance(d["n"], np.ndarray)

    @pytest.mark.parametrize(
        ("value", "error", "message"),
        [
            (
                [[], [1, 2]],
                ValueError,
                "'x': expected lists that are rectangular, got an empty one beside one of numbers",
            ),
            ([np.array([1.5]), ["a"]], TypeError, "'x' is list of ndarray, str, expected a tensor"),
            ([np.array(1), None], TypeError, "'x' is list of NoneType, ndarray, expected a tensor"),
            (np.ma.array([1, 999], mask=[0, 1]), TypeError, r"'x' is a masked array, .* use \.filled\(value\)"),
            ([10**400, 0.5], ValueError, "'x': expected numbers that torch can hold"),
        ],
    )
    def test_what_became_something_else_silently(self, value: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=f"^{message}"):
            DeviceDict({"x": value})
        assert DeviceDict({"x": np.ma.array([1, 2])})["x"].tolist() == [1, 2]

    def test_masked_values_in_a_list(self) -> None:
        for value in ([np.ma.array([1, 9], mask=[0, 1]), np.ma.array([1, 2])], [1.0, np.ma.masked]):
            with pytest.raises(TypeError, match="'x' holds masked values, which a tensor would show; fill them first"):
                DeviceDict({"x": value})

    def test_a_kept_object_may_lead_back_to_itself(self) -> None:
        loop: Any = [None]
        loop.append(loop)
        d = DeviceDict({"o": {"nested": 1}}, objects="keep")
        d["k"] = (loop, "text")
        assert d["k"][0] is loop and copy.deepcopy(d)["k"][0] is not loop
        loop.append({"x": torch.ones(1)})
        with pytest.raises(TypeError, match=r"holds a tensor at \[0\]\[2\]\['x'\]"):
            d["again"] = (loop, "text")

    def test_parameters_are_stored_themselves(self) -> None:
        p = torch.nn.Parameter(torch.ones(1))
        d = DeviceDict({"p": p})
        d["q"] = p
        assert d["p"] is p and d["q"] is p
        with pytest.raises(DeviceMismatchError):
            d["r"] = torch.nn.Parameter(torch.ones(1, device="meta"))

    def test_numpy_of_layouts_it_does_not_have(self) -> None:
        jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        with pytest.raises(TypeError, match=r"^'n': NumPy has no float32, torch\.jagged; convert it first$"):
            DeviceDict({"n": jagged}).numpy()

    def test_kept_arrays_are_compared_whole(self) -> None:
        def kept(*dates: str) -> DeviceDict:
            return DeviceDict({"t": np.array(dates, dtype="M8[D]")}, objects="keep")

        one, two = kept("2020-01-01"), kept("2020-01-01", "2020-01-01")
        assert one == kept("2020-01-01") and one != two and two != kept("2020-01-01", "2020-01-01", "2020-01-01")

    def test_allclose_is_no_stricter_than_equality(self) -> None:
        jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        d = DeviceDict({"n": jagged})
        assert d == d.clone() and d.allclose(d.clone())
        for dtype in (torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64):
            d = DeviceDict({"x": torch.ones(2).to(dtype)})
            assert d.allclose(d.clone()) and d == d.clone(), dtype

    def test_made_twice(self) -> None:
        d = DeviceDict({"x": 1})
        with pytest.raises(TypeError, match="this DeviceDict is made already; use update to add to it"):
            d.__init__({"y": torch.zeros(1, device="meta")})  # type: ignore[misc]
        d._check()


class TestStrings:
    def test_one_encoder_for_every_key_goes_along_with_the_keys(self) -> None:
        """Only encoders by key did: elsewhere the codes were read by another encoder."""
        codes = torch.tensor([97], dtype=torch.uint8)
        d = DeviceDict({"c": codes}, encoders=Vocabulary(map(str, range(200))))
        other = DeviceDict({"z": 1})
        for holder, key in ((other | d, "c"), (DeviceDict({"n": d}), ("n", "c")), (DeviceDict(d), "c")):
            assert holder.decode(key) == ["97"]
        other.update(d)
        assert other.decode("c") == ["97"]

    def test_an_encoder_that_looks_something_up_in_vain(self) -> None:
        with pytest.raises(ValueError, match=r"^'s': 'q'$"):
            DeviceDict({"s": "q"}, encoders={"s": lambda strings: torch.tensor([{"a": 1}[s] for s in strings])})

    def test_a_subclass_of_an_encoder_stays_one(self) -> None:
        assert type(pickle.loads(pickle.dumps(Words(["a"])))) is Words

    def test_codes_are_made_on_the_cpu_whatever_the_default_device(self) -> None:
        d = DeviceDict({"x": 1}, encoders={"v": Vocabulary(["a"])})
        with torch.device("meta"):
            d["v"], d["u"], d["e"] = "a", "text", [""]
        d._check()
        assert d.decode("v") == "a" and d.decode("u") == "text"

    def test_a_nested_dict_that_is_no_codes(self) -> None:
        d = DeviceDict({"e": {}, "n": {"m": {"x": 1}}, "t": {"x": torch.zeros(2, dtype=torch.uint8)}})
        for key, message in (("e", "not codes"), ("n", "not codes"), ("t", "decodes a tensor of codes, got dict")):
            with pytest.raises(TypeError, match=f"^'{key}': .*{message}"):
                d.decode(key)

    def test_a_class_is_not_an_encoder(self) -> None:
        with pytest.raises(TypeError, match=r"an encoder is an instance, got the class Utf8; call it: Utf8\(\.\.\.\)"):
            DeviceDict(encoders=Utf8)
        with pytest.raises(TypeError, match=r"got the one string 'abc'; for its characters use list\(\)"):
            Vocabulary("abc")

    @pytest.mark.parametrize(
        "data",
        [None, "utf8", {"name": "vocabulary"}, {"name": "vocabulary", "tokens": None}, {"name": "vocabulary", "tokens": "abc"},
         {"name": "utf8", "max_length": 3, "more": 1}, {"name": "hashing", "buckets": "4"},
         {"name": "vocabulary", "tokens": ["a"], "unknown": ["b"]}],
    )  # fmt: skip
    def test_json_of_the_wrong_form(self, data: Any) -> None:
        with pytest.raises(ValueError, match=r"the JSON form of|buckets is a whole number"):
            encoder_from_json(data)

    def test_a_notebook_cell_is_run_twice(self) -> None:
        for _ in range(2):

            @register_encoder
            class Cell:
                name = "cell"
                to_json = from_json = dict[str, Any]

    def test_several_bases_with_policies_add_up(self) -> None:
        class Moves(DeviceDict, on_mismatch="move"):
            pass

        class Keeps(DeviceDict, objects="keep", encoders={"s": Vocabulary(["a"])}):
            pass

        class Both(Moves, Keeps, dtype=torch.float64):
            pass

        policy = Both._class_policy
        assert (policy.on_mismatch, policy.objects, policy.dtype) == (
            "move",
            "keep",
            torch.float64,
        ) and "s" in policy.encoders


class Words(Vocabulary):
    pass


@dataclasses.dataclass
class Output(OrderedDict):
    """The form of transformers' model outputs: a dict whose items are attributes too."""

    x: Any = None

    def __post_init__(self) -> None:
        self["x"] = self.x


class TestToDevice:
    def test_a_mapping_with_its_own_storage_is_not_written_into(self) -> None:
        """``copy.copy`` shared the storage, and setting the moved tensors set them in the original."""
        owner = Owner({"x": torch.ones(1)})
        assert to_device(owner, SIM)["x"].device == SIM and owner["x"].device.type == "cpu"

    def test_a_dataclass_that_is_a_dict_moves_as_both(self) -> None:
        moved = to_device(Output(torch.ones(1)), SIM)
        assert moved.x is moved["x"] and moved.x.device == SIM

    def test_what_holds_no_tensor_is_handed_on_as_it_is(self) -> None:
        import os  # noqa: PLC0415

        config = Owner({"a": 1})
        for thing in (sys.version_info, os.environ, config, torch.Size([2]), np.float64(1.0)):
            assert to_device([thing], SIM)[0] is thing

    def test_a_lazily_read_wrong_device_is_still_named(self) -> None:
        with pytest.raises(DeviceMismatchError, match=r"'n\.x' is on cpu"):
            DeviceDict({"y": torch.ones(1, device=SIM)})["n"] = Lazy()
