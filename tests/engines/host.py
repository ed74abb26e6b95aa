"""The program of one host of `test_two_hosts`: ``python host.py RANK WHAT TIMEOUT``.

``WHAT`` is "ends", "loop" or the name of a call. First every call is made, and "ready" is printed. "loop" then makes
all calls again and again. The name of a call waits for a line, and makes this call. An error is printed with its
seconds.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tensordict_lite import DeviceDict
from tensordict_lite import distributed as d_

ADDRESS = "10.77.0.1"


def sample(rank: int) -> DeviceDict:
    return DeviceDict(
        {"x": torch.full((4, 3), float(rank)), "name": ["Ada"] * 4, "large": torch.full((4, 1 << 18), 1.0)}
    )


def make_every_call(rank: int) -> None:
    mine = sample(rank)
    assert d_.broadcast(mine, 1)["x"][0, 0] == 1
    assert len(d_.scatter(mine if rank == 0 else None).rows) == 2
    everyone = d_.all_gather(mine)
    assert [float(d["x"][0, 0]) for d in everyone] == [0, 1] and everyone[1 - rank].decode("name") == ["Ada"] * 4
    gathered = d_.gather(mine)
    assert (gathered is None) == (rank == 1)
    assert d_.all_reduce(mine.select("large"))["large"].min() == 2
    if rank:
        d_.send(mine, 0)
        assert d_.recv(0)["x"].max() == 0
    else:
        assert d_.recv(1)["x"].min() == 1
        d_.send(mine, 1)
    work, sent = d_.irecv(1 - rank), d_.isend(mine, 1 - rank)
    assert float(work.wait()["x"][0, 0]) == 1 - rank
    sent.wait()


def calls(rank: int) -> dict[str, Callable[[], Any]]:
    mine = sample(rank)
    return {
        "broadcast": lambda: d_.broadcast(mine, 1),
        "all_gather": lambda: d_.all_gather(mine),
        "all_reduce": lambda: d_.all_reduce(mine.select("x")),
        "gather": lambda: d_.gather(mine),
        "scatter": lambda: d_.scatter(mine if rank else None, 1),
        "send": lambda: d_.recv(1) if rank == 0 else d_.send(mine, 0),
    }


def main() -> None:
    rank, what, timeout = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    torch.set_num_threads(1)
    store = dist.TCPStore(ADDRESS, 29500, 2, rank == 0, timedelta(seconds=100))  # waits for the other host
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=timeout))
    for _ in range(2):  # with the header of the schema, and without it
        make_every_call(rank)
    print("ready", flush=True)
    if what == "ends":
        dist.barrier()
        dist.destroy_process_group()
        print("done", flush=True)
        return
    if what != "loop":
        sys.stdin.readline()  # until the peer or the link is gone
    start = time.monotonic()
    try:
        while what == "loop" and time.monotonic() < start + 60:
            make_every_call(rank)
        if what != "loop":
            calls(rank)[what]()
        print("no error", flush=True)
    except RuntimeError as error:
        print(f"{time.monotonic() - start:.1f} {type(error).__name__}: {error}", flush=True)
    os._exit(0)  # gloo's threads may wait for the peer


if __name__ == "__main__":
    main()
