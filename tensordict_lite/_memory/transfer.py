"""Move, cast and clone lists of tensors. `plan_copies` decides which copies are made, and `execute` makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .buffer import buffer_of, copy_into, new_buffer, regions, views_of
from .cast import CASTS, clone_each, copy_each
from .device import CPU, META
from .layout import ALIGNMENT, Layout, cast_groups, lay_out, split
from .packed import (
    arrange,
    buffer_layout,
    intercepted,
    map_buffer,
    may_be_packed,
    pack_into,
    repeats_of,
    supports_buffers,
)

COALESCED_TENSOR = 64 << 10
"""The largest tensor in bytes that is coalesced with others. Coalescing takes host time: 0.4 us for 2 KiB, 2.1 us for
64 KiB, 5.6 us for 256 KiB, 13.7 us for 512 KiB, and 1.6 us per tensor besides. A separate copy to a GPU takes some
microseconds before the first byte. (``bench_transfer.py --sweep`` measures both.)"""
COALESCED_BUFFER = 1 << 20
"""The largest buffer in bytes for coalesced tensors, and the largest packed buffer that is staged in pinned memory. A
coalesced tensor keeps its whole buffer alive. torch's pool for small allocations (``kSmallSize`` in c10's
CUDACachingAllocator) has the same limit."""


@dataclass(frozen=True)
class CopyPlan:
    """The copies that bring tensors to a device. Numbers are indices in the list of tensors."""

    packed: Layout | None = None
    """The buffer of packed tensors, which is copied whole. The results are packed too."""
    cast: Layout | None = None
    """The layout of the packed tensors after the cast, if it changes any."""
    coalesced: tuple[Layout, ...] = ()
    """Buffers into which small tensors are copied, so that one copy moves them all."""
    one_by_one: tuple[int, ...] = ()
    """The tensors that are copied one by one."""
    repeats: Mapping[int, int] = field(default_factory=dict[int, int])
    """See `repeats_of`. These tensors share the copy of their first occurrence."""


def plan_copies(
    tensors: Sequence[Tensor],
    source: torch.device,
    target: torch.device,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
    copy: bool = False,
) -> CopyPlan | None:
    """Plan how ``tensors``, all on ``source``, get to ``target``. None while operations on tensors are intercepted.

    Small tensors are coalesced between the host and a device. Between two devices they are not, because the host waits
    for no copy. With ``non_blocking`` to the host they are not, because the caller waits.
    """
    if intercepted():
        return None
    repeats = repeats_of(tensors)
    indices = range(len(tensors))
    everything = tuple(i for i in indices if i not in repeats) if repeats else tuple(indices)
    one_by_one = CopyPlan(one_by_one=everything, repeats=repeats)
    if len(everything) < 2 or not (supports_buffers(source) and supports_buffers(target)):
        return one_by_one
    cuda = source != target and "cuda" in (source.type, target.type)
    # Only CUDA that is initialized captures. Without CUDA the copy raises torch's error.
    if cuda and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return one_by_one  # each replay of the graph must read the sources again
    casts = CASTS[dtype]
    groups, unpackable = arrange(tensors, repeats)
    packed = buffer_layout(tensors, groups)
    if packed is not None:
        cast = lay_out(cast_groups(groups, casts)) if any(spec[0] in casts for spec, _ in groups) else None
        # A single tensor is cast on its way, without a buffer.
        if (source != target or copy) if cast is None else len(unpackable) + 1 < len(everything):
            return CopyPlan(packed, cast, one_by_one=tuple(unpackable), repeats=repeats)
    if (source == CPU) == (target == CPU) or (target == CPU and non_blocking):
        return one_by_one
    groups = cast_groups(groups, casts) if casts else groups
    parts = split(groups, COALESCED_TENSOR, COALESCED_BUFFER - ALIGNMENT)
    coalesced = tuple([part for part in parts if sum([len(run.members) for run in part.runs]) > 1])
    rest = set(everything).difference(*[run.members for part in coalesced for run in part.runs])
    return CopyPlan(None, None, coalesced, tuple(sorted(rest)), repeats)


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
        _move_packed(plan.packed, plan.cast, out, source, target, non_blocking)
    for layout in plan.coalesced:
        if target != CPU:
            _coalesce_to_device(layout, out, target)
        elif not _coalesce_to_host(layout, out, source):
            one_by_one += layout.members
    if one_by_one:
        # Copies from the host are asynchronous, and one synchronization at the end frees the sources. With a cast each
        # copy is synchronous, because torch casts on the host. A cast on the device could run out of memory.
        wait = target.type == "cuda" and source == CPU and dtype is None and not non_blocking and len(one_by_one) > 1
        device = None if source == target else target
        try:
            made = copy_each([tensors[i] for i in one_by_one], device, dtype, non_blocking or wait, copy)
        finally:
            if wait:
                torch.cuda.current_stream(target).synchronize()
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
    tensors stay packed. Autograd records the copies. With ``non_blocking=False`` the caller may change every source on
    return and use every result: on the host it is complete, on CUDA for later work on the current stream. With True
    torch's contract holds.

    Cost: the copies of `plan_copies`. On the same device: a copy of each tensor that is cast, or of a packed buffer.
    """
    if device is None or device == source:
        if source is None or intercepted() or not may_be_packed(tensors):
            return copy_each(tensors, None, dtype, False, copy)
        if not copy and CASTS[dtype].keys().isdisjoint([t.dtype for t in tensors]):
            return list(tensors)
        device, non_blocking = source, False
    if device is META:
        return copy_each(tensors, device, dtype, non_blocking, copy)
    if source is None:
        return _from_each_device(tensors, device, dtype, non_blocking, copy)
    plan = plan_copies(tensors, source, device, dtype, non_blocking, copy)
    if plan is None:
        return copy_each(tensors, device, dtype, non_blocking, copy)
    return execute(plan, tensors, source, device, dtype, non_blocking, copy)


