"""The kinds of fields: tensors, codes of strings, ragged fields and kept objects.

A kind has a method for each operation that depends on it. The operations are loops over `fields`, without a question
about the field.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from .._encoders.protocol import StringEncoder, decode_nested, decode_rows, encode_ragged, padding
from .._errors import (
    Path,
    TooDeep,
    add_note,
    described,
    device_mismatch,
    dotted,
    dtype_name,
    is_out_of_memory,
    shown,
    with_path,
)
from .._memory.cast import out_of_range
from .._memory.compare import equal as exactly
from .._memory.dense import is_dense
from .._memory.dtypes import as_bits
from .._memory.ragged import cat_offsets
from .._memory.row_copies import take_rows
from .._memory.write import Call, refusal
from .alike import can_cat, decided_values, fill_width, raise_mismatch, widened
from .convert import refuse_tensor_in_cycle
from .inside import (
    children,
    kept_tensors,
    move_itself,
    names_in,
    nests,
    open_container,
    open_kept,
    path_off,
    stay,
)
from .ragged import Known, Lengths, Made, Ragged, rows_of, validated


class Field(NamedTuple):
    """A field of a dict."""

    path: Path
    owner: Any
    """The dict that holds the field."""
    value: Any
    encoder: StringEncoder | None
    """The encoder of these strings, or of the nested dict of codes that holds the tensor. None for numbers."""
    kind: Kind

    @property
    def strings(self) -> Path:
        """The path of the strings that the field belongs to: that of a nested dict of codes."""
        return self.path[:-1] if self.kind is CODES_PART else self.path

    @property
    def decoder(self) -> StringEncoder | None:
        """The encoder that decodes the value alone. A tensor of a nested dict of codes has none."""
        return None if self.kind is CODES_PART else self.encoder


@dataclass(slots=True)
class At:
    """Some rows of a dict."""

    index: int | slice | Tensor
    """A valid row, a slice, or int64[n] from 0 on, on the device of the dict."""
    count: int
    """The number of rows of the dict."""
    known: Known
    """See `Ragged._take`."""


class Fitted(NamedTuple):
    """Rows for a field: see `Kind.fit`."""

    values: Any
    """A tensor, with or without a dimension for the rows; of a ragged field, the values of all rows."""
    lengths: Tensor | None = None
    """Of a ragged field: the length of each row."""
    is_one: bool = False
    """Of a ragged field: whether the value was one row, not a list."""


class Fit(NamedTuple):
    """How values are fitted to the rows of a field."""

    convert: Callable[[Field, Any], Any]
    """Makes the value that an insert would store."""
    table: bool
    """The field is a column of a table, which holds every number or raises. Tensors may be anywhere."""


@dataclass(slots=True)
class Written:
    """The rows that a call writes."""

    index: int | slice | Tensor
    lead: tuple[int, ...]
    """The dimension of the rows; ``()`` for one row."""
    rows: int
    """The number of rows of the dict."""


class Join(NamedTuple):
    """How the values of fields are joined: see `Kind.join`."""

    verb: str
    """``"stack"`` or ``"cat"``."""
    call: Callable[..., Tensor]
    dim: int
    known: dict[tuple[int, ...], Lengths]
    """The joined lengths of ragged fields, by the ids of the lengths. Fields of the same lengths share them."""


class Home(NamedTuple):
    """Where the values of an insert go."""

    device: torch.device
    copies: Mapping[int, Tensor]
    """Copies on the device, by the ``id`` of the given tensor."""
    made: Made
    moves: bool
    """Whether values on other devices are moved."""

    def tensor(self, given: Tensor, path: Path) -> Tensor:
        """A tensor, or its copy on the device. Raises `Misplaced` if it was not copied."""
        if given.device == self.device:
            return given
        if id(given) in self.copies:
            return self.copies[id(given)]
        raise Misplaced(path, given, self.device)


class Misplaced(Exception):
    """A tensor is not on the device of the dict. The arguments: its path, the tensor and the device of the dict."""


Target = tuple[Tensor, Any, Tensor]
"""A tensor to write to, the index of its elements if it is not that of the rows, and the values."""


class Kind:
    """What the operations do with a field. The defaults are those of a field without tensors and without rows."""

    def count(self, field: Field) -> int | None:
        """The number of rows; None for a field that has none. Raises ``IndexError`` for a tensor of one number."""
        return None

    def require_rows(self, field: Field, count: int) -> None:
        """Raise ``ValueError`` for another number of rows, of a field that does not decide the number."""

    def shape(self, value: Any) -> str:
        """The shape, for messages and looks. A field without rows has none."""
        return ""

    def shown(self, value: Any) -> str:
        """The dtype and shape. Of an object, its class."""
        return f"object {type(value).__name__}"

    def describe(self, values: Sequence[Any]) -> dict[str, Any]:
        """The dtype and shape of a field over several dicts, as plain data. No element is read."""
        return {"object": type(values[0]).__name__}

    def dims(self, field: Field) -> int | None:
        """The number of dimensions that a caller can name; None for a field that has none."""
        return None

    def rows(self, value: Any, at: At) -> Any:
        """Some rows. Views for an int and a slice, copies for indices."""
        return value

    def beginnings(self, value: Any, rows: int, width: int) -> list[Tensor]:
        """The first rows. Of rows of any length: the first ``width`` values of each, and the lengths."""
        return []

    def each(self, value: Any, part: range, count: int) -> Iterable[Any]:
        """Each row of a part of the ``count`` rows, as a view."""
        return [value] * len(part)

    def tolist(self, field: Field, count: int | None) -> Any:
        """The values as Python numbers, strings and lists. ``count``: the number of rows, to list an item for each."""
        return field.value if count is None else [field.value] * count

    def fit(self, field: Field, given: Any, how: Fit) -> Fitted:
        """Convert a value for rows of the field, and validate all but the number of rows. Raises ``ValueError``."""
        return Fitted(given)

    def target(self, field: Field, rows: Fitted, place: Written) -> Target | list[Call]:
        """What to write these rows to, or the calls that write objects. Raises ``ValueError`` for another shape."""
        if not _same_object(rows.values, field.value, exactly):
            raise ValueError(
                f"{dotted(field.path)}: expected the kept value of all rows, {shown(field.value)}, got "
                f"{shown(rows.values)}; rows cannot change it, so replace the whole field"
            )
        return []

    def columns(self, field: Field, rows: Fitted) -> tuple[list[Tensor], int | None]:
        """The tensors for the columns of a table, and the number of rows; None without a dimension for the rows."""
        if not _same_object(rows.values, field.value, exactly):
            raise ValueError(
                f"{dotted(field.path)}: expected the kept value of this table, {shown(field.value)}, got "
                f"{shown(rows.values)}; give it an encoder or make it a tensor, to have one for each row"
            )
        return [], None

    def tensors(self, value: Any) -> list[Tensor]:
        """The tensors of a value."""
        return []

    def placed(self, value: Any, home: Home, path: Path) -> Any:
        """A value that an insert stores: itself, or with copies on the device of the dict."""
        return value

    def join(self, values: Sequence[Any], encoder: StringEncoder | None, path: Path, how: Join) -> Any:
        """Join the values of several dicts, which are all of this kind. Raises an error that names the field."""
        raise NotImplementedError

    def equal(self, ours: Any, theirs: Any, same: Callable[[Tensor, Tensor], bool]) -> bool:
        """Whether a value equals any other. ``same`` compares tensors."""
        return _equals_tensor(ours, theirs) if isinstance(theirs, Tensor) else _same_object(ours, theirs, same)


class DenseKind(Kind):
    """A tensor of numbers."""

    def count(self, field: Field) -> int | None:
        if field.value.is_nested:
            raise TypeError(
                f"{dotted(field.path)}: expected a field with rows, got a nested tensor; store Ragged.from_rows(it)"
            )
        return field.value.shape[0]

    def shape(self, value: Any) -> str:
        return "[jagged]" if value.is_nested else str(list(value.shape))

    def shown(self, value: Any) -> str:
        return f"{dtype_name(value.dtype)}{'[jagged]' if value.is_nested else list(value.shape)}"

    def describe(self, values: Sequence[Any]) -> dict[str, Any]:
        first = values[0]
        shape = [sum(map(len, values)), *(() if first.is_nested else first.shape[1:])] if first.dim() else []
        return {"dtype": dtype_name(first.dtype), "shape": shape}

    def rows(self, value: Any, at: At) -> Any:
        return take_rows([value], at.index)[0] if isinstance(at.index, Tensor) else value[at.index]

    def beginnings(self, value: Any, rows: int, width: int) -> list[Tensor]:
        return [value.detach()[:rows]]

    def each(self, value: Any, part: range, count: int) -> Iterable[Any]:
        # Autograd rejects in-place writes of tensors that require grad into views of `unbind`.
        return map(value.__getitem__, part) if torch.is_grad_enabled() else value[part.start : part.stop].unbind()

    def dims(self, field: Field) -> int | None:
        return field.value.dim()

    def tolist(self, field: Field, count: int | None) -> Any:
        return _plain(field.value)

    def fit(self, field: Field, given: Any, how: Fit) -> Fitted:
        path, column = field.path, field.value
        if column.is_nested:
            raise ValueError(
                f"{dotted(path)}: expected a field whose rows can be set, got a nested tensor; replace the whole field"
            )
        value = given if how.table and isinstance(given, Tensor) else how.convert(field, given)
        if not isinstance(value, Tensor):
            refuse_rows(path, "a tensor", given)
        refuse_unfit(column, value, path, how.table)
        return Fitted(fit_codes(column, value, field.encoder, path))

    def target(self, field: Field, rows: Fitted, place: Written) -> Target | list[Call]:
        column, value = field.value, rows.values
        shape = (*place.lead, *column.shape[1:])
        try:
            value = value.expand(shape)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            message = f"{dotted(field.path)}: expected {list(shape)} for these rows, got {list(value.shape)}"
            raise ValueError(message) from error
        _refuse_write(field.path, column)
        # The kernels for an index tensor do not cast. They would raise after some fields are written.
        value = value.to(column.dtype) if isinstance(place.index, Tensor) else value
        if type(column) is Tensor and as_bits(column) is not column:  # these kernels lack its dtype
            column, value = as_bits(column), as_bits(value.to(column.dtype))
        return column, None, value

    def columns(self, field: Field, rows: Fitted) -> tuple[list[Tensor], int | None]:
        value, shape = rows.values.detach(), field.value.shape[1:]
        lead = value.dim() - len(shape)
        if lead not in (0, 1) or value.shape[lead:] != shape:
            raise ValueError(f"{dotted(field.path)}: {_expected_rows(shape)}, got {described(value)}")
        return [value if lead else value.unsqueeze(0)], value.shape[0] if lead else None

    def tensors(self, value: Any) -> list[Tensor]:
        return [value]

    def placed(self, value: Any, home: Home, path: Path) -> Any:
        return home.tensor(value, path)

    def join(self, values: Sequence[Any], encoder: StringEncoder | None, path: Path, how: Join) -> Any:
        return _join_tensors(values, encoder, path, how, how.dim)

    def equal(self, ours: Any, theirs: Any, same: Callable[[Tensor, Tensor], bool]) -> bool:
        return same(ours, theirs) if isinstance(theirs, Tensor) else _equals_tensor(theirs, ours)


class CodesPartKind(DenseKind):
    """A tensor of a nested dict of codes."""

    def count(self, field: Field) -> int | None:
        """Raises ``ValueError`` for a field that is one string, since the first dimension of its code is no row."""
        encoder = field.encoder
        if encoder is not None and encoder.code_ndim and field.value.dim() <= encoder.code_ndim:
            raise ValueError(
                f"{dotted(field.strings)}: expected a string for each row, got one string; collate([row]) makes a batch"
            )
        return super().count(field)


class CodesKind(CodesPartKind):
    """Codes of strings: a tensor, or a nested dict of them. A string has the dimensions of its code."""

    def dims(self, field: Field) -> int | None:
        return field.value.dim() - (padding(field.encoder, field.value) is not None)

    def tolist(self, field: Field, count: int | None) -> Any:
        assert field.encoder is not None
        return decode_nested(field.encoder, field.value)

    def join(self, values: Sequence[Any], encoder: StringEncoder | None, path: Path, how: Join) -> Any:
        """The last dimension of codes that can be padded holds one string, so it is none to join along."""
        first, dim = values[0], how.dim
        if any(codes.dtype != first.dtype for codes in values):  # torch would promote codes
            raise_mismatch(values, path, "dict", may_differ=lambda codes, first: codes.dtype == first.dtype)
        if padding(encoder, first) is not None:
            dims = first.dim() - 1 + (how.verb == "stack")
            if not -dims <= dim < dims:
                raise IndexError(
                    f"{dotted(path)}: strings of {first.dim() - 1} dimensions have no dim={dim} to {how.verb} along"
                )
            dim %= dims
        return _join_tensors(values, encoder, path, how, dim)


class RaggedKind(Kind):
    """A `Ragged`: rows of any length, of numbers or of codes."""

    def count(self, field: Field) -> int | None:
        return len(field.value)

    def shape(self, value: Any) -> str:
        return f"[{', '.join(map(str, (len(value), '*', *value.values.shape[1:])))}]"

    def shown(self, value: Any) -> str:
        if not isinstance(value.values, Tensor):  # pytree inserts other values
            return super().shown(value)
        return f"{dtype_name(value.dtype)}{self.shape(value)} of {len(value.values)} values"

    def describe(self, values: Sequence[Any]) -> dict[str, Any]:
        shape = [sum(map(len, values)), None, *values[0].values.shape[1:]]
        return {"dtype": dtype_name(values[0].dtype), "shape": shape}

    def rows(self, value: Any, at: At) -> Any:
        return value._take(at.index, at.known)

    def beginnings(self, value: Any, rows: int, width: int) -> list[Tensor]:
        """Gathered on the device without a synchronization. What is after the end of a row is any value."""
        values, offsets = value.values.detach(), value.offsets[: rows + 1]
        at = offsets[:-1, None] + torch.arange(width, device=offsets.device)
        taken = as_bits(values)[at.clamp(max=len(values) - 1)].view(values.dtype) if len(values) else values[at[:, :0]]
        return [taken, offsets.diff()]

    def each(self, value: Any, part: range, count: int) -> Iterable[Any]:
        return value[part.start : part.stop].unbind()

    def tolist(self, field: Field, count: int | None) -> Any:
        if field.encoder is not None:
            return decode_rows(field.encoder, field.value.values, field.value.offsets)
        return list(map(_plain, field.value.unbind()))

    def fit(self, field: Field, given: Any, how: Fit) -> Fitted:
        """``given``: a ragged field, strings, a list with a value for each row, a dense tensor of rows, or one row.

        The padding of strings in a dense tensor is left out.
        """
        column, encoder, path = field.value.values, field.owner._policy.encoders.get(field.path[-1]), field.path
        if isinstance(given, Tensor) and given.is_nested:
            given = Ragged.from_rows(given)
        given = given.tolist() if isinstance(given, np.ndarray) and given.dtype == object else given  # of pandas
        if isinstance(given, Ragged):
            values = _fitting(column, self._row(field, given.values, how), path)
            return Fitted(values, given.lengths.to(values.device))
        if isinstance(given, Mapping):
            refuse_rows(path, "rows of any length", given)
        is_string = encoder is not None and encoder.code_ndim == column.dim()  # a row is one string, a list has many
        if is_string and isinstance(given, (list, tuple)) and not given:
            return Fitted(column[:0], torch.zeros(0, dtype=torch.int64, device=column.device))
        try:
            codes = None if column.dim() > 1 else encode_ragged(encoder, [given] if isinstance(given, str) else given)
        except ValueError as error:
            raise with_path(error, path) from error
        if codes is not None:
            return Fitted(codes[0].to(column.device), codes[1].to(column.device), isinstance(given, str))
        if isinstance(given, (list, tuple)) and given and isinstance(given[0], (list, tuple, np.ndarray, Tensor)):
            values, lengths = rows_of(given, lambda row, _: self._row(field, row, how).to(column.dtype), path)
            if values.dim() == column.dim():
                return Fitted(_fitting(column, values, path), torch.tensor(lengths, device=column.device))
        whole = self._row(field, given, how)
        is_one = whole.dim() <= column.dim()
        rows = whole.unsqueeze(0) if is_one else whole
        if rows.dim() != column.dim() + 1 or rows.shape[2:] != column.shape[1:]:
            _fitting(column, whole, path)  # raises the error
        return Fitted(*_without_padding(rows, None if column.dim() > 1 else padding(encoder, column, rows)), is_one)

    def _row(self, field: Field, row: Any, how: Fit) -> Tensor:
        """One row, or rows in one tensor. An empty list has no dtype of its own."""
        column, path = field.value.values, field.path
        if isinstance(row, (list, tuple)) and not row:
            return column[:0]
        if isinstance(row, Tensor):
            refuse_unfit(column, row, path)  # first, as a tensor on meta cannot be moved
        values = how.convert(field, row)
        refuse_unfit(column, values, path, how.table)
        return fit_codes(column, values, field.encoder, path)

    def target(self, field: Field, rows: Fitted, place: Written) -> Target | list[Call]:
        """The rows keep their lengths."""
        path, ragged, (values, lengths, is_one) = field.path, field.value, rows
        assert lengths is not None
        if place.lead == (0,) and is_one and not values.numel():  # an empty list: no rows
            lengths, is_one = lengths[:0], False
        at, ours = ragged._places(place.index)
        if is_one == bool(place.lead) or len(ours) != len(lengths):
            got = "one row" if is_one else f"{len(lengths)} rows"
            raise ValueError(f"{dotted(path)}: expected {f'{len(ours)} rows' if place.lead else 'one row'}, got {got}")
        differs = (ours != lengths).nonzero()
        if len(differs):
            i = int(differs[0])
            raise ValueError(
                f"{dotted(path)}: expected {int(ours[i])} values for row {i} of these, got {int(lengths[i])}; rows "
                "keep their lengths, so replace the whole field to change them"
            )
        _refuse_write(path, ragged.values)
        return as_bits(ragged.values), at, as_bits(values.to(ragged.dtype))

    def columns(self, field: Field, rows: Fitted) -> tuple[list[Tensor], int | None]:
        assert rows.lengths is not None
        return [rows.values.detach(), rows.lengths], None if rows.is_one else len(rows.lengths)

    def tensors(self, value: Any) -> list[Tensor]:
        return value._tensors()

    def placed(self, value: Any, home: Home, path: Path) -> Any:
        parts = value._tensors()
        if any(part.device != home.device for part in parts):
            value = value._placed((home.tensor(part, path) for part in parts), home.made)
        # Unknown lengths are those of an attribute or of pytree, which validate nothing.
        return value if value._lengths.longest is not None else validated(value, path)

    def join(self, values: Sequence[Any], encoder: StringEncoder | None, path: Path, how: Join) -> Any:
        """The rows of all, one field after the other."""
        if how.verb == "stack" or how.dim:
            hint = "cat([...]) joins the rows" if how.verb == "stack" else "cat along dim=0"
            raise ValueError(f"{dotted(path)}: {how.verb} takes rows of one shape, got a ragged field; {hint}")
        parts = decided_values(values)
        joined = _join_tensors(parts, encoder, path, how, 0)
        ids = tuple([id(field._lengths) for field in values])
        if ids not in how.known:
            longest = [field._lengths.longest for field in values]
            offsets = cat_offsets([field.offsets for field in values], list(map(len, parts)))
            how.known[ids] = Lengths(offsets, None if None in longest else max(longest))
        return Ragged._new(joined, how.known[ids])

    def equal(self, ours: Any, theirs: Any, same: Callable[[Tensor, Tensor], bool]) -> bool:
        if not isinstance(theirs, Ragged):
            return super().equal(ours, theirs, same)
        return exactly(ours.offsets, theirs.offsets) and same(ours.values, theirs.values)


class KeptKind(Kind):
    """A kept object. A list, or an array with dimensions, has an item for each row. All else belongs to all rows."""

    def has_rows(self, value: Any, count: int) -> bool:
        """Whether a kept object has an item for each row."""
        return _has_items(value) and len(value) == count

    def require_rows(self, field: Field, count: int) -> None:
        value: Any = field.value
        if _has_items(value) and len(value) != count:
            raise ValueError(
                f"{dotted(field.path)}: expected a kept {type(value).__name__} with an item for each of the {count} "
                f"rows, got {len(value)}; make it a tuple to keep it whole"
            )

    def shown(self, value: Any) -> str:
        return f"ndarray {value.dtype}{[*value.shape]}" if isinstance(value, np.ndarray) else super().shown(value)

    def rows(self, value: Any, at: At) -> Any:
        if not self.has_rows(value, at.count):
            return value
        if not isinstance(at.index, Tensor):
            return value[at.index]
        return [value[i] for i in at.index.tolist()] if isinstance(value, list) else value[at.index.cpu().numpy()]

    def each(self, value: Any, part: range, count: int) -> Iterable[Any]:
        return value[part.start : part.stop] if self.has_rows(value, count) else super().each(value, part, count)

    def tolist(self, field: Field, count: int | None) -> Any:
        has_rows = count is not None and self.has_rows(field.value, count)
        return field.value if has_rows else super().tolist(field, count)

    def target(self, field: Field, rows: Fitted, place: Written) -> Target | list[Call]:
        path, kept, given = field.path, field.value, rows.values
        if not self.has_rows(kept, place.rows):
            return super().target(field, rows, place)
        if place.lead and not (isinstance(given, (list, np.ndarray)) and len(given) == place.lead[0]):
            raise ValueError(
                f"{dotted(path)}: expected a list of {place.lead[0]} objects for these rows, got {shown(given)}"
            )
        device = field.owner._device
        for tensor in kept_tensors(given):
            if tensor.device != device and device is not None:
                raise device_mismatch(path, device, tensor.device)
        written: Any = copy.copy(kept)  # a clone and the caller may hold the kept value, so it is never changed
        index: Any = place.index.cpu().numpy() if isinstance(place.index, Tensor) else place.index
        try:
            if isinstance(kept, list) and isinstance(place.index, Tensor):
                for i, item in zip(index.tolist(), given, strict=True):
                    written[i] = item
            else:
                written[index] = given
        except (TypeError, ValueError) as error:
            raise with_path(error, path) from error
        return [partial(dict[str, Any].__setitem__, field.owner, path[-1], written)]

    def tensors(self, value: Any) -> list[Tensor]:
        return kept_tensors(value)

    def placed(self, value: Any, home: Home, path: Path) -> Any:
        """A container is copied if its tensors move."""
        try:
            inside = open_container(value)
        except TooDeep:
            refuse_tensor_in_cycle(value, path)
            return value
        tensors = [] if inside is None else inside.tensors()
        if inside is None or (not home.moves and all(tensor.device == home.device for tensor in tensors)):
            return value
        try:
            parts = [home.tensor(tensor, path) for tensor in tensors]
        except Misplaced as error:
            path = path_off(value, path, home.device)
            raise Misplaced(path, *error.args[1:]) from None
        move = partial(move_itself, device=home.device) if home.moves else stay
        try:
            return inside.place(iter(parts), home.device, home.made, move)
        except Exception as error:
            add_note(error, f"the kept value is {dotted(path)}")
            raise

    def join(self, values: Sequence[Any], encoder: StringEncoder | None, path: Path, how: Join) -> Any:
        if how.verb == "stack":
            return list(values)
        if all(isinstance(value, list) for value in values):
            return [item for value in values for item in value]
        if all(isinstance(value, np.ndarray) and value.ndim for value in values):
            return np.concatenate(values)
        for i, value in enumerate(values):
            if not _same_object(values[0], value, exactly):
                raise ValueError(
                    f"{dotted(path)}: expected one kept value in all dicts, got {shown(value)} in dict {i} and "
                    f"{shown(values[0])} in dict 0; make it a list with an item for each row"
                )
        return values[0]


DENSE, CODES, CODES_PART, RAGGED, KEPT = DenseKind(), CodesKind(), CodesPartKind(), RaggedKind(), KeptKind()
NESTED = Kind()
"""A nested dict, whose fields have kinds of their own."""


def kind_of(value: object, encoder: object = None) -> Kind:
    """The kind of a value of a dict. A nested dict with an encoder has the kind of codes."""
    if isinstance(value, Tensor):
        return DENSE if encoder is None else CODES
    if isinstance(value, Ragged):
        return RAGGED
    if nests(value):
        return NESTED if encoder is None else CODES
    return KEPT


def _join_tensors(values: Sequence[Tensor], encoder: object, path: Path, how: Join, dim: int) -> Tensor:
    """Tensors joined by torch; codes of several widths are padded. Raises an error that names the first misfit."""
    try:
        return how.call(values, dim)
    except IndexError as error:  # the dimension does not exist
        raise IndexError(f"{dotted(path)}: {error}") from error
    except (RuntimeError, TypeError) as error:
        if how.verb == "cat" and not values[0].dim():
            message = f"{dotted(path)}: expected a dimension to cat along, got one number a dict; use stack"
            raise ValueError(message) from error
        wide = widened(values, encoder)
        if wide is not None:
            return how.call(wide, dim)
        raise_mismatch(values, path, "dict", error, "", partial(can_cat, along=dim) if how.verb == "cat" else None)


def _equals_tensor(value: object, tensor: Tensor) -> bool:
    """Whether the ``__eq__`` of an object returns True for a tensor, as that of ``unittest.mock.ANY`` does.

    NumPy is not asked: it would copy the tensor from the device. So no number equals a tensor.
    """
    kind: Any = type(value)
    return not isinstance(value, (np.ndarray, np.generic)) and kind.__eq__(value, tensor) is True


def _same_object(x: Any, y: Any, same: Callable[[Tensor, Tensor], bool]) -> bool:
    """Whether two kept objects are equal. An array of results, as of pandas, must be True everywhere."""
    if x is y:
        return True
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return same(x, y)
    if type(x) is type(y) and open_kept(x) is not None:  # a tensor has no truth value
        a, b = children(x), children(y)
        if a is not None and b is not None:
            if list(names_in(x, len(a[0]))) != list(names_in(y, len(b[0]))):
                return False
            return all(_same_object(one, other, same) for one, other in zip(a[0], b[0], strict=True))
    if any(isinstance(value, np.ndarray) for value in (x, y)):
        return np.array_equal(x, y)  # == would broadcast
    return bool(np.all(x == y))


def _plain(tensor: Tensor) -> Any:
    try:
        return [row.tolist() for row in tensor.unbind()] if tensor.is_nested else tensor.tolist()
    except (RuntimeError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{error}; convert it first") from error


def refuse_unfit(field: Tensor, value: Tensor, path: Path, table: bool = False) -> None:
    """Raise ``ValueError`` for a layout or dtype that rows of ``field`` cannot hold. A tensor without values fits any.

    ``table``: raise it for a number that the dtype of ``field`` cannot hold, too. In memory, torch casts the numbers.
    """
    if field.layout is torch.strided and not is_dense(value):
        what = "a nested" if value.is_nested else "a quantized" if value.is_quantized else "a sparse"
        raise ValueError(f"{dotted(path)}: expected a dense tensor, got {what} one; convert it first")
    if value.is_meta and not field.is_meta:
        raise ValueError(f"{dotted(path)}: expected a tensor with values, got one on meta; make it on another device")
    if value.numel() and not torch.can_cast(value.dtype, field.dtype):
        raise ValueError(
            f"{dotted(path)}: expected numbers that {dtype_name(field.dtype)} can hold, got {dtype_name(value.dtype)}; "
            "convert it first"
        )
    if table and (number := out_of_range(value, field.dtype)) is not None:
        raise ValueError(
            f"{dotted(path)}: {dtype_name(field.dtype)} cannot hold {number}; convert the values first, or make the "
            f"column anew as {dtype_name(value.dtype)}"
        )


def fit_codes(field: Tensor, value: Tensor, encoder: object, path: Path) -> Tensor:
    """Pad the codes of strings to the width of ``field``. Any other value is returned itself."""
    number = None if field.dim() < 2 else padding(encoder, field, value)
    if number is None or value.shape[-1] == field.shape[-1]:
        return value
    width, given = field.shape[-1], value.shape[-1]
    if given > width:
        raise ValueError(
            f"{dotted(path)}: a string takes {given} codes of {shown(encoder)}, the rows of this field have {width}; "
            "shorten the string, or make the field anew, wide enough for it"
        )
    return fill_width(value, width, number)


def _has_items(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, np.ndarray) and value.ndim > 0)


def refuse_rows(path: Path, expected: str, given: Any) -> NoReturn:
    """Raise ``ValueError`` for a value that cannot be rows of a field."""
    raise ValueError(f"{dotted(path)}: expected {expected}, got {described(given)}")


def _refuse_write(path: Path, tensor: Tensor) -> None:
    if reason := refusal(tensor, "rows[...] ="):
        raise RuntimeError(f"{dotted(path)} {reason}")


def _expected_rows(shape: Sequence[object]) -> str:
    """What a field with rows of this shape takes."""
    row = ", ".join(map(str, shape))
    return f"expected rows [{', '.join(['...', *map(str, shape)])}] or one row [{row}]"


def _fitting(column: Tensor, values: Tensor, path: Path) -> Tensor:
    if values.dim() != column.dim() or values.shape[1:] != column.shape[1:]:
        expected = _expected_rows(["*", *column.shape[1:]])
        raise ValueError(f"{dotted(path)}: {expected}, got {described(values)}")
    return values


def _without_padding(rows: Tensor, number: int | None) -> tuple[Tensor, Tensor]:
    """The values of rows in a dense tensor, and their lengths. ``number``: the padding of codes, which is left out."""
    count, width = rows.shape[:2]
    if number is None or not width:
        return rows.flatten(0, 1), torch.full((count,), width, device=rows.device)
    used = rows != number
    after_last = width - used.flip(1).to(torch.uint8).argmax(1)  # argmax finds the first maximum
    lengths = torch.where(used.any(1), after_last, 0)
    return rows[torch.arange(width, device=rows.device) < lengths[:, None]], lengths
