"""The first rows of a dict as a table: numbers, decoded strings, and small pictures in a notebook."""

from __future__ import annotations

import importlib
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._encoders.protocol import StringEncoder, decode_nested
from .._errors import dtype_name
from .._memory.dense import not_dense
from .._memory.device import CPU
from .._memory.transfer import transfer
from .._tree.fields import fields
from .._tree.kinds import Field
from .._tree.tree import TreeDict, data_in
from .page import Line, Page, Picture, one_line, shorten
from .tree import FEW, short_number, single, summary

_FIRST_ROWS = 5
"""Rows."""
_COLUMNS = 12
_BEGINNING = 64
"""The codes of a long string that are decoded."""
_PICTURES, _PIXELS = 8, 64

Cells = tuple[list[Tensor], Callable[[list[Any]], list[str]]]
"""What to copy to the host, and a function that makes the cells from the copies."""


def rows_page(d: TreeDict[Any], count: int, pictures: bool = False, shown: int = _FIRST_ROWS) -> Page:
    """The first ``shown`` of ``count`` rows. ``d`` has these or more. One copy to the host."""
    shown, found = min(count, shown), fields(d)
    columns: list[Cells] = []
    left = _PICTURES if pictures else 0
    for field in found[:_COLUMNS]:
        images = None if field.decoder is not None else _pictures(field.value, min(shown, left))
        left -= 0 if images is None else min(shown, left)
        columns.append(images or _cells_of_column(field, shown, count))
    copies = iter(transfer([tensor for needed, _ in columns for tensor in needed], CPU))
    cells = [make([next(copies) for _ in needed]) for needed, make in columns]
    head = ["", *[one_line(".".join(field.path)) for field in found[:_COLUMNS]]]
    lines = [Line((str(i), *row)) for i, row in enumerate(zip(*cells, strict=True))]
    first = f": the first {shown}" if count > shown else ""
    title = f"{shorten(one_line(type(d).__name__), 36)}.rows({count}){first}"
    return Page(title, head, lines, more=max(0, len(found) - _COLUMNS))


def _cells_of_column(field: Field, shown: int, count: int) -> Cells:
    kind, value, encoder, data = field.kind, field.value, field.decoder, data_in(field.value)
    if data is None:
        return [], lambda _: [_kept_cell(one) for one in kind.each(value, range(shown), count)]
    if not_dense(data):
        return [], lambda _: [f"{dtype_name(data.dtype)}[…]"] * shown
    is_text = encoder is not None and encoder.code_ndim != 0
    rows, *lengths = kind.beginnings(value, shown, _BEGINNING if is_text and data.dim() == 1 else FEW)
    if lengths:
        return _ragged_column(rows, lengths[0], encoder, is_text and data.dim() == 1)
    if encoder is not None:
        wide = bool(encoder.code_ndim) and rows.shape[-1] > _BEGINNING
        return [rows[..., :_BEGINNING] if wide else rows], partial(_decoded, encoder, wide)
    if rows[:1].numel() <= FEW:
        return [rows], lambda copies: [cell(one) for one in copies[0].tolist()]
    return [], lambda _: [summary(one) for one in rows]


def _ragged_column(rows: Tensor, lengths: Tensor, encoder: StringEncoder | None, is_text: bool) -> Cells:
    """``rows``: the beginning of each row."""
    if encoder is None and rows.dim() > 2:
        what, shape = dtype_name(rows.dtype), rows.shape[2:]
        return [lengths], lambda copies: [f"{what}{[n, *shape]}" for n in copies[0].tolist()]

    def cells(copies: list[Tensor]) -> list[str]:
        pairs = zip(copies[0], copies[1].tolist(), strict=True)
        return [
            _string_cell(encoder, row[:n], n > len(row)) if is_text else _items_cell(encoder, row[:n], n)
            for row, n in pairs
        ]

    return [rows, lengths], cells


def _items_cell(encoder: StringEncoder | None, row: Tensor, length: int) -> str:
    """The first items of a row of a ragged field."""
    items: list[Any] = row.tolist()
    if encoder is not None:
        with suppress(Exception):  # a code that its encoder cannot decode is shown as a number
            items = decode_nested(encoder, row)
    return cell(items) if length <= FEW else f"{cell(items[:3])[:-1]}, … {length} values]"


def _decoded(encoder: StringEncoder, was_cut: bool, copies: list[Tensor]) -> list[str]:
    # Padding is what a string has behind its end.
    return [
        _string_cell(encoder, codes, was_cut and bool((codes[..., -1] != encoder.padding).any())) for codes in copies[0]
    ]


def _string_cell(encoder: Any, codes: Tensor, was_cut: bool) -> str:
    """The strings of codes, or the codes if they cannot be decoded. ``was_cut``: inside a character, maybe."""
    for left_out in range(4 if was_cut else 1):
        with suppress(Exception):  # the encoder may be a class of the user
            part = codes[..., : codes.shape[-1] - left_out] if left_out else codes
            return cell(decode_nested(encoder, part)) + "…" * was_cut
    return cell(codes.tolist()) if codes.numel() <= FEW else summary(codes)


def cell(value: Any) -> str:
    """A number, a string or nested lists of them on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(cell, value))}]"
    return one_line(value) if isinstance(value, str) else short_number(value)


def _kept_cell(value: Any) -> str:
    if isinstance(value, np.ndarray) and value.size <= FEW and value.dtype.kind in "biufc":
        return cell(value.tolist())
    return single(value) or summary(value)


def _pictures(value: Any, count: int) -> Cells | None:
    """Pictures of the first images, and shapes of the others. None without Pillow, and for other fields."""
    if not (isinstance(value, Tensor) and value.dtype is torch.uint8 and value.dim() == 4 and count):
        return None
    channels_first = value.shape[1] in (1, 3)
    if not_dense(value) or 0 in value.shape or not (channels_first or value.shape[3] == 3):
        return None
    images = value[:_FIRST_ROWS].permute(0, 2, 3, 1) if channels_first else value[:_FIRST_ROWS]
    try:
        pillow: Any = importlib.import_module("PIL.Image")
    except ImportError:
        return None
    step = -(-max(images.shape[1:3]) // _PIXELS)

    def cells(copies: list[Tensor]) -> list[str]:
        out = [summary(one) for one in value[:_FIRST_ROWS]]
        for i, pixels in enumerate(copies[0]):
            file = BytesIO()
            pillow.fromarray(pixels.squeeze(2).numpy()).save(file, "PNG")
            out[i] = Picture(out[i])
            out[i].png = b64encode(file.getvalue()).decode()  # type: ignore[attr-defined]
        return out

    return [images[:count, ::step, ::step].contiguous()], cells
