"""Compare every operation of DeviceDict with other containers of a batch: one table of ratios, on this machine.

    python benchmarks/bench_peers.py [--fields 40] [--quick] [--rounds N] [--only TEXT] [--json PATH]

The batch has 32 rows; a field is float32[32, 16]. Arithmetic has 400 such fields. Each container uses its own fastest
way. All contenders use one thread. Packages that are not installed are left out and named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from functools import cache, partial
from statistics import median
from time import perf_counter
from typing import Any

import bench_loader
import numpy as np
import torch
import torch.multiprocessing
from containers import BATCH, CONTAINERS, FEATURE, Batch, BatchFeature, TensorDict, as_tensordict
from count_instructions import Request, Requests, checked, checked_one, request
from harness import DICT, OURS, PEER, Case, Fields, Helpers, Prepare, Run, fresh, main, optional, statement, statements
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from tensordict_lite import DeviceDict, TypedDeviceDict, collate, stack

send_to_device = optional("accelerate.utils", "send_to_device")

ROWS, WIDTH = 32, 16
MESSAGES = 20  # batches through the queue in one round
JOINED = "dict, packed"  # packed by hand, which is possible for fields of one dtype
SENT, TREE = "send_to_device", "pytree"
MAKERS = {**CONTAINERS, JOINED: dict, SENT: dict, TREE: dict}


def packed_by_hand(fields: Mapping[str, Tensor]) -> Fields:
    """The fields in one storage. For fields of one dtype, this takes two calls of torch."""
    together = torch.cat([v.flatten() for v in fields.values()])
    parts = together.split([v.numel() for v in fields.values()])
    return {k: part.view(v.shape) for part, (k, v) in zip(parts, fields.items(), strict=True)}


def beside(ours: str, loop: str, peer: str, batch: str, **others: str) -> dict[str, str]:
    """The code of each contender. ``loop``: the expression for a field ``v``, in a plain loop and in torch's pytree."""
    by_hand = {DICT: f"{{k: {loop} for k, v in x.items()}}", TREE: f"tree_map(lambda v: {loop}, x)"}
    return {OURS: ours, **by_hand, PEER: peer, BATCH: batch, **others}


def everywhere(code: str) -> dict[str, str]:
    return dict.fromkeys(CONTAINERS, code)


