"""The page on order: a random transform that is seeded with the epoch and the row repeats after a resumption."""

from __future__ import annotations

import pickle
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tensordict_lite import BatchOrder, DeviceDict, collate, prefetch

EPOCHS = 3


class Noisy(Dataset[Any]):
    def __init__(self, order: BatchOrder) -> None:
        self.order = order

    def __len__(self) -> int:
        return 12

    def __getitem__(self, row: int) -> Any:
        seeded = torch.Generator().manual_seed(hash((self.order.epoch, row)))
        return {"row": row, "noise": torch.rand(2, generator=seeded)}


def fresh(workers: int) -> Any:
    order = BatchOrder(12, 3, shuffle=True)
    return prefetch(DataLoader(Noisy(order), batch_sampler=order, num_workers=workers, collate_fn=collate), "cpu")


@pytest.mark.parametrize("workers", [0, 2])
def test_the_numbers_repeat(workers: int) -> None:
    expected: list[list[DeviceDict]] = [list(batches) for batches in [fresh(0)] for _ in range(EPOCHS)]
    noise = torch.cat([batch["noise"].flatten() for epoch in expected for batch in epoch])
    assert len(noise.unique()) > 0.99 * noise.numel(), "other numbers for each row in each epoch"
    batches = fresh(workers)
    assert list(batches) == expected[0] and list(islice(batches, 2)) == expected[1][:2]
    state = batches.state_dict()
    batches = fresh(workers)
    batches.load_state_dict(state)
    assert [list(batches), list(batches)] == [expected[1][2:], expected[2]]


def test_a_worker_that_is_spawned_gets_the_epoch() -> None:
    batches = fresh(0)
    batches.set_epoch(2)
    next(iter(batches))
    assert pickle.loads(pickle.dumps(batches.dataset)).order.epoch == 2
