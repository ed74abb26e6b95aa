"""``d.rows[index] = other``: write a mapping into rows. All values are validated before the first one is written."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._errors import DEPTH, Path, TooDeep, dotted, is_out_of_memory
from .._memory.device import CPU, intercepted
from .._memory.dtypes import as_bits
from .._memory.write import FOREACH_CLASSES, Call, Risky, copies, plain, refusal, share_memory, write_all
from .._tree.convert import find_tensor
from .._tree.tree import TreeDict
from .row_values import RowsToFit, fitted_field, refuse_other_fields

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
    """The validated writes of one call."""

    def __init__(self, index: RowIndex, count: int) -> None:
        self.index, self.count = index, count
        places = range(count)[index] if isinstance(index, slice) else index
        self.lead: tuple[int, ...] = () if isinstance(places, int) else (len(places),)
        self.fast = not intercepted()
        self.targets: list[Tensor] = []
        """For an index tensor the fields, else the views of their rows."""
        self.values: list[Tensor] = []
        self.risky: list[tuple[Path, Tensor, Any, Tensor]] = []
        """The writes that may fail: the path of a field, its tensor, its own index of the rows if it has one, and the
        values."""
        self.objects: list[Call] = []
        """Writes into kept lists."""

    def add_dict(self, d: TreeDict[Any], other: Mapping[str, Any], at: Path) -> None:
        """Validate the rows of all fields."""
        refuse_other_fields(d, other, at, False)
        fast, device, lead, index = self.fast, d._device, self.lead, self.index
        views, on_cpu = not isinstance(index, Tensor), device is CPU
        for key, field in d.items():
            given = other[key]
            if fast and type(given) is Tensor and plain(field):
                target = field[index] if views else field
                if (
                    given.layout is torch.strided
                    and not given.is_nested
                    and given.shape == (target.shape if views else (*lead, *target.shape[1:]))
                    and given.dtype is field.dtype
                    and (given.is_cpu if on_cpu else given.device == device)
                    and not given.requires_grad
                ):
                    self.targets.append(target)
                    self.values.append(given)
                    continue
            if isinstance(field, TreeDict) and isinstance(given, Mapping):
                self.add_dict(field, given, (*at, key))
            else:
                for path, target, value in fitted_field(d, key, given, at, False):
                    if isinstance(value, RowsToFit):
                        self.add_ragged(path, target, value)
                    elif isinstance(target, Tensor):
                        self.add_tensor(path, target, value)
                    else:
                        self.add_objects(path, target, value)

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
        if reason := refusal(target, "rows[...] ="):
            raise RuntimeError(f"{dotted(path)} {reason}")
        # The kernels for an index tensor do not cast. They would raise after some fields are written.
        value = value.to(target.dtype) if isinstance(self.index, Tensor) else value
        if type(target) is Tensor and as_bits(target) is not target:  # these kernels lack its dtype
            target, value = as_bits(target), as_bits(value.to(target.dtype))
        if self.fast and plain(target) and type(value) in FOREACH_CLASSES and not value.requires_grad:
            self.targets.append(target if isinstance(self.index, Tensor) else target[self.index])
            self.values.append(value)
        else:
            self.risky.append((path, target, None, value))

    def add_ragged(self, path: Path, field: Any, rows: RowsToFit) -> None:
        """Validate rows for a ragged field. They have the lengths of the rows that they replace."""
        if self.lead == (0,) and rows.is_one and not rows.values.numel():  # an empty list: no rows
            rows = RowsToFit(rows.values, rows.lengths[:0], False)
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
        if reason := refusal(field.values, "rows[...] ="):
            raise RuntimeError(f"{dotted(path)} {reason}")
        into, values = as_bits(field.values), as_bits(rows.values.to(field.dtype))
        self.risky.append((path, into, place, values))

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
        index: Any = self.index
        pairs = zip(index.tolist(), list(value), strict=True) if isinstance(index, Tensor) else [(index, value)]
        self.objects += [partial(target.__setitem__, i, item) for i, item in pairs]

    def run(self) -> None:
        """Write all values and objects."""
        index, count = self.index, len(self.targets)
        targets, values = self.targets, self.values
        if self.risky:
            targets = [*targets, *[target for _, target, _, _ in self.risky]]
            values = [*values, *[value for *_, value in self.risky]]
        if share_memory(targets, [*values, index] if isinstance(index, Tensor) else values):
            values = [value.clone() for value in values]
            index = index.clone() if isinstance(index, Tensor) else index
        risky: list[Risky] = []
        for (path, target, own, _), value in zip(self.risky, values[count:], strict=True):
            place: Any = index if own is None else own
            risky.append((target, place, partial(_write_alone, path, target, place, value)))
        if isinstance(index, Tensor):
            calls = [
                partial(target.index_put_, (index,), value) for target, value in zip(self.targets, values, strict=False)
            ]
        else:
            calls = copies(self.targets, values[:count])
        write_all([*calls, *self.objects], risky)


def _write_alone(path: Path, target: Tensor, place: Any, value: Tensor) -> None:
    try:
        target[place] = value
    except RuntimeError as error:  # for example, the field is a leaf that requires grad
        if is_out_of_memory(error):
            raise
        raise RuntimeError(f"{dotted(path)}: {error}") from error
