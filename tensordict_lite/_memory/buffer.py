"""Blocks of memory: which tensors are no more than their bytes, and how they get into one block and out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .layout import Group, Layout, Spec

_NAMES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32 complex64 "
    "complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
)
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name)}
"""Those of `PACKABLE`, by name."""
PACKABLE = frozenset(DTYPES.values())
"""The dtypes that fill whole bytes and are copied by value; quantised ones have parameters beside their bytes."""
_COPIED_TOGETHER = frozenset(
    (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
     torch.float32, torch.float64, torch.complex64, torch.complex128)
)  # fmt: skip
"""The dtypes that torch's kernels for lists of tensors take on every device."""

_CLEARED_AT_ONCE = 32 << 10
"""Bytes of a block for each run with gaps up to which to clear all of it is quicker than to clear the gaps."""

_strided = torch.strided
_forward_ad = cast(Any, forward_ad)
_compiling = torch.compiler.is_compiling
_interpreters = cast(Callable[[], object], cast(Any, torch._C)._functorch.peek_interpreter_stack)
_dispatch_modes = torch._C._len_torch_dispatch_stack
_trace = torch._C._get_tracing_state


def concrete() -> bool:
    """Whether a tensor is now what it seems: memory, with no one who must see each operation on it.

    Not so while torch.compile, a functorch transform, forward-mode autograd, a dispatch mode or torch.jit.trace looks
    on.
    """
    looked_on = _compiling() or _interpreters() or _dispatch_modes() or _trace()
    return not looked_on and cast(int, _forward_ad._current_level) < 0


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
    unpackable: list[int] = []
    for i, t in enumerate(tensors):
        if not packable(t):
            unpackable.append(i)
        elif (spec := (t.dtype, t.shape, t.stride())) in groups:
            groups[spec].append(i)
        else:
            groups[spec] = [i]
    return list(groups.items()), unpackable


def new_buffer(nbytes: int, device: torch.device, pin: bool = False) -> Tensor:
    """uint8[nbytes] on ``device``; ``pin``: in pinned memory of the host."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pin)


def flat_over(storage: torch.UntypedStorage, dtype: torch.dtype, count: int, device: torch.device) -> Tensor:
    """The memory of ``storage``, which is on ``device``, as ``dtype``[count] from its start."""
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (count,), (1,))


def buffer_of(tensors: Sequence[Tensor], layout: Layout) -> Tensor:
    """The storage of tensors that lie in one block, as uint8[nbytes] over its memory."""
    first = tensors[next(run.members[0] for run in layout.runs if run.step)]
    return flat_over(first.untyped_storage(), torch.uint8, layout.nbytes, first.device)


def regions(buffer: Tensor, layout: Layout) -> list[Tensor]:
    """The memory of every run in ``buffer``, a uint8 tensor over the whole of its storage.

    Each is [members, *shape] of the run's dtype, or [*shape] for a single member.
    """
    flat: dict[torch.dtype, Tensor] = {}  # the whole block, as each dtype
    out: list[Tensor] = []
    for dtype, shape, stride, members, offset, step in layout.runs:
        size = dtype.itemsize
        if dtype not in flat:
            flat[dtype] = flat_over(buffer.untyped_storage(), dtype, layout.nbytes // size, buffer.device)
        single = len(members) == 1
        sizes = shape if single else (len(members), *shape)
        strides = stride if single else (step // size, *stride)
        out.append(flat[dtype].as_strided(sizes, strides, offset // size))
    return out


def copy_into(tensors: Sequence[Tensor], layout: Layout, into: Sequence[Tensor]) -> None:
    """Copy the tensors ``into`` the regions of a block on their device, each cast to the dtype it has in ``layout``."""
    # By the dtypes to and from, as the CUDA kernel of some versions reads a list of mixed ones wrong.
    together: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for run, region in zip(layout.runs, into, strict=True):
        sources = [tensors[i] for i in run.members]
        dtypes = {source.dtype for source in sources}
        single = len(sources) == 1
        if not dtypes <= _COPIED_TOGETHER:
            for view, source in zip((region,) if single else region.unbind(), sources, strict=True):
                view.copy_(source)
        elif not single and dtypes == {run.dtype} and region.is_contiguous():
            torch.stack(sources, out=region)  # a quarter of the time of copying into views (0.2 and 0.8 us a field)
        else:
            for view, source in zip((region,) if single else region.unbind(), sources, strict=True):
                views, those = together.setdefault((run.dtype, source.dtype), ([], []))
                views.append(view)
                those.append(source)
    for views, those in together.values():
        torch._foreach_copy_(views, those)


def clear_gaps(buffer: Tensor, layout: Layout) -> Tensor:
    """``buffer`` with zeros between the fields, so that what is pickled and saved is the same for equal fields.

    And so that nothing that lay in the memory before gets out with it.
    """
    gaps = [run for run in layout.runs if run.step > run.nbytes]
    if layout.nbytes <= _CLEARED_AT_ONCE * len(gaps):
        return buffer.zero_()
    for run in gaps:
        last = run.offset + run.step * len(run.members) >= layout.nbytes
        size = (len(run.members) - last, run.step - run.nbytes)
        buffer.as_strided(size, (run.step, 1), run.offset + run.nbytes).zero_()
    return buffer


def views_of(layout: Layout, out_of: Sequence[Tensor], out: list[Tensor] | dict[int, Tensor]) -> None:
    """Put the fields ``out_of`` the regions of a block into ``out``, at their numbers.

    They share the memory and nothing else: each has a version counter of its own, so that writing one in place leaves
    what autograd saved of another valid. Views of one tensor would have one counter between them.
    """
    for run, region in zip(layout.runs, out_of, strict=True):
        # `.data` is the view, with a counter of its own. After unbind it takes half the time of making each tensor over
        # the storage (0.7 and 1.6 us), which is why equal fields are neighbours.
        if len(run.members) == 1:
            out[run.members[0]] = region.data
        else:
            for i, view in zip(run.members, region.unbind(), strict=True):
                out[i] = view.data
