"""Files, as functions: `save` and `load`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ._device_dict import DeviceDict
from ._devices import DeviceLike
from ._errors import Path
from ._policy import Encoders
from ._replace import FilePath


def save(data: Mapping[str, Any], path: FilePath) -> None:
    """`DeviceDict.save` of a `DeviceDict`, or of what any mapping makes one of.

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
) -> DeviceDict[Any]:
    """`DeviceDict.load`; a class of yours has its own, ``Batch.load(path)``.

    >>> import tempfile
    >>> from tensordict_lite import load, save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save({"x": [1, 2], "y": 3}, f"{folder}/d.safetensors")
    ...     list(load(f"{folder}/d.safetensors", keys=["y"]))
    ['y']
    """
    return DeviceDict[Any].load(path, device, keys=keys, encoders=encoders)
