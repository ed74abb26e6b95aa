"""The fast path of `collate`: stack plain samples on the CPU. Batches are alike, so their plans are cached.

The cache key of a plan has every dtype and shape of the batch, so a plan is never out of date. A plan holds no tensor
with elements. A batch of dicts is first compared with the last batch that had its keys: see `_Alike`.
This path raises no error about samples: for unusual samples it returns False, and the general path of `collate` runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from math import prod
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._dict.device_dict import DeviceDict
from .._errors import Path, refuse_deeper
from .._memory.buffer import PACKABLE, in_shared_memory, new_batch_storage, without_elements
from .._memory.device import CPU, intercepted
from .._memory.layout import Layout, Sizes, lay_out, row_major
from .._memory.packed import packable
from .._memory.snapshot import remember
from .._tree.policy import Policy
from .._tree.tree import TreeDict, builtin_dict, kind_nested
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
_FLAT = _KINDS - {dict, str}
"""The types of values of a batch that can be compared with the next one."""
_PADDED = 1 << 17
"""The largest number of elements of a padded field that a mask fills faster than a copy of each sample."""
_FEW_KEYS = 8
"""Up to this number of keys, one pass over the samples for each key is faster than one pass for all."""
_FLOATS = (torch.float32, torch.float64)
_from_numpy = torch.from_numpy  # pyright: ignore[reportUnknownMemberType]
_dtype, _data = attrgetter("dtype"), attrgetter("data")
_value, _spec = itemgetter(2), itemgetter(3)

_Spec = tuple[torch.dtype, Sizes, bool]
"""The dtype and shape of a complete field, and False; or of a sample to stack, and True."""
_PlainField = tuple[DeviceDict[Any], str, Any, _Spec]
"""The dict that gets the field, the key, the value, and its spec.

The value is a tuple of samples to stack, a NumPy array or tensor of all samples, or a `_Padded`.
"""


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

    empty: Tensor
    """A tensor of the dtype, without elements."""
    offset: int
    sizes: Sizes
    strides: Sizes
    members: tuple[int, ...]
    is_dense: bool

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        """A tensor over the region. It has its own version counter."""
        return self.empty.data.set_(storage, self.offset, self.sizes, self.strides)


class _BatchPlan(NamedTuple):
    layout: Layout
    regions: tuple[_Region, ...]
    has_gaps: bool
    """Whether there are gaps between the fields."""
    is_sampled: bool
    """Whether any field is stacked from tensors. Otherwise the batch goes to torch's default device."""
    is_one_stack: bool
    """Whether one ``torch.stack`` makes the whole batch."""


@lru_cache(maxsize=64)
def _plan_of(specs: tuple[_Spec, ...], count: int, inference: bool) -> _BatchPlan | None:
    """The plan of a batch of ``count`` samples. None if its fields cannot be packed, or are empty.

    ``inference``: whether inference mode is on. Then the fields are inference tensors.
    """
    shapes: list[tuple[torch.dtype, Sizes]] = []
    for dtype, shape, is_sampled in specs:
        if dtype not in PACKABLE or (is_sampled and dtype.is_complex):
            return None
        shapes.append((dtype, (count, *shape) if is_sampled else tuple(shape)))
    layout = lay_out(((dtype, shape, row_major(shape)), [i]) for i, (dtype, shape) in enumerate(shapes))
    found: list[_Region] = []
    for run in layout.runs:
        sizes, strides, offset = run.region
        is_dense = len(run.members) == 1 or run.step == run.nbytes
        if is_dense and len(run.members) > 1:  # [fields, samples, ...] becomes [fields * samples, ...]
            sizes, strides = (sizes[0] * sizes[1], *sizes[2:]), strides[1:]
        empty = without_elements(run.dtype, CPU, inference)
        found.append(_Region(empty, offset, sizes, strides, tuple(run.members), is_dense))
    is_dense = len(found) == 1 and found[0].is_dense
    stacked = [is_sampled for *_, is_sampled in specs]
    has_gaps = any(run.step > run.nbytes for run in layout.runs)
    if not layout.nbytes:
        return None
    return _BatchPlan(layout, tuple(found), has_gaps, any(stacked), is_dense and all(stacked))


class _Alike(NamedTuple):
    """What a batch of dicts was like. No field was nested, encoded or padded."""

    size: int
    """The number of samples."""
    inference: bool
    getters: list[Callable[[Any], Any]]
    """Get the value of each key from a sample."""
    get_all: Callable[[Any], Any] | None
    """Gets the values of all keys from a sample. None for up to `_FEW_KEYS` keys."""
    fields: list[tuple[type, Any, Sizes]]
    """The type of the values, and the dtype and shape of a sample to stack, or of a complete field."""
    plan: _BatchPlan


