"""The contenders of bench_peers.py, and the statement of each contender for each operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import default_collate

from tensordict_lite import DeviceDict

ROWS = 32  # rows of the batch


@dataclass(frozen=True)
class Contender:
    """``package``: the distribution. ``imports``: the import statement. ``make``: the container of the fields ``s``."""

    name: str
    package: str = ""
    imports: str = "pass"
    make: str = "dict(s)"


OURS = Contender("DeviceDict", "", "from tensordict_lite import DeviceDict, collate, load, stack", "DeviceDict(s)")
DICT = Contender("dict")
PACKED = Contender("dict, packed")  # packed by hand, which is possible for fields of one dtype
PEER = Contender(
    "TensorDict",
    "tensordict",
    "from tensordict import TensorDict",
    "TensorDict(s, batch_size=batch_size, device='cpu')",
)
BATCH = Contender("tianshou Batch", "tianshou", "from tianshou.data import Batch", "Batch(s)")
FEATURE = Contender("BatchFeature", "transformers", "from transformers import BatchFeature", "BatchFeature(s)")
SENT = Contender("send_to_device", "accelerate", "from accelerate.utils import send_to_device")
TREE = Contender("pytree", "", "from torch.utils._pytree import tree_map")
CONTENDERS = (OURS, DICT, PACKED, PEER, BATCH, FEATURE, SENT, TREE)
CONTAINERS = (OURS, DICT, PEER, BATCH, FEATURE)


@dataclass(frozen=True)
class Row:
    """An operation: one statement for each contender. ``x`` is the container."""

    name: str
    codes: Mapping[Contender, str]
    result: str = ""  # an expression that is true if the statement did its work; for a statement that is no expression


def everywhere(code: str, but: Mapping[Contender, str] | None = None) -> dict[Contender, str]:
    """One statement for every container, with exceptions."""
    return {**dict.fromkeys(CONTAINERS, code), **(but or {})}


LOOP = "{k: %s for k, v in x.items()}"
MAP = "tree_map(lambda v: %s, x)"
PICKLED = "torch.save(x, path)"
CAST = Row(
    "to(torch.float64)",
    {
        OURS: "x.to(torch.float64)",
        DICT: LOOP % "v.to(torch.float64)",
        PEER: "x.to(torch.float64)",
        BATCH: "x.to_torch(dtype=torch.float64)",
        FEATURE: "copy(x).to(torch.float64)",  # because `to` changes it in place
        TREE: MAP % "v.to(torch.float64)",
    },
)
PACK = Row("pack", {OURS: "x.pack()", PACKED: "packed_by_hand(x)", PEER: "x.consolidate()"})
CONTAINER = (
    Row("construct", {one: one.make for one in CONTAINERS}),
    Row("read", everywhere('x["k0"]')),
    Row("write", everywhere("for k, v in others: x[k] = v\nfor k, v in fields: x[k] = v"), result="x"),
    Row("iterate", everywhere("for k, v in x.items(): pass"), result="dict(x.items())"),
    Row(
        "to(same device)",
        {
            OURS: 'x.to("cpu")',
            DICT: LOOP % 'v.to("cpu")',
            PEER: 'x.to("cpu")',
            BATCH: 'x.to_torch(device="cpu")',
            FEATURE: 'x.to("cpu")',
            SENT: 'send_to_device(x, "cpu")',
            TREE: MAP % 'v.to("cpu")',
        },
    ),
    CAST,
    Row(
        "numpy",
        {
            OURS: "x.numpy()",
            DICT: LOOP % "v.numpy()",
            PEER: "x.numpy()",
            BATCH: "x.to_numpy()",
            TREE: MAP % "v.numpy()",
        },
    ),
    Row(
        "clone",
        {OURS: "x.clone()", DICT: LOOP % "v.clone()", PEER: "x.clone()", BATCH: "deepcopy(x)", FEATURE: "deepcopy(x)"}
        | {TREE: MAP % "v.clone()"},
    ),
    PACK,
    Row(
        "rows 8 to 16",
        {OURS: "x.rows[8:16]", DICT: LOOP % "v[8:16]", PEER: "x[8:16]", BATCH: "x[8:16]", TREE: MAP % "v[8:16]"},
    ),
    Row("one row", {OURS: "x.rows[3]", DICT: LOOP % "v[3]", PEER: "x[3]", BATCH: "x[3]", TREE: MAP % "v[3]"}),
    Row(
        f"stack {ROWS}",
        {
            OURS: "stack(xs)",
            DICT: "{k: torch.stack([x[k] for x in xs]) for k in xs[0]}",
            PEER: "torch.stack(xs)",
            BATCH: "Batch.stack(xs)",
            TREE: "tree_map(lambda *vs: torch.stack(vs), *xs)",
        },
    ),
)
# Strings to padded bytes, and back.
STRINGS = (
    Row("1000 strings in", {OURS: 'DeviceDict({"k": strings})["k"]', DICT: "as_bytes(strings)"}),
    Row("1000 strings out", {OURS: 'texts.decode("k")', DICT: "as_strings(codes)"}),
)
FILES = (
    Row("save", everywhere(PICKLED, {OURS: "x.save(path)", DICT: "save_file(x, path)", PEER: "x.memmap(path)"}), "x"),
    Row(
        "load and read",
        everywhere(
            "read(torch.load(path, weights_only=False))",
            {OURS: "read(load(path))", DICT: "read(load_file(path))", PEER: "read(TensorDict.load_memmap(path))"},
        ),
    ),
)
# Functions that make a batch of samples, in a worker.
COLLATED = Row(
    "loader, 1 worker",
    {
        OURS: "collate",
        DICT: "default_collate",
        PACKED: "lambda samples: packed_by_hand({k: torch.stack([s[k] for s in samples]) for k in samples[0]})",
        PEER: "lambda samples: torch.stack(samples).consolidate(share_memory=True)",
        BATCH: "Batch.stack",
        FEATURE: "default_collate",
    },
)
# The object put into the queue, made anew for every message.
QUEUED = Row(
    "through a queue", everywhere("x", {OURS: "x.pack()", PACKED: "packed_by_hand(x)", PEER: "x.consolidate()"})
)
IMPORT = Row("import, beside torch", {one: one.imports for one in (OURS, PEER, BATCH, FEATURE, SENT)})
MEASURED = (CAST, PACK)  # with large fields, for peak memory


def packed_by_hand(fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The fields in one storage. For fields of one dtype, this takes two calls of torch."""
    together = torch.cat([v.flatten() for v in fields.values()])
    parts = together.split([v.numel() for v in fields.values()])
    return {k: part.view(v.shape) for part, (k, v) in zip(parts, fields.items(), strict=True)}


