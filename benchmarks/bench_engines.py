"""Pickle a dict with protocol 5, put it into Ray, scatter it with Dask. Compare with NumPy arrays, tensors, TensorDict.

    python benchmarks/bench_engines.py [--quick] [--rounds N] [--json PATH] [--only pickle]

Pickling includes unpickling. Out of band, it uses the buffers of the sender, so no bytes are copied. Ray and Dask run
in processes of their own on this machine. If one is not installed, its rows are left out. "Dask" is scatter and gather,
"Dask, direct" is the same with ``gather(direct=True)``.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from common import interleaved, parser, ratio, ratio_table, same, setting, write
from torch.utils.benchmark import Timer

from tensordict_lite import DeviceDict, view_read_only

try:
    from tensordict import TensorDict
except ImportError:
    TensorDict = None
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
try:
    import ray
except ImportError:
    ray = None
try:
    import distributed
except ImportError:
    distributed = None

PACKED, OURS, VIEWED = "ours packed", "ours", "ours packed, read-only"
ARRAYS, TENSORS, PEER = "NumPy arrays", "tensors", "TensorDict"
SIZES = {"40 x 2 KB": (40, 512), "200 x 2 KB": (200, 512), "4 x 10 MB": (4, 2_500_000)}
GOALS = {"40 x 2 KB": 1.3, "200 x 2 KB": 1.3, "4 x 10 MB": 3.5}  # packed and out of band, times the time of NumPy
UNPACKED = 3  # times the time of packed, out of band
STORE = 1 << 30  # bytes of Ray's object store
Contenders = dict[str, Any]


def contenders(count: int, size: int) -> Contenders:
    """The same values in every container."""
    tensors = {f"k{i}": torch.rand(size) for i in range(count)}
    out: Contenders = {
        PACKED: DeviceDict(tensors).pack(),
        OURS: DeviceDict(tensors),
        ARRAYS: {key: tensor.numpy() for key, tensor in tensors.items()},
        TENSORS: tensors,
    }
    return out | ({} if TensorDict is None else {PEER: TensorDict(tensors, batch_size=[])})


def check(sent: Any, received: Any) -> None:
    both = [{key: torch.tensor(np.asarray(d[key])) for key in d.keys()} for d in (sent, received)]  # noqa: SIM118
    assert same(*both), "other values"


def pickles(dicts: Contenders) -> dict[str, dict[str, Timer]]:
    """A timer for each contender, out of band and in band. Each pickles and unpickles."""
    statements = {
        "pickle, out of band": "b = []; out = loads(dumps(d, 5, buffer_callback=b.append), buffers=b)",
        "pickle, in band": "out = loads(dumps(d, 5))",
    }
    cases: dict[str, dict[str, Timer]] = {name: {} for name in statements}
    for name, statement in statements.items():
        for who, d in dicts.items():
            known: dict[str, Any] = {"d": d, "dumps": pickle.dumps, "loads": pickle.loads}
            exec(statement, known)
            check(d, known["out"])
            assert who != PACKED or len(known.get("b", "1")) == 1, "more than one buffer"
            cases[name][who] = Timer(statement, globals=known)
    return cases


def viewed(d: Any, receive: Callable[[Any], Any]) -> Any:
    with view_read_only():
        return receive(d)


@contextlib.contextmanager
def with_ray() -> Iterator[Callable[[Contenders], dict[str, dict[str, Timer]]]]:
    """Start Ray. Gives the function that makes its timers."""
    ray.init(num_cpus=1, object_store_memory=STORE, include_dashboard=False, log_to_driver=False, logging_level="error")

    def timers(dicts: Contenders) -> dict[str, dict[str, Timer]]:
        puts = {who: Timer("put(d)", globals={"put": ray.put, "d": d}) for who, d in dicts.items()}
        gets: dict[str, Timer] = {}
        for who, d in dicts.items():
            at = ray.put(d)
            check(d, ray.get(at))
            gets[who] = Timer("get(at)", globals={"get": ray.get, "at": at})
            if who == PACKED:
                known = {"viewed": viewed, "get": ray.get, "at": at}
                gets[VIEWED] = Timer("viewed(at, get)", globals=known)
        return {"ray.put": puts, "ray.get": gets}

    try:
        yield timers
    finally:
        ray.shutdown()


@contextlib.contextmanager
def with_dask() -> Iterator[Callable[[Contenders], dict[str, dict[str, Timer]]]]:
    """Start a worker of Dask. Gives the function that makes its timers."""
    options: dict[str, Any] = {"dashboard_address": None, "memory_limit": None, "silence_logs": 40}
    with (
        distributed.LocalCluster(n_workers=1, threads_per_worker=1, **options) as cluster,
        distributed.Client(cluster) as client,
    ):

        def there_and_back(d: Any, direct: bool) -> Any:
            return client.gather(client.scatter([d], hash=False)[0], direct=direct)

        def timers(dicts: Contenders) -> dict[str, dict[str, Timer]]:
            cases: dict[str, dict[str, Timer]] = {}
            for name, direct in (("Dask", False), ("Dask, direct", True)):
                cases[name] = {}
                for who, d in dicts.items():
                    check(d, there_and_back(d, direct))
                    known = {"there_and_back": there_and_back, "d": d, "direct": direct}
                    cases[name][who] = Timer("there_and_back(d, direct)", globals=known)
            return cases

        yield timers


def lines_of(seconds: dict[str, dict[str, list[float]]], fields: str) -> list[dict[str, Any]]:
    """The results: each time as a multiple of that of a packed dict, and the medians."""
    lines: list[dict[str, Any]] = []
    for operation, times in seconds.items():
        ratios = {who: ratio(times[PACKED], taken) for who, taken in times.items() if who != PACKED}
        met = None
        if operation.endswith("out of band"):
            met = ratios[ARRAYS]["median"] <= GOALS[fields] and ratios[OURS]["median"] >= 1 / UNPACKED
        medians = {who: sorted(taken)[len(taken) // 2] for who, taken in times.items()}
        lines.append({"operation": operation, "fields": fields, "ratios": ratios, "medians": medians, "met": met})
    return lines


def main() -> None:
    options = parser("Dicts through pickle protocol 5, Ray and Dask.")
    options.add_argument("--only", choices=["pickle"], help="leave out Ray and Dask")
    args = options.parse_args()
    torch.set_num_threads(1)
    engines = {} if args.only else {"ray": ray, "distributed": distributed}
    measured = setting(tensordict=TensorDict, **engines)
    print(", ".join(f"{what} {name or 'is not installed, it is left out'}" for what, name in measured.items()))
    print(f"median (least..greatest) of {args.rounds} ratios of times; below 1 ours packed is faster\n", flush=True)
    torch.manual_seed(0)
    dicts = {fields: contenders(*size) for fields, size in SIZES.items()}
    lines: list[dict[str, Any]] = []

    def measure(timers: Callable[[Contenders], dict[str, dict[str, Timer]]]) -> None:
        for fields, of in dicts.items():
            lines.extend(lines_of(interleaved(timers(of), args.rounds), fields))

    measure(pickles)
    for engine, started in ((engines.get("ray"), with_ray), (engines.get("distributed"), with_dask)):
        if engine is not None:
            with started() as timers:
                measure(timers)
    print(ratio_table(lines, "ours packed / contender", "goal", ARRAYS))
    write(args.json, {**measured, "rounds": args.rounds, "results": lines})


if __name__ == "__main__":
    main()
