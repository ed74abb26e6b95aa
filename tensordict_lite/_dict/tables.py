"""Functions of whole tables on disk: `verify` and `repair`."""

from __future__ import annotations

from .._files.atomic_write import FilePath
from .._tables.checksums import verify_table
from .._tables.writer import repair_table


def verify(folder: FilePath) -> None:
    """Read a whole table, and raise `InvalidFileError` for the first damage. Needs ``safetensors``.

    A table of ``RowWriter(checksums=True)`` is compared with its checksums: the error names the column and the rows
    that have changed. For every table, `verify` validates the schema, the sizes of the files, the offsets of ragged
    columns, and the headers of a table at rest. `load` does not read the rows or the checksums.

    Raises: `InvalidFileError` for the first damage; ``FileNotFoundError`` or ``IsADirectoryError`` if there is no
    table; ``ImportError`` without safetensors; ``OSError``.
    Cost: with checksums, reads every byte of the table. Without, reads the headers and the offsets.

    >>> import tempfile
    >>> from tensordict_lite import RowWriter, verify
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
    verify_table(folder)


def repair(folder: FilePath) -> None:
    """Remove what a crash left in a table, and make each column a safetensors file again. Needs ``safetensors``.

    The table keeps the rows of the last ``flush``. `load` reads a table without it, and the next `RowWriter` does the
    same when it is closed. Other programs read the columns only then.

    Raises: `InvalidFileError` if flushed rows are missing; ``BlockingIOError`` if a writer is open;
    ``FileNotFoundError`` or ``IsADirectoryError`` if there is no table; ``ImportError`` without safetensors;
    ``OSError``.
    Cost: writes 4 KiB for each column, and reads the offsets of ragged fields. Waits for the disk.

    >>> import os, tempfile
    >>> from tensordict_lite import RowWriter, load, repair
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with RowWriter(folder, like={"x": [0]}) as writer:
    ...         writer.write({"x": [1, 2]})
    ...     with open(f"{folder}/x.safetensors", "ab") as file:
    ...         _ = file.write(bytes(100))  # rows that were not flushed
    ...     repair(folder)
    ...     os.path.getsize(f"{folder}/x.safetensors"), load(f"{folder}/x.safetensors")["x"]
    (4112, tensor([1, 2]))
    """
    repair_table(folder)
