"""Execute the core operations for Callgrind to count. `guard.py` runs this script under Valgrind; it prints nothing.

    valgrind --tool=callgrind ... python benchmarks/count_instructions.py SOCKETS ONLY

SOCKETS is the value of Valgrind's option `--vgdb-prefix`. ONLY is a part of the names of the operations. Callgrind
writes one file for each block of calls: the blocks of the first of `statements`, then those of the second, and so on.
"""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.data import default_collate

from tensordict_lite import DeviceDict, TypedDeviceDict, collate, prefetch, stack

BLOCKS = 5  # measurements of each operation; the guard takes the smallest, which no rare event has disturbed
CALLS = 20  # calls in a block
WARM_UP = 100  # calls before the first block: CPython 3.11 specializes a function's bytecode while it runs

EMPTY = "empty loop"


class Operation(NamedTuple):
    """An operation, and the code that does the same with plain dicts."""

    statement: str
    by_hand: str = ""
    """What a user writes for plain dicts; empty if nothing does the same."""
    ceiling: float = 0
    """The most instructions of the statement, as a multiple of those of `by_hand`. Lower it when you can."""
    proof: str = ""
    """An expression that is true if both do their work. Without it, both are expressions of equal values."""


OPERATIONS = {
    "construct from tensors": Operation("DeviceDict(tensors)", proof="dict(DeviceDict(tensors)) == tensors"),
    "construct from host values": Operation(
        "DeviceDict(host)", proof="DeviceDict(host).decode('texts') == host['texts']"
    ),
    "read": Operation("d['k3']", proof="d['k3'] is tensors['k3']"),
    "read a path": Operation("d['nested', 'k3']", proof="d['nested', 'k3'] is tensors['k3']"),
    "write": Operation("w['k3'] = new", proof="w['k3'] is new"),
    "update": Operation("u.update(others)", proof="u['k3'] is others['k3']"),
    "to(same device)": Operation("d.to('cpu')", proof="d.to('cpu') is d"),
    "to(float64)": Operation("flat.to(torch.float64)", "{k: v.to(torch.float64) for k, v in tensors.items()}", 1.0),
    "half": Operation("flat.half()", "{k: v.half() for k, v in tensors.items()}", 1.65),
    "to(meta)": Operation(
        "flat.to('meta')",
        "{k: v.to('meta') for k, v in tensors.items()}",
        1.3,
        "[v.device for v in flat.to('meta').values()] == [torch.device('meta')] * 8",
    ),
    "construct with kept values": Operation(
        "DeviceDict(kept, objects='keep')",
        "DeviceDict(tensors, objects='keep')",
        1.3,
        "dict(DeviceDict(kept, objects='keep')) == kept and dict(DeviceDict(tensors, objects='keep')) == tensors",
    ),
    "to(same device) with kept values": Operation(
        "keeps.to('cpu')", "{k: v.to('cpu') if isinstance(v, Tensor) else v for k, v in kept.items()}", 1
    ),
    "to(float64) with kept values": Operation(
        "keeps.to(torch.float64)",
        "{k: v.to(torch.float64) if isinstance(v, Tensor) else v for k, v in kept.items()}",
        1.55,
    ),
    "construct with kept containers": Operation(
        "DeviceDict(outputs, objects='keep')",
        proof="DeviceDict(outputs, objects='keep')['hidden'] is outputs['hidden']",
    ),
    "to(float64) with kept containers": Operation(
        "deep.to(torch.float64)", "cast_outputs(outputs)", 2.2, "deep.to(torch.float64) == cast_outputs(outputs)"
    ),
    "numpy": Operation(
        "flat.numpy()",
        "{k: v.numpy() for k, v in tensors.items()}",
        1.2,
        "(flat.numpy()['k3'] == flat['k3'].numpy()).all()",
    ),
    "clone": Operation("flat.clone()", "{k: v.clone() for k, v in tensors.items()}", 1.37),
    "slice rows": Operation("flat.rows[1:3]", "{k: v[1:3] for k, v in tensors.items()}", 1.43),
    "rows by index": Operation("flat.rows[index]", "{k: v.index_select(0, index) for k, v in tensors.items()}", 1.55),
    "256 rows of a million": Operation(
        "large.rows[many]", "{k: v.index_select(0, many) for k, v in large_fields.items()}", 1.4
    ),
    "iterate rows": Operation("list(flat.rows)", "[{k: v[i] for k, v in tensors.items()} for i in range(4)]", 1.35),
    "write rows": Operation(
        "w8.rows[1:3] = part", "for k in p8: p8[k][1:3] = part[k]", 2.15, "w8.rows[1:3] == part and w8 == p8"
    ),
    "write rows by index": Operation(
        "w8.rows[index] = part", "for k in p8: p8[k][index] = part[k]", 2.28, "w8.rows[index] == part and w8 == p8"
    ),
    "write a step": Operation(
        "rollout.rows[2] = step",
        "for k in buffer: buffer[k][2] = step[k]",
        2.45,
        "rollout.rows[2] == step and rollout == buffer",
    ),
    "write a nested step with numbers": Operation(
        "episode.rows[2] = transition",
        "write_row(fields, 2, transition)",
        3.2,
        "episode.rows[2].tolist() == DeviceDict(transition).tolist() and episode == fields",
    ),
    "lerp_ of 8": Operation(
        "ema8.lerp_(model8, 0.5)",
        "for k, v in by_hand8.items(): v.lerp_(model8[k], 0.5)",
        2.1,
        "ema8.allclose(model8) and ema8.allclose(by_hand8)",
    ),
    "lerp_ of 400": Operation(
        "ema.lerp_(model, 0.5)",
        "for k, v in by_hand.items(): v.lerp_(model[k], 0.5)",
        1.4,
        "ema.allclose(model) and ema.allclose(by_hand)",
    ),
    "lerp_ of 400, packed": Operation("packed_ema.lerp_(packed_model, 0.5)", proof="packed_ema.allclose(packed_model)"),
    "stack": Operation("stack(samples)", "{k: torch.stack([s[k] for s in samples]) for k in samples[0]}", 1.27),
    "collate": Operation("collate(samples)", "default_collate(plain)", 1.5),
    "collate dicts": Operation("collate(dicts)", "default_collate(dicts)", 2.27),
    "collate samples with strings": Operation(
        "collate(strings)", "default_collate(strings)", 3.05, "collate(strings).rows.tolist()[1]['name'] == 'image 1'"
    ),
    "collate 64 samples": Operation("collate(many_samples)", "default_collate(many_samples)", 1.67),
    "from_dict of a request": Operation("Request.from_dict(requests[0])", "checked_one(requests[0])", 3.15),
    "collate 1 request": Operation("collate(requests[:1], cls=Requests)", "checked(requests[:1])", 3.3),
    "collate 8 requests": Operation("collate(requests, cls=Requests)", "checked(requests)", 1.7),
    "next batch of prefetch": Operation("next(batches)", proof="next(batches) == flat"),
}


