"""Random moves of random dicts on the strict device. Each result is compared with plain values on the host.

    python tests/device/fuzz.py SEED SECONDS      the cases 0, 1, 2, ... of a seed, for so many seconds
    python tests/device/fuzz.py SEED --case N     one of them again

A case depends on the seed and its number alone, and not on the time. A failure prints the command that repeats it.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import strict
import torch
from torch import Tensor

from tensordict_lite import DeviceDict, prefetch
from tensordict_lite._memory import staging

sys.path.append(str(Path(__file__).parents[1]))
from checks import check_invariants

Key = tuple[str, ...]
Values = dict[Key, Tensor]
"""The expected values of a dict, on the host."""

DEVICES = ["cpu", "sim:0", "sim:1"]
ACCELERATORS = DEVICES[1:]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COUNTABLE = [*FLOATS, torch.complex64, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
"""The dtypes for which the CPU has ``add_``."""
DTYPES = [*COUNTABLE, torch.float32, torch.float32, torch.int64, torch.bool, torch.uint16, torch.float8_e4m3fn]
SIZES = [1, 9, 9, 100, 100, 1000, 1000, 20_000, 20_000, 300_000]
"""Elements of a tensor. The engine treats 32 KiB, 1 MiB and 2 MiB differently; a few dicts are larger than 16 MiB."""
LAYOUTS = ["plain", "plain", "plain", "gaps", "transposed", "offset", "expanded", "shared", "grad", "tie", "empty"]


class Failure(Exception):
    """A case that gave a wrong result, or an error that it should not give."""


def fresh(random: Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Small whole numbers, so that each cast is exact."""
    count = torch.Size(shape).numel()
    numbers = (torch.arange(count) * random.choice([1, 3, 7]) + random.randrange(50)) % 50
    return (numbers % 2 if dtype == torch.bool else numbers).reshape(shape).to(dtype)


