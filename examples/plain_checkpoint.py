"""The same program as `checkpoint.py`, with plain dicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from checkpoint import main, new_model
from torch import Tensor, nn

Weights = dict[str, Tensor]


@torch.no_grad()
def move(average: Weights, weights: Weights, share: float) -> None:
    for key, value in average.items():
        if value.is_floating_point():
            value.lerp_(weights[key], share)
        else:
            value.copy_(weights[key])


def equal(some: Weights, other: Weights) -> bool:
    return some.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in some.items())


class Training:
    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = new_model().to(device)
        self.weights = dict(self.model.state_dict())
        self.average = {key: value.clone() for key, value in self.weights.items()}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=60)
        self.step = 0

    def train(self, until: int) -> dict[str, Any]:
        loss = torch.zeros(())
        while self.step < until:
            x = torch.randn(64, 8).to(self.device)
            loss = nn.functional.mse_loss(self.model(x), x.sum(1, keepdim=True))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            move(self.average, self.weights, 0.05)
            self.step += 1
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return {"loss": loss.item(), "grad_norm": nn.utils.get_total_norm(grads).item(), "step": self.step}

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
        self.model.load_state_dict(state["model"])
        for key, value in state["average"].items():
            self.average[key].copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]
        torch.set_rng_state(state["rng"])


def run(path: Path, device: str) -> dict[str, Any]:
    first = Training(device)
    first.train(until=30)
    torch.save(first.state(), path)
    print(f"step 60, without a stop: {first.train(until=60)}")

    second = Training(device)
    second.load(torch.load(path, map_location="cpu", weights_only=True))
    metrics = second.train(until=60)
    print(f"step 60, resumed at 30:  {metrics}")
    if not equal(first.weights, second.weights) or not equal(first.average, second.average):
        raise SystemExit("the weights differ after the resumption")
    print("the weights and their moving average are equal, bit for bit")
    return metrics


if __name__ == "__main__":
    main(run)
