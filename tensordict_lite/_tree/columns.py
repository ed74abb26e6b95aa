"""Convert columns of pandas, Polars and Arrow. This module imports none of them; it uses those that are imported."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


def table_columns(data: object) -> Mapping[str, Any] | None:
    """The columns of an Arrow table or record batch by name; None for any other object.

    A DataFrame already has ``keys``, so it gives None. Raises ``ValueError`` if two columns have the same name.
    """
    arrow: Any = sys.modules.get("pyarrow")
    if arrow is None or not isinstance(data, (arrow.Table, arrow.RecordBatch)):
        return None
    table: Any = data
    names: list[str] = table.schema.names
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"the table has two columns {twice!r}; rename one")
    return {name: table.column(i) for i, name in enumerate(names)}


def column_values(value: object) -> Any:
    """The values of a pandas, Polars or Arrow column as an array. None for any other object.

    An Arrow column, and a Polars column with nulls, becomes a list if an array would change its values.
    """
    pandas: Any = sys.modules.get("pandas")
    if pandas is not None and isinstance(value, (pandas.Series, pandas.Index, pandas.api.extensions.ExtensionArray)):
        series = pandas.Series(value)
        # With a numeric dtype, NumPy would store missing values as NaN. In an object array they raise an error later.
        nullable = isinstance(series.dtype, pandas.api.extensions.ExtensionDtype) and series.isna().any()
        return series.to_numpy(dtype=object) if nullable else series.to_numpy()
    polars: Any = sys.modules.get("polars")
    if polars is not None and isinstance(value, polars.Series):
        given: Any = value
        return given.to_list() if given.null_count() else given.to_numpy()
    arrow: Any = sys.modules.get("pyarrow")
    if arrow is None or not isinstance(value, (arrow.Array, arrow.ChunkedArray)):
        return None
    column: Any = value
    primitive = arrow.types.is_primitive(column.type) and not arrow.types.is_temporal(column.type)
    # An array would change the dtype and store nulls as NaN. In a list they are None, which raises an error later.
    return column.to_numpy(zero_copy_only=False) if primitive and not column.null_count else column.to_pylist()


def arrow_items(table: Any, nulls: Any, dtype: torch.dtype | None) -> dict[str, Any]:
    """The columns of an Arrow table for a dict. ``nulls``: see `DeviceDict.from_arrow`.

    ``dtype``: the dtype of list columns of floats; None keeps their own dtype.
    """
    items: dict[str, Any] = {}
    arrow: Any = sys.modules.get("pyarrow")
    columns = table_columns(table)
    if columns is None:
        raise TypeError(f"from_arrow takes a pyarrow.Table or RecordBatch, got {type(table).__name__}")
    _refuse_columns(nulls, columns)
    for key, column in columns.items():
        whole = column.combine_chunks() if isinstance(column, arrow.ChunkedArray) else column
        if isinstance(whole, arrow.ChunkedArray):  # combine_chunks of no chunks, in earlier versions
            whole = arrow.array([], type=whole.type)
        if arrow.types.is_dictionary(whole.type):
            whole = whole.dictionary_decode()
        _add_column(items, columns, nulls, key, whole.is_null().to_numpy(zero_copy_only=False), _Arrow(whole, dtype))
    return items


def pandas_items(frame: Any, nulls: Any) -> dict[str, Any]:
    """The columns of a DataFrame for a dict. ``nulls``: see `DeviceDict.from_pandas`."""
    pandas: Any = sys.modules.get("pandas")
    if pandas is None or not isinstance(frame, pandas.DataFrame):
        raise TypeError(f"from_pandas takes a pandas.DataFrame, got {type(frame).__name__}")
    twice = frame.columns[frame.columns.duplicated()]
    if len(twice):
        raise ValueError(f"the table has two columns {twice[0]!r}; rename one")
    items: dict[str, Any] = {}
    columns = {name: frame[name] for name in frame.columns}
    _refuse_columns(nulls, columns)
    for key, column in columns.items():
        missing = column.isna().to_numpy()
        if column.dtype.kind == "f" and isinstance(column.dtype, np.dtype) and _option(nulls, key) == "error":
            missing = np.zeros(len(column), dtype=bool)  # NaN is a number, as everywhere else
        _add_column(items, columns, nulls, key, missing, _Pandas(column))
    return items


class RaggedColumn(NamedTuple):
    """A list column of numbers, without nulls. It becomes a `Ragged`."""

    values: Tensor
    offsets: Tensor


class _Arrow:
    """An Arrow array. ``filled`` fills its nulls, ``values`` converts it. ``zero``: the fill value beside a mask."""

    def __init__(self, array: Any, dtype: torch.dtype | None) -> None:
        self.types: Any = sys.modules["pyarrow"].types
        self.array, self.dtype = array, dtype
        self.is_text = self.types.is_string(array.type) or self.types.is_large_string(array.type)
        self.is_list = self.types.is_list(array.type) or self.types.is_large_list(array.type)
        self.zero: Any = "" if self.is_text else [] if self.is_list else 0

    def filled(self, value: Any) -> _Arrow:
        arrow: Any = sys.modules["pyarrow"]
        kind = self.array.type
        if self.types.is_boolean(kind) and value in (0, 1):
            value = bool(value)
        try:
            fill = arrow.scalar(value, type=kind)
        except (arrow.ArrowInvalid, arrow.ArrowTypeError, TypeError, ValueError) as error:
            raise TypeError(f"nulls of {kind} cannot become {value!r}: {error}") from error
        return _Arrow(self.array.fill_null(fill), self.dtype)

    def values(self) -> Any:
        if self.is_list and self._has_numbers(self.array.type.value_type):
            return self._ragged()
        if self.types.is_fixed_size_list(self.array.type) and self._has_numbers(self.array.type.value_type):
            inner = self.array.flatten()
            if not inner.null_count:
                return inner.to_numpy(zero_copy_only=False).reshape(len(self.array), self.array.type.list_size)
        return self.array

    def _has_numbers(self, kind: Any) -> bool:
        return self.types.is_integer(kind) or self.types.is_floating(kind) or self.types.is_boolean(kind)

    def _ragged(self) -> Any:
        inner = self.array.flatten()
        if inner.null_count:
            raise ValueError(f"{inner.null_count} nulls inside of lists; fill them in Arrow first")
        numbers = torch.as_tensor(np.array(inner.to_numpy(zero_copy_only=False)), device="cpu")
        if self.dtype is not None and numbers.is_floating_point():
            numbers = numbers.to(self.dtype)
        offsets = self.array.offsets.to_numpy()  # of a slice they do not start at 0, and `flatten` gives its values
        return RaggedColumn(numbers, torch.as_tensor(offsets - offsets[:1], device="cpu"))


class _Pandas:
    """A pandas column, with the methods of `_Arrow`."""

    def __init__(self, column: Any) -> None:
        self.column = column
        self.zero: Any = 0 if column.dtype.kind in "biufc" else ""

    def filled(self, value: Any) -> _Pandas:
        column = self.column
        numbers = column.dtype.kind in "biufc"
        if numbers == isinstance(value, str):
            raise TypeError(f"missing values of {column.dtype} cannot become {value!r}")
        if column.dtype.kind == "b":
            value = bool(value)
        try:
            return _Pandas((column if numbers else column.astype(object)).fillna(value))
        except (TypeError, ValueError) as error:
            raise TypeError(f"missing values of {column.dtype} cannot become {value!r}: {error}") from error

    def values(self) -> Any:
        return self.column


def _option(nulls: Any, key: str) -> Any:
    """The option for the nulls of one column."""
    return nulls.get(key, "error") if isinstance(nulls, Mapping) else nulls


def _refuse_columns(nulls: Any, columns: Mapping[str, Any]) -> None:
    """Raise ``TypeError`` for invalid options ``nulls``, ``ValueError`` if they name a column that does not exist."""
    options: Mapping[Any, Any] = nulls if isinstance(nulls, Mapping) else {}
    for option in options.values() if isinstance(nulls, Mapping) else (nulls,):
        if not isinstance(option, (str, bool, int, float, np.generic)):
            raise TypeError(
                f'nulls= takes "error", "mask", a fill value, or a mapping from columns to these, got {option!r}'
            )
    for key in options:
        if key not in columns:
            raise ValueError(
                f"nulls= names {key!r}, which is not a column; the columns are {', '.join(map(repr, columns))}"
            )


def _add_column(
    items: dict[str, Any], columns: Any, nulls: Any, key: str, missing: Any, column: _Arrow | _Pandas
) -> None:
    """Add a column to ``items``, and its mask if ``nulls`` asks for one. ``missing``: which rows are null."""
    option = _option(nulls, key)
    count = int(missing.sum())
    try:
        if count and option == "error":
            raise ValueError(
                f'{count} of {len(missing)} values are null; give nulls="mask" or a fill value, as nulls={{{key!r}: 0}}'
            )
        if count:
            column = column.filled(column.zero if option == "mask" else option)
        items[key] = column.values()
    except (TypeError, ValueError) as error:
        raise type(error)(f"column {key!r}: {error}") from error
    if option == "mask" and (count or isinstance(nulls, Mapping)):
        if f"{key}_valid" in columns:
            raise ValueError(
                f"column {key!r}: its mask would be {f'{key}_valid'!r}, which is a column already; rename one"
            )
        items[f"{key}_valid"] = ~missing
