"""Convert columns of pandas, Polars and Arrow. This module imports none of them; it uses those that are imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor


def table_columns(data: Any) -> Mapping[str, Any] | None:
    """The columns of an Arrow table or record batch by name; None for any other object.

    A DataFrame already has ``keys``, so it gives None. Raises ``ValueError`` if two columns have the same name.
    """
    arrow: Any = sys.modules.get("pyarrow")
    if arrow is None or not isinstance(data, (arrow.Table, arrow.RecordBatch)):
        return None
    names: list[str] = data.schema.names
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"the table has two columns {twice!r}; rename one")
    return {name: data.column(i) for i, name in enumerate(names)}


def column_values(value: Any) -> Any:
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
        return value.to_list() if value.null_count() else value.to_numpy()
    arrow: Any = sys.modules.get("pyarrow")
    if arrow is None or not isinstance(value, (arrow.Array, arrow.ChunkedArray)):
        return None
    primitive = arrow.types.is_primitive(value.type) and not arrow.types.is_temporal(value.type)
    # An array would change the dtype and store nulls as NaN. In a list they are None, which raises an error later.
    return value.to_numpy(zero_copy_only=False) if primitive and not value.null_count else value.to_pylist()


def arrow_items(
    table: Any, nulls: Any, dtype: torch.dtype | None, ragged: Callable[[Tensor, Tensor], Any]
) -> dict[str, Any]:
    """The columns of an Arrow table for a dict. ``nulls``: see `DeviceDict.from_arrow`.

    ``dtype``: the dtype of list columns of floats; None keeps their own dtype. ``ragged``: the class `Ragged`, which is
    above this module.
    """
    columns = table_columns(table)
    if columns is None:
        raise TypeError(f"from_arrow takes a pyarrow.Table or RecordBatch, got {type(table).__name__}")
    arrays = ((key, _one_array(column)) for key, column in columns.items())
    return _items(columns, arrays, nulls, _null_in_arrow, _fill_arrow, partial(_arrow_values, dtype, ragged))


def pandas_items(frame: Any, nulls: Any) -> dict[str, Any]:
    """The columns of a DataFrame for a dict. ``nulls``: see `DeviceDict.from_pandas`."""
    pandas: Any = sys.modules.get("pandas")
    if pandas is None or not isinstance(frame, pandas.DataFrame):
        raise TypeError(f"from_pandas takes a pandas.DataFrame, got {type(frame).__name__}")
    twice = frame.columns[frame.columns.duplicated()]
    if len(twice):
        raise ValueError(f"the table has two columns {twice[0]!r}; rename one")
    columns = {name: frame[name] for name in frame.columns}
    return _items(columns, columns.items(), nulls, _missing_in_pandas, _fill_pandas, lambda column: column)


def _one_array(column: Any) -> Any:
    """A column of an Arrow table as one array, without a dictionary."""
    arrow: Any = sys.modules["pyarrow"]
    whole = column.combine_chunks() if isinstance(column, arrow.ChunkedArray) else column
    if isinstance(whole, arrow.ChunkedArray):  # combine_chunks of no chunks, in earlier versions
        whole = arrow.array([], type=whole.type)
    return whole.dictionary_decode() if arrow.types.is_dictionary(whole.type) else whole


def _null_in_arrow(array: Any, option: Any) -> Any:
    return array.is_null().to_numpy(zero_copy_only=False)


def _fill_arrow(array: Any, option: Any) -> Any:
    arrow: Any = sys.modules["pyarrow"]
    kind, types = array.type, arrow.types
    try:
        if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
            value = _null_value(option, kind.to_pandas_dtype())
        elif types.is_string(kind) or types.is_large_string(kind):
            value = _null_value(option, None)
        else:
            value = option if option != "mask" else [] if _is_list(kind) else 0
        return array.fill_null(arrow.scalar(value, type=kind))
    except (arrow.ArrowException, TypeError, ValueError) as error:
        raise TypeError(f"nulls of {kind} cannot become {option!r}: {error}") from error


def _null_value(option: Any, dtype: Any) -> Any:
    """The value that fills nulls: a number that ``dtype`` holds, or a string for None. A float may be rounded.

    For the option ``"mask"`` it is zero or the empty string. Raises ``TypeError`` and ``ValueError``.
    """
    if option == "mask":
        option = "" if dtype is None else 0
    if isinstance(option, str) != (dtype is None):
        raise TypeError(f"expected a {'string' if dtype is None else 'number'}")
    if dtype is None:
        return option
    number = option.item() if isinstance(option, np.generic) else option
    kind = np.dtype(dtype)
    if kind.kind in "fc":
        most = float(np.finfo(kind).max)
        if most < abs(number) != inf:
            raise ValueError(f"expected a number up to {most:.5g}")
        return float(number)
    low, high = (0, 1) if kind.kind == "b" else (np.iinfo(kind).min, np.iinfo(kind).max)
    if not low <= number <= high or number != int(number):
        raise ValueError("expected True or False" if kind.kind == "b" else f"expected an int from {low} to {high}")
    return bool(number) if kind.kind == "b" else int(number)


def _is_list(kind: Any) -> bool:
    types: Any = sys.modules["pyarrow"].types
    return types.is_list(kind) or types.is_large_list(kind)


def _arrow_values(dtype: torch.dtype | None, ragged: Callable[[Tensor, Tensor], Any], array: Any) -> Any:
    """The values of an Arrow array. Lists of numbers become a `Ragged`, or an array if their length is fixed."""
    types: Any = sys.modules["pyarrow"].types
    is_list, sizes = _is_list(array.type), list[int]()
    inner = array.flatten() if is_list else array
    total, nulls = len(inner), inner.null_count
    while types.is_fixed_size_list(inner.type):
        sizes.append(inner.type.list_size)
        inner = inner.flatten()
        nulls += inner.null_count
    is_numeric = types.is_integer(inner.type) or types.is_floating(inner.type) or types.is_boolean(inner.type)
    if inner is array or not is_numeric or (nulls and not is_list):
        return array
    if nulls:
        raise ValueError(f"{nulls} nulls inside of lists; fill them in Arrow first")
    inner = inner.to_numpy(zero_copy_only=False).reshape(total, *sizes)
    if not is_list:
        return inner
    numbers = torch.as_tensor(np.array(inner), device="cpu")
    if dtype is not None and numbers.is_floating_point():
        numbers = numbers.to(dtype)
    offsets = array.offsets.to_numpy()  # of a slice they do not start at 0, and `flatten` gives its values
    return ragged(numbers, torch.as_tensor(offsets - offsets[:1], device="cpu"))


def _missing_in_pandas(column: Any, option: Any) -> Any:
    if column.dtype.kind == "f" and isinstance(column.dtype, np.dtype) and option == "error":
        return np.zeros(len(column), dtype=bool)  # NaN is a number, as everywhere else
    return column.isna().to_numpy()


def _fill_pandas(column: Any, option: Any) -> Any:
    dtype = getattr(column.dtype, "numpy_dtype", column.dtype)  # of a nullable column, the dtype of its numbers
    try:
        if dtype.kind in "biufc":
            return column.to_numpy(dtype=dtype, na_value=_null_value(option, dtype))
        return column.astype(object).fillna(_null_value(option, None))
    except (TypeError, ValueError) as error:
        raise TypeError(f"missing values of {column.dtype} cannot become {option!r}: {error}") from error


def _refuse_nulls(nulls: Any, columns: Mapping[str, Any]) -> None:
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


def _items(
    columns: Mapping[str, Any],
    prepared: Iterable[tuple[str, Any]],
    nulls: Any,
    missing: Callable[[Any, Any], Any],
    fill: Callable[[Any, Any], Any],
    values: Callable[[Any], Any],
) -> dict[str, Any]:
    """The columns for a dict, and the masks that ``nulls`` asks for.

    Args:
        columns: the columns by name.
        prepared: the name of each column, and what the functions take.
        nulls: see `DeviceDict.from_arrow`.
        missing: which rows of a column are null, given its option of ``nulls``.
        fill: fills the nulls of a column with its option, or with a zero beside a mask.
        values: the values of a column.
    """
    _refuse_nulls(nulls, columns)
    items: dict[str, Any] = {}
    for key, column in prepared:
        option = nulls.get(key, "error") if isinstance(nulls, Mapping) else nulls
        lacks = missing(column, option)
        count = int(lacks.sum())
        try:
            if count and option == "error":
                raise ValueError(
                    f'{count} of {len(lacks)} values are null; give nulls="mask" or a fill value, '
                    f"as nulls={{{key!r}: 0}}"
                )
            items[key] = values(fill(column, option) if count else column)
        except (TypeError, ValueError) as error:
            raise type(error)(f"column {key!r}: {error}") from error
        if option == "mask" and (count or isinstance(nulls, Mapping)):
            if f"{key}_valid" in columns:
                raise ValueError(
                    f"column {key!r}: its mask would be {f'{key}_valid'!r}, which is a column already; rename one"
                )
            items[f"{key}_valid"] = ~lacks
    return items
