"""Fit values to the rows of fields: convert them, and validate their encoders, layouts, dtypes and widths."""

from __future__ import annotations

import cmath
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .._encoders.protocol import agree, encode_ragged, padding, short
from .._errors import Path, described, device_mismatch, dotted, dtype_name, with_path
from .._memory.cast import out_of_range
from .._memory.dense import is_dense
from .._memory.dtypes import CASTABLE, FOREACH_DTYPES
from .._memory.transfer import transfer
from .._tree.convert import convert
from .._tree.missing import refuse_other_keys
from .._tree.ragged import Ragged
from .._tree.tree import TreeDict
from .._tree.walk import as_shared
from .insert import place_codes


def fitted(d: TreeDict[Any], other: Mapping[str, Any], at: Path, table: bool) -> Iterator[tuple[Path, Any, Any]]:
    """Every field of ``d`` with its path, and the rows that ``other`` has for it. See `fitted_field`."""
    refuse_other_fields(d, other, at, table)
    for key in d:
        yield from fitted_field(d, key, other[key], at, table)


def refuse_other_fields(d: TreeDict[Any], other: Mapping[str, Any], at: Path, table: bool) -> None:
    """Raise ``ValueError`` if ``other`` has other keys or encoders than ``d``."""
    if list(d) != list(other):
        refuse_other_keys(d, other, at, "the given mapping", "the table" if table else f"this {type(d).__name__}")
    if not isinstance(other, TreeDict) or other._policy is d._policy:
        return
    ours = d._policy.encoders
    for key, encoder in other._policy.encoders.items():
        if key in d and key in ours:
            agree(ours[key], encoder, (*at, key))


def fitted_field(d: TreeDict[Any], key: str, given: Any, at: Path, table: bool) -> Iterator[tuple[Path, Any, Any]]:
    """The path of a field of ``d``, the field, and the rows that ``given`` has for it; of a nested dict, each field.

    The caller validates the shape. The rows of a ragged field are `RowsToFit`. A kept object has the given object.

    Args:
        at: the path of ``d``.
        table: ``d`` has the columns of a table, and tensors may be anywhere.
    """
    path, field = (*at, key), d[key]
    if not isinstance(field, (Tensor, Ragged, TreeDict)):
        yield path, field, given
        return
    if isinstance(field, Ragged):
        yield path, field, ragged_rows(d, key, given, at, table)
        return
    if isinstance(field, Tensor) and field.is_nested:
        raise ValueError(f"{dotted(path)} is a nested tensor, whose rows cannot be set; replace the whole field")
    value = given if table and isinstance(given, Tensor) else row_value(d, key, given, at, table)
    if isinstance(field, TreeDict) and isinstance(value, Mapping):
        yield from fitted(field, value, path, table)
    elif isinstance(field, Tensor) and isinstance(value, Tensor):
        refuse_unfit(field, value, path, table)
        yield path, field, fit_codes(field, value, d._policy.encoders.get(key), path)
    else:
        what = "a nested dict" if isinstance(field, TreeDict) else "a column" if table else "a tensor"
        if table:
            raise ValueError(f"{dotted(path)} is {what} in this table, got {described(value)}")
        raise ValueError(f"{dotted(path)} is {what}; its rows cannot be set from {described(given)}")


def row_value(d: TreeDict[Any], key: str, value: Any, at: Path, table: bool = False) -> Any:
    """The value that ``d[key] = value`` would store, with Python numbers in the dtype of the field ``d[key]``.

    A mapping is returned itself. ``at``: the path of ``d``. ``table``: ``d`` has the columns of a table. Then tensors
    may be anywhere, and Python numbers that the field cannot hold get a wider dtype, for the error of `refuse_unfit`.
    """
    field, path, device = d[key], (*at, key), d._device
    field = field.values if isinstance(field, Ragged) else field
    assert device is not None  # a dict with rows has tensors
    value = as_shared(value, path)
    if isinstance(value, Mapping):
        return value
    if isinstance(value, Tensor):
        if value.device == device:
            return value
        if not (table or d._policy.on_mismatch == "move"):
            raise device_mismatch(path, device, value.device)
        return transfer([value], device)[0]
    dtype = field.dtype if isinstance(field, Tensor) else None
    stored, encoder = convert(value, device, d._policy, path, dtype)
    if encoder is None:
        if table and dtype in CASTABLE and not isinstance(value, np.ndarray) and _may_be_out_of_range(stored):
            wide = torch.complex128 if dtype.is_complex else torch.float64
            return convert(value, device, d._policy, path, wide).value
        return stored
    if isinstance(field, Tensor) and key not in d._policy.carried((key,)):
        raise ValueError(f"{dotted(path)} is a field of numbers, got strings; encode them first")
    return place_codes(d, stored, device, path)


def _may_be_out_of_range(stored: object) -> bool:
    """Whether a tensor of Python numbers may have another number, or an infinity, in the place of a large one."""
    if not isinstance(stored, Tensor):
        return False
    return stored.dtype not in FOREACH_DTYPES or not cmath.isfinite(stored.sum().item())


