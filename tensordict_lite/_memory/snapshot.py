"""Snapshots of the metadata of tensors. One call compares the metadata of other tensors with a snapshot.

A plan that was validated once is valid for all tensors with the same metadata. A snapshot holds no tensor and no
address, so a plan with a snapshot cannot become stale: every use compares the tensors that are there at that time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Plan = TypeVar("Plan")

_strided = torch.strided

_MOST_PLANS = 32
"""The number of plans in a cache. A snapshot of one tensor takes about 200 bytes."""
_MOST_TENSORS = 4096
"""The largest number of tensors in a snapshot, so that a cache takes at most 26 MB."""


def snapshot(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """A function that returns whether its arguments have the metadata of ``tensors``, and no tensor is given twice.

    It takes as many arguments as there are ``tensors``, of any type. It compares class, dtype, device, shape, strides,
    the conjugate and the negative bit, ``requires_grad``, and, in the same inference mode, whether it is an inference
    tensor. It takes less than half the time of reading these attributes in Python (800 tensors).

    None if there is no such function for these tensors.
    """
    if len(tensors) > _MOST_TENSORS or len(set(map(id, tensors))) != len(tensors) or not _have_strides(tensors):
        return None
    try:  # the class with which torch.compile guards the arguments of a compiled function
        guards = cast(Any, torch._C)._dynamo.guards.TensorGuards
        check = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except (AttributeError, TypeError):  # another version of torch
        return None

    def same(*others: Any) -> bool:
        # For a tensor without sizes or strides, the check of torch would end the process.
        return _have_strides(others) and check(*others)

    return same


def _have_strides(values: Sequence[Any]) -> bool:
    """Whether no value is a nested tensor, or a tensor of another layout than strided. False if one is no tensor."""
    try:
        return True not in [t.is_nested for t in values] and [t.layout for t in values].count(_strided) == len(values)
    except AttributeError:
        return False


def plan_key(fields: Mapping[str, Any]) -> tuple[Hashable, ...]:
    """What finds the plan of these fields: the modes of torch, all keys, and the shape of the first field.

    The modes decide which tensors can be written in place. A table and its batches have the same keys; with the shape,
    their plans do not replace each other.
    """
    first = next(iter(fields.values()), None)
    shape = first.shape if type(first) is Tensor and not first.is_nested else None
    return torch.is_inference_mode_enabled(), torch.is_grad_enabled(), shape, *fields


def remember(plans: dict[Any, Plan], key: Hashable, plan: Plan) -> None:
    """Store a plan in a cache. A full cache starts anew."""
    if len(plans) >= _MOST_PLANS:
        plans.clear()
    plans[key] = plan
