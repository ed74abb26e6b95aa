"""`collate`: make one packed batch of many samples. Every tensor is copied once.

The work has three steps. The first step walks all samples at once: it builds the dicts of the batch, and lists their
tensor fields. The second step stacks the samples of every field into one buffer. The third step puts the stacked
tensors into the dicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data._utils import collate as torch_collate  # PyTorch documents it as the place to register a type

from .._dict.arguments import jagged_keys
from .._dict.device_dict import DeviceDict
from .._dict.insert import place_codes
from .._dict.rows import Rows
from .._encoders.protocol import padding
from .._errors import DeviceMismatchError, Path, described, dotted, refuse_deeper
from .._memory.buffer import in_worker_process, new_batch_buffer, regions, views_of
from .._memory.device import CPU, canonical
from .._memory.jagged import join_jagged
from .._memory.layout import Group, Layout, lay_out, row_major
from .._memory.packed import can_pack, find_unpackable, packable
from .._memory.transfer import transfer
from .._tree.convert import convert
from .._tree.policy import Encoders, Objects, Policy
from .._tree.sendable import is_plain, refuse_unsendable
from .._tree.tree import TreeDict, builtin_dict, kind_nested
from .._tree.walk import refuse_key, tensors_in
from .join import columns, merged_policy, raise_mismatch, widened
from .pad import Pad, Pads, extra_fields, pad_samples, raise_encoded, require_fit, require_known
from .plan import one_dtype, stack_into, stack_plain

D = TypeVar("D", bound=DeviceDict[Any])
PadLike = Mapping[Any, float | Pad]

_SampledField = tuple[DeviceDict[Any], Path, Sequence[Tensor], bool]
"""A tensor field of the batch: the dict that gets it, its path, its samples, and whether it is stacked already.

