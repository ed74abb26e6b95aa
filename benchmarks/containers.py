"""What holds a batch: the containers of `bench_peers.py` and `outputs.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness import DICT, OURS, PEER, Fields, optional

from tensordict_lite import DeviceDict

BATCH, FEATURE = "tianshou Batch", "BatchFeature"
TensorDict = optional("tensordict", "TensorDict")
Batch = optional("tianshou.data", "Batch")
BatchFeature = optional("transformers", "BatchFeature")


def as_tensordict(fields: Fields, batch_dims: int = 1) -> Any:
    """A TensorDict with a device and a batch size."""
    return TensorDict(fields, batch_size=next(iter(fields.values())).shape[:batch_dims], device="cpu")


CONTAINERS: dict[str, Callable[[Fields], Any]] = {
    OURS: DeviceDict,
    DICT: dict,
    PEER: as_tensordict,
    BATCH: Batch,
    FEATURE: BatchFeature,
}
