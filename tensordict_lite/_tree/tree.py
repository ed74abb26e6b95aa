"""`TreeDict`, a tree of dicts on one device: state, copies, pickle and pytree support. It does not validate values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar, Generic
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from typing_extensions import Self, TypeVar, Unpack

from .._encoders.protocol import StringEncoder
from .._errors import DeviceMismatchError, Path, add_note, dotted
from .._memory.compare import equal
from .._memory.device import canonical
from .._memory.dtypes import CASTABLE
from . import pytree
from .compare import equal_trees
from .inside import Move, Opened, open_kept, stay, without_tensors
from .policy import OPTIONS, Options, Policy, refuse_option
from .ragged import Lengths, Made, Ragged
from .walk import leaves, only_tensors

V = TypeVar("V", default=Tensor)

# To call methods of `dict` that `DeviceDict` overrides. `Any` is for the type checkers. The global holds the class, not
# its methods, because torch.compile can trace `dict.update(d, ...)` only through the class.
builtin_dict: Any = dict

_classes: WeakValueDictionary[str, type[Any]] = WeakValueDictionary()
"""Every subclass by module and qualified name. Of two classes with the same name, the class that was defined last."""


class TreeDict(dict[str, V], MutableMapping[str, V], Generic[V]):
    """The base class of `DeviceDict`: state and structure.

    Two dicts never share structure: inserting a mapping shares its tensors and copies its nested dicts. So a change to
    one dict never changes another dict, and no dict can contain itself.
    """

    __slots__ = ("__weakref__", "_device", "_policy")
    _holds_tensors: ClassVar[bool] = True  # see `open_value`
    _device: torch.device | None  # resolved; None before the first tensor or nested dict; see also `_infer_device`
    _policy: Policy
    _class_options: ClassVar[Mapping[str, Any]]  # the options that this class itself declares, without its bases
    _class_policy: ClassVar[Policy] = Policy()

    def __init_subclass__(cls, **options: Unpack[Options]) -> None:
        kwargs = {name: value for name, value in options.items() if name not in OPTIONS[1:]}
        try:
            super().__init_subclass__(**kwargs)
        except TypeError:
            if not kwargs:
                raise
            refuse_option(cls.__name__, next(iter(kwargs)), declared=True)
        _classes[name_of(cls)] = cls
        pytree.register(cls, _pytree_context, _pytree_unflatten)
        # A process that shares memory gets the storage itself. `_reduction` would copy slices of a larger storage.
        ForkingPickler.register(cls, cls._sent)
        cls._class_options = {name: value for name, value in options.items() if name not in kwargs}
        # Merge the options of all bases. The options of a derived class replace those of its bases.
        policy = TreeDict._class_policy  # stays itself if no class declares an option: see `_has_policy`
        for base in reversed(cls.__mro__):
            policy = policy.override(**base.__dict__.get("_class_options", {}))
        cls._class_policy = policy

    @classmethod
    def _has_policy(cls) -> bool:
        """Whether the class or one of its bases declares options."""
        return cls._class_policy is not TreeDict._class_policy

    @classmethod
    def _policy_of_copy(cls, policy: Policy, keys: Iterable[str]) -> Policy:
        """The policy of an instance of this class, copied from a dict with ``policy`` and ``keys``.

        A class with options uses its own options, and takes only encoders from ``policy``.
        """
        return cls._class_policy.with_encoders(policy.carried(keys)) if cls._has_policy() else policy

    @classmethod
    def _nested_class(cls, key: str) -> type[Any] | None:
        """The class of the nested dict at ``key``; None if any class is allowed. See `TypedDeviceDict`."""
        return None

    _has_fields: ClassVar[bool] = False
    """Whether the dict has declared fields. See `TypedDeviceDict`."""

    def _commit(
        self,
        staged: Mapping[str, Any],
        device: torch.device | None,
        encoders: Mapping[str, StringEncoder] | None,
        removed: Sequence[str] = (),
    ) -> None:
        """Store the converted items, set their device and encoders, and remove the keys in ``removed``."""
        # Conversion runs code of the user (encoders, `items` of a mapping, `__array__`), which may write to this dict.
        before = self._device
        if before is not device and before is not None and device is not None and before != device:
            keys = ", ".join(map(repr, staged))
            raise DeviceMismatchError(
                f"this {type(self).__name__} was written to while {keys} was being stored on {device}, and is on "
                f"{before} now; give device= when you make it",
                expected=before,
                actual=device,
            )
        if encoders:  # first, because comparing encoders can raise, and an error must leave the dict unchanged
            self._policy = self._policy.with_encoders(encoders)
        for key in removed:
            builtin_dict.pop(self, key)
        builtin_dict.update(self, staged)
        if device is not None:
            self._device = device

    def _validate(self, before: Mapping[str, Any] | None = None, at: Path = ()) -> None:
        """Validate the items of this dict and of its nested dicts against their classes.

        ``before``: the items that they replace. If the shapes did not fit there, they may stay so. Give self for any
        shapes. ``at``: the path of self.
        """
        for key, value in self.items():
            if isinstance(value, TreeDict):
                nested = before.get(key) if isinstance(before, Mapping) else None
                value._validate(nested, (*at, key))

    @classmethod
    def _new(cls, items: Any, device: torch.device | None, policy: Policy) -> Self:
        """Create an instance with these items. Skips validation and ``__init__``."""
        out = cls.__new__(cls)
        out._device = device
        out._policy = policy
        builtin_dict.update(out, items)
        return out

    def _untyped_subset(self, items: Any) -> Self:
        """A dict for some of the items. A subset of a typed dict has no schema, since fields may be missing."""
        return self._new(items, self._device, self._policy)

    def _tensors(self) -> list[Tensor]:
        """Every tensor of the tree, depth first. Ragged fields that share their offsets list them once."""
        return self._tensors_and_kind()[0]

    def _tensors_inside(self) -> list[Tensor]:
        """Every tensor of the tree, also those in kept values."""
        return self._tensors_and_kind([])[0]

    def _tensors_and_kind(self, kept: list[Opened | None] | None = None) -> tuple[list[Tensor], bool]:
        """Every tensor of the tree, as `_tensors` lists them, and whether all values are plain tensors.

        ``kept``: a list lists the tensors in kept values too, and gets the result of `open_kept` for each of them.
        """
        if only_tensors(self.values()):
            tensors: list[Any] = list(self.values())
            return tensors, True
        found: list[Tensor] = []
        self._list_tensors(found, set(), kept)
        return found, False

    def _list_tensors(self, found: list[Tensor], known: set[Lengths], kept: list[Opened | None] | None) -> None:
        """Append every tensor of the tree: see `_tensors_and_kind`. ``known``: see `Ragged._list_tensors`."""
        for value in self.values():
            if type(value) is Tensor or isinstance(value, Tensor):
                found.append(value)
            elif without_tensors(value):
                continue
            elif isinstance(value, (Ragged, TreeDict)):
                value._list_tensors(found, known, kept)
            elif kept is not None:
                inside = open_kept(value)
                kept.append(inside)
                found += () if inside is None else inside.tensors()

    def _leaves(self) -> list[Any]:
        """Every value that is not a nested dict, depth first."""
        found: list[Any] = []
        for value in self.values():  # pytree may insert another mapping as a leaf
            if type(value) is not Tensor and isinstance(value, TreeDict):
                found += value._leaves()
            else:
                found.append(value)
        return found

    def _with_leaves(self, leaves: Iterator[Any], device: torch.device | None) -> Self:
        """The same tree on ``device`` with other values, in the order of `_leaves`. Does not validate them."""
        items: dict[str, Any] = {}
        for key, value in self.items():
            if type(value) is not Tensor and isinstance(value, TreeDict):
                items[key] = value._with_leaves(leaves, device)
            else:
                items[key] = next(leaves)
        return self._new(items, device, self._policy)

    def _replace_tensors(
        self,
        tensors: list[Tensor],
        device: torch.device | None,
        flat: bool = False,
        kept: list[Opened | None] | None = None,
        move: Move | None = None,
    ) -> Self:
        """The same tree on ``device`` with other tensors, in the order of `_tensors`. Does not validate them.

        ``flat``: the caller knows that all values are plain tensors. ``kept``: as `_tensors_and_kind` filled it.
        ``move`` moves kept objects that move themselves. None: kept values stay.
        """
        if flat or only_tensors(self.values()):
            return self._new(zip(self, tensors, strict=True), device, self._policy)
        return self._placed(iter(tensors), {}, device, move, None if kept is None else iter(kept))

    def _placed(
        self,
        tensors: Iterator[Tensor],
        made: Made,
        device: torch.device | None,
        move: Move | None = None,
        kept: Iterator[Opened | None] | None = None,
        at: Path = (),
    ) -> Self:
        """The same tree, at a path, with the next of ``tensors``: see `_replace_tensors`. ``made``: see `Made`."""
        items: dict[str, Any] = {**self}
        for key, value in items.items():
            if type(value) is Tensor or isinstance(value, Tensor):
                items[key] = next(tensors)
            elif without_tensors(value):
                continue
            elif isinstance(value, (Ragged, TreeDict)):
                items[key] = value._placed(tensors, made, device, move, kept, (*at, key))
            elif move is not None:
                inside = open_kept(value) if kept is None else next(kept)
                if inside is None:
                    continue
                try:
                    items[key] = inside.place(tensors, device, made, move)
                except Exception as error:
                    add_note(error, f"the kept value is {dotted((*at, key))}")
                    raise
        return self._new(items, device, self._policy)

    def _map_data(self, function: Callable[[Tensor], Tensor], kept: bool = False) -> Self:
        """The same tree with ``function(tensor)`` for each tensor of `data_of`, on the same device.

        ``kept``: also for the tensors in kept values.
        """
        return self._replace_data(map(function, data_of(self)), self._device, function if kept else None)

    def _replace_data(
        self,
        results: Iterator[Any],
        device: torch.device | None,
        inside: Callable[[Tensor], Tensor] | None = None,
        made: Made | None = None,
        at: Path = (),
    ) -> Self:
        """The same tree, at a path, with ``results`` in place of the tensors of `data_of`. Does not validate them.

        ``inside``: a function for the tensors in kept values. None: these stay. ``made``: see `Made`.
        """
        made = {} if made is None else made
        items: dict[str, Any] = {**self}
        for key, value in items.items():
            if isinstance(value, Tensor):
                items[key] = next(results)
            elif isinstance(value, (Ragged, TreeDict)):
                items[key] = value._replace_data(results, device, inside, made, (*at, key))
            elif inside is not None and (kept := open_kept(value)) is not None:
                items[key] = kept.place(map(inside, kept.tensors()), device, {}, stay)
        return self._new(items, device, self._policy)

    def _infer_device(self, fallback: torch.device | None) -> None:
        """Set the device of every dict in the tree to the device of the tensors; ``fallback`` if there is no tensor.

        Pytree can build a tree with tensors on several devices. Then the device of this dict is None, so that `to`
        moves all tensors. Each nested dict gets the device of its own tensors.
        """
        dicts = dicts_of(self)
        devices = {tensor.device for tensor in self._tensors_inside()}
        if len(devices) > 1:
            self._device = None
            for nested in dicts[1:]:
                nested._infer_device(None)
            return
        device = canonical(devices.pop()) if devices else fallback
        for one in dicts:
            one._device = device

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduction(4)

    def __reduce_ex__(self, protocol: Any, /) -> Any:
        # Not pickle's default for a subclass of dict: it sets the items one by one, before it restores any state.
        return self.__reduce__() if reduces_itself(self) else self._reduction(protocol)

    _reduction: Callable[..., tuple[Any, ...]]
    """The reduction for pickle, ``copy.deepcopy`` and ``torch.save``, given the protocol. `DeviceDict` has it."""

    _sent: ClassVar[Callable[[TreeDict[Any]], tuple[Any, ...]]]
    """The reduction for a process that shares memory with this one. `DeviceDict` has it."""

    # --- comparing ---

    __hash__ = None  # pyright: ignore[reportAssignmentType]  (as for a dict)

    def __eq__(self, other: object, /) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return equal_trees(self, other, equal)

    __ne__ = object.__ne__


def kind_nested(
    outer: type[TreeDict[Any]],
    above: Policy,
    key: str,
    kind: Any,
    given: Policy | None = None,
    keys: Iterable[str] = (),
) -> tuple[type[Any], Policy]:
    """The class and policy of a nested dict that is built from a mapping.

    Args:
        outer: the class of the parent dict.
        above: the policy of the parent dict.
        key: the key of the nested dict.
        kind: the class of the mapping.
        given: the policy of the mapping; None for a plain mapping.
        keys: the keys of the mapping.
    """
    asked: Any = outer._nested_class(key) or (TreeDict if issubclass(kind, TreeDict) else outer)
    keeps_class = issubclass(kind, asked)
    cls: Any = kind if keeps_class else asked
    policy = cls._class_policy if cls is not outer and cls._has_policy() else above
    if given is not None:
        own = keeps_class and cls._has_policy()
        policy = given if own else policy.with_encoders(given.carried(keys))
    return cls, policy


def data_of(d: TreeDict[Any]) -> list[Tensor]:
    """The tensors of the tree without the offsets of ragged fields, depth first. Arithmetic and `map` change these."""
    tensors, flat = d._tensors_and_kind()
    return tensors if flat else [data for data in map(data_in, d._leaves()) if data is not None]


def data_in(value: Any) -> Tensor | None:
    """The tensor with the elements of a field; None for a kept object."""
    data = value.values if isinstance(value, Ragged) else value
    return data if isinstance(data, Tensor) else None  # pytree inserts other values into ragged fields


def field_encoder(d: TreeDict[Any], key: str) -> StringEncoder | None:
    """The encoder of a field of strings; None for a field of numbers.

    A field has numbers if its key has no encoder, or if its dtype is not a dtype of codes: the one that the encoder
    names, or else an integer dtype.
    """
    encoder, value = d._policy.encoders.get(key), builtin_dict.__getitem__(d, key)
    if encoder is None or not isinstance(value, (Tensor, Ragged, TreeDict)):
        return None
    data = data_in(value)
    dtype = None if data is None else data.dtype  # None: a nested dict of codes
    if encoder.code_dtype is not None:
        return encoder if dtype is encoder.code_dtype else None
    return None if dtype in CASTABLE or dtype is torch.bool else encoder


def share_lengths(d: TreeDict[Any]) -> None:
    """Let the ragged fields with equal offsets share them."""
    known: list[Lengths] = []
    for field in (field for _, field in leaves(d) if isinstance(field, Ragged)):
        alike = next((one for one in known if equal(one.offsets, field.offsets)), None)
        if alike is None:
            known.append(field._lengths)
        else:
            field._lengths = alike


def dicts_of(d: TreeDict[Any]) -> list[TreeDict[Any]]:
    """Every dict of the tree. A parent comes before its nested dicts."""
    found = [d]
    for one in found:  # grows
        found += [value for value in one.values() if type(value) is not Tensor and isinstance(value, TreeDict)]
    return found


def _pytree_context(d: TreeDict[Any]) -> pytree.Context:
    # An exported program keeps the keys alone. A dict that was made in the body of `while_loop`, `cond` or `map` comes
    # out of Dynamo with its items only.
    if torch.compiler.is_exporting() or not hasattr(d, "_policy"):
        return tuple(d), None
    return tuple(d), pytree.Carried(d._device, d._policy)


def _pytree_unflatten(
    cls: type[TreeDict[Any]], items: Iterable[tuple[str, Any]], carried: pytree.Carried | None
) -> Any:
    out = cls._new(items, None, cls._class_policy if carried is None else carried.policy)
    out._infer_device(None if carried is None else carried.device)
    return out


def reduces_itself(d: TreeDict[Any]) -> bool:
    """Whether the class of ``d`` defines how it is pickled."""
    return type(d).__reduce__ is not TreeDict.__reduce__


def name_of(cls: type[Any]) -> str:
    """The name of a class in files: its module and its qualified name."""
    return f"{cls.__module__}.{cls.__qualname__}"


def class_named(name: Any) -> type[Any]:
    """The defined class with this name from a file. Raises ``ValueError`` if there is none. Imports no module."""
    if isinstance(name, str) and not name.startswith("tensordict_lite._"):  # the private base classes are excluded
        # The `__module__` of a class may change after its definition.
        for cls in (_classes.get(name), *_classes.values()):
            if cls is not None and name_of(cls) == name:
                return cls
    raise ValueError(f"the class {str(name)[:200]!r} of a saved dict is not defined here; import its module first")
