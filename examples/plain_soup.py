"""The same program as `soup.py`, with plain dicts."""

from __future__ import annotations

import torch
from soup import data, error, main, new_model, train
from torch import Tensor, nn

Weights = dict[str, Tensor]


def copy_of(weights: Weights) -> Weights:
    return {key: value.clone() for key, value in weights.items()}


def move(mean: Weights, other: Weights, weight: float) -> None:
    for key, value in mean.items():
        if value.is_floating_point():
            value.lerp_(other[key], weight)
        else:
            value.copy_(other[key])


@torch.no_grad()
def soup(weights: list[Weights]) -> Weights:
    mean = copy_of(weights[0])
    for count, other in enumerate(weights[1:], start=2):
        move(mean, other, 1 / count)
    return mean


@torch.no_grad()
def greedy_soup(model: nn.Module, weights: list[Weights]) -> Weights:
    ranked = sorted(weights, key=lambda one: error(model, one))
    mean, count = copy_of(ranked[0]), 1
    for other in ranked[1:]:
        candidate = copy_of(mean)
        move(candidate, other, 1 / (count + 1))
        if error(model, candidate) <= error(model, mean):
            mean, count = candidate, count + 1
    return mean


def run(models: int) -> tuple[list[float], float, float]:
    torch.manual_seed(0)
    model = new_model()
    train(model, *data(4000, seed=2, noise=0.1), steps=300, lr=1e-2, seed=0)
    pretrained = copy_of(model.state_dict())
    print(f"pretrained: error {error(model, pretrained):.3f}")

    weights: list[Weights] = []
    for seed in range(models):
        model.load_state_dict(pretrained)
        train(model, *data(400, seed=3, noise=1.0), steps=100, lr=(1 + seed) * 1e-3, seed=seed)
        weights.append(copy_of(model.state_dict()))
    errors = [error(model, one) for one in weights]
    return errors, error(model, soup(weights)), error(model, greedy_soup(model, weights))


if __name__ == "__main__":
    main(run)
