"""`RowWriter`: append rows to a table on disk. Values are converted as by ``d[key] = value``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from multiprocessing.util import Finalize
from typing import Any, Literal, NoReturn, cast

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from .._dict.device_dict import DeviceDict
from .._dict.row_values import IN_A_TABLE, fitted
from .._dict.rows import Rows
from .._encoders.protocol import agree
from .._errors import Path, described, dotted, dtype_name, with_path
from .._files.atomic_write import FilePath
from .._memory.dense import is_dense
from .._memory.device import CPU
from .._memory.transfer import transfer
from .._tree.convert import holds_strings
from .._tree.fields import fields as fields_in
from .._tree.fields import ragged_paths
from .._tree.kinds import Field
from .._tree.missing import holds, keys_in, missing_key, refuse_unknown_encoders
from .._tree.policy import Encoders, Policy
from .._tree.ragged import Ragged
from .._tree.tree import TreeDict, data_in
from .._tree.walk import Items, as_dict, ragged_keys
from .format import described_part, part_name
from .table import TableWriter, create_table, is_table, open_table

_LIKE = "the batch that RowWriter got as like="


class RowWriter:
    """Write a table on disk row by row. The table may be larger than the memory. Needs ``safetensors``.

    A table is a folder: one safetensors file for each column, and ``table.json`` with the schema and the row count.
    ``load(folder)`` maps the columns into memory.

    - ``writer.write(batch)``: append the rows of a batch, or one row.
    - ``writer.flush()``: make all rows visible and durable, at once.
    - ``writer.close()``: flush, and release the table. ``with RowWriter(...) as writer:`` closes it.
    - ``len(writer)``: the number of rows, including rows that are not flushed.

    If an exception leaves the block, the table has the rows of the last `flush`, and a ``RuntimeWarning`` counts the
    others. A writer that nobody closes is closed when it is deleted or its process ends, with a ``RuntimeWarning``.

    After a crash, the table has every row of the last `flush`, and it shows no part of a row. The next writer that is
    closed removes what the crash left. One writer at a time can open a table. Any number of readers can load it at the
    same time.

    Args:
        folder: the folder of the table. It is created if it does not exist.
        like: a batch with the fields of a new table: a `DeviceDict`, or a mapping that is converted to one. It gives
            the keys, dtypes, shapes of a row, options and encoders. Its rows are not written. The folder must be empty.
            If you have one row ``sample``, give ``like=collate([sample])``. A column of strings gets the width of this
            batch. Choose a width with ``Utf8(max_length)`` as the encoder. A `Ragged` stays ragged.
        ragged: keys or paths of more fields of ``like`` that become ragged. Their rows may differ in their first
            dimension, such as the bytes of a text or the boxes of an image. `load` returns a `Ragged`. A key stands for
            the fields of that name at every depth, a path for one field.
        append: True: append to the table in ``folder``.
        mode: with ``like``. ``"append"``: append to the table in ``folder``, or create it; ``like`` must fit as a batch
            that you write, with the dtypes of the table. ``"overwrite"``: create a table that replaces a table in
            ``folder``. The first `flush` or `close` replaces it at once. Until then, `load` returns the old table.
        checksums: with ``like``. True: keep a checksum of each flushed range of rows of each column, for `verify`. A
            table that has checksums keeps them.
        part: the number of a part, for several writers at the same time, such as the ranks of a job. The table of the
            part is a folder inside ``folder``. `load_parts` reads all parts as one dataset.
        parts: the number of all parts, with ``part``. Each part stores it, so that `load_parts` finds a missing part.
        encoders: with ``like``, its string encoders, as in `DeviceDict`. With ``append``, the encoders that `load` does
            not build, such as `Tokenizer`. Strings that are encoded keep their encoder, so no other encoder is taken.

    Raises: ``FileExistsError`` for ``like`` if the folder is not empty, except for a table with ``mode``;
    ``FileNotFoundError`` or ``IsADirectoryError`` for ``append`` if there is no table; ``BlockingIOError`` if another
    writer has opened the table; `InvalidFileError` for a damaged table; ``KeyError`` for a key in ``ragged`` or
    ``encoders`` that no field has; ``ValueError`` for another encoder than that of the field, for a ragged field whose
    rows have no dimension, and for ``like`` that does not fit the table with ``mode="append"``; ``TypeError`` for
    fields that files cannot store, as `DeviceDict.save`, and for invalid arguments; ``ImportError`` without
    safetensors; ``OSError``.
    Cost: 4 MiB of memory for buffers (more for rows over 4 MiB), allocated at the first `write`.

    >>> import tempfile
    >>> from tensordict_lite import Utf8, load
    >>> from tensordict_lite.tables import RowWriter
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     first = DeviceDict({"x": [1.0, 2.0], "name": ["Ada", "Bo"]}, encoders={"name": Utf8(8)})
    ...     with RowWriter(f"{folder}/people", like=first) as writer:
    ...         writer.write(first)
    ...         writer.write({"x": 3.0, "name": "Grace"})
    ...     table = load(f"{folder}/people")
    ...     table.rows[[2, 0]].decode("name"), table["x"]
    (['Grace', 'Ada'], tensor([1., 2., 3.]))

    A ragged field stores rows of different lengths, such as texts:

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with RowWriter(folder, like={"text": ["Ada"]}, ragged=["text"]) as writer:
    ...         writer.write({"text": ["To be, or not to be", "No"]})
    ...     table = load(folder)
    ...     table.decode("text"), table.rows[1]["text"].shape
    (['To be, or not to be', 'No'], torch.Size([2]))
    """

    def __init__(
        self,
        folder: FilePath,
        like: Items | Rows[Any] | None = None,
        *,
        ragged: Iterable[str | Path] = (),
        append: bool = False,
        mode: Literal["append", "overwrite"] | None = None,
        checksums: bool = False,
        part: int | None = None,
        parts: int | None = None,
        encoders: Encoders | None = None,
    ) -> None:
        numbers = None
        if part is not None or parts is not None:
            if type(part) is not int or type(parts) is not int or not 0 <= part < parts:
                raise ValueError(
                    "RowWriter takes part= and parts= together, such as a rank and the number of ranks, with "
                    f"0 <= part < parts; got part={part!r} and parts={parts!r}"
                )
            numbers = part, parts
            folder = os.path.join(os.fsdecode(folder), part_name(part))
        keys = ragged_keys(ragged, "RowWriter")
        if mode not in (None, "append", "overwrite"):
            raise ValueError(f"RowWriter takes mode='append' or mode='overwrite', got {mode!r}")
        if mode is not None and (append or like is None):
            raise TypeError(f"RowWriter takes mode={mode!r} with like=, a batch with the fields of the table")
        if append and keys:
            raise TypeError("RowWriter takes ragged= with like=; a table that exists knows its ragged fields")
        if checksums and like is None:
            raise TypeError("RowWriter takes checksums= with like=; a table that exists has checksums already or never")
        if append == (like is not None):
            raise TypeError("RowWriter takes like=, a batch with the fields of a new table, or append=True; give one")
        given, new = (None, None) if like is None else _no_rows(like, encoders, keys)
        if new is None or (mode == "append" and is_table(folder)):
            self._table, fields = open_table(folder, encoders)
            try:
                if numbers is not None and self._table.index.part != numbers:
                    raise ValueError(
                        f"{self._table.folder.path!r} is {described_part(self._table.index.part)}, and RowWriter got "
                        f"part={part}, parts={parts}; give the number of parts that it has, or write to another folder"
                    )
                if given is not None and new is not None:
                    _refuse_other_fields(fields, new, given)
                    if checksums and self._table.index.checksums is None:
                        raise ValueError("this table has no checksums; only a new table can start them")
            except BaseException:
                self._table.close()
                raise
        else:
            fields = new
            self._table = create_table(folder, new, mode == "overwrite", checksums, numbers)
        self._fields: TreeDict[Any] = fields
        # At the end of the process that made the writer. `atexit` does not run in the children of multiprocessing.
        Finalize(self, _close_forgotten, (self._table,), exitpriority=0)

    def write(self, rows: Items | Rows[Any]) -> None:
        """Append the rows of a batch, or one row. If a value does not fit, no row is appended.

        Values are converted as by ``d[key] = value``, on any device, and cast to the dtype of their column. The cast
        may round floating-point numbers. A number that the dtype cannot hold raises an error. Strings are padded to the
        width of their column. The values are copied, so you can change them afterwards.

        A ragged field takes a `Ragged`, a dense tensor, strings, or a list with a value for each row. The padding of
        strings is not written.

        Args:
            rows: a mapping with every field of the table, a `DeviceDict`, or its ``rows``. The first dimension of each
                value counts the rows. If no value has this dimension, the mapping is one row.

        Raises: ``ValueError`` that names the field, for keys, shapes, dtypes, numbers, encoders and strings that do not
            fit; the errors of ``d[key] = value``; ``OSError``, for example for a full disk; ``ValueError`` if the
            writer is closed; ``RuntimeError`` in a forked process.
        Cost: one copy into a buffer. A full buffer is written to the files. Larger batches are written directly. A
        dtype with a wider range than that of the column takes another pass over the values.
        Collect many single rows first, and write ``collate(rows)``: a call for each row takes longer.

        >>> import tempfile
        >>> from tensordict_lite.tables import RowWriter
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with RowWriter(folder, like={"x": [[1.0, 2.0]]}) as writer:
        ...         writer.write({"x": [1.0, 2.0, 3.0]})
        Traceback (most recent call last):
        ...
        ValueError: 'x': expected rows [..., 2] or one row [2], got float32[3]
        """
        append_rows(self._table, self._fields, _data(rows), ())

    def flush(self) -> None:
        """Make all rows visible to `load`, and durable: they survive a crash of the machine.

        Raises: ``OSError``, for example for a full disk. Then the table has the rows of the last `flush` that
        returned, and you can call `flush` again. After an error of the disk itself, the system may have dropped rows.
        Then every further call raises ``OSError``: close the writer, and open the table again. ``ValueError`` if the
        writer is closed; ``RuntimeError`` in a forked process.
        Cost: waits for the disk. Up to 16 threads flush columns at the same time. Call it every few seconds, not for
        each row.

        >>> import tempfile
        >>> from tensordict_lite import load
        >>> from tensordict_lite.tables import RowWriter
        >>> with tempfile.TemporaryDirectory() as folder, RowWriter(folder, like={"x": [0]}) as writer:
        ...     writer.write({"x": [1, 2]})
        ...     writer.flush()
        ...     load(folder)["x"]
        tensor([1, 2])
        """
        self._table.flush()

    def close(self) -> None:
        """Flush, write the headers of the columns, and let another writer open the table. A second call does nothing.

        Then any program can read the columns as safetensors files.

        Raises: the errors of `flush`; the table is released even then. Cost: as `flush`.

        >>> import tempfile
        >>> from tensordict_lite.tables import RowWriter
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     writer = RowWriter(folder, like={"x": [0]})
        ...     writer.write({"x": [1, 2]})
        ...     writer.close()
        ...     len(writer)
        2
        """
        self._table.close()

    def __len__(self) -> int:
        return self._table.rows

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            self.close()
        else:
            _abandon(self._table, "an exception left the block of a RowWriter of {}")

    def __del__(self) -> None:
        if (table := getattr(self, "_table", None)) is not None:  # None if the constructor raised an error
            _close_forgotten(table)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a RowWriter cannot be pickled; send the folder, and load it there")

    def __repr__(self) -> str:
        table = self._table
        said = ", closed" if table.closed else f", {table.state.pending} not flushed" if table.state.pending else ""
        return f"RowWriter({table.folder.path!r}, {table.rows} rows{said})"


def _close_forgotten(table: TableWriter) -> None:
    """Close the table of a writer that nobody closed, and warn."""
    if table.closed or not table.folder.is_usable:
        _abandon(table, "a RowWriter of {} was not closed after an error of the disk")
        return
    pending = table.state.pending
    table.close()
    warn_caller(
        f"a RowWriter of {table.folder.path!r} was not closed, and {pending} rows are flushed only now; close it, or "
        "write `with RowWriter(...) as writer:`"
    )


def _abandon(table: TableWriter, event: str) -> None:
    """Release a table, and warn if it lacks rows that were written."""
    if lost := table.abandon():
        where = event.format(repr(table.folder.path))
        warn_caller(f"{where}: {lost} rows were not flushed, and the table does not have them")


def warn_caller(text: str) -> None:
    """Warn about rows, at the place of the user's call: two calls above the function that calls this one."""
    warnings.warn(text, RuntimeWarning, stacklevel=4)


