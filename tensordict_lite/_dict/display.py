"""The repr of a dict: a tree in a terminal, a table in a notebook. Reads shapes and dtypes, never values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from .._errors import dtype_name
from .._memory.packed import is_packed
from .._tree.ragged import Ragged
from .._tree.tree import TreeDict, field_encoder, fields_of
from .._tree.walk import nbytes

_LONGEST_TREE = 100  # lines; a longer tree omits its middle
_UNFOLDED = 20  # rows; a notebook shows a longer table folded
_LONGEST_NOTE = 60  # characters


class Row(NamedTuple):
    """A line of the tree or the table."""

    lasts: tuple[bool, ...]
    """For each ancestor and this line: whether it is the last item of its dict. Decides the branch characters."""
    key: str
    what: str
    """The dtype and shape of a tensor, or the type of a kept object."""
    note: str


def _title(d: TreeDict[Any]) -> str:
    """The first line: what the whole dict is."""
    tensors = d._tensors()
    holds = _counted(sum(1 for _ in fields_of(d)), "field")
    device = "no device yet" if d._device is None else str(d._device)
    packed = ", packed" if is_packed(tensors, d._device, alone=False) else ""
    # A row: `row["x"].fill_(1)` writes to the batch too, and `row["x"] = 1` to the row alone.
    views = ", views" if tensors and all(tensor._is_view() for tensor in tensors) else ""
    return f"{type(d).__name__}({device}, {holds}, {_size(sum(map(nbytes, tensors)))}{packed}{views})"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _size(count: int) -> str:
    """Format a number of bytes with a unit: ``'24 B'``, ``'1.5 KiB'``, ``'3.0 GiB'``."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):  # pragma: no branch  (it always breaks)
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def _what(value: Any) -> str:
    """The text for a value, without its device: the title shows the device once."""
    if isinstance(value, Tensor):
        shape = "jagged" if value.is_nested else ", ".join(map(str, value.shape))
        return f"{dtype_name(value.dtype)}[{shape}]"
    if isinstance(value, Ragged) and isinstance(value.values, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        total, *shape = value.values.shape
        shape = ", ".join([str(len(value)), "*", *map(str, shape)])
        return f"{dtype_name(value.dtype)}[{shape}] of {total} values"
    if isinstance(value, TreeDict):
        return "" if value else "(empty)"
    return f"object {type(value).__name__}"


def _lines(d: TreeDict[Any], lasts: tuple[bool, ...] = ()) -> Iterator[Row]:
    """Yield a line for each key at every depth. ``lasts``: see `Row`, for the ancestors."""
    for i, (key, value) in enumerate(d.items()):
        here = (*lasts, i == len(d) - 1)
        encoder = field_encoder(d, key)
        said = "" if encoder is None else repr(encoder)
        if len(said) > _LONGEST_NOTE:
            said = said[: _LONGEST_NOTE - 1] + "…"
        yield Row(here, key if key.isprintable() else repr(key), _what(value), said)
        if isinstance(value, TreeDict):
            yield from _lines(value, here)


def tree(d: TreeDict[Any]) -> str:
    """Format the title and one line per field, indented by depth."""
    rows = list(_lines(d))
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
    return "\n".join([_title(d), *lines])


_STYLE = "text-align:left;padding:.15em 1em .15em 0;font-family:monospace;white-space:pre"


def html(d: TreeDict[Any]) -> str:
    """Format the same lines as an HTML table, folded if it is long. Inherits the colors of the page, light or dark."""
    # Imported here, because importing `html` is slow and only notebooks need it.
    from html import escape  # noqa: PLC0415

    rows = list(_lines(d))
    cells = ((f"{'    ' * (len(row.lasts) - 1)}{row.key}", row.what, row.note) for row in rows)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_STYLE}">{escape(cell)}</td>' for cell in line) + "</tr>" for line in cells
    )
    head = "".join(f'<th style="{_STYLE};opacity:.6">{name}</th>' for name in ("key", "value", "encoder"))
    opened = " open" if len(rows) <= _UNFOLDED else ""
    # `color:inherit`, because tables do not inherit the color of a page without a doctype.
    style = "border-collapse:collapse;color:inherit;margin:.3em 0 0 1em"
    return (
        f'<details{opened}><summary style="cursor:pointer;font-family:monospace">{escape(_title(d))}</summary>'
        f'<table style="{style}"><tr>{head}</tr>{body}</table></details>'
    )
