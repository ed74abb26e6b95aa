"""The same program as `ppo.py`, with plain dicts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from ppo import BATCH, ENVIRONMENTS, EPOCHS, STEPS, Agent, CartPoles, advantages, losses_of, main
from torch import Tensor, nn


@torch.no_grad()
def collect(agent: Agent, carts: CartPoles) -> dict[str, Tensor]:
    rollout: dict[str, Tensor] = {}
    for t in range(STEPS):
        step = agent.act(carts.state)
        step |= carts.step(step["action"])
        if not rollout:
            rollout = {key: value.new_zeros(STEPS, *value.shape) for key, value in step.items()}
        for key, value in step.items():
            rollout[key][t] = value
    return rollout


@torch.no_grad()
def with_advantages(rollout: dict[str, Tensor], last_value: Tensor) -> dict[str, Tensor]:
    advantage = advantages(rollout, last_value)
    return rollout | {"advantage": advantage, "target": advantage + rollout["value"]}


def flatten(rollout: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.flatten(0, 1) for key, value in rollout.items()}


def batches(samples: dict[str, Tensor], size: int) -> Iterator[dict[str, Tensor]]:
    first = next(iter(samples.values()))
    for rows in torch.randperm(len(first)).to(first.device).split(size):
        yield {key: value.index_select(0, rows) for key, value in samples.items()}


def learn(agent: Agent, optimizer: torch.optim.Optimizer, samples: dict[str, Tensor]) -> dict[str, float]:
    seen: dict[str, list[Tensor]] = {"policy": [], "critic": []}
    for _ in range(EPOCHS):
        for batch in batches(samples, BATCH):
            policy, critic, entropy = losses_of(agent, batch)
            optimizer.zero_grad()
            (policy + 0.5 * critic - 0.01 * entropy).backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
            seen["policy"].append(policy.detach())
            seen["critic"].append(critic.detach())
    return {name: torch.stack(losses).mean().item() for name, losses in seen.items()}


def run(updates: int, device: torch.device) -> float:
    torch.manual_seed(0)
    agent = Agent().to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)
    carts = CartPoles(ENVIRONMENTS, device)
    mean_length = 0.0
    for update in range(1, updates + 1):
        rollout = collect(agent, carts)
        samples = flatten(with_advantages(rollout, agent.value(carts.state)))
        losses = learn(agent, optimizer, samples)
        ended = samples["length"][samples["done"]]
        mean_length = ended.mean().item() if len(ended) else float(samples["length"].max())
        if update % 5 == 1 or update == updates:
            numbers = ", ".join(f"{name} loss {value:.3f}" for name, value in losses.items())
            print(f"update {update}: {len(ended)} episodes ended, mean length {mean_length:.0f}, {numbers}")
    return mean_length


if __name__ == "__main__":
    main(run)
