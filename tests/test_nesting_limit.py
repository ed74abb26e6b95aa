"""One limit of nesting: at it everything works, and beyond it a value is refused where it is inserted."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, TypeVar

import pytest
import simulated
import torch
from checks import check_invariants, fails
from files import DEPTH
from torch.utils import _pytree as pytree

from tensordict_lite import DeviceDict, DeviceMismatchError, TypedDeviceDict, collate, load, save, stack, to_device

T = TypeVar("T")
DEEPER = r"is nested more than 64 levels deep"


SIM = simulated.SIM


def deep(levels: int, value: Any = None) -> dict[str, Any]:
    """A plain dict of so many levels."""
    data: Any = {"x": torch.ones(2) if value is None else value}
    for _ in range(levels - 1):
        data = {"n": data, "y": torch.zeros(2)}
    return data


def under(frames: int, function: Callable[[], T]) -> T:
    return function() if frames == 0 else under(frames - 1, function)


class Any_(TypedDeviceDict):
    n: DeviceDict[Any]
    y: torch.Tensor | None = None


def saved(d: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(d, file)
    file.seek(0)
    return torch.load(file, **options)


def filed(d: Any, tmp_path: Path) -> Any:
    save(d, tmp_path / "d")
    return load(tmp_path / "d")


USES: dict[str, Callable[[DeviceDict[Any], Path], Any]] = {
    "construct": lambda d, _: DeviceDict(d) == DeviceDict(d.to_dict()) == d,
    "repr": lambda d, _: repr(d) and d._repr_html_(),
    **{f"pickle {n}": lambda d, _, n=n: pickle.loads(pickle.dumps(d, n)) == d for n in range(6)},
    "pickle in Python": lambda d, _: pickle.loads(pickle._dumps(d)) == d,  # pyright: ignore[reportAttributeAccessIssue]
    "pickle packed": lambda d, _: pickle.loads(pickle.dumps(d.pack())) == d,
    "to another process": lambda d, _: pickle.loads(ForkingPickler.dumps(d)) == d,
    "packed, to another process": lambda d, _: pickle.loads(ForkingPickler.dumps(d.pack())) == d,
    "deepcopy": lambda d, _: copy.deepcopy(d) == d,
    "copy": lambda d, _: copy.copy(d) == d.clone() == d,
    "flatten": lambda d, _: DeviceDict.unflatten(d.flatten()) == d,
    "to": lambda d, _: d.to("meta").device.type == "meta" and d.double().float() == to_device(d, "cpu") == d,  # pyright: ignore[reportOptionalMemberAccess]
    "map": lambda d, _: d.map(torch.clone) == d,
    "save": lambda d, tmp_path: filed(d, tmp_path) == d,
    "torch.save": lambda d, _: saved(d, weights_only=True) == saved(d, weights_only=False) == d,
    "tree_map": lambda d, _: pytree.tree_map(torch.clone, d) == d,
    "tree_map_with_path": lambda d, _: pytree.tree_map_with_path(lambda _, t: t, d) == d,
    "rows": lambda d, _: len(list(d.rows)) == 2 and d.rows[[0, 1]] == d,
    "stack": lambda d, _: stack([d, d]).rows[0] == d,
    "collate": lambda d, _: collate([d, d]).rows[0] == collate([d.to_dict()] * 2).rows[1] == d,
    "vmap": lambda d, _: torch.vmap(lambda d: d)(d) == d,
    "share": lambda d, _: d.share_memory_().requires_grad_().detach() is not d,
    "allclose": lambda d, _: d.allclose(d.clone()) and d.nbytes,
    "numpy": lambda d, _: DeviceDict(d.numpy()) == d,
    "select": lambda d, _: d.select("n") == d.drop("y") and d.select(("n",) * (DEPTH - 1)),
    "typed": lambda d, _: pickle.loads(pickle.dumps(Any_.from_dict(d))) == copy.deepcopy(Any_.from_dict(d)) == d,
    "check_invariants": lambda d, _: check_invariants(d) is None,
}


@pytest.mark.parametrize("use", USES)
def test_everything_works_at_the_limit_under_a_hundred_calls(use: str, tmp_path: Path) -> None:
    assert under(100, lambda: USES[use](DeviceDict(deep(DEPTH)), tmp_path))


@dataclass
class Node:
    inside: Any


def chain(make: Callable[[Any], Any], levels: int, value: Any = 1.5) -> Any:
    for _ in range(levels):
        value = make(value)
    return value


def a_dict() -> DeviceDict[Any]:
    return DeviceDict({"a": {"b": {"c": 1}}})


INSERTS: dict[str, Callable[[int], Any]] = {
    "constructor": lambda n: DeviceDict(deep(n)),
    "constructor, from within": lambda n: chain(lambda d: DeviceDict({"n": d}), n, torch.ones(1)),
    "a dict in a dict": lambda n: DeviceDict({"n": DeviceDict(deep(n - 1))}),
    "typed": lambda n: Any_.from_dict(deep(n)),
    "assignment": lambda n: a_dict().__setitem__("n", deep(n - 1)),
    "assignment of a DeviceDict": lambda n: a_dict().__setitem__("n", DeviceDict(deep(n - 1))),
    "path": lambda n: a_dict().__setitem__(("n",) * n, 1),
    "path into what is there": lambda n: a_dict().__setitem__(("a", "b", *"n" * (n - 2)), 1),
    "path, a dict": lambda n: a_dict().__setitem__(("a", "b", "n"), deep(n - 3)),
    "update": lambda n: a_dict().update({"n": deep(n - 1)}),
    "setdefault": lambda n: a_dict().setdefault("n", deep(n - 1)),
    "|": lambda n: a_dict() | {"n": deep(n - 1)},
    "reflected |": lambda n: {"n": deep(n - 1)} | a_dict(),
    "fromkeys": lambda n: DeviceDict.fromkeys(["n"], deep(n - 1)),
    "unflatten": lambda n: DeviceDict.unflatten({".".join("n" * n): 1}),
    "map": lambda n: DeviceDict({"x": 1}).map(lambda _: deep(n - 1)),
    "codes": lambda n: DeviceDict(deep(n - 1, "s"), encoders=lambda strings: {"ids": torch.ones(len(strings))}),
    "collate": lambda n: collate([deep(n), deep(n)]),
    "collate codes": lambda n: collate(
        [deep(n - 1, "s")], encoders=lambda strings: {"ids": torch.ones(len(strings))}
    ),
    "stack": lambda n: stack([deep(n), deep(n)]),
}  # fmt: skip


@pytest.mark.parametrize("insert", INSERTS)
@pytest.mark.parametrize("levels", [DEPTH + 1, DEPTH + 30, 494, 2000])
def test_what_is_deeper_is_refused_where_it_is_inserted(insert: str, levels: int) -> None:
    INSERTS[insert](DEPTH)
    with pytest.raises(
        ValueError, match=rf"^'[a-z]\.[a-z]\.[a-z]\.….\w+' {DEEPER}, or holds itself; flatten it first$"
    ):
        INSERTS[insert](levels)


def test_a_failed_insert_changes_nothing() -> None:
    d = a_dict()
    for write in (partial(d.__setitem__, "a"), lambda v: d.update(z=1, a=v), partial(d.__setitem__, ("a", "b", "c"))):
        with pytest.raises(ValueError, match=DEEPER):
            write(deep(DEPTH))
    assert d == a_dict() and list(d) == ["a"]


class TestWithoutACheckAtTheInsert:
    """A nested dict does not know what it is in, and pytree checks nothing."""

    @pytest.mark.parametrize("levels", [DEPTH + 1, 150])
    def test_made_from_within(self, levels: int, tmp_path: Path) -> None:
        d = node = DeviceDict({"x": 1})
        for _ in range(levels - 1):
            node["n"] = {}
            node = node["n"]
        leave: list[Callable[[Any], Any]] = [
            pickle.dumps,
            ForkingPickler.dumps,
            saved,
            lambda d: save(d, tmp_path / "d"),
            DeviceDict,
            lambda d: collate([d]),
        ]
        for use in leave:
            with pytest.raises(ValueError, match=DEEPER):
                use(d)
        assert d.to("meta").device == torch.device("meta")

    def test_pytree(self) -> None:
        d = pytree.tree_map(lambda _: DeviceDict(deep(DEPTH)), DeviceDict({"x": 1}))
        fails(ValueError, DEEPER, lambda: pickle.dumps(d))

    def test_a_pickle_that_was_made_by_another(self) -> None:
        rebuild, (text, classes, *rest) = DeviceDict(deep(DEPTH)).__reduce__()
        deeper = text.replace('"root":', '"root":{"policy":-1,"items":[["n",').replace(',"policies"', ']]},"policies"')
        with pytest.raises(ValueError, match=f"^not a valid file or pickle: it is nested {DEPTH} levels deep or more$"):
            rebuild(deeper, [DeviceDict, *classes], *rest)


class TestHostValues:
    @pytest.mark.parametrize("value", [1.5, "a", None])
    @pytest.mark.parametrize("make", [lambda v: [v], lambda v: (v,)])
    def test_lists(self, make: Any, value: Any) -> None:
        for levels in (DEPTH + 1, 3000):
            with pytest.raises(ValueError, match=rf"^'x' is a list that {DEEPER}, or holds itself$"):
                DeviceDict({"x": chain(make, levels, value)})

    @pytest.mark.parametrize("make", [lambda v: [v], lambda v: (v, None), Node, lambda v: {"k": v, 1: Node}])
    def test_kept_objects(self, make: Any) -> None:
        kept = chain(make, DEPTH - 2, {1, "a"})
        d = DeviceDict({"n": {"x": [kept]}}, objects="keep", device="cpu")
        assert d["n", "x"][0] is kept
        assert under(100, lambda: pickle.loads(pickle.dumps(d)) == copy.deepcopy(d) == d) and repr(d)
        for levels in (DEPTH + 1, 3000):
            with pytest.raises(ValueError, match=rf"^'n\.x' is a list that {DEEPER}; flatten it first$"):
                d["n", "x"] = [chain(make, levels, {1, "a"})]
        with pytest.raises(DeviceMismatchError, match=r"^'n\.x\[0\].*' is on meta, this DeviceDict is on cpu; "):
            d["n", "x"] = [chain(make, DEPTH - 2, torch.ones(1, device="meta"))]
        assert d["n", "x"][0] is kept

    def test_lists_in_many_places_are_looked_at_once(self) -> None:
        many: Any = [None]
        for _ in range(DEPTH - 1):
            many = [many, many]
        assert DeviceDict({"x": many}, objects="keep")["x"] is many


def test_a_mapping_or_list_that_contains_itself_is_refused() -> None:
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
