"""Compare two trees of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from .._memory.compare import equal as exactly
from .ragged import Ragged


def equal_trees(a: Mapping[str, Any], b: Mapping[str, Any], same: Callable[[Tensor, Tensor], bool]) -> bool:
    """Whether two trees have the same keys, tensors for which ``same`` returns True, and equal objects.

    A tensor and another object are equal if the ``__eq__`` of the object returns True. So no number equals a tensor.
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
            equal = equal_trees(x, y, same)
        elif isinstance(x, Ragged) and isinstance(y, Ragged):
            equal = exactly(x.offsets, y.offsets) and same(x.values, y.values)
        elif isinstance(x, Tensor):
            equal = _equals_tensor(y, x)
        elif isinstance(y, Tensor):
            equal = _equals_tensor(x, y)
        else:
            equal = x is y or _same_object(x, y)
        if not equal:
            return False
    return True


def _equals_tensor(value: object, tensor: Tensor) -> bool:
    """Whether the ``__eq__`` of an object returns True for a tensor, as that of ``unittest.mock.ANY`` does.

    NumPy is not asked: it would copy the tensor from the device.
    """
    kind: Any = type(value)
    return not isinstance(value, (np.ndarray, np.generic)) and kind.__eq__(value, tensor) is True


def _same_object(x: Any, y: Any) -> bool:
    """Whether two kept objects are equal. An array of results, as of pandas, must be True everywhere."""
    if any(isinstance(value, np.ndarray) for value in (x, y)):
        return np.array_equal(x, y)  # == would broadcast
    return bool(np.all(x == y))