_ALIKE: dict[tuple[str, ...], tuple[_Alike | None, _BatchPlan]] = {}
"""By the keys: what a batch was like, and the plan of the last batch that was not.

The next batch is usually alike. Then it takes 0.7x to 0.8x the time.
"""


def stack_plain(
    samples: Sequence[Any], kind: type[DeviceDict[Any]], policy: Policy, pads: Pads | None
) -> DeviceDict[Any] | None:
    """Make a batch of class ``kind`` with the stacked fields of the samples, packed.

    The samples have one type, ``dict`` or a `DeviceDict` class. None if they need the general path.
    """
    first: Any = samples[0]
    names: tuple[str, ...] = tuple(first)
    count, is_dict = len(samples), type(first) is dict
    if intercepted() or not (is_dict or (isinstance(first, TreeDict) and first._device is CPU)):
        return None
    alike = unlike = None
    remembers = is_dict and pads is None and not kind._has_fields
    try:
        if remembers and (last := _ALIKE.get(names)) is not None:
            alike, unlike = last
            tensors = None if alike is None else _tensors_alike(samples, alike, policy)
            if tensors is not None:
                return kind._new(zip(names, tensors), CPU, policy)  # noqa: B905  (faster, and the plan has every name)
        batch, fields = kind._new((), CPU, policy), list[_PlainField]()
        _find_fields(samples, batch, (), fields, pads)
        plan = _plan_of(tuple(map(_spec, fields)), count, torch.is_inference_mode_enabled())
        if plan is None or not _goes_to_cpu(plan):
            return None
        tensors = _make_tensors(plan, list(map(_value, fields)), count)
    except torch.OutOfMemoryError:
        raise
    except (_Unusual, RuntimeError, TypeError, ValueError, LookupError, OverflowError):
        return None
    for field, tensor in zip(fields, tensors, strict=True):
        builtin_dict.__setitem__(field[0], field[1], tensor)
    if remembers:  # to remember a batch takes as long as it saves, and shapes may vary, so this takes two batches
        remember(_ALIKE, names, (_describe(samples[0], count, fields, plan) if plan is unlike else alike, plan))
    return batch


def _goes_to_cpu(plan: _BatchPlan) -> bool:
    """Whether the batch is created on the CPU: where the samples are, or on torch's default device."""
    return plan.is_sampled or torch.empty(0).device == CPU


def _describe(first: Mapping[str, Any], count: int, fields: Sequence[_PlainField], plan: _BatchPlan) -> _Alike | None:
    """What a batch was like. None if a field is nested or a value is a string."""
    kinds = list(map(type, first.values()))
    if len(fields) != len(kinds) or not _FLAT.issuperset(kinds):
        return None
    known: list[tuple[type, Any, Sizes]] = []
    for kind, (_, _, value, (dtype, shape, is_sampled)) in zip(kinds, fields, strict=True):
        known.append((kind, dtype if is_sampled else value.dtype, shape))
    get_all = itemgetter(*first) if len(first) > _FEW_KEYS else None
    return _Alike(count, torch.is_inference_mode_enabled(), list(map(itemgetter, first)), get_all, known, plan)


def _tensors_alike(samples: Sequence[Any], alike: _Alike, policy: Policy) -> Sequence[Tensor] | None:
    """The fields of a batch, if all samples have the same keys, types, dtypes and shapes. Otherwise None."""
    count, getters, plan = len(samples), alike.getters, alike.plan
    if alike.size != count or list(map(len, samples)).count(len(getters)) != count:
        return None
    if alike.inference is not torch.is_inference_mode_enabled() or not _goes_to_cpu(plan):
        return None
    columns = None if alike.get_all is None else zip(*map(alike.get_all, samples), strict=True)
    if plan.is_one_stack:
        every: list[Any] = []
        for getter in getters:
            every += map(getter, samples) if columns is None else next(columns)
        _, dtype, shape = alike.fields[0]
        if not _are_tensors_of(every, dtype) or False in [_is_like(first, shape) for first in every[::count]]:
            return None
        return _stack_all(plan, every, count)
    values: list[Any] = []
    for getter, (kind, dtype, shape) in zip(getters, alike.fields, strict=True):
        column = tuple(map(getter, samples)) if columns is None else next(columns)
        if kind is Tensor:
            if not _are_tensors_of(column, dtype) or not _is_like(column[0], shape):
                return None
            values.append(column)
            continue
        if list(map(type, column)).count(kind) != count:
            return None
        value = _host_field(column, kind, policy)
        if value.dtype != dtype or value.shape != shape:
            return None
        values.append(value)
    return _make_tensors(plan, values, count)


