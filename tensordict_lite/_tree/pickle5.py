"""Pickle a dict in protocol 5: its bytes are buffers, which a framework can move without copying them.

A packed dict is one buffer. Of an unpacked dict, small tensors are copied into buffers of up to 1 MiB, and each large
tensor is a buffer of its own. torch pickles the tensors that cannot be packed, such as sparse tensors.
"""

from __future__ import annotations

from contextvars import ContextVar
from functools import lru_cache
from pickle import PickleBuffer
from types import TracebackType
from typing import Any, cast
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from .._errors import TooDeep
from .._memory.buffer import buffer_of, clear_gaps, copy_into, new_buffer, regions, views_of
from .._memory.dense import dense_bytes
from .._memory.device import CPU, intercepted
from .._memory.layout import ALIGNMENT, Group, Layout, dense_stride, distribute, lay_out, with_spare
from .._memory.packed import arrange, find_buffer, is_saved_group, repeats_of
from .._memory.transfer import COALESCED_BUFFER, COALESCED_TENSOR
from .tree import TreeDict, dicts_of, packed_items, policy_state, unpacked
from .walk import only_tensors

BUFFER_PROTOCOL = 5
"""The pickle protocol that has buffers."""

_DAMAGED = "the layout of a pickled dict is damaged"


_views_read_only: ContextVar[bool] = ContextVar("_views_read_only", default=False)


class view_read_only:
    """Make received dicts views of read-only memory, without a copy. A function and a context manager.

    Some frameworks hand a process memory that the process must not change, such as Ray's object store or ``bytes``.
    torch has no read-only tensors. So by default unpickling copies such memory, and you can write to every dict that
    you receive. ``view_read_only()`` saves that copy. Then do not write to the tensors of a received dict: a write can
    crash the program, or change the data of other processes. ``d.clone()`` is safe to change.

    The setting holds for the current context, as of `contextvars`: a thread and an asyncio task have their own. It
    affects pickle protocol 5 only, and is off at the start.

    Args:
        mode: True: view read-only memory. False: copy it.

    Raises: ``TypeError`` if ``mode`` is not a bool.
    Cost: none. With the setting off, unpickling copies the bytes of each read-only buffer once.

    >>> import pickle
    >>> from tensordict_lite import view_read_only
    >>> buffers = []
    >>> data = pickle.dumps(DeviceDict({"x": [1, 2]}), 5, buffer_callback=buffers.append)
    >>> read_only = [bytes(buffer) for buffer in buffers]
    >>> with view_read_only():
    ...     pickle.loads(data, buffers=read_only)["x"]
    tensor([1, 2])
    """

    def __init__(self, mode: bool = True) -> None:
        if not isinstance(mode, bool):
            raise TypeError(f"view_read_only takes True or False, got {mode!r:.60}")
        self._token = _views_read_only.set(mode)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _views_read_only.reset(self._token)


