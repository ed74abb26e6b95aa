"""``d.rows[index] = other``: write a mapping into rows. All values are validated before the first one is written."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._errors import Path, dotted, is_out_of_memory
from .._memory.device import CPU, intercepted
from .._memory.write import FOREACH_CLASSES, Call, Risky, copies, plain, share_memory, write_all
from .._tree.kinds import Written
from .._tree.tree import TreeDict
from .row_values import IN_MEMORY, fitted_field, refuse_other_fields

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
        self.index = index
        places = range(count)[index] if isinstance(index, slice) else index
        self.lead: tuple[int, ...] = () if isinstance(places, int) else (len(places),)
        self.place = Written(index, self.lead, count)
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
                continue
            for one, rows in fitted_field(d, key, given, at, IN_MEMORY):
                made = one.kind.target(one, rows, self.place)
                if isinstance(made, list):
                    self.objects += made
                else:
                    self.add(one.path, *made)

    def add(self, path: Path, target: Tensor, own: Any, value: Tensor) -> None:
        """``own``: the index of the elements, if it is not that of the rows."""
        if self.fast and own is None and plain(target) and type(value) in FOREACH_CLASSES and not value.requires_grad:
            self.targets.append(target if isinstance(self.index, Tensor) else target[self.index])
            self.values.append(value)
        else:
            self.risky.append((path, target, own, value))

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
