"""Parse and resolve devices. Find out what a device can do, and whether torch intercepts tensor operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .dtypes import DTYPES

DeviceLike = torch.device | str | int

CPU = torch.device("cpu")
"""Every dict on the CPU keeps this object as its device, so that code can compare with ``is``."""
META = torch.device("meta")

_compiling = torch.compiler.is_compiling
# Private: torch has no public name for "vmap or grad runs", "a dispatch mode is active", or the level of forward AD.
_C: Any = torch._C
_interpreters = _C._functorch.peek_interpreter_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_trace = torch.jit.is_tracing


def canonical(device: torch.device) -> torch.device:
    """Replace a CPU device that a tensor reports by `CPU`. Other devices are returned themselves."""
    return CPU if device == CPU else device


def resolve(device: DeviceLike) -> torch.device:
    """The device that a tensor on ``device`` reports. ``"cuda"`` becomes the current CUDA device, with its index.

    Raises ``TypeError`` if ``device`` is no str, int or ``torch.device``. Raises torch's ``RuntimeError`` for an
    unknown type. Raises torch's own error for a device without an index that this machine or build does not have.
    """
    # Most calls end here.
    if device is CPU or (type(device) is str and device == "cpu"):
        return CPU
    if not isinstance(device, (str, int, torch.device)):
        raise TypeError(
            f"a device is a str, a torch.device or an int, got {device!r:.60} of type {type(device).__name__}"
        )
    parsed = device if isinstance(device, torch.device) else parse(device)
    if parsed.type in ("cpu", "meta"):  # torch accepts and ignores their index
        return CPU if parsed.type == "cpu" else META
    index: Any = parsed.index  # None without an index; the stubs of torch do not say so
    if index is not None:
        return parsed
    # Ask torch, which knows every backend and the current device.
    return torch.empty(0, device=parsed).device


def parse(device: str | int) -> torch.device:
    """``torch.device(device)``. Raises ``TypeError`` for the name of a dtype."""
    if device in DTYPES:
        raise TypeError(f"{device!r} is the name of a dtype, not of a device; write torch.{device}")
    return torch.device(device)


@dataclass(frozen=True)
class DeviceCapabilities:
    """What a device can do. The defaults are always safe: with them, every tensor is copied alone and blocking."""

    accelerator: bool = False
    """It is the current accelerator of torch, and it exists."""
    streams: bool = False
    """It has streams and events, and ``record_stream``. So copies can run beside other work."""
    pinned_memory: bool = False
    """Copies from and to pinned memory are asynchronous, and torch reuses that memory only after the copy."""
    byte_views: bool = False
    """Its memory can be viewed as any dtype, at any aligned offset."""
    timed_events: bool = False
    """Its events tell the time between them."""


_capabilities = {CPU: DeviceCapabilities(byte_views=True), META: DeviceCapabilities()}
_WITHOUT_BYTE_VIEWS = ("mps",)
"""Metal does not guarantee byte views. A trial cannot show this: the views exist, but some kernels cannot read them."""
_stream_knows = hasattr(torch.Stream, "is_capturing")  # from torch 2.13
_device_index: Any = getattr(torch.accelerator, "device_index", None)  # newer than torch 2.7


def capabilities(device: torch.device) -> DeviceCapabilities:
    """What a resolved ``device`` can do. A trial at the first call decides; the result is cached.

    The type alone does not tell: a backend written in Python has the classes, but their methods raise. Do not call this
    function while operations on tensors are intercepted.

    Cost: the first call for an accelerator initializes it, and creates a stream. It waits for no work.
    """
    known = _capabilities.get(device)
    return _try_out(device) if known is None else known


def _try_out(device: torch.device) -> DeviceCapabilities:
    current = torch.accelerator.current_accelerator()
    # Compare first: some backends end the process when they are asked for a device that they do not have.
    if current is None or current.type != device.type or not 0 <= device.index < torch.accelerator.device_count():
        return DeviceCapabilities()
    views = current.type not in _WITHOUT_BYTE_VIEWS
    try:
        # A graph that is captured must not see the trial. This call also initializes the device.
        if is_capturing(device):
            return DeviceCapabilities(accelerator=True, byte_views=views and _works(_has_byte_views, device))
        streams = _works(_has_streams, device)
        pins = streams and _works(_can_pin, device)
        bytes_, timed = views and _works(_has_byte_views, device), streams and _works(_has_timed_events, device)
        found = DeviceCapabilities(True, streams, pins, bytes_, timed)
    except torch.OutOfMemoryError:  # says nothing about the device: try again at the next call
        return DeviceCapabilities(accelerator=True)
    except RuntimeError:  # the device cannot be initialized, as in a forked process; a copy raises torch's own error
        return DeviceCapabilities()
    _capabilities[device] = found
    return found


def _works(trial: Callable[[torch.device], bool], device: torch.device) -> bool:
    try:
        return trial(device)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AttributeError, TypeError):  # a backend in Python "doesn't support synchronizing events"
        return False


def _has_byte_views(device: torch.device) -> bool:
    memory = torch.empty(64, dtype=torch.uint8, device=device).untyped_storage()
    view = torch.empty(0, dtype=torch.float32, device=device).set_(memory, 1, (2, 3), (3, 1))
    return view.data_ptr() == memory.data_ptr() + 4


def _has_streams(device: torch.device) -> bool:
    side = torch.Stream(device=device)
    with side:
        tensor = torch.empty(1, dtype=torch.uint8, device=device)
    event = side.record_event()
    event.synchronize()
    side.synchronize()
    side.wait_stream(torch.accelerator.current_stream(device))
    tensor.record_stream(torch.accelerator.current_stream(device))
    return True


def _has_timed_events(device: torch.device) -> bool:
    side = torch.Stream(device=device)
    begin, end = (torch.Event(device=device, enable_timing=True) for _ in range(2))
    begin.record(side)
    end.record(side)
    end.synchronize()
    return begin.elapsed_time(end) >= 0


def _can_pin(device: torch.device) -> bool:
    with on_device(device):
        return torch.empty(1, dtype=torch.uint8, device=CPU, pin_memory=True).is_pinned()


def intercepted() -> bool:
    """Whether a part of torch intercepts every operation on a tensor. Then tensors cannot be packed.

    These parts are torch.compile, functorch transforms, forward-mode autograd, dispatch modes and torch.jit.trace.
    """
    return bool(_compiling() or _interpreters() or _dispatch_modes() or _trace() or forward_ad._current_level >= 0)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of an accelerator records its work for a graph, as a CUDA graph does.

    Raises torch's own error if the device cannot be initialized, as in a forked process.
    """
    stream = torch.accelerator.current_stream(device)
    if _stream_knows:
        return stream.is_capturing()
    ask: Any = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    if ask is None:
        return False
    with on_device(device):
        return ask()


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Make an accelerator the current device within the block.

    Note: ``with stream`` does not work: it changes nothing if the stream is the current stream of another device. Nor
    does ``set_device_index``: to set the device back would create a context on a device that the process does not use.
    """
    if _device_index is not None:
        return _device_index(device.index)
    return torch.get_device_module(device).device(device.index)


def record_stream(tensors: Iterable[Tensor], stream: torch.Stream) -> None:
    """Call ``Tensor.record_stream`` once for each storage of some dense tensors.

    The allocator knows whole blocks of memory, so a second call for a storage would change nothing.
    """
    seen: set[int] = set()
    for tensor in tensors:
        if type(tensor) is Tensor:  # a wrapper of other tensors may have no storage of its own
            start = tensor.untyped_storage().data_ptr()
            if start in seen:
                continue
            seen.add(start)
        tensor.record_stream(stream)
