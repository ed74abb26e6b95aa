"""Make the tensors of a batch: lay out the fields in buffers, and fill them. The layout is a pure function.

A field is a value and its spec. The value is one of these:

- a tuple of samples to stack: tensors of one dtype and shape,
- a list of samples to concatenate: the rows of a ragged field,
- a `Padded`: samples to pad,
- a tensor or a NumPy array of the whole field.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._memory.buffer import in_shared_memory, new_batch_buffer, view_over
from .._memory.device import CPU
from .._memory.layout import Layout, lay_out_batch
from .pad import Padded


def make_fields(fields: Sequence[Any], count: int, device: torch.device, pack: bool) -> Sequence[Tensor]:
    """The fields, as tensors on ``device``: small ones share a buffer. In a worker process memory may be shared memory.

    Each field is a tuple with the value in the third place, and the spec in the fourth. ``pack``: one buffer for all.
    Raises torch's error if the samples of a field differ, or if one cannot be packed.
    """
    _, _, values, specs = zip(*fields, strict=True)
    layouts = lay_out_batch(specs, count, pack)
    total = sum([layout.nbytes for layout in layouts])
    out: list[Any] = [None] * len(values)
    for layout in layouts:
        _fill(layout, values, out, count, device, total)
    return out


def _fill(layout: Layout, values: Sequence[Any], out: list[Any], count: int, device: torch.device, total: int) -> None:
    """Make the fields of a layout, in a batch of ``total`` bytes."""
    run = layout.runs[0]
    here = [values[i] for i in run.members] if len(layout.runs) == 1 and device is CPU else []
    stacks = here and (len(here) == 1 or run.step == run.nbytes) and {tuple}.issuperset(map(type, here))
    if stacks and not in_shared_memory(layout.nbytes, total):
        stacked = torch.stack([*chain.from_iterable(here)])  # its storage is the buffer
        if stacked.requires_grad or stacked.layout is not torch.strided or not stacked.is_contiguous():
            raise RuntimeError("the samples cannot be packed")
        # Each part of `unsafe_split` has its own version counter. `unbind` would need `.data` too.
        parts = [stacked] if len(here) == 1 else stacked.unsafe_split(count)
        for i, part in zip(run.members, parts, strict=True):
            out[i] = part
        return
    storage = new_batch_buffer(layout, device, total).untyped_storage()
    for run in layout.runs:
        region, members = view_over(storage, run.dtype, *run.region, device), run.members
        if len(members) == 1:
            out[members[0]] = whole(values[members[0]], run.dtype, device, region)
            continue
        here = [values[i] for i in members]
        if run.step == run.nbytes and {tuple}.issuperset(map(type, here)):
            region = region.flatten(0, 1)
            torch.stack([*chain.from_iterable(here)], out=region)  # one call for the samples of all fields of the run
            parts = region.unsafe_split(count)
        else:
            for part, value in zip(region, here, strict=True):
                whole(value, run.dtype, device, part)
            parts = [part.data for part in region]  # see `views_of`
        for i, part in zip(members, parts, strict=True):
            out[i] = part


def whole(value: Any, dtype: torch.dtype, device: torch.device, out: Tensor | None = None) -> Tensor:
    """A field as one tensor: ``out`` if given, a tensor of its dtype and shape; else a tensor of its own."""
    if type(value) is tuple:
        return torch.stack(value, out=out)
    if type(value) is list:
        return torch.cat(value, out=out)
    if type(value) is Padded:
        return value.fill(value.samples[0].new_empty(value.shape) if out is None else out)
    tensor: Any = torch.from_numpy(value) if type(value) is np.ndarray else value
    return tensor.to(device, dtype) if out is None else out.copy_(tensor)
