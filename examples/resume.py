"""Train on two sources, get killed on two ranks, and go on: on two ranks bit for bit, on three without losing a row.

    python examples/resume.py

Three of four rows are texts, one is code. A batch has 128 tokens at most, and the ranks get equal numbers of tokens.
Every 10 steps, rank 0 saves the weights, the optimizer, the random generator, and the order of the rows.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tensordict_lite import BatchOrder, DeviceDict, JoinedRows, Ragged, collate, prefetch

TEXTS, CODE, TOKENS, SAVE_EVERY, KILLED_AT = 600, 100, 128, 10, 25


def table(first: int, count: int, label: int) -> DeviceDict[Any]:
    """Sequences of 5 to 34 tokens. Both labels have half of their tokens in common."""
    ids = [torch.randint(20 * label, 20 * label + 40, (length,)) for length in torch.randint(5, 35, (count,)).tolist()]
    row = torch.arange(first, first + count)
    return DeviceDict({"ids": Ragged.from_rows(ids), "row": row, "label": torch.full_like(row, label)})


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(60, 2)

    def forward(self, ids: Ragged) -> Tensor:
        return F.dropout(self.bag(ids.values, ids.offsets[:-1]), 0.1)


def on_rank(rank: int, world: int, folder: Path, name: str, resumed: bool, killed_at: int) -> None:
    """Train with other ranks. They meet in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / name}.meeting", rank=rank, world_size=world)
    train(rank, world, folder, name, resumed, killed_at)
    gc.collect()  # objects in reference cycles hold the group, and its threads would run on at exit
    dist.barrier()
    dist.destroy_process_group()


def train(rank: int, world: int, folder: Path, name: str, resumed: bool, killed_at: int) -> None:
    """Train one epoch on one rank."""
    torch.manual_seed(0)
    sources = [table(0, TEXTS, 0), table(TEXTS, CODE, 1)]
    orders = [BatchOrder(each.rows, tokens=TOKENS, lengths=each["ids"].lengths, shuffle=True) for each in sources]
    # With `drop_last`, each rank has as many steps.
    order = BatchOrder.mix(orders, [3, 1], tokens=TOKENS, stop="all", rank=rank, world=world, drop_last=True)
    batches = prefetch(DataLoader(JoinedRows(sources), batch_sampler=order, collate_fn=collate), "cpu")
    model = DistributedDataParallel(Classifier())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seen, step = torch.zeros(TEXTS + CODE, dtype=torch.int64), 0  # how often each row came
    if resumed:
        state: dict[str, Any] = torch.load(folder / "killed.pt", weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        batches.load_state_dict(state["order"])
        seen, step = state["seen"] if rank == 0 else seen, state["step"]
        torch.set_rng_state(state["rng"][rank % len(state["rng"])])  # `prefetch` draws nothing from this generator

    def save() -> None:
        everywhere, rng = seen.clone(), [torch.get_rng_state() for _ in range(world)]
        dist.all_reduce(everywhere)
        dist.all_gather(rng, rng[0].clone())
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "rng": rng}
        state |= {"order": batches.state_dict(), "seen": everywhere, "step": step}
        if rank == 0:
            torch.save(state, folder / f"{name}.tmp")  # then rename it: a kill leaves a whole checkpoint
            (folder / f"{name}.tmp").replace(folder / f"{name}.pt")

    for batch in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(batch["ids"]), batch["label"]).backward()
        optimizer.step()
        seen[batch["row"]] += 1
        step += 1
        if step % SAVE_EVERY == 0:
            save()
        if step == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
    save()
    if rank == 0:
        print(f"{name}: step {step}, {batches.report()}", flush=True)


def run(folder: Path) -> None:
    """Raise ``SystemExit`` if a weight differs, or if a row was lost or came again."""

    def start(world: int, name: str, resumed: bool, killed_at: int = 0) -> Any:
        mp.start_processes(on_rank, (world, folder, name, resumed, killed_at), nprocs=world, start_method="forkserver")
        return torch.load(folder / f"{name}.pt", weights_only=True)

    whole = start(2, "whole", resumed=False)
    try:
        start(2, "killed", resumed=False, killed_at=KILLED_AT)
    except (mp.ProcessExitedException, mp.ProcessRaisedException):  # killed, or told by gloo that its peer was
        print(f"killed after step {KILLED_AT}")
    same, other = start(2, "two ranks again", resumed=True), start(3, "three ranks", resumed=True)
    if any(not weight.equal(same["model"][key]) for key, weight in whole["model"].items()):
        raise SystemExit("the weights differ after the resumption")
    print("on two ranks: the same weights, bit for bit")
    texts, code = other["seen"].split([TEXTS, CODE])
    if texts.max() > 1 or code.max() > 2 or code.min() < 1:
        raise SystemExit("a row came again, or was lost")
    print(f"on three ranks: {texts.sum()} of {TEXTS} texts came once, the last step is left out")


if __name__ == "__main__":
    # Imports torch, and what its optimizers import too, once and not in each process.
    multiprocessing.set_forkserver_preload(["tensordict_lite", "torch._dynamo"])
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder))
