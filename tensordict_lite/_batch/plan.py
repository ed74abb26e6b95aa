"""The fast path of `collate`: stack plain samples on the CPU. Batches are alike, so their plans are cached.

The cache key of a plan has every dtype and shape of the batch, so a plan is never out of date. A plan holds no tensor.
This path raises no error about samples: for unusual samples it returns False, and the general path of `collate` runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from math import prod
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from .._dict.device_dict import DeviceDict
from .._errors import Path, refuse_deeper
from .._memory.buffer import PACKABLE, in_shared_memory, new_batch_buffer, view_over
from .._memory.device import CPU
from .._memory.layout import Layout, Sizes, lay_out, row_major
from .._memory.packed import packable
from .._tree.policy import Policy
from .._tree.tree import builtin_dict, kind_nested
from .join import merged_policy
from .pad import Pad, Pads, mask_of, require_fit

_STR, _TUPLE = {str}, {tuple}
_NUMPY_TYPES: Mapping[type, Any] = {bool: np.bool_, int: np.int64, float: np.float64}
"""The classes of Python numbers that NumPy converts as torch does, in 0.1x the time."""
_NUMPY_DTYPES: Mapping[Any, torch.dtype] = {
    torch.empty(0, dtype=dtype).numpy().dtype: dtype
    for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
                  torch.float32, torch.float64, torch.complex64, torch.complex128)
}  # fmt: skip
_NUMPY_SCALARS = {dtype.type for dtype in _NUMPY_DTYPES if dtype.kind != "b"}
_KINDS = frozenset((Tensor, dict, list, str, np.ndarray, *_NUMPY_TYPES, *_NUMPY_SCALARS))
"""The types of values that this path takes, besides `DeviceDict` classes."""
_PADDED = 1 << 17
"""The largest number of elements of a padded field that a mask fills faster than a copy of each sample."""
_FEW_KEYS = 8
"""Up to this number of keys, one pass over the samples for each key is faster than one pass for all."""
_FLOATS = (torch.float32, torch.float64)
_strided = torch.strided
_from_numpy = cast("Callable[[Any], Tensor]", torch.from_numpy)  # pyright: ignore[reportUnknownMemberType]
_facts = attrgetter("layout", "requires_grad", "is_cpu", "dtype", "shape")
_dtype, _data = attrgetter("dtype"), attrgetter("data")

_Spec = tuple[Any, ...]
"""The dtype and shape of a complete field, or the `_facts` of the first sample of a field to stack."""
_PlainField = tuple[DeviceDict[Any], str, Any]
"""The dict that gets the field, the key, and the value: a tuple of samples to stack, a tensor, or a `_Padded`."""


class _Unusual(Exception):
    """The samples need the general path."""


class _Padded(NamedTuple):
    """A field to pad."""

    flat: Tensor
    """The rows of all samples, one sample after the other."""
    mask: Any
    """A bool array with the first two dimensions of the field: True for a row of a sample, False for padding."""
    fill: Any


class _Region(NamedTuple):
    """The region of the buffer for all fields with the same spec. Strides and offset count elements.

    The shape is [fields * samples, ...] for a dense region, else [fields, samples, ...].
    """

    dtype: torch.dtype
    sizes: Sizes
    strides: Sizes
    offset: int
    members: tuple[int, ...]
    is_dense: bool


class _BatchPlan(NamedTuple):
    layout: Layout
    regions: tuple[_Region, ...]
    is_dense: bool
    """Whether the buffer is one region without gaps."""
    is_sampled: bool
    """Whether any field is stacked from tensors. Otherwise the batch goes to torch's default device."""