def random_dict(random: Random, simple: bool = False) -> tuple[dict[Key, Tensor], Values, dict[Key, Key]]:
    """Tensors with random dtypes, shapes and layouts, their values, and the fields that are the same tensor.

    ``simple``: every tensor can be written to, and requires no grad.
    """
    tensors: dict[Key, Tensor] = {}
    values: Values = {}
    ties: dict[Key, Key] = {}
    shared, used = torch.zeros(3000), 0
    sizes = [6_000_000, 10] if random.random() < 0.01 else SIZES
    for i in range(random.choice([1, 1, 2, 3, 8, 30])):
        key: Key = (*random.choice([(), (), ("n",), ("n", "m")]), f"k{i}")
        layout = random.choice(LAYOUTS)
        dtype = random.choice(DTYPES)
        size = random.choice(sizes if i < 4 else SIZES[:7])
        shapes: list[tuple[int, ...]] = [(size,), (size,), (size // 3, 3), (2, size // 2), ()]
        shape = random.choice(shapes)
        if layout == "empty":
            shape = (0, 4)
        elif layout == "grad" and not simple:
            dtype = random.choice(FLOATS)
        elif layout == "shared":
            dtype, shape = torch.float32, (min(size, 100),)
        value = fresh(random, shape, dtype)
        tensor = value.clone()
        if layout == "gaps" and shape:
            tensor = torch.zeros(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2].copy_(value)
        elif layout == "transposed" and len(shape) == 2:
            tensor = torch.zeros(shape[::-1], dtype=dtype).t().copy_(value)
        elif layout == "offset":
            tensor = torch.zeros(value.numel() + 5, dtype=dtype)[5:].reshape(shape).copy_(value)
        elif layout == "expanded" and len(shape) == 2 and not simple:
            value = value[:1].expand(shape).clone()
            tensor = value[:1].clone().expand(shape)
        elif layout == "shared" and used + 100 <= len(shared):
            tensor, used = shared[used : used + shape[0]].copy_(value), used + 100
        elif layout == "grad" and not simple:
            tensor.requires_grad_()
        elif layout == "tie" and tensors:
            other = random.choice(list(tensors))
            tensor, value, ties[key] = tensors[other], values[other], ties.get(other, other)
        tensors[key], values[key] = tensor, value
    return tensors, values, ties


def nested(tensors: dict[Key, Tensor]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, tensor in tensors.items():
        inner = out
        for part in key[:-1]:
            inner = inner.setdefault(part, {})
        inner[key[-1]] = tensor
    return out


def flat(d: Any, at: Key = ()) -> dict[Key, Tensor]:
    out: dict[Key, Tensor] = {}
    for key, value in d.items():
        out.update({(*at, key): value} if isinstance(value, Tensor) else flat(value, (*at, key)))
    return out


def check(what: str, tensors: dict[Key, Tensor], values: Values) -> None:
    """Compare every byte. Each tensor comes to the host by torch's own copy."""
    if tensors.keys() != values.keys():
        raise Failure(f"{what} has other keys: {set(tensors) ^ set(values)}")
    for key, value in values.items():
        tensor = tensors[key].detach().cpu()
        if tensor.dtype != value.dtype or tensor.shape != value.shape:
            raise Failure(f"{what} has {tensor.dtype} {tensor.shape} at {key}, expected {value.dtype} {value.shape}")
        found, expected = (
            t.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) for t in (tensor, value)
        )
        if not found.equal(expected):
            raise Failure(f"{what} has {int((found != expected).sum())} of {len(found)} bytes wrong at {key}")


def addresses(d: DeviceDict) -> set[int]:
    """Where storages and tensors start. An array of NumPy starts at the tensor, and not at its storage."""
    tensors = [t for t in flat(d).values() if t.numel()]
    return {address for t in tensors for address in (t.untyped_storage().data_ptr(), t.data_ptr())}


def overwrite(d: DeviceDict) -> None:
    """Write over all memory of a dict: at once on the host, in the order of the current stream on a device."""
    for tensor in flat(d).values():
        storage = tensor.untyped_storage()
        torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).fill_(0xDB)


def is_expanded(tensor: Tensor) -> bool:
    return any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def is_late(d: DeviceDict) -> bool:
    """Whether a copy with ``non_blocking`` may read the dict after the call."""
    return any(t.is_pinned() for t in flat(d).values() if t.device.type == "cpu")


class Moves:
    """One dict that makes random moves, and its expected values."""

    def __init__(self, random: Random, log: list[str], alone: bool = True) -> None:
        self.random, self.log, self.alone = random, log, alone
        tensors, self.values, self.ties = random_dict(random)
        self.d = DeviceDict(nested(tensors))
        self.also: list[tuple[torch.Stream, dict[Key, Tensor], Values]] = []
        """Streams, copies that were made there, and their expected values."""
        self.note(f"{len(tensors)} tensors, {self.d.nbytes} bytes")

    def note(self, text: str) -> None:
        self.log.append(text)

    def run(self) -> None:
        steps = [self.to, self.to, self.to, self.to, self.bump, self.bump, self.fill, self.take, self.pack, self.clone]
        steps += [self.pin, self.busy, self.use_on_a_side_stream]
        if self.alone:  # these change the device for all threads
            steps += [self.to_a_full_device, self.without_pinning]
        for _ in range(self.random.randint(2, 7)):
            self.random.choice(steps)()
            if self.random.random() < 0.15:  # rarely, because it waits for the stream
                self.check()
        self.check()
        for stream, found, expected in self.also:
            stream.synchronize()
            check("the use on a side stream", found, expected)

    def check(self) -> None:
        check_invariants(self.d)
        check("the dict", flat(self.d), self.values)

    def current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.d.device)

    def on_device(self) -> bool:
        return self.d.device is not None and self.d.device.type == "sim"

    def replace(self, after: DeviceDict, late: bool = False) -> None:
        """Go on with a result. Its source is overwritten, or freed and its memory taken by others, or kept."""
        before, self.d = self.d, after
        self.discard(before, after, late)

    def discard(self, before: DeviceDict, after: DeviceDict, late: bool) -> None:
        if addresses(before) & addresses(after):
            return
        fate = self.random.choice(["overwritten", "freed", "kept"])
        if fate == "overwritten" and not late:
            overwrite(before)
        elif fate == "freed":
            sizes = [max(1, t.nbytes) for t in flat(before).values()][:8]
            del before
            for size in sizes:
                torch.full((size,), 0xDB, dtype=torch.uint8).pin_memory()
                torch.full((size,), 0xDB, dtype=torch.uint8)
                if self.on_device():
                    torch.full((size,), 0xDB, dtype=torch.uint8, device=self.d.device)
        self.note(f"  its source is {fate}")

    def arguments(self) -> tuple[str, dict[str, Any]]:
        chosen: dict[str, Any] = {
            "non_blocking": self.random.random() < 0.4,
            "copy": self.random.random() < 0.2,
            "dtype": self.random.choice([None, None, *FLOATS]),
        }
        if any(value.is_complex() for value in self.values.values()):
            chosen["dtype"] = None
        target = self.random.choice(DEVICES)
        self.note(f"to({target}, {chosen})")
        return target, {name: value for name, value in chosen.items() if value is not None}

    def moved(self, target: str, options: dict[str, Any]) -> tuple[DeviceDict, bool]:
        """The result, and whether the source may be read later."""
        after = self.d.to(target, **options)
        if options["non_blocking"] and self.on_device() and target == "cpu":
            self.current().synchronize()
        dtype = options.get("dtype")
        if dtype is not None:
            self.values = {key: v.to(dtype) if v.is_floating_point() else v for key, v in self.values.items()}
        return after, options["non_blocking"] and is_late(self.d)

    def to(self) -> None:
        self.replace(*self.moved(*self.arguments()))

    def to_a_full_device(self) -> None:
        target, options = self.arguments()
        left = self.random.choice([0, 100, 10_000, 500_000])
        self.note(f"  with {left} bytes left")
        try:
            with strict.memory_left(left, 0), strict.memory_left(left, 1):
                result = self.moved(target, options)
        except torch.OutOfMemoryError:
            self.note("  out of memory")
        else:
            self.replace(*result)

    def without_pinning(self) -> None:
        staging._stagings.clear()
        torch.ops.strict.free_pinned()
        self.note("without pinning")
        target, options = self.arguments()
        if target == "cpu":  # torch pins the result of a copy that nobody waits for
            options["non_blocking"] = False
        with strict.no_pinning():
            result = self.moved(target, options)
        self.replace(*result)

    def bump(self) -> None:
        """Work on the stream before the next move."""
        changed: set[int] = set()
        with torch.no_grad():
            for key, tensor in flat(self.d).items():
                if tensor.dtype not in COUNTABLE or is_expanded(tensor):
                    continue
                if tensor.data_ptr() not in changed:  # two fields may have the same memory
                    changed.add(tensor.data_ptr())
                    tensor.add_(1)
                self.values[key] = self.values[key] + 1
        self.note("add 1")

    def busy(self) -> None:
        device = self.random.choice(ACCELERATORS)
        torch.ops.strict.busy(self.random.choice([0.0005, 0.003]), torch.device(device))
        self.note(f"{device} is busy")

    def fill(self) -> None:
        if any(map(is_expanded, flat(self.d).values())):
            return
        self.values = {key: fresh(self.random, tuple(v.shape), v.dtype) for key, v in self.values.items()}
        for key, other in self.ties.items():
            self.values[key] = self.values[other]
        source = DeviceDict(nested({key: v.clone() for key, v in self.values.items()}))
        source = source.pack() if self.random.random() < 0.5 else source
        source = source.pin_memory() if self.random.random() < 0.5 else source
        source = source.to(self.random.choice(DEVICES))
        late = self.random.random() < 0.5
        self.note(f"fill_ from {source.device}, non_blocking={late}")
        self.d.fill_(source, non_blocking=late)
        self.discard(source, self.d, late and is_late(source))

    def take(self) -> None:
        """Get the arrays or tensors on the host."""
        if self.random.random() < 0.5 and not any(
            t.dtype in (torch.bfloat16, torch.float8_e4m3fn) for t in self.values.values()
        ):
            self.note("numpy()")
            self.replace(DeviceDict(self.d.numpy()))
        else:
            self.note("cpu()")
            self.replace(self.d.cpu())

    def pack(self) -> None:
        self.note("pack()")
        self.replace(self.d.pack())

    def clone(self) -> None:
        self.note("clone()")
        self.replace(self.d.clone())

    def pin(self) -> None:
        if not self.on_device():
            self.note("pin_memory()")
            self.replace(self.d.pin_memory())

    def use_on_a_side_stream(self) -> None:
        """A side stream reads the dict, which is freed at once."""
        if not self.on_device():
            return
        side = torch.Stream(device=self.d.device)
        side.wait_stream(self.current())
        after = self.d.clone()
        with side:
            if self.random.random() < 0.7:
                torch.ops.strict.busy(0.002, self.d.device)
            found = {key: t.detach().clone() for key, t in flat(self.d).items()}
        self.d.record_stream(side)
        self.also.append((side, found, dict(self.values)))
        self.d = after
        self.note("use on a side stream")


