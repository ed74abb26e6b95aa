"""``objects="keep"``: only tensors are tensors. Each kept value under each operation, against the value itself."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import re
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from checks import check_invariants, fails
from files import compiles
from ranks import on_ranks
from simulated import memory_left
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, default_collate

import tensordict_lite.distributed as d_
from tensordict_lite import (
    DeviceDict,
    DeviceMismatchError,
    JoinedRows,
    Ragged,
    TypedDeviceDict,
    Vocabulary,
    cat,
    collate,
    load,
    prefetch,
    save,
    stack,
    to_device,
    to_numpy,
)
from tensordict_lite.tables import RowWriter, add_column, join_parts, load_parts

CPU, SIM = torch.device("cpu"), torch.device("sim", 0)


class Pair(NamedTuple):
    first: Any
    second: Any


class Keep(DeviceDict[Any], objects="keep"):
    """At module level, as what is pickled must be."""


@dataclasses.dataclass
class Output:
    hidden: Any
    name: str = "a"


@dataclasses.dataclass(frozen=True)
class Frozen:
    hidden: Any
    name: str = "a"


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    hidden: Any
    name: str = "a"


@dataclasses.dataclass
class Started:
    hidden: Any
    start: dataclasses.InitVar[int] = 3
    first: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self, start: int) -> None:
        self.first = start


class NestedTensor:
    """As in DETR: `to` returns another object."""

    def __init__(self, tensors: Tensor) -> None:
        self.tensors = tensors

    def to(self, device: torch.device) -> NestedTensor:
        return type(self)(self.tensors.to(device))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NestedTensor) and torch.equal(self.tensors.cpu(), other.tensors.cpu())

    __hash__ = None  # type: ignore[assignment]


class InPlace(NestedTensor):
    """As `BatchEncoding`: `to` changes the object itself."""

    def to(self, device: torch.device) -> Any:
        self.tensors = self.tensors.to(device)
        return self


class Silent(InPlace):
    """`to` returns nothing."""

    def to(self, device: torch.device) -> Any:
        super().to(device)


class Stuck:
    def to(self, device: torch.device) -> Any:
        raise LookupError("stuck")


class Zone:
    """A class whose `to` is for something else, as that of units and of time zones."""

    def to(self, unit: str) -> Any:
        raise AssertionError(unit)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Zone)

    __hash__ = None  # type: ignore[assignment]


class Unsigned(Zone):
    """`to` is a function of C without a signature."""

    to: Any = {}.pop


ZONE, MODULE, TIMES = Zone(), nn.Linear(1, 1), np.array(["2020-01-01"], "M8[D]")


def rows(*shape: int, device: torch.device = CPU) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape).to(device)


PLAIN: dict[str, Any] = {
    "size": (480, 640),
    "split": "train",
    "none": None,
    "int": 7,
    "bool": True,
    "float": 0.5,
    "ids": [1, 2],
    "deep": ({"a": [None, (1, "x")]}, []),
}
"""Kept values that JSON holds."""
OPAQUE: dict[str, Any] = {
    "array": np.arange(2), "0-d array": np.array(1.5, np.float32), "array of strings": np.array(["a", "b"]),
    "array of dates": TIMES.repeat(2), "NumPy scalar": np.float32(0.5), "complex": 1j, "bytes": b"a", "set": {1, 2},
    "path": Path("a"), "torch.Size": torch.Size([2, 3]), "dtype": torch.float16, "device": torch.device("cpu"),
    "range": range(2), "int keys": {1: "a"}, "zone": ZONE, "unsigned": Unsigned(),
}  # fmt: skip
"""Kept values without tensors that JSON cannot hold."""


def holding(device: torch.device = CPU) -> dict[str, Any]:
    """Kept values with tensors on a device."""

    def t(*shape: int) -> Tensor:
        return rows(*shape, device=device)

    shared = [t(2)]
    return {
        "tuple": (t(2, 3), t(2, 3), None),
        "list": [t(3), t(1)],
        "targets": [{"boxes": t(2, 4), "name": "a"}, {"boxes": t(0, 4), "name": "b"}],
        "named tuple": Pair(t(2), "a"),
        "dataclass": Output(t(2)),
        "frozen": Frozen((t(2), 1)),
        "slots": Slots(t(2)),
        "InitVar": Started(t(2)),
        "int keys of tensors": {0: t(2), 1: None},
        "ordered": OrderedDict([(1, t(2)), (0, t(1))]),
        "default": defaultdict(list, {1: [t(2)]}),
        "user dict": UserDict({1: t(2)}),
        "mixed": ({"a": [Output(Pair({3: Frozen([t(1)])}, "b")), "c"]},),
        "shared": (shared, shared),
        "ragged": (Ragged(t(3), torch.tensor([0, 1, 3], device=device)),),
        "dict": (DeviceDict({"x": t(2), "n": {"y": t(1)}}),),
    }


def moving(device: torch.device = CPU) -> dict[str, Any]:
    """Kept objects that move themselves."""
    packed: Any = pack_padded_sequence(rows(2, 3), torch.tensor([3, 2]), batch_first=True)
    return {
        "PackedSequence": packed if device == CPU else packed.to(device),
        "NestedTensor": NestedTensor(rows(2, device=device)),
        "in place": InPlace(rows(2, device=device)),
        "silent": Silent(rows(2, device=device)),
        "in a container": (InPlace(rows(2, device=device)), {1: Silent(rows(1, device=device))}),
    }


def given(device: torch.device = CPU) -> dict[str, Any]:
    return {**PLAIN, **OPAQUE, **holding(device), **moving(device)}


def parts(value: Any) -> Iterator[Any]:
    """A value, and everything in it."""
    yield value
    if isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, (list, tuple)):
        inside = list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, Ragged):
        inside = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, Ragged):
        inside = [value.values, value.offsets]
    else:
        inside = [value.tensors] if isinstance(value, NestedTensor) else []
    for one in inside:
        yield from parts(one)


def same(got: Any, expected: Any) -> None:
    """The same types and equal values, at every depth."""
    ours, theirs = list(parts(got)), list(parts(expected))
    assert list(map(type, ours)) == list(map(type, theirs))
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(one, Tensor):
            assert one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
        elif isinstance(one, np.ndarray):
            assert one.dtype == other.dtype and np.array_equal(one, other)
        elif isinstance(one, Mapping):
            assert list(one) == list(other)
        elif not isinstance(one, (list, tuple, Ragged)) and not dataclasses.is_dataclass(one):
            assert one == other


def devices(value: Any) -> set[torch.device]:
    """The devices of the tensors in a value."""
    value = value.data if isinstance(value, PackedSequence) else value  # its batch_sizes stay on the CPU
    return {one.device for one in parts(value) if isinstance(one, Tensor)}


def torch_saved(d: Any, weights_only: bool = False) -> Any:
    file = io.BytesIO()
    torch.save(d, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda d: d,
    "to a device": lambda d: d.to(SIM),
    "to a device and back": lambda d: d.to(SIM, non_blocking=True).to("cpu"),
    "to_ a device": lambda d: d.copy().to_(SIM),
    "cpu": lambda d: d.to(SIM).cpu(),
    "copy=True": lambda d: d.to("cpu", copy=True),
    "clone": lambda d: d.clone(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "detach": lambda d: d.detach(),
    "contiguous": lambda d: d.contiguous(),
    "cast and back": lambda d: d.double().float(),
    "pack": lambda d: d.pack(),
    "map": lambda d: d.map(lambda t: t),
    "select": lambda d: d.select(*d),
    "drop": lambda d: d.drop(),
    "merge": lambda d: d | {},
    "rebuild": lambda d: type(d)(dict(d)),
    "rebuild on a device": lambda d: type(d)(dict(d), device=SIM),
    "move at the insert": lambda d: Keep(on_mismatch="move", device=SIM) | d,
    "flatten": lambda d: Keep.unflatten(d.flatten()),
    "pickle 2": lambda d: pickle.loads(pickle.dumps(d, 2)),
    "pickle 4": lambda d: pickle.loads(pickle.dumps(d, 4)),
    "pickle 5": lambda d: pickle.loads(pickle.dumps(d, 5)),
    "to a process": lambda d: pickle.loads(ForkingPickler.dumps(d)),
    "torch.save": torch_saved,
    "fill": lambda d: d.clone().fill_(d),
}
ON_DEVICE = {"to a device", "to_ a device", "rebuild on a device", "move at the insert"}
NAMES = list(given())


@pytest.mark.filterwarnings("ignore:In the future .np.object.:FutureWarning")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_kept_value_reads_back_as_it_was(operation: str) -> None:
    for name, value in given().items():
        untouched = [(one, id(one)) for one in parts(value)]
        before = copy.deepcopy(value)
        for path in (("k",), ("n", "k")):
            d = Keep({"x": rows(2), **({"k": value} if len(path) == 1 else {"n": {"k": value}})})
            assert d[path] is value, name
            done = OPERATIONS[operation](d)
            assert type(done) is Keep
            same(done[path], value)
            expected = SIM if operation in ON_DEVICE else CPU
            assert devices(done[path]) <= {expected}, name
            check_invariants(done)
            assert done.cpu() == d, name
        assert [(one, id(one)) for one in parts(value)] == untouched, "neither the value nor a part of it changed"
        same(value, before)


@pytest.mark.parametrize(("value", "path"), [
    ((rows(1),), "'k[0]'"),
    ([{"boxes": rows(1)}], "'k[0].boxes'"),
    ({1: (None, rows(1))}, "'k[1][1]'"),
    (Pair("a", rows(1)), "'k.second'"),
    (Slots([Frozen(rows(1))]), "'k.hidden[0].hidden'"),
    (OrderedDict([(0, rows(1))]), "'k[0]'"),
    (UserDict({0: rows(1)}), "'k[0]'"),
    ((Ragged(rows(1), [0, 1]),), "'k[0]'"),
    ((DeviceDict({"x": rows(1)}),), "'k[0]'"),
])  # fmt: skip
def test_tensors_in_kept_values_obey_the_device_rule(value: Any, path: str) -> None:
    d = Keep({"x": rows(1, device=SIM), "n": {"k": None}})
    before = dict(d)
    message = f"^{re.escape(path)} is on cpu, this DeviceDict is on sim:0; move it with "
    for insert in (
        lambda: d.update({"y": 1, "k": value}),
        lambda: d.setdefault("k", value),
        lambda: d.__ior__({"k": value}),
        lambda: d | {"k": value},
        lambda: Keep({"x": rows(1, device=SIM), "y": rows(1, device=SIM), "k": value}),
    ):
        with pytest.raises(DeviceMismatchError, match=message):
            insert()
    with pytest.raises(DeviceMismatchError, match=message.replace("'k", "'n.k")):
        d["n", "k"] = value
    assert dict(d) == before
    with pytest.raises(DeviceMismatchError, match=r"^'k\[1\]' is on sim:0, this DeviceDict is on cpu; "):
        Keep({"k": (rows(1), rows(1, device=SIM))})
    assert Keep({"k": to_device(value, SIM)}).device == SIM, "the device of the first tensor, wherever it is"


def test_bad_values() -> None:
    """Cycles and generators."""
    loop: list[Any] = [rows(1)]
    loop.append(loop)
    with pytest.raises(ValueError, match=r"^'n.k': expected a container that does not hold itself, got a list that"):
        Keep({"n": {"k": loop}})

    def one() -> Iterator[int]:
        yield 1

    made = one()
    d = Keep({"x": rows(2), "k": made}).to(SIM).half().clone()
    assert d["k"] is made and d.rows[0]["k"] is made and repr(d) and next(made) == 1


@pytest.mark.parametrize("value", [Stuck(), [{"mask": Stuck()}]])
@pytest.mark.parametrize("path", [("k",), ("n", "k")])
def test_an_object_whose_to_raises(path: tuple[str, ...], value: Any) -> None:
    d = Keep({"x": rows(2)})
    d[path] = value
    before = dict(d.flatten())
    moves = Keep(on_mismatch="move", device=SIM)
    for call in (
        lambda: d.to(SIM),
        lambda: d.to_(SIM),
        lambda: Keep(dict(d), device=SIM),
        lambda: moves.update(dict(d)),
    ):
        with pytest.raises(LookupError) as caught:
            call()
        said = [*getattr(caught.value, "__notes__", []), str(caught.value)]
        assert any(f"the kept value is {'.'.join(path)!r}" in note for note in said)
    assert d.flatten() == before and d.device == CPU and d["x"].is_cpu and not moves
    assert d.half()[path] == value, "a cast calls no `to`"


def test_to_in_place_is_all_or_nothing() -> None:
    class Rows(TypedDeviceDict, objects="keep"):
        x: Tensor
        split: str
        hidden: tuple[Tensor, ...]

    d = Rows(x=rows(2), split="train", hidden=(rows(2), rows(3)))
    hidden = d.hidden
    assert d.to_(SIM, torch.float64) is d and d.device == SIM and d.x.dtype == torch.float64
    assert [h.device for h in d.hidden] == [SIM, SIM] and d.split == "train" and hidden[0].is_cpu
    nested: Any = Keep({"n": {"k": (rows(2),), "r": Ragged(rows(3), [0, 1, 3])}, "x": rows(2)})
    inner = nested["n"]
    assert nested.to_(SIM) is nested and nested["n"] is inner and inner.device == SIM
    check_invariants(nested)
    before = {key: id(value) for key, value in nested.flatten().items()}
    with memory_left(8), pytest.raises(torch.OutOfMemoryError):
        nested.to_(torch.float64)
    fails(TypeError, r"3\.5", lambda: nested.to_(3.5))
    assert {key: id(value) for key, value in nested.flatten().items()} == before and inner["r"].dtype == torch.float32


def test_a_row_write_makes_a_new_list() -> None:
    """The list of the caller, and the list of a clone, stay as they are."""
    names, scores = ["a", "b"], np.array([1, 2])
    d = Keep({"x": rows(2), "names": names, "scores": scores, "size": (4, 5)})
    other = d.clone()
    d.rows[0] = {"x": 7, "names": "c", "scores": 8, "size": (4, 5)}
    d.rows[[1]] = {"x": [7], "names": ["d"], "scores": [9], "size": (4, 5)}
    assert d["names"] == ["c", "d"] and d["scores"].tolist() == [8, 9]
    assert names == ["a", "b"] and scores.tolist() == [1, 2] and other["names"] == ["a", "b"]
    with pytest.raises(ValueError, match=r"^'scores': could not broadcast input array"):
        d.rows[0:2] = {"x": [1, 2], "names": ["e", "f"], "scores": np.zeros((2, 3)), "size": (4, 5)}
    message = "'size': expected the kept value of all rows, (4, 5), got (6, 7); rows cannot change it, so replace the"
    with pytest.raises(ValueError, match=f"^{re.escape(message)} whole field$"):
        d.rows[0] = {"x": 1, "names": "e", "scores": 1, "size": (6, 7)}
    assert d["x"].tolist() == [7, 7] and d["names"] == ["c", "d"]


@pytest.mark.parametrize("name", PLAIN)
def test_files_and_tables_carry_what_json_holds(name: str, tmp_path: Path) -> None:
    value = PLAIN[name]
    d = Keep({"x": rows(2), "n": {"k": value}})
    save(d, tmp_path / "file")
    again = load(tmp_path / "file")
    same(again["n", "k"], value)
    same(torch_saved(d, weights_only=True)["n", "k"], value)
    assert again == d == Keep.load(tmp_path / "file")
    with pytest.raises(ValueError, match=r"'n\.k' is a kept value; load it into a class with objects=\"keep\""):
        Plain.load(tmp_path / "file")
    if isinstance(value, list):
        with pytest.raises(TypeError, match=r"^'n\.k': expected a column or one value for all rows, got a list, with"):
            RowWriter(tmp_path / "table", like=d)
        return
    for part in range(2):
        with RowWriter(tmp_path / "parts", like=d, part=part, parts=2) as writer:
            writer.write(d)
            writer.write({"x": 5.0, "n": {"k": value}})
            message = f"'n.k': expected the kept value of this table, {value!r}, got 'other'; "
            with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
                writer.write({"x": 5.0, "n": {"k": "other"}})
    table: Any = load(min((tmp_path / "parts").iterdir()))
    same(table["n", "k"], value)
    assert table["x"].tolist() == [0, 1, 5] and table.rows[[2, 0]]["n", "k"] == value
    joined = load_parts(tmp_path / "parts")
    assert len(joined) == 6 and joined[[5, 0]]["n", "k"] == value
    join_parts(tmp_path / "parts", tmp_path / "whole")
    add_column(tmp_path / "whole", "y", [rows(6)])
    with RowWriter(tmp_path / "whole", append=True) as writer:
        writer.write(cat([load(tmp_path / "whole")]))
    assert len(load(tmp_path / "whole").rows) == 12 and load(tmp_path / "whole")["n", "k"] == value


class Plain(DeviceDict[Any], objects="error"):
    pass


def test_files_and_tables_name_what_json_does_not_hold(tmp_path: Path) -> None:
    for name, value in {**OPAQUE, **holding(), **moving(), "huge": 10**5000}.items():
        if name == "ragged":
            continue
        d = Keep({"x": rows(2), "n": {"k": value}})
        for call in (lambda: save(d, tmp_path / "f"), lambda: RowWriter(tmp_path / "t", like=d)):  # noqa: B023
            with pytest.raises(TypeError, match=r"^'n\.k': expected (what JSON can hold|a column or one value)"):
                call()
    message = "'a', 'n.b': expected what JSON can hold, got a set, a list with float32[1]; d.drop('a', ('n', 'b'))"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}.save"):
        save(Keep({"a": {1}, "n": {"b": [rows(1)]}}), tmp_path / "f")
    assert not list(tmp_path.iterdir())


def test_what_reaches_tensors_inside() -> None:
    d: Any = Keep({"x": rows(2), "n": {"k": ({"a": [Frozen((rows(2, 2), 1))]}, Pair(rows(1), "b"))}})

    def inside(one: Any) -> list[Any]:
        return [one["n"]["k"][0]["a"][0].hidden[0], one["n"]["k"][1].first]

    assert [type(one) for one in inside(d.numpy())] == [np.ndarray] * 2 and type(d.numpy()["n"]["k"][1]) is Pair
    assert all(np.shares_memory(a, b.numpy()) for a, b in zip(inside(d.numpy()), inside(d), strict=True))
    assert not any(np.shares_memory(a, b.numpy()) for a, b in zip(inside(d.numpy(copy=True)), inside(d), strict=True))
    assert inside(to_numpy({"n": {"k": d["n", "k"]}}))[0].tolist() == [[0, 1], [2, 3]]
    fails(TypeError, r"^'n\.k': NumPy has no bfloat16; call \.float\(\) first$", lambda: d.bfloat16().drop("x").numpy())
    needs = d.clone().requires_grad_()
    assert all(one.requires_grad for one in inside(needs)) and not any(one.requires_grad for one in inside(d))
    assert not any(one.requires_grad for one in inside(needs.detach())) and inside(needs)[0].requires_grad
    moved = needs.to(SIM)
    inside(moved)[0].sum().backward()
    assert inside(needs)[0].grad is not None, "autograd records the copy"
    assert all(one.is_shared() for one in inside(d.clone().share_memory_())) and not inside(d)[0].is_shared()
    assert [one.dtype for one in inside(d.half())] == [torch.float16] * 2
    assert d.nbytes == 8 + 16 + 4
    used: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "pin_memory", lambda tensor: used.append(tensor) or tensor)
        patch.setattr(Tensor, "record_stream", lambda tensor, stream: used.append(tensor))
        patch.setattr(Tensor, "is_pinned", lambda tensor: False)
        d.pin_memory()
        assert [id(one) for one in used] == [id(one) for one in (d["x"], *inside(d))] and not d.is_pinned()
        used.clear()
        d.record_stream(None)
        assert len(used) == 3
    sparse = Keep({"x": rows(2), "n": {"k": (rows(2), torch.eye(2).to_sparse())}})
    with pytest.raises(RuntimeError, match=r"^'n\.k' is sparse_coo, which has no storage to be moved to shared memory"):
        sparse.share_memory_()
    assert not sparse["x"].is_shared()


def test_what_leaves_kept_values_alone() -> None:
    hidden, names = (rows(2),), ["a", "b"]
    d: Any = Keep({"x": rows(2), "k": hidden, "names": names, "score": 3})
    made: list[Any] = [d.map(torch.exp), d.pack(), d.select("k", "names"), d.clone().add_(d)]
    for one in [*made, torch.where(rows(2) > 0, d, d)]:
        assert one["k"][0].tolist() == [0, 1] and one["names"] == names
    assert d.pack()["k"] is hidden and d.pack().is_packed and d.map(torch.exp)["score"] == 3


def test_rows_and_joins() -> None:
    given: dict[str, Any] = {"names": ["a", "b", "c"], "scores": np.arange(3), "size": (4, 5), "tag": "abc", "o": ZONE}
    d: Any = Keep({"x": rows(3), "targets": [{"boxes": rows(n)} for n in range(3)], **given})
    assert len(d.rows) == 3 and [row["names"] for row in d.rows] == given["names"]
    for index, at in ((1, 1), (slice(1, 3), slice(1, 3)), ([2, 0], [2, 0]), (rows(3) > 0, [1, 2])):
        part = d.rows[index]
        expected = [given["names"][i] for i in at] if isinstance(at, list) else given["names"][at]
        assert part["names"] == expected and part["scores"].tolist() == np.arange(3)[at].tolist()
        assert all(part[key] is given[key] for key in ("size", "tag", "o"))
    assert d.rows[2]["targets"]["boxes"].tolist() == [0, 1]
    assert d.rows.sort_by("x", descending=True)["names"] == ["c", "b", "a"]
    joined = cat([d, d.rows[:1]])
    assert joined["names"] == ["a", "b", "c", "a"] and joined["scores"].tolist() == [0, 1, 2, 0]
    assert joined["size"] == (4, 5) and len(joined["targets"]) == 4
    assert JoinedRows([d, d])[[5, 0]]["names"] == ["c", "a"]
    for key, value, shown in (("size", (4, 6), r"\(4, 6\)"), ("tag", "x", "'x'"), ("o", None, "None")):
        with pytest.raises(ValueError, match=rf"^'{key}': expected one kept value in all dicts, got {shown} in dict 1"):
            cat([d, d | {key: value}])
    pair = Keep({"x": rows(1), "k": (rows(1), PackedSequence(rows(1), torch.ones(1).long()))})
    assert cat([pair, pair.clone()])["k"][0].tolist() == [0], "equal tensors in kept values"
    with pytest.raises(ValueError, match=r"^'k': expected one kept value in all dicts, got \(tensor\(\[1\.\]\), "):
        cat([pair, pair | {"k": (rows(1) + 1, pair["k"][1])}])
    assert stack([d, d])["size"] == [(4, 5), (4, 5)]


def test_collate_makes_lists() -> None:
    def sample(i: int) -> dict[str, Any]:
        return {
            "x": rows(2), "i": i, "f": 0.5, "b": True, "array": np.arange(2), "scalar": np.float32(i), "n": {"y": i},
            "path": Path("a"), "size": (4, i), "none": None, "name": "a" * i, "ids": [1] * i, "label": "ab"[i],
            "hidden": (rows(1), rows(2)), "maybe": i or None, "date": np.datetime64("2020-01-01"), "o": ZONE,
        }  # fmt: skip

    encoders = {"label": Vocabulary(["a", "b"])}
    for batch in (
        collate([sample(0), sample(1)], objects="keep", encoders=encoders),
        default_collate([Keep(sample(i), encoders=encoders) for i in range(2)]),
    ):
        listed = {key: [sample(0)[key], sample(1)[key]] for key, value in batch.items() if type(value) is list}
        assert set(listed) == {"path", "size", "none", "name", "ids", "hidden", "maybe", "date", "o"}
        same({key: batch[key] for key in listed}, listed)
        plain = ("x", "i", "f", "b", "array", "scalar")
        expected = default_collate([{key: sample(i)[key] for key in plain} for i in range(2)])
        assert all(torch.equal(batch[key].to(value.dtype), value) for key, value in expected.items())
        assert batch["n", "y"].tolist() == [0, 1] and batch["label"].tolist() == [0, 1] and len(batch.rows) == 2
        assert batch.rows[1]["size"] == (4, 1) and batch.rows[1]["hidden"][1].tolist() == [0, 1]


class Samples:
    """A dataset of what pickle takes."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> Any:
        return {"x": rows(2), "n": given()}


