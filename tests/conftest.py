"""The device to test on: the simulated accelerator, or a real one in its place (`make test-cuda`). One thread a process.

`make test-device` has its own device in place of the simulated accelerator. There `simulated` is `tests/device/strict.py`.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

# Before torch is imported, and for every process that a test starts: workers that run side by side share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import simulated
import torch
from hypothesis import HealthCheck, settings

import tensordict_lite
from tensordict_lite.tables import RowWriter

torch.set_num_threads(1)
# Processes of the start method "forkserver" get these with the fork. To import them in each takes longer than most tests.
multiprocessing.set_forkserver_preload(["hypothesis", "pytest", "tensordict_lite.distributed", "torch._dynamo"])
# The seconds that torch waits for each worker of a loader that an error left to the collector. It would be 5.
setattr(importlib.import_module("torch.utils.data._utils"), "MP_STATUS_CHECK_INTERVAL", 0.5)  # noqa: B010
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")

collect_ignore = [] if simulated.AVAILABLE else ["test_capabilities.py", "test_cuda.py", "test_transfer.py"]
HAS_STREAMS = simulated.REAL_STREAMS or torch.cuda.is_available()
TEST_DEVICE = simulated.TEST_DEVICE
ACCELERATORS = ["sim"] if TEST_DEVICE is None else [pytest.param(TEST_DEVICE, marks=pytest.mark.device)]


def needs_the_simulated_device(item: pytest.Item) -> bool:
    """Whether a test reads the log of the simulated device, or is about a device without streams."""
    used: list[str] = getattr(item, "fixturenames", [])
    return item.get_closest_marker("without_streams") is not None or bool({"copies", "streams"}.intersection(used))


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("ranks"):
            item.add_marker(pytest.mark.xdist_group("ranks"))
        elif not item.get_closest_marker("slow"):
            # A worker gets the tests of a file at once. To send each alone takes longer than most tests.
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        if item.get_closest_marker("device") and not HAS_STREAMS:
            item.add_marker(pytest.mark.skip(reason="needs CUDA, or the device of `make test-device`"))
        if simulated.REAL_STREAMS and needs_the_simulated_device(item):
            item.add_marker(pytest.mark.skip(reason="needs the simulated device: its log, or that it has no streams"))
    # The longest first: a long test at the end would run alone, while the other cores wait.
    items.sort(key=lambda item: (not item.get_closest_marker("ranks"), not item.get_closest_marker("slow")))


def pytest_collection_finish() -> None:
    """Leave torch and the tests out of every later garbage collection: it is most of the time of one."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip a test of the simulated device where there is none: see `simulated.AVAILABLE`."""
    try:
        yield
    except RuntimeError as error:
        if simulated.AVAILABLE or not any(said in str(error) for said in simulated.NO_DEVICE):
            raise
        pytest.skip("this version of torch has no backends in Python, so no simulated device")


@pytest.fixture(params=ACCELERATORS)
def device(request: pytest.FixtureRequest) -> torch.device:
    """An accelerator with real values, resolved."""
    return torch.device(request.param, 0)


MODES = ["plain", "inference mode", "default device"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that uses `torch_mode` runs in each mode. A slow one runs once."""
    if "torch_mode" in metafunc.fixturenames:
        slow = metafunc.definition.get_closest_marker("slow")
        metafunc.parametrize("torch_mode", MODES[:1] if slow else MODES, indirect=True)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write how often the tests tried what they `record_property`, if all passed: see `make test-tables-long`."""
    if (path := os.environ.get("TRIED")) and not terminalreporter.stats.get("failed"):
        results = Path(__file__).parent.parent / "benchmarks"
        sys.path.append(str(results))
        harness: Any = importlib.import_module("harness")
        counts = Counter[str]()
        for report in terminalreporter.stats.get("passed", []):
            counts.update(dict(report.user_properties))
        setting = {**harness.setting([]), "gpu": TEST_DEVICE or None}  # not the simulated device
        harness.write(Path(path), {**setting, "results": dict(sorted(counts.items()))})


@pytest.fixture
def torch_mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run a test of tables plainly, in inference mode, or with an accelerator as the default device of the package."""
    request.node.user_properties.append((request.param, 1))
    if request.param == "default device":
        for name in ("add_column", "drop_column", "join_parts", "load", "load_parts", "repair", "verify"):
            if function := getattr(request.module, name, None):
                monkeypatch.setattr(request.module, name, on_the_accelerator(function))
        for owner, names in (
            (RowWriter, ("__init__", "write", "flush", "close")),
            (tensordict_lite.JoinedRows, ("__getitem__", "__getitems__")),
        ):
            for name in names:
                monkeypatch.setattr(owner, name, on_the_accelerator(getattr(owner, name)))
    with torch.inference_mode(request.param == "inference mode"):
        yield


def on_the_accelerator(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with the device to test on as the default device while it runs."""

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        with torch.device(TEST_DEVICE or "sim", 0):
            return function(*args, **options)

    return call


@pytest.fixture
def copies() -> simulated.Counter[str]:
    """The copies to, from and on the simulated device, counted from here."""
    simulated.COPIES.clear()
    return simulated.COPIES


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> simulated.Streams:
    """The simulated devices with streams, events and pinned memory, as far as Python can pretend."""
    return simulated.Streams(monkeypatch)