def refuse_unfit(field: Tensor, value: Tensor, path: Path, table: bool = False) -> None:
    """Raise ``ValueError`` for a layout or dtype that rows of ``field`` cannot hold. A tensor without values fits any.

    ``table``: raise it for a number that the dtype of ``field`` cannot hold, too. In memory, torch casts the numbers.
    """
    if field.layout is torch.strided and not is_dense(value):
        what = "a nested" if value.is_nested else "a quantized" if value.is_quantized else "a sparse"
        raise ValueError(f"{dotted(path)} has dense rows, got {what} tensor; convert it first")
    if value.is_meta and not field.is_meta:
        raise ValueError(f"{dotted(path)} is on meta, without values; make it on another device")
    if value.numel() and not torch.can_cast(value.dtype, field.dtype):
        raise ValueError(
            f"{dotted(path)}: {dtype_name(value.dtype)} cannot be written into {dtype_name(field.dtype)}; "
            "convert it first"
        )
    if table and (number := out_of_range(value, field.dtype)) is not None:
        raise ValueError(
            f"{dotted(path)}: {dtype_name(field.dtype)} cannot hold {number}; convert the values first, or make the "
            f"column anew as {dtype_name(value.dtype)}"
        )


def fit_codes(field: Tensor, value: Tensor, encoder: object, path: Path) -> Tensor:
    """Pad the codes of strings to the width of ``field``. Any other value is returned itself."""
    number = None if field.dim() < 2 else padding(encoder, field, value)
    if number is None or value.shape[-1] == field.shape[-1]:
        return value
    width, given = field.shape[-1], value.shape[-1]
    if given > width:
        raise ValueError(
            f"{dotted(path)}: a string takes {given} codes of {short(encoder)}, the rows of this field have {width}; "
            "shorten the string, or make the field anew, wide enough for it"
        )
    return F.pad(value, (0, width - given), value=number)


# --- ragged fields ---


class RowsToFit(NamedTuple):
    """Rows for a ragged field: their values, the length of each, and whether the value was one row, not a list."""

    values: Tensor
    lengths: Tensor
    is_one: bool


def ragged_rows(d: Any, key: str, value: Any, at: Path, table: bool) -> RowsToFit:
    """Convert and validate a value for rows of the ragged field ``d[key]``, as `row_value` does for other fields.

    ``value``: a ragged field, strings, a list with a value for each row, a dense tensor of rows, or one row. The
    padding of strings in a dense tensor is left out.
    """
    column, encoder, path = d[key].values, d._policy.encoders.get(key), (*at, key)
    if isinstance(value, Tensor) and value.is_nested:
        value = Ragged.from_rows(value)
    if isinstance(value, Ragged):
        values = _fitting(column, _row(d, key, value.values, at, table), path)
        return RowsToFit(values, value.lengths.to(values.device), False)
    if isinstance(value, Mapping):
        raise ValueError(f"{dotted(path)} is ragged; its rows cannot be set from {described(value)}")
    is_string = encoder is not None and encoder.code_ndim == column.dim()  # a row is one string, a list has many
    if is_string and isinstance(value, (list, tuple)) and not value:
        return RowsToFit(column[:0], torch.zeros(0, dtype=torch.int64, device=column.device), False)
    strings = [value] if isinstance(value, str) else value
    try:
        codes = None if column.dim() > 1 else encode_ragged(encoder, strings)
    except ValueError as error:
        raise with_path(error, path) from error
    if codes is not None:
        return RowsToFit(codes[0].to(column.device), codes[1].to(column.device), isinstance(value, str))
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], (list, tuple, np.ndarray, Tensor)):
        parts = [_row(d, key, row, at, table) for row in value]
        if parts[0].dim() == column.dim():
            for i, part in enumerate(parts):
                _fitting(column, part, path, f"row {i} is")
            lengths = torch.tensor(list(map(len, parts)), device=column.device)
            return RowsToFit(torch.cat([part.to(column.dtype) for part in parts]), lengths, False)
    whole = _row(d, key, value, at, table)
    is_one = whole.dim() <= column.dim()
    rows = whole.unsqueeze(0) if is_one else whole
    if rows.dim() != column.dim() + 1 or rows.shape[2:] != column.shape[1:]:
        _fitting(column, whole, path)  # raises the error
    return RowsToFit(*_without_padding(rows, None if column.dim() > 1 else padding(encoder, column, rows)), is_one)


def _row(d: Any, key: str, row: Any, at: Path, table: bool) -> Tensor:
    """One row, or rows in one tensor. An empty list has no dtype of its own."""
    column = d[key].values
    if isinstance(row, (list, tuple)) and not row:
        return column[:0]
    if isinstance(row, Tensor):
        refuse_unfit(column, row, (*at, key))  # first, as a tensor on meta cannot be moved
    values = row_value(d, key, row, at, table)
    refuse_unfit(column, values, (*at, key), table)
    return fit_codes(column, values, d._policy.encoders.get(key), (*at, key))


def _fitting(column: Tensor, values: Tensor, path: Path, what: str = "got") -> Tensor:
    if values.dim() != column.dim() or values.shape[1:] != column.shape[1:]:
        row = ", ".join(["*", *map(str, column.shape[1:])])
        raise ValueError(f"{dotted(path)}: expected rows [..., {row}] or one row [{row}], {what} {described(values)}")
    return values


def _without_padding(rows: Tensor, number: int | None) -> tuple[Tensor, Tensor]:
    """The values of rows in a dense tensor, and their lengths. ``number``: the padding of codes, which is left out."""
    count, width = rows.shape[:2]
    if number is None or not width:
        return rows.flatten(0, 1), torch.full((count,), width, device=rows.device)
    used = rows != number
    after_last = width - used.flip(1).to(torch.uint8).argmax(1)  # argmax finds the first maximum
    lengths = torch.where(used.any(1), after_last, 0)
    return rows[torch.arange(width, device=rows.device) < lengths[:, None]], lengths
