"""A training on ranks that is killed: it goes on in the same number of ranks, bit for bit, and in another one."""

from __future__ import annotations

import os
import signal
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checks import fails
from ranks import on_ranks
from torch import nn
from torch.multiprocessing.spawn import ProcessExitedException
from torch.utils.data import DataLoader

from tensordict_lite import BatchOrder, DeviceDict, collate, distributed, prefetch

ROWS, BATCH, SAVED, KILLED = 52, 4, 3, 5  # every rank has a batch in the last step, with two ranks and with four
Step = tuple[int, float, list[list[int]]]
"""An epoch, the loss over all ranks, and the rows of each rank."""


def table() -> DeviceDict:
    x = torch.rand(ROWS, 3, generator=torch.Generator().manual_seed(0))
    return DeviceDict({"i": torch.arange(ROWS), "x": x, "y": x.sum(1)})


def train(world: int, group: Any, epochs: int, saved: Path | None = None, folder: Path | None = None) -> list[Step]:
    """Train with dropout. ``folder``: save after `SAVED` steps of the second epoch, and be killed two steps later."""
    rank = dist.get_rank(group)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    torch.manual_seed(2 + rank)
    weights = DeviceDict(model.state_dict())  # the tensors of the model
    momentum = weights.clone().zero_()  # torch.optim would import its compiler in every process, for seconds
    data = table()
    order = BatchOrder(data.rows, BATCH, shuffle=True, rank=rank, world=world)
    batches = prefetch(DataLoader(data.rows, batch_sampler=order, collate_fn=collate), "cpu")
    if saved is not None:
        state = torch.load(saved / "state.pt", weights_only=True)
        weights.copy_(state["weights"])
        momentum.copy_(state["momentum"])
        batches.load_state_dict(state["order"])
        if world == len(state["rng"]):
            torch.set_rng_state(state["rng"][rank])
    steps: list[Step] = []
    for epoch in order.epochs(epochs):
        for number, batch in enumerate(batches, 1):
            loss = (model(batch["x"]).squeeze(1) - batch["y"]).square().mean()
            grads = torch.autograd.grad(loss, list(model.parameters()))
            told = DeviceDict({"loss": loss.detach(), **dict(zip(weights, grads, strict=True))})
            mean = distributed.all_reduce(told, "mean", group=group)
            momentum.mul_(0.9).add_(mean.drop("loss"))
            weights.sub_(momentum.clone().mul_(0.01))
            everyone = distributed.all_gather(DeviceDict({"i": batch["i"]}), group=group)
            steps.append((epoch, mean["loss"].item(), [one["i"].tolist() for one in everyone]))
            if folder is None or epoch != 1:
                continue
            if number == SAVED:
                rng = distributed.all_gather(DeviceDict({"rng": torch.get_rng_state()}), group=group)
                state = {"weights": weights, "momentum": momentum, "order": batches.state_dict(), "steps": steps}
                if rank == 0:
                    torch.save({**state, "rng": [one["rng"] for one in rng]}, folder / "state.pt")
            if number == KILLED and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    return steps


def killed(rank: int, folder: Path) -> None:
    train(2, None, 2, folder=folder)


def resumed(rank: int, folder: Path) -> None:
    pair = dist.new_group([0, 1])
    if rank < 2:
        whole, rest = train(2, pair, 3), train(2, pair, 3, folder)
        if rank == 0:
            torch.save((whole, rest), folder / "pair.pt")
    four = train(4, None, 3, folder)
    if rank == 0:
        torch.save(four, folder / "four.pt")


@pytest.mark.ranks
def test_a_killed_run_goes_on_in_any_number_of_ranks(tmp_path: Path) -> None:
    fails(ProcessExitedException, "terminated with signal SIGKILL", lambda: on_ranks(killed, tmp_path))
    on_ranks(resumed, tmp_path, count=4)
    before: list[Step] = torch.load(tmp_path / "state.pt")["steps"]
    whole, rest = torch.load(tmp_path / "pair.pt")
    assert len(before) == 7 + SAVED and before + rest == whole, "the losses go on bit for bit"
    four: list[Step] = torch.load(tmp_path / "four.pt")
    for epoch in range(3):
        for steps in (whole, before + four):
            rows = [row for at, _, ranks in steps if at == epoch for row in chain.from_iterable(ranks)]
            assert sorted(rows) == list(range(ROWS))
