"""`collate`: make one batch of many samples. Every tensor is copied once.

`_Walk` walks all samples at once: it builds the dicts of the batch, and lists their tensor fields. `make_fields` makes
the tensors of all fields. Only if torch refuses a sample, `_Walk.examine` looks at each one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from itertools import chain
from operator import attrgetter
from typing import Any, NoReturn, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data._utils import collate as torch_collate  # PyTorch documents it as the place to register a type

from .._dict.device_dict import DeviceDict
from .._dict.insert import convert_for, insert, is_kept, place_codes
from .._dict.rows import Rows
from .._encoders.protocol import encode_nested, encode_ragged, padding
from .._errors import Path, described, device_mismatch, dotted, dtype_name, refuse_deeper, with_path
from .._memory.device import CPU, canonical
from .._memory.dtypes import NUMPY_DTYPES, dtype_of
from .._memory.layout import FieldSpec
from .._memory.packed import can_pack, packable
from .._memory.ragged import offsets_of
from .._memory.transfer import transfer
from .._tree.alike import differ_in_length, raise_mismatch, widened
from .._tree.convert import convert
from .._tree.fields import fields
from .._tree.inside import NO_TENSORS, without_tensors
from .._tree.policy import Encoders, Objects, Policy
from .._tree.ragged import Lengths, Ragged
from .._tree.tree import TreeDict, builtin_dict, kind_nested
from .._tree.walk import as_shared, ragged_keys, refuse_key, tensors_in
from .join import merged_policy, values_by_key
from .make_fields import make_fields, whole
from .pad import Pad, Padded, Pads, raise_encoded, refuse_nested, require_fit, require_known

D = TypeVar("D", bound=DeviceDict[Any])
PadLike = Mapping[Any, float | Pad]

_Field = tuple[Any, Path, Any, FieldSpec]
"""What gets the tensor, see `_store`; the path; and the value and the spec for `make_fields`."""
_FLOAT = np.dtype(np.float64)
_NUMPY_TYPES = {
    frozenset({bool}): np.dtype(np.bool_), frozenset({int}): np.dtype(np.int64),
    frozenset({float}): _FLOAT, frozenset({int, float}): _FLOAT,
}  # fmt: skip
"""The types of Python numbers that NumPy converts as torch does."""
_NUMPY_DTYPES: Mapping[Any, torch.dtype] = {
    torch.empty(0, dtype=dtype, device="cpu").numpy().dtype: dtype for dtype in NUMPY_DTYPES
}
_array_kind = attrgetter("shape", "dtype")
_COLLATED_HERE = (Tensor, DeviceDict, np.ndarray, np.generic, bool, int, float, complex, str)
"""What `collate` joins itself. A subclass may be registered."""
_LATER: Any = None  # the place of a tensor that is made later
_NO_SAMPLES: Any = object()  # a call without samples
_NO_KEYS = frozenset[Any]()
_NO_PADS = Pads(None, "collate")


def collate(
    samples: Sequence[Mapping[str, Any]] | Rows[Any] = _NO_SAMPLES,
    *,
    cls: type[D] = DeviceDict,
    encoders: Encoders | None = None,
    objects: Objects | None = None,
    pad: PadLike | None = None,
    ragged: Iterable[str | Path] = (),
    pack: bool = False,
) -> D:
    """Stack the samples into one batch: every field along a new first dimension.

    Pass `collate` to DataLoader as ``collate_fn``, with options through ``functools.partial``. A worker process sends a
    batch of up to 1 MiB by value. Of a larger batch, fields above 64 KiB are made in shared memory, up to four fields
    of about one size in a segment. A field that you keep keeps at most 64 KiB, or four times its own bytes, alive.

    Args:
        samples: mappings with the same keys. A value may be anything that a `DeviceDict` takes: a tensor, a number, a
            NumPy array, a list of numbers, a string, a nested mapping. `DeviceDict` samples keep their class and
            their encoders. Values of a type that is registered in torch's ``default_collate_fn_map`` are joined by the
            function of the type.
        cls: the class of the batch, and of plain dicts nested in it. Its options apply to every sample. With
            ``on_mismatch="move"`` all tensors move to the device of the first sample.
        encoders: as for `DeviceDict`.
        objects: as for `DeviceDict`. With ``"keep"``, a value that is neither a tensor, an array, a number nor a
            mapping with str keys becomes a list with one item per sample.
        pad: fill values for fields whose samples differ in their first dimension: ``{"input_ids": 0}``. Shorter samples
            are padded as by ``torch.nn.utils.rnn.pad_sequence``. A `Pad` in place of the number can pad on the left, to
            a multiple or in several dimensions, and add lengths or a mask. A key stands for the fields of that name at
            every depth, a path for one field. No sample may lack it, unless ``Pad(..., optional=True)`` says so.
        ragged: keys or paths, as in ``pad``, of fields that become `Ragged`: their samples may differ in the first
            dimension, and are not padded. Strings become the codes of `Utf8` or the ids of a `Tokenizer`. Fields with
            the same lengths share their offsets. Lists of mappings, as the objects in an image, become a nested dict
            with a ragged field for each of their keys. A field that the class declares as `Ragged` needs no mention.
        pack: True puts all fields in one storage, as `DeviceDict.pack` does; in a worker, one segment of shared memory.
            A field that you keep then keeps the whole batch alive.

    Raises: ``ValueError`` that names the key and the sample if keys, shapes, dtypes or encoders disagree, or if no
    sample has a key that ``pad``, ``ragged`` or ``encoders`` name;
    ``TypeError`` if the samples are not a list of mappings, or a value cannot be stored;
    ``DeviceMismatchError`` for tensors on several devices. The samples are never changed.
    Cost: an allocation for each buffer, and one copy of every tensor. No synchronization, except on an accelerator:
    there, each ragged field, and each field for lengths or a mask, copies the lengths of the samples from the host.

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
    if cls is not DeviceDict and not (isinstance(cls, type) and DeviceDict in cls.__mro__):
        shown = cls.__name__ if isinstance(cls, type) else described(cls)
        raise TypeError(f"collate takes a DeviceDict class as cls=, got {shown}")
    pads = _NO_PADS if pad is None else Pads(pad, "collate")
    rows_of = _ragged_fields(ragged, pad) if ragged != () else _NO_KEYS
    given: Any = samples
    if type(samples) is not list:
        if isinstance(samples, Rows) and not (pads or rows_of):
            return _batch_of(samples, cls, encoders, objects, pack)
        if isinstance(samples, (Mapping, str)) or not isinstance(samples, Iterable):
            got = described(samples)
            raise TypeError(f"collate takes a list of samples, got {got}; for one sample write [sample]")
        given = list(samples)
    if not given:
        raise ValueError("collate takes a list of at least one sample, got an empty list")
    are_dicts = list(map(type, given)).count(dict) == len(given)
    trees = [] if are_dicts else _trees(given)
    kind, policy = _kind_of(trees, cls) if trees else (cls, cls._class_policy)
    if not (encoders is objects is None):
        policy = policy.override_of_copy(trees[0] if trees else (), encoders, objects=objects)

    def batch_of(samples: Sequence[Any]) -> DeviceDict[Any]:
        device = _device_of(samples[0])
        batch = kind._new((), device, policy)
        walk = _Walk(len(samples), device, policy.on_mismatch == "move", pack, pads, rows_of)
        walk.collect(samples, batch, (), are_dicts)
        walk.finish()
        if cls is not DeviceDict:
            cast(Any, batch)._validate_samples() if batch._has_fields else batch._validate()
        return batch

    try:
        batch = batch_of(given)
    except (TypeError, ValueError):
        if kind._has_fields and len(given) > 1 and (wrong := _error_of_one(batch_of, given)):
            raise wrong from None
        raise
    pads.require_known(batch, "sample")
    if rows_of:
        require_known("ragged=", rows_of, batch, "sample")
        refuse_nested("ragged=", rows_of, batch)
    if encoders is not None:
        _require_known_encoders(encoders, batch)
    return cast(D, batch)