A stacked field has one tensor, the whole field, in place of its samples.
"""
_dtype = attrgetter("dtype")
_NO_SAMPLES: Any = object()  # a call without samples
_NO_PADS, _NO_KEYS = Pads(None, "collate"), frozenset[Any]()  # created once, because most calls give neither


def collate(
    samples: Sequence[Mapping[str, Any]] | Rows[Any] = _NO_SAMPLES,
    *,
    cls: type[D] = DeviceDict,
    encoders: Encoders | None = None,
    objects: Objects | None = None,
    pad: PadLike | None = None,
    jagged: Iterable[str | Path] = (),
    pack: bool = True,
) -> D:
    """Stack the samples into one batch: every field along a new first dimension, all fields in one buffer.

    Pass `collate` to DataLoader as ``collate_fn``, with options through ``functools.partial``. A worker process sends a
    small batch by value. The buffer of a larger batch is shared memory: it takes one file descriptor and no further
    copy. The loader's ``pin_memory=True`` pins the buffer in one call. (Up to torch 2.9 it pins every field, and the
    batch arrives unpacked.)

    Args:
        samples: mappings with the same keys. A value may be anything that a `DeviceDict` takes: a tensor, a number, a
            NumPy array, a list of numbers, a string, a nested mapping. `DeviceDict` samples keep their class and
            their encoders.
        cls: the class of the batch, and of plain dicts nested in it. Its options apply to every sample. With
            ``on_mismatch="move"`` all tensors move to the device of the first sample.
        encoders: as for `DeviceDict`.
        objects: as for `DeviceDict`: ``"keep"`` keeps None and other objects, as a list with one item per sample.
        pad: fill values for fields whose samples differ in their first dimension: ``{"input_ids": 0}``. Shorter
            samples are padded as by ``torch.nn.utils.rnn.pad_sequence``. A `Pad` in place of the number can pad on the
            left or to a multiple, and add lengths or a mask. A key stands for the fields of that name at every depth, a
            path for one field. No sample may lack it, unless ``Pad(..., optional=True)`` says so.
        jagged: keys or paths, as in ``pad``, of fields that become nested tensors of layout ``torch.jagged``. Their
            samples may differ in the first dimension, and are not padded. A nested tensor is not packed.
        pack: False gives every field its own storage.

    Raises: ``ValueError`` that names the key and the sample if keys, shapes, dtypes or encoders disagree, or if no
    sample has a key that ``pad``, ``jagged`` or ``encoders`` name;
    ``TypeError`` if the samples are not a list of mappings, or a value cannot be stored;
    ``DeviceMismatchError`` for tensors on several devices. The samples are never changed.
    Cost: one allocation, and one copy of every tensor. No synchronization, except on an accelerator: there, each jagged
    field, and each field for lengths or a mask, copies the lengths of the samples from the host.

    >>> from tensordict_lite import collate
    >>> batch = collate([{"x": [0.5, 1.0], "y": 3, "name": "Ada"}, {"x": [1.5, 2.0], "y": 4, "name": "Grace"}])
    >>> batch["x"].shape, batch["y"], batch.decode("name"), batch.is_packed
    (torch.Size([2, 2]), tensor([3, 4]), ['Ada', 'Grace'], True)
    >>> from functools import partial
    >>> collate_ids = partial(collate, pad={"ids": 0})
    >>> collate_ids([{"ids": [1, 2, 3]}, {"ids": [4]}])["ids"]
    tensor([[1, 2, 3],
            [4, 0, 0]])
    """
    if samples is _NO_SAMPLES:
        raise TypeError(
            "collate takes a list of samples, and got options only; to set options for a DataLoader, give "
            "functools.partial(collate, ...)"
        )
    rows: Rows[Any] | None = None
    given: Any = samples
    if type(given) is not list:  # most samples are lists, and a test for `Rows` takes longer
        if isinstance(samples, Rows) and not pad and jagged == ():
            rows = samples
        elif not isinstance(samples, (list, tuple)):
            if isinstance(samples, (Mapping, str)) or not isinstance(samples, Iterable):
                got = described(samples)
                raise TypeError(f"collate takes a list of samples, got {got}; for one sample write [sample]")
            given = list(samples)
    if rows is None and not given:
        raise ValueError("collate takes a list of at least one sample, got an empty list")
    if cls is not DeviceDict and not (isinstance(cls, type) and issubclass(cls, DeviceDict)):
        shown = cls.__name__ if isinstance(cls, type) else described(cls)
        raise TypeError(f"collate takes a DeviceDict class as cls=, got {shown}")
    pads = None if pad is None else Pads(pad, "collate")
    ragged = _jagged_fields(jagged, pad) if jagged != () else _NO_KEYS
    if rows is not None:
        return _batch_of(rows._dict, cls, encoders, objects, pack)
    kind, policy = cls, cls._class_policy
    sampled = cast("type[Any]", type(given[0]))
    is_one_type = list(map(type, given)).count(sampled) == len(given)
    if not (is_one_type and sampled is dict):
        _require_mappings(given)
        kind, policy = _kind_of(given, cls)
    if not (encoders is objects is None):
        policy = policy.override(encoders, objects=objects)
    batch = stack_plain(given, kind, policy, pads) if is_one_type and pack and not ragged else None
    if batch is None:
        batch = _general_batch(given, kind, policy, pads or _NO_PADS, ragged, pack)
    if cls is not DeviceDict:
        batch._validate()
    if pads is not None:
        pads.require_known(batch, "sample")
    for key in ragged:
        require_known("jagged=", key, batch, "sample", "")
    if isinstance(encoders, Mapping):
        _require_known_encoders(encoders, batch)
    _refuse_in_worker(batch)
    return cast(D, batch)


def _require_known_encoders(encoders: Mapping[str, Any], batch: DeviceDict[Any]) -> None:
    for key in encoders:
        if key not in batch:
            require_known("encoders=", key, batch, "sample", " Or allow it: declare the encoder in a class, for cls=")


def _jagged_fields(jagged: Any, pad: PadLike | None) -> frozenset[Any]:
    keys = jagged_keys(jagged, "collate")
    padded = {(key,) if isinstance(key, str) else key for key in pad or ()}
    for key in keys:
        if (key if isinstance(key, tuple) else (key,)) in padded:
            raise ValueError(f"{key!r} stands in pad= and in jagged=; a field is either padded or jagged")
    return keys


def _general_batch(
    samples: Sequence[Mapping[str, Any]],
    kind: type[DeviceDict[Any]],
    policy: Policy,
    pads: Pads,
    jagged: frozenset[Any],
    pack: bool,
) -> DeviceDict[Any]:
    device = _device_of(samples[0])
    collector = _Collector(device, policy.on_mismatch == "move", pads, jagged)
    packed = pack and can_pack(device)
    batch = collector.collect(samples, kind._new((), device, policy), ())
    fields = collector.fields
    tensors = _fill_buffer(collector) if packed else list(map(_stacked, fields))
    for (owner, path, _, _), tensor in zip(fields, tensors, strict=True):
        builtin_dict.__setitem__(owner, path[-1], tensor)
    return batch


def _batch_of(d: DeviceDict[Any], cls: type[D], encoders: Encoders | None, objects: Objects | None, pack: bool) -> D:
    """The batch of `Rows`, which `Rows.__getitems__` made: their dict, as ``cls`` and with these options."""
    if isinstance(encoders, Mapping):
        _require_known_encoders(encoders, d)
    kind = type(d) if isinstance(d, cls) else cls
    batch: Any = d
    if not (kind is type(d) and encoders is objects is None):
        batch = kind(d, encoders=encoders, objects=objects)
    _refuse_in_worker(batch)
    return batch if pack else batch.clone()


def _refuse_in_worker(batch: DeviceDict[Any]) -> None:
    """In a worker process, raise the error that names the field or class if ``batch`` cannot be sent."""
    if in_worker_process() and not is_plain(batch):
        refuse_unsendable(batch)


def _require_mappings(samples: Sequence[object]) -> None:
    """Raise ``TypeError`` that names the first sample that is not a mapping."""
    kinds: set[type] = set(map(type, samples))
    if all(issubclass(kind, Mapping) for kind in kinds):  # takes less time than a test of each sample
        return
    for i, sample in enumerate(samples):
        if not isinstance(sample, Mapping):
            raise TypeError(
                f"collate takes samples that are mappings, sample {i} is {described(sample)}; torch's default_collate "
                "takes others, and DeviceDicts within them"
            )


def _device_of(sample: Mapping[str, Any]) -> torch.device:
    """The device of a sample: of the dict, or of its first tensor. If it has no tensor, torch's default device."""
    if isinstance(sample, TreeDict) and sample._device is not None:
        return sample._device
    first = next(iter(sample.values()), None)
    if type(first) is Tensor and first.is_cpu:  # most samples; the walk below visits every tensor
        return CPU
    tensors = tensors_in(sample)
    return canonical(tensors[0].device if tensors else torch.empty(0).device)


