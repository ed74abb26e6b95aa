"""The dtypes that this package handles, and what each group of them can do."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

import torch
from torch import Tensor

_STORED = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32 complex64 "
    "complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
)
_OPAQUE = "float4_e2m1fn_x2 bits8 bits16 bits1x8 bits2x4 bits4x2"


def _named(names: str) -> dict[str, torch.dtype]:
    """The dtypes with these names that this version of torch has."""
    return {name: getattr(torch, name) for name in names.split() if hasattr(torch, name)}


STORED: Mapping[str, torch.dtype] = _named(_STORED)
"""The dtypes that files and tables hold, by name."""
DTYPES: Mapping[str, torch.dtype] = {**STORED, **_named(_OPAQUE)}
"""The dtypes of `PACKABLE` by name."""
PACKABLE = frozenset(DTYPES.values())
"""The dtypes that a buffer can hold: whole bytes, copied by value. Quantized dtypes have parameters besides."""
FOREACH_DTYPES = frozenset(
    (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
     torch.float32, torch.float64, torch.complex64, torch.complex128)
)  # fmt: skip
"""The dtypes that torch's foreach kernels and its kernels for an index accept on every device."""
REAL = frozenset(dtype for dtype in FOREACH_DTYPES if not dtype.is_complex)
NUMPY_DTYPES = FOREACH_DTYPES - {torch.bfloat16}
"""The dtypes of `FOREACH_DTYPES` that NumPy has."""
CASTABLE = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)
)
"""The dtypes that a dict casts from and to: floating-point and complex ones."""
CASTS: Mapping[torch.dtype | None, Mapping[torch.dtype, torch.dtype]] = {
    None: {},
    **{dtype: dict.fromkeys(CASTABLE - {dtype}, dtype) for dtype in CASTABLE},
}
"""For each target dtype, a map from every dtype that changes to the new one."""
dtype_of = attrgetter("dtype")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(t: Tensor) -> Tensor:
    """A tensor for kernels that lack its dtype: the same memory as integers of the same size. Else ``t`` itself."""
    return t if t.dtype in FOREACH_DTYPES else t.view(_BITS[t.itemsize])


def _limits(dtype: torch.dtype) -> Mapping[type, tuple[float, float]]:
    found: dict[type, tuple[float, float]] = {bool: (0, 1)}
    if dtype in CASTABLE:
        most = torch.finfo(dtype).max
        found |= {float: (-most, most), int: (-65504, 65504)}  # every dtype has 65504, the maximum of float16
    elif dtype is not torch.bool:
        found[int] = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return found


NUMBERS: Mapping[torch.dtype, Mapping[type, tuple[float, float]]] = {dtype: _limits(dtype) for dtype in REAL}
"""For each real dtype of `FOREACH_DTYPES`, and for a type of numbers: limits of numbers that ``fill_`` stores."""
