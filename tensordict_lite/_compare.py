"""When two trees of tensors are the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor


def agree(a: Mapping[str, Any], b: Mapping[str, Any], same: Callable[[Tensor, Tensor], bool]) -> bool:
    """Whether two trees have the same keys, tensors that are the ``same``, and equal objects."""
    if len(a) != len(b):
        return False
    for key, x in a.items():
        if key not in b:
            return False
        y = b[key]
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            equal = same(x, y)
        elif isinstance(x, Mapping) and isinstance(y, Mapping):
            equal = agree(cast("Mapping[str, Any]", x), cast("Mapping[str, Any]", y), same)
        elif isinstance(x, Tensor) or isinstance(y, Tensor):
            equal = False
        else:
            equal = x is y or bool(np.all(x == y))
        if not equal:
            return False
    return True


def comparable(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
    """Both as dense tensors on one device, if dtype, layout and shape agree and there are values to compare."""
    if x.dtype != y.dtype or x.layout != y.layout or x.is_nested or y.is_nested or x.shape != y.shape:
        return None
    if x.is_meta or y.is_meta:
        return None
    if x.device != y.device:
        x, y = x.cpu(), y.cpu()
    return (x, y) if x.layout == torch.strided else (x.to_dense(), y.to_dense())


def equal(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors agree in dtype, layout, shape and every value; NaN only with itself."""
    if x is y:  # as in a dict: what is identical is equal, NaN and tensors without values too
        return True
    if x.is_nested and y.is_nested:
        return x.size(0) == y.size(0) and all(map(equal, x.unbind(), y.unbind()))
    pair = comparable(x, y)
    return pair is not None and torch.equal(*pair)
