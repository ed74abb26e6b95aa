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
from .device import intercepted
from .dtypes import as_bits
from .packed import packable
from .row_copies import take_from


class _Span(NamedTuple):
    windows: Tensor
    """The rows that begin at each unit, from the first tensor to the last: [units, *shape]. They overlap."""
    units: int
    """The units of a row."""
    starts: tuple[int, ...]
    """The unit of row 0 of each tensor."""


def _span_of(tensors: Sequence[Tensor]) -> _Span | None:
    """A span over the rows of several tensors of one dtype. None if there is none."""
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
    if unit % first.itemsize:
        return None
    nbytes = max(start + t.nbytes for start, t in zip(starts, tensors, strict=True))
    memory = torch.from_numpy(as_strided(lowest.detach().flatten().view(torch.uint8).numpy(), (nbytes,), (1,)))
    shape, steps = ((nbytes - row) // unit + 1, *lowest.shape[1:]), (unit // first.itemsize, *lowest.stride()[1:])
    windows = as_bits(memory.view(first.dtype)).as_strided(shape, steps)
    return _Span(windows, row // unit, tuple([start // unit for start in starts]))


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
        # NumPy computes few numbers in half of torch's time.
        rows = np.cumsum([0, *counts])
        self._ends = rows[1:]
        self._starts = np.array([np.array(starts) - rows[:-1] * units for units, starts in places])
        self._units = np.array([[units] for units, _ in places])
        self._row = sum([t[:1].nbytes for t in lists[0]])

    def take(self, index: Tensor) -> list[Tensor] | None:
        """Copy rows of each field, in a worker process into memory that can be sent.

        None while torch is traced, and for a result that is better placed in huge pages.
        """
        if intercepted() or self._row * len(index) > HUGE:
            return None
        at = index.numpy()
        places = self._starts.take(self._ends.searchsorted(at, "right"), axis=1)
        places += self._units * at
        indices = torch.from_numpy(places).unbind()
        sources = [(span.windows, indices[place]) for span, place in zip(self._spans, self._place, strict=True)]
        return take_from(self._kept[0], sources, len(index))