def whole(samples: list[Any]) -> Any:
    return Keep(samples[0])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_through_workers_to_a_device(method: str) -> None:
    samples: Any = Samples()
    loader = DataLoader(samples, 2, num_workers=1, multiprocessing_context=method, collate_fn=whole)
    (batch,) = loader
    expected = Keep(Samples()[0])
    check_invariants(batch)
    (moved,) = prefetch(loader, SIM)
    check_invariants(moved)
    for name, value in expected["n"].items():
        same(batch["n", name], value)
        same(moved["n", name], value)
        assert devices(moved["n", name]) <= {SIM}


class Model(nn.Module):
    def forward(self, d: Any) -> Any:
        scale = 2 if d["split"] == "train" else 3
        return Keep({"y": d["x"] * scale, "hidden": (d["hidden"][0] + 1,), "split": d["split"], "size": d["size"]})


COMPILED: dict[str, Callable[[Any], Any]] = {
    "a model": Model(),
    "to": lambda d: d.to("cpu", torch.float64),
    "to_": lambda d: d.copy().to_(torch.float64),
    "copies": lambda d: d.to("cpu", copy=True).clone().detach(),
    "map": lambda d: d.map(lambda t: t + 1).select("x", "split"),
    "insert": lambda d: d | {"y": d["x"] + d["size"][0], "split": "test", "hidden": (d["x"],)},
    "dataclass": lambda d: Keep({"o": Output(d["x"] + 1)}).half(),
    "rows": lambda d: d.rows[:1],
}


