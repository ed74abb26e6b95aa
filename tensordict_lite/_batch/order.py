"""`BatchOrder`: the rows of each batch of an epoch, on each rank. It resumes at any batch, in any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from heapq import heapreplace
from itertools import chain, islice
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from torch import Tensor
from torch.utils.data import Sampler
from typing_extensions import Self

from .._errors import described
from .shuffle import Numbers, permuted
from .visits import DatasetVisits, MixedVisits, Visits, integers, number

_WAITING = 64
"""The rows that may wait for a batch with room. With 16, the batches of a step differ more; 256 take longer to plan."""
_TRAIL = 64
"""The steps between two places that an iteration by tokens remembers, so that ``state_dict`` plans few steps again."""
_PLANNED_ROWS = 1 << 15
"""The rows that an iteration looks up at once, in about a millisecond. With 8,192, an epoch takes 1.2 times as long."""
_PADDED = 128
"""The batches that are cut from rows sorted by length, with ``padded=True``. Of 32,768 tokens of
texts, 8 % are empty with 32, 5 % with 64, and 3 % with 128."""


class Place(NamedTuple):
    """A place in an epoch: the rows before ``position`` are taken, except those that wait for a batch with room.

    With ``padded=True``, so many batches of the rows after ``position`` are ``taken`` too.
    """

    epoch: int = 0
    position: int = 0
    waiting: tuple[int, ...] = ()
    taken: int = 0


Trail = list[Place]
"""The place where a pass begins. With tokens, also the place after each `_TRAIL` steps, as far as one has come."""
_Step = tuple[list[int], Place]
"""The rows of this rank in a step, and the place after the step."""


class BatchOrder(Sampler[list[int]]):
    """The rows of each batch of an epoch: a ``batch_sampler`` for DataLoader that resumes at any batch.

    The order of an epoch depends on the rows, the seed and the epoch only. Nothing is drawn from a global generator.
    In each step, every rank takes a batch of the rows that follow. So each row comes once an epoch, over all ranks.

    - Each new iteration is the next epoch. ``order.epoch`` is the current one. It changes at the first batch.
    - ``set_epoch(epoch)``, ``for epoch in order.epochs(n)``: choose the epoch of the next iteration.
    - ``len(order)``: the number of batches of this rank in a whole epoch.
    - ``state_dict(batches)``, ``load_state_dict(state)``: resume, in the same number of ranks or in another one.
    - ``batch(number)``: the rows of one batch, without an iteration.
    - ``BatchOrder.mix(orders, weights, size)``: the rows of several datasets, in shares.

    `prefetch` counts the batches of ``DataLoader(rows, batch_sampler=order)``: its ``state_dict()`` describes the last
    batch that you received, for any number of workers. It also keeps DataLoader from the global generator.

    Args:
        rows: a dataset with a length: ``d.rows``, a list of samples, any other. Or a number of rows. Or the numbers of
            some rows: a tensor, an array, a list or a range of ints. A number that comes twice counts as two rows.
        size: the rows per batch.
        tokens: in place of ``size``, the most tokens per batch. The batches of one step are filled evenly. Up to 64
            rows wait for a batch with room.
        padded: with ``tokens``, count the padding too: a batch has at most ``tokens`` divided by the length of its
            longest row as rows. Rows of similar lengths share a batch.
        lengths: with ``tokens``, the tokens of each row of the dataset: a tensor, an array or a list of ints. A row
            without tokens counts as one token.
        longer: for a row of more than ``tokens`` tokens: ``"error"``, or ``"alone"`` for a batch of its own.
        shuffle: True: all rows in random order. An int n: blocks of n rows in random order, and the rows of each 8
            blocks in random order, for a table that is larger than the memory.
        seed: the seed of the random order.
        rank: this rank. Give ``world`` too, or neither in a program of one process.
        world: the number of ranks.
        drop_last: leave out the last step, unless every rank gets ``size`` rows. Otherwise all ranks share the last
            rows, and differ by at most one batch. With ``tokens``, the step that takes the last row is left out.

    Raises: ``TypeError`` or ``ValueError`` for an invalid argument, and for a row that is longer than ``tokens``. An
    iteration raises ``RuntimeError`` if another epoch is set or a state is loaded while it is under way.
    Cost: the random order is computed when it is asked for, and takes no memory. With ``tokens``, 8 bytes for each row,
    and every rank plans the batches of all ranks: about a microsecond per row, less with ``padded``; ``len`` plans a
    whole epoch.

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
        padded: bool = False,
        lengths: Tensor | np.ndarray[Any, Any] | Sequence[int] | None = None,
        longer: Literal["error", "alone"] = "error",
        shuffle: bool | int = False,
        seed: int = 0,
        rank: int | None = None,
        world: int | None = None,
        drop_last: bool = False,
    ) -> None:
        if isinstance(rows, BatchOrder):
            raise TypeError(
                "BatchOrder takes a dataset, got a BatchOrder; "
                "give it to a DataLoader as batch_sampler=, and the DataLoader to prefetch"
            )
        given: Any = rows  # of `mix`, `MixedVisits`
        if not isinstance(given, MixedVisits) and (tokens is None) != (lengths is None):
            raise TypeError("BatchOrder takes tokens= and lengths= together: lengths= has the tokens of each row")
        visits: Visits = given if isinstance(given, MixedVisits) else DatasetVisits(given, shuffle, seed, lengths)
        if (size is None) == (tokens is None):
            raise TypeError(f"BatchOrder takes size or tokens=, got {'neither' if size is None else 'both'}")
        if padded and tokens is None:
            raise TypeError("BatchOrder takes padded=True with tokens=, got a size")
        if longer not in ("error", "alone"):
            raise ValueError(f'BatchOrder takes longer="error" or longer="alone", got {longer!r}')
        self._visits, self._count = visits, visits.count
        self.batch_size = None if size is None else number("a size", size, 1)
        self.tokens = None if tokens is None else number("tokens", tokens, 1)
        self.padded = bool(padded)
        self._ranked = rank is not None or world is not None
        self.rank, self.world = _ranks(rank, world)
        # Not a public attribute: Lightning makes its own sampler of one that has `batch_size` and `drop_last`.
        self._drop_last = bool(drop_last)
        if self.tokens is not None:
            self._lengths = _lengths_that_fit(visits, self.tokens, longer)
        self._planned: tuple[int, int] | None = None  # with tokens, an epoch and its number of batches
        self._trail: Trail = [Place()]  # of the pass under way, or of the next one
        self._next: Place | None = self._trail[0]  # where the next pass begins; None: with the next epoch
        self._changes = 0  # how often an epoch was set or a state was loaded
        self._held = False  # whether set_epoch does nothing

    @classmethod
    def mix(
        cls,
        orders: Sequence[BatchOrder],
        weights: Sequence[float],
        size: int | None = None,
        *,
        tokens: int | None = None,
        padded: bool = False,
        longer: Literal["error", "alone"] = "error",
        stop: Literal["first", "all"] = "first",
        rank: int | None = None,
        world: int | None = None,
        drop_last: bool = False,
    ) -> Self:
        """Mix the rows of several datasets, each with its share of every batch.

        The ``orders`` say which rows are visited, and how they are shuffled. Their row numbers go on from one dataset
        to the next, as in ``ConcatDataset`` and `JoinedRows`. After any number of rows, each source had its share of
        them, rounded up or down. No row of a source comes again before all of them have come, also in later epochs.

        Args:
            orders: a `BatchOrder` of each dataset. Its size, tokens and ``drop_last`` are not used.
            weights: the shares of the rows of each order. Their sum may be any number.
            size: as for `BatchOrder`.
            tokens: as for `BatchOrder`. Each order has the ``lengths`` of its dataset.
            padded: as for `BatchOrder`.
            longer: as for `BatchOrder`.
            stop: an epoch ends with ``"first"`` when one order has given all its rows, with ``"all"`` when each has.
                Until then, an order that has given all its rows begins its next epoch.
            rank: as for `BatchOrder`.
            world: as for `BatchOrder`.
            drop_last: as for `BatchOrder`.

        Raises: ``TypeError`` or ``ValueError`` for an invalid argument, and for an order with ranks of its own.
        Cost: 17 bytes for each turn until the shares repeat, at most 262,144: other weights are rounded to this.

        >>> from torch.utils.data import ConcatDataset
        >>> from tensordict_lite import BatchOrder
        >>> texts, images = ["a", "b", "c", "d", "e", "f"], ["x", "y", "z"]
        >>> order = BatchOrder.mix([BatchOrder(texts, 1), BatchOrder(images, 1)], [0.75, 0.25], 4)
        >>> both = ConcatDataset([texts, images])
        >>> [[both[row] for row in rows] for rows in order], order.source(7)
        ([['a', 'b', 'x', 'c'], ['d', 'e', 'y', 'f']], 1)
        """
        wrong = [] if isinstance(orders, BatchOrder) else [one for one in orders if not isinstance(one, BatchOrder)]
        if wrong or isinstance(orders, BatchOrder) or not orders:
            got = f"a list with {described(wrong[0])}" if wrong else described(orders) if orders else "an empty list"
            raise TypeError(f"BatchOrder.mix takes a list of BatchOrders, one for each dataset, got {got}")
        if stop not in ("first", "all"):
            raise ValueError(f'BatchOrder.mix takes stop="first" or stop="all", got {stop!r}')
        for at, order in enumerate(orders):
            if order._ranked:
                raise ValueError(f"order {at} of a mix has a rank of its own; give rank= and world= to the mix instead")
        visits = MixedVisits([order._visits for order in orders], weights, stop)
        if tokens is not None and visits.without:
            raise ValueError(f"a mix by tokens needs lengths, order {visits.without[0]} has none; give it lengths=")
        mixed = cls.__new__(cls)
        ranks: Any = {"rank": rank, "world": world, "drop_last": drop_last}
        BatchOrder.__init__(mixed, cast(Any, visits), size, tokens=tokens, padded=padded, longer=longer, **ranks)
        return mixed

    @property
    def epoch(self) -> int:
        """The current epoch: of the last iteration that has begun, or the epoch that was set or loaded since."""
        return self._trail[0].epoch

    @property
    def sampler(self) -> BatchOrder:
        """This order. Lightning and accelerate look for ``set_epoch`` here."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration. To choose the epoch of a state that was loaded changes nothing.

        If an iteration of another epoch is under way, it raises ``RuntimeError`` at its next batch.
        """
        epoch = number("an epoch", epoch)
        if self._held:
            return
        if epoch != self.epoch:
            self._go_to(Place(epoch))
        elif self._next is None:  # an iteration of this epoch is under way, or has ended
            self._next = Place(epoch)

    def epochs(self, end: int) -> Iterator[int]:
        """Yield the epochs from the next one up to ``end - 1``, and choose each. A loaded epoch comes first."""
        while (epoch := self._coming().epoch) < end:
            self.set_epoch(epoch)
            yield epoch
            if self.epoch == epoch:
                self.set_epoch(epoch + 1)

    def __len__(self) -> int:
        """The number of batches of this rank in a whole epoch. It is the same for an epoch that was resumed."""
        if self.batch_size is not None:
            steps, left = divmod(self._count, self.batch_size * self.world)
            return steps + (left > self.rank and not self._drop_last)
        if self._planned is None or self._planned[0] != self.epoch:
            self._planned = self.epoch, sum(1 for rows, _ in self._steps(Place(self.epoch)) if rows)
        return self._planned[1]

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the rows of each batch of this rank that is left in the epoch. It begins at its first batch."""
        return _Pass(self)

    def __repr__(self) -> str:
        size = f"batches of {self.batch_size}" if self.tokens is None else f"{self.tokens} tokens a batch"
        ranks = f", rank {self.rank} of {self.world}" if self.world > 1 else ""
        start = f" from row {at} on" if (at := self._trail[0].position) else ""
        return f"BatchOrder({self._count} rows, {size}{ranks}, epoch {self.epoch}{start})"

    def batch(self, number_of: int) -> list[int]:
        """The rows of one batch of this rank, without an iteration.

        Args:
            number_of: the number of the batch, from 0, since the epoch began or was resumed.

        Raises: ``IndexError`` for a batch after the last one. Cost: with ``tokens``, a plan up to this batch.

        >>> from tensordict_lite import BatchOrder
        >>> order = BatchOrder(1_000_000_000_000, 4, shuffle=True)
        >>> order.batch(17) == next(rows for at, rows in enumerate(order) if at == 17)
        True
        """
        steps = number("a number of a batch", number_of)
        try:
            rows, _ = next(self._steps(self._after(self._trail, steps)), ([], None))
        except ValueError:
            rows = []
        if not rows:
            raise IndexError(f"epoch {self.epoch} has no batch {steps} on rank {self.rank}")
        return rows

    def source(self, row: int) -> int:
        """The number of the dataset that has a row: its place in the list that `mix` took. Without `mix`, it is 0."""
        total = self._visits.total
        if not 0 <= number("a row", row) < (row + 1 if total is None else total):
            raise IndexError(f"row {row} is out of range, the datasets have {total}")
        return self._visits.source(row)

    def state_dict(self, batches: int = 0) -> dict[str, Any]:
        """The state after ``batches`` more batches of each rank, for ``json`` or ``torch.save``: equal on all ranks.

        Args:
            batches: the number of batches that each rank has taken since the epoch began or was resumed. The order
                cannot know it, because DataLoader takes rows for its workers ahead. `prefetch` counts for you.

        Raises: ``TypeError`` or ``ValueError`` for an invalid number, and for more batches than were left.
        Cost: with ``tokens``, a plan of these steps; of up to 64 steps if this process has iterated over them.
        """
        return self._state(self._after(self._trail, number("a number of batches", batches)))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state: the next iteration yields the rows that were left in its epoch.

        A state after the last batch of an epoch continues with the next epoch. ``size``, ``tokens``, ``rank``,
        ``world`` and ``drop_last`` may differ from those of the state; with ``padded``, not the ``tokens``.

        Raises: ``TypeError`` for an object that is no state, ``ValueError`` for a state of other rows, or of another
        seed or shuffle. After an error, the order is unchanged.
        """
        self._load(self._place(state))

    # --- passes ---

    def _coming(self) -> Place:
        """The place where the next pass begins."""
        return Place(self.epoch + 1) if self._next is None else self._next

    def _go_to(self, place: Place) -> None:
        self._trail, self._next = [place], place
        self._changes += 1

    def _load(self, place: Place) -> bool:
        """Continue from a place, or with the next epoch if nothing is left after it. Returns whether something is."""
        left = next(self._steps(place), None) is not None
        self._go_to(place if left else Place(place.epoch + 1))
        return left

    def _prepare(self) -> Trail:
        """The trail of the next pass, which becomes the current one."""
        self._next = self._coming()
        if self._trail[0] is not self._next:
            self._trail = [self._next]
        return self._trail

    def _require(self, changes: int) -> None:
        """Raise if an epoch was set or a state was loaded since there were so many changes."""
        if self._changes != changes:
            raise RuntimeError(
                "the epoch of a BatchOrder was set, or a state was loaded, while an iteration over it was under way; "
                "do it before iter(loader), or use prefetch(loader, device): it begins at its first batch"
            )

    # --- places ---

    def _state(self, place: Place) -> dict[str, Any]:
        """A state as plain data. ``window``: with ``padded``, the tokens and the batches that are taken."""
        return {
            "epoch": place.epoch,
            "position": place.position,
            "waiting": list(place.waiting),
            "window": [self.tokens, place.taken] if place.taken else [],
            **self._visits.drawn(place.position),
            **self._visits.fixed(),
        }

    def _place(self, state: Mapping[str, Any]) -> Place:
        """Validate a state."""
        if not isinstance(state, Mapping) or not {"epoch", "position", "waiting", "window"} <= set(state):
            raise TypeError(
                f"load_state_dict takes a state of BatchOrder, got {_kind_of_state(state)}; "
                "it comes from state_dict() of a BatchOrder, or of prefetch over a DataLoader with one"
            )
        again = "; make the BatchOrder as it was"
        for name, own in self._visits.fixed().items():
            if name not in state:
                other = "one dataset" if name in ("sources", "weights", "stop") else "a mix of datasets"
                raise ValueError(f"the state is of a BatchOrder of {other}{again}")
            if state[name] != own or type(state[name]) is not type(own):
                what = {"index": "other row numbers", "sources": "other sources"}.get(name)
                what = what or f"{name}={state[name]!r}, not {name}={own!r}"
                raise ValueError(f"the state is of a BatchOrder with {what}{again}")
        epoch, position = (number(f"a state with {name}", state[name]) for name in ("epoch", "position"))
        waiting = integers("a state with waiting rows", state["waiting"])
        window = integers("a state with a window", state["window"]).tolist()
        if position > self._count or len(waiting) > position:
            raise ValueError(f"the state is at row {position} of {self._count}, and {len(waiting)} rows wait")
        known = 0 if self.tokens is None or self.padded else len(self._lengths)
        if len(waiting) and (not known or waiting.min() < 0 or waiting.max() >= known):
            raise ValueError(f"the state is of a BatchOrder with tokens=, and rows wait{again}")
        if window and (not self.padded or len(window) != 2 or window[0] != self.tokens or window[1] < 0):
            raise ValueError(f"the state is of a BatchOrder with tokens={window[0]}, padded=True{again}")
        return Place(epoch, position, tuple(waiting.tolist()), window[1] if window else 0)

    def _after(self, trail: Trail, batches: int | None, clamp: bool = False) -> Place:
        """The place after so many steps. None, or with ``clamp`` more than there are: the end of the epoch."""
        epoch, position, *_ = trail[0]
        end = Place(epoch, self._count)
        if batches is None:
            return end
        if self.batch_size is not None:
            step, rest = self.batch_size * self.world, self._count - position
            steps = rest // step if self._drop_last else -(-rest // step)
            place = Place(epoch, min(position + batches * step, self._count))
        else:
            known = min(batches // _TRAIL, len(trail) - 1)
            planned = [step[1] for step in islice(self._steps(trail[known]), batches - known * _TRAIL)]
            steps, place = known * _TRAIL + len(planned), [trail[known], *planned][-1]
        if batches > steps and not clamp:
            raise ValueError(f"state_dict takes the number of batches that were taken, got {batches} of {steps}")
        return end if batches > steps else place

    # --- steps ---

    def _steps(self, place: Place) -> Iterator[_Step]:
        """The steps from ``place`` to the end of the epoch."""
        if self.batch_size is not None:
            return self._by_size(place, self.batch_size)
        tokens = cast(int, self.tokens)
        return self._by_padded_tokens(place, tokens) if self.padded else self._by_tokens(place, tokens)

    def _by_size(self, place: Place, size: int) -> Iterator[_Step]:
        epoch, position, *_ = place
        step = size * self.world
        steps, rest = divmod(self._count - position, step)
        mine = np.arange(self.rank * size, (self.rank + 1) * size)
        at_once = max(1, _PLANNED_ROWS // size)
        for first in range(0, steps, at_once):
            begins = position + step * np.arange(first, min(first + at_once, steps))
            rows = self._visits.rows(epoch, (begins[:, None] + mine).ravel()).reshape(-1, size)
            for batch, begin in zip(rows.tolist(), begins.tolist(), strict=True):
                yield batch, Place(epoch, begin + step)
        if rest and not self._drop_last:
            each, more = divmod(rest, self.world)  # of the last rows, the first ranks take one more
            begin, end = (self._count - rest + rank * each + min(rank, more) for rank in (self.rank, self.rank + 1))
            yield self._visits.rows(epoch, np.arange(begin, end)).tolist(), Place(epoch, self._count)

    def _chunks(self, epoch: int, position: int) -> Iterator[Numbers]:
        """The rows from a position on, many at once."""
        for first in range(position, self._count, _PLANNED_ROWS):
            yield self._visits.rows(epoch, np.arange(first, min(first + _PLANNED_ROWS, self._count)))

    def _by_tokens(self, place: Place, tokens: int) -> Iterator[_Step]:
        """Give each row to the rank with the fewest tokens. If it has no room, no rank has, and the row waits."""
        epoch, position, waiting, _ = place
        following = chain.from_iterable(map(self._with_lengths, self._chunks(epoch, position)))
        held = [*self._with_lengths(np.array(waiting, np.int64))]
        while True:
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
            if not held and (self._drop_last or not any(batches)):
                return
            position += sum(map(len, batches)) + len(held) - before
            yield batches[self.rank], Place(epoch, position, tuple(row for row, _ in held))

    def _with_lengths(self, rows: Numbers) -> Iterator[tuple[int, int]]:
        return zip(rows.tolist(), self._lengths[rows].tolist(), strict=True)

    def _by_padded_tokens(self, place: Place, tokens: int) -> Iterator[_Step]:
        """The batches do not depend on the number of ranks: in each step, every rank takes the next one."""
        batches = self._windows(place, tokens)
        while step := list(islice(batches, self.world)):
            if len(step) < self.world and self._drop_last:
                return
            yield step[self.rank][0] if self.rank < len(step) else [], step[-1][1]

    def _windows(self, place: Place, tokens: int) -> Iterator[_Step]:
        """Sort the rows of about `_PADDED` batches by length, cut them, and put the batches in random order."""
        epoch, position, _, taken = place
        chunks, following = self._chunks(epoch, position), np.zeros(0, np.int64)
        while position < self._count:
            while (sums := np.cumsum(self._lengths[following]))[-1:].sum() < _PADDED * tokens:
                if (chunk := next(chunks, None)) is None:
                    break
                following = np.append(following, chunk)
            rows, following = np.split(following, [int(sums.searchsorted(_PADDED * tokens)) + 1])
            rows = rows[np.argsort(-self._lengths[rows], kind="stable")]
            ends = _even_ends(self._lengths[rows].tolist(), tokens)
            batches = [rows[begin:end].tolist() for begin, end in zip([0, *ends], ends, strict=False)]
            if self._visits.shuffle:
                key = (*self._visits.key, epoch, 3, position)
                batches = [batches[at] for at in permuted(np.arange(len(batches)), len(batches), key).tolist()]
            after = Place(epoch, position + len(rows))
            for done in range(taken + 1, len(batches) + 1):
                yield batches[done - 1], Place(epoch, position, (), done) if done < len(batches) else after
            position, taken = after.position, 0


def _even_ends(lengths: list[int], tokens: int) -> list[int]:
    """Where each batch of rows ends, longest row first: as few batches as fit.

    The last batch would have what is left. So the second half of the batches has the smallest budget that is enough.
    These have the short rows, of which a little less fills a batch too.
    """

    def cut(ends: list[int], budget: int) -> list[int]:
        ends = ends.copy()
        end = ends[-1] if ends else 0
        while end < len(lengths):
            end = min(end + max(1, budget // lengths[end]), len(lengths))
            ends.append(end)
        return ends

    ends, low, high = cut([], tokens), 0, tokens
    half = ends[: len(ends) // 2]
    while high - low > max(1, tokens >> 7):
        middle = (low + high) // 2
        if len(even := cut(half, middle)) == len(ends):
            ends, high = even, middle
        else:
            low = middle
    return ends


def _lengths_that_fit(visits: Visits, tokens: int, longer: str) -> Numbers:
    """The lengths of all rows, at least 1. Raises unless every row that is visited has a length that fits."""
    lengths, rows = cast(Numbers, visits.lengths), visits.numbers()
    known, last = len(lengths), int(rows.max(initial=-1))
    if last >= known or visits.total not in (None, known):
        raise ValueError(f"lengths= has the tokens of every row of the dataset, got {known} for rows 0 to {last}")
    found = lengths[rows]
    if len(rows) and (least := int(found.min())) < 0:
        raise ValueError(f"row {rows[found.argmin()]} has a length of {least}; lengths are at least 0")
    if len(rows) and (most := int(found.max())) > tokens and longer == "error":
        raise ValueError(
            f"row {rows[found.argmax()]} has {most} tokens, and a batch has at most tokens={tokens}; "
            'give it a batch of its own with longer="alone", or leave it out with BatchOrder(row_numbers, ...)'
        )
    return np.maximum(lengths, 1)


class _Pass(Iterator[list[int]]):
    """One iteration, which begins at its first batch. torchdata's StatefulDataLoader saves and loads its state."""

    def __init__(self, order: BatchOrder) -> None:
        self._order, self._place, self._changes = order, order._coming(), 0
        self._steps: Iterator[_Step] | None = None
        self._trail, self._taken = order._trail, 0

    def __next__(self) -> list[int]:
        order = self._order
        if self._steps is None:
            self._trail, self._taken, order._next = order._prepare(), 0, None
            self._place, self._changes = self._trail[0], order._changes
            self._steps = order._steps(self._place)
        order._require(self._changes)
        rows, self._place = next(self._steps, ([], Place(self._place.epoch, order._count)))
        self._taken += 1
        if order.tokens is not None and self._taken == _TRAIL * len(self._trail):
            self._trail.append(self._place)
        if not rows:  # the end of the epoch; in the last step, some ranks may have no rows
            raise StopIteration
        return rows

    def state_dict(self) -> dict[str, Any]:
        return self._order._state(self._place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._place = self._order._place(state)
        # At the end of an epoch, torchdata makes a new iterator for the next one.
        self._steps = None if self._order._load(self._place) else iter(())
        self._changes = self._order._changes


def _ranks(rank: int | None, world: int | None) -> tuple[int, int]:
    """This rank and the number of ranks."""
    if (rank is None) != (world is None):
        got = f"world={world} without rank=" if rank is None else f"rank={rank} without world="
        raise TypeError(
            f"BatchOrder takes rank= and world= together, got {got}; without both, one process has all rows"
        )
    ranks = number("a world", 1 if world is None else world, 1)
    own = number("a rank", 0 if rank is None else rank)
    if own >= ranks:
        raise ValueError(f"BatchOrder takes a rank below the world of {ranks}, got {own}")
    return own, ranks


def _kind_of_state(state: Any) -> str:
    """Describe an object that is no state of a BatchOrder."""
    if not isinstance(state, Mapping):
        return described(state)
    keys = cast("Mapping[Any, Any]", state)
    if any(name in keys for name in ("_num_yielded", "_snapshot")):
        return "a state of StatefulDataLoader"
    return f"a mapping with the keys {', '.join(map(repr, islice(keys, 4)))}" if keys else "an empty mapping"
