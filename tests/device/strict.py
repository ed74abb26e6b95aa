"""The strict device: compile it, load it, and speak to it. See `strict.cpp` for its rules.

As a plugin of pytest (``-p strict``) it registers the device before any test is imported. There is one out-of-tree
device in a process. So this module takes the place of `tests/simulated.py`: the device has the same name, ``sim``, and
tests that import `simulated` get this module. What those tests ask of it has the same names here.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

SOURCE = Path(__file__).with_name("strict.cpp")
BUILD = Path(__file__).with_name("build")
AVAILABLE = REAL_STREAMS = True
TEST_DEVICE = None
"""See `tests/simulated.py`."""


class Counts(NamedTuple):
    """What the device did since the last `reset`."""

    h2d: int
    d2h: int
    d2d: int
    h2d_bytes: int
    d2h_bytes: int
    waits: int
    """How often the host waited for a whole stream."""
    event_waits: int
    pinned: int
    """Bytes that are pinned now, used or not."""
    pinned_peak: int
    pins: int
    """How often memory was pinned."""


class _Module:
    """What torch and the tests look for under ``torch.sim``."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        with torch.accelerator.device_index(index):
            yield

    def memory_allocated(self, device: int = 0) -> int:
        return torch.ops.strict.allocated(device)

    def _sleep(self, cycles: int) -> None:
        torch.ops.strict.busy(cycles * 4e-9, torch.device("sim"))


def compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def library() -> Path:
    """The compiled device. It is compiled once for each version of torch, of the source and of the compiler.

    Raises ``RuntimeError`` if the compiler fails.
    """
    name = compiler() or ""
    version = subprocess.run([name, "--version"], capture_output=True, check=True).stdout
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode() + version).hexdigest()[:12]
    out = BUILD / f"strict-{key}.so"
    if not out.exists():
        BUILD.mkdir(exist_ok=True)
        home = Path(torch.__file__).parent
        with tempfile.TemporaryDirectory(dir=BUILD) as folder:
            made = Path(folder) / out.name
            libraries = [f"-L{home / 'lib'}", f"-Wl,-rpath,{home / 'lib'}", "-ltorch_cpu", "-lc10"]
            command = [name, "-std=c++20", "-O1", "-fPIC", "-shared", "-pthread", "-w", f"-I{home / 'include'}"]
            command += [str(SOURCE), "-o", str(made), *libraries]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
            for old in BUILD.glob("*.so"):
                old.unlink()
            made.replace(out)
    return out


class Held:
    """A stream that stands still."""

    in_time = False
    """After the block: whether the stream stood still to the end of it, so that nothing within it waited for it."""


@contextlib.contextmanager
def held(device: str = "sim", seconds: float = 10.0) -> Iterator[Held]:
    """Stop the current stream of ``device`` within the block, but for so many seconds at most."""
    out = Held()
    gate = torch.ops.strict.hold(seconds, torch.device(device))
    try:
        yield out
    finally:
        out.in_time = torch.ops.strict.release(gate)


@contextlib.contextmanager
def delays(shortest_us: int, longest_us: int) -> Iterator[None]:
    """Delay each piece of work on each stream by a random time between these."""
    torch.ops.strict.delays(shortest_us, longest_us)
    try:
        yield
    finally:
        torch.ops.strict.delays(0, 0)


@contextlib.contextmanager
def memory_left(nbytes: int, device: int = 0) -> Iterator[None]:
    """Within it the device has so many bytes left."""
    torch.ops.strict.limit(device, nbytes)
    try:
        yield
    finally:
        torch.ops.strict.limit(device, -1)


@contextlib.contextmanager
def no_pinning() -> Iterator[None]:
    """Within it no more memory can be pinned."""
    torch.ops.strict.pinning(False)
    try:
        yield
    finally:
        torch.ops.strict.pinning(True)


@contextlib.contextmanager
def captured(device: str = "sim") -> Iterator[Any]:
    """The graph of the work within the block, on a stream of its own."""
    graph = torch.accelerator.Graph()
    with torch.Stream(device=device):
        graph.capture_begin()
        try:
            yield graph
        finally:
            graph.capture_end()


def counts() -> Counts:
    return Counts(*torch.ops.strict.counts())


def reset() -> None:
    """Wait for both devices, and count from here."""
    for index in range(2):
        torch.accelerator.synchronize(index)
    torch.ops.strict.reset_counts()


def live_bytes() -> int:
    """Bytes allocated on the first device now."""
    return torch.ops.strict.allocated(0)


def pytest_configure() -> None:
    if compiler() is None:
        pytest.exit(
            "The tests on the device are skipped: there is no C++ compiler. Install g++, or name one in CXX.", 0
        )


if compiler() is not None:
    torch.ops.load_library(library())
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _Module())
    SIM, OTHER = torch.device("sim", 0), torch.device("sim", 1)
    sys.modules["simulated"] = sys.modules[__name__]
