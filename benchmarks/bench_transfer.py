"""Measure moves of a dict of tensors: to a device and back, into one storage, and from another process.

    python benchmarks/bench_transfer.py [--quick] [--rounds N] [--only TEXT] [--json PATH]

Without an accelerator, the moves are left out.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from multiprocessing.reduction import ForkingPickler
from statistics import median
from time import perf_counter
from typing import Any

import harness
import torch
from harness import OURS, PACKED, PEER, Case, Fields, Prepare, Run, equal_fields, optional, statement
from torch import Tensor

from tensordict_lite import DeviceDict
from tensordict_lite._memory.device import capabilities

TensorDict = optional("tensordict", "TensorDict")
send_to_device = optional("accelerate.utils", "send_to_device")

CPU = torch.device("cpu")
MESSAGES = 5  # pickles loaded from each contender in one round


def differing() -> Fields:
    """20 small fields, all with different shapes."""
    dtypes = (torch.float32, torch.int64, torch.bool)
    return {f"k{i}": torch.ones(1 + i, 1 + i % 4).to(dtypes[i % 3]) for i in range(20)}


def batch() -> Fields:
    """A batch of images with its labels and other fields."""
    return {"image": torch.arange(64 * 3 * 448 * 448).to(torch.uint8).view(64, 3, 448, 448), **differing()}


SIZES: dict[str, Callable[[], Fields]] = {
    "8 x 2 KB": lambda: equal_fields(8, 16, 32),
    "40 x 2 KB": lambda: equal_fields(40, 16, 32),
    "200 x 2 KB": lambda: equal_fields(200, 16, 32),
    "40 x 200 KB": lambda: equal_fields(40, 50, 1000),
    "4 x 2 MB": lambda: equal_fields(4, 512, 1024),
    "4 x 40 MB": lambda: equal_fields(4, 10, 1000, 1000),
    "38 MB + 20 small": batch,
    "20 differing": differing,
}
PACKED_SIZES = ("8 x 2 KB", "40 x 2 KB", "200 x 2 KB", "20 differing")


# --- contenders ---


@dataclass(frozen=True)
class Contender:
    """``code`` is timed. ``make`` makes its variable ``x`` from the fields. A move also has the variable ``to``."""

    make: Callable[[Fields], Any]
    code: str = "x.to(to)"


def all_bytes(fields: Fields) -> Tensor:
    """One tensor with all bytes of the fields: the minimum work of a move."""
    return torch.cat([field.flatten().view(torch.uint8) for field in fields.values()])


def as_peer(fields: Fields) -> Any:
    """A TensorDict with a device. Without a device it would be consolidated on the host."""
    return TensorDict(fields, batch_size=[], device=next(iter(fields.values())).device)


LOOP_CODE = "{k: v.%s for k, v in x.items()}"
LOOP, PINNING, WAITING = "loop", "loop, pinning each", "loop, one wait"
PEER_PINNING, CONSOLIDATED = "TensorDict, pinning", "TensorDict consolidated"
CONTENDERS = {
    PACKED: Contender(lambda s: DeviceDict(s).pack()),
    OURS: Contender(DeviceDict),
    LOOP: Contender(dict, LOOP_CODE % "to(to)"),
    PINNING: Contender(dict, LOOP_CODE % "pin_memory().to(to, non_blocking=True)"),
    WAITING: Contender(dict, LOOP_CODE % "to(to, non_blocking=True)"),
    PEER: Contender(as_peer),
    PEER_PINNING: Contender(as_peer, "x.to(to, non_blocking_pin=True)"),
    CONSOLIDATED: Contender(lambda s: as_peer(s).consolidate()),
    "accelerate": Contender(dict, "send_to_device(x, to)"),
    "one tensor": Contender(all_bytes),
}
PINNED = {  # pack gives pageable memory, so pin the packed dict
    PACKED: Contender(lambda s: DeviceDict(s).pack().pin_memory()),
    CONSOLIDATED: Contender(lambda s: as_peer(s).consolidate(pin_memory=True)),
    "one tensor": Contender(lambda s: all_bytes(s).pin_memory()),
}
PACKING = {
    PACKED: Contender(DeviceDict, "x.pack()"),
    "loop of clones": Contender(dict, LOOP_CODE % "clone()"),
    CONSOLIDATED: Contender(as_peer, "x.consolidate()"),
}


# --- moves to the device and back ---


def tensors(x: Any) -> list[Tensor]:
    """The tensors in the container or result of a contender."""
    return [x] if isinstance(x, Tensor) else list(x.values())


def moving(one: Contender, start: Callable[[Tensor], Tensor], end: torch.device) -> Prepare:
    """A contender of a move, until all copies have ended. Its result is one tensor with all bytes.

    ``start`` puts a field on the source device. ``end`` is the target.
    """

    def make(source: Fields) -> Any:
        placed = {key: start(field) for key, field in source.items()}
        container = one.make(placed)
        begun, memory = ({(t.device, t.is_pinned()) for t in tensors(x)} for x in (container, placed))
        assert begun == memory, "begins in other memory"
        return container

    def arrived(result: Any) -> Tensor:
        assert all(tensor.device == end for tensor in tensors(result)), "ends in other memory"
        return torch.cat([tensor.cpu().flatten().view(torch.uint8) for tensor in tensors(result)])

    names: dict[str, Any] = {"to": end, "arrived": arrived, "send_to_device": send_to_device}
    code = f"out = {one.code}; synchronize()"
    return statement(code, make, "arrived(out)", "synchronize()", synchronize=torch.accelerator.synchronize, **names)


def move_cases(device: torch.device) -> list[Case]:
    pageable = {who: one for who, one in CONTENDERS.items() if who != WAITING}
    either = {who: one for who, one in CONTENDERS.items() if who not in (PINNING, PEER_PINNING)}
    moves: list[tuple[str, Mapping[str, Contender], Callable[[Tensor], Tensor], torch.device]] = [
        ("H2D", pageable, lambda tensor: tensor, device),
        ("H2D from pinned memory", {**either, **PINNED}, Tensor.pin_memory, device),
        ("D2H", either, lambda tensor: tensor.to(device), CPU),
    ]
    return [
        Case(name, size, {who: moving(one, start, end) for who, one in contenders.items()}, SIZES[size])
        for name, contenders, start, end in moves
        if capabilities(device).pinned_memory or start is not Tensor.pin_memory
        for size in SIZES
    ]


# --- packing, and receiving from another process ---


def pack_cases() -> list[Case]:
    contenders = {who: statement(one.code, one.make) for who, one in PACKING.items()}
    return [Case("pack", size, contenders, SIZES[size]) for size in PACKED_SIZES]


def pickled(who: str, size: str) -> bytes:
    """Run in the other process: make a new dict as a loader does, and pickle it."""
    return bytes(ForkingPickler.dumps(CONTENDERS[who].make(SIZES[size]())))


@cache
def sender() -> harness.Helpers:
    """A process that stays alive while its pickles are loaded."""
    return harness.Helpers(1)


def unpickling(who: str, size: str) -> Prepare:
    """Only the receiving half of a queue. A pickle can be loaded once, because it passes its file descriptors once."""

    def loaded() -> tuple[Any, float]:
        (message,) = sender().ask(pickled, who, size)
        start = perf_counter()
        result = pickle.loads(message)
        return result, perf_counter() - start

    return lambda _: Run(lambda: loaded()[0], lambda: median(loaded()[1] for _ in range(MESSAGES)))


def unpickle_cases() -> list[Case]:
    names = {PACKED: PACKED, OURS: OURS, "dict": LOOP, PEER: PEER, CONSOLIDATED: CONSOLIDATED}
    return [
        Case("unpickle from another process", size, {who: unpickling(one, size) for who, one in names.items()})
        for size in ("40 x 2 KB", "200 x 2 KB")
    ]


def cases() -> list[Case]:
    device = harness.accelerator()
    return [*([] if device is None else move_cases(device)), *pack_cases(), *unpickle_cases()]


if __name__ == "__main__":
    harness.main(__doc__, cases, ["tensordict", "accelerate"], threads=None)
