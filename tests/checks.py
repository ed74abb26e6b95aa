"""The invariants of a `DeviceDict`, for tests of everything that makes or changes one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tensordict_lite._errors import Path, dotted
from tensordict_lite._memory.device import CPU, resolve
from tensordict_lite._tree.policy import Policy
from tensordict_lite._tree.tree import TreeDict


def check_invariants(d: Any, at: Path = ()) -> None:
    """Raise ``AssertionError`` if an invariant of the dict does not hold. ``at``: the path of the dict."""
    where, device = f"at {dotted(at)}" if at else "at the root", d._device
    assert isinstance(d._policy, Policy), where
    assert device is None or device == resolve(device), f"{where}: {device} is not resolved"
    assert (device is CPU) == (device == CPU), f"{where}: the CPU device is not the shared one"
    for key, value in d.items():
        path = (*at, key)
        assert isinstance(key, str), f"key {key!r} {where}"
        if isinstance(value, Tensor):
            assert value.device == device, f"{dotted(path)} is on {value.device}, expected {device}"
        elif isinstance(value, TreeDict):
            assert device is not None, f"{dotted(path)}: nested in a dict without a device"
            assert value._device == device, f"at {dotted(path)}: tracks {value._device}, expected {device}"
            check_invariants(value, path)
        else:
            assert not isinstance(value, Mapping), f"{dotted(path)}: a mapping that is no DeviceDict"
            assert d._policy.objects == "keep", f"{dotted(path)}: {type(value).__name__} without objects='keep'"
