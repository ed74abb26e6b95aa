"""Writing a table and gathering random rows of it, beside other formats for data that is larger than memory.

    python benchmarks/bench_table.py [--quick] [--rounds N] [--json PATH] [--folder PATH] [--mib N]

Three tables: twelve narrow columns, one with images, and one of texts in a jagged column. Files stay in the page cache,
so that it is the programs that are timed and not the disk. Every contender reads the same rows as a dict of tensors, or
as strings; the results are compared first.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from common import cause, in_turn, interleaved, parser, ratio, ratio_table, same, setting, write
from torch.utils.benchmark import Timer

from tensordict_lite import RowWriter, load

try:
    import h5py
except ImportError:
    h5py = None
try:
    import zarr
except ImportError:
    zarr = None
try:
    import datasets
except ImportError:
    datasets = None
try:
    import tensordict
    from tensordict import TensorDict
except ImportError:
    tensordict = TensorDict = None

Table = dict[str, torch.Tensor]
OURS, HAND, NUMPY, PEER = "ours", "index_select by hand", "NumPy memmap", "TensorDict memmap"
APPEND, CHUNKS = "TensorDict append_memmap", "TensorDict memmap_like"
SYNCED = "TensorDict memmap_like, synced"
HDF5, ZARR, ARROW = "h5py", "zarr", "HF datasets"
SELECT, SLICES = "index_select of bytes", "a slice for each row"
# The time of the other contender over ours: at least this.
GATHER_GOALS = {HAND: 0.75, PEER: 4.0, NUMPY: 1.2}
BATCH, BLOCK = 256, 4096


def columns(mib: int) -> Table:
    """Twelve columns of the kinds that batches have."""
    row = 3 * 64 + 4 * 4 + 2 * 8 + 2 * 32 + 1
    rows = (mib << 20) // row
    out = {f"f{i}": torch.rand(rows, 16) for i in range(3)} | {f"x{i}": torch.rand(rows) for i in range(4)}
    out |= {f"n{i}": torch.randint(1 << 40, (rows,)) for i in range(2)}
    out |= {f"s{i}": torch.randint(32, 127, (rows, 32), dtype=torch.uint8) for i in range(2)}
    return out | {"done": torch.rand(rows) < 0.1}


def images(mib: int) -> Table:
    rows = (mib << 20) // (3 * 64 * 64)
    return {"image": torch.randint(256, (rows, 3, 64, 64), dtype=torch.uint8), "label": torch.randint(1000, (rows,))}


def batches(table: Table, size: int) -> list[Table]:
    split = {key: value.split(size) for key, value in table.items()}
    return [dict(zip(split, part, strict=True)) for part in zip(*split.values(), strict=True)]


# --- writing: each function writes the batches to a new folder ---


def write_ours(folder: Path, parts: list[Table], _: Table) -> None:
    with RowWriter(folder, like=parts[0]) as writer:
        for part in parts:
            writer.write(part)


def write_numpy(folder: Path, parts: list[Table], whole: Table) -> None:
    folder.mkdir()
    for key, value in whole.items():
        array = value.numpy()
        out = np.lib.format.open_memmap(folder / f"{key}.npy", "w+", array.dtype, array.shape)
        first = 0
        for part in parts:
            out[first : first + len(part[key])] = part[key].numpy()
            first += len(part[key])
        out.flush()


def write_chunks(folder: Path, parts: list[Table], whole: Table) -> None:
    count = len(next(iter(whole.values())))
    like = TensorDict({key: value[:1] for key, value in whole.items()}, batch_size=[1])
    out = like.expand(count).memmap_like(folder)
    first = 0
    for part in parts:
        size = len(next(iter(part.values())))
        out[first : first + size] = TensorDict(part, batch_size=[size])
        first += size


def write_synced(folder: Path, parts: list[Table], whole: Table) -> None:
    """As durable as ours: the files are on the disk at the end. The other formats leave that to the system."""
    write_chunks(folder, parts, whole)
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def write_append(folder: Path, parts: list[Table], _: Table) -> None:
    TensorDict(parts[0], batch_size=[len(next(iter(parts[0].values())))]).memmap(folder)
    for part in parts[1:]:
        tensordict.append_memmap(folder, TensorDict(part, batch_size=[len(next(iter(part.values())))]))


def write_hdf5(folder: Path, _: list[Table], whole: Table) -> None:
    folder.mkdir()
    with h5py.File(folder / "t.h5", "w") as file:
        for key, value in whole.items():
            file.create_dataset(key, tuple(value.shape), value.numpy().dtype, chunks=(BATCH, *value.shape[1:]))
        _write_blocks(file, whole)


def write_zarr(folder: Path, _: list[Table], whole: Table) -> None:
    group = zarr.open_group(folder, mode="w")
    for key, value in whole.items():
        shape, chunks = tuple(value.shape), (BLOCK, *value.shape[1:])
        group.create_array(key, shape=shape, dtype=value.numpy().dtype, chunks=chunks, compressors=None)
    _write_blocks(group, whole)


def _write_blocks(arrays: Any, whole: Table) -> None:
    """Write many rows at a time. With 256 at a time, these formats take several times as long."""
    first = 0
    for block in batches(whole, BLOCK):
        end = first + len(next(iter(block.values())))
        for key, value in block.items():
            arrays[key][first:end] = value.numpy()
        first = end


def write_arrow(folder: Path, parts: list[Table], whole: Table) -> None:
    features = datasets.Features({key: _feature(value) for key, value in whole.items()})
    writer = datasets.arrow_writer.ArrowWriter(features=features, path=str(folder.with_suffix(".arrow")))
    for part in parts:
        writer.write_batch({key: value.numpy() for key, value in part.items()})
    writer.finalize()


def _feature(value: torch.Tensor) -> Any:
    dtype = str(value.numpy().dtype)
    if value.dim() == 1:
        return datasets.Value(dtype)
    if value.dim() == 2:
        return datasets.Sequence(datasets.Value(dtype), length=value.shape[1])
    return getattr(datasets, f"Array{value.dim() - 1}D")(shape=tuple(value.shape[1:]), dtype=dtype)


WRITERS: dict[str, tuple[Callable[[Path, list[Table], Table], None], Any]] = {
    OURS: (write_ours, True),
    CHUNKS: (write_chunks, TensorDict),
    SYNCED: (write_synced, TensorDict),
    APPEND: (write_append, TensorDict),
    NUMPY: (write_numpy, True),
    HDF5: (write_hdf5, h5py),
    ZARR: (write_zarr, zarr),
    ARROW: (write_arrow, datasets),
}


# --- reading: each function opens a folder, and returns a function that gathers rows as a dict of tensors ---

Gather = Callable[[torch.Tensor], Any]


def open_ours(folder: Path) -> Gather:
    rows = load(folder).rows
    return lambda index: rows[index]


def open_hand(folder: Path) -> Gather:
    table = load(folder).to_dict()
    return lambda index: {key: value.index_select(0, index) for key, value in table.items()}


def open_numpy(folder: Path) -> Gather:
    arrays = {path.stem: np.load(path, mmap_mode="r") for path in folder.iterdir()}
    return lambda index: {key: torch.from_numpy(np.asarray(value[index.numpy()])) for key, value in arrays.items()}


def open_tensordict(folder: Path) -> Gather:
    table = TensorDict.load_memmap(folder)
    return lambda index: table[index]


def open_hdf5(folder: Path) -> Gather:
    file = h5py.File(folder / "t.h5")

    def gather(index: torch.Tensor) -> Table:
        order = index.argsort()  # h5py takes ascending, distinct numbers
        sorted_ = index[order].numpy()
        distinct, back = np.unique(sorted_, return_inverse=True)
        undo = order.argsort().numpy()
        return {key: torch.from_numpy(value[distinct][back][undo]) for key, value in file.items()}

    return gather


def open_zarr(folder: Path) -> Gather:
    arrays = dict(zarr.open_group(folder, mode="r").arrays())

    def gather(index: torch.Tensor) -> Table:
        rows = index.numpy()
        wanted = {key: (rows, *[slice(None)] * (array.ndim - 1)) for key, array in arrays.items()}
        return {key: torch.from_numpy(array.oindex[wanted[key]]) for key, array in arrays.items()}

    return gather


def open_arrow(folder: Path) -> Gather:
    table = datasets.Dataset.from_file(str(folder.with_suffix(".arrow"))).with_format("torch")
    return lambda index: table[index.tolist()]


READERS: dict[str, tuple[Callable[[Path], Gather], str]] = {
    OURS: (open_ours, OURS),
    HAND: (open_hand, OURS),
    NUMPY: (open_numpy, NUMPY),
    PEER: (open_tensordict, CHUNKS),
    HDF5: (open_hdf5, HDF5),
    ZARR: (open_zarr, ZARR),
    ARROW: (open_arrow, ARROW),
}


def as_written(result: Any, whole: Table) -> Table:
    """The fields of a result, in the order and with the dtypes of the table: Arrow widens integers."""
    return {key: result[key].as_subclass(torch.Tensor).to(value.dtype) for key, value in whole.items()}


def time_writing(whole: Table, folder: Path, rounds: int) -> dict[str, list[float]]:
    parts = batches(whole, BATCH)
    seconds: dict[str, list[float]] = {}
    contenders = {who: function for who, (function, there) in WRITERS.items() if there}
    for i in range(rounds):
        for who in in_turn(contenders, i):
            _remove(folder / who)
            start = time.perf_counter()
            try:
                contenders[who](folder / who, parts, whole)
            except Exception as error:
                print(f"{who} is left out: {cause(error)}")
                continue
            seconds.setdefault(who, []).append(time.perf_counter() - start)
    return {who: times for who, times in seconds.items() if len(times) == rounds}


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.with_suffix(".arrow").unlink(missing_ok=True)


def gather_timers(whole: Table, folder: Path, written: Mapping[str, Any]) -> dict[int, dict[str, Timer]]:
    count = len(next(iter(whole.values())))
    timers: dict[int, dict[str, Timer]] = {}
    for size in (256, 4096):
        index = torch.randint(count, (size,), generator=torch.Generator().manual_seed(size))
        expected = {key: value[index] for key, value in whole.items()}
        for who, (opener, source) in READERS.items():
            if source in written:
                gather = opener(folder / source)
                assert same(as_written(gather(index), whole), expected), who
                timer = Timer("gather(index)", globals={"gather": gather, "index": index})
                timers.setdefault(size, {})[who] = timer
    return timers


def text_timers(mib: int, folder: Path) -> dict[int, dict[str, Timer]]:
    """Gathering texts of 0 to 400 bytes, as Python strings."""
    lengths = torch.randint(400, ((mib << 20) // 200,)).tolist()
    texts = ["x" * length for length in lengths]
    with RowWriter(folder, like={"text": ["x"]}, jagged=["text"]) as writer:
        for first in range(0, len(texts), BLOCK):
            writer.write({"text": texts[first : first + BLOCK]})
    table = load(folder)
    nested: Any = table["text"]
    values, offsets = nested.values(), nested.offsets()

    def by_index(index: torch.Tensor) -> list[str]:
        """With an index for each byte, as for dense fields."""
        starts, ends = offsets[:-1][index], offsets[1:][index]
        at = (ends - starts).cumsum(0)
        shift = torch.repeat_interleave(ends - at, ends - starts)
        data = values.index_select(0, torch.arange(int(at[-1])) + shift).numpy().tobytes()
        places = [0, *at.tolist()]
        return [data[a:b].decode() for a, b in pairwise(places)]

    def by_row(index: torch.Tensor) -> list[str]:
        """With a slice for each row."""
        return [bytes(values[offsets[i] : offsets[i + 1]].numpy()).decode() for i in index.tolist()]

    gathers = {OURS: lambda index: table.rows[index].decode("text"), SELECT: by_index, SLICES: by_row}
    timers: dict[int, dict[str, Timer]] = {}
    for size in (256, 4096):
        index = torch.randint(len(texts), (size,), generator=torch.Generator().manual_seed(size))
        for who, gather in gathers.items():
            assert gather(index) == [texts[i] for i in index.tolist()], who
            timers.setdefault(size, {})[who] = Timer("gather(index)", globals={"gather": gather, "index": index})
    return timers


def main() -> None:
    options = parser("Writing tables and gathering their rows, beside other formats.")
    options.add_argument("--folder", type=Path, help="where the files are written (a temporary folder)")
    options.add_argument("--mib", type=int, default=64, help="the size of each table in MiB (64)")
    given = options.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=given.folder))
    lines: list[dict[str, Any]] = []
    measured = setting(tensordict=tensordict, h5py=h5py, zarr=zarr, datasets=datasets)
    results: dict[str, dict[str, list[float]]] = {}
    try:
        for name, make in {"12 columns": columns, "images": images}.items():
            whole = make(given.mib)
            (folder / name).mkdir()
            seconds = time_writing(whole, folder / name, max(3, given.rounds // 3))
            ratios = {who: ratio(times, seconds[OURS]) for who, times in seconds.items() if who != OURS}
            lines += _lines(f"write {BATCH} at a time", name, ratios, {CHUNKS: 1.0, APPEND: 3.0})
            results[f"write {name}"] = seconds
            timers = gather_timers(whole, folder / name, seconds)
            for size, times in interleaved(timers, given.rounds).items():
                ratios = {who: ratio(spent, times[OURS]) for who, spent in times.items() if who != OURS}
                lines += _lines(f"gather {size}", name, ratios, GATHER_GOALS)
                results[f"gather {size} {name}"] = times
        for size, times in interleaved(text_timers(given.mib, folder / "texts"), given.rounds).items():
            ratios = {who: ratio(spent, times[OURS]) for who, spent in times.items() if who != OURS}
            lines += _lines(f"gather {size} and decode", "texts", ratios, {})
            results[f"gather {size} texts"] = times
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(ratio_table(lines, "their time over ours", "goal met", ""))
    for what, times in results.items():
        print(f"{what}: " + ", ".join(f"{who} {1e3 * median(spent):.3f} ms" for who, spent in times.items()))
    write(given.json, {**measured, "mib": given.mib, "rounds": given.rounds, **results, "lines": lines})


def _lines(operation: str, table: str, ratios: dict[str, Any], goals: dict[str, float]) -> list[dict[str, Any]]:
    """A line for each contender with a goal, and one for all others."""
    return [
        {
            "operation": f"{operation}, {who}, at least {goals[who]}" if who in goals else operation,
            "fields": table,
            "ratios": {who: r},
            "met": r["median"] >= goals[who] if who in goals else None,
        }
        for who, r in ratios.items()
    ]


if __name__ == "__main__":
    main()
