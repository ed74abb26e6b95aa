"""One storage for many tensors: which can be packed, whether they are, and the ways into and out of a block of memory.

Whether tensors are packed is noted nowhere. It is read from where they lie: they are packed if each begins where the
layout of their dtypes, shapes and strides puts it, in a storage of exactly its size. So nothing that is done to a field
or to the dict that holds it leaves a note behind that is no longer true, and a packed dict that a framework takes apart
and builds again is still packed. (To keep the block beside the fields was the alternative. It would have to be compared
with them at every use all the same, as ``t.data = ...`` and ``t.set_()`` tell nobody.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from ._layout import Group, Layout, Spec, dense_stride, lay_out, recast

_NAMES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32 complex64 "
    "complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
)
PACKABLE = frozenset(getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name))
"""The dtypes that fill whole bytes and are copied by value; quantised ones have parameters beside their bytes."""
_COPIED_TOGETHER = frozenset(
    (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
     torch.float32, torch.float64, torch.complex64, torch.complex128)
)  # fmt: skip
"""The dtypes that torch's kernels for lists of tensors take on every device."""

_strided = torch.strided
_compiling = torch.compiler.is_compiling
_interpreters = cast(Callable[[], object], cast(Any, torch._C)._functorch.peek_interpreter_stack)
_dispatch_modes = torch._C._len_torch_dispatch_stack
_trace = torch._C._get_tracing_state


def concrete() -> bool:
    """Whether a tensor is now what it seems: memory, with no one who must see each operation on it.

    Not so while torch.compile, a functorch transform, a dispatch mode or torch.jit.trace looks on.
    """
    return not (_compiling() or _interpreters() or _dispatch_modes() or _trace())


def has_bytes(device: torch.device) -> bool:
    """Whether memory on ``device`` can be read as any dtype, at any aligned offset.

    So it is on CUDA, XPU and the out-of-tree devices that take torch's own storages; Metal and XLA are not trusted with
    it, and meta has no memory at all.
    """
    return device.type in ("cpu", "cuda", "xpu") or device.type == torch._C._get_privateuse1_backend_name()


def packable(t: Tensor) -> bool:
    """Whether a tensor is no more than its bytes.

    More are one that requires grad, a subclass, one that is sparse, nested or quantised, and one whose conjugate or
    negative bit is set.
    """
    return (
        type(t) is Tensor
        and t.layout is _strided
        and not (t.requires_grad or t.is_nested or t.is_neg())
        and (dtype := t.dtype) in PACKABLE
        and not (dtype.is_complex and t.is_conj())
    )


def arrange(tensors: Sequence[Tensor]) -> tuple[list[Group], list[int]]:
    """The tensors that can be packed, grouped by what they are, and the numbers of those that cannot."""
    groups: dict[Spec, list[int]] = {}
    beside: list[int] = []
    for i, t in enumerate(tensors):
        if not packable(t):
            beside.append(i)
        elif (spec := (t.dtype, t.shape, t.stride())) in groups:
            groups[spec].append(i)
        else:
            groups[spec] = [i]
    return list(groups.items()), beside


def block_layout(tensors: Sequence[Tensor], groups: Sequence[Group]) -> Layout | None:
    """The layout of ``groups`` if the tensors lie in one storage exactly so, with nothing else in it; else None.

    Tensors without elements lie nowhere, and are not asked.
    """
    layout = lay_out(groups)
    runs = [run for run in layout.runs if run.step]
    if not runs or any(dense_stride(shape, stride) != stride for (_, shape, stride), _ in groups):
        return None
    first = tensors[runs[0].members[0]]
    if first.storage_offset() or first.untyped_storage().nbytes() != layout.nbytes:
        return None
    base = first.data_ptr()
    for run in runs:
        expected = base + run.offset
        for i in run.members:
            if tensors[i].data_ptr() != expected:
                return None
            expected += run.step
    return layout


def block_of(tensors: Sequence[Tensor], layout: Layout) -> Tensor:
    """The storage of tensors that lie in one block, as uint8[nbytes] over its memory."""
    first = tensors[next(run.members[0] for run in layout.runs if run.step)]
    block = torch.empty(0, dtype=torch.uint8, device=first.device)
    return block.set_(first.untyped_storage(), 0, (layout.nbytes,), (1,))


