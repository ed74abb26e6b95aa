"""Which device: parsing, resolving, and the devices that are kept as one object."""

from __future__ import annotations

from typing import cast

import torch

DeviceLike = torch.device | str | int

CPU = torch.device("cpu")
"""The one object that every dict on the CPU keeps as its device, so that ``is`` tells."""
META = torch.device("meta")


def canonical(device: torch.device) -> torch.device:
    """``device``, which a tensor reported, as it is kept: the CPU as `CPU`."""
    return CPU if device == CPU else device


def resolve(device: DeviceLike) -> torch.device:
    """The device that tensors made on ``device`` report: ``"cuda"`` is the current CUDA device, with its index.

    Raises ``TypeError`` for what is no device.
    Raises torch's ``RuntimeError`` for a device type that is unknown, and torch's own error for one without an index
    that this machine or build does not have.
    """
    # Most calls, in a tenth of the time that it takes to parse and compare.
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
    if parsed.type in ("cpu", "meta"):  # an index of theirs is accepted and ignored, as torch does
        return resolve(parsed.type)
    if cast("int | None", parsed.index) is not None:
        return parsed
    # Asked of torch itself, so that every backend, and a change of the current device, is answered right.
    return torch.empty(0, device=parsed).device
