"""Parse the arguments of ``to``."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from .._errors import described
from .device import DeviceLike, parse
from .dtypes import CASTABLE, DTYPES

_FORMS = "to(device), to(dtype), to(device, dtype), to(tensor) or to(other_dict), with non_blocking= and copy="

ToArguments = tuple["torch.device | None", "torch.dtype | None", bool, bool]
"""The parsed arguments: the device, which is not resolved yet, the dtype, ``non_blocking`` and ``copy``."""


def to_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ToArguments:
    """Parse the arguments of ``to``. Raises ``TypeError`` if the arguments fit no form."""
    if len(args) == 1 and not kwargs:  # most calls: "`.to()` on the current device" of benchmarks/bench_peers.py
        only = args[0]
        if type(only) is str and only not in DTYPES:
            return torch.device(only), None, False, False
        if type(only) is torch.device:
            return only, None, False, False
        if type(only) is torch.dtype and only in CASTABLE:
            return None, only, False, False
    return to(*args, **kwargs)


def to(  # Python's own errors about arguments show this name
    *args: Any,
    device: DeviceLike | None = None,
    dtype: torch.dtype | None = None,
    other: Any = None,
    non_blocking: bool = False,
    copy: bool = False,
) -> ToArguments:
    rest = list(args)
    if rest:
        first = rest.pop(0)
        if _has_device(first):
            other = _once(other, first, "other")
        elif isinstance(first, torch.dtype):
            dtype = _once(dtype, first, "dtype")
        else:
            device = _once(device, first, "device")
            if rest and not isinstance(rest[0], bool):
                dtype = _once(dtype, rest.pop(0), "dtype")
        if rest:
            non_blocking = rest.pop(0)
        if rest:
            copy = rest.pop(0)
        if rest:
            raise TypeError(f"to(): expected {_FORMS}, got {len(args)} positional arguments")
    for name, flag in (("non_blocking", non_blocking), ("copy", copy)):
        if not isinstance(flag, bool):
            raise TypeError(f"to(): expected True or False for {name}, got {flag!r}; write {_FORMS}")
    if other is not None:
        if not _has_device(other):
            raise TypeError(f"to(): expected a tensor or a dict as other=, got {described(other)}; write {_FORMS}")
        device = _once(device, other.device, "device")
        if isinstance(other, Tensor) and other.dtype in CASTABLE:
            dtype = _once(dtype, other.dtype, "dtype")  # an integer tensor gives only its device
    if dtype is not None:
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"to(): expected a torch.dtype as the dtype, got {dtype!r}; write {_FORMS}")
        if dtype not in CASTABLE:
            raise TypeError(
                f"to(): expected a floating-point or complex dtype, which casts tensors of that kind, got {dtype}; "
                f"to cast every tensor use .map(lambda t: t.to({dtype}))"
            )
    if device is not None and not isinstance(device, torch.device):
        if not isinstance(device, (str, int)) or isinstance(device, bool):
            raise TypeError(f"to(): expected a device, got {described(device)}: {device!r}; write {_FORMS}")
        device = parse(device)
    return device, dtype, non_blocking, copy


def _has_device(value: Any) -> bool:
    """Whether a value is on a device, as a tensor and a dict are. The device of an empty dict may be None."""
    return isinstance(getattr(value, "device", ""), (torch.device, NoneType))


def _once(before: Any, given: Any, name: str) -> Any:
    """The argument ``name``. Raises ``TypeError`` if the call gives it twice, by position and by keyword."""
    if before is not None and given is not None:
        raise TypeError(f"to(): expected one {name}, got {before!r} and {given!r}; write {_FORMS}")
    return before if given is None else given
