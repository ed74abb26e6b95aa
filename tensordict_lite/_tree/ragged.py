"""`Ragged`: rows of any length, as the values of all rows and their offsets. A value of a dict, as a tensor is."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from .._errors import Path, described, device_mismatch, dotted, dtype_name, with_path
from .._memory.arguments import to_arguments
from .._memory.cast import host_array, pin
from .._memory.compare import equal
from .._memory.device import CPU, DeviceLike, canonical, resolve
from .._memory.dtypes import as_bits
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
from . import pytree
from .convert import convert, holds_strings
from .policy import Policy
from .row_index import row_index

Side = Literal["right", "left"]


class Lengths:
    """The lengths of rows. Fields of the same lengths share one object, so that none of them can be wrong alone."""

    __slots__ = ("longest", "offsets")

    def __init__(self, offsets: Tensor, longest: int | None = None) -> None:
        self.offsets = offsets
        self.longest = longest
        """The length of the longest row; None until it is computed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_lengths, (self.offsets, self.longest)


Made = dict[Lengths, Lengths]
"""What takes the place of some lengths in a call. Fields of the same lengths share it."""
Known = list[tuple[Lengths, Selection, Lengths]]
"""For some lengths, the rows that an operation selects, and their lengths. Fields of the same lengths share them."""


