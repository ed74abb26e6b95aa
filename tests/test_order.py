"""`BatchOrder`: each row once an epoch, over all ranks, through any interruption; batches by tokens; block shuffle."""

from __future__ import annotations

import copy
import json
import math
import pickle
import random
import re
from collections.abc import Iterator, Sequence
from itertools import chain, islice, zip_longest
from typing import Any

import numpy as np
import pytest
import torch
from checks import fails
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, RandomSampler, Subset

from tensordict_lite import BatchOrder, DeviceDict, JoinedRows, Ragged, collate, prefetch
from tensordict_lite._batch.shuffle import permuted, shuffled

Batches = list[list[int]]


def rows_of(batches: list[Batches]) -> list[int]:
    return sorted(chain.from_iterable(chain.from_iterable(batches)))


def texts(count: int) -> np.ndarray[Any, Any]:
    """Lengths like those of texts."""
    return np.clip(np.random.RandomState(0).lognormal(5.8, 0.9, count), 1, 4096).astype(int)


ORDERS = st.fixed_dictionaries(
    {
        "shuffle": st.one_of(st.booleans(), st.integers(1, 9)),
        "seed": st.integers(0, 1 << 40),
        "drop_last": st.booleans(),
    }
)


class TestEachRowOnce:
    @settings(max_examples=150)
    @given(
        lengths=st.lists(st.integers(0, 30), max_size=90),
        way=st.one_of(
            st.builds(dict, size=st.integers(1, 12)), st.builds(dict, tokens=st.integers(30, 90), padded=st.booleans())
        ),
        options=ORDERS,
        worlds=st.lists(st.integers(1, 5), min_size=1, max_size=3),
        epoch=st.integers(0, 3),
        data=st.data(),
    )
    def test_over_all_ranks_and_interruptions(
        self, lengths: list[int], way: Any, options: Any, worlds: list[int], epoch: int, data: st.DataObject
    ) -> None:
        def orders(world: int) -> list[BatchOrder]:
            tokens: Any = {"lengths": lengths} if "tokens" in way else {}
            given = {**way, **options, **tokens, "world": world}
            made = [BatchOrder(len(lengths), rank=rank, **given) for rank in range(world)]
            for order in made:
                order.set_epoch(epoch)
            return made

        taken: list[Batches] = []
        state: Any = None
        for left, world in zip(range(len(worlds) - 1, -1, -1), worlds, strict=True):
            ranks = orders(world)
            for order in ranks:
                if state is not None:
                    order.load_state_dict(state)
            if ranks[0].epoch != epoch:  # nothing was left
                assert all(order.state_dict()["position"] == 0 and order.epoch == epoch + 1 for order in ranks)
                break
            whole = [len(order) for order in ranks]
            batches = [list(order) for order in ranks]
            for order, each in zip(ranks, batches, strict=True):
                assert [order.batch(at) for at in range(min(3, len(each)))] == each[:3]
            if state is None:
                assert [len(each) for each in batches] == whole
            counts = [len(each) for each in batches]
            assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1
            for rows in chain.from_iterable(batches):
                assert rows and len(rows) <= way.get("size", len(rows))
                spent = [max(1, lengths[row]) for row in rows]
                assert (len(spent) * max(spent) if way.get("padded") else sum(spent)) <= way.get("tokens", 10_000)
            if options["drop_last"]:
                assert counts[0] == counts[-1]
                assert "tokens" in way or all(len(rows) == way["size"] for rows in chain.from_iterable(batches))
            stop = data.draw(st.integers(0, counts[-1])) if left else counts[0]
            taken += [each[:stop] for each in batches]
            states = [order.state_dict(stop) for order in ranks]
            assert all(one == states[0] for one in states) and states[0]["epoch"] == epoch
            state = json.loads(json.dumps(states[0]))
            same = orders(world)
            for order, each in zip(same, batches, strict=True):  # the same world goes on with the same batches
                order.load_state_dict(state)
                rest = list(order)
                assert rest == each[stop:] if order.epoch == epoch else stop >= counts[0] and order.epoch == epoch + 1
        found = rows_of(taken)
        if not options["drop_last"]:
            assert found == list(range(len(lengths)))
        else:
            assert len(set(found)) == len(found)

    def test_the_order_is_that_of_every_version(self) -> None:
        """A run that resumes after an update must get the same order. These numbers never change."""
        order = BatchOrder(12, 5, shuffle=True, seed=1)
        assert list(order) == [[6, 3, 2, 7, 11], [8, 1, 4, 0, 9], [10, 5]]
        order.set_epoch(3)
        assert list(order) == [[10, 0, 4, 6, 3], [8, 5, 1, 2, 9], [7, 11]]
        (blocks,) = BatchOrder(41, 41, shuffle=2, seed=1 << 40)
        assert blocks[:17] == [19, 37, 32, 10, 6, 11, 16, 36, 31, 39, 30, 7, 38, 17, 18, 33, 34]
        assert BatchOrder(10**15, 3, shuffle=True).batch(10**14) == [811568606754499, 505170947099895, 397070564528545]
        planned = BatchOrder(9, tokens=10, lengths=[4, 9, 3, 3, 8, 2, 5, 5, 1])
        assert list(planned) == [[0, 2, 3], [1, 8], [4, 5], [6, 7]]

    def test_some_rows(self) -> None:
        index = torch.tensor([7, 3, 3, 9])
        for some in (index, index.numpy(), index.tolist()):
            order = BatchOrder(some, 3)
            assert list(order) == [[7, 3, 3], [9]] and len(order) == 2
        assert list(BatchOrder(range(2, 6), 3)) == [[2, 3, 4], [5]]
        assert sorted(chain.from_iterable(BatchOrder(index, 3, shuffle=True))) == [3, 3, 7, 9]
        by_tokens = BatchOrder(index, tokens=5, lengths=[0, 0, 0, 2, 0, 0, 0, 5, 0, 1])
        assert list(by_tokens) == [[7], [3, 3, 9]]
        assert list(BatchOrder([], 3)) == [] and len(BatchOrder(0, 3)) == 0
        assert list(BatchOrder([], tokens=3, lengths=[1])) == [] and list(BatchOrder(0, 1, shuffle=True)) == []

    def test_a_dataset_of_any_kind(self) -> None:
        table = DeviceDict({"x": torch.arange(5)})
        samples: list[Any] = [list("abcde"), [{"x": 1}] * 5, [torch.ones(2)] * 5, [[0.5]] * 5, ({"x": 1},) * 5]
        for dataset in (table.rows, Subset(table.rows, [0, 1, 2, 3, 4]), 5, *samples):
            assert list(BatchOrder(dataset, 3)) == [[0, 1, 2], [3, 4]]
        batches = DataLoader(samples[1], batch_sampler=BatchOrder(samples[1], 3), collate_fn=collate)
        assert [batch["x"].tolist() for batch in batches] == [[1, 1, 1], [1, 1]]


