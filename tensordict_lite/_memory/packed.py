"""Storages that several tensors fill, such as that of a packed dict: which tensors lie together, and packing them.

No flag records which tensors lie together. It is read from their addresses. So no operation on a field or on the dict
can leave a stale flag, and a dict that a framework flattens and unflattens is still packed. A stored reference to the
buffer would not help: ``t.data = ...`` and ``t.set_()`` change a field silently, so every use of the reference would
need the same test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from .buffer import buffer_of, copy_into, gaps_have_content, new_batch_buffer, regions, views_of
from .device import capabilities, intercepted
from .dtypes import PACKABLE
from .layout import Group, Layout, Spec, lay_out, read_layouts

MAX_DIMENSIONS = 64
"""The most dimensions that torch's operations accept."""

_strided = torch.strided
_DENSE_CLASSES, _DENSE_LAYOUTS = frozenset((Tensor,)), frozenset((_strided,))
_get_layout, _requires_grad, _is_neg = attrgetter("layout"), attrgetter("requires_grad"), Tensor.is_neg
_dtype_in_spec = itemgetter(0)
_NEVER_CONJUGATE = frozenset(dtype for dtype in PACKABLE if not dtype.is_complex)
_storage_offset: Callable[[Tensor], Any] = Tensor.storage_offset


class Arrangement(NamedTuple):
    """How a list of tensors lies in memory. The ints are indices in the list."""

    blocks: tuple[Layout, ...]
    """The storages that several tensors fill but for alignment, with nothing else in them."""
    groups: tuple[Group, ...]
    """The other packable tensors, by spec."""
    unpackable: list[int]
    repeats: dict[int, int]
    """See `repeats_of`. These tensors are nowhere else."""

    @property
    def every(self) -> tuple[Group, ...]:
        """All packable tensors, by spec. Two groups may have one spec."""
        return (*self.groups, *[group for layout in self.blocks for group in layout.groups])


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
        and (t.dtype in _NEVER_CONJUGATE or (t.dtype in PACKABLE and not t.is_conj()))
    )


def repeats_of(tensors: Sequence[Tensor]) -> dict[int, int]:
    """The index of every tensor that occurs earlier in the list too, with the index of its first occurrence."""
    if len(set(map(id, tensors))) == len(tensors):
        return {}
    first: dict[int, int] = {}
    return {i: j for i, t in enumerate(tensors) if (j := first.setdefault(id(t), i)) != i}


def arrange(tensors: Sequence[Tensor], sent: bool = False) -> Arrangement:
    """Find out how the tensors lie in memory. Do not call it while operations are `intercepted`.

    ``sent``: the bytes of the blocks leave this process, and the receiver computes their layouts. So they must lie as
    `lay_out` says. On the CPU, the bytes between the tensors must be zeros: they could be those of another tensor.
    """
    repeats = repeats_of(tensors)
    found: dict[Any, list[int]] = {}  # by spec; those that cannot be packed by None
    for i, spec in enumerate(_specs_of(tensors)):
        if i not in repeats:
            found.setdefault(spec, []).append(i)
    unpackable = found.pop(None, [])
    groups: tuple[Group, ...] = tuple([(spec, tuple(members)) for spec, members in found.items()])
    if not may_lie_together(tensors):
        return Arrangement((), groups, unpackable, repeats)
    order = [tensors[i] for _, members in groups for i in members]
    offsets = [*map(_storage_offset, order)]
    first: dict[int, int] = {}  # by the address of a storage: the first tensor in it
    storages = [*map(first.setdefault, [t.untyped_storage().data_ptr() for t in order], count())]
    if len(first) == len(order):
        return Arrangement((), groups, unpackable, repeats)
    sizes = [order[i].untyped_storage().nbytes() for i in first.values()]
    blocks, left = read_layouts(groups, tuple(offsets), tuple(storages), tuple(sizes), sent)
    unclean = [block for block in blocks if sent and gaps_have_content(tensors, block)]
    if unclean:
        blocks = tuple([block for block in blocks if block not in unclean])
        left += tuple([group for block in unclean for group in block.groups])
    return Arrangement(blocks, left, unpackable, repeats)


