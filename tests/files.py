"""What several tests share: documented facts, classes at module level, as files name them, a round trip each way."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tensordict_lite import DeviceDict, TypedDeviceDict, Vocabulary, save
from tensordict_lite.tables.format import sealed


def write_index(folder: Path, index: dict[str, Any]) -> None:
    """Write a forged ``table.json``, with the checksum that it should have."""
    index = {key: value for key, value in index.items() if key != "crc32"}
    (folder / "table.json").write_text(sealed(json.dumps(index, separators=(",", ":"))))


TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
compiles = pytest.mark.skipif(
    TORCH < (2, 10), reason="this version of torch does not compile a DeviceDict in one graph"
)
OLD_DYNAMO = pytest.mark.xfail(TORCH < (2, 11), reason="Dynamo of torch 2.10", strict=True)
GOLDEN = Path(__file__).parent / "golden"
DEPTH = 64
"""The documented limit of nesting."""
_DTYPES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32 complex64 "
    "complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
)
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPES.split() if hasattr(torch, name)}
"""The dtypes of whole bytes that are copied by value, by name. `pack` takes each of them, and files hold them."""
_OPAQUE = "float4_e2m1fn_x2 bits8 bits16 bits1x8 bits2x4 bits4x2"
OPAQUE: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _OPAQUE.split() if hasattr(torch, name)}
"""The dtypes that `pack` takes too, and that files do not hold."""


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