def statements(only: str) -> dict[str, str]:
    """Return what is counted, by name: an empty loop, and each operation, followed by the same by hand.

    ``only``: a part of the names of the operations.
    """
    found = {EMPTY: "pass"}
    for name, operation in OPERATIONS.items():
        if only in name:
            found[name] = operation.statement
            if operation.by_hand:
                found[by_hand(name)] = operation.by_hand
    return found


def by_hand(name: str) -> str:
    """Return the name of the count of what does the same as an operation."""
    return f"{name}, by hand"


class Request(TypedDeviceDict):
    x: Float[Tensor, "4"]
    weight: Float[Tensor, ""]
    label: Int[Tensor, ""]


class Requests(TypedDeviceDict):
    x: Float[Tensor, "batch 4"]
    weight: Float[Tensor, "batch"]
    label: Int[Tensor, "batch"]


def request(i: int) -> dict[str, Any]:
    """Return a request, as parsed JSON."""
    return {"x": [i + 0.5, 1.0, 2.0, 3.0], "weight": 0.5, "label": i}


def check(request: dict[str, Any]) -> None:
    """Validate a request, as a user does who has plain dicts."""
    if request.keys() != {"x", "weight", "label"}:
        raise ValueError(f"expected the fields x, weight and label, got {list(request)}")
    x = request["x"]
    if not isinstance(x, list) or len(x) != 4 or not all(isinstance(one, (int, float)) for one in x):
        raise ValueError(f"x: expected four numbers, got {x}")
    if not isinstance(request["weight"], (int, float)) or not isinstance(request["label"], int):
        raise ValueError("weight and label: expected a number and an int")


