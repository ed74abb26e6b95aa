"""How `torch.save` writes a dict, so that ``torch.load(weights_only=True)`` takes it with no setup.

That unpickler calls what is on its list of safe functions, and refuses everything else, classes of a user's included.
So what is written is data, and one function, `rebuild`, that takes data only and checks it. A class is a name there,
and is found among those that are defined: nothing is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from .._encoders.protocol import StringEncoder, encoder_to_json, runs_code
from .._errors import InvalidFileError, TooDeep
from .._memory.device import canonical, resolve
from .._memory.packed import from_buffer, loaded
from .._tree.convert import find_tensor
from .._tree.tree import TreeDict, class_named, name_of, packed_state
from .manifest import Reader, describe, invalid

PROTOCOL = 2
"""The pickle protocol of `torch.save`, by which it is told from others. They get the class itself, so that whoever
unpickles it need not have imported it."""


class NotKept(ValueError):
    """A dict that holds, by pytree's hand, what its policy does not keep, so that `rebuild` would refuse it."""


def reduce_saved(d: TreeDict[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What pickle writes for ``d``: `rebuild` and its arguments. Raises ``TooDeep`` and `NotKept`."""
    compacted = d._compacted()
    manifest, leaves, nodes = describe(compacted, _encoder_entry, own=True)
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


def _encoder_entry(encoder: StringEncoder) -> Any:
    try:
        return encoder if runs_code(encoder) else encoder_to_json(encoder)
    except TypeError:  # one that is pickled itself, which takes weights_only=False
        return encoder


def _may_keep(value: Any, seen: dict[int, object]) -> bool:
    """Whether an object has no tensor in it, of what is not ``seen`` yet: it may be in many places."""
    try:
        return not isinstance(value, Mapping) and find_tensor(value, seen) is None
    except TooDeep:
        return False


def rebuild(manifest: Any, classes: Any, leaves: Any, device: Any, buffer: Any, specs: Any) -> Any:
    """The dict that was saved, on whatever device its tensors were loaded to.

    Takes data only and checks it, as a file may hold anything: ``ValueError`` for what cannot be.
    """
    if type(leaves) is not list or type(classes) is not list or not isinstance(device, (str, type(None))):
        invalid("what torch.save wrote is damaged")
    leaves, classes = cast("list[Any]", leaves), cast("list[Any]", classes)
    reader = Reader(manifest, len(leaves))
    if len(classes) != reader.count:
        invalid("not each of its dicts has a class")
    known = _classes(classes)
    values = _values(leaves, {} if buffer is None else from_buffer(buffer, specs))
    devices = {value.device for value in values if isinstance(value, Tensor)}
    fallback = None if device is None else _device(device)
    home = canonical(next(iter(devices))) if len(devices) == 1 else None if devices else fallback
    out: Any = reader.build(lambda _, __: next(known), values.__getitem__, home, own=True)
    if len(devices) > 1:
        out._infer_device(None)
    out._validate(out, None, deep=True, shapes=False)
    return out


def _classes(names: list[Any]) -> Iterator[type[Any]]:
    found: dict[str, type[Any]] = {}  # each is looked for once
    for name in names:
        if not isinstance(name, str) or name not in found:
            found[name] = class_named(name)
    return iter([found[name] for name in names])


def _values(leaves: list[Any], fields: Mapping[int, Tensor]) -> list[Any]:
    """What the numbers of a plan stand for: tensors, those in the block among them, and objects that may be kept."""
    seen: dict[int, object] = {}

    def value(leaf: Any) -> Any:
        leaf = loaded(leaf)
        if isinstance(leaf, Tensor):
            return leaf
        if type(leaf) is int and leaf in fields:
            return fields[leaf]
        kept = cast("tuple[Any, ...]", leaf if type(leaf) is tuple else ())
        try:
            if len(kept) == 1 and not isinstance(kept[0], Tensor) and _may_keep(kept[0], seen):
                return kept[0]
        except RecursionError as error:
            raise InvalidFileError("not a valid file: an object in it is nested too deep") from error
        invalid("it lacks a tensor, or keeps an object that is one, or holds one")

    return [value(leaf) for leaf in leaves]


def _device(name: str) -> torch.device:
    """The device of a dict without tensors; for others it is that of the tensors. Asks no driver."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidFileError(f"not a valid file: {str(error)[:200]}") from error
    if device.type in ("cpu", "meta"):
        return resolve(device.type)
    if not 0 <= (-1 if device.index is None else device.index) < 128:  # pyright: ignore[reportUnnecessaryComparison]
        invalid(f"there is no device {name!r}")
    return device