def _specs_of(tensors: Sequence[Tensor]) -> Sequence[Spec | None]:
    """The spec of each tensor. None for a tensor that is not `packable`."""
    # Most lists have plain tensors alone. These tests of all tensors take half the time of a test of each tensor.
    plain = (
        _DENSE_CLASSES.issuperset(map(type, tensors))
        and _DENSE_LAYOUTS.issuperset(map(_get_layout, tensors))
        and not any(map(_requires_grad, tensors))
        and not any(map(_is_neg, tensors))
    )
    try:
        specs = [(t.dtype, t.shape, t.stride()) for t in tensors] if plain else []
    except RuntimeError:  # a nested tensor has no shape
        specs = []
    if specs and _NEVER_CONJUGATE.issuperset(map(_dtype_in_spec, specs)):
        return specs
    return [(t.dtype, t.shape, t.stride()) if packable(t) else None for t in tensors]


def may_lie_together(tensors: Sequence[Tensor]) -> bool:
    """A quick test that rules out most dicts: of several tensors in a storage, one does not start where it starts."""
    try:
        return any(map(_storage_offset, tensors))
    except (RuntimeError, NotImplementedError):  # some kinds of tensors have no storage
        return True


def is_packed(tensors: Sequence[Tensor], device: torch.device | None, alone: bool = True) -> bool:
    """Whether the packable tensors, all on ``device``, fill one storage. ``alone``: also if there is only one."""
    may_be = alone or may_lie_together(tensors)
    return may_be and can_pack(device) and _fill_one_storage(tensors, arrange(tensors), alone)


def _fill_one_storage(tensors: Sequence[Tensor], found: Arrangement, alone: bool) -> bool:
    left = [tensors[i] for spec, members in found.groups if 0 not in spec[1] for i in members]
    if alone and len(left) == 1 and not found.blocks:
        return left[0].untyped_storage().nbytes() == left[0].nbytes
    return len(found.blocks) == 1 and not left


def map_storages(
    tensors: Sequence[Tensor], device: torch.device | None, function: Callable[[Tensor], Tensor]
) -> list[Tensor] | None:
    """Apply ``function`` to each storage that several tensors on ``device`` fill, and to each other tensor.

    ``function`` copies a tensor or returns it. Returns the new list of tensors, or None if no tensors lie together.
    """
    if not may_lie_together(tensors) or not can_pack(device):
        return None
    blocks, _, _, repeats = arrange(tensors)
    left = set(range(len(tensors))).difference(repeats, *[layout.members for layout in blocks])
    out = list(tensors)
    for layout in blocks:
        buffer = buffer_of(tensors, layout)
        made = function(buffer)
        if made is not buffer:
            views_of(layout, regions(made, layout), out)
    for i in left:
        out[i] = function(out[i])
    for i, first in repeats.items():
        out[i] = out[first]
    return out


def pack(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors on ``device`` into one new buffer.

    Unpackable tensors are returned unchanged. So are all tensors if they are packed.
    """
    found = arrange(tensors)
    if all(0 in shape for (_, shape, _), _ in found.every) or _fill_one_storage(tensors, found, True):
        return tensors
    out = list(tensors)
    # In the order of the tensors, so that the layout does not depend on where they were.
    pack_into(out, lay_out(sorted(found.every, key=lambda group: min(group[1]))), device)
    for i, first in found.repeats.items():
        out[i] = out[first]
    return out


def pack_into(tensors: list[Tensor], layout: Layout, device: torch.device) -> Tensor:
    """Replace tensors by views of a new buffer on ``device``, with the dtypes of ``layout``. Returns the buffer."""
    buffer = new_batch_buffer(layout, device, layout.nbytes)
    views_of(layout, copy_into(buffer, layout, tensors), tensors)
    return buffer


def materialize(value: Any) -> Any:
    """Load the tensor that a placeholder of a lazy loader stands for. Any other value is returned unchanged.

    A placeholder implements ``__torch_function__``. A file loaded with ``weights_only=True`` cannot make one.
    """
    if isinstance(value, (Tensor, dict)) or not hasattr(type(value), "__torch_function__"):
        return value
    return handle_torch_function(lambda tensor: tensor, (value,), value)


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
