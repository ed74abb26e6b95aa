"""What lies in kept values and plain containers: tensors at any depth, and objects that move themselves."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import NoneType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.utils import _pytree as pytree  # torch has no public name for it in the versions supported

from .._errors import DEPTH, Path, TooDeep
from .._memory.cast import host_array
from .ragged import Made

Rebuild = Callable[[Iterator[Any]], Any]
"""Rebuilds a value from replacements, one for each item that `open_value` found in it."""
Move = Callable[[Any], Any]
"""Moves an object that moves itself, and returns the result."""

NO_TENSORS = frozenset(
    {NoneType, bool, int, float, complex, str, bytes, range, set, frozenset, np.ndarray}
    | {torch.Size, torch.dtype, torch.device}
)
"""Types of values in which no tensor is looked for. A Size is a tuple that must stay one."""

_PLAIN_DICTS = frozenset((dict, OrderedDict))
_PLAIN = frozenset((Tensor,))
Children = tuple[Sequence[Any], Callable[[list[Any]], Any]]
"""The values in a container, and how to build a container like it from others."""


def without_tensors(value: Any, levels: int = 2) -> bool:
    """Whether a value holds no tensor by its type, or by the types of its items: image sizes are a list of tuples."""
    kind = type(value)
    if kind in NO_TENSORS or (kind is not tuple and kind is not list):
        return kind in NO_TENSORS
    return NO_TENSORS.issuperset(map(type, value)) or (
        levels > 1 and all(without_tensors(item, levels - 1) for item in value)
    )


def open_value(obj: Any, found: list[Any]) -> Rebuild | None:
    """Append what can move to ``found``: tensors, ragged fields, `DeviceDict`s, objects with a ``to`` of their own.

    Returns a function that rebuilds ``obj`` once with other items; None if there are none. A container that occurs
    several times is opened once. Raises ``TooDeep`` for a container that is nested too deep, or that holds itself.
    """
    return _open(obj, found, {}, {}, 0)


_OPENING: Rebuild = next
"""In place of how to rebuild a container that is being opened."""
_Known = dict[int, tuple[Any, Rebuild | None]]
"""The containers that were opened, by id: the container, which stays alive, and how to rebuild it."""


def _open(obj: Any, found: list[Any], known: _Known, made: dict[int, Any], depth: int) -> Rebuild | None:
    """``made``: the containers that were rebuilt, by the id of the original."""
    kind = type(obj)
    if kind is list or kind is tuple:  # the types of all items at once: a list may have thousands of strings
        if depth <= DEPTH and NO_TENSORS.issuperset(map(type, obj)):
            return None
    elif kind in NO_TENSORS:
        return None
    elif isinstance(obj, Tensor) or hasattr(kind, "_holds_tensors") or (hasattr(kind, "to") and takes_device(kind)):
        found.append(obj)
        return next
    number = id(obj)
    before = known.get(number)
    if before is not None and before[1] is not _OPENING:
        return None if before[1] is None else lambda _: made[number]
    inside = children(obj)
    if inside is None:
        return None
    if before is not None or depth > DEPTH:
        raise TooDeep(f"nested more than {DEPTH} levels deep, or holds itself; flatten it first")
    known[number] = obj, _OPENING
    values, build = inside
    parts: list[Rebuild | None] = []
    for child in values:
        if type(child) is Tensor:
            found.append(child)
            parts.append(next)
        else:
            parts.append(None if type(child) in NO_TENSORS else _open(child, found, known, made, depth + 1))

    def rebuild(results: Iterator[Any]) -> Any:
        replaced = [value if part is None else part(results) for value, part in zip(values, parts, strict=True)]
        out = made[number] = build(replaced)
        return out

    known[number] = obj, rebuild if any(parts) else None
    return known[number][1]


@lru_cache(maxsize=256)
def takes_device(kind: type) -> bool:
    """Whether the method ``to`` of a class is for devices: its first parameter is ``device`` or ``*args``.

    Other libraries convert units or time zones with ``to``. A module stays where it is.
    """
    method: Any = kind.to  # pyright: ignore[reportAttributeAccessIssue]
    if not callable(method) or issubclass(kind, (Module, type)):
        return False
    try:
        first = list(inspect.signature(method).parameters.values())[1:2]
    except (TypeError, ValueError):  # a function of C without a signature
        return False
    return any(one.name == "device" or one.kind is one.VAR_POSITIONAL for one in first)


def move_itself(obj: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Move a copy of an object by its own method ``to``, which may change the object."""
    one = copy.copy(obj)
    known = inspect.signature(one.to).parameters if non_blocking else {}
    asked = "non_blocking" in known or any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    moved = one.to(device, non_blocking=True) if asked else one.to(device)
    return one if moved is None else moved


