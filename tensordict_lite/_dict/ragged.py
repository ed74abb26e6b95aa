"""`Ragged`: rows of any length, as the values of all rows and their offsets."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from .._encoders.protocol import StringEncoder
from .._errors import DeviceMismatchError, Path, described, device_mismatch, dotted
from .._memory.device import CPU, DeviceLike, canonical, resolve
from .._memory.ragged import (
    Selection,
    can_read,
    narrowed,
    offsets_of,
    problem_of,
    problem_of_ends,
    problem_of_lengths,
    selection_of,
)
from .._memory.row_copies import take_rows
from .._memory.transfer import transfer
from .._tree.convert import convert
from .._tree.policy import Policy
from .._tree.tree import builtin_dict
from .._tree.walk import Items
from .device_dict import DeviceDict

Side = Literal["right", "left"]
Known = list[tuple[Tensor, Selection]]
"""What an operation computed from offsets. Fields with the same offsets share it."""


class Ragged(DeviceDict[Tensor]):
    """Rows of any length without padding: a `DeviceDict` of ``values`` and ``offsets``.

    ``values`` has the values of all rows, one row after the other: ``[total, ...]``. ``offsets`` says where each row
    starts and ends: int32 ``[rows + 1]``, from 0 to ``total`` (int64 from 2**31 values on). Row ``i`` is
    ``values[offsets[i] : offsets[i + 1]]``. Kernels of attention for sequences of any length take both as they are, and
    `max_length`, which is known without a synchronization.

    A field of a dict can be ragged. It is one field of the batch: ``d.rows[i]`` gives a view of its row, and ``cat``,
    `collate`, ``d.rows[index]`` and tables keep it ragged. `map`, arithmetic and casts change the values, never the
    offsets. Make one with `from_rows`, or with ``collate(samples, ragged=["ids"])``.

    Args:
        data: a mapping with ``values`` and ``offsets``, and with nothing else.
        device, options: as for `DeviceDict`.

    Raises: ``ValueError`` for other keys, dtypes and shapes, and for offsets that do not ascend from 0 to ``total``.
    Offsets on an accelerator are not read, because that would synchronize: only their dtype and shape are checked.
    ``TypeError`` to delete a key. The errors of `DeviceDict`.
    Cost: a pass over the offsets, if they are on the CPU. Offsets of int64 are copied to int32 if it is large enough.

    Do not write to ``offsets`` in place: fields of the same lengths share them, and `max_length` would be wrong.

    >>> from tensordict_lite import Ragged
    >>> ids = Ragged({"values": torch.tensor([5, 6, 7, 8, 9]), "offsets": torch.tensor([0, 2, 5])})
    >>> ids
    Ragged(cpu, 2 rows, 5 values, 52 B)
    ├─ values   int64[5]
    └─ offsets  int32[3]
    >>> ids.lengths, ids.max_length, ids.padded()
    (tensor([2, 3], dtype=torch.int32), 3, tensor([[5, 6, 0],
            [7, 8, 9]]))
    """

    __module__ = "tensordict_lite"  # as for `DeviceDict`

    _is_ragged = True
    _max_length: int | None = None  # None until it is computed

    def _begin(self, data: Items | None, device: DeviceLike | None, options: Mapping[str, Any]) -> None:
        if data is None:
            raise TypeError("Ragged takes a mapping with 'values' and 'offsets'; Ragged.from_rows(rows) takes rows")
        super()._begin(data, device, options)
        if isinstance(data, Ragged):
            self._max_length = data._max_length

    @classmethod
    def from_rows(cls, rows: Any, device: DeviceLike | None = None) -> Self:
        """Create an instance from a list of rows, or from a nested tensor of torch.

        Args:
            rows: tensors, arrays or lists of numbers. They have one dtype, and may differ in their first dimension.
            device: the device of the result. None: the device of the rows.

        Raises: ``ValueError`` that names the first row of another dtype or shape, and for no rows; ``TypeError`` for
            other values; ``DeviceMismatchError`` for rows on several devices.
        Cost: a copy of the rows. The offsets are computed on the host and copied to the device.

        >>> from tensordict_lite import Ragged
        >>> Ragged.from_rows([[1.0, 2.0], [], [3.0]])["offsets"]
        tensor([0, 2, 2, 3], dtype=torch.int32)
        """
        target = None if device is None else resolve(device)
        given = rows.unbind() if isinstance(rows, Tensor) else rows
        if isinstance(given, (str, Mapping)) or not hasattr(given, "__iter__"):
            raise TypeError(f"from_rows takes a list of rows, got {described(rows)}")
        tensors = _converted(list(given), cls._class_policy)
        values, offsets = joined(tensors)
        if target is not None and values.device != target:
            values = transfer([values], target)[0]
        return cls({"values": values, "offsets": offsets.to(values.device)})

    # --- what it says about its rows ---

    @property
    def lengths(self) -> Tensor:
        """The number of values of each row: int32 ``[rows]``, or int64 as the offsets.

        >>> Ragged.from_rows([[1, 2], [3]]).lengths
        tensor([2, 1], dtype=torch.int32)
        """
        return self["offsets"].diff()

    @property
    def max_length(self) -> int:
        """The number of values of the longest row; 0 without rows.

        Cost: nothing. It moves with the rows, so that no kernel has to wait for it. If it is unknown, as after a
        function of pytree or for offsets that were made on an accelerator, it is computed once, with a synchronization.

        >>> Ragged.from_rows([[1, 2], [3]]).max_length
        2
        """
        if self._max_length is None:
            lengths = self.lengths
            self._max_length = int(lengths.max()) if len(lengths) else 0
        return self._max_length

    def positions(self) -> Tensor:
        """The position of each value in its row: int64 ``[total]``. Cost: no synchronization.

        >>> Ragged.from_rows([[7, 7, 7], [7, 7]]).positions()
        tensor([0, 1, 2, 0, 1])
        """
        values, offsets = self["values"], self["offsets"]
        everything = torch.arange(len(values), device=values.device)
        return everything - offsets[:-1].repeat_interleave(offsets.diff(), output_size=len(values))

    def row_ids(self) -> Tensor:
        """The row of each value: int64 ``[total]``. Cost: no synchronization.

        >>> Ragged.from_rows([[7, 7, 7], [7, 7]]).row_ids()
        tensor([0, 0, 0, 1, 1])
        """
        values, lengths = self["values"], self.lengths
        numbers = torch.arange(len(lengths), device=values.device)
        return numbers.repeat_interleave(lengths, output_size=len(values))

    # --- other forms ---

    def unbind(self) -> list[Tensor]:
        """The rows, as a list of views. Cost: on an accelerator, a synchronization to read the lengths.

        >>> Ragged.from_rows([[1, 2], [3]]).unbind()
        [tensor([1, 2]), tensor([3])]
        """
        return list(self["values"].split(self.lengths.tolist()))

    def with_values(self, values: Tensor) -> Self:
        """The same rows with other values, such as the output of a model. The offsets are shared.

        Args:
            values: a tensor ``[total, ...]`` on the device of this dict, of any dtype.

        Raises: ``ValueError`` for another number of values, ``DeviceMismatchError``. Cost: nothing is copied.

        >>> ids = Ragged.from_rows([[1, 2], [3]])
        >>> ids.with_values(torch.rand(3, 8))["values"].shape
        torch.Size([3, 8])
        """
        self._require_total(values, ("values",))
        if self._device is not None and values.device != self._device:
            raise device_mismatch(("values",), self._device, values.device)
        return self._like({"values": values, "offsets": self["offsets"]}, self._device)

    def padded(self, fill: complex = 0, side: Side = "right") -> Tensor:
        """A dense tensor ``[rows, max_length, ...]``. Autograd records the copy.

        Args:
            fill: the value of the padding.
            side: ``"right"`` pads after each row, ``"left"`` before it.

        Raises: ``ValueError`` for another side. Cost: a copy; no synchronization if `max_length` is known.

        >>> Ragged.from_rows([[1, 2], [3]]).padded(-1, side="left")
        tensor([[ 1,  2],
                [-1,  3]])
        """
        values, places = self["values"], self.positions()
        if _from_left(side):
            places = places + (self.max_length - self.lengths)[self.row_ids()]
        out = values.new_full((len(self["offsets"]) - 1, self.max_length, *values.shape[1:]), fill)
        return out.index_put((self.row_ids(), places), values)

    def mask(self, side: Side = "right") -> Tensor:
        """Where `padded` has values: bool ``[rows, max_length]``. ``side`` as for `padded`.

        Raises and costs as `padded`, without the copy of the values.

        >>> Ragged.from_rows([[1, 2], [3]]).mask()
        tensor([[ True,  True],
                [ True, False]])
        """
        places = torch.arange(self.max_length, device=self["offsets"].device)
        lengths = self.lengths[:, None]
        return places >= self.max_length - lengths if _from_left(side) else places < lengths

    def nested(self) -> Tensor:
        """A nested tensor of torch over these values, of layout ``torch.jagged``. Cost: a copy of the offsets.

        >>> Ragged.from_rows([[1, 2], [3]]).nested().shape[0]
        2
        """
        return torch.nested.nested_tensor_from_jagged(self["values"], self["offsets"].to(torch.int64))

    def __arrow_array__(self, type: Any = None) -> Any:
        """The rows as an Arrow list array, over the same memory where possible. ``pyarrow.array`` calls it."""
        arrays: Any = importlib.import_module("pyarrow")  # optional, and slow to import
        host = self.numpy()
        kind = arrays.ListArray if host["offsets"].dtype == np.int32 else arrays.LargeListArray
        values, shape = arrays.array(host["values"].reshape(-1)), host["values"].shape[1:]
        for size in reversed(shape):
            values = arrays.FixedSizeListArray.from_arrays(values, size)
        made = kind.from_arrays(host["offsets"], values)
        return made if type is None else made.cast(type)

    # --- inserting: `values` and `offsets`, and nothing else ---

    def _commit(
        self,
        staged: Mapping[str, Any],
        device: torch.device | None,
        encoders: Mapping[str, StringEncoder] | None,
        removed: Sequence[str] = (),
        shapes: bool = True,
    ) -> None:
        values, offsets = _parts({**self, **staged})
        longest = self._max_length
        if offsets is not self.get("offsets"):
            known = _checked(values, offsets)
            longest = longest if known is None and not self else known  # of a Ragged that is copied
            offsets = narrowed(offsets, len(values))
        elif len(values) != len(self["values"]):
            raise ValueError(f"expected {len(self['values'])} values, as the offsets say, got {described(values)}")
        super()._commit({"values": values, "offsets": offsets}, device, encoders, removed)
        self._max_length = longest

    def _validate(self, before: Mapping[str, Any] | None = None, *, shapes: bool = True) -> None:
        values, offsets = _parts(self)
        if self._max_length is None:
            self._max_length = _checked(values, offsets)
            builtin_dict.__setitem__(self, "offsets", narrowed(offsets, len(values)))
        elif can_read(offsets) and (reason := problem_of_ends(values, offsets)):
            raise ValueError(reason)

    @classmethod
    def _nested_class(cls, key: str) -> type[DeviceDict[Any]]:
        return DeviceDict  # refused by `_commit`, but not as rows

    def __setitem__(self, key: str | Path, value: Any, /) -> None:
        self._set(key, value)

    def popitem(self) -> NoReturn:
        self._refuse_without("offsets")

    def clear(self) -> None:
        self._refuse_without("values")

    def _refuse_without(self, key: Any) -> NoReturn:
        raise TypeError(f"{key!r} cannot be deleted: a Ragged has values and offsets; select(...) gives a DeviceDict")

    def _untyped_subset(self, items: Any) -> Any:
        return DeviceDict._new(items, self._device, self._policy)

    # --- whole trees and rows ---

    def _like(self, items: Any, device: torch.device | None) -> Self:
        out = super()._like(items, device)
        out._max_length = self._max_length
        return out

    def _replace_data(self, results: Iterator[Any], device: torch.device | None, at: Path = ()) -> Self:
        values, offsets = next(results), self["offsets"]
        self._require_total(values, (*at, "values"))
        if values.device != offsets.device:  # a function may move the values
            offsets = transfer([offsets], canonical(values.device))[0]
        return self._like({"values": values, "offsets": offsets}, device)

    def _require_total(self, values: Any, path: Path) -> None:
        total = len(self["values"])
        if not isinstance(values, Tensor) or not values.dim() or len(values) != total:
            raise ValueError(
                f"{dotted(path)}: expected a tensor [{total}, ...], got {described(values)}; "
                "a ragged field keeps the number of its values"
            )

    def _take(self, at: int | slice | Tensor, known: Known) -> Any:
        """One row, a view; or some rows, a `Ragged`. ``at``: a valid int, a slice, or int64 indices on the device."""
        values, offsets = self["values"], self["offsets"]
        if isinstance(at, int):
            start, end = offsets[at - 1 if at < 0 else at :][:2].tolist()
            return values[start:end]
        rows = next((rows for one, rows in known if one is offsets), None)
        if rows is None:
            rows = self._selection(at)
            known.append((offsets, rows))
        places = rows.positions
        part = values[places] if isinstance(places, slice) else take_rows([values], places)[0]
        out = self._new({"values": part, "offsets": rows.offsets}, self._device, self._policy)
        out._max_length = rows.longest
        return out

    def _places(self, at: int | slice | Tensor) -> tuple[slice | Tensor, Tensor]:
        """Where the values of some rows are, a slice or indices, and the length of each of these rows."""
        rows = self._selection(slice(at, at + 1 or None) if isinstance(at, int) else at)
        return rows.positions, rows.offsets.diff()

    def _selection(self, at: slice | Tensor) -> Selection:
        offsets = self["offsets"]
        if isinstance(at, slice) and at.step not in (None, 1):
            at = torch.arange(len(offsets) - 1, device=offsets.device)[at]
        return selection_of(offsets, at)


def _parts(items: Mapping[str, Any]) -> tuple[Any, Any]:
    """The values and the offsets. Raises ``ValueError`` for other keys, dtypes and shapes. Reads no value."""
    if set(items) != {"values", "offsets"}:
        raise ValueError(f"Ragged has the keys 'values' and 'offsets', got {', '.join(map(repr, items)) or 'no keys'}")
    values, offsets = items["values"], items["offsets"]
    if not torch.compiler.is_compiling() and (reason := problem_of(values, offsets)):
        raise ValueError(reason)
    return values, offsets


def _from_left(side: Any) -> bool:
    if side not in ("right", "left"):
        raise ValueError(f'side is "right" or "left", got {side!r}')
    return side == "left"


def _checked(values: Tensor, offsets: Tensor) -> int | None:
    """The length of the longest row. Raises ``ValueError`` for invalid offsets. None if they cannot be read here."""
    if not can_read(offsets):
        return None
    if reason := problem_of_ends(values, offsets) or problem_of_lengths(offsets):
        raise ValueError(reason)
    return int(offsets.diff().max()) if len(offsets) > 1 else 0


def _converted(rows: list[Any], policy: Policy) -> list[Tensor]:
    """Rows as tensors. An empty list gets the dtype and the shape of the first other row."""
    if not rows:
        raise ValueError("from_rows takes at least one row; without rows, give Ragged values, and [0] as offsets")
    found: list[Any] = [None] * len(rows)
    for i, row in enumerate(rows):
        if not (isinstance(row, (list, tuple)) and not row):
            found[i] = row if isinstance(row, Tensor) else _row(row, policy, i)
    model = next((row for row in found if row is not None), torch.empty(0, device=CPU))
    empty = model.new_empty((0, *model.shape[1:]))
    return [empty if row is None else row for row in found]


def _row(row: Any, policy: Policy, i: int) -> Tensor:
    try:
        if isinstance(row, (str, Mapping)):
            raise TypeError(f"is {described(row)}")
        made = convert(row, CPU, policy, ()).value
    except (TypeError, ValueError) as error:
        raise type(error)(f"row {i}: {error}") from error
    return made


def joined(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The values and the offsets of some rows. Raises ``ValueError`` for rows that cannot be joined."""
    first = rows[0]
    for i, row in enumerate(rows):
        if not row.dim() or row.dtype != first.dtype or row.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"row {i} is {described(row)}, row 0 is {described(first)}; "
                "rows have one dtype, and may differ in their first dimension only"
            )
        if row.device != first.device:
            raise DeviceMismatchError(
                f"row {i} is on {row.device}, row 0 is on {first.device}; move it with .to({str(first.device)!r})",
                expected=first.device,
                actual=row.device,
            )
    return torch.cat(list(rows)), offsets_of([len(row) for row in rows])
