"""Pickle a dict, in every protocol: a manifest, and a list of buffers.

The reduction of a dict is `rebuild` and plain data: the manifest as text, the classes, the encoders, the buffers with
their layouts, and the leaves that lie in no buffer. The protocols differ in what a buffer is:

- Protocol 5, on the CPU: a ``PickleBuffer``, which a framework can move without a copy. A storage that several tensors
  fill is one buffer, such as that of a packed dict. Other small tensors are copied into buffers of up to 64 KiB, and
  each large tensor is a buffer of its own.
- Else a uint8 tensor over a storage that several tensors fill. Then ``torch.save``, ``copy.deepcopy`` and torch's
  stager of checkpoints treat the tensors of the dict as any other tensor. torch pickles the tensors that are alone in
  their storage. Tensors that share a storage with others outside the dict are copied into buffers.

Protocol 2 is the protocol of ``torch.save``. ``torch.load(weights_only=True)`` allows only functions and classes on an
allowlist. So in protocol 2 a class is its name, and an encoder its JSON form. `rebuild` is on the list: it takes data
only, validates the data, looks up the name among the defined classes and imports nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from itertools import accumulate
from pickle import PickleBuffer
from types import MappingProxyType
from typing import Any, cast
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from .._errors import InvalidFileError, Path
from .._memory.buffer import BY_VALUE, buffer_of, clear_gaps, copy_into, new_buffer, regions, shared_buffer, views_of
from .._memory.dense import dense_bytes
from .._memory.device import CPU, canonical, intercepted, resolve
from .._memory.dtypes import FOREACH_DTYPES
from .._memory.layout import SMALL, Group, Layout, aligned, dense_stride, lay_out, lay_out_apart, nbytes_of
from .._memory.packed import arrange, can_pack, is_saved_group, materialize, packable
from .convert import keep_object
from .inside import nests
from .manifest import InvalidManifest, Outline, encoder_entry, invalid, read_text
from .ragged import Ragged
from .tree import TreeDict, class_named, name_of
from .walk import only_tensors

_BY_NAME = 2
"""The pickle protocol of ``torch.save``, which names classes and imports none."""
_DAMAGED = "the layout of a pickled dict is damaged"

Part = tuple[Any, tuple[Any, ...] | list[Any]]
"""A buffer, and its layout: the dtype, shape, stride and numbers of the tensors of each group. Or several buffers, one
after the other, and a list of their layouts: the receiver copies them."""
Contents = tuple[list[Part], list[Any] | None]
"""The buffers of a dict, and its leaves in the order of the tree. A tensor in a buffer is its number, a kept object
``(object,)``. None if every leaf has its own number."""

_views_read_only: ContextVar[bool] = ContextVar("_views_read_only", default=False)


class view_read_only:
    """Make received dicts views of read-only memory, without a copy. A function and a context manager.

    Some frameworks hand a process memory that the process must not change, such as Ray's object store or ``bytes``.
    torch has no read-only tensors. So by default unpickling copies such memory, and you can write to every dict that
    you receive. ``view_read_only()`` saves that copy. Then do not write to the tensors of a received dict: a write can
    crash the program, or change the data of other processes. ``d.clone()`` is safe to change.

    The setting holds for the current context, as of `contextvars`: a thread and an asyncio task have their own. It
    is off at the start.

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

    def __exit__(self, *_: object) -> None:
        _views_read_only.reset(self._token)


# --- writing ---


def reduction(d: TreeDict[Any], protocol: int, /) -> tuple[Any, ...]:
    """`rebuild` and its arguments, for a pickle of ``d`` in this protocol. Raises ``TooDeep``.

    Cost: a copy of the tensors that are slices of larger storages. In protocol 5, a copy of the small tensors. No copy
    of tensors that fill a storage together, such as those of a packed dict.
    """
    names = protocol == _BY_NAME and _objects_allowed(d)
    outline = Outline(d, pickled=True)
    if protocol >= 5 and d._device is CPU and not intercepted():
        return arguments(d, outline, _out_of_band(outline.values))
    return arguments(d, outline, _in_storages(outline.values, d._device), names)


def _objects_allowed(d: TreeDict[Any]) -> bool:
    """Whether `rebuild` accepts the objects of the dict. Pytree can put in others: such a file takes trust."""
    try:
        _refuse_objects(d)
    except (TypeError, ValueError):
        return False
    return True


def arguments(d: TreeDict[Any], outline: Outline, carried: Contents, names: bool = False) -> tuple[Any, ...]:
    """The reduction of a dict from its parts. ``names``: write the names of the classes, not the classes."""
    classes = [name_of(type(node)) if names else type(node) for node in outline.nodes]
    encoders = outline.entries(lambda one: encoder_entry(one, lambda one, _: one)) if names else outline.encoders
    device = "cpu" if d._device is CPU else d._device and str(d._device)  # `str` of a device takes long
    return rebuild, (outline.text(), classes, encoders, device, *carried)


