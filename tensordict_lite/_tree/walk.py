"""Walk over mappings of tensors, and validate mappings that the user passes in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch import Tensor

from .._errors import Path, described, dotted, refuse_deeper
from .._memory.device import CPU
from .frames import table_columns
from .inside import nests, stays_on, without_tensors
from .kinds import kind_of
from .missing import no_key
from .ragged import Ragged

_NO_EXPORTS = (Tensor, dict, str, bytes, bool, int, float, complex, list, tuple, np.ndarray, np.generic)
NO_EXPORTS = frozenset(_NO_EXPORTS)
"""Types of values that `as_shared` returns themselves: a caller can save the call."""
Items = Mapping[str, Any] | Iterable[tuple[str, Any]]


def only_tensors(values: Iterable[Any]) -> bool:
    """Whether every value is a plain tensor: no nested dict, object or tensor subclass."""
    return {Tensor}.issuperset(map(type, values))


def as_dict(data: Items) -> Mapping[str, Any]:
    """``data`` as a mapping that can be iterated twice.

    Raises ``TypeError`` or ``ValueError``, as ``dict`` does, unless ``data`` is a mapping or an iterable of pairs. The
    mappings in a list of samples are no pairs.
    """
    if type(data) is dict:
        return data
    if isinstance(data, Mapping):  # items() is called because a subclass of dict may override it
        return dict(cast("Mapping[str, Any]", data).items())
    columns = table_columns(data)
    if columns is not None:
        return columns
    if hasattr(data, "keys"):  # the protocol of dict(), for tables that iterate over column names only
        return dict(data)
    expected = f"expected a mapping or an iterable of (key, value) pairs, got {type(data).__name__}"
    if isinstance(data, torch.nn.Module):
        raise TypeError(f"{expected}; give it the state_dict()")
    if isinstance(data, (Tensor, Ragged, np.ndarray)):  # an array of shape [n, 2] would pass as pairs
        raise TypeError(f'{expected}; give the value a key: {{"x": value}}')
    if hasattr(data, "to_dict"):  # a data frame of Polars iterates over its columns, which may have two rows
        raise TypeError(f"{expected}; give it the to_dict()")
    if not isinstance(data, Iterable):
        raise TypeError(expected)
    pairs: list[Any] = []
    for pair in data:  # outside of `try`, so that an error in the caller's generator keeps its message
        # dict() takes any two items as a pair: the keys of a mapping, the characters of a string.
        if isinstance(pair, (Mapping, str, set, frozenset)):
            way_out = "; collate(samples) makes a batch" if isinstance(pair, Mapping) else ""
            raise TypeError(f"{expected} with {described(pair)} among its items{way_out}")
        pairs.append(pair)
    try:
        return dict(pairs)
    except (TypeError, ValueError) as error:  # raised again as the type that dict() raises
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{expected}: {error}") from error


def refuse_key(key: Any, at: Path, rows: str = "") -> NoReturn:
    """Raise ``TypeError`` for a key that is not a ``str``. ``rows``: the result of `rows_hint`."""
    where = f" in {dotted(at)}" if at else ""
    if isinstance(key, (int, float)) and not isinstance(key, bool):
        way_out = f"; use {str(key)!r}"
    elif isinstance(key, bytes):
        way_out = "; use key.decode()"
    else:
        way_out = "; assign d[path] = value for a path" if type(key) is tuple else ""
    raise TypeError(f"{no_key(key)}{where}{way_out}{rows}")


def all_on(data: Mapping[str, Any], device: torch.device | None, keeps: bool = False) -> bool:
    """Whether every key is a ``str`` and every value a tensor on ``device``.

    ``keeps``: a value may also be one that is kept as it is, without tensors or with tensors on ``device``.
    """
    # One loop instead of several over map(): see "construct from tensors" in benchmarks/count_instructions.py.
    on_cpu = device is CPU
    for key, value in data.items():
        plain = type(value) is Tensor
        if (not plain and not isinstance(value, Tensor)) or type(key) is not str:
            if keeps and type(key) is str and (without_tensors(value) or stays_on(value, device)):
                continue
            return False
        if not (value.is_cpu if on_cpu and plain else value.device == device):
            return False
    return True


def as_shared(value: Any, path: Path) -> Any:
    """An array of CuPy, JAX or another library as a tensor that shares its memory. Any other value is returned itself.

    The memory stays on its device. Raises ``TypeError`` that names the path if torch cannot share it.
    """
    if isinstance(value, _NO_EXPORTS):
        return value  # NumPy arrays export their memory too, and have no device
    kind = type(value)
    # A column of Arrow may have missing values, so `convert` decides. DLPack orders the streams of both libraries.
    exports = hasattr(kind, "__dlpack__") and not hasattr(kind, "__arrow_c_array__")
    if not exports and not hasattr(kind, "__cuda_array_interface__"):
        return value
    try:
        return torch.from_dlpack(value) if exports else torch.as_tensor(value)
    except Exception as error:  # any error of the other library
        raise TypeError(
            f"{dotted(path)}: expected memory that torch can share, got {kind.__name__}; convert it to NumPy first; "
            f"the error is: {error}"
        ) from error


def tensors_in(data: Mapping[str, Any], at: Path = ()) -> list[Tensor]:
    """Every tensor, depth first. Raises ``TooDeep`` if ``data`` is nested deeper than a `DeviceDict` may be."""
    refuse_deeper(at)
    found: list[Tensor] = []
    for key, given in data.items():  # not `leaves`: torch.compile cannot trace the generator
        value = as_shared(given, (*at, key))
        is_nested = isinstance(value, Mapping)
        found += tensors_in(value, (*at, key)) if is_nested else kind_of(value).tensors(value)
    return found


def leaves(data: Mapping[str, Any], at: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The path and value of every leaf, depth first. A leaf is a value that is not a mapping."""
    for key, value in data.items():
        if nests(value):
            yield from leaves(value, (*at, key))
        else:
            yield (*at, key), value


def as_path(key: object) -> Path:
    """A key or path as a path. Raises ``TypeError`` for anything else, such as a list of keys."""
    if not isinstance(key, (str, tuple)):
        raise TypeError(f"pass keys one by one, each a str or a path; got {described(key)}: {key!r}")
    return cast(Path, key) if isinstance(key, tuple) else (key,)


def ragged_keys(given: Any, called: str) -> frozenset[Any]:
    """The validated argument ``ragged`` of the function ``called``. Raises ``TypeError``."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f'{called} takes a list of keys or paths as ragged=, as ["box"], got {given!r:.60}')
    keys = frozenset(given)
    for key in keys:
        if not isinstance(key, (str, tuple)):
            raise TypeError(f"ragged= of {called} takes keys and paths, got {key!r:.60}")
    return keys


def components(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors that hold the elements: a dense tensor itself, or the parts of a sparse or jagged tensor."""
    if tensor.is_nested and tensor.layout == torch.jagged:
        nested: Any = tensor
        parts = (nested.values(), nested.offsets(), nested.lengths())
        return tuple(part for part in parts if part is not None)
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def nbytes(tensor: Tensor) -> int:
    """The size of a tensor's elements in bytes. For a sparse or jagged tensor, the size of its parts."""
    if tensor.layout is torch.strided and not tensor.is_nested:
        return tensor.nbytes
    return sum(part.nbytes for part in components(tensor))
