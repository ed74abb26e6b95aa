"""`BatchOrder` in torchdata and Lightning: an interrupted run goes on with the rows that were left."""

from __future__ import annotations

import copy
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tensordict_lite import BatchOrder, DeviceDict, collate, prefetch

pytest.importorskip("torchdata")
pytest.importorskip("lightning")
import lightning
from torchdata.stateful_dataloader import StatefulDataLoader

TABLE = DeviceDict({"i": torch.arange(23), "x": torch.rand(23, 2)})
LENGTHS = [1 + i % 5 for i in range(23)]
WAYS: list[Any] = [{"size": 3}, {"tokens": 9, "lengths": LENGTHS}]


def order_of(way: Any, **options: Any) -> BatchOrder:
    return BatchOrder(TABLE.rows, **way, shuffle=True, **options)


def numbers(batches: Any, count: int | None = None) -> list[list[int]]:
    return [batch["i"].tolist() for batch in islice(batches, count)]


class TestTorchdata:
    @pytest.mark.parametrize("way", WAYS, ids=["size", "tokens"])
    @pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
    @pytest.mark.parametrize("wrapped", [False, True])
    def test_a_resumed_run_is_the_uninterrupted_one(
        self, way: Any, workers: int, persistent: bool, wrapped: bool
    ) -> None:
        def fresh() -> tuple[BatchOrder, Any]:
            order = order_of(way)
            loader = StatefulDataLoader(
                TABLE.rows, batch_sampler=order, num_workers=workers, collate_fn=collate, persistent_workers=persistent
            )
            return order, prefetch(loader, "cpu") if wrapped else loader

        plain = order_of(way)
        whole = [list(plain) for _ in plain.epochs(3)]
        order, loader = fresh()
        order.set_epoch(1)
        left = iter(loader)
        assert numbers(left, 4) == whole[1][:4]
        state = copy.deepcopy(loader.state_dict())
        order, loader = fresh()
        loader.load_state_dict(state)
        assert numbers(loader) == whole[1][4:] and order.epoch == 1
        order.set_epoch(2)
        assert numbers(loader) == whole[2]

    def test_another_number_of_ranks(self) -> None:
        taken: list[list[int]] = []
        states: list[Any] = []
        for rank in range(3):
            loader = StatefulDataLoader(TABLE.rows, batch_sampler=order_of({"size": 3}, rank=rank, world=3))
            left = iter(loader)
            taken += numbers(left, 2)
            states.append(loader.state_dict())
        alone = StatefulDataLoader(TABLE.rows, batch_sampler=order_of({"size": 3}))
        alone.load_state_dict(states[1])
        assert sorted(chain(*taken, *numbers(alone))) == list(range(23))


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.seen: list[tuple[int, list[int]]] = []

    def training_step(self, batch: Any, index: int) -> Any:
        self.seen.append((self.current_epoch, batch["i"].tolist()))
        return self.layer(batch["x"]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class TestLightning:
    def trainer(self, folder: Path) -> Any:
        save = lightning.pytorch.callbacks.ModelCheckpoint(folder, every_n_train_steps=5, save_top_k=-1)
        return lightning.Trainer(
            accelerator="cpu",
            max_epochs=3,
            logger=False,
            callbacks=[save],
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    @pytest.mark.parametrize("workers", [0, 1])
    def test_a_trainer_resumes_in_the_middle_of_an_epoch(self, workers: int, tmp_path: Path) -> None:
        def fit(module: Module, folder: str, checkpoint: Path | None = None) -> Module:
            order = order_of({"size": 3})
            loader = DataLoader(TABLE.rows, batch_sampler=order, num_workers=workers, collate_fn=collate)
            self.trainer(tmp_path / folder).fit(module, prefetch(loader, "cpu"), ckpt_path=checkpoint)
            return module

        whole = fit(Module(), "whole").seen
        plain = order_of({"size": 3})
        assert whole == [(epoch, rows) for epoch in plain.epochs(3) for rows in plain]
        (checkpoint,) = (tmp_path / "whole").glob("*step=10*")
        assert fit(Module(), "rest", checkpoint).seen == whole[10:]
