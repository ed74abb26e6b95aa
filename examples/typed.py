"""Typed batches: the editor, the type checker and the run agree on the fields and their shapes.

    python examples/typed.py
    pyright examples/typed.py

`Batch` declares its fields once. Pyright knows them and the result of each method. jaxtyping validates dtypes and
shapes when values enter.
"""

# pyright: standard
from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from tensordict_lite import TypedDeviceDict, collate, field


class Observation(TypedDeviceDict):
    position: Float[Tensor, "batch 3"]
    speed: Float[Tensor, "batch 3"]


class Batch(TypedDeviceDict):
    obs: Observation
    action: Int[Tensor, "batch"]
    weight: Float[Tensor, "batch"] = field(default=1.0)  # stored in each sample that lacks it
    note: Tensor | None = None  # may be absent


def make_columns(count: int) -> dict[str, Any]:
    """Points that move. The action is 1 if a point moves away from the origin. Every fourth point has the weight 2."""
    position, speed = torch.randn(2, count, 3)
    action = ((position * speed).sum(1) > 0).long()
    weight = torch.where(torch.arange(count) % 4 == 0, 2.0, 1.0)
    return {"obs": {"position": position, "speed": speed}, "action": action, "weight": weight}


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, obs: Observation) -> Float[Tensor, "batch 2"]:
        return self.net(torch.cat([obs.position, obs.speed, obs.position * obs.speed], dim=1))


def loss_of(policy: Policy, batch: Batch) -> Tensor:
    losses = F.cross_entropy(policy(batch.obs), batch.action, reduction="none")
    return (losses * batch.weight).sum() / batch.weight.sum()


def run(count: int, epochs: int) -> float:
    """Run the program. Returns the loss of the last batch."""
    torch.manual_seed(0)
    table = Batch.from_dict(make_columns(count))  # validated once; its rows are batches of the same class
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    loss = torch.zeros(())
    for _ in range(epochs):
        for batch in table.rows.batches(64, shuffle=True):
            loss = loss_of(policy, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss.item()


def main() -> None:
    print(f"loss {run(count=512, epochs=6):.3f}")

    obs = Observation(position=torch.zeros(2, 3), speed=torch.ones(2, 3))
    batch = Batch(obs=obs, action=torch.tensor([0, 1]), weight=torch.ones(2))
    print(batch)
    samples = [{"obs": row.obs, "action": row.action} for row in batch.rows]
    print("weights of samples without one:", collate(samples, cls=Batch).weight)
    print(type(batch.to("cpu").rows[:1].obs).__name__, batch.weight, batch.note)
    for wrong in (
        lambda: batch.update({"action": torch.zeros(3, dtype=torch.int64)}),
        lambda: batch.update({"weight": torch.zeros(2, dtype=torch.int64)}),
        lambda: batch.update({"acton": 1}),
    ):
        try:
            wrong()
        except (TypeError, ValueError) as error:
            print(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
