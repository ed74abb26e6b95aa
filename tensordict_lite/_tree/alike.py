"""What values must have in common to be joined, and the error that names the value that has not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch import Tensor
from torch.nn import functional as F

from .._encoders.protocol import padding
from .._errors import Path, described, dotted, is_out_of_memory
from .ragged import Ragged


def widened(values: Sequence[Tensor], encoder: object) -> Sequence[Tensor] | None:
    """The codes of strings, padded to the largest width. None if they cannot be padded or have one width already."""
    number = padding(encoder, *values)
    if number is None or any(codes.is_nested for codes in values):
        return None
    widths = {codes.shape[-1] for codes in values}
    return None if len(widths) == 1 else [fill_width(codes, max(widths), number) for codes in values]


def fill_width(codes: Tensor, width: int, number: int) -> Tensor:
    """Codes with a last dimension of ``width``, filled up with a number."""
    return F.pad(codes, (0, width - codes.shape[-1]), value=number)


def decided_values(fields: Sequence[Ragged]) -> list[Tensor]:
    """The values of ragged fields. A field without values does not decide the dtype: empty lists are float32."""
    values = [field.values for field in fields]
    dtype = next((one.dtype for one in values if len(one)), None)
    return [one if dtype is None or len(one) else one.to(dtype) for one in values]


def raise_mismatch(
    values: Sequence[Any],
    path: Path,
    noun: str,
    error: Exception | None = None,
    hint: str = "",
    may_differ: Callable[[Any, Any], bool] | None = None,
) -> NoReturn:
    """Raise a ``ValueError`` that names the first value whose shape, dtype, layout or type differs from value 0.

    ``error``: the error of torch, which is raised itself if memory is exhausted.

    ``may_differ``: whether a value may differ from value 0 all the same.
    """
    if error is not None and is_out_of_memory(error):
        raise error
    for i, value in enumerate(values):
        if described(value) != described(values[0]) and not (may_differ and may_differ(value, values[0])):
            message = f"{dotted(path)}: {noun} {i} has {described(value)}, {noun} 0 has {described(values[0])}{hint}"
            raise ValueError(message) from error
    raise ValueError(f"{dotted(path)}: torch cannot join these {noun}s; it says: {error}") from error


def differ_in_length(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors differ in their first dimension only."""
    return a.dtype == b.dtype and can_cat(a, b, 0)


def can_cat(a: Any, b: Any, along: int) -> bool:
    """Whether two values are tensors with shapes that differ in one dimension only. Their dtypes may differ."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or not a.dim() or a.dim() != b.dim():
        return False
    if a.layout is not b.layout or a.is_nested or b.is_nested or a.is_quantized is not b.is_quantized:
        return False
    along %= a.dim()
    return a.shape[:along] == b.shape[:along] and a.shape[along + 1 :] == b.shape[along + 1 :]
