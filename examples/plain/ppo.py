"""The parts of `ppo.py` that differ with plain dicts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from ppo import DISCOUNT, STEPS, TRACE, Agent, CartPoles
from torch import Tensor


@torch.no_grad()
def collect(agent: Agent, carts: CartPoles, rollout: dict[str, Tensor] | None) -> dict[str, Tensor]:
    for t in range(STEPS):
        step = dict(agent.act(carts.state))
        step.update(carts.step(step["action"]))
        if rollout is None:
            rollout = {key: value.new_zeros(STEPS, *value.shape) for key, value in step.items()}
        for key, value in step.items():
            rollout[key][t] = value
    assert rollout is not None
    return rollout


@torch.no_grad()
def add_advantages(rollout: dict[str, Tensor], last_value: Tensor) -> dict[str, Tensor]:
    advantage = torch.zeros_like(rollout["value"])
    following, trace = last_value, torch.zeros_like(last_value)
    for t in reversed(range(STEPS)):
        row = {key: value[t] for key, value in rollout.items()}
        alive = 1 - row["done"].float()
        error = row["reward"] + DISCOUNT * alive * following - row["value"]
        trace = error + DISCOUNT * TRACE * alive * trace
        advantage[t] = trace
        following = row["value"]
    return rollout | {"advantage": advantage, "target": advantage + rollout["value"]}


def flatten(rollout: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.flatten(0, 1) for key, value in rollout.items()}


def batches(samples: dict[str, Tensor], size: int) -> Iterator[dict[str, Tensor]]:
    count = len(next(iter(samples.values())))
    order = torch.randperm(count, device=next(iter(samples.values())).device)
    for rows in order.split(size):
        yield {key: value[rows] for key, value in samples.items()}
