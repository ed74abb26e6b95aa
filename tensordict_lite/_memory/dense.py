"""Dense tensors, which have one value for each element in memory, and the bytes of one tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from .buffer import bytes_over
from .layout import dense_stride


def is_dense(t: Tensor) -> bool:
    """Whether a tensor is neither sparse, nested nor quantized."""
    return t.layout is torch.strided and not t.is_nested and not t.is_quantized


def not_dense(t: Tensor) -> str:
    """The reason why a tensor has no dense values; ``""`` if it has."""
    if t.is_meta:
        return "on meta, without values"
    return "" if is_dense(t) else "sparse, nested or quantized"


def dense_bytes(t: Tensor) -> Tensor:
    """The elements of a packable tensor in the order of its memory, as uint8[nbytes].

    A view if the tensor has no gap and no overlap, as a transposed or channels_last tensor. Else a view of a dense
    copy, with the strides of `dense_stride`.
    """
    stride = dense_stride(t.shape, t.stride())
    if stride != t.stride():
        t = torch.empty_strided(t.shape, stride, dtype=t.dtype, device=t.device).copy_(t)
    return bytes_over(t.untyped_storage(), int(t.storage_offset()) * t.itemsize, t.nbytes, t.device)
