"""Make the tensors of a batch: lay out all fields in one buffer, and fill it. The layout is a pure function.

A field is a value and its spec. The value is one of these:

- a tuple of samples to stack: tensors of one dtype and shape,
- a list of samples to concatenate: the rows of a ragged field,
- a `Padded`: samples to pad,
- a tensor or a NumPy array of the whole field.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._memory.buffer import in_shared_memory, new_batch_buffer, without_elements
from .._memory.device import CPU
from .._memory.layout import Layout, Sizes, lay_out, row_major
from .pad import Padded

Spec = tuple[torch.dtype, Sizes, bool]
"""The dtype and shape of a whole field, and False; or of one sample to stack, and True."""

_data, _value, _spec = attrgetter("data"), itemgetter(2), itemgetter(3)


class _Region(NamedTuple):
    """The region of the buffer for all fields with the same spec. Strides and offset count elements.

    The shape is [fields * samples, ...] for a dense region, else [fields, samples, ...].
    """

    empty: Tensor
    """A tensor of the dtype, without elements."""
    offset: int
    sizes: Sizes
    strides: Sizes
    members: tuple[int, ...]
    is_dense: bool

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        """A tensor over the region. It has its own version counter."""
        return self.empty.data.set_(storage, self.offset, self.sizes, self.strides)


class BatchLayout(NamedTuple):
    """Where the fields of a batch lie in its buffer."""

    layout: Layout
    regions: tuple[_Region, ...]
    is_one_stack: bool
    """Whether one ``torch.stack`` makes the whole batch."""


@lru_cache(maxsize=64)
def layout_of(specs: tuple[Spec, ...], count: int, device: torch.device, inference: bool) -> BatchLayout:
    """The layout of a batch of ``count`` samples. ``inference``: whether the fields are inference tensors."""
    shapes = [(dtype, (count, *shape) if is_sampled else tuple(shape)) for dtype, shape, is_sampled in specs]
    layout = lay_out(((dtype, shape, row_major(shape)), [i]) for i, (dtype, shape) in enumerate(shapes))
    found: list[_Region] = []
    for run in layout.runs:
        sizes, strides, offset = run.region
        is_dense = len(run.members) == 1 or run.step == run.nbytes
        if is_dense and len(run.members) > 1:  # [fields, samples, ...] becomes [fields * samples, ...]
            sizes, strides = (sizes[0] * sizes[1], *sizes[2:]), strides[1:]
        empty = without_elements(run.dtype, device, inference)
        found.append(_Region(empty, offset, sizes, strides, tuple(run.members), is_dense))
    is_one_stack = len(found) == 1 and found[0].is_dense and device == CPU and all(spec[2] for spec in specs)
    return BatchLayout(layout, tuple(found), is_one_stack)


def fill_buffer(fields: Sequence[Any], count: int, device: torch.device) -> Sequence[Tensor]:
    """The fields, as tensors over one new buffer on ``device``. In a worker process it may be shared memory.

    Each field is a tuple with the value and the spec in the third and fourth place. Raises torch's error if the samples
    of a field differ, or if one cannot be packed.
    """
    values = list(map(_value, fields))
    known = layout_of(tuple(map(_spec, fields)), count, device, torch.is_inference_mode_enabled())
    layout = known.layout
    if known.is_one_stack and not in_shared_memory(layout.nbytes):
        stacked = torch.stack(values[0] if len(values) == 1 else _joined(values))  # its storage is the buffer
        if stacked.requires_grad or stacked.layout is not torch.strided or not stacked.is_contiguous():
            raise RuntimeError("the samples cannot be packed")
        # Each part of `unsafe_split` has its own version counter. `unbind` would need `.data` too.
        return [stacked] if len(values) == 1 else stacked.unsafe_split(count)
    if not layout.nbytes:
        return [whole(value, device) for value in values]
    if len(values) == 1 and device == CPU and not in_shared_memory(layout.nbytes):
        return [whole(values[0], CPU).clone()]  # torch aligns memory better than NumPy
    storage = new_batch_buffer(layout, device).untyped_storage()
    out: list[Any] = [None] * len(values)
    for place in known.regions:
        region, members, is_dense = place.over(storage), place.members, place.is_dense
        if len(members) == 1:
            _fill(region, values[members[0]])
            out[members[0]] = region
            continue
        here = [values[i] for i in members]
        parts = (
            region.unsafe_split_with_sizes([len(region) // len(members)] * len(members))
            if is_dense
            else region.unbind()
        )
        if is_dense and {tuple}.issuperset(map(type, here)):
            # One call stacks the samples of all fields of the run.
            torch.stack(_joined(here), out=region)
        else:
            for part, value in zip(parts, here, strict=True):
                _fill(part, value)
        if not is_dense:
            parts = map(_data, parts)  # see `views_of`
        for i, part in zip(members, parts, strict=True):
            out[i] = part
    return out


def _joined(fields: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    out: list[Tensor] = []
    for samples in fields:
        out += samples
    return out


def _fill(view: Tensor, value: Any) -> None:
    if type(value) is tuple:
        torch.stack(value, out=view)
    elif type(value) is list:
        torch.cat(value, out=view)
    elif type(value) is Padded:
        value.fill(view)
    elif type(value) is np.ndarray and view.is_cpu:
        view.numpy()[...] = value
    else:
        view.copy_(whole(value, view.device))


def whole(value: Any, device: torch.device) -> Tensor:
    """A field as a tensor on ``device``, outside a buffer."""
    if type(value) is tuple:
        return torch.stack(value)
    if type(value) is list:
        return torch.cat(value)
    if type(value) is Padded:
        return value.joined()
    return (torch.from_numpy(value) if type(value) is np.ndarray else value).to(device)
