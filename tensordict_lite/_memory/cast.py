"""What is done tensor by tensor: casts, copies to another device, clones, NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._errors import dtype_name

CASTABLE = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)
)
"""The dtypes that a cast goes from and to."""
CASTS: Mapping[torch.dtype | None, Mapping[torch.dtype, torch.dtype]] = {
    None: {},
    **{dtype: dict.fromkeys(CASTABLE - {dtype}, dtype) for dtype in CASTABLE},
}
"""By the dtype that is asked for, what becomes what: one look-up, where ``t.to(dtype)`` takes ten times as long to find
that there is nothing to do."""
_CAST = {
    torch.float16: Tensor.half,
    torch.bfloat16: Tensor.bfloat16,
    torch.float32: Tensor.float,
    torch.float64: Tensor.double,
}
"""``t.double()`` takes 1.4 us where ``t.to(torch.float64)``, whose arguments could be much else, takes 2.3."""
_clone_list: Callable[[Sequence[Tensor]], Sequence[Tensor]] | None = getattr(torch, "_foreach_clone", None)
"""Of newer versions of torch. It takes three quarters of the time of a call for each."""
_requires_grad = attrgetter("requires_grad")


def copy_each(
    tensors: Sequence[Tensor], device: torch.device | None, dtype: torch.dtype | None, non_blocking: bool, copy: bool
) -> list[Tensor]:
    """Each on ``device`` (None: where it is), floating-point and complex ones as ``dtype``.

    One that is as wanted is returned itself, unless ``copy``.
    """
    if non_blocking and device is not None and device.type == "mps":
        non_blocking = False  # torch may read the source after the call, changed or freed: pytorch#139550, #189690
    if dtype is None:
        if device is None:
            return clone_each(tensors) if copy else list(tensors)
        if not copy and not non_blocking:
            return [t.to(device) for t in tensors]
        return [t.to(device, non_blocking=non_blocking, copy=copy) for t in tensors]
    casts = CASTS[dtype]
    if device is None and not copy:
        cast = _CAST.get(dtype)
        if cast is None:
            return [t.to(dtype) if t.dtype in casts else t for t in tensors]
        return [cast(t) if t.dtype in casts else t for t in tensors]
    return [
        t.to(
            t.device if device is None else device,
            casts.get(t.dtype, t.dtype),
            non_blocking=non_blocking,
            copy=copy,
        )
        for t in tensors
    ]


def clone_each(tensors: Sequence[Tensor], plain: bool = False) -> list[Tensor]:
    """A copy of each, as ``Tensor.clone``; ``plain``: the caller knows that no subclass is among them, nor a tracer."""
    # If one of a list requires grad all results would.
    if plain and tensors and _clone_list is not None and not any(map(_requires_grad, tensors)):
        try:
            return list(_clone_list(tensors))
        except NotImplementedError:  # for nested ones
            pass
    return [t.clone() for t in tensors]


def host_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The NumPy array of a CPU tensor, detached, sharing its memory. ``TypeError`` for what NumPy does not have."""
    try:
        return tensor.numpy()
    except (TypeError, RuntimeError):  # one that requires grad, say; asking first would take longer than this
        pass
    try:
        return tensor.numpy(force=True)  # detach, and resolve conjugate and negative bits, in one C call
    except (TypeError, RuntimeError) as error:
        what = dtype_name(tensor.dtype) + ("" if tensor.layout == torch.strided else f", {tensor.layout}")
        dense = tensor.layout == torch.strided and tensor.is_floating_point()
        way_out = "call .float() first" if dense else "convert it first"
        raise TypeError(f"NumPy has no {what}; {way_out}") from error
