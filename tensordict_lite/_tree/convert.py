"""Convert one host value to the value that a dict stores. The caller handles tensors and mappings."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._encoders.protocol import Codes, StringEncoder, encode_nested, flatten_strings
from .._errors import DEPTH, Path, TooDeep, described, dotted, dtype_name, with_path
from .frames import column_values
from .policy import Policy

_SCALARS = (bool, int, float, complex, torch.SymBool, torch.SymInt, torch.SymFloat)
_NUMBERS = (*_SCALARS, np.bool_, np.number)
_STRING_KINDS = "UT"  # NumPy's fixed-width and variable-width strings
_NUMBER_KINDS = "biufc"
_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_TOO_DEEP = f"is nested more than {DEPTH} levels deep"
_JOIN = "join it with torch.stack or pad_sequence, or store it as a mapping"
_ACCEPTED = "a tensor, number, NumPy array, list of numbers, string, list of strings or mapping"


class Converted(NamedTuple):
    """The result of a conversion: a tensor, the codes of strings (a tensor or a mapping), or the object itself."""

    value: Any
    encoder: StringEncoder | None = None


def convert(
    value: Any, device: torch.device, policy: Policy, path: Path, dtype: torch.dtype | None = None
) -> Converted:
    """Convert ``value`` for ``path`` of a dict on ``device``. ``value`` is neither a tensor nor a mapping.

    ``dtype``: the dtype of the field that the value is written to. Python numbers get this dtype, if it can hold them.

    Raises ``TypeError`` or ``ValueError``; both name the path. The codes of strings stay on the CPU.
    """
    if isinstance(value, str):
        return _strings(value, policy, path)
    if dtype is not None and isinstance(value, np.generic) and isinstance(value.item(), _SCALARS):
        value = value.item()
    if isinstance(value, (np.ndarray, np.generic)):
        return _from_array(np.asanyarray(value), device, policy, path, value, dtype)
    if isinstance(value, _SCALARS):
        return Converted(_numbers(value, device, policy, path, dtype))
    if isinstance(value, (list, tuple)):
        return _sequence(value, device, policy, path, value, dtype)
    column = column_values(value)
    if isinstance(column, np.ndarray) and column.dtype.kind != "O":
        return _from_array(column, device, policy, path, value, dtype)
    if column is not None:
        column = list(column)
        given = value if policy.objects == "keep" else column
        return _sequence(column, device, policy, path, given, dtype)
    array = _exported_array(value)
    return keep_object(value, policy, path) if array is None else _from_array(array, device, policy, path, value, dtype)


def _exported_array(value: Any) -> np.ndarray[Any, Any] | None:
    """The array of a range or of an object that NumPy converts, such as an image of PIL; None for any other object."""
    if isinstance(value, range):
        return np.arange(value.start, value.stop, value.step)
    kind = type(value)
    try:
        if hasattr(kind, "__array__") or hasattr(kind, "__array_interface__"):
            return np.asarray(value)
        # The bytes of a text or of a JPEG file are no numbers. To store them as numbers, pass a memoryview.
        return None if isinstance(value, (bytes, bytearray)) else np.asarray(memoryview(value))
    except Exception:  # it has no buffer, or its own error
        return None


def _strings(value: Any, policy: Policy, path: Path) -> Converted:
    encoder = policy.encoder(path[-1])
    try:
        codes: Codes = encode_nested(encoder, *flatten_strings(value))
    except (TypeError, ValueError, LookupError) as error:
        raise with_path(error, path) from error
    return Converted(codes, encoder)


def _from_array(
    array: np.ndarray[Any, Any],
    device: torch.device,
    policy: Policy,
    path: Path,
    value: Any,
    dtype: torch.dtype | None,
) -> Converted:
    kind = array.dtype.kind
    if kind in _STRING_KINDS:
        return _strings(array, policy, path)
    if kind == "O":  # pandas stores strings in object arrays
        items: Any = array.tolist()
        if array.ndim:
            return _sequence(items, device, policy, path, value, dtype)
        return _strings(items, policy, path) if isinstance(items, str) else keep_object(value, policy, path)
    if kind not in _NUMBER_KINDS:
        return keep_object(value, policy, path, f"an array of dtype {array.dtype}")
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        raise TypeError(f"{dotted(path)}: expected an array without a mask, got a masked array; use .filled(value)")
    floating = policy.dtype if kind == "f" and dtype is None else None  # a write to a field casts to its dtype
    try:
        return Converted(array_tensor(array, device, floating))
    except TypeError:
        return keep_object(value, policy, path, f"an array of dtype {array.dtype}")


def array_tensor(array: np.ndarray[Any, Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor of ``torch.as_tensor``. An array whose memory no tensor can share is copied first.

    Raises ``TypeError`` for a dtype that torch does not have.
    """
    # torch warns about read-only memory, and its kernels crash on memory that is not aligned. It aligns complex128 to
    # 16 bytes, NumPy to 8.
    aligned = array.flags.aligned if array.dtype.kind != "c" else array.ctypes.data % array.itemsize == 0
    if aligned and array.flags.writeable and array.dtype.isnative:
        try:
            return torch.as_tensor(array, dtype=dtype, device=device)
        except ValueError:  # for strides that are negative or no multiple of the element size, also in size 1
            pass
    array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    return torch.as_tensor(array, dtype=dtype, device=device)


