"""A call that fails changes nothing: in place methods look at every field first, and others may write meanwhile."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import simulated
import torch
from checks import check_invariants, fails
from torch import Tensor
from torch.utils import _pytree as pytree

from tensordict_lite import DeviceDict, DeviceMismatchError, TypedDeviceDict, Vocabulary
from tensordict_lite._tree.walk import leaves

SIM = simulated.SIM


class TestInPlace:
    @pytest.mark.parametrize("nested", [False, True])
    def test_requires_grad_looks_at_every_field_first(self, nested: bool) -> None:
        leaf = torch.ones(2, requires_grad=True)
        fields = {"made": leaf * 2, "last": torch.ones(1, requires_grad=True)}
        d = DeviceDict({"leaf": leaf, "id": 1, **({"n": fields} if nested else fields)})
        name = "n.made" if nested else "made"
        with pytest.raises(
            RuntimeError,
            match=rf"^'{re.escape(name)}' is not a leaf: it was computed from tensors that require grad; "
            r"detach\(\) it first$",
        ):
            d.requires_grad_(False)
        assert all(t.requires_grad for t in d._tensors() if t.is_floating_point())
        assert d.requires_grad_() is d, "True changes nothing of what is computed"
        assert not any(t.requires_grad for t in d.detach().requires_grad_(False)._tensors())

    def test_inference_tensors(self) -> None:
        with torch.inference_mode():
            made = torch.ones(2)
            count = torch.ones(2).long()
        d = DeviceDict({"x": torch.ones(2), "n": {"made": made}})
        fails(RuntimeError, r"^'n\.made' is an inference tensor, .*; clone\(\) it first$", d.requires_grad_)
        assert not d["x"].requires_grad and d.requires_grad_(False) is d
        assert DeviceDict({"x": torch.ones(2), "count": count}).requires_grad_()["x"].requires_grad
        with torch.inference_mode():
            assert d.requires_grad_()["x"].requires_grad

    @pytest.mark.parametrize(("make", "layout"), [
        (Tensor.to_sparse_csr, "sparse_csr"),
        (Tensor.to_sparse_csc, "sparse_csc"),
        (Tensor.to_sparse, "sparse_coo"),
        (Tensor.to_mkldnn, "mkldnn"),
    ])  # fmt: skip
    @pytest.mark.filterwarnings("ignore:Sparse")
    def test_share_memory_looks_at_every_field_first(self, make: Any, layout: str) -> None:
        d = DeviceDict({"x": torch.ones(2), "n": {"s": make(torch.eye(2))}, "z": torch.ones(3)})
        message = f"'n.s' is {layout}, which has no storage to be moved to shared memory; to_dense() it first"
        fails(RuntimeError, f"^{re.escape(message)}$", d.share_memory_)
        assert not d["x"].is_shared() and not d["z"].is_shared()
        assert d.drop(("n", "s")).share_memory_()["x"].is_shared()

    @pytest.mark.parametrize("empty", [torch.zeros(2, 0), torch.zeros(1, 0).expand(2, 0), torch.zeros(0).expand(2, 0)])
    def test_a_field_without_elements_is_not_expanded(self, empty: Tensor) -> None:
        strided = torch.as_strided(empty, (2, 0), (0, 1))  # as arrays of NumPy have it
        d = DeviceDict({"x": torch.zeros(2), "e": empty, "n": {"s": strided}})
        d.rows[0] = {"x": 1.0, "e": torch.zeros(0), "n": {"s": np.zeros(0, np.float32)}}
        d.add_(d.clone()).fill_(d.mul_(2).clone()).zero_()
        assert d["x"].tolist() == [0, 0] and d["e"].shape == d["n", "s"].shape == (2, 0)

    def test_record_stream_reaches_the_parts_of_a_sparse_tensor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[torch.layout] = []
        monkeypatch.setattr(Tensor, "record_stream", lambda self, _: seen.append(self.layout))
        DeviceDict({"x": torch.ones(2), "n": {"s": torch.eye(2).to_sparse()}}).record_stream(None)
        assert seen == [torch.strided] * 3


class Batch(TypedDeviceDict):
    name: Tensor | None = None
    other: Tensor | None = None


class Reentrant:
    """Calls a function of its own while it is being read, once, in each way in which a value can."""

    def __init__(self, write: Callable[[], Any]) -> None:
        self.write = write

    def once(self) -> None:
        write, self.write = self.write, lambda: None
        write()

    def encode(self, strings: Any) -> Tensor:
        self.once()
        return torch.zeros(len(strings))

    def codes(self, strings: Any) -> Mapping[str, Tensor]:
        return {"ids": self.encode(strings)}

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        self.once()
        return np.zeros(2)

    def items_of(self) -> Mapping[str, Any]:
        outer = self

        class Items(dict[str, Any]):
            def items(self) -> Any:
                outer.once()
                return super().items()

        return Items(name=torch.ones(1))


WAYS: dict[str, Callable[[DeviceDict[Any], Reentrant], Any]] = {
    "an encoder": lambda d, one: d.update({"name": "a"}),
    "an encoder, assigned": lambda d, one: d.__setitem__("name", "a"),
    "an encoder, setdefault": lambda d, one: d.setdefault("name", "a"),
    "an encoder, |=": lambda d, one: d.__ior__({"name": "a"}),
    "an encoder, a list": lambda d, one: d.update(name=["a", "b"]),
    "an encoder, in a nested dict": lambda d, one: d.update({"n": {"name": "a"}}),
    "an encoder, by a path": lambda d, one: d.__setitem__(("n", "name"), "a"),
    "an encoder of several tensors": lambda d, one: d.update({"codes": "a"}),
    "a mapping": lambda d, one: d.update({"n": one.items_of()}),
    "a mapping, assigned": lambda d, one: d.__setitem__("n", one.items_of()),
    "a mapping, by a path": lambda d, one: d.__setitem__(("n", "m"), one.items_of()),
}


def filled(write: Callable[[DeviceDict[Any]], Any]) -> tuple[DeviceDict[Any], Reentrant]:
    one = Reentrant(lambda: None)
    d: DeviceDict[Any] = DeviceDict(encoders={"name": one.encode, "codes": one.codes, "s": Vocabulary(["x", "y"])})
    one.write = lambda: write(d)
    return d, one


class TestWrittenToMeanwhile:
    @pytest.mark.parametrize("way", WAYS)
    def test_two_devices_never_meet(self, way: str) -> None:
        d, one = filled(lambda d: d.update({"other": torch.ones(1, device=SIM)}))
        with pytest.raises(
            DeviceMismatchError, match=r"^this DeviceDict was written to while '\w+' was being stored on"
        ):
            WAYS[way](d, one)
        check_invariants(d)
        assert list(d) == ["other"] and d.device == SIM

    @pytest.mark.parametrize("way", WAYS)
    def test_the_same_device_and_new_encoders_add_up(self, way: str) -> None:
        d, one = filled(lambda d: d.update(DeviceDict({"other": "y"}, encoders={"other": Vocabulary(["x", "y"])})))
        WAYS[way](d, one)
        check_invariants(d)
        assert d.device == torch.device("cpu") and d.decode("other") == "y" and len(d) == 2

    def test_what_is_kept_on_the_host_does_not_take_the_device_away(self) -> None:
        d: DeviceDict[Any] = DeviceDict(objects="keep")

        class Items(dict[str, Any]):
            def values(self) -> Any:
                d["other"] = torch.ones(1, device=SIM)
                return super().values()

        d["o"] = [Items(x=1)]  # looked through for tensors
        check_invariants(d)
        assert d.device == SIM

    def test_an_array_like_and_a_generator(self) -> None:
        d: DeviceDict[Any] = DeviceDict(objects="keep")

        def pairs() -> Iterator[Any]:
            yield "x", torch.ones(1)
            d["other"] = torch.ones(1, device=SIM)

        fails(DeviceMismatchError, r"^'x' is on cpu", lambda: d.update(pairs()))
        check_invariants(d)
        d = DeviceDict()
        one = Reentrant(lambda: d.update(other=torch.ones(1, device=SIM)))
        with pytest.raises(DeviceMismatchError, match="was written to while 'x'"):
            d["x"] = [np.ones(2), one]
        check_invariants(d)

    def test_a_typed_dict(self) -> None:
        one = Reentrant(lambda: None)
        d = Batch(encoders={"name": one.encode})
        one.write = lambda: d.__setitem__("other", torch.ones(1, device=SIM))
        with pytest.raises(
            DeviceMismatchError, match=r"^this Batch was written to while 'name' was being stored on cpu"
        ):
            d.name = "a"  # pyright: ignore[reportAttributeAccessIssue]
        check_invariants(d)
        assert list(d) == ["other"]


def test_a_dict_on_several_devices_takes_nothing_more() -> None:
    """A pytree function can put tensors of two devices into one dict. It is refused any tensor until it is moved."""
    made = iter([torch.zeros(1), torch.zeros(1, device="meta")])
    d = pytree.tree_map(lambda _: next(made), DeviceDict({"x": 1, "y": 2}))
    assert d.device is None
    before = dict(d)
    with pytest.raises(DeviceMismatchError) as told:
        d["z"] = torch.zeros(1)
    assert str(told.value) == "this DeviceDict has tensors on several devices; .to(device) it first"
    assert d.device is None and list(d) == list(before) and all(d[key] is before[key] for key in before)


class Odd(Tensor):
    """Takes a call of its own, which may fail."""


def _fields(value: int) -> dict[str, Any]:
    """Plain tensors of two dtypes, tensors that are written alone, and what is not written without rows and `fill_`."""
    return {
        "x": torch.full((4, 2), float(value)),
        "odd": torch.full((4,), float(value)).as_subclass(Odd),
        "n": {"i": torch.full((4,), value), "w": torch.full((4,), value, dtype=torch.uint16)},
        "z": torch.full((4, 2), float(value), requires_grad=True) * 1,
    }


NEW = object()
MODULES = tuple(f"{name}.py" for name in ("write", "row_assignment", "fill", "arithmetic"))


def _rows(index: Any, kept: Any) -> dict[str, Any]:
    return {**DeviceDict(_fields(1)).rows[index], "o": kept, "p": kept}


WRITES: dict[str, Callable[[Any], Any]] = {
    "a row": lambda d: d.rows.__setitem__(2, _rows(2, NEW)),
    "a slice": lambda d: d.rows.__setitem__(slice(1, 3), _rows(slice(1, 3), [NEW] * 2)),
    "indices": lambda d: d.rows.__setitem__([0, 2], _rows([0, 2], [NEW] * 2)),
    "fill_": lambda d: d.fill_(DeviceDict({**_fields(1), "o": [NEW] * 4, "p": [NEW] * 4}, objects="keep")),
    "copy_": lambda d: d.drop("o", "p").copy_(_fields(1)),
    "add_": lambda d: d.drop("o", "p", ("n", "w")).add_(DeviceDict(_fields(1)).drop(("n", "w"))),
    "sub_ a number": lambda d: d.drop("o", "p", ("n", "w")).sub_(1),
}


@pytest.mark.parametrize("risky", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_an_interrupt_between_any_two_lines_leaves_all_written_or_nothing(write: str, risky: bool) -> None:
    def run(stop: int) -> bool:
        d = DeviceDict({**_fields(0), "o": [None] * 4, "p": [None] * 4}, objects="keep")
        if not risky:
            d = d.detach()
            d["odd"] = d["odd"].as_subclass(Tensor).clone()
        lines, interrupted = 0, False

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal lines
            lines += event == "line" and frame.f_code.co_filename.endswith(MODULES)
            if lines == stop:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            WRITES[write](d)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(before)
            torch.set_grad_enabled(True)  # an interrupt just before a block of `no_grad` ends leaves it disabled
        without = ((), ("o", "p"), ("o", "p", ("n", "w")))[{"copy_": 1, "add_": 2, "sub_ a number": 2}.get(write, 0)]
        written = {
            NEW in value if isinstance(value, list) else bool(value.detach().to(torch.float32).any())
            for _, value in leaves(d.drop(*without))
        }
        assert len(written) == 1 and (interrupted or written == {True}), (stop, d.tolist())
        return interrupted

    stop = 1
    while run(stop):
        stop += 1
    assert stop > 20
