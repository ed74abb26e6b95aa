"""Errors of a lookup that finds nothing: what is not there, in which dict, and what is near it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import NoneType
from typing import Any, cast

import torch
from torch import Tensor

from ._errors import Path, dotted

_LISTED = 10
"""Keys that a message lists."""


class MissingKeyError(KeyError):
    """A key or path that is not in a `DeviceDict` or a file. The message names the closest key.

    A ``KeyError`` whose ``args[0]`` is the key, as for a dict, and whose ``str`` is a sentence. It holds names only, no
    tensor and no dict.

    >>> from tensordict_lite import DeviceDict, MissingKeyError
    >>> d = DeviceDict({"image": 1.0})
    >>> try:
    ...     d["imgae"]
    ... except MissingKeyError as error:
    ...     print(error.args, error)
    ('imgae',) 'imgae' is not in this DeviceDict; did you mean 'image'?
    """

    # One positional argument, and nothing required beside it: DataLoader re-creates a worker's exception from its text.
    def __init__(
        self,
        key: Any = "",
        *,
        text: str = "",
        owner: str = "",
        path: Path = (),
        depth: int = 0,
        known: tuple[str, ...] = (),
        paths: tuple[Path, ...] = (),
    ) -> None:
        super().__init__(key)
        self._text = text
        self._facts = owner, path, depth, known, paths

    def __str__(self) -> str:
        if not self._text and self._facts[1]:
            self._text = _explained(*self._facts)
        return self._text or str(self.args[0])


def _explained(owner: str, path: Path, depth: int, known: tuple[str, ...], paths: tuple[Path, ...]) -> str:
    """That the key at ``depth`` of a path is not among the ``known`` ones, and which of the ``paths`` may be meant."""
    at, name = path[:depth], path[depth]
    text = f"{dotted(path)} is not in {owner}"
    if len(path) > 1:
        text += f": {dotted(at) if at else 'it'} has no {name!r}"
    if paths:
        return f"{text}; use the path d[{', '.join(map(repr, (*at, *paths[0], *path[depth + 1 :])))}]"
    close = closest(name, known)
    if close:
        return f"{text}; did you mean {close!r}?"
    if not known:
        return f"{text}; {dotted(at) if at else 'it'} is empty"
    more = f" and {len(known) - _LISTED} more" if len(known) > _LISTED else ""
    return f"{text}; its keys are {', '.join(map(repr, known[:_LISTED]))}{more}"


def missing_key(tree: Mapping[str, Any], key: object, owner: str = "") -> KeyError:
    """The error for a ``key``, or path, that is not in ``tree``, which messages call ``owner``.

    Cost: a look at the keys of one dict. The close keys are searched for when the message is read.
    """
    if torch.compiler.is_compiling():  # which cannot trace an exception with a constructor of its own
        return KeyError(key)
    owner = owner or f"this {type(tree).__name__}"
    path: tuple[Any, ...] = cast(Any, key) if isinstance(key, tuple) else (key,)
    if not path:
        return MissingKeyError(key, text="a path needs at least one key, got ()")
    node: Any = tree
    for depth, part in enumerate(path):
        at = path[:depth]
        if not isinstance(node, dict):  # as every mapping in a DeviceDict is
            return MissingKeyError(key, text=_blocked(path, depth, cast(object, node), owner))
        if not isinstance(part, str):
            return MissingKeyError(key, text=f"{no_key(part)}{f' in {dotted(at)}' if at else ''}{rows_hint(part)}")
        inside = cast("dict[str, Any]", node)
        if part not in inside:
            split = tuple(part.split("."))
            nested = ((name, part) for name, value in inside.items() if isinstance(value, dict) and part in value)
            paths = (split,) if len(split) > 1 and _holds(inside, split) else tuple(nested)
            return MissingKeyError(key, owner=owner, path=path, depth=depth, known=tuple(inside), paths=paths)
        node = inside[part]
    raise AssertionError(f"{path} is there")


def closest(name: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """The one of the ``known`` names that is most like ``name``; empty if none is."""
    return next(iter(get_close_matches(name, list(known), 1, likeness)), "")


def no_key(given: Any) -> str:
    """That something is no key; its type, and its value if that is short."""
    kind = cast("type[Any]", type(given))
    shown = f"{given!r} of type " if kind in (bool, int, float, slice, bytes, tuple, NoneType) else ""
    return f"keys are str, got {shown}{kind.__name__}"


def rows_hint(index: Any) -> str:
    """The way to rows, for what is an index of them."""
    if type(index) is slice:
        ends = ["" if end is None else str(end) for end in (index.start, index.stop, index.step)]
        return f"; rows are d.rows[{':'.join(ends if index.step is not None else ends[:2])}]"
    if isinstance(index, int) and not isinstance(index, bool):
        return f"; rows are d.rows[{index!r}]"
    return "; rows are d.rows[mask_or_indices]" if isinstance(index, Tensor) else ""


def _holds(tree: Any, path: Path) -> bool:
    for part in path:
        if not isinstance(tree, Mapping) or part not in tree:
            return False
        tree = cast("Mapping[str, Any]", tree)[part]
    return True


def _blocked(path: tuple[Any, ...], depth: int, value: object, owner: str) -> str:
    at, rest = path[:depth], path[depth:]
    what = "a tensor" if isinstance(value, Tensor) else f"a kept {type(value).__name__}"
    keys = ", ".join(map(repr, at))
    if isinstance(rest[0], str):
        return f"{dotted(path)} is not in {owner}: {dotted(at)} is {what}, not a nested dict; it is d[{keys}]"
    return f"a path is made of str, got {type(rest[0]).__name__}: {dotted(at)} is {what}; index it as d[{keys}][...]"


class NoAttribute:
    """A name that a tensor or a TensorDict has and a `DeviceDict` has not: an ``AttributeError`` that says what to use.

    A ``__getattr__`` would take every name, but makes each attribute take four times as long.
    """

    def __init__(self, instead: str) -> None:
        self._instead = instead

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}; use {self._instead}")