def _are_tensors_of(values: Sequence[Any], dtype: torch.dtype) -> bool:
    """Whether all values are plain tensors of this dtype. Raises ``RuntimeError`` for tensors of several dtypes."""
    return list(map(type, values)).count(Tensor) == len(values) and one_dtype(values) is dtype


def _is_like(first: Tensor, shape: Sizes) -> bool:
    """Whether the first sample of a field has the shape, is on the CPU and needs no gradient."""
    return first.shape == shape and first.is_cpu and not first.requires_grad


def _find_fields(
    samples: Sequence[Any], batch: DeviceDict[Any], at: Path, fields: list[_PlainField], pads: Pads | None
) -> None:
    """List the fields of ``batch``, depth first. Each gets a placeholder there, which keeps the order of the keys."""
    cls = type(batch)
    if cls._has_fields:
        samples = list(map(cls._drop_none, samples))
    first, count = samples[0], len(samples)
    names, kinds = list(first), list(map(type, builtin_dict.values(first)))
    odd = not _KINDS.issuperset(kinds) and not all(kind in _KINDS or issubclass(kind, DeviceDict) for kind in kinds)
    if odd or not _STR.issuperset(map(type, names)):
        raise _Unusual
    if pads is not None:
        pads.require_new(names, at, "the samples")
    used: dict[str, Any] = {}
    for key, kind, column in zip(names, kinds, _values_by_key(samples, names), strict=True):
        if list(map(type, column)).count(kind) != count:  # takes 0.7x the time of a set
            raise _Unusual
        builtin_dict.__setitem__(batch, key, None)
        pad = None if pads is None else pads.at((*at, key))
        if kind is Tensor and pad is None:
            fields.append(_to_stack(batch, key, column))
        elif kind is dict or kind not in _KINDS:  # a `DeviceDict` class
            _list_nested(column, kind, batch, (*at, key), fields, pads)
        elif pad is not None:
            _list_padded(column, kind, batch, (*at, key), fields, pad)
        elif kind is str:
            fields.append(_complete(batch, key, _codes(column, batch._policy, key)))
            used[key] = batch._policy.encoder(key)
        else:
            fields.append(_complete(batch, key, _host_field(column, kind, batch._policy)))
    if used:
        batch._policy = batch._policy.with_encoders(used)


def _to_stack(batch: DeviceDict[Any], key: str, samples: tuple[Tensor, ...]) -> _PlainField:
    """A field to stack, from tensors of one dtype on the CPU."""
    first = samples[0]
    if first.requires_grad or not first.is_cpu:
        raise _Unusual
    return batch, key, samples, (one_dtype(samples), first.shape, True)


def _complete(batch: DeviceDict[Any], key: str, value: Any) -> _PlainField:
    """A field whose value is complete: a NumPy array or a tensor."""
    dtype = _NUMPY_DTYPES[value.dtype] if type(value) is np.ndarray else value.dtype
    return batch, key, value, (dtype, value.shape, False)


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


