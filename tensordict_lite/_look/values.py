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

from .._encoders.protocol import StringEncoder, decode_nested, decode_rows
from .._errors import dtype_name
from .._memory.dense import not_dense
from .._memory.device import CPU
from .._memory.dtypes import as_bits
from .._memory.transfer import transfer
from .._tree.kinds import KEPT
from .._tree.ragged import Ragged
from .._tree.tree import TreeDict
from .page import Line, Page, Picture, one_line, shorten
from .tree import FEW, kind, looked_at, short_number, single

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
    shown, fields = min(count, shown), looked_at(d)
    columns: list[Cells] = []
    left = _PICTURES if pictures else 0
    for _, value, encoder in fields[:_COLUMNS]:
        images = None if encoder is not None else _pictures(value, min(shown, left))
        left -= 0 if images is None else min(shown, left)
        columns.append(images or _cells_of_column(value, encoder, shown, count))
    copies = iter(transfer([tensor for needed, _ in columns for tensor in needed], CPU))
    cells = [make([next(copies) for _ in needed]) for needed, make in columns]
    head = ["", *[one_line(".".join(path)) for path, _, _ in fields[:_COLUMNS]]]
    lines = [Line((str(i), *row)) for i, row in enumerate(zip(*cells, strict=True))]
    first = f": the first {shown}" if count > shown else ""
    title = f"{shorten(one_line(type(d).__name__), 36)}.rows({count}){first}"
    return Page(title, head, lines, more=max(0, len(fields) - _COLUMNS))


def _cells_of_column(value: Any, encoder: StringEncoder | None, shown: int, count: int) -> Cells:
    if isinstance(value, Ragged):
        return _ragged_column(value, encoder, shown)
    if not isinstance(value, Tensor):
        return [], lambda _: [_kept_cell(one) for one in KEPT.each(value, range(shown), count)]
    if not_dense(value) or value.is_meta:
        return [], lambda _: [f"{dtype_name(value.dtype)}[…]"] * shown
    value = value.detach()[:shown]
    if encoder is not None:
        wide = bool(encoder.code_ndim) and value.shape[-1] > _BEGINNING
        return [value[..., :_BEGINNING] if wide else value], partial(_decoded, encoder, wide)
    if value[:1].numel() <= FEW:
        return [value], lambda copies: [cell(one) for one in copies[0].tolist()]
    return [], lambda _: [kind(one) for one in value]


def _ragged_column(value: Ragged, encoder: StringEncoder | None, shown: int) -> Cells:
    """The first values of each row, gathered on the device without a synchronization."""
    values = value.values.detach()
    is_text = encoder is not None and encoder.code_ndim != 0 and values.dim() == 1
    taken = _BEGINNING if is_text else FEW
    offsets = value.offsets[: shown + 1]
    at = offsets[:-1, None] + torch.arange(taken, device=offsets.device)
    beginnings = as_bits(values)[at.clamp(max=max(len(values) - 1, 0))] if len(values) else values[:0]
    has_cells = encoder is not None or values.dim() == 1

    def cells(copies: list[Tensor]) -> list[str]:
        lengths: list[int] = copies[0].diff().tolist()
        if not has_cells:
            return [f"{dtype_name(values.dtype)}{[n, *values.shape[1:]]}" for n in lengths]
        rows = copies[1].view(values.dtype) if len(copies[1]) else [copies[1]] * len(lengths)
        return [_ragged_cell(row[:n], n, encoder, is_text) for row, n in zip(rows, lengths, strict=True)]

    return [offsets, beginnings] if has_cells else [offsets], cells


def _ragged_cell(row: Tensor, length: int, encoder: StringEncoder | None, is_text: bool) -> str:
    if is_text:
        return _string_cell(lambda codes: decode_rows(encoder, codes, _ends(codes))[0], row, length > len(row))  # type: ignore
    items: list[Any] = row.tolist()
    if encoder is not None:
        with suppress(Exception):  # a code that its encoder cannot decode is shown as a number
            items = decode_rows(encoder, row, _ends(row))[0]
    return cell(items) if length <= FEW else f"{cell(items[:3])[:-1]}, … {length} values]"


def _ends(codes: Tensor) -> Tensor:
    return torch.tensor([0, len(codes)], device="cpu")


def _decoded(encoder: StringEncoder, was_cut: bool, copies: list[Tensor]) -> list[str]:
    # Padding is what a string has behind its end.
    cuts = [was_cut and bool((codes[..., -1] != encoder.padding).any()) for codes in copies[0]]
    return [
        _string_cell(partial(decode_nested, encoder), codes, cut) for codes, cut in zip(copies[0], cuts, strict=True)
    ]


def _string_cell(decode: Callable[[Tensor], Any], codes: Tensor, was_cut: bool) -> str:
    """The string of codes, or the codes if they cannot be decoded. ``was_cut``: inside a character, maybe."""
    for left_out in range(4 if was_cut else 1):
        with suppress(Exception):  # the encoder may be a class of the user
            return cell(decode(codes[..., : codes.shape[-1] - left_out] if left_out else codes)) + "…" * was_cut
    return cell(codes.tolist()) if codes.numel() <= FEW else kind(codes)


def cell(value: Any) -> str:
    """A number, a string or nested lists of them on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(cell, value))}]"
    return one_line(value) if isinstance(value, str) else short_number(value)


def _kept_cell(value: Any) -> str:
    if isinstance(value, np.ndarray) and value.size <= FEW and value.dtype.kind in "biufc":
        return cell(value.tolist())
    return single(value) or kind(value)


def _pictures(value: Any, count: int) -> Cells | None:
    """Pictures of the first images, and shapes of the others. None without Pillow, and for other fields."""
    if not (isinstance(value, Tensor) and value.dtype is torch.uint8 and value.dim() == 4 and count):
        return None
    if not_dense(value) or value.is_meta or 0 in value.shape:
        return None
    if value.shape[1] in (1, 3):
        images = value[:_FIRST_ROWS].permute(0, 2, 3, 1)
    elif value.shape[3] == 3:
        images = value[:_FIRST_ROWS]
    else:
        return None
    try:
        pillow: Any = importlib.import_module("PIL.Image")
    except ImportError:
        return None
    step = -(-max(images.shape[1:3]) // _PIXELS)

    def cells(copies: list[Tensor]) -> list[str]:
        out = [kind(one) for one in value[:_FIRST_ROWS]]
        for i, pixels in enumerate(copies[0]):
            file = BytesIO()
            pillow.fromarray(pixels.squeeze(2).numpy()).save(file, "PNG")
            out[i] = Picture(out[i])
            out[i].png = b64encode(file.getvalue()).decode()  # type: ignore[attr-defined]
        return out

    return [images[:count, ::step, ::step].contiguous()], cells