def append_rows(table: TableWriter, fields: TreeDict[Any], given: Mapping[str, Any], at: Path) -> None:
    """Append a batch or one row to the columns of ``fields``, which are at the path ``at``. See `RowWriter.write`."""
    tensors, count = _columns(fields, given, at)
    if not all(tensor.is_cpu for tensor in tensors):
        tensors = transfer(tensors, CPU)
    table.append(tensors, 1 if count is None else count)


def _data(given: Any) -> Mapping[str, Any]:
    """The fields of a batch as a mapping. A `DeviceDict` is returned itself, since it has encoders."""
    if isinstance(given, Rows):
        given = given._dict
    return given if isinstance(given, TreeDict) else as_dict(given)


def _no_rows(like: Any, encoders: Encoders | None, ragged: frozenset[Any]) -> tuple[DeviceDict[Any], DeviceDict[Any]]:
    """``like`` as a dict, and a dict on the CPU with its fields, without rows."""
    data: Any = _data(like)
    d = data
    if encoders is not None or not isinstance(data, DeviceDict):
        if encoders is not None:
            _refuse_other_encoders(data, encoders, Policy().override(encoders), ())
        d = DeviceDict[Any](data if isinstance(data, TreeDict) else _with_rows(data, ragged, ()), encoders=encoders)
        refuse_unknown_encoders(encoders, d, _LIKE)
    len(d.rows)  # raises if the fields disagree
    for key in sorted(ragged, key=str):
        if not (holds(d, key) if isinstance(key, tuple) else key in keys_in(d)):
            raise missing_key(d, key, _LIKE)
    return d, without_rows(d, ragged, ())


