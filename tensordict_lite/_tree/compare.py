"""Compare two trees of tensors."""

from __future__ import annotations

import cmath
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


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


def values_agree(x: Tensor, y: Tensor, compare: Callable[[Tensor, Tensor], bool]) -> bool:
    """Whether dtype, layout and shape are equal and ``compare`` returns True for the values.

    ``compare`` gets dense tensors on one device. Tensors on meta have no values, so they are never equal.
    """
    if x.dtype != y.dtype or x.layout != y.layout or x.is_nested != y.is_nested or x.is_meta or y.is_meta:
        return False
    if x.is_nested:
        rows = zip(x.unbind(), y.unbind(), strict=False)
        return x.size(0) == y.size(0) and all(values_agree(a, b, compare) for a, b in rows)
    if x.shape != y.shape:
        return False
    if x.device != y.device:
        x, y = x.cpu(), y.cpu()
    if x.layout != torch.strided:
        x, y = x.to_dense(), y.to_dense()
    if x.dtype == torch.complex32:  # torch has no comparison for it
        x, y = torch.view_as_real(x.resolve_conj()), torch.view_as_real(y.resolve_conj())
    return compare(x, y)


def equal(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are one object, or have equal dtype, layout, shape and values. NaN is not equal to NaN."""
    # As in a dict, an object equals itself: a tensor with NaN and a tensor on meta too.
    return x is y or values_agree(x, y, torch.equal)
