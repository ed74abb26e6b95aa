"""Where tensors lie in one block of memory. Pure arithmetic on dtypes, shapes and strides: no tensor, no device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch

ALIGNMENT = 64
"""Every field starts on a multiple of so many bytes: a cache line, and no less than a tensor of its own gets from torch
on the CPU, so that no kernel, and no code compiled for aligned tensors, meets a field it would not take."""

Sizes = tuple[int, ...]
Spec = tuple[torch.dtype, Sizes, Sizes]
"""The dtype, shape and stride of a tensor; the stride in elements, as torch has it."""
Group = tuple[Spec, list[int]]
"""A spec, and the numbers of the tensors that have it, ascending."""


class Run(NamedTuple):
    """Fields with one spec, side by side."""

    dtype: torch.dtype
    shape: Sizes
    stride: Sizes
    members: list[int]
    """Their numbers in the list of tensors that the layout is of, ascending."""
    offset: int
    """Bytes from the start of the block to the first of them."""
    step: int
    """Bytes from one to the next; 0 for fields without elements."""

    @property
    def nbytes(self) -> int:
        """Bytes of one."""
        return _nbytes(self.dtype, self.shape)


class Layout(NamedTuple):
    """A block: its runs, in the order of their first members, and its size."""

    runs: tuple[Run, ...]
    nbytes: int
    """Up to the end of the last field, with nothing after it."""

    @property
    def members(self) -> list[int]:
        """The numbers of all fields, in the order in which they lie."""
        return [i for run in self.runs for i in run.members]

    @property
    def groups(self) -> list[Group]:
        """What the layout follows from."""
        return [((run.dtype, run.shape, run.stride), run.members) for run in self.runs]


def lay_out(groups: Iterable[Group]) -> Layout:
    """The block for these tensors: equal specs side by side, dense strides, every field aligned.

    A layout follows from the specs alone, so that whoever has the tensors can tell whether they lie as it says, and
    whoever has the specs knows every offset. Equal fields are neighbours because one call then makes views of them all.
    """
    merged: dict[Spec, list[int]] = {}
    for (dtype, shape, stride), members in groups:
        merged.setdefault((dtype, tuple(shape), dense_stride(shape, stride)), []).extend(members)
    runs: list[Run] = []
    start = end = 0
    for (dtype, shape, stride), members in merged.items():
        members.sort()
        nbytes = _nbytes(dtype, shape)
        step = aligned(nbytes)
        runs.append(Run(dtype, shape, stride, members, start, step))
        if nbytes:
            end = start + step * (len(members) - 1) + nbytes
            start += step * len(members)
    return Layout(tuple(runs), end)


def recast(groups: Iterable[Group], casts: Mapping[torch.dtype, torch.dtype]) -> list[Group]:
    """The groups with the dtypes that ``casts`` has for theirs."""
    return [((casts.get(dtype, dtype), shape, stride), members) for (dtype, shape, stride), members in groups]


def _nbytes(dtype: torch.dtype, shape: Sizes) -> int:
    return prod(shape) * dtype.itemsize


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def divide(groups: Iterable[Group], largest: int, limit: int) -> list[list[Group]]:
    """The fields of 1 to ``largest`` bytes in as many parts as it takes for each to need at most ``limit``."""
    parts: list[list[Group]] = [[]]
    room = limit
    for spec, members in groups:
        nbytes = _nbytes(*spec[:2])
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
    return parts


@lru_cache(maxsize=1024)  # the same few shapes come with every batch, and it takes 2 us to find out
def dense_stride(shape: Sequence[int], stride: Sequence[int]) -> Sizes:
    """``stride`` itself if it leaves no gap and no overlap in memory, as that of a transposed or channels_last tensor.

    Else the stride of a dense tensor with its dimensions in the same order, as ``torch.empty_like`` gives it; the
    row-major one if some are expanded.
    """
    wide = [i for i, size in enumerate(shape) if size != 1]  # the strides of the others are never used
    order = sorted(wide, key=lambda i: (stride[i], -i))  # from the innermost
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
    products = [1]
    for i in order[:-1]:
        products.append(products[-1] * shape[i])
    return products[: len(order)]
