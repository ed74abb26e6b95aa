"""`Windows`: the rows around each row of a time series, as a dataset. `Rows.windows` makes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from operator import eq
from operator import index as as_int
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .._errors import Path, described, dotted
from .._tree.fields import fields
from .._tree.row_index import row_index, row_indices
from .._tree.tree import TreeDict
from .._tree.walk import as_path
from .by_value import row_field

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
        self._mask, self._within = mask, within
        self._spans = _offsets(d, spans, mask)
        len(self)  # raises if the fields disagree
        for key in self._spans:
            _require_rows(d, key)
        if within is not None:
            row_field(d, within, "within=")

    def __len__(self) -> int:
        return len(self._dict.rows)

    def __getitem__(self, index: Any) -> D:
        """Return one window for an int; a batch for a slice, a mask or indices. The errors are those of `Rows`."""
        given = range(*index.indices(len(self))) if type(index) is slice else index
        at = row_index(given, len(self), self._dict.device)
        return self.__getitems__(at)._dict if isinstance(at, Tensor) else self.__getitems__([at])[0]

    def __getitems__(self, indices: Sequence[int] | Tensor) -> Any:
        """Copy the windows of some rows into a batch, and return the rows of the batch, as `Rows.__getitems__` does."""
        d = self._dict
        count = len(self)
        at = row_indices(indices, count, d.device)
        first, last = self._reach(at, count)
        others = d.drop(*self._spans)
        others[self._mask] = torch.zeros(1, device=at.device).expand(count)  # so that a tensor is left
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
            out[(self._mask, *as_path(key))] = mask
        return d._untyped_subset((key, out[key]) for key in [*d, self._mask]).rows

    def _reach(self, at: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The first and the last row that the window of each row can have: [n, 1]. Reads the field of ``within``."""
        if self._within is None:
            return torch.zeros_like(at).unsqueeze(1), torch.full_like(at, count - 1).unsqueeze(1)
        bounds = [int(bound) for offsets in self._spans.values() for bound in offsets.aminmax()]
        low, high = min(0, *bounds), max(0, *bounds)
        around = at.unsqueeze(1) + torch.arange(low, high + 1, device=at.device)
        _, field, _ = row_field(self._dict, self._within, "within=")
        same = (field[around.clamp(0, count - 1)] == field[at].unsqueeze(1)).unsqueeze(-1).flatten(2).all(2)
        same &= (around >= 0) & (around < count)
        before, after = same[:, :-low].flip(1) if low else same[:, :0], same[:, 1 - low :]
        first, last = (rows.cumprod(1).sum(1, keepdim=True) for rows in (before, after))
        return at.unsqueeze(1) - first, at.unsqueeze(1) + last

    def __repr__(self) -> str:
        return f"{type(self._dict).__name__}.rows.windows({len(self)})"


def _offsets(d: TreeDict[Any], spans: Any, mask: str) -> dict[Any, Tensor]:
    """The offsets of each key as a tensor."""
    if not isinstance(spans, Mapping) or not spans:
        raise TypeError(f"windows takes a mapping from keys to offsets, got {described(spans)}")
    if mask in d:
        raise ValueError(f"{dotted((mask,))} is a field already; give windows another name for the masks, with mask=")
    found: dict[Any, Tensor] = {}
    for key, given in spans.items():
        path = as_path(key)
        try:
            offsets = [as_int(offset) for offset in given]
        except TypeError:
            raise TypeError(f"{dotted(path)}: windows takes a range or a list of ints, got {given!r}") from None
        if not offsets:
            raise ValueError(f"{dotted(path)}: windows takes at least one offset, got {given!r}")
        inside = [other for other in map(as_path, found) if all(map(eq, path, other))]  # one path starts with the other
        if inside:
            raise ValueError(f"{dotted(path)} and {dotted(inside[0])} are windows of the same field")
        found[key] = torch.tensor(offsets, device="cpu")
    return found


def _require_rows(d: Any, key: Any) -> None:
    """Raise unless each row of a field has the same shape."""
    for field in fields(d.select(key)):
        if field.kind.dims(field) is None:
            raise TypeError(f"{dotted(field.path)}: windows takes rows of one shape, got {described(field.value)}")
