"""Register classes as pytree nodes. DDP, vmap, export and tree_map use PyTorch's pytree."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree  # the supported versions of torch have no public name for this module

from .policy import Policy


@dataclass(slots=True, unsafe_hash=True)
class Context:
    """The keys, device and policy of a dict: everything except its values.

    Two contexts are equal if their keys are equal, so one tree_map can take dicts on two devices. To unflatten a dict
    without tensors, pytree needs the device. The policy holds the encoders and options.
    """

    keys: tuple[str, ...]
    device: torch.device | None = field(default=None, compare=False)
    policy: Policy | None = field(default=None, compare=False)


def register(cls: type[Any], flatten: Callable[[Any], Context], unflatten: Callable[..., Any]) -> None:
    """Register ``cls`` as a pytree node. Each subclass needs its own call, since pytree looks up the exact type.

    ``flatten`` returns the context of an instance. ``unflatten(cls, items, context)`` builds an instance from pairs of
    key and value. It must not validate the values: torch inserts None, ints, specs and vmap's batched tensors.
    """

    def flat(d: Any) -> tuple[list[Any], Context]:
        return list(d.values()), flatten(d)

    def flat_with_keys(d: Any) -> tuple[list[tuple[Any, Any]], Context]:
        return [(pytree.MappingKey(key), value) for key, value in d.items()], flatten(d)

    def unflat(leaves: Iterable[Any], context: Context) -> Any:
        return unflatten(cls, zip(context.keys, leaves, strict=True), context)

    pytree.register_pytree_node(
        cls,
        flat,
        unflat,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        to_dumpable_context=_dump,
        from_dumpable_context=_load,
        flatten_with_keys_fn=flat_with_keys,  # pyright: ignore[reportArgumentType]  (its stub wants one key type)
    )


def _dump(context: Context) -> Any:
    # An exported program keeps the structure only. Encoders belong to the data, not to the program.
    return {"keys": list(context.keys), "device": None if context.device is None else str(context.device)}


def _load(data: Any) -> Context:
    device = data["device"]
    return Context(tuple(data["keys"]), None if device is None else torch.device(device))
