"""Nested tensors of layout ``torch.jagged``: rows that differ in their first dimension, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from .dense import dense_bytes
from .device import intercepted
from .packed import packable


def is_jagged(tensor: Tensor) -> bool:
    """Whether a tensor is a nested tensor of layout ``torch.jagged``."""
    return tensor.is_nested and tensor.layout is torch.jagged


def is_plain_jagged(tensor: Tensor) -> bool:
    """Whether a nested tensor has rows that differ in their first dimension only, without gaps between them."""
    nested: Any = tensor
    return is_jagged(tensor) and nested._ragged_idx == 1 and nested.lengths() is None


def join_jagged(rows: Sequence[Tensor]) -> Tensor:
    """One nested tensor of these rows. All have one dtype, one device, and equal dimensions after the first."""
    lengths = list(map(len, rows))
    offsets = torch.tensor([0, *accumulate(lengths)], device=rows[0].device)
    return torch.nested.nested_tensor_from_jagged(
        torch.cat(list(rows)), offsets, min_seqlen=min(lengths), max_seqlen=max(lengths)
    )


def cat_jagged(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate the rows of several nested tensors; torch's ``cat`` cannot. Raises the error of `parts_of`."""
    values, lengths = zip(*map(values_and_lengths, tensors), strict=True)
    ends = torch.cat(lengths).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(torch.cat(values), torch.cat([ends.new_zeros(1), ends]))


def values_of(tensor: Tensor) -> Tensor:
    """The values of a nested tensor. Calls torch's slow ``values()`` only if autograd must record it."""
    return tensor.values() if tensor.requires_grad else cast(Any, tensor)._values


def values_and_lengths(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The values of a nested tensor without gaps between its rows, and the length of each row.

    Raises ``ValueError`` if another dimension of the rows than the first is ragged.
    """
    nested: Any = tensor
    if nested._ragged_idx != 1:
        raise ValueError("another dimension of its rows than the first differs between the rows")
    if nested.lengths() is not None:
        nested = select_rows(tensor, torch.arange(tensor.shape[0], device=tensor.device))
    offsets: Tensor = nested.offsets()
    values: Tensor = nested.values()
    ends: list[int] = offsets[[0, -1]].tolist()
    return values[ends[0] : ends[1]], offsets.diff()


def over_jagged(values: Tensor, offsets: Tensor, least: int, most: int) -> Tensor:
    """The nested tensor over these values and offsets, without a copy. ``least``, ``most``: the lengths of its rows."""
    return torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=least, max_seqlen=most)


def select_row(tensor: Tensor, index: int) -> Tensor:
    """A view of one row of a tensor. For a nested tensor, ``tensor[index]`` would make a view of every row first."""
    if not is_jagged(tensor) or cast(Any, tensor)._ragged_idx != 1:
        return tensor[index]
    nested: Any = tensor
    offsets: Tensor = nested.offsets()
    given: Tensor | None = nested.lengths()
    index = index + len(offsets) - 1 if index < 0 else index
    start = int(offsets[index])
    end = int(offsets[index + 1]) if given is None else start + int(given[index])
    return values_of(tensor)[start:end]


def select_rows(tensor: Tensor, index: slice | Tensor) -> Tensor:
    """Copy rows of a nested tensor, by a slice, a mask or a tensor of indices. torch has no such operation.

    The first dimension of the rows must be the ragged dimension. Cost: a copy, and one synchronization off the CPU.
    """
    nested: Any = tensor
    offsets: Tensor = nested.offsets()
    given: Tensor | None = nested.lengths()
    starts = offsets[:-1][index]
    lengths = offsets[1:][index] - starts if given is None else given[index]
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    values = values_of(tensor)
    if values.is_cpu and packable(values) and not intercepted():
        return torch.nested.nested_tensor_from_jagged(_copy_ranges(values, starts, ends), ends)
    total = int(ends[-1])
    shift = torch.repeat_interleave(starts - ends[:-1], lengths, output_size=total)
    positions = torch.arange(total, device=offsets.device) + shift
    return torch.nested.nested_tensor_from_jagged(values.index_select(0, positions), ends)


def _copy_ranges(values: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Copy rows of plain values on the CPU: row ``i`` from ``starts[i]`` on, to ``ends[i]`` up to ``ends[i + 1]``.

    A loop over rows takes less time and memory than ``index_select``, which needs an index for each value.
    """
    values = values.contiguous()
    places: list[int] = ends.tolist()
    out = torch.empty((places[-1], *values.shape[1:]), dtype=values.dtype, device="cpu")
    if not out.nbytes:
        return out
    source, target = memoryview(cast(Any, dense_bytes(values)).numpy()), memoryview(cast(Any, dense_bytes(out)).numpy())
    size = out.nbytes // places[-1]
    for first, start, end in zip(starts.tolist(), places, places[1:], strict=False):
        target[start * size : end * size] = source[first * size : (first + end - start) * size]
    return out
