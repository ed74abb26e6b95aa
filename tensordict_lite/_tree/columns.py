"""Columns of pandas and Arrow, by what their user imported: neither is imported here."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


def table_columns(data: object) -> Mapping[str, Any] | None:
    """The columns of an Arrow table or record batch by name; None for anything else.

    (A DataFrame has ``keys`` and needs no help.) Raises ``ValueError`` for a name that two columns have.
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
    """The values of a pandas or Arrow column, as an array, or as a list where that would change them; else None."""
    pandas: Any = sys.modules.get("pandas")
    if pandas is not None and isinstance(value, (pandas.Series, pandas.Index, pandas.api.extensions.ExtensionArray)):
        series = pandas.Series(value)
        # A nullable column would become another dtype, with NaN for what is missing. As objects, that is refused.
        nullable = isinstance(series.dtype, pandas.api.extensions.ExtensionDtype) and series.isna().any()
        return series.to_numpy(dtype=object) if nullable else series.to_numpy()
    arrow: Any = sys.modules.get("pyarrow")
    if arrow is None or not isinstance(value, (arrow.Array, arrow.ChunkedArray)):
        return None
    column: Any = value
    primitive = arrow.types.is_primitive(column.type) and not arrow.types.is_temporal(column.type)
    # With nulls an array would be of another dtype, with NaN for them; in a list they are None, which is refused.
    return column.to_numpy(zero_copy_only=False) if primitive and not column.null_count else column.to_pylist()
