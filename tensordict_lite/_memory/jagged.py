"""Nested tensors of layout ``torch.jagged``: rows that differ in their first dimension, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor


def is_jagged(tensor: Tensor) -> bool:
    return tensor.is_nested and tensor.layout is torch.jagged


def join_jagged(rows: Sequence[Tensor]) -> Tensor:
    """One nested tensor of these rows. All have one dtype, one device, and equal dimensions after the first."""
    lengths = list(map(len, rows))
    offsets = torch.tensor([0, *accumulate(lengths)], device=rows[0].device)
    return torch.nested.nested_tensor_from_jagged(
        torch.cat(list(rows)), offsets, min_seqlen=min(lengths), max_seqlen=max(lengths)
    )


def select_rows(tensor: Tensor, index: slice | Tensor) -> Tensor:
    """Copy rows of a nested tensor, by a slice, a mask or a tensor of indices. torch has no such operation.

    Needs the first dimension of the rows to be the ragged one. Cost: a copy, and one synchronization off the CPU.
    """
    nested = cast(Any, tensor)
    offsets: Tensor = nested.offsets()
    given: Tensor | None = nested.lengths()
    lengths = offsets.diff() if given is None else given
    starts, lengths = offsets[: len(lengths)][index], lengths[index]
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    total = int(ends[-1])
    shift = torch.repeat_interleave(starts - ends[:-1], lengths, output_size=total)
    positions = torch.arange(total, device=offsets.device) + shift
    return torch.nested.nested_tensor_from_jagged(tensor.values().index_select(0, positions), ends)
