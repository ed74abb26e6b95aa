"""Average the weights of several fine-tuned models into one: a model soup.

    python examples/soup.py [--models 4]

All models start from the same pretrained weights. They are fine-tuned on few samples with different seeds and learning
rates. The mean of their weights is one model, as fast as each of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tensordict_lite import DeviceDict


def data(rows: int, seed: int, noise: float) -> tuple[Tensor, Tensor]:
    """Points in 8 dimensions, and a smooth function of them under noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 8, generator=generator)
    y = x.sin().sum(1, keepdim=True) + 0.5 * x[:, :1] * x[:, 1:2]
    return x, y + noise * torch.randn(rows, 1, generator=generator)


def new_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1))


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int, lr: float, seed: int) -> None:
    torch.manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    model.train()
    for _ in range(steps):
        rows = torch.randint(len(x), (32,))
        loss = F.mse_loss(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def error(model: nn.Module, weights: Mapping[str, Tensor]) -> float:
    x, y = data(2000, seed=1, noise=0.0)
    model.load_state_dict(weights)
    return F.mse_loss(model.eval()(x), y).item()


def soup(weights: list[DeviceDict]) -> DeviceDict:
    """The running mean, in place: memory for one model, whatever their number."""
    mean = weights[0].clone()
    for count, other in enumerate(weights[1:], start=2):
        mean.lerp_(other, 1 / count)
    return mean


def greedy_soup(model: nn.Module, weights: list[DeviceDict]) -> DeviceDict:
    """From the best model on, add each next one that makes the soup no worse."""
    ranked = sorted(weights, key=lambda one: error(model, one))
    mean, count = ranked[0].clone(), 1
    for other in ranked[1:]:
        candidate = mean.clone().lerp_(other, 1 / (count + 1))
        if error(model, candidate) <= error(model, mean):
            mean, count = candidate, count + 1
    return mean


def run(models: int) -> tuple[list[float], float, float]:
    """Run the program. Returns the errors of the models, of the soup and of the greedy soup."""
    torch.manual_seed(0)
    model = new_model()
    train(model, *data(4000, seed=2, noise=0.1), steps=300, lr=1e-2, seed=0)
    pretrained = DeviceDict(model.state_dict()).clone()
    print(pretrained)
    print(f"pretrained: error {error(model, pretrained):.3f}")

    weights: list[DeviceDict] = []
    for seed in range(models):
        model.load_state_dict(pretrained)
        train(model, *data(400, seed=3, noise=1.0), steps=100, lr=(1 + seed) * 1e-3, seed=seed)
        weights.append(DeviceDict(model.state_dict()).clone())
    errors = [error(model, one) for one in weights]
    return errors, error(model, soup(weights)), error(model, greedy_soup(model, weights))


def main(run: Callable[..., tuple[list[float], float, float]] = run) -> None:
    parser = argparse.ArgumentParser(description="Average the weights of several fine-tuned models.")
    parser.add_argument("--models", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the tensors are small
    errors, mean, greedy = run(options.models)
    for seed, one in enumerate(errors):
        print(f"model {seed}: error {one:.3f}")
    print(f"soup of all: error {mean:.3f}")
    print(f"greedy soup: error {greedy:.3f}")
    if mean >= sum(errors) / len(errors):
        sys.exit("the soup is no better than its models are in the mean")


if __name__ == "__main__":
    main()
