"""`to_device` and `to_numpy` for plain containers: lists, dicts, dataclasses and others."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree  # torch has no public name for it in the versions supported

from .._dict.device_dict import DeviceDict
from .._memory.cast import host_array
from .._memory.device import CPU, DeviceLike, resolve
from .._memory.transfer import transfer
from .._tree.ragged import Made, Ragged
from .._tree.tree import TreeDict

T = TypeVar("T")
_Rebuild = Callable[[Iterator[Any]], Any]


def to_device(obj: T, device: DeviceLike, *, non_blocking: bool = False) -> T:
    """Move every tensor in ``obj`` to ``device``.

    Visits dicts, lists, tuples, named tuples, dataclasses, ``OrderedDict``, ``defaultdict``, `DeviceDict`, other
    mappings, and every container registered with PyTorch's pytree. The result has new containers of the same types;
    ``obj`` is not changed. Strings, None, sets, modules and other objects are returned unchanged.

    Args:
        obj: a tensor, or a container of tensors at any depth.
        device: the target device.
        non_blocking: as in `DeviceDict.to`. By default the copies are complete on return.

    Raises: torch's own error for a device that does not exist or is out of memory.
    Cost: one `DeviceDict.to` for all tensors together. A packed `DeviceDict` moves as one tensor.

    >>> import torch
    >>> from tensordict_lite import to_device
    >>> batch = to_device({"x": torch.zeros(2), "names": ["a", "b"], "pair": (torch.ones(1), None)}, "meta")
    >>> batch["x"].device, batch["names"], type(batch["pair"])
    (device(type='meta'), ['a', 'b'], <class 'tuple'>)
    """
    target = resolve(device)
    found: list[Any] = []
    rebuild = _open(obj, found)
    tensors = [tensor for item in found if not isinstance(item, PackedSequence) for tensor in _tensors(item)]
    moved = dict(zip(map(id, tensors), transfer(tensors, target, non_blocking=non_blocking), strict=True))

    made: Made = {}

    def place(item: Any) -> Any:
        if isinstance(item, Tensor):
            return moved[id(item)]
        tensors = (moved[id(tensor)] for tensor in _tensors(item))
        if isinstance(item, Ragged):
            return item._rebuilt(tensors, made)
        if isinstance(item, TreeDict):
            return item._rebuilt(tensors, target, made)
        return item.to(target, non_blocking=non_blocking)

    return rebuild(iter([place(item) for item in found]))


def tensors_inside(obj: Any) -> list[Tensor]:
    """The tensors that `to_device` would move."""
    found: list[Any] = []
    _open(obj, found)
    return [tensor for item in found for tensor in _tensors(item)]


def _tensors(item: Any) -> list[Tensor]:
    """The tensors of one item that `_open` found."""
    if isinstance(item, Tensor):
        return [item]
    if isinstance(item, PackedSequence):
        return [part for part in (item.data, item.sorted_indices, item.unsorted_indices) if part is not None]
    return item._tensors() if isinstance(item, (Ragged, TreeDict)) else []


def to_numpy(obj: Any) -> Any:
    """Convert every tensor in ``obj`` to a NumPy array: detached, on the CPU. CPU tensors share their memory.

    Visits the same containers as `to_device`. A `DeviceDict` becomes a plain dict. A ``PackedSequence`` cannot hold
    arrays, so it is only moved to the CPU.

    Args:
        obj: a tensor, or a container of tensors at any depth.

    Raises: ``TypeError`` for a dtype or layout that NumPy lacks (bfloat16, sparse).
    Cost: no copy for tensors on the CPU; for other tensors the cost of `to_device`.

    >>> import torch
    >>> from tensordict_lite import to_numpy
    >>> to_numpy([torch.ones(2), {"y": torch.tensor(3)}, "z"])
    [array([1., 1.], dtype=float32), {'y': array(3)}, 'z']
    """
    found: list[Any] = []
    rebuild = _open(to_device(obj, CPU), found)

    def convert(item: Any) -> Any:
        if isinstance(item, Tensor):
            return host_array(item)
        return item.numpy() if isinstance(item, (Ragged, DeviceDict)) else item

    return rebuild(iter([convert(item) for item in found]))


def _is_closed(obj: Any) -> bool:
    """Whether pytree must not open a container."""
    # pytree would move the batch sizes of a PackedSequence, which stay on the CPU. It would turn a Size into a tuple.
    return isinstance(obj, (Ragged, TreeDict, PackedSequence, torch.Size))


def _open(obj: Any, found: list[Any]) -> _Rebuild:
    """Append everything in ``obj`` that can move to ``found``.

    Returns a function that rebuilds ``obj`` from an iterator of replacements, one for each appended item.
    """
    if isinstance(obj, (Tensor, Ragged, TreeDict, PackedSequence)):
        found.append(obj)
        return next
    if obj is None or type(obj) in (str, int, float, bool):
        return lambda _: obj
    leaves, spec = pytree.tree_flatten(obj, is_leaf=_is_closed)
    if len(leaves) != 1 or leaves[0] is not obj:
        return _parts(leaves, found, lambda parts: pytree.tree_unflatten(parts, spec))
    # pytree does not know this container. Rebuild it only if it holds something to move.
    before = len(found)
    rebuild = _open_other(obj, found)
    return rebuild if len(found) > before else lambda _: obj


def _open_other(obj: Any, found: list[Any]) -> _Rebuild:
    """`_open` for containers that pytree does not know."""
    if isinstance(obj, (type, Module)):
        return lambda _: obj
    if isinstance(obj, Mapping):
        mapping = obj
        return _parts(list(mapping.values()), found, lambda parts: _mapping(mapping, parts))
    if dataclasses.is_dataclass(obj):
        names = [field.name for field in dataclasses.fields(obj) if hasattr(obj, field.name)]
        return _parts([getattr(obj, name) for name in names], found, lambda parts: _dataclass(obj, names, parts))
    if isinstance(obj, list):  # a subclass: pytree treats it as a leaf
        return _parts(obj, found, lambda parts: _list_like(obj, parts))
    if isinstance(obj, tuple):
        cls: Any = type(obj)
        return _parts(list(obj), found, getattr(cls, "_make", cls))
    return lambda _: obj


def _parts(children: list[Any], found: list[Any], build: Callable[[list[Any]], Any]) -> _Rebuild:
    parts = [_open(child, found) for child in children]
    return lambda results: build([part(results) for part in parts])


def _dataclass(obj: Any, names: list[str], values: list[Any]) -> Any:
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
