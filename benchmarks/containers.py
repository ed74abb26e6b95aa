"""What holds a batch: containers, and tables. Several benchmarks use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness import DICT, OURS, PEER, Fields, optional

from tensordict_lite import DeviceDict

BATCH, FEATURE = "tianshou Batch", "BatchFeature"
TensorDict = optional("tensordict", "TensorDict")
Batch = optional("tianshou.data", "Batch")
BatchFeature = optional("transformers", "BatchFeature")


def as_tensordict(fields: Fields, batch_dims: int = 1) -> Any:
    """A TensorDict with a device and a batch size."""
    return TensorDict(fields, batch_size=next(iter(fields.values())).shape[:batch_dims], device="cpu")


def images(count: int) -> Fields:
    """A table of images with labels."""
    image = torch.randint(256, (count, 3, 64, 64), dtype=torch.uint8)
    return {"image": image, "label": torch.randint(1000, (count,))}


def length(table: Fields) -> int:
    """The number of rows."""
    return len(next(iter(table.values())))


def selected(batch: Any, table: Fields) -> Fields:
    """The columns of a table in a batch, which may have others."""
    return {key: batch[key] for key in table}


CONTAINERS: dict[str, Callable[[Fields], Any]] = {
    OURS: DeviceDict,
    DICT: dict,
    PEER: as_tensordict,
    BATCH: Batch,
    FEATURE: BatchFeature,
}
