"""Read shuffled batches from a table of two million rows in memory, beside a hand-written dataset.

    python examples/rows.py [--rows 2000000] [--batches 100] [--workers 2]

`table.rows` is the dataset. It fetches a whole batch with one `index_select` per field and makes no samples. The
hand-written dataset makes one dict per row, and torch's `default_collate` stacks them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tensordict_lite import DeviceDict

BATCH = 1024


def make_table(rows: int) -> DeviceDict:
    """Trips of taxis: eight columns, 52 bytes a row."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(0, 86_400, (rows,), generator=generator)
    distance = torch.rand(rows, generator=generator) * 20
    return DeviceDict(
        {
            "id": torch.arange(rows),
            "start": start,
            "end": start + (distance * 180).long(),
            "from": torch.rand(rows, 2, generator=generator),
            "to": torch.rand(rows, 2, generator=generator),
            "distance": distance,
            "fare": 3 + 2 * distance + torch.rand(rows, generator=generator),
            "people": torch.randint(1, 6, (rows,), generator=generator, dtype=torch.int32),
        }
    )


class HandWritten(Dataset[dict[str, Tensor]]):
    def __init__(self, columns: dict[str, Tensor]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def rows_per_second(loader: Iterable[Any], batches: int) -> float:
    """From the first batch on, so that the start of the workers does not count."""
    iterator = iter(loader)
    next(iterator)
    start = time.perf_counter()
    seen = sum(len(batch["id"]) for batch in islice(iterator, batches - 1))
    return seen / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description="Shuffled batches of a table in memory.")
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument(
        "--batches", type=int, default=100, help="batches that each loader reads (default: %(default)s)"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    table = make_table(options.rows)
    print(table)
    how = {"batch_size": BATCH, "shuffle": True, "num_workers": options.workers}
    loaders = {
        "table.rows": DataLoader(table.rows, **how),
        "hand-written dataset": DataLoader(HandWritten(dict(table)), **how),
    }
    speeds: dict[str, list[float]] = {name: [] for name in loaders}
    for _ in range(options.rounds):  # one after the other in each round
        for name, loader in loaders.items():
            speeds[name].append(rows_per_second(loader, options.batches))
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    for name, speed in medians.items():
        print(f"{name}: {speed:,.0f} rows a second")
    fast, slow = medians.values()
    print(f"ratio {fast / slow:.0f}")

    whole = {name: column.double().mean().item() for name, column in table.select("fare", "people").items()}
    print("mean of the columns: " + ", ".join(f"{name} {mean:.2f}" for name, mean in whole.items()))
    for people, trips in table.select("people", "fare").rows.group_by("people").items():
        print(f"  {people} people: {len(trips.rows)} trips, mean fare {trips['fare'].mean():.2f}")


if __name__ == "__main__":
    main()
