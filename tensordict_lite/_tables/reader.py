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
from .._memory.jagged import over_jagged
from .._memory.mapped import map_append_only
from .._memory.transfer import transfer
from .._tree.manifest import InvalidManifest, Reader, choose_from, invalid
from .._tree.policy import Encoders
from .format import Column, TableIndex, read_index

_OFFSETS_AT_ONCE = 1 << 20
"""The number of offsets that are validated at a time."""


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
                tensors = [_map_field(folder, index.columns[i], count) for i in reader.numbers]
                break
            except InvalidManifest:
                before, index = index, _read(folder)
                if index == before:
                    raise
                # A writer has replaced the table, and removed the files that were read: read the new table.
    if rows not in (None, count):
        raise ValueError(f"{folder!r} has {count} rows, and rows={rows} asks for more")
    moved = dict(zip(reader.numbers, transfer(tensors, device), strict=True))
    with invalid_file(folder, library.SafetensorError):
        return reader.build(choose_from(cls), moved.__getitem__, device)


def _read(folder: str) -> TableIndex:
    return read_index(folder, lambda name: open_regular(os.path.join(folder, name)))


def _map_field(folder: str, column: Column, rows: int) -> Tensor:
    """Map the rows of one column into memory, as a dense or as a nested tensor."""
    if column.offsets is None:
        return _map_column(folder, column, rows)
    offsets = _map_column(folder, column.offsets, rows + 1) if rows else torch.zeros(1, dtype=torch.int64, device="cpu")
    least, most = check_offsets(offsets, column.offsets.file)
    return over_jagged(_map_column(folder, column, int(offsets[-1])), offsets, least, most)


def check_offsets(offsets: Tensor, file: str) -> tuple[int, int]:
    """The smallest and the largest length of a row. Raises `InvalidManifest` unless the offsets ascend from 0.

    Cost: reads the offsets once.
    """
    least, most = 1 << 63, 0
    for start in range(0, len(offsets) - 1, _OFFSETS_AT_ONCE):
        part = offsets[start : start + _OFFSETS_AT_ONCE + 1]
        # Compared before `diff`: the difference of two offsets cannot overflow if no offset is negative.
        if int(offsets[0]) != 0 or not bool((part[1:] >= part[:-1]).all()):
            invalid(f"the offsets in {file!r} do not ascend from 0")
        low, high = part.diff().aminmax()
        least, most = min(least, int(low)), max(most, int(high))
    return min(least, most), most


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