def _with_rows(data: Mapping[str, Any], ragged: frozenset[Any], at: Path) -> dict[str, Any]:
    """``data`` with the fields that ``ragged`` names as `joined_rows`."""
    out = dict(data)
    for key, value in data.items():
        path = (*at, key)
        if isinstance(value, Mapping) and not isinstance(value, TreeDict):
            out[key] = _with_rows(value, ragged, path)
        elif ragged & {key, path}:
            out[key] = joined_rows(value, path)
    return out


def joined_rows(value: Any, path: Path) -> Any:
    """A list of rows of several lengths, which make no tensor: of numbers as a `Ragged`, of strings as equal rows."""
    given = value.tolist() if isinstance(value, np.ndarray) and value.dtype == object else value
    if not isinstance(given, (list, tuple)) or not all(isinstance(r, (list, tuple, np.ndarray, Tensor)) for r in given):
        return value
    filled = [row for row in given if not isinstance(row, (list, tuple)) or row]
    if not filled or holds_strings(given):
        return filled[:1] * len(given) or value
    try:
        return Ragged.from_rows(given)
    except (TypeError, ValueError) as error:
        raise with_path(error, path) from error


def _refuse_other_fields(fields: TreeDict[Any], like: DeviceDict[Any], given: DeviceDict[Any]) -> None:
    """Raise ``ValueError`` unless ``like`` fits the table as a batch does, with the same ragged fields and dtypes.

    ``given``: ``like`` with its rows. The dtype of a field without values may differ.
    """
    ours, theirs = set(ragged_paths(fields)), set(ragged_paths(like))
    for path in sorted(path for path in ours ^ theirs if path in fields and path in like):
        kinds = ["a ragged field", "a tensor"] if path in ours else ["a tensor", "a ragged field"]
        raise ValueError(f"{dotted(path)}: expected {kinds[0]} as in this table, got {kinds[1]} of like= and ragged=")
    _columns(fields, like, ())
    for field in fields_in(fields):
        path, column, value = field.path, data_in(field.value), data_in(given[field.path])
        if column is not None and value is not None and value.numel() and value.dtype is not column.dtype:
            raise ValueError(
                f"{dotted(path)}: this table has {dtype_name(column.dtype)}, like= has {dtype_name(value.dtype)}; "
                "convert it first, or open the table with append=True"
            )


