"""Packed tensors: which tensors can share one storage, whether they do, and packing them.

No flag records that tensors are packed. They are packed if they lie in one storage exactly as their layout says. So no
operation on a field or on the dict can leave a stale flag. A packed dict that a framework flattens and unflattens is
still packed. A stored reference to the buffer would not help: ``t.data = ...`` and ``t.set_()`` change a field
silently, so every use of the reference would need the same test.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from .buffer import buffer_of, copy_into, new_batch_buffer, regions, views_of
from .device import capabilities, intercepted
from .dtypes import PACKABLE
from .layout import Group, Layout, Spec, cast_groups, dense_stride, lay_out

MAX_DIMENSIONS = 64
"""The most dimensions that torch's operations accept."""

_strided = torch.strided


class Packed(NamedTuple):
    """How a list of packed tensors lies in its buffer. The ints are indices in the list."""

    layout: Layout
    unpackable: list[int]
    """The tensors outside the buffer."""
    repeats: dict[int, int]
    """See `repeats_of`."""


def can_pack(device: torch.device | None) -> bool:
    """Whether tensors on ``device`` can be packed now."""
    return device is not None and not intercepted() and capabilities(device).byte_views


def packable(t: Tensor) -> bool:
    """Whether a tensor can be packed.

    These cannot: tensors that require grad, subclasses, sparse, nested and quantized tensors, and views with the
    conjugate or negative bit set.
    """
    return (
        type(t) is Tensor
        and t.layout is _strided
        and not (t.requires_grad or t.is_nested or t.is_neg())
        and (dtype := t.dtype) in PACKABLE
        and not (dtype.is_complex and t.is_conj())
    )


def repeats_of(tensors: Sequence[Tensor]) -> dict[int, int]:
    """The index of every tensor that occurs earlier in the list too, with the index of its first occurrence."""
    if len(set(map(id, tensors))) == len(tensors):
        return {}
    first: dict[int, int] = {}
    return {i: j for i, t in enumerate(tensors) if (j := first.setdefault(id(t), i)) != i}


def arrange(tensors: Sequence[Tensor], skip: Collection[int] = ()) -> tuple[list[Group], list[int]]:
    """Group the packable tensors by spec; also list the indices of the others. ``skip``: indices to leave out."""
    specs, unpackable = _specs(tensors, skip)
    return _grouped(specs), unpackable


def _specs(tensors: Sequence[Tensor], skip: Collection[int]) -> tuple[tuple[Spec | None, ...], list[int]]:
    """The spec of each packable tensor, and the indices of the others. A tensor in ``skip`` is in neither."""
    specs = [(t.dtype, t.shape, t.stride()) if packable(t) and i not in skip else None for i, t in enumerate(tensors)]
    return tuple(specs), [i for i, spec in enumerate(specs) if spec is None and i not in skip]


def _grouped(specs: Sequence[Spec | None]) -> list[Group]:
    groups: dict[Spec, list[int]] = {}
    for i, spec in enumerate(specs):
        if spec is not None:
            groups.setdefault(spec, []).append(i)
    return list(groups.items())


def may_be_packed(tensors: Sequence[Tensor], alone: bool = False) -> bool:
    """A quick test that rules out most dicts: whether the first packable tensor is smaller than its storage.

    ``alone``: or whether it fills its storage and is the only one. Do not call it while operations are `intercepted`.
    """
    for i, t in enumerate(tensors):
        if packable(t) and (nbytes := t.nbytes):
            if t.untyped_storage().nbytes() > nbytes:
                return len(tensors) > 1
            return alone and not any(o.nbytes for o in tensors[i + 1 :] if o is not t and packable(o))
    return False


def find_buffer(tensors: Sequence[Tensor], device: torch.device | None, *, alone: bool = False) -> Packed | None:
    """How the tensors on ``device`` are packed: whether they lie in one storage exactly as `lay_out` says. None if not.

    ``alone``: a single tensor that fills its storage counts as packed.
    """
    if not (can_pack(device) and may_be_packed(tensors, alone)):
        return None
    repeats = repeats_of(tensors)
    specs, unpackable = _specs(tensors, repeats)
    found = _fields(specs)
    if found is None:
        return None
    layout, offsets = found
    first = next(iter(offsets))
    storage = tensors[first].untyped_storage()
    if storage.nbytes() != layout.nbytes:
        return None
    base = storage.data_ptr()
    for i, offset in offsets.items():
        if tensors[i].data_ptr() - base != offset:
            return None
    return Packed(layout, unpackable, repeats)


