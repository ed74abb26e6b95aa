"""Errors for missing keys. Each message names the missing key, the dict and the closest key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import NoneType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from .._errors import Path, described, dotted

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

    # What `_missing` sets. DataLoader re-creates the exception of a worker from its text alone.
    _text = ""
    _name = ""
    _known: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = self._text or ", ".join(map(str, self.args))
        if not self._known:
            return text
        close = closest(self._name, self._known)
        if close:
            return f"{text}; did you mean {close!r}?"
        more = f" and {len(self._known) - _LISTED} more" if len(self._known) > _LISTED else ""
        return f"{text}; its keys are {', '.join(map(repr, self._known[:_LISTED]))}{more}"


def _missing(key: object, text: str, name: str = "", known: tuple[str, ...] = ()) -> MissingKeyError:
    """The error with a text. The key of ``known`` that is most similar to ``name`` is searched when it is read."""
    error = MissingKeyError(key)
    error._text, error._name, error._known = text, name, known
    return error


def missing_key(tree: Mapping[str, Any], key: object, owner: str = "") -> KeyError:
    """The error for a ``key`` or path that is not in ``tree``. The message calls the tree ``owner``.

    Cost: one pass over the keys of one dict. The search for similar keys runs only when the message is read.
    """
    # torch.compile cannot trace an exception class of Python code.
    if torch.compiler.is_compiling():  # pragma: no cover  (traced, not executed)
        return KeyError(key)
    owner = owner or f"this {type(tree).__name__}"
    path: tuple[Any, ...] = key if isinstance(key, tuple) else (key,)
    if not path:
        return _missing(key, "a path needs at least one key, got ()")
    node: Any = tree
    for depth, part in enumerate(path):
        at = path[:depth]
        if not _nests(node, tree):
            return _missing(key, _blocked(path, depth, node, owner))
        if not isinstance(part, str):
            return _missing(key, f"{no_key(part)}{f' in {dotted(at)}' if at else ''}{rows_hint(part)}")
        if part not in node:
            where = dotted(at) if at else "it"
            text = f"{dotted(path)} is not in {owner}{f': {where} has no {part!r}' if len(path) > 1 else ''}"
            split = tuple(part.split("."))
            nested = [(name, part) for name, value in node.items() if _nests(value, tree) and part in value]
            paths = [split] if len(split) > 1 and holds(node, split) else nested
            if paths:
                way = ", ".join(map(repr, (*at, *paths[0], *path[depth + 1 :])))
                return _missing(key, f"{text}; use the path d[{way}]")
            return _missing(key, text if node else f"{text}; {where} is empty", part, tuple(node))
        node = node[part]
    raise AssertionError(f"{path} is there")  # pragma: no cover  (the caller did not find the path)


def refuse_other_keys(
    expected: Mapping[str, Any], given: Mapping[Any, Any], at: Path, name: str, owner: str, hint: str = ""
) -> None:
    """Raise ``ValueError`` if ``given`` does not have exactly the keys of ``expected``.

    ``at``: the path of both. ``name``, ``owner``: the names of ``given`` and ``expected`` in the message. ``hint``: its
    end.
    """
    missing = [key for key in expected if key not in given]
    extra = [key for key in given if key not in expected]
    if missing:
        beside = f", and has {dotted((*at, extra[0]))}" if extra else ""
        raise ValueError(f"{name} lacks {dotted((*at, missing[0]))}, which {owner} has{beside}{hint}")
    if extra:
        raise ValueError(f"{name} has {dotted((*at, extra[0]))}, which {owner} lacks{hint}")


def refuse_unknown_encoders(encoders: Any, tree: Mapping[str, Any], owner: str) -> None:
    """Raise ``KeyError`` for a key of ``encoders`` that ``tree`` has at no depth. The message calls it ``owner``."""
    if isinstance(encoders, Mapping):
        known = keys_in(tree)
        for key in cast("Mapping[Any, Any]", encoders):
            if key not in known:
                raise missing_key(tree, key, owner)


def keys_in(tree: Mapping[str, Any]) -> set[str]:
    """The keys of a tree at every depth."""
    nested = [keys_in(value) for value in tree.values() if isinstance(value, Mapping)]
    return set(tree).union(*nested)


def closest(name: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """The name in ``known`` that is most similar to ``name``; empty if no name is similar."""
    return next(iter(get_close_matches(name, list(known), 1, likeness)), "")


def no_key(given: Any) -> str:
    """The message for an object that is not a key. It shows the type, and the value if its repr is short."""
    kind = type(given)
    shown = f"{given!r} of type " if kind in (bool, int, float, slice, bytes, tuple, NoneType) else ""
    return f"keys are str, got {shown}{kind.__name__}"


def rows_hint(index: Any) -> str:
    """The hint to use ``d.rows`` if ``index`` can index rows, or ``select`` if it is a list of keys; else empty."""
    if type(index) is slice:
        ends = ["" if end is None else str(end) for end in (index.start, index.stop, index.step)]
        return f"; rows are d.rows[{':'.join(ends if index.step is not None else ends[:2])}]"
    if isinstance(index, int) and not isinstance(index, bool):
        return f"; rows are d.rows[{index!r}]"
    if isinstance(index, list) and index and all(isinstance(key, str) for key in index):
        return f"; several keys are d.select({', '.join(map(repr, index))})"
    return "; rows are d.rows[mask_or_indices]" if isinstance(index, (Tensor, np.ndarray, list)) else ""


def holds(tree: Any, path: Path) -> bool:
    """Whether the path exists in ``tree``."""
    for part in path:
        if not isinstance(tree, Mapping) or part not in tree:
            return False
        tree = tree[part]
    return True


def _nests(value: object, tree: Mapping[str, Any]) -> bool:
    """Whether a value in ``tree`` is a nested dict: a `DeviceDict` in a `DeviceDict`, where other dicts are kept."""
    return isinstance(value, dict) and hasattr(value, "_holds_tensors") == hasattr(tree, "_holds_tensors")


def _blocked(path: tuple[Any, ...], depth: int, value: object, owner: str) -> str:
    """The message for a path that continues below ``value``, which is not a dict."""
    at, rest = path[:depth], path[depth:]
    what = "a tensor" if isinstance(value, Tensor) else described(value)
    what = f"a kept {type(value).__name__}" if isinstance(value, Mapping) else what
    keys = ", ".join(map(repr, at))
    if isinstance(rest[0], str):
        part = f".{rest[0]}" if hasattr(value, rest[0]) else ""  # such as the values of a ragged field
        return f"{dotted(path)} is not in {owner}: {dotted(at)} is {what}, not a nested dict; it is d[{keys}]{part}"
    return f"a path is made of str, got {type(rest[0]).__name__}: {dotted(at)} is {what}; index it as d[{keys}][...]"
