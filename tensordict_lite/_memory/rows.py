"""Copy rows out of tensors, and write rows into tensors. A row is an index of the first dimension."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from .buffer import FOREACH_DTYPES, clear_gaps, flat_over, new_buffer, regions, views_of
from .device import CPU
from .layout import Group, Layout, Sizes, lay_out, row_major
from .packed import can_pack, find_unpackable, intercepted

Index = int | slice | Tensor
"""The rows to write: one row, a slice, or int64[n] on the device of the tensors."""

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""torch has no ``index_select`` for these dtypes in one dimension. The signed dtypes of the same size have one."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""A dtype for each item size that every kernel supports."""


def take_rows(tensors: Sequence[Tensor], index: Tensor) -> list[Tensor]:
    """Copy rows of each tensor.

    ``index``: int64[n] on the device of the tensors. Every number is a row; negative numbers are not allowed.
    """
    # index_select takes 0.3 to 0.6 times as long as `tensor[index]` (256 and 4,096 of two million rows, float32).
    return [_take(t, index) for t in tensors]


def take_batch(tensors: Sequence[Tensor], index: Tensor, device: torch.device | None) -> list[Tensor]:
    """Copy rows of each tensor for a batch. In a DataLoader worker the rows are packed into memory that can be sent.

    Elsewhere they are not packed: that takes 1.5 times as long (256 rows of 12 fields), and pays for a batch that is
    sent only.
    """
    if get_worker_info() is None or device is None or not can_pack(device):
        return take_rows(tensors, index)
    unpackable = find_unpackable(tensors)
    out = list(tensors)
    for i in unpackable:
        out[i] = _take(tensors[i], index)
    left = set(unpackable)
    members = [i for i in range(len(tensors)) if i not in left]
    layout = _layout(len(index), *[(i, tensors[i].dtype, tensors[i].shape) for i in members])
    if not layout.runs:
        return out
    buffer = batch_buffer(layout, device)
    views_of(layout, regions(buffer, layout), out)
    for i in members:
        source, into = tensors[i], out[i]
        if (signed := _SIGNED.get(source.dtype)) is not None:
            source, into = source.view(signed), into.view(signed)
        torch.index_select(source, 0, index, out=into)
    return out


def batch_buffer(layout: Layout, device: torch.device) -> Tensor:
    """A new buffer for a batch, its gaps filled with zeros. In a DataLoader worker it is shared memory."""
    if device is CPU and get_worker_info() is not None:
        storage = cast(Any, torch.UntypedStorage)._new_shared(layout.nbytes)  # the system fills it with zeros
        return flat_over(storage, torch.uint8, layout.nbytes, CPU)
    return clear_gaps(new_buffer(layout.nbytes, device), layout)


@lru_cache(maxsize=64)  # the batches of a loader are alike but for the last; to lay out 12 fields takes 20 us
def _layout(count: int, *fields: tuple[int, torch.dtype, Sizes]) -> Layout:
    """The layout of ``count`` rows of each field, given as its index, dtype and shape."""
    groups: dict[tuple[torch.dtype, Sizes], Group] = {}
    for i, dtype, whole in fields:
        shape = (count, *whole[1:])
        groups.setdefault((dtype, shape), ((dtype, shape, row_major(shape)), []))[1].append(i)
    return lay_out(groups.values())


def _take(t: Tensor, index: Tensor) -> Tensor:
    if type(t) is not Tensor:
        return t[index]
    signed = _SIGNED.get(t.dtype)
    return t.index_select(0, index) if signed is None else t.view(signed).index_select(0, index).view(t.dtype)


def write_rows(targets: Sequence[Tensor], index: Index, values: Sequence[Tensor]) -> None:
    """Write each value into rows of its target, for tensors that `can_write` accepts.

    Each value has the shape of the rows, and a dtype that can be cast to that of its target.
    """
    if isinstance(index, Tensor):
        for target, value in zip(targets, values, strict=True):
            _index_copy(target, index, value.to(target.dtype))
        return
    rows = [target[index] for target in targets]
    if rows[0].is_cpu:
        torch._foreach_copy_(rows, list(values))  # 0.75 times the time of a loop of `target[index] = value` (12 fields)
    else:  # the CUDA kernel of some versions misreads a list of mixed dtypes
        for row, value in zip(rows, values, strict=True):
            row.copy_(value)


def _index_copy(target: Tensor, index: Tensor, value: Tensor) -> None:
    # index_copy_ takes 0.85 times as long as `target[index] = value`, but lacks the dtypes that foreach kernels lack.
    if target.dtype not in FOREACH_DTYPES:
        bits = _BITS[target.itemsize]
        target, value = target.view(bits), value.view(bits)
    target.index_copy_(0, index, value)


def can_write(targets: Sequence[Tensor], values: Sequence[Tensor]) -> bool:
    """Whether no write into a target can fail, given that the shapes fit and the dtypes can be cast.

    It can fail for subclasses, for other layouts, for tensors of autograd or of inference mode, and for expanded ones.
    """
    if intercepted() or (torch.is_grad_enabled() and any(value.requires_grad for value in values)):
        return False
    inference = torch.is_inference_mode_enabled()
    return all(
        type(t) is Tensor
        and t.layout is torch.strided
        and t.is_contiguous()
        and not (t.requires_grad or t.is_nested or t.is_neg() or t.is_conj() or t.is_quantized)
        and (inference or not t.is_inference())
        for t in targets
    )


def share_memory(targets: Sequence[Tensor], values: Sequence[Tensor]) -> bool:
    """Whether a value may lie in the memory of a target. Compares storages, not the elements that are used."""
    try:
        ours, theirs = {_span(target) for target in targets}, {_span(value) for value in values}
    except NotImplementedError:  # sparse tensors and some subclasses have no storage
        return True
    spans = sorted([(*span, 0) for span in ours] + [(*span, 1) for span in theirs])
    ends = [0, 0]  # of the storages so far: of the targets, of the values
    for start, end, whose in spans:
        if start < ends[1 - whose]:
            return True
        ends[whose] = max(ends[whose], end)
    return False


def _span(t: Tensor) -> tuple[int, int]:
    storage = t.untyped_storage()
    start = storage.data_ptr()
    return start, start + storage.nbytes()
