"""Read tables. A table is a folder with the rows of a dict: one safetensors file for each column, and ``table.json``.

``table.json`` has the schema and the row count, and it is replaced atomically. Its row count alone says which rows the
table has. A column file may have more rows, from a writer that has not called ``flush`` yet.

A column file starts with a safetensors header of fixed size, so that the writer can replace the header in place. The
rows follow. Safetensors accepts a file only if its header describes all of its bytes. So the header describes the bytes
after the last row as a second tensor, ``unused``.

A jagged column has two files: the values of all rows, one row after the other, and ``offsets``. Row ``i`` has the
values from ``offsets[i]`` to ``offsets[i + 1]``. So the row count alone says how many values the table has.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from io import FileIO
from itertools import count
from math import prod
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from .._errors import Path, dtype_name
from .._files.atomic_write import FilePath
from .._files.safetensors import (
    MAX_MANIFEST,
    PAIRS,
    import_library,
    invalid_file,
    is_too_long,
    open_regular,
    reading,
)
from .._memory.buffer import DTYPES
from .._memory.jagged import over_jagged
from .._memory.layout import row_major
from .._memory.mapped import map_append_only
from .._memory.packed import MAX_DIMENSIONS
from .._memory.transfer import transfer
from .._tree.manifest import Reader, choose_from, invalid
from .._tree.policy import Encoders

INDEX = "table.json"
"""The file with the schema and the row count."""
TABLE_VERSION = 1
UNUSED = "unused"
"""The name, in the header of a column, of the tensor for the bytes after the last row."""
_PAGE = 4096
"""The size of a header in bytes is a multiple of this. So a new header is in the same disk block as the old header."""
_DIGITS = 19
"""The width of each number in a header. The largest int64 has this many digits."""
_FILE = re.compile(r"\w[\w.~-]{0,150}\.safetensors", re.ASCII)
_OFFSETS_AT_ONCE = 1 << 20
"""The number of offsets that are validated at a time."""
_ATTEMPTS = 3
"""How often a header is read. A writer may replace the header while it is read."""


class Column(NamedTuple):
    """One column of a table, or the offsets of a jagged column."""

    file: str
    """The name of its file, in the folder."""
    name: str
    """The name of its tensor in the file."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """The shape of one row in the file. A row of a jagged column has several rows in the file."""
    offsets: Column | None = None
    """The offsets of a jagged column. Their file has one more row than the table; the first offset is 0."""

    @property
    def parts(self) -> list[Column]:
        """One column for each file: the column itself, and its offsets."""
        return [self._replace(offsets=None)] if self.offsets is None else [self._replace(offsets=None), self.offsets]

    @property
    def nbytes(self) -> int:
        """The bytes of one row in the file."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def header_size(self) -> int:
        """The size of the header in bytes. The first row follows the header."""
        return -(-(8 + len(self._header_text(0, 0, has_unused=True))) // _PAGE) * _PAGE

    def header(self, rows: int, unused: int) -> bytes:
        """The header of a file with this many rows, and ``unused`` bytes after them."""
        size = self.header_size - 8
        return size.to_bytes(8, "little") + self._header_text(rows, unused, has_unused=unused > 0).ljust(size)

    def describes(self, header: object, rows: int) -> bool:
        """Whether a parsed header describes this column with ``rows`` rows or more."""
        entry = header.get(self.name) if isinstance(header, dict) else None
        shape = entry.get("shape") if isinstance(entry, dict) else None
        found: Any = (shape or [None])[0] if isinstance(shape, list) else None
        if type(found) is not int or found < rows:
            return False
        return entry == json.loads(self._header_text(found, 0, has_unused=False))[self.name]

    def _header_text(self, rows: int, unused: int, *, has_unused: bool) -> bytes:
        # Each number has the same width in every header. So a program finds valid JSON, even if it reads while a writer
        # replaces the header.
        pair = PAIRS.get(dtype_name(self.dtype))
        shape = "".join(f",{size}" for size in (self.shape if pair is None else (*self.shape, 2)))
        end = rows * self.nbytes
        text = (
            f'{{{json.dumps(self.name)}:{{"dtype":"{_type_name(pair or self.dtype)}","shape":[{rows:{_DIGITS}}{shape}],'
        )
        text += f'"data_offsets":[0,{end:{_DIGITS}}]}}'
        if has_unused:
            name = UNUSED if self.name != UNUSED else f"{UNUSED}~2"
            text += f',"{name}":{{"dtype":"U8","shape":[{unused:{_DIGITS}}],'
            text += f'"data_offsets":[{end:{_DIGITS}},{end + unused:{_DIGITS}}]}}'
        return f"{text}}}".encode()


@cache
def _type_name(dtype: torch.dtype) -> str:
    """The name of a dtype in safetensors files."""
    return import_library().TensorSpec(dtype=dtype_name(dtype), shape=[], data_ptr=0, data_len=0).dtype


class TableIndex(NamedTuple):
    """The content of ``table.json``. The manifest is not validated."""

    rows: int
    columns: list[Column]
    manifest: Any


def choose_names(names: Sequence[str]) -> list[str]:
    """A file name for each column. File names differ in more than their case, for file systems that ignore it."""
    taken: set[str] = set()
    files: list[str] = []
    for name in names:
        plain = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)[:100]
        plain = plain if re.match(r"\w", plain, re.ASCII) else f"_{plain}"
        file = next(f for n in count(1) if (f := plain if n == 1 else f"{plain}~{n}").casefold() not in taken)
        taken.add(file.casefold())
        files.append(f"{file}.safetensors")
    return files


