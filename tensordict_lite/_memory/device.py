"""Parse and resolve devices."""

from __future__ import annotations

from typing import cast

import torch

DeviceLike = torch.device | str | int

CPU = torch.device("cpu")
"""Every dict on the CPU keeps this object as its device, so that code can compare with ``is``."""
META = torch.device("meta")


def canonical(device: torch.device) -> torch.device:
    """Replace a CPU device that a tensor reports by `CPU`. Other devices are returned themselves."""
    return CPU if device == CPU else device


def resolve(device: DeviceLike) -> torch.device:
    """The device that a tensor on ``device`` reports. ``"cuda"`` becomes the current CUDA device, with its index.

    Raises ``TypeError`` if ``device`` is no str, int or ``torch.device``. Raises torch's ``RuntimeError`` for an
    unknown type. Raises torch's own error for a device without an index that this machine or build does not have.
    """
    # Most calls end here. Parsing and comparing takes 10x longer.
    if device is CPU or (type(device) is str and device == "cpu"):
        return CPU
    if not isinstance(cast(object, device), (str, int, torch.device)):
        raise TypeError(
            f"a device is a str, a torch.device or an int, got {device!r:.60} of type {type(device).__name__}"
        )
    parsed = device if isinstance(device, torch.device) else torch.device(device)
    if parsed == CPU:
        return CPU
    if parsed == META:
        return META
    if parsed.type in ("cpu", "meta"):  # torch accepts and ignores their index
        return resolve(parsed.type)
    if cast("int | None", parsed.index) is not None:
        return parsed
    # Ask torch, which knows every backend and the current device.
    return torch.empty(0, device=parsed).device
