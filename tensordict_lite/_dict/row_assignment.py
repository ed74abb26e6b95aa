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
from .._memory.write import FOREACH_CLASSES, Call, copies, plain, share_memory, write_all
from .._tree.kinds import Written
from .._tree.row_index import row_index
from .._tree.tree import TreeDict
from .row_values import IN_MEMORY, fitted_field, refuse_other_fields


def assign_rows(rows: Any, index: Any, other: Mapping[str, Any]) -> None:
    """Write ``other`` into the rows at ``index``. If a value does not fit, write nothing. ``rows``: the `Rows`."""
    try:
        assignment = _Assignment(rows, index, other, not intercepted())
    except Exception:
        len(rows)  # the error for fields that disagree comes first
        raise
    if not assignment.agree:
        len(rows)
    try:
        assignment.run()
    except RuntimeError as error:
        if not (isinstance(error, NotImplementedError) or any(map(Tensor.is_neg, assignment.targets))):
            raise
        # torch copies into no list with a negative bit in it; it has not written. To ask each field costs too much.
        _Assignment(rows, index, other, False).run()


class _Assignment:
    """The validated writes of one call."""

    __slots__ = ("agree", "calls", "count", "fast", "index", "lead", "risky", "targets", "values")

    def __init__(self, rows: Any, index: Any, other: Any, fast: bool) -> None:
        d: TreeDict[Any] = rows._dict
        first: Any = next(iter(d.values()), None)
        self.fast = fast
        self.agree = True
        """Whether the rows of every field were compared with `count`."""
        self.count: int = first.shape[0] if fast and type(first) is Tensor else len(rows)
        self.index = at = index if type(index) is slice else row_index(index, self.count, d._device)
        """One row, a slice, or int64[n] on the device of the dict."""
        self.lead: tuple[int, ...] = ()
        """The dimension of the rows; ``()`` for one row."""
        if not isinstance(at, int):
            self.lead = (at.shape[0] if isinstance(at, Tensor) else len(range(self.count)[at]),)
        self.targets: list[Tensor] = []
        """For an index tensor the fields, else the views of their rows."""
        self.values: list[Tensor] = []
        self.risky: list[tuple[Path, Tensor, Any, Tensor]] = []
        """The writes that may fail: the path of a field, its tensor, its own index of the rows if it has one, and the
        values."""
        self.calls: list[Call] = []
        """Writes of numbers, and into kept lists."""
        if type(other) is not dict and not isinstance(other, Mapping):
            raise TypeError(f"rows are set from a mapping with the keys of the dict, got {type(other).__name__}")
        self.add_dict(d, other, ())

    def add_dict(self, d: TreeDict[Any], other: Mapping[str, Any], at: Path) -> None:
        """Validate the rows of all fields."""
        refuse_other_fields(d, other, at, False)
        fast, index, count, lead, device = self.fast, self.index, self.count, self.lead, d._device
        targets, values = self.targets, self.values
        encoders, is_view, on_cpu = d._policy.encoders, not isinstance(index, Tensor), device is CPU
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        if encoders:
            self.agree = False
        shape = wanted = None
        for key, field in d.items():
            given = other[key]
            if fast and type(field) is Tensor and (dtype := field.dtype) in NUMBERS:
                # The conditions are those of `plain`, inline: "write a step" of `make guard` mostly waits for them.
                kind = type(given)
                try:
                    if (own := field.shape) != shape:
                        self.agree &= own[0] == count
                        wanted, shape = (*lead, *own[1:]), own
                    if (
                        field.is_contiguous()
                        and not (grad and field.requires_grad)
                        and (inference or not field.is_inference())
                    ):
                        target = field[index] if is_view else field
                        if kind is Tensor:
                            if (
                                given.dtype is dtype
                                and given.shape == wanted
                                and (given.is_cpu if on_cpu else given.device == device)
                                and not (grad and given.requires_grad)
                            ):
                                targets.append(target)
                                values.append(given)
                                continue
                        elif (
                            is_view
                            and (limits := NUMBERS[dtype].get(kind))
                            and limits[0] <= given <= limits[1]
                            and key not in encoders
                        ):
                            self.calls.append(partial(target.fill_, given))
                            continue
                except RuntimeError:  # a nested tensor has no shape
                    pass
            if isinstance(field, TreeDict) and isinstance(given, Mapping):
                self.add_dict(field, given, (*at, key))
                continue
            self.agree = False
            for one, rows in fitted_field(d, key, given, at, IN_MEMORY):
                made = one.kind.target(one, rows, Written(index, lead, count))
                if isinstance(made, list):
                    self.calls += made
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
        index, targets, values = self.index, self.targets, self.values
        every, late, risky = targets, [], []
        if self.risky:
            self.risky.sort(key=_is_taken)  # else a write before the refused one would leave its history in the graph
            late = [value for *_, value in self.risky]
            every = [*targets, *[target for _, target, _, _ in self.risky]]
        if share_memory(every, [*values, *late, index] if isinstance(index, Tensor) else [*values, *late]):
            if not all(t.layout is torch.strided for t in [*targets, *values]):  # to ask each field costs too much
                raise NotImplementedError("torch copies into a list of dense tensors, and from dense tensors")
            values, late = [value.clone() for value in values], [value.clone() for value in late]
            index = index.clone() if isinstance(index, Tensor) else index
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
