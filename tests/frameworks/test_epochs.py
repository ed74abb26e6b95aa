"""`BatchOrder` in loops of frameworks: epochs advance, and a run that goes on skips and repeats nothing."""

from __future__ import annotations

import json
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.utils.data import DataLoader

from tensordict_lite import BatchOrder, DeviceDict, collate, prefetch

pytest.importorskip("lightning")
pytest.importorskip("accelerate")
pytest.importorskip("transformers")
import lightning
from accelerate import Accelerator, skip_first_batches
from accelerate.state import AcceleratorState, GradientState, PartialState
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import Trainer, TrainingArguments

TABLE = DeviceDict({"i": torch.arange(23), "x": torch.rand(23, 2, generator=torch.Generator().manual_seed(0))})
SIZE, STEPS, EPOCHS = 3, 8, 3


def loader_of(workers: int = 0, **options: Any) -> tuple[BatchOrder, Any]:
    order = BatchOrder(TABLE.rows, SIZE, shuffle=True, **options)
    return order, DataLoader(TABLE.rows, batch_sampler=order, num_workers=workers, collate_fn=collate)


def whole(epochs: int = EPOCHS, **options: Any) -> list[list[list[int]]]:
    order, _ = loader_of(**options)
    return [list(order) for _ in order.epochs(epochs)]


def numbers(batches: Any, count: int | None = None) -> list[list[int]]:
    return [batch["i"].cpu().tolist() for batch in islice(batches, count)]


@pytest.fixture(params=["cpu", "sim:0"])
def where(request: pytest.FixtureRequest, streams: Any) -> str:
    """With streams of the simulated device, so that batches are fetched ahead."""
    return str(request.param)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(2, 1)
        self.seen: list[tuple[int, list[int], float]] = []

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.layer(batch["x"]).square().mean()
        self.seen.append((self.current_epoch, batch["i"].tolist(), loss.item()))
        return loss

    def predict_step(self, batch: Any, index: int) -> Any:
        return batch["i"]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def lightning_trainer(*callbacks: Any, **options: Any) -> Any:
    quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(accelerator="cpu", max_epochs=EPOCHS, callbacks=[*callbacks], **quiet, **options)


class TestLightning:
    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("when", ["within an epoch", "after the last batch", "at the end of an epoch"])
    def test_a_fit_goes_on(self, workers: int, when: str, tmp_path: Path) -> None:
        steps = {"within an epoch": 5, "after the last batch": STEPS, "at the end of an epoch": None}[when]
        save = ModelCheckpoint(tmp_path, every_n_train_steps=steps, save_top_k=-1)
        module = Module()
        lightning_trainer(save).fit(module, prefetch(loader_of(workers)[1], "cpu"))
        expected = [(epoch, rows) for epoch, batches in enumerate(whole()) for rows in batches]
        assert [(epoch, rows) for epoch, rows, _ in module.seen] == expected
        for checkpoint in sorted(tmp_path.glob("*.ckpt")):
            step = int(checkpoint.stem.split("step=")[1])
            rest = Module()
            lightning_trainer(enable_checkpointing=False).fit(
                rest, prefetch(loader_of(workers)[1], "cpu"), ckpt_path=checkpoint
            )
            assert rest.seen == module.seen[step:], f"from step {step}, with the same losses"

    def test_a_plain_loader(self) -> None:
        module = Module()
        lightning_trainer(enable_checkpointing=False).fit(module, loader_of(1)[1])
        assert [rows for _, rows, _ in module.seen] == [*chain(*whole())]

    def test_predict(self) -> None:
        with pytest.warns(UserWarning, match="custom batch sampler"):
            predicted: Any = lightning_trainer(enable_checkpointing=False).predict(
                Module(), loader_of(drop_last=True)[1]
            )
        assert [rows.tolist() for rows in predicted] == whole(drop_last=True)[0]


class TestFabric:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_run_goes_on(self, where: str, workers: int) -> None:
        def fresh() -> tuple[BatchOrder, Any]:
            order, loader = loader_of(workers)
            return order, prefetch(fabric.setup_dataloaders(loader), where)

        fabric = lightning.Fabric(accelerator="cpu", devices=1)
        plain = fabric.setup_dataloaders(loader_of(workers)[1])
        assert [numbers(plain), numbers(plain)] == whole()[:2]
        for taken in (3, STEPS):
            order, batches = fresh()
            assert numbers(batches) == whole()[0] and numbers(batches, taken) == whole()[1][:taken]
            state = json.loads(json.dumps(batches.state_dict()))
            order, batches = fresh()
            batches.load_state_dict(state)
            rest = [numbers(batches) for _ in order.epochs(EPOCHS)]
            assert rest == ([whole()[1][3:], whole()[2]] if taken == 3 else [whole()[2]])


