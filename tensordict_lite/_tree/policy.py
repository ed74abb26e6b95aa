"""The options of a dict: how it converts values that are not tensors on its device. Immutable, shared by a tree."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypedDict

import torch

from .._encoders.builtin import Utf8
from .._encoders.protocol import StringEncoder, agree, as_encoder
from .._errors import dtype_name
from .._memory.dtypes import DTYPES
from .missing import closest

Encoders = Mapping[str, Any] | StringEncoder | Any
"""The type of ``encoders=``: a mapping from key to encoder or callable, or one encoder or callable for every key."""
OnMismatch = Literal["error", "move"]
Objects = Literal["error", "keep"]


class Options(TypedDict, total=False):
    """The options of an instance or of a class, for type checkers. An option that is None counts as not given."""

    encoders: Encoders | None
    on_mismatch: OnMismatch | None
    objects: Objects | None
    dtype: torch.dtype | None


if TYPE_CHECKING:  # pragma: no cover

    @dataclass(kw_only=True, eq=False)
    class OptionFields:
        """The same options for classes whose constructor type checkers derive from fields. No instance has them."""

        on_mismatch: InitVar[OnMismatch | None] = None
        objects: InitVar[Objects | None] = None
        dtype: InitVar[torch.dtype | None] = None

else:
    OptionFields = object


def _choice(name: str, *allowed: str) -> dict[str, Callable[[Any], Any]]:
    """The metadata of an option with a few values. Each function raises an error for an invalid value."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(f"{name} is {' or '.join(map(repr, allowed))}, got {value!r}")
        return value

    return {"check": check, "from_json": check}


def _floating(value: Any) -> torch.dtype:
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise TypeError(f"dtype must be a floating-point torch.dtype (for floating-point host values), got {value!r}")
    return value


def _floating_from_json(name: Any) -> torch.dtype:
    dtype = DTYPES.get(name) if type(name) is str else None
    if dtype is None or not dtype.is_floating_point:
        raise ValueError(f"{repr(name)[:60]} is not a floating-point dtype")
    return dtype


@dataclass(frozen=True, slots=True)
class Policy:
    """The options of a `DeviceDict`. Immutable: each method that changes an option returns a new policy."""

    encoders: Mapping[str, StringEncoder] = field(default_factory=dict[str, StringEncoder])
    default_encoder: StringEncoder = field(default_factory=Utf8)
    on_mismatch: OnMismatch = field(default="error", metadata=_choice("on_mismatch", "error", "move"))
    objects: Objects = field(default="error", metadata=_choice("objects", "error", "keep"))
    dtype: torch.dtype | None = field(default=None, metadata={"check": _floating, "from_json": _floating_from_json})

    def override(self, encoders: Encoders | None = None, **options: Any) -> Policy:
        """Validate and set the given options. None counts as not given. Encoders are merged by key."""
        changes = {name: _OPTIONS[name]["check"](value) for name, value in options.items() if value is not None}
        if isinstance(encoders, Mapping):
            for key in encoders:
                if not isinstance(key, str):
                    raise TypeError(
                        f"encoders= maps keys, which are str, to encoders; got the key {key!r}; "
                        "a key's encoder serves that key in nested dicts too"
                    )
            changes["encoders"] = {**self.encoders, **{k: as_encoder(e) for k, e in encoders.items()}}
        elif encoders is not None:
            changes["default_encoder"] = as_encoder(encoders)
        return replace(self, **changes) if changes else self

    def override_of_copy(self, keys: Iterable[str], encoders: Encoders | None = None, **options: Any) -> Policy:
        """`override` for a copy of a dict with these keys. Values that are encoded keep their encoder.

        Raises ``ValueError`` if ``encoders`` has another encoder for such a key: it would decode other strings.
        """
        if encoders is None:
            return self.override(**options)
        own = self.carried(keys)
        out = self.with_encoders(own).override(encoders, **options)
        for key in keys:
            if key in own:
                agree(out.encoders[key], own[key], (key,))
        return out

    def with_encoders(self, encoders: Mapping[str, StringEncoder]) -> Policy:
        """A policy with these encoders set. Returns this policy if the encoders are already set."""
        known = self.encoders
        for key, encoder in encoders.items():
            if known.get(key) != encoder:
                return Policy({**known, **encoders}, *[getattr(self, name) for name in _OTHERS])
        return self

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
        known: Any = self.encoders
        return replace(self, encoders=ChainMap(added, known))

    def encoder(self, key: str) -> StringEncoder:
        """The encoder of ``key``."""
        return self.encoders.get(key, self.default_encoder)

    def options_to_json(self) -> dict[str, Any]:
        """The options except the encoders, as JSON values. An option with its default value is left out."""
        values = {name: getattr(self, name) for name in _OPTIONS}
        return {name: dtype_name(value) for name, value in values.items() if value != getattr(_DEFAULTS, name)}


_DEFAULTS = Policy()
_OTHERS = [one.name for one in fields(Policy)[1:]]  # read in a loop, because torch.compile cannot trace `attrgetter`
_OPTIONS = {one.name: one.metadata for one in fields(Policy) if one.metadata}
OPTIONS = ("device", "encoders", *_OPTIONS)
"""The keywords of the constructor. A class takes the same options, except ``device``."""


def options_from_json(data: Mapping[str, Any]) -> dict[str, Any]:
    """The options from `Policy.options_to_json`. An option that is absent has its default value.

    Raises ``ValueError`` for an invalid value and for an unknown option.
    """
    for name in data:
        if name not in _OPTIONS:
            raise ValueError(f"the option {repr(name)[:60]} is unknown; it may need a newer version of this package")
    return {name: _OPTIONS[name]["from_json"](value) for name, value in data.items() if value is not None}


def refuse_positional(cls: str, given: Sequence[object]) -> NoReturn:
    """Raise ``TypeError`` for positional arguments after the data."""
    shown = repr(given[0]) if isinstance(given[0], (int, str)) else "..."
    raise TypeError(f"{cls}() takes one positional argument, the data; name the options: device={shown}")


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
