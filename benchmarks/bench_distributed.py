"""Send whole dicts between two gloo ranks. Compare with a loop over the fields.

    python benchmarks/bench_distributed.py [--quick] [--rounds N] [--only TEXT] [--json PATH]

Both ranks make many calls between two barriers, and rank 0 times them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from harness import OURS, Case, Fields, Prepare, Run, main, plain, two_ranks
from torch import Tensor

from tensordict_lite import DeviceDict
from tensordict_lite import distributed as ours

LOOP = "loop"
SIZES = {"10 of 64 B": (10, 16), "100 of 64 B": (100, 16), "4 of 4 MB": (4, 1_000_000)}
VERBS = ("`broadcast`", "`send`, `recv`", "`all_gather`", "`all_reduce`")


# --- on the ranks ---


@cache
def calls(size: str) -> dict[tuple[str, str], Callable[[], Any]]:
    """By verb and contender: a function that both ranks call."""
    count, length = SIZES[size]
    rank, root = dist.get_rank(), dist.get_rank() == 0
    torch.manual_seed(rank)
    tensors: Fields = {f"k{i}": torch.rand(length) for i in range(count)}
    received = tensors if root else {key: torch.empty_like(tensor) for key, tensor in tensors.items()}
    d = DeviceDict(tensors)

    def each(call: Callable[[Tensor], Any], fields: Fields = tensors) -> Callable[[], Any]:
        return lambda: {key: call(tensor) for key, tensor in fields.items()}

    def broadcast(tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, 0)
        return tensor

    def send(tensor: Tensor) -> Tensor:
        (dist.send if root else dist.recv)(tensor, 1 - rank)
        return tensor

    def all_gather(tensor: Tensor) -> list[Tensor]:
        out = [torch.empty_like(tensor) for _ in range(2)]
        dist.all_gather(out, tensor)
        return out

    def all_reduce(tensor: Tensor) -> Tensor:
        out = tensor.clone()
        dist.all_reduce(out)
        return out

    return {
        ("`broadcast`", OURS): lambda: ours.broadcast(d if root else None),
        ("`broadcast`", LOOP): each(broadcast, received),
        ("`send`, `recv`", OURS): lambda: ours.send(d, 1) if root else ours.recv(0),
        ("`send`, `recv`", LOOP): each(send, received),
        ("`all_gather`", OURS): lambda: ours.all_gather(d),
        ("`all_gather`", LOOP): each(all_gather),
        ("`all_reduce`", OURS): lambda: ours.all_reduce(d),
        ("`all_reduce`", LOOP): each(all_reduce),
    }


def result_of(verb: str, who: str, size: str) -> Any:
    """The result as a dict, on the rank that has called this. The gathered dicts become a dict of lists."""
    result = calls(size)[verb, who]()
    if isinstance(result, list):
        return {key: [d[key] for d in result] for key in result[0]}
    return None if result is None else plain(result)


def seconds_of(verb: str, who: str, size: str, often: int) -> float:
    call = calls(size)[verb, who]
    dist.barrier()
    start = perf_counter()
    for _ in range(often):
        call()
    dist.barrier()
    return (perf_counter() - start) / often


# --- in the process that measures ---


def on_ranks(verb: str, who: str, size: str) -> Prepare:
    often = (40 if SIZES[size][1] < 1000 else 8) // (1 if who == OURS else 4)

    def prepare(_: Any) -> Run:
        return Run(
            lambda: two_ranks().ask(result_of, verb, who, size)[1],  # on rank 1, which receives
            lambda: two_ranks().ask(seconds_of, verb, who, size, often)[0],
        )

    return prepare


def cases() -> list[Case]:
    return [
        Case(verb, size, {who: on_ranks(verb, who, size) for who in (OURS, LOOP)}) for size in SIZES for verb in VERBS
    ]


if __name__ == "__main__":
    main(__doc__, cases)
