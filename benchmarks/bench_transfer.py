"""Measure moves of a dict of tensors: to a device and back, into one storage, and from another process.

    python benchmarks/bench_transfer.py [--device cuda] [--sweep] [--quick] [--rounds N] [--json PATH]

Parts that need a missing device are left out, and so are peers (tensordict, accelerate) that are not installed. In
every round, the contenders of a case are timed one right after the other. The ratio of their times cancels other load
on the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor
from torch.utils.benchmark import Timer

from tensordict_lite import DeviceDict
from tensordict_lite._memory import transfer as _transfer
from tensordict_lite._memory.device import capabilities

sys.path.insert(0, str(Path(__file__).parent))  # runpy does not add the folder of the script to sys.path
from common import Seconds, aligned, cause, in_turn, interleaved, parser, ratio, same, setting, write

try:
    from tensordict import TensorDict
except ImportError:
    TensorDict = None
try:
    from accelerate.utils import send_to_device
except ImportError:
    send_to_device = None

CPU = torch.device("cpu")
MESSAGES = 5  # pickles loaded from each contender in one round
Fields = dict[str, Tensor]


@dataclass(frozen=True)
class Contender:
    """``code`` is timed. ``make`` makes its variable ``x`` from the fields. A move also has the variable ``to``."""

    name: str
    make: Callable[[Fields], Any]
    code: str = "x.to(to)"
    waits: bool = False  # copies are still running after the code, so a synchronization belongs to it


@dataclass(frozen=True)
class Goal:
    """The fastest of ``against`` takes at least ``least`` times as long as ``ours``."""

    ours: str
    against: tuple[Contender, ...]
    least: float
    only: str = ""  # for this size; None: for all sizes

    def among(self, seconds: Seconds) -> dict[str, Any] | None:
        """The goal, with the contender that it is about and whether it is met. None if that contender is left out."""
        present = [one.name for one in self.against if one.name in seconds]
        if self.ours not in seconds or not present:
            return None
        best = min(present, key=lambda who: median(seconds[who]))
        met = ratio(seconds[best], seconds[self.ours])["median"] >= self.least
        return {"ours": self.ours, "against": best, "least": self.least, "met": met}


@dataclass(frozen=True)
class Operation:
    """One operation that the contenders are compared in, for dicts of some sizes."""

    name: str
    contenders: tuple[Contender, ...]
    goals: tuple[Goal, ...]
    sizes: tuple[str, ...]
    start: Callable[[Tensor], Tensor] = lambda tensor: tensor  # puts a field on the source device of the operation
    end: torch.device = CPU
    waits: bool = False  # whether the timing of every contender ends with a synchronization


def equal(count: int, *shape: int) -> Fields:
    """A number of float32 fields with one shape. Every call returns the same values."""
    generator = torch.Generator().manual_seed(0)
    return {f"k{i}": torch.rand(shape, generator=generator) for i in range(count)}


def differing() -> Fields:
    """20 small fields, all with different shapes."""
    dtypes = (torch.float32, torch.int64, torch.bool)
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randint(2, (1 + i, 1 + i % 4), generator=generator) for i in range(20)]
    return {f"k{i}": draw.to(dtypes[i % 3]) for i, draw in enumerate(draws)}


def batch() -> Fields:
    """A batch of images with its labels and other fields."""
    return {"image": torch.arange(64 * 3 * 448 * 448).to(torch.uint8).view(64, 3, 448, 448), **differing()}


SIZES: dict[str, Callable[[], Fields]] = {
    "8 x 2 KB": lambda: equal(8, 16, 32),
    "40 x 2 KB": lambda: equal(40, 16, 32),
    "200 x 2 KB": lambda: equal(200, 16, 32),
    "4 x 2 MB": lambda: equal(4, 512, 1024),
    "40 x 200 KB": lambda: equal(40, 50, 1000),
    "4 x 40 MB": lambda: equal(4, 10, 1000, 1000),
    "38 MB + 20 small": batch,
    "20 differing": differing,
}
MOVED = (
    "8 x 2 KB",
    "40 x 2 KB",
    "200 x 2 KB",
    "40 x 200 KB",  # to the host through pinned memory, with one wait for many
    "4 x 2 MB",  # packed, to the device in chunks through pinned memory
    "4 x 40 MB",
    "38 MB + 20 small",
)


def all_bytes(fields: Fields) -> Tensor:
    """One tensor with all bytes of the fields: the minimum work of a move."""
    return torch.cat([field.flatten().view(torch.uint8) for field in fields.values()])


def as_peer(fields: Fields) -> Any:
    """A TensorDict with a device. Without a device it would be consolidated on the host."""
    return TensorDict(fields, batch_size=[], device=next(iter(fields.values())).device)


def tensors(x: Any) -> Fields:
    """The tensors in the container or result of a contender, as a plain dict."""
    return {"": x} if isinstance(x, Tensor) else dict(x.items())


LOOP_CODE = "{k: v.%s for k, v in x.items()}"
PACKED = Contender("ours packed", lambda s: DeviceDict(s).pack())
UNPACKED = Contender("ours unpacked", DeviceDict)
LOOP = Contender("loop", dict, LOOP_CODE % "to(to)")
PINNING = Contender("loop, pinning each", dict, LOOP_CODE % "pin_memory().to(to, non_blocking=True)", waits=True)
WAITING = Contender("loop, one wait", dict, LOOP_CODE % "to(to, non_blocking=True)", waits=True)
PEER = Contender("TensorDict", as_peer)
PEER_PINNING = replace(PEER, name="TensorDict, pinning", code="x.to(to, non_blocking_pin=True)")
PEER_PACKED = Contender("TensorDict consolidated", lambda s: as_peer(s).consolidate())
SENT = Contender("accelerate", dict, "send_to_device(x, to)")
ONE = Contender("one tensor", all_bytes)

IN_PINNED = {  # pack gives pageable memory, so pin the packed dict
    PACKED: replace(PACKED, make=lambda s: DeviceDict(s).pack().pin_memory()),
    PEER_PACKED: replace(PEER_PACKED, make=lambda s: as_peer(s).consolidate(pin_memory=True)),
    ONE: replace(ONE, make=lambda s: all_bytes(s).pin_memory()),
}
AS_LOOP = tuple(Goal(ours.name, (LOOP, PINNING, WAITING), 1) for ours in (PACKED, UNPACKED))
TO_MOVE = (
    Goal(PACKED.name, (ONE,), 0.9),  # the share of the limit
    *AS_LOOP,  # every loop has the whole result when it ends
    Goal(UNPACKED.name, (PEER, PEER_PINNING, SENT), 4, only="40 x 2 KB"),  # peers that are not packed
)


def moves(device: torch.device) -> list[Operation]:
    """The operations to the device and back."""
    all_but_loop = (PEER, PEER_PACKED, SENT, ONE)
    from_pageable = (PACKED, UNPACKED, LOOP, PINNING, PEER_PINNING, *all_but_loop)
    either = (PACKED, UNPACKED, LOOP, WAITING, *all_but_loop)
    returning = (PACKED, UNPACKED, LOOP, PEER, SENT)
    pageable = Operation("H2D", from_pageable, TO_MOVE, MOVED, end=device, waits=True)
    out = [pageable]
    if capabilities(device).pinned_memory:
        from_pinned = tuple(IN_PINNED.get(one, one) for one in either)
        pinned = replace(pageable, name="H2D from pinned memory", contenders=from_pinned, start=Tensor.pin_memory)
        out.append(pinned)
    out.append(Operation("D2H", either, TO_MOVE, MOVED, start=lambda tensor: tensor.to(device)))
    for whole in out[:-1]:
        contenders = tuple(one for one in whole.contenders if one.name in {other.name for other in returning})
        name = f"{whole.name}, until the call returns"
        out.append(replace(whole, name=name, contenders=contenders, goals=AS_LOOP, waits=False))
    return out


PACK = Operation(
    "pack",
    (
        replace(PACKED, make=DeviceDict, code="x.pack()"),
        replace(LOOP, name="loop of clones", code=LOOP_CODE % "clone()"),
        replace(PEER_PACKED, make=PEER.make, code="x.consolidate()"),
    ),
    (Goal(PACKED.name, (PEER_PACKED,), 2, only="40 x 2 KB"),),
    ("8 x 2 KB", "40 x 2 KB", "200 x 2 KB", "20 differing"),
)
UNPICKLE = Operation(
    "unpickle from another process",
    (PACKED, UNPACKED, replace(LOOP, name="dict"), PEER, PEER_PACKED),
    (Goal(PACKED.name, (UNPACKED,), 5, only="200 x 2 KB"),),
    ("40 x 2 KB", "200 x 2 KB"),
)


class Bench:
    """Run the operations. Keep the results, and the contenders that were left out."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.lines: list[dict[str, Any]] = []
        self.left_out: dict[str, str] = {}

    def missing(self, one: Contender) -> bool:
        """Whether the package of a contender is not installed."""
        return TensorDict is None if one.name.startswith("TensorDict") else send_to_device is None and one is SENT

    def leave_out(self, operation: Operation, one: Contender, error: Exception) -> None:
        """Leave out a peer that fails, and report the reason. An error of our own contender is raised."""
        if one.name.startswith("ours"):
            raise error
        self.left_out[f"{one.name} in {operation.name}"] = cause(error)

    def timers(self, operation: Operation, size: str, synchronize: Callable[[], None]) -> dict[str, Timer]:
        """A timer for each contender. First asserts that all start and end on the same devices, with equal values."""
        source = SIZES[size]()
        placed = {key: operation.start(field) for key, field in source.items()}
        memory = {(field.device, field.is_pinned()) for field in placed.values()}
        out: dict[str, Timer] = {}
        for one in operation.contenders:
            if self.missing(one):
                continue
            known = {"to": operation.end, "synchronize": synchronize, "send_to_device": send_to_device}
            try:
                known["x"] = one.make(placed)
                begun = {(tensor.device, tensor.is_pinned()) for tensor in tensors(known["x"]).values()}
                assert begun == memory, f"{size}: begins in other memory"
                result = eval(one.code, known)
                synchronize()
                expected = {"": all_bytes(source)} if isinstance(result, Tensor) else source
                arrived = all(tensor.device == operation.end for tensor in tensors(result).values())
                right = same(expected, {key: tensor.cpu() for key, tensor in tensors(result).items()})
                assert arrived and right, f"{size}: gives another result"
            except Exception as error:
                self.leave_out(operation, one, error)
                continue
            code = f"{one.code}; synchronize()" if operation.waits or one.waits else one.code
            # The clock of Timer would synchronize. Here the statement synchronizes itself, or must not.
            out[one.name] = Timer(code, setup="synchronize()", timer=perf_counter, globals=known)
        return out

    def time(self, operation: Operation, synchronize: Callable[[], None] = lambda: None) -> None:
        for size in operation.sizes:  # one after the other, because some are large
            timers = self.timers(operation, size, synchronize)
            self.keep(operation, size, interleaved({size: timers}, self.rounds)[size])

    def time_unpickling(self, operation: Operation) -> None:
        """Time only the receiving half of a queue. A process that stays alive sends the pickles."""
        context = torch.multiprocessing.get_context("spawn")
        near, far = context.Pipe()
        sender = context.Process(target=send_pickles, args=(far,), daemon=True)
        sender.start()
        far.close()  # so that no process waits for a sender that has died
        for size in operation.sizes:
            expected, contenders, nbytes = SIZES[size](), {}, {}
            for one in operation.contenders:
                if self.missing(one):
                    continue
                try:
                    message = receive(near, one, size)
                    assert same(expected, tensors(ForkingPickler.loads(message))), f"{size}: gives another result"
                except Exception as error:
                    self.leave_out(operation, one, error)
                    continue
                contenders[one.name], nbytes[one.name] = one, len(message)
            seconds: Seconds = {who: [] for who in contenders}
            for i in range(self.rounds):
                for who in in_turn(contenders, i):
                    times = [load_seconds(near, contenders[who], size) for _ in range(MESSAGES)]
                    seconds[who].append(median(times))
            self.keep(operation, size, seconds, pickle_bytes=nbytes)
        near.send(None)
        sender.join()

    def keep(self, operation: Operation, size: str, seconds: Seconds, **more: Any) -> None:
        ours = [who for who in (PACKED.name, UNPACKED.name) if who in seconds]
        goals = [goal.among(seconds) for goal in operation.goals if goal.only in ("", size)]
        self.lines.append(
            {
                "operation": operation.name,
                "fields": size,
                "median_seconds": {who: median(times) for who, times in seconds.items()},
                "ratios": {mine: {who: ratio(seconds[who], seconds[mine]) for who in seconds} for mine in ours},
                "goals": [goal for goal in goals if goal],
                **more,
            }
        )


