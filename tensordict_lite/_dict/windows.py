"""`Windows`: the rows around each row of a time series, as a dataset. `Rows.windows` makes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from operator import eq
from operator import index as as_int
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from .._errors import Path, described, dotted
from .._tree.tree import TreeDict, ragged_paths
from .row_index import row_index

D = TypeVar("D", bound=TreeDict[Any])
Spans = Mapping[Any, Sequence[int]]
"""From a key or path to the offsets of the rows in its window."""


class Windows(Dataset[D], Generic[D]):
    """A dataset with a window for each row of a dict: ``d.rows.windows(...)``.

    - ``len(windows)``: the number of rows.
    - ``windows[3]``: one window, a dict; ``windows[8:16]``, ``windows[indices]``: a batch.
    - ``DataLoader(windows, batch_size)``: the fields of a batch are gathered at once. `collate` returns the batch.

    Cost: a copy of the rows of the windows. In a DataLoader worker, each field with a window has a buffer of its own.
    """

    def __init__(self, d: D, spans: Spans, within: str | Path | None, mask: str) -> None:
        self._dict: Any = d
        self._mask = mask
        self._spans = _offsets(d, spans, mask)
        self._count = len(self._dict.rows)
        for key in self._spans:
            _require_rows(d, key)
        self._starts = _starts(d, within, self._count)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> D:
        """Return one window for an int; a batch for a slice, a mask or indices. The errors are those of `Rows`."""
        given = range(*index.indices(self._count)) if type(index) is slice else index
        at = row_index(given, self._count, self._dict.device)
        return self.__getitems__(at)._dict if isinstance(at, Tensor) else self.__getitems__([at])[0]

    def __getitems__(self, indices: Sequence[int] | Tensor) -> Any:
        """Copy the windows of some rows into a batch, and return the rows of the batch, as `Rows.__getitems__` does."""
        d = self._dict
        at = row_index(indices, self._count, d.device)
        if not isinstance(at, Tensor):
            raise TypeError(f"__getitems__ takes a mask or indices, got {type(indices).__name__}")
        which = torch.searchsorted(self._starts, at, right=True)
        first = self._starts[which - 1].unsqueeze(1)
        last = F.pad(self._starts, (0, 1), value=self._count)[which].unsqueeze(1) - 1
        others = d.drop(*self._spans)
        others[self._mask] = torch.zeros(1, device=at.device).expand(self._count)  # so that a tensor is left
        out = others.rows.__getitems__(at)._dict
        masks: dict[Any, Tensor] = {}
        for key, offsets in self._spans.items():
            wanted = at.unsqueeze(1) + offsets.to(at.device)
            rows = wanted.clamp(first, last)
            masks[key] = rows == wanted
            gathered = d.select(key).rows.__getitems__(rows.flatten())._dict
            out[key] = gathered.map(partial(Tensor.unflatten, dim=0, sizes=rows.shape))[key]
        out[self._mask] = {}
        for key, mask in masks.items():
            out[(self._mask, *_path(key))] = mask
        return d._untyped_subset((key, out[key]) for key in [*d, self._mask]).rows

    def __repr__(self) -> str:
        return f"{type(self._dict).__name__}.rows.windows({self._count})"


def _path(key: Any) -> Path:
    return key if isinstance(key, tuple) else (key,)


def _offsets(d: TreeDict[Any], spans: Any, mask: str) -> dict[Any, Tensor]:
    """The offsets of each key as a tensor."""
    if not isinstance(spans, Mapping) or not spans:
        raise TypeError(f"windows takes a mapping from keys to offsets, got {described(spans)}")
    if mask in d:
        raise ValueError(f"{dotted((mask,))} is a field already; give windows another name for the masks, with mask=")
    found: dict[Any, Tensor] = {}
    for key, given in spans.items():
        try:
            offsets = [as_int(offset) for offset in given]
        except TypeError:
            raise TypeError(f"{dotted(_path(key))}: windows takes a range or a list of ints, got {given!r}") from None
        if not offsets:
            raise ValueError(f"{dotted(_path(key))}: windows takes at least one offset, got {given!r}")
        inside = [other for other in found if all(map(eq, _path(key), _path(other)))]  # one path starts with the other
        if inside:
            raise ValueError(f"{dotted(_path(key))} and {dotted(_path(inside[0]))} are windows of the same field")
        found[key] = torch.tensor(offsets, device="cpu")
    return found


def _require_rows(d: Any, key: Any) -> None:
    """Raise unless each row of a field has the same shape."""
    if not isinstance(d[key], (Tensor, TreeDict)):
        raise TypeError(f"{dotted(_path(key))} is {described(d[key])}; windows are of tensors")
    for path in ragged_paths(d.select(key)):
        raise TypeError(f"{dotted(path)} has rows of any length; windows are of rows of one shape")


def _starts(d: Any, within: Any, count: int) -> Tensor:
    """The first row of each sequence."""
    first = torch.zeros(1, dtype=torch.int64, device=d.device)
    if within is None:
        return first
    field: Any = d[within]
    if not isinstance(field, Tensor) or field.is_nested:
        raise TypeError(
            f"{dotted(_path(within))} is {described(field)}; within= takes a field with a value for each row"
        )
    changed = (field[1:] != field[:-1]).unsqueeze(-1).flatten(1).any(1)
    return torch.cat([first, changed.nonzero().squeeze(1) + 1])
