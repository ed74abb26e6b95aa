"""`to_device` and `to_numpy` for every kind of container."""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Iterator, MutableMapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import simulated
import torch
from checks import check_invariants, fails
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree as pytree

from tensordict_lite import DeviceDict, to_device, to_numpy

Pair = namedtuple("Pair", ["a", "b"])
SIM = simulated.SIM


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


@dataclasses.dataclass
class Output(OrderedDict):
    """The form of transformers' model outputs: a dict whose items are attributes too."""

    x: Any = None

    def __post_init__(self) -> None:
        self["x"] = self.x


class Typed(NamedTuple):
    a: Any
    b: Any


class SubPair(Pair):
    pass


class MyList(list):
    pass


class MyDict(dict):
    pass


@dataclasses.dataclass
class Data:
    a: Any
    b: Any
    made: Any = dataclasses.field(init=False, default=None)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: Any
    b: Any


class Registered:
    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


pytree.register_pytree_node(Registered, lambda r: ([r.a, r.b], None), lambda leaves, _: Registered(*leaves))

MAKE: dict[str, Any] = {
    "dict": lambda a, b: {"a": a, "b": b},
    "int keys": lambda a, b: {1: a, "b": b},
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
    "namedtuple": Pair,
    "NamedTuple": Typed,
    "namedtuple subclass": SubPair,
    "dataclass": Data,
    "frozen dataclass": Frozen,
    "OrderedDict": lambda a, b: OrderedDict(a=a, b=b),
    "defaultdict": lambda a, b: defaultdict(int, a=a, b=b),
    "deque": lambda a, b: deque([a, b]),
    "UserDict": lambda a, b: UserDict(a=a, b=b),
    "mapping proxy": lambda a, b: MappingProxyType({"a": a, "b": b}),
    "list subclass": lambda a, b: MyList([a, b]),
    "dict subclass": lambda a, b: MyDict(a=a, b=b),
    "registered": Registered,
    "nested": lambda a, b: {"x": [({"a": a},), Data(a, [b])], "b": b},
}


def parts(obj: Any) -> list[Any]:
    """Every leaf of any of the above."""
    if isinstance(obj, (list, tuple, deque)):
        return [leaf for item in obj for leaf in parts(item)]
    if isinstance(obj, (dict, UserDict, MappingProxyType)):
        return [leaf for item in obj.values() for leaf in parts(item)]
    if dataclasses.is_dataclass(obj):
        return [leaf for f in dataclasses.fields(obj) for leaf in parts(getattr(obj, f.name))]
    return [obj.a, obj.b] if isinstance(obj, Registered) else [obj]


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_containers_are_kept_and_the_input_is_not_changed(make: Any, device: torch.device) -> None:
    tensor, other = torch.arange(3.0), object()
    obj = make(tensor, other)
    moved = to_device(obj, device)
    assert type(moved) is type(obj) and moved is not obj
    for leaf, source in zip(parts(moved), parts(obj), strict=True):
        if isinstance(source, torch.Tensor):
            assert source is tensor and leaf.device == device and leaf.tolist() == [0, 1, 2]
        else:
            assert leaf is source
    arrays = to_numpy(moved)
    assert type(arrays) is type(obj)
    assert any(isinstance(leaf, np.ndarray) and leaf.tolist() == [0, 1, 2] for leaf in parts(arrays))
    same = to_device(obj, "cpu")
    assert same is not obj and next(leaf for leaf in parts(same) if leaf is tensor) is tensor


@pytest.mark.parametrize(
    "leaf", [None, "text", 3, 1.5, {1, 2}, b"x", torch.nn.Linear(1, 1), range(3), DeviceDict, Data]
)
def test_what_is_no_container_of_tensors_is_handed_on(leaf: Any) -> None:
    assert to_device(leaf, "meta") is leaf and to_device([leaf], "meta")[0] is leaf and to_numpy([leaf])[0] is leaf


def test_a_tensor_alone(device: torch.device) -> None:
    t = torch.ones(2)
    assert to_device(t, device).device == device and to_device(t, "cpu") is t
    assert to_numpy(t).tolist() == [1.0, 1.0] and to_numpy(torch.ones(1, requires_grad=True)).tolist() == [1.0]