def send_pickles(connection: Connection) -> None:
    """Run in the other process: for each request, make a new dict as a loader does, and send its pickle."""
    makers = {one.name: one.make for one in UNPICKLE.contenders}
    while request := connection.recv():
        name, size = request
        try:
            message = bytes(ForkingPickler.dumps(makers[name](SIZES[size]())))
        except Exception as error:
            connection.send(f"{type(error).__name__}: {error}")
        else:
            connection.send(message)


def receive(connection: Connection, one: Contender, size: str) -> bytes:
    """Receive a new pickle. A pickle can be loaded once, because its file descriptors are passed once."""
    connection.send((one.name, size))
    message = connection.recv()
    if isinstance(message, str):
        raise RuntimeError(message)
    return message


def load_seconds(connection: Connection, one: Contender, size: str) -> float:
    """The seconds to load one new pickle. A Timer would load one pickle several times."""
    message = receive(connection, one, size)
    start = perf_counter()
    result = ForkingPickler.loads(message)
    end = perf_counter()
    del result  # with its file descriptors
    return end - start


def halves(device: torch.device, rounds: int, synchronize: Callable[[], None]) -> str:
    """What each constant of larger copies brings: the time without it divided by the time with it."""
    rows = [["without / with", "fields", "synchronized", "until the call returns"]]
    cases: list[tuple[str, str, int, Callable[[Fields], Any], bool]] = [
        ("FETCHED_TENSOR", "40 x 200 KB", 0, DeviceDict, True),
        ("STAGED_MOVE", "4 x 2 MB", 0, lambda s: DeviceDict(s).pack(), False),
    ]
    for name, size, without, make, back in cases:
        as_is = getattr(_transfer, name)
        source = make(SIZES[size]())
        known = {"to": CPU if back else device, "x": source.to(device) if back else source, "transfer": _transfer}
        known["synchronize"] = synchronize
        row = [name, size]
        for end in ("; synchronize()", ""):
            code = f"x.to(to){end}"
            timers = {
                who: Timer(code, f"transfer.{name} = {value}; synchronize()", timer=perf_counter, globals=known)
                for who, value in (("with", as_is), ("without", without))
            }
            seconds = interleaved({size: timers}, rounds)[size]
            row.append(shown(ratio(seconds["without"], seconds["with"])))
        setattr(_transfer, name, as_is)
        rows.append(row)
    return aligned(rows)


