"""`BatchOrder`: the rows of each batch of an epoch, on each rank. It resumes at any batch, in any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from heapq import heapreplace
from itertools import chain, count, islice
from numbers import Number
from operator import index as as_int
from typing import Any, Literal, NamedTuple, SupportsIndex, cast
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from .._errors import described

_WINDOW = 8
"""The blocks that a block shuffle mixes."""
_WAITING = 64
"""The rows that may wait for a batch with room. With 16, the batches of a step differ more; 256 take longer to plan."""
_TRAIL = 64
"""The steps between two places that an iteration by tokens remembers, so that ``state_dict`` plans few steps again."""
_AT_ONCE = 4096
"""The rows that an iteration by tokens looks up at once."""

_Numbers = np.ndarray[Any, np.dtype[np.int64]]


class _Place(NamedTuple):
    """A place in an epoch: the rows before ``position`` are taken, except those that wait for a batch with room."""

    epoch: int = 0
    position: int = 0
    waiting: tuple[int, ...] = ()


_Trail = list[_Place]
"""The place where iterations begin. With tokens, also the place after each `_TRAIL` steps, as far as one has come."""
_Step = tuple[list[int], _Place]
"""The rows of this rank in a step, and the place after the step."""
_Taken = tuple[_Trail, "int | None"]
"""A number of batches since the place of a trail. None: the epoch is at its end."""


class BatchOrder(Sampler[list[int]]):
    """The rows of each batch of an epoch: a ``batch_sampler`` for DataLoader that resumes at any batch.

    The order of an epoch depends on the rows, the seed and the epoch only. Nothing is drawn from a global generator.
    In each step, every rank takes a batch of the rows that follow. So each row comes once an epoch, over all ranks.

    - ``set_epoch(epoch)``, ``for epoch in order.epochs(n)``: choose the epoch. ``order.epoch`` is the current one.
    - ``len(order)``: the number of batches of this rank in a whole epoch.
    - ``state_dict(batches)``, ``load_state_dict(state)``: resume, in the same number of ranks or in another one.

    `prefetch` counts the batches of ``DataLoader(rows, batch_sampler=order)``: its ``state_dict()`` describes the last
    batch that you received, for any number of workers. It also keeps DataLoader from the global generator.

    Args:
        rows: a dataset with a length: ``d.rows``, a list of samples, any other. Or a number of rows. Or the numbers of
            some rows: a tensor, an array, a list or a range of ints. A number that comes twice counts as two rows.
        size: the rows per batch.
        tokens: in place of ``size``, the most tokens per batch. The batches of one step are filled evenly. Up to 64
            rows wait for a batch with room.
        lengths: with ``tokens``, the tokens of each row of the dataset: a tensor, an array or a list of ints. A row
            without tokens counts as one token.
        longer: for a row of more than ``tokens`` tokens: ``"error"``, or ``"alone"`` for a batch of its own.
        shuffle: True: all rows in random order. An int n: blocks of n rows in random order, and the rows of each 8
            blocks in random order, for a table that is larger than the memory.
        seed: the seed of the random order.
        rank, world: this rank, and the number of ranks. Give both, or neither in a program of one process.
        drop_last: leave out the last step, unless every rank gets ``size`` rows. Otherwise all ranks share the last
            rows, and differ by at most one batch. With ``tokens``, the step that takes the last row is left out.

    Raises: ``TypeError`` or ``ValueError`` for an invalid argument, and for a row that is longer than ``tokens``.
    Cost: 8 bytes for each row, or with a block shuffle for each row of 8 blocks. With ``tokens``, every rank plans the
    batches of all ranks, in about a microsecond per row; ``len`` plans a whole epoch.

    >>> from torch.utils.data import DataLoader
    >>> from tensordict_lite import BatchOrder, DeviceDict
    >>> table = DeviceDict({"x": list(range(10))})
    >>> order = BatchOrder(table.rows, 2, rank=1, world=2)
    >>> [batch["x"].tolist() for batch in DataLoader(table.rows, batch_sampler=order)]
    [[2, 3], [6, 7], [9]]
    >>> alone = BatchOrder(table.rows, 4)
    >>> alone.load_state_dict(order.state_dict(2))  # when both ranks have taken 2 batches
    >>> list(alone)
    [[8, 9]]
    """

    def __init__(
        self,
        rows: Sized | int | Tensor | np.ndarray[Any, Any] | Sequence[int],
        size: int | None = None,
        *,
        tokens: int | None = None,
        lengths: Tensor | np.ndarray[Any, Any] | Sequence[int] | None = None,
        longer: Literal["error", "alone"] = "error",
        shuffle: bool | int = False,
        seed: int = 0,
        rank: int | None = None,
        world: int | None = None,
        drop_last: bool = False,
    ) -> None:
        if (size is None) == (tokens is None):
            raise TypeError(f"BatchOrder takes size or tokens=, got {'neither' if size is None else 'both'}")
        if (tokens is None) != (lengths is None):
            raise TypeError("BatchOrder takes tokens= and lengths= together: lengths= has the tokens of each row")
        if longer not in ("error", "alone"):
            raise ValueError(f'BatchOrder takes longer="error" or longer="alone", got {longer!r}')
        self.batch_size = None if size is None else _number("a size", size, 1)
        self.tokens = None if tokens is None else _number("tokens", tokens, 1)
        self.shuffle = shuffle if isinstance(shuffle, bool) else _number("shuffle=, a bool or a block size", shuffle, 1)
        self.seed = _number("a seed", seed)
        self.rank, self.world = _ranks(rank, world)
        self.drop_last = bool(drop_last)
        self._index, self._count = _rows(rows)
        self._lengths = _integers("lengths", [] if lengths is None else lengths)
        if self.tokens is not None:
            self._require_fit(self.tokens, longer)
        self._planned: tuple[int, int] | None = None  # with tokens, an epoch and its number of batches
        self._trail: _Trail = [_Place()]

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._trail[0].epoch

    @property
    def sampler(self) -> BatchOrder:
        """This order. Lightning and accelerate look for ``set_epoch`` here."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch. To choose the current epoch again changes nothing, so a resumed epoch stays resumed."""
        epoch = _number("an epoch", epoch)
        if epoch != self.epoch:
            self._trail = [_Place(epoch)]

    def epochs(self, end: int) -> Iterator[int]:
        """Yield the epochs from the current one up to ``end - 1``, and choose each."""
        while self.epoch < end:
            yield self.epoch
            self.set_epoch(self.epoch + 1)

    def __len__(self) -> int:
        """The number of batches of this rank in a whole epoch. It is the same for an epoch that was resumed."""
        if self.batch_size is not None:
            steps, left = divmod(self._count, self.batch_size * self.world)
            return steps + (left > self.rank and not self.drop_last)
        if self._planned is None or self._planned[0] != self.epoch:
            self._planned = self.epoch, sum(1 for rows, _ in self._steps(_Place(self.epoch)) if rows)
        return self._planned[1]

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the rows of each batch of this rank that is left in the epoch. Every iteration begins at one place."""
        return _Batches(self, self._trail)

    def state_dict(self, batches: int = 0) -> dict[str, Any]:
        """The state after ``batches`` more batches of each rank, for ``json`` or ``torch.save``: equal on all ranks.

        Args:
            batches: the number of batches that each rank has taken since the epoch began or was resumed. The order
                cannot know it, because DataLoader takes rows for its workers ahead. `prefetch` counts for you.

        Raises: ``TypeError`` or ``ValueError`` for an invalid number, and for more batches than were left.
        Cost: with ``tokens``, a plan of these steps; of up to 64 steps if this process has iterated over them.
        """
        return self._state(self._after(self._trail, _number("a number of batches", batches)))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state: the next iterations yield the rows that were left in its epoch.

        ``size``, ``tokens``, ``rank``, ``world`` and ``drop_last`` may differ from those of the state.

        Raises: ``TypeError`` for an object that is no state, ``ValueError`` for a state of other rows, or of another
        seed or shuffle. After an error, the order is unchanged.
        """
        self._trail = [self._place(state)]

    # --- places ---

    def _fixed(self) -> dict[str, Any]:
        """What must be the same in the order that resumes."""
        index = None if self._index is None else crc32(self._index.tobytes())
        return {"rows": self._count, "index": index, "seed": self.seed, "shuffle": self.shuffle}

    def _state(self, place: _Place) -> dict[str, Any]:
        return {"epoch": place.epoch, "position": place.position, "waiting": list(place.waiting), **self._fixed()}

    def _place(self, state: Mapping[str, Any]) -> _Place:
        """Validate a state."""
        fixed = self._fixed()
        if not isinstance(state, Mapping) or not {*_Place._fields, *fixed} <= set(state):
            raise TypeError(
                f"load_state_dict takes a state of BatchOrder, got {_kind_of_state(state)}; "
                "it comes from state_dict() of a BatchOrder, or of prefetch over a DataLoader with one"
            )
        for name, own in fixed.items():
            if state[name] != own or type(state[name]) is not type(own):
                what = "other row numbers" if name == "index" else f"{name}={state[name]!r}, not {name}={own!r}"
                raise ValueError(f"the state is of a BatchOrder with {what}; make the BatchOrder as it was")
        epoch, position = (_number(f"a state with {name}", state[name]) for name in ("epoch", "position"))
        waiting = _integers("a state with waiting rows", state["waiting"])
        if position > self._count or len(waiting) > position:
            raise ValueError(f"the state is at row {position} of {self._count}, and {len(waiting)} rows wait")
        if len(waiting) and (self.tokens is None or waiting.min() < 0 or waiting.max() >= len(self._lengths)):
            raise ValueError("the state is of a BatchOrder with tokens=, and rows wait; make the BatchOrder as it was")
        return _Place(epoch, position, tuple(waiting.tolist()))

    def _after(self, trail: _Trail, batches: int | None) -> _Place:
        """The place after so many steps, or at the end of the epoch."""
        epoch, position, _ = trail[0]
        if batches is None:
            return _Place(epoch, self._count)
        if self.batch_size is not None:
            step, rest = self.batch_size * self.world, self._count - position
            steps = rest // step if self.drop_last else -(-rest // step)
            place = _Place(epoch, min(position + batches * step, self._count))
        else:
            known = min(batches // _TRAIL, len(trail) - 1)
            planned = [step[1] for step in islice(self._steps(trail[known]), batches - known * _TRAIL)]
            steps, place = known * _TRAIL + len(planned), [trail[known], *planned][-1]
        if batches > steps:
            raise ValueError(f"state_dict takes the number of batches that were taken, got {batches} of {steps}")
        return place

    # --- steps ---

    def _steps(self, place: _Place, trail: _Trail | None = None) -> Iterator[_Step]:
        """The steps from ``place`` to the end of the epoch. With tokens, places are added to the ``trail``."""
        order = _Order(self._index, self._count, self.shuffle, self.seed, place.epoch)
        if self.batch_size is not None:
            return self._by_size(order, place, self.batch_size * self.world)
        return self._by_tokens(order, place, cast(int, self.tokens), trail)

    def _by_size(self, order: _Order, place: _Place, size: int) -> Iterator[_Step]:
        epoch, position, _ = place
        while position < self._count:
            taken = min(size, self._count - position)
            if taken < size and self.drop_last:
                return
            each, more = divmod(taken, self.world)  # of the last rows, the first ranks take one more
            begin, end = (position + rank * each + min(rank, more) for rank in (self.rank, self.rank + 1))
            position += taken
            yield order.rows(begin, end).tolist(), _Place(epoch, position)

    def _by_tokens(self, order: _Order, place: _Place, tokens: int, trail: _Trail | None) -> Iterator[_Step]:
        """Give each row to the rank with the fewest tokens. If it has no room, no rank has, and the row waits."""
        epoch, position, waiting = place
        first_rows = range(position, self._count, _AT_ONCE)
        following = chain.from_iterable(
            self._with_lengths(order.rows(first, min(first + _AT_ONCE, self._count))) for first in first_rows
        )
        held = [*self._with_lengths(np.array(waiting, np.int64))]
        for step in count(1):
            batches: list[list[int]] = [[] for _ in range(self.world)]
            fills = [(0, rank) for rank in range(self.world)]  # a heap: the rank with the fewest tokens comes first
            before, waited, held = len(held), iter(held), list[tuple[int, int]]()
            for row, length in chain(waited, following):
                fill, rank = fills[0]
                if not fill or fill + length <= tokens:
                    heapreplace(fills, (fill + length, rank))
                    batches[rank].append(row)
                    continue
                held.append((row, length))
                if len(held) == _WAITING:
                    break
            held += waited
            if not held and (self.drop_last or not any(batches)):
                return
            position += sum(map(len, batches)) + len(held) - before
            place = _Place(epoch, position, tuple(row for row, _ in held))
            if trail is not None and step == _TRAIL * len(trail):
                trail.append(place)
            yield batches[self.rank], place

    def _with_lengths(self, rows: _Numbers) -> Iterator[tuple[int, int]]:
        return zip(rows.tolist(), self._lengths[rows].tolist(), strict=True)

    def _require_fit(self, tokens: int, longer: str) -> None:
        """Raise unless every row has a length that fits. Give rows without tokens one."""
        rows = np.arange(self._count) if self._index is None else self._index
        known, last = len(self._lengths), int(rows.max(initial=-1))
        if last >= known or (self._index is None and known > self._count):
            raise ValueError(f"lengths= has the tokens of every row of the dataset, got {known} for rows 0 to {last}")
        lengths = self._lengths[rows]
        if self._count and (least := int(lengths.min())) < 0:
            raise ValueError(f"row {rows[lengths.argmin()]} has a length of {least}; lengths are at least 0")
        if self._count and (most := int(lengths.max())) > tokens and longer == "error":
            raise ValueError(
                f"row {rows[lengths.argmax()]} has {most} tokens, and a batch has at most tokens={tokens}; "
                'give it a batch of its own with longer="alone", or leave it out with BatchOrder(row_numbers, ...)'
            )
        np.maximum(self._lengths, 1, out=self._lengths)


class _Batches(Iterator[list[int]]):
    """One iteration. torchdata's StatefulDataLoader saves and loads its state."""

    def __init__(self, order: BatchOrder, trail: _Trail) -> None:
        self._order, self._place = order, trail[0]
        self._steps = order._steps(trail[0], trail)

    def __next__(self) -> list[int]:
        rows, self._place = next(self._steps, ([], _Place(self._place.epoch, self._order._count)))
        if not rows:  # the end of the epoch; in the last step, some ranks may have no rows
            raise StopIteration
        return rows

    def state_dict(self) -> dict[str, Any]:
        return self._order._state(self._place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._place = self._order._place(state)
        self._steps = self._order._steps(self._place)


class OrderedLoader:
    """A DataLoader over a `BatchOrder`, with the state after the batches that it has yielded."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.order = loader, cast(BatchOrder, loader.batch_sampler)
        self.taken: _Taken = self.order._trail, 0

    def __iter__(self) -> Iterator[Any]:
        trail, given = self.order._trail, self.loader.generator
        if given is None:  # DataLoader draws a seed for its workers, otherwise from the global generator
            key = self.order.seed, trail[0].epoch, trail[0].position, 0
            self.loader.generator = torch.Generator().manual_seed(int(_random(*key).randint(1 << 31)))
        try:
            return self._counted(iter(self.loader), trail)
        finally:
            self.loader.generator = given

    def _counted(self, batches: Iterator[Any], trail: _Trail) -> Iterator[Any]:
        self.taken = trail, 0
        for number, batch in enumerate(batches, 1):
            self.taken = trail, number
            yield batch
        self.taken = trail, None

    def state_dict(self, taken: _Taken | None = None) -> dict[str, Any]:
        """The state after ``taken``, or after the last batch that was yielded."""
        trail, batches = taken or self.taken
        if self.loader.num_workers and not self.loader.in_order:
            raise ValueError("a DataLoader with in_order=False has no state; make the DataLoader with in_order=True")
        if trail is not self.order._trail:  # since then, another epoch was chosen or a state was loaded
            return self.order.state_dict()
        return self.order._state(self.order._after(trail, batches))

    def load_state_dict(self, state: Any) -> None:
        self.order.load_state_dict(state)


class _Order:
    """The rows of an epoch in their order.

    With a block shuffle, a window of `_WINDOW` blocks is shuffled when its rows are asked for. A full shuffle is one
    window with one block.
    """

    def __init__(self, index: _Numbers | None, count: int, shuffle: bool | int, seed: int, epoch: int) -> None:
        self.index, self.shuffle, self.key = index, shuffle, (seed, epoch)
        if shuffle:
            self.count, self.block = count, max(count, 1) if shuffle is True else shuffle
            self.blocks = _random(*self.key, 1).permutation(-(-count // self.block))
            sizes = np.minimum((self.blocks + 1) * self.block, count) - self.blocks * self.block
            self.ends = np.cumsum(np.add.reduceat(sizes, np.arange(0, len(sizes), _WINDOW))) if count else sizes
            self.window: tuple[int, _Numbers] = -1, sizes

    def rows(self, begin: int, end: int) -> _Numbers:
        """The rows from position ``begin`` to position ``end``."""
        at = self._shuffled(begin, end) if self.shuffle else np.arange(begin, end)
        return at if self.index is None else self.index[at]

    def _shuffled(self, begin: int, end: int) -> _Numbers:
        parts = [np.zeros(0, np.int64)]
        while begin < end:
            number = int(self.ends.searchsorted(begin, "right"))
            if self.window[0] != number:
                blocks = self.blocks[number * _WINDOW : (number + 1) * _WINDOW].tolist()
                ranges = [np.arange(b * self.block, min((b + 1) * self.block, self.count)) for b in blocks]
                self.window = number, _random(*self.key, 2 + number).permutation(np.concatenate(ranges))
            last, rows = int(self.ends[number]), self.window[1]
            first = last - len(rows)
            parts.append(rows[begin - first : min(end, last) - first])
            begin = min(end, last)
        return np.concatenate(parts)


def _random(*key: int) -> np.random.RandomState:
    """A generator whose numbers depend on ``key`` only. NumPy promises the same numbers in every later version."""
    return np.random.RandomState([word for number in key for word in (number & 0xFFFFFFFF, number >> 32)])


def _ranks(rank: int | None, world: int | None) -> tuple[int, int]:
    """This rank and the number of ranks."""
    if (rank is None) != (world is None):
        got = f"world={world} without rank=" if rank is None else f"rank={rank} without world="
        raise TypeError(
            f"BatchOrder takes rank= and world= together, got {got}; without both, one process has all rows"
        )
    ranks = _number("a world", 1 if world is None else world, 1)
    own = _number("a rank", 0 if rank is None else rank)
    if own >= ranks:
        raise ValueError(f"BatchOrder takes a rank below the world of {ranks}, got {own}")
    return own, ranks


def _rows(given: Any) -> tuple[_Numbers | None, int]:
    """The row numbers, if some are given, and the number of rows."""
    numbers = isinstance(given, (list, tuple)) and isinstance(given[0] if given else 0, (Number, np.number, np.bool_))
    if numbers or isinstance(given, (Tensor, np.ndarray, range)):
        index = _integers("row numbers", given)
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
        return None, _number("a number of rows", given)
    raise TypeError(
        f"BatchOrder takes a dataset with a length, row numbers or a number of rows, got {described(given)}; "
        "a list of its samples has a length"
    )


_NO_DATASETS: list[tuple[Any, str]] = [
    (BatchOrder, "give it to a DataLoader as batch_sampler=, and the DataLoader to prefetch"),
    (Sampler, "give the dataset that it samples"),
    (DataLoader, "give its dataset"),
    (Mapping, "its length is the number of keys; give its rows: d.rows, or DeviceDict(columns).rows"),
    ((str, bytes), "load it first"),
]
"""What has a length that is no number of rows, and what to write instead."""


def _kind_of_state(state: Any) -> str:
    """Describe an object that is no state of a BatchOrder."""
    if not isinstance(state, Mapping):
        return described(state)
    keys = cast("Mapping[Any, Any]", state)
    if any(name in keys for name in ("_num_yielded", "_snapshot")):
        return "a state of StatefulDataLoader"
    return f"a mapping with the keys {', '.join(map(repr, islice(keys, 4)))}" if keys else "an empty mapping"


def _integers(what: str, given: Any) -> _Numbers:
    """A list of ints as an array."""
    try:
        array = np.asarray(given.detach().cpu() if isinstance(given, Tensor) else given)
    except (TypeError, ValueError):  # a ragged list, or bfloat16
        array = np.zeros(1)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        got = "a mask; give mask.nonzero().flatten()" if array.dtype.kind == "b" else described(given)
        got += "; give its .lengths" if getattr(given, "_is_ragged", False) else ""
        raise TypeError(f"BatchOrder takes {what} as a tensor, an array or a list of ints, got {got}")
    return array.astype(np.int64)


def _number(what: str, given: Any, least: int = 0) -> int:
    try:
        number = as_int(given)
    except TypeError:
        raise TypeError(f"BatchOrder takes {what} of type int, got {described(given)}") from None
    if number < least or number >= 1 << 63:
        raise ValueError(f"BatchOrder takes {what} of at least {least}, got {number}")
    return number
