"""Register classes as pytree nodes. DDP, vmap, export and tree_map use PyTorch's pytree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree  # the supported versions of torch have no public name for this module

from .policy import Policy


@dataclass(slots=True, eq=False)
class Carried:
    """The device and the policy of a dict. They travel in the context of a node, but do not count in comparisons.

    So one tree_map can take dicts on two devices. To unflatten a dict without tensors, pytree needs the device. The
    policy holds the encoders and options.
    """

    device: torch.device | None
    policy: Policy

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, Carried)

    def __hash__(self) -> int:
        return hash(None)


Context = tuple[tuple[str, ...], Carried | None]
"""The keys of a dict, and what it carries. A plain tuple: torch.compile and export take no object as a context."""


def register(cls: type[Any], flatten: Callable[[Any], Context], unflatten: Callable[..., Any]) -> None:
    """Register ``cls`` as a pytree node. Each subclass needs its own call, since pytree looks up the exact type.

    ``flatten`` returns the context of an instance. ``unflatten(cls, items, carried)`` builds an instance from pairs of
    key and value. It must not validate the values: torch inserts None, ints, specs and vmap's batched tensors.
    """

    def flat(d: Any) -> tuple[list[Any], Context]:
        return list(d.values()), flatten(d)

    def flat_with_keys(d: Any) -> tuple[list[tuple[Any, Any]], Context]:
        return [(pytree.MappingKey(key), value) for key, value in d.items()], flatten(d)

    def unflat(leaves: Iterable[Any], context: Context) -> Any:
        keys, carried = context
        return unflatten(cls, zip(keys, leaves, strict=True), carried)

    pytree.register_pytree_node(
        cls,
        flat,
        unflat,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        to_dumpable_context=_dump,
        from_dumpable_context=_load,
        flatten_with_keys_fn=flat_with_keys,  # pyright: ignore[reportArgumentType]  (its stub wants one key type)
    )


def register_fields(cls: type[Any], names: Sequence[str], unflatten: Callable[..., Any]) -> None:
    """Register a class of values as a pytree node with some of its attributes. ``unflatten`` must not validate them."""

    def flat(value: Any) -> tuple[list[Any], None]:
        return [getattr(value, name) for name in names], None

    def flat_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], None]:
        return [(pytree.GetAttrKey(name), getattr(value, name)) for name in names], None

    pytree.register_pytree_node(
        cls,
        flat,
        lambda leaves, _: unflatten(*leaves),
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=flat_with_keys,  # pyright: ignore[reportArgumentType]  (its stub wants one key type)
    )


def _dump(context: Context) -> Any:
    # An exported program keeps the structure only. Device and encoders belong to the data, not to the program.
    return list(context[0])


def _load(data: Any) -> Context:
    return tuple(data), None