def sweep(device: torch.device, rounds: int, synchronize: Callable[[], None]) -> str:
    """The time of the plain loop divided by our unpacked time, for 40 equal fields of different sizes."""
    as_is, everything, nothing = (
        (_transfer.COALESCED_TENSOR, _transfer.COALESCED_BUFFER),
        (1 << 20, 2 << 20),
        (-1, _transfer.COALESCED_BUFFER),
    )
    ways = {"as it is": as_is, "all coalesced": everything, "none coalesced": nothing}
    rows = [["loop / ours unpacked", "KiB a field", *ways]]
    for name, to in (("H2D", device), ("D2H", CPU)):
        for kib in (1, 4, 16, 32, 64, 128, 256):
            source = {key: field.to(device if to == CPU else CPU) for key, field in equal(40, kib, 256).items()}
            known = {"to": to, "synchronize": synchronize, "transfer": _transfer}
            loop = Timer(f"{LOOP.code}; synchronize()", timer=perf_counter, globals={**known, "x": source})
            timers = {LOOP.name: loop}
            for way, (small, block) in ways.items():
                constants = f"transfer.COALESCED_TENSOR, transfer.COALESCED_BUFFER = {small}, {block}; synchronize()"
                names = {**known, "x": DeviceDict(source)}
                timers[way] = Timer("x.to(to); synchronize()", constants, timer=perf_counter, globals=names)
            seconds = interleaved({kib: timers}, rounds)[kib]
            rows.append([name, str(kib), *(shown(ratio(seconds[LOOP.name], seconds[way])) for way in ways)])
    _transfer.COALESCED_TENSOR, _transfer.COALESCED_BUFFER = as_is
    return aligned(rows)


