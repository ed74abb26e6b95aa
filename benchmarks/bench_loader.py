"""Measure a DataLoader with samples of many fields: seconds per batch, and file descriptors.

    python benchmarks/bench_loader.py [--quick] [--rounds N] [--only TEXT] [--json PATH]

The samples are in memory and nothing reads the batches, so the time is that of collating and sending. All processes
use one thread.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from time import perf_counter, sleep
from typing import Any

import torch
from harness import DICT, OURS, PEER, Case, Fields, Prepare, Run, main, optional
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from tensordict_lite import DeviceDict, collate
from tensordict_lite._memory.buffer import BY_VALUE
from tensordict_lite._memory.layout import SMALL

TensorDict = optional("tensordict", "TensorDict")

ROWS = 32  # rows of a batch
WARM = 5  # batches taken before a measurement: more than the workers prefetch
SECONDS = 0.3  # seconds of one measurement
HELD = 64  # batches to count file descriptors


@dataclass(frozen=True)
class Size:
    """A number of fields with one dtype and shape."""

    count: int
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def keys(self) -> list[str]:
        return [sys.intern(f"k{i}") for i in range(self.count)]  # interned, as literals are

    def samples(self, count: int) -> list[Fields]:
        """A number of samples. Every call returns the same samples."""
        generator = torch.Generator().manual_seed(0)

        def draw() -> Tensor:
            return torch.randint(256, self.shape, dtype=torch.uint8, generator=generator).to(self.dtype)

        return [{key: draw() for key in self.keys} for _ in range(count)]


# --- loaders ---


@dataclass(frozen=True)
class Contender:
    """``sample`` makes a sample of the dataset from the fields. ``collate`` makes a batch of samples."""

    sample: Callable[[Fields], Any]
    collate: Callable[[list[Any]], Any]
    fields: Callable[[Any, Size], Any] = lambda batch, size: batch
    """The fields of a batch, as a mapping."""


@dataclass(frozen=True)
class Samples(Dataset[Any]):
    """A dataset in memory. Each process makes the samples when it first needs them."""

    size: Size
    sample: Callable[[Fields], Any]

    @cached_property
    def made(self) -> list[Any]:
        return [self.sample(fields) for fields in self.size.samples(2 * ROWS)]

    def __getitem__(self, i: int) -> Any:
        return self.made[i]


def as_peer(fields: Fields) -> Any:
    return TensorDict(fields, batch_size=[])


def consolidated(samples: list[Any]) -> Any:
    batch: Any = torch.stack(samples)
    return batch.consolidate(share_memory=True)


def joined(fields: Fields) -> Tensor:
    """One tensor with all bytes of the sample: the minimum work of a loader."""
    return torch.cat([field.flatten() for field in fields.values()])


def split(batch: Tensor, size: Size) -> Fields:
    return dict(zip(size.keys, batch.unflatten(1, (size.count, *size.shape)).unbind(1), strict=True))


CONTENDERS = {
    OURS: Contender(dict, collate),
    DICT: Contender(dict, default_collate),
    PEER: Contender(as_peer, torch.stack),
    "TensorDict consolidated": Contender(as_peer, consolidated),
    "one tensor": Contender(joined, default_collate, split),
}
LOADED = {
    "8 x 16 float32": Size(8, (16,)),
    "8 x 64 float32": Size(8, (64,)),
    "8 x 256 float32": Size(8, (256,)),
    "40 x 16 float32": Size(40, (16,)),
    "200 x 4 float32": Size(200, (4,)),
    "200 x 128 float32": Size(200, (128,)),  # too large to go by value, and every field too small for a segment
    "8 x 4096 float32": Size(8, (4096,)),
    "4 images": Size(4, (3, 224, 224), torch.uint8),
}


def batches_of(one: Contender, size: Size, workers: int) -> Iterator[Any]:
    """Endless batches, so that the workers live as long as the iterator."""
    turns: Any = cycle([range(ROWS), range(ROWS, 2 * ROWS)])
    samples = Samples(size, one.sample)
    return iter(DataLoader(samples, batch_sampler=turns, num_workers=workers, collate_fn=one.collate))


def per_batch(batches: Iterator[Any]) -> float:
    """The mean seconds per batch. Each batch is dropped before the next is taken."""
    for _ in range(WARM):
        next(batches)
    start, seconds, count = perf_counter(), 0.0, 0
    while seconds < SECONDS or count < WARM:
        next(batches)
        count += 1
        seconds = perf_counter() - start
    return seconds / count


def loading(one: Contender, size: Size, workers: int) -> Prepare:
    """The seconds per batch of a DataLoader. The first batch must be equal to that of the others."""

    def prepare(_: Any) -> Run:
        batches = batches_of(one, size, workers)

        def first() -> Any:
            batch = next(batches)
            if isinstance(batch, DeviceDict):
                large = bool(workers) and batch.nbytes > BY_VALUE
                assert all(field.is_shared() == (large and field.nbytes > SMALL) for field in batch.values())
            return one.fields(batch, size)

        def measure() -> float:
            seconds = per_batch(batches)
            sleep(2 * workers * seconds)  # the workers prefetch the next batches, and then they wait
            return seconds

        return Run(first, measure)

    return prepare


def descriptors(one: Contender, size: Size) -> Prepare:
    """The number of file descriptors that a process adds when it holds batches of a worker."""

    def measure(batches: Iterator[Any]) -> float:
        gc.collect()  # batches in reference cycles keep file descriptors too
        before = len(os.listdir("/dev/fd"))
        held = [next(batches) for _ in range(HELD)]
        growth = len(os.listdir("/dev/fd")) - before
        del held
        return growth

    def prepare(_: Any) -> Run:
        batches = batches_of(one, size, 1)
        return Run(lambda: one.fields(next(batches), size), lambda: measure(batches))

    return prepare


def cases() -> list[Case]:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a batch of 200 fields needs 200 if it is not packed
    found = [
        Case(
            f"load, {workers} worker{'' if workers == 1 else 's'}",
            name,
            {who: loading(one, size, workers) for who, one in CONTENDERS.items()},
        )
        for workers in (0, 1, 2)
        for name, size in LOADED.items()
    ]
    whos = {who: descriptors(one, Size(50, (16,))) for who, one in CONTENDERS.items()}
    return [*found, Case(f"hold {HELD} batches", "50 x 16 float32", whos, unit="file descriptors", at_most=1)]


if __name__ == "__main__":
    main(__doc__, cases, ["tensordict"])
