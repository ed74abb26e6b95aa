"""A second device with real values and no hardware: ``sim:0`` and ``sim:1``.

``meta`` has no values, so nothing that moves *data* can be tested on it. This registers a small accelerator
through PyTorch's Python backend for PrivateUse1. Its memory is host memory that DLPack hands over under the
accelerator's name (``kDLExtDev``), so its tensors are plain ``torch.Tensor`` with real storages, and torch's own
rules for devices, copies, views and autograd apply to them.

Every copy that has an end on the device goes through ``_copy_from`` and is counted in ``COPIES``.

A backend in Python has no streams, no events and no pinned memory. `Streams` stands in for them: it notes in order what
is asked of torch. The copies are made at once, so it shows what is asked for, and not what would happen without it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import backend_registration
from torch.utils._pytree import tree_map_only

from tensordict_lite._memory import device as device_module
from tensordict_lite._memory import staging as staging_module
from tensordict_lite._memory.device import DeviceCapabilities

COPIES: Counter[str] = Counter()
"""Copies since the last ``clear()``, by direction: ``h2d``, ``d2h``, ``d2d``."""
LOG: list[str] = []
"""What `Streams` notes."""
TEST_DEVICE = os.environ.get("TEST_DEVICE")
"""The type of a real accelerator that takes the place of the simulated one, such as ``cuda``: see `make test-cuda`. While
the simulated device is registered, torch takes it for the accelerator of this machine."""
REAL_STREAMS = TEST_DEVICE is not None
"""Whether the device has streams and pinned memory. The device in `tests/device`, which has the same name, has them."""

_EXT_DEV = 12  # DLDeviceType.kDLExtDev, which torch maps to PrivateUse1
_CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "complex": 5, "bool": 6}  # DLDataTypeCode


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [("dl_tensor", _DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_malloc = ctypes.pythonapi.PyMem_RawMalloc
_malloc.restype, _malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
# The deleter is C, not a Python callback: torch also frees tensors while an exception is set.
_free = ctypes.cast(ctypes.pythonapi.PyMem_RawFree, ctypes.c_void_p)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

_allocated: list[tuple[StorageWeakRef, int]] = []
_limit: list[int] = []


def live_bytes() -> int:
    """Bytes allocated on the device now."""
    _allocated[:] = [(storage, nbytes) for storage, nbytes in _allocated if not storage.expired()]
    return sum(nbytes for _, nbytes in _allocated)


@contextlib.contextmanager
def memory_left(nbytes: int) -> Iterator[None]:
    """Within it the device has so many bytes left, and no more: then it is out of memory, in torch's words."""
    _limit[:] = [live_bytes() + nbytes]
    try:
        yield
    finally:
        _limit.clear()


class _Module:
    """What torch looks for under ``torch.sim``."""

    current = 0

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return AVAILABLE

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def device_count(self) -> int:
        return 2

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def current_device(self) -> int:
        return self.current

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        try:
            yield
        finally:
            self.current = before


sim = _Module()
_register: Any = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
AVAILABLE = _register is not None
"""Whether this version of torch has backends in Python: 2.10 has, 2.7 has not. Without, there is a name and no device."""
NO_DEVICE = ("from the 'sim' backend", "with support for sim devices")
"""What torch says then of a tensor on the device."""
if TEST_DEVICE is not None:
    pass
elif AVAILABLE:
    _register("sim", backend_module=sim)
else:
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", sim)
SIM, OTHER = [torch.device("sim" if TEST_DEVICE is None else "privateuseone", i) for i in range(2)]
_ops = torch.library.Library("aten", "IMPL", "PrivateUse1")
_rest = torch.library.Library("_", "IMPL")


def _on_cpu(op: Any, *args: Any) -> Any:
    """The CPU kernel of ``op`` on a device tensor: right where it touches only sizes, strides and the storage."""
    return op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args)


