"""Fit one value to the rows of a field: convert it, and validate its encoder, layout, dtype and width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .._encoders.protocol import decode_alike, padding, short
from .._errors import DeviceMismatchError, Path, dotted, dtype_name
from .._memory.dense import is_dense
from .._memory.transfer import transfer
from .._tree.convert import convert
from .._tree.tree import TreeDict
from .._tree.walk import as_shared
from .insert import place_codes


def row_value(d: TreeDict[Any], key: str, value: Any, at: Path, move: bool) -> Any:
    """The value that ``d[key] = value`` would store, with Python numbers in the dtype of the field ``d[key]``.

    A mapping is returned itself. ``at``: the path of ``d``. ``move``: move tensors that are on another device.
    """
    field, path, device = d[key], (*at, key), d._device
    assert device is not None  # a dict with rows has tensors
    value = as_shared(value, path)
    if isinstance(value, Mapping):
        return value
    if isinstance(value, Tensor):
        if value.device == device:
            return value
        if not move:
            raise DeviceMismatchError.at(path, device, value.device)
        return transfer([value], device)[0]
    stored, encoder = convert(value, device, d._policy, path, field.dtype if isinstance(field, Tensor) else None)
    if encoder is None:
        return stored
    if isinstance(field, Tensor) and key not in d._policy.carried((key,)):
        raise ValueError(f"{dotted(path)} is a field of numbers, got strings; encode them first")
    return place_codes(d, stored, device, path)


def refuse_encoders(d: TreeDict[Any], other: Mapping[str, Any], at: Path) -> None:
    """Raise ``ValueError`` if fields of ``other`` are encoded with other encoders than the fields of ``d``."""
    if not isinstance(other, TreeDict) or other._policy is d._policy:
        return
    ours = d._policy.encoders
    for key, encoder in other._policy.encoders.items():
        if key in d and key in ours and not decode_alike(ours[key], encoder):
            raise ValueError(
                f"{dotted((*at, key))} is encoded with {short(ours[key])}, the given value with {short(encoder)}; "
                "give the strings themselves: decode it first"
            )


def refuse_unfit(field: Tensor, value: Tensor, path: Path) -> None:
    """Raise ``ValueError`` for a layout or dtype that rows of ``field`` cannot hold."""
    if field.layout is torch.strided and not is_dense(value):
        what = "a nested" if value.is_nested else "a quantized" if value.is_quantized else "a sparse"
        raise ValueError(f"{dotted(path)} has dense rows, got {what} tensor; convert it first")
    if value.is_meta and not field.is_meta:
        raise ValueError(f"{dotted(path)} is on meta, without values; make it on another device")
    if not torch.can_cast(value.dtype, field.dtype):
        raise ValueError(
            f"{dotted(path)}: {dtype_name(value.dtype)} cannot be written into {dtype_name(field.dtype)}; "
            "convert it first"
        )


def fit_codes(field: Tensor, value: Tensor, encoder: object, path: Path) -> Tensor:
    """Pad the codes of strings to the width of ``field``. Any other value is returned itself."""
    number = None if field.dim() < 2 else padding(encoder, field, value)
    if number is None:
        return value
    width, given = field.shape[-1], value.shape[-1]
    if given > width:
        raise ValueError(
            f"{dotted(path)}: a string takes {given} codes of {short(encoder)}, the rows of this field have {width}; "
            "shorten the string, or make the field anew, wide enough for it"
        )
    return F.pad(value, (0, width - given), value=number)
