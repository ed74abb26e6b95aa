"""Write into tensors in place: into all of them, or into none.

Writes that cannot fail are calls of one list, which runs in C: Python handles Ctrl-C after the last of them. Any other
write comes before these, one at a time, with a copy of what it replaces.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .dtypes import FOREACH_DTYPES, REAL
from .layout import dense_stride

Call = partial[Any]
Risky = tuple[Tensor, Any, Callable[[], Any]]
"""A write that may fail: the tensor, the index of the elements to write or None for all, and the call."""
FOREACH_CLASSES = frozenset((Tensor, Parameter))
"""The classes of tensors that ``torch._foreach_*`` takes."""
_STRIDED = torch.strided


def plain(t: Any) -> bool:
    """Whether ``torch._foreach_*`` takes a tensor, and no write of a value that fits into it fails.

    False for any other object.
    """
    return (
        type(t) in FOREACH_CLASSES
        and t.layout is _STRIDED
        and not t.is_nested
        and (t.dtype in REAL or (t.dtype in FOREACH_DTYPES and not t.is_conj()))
        and (t.is_contiguous() or not is_expanded(t))
        and not (t.requires_grad and torch.is_grad_enabled())
        and not t.is_neg()
        and (not t.is_inference() or torch.is_inference_mode_enabled())
    )


def unlike(targets: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Sequence[int], bool]:
    """The indices of the targets that are not `plain`, or whose value is not plain, has another shape and dimensions,
    or overlaps them; and whether all have one dtype.

    Targets with the negative bit are no exception: ``torch._foreach_*`` refuses them before it writes.
    """
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    odd, first, is_one = list[int](), targets[0].dtype if targets else None, bool(targets)
    try:
        # The conditions are inline, because `lerp_` of 400 in benchmarks/guard.py mostly waits for them.
        for i, (t, value) in enumerate(zip(targets, values, strict=True)):
            dtype, given = t.dtype, value.dtype
            if dtype is not first or given is not first:
                is_one = False
            if (
                type(t) not in FOREACH_CLASSES
                or type(value) not in FOREACH_CLASSES
                or (dtype not in REAL and (dtype not in FOREACH_DTYPES or t.is_conj()))
                or (given is not dtype and given not in FOREACH_DTYPES)
                or (t.shape != value.shape and value.dim())
                or (not t.is_contiguous() and is_expanded(t))
                or (grad and (t.requires_grad or value.requires_grad))
                or not (inference or not t.is_inference())
                or not (
                    (gap := value.data_ptr() - t.data_ptr()) >= (size := t.nbytes)
                    or (gap <= -size and gap <= -value.nbytes)
                    or value is t
                )
            ):
                odd.append(i)
    except RuntimeError:  # a sparse tensor has no address, and a nested tensor no shape
        return range(len(targets)), False
    return odd, is_one


def refusal(t: Tensor, called: str) -> str:
    """Why ``called`` must not write into a tensor that torch lets it write to; ``""`` if there is no reason."""
    if t.is_inference() and not torch.is_inference_mode_enabled():  # torch raises after it has written
        return f"is an inference tensor; clone() it before {called}, or use torch.inference_mode()"
    if t.layout is _STRIDED and not t.is_nested and is_expanded(t):
        return f"is expanded: its elements share memory; clone() it before {called}"
    return ""


def write_all(calls: Sequence[Call], risky: Sequence[Risky] = ()) -> None:
    """Run the risky writes, then the calls, which cannot fail. If a write fails, or Ctrl-C comes, undo all of them."""
    if not risky and (len(calls) == 1 or torch.compiler.is_compiling()):
        for call in calls:
            call()
        return
    done: list[tuple[Tensor, Any, Tensor]] = []
    try:
        for target, place, call in risky:
            with torch.no_grad():
                old = target.clone() if place is None else target[place].clone()
            done.append((target, place, old))  # first, as an interrupt may follow the write
            _ = target.is_leaf  # torch takes a view for a leaf until it is asked, if a write gave its base a history
            call()
        deque(map(partial.__call__, [*calls, partial(done.clear)]), 0)  # after the last call nothing is undone
    except BaseException:
        with torch.no_grad():
            for target, place, old in reversed(done):  # in this order, as two tensors may share memory
                with suppress(Exception):  # a tensor that refused its value may refuse this write too
                    if place is None:
                        target.copy_(old)
                    else:
                        target[place] = old
        raise


def copies(targets: list[Tensor], values: list[Tensor]) -> list[Call]:
    """The calls that copy each value into its target, on their device, with the dtype of the target."""
    if not targets or targets[0].is_cpu:
        return [partial(torch._foreach_copy_, targets, values)] if targets else []
    # Grouped by both dtypes, because the CUDA kernel of some versions misreads a list of mixed dtypes.
    calls: list[Call] = []
    groups: dict[Any, list[tuple[Tensor, Tensor]]] = {}
    for target, value in zip(targets, values, strict=True):
        if FOREACH_DTYPES.issuperset(dtypes := (target.dtype, value.dtype)):
            groups.setdefault(dtypes, []).append((target, value))
        else:
            calls.append(partial(target.copy_, value))
    return calls + [partial(torch._foreach_copy_, *zip(*pairs, strict=True)) for pairs in groups.values()]


# --- tensors that share memory ---


def is_expanded(t: Tensor) -> bool:
    """Whether several elements of a strided tensor are the same memory, as in an expanded tensor."""
    return any(size > 1 and not step for size, step in zip(t.shape, t.stride(), strict=True)) and t.numel() > 0


def overlap_partly(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors overlap in memory, unless both have the same elements.

    torch refuses to write to such a tensor. As torch does, it ignores tensors with gaps between their elements.
    """
    start, other = a.data_ptr(), b.data_ptr()
    near = bool(start) and (other - start < a.nbytes if start <= other else start - other < b.nbytes)
    same = start == other and a.itemsize == b.itemsize and a.shape == b.shape and a.stride() == b.stride()
    return near and not same and all(dense_stride(t.shape, t.stride()) == t.stride() for t in (a, b))


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two strided tensors have bytes between their first and their last element in common."""
    if not (a.numel() and b.numel()) or a.is_meta or b.is_meta:
        return False
    ends = [
        t.data_ptr() + (1 + sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True))) * t.itemsize
        for t in (a, b)
    ]
    return a.data_ptr() < ends[1] and b.data_ptr() < ends[0]


def share_memory(targets: Sequence[Tensor], values: Sequence[Tensor]) -> bool:
    """Whether a value may share memory with a target. Compares whole storages, not the elements in use."""
    try:
        ours, theirs = list(map(Tensor.untyped_storage, targets)), list(map(Tensor.untyped_storage, values))
    except NotImplementedError:  # sparse tensors and some subclasses have no storage
        return True
    if all(map(_resizable, ours)) and all(map(_resizable, theirs)):
        # torch allocated these storages, so two of them have no memory in common. A storage is one object of Python.
        return not set(ours).isdisjoint(theirs)
    starts, ends = sorted(map(_start, ours)), sorted([_start(s) + s.nbytes() for s in ours])
    spans = [(_start(s), _start(s) + s.nbytes()) for s in theirs]
    # No overlap: our spans that start before the end of their span are exactly those that end before its start.
    return any(bisect_left(starts, end) != bisect_right(ends, start) for start, end in spans)


_resizable, _start = torch.UntypedStorage.resizable, torch.UntypedStorage.data_ptr
