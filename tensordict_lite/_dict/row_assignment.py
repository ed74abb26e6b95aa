"""``d.rows[index] = other``: write a mapping into rows. All values are validated before the first one is written."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._errors import DEPTH, Path, TooDeep, described, dotted, is_out_of_memory
from .._memory.device import intercepted
from .._memory.overlap import is_expanded, share_memory
from .._memory.row_copies import can_copy_rows, viewed_as_bits
from .._tree.convert import find_tensor
from .._tree.missing import refuse_other_keys
from .._tree.tree import TreeDict
from .row_index import integers
from .row_values import fit_codes, ragged_rows, refuse_encoders, refuse_unfit, row_value

RowIndex = int | slice | Tensor
"""The rows to write: one row, a slice, or int64[n] on the device of the dict."""


def assign_rows(d: TreeDict[Any], index: RowIndex, other: Mapping[str, Any], count: int) -> None:
    """Write ``other`` into the rows of ``d``, which has ``count`` rows. If a value does not fit, write nothing."""
    if not isinstance(other, Mapping):
        raise TypeError(f"rows are set from a mapping with the keys of the dict, got {type(other).__name__}")
    assignment = _Assignment(index, count)
    assignment.add_dict(d, other, ())
    assignment.run()


class _Assignment:
    """The validated writes of one call: tensors with their values, and kept lists with their objects."""

    def __init__(self, index: RowIndex, count: int) -> None:
        self.index, self.count = index, count
        if isinstance(index, Tensor):
            self.lead: tuple[int, ...] = (len(index),)
        else:
            self.lead = (len(range(count)[index]),) if isinstance(index, slice) else ()
        self.paths: list[Path] = []  # of the targets
        self.targets: list[Tensor] = []
        self.values: list[Tensor] = []
        self.objects: list[tuple[list[Any], Any]] = []
        self.places: dict[int, slice | Tensor] = {}
        """For the values of a ragged field, the places of these rows, by the number of the target."""
        self.can_fail = intercepted()

    def add_dict(self, d: TreeDict[Any], other: Mapping[str, Any], at: Path) -> None:
        """Validate the values of ``other`` for all fields of ``d``, at the path ``at``."""
        if list(d) != list(other):
            refuse_other_keys(d, other, at, "the given mapping", f"this {type(d).__name__}")
        refuse_encoders(d, other, at)
        for key, target in d.items():
            value = other[key]
            fits = (
                type(value) is Tensor
                and _is_simple(target)
                and value.dtype is target.dtype
                and value.device == d._device
                and value.layout is torch.strided
                and not value.is_nested
                and not value.requires_grad
                and value.shape == self.lead + target.shape[1:]
            )
            if fits:
                self.add_tensor((*at, key), target, value)
            else:
                self.add(d, key, target, value, at)

    def add_tensor(self, path: Path, target: Tensor, value: Tensor) -> None:
        self.paths.append(path)
        self.targets.append(target)
        self.values.append(value)

    def add(self, d: TreeDict[Any], key: str, target: Any, value: Any, at: Path) -> None:
        """Convert and validate one value for a field of ``d``."""
        path = (*at, key)
        if not isinstance(target, (Tensor, TreeDict)):
            self.add_objects(target, value, path)
            return
        if isinstance(target, Tensor) and target.is_nested:
            raise ValueError(f"{dotted(path)} is a nested tensor, whose rows cannot be set; replace the whole field")
        if isinstance(target, TreeDict) and target._is_ragged:
            self.add_ragged(d, key, value, at)
            return
        given = value
        value = row_value(d, key, value, at, d._policy.on_mismatch == "move")
        if isinstance(target, TreeDict) and isinstance(value, Mapping):
            self.add_dict(target, value, path)
        elif isinstance(target, Tensor) and isinstance(value, Tensor):
            refuse_unfit(target, value, path)
            value = fit_codes(target, value, d._policy.encoders.get(key), path)
            shape = (*self.lead, *target.shape[1:])
            try:
                value = value.expand(shape)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                message = f"{dotted(path)}: expected {list(shape)} for these rows, got {list(value.shape)}"
                raise ValueError(message) from error
            # The kernels for an index tensor do not cast. They would raise after some fields are written.
            self.add_tensor(path, target, value.to(target.dtype) if isinstance(self.index, Tensor) else value)
            self.can_fail = self.can_fail or not _is_simple(target) or value.requires_grad
        else:
            what = "a nested dict" if isinstance(target, TreeDict) else "a tensor"
            raise ValueError(f"{dotted(path)} is {what}; its rows cannot be set from {described(given)}")

    def add_ragged(self, d: TreeDict[Any], key: str, value: Any, at: Path) -> None:
        """Validate rows for a ragged field. They have the lengths of the rows that they replace."""
        field, path = d[key], (*at, key)
        rows = ragged_rows(d, key, value, at, d._policy.on_mismatch == "move")
        place, ours = field._places(self.index)
        if rows.is_one == bool(self.lead) or len(ours) != len(rows.lengths):
            got = "one row" if rows.is_one else f"{len(rows.lengths)} rows"
            raise ValueError(f"{dotted(path)}: expected {f'{len(ours)} rows' if self.lead else 'one row'}, got {got}")
        differs = (ours != rows.lengths).nonzero()
        if len(differs):
            i = int(differs[0])
            raise ValueError(
                f"{dotted(path)}: row {i} of these has {int(ours[i])} values, got {int(rows.lengths[i])}; rows of a "
                "ragged field keep their lengths; to change them, replace the whole field"
            )
        self.places[len(self.targets)] = place
        self.add_tensor((*path, "values"), field["values"], rows.values.to(field["values"].dtype))
        self.can_fail = True

    def add_objects(self, target: object, value: Any, path: Path) -> None:
        """Validate objects for a kept list with one object per row. Any other kept object belongs to no row."""
        if not isinstance(target, list) or len(target) != self.count:
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
            tensor_at = find_tensor(value)
        except TooDeep:
            raise ValueError(f"{dotted(path)} is nested more than {DEPTH} levels deep; flatten it first") from None
        if tensor_at is not None:
            where = f"holds a tensor at {tensor_at}" if tensor_at else "is a tensor"
            raise TypeError(f"{dotted(path)} is a kept list, which holds no tensors; the given value {where}")
        self.objects.append((target, list(value) if self.lead else value))

    def run(self) -> None:
        """Write all values and objects."""
        index, targets, values = self.index, self.targets, self.values
        if share_memory(targets, [*values, index] if isinstance(index, Tensor) else values):
            values = [value.clone() for value in values]
            index = index.clone() if isinstance(index, Tensor) else index
        if self.can_fail:
            self.run_each(index, values)
        else:
            self.run_all(index, targets, values)
        for kept, value in self.objects:
            if isinstance(index, Tensor):
                for i, item in zip(integers(index), value, strict=True):
                    kept[i] = item
            else:
                kept[index] = value

    def run_all(self, index: RowIndex, targets: list[Tensor], values: list[Tensor]) -> None:
        """Write all fields, where no write can fail."""
        if not isinstance(index, Tensor) and targets and targets[0].is_cpu:
            torch._foreach_copy_([target[index] for target in targets], values)
            return  # the CUDA kernel of some versions misreads a list of mixed dtypes
        writes: list[partial[Any]] = []
        for target, value in map(viewed_as_bits, targets, values):
            if isinstance(index, Tensor) and can_copy_rows(target, value):
                writes.append(partial(target.index_copy_, 0, index, value))
            else:
                writes.append(partial(target.__setitem__, index, value))
        # A loop in C: Python handles Ctrl-C after the last write, not between two of them.
        deque(map(partial.__call__, writes), 0)

    def run_each(self, index: RowIndex, values: Sequence[Tensor]) -> None:
        """Write one field at a time. If a write fails, undo the writes before it."""
        for path, target in zip(self.paths, self.targets, strict=True):
            if target.layout is torch.strided and is_expanded(target):
                raise RuntimeError(f"{dotted(path)}: the rows of an expanded tensor share memory; clone() it first")
            if target.is_inference() and not torch.is_inference_mode_enabled():  # torch raises after it has written
                raise RuntimeError(f"{dotted(path)} is an inference tensor; clone() it, or use torch.inference_mode()")
        places = [self.places.get(i, index) for i in range(len(self.targets))]
        before = [target[place].clone() for target, place in zip(self.targets, places, strict=True)]
        done = 0
        try:
            for path, target, place, value in zip(self.paths, self.targets, places, values, strict=True):
                done += 1  # first, because an interrupt may follow the write
                try:
                    into, given = viewed_as_bits(target, value) if type(target) is Tensor else (target, value)
                    into[place] = given
                except RuntimeError as error:  # for example, the field is a leaf that requires grad
                    if is_out_of_memory(error):
                        raise
                    raise RuntimeError(f"{dotted(path)}: {error}") from error
        except BaseException:
            with torch.no_grad():
                for target, place, old in zip(self.targets[:done], places, before, strict=False):
                    target[place] = old
            raise


def _is_simple(target: object) -> bool:
    """Whether no write into a tensor can fail, as it can with autograd, inference mode and expanded tensors."""
    return (
        type(target) is Tensor
        and target.layout is torch.strided
        and not target.is_nested
        and target.is_contiguous()
        and not target.requires_grad
        and (not target.is_inference() or torch.is_inference_mode_enabled())
    )
