"""The repr of a dict: a tree in a terminal, a table in a notebook. The only values it reads are numbers on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from os.path import dirname
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._encoders.protocol import StringEncoder
from .._memory.mapped import file_of
from .._memory.packed import is_packed
from .._tree.fields import fields
from .._tree.kinds import Field, kind_of
from .._tree.tree import TreeDict, data_in, field_encoder
from .._tree.walk import nbytes
from .page import Line, Page, one_line, shorten

_MOST = 98
"""Fields; a longer tree leaves out its middle. With the title and the note it has 100 lines."""
_LEVELS = 4
"""Deeper fields stand below the last levels alone."""
FEW = 6
"""Numbers or items that a cell shows."""
_NAME, _NOTE = 36, 60
"""The most columns of a key or the name of a class, and of a note."""

Entry = tuple[tuple[bool, ...], str, Any, "StringEncoder | None"]
"""A value of the tree: for each dict above it and for itself, whether it is the last item; key, value and encoder."""


def tree_page(d: TreeDict[Any]) -> Page:
    """A line for each key at every depth."""
    found: list[Entry] = list(_entries(d, ()))
    lines = [_line(*entry) for entry in (found if len(found) <= _MOST else found[: _MOST // 2])]
    if len(found) > _MOST:
        lines.append(Line((f"… {len(found) - _MOST} more",), "┆  "))
        lines += [_line(*entry) for entry in found[-_MOST // 2 :]]
    return Page(title_of(d), ("key", "dtype[shape]", "value or encoder"), lines, shows_head=False)


def _entries(d: TreeDict[Any], lasts: tuple[bool, ...]) -> Iterator[Entry]:
    last = len(d) - 1
    for i, (key, value) in enumerate(d.items()):
        here = (*lasts, i == last)
        yield here, key, value, field_encoder(d, key)
        if isinstance(value, TreeDict):
            yield from _entries(value, here)


def title_of(d: TreeDict[Any]) -> str:
    """What the whole dict is."""
    tensors, found = d._tensors(), fields(d)
    said = [
        "no device yet" if d._device is None else str(d._device),
        *([] if (rows := _row_count(found)) is None else [counted(rows, "row")]),
        counted(len(found), "field"),
        size(sum(map(nbytes, d._tensors_inside()))),
    ]
    if is_packed(tensors, d._device, alone=False):
        said.append("packed")
    # A row: `row["x"].fill_(1)` writes to the batch too, and `row["x"] = 1` to the row alone.
    if tensors and all(tensor._is_view() for tensor in tensors):
        said.append("views")
    title = f"{shorten(one_line(type(d).__name__), _NAME)}({', '.join(said)}"
    if folder := _folder(found):
        title += f", mapped from {shorten(one_line(folder), max(12, 64 - len(title)))}"
    return f"{title})"


def _row_count(found: Sequence[Field]) -> int | None:
    """The number of rows, if the fields with tensors agree on it."""
    try:
        counts = {field.kind.count(field) for field in found} - {None}
    except (AttributeError, IndexError, TypeError, ValueError):  # a field without rows, or what pytree put in its place
        return None
    return counts.pop() if len(counts) == 1 else None


def _folder(found: Sequence[Field]) -> str:
    """The folder of the table that has all fields, from the current folder on; an empty string if none has."""
    first = ""
    for field in found:
        path = "" if (data := data_in(field.value)) is None else file_of(data)
        if not path or dirname(path) != (first := first or dirname(path)):
            return ""
    with suppress(OSError):  # the current folder was removed
        first = first.removeprefix(os.path.join(os.getcwd(), ""))
    return first


def counted(count: int, what: str) -> str:
    """A number of things: ``'1 row'``, ``'2 rows'``."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def size(count: int) -> str:
    """Format a number of bytes with a unit: ``'24 B'``, ``'1.5 KiB'``, ``'3.0 GiB'``."""
    power = min((count.bit_length() - 1) // 10, 4)
    return f"{count} B" if power < 1 else f"{count / 1024**power:.1f} {'KMGT'[power - 1]}iB"


def summary(value: Any) -> str:
    """The text for a value, without its device: the title shows the device once."""
    return shorten(one_line(kind_of(value).shown(value)), _NOTE)


def short_number(value: Any) -> str:
    """A number with four digits; an int with all."""
    return f"{value:.4g}" if isinstance(value, (float, complex)) else str(value)


def single(value: Any) -> str:
    """A kept number, string or None, a few of them in a list, or the number of a tensor on the CPU. Else empty."""
    if type(value) in (list, tuple) and len(value) <= FEW:
        parts = ["" if isinstance(part, (list, tuple)) else single(part) for part in value]
        text = ", ".join(parts)
        return shorten(f"[{text}]" if type(value) is list else f"({text})", _NOTE) if all(parts) else ""
    if isinstance(value, Tensor):
        return "" if value.dim() else _number_in(value)
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, str):
        return shorten(one_line(shorten(value, _NOTE)), _NOTE)
    is_short = isinstance(value, (float, complex, NoneType)) or (isinstance(value, int) and value.bit_length() <= 64)
    return short_number(value) if is_short else ""


def _number_in(value: Tensor) -> str:
    # No other subclass: a `DTensor` would communicate with other ranks.
    if type(value) not in (Tensor, torch.nn.Parameter) or not value.is_cpu:
        return ""
    try:
        return short_number(value.item())
    except (RuntimeError, NotImplementedError):  # under a transform of torch.func, and for fake tensors
        return ""


def _line(lasts: tuple[bool, ...], key: str, value: Any, encoder: StringEncoder | None) -> Line:
    branch, depth = "└─ " if lasts[-1] else "├─ ", len(lasts) - 1
    if depth:
        branch = "".join("   " if last else "│  " for last in lasts[:-1][-_LEVELS:]) + branch
        if depth > _LEVELS:
            branch = "…" + branch[1:]
    note = "" if value is None else single(value)
    if encoder is not None:
        note = shorten(f"{note}  {one_line(repr(encoder))}".lstrip(), _NOTE)
    what = ("" if value else "(empty)") if isinstance(value, TreeDict) else summary(value)
    return Line((shorten(one_line(key), _NAME), what, note), branch, depth)