def _require_known_encoders(encoders: Encoders, batch: DeviceDict[Any]) -> None:
    keys = encoders if isinstance(encoders, Mapping) else ()
    require_known("encoders=", keys, batch, "sample", " Or allow it: declare the encoder in a class, for cls=")


def _error_of_one(batch_of: Callable[[Sequence[Any]], object], samples: Sequence[Any]) -> Exception | None:
    """The error of the first sample that does not fit the class, neither by itself nor in a batch that would.

    By itself, one with an empty list does not fit either, nor does any if the class declares the number of rows.
    """

    def error_of(some: Sequence[Any]) -> Exception | None:
        try:
            batch_of(some)
        except (TypeError, ValueError) as error:
            return error
        return None

    alone = [error_of([sample]) for sample in samples]
    fitting = [sample for sample, error in zip(samples, alone, strict=True) if error is None][:1]
    for i, error in enumerate(alone if fitting else alone[:1]):
        among = [*fitting, samples[i]] if fitting else [samples[0]] * len(samples)
        if error is not None and error_of(among):
            text = str(error).removeprefix("sample 0: ").removesuffix(" in sample 0")
            return (TypeError if isinstance(error, TypeError) else ValueError)(f"sample {i}: {text}")
    return None


def _ragged_fields(ragged: Any, pad: PadLike | None) -> frozenset[Any]:
    keys = ragged_keys(ragged, "collate")
    padded = {(key,) if isinstance(key, str) else key for key in pad or ()}
    for key in keys:
        if (key if isinstance(key, tuple) else (key,)) in padded:
            raise ValueError(f"{key!r} stands in pad= and in ragged=; a field is either padded or ragged")
    return keys