def _numbers(value: Any, device: torch.device, policy: Policy, path: Path, dtype: torch.dtype | None) -> Tensor:
    try:
        # torch.compile turns every number that is passed to torch.as_tensor into a constant, so use torch.tensor.
        tensor = torch.tensor(value, device=device)
        if dtype is None and policy.dtype is not None and tensor.is_floating_point() and tensor.dtype != policy.dtype:
            # Convert the Python numbers again: a cast of the first result would lose precision.
            tensor = torch.tensor(value, dtype=policy.dtype, device=device)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "verflow" not in str(error):
            raise  # another error, such as out of memory, has nothing to do with the value
        if dtype is not None and dtype is torch.uint64:  # it has numbers that int64, the dtype of Python ints, lacks
            return _numbers_of_dtype(value, dtype, device, path)
        reason = _unequal(value, path) or _too_large(value)
        raise ValueError(
            f"{dotted(path)}: {reason or f'expected numbers that torch can hold; torch says: {error}'}"
        ) from error
    if dtype is None or (tensor.numel() and not torch.can_cast(tensor.dtype, dtype)):
        return tensor
    return _numbers_of_dtype(value, dtype, device, path)


def _unequal(value: Any, path: Path) -> str:
    """The first item for which nested lists are not rectangular, with a way out; ``""`` for other values."""
    level: list[tuple[str, Any]] = [("", value)]
    while level and isinstance(level[0][1], (list, tuple)):
        level = [(f"{where}[{i}]", item) for where, one in level for i, item in enumerate(one)]
        lengths = [len(item) if isinstance(item, (list, tuple)) else None for _, item in level]
        for (where, _), length in zip(level, lengths, strict=True):
            if length == lengths[0]:
                continue
            if length is None or lengths[0] is None:
                kinds = ["a list", "a number"] if length is not None else ["a number", "a list"]
                return f"item {where}: expected {kinds[1]}, got {kinds[0]}; nested lists must be rectangular"
            found = f"item {where}: expected a length of {lengths[0]}, got {length}; nested lists must be rectangular"
            key = path[-1]
            way_out = (
                f"; to keep the lengths, store Ragged.from_rows(rows), or give collate ragged=[{key!r}]; to fill the "
                f"shorter ones up, give collate pad={{{key!r}: 0}}"
            )
            return found + (way_out if where.count("[") == 1 else "")
    return ""


def _too_large(value: Any) -> str:
    """The first of some ints that int64 cannot hold, with a way out; ``""`` for other values."""
    level: list[Any] = [value]
    while level and isinstance(level[0], (list, tuple)):
        level = [item for one in level for item in one]
    for one in level if all(isinstance(one, (int, np.integer)) for one in level) else ():
        if not -(2**63) <= int(one) < 2**63:
            way_out = "numpy.array(value, dtype='uint64')" if 0 < one < 2**64 else "str(value)"
            return f"int64 cannot hold {one!s:.60}; store float(value), or {way_out}"
    return ""