class TestEpochs:
    def test_each_has_an_order_of_its_own(self) -> None:
        order = BatchOrder(100, 100, shuffle=True)
        found = [next(iter(order)) for _ in order.epochs(3)]
        assert len({tuple(rows) for rows in found}) == 3 and order.epoch == 3
        order.set_epoch(1)
        assert next(iter(order)) == found[1] and list(order.epochs(1)) == []
        other = BatchOrder(100, 100, shuffle=True, seed=1)
        assert next(iter(other)) not in found

    def test_every_pass_is_the_next_epoch(self) -> None:
        plain = BatchOrder(10, 4, shuffle=True)
        whole = [list(plain) for _ in plain.epochs(5)]
        order = BatchOrder(10, 4, shuffle=True)
        assert [list(order), list(order)] == whole[:2] and order.epoch == 1
        broken = iter(order)
        assert order.epoch == 1, "the epoch changes at the first batch"
        assert next(broken) == whole[2][0] and order.epoch == 2
        assert list(order) == whole[3], "also after a break"
        assert list(broken) == whole[2][1:], "a new pass does not disturb an older one"
        assert [list(order) for _ in order.epochs(5)] == whole[4:] and order.epoch == 5
        order.set_epoch(0)
        assert [list(order), list(order)] == whole[:2]
        order.set_epoch(1)  # again
        assert [list(order), list(order)] == whole[1:3]
        assert [epoch for epoch in order.epochs(5) if epoch != 3 or list(order) == whole[3]] == [3, 4]

    def test_a_resumed_epoch_stays_resumed_until_the_next(self) -> None:
        first = BatchOrder(10, 2, shuffle=True)
        first.set_epoch(4)
        whole = list(first)
        order = BatchOrder(10, 2, shuffle=True)
        for again in (True, False):
            order.load_state_dict(first.state_dict(3))
            assert order.epoch == 4 and len(order) == 5
            if again:
                order.set_epoch(4)  # as every loop over epochs does
            assert order.batch(1) == whole[4] and list(order) == whole[3:]
            assert order.state_dict(1) == first.state_dict(4)
        order.set_epoch(4)  # when a pass has begun, this is the whole epoch
        assert list(order) == whole and len(list(order)) == 5 and order.epoch == 5
        order.load_state_dict(first.state_dict(3))
        assert [(epoch, len(list(order))) for epoch in order.epochs(6)] == [(4, 2), (5, 5)]

    @pytest.mark.parametrize(
        "way", [{"size": 4}, {"size": 4, "drop_last": True}, {"tokens": 9}, {"tokens": 9, "padded": True}]
    )
    def test_a_state_after_the_last_batch_is_the_start_of_the_next_epoch(self, way: Any) -> None:
        options: Any = {"lengths": [1 + i % 5 for i in range(10)]} if "tokens" in way else {}
        order, plain = (BatchOrder(10, **way, **options, shuffle=True) for _ in range(2))
        whole = [list(plain) for _ in plain.epochs(2)]
        order.load_state_dict(json.loads(json.dumps(order.state_dict(len(order)))))
        assert order.epoch == 1 and order.state_dict() == plain.state_dict() | {"epoch": 1}
        assert list(order) == whole[1]

    @pytest.mark.parametrize("begun", [False, True])
    def test_an_epoch_that_is_set_while_a_pass_is_under_way(self, begun: bool) -> None:
        order = BatchOrder(10, 4, shuffle=True)
        state = order.state_dict(1)
        actions: list[Any] = [lambda: order.set_epoch(7), lambda: order.load_state_dict(state)]
        for action in actions:
            order.set_epoch(0)
            left = iter(order)
            if not begun:
                action()
                assert next(left) == order.batch(0), "a pass begins at its first batch"
                continue
            next(left)
            order.set_epoch(0)  # the same epoch: the pass goes on
            next(left)
            action()
            message = r"while an iteration over it was under way; do it before iter\(loader\), or use prefetch\(loader"
            with pytest.raises(RuntimeError, match=message):
                next(left)

    def test_iterating_does_not_change_the_state(self) -> None:
        order = BatchOrder(10, 4, shuffle=True)
        left = iter(order)
        next(left)
        assert len(list(left)) == 2 and order.state_dict()["position"] == 0
        assert list(copy.deepcopy(order)) == list(pickle.loads(pickle.dumps(order))) == list(order)

    def test_one_batch(self) -> None:
        order = BatchOrder(10, 2, rank=1, world=2)
        assert [order.batch(at) for at in range(3)] == list(order) == [[2, 3], [6, 7], [9]]
        fails(IndexError, "epoch 0 has no batch 3 on rank 1", lambda: order.batch(3))
        fails(ValueError, "BatchOrder takes a number of a batch of at least 0, got -1", lambda: order.batch(-1))


