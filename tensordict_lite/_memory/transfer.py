"""Move, cast and clone lists of tensors. `plan_copies` decides which copies are made, and `execute` makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from .buffer import buffer_of, clear_gaps, copy_into, new_buffer, regions, view_over, views_of
from .cast import copy_each
from .dense import dense_bytes
from .device import CPU, META, capabilities, intercepted, is_capturing
from .dtypes import CASTS
from .layout import (
    Chunk,
    Group,
    Layout,
    aligned,
    cast_groups,
    dense_stride,
    lay_out,
    lay_out_apart,
    lay_out_in_chunks,
    may_share,
    nbytes_of,
)
from .packed import arrange, map_storages, may_lie_together, pack_into, repeats_of
from .staging import SLOT, staging_buffer

COALESCED_TENSOR = 32 << 10
"""The largest tensor in bytes that is coalesced with others. A separate copy to a GPU takes some microseconds before
its first byte, and coalescing takes the host longer for more bytes.

Time without / with coalescing, on an H100 (40 tensors, ``bench_moves.py``):

====== ========= =========== ===========
bytes  to it     from pinned to the host
====== ========= =========== ===========
2 KiB  1.65      1.61        1.87
16 KiB 1.66      1.5         1.34
64 KiB 0.7       0.5         0.81
====== ========= =========== ===========
"""
STAGED_MOVE = 16 << 20
"""The most bytes of one move to a busy device, besides coalesced tensors, that go through pinned memory, so that the
host need not wait. With more, the host would wait for its pinned memory in any case.

