"""DeviceDict is a dict: every mutator keeps the device rule, paths work, a failed call changes nothing."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import OrderedDict, UserDict
from collections.abc import Iterator, Mapping, MutableMapping
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import ANY

import numpy as np
import pytest
import simulated
import torch
from checks import ABSTRACT, check_invariants, claims, fails, protocols

from tensordict_lite import DeviceDict, DeviceMismatchError, JoinedRows, TypedDeviceDict, Vocabulary, collate

SIM = simulated.SIM


class Batch(TypedDeviceDict):
    x: torch.Tensor
    weight: torch.Tensor | None = None


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


class Answer:
    """Says whether it equals a thing, as it was told to."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __eq__(self, other: object) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


# What each attribute of dict is for DeviceDict. A new one in a later Python is in neither set and fails the test.
OVERRIDDEN = {
    "__contains__", "__delitem__", "__eq__", "__init__", "__init_subclass__", "__ior__", "__ne__", "__or__",
    "__reduce__", "__repr__", "__ror__", "__setitem__", "copy", "fromkeys", "get", "pop", "setdefault", "update",
}  # fmt: skip
SAFE = {
    # read only
    "__class__", "__class_getitem__", "__dir__", "__doc__", "__format__", "__getattribute__", "__getitem__",
    "__getstate__", "__iter__", "__len__", "__reversed__", "__sizeof__", "__str__", "__subclasshook__", "items", "keys",
    "values",
    # NotImplemented, or None, for a dict
    "__hash__",
    "__ge__", "__gt__", "__le__", "__lt__",
    # make nothing that holds a value; pickle goes through __reduce__
    "__new__", "__reduce_ex__", "__setattr__", "__delattr__",
    # only remove
    "clear", "popitem",
}  # fmt: skip


def test_every_attribute_of_dict_is_decided_about() -> None:
    """``dict`` implements each mutator in C, calling no other: one that is not overridden bypasses the rule."""
    assert not OVERRIDDEN & SAFE
    undecided = set(dir(dict)) - OVERRIDDEN - SAFE
    assert not undecided, f"decide whether {sorted(undecided)} can store a value, then override it or list it as safe"
    for name in OVERRIDDEN:
        assert getattr(DeviceDict, name) is not getattr(dict, name), name
        owner = next(cls for cls in DeviceDict.__mro__ if name in vars(cls))
        assert owner.__module__.startswith("tensordict_lite"), name