def _empty_strided(
    size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> torch.Tensor:
    dtype = dtype or torch.get_default_dtype()
    index = sim.current if device is None or device.index is None else device.index
    extent = 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    nbytes = extent * dtype.itemsize
    if _limit and live_bytes() + nbytes > _limit[0]:
        raise torch.OutOfMemoryError(f"sim out of memory. Tried to allocate {nbytes} bytes.")
    # One block: the managed tensor, its sizes, its strides, then the data on a 64-byte boundary.
    head = ctypes.sizeof(_DLManagedTensor) + 16 * len(size)
    address = _malloc(head + 64 + nbytes)
    sizes = (ctypes.c_int64 * len(size)).from_address(address + ctypes.sizeof(_DLManagedTensor))
    strides = (ctypes.c_int64 * len(size)).from_address(address + ctypes.sizeof(_DLManagedTensor) + 8 * len(size))
    sizes[:], strides[:] = size, stride
    data = (address + head + 63) // 64 * 64
    code = _CODES[str(dtype).removeprefix("torch.").rstrip("0123456789")]
    managed = _DLManagedTensor.from_address(address)
    managed.dl_tensor = _DLTensor(data, _EXT_DEV, index, len(size), code, dtype.itemsize * 8, 1, sizes, strides, 0)
    managed.manager_ctx, managed.deleter = None, _free
    out = torch._C._from_dlpack(_new_capsule(address, b"dltensor", None))
    _allocated.append((StorageWeakRef(out.untyped_storage()), nbytes))
    return out


def _empty(
    size: Any,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> torch.Tensor:
    like = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
    return _empty_strided(size, like.stride(), like.dtype, device=device)


def host_view(t: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the same memory as the device tensor ``t``."""
    if t.device.type != "sim":
        return t
    storage = t.untyped_storage()
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
    view = torch.empty(0, dtype=t.dtype).set_(memory, t.storage_offset(), t.size(), t.stride())
    if t.is_conj():
        view = view.conj()
    return view


def _copy_from(src: torch.Tensor, dst: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    way = "d2d" if src.device.type == dst.device.type else "h2d" if dst.device.type == "sim" else "d2h"
    COPIES[way] += 1
    LOG.append(f"{src.nbytes} {way}" + ("" if non_blocking else " and waits"))
    host_view(dst).copy_(host_view(src))
    return dst


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run any other operator on the memory where it lies; results that are new are brought to the device."""
    device: torch.device | None = None
    originals: dict[int, torch.Tensor] = {}

    def enter(t: torch.Tensor) -> torch.Tensor:
        nonlocal device
        if t.device.type == "sim":
            device = t.device
        # An empty ``out=`` is resized by the operator, which memory that is only borrowed does not allow.
        view = host_view(t) if t.numel() else torch.empty(t.size(), dtype=t.dtype)
        originals[id(view)] = t
        return view

    def leave(t: torch.Tensor) -> torch.Tensor:
        original = originals.get(id(t))
        if original is not None and original.size() == t.size():
            return original
        out = _empty_strided(t.size(), t.stride(), t.dtype, device=device)
        host_view(out).copy_(t)
        if original is None:
            return out
        return _on_cpu(_SET, original, out.untyped_storage(), 0, out.size(), out.stride())

    args, kwargs = tree_map_only(torch.Tensor, enter, (args, kwargs))
    kwargs = {k: torch.device("cpu") if isinstance(v, torch.device) else v for k, v in kwargs.items()}
    return tree_map_only(torch.Tensor, leave, op(*args, **kwargs))


def _foreach_copy(into: Any, out_of: Any, non_blocking: bool = False) -> None:
    # One kernel for the whole list, as on CUDA.
    COPIES["d2d"] += 1
    for dst, src in zip(into, out_of, strict=True):
        host_view(dst).copy_(host_view(src))


_SET = torch.ops.aten.set_.source_Storage_storage_offset
_ops.impl("empty.memory_format", _empty)
_ops.impl("empty_strided", _empty_strided)
_ops.impl("_copy_from", _copy_from)
_ops.impl("_foreach_copy_", _foreach_copy)
for _name in ("view", "as_strided", "set_.source_Storage_storage_offset", "_reshape_alias", "unfold"):
    _packet, _, _overload = _name.partition(".")
    _op = getattr(getattr(torch.ops.aten, _packet), _overload or "default")
    _ops.impl(_name, lambda *args, _op=_op: _on_cpu(_op, *args))
_rest.fallback(_fallback, "PrivateUse1")


class Event:
    def __init__(self, name: str) -> None:
        self.name = name

    def synchronize(self) -> None:
        LOG.append(f"host waits for {self.name}")


class Stream:
    """Notes what is asked of it. The current streams have the id 0."""

    def __init__(self, device: Any, stream_id: int = 0, name: str = "main") -> None:
        self.device_index, self.stream_id, self.name = torch.device(device).index, stream_id, name
        self.capturing = False
        self.idle = False
        self.events = 0

    def synchronize(self) -> None:
        LOG.append(f"host waits for {self.name}")

    def query(self) -> bool:
        return self.idle

    def record_event(self) -> Event:
        event = Event(f"{self.name} {self.events}")
        self.events += 1
        LOG.append(f"{event.name} under way")
        return event

    def wait_stream(self, other: Stream) -> None:
        LOG.append(f"{self.name} waits for {other.name}")

    def is_capturing(self) -> bool:
        return self.capturing

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class Streams:
    """Stands in for the streams, events and pinned memory of the simulated devices while a test runs.

    ``LOG`` has each copy with its bytes and whether the host waits, each pinned allocation with its device, and what is
    asked of streams and events, except the events of `_memory.staging`.
    """

    def __init__(self, monkeypatch: Any) -> None:
        self.log = LOG
        self.current = [Stream(f"sim:{i}") for i in range(2)]
        self.can_pin = True
        self.known = {torch.device("sim", i): DeviceCapabilities(True, True, True, True) for i in range(2)}
        real_empty = torch.empty

        def current_stream(device: Any = None) -> Stream:
            return self.current[sim.current if device is None else torch.device(device).index]

        def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
            if kwargs.pop("pin_memory", False):
                if not self.can_pin:
                    raise RuntimeError("no more memory can be pinned")
                LOG.append(f"{args[0]} pinned on sim:{sim.current}")
            return real_empty(*args, **kwargs)

        monkeypatch.setattr(torch.accelerator, "current_stream", current_stream)
        monkeypatch.setattr(torch, "Stream", lambda device: Stream(device, 1, "copy"))
        monkeypatch.setattr(torch, "empty", empty)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: LOG.append("recorded"))
        monkeypatch.setattr(device_module, "_device_index", sim.device)
        monkeypatch.setattr(device_module, "_stream_knows", True)
        monkeypatch.setattr(staging_module, "_stagings", {})
        # Copies are made at once, so pinned memory can be used again at once. `tests/device` tests its events.
        monkeypatch.setattr(staging_module.Staging, "release", lambda _, slot: setattr(slot, "users", 0))
        for device, can in self.known.items():
            monkeypatch.setitem(device_module._capabilities, device, can)
        LOG.clear()
