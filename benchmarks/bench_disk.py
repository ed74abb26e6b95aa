"""Compare saving and loading with safetensors, `torch.save` and the memory-mapped files of TensorDict.

    python benchmarks/bench_disk.py [--quick] [--rounds N] [--json PATH] [--folder PATH]

The time of loading includes one read of every value, because a memory-mapped file is read only then. The row "open" is
the time without this read. Files stay in the page cache, so the speed of the disk has no effect.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import interleaved, parser, ratio, ratio_table, same, setting, write
from safetensors.torch import load_file, save_file
from torch.utils.benchmark import Timer

from tensordict_lite import DeviceDict, load

try:
    from tensordict import TensorDict
except ImportError:
    TensorDict = None

OURS, LIBRARY, SYNCED, TORCH, PEER = "ours", "safetensors", "safetensors, fsync", "torch.save", "TensorDict memmap"
SIZES = {"4 x 40 MB": (4, 10_000_000), "200 x 2 KB": (200, 512)}
GOAL = 1.05  # times the time of the library


def synced(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write as safely as `DeviceDict.save`: the new file is on disk before the old file is replaced."""
    save_file(tensors, f"{path}.new")
    with open(f"{path}.new", "rb") as file:
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)


def look(d: Any) -> None:
    for value in d.values():
        value.sum()


def timers(count: int, size: int, folder: Path) -> dict[str, dict[str, Timer]]:
    """A timer for each contender of every operation. First asserts that all read what was written."""
    tensors = {f"k{i}": torch.rand(size) for i in range(count)}
    paths = {who: folder / who.replace(" ", "_") for who in (OURS, LIBRARY, SYNCED, TORCH, PEER)}
    known: dict[str, Any] = {"d": DeviceDict(tensors), "tensors": tensors, "paths": paths, "torch": torch, "load": load}
    known |= {"save_file": save_file, "load_file": load_file, "synced": synced, "look": look, "TensorDict": TensorDict}
    saves = {
        OURS: "d.save(paths['ours'])",
        LIBRARY: "save_file(tensors, paths['safetensors'])",
        SYNCED: "synced(tensors, paths['safetensors, fsync'])",
        TORCH: "torch.save(tensors, paths['torch.save'])",
    }
    loads = {
        OURS: "load(paths['ours'])",
        LIBRARY: "load_file(paths['safetensors'])",
        TORCH: "torch.load(paths['torch.save'], mmap=True)",
    }
    if TensorDict is not None:
        known["td"] = TensorDict(tensors, batch_size=[])
        saves[PEER] = "td.memmap(paths['TensorDict memmap'])"
        loads[PEER] = "TensorDict.load_memmap(paths['TensorDict memmap'])"
    for code in saves.values():
        exec(code, known)
    for who, code in loads.items():
        loaded = eval(code, known)
        assert all(same(tensors[key], torch.as_tensor(loaded[key]).as_subclass(torch.Tensor)) for key in tensors), who
    reads = {who: f"look({code})" for who, code in loads.items()}
    cases = {"save": saves, "load and read": reads, "open": loads}
    return {name: {who: Timer(code, globals=known) for who, code in codes.items()} for name, codes in cases.items()}


def main() -> None:
    options = parser("Saving and loading, beside safetensors, torch.save and TensorDict.")
    options.add_argument("--folder", type=Path, help="where the files are written (a temporary folder)")
    args = options.parse_args()
    torch.set_num_threads(1)
    measured = setting(safetensors=torch, tensordict=TensorDict)
    print(", ".join(f"{what} {name or 'is not installed, it is left out'}" for what, name in measured.items()))
    print(f"median (least..greatest) of {args.rounds} ratios of times; below 1 ours is faster\n", flush=True)
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    lines: list[dict[str, Any]] = []
    try:
        for fields, (count, size) in SIZES.items():
            for operation, seconds in interleaved(timers(count, size, folder), args.rounds).items():
                ratios = {who: ratio(seconds[OURS], times) for who, times in seconds.items() if who != OURS}
                met = None if operation == "open" else ratios[LIBRARY]["median"] <= GOAL
                lines.append({"operation": operation, "fields": fields, "ratios": ratios, "goal": GOAL, "met": met})
    finally:
        shutil.rmtree(folder)
    print(ratio_table(lines, "ours / contender", f"<= {GOAL}", LIBRARY))
    write(args.json, {**measured, "rounds": args.rounds, "results": lines})


if __name__ == "__main__":
    main()
