"""The format of tables: a folder with the rows of a dict, one safetensors file for each column, and ``table.json``.

``table.json`` has the schema and the row count, and it is replaced atomically. Its row count alone says which rows the
table has. A column file may have more rows, from a writer that has not called ``flush`` yet.

A column file has room for a safetensors header, and the rows follow. While a writer is open, the header means nothing.
``close`` writes the headers: then the table is at rest, and any safetensors reader opens every column.

A ragged field has two columns: the values of all rows, one row after the other, and the offsets, int64. Row ``i`` has
the values from ``offsets[i]`` to ``offsets[i + 1]``. So the row count alone says how many values the table has.

The folder is in one of three states:

- At rest: each file of a column ends with its last row and has a header, and there are no other files.
- Being written: ``table.json`` has the entry ``open``, with the number of the writer and the ``unused`` files. The
  table does not use these files yet, or not any more. After a kill the folder stays in this state, and the next writer
  or `repair` removes the unused files.
- Damaged: everything else. ``table.json`` ends with its own CRC-32, so a reader finds each changed bit of it. `load`
  finds missing files and rows, and `verify` finds changed rows.
"""

from __future__ import annotations

import errno
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from .._errors import dtype_name
from .._files.safetensors import MAX_MANIFEST, distinct, is_too_long, stored_as
from .._memory.dtypes import STORED
from .._memory.packed import MAX_DIMENSIONS
from .._tree.manifest import invalid, members, refuse_other_version

INDEX = "table.json"
"""The file with the schema and the row count."""
TABLE_VERSION = 2
"""Version 1 has no checksum of ``table.json``, and says nothing about parts."""
_SUM = ',"crc32":'
"""The last entry of ``table.json``: the CRC-32 of the text before it."""
_PAGE = 4096
"""The size of a header in bytes is a multiple of this."""
_DIGITS = 19
"""The width of each number in a header, so that a header for any number of rows has the same size: the largest int64
has this many digits."""
_FILE = re.compile(r"\w[\w.~-]{0,150}\.(safetensors|jsonl)", re.ASCII)

PART = re.compile(r"part-(\d+)")
"""The name of a folder with a part, see `part_name`."""

ROWS, VALUES, OFFSETS = "rows", "values", "offsets"
"""What a column has: a row for each row of the table, or the values or the offsets of a ragged field."""