@compiles
@pytest.mark.parametrize("name", COMPILED)
def test_in_compiled_functions(name: str) -> None:
    d = Keep({"x": rows(2), "hidden": (rows(2), rows(3)), "split": "train", "size": (4, 5), "n": {"k": None}})
    function: Any = torch.compile(COMPILED[name], fullgraph=True, backend="eager")
    made = function(d)
    assert type(made) is Keep and made == COMPILED[name](d)
    check_invariants(made)


@compiles
def test_in_pytree_and_export() -> None:
    d: Any = Keep({"x": rows(2), "hidden": (rows(2), [rows(3)]), "split": "train", "size": (4, 5)})
    leaves = pytree.tree_leaves(d)
    assert [id(one) for one in leaves if isinstance(one, Tensor)] == [
        id(one) for one in (d["x"], d["hidden"][0], d["hidden"][1][0])
    ]
    assert [one for one in leaves if not isinstance(one, Tensor)] == ["train", 4, 5]
    moved = pytree.tree_map_only(Tensor, lambda t: t.to(SIM), d)
    assert moved.device == SIM and moved["split"] == "train" and moved.cpu() == d
    expected = Model()(d)
    assert torch.export.export(Model(), (d,)).module()(d) == expected


class Declared(TypedDeviceDict, objects="keep"):
    image: Tensor
    split: str
    size: tuple[int, int]
    hidden: tuple[Tensor, ...]
    path: Path | None = None