def _refuse_other_encoders(like: Mapping[str, Any], encoders: Encoders, asked: Policy, at: Path) -> None:
    """Raise ``ValueError`` if ``encoders`` has another encoder for codes in ``like``. ``asked``: its policy."""
    for key, value in like.items():
        found = like._policy.encoders.get(key) if isinstance(like, TreeDict) else None
        given = asked.encoders.get(key) if isinstance(encoders, Mapping) else asked.default_encoder
        if found is not None and given is not None:
            agree(given, found, (*at, key), " of like=")
        if isinstance(value, Mapping):
            _refuse_other_encoders(cast("Mapping[str, Any]", value), encoders, asked, (*at, key))


def without_rows(d: Any, ragged: frozenset[Any], at: Path) -> Any:
    """The fields of ``d`` without rows, for a new table. ``ragged``: the keys and paths of more ragged fields."""
    return d._with_leaves((_without_rows(field, ragged) for field in fields_in(d, at)), CPU)


def _without_rows(field: Field, ragged: frozenset[Any]) -> Any:
    path, value = field.path, field.value
    if isinstance(value, list):
        raise TypeError(
            f"{dotted(path)}: expected a column or one value for all rows, got a list, with one for each row; "
            "give strings an encoder, or make it a tuple"
        )
    if isinstance(value, Ragged):
        shape = value.values.shape[1:]
    elif not isinstance(value, Tensor) or not is_dense(value):
        return value  # refused by `create_table`, which names the field
    elif ragged.isdisjoint((path, path[-1])):
        return torch.empty((0, *value.shape[1:]), dtype=value.dtype, device="cpu")
    elif value.dim() < 2:
        raise ValueError(f"{dotted(path)}: rows of a ragged field have a dimension, like= has {described(value)}")
    else:
        shape = value.shape[2:]
    values = torch.empty((0, *shape), dtype=value.dtype, device="cpu")
    return Ragged(values, torch.zeros(1, dtype=torch.int64, device="cpu"))


def _columns(fields: TreeDict[Any], given: Mapping[str, Any], at: Path) -> tuple[list[Tensor], int | None]:
    """Convert and validate the values for the columns below ``fields``.

    Returns their tensors in the order of the columns, see `TableWriter.append`, and the number of rows. The number is
    None if the batch is one row, without a dimension for the rows.
    """
    tensors: list[Tensor] = []
    counts: dict[Path, int | None] = {}
    for field, rows in fitted(fields, given, at, IN_A_TABLE):
        path = field.path
        found, count = field.kind.columns(field, rows)
        if not found:  # a kept value, which belongs to all rows
            continue
        tensors += found
        counts[path] = count
        first = next(iter(counts))
        if counts[path] != counts[first]:
            shown = [f"{dotted(one)} has {_count_of_rows(counts[one])}" for one in (path, first)]
            raise ValueError(", and ".join(shown))
    return tensors, next(iter(counts.values()), None)


def _count_of_rows(count: int | None) -> str:
    return "no dimension for rows" if count is None else f"{count} row{'' if count == 1 else 's'}"