def _list_nested(
    column: tuple[Any, ...],
    kind: type,
    batch: DeviceDict[Any],
    path: Path,
    fields: list[_PlainField],
    pads: Pads | None,
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
    if not encoder.is_data:
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
        if kind is Tensor:
            fields.append(_to_stack(batch, key, column))
        else:
            fields.append(_complete(batch, key, _host_field(column, kind, batch._policy)))
        return
    longest = pad._length(max(lengths))
    if kind is list:
        items = tuple(chain.from_iterable(column))
        flat = torch.as_tensor(_host_field(items, _kind_of_numbers(items), batch._policy))
    elif kind is Tensor and column[0].is_cpu and count * longest * inner <= _PADDED:
        one_dtype(column)
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
    spec = flat.dtype, (*mask.shape, *flat.shape[1:]), False
    fields.append((batch, key, _Padded(flat, mask, pad.value), spec))
    for extra, option in pad._extras.items():
        builtin_dict.__setitem__(batch, extra, None)
        fields.append(_complete(batch, extra, sizes if option == "lengths" else mask))


def _host_field(column: tuple[Any, ...], kind: type, policy: Policy) -> Any:
    """The field of host values of one type, in the dtype of a dict with this policy: an array, or a cast tensor."""
    if kind is list:
        kind = _kind_of_numbers(chain.from_iterable(column))
    if kind in _NUMPY_TYPES:
        wanted = (policy.dtype or torch.get_default_dtype()) if kind is float else None
        if wanted is not None and wanted not in _FLOATS:
            raise _Unusual
        array = np.array(column, _NUMPY_TYPES[kind])
        return array if wanted is None else _from_numpy(array).to(wanted)
    if kind is np.ndarray:
        alike = {(array.shape, array.dtype, array.flags.c_contiguous) for array in column}
        if len(alike) > 1 or not column[0].flags.c_contiguous or column[0].dtype not in _NUMPY_DTYPES:
            raise _Unusual
        array = np.stack(column)
    elif kind in _NUMPY_SCALARS:
        array = np.array(column)
    else:
        raise _Unusual
    return _from_numpy(array).to(policy.dtype) if array.dtype.kind == "f" and policy.dtype is not None else array


def _kind_of_numbers(items: Iterable[Any]) -> type:
    """The class of all items, if it is a class of Python numbers."""
    kinds = set(map(type, items))
    if len(kinds) != 1 or not kinds.issubset(_NUMPY_TYPES):
        raise _Unusual
    return kinds.pop()


def _make_tensors(plan: _BatchPlan, values: Sequence[Any], count: int) -> Sequence[Tensor]:
    """The fields, as tensors over one new buffer. Raises ``_Unusual`` or torch's error for unusual samples."""
    if plan.is_one_stack:
        return _stack_all(plan, _all_samples(values), count)
    if len(values) == 1 and type(values[0]) is not _Padded and not in_shared_memory(plan.layout.nbytes):
        value = values[0]  # torch aligns memory better than NumPy
        return [(_from_numpy(value) if type(value) is np.ndarray else value).clone()]
    storage = new_batch_storage(plan.layout, plan.has_gaps)
    out: list[Any] = [None] * len(values)
    for place in plan.regions:
        region, members, is_dense = place.over(storage), place.members, place.is_dense
        if len(members) == 1:
            _fill(region, values[members[0]])
            out[members[0]] = region
            continue
        here = [values[i] for i in members]
        parts = region.unsafe_split(count) if is_dense else region.unbind()
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


def _stack_all(plan: _BatchPlan, samples: Sequence[Tensor], count: int) -> Sequence[Tensor]:
    """The fields of a batch with one spec and no gaps, from all samples: one field after the other."""
    if in_shared_memory(plan.layout.nbytes):
        stacked = plan.regions[0].over(new_batch_storage(plan.layout, plan.has_gaps))
        stack_into(stacked, samples)
    else:
        stacked = torch.stack(samples)  # pyright: ignore[reportArgumentType]  (the storage is the buffer)
        if stacked.requires_grad or not stacked.is_contiguous():
            raise _Unusual
    # Each part of `unsafe_split` has its own version counter. `unbind` would need `.data` too, and 2x the time.
    return [stacked] if len(samples) == count else stacked.unsafe_split(count)


def _all_samples(columns: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    """Join the columns into one list, in 0.4x the time of ``chain``."""
    out: list[Tensor] = []
    for column in columns:
        out += column
    return out


def _fill(view: Tensor, value: Any) -> None:
    if type(value) is tuple:
        stack_into(view, value)
    elif type(value) is np.ndarray:
        view.numpy()[...] = value  # takes 0.5x the time of ``copy_``
    elif type(value) is _Padded:
        view.fill_(value.fill)
        view.numpy()[value.mask] = value.flat.numpy()  # takes 0.6x the time of masked_scatter_
    else:
        view.copy_(value)


def stack_into(view: Tensor, samples: Sequence[Tensor]) -> None:
    """Stack samples of one dtype into a view of a buffer. Raises ``RuntimeError`` if shapes or layouts differ."""
    torch.stack(samples, out=view)  # pyright: ignore[reportArgumentType, reportCallIssue]


def one_dtype(samples: Sequence[Tensor]) -> torch.dtype:
    """The dtype of the samples. Raises ``RuntimeError`` if they differ; ``torch.stack`` would promote them."""
    dtypes = list(map(_dtype, samples))  # the fastest way to compare them; it takes about 0.5x the time of the stack
    if dtypes.count(dtypes[0]) != len(samples):
        raise RuntimeError("samples of different dtypes")
    return dtypes[0]
