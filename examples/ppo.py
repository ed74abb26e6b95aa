"""Balance a pole on a cart with proximal policy optimization (PPO), from a rollout buffer of dicts.

    python examples/ppo.py [--updates 16] [--device cpu]

32 cart-poles run at once, as tensors. One step of all of them is one DeviceDict; 64 steps make a rollout.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from tensordict_lite import DeviceDict

ENVIRONMENTS, STEPS, BATCH, EPOCHS = 32, 64, 512, 4
DISCOUNT, TRACE, CLIP = 0.98, 0.95, 0.2
REQUIRED_LENGTH = 100.0


class CartPoles:
    """Many poles on carts. An episode ends when the pole falls or the cart leaves the track, or after 500 steps."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.state = torch.empty(count, 4, device=device).uniform_(-0.05, 0.05)  # x, its speed, the angle, its speed
        self.age = torch.zeros(count, device=device)

    def step(self, action: Tensor) -> DeviceDict:
        """Push each cart left (0) or right (1). An environment that is done starts again."""
        x, x_speed, angle, angle_speed = self.state.unbind(1)
        sin, cos = angle.sin(), angle.cos()
        push = (20.0 * action - 10.0 + 0.05 * angle_speed**2 * sin) / 1.1
        turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        pull = push - 0.05 * turn * cos / 1.1
        change = torch.stack([x_speed, pull, angle_speed, turn], dim=1)
        self.state = self.state + 0.02 * change
        self.age += 1
        done = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 0.2095) | (self.age >= 500)
        result = DeviceDict({"reward": torch.ones_like(x), "done": done, "length": self.age.clone()})
        fresh = torch.empty_like(self.state).uniform_(-0.05, 0.05)
        self.state = torch.where(done[:, None], fresh, self.state)
        self.age = torch.where(done, 0, self.age)
        return result


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def value(self, obs: Tensor) -> Tensor:
        return self.critic(obs).squeeze(-1)

    def act(self, obs: Tensor) -> DeviceDict:
        choice = Categorical(logits=self.policy(obs))
        action = choice.sample()
        return DeviceDict({"obs": obs, "action": action, "log_prob": choice.log_prob(action), "value": self.value(obs)})


@torch.no_grad()
def collect(agent: Agent, carts: CartPoles, rollout: DeviceDict | None) -> DeviceDict:
    """Fill the rollout, ``[steps, environments]`` in each field. The first call makes it."""
    for t in range(STEPS):
        step = agent.act(carts.state)
        step.update(carts.step(step["action"]))
        if rollout is None:
            rollout = step.new_zeros(STEPS)
        rollout.rows[t] = step
    assert rollout is not None
    return rollout


@torch.no_grad()
def add_advantages(rollout: DeviceDict, last_value: Tensor) -> DeviceDict:
    """The rollout with its generalized advantage estimates and the returns that the critic learns."""
    advantage = torch.zeros_like(rollout["value"])
    following, trace = last_value, torch.zeros_like(last_value)
    for t in reversed(range(STEPS)):
        row = rollout.rows[t]
        alive = 1 - row["done"].float()
        error = row["reward"] + DISCOUNT * alive * following - row["value"]
        trace = error + DISCOUNT * TRACE * alive * trace
        advantage[t] = trace
        following = row["value"]
    return rollout | {"advantage": advantage, "target": advantage + rollout["value"]}


def learn(agent: Agent, optimizer: torch.optim.Optimizer, samples: DeviceDict) -> DeviceDict:
    """Some passes over the samples. Returns the mean of the losses."""
    losses = DeviceDict()
    count = 0
    for _ in range(EPOCHS):
        for batch in samples.rows.batches(BATCH, shuffle=True):
            choice = Categorical(logits=agent.policy(batch["obs"]))
            ratio = (choice.log_prob(batch["action"]) - batch["log_prob"]).exp()
            gain = (batch["advantage"] - batch["advantage"].mean()) / (batch["advantage"].std() + 1e-8)
            policy = -torch.min(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
            critic = (agent.value(batch["obs"]) - batch["target"]).pow(2).mean()
            optimizer.zero_grad()
            (policy + 0.5 * critic - 0.01 * choice.entropy().mean()).backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
            parts = DeviceDict({"policy": policy.detach(), "critic": critic.detach()})
            losses = losses.add_(parts) if losses else parts
            count += 1
    return losses.div_(count)


def main() -> None:
    parser = argparse.ArgumentParser(description="Balance poles on carts with PPO.")
    parser.add_argument("--updates", type=int, default=16)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the tensors are small

    agent = Agent().to(options.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)
    carts = CartPoles(ENVIRONMENTS, options.device)
    rollout: DeviceDict | None = None
    mean_length = 0.0
    for update in range(options.updates):
        rollout = collect(agent, carts, rollout)
        if update == 0:
            print(rollout)
        samples = add_advantages(rollout, agent.value(carts.state)).rows.flatten()
        losses = learn(agent, optimizer, samples)
        ended = samples["length"][samples["done"]]
        mean_length = ended.mean().item() if len(ended) else float(samples["length"].max())
        if update % 5 == 0 or update == options.updates - 1:
            numbers = ", ".join(f"{name} loss {value:.3f}" for name, value in losses.tolist().items())
            print(f"update {update + 1}: {len(ended)} episodes ended, mean length {mean_length:.0f}, {numbers}")
    if mean_length < REQUIRED_LENGTH:
        sys.exit(f"the mean length {mean_length:.0f} is under the required {REQUIRED_LENGTH:.0f}")


if __name__ == "__main__":
    main()
