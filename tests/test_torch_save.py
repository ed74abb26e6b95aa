"""`torch.save` and `torch.load`: a round trip without any setup, and what is trusted when it is loaded."""

from __future__ import annotations

import io
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from files import Batch, Keeping, Obs, Typed, sample, torch_saved_and_loaded
from torch import Tensor
from torch.utils import _pytree as pytree

from tensordict_lite import (
    DeviceDict,
    Hashing,
    InvalidFileError,
)
from tensordict_lite._errors import DEPTH


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
                again._check()
                assert (
                    type(again) is type(d)
                    and again._policy == d._policy
                    and (again == d or location == "meta" or not d)
                )
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

    def test_what_is_shared_in_a_plan_is_no_bomb(self) -> None:
        start = time.monotonic()
        node: Any = {"policy": 0, "items": []}
        value: Any = []
        for _ in range(60):
            node, value = {"policy": 0, "items": [["a", node], ["b", node]]}, [value, value]
        _, (made, classes, leaves, device, block, specs) = (
            DeviceDict({"x": torch.ones(2), "y": torch.ones(2)}).pack().__reduce_ex__(2)
        )
        policy = {**made["policies"][0], "default": 0} if made["policies"] else None
        for bomb in (
            {**made, "root": node},
            {**made, "encoders": [{"name": "vocabulary", "tokens": [value], "unknown": None}]},
            {**made, "policies": [{"encoders": {}, "default": value}]},
            {**made, "encoders": value, "policies": [policy]},
        ):
            with pytest.raises(InvalidFileError, match=r"^not a valid file: a list or dict occurs twice in it$"):
                rebuild_of(bomb, classes, leaves, device, block, specs)
        for spec in ((torch.float32, (2**62,) * 60_000, (1,) * 60_000, [0]), ([], (1,), (1,), [0])):
            with pytest.raises(ValueError, match="the layout of a packed dict is damaged"):
                rebuild_of(made, classes, leaves, device, block, [spec])
        assert time.monotonic() - start < 5

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

    def test_it_checks_what_it_is_given(self) -> None:
        rebuild, (made, classes, leaves, device, block, specs) = sample().pack().__reduce_ex__(2)
        assert rebuild(made, classes, leaves, device, block, specs) == sample()
        wrong: list[tuple[Any, ...]] = [
            (None, classes, leaves, device, block, specs), (made, classes[1:], leaves, device, block, specs), (made, ["os.system"] * 4, leaves, device, block, specs),
            (made, classes, leaves[1:], device, block, specs), (made, classes, tuple(leaves), device, block, specs), (made, classes, leaves, 3, block, specs),
            (made, classes, leaves, "nowhere", block, specs), (made, classes, leaves, device, None, specs), (made, classes, leaves, device, block[1:].clone(), specs),
            (made, classes, leaves, device, block, specs[1:]), (made, classes, leaves, device, block, None), (made, classes, [*leaves[:-1], "x"], device, block, specs),
            (made, classes, [*leaves[:-1], 99], device, block, specs), (made, classes, [*leaves[:-1], ({"q": 1},)], device, block, specs), (made, classes, leaves, "cuda:999", block, specs),
            (made, ["tensordict_lite._tree.tree.TreeDict", *classes[1:]], leaves, device, block, specs), ({**made, "policies": [{"encoders": {"x": 0}, "default": None, "on_mismatch": "error", "objects": "error", "dtype": None}], "encoders": [torch.ones], "root": {**made["root"], "policy": 0}}, classes, leaves, device, block, specs), ({**made, "version": 9}, classes, leaves, device, block, specs), (made, None, leaves, device, block, specs),
        ]  # fmt: skip
        for arguments in wrong:
            with pytest.raises(ValueError):  # noqa: PT011
                rebuild(*arguments)
        rebuild, arguments = Typed.from_dict({"x": 1, "obs": {"state": [2.0]}}).__reduce_ex__(2)
        arguments[0]["root"]["items"][0][0] = "y"
        with pytest.raises(TypeError, match=r"^Typed has no field 'y'"):
            rebuild(*arguments)

    def test_objects_are_kept_where_the_policy_keeps_them(self) -> None:
        kept = Keeping({"o": [1, "x"], "x": 1})
        assert torch_saved_and_loaded(kept)["o"] == [1, "x"]
        rebuild, (made, classes, leaves, device, block, specs) = kept.__reduce_ex__(2)
        name = f"{Keeping.__module__}.Keeping"
        assert classes == [name]
        with pytest.raises(
            InvalidFileError, match=r"^not a valid file: 'o' is an object, but its dict keeps no objects$"
        ):
            rebuild(made, ["tensordict_lite.DeviceDict"], leaves, device, block, specs)
        deep: Any = []
        for _ in range(100_000):
            deep = [deep]
        for inside in ([torch.ones(1, device="meta")], {"a": 1}, torch.ones(1), ([{"q": torch.ones(1)}],), deep):
            with pytest.raises(InvalidFileError, match="not a valid file: "):
                rebuild(made, classes, [(inside,), *leaves[1:]], device, block, specs)

    def test_what_pytree_puts_in_is_saved_with_trust(self) -> None:
        shapes = torch.utils._pytree.tree_map(lambda tensor: tuple(tensor.shape), DeviceDict({"x": torch.ones(2, 3)}))  # pyright: ignore[reportAttributeAccessIssue]
        assert torch_saved_and_loaded(shapes, weights_only=False) == {"x": (2, 3)}
        with pytest.raises(pickle.UnpicklingError):
            torch_saved_and_loaded(shapes)

    def test_the_list_has_one_function(self) -> None:
        ours = [
            one
            for one in torch.serialization.get_safe_globals()
            if getattr(one, "__module__", "").startswith("tensordict_lite")
        ]
        assert ours == [DeviceDict.__reduce_ex__(DeviceDict(), 2)[0]]


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
    rebuild, (made, classes, leaves, _, buffer, specs) = DeviceDict({"n": {}}).__reduce_ex__(2)
    again = rebuild(made, classes, leaves, "cuda:5", buffer, specs)
    assert again.device == again["n"].device == torch.device("cuda:5")


def test_an_object_that_is_too_deep_to_search() -> None:
    deep = torch.nn.Sequential()
    for _ in range(2000):
        deep = torch.nn.Sequential(deep)
    rebuild, (made, classes, leaves, device, buffer, specs) = Keeping({"o": 1}).__reduce_ex__(2)
    with pytest.raises(InvalidFileError, match=r"^not a valid file: an object in it is nested too deep$"):
        rebuild(made, classes, [(deep,), *leaves[1:]], device, buffer, specs)
