"""A page: a title and a table, as text for a terminal and as HTML for a notebook. Every text on it is printable."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple
from unicodedata import combining, east_asian_width

_UNFOLDED = 20
"""Lines; a notebook shows a longer page folded."""
_NARROWEST = 12
"""The columns of a terminal that each cell has at least."""


class Picture(str):
    """A cell with a small picture. The text stands for it in a terminal."""

    png: str
    """The file in base64."""


class Line(NamedTuple):
    """A line of a page."""

    cells: Sequence[str]
    branch: str = ""
    """What stands before the first cell in a terminal. It is never shortened."""
    depth: int = 0
    """The indent of the first cell in a notebook."""


class Page(NamedTuple):
    """What a look shows."""

    title: str
    head: Sequence[str]
    """The names of the columns."""
    lines: Sequence[Line]
    shows_head: bool = True
    """Whether a terminal shows the names. A notebook does."""
    more: int = 0
    """The number of columns that the page leaves out."""


def one_line(text: str) -> str:
    """A text from outside on one line. Control characters and marks that change the direction are escaped."""
    return text if text.isprintable() and text.strip() == text and text else repr(text)


def width(text: str) -> int:
    """The number of columns in a terminal."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(char) else 1 + (east_asian_width(char) in "WF") for char in text)


def shorten(text: str, limit: int) -> str:
    """The text within ``limit`` columns, without its middle."""
    if len(text) <= limit and (text.isascii() or width(text) <= limit):
        return text
    start, end = text[:limit], text[-limit:]
    while width(start) > limit // 2:
        start = start[:-1]
    while width(end) > (limit - 1) // 2:
        end = end[1:]
    return f"{start}…{end}"


def as_text(page: Page, limit: int = 80) -> str:
    """The page within ``limit`` columns. It shortens the widest cells, and leaves out columns that have no room."""
    lines = [Line(page.head), *page.lines] if page.shows_head and page.lines else page.lines
    table = [[*map(width, line.cells)] for line in lines]
    for line, widths in zip(lines, table, strict=True):
        widths[0] += len(line.branch)
    sizes = [max(column) for column in zip_longest(*table, fillvalue=0)]
    if sum(sizes) + 2 * len(sizes) > limit + 2:
        kept = _narrowed(sizes, limit)
        more = page.more + len(sizes) - len(kept)
        sizes = [*kept]
        narrow: list[Line] = []
        for cells, branch, _ in lines:
            sizes[0] = kept[0] - len(branch)
            narrow.append(Line([*map(shorten, cells, sizes)], branch))
        return as_text(Page(page.title, (), narrow, shows_head=False, more=more), limit)
    out = [shorten(page.title, limit)]
    for (cells, branch, _), widths in zip(lines, table, strict=True):
        padded = [cell + " " * (size - wide + 2) for cell, size, wide in zip(cells, sizes, widths, strict=False)]
        out.append(f"{branch}{''.join(padded)}".rstrip())
    if page.more:
        out.append(f"… {page.more} more fields")
    return "\n".join(out)


def _narrowed(sizes: Sequence[int], limit: int) -> list[int]:
    """Sizes of the first columns that fit in ``limit``: the widest ones are smaller."""
    kept = [min(size, limit) for size in sizes]
    while sum(min(size, _NARROWEST) + 2 for size in kept) > limit + 2:
        kept.pop()
    while sum(kept) + 2 * len(kept) > limit + 2:
        kept[kept.index(max(kept))] -= 1
    return kept


_CELL = "text-align:left;padding:.15em 1em .15em 0;white-space:pre"


def as_html(page: Page) -> str:
    """The page as an HTML table, folded if it is long. Inherits the colors of the page around it, light or dark."""
    # Imported here, because importing `html` is slow and only notebooks need it.
    from html import escape  # noqa: PLC0415

    def cell(text: str, depth: int) -> str:
        if isinstance(text, Picture):
            content = f'<img alt="{escape(text)}" src="data:image/png;base64,{text.png}">'
        else:
            content = "    " * depth + escape(text)
        return f'<td style="{_CELL}">{content}</td>'

    body = "".join(
        "<tr>" + "".join(cell(text, line.depth * (i == 0)) for i, text in enumerate(line.cells)) + "</tr>"
        for line in page.lines
    )
    head = "".join(f'<th style="{_CELL};opacity:.6">{escape(name)}</th>' for name in page.head)
    opened = " open" if len(page.lines) <= _UNFOLDED else ""
    # `color:inherit`, because tables do not inherit the color of a page without a doctype.
    style = "border-collapse:collapse;color:inherit;margin:.3em 0 0 1em"
    return (
        f'<details{opened} style="font-family:monospace"><summary style="cursor:pointer;overflow-wrap:anywhere">'
        f'{escape(page.title)}</summary><div style="overflow-x:auto"><table style="{style}"><tr>{head}</tr>{body}'
        f"</table>{f'… {page.more} more fields' if page.more else ''}</div></details>"
    )