def _trees(samples: Sequence[Any]) -> list[DeviceDict[Any]]:
    """The samples that are `DeviceDict` objects."""
    kinds: set[type] = {kind for kind in set(map(type, samples)) if issubclass(kind, DeviceDict)}
    return [sample for sample in samples if type(sample) in kinds] if kinds else []


def _kind_of(samples: Sequence[Any], asked: type[DeviceDict[Any]]) -> tuple[type[DeviceDict[Any]], Policy]:
    """The class and policy of the batch: those of the samples if their class is a subclass of ``asked``."""
    trees = _trees(samples)
    if not trees:
        return asked, asked._class_policy
    own = merged_policy(trees, (), "sample")
    kind = type(trees[0])
    return (kind, own) if issubclass(kind, asked) else (asked, asked._policy_of_copy(own, trees[0]))


class _Collector:
    """Builds the dicts of the batch from all samples at once, and lists its tensor fields, depth first."""

    def __init__(self, device: torch.device, moves: bool, pads: Pads, jagged: frozenset[Any]) -> None:
        self.device, self.moves, self.pads, self.jagged = device, moves, pads, jagged
        self.fields: list[_SampledField] = []

    def collect(self, samples: Sequence[Mapping[str, Any]], batch: DeviceDict[Any], at: Path) -> DeviceDict[Any]:
        """Fill ``batch``, which is empty, with the keys of the samples, and return it.

        Every tensor field gets an entry in ``fields``, and a placeholder in the dict that keeps the order of the keys.
        """
        cls, policy = type(batch), batch._policy
        used: dict[str, Any] = {}
        if cls._has_fields:
            samples = list(map(cls._drop_none, samples))
        if self.pads:
            self.pads.require_new(samples[0], at, "the samples")
        for key, column in columns(samples, at, "sample"):
            if not isinstance(key, str):
                refuse_key(key, at)
            path = (*at, key)
            if list(map(type, column)).count(Tensor) == len(samples):
                self.add(batch, path, column, policy.encoders.get(key))
                continue
            are_mappings = {isinstance(value, Mapping) for value in column}
            if False not in are_mappings:
                value = self.nested(batch, path, column)
            elif True in are_mappings:
                raise_mismatch(column, path, "sample", None)
            else:
                value, encoder = self.host_values(batch, path, column)
                if encoder is not None:
                    used[key] = encoder
            builtin_dict.__setitem__(batch, key, value)
        if used:
            batch._policy = policy.with_encoders(used)
        return batch

    def nested(self, batch: DeviceDict[Any], path: Path, column: Sequence[Any]) -> DeviceDict[Any]:
        """The nested dict at ``path`` of ``batch``, of samples that are all mappings."""
        refuse_deeper(path)
        trees = _trees(column)
        own = merged_policy(trees, path, "sample") if trees else None
        kind = type(trees[0]) if trees else dict
        cls, policy = kind_nested(type(batch), path[-1], kind, own, trees[0] if trees else (), batch._policy)
        return self.collect(column, cls._new((), self.device, policy), path)

    def add(
        self,
        batch: DeviceDict[Any],
        path: Path,
        column: Sequence[Tensor],
        encoder: object,
        *,
        is_stacked: bool = False,
        check: bool = False,
    ) -> Tensor:
        """List a tensor field of ``batch``, put a placeholder there, and return the placeholder.

        ``check``: compare the dtypes and shapes of the samples now. Otherwise ``torch.stack`` compares them later.
        """
        if self.moves:
            column = self.moved(column)
        first = column[0]
        extras: Mapping[str, Tensor] = {}
        if not is_stacked and self.is_jagged(path):
            column, is_stacked = [self.joined(path, column, encoder)], True
        elif not is_stacked and (check or encoder is not None or self.pads):
            shape, dtype = first.shape, first.dtype
            pad = self.pads.at(path)
            given = column
            differ = [tensor for tensor in column if tensor.shape != shape or tensor.dtype is not dtype]
            if differ or (pad is not None and pad._always):
                column, is_stacked = self.pad_to_equal(path, column, encoder)
            if is_stacked and pad is not None:
                extras = extra_fields(list(map(len, given)), column[0].shape[1], pad, self.device)
        if not (first.is_cpu if self.device is CPU else first.device == self.device):
            raise DeviceMismatchError.at(path, self.device, first.device)
        self.fields.append((batch, path, column, is_stacked))
        builtin_dict.__setitem__(batch, path[-1], first)
        for key, extra in extras.items():
            self.add(batch, (*path[:-1], key), [extra], None, is_stacked=True)
        return first

    def is_jagged(self, path: Path) -> bool:
        return bool(self.jagged) and (path[-1] in self.jagged or path in self.jagged)

    def joined(self, path: Path, column: Sequence[Tensor], encoder: object) -> Tensor:
        """The samples of a jagged field as one nested tensor. Raises ``ValueError`` if more than the lengths differ."""
        column = widened(column, encoder) or column
        first = column[0]
        for i, tensor in enumerate(column):
            if tensor.device != self.device:
                raise DeviceMismatchError.at(path, self.device, tensor.device)
            if not tensor.dim() or tensor.is_nested or tensor.layout is not torch.strided:
                raise ValueError(
                    f"{dotted(path)}: a jagged field takes dense samples of at least one dimension, "
                    f"sample {i} has {described(tensor)}"
                )
            if tensor.dtype != first.dtype or tensor.shape[1:] != first.shape[1:]:
                raise_mismatch(column, path, "sample", None, "; jagged= lets the first dimension differ only")
        return join_jagged(column)

    def moved(self, column: Sequence[Tensor]) -> Sequence[Tensor]:
        """The samples of a field, all on the device of the batch."""
        misplaced = {id(tensor): tensor for tensor in column if tensor.device != self.device}
        if not misplaced:
            return column
        moved = dict(zip(misplaced, transfer(list(misplaced.values()), self.device), strict=True))
        return [moved.get(id(tensor), tensor) for tensor in column]

    def check(self, path: Path, column: Sequence[Tensor]) -> None:
        """Raise the error that names the sample if the samples of a field differ."""
        for tensor in column:
            if tensor.device != self.device:
                raise DeviceMismatchError.at(path, self.device, tensor.device)
        if len({(tensor.shape, tensor.dtype) for tensor in column}) > 1:
            self.pad_to_equal(path, column, None)

    def pad_to_equal(self, path: Path, column: Sequence[Tensor], encoder: object) -> tuple[Sequence[Tensor], bool]:
        """The field with its shorter samples padded, and whether it is stacked now.

        Raises ``ValueError`` if ``pad`` has no fill value for the field, or if padding does not make the samples equal.
        """
        wide = widened(column, encoder)
        pad = self.pads.at(path)
        if pad is not None and padding(encoder, *column) is not None:
            raise_encoded(path, pad)
        if wide is not None and len({codes.shape for codes in wide}) == 1:
            return wide, False
        one_dtype = len(set(map(_dtype, column))) == 1
        if pad is None or not one_dtype:
            inner = {tensor.shape[1:] for tensor in column}
            ragged = inner == {column[0].shape[1:]} and column[0].dim() and one_dtype
            key = path[-1]
            ways_out = f"; to fill the shorter ones up, give pad={{{key!r}: 0}}; to keep the lengths, jagged=[{key!r}]"
            hint = ways_out if ragged else ""
            raise_mismatch(column, path, "sample", None, hint)
        require_fit(pad, column[0].dtype, path)
        if not column[0].dim() and len({tensor.shape for tensor in column}) == 1:
            raise ValueError(f"{dotted(path)}: {pad!r} pads the first dimension, and the samples are single numbers")
        try:
            return [pad_samples(column, pad)], True
        except (RuntimeError, IndexError) as error:
            raise_mismatch(column, path, "sample", error, "; pad= fills up the first dimension only")

    def host_values(self, batch: DeviceDict[Any], path: Path, column: Sequence[Any]) -> tuple[Any, object]:
        """The value at ``path`` of ``batch`` for samples that are not all tensors, and its encoder, if it has one.

        All samples are converted in one call where that gives the same result.
        """
        kinds = set(map(type, column))
        together: Any = list(column)
        strings = {issubclass(kind, str) for kind in kinds}
        if len(strings) > 1:
            raise_mismatch(column, path, "sample", None)
        if kinds == {np.ndarray}:
            alike = {(array.shape, array.dtype.kind in "UT" or array.dtype) for array in column}
            if len(alike) > 1:
                return self.convert_each(batch, path, column)
            together = np.stack(column)
        elif len(kinds) == 1 and issubclass(next(iter(kinds)), np.number):
            together = np.array(column)
        elif any(issubclass(kind, (Tensor, Mapping, np.ndarray, np.generic)) for kind in kinds) and True not in strings:
            return self.convert_each(batch, path, column)
        if self.pads.at(path) is not None or self.is_jagged(path):
            return self.convert_each(batch, path, column)
        try:
            value, encoder = convert(together, self.device, batch._policy, path)
        except (TypeError, ValueError) as error:
            return self.convert_each(batch, path, column, error)  # its error names the sample
        if encoder is not None:
            value = place_codes(batch, value, self.device, path)
        if isinstance(value, Tensor):
            return self.add(batch, path, [value], None, is_stacked=True), encoder
        if isinstance(value, TreeDict):  # an encoder gave several tensors
            codes = cast("DeviceDict[Any]", value)
            for part, tensor in list(codes.items()):
                self.add(codes, (*path, part), [tensor], None, is_stacked=True)
            return codes, encoder
        return self.convert_each(batch, path, column, keep=True)  # keeps the values of a column, not the column

    def convert_each(
        self,
        batch: DeviceDict[Any],
        path: Path,
        column: Sequence[Any],
        reason: Exception | None = None,
        *,
        keep: bool = False,
    ) -> tuple[Any, object]:
        """Convert the samples one by one, so that an error names the sample. Returns what `host_values` returns.

        Args:
            reason: the error of the attempt to convert all samples together. It is raised if each sample can be
                converted, but the results cannot be stacked.
            keep: keep the samples as a list of objects if they are not all tensors.
        """
        converted: list[Any] = []
        encoder = None
        empty: list[int] = []  # the empty lists, which get the dtype of the other samples
        if self.is_jagged(path) or self.pads.at(path) is not None:
            empty = [i for i, value in enumerate(column) if isinstance(value, (list, tuple)) and not value]
            empty = [] if len(empty) == len(column) else empty
        for i, value in enumerate(column):
            if isinstance(value, Tensor) or i in empty:
                converted.append(value)
                continue
            try:
                result, encoder = convert(value, self.device, batch._policy, path)
            except (TypeError, ValueError) as error:
                raise type(error)(f"sample {i}: {error}") from error
            converted.append(result)
        model = next(value for i, value in enumerate(converted) if i not in empty)
        if isinstance(model, Tensor) and model.dim():
            for i in empty:
                converted[i] = model.new_empty((0, *model.shape[1:]))
        if all(isinstance(value, Tensor) for value in converted):
            return self.add(batch, path, converted, encoder, check=True), encoder
        if keep:
            return list(column), None
        if any(isinstance(value, (Tensor, Mapping)) for value in converted):
            if reason is not None:
                raise reason
            raise_mismatch(column, path, "sample", None)
        return converted, encoder


