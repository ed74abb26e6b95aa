"""The same program as `rows.py`, with plain dicts."""

from __future__ import annotations

import time
from itertools import islice

import torch
from rows import BATCH, loss_of, main, trips
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

Batch = dict[str, Tensor]


class Table(Dataset[Batch]):
    def __init__(self, columns: Batch) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> Batch:
        return {name: column[index] for name, column in self.columns.items()}

    def __getitems__(self, indices: list[int]) -> Batch:
        index = torch.tensor(indices)
        return {name: column.index_select(0, index) for name, column in self.columns.items()}


def as_it_is(batch: Batch) -> Batch:
    return batch


def train(model: nn.Module, columns: Batch, batches: int, workers: int) -> float:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    loader = DataLoader(Table(columns), BATCH, shuffle=True, num_workers=workers, collate_fn=as_it_is)
    loss = torch.zeros(())
    for batch in islice(loader, batches):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def fares(columns: Batch) -> dict[int, float]:
    people, fare = columns["people"], columns["fare"]
    distinct, counts = people.unique(return_counts=True)
    groups = fare[people.argsort(stable=True)].split(counts.tolist())
    return {key: group.mean().item() for key, group in zip(distinct.tolist(), groups, strict=True)}


def run(rows: int, batches: int, workers: int) -> tuple[float, dict[int, float]]:
    torch.manual_seed(0)
    columns = trips(rows)
    start = time.perf_counter()
    loss = train(nn.Linear(7, 1), columns, batches, workers)
    print(f"trained on {batches * BATCH / (time.perf_counter() - start):,.0f} rows a second")
    return loss, fares(columns)


if __name__ == "__main__":
    main(run)
