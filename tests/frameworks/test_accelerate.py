"""accelerate: its operations, `prepare`, `gather_for_metrics` and `dispatch_batches`, alone and on two ranks."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from checks import check_invariants, fails
from ranks import on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from tensordict_lite import BatchOrder, DeviceDict, Ragged, TypedDeviceDict, cat, collate, prefetch

pytest.importorskip("accelerate")
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import operations


class Kept(DeviceDict, objects="keep"):
    """What `dispatch_batches` needs: it puts descriptions where tensors were."""


class Typed(TypedDeviceDict, objects="keep"):
    x: Tensor
    n: Kept


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, batch: DeviceDict) -> DeviceDict:
        return DeviceDict({"y": self.layer(batch["x"]), "id": batch["n", "id"]})


class Stream(IterableDataset[Any]):
    def __init__(self, cls: type[Any], count: int) -> None:
        self.cls, self.count = cls, count

    def __iter__(self) -> Iterator[Any]:
        for i in range(self.count):
            yield self.cls({"x": torch.full((2,), float(i)), "n": {"id": torch.tensor(i)}})


def sample(cls: type[Any] = DeviceDict, count: int = 4) -> Any:
    return cls({"x": torch.arange(2.0 * count).reshape(count, 2), "n": {"id": torch.arange(count)}})


@pytest.mark.parametrize("cls", [DeviceDict, Kept, Typed])
def test_operations(cls: type[Any]) -> None:
    d = sample(cls)
    moved = operations.send_to_device(d, "cpu", non_blocking=True)
    assert moved is d and operations.find_batch_size(d) == 4
    sliced = operations.slice_tensors(d, slice(0, 2))
    joined = operations.concatenate([sliced, sliced])
    full = operations.convert_to_fp32(d.half())
    for out in (sliced, joined, full, operations.recursively_apply(lambda t: t + 1, d)):
        check_invariants(out)
        assert type(out) is cls and type(out["n"]) is type(d["n"])
    assert len(joined.rows) == 4 and full["x"].dtype == torch.float32
    listed = operations.listify(d)["n"]["id"]  # lists become tensors again, but where only tensors are tensors
    assert (listed.tolist() if cls is DeviceDict else listed) == [0, 1, 2, 3]
    if cls is not DeviceDict:
        structure = pickle.loads(pickle.dumps(operations.get_data_structure(d)))
        assert type(structure) is cls and structure["x"].shape == (4, 2)
        made = operations.initialize_tensors(structure)
        check_invariants(made)
        assert type(made) is cls and made["x"].shape == (4, 2) and made["n"]["id"].dtype == torch.int64


def test_operations_of_ragged_fields() -> None:
    """They are moved and kept, and never cut or joined as if the offsets were rows."""
    field = Ragged.from_rows([[1.0, 2.0], [3.0], [], [4.0]])
    d = DeviceDict({"x": torch.arange(4), "r": field})
    assert operations.send_to_device(d, "meta")["r"].max_length == 2
    assert operations.send_to_device([field], "meta")[0].device == torch.device("meta")
    assert operations.convert_to_fp32(d.half()) == d and operations.find_batch_size(d) == 4
    for given in (d.select("r"), field):
        with pytest.raises(TypeError, match=r"Can only concatenate tensors but got .*Ragged"):
            operations.concatenate([given, given])
        with pytest.raises(TypeError, match=r"Unsupported types .*Ragged"):
            operations.pad_across_processes(given)
    whole = operations.slice_tensors(d, slice(0, 2))  # it cuts tensors only, and tells nobody
    assert whole["r"] == field
    fails(ValueError, r"'x' \[2\], 'r' \[4, \*\]$", lambda: len(whole.rows))


def gather_ragged(rank: int) -> None:
    accelerator = Accelerator(cpu=True)
    field = Ragged.from_rows([[1.0 + rank, 2.0], [3.0]])
    rows = accelerator.gather_for_metrics(field)  # the rows of all ranks
    assert [row.tolist() for row in rows] == [[1.0, 2.0], [3.0], [2.0, 2.0], [3.0]]
    for call in (accelerator.gather, accelerator.pad_across_processes):
        with pytest.raises(Exception, match=r"Unsupported types .*Ragged"):
            call(DeviceDict({"r": field}))
    assert accelerator.gather(torch.tensor([rank])).tolist() == [0, 1]  # the ranks are in step


def test_ragged_fields_on_two_ranks() -> None:
    on_ranks(gather_ragged)


def train(rank: int, cls: type[Any]) -> None:
    accelerator = Accelerator(cpu=True)
    samples = [cls({"x": torch.full((2,), float(i)), "n": {"id": torch.tensor(i)}}) for i in range(7)]
    model, optimizer, loader = accelerator.prepare(
        Model(), torch.optim.SGD(Model().parameters()), DataLoader(samples, batch_size=2)
    )
    ids: list[int] = []
    for batch in loader:
        assert type(batch) is cls
        check_invariants(batch)
        out = model(batch)
        accelerator.backward(out["y"].sum())
        optimizer.step()
        gathered = accelerator.gather_for_metrics(out)
        check_invariants(gathered)
        assert type(gathered) is DeviceDict
        ids += gathered["id"].tolist()
        padded = accelerator.pad_across_processes(DeviceDict({"p": torch.ones(rank + 1)}))
        assert padded["p"].shape == (accelerator.num_processes,)
    assert sorted(ids) == list(range(7)), ids
    dispatched = (
        accelerator.prepare(DataLoader(Stream(cls, 8), batch_size=2, collate_fn=collate))
        if cls is not DeviceDict
        else ()
    )
    for batch in dispatched:
        assert type(batch) is cls and type(batch["n"]) is Kept
        check_invariants(batch)
    if cls is DeviceDict:
        go_on(accelerator)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def go_on(accelerator: Accelerator) -> None:
    """Two batches of an order with ranks, which needs no `prepare`, and the rows that are left through `prepare`."""
    rows, rank = sample(count=23).rows, {"rank": accelerator.process_index, "world": accelerator.num_processes}
    order = BatchOrder(rows, 3, shuffle=True, **rank)
    batches = prefetch(DataLoader(rows, batch_sampler=order, collate_fn=collate), accelerator.device)
    taken = cat(list(islice(batches, 2)))["n", "id"]
    # `prepare` gives the batches of one rank in turn to all ranks. In the last step it repeats rows.
    alone = BatchOrder(rows, 3, shuffle=True)
    alone.load_state_dict(batches.state_dict())
    loader: Any = accelerator.prepare(DataLoader(rows, batch_sampler=alone, collate_fn=collate))
    rest = [accelerator.gather_for_metrics(batch)["n", "id"] for batch in loader]
    assert sorted(torch.cat([accelerator.gather(taken), *rest]).tolist()) == list(range(23))
    order.set_epoch(1)  # `prepare` sets the next epoch itself
    assert next(iter(loader))["n", "id"].tolist() == next(iter(order))


@pytest.mark.parametrize("cls", [DeviceDict, Kept, Typed])
def test_on_two_ranks(cls: type[Any]) -> None:
    on_ranks(train, cls)


def test_alone() -> None:
    PartialState._reset_state()
    try:
        train(0, DeviceDict)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
