"""Rows of any length: the values of all rows, one row after the other, and offsets. Row ``i`` has the values
``values[offsets[i] : offsets[i + 1]]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._errors import described
from .dense import is_dense
from .device import intercepted

_INT32_MAX = torch.iinfo(torch.int32).max


def offsets_of(lengths: Sequence[int]) -> Tensor:
    """The offsets of rows with these lengths, on the CPU: int32 ``[rows + 1]``, or int64 if int32 is too small."""
    ends = [0, *accumulate(lengths)]
    return torch.tensor(ends, dtype=_dtype_for(ends[-1]), device="cpu")


def _dtype_for(total: int) -> torch.dtype:
    """The dtype of the offsets of ``total`` values: int32, which kernels of attention read, or int64 from 2**31 on."""
    return torch.int32 if total <= _INT32_MAX else torch.int64


def narrowed(offsets: Tensor, total: int) -> Tensor:
    """Offsets in the dtype for ``total`` values."""
    return offsets.to(_dtype_for(total))


def cat_offsets(offsets: Sequence[Tensor], totals: Sequence[int]) -> Tensor:
    """The offsets of all rows of several ragged fields, which have ``totals`` values. No synchronization."""
    parts: list[Tensor] = [offsets[0][:1].to(torch.int64)]
    before = 0
    for part, total in zip(offsets, totals, strict=True):
        parts.append(part[1:].to(torch.int64) + before)
        before += total
    return narrowed(torch.cat(parts), before)


def problem_of(values: Any, offsets: Any) -> str:
    """Why these are not the values and offsets of rows, from dtypes and shapes alone. ``""`` if they may be."""
    if not isinstance(values, Tensor) or not is_dense(values) or not values.dim():
        return f"'values': expected a dense tensor [total, ...], the values of all rows, got {described(values)}"
    if not isinstance(offsets, Tensor) or offsets.dtype not in (torch.int32, torch.int64) or offsets.dim() != 1:
        return f"'offsets': expected int32 or int64 [rows + 1], got {described(offsets)}"
    return "" if len(offsets) else "'offsets': expected [rows + 1] offsets, got none; for no rows give [0]"


def problem_of_ends(values: Tensor, offsets: Tensor) -> str:
    """Why the first or the last offset is wrong, or ``""``. On an accelerator it synchronizes."""
    first, last = int(offsets[0]), int(offsets[-1])
    if first:
        return f"'offsets': expected 0 as the first, got {first}"
    return (
        ""
        if last == len(values)
        else f"'offsets': expected {len(values)} as the last, the number of values, got {last}"
    )


def problem_of_lengths(offsets: Tensor) -> str:
    """Which row has a negative length, or ``""``. On an accelerator it synchronizes."""
    falls = offsets[1:] < offsets[:-1]  # not `diff`, which could overflow
    if not falls.any():
        return ""
    row = int(falls.nonzero()[0])
    return f"'offsets': expected ascending offsets, got {int(offsets[row + 1])} after {int(offsets[row])} at row {row}"


class Selection(NamedTuple):
    """Some rows: where their values lie, a slice or indices; their offsets, and the length of the longest."""

    positions: slice | Tensor
    offsets: Tensor
    longest: int


def selection_of(offsets: Tensor, rows: slice | Tensor) -> Selection:
    """The rows of a slice without a step, or at int64 indices on the device of the offsets.

    Cost: one synchronization off the CPU.
    """
    if isinstance(rows, slice):
        start, stop, _ = rows.indices(len(offsets) - 1)
        part = offsets[start : max(start, stop) + 1]
        first, last, longest = torch.stack([part[0], part[-1], _longest(part.diff())]).tolist()
        return Selection(slice(first, last), narrowed(part - first, last - first), longest)
    starts = offsets.index_select(0, rows).to(torch.int64)
    lengths = offsets.index_select(0, rows + 1) - starts
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    total, longest = torch.stack([ends[-1], _longest(lengths)]).tolist()
    positions = torch.repeat_interleave(starts - ends[:-1], lengths, output_size=total)
    positions += torch.arange(total, device=positions.device)
    return Selection(positions, narrowed(ends, total), longest)


def _longest(lengths: Tensor) -> Tensor:
    return lengths.max() if len(lengths) else lengths.new_zeros(())


def can_read(offsets: Tensor) -> bool:
    """Whether the offsets can be read without a synchronization."""
    return type(offsets) is Tensor and offsets.is_cpu and not intercepted()
