"""Compare saving and loading with safetensors, `torch.save` and the memory-mapped files of TensorDict.

    python benchmarks/bench_disk.py [--quick] [--rounds N] [--only TEXT] [--json PATH]

The time of loading includes one read of every value, because a memory-mapped file is read only then. Files stay in the
page cache, so the speed of the disk has no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import OURS, Case, Fields, Prepare, equal_fields, folder, main, optional, statement
from safetensors.torch import load_file, save_file

from tensordict_lite import DeviceDict, load

TensorDict = optional("tensordict", "TensorDict")
SIZES = {"200 of 2 KB": (200, 512), "4 of 40 MB": (4, 10_000_000)}


@dataclass(frozen=True)
class Format:
    """A container, how to write it to a path, and how to read it."""

    make: Callable[[Fields], Any]
    save: Callable[[Any, Path], Any]
    load: Callable[[Path], Any]


FORMATS = {
    OURS: Format(DeviceDict, DeviceDict.save, load),
    "safetensors": Format(dict, save_file, load_file),
    "`torch.save`": Format(dict, torch.save, partial(torch.load, mmap=True)),
    "TensorDict `memmap`": Format(
        lambda s: TensorDict(s, batch_size=[]),
        lambda td, path: td.memmap(path),
        TensorDict.load_memmap,
    ),
}


def read(d: Any) -> Any:
    for value in d.values():
        value.sum()
    return d


def saving(who: str) -> Prepare:
    one = FORMATS[who]
    return statement("save(x, path)", one.make, "load(path)", save=one.save, load=one.load, path=folder() / who)


def loading(who: str) -> Prepare:
    one, path = FORMATS[who], folder() / who

    def make(data: Fields) -> Path:
        one.save(one.make(data), path)
        return path

    return statement("read(load(x))", make, read=read, load=one.load)


def cases() -> list[Case]:
    return [
        Case(operation, size, {who: prepare(who) for who in FORMATS}, partial(equal_fields, *SIZES[size]))
        for operation, prepare in (("save", saving), ("load and read", loading))
        for size in SIZES
    ]


if __name__ == "__main__":
    main(__doc__, cases, ["safetensors", "tensordict"])
