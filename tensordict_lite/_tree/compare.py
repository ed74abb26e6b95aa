"""Compare two trees of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from .inside import nests
from .kinds import kind_of


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
        elif nests(x) and isinstance(y, Mapping):
            equal = equal_trees(x, y, same)  # pyright: ignore[reportArgumentType]  (it nests)
        else:
            equal = kind_of(x).equal(x, y, same)
        if not equal:
            return False
    return True