CAST = beside(
    "x.to(torch.float64)",
    "v.to(torch.float64)",
    "x.to(torch.float64)",
    "x.to_torch(dtype=torch.float64)",
    BatchFeature="copy(x).to(torch.float64)",  # because `to` changes it in place
)
MOVE = beside(
    'x.to("cpu")',
    'v.to("cpu")',
    'x.to("cpu")',
    'x.to_torch(device="cpu")',
    BatchFeature='x.to("cpu")',
    send_to_device='send_to_device(x, "cpu")',
)
PACK = {OURS: "x.pack()", JOINED: "packed_by_hand(x)", PEER: "x.consolidate()"}
BUILD = {OURS: "DeviceDict(s)", DICT: "dict(s)", PEER: f"TensorDict(s, batch_size=[{ROWS}], device='cpu')"}
# By operation: the code of each contender. ``x`` is the container.
OPERATIONS = {
    "construct": {**BUILD, BATCH: "Batch(s)", FEATURE: "BatchFeature(s)"},
    "read one field": everywhere('x["k0"]'),
    "read an attribute": {OURS: "typed.k0", DICT: 'x["k0"]', BATCH: "x.k0"},
    "find a key": everywhere('"k0" in x'),
    "write {n} fields": everywhere("for k, v in others: x[k] = v\nfor k, v in fields: x[k] = v"),
    "iterate": everywhere("for k, v in x.items(): pass"),
    "`.to()` on the current device": MOVE,
    "cast of every tensor": CAST,
    "`numpy`": beside("x.numpy()", "v.numpy()", "x.numpy()", "x.to_numpy()"),
    "clone": beside("x.clone()", "v.clone()", "x.clone()", "deepcopy(x)", BatchFeature="deepcopy(x)"),
    "pack": PACK,
    "rows 8 to 16": beside("x.rows[8:16]", "v[8:16]", "x[8:16]", "x[8:16]"),
    "one row": beside("x.rows[3]", "v[3]", "x[3]", "x[3]"),
}
# For code that is no expression: what must be equal after it.
RESULTS = {"write {n} fields": "x", "iterate": "dict(x.items())"}
STACK = {
    OURS: "stack(x)",
    DICT: "{k: torch.stack([d[k] for d in x]) for k in x[0]}",
    PEER: "torch.stack(x)",
    BATCH: "Batch.stack(x)",
    TREE: "tree_map(lambda *vs: torch.stack(vs), *x)",
}
# Strings to padded bytes, and back.
STRINGS = {
    "1000 strings in": {OURS: 'DeviceDict({"k": x})["k"]', DICT: "as_bytes(x)"},
    "1000 strings out": {OURS: 'texts.decode("k")', DICT: "as_strings(encoded)"},
}
# Arithmetic in place on ``c``, with the operand ``y``: the call, and the same for each field of a plain dict.
IN_PLACE = {
    "`lerp_`": ("c.lerp_(y, 0.01)", "for k, v in c.items(): v.lerp_(y[k], 0.01)"),
    "`add_`": ("c.add_(y)", "for k, v in c.items(): v.add_(y[k])"),
    "`copy_`": ("c.copy_(y)", "for k, v in c.items(): v.copy_(y[k])"),
    "`zero_`": ("c.zero_()", "for k, v in c.items(): v.zero_()"),
}
# 4 tensors, and 4 values that ``objects="keep"`` keeps as they are.
KEPT: dict[str, Any] = {f"k{i}": torch.rand(ROWS, WIDTH) for i in range(4)}
KEPT |= {"size": (480, 640), "split": "train", "names": ["a", "b"], "hidden": None}
# Small samples and parsed JSON, in the main process: the data, the call, the same with plain dicts, what must be equal.
SMALL: dict[str, tuple[Any, str, str, str]] = {
    "collate 8 samples with strings": (
        [{"x": torch.rand(4), "y": i, "name": f"image {i}"} for i in range(8)],
        "out = collate(x)",
        "out = default_collate(x)",
        "{k: out[k] for k in ('x', 'y')}",
    ),
    "collate 64 samples of 8 tensors": (
        [{f"k{k}": torch.rand(WIDTH) for k in range(8)} for _ in range(64)],
        "collate(x)",
        "default_collate(x)",
        "",
    ),
    **{
        f"collate {n} requests": ([request(i) for i in range(n)], "collate(x, cls=Requests)", "checked(x)", "")
        for n in (1, 8, 32)
    },
    "construct with 4 kept values": (KEPT, "DeviceDict(x, objects='keep')", "dict(x)", ""),
    "`.to(torch.float64)` with 4 kept values": (
        KEPT,
        "keeps.to(torch.float64)",
        "{k: v.to(torch.float64) if isinstance(v, Tensor) else v for k, v in x.items()}",
        "",
    ),
    "`from_dict` of a request": (request(0), "Request.from_dict(x)", "checked_one(x)", ""),
}
# Functions that make a batch of samples, in a worker.
COLLATED: dict[str, Callable[[list[Any]], Any]] = {
    OURS: collate,
    DICT: default_collate,
    JOINED: lambda samples: packed_by_hand({k: torch.stack([s[k] for s in samples]) for k in samples[0]}),
    PEER: bench_loader.consolidated,
    BATCH: Batch.stack,
    FEATURE: default_collate,
}
# What is put into the queue, made anew for every message.
QUEUED: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(CONTAINERS, lambda x: x),
    OURS: DeviceDict.pack,
    JOINED: packed_by_hand,
    PEER: lambda x: x.consolidate(),
}
IMPORTS = {
    OURS: "from tensordict_lite import DeviceDict, collate, load, stack",
    PEER: "from tensordict import TensorDict",
    BATCH: "from tianshou.data import Batch",
    FEATURE: "from transformers import BatchFeature",
    SENT: "from accelerate.utils import send_to_device",
}


def as_bytes(strings: Sequence[str]) -> Tensor:
    """uint8 ``[n, L]``, padded by NumPy. A NUL at the end of a string would be lost."""
    array = np.array([string.encode() for string in strings])
    return torch.from_numpy(array.view(np.uint8).reshape(len(strings), -1))


def as_strings(codes: Tensor) -> list[str]:
    return [string.decode() for string in codes.numpy().view(f"S{codes.shape[1]}").ravel().tolist()]


NAMES: dict[str, Any] = {
    **{one.__name__: one for one in (DeviceDict, copy, deepcopy, stack, tree_map)},
    **{one.__name__: one for one in (packed_by_hand, as_bytes, as_strings)},
    "TensorDict": TensorDict,
    "Batch": Batch,
    "BatchFeature": BatchFeature,
    "send_to_device": send_to_device,
}


def samples_of(who: str, batch: Fields) -> list[Any]:
    make = partial(as_tensordict, batch_dims=0) if who == PEER else MAKERS[who]
    return [make({k: v[i] for k, v in batch.items()}) for i in range(ROWS)]


