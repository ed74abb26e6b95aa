"""Read tables: map the rows of their columns into memory."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from io import FileIO
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .._errors import Path
from .._files.atomic_write import FilePath
from .._files.safetensors import invalid_file, open_regular, reading
from .._memory.device import CPU
from .._memory.mapped import map_append_only
from .._memory.ragged import problem_of_lengths
from .._tree.manifest import InvalidManifest, Reader, invalid
from .._tree.policy import Encoders
from .._tree.tree import validate_ragged
from .format import OFFSETS, VALUES, Column, TableIndex, read_index

_NO_ROWS = torch.zeros(1, dtype=torch.int64, device="cpu")
"""The offsets of a ragged field without rows."""


def read_table(
    cls: Any,
    path: FilePath,
    device: torch.device,
    keys: Sequence[str | Path] | None,
    encoders: Encoders | None,
    rows: int | None = None,
) -> Any:
    """Load the table in a folder as a dict of class ``cls``, without validating it against the class.

    ``rows``: the number of rows to load; None: all.
    """
    library, folder, paths = reading(path, keys, encoders)
    if rows is not None and (type(rows) is not int or rows < 0):
        raise ValueError(f"rows= is the number of rows to load, got {rows!r}")
    folder = os.path.abspath(folder)
    with invalid_file(folder, library.SafetensorError, RuntimeError):
        index = _read(folder)
        while True:
            reader = Reader(index.manifest, len(index.columns), encoders)
            if paths is not None:
                reader.keep(paths, folder)
            count = index.rows if rows is None else min(rows, index.rows)
            try:
                tensors = {i: _map_field(folder, index.columns, i, count) for i in reader.numbers}
                break
            except InvalidManifest:
                before, index = index, _read(folder)
                if index == before:
                    raise
                # A writer has replaced the table, and removed the files that were read: read the new table.
        out: Any = reader.build(cls, tensors.__getitem__, CPU, trusted=False)
        validate_ragged(out)
    if rows not in (None, count):
        raise ValueError(f"{folder!r} has {count} rows, and rows={rows} asks for more")
    return out.to(device)


def _read(folder: str) -> TableIndex:
    return read_index(folder, lambda name: open_regular(os.path.join(folder, name)))


def _map_field(folder: str, columns: Sequence[Column], i: int, rows: int) -> Tensor:
    """Map the rows of one column into memory."""
    column = columns[i]
    if column.kind == VALUES:
        return _map_column(folder, column, max(0, int(_map_field(folder, columns, i + 1, rows)[-1])))
    if column.kind == OFFSETS:
        return _map_column(folder, column, rows + 1) if rows else _NO_ROWS
    return _map_column(folder, column, rows)


def check_offsets(offsets: Tensor, file: str) -> None:
    """Raise `InvalidManifest` unless the offsets in a file ascend from 0. Cost: reads them once."""
    if reason := problem_of_lengths(offsets) or ("'offsets' does not start at 0" if offsets[0] else ""):
        invalid(f"{file!r}: {reason}")


def _map_column(folder: str, column: Column, rows: int) -> Tensor:
    """Map the rows of one file into memory."""
    if not rows:  # the file may be missing: the writer may have been killed while it created the table
        return torch.empty((0, *column.shape), dtype=column.dtype, device="cpu")
    path = os.path.join(folder, column.file)
    with missing_file(column.file), open_regular(path) as file:
        return rows_in(file, path, column, rows)


def rows_in(file: BinaryIO | FileIO, path: str, column: Column, rows: int) -> Tensor:
    """Map the rows of an open file into memory. Raises the error of `check_size`."""
    check_size(file, column, rows)
    return map_append_only(file.fileno(), path, column.header_size, column.dtype, (rows, *column.shape))


@contextmanager
def missing_file(name: str) -> Generator[None]:
    """Turn the error about a file that does not exist into `InvalidManifest`."""
    try:
        yield
    except FileNotFoundError:
        invalid(f"the file {name!r} is missing")


def check_size(file: BinaryIO | FileIO, column: Column, rows: int) -> None:
    """Raise `InvalidManifest` unless the file has this many rows or more. Its header is not read."""
    end, found = column.header_size + rows * column.nbytes, os.fstat(file.fileno()).st_size
    if found < end:
        invalid(f"{column.file!r} has {found} bytes, and {rows} rows take {end}")
