"""Buffers: uint8 tensors that hold many tensors. Allocate one, copy tensors into it, make views of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from .device import CPU
from .dtypes import FOREACH_DTYPES
from .layout import ALIGNMENT, SMALL, Layout
from .write import copies

BY_VALUE = 1 << 20
"""The largest sum in bytes that costs less through a pipe, by value, than in shared memory.

Processor time by value / in shared memory, for batches of 12 fields from a worker (``bench_loader.py``):

============== ====== ======= ======= ===== =====
process        64 KiB 256 KiB 512 KiB 1 MiB 2 MiB
============== ====== ======= ======= ===== =====
both           0.52   0.28    0.37    0.60  0.61
the receiver   -      0.38    0.47    0.59  1.36
============== ====== ======= ======= ===== =====
"""
HUGE = 32 << 20
"""Larger new buffers on the CPU use huge pages: `rows[indices]` of 36 to 120 MB takes 0.2 to 0.3 of the time. The C
library reuses the memory of smaller buffers, so they need no new pages."""
_CLEAR_ALL_LIMIT = 32 << 10
"""Bytes of a buffer for each run with gaps. Up to this size the whole buffer is cleared, else each gap."""


def new_buffer(nbytes: int, device: torch.device, pin: bool = False) -> Tensor:
    """A new uint8[nbytes] on ``device``. ``pin``: in pinned memory of the host."""
    if nbytes > HUGE and device.type == "cpu" and not pin:
        # NumPy asks the system for huge pages, and torch does not. So the system prepares fewer pages.
        memory = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        return torch.from_numpy(memory[start : start + nbytes])
    return torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pin)


def shared_buffer(nbytes: int) -> Tensor:
    """A new uint8[nbytes] of zeros in shared memory."""
    # Private: torch's own collate calls it; `share_memory_` would copy. The system fills the memory with zeros.
    return bytes_over(torch.UntypedStorage._new_shared(nbytes), 0, nbytes, CPU)


def in_worker_process() -> bool:
    """Whether this is a DataLoader worker that sends its batches to another process.

    Versions of torch after 2.15 can run workers as threads, which hand over their batches. They tell this by
    ``worker_method``.
    """
    info = get_worker_info()
    return info is not None and getattr(info, "worker_method", None) != "thread"


def in_shared_memory(nbytes: int, total: int) -> bool:
    """Whether a buffer on the CPU is created in shared memory: if it is large, in a worker. ``total``: of the batch.

    The small buffers of a large batch are not: `for_process` sends them together.
    """
    return total > BY_VALUE and nbytes > SMALL and in_worker_process()


def new_batch_buffer(layout: Layout, device: torch.device, total: int) -> Tensor:
    """A new buffer for tensors of a batch, in shared memory if `in_shared_memory` says so. The gaps are zeros."""
    if device == CPU and in_shared_memory(layout.nbytes, total):
        return shared_buffer(layout.nbytes)
    return clear_gaps(new_buffer(layout.nbytes, device), layout)


def view_over(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int],
    offset: int,
    device: torch.device,
) -> Tensor:
    """A tensor over a storage on ``device``. ``stride`` and ``offset`` count elements of ``dtype``."""
    # `.data` is a new tensor with its own version counter.
    empty = without_elements(dtype, device, torch.is_inference_mode_enabled())
    return empty.data.set_(storage, offset, shape, stride)


@cache
def without_elements(dtype: torch.dtype, device: torch.device, inference: bool) -> Tensor:
    """A tensor without elements. ``inference``: an inference tensor, whose ``.data`` is one too."""
    with torch.inference_mode(inference):
        return torch.empty(0, dtype=dtype, device=device)


def bytes_over(storage: torch.UntypedStorage, start: int, nbytes: int, device: torch.device) -> Tensor:
    """The bytes of a storage on ``device`` from ``start`` on, as uint8[nbytes]."""
    return view_over(storage, torch.uint8, (nbytes,), (1,), start, device)


def buffer_of(tensors: Sequence[Tensor], layout: Layout) -> Tensor:
    """The buffer of packed tensors, as uint8[nbytes] over their storage."""
    first = tensors[next(run.members[0] for run in layout.runs if run.step)]
    return bytes_over(first.untyped_storage(), 0, layout.nbytes, first.device)


def regions(buffer: Tensor, layout: Layout) -> list[Tensor]:
    """A tensor over each run in ``buffer``, which begins at a multiple of `ALIGNMENT` in its storage.

    The tensor is [members, *shape] in the run's dtype, or [*shape] for a run of one field. The tensors share memory,
    but no version counter.
    """
    storage, device, start = buffer.untyped_storage(), buffer.device, int(buffer.storage_offset())
    return [
        view_over(storage, run.dtype, shape, stride, offset + start // run.dtype.itemsize, device)
        for run in layout.runs
        for shape, stride, offset in (run.region,)
    ]


def copy_into(buffer: Tensor, layout: Layout, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy the tensors into a buffer on their device, each cast to its dtype in ``layout``. Returns the `regions`."""
    out = regions(buffer, layout)
    views: list[Tensor] = []
    values: list[Tensor] = []
    for run, region in zip(layout.runs, out, strict=True):
        sources = [tensors[i] for i in run.members]
        single = len(sources) == 1
        dtypes = {run.dtype, *[source.dtype for source in sources]}
        if not single and len(dtypes) == 1 and dtypes <= FOREACH_DTYPES and region.is_contiguous():
            torch.stack(sources, out=region)
            continue
        views += (region,) if single else region.unbind()
        values += sources
    for copy in copies(views, values):
        copy()
    return out


def clear_gaps(buffer: Tensor, layout: Layout) -> Tensor:
    """Fill the gaps between the fields with zeros. Returns ``buffer``.

    Then equal dicts are pickled and saved as equal bytes. No old content of the memory is sent or saved.
    """
    gaps = [run for run in layout.runs if run.step > run.nbytes]
    if layout.nbytes <= _CLEAR_ALL_LIMIT * len(gaps):
        return buffer.zero_()
    for run in gaps:
        last = run.offset + run.step * len(run.members) > layout.nbytes  # a single field has no gap after it
        size = (len(run.members) - last, run.step - run.nbytes)
        buffer.as_strided(size, (run.step, 1), run.offset + run.nbytes).zero_()
    return buffer


def gaps_have_content(tensors: Sequence[Tensor], layout: Layout) -> bool:
    """Whether a byte between the tensors that fill a storage on the CPU is not zero."""
    gaps = layout.gaps
    return len(gaps) > 0 and (buffer := buffer_of(tensors, layout)).is_cpu and bool(buffer.numpy()[gaps].any())


def views_of(layout: Layout, sources: Sequence[Tensor], out: list[Tensor] | dict[int, Tensor]) -> None:
    """Set ``out[i]`` to a view of field ``i``, for every field of the layout. ``sources``: the `regions` of the buffer.

    The views share memory but no version counter. So autograd accepts an in-place write to one of them after it saved
    another.
    """
    for run, region in zip(layout.runs, sources, strict=True):
        # `.data` gives the view its own version counter. A region of one field has its own already.
        if len(run.members) == 1:
            out[run.members[0]] = region
        else:
            for i, view in zip(run.members, region.unbind(), strict=True):
                out[i] = view.data