def container_cases(batch: Fields) -> list[Case]:
    """The operations of the container."""
    names: dict[str, Any] = {**NAMES, "s": batch, "fields": list(batch.items())}
    names["others"] = [(k, torch.rand_like(v)) for k, v in batch.items()]
    strings = [f"image {i} of {i**2}" for i in range(1000)]
    names |= {"texts": DeviceDict({"k": strings}), "encoded": as_bytes(strings), "typed": typed(batch)}

    def case(operation: str, codes: Mapping[str, str], makers: Mapping[str, Any] = MAKERS, data: Any = batch) -> Case:
        contenders = statements(codes, makers, result=RESULTS.get(operation, ""), **names)
        return Case(operation.format(n=2 * len(batch)), "", contenders, lambda: data)

    return [
        *(case(operation, codes) for operation, codes in OPERATIONS.items()),
        case("stack 32 dicts", STACK, {who: partial(samples_of, who) for who in STACK}),
        *(case(operation, codes, dict.fromkeys(MAKERS, list), strings) for operation, codes in STRINGS.items()),
    ]


def small_cases() -> list[Case]:
    """Batches and requests that are so small that the calls of Python decide."""
    known = (collate, default_collate, checked, checked_one, Request, Requests, DeviceDict, Tensor)
    names: dict[str, Any] = {one.__name__: one for one in known}
    names |= {"torch": torch, "keeps": DeviceDict(KEPT, objects="keep")}
    found: list[Case] = []
    for operation, (data, ours, by_hand, result) in SMALL.items():
        codes, makers = {OURS: ours, DICT: by_hand}, dict.fromkeys((OURS, DICT), lambda given: given)
        found.append(Case(operation, "", statements(codes, makers, result=result, **names), partial(copy, data)))
    return found


def close(x: Fields, y: Fields) -> bool:
    """Whether two results are equal. A loop may round otherwise."""
    return x.keys() == y.keys() and all(torch.allclose(x[key], y[key]) for key in x)


def typed(batch: Fields) -> TypedDeviceDict:
    made: Any = type("Typed", (TypedDeviceDict,), {"__annotations__": dict.fromkeys(batch, Tensor)})
    return made(batch)


def in_place_case(operation: str, batch: Fields) -> Case:
    whole, loop = IN_PLACE[operation]

    def contender(who: str) -> Prepare:
        def make(_: Any) -> Any:
            return tuple(MAKERS[who]({k: v.roll(shift) for k, v in batch.items()}) for shift in (0, 1))

        return statement(loop if who == DICT else whole, make, "c", "c, y = x")

    return Case(operation, f"{len(batch)} fields", {who: contender(who) for who in (OURS, DICT, PEER)}, equal=close)


@contextmanager
def sharing(strategy: str) -> Iterator[None]:
    """Share memory between processes by this strategy of torch. Workers that fork inherit it."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(strategy)
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def loader_case(count: int, strategy: str) -> Case:
    """The seconds per batch that a worker collates from samples in memory."""
    size = bench_loader.Size(count, (WIDTH,))
    makers = {**MAKERS, PEER: partial(as_tensordict, batch_dims=0)}
    contenders = {
        who: bench_loader.loading(bench_loader.Contender(makers[who], function), size, workers=1)
        for who, function in COLLATED.items()
    }
    operation = f"receive a batch from a worker, `{strategy}`"
    return Case(operation, "", contenders, within=partial(sharing, strategy))


held: list[Any] = []


def receive(batch: Any, answer: bool) -> Any:
    """Run in the other process: hold each batch until the next one arrives, and send it back if asked."""
    held[:] = [batch]
    return batch if answer else None


@cache
def receiver() -> Helpers:
    return Helpers(1)


def queue_case(batch: Fields) -> Case:
    """The seconds until another process has received a new batch and confirmed it."""

    def queued(who: str) -> Prepare:
        def send(answer: bool) -> tuple[Any, float]:
            x = MAKERS[who]({k: v.clone() for k, v in batch.items()})
            start = perf_counter()
            (got,) = receiver().ask(receive, QUEUED[who](x), answer)
            return got, perf_counter() - start

        return lambda _: Run(lambda: send(True)[0], lambda: median(send(False)[1] for _ in range(MESSAGES)))

    return Case("send a batch through a queue", "", {who: queued(who) for who in QUEUED})


# Prints the seconds of an import, in a new interpreter.
IMPORT = "import torch; from time import perf_counter; a = perf_counter(); {}; print(perf_counter() - a)"


def import_case() -> Case:
    """The time of imports after torch."""

    def contender(code: str) -> Prepare:
        return lambda _: Run(lambda: None, lambda: fresh("-c", IMPORT.format(code))[0])

    return Case("import after torch", "", {who: contender(code) for who, code in IMPORTS.items()}, at_most=3)


def cases(fields: int = 40) -> list[Case]:
    batch, many = (default_collate(bench_loader.Size(count, (WIDTH,)).samples(ROWS)) for count in (fields, 400))
    in_place = [in_place_case(operation, many) for operation in IN_PLACE]
    loaders = [loader_case(fields, strategy) for strategy in ("file_descriptor", "file_system")]
    return [*container_cases(batch), *small_cases(), *in_place, *loaders, queue_case(batch), import_case()]


if __name__ == "__main__":
    main(__doc__, cases, ["tensordict", "tianshou", "transformers", "accelerate"], fields=40)
