"""Copy rows out of several tensors with one call, as if they lay in one tensor.

A span is a tensor over all memory from the first tensor to the last, with the memory between them, which may belong to
nobody. So only the rows of the tensors are read. It replaces a call for each tensor of each batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod
from typing import NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from .buffer import HUGE
from .device import CPU, intercepted
from .dtypes import as_bits
from .packed import packable
from .row_copies import Source, take_from

_FEW, _LARGE = 16, 64
"""A row whose size does not divide the distances of the tensors is read in units: in few, or in units of many bytes."""


class _Span(NamedTuple):
    view: Tensor
    """The units from the first tensor to the last: [units, ...]."""
    is_alike: bool
    """Whether a unit is a row of the same dtype."""
    units: int
    """The units of a row."""
    starts: tuple[int, ...]
    """The unit of row 0 of each tensor."""


def _span_of(tensors: Sequence[Tensor]) -> _Span | None:
    """A span over the rows of several tensors of one dtype. None if there is none, or if it would not be faster."""
    first, full = tensors[0], [t for t in tensors if t.numel()]
    if not full or not all(
        packable(t) and t.is_cpu and t.is_contiguous() and (t.dtype, t.shape[1:]) == (first.dtype, first.shape[1:])
        for t in tensors
    ):
        return None
    lowest = min(full, key=Tensor.data_ptr)
    starts = [t.data_ptr() - lowest.data_ptr() if t.numel() else 0 for t in tensors]
    row = prod(first.shape[1:]) * first.itemsize
    unit = gcd(row, *starts)
    if row // unit > _FEW and unit < _LARGE:
        return None
    nbytes = max(start + t.nbytes for start, t in zip(starts, tensors, strict=True))
    memory = torch.from_numpy(as_strided(lowest.detach().flatten().view(torch.uint8).numpy(), (nbytes,), (1,)))
    shape = first.shape[1:] if unit == row else (unit // first.itemsize,)
    view = as_bits(memory.view(first.dtype)).view(-1, *shape)
    return _Span(
        view, unit == row and view.dtype is first.dtype, row // unit, tuple([start // unit for start in starts])
    )


class RowSpans:
    """Rows of several lists of tensors, one list after the other.

    Args:
        lists: tensors of the same dtypes and shapes of a row in each list.
        counts: the number of rows of each list.
    """

    def __init__(self, lists: Sequence[Sequence[Tensor]], counts: Sequence[int]) -> None:
        self._kept = [[t.detach() for t in tensors] for tensors in lists]  # the memory stays as long as the spans
        found = [_span_of(tensors) for tensors in zip(*lists, strict=True)]
        self._spans = [span for span in found if span is not None]
        self.is_whole = len(self._spans) == len(found) > 0
        """Whether there is a span for each field."""
        places = list(dict.fromkeys([(span.units, span.starts) for span in self._spans]))
        self._place = [places.index((span.units, span.starts)) for span in self._spans]
        """The row of `_starts` and `_units` for each field. Fields of one layout share it."""
        rows = np.cumsum([0, *counts])
        starts = np.array([np.array(starts) - rows[:-1] * units for units, starts in places])
        self._ends = torch.tensor(rows[1:], device=CPU)
        self._starts = torch.tensor(np.ascontiguousarray(starts.T), device=CPU)
        self._units = torch.tensor([[units] for units, _ in places], device=CPU)
        self._row = sum([t[:1].nbytes for t in lists[0]])

    def take(self, index: Tensor) -> list[Tensor] | None:
        """Copy rows of each field, in a worker process into memory that can be sent.

        None while torch is traced, and for a result that is better placed in huge pages.
        """
        if intercepted() or self._row * len(index) > HUGE:
            return None
        at = torch.empty((len(self._units), len(index)), dtype=torch.int64, device=CPU)
        part = torch.bucketize(index, self._ends, right=True)
        torch.addcmul(self._starts.index_select(0, part).t(), self._units, index, out=at)
        places, sources = at.unbind(), list[Source]()
        for span, number in zip(self._spans, self._place, strict=True):
            place = places[number]
            if span.units > 1:
                place = (place[:, None] + torch.arange(span.units, device=CPU)).flatten()
            sources.append((span.view, place, span.is_alike))
        return take_from(self._kept[0], sources, len(index))
