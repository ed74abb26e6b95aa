"""`TreeDict`, a tree of dicts on one device: state, copies, pickle and pytree support. It does not validate values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from typing_extensions import Self, TypeVar, Unpack

from .._encoders.protocol import StringEncoder
from .._errors import DEPTH, DeviceMismatchError, Path, dotted, refuse_deeper
from .._memory.buffer import buffer_of
from .._memory.device import CPU, canonical, resolve
from .._memory.packed import are_slices, can_pack, find_buffer, from_buffer, materialize, pack
from . import pytree
from .compare import agree, equal
from .policy import OPTIONS, Options, Policy, refuse_option
from .walk import leaves, only_tensors

V = TypeVar("V", default=Tensor)

# To call methods of `dict` that `DeviceDict` overrides. `Any` is for the type checkers. The global holds the class, not
# its methods, because torch.compile can trace `dict.update(d, ...)` only through the class.
builtin_dict: Any = dict

PackedState = tuple[Tensor | bytes | None, list[Any] | None, dict[int, int]]
"""The buffer of a packed dict or its bytes, the specs of its layout, and the index of each tensor by its id."""
_classes: WeakValueDictionary[str, type[Any]] = WeakValueDictionary()
"""Every subclass by module and qualified name. Of two classes with the same name, the class that was defined last."""


class TreeDict(dict[str, V], MutableMapping[str, V], Generic[V]):
    """The base class of `DeviceDict`: state and structure.

    Two dicts never share structure: inserting a mapping shares its tensors and copies its nested dicts. So a change to
    one dict never changes another dict, and no dict can contain itself.
    """

    __slots__ = ("__weakref__", "_device", "_policy")
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
        # A process that shares memory gets the storage itself. `__reduce__` would copy slices of a larger storage.
        ForkingPickler.register(cls, cls._sent)
        if len(options) > len(kwargs):
            cls._class_options = {name: value for name, value in options.items() if name not in kwargs}
        # Merge the options of all bases. The options of a derived class replace those of its bases.
        given = [base.__dict__["_class_options"] for base in cls.__mro__ if "_class_options" in base.__dict__]
        if given:
            policy = Policy()
            for options in reversed(given):
                policy = policy.override(**options)
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

    _has_fields: ClassVar[bool] = False  # `TypedDeviceDict` overrides this attribute and the next four methods

    @classmethod
    def _drop_none(cls, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """``data`` without optional fields whose value is None, and with the defaults of absent fields."""
        return data  # pragma: no cover  (called for typed dicts only)

    def _given(self, data: Mapping[str, Any], at: Path) -> Mapping[str, Any]:
        """``data`` without values that mean "absent". ``at``: the path of self.

        Raises ``TypeError`` for a key that is not a field.
        """
        return data  # pragma: no cover  (called for typed dicts only)

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

    def _validate(self, before: Mapping[str, Any] | None = None, *, shapes: bool = True) -> None:
        """Validate the items of this dict and of its nested dicts against their classes.

        ``before``: the items that they replace. ``shapes``: validate shapes too.
        """
        for key, value in self.items():
            if isinstance(value, TreeDict):
                nested = before.get(key) if isinstance(before, Mapping) else None
                value._validate(nested, shapes=shapes)

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
        """Every tensor of the tree, depth first."""
        return self._tensors_and_kind()[0]

    def _tensors_and_kind(self) -> tuple[list[Tensor], bool]:
        """Every tensor of the tree, depth first, and whether all values are plain tensors."""
        values = list(self.values())
        for value in values:  # `only_tensors` inline: a call would slow down every operation
            if type(value) is not Tensor:
                break
        else:
            return cast("list[Tensor]", values), True
        found: list[Tensor] = []
        for value in values:
            if isinstance(value, Tensor):
                found.append(value)
            elif isinstance(value, TreeDict):  # pytree may insert another mapping as a leaf
                found += value._tensors()
        return found, False

    def _replace_tensors(self, tensors: list[Tensor], device: torch.device | None, flat: bool = False) -> Self:
        """The same tree on ``device`` with other tensors, in the order of `_tensors`. Does not validate them.

        ``flat``: the caller knows that all values are plain tensors.
        """
        if flat or only_tensors(self.values()):
            return self._new(zip(self, tensors, strict=True), device, self._policy)
        left = iter(tensors)
        return self._map_tensors(lambda _: next(left), device)

    def _map_tensors(self, function: Callable[[Tensor], Tensor], device: torch.device | None) -> Self:
        """The same tree with ``function(tensor)`` for each tensor, depth first. The results are on ``device``."""
        items: dict[str, Any] = {}
        for key, value in self.items():
            if isinstance(value, Tensor):
                items[key] = function(value)
            elif isinstance(value, TreeDict):
                items[key] = value._map_tensors(function, device)
            else:
                items[key] = value
        return self._new(items, device, self._policy)

    def _infer_device(self, fallback: torch.device | None, dicts: list[TreeDict[Any]] | None = None) -> None:
        """Set the device of every dict in the tree to the device of the tensors; ``fallback`` if there is no tensor.

        ``dicts``: the result of `dicts_of` for this dict, if the caller has it.

        Pytree can build a tree with tensors on several devices. Then the device of this dict is None, so that `to`
        moves all tensors. Each nested dict gets the device of its own tensors.
        """
        dicts = dicts_of(self, limit=None) if dicts is None else dicts
        devices = {value.device for one in dicts for value in one.values() if isinstance(value, Tensor)}
        if len(devices) > 1:
            self._device = None
            for nested in dicts[1:]:
                nested._infer_device(None)
            return
        device = canonical(devices.pop()) if devices else fallback
        for one in dicts:
            one._device = device

    if TYPE_CHECKING:  # pragma: no cover

        def copy(
            self,
        ) -> Self: ...  # Defined in `DeviceDict`, so that errors about its arguments name the public class.

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        out = self._new((), self._device, self._policy)
        memo[id(self)] = out
        builtin_dict.update(out, {key: copy.deepcopy(value, memo) for key, value in self.items()})
        return out

    def __reduce__(self) -> tuple[Any, ...]:
        # Not pickle's default for a subclass of dict: it sets the items one by one, before it restores any state.
        return reduce_args(self._compacted())

    @staticmethod
    def _sent(d: TreeDict[Any]) -> tuple[Any, ...]:
        """The reduction for a process that shares memory with this one."""
        return reduce_args(d)  # pragma: no cover  (`DeviceDict` overrides this method)

    def _compacted(self) -> Self:
        """This dict, or a packed copy if a tensor is a slice of a larger storage. Pickle writes whole storages."""
        device, tensors = self._device, self._tensors()
        if device is None or not (can_pack(device) and are_slices(tensors)):
            return self
        return self._replace_tensors(pack(tensors, device), device)

    # --- comparing ---

    __hash__ = None  # pyright: ignore[reportAssignmentType]  (as for a dict)

    def __eq__(self, other: object, /) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return agree(self, other, equal)

    def __ne__(self, other: object, /) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return not agree(self, other, equal)

    def _check(self) -> None:
        """Raise ``AssertionError`` if an invariant of the dict does not hold. For tests; O(fields)."""
        _verify(self, self._device, ())


def kind_nested(
    outer: type[TreeDict[Any]], key: str, kind: type[Any], given: Policy | None, keys: Iterable[str], policy: Policy
) -> tuple[type[Any], Policy]:
    """The class and policy of a nested dict that is built from a mapping.

    Args:
        outer: the class of the parent dict.
        key: the key of the nested dict.
        kind: the class of the mapping.
        given: the policy of the mapping; None for a plain mapping.
        keys: the keys of the mapping.
        policy: the policy of the parent dict.
    """
    untyped: Any = kind  # not `cast()`, because torch.compile loses the class in a cast
    asked: Any = outer._nested_class(key) or (TreeDict if issubclass(kind, TreeDict) else outer)
    keeps_class = issubclass(kind, asked)
    cls: Any = untyped if keeps_class else asked
    if cls is not outer and cls._has_policy():
        policy = cls._class_policy
    if given is not None:
        own = keeps_class and cls._has_policy()
        policy = given if own else policy.with_encoders(given.carried(keys))
    return cls, policy


def tensor_paths(d: TreeDict[Any]) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor with its path, depth first."""
    return ((path, value) for path, value in leaves(d) if isinstance(value, Tensor))