def prefetching(random: Random, log: list[str]) -> None:
    """Iterate over `prefetch` with a random loader and a random consumer."""
    device = random.choice(ACCELERATORS)
    options: dict[str, Any] = {}
    if random.random() < 0.4:
        options["slots"] = random.randint(1, 4)
    else:
        options["depth"] = random.randint(1, 4)
    if random.random() < 0.3:
        options["max_bytes"] = random.choice([1, 10_000, 1_000_000])
    count = random.randint(2, 8)
    style = random.choice(["new", "reused", "reused and pinned", *ACCELERATORS])
    packed, fails_at = random.random() < 0.5, random.choice([None, None, count - 1])
    tensors, values, ties = random_dict(random, simple=True)
    wanted: list[Values] = []
    for _ in range(count):
        wanted.append({key: fresh(random, tuple(v.shape), v.dtype) for key, v in values.items()})
        for key, other in ties.items():
            wanted[-1][key] = wanted[-1][other]
    log.append(f"prefetch to {device}, {options}, batches {style}, {count=}, {packed=}, {fails_at=}")

    def source() -> Iterator[DeviceDict]:
        memory = DeviceDict(nested(tensors))
        memory = memory.pack() if packed else memory
        memory = memory.pin_memory() if style == "reused and pinned" else memory
        for i, each in enumerate(wanted):
            if i == fails_at:
                raise ArithmeticError
            batch = memory
            if style in ("new", *ACCELERATORS):
                batch = DeviceDict(nested({key: torch.zeros_like(v) for key, v in each.items()}))
                batch = batch.pack() if packed else batch
            if style in ACCELERATORS:
                batch = batch.to(style)
                torch.ops.strict.busy(0.002, torch.device(style))
            for key, tensor in flat(batch).items():
                tensor.copy_(each[key])
            yield batch

    kept: list[dict[Key, Tensor]] = []
    stop = random.choice([None, None, random.randrange(count)])
    batches = iter(prefetch(source(), device, **options))
    try:
        for i, d in enumerate(batches):
            if random.random() < 0.5:
                torch.ops.strict.busy(random.choice([0.0005, 0.004]), torch.device(device))
            keep = "slots" not in options and random.random() < 0.3
            kept.append({key: t if keep else t.clone() for key, t in flat(d).items()})
            if random.random() < 0.2:  # the consumer may write to its batch
                kept[-1] = {key: t.clone() for key, t in kept[-1].items()}
                overwrite(d)
            del d
            if i == stop:
                break
    except ArithmeticError:
        if len(kept) != fails_at:
            raise Failure(f"the error of the loader came at batch {len(kept)}, not {fails_at}") from None
    del batches
    expected = count if fails_at is None else fails_at
    if len(kept) != (expected if stop is None else min(stop + 1, expected)):
        raise Failure(f"{len(kept)} batches of {expected}, stop at {stop}")
    for i, found in enumerate(kept):
        check(f"batch {i}", found, wanted[i])


