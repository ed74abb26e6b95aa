"""Compare the most memory that operations take, beside what their operands take, and what a kept label keeps.

    python benchmarks/bench_memory.py [--quick] [--rounds N] [--only TEXT] [--json PATH]

Measured is the peak of the resident memory during the operation, less the resident memory before it, as a multiple of
the bytes of the data: 256 MiB. The pages of a mapped file that are read count. It needs Linux.

A loop over a DataLoader appends the label of each batch to a list. Measured are the bytes of the storages of the list.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_disk import FORMATS, read
from containers import TensorDict, as_tensordict
from harness import DICT, OURS, PEER, Case, Fields, Prepare, Run, equal_fields, folder, main
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from tensordict_lite import DeviceDict, cat, collate

SAMPLES, FIELDS, NUMBERS = 32, 8, 1 << 18  # a field of a sample has 1 MiB
PROCESS = Path("/proc/self")
BATCHES, IMAGES = 20, 64
Action = Callable[[Any], Any]


def resident(entry: str) -> int:
    """An entry of the status of this process, in bytes."""
    (kilobytes,) = re.findall(rf"{entry}:\s*(\d+) kB", (PROCESS / "status").read_text())
    return 1024 * int(kilobytes)


def peak(action: Action, operand: Any) -> float:
    gc.collect()
    (PROCESS / "clear_refs").write_text("5")  # sets the peak to what is resident now
    before = resident("VmRSS")
    action(operand)
    return (resident("VmHWM") - before) / (4 * SAMPLES * FIELDS * NUMBERS)


def contender(make: Callable[[Any], Any], action: Action) -> Prepare:
    """``make`` makes the operand of the action from the data of the case."""

    def prepare(data: Any) -> Run:
        operand = make(data)
        return Run(partial(action, operand), partial(peak, action, operand))

    return prepare


def samples() -> list[Fields]:
    return [equal_fields(FIELDS, 1, NUMBERS) for _ in range(SAMPLES)]


def joined_by_hand(dicts: list[Fields]) -> Fields:
    return {key: torch.cat([fields[key] for fields in dicts]) for key in dicts[0]}


MAKERS: dict[str, Callable[[Fields], Any]] = {OURS: DeviceDict, DICT: dict, PEER: as_tensordict}
JOINS: dict[str, dict[str, Action]] = {
    "`collate`": {OURS: collate, DICT: default_collate, PEER: torch.stack},
    "`cat`": {OURS: cat, DICT: joined_by_hand, PEER: TensorDict.cat},
}
ON_DISK = {OURS: OURS, "safetensors": DICT, "TensorDict `memmap`": PEER}  # by format: its contender


def join(operation: str) -> Case:
    def of(who: str) -> Prepare:
        return contender(lambda data: [MAKERS[who](sample) for sample in data], JOINS[operation][who])

    return Case(operation, "", {who: of(who) for who in MAKERS}, samples, unit="of the data")


def disk(operation: str) -> Case:
    def of(form: str) -> Prepare:
        one, path = FORMATS[form], folder() / form

        def save(container: Any) -> Path:
            one.save(container, path)
            return path

        if operation == "`save`":
            return contender(one.make, lambda container: save(container).exists())
        return contender(lambda data: save(one.make(data)), lambda path: read(one.load(path)))

    fields = partial(equal_fields, FIELDS, SAMPLES, NUMBERS)
    return Case(operation, "", {who: of(form) for form, who in ON_DISK.items()}, fields, unit="of the data")


def consolidated(dicts: list[Any]) -> Any:
    return torch.stack(dicts).consolidate(share_memory=True)


COLLATES: dict[str, tuple[Action, Action]] = {  # the container of a sample, and what makes a batch of samples
    OURS: (dict, collate),
    DICT: (dict, default_collate),
    "TensorDict consolidated": (partial(as_tensordict, batch_dims=0), consolidated),
    "TensorDict lazy_stack": (partial(as_tensordict, batch_dims=0), TensorDict.lazy_stack),
}


def images() -> list[Fields]:
    """The samples of a batch: an image of 120 KB, and its label."""
    return [{"image": torch.zeros(3, 200, 200, dtype=torch.uint8), "label": torch.tensor(i)} for i in range(IMAGES)]


def labels(loader: DataLoader[Any]) -> list[Tensor]:
    return [batch["label"] for batch in loader]


def kept(loader: DataLoader[Any]) -> float:
    storages = [label.untyped_storage() for label in labels(loader)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def keep(workers: int) -> Case:
    def of(who: str) -> Prepare:
        container, batch = COLLATES[who]

        def prepare(data: list[Fields]) -> Run:
            order: Any = [range(IMAGES)] * BATCHES
            loader = DataLoader([*map(container, data)], batch_sampler=order, num_workers=workers, collate_fn=batch)
            return Run(partial(labels, loader), partial(kept, loader))

        return prepare

    where = f"{workers} worker{'' if workers == 1 else 's'}"
    return Case(
        f"keep the labels of {BATCHES} batches, {where}",
        f"{IMAGES} images of 120 KB",
        {who: of(who) for who in COLLATES},
        images,
        unit="bytes",
        at_most=1,
    )


def cases() -> list[Case]:
    return [*map(join, JOINS), disk("`save`"), disk("`load`, and read every value"), keep(0), keep(1)]


if __name__ == "__main__":
    main(__doc__, cases, ["safetensors", "tensordict"])