def test_typed_classes_declare_any_class() -> None:
    given: dict[str, Any] = {"image": [1.0, 2.0], "split": "train", "size": (4, 5), "hidden": (rows(1),)}
    d = Declared(**given)
    assert d.image.tolist() == [1, 2] and d.split == "train" and d.size == (4, 5) and "path" not in d
    assert d.to(SIM).hidden[0].device == SIM and pickle.loads(pickle.dumps(d)) == d == Declared.from_dict(given)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"split": 3}, "Declared.split: expected str, got an int"),
        ({"split": rows(1)}, "Declared.split: expected str, got float32[1]"),
        ({"size": [4, 5]}, "Declared.size: expected tuple, got a list"),
        ({"hidden": [rows(1)]}, "Declared.hidden: expected tuple, got a list"),
        ({"path": "a"}, "Declared.path: expected Path, got a str"),
    ]
    for change, got in changes:
        with pytest.raises(TypeError, match=f"^{re.escape(got)}"):
            Declared(**{**given, **change})
        with pytest.raises(TypeError, match=f"^{re.escape(got)}"):
            d.update(change)
    with pytest.raises(DeviceMismatchError, match=r"^'hidden\[0\]' is on sim:0, this Declared is on cpu; |hidden\[0\]"):
        d["hidden"] = (rows(1, device=SIM),)
    batch = collate([{**given, "image": rows(2)}] * 2, cls=Declared)
    assert batch.split == ["train", "train"] and batch.rows[0].split == "train" and batch.rows[1].hidden[0].dim() == 1


