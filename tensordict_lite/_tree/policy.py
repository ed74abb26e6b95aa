"""The options of a dict: how it converts values that are not tensors on its device. Immutable, shared by a tree."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, NoReturn, TypedDict, cast

import torch

from .._encoders.builtin import Utf8
from .._encoders.protocol import StringEncoder, as_encoder
from .._errors import dtype_name
from .._memory.buffer import DTYPES
from .missing import closest

Encoders = Mapping[str, Any] | StringEncoder | Any
"""The type of ``encoders=``: a mapping from key to encoder or callable, or one encoder or callable for every key."""
OnMismatch = Literal["error", "move"]
Objects = Literal["error", "keep"]


class Options(TypedDict, total=False):
    """The options of an instance or of a class. An option that is None counts as not given."""

    encoders: Encoders | None
    on_mismatch: OnMismatch | None
    objects: Objects | None
    dtype: torch.dtype | None


OPTIONS = ("device", *Options.__annotations__)
"""The keywords of the constructor. A class takes the same options, except ``device``."""


class _Setting(NamedTuple):
    """The functions that validate an option, convert it to JSON and read it back. They raise for an invalid value."""

    check: Callable[[Any], Any]
    to_json: Callable[[Any], Any]
    from_json: Callable[[Any], Any]


def _choice(name: str, *allowed: str) -> _Setting:
    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(f"{name} is {' or '.join(map(repr, allowed))}, got {value!r}")
        return value

    return _Setting(check, str, check)


def _floating(value: Any) -> torch.dtype:
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise TypeError(f"dtype must be a floating-point torch.dtype (for floating-point host values), got {value!r}")
    return value


def _dtype_from_json(name: Any) -> torch.dtype | None:
    if name is not None and (type(name) is not str or name not in _FLOATING_DTYPES):
        raise ValueError(f"{repr(name)[:60]} is not a floating-point dtype")
    return None if name is None else _FLOATING_DTYPES[name]


def _dtype_to_json(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else dtype_name(dtype)


_FLOATING_DTYPES = {name: dtype for name, dtype in DTYPES.items() if dtype.is_floating_point}
SETTINGS = {
    "on_mismatch": _choice("on_mismatch", "error", "move"),
    "objects": _choice("objects", "error", "keep"),
    "dtype": _Setting(_floating, _dtype_to_json, _dtype_from_json),
}
"""Every option except ``encoders``. To add an option, add a line here, in `Options` and in `Policy`."""


def refuse_option(cls: str, name: str, declared: bool = False) -> NoReturn:
    """Raise ``TypeError`` for a keyword that is not an option.

    ``declared``: the keyword is in a class statement, not in a call of the constructor.
    """
    options = OPTIONS[1:] if declared else OPTIONS
    close = closest(name, options)
    guess = f", did you mean {close!r}?" if close else ";"
    field = "" if declared else f'; a field goes into a mapping: {cls}({{"{name}": ...}})'
    raise TypeError(
        f"{f'class {cls}' if declared else f'{cls}()'} has no option {name!r}{guess} "
        f"its options are {', '.join(options)}{field}"
    )


@dataclass(frozen=True, slots=True)
class Policy:
    """The options of a `DeviceDict`. Immutable: each method that changes an option returns a new policy."""

    encoders: Mapping[str, StringEncoder] = field(default_factory=dict[str, StringEncoder])
    default_encoder: StringEncoder = field(default_factory=Utf8)
    on_mismatch: OnMismatch = "error"
    objects: Objects = "error"
    dtype: torch.dtype | None = None

    def override(self, encoders: Encoders | None = None, **settings: Any) -> Policy:
        """Validate and set the given options. None counts as not given. Encoders are merged by key."""
        changes: dict[str, Any] = {
            name: SETTINGS[name].check(value) for name, value in settings.items() if value is not None
        }
        if isinstance(encoders, Mapping):
            given = encoders
            for key in given:
                if not isinstance(key, str):
                    raise TypeError(
                        f"encoders= maps keys, which are str, to encoders; got the key {key!r}. "
                        "A key's encoder serves that key in nested dicts too"
                    )
            changes["encoders"] = {**self.encoders, **{k: as_encoder(e) for k, e in given.items()}}
        elif encoders is not None:
            changes["default_encoder"] = as_encoder(encoders)
        return replace(self, **changes) if changes else self

    def with_encoders(self, encoders: Mapping[str, StringEncoder]) -> Policy:
        """A policy with these encoders set. Returns this policy if the encoders are already set."""
        if all(self.encoders.get(key) == encoder for key, encoder in encoders.items()):
            return self
        # `dataclasses.replace` takes 3x the time of this call.
        merged = {**self.encoders, **encoders}
        return Policy(merged, self.default_encoder, self.on_mismatch, self.objects, self.dtype)

    def carried(self, keys: Iterable[str]) -> Mapping[str, StringEncoder]:
        """The encoders to copy with the values of ``keys``, including a default encoder other than ``Utf8()``."""
        if self.default_encoder == Utf8():
            return self.encoders
        return {**dict.fromkeys(keys, self.default_encoder), **self.encoders}

    def with_default_of(self, other: Policy, keys: Iterable[str]) -> Policy:
        """Set the default encoder of ``other`` for each of ``keys`` that has no encoder in ``other``.

        Returns this policy if the default encoder of ``other`` is ``Utf8()``. Cost: O(keys), not O(encoders).
        """
        if other.default_encoder == Utf8():
            return self
        added = {key: other.default_encoder for key in keys if key not in other.encoders}
        return replace(self, encoders=ChainMap(added, cast("dict[str, StringEncoder]", self.encoders)))

    def encoder(self, key: str) -> StringEncoder:
        """The encoder of ``key``."""
        return self.encoders.get(key, self.default_encoder)

    def settings(self) -> dict[str, Any]:
        """Every option except the encoders, by name."""
        return {name: getattr(self, name) for name in SETTINGS}

    def to_state(self) -> dict[str, Any]:
        """The state for pickle: plain data and encoders. Pickle writes an encoder once if several dicts share it."""
        return {"encoders": dict(self.encoders), "default_encoder": self.default_encoder, **self.settings()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Policy:
        """The policy from a `to_state` result. Validates every option again."""
        policy = cls(default_encoder=as_encoder(state["default_encoder"]))
        return policy.override(state["encoders"], **{name: state[name] for name in SETTINGS})

    def settings_to_json(self) -> dict[str, Any]:
        """The `settings` as JSON values."""
        return {name: SETTINGS[name].to_json(value) for name, value in self.settings().items()}


def settings_from_json(data: Mapping[str, Any]) -> dict[str, Any]:
    """`Policy.settings` from JSON values. Raises ``ValueError`` for an invalid value."""
    return {name: setting.from_json(data[name]) for name, setting in SETTINGS.items()}
