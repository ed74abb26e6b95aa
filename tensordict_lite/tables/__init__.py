"""Rows on disk: tables that may be larger than memory, written row by row and mapped by `load`.

A table is a folder with one safetensors file for each column. `RowWriter` writes it, and ``load(folder)`` reads it.
Several writers write parts: `load_parts` reads them as one dataset, and `join_parts` makes one table of them. `verify`
finds damage, `repair` removes what a crash left, `add_column` and `drop_column` change the columns.

`tensordict_lite` imports this package only to load a table.
"""

from .columns import add_column, drop_column
from .parts import join_parts, load_parts
from .table import repair
from .verify import verify
from .writer import RowWriter

__all__ = ["RowWriter", "add_column", "drop_column", "join_parts", "load_parts", "repair", "verify"]

for _public in __all__:
    globals()[_public].__module__ = __name__
