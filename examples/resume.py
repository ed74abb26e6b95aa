"""Kill a training in the middle of an epoch, and go on from its last checkpoint, bit for bit.

    python examples/resume.py [--rows 6000] [--workers 2] [--out examples/out]

The data is the table of `table.py`, and the network has dropout. A checkpoint has the weights, their moving average,
the optimizer, the random generator and the order of the rows. A second process trains, saves, and kills itself. Then
this process goes on, and ends with the same weights as a training without a stop.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from table import BATCH, new_model, pixels, write
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tensordict_lite import BatchOrder, DeviceDict, collate, load, prefetch

HERE = Path(__file__).parent
EPOCHS, SAVE_EVERY = 2, 10  # a checkpoint every 10 steps


class Training:
    """Everything that a checkpoint needs."""

    def __init__(self, folder: Path, workers: int) -> None:
        torch.manual_seed(0)
        table = load(folder / "stripes").select("image", "direction")
        self.model = nn.Sequential(nn.Dropout(0.1), new_model())
        self.weights = DeviceDict(self.model.state_dict())  # the tensors of the model, which training changes in place
        self.average = self.weights.clone()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3)
        self.order = BatchOrder(table.rows, BATCH, shuffle=True, seed=0)
        loader = DataLoader(table.rows, batch_sampler=self.order, num_workers=workers, collate_fn=collate)
        self.batches = prefetch(loader, "cpu")
        self.checkpoint = folder / "resume.pt"
        self.step = 0

    def train(self, save: bool = False, killed_at: int | None = None) -> None:
        for _ in self.order.epochs(EPOCHS):  # from the epoch of the checkpoint
            for batch in self.batches:  # the batches that are left in it
                loss = F.cross_entropy(self.model(pixels(batch["image"])), batch["direction"])
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.average.lerp_(self.weights, 0.05)
                self.step += 1
                if save and self.step % SAVE_EVERY == 0:
                    self.save()
                if self.step == killed_at:
                    os.kill(os.getpid(), signal.SIGKILL)

    def save(self) -> None:
        state = {
            "model": self.weights,
            "average": self.average,
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "order": self.batches.state_dict(),
            "step": self.step,
        }
        torch.save(state, self.checkpoint.with_suffix(".tmp"))
        self.checkpoint.with_suffix(".tmp").replace(self.checkpoint)  # a kill leaves a whole checkpoint

    def resume(self) -> None:
        state: dict[str, Any] = torch.load(self.checkpoint, weights_only=True)
        self.weights.copy_(state["model"])
        self.average.copy_(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.batches.load_state_dict(state["order"])
        self.step = state["step"]
        torch.set_rng_state(state["rng"])  # `prefetch` over a BatchOrder draws nothing from this generator


def train_and_die(folder: Path, workers: int, killed_at: int) -> None:
    torch.set_num_threads(1)
    Training(folder, workers).train(save=True, killed_at=killed_at)


def run(folder: Path, rows: int, workers: int) -> int:
    """Run the program. Returns the step of the checkpoint. Raises SystemExit if the resumed training differs."""
    write(folder / "stripes", rows)
    whole = Training(folder, workers)
    whole.train()
    print(f"without a stop: {whole.step} steps in {EPOCHS} epochs")

    killed_at = whole.step * 3 // 4
    process = multiprocessing.get_context("spawn").Process(target=train_and_die, args=(folder, workers, killed_at))
    process.start()
    process.join()
    print(f"killed after step {killed_at}, in the middle of an epoch: exit code {process.exitcode}")

    resumed = Training(folder, workers)
    resumed.resume()
    saved, epoch, row = resumed.step, resumed.order.epoch, resumed.batches.state_dict()["position"]
    print(f"resumed at step {saved}: epoch {epoch}, {row} of {rows} rows taken")
    resumed.train()
    if resumed.step != whole.step or resumed.weights != whole.weights or resumed.average != whole.average:
        raise SystemExit("the weights differ after the resumption")
    print(f"at step {resumed.step}, the weights and their moving average are equal, bit for bit")
    return saved


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", type=int, default=6000)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--out", type=Path, default=HERE / "out")
    given = options.parse_args()
    torch.set_num_threads(1)
    shutil.rmtree(given.out / "stripes", ignore_errors=True)
    given.out.mkdir(parents=True, exist_ok=True)
    if not run(given.out, given.rows, given.workers):
        sys.exit("no checkpoint was saved")


if __name__ == "__main__":
    main()