def _batch_of(rows: Any, cls: type[D], encoders: Encoders | None, objects: Objects | None, pack: bool) -> D:
    """The batch of `Rows`, which `Rows.__getitems__` made: their dict, as ``cls`` and with these options."""
    d = rows._dict
    if encoders is not None:
        _require_known_encoders(encoders, d)
    kind = type(d) if isinstance(d, cls) else cls
    if not (kind is type(d) and encoders is objects is None):
        d = kind(d, encoders=encoders, objects=objects)
    return d.pack() if pack else d


def _device_of(sample: Mapping[str, Any]) -> torch.device:
    """The device of a sample: of the dict, or of its first tensor. If it has no tensor, torch's default device."""
    if type(sample) is not dict and isinstance(sample, TreeDict) and sample._device is not None:
        return sample._device
    for key, value in sample.items():
        if type(value) is Tensor:
            return canonical(value.device)
        if type(value) not in NO_TENSORS and not without_tensors(value) and (found := tensors_in({key: value})):
            return canonical(found[0].device)
    return canonical(torch.empty(0).device)


def _trees(samples: Sequence[Any]) -> list[DeviceDict[Any]]:
    """The samples that are `DeviceDict` objects. Raises ``TypeError`` for the first sample that is not a mapping."""
    types: set[type] = set(map(type, samples))
    if not all(issubclass(one, Mapping) for one in types):
        i, sample = next((i, sample) for i, sample in enumerate(samples) if not isinstance(sample, Mapping))
        raise TypeError(
            f"collate takes samples that are mappings, sample {i} is {described(sample)}; torch's default_collate "
            "takes others, and DeviceDicts within them"
        )
    types = {one for one in types if issubclass(one, DeviceDict)}
    return [sample for sample in samples if type(sample) in types] if types else []


def _kind_of(trees: Sequence[DeviceDict[Any]], asked: type[DeviceDict[Any]]) -> tuple[type[DeviceDict[Any]], Policy]:
    """The class and policy of the batch: those of the samples if their class is a subclass of ``asked``."""
    own = merged_policy(trees, (), "sample")
    kind = type(trees[0])
    return (kind, own) if issubclass(kind, asked) else (asked, asked._policy_of_copy(own, trees[0]))


