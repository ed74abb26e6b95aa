"""Functions of whole tables on disk: `repair`."""

from __future__ import annotations

from .._files.atomic_write import FilePath
from .._tables.writer import repair_table


def repair(folder: FilePath) -> None:
    """Remove what a crash left in a table, and make each column a safetensors file again. Needs ``safetensors``.

    The table keeps the rows of the last ``flush``. `load` reads a table without it, and the next `RowWriter` does the
    same when it is closed. Other programs read the columns only then.

    Raises: `InvalidFileError` if flushed rows are missing; ``BlockingIOError`` if a writer is open;
    ``FileNotFoundError`` or ``IsADirectoryError`` if there is no table; ``ImportError`` without safetensors;
    ``OSError``.
    Cost: writes 4 KiB for each column, and reads the offsets of jagged columns. Waits for the disk.

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
