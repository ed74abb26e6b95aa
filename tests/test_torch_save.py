"""`torch.save` and `torch.load`: a round trip without any setup, and what is trusted when it is loaded."""

from __future__ import annotations

import io
import pickle
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import check_invariants, fails
from files import DEPTH, Batch, Obs, Typed, sample, torch_saved_and_loaded
from torch import Tensor
from torch.utils import _pytree as pytree

from tensordict_lite import DeviceDict, Hashing, InvalidFileError, Ragged


class Own(DeviceDict):
    """One that has a way of its own."""

    def __reduce__(self) -> Any:
        return own, (dict(self),)


def own(items: Any) -> Any:
    return Own({**items, "mark": 1})


class Moved(DeviceDict):
    pass


Moved.__module__ = "shown_elsewhere"


class TestTorchSave:
    @pytest.mark.parametrize("pack", [True, False])
    @pytest.mark.parametrize("location", [None, "cpu", "meta"])
    def test_without_any_setup(self, pack: bool, location: str | None) -> None:
        batch = Batch(
            {"s": ["a", "b"], "x": torch.ones(2), "n": {"e": {}, "h": torch.arange(2)}},
            encoders={"t": Hashing(4)},
            dtype=torch.float16,
        )
        for d in (
            sample(),
            batch,
            Typed.from_dict({"x": 1, "obs": {"state": [2.0]}}),
            DeviceDict(),
            DeviceDict({"b": batch, "t": Obs(state=torch.ones(1))}),
        ):
            for weights_only in (True, False):
                again = torch_saved_and_loaded(
                    d.pack() if pack else d, map_location=location, weights_only=weights_only
                )
                check_invariants(again)
                assert type(again) is type(d) and again._policy == d._policy
                assert again == d or location == "meta" or not d
                assert again.is_packed == d.pack().is_packed or not pack or location == "meta"
                assert [type(v) for v in again.values()] == [type(v) for v in d.values()]

    def test_parts_and_ties(self) -> None:
        base = torch.arange(1000.0)
        d = DeviceDict({"a": base[:2], "b": base[5:7]})
        file = io.BytesIO()
        torch.save(d, file)
        assert len(file.getvalue()) < 4000 and torch_saved_and_loaded(d) == d
        tied = DeviceDict({"a": base, "b": base})
        again = torch_saved_and_loaded(tied)
        assert again["a"] is again["b"]

    def test_classes_with_ways_of_their_own(self) -> None:
        assert "mark" in torch_saved_and_loaded(Own({"x": 1}), weights_only=False)
        assert type(torch_saved_and_loaded(Moved({"x": 1}))) is Moved
        deep = DeviceDict({"x": 1})
        for _ in range(DEPTH - 1):
            deep = DeviceDict({"n": deep})
        assert torch_saved_and_loaded(deep) == torch_saved_and_loaded(deep, weights_only=False) == deep

    @pytest.mark.parametrize(("part", "bomb"), [
        ('"root":', '"root":' + '{"policy":-1,"items":[["n",' * 50_000),
        ("[[", "[" * 100_000),
        ('"version":1', f'"version":{"9" * 5000}'),
    ], ids=["deep dicts", "deep lists", "a long number"])  # fmt: skip
    def test_a_manifest_is_no_bomb(self, part: str, bomb: str) -> None:
        begin = time.monotonic()
        _, (text, *rest) = DeviceDict({"x": torch.ones(2)}).__reduce_ex__(2)
        assert part in text
        with pytest.raises(InvalidFileError, match=r"^not a valid file or pickle: its manifest: "):
            rebuild_of(text.replace(part, bomb), *rest)
        assert time.monotonic() - begin < 5

    def test_what_is_not_data_takes_trust(self) -> None:
        kept = DeviceDict({"o": {1, 2}, "p": Path("x"), "x": 1}, objects="keep")
        again = torch_saved_and_loaded(kept, weights_only=False)
        assert again["o"] == {1, 2} and again["p"] == Path("x")
        with pytest.raises(pickle.UnpicklingError):
            torch_saved_and_loaded(kept)
        hooked = DeviceDict({"s": "a"}, encoders={"s": len_of})
        assert torch_saved_and_loaded(hooked, weights_only=False)._policy.encoders["s"].encode(["ab"]) == 2
        with pytest.raises(pickle.UnpicklingError):
            torch_saved_and_loaded(hooked)

    @pytest.mark.parametrize(("value", "policy", "message"), [
        (1.5, {}, r'^\'n\.o\': expected .*, got a float; convert it first, or build with objects="keep"'),
        ({"a": 1}, {"objects": "keep"}, "^not a valid file or pickle: a tensor is missing$"),
    ])  # fmt: skip
    def test_an_object_that_the_options_do_not_allow(self, value: object, policy: dict[str, Any], message: str) -> None:
        d = DeviceDict({"n": DeviceDict({"o": {1}, "x": 1}, objects="keep")}, objects="keep")
        _, (text, classes, encoders, device, parts, leaves) = d.__reduce_ex__(2)
        assert rebuild_of(text, classes, encoders, device, parts, leaves) == d
        text = text if policy else text.replace('"objects": "keep"', '"objects": "error"')
        forged = [(value,) if type(leaf) is tuple else leaf for leaf in leaves]
        with pytest.raises((TypeError, InvalidFileError), match=message):
            rebuild_of(text, classes, encoders, device, parts, forged)

    def test_classes_are_found_not_imported(self) -> None:
        file = io.BytesIO()
        torch.save(Batch({"x": 1}), file)
        assert file.getvalue().count(b"files.Batch") == 1
        content = file.getvalue().replace(b"files.Batch", b"gone_.Batch")
        for weights_only in (True, False):
            with pytest.raises(
                ValueError,
                match=r"the class 'gone_\.Batch' of a saved dict is not defined here; import its module first",
            ):
                torch.load(io.BytesIO(content), weights_only=weights_only)

    @pytest.mark.parametrize(("place", "value", "message"), [
        (0, None, "the data of the dict is damaged"),
        (0, "", "its manifest: Expecting value"),
        (0, "{}", "it has no version"),
        (0, '{"version":9}', "its version is 9, and this package reads version 1; update the package"),
        (1, None, "the data of the dict is damaged"),
        (1, [], "the number of classes differs from the number of dicts"),
        (1, ["os.system"] * 4, "the class 'os.system' of a saved dict is not defined here"),
        (1, ["tensordict_lite._tree.tree.TreeDict"] * 4, "the class 'tensordict_lite._tree.tree.TreeDict'"),
        (1, [int] * 4, "expected a DeviceDict class, got <class 'int'>"),
        (2, None, "the data of the dict is damaged"),
        (3, 3, "the data of the dict is damaged"),
        (4, None, "the data of the dict is damaged"),
        (4, [], "a tensor is missing"),
        (4, [1], "the buffers of a pickled dict are damaged"),
        (5, (), "the data of the dict is damaged"),
        (5, [0], "a tensor is missing"),
    ])  # fmt: skip
    def test_it_checks_what_it_is_given(self, place: int, value: Any, message: str) -> None:
        rebuild, arguments = sample().pack().__reduce_ex__(2)
        assert rebuild(*arguments) == sample()
        with pytest.raises((ValueError, TypeError), match=re.escape(message)):
            rebuild(*arguments[:place], value, *arguments[place + 1 :])

    def test_a_typed_class_that_has_changed(self) -> None:
        rebuild, (text, *rest) = Typed.from_dict({"x": 1, "obs": {"state": [2.0]}}).__reduce_ex__(2)
        fails(TypeError, r"^Typed has no field 'y'", lambda: rebuild(text.replace('"x"', '"y"'), *rest))

    @pytest.mark.parametrize(
        "wrong",
        [torch.ones, "hashing", {"name": "tokenizer"}, {"name": "hashing"}],
        ids=["a function", "a name", "a tokenizer", "no buckets"],
    )
    def test_an_encoder_that_is_none(self, wrong: Any) -> None:
        rebuild, (text, classes, _, *rest) = DeviceDict({"s": "a"}, encoders={"s": Hashing(4)}).__reduce_ex__(2)
        fails(InvalidFileError, "not a valid file or pickle: ", lambda: rebuild(text, classes, [wrong], *rest))

    @pytest.mark.parametrize("name", ["nowhere", "cuda:999"])
    def test_a_device_that_is_none(self, name: str) -> None:
        rebuild, (text, classes, encoders, _, *rest) = DeviceDict({"n": {}}).__reduce_ex__(2)
        fails(InvalidFileError, "not a valid file or pickle: ", lambda: rebuild(text, classes, encoders, name, *rest))

    def test_what_pytree_puts_in_is_saved_and_takes_trust(self) -> None:
        shapes: Any = pytree.tree_map(lambda tensor: tuple(tensor.shape), DeviceDict({"x": torch.ones(2, 3)}))
        assert torch_saved_and_loaded(shapes, weights_only=False) == {"x": (2, 3)}
        with pytest.raises(pickle.UnpicklingError):
            torch_saved_and_loaded(shapes)

    def test_the_list_has_three_functions(self) -> None:
        ours = [
            one
            for one in torch.serialization.get_safe_globals()
            if getattr(one, "__module__", "").startswith("tensordict_lite")
        ]
        field = Ragged([1], [0, 1])
        assert {*ours} == {one.__reduce_ex__(2)[0] for one in (DeviceDict(), field, field._lengths)}


def rebuild_of(*arguments: Any) -> Any:
    return DeviceDict().__reduce_ex__(2)[0](*arguments)


def len_of(strings: Any) -> Tensor:
    return torch.tensor([len(s) for s in strings])


def test_each_dict_on_its_own_device() -> None:
    d = DeviceDict({"x": torch.ones(1), "n": {"y": torch.ones(1)}})
    leaves, spec = pytree.tree_flatten(d)
    again = torch_saved_and_loaded(pytree.tree_unflatten([leaves[0], leaves[1].to("meta")], spec))
    assert again._device is None and again["n"].device == torch.device("meta")


def test_a_dict_without_tensors_keeps_a_device_that_is_not_here() -> None:
    rebuild, (text, classes, encoders, _, *rest) = DeviceDict({"n": {}}).__reduce_ex__(2)
    again = rebuild(text, classes, encoders, "cuda:5", *rest)
    assert again.device == again["n"].device == torch.device("cuda:5")
