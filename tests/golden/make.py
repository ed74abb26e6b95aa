"""The golden files: one of each form that the package writes.

    python tests/golden/make.py [FOLDER]

A file that is here stays as it is, and every later version of the package reads it. The number in its name is the
version of its form. A new version gets new files, beside these. Safetensors files are compared byte for byte.
"""

from __future__ import annotations

import pickle
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tensordict_lite import DeviceDict, Hashing, Ragged, Tokenizer, Utf8, Vocabulary
from tensordict_lite.tables import RowWriter

HERE = Path(__file__).parent


def plain() -> DeviceDict:
    """Every dtype, odd shapes, odd keys."""
    d = DeviceDict(
        {
            "x": torch.arange(6.0).reshape(2, 3),
            "empty": torch.zeros(0, 3),
            "zero-d": 7,
            "a.b": {"c": 1, "": 2},
            "a": {"b.c": 3},
            "ü": {},
        }
    )
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
    inner = {"name": ["Ada"], "x": torch.tensor(0.5)}
    d["inner"] = DeviceDict(inner, encoders=encoders, on_mismatch="move", objects="keep")
    return d


MAKE = {"plain-1.safetensors": plain, "options-1.safetensors": options}


def unpacked() -> DeviceDict:
    """Strings, numbers, an empty nested dict, an encoder and an option."""
    return DeviceDict(
        {"x": torch.arange(6.0).reshape(2, 3), "name": ["Ada", "Bo"], "n": {"y": 3, "e": {}}, "c": ["red"]},
        encoders={"c": Vocabulary(["red", "green"])},
        dtype=torch.float16,
    )


def packed() -> DeviceDict:
    """The same in one buffer."""
    return unpacked().pack()


def kept() -> DeviceDict:
    """An object, and a bare callable as an encoder."""
    return DeviceDict({"x": [1, 2], "k": {1, 2}}, objects="keep", encoders={"s": len})


def tokenizer() -> DeviceDict:
    """A `Tokenizer`, of a callable that every Python can unpickle."""
    callable_: Any = partial(dict)
    callable_.batch_decode = list
    return DeviceDict({"x": [1, 2]}, encoders={"text": Tokenizer(callable_, truncation=True)})


def rows() -> Any:
    """The view of the rows, as a `DataLoader` that spawns its workers sends it."""
    return DeviceDict({"x": [1, 2]}).rows


def table() -> DeviceDict:
    """The rows of a table: strings, an encoder, nesting, and a dtype that is stored as pairs."""
    encoders = {"colour": Vocabulary(["red", "green"]), "name": Utf8(6)}
    data = {
        "colour": ["green", "red"],
        "name": ["Ada", "Bo"],
        "n": {"z/1": torch.tensor([1 + 2j, 3], dtype=torch.complex128), "e": {}},
    }
    return DeviceDict(data, encoders=encoders, dtype=torch.float64)


TABLE, RAGGED = "table-2", "ragged-2"


def save_table(folder: Path) -> None:
    with RowWriter(folder / TABLE, like=table(), checksums=True) as writer:
        writer.write(table())
    like = {"text": [""], "n": {"ids": [[0]], "box": [[[0.5]]]}}
    with RowWriter(folder / RAGGED, like=like, ragged=["text", "ids", ("n", "box")]) as writer:
        writer.write({"text": ["Ada", "", "é"], "n": {"ids": [[1, 2], [], [3]], "box": [[[0.5]], [], [[1], [2]]]}})


def ragged() -> Any:
    """A ragged field beside one that shares its offsets in a dict, and alone."""
    ids = Ragged([1, 2, 3], [0, 2, 2, 3])
    return {"dict": DeviceDict({"ids": ids, "n": {"box": ids.with_values(torch.ones(3, 2))}}), "alone": ids}


def large() -> DeviceDict:
    """A large tensor beside small ones, without elements too."""
    x = torch.arange(40_000).remainder(251).to(torch.int16).reshape(2, -1)
    return DeviceDict({"x": x, "y": [1, 2], "n": {"z": 3, "same": x, "e": torch.ones(0, 3)}})


PICKLED = {"unpacked": unpacked, "packed": packed, "kept": kept, "tokenizer": tokenizer, "rows": rows, "ragged": ragged}
PROTOCOLS = (2, 3, 4, 5)
VERSION = 1


def save_pickles(folder: Path, version: int) -> None:
    """Each of `PICKLED` in every protocol of pickle, and, if it is a dict, as a file of `torch.save`."""
    for name, make in PICKLED.items():
        for protocol in PROTOCOLS:
            (folder / f"{name}-protocol{protocol}-{version}.pickle").write_bytes(pickle.dumps(make(), protocol))
        if isinstance(make(), dict):
            torch.save(make(), folder / f"{name}-{version}.pt")
    (folder / f"large-protocol5-{version}.pickle").write_bytes(pickle.dumps(large(), 5))


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for name, make in MAKE.items():
        make().save(folder / name)
    save_table(folder)
    save_pickles(folder, VERSION)
