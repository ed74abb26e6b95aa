"""torchdata: a run resumed from ``prefetch(StatefulDataLoader(...)).state_dict()`` repeats and skips nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import fails
from test_sendable import Made
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tensordict_lite import collate, prefetch

pytest.importorskip("torchdata")
from torchdata.stateful_dataloader import StatefulDataLoader

SAMPLES = [{"x": torch.full((2,), float(i)), "i": i} for i in range(14)]


class Stream(IterableDataset[Any]):
    """In this process its state is the list that it goes on to change."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        while len(self.seen) < len(SAMPLES):
            self.seen.append(len(self.seen))
            yield SAMPLES[self.seen[-1]]
        self.seen = []

    def state_dict(self) -> dict[str, Any]:
        # In a worker a copy, as torchdata sends what has changed since the last one.
        return {"seen": self.seen if get_worker_info() is None else list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


@pytest.fixture(params=["cpu", "sim:0"])
def where(request: pytest.FixtureRequest, streams: Any) -> str:
    """With streams of the simulated device, so that batches are fetched ahead."""
    return str(request.param)


def loader_of(workers: int, kind: str) -> Any:
    options: dict[str, Any] = {"batch_size": 2, "num_workers": workers, "collate_fn": collate}
    if kind == "stream":
        return StatefulDataLoader(Stream(), **options)
    generator = torch.Generator().manual_seed(5)
    return StatefulDataLoader(SAMPLES, shuffle=kind == "shuffled", generator=generator, **options)


def numbers(batches: Any) -> list[list[int]]:
    return [batch["i"].cpu().tolist() for batch in batches]


def taken(batches: Any, count: int) -> list[list[int]]:
    out: list[list[int]] = []
    for batch in batches:
        out.append(batch["i"].cpu().tolist())
        if len(out) == count:
            break
    return out


@pytest.mark.parametrize(
    ("workers", "kind"),
    [(0, "in order"), (0, "shuffled"), (0, "stream"), (2, "in order"), (2, "shuffled"), (1, "stream")],
)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_resumed_run_is_the_uninterrupted_one(where: str, depth: int, workers: int, kind: str) -> None:
    whole = numbers(loader_of(workers, kind))
    assert len(whole) == 7
    for count in (1, 4, 6) if not workers else (4,):
        first = prefetch(loader_of(workers, kind), where, depth=depth)
        assert taken(first, count) == whole[:count]
        state = first.state_dict()
        second = prefetch(loader_of(workers, kind), where, depth=depth)
        second.load_state_dict(copy.deepcopy(state))
        rest = iter(second)
        assert numbers(rest) == whole[count:]


def test_it_describes_what_was_handed_over(where: str) -> None:
    alone, batches = loader_of(0, "shuffled"), prefetch(loader_of(0, "shuffled"), where, depth=3)
    for _ in zip(batches, alone, strict=True):
        mine, expected = batches.state_dict(), alone.state_dict()
        assert mine["_num_yielded"] == expected["_num_yielded"]
    assert batches.state_dict()["_iterator_finished"]


def test_around_an_epoch_it_is_the_loaders(where: str) -> None:
    inner = loader_of(0, "in order")
    batches = prefetch(inner, where)
    assert batches.state_dict() == inner.state_dict() and batches.state_dict()["_num_yielded"] == 0
    assert len(numbers(batches)) == 7
    assert batches.state_dict() == inner.state_dict() and batches.state_dict()["_num_yielded"] == 7
    taken(batches, 2)
    assert batches.state_dict()["_num_yielded"] == 2
    state = copy.deepcopy(batches.state_dict())
    state["changed"] = True
    assert "changed" not in batches.state_dict()
    batches.load_state_dict(batches.state_dict())
    assert batches.state_dict() == inner.state_dict()


def test_a_loader_without_a_state(where: str) -> None:
    batches = prefetch(DataLoader(SAMPLES, batch_size=2, collate_fn=collate), where)
    assert not hasattr(batches, "state_dict") and not hasattr(batches, "load_state_dict")
    assert len(numbers(batches)) == 7


def test_an_error_of_the_loader_leaves_the_state_of_the_last_batch(where: str, tmp_path: Path) -> None:
    class Broken(Stream):
        def __iter__(self) -> Iterator[Any]:
            for i, sample in enumerate(super().__iter__()):
                if i == 5:
                    raise OSError("broken")
                yield sample

    batches = prefetch(StatefulDataLoader(Broken(), batch_size=2, collate_fn=collate), where, depth=3)
    fails(OSError, "broken", lambda: numbers(batches))
    if where != "cpu":
        assert batches.state_dict()["_num_yielded"] == 2


@pytest.mark.parametrize("within", ["alone", "tuple"])
def test_a_dict_that_cannot_be_pickled_raises_and_the_loader_goes_on(within: str) -> None:
    batches = iter(StatefulDataLoader(Made("kept", within), batch_size=None, num_workers=1, timeout=60))
    next(batches)
    with pytest.raises(
        TypeError, match=r"(?s)in DataLoader worker process 0.*'f': the kept function cannot be pickled"
    ):
        next(batches)[1]["x"]
    assert next(batches) is not None
    with pytest.raises(StopIteration):
        next(batches)