def nests(value: object) -> bool:
    """Whether a value is a nested dict where objects are kept: a `DeviceDict`, or a plain dict with str keys.

    Other mappings are kept: a defaultdict, the outputs of transformers and the config of a framework can do more than
    a dict.
    """
    kind = type(value)
    if kind in _PLAIN_DICTS:
        return all(isinstance(key, str) for key in cast("dict[Any, Any]", value))
    return hasattr(kind, "_holds_tensors") and isinstance(value, Mapping)


def stay(obj: Any) -> Any:
    """The `Move` that moves nothing."""
    return obj


def children(obj: Any) -> Children | None:
    """What is in a container: a list, tuple, mapping, dataclass, or a class that is registered with pytree."""
    kind: Any = type(obj)
    if kind is list or kind is tuple:
        return obj, kind
    if kind is dict:
        keys = [*obj]
        return [*obj.values()], lambda parts: dict(zip(keys, parts, strict=True))
    if isinstance(obj, (type, Module)):
        return None
    if kind in pytree.SUPPORTED_NODES or isinstance(obj, tuple):
        values, spec = pytree.tree_flatten(obj, is_leaf=lambda one: one is not obj)
        if len(values) == 1 and values[0] is obj:  # a tuple that pytree does not know
            return obj, getattr(kind, "_make", kind)
        return values, lambda parts: pytree.tree_unflatten(parts, spec)
    if isinstance(obj, Mapping):
        return [*obj.values()], lambda parts: _mapping(obj, parts)
    if dataclasses.is_dataclass(obj):
        names = _set_fields(obj)
        return [getattr(obj, name) for name in names], lambda parts: _dataclass(obj, names, parts)
    if isinstance(obj, list):  # a subclass: pytree treats it as a leaf
        return obj, lambda parts: _list_like(obj, parts)
    return None


def names_in(obj: Any, count: int) -> Sequence[Any]:
    """The names of the ``count`` values of `children`: the keys of a mapping, the names of fields, or indices."""
    if isinstance(obj, Mapping):
        names: Any = [*obj]
    elif dataclasses.is_dataclass(obj) and type(obj) not in pytree.SUPPORTED_NODES:
        names = _set_fields(obj)
    else:
        names = getattr(obj, "_fields", None)
    return names if isinstance(names, (list, tuple)) and len(names) == count else range(count)


def _set_fields(obj: Any) -> list[str]:
    """The names of the fields of a dataclass that have a value."""
    return [field.name for field in dataclasses.fields(obj) if hasattr(obj, field.name)]


def _dataclass(obj: Any, names: Sequence[str], values: list[Any]) -> Any:
    clone = copy.copy(obj)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(clone, name, value)  # works for frozen dataclasses too, without __init__
    return clone


def _mapping(obj: Mapping[Any, Any], values: list[Any]) -> Any:
    """A mapping of the same class with other values."""
    items = dict(zip(obj, values, strict=True))
    if not isinstance(obj, (dict, UserDict)):
        return type(obj)(items)  # pyright: ignore[reportCallIssue]  (a copy could share state with the original)
    clone: Any = copy.copy(obj)
    for key, value in items.items():
        clone[key] = value
    if dataclasses.is_dataclass(clone):  # as the outputs of transformers: every item is an attribute too
        return _dataclass(clone, [name for name in items if hasattr(clone, name)], [*items.values()])
    return clone


def _list_like(obj: list[Any], values: list[Any]) -> Any:
    clone = copy.copy(obj)
    clone[:] = values
    return clone


