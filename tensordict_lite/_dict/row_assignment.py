"""``d.rows[index] = other``: write a mapping into rows. All values are validated before the first one is written."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from .._errors import Path, dotted, is_out_of_memory
from .._memory.device import CPU, intercepted
from .._memory.dtypes import NUMBERS
from .._memory.write import FOREACH_CLASSES, Call, Risky, copies, plain, share_memory, write_all
from .._tree.kinds import Written
from .._tree.tree import TreeDict
from .row_values import IN_MEMORY, fitted_field, refuse_other_fields

RowIndex = int | slice | Tensor
"""The rows to write: one row, a slice, or int64[n] on the device of the dict."""


def assign_rows(d: TreeDict[Any], index: RowIndex, other: Mapping[str, Any], count: int) -> None:
    """Write ``other`` into the rows of ``d``, which has ``count`` rows. If a value does not fit, write nothing."""
    if type(other) is not dict and not isinstance(other, Mapping):
        raise TypeError(f"rows are set from a mapping with the keys of the dict, got {type(other).__name__}")
    assignment = _Assignment(index, count, not intercepted())
    assignment.add_dict(d, other, ())
    try:
        assignment.run()
    except RuntimeError:
        if not any(map(Tensor.is_neg, assignment.targets)):
            raise
        # torch copies into no list with a negative bit in it; it has not written. To ask each field costs too much.
        assignment = _Assignment(index, count, False)
        assignment.add_dict(d, other, ())
        assignment.run()


class _Assignment:
    """The validated writes of one call."""

    __slots__ = ("calls", "count", "fast", "index", "risky", "targets", "values")

    def __init__(self, index: RowIndex, count: int, fast: bool) -> None:
        self.index = index
        self.count = count
        self.fast = fast
        self.targets: list[Tensor] = []
        """For an index tensor the fields, else the views of their rows."""
        self.values: list[Tensor] = []
        self.risky: list[tuple[Path, Tensor, Any, Tensor]] = []
        """The writes that may fail: the path of a field, its tensor, its own index of the rows if it has one, and the
        values."""
        self.calls: list[Call] = []
        """Writes of numbers, and into kept lists."""

    def add_dict(self, d: TreeDict[Any], other: Mapping[str, Any], at: Path) -> None:
        """Validate the rows of all fields."""
        refuse_other_fields(d, other, at, False)
        fast, index, device, encoders = self.fast, self.index, d._device, d._policy.encoders
        is_view, lead = (False, index.shape) if isinstance(index, Tensor) else (True, ())
        on_cpu, grad, inference = device is CPU, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        for key, field in d.items():
            given = other[key]
            if fast and type(field) is Tensor and (dtype := field.dtype) in NUMBERS:
                # The conditions are those of `plain`, inline: "write a step" of `make guard` mostly waits for them.
                kind, limits = type(given), None
                try:
                    if (
                        (kind is Tensor or (is_view and (limits := NUMBERS[dtype].get(kind)) and key not in encoders))
                        and field.layout is torch.strided
                        and field.is_contiguous()
                        and not (grad and field.requires_grad)
                        and (inference or not field.is_inference())
                    ):
                        target = field[index] if is_view else field
                        if limits:
                            if limits[0] <= given <= limits[1]:
                                self.calls.append(partial(target.fill_, given))
                                continue
                        elif (
                            given.dtype is dtype
                            and given.shape == (target.shape if is_view else (*lead, *field.shape[1:]))
                            and (given.is_cpu if on_cpu else given.device == device)
                            and given.layout is torch.strided
                            and not given.requires_grad
                        ):
                            self.targets.append(target)
                            self.values.append(given)
                            continue
                except RuntimeError:  # a nested tensor has no shape
                    pass
            if isinstance(field, TreeDict) and isinstance(given, Mapping):
                self.add_dict(field, given, (*at, key))
                continue
            for one, rows in fitted_field(d, key, given, at, IN_MEMORY):
                made = one.kind.target(one, rows, self.place())
                if isinstance(made, list):
                    self.calls += made
                else:
                    self.add(one.path, *made)

    def place(self) -> Written:
        index, lead = self.index, ()
        if not isinstance(index, int):
            lead = (index.shape[0] if isinstance(index, Tensor) else len(range(self.count)[index]),)
        return Written(index, lead, self.count)

    def add(self, path: Path, target: Tensor, own: Any, value: Tensor) -> None:
        """``own``: the index of the elements, if it is not that of the rows."""
        if self.fast and own is None and plain(target) and type(value) in FOREACH_CLASSES and not value.requires_grad:
            self.targets.append(target if isinstance(self.index, Tensor) else target[self.index])
            self.values.append(value)
        else:
            self.risky.append((path, target, own, value))

    def run(self) -> None:
        """Write all values and objects."""
        index, targets, values = self.index, self.targets, self.values
        self.risky.sort(key=_is_taken)  # else a write before the refused one would leave its history in the graph
        late = [value for *_, value in self.risky]
        every = [*targets, *[target for _, target, _, _ in self.risky]] if late else targets
        if share_memory(every, [*values, *late, index] if isinstance(index, Tensor) else [*values, *late]):
            values, late = [value.clone() for value in values], [value.clone() for value in late]
            index = index.clone() if isinstance(index, Tensor) else index
        risky: list[Risky] = []
        for (path, target, own, _), value in zip(self.risky, late, strict=True):
            place: Any = index if own is None else own
            risky.append((target, place, partial(_write_alone, path, target, place, value)))
        if isinstance(index, Tensor):
            calls = [partial(deque, map(Tensor.index_put_, targets, repeat((index,)), values), 0)]
        else:
            calls = copies(targets, values)
        write_all([*calls, *self.calls], risky)


def _is_taken(write: tuple[Path, Tensor, Any, Tensor]) -> bool:
    """Whether the tensor of a write is no leaf that requires grad, nor a view of one: torch refuses those."""
    base = write[1] if write[1]._base is None else write[1]._base
    return not (base.is_leaf and base.requires_grad)


def _write_alone(path: Path, target: Tensor, place: Any, value: Tensor) -> None:
    try:
        target[place] = value
    except RuntimeError as error:  # for example, the field is a leaf that requires grad
        if is_out_of_memory(error):
            raise
        raise RuntimeError(f"{dotted(path)}: {error}") from error
