"""The examples of Ray and Dask run, and a dict keeps its class, strings and packing on the way."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tensordict_lite import DeviceDict

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run(*command: str) -> str:
    command = (sys.executable, str(EXAMPLES / command[0]), *command[1:])
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
class TestRay:
    def test_ray_data_feeds_a_training_loop(self) -> None:
        assert float(run("engines.py", "ray-data").split()[-1]) > 0.9

    def test_actors_exchange_dicts(self) -> None:
        assert run("engines.py", "ray-actors").strip().endswith("[0.0, 200000.0, 400000.0]")

    def test_the_penguins(self) -> None:
        pytest.importorskip("pydantic", reason="Ray Train is not installed")
        shown = run("ray_penguins.py", "--epochs", "20")
        assert "epoch 20: 276 rows on all ranks" in shown and " of 69 penguins on 2 ranks" in shown
        found = re.search(r"^held-out accuracy ([\d.]+) on 2 workers of Ray$", shown, re.MULTILINE)
        assert found and float(found[1]) >= 0.95


@pytest.mark.skipif(find_spec("distributed") is None, reason="Dask is not installed")
class TestDask:
    def test_scatter_and_gather(self) -> None:
        assert run("engines.py", "dask").strip().endswith("[0.0, 200000.0, 400000.0]")

    def test_a_dict_is_a_frame_for_each_large_tensor(self) -> None:
        protocol: Any = pytest.importorskip("distributed.protocol")
        d = DeviceDict({"x": torch.rand(40_000), "y": torch.rand(40_000), "name": ["Ada"], "z": 1})
        for made, count in ((d, 3), (d.pack(), 1)):
            header, frames = protocol.serialize(made)
            assert header["serializer"] == "pickle" and len(frames) == 1 + count
            assert sum(memoryview(frame).nbytes for frame in frames) < 2 * 160_000 + 2000
            again = protocol.deserialize(header, [bytearray(frame) for frame in frames])
            assert again == made and again.is_packed == made.is_packed and again.decode("name") == ["Ada"]

    def test_through_the_scheduler_a_dict_is_in_band(self) -> None:
        """The page on engines says so, and advises ``gather(direct=True)``."""
        scheduler: Any = pytest.importorskip("distributed.scheduler")
        protocol: Any = pytest.importorskip("distributed.protocol")
        source = inspect.getsource(scheduler.Scheduler.__init__)
        assert '"pickle-protocol": 4' in source, "the scheduler has another protocol: correct docs/engines.md"
        d = DeviceDict({"x": torch.rand(40_000), "name": ["Ada"]}).pack()
        header, frames = protocol.serialize(d, context={"pickle-protocol": 4})
        assert len(frames) == 1 and protocol.deserialize(header, frames) == d


def test_examples_are_short() -> None:
    for name in ("engines.py", "ray_penguins.py"):
        assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) < 150, name


SMALL = """
import sys
sys.path.append(sys.argv.pop(1))
import bench_engines, harness
bench_engines.SIZES = {"40 of 2 KB": (4, 8)}
harness.SECONDS = 0.001
harness.main(None, bench_engines.cases)
"""


def test_the_benchmark_runs_small(tmp_path: Path) -> None:
    # In a process of its own: torch's timer synchronizes the accelerator, which the simulated one of the tests refuses.
    command = [sys.executable, "-c", SMALL, str(ROOT / "benchmarks"), "--rounds", "1", "--json"]
    subprocess.run([*command, str(tmp_path / "out.json")], check=True, timeout=300)
    lines = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["results"]
    operations = [line["operation"] for line in lines]
    expected = ["pickle protocol 5, out of band", "pickle protocol 5, in band"]
    expected += ["`ray.put`", "`ray.get`", "`ray.get` in `view_read_only`"] if find_spec("ray") else []
    dask = ["Dask: `scatter`, `gather(direct=True)`", "Dask: `scatter`, `gather`"]
    assert operations == expected + (dask if find_spec("distributed") else [])
    assert all({"DeviceDict, packed", "DeviceDict", "NumPy arrays", "tensors"} <= set(line["ratios"]) for line in lines)