def test_device_dicts_inside(device: torch.device) -> None:
    d = DeviceDict({"x": torch.ones(1), "n": {"e": {}}, "o": None}, objects="keep")
    moved = to_device([d, DeviceDict()], device)
    check_invariants(moved[0])
    assert moved[0].device == moved[0]["n", "e"].device == moved[1].device == device and d.device == torch.device("cpu")
    arrays = to_numpy(moved)
    assert type(arrays[0]) is dict and arrays[0]["x"].tolist() == [1.0] and arrays[0]["n"] == {"e": {}}


def test_small_tensors_are_copied_together_wherever_they_are(copies: Any) -> None:
    t = [torch.ones(2), {"x": torch.ones(1), "d": DeviceDict({"y": 1})}]
    moved = to_device(t, "sim")
    assert copies == {"h2d": 1}
    copies.clear()
    to_device(moved, "sim:0")
    assert not copies


def test_a_packed_sequence_keeps_its_batch_sizes_on_the_cpu(device: torch.device) -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    moved = to_device({"p": packed}, device)["p"]
    assert moved.data.device == device and moved.batch_sizes.device.type == "cpu"
    assert to_numpy([packed])[0] is not None


def test_numpy_does_not_have_everything() -> None:
    with pytest.raises(TypeError, match=r"^NumPy has no bfloat16; call \.float\(\) first$"):
        to_numpy([torch.ones(1, dtype=torch.bfloat16)])
    with pytest.raises(TypeError, match=r"^'x': NumPy has no bfloat16"):
        to_numpy([DeviceDict({"x": torch.ones(1, dtype=torch.bfloat16)})])


def test_an_unknown_device() -> None:
    fails(RuntimeError, "nonsense", lambda: to_device([], "nonsense"))


def test_packed_dicts_keep_their_ties_and_the_result_is_always_new(copies: Any) -> None:
    packed = DeviceDict({"a": [1.0], "b": [2.0]}).pack()
    moved = to_device([packed, packed, packed["a"]], "sim")
    assert copies == {"h2d": 1} and moved[0]["a"] is moved[1]["a"] is moved[2]  # pyright: ignore[reportArgumentType]
    here = to_device({"p": packed}, "cpu")["p"]
    assert here is not packed and here["a"] is packed["a"]


class TestOddContainers:
    def test_a_mapping_with_its_own_storage_is_not_written_into(self) -> None:
        """``copy.copy`` shared the storage, and setting the moved tensors set them in the original."""
        owner = Owner({"x": torch.ones(1)})
        assert to_device(owner, SIM)["x"].device == SIM and owner["x"].device.type == "cpu"

    def test_a_dataclass_that_is_a_dict_moves_as_both(self) -> None:
        moved = to_device(Output(torch.ones(1)), SIM)
        assert moved.x is moved["x"] and moved.x.device == SIM

    def test_a_container_without_tensors_is_returned_itself(self) -> None:
        import os  # noqa: PLC0415

        config = Owner({"a": 1})
        for thing in (sys.version_info, os.environ, config, torch.Size([2]), np.float64(1.0)):
            assert to_device([thing], SIM)[0] is thing


class Stuck:
    """An object whose method ``to`` raises."""

    def to(self, device: Any) -> Any:
        raise LookupError("stuck")


class Loose(Stuck):
    """It moves, and equals everything."""

    def to(self, device: Any, non_blocking: bool = False) -> None:
        self.told = non_blocking

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def test_an_object_that_can_is_told_not_to_block() -> None:
    assert to_device(Loose(), SIM, non_blocking=True).told and not to_device(Loose(), SIM).told


@dataclasses.dataclass
class Holder:
    stuck: Stuck


@pytest.mark.parametrize(("obj", "path"), [
    (Stuck(), ""),
    ({"targets": [{"mask": 1}, {"mask": Stuck()}]}, "targets[1].mask"),
    ([torch.ones(1), Stuck()], "[1]"),
    ([Loose(), Stuck()], "[1]"),
    ({"a": Pair(1, (Stuck(),))}, "a.b[0]"),
    ({"a": {3: Holder(Stuck())}}, "a[3].stuck"),
    (DeviceDict({"n": {"x": torch.ones(1), "k": [Stuck()]}}, objects="keep"), "n.k"),
])  # fmt: skip
def test_a_note_names_the_object_whose_to_raises(obj: Any, path: str) -> None:
    with pytest.raises(LookupError, match="stuck") as caught:
        to_device(obj, SIM)
    said = "\n".join([*map(str, caught.value.args), *getattr(caught.value, "__notes__", [])])
    what = "kept value" if isinstance(obj, DeviceDict) else "object"
    assert said == (f"stuck\nthe {what} is {path!r}" if path else "stuck")