def _in_storages(values: list[Any], device: torch.device | None) -> Contents:
    """Each storage that several tensors fill, as a tensor over it. Other tensors are leaves, which torch pickles.

    Two kinds of tensors are copied into buffers: slices of larger storages, of which torch would pickle every byte, and
    tensors of a dtype that torch can pickle but not unpickle.
    """
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not can_pack(device):
        return [], _leaves(values, tensors, [])
    found = arrange(tensors, sent=True)
    slices, whole = _slices(tensors, found.groups)
    parts = _buffers(tensors, found.blocks, [*slices, *[group for group in whole if group[0][0] not in FOREACH_DTYPES]])
    return [(buffer, layout.saved) for layout, buffer in parts], _leaves(values, tensors, parts)


def for_process(values: list[Any], device: torch.device | None) -> Contents:
    """The tensors for another process of this machine. Shared memory is sent as it is.

    Small tensors are one part, out of which the receiver copies them. It is bytes up to `BY_VALUE`, else shared memory.
    If all tensors together have at most `BY_VALUE` bytes, the large ones are in that part too.
    """
    tensors = [value for value in values if isinstance(value, Tensor)]
    if device is not CPU or not can_pack(device):
        return _in_storages(values, device)
    found = arrange(tensors, sent=True)
    blocks = [layout for layout in found.blocks if not tensors[layout.members[0]].untyped_storage().is_shared()]
    groups = [
        (spec, tuple([i for i in group if not (nbytes_of(spec) and tensors[i].untyped_storage().is_shared())]))
        for spec, group in found.groups
    ]
    total = sum([layout.nbytes for layout in blocks]) + sum([nbytes_of(spec) * len(group) for spec, group in groups])
    limit = total if total <= BY_VALUE else SMALL
    together = [layout for layout in blocks if layout.nbytes <= limit]
    slices, _ = _slices(tensors, [group for group in groups if nbytes_of(group[0]) > limit])
    parts = _buffers(tensors, [layout for layout in found.blocks if layout not in together], slices)
    carried: list[Part] = [(buffer, layout.saved) for layout, buffer in parts]
    joined = _buffers(tensors, together, [group for group in groups if nbytes_of(group[0]) <= limit])
    if joined:
        carried.append((_concatenated([buffer for _, buffer in joined]), [layout.saved for layout, _ in joined]))
    return carried, _leaves(values, tensors, [*parts, *joined])


def _slices(tensors: list[Tensor], groups: Iterable[Group]) -> tuple[list[Group], list[Group]]:
    """The tensors that are slices of a larger storage, or without elements; and those that fill their storage."""
    whole = [
        (spec, tuple([i for i in members if tensors[i].untyped_storage().nbytes() == nbytes_of(spec) > 0]))
        for spec, members in groups
    ]
    return [
        (spec, tuple([i for i in members if i not in alone]))
        for (spec, members), (_, alone) in zip(groups, whole, strict=True)
    ], whole


def _buffers(tensors: list[Tensor], blocks: Iterable[Layout], groups: Iterable[Group]) -> list[tuple[Layout, Tensor]]:
    """Buffers with their layouts: the storages that tensors fill, and copies of other tensors."""
    parts = [(layout, buffer_of(tensors, layout)) for layout in blocks]
    for layout in lay_out_apart(tuple(groups)):
        buffer = clear_gaps(new_buffer(layout.nbytes, tensors[layout.members[0]].device), layout)
        copy_into(buffer, layout, tensors)
        parts.append((layout, buffer))
    return parts


def _concatenated(buffers: list[Tensor]) -> Any:
    """Buffers on the CPU, one after the other: bytes, or shared memory if that is faster."""
    arrays = [buffer.numpy() for buffer in buffers]
    nbytes = sum(map(len, arrays))
    if nbytes <= BY_VALUE:
        return b"".join(cast(Any, arrays))
    memory = shared_buffer(nbytes)
    np.concatenate(arrays, out=memory.numpy())
    return memory


def _leaves(
    values: list[Any],
    tensors: list[Tensor],
    parts: Iterable[tuple[Layout, Any]],
    large: Mapping[int, Any] = MappingProxyType({}),
) -> list[Any] | None:
    """The leaves of `Contents`. ``parts``: the buffers. ``large``: what replaces other tensors, by their indices."""
    members = [i for layout, _ in parts for i in layout.members]
    if len(members) == len(values):
        return None
    found = {id(tensors[i]): i for i in members} | {id(tensors[i]): one for i, one in large.items()}
    return [found.get(id(value), value if isinstance(value, Tensor) else (value,)) for value in values]


