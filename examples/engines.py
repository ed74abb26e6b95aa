"""Dicts in Ray and Dask: feed a training loop, exchange dicts between actors, scatter and gather.

    python examples/engines.py ray-data | ray-actors | dask

Each part needs its engine: ``pip install "ray[data]"`` or ``pip install "dask[distributed]"``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tensordict_lite import DeviceDict, Vocabulary, prefetch

SPECIES = Vocabulary(["Adelie", "Chinstrap", "Gentoo"])


def start_ray() -> Any:
    import ray  # noqa: PLC0415  (an optional engine)

    if not ray.is_initialized():
        ray.init(num_cpus=2, object_store_memory=200 << 20, include_dashboard=False, log_to_driver=False)
    return ray


def made_table(count: int) -> dict[str, list[Any]]:
    """Rows with a number and a string that can be told from it."""
    x = torch.rand(count, generator=torch.Generator().manual_seed(0))
    return {"x": x.tolist(), "species": [SPECIES.tokens[int(3 * value)] for value in x.tolist()]}


def ray_data(epochs: int = 5, count: int = 2000) -> float:
    """Train on a dataset of Ray Data. Returns the accuracy of the last epoch."""
    start_ray()
    import pandas  # noqa: PLC0415
    import ray.data  # noqa: PLC0415

    dataset = ray.data.from_pandas(pandas.DataFrame(made_table(count)))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    right = 0
    for _ in range(epochs):
        # Ray gives dicts of NumPy arrays. A DeviceDict encodes the strings, and `prefetch` moves a batch ahead.
        batches = dataset.iter_batches(batch_size=100, batch_format="numpy", local_shuffle_buffer_size=400)
        dicts = (DeviceDict(batch, encoders={"species": SPECIES}, dtype=torch.float32).pack() for batch in batches)
        right = 0
        for batch in prefetch(dicts, "cpu"):
            logits = model(batch["x"].float().unsqueeze(1))
            optimizer.zero_grad()
            F.cross_entropy(logits, batch["species"]).backward()
            optimizer.step()
            right += int((logits.argmax(1) == batch["species"]).sum())
            assert set(batch.decode("species")) <= set(SPECIES.tokens)
    return right / count


def ray_actors() -> list[float]:
    """Two actors that send dicts to each other. Returns the sums that the second actor saw."""
    ray = start_ray()

    @ray.remote(num_cpus=0)
    class Producer:
        def batch(self, i: int) -> DeviceDict:
            return DeviceDict({"x": torch.full((1000, 100), float(i)), "name": ["Ada", "Bo"], "n": {"i": i}}).pack()

    @ray.remote(num_cpus=0)
    class Consumer:
        def total(self, batch: DeviceDict) -> float:
            assert batch.is_packed and batch.decode("name") == ["Ada", "Bo"]
            batch["x"] += batch["n", "i"]  # its own memory: no other process sees the write
            return float(batch["x"].sum())

    producer, consumer = Producer.remote(), Consumer.remote()
    references = [producer.batch.remote(i) for i in range(3)]
    totals = ray.get([consumer.total.remote(reference) for reference in references])
    assert [float(ray.get(reference)["x"][0, 0]) for reference in references] == [0, 1, 2]
    return totals


def dask() -> list[float]:
    """Scatter dicts to Dask workers, map over them and gather dicts."""
    from dask.distributed import Client, LocalCluster  # noqa: PLC0415  (an optional engine)

    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None, memory_limit=None) as cluster,
        Client(cluster) as client,
    ):
        dicts = [DeviceDict({"x": torch.full((1000, 100), float(i)), "name": ["Ada"]}) for i in range(3)]
        futures = client.scatter(dicts, hash=False)
        # From the workers, not through the scheduler, which does not use protocol 5.
        done = client.gather(client.map(doubled, futures), direct=True)
        assert all(d.decode("name") == ["Ada"] for d in done)
        assert [float(d["x"].max()) for d in dicts] == [0, 1, 2]
        return [float(d["x"].sum()) for d in done]


def doubled(d: DeviceDict) -> DeviceDict:
    return d.map(lambda t: t * 2 if t.is_floating_point() else t)


PARTS = {"ray-data": ray_data, "ray-actors": ray_actors, "dask": dask}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        print(part, PARTS[part]())