def dicts_of(d: TreeDict[Any], limit: int | None = DEPTH) -> list[TreeDict[Any]]:
    """Every dict of the tree. A parent comes before its nested dicts.

    Raises ``TooDeep`` for a dict nested ``limit`` levels deep: trees from pytree or pickle were not validated.
    """
    found: list[TreeDict[Any]] = []
    left: list[tuple[Path, TreeDict[Any]]] = [((), d)]
    while left:
        at, one = left.pop()
        found.append(one)
        if limit is not None and len(at) >= limit:
            refuse_deeper(at)
        for key, value in one.items():
            if type(value) is not Tensor and isinstance(value, TreeDict):  # isinstance takes 10x longer than `is`
                left.append(((*at, key), value))
    return found


def _verify(d: TreeDict[Any], device: torch.device | None, at: Path) -> None:
    where = f"at {dotted(at)}" if at else "at the root"
    assert isinstance(d, TreeDict) and isinstance(d._policy, Policy), where
    assert d._device == device, f"{where}: tracks {d._device}, expected {device}"
    assert device is None or device == resolve(device), f"{where}: {device} is not resolved"
    assert (device is CPU) == (device == CPU), f"{where}: the CPU device is not the shared one"
    for key, value in d.items():
        path = (*at, key)
        assert isinstance(key, str), f"key {key!r} {where}"
        if isinstance(value, Tensor):
            assert value.device == device, f"{dotted(path)} is on {value.device}, expected {device}"
        elif isinstance(value, TreeDict):
            assert device is not None, f"{dotted(path)}: nested in a dict without a device"
            _verify(value, device, path)
        else:
            assert not isinstance(value, Mapping), f"{dotted(path)}: a mapping that is no DeviceDict"
            assert d._policy.objects == "keep", f"{dotted(path)}: {type(value).__name__} without objects='keep'"


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


