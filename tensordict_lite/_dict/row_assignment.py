"""``d.rows[index] = other``: write a mapping into rows. All values are validated before the first one is written."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._errors import DEPTH, Path, TooDeep, dotted, is_out_of_memory
from .._memory.device import intercepted
from .._memory.overlap import is_expanded, share_memory
from .._memory.row_copies import can_copy_rows, viewed_as_bits
from .._tree.convert import find_tensor
from .._tree.tree import TreeDict
from .row_values import RowsToFit, fitted, is_simple

RowIndex = int | slice | Tensor
"""The rows to write: one row, a slice, or int64[n] on the device of the dict."""


def assign_rows(d: TreeDict[Any], index: RowIndex, other: Mapping[str, Any], count: int) -> None:
    """Write ``other`` into the rows of ``d``, which has ``count`` rows. If a value does not fit, write nothing."""
    if not isinstance(other, Mapping):
        raise TypeError(f"rows are set from a mapping with the keys of the dict, got {type(other).__name__}")
    assignment = _Assignment(index, count)
    for path, target, value, fits in fitted(d, other, (), assignment.lead):
        if fits:
            assignment.writes.append((path, target, value))
        elif isinstance(value, RowsToFit):
            assignment.add_ragged(path, target, value)
        elif isinstance(target, Tensor):
            assignment.add_tensor(path, target, value)
        else:
            assignment.add_objects(path, target, value)
    assignment.run()


class _Assignment:
    """The validated writes of one call: tensors with their values, and kept lists with their objects."""

    def __init__(self, index: RowIndex, count: int) -> None:
        self.index, self.count = index, count
        places = range(count)[index] if isinstance(index, slice) else index
        self.lead: tuple[int, ...] = () if isinstance(places, int) else (len(places),)
        self.writes: list[tuple[Path, Tensor, Tensor]] = []
        """The path of each target, the target, and its value."""
        self.objects: list[tuple[list[Any], Any]] = []
        self.places: dict[int, slice | Tensor] = {}
        """For the values of a ragged field, the places of these rows, by the number of the target."""
        self.can_fail = intercepted()

    def add_tensor(self, path: Path, target: Tensor, value: Tensor) -> None:
        """Validate the shape of rows for a tensor."""
        shape = (*self.lead, *target.shape[1:])
        try:
            value = value.expand(shape)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            message = f"{dotted(path)}: expected {list(shape)} for these rows, got {list(value.shape)}"
            raise ValueError(message) from error
        # The kernels for an index tensor do not cast. They would raise after some fields are written.
        self.writes.append((path, target, value.to(target.dtype) if isinstance(self.index, Tensor) else value))
        self.can_fail = self.can_fail or value.requires_grad or not is_simple(target)

    def add_ragged(self, path: Path, field: Any, rows: RowsToFit) -> None:
        """Validate rows for a ragged field. They have the lengths of the rows that they replace."""
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
        self.places[len(self.writes)] = place
        self.writes.append(((*path, "values"), field["values"], rows.values.to(field["values"].dtype)))
        self.can_fail = True

    def add_objects(self, path: Path, target: object, value: Any) -> None:
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
        index = self.index
        targets, values = [target for _, target, _ in self.writes], [value for _, _, value in self.writes]
        if share_memory(targets, [*values, index] if isinstance(index, Tensor) else values):
            values = [value.clone() for value in values]
            index = index.clone() if isinstance(index, Tensor) else index
        if self.can_fail:
            self.run_each(index, values)
        else:
            self.run_all(index, targets, values)
        for kept, value in self.objects:
            if isinstance(index, Tensor):
                for i, item in zip(index.tolist(), value, strict=True):
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
        for path, target, _ in self.writes:
            if target.layout is torch.strided and is_expanded(target):
                raise RuntimeError(f"{dotted(path)}: the rows of an expanded tensor share memory; clone() it first")
            if target.is_inference() and not torch.is_inference_mode_enabled():  # torch raises after it has written
                raise RuntimeError(f"{dotted(path)} is an inference tensor; clone() it, or use torch.inference_mode()")
        done: list[tuple[Tensor, Any, Tensor]] = []
        try:
            for i, ((path, target, _), value) in enumerate(zip(self.writes, values, strict=True)):
                place = self.places.get(i, index)
                try:
                    into, given = viewed_as_bits(target, value) if type(target) is Tensor else (target, value)
                    done.append((into, place, into[place].clone()))  # first, as an interrupt may follow the write
                    into[place] = given
                except RuntimeError as error:  # for example, the field is a leaf that requires grad
                    if is_out_of_memory(error):
                        raise
                    raise RuntimeError(f"{dotted(path)}: {error}") from error
        except BaseException:
            with torch.no_grad():
                for into, place, old in reversed(done):  # in this order, as two fields may share memory
                    with suppress(Exception):  # a field that refused its value may refuse this write too
                        into[place] = old
            raise
