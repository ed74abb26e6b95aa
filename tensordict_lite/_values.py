"""One host value -> what a dict stores for it. Tensors and mappings are the caller's, all else is decided here."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from ._errors import DEPTH, Path, TooDeep, dotted, located
from ._policy import Policy
from ._strings import Codes, StringEncoder, encode_nested, flatten_strings
from ._tables import column_values

_SCALARS = (bool, int, float, complex, torch.SymBool, torch.SymInt, torch.SymFloat)
_NUMBERS = (*_SCALARS, np.bool_, np.number)
_STRING_KINDS = "UT"  # NumPy's fixed-width and variable-width strings
_NUMBER_KINDS = "biufc"
_TOO_DEEP = f"is nested more than {DEPTH} levels deep"
_JOIN = "Join it with torch.stack or pad_sequence, or store it as a mapping"
_ACCEPTED = "a tensor, number, NumPy array, list of numbers, string, list of strings or mapping"


class Stored(NamedTuple):
    """What a value becomes: a tensor, the codes of strings (maybe a mapping of them), or the object itself."""

    value: Any
    encoder: StringEncoder | None = None


def store(value: Any, device: torch.device, policy: Policy, path: Path) -> Stored:
    """What ``value``, which is neither a tensor nor a mapping, is stored as at ``path`` of a dict on ``device``.

    Raises ``TypeError`` or ``ValueError`` that name the path. Codes of strings are left on the CPU.
    """
    if isinstance(value, str):
        return _strings(value, policy, path)
    if isinstance(value, (np.ndarray, np.generic)):
        return _array(np.asanyarray(cast(Any, value)), device, policy, path, value)
    if isinstance(value, _SCALARS):
        return Stored(_numbers(value, device, policy, path))
    if isinstance(value, (list, tuple)):
        return _sequence(cast(Any, value), device, policy, path, cast(Any, value))
    column = column_values(value)
    if isinstance(column, np.ndarray) and cast(Any, column).dtype.kind != "O":
        return _array(cast(Any, column), device, policy, path, value)
    if column is not None:
        column = list(cast(Any, column))
        given = value if policy.objects == "keep" else cast(Any, column)
        return _sequence(cast(Any, column), device, policy, path, given)
    return _object(value, policy, path)


def _strings(value: Any, policy: Policy, path: Path) -> Stored:
    encoder = policy.encoder(path[-1])
    try:
        codes: Codes = encode_nested(encoder, *flatten_strings(value))
    except (TypeError, ValueError, LookupError) as error:
        raise located(error, path) from error
    return Stored(codes, encoder)


def _array(array: np.ndarray[Any, Any], device: torch.device, policy: Policy, path: Path, value: Any) -> Stored:
    kind = array.dtype.kind
    if kind in _STRING_KINDS:
        return _strings(array, policy, path)
    if kind == "O":  # what pandas keeps strings in
        items: Any = array.tolist()
        if array.ndim:
            return _sequence(items, device, policy, path, value)
        return _strings(items, policy, path) if isinstance(items, str) else _object(value, policy, path)
    if kind not in _NUMBER_KINDS:
        return _object(value, policy, path, f"array of dtype {array.dtype}")
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        raise TypeError(f"{dotted(path)} is a masked array, and a tensor would show what is masked; use .filled(value)")
    strides_fit = all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
    if not (array.flags.writeable and array.dtype.isnative and strides_fit and _is_aligned(array)):
        # Sharing such memory is an error in torch, or, read-only, a warning and a trap, or, unaligned, a crash.
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    dtype = policy.dtype if kind == "f" else None
    try:
        return Stored(torch.as_tensor(array, dtype=dtype, device=device))
    except TypeError:
        return _object(value, policy, path, f"array of dtype {array.dtype}")


def _is_aligned(array: np.ndarray[Any, Any]) -> bool:
    """Whether memory begins on a multiple of the element size: torch wants 16 for complex128, where NumPy wants 8."""
    if array.dtype.kind != "c":  # the flag, where it says the same, takes a twentieth of the time
        return array.flags.aligned
    return array.ctypes.data % array.itemsize == 0


def _numbers(value: Any, device: torch.device, policy: Policy, path: Path) -> Tensor:
    try:
        # torch.tensor, not as_tensor: under torch.compile the latter makes a constant of every number it is given.
        tensor = torch.tensor(value, device=device)
        if policy.dtype is not None and tensor.is_floating_point() and tensor.dtype != policy.dtype:
            # From the Python numbers again: casting the first result would keep only its precision.
            tensor = torch.tensor(value, dtype=policy.dtype, device=device)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "verflow" not in str(error):
            raise  # out of memory, say, is not about the value
        raise ValueError(
            f"{dotted(path)}: expected numbers that torch can hold, in lists that are rectangular; torch says: {error}"
        ) from error
    return tensor


def _sequence(value: Any, device: torch.device, policy: Policy, path: Path, given: Any) -> Stored:
    try:
        kinds = _item_types(value)
    except TooDeep:
        if policy.objects == "keep":  # one that holds itself can be kept
            return _object(given, policy, path)
        raise ValueError(f"{dotted(path)} is a list that {_TOO_DEEP}, or holds itself") from None
    if not kinds:
        encoded = path[-1] in policy.encoders
        return _strings(value, policy, path) if encoded else Stored(_numbers(value, device, policy, path))
    if all(issubclass(kind, _NUMBERS) for kind in kinds):
        tensor = _numbers(value, device, policy, path)
        if not tensor.numel():  # torch goes by the first list alone, and drops the numbers of the others
            raise ValueError(
                f"{dotted(path)}: expected lists that are rectangular, got an empty one beside one of numbers"
            )
        return Stored(tensor)
    if all(issubclass(kind, str) for kind in kinds):
        return _strings(value, policy, path)
    if any(issubclass(kind, Tensor) for kind in kinds):
        return _object(given, policy, path)
    if any(issubclass(kind, np.ma.MaskedArray) for kind in kinds):
        raise TypeError(f"{dotted(path)} holds masked values, which a tensor would show; fill them first")
    if any(issubclass(kind, np.ndarray) for kind in kinds):
        try:
            # Through one array: torch reads a list of arrays number by number, and warns that it does.
            array = np.asarray(value)
        except ValueError as error:
            raise ValueError(f"{dotted(path)}: the arrays in this list differ in shape; {error}") from error
        fits = array.dtype.kind in _NUMBER_KINDS
        return _array(array, device, policy, path, given) if fits else _object(given, policy, path)
    if policy.objects == "error" and any(issubclass(kind, str) for kind in kinds):
        return _strings(value, policy, path)  # raises, and names the item that is no string
    return _object(given, policy, path)


def _item_types(value: Iterable[Any]) -> set[type]:
    """The types of the items of nested lists and tuples. ``TooDeep`` for ones without an end."""
    kinds: set[type] = set()
    level: Iterable[Any] = (value,)
    for _ in range(DEPTH):
        inside: dict[int, Any] = {}  # each list once, as it may be in many places
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


def _object(value: Any, policy: Policy, path: Path, what: str | None = None) -> Stored:
    try:
        tensor_at = find_tensor(value)
    except TooDeep:
        raise ValueError(f"{dotted(path)} is a {type(value).__name__} that {_TOO_DEEP}; flatten it first") from None
    if tensor_at is not None:
        module = isinstance(value, torch.nn.Module)
        join = "Store its state_dict()" if module else _JOIN
        raise TypeError(
            f"{dotted(path)} is a {type(value).__name__} that holds a tensor at {tensor_at}, which would escape the "
            f"device rule; expected {_ACCEPTED}. {join}"
        )
    if policy.objects == "keep":
        return Stored(value)
    what = what or type(value).__name__
    if value is None:
        way_out = "leave the key out"
    elif isinstance(value, (list, tuple)):
        inside = sorted({kind.__name__ for kind in _item_types(cast("list[Any]", value))})
        what = f"{what} of {', '.join(inside)}"
        missing = "NoneType" in inside or "NAType" in inside
        way_out = "fill missing values first" if missing else "convert it to numbers or strings"
    elif hasattr(value, "__array__") and not isinstance(value, (np.ndarray, np.generic)):
        way_out = "pass numpy.asarray(value)"
    else:
        way_out = "convert it first"
    raise TypeError(
        f"{dotted(path)} is {what}, expected {_ACCEPTED}; "
        f'{way_out}, or build with objects="keep" to keep it as it is, on the host'
    )


def find_tensor(value: object, seen: dict[int, object] | None = None) -> str | None:
    """Where in ``value``, through the standard containers, dataclasses and modules, a tensor is; None if nowhere.

    ``TooDeep`` for what is nested so deep that it could not be pickled or copied. ``seen`` has the objects that were
    searched before; each is searched once.
    """
    # An object may lead back to itself. They are kept, as the id of one that is gone is used again.
    seen = {} if seen is None else seen
    level: list[tuple[Any, object]] = [((), value)]  # each with its way from the top: (..., key)
    for _ in range(DEPTH + 1):
        deeper: list[tuple[Any, object]] = []
        for way, one in level:
            if isinstance(one, Tensor):
                return _indexed(way)
            if id(one) not in seen:
                seen[id(one)] = one
                deeper += [((way, key), item) for key, item in _inside(one)]
        if not deeper:
            return None
        level = deeper
    raise TooDeep


def _indexed(way: Any) -> str:
    """``[0]['x']`` for the way ``(((), 0), 'x')``."""
    keys: list[str] = []
    while way:
        way, key = way
        keys.append(f"[{key!r}]")
    return "".join(reversed(keys))


def _inside(value: object) -> Iterable[tuple[Any, Any]]:
    """The items of a container with their keys; none of anything else."""
    inside = cast(Any, value)
    if isinstance(value, torch.nn.Module):
        return inside.state_dict(keep_vars=True).items()
    if isinstance(value, Mapping):
        return inside.items()
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        return enumerate(cast("Iterable[Any]", inside))
    if isinstance(value, np.ndarray) and inside.dtype.hasobject:
        return enumerate(cast("Iterable[Any]", inside.flat))
    if dataclasses.is_dataclass(inside) and not isinstance(value, type):
        return ((f.name, getattr(inside, f.name, None)) for f in dataclasses.fields(inside))
    return ()