class _Walk:
    """Builds the dicts of a batch from all samples at once, depth first, and lists their tensor fields.

    `collect` calls one method for each field, which it finds by the type of the values. The method gets the dict of the
    field, the path, and the values of all samples. It returns the encoder of the key if the values are strings.
    """

    __slots__ = ("by_lengths", "count", "device", "fields", "lays_out", "moves", "of_rows", "pack", "pads", "ragged")

    def __init__(
        self, count: int, device: torch.device, moves: bool, pack: bool, pads: Pads, ragged: frozenset[Any] | None
    ) -> None:
        """``ragged``: None if the samples are the items of rows: what a class declares as ragged has one for each."""
        self.count, self.device, self.moves, self.pack = count, device, moves, pack
        self.lays_out = can_pack(device)
        self.pads, self.ragged, self.of_rows = pads, ragged or _NO_KEYS, ragged is None
        self.fields: list[_Field] = []
        self.by_lengths: dict[tuple[int, ...], Lengths] = {}
        """The lengths of the rows of ragged fields. Fields of the same lengths share one object."""

    def collect(
        self, samples: Sequence[Mapping[str, Any]], batch: DeviceDict[Any], at: Path, are_dicts: bool = False
    ) -> None:
        """Fill ``batch``, which is empty, with the keys of the samples. ``are_dicts``: all samples are plain dicts.

        Each field gets a placeholder first, which keeps the order of the keys.
        """
        cls: Any = type(batch)
        count, keeps = self.count, batch._policy.objects == "keep"
        if cls._has_fields:
            if cls._optional or cls._defaults:
                samples = list(map(cls._drop_none, samples))
            self.ragged |= _NO_KEYS if self.of_rows else {(*at, key) for key in cls._schema().ragged}
        chooses = bool(self.pads or self.ragged)
        if self.pads:
            self.pads.require_new(samples[0], at, "the samples")
        used: dict[str, Any] = {}
        for key, values in values_by_key(samples, at, "sample"):
            if not isinstance(key, str):
                refuse_key(key, at)
            path = (*at, key)
            builtin_dict.__setitem__(batch, key, None)
            kind: Any = type(values[0])
            if list(map(type, values)).count(kind) != count:
                kind = None
            differ = chooses and self.may_differ(path)
            if keeps and not differ and _are_kept(batch, path, values):
                # A list with an item for each sample. An insert applies the rule for devices to the tensors in it.
                builtin_dict.__setitem__(batch, key, self.inserted(batch, path, list(values))[key])
                continue
            methods = _DIFFERENT if differ else _METHODS
            encoder = methods.get(kind, _Walk.others)(self, batch, path, values)
            if encoder is not None:
                used[key] = encoder
        if used:
            batch._policy = batch._policy.with_encoders(used)

    def finish(self) -> None:
        """Make the tensors of all fields, and put them into the dicts."""
        try:
            tensors = self.made()
        except RuntimeError:
            listed, self.fields = self.fields, []
            for field in listed:  # in the same order, which decides the layout
                if type(field[2]) is tuple:
                    self.examine(*field[:3])
                elif type(field[2]) is list:
                    field[0].values = self.cat(field[1][:-1], field[2])
                else:
                    self.fields.append(field)
            tensors = self.made()
        for (owner, path, _, _), tensor in zip(self.fields, tensors, strict=True):
            _store(owner, path[-1], tensor)

    def made(self) -> Sequence[Tensor]:
        """The tensors of the fields."""
        if self.lays_out and self.fields:
            return make_fields(self.fields, self.count, self.device, self.pack)
        return [whole(value, spec[0], self.device) for _, _, value, spec in self.fields]

    def add(self, batch: Any, path: Path, value: Any, dtype: torch.dtype | None = None) -> None:
        """List a field that is whole, a tensor or an array. A tensor that cannot be packed is stored as it is.

        ``dtype``: of the field of an array.
        """
        if type(value) is np.ndarray:
            self.fields.append((batch, path, value, (dtype or _NUMPY_DTYPES[value.dtype], value.shape, False)))
        elif packable(value):
            self.fields.append((batch, path, value, (value.dtype, value.shape, False)))
        else:
            _store(batch, path[-1], value)

    # One method for each kind of value

    def strings(self, batch: DeviceDict[Any], path: Path, values: Sequence[str], differ: bool = False) -> object:
        """Strings. Those of a ragged field are encoded without padding. ``differ``: the field may differ in length."""
        encoder = batch._policy.encoder(path[-1])
        if differ and not self.is_ragged(path):
            return self.one_by_one(batch, path, values)
        try:
            codes: Any = encode_ragged(encoder, values) if differ else encode_nested(encoder, [*values], (self.count,))
        except (TypeError, ValueError, LookupError) as error:
            return self.one_by_one(batch, path, values, with_path(error, path))  # its error names the sample
        if not differ:
            return self.add_codes(batch, path, codes, encoder)
        if codes is None:
            return self.one_by_one(batch, path, values)
        self.add_rows(batch, path, codes[0].to(self.device), codes[1].tolist())
        return encoder

    def tensors(self, batch: DeviceDict[Any], path: Path, values: Sequence[Tensor]) -> None:
        """Plain tensors. The first stands for all: torch.stack compares the others, but would promote their dtypes."""
        first, device, dtypes = values[0], self.device, list(map(dtype_of, values))
        here = first.is_cpu if device is CPU else first.device == device
        if here and dtypes.count(dtypes[0]) == self.count and not first.requires_grad:
            self.fields.append((batch, path, values, (dtypes[0], first.shape, True)))
        else:
            self.examine(batch, path, values)

    def nested(self, batch: DeviceDict[Any], path: Path, values: Sequence[Any]) -> None:
        refuse_deeper(path)
        trees = _trees(values)
        own = merged_policy(trees, path, "sample") if trees else None
        first: Any = trees[0] if trees else {}
        cls, policy = kind_nested(type(batch), batch._policy, path[-1], type(first), own, first)
        nested = cls._new((), self.device, policy)
        builtin_dict.__setitem__(batch, path[-1], nested)
        self.collect(values, nested, path, list(map(type, values)).count(dict) == self.count)

    def numbers(self, batch: DeviceDict[Any], path: Path, values: Sequence[Any]) -> object:
        """Python numbers, or lists of them."""
        kind = type(values[0])
        kinds = set(map(type, chain.from_iterable(values))) if kind is list else {kind}
        found = _as_numbers(values, kinds, batch, path)
        return self.others(batch, path, values) if found is None else self.add(batch, path, *found)

    def arrays(self, batch: DeviceDict[Any], path: Path, values: Sequence[Any]) -> object:
        """NumPy arrays or NumPy numbers. NumPy stacks those of one shape and dtype; it would promote others."""
        kinds = {(shape, dtype.kind in "UT" or dtype) for shape, dtype in set(map(_array_kind, values))}
        if len(kinds) > 1:
            return self.one_by_one(batch, path, values)
        array = np.array(values)
        if array.dtype in _NUMPY_DTYPES and (batch._policy.dtype is None or array.dtype.kind != "f"):
            return self.add(batch, path, array)
        return self.together(batch, path, values, array)

    def others(self, batch: DeviceDict[Any], path: Path, values: Sequence[Any]) -> object:
        """Any values: of several types, of unusual types, or values that another method could not convert."""
        functions = list(map(_registered, values))
        if any(functions):
            return self.by_function(batch, path, values, functions)
        values = [as_shared(value, path) for value in values]
        kinds = set(map(type, values))
        if Ragged in kinds:
            raise ValueError(
                f"{dotted(path)}: collate takes one row of each sample, got a ragged field; cat([...]) joins the "
                "rows of ragged fields"
            )
        are_mappings = {issubclass(kind, Mapping) for kind in kinds}
        are_strings = {issubclass(kind, str) for kind in kinds}
        if are_mappings == {True}:
            return self.nested(batch, path, values)
        differ = self.may_differ(path)
        if True in are_mappings or (len(are_strings) > 1 and not differ):
            raise_mismatch(values, path, "sample")
        is_array = False in are_strings and any(issubclass(kind, (Tensor, np.ndarray, np.generic)) for kind in kinds)
        if differ or is_array:
            return self.one_by_one(batch, path, values)
        return self.together(batch, path, values)

    def inserted(self, batch: DeviceDict[Any], path: Path, value: Any) -> DeviceDict[Any]:
        """A dict with the options of the batch, and a value that an insert stored in it."""
        holder = DeviceDict[Any]._new((), self.device, batch._policy)
        insert(holder, {path[-1]: value}, at=path[:-1])
        return holder

    def by_function(
        self, batch: DeviceDict[Any], path: Path, values: Sequence[Any], functions: Sequence[Any]
    ) -> object:
        """Values of a type that somebody registered in torch: the function of that type joins them.

        torch.stack would give the batch of a subclass of ``Tensor`` the attributes of the first sample.
        """
        key, function = path[-1], functions[0]
        other = next((i for i, one in enumerate(functions) if one is not function), 0)
        name, first = type(values[other]).__name__, type(values[0]).__name__
        if other:
            raise TypeError(f"{dotted(path)}: sample {other} is of type {name}, sample 0 of type {first}; convert one")
        if self.may_differ(path):
            raise TypeError(
                f"{dotted(path)}: pad= and ragged= do not take {name}, whose samples are joined by a function that is "
                "registered in torch's default_collate_fn_map; convert the samples to tensors"
            )
        try:
            joined = function(list(values), collate_fn_map=torch_collate.default_collate_fn_map)
        except RuntimeError as error:
            raise_mismatch(values, path, "sample", error)
        holder = self.inserted(batch, path, joined)
        value = holder[key]
        if isinstance(value, Tensor):
            self.add(batch, path, value)
        else:
            builtin_dict.__setitem__(batch, key, value)
        return holder.encoders.get(key)

    def together(self, batch: DeviceDict[Any], path: Path, values: Sequence[Any], whole: Any = None) -> object:
        """Convert all samples in one call. ``whole``: the samples as one value; None: as a list."""
        try:
            value, encoder = convert_for(batch, list(values) if whole is None else whole, self.device, path)
        except (TypeError, ValueError) as error:
            return self.one_by_one(batch, path, values, error)  # its error names the sample
        if encoder is not None:
            return self.add_codes(batch, path, value, encoder)
        if isinstance(value, Tensor):
            return self.add(batch, path, value)
        return self.one_by_one(batch, path, values, keep=True)  # keeps the values of a column, not the column

    def add_codes(self, batch: DeviceDict[Any], path: Path, codes: Any, encoder: object) -> object:
        codes = place_codes(batch, codes, self.device, path)
        if isinstance(codes, Tensor):
            self.add(batch, path, codes)
        else:  # an encoder gave several tensors
            builtin_dict.__setitem__(batch, path[-1], codes)
            for part, tensor in list(codes.items()):
                self.add(codes, (*path, part), tensor)
        return encoder

    # Fields whose samples may differ in length

    def is_ragged(self, path: Path) -> bool:
        return path[-1] in self.ragged or path in self.ragged

    def may_differ(self, path: Path) -> bool:
        """Whether the field is in ``pad`` or ``ragged``."""
        return self.is_ragged(path) or self.pads.at(path) is not None

    def lists_that_differ(self, batch: DeviceDict[Any], path: Path, values: Sequence[Any]) -> object:
        """Lists. Lists of numbers become one tensor of all numbers."""
        numbers = list(chain.from_iterable(values))
        if self.is_ragged(path) and numbers and all(isinstance(one, Mapping) for one in numbers):
            return self.objects(batch, path, numbers, list(map(len, values)))
        pad = self.pads.at(path) or Pad()
        found = None if pad.dims != 1 else _as_numbers(numbers, set(map(type, numbers)), batch, path)
        if found is None:
            return self.others(batch, path, values)
        flat = torch.from_numpy(found[0]).to(self.device, found[1])
        if self.is_ragged(path):
            return self.add_rows(batch, path, flat, list(map(len, values)))
        return self.pad(batch, path, Padded([flat], [list(map(len, values))], (0,), pad))

    def objects(
        self, batch: DeviceDict[Any], path: Path, items: Sequence[Mapping[str, Any]], lengths: Sequence[int]
    ) -> None:
        """Lists of mappings, as the objects in an image: a nested dict with a ragged field for each of their keys.

        ``items``: the mappings of all samples. ``lengths``: how many of them each sample has.
        """
        cls, policy = kind_nested(type(batch), batch._policy, path[-1], dict)
        nested = cls._new((), self.device, policy)
        builtin_dict.__setitem__(batch, path[-1], nested)
        walk = _Walk(len(items), self.device, self.moves, False, self.pads, None)
        try:
            walk.collect(items, nested, path)
            walk.finish()
        except (TypeError, ValueError) as error:
            raise type(error)(f"{error}; these samples are the items of the lists at {dotted(path)}") from error
        for field in fields(nested, path):
            if not isinstance(field.value, Tensor):
                raise TypeError(
                    f"{dotted(field.path)}: expected tensors for a ragged field, got kept objects; leave the key out"
                )
            self.add_rows(field.owner, field.path, field.value, lengths)

    def add_rows(self, batch: DeviceDict[Any], path: Path, values: Any, lengths: Sequence[int]) -> None:
        """List a ragged field. ``values``: of all rows, a tensor or an array; or a list of tensors to concatenate."""
        known = tuple(lengths) in self.by_lengths
        shared = self.by_lengths.setdefault(tuple(lengths), Lengths(_LATER, max(lengths)))
        field = Ragged._new(_LATER, shared)
        builtin_dict.__setitem__(batch, path[-1], field)
        if type(values) is not list:
            self.add(field, (*path, "values"), values)
        elif packable(values[0]):
            shape = (sum(lengths), *values[0].shape[1:])
            self.fields.append((field, (*path, "values"), values, (values[0].dtype, shape, False)))
        else:
            field.values = self.cat(path, values)
        if not known:
            self.add(shared, (*path, "offsets"), offsets_of(lengths))

    def require_alike(self, path: Path, values: Sequence[Tensor]) -> None:
        """Raise the error that names the sample unless the tensors have one dtype and one number of dimensions.

        torch.cat compares their shapes, but would promote their dtypes.
        """
        dims = list(map(Tensor.dim, values))
        if list(map(dtype_of, values)).count(values[0].dtype) != self.count or dims.count(dims[0] or -1) != self.count:
            self.refuse(path, values)

    def cat(self, path: Path, values: Sequence[Tensor]) -> Tensor:
        """The rows of all samples, one sample after the other, or the error that names the sample."""
        self.require_alike(path, values)
        try:
            joined = torch.cat(list(values))
        except RuntimeError as error:
            self.refuse(path, values, error)
        if joined.device != self.device or joined.layout is not torch.strided:
            self.refuse(path, values)
        return joined

    def differ(self, batch: DeviceDict[Any], path: Path, values: Sequence[Tensor], encoder: object = None) -> None:
        """Tensors: the rows of a ragged field, or samples to pad."""
        values = self.moved(values)
        if self.is_ragged(path):
            if encoder is not None and values[0].dim() > 1:  # each row is a list of strings
                values = widened(values, encoder) or values
            self.require_alike(path, values)
            return self.add_rows(batch, path, list(values), [tensor.size(0) for tensor in values])
        encoder = encoder or batch._policy.encoders.get(path[-1])
        pad = self.pads.at(path) or Pad()
        if encoder is not None and padding(encoder, *values) is not None:
            raise_encoded(path, pad)
        if pad.dims != 1:
            return self.pad_several(batch, path, values, pad)
        values = widened(values, encoder) or values
        dims = list(map(Tensor.dim, values))
        lengths = dims if 0 in dims else [tensor.size(0) for tensor in values]
        if not pad._always and dims.count(dims[0]) == lengths.count(lengths[0]) == self.count:
            return self.examine(batch, path, values, encoder)
        self.pad(batch, path, Padded([self.cat(path, values)], [lengths], (0,), pad))

    def pad_several(self, batch: DeviceDict[Any], path: Path, values: Sequence[Tensor], pad: Pad) -> None:
        """Tensors that differ in several dimensions, such as images."""
        values = [tensor.resolve_conj().resolve_neg() for tensor in values]
        first = values[0]
        try:
            axes = pad._axes(first.dim())
        except ValueError as error:
            raise with_path(error, path) from None
        kinds = [
            (tensor.dtype, [None if dim in axes else n for dim, n in enumerate(tensor.shape)]) for tensor in values
        ]
        for i, tensor in enumerate(values):
            if tensor.device != self.device:
                raise device_mismatch(path, self.device, tensor.device)
            if not packable(tensor.detach()):
                raise ValueError(f"{dotted(path)}: {pad!r} pads dense samples, sample {i} has {described(tensor)}")
            if kinds[i] != kinds[0]:
                raise ValueError(
                    f"{dotted(path)}: sample {i} has {described(tensor)}, sample 0 has {described(first)}; "
                    f"{pad!r} lets dense samples differ in the dimensions {list(axes)} only"
                )
        sizes = [[tensor.shape[axis] for tensor in values] for axis in axes]
        self.pad(batch, path, Padded(values, sizes, axes, pad))

    def pad(self, batch: DeviceDict[Any], path: Path, padded: Padded) -> None:
        """List a field to pad, and the new fields for the lengths and the mask."""
        dtype = padded.samples[0].dtype
        require_fit(padded.pad, dtype, path)
        if all(map(packable, padded.samples)):
            self.fields.append((batch, path, padded, (dtype, padded.shape, False)))
        else:
            self.add(batch, path, whole(padded, dtype, self.device))
        for key, extra in padded.extras().items():
            builtin_dict.__setitem__(batch, key, None)
            self.add(batch, (*path[:-1], key), extra)

    def moved(self, values: Sequence[Tensor]) -> Sequence[Tensor]:
        """The samples of a field, on the device of the batch if the options allow to move them."""
        misplaced = {id(tensor): tensor for tensor in values if self.moves and tensor.device != self.device}
        if not misplaced:
            return values
        moved = dict(zip(misplaced, transfer(list(misplaced.values()), self.device), strict=True))
        return tuple([moved.get(id(tensor), tensor) for tensor in values])

    # Fields with an unusual sample: find it, raise its error, or store the field outside the buffer

    def examine(self, batch: DeviceDict[Any], path: Path, values: Sequence[Any], encoder: object = None) -> None:
        """Look at every sample of a field to stack."""
        values = self.moved(values)
        wide = widened(values, encoder or batch._policy.encoders.get(path[-1])) or values
        here = all(tensor.device == self.device for tensor in values)
        if not here or len({(tensor.layout, tensor.is_nested or tensor.shape, tensor.dtype) for tensor in wide}) > 1:
            self.refuse(path, values)
        if self.lays_out and all(packable(tensor.resolve_neg()) for tensor in wide):
            self.fields.append((batch, path, tuple(wide), (wide[0].dtype, wide[0].shape, True)))
            return
        try:
            builtin_dict.__setitem__(batch, path[-1], torch.stack(list(wide)))
        except RuntimeError as error:
            self.refuse(path, values, error)

    def one_by_one(
        self,
        batch: DeviceDict[Any],
        path: Path,
        values: Sequence[Any],
        reason: Exception | None = None,
        *,
        keep: bool = False,
    ) -> object:
        """Convert the samples one by one, so that an error names the sample.

        Args:
            reason: the error of the attempt to convert all samples together. It is raised if each sample can be
                converted, but the results cannot be stacked.
            keep: keep the samples as a list of objects if they are not all tensors.
        """
        converted, encoder, differ = list(values), None, self.may_differ(path)
        # An empty list gets the dtype of the other samples. If they may not differ, it does so for the error.
        lists = {i for i, value in enumerate(values) if isinstance(value, (list, tuple))}
        empty = {i for i in lists if not values[i] and (differ or any(values[i] for i in lists))}
        filled = [i for i in range(self.count) if i not in empty] or range(self.count)
        for i in filled:
            if not isinstance(values[i], Tensor):
                try:
                    converted[i], encoder = convert_for(batch, values[i], self.device, path)
                except (TypeError, ValueError) as error:
                    raise type(error)(f"sample {i}: {error}") from error
        dtypes = {tensor.dtype for i in filled if isinstance(tensor := converted[i], Tensor)}
        if len(dtypes) > 1 and {int, float, bool, complex, list, tuple}.issuperset(map(type, values)):
            dtype = reduce(torch.promote_types, dtypes)  # that of one list with all numbers
            for i in filled:
                converted[i] = convert(values[i], self.device, batch._policy, path, dtype).value
        model = converted[filled[0]]
        if isinstance(model, Tensor) and model.dim():
            for i in empty:
                converted[i] = model.new_empty((0, *model.shape[1:]))
        if all(isinstance(value, Tensor) for value in converted):
            (self.differ if differ else self.examine)(batch, path, tuple(converted), encoder)
            return encoder
        if not keep and any(isinstance(value, (Tensor, Mapping)) for value in converted):
            if reason is not None:
                raise reason
            raise_mismatch(values, path, "sample")
        builtin_dict.__setitem__(batch, path[-1], list(values))
        return None

    def refuse(self, path: Path, values: Sequence[Tensor], error: Exception | None = None) -> NoReturn:
        """Raise the error that names the first sample that cannot be joined with sample 0."""
        for tensor in values:
            if tensor.device != self.device:
                raise device_mismatch(path, self.device, tensor.device)
        first, key, pad, hint = values[0], path[-1], self.pads.at(path), ""
        if self.is_ragged(path):
            hint = "; ragged= lets the first dimension differ only"
            for i, tensor in enumerate(values):
                if not tensor.dim() or tensor.is_nested or tensor.layout is not torch.strided:
                    raise ValueError(
                        f"{dotted(path)}: a ragged field takes dense samples of at least one dimension, got "
                        f"{described(tensor)} in sample {i}"
                    )
        elif pad is not None:
            hint = "; pad= fills up the first dimension only"
            if not any(map(Tensor.dim, values)):
                raise ValueError(
                    f"{dotted(path)}: {pad!r} pads the first dimension, and the samples are single numbers"
                )
        elif all(differ_in_length(tensor, first) for tensor in values):
            hint = f"; to fill the shorter ones up, give pad={{{key!r}: 0}}; to keep the lengths, ragged=[{key!r}]"
        if len(set(map(dtype_of, values))) > 1:
            hint = f"; convert the samples to one dtype, such as {dtype_name(first.dtype)}"
        raise_mismatch(values, path, "sample", error, hint, differ_in_length if self.may_differ(path) else None)


