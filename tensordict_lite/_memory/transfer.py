"""Move, cast and clone lists of tensors. `plan_copies` decides which copies are made, and `execute` makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from .buffer import buffer_of, copy_into, new_buffer, regions, view_over, views_of
from .cast import copy_each
from .dense import dense_bytes
from .device import CPU, META, capabilities, intercepted, is_capturing
from .dtypes import CASTS
from .layout import Layout, cast_groups, dense_stride, distribute, lay_out, with_spare
from .packed import arrange, find_buffer, map_buffer, may_be_packed, pack_into, repeats_of
from .staging import SLOT, Slot, staging_buffer, staging_of

COALESCED_TENSOR = 64 << 10
"""The largest tensor in bytes that is coalesced with others. A separate copy to a GPU takes some microseconds before
its first byte. Coalescing takes the host about as long for 64 KiB. ``bench_transfer.py`` compares both ("H2D")."""
COALESCED_BUFFER = 1 << 20
"""The largest buffer in bytes for coalesced tensors. A coalesced tensor keeps its whole buffer alive. torch's pool for
small allocations (``kSmallSize`` in c10's CUDACachingAllocator) has the same limit."""
STAGED_MOVE = 16 << 20
"""The most bytes of one move to a device, besides coalesced tensors, that go through pinned memory, so that the host
need not wait. With more, the host would wait for its pinned memory in any case."""
FETCHED_TENSOR = 1 << 20
"""The largest tensor in bytes that comes to the host through pinned memory. The second copy, on the host, takes less
time than a wait. The driver copies larger tensors faster, because it overlaps both copies."""


class CopyPlan(NamedTuple):
    """The copies that bring tensors to a device. Each int is an index in the list of tensors."""

    packed: Layout | None = None
    """The buffer of packed tensors, which is copied whole. The results are packed too."""
    cast: Layout | None = None
    """The layout of the packed tensors after the cast, if it changes any."""
    coalesced: tuple[Layout, ...] = ()
    """Buffers into which small tensors are copied, so that one copy moves them all."""
    staged: tuple[int, ...] = ()
    """Larger tensors on the host, each of which goes to the device through pinned memory."""
    fetched: tuple[Layout, ...] = ()
    """Larger tensors, one in each layout, which come to the host through pinned memory, with one wait for all."""
    one_by_one: tuple[int, ...] = ()
    """The tensors that are copied by torch, one by one."""
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

    Small tensors are coalesced: on the host if they go to a device, else on their device. A ``non_blocking`` transfer
    to the host coalesces nothing, because the caller waits for the copies.
    """
    here, there = capabilities(source), capabilities(target)
    capturing = (there.accelerator and is_capturing(target)) or (here.accelerator and is_capturing(source))
    repeats = repeats_of(tensors)
    indices = range(len(tensors))
    everything = tuple(i for i in indices if i not in repeats) if repeats else tuple(indices)
    one_by_one = CopyPlan(one_by_one=everything, repeats=repeats)
    # Each replay of a graph that is captured must read the sources again.
    if not (here.byte_views and there.byte_views) or (capturing and source != target):
        return one_by_one
    pins = (source == CPU and there.pinned_memory) or (target == CPU and here.pinned_memory)
    if len(everything) < 2 and not (pins and source == CPU):
        return one_by_one
    casts = CASTS[dtype]
    packed = find_buffer(tensors, source)
    if packed is not None:
        layout, unpackable = packed.layout, tuple(packed.unpackable)
        changes = any(run.dtype in casts for run in layout.runs)
        cast = lay_out(cast_groups(layout.groups, casts)) if changes else None
        if cast is not None or source != target or copy:
            return CopyPlan(layout, cast, one_by_one=unpackable, repeats=repeats, pins=pins)
    if source == target or (target == CPU and non_blocking):
        return one_by_one
    groups, unpackable = arrange(tensors, repeats)
    coalesced = distribute(cast_groups(groups, casts), COALESCED_TENSOR, COALESCED_BUFFER)
    rest = set(everything).difference(*[layout.members for layout in coalesced])
    staged: list[int] = []
    fetched: list[Layout] = []
    if pins and source == CPU:
        staged = sorted(rest.difference(unpackable))
        if non_blocking:  # the copy of a pinned tensor waits for nothing, and may read it later
            staged = [i for i in staged if not tensors[i].is_pinned()]
        if sum([tensors[i].nbytes for i in staged]) > STAGED_MOVE:
            staged = []
    elif pins:
        for spec, members in groups:
            if spec[0] not in casts and 0 < prod(spec[1]) * spec[0].itemsize <= FETCHED_TENSOR:
                fetched += [lay_out([(spec, [i])]) for i in members if i in rest]
    rest = rest.difference(staged, *[layout.members for layout in fetched])
    return CopyPlan(None, None, tuple(coalesced), tuple(staged), tuple(fetched), tuple(sorted(rest)), repeats, pins)


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
    if plan.packed is not None:
        _move_packed(plan, plan.packed, out, source, target, non_blocking)
    if source == CPU:
        for layout in plan.coalesced:
            _coalesce_to_device(layout, out, target, plan.pins)
        for i in plan.staged:
            out[i] = _stage(out[i], CASTS[dtype].get(out[i].dtype, out[i].dtype), target)
    elif target == CPU:
        one_by_one += _fetch(plan, out, source)
    else:
        for layout in plan.coalesced:
            buffer = _gathered(layout, out, source)
            if buffer is None:
                one_by_one += layout.members
            else:
                views_of(layout, regions(buffer.to(target), layout), out)
    if one_by_one:
        # Copies from the host are asynchronous, and one synchronization at the end frees the sources. With a cast each
        # copy is synchronous, because torch casts on the host. A cast on the device could run out of memory.
        wait = source == CPU and dtype is None and not non_blocking and len(one_by_one) > 1
        wait = wait and capabilities(target).streams
        device = None if source == target else target
        try:
            made = copy_each([tensors[i] for i in one_by_one], device, dtype, non_blocking or wait, copy)
        finally:
            if wait:
                torch.accelerator.current_stream(target).synchronize()
        for i, tensor in zip(one_by_one, made, strict=True):
            out[i] = tensor
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

    Without ``copy``, a tensor that needs no change is returned itself. A tensor that occurs twice is moved once. Packed
    tensors stay packed. Autograd records the copies.

    With ``non_blocking=False``, the caller may change every source on return, and use every result. On the host a
    result is complete. On a device it is ready for later work on the current stream. With True, torch's contract holds.

    Cost: the copies of `plan_copies`. On the same device: a copy of each tensor that is cast, or of a packed buffer.
    """
    if device is META or intercepted():
        return copy_each(tensors, device, dtype, non_blocking, copy)
    if device is None or device == source:
        if source is None or not may_be_packed(tensors):
            return copy_each(tensors, None, dtype, False, copy)
        if not copy and CASTS[dtype].keys().isdisjoint([t.dtype for t in tensors]):
            return list(tensors)
        device, non_blocking = source, False
    if source is None:
        return _from_each_device(tensors, device, dtype, non_blocking, copy)
    plan = plan_copies(tensors, source, device, dtype, non_blocking, copy)
    return execute(plan, tensors, source, device, dtype, non_blocking, copy)


def clone_tensors(tensors: Sequence[Tensor], device: torch.device | None) -> list[Tensor]:
    """A copy of each tensor, as ``Tensor.clone`` makes it. Packed tensors on ``device`` get one new buffer."""
    is_packed = not intercepted() and may_be_packed(tensors)
    packed = map_buffer(tensors, device, Tensor.clone) if is_packed else None
    return [t.clone() for t in tensors] if packed is None else packed


def _from_each_device(
    tensors: Sequence[Tensor], device: torch.device, dtype: torch.dtype | None, non_blocking: bool, copy: bool
) -> list[Tensor]:
    """Make one transfer from each device that has some of the tensors."""
    places: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(i)
    out = list(tensors)
    for place, indices in places.items():
        moved = transfer([tensors[i] for i in indices], device, dtype, non_blocking, copy, place)
        for i, tensor in zip(indices, moved, strict=True):
            out[i] = tensor
    return out


def _move_packed(
    plan: CopyPlan, layout: Layout, out: list[Tensor], source: torch.device, target: torch.device, non_blocking: bool
) -> None:
    """Replace the packed tensors in ``out``, which have this layout, by copies on ``target``.

    The cast is made on the side where it makes the copy smaller. Exception: with ``non_blocking``, a copy between the
    host and a device is cast on the device, so that the host neither waits nor reads data that has not arrived.

    Up to `STAGED_MOVE` bytes go through pinned memory. A pinned buffer is read later if ``non_blocking`` allows it.
    """
    buffer, cast = buffer_of(out, layout), plan.cast
    late = non_blocking and CPU in (source, target)
    if cast is not None and (source == target or (target == CPU if late else cast.nbytes < buffer.nbytes)):
        try:
            buffer = pack_into(out, cast, source)
            layout, cast = cast, None
        except torch.OutOfMemoryError:  # tensors may be moved because the device is full
            if source == target or non_blocking:
                raise
        if source == target:
            return
    if source == target:
        moved = buffer.clone()
    elif source == CPU and plan.pins and buffer.nbytes <= STAGED_MOVE and not (non_blocking and buffer.is_pinned()):
        moved = _stage(buffer, torch.uint8, target)
    else:
        moved = buffer.to(target, non_blocking=non_blocking)
    views_of(layout, regions(moved, layout), out)
    if cast is not None:
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


def _coalesce_to_device(layout: Layout, out: list[Tensor], target: torch.device, pins: bool) -> None:
    """Replace the tensors of the layout in ``out``, on the host, by copies on ``target``, which share a buffer."""
    nbytes = with_spare(layout.nbytes)
    moved = new_buffer(nbytes, target)
    with staging_buffer(nbytes, target, pins) as (staging, pinned):
        copy_into(staging, layout, out)
        moved.copy_(staging, non_blocking=pinned)
    views_of(layout, regions(moved, layout), out)


def _gathered(layout: Layout, out: list[Tensor], source: torch.device) -> Tensor | None:
    """A buffer on ``source`` with copies of the tensors of the layout. None if ``source`` has no memory for it."""
    try:
        buffer = new_buffer(with_spare(layout.nbytes), source)
    except torch.OutOfMemoryError:  # tensors may be moved because the device is full
        return None
    copy_into(buffer, layout, out)
    return buffer


def _fetch(plan: CopyPlan, out: list[Tensor], source: torch.device) -> list[int]:
    """Replace coalesced and fetched tensors by copies on the host, each in memory of its own. The host waits once.

    Returns the tensors that are left, for want of memory on the device or of pinned memory.
    """
    left: list[int] = []
    staging, arriving = staging_of(source), list[tuple[Slot, Tensor, Layout]]()

    def arrive() -> None:
        if arriving:
            torch.accelerator.current_stream(source).synchronize()
        while arriving:
            slot, memory, layout = arriving.pop()
            _own_memory(layout, memory, out)
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
                memory.copy_(buffer[: layout.nbytes], non_blocking=True)
            else:
                _own_memory(layout, buffer.to(CPU), out)
        for layout in plan.fetched:
            memory = pinned(layout)
            if memory is None:
                left += layout.members
            else:
                regions(memory, layout)[0].copy_(out[layout.members[0]], non_blocking=True)
    finally:  # also after an error: copies may be under way
        arrive()
    return left


def _own_memory(layout: Layout, buffer: Tensor, out: list[Tensor]) -> None:
    """Replace the tensors of the layout in ``out`` by copies of those in ``buffer``, each in memory of its own."""
    views_of(layout, regions(buffer, layout), out)
    for i in layout.members:
        out[i] = out[i].clone()
