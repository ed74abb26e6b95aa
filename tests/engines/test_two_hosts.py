"""Two hosts: network namespaces that a pair of virtual interfaces joins, each with its rank."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TIMEOUT = 8
"""Seconds until a call without an answer raises an error."""
PROGRAM = f"""
import sys
from datetime import timedelta
sys.path.insert(0, {str(HERE)!r})
import torch
import torch.distributed as dist
from tensordict_lite import DeviceDict
from tensordict_lite import distributed as d_

torch.set_num_threads(1)
rank, what = int(sys.argv[1]), sys.argv[2]
store = dist.TCPStore("10.77.0.1", 29500, 2, rank == 0, timedelta(seconds=40))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds={TIMEOUT}))
mine = DeviceDict({{"x": torch.full((4, 3), float(rank)), "name": ["Ada"] * 4, "large": torch.full((4, 1 << 18), 1.0)}})
for _ in range(2):
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
print("ready", flush=True)
calls = {{
    "broadcast": lambda: d_.broadcast(mine, 1),
    "all_gather": lambda: d_.all_gather(mine),
    "all_reduce": lambda: d_.all_reduce(mine.select("x")),
    "gather": lambda: d_.gather(mine),
    "scatter": lambda: d_.scatter(mine if rank else None, 1),
    "send": lambda: d_.recv(1) if rank == 0 else d_.send(mine, 0),
}}
if what == "ends":
    dist.barrier()
    dist.destroy_process_group()
    print("done", flush=True)
else:
    sys.stdin.readline()  # until the peer or the link is gone
    try:
        calls[what]()
        raise SystemExit("the call returned")
    except RuntimeError as error:
        print(f"{{type(error).__name__}}: {{error}}", flush=True)
    import os
    os._exit(0)  # gloo's threads may wait for the peer
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def permitted() -> bool:
    if shutil.which("ip") is None or not hasattr(os, "geteuid") or os.geteuid() != 0:
        return False
    name = f"tdl-try-{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("-n", name, "link", "add", "name", "tdl0", "type", "veth", "peer", "name", "tdl1")
    except (OSError, subprocess.CalledProcessError):
        return False
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    return True


pytestmark = [
    pytest.mark.slow,
    pytest.mark.ranks,
    pytest.mark.xdist_group("two hosts"),
    pytest.mark.skipif(not permitted(), reason="network namespaces need root and iproute2"),
]


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    names = [f"tdl-{i}-{os.getpid()}" for i in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("-n", names[0], "link", "add", "name", "eth", "type", "veth", "peer", "name", "eth", "netns", names[1])
        for i, name in enumerate(names):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "eth")
            ip("-n", name, "link", "set", "eth", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def started(hosts: list[str], *arguments: str) -> list[subprocess.Popen[str]]:
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "eth", "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            ["ip", "netns", "exec", host, sys.executable, *arguments[:-1], str(rank), arguments[-1]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for rank, host in enumerate(hosts)
    ]


def end(ranks: list[subprocess.Popen[str]]) -> None:
    for rank in ranks:
        rank.kill()
        rank.communicate()


def test_every_call(hosts: list[str]) -> None:
    ranks = started(hosts, "-c", PROGRAM, "ends")
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=120)
            assert out.split() == ["ready", "done"], err[-3000:]
    finally:
        end(ranks)


@pytest.mark.parametrize("gone", ["rank", "link"])
@pytest.mark.parametrize("call", ["broadcast", "all_gather", "all_reduce", "gather", "scatter", "send"])
def test_what_survives_raises_an_error_that_names_the_call(hosts: list[str], call: str, gone: str) -> None:
    ranks = started(hosts, "-c", PROGRAM, call)
    try:
        for rank in ranks:
            assert rank.stdout is not None and rank.stdout.readline() == "ready\n", rank.communicate()[1][-3000:]
        survivors = ranks if gone == "link" else ranks[:1]
        if gone == "link":
            ip("-n", hosts[0], "link", "set", "eth", "down")
        else:
            ranks[1].kill()
            ranks[1].wait()
        start = time.monotonic()
        for rank in survivors:  # first all, then wait for each: both are in the call at the same time
            assert rank.stdin is not None
            rank.stdin.write("\n")
            rank.stdin.flush()
        for number, rank in enumerate(survivors):
            out, err = rank.communicate(timeout=6 * TIMEOUT)
            if call == "scatter" or (call in ("broadcast", "send") and number == 1):
                name = {"scatter": "rank 1", "broadcast": "broadcast from rank 1", "send": "send to rank 0"}[call]
            else:
                name = {
                    "send": "receive from rank 1",
                    "broadcast": "broadcast from rank 1",
                    "gather": "gather to rank 0",
                }.get(call, call)
            if call == "scatter":
                name = "receive from rank 1" if number == 0 else "send to rank 0"
            assert f"rank {number}: {name}" in out, (out, err[-2000:])
        assert time.monotonic() - start < 3 * TIMEOUT
    finally:
        end(ranks)