def test_outputs_of_transformers() -> None:
    tokens: Any = pytest.importorskip("transformers.tokenization_utils_base")
    outputs: Any = pytest.importorskip("transformers.modeling_outputs")
    encoding = tokens.BatchEncoding({"ids": rows(2), "mask": rows(2)})
    output = outputs.BaseModelOutput(last_hidden_state=rows(2), hidden_states=(rows(1), rows(2)))
    d = Keep({"x": rows(2), "encoding": encoding, "output": output, "k": [{"a": encoding}, output]})
    assert d["encoding"] is encoding and d["output"] is output
    moved = d.to(SIM)
    for one in (moved["encoding"], moved["k"][0]["a"]):
        assert type(one) is type(encoding) and one["mask"].device == SIM
    for one in (moved["output"], moved["k"][1]):
        assert type(one) is type(output) and one.hidden_states[1].device == one["last_hidden_state"].device == SIM
        assert one.last_hidden_state.device == SIM
    assert encoding["ids"].is_cpu and output.hidden_states[0].is_cpu and moved.cpu() == d
    assert pickle.loads(pickle.dumps(d)) == d == copy.deepcopy(d)


def kept_on_ranks(rank: int) -> None:
    d: Any = Keep({"x": rows(2) + rank, "n": {**PLAIN, "names": [f"a{rank}", "b"]}})
    first = Keep({"x": rows(2), "n": {**PLAIN, "names": ["a0", "b"]}})
    received: Any = d_.broadcast(d)
    for name, value in received["n"].items():
        same(value, first["n", name])
    gathered = d_.all_gather(d)
    assert [one["n", "names"][0] for one in gathered] == ["a0", "a1"] and gathered[0] == first
    if rank == 0:
        d_.send(d, 1)
    else:
        assert d_.recv(0, cls=Keep) == first
    tensors = Keep({"x": rows(2), "n": {"hidden": (rows(1),)}})
    with pytest.raises(
        RuntimeError,
        match=rf"^rank {rank}: rank 1 has TypeError: 'n.hidden': expected what JSON can hold, got a tuple with "
        r"float32\[1\]; drop it first, d.drop\(\('n', 'hidden'\)\)$",
    ):
        d_.all_gather(tensors if rank else d)


@pytest.mark.ranks
def test_between_ranks() -> None:
    on_ranks(kept_on_ranks)


def test_find_leaves_tensors_in_kept_values_alone() -> None:
    d = DeviceDict({"x": torch.ones(2), "h": (torch.tensor([torch.nan]),)}, objects="keep")
    assert d.find(torch.isnan) == {} and d.find(lambda t: t == 1)["x"].tolist() == [0, 1]
