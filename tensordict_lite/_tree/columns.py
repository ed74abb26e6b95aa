"""Convert columns of pandas and Arrow. This module imports neither library; it uses them if the user imported them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


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
    """The values of a pandas or Arrow column as an array. None for any other object.

    An Arrow column becomes a list if an array would change its values.
    """
    pandas: Any = sys.modules.get("pandas")
    if pandas is not None and isinstance(value, (pandas.Series, pandas.Index, pandas.api.extensions.ExtensionArray)):
        series = pandas.Series(value)
        # NumPy would change the dtype and store missing values as NaN. In an object array they raise an error later.
        nullable = isinstance(series.dtype, pandas.api.extensions.ExtensionDtype) and series.isna().any()
        return series.to_numpy(dtype=object) if nullable else series.to_numpy()
    arrow: Any = sys.modules.get("pyarrow")
    if arrow is None or not isinstance(value, (arrow.Array, arrow.ChunkedArray)):
        return None
    column: Any = value
    primitive = arrow.types.is_primitive(column.type) and not arrow.types.is_temporal(column.type)
    # An array would change the dtype and store nulls as NaN. In a list they are None, which raises an error later.
    return column.to_numpy(zero_copy_only=False) if primitive and not column.null_count else column.to_pylist()
