"""Balance a pole on a cart with proximal policy optimization (PPO), from a rollout buffer of dicts.

    python examples/ppo.py [--updates 16] [--device cpu]

32 cart-poles run at once, as tensors. One step of all of them is one row of the rollout, a DeviceDict of 64 steps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from tensordict_lite import DeviceDict, stack

ENVIRONMENTS, STEPS, BATCH, EPOCHS = 32, 64, 512, 4
DISCOUNT, TRACE, CLIP, REQUIRED_LENGTH = 0.98, 0.95, 0.2, 100.0


class CartPoles:
    """Many poles on carts. An episode ends when the pole falls or the cart leaves the track, or after 500 steps."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.state = torch.empty(count, 4, device=device).uniform_(-0.05, 0.05)  # x, its speed, the angle, its speed
        self.age = torch.zeros(count, device=device)

    def step(self, action: Tensor) -> dict[str, Tensor]:
        """Push each cart left (0) or right (1). An environment that is done starts again."""
        x, x_speed, angle, angle_speed = self.state.unbind(1)
        sin, cos = angle.sin(), angle.cos()
        push = (20.0 * action - 10.0 + 0.05 * angle_speed**2 * sin) / 1.1
        turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        pull = push - 0.05 * turn * cos / 1.1
        self.state = self.state + 0.02 * torch.stack([x_speed, pull, angle_speed, turn], dim=1)
        self.age += 1
        done = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 0.2095) | (self.age >= 500)
        result = {"reward": torch.ones_like(x), "done": done, "length": self.age.clone()}
        self.state = torch.where(done[:, None], torch.empty_like(self.state).uniform_(-0.05, 0.05), self.state)
        self.age = torch.where(done, 0, self.age)
        return result


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def value(self, obs: Tensor) -> Tensor:
        return self.critic(obs).squeeze(-1)

    def act(self, obs: Tensor) -> dict[str, Tensor]:
        choice = Categorical(logits=self.policy(obs))
        action = choice.sample()
        return {"obs": obs, "action": action, "log_prob": choice.log_prob(action), "value": self.value(obs)}


def advantages(rollout: Mapping[str, Tensor], last_value: Tensor) -> Tensor:
    """Compute generalized advantage estimates, ``[steps, environments]``."""
    reward, alive, value = rollout["reward"], 1 - rollout["done"].float(), rollout["value"]
    advantage = torch.zeros_like(value)
    following, trace = last_value, torch.zeros_like(last_value)
    for t in reversed(range(STEPS)):
        error = reward[t] + DISCOUNT * alive[t] * following - value[t]
        trace = error + DISCOUNT * TRACE * alive[t] * trace
        advantage[t] = trace
        following = value[t]
    return advantage


@torch.no_grad()
def collect(agent: Agent, carts: CartPoles) -> DeviceDict:
    """Collect a rollout: each field has the shape ``[steps, environments, ...]``."""
    rollout = DeviceDict()
    for t in range(STEPS):
        step = agent.act(carts.state)
        step |= carts.step(step["action"])
        if not rollout:
            rollout = DeviceDict(step).new_zeros(STEPS)
        rollout.rows[t] = step
    return rollout


@torch.no_grad()
def with_advantages(rollout: DeviceDict, last_value: Tensor) -> DeviceDict:
    """Return the rollout with its advantages, and with the returns that the critic learns."""
    advantage = advantages(rollout, last_value)
    return rollout | {"advantage": advantage, "target": advantage + rollout["value"]}


def losses_of(agent: Agent, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    choice = Categorical(logits=agent.policy(batch["obs"]))
    ratio = (choice.log_prob(batch["action"]) - batch["log_prob"]).exp()
    gain = (batch["advantage"] - batch["advantage"].mean()) / (batch["advantage"].std() + 1e-8)
    policy = -torch.min(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
    return policy, (agent.value(batch["obs"]) - batch["target"]).pow(2).mean(), choice.entropy().mean()


def learn(agent: Agent, optimizer: torch.optim.Optimizer, samples: DeviceDict) -> DeviceDict:
    """Some passes over the samples. Returns the mean of the losses."""
    seen: list[DeviceDict] = []
    for _ in range(EPOCHS):
        for batch in samples.rows.batches(BATCH, shuffle=True):
            policy, critic, entropy = losses_of(agent, batch)
            optimizer.zero_grad()
            (policy + 0.5 * critic - 0.01 * entropy).backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
            seen.append(DeviceDict({"policy": policy.detach(), "critic": critic.detach()}))
    return stack(seen).map(Tensor.mean)


def run(updates: int, device: torch.device) -> float:
    """Run the program. Returns the mean length of the episodes of the last update."""
    torch.manual_seed(0)
    agent = Agent().to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)
    carts = CartPoles(ENVIRONMENTS, device)
    mean_length = 0.0
    for update in range(1, updates + 1):
        rollout = collect(agent, carts)
        if update == 1:
            print(rollout)
        samples = with_advantages(rollout, agent.value(carts.state)).rows.flatten()
        losses = learn(agent, optimizer, samples)
        ended = samples["length"][samples["done"]]
        mean_length = ended.mean().item() if len(ended) else float(samples["length"].max())
        if update % 5 == 1 or update == updates:
            numbers = ", ".join(f"{name} loss {value:.3f}" for name, value in losses.tolist().items())
            print(f"update {update}: {len(ended)} episodes ended, mean length {mean_length:.0f}, {numbers}")
    return mean_length


def main(run: Callable[..., float] = run) -> None:
    parser = argparse.ArgumentParser(description="Balance poles on carts with PPO.")
    parser.add_argument("--updates", type=int, default=16)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    torch.set_num_threads(1)  # the tensors are small
    mean_length = run(**vars(parser.parse_args()))
    if mean_length < REQUIRED_LENGTH:
        sys.exit(f"the mean length {mean_length:.0f} is under the required {REQUIRED_LENGTH:.0f}")


if __name__ == "__main__":
    main()
