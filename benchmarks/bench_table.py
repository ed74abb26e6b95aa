"""Writing a table and gathering random rows of it, beside other formats for data that is larger than memory.

    python benchmarks/bench_table.py [--quick] [--rounds N] [--mib N] [--only TEXT] [--json PATH]

Three tables: twelve narrow columns, one with images, and one of texts in a ragged column. Files stay in the page cache,
so that it is the programs that are timed and not the disk. Every contender reads the same rows as a dict of tensors, or
as strings. ``TMPDIR`` is where the files are written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from containers import TensorDict, images, length, selected
from harness import OURS, Case, Fields, Prepare, Run, folder, main, optional, same_values, statement, statements

from tensordict_lite import RowWriter, load

h5py = optional("h5py")
datasets = optional("datasets")
tensordict = optional("tensordict")

BATCH, BLOCK = 256, 4096  # rows that are written at a time


@dataclass(frozen=True)
class Table:
    """A table, and its rows in parts: the place of a part in the table, and its fields."""

    name: str
    whole: Fields

    @cached_property
    def batches(self) -> list[tuple[slice, Fields]]:
        return self.parts(BATCH)

    def parts(self, size: int) -> list[tuple[slice, Fields]]:
        places = [slice(first, first + size) for first in range(0, length(self.whole), size)]
        return [(at, {key: value[at] for key, value in self.whole.items()}) for at in places]


def columns(mib: int) -> Fields:
    """Twelve columns of the kinds that batches have."""
    row = 3 * 64 + 4 * 4 + 2 * 8 + 2 * 32 + 1
    rows = (mib << 20) // row
    out = {f"f{i}": torch.rand(rows, 16) for i in range(3)} | {f"x{i}": torch.rand(rows) for i in range(4)}
    out |= {f"n{i}": torch.randint(1 << 40, (rows,)) for i in range(2)}
    out |= {f"s{i}": torch.randint(32, 127, (rows, 32), dtype=torch.uint8) for i in range(2)}
    return out | {"done": torch.rand(rows) < 0.1}


TABLES = {"12 columns": columns, "images": lambda mib: images((mib << 20) // (3 * 64 * 64))}


# --- writing: each function writes the batches to a new path ---


def write_ours(path: Path, table: Table) -> None:
    with RowWriter(path, like=table.batches[0][1]) as writer:
        for _, part in table.batches:
            writer.write(part)


def write_numpy(path: Path, table: Table) -> None:
    path.mkdir()
    for key, value in table.whole.items():
        out = np.lib.format.open_memmap(path / f"{key}.npy", "w+", value.numpy().dtype, tuple(value.shape))
        for at, part in table.batches:
            out[at] = part[key].numpy()
        out.flush()


def as_tensordict(fields: Fields) -> Any:
    return TensorDict(fields, batch_size=[length(fields)])


def write_chunks(path: Path, table: Table) -> None:
    like = as_tensordict({key: value[:1] for key, value in table.whole.items()})
    out = like.expand(length(table.whole)).memmap_like(path)
    for at, part in table.batches:
        out[at] = as_tensordict(part)


def write_synced(path: Path, table: Table) -> None:
    """As durable as ours: the files are on the disk at the end. The other formats leave that to the system."""
    write_chunks(path, table)
    for file in (*path.iterdir(), path):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def write_append(path: Path, table: Table) -> None:
    first, *others = [as_tensordict(part) for _, part in table.batches]
    first.memmap(path)
    for part in others:
        tensordict.append_memmap(path, part)


def write_hdf5(path: Path, table: Table) -> None:
    path.mkdir()
    with h5py.File(path / "t.h5", "w") as file:
        for key, value in table.whole.items():
            file.create_dataset(key, tuple(value.shape), value.numpy().dtype, chunks=(BATCH, *value.shape[1:]))
        for at, part in table.parts(BLOCK):  # with 256 at a time, it takes several times as long
            for key, value in part.items():
                file[key][at] = value.numpy()


def write_arrow(path: Path, table: Table) -> None:
    features = datasets.Features({key: feature(value) for key, value in table.whole.items()})
    path.mkdir()
    writer = datasets.arrow_writer.ArrowWriter(features=features, path=str(path / "t.arrow"))
    for _, part in table.batches:
        writer.write_batch({key: value.numpy() for key, value in part.items()})
    writer.finalize()


def feature(value: torch.Tensor) -> Any:
    dtype = str(value.numpy().dtype)
    if value.dim() == 1:
        return datasets.Value(dtype)
    if value.dim() == 2:
        return datasets.Sequence(datasets.Value(dtype), length=value.shape[1])
    return getattr(datasets, f"Array{value.dim() - 1}D")(shape=tuple(value.shape[1:]), dtype=dtype)


# --- reading: each function opens a path, and returns a function that gathers rows as a dict of tensors ---

Gather = Callable[[torch.Tensor], Any]


def open_ours(path: Path) -> Gather:
    rows = load(path).rows
    return lambda index: rows[index]


def open_numpy(path: Path) -> Gather:
    arrays = {file.stem: np.load(file, mmap_mode="r") for file in path.iterdir()}
    return lambda index: {key: torch.from_numpy(np.asarray(value[index.numpy()])) for key, value in arrays.items()}


def open_tensordict(path: Path) -> Gather:
    table = TensorDict.load_memmap(path)
    return lambda index: table[index]


def open_hdf5(path: Path) -> Gather:
    file = h5py.File(path / "t.h5")

    def gather(index: torch.Tensor) -> Fields:
        distinct, back = np.unique(index.numpy(), return_inverse=True)  # h5py takes ascending, distinct numbers
        return {key: torch.from_numpy(value[distinct][back]) for key, value in file.items()}

    return gather


def open_arrow(path: Path) -> Gather:
    table = datasets.Dataset.from_file(str(path / "t.arrow")).with_format("torch")
    return lambda index: table[index.tolist()]


@dataclass(frozen=True)
class Format:
    """How to write a table to a path, and how to open it."""

    write: Callable[[Path, Table], None]
    open: Callable[[Path], Gather]
    gathered: bool = True
    """Whether its reading is measured. Three ways to write give the files of TensorDict."""


FORMATS = {
    OURS: Format(write_ours, open_ours),
    "TensorDict memmap_like": Format(write_chunks, open_tensordict),
    "TensorDict memmap_like, synced": Format(write_synced, open_tensordict, gathered=False),
    "TensorDict append_memmap": Format(write_append, open_tensordict, gathered=False),
    "NumPy memmap": Format(write_numpy, open_numpy),
    "h5py": Format(write_hdf5, open_hdf5),
    "HF datasets": Format(write_arrow, open_arrow),
}


def emptied(who: str, table: Table) -> Path:
    """The path of the table in a format, without the files of an earlier round."""
    path = folder() / table.name / who
    path.parent.mkdir(exist_ok=True)
    shutil.rmtree(path, ignore_errors=True)
    return path


def opened(who: str, table: Table) -> Gather:
    """Write the table, and open it."""
    path = emptied(who, table)
    FORMATS[who].write(path, table)
    return FORMATS[who].open(path)


def writing(who: str, some: torch.Tensor) -> Prepare:
    """The seconds of writing a table. The result is some of its rows."""

    def prepare(table: Table) -> Run:
        def measure() -> float:
            path = emptied(who, table)
            start = perf_counter()
            FORMATS[who].write(path, table)
            return perf_counter() - start

        return Run(lambda: selected(opened(who, table)(some), table.whole), measure)

    return prepare


def gathering(who: str, index: torch.Tensor) -> Prepare:
    return statement(
        "gather(index)",
        lambda table: (opened(who, table), table),
        "selected(gather(index), table.whole)",
        "gather, table = x",
        index=index,
        selected=selected,
    )


def table_cases(name: str, mib: int) -> list[Case]:
    table = Table(name, TABLES[name](mib))
    found = [
        Case(
            "write",
            name,
            {who: writing(who, torch.arange(BATCH)) for who in FORMATS},
            lambda: table,
            same_values,
            at_most=3,
        )
    ]
    for size in (256, 4096):
        index = torch.randint(length(table.whole), (size,))
        contenders = {who: gathering(who, index) for who, one in FORMATS.items() if one.gathered}
        found.append(Case(f"{size} rows", name, contenders, lambda: table, same_values))
    return found


# --- texts ---


def by_byte(values: torch.Tensor, offsets: torch.Tensor, index: torch.Tensor) -> list[str]:
    """With an index for each byte, as for dense fields."""
    starts, ends = offsets[:-1][index], offsets[1:][index]
    at = (ends - starts).cumsum(0)
    shift = torch.repeat_interleave(ends - at, ends - starts)
    together = values.index_select(0, torch.arange(int(at[-1])) + shift).numpy().tobytes()
    return [together[a:b].decode() for a, b in pairwise([0, *at.tolist()])]


def by_row(values: torch.Tensor, offsets: torch.Tensor, index: torch.Tensor) -> list[str]:
    """With a slice for each row."""
    return [bytes(values[offsets[i] : offsets[i + 1]].numpy()).decode() for i in index.tolist()]


def text_case(size: int, mib: int) -> Case:
    """Gathering texts of 0 to 400 bytes from a ragged column, as Python strings."""

    def make() -> tuple[Any, ...]:
        texts = ["x" * length for length in torch.randint(400, ((mib << 20) // 200,)).tolist()]
        path = folder() / f"texts {size}"
        with RowWriter(path, like={"text": ["x"]}, ragged=["text"]) as writer:
            for first in range(0, len(texts), BLOCK):
                writer.write({"text": texts[first : first + BLOCK]})
        table = load(path)
        text: Any = table["text"]
        return table, text["values"], text["offsets"], torch.randint(len(texts), (size,))

    codes = {
        OURS: "out = table.rows[index].decode('text')",
        "index of every byte": "out = by_byte(values, offsets, index)",
        "a slice for each row": "out = by_row(values, offsets, index)",
    }
    makers = dict.fromkeys(codes, tuple)
    names: dict[str, Any] = {"by_byte": by_byte, "by_row": by_row}
    contenders = statements(codes, makers, result="out", setup="table, values, offsets, index = x", **names)
    return Case(f"{size} texts", "texts", contenders, make)


def cases(mib: int = 64) -> list[Case]:
    return [*table_cases("12 columns", mib), *table_cases("images", mib), text_case(256, mib), text_case(4096, mib)]


if __name__ == "__main__":
    main(__doc__, cases, ["tensordict", "h5py", "datasets"], mib=64)