def _regions(block: Tensor, layout: Layout) -> list[Tensor]:
    """The memory of every run in ``block``: [members, *shape], or [*shape] for a single member."""
    flat: dict[torch.dtype, Tensor] = {}  # the whole block, as each dtype
    out: list[Tensor] = []
    for dtype, shape, stride, members, offset, step in layout.runs:
        size = dtype.itemsize
        if dtype not in flat:
            bare = torch.empty(0, dtype=dtype, device=block.device)
            flat[dtype] = bare.set_(block.untyped_storage(), 0, (layout.nbytes // size,), (1,))
        single = len(members) == 1
        sizes = shape if single else (len(members), *shape)
        strides = stride if single else (step // size, *stride)
        out.append(flat[dtype].as_strided(sizes, strides, offset // size))
    return out


def new_block(nbytes: int, device: torch.device, pin: bool = False) -> Tensor:
    """uint8[nbytes] on ``device``; ``pin``: in pinned memory of the host."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pin)


def gather(tensors: Sequence[Tensor], layout: Layout, block: Tensor) -> Tensor:
    """``block`` with copies of the tensors, which are on its device, each cast to the dtype it has in ``layout``."""
    together: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for run, region in zip(layout.runs, _regions(block, layout), strict=True):
        sources = [tensors[i] for i in run.members]
        many = len(sources) > 1
        plain = run.dtype in _COPIED_TOGETHER and all(source.dtype is run.dtype for source in sources)
        if plain and many and region.is_contiguous():
            torch.stack(sources, out=region)  # a quarter of the time of copying into views (0.2 and 0.8 us a field)
            continue
        views = region.unbind() if many else (region,)
        if plain:
            into, out_of = together.setdefault(run.dtype, ([], []))
            into += views
            out_of += sources
        else:
            for view, source in zip(views, sources, strict=True):
                view.copy_(source)
    for into, out_of in together.values():  # a dtype at a time: the CUDA kernel of some versions reads mixed ones wrong
        torch._foreach_copy_(into, out_of)
    return block


def scatter(block: Tensor, layout: Layout, out: list[Tensor] | dict[int, Tensor]) -> None:
    """Put the fields of ``block``, a uint8 tensor over the whole of its storage, into ``out`` at their numbers.

    They share its memory and nothing else: each has a version counter of its own, so that writing one in place leaves
    what autograd saved of another valid. Views of one tensor would have one counter between them.
    """
    for run, region in zip(layout.runs, _regions(block, layout), strict=True):
        # `.data` is the view, with a counter of its own. After unbind it takes half the time of making each tensor over
        # the storage (0.7 and 1.6 us), which is why equal fields are neighbours.
        if len(run.members) == 1:
            out[run.members[0]] = region.data
        else:
            for i, view in zip(run.members, region.unbind(), strict=True):
                out[i] = view.data


def may_be_packed(tensors: Sequence[Tensor]) -> bool:
    """Whether it is worth to look at each: the first that can be packed leaves room in its storage. If `concrete`."""
    for t in tensors:
        if packable(t) and (nbytes := t.nbytes):
            return t.untyped_storage().nbytes() > nbytes and len(tensors) > 1
    return False


def packed_layout(tensors: Sequence[Tensor], device: torch.device | None) -> tuple[Layout, list[int]] | None:
    """The layout of packed tensors on ``device``, and the numbers of those beside them; None if they are not packed."""
    if not (packs(device) and may_be_packed(tensors)):
        return None
    groups, beside = arrange(tensors)
    layout = block_layout(tensors, groups)
    return None if layout is None else (layout, beside)


def blockwise(
    tensors: Sequence[Tensor], device: torch.device | None, function: Callable[[Tensor], Tensor]
) -> list[Tensor] | None:
    """What ``function``, which copies a tensor or returns it, makes of packed tensors on ``device``: called for their
    block, and for each tensor beside it. None if they are not packed, for which the caller has its own way.
    """
    distinct = distinct_of(tensors)
    found = packed_layout(distinct, device)
    if found is None:
        return None
    layout, beside = found
    out = list(distinct)
    block = block_of(distinct, layout)
    made = function(block)
    if made is not block:
        scatter(made, layout, out)
    for i in beside:
        out[i] = function(distinct[i])
    return _instead(tensors, distinct, out)


def packs(device: torch.device | None) -> bool:
    """Whether tensors on ``device`` can be packed now."""
    return device is not None and concrete() and has_bytes(device)


def is_packed(tensors: Sequence[Tensor], device: torch.device | None) -> bool:
    """Whether those of the tensors on ``device`` that can be packed lie in one block; so where there are none."""
    if not packs(device):
        return True
    distinct = distinct_of(tensors)
    groups, _ = arrange(distinct)
    return _no_bytes(groups) or block_layout(distinct, groups) is not None


def _no_bytes(groups: Sequence[Group]) -> bool:
    return all(0 in shape for (_, shape, _), _ in groups)


def pack(
    tensors: list[Tensor], device: torch.device, casts: Mapping[torch.dtype, torch.dtype] = MappingProxyType({})
) -> list[Tensor]:
    """New tensors in one block on ``device``, where they are, of the dtypes that ``casts`` has for theirs.

    Those that cannot be packed are returned themselves, and all if they lie in one block and there are no casts.
    """
    groups, _ = arrange(tensors)
    if _no_bytes(groups) or (not casts and block_layout(tensors, groups)):
        return tensors
    layout = lay_out(recast(groups, casts))
    out = list(tensors)
    scatter(gather(tensors, layout, new_block(layout.nbytes, device)), layout, out)
    return out


def from_block(block: Any, specs: Any) -> dict[int, Tensor]:
    """The packed tensors, by their numbers, of which a pickle has kept only ``block`` and the groups of their layout.

    The arguments may come from a file that was tampered with: ``ValueError`` unless they fit each other.
    """
    try:
        layout = lay_out([((dtype, shape, stride), members) for dtype, shape, stride, members in specs])
        numbers = layout.members
        sound = (
            all(run.dtype in PACKABLE and len(run.shape) == len(run.stride) for run in layout.runs)
            and all(type(n) is int and n >= 0 for run in layout.runs for n in (*run.shape, *run.stride, *run.members))
            and len(set(numbers)) == len(numbers)
            and isinstance(block, Tensor)
            and block.dtype == torch.uint8
            and block.untyped_storage().nbytes() == layout.nbytes
        )
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise ValueError("a packed dict whose layout is damaged") from error
    if not sound:
        raise ValueError("a packed dict whose layout does not fit its storage")
    out: dict[int, Tensor] = {}
    scatter(block, layout, out)
    return out


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
