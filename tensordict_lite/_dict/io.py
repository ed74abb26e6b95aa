"""The functions `save` and `load`, for files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from .._errors import Path
from .._files.atomic_write import FilePath
from .._memory.device import DeviceLike
from .._tree.policy import Encoders
from .device_dict import DeviceDict


def save(data: Mapping[str, Any], path: FilePath) -> None:
    """Save a mapping to a safetensors file. See `DeviceDict.save`.

    A mapping that is not a `DeviceDict` is converted first: ``DeviceDict(data)``.

    Raises: ``TypeError`` if the path comes before the data; the errors of `DeviceDict` and of `DeviceDict.save`.
    Cost: as `DeviceDict.save`.

    >>> import tempfile
    >>> from tensordict_lite import load, save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save({"x": [1, 2]}, f"{folder}/d.safetensors")
    ...     load(f"{folder}/d.safetensors")["x"]
    tensor([1, 2])
    """
    if isinstance(data, (str, os.PathLike)):
        raise TypeError(f"save takes the data first: save(data, path), got {data!r:.60} as the data")
    (data if isinstance(data, DeviceDict) else DeviceDict(data)).save(path)


def load(
    path: FilePath,
    device: DeviceLike | None = None,
    *,
    keys: Sequence[str | Path] | None = None,
    encoders: Encoders | None = None,
    rows: int | None = None,
) -> DeviceDict[Any]:
    """Load a safetensors file, or a table of `RowWriter`, as a `DeviceDict`. See `DeviceDict.load`.

    To load an instance of another class, call its method: ``Batch.load(path)``.

    Raises the errors of `DeviceDict.load`, and has its cost.

    >>> import tempfile
    >>> from tensordict_lite import load, save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save({"x": [1, 2], "y": 3}, f"{folder}/d.safetensors")
    ...     list(load(f"{folder}/d.safetensors", keys=["y"]))
    ['y']
    """
    return DeviceDict[Any].load(path, device, keys=keys, encoders=encoders, rows=rows)