WRITERS = {
    "setitem": lambda d, v: d.__setitem__("y", v),
    "path": lambda d, v: d.__setitem__(("n", "y"), v),
    "new path": lambda d, v: d.__setitem__(("m", "q", "y"), v),
    "update": lambda d, v: d.update({"z": 1, "y": v}),
    "update pairs": lambda d, v: d.update([("z", 1), ("y", v)]),
    "update generator": lambda d, v: d.update((k, w) for k, w in [("z", 1), ("y", v)]),
    "update keywords": lambda d, v: d.update(z=1, y=v),
    "update nested": lambda d, v: d.update(z=1, n={"p": 2, "y": v}),
    "update user mapping": lambda d, v: d.update(UserDict(z=1, y=v)),
    "setdefault": lambda d, v: d.setdefault("y", v),
    "ior": lambda d, v: d.__ior__({"z": 1, "y": v}),
    "or": lambda d, v: d | {"z": 1, "y": v},
    "ror": lambda d, v: {"z": 1, "y": v} | d,
    "nested item": lambda d, v: d["n"].__setitem__("y", v),
    "nested mapping": lambda d, v: d.__setitem__("y", {"deep": {"er": v}}),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("bad", [torch.zeros(2, device="meta"), None, [torch.zeros(1)]], ids=["meta", "None", "list"])
def test_no_writer_bypasses_the_rule_and_a_failure_changes_nothing(write: Any, bad: Any) -> None:
    d = DeviceDict({"x": torch.ones(2), "n": {"w": torch.ones(1)}})
    before, tensors = d.to_dict(), d._tensors()
    fails(DeviceMismatchError if isinstance(bad, torch.Tensor) else TypeError, r"y|er", lambda: write(d, bad))
    check_invariants(d)
    assert d.to_dict().keys() == before.keys() and d["n"].keys() == {"w"}  # pyright: ignore[reportAttributeAccessIssue]
    assert all(a is b for a, b in zip(d._tensors(), tensors, strict=True))
    assert d.device == torch.device("cpu")


def test_a_failed_first_write_leaves_the_dict_without_a_device() -> None:
    d = DeviceDict()
    with pytest.raises(TypeError):
        d.update(x=torch.zeros(1, device="meta"), y=None)
    assert d.device is None and not d


@pytest.mark.parametrize("make", [dict, OrderedDict, UserDict, lambda x: list(x.items()), lambda x: tuple(x.items()),
                                  lambda x: ((k, v) for k, v in x.items()), DeviceDict])  # fmt: skip
def test_construction_from_every_form_of_items(make: Any) -> None:
    d = DeviceDict(make({"x": torch.ones(2), "y": torch.zeros(1)}))
    check_invariants(d)
    assert list(d) == ["x", "y"] and d.device == torch.device("cpu")


SAMPLES: Any = [{"image": 1, "label": 2}, {"image": 3, "label": 4}]


@pytest.mark.parametrize("samples", [SAMPLES, tuple(SAMPLES), iter(SAMPLES)], ids=type)
@pytest.mark.parametrize("write", [
    lambda d, given: DeviceDict(given),
    lambda d, given: d.update(given),
    lambda d, given: d.__ior__(given),
    lambda d, given: DeviceDict.unflatten(given),
    lambda d, given: Batch.from_dict(given),
    lambda d, given: JoinedRows([given]),
])  # fmt: skip
def test_samples_are_no_pairs(write: Any, samples: Any) -> None:
    """``dict([{"image": ..., "label": ...}])`` is ``{"image": "label"}``."""
    d = DeviceDict({"x": 1})
    with pytest.raises(TypeError, match=r"with a mapping among its items; collate\(samples\) makes a batch$"):
        write(d, copy.copy(samples))
    with pytest.raises(TypeError, match="with a mapping among its items"):
        DeviceDict(collate(SAMPLES).rows)  # type: ignore[arg-type]
    assert d == DeviceDict({"x": 1})


@pytest.mark.parametrize(("data", "got"), [
    (["ab"], "list with a str"),
    (["a"], "list with a str"),
    ("abc", "str with a str"),
    ([{"a", "b"}], "list with a set"),
    ([frozenset("ab")], "list with a frozenset"),
])  # fmt: skip
def test_other_things_of_two_items_are_no_pairs(data: Any, got: str) -> None:
    fails(TypeError, f"pairs, got {got} among its items$", lambda: DeviceDict(data))
    pairs: Any = [["a", 1], ("b", 2)]
    assert DeviceDict(pairs).tolist() == {"a": 1, "b": 2}


def test_a_frame_that_iterates_over_columns_names_to_dict() -> None:
    class Frame:
        def to_dict(self) -> Any:
            return {"x": [1, 2]}

        def __iter__(self) -> Any:
            return iter([("x", "y")])

    fails(TypeError, r"got Frame; give it the to_dict\(\)$", lambda: DeviceDict(Frame()))  # type: ignore[arg-type]
    assert DeviceDict(Frame().to_dict())["x"].tolist() == [1, 2]


def test_results_keep_the_type() -> None:
    class Batch(DeviceDict, objects="keep"):
        pass

    d = Batch({"x": 1, "n": {"y": 2}})
    made = [d.copy(), d | {"z": 1}, {"z": 1} | d, Batch.fromkeys(["a"], 1), d.select("x"), d.drop("x"), d.detach(),
            d.map(lambda t: t + 1), type(d)({"x": torch.ones(1)}), d["n"]]  # fmt: skip
    assert {type(m) for m in made} == {Batch}
    d |= {"z": 1}
    assert type(d) is Batch


def test_it_is_a_dict_everywhere() -> None:
    d = DeviceDict({"x": torch.ones(2), "y": torch.zeros(2)})
    assert isinstance(d, dict) and isinstance(d, MutableMapping) and issubclass(DeviceDict, MutableMapping)
    assert len(d) == 2 and list(reversed(d)) == ["y", "x"] and bool(d) and not DeviceDict()
    assert dict(**d).keys() == d.keys() == {**d}.keys()
    assert {"x": 1, **d}["x"] is d["x"]
    match d:
        case {"x": x, **rest}:
            assert x is d["x"] and rest.keys() == {"y"}
        case _:
            raise AssertionError
    fails(TypeError, "unhashable", lambda: hash(d))


def test_it_claims_to_be_a_dict_and_nothing_else() -> None:
    """A framework asks ``isinstance(value, Stateful)`` first, and calls ``state_dict`` then."""
    kinds = {name: kind for package in ("torch", "typing", "numpy") for name, kind in protocols(package).items()}
    assert "torch.distributed.checkpoint.stateful.Stateful" in kinds and "typing.SupportsAbs" in kinds
    for d in (DeviceDict({"x": 1}), Batch(x=torch.ones(1))):
        assert claims(d, kinds) == claims({}, kinds)
        assert claims(d, ABSTRACT) == claims({}, ABSTRACT)
        for name in dir(type(d)):
            assert hasattr(d, name), f"{name} stands on the class and is no attribute"


def test_reads_are_dicts_own() -> None:
    assert DeviceDict.__getitem__ is dict.__getitem__
    assert all(getattr(DeviceDict, name) is getattr(dict, name) for name in ("__iter__", "__len__", "items", "values"))


def test_pop_popitem_clear_setdefault() -> None:
    d = DeviceDict({"x": 1, "n": {"y": 2, "z": 3}})
    assert d.pop("x").item() == 1 and d.pop("x", None) is None and d.pop(("n", "q"), 7) == 7
    assert d.pop(("n", "y")).item() == 2 and list(d["n"]) == ["z"]
    fails(KeyError, "'x'", lambda: d.pop("x"))
    fails(KeyError, r"^'n\.y' is not in this DeviceDict: 'n' has no 'y'", lambda: d.pop(("n", "y")))
    assert d.setdefault("w", 4) is d["w"] and d.setdefault("w", 5).item() == 4
    assert d.setdefault(("n", "k"), 6) is d["n", "k"]
    assert d.popitem()[0] == "w"
    d.clear()
    assert not d and d.device == torch.device("cpu"), "an emptied dict stays where it is"


class TestPaths:
    def test_get_set_delete_contains(self) -> None:
        d = DeviceDict({"obs": {"image": torch.ones(2)}})
        assert d["obs", "image"] is d["obs"]["image"]  # pyright: ignore[reportArgumentType]
        assert ("obs", "image") in d and ("obs",) in d
        assert ("obs", "nope") not in d and ("obs", "image", "x") not in d and ("nope", "x") not in d and () not in d
        d["obs", "state", "q"] = 1.0
        assert isinstance(d["obs", "state"], DeviceDict) and d.get(("obs", "state", "q")).item() == 1.0
        assert d.get(("obs", "none"), 3) == 3
        del d["obs", "state", "q"]
        assert ("obs", "state") in d and not d["obs", "state"]
        check_invariants(d)

    def test_a_path_through_a_tensor_cannot_be_set(self) -> None:
        d = DeviceDict({"n": {"x": 1}})
        with pytest.raises(TypeError, match=r"'n\.x': expected a nested dict to put 'n\.x\.y\.z' into, got int64"):
            d["n", "x", "y", "z"] = 1
        with pytest.raises(KeyError, match="at least one key"):
            d[()] = 1

    def test_errors_name_the_whole_path(self) -> None:
        d = DeviceDict({"n": {"x": 1}})
        with pytest.raises(DeviceMismatchError, match=r"^'n\.m\.y' is on meta, this DeviceDict is on cpu") as caught:
            d["n", "m", "y"] = torch.zeros(1, device="meta")
        assert caught.value.key == ("n", "m", "y") and "m" not in d["n"]


class TestNesting:
    def test_a_mapping_is_taken_in_by_value(self) -> None:
        inner = DeviceDict({"x": torch.ones(1)})
        outer = DeviceDict({"inner": inner, "again": inner})
        assert outer["inner"]["x"] is inner["x"]  # pyright: ignore[reportArgumentType]
        inner["y"] = 1
        outer["again", "z"] = 1
        assert list(outer["inner"]) == ["x"] and list(inner) == ["x", "y"]

    def test_a_dict_can_be_put_into_itself_without_a_cycle(self) -> None:
        d = DeviceDict({"x": 1})
        d["self"] = d
        d["self"] = d
        assert d["self", "self", "x"] is d["x"] and ("self", "self", "self") not in d
        assert "self" in repr(d)

    def test_an_empty_nested_dict_cannot_take_another_device_than_its_parent(self) -> None:
        d = DeviceDict({"a": {}, "b": {}})
        with pytest.raises(DeviceMismatchError):
            d["a", "x"] = torch.zeros(1, device="meta")
        with pytest.raises(DeviceMismatchError):
            d["a"]["x"] = torch.zeros(1, device="meta")  # pyright: ignore[reportArgumentType]
        check_invariants(d)
        e = DeviceDict({"a": {}, "x": torch.zeros(1, device="meta")})
        assert e["a"].device == e.device == torch.device("meta")
        e["a"] = DeviceDict()
        assert e["a"].device == torch.device("meta")
        check_invariants(e)

    def test_a_subclass_keeps_its_class_when_nested(self) -> None:
        class Obs(DeviceDict):
            pass

        assert type(DeviceDict({"o": Obs({"x": 1})})["o"]) is Obs

    def test_copies_do_not_share_structure(self) -> None:
        d = DeviceDict({"n": {"x": 1}})
        for c in (d.copy(), d.select("n"), d.drop(), d | {}, DeviceDict(d)):
            c["n", "y"] = 2
            assert list(d["n"]) == ["x"] and c["n", "x"] is d["n", "x"]


class TestEquality:
    def test_one_bool_from_keys_dtypes_shapes_and_values(self) -> None:
        d = DeviceDict({"x": torch.ones(2), "n": {"y": torch.tensor(3)}})
        assert (d == d.clone()) is True and (d != d.clone()) is False
        assert d == {"x": torch.ones(2), "n": {"y": torch.tensor(3)}} and {"x": torch.ones(2)} != d
        for other in (
            {"x": torch.ones(2)},
            {"x": torch.ones(2), "n": {"y": torch.tensor(3)}, "z": torch.tensor(0)},
            {"x": torch.ones(2), "n": {"y": torch.tensor(3), "z": torch.tensor(0)}},
            {"x": torch.ones(2), "m": {"y": torch.tensor(3)}},
            {"x": torch.ones(2).double(), "n": {"y": torch.tensor(3)}},
            {"x": torch.ones(2, 1), "n": {"y": torch.tensor(3)}},
            {"x": torch.ones(2), "n": {"y": torch.tensor(4)}},
            {"x": torch.ones(2), "n": torch.tensor(3)},
            {"x": [1.0, 1.0], "n": {"y": torch.tensor(3)}},
        ):
            assert d != other and not d == other  # noqa: SIM201
        assert d != 3 and (d == None) is False  # noqa: E711

    def test_order_does_not_count(self) -> None:
        assert DeviceDict({"x": 1, "y": 2}) == DeviceDict({"y": 2, "x": 1})

    def test_identity_counts_as_in_a_dict(self) -> None:
        nan = torch.tensor(float("nan"))
        assert DeviceDict({"x": nan}) == DeviceDict({"x": nan}) and DeviceDict({"x": nan}) != DeviceDict({"x": nan + 0})
        meta = DeviceDict({"x": torch.ones(2, device="meta")})
        assert meta == meta.copy() and meta != meta.clone()

    def test_across_devices(self, device: torch.device) -> None:
        d = DeviceDict({"x": [1.0, 2.0]})
        assert d == d.to(device) and d.allclose(d.to(device)) and d != (d.to(device).map(lambda t: t + 1))

    def test_special_layouts(self) -> None:
        sparse = torch.eye(3).to_sparse()
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        d = DeviceDict({"s": sparse, "n": nested, "c": torch.ones(2, dtype=torch.complex64).conj()})
        assert d == d.clone() and d != DeviceDict({**d, "s": (torch.eye(3) * 2).to_sparse()})
        assert d != DeviceDict({**d, "s": torch.eye(3)})

    def test_the_other_side_is_asked_as_a_dict_does(self) -> None:
        x = torch.ones(2)
        d = DeviceDict({"x": x, "n": {"y": 3}})
        plain = {"x": x, "n": {"y": d["n", "y"]}}
        for other in ({"x": ANY, "n": {"y": d["n", "y"]}}, {"x": x, "n": ANY}, {"x": x, "n": {"y": ANY}}, ANY):
            assert (plain == other) is (d == other) is (other == d) is True
            assert (plain != other) is (d != other) is (other != d) is False
            assert d == UserDict(other) if other is not ANY else True
        assert d.allclose({"x": ANY, "n": ANY})
        for value in (Answer(False), Answer("yes"), Answer(1), 1, "x", None, [1.0, 1.0], (), x.numpy(), np.float32(1)):
            other = {"x": value, "n": {"y": ANY}}
            assert (d == other) is (other == d) is False and (d != other) is (other != d) is True
        assert d == {"x": Answer(True), "n": {"y": ANY}}
        assert d.to("meta") != {"x": np.ma.ones(2), "n": ANY}, "NumPy would ask for the values"
        kept = DeviceDict({"x": ANY, "y": Answer(False)}, objects="keep")
        assert kept == {"x": x, "y": kept["y"]} == kept and kept != {"x": x, "y": x}

    @pytest.mark.parametrize("number", [0.5, 0.5 + 0j, np.float32(0.5), np.float64(0.5), np.array(0.5), True, 10**400])
    def test_a_tensor_equals_no_number(self, number: Any) -> None:
        d = DeviceDict({"n": {"x": 0.5}, "b": True})
        other = {"n": {"x": number}, "b": d["b"]}
        assert (d == other) is (other == d) is d.allclose(other) is False
        assert d.tolist() == {"n": {"x": 0.5}, "b": True}
        kept = DeviceDict({"x": [number, None]}, objects="keep")
        assert kept == {"x": [number, None]}

    def test_an_error_of_the_other_side_is_its_own(self) -> None:
        with pytest.raises(ZeroDivisionError):
            assert DeviceDict({"x": 1}) == {"x": Answer(ZeroDivisionError())}

    def test_kept_objects(self) -> None:
        a = DeviceDict({"o": {1, 2}}, objects="keep")
        assert a == DeviceDict({"o": {1, 2}}, objects="keep") and a != DeviceDict({"o": {1}}, objects="keep")

    def test_allclose(self) -> None:
        d = DeviceDict({"x": [1.0], "i": [1]})
        near = DeviceDict({"x": [1.0 + 1e-6], "i": [1]})
        assert d.allclose(near) and d != near and not d.allclose(near, rtol=0, atol=1e-9)
        assert not d.allclose({"x": torch.tensor([1.0])}) and not d.allclose(near.double())
        nan = DeviceDict({"x": float("nan")})
        assert nan.allclose(nan.clone(), equal_nan=True) and not nan.allclose(nan.clone())

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


class TestShaping:
    def test_select_and_drop(self) -> None:
        d = DeviceDict({"x": 1, "n": {"a": 2, "b": {"c": 3, "d": 4}}})
        picked = d.select(("n", "b", "c"), ("n", "a"), "x")
        assert list(picked) == ["n", "x"] and list(picked["n"]) == ["b", "a"] and list(picked["n", "b"]) == ["c"]
        check_invariants(picked)
        assert d.drop(("n", "b", "c"), "x").flatten().keys() == {"n.a", "n.b.d"}

    def test_flatten_and_unflatten_are_inverse(self) -> None:
        d = DeviceDict({"x": 1, "n": {"a": 2, "e": {}}, "s": {"name": "ada"}})
        flat = d.flatten("/")
        assert list(flat) == ["x", "n/a", "n/e", "s/name"] and flat.decode("s/name") == "ada"
        back = DeviceDict.unflatten(flat, "/")
        assert back == d and isinstance(back["n", "e"], DeviceDict)
        check_invariants(back)
        with pytest.raises(
            ValueError, match=r"'a' cannot be both a field and a nested dict; the conflicting key is 'a\.b'"
        ):
            DeviceDict.unflatten({"a": 1, "a.b": 2})
        with pytest.raises(
            ValueError, match="'a' cannot be both a field and a nested dict; the conflicting key is 'a'"
        ):
            DeviceDict.unflatten({"a.b": 2, "a": 1})

    @pytest.mark.parametrize(("d", "sep", "key"), [
        ({"a": {"b": 1}, "a.b": 2}, ".", "'a.b'"),
        (torch.nn.Sequential(torch.nn.Linear(1, 1)).state_dict(), ".", "'0.weight'"),
        ({"m": {"o": {"0.weight": 1}}}, ".", "'0.weight' in 'm.o'"),
        ({"a.": {"b": 1}}, "..", "'b' in 'a.'"),
    ])  # fmt: skip
    def test_flatten_refuses_a_key_that_unflatten_would_split(self, d: Any, sep: str, key: str) -> None:
        d = DeviceDict(d)
        with pytest.raises(ValueError, match="unflatten could not restore") as caught:
            d.flatten(sep)
        told = f"unflatten could not restore the key {key} from keys joined by {sep!r}"
        assert str(caught.value) == f"{told}; flatten with another sep, such as '/'"
        assert DeviceDict.unflatten(d.flatten("/"), "/") == d

    def test_map(self, device: torch.device) -> None:
        d = DeviceDict({"x": [1.0, 2.0], "n": {"y": [3.0]}})
        assert d.map(torch.sum)["n", "y"].item() == 3.0
        moved = d.map(lambda t: t.to(device))
        assert moved.device == device and moved["n"].device == device
        check_invariants(moved)
        assert moved.map(lambda t: 0).device == device, "numbers go where the dict is"
        seen = iter(["cpu", "meta", "cpu"])
        with pytest.raises(DeviceMismatchError, match=r"'n\.y' is on meta"):
            DeviceDict({"x": 1, "n": {"y": 2}}).map(lambda t: t.to(next(seen)))

    def test_nbytes_and_to_dict(self) -> None:
        d = DeviceDict({"x": torch.zeros(3), "n": {"y": torch.zeros(2, dtype=torch.int8)}})
        assert d.nbytes == 14
        plain = d.to_dict()
        assert type(plain) is dict and type(plain["n"]) is dict and plain["x"] is d["x"]

    def test_unflatten_leaves_the_callers_dict_alone(self) -> None:
        inner = {"x": 1}
        fails(ValueError, "both a field and a nested dict", lambda: DeviceDict.unflatten({"a": inner, "a.b": 2}))
        assert inner == {"x": 1}

    def test_unflatten_undoes_all_of_flatten(self) -> None:
        d = DeviceDict({"o": {"s": ["a", "b"]}, "k": None}, encoders={"s": Vocabulary(["b", "a"])}, objects="keep")
        back = DeviceDict.unflatten(d.flatten())
        check_invariants(back)
        assert back == d and back.decode(("o", "s")) == ["a", "b"] and back["k"] is None


class TestOddMappings:
    def test_a_dict_with_its_own_items_method_is_read_through_it(self) -> None:
        """A dict subclass with its own ``items`` was checked through it and stored past it."""
        d = DeviceDict({"x": 1})
        d.update(Items(y=torch.zeros(1, device="meta")))
        check_invariants(d)

    def test_a_mapping_that_makes_its_values_is_read_once(self) -> None:
        for d in (DeviceDict(Lazy(), device=SIM), DeviceDict({"n": Lazy()}, device=SIM)):
            check_invariants(d)
        moved = DeviceDict({"x": torch.ones(1, device=SIM)}, on_mismatch="move")
        moved["n"] = Lazy()
        check_invariants(moved)

    def test_a_tensor_on_the_wrong_device_in_a_lazy_mapping_is_named(self) -> None:
        with pytest.raises(DeviceMismatchError, match=r"'n\.x' is on cpu"):
            DeviceDict({"y": torch.ones(1, device=SIM)})["n"] = Lazy()

    def test_a_nested_dict_subclass_with_its_own_items_moves_too(self) -> None:
        check_invariants(DeviceDict({"n": Items(x=1)}, device=SIM))

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

    def test_the_error_for_a_value_that_is_no_mapping(self) -> None:
        with pytest.raises(TypeError, match="allclose compares with a mapping, got int"):
            DeviceDict().allclose(3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="keys are str, got 1 of type int"):
            DeviceDict.unflatten({1: 2})  # type: ignore[dict-item]
        assert DeviceDict.unflatten([("a.b", 2)])["a", "b"].item() == 2  # type: ignore[arg-type]

    def test_the_constructor_copies_a_dict_of_kept_objects(self) -> None:
        d = DeviceDict({"f": None}, objects="keep", device=SIM)
        again = DeviceDict(d)
        assert again == d and again.device == SIM and DeviceDict(DeviceDict(device=SIM)).device == SIM


def test_init_is_refused_once_there_is_a_device_or_an_item() -> None:
    for d in (DeviceDict(device="cpu"), DeviceDict({"k": None}, objects="keep")):
        before = dict(d)
        with pytest.raises(TypeError, match="this DeviceDict is already constructed; use update to add items"):
            d.__init__({"y": torch.zeros(1, device="meta")})  # type: ignore[misc]
        assert dict(d) == before
    empty: DeviceDict[Any] = DeviceDict()
    empty.__init__({"y": 1})  # type: ignore[misc]
    assert list(empty) == ["y"]


def test_a_tensor_in_place_is_stored_by_its_path_and_under_no_other_key() -> None:
    d: DeviceDict[Any] = DeviceDict({"x": 1})
    d["n", "y"] = torch.zeros(1)
    assert list(d) == ["x", "n"] and list(d["n"]) == ["y"]
    with pytest.raises(TypeError, match="keys are str, got 3 of type int"):
        d[3] = torch.zeros(1)  # type: ignore[index]
    assert list(d) == ["x", "n"]


def test_a_union_with_another_type_is_a_type_error() -> None:
    d: Any = DeviceDict({"x": 1})
    for use in (lambda: d | 3, lambda: 3 | d, lambda: d | [("y", 1)]):
        with pytest.raises(TypeError, match="unsupported operand type"):
            use()


def test_a_subclass_of_str_is_a_key() -> None:
    class Key(str):
        pass

    d = DeviceDict({"y": 1})
    d[Key("x")] = 2.0
    assert d["x"].tolist() == 2 and check_invariants(d) is None


def test_a_batch_size_of_a_tensordict_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(TensorDict=lambda source, batch_size, device: (source, batch_size, device))
    monkeypatch.setitem(sys.modules, "tensordict", fake)
    d = DeviceDict({"x": torch.ones(3, 2)})
    for given, expected in (([3, 2], [3, 2]), (None, [3])):
        source, batch_size, device = d.to_tensordict(given)
        assert type(source) is dict and list(batch_size) == expected and device == d.device


def test_tensordict_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensordict", None)
    with pytest.raises(ImportError, match=r"^to_tensordict needs TensorDict: pip install tensordict$"):
        DeviceDict({"x": 1}).to_tensordict()
    with pytest.raises(TypeError, match=r"^expected a TensorDict or another mapping, got int$"):
        DeviceDict.from_tensordict(cast(Any, 3))
