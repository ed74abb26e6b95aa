"""`JoinedRows`: the rows of several dicts as one dataset."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from operator import is_
from typing import Any, cast

import torch
from torch.utils.data import Dataset

from .._dict.device_dict import DeviceDict
from .._dict.rows import Rows
from .._errors import Path
from .._look.describe import Description, statistics
from .._look.progress import Progress
from .._look.tree import size
from .._memory.spans import RowSpans
from .._tree.alike import decided_values, raise_mismatch
from .._tree.fields import fields
from .._tree.ragged import Ragged
from .._tree.row_index import row_index, row_indices
from .._tree.tree import TreeDict
from .._tree.walk import as_path, nbytes
from .join import cat


class JoinedRows(Dataset[DeviceDict[Any]]):
    """The rows of several dicts of one schema, one dict after the other, as one dataset. No dict is copied.

    - ``len(rows)``: the number of rows of all dicts.
    - ``rows[3]``: a row, as ``d.rows[i]`` of its dict; views.
    - ``rows[mask]``, ``rows[indices]``, ``rows[8:16]``: a dict with copies of these rows. It has the class of the first
      dict.
    - ``DataLoader(rows, batch_size)``: one copy of the rows of a batch from each dict that has some of them.
    - ``rows.column("label")``: a field over all dicts. ``rows.equal("label", 3)``: a mask of its values, so
      ``rows[rows.equal("label", 3)]`` filters, by strings too.
    - ``rows.parts``: the dicts. A ragged field without values gets the dtype that it has in the others.

    Args:
        dicts: dicts or mappings with the same keys, dtypes, shapes of a row and encoders, or their ``rows``.

    Raises: ``ValueError`` for dicts of another schema: the errors of `cat`, and other dtypes. Cost: nothing is copied.

    >>> from torch.utils.data import DataLoader
    >>> from tensordict_lite import DeviceDict, JoinedRows
    >>> rows = JoinedRows([DeviceDict({"x": [1, 2, 3]}), DeviceDict({"x": [4, 5]})])
    >>> len(rows), rows[3]["x"], rows[[4, 0]]["x"]
    (5, tensor(4), tensor([5, 1]))
    >>> [batch["x"].tolist() for batch in DataLoader(rows, batch_size=4)]
    [[1, 2, 3, 4], [5]]
    """

    def __init__(self, dicts: Iterable[Mapping[str, Any] | Rows[Any]]) -> None:
        found = [d._dict if isinstance(d, Rows) else d for d in dicts]
        self.parts: list[DeviceDict[Any]] = [d if isinstance(d, DeviceDict) else DeviceDict(d) for d in found]
        self._like = cat([d.rows[:0] for d in self.parts])  # raises for another schema
        for path, _, first, *_ in fields(self.parts[0]):
            values: list[Any] = [d[path] for d in cast("list[Any]", self.parts)]
            if isinstance(first, Ragged):
                for i, value in enumerate(decided_values(values)):
                    if value is not values[i].values:  # without values: it gets the dtype of the other parts
                        self.parts[i] = self.parts[i].copy()
                        self.parts[i][path] = values[i].with_values(value)
                    values[i] = value
            if isinstance(values[0], torch.Tensor) and not all(_fit_one_table(value, values[0]) for value in values):
                hint = "; the dtypes and dimensions must be equal: convert one of them"
                raise_mismatch(values, path, "dict", None, hint, _fit_one_table)
        self._ends = list(accumulate(len(d.rows) for d in self.parts))
        self._known: tuple[list[TreeDict[Any]], list[Any], RowSpans | None] = [], [], None

    def _spans(self) -> RowSpans | None:
        """The spans over all fields. None if a field has none. A dict may have got other fields since the last call."""
        nodes, values, spans = self._known
        if sum(map(len, nodes)) == len(values) > 0 and all(map(is_, chain(*map(dict.values, nodes)), values)):
            return spans
        nodes = list[TreeDict[Any]](self.parts)
        for node in nodes:  # which grows
            nodes += [value for value in node.values() if isinstance(value, TreeDict)]
        paths, spans = [[field.path for field in fields(d)] for d in self.parts], None
        leaves = [[*d._leaves()] for d in self.parts]
        if paths.count(paths[0]) == len(paths) and all(type(value) is torch.Tensor for value in chain(*leaves)):
            spans = RowSpans(leaves, [len(d.rows) for d in self.parts])
            spans = spans if spans.is_whole else None
        self._known = nodes, [*chain(*map(dict.values, nodes))], spans
        return spans

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": ([], [], None)}  # the spans are addresses of this process

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: Any) -> DeviceDict[Any]:
        """Return a row as views, or a copy of rows. ``index``: an int, a slice, a mask or indices.

        Raises: ``IndexError`` for a row that is out of range, ``TypeError`` for an invalid index.

        >>> from tensordict_lite import DeviceDict, JoinedRows
        >>> JoinedRows([DeviceDict({"x": [1]}), DeviceDict({"x": [2, 3]})])[-2:]["x"]
        tensor([2, 3])
        """
        if isinstance(index, slice):
            index = range(len(self))[index]
        at = row_index(index, len(self), self.parts[0].device)
        if not isinstance(at, int):
            return self._take(at)
        at += len(self) if at < 0 else 0
        part = bisect_right(self._ends, at)
        return self.parts[part].rows[at - self._ends[part]]  # a negative index of the part

    def __getitems__(self, indices: Sequence[int] | torch.Tensor) -> Rows[DeviceDict[Any]]:
        """Copy rows into a batch, and return the rows of the batch, as ``d.rows.__getitems__`` does.

        Raises: the errors of ``rows[indices]``. Cost: a copy of these rows from each dict. If they come from several
        dicts, two copies of the batch.

        >>> from tensordict_lite import DeviceDict, JoinedRows
        >>> rows = JoinedRows([DeviceDict({"x": [1]}), DeviceDict({"x": [2, 3]})])
        >>> len(rows.__getitems__([2, 0]))
        2
        """
        at = row_indices(indices, len(self), self.parts[0].device)
        return self._take(at).rows

    def _take(self, at: torch.Tensor) -> DeviceDict[Any]:
        """Copy rows into a batch."""
        if (spans := self._spans()) is not None and (taken := spans.take(at)) is not None:
            return self._like._with_leaves(iter(taken), self._like._device)
        part = torch.bucketize(at, torch.tensor(self._ends, device=at.device), right=True)
        order = part.argsort(stable=True)
        numbers, counts = part[order].unique_consecutive(return_counts=True)
        if len(numbers) < 2:
            number = int(numbers[0]) if len(numbers) else 0
            return self.parts[number].rows.__getitems__(at - self._start(number))._dict
        sizes: list[int] = counts.tolist()
        local = at[order].split(sizes)
        joined = cat(
            [self.parts[i].rows[each - self._start(i)] for i, each in zip(numbers.tolist(), local, strict=True)]
        )
        return joined.rows.__getitems__(order.argsort())._dict

    def __iter__(self) -> Iterator[DeviceDict[Any]]:
        """Yield every row, as ``rows[i]`` returns it."""
        for d in self.parts:
            yield from d.rows

    def column(self, key: str | Path) -> Any:
        """Join a field of all dicts: a tensor, a `Ragged`, or a nested dict, with all rows.

        Args:
            key: a key, or a path into nested dicts.

        Raises: ``KeyError`` for a missing key. Cost: a copy of the field.

        >>> from tensordict_lite import DeviceDict, JoinedRows
        >>> rows = JoinedRows([DeviceDict({"x": [1, 2]}), DeviceDict({"x": [3]})])
        >>> rows.column("x"), rows[rows.column("x") > 1]["x"]
        (tensor([1, 2, 3]), tensor([2, 3]))
        """
        return cat([d.select(key) for d in self.parts])[as_path(key)]

    def equal(self, key: str | Path, value: Any) -> torch.Tensor:
        """Return a bool mask: where a field of the dicts is ``value``, as `DeviceDict.equal` does.

        >>> from tensordict_lite import DeviceDict, JoinedRows
        >>> rows = JoinedRows([DeviceDict({"kind": ["cat", "dog"]}), DeviceDict({"kind": ["dog"]})])
        >>> rows.equal("kind", "dog")
        tensor([False,  True,  True])
        """
        return torch.cat([d.equal(key, value) for d in self.parts])

    def describe(self, progress: Progress = None) -> Description:
        """Statistics of each field over all dicts, as `DeviceDict.describe` returns them.

        >>> from tensordict_lite import DeviceDict, JoinedRows
        >>> JoinedRows([DeviceDict({"x": [1]}), DeviceDict({"x": [2, 3]})]).describe().tolist()[0]["mean"]
        2.0
        """
        return statistics(self.parts, repr(self), progress)

    def _start(self, part: int) -> int:
        return self._ends[part - 1] if part else 0

    def __repr__(self) -> str:
        total = size(sum(nbytes(tensor) for part in self.parts for tensor in part._tensors()))
        return f"JoinedRows({len(self)} rows of {len(self.parts)} dicts, {total})"


def _fit_one_table(value: torch.Tensor, first: torch.Tensor) -> bool:
    """Whether two columns have one dtype and as many dimensions. `cat` promotes dtypes and joins [0] with any shape."""
    return value.dtype is first.dtype and value.dim() == first.dim()