def _out_of_band(values: list[Any]) -> Contents:
    """The bytes of tensors on the CPU as buffers of pickle protocol 5."""
    tensors = values if only_tensors(values) else [value for value in values if isinstance(value, Tensor)]
    found = arrange(tensors, sent=True)
    parts = _buffers(tensors, found.blocks, [group for group in found.groups if nbytes_of(group[0]) <= SMALL])
    large = {
        i: _large_tensors.setdefault(id(tensors[i]), LargeTensor(tensors[i]))
        for spec, members in found.groups
        if nbytes_of(spec) > SMALL
        for i in members
    }
    return [(_pickle_buffer(buffer), layout.saved) for layout, buffer in parts], _leaves(values, tensors, parts, large)


class LargeTensor:
    """A tensor with a buffer of its own, in a pickle."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce_ex__(self, protocol: Any, /) -> tuple[Any, ...]:
        tensor = self.tensor
        stride = dense_stride(tensor.shape, tensor.stride())
        return rebuild_tensor, (_pickle_buffer(dense_bytes(tensor)), tensor.dtype, tuple(tensor.shape), stride)


_large_tensors: WeakValueDictionary[int, LargeTensor] = WeakValueDictionary()
"""The `LargeTensor` of each tensor that is being pickled, by the id of the tensor. Several dicts in one pickle may
contain a tensor: then pickle sees one object, and writes the tensor once."""


def _pickle_buffer(buffer: Tensor) -> PickleBuffer:
    return PickleBuffer(cast(Any, buffer.numpy()))


# --- reading ---


def rebuild(text: Any, classes: Any, encoders: Any, device: Any, parts: Any, leaves: Any) -> Any:
    """Rebuild a dict from the arguments of `reduction`, over the buffers and the tensors of the receiver.

    Takes data only, and validates the data, since a file or a pickle may be damaged or forged. Raises
    ``InvalidFileError``, ``TypeError`` or ``ValueError`` for invalid data, also for a class that is not defined.
    """
    try:
        kinds = [type(text) is str, type(classes) is list, isinstance(encoders, (list, tuple)), type(parts) is list]
        if not (all(kinds) and type(leaves) in (list, type(None)) and type(device) in (str, type(None))):
            invalid("the data of the dict is damaged")
        reader = read_text(text)
        if len(classes) != reader.count:
            invalid("the number of classes differs from the number of dicts")
        known = _classes_of(classes)
        fields: dict[int, Tensor] = {}
        buffers = [_add_fields(fields, part) for given in parts for part in _apart(given)]
        devices = {buffer.device for buffer in buffers}
        values: Any = fields
        if leaves is not None:
            values = [_value(leaf, fields) for leaf in leaves]
            devices.update([value.device for value in values if isinstance(value, Tensor)])
        if len(values) != len(reader.numbers) or (values is fields and fields and max(fields) >= len(fields)):
            invalid("a tensor is missing")
        home = canonical(devices.pop()) if len(devices) == 1 else None if devices or device is None else _device(device)
        names = type(classes[0]) is str
        trusted = not names or home is not CPU
        out: Any = reader.build(next(known), values.__getitem__, home, trusted, (known, encoders))
        if devices:
            out._infer_device(None)
        if names:
            _refuse_objects(out)
            out._validate(out)  # the class may have changed since the dict was saved
        return out
    except InvalidManifest as error:
        raise InvalidFileError(f"not a valid file or pickle: {error}") from error


def _refuse_objects(d: TreeDict[Any], at: Path = ()) -> None:
    """Raise ``TypeError`` for an object that the options of its dict do not allow."""
    for key, value in d.items():
        if isinstance(value, TreeDict):
            _refuse_objects(value, (*at, key))
        elif not isinstance(value, (Tensor, Ragged)):
            keep_object(value, d._policy, (*at, key))


def _value(leaf: Any, fields: Mapping[int, Tensor]) -> Any:
    """The value of a leaf of `Contents`."""
    if type(leaf) is int and leaf in fields:
        return fields[leaf]
    if type(leaf) is tuple and len(leaf) == 1 and (isinstance(leaf[0], TreeDict) or not nests(leaf[0])):
        return leaf[0]
    leaf = materialize(leaf)
    if not isinstance(leaf, Tensor):
        invalid("a tensor is missing")
    return leaf


def _classes_of(given: Sequence[Any]) -> Iterator[type[Any]]:
    """The class of each dict of the tree, in the order of the tree."""
    # Each class is looked up once.
    found: dict[Any, Any] = {one: class_named(one) if type(one) is str else one for one in dict.fromkeys(given)}
    for one in found.values():
        if not (isinstance(one, type) and issubclass(one, TreeDict)):
            raise TypeError(f"expected a DeviceDict class, got {one!r:.200}")
    return iter([found[one] for one in given])


def _device(name: str) -> torch.device:
    """The device for a dict without tensors. Does not query a driver: this machine may not have the device."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidManifest(str(error)[:200]) from error
    if device.type in ("cpu", "meta"):
        return resolve(device.type)
    if not 0 <= (-1 if device.index is None else device.index) < 128:  # pyright: ignore[reportUnnecessaryComparison]
        invalid(f"there is no device {name!r}")
    return device


