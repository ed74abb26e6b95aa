"""Tables in parts: several writers, one part each, whose rows are read as one dataset."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from .._batch.join import cat
from .._batch.joined_rows import JoinedRows
from .._dict.device_dict import DeviceDict
from .._dict.io import load
from .._errors import Path
from .._files.atomic_write import FilePath
from .._files.safetensors import invalid_file
from .._look.progress import Progress, reporter
from .._tree.policy import Encoders
from .format import PART, described_part, part_name
from .reader import index_of
from .writer import RowWriter, warn_caller

_WRITTEN_AT_ONCE = 1 << 16
"""The number of rows that `join_parts` writes at a time."""


def load_parts(
    folder: FilePath,
    *,
    keys: Sequence[str | Path] | None = None,
    encoders: Encoders | None = None,
    progress: Progress = None,
) -> JoinedRows:
    """Load the parts that `RowWriter` wrote with ``part=``, in the order of their numbers, as one dataset.

    A part that is not closed has the rows of its last ``flush``, and a ``RuntimeWarning`` names it: its writer is open
    or was killed.

    Args:
        folder: the folder of the parts.
        keys: load these keys and paths only.
        encoders: encoders that replace those of the tables, as for `load`.
        progress: a function of (done, total), called after each part, or True for a bar of ``tqdm``.

    Raises: ``FileNotFoundError`` if the folder has no part, or if a part is missing; ``ValueError`` for a folder that
    is no part of the same run; the errors of `load` and of `JoinedRows`.
    Cost: as `load` for each part. Nothing is copied.

    >>> import tempfile
    >>> from tensordict_lite.tables import RowWriter, load_parts
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for rank in range(2):
    ...         with RowWriter(folder, like={"x": [0]}, part=rank, parts=2) as writer:
    ...             writer.write({"x": [10 * rank, 10 * rank + 1]})
    ...     load_parts(folder)[[3, 0]]["x"]
    tensor([11,  0])
    """
    paths = _part_folders(os.fsdecode(folder))
    report = reporter(progress, len(paths), "part")
    dicts: list[DeviceDict[Any]] = []
    for path in paths:
        dicts.append(load(path, keys=keys, encoders=encoders))
        report(len(dicts))
    return JoinedRows(dicts)


def _part_folders(folder: str) -> list[str]:
    """The folders of all parts of one run. Raises the errors of `load_parts`."""
    parts = sorted((int(name[5:]), name) for name in os.listdir(folder) if PART.fullmatch(name))
    if not parts:
        raise FileNotFoundError(f"{folder!r} has no parts; RowWriter(folder, part=0, parts=1) writes one")
    total, left_open = 0, list[tuple[str, int]]()
    for number, name in parts:
        path = os.path.join(folder, name)
        if name != part_name(number):
            raise ValueError(f"{path!r} is no part, whose name is {part_name(number)!r}; remove or rename it")
        with invalid_file(path):
            index = index_of(path)
        found = index.part
        total = total or (found[1] if found else 0)
        if found != (number, total):
            raise ValueError(
                f"{path!r} is {described_part(found)}, and no part {number} of {total}; remove the parts of other runs"
            )
        if index.unused is not None:
            left_open.append((path, index.rows))
    if missing := set(range(total)) - {number for number, _ in parts}:
        raise FileNotFoundError(f"{folder!r} has {len(parts)} of {total} parts; part {min(missing)} is missing")
    if left_open:
        path, rows = left_open[0]
        warn_caller(
            f"{len(left_open)} of {total} parts are not closed: {path!r} has only the {rows} rows of its last flush; "
            f"wait for its writer, or if it was killed, write the part again, or keep these rows with repair({path!r})"
        )
    return [os.path.join(folder, name) for _, name in parts]


def join_parts(
    folder: FilePath, table: FilePath, *, encoders: Encoders | None = None, progress: Progress = None
) -> None:
    """Write one table with the rows of all parts of a folder, in the order of their numbers. The parts stay.

    A column of strings gets the largest width of the parts.

    Args:
        folder: the folder of the parts.
        table: the folder of the new table, which must be new or empty. Its rows become visible at once.
        encoders: the encoders that `load` does not build, such as `Tokenizer`.
        progress: a function of (done, total) that counts rows, or True for a bar of ``tqdm``.

    Raises: the errors of `load_parts` and of `RowWriter`. After an error there is no new table.
    Cost: reads and writes every row once.

    >>> import tempfile
    >>> from tensordict_lite import load
    >>> from tensordict_lite.tables import RowWriter, join_parts
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for rank in range(2):
    ...         with RowWriter(f"{folder}/parts", like={"x": [0]}, part=rank, parts=2) as writer:
    ...             writer.write({"x": [rank]})
    ...     join_parts(f"{folder}/parts", f"{folder}/whole")
    ...     load(f"{folder}/whole")["x"]
    tensor([0, 1])
    """
    rows = load_parts(folder, encoders=encoders)
    report = reporter(progress, len(rows), "row")
    made = not os.path.exists(table)
    like = cat([d.rows[:0] for d in rows.parts])
    writer = RowWriter(table, like=like)
    try:
        for d in rows.parts:
            for batch in d.rows.batches(_WRITTEN_AT_ONCE):
                writer.write(batch)
                report(len(writer))
        writer.close()
    except BaseException:
        writer._table.discard(None, made)
        raise