def _stacked(field: _SampledField) -> Tensor:
    """The field in its own storage. Raises the error that names the sample if the samples differ."""
    _, path, samples, is_stacked = field
    if is_stacked:
        return samples[0]
    error = None
    try:
        one_dtype(samples)
        return torch.stack(list(samples))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as reason:
        error = reason
    for tensor in samples:
        if tensor.device != samples[0].device:
            raise DeviceMismatchError.at(path, samples[0].device, tensor.device) from error
    raise_mismatch(samples, path, "sample", error)


def _fill_buffer(collector: _Collector) -> list[Tensor]:
    """The stacked fields, as views of one new buffer."""
    fields, device = collector.fields, collector.device
    # To compare all samples takes as long as to copy them. torch.stack compares them anyway, so the first attempt
    # leaves the comparison to torch.stack. Only after an error, each sample is compared.
    try:
        return _pack_fields(fields, device, look_at_all=False)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        for _, path, column, is_stacked in fields:
            if not is_stacked:
                collector.check(path, column)
    return _pack_fields(fields, device, look_at_all=True)


def _pack_fields(fields: Sequence[_SampledField], device: torch.device, look_at_all: bool) -> list[Tensor]:
    """The stacked fields, as views of one new buffer. In a worker the buffer is shared memory.

    A field that cannot be packed gets its own storage. ``look_at_all``: ask every sample whether it can be packed, not
    only the first sample of each group of like fields.
    """
    out: list[Any] = [None] * len(fields)
    alike: dict[Any, list[int]] = {}
    for i, (_, _, samples, is_stacked) in enumerate(fields):
        first = samples[0]
        what = (type(first), first.requires_grad, first.dtype, first.shape, first.stride() if is_stacked else None)
        alike.setdefault(what, []).append(i)
    groups: list[Group] = []
    for same in alike.values():
        members = same
        if look_at_all or not packable(fields[same[0]][2][0]):
            members = [i for i in same if not find_unpackable([t.resolve_neg() for t in fields[i][2]])]
            for i in set(same) - set(members):
                out[i] = _stacked(fields[i])
            if not members:
                continue
        _, _, samples, is_stacked = fields[members[0]]
        first = samples[0]
        shape = first.shape if is_stacked else (len(samples), *first.shape)
        groups.append(((first.dtype, shape, first.stride() if is_stacked else row_major(shape)), members))
    layout = lay_out(groups)
    if layout.runs:
        buffer = new_batch_buffer(layout, device)
        into = regions(buffer, layout)
        _stack_fields(fields, layout, into)
        views_of(layout, into, out)
    return out


def _stack_fields(fields: Sequence[_SampledField], layout: Layout, into: Sequence[Tensor]) -> None:
    """Stack the samples into the regions of the buffer. Raises ``RuntimeError`` if the samples of a field differ."""
    for run, region in zip(layout.runs, into, strict=True):
        _, _, sampled, are_stacked = zip(*[fields[i] for i in run.members], strict=True)
        many = len(sampled) > 1
        if many and region.is_contiguous() and not any(are_stacked):
            # One call for the samples of all fields of a run is faster than a call for each field.
            samples = list(chain.from_iterable(sampled))
            one_dtype(samples)
            stack_into(region.flatten(0, 1), samples)
            continue
        views = region.unbind() if many else (region,)
        for samples, is_stacked, view in zip(sampled, are_stacked, views, strict=True):
            if is_stacked:
                view.copy_(samples[0])
            else:
                one_dtype(samples)
                stack_into(view, samples)


def _collate_default(batch: Sequence[DeviceDict[Any]], *, collate_fn_map: object = None) -> DeviceDict[Any]:
    return collate(batch)


# torch's default_collate calls this for a list of DeviceDicts. It finds subclasses by their base.
torch_collate.default_collate_fn_map[DeviceDict] = _collate_default
