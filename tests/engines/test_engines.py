"""The examples of Ray and Dask run, and a dict keeps its class, strings and packing on the way."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
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


MEANS = {"Adelie": 4.0, "Chinstrap": 5.0, "Gentoo": 6.0}
READ_WITH_RAY = """
import os, sys
import ray.data
import table_engines as example

def read(batch, folder):  # and the process that reads
    found = example.read(batch, folder)
    return {**found, "process": [os.getpid()] * len(found["number"])}

example.write(sys.argv[1], 5000)
ray.init(num_cpus=2, object_store_memory=200 << 20, include_dashboard=False, log_to_driver=False)
context = ray.data.DataContext.get_current()
context.execution_options.preserve_order = True
context.target_max_block_size = 50_000  # bytes
numbers, folder = ray.data.range(10_000, override_num_blocks=4), {"folder": sys.argv[1]}
table = numbers.map_batches(read, batch_size=900, fn_kwargs=folder).materialize()
assert table.num_blocks() > 8, table.num_blocks()  # no more than a few batches are in memory
rows = table.to_pandas()
assert rows["number"].tolist() == list(range(10_000))
assert rows["species"].tolist() == [example.SPECIES.tokens[i % 3] for i in range(10_000)]
assert all(masses.tolist() == [4.0 + i % 3] * (1 + i % 3) for i, masses in enumerate(rows["weighings"]))
assert rows["size"][0].shape == (4,)
assert 2 == rows["process"].nunique() and os.getpid() not in set(rows["process"])
types = {field.name: str(field.type) for field in table.schema().base_schema}
assert types["number"] == "int64" and types["mass"] == "float" and types["species"] == "string", types
batch = next(iter(table.iter_batches(batch_size=100)))
batch["weighings"] = example.Ragged.from_rows(batch["weighings"])
batch = example.DeviceDict(batch, encoders={"species": example.SPECIES})
assert batch["weighings"].lengths[:4].tolist() == [1, 2, 3, 1]
assert batch["size"].shape == (100, 4) and batch.decode("species")[:2] == ["Adelie", "Chinstrap"]
picked = ray.data.from_items([{"id": i} for i in (9999, 4, 5000)]).map_batches(read, fn_kwargs=folder)
assert sorted(picked.to_pandas()["number"]) == [4, 5000, 9999]
"""
READ_WITH_DASK = """
import os, sys
from dask.dataframe import from_map
from dask.distributed import Client, LocalCluster
import table_engines as example

def frame(rows, folder, columns=None):  # and the process that reads
    return example.frame(rows, folder, columns).assign(process=os.getpid(), fields=len(columns or ()))

if __name__ == "__main__":
    example.write(sys.argv[1], 5000)
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None, memory_limit=None) as cluster:
        with Client(cluster):
            ranges = [range(i, min(i + 900, 10_000)) for i in range(0, 10_000, 900)]
            table = from_map(frame, ranges, folder=sys.argv[1], columns=["number", "species"])
            rows = table.compute()
    assert rows["number"].tolist() == list(range(10_000))
    assert rows["species"].tolist() == [example.SPECIES.tokens[i % 3] for i in range(10_000)]
    assert set(rows["fields"]) == {2} and table.npartitions == 12
    assert 2 == rows["process"].nunique() and os.getpid() not in set(rows["process"])
"""


@pytest.fixture
def run_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Run code that imports the examples, as its workers do. Its argument is the path of a new folder."""
    script = tmp_path / "script.py"
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES), prepend=os.pathsep)

    def run_it(code: str) -> str:
        script.write_text(code, encoding="utf-8")
        return run(str(script), str(tmp_path / "table"))

    return run_it


def test_a_range_is_read_across_the_border_of_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    example: Any = import_module("table_engines")
    example.write(str(tmp_path), 10)
    found = example.read({"id": np.arange(8, 12)}, str(tmp_path))
    assert {key: list(values) for key, values in found.items() if key in ("number", "species", "mass")} == {
        "number": [8, 9, 10, 11],
        "species": ["Gentoo", "Adelie", "Chinstrap", "Gentoo"],
        "mass": [6.0, 4.0, 5.0, 6.0],
    }
    assert [masses.tolist() for masses in found["weighings"]] == [[6.0] * 3, [4.0], [5.0] * 2, [6.0] * 3]
    assert found["size"].shape == (4, 4)
    assert list(example.read({"id": np.arange(2)}, str(tmp_path), ["mass"])) == ["mass"]


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
class TestRay:
    def test_ray_data_reads_a_table(self) -> None:
        assert ast.literal_eval(run("table_engines.py", "ray").splitlines()[-1].removeprefix("ray ")) == MEANS

    def test_two_processes_read_every_row_once(self, run_script: Callable[[str], str]) -> None:
        run_script(READ_WITH_RAY)

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
    def test_dask_reads_a_table(self) -> None:
        assert ast.literal_eval(run("table_engines.py", "dask").splitlines()[-1].removeprefix("dask ")) == MEANS

    def test_two_processes_read_every_row_once(self, run_script: Callable[[str], str]) -> None:
        run_script(READ_WITH_DASK)

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
    for name in ("engines.py", "ray_penguins.py", "table_engines.py"):
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
