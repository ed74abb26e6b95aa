"""Moving tensors: a flat list and a target in, a list in the same order out. Planned, then executed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .buffer import arrange, buffer_of, concrete, copy_into, has_bytes, new_buffer, regions, views_of
from .cast import CASTS, clones, copy_each
from .device import CPU, META
from .layout import ALIGNMENT, Layout, divide, lay_out, recast
from .packed import buffer_layout, map_buffer, may_be_packed, once, pack, packed_layout

SMALL = 64 << 10
"""Bytes up to which a tensor is gathered with others instead of copied by itself. To gather one of 2 KiB takes the host
0.4 us, of 64 KiB 2.1, of 256 KiB 5.6 and of 512 KiB 13.7, and to plan for it and make its result another 1.6; a copy
of its own to a GPU takes some microseconds before the first byte. (``bench_transfer.py --sweep`` measures both.)
"""
BUFFER = 1 << 20
"""Bytes of the largest block that tensors are gathered in, and of the largest that goes through pinned memory. So much
may one tensor that is kept keep alive with it. It is also the most that torch allocates from its pool for small blocks
(``kSmallSize`` in c10's CUDACachingAllocator)."""


@dataclass(frozen=True)
class CopyPlan:
    """How tensors get from one device to another; the numbers are their places in the list."""

    packed: Layout | None = None
    """Those that lie in one block, which is copied as it is. They lie in one block again."""
    together: tuple[Layout, ...] = ()
    """Those that are gathered in a block each, which is copied."""
    singly: tuple[int, ...] = ()
    """Those that are copied one by one."""


def plan_copies(
    tensors: Sequence[Tensor],
    source: torch.device,
    target: torch.device,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
) -> CopyPlan:
    """How to get ``tensors``, which are distinct and on ``source``, to ``target``.

    Small ones are gathered on the way from and to the host. Between two devices, where the host waits for no copy, they
    are not; nor with ``non_blocking`` to the host, where it is the caller who waits.
    """
    everything = tuple(range(len(tensors)))
    if len(tensors) < 2 or not (has_bytes(source) and has_bytes(target)):
        return CopyPlan(singly=everything)
    groups, unpackable = arrange(tensors)
    packed = buffer_layout(tensors, groups) if dtype is None else None
    if packed is not None:
        return CopyPlan(packed=packed, singly=tuple(unpackable))
    if (source == CPU) == (target == CPU) or (target == CPU and non_blocking):
        return CopyPlan(singly=everything)
    parts = map(lay_out, divide(recast(groups, CASTS[dtype]), SMALL, BUFFER - ALIGNMENT))
    together = tuple(part for part in parts if len(part.members) > 1)
    singly = set(everything).difference(*(part.members for part in together))
    return CopyPlan(together=together, singly=tuple(sorted(singly)))


def transfer(
    tensors: Sequence[Tensor],
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
    copy: bool = False,
    source: torch.device | None = None,
) -> list[Tensor]:
    """``tensors`` on ``device`` (resolved; None: where they are), floating-point and complex ones as ``dtype``.

    A tensor that is as wanted is returned itself, unless ``copy``. One that is in the list twice is moved once. Packed
    tensors stay packed. With ``non_blocking=False`` every source is free to be changed on return, and every result can
    be used: on the host it is complete, on CUDA for what follows on the current stream. With True torch's contract
    holds. Autograd records.

    ``source`` is where all of them are, if that is known.
    Cost: to another device the copies of `plan_copies`; else a copy for each that is cast, or one for all that are packed.
    """
    if device is META:
        return copy_each(tensors, device, dtype, non_blocking, copy)
    if device is None or device == source:
        if source is None or not (concrete() and may_be_packed(tensors)):
            return copy_each(tensors, None, dtype, False, copy)
        return once(tensors, lambda distinct: _stay(distinct, source, dtype, copy))
    if not concrete():
        return copy_each(tensors, device, dtype, non_blocking, copy)
    if source is not None:
        return once(tensors, lambda distinct: _move(distinct, source, device, dtype, non_blocking))
    places: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(i)
    out = list(tensors)
    for place, numbers in places.items():
        moved = transfer([tensors[i] for i in numbers], device, dtype, non_blocking, copy, place)
        for i, tensor in zip(numbers, moved, strict=True):
            out[i] = tensor
    return out


def clone(tensors: Sequence[Tensor], device: torch.device | None, plain: bool) -> list[Tensor]:
    """A copy of each, as ``Tensor.clone``; of packed ones on ``device`` one of them all, packed again.

    ``plain``: the caller knows that no subclass is among them.
    """
    if not concrete():
        return clones(tensors)
    packed = map_buffer(tensors, device, Tensor.clone) if may_be_packed(tensors) else None
    return clones(tensors, plain) if packed is None else packed


def _stay(tensors: list[Tensor], device: torch.device, dtype: torch.dtype | None, copy: bool) -> list[Tensor]:
    """If tensors that are packed are cast or copied, they all get a new block."""
    casts = CASTS[dtype]
    found = packed_layout(tensors, device) if copy or any(t.dtype in casts for t in tensors) else None
    if found is None:
        return copy_each(tensors, None, dtype, False, copy)
    layout, unpackable = found
    out = list(tensors)
    if any(run.dtype in casts for run in layout.runs):
        out = pack(tensors, device, casts)
    elif copy:
        views_of(layout, regions(buffer_of(tensors, layout).clone(), layout), out)
    rest = copy_each([tensors[i] for i in unpackable], None, dtype, False, copy)
    for i, tensor in zip(unpackable, rest, strict=True):
        out[i] = tensor
    return out


def _move(
    tensors: list[Tensor], source: torch.device, target: torch.device, dtype: torch.dtype | None, non_blocking: bool
) -> list[Tensor]:
    cuda = "cuda" in (source.type, target.type)
    # Only CUDA that is initialized captures. A build without CUDA cannot be asked: the copy raises torch's error.
    if cuda and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        # Each replay of the graph reads the sources anew. It would not read what was gathered from them.
        return copy_each(tensors, target, dtype, non_blocking, False)
    if dtype is not None and has_bytes(target) and packed_layout(tensors, source) is not None:
        if target == CPU and non_blocking:  # cast before: the host must not read what is still under way
            return _move(_stay(tensors, source, dtype, False), source, target, None, non_blocking)
        return _stay(_move(tensors, source, target, None, non_blocking), target, dtype, False)
    how = plan_copies(tensors, source, target, dtype, non_blocking)
    out = list(tensors)
    singly = list(how.singly)
    if how.packed is not None:
        buffer = buffer_of(tensors, how.packed)
        if cuda and source == CPU and not non_blocking and buffer.nbytes <= BUFFER:
            private, pinned = _staging(buffer.nbytes, cuda)
            moved = private.copy_(buffer).to(target, non_blocking=pinned)
        else:
            moved = buffer.to(target, non_blocking=non_blocking)
        views_of(how.packed, regions(moved, how.packed), out)
    for layout in how.together:
        if target == CPU:
            try:
                buffer = new_buffer(layout.nbytes, source)
            except torch.OutOfMemoryError:  # what is moved may be moved because the device is full
                singly += layout.members
                continue
            copy_into(tensors, layout, regions(buffer, layout))
            views_of(layout, regions(_staging(layout.nbytes, cuda)[0].copy_(buffer), layout), out)
            for i in layout.members:
                out[i] = out[i].clone()  # memory of its own, pageable
        else:
            # A byte more than the fields need: they share the storage, but nobody asked for a packed dict.
            buffer, pinned = _staging(layout.nbytes + 1, cuda)
            copy_into(tensors, layout, regions(buffer, layout))
            views_of(layout, regions(buffer.to(target, non_blocking=pinned), layout), out)
    # Copies from the host do not wait for each other; one wait at the end lets the sources go. (With a cast they do:
    # torch then casts on the host, and else on the device, for which that may have no room.)
    wait = cuda and source == CPU and dtype is None and not non_blocking and len(singly) > 1
    try:
        moved = copy_each([tensors[i] for i in singly], target, dtype, non_blocking or wait, False)
    finally:
        if wait:
            torch.cuda.current_stream(target).synchronize()
    for i, tensor in zip(singly, moved, strict=True):
        out[i] = tensor
    return out


def _staging(nbytes: int, cuda: bool) -> tuple[Tensor, bool]:
    """uint8[nbytes] on the host, and whether it is pinned, so that no copy from it need be waited for.

    torch keeps pinned memory for the next time, and does not give it out while a copy that reads it is under way.
    """
    if cuda:
        try:
            return new_buffer(nbytes, CPU, pin=True), True
        except RuntimeError:  # there is no more memory that can be pinned
            pass
    return new_buffer(nbytes, CPU), False
