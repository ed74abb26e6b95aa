"""Staging: pinned memory for copies between the host and a device, so that the host need not wait."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from threading import Lock

import torch
from torch import Tensor

from .buffer import new_buffer
from .device import CPU, on_device
from .layout import aligned

SLOT = 2 << 20
"""The bytes of a slot, and the most bytes that are staged at once. The device copies one slot while the host fills
another. A power of two, because torch pins no other sizes."""
SLOTS = 16
"""The most slots of a device. So at most 32 MiB are pinned for it, whatever threads and streams there are."""


class Slot:
    """A part of the pinned memory of a device. It serves one stream at a time, and any number of copies."""

    __slots__ = ("event", "memory", "stream", "used", "users")

    def __init__(self, memory: Tensor, stream: torch.Stream) -> None:
        self.memory, self.stream = memory, stream
        self.used = 0  # bytes
        self.users = 0  # copies that are not enqueued yet
        self.event: torch.Event | None = None  # after the last copy that is enqueued


class Staging:
    """The pinned memory for copies from and to one device.

    torch's allocator for pinned memory has no bound: it stops at the first copy that is not complete, so it pins more
    and more while any stream of the device stands still.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = Lock()
        self.slots: list[Slot] = []  # the one that was taken last stands last

    def take(self, nbytes: int) -> tuple[Slot, Tensor] | None:
        """Pinned uint8[nbytes], at most `SLOT`, for one copy on the current stream, and its slot for `release`.

        Waits for the oldest copies of this stream if all slots are in use, and for no other stream. None if no slot of
        this stream waits for the device alone, or if no more memory can be pinned.
        """
        stream = torch.accelerator.current_stream(self.device)
        while True:
            with self.lock:
                slot = self._find(nbytes, stream)
                if slot is not None:
                    start = slot.used
                    slot.used, slot.users = start + aligned(nbytes), slot.users + 1
                    self.slots.remove(slot)
                    self.slots.append(slot)
                    return slot, slot.memory[start : start + nbytes]
                events = [slot.event for slot in self.slots if slot.stream == stream and not slot.users]
            if not events or events[0] is None:
                return None
            events[0].synchronize()

    def release(self, slot: Slot) -> None:
        """Say that a copy is enqueued. Its memory is used again when the device has made the copy."""
        with self.lock:
            slot.users -= 1
            slot.event = slot.stream.record_event()

    def _find(self, nbytes: int, stream: torch.Stream) -> Slot | None:
        for slot in reversed(self.slots):
            if slot.stream == stream and slot.used + nbytes <= SLOT:
                return slot
        for slot in self.slots:
            if not slot.users and (slot.event is None or slot.event.query()):
                slot.stream, slot.used, slot.event = stream, 0, None
                return slot
        if len(self.slots) == SLOTS:
            return None
        # Make the device current. Otherwise torch would create a context on another device.
        with on_device(self.device):
            try:
                self.slots.append(Slot(new_buffer(SLOT, CPU, pin=True), stream))
            except RuntimeError:
                return None
        return self.slots[-1]


_stagings: dict[torch.device, Staging] = {}


def staging_of(device: torch.device) -> Staging:
    """The pinned memory for copies from and to ``device``, which must support such copies."""
    return _stagings.get(device) or _stagings.setdefault(device, Staging(device))


@contextmanager
def staging_buffer(nbytes: int, device: torch.device, pins: bool = True) -> Generator[tuple[Tensor, bool]]:
    """uint8[nbytes] on the host for one copy to ``device`` within the block, and whether it is pinned.

    The copy of a pinned buffer can be asynchronous. ``pins``: whether the device can copy from pinned memory.
    """
    staging = staging_of(device)
    taken = staging.take(nbytes) if pins else None
    if taken is None:
        yield new_buffer(nbytes, CPU), False
        return
    try:
        yield taken[1], True
    finally:
        staging.release(taken[0])
