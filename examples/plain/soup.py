"""The parts of `soup.py` that differ with plain dicts."""

from __future__ import annotations

import torch
from soup import error
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
