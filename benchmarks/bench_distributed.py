"""Send whole dicts between two gloo ranks. Compare with a loop over the fields, pickled objects and TensorDict.

    python benchmarks/bench_distributed.py [--quick] [--rounds N] [--json PATH]

Rank 0 times many calls between two barriers, the contenders one after the other. A ratio is taken in every round.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import in_turn, parser, ratio, ratio_table, same, setting, write

from tensordict_lite import DeviceDict
from tensordict_lite import distributed as ours_

try:
    from tensordict import TensorDict
except ImportError:
    TensorDict = None

OURS, LOOP, OBJECTS, PEER = "ours", "loop", "objects", "TensorDict"
SIZES = {"10 x 64 B": (10, 16), "100 x 64 B": (100, 16), "4 x 512 KiB": (4, 1 << 17), "4 x 4 MB": (4, 1_000_000)}
GOALS = {"100 x 64 B": 10, "4 x 4 MB": 1}  # the least time of the loop, as a multiple of ours
Calls = dict[str, Callable[[], Any]]


def calls(rank: int, count: int, size: int) -> dict[str, Calls]:
    """The contenders of every operation. All ranks call them."""
    torch.manual_seed(rank)
    tensors = {f"k{i}": torch.rand(size) for i in range(count)}
    rows = {key: tensor.view(2, -1) for key, tensor in tensors.items()}
    d, many, root = DeviceDict(tensors), DeviceDict(rows), rank == 0

    def each(call: Callable[[torch.Tensor], Any]) -> Callable[[], Any]:
        return lambda: {key: call(tensor) for key, tensor in tensors.items()}

    def objects() -> Any:
        box = [tensors if root else None]
        dist.broadcast_object_list(box, 0)
        return box[0]

    def one_by_one(tensor: torch.Tensor) -> torch.Tensor:
        (dist.send if root else dist.recv)(tensor, 1 - rank)
        return tensor

    def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
        out = [torch.empty_like(tensor) for _ in range(2)]
        dist.all_gather(out, tensor)
        return out

    def gathered_on_root(tensor: torch.Tensor) -> list[torch.Tensor] | None:
        out = [torch.empty_like(tensor) for _ in range(2)] if root else None
        dist.gather(tensor, out, 0)
        return out

    def scattered() -> dict[str, torch.Tensor]:
        out = {key: torch.empty(1, tensor.shape[1]) for key, tensor in rows.items()}
        for key, tensor in rows.items():
            dist.scatter(out[key], list(tensor.split(1)) if root else None, 0)
        return out

    def reduced(tensor: torch.Tensor) -> torch.Tensor:
        out = tensor.clone()
        dist.all_reduce(out)
        return out

    out: dict[str, Calls] = {
        "broadcast": {
            OURS: lambda: ours_.broadcast(d if root else None),
            LOOP: each(lambda t: dist.broadcast(t, 0)),
            OBJECTS: objects,
        },
        "send, recv": {OURS: lambda: ours_.send(d, 1) if root else ours_.recv(0), LOOP: each(one_by_one)},
        "scatter": {OURS: lambda: ours_.scatter(many if root else None), LOOP: scattered},
        "gather": {OURS: lambda: ours_.gather(d), LOOP: each(gathered_on_root)},
        "all_gather": {OURS: lambda: ours_.all_gather(d), LOOP: each(gathered)},
        "all_reduce": {OURS: lambda: ours_.all_reduce(d), LOOP: each(reduced)},
    }
    if TensorDict is not None:
        td = TensorDict(tensors, batch_size=[])
        out["send, recv"][PEER] = lambda: td.send(1) if root else td.recv(0)
    expected = {key: t.clone() for key, t in tensors.items()}
    for tensor in expected.values():
        dist.all_reduce(tensor)
    assert same(dict(ours_.all_reduce(d).items()), expected), "another sum"
    return out


def measure(rank: int, port: int, rounds: int, path: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.set_num_threads(1)
    lines: list[dict[str, Any]] = []
    for fields, (count, size) in SIZES.items():
        for operation, contenders in calls(rank, count, size).items():
            often = 40 if size < 1000 else 8
            times = {who: often if who == OURS else often // 4 for who in contenders}
            seconds: dict[str, list[float]] = {who: [] for who in contenders}
            for i in range(rounds):
                for who in in_turn(contenders, i):
                    contenders[who]()
                    dist.barrier()
                    start = time.perf_counter()
                    for _ in range(times[who]):
                        contenders[who]()
                    dist.barrier()
                    seconds[who].append((time.perf_counter() - start) / times[who])
            ratios = {who: ratio(taken, seconds[OURS]) for who, taken in seconds.items() if who != OURS}
            met = ratios[LOOP]["median"] >= GOALS[fields] if fields in GOALS else None
            lines.append({"operation": operation, "fields": fields, "ratios": ratios, "met": met})
    if rank == 0:
        Path(path).write_text(json.dumps(lines))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    args = parser("Dicts between two ranks, beside a loop over the fields, objects and TensorDict.").parse_args()
    measured = setting(tensordict=TensorDict)
    print(", ".join(f"{what} {name or 'is not installed, it is left out'}" for what, name in measured.items()))
    print(f"median (least..greatest) of {args.rounds} ratios of times; above 1 ours is faster\n", flush=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/lines.json"
        mp.start_processes(measure, args=(port, args.rounds, path), nprocs=2, start_method="spawn")
        lines = json.loads(Path(path).read_text())
    print(ratio_table(lines, "contender / ours", "goal", LOOP))
    write(args.json, {**measured, "rounds": args.rounds, "results": lines})


if __name__ == "__main__":
    main()