class TestAccelerate:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_run_goes_on(self, where: str, workers: int, tmp_path: Path) -> None:
        def fresh(skip: int = 0) -> tuple[BatchOrder, Any, Any]:
            order, loader = loader_of(workers)
            prepared = accelerator.prepare(loader)
            return order, prepared, prefetch(skip_first_batches(prepared, skip) if skip else prepared, where)

        PartialState._reset_state()
        try:
            accelerator = Accelerator(cpu=True)
            _, prepared, _ = fresh()
            assert [numbers(prepared), numbers(prepared)] == whole()[:2]
            for taken in (3, STEPS):
                order, prepared, batches = fresh()
                assert numbers(batches) == whole()[0] and numbers(batches, taken) == whole()[1][:taken]
                state = json.loads(json.dumps(batches.state_dict()))
                order, prepared, batches = fresh()
                batches.load_state_dict(state)
                assert prepared.iteration == order.epoch == (1 if taken == 3 else 2)
                rest = [numbers(batches) for _ in order.epochs(EPOCHS)]
                assert rest == ([whole()[1][3:], whole()[2]] if taken == 3 else [whole()[2]])
                order, _, batches = fresh()
                accelerator.register_for_checkpointing(batches)
                batches.load_state_dict(state)
                accelerator.save_state(str(tmp_path / str(taken)))
                batches.set_epoch(0)
                accelerator.load_state(str(tmp_path / str(taken)))
                assert numbers(batches) == rest[0]
                accelerator._custom_objects.clear()
            order, _, skipping = fresh(skip=2)
            assert numbers(skipping, 3) == whole()[0][2:5] and skipping.state_dict() == order.state_dict(5)
            stream = prefetch(accelerator.prepare(DataLoader(TABLE.rows, 3, collate_fn=collate)), where)
            assert len(numbers(stream)) == 8 and not hasattr(stream, "state_dict"), "a loader without an order"
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()

    def test_on_two_ranks(self, tmp_path: Path) -> None:
        on_ranks(two_ranks, tmp_path)
        first, state = json.loads((tmp_path / "first.json").read_text())
        order, _ = loader_of()
        order.load_state_dict(state)
        assert sorted(chain(*first, *order)) == list(range(23)), "and on one rank"


def two_ranks(rank: int, folder: Path) -> None:
    accelerator = Accelerator(cpu=True)

    def fresh() -> tuple[BatchOrder, Any]:
        order, loader = loader_of()
        return order, prefetch(accelerator.prepare(loader), "cpu")

    expected = whole()
    _, batches = fresh()
    assert numbers(batches, 2) == expected[0][rank:4:2]
    state = json.loads(json.dumps(batches.state_dict()))
    assert state["position"] == 4 * SIZE, "accelerate gives the batches to the ranks in turn"
    if rank == 0:
        (folder / "first.json").write_text(json.dumps((expected[0][:4], state)))
    _, batches = fresh()
    batches.load_state_dict(state)
    assert numbers(batches, 1) == [expected[0][4 + rank]]
    rest = numbers(batches)
    assert rest[:3] == expected[1][rank:6:2], "the next epoch"
    assert batches.state_dict()["position"] == 23


class Watching(Trainer):
    """Trainer over a `BatchOrder`."""

    def __init__(self, wrapped: str, folder: Path) -> None:
        super().__init__(
            model=Regression(),
            args=TrainingArguments(
                output_dir=str(folder),
                num_train_epochs=EPOCHS,
                save_strategy="steps",
                save_steps=4,
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
            ),
        )
        self.wrapped = wrapped
        self.seen: list[tuple[list[int], float]] = []

    def get_train_dataloader(self) -> Any:
        loader = loader_of(self.args.dataloader_num_workers)[1]
        loader = self.accelerator.prepare(loader) if "prepare" in self.wrapped else loader
        return prefetch(loader, "cpu") if "prefetch" in self.wrapped else loader

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = model(inputs["x"])
        self.seen.append((inputs["i"].tolist(), loss.item()))
        return loss


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Any) -> Any:
        return self.layer(x).square().mean()


class TestTrainer:
    @pytest.mark.parametrize("wrapped", ["prepare", "prefetch", "prepare, prefetch"])
    def test_a_training_goes_on(self, wrapped: str, tmp_path: Path) -> None:
        trainer = Watching(wrapped, tmp_path)
        trainer.train()
        assert [rows for rows, _ in trainer.seen] == [*chain(*whole())]
        for step in (4, STEPS, 12):
            rest = Watching(wrapped, tmp_path / "rest")
            rest.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
            assert rest.seen == trainer.seen[step:], f"from step {step}, with the same losses"
