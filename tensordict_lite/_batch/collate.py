"""`collate`: samples in, one packed batch out, every tensor copied once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import get_worker_info
from torch.utils.data._utils import collate as torch_collate  # its documented place to register a type

from .._dict.device_dict import DeviceDict
from .._dict.insert import insert
from .._errors import DeviceMismatchError, Path, described, dotted, refuse_deeper
from .._memory.buffer import clear_gaps, flat_over, new_buffer, regions, views_of
from .._memory.device import CPU, canonical
from .._memory.layout import Group, Layout, Spec, lay_out, row_major
from .._memory.packed import can_pack, find_unpackable, packable
from .._memory.transfer import transfer
from .._tree.convert import convert
from .._tree.policy import Encoders, Objects, Policy
from .._tree.sendable import is_plain, refuse_unsendable
from .._tree.tree import TreeDict, kind_nested
from .._tree.walk import refuse_key, tensors_in
from .join import columns, merged_policy, raise_mismatch, widened

D = TypeVar("D", bound=DeviceDict[Any])
Pad = Mapping[Any, float]

_Field = tuple[Path, Sequence[Tensor], bool]
"""One field of the batch before it is in the block: its path, the samples of it, which are all alike, and whether these
are to be stacked, or else one tensor, which is the field already."""
_dtype = attrgetter("dtype")


def collate(
    samples: Sequence[Mapping[str, Any]],
    *,
    cls: type[D] = DeviceDict,
    encoders: Encoders | None = None,
    objects: Objects | None = None,
    pad: Pad | None = None,
    pack: bool = True,
) -> D:
    """One batch of samples: every field stacked along a new first dimension, all in one storage.

    A ``collate_fn`` for DataLoader as it stands, or through ``functools.partial``. In a worker the storage is shared
    memory, so that the batch reaches the trainer without another copy, as one segment and one file descriptor; the
    loader's ``pin_memory=True`` pins it in one call (up to torch 2.9: field by field, and it arrives unpacked).

    Args:
        samples: mappings with the same keys. Values may be whatever a `DeviceDict` takes: tensors, numbers, NumPy
            arrays, lists of numbers, strings (encoded together), nested mappings; with a ``cls`` that keeps objects,
            those too, as a list. `DeviceDict` samples keep their class and their encoders.
        cls: the class of the batch, and of plain dicts nested in it. Its options hold as if it were made of each
            sample: with ``on_mismatch="move"`` tensors go to the device of the first.
        encoders: as for `DeviceDict`.
        objects: as for `DeviceDict`: ``"keep"`` keeps None and other objects, as a list with one for each sample.
        pad: for keys (at any depth) or paths whose samples differ in their first dimension, what to fill the shorter
            ones up with, as ``torch.nn.utils.rnn.pad_sequence``: ``{"input_ids": 0}``.
        pack: False: a storage a field.

    Raises: ``ValueError`` that names the key and the sample if keys, shapes, dtypes or encoders disagree;
    ``TypeError`` for samples that are no list of mappings, and values that cannot be stored;
    ``DeviceMismatchError`` for tensors on several devices. The samples are left as they are.
    Cost: one allocation, and one copy of every tensor; no synchronisation.

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
    if not isinstance(samples, (list, tuple)):
        if isinstance(samples, (Mapping, str)) or not isinstance(cast(object, samples), Iterable):
            raise TypeError(f"collate takes a list of samples, got {described(samples)}; for one sample write [sample]")
        samples = list(samples)
    if not samples:
        raise ValueError("collate takes a list of at least one sample, got an empty list")
    if not isinstance(cast(object, cls), type) or not issubclass(cast(Any, cls), DeviceDict):
        shown = cls.__name__ if isinstance(cast(object, cls), type) else described(cls)
        raise TypeError(f"collate takes a DeviceDict class as cls=, got {shown}")
    if not isinstance(cast(object, pad), (Mapping, type(None))):
        raise TypeError(f'collate takes a mapping from keys to fill values as pad=, as {{"ids": 0}}, got {pad!r}')
    if not all(issubclass(kind, Mapping) for kind in set(map(type, samples))):
        i, odd = next((i, sample) for i, sample in enumerate(samples) if not isinstance(cast(object, sample), Mapping))
        raise TypeError(
            f"collate takes samples that are mappings, sample {i} is {described(odd)}; torch's default_collate takes "
            "others, and DeviceDicts within them"
        )
    first = samples[0]
    tensors = tensors_in(first)
    given = first._device if isinstance(first, TreeDict) else None
    device = given or canonical(tensors[0].device if tensors else torch.empty(0).device)
    kind, policy = _kind_of(samples, cls)
    if not (encoders is objects is None):
        policy = policy.override(encoders, objects=objects)
    collector = _Collector(device, policy.on_mismatch == "move", pad or {})
    batch = collector.collect(samples, kind, policy, ())
    batch = batch._replace_tensors(_made(collector, pack), device)
    if cls is not DeviceDict:
        batch._validate()
    if get_worker_info() is not None and not is_plain(batch):
        refuse_unsendable(batch)
    return cast(D, batch)