class TestTokens:
    @pytest.mark.parametrize(("world", "tokens"), [(1, 8192), (8, 8192), (8, 32768)])
    def test_batches_are_full_and_balanced(self, world: int, tokens: int) -> None:
        lengths = texts(30_000)
        orders = [BatchOrder(len(lengths), tokens=tokens, lengths=lengths, shuffle=True, rank=r, world=world)
                  for r in range(world)]  # fmt: skip
        sums = np.array([[lengths[rows].sum() for rows in islice(order, 40 // world + 8)] for order in orders])
        assert sums.max() <= tokens and sums.mean() >= 0.99 * tokens
        assert (abs(sums - sums.mean(0)).max(0) / sums.mean(0)).mean() < 0.02

    def test_a_row_that_is_longer(self) -> None:
        lengths = [4, 11, 3, 10]
        message = (
            "row 1 has 11 tokens, and a batch has at most tokens=10; give it a batch of its own with "
            'longer="alone", or leave it out with BatchOrder(row_numbers, ...)'
        )
        fails(ValueError, re.escape(message), lambda: BatchOrder(4, tokens=10, lengths=lengths))
        assert list(BatchOrder(4, tokens=10, lengths=lengths, longer="alone")) == [[0, 2], [1], [3]]
        assert list(BatchOrder([0, 2, 3], tokens=10, lengths=lengths)) == [[0, 2], [3]]

    def test_no_row_waits_for_ever(self) -> None:
        lengths = [1] * 3000 + [100]
        batches = list(BatchOrder([3000, *range(3000)], tokens=100, lengths=lengths))
        assert batches[0] == [3000] and len(batches) == 31

    def test_a_state_is_found_without_a_plan_of_the_whole_epoch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        order = BatchOrder(20_000, tokens=2000, lengths=[100] * 20_000)
        read: list[int] = []
        steps = order._by_tokens

        def spy(*args: Any) -> Any:
            for step in steps(*args):
                read.append(1)
                yield step

        monkeypatch.setattr(order, "_by_tokens", spy)
        fresh = order.state_dict(990)
        assert len(read) == 990
        assert len(list(order)) == 1000 == len(order)
        read.clear()
        assert order.state_dict(990) == fresh and len(read) == 990 - 960

    def test_lengths_of_any_kind(self) -> None:
        lengths = torch.tensor([3, 4, 5], dtype=torch.int32)
        for some in (lengths, lengths.numpy(), lengths.tolist()):
            assert list(BatchOrder(3, tokens=7, lengths=some)) == [[0, 1], [2]]


class TestPadded:
    @pytest.mark.parametrize("world", [1, 8])
    def test_batches_are_full_and_balanced(self, world: int) -> None:
        lengths, tokens = texts(60_000), 16_384
        options: Any = {"tokens": tokens, "lengths": lengths, "padded": True, "shuffle": True, "world": world}
        orders = [BatchOrder(len(lengths), rank=rank, **options) for rank in range(world)]
        batches = [list(order) for order in orders]
        assert rows_of(batches) == list(range(len(lengths)))
        steps = min(map(len, batches)) - 1
        spent = np.array([[len(rows) * lengths[rows].max() for rows in each[:steps]] for each in batches])
        real = sum(int(lengths[rows].sum()) for each in batches for rows in each[:steps])
        assert spent.max() <= tokens and real >= 0.94 * tokens * steps * world
        assert (abs(spent - spent.mean(0)).max(0) / spent.mean(0)).mean() < 0.1
        firsts = [int(lengths[rows].max()) for rows in batches[0][:50]]
        assert firsts != sorted(firsts), "the batches of a window are in random order"
        in_order = BatchOrder(len(lengths), tokens=tokens, lengths=lengths, padded=True)
        assert max(in_order.batch(0)) < 10_000, "without shuffle, the rows of a window are near each other"

    def test_a_row_that_is_longer_and_other_tokens(self) -> None:
        order = BatchOrder(4, tokens=10, lengths=[4, 11, 3, 10], padded=True, longer="alone")
        assert sorted(order) == [[0, 2], [1], [3]]
        state = order.state_dict(1)
        other = BatchOrder(4, tokens=11, lengths=[4, 11, 3, 10], padded=True)
        message = "the state is of a BatchOrder with tokens=10, padded=True; make the BatchOrder as it was"
        for wrong in (other, BatchOrder(4, 2), BatchOrder(4, tokens=11, lengths=[4, 11, 3, 10])):
            with pytest.raises(ValueError, match=message):
                wrong.load_state_dict(state)
        other.load_state_dict(order.state_dict())  # the state at the beginning of a window is of any order


def z_of(counts: np.ndarray[Any, Any]) -> float:
    """How far counts that should be equal are from it, in standard deviations of chi-squared."""
    expected = counts.sum() / counts.size
    return float((((counts - expected) ** 2 / expected).sum() - counts.size + 1) / np.sqrt(2 * (counts.size - 1)))


class TestShuffle:
    """A keyed bijection is no uniform draw of all orders. It has the statistics of one, over positions and seeds."""

    @pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 64, 1000, 1024, 1025])
    @pytest.mark.parametrize("block", [None, 1, 7, 64])
    def test_it_is_a_bijection(self, count: int, block: int | None) -> None:
        rows = shuffled(np.arange(count), count, block, (5, count))
        assert sorted(rows.tolist()) == list(range(count))
        some = np.arange(0, count, 3)
        assert shuffled(some, count, block, (5, count)).tolist() == rows[some].tolist(), "each position by itself"

    @pytest.mark.parametrize("count", [3, 4, 5])
    def test_every_order_of_few_rows_is_equally_frequent(self, count: int) -> None:
        places = count ** np.arange(count)
        seen = [int(permuted(np.arange(count), count, (seed, 0)) @ places) for seed in range(3000)]
        orders = np.unique(seen, return_counts=True)[1]
        assert len(orders) == math.factorial(count) and z_of(orders) < 4

    @pytest.mark.parametrize("count", [13, 32])
    def test_positions_and_pairs_are_uniform_over_the_seeds(self, count: int) -> None:
        orders = np.array([permuted(np.arange(count), count, (seed, 1)) for seed in range(3000)])
        for at in range(count):
            assert z_of(np.bincount(orders[:, at], minlength=count)) < 5
        for at in range(0, count - 1, 4):
            pairs = np.bincount(orders[:, at] * count + orders[:, at + 1], minlength=count**2).reshape(count, count)
            assert z_of(pairs[~np.eye(count, dtype=bool)]) < 4

    @pytest.mark.parametrize("count", [100_000, 1 << 17, 10**12])
    def test_neighbours_are_independent(self, count: int) -> None:
        for seed in range(3):
            rows = permuted(np.arange(100_000), count, (seed,)) / count
            for lag in (1, 2, 3, 256, 317):
                assert abs(np.corrcoef(rows[lag:], rows[:-lag])[0, 1]) < 0.02
                cells = (rows[lag:] * 16).astype(int) * 16 + (rows[:-lag] * 16).astype(int)
                assert abs(z_of(np.bincount(cells, minlength=256))) < 5
            other = permuted(np.arange(100_000), count, (seed + 1,)) / count
            assert abs(np.corrcoef(rows, other)[0, 1]) < 0.02

    def test_any_number_of_rows_takes_no_memory(self) -> None:
        order = BatchOrder(10**15, 1000, shuffle=True, rank=7, world=1024)
        order.load_state_dict({**order.state_dict(), "position": 10**14})
        rows = next(iter(order))
        assert len(set(rows)) == 1000 and min(rows) < 10**13 and max(rows) > 10**15 - 10**13
        assert rows == order.batch(0)
        blocks = BatchOrder(10**15, 1000, shuffle=1 << 20).batch(10**9)
        assert len({row >> 20 for row in blocks}) == 8


def mixed(counts: Sequence[int], weights: Sequence[float], size: int | None = 5, **options: Any) -> BatchOrder:
    orders = [BatchOrder(count, 1, shuffle=True, seed=at) for at, count in enumerate(counts)]
    return BatchOrder.mix(orders, weights, size, **options)


class TestMix:
    @settings(max_examples=12, deadline=None)
    @given(
        weights=st.lists(st.one_of(st.floats(0.5, 9), st.integers(1, 9)), min_size=1, max_size=5),
        counts=st.lists(st.integers(15, 60), min_size=5, max_size=5),
        stop=st.sampled_from(["first", "all"]),
        worlds=st.tuples(st.integers(1, 4), st.integers(1, 4)),
        epoch=st.integers(0, 2),
        data=st.data(),
    )
    def test_each_source_has_its_share_in_every_prefix(
        self, weights: list[float], counts: list[int], stop: Any, worlds: Any, epoch: int, data: st.DataObject
    ) -> None:
        counts = counts[: len(weights)]
        share = np.array(weights) / sum(weights)
        whole = [*chain(*self.drawn(counts, weights, 1 << 12, stop, 1, epoch)[0])]
        mix = mixed(counts, weights, stop=stop)
        sources = np.array([mix.source(row) for row in whole])
        drawn = np.eye(len(counts))[sources].cumsum(0)
        assert (abs(drawn - np.arange(1, len(whole) + 1)[:, None] * share) < 1.001).all()
        ends = drawn[-1] / counts
        assert ends.max() == 1 if stop == "first" else ends.min() == 1
        first = np.cumsum([0, *counts])
        for source, count in enumerate(counts):  # no row again before all rows of the source, also in later epochs
            order = BatchOrder(count, count, shuffle=True, seed=source)
            rows = np.array(whole)[sources == source] - first[source]
            before = int(drawn[-1][source]) * epoch
            expected = np.concatenate([order.batch(0) for _ in order.epochs((before + len(rows)) // count + 1)])
            assert rows.tolist() == expected[before : before + len(rows)].tolist()
        size = data.draw(st.integers(1, 20))
        batches, states = self.drawn(counts, weights, size, stop, worlds[0], epoch)
        kept = data.draw(st.integers(0, len(states) - 1))
        rest, _ = self.drawn(counts, weights, size + 1, stop, worlds[1], epoch, json.loads(json.dumps(states[kept])))
        assert sorted([*chain(*batches[: kept * worlds[0]]), *chain(*rest)]) == sorted(whole), "elastic"

    def drawn(
        self, counts: Any, weights: Any, size: int, stop: Any, world: int, epoch: int, state: Any = None
    ) -> tuple[Batches, list[Any]]:
        """The batches of all ranks, step by step, and the state after each step."""
        orders = [mixed(counts, weights, size, stop=stop, rank=rank, world=world) for rank in range(world)]
        for order in orders:
            order.set_epoch(epoch)
            if state is not None:
                order.load_state_dict(state)
        if orders[0].epoch != epoch:
            return [], []
        each = [list(order) for order in orders]
        states = [orders[0].state_dict(step) for step in range(len(each[-1]) + 1)]
        return [batch for step in zip_longest(*each) for batch in step if batch], states

    def test_the_rows_are_those_of_joined_datasets(self) -> None:
        tables = [DeviceDict({"x": torch.arange(n) + 100 * at}) for at, n in enumerate((20, 10, 30))]
        orders = [
            BatchOrder(tables[0].rows, 1),
            BatchOrder(10, 1, shuffle=4),
            BatchOrder(tables[2].rows, 1, shuffle=True),
        ]
        order = BatchOrder.mix(orders, [0.5, 0.3, 0.2], 10, stop="all")
        joined: list[Any] = [
            JoinedRows([table.rows for table in tables]),
            ConcatDataset([table.rows for table in tables]),
        ]
        for dataset in joined:
            order.set_epoch(0)
            loader = prefetch(DataLoader(dataset, batch_sampler=order, collate_fn=collate), "cpu")
            taken = 0
            for taken, batch in enumerate(loader, 1):
                rows = order.batch(taken - 1)
                assert (batch["x"] // 100).tolist() == [order.source(row) for row in rows]
                assert np.bincount(batch["x"].numpy() // 100).tolist() == [5, 3, 2]
                assert loader.state_dict()["drawn"] == [5 * taken, 3 * taken, 2 * taken]
            assert taken == 15 and len(order) == 15, "the third source gives 2 of its 30 rows in each batch"

    @pytest.mark.parametrize("padded", [False, True])
    def test_by_tokens(self, padded: bool) -> None:
        lengths = [texts(300), texts(200)]
        orders = [BatchOrder(len(one), tokens=5000, lengths=one, shuffle=True, seed=3) for one in lengths]
        order = BatchOrder.mix(orders, [2, 1], tokens=5000, padded=padded)
        batches = list(order)
        every = np.concatenate(lengths)
        assert all((len(b) * every[b].max() if padded else every[b].sum()) <= 5000 for b in batches)
        sources = [order.source(row) for row in chain.from_iterable(batches)]
        assert sources.count(0) == 300 and sources.count(1) in (149, 150)
        again = BatchOrder.mix(orders, [2, 1], tokens=5000, padded=padded)
        again.load_state_dict(json.loads(json.dumps(order.state_dict(9))))
        assert list(again) == batches[9:]

    @pytest.mark.parametrize("rows", [1, 3, 40])
    def test_many_epochs_of_a_source_are_those_one_by_one(self, rows: int) -> None:
        """They are computed at once, each with its own key."""
        small = BatchOrder(rows, 1, shuffle=True, seed=5)
        mix = BatchOrder.mix([BatchOrder(900, 1, shuffle=True), small], [0.7, 0.3], 8, stop="all")
        seen = [row - 900 for row in chain(*mix) if row >= 900]
        expected = list(chain.from_iterable(chain(*small) for _ in range(-(-len(seen) // rows))))
        assert seen == expected[: len(seen)] and len(seen) > 380

    def test_mixes_nest_and_weights_are_ratios(self) -> None:
        inner = mixed([40, 40], [3, 1])
        order = BatchOrder.mix([inner, BatchOrder(20, 1)], [0.8, 0.2], 5)
        assert [order.source(row) for row in (0, 79, 80, 99)] == [0, 0, 1, 1]
        assert all([order.source(row) for row in rows].count(1) == 1 for rows in islice(order, 10))
        assert mixed([9, 9], [0.1, 0.3])._visits.fixed()["weights"] == [1, 3]
        assert sum(mixed([9, 9, 9], [1, 2**0.5, 3**0.5])._visits.fixed()["weights"]) == pytest.approx(1 << 18, abs=2)

    def test_errors(self) -> None:
        one = BatchOrder(5, 2)
        wrong: list[tuple[type[Exception], Any, Any, str]] = [
            (TypeError, (one, [1]), {}, "takes a list of BatchOrders, one for each dataset, got a BatchOrder"),
            (TypeError, ([one, 5], [1]), {}, "a list of BatchOrders, one for each dataset, got a list with an int"),
            (TypeError, ([], []), {}, "takes a list of BatchOrders, one for each dataset, got an empty list"),
            (TypeError, ([one], 1), {}, "BatchOrder.mix takes weights as a list of numbers, got an int"),
            (ValueError, ([one], [1, 2]), {}, "takes a weight above 0 for each of 1 orders, got [1.0, 2.0]"),
            (ValueError, ([one, one], [1, 0]), {}, "takes a weight above 0 for each of 2 orders, got [1.0, 0.0]"),
            (ValueError, ([one], [float("nan")]), {}, "takes a weight above 0 for each of 1 orders, got [nan]"),
            (ValueError, ([one], [1]), {"stop": "last"}, 'takes stop="first" or stop="all", got \'last\''),
            (ValueError, ([one, BatchOrder(5, 2, rank=0, world=1)], [1, 1]), {},
             "order 1 of a mix has a rank of its own"),
            (ValueError, ([one, BatchOrder(0, 2)], [1, 1]), {},
             "BatchOrder.mix takes orders with rows, got none in order 1"),
            (ValueError, ([BatchOrder([1], 2)], [1]), {},
             "order 0 has row numbers only, and mix counts on from the length"),
            (ValueError, ([one], [1]), {"size": None, "tokens": 9}, "a mix by tokens needs lengths, order 0 has none"),
            (TypeError, ([one], [1]), {"size": None}, "BatchOrder takes size or tokens=, got neither"),
            (TypeError, ([one], [1]), {"padded": True}, "BatchOrder takes padded=True with tokens=, got a size"),
            (TypeError, ([one], [1]), {"world": 2}, "BatchOrder takes rank= and world= together, got world=2"),
        ]  # fmt: skip
        for error, arguments, options, message in wrong:
            with pytest.raises(error, match=re.escape(message)):
                BatchOrder.mix(*arguments, **{"size": 2, **options})
        order, other = mixed([5, 5], [1, 1]), mixed([5, 5], [1, 2])
        with pytest.raises(
            ValueError, match=r"with weights=\[1, 1\], not weights=\[1, 2\]; make the BatchOrder as it was"
        ):
            other.load_state_dict(order.state_dict())
        with pytest.raises(ValueError, match="the state is of a BatchOrder with other sources; make"):
            mixed([5, 6], [1, 1]).load_state_dict(order.state_dict())
        with pytest.raises(ValueError, match="the state is of a BatchOrder of one dataset; make"):
            order.load_state_dict(one.state_dict())
        with pytest.raises(ValueError, match="the state is of a BatchOrder of a mix of datasets; make"):
            one.load_state_dict(order.state_dict())
        fails(IndexError, "row 10 is out of range, the datasets have 10", lambda: order.source(10))
        assert one.source(4) == 0


class TestBlockShuffle:
    def test_rows_of_few_blocks_are_near_each_other(self) -> None:
        (rows,) = BatchOrder(10_000, 10_000, shuffle=100, seed=3)
        assert all(len({row // 100 for row in rows[at : at + 800]}) == 8 for at in range(0, 9_600, 800))
        assert all(rows[at : at + 800] != sorted(rows[at : at + 800]) for at in range(0, 10_000, 800))
        (rows,) = BatchOrder(10_050, 10_050, shuffle=100, seed=3)  # the last block of the table is shorter
        assert sorted(rows) == list(range(10_050))
        begun = BatchOrder(10_050, 10_050, shuffle=100, seed=3)
        begun.load_state_dict({**begun.state_dict(), "position": 4_321})
        assert next(iter(begun)) == rows[4_321:]

    def test_it_is_close_to_a_full_shuffle(self) -> None:
        rows = np.array(next(iter(BatchOrder(1 << 14, 1 << 14, shuffle=64))))
        place = np.empty_like(rows)
        place[rows] = np.arange(len(rows))
        far = abs(place - place[np.random.RandomState(0).permutation(len(place))]).mean()
        assert far == pytest.approx(len(rows) / 3, rel=0.05), "blocks lie anywhere"
        neighbours = abs(np.diff(place.reshape(-1, 64))).mean()
        assert neighbours == pytest.approx(64 * 8 / 3, rel=0.05), "rows of a block are spread over 8 blocks"
        batches = rows.reshape(-1, 64)
        assert np.mean([len({row // 64 for row in batch}) for batch in batches]) > 7.5, "a batch has rows of 8 blocks"
        assert abs(np.corrcoef(rows, np.arange(len(rows)))[0, 1]) < 0.2


TABLE = DeviceDict({"i": torch.arange(23), "x": torch.rand(23, 4)})
LENGTHS = [1 + i % 5 for i in range(23)]


def loaded(order: BatchOrder, where: str, workers: int, **options: Any) -> prefetch[Any]:
    if workers:
        options = {"multiprocessing_context": "fork", **options}
    return prefetch(
        DataLoader(TABLE.rows, batch_sampler=order, num_workers=workers, collate_fn=collate, **options), where
    )


def numbers(batches: Any, count: int | None = None) -> Batches:
    return [batch["i"].cpu().tolist() for batch in islice(batches, count)]


@pytest.fixture(params=["cpu", "sim:0"])
def where(request: pytest.FixtureRequest, streams: Any) -> str:
    """With streams of the simulated device, so that batches are fetched ahead."""
    return str(request.param)


def initial_seed(_: object) -> Any:
    return torch.initial_seed()


class TestPrefetch:
    """The state describes the batches that were received, whatever was fetched ahead."""

    @pytest.mark.parametrize("way", [{"size": 3}, {"tokens": 9, "lengths": LENGTHS}], ids=["size", "tokens"])
    @pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (2, True)])
    def test_a_resumed_run_is_the_uninterrupted_one(self, where: str, way: Any, workers: int, persistent: bool) -> None:
        def fresh() -> tuple[BatchOrder, prefetch[Any]]:
            order = BatchOrder(TABLE.rows, **way, shuffle=True)
            return order, loaded(order, where, workers, persistent_workers=persistent)

        plain = BatchOrder(TABLE.rows, **way, shuffle=True)
        whole = [list(plain) for _ in plain.epochs(3)]
        order, batches = fresh()
        for epoch in order.epochs(1):
            for taken, batch in enumerate(batches, 1):
                assert batch["i"].cpu().tolist() == whole[epoch][taken - 1]
                assert batches.state_dict() == order.state_dict(taken) and len(batches) == len(whole[epoch])
        assert batches.state_dict() == {**order.state_dict()} and order.epoch == 1
        assert numbers(batches, 2) == whole[1][:2]
        state = json.loads(json.dumps(batches.state_dict()))
        order, batches = fresh()
        batches.load_state_dict(state)
        assert batches.state_dict() == state and order.epoch == 1
        assert [numbers(batches) for _ in order.epochs(3)] == [whole[1][2:], whole[2]]

    def test_after_a_break_the_end_and_another_epoch(self, where: str) -> None:
        order = BatchOrder(TABLE.rows, 5, world=2, rank=1)
        batches = loaded(order, where, 0)
        assert numbers(batches, 1) == [[5, 6, 7, 8, 9]] and batches.state_dict()["position"] == 10
        assert len(numbers(batches)) == 3 and batches.state_dict()["position"] == 23
        order.set_epoch(1)  # again
        assert batches.state_dict()["epoch"] == 1 and batches.state_dict()["position"] == 0
        third = BatchOrder(TABLE.rows, 7, world=3, rank=2)  # the last step has two rows, and none for this rank
        batches = loaded(third, where, 0)
        assert numbers(batches) == [list(range(14, 21))] and batches.state_dict()["position"] == 23

    @pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (2, True)])
    def test_every_pass_is_the_next_epoch(self, where: str, workers: int, persistent: bool) -> None:
        plain = BatchOrder(TABLE.rows, 5, shuffle=True)
        whole = [list(plain) for _ in plain.epochs(7)]
        order = BatchOrder(TABLE.rows, 5, shuffle=True)
        loader = loaded(order, "cpu", workers, persistent_workers=persistent).loader
        assert [numbers(loader) for _ in range(2)] == whole[:2], "also without prefetch"
        batches = prefetch(loader, where)
        assert numbers(batches) == whole[2] and order.epoch == 2
        assert numbers(batches, 1) == whole[3][:1] and numbers(batches) == whole[4], "also after a break"
        batches.set_epoch(1)
        begun = iter(batches)
        assert order.epoch == 1
        batches.set_epoch(6)  # as Lightning does: prefetch begins at its first batch
        assert numbers(begun) == whole[6] and numbers(loader)[:1] != whole[6][:1] and order.epoch == 7

    @pytest.mark.parametrize("workers", [0, 1])
    def test_an_epoch_that_is_set_while_a_pass_is_under_way(self, where: str, workers: int) -> None:
        for wrap in (lambda loader: loader, lambda loader: prefetch(loader, where, depth=3)):
            order = BatchOrder(TABLE.rows, 5)
            left = iter(wrap(loaded(order, "cpu", workers).loader))
            next(left)
            order.set_epoch(0)
            next(left)
            order.set_epoch(3)
            with pytest.raises(
                RuntimeError, match=r"was under way; do it before .*, or use prefetch\(loader, device\)"
            ):
                next(left)

    def test_an_error_of_the_loader(self, where: str) -> None:
        def broken(rows: Any) -> Any:
            batch = collate(rows)
            if batch["i"][0] == 6:
                raise OSError("broken")
            return batch

        batches = prefetch(DataLoader(TABLE.rows, batch_sampler=BatchOrder(23, 3), collate_fn=broken), where)
        fails(OSError, "broken", lambda: list(batches))
        assert batches.state_dict()["position"] == 6

    @pytest.mark.parametrize("workers", [0, 1])
    def test_nothing_is_drawn_from_a_global_generator(self, where: str, workers: int) -> None:
        order = BatchOrder(TABLE.rows, 3, shuffle=True)
        before = torch.get_rng_state(), pickle.dumps(np.random.get_state()), random.getstate()
        batches = loaded(order, where, workers)
        for _ in order.epochs(2):
            assert len(list(batches)) == len(order) == 8
        after = torch.get_rng_state(), pickle.dumps(np.random.get_state()), random.getstate()
        assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
        assert batches.loader.generator is None

    def test_workers_get_a_seed_for_each_epoch(self) -> None:
        def seeds(epochs: int, generator: torch.Generator | None = None) -> Iterator[int]:
            order = BatchOrder(23, 23)
            for _ in order.epochs(epochs):
                loader = DataLoader(
                    TABLE.rows, batch_sampler=order, num_workers=1, collate_fn=initial_seed, generator=generator
                )
                yield from prefetch(loader, "cpu")

        first, second = seeds(2)
        assert first != second and [first, second] == list(seeds(2))
        assert list(seeds(1, torch.Generator().manual_seed(5))) == list(seeds(1, torch.Generator().manual_seed(5)))

    def test_what_has_no_state(self) -> None:
        batches = loaded(BatchOrder(23, 3), "cpu", 1, in_order=False)
        message = "a DataLoader with in_order=False has no state; make the DataLoader with in_order=True"
        fails(ValueError, message, batches.state_dict)
        assert hasattr(loaded(BatchOrder(23, 3), "cpu", 0), "load_state_dict")
        plain = prefetch(DataLoader(TABLE.rows, 3), "cpu")  # pyright: ignore[reportArgumentType]
        assert not hasattr(plain, "state_dict")
        with pytest.raises(AttributeError, match=r"^the loader has no state_dict; give the DataLoader a Ba"):
            _ = plain.state_dict


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(int, 1)


class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "options", "error", "message"),
        [
            ((9,), {}, TypeError, "BatchOrder takes size or tokens=, got neither"),
            ((9, 2), {"tokens": 3, "lengths": [1] * 9}, TypeError, "BatchOrder takes size or tokens=, got both"),
            ((9,), {"tokens": 3}, TypeError, "tokens= and lengths= together: lengths= has the tokens of each row"),
            ((9, 3), {"lengths": [1] * 9}, TypeError, "BatchOrder takes tokens= and lengths= together"),
            ((9, 0), {}, ValueError, "BatchOrder takes a size of at least 1, got 0"),
            ((9, 2.0), {}, TypeError, "BatchOrder takes a size of type int, got a float"),
            ((9, 2), {"shuffle": 0}, ValueError, "takes shuffle=, a bool or a block size of at least 1, got 0"),
            ((9, 2), {"seed": -1}, ValueError, "BatchOrder takes a seed of at least 0, got -1"),
            ((9, 2), {"rank": 2, "world": 2}, ValueError, "BatchOrder takes a rank below the world of 2, got 2"),
            ((9, 2), {"world": 2}, TypeError, "takes rank= and world= together, got world=2 without rank=; witho"),
            ((9, 2), {"rank": 0}, TypeError, "takes rank= and world= together, got rank=0 without world=; witho"),
            ((9, 2), {"rank": 0, "world": 0}, ValueError, "BatchOrder takes a world of at least 1, got 0"),
            ((9, 2), {"longer": "cut"}, ValueError, 'BatchOrder takes longer="error" or longer="alone", got \'cut\''),
            ((None, 2), {}, TypeError, "takes a dataset with a length, row numbers or a number of rows, got a None"),
            ((iter([1]), 2), {}, TypeError, "got a list_iterator; a list of its samples has a length"),
            (({1, 2}, 2), {}, TypeError, "takes a dataset with a length, row numbers or a number of rows, got a set"),
            ((Endless(), 2), {}, TypeError, "takes a dataset with a length, row numbers or a number of rows, got an"),
            ((2.5, 2), {}, TypeError, "takes a dataset with a length, row numbers or a number of rows, got a float"),
            ((DeviceDict({"x": [1]}), 2), {}, TypeError, "takes a dataset, got a mapping; its length is the number of"),
            (({"x": [1, 2]}, 2), {}, TypeError, "give its rows: d.rows, or DeviceDict(columns).rows"),
            ((BatchOrder(3, 1), 2), {}, TypeError, "takes a dataset, got a BatchOrder; give it to a DataLoader"),
            ((RandomSampler([1]), 2), {}, TypeError, "takes a dataset, got a RandomSampler; give the dataset that"),
            ((DataLoader(TABLE.rows), 2), {}, TypeError, "takes a dataset, got a DataLoader; give its dataset"),
            (("runs/table", 2), {}, TypeError, "BatchOrder takes a dataset, got a str; load it first"),
            ((-1, 2), {}, ValueError, "takes a number of rows of at least 0, got -1"),
            (([True, False], 2), {}, TypeError, "or a list of ints, got a mask; give mask.nonzero().flatten()"),
            (((0.5, 1.5), 2), {}, TypeError, "as a tensor, an array or a list of ints, got a tuple"),
            (([1, "a"], 2), {}, TypeError, "takes row numbers as a tensor, an array or a list of ints, got a list"),
            (([-1, 2], 2), {}, ValueError, "BatchOrder takes row numbers of at least 0, got -1"),
            (([1.5], 2), {}, TypeError, "as a tensor, an array or a list of ints, got a list"),
            ((torch.ones(2, 2), 2), {}, TypeError, "or a list of ints, got float32[2, 2]"),
            ((torch.ones(2) > 0, 2), {}, TypeError, "or a list of ints, got a mask; give mask.nonzero().flatten()"),
            ((torch.ones(2).byte(), 2), {}, TypeError, "row numbers of dtype uint8 may be a mask; give mask.nonzero()"),
            ((9,), {"tokens": 3, "lengths": [1] * 8}, ValueError, "of every row of the dataset, got 8 for rows 0 to 8"),
            (([9],), {"tokens": 3, "lengths": [1] * 9}, ValueError, "every row of the dataset, got 9 for rows 0 to 9"),
            ((2,), {"tokens": 3, "lengths": [1, -1]}, ValueError, "row 1 has a length of -1; lengths are at least 0"),
            ((2,), {"tokens": 3, "lengths": [0.5, 1]}, TypeError, "BatchOrder takes lengths as a tensor, an array or"),
            ((1,), {"tokens": 3, "lengths": Ragged.from_rows([[1]])}, TypeError, "got a Ragged; give its .lengths"),
        ],
    )  # fmt: skip
    def test_arguments(self, arguments: Any, options: Any, error: type[Exception], message: str) -> None:
        fails(error, re.escape(message), lambda: BatchOrder(*arguments, **options))

    @pytest.mark.parametrize("size", [1, 4])
    def test_an_order_as_the_sampler(self, size: int) -> None:
        loader: Any = DataLoader(TABLE.rows, size, sampler=BatchOrder(23, 3), collate_fn=collate)  # pyright: ignore
        way_out = "give it to the DataLoader as batch_sampler=, not as sampler="
        fails(TypeError, f"a BatchOrder yields whole batches; {way_out}", lambda: prefetch(loader, "cpu"))
        fails(TypeError, "a BatchOrder yields whole batches: give it to DataLoader as batch_s", lambda: list(loader))
        for rows in ([[0, 1], [2, 3]], [[0, 1], [2]]):
            with pytest.raises(TypeError, match=r"by a list of ints.* give it to DataLoader as batch_sampler="):
                TABLE.rows.__getitems__(rows)  # pyright: ignore
        alone: Any = DataLoader(TABLE.rows, None, sampler=BatchOrder(23, 3))  # pyright: ignore
        assert numbers(alone) == list(BatchOrder(23, 3)), "without batching, each sample is a batch"

    def test_a_state_that_does_not_fit(self) -> None:
        order = BatchOrder(9, 2, shuffle=True, seed=3)
        state = BatchOrder(9, tokens=5, lengths=[4, 5, 1, 5, 1, 4, 1, 1, 1], shuffle=True, seed=3).state_dict(1)
        assert state["waiting"] and state["position"]
        again = "; make the BatchOrder as it was"
        wrong: list[tuple[type[Exception], Any, str]] = [
            (TypeError, [1], "load_state_dict takes a state of BatchOrder, got a list"),
            (TypeError, {}, "got an empty mapping; it comes from state_dict() of a BatchOrder, or of prefetch over"),
            (TypeError, {"epoch": 1, 2: 3}, "got a mapping with the keys 'epoch', 2; it comes from state_dict() of a"),
            (TypeError, {"_num_yielded": 3}, "of BatchOrder, got a state of StatefulDataLoader; it comes"),
            (ValueError, {**state, "rows": 8}, "the state is of a BatchOrder with rows=8, not rows=9" + again),
            (ValueError, {**state, "seed": 4}, "with seed=4, not seed=3" + again),
            (ValueError, {**state, "shuffle": 1}, "with shuffle=1, not shuffle=True" + again),
            (ValueError, {**state, "index": 7}, "with other row numbers" + again),
            (ValueError, {**state, "position": 10}, "the state is at row 10 of 9, and "),
            (ValueError, {**state, "position": -1}, "BatchOrder takes a state with position of at least 0, got -1"),
            (TypeError, {**state, "waiting": ["a"]}, "takes a state with waiting rows as a tensor, an array or a list"),
            (ValueError, state, "the state is of a BatchOrder with tokens=, and rows wait" + again),
        ]
        before = order.state_dict(2)
        order.load_state_dict(before)
        for error, bad, message in wrong:
            with pytest.raises(error, match=re.escape(message)):
                order.load_state_dict(bad)
            assert order.state_dict() == before
        fails(ValueError, "got 4 of 3", lambda: order.state_dict(4))
        fails(ValueError, "BatchOrder takes an epoch of at least 0, got -1", lambda: order.set_epoch(-1))
        some = BatchOrder([1, 2, 3], 2)
        fails(ValueError, "other row numbers", lambda: some.load_state_dict(BatchOrder([1, 2, 4], 2).state_dict()))
