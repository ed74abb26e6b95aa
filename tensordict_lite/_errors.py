"""The exceptions, and how a place in a nested dict is named in a message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Path = tuple[str, ...]
DEPTH = 64
"""Levels of nesting, the outermost dict included. Walks recurse, those of pickle, ``deepcopy`` and pytree too, and so
must be able to trust that there is an end, long before Python's limit of 1,000 calls."""


def dotted(path: Path) -> str:
    """``('obs', 'image')`` as it stands in every message: ``'obs.image'``, quotes included."""
    return repr(".".join(map(str, path)))  # what is refused may be no str


def dtype_name(dtype: torch.dtype) -> str:
    """``float32``, as it stands in messages, trees and files."""
    return str(dtype).removeprefix("torch.")


class TooDeep(ValueError):
    """What is nested deeper than `DEPTH`."""


def refuse_deeper(path: Path) -> None:
    """Raise ``TooDeep`` if a dict at ``path`` is nested too deep."""
    if len(path) < DEPTH:
        return
    keys = [*map(str, path[:3]), "…", str(path[-1])]
    raise TooDeep(f"{dotted(tuple(keys))} is nested more than {DEPTH} levels deep, or holds itself; flatten it first")


def described(value: Any) -> str:
    """What a value is: ``float32[2, 3]``, a device that is not the CPU, or the name of its type."""
    if isinstance(value, Tensor):
        where = "" if value.is_cpu else f" on {value.device}"
        shape = "jagged" if value.is_nested else ", ".join(map(str, value.shape))
        return f"{dtype_name(value.dtype)}[{shape}]{where}"
    return "a mapping" if isinstance(value, Mapping) else f"a {type(value).__name__}"


def with_path(error: Exception, path: Path, hint: str = "") -> TypeError | ValueError:
    """``error``, of a part that does not know where it is, as the one to raise: with ``path`` in front."""
    kind = TypeError if isinstance(error, TypeError) else ValueError
    return kind(f"{dotted(path)}: {error}{hint}")


class DeviceMismatchError(RuntimeError):
    """A tensor was put into a `DeviceDict` that lives on another device; the dict is unchanged.

    A ``RuntimeError``, as torch raises for mixed devices, so that existing handlers keep working.

    Attributes:
        key: where the tensor was going: the key, or the path as a tuple if that lies in a nested dict.
        expected: the device of the dict.
        actual: the device of the tensor.

    >>> import torch
    >>> from tensordict_lite import DeviceDict, DeviceMismatchError
    >>> d = DeviceDict({"x": torch.zeros(2)})
    >>> try:
    ...     d["y"] = torch.zeros(2, device="meta")
    ... except DeviceMismatchError as error:
    ...     print(error.key, error.expected, error.actual)
    y cpu meta
    """

    key: str | Path | None
    expected: torch.device | None
    actual: torch.device | None

    # One positional message and nothing required beside it: DataLoader re-creates a worker's exception so.
    def __init__(
        self,
        message: str = "",
        *,
        key: str | Path | None = None,
        expected: torch.device | None = None,
        actual: torch.device | None = None,
    ) -> None:
        super().__init__(message)
        self.key = key
        self.expected = expected
        self.actual = actual

    @classmethod
    def at(cls, path: Path, expected: torch.device, actual: torch.device) -> DeviceMismatchError:
        """The error for a tensor on ``actual`` at ``path`` of a dict on ``expected``."""
        message = (
            f"{dotted(path)} is on {actual}, this DeviceDict is on {expected}; "
            f'move it with .to({str(expected)!r}), or build with on_mismatch="move"'
        )
        return cls(message, key=path[0] if len(path) == 1 else path, expected=expected, actual=actual)


class InvalidFileError(ValueError):
    """A file that is damaged, forged, or of a format that is not known. Nothing that it names was imported or called.

    >>> import tempfile
    >>> from tensordict_lite import InvalidFileError, load
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     try:
    ...         load(file.name)
    ...     except InvalidFileError as error:
    ...         print(": not a valid file" in str(error))
    True
    """