@lru_cache(maxsize=64)  # a program mostly uses dicts with the same few specs
def _fields(specs: tuple[Spec | None, ...]) -> tuple[Layout, dict[int, int]] | None:
    """The layout of packed tensors with these specs, and the offsets of those with elements.

    None if no tensor has elements, or if the strides of one are not those that `lay_out` gives.
    """
    groups = _grouped(specs)
    if any(dense_stride(shape, stride) != stride for (_, shape, stride), _ in groups):
        return None
    layout = lay_out(groups)
    offsets = {i: run.offset + n * run.step for run in layout.runs if run.step for n, i in enumerate(run.members)}
    return (layout, offsets) if offsets else None


def map_buffer(
    tensors: Sequence[Tensor], device: torch.device | None, function: Callable[[Tensor], Tensor]
) -> list[Tensor] | None:
    """Apply ``function`` to the buffer of packed tensors on ``device``, and to each unpackable tensor.

    ``function`` copies a tensor or returns it. Returns the new list of tensors, or None if the tensors are not packed.
    """
    found = find_buffer(tensors, device)
    if found is None:
        return None
    out = list(tensors)
    buffer = buffer_of(tensors, found.layout)
    made = function(buffer)
    if made is not buffer:
        views_of(found.layout, regions(made, found.layout), out)
    for i in found.unpackable:
        out[i] = function(out[i])
    for i, first in found.repeats.items():
        out[i] = out[first]
    return out


def pack(
    tensors: list[Tensor], device: torch.device, casts: Mapping[torch.dtype, torch.dtype] = MappingProxyType({})
) -> list[Tensor]:
    """Copy tensors on ``device`` into one new buffer. ``casts`` maps each dtype that changes to the new one.

    Unpackable tensors are returned unchanged. So are all tensors if they are packed and ``casts`` is empty.
    """
    repeats = repeats_of(tensors)
    groups, _ = arrange(tensors, repeats)
    if all(0 in shape for (_, shape, _), _ in groups) or (not casts and find_buffer(tensors, device, alone=True)):
        return tensors
    out = list(tensors)
    pack_into(out, lay_out(cast_groups(groups, casts)), device)
    for i, first in repeats.items():
        out[i] = out[first]
    return out


def pack_into(tensors: list[Tensor], layout: Layout, device: torch.device) -> Tensor:
    """Replace tensors by views of a new buffer on ``device``, with the dtypes of ``layout``. Returns the buffer."""
    buffer = new_batch_buffer(layout, device)
    views_of(layout, copy_into(buffer, layout, tensors), tensors)
    return buffer


def materialize(value: Any) -> Any:
    """Load the tensor that a placeholder of a lazy loader stands for. Any other value is returned unchanged.

    A placeholder implements ``__torch_function__``. A file loaded with ``weights_only=True`` cannot make one.
    """
    if isinstance(value, (Tensor, dict)) or not hasattr(type(value), "__torch_function__"):
        return value
    return handle_torch_function(_itself, (value,), value)


def _itself(tensor: Any) -> Any:
    return tensor


def is_saved_group(group: Any) -> bool:
    """Whether ``group``, from an untrusted source, is a valid (dtype, shape, stride, members)."""
    if type(group) is not tuple or list(map(type, group[1:])) != [tuple, tuple, tuple]:
        return False
    dtype, shape, stride, members = group
    numbers = (*shape, *stride, *members)
    return (
        set(map(type, numbers)) == {int}
        and 0 <= min(numbers) <= max(numbers) < 1 << 63
        and bool(members)
        and len(shape) == len(stride) <= MAX_DIMENSIONS
        and isinstance(dtype, torch.dtype)
        and dtype in PACKABLE
    )


def are_slices(tensors: Sequence[Tensor]) -> bool:
    """Whether some packable tensors are parts of larger storages, and no two of them overlap.

    Pickle would write the whole storage for each. Tensors that overlap are left to ``torch.save``, which keeps the
    overlap.
    """
    distinct = {id(t): t for t in tensors}.values()
    found = [t for t in distinct if packable(t) and t.numel()]
    if all(t.untyped_storage().nbytes() == t.nbytes for t in found):
        return False
    spans = sorted((t.data_ptr(), t.data_ptr() + _extent(t)) for t in found)
    return all(end <= start for (_, end), (start, _) in pairwise(spans))


def _extent(t: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    return (1 + sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True))) * t.itemsize
