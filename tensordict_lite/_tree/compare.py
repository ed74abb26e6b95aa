"""Compare two trees of tensors."""

from __future__ import annotations

import cmath
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._memory.compare import equal as exactly
from .ragged import Ragged


def agree(a: Mapping[str, Any], b: Mapping[str, Any], same: Callable[[Tensor, Tensor], bool]) -> bool:
    """Whether two trees have the same keys, tensors for which ``same`` returns True, and equal objects.

    A tensor and a number are compared as two tensors of dimension 0. A tensor and another object are equal if the
    ``__eq__`` of the object returns True.
    """
    if len(a) != len(b):
        return False
    for key, x in a.items():
        if key not in b:
            return False
        y = b[key]
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            equal = same(x, y)
        elif isinstance(x, Mapping) and isinstance(y, Mapping):
            equal = agree(x, y, same)
        elif isinstance(x, Ragged) and isinstance(y, Ragged):
            equal = exactly(x.offsets, y.offsets) and same(x.values, y.values)
        elif isinstance(x, Tensor):
            equal = _equals_tensor(y, x, same)
        elif isinstance(y, Tensor):
            equal = _equals_tensor(x, y, same)
        else:
            equal = x is y or _same_object(x, y)
        if not equal:
            return False
    return True


def _equals_tensor(value: object, tensor: Tensor, same: Callable[[Tensor, Tensor], bool]) -> bool:
    """Whether a value that is not a tensor equals a tensor.

    A number of Python or NumPy is rounded to the dtype of the tensor. Of another object, ``__eq__`` must return the
    bool True, as that of ``unittest.mock.ANY`` does. A NumPy array is never equal: to compare, NumPy would copy the
    tensor from the device.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (bool, int, float, complex)):
        number = _rounded(value, tensor.dtype)
        return number is not None and same(tensor, number)
    kind: Any = type(value)
    return kind is not np.ndarray and kind.__eq__(value, tensor) is True


def _rounded(value: complex, dtype: torch.dtype) -> Tensor | None:
    """The number as a tensor of a dtype; None if the dtype cannot hold it, as 300 or 0.5 in uint8."""
    try:
        number = torch.tensor(value, dtype=dtype, device="cpu")
        held = number.item()
    except (RuntimeError, TypeError, ValueError, OverflowError):
        return None
    if dtype.is_floating_point or dtype.is_complex:
        return number if cmath.isfinite(held) or not cmath.isfinite(value) else None
    return number if held == value else None


def _same_object(x: Any, y: Any) -> bool:
    """Whether two kept objects are equal. An array of results, as of pandas, must be True everywhere."""
    if any(isinstance(value, np.ndarray) for value in (x, y)):
        return np.array_equal(x, y)  # == would broadcast
    return bool(np.all(x == y))
