"""Functions run on two real ranks."""

from __future__ import annotations

import gc
import os
import socket
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp


def free_port() -> int:
    """A port for the store of a group that a framework or a program makes. Each group needs one of its own: a rank
    that is early would find the store of the group before."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def on_ranks(function: Callable[..., None], *args: Any, count: int = 2) -> None:
    """``function(rank, *args)`` on ``count`` gloo ranks, each a process; an error of one is raised here."""
    port = free_port()  # for frameworks; the group itself meets in a file, as a port may be taken meanwhile
    with tempfile.TemporaryDirectory() as folder:
        given = (function, args, count, port, folder)
        mp.start_processes(_rank, args=given, nprocs=count, start_method="forkserver")


def meet(rank: int, count: int, folder: str, name: str = "meeting") -> None:
    """Make the default group. What never comes is an error, and soon."""
    meeting, timeout = f"file://{folder}/{name}", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=count, timeout=timeout)


def _rank(rank: int, function: Callable[..., None], args: tuple[Any, ...], count: int, port: int, folder: str) -> None:
    # As torchrun sets them, for frameworks that make the group themselves.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "MEETING": folder}
    meet(rank, count, folder)
    function(rank, *args)
    # All are done and the model is gone before the group goes: gloo's threads abort a process that ends under them.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
