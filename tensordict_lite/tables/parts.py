"""Tables in parts: several writers, one part each, whose rows are read as one dataset."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, cast

from .._batch.join import cat, decided_values
from .._batch.joined_rows import JoinedRows
from .._dict.io import load
from .._errors import Path
from .._files.atomic_write import FilePath
from .._tree.fields import ragged_paths
from .._tree.policy import Encoders
from .format import PART
from .writer import RowWriter

_WRITTEN_AT_ONCE = 1 << 16
"""The number of rows that `join_parts` writes at a time."""


def load_parts(
    folder: FilePath, *, keys: Sequence[str | Path] | None = None, encoders: Encoders | None = None
) -> JoinedRows:
    """Load the parts that `RowWriter` wrote with ``part=``, in the order of their numbers, as one dataset.

    Args:
        folder: the folder of the parts.
        keys: load these keys and paths only.
        encoders: encoders that replace those of the tables, as for `load`.

    Raises: ``FileNotFoundError`` if the folder has no part; the errors of `load` and of `JoinedRows`.
    Cost: as `load` for each part. Nothing is copied.

    >>> import tempfile
    >>> from tensordict_lite.tables import RowWriter, load_parts
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for rank in range(2):
    ...         with RowWriter(folder, like={"x": [0]}, part=rank) as writer:
    ...             writer.write({"x": [10 * rank, 10 * rank + 1]})
    ...     load_parts(folder)[[3, 0]]["x"]
    tensor([11,  0])
    """
    name = os.fsdecode(folder)
    found = {int(match[1]): match[0] for match in map(PART.fullmatch, os.listdir(name)) if match}
    if not found:
        raise FileNotFoundError(f"{name!r} has no parts; RowWriter(folder, part=0) writes one")
    paths = [os.path.join(name, found[number]) for number in sorted(found)]
    return JoinedRows([load(path, keys=keys, encoders=encoders) for path in paths])


def join_parts(folder: FilePath, table: FilePath, *, encoders: Encoders | None = None) -> None:
    """Write one table with the rows of all parts of a folder, in the order of their numbers. The parts stay.

    A column of strings gets the largest width of the parts.

    Args:
        folder: the folder of the parts.
        table: the folder of the new table, which must be new or empty. Its rows become visible at once.
        encoders: the encoders that `load` does not build, such as `Tokenizer`.

    Raises: the errors of `load_parts` and of `RowWriter`. After an error there is no new table.
    Cost: reads and writes every row once.

    >>> import tempfile
    >>> from tensordict_lite import load
    >>> from tensordict_lite.tables import RowWriter, join_parts
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for rank in range(2):
    ...         with RowWriter(f"{folder}/parts", like={"x": [0]}, part=rank) as writer:
    ...             writer.write({"x": [rank]})
    ...     join_parts(f"{folder}/parts", f"{folder}/whole")
    ...     load(f"{folder}/whole")["x"]
    tensor([0, 1])
    """
    parts = load_parts(folder, encoders=encoders).parts
    made = not os.path.exists(table)
    like = cat([d.rows[:0] for d in parts])
    for path in ragged_paths(like):
        values = decided_values([d[path] for d in cast("list[Any]", parts)])[0]
        like[path] = like[path].with_values(values[:0])
    writer = RowWriter(table, like=like)
    try:
        for d in parts:
            for batch in d.rows.batches(_WRITTEN_AT_ONCE):
                writer.write(batch)
        writer.close()
    except BaseException:
        writer._table.undo(made)
        raise
