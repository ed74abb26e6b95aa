"""The batch view of a dict: read, write, split and iterate over the first dimension of all fields at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from operator import index as as_int
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .._errors import Path, described, dotted
from .._look.page import Line, Page, as_html, as_text, one_line
from .._look.values import rows_page
from .._memory.device import CPU
from .._memory.row_copies import take_batch, take_rows
from .._tree.fields import field_of, fields, tolist
from .._tree.kinds import DENSE, KEPT, RAGGED, At
from .._tree.missing import closest
from .._tree.row_index import row_index, row_indices
from .._tree.tree import TreeDict
from .._tree.walk import only_tensors
from .by_value import groups, sorted_order
from .row_assignment import assign_rows
from .windows import Spans, Windows

D = TypeVar("D", bound=TreeDict[Any])

_ROWS_AT_ONCE = 64
"""Rows per ``unbind`` call in iteration: "iterate rows" of `make guard`."""


class Rows(Dataset[D]):
    """The view of a dict as a batch: ``d.rows``. The rows are the first dimension of all fields.

    - ``len(rows)``: the number of rows.
    - ``rows[3]``, ``rows[8:16]`` and iteration: dicts of views, of the class of ``d``.
    - ``rows[mask]``, ``rows[indices]``: a dict of new tensors.
    - ``rows[index] = other``: write to all fields in place.
    - ``DataLoader(rows, batch_size)``: the rows are a dataset.

    The view holds the dict itself: it shows fields and rows that you write later.

    Raises: ``ValueError`` with the shapes of the fields if their first dimensions differ. Cost: nothing is copied.

    >>> from tensordict_lite import DeviceDict
    >>> rows = DeviceDict({"x": [1.0, 2.0, 3.0], "name": ["Ada", "Bo", "Cy"]}).rows
    >>> len(rows), rows[1:].decode("name")
    (3, ['Bo', 'Cy'])
    """

    __slots__ = ("_dict",)

    def __init__(self, d: D) -> None:
        self._dict = d

    def __len__(self) -> int:
        """The size of the first dimension. Raises ``ValueError`` with all shapes if the fields do not share it."""
        return _rows_of(self._dict)[2]

    def __getitem__(self, index: Any) -> D:
        """Return rows as a dict of the same class. ``index``: an int, a slice, a mask or indices.

        Ints and slices give views; a row of a ragged field is a tensor. Masks and indices (tensor, array, list or
        range) give copies. A row that is a view shares tensors with the dict, and not its keys: ``d.rows[0]["x"] = 1``
        changes the row alone. Write ``d.rows[0]["x"].fill_(1)`` or ``d["x"][0] = 1``.

        Raises: ``IndexError`` for a row that is out of range, ``TypeError`` for an invalid index. Only the kernels of
            torch check indices that are on an accelerator.
        Cost: views, or a copy of these rows. On an accelerator, a mask and a ragged field need a synchronization.

        >>> from tensordict_lite import DeviceDict
        >>> d = DeviceDict({"x": [1, 2, 3]})
        >>> d.rows[0]["x"], d.rows[[2, 0]]["x"], d.rows[d["x"] > 1]["x"]
        (tensor(1), tensor([3, 1]), tensor([2, 3]))
        """
        d = self._dict
        columns = _rows_of(d)
        at = index if type(index) is slice else row_index(index, columns[2], d._device)
        return _rows_at(d, columns, at)

    def __getitems__(self, indices: Sequence[int] | Tensor) -> Rows[D]:
        """Copy rows into a batch, and return the rows of the batch. ``DataLoader(d.rows, batch_size)`` calls it.

        A ``collate_fn`` gets the rows as a sequence. `collate` and torch's ``default_collate`` return the batch itself.
        In a DataLoader worker the rows are copied into memory that can be sent.

        Args:
            indices: a mask or indices, as for ``d.rows[indices]``.

        Raises: the errors of ``d.rows[indices]``. Cost: a copy of these rows.

        >>> from torch.utils.data import DataLoader
        >>> from tensordict_lite import DeviceDict
        >>> table = DeviceDict({"x": list(range(6)), "name": list("abcdef")})
        >>> [batch.decode("name") for batch in DataLoader(table.rows, batch_size=4)]
        [['a', 'b', 'c', 'd'], ['e', 'f']]
        """
        d = self._dict
        columns = _rows_of(d)
        at = row_indices(indices, columns[2], d._device)
        return Rows(_rows_at(d, columns, at, batch=True))

    def __setitem__(self, index: Any, other: Mapping[str, Any]) -> None:
        """Write ``other`` into these rows, in place. ``other`` must have every key of the dict.

        Values are converted as by ``d[key] = value``, and Python numbers in the dtype of the field. They are broadcast
        and cast as by ``tensor[index] = value``: integers of a wider dtype wrap. Strings are padded to the width of
        their field. A kept list with one object per row takes an object, or a list of objects.

        Raises: ``ValueError`` for keys, shapes, dtypes, numbers or encoders that do not fit; the errors of
            ``d[key] = value``.
            After an error the dict is unchanged.
        Cost: one write per field. Values that share memory with the dict are copied first.

        >>> from tensordict_lite import DeviceDict
        >>> d = DeviceDict({"x": [1, 2, 3]})
        >>> d.rows[1:] = {"x": 0}
        >>> d["x"]
        tensor([1, 0, 0])
        """
        assign_rows(self, index, other)

    def __iter__(self) -> Iterator[D]:
        """Yield every row, as ``d.rows[i]`` returns it. Without autograd, one call makes the views of many rows."""
        d = self._dict
        found, flat, count = _rows_of(d)
        items = list(d.items())
        for start in range(0, count, _ROWS_AT_ONCE):
            part = range(start, min(start + _ROWS_AT_ONCE, count))
            if flat and torch.is_grad_enabled():  # then `DenseKind.each` takes one row at a time, too
                for i in part:
                    yield d._new({key: tensor[i] for key, tensor in items}, d._device, d._policy)
                continue
            if flat:
                columns = [DENSE.each(tensor, part, count) for tensor in found]
            else:
                columns = [field.kind.each(field.value, part, count) for field in found]
            for row in zip(*columns, strict=True):
                if flat:
                    yield d._new(zip(d, row, strict=True), d._device, d._policy)
                else:
                    yield d._with_leaves(iter(row), d._device)

    def batches(
        self,
        size: int,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        generator: torch.Generator | None = None,
    ) -> Iterator[D]:
        """Iterate over batches of rows in this process, without a DataLoader.

        Args:
            size: the rows per batch. The last batch may be smaller.
            shuffle: visit the rows in random order. The batches are copies. Without it they are views.
            drop_last: leave out a last batch that is smaller.
            generator: a generator for the random order, on the CPU or on the device of the dict.

        Raises: ``ValueError`` for a size below 1, ``TypeError`` for arguments of another type; the error of ``len``.
        Cost: views without ``shuffle``. With it, one permutation as in `shuffle`, and one copy of each batch.

        >>> from tensordict_lite import DeviceDict
        >>> [batch["x"].tolist() for batch in DeviceDict({"x": list(range(5))}).rows.batches(2)]
        [[0, 1], [2, 3], [4]]
        """
        size = _positive("batches", size, "a size", "a size of at least 1")
        count = len(self)
        end = count - count % size if drop_last else count
        if not shuffle:
            if generator is not None:
                raise TypeError("batches takes a generator with shuffle=True only")
            return (self[start : min(start + size, end)] for start in range(0, end, size))
        parts = self._permutation("batches", generator)[:end].split(size) if end else ()
        return (_copy_rows(self._dict, at) for at in parts)

    def split(self, size: int | Sequence[int]) -> list[D]:
        """Split the rows into chunks, as ``torch.split`` does.

        Args:
            size: the rows per chunk, where the last chunk may be smaller; or a list with the size of each chunk.

        Raises: ``ValueError`` for a size below 1, and for sizes that do not add up to the number of rows; ``TypeError``
            for arguments of another type; the error of ``len``.
        Cost: the chunks are views.

        >>> from tensordict_lite import DeviceDict
        >>> [part["x"].tolist() for part in DeviceDict({"x": [1, 2, 3]}).rows.split([2, 1])]
        [[1, 2], [3]]
        """
        count, given = len(self), cast(Any, size)
        try:
            sizes = [as_int(one) for one in given]  # Python ints: a sum of NumPy ints could overflow
        except TypeError:
            step = _positive("split", given, "a size or a list of sizes", "a size of at least 1")
            return [self[start : start + step] for start in range(0, count, step)]
        if sum(sizes) != count or min(sizes, default=0) < 0:
            raise ValueError(f"split takes sizes that add up to the {count} rows, got {sizes}")
        return [self[end - part : end] for part, end in zip(sizes, accumulate(sizes), strict=True)]

    def shuffle(self, generator: torch.Generator | None = None) -> D:
        """Return a copy with all rows in random order.

        Args:
            generator: a generator for the random order, on the CPU or on the device of the dict.

        Raises: ``TypeError`` if ``generator`` is not a ``torch.Generator``; the error of ``len``.
        Cost: one permutation and a copy of every tensor. If the permutation is made on the CPU for a dict on an
            accelerator, its copy to the accelerator synchronizes.

        >>> from tensordict_lite import DeviceDict
        >>> sorted(DeviceDict({"x": [1, 2, 3]}).rows.shuffle()["x"].tolist())
        [1, 2, 3]
        """
        d = self._dict
        return _copy_rows(d, self._permutation("shuffle", generator))

    def flatten(self, dims: int = 2) -> D:
        """Merge the first ``dims`` dimensions of every field into one: ``[T, B, ...]`` becomes ``[T * B, ...]``.

        Args:
            dims: the number of dimensions to merge, at least 1.

        Raises: ``ValueError`` that names the field, if it has fewer dimensions or other sizes than the first field;
            ``TypeError`` for a kept list with one object per row, and for ``dims`` of another type.
        Cost: views where torch can make a view, as by ``Tensor.flatten``; otherwise a copy.

        >>> from tensordict_lite import DeviceDict
        >>> rollout = DeviceDict({"obs": [1.0, 2.0], "done": False}).new_zeros(128, 8)
        >>> rollout.rows.flatten()["obs"].shape
        torch.Size([1024, 2])
        """
        dims = _positive("flatten", dims, "a number of dimensions", "at least 1 dimension")
        d = self._dict
        count = len(self)
        _refuse_flatten(d, dims, count)
        return d._map_data(lambda tensor: tensor.flatten(0, dims - 1))

    def group_by(self, *keys: str | Path) -> dict[Any, D]:
        """Group the rows by the values of a field: a dict from each distinct value to its rows, sorted by value.

        Strings are decoded. Each group has its rows in their order. The groups are views of one copy of all rows.

        Args:
            keys: the key or path of a field with one value per row: a number, or an encoded string. Several fields
                group by all their values: then the keys of the result are tuples.

        Raises: ``KeyError`` for a missing key, ``TypeError`` or ``ValueError`` for a field that has no single value per
        row or that cannot be decoded. Cost: a sort for each key and a copy of all rows, with a synchronization.

        >>> from tensordict_lite import DeviceDict
        >>> d = DeviceDict({"species": ["cat", "dog", "cat"], "age": [1, 1, 2], "mass": [4.0, 20.0, 5.0]})
        >>> {species: part["mass"].tolist() for species, part in d.rows.group_by("species").items()}
        {'cat': [4.0, 5.0], 'dog': [20.0]}
        >>> list(d.rows.group_by("species", "age"))
        [('cat', 1), ('cat', 2), ('dog', 1)]
        """
        values, order, counts = groups(self._dict, keys)
        ordered = _copy_rows(self._dict, order)
        return dict(zip(values, Rows(ordered).split(counts.tolist()), strict=True))

    def sort_by(self, *keys: str | Path, descending: bool = False) -> D:
        """Return a copy with the rows sorted by the values of a field. Rows with equal values keep their order.

        Strings are sorted by their codes: with `Utf8` as Python sorts them, with a `Vocabulary` in the order of its
        tokens. NaN counts as the largest number.

        Args:
            keys: the key or path of a field with one value per row: a number, or an encoded string. Of several fields,
                the next one decides where the values of the first are equal.
            descending: start with the largest value of every field.

        Raises: ``KeyError`` for a missing key, ``TypeError`` or ``ValueError`` for a field that has no single value per
        row. Cost: a sort for each key and a copy of all rows.

        >>> from tensordict_lite import DeviceDict
        >>> d = DeviceDict({"name": ["Cy", "Ada", "Bo"], "age": [7, 7, 9]})
        >>> d.rows.sort_by("name").decode("name"), d.rows.sort_by("age", descending=True).decode("name")
        (['Ada', 'Bo', 'Cy'], ['Bo', 'Cy', 'Ada'])
        """
        return _copy_rows(self._dict, sorted_order(self._dict, keys, descending))

    def tolist(self) -> list[dict[str, Any]]:
        """Return a plain dict of Python numbers, lists and decoded strings for each row.

        A kept list with one object per row gives an object to each row. Every row gets any other kept object.

        Raises: the errors of `DeviceDict.tolist` and of ``len``. Cost: that of `DeviceDict.tolist`, and a dict per row.

        >>> from tensordict_lite import DeviceDict
        >>> DeviceDict({"name": ["Ada", "Bo"], "box": [[1, 2], [3, 4]]}).rows.tolist()
        [{'name': 'Ada', 'box': [1, 2]}, {'name': 'Bo', 'box': [3, 4]}]
        """
        count = len(self)
        d: Any = self._dict
        return _plain_rows(tolist(d if d._device == CPU else d.cpu(), count), count)

    def windows(self, spans: Spans, *, within: str | Path | None = None, mask: str = "mask") -> Windows[D]:
        """Return a dataset with a window for each row: fields of a time series at this row and at rows around it.

        Args:
            spans: for each key or path, the offsets of the rows in its window: a range or a list of ints. The key of a
                nested dict stands for all its fields. The other fields have the row itself.
            within: the key of a field with one value per row. Rows with equal values that follow each other are a
                sequence, such as an episode. None: all rows are one sequence.
            mask: the key of a new nested dict with a bool field ``[batch, offsets]`` for each key of ``spans``: True
                for a row of the sequence. An offset outside the sequence repeats the nearest row, and has False.

        Raises: ``KeyError`` for a missing key; ``TypeError`` or ``ValueError`` for other offsets, for a field whose
            rows differ in shape, and for a field with the name of the mask.
        Cost: a batch copies the rows of its windows, at once. With ``within``, it also copies and compares that field
        for each row of the batch and each offset from the lowest to the highest, so writes to the field are seen.

        >>> from torch.utils.data import DataLoader
        >>> from tensordict_lite import DeviceDict
        >>> d = DeviceDict({"episode": [0, 0, 0, 1, 1], "obs": [0, 1, 2, 3, 4]})
        >>> windows = d.rows.windows({"obs": range(-1, 2)}, within="episode")
        >>> batch = next(iter(DataLoader(windows, batch_size=4)))
        >>> batch["obs"].tolist(), batch["episode"].tolist()
        ([[0, 0, 1], [0, 1, 2], [1, 2, 2], [3, 3, 4]], [0, 0, 0, 1])
        >>> batch["mask", "obs"][0].tolist()
        [False, True, True]
        """
        return Windows(self._dict, spans, within, mask)

    def _permutation(self, method: str, generator: torch.Generator | None) -> Tensor:
        """A random order of the rows, on the device of the dict."""
        if not isinstance(generator, (torch.Generator, type(None))):
            raise TypeError(f"{method} takes a torch.Generator, got {type(generator).__name__}")
        where = "cpu" if generator is None else generator.device
        order = torch.randperm(len(self), generator=generator, device=where)
        return order if self._dict._device is None else order.to(self._dict._device)

    def __repr__(self) -> str:
        return as_text(self._page())

    def _repr_html_(self) -> str:
        return as_html(self._page(pictures=True))

    def _page(self, pictures: bool = False) -> Page:
        """The first rows, or why there are none."""
        try:
            count = len(self)
        except (TypeError, ValueError) as error:
            lines = [Line((text,)) for text in wrap(one_line(str(error)), 80)]
            return Page(f"{type(self._dict).__name__}.rows(none)", ("",), lines, False)
        return rows_page(self._dict, count, pictures)

    if not TYPE_CHECKING:  # type checkers shall report unknown names

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{_way_out(self, name)}")


_INSTEAD = {
    **dict.fromkeys(("where", "filter", "query", "take"), 'rows[mask_or_indices], such as rows[d["x"] > 0]'),
    **dict.fromkeys(("sample", "choice"), "rows[torch.randint(len(rows), (n,))], or rows.shuffle() for all rows"),
    **dict.fromkeys(("append", "extend", "insert"), "cat([d, other]), or a RowWriter for a table on disk"),
    **dict.fromkeys(("map", "apply"), "d.map(function), a function of whole fields"),
    "sort": "rows.sort_by(key)",
    **dict.fromkeys(("drop", "remove"), "rows[mask] with a mask of the rows to keep"),
    "groupby": "rows.group_by(key)",
    "head": "rows[:n]",
}
"""What to use instead of methods that `Rows` does not have."""


def _way_out(rows: Rows[Any], name: str) -> str:
    if name.startswith("_"):
        return ""
    if name in _INSTEAD:
        return f"; use {_INSTEAD[name]}"
    if name in rows._dict:
        return f"; a field is d[{name!r}], and of some rows rows[index][{name!r}]"
    close = closest(name, [known for known in dir(Rows) if not known.startswith("_")])
    return f"; did you mean {close!r}?" if close else "; rows[index] is a dict of these rows"


def _positive(method: str, given: Any, what: str, least: str) -> int:
    """``given`` as an int of at least 1."""
    try:
        number = as_int(given)
    except TypeError:
        raise TypeError(f"{method} takes {what}, got {given!r}") from None
    if number < 1:
        raise ValueError(f"{method} takes {least}, got {number}")
    return number


def _rows_of(d: TreeDict[Any]) -> tuple[list[Any], bool, int]:
    """The tensors of a dict that has plain tensors alone, or every `Field`; which of both; and the number of rows.

    Raises ``ValueError`` with the shapes if the fields do not agree.
    """
    flat = only_tensors(d.values())
    tensors: list[Any] = list(d.values()) if flat else []
    try:
        counts: set[Any] = {tensor.shape[0] for tensor in tensors}
        if len(counts) == 1 and not d._policy.encoders:
            return tensors, True, counts.pop()
        found = [field_of(d, key) for key in d._policy.encoders if key in d] if flat else fields(d)
        counts.update([field.kind.count(field) for field in found])
    except IndexError:  # a field without dimensions
        _refuse_fields(d)
    counts.discard(None)
    if len(counts) != 1:
        _refuse_fields(d)
    count = counts.pop()
    for field in () if flat else found:
        field.kind.require_rows(field, count)
    return (tensors if flat else found), flat, count


def _refuse_fields(d: TreeDict[Any]) -> NoReturn:
    shown = [(field, shape) for field in fields(d) if (shape := field.kind.shape(field.value))]
    shapes = [f"{dotted(field.path)} {shape}" for field, shape in shown]
    listed = ", ".join(shapes[:20]) + (f" and {len(shapes) - 20} more" if len(shapes) > 20 else "")
    single = [field.path for field, shape in shown if shape == "[]"]
    hint = ""
    if len(single) == len(shapes) > 0:
        hint = "; collate([row]) makes a batch"
    elif single:
        hint = f"; {dotted(single[0])} has one value for all rows: drop it first, or store a value for each row"
    raise ValueError(
        f"rows need fields that agree on their first dimension, this {type(d).__name__} has {listed or 'no tensors'}"
        f"{hint}"
    )


def _refuse_flatten(d: TreeDict[Any], dims: int, count: int) -> None:
    """Raise the error for the first field whose first ``dims`` dimensions are not those of the first tensor."""
    lead = d._tensors()[0].shape[:dims]
    for field in fields(d):
        own, value = field.kind.dims(field), field.value
        if own is not None and (own < dims or value.shape[:dims] != lead):
            raise ValueError(
                f"{dotted(field.path)}: flatten({dims}) takes fields that agree on their first {dims} dimensions, "
                f"{list(lead)} as in the first field, got {list(value.shape)}"
            )
        if own is None and (field.kind is RAGGED or KEPT.has_rows(value, count)):
            raise TypeError(
                f"{dotted(field.path)}: flatten takes fields with dimensions, got {described(value)}; drop it first"
            )


def _rows_at(d: D, columns: tuple[list[Any], bool, int], at: int | slice | Tensor, batch: bool = False) -> D:
    """The same tree with some rows. ``batch``: copy them into memory that can be sent, if this is a worker process."""
    found, flat, count = columns
    if flat and not isinstance(at, Tensor):
        return d._new({key: tensor[at] for key, tensor in d.items()}, d._device, d._policy)
    dense = found if flat else [field.value for field in found if isinstance(field.value, Tensor)]
    if isinstance(at, Tensor):
        made = take_batch(dense, at, d._device) if batch else take_rows(dense, at)
    else:
        made = [tensor[at] for tensor in dense]
    if flat:
        return d._new(zip(d, made, strict=True), d._device, d._policy)
    rest, rows = iter(made), At(at, count, [])
    leaves = [next(rest) if isinstance(field.value, Tensor) else field.kind.rows(field.value, rows) for field in found]
    return d._with_leaves(iter(leaves), d._device)


def _copy_rows(d: D, index: Tensor) -> D:
    """The rows at ``index``, which has rows only, as new tensors."""
    return _rows_at(d, _rows_of(d), index)


def _plain_rows(columns: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """``columns``: nested dicts of lists with an item for each row."""
    lists = [_plain_rows(column, count) if isinstance(column, dict) else column for column in columns.values()]
    rows = zip(*lists, strict=True) if lists else ((),) * count
    return [dict(zip(columns, row, strict=True)) for row in rows]
