"""Buffers: uint8 tensors that hold many tensors. Allocate one, copy tensors into it, make views of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .device import CPU
from .layout import Layout

_NAMES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32 complex64 "
    "complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
)
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name)}
"""The dtypes of `PACKABLE` by name."""
PACKABLE = frozenset(DTYPES.values())
"""The dtypes that a buffer can hold: whole bytes, copied by value. Quantized dtypes have parameters besides."""
_FOREACH_DTYPES = frozenset(
    (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
     torch.float32, torch.float64, torch.complex64, torch.complex128)
)  # fmt: skip
"""The dtypes that torch's foreach kernels accept on every device."""

_CLEAR_ALL_LIMIT = 32 << 10
"""Bytes of a buffer, for each run with gaps, up to which clearing all of it is faster than clearing the gaps."""


def new_buffer(nbytes: int, device: torch.device, pin: bool = False) -> Tensor:
    """A new uint8[nbytes] on ``device``. ``pin``: in pinned memory of the host."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pin)


def buffer_from(data: bytes) -> Tensor:
    """A new buffer on the CPU with a copy of these bytes, so that it is writable and aligned as torch aligns."""
    out = new_buffer(len(data), CPU)
    out.numpy()[:] = np.frombuffer(data, np.uint8)
    return out


def flat_over(storage: torch.UntypedStorage, dtype: torch.dtype, count: int, device: torch.device) -> Tensor:
    """The first ``count`` elements of a storage on ``device``, as ``dtype``[count]."""
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (count,), (1,))


def buffer_of(tensors: Sequence[Tensor], layout: Layout) -> Tensor:
    """The buffer of packed tensors, as uint8[nbytes] over their storage."""
    first = tensors[next(run.members[0] for run in layout.runs if run.step)]
    return flat_over(first.untyped_storage(), torch.uint8, layout.nbytes, first.device)


def regions(buffer: Tensor, layout: Layout) -> list[Tensor]:
    """A view of each run in ``buffer``, which spans its whole storage.

    The view is [members, *shape] in the run's dtype, or [*shape] for a run of one field.
    """
    flat: dict[torch.dtype, Tensor] = {}  # the whole buffer, as each dtype
    out: list[Tensor] = []
    for dtype, shape, stride, members, offset, step, _ in layout.runs:
        size = dtype.itemsize
        if dtype not in flat:
            flat[dtype] = flat_over(buffer.untyped_storage(), dtype, layout.nbytes // size, buffer.device)
        single = len(members) == 1
        sizes = shape if single else (len(members), *shape)
        strides = stride if single else (step // size, *stride)
        out.append(flat[dtype].as_strided(sizes, strides, offset // size))
    return out


def copy_into(buffer: Tensor, layout: Layout, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy the tensors into a buffer on their device, each cast to its dtype in ``layout``. Returns the `regions`."""
    out = regions(buffer, layout)
    # Grouped by both dtypes, because the CUDA kernel of some versions misreads a list of mixed dtypes.
    pairs: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for run, region in zip(layout.runs, out, strict=True):
        sources = [tensors[i] for i in run.members]
        dtypes = {source.dtype for source in sources}
        single = len(sources) == 1
        if not single and dtypes == {run.dtype} and dtypes <= _FOREACH_DTYPES and region.is_contiguous():
            torch.stack(sources, out=region)  # a quarter of the time of copying into views (0.2 and 0.8 us a field)
            continue
        for view, source in zip((region,) if single else region.unbind(), sources, strict=True):
            if dtypes <= _FOREACH_DTYPES:
                views, values = pairs.setdefault((run.dtype, source.dtype), ([], []))
                views.append(view)
                values.append(source)
            else:
                view.copy_(source)
    for views, values in pairs.values():
        torch._foreach_copy_(views, values)
    return out


def clear_gaps(buffer: Tensor, layout: Layout) -> Tensor:
    """Fill the gaps between the fields with zeros. Returns ``buffer``.

    Then equal fields are pickled and saved as equal bytes, and no old content of the memory is sent or saved.
    """
    gaps = [run for run in layout.runs if run.step > run.nbytes]
    if layout.nbytes <= _CLEAR_ALL_LIMIT * len(gaps):
        return buffer.zero_()
    for run in gaps:
        last = run.offset + run.step * len(run.members) >= layout.nbytes
        size = (len(run.members) - last, run.step - run.nbytes)
        buffer.as_strided(size, (run.step, 1), run.offset + run.nbytes).zero_()
    return buffer


def views_of(layout: Layout, sources: Sequence[Tensor], out: list[Tensor] | dict[int, Tensor]) -> None:
    """Set ``out[i]`` to a view of field ``i``, for every field of the layout. ``sources``: the `regions` of the buffer.

    The views share memory but no version counter. So autograd accepts an in-place write to one of them after it saved
    another.
    """
    for run, region in zip(layout.runs, sources, strict=True):
        # `.data` gives the view its own version counter. With unbind it takes half the time of making each tensor
        # over the storage (0.7 and 1.6 us).
        if len(run.members) == 1:
            out[run.members[0]] = region.data
        else:
            for i, view in zip(run.members, region.unbind(), strict=True):
                out[i] = view.data
