"""Tables on disk, beside other formats for data that is larger than memory, and beside code by hand.

    python benchmarks/bench_table.py [--quick] [--rounds N] [--mib N] [--only TEXT] [--json PATH]

Three tables: twelve narrow columns, one with images, and one of texts in a ragged column. Files stay in the page cache,
so that it is the programs that are timed and not the disk. Every contender reads the same rows as a dict of tensors, or
as strings. ``TMPDIR`` is where the files are written.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from containers import TensorDict, as_tensordict, images, length
from harness import OURS, Case, Fields, Helpers, Prepare, Run, folder, main, optional, same_values, statement
from torch.utils.data import ConcatDataset

from tensordict_lite import collate, load
from tensordict_lite.tables import RowWriter, add_column, join_parts, load_parts, verify

h5py = optional("h5py")
datasets = optional("datasets")
tensordict = optional("tensordict")

BATCH, BLOCK = 256, 4096  # rows that are written at a time
Gather = Callable[[torch.Tensor], Any]
Write = Callable[[Path, Fields], Any]


def columns(mib: int) -> Fields:
    """Twelve columns of the kinds that batches have."""
    row = 3 * 64 + 4 * 4 + 2 * 8 + 2 * 32 + 1
    rows = (mib << 20) // row
    out = {f"f{i}": torch.rand(rows, 16) for i in range(3)} | {f"x{i}": torch.rand(rows) for i in range(4)}
    out |= {f"n{i}": torch.randint(1 << 40, (rows,)) for i in range(2)}
    out |= {f"s{i}": torch.randint(32, 127, (rows, 32), dtype=torch.uint8) for i in range(2)}
    return out | {"done": torch.rand(rows) < 0.1}


TABLES = {"12 columns": columns, "images": lambda mib: images((mib << 20) // (3 * 64 * 64))}


def batches(whole: Fields, size: int = BATCH) -> Iterator[tuple[slice, Fields]]:
    """The place of each batch in a table, and its fields."""
    for first in range(0, length(whole), size):
        at = slice(first, first + size)
        yield at, {key: value[at] for key, value in whole.items()}


# --- writing: each function writes the batches to a new path ---


def write_ours(path: Path, whole: Fields, **options: Any) -> None:
    with RowWriter(path, like={key: value[:1] for key, value in whole.items()}, **options) as writer:
        for _, batch in batches(whole):
            writer.write(batch)


def write_numpy(path: Path, whole: Fields) -> None:
    path.mkdir()
    for key, value in whole.items():
        out = np.lib.format.open_memmap(path / f"{key}.npy", "w+", value.numpy().dtype, tuple(value.shape))
        for at, batch in batches(whole):
            out[at] = batch[key].numpy()
        out.flush()


def write_chunks(path: Path, whole: Fields, synced: bool = False) -> None:
    """If synced, as durable as ours: the files are on the disk. The other formats leave that to the system."""
    like = as_tensordict({key: value[:1] for key, value in whole.items()})
    out = like.expand(length(whole)).memmap_like(path)
    for at, batch in batches(whole):
        out[at] = as_tensordict(batch)
    for file in (*path.iterdir(), path) if synced else ():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def write_append(path: Path, whole: Fields) -> None:
    first, *others = [as_tensordict(batch) for _, batch in batches(whole)]
    first.memmap(path)
    for batch in others:
        tensordict.append_memmap(path, batch)


def write_hdf5(path: Path, whole: Fields) -> None:
    path.mkdir()
    with h5py.File(path / "t.h5", "w") as file:
        for key, value in whole.items():
            file.create_dataset(key, tuple(value.shape), value.numpy().dtype, chunks=(BATCH, *value.shape[1:]))
        for at, batch in batches(whole, BLOCK):  # with 256 at a time, it takes several times as long
            for key, value in batch.items():
                file[key][at] = value.numpy()


def write_arrow(path: Path, whole: Fields) -> None:
    path.mkdir()
    features = datasets.Features({key: feature(value) for key, value in whole.items()})
    writer = datasets.arrow_writer.ArrowWriter(features=features, path=str(path / "t.arrow"))
    for _, batch in batches(whole):
        writer.write_batch({key: value.numpy() for key, value in batch.items()})
    writer.finalize()


def feature(value: torch.Tensor) -> Any:
    dtype = str(value.numpy().dtype)
    if value.dim() < 3:
        one = datasets.Value(dtype)
        return one if value.dim() == 1 else datasets.Sequence(one, length=value.shape[1])
    return getattr(datasets, f"Array{value.dim() - 1}D")(shape=tuple(value.shape[1:]), dtype=dtype)


# --- reading: each function opens a path, and returns a function that gathers rows as a dict of tensors ---


def open_ours(path: Path, keys: Sequence[str] | None = None) -> Gather:
    return load(path, keys=keys).rows.__getitem__


def open_numpy(path: Path) -> Gather:
    arrays = {file.stem: np.load(file, mmap_mode="r") for file in path.iterdir()}
    return lambda index: {key: torch.from_numpy(np.asarray(value[index.numpy()])) for key, value in arrays.items()}


def open_tensordict(path: Path) -> Gather:
    return TensorDict.load_memmap(path).__getitem__


def open_hdf5(path: Path) -> Gather:
    file = h5py.File(path / "t.h5")

    def gather(index: torch.Tensor) -> Fields:
        distinct, back = np.unique(index.numpy(), return_inverse=True)  # h5py takes ascending, distinct numbers
        return {key: torch.from_numpy(value[distinct][back]) for key, value in file.items()}

    return gather


def open_arrow(path: Path) -> Gather:
    table = datasets.Dataset.from_file(str(path / "t.arrow")).with_format("torch")
    return lambda index: table[index.tolist()]


def open_parts(path: Path) -> Gather:
    return load_parts(path).__getitem__


def open_concatenated(path: Path) -> Gather:
    """As torch joins datasets: row by row."""
    rows = ConcatDataset([load(part).rows for part in sorted(path.iterdir())])
    return lambda index: collate([rows[i] for i in index.tolist()])


WRITE: dict[str, Write] = {
    OURS: write_ours,
    "TensorDict memmap_like": write_chunks,
    "TensorDict memmap_like, synced": partial(write_chunks, synced=True),
    "TensorDict append_memmap": write_append,
    "NumPy memmap": write_numpy,
    "h5py": write_hdf5,
    "HF datasets": write_arrow,
}
OPEN: dict[str, Callable[[Path], Gather]] = {
    OURS: open_ours,
    "TensorDict memmap_like": open_tensordict,
    "NumPy memmap": open_numpy,
    "h5py": open_hdf5,
    "HF datasets": open_arrow,
}
"""The three ways of TensorDict to write give the same files."""


def seconds(do: Write, read: Callable[[Path], Gather], before: Write | None = None) -> Prepare:
    """The seconds of writing to a path, to which ``before`` writes first. The result is some of the rows."""
    path = folder() / "timed"

    def prepare(whole: Fields) -> Run:
        def measure() -> float:
            shutil.rmtree(path, ignore_errors=True)
            if before:
                before(path, whole)
            start = perf_counter()
            do(path, whole)
            return perf_counter() - start

        def result() -> Any:
            measure()
            return read(path)(torch.arange(BATCH))

        return Run(result, measure)

    return prepare


def formats(name: str, mib: int) -> list[Case]:
    whole = TABLES[name](mib)
    writing = {who: seconds(write, OPEN.get(who, open_tensordict)) for who, write in WRITE.items()}
    found = [Case("write", name, writing, lambda: whole, same_values, at_most=3)]

    @cache
    def opened(who: str) -> Gather:
        path = folder() / f"{name}, {who}"
        WRITE[who](path, whole)
        return OPEN[who](path)

    for size in (256, 4096):
        index = torch.randint(length(whole), (size,))
        gathering = {who: statement("x(index)", lambda _, who=who: opened(who), index=index) for who in OPEN}
        found.append(Case(f"{size} rows", name, gathering, equal=same_values, at_most=3))
    return found


# --- what else a table can do, beside the same by hand ---

HALVES: dict[int, Fields] = {}  # in each of two other processes: its half of the table


def take_half(rank: int, mib: int) -> None:
    torch.manual_seed(0)
    HALVES[rank] = {key: value.chunk(2)[rank] for key, value in columns(mib).items()}


def write_half(path: Path) -> None:
    for part, half in HALVES.items():
        write_ours(path, half, part=part, parts=2)


def write_parts(path: Path, whole: Fields, parts: int = 2) -> None:
    for part in range(parts):
        write_ours(path, {key: value.chunk(parts)[part] for key, value in whole.items()}, part=part, parts=parts)


def others(mib: int) -> list[Case]:
    torch.manual_seed(0)  # as `take_half`
    whole = columns(mib)
    index = torch.randint(length(whole), (BATCH,))
    added = whole["f0"].repeat(1, 4)  # a column of 64 numbers
    processes = cache(partial(Helpers, 2, take_half, mib))
    table, parts, many, sure = (folder() / name for name in ("table", "parts", "many", "sure"))
    write_ours(table, whole)
    write_parts(parts, whole)
    write_parts(many, whole, 16)
    write_ours(sure, whole, checksums=True)

    open_added = partial(open_ours, keys=["added"])
    writer = seconds(write_ours, open_ours)
    gathers = {
        name: {OURS: open_parts(path), "one table": open_ours(table), "ConcatDataset": open_concatenated(path)}
        for name, path in (("256 rows of two parts", parts), ("256 rows of 16 parts", many))
    }
    digests = {"`zlib.crc32`": zlib.crc32, "`hashlib.sha256`": hashlib.sha256}
    by_hand = "for file in x: digest(file.read_bytes())"
    found: dict[str, dict[str, Prepare]] = {
        "two processes write parts": {
            OURS: seconds(lambda path, _: processes().ask(write_half, path), open_parts),
            "one process writes a table": writer,
        },
        "write with checksums": {
            OURS: seconds(partial(write_ours, checksums=True), open_ours),
            "without checksums": writer,
        },
        **{
            name: {who: statement("gather(index)", gather=one, index=index) for who, one in each.items()}
            for name, each in gathers.items()
        },
        "`join_parts`": {
            OURS: seconds(lambda path, _: join_parts(parts, path), open_ours),
            "`shutil.copytree`": seconds(lambda path, _: shutil.copytree(parts, path), open_parts),
        },
        "`verify`": {
            OURS: statement("verify(x)", lambda _: sure, "{}", verify=verify),
        }
        | {who: statement(by_hand, lambda _: [*sure.iterdir()], "{}", digest=one) for who, one in digests.items()},
        "`add_column`": {
            OURS: seconds(lambda path, _: add_column(path, "added", added.split(BATCH)), open_added, write_ours),
            "writing the column alone": seconds(lambda path, _: write_ours(path, {"added": added}), open_added),
            "writing all columns": seconds(lambda path, _: write_ours(path, {**whole, "added": added}), open_added),
        },
    }
    return [Case(name, "12 columns", each, lambda: whole, same_values, at_most=5) for name, each in found.items()]


def texts(mib: int) -> list[Case]:
    """Gathering texts of 0 to 400 bytes from a ragged column, as Python strings."""
    path, lengths = folder() / "texts", torch.randint(400, ((mib << 20) // 200,)).tolist()
    with RowWriter(path, like={"text": ["x"]}, ragged=["text"]) as writer:
        for first in range(0, len(lengths), BLOCK):
            writer.write({"text": ["x" * length for length in lengths[first : first + BLOCK]]})
    table: Any = load(path)
    v, o = table["text"].values, table["text"].offsets
    by_row = "[bytes(v[o[i] : o[i + 1]].numpy()).decode() for i in index.tolist()]"
    codes = {OURS: "table.rows[index].decode('text')", "a slice for each row": by_row}
    found: list[Case] = []
    for size in (256, 4096):
        index = torch.randint(len(lengths), (size,))
        contenders = {who: statement(code, table=table, v=v, o=o, index=index) for who, code in codes.items()}
        found.append(Case(f"{size} texts", "texts", contenders))
    return found


def cases(mib: int = 64) -> list[Case]:
    return [*(case for name in TABLES for case in formats(name, mib)), *others(mib), *texts(mib)]


if __name__ == "__main__":
    main(__doc__, cases, ["tensordict", "h5py", "datasets"], mib=64)
