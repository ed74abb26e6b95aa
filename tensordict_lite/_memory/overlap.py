"""Find tensors whose elements share memory, with each other or with another tensor."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from .layout import dense_stride
from .packed import packable


def is_expanded(t: Tensor) -> bool:
    """Whether several elements of a strided tensor are the same memory, as in an expanded tensor."""
    return any(size > 1 and not step for size, step in zip(t.shape, t.stride(), strict=True))


def overlap_partly(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors overlap in memory, unless both have the same elements.

    torch refuses to write to such a tensor. As torch does, it ignores tensors with gaps between their elements.
    """
    start, other = a.data_ptr(), b.data_ptr()
    near = bool(start) and (other - start < a.nbytes if start <= other else start - other < b.nbytes)
    same = start == other and a.itemsize == b.itemsize and a.shape == b.shape and a.stride() == b.stride()
    return near and not same and all(dense_stride(t.shape, t.stride()) == t.stride() for t in (a, b))


def share_memory(targets: Sequence[Tensor], values: Sequence[Tensor]) -> bool:
    """Whether a value may share memory with a target. Compares whole storages, not the elements in use."""
    try:
        ours, theirs = [t.untyped_storage() for t in targets], [t.untyped_storage() for t in values]
    except NotImplementedError:  # sparse tensors and some subclasses have no storage
        return True
    if all(s.resizable() for s in (*ours, *theirs)):
        # torch allocated these storages, so two of them have no memory in common.
        return not {s.data_ptr() for s in ours}.isdisjoint([s.data_ptr() for s in theirs])
    starts, ends = sorted([s.data_ptr() for s in ours]), sorted([s.data_ptr() + s.nbytes() for s in ours])
    spans = [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in theirs]
    # No overlap: our spans that start before the end of their span are exactly those that end before its start.
    return any(bisect_left(starts, end) != bisect_right(ends, start) for start, end in spans)


def are_slices(tensors: Sequence[Tensor]) -> bool:
    """Whether some packable tensors are parts of larger storages, and no two of them overlap.

    Pickle would write the whole storage for each. Tensors that overlap are left to ``torch.save``, which keeps the
    overlap.
    """
    distinct = {id(t): t for t in tensors}.values()
    found = [t for t in distinct if packable(t) and t.numel()]
    if all(t.untyped_storage().nbytes() == t.nbytes for t in found):
        return False
    spans = sorted((t.data_ptr(), t.data_ptr() + _extent(t)) for t in found)
    return all(end <= start for (_, end), (start, _) in pairwise(spans))


def _extent(t: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    return (1 + sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True))) * t.itemsize
