"""What the tests of files share: classes at module level, as files name them, and a round trip each way."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tensordict_lite import (
    DeviceDict,
    TypedDeviceDict,
    Vocabulary,
    save,
)

GOLDEN = Path(__file__).parent / "golden"


class Batch(DeviceDict, on_mismatch="move", encoders={"s": Vocabulary(["a", "b"])}):
    """At module level, as `torch.save` names it."""


class Keeping(DeviceDict, objects="keep"):
    pass


class Obs(TypedDeviceDict):
    state: Tensor


class Typed(TypedDeviceDict):
    x: Tensor
    obs: Obs
    w: Tensor | None = None


def sample() -> DeviceDict:
    return DeviceDict(
        {"x": torch.arange(6.0).reshape(2, 3), "name": ["Ada", "Bo"], "n": {"y": 1, "e": {}, "m": {"z": [True]}}}
    )


def saved(d: Any, path: Path) -> Path:
    save(d, path)
    return path


def torch_saved_and_loaded(d: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(d, file)
    file.seek(0)
    return torch.load(file, **{"weights_only": True, **options})
