"""Parse arguments: the keys of ragged fields."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def ragged_keys(given: Any, called: str) -> frozenset[Any]:
    """The validated argument ``ragged`` of the function ``called``. Raises ``TypeError``."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f'{called} takes a list of keys or paths as ragged=, as ["box"], got {given!r:.60}')
    keys = frozenset(given)
    for key in keys:
        if not isinstance(key, (str, tuple)):
            raise TypeError(f"ragged= of {called} takes keys and paths, got {key!r:.60}")
    return keys