def rebuild_tensor(buffer: Any, dtype: Any, shape: Any, stride: Any) -> Tensor:
    """Rebuild a large tensor of a pickled dict over the buffer of the receiver. Validates the arguments."""
    out: dict[int, Tensor] = {}
    _add_fields(out, (buffer, ((dtype, shape, stride, (0,)),)))
    return out[0]


def _apart(part: Any) -> Iterable[Any]:
    """The parts of `for_process` that came as one: copies, so that a tensor keeps only those of its buffer alive."""
    if type(part) is not tuple or len(part) != 2 or type(part[1]) is not list:
        yield part
        return
    given = materialize(part[0])
    memory = _storage_of(given).numpy() if isinstance(given, Tensor) else _as_array(given)
    sizes = [_layout_of(specs)[0].nbytes for specs in part[1]]
    starts = [0, *accumulate(sizes)]
    if len(memory) != starts[-1]:
        raise ValueError(f"a buffer of a pickled dict: expected {starts[-1]} bytes, got {len(memory)}")
    for start, nbytes, specs in zip(starts, sizes, part[1], strict=False):
        out = new_buffer(nbytes, CPU)
        out.numpy()[...] = memory[start : start + nbytes]
        yield out, specs


def _add_fields(out: dict[int, Tensor], part: Any) -> Tensor:
    """Add the tensors in a buffer to ``out``, by number. Returns the buffer."""
    if type(part) is not tuple or len(part) != 2:
        raise ValueError("the buffers of a pickled dict are damaged")
    given, specs = part
    layout, numbers, alignment = _layout_of(specs)
    if not numbers.isdisjoint(out):
        raise ValueError("two buffers of a pickled dict contain the same field")
    given = materialize(given)
    buffer = _storage_of(given) if isinstance(given, Tensor) else _received(given)
    nbytes = buffer.untyped_storage().nbytes()
    if nbytes not in (layout.nbytes, layout.end, aligned(layout.end + 1)):  # earlier versions wrote the last two
        raise ValueError(
            f"a buffer of a pickled dict: expected {layout.nbytes} bytes, got {nbytes}; pass the buffers to "
            "pickle.loads in the order in which they were made"
        )
    # Other programs and mapped files may give misaligned memory, and kernels would crash.
    if buffer.is_cpu and buffer.data_ptr() % alignment:
        buffer = buffer.clone()
    views_of(layout, regions(buffer, layout), out)
    return buffer


def _layout_of(specs: Any) -> tuple[Layout, frozenset[int], int]:
    """The layout of a buffer, the numbers of its tensors, and its alignment. Raises ``ValueError`` if damaged."""
    try:
        return _known_layout(specs)
    except TypeError as error:  # the specs of a damaged pickle may be unhashable
        raise ValueError(_DAMAGED) from error


@lru_cache(maxsize=1024)  # every dict of a stream has the same few layouts
def _known_layout(specs: Any) -> tuple[Layout, frozenset[int], int]:
    if type(specs) is not tuple or not all(map(is_saved_group, specs)):
        raise ValueError(_DAMAGED)
    groups: list[Group] = [(spec[:3], spec[3]) for spec in specs]
    layout = lay_out(groups)
    members = frozenset(layout.members)
    if len(members) != len(layout.members):
        raise ValueError(_DAMAGED)
    return layout, members, max((run.dtype.itemsize for run in layout.runs), default=1)


def _storage_of(buffer: Tensor) -> Tensor:
    """A buffer that pickle or ``torch.load`` made as a tensor."""
    if not (type(buffer) is Tensor and packable(buffer) and buffer.dtype is torch.uint8 and buffer.dim() == 1):
        raise ValueError("the storage of a packed dict is damaged")
    return buffer


def _received(buffer: Any) -> Tensor:
    """Make a tensor of a received buffer. It shares the memory of the buffer if possible, else it is a copy."""
    array = _as_array(buffer)
    if array.flags.writeable:
        return torch.from_numpy(array)
    if _views_read_only.get():
        return torch.from_numpy(np.asarray(_Writable(array)))
    out = new_buffer(array.nbytes, CPU)
    out.numpy()[...] = array
    return out


def _as_array(buffer: Any) -> np.ndarray[Any, Any]:
    try:
        return np.frombuffer(buffer, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise TypeError(
            f"expected a contiguous buffer of bytes for a pickled dict, got {type(buffer).__name__}: {error}"
        ) from error


class _Writable:
    """The memory of a read-only array, as memory that NumPy does not protect. Keeps the array alive."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
