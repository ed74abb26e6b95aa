"""The mapping contract and the device rule: a real dict that refuses what does not belong.

Everything that stores goes through `CheckedDict._stage` (check and convert all of it) and then one `dict.update`, so
that a call either stores everything or changes nothing. Reading is `dict`'s own C code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from typing_extensions import Never, Self

from ._devices import CPU, DeviceLike, canonical, resolve
from ._errors import DeviceMismatchError, Path, dotted, located, refuse_deeper
from ._items import Items, all_home, as_dict, placed, refuse_key, refuse_optimizer, snapshot, tensors_in
from ._missing import missing_key, rows_hint
from ._policy import Encoders, Objects, OnMismatch, Policy, refuse_option
from ._strings import StringEncoder
from ._transfer import transfer
from ._tree import TreeDict, V, raw
from ._values import store

_MISSING: Any = object()


class CheckedDict(TreeDict[V]):
    """The value rule of `DeviceDict`, every mutator of ``dict``, and paths."""

    __slots__ = ()

    def __init__(
        self,
        data: Items | None = None,
        /,
        *,
        device: DeviceLike | None = None,
        encoders: Encoders | None = None,
        on_mismatch: OnMismatch | None = None,
        objects: Objects | None = None,
        dtype: torch.dtype | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            refuse_option(type(self).__name__, next(iter(unknown)))
        self._begin(data, device, encoders, on_mismatch, objects, dtype)
        if data is not None:
            # `as_dict` tells it too; without the call a dict of 8 fields is made in 0.97 of the time.
            items = cast("dict[str, Any]", data) if type(data) is dict else as_dict(data)
            self._take(items, consent=device is not None)

    def _begin(
        self,
        data: Items | None,
        device: DeviceLike | None,
        encoders: Encoders | None,
        on_mismatch: OnMismatch | None,
        objects: Objects | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Set the state of a new dict that is to take ``data``."""
        if self or (hasattr(self, "_device") and self._device is not None):
            raise TypeError(f"this {type(self).__name__} is made already; use update to add to it")
        policy = self._class_policy
        home = None if device is None else resolve(device)
        if type(data) is not dict and isinstance(data, TreeDict):  # a copy, which may change class
            policy = self._policy_of_copy(data._policy, data)
            home = data._device if device is None else home
        if not (encoders is on_mismatch is objects is dtype is None):
            policy = policy.override(encoders, on_mismatch, objects, dtype)
        self._policy = policy
        self._device = home

    # --- reading, which is dict's own but for paths ---

    if TYPE_CHECKING:  # pragma: no cover

        def __getitem__(self, key: str | Path, /) -> V: ...

    def __missing__(self, key: object) -> V:
        node = self._holder(cast(Path, key)) if type(key) is tuple else None
        if node is None:
            raise missing_key(self, cast(object, key))
        return raw.__getitem__(node, cast(Path, key)[-1])

    def __contains__(self, key: object) -> bool:
        return raw.__contains__(self, key) or (type(key) is tuple and self._holder(cast(Path, key)) is not None)

    def get(self, key: str | Path, default: Any = None, /) -> Any:
        """The value at ``key``, which may be a path; ``default`` if there is none. Raises nothing, copies nothing.

        >>> from tensordict_lite import DeviceDict
        >>> d = DeviceDict({"obs": {"x": 1}})
        >>> d.get(("obs", "x")), d.get("y")
        (tensor(1), None)
        """
        if type(key) is not tuple:
            return raw.get(self, key, default)
        node = self._holder(key)
        return default if node is None else raw.__getitem__(node, key[-1])

    # --- writing ---

    def __setitem__(self, key: str | Path, value: Any, /) -> None:
        # The plain case in one expression, without a call. `is_cpu` takes half the time of `device ==`, which saves a
        # fifth of the whole write.
        if (
            type(value) is Tensor
            and type(key) is str
            and (value.is_cpu if self._device is CPU else value.device == self._device)
        ):
            raw.__setitem__(self, key, value)
        else:
            self._set(key, value)

    def _set(self, key: str | Path, value: Any) -> None:
        if type(key) is tuple:
            self._set_path(key, value)
        elif isinstance(key, str):
            self._take({key: value})
        else:
            refuse_key(key, (), rows_hint(key))

    def __delitem__(self, key: str | Path, /) -> None:
        if type(key) is tuple:
            node, last = self._walk(key)
            del node[last]
        else:
            try:
                raw.__delitem__(self, cast(str, key))
            except KeyError:
                raise missing_key(self, key) from None

    def pop(self, key: str | Path, default: Any = _MISSING, /) -> Any:
        """Remove ``key``, which may be a path, and return its value; without it ``default``, or ``KeyError``.

        Copies nothing.

        >>> from tensordict_lite import DeviceDict
        >>> d = DeviceDict({"obs": {"x": 1, "y": 2}})
        >>> d.pop(("obs", "x")), list(d["obs"])
        (tensor(1), ['y'])
        """
        if type(key) is tuple:
            value = self.get(key, _MISSING)
            if value is not _MISSING:
                del self[key]
                return value
        elif raw.__contains__(self, key):
            return raw.pop(self, cast(str, key))
        if default is _MISSING:
            raise missing_key(self, key)
        return default

    def setdefault(self, key: str | Path, default: Any = None, /) -> Any:
        """The value at ``key``; if there is none, ``default`` is stored there first, by the rule of ``d[key] = ...``.

        Raises, and costs, what that does.

        >>> from tensordict_lite import DeviceDict
        >>> d = DeviceDict()
        >>> d.setdefault("x", 1.5)
        tensor(1.5000)
        """
        if key not in self:
            self[key] = default
        return self.get(key)

    def update(self, data: Items = (), /, **fields: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Store every item, or, if one is refused, none of them.

        A `DeviceDict` brings the encoders of its keys along.

        Args:
            data: a mapping or an iterable of pairs.
            fields: more items.

        Raises: as ``d[key] = ...``, for the first item that is refused; what ``dict`` raises for what is no mapping
            or pairs.
        Cost: a check an item; no copy of a tensor that is in place.

        >>> from tensordict_lite import DeviceDict
        >>> d = DeviceDict({"x": 0})
        >>> try:
        ...     d.update(x=1, y=None)
        ... except TypeError:
        ...     print(d["x"])
        tensor(0)
        """
        items = as_dict(data)
        if fields:
            items = {**items, **fields}
        brought: dict[str, StringEncoder] = {}
        if type(data) is not dict and isinstance(data, TreeDict):
            encoders = data._policy.carried(data)
            brought = {key: encoders[key] for key in encoders if key in data and key not in fields}
        self._take(items, encoders=brought)

    def __ior__(self, other: Items, /) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.update(other)
        return self

    def __or__(self, other: Any, /) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not isinstance(other, Mapping):
            return NotImplemented
        out = self.copy()
        out.update(cast("Mapping[str, Any]", other))
        return out

    def __ror__(self, other: Any, /) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not isinstance(other, Mapping):
            return NotImplemented
        out = self._new((), self._device, self._policy)
        out.update({**cast("Mapping[str, Any]", other), **self})
        return out

    @classmethod
    def fromkeys(cls, keys: Iterable[str], value: Any = None, /) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A dict with the same ``value`` at each key, by the rule of ``d[key] = value``, which says what it raises.

        >>> from tensordict_lite import DeviceDict
        >>> DeviceDict.fromkeys(["x", "y"], 0.0)["y"]
        tensor(0.)
        """
        return cls(dict.fromkeys(keys, value))

    # --- the two steps of every write: stage, then commit ---

    def _take(
        self,
        data: Mapping[str, Any],
        *,
        consent: bool = False,
        at: Path = (),
        encoders: Mapping[str, StringEncoder] | None = None,
    ) -> None:
        """Store all of ``data``, and ``encoders`` of its keys, or raise.

        ``consent``: tensors elsewhere are moved; ``at``: where in a tree this dict is.
        """
        device = self._device
        if device is None:
            if self and self._tensors():  # see `_settle`
                raise DeviceMismatchError(
                    f"this {type(self).__name__} has tensors on several devices; .to(device) it first"
                )
            first = next(iter(data.values()), None)
            device = canonical(first.device) if type(first) is Tensor else None
        if all_home(data, device):  # what training loops store, all in all
            self._commit(data, device, encoders)
        else:
            staged, device, used = self._stage(data, consent=consent, at=at)
            self._commit(staged, device, {**used, **encoders} if encoders else used)

    def _commit(
        self, staged: Mapping[str, Any], device: torch.device | None, encoders: Mapping[str, StringEncoder] | None
    ) -> None:
        # Staging runs the code of others (encoders, `items` of a mapping, `__array__`), which may have written here.
        home = self._device
        if home is not device and home is not None and device is not None and home != device:
            keys = ", ".join(map(repr, staged))
            raise DeviceMismatchError(
                f"this {type(self).__name__} was written to while {keys} was being stored on {device}, and is on "
                f"{home} now; give device= when you make it",
                expected=home,
                actual=device,
            )
        if encoders:  # comparing them can raise, so before the first change
            policy = self._policy.with_encoders(encoders)
            raw.update(self, staged)
            self._policy = policy
        else:
            raw.update(self, staged)
        if device is not None:
            self._device = device

    def _stage(
        self, data: Mapping[str, Any], *, consent: bool = False, at: Path = ()
    ) -> tuple[Mapping[str, Any], torch.device | None, Mapping[str, StringEncoder]]:
        """What `_commit` takes: every key checked, every value converted, nothing of this dict changed."""
        device = self._device
        data = snapshot(data, TreeDict, at)
        tensors = tensors_in(data, at)
        if device is None and tensors:
            device = canonical(tensors[0].device)
        # Host values alone in a dict without a device go where torch would make them.
        home = canonical(torch.empty(0).device) if device is None else device
        moved: dict[int, Tensor] = {}
        if consent or self._policy.on_mismatch == "move":
            strangers = {id(tensor): tensor for tensor in tensors if tensor.device != home}
            moved = dict(zip(strangers, transfer(list(strangers.values()), home), strict=True))
        try:
            staged, encoders = self._convert(data, home, moved, at)
        except TypeError:
            refuse_optimizer(data, at)
            raise
        if device is None and any(isinstance(value, (Tensor, TreeDict)) for value in staged.values()):
            device = home
        return staged, device, encoders

    def _convert(
        self, data: Mapping[str, Any], home: torch.device, moved: Mapping[int, Tensor], at: Path
    ) -> tuple[dict[str, Any], dict[str, StringEncoder]]:
        """The stored form of every value, and the encoders that strings were encoded with."""
        policy = self._policy
        staged: dict[str, Any] = {}
        encoders: dict[str, StringEncoder] = {}
        for key, value in data.items():
            if not isinstance(cast(object, key), str):
                refuse_key(key, at)
            path = (*at, key)
            if isinstance(value, Tensor):
                staged[key] = placed(value, home, moved, path)
            elif isinstance(value, Mapping):
                staged[key] = self._nest(cast("Mapping[str, Any]", value), home, moved, path)
            else:
                stored, encoder = store(value, home, policy, path)
                if isinstance(stored, Tensor):
                    stored = stored if stored.device == home else transfer([stored], home)[0]
                elif encoder is not None:  # an encoder that gives several tensors
                    refuse_deeper(path)
                    codes = (self._declared(key) or type(self))._new((), home, policy)
                    codes._take(stored, consent=True, at=path)
                    stored = codes
                if encoder is not None:
                    encoders[key] = encoder
                staged[key] = stored
        return staged, encoders

    # What a class with declared fields has otherwise; see `TypedDeviceDict`.

    def _conform(
        self, items: Mapping[str, Any], before: Mapping[str, Any] | None, deep: bool = False, shapes: bool = True
    ) -> None:
        """Raise unless these items may be all there are, instead of those ``before``; ``deep``: in nested dicts too."""
        for key, value in items.items() if deep else ():
            if isinstance(value, CheckedDict):
                nested = cast("CheckedDict[Any]", value)
                nested._conform(nested, before.get(key) if isinstance(before, Mapping) else None, deep, shapes)

    @classmethod
    def _without_absences(cls, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """``data`` without the items that say that there is none."""
        return data

    @classmethod
    def _declared(cls, key: str) -> type[CheckedDict[Any]] | None:
        """The class of the nested dict at ``key``; None if it may be any."""
        return None

    @classmethod
    def _policy_of_copy(cls, policy: Policy, keys: Iterable[str]) -> Policy:
        """The policy of an instance made of a dict with ``policy`` and ``keys``: the class's options come first."""
        return cls._class_policy.with_encoders(policy.carried(keys)) if cls._has_policy() else policy

    @classmethod
    def _kind_nested(
        cls, key: str, kind: type[Any], given: Policy | None, keys: Iterable[str], policy: Policy
    ) -> tuple[type[CheckedDict[Any]], Policy]:
        """The class and policy of the dict at ``key`` of one with ``policy``, if made of an instance of ``kind``.

        ``given``: the policy of that instance, and None of a plain mapping; ``keys``: its keys.
        """
        asked: Any = cls._declared(key) or (CheckedDict if issubclass(kind, CheckedDict) else cls)
        of_its_class = issubclass(kind, asked)
        made = cast("type[CheckedDict[Any]]", kind if of_its_class else asked)
        policy = cls._policy_of(made, policy)
        if given is not None:
            own = of_its_class and made._has_policy()
            policy = given if own else policy.with_encoders(given.carried(keys))
        return made, policy

    def _nest(
        self, value: Mapping[str, Any], home: torch.device, moved: Mapping[int, Tensor], path: Path
    ) -> CheckedDict[Any]:
        """``value`` as a nested dict. A `DeviceDict` keeps its encoders, and a policy that its class has."""
        kind = type(cast(object, value))
        given = value._policy if isinstance(value, CheckedDict) else None
        cls, policy = self._kind_nested(path[-1], kind, given, value, self._policy)
        of_its_class = cls is kind
        nested: CheckedDict[Any] = cls._new((), home, policy)
        staged, encoders = nested._convert(value, home, moved, path)
        if of_its_class:  # not looked at again: a row of a typed batch is one, without a batch dimension
            CheckedDict._commit(nested, staged, home, encoders)
        else:
            try:
                nested._commit(staged, home, encoders)
            except (TypeError, ValueError) as error:
                raise located(error, path) from error
        return nested

    # --- paths ---

    def _holder(self, path: Path) -> CheckedDict[Any] | None:
        """The dict that holds what a path leads to; None if there is none."""
        node: CheckedDict[Any] = self
        for part in path[:-1]:
            inner = raw.get(node, part)
            if not isinstance(inner, CheckedDict):
                return None
            node = cast("CheckedDict[Any]", inner)
        return node if path and raw.__contains__(node, path[-1]) else None

    def _walk(self, key: object) -> tuple[CheckedDict[Any], Any]:
        """The dict that holds what a path leads to, and its last key; ``MissingKeyError`` if there is none."""
        node = self._holder(cast(Path, key)) if type(key) is tuple else None
        if node is None:
            raise missing_key(self, cast(object, key))
        return node, cast(Path, key)[-1]

    def _set_path(self, path: Path, value: Any, at: Path = ()) -> None:
        """Set in the deepest dict that is there; what is missing below it is made, as part of the value."""
        if not path:
            raise missing_key(self, path)
        if len(path) > 1:
            inner: Any = raw.get(self, path[0], _MISSING)
            if isinstance(inner, CheckedDict):
                cast("CheckedDict[Any]", inner)._set_path(path[1:], value, (*at, path[0]))
                return
            if inner is not _MISSING:
                raise TypeError(
                    f"{dotted((*at, path[0]))} is a {type(inner).__name__}, expected a nested dict to put "
                    f"{dotted((*at, *path))} into; delete or rename it first"
                )
            for part in reversed(path[1:]):
                value = {part: value}
        self._take({path[0]: value}, at=at)  # pyright: ignore[reportGeneralTypeIssues]  (it is not empty)
