"""The insertion rule: what a dict stores for a value. A call stores all of its items or none.

Every insert has two steps. Preparing checks every key and converts every value, and changes nothing of the dict.
Committing stores what was prepared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from .._encoders.protocol import StringEncoder
from .._errors import DeviceMismatchError, Path, refuse_deeper, with_path
from .._memory.device import canonical
from .._memory.transfer import transfer
from .._tree.convert import convert
from .._tree.tree import TreeDict, kind_nested
from .._tree.walk import all_on, refuse_key, refuse_optimizer

Moved = Mapping[int, Tensor]
"""The tensors that were moved to the device of the dict, by the ids of the tensors that were given."""


def insert(
    d: TreeDict[Any],
    data: Mapping[str, Any],
    *,
    consent: bool = False,
    at: Path = (),
    encoders: Mapping[str, StringEncoder] | None = None,
) -> None:
    """Store all of ``data``, and the ``encoders`` of its keys, or raise and leave ``d`` as it was.

    Args:
        consent: tensors on other devices are moved.
        at: the path of ``d`` in the tree that the caller holds, for messages.
    """
    given = d._given(data, at) if d._has_fields else data
    device = d._device
    first = next(iter(given.values()), None)
    if device is None:
        if d and d._tensors():  # see `_infer_device`
            raise DeviceMismatchError(f"this {type(d).__name__} has tensors on several devices; .to(device) it first")
        device = canonical(first.device) if type(first) is Tensor else None
    if (first is None or isinstance(first, Tensor)) and all_on(given, device):  # what training loops store
        staged, used = given, encoders
    else:
        staged, device, used = _prepare(d, given, consent, at)
        used = {**used, **encoders} if encoders else used
    if given is data:
        d._commit(staged, device, used)
    else:  # the caller gave None for fields that may be absent
        d._commit(staged, device, used, [key for key in data if key not in given and key in d])


def _prepare(
    d: TreeDict[Any], data: Mapping[str, Any], consent: bool, at: Path
) -> tuple[dict[str, Any], torch.device | None, dict[str, StringEncoder]]:
    """The stored form of all of ``data``, its device, and the encoders that strings were encoded with."""
    device = d._device
    target = device
    moved: Moved = {}
    moves = consent or d._policy.on_mismatch == "move"
    if moves or device is None:  # all tensors decide about the device, and are moved together
        tensors: list[Tensor] = []
        data = _snapshot(data, at, tensors)
        if device is None and tensors:
            device = canonical(tensors[0].device)
        # Host values alone go where torch would create them.
        target = canonical(torch.empty(0).device) if device is None else device
        if moves:
            misplaced = {id(tensor): tensor for tensor in tensors if tensor.device != target}
            moved = dict(zip(misplaced, transfer(list(misplaced.values()), target), strict=True))
    try:
        staged, encoders = _convert_items(d, data, cast(torch.device, target), moved, at)
    except TypeError:
        refuse_optimizer(data, at)
        raise
    if device is None and any(isinstance(value, (Tensor, TreeDict)) for value in staged.values()):
        device = target
    return staged, device, encoders


def _snapshot(data: Mapping[str, Any], at: Path, tensors: list[Tensor]) -> dict[str, Any]:
    """``data`` with each nested mapping read once, as it may create its values anew; its tensors go to ``tensors``."""
    refuse_deeper(at)
    out = dict(data.items())
    for key, value in out.items():
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, TreeDict):
            tensors += cast("TreeDict[Any]", value)._tensors()
        elif isinstance(value, Mapping):
            out[key] = _snapshot(cast("Mapping[str, Any]", value), (*at, key), tensors)
    return out


def _convert_items(
    d: TreeDict[Any], data: Mapping[str, Any], target: torch.device, moved: Moved, at: Path
) -> tuple[dict[str, Any], dict[str, StringEncoder]]:
    """The stored form of every value on ``target``, and the encoders that strings were encoded with."""
    staged: dict[str, Any] = {}
    encoders: dict[str, StringEncoder] = {}
    for key, value in list(data.items()):  # an encoder may write to the mapping that it serves
        if not isinstance(cast(object, key), str):
            refuse_key(key, at)
        if isinstance(value, Tensor):
            staged[key] = value if value.device == target else _moved(value, target, moved, (*at, key))
        elif isinstance(value, Mapping):
            staged[key] = _nested(d, cast("Mapping[str, Any]", value), target, moved, (*at, key))
        else:
            stored, encoder = convert(value, target, d._policy, (*at, key))
            if encoder is not None:
                encoders[key] = encoder
                stored = place_codes(d, stored, target, (*at, key))
            staged[key] = stored
    return staged, encoders


def _moved(tensor: Tensor, target: torch.device, moved: Moved, path: Path) -> Tensor:
    if id(tensor) in moved:
        return moved[id(tensor)]
    raise DeviceMismatchError.at(path, target, tensor.device)


def place_codes(d: TreeDict[Any], codes: Any, target: torch.device, path: Path) -> Any:
    """What an encoder on the host gave, on ``target``: a tensor, or several tensors as a nested dict."""
    if isinstance(codes, Tensor):
        return codes if codes.device == target else transfer([codes], target)[0]
    refuse_deeper(path)
    nested = (d._nested_class(path[-1]) or type(d))._new((), target, d._policy)
    insert(nested, codes, consent=True, at=path)
    return nested


def _nested(d: TreeDict[Any], value: Mapping[str, Any], target: torch.device, moved: Moved, path: Path) -> Any:
    """``value`` as a nested dict. A `DeviceDict` keeps its encoders, and the policy of its class."""
    refuse_deeper(path)
    kind = type(cast(object, value))
    given = value._policy if isinstance(value, TreeDict) else None
    cls, policy = kind_nested(type(d), path[-1], kind, given, value, d._policy)
    nested: TreeDict[Any] = cls._new((), target, policy)
    validated = cls is kind  # It may be a row of a typed batch, which has no batch dimension.
    data = nested._given(value, path) if nested._has_fields and not validated else value
    staged, encoders = _convert_items(nested, data, target, moved, path)
    if validated:
        TreeDict._commit(nested, staged, target, encoders)
        return nested
    try:
        nested._commit(staged, target, encoders)
    except (TypeError, ValueError) as error:
        raise with_path(error, path) from error
    return nested
