"""The cost of an order of two million rows, how full its batches by tokens are, and block shuffle on a cold table.

The mix has three datasets with 70, 20 and 10 percent of the rows. The batches by tokens with padding are compared with
buckets by hand: 8,192 rows are sorted by length and cut into batches, which come in random order, in turn to the ranks.

    python benchmarks/bench_order.py [--quick] [--rounds N] [--mib N] [--only TEXT] [--json PATH]

The lengths are like those of texts: a median of 330 tokens, at most 4096. The batches by hand close a batch at the
first row that does not fit, and give the batches to the ranks in turn.

An empty step takes a batch of 4 fields and does nothing with it, so the time is that of the loader and of `prefetch`.

The cold table has rows of 4 KiB. Its pages are dropped from the page cache before each measurement. Then the first 4096
rows of the order are read: few of them share a page, as in a table that is much larger than the memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from harness import Case, Prepare, Run, folder, main
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from tensordict_lite import BatchOrder, DeviceDict, collate, load, prefetch
from tensordict_lite.tables import RowWriter

OURS, BY_HAND = "BatchOrder", "by hand"
ROWS, WORLD, TOKENS = 2_000_000, 8, 32_768
WIDE = 1024  # float32 numbers in a row of 4 KiB
AT_ONCE, READ = 64, 4096  # rows of the cold table


@cache
def lengths() -> np.ndarray[Any, Any]:
    return np.clip(np.random.RandomState(0).lognormal(5.8, 0.9, ROWS), 1, 4096).astype(int)


def order_of(rank: int = 0, world: int = WORLD) -> BatchOrder:
    return BatchOrder(ROWS, tokens=TOKENS, lengths=lengths(), shuffle=True, rank=rank, world=world)


def in_turn() -> Iterator[list[int]]:
    """Batches of all ranks: a batch ends at the first row that does not fit."""
    rows = np.random.RandomState(0).permutation(ROWS)
    batch: list[int] = []
    fill = 0
    for row, length in zip(rows.tolist(), lengths()[rows].tolist(), strict=True):
        if fill + length > TOKENS:
            yield batch
            batch, fill = [], 0
        batch.append(row)
        fill += length
    yield batch


def mixed() -> BatchOrder:
    weights = [0.7, 0.2, 0.1]
    orders = [BatchOrder(round(weight * ROWS), 1, shuffle=True) for weight in weights]
    return BatchOrder.mix(orders, weights, 256)


def loaded() -> DataLoader[Any]:
    rows = DeviceDict({f"k{i}": torch.zeros(200_000) for i in range(4)}).rows
    return DataLoader(rows, batch_sampler=BatchOrder(rows, 256, shuffle=True), collate_fn=collate)


def padded_order(rank: int = 0) -> BatchOrder:
    return BatchOrder(
        ROWS, tokens=TOKENS, lengths=lengths(), padded=True, shuffle=True, rank=rank, world=WORLD, drop_last=True
    )


def in_buckets(bucket: int = 8192) -> Iterator[list[int]]:
    """Batches of all ranks: sort the rows of a bucket by length, and cut them."""
    random = np.random.RandomState(0)
    shuffled = random.permutation(ROWS)
    for first in range(0, ROWS, bucket):
        rows = shuffled[first : first + bucket]
        rows = rows[np.argsort(-lengths()[rows], kind="stable")]
        batches: list[list[int]] = []
        at = 0
        while at < len(rows):
            count = max(1, TOKENS // int(lengths()[rows[at]]))
            batches.append(rows[at : at + count].tolist())
            at += count
        for number in random.permutation(len(batches)):
            yield batches[number]


@cache
def padded_of(who: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The tokens of each rank in each step, and these with their padding: ``[ranks, steps]``."""
    if who == OURS:
        ranks = [list(padded_order(rank)) for rank in range(WORLD)]
    else:
        every = list(in_buckets())
        ranks = [every[rank : len(every) // WORLD * WORLD : WORLD] for rank in range(WORLD)]
    real = [[int(lengths()[rows].sum()) for rows in each] for each in ranks]
    spent = [[len(rows) * int(lengths()[rows].max()) for rows in each] for each in ranks]
    return np.array(real), np.array(spent)


def padded_fill(who: str) -> float:
    return 100 * float(padded_of(who)[0].mean()) / TOKENS


def padded_difference(who: str) -> float:
    """The largest distance of a rank from the mean of its step, with the padding, in the mean over the steps."""
    spent = padded_of(who)[1]
    return 100 * float((abs(spent - spent.mean(0)).max(0) / spent.mean(0)).mean())


def seconds(batches: Callable[[], Any]) -> Prepare:
    """The seconds of iterating over an epoch."""

    def measure() -> float:
        start = perf_counter()
        for _ in batches():
            pass
        return perf_counter() - start

    return lambda _: Run(dict, measure)


def torch_batches() -> BatchSampler:
    return BatchSampler(RandomSampler(range(ROWS), generator=torch.Generator().manual_seed(0)), 256, False)


@cache
def tokens_of(who: str) -> np.ndarray[Any, Any]:
    """The tokens of each rank in each step that is not the last one: ``[ranks, steps]``."""
    count = lengths()
    if who == OURS:
        sums = [[int(count[rows].sum()) for rows in order_of(rank)] for rank in range(WORLD)]
        return np.array([each[: min(map(len, sums)) - 1] for each in sums])
    every = [int(count[rows].sum()) for rows in in_turn()][:-1]
    return np.array(every[: len(every) // WORLD * WORLD]).reshape(-1, WORLD).T


def mean_fill(who: str) -> float:
    return 100 * float(tokens_of(who).mean()) / TOKENS


def difference(who: str) -> float:
    """The largest distance of a rank from the mean of its step, in the mean over the steps."""
    sums = tokens_of(who)
    return 100 * float((abs(sums - sums.mean(0)).max(0) / sums.mean(0)).mean())


def told(measure: Callable[[str], float]) -> dict[str, Prepare]:
    return {who: lambda _, who=who: Run(dict, lambda: measure(who)) for who in (OURS, BY_HAND)}


def cold_table(mib: int) -> Path:
    path = folder() / "cold"
    with RowWriter(path, like={"x": torch.zeros(1, WIDE)}) as writer:
        for _ in range(mib // 16):
            writer.write({"x": torch.rand(4096, WIDE)})
    return path


def reading(shuffle: bool | int) -> Prepare:
    def prepare(path: Path) -> Run:
        def measure() -> float:
            rows = load(path).rows  # a new mapping: pages that a process maps stay in the cache
            order = list(islice(BatchOrder(rows, AT_ONCE, shuffle=shuffle), READ // AT_ONCE))
            for file in filter(Path.is_file, path.iterdir()):
                descriptor = os.open(file, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
            start = perf_counter()
            for index in order:
                rows[index]["x"].sum()
            return perf_counter() - start

        return Run(dict, measure)

    return prepare


def cases(mib: int = 2048) -> list[Case]:
    by_size = {OURS: seconds(lambda: BatchOrder(ROWS, 256, shuffle=True)), "torch samplers": seconds(torch_batches)}
    mix = {OURS: seconds(mixed), "one dataset": by_size[OURS], "torch samplers": by_size["torch samplers"]}
    empty = {OURS: seconds(lambda: prefetch(loaded(), "cpu")), "without prefetch": seconds(loaded)}
    by_padded = {OURS: seconds(padded_order), BY_HAND: seconds(in_buckets)}
    by_tokens = {OURS: seconds(order_of), BY_HAND: seconds(in_turn)}
    cold = {"blocks of 512 rows": reading(512), "blocks of 128 rows": reading(128), "all rows": reading(True)}
    return [
        Case("an epoch of batches of 256 rows", "2 million rows", by_size, at_most=5),
        Case("an epoch of batches by tokens", "2 million rows, 8 ranks", by_tokens, at_most=5),
        Case("mean fill of a batch", "2 million rows, 8 ranks", told(mean_fill), unit="%", at_most=1),
        Case("largest distance from the mean", "2 million rows, 8 ranks", told(difference), unit="%", at_most=1),
        Case("an epoch of a mix", "3 datasets, 2 million rows", mix, at_most=5),
        Case("an epoch of empty steps under prefetch", "200,000 rows of 4 fields", empty, at_most=5),
        Case("an epoch of batches with padding", "2 million rows, 8 ranks", by_padded, at_most=5),
        Case("mean fill with padding", "2 million rows, 8 ranks", told(padded_fill), unit="%", at_most=1),
        Case("distance with padding", "2 million rows, 8 ranks", told(padded_difference), unit="%", at_most=1),
        Case("read a cold table", f"{READ} rows of 4 KiB", cold, lambda: cold_table(mib), at_most=9),
    ]


if __name__ == "__main__":
    main(__doc__, cases, mib=2048)
