"""The examples of Ray and Dask run, and a dict keeps its class, strings and packing on the way."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tensordict_lite import DeviceDict

EXAMPLE = Path(__file__).parents[2] / "examples" / "engines.py"


def run(part: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), part], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
class TestRay:
    def test_ray_data_feeds_a_training_loop(self) -> None:
        assert float(run("ray-data").split()[-1]) > 0.9

    def test_actors_exchange_dicts(self) -> None:
        assert run("ray-actors").strip().endswith("[0.0, 200000.0, 400000.0]")


@pytest.mark.skipif(find_spec("distributed") is None, reason="Dask is not installed")
class TestDask:
    def test_scatter_and_gather(self) -> None:
        assert run("dask").strip().endswith("[0.0, 200000.0, 400000.0]")

    def test_a_dict_is_a_frame_for_each_large_tensor(self) -> None:
        protocol: Any = pytest.importorskip("distributed.protocol")
        d = DeviceDict({"x": torch.rand(40_000), "y": torch.rand(40_000), "name": ["Ada"], "z": 1})
        for made, count in ((d, 3), (d.pack(), 1)):
            header, frames = protocol.serialize(made)
            assert header["serializer"] == "pickle" and len(frames) == 1 + count
            assert sum(memoryview(frame).nbytes for frame in frames) < 2 * 160_000 + 2000
            again = protocol.deserialize(header, [bytearray(frame) for frame in frames])
            assert again == made and again.is_packed == made.is_packed and again.decode("name") == ["Ada"]
