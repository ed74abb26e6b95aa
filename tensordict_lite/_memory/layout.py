"""The layout of a buffer: where each tensor lies in it. Computed from dtypes, shapes and strides alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

ALIGNMENT = 64
"""Every field starts at a multiple of this many bytes, the size of a cache line. torch aligns CPU tensors to the same
multiple, so every kernel accepts the fields."""
SMALL = 64 << 10
"""The largest buffer in bytes for fields of any size: see `may_share`.

Time with other limits / with 64 KiB: processor time of a batch from a worker, and moves of 2 KB fields to an H100.
Larger buffers would gain little, and a kept field would keep more.

======= ========== =========== ============ ============= ======= ========
limit   8 of 8 KiB 40 of 2 KiB 200 of 512 B 200 of 16 KiB move 40 move 200
======= ========== =========== ============ ============= ======= ========
16 KiB  1.20       1.15        1.01         1.73          1.30    1.56
256 KiB 1.02       1.05        1.00         0.82          0.84    0.90
======= ========== =========== ============ ============= ======= ========
"""
SHARE = 4
"""The most times its own bytes that a larger field keeps alive: see `may_share`.

Processor time of a batch from a worker with other factors / with 4:

====== ============ ============= ============
factor 8 of 512 KiB 40 of 128 KiB 4 of 4.6 MiB
====== ============ ============= ============
1      1.21         1.49          1.14
2      1.13         1.05          1.15
8      1.09         0.96          1.09
16     1.03         1.01          0.95
====== ============ ============= ============
"""

Sizes = tuple[int, ...]
Spec = tuple[torch.dtype, Sizes, Sizes]
"""The dtype, shape and stride of a tensor. The stride counts elements, as in torch."""
Group = tuple[Spec, tuple[int, ...]]
"""A spec, and the indices of the tensors that have it, ascending."""
FieldSpec = tuple[torch.dtype, Sizes, bool]
"""The dtype and shape of a field of a batch, and False; or of one sample, and True."""
Placed = tuple[int, int, torch.dtype, Sizes, Sizes]
"""Where a tensor lies in a storage: its offset in bytes, its index, dtype, shape and stride."""
SavedGroup = tuple[torch.dtype, Sizes, Sizes, tuple[int, ...]]


class Run(NamedTuple):
    """Fields with one spec, next to each other in a buffer."""

    dtype: torch.dtype
    shape: Sizes
    stride: Sizes
    members: tuple[int, ...]
    """Indices of the fields in the list of tensors, in the order of the buffer."""
    offset: int
    """Bytes from the start of the buffer to the first field."""
    step: int
    """Bytes from the start of a field to the start of the next; 0 for fields without elements."""
    nbytes: int
    """Bytes of one field."""
    region: tuple[Sizes, Sizes, int]
    """Shape, stride and offset, in elements, of one tensor over all fields: [members, *shape], or [*shape] for one."""


@dataclass(frozen=True)
class Layout:
    """The layout of a buffer: its runs, in the order of their first fields, and its size."""

    runs: tuple[Run, ...]
    nbytes: int
    """The bytes up to the end of the last field. With several fields a multiple of `ALIGNMENT`, because ``torch.load``
    refuses a field whose storage is no multiple of its item size."""

    @cached_property
    def members(self) -> tuple[int, ...]:
        """The indices of all fields, in the order of the buffer."""
        return tuple([i for run in self.runs for i in run.members])

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups of specs. `lay_out` makes this layout from them."""
        return tuple([((run.dtype, run.shape, run.stride), run.members) for run in self.runs])

    @cached_property
    def gaps(self) -> np.ndarray[Any, Any]:
        """The bytes of the buffer that belong to no field, as indices. Every field has elements."""
        fields = [(run.offset + run.step * i, run.nbytes) for run in self.runs for i in range(len(run.members))]
        ends, starts = [start + nbytes for start, nbytes in fields], [start for start, _ in fields[1:]]
        out = np.concatenate([np.arange(end, start) for end, start in zip(ends, [*starts, self.nbytes], strict=True)])
        out.flags.writeable = False
        return out

    @cached_property
    def saved(self) -> tuple[SavedGroup, ...]:
        """The groups, for a pickle."""
        return tuple([(run.dtype, run.shape, run.stride, run.members) for run in self.runs])

    @cached_property
    def end(self) -> int:
        """The bytes up to the end of the last field."""
        ends = [run.offset + run.step * (len(run.members) - 1) + run.nbytes for run in self.runs if run.nbytes]
        return max(ends, default=0)

    @cached_property
    def smallest(self) -> int:
        """The bytes of the smallest field that has elements."""
        return min([run.nbytes for run in self.runs if run.nbytes], default=0)


