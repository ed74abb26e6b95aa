"""The golden files: what a version of the format looks like, byte for byte.

    python tests/golden/make.py [FOLDER]

A file that is here stays as it is, and every later version of the package reads it. A new version of the format gets new
files, beside these.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tensordict_lite import DeviceDict, Hashing, Utf8, Vocabulary

HERE = Path(__file__).parent


def plain() -> DeviceDict:
    """Every dtype, odd shapes, odd keys."""
    d = DeviceDict({"x": torch.arange(6.0).reshape(2, 3), "empty": torch.zeros(0, 3), "zero-d": 7, "a.b": {"c": 1, "": 2}, "a": {"b.c": 3}, "ü": {}})  # fmt: skip
    names = (
        "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32 complex64 "
        "complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
    )
    for name in names.split():
        d["dtypes", name] = torch.arange(16, dtype=torch.uint8).remainder(2).view(getattr(torch, name))
    return d


def options() -> DeviceDict:
    """Encoders and options, of nested dicts too."""
    encoders = {"colour": Vocabulary(["red", "green"], unknown="red"), "id": Hashing(16, seed=3), "name": Utf8(8)}
    d = DeviceDict(
        {"colour": ["green", "blue"], "id": ["a", "b"], "text": "free"}, encoders=encoders, dtype=torch.float16
    )
    d["inner"] = DeviceDict({"name": ["Ada"], "x": 0.5}, encoders=encoders, on_mismatch="move", objects="keep")
    return d


MAKE = {"plain-1.safetensors": plain, "options-1.safetensors": options}

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for name, make in MAKE.items():
        make().save(folder / name)
