"""The form of a dict in a file of ``torch.save``. ``torch.load(weights_only=True)`` reads the file without setup.

``weights_only=True`` allows only functions and classes on an allowlist, and the classes of users are not on that list.
So the file contains plain data and the name of one function, `rebuild`, which takes data only and validates it. A class
is saved as its name. `rebuild` looks up the name among the defined classes and imports nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from .._errors import InvalidFileError, TooDeep
from .._memory.device import canonical, resolve
from .._memory.packed import from_buffer, materialize
from .._tree.convert import find_tensor
from .._tree.tree import TreeDict, class_named, name_of, packed_state
from .manifest import InvalidManifest, Reader, describe, invalid

SAVE_PROTOCOL = 2
"""The pickle protocol of ``torch.save``. With any other protocol, the pickle names the class and imports it."""

_save = getattr(torch.serialization, "_save", None)
_save_code = getattr(_save, "__code__", None)


def is_saving(caller: FrameType) -> bool:
    """Whether this frame is ``torch.save``, which stores tensors itself in any protocol."""
    return caller.f_code is _save_code


class NotKept(ValueError):
    """Raised for an object that the policy of its dict forbids. Pytree can insert one; `rebuild` would refuse it."""


def reduce_saved(d: TreeDict[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The reduction of ``d`` for pickle: `rebuild` and its arguments. Raises ``TooDeep`` and `NotKept`."""
    compacted = d._compacted()
    # An encoder without a safe JSON form stays an object, which pickle writes.
    manifest, leaves, nodes = describe(compacted, lambda encoder, _: encoder, own=True)
    seen: dict[int, object] = {}
    for node in nodes if any(not isinstance(value, Tensor) for _, value in leaves) else ():
        for value in node.values():
            kept = isinstance(value, (Tensor, TreeDict)) or (node._policy.objects == "keep" and _may_keep(value, seen))
            if not kept:
                raise NotKept
    buffer, specs, numbers = packed_state(compacted)
    stored: list[Any] = []
    for _, value in leaves:
        stored.append(numbers[id(value)] if id(value) in numbers else value if isinstance(value, Tensor) else (value,))
    device = None if d._device is None else str(d._device)
    return rebuild, (manifest, [name_of(type(node)) for node in nodes], stored, device, buffer, specs)


def _may_keep(value: Any, seen: dict[int, object]) -> bool:
    """Whether an object may be kept: it is not a mapping and contains no tensor.

    ``seen``: objects that were searched before, by id. They are not searched again.
    """
    try:
        return not isinstance(value, Mapping) and find_tensor(value, seen) is None
    except TooDeep:
        return False


def rebuild(manifest: Any, classes: Any, leaves: Any, device: Any, buffer: Any, specs: Any) -> Any:
    """Rebuild a dict from the arguments of `reduce_saved`, on the device of the loaded tensors.

    Takes data only, and validates the data, since a file may be damaged or forged. Raises ``InvalidFileError`` for
    invalid data, and ``ValueError`` for a class that is not defined.
    """
    try:
        return _rebuilt(manifest, classes, leaves, device, buffer, specs)
    except InvalidManifest as error:
        raise InvalidFileError(f"not a valid file: {error}") from error


def _rebuilt(manifest: Any, classes: Any, leaves: Any, device: Any, buffer: Any, specs: Any) -> Any:
    if type(leaves) is not list or type(classes) is not list or not isinstance(device, (str, type(None))):
        invalid("the data of torch.save is damaged")
    reader = Reader(manifest, len(leaves))
    if len(classes) != reader.count:
        invalid("the number of classes differs from the number of dicts")
    known = _classes_of(classes)
    values = _values(leaves, {} if buffer is None else from_buffer(buffer, specs))
    devices = {value.device for value in values if isinstance(value, Tensor)}
    fallback = None if device is None else _device(device)
    home = canonical(next(iter(devices))) if len(devices) == 1 else None if devices else fallback
    out: Any = reader.build(lambda _, __: next(known), values.__getitem__, home, own=True)
    if len(devices) > 1:
        out._infer_device(None)
    out._validate(shapes=False)
    return out


def _classes_of(names: list[Any]) -> Iterator[type[Any]]:
    """The class of each dict of the tree, in the order of the tree."""
    found: dict[str, type[Any]] = {}  # by name: each class is looked up once
    for name in names:
        if not isinstance(name, str) or name not in found:
            found[name] = class_named(name)
    return iter([found[name] for name in names])


def _values(leaves: list[Any], fields: Mapping[int, Tensor]) -> list[Any]:
    """The leaves by number: tensors, including slices of the buffer, and objects that may be kept."""
    seen: dict[int, object] = {}

    def value(leaf: Any) -> Any:
        leaf = materialize(leaf)
        if isinstance(leaf, Tensor):
            return leaf
        if type(leaf) is int and leaf in fields:
            return fields[leaf]
        kept = leaf if type(leaf) is tuple else ()
        try:
            if len(kept) == 1 and not isinstance(kept[0], Tensor) and _may_keep(kept[0], seen):
                return kept[0]
        except RecursionError as error:
            raise InvalidManifest("an object in it is nested too deep") from error
        invalid("a tensor is missing, or a kept object is or contains a tensor")

    return [value(leaf) for leaf in leaves]


def _device(name: str) -> torch.device:
    """The device for a dict without tensors. Does not query a driver: this machine may not have the device."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidManifest(str(error)[:200]) from error
    if device.type in ("cpu", "meta"):
        return resolve(device.type)
    if not 0 <= (-1 if device.index is None else device.index) < 128:  # pyright: ignore[reportUnnecessaryComparison]
        invalid(f"there is no device {name!r}")
    return device
