"""A tree of dicts on one device: its state, its copies, how it crosses pickle and pytree. Checks nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar, Generic, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from typing_extensions import Self, TypeVar, Unpack

from .._encoders.protocol import StringEncoder
from .._errors import DeviceMismatchError, Path, dotted, refuse_deeper
from .._memory.buffer import buffer_of
from .._memory.device import CPU, canonical, resolve
from .._memory.packed import are_slices, can_pack, from_buffer, materialize, pack, packed_layout
from .._tree import pytree
from .compare import agree, equal
from .policy import OPTIONS, Options, Policy, refuse_option
from .walk import only_tensors

V = TypeVar("V", default=Tensor)

# dict itself, for its methods under the ones here: `Any` for the type checkers, and reached through the class, because
# torch.compile knows `dict.update(d, ...)` but not a global that is that method.
builtin_dict: Any = dict


Apart = tuple[Tensor | None, list[Any] | None, dict[int, int]]
_classes: WeakValueDictionary[str, type[Any]] = WeakValueDictionary()
"""Every class below, by its module and qualified name; of several the last that was defined."""


class TreeDict(dict[str, V], MutableMapping[str, V], Generic[V]):
    """State and structure under `DeviceDict`.

    Nested dicts form a tree that is never shared: whatever makes one takes a mapping in by value, its tensors shared
    and its structure new, so that no dict can change under another one and no cycle can arise.
    """

    __slots__ = ("__weakref__", "_device", "_policy")
    _device: torch.device | None  # resolved; None before the first tensor or nested dict, and see `_infer_device`
    _policy: Policy
    _class_options: ClassVar[Mapping[str, Any]]  # what one class gave; the next is what it and its bases make
    _class_policy: ClassVar[Policy] = Policy()

    def __init_subclass__(
        cls,
        **options: Unpack[Options],
    ) -> None:
        kwargs = {name: value for name, value in options.items() if name not in OPTIONS[1:]}
        try:
            super().__init_subclass__(**kwargs)
        except TypeError:
            if not kwargs:
                raise
            refuse_option(cls.__name__, next(iter(kwargs)), declared=True)
        _classes[name_of(cls)] = cls
        pytree.register(cls, _context, _unflatten)
        # Between processes that share memory, where `__reduce__` would make fields of a larger storage anew.
        ForkingPickler.register(cls, cls._sent)
        if len(options) > len(kwargs):
            cls._class_options = {name: value for name, value in options.items() if name not in kwargs}
        # Of every class that gives options, the more derived one's over the others': so several bases add up.
        given = [base.__dict__["_class_options"] for base in cls.__mro__ if "_class_options" in base.__dict__]
        if given:
            policy = Policy()
            for options in reversed(given):
                policy = policy.override(**options)
            cls._class_policy = policy

    @classmethod
    def _has_policy(cls) -> bool:
        return cls._class_policy is not TreeDict._class_policy

    @classmethod
    def _policy_of_copy(cls, policy: Policy, keys: Iterable[str]) -> Policy:
        """The policy of an instance made of a dict with ``policy`` and ``keys``: the class's options come first."""
        return cls._class_policy.with_encoders(policy.carried(keys)) if cls._has_policy() else policy

    @classmethod
    def _nested_class(cls, key: str) -> type[Any] | None:
        """The class of the nested dict at ``key``; None if it may be any. See `TypedDeviceDict`."""
        return None

    _has_fields: ClassVar[bool] = False  # see `TypedDeviceDict`, which overrides the next four

    @classmethod
    def _drop_none(cls, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """``data`` without the fields whose value is None and may be absent."""
        return data

    def _given(self, data: Mapping[str, Any], at: Path) -> Mapping[str, Any]:
        """``data`` without what means "absent". Raise ``TypeError`` for what is no field; ``at``: the path of self."""
        return data

    def _commit(
        self,
        staged: Mapping[str, Any],
        device: torch.device | None,
        encoders: Mapping[str, StringEncoder] | None,
        removed: Sequence[str] = (),
    ) -> None:
        """Store items that were converted, take their device and encoders, and remove some keys."""
        # Preparing runs the code of others (encoders, `items` of a mapping, `__array__`), which may have written here.
        before = self._device
        if before is not device and before is not None and device is not None and before != device:
            keys = ", ".join(map(repr, staged))
            raise DeviceMismatchError(
                f"this {type(self).__name__} was written to while {keys} was being stored on {device}, and is on "
                f"{before} now; give device= when you make it",
                expected=before,
                actual=device,
            )
        if encoders:  # Comparing encoders can raise, so it comes before the first change.
            self._policy = self._policy.with_encoders(encoders)
        for key in removed:
            builtin_dict.pop(self, key)
        builtin_dict.update(self, staged)
        if device is not None:
            self._device = device

    def _validate(self, before: Mapping[str, Any] | None = None, *, shapes: bool = True) -> None:
        """Raise unless the items of this dict, and of dicts in it, fit their class; ``before``: what they replace."""
        for key, value in self.items():
            if isinstance(value, TreeDict):
                nested = before.get(key) if isinstance(before, Mapping) else None
                cast("TreeDict[Any]", value)._validate(nested, shapes=shapes)

    @classmethod
    def _new(cls, items: Any, device: torch.device | None, policy: Policy) -> Self:
        """An instance with these items, unchecked; ``__init__`` of a subclass is not run."""
        out = cls.__new__(cls)
        out._device = device
        out._policy = policy
        builtin_dict.update(out, items)
        return out

    def _untyped_subset(self, items: Any) -> Self:
        """A dict for some of the items, and nothing that was true of all of them; see `TypedDeviceDict`."""
        return self._new(items, self._device, self._policy)

    def _tensors(self) -> list[Tensor]:
        """Every tensor of the tree, depth first."""
        return self._tensors_and_kind()[0]

    def _tensors_and_kind(self) -> tuple[list[Tensor], bool]:
        """Every tensor of the tree, depth first, and whether there is nothing here but plain tensors."""
        values = list(self.values())
        if only_tensors(values):
            return cast("list[Tensor]", values), True
        found: list[Tensor] = []
        for value in values:
            if isinstance(value, Tensor):
                found.append(value)
            elif isinstance(value, TreeDict):  # as `_map_tensors` has it: a foreign leaf of pytree's may be any mapping
                found += cast("TreeDict[Any]", value)._tensors()
        return found, False

    def _replace_tensors(self, tensors: list[Tensor], device: torch.device | None, flat: bool = False) -> Self:
        """The same tree on ``device`` with these tensors, in the order of `_tensors`, for its own; unchecked.

        ``flat``: the caller knows that there is nothing but plain tensors.
        """
        if flat or only_tensors(self.values()):
            return self._new(zip(self, tensors, strict=True), device, self._policy)
        left = iter(tensors)
        return self._map_tensors(lambda _: next(left), device)

    def _map_tensors(self, function: Callable[[Tensor], Tensor], device: torch.device | None) -> Self:
        """The same tree with ``function`` of every tensor, depth first, whose results are on ``device``; unchecked."""
        items: dict[str, Any] = {}
        for key, value in self.items():
            if isinstance(value, Tensor):
                items[key] = function(value)
            elif isinstance(value, TreeDict):
                items[key] = cast("TreeDict[Any]", value)._map_tensors(function, device)
            else:
                items[key] = value
        return self._new(items, device, self._policy)

    def _infer_device(self, fallback: torch.device | None) -> None:
        """Take the device from the tensors that are here now; without any, ``fallback``, for nested dicts too.

        If pytree put tensors of several devices here there is no device to name, and None lets `to` gather them.
        """
        devices = {tensor.device for tensor in self._tensors()}
        self._device = canonical(devices.pop()) if len(devices) == 1 else None if devices else fallback
        for value in self.values():
            if isinstance(value, TreeDict):
                nested = cast("TreeDict[Any]", value)
                if nested._device != self._device and not nested._tensors():
                    nested._infer_device(self._device)

    def copy(self) -> Self:
        """A new dict with the same tensors: structure copied at every level, no tensor copied.

        >>> from tensordict_lite import DeviceDict
        >>> d = DeviceDict({"obs": {"x": 1}})
        >>> c = d.copy()
        >>> del c["obs", "x"]
        >>> d["obs", "x"] is not None
        True
        """
        if only_tensors(self.values()):
            return self._new(self, self._device, self._policy)
        return self._map_tensors(lambda tensor: tensor, self._device)

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        out = self._new((), self._device, self._policy)
        memo[id(self)] = out
        builtin_dict.update(out, {key: copy.deepcopy(value, memo) for key, value in self.items()})
        return out

    def __reduce__(self) -> tuple[Any, ...]:
        # Without this, pickle sets the items of a dict subclass one by one before it restores any state.
        return reduce_args(self._compacted())

    @staticmethod
    def _sent(d: TreeDict[Any]) -> tuple[Any, ...]:
        """`__reduce__` between processes that share memory."""
        return reduce_args(d)

    def _compacted(self) -> Self:
        """This dict, or one without fields that are parts of a larger storage, all of which pickle would write."""
        device, tensors = self._device, self._tensors()
        if device is None or not (can_pack(device) and are_slices(tensors)):
            return self
        return self._replace_tensors(pack(tensors, device), device)

    # --- comparing ---

    __hash__ = None  # pyright: ignore[reportAssignmentType]  (as for a dict)

    def __eq__(self, other: object, /) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return agree(self, cast("Mapping[str, Any]", other), equal)

    def __ne__(self, other: object, /) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return not agree(self, cast("Mapping[str, Any]", other), equal)

    def _check(self) -> None:
        """Raise ``AssertionError`` if anything that must always hold does not. For tests; O(fields)."""
        _verify(self, self._device, ())


def kind_nested(
    outer: type[TreeDict[Any]], key: str, kind: type[Any], given: Policy | None, keys: Iterable[str], policy: Policy
) -> tuple[type[Any], Policy]:
    """The class and policy of the dict at ``key`` of an ``outer`` with ``policy``, if made of an instance of ``kind``.

    ``given``: the policy of that instance, and None of a plain mapping; ``keys``: its keys.
    """
    of: Any = kind
    asked: Any = outer._nested_class(key) or (TreeDict if issubclass(kind, TreeDict) else outer)
    of_its_class = issubclass(kind, asked)
    made: Any = of if of_its_class else asked  # no cast: torch.compile loses the class in one
    if made is not outer and made._has_policy():
        policy = made._class_policy
    if given is not None:
        own = of_its_class and made._has_policy()
        policy = given if own else policy.with_encoders(given.carried(keys))
    return made, policy


def tensor_paths(d: TreeDict[Any], at: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor of the tree and its path, depth first."""
    for key, value in d.items():
        if isinstance(value, Tensor):
            yield (*at, key), value
        elif isinstance(value, TreeDict):
            yield from tensor_paths(cast("TreeDict[Any]", value), (*at, key))


def _refuse_too_deep(d: TreeDict[Any]) -> None:
    """Raise ``TooDeep`` for a tree that can be so because nobody checked it: made from within, or by a pickle."""
    level: list[tuple[Path, TreeDict[Any]]] = [] if only_tensors(d.values()) else [((), d)]
    while level:
        refuse_deeper(level[0][0])
        level = [
            ((*path, key), cast("TreeDict[Any]", value))
            for path, one in level
            for key, value in one.items()
            if type(value) is not Tensor and isinstance(value, TreeDict)  # the second takes ten times as long
        ]


def _verify(d: TreeDict[Any], device: torch.device | None, at: Path) -> None:
    where = f"at {dotted(at)}" if at else "at the root"
    assert isinstance(cast(object, d), TreeDict) and isinstance(cast(object, d._policy), Policy), where
    assert d._device == device, f"{where}: tracks {d._device}, expected {device}"
    assert device is None or device == resolve(device), f"{where}: {device} is not resolved"
    assert (device is CPU) == (device == CPU), f"{where}: the CPU device is not the shared one"
    for key, value in d.items():
        path = (*at, key)
        assert isinstance(cast(object, key), str), f"key {key!r} {where}"
        if isinstance(value, Tensor):
            assert value.device == device, f"{dotted(path)} is on {value.device}, expected {device}"
        elif isinstance(value, TreeDict):
            assert device is not None, f"{dotted(path)}: nested in a dict without a device"
            _verify(cast("TreeDict[Any]", value), device, path)
        else:
            assert not isinstance(value, Mapping), f"{dotted(path)}: a mapping that is no DeviceDict"
            assert d._policy.objects == "keep", f"{dotted(path)}: {type(value).__name__} without objects='keep'"


def _context(d: TreeDict[Any]) -> pytree.Context:
    return pytree.Context(tuple(d), d._device, d._policy)


def _unflatten(cls: type[TreeDict[Any]], items: Iterable[tuple[str, Any]], context: pytree.Context) -> Any:
    out = cls._new(items, None, cls._class_policy if context.policy is None else context.policy)
    out._infer_device(context.device)
    return out


def reduce_args(d: TreeDict[Any], apart: Apart | None = None) -> tuple[Any, ...]:
    """How pickle makes ``d`` again, from the storages of its tensors; from the one there is if it is packed.

    ``apart``: what `packed_state` gives, if the caller has it.
    """
    _refuse_too_deep(d)
    device = None if d._device is None else str(d._device)
    buffer, specs, numbers = packed_state(d) if apart is None else apart
    items = dict(d) if buffer is None else _items_without(d, numbers)
    return restore, (type(d), items, device, _pickled_policy(d), buffer, specs)


def packed_state(d: TreeDict[Any]) -> Apart:
    """The block of a packed dict, what lies in it, and by the id of each of its tensors its number there."""
    tensors = d._tensors()
    found = packed_layout(tensors, d._device)
    if found is None:
        return None, None, {}
    layout = found.layout
    specs = [(*spec, members) for spec, members in layout.groups]
    return buffer_of(tensors, layout), specs, {id(tensors[i]): i for i in layout.members}


def name_of(cls: type[Any]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def class_named(name: Any) -> type[Any]:
    """The class that is defined under a name; ``ValueError`` if there is none. Imports nothing."""
    if isinstance(name, str) and not name.startswith("tensordict_lite._"):  # nothing has one of the rooms' classes
        cls = _classes.get(name)
        if cls is not None and name_of(cls) == name:
            return cls
        for cls in list(_classes.values()):  # one whose module was changed later, as where it is exported from
            if name_of(cls) == name:
                return cls
    raise ValueError(f"the class {str(name)[:200]!r} of a saved dict is not defined here; import its module first")


def _pickled_policy(d: TreeDict[Any]) -> dict[str, Any] | None:
    return None if d._policy is d._class_policy else d._policy.to_state()


def _items_without(d: TreeDict[Any], numbers: Mapping[int, int]) -> dict[str, Any]:
    """The items of a packed dict without what the block holds: for a tensor in it its number, for a nested dict a list
    of what makes it, and anything else in a tuple.
    """
    items: dict[str, Any] = {}
    for key, value in d.items():
        if isinstance(value, TreeDict):
            nested = cast("TreeDict[Any]", value)
            items[key] = [type(nested), _items_without(nested, numbers), _pickled_policy(nested)]
        else:
            items[key] = numbers.get(id(value), (value,))
    return items


def restore(
    cls: type[Any],
    items: dict[str, Any],
    device: str | None,
    policy: dict[str, Any] | None,
    buffer: Tensor | None = None,
    specs: list[Any] | None = None,
) -> Any:
    """Build what `TreeDict.__reduce__` took apart; on whatever device the tensors were loaded to.

    Takes data only and checks its form, since a file may hold anything.
    """
    try:
        if buffer is None:
            _refuse_unless_dict(items)
        else:
            items = _items_with(items, from_buffer(buffer, specs))
        out = _restored(cls, items, policy)
        _refuse_too_deep(out)
        out._infer_device(None if device is None else canonical(torch.device(device)))
    except RecursionError as error:
        raise ValueError("a dict that holds itself, or is nested too deep") from error
    return out


def _restored(cls: Any, items: Any, policy: Any) -> TreeDict[Any]:
    if not (isinstance(cls, type) and issubclass(cls, TreeDict)):
        raise TypeError(f"expected a DeviceDict class, got {cls!r}")
    own = cast("type[TreeDict[Any]]", cls)
    made = own._class_policy if policy is None else Policy.from_state(policy)
    if made.objects != "keep" and not only_tensors(items.values()):
        items = {key: materialize(value) for key, value in items.items()}
    return own._new(items, None, made)


def _refuse_unless_dict(items: Any) -> None:
    if type(items) is not dict or not all(isinstance(key, str) for key in cast("dict[Any, Any]", items)):
        raise TypeError(f"expected a dict with str keys, got {type(cast(object, items)).__name__}")


def _items_with(items: Any, fields: Mapping[int, Tensor]) -> dict[str, Any]:
    """`_items_without` undone."""
    _refuse_unless_dict(items)
    out: dict[str, Any] = {}
    for key, value in items.items():
        kind = cast(Any, type(value))
        if kind is int and value in fields:
            out[key] = fields[value]
        elif kind is list and len(value) == 3:
            cls, inner, policy = value
            nested = _restored(cls, _items_with(inner, fields), policy)
            nested._infer_device(None)  # one without tensors takes its device from the root
            out[key] = nested
        elif kind is tuple and len(value) == 1:
            out[key] = value[0]
        else:
            raise ValueError(f"a packed dict whose item {key!r} is damaged")
    return out
