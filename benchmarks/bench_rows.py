"""What rows of a table cost: random rows, DataLoader, batches in one process and writes, as ratios of times.

    python benchmarks/bench_rows.py [--quick] [--rounds N] [--rows N] [--json PATH]

The table has 12 columns of mixed dtypes; the images are uint8[3, 64, 64]. "loop" is the loop over a plain dict of
tensors that a user writes by hand, with `index_select`. All processes compute with one thread. In every round the
contenders of a case are timed right after each other. A peer that is not installed is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.benchmark import Timer
from torch.utils.data import DataLoader, Dataset

from tensordict_lite import DeviceDict

sys.path.insert(0, str(Path(__file__).parent))  # a script has it there already; runpy has not
from common import in_turn, interleaved, parser, ratio, ratio_table, same, setting, write

try:
    from tensordict import TensorDict
except ImportError:
    TensorDict = None
try:
    from tianshou.data import Batch
except ImportError:
    Batch = None
try:
    from datasets import Dataset as HFDataset
except ImportError:
    HFDataset = None

OURS, LOOP = "ours", "loop"
SIZES = (256, 4096)
Fields = dict[str, Tensor]
Goal = tuple[str, float]
"""Ours takes at most this many times as long as the contender."""


def columns(count: int) -> Fields:
    """The table: numbers, flags, ids and small vectors."""
    g = torch.Generator().manual_seed(0)
    table: Fields = {f"float{i}": torch.rand(count, generator=g) for i in range(4)}
    table |= {f"id{i}": torch.randint(9, (count,), generator=g) for i in range(3)}
    table |= {"flag": torch.zeros(count, dtype=torch.bool), "point": torch.rand(count, 3, generator=g)}
    table |= {"state": torch.rand(count, 8, generator=g), "action": torch.rand(count, generator=g).double()}
    return table | {"bytes": torch.randint(256, (count, 16), dtype=torch.uint8, generator=g)}


def images(count: int) -> Fields:
    return {
        "image": torch.randint(256, (count, 3, 64, 64), dtype=torch.uint8),
        "label": torch.randint(9, (count,)),
    }


def structured(table: Fields) -> np.ndarray[Any, Any]:
    """A NumPy structured array of the columns."""
    arrays = {key: field.numpy() for key, field in table.items()}
    out = np.empty(len(next(iter(arrays.values()))), [(key, a.dtype, a.shape[1:]) for key, a in arrays.items()])
    for key, array in arrays.items():
        out[key] = array
    return out


def peers(table: Fields) -> dict[str, Any]:
    """The containers of the table, by the name of the contender."""
    count = len(next(iter(table.values())))
    found: dict[str, Any] = {OURS: DeviceDict(table), LOOP: table}
    if TensorDict is not None:
        found["TensorDict"] = TensorDict(table, batch_size=[count])
    if Batch is not None:
        found["Batch"] = Batch(table)
    found["NumPy structured"] = structured(table)
    if HFDataset is not None:
        found["HF datasets"] = HFDataset.from_dict({k: v.numpy() for k, v in table.items()}).with_format("torch")
    return found


GATHER = {
    OURS: "c.rows[next(index)]",
    LOOP: "i = next(index); {k: v.index_select(0, i) for k, v in c.items()}",
    "TensorDict": "c[next(index)]",
    "Batch": "c[next(index)]",
    "NumPy structured": "c[next(index).numpy()]",
    "HF datasets": "c[next(index).tolist()]",
}
EPOCH = {
    OURS: "for batch in c.rows.batches({size}, shuffle=True): pass",
    LOOP: "for i in torch.randperm({count}).split({size}):\n    {{k: v.index_select(0, i) for k, v in c.items()}}",
    "TensorDict": "for i in torch.randperm({count}).split({size}):\n    c[i]",
}
WRITE = {
    OURS: "c.rows[{at}] = part",
    LOOP: "for k in c: c[k][{at}] = part[k]",
    "TensorDict": "c[{at}] = part",
    "Batch": "c[{at}] = part",
}

LABELS = {
    "rows[t] = step": "1 row of 8 steps",
    "rows[a:b] = steps": "4 rows of 8 steps",
    "rows[indices] = rows": "256 rows",
}


class ByHand(Dataset[Any]):
    """The dataset that a user writes for a dict of tensors."""

    def __init__(self, table: Fields) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(next(iter(self.table.values())))

    def __getitems__(self, indices: list[int]) -> Fields:
        at = torch.tensor(indices)
        return {key: column.index_select(0, at) for key, column in self.table.items()}


class OfPeer(Dataset[Any]):
    """A container of a peer that takes a list of rows."""

    def __init__(self, container: Any, count: int) -> None:
        self.container, self.count = container, count

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, indices: list[int]) -> Any:
        return self.container[indices]


def itself(batch: Any) -> Any:
    return batch


def draws(count: int, size: int) -> Iterator[Tensor]:
    """New random indices again and again, so that no row stays in a cache."""
    many = [torch.randint(count, (size,)) for _ in range(64)]
    while True:
        yield from many


def gathers(table: Fields, size: int) -> dict[str, Timer]:
    count = len(next(iter(table.values())))
    containers = peers(table)
    index = torch.randint(count, (size,))
    by_hand = {key: column[index] for key, column in table.items()}
    assert same(dict(containers[OURS].rows[index]), by_hand)
    if sum(column.nbytes for column in by_hand.values()) > 1 << 20:
        containers.pop("HF datasets", None)  # up to ten seconds for each batch
    return {
        who: Timer(GATHER[who], globals={"c": container, "index": draws(count, size)})
        for who, container in containers.items()
    }


def epochs(table: Fields, size: int) -> dict[str, Timer]:
    count = len(next(iter(table.values())))
    known = {who: container for who, container in peers(table).items() if who in EPOCH}
    return {
        who: Timer(EPOCH[who].format(size=size, count=count), globals={"c": container, "torch": torch})
        for who, container in known.items()
    }


def writes(lead: tuple[int, ...], at: str, part: tuple[int, ...]) -> dict[str, Timer]:
    """Writes of a step into a rollout buffer: ``lead`` are the first dimensions of the buffer, ``part`` of the step."""
    row = {key: column[0] for key, column in columns(1).items()}
    step = {key: value.expand(*part, *value.shape).clone() for key, value in row.items()}
    buffer = {key: value.new_zeros((*lead, *value.shape)) for key, value in row.items()}
    known: dict[str, Any] = {OURS: (DeviceDict(buffer).clone(), DeviceDict(step)), LOOP: (buffer, step)}
    if TensorDict is not None:
        known["TensorDict"] = (TensorDict(buffer, lead[:1]).clone(), TensorDict(step, part[:1] if len(part) else []))
    if Batch is not None:
        known["Batch"] = (Batch({key: value.clone() for key, value in buffer.items()}), Batch(step))
    index = torch.randperm(lead[0])[: part[0] if part else 1]
    timers: dict[str, Timer] = {}
    for who, (container, given) in known.items():
        scope = {"c": container, "part": given, "index": index}
        statement = WRITE[who].format(at=at)
        exec(statement, scope)
        timers[who] = Timer(statement, globals=scope)
    assert same(dict(known[OURS][0]), known[LOOP][0])
    return timers


def loaders(table: Fields, size: int, workers: int) -> dict[str, Callable[[], Any]]:
    """A function for each contender that returns a DataLoader in random order."""
    count = len(next(iter(table.values())))
    order = torch.randperm(count)[: 400 * min(size, 1024)].tolist()
    containers = peers(table)
    containers.pop("NumPy structured")
    if size > 256:
        containers.pop("HF datasets", None)  # a second for each batch
    made: dict[str, Callable[[], Any]] = {}
    for who, container in containers.items():
        dataset = container.rows if who == OURS else ByHand(container) if who == LOOP else OfPeer(container, count)
        options: dict[str, Any] = {} if who == OURS else {"collate_fn": itself}
        made[who] = lambda dataset=dataset, options=options: DataLoader(
            dataset, size, sampler=order, num_workers=workers, **options
        )
    return made


def loader_seconds(make: Callable[[], Any], batches: int) -> float:
    """The time of a batch, without the start of the workers."""
    iterator = iter(make())
    for _ in islice(iterator, 4):
        pass
    start = perf_counter()
    taken = sum(1 for _ in islice(iterator, batches))
    return (perf_counter() - start) / taken


def line(
    operation: str, size: int | str, seconds: Mapping[str, list[float]], goals: tuple[Goal, ...]
) -> dict[str, Any]:
    """Each contender as a multiple of ours; ``met`` is about the first goal's contender."""
    ratios = {who: ratio(times, seconds[OURS]) for who, times in seconds.items()}
    met = {f"<= {limit:g} x {who}": ratios[who]["median"] >= 1 / limit for who, limit in goals if who in ratios}
    return {
        "operation": operation,
        "fields": LABELS.get(operation, f"{size} rows"),
        "median_seconds": {who: median(times) for who, times in seconds.items()},
        "ratios": {OURS: ratios},
        "met": next(iter(met.values()), None),
        "goals": met,
    }


