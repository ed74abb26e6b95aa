"""Create, open, change and `repair` a table: `TableWriter` appends rows to columns, and makes many visible at once.

`RowWriter` and `add_column` convert values, and give them to a `TableWriter`. The order of its steps gives these
guarantees after a crash at any moment:

- The table has the rows of the last `flush` that returned, or of the `flush` that was running. `flush` replaces
  ``table.json`` last, when all of its rows are on the disk.
- `close` truncates each file after its last row, and writes its header. So the next writer that closes the table heals
  everything that a crash left. Until then, other programs refuse the files, and `load` reads the table.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from operator import add, gt, mul, sub
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._dict.device_dict import DeviceDict
from .._errors import InvalidFileError, Path, dotted
from .._files.atomic_write import FilePath, make_folder
from .._files.safetensors import by_name, bytes_of, field_names, import_library, invalid_file, refuse_unwritable
from .._memory.device import CPU
from .._tree.fields import ragged_paths
from .._tree.manifest import Leaves, Manifest, Reader, describe
from .._tree.missing import refuse_unknown_encoders
from .._tree.policy import Encoders
from .._tree.tree import TreeDict
from .folder import NEW_INDEX, TableFolder, opened, write_bytes
from .format import INDEX, OFFSETS, ROWS, Column, Extent, TableIndex, checksums_name, choose_names, index_text
from .reader import check_size, count_values, missing_file
from .verify import checksum_line

BUFFER = 4 << 20
"""The size in bytes of all buffers of a writer together."""


class State(NamedTuple):
    """How far the rows of a writer have come. It is replaced as a whole, as an interrupt may come at any step."""

    appended: Extent
    """All rows, those in the buffers included."""
    written: Extent
    """The rows in the files."""
    summed: Extent
    """The rows that have a checksum."""
    sums: int
    """The number of bytes of the checksums."""
    durable: int
    """The number of rows that survive a crash, and that `load` shows. 0 until this table has replaced another."""
    unused: list[str]
    """The files that the next `flush` removes: those of a table that this table replaces, or what a crash left."""

    @property
    def pending(self) -> int:
        """The number of rows that no `flush` has made durable."""
        return self.appended.rows - self.durable


class TableWriter:
    """Appends rows to a table. One writer at a time, in one process.

    Args:
        folder: the folder of the table.
        columns: the columns to write, in the order of the tensors of `append`.
        index: what ``table.json`` shall say, with the rows that ``columns`` have. The first `flush` removes the unused
            files, such as those of a table that this table replaces.
    """

    def __init__(self, folder: TableFolder, columns: Sequence[Column], index: TableIndex) -> None:
        self.folder, self.index = folder, index
        self._columns = columns
        self._offsets = [i for i, column in enumerate(columns) if column.kind == OFFSETS]
        """The indices of the columns with offsets. The column before such a column has the values."""
        self._text = index_text(index.columns, index.manifest)
        self._sizes = [column.nbytes for column in columns]  # the bytes of a row in each file
        ragged = {i - 1 for i in self._offsets}
        share = BUFFER // (len(ragged) + 1)
        row = sum(size for i, size in enumerate(self._sizes) if i not in ragged)
        self._rooms = [max(1, share // max(1, size if i in ragged else row)) for i, size in enumerate(self._sizes)]
        self._buffers: list[Tensor] = []
        extent = Extent(index.rows, tuple([column.length(index.rows) for column in columns]))
        sums = 0 if index.checksums is None else index.checksums[1]
        summed = Extent(index.rows, (0,) * len(columns))
        self.state = State(extent, extent, summed, sums, durable=0, unused=index.unused or [])
        self.closed = False

    @property
    def rows(self) -> int:
        """The number of rows, including rows that are not flushed."""
        return self.state.appended.rows

    def append(self, tensors: list[Tensor], count: int) -> None:
        """Append ``count`` rows. Raises ``OSError``; then no row was appended.

        ``tensors``: for each column [count, *shape] on the CPU, in a dtype that can be cast to the dtype of the column.
        For the offsets of a ragged field: the lengths of the rows, int64[count]. The list is changed. The tensors are
        copied or written before the call returns.
        """
        self.refuse_unusable()
        state = self.state
        extent, written = state.appended, state.written
        for i in self._offsets:
            tensors[i] = tensors[i].cumsum(0).add_(extent.lengths[i - 1])
        added = [tensor.shape[0] for tensor in tensors] if self._offsets else [count] * len(tensors)
        after = Extent(extent.rows + count, tuple(map(add, extent.lengths, added)))
        # For many rows, a copy into the buffers would save few system calls.
        direct = any(2 * size > room for size, room in zip(added, self._rooms, strict=True))
        if direct or any(map(gt, map(sub, after.lengths, written.lengths), self._rooms)):
            with self.folder.explained():
                self._write_buffers()
                written = extent
                if direct:
                    for i, tensor in enumerate(tensors):
                        self._write(i, extent.lengths[i], tensor.to(self._columns[i].dtype))
                    self.state = state._replace(appended=after, written=after)
                    return
        if not self._buffers:
            with torch.inference_mode(False):  # a later call outside inference mode cannot write to inference tensors
                self._buffers = [
                    torch.empty((room, *column.shape), dtype=column.dtype, device="cpu")
                    for column, room in zip(self._columns, self._rooms, strict=True)
                ]
        into = [
            buffer.narrow(0, first - start, number)
            for buffer, start, first, number in zip(self._buffers, written.lengths, extent.lengths, added, strict=True)
        ]
        torch._foreach_copy_(into, tensors)
        self.state = State(after, written, *state[2:])  # `_replace` takes longer

    def sync(self, least: int = 0) -> None:
        """Flush rows and their checksums to disk, and show none of them.

        ``least``: do nothing for fewer bytes of rows that lack a checksum. Raises ``OSError``.
        """
        after, before = self.state.appended, self.state.summed
        if sum(map(mul, self._sizes, map(sub, after.lengths, before.lengths))) >= least:
            with self.folder.explained():
                self.folder.refuse_other_writer()
                self._write_buffers()
                self.folder.sync_files(self._write_checksums)

    def close(self) -> None:
        """Flush, make each column a safetensors file, and release the table. Raises the errors of `flush`."""
        try:
            if not self.closed:
                self.flush(at_rest=True)
        finally:
            self.release()

    def flush(self, at_rest: bool = False) -> None:
        """Make all rows visible and durable, at once. Raises ``OSError``; then the table is as it was.

        ``at_rest``: make each column a safetensors file too.
        """
        self.refuse_unusable()
        with self.folder.explained():
            self.folder.refuse_other_writer()
            self._write_buffers()
            if at_rest:
                self._finish()
            elif not self.state.pending and not self.state.unused:
                return
            self.folder.sync_files(self._write_checksums)
            if self.state.unused or not at_rest:
                self._show()
            if at_rest:
                self._write_index(None)

    def _write_checksums(self) -> None:
        """Write the checksums of the rows that were written to the files since the last call."""
        state = self.state
        if self.index.checksums is not None and state.appended.rows != state.summed.rows:
            line = checksum_line(self.folder.files, self._columns, state.summed, state.appended)
            self.folder.append_checksums(line, state.sums)
            self.state = state._replace(summed=state.appended, sums=state.sums + len(line))

    def _show(self) -> None:
        """Make all rows visible, and remove the unused files."""
        self._write_index(self.state.unused)
        self.folder.remove_unused(self.state.unused)
        self.state = self.state._replace(unused=[])

    def _write_index(self, unused: list[str] | None) -> None:
        sums = self.index.checksums and (self.index.checksums[0], self.state.sums)
        index = self.index._replace(rows=self.rows, unused=unused, checksums=sums)
        self.folder.write_index(index, self._text)
        self.state = self.state._replace(durable=self.rows)

    def release(self) -> None:
        """Let another writer open the table. Rows that are not flushed are lost."""
        self.closed = True
        self._buffers = []
        self.folder.close()

    def abandon(self) -> int:
        """Release the table as the last `flush` left it, at rest. Returns the number of rows that it lacks."""
        lost = 0 if self.closed or not self.folder.is_mine else self.state.pending
        is_open = not self.closed and self.folder.is_usable
        self.release()
        if is_open:
            # For example, another writer may open the table first.
            with suppress(OSError, InvalidFileError), table_at_rest(self.folder.path, repair=True) as (_, index):
                # An interrupt may come after `flush` has replaced `table.json`, and before it returns.
                lost = self.rows - (index.rows if set(index.columns) == set(self._columns) else 0)
        return lost

    def create(self, old: TableIndex | None, made: bool = False) -> None:
        """Start a new table without rows, or new columns. After an error, the folder is as it was.

        ``old``: the table that this table replaces at the first `flush`. It may have the same file of checksums.
        ``made``: the folder is new.
        """
        try:
            # First, so that a crash leaves a table.
            if old is None:
                self._write_index([])
            else:
                self.folder.write_index(old._replace(unused=[*self._new_files(old), *(old.unused or [])]))
            self._open_files("x+b")
        except BaseException:
            self.discard(old, made)
            raise

    def open(self) -> None:
        """Open the table, and remove its unused files.

        Raises `InvalidManifest` if flushed rows are missing.
        """
        if self.rows:
            self._open_columns()
        self._show()
        if not self.rows:  # the files may be missing
            self._open_files("x+b")

    def _open_files(self, mode: str) -> None:
        """Open the file of each column, and the file with the checksums. Mode ``"x+b"`` creates files without rows."""
        for column in self._columns:
            with missing_file(column.file):
                self.folder.files.append(self.folder.open(column.file, mode))
        if self.index.checksums is not None:
            name, at = self.index.checksums
            with missing_file(name):
                self.folder.checksums = self.folder.open(name, "r+b" if at else "x+b")
        if mode == "x+b":
            for file, column in zip(self.folder.files, self._columns, strict=True):
                file.truncate(column.end(column.length(0)))  # the offset 0 of the first row
            self.folder.sync_names()

    def discard(self, old: TableIndex | None, made: bool = False) -> None:
        """Remove the files that `create` made, and release the folder, which has the table ``old``, or none.

        A later writer removes what remains, for example after an error of the disk. ``made``: remove the folder too.
        """
        with suppress(OSError):
            if old is None:
                for name in (*self.index.files, INDEX):
                    self.folder.remove(name)
                if made:
                    os.rmdir(self.folder.path)
            elif self.folder.is_usable:
                self.folder.refuse_other_writer()
                self.folder.remove_unused(self._new_files(old))
                self.folder.write_index(old)
        self.release()

    def _new_files(self, old: TableIndex) -> list[str]:
        return [name for name in self.index.files if name not in old.files]

    def _open_columns(self) -> None:
        self._open_files("r+b")
        lengths = list(self.state.appended.lengths)
        for i in self._offsets:
            column = self._columns[i]
            path = os.path.join(self.folder.path, column.file)
            lengths[i - 1] = count_values(self.folder.files[i], path, column, lengths[i])
        for file, column, length in zip(self.folder.files, self._columns, lengths, strict=True):
            check_size(file, column, length)
        extent = Extent(self.rows, tuple(lengths))
        self.state = self.state._replace(appended=extent, written=extent, summed=extent)

    def _write_buffers(self) -> None:
        state = self.state
        extent, written = state.appended, state.written
        if extent is not written:
            for i, buffer in enumerate(self._buffers):
                self._write(i, written.lengths[i], buffer[: extent.lengths[i] - written.lengths[i]])
            self.state = state._replace(written=extent)

    def _write(self, i: int, first: int, tensor: Tensor) -> None:
        """Write rows into file ``i``, beginning at its row ``first``."""
        file = self.folder.files[i]
        file.seek(self._columns[i].end(first))
        write_bytes(file, bytes_of(tensor))

    def _finish(self) -> None:
        """Write the header of each file, and remove the bytes after its rows, which a crash or a failed write left."""
        for file, column, length in zip(self.folder.files, self._columns, self.state.appended.lengths, strict=True):
            file.truncate(column.end(length))
            file.seek(0)
            write_bytes(file, column.header(length))

    def refuse_unusable(self) -> None:
        """Raise an error in a forked process, for a closed writer, and after an error of a flush to disk."""
        if not self.folder.is_mine:
            raise RuntimeError(
                f"this RowWriter belongs to process {self.folder.process}, and this process was forked from it; "
                "write, flush and close there, or write another table here"
            )
        if self.closed:
            raise ValueError("this RowWriter is closed")
        self.folder.refuse_failed()


def is_table(path: FilePath) -> bool:
    """Whether a folder has a table."""
    return os.path.exists(os.path.join(os.fsdecode(path), INDEX))


def create_table(
    path: FilePath, d: TreeDict[Any], overwrite: bool, checksums: bool, part: tuple[int, int] | None
) -> TableWriter:
    """Create a table without rows, for the fields of ``d``, in a new or empty folder.

    The first dimension of a field counts rows. A ragged field becomes two columns.

    ``overwrite``: the folder may have a table. The new table replaces it at the first `flush`. ``checksums``: keep
    checksums of the rows. ``part``: see `TableIndex`.

    Raises ``FileExistsError`` if the folder is not empty, and the errors of `DeviceDict.save`.
    """
    import_library()
    manifest, leaves = describe(d, partial(by_name, way_out="pass like=d.to_dict()"))
    index_text(_new_columns(d, leaves), manifest)  # refuses other fields before the folder is made
    made = make_folder(path)
    with opened(path) as folder:
        old = None
        if overwrite and is_table(folder.path):
            old = folder.read_index()
        else:
            _refuse_unless_empty(folder.path)
        used = [*old.files, *(old.unused or [])] if old else []
        columns = _new_columns(d, leaves, used)
        sums = (checksums_name(used), 0) if checksums else None
        writer = TableWriter(folder, columns, TableIndex(0, columns, manifest, used, sums, part))
        writer.create(old, made)
    return writer


def _new_columns(
    d: TreeDict[Any], leaves: Leaves, used: Iterable[str] = (), way_out: str = "pass like=d.drop({})"
) -> list[Column]:
    """The columns for some leaves of ``d``, in other files than ``used``.

    Raises ``TypeError`` for the first leaf that a file cannot hold.
    """
    refuse_unwritable(leaves, way_out)
    names = field_names([path for path, _ in leaves])
    ragged = set(ragged_paths(d))
    columns: list[Column] = []
    number = secrets.token_hex(8)
    for (path, tensor), file, name in zip(leaves, choose_names(names, used), names, strict=True):
        kind = path[-1] if path[:-1] in ragged else ROWS  # the names of the parts are the names of the kinds
        dtype = torch.int64 if kind == OFFSETS else tensor.dtype
        columns.append(Column(file, name, dtype, tuple(tensor.shape[1:]), kind, number))
    return columns


def open_table(path: FilePath, encoders: Encoders | None) -> tuple[TableWriter, DeviceDict[Any]]:
    """Open a table to append rows. Returns the writer, and a dict with the fields, without rows.

    ``encoders``: the encoders that `Reader` does not build. Another encoder than that of the table is refused.

    Raises ``FileNotFoundError``, ``IsADirectoryError`` for a folder that is no table, and ``InvalidFileError``.
    """
    import_library()
    with opened(path) as folder:
        index = folder.read_index()
        fields, columns = empty_dict(folder, index, encoders)
        refuse_unknown_encoders(encoders, fields, "this table")
        writer = TableWriter(folder, columns, index)
        with invalid_file(folder.path, RuntimeError):
            writer.open()
    return writer, fields


def empty_dict(
    folder: TableFolder, index: TableIndex, encoders: Encoders | None
) -> tuple[DeviceDict[Any], list[Column]]:
    """A dict with the fields of a table, without rows; and their columns in the order of the dict.

    Raises the errors of `open_table` for ``encoders``, but for the keys that the table lacks.
    """
    with invalid_file(folder.path, RuntimeError):
        reader = Reader(index.manifest, len(index.columns), encoders)
        empty = [column.without_rows() for column in index.columns]
        fields: Any = reader.build(DeviceDict, empty.__getitem__, CPU, trusted=False)
    if encoders is not None:
        _require_same_encoders(fields, index.manifest)
    return fields, [index.columns[i] for i in reader.numbers]


def repair(folder: FilePath) -> None:
    """Remove what a crash left in a table, and make each column a safetensors file again. Needs ``safetensors``.

    The table keeps the rows of the last ``flush``. `load` reads a table without it, and the next `RowWriter` does the
    same when it is closed. Other programs read the columns only then.

    Raises: `InvalidFileError` if flushed rows are missing; ``BlockingIOError`` if a writer is open;
    ``FileNotFoundError`` or ``IsADirectoryError`` if there is no table; ``ImportError`` without safetensors;
    ``OSError``.
    Cost: writes 4 KiB for each column, and reads the offsets of ragged fields. Waits for the disk.

    >>> import os, tempfile
    >>> from tensordict_lite import load
    >>> from tensordict_lite.tables import RowWriter, repair
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with RowWriter(folder, like={"x": [0]}) as writer:
    ...         writer.write({"x": [1, 2]})
    ...     with open(f"{folder}/x.safetensors", "ab") as file:
    ...         _ = file.write(bytes(100))  # rows that were not flushed
    ...     repair(folder)
    ...     os.path.getsize(f"{folder}/x.safetensors"), load(f"{folder}/x.safetensors")["x"]
    (4112, tensor([1, 2]))
    """
    with table_at_rest(folder, repair=True):
        pass


@contextmanager
def table_at_rest(path: FilePath, repair: bool = False) -> Generator[tuple[TableFolder, TableIndex]]:
    """Open a table, to change it as a whole. What a crash left is repaired first, with ``repair`` in any case."""
    import_library()
    with opened(path) as folder:
        index = folder.read_index()
        with invalid_file(folder.path, RuntimeError):
            Reader(index.manifest, len(index.columns))
            if repair or index.unused is not None:
                writer = TableWriter(folder, index.columns, index)
                writer.open()
                writer.flush(at_rest=True)
                folder.close_files()
        yield folder, index._replace(unused=None)
        folder.close()


def create_columns(folder: TableFolder, index: TableIndex, d: TreeDict[Any]) -> TableWriter:
    """Start the columns that the fields of ``d`` have, and that a table at rest lacks.

    The columns become visible when the writer closes. It must have the rows of the table then.
    """
    manifest, leaves = describe(d, partial(by_name, way_out="give codes"))
    reader = Reader(index.manifest, len(index.columns))
    known = {path: index.columns[i] for path, i in zip(reader.paths, reader.numbers, strict=True)}
    new = [(path, value) for path, value in leaves if path not in known]
    added = _new_columns(d, new, index.files, "convert the values of {} first")
    known |= {path: column for (path, _), column in zip(new, added, strict=True)}
    whole = index._replace(rows=0, columns=[known[path] for path, _ in leaves], manifest=manifest)
    writer = TableWriter(folder, added, whole)
    writer.create(index)
    return writer


def _require_same_encoders(fields: TreeDict[Any], manifest: Manifest) -> None:
    """Raise ``ValueError`` if ``fields`` has another encoder for a key than the valid manifest of a table."""
    ours, _ = describe(fields, lambda given, error: {"name": repr(given) if error else getattr(given, "name", "")})
    for (path, found), (_, given) in zip(_encoders_in(manifest), _encoders_in(ours), strict=True):
        if json.dumps(given) != json.dumps(found):
            raise ValueError(
                f"{dotted(path)} of this table is encoded with {str(found)[:80]}, encoders= has {str(given)[:80]}; "
                "leave it out: load reads all rows of a column with one encoder"
            )


def _encoders_in(manifest: Manifest, node: Any = None, at: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Each path below a node of a manifest, by default its root, and the entry of its encoder."""
    node = node or manifest["root"]
    policy = manifest["policies"][node["policy"]]
    for key, value in node["items"]:
        number = policy["encoders"].get(key, policy["default"])
        yield (*at, key), "Utf8()" if number is None else manifest["encoders"][number]
        if isinstance(value, dict):
            yield from _encoders_in(manifest, value, (*at, key))


def _refuse_unless_empty(folder: str) -> None:
    found = set(os.listdir(folder)) - {NEW_INDEX}
    if INDEX in found:
        raise FileExistsError(
            f"{folder!r} has a table already; append=True adds rows to it, mode='overwrite' replaces it"
        )
    if found:
        raise FileExistsError(f"{folder!r} is not empty; a table needs a folder of its own")
