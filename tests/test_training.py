"""In a training program: DataLoader and its default collate, pinning, and DDP on two real ranks."""

from __future__ import annotations

import copy
import os
from itertools import product
from typing import Any

import pytest
import torch
from checks import check_invariants
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import ConcatDataset, DataLoader, Dataset, default_collate, default_convert

from tensordict_lite import DeviceDict, DeviceMismatchError


class Samples(Dataset[DeviceDict]):
    def __init__(self, bad: bool = False) -> None:
        self.samples = [
            DeviceDict({"x": torch.full((2,), float(i)), "n": {"i": i}}, encoders={"s": len_hook}) for i in range(6)
        ]
        self.bad = bad

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> DeviceDict:
        if self.bad:
            DeviceDict({"x": 1})["y"] = torch.zeros(1, device="meta")
        return self.samples[index]


def packed(samples: list[DeviceDict]) -> DeviceDict:
    """A batch of twenty fields in one storage."""
    x = torch.stack([sample["x"] for sample in samples])
    return DeviceDict({f"k{i}": x + i for i in range(20)}).pack()


def len_hook(strings: Any) -> Tensor:
    return torch.tensor([len(s) for s in strings])


def test_default_collate_batches_and_leaves_the_samples_alone() -> None:
    samples = Samples().samples
    before = [copy.deepcopy(s) for s in samples]
    for batch in (default_collate(samples), default_convert(default_collate(samples))):
        check_invariants(batch)
        assert type(batch) is DeviceDict and type(batch["n"]) is DeviceDict
        assert batch["x"].shape == (6, 2) and batch["n", "i"].tolist() == list(range(6))
    assert samples == before


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_many_packed_batches_from_workers_can_be_held(context: str) -> None:
    """Each costs one file descriptor, where one a field would run out of them."""
    resource = pytest.importorskip("resource", reason="POSIX alone counts file descriptors so")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = 150
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + room, hard))
    try:
        loader = DataLoader(
            ConcatDataset([Samples()] * 10), num_workers=2, collate_fn=packed, multiprocessing_context=context
        )
        held = list(loader)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(held) == 60 and sum(len(batch) for batch in held) > 2 * room
    for i, batch in enumerate(held):
        check_invariants(batch)
        assert batch.is_packed and batch["k3"].tolist() == [[i % 6 + 3.0] * 2]


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_a_loader_with_workers(context: str) -> None:
    loader = DataLoader(Samples(), batch_size=3, num_workers=2, multiprocessing_context=context)
    batches = list(loader)
    for batch in batches:
        check_invariants(batch)
        assert type(batch) is DeviceDict and batch.encoders.keys() == {"s"}
    assert torch.cat([b["n", "i"] for b in batches]).tolist() == list(range(6))


def test_the_error_of_a_worker_reaches_the_user_with_its_message() -> None:
    with pytest.raises(DeviceMismatchError, match="'y' is on meta, this DeviceDict is on cpu"):
        list(DataLoader(Samples(bad=True), num_workers=1))


def test_both_ways_a_loader_pins() -> None:
    """torch to 2.9 copies and updates a Mapping. Later ones call ``pin_memory`` if it exists, maybe with a device."""
    d = DeviceDict({"x": torch.ones(2), "n": {"y": 1}})
    before = d.copy()
    clone = copy.copy(d)
    clone.update({key: value.clone() for key, value in d.items()})
    check_invariants(clone)
    assert clone == d and d["x"] is before["x"]
    if torch.cuda.is_available():
        assert d.pin_memory("cuda").is_pinned() and not d.is_pinned()
        batch = next(iter(DataLoader(Samples(), batch_size=2, pin_memory=True)))
        assert type(batch) is DeviceDict and batch.is_pinned()


class Net(nn.Module):
    """Takes and gives a DeviceDict; one layer is only used on some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.sometimes = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, batch: DeviceDict, both: bool) -> DeviceDict:
        out = DeviceDict({"y": self.used(batch["x"]), "n": {"z": batch["x"].sum()}})
        return out | {"w": self.sometimes(batch["x"])} if both else out


class WithFunctions(Net):
    """Applies functions of torch to whole dicts."""

    def forward(self, batch: Any, both: bool) -> Any:
        parts: Any = torch.split(torch.clone(batch), 1)
        out: Any = torch.cat([part.map(self.used) for part in parts])
        return out | {"w": self.sometimes(batch["x"])} if both else out


def _steps(rank: int) -> None:
    for net, mode in product((Net, WithFunctions), ("plain", "find_unused_parameters", "static_graph")):
        torch.manual_seed(0)
        options = {} if mode == "plain" else {mode: True}
        model = DistributedDataParallel(net(), **options)  # pyright: ignore[reportArgumentType]
        both = mode != "find_unused_parameters"
        for step in range(2):
            batch = DeviceDict({"x": torch.tensor([[float(rank + 1), float(step)]])})
            out: Any = model(batch, both)
            assert type(out) is DeviceDict
            check_invariants(out)
            model.zero_grad()
            sum([t.sum() for key, t in out.items() if key != "n"], torch.zeros(())).backward()
            # The gradient of a linear layer's weight is its input: the mean over both ranks, if they were synchronised.
            assert model.module.used.weight.grad.tolist() == [[1.5, float(step)]], (net, mode, rank)


@pytest.mark.ranks
def test_ddp_synchronises_gradients_with_a_device_dict_as_output() -> None:
    on_ranks(_steps)
