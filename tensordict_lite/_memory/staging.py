"""Staging: copies between the host and a device through pinned memory, so that the host need not wait."""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor

from .buffer import new_buffer
from .device import CPU, on_device

IN_FLIGHT = 32 << 20
"""The most bytes of pinned memory that copies on one stream may still read. Without a bound, a host that runs ahead of
the device pins more and more memory, and torch keeps it."""
_STREAMS = 64
"""The largest number of streams to keep count of."""


def staging_buffer(nbytes: int, device: torch.device, waits: bool = False) -> tuple[Tensor, bool]:
    """uint8[nbytes] on the host for one copy from or to ``device``, and whether it is pinned.

    ``device`` must support copies through pinned memory. If no more memory can be pinned, the buffer is not pinned.

    A copy from pinned memory needs no wait: torch reuses the memory only after the copy. This call waits if the copies
    under way would read more than `IN_FLIGHT`. ``waits``: the caller waits for the copy, so the copy does not count.
    """
    if not waits:
        _count_in_flight(nbytes, device)
    # Make `device` current. Otherwise torch would create a context on another device, and ask that device for events.
    with on_device(device):
        try:
            return new_buffer(nbytes, CPU, pin=True), True
        except RuntimeError:
            return new_buffer(nbytes, CPU), False


class _Stream:
    """The copies of one stream, in two halves of `IN_FLIGHT`: the current half, and the half before it."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.nbytes = 0  # of the copies since the last event
        self.event: torch.Event | None = None  # at the end of the half before

    def count(self, nbytes: int, stream: torch.Stream) -> None:
        with self.lock:
            self.nbytes += nbytes
            if self.nbytes <= IN_FLIGHT // 2:
                return
            before, self.event, self.nbytes = self.event, stream.record_event(), nbytes
        if before is not None:
            before.synchronize()


_streams: dict[tuple[int, int], _Stream] = {}


def _count_in_flight(nbytes: int, device: torch.device) -> None:
    """Count a copy that follows on the current stream of ``device``.

    Records one event per 16 MiB, not one per copy: an event takes as long as a small copy.
    """
    stream = torch.accelerator.current_stream(device)
    key = stream.device_index, stream.stream_id
    known = _streams.get(key)
    if known is None:
        if len(_streams) >= _STREAMS:
            _streams.clear()  # programs use a few streams, again and again
        known = _streams.setdefault(key, _Stream())
    known.count(nbytes, stream)
