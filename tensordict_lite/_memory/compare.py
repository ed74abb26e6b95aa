"""Compare two tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


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