class LargeTensor:
    """A tensor with a buffer of its own, in a pickle."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce_ex__(self, protocol: Any, /) -> tuple[Any, ...]:
        t = self.tensor
        return restore_field, (
            _pickle_buffer(dense_bytes(t)), t.dtype, tuple(t.shape), dense_stride(t.shape, t.stride())
        )  # fmt: skip


_large_tensors: WeakValueDictionary[int, LargeTensor] = WeakValueDictionary()
"""The `LargeTensor` of each tensor that is being pickled, by the id of the tensor. Several dicts in one pickle may
contain a tensor: then pickle sees one object, and writes the tensor once."""


def reduce_buffers(d: TreeDict[Any]) -> tuple[Any, ...] | None:
    """The reduction of ``d`` for protocol 5: `restore_buffers` and its arguments.

    None for a dict that is not on the CPU, and while operations on tensors are intercepted. Also None for a tree with a
    class that defines its own reduction. Raises ``TooDeep``.
    Cost: a copy of the small tensors; no copy of a packed dict.
    """
    if d._device is not CPU or intercepted():
        return None
    tensors, flat = d._tensors_and_kind()
    if any([type(one).__reduce__ is not TreeDict.__reduce__ for one in ([d] if flat else dicts_of(d))]):  # noqa: C419
        return None
    states: dict[int, dict[str, Any]] = {}
    found = find_buffer(tensors, CPU)
    if found is not None and not (found.unpackable or found.repeats):
        entries = {id(tensor): i for i, tensor in enumerate(tensors)}
        items = dict(zip(d, range(len(tensors)), strict=True)) if flat else packed_items(d, entries, states)
        buffers = [(_pickle_buffer(buffer_of(tensors, found.layout)), found.specs)]
        return restore_buffers, (type(d), items, policy_state(d, states), buffers)
    groups, unpackable = arrange(tensors, repeats_of(tensors))
    if found is not None:
        parts = [(found.layout, buffer_of(tensors, found.layout))]
    else:
        parts = [(layout, _coalesced(tensors, layout)) for layout in _small(groups)]
    entries: dict[int, Any] = {id(tensors[i]): i for layout, _ in parts for i in layout.members}
    if len(entries) < len(tensors):
        left_out = {id(tensors[i]) for i in unpackable}
        for tensor in tensors:
            if id(tensor) not in entries and id(tensor) not in left_out:
                entries[id(tensor)] = (_large_tensors.setdefault(id(tensor), LargeTensor(tensor)),)
    states: dict[int, dict[str, Any]] = {}
    items = packed_items(d, entries, states)
    buffers = [(_pickle_buffer(buffer), _specs(layout)) for layout, buffer in parts]
    return restore_buffers, (type(d), items, policy_state(d, states), buffers)


def _small(groups: list[Group]) -> list[Layout]:
    """The layouts of the buffers into which small tensors and tensors without elements are copied."""
    layouts = distribute(groups, COALESCED_TENSOR, COALESCED_BUFFER - ALIGNMENT)
    empty = [group for group in groups if 0 in group[0][1]]
    if empty:
        first = layouts.pop(0).groups if layouts else []
        layouts.insert(0, lay_out([*first, *empty]))
    return layouts


def _specs(layout: Layout) -> tuple[Any, ...]:
    return tuple([(*spec, tuple(members)) for spec, members in layout.groups])


def _coalesced(tensors: list[Tensor], layout: Layout) -> Tensor:
    """A new buffer with copies of the tensors of the layout."""
    nbytes = with_spare(layout.nbytes)
    buffer = clear_gaps(new_buffer(nbytes, CPU), layout)
    copy_into(buffer, layout, tensors)
    buffer.numpy()[layout.nbytes :] = 0  # no old content of the memory is sent
    return buffer


def _pickle_buffer(buffer: Tensor) -> PickleBuffer:
    return PickleBuffer(cast(Any, buffer.numpy()))


def restore_buffers(cls: Any, items: Any, policy: Any, parts: Any) -> Any:
    """Rebuild a dict from the arguments of `reduce_buffers`, over the buffers of the receiver.

    Takes data only, and validates the data, since a pickle may be damaged or forged.
    """
    fields: dict[int, Tensor] = {}
    count = 0
    for buffer, specs in _pairs(parts):
        count += _tensors_in(buffer, specs, fields)
    if len(fields) != count:
        raise ValueError("two buffers of a pickled dict contain the same field")
    try:
        out = unpacked(cls, items, policy, fields, {})
        if len(fields) == len(out) and only_tensors(out.values()):
            out._device = CPU
            return out
        dicts_of(out)
        out._infer_device(CPU)
    except TooDeep:
        raise
    except RecursionError as error:
        raise ValueError("a dict holds itself, or is nested too deep") from error
    return out


def _pairs(parts: Any) -> list[tuple[Any, Any]]:
    for part in parts if type(parts) is list else [None]:
        if type(part) is not tuple or len(part) != 2:
            raise ValueError("the buffers of a pickled dict are damaged")
    return parts


def restore_field(buffer: Any, dtype: Any, shape: Any, stride: Any) -> Tensor:
    """Rebuild a large tensor of a pickled dict over the buffer of the receiver. Validates the arguments."""
    out: dict[int, Tensor] = {}
    _tensors_in(buffer, ((dtype, shape, stride, (0,)),), out)
    return out[0]


def _tensors_in(buffer: Any, specs: Any, out: dict[int, Tensor]) -> int:
    """Add the tensors in a received buffer to ``out``, by index. Returns their number."""
    try:
        layout, count, alignment = _layout_of(specs)
    except TypeError as error:  # the specs of a damaged pickle may be unhashable
        raise ValueError(_DAMAGED) from error
    views_of(layout, regions(_received(buffer, layout, alignment), layout), out)
    return count


@lru_cache(maxsize=1024)  # every dict of a stream has the same few layouts
def _layout_of(specs: Any) -> tuple[Layout, int, int]:
    """The layout of a buffer, the number of its tensors, and its alignment. Raises ``ValueError`` for damaged specs."""
    groups: list[Group] = []
    for spec in specs if type(specs) is tuple else (None,):
        if type(spec) is not tuple or len(spec) != 4:
            raise ValueError(_DAMAGED)
        *of, numbers = spec
        if type(numbers) is not tuple or not is_saved_group((*of, list(numbers))):
            raise ValueError(_DAMAGED)
        groups.append((tuple(of), list(numbers)))
    layout = lay_out(groups)
    members = layout.members
    if len(set(members)) != len(members):
        raise ValueError(_DAMAGED)
    return layout, len(members), max((run.dtype.itemsize for run in layout.runs), default=1)


def _received(buffer: Any, layout: Layout, alignment: int) -> Tensor:
    """Make a tensor of a received buffer. It shares the memory of the buffer if possible, else it is a copy.

    ``alignment``: the address of the tensor must be a multiple of this number of bytes.
    """
    try:
        array = np.frombuffer(buffer, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise TypeError(
            f"expected a contiguous buffer of bytes for a pickled dict, got {type(buffer).__name__}: {error}"
        ) from error
    if array.nbytes != layout.nbytes and array.nbytes != with_spare(layout.nbytes):
        raise ValueError(
            f"a buffer of a pickled dict has {array.nbytes} bytes, expected {layout.nbytes}; pass the buffers to "
            "pickle.loads in the order in which they were made"
        )
    writable = array.flags.writeable
    if not writable and _views_read_only.get():
        array = np.asarray(_Writable(array))
    elif not writable:
        return _copy_of_bytes(array)
    flat: Tensor = torch.from_numpy(array)
    return _copy_of_bytes(array) if flat.data_ptr() % alignment else flat  # kernels crash on misaligned memory


def _copy_of_bytes(array: np.ndarray[Any, Any]) -> Tensor:
    out = new_buffer(array.nbytes, CPU)
    out.numpy()[...] = array
    return out


class _Writable:
    """The memory of a read-only array, as memory that NumPy does not protect. Keeps the array alive."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