def index_text(columns: Sequence[Column], manifest: Any) -> tuple[str, str]:
    """The text of ``table.json`` before and after the row count. Raises ``ValueError`` if it is too long to load."""
    listed: list[dict[str, Any]] = []
    for one in columns:
        listed.append({"file": one.file, "name": one.name, "dtype": dtype_name(one.dtype), "shape": list(one.shape)})
        if one.offsets is not None:
            listed[-1]["offsets"] = {"file": one.offsets.file, "name": one.offsets.name}
    rest = json.dumps({"columns": listed, "manifest": manifest}, separators=(",", ":"))
    if is_too_long(rest + 100 * "["):
        raise ValueError(
            f"the structure and encoders of this table take {len(rest)} characters, and a file holds {MAX_MANIFEST}; "
            "use fewer fields, or give large encoders a registered name of their own"
        )
    return f'{{"version":{TABLE_VERSION},"rows":', f",{rest[1:]}"


def read_index(folder: str, open_file: Callable[[str], BinaryIO]) -> TableIndex:
    """Read and validate ``table.json``. Call it inside `invalid_file`.

    ``open_file``: opens a file of the folder by its name.

    Raises ``IsADirectoryError`` for a folder that is no table, and `InvalidManifest`.
    """
    try:
        file = open_file(INDEX)
    except FileNotFoundError as error:
        message = f"{os.strerror(errno.EISDIR)}, and no table: it has no {INDEX}"
        raise IsADirectoryError(errno.EISDIR, message, folder) from error
    with file:
        text = file.read(MAX_MANIFEST + 1).decode()
    if is_too_long(text):
        invalid(f"its {INDEX} is too long")
    data: Any = json.loads(text)
    version = data.get("version") if isinstance(data, dict) else None
    if type(version) is not int:
        invalid(f"its {INDEX} has no version")
    if version != TABLE_VERSION:
        invalid(f"its version is {version}, and this package reads version {TABLE_VERSION}; update the package")
    if set(data) != {"version", "rows", "columns", "manifest"}:
        invalid(f"its {INDEX} has other fields than version, rows, columns and manifest")
    rows, listed = data["rows"], data["columns"]
    if type(rows) is not int or not 0 <= rows < 1 << 63 or not isinstance(listed, list):
        invalid(f"the row count or the columns in its {INDEX} are damaged")
    columns = [_column(entry) for entry in listed]
    if not columns:
        invalid("it has no columns")
    files = [part.file.casefold() for column in columns for part in column.parts]
    if len(set(files)) != len(files):
        invalid("two columns have the same file")
    return TableIndex(rows, columns, data["manifest"])