def reduce_args(d: TreeDict[Any], state: PackedState | None = None) -> tuple[Any, ...]:
    """The reduction of ``d`` for pickle: `restore` and its arguments. Pickle writes the buffer of a packed dict.

    ``state``: the result of `packed_state`, if the caller has it. Raises ``TooDeep``.
    """
    dicts_of(d)
    device = None if d._device is None else str(d._device)
    buffer, specs, numbers = packed_state(d) if state is None else state
    states: dict[int, dict[str, Any]] = {}
    items = dict(d) if buffer is None else packed_items(d, numbers, states)
    return restore, (type(d), items, device, policy_state(d, states), buffer, specs)


def packed_state(d: TreeDict[Any], *, alone: bool = False) -> tuple[Tensor | None, list[Any] | None, dict[int, int]]:
    """The `PackedState` of a dict; ``(None, None, {})`` for a dict that is not packed.

    ``alone``: a single tensor that fills its storage counts as packed.
    """
    tensors = d._tensors()
    found = find_buffer(tensors, d._device, alone=alone)
    if found is None:
        return None, None, {}
    layout = found.layout
    specs = [(*spec, members) for spec, members in layout.groups]
    return buffer_of(tensors, layout), specs, {id(tensors[i]): i for i in layout.members}


def name_of(cls: type[Any]) -> str:
    """The name of a class in files: its module and its qualified name."""
    return f"{cls.__module__}.{cls.__qualname__}"


