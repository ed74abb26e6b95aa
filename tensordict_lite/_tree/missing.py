"""Errors for missing keys and attributes. Each message names the missing key, the dict and the closest key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from .._errors import Path, dotted

_LISTED = 10
"""The largest number of keys in a message."""


class MissingKeyError(KeyError):
    """A key or path that is not in a `DeviceDict` or a file. The message names the closest key.

    A ``KeyError``: ``args[0]`` is the key, as for a dict, and ``str(error)`` is a sentence. The exception holds names
    only. It keeps no tensor and no dict alive.

    >>> from tensordict_lite import DeviceDict, MissingKeyError
    >>> d = DeviceDict({"image": 1.0})
    >>> try:
    ...     d["imgae"]
    ... except MissingKeyError as error:
    ...     print(error.args, error)
    ('imgae',) 'imgae' is not in this DeviceDict; did you mean 'image'?
    """

    # Every argument is optional: DataLoader re-creates the exception of a worker from its text alone.
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
    """The message for a path whose key at ``depth`` is missing.

    ``known``: the keys of the dict at that depth. ``paths``: paths that the user may mean.
    """
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
    """The error for a ``key`` or path that is not in ``tree``. The message calls the tree ``owner``.

    Cost: one pass over the keys of one dict. The search for similar keys runs only when the message is read.
    """
    # torch.compile cannot trace an exception class with its own constructor.
    if torch.compiler.is_compiling():  # pragma: no cover  (traced, not executed)
        return KeyError(key)
    owner = owner or f"this {type(tree).__name__}"
    path: tuple[Any, ...] = key if isinstance(key, tuple) else (key,)
    if not path:
        return MissingKeyError(key, text="a path needs at least one key, got ()")
    node: Any = tree
    for depth, part in enumerate(path):
        at = path[:depth]
        if not isinstance(node, dict):  # every mapping in a DeviceDict is a dict
            return MissingKeyError(key, text=_blocked(path, depth, node, owner))
        if not isinstance(part, str):
            return MissingKeyError(key, text=f"{no_key(part)}{f' in {dotted(at)}' if at else ''}{rows_hint(part)}")
        inside = node
        if part not in inside:
            split = tuple(part.split("."))
            nested = ((name, part) for name, value in inside.items() if isinstance(value, dict) and part in value)
            paths = (split,) if len(split) > 1 and _holds(inside, split) else tuple(nested)
            return MissingKeyError(key, owner=owner, path=path, depth=depth, known=tuple(inside), paths=paths)
        node = inside[part]
    raise AssertionError(f"{path} is there")  # pragma: no cover  (the caller did not find the path)


def closest(name: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """The name in ``known`` that is most similar to ``name``; empty if no name is similar."""
    return next(iter(get_close_matches(name, list(known), 1, likeness)), "")


def no_key(given: Any) -> str:
    """The message for an object that is not a key. It shows the type, and the value if its repr is short."""
    kind = type(given)
    shown = f"{given!r} of type " if kind in (bool, int, float, slice, bytes, tuple, NoneType) else ""
    return f"keys are str, got {shown}{kind.__name__}"


def rows_hint(index: Any) -> str:
    """The hint to use ``d.rows`` if ``index`` can index rows; else empty."""
    if type(index) is slice:
        ends = ["" if end is None else str(end) for end in (index.start, index.stop, index.step)]
        return f"; rows are d.rows[{':'.join(ends if index.step is not None else ends[:2])}]"
    if isinstance(index, int) and not isinstance(index, bool):
        return f"; rows are d.rows[{index!r}]"
    return "; rows are d.rows[mask_or_indices]" if isinstance(index, Tensor) else ""


def _holds(tree: Any, path: Path) -> bool:
    """Whether the path exists in ``tree``."""
    for part in path:
        if not isinstance(tree, Mapping) or part not in tree:
            return False
        tree = tree[part]
    return True


def _blocked(path: tuple[Any, ...], depth: int, value: object, owner: str) -> str:
    """The message for a path that continues below ``value``, which is not a dict."""
    at, rest = path[:depth], path[depth:]
    what = "a tensor" if isinstance(value, Tensor) else f"a kept {type(value).__name__}"
    keys = ", ".join(map(repr, at))
    if isinstance(rest[0], str):
        return f"{dotted(path)} is not in {owner}: {dotted(at)} is {what}, not a nested dict; it is d[{keys}]"
    return f"a path is made of str, got {type(rest[0]).__name__}: {dotted(at)} is {what}; index it as d[{keys}][...]"


class NoAttribute:
    """Descriptor for a name that tensors or TensorDicts have, but `DeviceDict` does not.

    Access raises an ``AttributeError`` that names the replacement. A ``__getattr__`` could handle every name, but it
    makes each attribute access 4x slower.
    """

    def __init__(self, instead: str) -> None:
        self._instead = instead

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}; use {self._instead}")