def _numbers_of_dtype(value: Any, dtype: torch.dtype, device: torch.device, path: Path) -> Tensor:
    """Numbers as ``tensor[i] = value`` stores them. Negative numbers do not become unsigned ones."""
    if dtype in _UNSIGNED and np.less(value, 0).any():
        raise ValueError(f"{dotted(path)}: {dtype_name(dtype)} cannot hold the negative numbers of {value!r:.60}")
    try:
        tensor = torch.tensor(value, dtype=dtype, device=device)
        if not tensor.dim() and dtype is not torch.uint64:  # torch cannot write its numbers
            tensor = tensor.new_empty(1)
            tensor[0] = value  # refuses numbers that `torch.tensor` makes infinite
            tensor = tensor[0]
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "verflow" not in str(error):
            raise
        message = f"{dotted(path)}: {dtype_name(dtype)} cannot hold {value!r:.60}; torch says: {error}"
        raise ValueError(message) from error
    return tensor


def _sequence(
    value: Any, device: torch.device, policy: Policy, path: Path, given: Any, dtype: torch.dtype | None
) -> Converted:
    """Convert a list or tuple. ``given``: the object to keep in its place if it has neither numbers nor strings."""
    if value and {str}.issuperset(map(type, value)):
        return _strings(value, policy, path)
    try:
        kinds = _item_types(value)
    except TooDeep:
        if policy.objects == "keep":  # a list that contains itself can be kept
            return keep_object(given, policy, path)
        raise ValueError(f"{dotted(path)} is a list that {_TOO_DEEP}, or holds itself") from None
    if not kinds:
        encoded = path[-1] in policy.encoders
        return _strings(value, policy, path) if encoded else Converted(_numbers(value, device, policy, path, dtype))
    if all(issubclass(kind, _NUMBERS) for kind in kinds):
        tensor = _numbers(value, device, policy, path, dtype)
        # torch reads the length from the first list only and drops the numbers of the others. On meta it compares none.
        if not tensor.numel() or (tensor.is_meta and _unequal(value, path)):
            raise ValueError(f"{dotted(path)}: {_unequal(value, path)}")
        return Converted(tensor)
    if all(issubclass(kind, str) for kind in kinds):
        return _strings(value, policy, path)
    if any(issubclass(kind, Tensor) for kind in kinds):
        return keep_object(given, policy, path)
    if any(issubclass(kind, np.ma.MaskedArray) for kind in kinds):
        raise TypeError(f"{dotted(path)}: expected numbers without a mask, got masked values; fill them first")
    if any(issubclass(kind, np.ndarray) for kind in kinds):
        try:
            # One array first: torch converts a list of arrays number by number, which is slow, and warns about it.
            array = np.asarray(value)
        except ValueError as error:
            raise ValueError(f"{dotted(path)}: the arrays in this list differ in shape; {error}") from error
        fits = array.dtype.kind in _NUMBER_KINDS
        return _from_array(array, device, policy, path, given, dtype) if fits else keep_object(given, policy, path)
    if policy.objects == "error" and any(issubclass(kind, str) for kind in kinds):
        _refuse_odd_strings(value, path)
        return _strings(value, policy, path)  # raises an error that names the item that is not a string
    return keep_object(given, policy, path)


def _refuse_odd_strings(value: Any, path: Path, at: str = "") -> None:
    """Raise ``TypeError`` that names a string in a list of mostly numbers, at any depth."""
    strings = [i for i, item in enumerate(value) if isinstance(item, str)]
    if 0 < len(strings) < sum(isinstance(item, _NUMBERS) for item in value):
        where, odd = f"{at}[{strings[0]}]", value[strings[0]]
        raise TypeError(f"{dotted(path)}: item {where}: expected a number as for the others, got the str {odd!r:.60}")
    for i, item in enumerate(value):
        if isinstance(item, (list, tuple)):
            _refuse_odd_strings(item, path, f"{at}[{i}]")