@dataclass(frozen=True)
class Column:
    """One column of a table, in a file of its own."""

    file: str
    """The name of its file, in the folder."""
    name: str
    """The name of its tensor in the file."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """The shape of one row in the file."""
    kind: str = ROWS
    """`ROWS`, `VALUES` or `OFFSETS`. The values of a ragged field precede its offsets, whose file has one more row than
    the table: the first offset is 0."""
    id: str = ""
    """A random text, the same for all columns that one call made. A later column may get the name of the file."""

    @property
    def nbytes(self) -> int:
        """The bytes of one row in the file."""
        return prod(self.shape) * self.dtype.itemsize

    @cached_property
    def header_size(self) -> int:
        """The size of the header in bytes. The first row follows."""
        return len(self.header(0))

    def length(self, rows: int, values: int = 0) -> int:
        """The rows in the file if the table has ``rows`` rows, and a ragged field has ``values`` values."""
        return values if self.kind == VALUES else rows + (self.kind == OFFSETS)

    def end(self, length: int) -> int:
        """The position in the file after ``length`` rows."""
        return self.header_size + length * self.nbytes

    def without_rows(self) -> Tensor:
        """What the column of a table without rows has: of offsets, the 0 before the first row."""
        return torch.zeros((self.length(0), *self.shape), dtype=self.dtype, device="cpu")

    def header(self, rows: int) -> bytes:
        """The header of a file with this many rows."""
        dtype, shape = stored_as(self.dtype, self.shape)
        sizes = ",".join([f"{rows:{_DIGITS}}", *map(str, shape)])
        entry = f'{{"dtype":"{dtype}","shape":[{sizes}],"data_offsets":[0,{rows * self.nbytes:{_DIGITS}}]}}'
        text = f"{{{json.dumps(self.name)}:{entry}}}".encode()
        size = -(-(8 + len(text)) // _PAGE) * _PAGE - 8
        return size.to_bytes(8, "little") + text.ljust(size)


class Extent(NamedTuple):
    """The size of a table, or of a part of its columns."""

    rows: int
    lengths: tuple[int, ...]
    """The rows in each file: see `Column.length`."""


class TableIndex(NamedTuple):
    """The content of ``table.json``. The manifest is not validated."""

    rows: int
    columns: list[Column]
    manifest: Any
    unused: list[str] | None
    """None: the table is at rest. Else it is being written, and does not use these files in its folder."""
    checksums: tuple[str, int] | None
    """The file with the checksums, and the number of its bytes that count."""
    part: tuple[int, int] | None
    """The number of this part, and how many parts there are. None: the table is no part."""

    @property
    def files(self) -> list[str]:
        """The names of all files of the table, except ``table.json``."""
        files = [column.file for column in self.columns]
        return files if self.checksums is None else [*files, self.checksums[0]]


def part_name(number: int) -> str:
    """The name of the folder with a part: see `RowWriter`."""
    return f"part-{number:05}"


def described_part(part: tuple[int, int] | None) -> str:
    """A part in an error: see `TableIndex.part`."""
    return "no part" if part is None else f"part {part[0]} of {part[1]}"


def checksums_name(used: Iterable[str]) -> str:
    """A name for the file with the checksums, other than the names ``used``."""
    return f"{distinct('checksums', {name.removesuffix('.jsonl') for name in used})}.jsonl"


def choose_names(names: Sequence[str], used: Iterable[str] = ()) -> list[str]:
    """A file name for each column, other than the names ``used``.

    File names differ in more than their case, for file systems that ignore it.
    """
    taken = {file.removesuffix(".safetensors").casefold() for file in used}
    files: list[str] = []
    for name in names:
        plain = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)[:100]
        plain = plain if re.match(r"\w", plain, re.ASCII) else f"_{plain}"
        files.append(f"{distinct(plain, taken, str.casefold)}.safetensors")
    return files


def index_head(index: TableIndex, writer: str) -> str:
    """The start of ``table.json``, up to the columns. ``writer``: the number of the writer that is open."""
    data: dict[str, Any] = {"version": TABLE_VERSION, "rows": index.rows}
    if index.part is not None:
        data["part"] = dict(zip(("number", "of"), index.part, strict=True))
    if index.checksums is not None:
        data["checksums"] = {"file": index.checksums[0], "bytes": index.checksums[1]}
    if index.unused is not None:
        data["open"] = {"writer": writer, "unused": index.unused}
    return f'{json.dumps(data, separators=(",", ":"))[:-1]},"columns":'


def sealed(text: str) -> str:
    """The text of ``table.json`` with its own checksum."""
    return f"{text[:-1]}{_SUM}{zlib.crc32(text[:-1].encode())}}}"


def index_text(columns: Sequence[Column], manifest: Any) -> str:
    """The rest of ``table.json``. Raises ``ValueError`` if it is too long to load."""
    listed = [asdict(one) | {"dtype": dtype_name(one.dtype), "shape": list(one.shape)} for one in columns]
    rest = json.dumps({"columns": listed, "manifest": manifest}, separators=(",", ":"))
    if is_too_long(rest + 100 * "["):
        raise ValueError(
            f"the structure and encoders of this table take {len(rest)} characters, and a file holds {MAX_MANIFEST}; "
            "use fewer fields, or give large encoders a registered name of their own"
        )
    return rest.removeprefix('{"columns":')


def read_index(folder: str, open_file: Callable[[str], BinaryIO]) -> TableIndex:
    """Read and validate ``table.json``. Call it inside `invalid_file`.

    ``open_file``: opens a file of the folder by its name.

    Raises ``IsADirectoryError`` for a folder that is no table, and `InvalidManifest`.
    """
    try:
        file = open_file(INDEX)
    except FileNotFoundError as error:
        parts = any(map(PART.fullmatch, os.listdir(folder)))
        hint = "; it has parts, which load_parts reads as one dataset" if parts else ""
        message = f"{os.strerror(errno.EISDIR)}, and no table: it has no {INDEX}{hint}"
        raise IsADirectoryError(errno.EISDIR, message, folder) from error
    with file:
        text = file.read(MAX_MANIFEST + 1).decode()
    if is_too_long(text):
        invalid(f"its {INDEX} is too long")
    data: Any = json.loads(text)
    optional = {"open", "checksums"}
    if not isinstance(data, dict) or data.get("version") != 1:
        refuse_other_version(data, TABLE_VERSION, f"its {INDEX}")
        if sealed(f"{text.rpartition(_SUM)[0]}}}") != text:
            invalid(f"its {INDEX} has changed: it does not have its checksum")
        optional |= {"part", "crc32"}
    if set(data) - optional != {"version", "rows", "columns", "manifest"}:
        invalid(f"its {INDEX} has other fields than version, rows, columns and manifest")
    rows, listed = data["rows"], data["columns"]
    if type(rows) is not int or not 0 <= rows < 1 << 63 or not isinstance(listed, list):
        invalid(f"the row count or the columns in its {INDEX} are damaged")
    columns = [_read_column(entry) for entry in listed]
    if not columns:
        invalid("it has no columns")
    unused = checksums = part = None
    if "open" in data:
        unused = [*map(_file_name, members(data["open"], "'open'", writer=str, unused=list)["unused"])]
    if "checksums" in data:
        found = members(data["checksums"], "'checksums'", file=str, bytes=int)
        checksums = _file_name(found["file"]), found["bytes"]
        if checksums[1] < 0:
            invalid(f"the size of the checksums in its {INDEX} is damaged")
    if "part" in data:
        found = members(data["part"], "'part'", number=int, of=int)
        part = found["number"], found["of"]
        if not 0 <= part[0] < part[1]:
            invalid(f"the number of the part in its {INDEX} is damaged")
    index = TableIndex(rows, columns, data["manifest"], unused, checksums, part)
    files = [file.casefold() for file in (*index.files, *(unused or []))]
    if len(set(files)) != len(files):
        invalid("two columns have the same file")
    kinds = [column.kind for column in columns]
    if any((kind == VALUES) != (after == OFFSETS) for kind, after in pairwise([ROWS, *kinds, ROWS])):
        invalid("the values and the offsets of a ragged field are not side by side")
    return index


def _read_column(entry: Any) -> Column:
    """Validate the entry of a column in ``table.json``."""
    entry = {"id": "", **entry} if type(entry) is dict else entry  # version 1 has no ids
    given = members(entry, "a column", file=str, name=str, dtype=str, shape=list, kind=str, id=str)
    name, dtype, sizes, kind = given["name"], given["dtype"], given["shape"], given["kind"]
    if dtype not in STORED:
        invalid(f"{dtype!r:.60} is no dtype of a column")
    if len(sizes) >= MAX_DIMENSIONS or not all(type(size) is int and 0 <= size < 1 << 63 for size in sizes):
        invalid(f"the shape of the column {name[:60]!r} is damaged")
    if kind not in (ROWS, VALUES, OFFSETS) or (kind == OFFSETS and (dtype, sizes) != ("int64", [])):
        invalid(f"the kind of the column {name[:60]!r} is damaged")
    return Column(_file_name(given["file"]), name, STORED[dtype], tuple(sizes), kind, given["id"])


def _file_name(file: Any) -> str:
    if type(file) is not str or not _FILE.fullmatch(file):
        invalid(f"{file!r:.60} is no name of a column file")
    return file
