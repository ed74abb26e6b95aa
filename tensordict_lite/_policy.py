"""What a dict does with values that are not tensors of its device: one immutable value, shared by a whole tree."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn, cast

import torch

from ._encoders import Utf8
from ._missing import closest
from ._strings import StringEncoder, as_encoder

Encoders = Mapping[str, Any] | StringEncoder | Any
"""What ``encoders=`` takes: key to encoder or callable, or one encoder or callable for every key."""
OnMismatch = Literal["error", "move"]
Objects = Literal["error", "keep"]
OPTIONS = ("device", "encoders", "on_mismatch", "objects", "dtype")
"""The keywords of the constructor; all but the first are options of a class too."""


def refuse_option(cls: str, name: str, declared: bool = False) -> NoReturn:
    """Raise ``TypeError`` for a keyword that is no option: of the constructor, or where a class is ``declared``."""
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
    """The options of a `DeviceDict`. Never mutated: a change makes another policy."""

    encoders: Mapping[str, StringEncoder] = field(default_factory=dict[str, StringEncoder])
    default_encoder: StringEncoder = field(default_factory=Utf8)
    on_mismatch: OnMismatch = "error"
    objects: Objects = "error"
    dtype: torch.dtype | None = None

    def override(
        self,
        encoders: Encoders | None = None,
        on_mismatch: OnMismatch | None = None,
        objects: Objects | None = None,
        dtype: torch.dtype | None = None,
    ) -> Policy:
        """This policy with the options that are not None checked and put in place; encoders are merged by key."""
        changes: dict[str, Any] = {}
        if encoders is not None:
            if isinstance(encoders, Mapping):
                given = cast("Mapping[object, object]", encoders)
                for key in given:
                    if not isinstance(key, str):
                        raise TypeError(
                            f"encoders= maps keys, which are str, to encoders; got the key {key!r}. "
                            "A key's encoder serves that key in nested dicts too"
                        )
                changes["encoders"] = {**self.encoders, **{k: as_encoder(e) for k, e in given.items()}}
            else:
                changes["default_encoder"] = as_encoder(encoders)
        for option, value, allowed in (
            ("on_mismatch", on_mismatch, ("error", "move")),
            ("objects", objects, ("error", "keep")),
        ):
            if value is not None:
                if value not in allowed:
                    raise ValueError(f"{option} is {' or '.join(map(repr, allowed))}, got {value!r}")
                changes[option] = value
        if dtype is not None:
            if not isinstance(cast(object, dtype), torch.dtype) or not dtype.is_floating_point:
                raise TypeError(
                    f"dtype is a floating-point torch.dtype, for host values with such content; got {dtype!r}"
                )
            changes["dtype"] = dtype
        return replace(self, **changes)

    def with_encoders(self, encoders: Mapping[str, StringEncoder]) -> Policy:
        """This policy with the encoders of some keys set; itself if they are already so."""
        if all(self.encoders.get(key) == encoder for key, encoder in encoders.items()):
            return self
        return replace(self, encoders={**self.encoders, **encoders})

    def carried(self, keys: Iterable[str]) -> Mapping[str, StringEncoder]:
        """The encoders that go along with the values of ``keys``: those by key, and the one for every key, if given."""
        if self.default_encoder == Utf8():
            return self.encoders
        return {**dict.fromkeys(keys, self.default_encoder), **self.encoders}

    def with_default_of(self, other: Policy, keys: Iterable[str]) -> Policy:
        """This policy, with the default encoder of another one, if given, for those of ``keys`` that it has none for.

        Cost: the keys, however many encoders there are.
        """
        if other.default_encoder == Utf8():
            return self
        added = {key: other.default_encoder for key in keys if key not in other.encoders}
        return replace(self, encoders=ChainMap(added, cast("dict[str, StringEncoder]", self.encoders)))

    def encoder(self, key: str) -> StringEncoder:
        """The encoder of ``key``."""
        return self.encoders.get(key, self.default_encoder)

    def to_state(self) -> dict[str, Any]:
        """Plain data and encoders, for pickle, which then writes an encoder once however many dicts share it."""
        return {
            "encoders": dict(self.encoders),
            "default_encoder": self.default_encoder,
            "on_mismatch": self.on_mismatch,
            "objects": self.objects,
            "dtype": self.dtype,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Policy:
        """The policy of `to_state`, every option checked again."""
        policy = cls(default_encoder=as_encoder(state["default_encoder"]))
        return policy.override(state["encoders"], state["on_mismatch"], state["objects"], state["dtype"])
