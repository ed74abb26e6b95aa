"""Which rows an epoch visits, and in which order: the rows of one dataset, or of several that are mixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from fractions import Fraction
from functools import lru_cache
from heapq import heappop, heappush
from math import isfinite, lcm
from numbers import Number
from operator import index as as_int
from typing import Any, SupportsIndex
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from .._errors import described
from .._tree.ragged import Ragged
from .shuffle import Numbers, permuted, shuffled

_PERIOD = 1 << 18
"""The most turns of a mix before they repeat. Weights without a common denominator up to this are rounded to it. To
find the turns takes about a microsecond each, once."""


class DatasetVisits:
    """The rows of an epoch in their order, as a function of the position. Nothing is stored for each row.

    These are the rows of one dataset, or some of them. `MixedVisits` has the same attributes and methods.

    - ``count``: the number of rows that an epoch visits.
    - ``total``: the number of rows of the dataset. None: only some row numbers are known.
    - ``lengths``: the tokens of each row of the dataset.
    - ``key``: the seeds of the random order.
    """

    def __init__(self, rows: Any, shuffle: bool | int, seed: int, lengths: Any) -> None:
        self.shuffle: bool | int = (
            shuffle if isinstance(shuffle, bool) else number("shuffle=, a bool or a block size", shuffle, 1)
        )
        self.key: tuple[int, ...] = (number("a seed", seed),)
        self.index, self.count = _rows(rows)
        self.lengths: Numbers | None = None if lengths is None else integers("lengths", lengths)
        self.total: int | None = (
            self.count if self.index is None else None if self.lengths is None else len(self.lengths)
        )

    def rows(self, epoch: int, at: Numbers) -> Numbers:
        """The numbers of the rows at the positions ``at``, ascending."""
        if self.shuffle:
            at = shuffled(at, self.count, None if self.shuffle is True else self.shuffle, (*self.key, epoch))
        return at if self.index is None else self.index[at]

    def further(self, at: Numbers) -> Numbers:
        """The same at positions that count on from one epoch to the next."""
        if self.shuffle is not True or not len(at) or at[0] // self.count == at[-1] // self.count:
            return _epoch_by_epoch(self, at)
        # All epochs at once: of a dataset of few rows, there may be thousands.
        epochs, at = np.divmod(at, self.count)
        first, last = epochs[[0, -1]].tolist()
        keys = [(*self.key, epoch) for epoch in range(first, last + 1)]
        at = permuted(at, self.count, *keys, whose=epochs - first)
        return at if self.index is None else self.index[at]

    def numbers(self) -> Numbers:
        """The numbers of the rows that an epoch visits, in any order."""
        return np.arange(self.count) if self.index is None else self.index

    def fixed(self) -> dict[str, Any]:
        """What must be the same in an order that resumes."""
        index = None if self.index is None else crc32(self.index.tobytes())
        return {"rows": self.count, "index": index, "seed": self.key[0], "shuffle": self.shuffle}

    def drawn(self, position: int) -> dict[str, Any]:
        """What the state has besides the position."""
        return {}

    def source(self, row: int) -> int:
        """The number of the dataset that has a row."""
        return 0


class MixedVisits:
    """The rows of several datasets by turns. Row numbers go on from one dataset to the next.

    A source gives its rows in the order of its epochs. The next epoch of the mix goes on where this one ends.
    """

    def __init__(self, sources: Sequence[Visits], weights: Any, stop: str) -> None:
        self.sources, self.stop = sources, stop
        self.shares = np.array(_as_ints(weights, len(sources)))
        self.turns, self.nth = _turns(tuple(self.shares.tolist()))
        self.share_of = self.shares[self.turns]
        for at, source in enumerate(sources):
            if not source.count:
                raise ValueError(f"BatchOrder.mix takes orders with rows, got none in order {at}")
            if source.total is None:
                raise ValueError(
                    f"order {at} has row numbers only, and mix counts on from the length of its dataset; "
                    "make it of Subset(dataset, row_numbers)"
                )
        ends = [self._end(at, source.count) for at, source in enumerate(sources)]
        self.count: int = min(ends) if stop == "first" else max(ends)
        self.each = self._counts(self.count)
        self.first = np.cumsum([0, *(source.total or 0 for source in sources)])
        self.total: int | None = int(self.first[-1])
        lengths = [source.lengths for source in sources]
        self.without = [at for at, one in enumerate(lengths) if one is None]
        self.lengths: Numbers | None = (
            None if self.without else np.concatenate([one for one in lengths if one is not None])
        )
        self.key: tuple[int, ...] = tuple(word for source in sources for word in source.key)
        self.shuffle: bool | int = any(source.shuffle for source in sources)

    def _end(self, at: int, rows: int) -> int:
        """The position after the turn that takes the last of so many rows of a source."""
        periods, turn = divmod(rows - 1, int(self.shares[at]))
        return periods * len(self.turns) + int(np.flatnonzero(self.turns == at)[turn]) + 1

    def _counts(self, position: int) -> Numbers:
        """The rows of each source before a position."""
        periods, turns = divmod(position, len(self.turns))
        return periods * self.shares + np.bincount(self.turns[:turns], minlength=len(self.shares))

    def rows(self, epoch: int, at: Numbers) -> Numbers:
        periods, turn = np.divmod(at, len(self.turns))
        whose, found = self.turns[turn], self.nth[turn]
        periods *= self.share_of[turn]
        found += periods  # the rows that its source has given before each of these in this epoch, and then its number
        for which, source in enumerate(self.sources):
            mine = np.flatnonzero(whose == which)
            found[mine] = source.further(found[mine] + epoch * self.each[which]) + self.first[which]
        return found

    def further(self, at: Numbers) -> Numbers:
        return _epoch_by_epoch(self, at)

    def numbers(self) -> Numbers:
        return np.concatenate(
            [first + source.numbers() for first, source in zip(self.first, self.sources, strict=False)]
        )

    def fixed(self) -> dict[str, Any]:
        weights = self.shares.tolist()
        return {"sources": [source.fixed() for source in self.sources], "weights": weights, "stop": self.stop}

    def drawn(self, position: int) -> dict[str, Any]:
        """The rows that each source has given in this epoch."""
        return {"drawn": self._counts(position).tolist()}

    def source(self, row: int) -> int:
        return int(self.first.searchsorted(row, "right")) - 1


Visits = DatasetVisits | MixedVisits


def _epoch_by_epoch(visits: Visits, at: Numbers) -> Numbers:
    """`Visits.further` by `Visits.rows`."""
    found = np.empty_like(at)
    first, last = (at[[0, -1]] // visits.count).tolist() if len(at) else (0, -1)
    for epoch in range(first, last + 1):
        begin = epoch * visits.count
        some = slice(*at.searchsorted([begin, begin + visits.count]).tolist())
        found[some] = visits.rows(epoch, at[some] - begin)
    return found


def _as_ints(weights: Any, count: int) -> list[int]:
    """Weights as ints with a sum of about `_PERIOD` at most."""
    try:
        given = [float(weight) for weight in weights]
    except (TypeError, ValueError):
        raise TypeError(f"BatchOrder.mix takes weights as a list of numbers, got {described(weights)}") from None
    if len(given) != count or not all(isfinite(weight) and weight > 0 for weight in given):
        raise ValueError(f"BatchOrder.mix takes a weight above 0 for each of {count} orders, got {given}")
    exact = [Fraction(str(weight)) for weight in given]  # 0.7 is 7 / 10
    shares = [weight / sum(exact) for weight in exact]
    near = [share.limit_denominator(_PERIOD) for share in shares]
    if (period := lcm(*(share.denominator for share in near))) <= _PERIOD and all(near):
        return [int(share * period) for share in near]
    return [max(1, round(share * _PERIOD)) for share in shares]


@lru_cache
def _turns(shares: tuple[int, ...]) -> tuple[Any, Numbers]:
    """The source of each turn until the turns repeat, and how many turns this source had before.

    After any number of turns, each source had its share of them, rounded up or down. So its next turn may not come
    before a time, and has a deadline. Of the sources whose time has come, the one with the earliest deadline is next.
    """
    period = sum(shares)
    turns, nth = np.empty(period, np.min_scalar_type(len(shares))), np.empty(period, np.int64)
    had = [0] * len(shares)
    later = [(0, source) for source in range(len(shares))]  # a heap by the time
    ready = list[tuple[int, int]]()  # a heap by the deadline
    for turn in range(period):
        while later and later[0][0] <= turn:
            source = heappop(later)[1]
            heappush(ready, (-(-(had[source] + 1) * period // shares[source]), source))
        source = heappop(ready)[1]
        turns[turn], nth[turn] = source, had[source]
        had[source] += 1
        heappush(later, (had[source] * period // shares[source], source))
    turns.setflags(write=False)
    nth.setflags(write=False)
    return turns, nth


def _rows(given: Any) -> tuple[Numbers | None, int]:
    """The row numbers, if some are given, and the number of rows."""
    numbers = isinstance(given, (list, tuple)) and isinstance(given[0] if given else 0, (Number, np.number, np.bool_))
    if numbers or isinstance(given, (Tensor, np.ndarray, range)):
        index = integers("row numbers", given)
        if getattr(given, "dtype", None) in (torch.uint8, "uint8"):
            raise TypeError("row numbers of dtype uint8 may be a mask; give mask.nonzero().flatten(), or int64")
        if len(index) and (lowest := int(index.min())) < 0:
            raise ValueError(f"BatchOrder takes row numbers of at least 0, got {lowest}")
        return index, len(index)
    for kinds, way_out in _NO_DATASETS:
        if isinstance(given, kinds):
            raise TypeError(f"BatchOrder takes a dataset, got {described(given)}; {way_out}")
    if isinstance(given, Sized) and hasattr(given, "__getitem__"):
        try:
            return None, len(given)
        except TypeError:  # a class may have the method for some of its objects only
            pass
    elif isinstance(given, SupportsIndex):
        return None, number("a number of rows", given)
    raise TypeError(
        f"BatchOrder takes a dataset with a length, row numbers or a number of rows, got {described(given)}; "
        "a list of its samples has a length"
    )


_NO_DATASETS: list[tuple[Any, str]] = [
    (Sampler, "give the dataset that it samples"),
    (DataLoader, "give its dataset"),
    (Mapping, "its length is the number of keys; give its rows: d.rows, or DeviceDict(columns).rows"),
    ((str, bytes), "load it first"),
]
"""What has a length that is no number of rows, and what to write instead."""


def integers(what: str, given: Any) -> Numbers:
    """A list of ints as an array."""
    try:
        array = np.asarray(given.detach().cpu() if isinstance(given, Tensor) else given)
    except (TypeError, ValueError):  # a ragged list, or bfloat16
        array = np.zeros(1)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        got = "a mask; give mask.nonzero().flatten()" if array.dtype.kind == "b" else described(given)
        got += "; give its .lengths" if isinstance(given, Ragged) else ""
        raise TypeError(f"BatchOrder takes {what} as a tensor, an array or a list of ints, got {got}")
    return array.astype(np.int64)


def number(what: str, given: Any, least: int = 0) -> int:
    """An int of at least ``least``."""
    try:
        found = as_int(given)
    except TypeError:
        raise TypeError(f"BatchOrder takes {what} of type int, got {described(given)}") from None
    if found < least or found >= 1 << 63:
        raise ValueError(f"BatchOrder takes {what} of at least {least}, got {found}")
    return found
