"""The invariants of a `DeviceDict`, for tests of everything that makes or changes one."""

from __future__ import annotations

import collections.abc
import importlib.util
import inspect
import sys
import typing
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
from torch import Tensor

from tensordict_lite._errors import Path, dotted
from tensordict_lite._memory.device import CPU, resolve
from tensordict_lite._tree.inside import kept_tensors, nests
from tensordict_lite._tree.policy import Policy
from tensordict_lite._tree.ragged import Ragged
from tensordict_lite._tree.tree import TreeDict

NOT_TRACED = pytest.mark.skipif(sys.gettrace() is not None, reason="an interrupt may leave the tracer's lock taken")
"""For interrupts at any moment. `make coverage` would hang now and then."""


def fails(error: type[BaseException] | tuple[type[BaseException], ...], text: str, call: Callable[[], Any]) -> None:
    """That the call raises the error, with a text in which the pattern is found."""
    with pytest.raises(error, match=text):
        call()


def check_rows(r: Ragged, at: Path = ()) -> None:
    """Raise ``AssertionError`` if an invariant of a ragged field does not hold."""
    where = f"{dotted(at)}: " if at else ""
    assert r.offsets.device == r.values.device, f"{where}values and offsets on two devices"
    assert r.offsets.dtype is torch.int32 or len(r.values) >= 1 << 31, f"{where}{r.offsets.dtype}"
    if not r.offsets.is_meta:
        assert r.offsets[0] == 0 and r.offsets[-1] == len(r.values) and not (r.lengths < 0).any(), where
        assert r._lengths.longest in (None, max(r.lengths.tolist(), default=0)), f"{where}a wrong max_length"


def check_invariants(d: Any, at: Path = ()) -> None:
    """Raise ``AssertionError`` if an invariant of the dict does not hold. ``at``: the path of the dict."""
    if isinstance(d, Ragged):
        check_rows(d)
        return
    where, device = f"at {dotted(at)}" if at else "at the root", d._device
    assert isinstance(d._policy, Policy), where
    assert device is None or device == resolve(device), f"{where}: {device} is not resolved"
    assert (device is CPU) == (device == CPU), f"{where}: the CPU device is not the shared one"
    for key, value in d.items():
        path = (*at, key)
        assert isinstance(key, str), f"key {key!r} {where}"
        if isinstance(value, Tensor):
            assert value.device == device, f"{dotted(path)} is on {value.device}, expected {device}"
        elif isinstance(value, Ragged):
            check_rows(value, path)
            assert value.device == device, f"{dotted(path)} is on {value.device}, expected {device}"
        elif isinstance(value, TreeDict):
            assert device is not None, f"{dotted(path)}: nested in a dict without a device"
            assert value._device == device, f"at {dotted(path)}: tracks {value._device}, expected {device}"
            check_invariants(value, path)
        else:
            assert not nests(value), f"{dotted(path)}: a mapping that is no DeviceDict"
            for tensor in kept_tensors(value):
                assert tensor.device == device, f"in {dotted(path)}: {tensor.device}, expected {device}"
            assert d._policy.objects == "keep", f"{dotted(path)}: {type(value).__name__} without objects='keep'"


def protocols(package: str) -> dict[str, type[Any]]:
    """Every runtime-checkable protocol that a package defines, by name."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    names = [package]
    if spec.submodule_search_locations:
        root = FilePath(spec.origin).parent
        files = [file for file in root.rglob("*.py") if b"runtime_checkable" in file.read_bytes()]
        names = [".".join((package, *file.relative_to(root).with_suffix("").parts)) for file in files]
    found: dict[str, type[Any]] = {}
    for module in names:
        try:
            members = vars(importlib.import_module(module))
        except ModuleNotFoundError as error:  # an optional dependency of the module
            if (error.name or "").partition(".")[0] == package.partition(".")[0]:
                raise
            continue
        for name, value in members.items():
            if (
                inspect.isclass(value)
                and getattr(value, "_is_runtime_protocol", False)
                and value is not typing.Protocol
            ):
                found[f"{value.__module__}.{name}"] = value
    return found


ABSTRACT = {f"collections.abc.{name}": getattr(collections.abc, name) for name in collections.abc.__all__}
"""The abstract base classes of Python."""


def claims(value: object, kinds: Mapping[str, type[Any]]) -> set[str]:
    """The names of the classes that the value says it is an instance of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of collections.abc.ByteString
        return {name for name, kind in kinds.items() if isinstance(value, kind)}