def main() -> None:
    options = parser("Rows of a table beside a loop over tensors and other containers, as ratios.")
    options.add_argument("--rows", type=int, default=2_000_000, help="rows of the table (2,000,000)")
    args = options.parse_args()
    torch.set_num_threads(1)
    measured = setting(tensordict=TensorDict, tianshou=Batch, datasets=HFDataset)
    print(", ".join(f"{what} {name or 'is not installed'}" for what, name in measured.items()), flush=True)

    table, pictures = columns(args.rows), images(max(args.rows // 400, 2 * max(SIZES)))
    goals: dict[tuple[str, Any], tuple[Goal, ...]] = {}
    cases: dict[tuple[str, Any], dict[str, Timer]] = {}
    for size in SIZES:
        limit = 1.3 if size == 256 else 1.15
        cases["rows[index]", size] = gathers(table, size)
        goals["rows[index]", size] = ((LOOP, limit), ("TensorDict", 0.6))
        cases["rows[index], images", size] = gathers(pictures, size)
        goals["rows[index], images", size] = ((LOOP, limit), ("TensorDict", 0.6))
    cases["rows[index], images", 32] = gathers(pictures, 32)
    goals["rows[index], images", 32] = ((LOOP, 1.3), ("TensorDict", 0.6))
    part = {key: column[:100_000] for key, column in table.items()}
    for size in SIZES:
        cases["batches, shuffled", size] = epochs(part, size)
        goals["batches, shuffled", size] = ((LOOP, 1.25),)
    for name, lead, at, shape in (
        ("rows[t] = step", (128, 8), "5", (8,)),
        ("rows[a:b] = steps", (128, 8), "4:8", (4, 8)),
        ("rows[indices] = rows", (4096,), "index", (256,)),
    ):
        cases[name, "12"] = writes(lead, at, shape)
        goals[name, "12"] = ((LOOP, 2), ("TensorDict", 1))
    lines = [line(*case, times, goals[case]) for case, times in interleaved(cases, args.rounds).items()]

    for workers in (0, 1, 2):
        for size in SIZES:
            made = loaders(table, size, workers)
            batches = 100 if size == 256 else 30
            seconds: dict[str, list[float]] = {who: [] for who in made}
            for i in range(args.rounds):
                for who in in_turn(made, i):
                    seconds[who].append(loader_seconds(made[who], batches))
            limit = 0.5 if workers else 1 / 0.85
            lines.append(line(f"DataLoader, {workers} workers", size, seconds, ((LOOP, limit), ("Batch", 1))))

    shown = [{**line, "ratios": line["ratios"][OURS]} for line in lines]
    print(ratio_table(shown, "it / ours", "goal met", LOOP))
    write(
        args.json,
        {**measured, "device": "cpu", "gpu": None, "rounds": args.rounds, "rows": args.rows, "results": lines},
    )


if __name__ == "__main__":
    main()