def shown(r: Mapping[str, float] | None) -> str:
    return "" if r is None else f"{r['median']:7.2f} ({r['min']:.2f}..{r['max']:.2f})"


def table(lines: list[dict[str, Any]]) -> str:
    """A line for each contender: its time as a multiple of ours, and its goals."""
    weigh = any("pickle_bytes" in one for one in lines)
    head = ["operation", "fields", "contender", f"/ {PACKED.name}", f"/ {UNPACKED.name}", *["pickle"] * weigh]
    rows = [[*head, "goal", "met"]]
    for one in lines:
        where = [one["operation"], one["fields"]]
        for who in one["median_seconds"]:
            cells = [shown(one["ratios"].get(mine, {}).get(who)) for mine in (PACKED.name, UNPACKED.name)]
            if weigh:
                nbytes = one.get("pickle_bytes", {}).get(who)
                cells.append(f"{nbytes} B" if nbytes else "")
            left = [*where, who, *cells]
            for goal in [goal for goal in one["goals"] if goal["against"] == who] or [None]:
                text = f">= {goal['least']:g} x {goal['ours']}" if goal else ""
                rows.append([*left, text, "" if goal is None else "yes" if goal["met"] else "NO"])
                left = [""] * len(left)
            where = ["", ""]
    return aligned(rows)


