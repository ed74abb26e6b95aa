"""One storage for many tensors: whether they have one, and giving it to them.

Whether tensors are packed is noted nowhere. It is read from where they lie: they are packed if each begins where the
layout of their dtypes, shapes and strides puts it, in a storage of exactly its size. So nothing that is done to a field
or to the dict that holds it leaves a note behind that is no longer true, and a packed dict that a framework takes apart
and builds again is still packed. (To keep the block beside the fields was the alternative. It would have to be compared
with them at every use all the same, as ``t.data = ...`` and ``t.set_()`` tell nobody.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from .buffer import (
    PACKABLE,
    arrange,
    buffer_of,
    clear_gaps,
    concrete,
    copy_into,
    flat_over,
    has_bytes,
    new_buffer,
    packable,
    regions,
    views_of,
)
from .layout import Group, Layout, dense_stride, lay_out, recast

DIMENSIONS = 64
"""No operation of torch takes more, so no tensor that was saved has more."""


def buffer_layout(tensors: Sequence[Tensor], groups: Sequence[Group]) -> Layout | None:
    """The layout of ``groups`` if the tensors lie in one storage exactly so, with nothing else in it; else None.

    Tensors without elements lie nowhere, and are not asked.
    """
    filled = [members for (_, shape, _), members in groups if 0 not in shape]
    if not filled:
        return None
    first = tensors[filled[0][0]]
    nbytes = first.untyped_storage().nbytes()
    alone = len(filled) == len(filled[0]) == 1
    if first.storage_offset() or (nbytes == first.nbytes) != alone:  # the common case, told without a layout
        return None
    layout = lay_out(groups)
    if nbytes != layout.nbytes or any(dense_stride(shape, stride) != stride for (_, shape, stride), _ in groups):
        return None
    base = first.data_ptr()
    for run in layout.runs:
        if not run.step:
            continue
        expected = base + run.offset
        for i in run.members:
            if tensors[i].data_ptr() != expected:
                return None
            expected += run.step
    return layout


def are_parts(tensors: Sequence[Tensor]) -> bool:
    """Whether some of those that can be packed are parts of larger storages, and none lies where another one does.

    Pickle writes the whole storage for each. (Those that overlap are left to it: ``torch.save`` keeps that they do.)
    """
    found = [t for t in tensors if packable(t) and t.numel()]
    if all(t.untyped_storage().nbytes() == t.nbytes for t in found):
        return False
    spans = sorted((t.data_ptr(), t.data_ptr() + _extent(t)) for t in found)
    return all(end <= start for (_, end), (start, _) in pairwise(spans))


def _extent(t: Tensor) -> int:
    """Bytes from the first element to the last."""
    return (1 + sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True))) * t.itemsize


def may_be_packed(tensors: Sequence[Tensor]) -> bool:
    """A quick look, if `concrete`: whether the first that can be packed leaves room for others in its storage."""
    for t in tensors:
        if packable(t) and (nbytes := t.nbytes):
            return t.untyped_storage().nbytes() > nbytes and len(tensors) > 1
    return False


def packed_layout(tensors: Sequence[Tensor], device: torch.device | None) -> tuple[Layout, list[int]] | None:
    """The layout of packed tensors on ``device``, and the numbers of those beside them; None if they are not packed."""
    if not (packs(device) and may_be_packed(tensors)):
        return None
    groups, unpackable = arrange(tensors)
    layout = buffer_layout(tensors, groups)
    return None if layout is None else (layout, unpackable)


def map_buffer(
    tensors: Sequence[Tensor], device: torch.device | None, function: Callable[[Tensor], Tensor]
) -> list[Tensor] | None:
    """What ``function``, which copies a tensor or returns it, makes of packed tensors on ``device``: called for their
    block, and for each tensor beside it. None if they are not packed, for which the caller has its own way.
    """
    distinct = distinct_of(tensors)
    found = packed_layout(distinct, device)
    if found is None:
        return None
    layout, unpackable = found
    out = list(distinct)
    buffer = buffer_of(distinct, layout)
    made = function(buffer)
    if made is not buffer:
        views_of(layout, regions(made, layout), out)
    for i in unpackable:
        out[i] = function(distinct[i])
    return _instead(tensors, distinct, out)


def packs(device: torch.device | None) -> bool:
    """Whether tensors on ``device`` can be packed now."""
    return device is not None and concrete() and has_bytes(device)


def is_packed(tensors: Sequence[Tensor], device: torch.device | None) -> bool:
    """Whether those of the tensors on ``device`` that can be packed lie in one block, of which there must be one."""
    if not packs(device):
        return False
    distinct = distinct_of(tensors)
    return buffer_layout(distinct, arrange(distinct)[0]) is not None


def pack(
    tensors: list[Tensor], device: torch.device, casts: Mapping[torch.dtype, torch.dtype] = MappingProxyType({})
) -> list[Tensor]:
    """New tensors in one block on ``device``, where they are, of the dtypes that ``casts`` has for theirs.

    Those that cannot be packed are returned themselves, and all if they lie in one block and there are no casts.
    """
    groups, _ = arrange(tensors)
    if all(0 in shape for (_, shape, _), _ in groups) or (not casts and buffer_layout(tensors, groups)):
        return tensors
    layout = lay_out(recast(groups, casts))
    out = list(tensors)
    into = regions(clear_gaps(new_buffer(layout.nbytes, device), layout), layout)
    copy_into(tensors, layout, into)
    views_of(layout, into, out)
    return out


def from_buffer(buffer: Any, specs: Any) -> dict[int, Tensor]:
    """The packed tensors, by their numbers, of which a pickle has kept only ``buffer`` and the groups of their layout.

    The arguments may come from a file that was tampered with: ``ValueError`` unless they fit each other.
    """
    buffer = loaded(buffer)
    if not (type(buffer) is Tensor and packable(buffer) and buffer.dtype == torch.uint8 and buffer.dim() == 1):
        raise ValueError("a packed dict whose storage is damaged")
    if type(specs) is not list or not all(is_spec(spec) for spec in cast("list[Any]", specs)):
        raise ValueError("a packed dict whose layout is damaged")
    groups = [((dtype, shape, stride), members) for dtype, shape, stride, members in cast("list[Any]", specs)]
    layout = lay_out(groups)
    numbers = layout.members
    if buffer.untyped_storage().nbytes() != layout.nbytes or len(set(numbers)) != len(numbers):
        raise ValueError("a packed dict whose layout does not fit its storage")
    storage = buffer.untyped_storage()
    if buffer.is_cpu and storage.data_ptr() % max((run.dtype.itemsize for run in layout.runs), default=1):
        # Of a mapped file that torch has not written: kernels would crash.
        buffer = flat_over(storage.clone(), torch.uint8, layout.nbytes, buffer.device)
    out: dict[int, Tensor] = {}
    views_of(layout, regions(buffer, layout), out)
    return out


def loaded(value: Any) -> Any:
    """The tensor that ``value`` stands for, if it is a stand-in for one that a lazy loader has not read; else itself.

    Such a stand-in takes part in torch's functions, by torch's protocol, with the tensor. A file that is loaded with
    ``weights_only=True`` cannot make one.
    """
    if isinstance(value, Tensor) or not hasattr(cast(Any, type(value)), "__torch_function__"):
        return value
    return handle_torch_function(_itself, (value,), value)


def _itself(tensor: Any) -> Any:
    return tensor


def is_spec(spec: Any) -> bool:
    """Whether this is a dtype, shape, stride and members, as a layout has them; it may come from anywhere."""
    if type(spec) is not tuple or len(cast("tuple[Any, ...]", spec)) != 4:
        return False
    dtype, shape, stride, members = cast("tuple[Any, tuple[Any, ...], tuple[Any, ...], list[Any]]", spec)
    if type(shape) is not tuple or type(stride) is not tuple or type(members) is not list or len(shape) > DIMENSIONS:
        return False
    numbers = (*shape, *stride, *members)
    sound = set(map(type, numbers)) == {int} and min(numbers) >= 0 and max(numbers) < 1 << 63
    return (
        sound and bool(members) and len(shape) == len(stride) and isinstance(dtype, torch.dtype) and dtype in PACKABLE
    )


def once(tensors: Sequence[Tensor], function: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
    """``function`` of the list with each tensor in it once, its results where the tensors were."""
    distinct = distinct_of(tensors)
    return _instead(tensors, distinct, function(distinct))


def distinct_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, each once, in the order in which they come first."""
    return list({id(tensor): tensor for tensor in tensors}.values())


def _instead(tensors: Sequence[Tensor], distinct: list[Tensor], results: list[Tensor]) -> list[Tensor]:
    """``results``, which are for ``distinct``, where the tensors were."""
    if len(distinct) == len(tensors):
        return results
    by_id = {id(tensor): result for tensor, result in zip(distinct, results, strict=True)}
    return [by_id[id(tensor)] for tensor in tensors]
