"""Random programs: DeviceDict against a plain nested dict, all operations, two devices, checked at every step."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from checks import check_invariants
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tensordict_lite import DeviceDict, DeviceMismatchError

DEVICES = ("cpu", "sim:0")
KEYS = st.sampled_from(["a", "b", "c", "d.e"])
NUMBERS = st.lists(st.integers(-9, 9), max_size=3)
PATHS = st.lists(KEYS, min_size=1, max_size=3).map(tuple)
TREES = st.recursive(NUMBERS, lambda inner: st.dictionaries(KEYS, inner, max_size=3), max_leaves=5)
ITEMS = st.dictionaries(KEYS, TREES, max_size=4)
BAD = st.sampled_from(["device", "None", "key"])


def tensors(tree: Any, device: str) -> Any:
    """The same tree with int64 tensors for lists."""
    if isinstance(tree, dict):
        return {key: tensors(value, device) for key, value in tree.items()}
    return torch.tensor(tree, dtype=torch.int64).to(device)


def plain(tree: Any) -> Any:
    """The lists of a tree of tensors."""
    return {key: plain(value) for key, value in tree.items()} if isinstance(tree, dict) else tree.tolist()


def order(tree: Any) -> Any:
    return [(key, order(value)) for key, value in tree.items()] if isinstance(tree, dict) else None


def find(tree: Any, path: tuple[str, ...]) -> Any:
    """What is at ``path`` in the plain dict, or None."""
    for part in path:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


class Programs(RuleBasedStateMachine):
    @initialize(items=ITEMS, device=st.sampled_from(DEVICES), asked=st.booleans())
    def start(self, items: Any, device: str, asked: bool) -> None:
        self.model = copy.deepcopy(items)
        self.device: str = device
        self.d: Any = DeviceDict(tensors(items, "cpu" if asked else device), device=device)

    def other(self) -> str:
        return DEVICES[self.device == DEVICES[0]]

    # --- writes that are right ---

    @rule(key=KEYS, value=TREES, whole=st.booleans())
    def set_item(self, key: str, value: Any, whole: bool) -> None:
        stored = tensors(value, self.device)
        self.d[key] = DeviceDict(stored, device=self.device) if whole and isinstance(stored, dict) else stored
        if isinstance(stored, torch.Tensor):
            assert self.d[key] is stored
        self.model[key] = copy.deepcopy(value)

    @rule(path=PATHS, value=TREES)
    def set_path(self, path: tuple[str, ...], value: Any) -> None:
        blocked = any(isinstance(find(self.model, path[:i]), list) for i in range(1, len(path)))
        if blocked:
            with pytest.raises(TypeError, match="expected a nested dict"):
                self.d[path] = tensors(value, self.device)
            return
        self.d[path] = tensors(value, self.device)
        node = self.model
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = copy.deepcopy(value)

    @rule(items=ITEMS, how=st.sampled_from(["update", "pairs", "keywords", "ior", "or", "ror", "DeviceDict"]))
    def update(self, items: Any, how: str) -> None:
        new = tensors(items, self.device)
        if how == "update":
            self.d.update(new)
        elif how == "pairs":
            self.d.update(iter(new.items()))
        elif how == "keywords":
            self.d.update(**new)
        elif how == "ior":
            self.d |= new
        elif how == "or":
            self.d = self.d | new
        elif how == "DeviceDict":
            self.d.update(DeviceDict(new, device=self.device))
        else:
            self.d = new | self.d
            self.model = copy.deepcopy(items) | self.model
            return
        self.model |= copy.deepcopy(items)

    @rule(key=KEYS, value=TREES)
    def setdefault(self, key: str, value: Any) -> None:
        assert self.d.setdefault(key, tensors(value, self.device)) is self.d[key]
        self.model.setdefault(key, copy.deepcopy(value))

    @rule(key=KEYS, number=st.integers(-9, 9))
    def set_host_values(self, key: str, number: int) -> None:
        self.d[key] = [number, number]
        self.model[key] = [number, number]

    # --- writes that are wrong change nothing ---

    @rule(items=ITEMS, path=PATHS, bad=BAD, how=st.sampled_from(["update", "ior", "set", "path"]))
    def refuse(self, items: Any, path: tuple[str, ...], bad: str, how: str) -> None:
        before, identity = order(self.d), self.d._tensors()
        wrong: Any = {"device": torch.zeros(1, device=self.other()), "None": None, "key": {3: 1}}[bad]
        value: Any = wrong
        for part in reversed(path):
            value = {part: value}
        error = DeviceMismatchError if bad == "device" else TypeError
        new = {**tensors(items, self.device), "bad": value}
        write = {
            "update": lambda: self.d.update(new),
            "ior": lambda: self.d.__ior__(new),
            "set": lambda: self.d.__setitem__("bad", new),
            "path": lambda: self.d.__setitem__(("bad", "deeper"), new),
        }[how]
        with pytest.raises(error):
            write()
        assert order(self.d) == before
        assert all(a is b for a, b in zip(self.d._tensors(), identity, strict=True))

    # --- removals ---

    @rule(path=PATHS, how=st.sampled_from(["del", "pop", "pop default"]))
    def remove(self, path: tuple[str, ...], how: str) -> None:
        key: Any = path[0] if len(path) == 1 else path
        if find(self.model, path) is None:
            assert key not in self.d and self.d.get(key) is None
            if how == "pop default":
                assert self.d.pop(key, "nothing") == "nothing"
            else:
                with pytest.raises(KeyError):
                    self.d.pop(key) if how == "pop" else self.d.__delitem__(key)
            return
        assert key in self.d
        if how == "del":
            del self.d[key]
        else:
            assert plain(self.d.pop(key)) == find(self.model, path)
        del find(self.model, path[:-1])[path[-1]]

    @precondition(lambda self: self.model)
    @rule()
    def popitem(self) -> None:
        key, value = self.d.popitem()
        assert (key, plain(value)) == self.model.popitem()

    @rule()
    def clear(self) -> None:
        self.d.clear()
        self.model.clear()

    # --- what gives a new dict ---

    @rule(there=st.sampled_from(DEVICES), how=st.sampled_from(["device", "tensor", "copy"]))
    def move(self, there: str, how: str) -> None:
        target: Any = torch.zeros(1, device=there, dtype=torch.int64) if how == "tensor" else there
        moved = self.d.to(target, copy=how == "copy")
        if there == self.device and how != "copy":
            assert moved is self.d
        self.d, self.device = moved, there

    @rule(
        how=st.sampled_from(["copy", "copy.copy", "deepcopy", "pickle", "clone", "rebuild", "map", "detach", "flatten"])
    )
    def same_again(self, how: str) -> None:
        before = self.d
        if how == "pickle":
            self.d = pickle.loads(pickle.dumps(self.d.cpu())).to(self.device)
        elif how == "rebuild":
            self.d = type(before)(dict(before), device=self.device)
        elif how == "flatten":
            self.d = DeviceDict.unflatten(before.flatten("/"), "/")
            self.d = self.d if self.d.device is not None else self.d.to(self.device)
        else:
            self.d = {
                "copy": before.copy,
                "copy.copy": lambda: copy.copy(before),
                # through the CPU, as for pickle: torch cannot make a bare storage on a simulated device
                "deepcopy": lambda: copy.deepcopy(before.cpu()).to(self.device),
                "clone": before.clone,
                "map": lambda: before.map(lambda t: t + 0),
                "detach": before.detach,
            }[how]()
        if self.model and how == "flatten" and str(self.d.device) != self.device:
            self.d = self.d.to(self.device)  # empty nested dicts alone have no device to tell
        assert self.d == before or not before
        before["gone"] = 1
        assert "gone" not in self.d

    @rule(paths=st.lists(PATHS, max_size=3))
    def select_and_drop(self, paths: list[tuple[str, ...]]) -> None:
        present = [path for path in paths if find(self.model, path) is not None]
        picked = self.d.select(*present)
        check_invariants(picked)
        for path in present:
            assert plain(picked[path]) == find(self.model, path)
        for path in paths:
            if path not in present:
                with pytest.raises(KeyError):
                    self.d.select(path)
                with pytest.raises(KeyError):
                    self.d.drop(path)
            else:
                left = self.d.drop(path)
                check_invariants(left)
                assert path not in left and path in self.d

    # --- what must always hold ---

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "d"):
            return
        check_invariants(self.d)
        assert isinstance(self.d, DeviceDict) and type(self.d) is DeviceDict
        assert plain(self.d) == self.model and order(self.d) == order(self.model)
        assert len(self.d) == len(self.model) and list(reversed(self.d)) == list(reversed(self.model))
        assert self.d == tensors(self.model, self.device) and bool(self.d) == bool(self.model)
        assert self.d.device is None or str(self.d.device) == self.device
        assert {k: v.tolist() for k, v in self.d.flatten("/").numpy().items() if not isinstance(v, dict)} == {
            "/".join(path): value for path, value in leaves(self.model)
        }


def leaves(tree: Any, at: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    if not isinstance(tree, dict):
        return [(at, tree)]
    return [leaf for key, value in tree.items() for leaf in leaves(value, (*at, key))]


Programs.TestCase.settings = settings(max_examples=120, stateful_step_count=25, deadline=None)
TestPrograms = Programs.TestCase
TestPrograms.pytestmark = [pytest.mark.slow]  # pyright: ignore[reportAttributeAccessIssue]