def holds_strings(value: Any) -> bool:
    """Whether a value is a string, an array of strings, or a nested list of strings only."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in _STRING_KINDS
    if not isinstance(value, (list, tuple)):
        return isinstance(value, str)
    try:
        kinds = _item_types(value)
    except TooDeep:
        return False
    return bool(kinds) and all(issubclass(kind, str) for kind in kinds)


def holds_numbers(value: Any) -> bool:
    """Whether a value is a Python number, or a nested list of Python numbers only."""
    return isinstance(value, _SCALARS) or _item_types(value) <= {int, float}


def _item_types(value: Iterable[Any]) -> set[type]:
    """The types of the items of nested lists and tuples. Raises ``TooDeep`` for lists that contain themselves."""
    kinds: set[type] = set()
    level: Iterable[Any] = (value,)
    for _ in range(DEPTH):
        inside: dict[int, Any] = {}  # by id: each list is visited once, even if it occurs several times
        for one in level:
            found = set(map(type, one))
            nested: set[type] = {kind for kind in found if issubclass(kind, (list, tuple))}
            kinds |= found - nested
            if nested:
                inside.update((id(item), item) for item in one if type(item) in nested)
        if not inside:
            return kinds
        level = inside.values()
    raise TooDeep


def keep_object(value: Any, policy: Policy, path: Path, what: str | None = None) -> Converted:
    """Keep an object if the policy allows it, else raise ``TypeError``. ``what``: names the object in the message."""
    if policy.objects == "keep":
        return Converted(value)
    tensor_at = find_tensor(value, path)
    if tensor_at is not None:
        join = "store its state_dict()" if isinstance(value, torch.nn.Module) else _JOIN
        raise TypeError(
            f"{dotted(path)}: expected {_ACCEPTED}, got {described(value)} that holds a tensor at {tensor_at}, "
            f"which would escape the device rule; {join}"
        )
    what = what or described(value)
    if value is None:
        way_out = "leave the key out"
    elif isinstance(value, (list, tuple)):
        inside = sorted({kind.__name__ for kind in _item_types(value)})
        what = f"{what} of {', '.join(inside)}"
        missing = "NoneType" in inside or "NAType" in inside
        way_out = "fill missing values first" if missing else "convert it to numbers or strings"
    elif hasattr(value, "__array__") and not isinstance(value, (np.ndarray, np.generic)):
        way_out = "pass numpy.asarray(value)"
    else:
        way_out = "convert it first"
    raise TypeError(
        f"{dotted(path)}: expected {_ACCEPTED}, got {what}; "
        f'{way_out}, or build with objects="keep" to keep it as it is, on the host'
    )


def refuse_tensor_in_cycle(value: object, path: Path) -> None:
    """Raise ``ValueError`` for a kept container that cannot be moved: it is too deep, or holds itself and a tensor."""
    tensor_at = find_tensor(value, path)
    if tensor_at is not None:
        raise ValueError(
            f"{dotted(path)}: expected a container that does not hold itself, got {described(value)} that does, with a "
            f"tensor at {tensor_at}; store the tensor under a key of its own"
        )


def find_tensor(value: object, path: Path) -> str | None:
    """The position of the first tensor found in ``value``, such as ``[0]['x']``; None if there is no tensor.

    Searches standard containers, dataclasses and modules. Raises ``TooDeep`` that names the path if ``value`` is nested
    so deep that pickle or copy would fail.
    """
    # An object may contain itself. `seen` keeps the objects alive, since Python reuses the id of a deleted object.
    seen: dict[int, object] = {}
    level: list[tuple[tuple[Any, ...], object]] = [((), value)]  # each object with its keys
    for _ in range(DEPTH + 1):
        deeper: list[tuple[tuple[Any, ...], object]] = []
        for way, one in level:
            if isinstance(one, Tensor):
                return "".join(f"[{key!r}]" for key in way)
            if id(one) not in seen:
                seen[id(one)] = one
                deeper += [((*way, key), item) for key, item in _inside(one)]
        if not deeper:
            return None
        level = deeper
    raise TooDeep(f"{dotted(path)} is a {type(value).__name__} that {_TOO_DEEP}; flatten it first")


def _inside(value: Any) -> Iterable[tuple[Any, Any]]:
    """The keys and items of a container; empty for any other object."""
    if isinstance(value, torch.nn.Module):
        return value.state_dict(keep_vars=True).items()
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        return enumerate(value)
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return enumerate(value.flat)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return ((f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value))
    return ()