def as_bytes(strings: Sequence[str]) -> Tensor:
    """uint8 ``[n, L]``, padded by NumPy. A NUL at the end of a string would be lost."""
    array = np.array([string.encode() for string in strings])
    return torch.from_numpy(array.view(np.uint8).reshape(len(strings), -1))


def as_strings(codes: Tensor) -> list[str]:
    return [string.decode() for string in codes.numpy().view(f"S{codes.shape[1]}").ravel().tolist()]


def read(x: Any) -> Any:
    """Read every value, because a memory-mapped file is read only then."""
    for value in x.values():
        value.sum()
    return x


def names(one: Contender) -> dict[str, Any]:
    """The variables of a contender's statements, except tensors. Raises ImportError if its package is missing."""
    known: dict[str, Any] = {"torch": torch, "read": read, "packed_by_hand": packed_by_hand}
    exec(f"from copy import copy, deepcopy\n{one.imports}", known)
    return known | {"default_collate": default_collate}


def scope(one: Contender, fields: Mapping[str, Tensor], folder: str) -> dict[str, Any]:
    """All variables of the statements of a contender."""
    known = names(one)
    known |= {"s": dict(fields), "batch_size": [ROWS], "fields": list(fields.items()), "path": f"{folder}/{one.name}"}
    strings = [f"image {i} of {i**2}" for i in range(1000)]
    known |= {"strings": strings, "as_bytes": as_bytes, "as_strings": as_strings, "codes": as_bytes(strings)}
    known |= {"texts": DeviceDict({"k": strings}), "save_file": save_file, "load_file": load_file}
    known["others"] = [(k, torch.rand_like(v)) for k, v in fields.items()]
    known["x"] = make(one, known, fields)
    known["xs"] = [make(one, known, {k: v[i] for k, v in fields.items()}, []) for i in range(ROWS)]
    return known


def make(
    one: Contender, known: Mapping[str, Any], fields: Mapping[str, Tensor], batch_size: Sequence[int] = (ROWS,)
) -> Any:
    """The container of ``fields``."""
    return eval(one.make, {**known, "s": dict(fields), "batch_size": list(batch_size)})


def plain(x: Any) -> Any:
    """The result as plain dicts and lists, for comparison."""
    if isinstance(x, (list, tuple)):
        return type(x)(map(plain, x))
    if hasattr(x, "items"):
        return {k: plain(v) for k, v in sorted(x.items())}  # Batch.stack changes the order of the keys
    return x.as_subclass(Tensor) if isinstance(x, Tensor) else x  # TensorDict maps files to a subclass of Tensor
