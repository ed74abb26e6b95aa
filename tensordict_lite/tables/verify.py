"""Find damage: `verify`, and the checksums of a table, a text file with one line of JSON for each flush.

A line has the ``rows`` that were flushed, and for each of the ``files`` the first row in the file, the row after the
last, and the CRC-32 of their bytes. ``table.json`` has the name of the text file, and how many of its bytes count.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from io import BufferedReader, FileIO
from typing import Any

from .._files.atomic_write import FilePath
from .._files.safetensors import import_library, invalid_file, open_regular
from .._look.progress import Progress, reporter
from .._tree.manifest import Reader, invalid
from .format import INDEX, OFFSETS, Column, Extent, TableIndex
from .reader import check_size, count_values, missing_file, of_one_table

_READ_SIZE = 1 << 20
"""The number of bytes that are read at a time."""


def checksum(
    file: BufferedReader | FileIO,
    column: Column,
    first: int,
    last: int,
    report: Callable[[int], None] = lambda at: None,
) -> int:
    """The CRC-32 of rows in a file, from ``first`` up to ``last``, as the system reads them now.

    ``report``: called with each position in the file. Raises `InvalidManifest` if the file ends before the rows do.
    """
    at, end = column.end(first), column.end(last)
    value, buffer = 0, memoryview(bytearray(min(_READ_SIZE, end - at)))
    file.seek(at)
    while at < end:
        count = file.readinto(buffer[: min(_READ_SIZE, end - at)])
        if not count:
            invalid(f"{column.file!r} ends before its row {last}")
        value = zlib.crc32(buffer[:count], value)
        at += count
        report(at)
    return value


def checksum_line(files: Sequence[FileIO], columns: Sequence[Column], before: Extent, after: Extent) -> bytes:
    """The line for the rows that follow ``before``, up to ``after``."""
    ranges = zip(files, columns, before.lengths, after.lengths, strict=True)
    entries = {column.file: [first, last, checksum(file, column, first, last)] for file, column, first, last in ranges}
    return f"{json.dumps({'rows': [before.rows, after.rows], 'files': entries}, separators=(',', ':'))}\n".encode()


Range = tuple[int, int, int, int, int]
"""The rows of the table, first and last; the rows in the file, first and last; their checksum."""


def _read_checksums(folder: str, name: str, nbytes: int) -> dict[str, list[Range]]:
    """The ranges with a checksum, by the name of the file. Raises `InvalidManifest` for damaged lines."""
    found: dict[str, list[Range]] = {}
    with missing_file(name), open_regular(os.path.join(folder, name)) as file:
        if (size := os.fstat(file.fileno()).st_size) < nbytes:  # before memory is allocated for a forged number
            invalid(f"its checksums have {size} bytes, and {INDEX} counts {nbytes}")
        lines = file.read(nbytes).splitlines()
    for line in lines:
        data: Any = json.loads(line)
        start, end = data["rows"]
        for name, (first, last, value) in data["files"].items():
            if start == 0:  # a column of that name was dropped before
                found[name] = []
            found.setdefault(name, []).append((start, end, first, last, value))
    return found


def _refuse_changed(
    file: BufferedReader, column: Column, whole: tuple[int, int], ranges: Sequence[Range], report: Callable[[int], None]
) -> None:
    """Raise `InvalidManifest` for the first range of rows in a file that does not have its checksum.

    ``whole``: the rows of the table, and of the file.
    """
    covered = 0, 0
    for start, end, first, last, value in ranges:
        if (start, first) != covered or end < start or last < first:
            invalid(f"the checksums of {column.file!r} do not follow each other")
        covered = end, last
        if checksum(file, column, first, last, report) != value:
            invalid(f"rows {start} to {end - 1} of the column {column.name!r} have changed: {column.file!r} is damaged")
    if covered != whole:
        invalid(f"the checksums of {column.file!r} cover {covered[0]} of {whole[0]} rows")


def verify(folder: FilePath, *, progress: Progress = None) -> None:
    """Read a whole table, and raise `InvalidFileError` for the first damage. Needs ``safetensors``.

    A table of ``RowWriter(checksums=True)`` is compared with its checksums: the error names the column and the rows
    that have changed. For every table, `verify` validates the schema, the sizes of the files, the offsets of ragged
    columns, and the headers of a table at rest. `load` does not read the rows or the checksums. A writer may append
    meanwhile.

    Args:
        folder: the folder of the table. The folder of a part is a table too.
        progress: a function of (done, total) that counts bytes, or True for a bar of ``tqdm``.

    Raises: `InvalidFileError` for the first damage; ``FileNotFoundError`` or ``IsADirectoryError`` if there is no
    table; ``ImportError`` without safetensors; ``OSError``.
    Cost: with checksums, reads every byte of the table. Without, reads the headers and the offsets.

    >>> import tempfile
    >>> from tensordict_lite.tables import RowWriter, verify
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with RowWriter(folder, like={"x": [0.0]}, checksums=True) as writer:
    ...         writer.write({"x": [1.0, 2.0]})
    ...     verify(folder)
    ...     with open(f"{folder}/x.safetensors", "r+b") as file:
    ...         _ = file.seek(4097), file.write(b"?")
    ...     try:
    ...         verify(folder)
    ...     except ValueError as error:
    ...         print(str(error).partition(": ")[2])
    not a valid file: rows 0 to 1 of the column 'x' have changed: 'x.safetensors' is damaged
    """
    library, name = import_library(), os.path.abspath(os.fsdecode(folder))
    os.stat(name)  # raises if there is no folder
    try:
        with invalid_file(name, library.SafetensorError, RuntimeError, LookupError, AttributeError):
            of_one_table(name, partial(_verify, name, progress))
    except _ProgressError as error:
        raise error.args[0] from None


def _verify(folder: str, progress: Progress, index: TableIndex) -> None:
    """Raise the error for the first damage of the table in a folder."""
    Reader(index.manifest, len(index.columns))
    if not index.rows and index.unused is not None:  # its files may be missing
        return
    ranges = None if index.checksums is None else _read_checksums(folder, *index.checksums)
    columns: list[Column] = []
    for column in index.columns:  # the offsets of a ragged field come before its values
        columns.insert(len(columns) - (column.kind == OFFSETS), column)
    sizes: list[int] = []
    for column in columns:
        with missing_file(column.file):
            sizes.append(os.path.getsize(os.path.join(folder, column.file)))
    values = done = 0
    report: Callable[[int], None] | None = None

    def reported(at: int) -> None:
        nonlocal report
        try:
            report = report or reporter(progress, sum(sizes))
            report(done + at)
        except Exception as error:
            raise _ProgressError(error) from None

    for column, size in zip(columns, sizes, strict=True):
        path, length = os.path.join(folder, column.file), column.length(index.rows, values)
        with missing_file(column.file), open_regular(path) as file:
            check_size(file, column, length)
            if index.unused is None:
                _refuse_other_header(file, column, length)
            if ranges is not None and index.rows:
                _refuse_changed(file, column, (index.rows, length), ranges.get(column.file, []), reported)
            values = count_values(file, path, column, length) if column.kind == OFFSETS else 0
        done += size
        reported(0)


class _ProgressError(BaseException):
    """An error of ``progress=``, and not of the table."""


def _refuse_other_header(file: BufferedReader, column: Column, length: int) -> None:
    """Raise `InvalidManifest` unless a file at rest has the header of its rows, and ends with them."""
    header, found = column.header(length), os.fstat(file.fileno()).st_size
    file.seek(0)
    if file.read(len(header)) != header or found != column.end(length):
        invalid(f"{column.file!r} is no safetensors file with the {length} rows of {column.name!r}; repair the table")