@lru_cache(maxsize=64)
def _plan_of(specs: tuple[_Spec, ...], count: int) -> _BatchPlan | None:
    """The plan of a batch of ``count`` samples. None if its fields cannot be packed, or are empty."""
    shapes: list[tuple[torch.dtype, Sizes]] = []
    for *facts, dtype, shape in specs:
        if facts not in ([], [_strided, False, True]) or dtype not in PACKABLE or (facts and dtype.is_complex):
            return None
        shapes.append((dtype, (count, *shape) if facts else tuple(shape)))
    layout = lay_out(((dtype, shape, row_major(shape)), [i]) for i, (dtype, shape) in enumerate(shapes))
    found: list[_Region] = []
    for run in layout.runs:
        sizes, strides, offset = run.region
        is_dense = len(run.members) == 1 or run.step == run.nbytes
        if is_dense and len(run.members) > 1:  # [fields, samples, ...] becomes [fields * samples, ...]
            sizes, strides = (sizes[0] * sizes[1], *sizes[2:]), strides[1:]
        found.append(_Region(run.dtype, sizes, strides, offset, tuple(run.members), is_dense))
    is_dense = len(found) == 1 and found[0].is_dense
    is_sampled = any(len(spec) > 2 for spec in specs)
    return _BatchPlan(layout, tuple(found), is_dense, is_sampled) if layout.nbytes else None


def stack_plain(samples: Sequence[Any], batch: DeviceDict[Any], pads: Pads) -> bool:
    """Fill ``batch``, which is empty and on the CPU, with the stacked fields of the samples, packed.

    The samples have one type, ``dict`` or a `DeviceDict` class. False if they need the general path; then ``batch`` is
    unusable.
    """
    fields: list[_PlainField] = []
    try:
        _find_fields(samples, batch, (), fields, pads)
        tensors = _make_tensors(fields, len(samples))
    except torch.OutOfMemoryError:
        raise
    except (_Unusual, RuntimeError, TypeError, ValueError, LookupError, OverflowError):
        return False
    for (owner, key, _), tensor in zip(fields, tensors, strict=True):
        builtin_dict.__setitem__(owner, key, tensor)
    return True


def _find_fields(
    samples: Sequence[Any], batch: DeviceDict[Any], at: Path, fields: list[_PlainField], pads: Pads
) -> None:
    """List the fields of ``batch``, depth first. Each gets a placeholder there, which keeps the order of the keys."""
    cls = type(batch)
    if cls._has_fields:
        samples = list(map(cls._drop_none, samples))
    first, count, padded = samples[0], len(samples), bool(pads)
    names, kinds = list(first), list(map(type, builtin_dict.values(first)))
    odd = not _KINDS.issuperset(kinds) and not all(kind in _KINDS or issubclass(kind, DeviceDict) for kind in kinds)
    if odd or not _STR.issuperset(map(type, names)):
        raise _Unusual
    if padded:
        pads.require_new(names, at, "the samples")
    used: dict[str, Any] = {}
    for key, kind, column in zip(names, kinds, _values_by_key(samples, names), strict=True):
        if list(map(type, column)).count(kind) != count:  # takes 0.7x the time of a set
            raise _Unusual
        pad = pads.at((*at, key)) if padded else None
        if kind is Tensor and pad is None:
            value = column
        elif kind is dict or kind not in _KINDS:  # a `DeviceDict` class
            _list_nested(column, kind, batch, (*at, key), fields, pads)
            continue
        elif pad is not None:
            _list_padded(column, kind, batch, (*at, key), fields, pad)
            continue
        elif kind is str:
            value = _codes(column, batch._policy, key)
            used[key] = batch._policy.encoder(key)
        else:
            value = _host_field(column, kind, batch._policy)
        _list_field(fields, batch, key, value)
    if used:
        batch._policy = batch._policy.with_encoders(used)


def _values_by_key(samples: Sequence[Any], names: list[str]) -> Iterable[tuple[Any, ...]]:
    """The values of every key. Raises ``KeyError`` or ``_Unusual`` if the keys of a sample differ from the first."""
    if type(samples[0]) is not dict:  # a subclass of `DeviceDict` may override the lookup of keys
        if list(map(list, samples)).count(names) != len(samples):
            raise _Unusual
        return zip(*map(builtin_dict.values, samples), strict=True)
    if list(map(len, samples)).count(len(names)) != len(samples):
        raise _Unusual
    if len(names) > _FEW_KEYS:
        return zip(*map(itemgetter(*names), samples), strict=True)
    return [tuple(map(itemgetter(name), samples)) for name in names]


def _list_field(fields: list[_PlainField], batch: DeviceDict[Any], key: str, value: Any) -> None:
    """Append one field to ``fields``. A placeholder in ``batch`` keeps the order of the keys."""
    fields.append((batch, key, value))
    builtin_dict.__setitem__(batch, key, None)


