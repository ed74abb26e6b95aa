"""Validate an index of rows: an int, a mask or indices."""

from __future__ import annotations

from operator import index as as_int
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from .._errors import dtype_name
from .._memory.device import CPU, intercepted
from .convert import array_tensor


def row_index(given: Any, count: int, device: torch.device | None) -> int | Tensor:
    """Convert an index of ``count`` rows to an int, or to int64[n] on ``device`` with numbers from 0 to ``count - 1``.

    Raises ``TypeError`` for an invalid index, ``IndexError`` for a row that is out of range. Indices on an accelerator
    are not compared with ``count``, as that would synchronize; the kernels of torch check them.
    """
    if type(given) is int and -count <= given < count:
        return given
    if type(given) is Tensor and given.dtype is torch.int64 and given.dim() == 1:  # most indices
        at = _from_zero(given, count)
        return at if at.is_cpu and device is CPU else at.to(device)
    if isinstance(given, Tensor):
        at = given
    elif isinstance(given, (list, range, np.ndarray)):
        at = _from_host(given)
    else:
        return _one_row(given, count)
    if at.dtype == torch.uint8 and at.dim():
        raise TypeError(
            f"an index of dtype uint8[{', '.join(map(str, at.shape))}] may be a mask or row numbers; "
            "use .bool() for a mask, and .long() for row numbers"
        )
    if at.dtype == torch.bool and at.dim():
        if at.shape != (count,):
            raise IndexError(f"a mask for {count} rows has the shape [{count}], got {list(at.shape)}")
        at = at.nonzero().squeeze(1)
    elif at.is_floating_point() or at.is_complex() or at.dim() > 1 or at.dtype == torch.bool:
        what = f"{dtype_name(at.dtype)}{list(at.shape)}"
        raise TypeError(f"rows are indexed by a mask or by a list of ints, got {what}{_of_batches(given)}")
    elif not at.dim():
        return _one_row(int(at), count)
    else:
        at = _from_zero(at.long(), count)
    return at if device is None else at.to(device)


def row_indices(given: Any, count: int, device: torch.device | None) -> Tensor:
    """`row_index` of a mask or indices, as ``__getitems__`` takes them."""
    at = row_index(given, count, device)
    if not isinstance(at, Tensor):
        raise TypeError(f"__getitems__ takes a mask or indices, got {type(given).__name__}")
    return at


def _one_row(given: Any, count: int) -> int:
    """A validated int index, which may be negative."""
    if isinstance(given, (bool, np.bool_)):
        raise TypeError("rows are indexed by int, slice, mask or indices, got one bool")
    try:
        at = as_int(given)
    except TypeError:
        # A tuple is rejected too: torch would read it as one index per dimension.
        raise TypeError(
            "rows are indexed by int, slice, mask or indices (a tensor, array or list), "
            f"got {type(given).__name__}; use d[key] for a field, and column(key) of JoinedRows"
        ) from None
    if not -count <= at < count:
        raise IndexError(f"row {at} is out of range, there are {count}")
    return at


def _from_host(given: Any) -> Tensor:
    """A tensor on the CPU. Raises ``TypeError`` for values that are not numbers."""
    try:
        array = np.arange(given.start, given.stop, given.step) if isinstance(given, range) else np.asarray(given)
        if not array.size and array.ndim == 1:
            array = array.astype(np.int64)
        if array.dtype.kind in "biu":
            return array_tensor(array, CPU)
        return torch.as_tensor(given, device="cpu")
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        hint = _of_batches(given) or f"; {error}"
        raise TypeError(f"rows are indexed by a mask or by a list of ints{hint}") from error


def _of_batches(given: Any) -> str:
    """What to write for a list of lists: DataLoader asks for it if its ``sampler`` yields whole batches."""
    lists = isinstance(given, list) and all(isinstance(part, list) for part in cast("list[Any]", given))
    return (
        "; a BatchOrder yields whole batches: give it to DataLoader as batch_sampler=, not as sampler=" if lists else ""
    )


def _from_zero(at: Tensor, count: int) -> Tensor:
    """The indices with negative ones counted from the end."""
    if at.is_cpu and not intercepted():
        if not at.numel():
            return at
        low, high = [bound.item() for bound in torch.aminmax(at)]
        if low < -count or high >= count:
            raise IndexError(f"row {high if high >= count else low} is out of range, there are {count}")
        if low >= 0:
            return at
    return torch.where(at < 0, at + count, at)
