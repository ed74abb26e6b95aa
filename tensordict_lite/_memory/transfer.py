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
from .layout import Group, Layout, aligned, cast_groups, dense_stride, lay_out, lay_out_apart, may_share, nbytes_of
from .packed import arrange, map_storages, may_lie_together, pack_into, repeats_of
from .staging import SLOT, Slot, staging_buffer, staging_of

COALESCED_TENSOR = 64 << 10
"""The largest tensor in bytes that is coalesced with others. A separate copy to a GPU takes some microseconds before
its first byte. Coalescing takes the host about as long for 64 KiB. ``bench_transfer.py`` compares both ("H2D")."""
STAGED_MOVE = 16 << 20
"""The most bytes of one move to a device, besides coalesced tensors, that go through pinned memory, so that the host
need not wait. With more, the host would wait for its pinned memory in any case."""
FETCHED_TENSOR = 1 << 20
"""The largest tensor in bytes that comes to the host through pinned memory. The second copy, on the host, takes less
time than a wait. The driver copies larger tensors faster, because it overlaps both copies."""


Item = int | Layout
"""What is copied whole: a tensor, by its index in the list of tensors, or a storage that several tensors fill."""


class CopyPlan(NamedTuple):
    """The copies that bring tensors to a device."""

    recast: tuple[tuple[Layout, Layout], ...] = ()
    """Storages that tensors fill and that stay one, although tensors are cast; each with its layout after the cast."""
    coalesced: tuple[Layout, ...] = ()
    """Buffers into which small tensors are copied, so that one copy moves them all."""
    staged: tuple[Item, ...] = ()
    """What goes from the host to the device through pinned memory."""
    fetched: tuple[Layout, ...] = ()
    """Larger tensors, one in each layout, and storages, which come to the host through pinned memory, with one wait.
    Some of these storages are in ``recast`` too."""
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
        return CopyPlan((), made, one_by_one=(*sorted(others), *(whole if copy else ())), repeats=repeats)
    pins = (source == CPU and there.pinned_memory) or (target == CPU and here.pinned_memory)
    small = [] if target == CPU and non_blocking else [*cast_groups(groups, casts), *split]
    apart = lay_out_apart(tuple([group for group in small if 0 < nbytes_of(group[0]) <= COALESCED_TENSOR]))
    coalesced = [layout for layout in apart if len(layout.members) > 1]
    if target == CPU and pins and len(blocks) + len(apart) > 1:
        # A tensor that is cast and left over would cost a wait of its own.
        coalesced = [
            layout for layout in apart if len(layout.members) != 1 or tensors[layout.members[0]].dtype in casts
        ]
    others += [i for _, members in split for i in members]
    items: dict[Item, None] = dict.fromkeys((*sorted(set(others).difference(*[c.members for c in coalesced])), *whole))
    staged: list[Item] = []
    fetched: list[Layout] = []
    if pins and source == CPU:
        staged = [item for item in items if item not in unpackable]
        if non_blocking:  # the copy of pinned memory waits for nothing, and may read it later
            staged = [item for item in staged if not _whole(item, tensors).is_pinned()]
        if sum([_whole(item, tensors).nbytes for item in staged]) > STAGED_MOVE:
            staged = []
    elif pins and not non_blocking:
        for spec, members in groups:
            if spec[0] not in casts and 0 < nbytes_of(spec) <= FETCHED_TENSOR:
                fetched += [lay_out([(spec, (i,))]) for i in members if i in items]
        storages = [*whole, *[block for block, _ in recast]]
        if len(storages) + len(coalesced) + len(fetched) > 1:  # the copy of a single storage waits once in any case
            fetched += [block for block in storages if block.nbytes <= FETCHED_TENSOR]
    for item in (*staged, *fetched, *[i for layout in fetched for i in layout.members]):
        items.pop(item, None)
    return CopyPlan(tuple(recast), tuple(coalesced), tuple(staged), tuple(fetched), tuple(items), repeats, pins)


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
    fetched = set(plan.fetched) if plan.recast else ()
    for layout, cast in plan.recast:
        if layout not in fetched:
            _move_and_cast(layout, cast, out, source, target, non_blocking, plan.pins)
    if source == target:
        for layout in plan.coalesced:
            pack_into(out, layout, target)
    elif source == CPU:
        step = SLOT // max([layout.nbytes for layout in plan.coalesced], default=1)
        for i in range(0, len(plan.coalesced), step):
            _coalesce_to_device(plan.coalesced[i : i + step], out, target, plan.pins)
        for item in plan.staged:
            tensor = _whole(item, out)
            _put(item, _stage(tensor, CASTS[dtype].get(tensor.dtype, tensor.dtype), target), out)
    elif target == CPU:
        one_by_one += _fetch(plan, out, source)
    else:
        for layout in plan.coalesced:
            buffer = _gathered(layout, out, source)
            if buffer is None:
                one_by_one += layout.members
            else:
                _put(layout, buffer.to(target), out)
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
    """A copy on a device of a dense tensor on the host, through pinned memory. The source is free on return.

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


def _coalesce_to_device(layouts: Sequence[Layout], out: list[Tensor], target: torch.device, pins: bool) -> None:
    """Replace the tensors of the layouts in ``out``, on the host, by copies on ``target``, in a buffer each layout."""
    starts = [0, *accumulate([aligned(layout.nbytes) for layout in layouts])]
    with staging_buffer(starts[-1], target, pins) as (staging, pinned):
        for layout, start in zip(layouts, starts, strict=False):
            part = clear_gaps(staging[start : start + layout.nbytes], layout)
            copy_into(part, layout, out)
            _put(layout, new_buffer(layout.nbytes, target).copy_(part, non_blocking=pinned), out)


def _gathered(layout: Layout, out: list[Tensor], source: torch.device) -> Tensor | None:
    """A buffer on ``source`` with copies of the tensors of the layout. None if ``source`` has no memory for it."""
    try:
        buffer = new_buffer(layout.nbytes, source)
    except torch.OutOfMemoryError:  # tensors may be moved because the device is full
        return None
    copy_into(buffer, layout, out)
    return buffer


def _fetch(plan: CopyPlan, out: list[Tensor], source: torch.device) -> list[Item]:
    """Replace coalesced and fetched tensors by copies on the host, in memory that is not pinned. The host waits once.

    Coalesced tensors get memory of their own each. Storages that are cast stay one. Returns what is left, for want of
    memory on the device or of pinned memory.
    """
    left: list[Item] = []
    staging, arriving, casts = staging_of(source), list[tuple[Slot, Tensor, Layout]](), dict(plan.recast)

    def arrive() -> None:
        if arriving:
            torch.accelerator.current_stream(source).synchronize()
        while arriving:
            slot, memory, layout = arriving.pop()
            _own_memory(layout, memory, out, layout in plan.fetched, casts.get(layout))
            staging.release(slot)

    def pinned(layout: Layout) -> Tensor | None:
        taken = staging.take(layout.nbytes) if plan.pins else None
        if taken is None and arriving:
            arrive()
            taken = staging.take(layout.nbytes)
        if taken is None:
            return None
        arriving.append((*taken, layout))
        return taken[1]

    try:
        for layout in plan.coalesced:
            buffer = _gathered(layout, out, source)
            if buffer is None:
                left += layout.members
            elif (memory := pinned(layout)) is not None:
                memory.copy_(buffer, non_blocking=True)
            else:
                _own_memory(layout, buffer.to(CPU), out, False)
        for layout in plan.fetched:
            cast, buffer = casts.get(layout), None
            if cast is not None and cast.nbytes < layout.nbytes:
                buffer = _gathered(cast, out, source)
                casts[cast] = cast
            memory = pinned(layout if cast is None or buffer is None else cast)
            if memory is None and cast is not None:
                _move_and_cast(layout, cast, out, source, CPU, False, False)
            elif memory is None:
                left += [layout] if len(layout.members) > 1 else layout.members
            elif len(layout.members) != 1:
                memory.copy_(buffer_of(out, layout) if buffer is None else buffer, non_blocking=True)
            else:
                regions(memory, layout)[0].copy_(out[layout.members[0]], non_blocking=True)
    finally:  # also after an error: copies may be under way
        arrive()
    return left


def _own_memory(layout: Layout, buffer: Tensor, out: list[Tensor], together: bool, cast: Layout | None = None) -> None:
    """Replace the tensors of the layout in ``out`` by copies of those in ``buffer``, in memory of their own.

    ``cast``: the layout of the copies, which are together, if it may be another one.
    """
    _put(layout, buffer.clone() if together and cast is None else buffer, out)
    if cast is not None:
        pack_into(out, cast, CPU)
    elif not together:
        for i in layout.members:
            out[i] = out[i].clone()