def _trees(samples: Sequence[Any]) -> list[DeviceDict[Any]]:
    kinds: set[type] = {kind for kind in set(map(type, samples)) if issubclass(kind, DeviceDict)}
    return [sample for sample in samples if type(sample) in kinds] if kinds else []


def _kind_of(samples: Sequence[Any], asked: type[DeviceDict[Any]]) -> tuple[type[DeviceDict[Any]], Policy]:
    """The class and policy of the batch: those of the samples, if these are of the class that is asked for."""
    trees = _trees(samples)
    if not trees:
        return asked, asked._class_policy
    own = merged_policy(trees, (), "sample")
    kind = cast("type[DeviceDict[Any]]", type(cast(object, trees[0])))
    return (kind, own) if issubclass(kind, asked) else (asked, asked._policy_of_copy(own, trees[0]))


def _made(collector: _Collector, pack: bool) -> list[Tensor]:
    """The tensors of the batch."""
    fields, device = collector.fields, collector.device
    if not (pack and can_pack(device)):
        return list(map(_stacked, fields))
    # To compare all samples takes as long as to copy them, and torch does it again. So it is left to torch, and only
    # what it refuses is looked at, to be named, or stacked by itself.
    try:
        return _filled(fields, device, sure=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        for path, column, is_stacked in fields:
            if not is_stacked:
                collector.check(path, column)
    return _filled(fields, device, sure=False)


class _Collector:
    """Walks all samples at once, checks them against the first, and lists the fields of the batch, depth first."""

    def __init__(self, device: torch.device, moves: bool, pad: Pad) -> None:
        self.device, self.moves, self.pad = device, moves, pad
        self.fields: list[_Field] = []

    def collect(
        self, samples: Sequence[Mapping[str, Any]], cls: type[DeviceDict[Any]], policy: Policy, at: Path
    ) -> DeviceDict[Any]:
        """The batch with stand-ins for its tensors, which are in ``fields`` in the order of its own."""
        refuse_deeper(at)
        items: dict[str, Any] = {}
        used: dict[str, Any] = {}
        count = len(samples)
        for key, column in columns(list(map(cls._drop_none, samples)), at, "sample"):
            if not isinstance(cast(object, key), str):
                refuse_key(key, at)
            path = (*at, key)
            if list(map(type, column)).count(Tensor) == count:
                items[key] = self.add(path, column, policy.encoders.get(key))
            elif any(isinstance(value, Mapping) for value in column):
                if not all(isinstance(value, Mapping) for value in column):
                    raise_mismatch(column, path, "sample", None)
                trees = _trees(column)
                own = merged_policy(trees, path, "sample") if trees else None
                kind = type(cast(object, trees[0])) if trees else dict
                nested = kind_nested(cls, key, kind, own, trees[0] if trees else (), policy)
                items[key] = self.collect(column, *nested, path)
            else:
                value, encoder = self.host_values(column, cls._nested_class(key) or cls, policy, path)
                if isinstance(value, DeviceDict):
                    for part, codes in cast("DeviceDict[Any]", value).items():
                        value[part] = self.add((*path, part), [codes], None, is_stacked=True)
                items[key] = value
                if encoder is not None:
                    used[key] = encoder
        return cls._new(items, self.device, policy.with_encoders(used) if used else policy)

    def add(
        self, path: Path, column: Sequence[Tensor], encoder: object, is_stacked: bool = False, check: bool = False
    ) -> Tensor:
        """Put a field on the list, and return what stands in for it. ``check``: that its samples are all alike."""
        if self.moves:
            column = self.moved(column)
        first = column[0]
        if not is_stacked and (check or encoder is not None or self.pad):
            shape, dtype = first.shape, first.dtype
            if any(tensor.shape != shape or tensor.dtype is not dtype for tensor in column):
                column, is_stacked = self.pad_to_equal(path, column, encoder)
        if not (first.is_cpu if self.device is CPU else first.device == self.device):
            raise DeviceMismatchError.at(path, self.device, first.device)
        self.fields.append((path, column, is_stacked))
        return first

    def moved(self, column: Sequence[Tensor]) -> Sequence[Tensor]:
        misplaced = {id(tensor): tensor for tensor in column if tensor.device != self.device}
        if not misplaced:
            return column
        moved = dict(zip(misplaced, transfer(list(misplaced.values()), self.device), strict=True))
        return [moved.get(id(tensor), tensor) for tensor in column]

    def check(self, path: Path, column: Sequence[Tensor]) -> None:
        """Raise what is wrong with samples that torch did not stack, if it is that they differ."""
        for tensor in column:
            if tensor.device != self.device:
                raise DeviceMismatchError.at(path, self.device, tensor.device)
        if len({(tensor.shape, tensor.dtype) for tensor in column}) > 1:
            self.pad_to_equal(path, column, None)

    def pad_to_equal(self, path: Path, column: Sequence[Tensor], encoder: object) -> tuple[Sequence[Tensor], bool]:
        """Samples of different lengths padded, if they are to be. Raises ``ValueError`` if they are not."""
        wide = widened(column, encoder)
        if wide is not None and all(codes.shape == wide[0].shape for codes in wide):
            return wide, False
        fill = self.pad.get(path[-1], self.pad.get(path))
        if fill is None or not _one_dtype(column):
            inner = {tensor.shape[1:] for tensor in column}
            ragged = inner == {column[0].shape[1:]} and column[0].dim() and _one_dtype(column)
            hint = f"; to fill the shorter ones up, give pad={{{path[-1]!r}: 0}}" if ragged else ""
            raise_mismatch(column, path, "sample", None, hint)
        dtype = column[0].dtype
        if not (dtype.is_floating_point or dtype.is_complex) and not _fits(fill, dtype):
            raise ValueError(f"{dotted(path)}: pad={{{path[-1]!r}: {fill!r}}} does not fit {dtype}")
        try:
            return [pad_sequence(list(column), batch_first=True, padding_value=fill)], True
        except (RuntimeError, IndexError) as error:
            raise_mismatch(column, path, "sample", error, "; pad= fills up the first dimension only")

    def host_values(
        self, column: Sequence[Any], cls: type[DeviceDict[Any]], policy: Policy, path: Path
    ) -> tuple[Any, object]:
        """The field of values that are not all tensors, and the encoder they were encoded with: at once if possible.

        ``cls``: the class of a nested dict, for an encoder that gives several tensors.
        """
        kinds = set(map(type, column))
        together: Any = list(column)
        strings = [issubclass(kind, str) for kind in kinds]
        if any(strings) and not all(strings):
            raise_mismatch(column, path, "sample", None)
        if kinds == {np.ndarray}:
            alike = {(array.shape, array.dtype.kind in "UT" or array.dtype) for array in column}
            if len(alike) > 1:
                return self.convert_each(column, policy, path)
            together = np.stack(column)
        elif len(kinds) == 1 and issubclass(next(iter(kinds)), np.number):
            together = np.array(column)
        elif any(issubclass(kind, (Tensor, Mapping, np.ndarray, np.generic)) for kind in kinds) and not all(strings):
            return self.convert_each(column, policy, path)
        if path[-1] in self.pad or path in self.pad:
            return self.convert_each(column, policy, path)
        try:
            value, encoder = convert(together, self.device, policy, path)
        except (TypeError, ValueError) as error:
            return self.convert_each(column, policy, path, error)  # says which sample it is
        if isinstance(value, Mapping):
            refuse_deeper(path)
            codes = cls._new((), self.device, policy)
            insert(codes, cast("Mapping[str, Any]", value), consent=True, at=path)
            return codes, encoder
        if isinstance(value, Tensor):
            return self.add(path, [value.to(self.device)], None, is_stacked=True), encoder
        return self.convert_each(column, policy, path, kept=True)  # a table's column, say, is no object by itself

    def convert_each(
        self, column: Sequence[Any], policy: Policy, path: Path, reason: Exception | None = None, kept: bool = False
    ) -> tuple[Any, object]:
        """Every value by the rule of a dict, so that what fails is named, and what may be joined is.

        ``reason``: why they could not be stored together, for what fails only then; ``kept``: if they cannot be joined
        they are a list of objects.
        """
        stored: list[Any] = []
        encoder = None
        for i, value in enumerate(column):
            if isinstance(value, Tensor):
                stored.append(value)
                continue
            try:
                made, encoder = convert(value, self.device, policy, path)
            except (TypeError, ValueError) as error:
                raise type(error)(f"sample {i}: {error}") from error
            stored.append(made)
        if all(isinstance(value, Tensor) for value in stored):
            return self.add(path, stored, encoder, check=True), encoder
        if kept:
            return list(column), None
        if any(isinstance(value, (Tensor, Mapping)) for value in stored):
            if reason is not None:
                raise reason
            raise_mismatch(column, path, "sample", None)
        return stored, encoder


def _fits(fill: float, dtype: torch.dtype) -> bool:
    try:
        return torch.full((), fill).to(dtype).item() == fill == torch.full((), fill, dtype=dtype).item()
    except (RuntimeError, TypeError, ValueError, OverflowError):
        return False


def _one_dtype(samples: Sequence[Tensor]) -> bool:
    # Half of what it takes to stack them, and torch would stack them all the same; no way of telling is quicker.
    return list(map(_dtype, samples)).count(samples[0].dtype) == len(samples)


def _stacked(field: _Field) -> Tensor:
    path, samples, is_stacked = field
    if is_stacked:
        return samples[0]
    error = None
    try:
        if _one_dtype(samples):
            return torch.stack(list(samples))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as reason:
        error = reason
    for tensor in samples:
        if tensor.device != samples[0].device:
            raise DeviceMismatchError.at(path, samples[0].device, tensor.device) from error
    raise_mismatch(samples, path, "sample", error)


def _spec(field: _Field) -> Spec:
    """What the field is in the batch."""
    _, samples, is_stacked = field
    first = samples[0]
    shape = first.shape if is_stacked else (len(samples), *first.shape)
    return first.dtype, shape, first.stride() if is_stacked else row_major(shape)


def _filled(fields: Sequence[_Field], device: torch.device, sure: bool) -> list[Tensor]:
    """The fields, in one new block those that can be packed. In a worker it is shared memory.

    Which can be is told from the first sample of those that seem alike; or if that is not ``sure``, from all.
    """
    out: list[Any] = [None] * len(fields)
    alike: dict[Any, list[int]] = {}
    for i, (_, samples, is_stacked) in enumerate(fields):
        first = samples[0]
        what = (type(first), first.requires_grad, first.dtype, first.shape, first.stride() if is_stacked else None)
        alike.setdefault(what, []).append(i)
    groups: list[Group] = []
    for members in alike.values():
        rest = members
        if not (sure and packable(fields[members[0]][1][0])):
            rest = [i for i in members if not find_unpackable(fields[i][1])]
            for i in set(members) - set(rest):
                out[i] = _stacked(fields[i])
        if rest:
            groups.append((_spec(fields[rest[0]]), rest))
    layout = lay_out(groups)
    if layout.runs:
        into = regions(_buffer(layout, device), layout)
        _fill(fields, layout, into)
        views_of(layout, into, out)
    return out


def _buffer(layout: Layout, device: torch.device) -> Tensor:
    if device != CPU or get_worker_info() is None:
        return clear_gaps(new_buffer(layout.nbytes, device), layout)
    storage = cast(Any, torch.UntypedStorage)._new_shared(layout.nbytes)  # zeroed by the system
    return flat_over(storage, torch.uint8, layout.nbytes, CPU)


def _fill(fields: Sequence[_Field], layout: Layout, into: Sequence[Tensor]) -> None:
    """Copy the samples into the regions of the block. Raises ``RuntimeError`` if those of a field differ."""
    for run, region in zip(layout.runs, into, strict=True):
        many = len(run.members) > 1
        if many and region.is_contiguous() and not any(fields[i][2] for i in run.members):
            # All samples of all fields of a run in one call: 0.12 us each, and 0.17 in a call for each field.
            _stack_into(region.flatten(0, 1), list(chain.from_iterable(fields[i][1] for i in run.members)))
            continue
        for i, view in zip(run.members, region.unbind() if many else (region,), strict=True):
            _, samples, is_stacked = fields[i]
            if is_stacked:
                view.copy_(samples[0])
            else:
                _stack_into(view, list(samples))


def _stack_into(view: Tensor, samples: list[Tensor]) -> None:
    if not _one_dtype(samples):
        raise RuntimeError("samples of different dtypes")
    torch.stack(samples, out=view)


def _collate_default(batch: Sequence[DeviceDict[Any]], *, collate_fn_map: object = None) -> DeviceDict[Any]:
    return collate(batch)


# A list of DeviceDicts under torch's own default_collate takes the same path; a subclass is found by its base.
cast(Any, torch_collate).default_collate_fn_map[DeviceDict] = _collate_default
