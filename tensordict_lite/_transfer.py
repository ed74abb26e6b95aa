"""Moving tensors: a flat list and a target in, a list in the same order out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

DeviceLike = torch.device | str | int


CPU = torch.device("cpu")
"""The one object that every dict on the CPU keeps as its device, so that ``is`` tells."""
META = torch.device("meta")

CASTABLE = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)
)
"""The dtypes that a cast goes from and to."""
_FROM = {dtype: CASTABLE - {dtype} for dtype in CASTABLE}


def canonical(device: torch.device) -> torch.device:
    """``device``, which a tensor reported, as it is kept: the CPU as `CPU`."""
    return CPU if device == CPU else device


def resolve(device: DeviceLike) -> torch.device:
    """The device that tensors made on ``device`` report: ``"cuda"`` is the current CUDA device, with its index.

    Raises torch's ``RuntimeError`` for a device type that is unknown, and torch's own error for one without an index
    that this machine or build does not have.
    """
    parsed = device if isinstance(device, torch.device) else torch.device(device)
    if parsed == CPU:
        return CPU
    if parsed == META:
        return META
    if parsed.type in ("cpu", "meta"):  # an index of theirs is accepted and ignored, as torch does
        return resolve(parsed.type)
    if cast("int | None", parsed.index) is not None:
        return parsed
    # Asked of torch itself, so that every backend, and a change of the current device, is answered right.
    return torch.empty(0, device=parsed).device


def transfer(
    tensors: Sequence[Tensor],
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
    copy: bool = False,
) -> list[Tensor]:
    """``tensors`` on ``device`` (resolved; None: where they are), floating-point and complex ones as ``dtype``.

    A tensor that is as wanted is returned itself, unless ``copy``. With ``non_blocking=False`` every result is
    complete, and every source free to be changed, on return; with True torch's contract holds. Autograd records.
    Cost: one copy for each tensor that is not as wanted.
    """
    if non_blocking and device is not None and device.type == "mps":
        non_blocking = False  # torch may read the source after the call, changed or freed: pytorch#139550, #189690
    if dtype is None:
        if device is None:
            return [t.clone() for t in tensors] if copy else list(tensors)
        if not copy and not non_blocking:
            return [t.to(device) for t in tensors]
        return [t.to(device, non_blocking=non_blocking, copy=copy) for t in tensors]
    if device is None and not copy:
        # One look-up for "is cast" and "is not so already", which t.to(dtype) takes ten times as long to find.
        cast_from = _FROM[dtype]
        return [t.to(dtype) if t.dtype in cast_from else t for t in tensors]
    return [
        t.to(
            t.device if device is None else device,
            dtype if t.dtype in CASTABLE else t.dtype,
            non_blocking=non_blocking,
            copy=copy,
        )
        for t in tensors
    ]


def host_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The NumPy array of a CPU tensor, detached, sharing its memory. ``TypeError`` for what NumPy does not have."""
    try:
        return tensor.numpy(force=True)  # detach, and resolve conjugate and negative bits, in one C call
    except (TypeError, RuntimeError) as error:
        what = str(tensor.dtype).removeprefix("torch.") + (
            "" if tensor.layout == torch.strided else f", {tensor.layout}"
        )
        dense = tensor.layout == torch.strided and tensor.is_floating_point()
        way_out = "call .float() first" if dense else "convert it first"
        raise TypeError(f"NumPy has no {what}; {way_out}") from error
