"""The same program as `typed.py`, with plain dicts: a TypedDict for pyright, and a function for run-time validation."""

# pyright: standard
# No `from __future__ import annotations` here: it would hide NotRequired from TypedDict.
from collections.abc import Iterator, Mapping
from typing import Any, get_type_hints

import torch
from jaxtyping import Float, Int, jaxtyped
from torch import Tensor, nn
from torch.nn import functional as F
from typed import make_columns
from typing_extensions import NotRequired, TypedDict, is_typeddict


class Observation(TypedDict):
    position: Float[Tensor, "batch 3"]
    speed: Float[Tensor, "batch 3"]


class Batch(TypedDict):
    obs: Observation
    action: Int[Tensor, "batch"]
    weight: Float[Tensor, "batch"]
    note: NotRequired[Tensor]


def check(kind: Any, values: Mapping[str, Any], path: str) -> None:
    hints = get_type_hints(kind)
    if unknown := values.keys() - hints.keys():
        raise TypeError(f"{path} has no field {sorted(unknown)}, its fields are {list(hints)}")
    if missing := kind.__required_keys__ - values.keys():
        raise TypeError(f"{path} lacks the fields {sorted(missing)}")
    for name, value in values.items():
        if is_typeddict(hints[name]):
            check(hints[name], value, f"{path}.{name}")
        elif not isinstance(value, hints[name]):
            shown = (
                f"{value.dtype}{list(value.shape)}".removeprefix("torch.")
                if isinstance(value, Tensor)
                else type(value).__name__
            )
            raise ValueError(f"{path}.{name}: expected {hints[name].__name__}, got {shown}")


def validated(batch: Batch) -> Batch:
    with jaxtyped("context"):  # the dimension "batch" is the same for all fields
        check(Batch, batch, "Batch")
    return batch


def batches(table: Batch, size: int) -> Iterator[Batch]:
    for rows in torch.randperm(len(table["action"])).split(size):
        obs = table["obs"]
        batch = Batch(
            obs=Observation(position=obs["position"].index_select(0, rows), speed=obs["speed"].index_select(0, rows)),
            action=table["action"].index_select(0, rows),
            weight=table["weight"].index_select(0, rows),
        )
        if "note" in table:
            batch["note"] = table["note"].index_select(0, rows)
        yield batch


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, obs: Observation) -> Float[Tensor, "batch 2"]:
        return self.net(torch.cat([obs["position"], obs["speed"], obs["position"] * obs["speed"]], dim=1))


def loss_of(policy: Policy, batch: Batch) -> Tensor:
    losses = F.cross_entropy(policy(batch["obs"]), batch["action"], reduction="none")
    return (losses * batch["weight"]).sum() / batch["weight"].sum()


def run(count: int, epochs: int) -> float:
    torch.manual_seed(0)
    columns: Any = make_columns(count)
    table = validated(columns)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    loss = torch.zeros(())
    for _ in range(epochs):
        for batch in batches(table, 64):
            loss = loss_of(policy, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(f"loss {run(count=512, epochs=6):.3f}")
