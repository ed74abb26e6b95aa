"""The batch view of a dict: index the first dimension of all fields at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from operator import index as as_int
from typing import Any, Generic, NoReturn, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .._encoders.protocol import StringEncoder, padding
from .._errors import Path, dotted, dtype_name
from .._tree.tree import TreeDict, tensor_paths

D = TypeVar("D", bound=TreeDict[Any])

_Write = tuple[Path, Tensor, Tensor]
"""The path of a field, its tensor, and the value to write into its rows."""

_CHUNK = 64
"""Rows per ``unbind`` call in iteration. One call per field makes many views, which halves the time per view."""


class Rows(Generic[D]):
    """The batch view of a dict. See `DeviceDict.rows`."""

    __slots__ = ("_dict",)

    def __init__(self, d: D) -> None:
        self._dict = d

    def __len__(self) -> int:
        """The size of the first dimension. Raises ``ValueError`` with all shapes if the fields do not share it."""
        return _count(self._dict)

    def __getitem__(self, index: Any) -> D:
        """Return rows as a dict of the same class. ``index``: an int, a slice, a mask or indices.

        Ints and slices give views. Masks and indices (tensor, array or list) give copies. Raises ``IndexError`` for a
        row that is out of range, ``TypeError`` for an invalid index.
        """
        d = self._dict
        flat = set(map(type, d.values())) == {Tensor}
        count = _count_plain(d) if flat else _count(d)
        at = index if type(index) is slice else _index(index, count)
        if flat:  # fast path: every value is a plain tensor
            return d._new({key: value[at] for key, value in d.items()}, d._device, d._policy)
        return _taken(d, at, count)

    def __setitem__(self, index: Any, other: Mapping[str, Any]) -> None:
        """Write ``other`` into these rows, in place. ``other`` must have the keys of the dict, all of them.

        Values are converted as by ``d[key] = value``, copied, and broadcast as by ``tensor[index] = value``. Strings
        are padded to the width of their field. Raises ``ValueError`` for keys, shapes, dtypes or encoders that do not
        fit, and the errors of ``d[key] = value``. After an error the dict is unchanged.
        """
        d = self._dict
        count = _count(d)
        at = index if type(index) is slice else _index(index, count)
        if not isinstance(cast(object, other), Mapping):
            raise TypeError(f"rows are set from a mapping with the keys of the dict, got {type(other).__name__}")
        values = d._untyped_subset(())
        values._policy = d._policy.with_encoders(_encoders(d))
        values.update(other)
        writes: list[_Write] = []
        _plan_writes(d, values, at, (), writes)
        before = [target[at].clone() for _, target, _ in writes]
        done = 0
        try:
            for path, target, value in writes:
                _write(path, target, at, value)
                done += 1
        except BaseException:
            for (_, target, _), old in zip(writes[:done], before, strict=False):
                target[at] = old
            raise

    def __iter__(self) -> Iterator[D]:
        """Yield every row as ``d.rows[i]``. Autograd rejects in-place writes of tensors that require grad into them."""
        d = self._dict
        count = _count(d)
        tensors, flat = d._tensors_and_kind()
        if not flat or not tensors or any(tensor.requires_grad for tensor in tensors):
            # Autograd rejects in-place writes to views of `unbind` if the tensor requires grad. Index views allow them.
            yield from (self[i] for i in range(count))
            return
        names, device, policy, new = list(d), d._device, d._policy, d._new
        for start in range(0, count, _CHUNK):
            for row in zip(*(tensor[start : start + _CHUNK].unbind() for tensor in tensors), strict=True):
                yield new(zip(names, row, strict=True), device, policy)

    def split(self, size: int | Sequence[int]) -> list[D]:
        """Split the rows into chunks, as ``torch.split``. Each chunk is a view.

        ``size``: the rows per chunk, where the last chunk may be smaller, or a list with the size of each chunk.
        """
        count, sizes = len(self), _sizes(size)
        if isinstance(sizes, int):
            if sizes < 1:
                raise ValueError(f"split takes a size of at least 1, got {sizes}")
            return [self[start : start + sizes] for start in range(0, count, sizes)]
        if sum(sizes) != count or min(sizes, default=0) < 0:
            raise ValueError(f"split takes sizes that add up to the {count} rows, got {sizes}")
        return [self[end - part : end] for part, end in zip(sizes, accumulate(sizes), strict=True)]

    def shuffle(self, generator: torch.Generator | None = None) -> D:
        """Return a copy with all rows in random order. ``generator``: on the CPU or on the device of the dict."""
        if not isinstance(cast(object, generator), (torch.Generator, type(None))):
            raise TypeError(f"shuffle takes a torch.Generator, got {type(generator).__name__}")
        where = "cpu" if generator is None else generator.device
        return self[torch.randperm(len(self), generator=generator, device=where)]

    def __repr__(self) -> str:
        return f"{type(self._dict).__name__}.rows({len(self)})"


def _sizes(given: Any) -> int | list[int]:
    # Convert to Python ints: a sum of NumPy ints could overflow.
    with suppress(TypeError):
        return as_int(given)
    try:
        return [as_int(size) for size in given]
    except TypeError:
        raise TypeError(f"split takes a size or a list of sizes, got {given!r}") from None


def _count_plain(d: TreeDict[Any]) -> int:
    """The number of rows of a dict with plain tensors only. Faster than `_count`."""
    try:
        counts = {tensor.shape[0] for tensor in d.values()}
    except IndexError:
        _refuse(d)
    if len(counts) > 1:
        _refuse(d)
    return counts.pop()


def _count(d: TreeDict[Any]) -> int:
    """The number of rows. Raises ``ValueError`` with the shapes if the fields do not agree."""
    tensors = d._tensors()
    counts = {tensor.shape[0] if tensor.dim() else -1 for tensor in tensors}
    if len(counts) == 1 and -1 not in counts:
        return counts.pop()
    _refuse(d)


def _refuse(d: TreeDict[Any]) -> NoReturn:
    shapes = [f"{dotted(path)} {list(tensor.shape)}" for path, tensor in tensor_paths(d)]
    listed = ", ".join(shapes[:20]) + (f" and {len(shapes) - 20} more" if len(shapes) > 20 else "")
    raise ValueError(
        f"rows need fields that agree on their first dimension, this {type(d).__name__} has {listed or 'no tensors'}"
    )


def _index(given: Any, count: int) -> Any:
    """Validate an index and convert it to an int or a tensor of ints."""
    # A tuple is rejected: a tensor would read it as one index per dimension.
    if not isinstance(given, (bool, np.bool_, Tensor, np.ndarray, list, range)):
        try:
            at = as_int(given)
        except TypeError:
            raise TypeError(
                "rows are indexed by int, slice, mask or indices (a tensor, array or list), "
                f"got {type(given).__name__}; use d[key] for a field"
            ) from None
        if not -count <= at < count:
            raise IndexError(f"row {at} is out of range, there are {count}")
        return at
    if isinstance(given, (bool, np.bool_)):
        raise TypeError("rows are indexed by int, slice, mask or indices, got one bool")
    if isinstance(given, Tensor):
        tensor = given
    else:
        try:
            tensor = torch.as_tensor(list(given) if isinstance(given, range) else given, device="cpu")
        except (TypeError, ValueError) as error:
            raise TypeError(f"rows are indexed by a mask or by a list of ints; {error}") from error
        tensor = tensor if tensor.numel() else tensor.long()
    if tensor.dtype == torch.bool:
        if tensor.shape != (count,):
            raise IndexError(f"a mask for {count} rows has the shape [{count}], got {list(tensor.shape)}")
        return tensor.nonzero().squeeze(1)  # here, so that it runs once and not for each field
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dim() > 1:
        what = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
        raise TypeError(f"rows are indexed by a mask or by a list of ints, got {what}")
    return int(tensor) if tensor.dim() == 0 else tensor.long()


def _taken(d: Any, index: Any, count: int) -> Any:
    """Index every field, nested dicts included. A kept list with one element per row is indexed too."""
    items: dict[str, Any] = {}
    for key, value in d.items():
        if isinstance(value, Tensor):
            items[key] = value[index]
        elif isinstance(value, TreeDict):
            items[key] = _taken(value, index, count)
        elif isinstance(value, list) and len(cast("list[Any]", value)) == count:
            listed = cast("list[Any]", value)
            items[key] = [listed[i] for i in _ints(index)] if isinstance(index, Tensor) else listed[index]
        else:
            items[key] = value
    return d._new(items, d._device, d._policy)


def _ints(index: Tensor) -> list[int]:
    return cast("list[int]", cast(Any, index).tolist())


def _encoders(d: TreeDict[Any]) -> dict[str, StringEncoder]:
    """The encoders of all dicts of the tree, by key. For the same key, the outermost dict wins."""
    nested = [_encoders(cast("TreeDict[Any]", value)) for value in d.values() if isinstance(value, TreeDict)]
    return {key: encoder for known in (*nested, d._policy.encoders) for key, encoder in known.items()}


def _plan_writes(d: TreeDict[Any], values: TreeDict[Any], index: Any, at: Path, writes: list[_Write]) -> None:
    """Validate all values, and append a write for each field to ``writes``. Changes no tensor."""
    missing, extra = d.keys() - values.keys(), values.keys() - d.keys()
    if missing or extra:
        what = (
            f"lacks {dotted((*at, min(missing)))}"
            if missing
            else f"has {dotted((*at, min(extra)))}, which is not in this dict"
        )
        raise ValueError(f"rows are set from all fields at once; the given mapping {what}")
    for key, target in d.items():
        value: Any = values[key]
        path = (*at, key)
        if isinstance(target, TreeDict) and isinstance(value, TreeDict):
            _plan_writes(cast("TreeDict[Any]", target), cast("TreeDict[Any]", value), index, path, writes)
        elif isinstance(target, Tensor) and isinstance(value, Tensor):
            ours, theirs = d._policy.encoder(key), values._policy.encoder(key)
            if ours != theirs and key in d._policy.encoders and key in values._policy.encoders:
                raise ValueError(f"{dotted(path)} is encoded with {ours!r}, the given value with {theirs!r}")
            writes.append((path, target, _fitted(target[index], value, key in d._policy.encoders and ours, path)))
        else:
            raise ValueError(f"{dotted(path)} cannot be set by rows: it is no tensor")


def _write(path: Path, target: Tensor, index: Any, value: Tensor) -> None:
    try:
        target[index] = value
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # for example, the field is a leaf that requires grad, or an expanded tensor
        raise RuntimeError(f"{dotted(path)}: {error}") from error


def _fitted(rows: Tensor, value: Tensor, encoder: object, path: Path) -> Tensor:
    """Pad and expand ``value`` to the shape of ``rows``, as a copy. Raises ``ValueError`` if it does not fit."""
    number = padding(encoder, rows, value)
    if number is not None:
        if value.shape[-1] > rows.shape[-1]:
            raise ValueError(
                f"{dotted(path)}: a string of {value.shape[-1]} bytes does not fit this field of {rows.shape[-1]}"
            )
        value = F.pad(value, (0, rows.shape[-1] - value.shape[-1]), value=number)
    if not torch.can_cast(value.dtype, rows.dtype):
        raise ValueError(f"{dotted(path)}: {value.dtype} cannot be written into {rows.dtype}; convert it first")
    try:
        return value.expand(rows.shape).clone()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        message = f"{dotted(path)}: expected {list(rows.shape)} for these rows, got {list(value.shape)}"
        raise ValueError(message) from error
