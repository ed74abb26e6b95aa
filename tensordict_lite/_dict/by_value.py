"""Find, sort and group the rows of a dict by the values of its fields."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .._encoders.protocol import decode_nested, padding
from .._errors import Path, described, dotted
from .._memory.row_copies import group_equal
from .._tree.fields import field_of
from .._tree.tree import TreeDict, field_encoder
from .._tree.walk import as_path
from .row_values import row_value


def equal_to(d: TreeDict[Any], key: str | Path, value: Any) -> Tensor:
    """Where a field is ``value`` or one of its items: see `DeviceDict.equal`."""
    path, field, owner = row_field(d, key, "equal")
    encoder = field_encoder(owner, path[-1])
    wanted = row_value(field_of(owner, path[-1], path[:-1]), value)
    if not isinstance(wanted, Tensor) or np.ndim(value) > 1:
        raise TypeError(f"{dotted(path)}: equal takes one value or a flat list of values, got {described(value)}")
    if encoder is not None and wanted.dim() - np.ndim(value) < (encoder.code_ndim or 0):  # no strings
        if wanted.numel():
            raise TypeError(f"{dotted(path)}: equal takes strings for {encoder!r}, got {described(value)}")
        wanted = field.new_empty((0, *field.shape[-(encoder.code_ndim or 0) :]))  # an empty list
    lead = field.dim() - (wanted.dim() - np.ndim(value))  # without the dimensions of a code
    if (number := padding(encoder, field, wanted)) is not None and lead < field.dim():
        width = max(field.shape[-1], wanted.shape[-1])
        field, wanted = (F.pad(codes, (0, width - codes.shape[-1]), value=number) for codes in (field, wanted))
    values = wanted if np.ndim(value) else wanted.unsqueeze(0)
    if lead < 0 or values.shape[1:] != field.shape[lead:]:
        raise ValueError(f"{dotted(path)}: equal takes a value for {described(field)}, got {described(wanted)}")
    given, code = values, tuple(range(lead, field.dim()))
    wraps = values.dtype != field.dtype and _is_whole(field) and _is_whole(values)
    if wraps:  # `==` would wrap integers that the field cannot hold
        values = values.to(field.dtype)
    found = [(field == one).all(code) if code else field == one for one in values]
    if wraps:
        held = values.to(given.dtype) == given
        if given.is_signed() != values.is_signed():
            held &= (given if given.is_signed() else values) >= 0
        found = [rows & one.all() for rows, one in zip(found, held, strict=True)]
    return reduce(torch.logical_or, found, torch.zeros(field.shape[:lead], dtype=torch.bool, device=field.device))


def _is_whole(tensor: Tensor) -> bool:
    return tensor.dtype != torch.bool and not tensor.is_floating_point() and not tensor.is_complex()


def sorted_order(d: Any, keys: Sequence[str | Path], descending: bool) -> Tensor:
    """The indices that sort the rows, stable: see `Rows.sort_by`."""
    if not keys:
        raise TypeError("sort_by takes the key of one or more fields")
    order = torch.arange(len(d.rows), device=d.device)
    for key in reversed(keys):  # a stable sort for each key: the last one decides first
        values, _ = _column(d, key, "sort_by")
        if values.dim() > 1:  # the codes of a string: sort their ranks instead
            _, by_code, counts = group_equal(values)
            values = _number_groups(by_code, counts)
        order = order[values[order].argsort(stable=True, descending=descending)]
    return order


def groups(d: TreeDict[Any], keys: Sequence[str | Path]) -> tuple[list[Any], Tensor, Tensor]:
    """The groups of rows with equal values: see `Rows.group_by`.

    Returns the value of each group, or a tuple of the values of several keys; the indices that sort the rows by group,
    stable; and the size of each group.
    """
    if not keys:
        raise TypeError("group_by takes the key of one or more fields")
    parts = [_group(*_column(d, key, "group_by")) for key in keys]
    if len(parts) == 1:
        return parts[0]
    members = [_number_groups(order, counts) for _, order, counts in parts]  # the group of each row, for each key
    combined = members[0]
    for which, (names, _, _) in zip(members[1:], parts[1:], strict=True):
        # Numbers below the number of rows again, so that no product overflows.
        combined = torch.unique(combined * len(names) + which, return_inverse=True)[1]
    _, order, counts = group_equal(combined)
    first = order[counts.cumsum(0) - counts]
    columns = [[names[i] for i in which[first].tolist()] for which, (names, _, _) in zip(members, parts, strict=True)]
    return list(zip(*columns, strict=True)), order, counts


def row_field(d: Any, key: str | Path, called: str) -> tuple[Path, Tensor, Any]:
    """The path of a field, its tensor, and the dict that holds it. ``called``: the method, for messages."""
    path = as_path(key)
    field = d[key]
    if not isinstance(field, Tensor) or field.is_nested:
        raise TypeError(f"{dotted(path)}: {called} takes a dense tensor, got {described(field)}")
    return path, field, d[path[:-1]] if path[1:] else d


def _column(d: TreeDict[Any], key: str | Path, called: str) -> tuple[Tensor, Any]:
    """A field with one value per row, and its encoder or None. ``called``: the method, for messages."""
    path, field, owner = row_field(d, key, called)
    encoder = field_encoder(owner, path[-1])
    if field.dim() - (padding(encoder, field) is not None) != 1:
        raise ValueError(f"{dotted(path)}: {called} takes a field with one value per row, got {described(field)}")
    if field.is_complex() or (field.is_floating_point() and field.itemsize == 1):
        raise TypeError(
            f"{dotted(path)}: {called} takes values that torch sorts, got {described(field)}; give another field of "
            "the same rows"
        )
    return field.detach(), encoder


def _group(field: Tensor, encoder: Any) -> tuple[list[Any], Tensor, Tensor]:
    """The distinct values of a field, the indices that sort its rows by value, and the size of each group."""
    distinct, order, counts = group_equal(field)
    values: list[Any] = distinct.tolist() if encoder is None else decode_nested(encoder, distinct)
    names = dict.fromkeys(values)
    if len(names) < len(values):  # some codes decode alike
        numbers = {name: i for i, name in enumerate(names)}
        which = torch.tensor([numbers[value] for value in values], device=field.device)
        _, order, counts = group_equal(which[_number_groups(order, counts)])
    return list(names), order, counts


def _number_groups(order: Tensor, counts: Tensor) -> Tensor:
    """The number of the group of each row. ``order`` and ``counts``: a result of `group_equal`."""
    out = torch.empty_like(order)
    out[order] = torch.arange(len(counts), device=order.device).repeat_interleave(counts)
    return out