def class_named(name: Any) -> type[Any]:
    """The defined class with this name from a file. Raises ``ValueError`` if there is none. Imports no module."""
    if isinstance(name, str) and not name.startswith("tensordict_lite._"):  # the private base classes are excluded
        cls = _classes.get(name)
        if cls is not None and name_of(cls) == name:
            return cls
        for cls in list(_classes.values()):  # the `__module__` of a class may change after its definition
            if name_of(cls) == name:
                return cls
    raise ValueError(f"the class {str(name)[:200]!r} of a saved dict is not defined here; import its module first")


def policy_state(d: TreeDict[Any], states: dict[int, dict[str, Any]]) -> dict[str, Any] | None:
    """The policy of a dict for pickle; None if it is the policy of its class. Dicts with one policy share one state."""
    policy = d._policy
    if policy is d._class_policy:
        return None
    if id(policy) not in states:
        states[id(policy)] = policy.to_state()
    return states[id(policy)]


def packed_items(d: TreeDict[Any], numbers: Mapping[int, int], states: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """The items of a packed dict in the form that pickle writes.

    A tensor in the buffer becomes its number. A nested dict becomes a list ``[class, items, policy]``. Any other value
    becomes a tuple ``(value,)``.
    """
    items: dict[str, Any] = {}
    for key, value in d.items():
        if type(value) is not Tensor and isinstance(value, TreeDict):
            nested = value
            items[key] = [type(nested), packed_items(nested, numbers, states), policy_state(nested, states)]
        else:
            items[key] = numbers.get(id(value), (value,))
    return items


def restore(
    cls: type[Any],
    items: dict[str, Any],
    device: str | None,
    policy: dict[str, Any] | None,
    buffer: Tensor | bytes | None = None,
    specs: list[Any] | None = None,
) -> Any:
    """Rebuild a dict from the arguments of `reduce_args`, on the device of the loaded tensors.

    Takes data only, and validates the form of the data, since a file may be damaged or forged.
    """
    fallback = None if device is None else canonical(torch.device(device))
    try:
        if buffer is None:
            if type(items) is not dict or not all(isinstance(key, str) for key in items):
                _refuse_items(items)
            out = _restored(cls, items, policy, {})
        else:
            out = unpacked(cls, items, policy, from_buffer(buffer, specs), {})
        out._infer_device(fallback, dicts_of(out))
    except RecursionError as error:
        raise ValueError("a dict holds itself, or is nested too deep") from error
    return out


def _restored(cls: Any, items: dict[str, Any], policy: Any, policies: dict[int, Policy]) -> TreeDict[Any]:
    """A dict from a pickle, without its device. ``policies``: the policies read so far, by the id of their state."""
    if not (isinstance(cls, type) and issubclass(cls, TreeDict)):
        raise TypeError(f"expected a DeviceDict class, got {cls!r}")
    own = cls
    if policy is None:
        made = own._class_policy
    else:
        made = policies.get(id(policy)) or policies.setdefault(id(policy), Policy.from_state(policy))
    if made.objects != "keep":
        items = {
            key: value if isinstance(value, (Tensor, TreeDict)) else materialize(value) for key, value in items.items()
        }
    return own._new(items, None, made)


def _refuse_items(items: object) -> NoReturn:
    raise TypeError(f"expected a dict with str keys, got {type(items).__name__}")


def unpacked(
    cls: Any, items: Any, policy: Any, fields: Mapping[int, Tensor], policies: dict[int, Policy]
) -> TreeDict[Any]:
    """Rebuild a dict from the items of `packed_items`. ``fields``: the tensors of the buffer, by number."""
    if type(items) is not dict:
        _refuse_items(items)
    out: dict[str, Any] = {}
    for key, value in items.items():
        if not isinstance(key, str):
            _refuse_items(items)
        kind = type(value)
        if kind is int and value in fields:
            out[key] = fields[value]
        elif kind is list and len(value) == 3:
            nested, inner, its_policy = value
            out[key] = unpacked(nested, inner, its_policy, fields, policies)
        elif kind is tuple and len(value) == 1:
            out[key] = value[0]
        else:
            raise ValueError(f"the item {key!r} of a packed dict is damaged")
    return _restored(cls, out, policy, policies)
