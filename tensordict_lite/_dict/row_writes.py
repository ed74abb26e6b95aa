"""Write a mapping into rows of a dict. All values are validated before the first one is written.

A plan records that values fit into rows. It is valid for dicts and values with the same keys and the same metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from .._encoders.protocol import padding
from .._errors import DEPTH, Path, TooDeep, described, dotted
from .._memory.device import CPU, intercepted
from .._memory.rows import Spans, can_copy_rows, copy_rows, set_rows, share_memory
from .._memory.snapshot import addresses, first_shape, plan_key, remember, snapshot
from .._tree.convert import find_tensor
from .._tree.tree import TreeDict
from .insert import insert
from .row_index import from_list, integers, within

RowIndex = int | slice | Tensor
"""The rows to write: one row, a slice, or int64[n] on the device of the dict."""


def write_rows(d: TreeDict[Any], index: RowIndex, other: Mapping[str, Any], count: int) -> None:
    """Write ``other`` into the rows of ``d``, which has ``count`` rows. If a value does not fit, write nothing."""
    if not isinstance(other, Mapping):
        raise TypeError(f"rows are set from a mapping with the keys of the dict, got {type(other).__name__}")
    writes = _Writes(index, count)
    writes.add_dict(d, other, ())
    writes.run()
    if not writes.can_fail and d._device is CPU:
        _remember_writes(d, index, other, writes)


class _WritePlan(NamedTuple):
    """The result of validating values for some rows of a dict."""

    same: Callable[..., list[int] | None]
    """Tells whether other fields, values and indices have the same metadata. See `snapshot`."""
    rows: int
    """The number of rows of the dict."""
    lead: tuple[int, ...]
    """The leading shape of the values: ``(n,)`` for n rows, ``()`` for one row."""
    spans: Spans
    """Tells whether values overlap the fields."""
    copies: bool
    """Whether ``index_copy_`` writes every value."""


_WRITE_PLANS: dict[Any, _WritePlan] = {}


def write_as_before(d: TreeDict[Any], index: Any, other: Any) -> bool:
    """Write ``other`` into the rows of ``d``, if a plan proves that no write can fail. If not, return False."""
    if type(other) is not dict and not (isinstance(other, TreeDict) and other._policy is d._policy):
        return False
    is_list = type(index) is list
    kind = Tensor if is_list else type(index)
    theirs = other
    plan = None if intercepted() else _WRITE_PLANS.get(_key(d, theirs, kind))
    if plan is None:
        return False
    at: Any = from_list(index) if is_list else index
    targets: list[Any] = list(d.values())
    values: list[Any] = list(theirs.values())
    given = [*values, at] if kind is Tensor else values
    found = plan.same(*targets, *given)
    if found is None:
        return False
    count = plan.rows
    if kind is slice:
        if len(range(count)[at]) != plan.lead[0]:
            return False
    elif not (within(at, count) if kind is Tensor else -count <= at < count):
        return False
    if plan.spans.overlap(found):
        return False
    if kind is Tensor:
        for target, value in zip(targets, values, strict=True):
            if plan.copies:
                target.index_copy_(0, at, value)
            else:
                set_rows(target, at, value, True)
    else:
        copy_rows([target[at] for target in targets], values)
    return True


def _key(d: TreeDict[Any], other: Mapping[str, Any], kind: type) -> Any:
    return kind, first_shape(other), *other, *plan_key(d)


def _remember_writes(d: TreeDict[Any], index: RowIndex, other: Mapping[str, Any], writes: _Writes) -> None:
    """Store a plan for writes that cannot fail, unless a value was converted before the write."""
    targets, values, kind = list(d.values()), [other[key] for key in d], type(index)
    given = [*values, index] if isinstance(index, Tensor) else values
    simple = (
        kind in (int, slice, Tensor)
        and list(other) == list(d)
        and len(targets) == len(writes.targets)
        and all(map(is_, targets, writes.targets))
        and all(map(is_, values, writes.values))
        and all(value.dtype is target.dtype for target, value in zip(targets, values, strict=True))
        and all(tensor.numel() for tensor in (*targets, *given))
    )
    key = _key(d, other, kind)
    before = _WRITE_PLANS.get(key)
    if not simple or (before is not None and before.same(*targets, *given) is not None):
        return
    same = snapshot([*targets, *given], addresses)
    if same is not None:
        copies = all(map(can_copy_rows, targets, values))
        plan = _WritePlan(same, writes.count, writes.lead, Spans(targets, given), copies)
        remember(_WRITE_PLANS, key, plan)


class _Writes:
    """The validated writes of one call: tensors with their values, and kept lists with their objects."""

    def __init__(self, index: RowIndex, count: int) -> None:
        self.index, self.count = index, count
        if isinstance(index, Tensor):
            self.lead: tuple[int, ...] = (len(index),)
        else:
            self.lead = (len(range(count)[index]),) if isinstance(index, slice) else ()
        self.paths: list[tuple[Path, str]] = []  # for each target: the path of its dict, and its key
        self.targets: list[Tensor] = []
        self.rows: list[Tensor] = []  # the views to write into; for an index of ints, the targets themselves
        self.values: list[Tensor] = []
        self.objects: list[tuple[list[Any], Any]] = []
        self.can_fail = intercepted()

    def add_dict(self, d: TreeDict[Any], other: Mapping[str, Any], at: Path) -> None:
        """Validate the values of ``other`` for all fields of ``d``, at the path ``at``."""
        if d.keys() != other.keys():
            _refuse_keys(d, other, at)
        if isinstance(other, TreeDict) and other._policy is not d._policy:
            _refuse_encoders(d._policy.encoders, other._policy.encoders, d, at)
        index = None if isinstance(self.index, Tensor) else self.index
        on_cpu, strided, inference = d._device is CPU, torch.strided, torch.is_inference_mode_enabled()
        for key, target in d.items():
            value: Any = other[key]
            # Most values fit as they are: a tensor of the same dtype on the same device, of the shape of the rows.
            if not (
                type(value) is Tensor
                and type(target) is Tensor
                and value.dtype is target.dtype
                and (value.is_cpu if on_cpu else value.device == target.device)
                and target.layout is value.layout is strided
            ):
                self.add(d, key, target, value, at)
                continue
            row = target if index is None else target[index]
            if value.shape != (row.shape if index is not None else self.lead + target.shape[1:]):
                self.add(d, key, target, value, at)
                continue
            self.paths.append((at, key))
            self.targets.append(target)
            self.rows.append(row)
            self.values.append(value)
            # The conditions of `_is_simple`, written out: a call for each field takes 5 % of the time.
            simple = target.is_contiguous() and not target.requires_grad and (inference or not target.is_inference())
            if value.requires_grad or not simple:
                self.can_fail = True

    def add(self, d: TreeDict[Any], key: str, target: Any, value: Any, at: Path) -> None:
        """Convert and validate one value for a field of ``d``."""
        path = (*at, key)
        if not isinstance(target, (Tensor, TreeDict)):
            self.add_objects(target, value, path)
            return
        if isinstance(target, Tensor) and target.is_nested:
            raise ValueError(f"{dotted(path)} is a nested tensor, whose rows cannot be set; replace the whole field")
        given = value
        if not (isinstance(target, TreeDict) and isinstance(value, Mapping)):
            converted = d._untyped_subset(())
            insert(converted, {key: value}, at=at)
            value = converted[key]
        if isinstance(target, TreeDict) and isinstance(value, Mapping):
            self.add_dict(target, value, path)
        elif isinstance(target, Tensor) and isinstance(value, Tensor):
            if target.layout is torch.strided and (value.layout is not torch.strided or value.is_nested):
                what = "nested" if value.is_nested else "sparse"
                raise ValueError(
                    f"{dotted(path)} is dense, its rows cannot be set from a {what} tensor; convert it first"
                )
            shape = (*self.lead, *target.shape[1:])
            self.paths.append((at, key))
            self.targets.append(target)
            self.rows.append(target if isinstance(self.index, Tensor) else target[self.index])
            self.can_fail = self.can_fail or not _is_simple(target) or value.requires_grad
            value = _fitted(target.dtype, shape, value, d._policy.encoders.get(key), path)
            # The kernels for an index tensor do not cast. They would raise after some fields are written.
            self.values.append(value.to(target.dtype) if isinstance(self.index, Tensor) else value)
        else:
            what = "a nested dict" if isinstance(target, TreeDict) else "a tensor"
            raise ValueError(f"{dotted(path)} is {what}; its rows cannot be set from {described(given)}")

    def add_objects(self, target: object, value: Any, path: Path) -> None:
        """Validate objects for a kept list with one object per row. Any other kept object belongs to no row."""
        kept = cast("list[Any]", target)
        given: Any = value
        if not isinstance(target, list) or len(kept) != self.count:
            if value is not target:
                raise ValueError(
                    f"{dotted(path)} is a kept object and not one per row, so rows cannot set it; pass the same object"
                )
            return
        if self.lead and not (isinstance(value, list) and len(value) == self.lead[0]):
            raise ValueError(
                f"{dotted(path)}: expected a list of {self.lead[0]} objects for these rows, got {value!r:.60}"
            )
        try:
            tensor_at = find_tensor(given)
        except TooDeep:
            raise ValueError(f"{dotted(path)} is nested more than {DEPTH} levels deep; flatten it first") from None
        if tensor_at is not None:
            where = f"holds a tensor at {tensor_at}" if tensor_at else "is a tensor"
            raise TypeError(f"{dotted(path)} is a kept list, which holds no tensors; the given value {where}")
        self.objects.append((kept, list(given) if self.lead else given))

    def run(self) -> None:
        """Write all values and objects."""
        index, targets, values = self.index, self.targets, self.values
        if share_memory(targets, [*values, index] if isinstance(index, Tensor) else values):
            values = [value.clone() for value in values]
            index = index.clone() if isinstance(index, Tensor) else index
        if self.can_fail:
            self.run_each(index, values)
        elif isinstance(index, Tensor):
            on_cpu = index.is_cpu
            for target, value in zip(targets, values, strict=True):
                set_rows(target, index, value, on_cpu)
        else:
            copy_rows(self.rows, values)
        for kept, value in self.objects:
            if isinstance(index, Tensor):
                for i, item in zip(integers(index), value, strict=True):
                    kept[i] = item
            else:
                kept[index] = value

    def run_each(self, index: RowIndex, values: Sequence[Tensor]) -> None:
        """Write one field at a time. If a write fails, undo the writes before it."""
        paths = [(*at, key) for at, key in self.paths]
        for path, target in zip(paths, self.targets, strict=True):
            if target.layout is torch.strided and len(target) > 1 and not target.stride(0):
                raise RuntimeError(f"{dotted(path)}: the rows of an expanded tensor share memory; clone() it first")
            if target.is_inference() and not torch.is_inference_mode_enabled():  # torch raises after it has written
                raise RuntimeError(f"{dotted(path)} is an inference tensor; clone() it, or use torch.inference_mode()")
        before = [target[index].clone() for target in self.targets]
        done = 0
        try:
            for path, target, value in zip(paths, self.targets, values, strict=True):
                try:
                    if isinstance(index, Tensor) and type(target) is Tensor:
                        set_rows(target, index, value, False)
                    else:
                        target[index] = value
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:  # for example, the field is a leaf that requires grad, or is expanded
                    raise RuntimeError(f"{dotted(path)}: {error}") from error
                done += 1
        except BaseException:
            for target, old in zip(self.targets[:done], before, strict=False):
                target[index] = old
            raise


def _is_simple(target: Tensor) -> bool:
    """Whether no write into a tensor can fail, as it can with autograd, inference mode and expanded tensors."""
    return (
        type(target) is Tensor
        and target.layout is torch.strided
        and target.is_contiguous()
        and not target.requires_grad
        and (torch.is_inference_mode_enabled() or not target.is_inference())
    )


def _refuse_encoders(ours: Mapping[str, object], theirs: Mapping[str, object], d: TreeDict[Any], at: Path) -> None:
    for key, encoder in theirs.items():
        if key in d and key in ours and ours[key] != encoder:
            raise ValueError(f"{dotted((*at, key))} is encoded with {ours[key]!r}, the given value with {encoder!r}")


def _refuse_keys(d: TreeDict[Any], other: Mapping[str, Any], at: Path) -> None:
    missing, extra = d.keys() - other.keys(), other.keys() - d.keys()
    what = f"lacks {dotted((*at, min(missing)))}" if missing else ""
    what = what or f"has {dotted((*at, str(min(extra, key=str))))}, which is not in this dict"
    raise ValueError(f"rows are set from all fields at once; the given mapping {what}")


def _fitted(dtype: torch.dtype, shape: Sequence[int], value: Tensor, encoder: object, path: Path) -> Tensor:
    """Pad and expand ``value`` to ``shape``. Raises ``ValueError`` if it does not fit."""
    number = None if encoder is None or not shape else padding(encoder, value)
    if number is not None:
        if value.shape[-1] > shape[-1]:
            raise ValueError(
                f"{dotted(path)}: a string of {value.shape[-1]} bytes does not fit this field of {shape[-1]}"
            )
        value = F.pad(value, (0, shape[-1] - value.shape[-1]), value=number)
    if not torch.can_cast(value.dtype, dtype):
        raise ValueError(f"{dotted(path)}: {value.dtype} cannot be written into {dtype}; convert it first")
    try:
        return value.expand(shape)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        message = f"{dotted(path)}: expected {list(shape)} for these rows, got {list(value.shape)}"
        raise ValueError(message) from error