A training step on an H100 (``bench_moves.py``) with 4 x 2 MB takes 0.74 of the time that it takes with a loop.
"""
STAGED_PINNED = 1 << 20
"""The same for memory that is pinned already. Its copy to an idle device takes a tenth of the time of a copy on the
host, so more bytes wait for the stream."""


Item = int | Layout
"""What is copied whole: a tensor, by its index in the list of tensors, or a storage that several tensors fill."""


class CopyPlan(NamedTuple):
    """The copies that bring tensors to a device."""

    recast: tuple[tuple[Layout, Layout], ...] = ()
    """Storages that tensors fill and that stay one, although tensors are cast; each with its layout after the cast."""
    coalesced: tuple[Chunk, ...] = ()
    """Buffers into which small tensors are copied, so that one copy moves many of them."""
    staged: tuple[Item, ...] = ()
    """What goes through pinned memory to a device with work on its stream, or is cast on the way: storages, and tensors
    larger than a slot. Smaller tensors are in ``coalesced``, each in a buffer of its own."""
    one_by_one: tuple[Item, ...] = ()
    """What is copied by torch, one by one."""
    repeats: Mapping[int, int] = MappingProxyType({})
    """See `repeats_of`. These tensors share the copy of their first occurrence."""
    pins: bool = False
    """Whether copies between the host and the device can go through pinned memory."""


def plan_copies(
    tensors: Sequence[Tensor],
    source: torch.device,
    target: torch.device,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
    copy: bool = False,
) -> CopyPlan:
    """Plan how ``tensors``, all on ``source``, get to ``target``. No operations on tensors may be intercepted.

    A storage that several tensors fill is copied whole, whoever put them together. Other small tensors are coalesced:
    on the host if they go to a device, else on their device. A ``non_blocking`` transfer to the host coalesces nothing,
    because the caller waits for the copies.

    Anything else goes to a device through pinned memory while the current stream of the device has work. Without work
    there is nothing to wait for, and one wait for the copies takes less time than another copy on the host. That holds
    with work too for more than `STAGED_PINNED` bytes in pinned memory. Whether the largest tensor is pinned decides.
    Which tensors lie together afterwards does not depend on the stream.
    """
    here, there = capabilities(source), capabilities(target)
    capturing = (there.accelerator and is_capturing(target)) or (here.accelerator and is_capturing(source))
    # Each replay of a graph that is captured must read the sources again.
    if not (here.byte_views and there.byte_views) or (capturing and source != target):
        repeats = repeats_of(tensors)
        return CopyPlan(one_by_one=tuple([i for i in range(len(tensors)) if i not in repeats]), repeats=repeats)
    casts = CASTS[dtype]
    blocks, groups, unpackable, repeats = arrange(tensors)
    whole: list[Layout] = []
    recast: list[tuple[Layout, Layout]] = []
    split: list[Group] = []  # tensors, as they are after a cast that makes them too large to share a buffer
    for block in blocks:
        if casts.keys().isdisjoint([run.dtype for run in block.runs]):
            whole.append(block)
            continue
        cast = lay_out(cast_groups(block.groups, casts))
        if may_share(block.nbytes, block.smallest) and not may_share(cast.nbytes, cast.smallest):
            split += cast.groups
        else:
            recast.append((block, cast))
    others = [*unpackable, *[i for _, members in groups for i in members]]
    if source == target:
        made = (*lay_out_apart(tuple(split)), *[cast for _, cast in recast])
        chunks = tuple([Chunk(layout, (layout,)) for layout in made])
        return CopyPlan((), chunks, one_by_one=(*sorted(others), *(whole if copy else ())), repeats=repeats)
    pins = source == CPU and there.pinned_memory
    small = [] if target == CPU and non_blocking else [*cast_groups(groups, casts), *split]
    coalesced = lay_out_in_chunks(
        tuple([group for group in small if 0 < nbytes_of(group[0]) <= COALESCED_TENSOR]), SLOT
    )
    others += [i for _, members in split for i in members]
    left = sorted(set(others).difference(*[chunk.together.members for chunk in coalesced]))
    items: dict[Item, None] = dict.fromkeys((*left, *whole))
    busy = pins and len(items) > 0 and not torch.accelerator.current_stream(target).query()
    if not busy and not (pins and casts):
        return CopyPlan(tuple(recast), coalesced, (), tuple(items), repeats, pins)
    wholes = {item: _whole(item, tensors) for item in items if item not in unpackable}
    cast = {item: tensor for item, tensor in wholes.items() if tensor.dtype in casts}
    staged = wholes if busy else cast
    nbytes = sum([tensor.nbytes for tensor in staged.values()])
    if nbytes > STAGED_MOVE:
        staged = {}
    elif staged and (non_blocking or nbytes > STAGED_PINNED):
        # A copy of pinned memory, without a cast, needs no other pinned memory.
        staged = cast if max(staged.values(), key=lambda tensor: tensor.nbytes).is_pinned() else staged
    alone = [
        (spec, members)
        for spec, every in (*cast_groups(groups, casts), *split)
        if 0 < nbytes_of(spec) <= SLOT and (members := tuple([i for i in every if i in staged]))
    ]
    coalesced += lay_out_in_chunks(tuple(alone), SLOT, True)
    apart = {i for _, members in alone for i in members}
    larger = tuple([item for item in staged if item not in apart])
    one_by_one = tuple([item for item in items if item not in staged])
    return CopyPlan(tuple(recast), coalesced, larger, one_by_one, repeats, pins)


def execute(
    plan: CopyPlan,
    tensors: Sequence[Tensor],
    source: torch.device,
    target: torch.device,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
    copy: bool = False,
) -> list[Tensor]:
    """Make the copies of a plan. The arguments are those of `plan_copies`. Returns the new list of tensors."""
    out = list(tensors)
    one_by_one = list(plan.one_by_one)
    for layout, cast in plan.recast:
        _move_and_cast(layout, cast, out, source, target, non_blocking, plan.pins)
    for chunk in plan.coalesced:
        if source == target:
            pack_into(out, chunk.together, target)
        elif source == CPU:
            _coalesce_to_device(chunk, out, target, plan.pins)
        else:
            one_by_one += _coalesce_from_device(chunk, out, source, target)
    for item in plan.staged:
        tensor = _whole(item, out)
        _put(item, _stage(tensor, CASTS[dtype].get(tensor.dtype, tensor.dtype), target), out)
    if one_by_one:
        # Copies from the host are asynchronous, and one synchronization at the end frees the sources. With a cast each
        # copy is synchronous, because torch casts on the host. A cast on the device could run out of memory.
        wait = source == CPU and dtype is None and not non_blocking and len(one_by_one) > 1
        wait = wait and capabilities(target).streams
        device = None if source == target else target
        try:
            items = [_whole(item, tensors) for item in one_by_one]
            made = copy_each(items, device, dtype, non_blocking or wait, copy)
        finally:
            if wait:
                torch.accelerator.current_stream(target).synchronize()
        for item, tensor in zip(one_by_one, made, strict=True):
            _put(item, tensor, out)
    for i, first in plan.repeats.items():
        out[i] = out[first]
    return out


def transfer(
    tensors: Sequence[Tensor],
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
    copy: bool = False,
    source: torch.device | None = None,
) -> list[Tensor]:
    """Move ``tensors`` to ``device``, and cast the floating-point and complex ones to ``dtype``.

    ``device`` is resolved; None keeps each tensor on its device. ``source`` is the device of all tensors, if known.

    Without ``copy``, a tensor that needs no change is returned itself. A tensor that occurs twice is moved once.
    Autograd records the copies. Tensors that fill a storage together do so afterwards.

    With ``non_blocking=False``, the caller may change every source on return, and use every result. On the host a
    result is complete. On a device it is ready for later work on the current stream. With True, torch's contract holds.

    Cost: the copies of `plan_copies`. On the same device: a copy of each tensor that is cast, and of the tensors that
    fill a storage with it.
    """
    if device is META or intercepted():
        return copy_each(tensors, device, dtype, non_blocking, copy)
    if device is None or device == source:
        if source is None or not may_lie_together(tensors):
            return copy_each(tensors, None, dtype, False, copy)
        if not copy and CASTS[dtype].keys().isdisjoint([t.dtype for t in tensors]):
            return list(tensors)
        device, non_blocking = source, False
    if source is None:
        return _from_each_device(tensors, device, dtype, non_blocking, copy)
    plan = plan_copies(tensors, source, device, dtype, non_blocking, copy)
    return execute(plan, tensors, source, device, dtype, non_blocking, copy)


def clone_tensors(tensors: Sequence[Tensor], device: torch.device | None) -> list[Tensor]:
    """A copy of each tensor, as ``Tensor.clone`` makes it. Tensors on ``device`` that fill a storage fill a new one."""
    made = None if intercepted() else map_storages(tensors, device, Tensor.clone)
    return [t.clone() for t in tensors] if made is None else made


def _from_each_device(
    tensors: Sequence[Tensor], device: torch.device, dtype: torch.dtype | None, non_blocking: bool, copy: bool
) -> list[Tensor]:
    """Make one transfer from each device that has some of the tensors."""
    if dtype is None and not copy and {tensor.device for tensor in tensors} <= {device}:
        return list(tensors)  # as the batches of a loader on the CPU are
    places: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(i)
    out = list(tensors)
    for place, indices in places.items():
        moved = transfer([tensors[i] for i in indices], device, dtype, non_blocking, copy, place)
        for i, tensor in zip(indices, moved, strict=True):
            out[i] = tensor
    return out


def _whole(item: Item, tensors: Sequence[Tensor]) -> Tensor:
    return tensors[item] if isinstance(item, int) else buffer_of(tensors, item)


def _put(item: Item, made: Tensor, out: list[Tensor]) -> None:
    """Put the copy of a tensor, or views of the copy of a storage, into the list."""
    if isinstance(item, int):
        out[item] = made
    else:
        views_of(item, regions(made, item), out)


def _move_and_cast(
    layout: Layout,
    cast: Layout,
    out: list[Tensor],
    source: torch.device,
    target: torch.device,
    non_blocking: bool,
    pins: bool,
) -> None:
    """Replace the tensors in ``out`` that fill a storage by copies on ``target``, with the dtypes of ``cast``.

    The cast is made on the side where it makes the copy smaller. Exception: with ``non_blocking``, a copy between the
    host and a device is cast on the device, so that the host neither waits nor reads data that has not arrived.

    Up to `STAGED_MOVE` bytes go through pinned memory. A pinned buffer is read later if ``non_blocking`` allows it.
    """
    buffer, after = buffer_of(out, layout), True
    late = non_blocking and CPU in (source, target)
    if target == CPU if late else cast.nbytes < buffer.nbytes:
        try:
            buffer, layout, after = pack_into(out, cast, source), cast, False
        except torch.OutOfMemoryError:  # tensors may be moved because the device is full
            if non_blocking:
                raise
    if source == CPU and pins and buffer.nbytes <= STAGED_MOVE and not (non_blocking and buffer.is_pinned()):
        moved = _stage(buffer, torch.uint8, target)
    else:
        moved = buffer.to(target, non_blocking=non_blocking)
    _put(layout, moved, out)
    if after:
        pack_into(out, cast, target)


def _stage(tensor: Tensor, dtype: torch.dtype, target: torch.device) -> Tensor:
    """A copy on a device of a tensor on the host, dense and through pinned memory. The source is free on return.

    A copy from pageable memory waits for all earlier work on the stream. A copy through pinned memory does not.
    """
    shape, stride = tensor.shape, dense_stride(tensor.shape, tensor.stride())
    elements = dense_bytes(tensor).view(tensor.dtype)
    moved = torch.empty(elements.numel(), dtype=dtype, device=target)
    count = SLOT // dtype.itemsize
    for start in range(0, elements.numel(), count):
        part, into = elements[start : start + count], moved[start : start + count]
        with staging_buffer(into.nbytes, target) as (staging, pinned):
            into.copy_(staging.view(dtype).copy_(part), non_blocking=pinned)
    return view_over(moved.untyped_storage(), dtype, shape, stride, 0, target)


def _coalesce_to_device(chunk: Chunk, out: list[Tensor], target: torch.device, pins: bool) -> None:
    """Replace the tensors of the chunk in ``out``, on the host, by copies on ``target``, in a buffer each part."""
    layout, parts = chunk
    starts = accumulate([0, *[aligned(part.nbytes) for part in parts]])
    with staging_buffer(layout.nbytes, target, pins) as (staging, pinned):
        copy_into(clear_gaps(staging, layout), layout, out)
        for part, start in zip(parts, starts, strict=False):
            _put(part, staging[start : start + part.nbytes].to(target, non_blocking=pinned), out)


def _coalesce_from_device(chunk: Chunk, out: list[Tensor], source: torch.device, target: torch.device) -> list[int]:
    """Replace the tensors of the chunk in ``out`` by copies on ``target``. On the host, each gets memory of its own.

    Returns the tensors that are left, for want of memory on ``source``.
    """
    left: list[int] = []
    for layout in (chunk.together,) if target == CPU else chunk.parts:
        try:
            buffer = new_buffer(layout.nbytes, source)
        except torch.OutOfMemoryError:  # tensors may be moved because the device is full
            left += layout.members
            continue
        copy_into(buffer, layout, out)
        _put(layout, buffer.to(target), out)
        if target == CPU:
            for i in layout.members:
                out[i] = out[i].clone()
    return left
