"""How a dict looks: a tree in a terminal, a table in a notebook. Reads shapes and dtypes, never a value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

from torch import Tensor

from .._errors import dtype_name
from .._tree.walk import leaves

Note = Callable[[Mapping[str, Any], str], str]
"""What to say beside a field, given its dict and key; empty for nothing."""

_LONGEST_TREE = 100  # rows that a terminal is given before the middle is left out
_UNFOLDED = 20  # rows up to which a notebook shows the table without a click
_LONGEST_NOTE = 60  # characters


class Row(NamedTuple):
    """One line: the lasts of its ancestors and itself (for the branches), its key, what it is, and a note."""

    lasts: tuple[bool, ...]
    key: str
    what: str
    note: str


def size(nbytes: int) -> str:
    """``nbytes`` for people: ``'24 B'``, ``'1.5 KiB'``, ``'3.0 GiB'``."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"


def field_count(data: Mapping[str, Any]) -> int:
    """The values at every depth that are not nested dicts."""
    return sum(1 for _ in leaves(data))


def _what(value: Any) -> str:
    if isinstance(value, Tensor):
        shape = "jagged" if value.is_nested else ", ".join(map(str, value.shape))
        return f"{dtype_name(value.dtype)}[{shape}]"
    if isinstance(value, Mapping):
        return "" if value else "(empty)"
    return f"object {type(value).__name__}"


def _rows(data: Mapping[str, Any], note: Note, lasts: tuple[bool, ...] = ()) -> Iterator[Row]:
    for i, (key, value) in enumerate(data.items()):
        here = (*lasts, i == len(data) - 1)
        said = note(data, key)
        if len(said) > _LONGEST_NOTE:
            said = said[: _LONGEST_NOTE - 1] + "…"
        yield Row(here, key if key.isprintable() else repr(key), _what(value), said)
        if isinstance(value, Mapping):
            yield from _rows(cast("Mapping[str, Any]", value), note, here)


def tree(data: Mapping[str, Any], title: str, note: Note) -> str:
    """The title, then a line a field, indented by depth."""
    rows = list(_rows(data, note))
    left_out = len(rows) - _LONGEST_TREE
    if left_out > 0:
        rows[_LONGEST_TREE // 2 : _LONGEST_TREE // 2 + left_out] = []
    names = [
        "".join("   " if last else "│  " for last in r.lasts[:-1]) + "├└"[r.lasts[-1]] + "─ " + r.key for r in rows
    ]
    left = max(map(len, names), default=0)
    middle = max((len(row.what) for row in rows), default=0)
    lines = [f"{name:{left}}  {row.what:{middle}}  {row.note}".rstrip() for name, row in zip(names, rows, strict=True)]
    if left_out > 0:
        lines.insert(_LONGEST_TREE // 2, f"┆  … {left_out} more")
    return "\n".join([title, *lines])


_STYLE = "text-align:left;padding:.15em 1em .15em 0;font-family:monospace;white-space:pre"


def html(data: Mapping[str, Any], title: str, note: Note) -> str:
    """The same as a table, folded if it is long. Colours are the page's own, so that it reads in light and dark."""
    # Here, as its table of entities would take a tenth of the time of importing this package, and few need it.
    from html import escape  # noqa: PLC0415

    rows = list(_rows(data, note))
    cells = ((f"{'    ' * (len(row.lasts) - 1)}{row.key}", row.what, row.note) for row in rows)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_STYLE}">{escape(cell)}</td>' for cell in line) + "</tr>" for line in cells
    )
    head = "".join(f'<th style="{_STYLE};opacity:.6">{name}</th>' for name in ("key", "value", "encoder"))
    opened = " open" if len(rows) <= _UNFOLDED else ""
    # A page without a doctype gives tables a colour of their own.
    style = "border-collapse:collapse;color:inherit;margin:.3em 0 0 1em"
    return (
        f'<details{opened}><summary style="cursor:pointer;font-family:monospace">{escape(title)}</summary>'
        f'<table style="{style}"><tr>{head}</tr>{body}</table></details>'
    )
