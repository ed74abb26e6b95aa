"""The batch view of a dict: read, write, split and iterate over the first dimension of all fields at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from operator import index as as_int
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .._encoders.protocol import padding
from .._errors import Path, dotted
from .._memory.row_copies import take_batch, take_rows
from .._tree.missing import closest
from .._tree.ragged import Ragged
from .._tree.row_index import row_index
from .._tree.tree import TreeDict, field_encoder, fields_of, refuse_ragged
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
        return _fields(self._dict)[2]

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
        fields, flat, count = _fields(d)
        at = index if type(index) is slice else row_index(index, count, d._device)
        return _with_rows(d, _taken(fields, at), flat, at, count)

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
        fields, flat, count = _fields(d)
        at = row_index(indices, count, d._device)
        if not isinstance(at, Tensor):
            raise TypeError(f"__getitems__ takes a mask or indices, got {type(indices).__name__}")
        if only_tensors(fields):
            return Rows(_with_rows(d, take_batch(fields, at, d._device), flat, at, count))
        return Rows(_with_rows(d, _taken(fields, at), flat, at, count))

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
        d = self._dict
        count = len(self)
        assign_rows(d, index if type(index) is slice else row_index(index, count, d._device), other, count)

    def __iter__(self) -> Iterator[D]:
        """Yield every row, as ``d.rows[i]`` returns it. Without autograd, one call makes the views of many rows."""
        d = self._dict
        fields, flat, count = _fields(d)
        # Autograd rejects in-place writes of tensors that require grad into views of `unbind`.
        unbinds = not torch.is_grad_enabled()
        for start in range(0, count, _ROWS_AT_ONCE):
            part = slice(start, min(start + _ROWS_AT_ONCE, count))
            columns = [_each_row(field, part, unbinds) for field in fields]
            for i, row in enumerate(zip(*columns, strict=True), start):
                yield _with_rows(d, row, flat, i, count)

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
        count, sizes = len(self), _sizes(size)
        if isinstance(sizes, int):
            if sizes < 1:
                raise ValueError(f"split takes a size of at least 1, got {sizes}")
            return [self[start : start + sizes] for start in range(0, count, sizes)]
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
        refuse_ragged(d, ", which has one dimension of rows and none to merge; drop it first")
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
        d: Any = self._dict
        return _plain_rows(d, d.tolist(), len(self))

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
        return f"{type(self._dict).__name__}.rows({len(self)})"

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


def _sizes(given: Any) -> int | list[int]:
    # Convert to Python ints: a sum of NumPy ints could overflow.
    with suppress(TypeError):
        return as_int(given)
    try:
        return [as_int(size) for size in given]
    except TypeError:
        raise TypeError(f"split takes a size or a list of sizes, got {given!r}") from None


def _fields(d: TreeDict[Any]) -> tuple[list[Any], bool, int]:
    """The tensors and the ragged fields of the tree, whether these are all its values, and the number of rows.

    Raises ``ValueError`` with the shapes if the fields do not agree.
    """
    fields, flat = d._tensors_and_kind()
    try:
        if flat:
            found = None
            (count,) = {tensor.shape[0] for tensor in fields}
        else:
            found = list(_field_paths(d))
            (count,) = {_rows_in(field) for _, field in found}
    except (IndexError, ValueError):  # a field without dimensions; none or several sizes
        _refuse_fields(d)
    if found is not None or d._policy.encoders:
        _refuse_one_string(d)
    if found is None:
        return fields, flat, count
    for path, field in found:
        if isinstance(field, Tensor) and field.is_nested:
            raise TypeError(f"{dotted(path)} is a nested tensor, which has no rows here; store Ragged.from_rows(it)")
    return [field for _, field in found], len(found) == len(d) and all(len(path) == 1 for path, _ in found), count


def _refuse_one_string(d: TreeDict[Any], at: Path = ()) -> None:
    """Raise ``ValueError`` for a field that is one string, since the first dimension of its codes is no row."""
    for key, value in d.items():
        if isinstance(value, Ragged):
            continue
        encoder = d._policy.encoders.get(key)
        if encoder is not None and encoder.code_ndim and field_encoder(d, key) is not None:
            codes: list[Tensor] = [value] if isinstance(value, Tensor) else value._tensors()
            if any(one.dim() <= encoder.code_ndim for one in codes):
                name = dotted((*at, key))
                raise ValueError(f"{name} is one string, rows need one for each row; collate([row]) makes a batch")
        if isinstance(value, TreeDict):
            _refuse_one_string(value, (*at, key))


def _field_paths(d: TreeDict[Any]) -> Iterator[tuple[Path, Any]]:
    """The tensors and the ragged fields of the tree with their paths, depth first."""
    return ((path, field) for path, field, _ in fields_of(d) if isinstance(field, (Tensor, Ragged)))


def _rows_in(field: Any) -> int:
    return field.shape[0] if isinstance(field, Tensor) else len(field)


def _refuse_fields(d: TreeDict[Any]) -> NoReturn:
    shapes = [
        f"{dotted(path)} " + (str(list(field.shape)) if isinstance(field, Tensor) else f"[{_rows_in(field)}, *]")
        for path, field in _field_paths(d)
    ]
    listed = ", ".join(shapes[:20]) + (f" and {len(shapes) - 20} more" if len(shapes) > 20 else "")
    single = [path for path, field in _field_paths(d) if isinstance(field, Tensor) and not field.dim()]
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
    for path, value, encoder in fields_of(d):
        if isinstance(value, Tensor):
            own = value.dim() - (padding(encoder, value) is not None)
            if own < dims or value.shape[:dims] != lead:
                raise ValueError(
                    f"{dotted(path)} has the shape {list(value.shape)}; flatten({dims}) needs fields that agree on "
                    f"their first {dims} dimensions, the first field has {list(lead)}"
                )
        elif isinstance(value, list) and len(value) == count:
            raise TypeError(f"{dotted(path)} is a kept list, which has no dimensions to flatten; drop it first")


def _taken(fields: list[Any], at: int | slice | Tensor) -> list[Any]:
    """The rows ``at`` of tensors and ragged fields. Views for an int and a slice."""
    known: list[Any] = []
    if isinstance(at, Tensor):
        if only_tensors(fields):
            return take_rows(fields, at)
        made = iter(take_rows([field for field in fields if isinstance(field, Tensor)], at))
        return [next(made) if isinstance(field, Tensor) else field._take(at, known) for field in fields]
    return [field[at] if isinstance(field, Tensor) else field._take(at, known) for field in fields]


def _each_row(field: Any, part: slice, unbinds: bool) -> Iterable[Tensor]:
    """The rows of a tensor or of a ragged field in a slice, as views. A write to a row may give the field a history."""
    if not isinstance(field, Tensor):
        return field[part].unbind()
    return field[part].unbind() if unbinds else (field[i] for i in range(part.start, part.stop))


def _plain_rows(d: TreeDict[Any], columns: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """The rows of ``columns``, which `DeviceDict.tolist` made of ``d``."""
    lists: list[list[Any]] = []
    for key, column in columns.items():
        if isinstance(column, dict):
            lists.append(_plain_rows(d[key], cast("dict[str, Any]", column), count))
        elif isinstance(d[key], (Tensor, Ragged)) or (isinstance(column, list) and len(column) == count):
            lists.append(column)
        else:
            lists.append([column] * count)
    rows = zip(*lists, strict=True) if lists else ((),) * count
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _copy_rows(d: D, index: Tensor) -> D:
    """The rows at ``index``, which has rows only, as new tensors."""
    fields, flat, count = _fields(d)
    return _with_rows(d, _taken(fields, index), flat, index, count)


def _with_rows(d: D, made: Sequence[Any], flat: bool, at: int | slice | Tensor, count: int) -> D:
    """The same tree with the rows ``at`` of its ``count`` rows.

    ``made``: these rows of each tensor and of each ragged field of the tree. ``flat``: these are all its values.
    """
    if flat:
        return d._new(zip(d, made, strict=True), d._device, d._policy)
    return _rebuilt(d, iter(made), at, count)


def _rebuilt(d: Any, made: Iterator[Any], at: int | slice | Tensor, count: int) -> Any:
    """The same tree with the fields in ``made``, and the objects ``at`` of kept lists with one object per row."""
    items: dict[str, Any] = {}
    for key, value in d.items():
        if isinstance(value, (Tensor, Ragged)):
            items[key] = next(made)
        elif isinstance(value, TreeDict):
            items[key] = _rebuilt(value, made, at, count)
        elif isinstance(value, list) and len(value) == count:
            items[key] = [value[i] for i in at.tolist()] if isinstance(at, Tensor) else value[at]
        else:
            items[key] = value
    return d._new(items, d._device, d._policy)
