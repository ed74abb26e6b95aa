"""What rows of a table cost: random rows, DataLoader, batches in one process and writes, as ratios of times.

    python benchmarks/bench_rows.py [--quick] [--rounds N] [--rows N] [--only TEXT] [--json PATH]

The table has 12 columns of mixed dtypes; the images are uint8[3, 64, 64]. "loop" is the loop over a plain dict of
tensors that a user writes by hand, with `index_select`. All processes compute with one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any

import numpy as np
import torch
from containers import BATCH, Batch, TensorDict, images, length, selected
from harness import OURS, PEER, Case, Fields, Prepare, Run, main, optional, same_values, statement, statements
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tensordict_lite import DeviceDict

HFDataset = optional("datasets", "Dataset")

LOOP, NUMPY, ARROW = "loop", "NumPy structured", "HF datasets"


def columns(count: int) -> Fields:
    """The table: numbers, flags, ids and small vectors."""
    g = torch.Generator().manual_seed(0)
    table: Fields = {f"float{i}": torch.rand(count, generator=g) for i in range(4)}
    table |= {f"id{i}": torch.randint(9, (count,), generator=g) for i in range(3)}
    table |= {"flag": torch.zeros(count, dtype=torch.bool), "point": torch.rand(count, 3, generator=g)}
    table |= {"state": torch.rand(count, 8, generator=g), "action": torch.rand(count, generator=g).double()}
    return table | {"bytes": torch.randint(256, (count, 16), dtype=torch.uint8, generator=g)}


def structured(table: Fields) -> np.ndarray[Any, Any]:
    """A NumPy structured array of the columns."""
    arrays = {key: field.numpy() for key, field in table.items()}
    out = np.empty(length(table), [(key, a.dtype, a.shape[1:]) for key, a in arrays.items()])
    for key, array in arrays.items():
        out[key] = array
    return out


def as_dataset(table: Fields) -> Any:
    return HFDataset.from_dict({key: field.numpy() for key, field in table.items()}).with_format("torch")


CONTAINERS: dict[str, Callable[[Fields], Any]] = {
    OURS: DeviceDict,
    LOOP: dict,
    PEER: lambda table: TensorDict(table, batch_size=[length(table)]),
    BATCH: Batch,
    NUMPY: structured,
    ARROW: as_dataset,
}
# The code of each contender for its container ``x``.
GATHER = {
    OURS: "x.rows[{i}]",
    LOOP: "{{k: v.index_select(0, {i}) for k, v in x.items()}}",
    PEER: "x[{i}]",
    BATCH: "x[{i}]",
    NUMPY: "x[({i}).numpy()]",
    ARROW: "x[({i}).tolist()]",
}
EPOCH = {
    OURS: "for batch in x.rows.batches({size}, shuffle=True): pass",
    LOOP: "for i in torch.randperm({count}).split({size}): batch = {{k: v.index_select(0, i) for k, v in x.items()}}",
    PEER: "for i in torch.randperm({count}).split({size}): batch = x[i]",
}
VIEWS = {
    "`rows[a:b]`": {
        OURS: "x.rows[8:16]",
        LOOP: "{k: v[8:16] for k, v in x.items()}",
        PEER: "x[8:16]",
        BATCH: "x[8:16]",
    },
    "`for row in rows`": {
        OURS: "list(x.rows)",
        LOOP: "[{k: v[i] for k, v in x.items()} for i in range(64)]",
        PEER: "list(x)",
    },
}
WRITE = {
    OURS: "c.rows[{at}] = part",
    LOOP: "for k in c: c[k][{at}] = part[k]",
    PEER: "c[{at}] = part",
    BATCH: "c[{at}] = part",
}


def draws(count: int, size: int) -> Iterator[Tensor]:
    """New random indices again and again, so that no row stays in a cache."""
    many = [torch.randint(count, (size,)) for _ in range(64)]
    while True:
        yield from many


def gather_case(operation: str, table: Fields, size: int, *without: str) -> Case:
    """Random rows. The code takes another index each time; the result is that of one index for all."""
    index = torch.randint(length(table), (size,))

    def contender(who: str) -> Prepare:
        timed, once = (GATHER[who].format(i=i) for i in ("next(draws)", "index"))
        names: dict[str, Any] = {"draws": draws(length(table), size), "selected": selected, "table": table}
        return statement(timed, CONTAINERS[who], f"selected({once}, table)", index=index, **names)

    contenders = {who: contender(who) for who in GATHER if who not in without}
    return Case(operation, f"{size} rows", contenders, lambda: table, same_values)


def epoch_case(table: Fields, size: int) -> Case:
    """All batches of an epoch. The result is the keys of the last batch, as the order is random."""
    codes = {who: code.format(size=size, count=length(table)) for who, code in EPOCH.items()}
    contenders = statements(codes, CONTAINERS, result="sorted(batch.keys())")
    return Case("batches, shuffled", f"{size} rows", contenders, lambda: table)


# By operation: the data, the code for the rows, the first dimensions of the buffer, and those of the steps.
WRITES = {
    "`rows[t] = step`": ("1 row of 8 steps", "5", (128, 8), (8,)),
    "`rows[a:b] = steps`": ("4 rows of 8 steps", "4:8", (128, 8), (4, 8)),
    "`rows[indices] = rows`": ("256 rows", "index", (4096,), (256,)),
}


def write_case(operation: str) -> Case:
    """A write of a step into a rollout buffer."""
    fields, at, lead, part = WRITES[operation]
    row = {key: column[0] for key, column in columns(1).items()}
    steps = {key: value.expand(*part, *value.shape).clone() for key, value in row.items()}

    def contender(who: str) -> Prepare:
        def make(_: Any) -> tuple[Any, Any]:
            buffer = {key: value.new_zeros((*lead, *value.shape)) for key, value in row.items()}
            return CONTAINERS[who](buffer), CONTAINERS[who](steps)

        return statement(WRITE[who].format(at=at), make, "c", "c, part = x", index=torch.arange(part[0]) * 3)

    return Case(operation, fields, {who: contender(who) for who in WRITE})


# --- DataLoader ---


@dataclass(frozen=True)
class Gathered(Dataset[Any]):
    """A dataset that a user writes for a container."""

    gather: Callable[[list[int]], Any]

    def __getitems__(self, indices: list[int]) -> Any:
        return self.gather(indices)


def by_hand(table: Fields, indices: list[int]) -> Fields:
    at = torch.tensor(indices)
    return {key: column.index_select(0, at) for key, column in table.items()}


def dataset(who: str, table: Fields) -> Any:
    container = CONTAINERS[who](table)
    if who == OURS:
        return container.rows
    return Gathered(partial(by_hand, table) if who == LOOP else container.__getitem__)


def itself(batch: Any) -> Any:
    return batch


def loading(who: str, order: list[int], size: int, workers: int) -> Prepare:
    """The seconds of a batch, without the start of the workers."""
    options: dict[str, Any] = {} if who == OURS else {"collate_fn": itself}

    def prepare(table: Fields) -> Run:
        loader = DataLoader(dataset(who, table), size, sampler=order, num_workers=workers, **options)

        def measure() -> float:
            iterator = iter(loader)
            for _ in islice(iterator, 4):
                pass
            start = perf_counter()
            taken = sum(1 for _ in islice(iterator, 100 if size == 256 else 30))
            return (perf_counter() - start) / taken

        return Run(lambda: selected(next(iter(loader)), table), measure)

    return prepare


def loader_case(table: Fields, size: int, workers: int) -> Case:
    order = torch.randperm(length(table))[: 400 * min(size, 1024)].tolist()
    whos = [OURS, LOOP, PEER, BATCH, *([ARROW] if size == 256 else [])]  # a larger batch of these takes a second
    contenders = {who: loading(who, order, size, workers) for who in whos}
    return Case(f"DataLoader, {workers} workers", f"{size} rows", contenders, lambda: table, same_values)


def cases(rows: int = 2_000_000) -> list[Case]:
    sizes = (256, 4096)
    table, pictures = columns(rows), images(max(rows // 400, 2 * max(sizes)))
    part = {key: column[:100_000] for key, column in table.items()}
    found: list[Case] = []
    for size in sizes:
        found.append(gather_case("`rows[index]`", table, size))
        found.append(gather_case("`rows[index]`, images", pictures, size, ARROW))  # it takes seconds
    return [
        *found,
        gather_case("`rows[index]`, images", pictures, 32),
        *(Case(name, "64 rows", statements(codes, CONTAINERS), lambda: columns(64)) for name, codes in VIEWS.items()),
        *(epoch_case(part, size) for size in sizes),
        *(write_case(operation) for operation in WRITES),
        *(loader_case(table, size, workers) for workers in (0, 1, 2) for size in sizes),
    ]


if __name__ == "__main__":
    main(__doc__, cases, ["tensordict", "tianshou", "datasets"], rows=2_000_000)
