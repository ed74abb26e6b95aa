"""The layout of a buffer: where each tensor lies in it. Computed from dtypes, shapes and strides alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch

ALIGNMENT = 64
"""Every field starts at a multiple of this many bytes, the size of a cache line. torch aligns CPU tensors to the same
multiple, so every kernel accepts the fields."""

Sizes = tuple[int, ...]
Spec = tuple[torch.dtype, Sizes, Sizes]
"""The dtype, shape and stride of a tensor. The stride counts elements, as in torch."""
Group = tuple[Spec, list[int]]
"""A spec, and the indices of the tensors that have it, ascending."""
FieldSpec = tuple[torch.dtype, Sizes, bool]
"""The dtype and shape of a field of a batch, and False; or of one sample, and True."""
SavedGroup = tuple[torch.dtype, Sizes, Sizes, tuple[int, ...]]


class Run(NamedTuple):
    """Fields with one spec, next to each other in a buffer."""

    dtype: torch.dtype
    shape: Sizes
    stride: Sizes
    members: list[int]
    """Indices of the fields in the list of tensors, ascending."""
    offset: int
    """Bytes from the start of the buffer to the first field."""
    step: int
    """Bytes from the start of a field to the start of the next; 0 for fields without elements."""
    nbytes: int
    """Bytes of one field."""
    region: tuple[Sizes, Sizes, int]
    """Shape, stride and offset, in elements, of one tensor over all fields: [members, *shape], or [*shape] for one."""


class Layout(NamedTuple):
    """The layout of a buffer: its runs, in the order of their first fields, and its size."""

    runs: tuple[Run, ...]
    nbytes: int
    """The bytes up to the end of the last field."""

    @property
    def members(self) -> list[int]:
        """The indices of all fields, in the order of the buffer."""
        return [i for run in self.runs for i in run.members]

    @property
    def groups(self) -> list[Group]:
        """The groups of specs. `lay_out` makes this layout from them."""
        return [((run.dtype, run.shape, run.stride), run.members) for run in self.runs]

    @property
    def saved(self) -> tuple[SavedGroup, ...]:
        """The groups, for a pickle."""
        return tuple([(run.dtype, run.shape, run.stride, tuple(run.members)) for run in self.runs])


def lay_out(groups: Iterable[Group]) -> Layout:
    """Compute the layout of these tensors: equal specs next to each other, dense strides, every field aligned.

    A layout depends on the specs alone. So `is_packed` can compare it with addresses, and a receiver can compute it.
    Fields with equal specs are next to each other, so that one ``unbind`` makes views of all of them.
    """
    merged: dict[Spec, list[int]] = {}
    for (dtype, shape, stride), members in groups:
        merged.setdefault((dtype, tuple(shape), dense_stride(shape, stride)), []).extend(members)
    runs: list[Run] = []
    start = end = 0
    for (dtype, shape, stride), members in merged.items():
        members.sort()
        size, count = dtype.itemsize, len(members)
        nbytes = prod(shape) * size
        step = aligned(nbytes)
        sizes, strides = (shape, stride) if count == 1 else ((count, *shape), (step // size, *stride))
        runs.append(Run(dtype, shape, stride, members, start, step, nbytes, (sizes, strides, start // size)))
        if nbytes:
            end = start + step * (count - 1) + nbytes
            start += step * count
    return Layout(tuple(runs), end)


@lru_cache(maxsize=64)  # the batches of a loader are alike
def lay_out_batch(specs: tuple[FieldSpec | None, ...], count: int) -> Layout:
    """The layout of the contiguous fields of a batch of ``count`` samples. None: no field has this index."""
    groups: list[Group] = []
    for i, spec in enumerate(specs):
        if spec is not None:
            shape = (count, *spec[1]) if spec[2] else tuple(spec[1])
            groups.append(((spec[0], shape, row_major(shape)), [i]))
    return lay_out(groups)


def cast_groups(groups: Iterable[Group], casts: Mapping[torch.dtype, torch.dtype]) -> list[Group]:
    """The groups after a cast; ``casts`` maps each dtype that changes to the new one."""
    return [((casts.get(dtype, dtype), shape, stride), members) for (dtype, shape, stride), members in groups]


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to a multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def with_spare(nbytes: int) -> int:
    """The size of a buffer of ``nbytes`` with spare bytes at the end, so that its tensors do not count as packed.

    A multiple of every item size, because ``torch.load`` refuses a storage whose size is no multiple of the item size.
    """
    return aligned(nbytes + 1)


def distribute(groups: Iterable[Group], largest: int, limit: int) -> list[Layout]:
    """Distribute the fields of 1 to ``largest`` bytes over buffers of at most ``limit`` bytes, spare bytes included.

    Three kinds of fields are left out: larger fields, fields without elements, and a field alone in its buffer.
    ``limit`` must have room for a field of ``largest`` bytes and for the spare bytes of `with_spare`.
    """
    parts: list[list[Group]] = [[]]
    limit -= ALIGNMENT
    room = limit
    for spec, members in groups:
        dtype, shape, _ = spec
        nbytes = prod(shape) * dtype.itemsize
        step = aligned(nbytes)
        left = members if 0 < nbytes <= largest else []
        while left:
            fit = room // step
            if fit:
                parts[-1].append((spec, left[:fit]))
                room -= step * min(fit, len(left))
                left = left[fit:]
            if left:
                parts.append([])
                room = limit
    return [lay_out(part) for part in parts if len(part) > 1 or (part and len(part[0][1]) > 1)]


@lru_cache(maxsize=1024)  # every batch has the same few shapes
def dense_stride(shape: Sequence[int], stride: Sequence[int]) -> Sizes:
    """The stride that ``torch.empty_like`` gives for this shape and stride; row-major for an expanded tensor.

    That is ``stride`` itself if it has no gap and no overlap, as for a transposed or channels_last tensor. Otherwise
    the result is dense, with the dimensions in the same order.
    """
    wide = [i for i, size in enumerate(shape) if size != 1]  # torch never uses the strides of the others
    order = sorted(wide, key=lambda i: (stride[i], shape[i], -i))  # from the innermost; ties in torch's order
    if 0 in shape or all(stride[i] == expected for i, expected in zip(order, _products(shape, order), strict=True)):
        return tuple(stride)
    if 0 in (stride[i] for i in wide):
        order = wide[::-1]
    out = list(stride)
    for i, product in zip(order, _products(shape, order), strict=True):
        out[i] = product
    return tuple(out)


@lru_cache(maxsize=1024)
def row_major(shape: Sizes) -> Sizes:
    """The stride of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if shape else ()


def _products(shape: Sequence[int], order: list[int]) -> list[int]:
    """The dense strides of the dimensions in ``order``, from the innermost."""
    products = [1]
    for i in order[:-1]:
        products.append(products[-1] * shape[i])
    return products[: len(order)]