def threads(random: Random, log: list[str]) -> None:
    """Several threads move dicts of their own, on one stream or on several."""
    errors: list[BaseException] = []
    count = random.randint(2, 4)
    parts = [(Random(random.random()), random.random() < 0.5, list[str]()) for _ in range(count)]

    def work(part: Random, side: bool, lines: list[str]) -> None:
        try:
            with ExitStack() as stack:
                if side:
                    stack.enter_context(torch.Stream(device=part.choice(ACCELERATORS)))
                for _ in range(3):
                    Moves(part, lines, alone=False).run()
        except BaseException as error:
            lines.append(repr(error))
            errors.append(error)

    running = [threading.Thread(target=work, args=part) for part in parts]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    for i, (_, side, lines) in enumerate(parts):
        log += [f"thread {i}, on a side stream: {side}", *(f"  {line}" for line in lines)]
    if errors:
        raise errors[0]


def moves(random: Random, log: list[str]) -> None:
    Moves(random, log).run()


def on_a_side_stream(random: Random, log: list[str]) -> None:
    with torch.Stream(device=random.choice(ACCELERATORS)):
        log.append("on a side stream")
        moves(random, log)


def run_case(seed: int, number: int) -> list[str]:
    """Run one case. Returns its steps. Raises `Failure` with them."""
    random, log = Random(f"{seed}, {number}"), list[str]()
    kind = random.choices([moves, on_a_side_stream, prefetching, threads], [10, 3, 4, 2])[0]
    longest = random.choice([0, 0, 300, 2000])
    try:
        with strict.delays(0, longest) if longest else ExitStack():
            kind(random, log)
        for index in range(2):
            torch.accelerator.synchronize(index)
            slots = staging.staging_of(torch.device("sim", index)).slots
            if len(slots) > staging.SLOTS or any(slot.users for slot in slots):
                raise Failure(f"{len(slots)} slots of pinned memory, {sum(slot.users for slot in slots)} in use")
    except Exception as error:
        steps = "\n".join(f"  {line}" for line in log)
        again = f"python tests/device/fuzz.py {seed} --case {number}"
        raise Failure(f"case {number} of seed {seed} failed: {error!r}\n{steps}\nRun it again: {again}") from error
    return log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int, metavar="SEED")
    parser.add_argument("seconds", type=float, nargs="?", default=10.0, metavar="SECONDS")
    parser.add_argument("--case", type=int, metavar="N")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.case is not None:
        print("\n".join(run_case(given.seed, given.case)))
        return
    end, number = time.monotonic() + given.seconds, 0
    while time.monotonic() < end:
        faulthandler.dump_traceback_later(300, exit=True)  # a case that hangs
        run_case(given.seed, number)
        number += 1
    print(f"{number} cases of seed {given.seed}: no wrong value")


if __name__ == "__main__":
    main()
