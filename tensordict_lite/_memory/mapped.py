"""Map files into memory, and send tensors of a mapped file to another process as a reference to the file.

All mappings are private: a write to a tensor changes the memory of this process, not the file. Pages are read from the
disk on first use, and the system may drop them again.
"""

from __future__ import annotations

import mmap
import os
import platform
import sys
import weakref
from contextlib import suppress
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from .jagged import is_jagged, is_plain_jagged, over_jagged

_SMALLEST = 1 << 20
"""The smallest tensor in bytes that is sent as a reference to its file. A smaller tensor is sent faster by value."""
_PAGES = 1 << 17
"""The number of entries of the page map that are read at a time."""
# The machines on which the flag has the value 0x4000.
_KNOWN = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64", "riscv64")
_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if _KNOWN else 0)
"""The flag for a mapping that may be larger than the memory; 0 if unknown. Python before 3.13 has no name for it."""


class _Source(NamedTuple):
    """A mapped file, and the addresses where it is mapped."""

    path: str
    device: int
    inode: int
    start: int
    nbytes: int
    storage: weakref.ref[torch.UntypedStorage]


_sources: dict[int, _Source] = {}
"""The mappings of `map_append_only` that are in use, by their first address."""


def map_file(descriptor: int, nbytes: int) -> torch.UntypedStorage:
    """Map the first ``nbytes`` bytes of an open file, at least one. A write changes the memory and never the file.

    The file may be larger than the memory of the machine. Raises ``OSError``.
    """
    linked = f"/proc/self/fd/{descriptor}"
    if os.path.exists(linked):
        # torch keeps no descriptor open. The system refuses such a mapping if it is larger than the memory.
        with suppress(RuntimeError):
            return cast(Any, torch.UntypedStorage).from_file(linked, False, nbytes)
    if _NORESERVE:
        flags, access = mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        memory = mmap.mmap(descriptor, nbytes, flags=flags, prot=access)
    else:
        memory = mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_COPY)
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def map_append_only(descriptor: int, path: str, nbytes: int) -> torch.UntypedStorage:
    """Map a file whose first ``nbytes`` bytes never change, as `map_file` does. ``path``: the path of the file.

    A process that receives a tensor of this mapping maps the file again. Tensors of other mappings are copied into
    shared memory to be sent, as torch does with every tensor.
    """
    storage = map_file(descriptor, nbytes)
    found = os.fstat(descriptor)
    start = storage.data_ptr()
    source = _Source(os.path.realpath(path), found.st_dev, found.st_ino, start, nbytes, weakref.ref(storage))
    _sources[start] = source
    weakref.finalize(storage, _forget, source).atexit = False
    return storage


def _forget(source: _Source) -> None:
    if _sources.get(source.start) is source:  # the address may belong to a newer mapping
        del _sources[source.start]


def is_any_mapped() -> bool:
    """Whether `by_file` may return a reference for any tensor."""
    return bool(_sources)


def is_candidate(tensor: Tensor) -> bool:
    """Whether `by_file` may return a reference for ``tensor``. Quick, because it runs for every batch of a worker."""
    if not _sources or not tensor.is_cpu:
        return False
    if is_jagged(tensor):
        return is_candidate(tensor.values()) or is_candidate(cast(Any, tensor).offsets())
    return type(tensor) is Tensor and _size(tensor) >= _SMALLEST


def _size(tensor: Tensor) -> int:
    """Bytes of a dense tensor; 0 for any other tensor, which has no reference."""
    return tensor.nbytes if tensor.layout is torch.strided and not tensor.is_nested else 0


def by_file(tensor: Tensor) -> Any:
    """What to pickle for another process on this machine: a reference for a tensor of a mapped file, else the tensor.

    Also returns the tensor if the file was replaced or deleted, or if this process wrote to the tensor's memory.
    """
    if not is_candidate(tensor) or tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
        return tensor
    if is_jagged(tensor):
        return _JaggedReference(tensor) if is_plain_jagged(tensor) else tensor
    storage = tensor.untyped_storage()
    address, nbytes = storage.data_ptr(), storage.nbytes()
    for source in list(_sources.values()):
        if source.start <= address and address + nbytes <= source.start + source.nbytes:
            if not _is_current(source) or _is_written(tensor):
                return tensor
            return _Reference(source, address - source.start, nbytes, tensor)
    return tensor


class _Reference:
    """Pickles as the path of a file and a position in it. Unpickling returns the tensor."""

    def __init__(self, source: _Source, offset: int, nbytes: int, tensor: Tensor) -> None:
        view = tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        self._args = source.path, source.device, source.inode, offset, nbytes, *view

    def __reduce__(self) -> tuple[Any, ...]:
        return map_again, self._args


class _JaggedReference:
    """Pickles as the parts of a nested tensor, large parts as a `_Reference`. Unpickling returns the nested tensor."""

    def __init__(self, nested: Any) -> None:
        self._args = by_file(nested.values()), by_file(nested.offsets()), nested._min_seqlen, nested._max_seqlen

    def __reduce__(self) -> tuple[Any, ...]:
        return over_jagged, self._args


def map_again(
    path: str,
    device: int,
    inode: int,
    offset: int,
    nbytes: int,
    dtype: torch.dtype,
    first: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> Tensor:
    """The tensor of a `_Reference`, in the process that receives it. An existing mapping of the file is used again.

    Raises ``OSError`` if the file was removed or replaced since it was sent.
    """
    for source in list(_sources.values()):
        memory = source.storage()
        if memory is not None and (source.device, source.inode) == (device, inode) and offset + nbytes <= source.nbytes:
            out = _view(memory, offset, nbytes, dtype, first, shape, stride)
            if not _is_written(out):  # this process may have written to its own mapping
                return out
    with open(path, "rb") as file:
        found = os.fstat(file.fileno())
        if (found.st_dev, found.st_ino) != (device, inode) or found.st_size < offset + nbytes:
            raise OSError(f"{path!r} was replaced after a dict that maps it was sent to this process; load it here")
        memory = map_append_only(file.fileno(), path, offset + nbytes)
    return _view(memory, offset, nbytes, dtype, first, shape, stride)


def _view(memory: Any, offset: int, nbytes: int, dtype: torch.dtype, first: int, *shape_and_stride: Any) -> Tensor:
    empty: Any = torch.empty(0, dtype=dtype, device="cpu")
    return empty.set_(memory[offset : offset + nbytes], first, *shape_and_stride)


def _is_current(source: _Source) -> bool:
    with suppress(OSError):
        found = os.stat(source.path)
        return (found.st_dev, found.st_ino) == (source.device, source.inode)
    return False


def _is_written(tensor: Tensor) -> bool:
    """Whether this process wrote to this part of a private mapping; True if the system cannot tell.

    A write gives this process its own copy of the page. Linux lists the pages of a process in ``/proc``.
    """
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr() // mmap.PAGESIZE
    last = (tensor.data_ptr() + elements * tensor.itemsize - 1) // mmap.PAGESIZE + 1
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:
            for start in range(first, last, _PAGES):
                pages.seek(8 * start)
                entries = np.frombuffer(pages.read(8 * min(_PAGES, last - start)), dtype=np.uint64)
                used = entries >> np.uint64(62) != 0  # in memory, or swapped out
                copied = entries & np.uint64(1 << 61) == 0  # not a page of a file
                if bool((used & copied).any()):
                    return True
    except OSError:
        return True
    return False
