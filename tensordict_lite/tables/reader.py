"""Read tables: map the rows of their columns into memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from io import FileIO
from typing import Any, BinaryIO, TypeVar

from torch import Tensor

from .._files.atomic_write import FilePath
from .._files.safetensors import Wanted, invalid_file, open_regular
from .._memory.device import CPU
from .._memory.mapped import map_append_only
from .._memory.ragged import problem_of_lengths
from .._tree.manifest import invalid
from .._tree.tree import share_lengths
from .format import VALUES, Column, TableIndex, read_index

_T = TypeVar("_T")


def read_table(cls: Any, path: FilePath, wanted: Wanted) -> Any:
    """Load the table in a folder as a dict of class ``cls`` on the CPU, without validating it against the class."""
    rows = wanted.rows
    if rows is not None and (type(rows) is not int or rows < 0):
        raise ValueError(f"rows= is the number of rows to load, got {rows!r}")
    folder = os.path.abspath(os.fsdecode(path))

    def mapped(index: TableIndex) -> tuple[Any, int]:
        reader = wanted.reader(index.manifest, len(index.columns), folder)
        count = index.rows if rows is None else min(rows, index.rows)
        tensors = {i: _map_field(folder, index.columns, i, count) for i in reader.numbers}
        out: Any = reader.build(cls, tensors.__getitem__, CPU, trusted=False)
        share_lengths(out)
        return out, count

    with invalid_file(folder, wanted.library.SafetensorError, RuntimeError):
        out, count = of_one_table(folder, mapped)
    if rows not in (None, count):
        raise ValueError(f"{folder!r} has {count} rows, and rows={rows} asks for more")
    return out


def of_one_table(folder: str, read: Callable[[TableIndex], _T]) -> _T:
    """Call ``read``, which opens files of the columns by name, until ``table.json`` has the same columns afterwards.

    Another process may replace columns meanwhile, and give the names of their files to new ones. Then the result or the
    error of ``read`` means nothing. Nor does an error about a table at rest that a writer has opened meanwhile.
    """
    after = index_of(folder)
    while True:
        index = after
        try:
            out = read(index)
        except Exception:
            after = index_of(folder)
            if after == index or (after.columns == index.columns and index.unused is not None):
                raise
            continue
        after = index_of(folder)
        if after.columns == index.columns:
            return out


def index_of(folder: str) -> TableIndex:
    """Read ``table.json``. Raises the errors of `read_index`."""
    return read_index(folder, lambda name: open_regular(os.path.join(folder, name)))


def _map_field(folder: str, columns: Sequence[Column], i: int, rows: int) -> Tensor:
    """Map the rows of one column into memory."""
    column = columns[i]
    values = max(0, int(_map_field(folder, columns, i + 1, rows)[-1])) if column.kind == VALUES else 0
    length = column.length(rows, values)
    if not rows or not length:  # the file may be missing: the writer may have been killed while it created the table
        return column.without_rows()
    path = os.path.join(folder, column.file)
    with missing_file(column.file), open_regular(path) as file:
        return _map_rows(file, path, column, length)


def count_values(file: BinaryIO | FileIO, path: str, column: Column, length: int) -> int:
    """The number of values of a ragged field, from the ``length`` offsets in an open file. Cost: reads them once.

    Raises `InvalidManifest` unless the offsets ascend from 0, and the error of `check_size`.
    """
    offsets = _map_rows(file, path, column, length)
    if reason := problem_of_lengths(offsets) or ("'offsets' does not start at 0" if offsets[0] else ""):
        invalid(f"{column.file!r}: {reason}")
    return int(offsets[-1])


def _map_rows(file: BinaryIO | FileIO, path: str, column: Column, length: int) -> Tensor:
    """Map the rows of an open file into memory. Raises the error of `check_size`."""
    check_size(file, column, length)
    return map_append_only(file.fileno(), path, column.header_size, column.dtype, (length, *column.shape))


@contextmanager
def missing_file(name: str) -> Generator[None]:
    """Turn the error about a file that does not exist into `InvalidManifest`."""
    try:
        yield
    except FileNotFoundError:
        invalid(f"the file {name!r} is missing")


def check_size(file: BinaryIO | FileIO, column: Column, length: int) -> None:
    """Raise `InvalidManifest` unless the file has this many rows or more. Its header is not read."""
    end, found = column.end(length), os.fstat(file.fileno()).st_size
    if found < end:
        invalid(f"{column.file!r} has {found} bytes, and {length} rows take {end}")
