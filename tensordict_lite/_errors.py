"""Exceptions, and the text of a path, a dtype and a value in error messages."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Path = tuple[str, ...]
DEPTH = 64
"""The maximum number of nesting levels, including the outermost dict. The package, pickle, ``deepcopy`` and pytree
recurse into nested dicts. The limit keeps them well below Python's recursion limit of 1,000 calls."""


def dotted(path: Path) -> str:
    """Format a path for messages: ``('obs', 'image')`` as ``'obs.image'``, in quotes."""
    return repr(".".join(map(str, path)))  # `str`, because the key of an error may have another type


def dtype_name(dtype: torch.dtype | torch.layout) -> str:
    """The name of a dtype or layout in messages, in the repr and in files: ``float32``."""
    return str(dtype).removeprefix("torch.")


class TooDeep(ValueError):
    """A value is nested more than `DEPTH` levels deep."""


def refuse_deeper(path: Path) -> None:
    """Raise ``TooDeep`` if a dict at ``path`` would exceed the maximum depth."""
    if len(path) < DEPTH:
        return
    keys = [*map(str, path[:3]), "…", str(path[-1])]
    raise TooDeep(f"{dotted(tuple(keys))} is nested more than {DEPTH} levels deep, or holds itself; flatten it first")


def described(value: Any) -> str:
    """Describe a value: ``float32[2, 3]``, with an unusual layout or device; otherwise the name of its type."""
    if isinstance(value, Tensor):
        where = "" if value.is_cpu else f" on {value.device}"
        shape = "jagged" if value.is_nested else ", ".join(map(str, value.shape))
        layout = "" if value.is_nested or value.layout is torch.strided else f"{dtype_name(value.layout)} "
        return f"{layout}{dtype_name(value.dtype)}[{shape}]{where}"
    if isinstance(value, Mapping):
        return "a mapping"
    name = type(value).__name__
    return f"{'an' if name.startswith(tuple('aeioAEIO')) else 'a'} {name}"


def shown(value: Any) -> str:
    """The repr of a value, in one line and truncated for messages: the repr of a user's object may be long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:59]}…"


def with_path(error: Exception, path: Path, hint: str = "") -> TypeError | ValueError:
    """Create the error to raise from an ``error`` without a path: put ``path`` in front of its message."""
    kind = TypeError if isinstance(error, TypeError) else ValueError
    return kind(f"{dotted(path)}: {error}{hint}")


def add_note(error: Exception, note: str) -> None:
    """Add a line to an error: as a note, and before Python 3.11 to the message."""
    add: Any = getattr(error, "add_note", None)
    if add is not None:
        add(note)
    elif isinstance(error, OSError) and error.strerror:
        error.strerror += f"\n{note}"
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])


def optional_module(name: str, needed: str) -> Any:
    """Import a module that the package does not require. ``needed``: the text of the ``ImportError`` if it is missing.

    Call it where the module is used, because such modules are slow to import.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(needed) from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory is exhausted. torch has a class for it on accelerators only."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


class DeviceMismatchError(RuntimeError):
    """Raised when a tensor is inserted into a `DeviceDict` on another device. The dict is unchanged.

    A subclass of ``RuntimeError``, which torch raises for mixed devices, so existing handlers keep working.

    Attributes:
        key: the key of the tensor. In a nested dict: the path, as a tuple. None if the error concerns no single key.
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

    # The message is the only positional argument, because DataLoader re-creates a worker's exception from its message.
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


def device_mismatch(
    what: Path | str, expected: torch.device, actual: torch.device, way_out: str = "", whose: str = "this DeviceDict"
) -> DeviceMismatchError:
    """The error for a tensor on the device ``actual``, beside ``whose`` tensors on ``expected``.

    ``what``: its path, or what else it is. The default of ``way_out`` is for a tensor that is stored.
    """
    way_out = way_out or f'move it with .to({str(expected)!r}), or build with on_mismatch="move"'
    where, key = (what, None) if isinstance(what, str) else (dotted(what), what[0] if len(what) == 1 else what)
    message = f"{where} is on {actual}, {whose} is on {expected}; {way_out}"
    return DeviceMismatchError(message, key=key, expected=expected, actual=actual)


class InvalidFileError(ValueError):
    """Raised for a file that is damaged, forged or of an unknown format.

    No code that the file names was imported or called.

    >>> import tempfile
    >>> from tensordict_lite import InvalidFileError, load
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     try:
    ...         load(file.name)
    ...     except InvalidFileError as error:
    ...         print(": not a valid file" in str(error))
    True
    """
