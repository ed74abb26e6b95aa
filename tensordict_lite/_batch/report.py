"""Where the time of a loop over `prefetch` goes: `Watch` counts during a pass, and `Report` says it."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import asdict, dataclass
from math import ceil
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # torch has no public name for it in the versions supported
from torch.utils.data import Dataset

from .._errors import described, dotted
from .._memory.device import CPU, intercepted
from .._memory.packed import packable
from .._memory.transfer import COALESCED_TENSOR, plan_copies
from .._tree.walk import nbytes
from .containers import tensors_inside

_EVERY = 13
"""Of so many batches, the bytes of one are counted, and its events are recorded. An event costs some microseconds. The
number is a prime, because the workers of a loader take turns."""
_SHARE = 0.1
"""The least share of the time that is worth an advice."""
_MANY_OBJECTS = 10_000
"""The Python objects of a dataset that are worth an advice."""
_APART = 32
"""The small fields of a batch that are worth an advice."""

WAITING, COPYING, STEP = range(3)


class Journey(NamedTuple):
    """How a batch gets to the device."""

    copies: int = 0
    apart: int = 0
    """The small fields that are gathered in one buffer first."""
    pageable: int = 0
    """The bytes in memory that is not pinned, if pinned memory makes a difference."""
    alone: tuple[tuple[str, str], ...] = ()
    """The fields with a copy of their own, each with the reason."""


def journey(batch: Any, target: torch.device) -> Journey:
    """Find out how a batch gets to the device. Copies nothing."""
    leaves, _ = pytree.tree_flatten_with_path(batch)
    names = {id(leaf): dotted(tuple(map(_name, path))) for path, leaf in leaves}
    places: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors_inside(batch):
        if tensor.device != target:
            places.setdefault(tensor.device, []).append(tensor)
    copies, apart, pageable, alone = 0, 0, 0, dict[str, str]()
    for source, tensors in places.items():
        plan = plan_copies(tensors, source, target, non_blocking=True)
        parts = [part.members for chunk in plan.coalesced for part in chunk.parts]
        singles = [i for i, *others in parts if not others]
        items = [*singles, *plan.staged, *plan.one_by_one]
        copies += len(parts) - len(singles) + len(items)
        apart += sum(map(len, parts)) - len(singles)
        for tensor in [tensors[item] for item in items if isinstance(item, int)]:
            alone[names.get(id(tensor), described(tensor))] = _why_alone(tensor)
        if plan.pins and source == CPU:
            pageable += sum(nbytes(tensor) for tensor in tensors if not tensor.is_pinned())
    return Journey(copies, apart, pageable, tuple(alone.items()))


def _name(step: Any) -> str:
    """A step of a path of pytree: the key, the attribute or the number."""
    return str(next(getattr(step, name) for name in ("key", "name", "idx") if hasattr(step, name)))


def _why_alone(tensor: Tensor) -> str:
    """Why a tensor has a copy of its own."""
    if tensor.requires_grad:
        return "requires grad"
    if not packable(tensor):
        return "is no plain dense tensor"
    return f"is larger than {COALESCED_TENSOR >> 10} KiB" if tensor.nbytes > COALESCED_TENSOR else "is the only one"


class _Spans:
    """The time between pairs of events. It is read when the events are over, so nothing waits for them."""

    def __init__(self) -> None:
        self.pending: deque[tuple[torch.Event, torch.Event, float]] = deque()
        self.seconds = self.amount = 0.0

    def add(self, begin: torch.Event, end: torch.Event, amount: float) -> None:
        self.pending.append((begin, end, amount))
        self.read()

    def read(self) -> None:
        while self.pending and self.pending[0][1].query():
            begin, end, amount = self.pending.popleft()
            self.seconds += begin.elapsed_time(end) / 1000
            self.amount += amount


class Watch:
    """The times and counts of one pass."""

    def __init__(self, device: torch.device, timed: bool, known: Journey | None) -> None:
        self.device, self.timed, self.journey = device, timed, known
        self.batches = self.arrivals = self.bytes = self.counted = 0
        self.seconds = [0.0, 0.0, 0.0]
        self.starting = 0.0
        self.copies, self.idle = _Spans(), _Spans()
        self._size: int | None = None  # the bytes of the batch that arrived last, if it is one of 13
        self._ended: tuple[torch.Event, float] | None = None
        self._then = perf_counter()

    def lap(self, phase: int) -> None:
        """What has passed since the last lap was this phase."""
        now = perf_counter()
        self.seconds[phase] += now - self._then
        self._then = now

    def arrived(self, batch: Any) -> None:
        """The loader gave a batch."""
        self.lap(WAITING)
        self.arrivals += 1
        self._size = None
        if self.arrivals % _EVERY != 1:
            return
        if self.arrivals == 1:
            self.starting = self.seconds[WAITING]
        if self.journey is None and not intercepted():
            self.journey = journey(batch, self.device)
        self._size = sum(nbytes(tensor) for tensor in tensors_inside(batch) if tensor.device != self.device)
        self.bytes += self._size
        self.counted += 1

    def copy_begins(self, stream: torch.Stream) -> torch.Event | None:
        """An event before the copy of the batch that arrived, if the copy is timed."""
        return None if self._size is None or not self.timed else self._event(stream)

    def copy_ends(self, stream: torch.Stream, begin: torch.Event | None) -> torch.Event:
        """An event after the copy."""
        if begin is None or self._size is None:
            return stream.record_event()
        end = self._event(stream)
        self.copies.add(begin, end, self._size)
        return end

    def step_begins(self) -> None:
        """The batch is handed over."""
        self.lap(COPYING)
        self.batches += 1
        if self._ended is not None:
            end, busy = self._ended
            self._ended = None
            now = self._event(torch.accelerator.current_stream(self.device))
            self.idle.add(end, now, sum(self.seconds[:STEP]) - busy)

    def step_ends(self) -> None:
        self.lap(STEP)
        if self.timed and self.batches % _EVERY == 1:
            self._ended = self._event(torch.accelerator.current_stream(self.device)), sum(self.seconds[:STEP])

    def _event(self, stream: torch.Stream) -> torch.Event:
        event = torch.Event(device=self.device, enable_timing=True)
        event.record(stream)
        return event

    def report(self, loader: Any) -> Report:
        """``loader``: the innermost loader."""
        self.idle.read()
        self.copies.read()
        waiting, copying, step = self.seconds
        if self.idle.amount:
            # While the device still worked on the step before, nothing was lost.
            lost = min(1.0, self.idle.seconds / self.idle.amount)
            waiting, copying, step = waiting * lost, copying * lost, step + (waiting + copying) * (1 - lost)
        size = self.bytes // max(1, self.counted)
        timed = self.copies
        amount, seconds = (timed.amount, timed.seconds) if timed.seconds else (size * self.batches, copying)
        speed, path = amount / seconds if seconds else 0.0, self.journey or Journey()
        found = Report(self.batches, waiting, copying, step, size, speed, path.copies, dict(path.alone))
        found.advice = _advice(found, self, path, loader) if self.batches else "no batch has come yet"
        return found


@dataclass
class Report:
    """Where the time of a loop over `prefetch` went, from the first batch of the last pass until now.

    On an accelerator with streams, the times are those of the device: a wait of the host during which the device works
    is a part of the step. One batch of 13 is timed, by events that nothing waits for.

    Attributes:
        batches: the batches that you received.
        waiting: the seconds for which the loop waited for the loader.
        copying: the seconds for which it waited for copies to the device.
        step: the seconds of your own code.
        bytes: the bytes per batch that are copied to the device, a mean.
        bytes_per_second: the speed of the copies.
        copies: the copies per batch. This and ``alone`` are those of the first batch.
        alone: the fields that have a copy of their own, each with the reason.
        advice: what to do about the largest loss of time, in a sentence.
    """

    batches: int
    waiting: float
    copying: float
    step: float
    bytes: int
    bytes_per_second: float
    copies: int
    alone: dict[str, str]
    advice: str = ""

    @property
    def seconds(self) -> float:
        """The seconds in all."""
        return self.waiting + self.copying + self.step

    def _share(self, seconds: float) -> str:
        return f"{seconds / max(self.seconds, 1e-9):.0%}".replace("%", " %")

    def tolist(self) -> dict[str, Any]:
        """The report as plain data, for a log."""
        return {**asdict(self), "seconds": self.seconds}

    def __str__(self) -> str:
        def line(name: str, seconds: float) -> str:
            return f"  {name:10}{seconds / max(self.batches, 1) * 1e3:10.2f} ms a step {self._share(seconds):>6}"

        lines = [f"{self.batches} batches in {self.seconds:.2f} s"]
        lines += [line(name, getattr(self, name)) for name in ("waiting", "copying", "step")]
        if self.copies:
            size, speed = self.bytes / (1 << 20), self.bytes_per_second / 1e9
            lines.append(f"  {size:.2f} MiB in {self.copies} copies a step, {speed:.2f} GB/s")
        lines += [f"  {name} travels alone: it {reason}" for name, reason in self.alone.items()]
        return "\n".join([*lines, self.advice])

    __repr__ = __str__


def _advice(found: Report, watch: Watch, path: Journey, loader: Any) -> str:
    """One sentence about the largest loss."""
    lost = max(found.waiting, found.copying)
    if lost < _SHARE * found.seconds:
        return f"the step takes {found._share(found.step)} of the time; the loader keeps up"
    share = found._share(lost)
    if found.waiting >= found.copying:
        late = f"the loader is late: {share} of the time went to waiting for samples"
        return f"{late}; {_faster(found, watch, loader)}"
    slow = f"copies to the device take {share} of the time"
    if path.apart >= _APART:
        return f"{slow}; {path.apart} small fields are gathered one by one, collate_fn=collate puts them together"
    if path.pageable:
        return f"{slow}; the batches lie in pageable memory, give the DataLoader pin_memory=True"
    return f"{slow}; send fewer bytes, such as uint8 images, and convert them on the device"


def _faster(found: Report, watch: Watch, loader: Any) -> str:
    """What makes a loader faster."""
    workers, cores = getattr(loader, "num_workers", None), _cores()
    if workers is None:
        return "a DataLoader with num_workers= makes batches during the step"
    if not workers:
        # So many batches are made in the time of the others that one is ready for each step.
        making = watch.seconds[WAITING]  # for which the host waited for the loader, whatever the device did then
        needed = ceil(making / max(found.seconds - found.waiting, making / cores))
        return f"num_workers={max(1, min(needed, cores - 1))} makes batches during the step"
    objects = _objects(getattr(loader, "dataset", None))
    if objects >= _MANY_OBJECTS:
        return f"each worker copies the {objects} Python objects of the dataset, and shares a DeviceDict or a table"
    if watch.starting > found.waiting / 2 and not loader.persistent_workers:
        return "most of it until the workers had started, persistent_workers=True starts them once"
    if workers < cores:
        have = f"{workers} worker{'s' * (workers > 1)}"
        return f"more workers help while cores are free: the loader has {have}, and there are {cores} cores"
    return "each core has a worker, so make dataset[i] and collate_fn faster"


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _objects(held: Any, depth: int = 3) -> int:
    """The length of the longest list in a dataset."""
    if isinstance(held, (list, tuple)):
        return len(held)
    if not depth or not isinstance(held, (dict, Dataset)):
        return 0
    inside = held if isinstance(held, dict) else vars(held)
    return max((_objects(value, depth - 1) for value in inside.values()), default=0)