def _list_nested(
    column: tuple[Any, ...], kind: type, batch: DeviceDict[Any], path: Path, fields: list[_PlainField], pads: Pads
) -> None:
    refuse_deeper(path)
    own = None if kind is dict else merged_policy(column, path, "sample")
    keys = () if kind is dict else column[0]
    cls, policy = kind_nested(type(batch), path[-1], kind, own, keys, batch._policy)
    nested = cls._new((), CPU, policy)
    builtin_dict.__setitem__(batch, path[-1], nested)
    _find_fields(column, nested, path, fields, pads)


def _codes(column: tuple[str, ...], policy: Policy, key: str) -> Tensor:
    """The codes of the strings of a field."""
    encoder = policy.encoder(key)
    # If this path gives up, the general path encodes the strings again. Encoders that are not plain data may be slow.
    if getattr(encoder, "is_data", False) is not True:
        raise _Unusual
    codes = encoder.encode(list(column))
    if not (isinstance(codes, Tensor) and packable(codes) and codes.is_cpu and codes.is_contiguous()):
        raise _Unusual
    if codes.shape[:1] != (len(column),):
        raise _Unusual
    return codes


def _list_padded(
    column: tuple[Any, ...], kind: type, batch: DeviceDict[Any], path: Path, fields: list[_PlainField], pad: Pad
) -> None:
    """List a field that ``pad`` applies to, and the new fields that ``pad`` names."""
    key, count = path[-1], len(column)
    if key in batch._policy.encoders:  # the codes of strings
        raise _Unusual
    if kind is Tensor:  # `len` of a tensor takes 6x the time of `numel`
        inner = prod(column[0].shape[1:])
        if not inner:
            raise _Unusual
        lengths = [numel // inner for numel in map(Tensor.numel, column)]
    else:
        inner, lengths = 1, list(map(len, column))  # TypeError for numbers
    if lengths.count(lengths[0]) == count and not pad._always:
        _list_field(fields, batch, key, column if kind is Tensor else _host_field(column, kind, batch._policy))
        return
    longest = pad._length(max(lengths))
    if kind is list:
        items = tuple(chain.from_iterable(column))
        flat = _host_field(items, _kind_of_numbers(items), batch._policy)
    elif kind is Tensor and column[0].is_cpu and count * longest * inner <= _PADDED:
        require_one_dtype(column)
        if list(map(Tensor.dim, column)).count(column[0].dim()) != count:  # `cat` accepts empty 1-D tensors
            raise _Unusual
        flat = torch.cat(column)  # pyright: ignore[reportArgumentType]
    else:
        raise _Unusual
    if not packable(flat) or (kind is list and flat.dim() != 1):
        raise _Unusual
    require_fit(pad, flat.dtype, path)
    sizes = np.array(lengths, np.int64)
    mask = mask_of(sizes, np.arange(longest), pad.side)
    _list_field(fields, batch, key, _Padded(flat, mask, pad.value))
    for extra, option in pad._extras.items():
        _list_field(fields, batch, extra, _from_numpy(sizes if option == "lengths" else mask))


def _host_field(column: tuple[Any, ...], kind: type, policy: Policy) -> Tensor:
    """The field of host values of one type, in the dtype of a dict with this policy."""
    if kind is list:
        kind = _kind_of_numbers(chain.from_iterable(column))
    if kind in _NUMPY_TYPES:
        wanted = (policy.dtype or torch.get_default_dtype()) if kind is float else None
        if wanted is not None and wanted not in _FLOATS:
            raise _Unusual
        tensor = _from_numpy(np.array(column, _NUMPY_TYPES[kind]))
        return tensor if wanted is None else tensor.to(wanted)
    if kind is np.ndarray:
        alike = {(array.shape, array.dtype, array.flags.c_contiguous) for array in column}
        if len(alike) > 1 or not column[0].flags.c_contiguous or column[0].dtype not in _NUMPY_DTYPES:
            raise _Unusual
        array = np.stack(column)
    elif kind in _NUMPY_SCALARS:
        array = np.array(column)
    else:
        raise _Unusual
    tensor = _from_numpy(array)
    return tensor.to(policy.dtype) if array.dtype.kind == "f" and policy.dtype is not None else tensor


def _kind_of_numbers(items: Iterable[Any]) -> type:
    """The class of all items, if it is a class of Python numbers."""
    kinds = set(map(type, items))
    if len(kinds) != 1 or not kinds.issubset(_NUMPY_TYPES):
        raise _Unusual
    return kinds.pop()


def _make_tensors(fields: Sequence[_PlainField], count: int) -> Sequence[Tensor]:
    """The stacked fields, as tensors over one new buffer. Raises ``_Unusual`` or torch's error for unusual samples."""
    values = [value for _, _, value in fields]
    if not values:
        raise _Unusual
    specs: list[_Spec] = []
    for value in values:
        if type(value) is tuple:
            first = cast(Tensor, value[0])
            if first.is_neg():
                raise _Unusual
            specs.append(_facts(first))
        elif type(value) is _Padded:
            specs.append((value.flat.dtype, (*value.mask.shape, *value.flat.shape[1:])))
        else:
            specs.append((value.dtype, value.shape))
    plan = _plan_of(tuple(specs), count)
    if plan is None or not (plan.is_sampled or torch.empty(0).device == CPU):
        raise _Unusual
    if plan.is_dense and not in_shared_memory(plan.layout.nbytes):
        if _TUPLE.issuperset(map(type, values)):
            return _stack_dense(values, count)
        if len(values) == 1 and type(values[0]) is Tensor:
            return [values[0].clone()]  # torch aligns memory better than NumPy
    storage = new_batch_buffer(plan.layout, CPU).untyped_storage()
    out: list[Any] = [None] * len(values)
    for dtype, sizes, strides, offset, members, is_dense in plan.regions:
        region = view_over(storage, dtype, sizes, strides, offset, CPU)
        here = [values[i] for i in members]
        if len(here) == 1:
            _fill(region, here[0])
            out[members[0]] = region
            continue
        parts = cast(Any, region).unsafe_split(count) if is_dense else region.unbind()
        if is_dense and _TUPLE.issuperset(map(type, here)):
            # One call for the samples of all fields of a run is faster than a call for each field.
            stack_into(region, _all_samples(here))
        else:
            for part, value in zip(parts, here, strict=True):
                _fill(part, value)
        if not is_dense:
            parts = map(_data, parts)  # see `views_of`
        for i, part in zip(members, parts, strict=True):
            out[i] = part
    return out


def _stack_dense(values: Sequence[Any], count: int) -> Sequence[Tensor]:
    """The fields of a batch with one spec and no gaps. The storage that ``torch.stack`` allocates is their buffer."""
    samples = values[0] if len(values) == 1 else _all_samples(values)
    require_one_dtype(samples)
    stacked = torch.stack(samples)
    if stacked.requires_grad or not stacked.is_contiguous():
        raise _Unusual
    # Each part of `unsafe_split` has its own version counter. `unbind` would need `.data` too, and 2x the time.
    return [stacked] if len(values) == 1 else cast(Any, stacked).unsafe_split(count)


def _all_samples(columns: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    """Join the columns into one list, in 0.4x the time of ``chain``."""
    out: list[Tensor] = []
    for column in columns:
        out += column
    return out


def _fill(view: Tensor, value: Any) -> None:
    if type(value) is tuple:
        stack_into(view, cast("tuple[Tensor, ...]", value))
    elif type(value) is _Padded:
        view.fill_(value.fill)
        view.numpy()[value.mask] = value.flat.numpy()  # takes 0.6x the time of masked_scatter_
    else:
        view.copy_(value)


def stack_into(view: Tensor, samples: Sequence[Tensor]) -> None:
    """Stack samples into a view of a buffer. Raises ``RuntimeError`` if they differ."""
    require_one_dtype(samples)
    torch.stack(samples, out=view)  # pyright: ignore[reportArgumentType, reportCallIssue]


def require_one_dtype(samples: Sequence[Tensor]) -> None:
    """Raise ``RuntimeError`` if the dtypes differ. ``torch.stack`` would promote them."""
    # The fastest way to compare them. It takes about 0.5x the time of the stack.
    if list(map(_dtype, samples)).count(samples[0].dtype) != len(samples):
        raise RuntimeError("samples of different dtypes")
