"""Cast, copy and clone tensors one by one, and view them as NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from math import frexp, inf, ldexp, nextafter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._errors import dtype_name
from .dense import is_dense
from .dtypes import CASTABLE, CASTS, NUMPY_DTYPES
from .write import is_expanded


def copy_each(
    tensors: Sequence[Tensor], device: torch.device | None, dtype: torch.dtype | None, non_blocking: bool, copy: bool
) -> list[Tensor]:
    """Copy each tensor to ``device``, and cast the floating-point and complex ones to ``dtype``.

    None keeps the device or the dtype. Without ``copy``, a tensor that needs no change is returned itself.
    """
    if non_blocking and device is not None and device.type == "mps":
        non_blocking = False  # torch may read the source after it was changed or freed: pytorch#139550, #189690
    casts = CASTS[dtype]
    if device is None and not copy:
        return [t.to(None, dtype) if t.dtype in casts else t for t in tensors]  # 0.6x the time of `t.to(dtype)`
    if device is None and dtype is None:
        return [t.clone() for t in tensors]
    return [t.to(device, casts.get(t.dtype) if casts else None, non_blocking, copy) for t in tensors]


def pin(tensor: Tensor) -> Tensor:
    """``Tensor.pin_memory``, also for an expanded tensor: its copy is dense. torch pins its strides, and fails."""
    if is_dense(tensor) and is_expanded(tensor) and not tensor.is_pinned():
        tensor = tensor.contiguous()
    return tensor.pin_memory()


def host_array(tensor: Tensor, copy: bool = False) -> np.ndarray[Any, Any]:
    """The NumPy array over the memory of a CPU tensor, detached; a copy with ``copy``.

    Raises ``TypeError`` for a dtype or layout that NumPy does not have.
    """
    try:
        array = tensor.numpy()
    except (TypeError, RuntimeError):  # the tensor may require grad
        try:
            array = tensor.numpy(force=True)  # detach, and resolve conjugate and negative bits, in one C call
        except (TypeError, RuntimeError) as error:
            what = dtype_name(tensor.dtype) + ("" if tensor.layout == torch.strided else f", {tensor.layout}")
            dense = tensor.layout == torch.strided and tensor.is_floating_point()
            way_out = "call .float() first" if dense else "convert it first"
            raise TypeError(f"NumPy has no {what}; {way_out}") from error
    return np.array(array) if copy else array


def out_of_range(t: Tensor, dtype: torch.dtype) -> float | None:
    """The least or largest number of ``t`` that a cast to ``dtype`` would wrap or make infinite; None without any.

    NaN and numbers that the cast rounds are in range. Reads the values only if ``dtype`` has a narrower range.
    """
    if t.dtype is dtype:
        return None
    (low, high), (least, most) = _range(dtype), _range(t.dtype)
    if low <= least and most <= high:
        return None
    t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    numbers = host_array(t.float() if t.dtype in CASTABLE - NUMPY_DTYPES else t)
    found = _outside(numbers, low, high)
    if found is not None and dtype in CASTABLE:  # NaN is in range, and so is an infinity that the dtype has
        infinity = torch.full((), inf, dtype=dtype.to_real(), device="cpu").float()
        found = _outside(numbers[np.isfinite(numbers) if infinity.isinf() else ~np.isnan(numbers)], low, high)
    return found


def _outside(numbers: np.ndarray[Any, Any], low: float, high: float) -> float | None:
    """The least or largest number, or NaN, if it is not from ``low`` to ``high``."""
    extremes = (numbers.min().item(), numbers.max().item()) if numbers.size else ()
    return next((number for number in extremes if not low <= number <= high), None)


def _range(dtype: torch.dtype) -> tuple[float, float]:
    """The range of the numbers that a cast to ``dtype`` neither wraps nor makes infinite."""
    if dtype is torch.bool:
        return 0, 1
    if dtype not in CASTABLE:
        return torch.iinfo(dtype).min, torch.iinfo(dtype).max
    info = torch.finfo(dtype)
    half_step = ldexp(info.eps, frexp(info.max)[1] - 2)
    most = nextafter(info.max + half_step, 0)  # numbers less than half a step above the maximum are rounded to it
    return (-most if info.min < 0 else 0), most
