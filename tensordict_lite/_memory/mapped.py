"""Map files into memory, and send tensors of a mapped file to another process as a handle of the file.

All mappings are private: a write to a tensor changes the memory of this process, not the file. Pages are read from the
disk on first use, and the system may drop them again.
"""

from __future__ import annotations

import mmap
import os
import platform
import sys
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple, cast
from weakref import ref

import torch
from torch import Tensor

from .buffer import view_over
from .device import CPU
from .layout import Sizes, row_major

_SMALLEST = 1 << 20
"""The smallest tensor in bytes that is sent as a handle of its file. A smaller tensor is sent by value."""
# The machines on which the flag has the value 0x4000.
_KNOWN = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64", "riscv64")
_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if _KNOWN else 0)
"""The flag for a mapping that may be larger than the memory; 0 if unknown. Python before 3.13 has no name for it."""


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


class Handle(NamedTuple):
    """A range of a mapped file whose bytes never change. Every storage of `map_append_only` has one."""

    path: str
    device: int
    inode: int
    offset: int
    nbytes: int

    def is_current(self) -> bool:
        """Whether the path still names the mapped file."""
        with suppress(OSError):
            found = os.stat(self.path)
            return (found.st_dev, found.st_ino) == (self.device, self.inode)
        return False


def map_append_only(descriptor: int, path: str, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Map a contiguous tensor at ``offset`` of an open file, as `map_file` does. These bytes never change.

    A process that receives the tensor maps the file again. Tensors of other mappings are copied into shared memory to
    be sent, as torch does with every tensor.
    """
    nbytes = prod(shape) * dtype.itemsize
    # A slice of the mapping is a storage of its own, so pickle does not write the rest of the file.
    memory: Any = map_file(descriptor, offset + nbytes)[offset : offset + nbytes]
    found = os.fstat(descriptor)
    with torch.inference_mode(False):  # an inference tensor has no version, which `by_file` compares
        out = view_over(memory, dtype, shape, row_major(shape), 0, CPU)
    memory._mapped = Handle(os.path.realpath(path), found.st_dev, found.st_ino, offset, nbytes), ref(out), out._version
    return out


def file_of(tensor: Tensor) -> str:
    """The path of the file that `map_append_only` mapped for the storage of a tensor, or an empty string."""
    if not tensor.is_cpu or type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return ""
    try:
        mapped: Any = getattr(tensor.untyped_storage(), "_mapped", None)
    except (RuntimeError, NotImplementedError):  # under a transform of torch.func
        return ""
    return "" if mapped is None else mapped[0].path


def by_file(tensor: Tensor) -> Any:
    """What to pickle for another process on this machine: the handle of a mapped tensor or of a view of it.

    Any other tensor is returned. So is a tensor that was written since it was mapped, also if the file was replaced.
    """
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.nbytes < _SMALLEST:
        return tensor
    mapped: Any = getattr(tensor.untyped_storage(), "_mapped", None)
    if mapped is None or tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
        return tensor
    handle, base, version = mapped[0], mapped[1](), mapped[2]
    # A view shares the version counter of its base. Other tensors over the memory, as of `.data`, have their own.
    if (tensor is not base and tensor._base is not base) or tensor._version != version or not handle.is_current():
        return tensor
    return _Again(
        map_again, (tuple(handle), tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    )


class _Again:
    """Pickles as a call of a function, which returns the tensor."""

    def __init__(self, function: Any, args: tuple[Any, ...]) -> None:
        self._reduced = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


def map_again(handle: tuple[Any, ...], dtype: torch.dtype, first: int, shape: Sizes, stride: Sizes) -> Tensor:
    """The tensor of a `Handle`, in the process that receives it.

    Raises ``OSError`` if the file was removed or replaced since the tensor was sent.
    """
    path, device, inode, offset, nbytes = handle
    with open(path, "rb") as file:
        found = os.fstat(file.fileno())
        if (found.st_dev, found.st_ino) != (device, inode) or found.st_size < offset + nbytes:
            raise OSError(f"{path!r} was replaced after a dict that maps it was sent to this process; load it here")
        whole = map_append_only(file.fileno(), path, offset, dtype, (nbytes // dtype.itemsize,))
    return whole if (tuple(whole.shape), first) == (shape, 0) else whole.as_strided(shape, stride, first)