def _are_kept(batch: DeviceDict[Any], path: Path, values: Sequence[Any]) -> bool:
    """Whether ``objects="keep"`` makes a list of the samples of a field: no numbers, arrays or mappings."""
    if all(map(_stacks, values)) or any(map(_registered, values)):
        return False
    return all(is_kept(batch, path[-1], value) for value in values)


def _stacks(value: Any) -> bool:
    """Whether a batch joins such samples, also with ``objects="keep"``, as torch's ``default_collate`` does."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) for key in value)
    return isinstance(value, _STACKED) or (isinstance(value, np.ndarray) and value.dtype in _NUMPY_DTYPES)


def _store(owner: Any, name: str, value: Tensor) -> None:
    """Put a tensor into a dict, a `Ragged` or a `Lengths`."""
    if isinstance(owner, dict):
        builtin_dict.__setitem__(owner, name, value)
    else:
        setattr(owner, name, value)


_STACKED = (bool, int, float, complex, np.bool_, np.number)
_METHODS: Mapping[Any, Callable[..., Any]] = {
    Tensor: _Walk.tensors,
    dict: _Walk.nested,
    str: _Walk.strings,
    **dict.fromkeys((list, bool, int, float), _Walk.numbers),
    **dict.fromkeys((np.ndarray, *[dtype.type for dtype in _NUMPY_DTYPES]), _Walk.arrays),
}
"""How to convert the values of a field if all have this type. `_Walk.others` converts all others."""
_DIFFERENT: Mapping[Any, Callable[..., Any]] = {
    Tensor: _Walk.differ,
    dict: _Walk.nested,
    list: _Walk.lists_that_differ,
    str: partial(_Walk.strings, differ=True),
}
"""The same for fields in ``pad`` or ``ragged``."""


def _registered(value: Any) -> Any:
    """The function that somebody registered in torch's ``default_collate_fn_map`` for the type of a sample, or None."""
    known = torch_collate.default_collate_fn_map
    for kind in type(value).__mro__:
        if kind in _COLLATED_HERE:
            return None
        if kind in known:
            return known[kind]
    return next((function for kinds, function in known.items() if isinstance(value, kinds)), None)


