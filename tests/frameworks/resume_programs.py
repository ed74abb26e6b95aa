"""One small training in each framework, which goes on from the last checkpoint in its folder.

    python resume_programs.py NAME FOLDER WORKERS STEPS

As a program it kills itself after so many steps. `test_kills.py` runs the trainings, and compares their steps.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from tensordict_lite import BatchOrder, DeviceDict, collate, prefetch

TABLE = DeviceDict({"i": torch.arange(24), "x": torch.rand(24, 2, generator=torch.Generator().manual_seed(0))})
SIZE, EPOCHS = 3, 2
STEPS = 8
"""The steps of an epoch on one rank."""


class Stop(Exception):
    """The training ends here."""


@dataclass
class Run:
    """What a training is given, and what it tells."""

    folder: Path
    workers: int = 0
    stop: int | None = None
    """The number of steps after which it ends."""
    kill: bool = False
    rank: int | None = None
    """Of the order. Without, the framework gives its batches to the ranks, or there is one rank."""
    world: int | None = None
    log: str = "log"
    done: int = 0

    def loader(self, kind: Any = DataLoader) -> Any:
        order = BatchOrder(TABLE.rows, SIZE, shuffle=True, seed=3, rank=self.rank, world=self.world)
        return kind(TABLE.rows, batch_sampler=order, num_workers=self.workers, collate_fn=collate)

    def tell(self, batch: Any, loss: Any) -> None:
        """A step is done: its rows, and the bits of its loss."""
        with (self.folder / self.log).open("a") as file:
            file.write(json.dumps([batch["i"].tolist(), loss.item().hex()]) + "\n")

    def saved(self) -> None:
        """A step is done and saved."""
        self.done += 1
        if self.done == self.stop:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise Stop

    @property
    def steps(self) -> list[Any]:
        """What was told."""
        return [json.loads(line) for line in (self.folder / self.log).read_text().splitlines()]


def new_model() -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Dropout(0.1), nn.Linear(2, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def step(run: Run, model: Any, optimizer: Any, batch: Any, backward: Callable[[Any], None] | None = None) -> None:
    loss = model(batch["x"]).square().mean()
    optimizer.zero_grad()
    (backward or torch.Tensor.backward)(loss)
    optimizer.step()
    run.tell(batch, loss)


def plain(run: Run, kind: Any = DataLoader) -> None:
    model, optimizer = new_model()
    batches, file = prefetch(run.loader(kind), "cpu"), run.folder / "checkpoint"
    if file.exists():
        state = torch.load(file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        batches.load_state_dict(state["order"])
        torch.set_rng_state(state["rng"])
    order: BatchOrder = batches.batch_sampler
    for _ in order.epochs(EPOCHS):
        for batch in batches:
            step(run, model, optimizer, batch)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"order": batches.state_dict(), "rng": torch.get_rng_state()}, f"{file}.tmp")
            Path(f"{file}.tmp").replace(file)
            run.saved()


def torchdata(run: Run) -> None:
    stateful: Any = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    plain(run, lambda *args, **options: stateful(*args, generator=torch.Generator(), **options))


def accelerate(run: Run) -> None:
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*new_model())
    batches, folder = prefetch(accelerator.prepare(run.loader()), "cpu"), str(run.folder / "checkpoint")
    accelerator.register_for_checkpointing(batches)
    if Path(folder).exists():
        accelerator.load_state(folder)
    order: BatchOrder = batches._source.order
    for _ in order.epochs(EPOCHS):
        for batch in batches:
            step(run, model, optimizer, batch, accelerator.backward)
            accelerator.save_state(folder)
            run.saved()


def fabric(run: Run) -> None:
    fabric = importlib.import_module("lightning").Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(*new_model())
    loader = fabric.setup_dataloaders(run.loader(), use_distributed_sampler=False)
    batches, file = prefetch(loader, fabric.device), run.folder / "checkpoint"
    state = {"model": model, "optimizer": optimizer}
    if file.exists():
        rest = fabric.load(file, state)
        batches.load_state_dict(rest["order"])
        torch.set_rng_state(rest["rng"])
    order: BatchOrder = batches.batch_sampler
    for _ in order.epochs(EPOCHS):
        for batch in batches:
            step(run, model, optimizer, batch, fabric.backward)
            fabric.save(file, state | {"order": batches.state_dict(), "rng": torch.get_rng_state()})
            run.saved()


def lightning(run: Run) -> None:
    lightning: Any = importlib.import_module("lightning")
    model, optimizer = new_model()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.model(batch["x"]).square().mean()
            run.tell(batch, loss)
            return loss

        def configure_optimizers(self) -> Any:
            return optimizer

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            checkpoint["rng"] = torch.get_rng_state()

        def on_load_checkpoint(self, checkpoint: Any) -> None:
            torch.set_rng_state(checkpoint["rng"])
            if run.world:  # it counts the batches of the epoch, and there were others on another number of ranks
                counted = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
                counted.update(dict.fromkeys(counted, 0))

    class Saved(lightning.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            trainer.save_checkpoint(run.folder / "checkpoint")
            run.saved()

    quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "use_distributed_sampler": False}
    trainer = lightning.Trainer(accelerator="cpu", devices=1, max_epochs=EPOCHS, callbacks=[Saved()], **quiet)
    before = run.folder / "checkpoint"
    trainer.fit(Module(), prefetch(run.loader(), "cpu"), ckpt_path=before if before.exists() else None)


def trainer(run: Run) -> None:
    transformers: Any = importlib.import_module("transformers")
    model, optimizer = new_model()

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return prefetch(self.accelerator.prepare(run.loader()), "cpu")

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = model(inputs["x"]).square().mean()
            run.tell(inputs, loss)
            return loss

    class Saved(transformers.TrainerCallback):
        def on_save(self, *_: Any, **__: Any) -> None:
            run.saved()

    quiet: Any = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    quiet |= {"ddp_backend": "gloo"} if dist.is_initialized() else {}
    arguments = transformers.TrainingArguments(
        str(run.folder), num_train_epochs=EPOCHS, save_strategy="steps", save_steps=1, **quiet
    )
    made = Trainer(model, arguments, callbacks=[Saved()], optimizers=(optimizer, None))
    made.train(resume_from_checkpoint=any(run.folder.glob("checkpoint-*")))


PROGRAMS: dict[str, Callable[[Run], None]] = {
    "plain": plain, "torchdata": torchdata, "accelerate": accelerate, "fabric": fabric, "lightning": lightning,
    "trainer": trainer,
}  # fmt: skip


if __name__ == "__main__":
    name, folder, workers, stop = sys.argv[1:]
    PROGRAMS[name](Run(Path(folder), int(workers), int(stop), kill=True))
