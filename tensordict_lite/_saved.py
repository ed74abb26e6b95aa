"""How `torch.save` writes a dict, so that ``torch.load(weights_only=True)`` takes it with no setup.

That unpickler calls what is on its list of safe functions, and refuses everything else, classes of a user's included.
So what is written is data, and one function, `rebuild`, that takes data only and checks it. A class is a name there,
and is found among those that are defined: nothing is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from ._devices import resolve
from ._errors import InvalidFileError, Path
from ._packing import from_block, loaded
from ._plan import Reader, describe, refuse
from ._strings import StringEncoder, encoder_to_json, runs_code
from ._tree import TreeDict, class_named, name_of, packed_apart

PROTOCOL = 2
"""The pickle protocol of `torch.save`, by which it is told from others. They get the class itself, so that whoever
unpickles it need not have imported it."""


def taken_apart(d: TreeDict[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What pickle writes for ``d``: `rebuild` and its arguments."""
    whole = d._whole()
    plan, leaves, nodes = describe(whole, _encoder_entry, own=True)
    block, specs, numbers = packed_apart(whole)
    stored: list[Any] = []
    for _, value in leaves:
        stored.append(numbers[id(value)] if id(value) in numbers else value if isinstance(value, Tensor) else (value,))
    device = None if d._device is None else str(d._device)
    return rebuild, (plan, [name_of(type(node)) for node in nodes], stored, device, block, specs)


def _encoder_entry(encoder: StringEncoder) -> Any:
    try:
        return encoder if runs_code(encoder) else encoder_to_json(encoder)
    except TypeError:  # one that is pickled itself, which takes weights_only=False
        return encoder


def rebuild(plan: Any, classes: Any, leaves: Any, device: Any, block: Any, specs: Any) -> Any:
    """The dict that was saved, on whatever device its tensors were loaded to.

    Takes data only and checks it, as a file may hold anything: ``ValueError`` for what cannot be.
    """
    if type(leaves) is not list or type(classes) is not list or not isinstance(device, (str, type(None))):
        refuse("what torch.save wrote is damaged")
    leaves, classes = cast("list[Any]", leaves), cast("list[Any]", classes)
    reader = Reader(plan, len(leaves))
    known = [class_named(name) for name in classes]
    if len(known) != len(reader.nodes):
        refuse("not each of its dicts has a class")
    fields = {} if block is None else from_block(block, specs)

    def leaf(number: int) -> Any:
        value = loaded(leaves[number])
        if isinstance(value, Tensor):
            return value
        if type(value) is int and value in fields:
            return fields[value]
        kept = cast("tuple[Any, ...]", value if type(value) is tuple else ())
        if len(kept) == 1 and not isinstance(kept[0], (Tensor, Mapping)):
            return kept[0]
        refuse("it lacks a tensor")

    def everything(_: Path) -> bool:
        return True

    out: Any = reader.build(iter(known), leaf, everything, own=True)
    out._settle(None if device is None else _device(device))
    out._conform(out, None, deep=True, shapes=False)
    return out


def _device(name: str) -> torch.device:
    """The device of a dict without tensors; for others it is that of the tensors. Asks no driver."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidFileError(f"not a valid file: {str(error)[:200]}") from error
    if device.type in ("cpu", "meta"):
        return resolve(device.type)
    if not 0 <= (-1 if device.index is None else device.index) < 128:  # pyright: ignore[reportUnnecessaryComparison]
        refuse(f"there is no device {name!r}")
    return device
