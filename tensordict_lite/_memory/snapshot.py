"""Snapshots of the metadata of tensors. One call compares the metadata of other tensors with a snapshot.

A plan that was validated once is valid for all tensors with the same metadata. A snapshot holds no tensor and no
address, so a plan with a snapshot cannot become stale: every use compares the tensors that are there at that time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Plan = TypeVar("Plan")

_MOST_PLANS = 32
"""The number of plans in a cache. A snapshot of one tensor takes about 200 bytes."""
_MOST_TENSORS = 4096
"""The largest number of tensors in a snapshot, so that a cache takes at most 26 MB."""


def snapshot(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """A function that returns whether its arguments have the metadata of ``tensors``, and no tensor is given twice.

    It takes as many arguments as there are ``tensors``, of any type. It compares class, dtype, device, shape, strides,
    layout, the conjugate and the negative bit, whether autograd records operations on the tensor, and whether it is an
    inference tensor. The last is compared correctly only in the same inference mode. It takes 0.2x the time of reading
    these attributes in Python (800 tensors).

    None if there is no such function for these tensors.
    """
    if len(tensors) > _MOST_TENSORS or len(set(map(id, tensors))) != len(tensors):
        return None
    try:  # the class with which torch.compile guards the arguments of a compiled function
        guards = cast(Any, torch._C)._dynamo.guards.TensorGuards
        return guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except (AttributeError, TypeError, RuntimeError):  # another version of torch, or a tensor without strides
        return None


def remember(plans: dict[Any, Plan], key: Hashable, plan: Plan) -> None:
    """Store a plan in a cache. A full cache starts anew."""
    if len(plans) >= _MOST_PLANS:
        plans.clear()
    plans[key] = plan
