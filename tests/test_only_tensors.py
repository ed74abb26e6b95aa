"""``objects="keep"``: only tensors are tensors. Each kept value under each operation, against the value itself."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import re
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checks import check_invariants
from simulated import memory_left
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from tensordict_lite import DeviceDict, DeviceMismatchError, Ragged, TypedDeviceDict, cat, load, save, to_device
from tensordict_lite.tables import RowWriter, add_column, join_parts, load_parts

CPU, SIM = torch.device("cpu"), torch.device("sim", 0)
Pair = namedtuple("Pair", "first second")


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
    "array": np.arange(2),
    "0-d array": np.array(1.5, np.float32),
    "array of strings": np.array(["a", "b"]),
    "array of dates": TIMES.repeat(2),
    "NumPy scalar": np.float32(0.5),
    "complex": 1j,
    "bytes": b"a",
    "set": {1, 2},
    "path": Path("a"),
    "torch.Size": torch.Size([2, 3]),
    "dtype": torch.float16,
    "device": torch.device("cpu"),
    "range": range(2),
    "int keys": {1: "a"},
    "zone": ZONE,
}
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
    packed = pack_padded_sequence(rows(2, 3), torch.tensor([3, 2]), batch_first=True)
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


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ((rows(1),), "'k[0]'"),
        ([{"boxes": rows(1)}], "'k[0].boxes'"),
        ({1: (None, rows(1))}, "'k[1][1]'"),
        (Pair("a", rows(1)), "'k.second'"),
        (Slots([Frozen(rows(1))]), "'k.hidden[0].hidden'"),
        (OrderedDict([(0, rows(1))]), "'k[0]'"),
        (UserDict({0: rows(1)}), "'k[0]'"),
        ((Ragged(rows(1), [0, 1]),), "'k[0]'"),
        ((DeviceDict({"x": rows(1)}),), "'k[0]'"),
    ],
)
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
