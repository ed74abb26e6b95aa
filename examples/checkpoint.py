"""Save a full training checkpoint, stop, resume, and reach the same weights bit for bit.

    python examples/checkpoint.py [--out FOLDER]

The checkpoint is one file: the weights of the model and their moving average (DeviceDicts), and beside them the states
of the optimizer and the scheduler, the step, and the state of the random number generator, which torch saves as they
are. `torch.load(..., weights_only=True)` reads it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tensordict_lite import DeviceDict


def new_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.Linear(32, 1))


class Training:
    """A network that learns the sum of its inputs, and everything that a checkpoint needs."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = new_model().to(device)
        self.weights = DeviceDict(self.model.state_dict())  # the tensors of the model, which training changes in place
        self.average = self.weights.clone()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=60)
        self.step = 0

    def train(self, until: int) -> dict[str, Any]:
        """Train up to a step. Returns the metrics of the last step, as plain numbers."""
        loss = torch.zeros(())
        while self.step < until:
            x = torch.randn(64, 8).to(self.device)
            loss = nn.functional.mse_loss(self.model(x), x.sum(1, keepdim=True))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.average.lerp_(self.weights, 0.05)
            self.step += 1
        grads = DeviceDict({name: p.grad for name, p in self.model.named_parameters()})
        return DeviceDict({"loss": loss.detach(), "grad_norm": grads.total_norm(), "step": self.step}).tolist()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.weights,
            "average": self.average,
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "step": self.step,
            "rng": torch.get_rng_state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.weights.copy_(state["model"].to(self.device))
        self.average.copy_(state["average"].to(self.device))
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]
        torch.set_rng_state(state["rng"])


def run(path: Path, device: str) -> dict[str, Any]:
    """Run the program. Returns the metrics of the last step. Raises SystemExit if the resumed training differs."""
    first = Training(device)
    first.train(until=30)
    torch.save(first.state(), path)
    print(f"step 60, without a stop: {first.train(until=60)}")

    second = Training(device)
    # The generator state must stay on the CPU, so the file is loaded there.
    second.load(torch.load(path, map_location="cpu", weights_only=True))
    metrics = second.train(until=60)
    print(f"step 60, resumed at 30:  {metrics}")
    if first.weights != second.weights or first.average != second.average:
        raise SystemExit("the weights differ after the resumption")
    print("the weights and their moving average are equal, bit for bit")
    return metrics


def main(run: Callable[..., dict[str, Any]] = run) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out", help="the folder of the checkpoint")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "checkpoint.pt"
    run(path, args.device)
    print(f"the checkpoint of step 30: {path}, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
