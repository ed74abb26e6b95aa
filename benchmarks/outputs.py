"""Show which containers work as the output of a module under DDP and FSDP2: a table.

    python benchmarks/outputs.py [--json PATH]

On two gloo ranks, a linear layer is wrapped, called with different inputs on each rank, and run backward. The container
works if the gradient is the mean of the gradients of the ranks. Nothing is timed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from containers import CONTAINERS
from harness import Fields, Missing, aligned, optional, setting, write
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

ModelOutput = optional("transformers.utils", "ModelOutput")


def as_model_output(fields: Fields) -> Any:
    if isinstance(ModelOutput, Missing):
        return ModelOutput()

    @dataclass
    class Output(ModelOutput):
        y: object = None
        extra: object = None

    return Output(**fields)


RETURNED = {**CONTAINERS, "ModelOutput": as_model_output}
STEPS = 2


class Net(nn.Module):
    """Returns ``{"y": [2, 1], "extra": [2, 1]}`` for an input ``[2, 2]``."""

    def __init__(self, contain: Callable[[Fields], Any]) -> None:
        super().__init__()
        self.layer, self.other, self.contain = nn.Linear(2, 1), nn.Linear(2, 1), contain

    def forward(self, x: torch.Tensor) -> Any:
        return self.contain({"y": self.layer(x), "extra": self.other(x)})


def sharded(net: Net) -> nn.Module:
    """A model that contains the net. FSDP frees the parameters of the net after its forward."""
    fully_shard(net, reshard_after_forward=True)
    model = nn.Sequential(net)
    fully_shard(model)
    return model


UNUSED = "DDP, find_unused_parameters"  # there, the other layer is not part of the loss
WRAPPERS: dict[str, Callable[[Net], nn.Module]] = {
    "DDP": DistributedDataParallel,
    UNUSED: partial(DistributedDataParallel, find_unused_parameters=True),
    "DDP, static_graph": partial(DistributedDataParallel, static_graph=True),
    "FSDP2": sharded,
}


def verdict(rank: int, wrapper: str, who: str) -> str:
    torch.manual_seed(0)
    net = Net(RETURNED[who])
    model = WRAPPERS[wrapper](net)
    for step in range(STEPS):
        model.zero_grad()
        out = model(torch.full((2, 2), rank + step + 1.0))
        loss = out["y"].sum() + (0 if wrapper == UNUSED else out["extra"].sum())
        loss.backward()
        gradient: Any = net.layer.weight.grad
        if gradient is None:
            return "has no gradients"
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        if not torch.equal(gradient, torch.full((1, 2), 2 * (step + 1.5))):
            return "gradients are not synchronised"
    return "trains"


def on_rank(rank: int, wrapper: str, who: str, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.set_num_threads(1)
    try:
        said = verdict(rank, wrapper, who)
    except ImportError:
        said = "not installed"
    except Exception as error:
        said = shorten(f"{type(error).__name__}: {error}", 80)
    Path(folder, str(rank)).write_text(said)
    os._exit(0)  # the other rank may wait for this rank forever


def tried(wrapper: str, who: str) -> str:
    """The results of the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        ranks: Any = mp.start_processes(on_rank, (wrapper, who, folder), nprocs=2, join=False, start_method="spawn")
        for process in ranks.processes:
            process.join(60)
            process.kill()
        said = [file.read_text() if file.exists() else "never ends" for file in (Path(folder, "0"), Path(folder, "1"))]
        return " / ".join(dict.fromkeys(said))


def main() -> None:
    parser = argparse.ArgumentParser(description="Containers as a module's outputs under DDP and FSDP2.")
    parser.add_argument("--json", type=Path, help="write the results there too")
    args = parser.parse_args()
    said = {wrapper: {who: tried(wrapper, who) for who in RETURNED} for wrapper in WRAPPERS}
    for wrapper, by in said.items():
        print(wrapper)
        print(aligned([["", who, what] for who, what in by.items()]), flush=True)
    write(args.json, {**setting(["tensordict", "tianshou", "transformers"]), "results": said})


if __name__ == "__main__":
    main()