def _as_numbers(
    items: Sequence[Any], kinds: set[type], batch: DeviceDict[Any], path: Path
) -> tuple[np.ndarray[Any, Any], torch.dtype] | None:
    """Python numbers, or rectangular lists of them, as an array, and the dtype of their field. ``kinds``: their types.

    None if the general conversion must decide.
    """
    kind, typed = _NUMPY_TYPES.get(frozenset(kinds)), cast(Any, batch)
    if kind is None:
        return None
    own = (batch._policy.dtype or torch.get_default_dtype()) if kind is _FLOAT else _NUMPY_DTYPES[kind]
    dtype = (batch._has_fields and typed._declared_dtype(path[-1], own)) or own
    try:
        array = np.array(items, kind)
    except (ValueError, OverflowError):  # ragged lists, and integers that are too large
        return None
    # torch makes numbers that float32 cannot hold infinite, where NumPy would warn. It converts ints through a double.
    return (array if dtype is own else array.astype(_FLOAT)), dtype


def _collate_default(batch: Sequence[DeviceDict[Any]], *, collate_fn_map: object = None) -> DeviceDict[Any]:
    return collate(batch)


# torch's default_collate calls this for a list of DeviceDicts. It finds subclasses by their base.
torch_collate.default_collate_fn_map[DeviceDict] = _collate_default
