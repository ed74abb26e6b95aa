"""Fit values to the rows of fields: convert them, and validate their encoders, layouts, dtypes and widths."""

from __future__ import annotations

import cmath
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._encoders.protocol import agree
from .._errors import Path, device_mismatch, dotted
from .._memory.dtypes import CASTABLE, FOREACH_DTYPES
from .._memory.transfer import transfer
from .._tree.convert import convert
from .._tree.fields import field_of
from .._tree.kinds import Field, Fit, Fitted, refuse_rows
from .._tree.missing import refuse_other_keys
from .._tree.tree import TreeDict, data_in
from .._tree.walk import as_shared
from .insert import place_codes


def fitted(d: TreeDict[Any], other: Mapping[str, Any], at: Path, how: Fit) -> Iterator[tuple[Field, Fitted]]:
    """Every field of ``d``, and the rows that ``other`` has for it. The caller validates the number of rows.

    ``at``: the path of ``d``.
    """
    refuse_other_fields(d, other, at, how.table)
    for key in d:
        yield from fitted_field(d, key, other[key], at, how)


def fitted_field(d: TreeDict[Any], key: str, given: Any, at: Path, how: Fit) -> Iterator[tuple[Field, Fitted]]:
    """One field of ``d``, and the rows that ``given`` has for it; of a nested dict, each field. ``at``: as above."""
    field = field_of(d, key, at)
    if not isinstance(field.value, TreeDict):
        yield field, field.kind.fit(field, given, how)
        return
    value = how.convert(field, given)
    if not isinstance(value, Mapping):
        refuse_rows(field.path, "a nested dict", given)
    yield from fitted(field.value, value, field.path, how)


def refuse_other_fields(d: TreeDict[Any], other: Mapping[str, Any], at: Path, table: bool) -> None:
    """Raise ``ValueError`` if ``other`` has other keys or encoders than ``d``."""
    if list(d) != list(other):
        refuse_other_keys(d, other, at, "the given mapping", "the table" if table else f"this {type(d).__name__}")
    if type(other) is dict or not isinstance(other, TreeDict) or other._policy is d._policy:
        return
    ours = d._policy.encoders
    for key, encoder in other._policy.encoders.items():
        if key in d and key in ours:
            agree(ours[key], encoder, (*at, key))


def row_value(field: Field, value: Any, table: bool = False) -> Any:
    """The value that an insert would store as this field, with Python numbers in the dtype of the field.

    A mapping is returned itself. ``table``: the field is a column of a table. Then tensors may be anywhere, and Python
    numbers that the field cannot hold get a wider dtype, for the error of `refuse_unfit`.
    """
    d, path, device = field.owner, field.path, field.owner._device
    column = data_in(field.value)  # None for a nested dict of codes
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
    dtype = None if column is None else column.dtype
    stored, encoder = convert(value, device, d._policy, path, dtype)
    if encoder is None:
        if table and dtype in CASTABLE and not isinstance(value, np.ndarray) and _may_be_out_of_range(stored):
            wide = torch.complex128 if dtype.is_complex else torch.float64
            return convert(value, device, d._policy, path, wide).value
        return stored
    if column is not None and path[-1] not in d._policy.carried(path[-1:]):
        raise ValueError(f"{dotted(path)}: expected numbers, got strings; encode them first")
    return place_codes(d, stored, device, path)


def _may_be_out_of_range(stored: object) -> bool:
    """Whether a tensor of Python numbers may have another number, or an infinity, in the place of a large one."""
    if not isinstance(stored, Tensor):
        return False
    return stored.dtype not in FOREACH_DTYPES or not cmath.isfinite(stored.sum().item())


IN_MEMORY, IN_A_TABLE = Fit(row_value, False), Fit(partial(row_value, table=True), True)
"""How values are fitted to the rows of a dict, and to those of a table."""
