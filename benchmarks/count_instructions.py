"""Execute the core operations for Callgrind to count. `guard.py` runs this script under Valgrind; it prints nothing.

    valgrind --tool=callgrind ... python benchmarks/count_instructions.py SOCKETS

SOCKETS is the value of Valgrind's option `--vgdb-prefix`. Callgrind writes one file for each block of calls: the blocks
of the first statement of OPERATIONS, then those of the second, and so on.
"""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tensordict_lite import DeviceDict, collate, prefetch, stack

BLOCKS = 5  # measurements of each operation; the guard takes the smallest, which no rare event has disturbed
CALLS = 20  # calls in a block
WARM_UP = 100  # calls before the first block: CPython 3.11 specializes a function's bytecode while it runs

EMPTY = "empty loop"
# By name: the statement of the operation, and an expression that is true if the statement does its work.
OPERATIONS = {
    EMPTY: ("pass", "True"),
    "construct from tensors": ("DeviceDict(tensors)", "dict(DeviceDict(tensors)) == tensors"),
    "construct from host values": ("DeviceDict(host)", "DeviceDict(host).decode('texts') == host['texts']"),
    "read": ("d['k3']", "d['k3'] is tensors['k3']"),
    "read a path": ("d['nested', 'k3']", "d['nested', 'k3'] is tensors['k3']"),
    "write": ("w['k3'] = new", "w['k3'] is new"),
    "update": ("u.update(others)", "u['k3'] is others['k3']"),
    "to(same device)": ("d.to('cpu')", "d.to('cpu') is d"),
    "to(float64)": ("d.to(torch.float64)", "d.to(torch.float64)['k3'].dtype is torch.float64"),
    "numpy": ("flat.numpy()", "(flat.numpy()['k3'] == flat['k3'].numpy()).all()"),
    "clone": ("flat.clone()", "flat.clone() == flat and flat.clone()['k3'] is not flat['k3']"),
    "slice rows": ("flat.rows[1:3]", "flat.rows[1:3]['k3'].shape == (2, 2)"),
    "rows by index": ("flat.rows[index]", "flat.rows[index]['k3'].equal(flat['k3'][index])"),
    "write rows": ("w8.rows[1:3] = part", "w8['k3'][1:3].equal(part['k3'])"),
    "write rows by index": ("w8.rows[index] = part", "w8['k3'][index].equal(part['k3'])"),
    "iterate rows": ("for row in flat.rows: pass", "[row['k3'].shape for row in flat.rows] == [(2,)] * 4"),
    "lerp_ of 400": ("ema.lerp_(model, 0.5)", "ema.allclose(model)"),
    "lerp_ of 400, packed": ("packed_ema.lerp_(packed_model, 0.5)", "packed_ema.allclose(packed_model)"),
    "stack": ("stack(samples)", "stack(samples)['k3'].shape == (4, 4, 2)"),
    "collate": ("collate(samples)", "collate(samples)['k3'].shape == (4, 4, 2)"),
    "collate dicts": ("collate(dicts)", "collate(dicts)['y'].shape == (4,)"),
    "next batch of prefetch": ("next(batches)", "next(batches) == flat"),
}


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
    return {
        "ema": ema,
        "model": model,
        "packed_ema": ema.pack(),
        "packed_model": model.pack(),
        "index": torch.tensor([3, 0]),
        "part": DeviceDict(others).rows[1:3].clone(),
        "w8": DeviceDict(tensors).clone(),
        "DeviceDict": DeviceDict,
        "collate": collate,
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
        "samples": [DeviceDict(tensors).clone() for _ in range(4)],
    }


def loop(statement: str, known: dict[str, Any]) -> Callable[[int], None]:
    """Return a function that calls the statement a number of times. Its variables are local, as those are faster."""
    names = ", ".join(f"{name}={name}" for name in known)
    made = dict(known)
    exec(f"def calls(number, {names}):\n  for _ in range(number):\n    {statement}", made)
    return made["calls"]


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
    known, loops = scope(), []
    for name, (statement, proof) in OPERATIONS.items():
        calls = loop(statement, known)
        calls(WARM_UP)
        assert eval(proof, known), f"{name}: `{statement}` does not do what it is counted for"
        loops.append(calls)
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
