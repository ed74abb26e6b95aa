"""Measure moves of a dict of tensors to a device and back, and the steps of a training loop that moves its batches.

    python benchmarks/bench_moves.py [--json PATH]

A time is the least of many, until all copies have ended. Without an accelerator there is nothing to measure. A step
moves a batch, asks the device for some milliseconds of work, and sleeps for less: so the device is busy when the next
batch is moved.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
from harness import OURS, accelerator, equal_fields, setting, write

from tensordict_lite import DeviceDict, collate

SIZES = {
    "8 x 2 KB": (8, 512), "40 x 2 KB": (40, 512), "200 x 2 KB": (200, 512), "8 x 16 KB": (8, 4096),
    "40 x 16 KB": (40, 4096), "40 x 64 KB": (40, 16384), "40 x 128 KB": (40, 32768), "40 x 200 KB": (40, 50_000),
    "4 x 2 MB": (4, 1 << 19),
}  # fmt: skip
STEPS = ("40 x 2 KB", "40 x 200 KB", "4 x 2 MB")
SAMPLES, SECONDS, LOOP = 8, 0.04, "loop"
Move = Callable[[], Any]


def least(move: Move) -> float:
    """The least time of a move, in seconds."""
    times: list[float] = []
    end = perf_counter() + SECONDS
    while perf_counter() < end or len(times) < 7:
        start = perf_counter()
        move()
        torch.accelerator.synchronize()
        times.append(perf_counter() - start)
    return min(times[2:])


def step(move: Move, device: torch.device, count: int = 80) -> float:
    """The time of a training step, in seconds."""
    weight = torch.randn(2048, 2048, device=device) / 45
    x, start = torch.randn(2048, 2048, device=device), 0.0
    for i in range(-5, count):
        if i == 0:
            torch.accelerator.synchronize()
            start = perf_counter()
        move()
        for _ in range(4):
            x = x @ weight
        sleep(0.0007)  # the work of the host
    torch.accelerator.synchronize()
    return (perf_counter() - start) / count


def to_device(fields: Mapping[str, Any], device: torch.device) -> Move:
    return lambda: {key: value.to(device) for key, value in fields.items()}


def to_host(fields: Mapping[str, Any]) -> Move:
    return lambda: {key: value.cpu() for key, value in fields.items()}


def moves(size: str, device: torch.device) -> list[dict[str, Any]]:
    """The results for fields of one size, of DeviceDicts and of loops over plain dicts."""
    count, numbers = SIZES[size]
    fields = equal_fields(count, numbers)
    sample = equal_fields(count, numbers // SAMPLES)
    found: list[dict[str, Any]] = []

    def add(operation: str, ours: Move, loop: Move, measure: Callable[[Move], float] = least) -> None:
        times = {OURS: measure(ours), LOOP: measure(loop)}
        print(f"{operation:40} {size:12}", *(f"{who} {1e6 * seconds:8.0f} us" for who, seconds in times.items()))
        found.append({"operation": operation, "fields": size, "minima": times})

    separate, batch = DeviceDict(fields), collate([sample] * SAMPLES)
    pinned, there = separate.pin_memory(), separate.map(lambda tensor: tensor.to(device))
    loops = {"": to_device(separate, device), ", from pinned memory": to_device(pinned, device)}
    for kind, d in (("", separate), (", of `collate`", batch)):
        for (memory, loop), one in zip(loops.items(), (d, d.pin_memory()), strict=True):
            add(f"to the device{memory}{kind}", partial(one.to, device), loop)
        add(f"to the host{kind}", (d.to(device) if kind else there).cpu, to_host(there))
    if size in STEPS:
        for (memory, loop), one in zip(loops.items(), (separate, pinned), strict=True):
            add(f"a training step{memory}", partial(one.to, device), loop, partial(step, device=device))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    device = accelerator()
    path = parser.parse_args().json
    if device is None:
        print("there is no accelerator")
        return
    found = [line for size in SIZES for line in moves(size, device)]
    write(path, {**setting([]), "results": found})


if __name__ == "__main__":
    main()
