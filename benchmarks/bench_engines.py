"""Pickle a dict with protocol 5, put it into Ray, scatter it with Dask. Compare with NumPy arrays, tensors, TensorDict.

    python benchmarks/bench_engines.py [--quick] [--rounds N] [--only TEXT] [--json PATH]

Pickling includes unpickling. Out of band, it uses the buffers of the sender, so no bytes are copied. Ray and Dask run
in processes of their own on this machine. If one is not installed, its cases are left out.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from harness import OURS, PACKED, PEER, Case, Fields, Missing, equal_fields, main, optional, same_values, statement

from tensordict_lite import DeviceDict, view_read_only

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
TensorDict = optional("tensordict", "TensorDict")
ray = optional("ray")
distributed = optional("distributed")

SIZES = {"40 of 2 KB": (40, 512), "200 of 2 KB": (200, 512), "4 of 10 MB": (4, 2_500_000)}
STORE = 1 << 30  # bytes of Ray's object store
CONTAINERS: dict[str, Callable[[Fields], Any]] = {
    PACKED: lambda s: DeviceDict(s).pack(),
    OURS: DeviceDict,
    "NumPy arrays": lambda s: {key: tensor.numpy() for key, tensor in s.items()},
    "tensors": dict,
    PEER: lambda s: TensorDict(s, batch_size=[]),
}


@contextmanager
def in_ray() -> Generator[None]:
    ray.init(num_cpus=1, object_store_memory=STORE, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def in_dask() -> Generator[None]:
    """A worker of Dask, and a client in this process."""
    options: dict[str, Any] = {"dashboard_address": None, "memory_limit": None, "silence_logs": 40}
    with (
        distributed.LocalCluster(n_workers=1, threads_per_worker=1, **options) as cluster,
        distributed.Client(cluster),
    ):
        yield


def through_dask(d: Any, direct: bool) -> Any:
    client = distributed.default_client()
    return client.gather(client.scatter([d], hash=False)[0], direct=direct)


def read_only(reference: Any) -> Any:
    with view_read_only():
        return ray.get(reference)


@dataclass(frozen=True)
class Operation:
    """The code sends and receives the container ``x``. ``sent``: what becomes of the container before."""

    name: str
    code: str
    result: str = ""
    sent: Callable[[Any], Any] = lambda container: container
    engine: Any = None
    within: Callable[[], AbstractContextManager[Any]] = nullcontext


OPERATIONS = (
    Operation(
        "pickle protocol 5, out of band",
        "b = []; out = loads(dumps(x, 5, buffer_callback=b.append), buffers=b)",
        result="out",
    ),
    Operation("pickle protocol 5, in band", "loads(dumps(x, 5))"),
    Operation("`ray.put`", "ray.put(x)", "ray.get(ray.put(x))", engine=ray, within=in_ray),
    Operation("`ray.get`", "ray.get(x)", sent=ray.put, engine=ray, within=in_ray),
    Operation("`ray.get`, read-only", "read_only(x)", sent=ray.put, engine=ray, within=in_ray),
    Operation("Dask, direct", "through_dask(x, direct=True)", engine=distributed, within=in_dask),
    Operation("Dask, by the scheduler", "through_dask(x, direct=False)", engine=distributed, within=in_dask),
)
NAMES: dict[str, Any] = {
    "loads": pickle.loads,
    "dumps": pickle.dumps,
    "ray": ray,
    "read_only": read_only,
    "through_dask": through_dask,
}


def case(operation: Operation, size: str) -> Case:
    def made(make: Callable[[Fields], Any]) -> Callable[[Fields], Any]:
        return lambda s: operation.sent(make(s))

    contenders = {
        who: statement(operation.code, made(make), operation.result, **NAMES) for who, make in CONTAINERS.items()
    }
    data = partial(equal_fields, *SIZES[size])
    return Case(operation.name, size, contenders, data, same_values, within=operation.within)


def cases() -> list[Case]:
    return [case(one, size) for one in OPERATIONS if not isinstance(one.engine, Missing) for size in SIZES]


if __name__ == "__main__":
    main(__doc__, cases, ["tensordict", "ray", "distributed"])