def checked_one(request: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a request."""
    check(request)
    return {
        "x": torch.tensor(request["x"], dtype=torch.float32),
        "weight": torch.tensor(request["weight"], dtype=torch.float32),
        "label": torch.tensor(request["label"]),
    }


def checked(requests: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return a batch of requests."""
    for request in requests:
        check(request)
    return {
        "x": torch.tensor([request["x"] for request in requests], dtype=torch.float32),
        "weight": torch.tensor([request["weight"] for request in requests], dtype=torch.float32),
        "label": torch.tensor([request["label"] for request in requests]),
    }


def write_row(fields: dict[str, Any], row: int, values: dict[str, Any]) -> None:
    """Write a nested row, as a user does who has plain dicts."""
    for key, value in values.items():
        if isinstance(value, dict):
            write_row(fields[key], row, value)
        else:
            fields[key][row] = value


def scope() -> dict[str, Any]:
    """Return the variables of the statements. Fields are small, so the container's share of the count is large."""
    tensors, others = ({f"k{i}": torch.rand(4, 2) for i in range(8)} for _ in range(2))
    host = {
        "number": 0.5,
        "flag": True,
        "list": [1, 2, 3],
        "lists": [[1.0, 2.0], [3.0, 4.0]],
        "scalar": np.float32(2),
        "array": np.zeros((4, 2)),
        "text": "cat",
        "texts": ["cat", "dog"],
    }
    ema, model = (DeviceDict({f"k{i}": torch.rand(1 + i % 5, 2) for i in range(400)}) for _ in range(2))
    ema8, model8 = (DeviceDict({f"k{i}": torch.rand(1 + i % 5, 2) for i in range(8)}) for _ in range(2))
    large = {f"k{i}": torch.zeros(1_000_000, 4) for i in range(8)}
    step = {
        "obs": torch.rand(8, 4),
        "action": torch.arange(8),
        "log_prob": torch.rand(8),
        "reward": torch.rand(8),
        "done": torch.arange(8) > 5,
        "value": torch.rand(8),
    }
    rollout = DeviceDict(step).new_zeros(4)
    transition = {
        "obs": {"position": torch.rand(3), "velocity": torch.rand(3)},
        "action": 2,
        "reward": 0.5,
        "done": False,
        "truncated": True,
    }
    episode = DeviceDict(transition).new_zeros(4)
    samples = [DeviceDict(tensors).clone() for _ in range(4)]
    kept = {**dict(list(tensors.items())[:4]), "size": (480, 640), "split": "train", "names": ["a"] * 4, "label": None}
    outputs = {
        **dict(list(tensors.items())[:4]),
        "hidden": (torch.rand(4, 2), torch.rand(4, 2)),
        "targets": [{"boxes": torch.rand(3, 4), "id": i} for i in range(4)],
    }
    return {
        "kept": kept,
        "outputs": outputs,
        "deep": DeviceDict(outputs, objects="keep"),
        "cast_outputs": cast_outputs,
        "keeps": DeviceDict(kept, objects="keep"),
        "Tensor": Tensor,
        "ema": ema,
        "model": model,
        "by_hand": dict(ema.clone()),
        "packed_ema": ema.pack(),
        "packed_model": model.pack(),
        "ema8": ema8,
        "model8": model8,
        "by_hand8": dict(ema8.clone()),
        "index": torch.tensor([3, 0]),
        "many": torch.arange(256) * 3000,
        "large": DeviceDict(large),
        "large_fields": large,
        "part": DeviceDict(others).rows[1:3].clone(),
        "w8": DeviceDict(tensors).clone(),
        "p8": {key: value.clone() for key, value in tensors.items()},
        "step": step,
        "rollout": rollout,
        "buffer": dict(rollout.clone()),
        "transition": transition,
        "episode": episode,
        "fields": {key: dict(value) if isinstance(value, dict) else value for key, value in episode.clone().items()},
        "write_row": write_row,
        "strings": [{"x": torch.rand(4), "y": i, "name": f"image {i}"} for i in range(8)],
        "many_samples": [{f"k{k}": torch.rand(16) for k in range(8)} for _ in range(64)],
        "requests": [request(i) for i in range(8)],
        **{one.__name__: one for one in (Request, Requests, checked, checked_one)},
        "DeviceDict": DeviceDict,
        "collate": collate,
        "default_collate": default_collate,
        "stack": stack,
        "torch": torch,
        "tensors": tensors,
        "dicts": [{"x": torch.rand(16), "mask": torch.rand(16), "y": i} for i in range(4)],
        "others": others,
        "host": host,
        "new": torch.rand(4, 2),
        "d": DeviceDict({**tensors, "nested": tensors}),
        "flat": DeviceDict(tensors),
        "u": DeviceDict(tensors),
        "w": DeviceDict(tensors),
        "batches": iter(prefetch(itertools.repeat(DeviceDict(tensors)), "cpu")),
        "samples": samples,
        "plain": [dict(sample) for sample in samples],
    }


def cast_outputs(outputs: dict[str, Any]) -> dict[str, Any]:
    """Cast the tensors of a dict that holds a tuple of tensors and a list of dicts, as code for these keys does."""
    out = {k: v.to(torch.float64) for k, v in outputs.items() if isinstance(v, Tensor)}
    out["hidden"] = tuple([v.to(torch.float64) for v in outputs["hidden"]])
    out["targets"] = [{**one, "boxes": one["boxes"].to(torch.float64)} for one in outputs["targets"]]
    return out


def loop(statement: str, known: dict[str, Any]) -> Callable[[int], None]:
    """Return a function that calls the statement a number of times. Its variables are local, as those are faster."""
    names = ", ".join(f"{name}={name}" for name in known)
    made = dict(known)
    exec(f"def calls(number, {names}):\n  for _ in range(number):\n    {statement}", made)
    return made["calls"]


def broken(known: dict[str, Any], only: str) -> list[str]:
    """Return the operations that have not done their work, or not the same work as by hand."""
    proofs = {
        name: operation.proof or f"({operation.statement}) == ({operation.by_hand})"
        for name, operation in OPERATIONS.items()
        if only in name
    }
    return [name for name, proof in proofs.items() if not eval(proof, known)]


def start_callgrind(sockets: str) -> None:
    """Switch Callgrind on. It is off during the import of torch, which would take three times as long."""
    command = ["vgdb", f"--vgdb-prefix={sockets}", f"--pid={os.getpid()}", "instrumentation", "on"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    # Poll, as a busy process answers vgdb by itself. A sleeping one must be traced, which containers often forbid.
    while process.poll() is None:
        pass
    if process.returncode:
        sys.exit(f"vgdb could not switch Callgrind on: exit status {process.returncode}")


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    known = scope()
    loops = [loop(statement, known) for statement in statements(sys.argv[2]).values()]
    for calls in loops:
        calls(WARM_UP)
    if names := broken(known, sys.argv[2]):
        sys.exit(f"these do not do what they are counted for: {names}")
    gc.collect()
    gc.disable()
    start_callgrind(sys.argv[1])
    for calls in loops:
        for _ in range(BLOCKS):
            torch._C._valgrind_toggle()
            calls(CALLS)
            torch._C._valgrind_toggle_and_dump_stats()


if __name__ == "__main__":
    main()