class Opened(NamedTuple):
    """A kept value with something that can move: see `open_value`."""

    found: list[Any]
    rebuild: Rebuild

    def tensors(self) -> list[Tensor]:
        """The tensors that move with the dict. Those of an object that moves itself do not."""
        if _PLAIN.issuperset(map(type, self.found)):
            return self.found
        return [tensor for item in self.found for tensor in tensors_of(item)]

    def place(self, tensors: Iterator[Tensor], device: torch.device | None, made: Made, move: Move) -> Any:
        """The value with the next of ``tensors`` in place of its own, on ``device``. ``made``: see `Made`."""
        if _PLAIN.issuperset(map(type, self.found)):
            return self.rebuild(tensors)
        return self.rebuild(_placed(self.found, tensors, device, made, move))


def open_container(value: Any) -> Opened | None:
    """Open a value; None if nothing in it can move. Raises ``TooDeep`` as `open_value` does."""
    found: list[Any] = []
    rebuild = open_value(value, found)
    return None if rebuild is None else Opened(found, rebuild)


def open_kept(value: Any) -> Opened | None:
    """`open_container` for a value that was inserted: one that is too deep holds no tensor."""
    try:
        return open_container(value)
    except TooDeep:
        return None


def tensors_of(item: Any) -> list[Tensor]:
    """The tensors of an item of `open_value`, without those of an object that moves itself."""
    if isinstance(item, Tensor):
        return [item]
    return item._tensors_inside() if hasattr(type(item), "_holds_tensors") else []


def kept_tensors(value: Any) -> list[Tensor]:
    """The tensors of a kept value that move with the dict."""
    inside = open_kept(value)
    return [] if inside is None else inside.tensors()


def stays_on(value: Any, device: torch.device | None) -> bool:
    """Whether a dict on ``device`` keeps a value itself: it is no dict, and only plain tensors there can move in it."""
    if type(value) in _PLAIN_DICTS:
        return False
    found: list[Any] = []
    try:
        open_value(value, found)
    except TooDeep:
        return False
    return _PLAIN.issuperset(map(type, found)) and all(tensor.device == device for tensor in found)


def _placed(
    found: list[Any], tensors: Iterator[Tensor], device: torch.device | None, made: Made, move: Move
) -> Iterator[Any]:
    for item in found:
        own = [next(tensors) for _ in tensors_of(item)]
        if isinstance(item, Tensor):
            yield own[0]
        else:
            yield item._placed(iter(own), made, device, move) if hasattr(type(item), "_holds_tensors") else move(item)


def path_inside(value: Any, path: Path, wanted: Callable[[Any], bool]) -> Path:
    """The path of the first item of `open_value` that is wanted in a value at ``path``: ``('targets[0]', 'boxes')``."""
    found: list[Any] = []
    rebuild = open_value(value, found)
    if rebuild is next:
        return path if wanted(value) else ()
    inside = children(value) if found else None
    names = names_in(value, len(inside[0])) if inside else ()
    for name, child in zip(names, inside[0], strict=True) if inside else ():
        at = (*path, name) if isinstance(name, str) else (*path[:-1], f"{path[-1] if path else ''}[{name!r}]")
        if way := path_inside(child, at, wanted):
            return way
    return ()


def path_off(value: Any, path: Path, device: torch.device) -> Path:
    """The path of the first tensor that is not on ``device`` in a value at ``path``."""
    return path_inside(value, path, lambda item: any(tensor.device != device for tensor in tensors_of(item)))


def numpy_inside(value: Any, copy: bool = False) -> Any:
    """A value on the CPU with an array for each tensor, and a plain dict for each `DeviceDict` and `Ragged`."""
    found: list[Any] = []
    rebuild = open_value(value, found)
    if rebuild is None:
        return value
    arrays: list[Any] = []
    for item in found:
        if isinstance(item, Tensor):
            arrays.append(host_array(item, copy))
        else:
            arrays.append(item.numpy(copy) if hasattr(type(item), "_holds_tensors") else item)
    return rebuild(iter(arrays))
