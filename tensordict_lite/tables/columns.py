"""Change the columns of a table: `add_column` and `drop_column`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._dict.device_dict import DeviceDict
from .._dict.rows import Rows
from .._errors import Path, described, dotted
from .._files.atomic_write import FilePath
from .._look.progress import Progress, reporter
from .._tree.fields import fields as fields_in
from .._tree.manifest import Reader, without
from .._tree.missing import missing_key, refuse_unknown_encoders, rows_hint
from .._tree.policy import Encoders, Policy
from .._tree.tree import data_of
from .._tree.walk import refuse_key
from .table import create_columns, empty_dict, table_at_rest
from .writer import append_rows, joined_rows, without_rows

_RANGE = 64 << 20
"""The bytes of a new column that have one checksum."""


def add_column(
    folder: FilePath,
    key: str | Path,
    batches: Iterable[Any],
    *,
    ragged: bool = False,
    encoders: Encoders | None = None,
    progress: Progress = None,
) -> None:
    """Add a column to a table: values that you compute from its rows later, such as embeddings or labels.

    The other columns are neither read nor written. The new column becomes visible at once, when all of its rows are on
    the disk. After an error, an interrupt or a crash before that, the table is as it was. Dicts that were loaded before
    do not change. Needs ``safetensors``.

    Args:
        folder: the folder of the table. The folder of a part is a table too.
        key: the key of the column, or a path into nested dicts, which are made if they are missing.
        batches: the values of consecutive rows, batch by batch: tensors on any device, arrays, lists, strings, a
            `Ragged`, or mappings, which become a nested dict. Together they have one value for each row of the table.
            The first batch gives the dtype and the shape of a row. If it is a list without values, the first batch with
            values gives them. Other batches must fit, as in `RowWriter.write`.
        ragged: True: the rows differ in their first dimension, as for ``RowWriter(ragged=...)``.
        encoders: the encoder of the new strings, or encoders by key. None: the encoder that the table has for this key,
            else ``Utf8()``, whose width is that of the first batch. Like `load`, it needs the encoders of other columns
            that `load` does not build, such as `Tokenizer`.
        progress: a function of (done, total) that counts rows, or True for a bar of ``tqdm``.

    Raises: ``ValueError`` if the table has the key, if the batches have more or fewer rows than the table, and for a
    batch that does not fit, as `RowWriter.write`; ``TypeError`` for a whole column in the place of ``batches``, and for
    a path through a column; ``BlockingIOError`` if a writer is open; `InvalidFileError` for a damaged table;
    ``FileNotFoundError`` or ``IsADirectoryError`` if there is no table; ``ImportError`` without safetensors;
    ``OSError``; the errors of ``batches``.
    Cost: as `RowWriter` for these values. One batch is in memory at a time.

    >>> import tempfile
    >>> from tensordict_lite import load
    >>> from tensordict_lite.tables import RowWriter, add_column
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with RowWriter(folder, like={"x": [0.0]}) as writer:
    ...         writer.write({"x": [1.0, 2.0, 3.0]})
    ...     add_column(folder, "square", (batch["x"] ** 2 for batch in load(folder).rows.batches(2)))
    ...     load(folder)["square"]
    tensor([1., 4., 9.])
    """
    if isinstance(batches, (str, Tensor, np.ndarray, Mapping, Rows)) or not isinstance(batches, Iterable):
        raise TypeError(
            f"add_column takes an iterable of batches, got {described(batches)}; give [values] for one batch"
        )
    path = _as_path(key)
    if encoders is not None and not isinstance(encoders, Mapping):
        encoders = {path[-1]: encoders}
    Policy().override(encoders)  # raises for an invalid argument
    with table_at_rest(folder) as (table, index):
        fields, _ = empty_dict(table, index, encoders)
        if path in fields:
            raise ValueError(f"{dotted(path)} is in this table already; drop_column removes it, or choose another key")
        fields.copy()[path] = torch.empty(0, device="cpu")  # raises for a path through a column
        added, at = fields, ()
        while path[len(at)] in added:
            added, at = added[path[len(at)]], path[: len(at) + 1]
        report = reporter(progress, index.rows, "row")
        first, values = _first_with_values(batches, path)
        new = _new_fields(added, path[len(at) :], at, first, ragged)
        del first
        added.update(new)
        refuse_unknown_encoders(encoders, fields, "this table")
        writer = create_columns(table, index, fields)
        try:
            for batch in values:
                if isinstance(batch, (list, tuple)) and not batch:  # no rows, and not one empty row
                    continue
                value: Any = batch
                for part in reversed(path[len(at) :]):
                    value = {part: value}
                append_rows(writer, new, value, at)
                if writer.rows > index.rows:
                    raise _other_rows(path, index.rows, f"{writer.rows} or more")
                if writer.index.checksums is not None:
                    writer.sync(_RANGE)
                report(writer.rows)
            if writer.rows < index.rows:
                raise _other_rows(path, index.rows, str(writer.rows))
            writer.sync()
        except BaseException:
            writer.discard(index)
            raise
        writer.close()


def drop_column(folder: FilePath, key: str | Path) -> None:
    """Remove a column from a table, or a nested dict with all of its columns. Needs ``safetensors``.

    The column disappears at once. Then its files are removed. Dicts that were loaded before keep the column: the system
    keeps a mapped file until its last reader is gone. After a crash, the next writer or `repair` removes the files.

    Args:
        folder: the folder of the table. The folder of a part is a table too.
        key: the key or the path of the column.

    Raises: ``KeyError`` for a key that the table lacks; ``ValueError`` for the last column, and for a part of a ragged
    column; ``BlockingIOError`` if a writer is open; `InvalidFileError` for a damaged table; ``FileNotFoundError`` or
    ``IsADirectoryError`` if there is no table; ``ImportError`` without safetensors; ``OSError``.
    Cost: replaces ``table.json`` twice, and waits for the disk. No row is read or written.

    >>> import tempfile
    >>> from tensordict_lite import load
    >>> from tensordict_lite.tables import RowWriter, drop_column
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with RowWriter(folder, like={"x": [0], "y": [0]}) as writer:
    ...         writer.write({"x": [1, 2], "y": [3, 4]})
    ...     drop_column(folder, "y")
    ...     list(load(folder))
    ['x']
    """
    path = _as_path(key)
    with table_at_rest(folder) as (table, index):
        reader = Reader(index.manifest, len(index.columns)).keep([path], "this table")
        manifest, kept = without(index.manifest, path)
        if not kept:
            raise ValueError(f"{dotted(path)} has the last columns of this table; remove the folder {table.path!r}")
        left = index._replace(columns=[index.columns[i] for i in kept], manifest=manifest)
        unused = [index.columns[i].file for i in reader.numbers]
        table.write_index(left._replace(unused=unused))
        table.remove_unused(unused)
        table.write_index(left)


def _as_path(key: Any) -> Path:
    if not isinstance(key, (str, tuple)):
        refuse_key(key, (), rows_hint(key))
    if not (path := (key,) if isinstance(key, str) else key):
        raise missing_key({}, path)
    return path


def _first_with_values(batches: Iterable[Any], path: Path) -> tuple[Any, Iterator[Any]]:
    """The first batch that has a dtype, else the last one; and all batches. A list without values has no dtype.

    Raises ``ValueError`` if there is no batch.
    """
    values = (batch._dict if isinstance(batch, Rows) else batch for batch in batches)
    leading: list[Any] = []
    for value in values:
        leading.append(value)
        if not isinstance(value, (list, tuple)) or any(not isinstance(row, (list, tuple)) or row for row in value):
            break
    if not leading:
        raise ValueError(f"{dotted(path)}: there is no batch; the first batch gives the dtype and the shape")
    # Of the list itself, `chain` would keep the first batch to the end.
    return leading[-1], chain(iter(leading), values)


def _new_fields(parent: DeviceDict[Any], rest: Path, at: Path, value: Any, ragged: bool) -> DeviceDict[Any]:
    """A dict without rows with the field at the path ``rest``, from its first batch. ``parent``: the dict at ``at``."""
    path = (*at, *rest)
    given = joined_rows(value, path) if ragged else value
    d: DeviceDict[Any] = DeviceDict._new((), None, parent._policy)
    d._set_path(rest, given, at)
    if not data_of(d):
        raise ValueError(f"{dotted(path)}: a column needs tensors, got {described(value)} without any")
    if ragged and isinstance(value, Mapping):
        raise ValueError(f"{dotted(path)}: ragged=True is for one field; in a mapping, give a Ragged for each field")
    for field in fields_in(d):
        codes = 0 if field.encoder is None else field.encoder.code_ndim or 0  # the dimensions of one string
        if isinstance(field.value, Tensor) and field.value.dim() <= max(ragged, codes):
            inside = " and one in each row" if ragged else ""
            raise ValueError(
                f"{dotted((*at, *field.path))}: a batch has a dimension for the rows{inside}, got {described(value)}; "
                "for a single row or a whole column, give [values]"
            )
    return without_rows(d, frozenset([path] * ragged), at)


def _other_rows(path: Path, rows: int, got: str) -> ValueError:
    return ValueError(f"{dotted(path)}: the table has {rows} rows, and the batches have {got}; the table is unchanged")
