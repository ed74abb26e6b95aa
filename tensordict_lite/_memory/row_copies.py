"""Copy rows out of tensors, and group equal rows. A row is an index of the first dimension."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from sys import maxsize

import torch
from torch import Tensor
from torch.nn import functional as F

from .buffer import HUGE, in_worker_process, new_batch_buffer, new_buffer, regions, views_of
from .device import CPU, intercepted
from .dtypes import as_bits
from .layout import lay_out_batch
from .packed import can_pack, packable

_MAY_BE_HUGE = HUGE // 16
"""A tensor of more elements may be larger than `HUGE`: the largest dtype has 16 bytes."""


def take_rows(tensors: Sequence[Tensor], index: Tensor) -> list[Tensor]:
    """Copy rows of each tensor.

    ``index``: int64[n] on the device of the tensors. Every number is a row; negative numbers are not allowed.
    """
    if not tensors or intercepted():
        return [_take(t, index, maxsize) for t in tensors]
    most = _MAY_BE_HUGE * tensors[0].shape[0] // (index.shape[0] or 1)
    try:
        # Most tensors need no call of `_take`: "256 rows of a million" of `make guard` waits for these calls.
        return [
            t.index_select(0, index) if type(t) is Tensor and t.numel() <= most else _take(t, index, most)
            for t in tensors
        ]
    except RuntimeError:  # a tensor whose dtype `index_select` lacks
        return [_take(t, index, most) for t in tensors]


def take_batch(tensors: Sequence[Tensor], index: Tensor, device: torch.device | None) -> list[Tensor]:
    """Copy rows of each tensor for a batch: in a worker process into memory that can be sent."""
    if device is None or not (in_worker_process() and can_pack(device)):
        return take_rows(tensors, index)
    return _take_into_batch(tensors, [(t, index) for t in tensors], len(index), device)


Source = tuple[Tensor, Tensor]
"""A tensor, and the indices of some rows there. It may have another dtype of the same size."""


def take_from(like: Sequence[Tensor], sources: Sequence[Source], count: int) -> list[Tensor]:
    """Copy ``count`` rows for a batch on the CPU, as `take_batch`.

    ``like``: tensors with the dtypes and the shapes of a row.
    """
    if in_worker_process():
        return _take_into_batch(like, sources, count, CPU)
    out: list[Tensor] = []
    for t, (source, at) in zip(like, sources, strict=True):
        taken = source.index_select(0, at)
        out.append(taken if taken.dtype is t.dtype else taken.view(t.dtype))
    return out


def _take_into_batch(
    tensors: Sequence[Tensor], sources: Sequence[Source], count: int, device: torch.device
) -> list[Tensor]:
    specs = [(t.dtype, t.shape[1:], True) if packable(t) else None for t in tensors]
    layouts = lay_out_batch(tuple(specs), count)
    total = sum([layout.nbytes for layout in layouts])
    out = list(tensors)
    for layout in layouts:
        views_of(layout, regions(new_batch_buffer(layout, device, total), layout), out)
    for i, (source, at) in enumerate(sources):
        if specs[i] is None:
            out[i] = take_rows([source], at)[0]
        else:
            _select_into(out[i], source, at)
    return out


def _take(t: Tensor, index: Tensor, most: int) -> Tensor:
    """Copy rows of any tensor. A huge result on the CPU goes into a buffer with huge pages.

    ``most``: the result of a tensor of more elements may be larger than `HUGE`.
    """
    if type(t) is not Tensor:
        return t[index]
    if t.numel() > most and t.is_cpu and packable(t):
        shape = (len(index), *t.shape[1:])
        nbytes = prod(shape) * t.itemsize
        if nbytes > HUGE:
            return _select_into(new_buffer(nbytes, CPU).view(t.dtype).view(shape), t, index)
    try:
        return t.index_select(0, index)  # 0.3x to 0.6x the time of `t[index]` (`bench_rows.py`)
    except RuntimeError:  # for unsigned integers in tensors of one dimension; NotImplementedError from torch 2.8 on
        return as_bits(t).index_select(0, index).view(t.dtype)


def _select_into(out: Tensor, t: Tensor, index: Tensor) -> Tensor:
    """Copy rows of a tensor into ``out``."""
    torch.index_select(as_bits(t), 0, index, out=as_bits(out))
    return out


def group_equal(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Group equal rows: numbers, or rows of integers.

    Returns the distinct rows in ascending order, the order that sorts all rows (stable), and the size of each group.
    """
    if not len(values):
        none = torch.empty(0, dtype=torch.int64, device=values.device)
        return values, none, none
    if values.dim() == 1:
        ranked, order = values.sort(stable=True)
        distinct, counts = ranked.unique_consecutive(return_counts=True)
        return distinct, order, counts
    if values.dtype is not torch.uint8:
        distinct, which, counts = torch.unique(values, dim=0, return_inverse=True, return_counts=True)
        return distinct, which.argsort(stable=True), counts
    # A sort by each word, the last word first: numbers. `unique` compares whole rows, byte by byte.
    words = _words(values)
    order = words[:, -1].argsort(stable=True)
    for word in reversed(words.unbind(1)[:-1]):
        order = order[word[order].argsort(stable=True)]
    ranked = words[order]
    starts = F.pad((ranked[1:] != ranked[:-1]).any(1), (1, 0), value=True).nonzero().squeeze(1)
    counts = torch.diff(starts, append=starts.new_full((1,), len(values)))
    return values[order[starts]], order, counts


def _words(rows: Tensor) -> Tensor:
    """Rows of bytes as rows of int64, in the same order: they compare as the bytes do."""
    width = max(8, -(-rows.shape[1] // 8) * 8)
    parts = F.pad(rows.contiguous(), (0, width - rows.shape[1])).unflatten(1, (-1, 8))
    parts = parts.flip(2) if sys.byteorder == "little" else parts  # the first byte counts most
    return parts.view(torch.int64).squeeze(2) ^ torch.iinfo(torch.int64).min  # as if the words had no sign
