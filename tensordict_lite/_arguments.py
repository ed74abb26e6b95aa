"""The arguments of ``to``, in the forms of ``Tensor.to``."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ._transfer import DeviceLike
from ._tree import TreeDict

_FORMS = "to(device), to(dtype), to(device, dtype), to(tensor) or to(other_dict), with non_blocking= and copy="


class Target(NamedTuple):
    """What ``to`` is asked for. The device is as given, not resolved."""

    device: torch.device | None
    dtype: torch.dtype | None
    non_blocking: bool
    copy: bool


def to_arguments(
    *args: Any,
    device: DeviceLike | None = None,
    dtype: torch.dtype | None = None,
    other: Any = None,
    non_blocking: bool = False,
    copy: bool = False,
) -> Target:
    """Sort the arguments of ``to``. Raises ``TypeError`` for those that fit no form."""
    rest = list(args)
    if rest:
        first = rest.pop(0)
        if isinstance(first, torch.dtype):
            dtype = first
        elif isinstance(first, (Tensor, TreeDict)):
            other = cast(Any, first)
        else:
            device = first
            if rest and not isinstance(rest[0], bool):
                dtype = rest.pop(0)
        if rest:
            non_blocking = rest.pop(0)
        if rest:
            copy = rest.pop(0)
        if rest:
            raise TypeError(f"to() got {len(args)} positional arguments; expected {_FORMS}")
    if other is not None:
        if not isinstance(other, (Tensor, TreeDict)):
            raise TypeError(f"to() got other={type(other).__name__}; expected {_FORMS}")
        device = other.device if isinstance(other, Tensor) else other._device
        dtype = other.dtype if isinstance(other, Tensor) else dtype
        if dtype is not None and not dtype.is_floating_point and not dtype.is_complex:
            dtype = None  # an integer tensor says where to, not in which precision
    if dtype is not None:
        if not isinstance(cast(object, dtype), torch.dtype):
            raise TypeError(f"to() got {dtype!r} for the dtype; expected {_FORMS}")
        if not dtype.is_floating_point and not dtype.is_complex:
            raise TypeError(
                f"to() casts floating-point and complex tensors, to a dtype of that kind; got {dtype}. "
                f"To cast every tensor use .map(lambda t: t.to({dtype}))"
            )
    if device is not None and not isinstance(device, torch.device):
        if not isinstance(cast(object, device), (str, int)) or isinstance(device, bool):
            raise TypeError(f"to() got {device!r} of type {type(device).__name__}; expected {_FORMS}")
        device = torch.device(device)
    return Target(device, dtype, non_blocking, copy)
