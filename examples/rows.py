"""Train on shuffled batches of a table of two million rows in memory. Then group the rows.

    python examples/rows.py [--rows 2000000] [--batches 300] [--workers 2]

`table.rows` is the dataset of the DataLoader. It fetches a whole batch with one `index_select` per field, and a worker
sends the batch as one buffer. The program learns the fare of a trip.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tensordict_lite import DeviceDict

BATCH = 1024


def trips(rows: int) -> dict[str, Tensor]:
    """Trips of taxis: eight columns, 52 bytes a row."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(0, 86_400, (rows,), generator=generator)
    distance = torch.rand(rows, generator=generator) * 20
    return {
        "id": torch.arange(rows),
        "start": start,
        "end": start + (distance * 180).long(),
        "from": torch.rand(rows, 2, generator=generator),
        "to": torch.rand(rows, 2, generator=generator),
        "distance": distance,
        "fare": 3 + 2 * distance + torch.rand(rows, generator=generator),
        "people": torch.randint(1, 6, (rows,), generator=generator, dtype=torch.int32),
    }


def network_input(batch: Mapping[str, Tensor]) -> Tensor:
    columns = [batch["distance"] / 20, batch["people"] / 5, (batch["end"] - batch["start"]) / 3600]
    return torch.cat([torch.stack(columns, dim=1), batch["from"], batch["to"]], dim=1)


def loss_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return F.mse_loss(model(network_input(batch)).squeeze(1), batch["fare"])


def train(model: nn.Module, table: DeviceDict, batches: int, workers: int) -> float:
    """Train ``model``. Returns the loss of the last batch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    loader = DataLoader(table.rows, BATCH, shuffle=True, num_workers=workers)
    loss = torch.zeros(())
    for batch in islice(loader, batches):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def fares(table: DeviceDict) -> dict[int, float]:
    """Return the mean fare for each number of people."""
    groups = table.select("people", "fare").rows.group_by("people")
    return {people: group["fare"].mean().item() for people, group in groups.items()}


def run(rows: int, batches: int, workers: int) -> tuple[float, dict[int, float]]:
    """Run the program. Returns the last loss and the mean fares."""
    torch.manual_seed(0)
    table = DeviceDict(trips(rows))
    print(table)
    start = time.perf_counter()
    loss = train(nn.Linear(7, 1), table, batches, workers)
    print(f"trained on {batches * BATCH / (time.perf_counter() - start):,.0f} rows a second")
    return loss, fares(table)


def main(run: Callable[..., tuple[float, dict[int, float]]] = run) -> None:
    parser = argparse.ArgumentParser(description="Shuffled batches of a table in memory.")
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--batches", type=int, default=300, help="of training (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2)
    loss, means = run(**vars(parser.parse_args()))
    print(f"loss {loss:.2f}")
    for people, fare in means.items():
        print(f"  {people} people: mean fare {fare:.2f}")


if __name__ == "__main__":
    main()
