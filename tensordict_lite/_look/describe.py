"""Statistics of each field, one chunk at a time, and the rows where a function holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import accumulate, chain, compress, pairwise
from math import isfinite, prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .._encoders.protocol import StringEncoder, decode_nested, decode_rows
from .._errors import Path, described, dotted, is_out_of_memory, shown
from .._memory.dense import not_dense
from .._memory.device import CPU
from .._memory.transfer import transfer
from .._tree.fields import fields
from .._tree.kinds import RAGGED, Field, kind_of
from .._tree.policy import Policy
from .._tree.ragged import Ragged
from .._tree.tree import TreeDict, data_in
from .._tree.walk import nbytes
from .page import Line, Page, as_html, as_text, one_line, shorten
from .progress import Progress, reporter
from .tree import short_number

_ON_HOST, _ON_DEVICE = 1 << 20, 64 << 20
"""The bytes of a chunk. On the CPU, a chunk stays in the cache while several kernels read it."""
_SAMPLE, _BINS = 4096, 8
_MOST_STRINGS = 100_000
_LIMIT = 120
_BARS = " ▁▂▃▄▅▆▇█"


class Description:
    """What `DeviceDict.describe` found: a line for each field. In a notebook, a table.

    - ``min``, ``mean`` and ``max`` are those of the finite numbers, of complex numbers those of the absolute values.
    - ``nan``, ``inf``, ``zero``: the shares of the numbers that are NaN, infinite and zero.
    - The histogram has eight bins from ``min`` to ``max``. It counts up to 4096 of the finite numbers, evenly spaced.
    - Of strings: how many are distinct, the shortest, the longest, the most frequent one and its share.
    - Of ragged fields also ``lengths``, with the same statistics. In the text, they stand in the shape.

    The text shows four digits. `tolist` has the numbers themselves: ``min`` and ``max`` of integers are exact.
    """

    def __init__(self, title: str, fields: list[dict[str, Any]]) -> None:
        self._title, self._fields = title, fields

    def tolist(self) -> list[dict[str, Any]]:
        """A plain dict for each field, for logs and JSON. What a field does not have is missing.

        >>> from tensordict_lite import DeviceDict
        >>> DeviceDict({"x": [0, 1, 2, 5]}).describe().tolist()[0]["mean"]
        2.0
        """
        return [dict(field) for field in self._fields]

    def __repr__(self) -> str:
        return as_text(self._page(), _LIMIT)

    def _repr_html_(self) -> str:
        return as_html(self._page())

    def _page(self) -> Page:
        head = ("field", "dtype[shape]", "min", "mean", "max", "nan", "inf", "zero", "values")
        lines = [_cells_of(field) for field in self._fields]
        used = [any(column) for column in zip(*lines, strict=True)]
        return Page(self._title, [*compress(head, used)], [Line([*compress(cells, used)]) for cells in lines])


def _cells_of(field: dict[str, Any]) -> tuple[str, ...]:
    numbers = [_shortest(field[name]) if name in field else "" for name in ("min", "mean", "max")]
    shares = [f"{100 * share:.3g} %" if (share := field.get(name, 0)) else "" for name in ("nan", "inf", "zero")]
    notes: list[str] = []
    if counts := field.get("histogram"):
        most = max(counts)
        notes.append("".join(_BARS[-(-8 * count // most)] for count in counts))
    if "distinct" in field:
        notes.append(f"{field['distinct']}{'' if field['exact'] else ' or more'} distinct")
        texts = {name: shorten(one_line(field[name]), 16) for name in ("shortest", "longest", "most") if name in field}
        if "shortest" in texts:
            notes.append(" to ".join(dict.fromkeys([texts["shortest"], texts["longest"]])))
        if "most" in texts:
            notes.append(f"{texts['most']} {100 * field['share']:.3g} %")
    lengths = field.get("lengths", {})
    size = f"{lengths['min']} to {lengths['max']}" if "min" in lengths else "*"  # of the rows of a ragged field
    shape = ", ".join(size if one is None else str(one) for one in field.get("shape", ()))
    what = f"{field['dtype']}[{shape}]" if "dtype" in field else f"object {one_line(field['object'])}"
    return (shorten(one_line(".".join(field["path"])), 36), what, *numbers, *shares, ", ".join(notes))


def _shortest(value: Any) -> str:
    text = short_number(value)
    return text if len(text) <= 12 else f"{value:.4g}"


class _Numbers:
    """What is known of numbers after some chunks of them."""

    def __init__(self, total: int) -> None:
        self.step = max(1, total // _SAMPLE)
        self.count = self.finite = self.nan = self.zero = 0
        self.sum: int | Fraction = 0
        self.ends: list[Any] = []
        self.sample: list[Any] = []

    def measure(self, given: Tensor) -> list[Tensor]:
        """What the host needs to know of a chunk, computed on its device."""
        x = _comparable(given)
        if not len(x):
            return []
        total = x.sum() if x.is_floating_point() else x.sum(dtype=torch.int64)
        nonzero = _nonzero(given.view(torch.int64) if given.dtype is torch.uint64 else x)
        return [*x.aminmax(), nonzero, x[:: self.step].clone(), total]

    def add(self, given: Tensor, found: list[Tensor]) -> None:
        """Add a chunk. ``found``: the result of `measure`, on the host."""
        self.count += len(given)
        if not found:
            return
        low, high, nonzero, total = (found[i].item() for i in (0, 1, 2, 4))
        self.zero += len(given) - int(nonzero)
        finite, sample = len(given), found[3]
        if not (isfinite(low) and isfinite(high)):
            ends, total, nan, inf = _without_nan(_comparable(given), int(nonzero))
            self.nan += nan
            finite, sample = finite - nan - inf, sample[sample.isfinite()]
            if not finite:
                return
            low, high = ends
        self.finite += finite
        shift = 2**63 if given.dtype is torch.uint64 else 0
        self.ends += [low + shift, high + shift]
        self.sample.append(sample.to(torch.float64) + shift)
        largest = max(abs(low), abs(high))
        if isinstance(total, int):
            if largest * len(given) >= 2**63:  # the sum has more than 64 bits, of which a float has the upper ones
                upper = _comparable(given).sum(dtype=torch.float64).item()
                total += round((upper - total) / 2**64) << 64
            self.sum += total + shift * len(given)
        elif isfinite(total):
            self.sum += Fraction(total)
        else:
            x = _comparable(given).nan_to_num(0, 0, 0) / largest
            self.sum += Fraction(x.sum(dtype=torch.float64).item()) * Fraction(largest)

    def result(self) -> dict[str, Any]:
        if not self.count:
            return {}
        infinite = self.count - self.finite - self.nan
        shares = {"nan": self.nan / self.count, "inf": infinite / self.count, "zero": self.zero / self.count}
        if not self.finite:
            return shares
        low, high = min(self.ends), max(self.ends)
        scale = float(max(abs(low), abs(high))) or 1.0  # a difference of numbers near the largest one would overflow
        values, start, end = torch.cat(self.sample) / scale, low / scale, high / scale
        bins = ((values - start) / ((end - start) or 1) * _BINS).long().clamp(0, _BINS - 1)
        ends = {"min": low, "mean": float(self.sum / Fraction(self.finite)), "max": high}
        return {**ends, **shares, "histogram": bins.bincount(minlength=_BINS).tolist()}


def _nonzero(x: Tensor) -> Tensor:
    """The count of the numbers that are not zero. It takes a third of the time of ``count_nonzero``."""
    ones = x.bool()
    whole = len(ones) // 1024
    # 128 numbers of eight bytes, whose bytes are 0 or 1: no byte of the sum overflows.
    bytewise = ones[: 1024 * whole].view(torch.int64).view(whole, 128).sum(1)
    return bytewise.view(torch.uint8).sum(dtype=torch.int64) + ones[1024 * whole :].sum()


def _without_nan(x: Tensor, nonzero: int) -> tuple[list[float], float, int, int]:
    """The ends and the sum of the finite numbers; the counts of NaN and of infinities. ``nonzero``: of all numbers."""

    def measured(*numbers: Tensor) -> list[Any]:
        found = [(*one.aminmax(), one.sum(), _nonzero(one)) for one in numbers]
        return [one.item() for one in transfer([*chain.from_iterable(found)], CPU)]

    # Masks and indices take much longer than `nan_to_num`.
    inf = float("inf")
    low, high, total, kept = measured(x.nan_to_num(0, inf, -inf))
    finite = kept
    if not (isfinite(low) and isfinite(high)):
        low, high, total, finite = measured(x.nan_to_num(0, 0, 0))
    if low == 0 or high == 0:  # maybe for a NaN
        low, *_, high, _, _ = measured(x.nan_to_num(inf, inf, inf), x.nan_to_num(-inf, -inf, -inf))
    return [low, high], total, nonzero - kept, kept - finite


def _comparable(given: Tensor) -> Tensor:
    """Numbers of a dtype whose kernels order and add them, without a loss. uint64 is shifted by 2**63."""
    if given.dtype is torch.uint64:
        return given.view(torch.int64) ^ torch.iinfo(torch.int64).min
    if given.is_complex():
        return given.to(torch.complex128).abs()
    if given.is_floating_point():
        return given if given.itemsize >= 4 else given.float()
    if given.dtype is torch.bool:
        return given.view(torch.uint8)
    return given.long() if given.dtype in (torch.uint16, torch.uint32) else given


class _Strings:
    """What is known of the codes of strings after some chunks of them."""

    def __init__(self, encoder: StringEncoder, shape: Sequence[int], is_ragged: bool) -> None:
        self.encoder, self.shape, self.is_ragged = encoder, tuple(shape), is_ragged
        self.counts: Counter[bytes] = Counter()
        self.count, self.exact, self.dtype = 0, True, torch.uint8

    def measure(self, given: Any) -> list[Tensor]:
        return [given.values.detach(), given.offsets] if self.is_ragged else [given.detach()]

    def add(self, given: Any, found: list[Tensor]) -> None:
        """Add a chunk. ``found``: the result of `measure`, on the host."""
        codes, self.dtype = found[0], found[0].dtype
        if not self.is_ragged and self.shape and codes.shape[-1] < self.shape[-1]:  # another part has longer strings
            codes = F.pad(codes, (0, self.shape[-1] - codes.shape[-1]), value=self.encoder.padding)
        data = codes.contiguous().numpy().tobytes()
        if self.is_ragged:
            ends = (found[1] * codes.itemsize).tolist()
        else:
            count = prod(codes.shape[: codes.dim() - len(self.shape)])
            ends = [i * prod(self.shape) * codes.itemsize for i in range(count + 1)]
        rows = [data[start:end] for start, end in pairwise(ends)]
        self.count += len(rows)
        for row, count in Counter(rows).items():
            if row in self.counts or len(self.counts) < _MOST_STRINGS:
                self.counts[row] += count
            else:
                self.exact = False

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = {"distinct": len(self.counts), "exact": self.exact}
        with suppress(Exception):  # a hash, no strings, or codes that their encoder cannot decode
            texts = self._decoded(list(self.counts))
            found |= {"shortest": min(texts, key=len), "longest": max(texts, key=len)}
            if self.exact:
                [(row, count)] = self.counts.most_common(1)
                found |= {"most": self._decoded([row])[0], "share": count / self.count}
        return found

    def _decoded(self, rows: list[bytes]) -> list[str]:
        codes = torch.tensor(bytearray(b"".join(rows)), dtype=torch.uint8, device="cpu").view(self.dtype)
        if not self.is_ragged:
            return decode_nested(self.encoder, codes.view(len(rows), *self.shape))
        ends = [0, *accumulate(len(row) // self.dtype.itemsize for row in rows)]
        return decode_rows(self.encoder, codes, torch.tensor(ends, device="cpu"))


def statistics(parts: Sequence[TreeDict[Any]], title: str, progress: Progress = None) -> Description:
    """Statistics of the fields of dicts of one schema, one after the other. See `DeviceDict.describe`."""
    total, done = sum(nbytes(tensor) for d in parts for tensor in d._tensors()), 0
    report = reporter(progress, total)
    found = entries(parts)
    waiting: list[tuple[Any, Any, list[Tensor]]] = []  # of a device: one copy to the host, at the end
    left: list[tuple[dict[str, Any], str, Any]] = []
    for entry, column in zip(found, _over(parts), strict=True):
        for name, look, chunks in _looks(column):
            for chunk in chunks:
                waiting.append((look, chunk, look.measure(chunk)))
                if chunk.device == CPU:
                    _add(waiting)
                done += _size_of(chunk)
                report(min(done, total))
            left.append((entry, name, look))
        if not waiting:
            _finish(left)
    _add(waiting)
    _finish(left)
    report(total)
    return Description(title, found)


def of_ragged(ragged: Ragged, progress: Progress) -> Description:
    """Statistics of one ragged field. See `Ragged.describe`."""
    d: TreeDict[Any] = TreeDict._new({"values": ragged}, ragged.device, Policy())
    return statistics([d], repr(ragged), progress)


def _add(waiting: list[tuple[Any, Any, list[Tensor]]]) -> None:
    copies = iter(transfer([tensor for _, _, found in waiting for tensor in found], CPU))
    for look, chunk, found in waiting:
        look.add(chunk, [next(copies) for _ in found])
    waiting.clear()


def _finish(left: list[tuple[dict[str, Any], str, Any]]) -> None:
    for entry, name, look in left:
        entry.update({name: look.result()} if name else look.result())
    left.clear()


def entries(parts: Sequence[TreeDict[Any]]) -> list[dict[str, Any]]:
    """What `Description.tolist` returns, without statistics: no value is read."""
    found: list[dict[str, Any]] = []
    for column in _over(parts):
        first = column[0]
        entry = {"path": [*first.path], **first.kind.describe([field.value for field in column])}
        found.append(entry if first.decoder is None else {**entry, "encoder": shown(first.decoder)})
    return found


def _over(parts: Sequence[TreeDict[Any]]) -> Iterable[Sequence[Field]]:
    """Each field of all parts."""
    return zip(*map(fields, parts), strict=True)


def _looks(column: Sequence[Field]) -> Iterator[tuple[str, Any, Iterator[Any]]]:
    """The name of a result in its entry, what computes it, and the chunks that it takes."""
    values, encoder = [field.value for field in column], column[0].decoder
    data: list[Any] = list(map(data_in, values))
    if any(one is None or not_dense(one) for one in data):
        return
    is_ragged = column[0].kind is RAGGED
    if is_ragged:
        yield "lengths", _Numbers(sum(map(len, values))), chain.from_iterable(map(_lengths, values))
    if encoder is None:
        yield "", _Numbers(sum(one.numel() for one in data)), chain.from_iterable(map(_flat, data))
        return
    is_text = is_ragged and data[0].dim() == 1 and encoder.code_ndim != 0
    code_ndim = data[0].dim() - 1 if encoder.code_ndim is None else encoder.code_ndim
    shape = () if is_text or not code_ndim else max(tuple(one.shape[-code_ndim:]) for one in data)
    yield "", _Strings(encoder, shape, is_text), chain.from_iterable(map(_row_chunks, values if is_text else data))


def _limit(value: Any) -> int:
    return _ON_HOST if value.device == CPU else _ON_DEVICE


def _size_of(value: Any) -> int:
    return sum(map(nbytes, kind_of(value).tensors(value)))


def _flat(value: Tensor) -> Iterator[Tensor]:
    """The elements of a tensor in chunks."""
    value = value.detach()
    is_whole = value.is_contiguous() or value.nbytes <= _limit(value)
    return (part.reshape(-1) for part in _row_chunks(value.reshape(-1) if is_whole else value))


def _row_chunks(value: Any) -> Iterator[Any]:
    """The rows of a field in chunks. One number or string is one row."""
    value = torch.atleast_1d(value) if isinstance(value, Tensor) else value
    step = max(1, _limit(value) * len(value) // max(1, _size_of(value)))
    return (value[start : start + step] for start in range(0, len(value), step))


def _lengths(value: Ragged) -> Iterator[Tensor]:
    step = _limit(value) // 8
    return (value.offsets[start : start + step + 1].diff() for start in range(0, len(value), step))


def find(d: TreeDict[Any], function: Callable[[Tensor], Tensor]) -> dict[Any, Tensor]:
    """The rows where a function holds, by field. See `DeviceDict.find`."""
    masks: dict[Any, Tensor] = {}
    failed: list[tuple[Path, Exception]] = []
    found_fields = fields(d)
    for path, _, value, encoder, _ in found_fields:
        if encoder is not None or (data := data_in(value)) is None:
            continue
        try:
            found: Any = function(data)
        except Exception as error:  # a function may take some dtypes and shapes only
            if is_out_of_memory(error):
                raise
            failed.append((path, error))
            continue
        if not isinstance(found, Tensor) or found.dtype is not torch.bool or found.shape[:1] != data.shape[:1]:
            raise TypeError(
                f"{dotted(path)}: expected a bool tensor for {described(data)}, got {described(found)}; give find a "
                "function such as torch.isnan"
            )
        mask = found.flatten(1).any(1) if found.dim() > 1 else found.reshape(-1)
        masks[path if len(path) > 1 else next(iter(path))] = (
            _any_in_row(mask, value) if isinstance(value, Ragged) else mask
        )
    if found_fields and not masks:
        path, error = failed[0] if failed else (found_fields[0].path, TypeError("it has no numbers"))
        raise TypeError(f"{dotted(path)}: find can call the function for no field; the error is: {error}") from error
    found_rows = [mask.nonzero().flatten() for mask in transfer(list(masks.values()), CPU)]
    return {key: rows for key, rows in zip(masks, found_rows, strict=True) if len(rows)}


def _any_in_row(mask: Tensor, value: Ragged) -> Tensor:
    before = F.pad(mask.cumsum(0), (1, 0))[value.offsets.long()]
    return before.diff() > 0