def found(name: str) -> torch.device | None:
    """The device, with its index. None if it does not exist."""
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError):  # the second if torch was built without the device
        return None
    return device


def main() -> None:
    options = parser("Moving a dict of tensors beside loops, TensorDict and accelerate, as ratios.")
    options.add_argument("--device", default="cuda", help="the device to move to and from (cuda)")
    options.add_argument("--sweep", action="store_true", help="only measure which fields to coalesce, by their size")
    args = options.parse_args()
    measured = setting(tensordict=TensorDict, accelerate=send_to_device)
    device = None if args.device == "cpu" else found(args.device)
    named = None if device is None else getattr(torch.get_device_module(device), "get_device_name", None)
    measured["gpu"] = None if named is None else named(device)
    versions = {what: name for what, name in measured.items() if what != "gpu" or name}
    print(", ".join(f"{what} {name or 'is not installed, it is left out'}" for what, name in versions.items()))
    if device is None:
        print(f"there is no accelerator {args.device!r} here, its part is left out")
        synchronize = None
    else:
        synchronize = getattr(torch.get_device_module(device), "synchronize", lambda: None)
    print(f"median (least..greatest) of {args.rounds} ratios of times; above 1 ours is faster\n", flush=True)
    if args.sweep:
        if device is not None:
            print(sweep(device, args.rounds, synchronize), halves(device, args.rounds, synchronize), sep="\n\n")
        return

    bench = Bench(args.rounds)
    if device is not None:
        for operation in moves(device):
            bench.time(operation, synchronize)
    bench.time(PACK)
    bench.time_unpickling(UNPICKLE)
    print(table(bench.lines))
    for what, reason in bench.left_out.items():
        print(f"left out: {what}: {reason}")
    results = {"rounds": args.rounds, "left_out": bench.left_out, "results": bench.lines}
    write(args.json, {**measured, "device": None if device is None else str(device), **results})


if __name__ == "__main__":
    main()