def lay_out(groups: Iterable[Group]) -> Layout:
    """Compute the layout of these tensors: equal specs next to each other, dense strides, every field aligned.

    A layout depends on the specs alone, so a receiver can compute it. Fields with equal specs are next to each other,
    so that one ``unbind`` makes views of all of them.
    """
    merged: dict[Spec, list[int]] = {}
    for (dtype, shape, stride), members in groups:
        merged.setdefault((dtype, tuple(shape), dense_stride(shape, stride)), []).extend(members)
    runs: list[Run] = []
    start = end = 0
    for (dtype, shape, stride), members in merged.items():
        size, count = dtype.itemsize, len(members)
        nbytes = nbytes_of((dtype, shape, stride))
        step = aligned(nbytes)
        sizes, strides = (shape, stride) if count == 1 else ((count, *shape), (step // size, *stride))
        region = (sizes, strides, start // size)
        runs.append(Run(dtype, shape, stride, tuple(sorted(members)), start, step, nbytes, region))
        if nbytes:
            end = start + step * (count - 1) + nbytes
            start += step * count
    return Layout(tuple(runs), end if sum([len(run.members) for run in runs if run.nbytes]) == 1 else start)


def may_share(nbytes: int, smallest: int) -> bool:
    """Whether fields may share a buffer of ``nbytes`` that nobody asked for. ``smallest``: the bytes of the smallest.

    A field that is kept keeps the whole buffer alive. So a buffer has at most `SMALL` bytes, or `SHARE` times those of
    its smallest field.
    """
    return nbytes <= max(SMALL, SHARE * smallest)


@lru_cache(maxsize=64)  # a program mostly uses dicts with the same few specs
def lay_out_apart(groups: tuple[Group, ...]) -> tuple[Layout, ...]:
    """The layouts of several buffers for these tensors, in which every two fields `may_share`. Large fields come first.

    Fields without elements are in the last one, or alone.
    """
    parts: list[list[Group]] = []
    used = 0
    for spec, members in sorted(lay_out(groups).groups, key=lambda group: nbytes_of(group[0]), reverse=True):
        nbytes, left = nbytes_of(spec), members
        step = aligned(nbytes)
        while left:
            # A buffer of one field has no spare bytes at its end.
            limit = max(SMALL, SHARE * nbytes)
            fit = (limit - used) // step if nbytes else len(left) * (used <= SMALL)
            if not parts or fit < 1:
                parts.append([])
                used, fit = 0, max(1, limit // step) if nbytes else len(left)
            parts[-1].append((spec, left[:fit]))
            used += step * min(fit, len(left))
            left = left[fit:]
    return tuple(map(lay_out, parts))


class Chunk(NamedTuple):
    """Buffers, one after another."""

    together: Layout
    """The layout of one buffer for all fields, in which each part is at a multiple of `ALIGNMENT`."""
    parts: tuple[Layout, ...]


@lru_cache(maxsize=64)
def lay_out_in_chunks(groups: tuple[Group, ...], limit: int, alone: bool = False) -> tuple[Chunk, ...]:
    """The buffers of `lay_out_apart` that have several fields, in chunks of at most ``limit`` bytes, or of one part.

    ``alone``: buffers of one field each instead. Every field has elements.
    """
    if alone:
        every = [lay_out([(spec, (i,))]) for spec, members in lay_out(groups).groups for i in members]
    else:
        every = [layout for layout in lay_out_apart(groups) if len(layout.members) > 1]
    chunks: list[list[Layout]] = []
    used = 0
    for layout in every:
        if not chunks or used + layout.nbytes > limit:
            chunks.append([])
            used = 0
        chunks[-1].append(layout)
        used += aligned(layout.nbytes)
    # Fields with equal specs are next to each other in the parts too.
    return tuple([Chunk(lay_out([group for part in parts for group in part.groups]), tuple(parts)) for parts in chunks])


@lru_cache(maxsize=64)  # the batches of a loader are alike
def lay_out_batch(specs: tuple[FieldSpec | None, ...], count: int, pack: bool = False) -> tuple[Layout, ...]:
    """The layouts of the contiguous fields of a batch of ``count`` samples. None: no field has this index.

    ``pack``: one layout for all fields.
    """
    groups: list[Group] = []
    for i, spec in enumerate(specs):
        if spec is not None:
            shape = (count, *spec[1]) if spec[2] else tuple(spec[1])
            groups.append(((spec[0], shape, row_major(shape)), (i,)))
    return (lay_out(groups),) if pack else lay_out_apart(tuple(groups))


@lru_cache(maxsize=64)
def read_layouts(
    groups: tuple[Group, ...],
    offsets: tuple[int, ...],
    storages: tuple[int, ...],
    sizes: tuple[int, ...],
    regular: bool,
) -> tuple[tuple[Layout, ...], tuple[Group, ...]]:
    """The layouts of the storages that several tensors fill, see `read_layout`, and the groups of the other tensors.

    Args:
        groups: the tensors.
        offsets: the offset of each tensor, in elements, in the order of the groups.
        storages: a number for the storage of each tensor.
        sizes: the bytes of each storage, in the order in which ``storages`` has them first.
        regular: see `read_layout`.
    """
    places: dict[int, list[Placed]] = {number: [] for number in storages}
    fields = [(i, *spec) for spec, members in groups for i in members]
    for number, offset, one in zip(storages, offsets, fields, strict=True):
        if 0 not in one[2]:
            places[number].append((offset * one[1].itemsize, *one))
    shared = [(sorted(place), nbytes) for place, nbytes in zip(places.values(), sizes, strict=True) if len(place) > 1]
    found = tuple([layout for place, nbytes in shared if (layout := read_layout(place, nbytes, regular))])
    together = {i for layout in found for i in layout.members}
    left = [(spec, tuple([i for i in members if i not in together])) for spec, members in groups]
    return found, tuple([group for group in left if group[1]])


def read_layout(fields: Sequence[Placed], nbytes: int, regular: bool = False) -> Layout | None:
    """The layout of tensors that share a storage of ``nbytes``, if they fill the storage but for alignment.

    None if they overlap, or if there are other bytes between them, before or after them.

    Args:
        fields: the tensors, by ascending offset.
        nbytes: the size of the storage.
        regular: None too unless `lay_out` gives this layout.
    """
    runs: list[Run] = []
    end = 0
    for offset, i, dtype, sizes, stride in fields:
        shape, size, bytes_ = tuple(sizes), dtype.itemsize, nbytes_of((dtype, sizes, stride))
        if offset not in (end, aligned(end)) or dense_stride(shape, stride) != stride:
            return None
        end = offset + bytes_
        if runs and runs[-1][:3] == (dtype, shape, stride):
            run = runs[-1]
            step = run.step if len(run.members) > 1 else offset - run.offset
            if offset - run.offset == step * len(run.members) and not step % size:
                members = (*run.members, i)
                region = ((len(members), *shape), (step // size, *stride), run.offset // size)
                runs[-1] = run._replace(members=members, step=step, region=region)
                continue
        runs.append(Run(dtype, shape, stride, (i,), offset, aligned(bytes_), bytes_, (shape, stride, offset // size)))
    out = Layout(tuple(runs), nbytes)
    return None if nbytes not in (end, aligned(end)) or (regular and lay_out(out.groups) != out) else out


def nbytes_of(spec: Spec) -> int:
    """The bytes of the elements of a tensor."""
    return prod(spec[1]) * spec[0].itemsize


def cast_groups(groups: Iterable[Group], casts: Mapping[torch.dtype, torch.dtype]) -> tuple[Group, ...]:
    """The groups after a cast; ``casts`` maps each dtype that changes to the new one."""
    return tuple([((casts.get(dtype, dtype), shape, stride), members) for (dtype, shape, stride), members in groups])


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to a multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


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
    return tuple(reversed(_products(shape, [*reversed(range(len(shape)))])))


def _products(shape: Sequence[int], order: list[int]) -> list[int]:
    """The dense strides of the dimensions in ``order``, from the innermost."""
    products = [1]
    for i in order[:-1]:
        products.append(products[-1] * shape[i])
    return products[: len(order)]