def clone(tensors: Sequence[Tensor], device: torch.device | None, plain: bool) -> list[Tensor]:
    """A copy of each tensor, as ``Tensor.clone`` makes it. Packed tensors on ``device`` get one new buffer.

    ``plain``: the caller knows that every tensor is a ``Tensor`` itself.
    """
    if intercepted():
        return clone_each(tensors)
    packed = map_buffer(tensors, device, Tensor.clone) if may_be_packed(tensors) else None
    return clone_each(tensors, plain) if packed is None else packed


def _from_each_device(
    tensors: Sequence[Tensor], device: torch.device, dtype: torch.dtype | None, non_blocking: bool, copy: bool
) -> list[Tensor]:
    """Make one transfer from each device that has some of the tensors."""
    if intercepted():
        return copy_each(tensors, device, dtype, non_blocking, copy)
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
    layout: Layout,
    cast: Layout | None,
    out: list[Tensor],
    source: torch.device,
    target: torch.device,
    non_blocking: bool,
) -> None:
    """Replace the packed tensors in ``out`` by copies on ``target``, cast there if ``cast`` is their new layout."""
    if cast is not None and (source == target or (target == CPU and non_blocking)):
        # Cast before the copy to the host. A cast on the host could read data that has not arrived.
        buffer = pack_into(out, cast, source)
        layout, cast = cast, None
        if source == target:
            return
    else:
        buffer = buffer_of(out, layout)
    if source == target:
        moved = buffer.clone()
    elif target.type == "cuda" and source == CPU and not non_blocking and buffer.nbytes <= COALESCED_BUFFER:
        staging, pinned = _staging_buffer(buffer.nbytes, True)
        moved = staging.copy_(buffer).to(target, non_blocking=pinned)
    else:
        moved = buffer.to(target, non_blocking=non_blocking)
    views_of(layout, regions(moved, layout), out)
    if cast is not None:
        pack_into(out, cast, target)


def _coalesce_to_device(layout: Layout, out: list[Tensor], target: torch.device) -> None:
    """Replace the tensors of the layout in ``out`` by copies on ``target``, which share a buffer."""
    # One byte more than the layout, so that the results do not count as packed.
    staging, pinned = _staging_buffer(layout.nbytes + 1, target.type == "cuda")
    copy_into(staging, layout, out)
    views_of(layout, regions(staging.to(target, non_blocking=pinned), layout), out)


def _coalesce_to_host(layout: Layout, out: list[Tensor], source: torch.device) -> bool:
    """Replace the tensors of the layout in ``out`` by copies on the CPU. False if ``source`` has no memory for it."""
    staging, _ = _staging_buffer(layout.nbytes, source.type == "cuda")
    try:
        buffer = new_buffer(layout.nbytes, source)
    except torch.OutOfMemoryError:  # tensors may be moved because the device is full
        return False
    copy_into(buffer, layout, out)
    views_of(layout, regions(staging.copy_(buffer), layout), out)
    for run in layout.runs:
        for i in run.members:
            out[i] = out[i].clone()  # pageable memory of its own
    return True


def _staging_buffer(nbytes: int, pin: bool) -> tuple[Tensor, bool]:
    """uint8[nbytes] on the host, and whether it is pinned. ``pin``: ask for pinned memory.

    A copy from pinned memory needs no wait: torch reuses the memory only after the copy.
    """
    if pin:
        try:
            return new_buffer(nbytes, CPU, pin=True), True
        except RuntimeError:  # no more memory can be pinned
            pass
    return new_buffer(nbytes, CPU), False