def _column(entry: Any) -> Column:
    """Validate the entry of a column in ``table.json``."""
    given = entry if isinstance(entry, dict) else {}
    if set(given) - {"offsets"} != {"file", "name", "dtype", "shape"}:
        invalid("a column is not described by file, name, dtype and shape")
    dtype, shape = given["dtype"], given["shape"]
    file, name = _file_and_name(given["file"], given["name"])
    if type(dtype) is not str or dtype not in DTYPES:
        invalid(f"{dtype!r:.60} is no dtype of a column")
    sizes: list[Any] = shape if isinstance(shape, list) else [None]
    if len(sizes) >= MAX_DIMENSIONS or not all(type(size) is int and 0 <= size < 1 << 63 for size in sizes):
        invalid(f"the shape of the column {name[:60]!r} is damaged")
    column = Column(file, name, DTYPES[dtype], tuple(sizes))
    if "offsets" not in given:
        return column
    offsets: Any = given["offsets"]
    if not isinstance(offsets, dict) or set(offsets) != {"file", "name"}:
        invalid(f"the offsets of the column {name[:60]!r} are not described by file and name")
    return column._replace(offsets=offsets_column(*_file_and_name(offsets["file"], offsets["name"])))


def _file_and_name(file: Any, name: Any) -> tuple[str, str]:
    if type(file) is not str or not _FILE.fullmatch(file) or type(name) is not str:
        invalid(f"{file!r:.60} is no name of a column file")
    return file, name


def offsets_column(file: str, name: str) -> Column:
    """The offsets of a jagged column."""
    return Column(file, name, torch.int64, ())


def read_table(
    cls: Any,
    path: FilePath,
    device: torch.device,
    keys: Sequence[str | Path] | None,
    encoders: Encoders | None,
) -> Any:
    """Load the table in a folder as a dict of class ``cls``, without validating it against the class."""
    library, folder, paths = reading(path, keys, encoders)
    folder = os.path.abspath(folder)
    with invalid_file(folder, library.SafetensorError, RuntimeError):
        index = read_index(folder, lambda name: open_regular(os.path.join(folder, name)))
        reader = Reader(index.manifest, len(index.columns), encoders)
        if paths is not None:
            reader.keep(paths, folder)
        tensors = [_map_field(folder, index.columns[i], index.rows) for i in reader.numbers]
    moved = dict(zip(reader.numbers, transfer(tensors, device), strict=True))
    with invalid_file(folder, library.SafetensorError):
        return reader.build(choose_from(cls), moved.__getitem__, device)


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
    with missing_column(column), open_regular(path) as file:
        check_file(file, column, rows)
        return map_append_only(file.fileno(), path, column.header_size, column.dtype, (rows, *column.shape))


def rows_in(memory: torch.UntypedStorage, column: Column, rows: int) -> Tensor:
    """The rows in a file that is mapped into memory."""
    shape, start = (rows, *column.shape), column.header_size
    empty: Any = torch.empty(0, dtype=column.dtype, device="cpu")
    # A slice of the mapping is a storage of its own, so pickle writes no header.
    return empty.set_(memory[start : start + rows * column.nbytes], 0, shape, row_major(shape))


@contextmanager
def missing_column(column: Column) -> Generator[None]:
    """Turn the error about a file that does not exist into `InvalidManifest`."""
    try:
        yield
    except FileNotFoundError:
        invalid(f"the file {column.file!r} is missing")


def check_file(file: BinaryIO | FileIO, column: Column, rows: int) -> None:
    """Raise `InvalidManifest` unless the file has this many rows or more, behind a header that describes them."""
    start, found = column.header_size, os.fstat(file.fileno()).st_size
    if found < start + rows * column.nbytes:
        invalid(f"{column.file!r} has {found} bytes, and {rows} rows take {start + rows * column.nbytes}")
    for _ in range(_ATTEMPTS):
        file.seek(0)
        if int.from_bytes(file.read(8), "little") != start - 8:
            invalid(f"{column.file!r} has another header than its column")
        with suppress(ValueError):
            if column.describes(json.loads(file.read(start - 8)), rows):
                return
    invalid(f"the header of {column.file!r} does not describe {rows} rows of {dtype_name(column.dtype)}")