@dataclass(init=False, eq=False, repr=False)
class Ragged:
    """Rows of any length without padding: ``values`` and ``offsets``. A value of a dict, as a tensor is.

    ``values`` has the values of all rows, one row after the other: ``[total, ...]``. ``offsets`` says where each row
    starts and ends: int32 ``[rows + 1]``, from 0 to ``total`` (int64 from 2**31 values on). Row ``i`` is
    ``values[offsets[i] : offsets[i + 1]]``. Kernels of attention for sequences of any length take both as they are, and
    `max_length`, which is known without a synchronization.

    - **Rows**: ``len(r)``, ``r[3]``, ``r[8:16]``, ``r[mask_or_indices]``, iteration, `unbind`, ``lengths``,
      ``max_length``, `from_rows`.
    - **For a model**: `positions`, `row_ids`, `with_values`, `padded`, `mask`, `nested`.
    - **As a tensor**: ``device``, ``dtype``, `to`, `cpu`, `numpy`, `tolist`, `pin_memory`, `clone`, `detach`,
      `requires_grad_`, ``==``, which gives one bool.

    In a dict it is one field of the batch: ``d.rows[i]`` has a view of its row. ``cat``, `collate`, ``d.rows[index]``
    and tables keep it ragged. `DeviceDict.map`, arithmetic and casts change the values, never the offsets. Fields of
    the same lengths share the offsets, also after a move. Make one with `from_rows`, or with
    ``collate(samples, ragged=["ids"])``.

    Args:
        values: a tensor, an array or a list of numbers.
        offsets: the same, int32 or int64, on the device of the values.

    Raises: ``ValueError`` for other dtypes and shapes, and for offsets that do not ascend from 0 to ``total``.
    Offsets on an accelerator are not read, because that would synchronize: only their dtype and shape are checked.
    ``DeviceMismatchError``.
    Cost: a pass over the offsets, if they are on the CPU. Offsets of int64 are copied to int32 if it is large enough.

    Do not write to ``offsets`` in place: `max_length` would be wrong. Only `DeviceDict.fill_` writes both.

    >>> from tensordict_lite import Ragged
    >>> ids = Ragged(torch.tensor([5, 6, 7, 8, 9]), torch.tensor([0, 2, 5]))
    >>> ids
    Ragged(cpu, 2 rows, int64, 5 values)
    >>> len(ids), ids[1], ids.max_length
    (2, tensor([7, 8, 9]), 3)
    """

    __module__ = "tensordict_lite"  # as for `DeviceDict`

    values: Tensor
    offsets: Tensor

    if not TYPE_CHECKING:  # a property, and for `dataclass` a field: frameworks get and set the fields of a dataclass

        @property
        def offsets(self) -> Tensor:
            return self._lengths.offsets

        @offsets.setter
        def offsets(self, offsets: Tensor) -> None:
            self._lengths = Lengths(offsets)

        @property
        def rows(self) -> Any:
            raise AttributeError(
                "a Ragged is a value and has no .rows: r[3] is a row, r[2:5] and r[indices] are rows, len(r) counts "
                'them; for the methods of d.rows, give it a key: DeviceDict({"x": r}).rows'
            )

    def __init__(self, values: Any, offsets: Any) -> None:
        values, offsets = _as_tensor(values, "values"), _as_tensor(offsets, "offsets")
        if torch.compiler.is_compiling():
            longest = None
        else:
            longest = checked(values, offsets)
            offsets = narrowed(offsets, len(values))
        self.values = values
        self._lengths = Lengths(offsets, longest)

    @classmethod
    def _new(cls, values: Any, lengths: Lengths) -> Self:
        """Create an instance without validation."""
        out = cls.__new__(cls)
        out.values = values
        out._lengths = lengths
        return out

    @classmethod
    def from_rows(cls, rows: Any, device: DeviceLike | None = None) -> Self:
        """Create an instance from a list of rows, or from a nested tensor of torch.

        Args:
            rows: tensors, arrays or lists of numbers. They have one dtype, and may differ in their first dimension.
                Lists are converted together, so ints beside floats become floats.
            device: the device of the result. None: the device of the rows.

        Raises: ``ValueError`` that names the first row of another dtype or shape, and for no rows; ``TypeError`` for
            other values; ``DeviceMismatchError`` for rows on several devices.
        Cost: a copy of the rows. The offsets are computed on the host and copied to the device.

        >>> from tensordict_lite import Ragged
        >>> Ragged.from_rows([[1.0, 2.0], [], [3.0]]).offsets
        tensor([0, 2, 2, 3], dtype=torch.int32)
        """
        target = None if device is None else resolve(device)
        given = rows.unbind() if isinstance(rows, Tensor) else rows
        if isinstance(given, (str, Mapping)) or not hasattr(given, "__iter__"):
            raise TypeError(f"from_rows takes a list of rows, got {described(rows)}")
        given = list(given)
        if not given:
            raise ValueError("from_rows takes at least one row, got none; without rows, Ragged(values, [0])")
        values, lengths = rows_of(given, _as_row)
        if target is not None and values.device != target:
            values = transfer([values], target)[0]
        return cls._new(values, Lengths(offsets_of(lengths).to(values.device), max(lengths)))

    # --- what it says about its rows ---

    def __len__(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def lengths(self) -> Tensor:
        """The number of values of each row: int32 ``[rows]``, or int64 as the offsets.

        >>> Ragged.from_rows([[1, 2], [3]]).lengths
        tensor([2, 1], dtype=torch.int32)
        """
        return self.offsets.diff()

    @property
    def max_length(self) -> int:
        """The number of values of the longest row; 0 without rows.

        Cost: nothing. It moves with the rows, so that no kernel has to wait for it. If it is unknown, as after a
        function of pytree or for offsets that were made on an accelerator, it is computed once, with a synchronization.

        >>> Ragged.from_rows([[1, 2], [3]]).max_length
        2
        """
        if self._lengths.longest is None:
            lengths = self.lengths
            # Not `int(...)`: it would be a constant of an exported program.
            longest: Any = lengths.max().item() if lengths.shape[0] else 0
            if torch.compiler.is_exporting():  # the program must not keep a length of its example
                torch._check(longest >= 0)
                return longest
            self._lengths.longest = longest
        return self._lengths.longest

    @property
    def device(self) -> torch.device:
        """The device of the values and of the offsets.

        >>> Ragged.from_rows([[1, 2], [3]]).device
        device(type='cpu')
        """
        return self.values.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values.

        >>> Ragged.from_rows([[1, 2], [3]]).dtype
        torch.int64
        """
        return self.values.dtype

    def positions(self) -> Tensor:
        """The position of each value in its row: int64 ``[total]``. Cost: no synchronization.

        >>> Ragged.from_rows([[7, 7, 7], [7, 7]]).positions()
        tensor([0, 1, 2, 0, 1])
        """
        # Here and below: not `len(values)`, which would make the number of values a constant of an exported program.
        total, offsets = self.values.shape[0], self.offsets
        everything = torch.arange(total, device=self.values.device)
        return everything - offsets[:-1].repeat_interleave(offsets.diff(), output_size=total)

    def row_ids(self) -> Tensor:
        """The row of each value: int64 ``[total]``. Cost: no synchronization.

        >>> Ragged.from_rows([[7, 7, 7], [7, 7]]).row_ids()
        tensor([0, 0, 0, 1, 1])
        """
        numbers = torch.arange(self.offsets.shape[0] - 1, device=self.values.device)
        return numbers.repeat_interleave(self.lengths, output_size=self.values.shape[0])

    # --- rows ---

    def __getitem__(self, index: Any) -> Any:
        """Return a row, a view of the values, or several rows as a `Ragged`. ``index``: an int, a slice, a mask or
        indices.

        Slices without a step give views. Masks and indices (tensor, array, list or range) give copies.

        Raises: ``IndexError`` for a row that is out of range, ``TypeError`` for an invalid index.
        Cost: a view, or a copy of these rows. On an accelerator, a synchronization.

        >>> r = Ragged.from_rows([[1, 2], [3], []])
        >>> r[0], r[1:].tolist(), r[[1, 0]].tolist()
        (tensor([1, 2]), [[3], []], [[3], [1, 2]])
        """
        at = index if type(index) is slice else row_index(index, len(self), self.device)
        return self._take(at, [])

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.unbind())

    def unbind(self) -> list[Tensor]:
        """The rows, as a list of views. Cost: on an accelerator, a synchronization to read the lengths.

        >>> Ragged.from_rows([[1, 2], [3]]).unbind()
        [tensor([1, 2]), tensor([3])]
        """
        return list(self.values.split(self.lengths.tolist()))

    def _take(self, at: int | slice | Tensor, known: Known) -> Any:
        """One row, a view; or some rows, a `Ragged`. ``at``: a valid int, a slice, or int64 indices on the device."""
        if isinstance(at, int):
            start, end = self.offsets[at - 1 if at < 0 else at :][:2].tolist()
            return self.values[start:end]
        found = next((one for one in known if one[0] is self._lengths), None)
        if found is None:
            rows = self._selection(at)
            found = self._lengths, rows, Lengths(rows.offsets, rows.longest)
            known.append(found)
        _, rows, lengths = found
        places = rows.positions
        part = self.values[places] if isinstance(places, slice) else take_rows([self.values], places)[0]
        return self._new(part, lengths)

    def _places(self, at: int | slice | Tensor) -> tuple[slice | Tensor, Tensor]:
        """Where the values of some rows are, a slice or indices, and the length of each of these rows."""
        rows = self._selection(slice(at, at + 1 or None) if isinstance(at, int) else at)
        return rows.positions, rows.offsets.diff()

    def _selection(self, at: slice | Tensor) -> Selection:
        if isinstance(at, slice) and at.step not in (None, 1):
            at = torch.arange(len(self), device=self.device)[at]
        return selection_of(self.offsets, at)

    # --- other forms ---

    def with_values(self, values: Tensor) -> Self:
        """The same rows with other values, such as the output of a model. The offsets are shared.

        Args:
            values: a tensor ``[total, ...]`` on the same device, of any dtype.

        Raises: ``ValueError`` for another number of values, ``DeviceMismatchError``. Cost: nothing is copied.

        >>> ids = Ragged.from_rows([[1, 2], [3]])
        >>> ids.with_values(torch.rand(3, 8)).values.shape
        torch.Size([3, 8])
        """
        self._require_total(values, ("values",))
        if values.device != self.device:
            raise device_mismatch(("values",), self.device, values.device, "move them first", "the Ragged")
        return self._new(values, self._lengths)

    def _require_total(self, values: Any, path: Path) -> None:
        total = self.values.shape[0]
        if not isinstance(values, Tensor) or not values.dim() or values.shape[0] != total:
            raise ValueError(
                f"{dotted(path)}: expected a tensor [{total}, ...], got {described(values)}; "
                "a ragged field keeps the number of its values"
            )

    def _replace_data(self, results: Iterator[Any], device: object, inside: object, made: Made, at: Path) -> Self:
        """`with_values` for the next of ``results``, on any device. ``made``: the lengths that were moved."""
        if not isinstance(self.values, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]  (pytree inserts others)
            return self
        values, lengths = next(results), self._lengths
        self._require_total(values, at)
        if values.device != self.device:
            if lengths not in made:
                made[lengths] = Lengths(transfer([self.offsets], canonical(values.device))[0], lengths.longest)
            lengths = made[lengths]
        return self._new(values, lengths)

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
        values, places, longest = self.values, self.positions(), self.max_length
        if _from_left(side):
            places = places + (longest - self.lengths)[self.row_ids()]
        out = values.new_full((self.offsets.shape[0] - 1, longest, *values.shape[1:]), fill)
        out = as_bits(out).index_put((self.row_ids(), places), as_bits(values))
        return out if out.dtype == values.dtype else out.view(values.dtype)  # autograd does not record this view

    def mask(self, side: Side = "right") -> Tensor:
        """Where `padded` has values: bool ``[rows, max_length]``. ``side`` as for `padded`.

        Raises and costs as `padded`, without the copy of the values.

        >>> Ragged.from_rows([[1, 2], [3]]).mask()
        tensor([[ True,  True],
                [ True, False]])
        """
        longest = self.max_length
        places, lengths = torch.arange(longest, device=self.device), self.lengths[:, None]
        return places >= longest - lengths if _from_left(side) else places < lengths

    def nested(self) -> Tensor:
        """A nested tensor of torch over these values, of layout ``torch.jagged``. Cost: a copy of the offsets.

        >>> Ragged.from_rows([[1, 2], [3]]).nested().shape[0]
        2
        """
        return torch.nested.nested_tensor_from_jagged(self.values, self.offsets.to(torch.int64))

    def tolist(self) -> list[Any]:
        """The rows as lists of Python numbers. Cost: a copy to the host, with a synchronization.

        >>> Ragged.from_rows([[1, 2], [3]]).tolist()
        [[1, 2], [3]]
        """
        return [row.tolist() for row in self.cpu().unbind()]

    def numpy(self, copy: bool = False) -> dict[str, Any]:
        """A dict with the ``values`` and the ``offsets`` as NumPy arrays, as `DeviceDict.numpy` makes them.

        Raises the errors of `DeviceDict.numpy`, and has its cost.

        >>> Ragged.from_rows([[1, 2], [3]]).numpy()
        {'values': array([1, 2, 3]), 'offsets': array([0, 2, 3], dtype=int32)}
        """
        values, offsets = [host_array(tensor, copy) for tensor in self.cpu()._tensors()]
        return {"values": values, "offsets": offsets}

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

    # --- device, dtype and memory, as on a tensor ---

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move the rows to a device, cast the values to a dtype, or both: as `DeviceDict.to`.

        Returns ``self`` if nothing changes. Raises the errors of `DeviceDict.to`, and has its cost.

        >>> r = Ragged.from_rows([[1.0, 2.0], [3.0]])
        >>> r.to("cpu") is r, r.to("meta").max_length, r.to(torch.float64).dtype
        (True, 2, torch.float64)
        """
        device, dtype, non_blocking, copy = to_arguments(args, kwargs)
        target = None if device is None else resolve(device)
        tensors = self._tensors()
        moved = transfer(tensors, target, dtype, non_blocking, copy, canonical(self.device))
        return self if all(map(is_, tensors, moved)) else self._placed(iter(moved), {})

    def cpu(self) -> Self:
        """``to("cpu")``. Raises the errors of `to`, and has its cost.

        >>> Ragged.from_rows([[1, 2], [3]]).cpu().device
        device(type='cpu')
        """
        return self.to(CPU)

    def half(self) -> Self:
        """``to(torch.float16)``. Raises the errors of `to`, and has its cost.

        >>> Ragged.from_rows([[1.0, 2.0], [3.0]]).half().dtype
        torch.float16
        """
        return self.to(torch.float16)

    def float(self) -> Self:
        """``to(torch.float32)``. Raises the errors of `to`, and has its cost.

        >>> Ragged.from_rows([[1.0, 2.0], [3.0]]).float().dtype
        torch.float32
        """
        return self.to(torch.float32)

    def double(self) -> Self:
        """``to(torch.float64)``. Raises the errors of `to`, and has its cost.

        >>> Ragged.from_rows([[1.0, 2.0], [3.0]]).double().dtype
        torch.float64
        """
        return self.to(torch.float64)

    def bfloat16(self) -> Self:
        """``to(torch.bfloat16)``. Raises the errors of `to`, and has its cost.

        >>> Ragged.from_rows([[1.0, 2.0], [3.0]]).bfloat16().dtype
        torch.bfloat16
        """
        return self.to(torch.bfloat16)

    def pin_memory(self, device: DeviceLike | None = None) -> Self:
        """Copy the tensors to pinned memory, as `DeviceDict.pin_memory`. ``device`` is ignored.

        Raises: torch's ``RuntimeError`` without an accelerator. Cost: two allocations and copies.

        >>> r = Ragged.from_rows([[1, 2], [3]])
        >>> pinned = r.pin_memory() if torch.cuda.is_available() else r
        """
        return self._placed(map(pin, self._tensors()), {})

    def clone(self) -> Self:
        """Copy the values and the offsets. Autograd records the copy.

        >>> r = Ragged.from_rows([[1, 2], [3]])
        >>> r.clone().values.add_(1) is not None, r.values
        (True, tensor([1, 2, 3]))
        """
        return self._placed(map(torch.clone, self._tensors()), {})

    def detach(self) -> Self:
        """Detach the values from the autograd graph. Nothing is copied, and the offsets are shared.

        >>> Ragged.from_rows([[1.0]]).requires_grad_().detach().values.requires_grad
        False
        """
        return self._new(self.values.detach(), self._lengths)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set ``requires_grad`` of the values, in place. Returns ``self``. Raises: torch's error, as for integers.

        >>> Ragged.from_rows([[1.0]]).requires_grad_().values.requires_grad
        True
        """
        self.values.requires_grad_(requires_grad)
        return self

    # --- what the engine sees: in moves, packs, manifests and messages ---

    _holds_tensors = True  # see `open_value`

    def _tensors(self) -> list[Tensor]:
        found: list[Tensor] = []
        self._list_tensors(found, set())
        return found

    _tensors_inside = _tensors

    def _list_tensors(self, found: list[Tensor], known: set[Lengths], *_: object) -> None:
        """Append the values and the offsets to ``found``, and the lengths to ``known``. Shared offsets come once."""
        if isinstance(self.values, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]  (pytree inserts others)
            found.append(self.values)
        lengths = self._lengths
        if lengths not in known:
            known.add(lengths)
            if isinstance(lengths.offsets, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                found.append(lengths.offsets)

    def _placed(self, tensors: Iterator[Tensor], made: Made, *_: object) -> Self:
        """The same rows with the next of ``tensors`` in place of those of `_list_tensors`."""
        values = next(tensors) if isinstance(self.values, Tensor) else self.values  # pyright: ignore
        old = self._lengths
        if old not in made:
            offsets = next(tensors) if isinstance(old.offsets, Tensor) else old.offsets  # pyright: ignore
            made[old] = old if offsets is old.offsets else Lengths(offsets, old.longest)
        return self._new(values, made[old])

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_ragged, (self.values, self._lengths)

    # --- comparing and display ---

    __hash__ = None  # pyright: ignore[reportAssignmentType]  (it can change)

    def __eq__(self, other: object, /) -> bool:
        if not isinstance(other, Ragged):
            return NotImplemented
        return equal(self.offsets, other.offsets) and equal(self.values, other.values)

    def describe(self, progress: Any = None) -> Any:
        """Statistics of the values, and of the lengths of the rows.

        Returns a `Description`, and takes the argument of `DeviceDict.describe`, which shows the strings of codes too.

        Cost: reads every value once, in chunks. One synchronization on an accelerator.

        >>> Ragged.from_rows([[1, 2], [3]]).describe().tolist()[0]["mean"]
        2.0
        """
        look: Any = importlib.import_module("tensordict_lite._look.describe")  # above this module
        return look.of_ragged(self, progress)

    def __repr__(self) -> str:
        if not (isinstance(self.values, Tensor) and isinstance(self.offsets, Tensor)):  # pyright: ignore
            return f"Ragged({self.values!r}, {self.offsets!r})"
        total, *shape = self.values.shape
        rows, values = [f"{n} {what}{'' if n == 1 else 's'}" for n, what in ((len(self), "row"), (total, "value"))]
        of = f" of shape {shape}" if shape else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"Ragged({self.device}, {rows}, {dtype}, {values}{of})"


pytree.register_fields(Ragged, ("values", "offsets"), lambda values, offsets: Ragged._new(values, Lengths(offsets)))


# --- validation and conversion ---


def checked(values: Any, offsets: Any) -> int | None:
    """The length of the longest row. Raises ``ValueError`` for invalid offsets. None if they cannot be read here."""
    if reason := problem_of(values, offsets):
        raise ValueError(reason)
    if offsets.device != values.device:
        raise device_mismatch("'offsets'", values.device, offsets.device, "move one of them with .to(...)", "'values'")
    if not can_read(offsets):
        return None
    if reason := problem_of_ends(values, offsets) or problem_of_lengths(offsets):
        raise ValueError(reason)
    return int(offsets.diff().max()) if len(offsets) > 1 else 0


def validated(rows: Ragged, path: Path) -> Ragged:
    """``rows`` themselves, whose tensors are from a file, pytree or an attribute. Raises ``ValueError`` with ``path``.

    Data that cannot be read here is trusted.
    """
    lengths = rows._lengths
    try:
        longest = checked(rows.values, lengths.offsets)
    except (RuntimeError, ValueError) as error:
        if not path:
            raise
        raise with_path(error, path) from error
    if longest is not None:
        lengths.longest = longest
        lengths.offsets = narrowed(lengths.offsets, len(rows.values))
    return rows


def rebuild_lengths(offsets: Any, longest: Any) -> Lengths:
    """Rebuild the lengths of a pickled `Ragged`. `rebuild_ragged` validates them."""
    if not (longest is None or (type(longest) is int and longest >= 0)):
        raise ValueError("the longest row of a pickled Ragged is damaged")
    return Lengths(offsets, longest)


def rebuild_ragged(values: Any, lengths: Any) -> Ragged:
    """Rebuild a pickled `Ragged`. Takes data only, and validates the data, since a file may be damaged or forged."""
    if type(lengths) is not Lengths:
        raise TypeError(f"expected the lengths of a pickled Ragged, got {described(lengths)}")
    rows = Ragged._new(values, lengths)
    known = isinstance(values, Tensor) and isinstance(lengths.offsets, Tensor)  # a pytree may have other leaves
    return validated(rows, ()) if known else rows


def _from_left(side: Any) -> bool:
    if side not in ("right", "left"):
        raise ValueError(f'side is "right" or "left", got {side!r}')
    return side == "left"


def _as_tensor(value: Any, name: str) -> Any:
    if isinstance(value, (list, tuple, np.ndarray)):
        return convert(value, CPU, Policy(), (name,)).value
    return value


def rows_of(
    given: Sequence[Any], convert_one: Callable[[Any, int], Tensor], path: Path = ()
) -> tuple[Tensor, list[int]]:
    """The values of a list of rows, and the length of each row. Lists are converted in one call.

    ``convert_one``: makes a tensor of a row, given its number too; also of all rows in one list. An empty list gets
    the dtype and the shape of the first other row. Raises the error of the first row that cannot be converted.
    """
    if all(isinstance(row, (list, tuple)) for row in given):
        with suppress(TypeError, ValueError):  # the conversion of each row tells more
            return convert_one([*chain.from_iterable(given)], 0), list(map(len, given))
    kept = [None if isinstance(row, (list, tuple)) and not row else convert_one(row, i) for i, row in enumerate(given)]
    model = next((row for row in kept if row is not None), torch.empty(0, device=CPU))
    empty = model.new_empty((0, *model.shape[1:]))
    rows, where = [empty if row is None else row for row in kept], f"{dotted(path)}: " if path else ""
    first = rows[0]
    for i, row in enumerate(rows):
        if not row.dim() or row.dtype != first.dtype or row.shape[1:] != first.shape[1:]:
            like = f"{dtype_name(first.dtype)}[{', '.join(['*', *map(str, first.shape[1:])])}]"
            raise ValueError(
                f"{where}row {i}: expected {like}, as row 0, got {described(row)}; rows have one dtype, and may "
                "differ in their first dimension only"
            )
        if row.device != first.device:
            raise device_mismatch(
                f"row {i}", first.device, row.device, f"move it with .to({str(first.device)!r})", "row 0"
            )
    return torch.cat(rows), list(map(len, rows))


def _as_row(given: Any, i: int) -> Tensor:
    if isinstance(given, Tensor):
        return given
    try:
        if isinstance(given, Mapping) or holds_strings(given):
            raise TypeError(f"expected numbers, got {described(given)}; collate(samples, ragged=[key]) encodes strings")
        return convert(given, CPU, Policy(), ("row",)).value
    except (TypeError, ValueError) as error:
        raise type(error)(f"row {i}: {error}") from error
