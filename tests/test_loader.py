"""`collate` in a `DataLoader`, with workers and without."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from checks import check_invariants
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from workers import look_like_a_worker

from tensordict_lite import DeviceDict, Utf8, collate


class Samples(Dataset[dict[str, Any]]):
    def __init__(self, wrap: Any = dict, bad: int = -1) -> None:
        self.wrap, self.bad = wrap, bad

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return self.wrap(
            {"x": torch.full((3 + (index == self.bad),), float(index)), "name": "n" * index, "n": {"i": index}}
        )


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(Samples()[i] for i in range(12))


class OfItsClass(DeviceDict, encoders=lambda strings: torch.zeros(len(strings))):
    """It is found by name, and its encoder with it."""


class CountsPickles:
    code_ndim = 0

    def __init__(self) -> None:
        self.pickled = 0

    def encode(self, strings: Any) -> Tensor:
        return torch.zeros(len(strings))

    def decode(self, codes: Any) -> list[str]:
        return [""] * len(codes)

    def __reduce__(self) -> Any:
        self.pickled += 1
        return type(self), ()


class TestLoader:
    def check(self, loader: DataLoader[Any], workers: int, order: Any = range(12)) -> None:
        for _ in range(2):
            batches = list(loader)
            for d in batches:
                check_invariants(d)
                assert type(d) is DeviceDict and d.is_packed and not d["x"].is_shared()
            assert torch.cat([d["n", "i"] for d in batches]).tolist() == list(order)
            assert [name for d in batches for name in d.decode("name")] == ["n" * i for i in order]

    @pytest.mark.parametrize("wrap", [dict, DeviceDict])
    @pytest.mark.parametrize("context", [None, "fork", "forkserver"])
    def test_in_the_process_and_in_workers(self, context: str | None, wrap: Any) -> None:
        workers = 0 if context is None else 2
        given: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": context}
        self.check(DataLoader(Samples(wrap), batch_size=4, collate_fn=collate, **given), workers)

    def test_with_no_argument_at_all(self) -> None:
        self.check(DataLoader(Samples(DeviceDict), batch_size=4, num_workers=1), 1)

    @pytest.mark.slow
    @pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
    def test_persistent_workers_and_a_partial(self, context: str) -> None:
        loader = DataLoader(
            Samples(),
            batch_size=5,
            num_workers=1,
            collate_fn=partial(collate, encoders={"name": Utf8(12)}),
            multiprocessing_context=context,
            persistent_workers=True,
        )
        self.check(loader, 1)

    @pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
    def test_sharing_strategies(self, strategy: str) -> None:
        before = torch.multiprocessing.get_sharing_strategy()
        set_strategy(strategy)
        try:
            # A worker that is not forked starts with the default strategy.
            init = partial(set_strategy, strategy)
            loader = DataLoader(Wide(2 * BY_VALUE), 4, num_workers=1, collate_fn=collate, worker_init_fn=init)
            batches = list(loader)
        finally:
            set_strategy(before)
        assert all(d["x"].is_shared() for d in batches)
        assert torch.cat([d["y"][:, -1] for d in batches]).tolist() == list(range(8))

    def test_an_iterable_dataset(self) -> None:
        self.check(DataLoader(Stream(), batch_size=4, num_workers=1, collate_fn=collate), 1)

    @pytest.mark.parametrize("context", ["fork", "forkserver"])
    def test_an_error_in_a_worker_keeps_its_message(self, context: str) -> None:
        given: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": context}
        with pytest.raises(ValueError, match=r"'x': sample 1 has float32\[4\], sample 0 has float32\[3\]; to fill"):
            list(DataLoader(Samples(bad=5), batch_size=4, collate_fn=collate, **given))

    @pytest.mark.parametrize(
        "encoders",
        [{"name": lambda strings: torch.zeros(len(strings))}, lambda strings: torch.zeros(len(strings))],
        ids=["key", "all"],
    )
    def test_an_encoder_that_cannot_leave_a_worker_is_named(self, encoders: Any) -> None:
        made = partial(collate, encoders=encoders)
        assert made([Samples()[0]])["name"].tolist() == [0], "in the main process it may"
        loader = DataLoader(Samples(), batch_size=4, num_workers=1, collate_fn=made, multiprocessing_context="fork")
        with pytest.raises(
            TypeError,
            match="'name': the encoder <lambda> cannot be pickled, so the dict cannot be sent to another process",
        ):
            list(loader)
        with pytest.raises(TypeError, match=r"^the default encoder <lambda> cannot be pickled"):
            ForkingPickler.dumps(DeviceDict({"x": 1}, encoders=lambda strings: torch.zeros(len(strings))))

    def test_encoders_that_leave_a_worker(self) -> None:
        found = CountsPickles()
        batch = collate([{"a": "x", "n": {"b": "y", "a": "z"}}], encoders={"a": found, "b": found})
        again: Any = pickle.loads(ForkingPickler.dumps(batch))
        assert found.pickled == 1 and type(again.encoders["a"]) is CountsPickles and again == batch
        assert ForkingPickler.dumps(collate([{"x": 1.0}], cls=OfItsClass))

        class Local(CountsPickles):
            pass

        with pytest.raises(TypeError, match=r"^'\*': the encoder .* cannot be pickled"):
            ForkingPickler.dumps(collate([{"n": {"*": "x"}}], encoders={"*": Local()}))

    def test_a_batch_is_one_file_descriptor(self) -> None:
        loader = DataLoader(Samples(), batch_size=1, num_workers=1, collate_fn=collate)
        held = []
        before = len(os.listdir("/dev/fd"))
        for d in loader:
            held.append(d)
        assert len(os.listdir("/dev/fd")) - before <= len(held) + 4

    def test_pinning_is_one_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[Tensor] = []
        monkeypatch.setattr(Tensor, "pin_memory", lambda self, device=None: calls.append(self) or self.clone())
        pinned = collate([Samples()[i] for i in range(3)]).pin_memory()
        assert len(calls) == 1 and pinned.is_packed and pinned["n", "i"].tolist() == [0, 1, 2]

    def test_pinning_field_by_field_keeps_all_but_the_packing(self) -> None:
        # As a DataLoader of torch 2.9 and earlier does with every mapping.
        batch = collate([Samples()[i] for i in range(3)])

        def pinned(data: Any) -> Any:
            if isinstance(data, Tensor):
                return data.clone()
            clone = copy.copy(data)
            clone.update({key: pinned(value) for key, value in data.items()})
            return clone

        out = pinned(batch)
        check_invariants(out)
        assert batch.is_packed and not out.is_packed and out == batch and type(out["n"]) is DeviceDict
        assert out.decode("name") == batch.decode("name") and out.pack().is_packed

    def test_it_is_picklable(self) -> None:
        assert pickle.loads(pickle.dumps(partial(collate, pad={"x": 0})))([{"x": [1]}, {"x": [1, 2]}])["x"].shape == (
            2,
            2,
        )


def set_strategy(strategy: str, worker: int = 0) -> None:
    torch.multiprocessing.set_sharing_strategy(strategy)


class Wide(Dataset[Any]):
    """Samples of two fields: four make a batch of ``nbytes``."""

    def __init__(self, nbytes: int) -> None:
        self.count = nbytes // 32

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((self.count,), float(index)), "y": torch.full((self.count,), float(index))}


BY_VALUE = 1 << 20
"""The documented size in bytes up to which a batch is sent by value."""


class TestSize:
    """A small batch goes through the pipe. A large one is made in shared memory, and small ones allocate none."""

    @pytest.mark.parametrize(("wrap", "size", "context"), [
        (dict, BY_VALUE // 2, "fork"),
        (DeviceDict, BY_VALUE // 2, "forkserver"),
        (dict, BY_VALUE, "forkserver"),
        (DeviceDict, BY_VALUE, "fork"),
        (dict, 2 * BY_VALUE, "fork"),
        (DeviceDict, 2 * BY_VALUE, "forkserver"),
    ])  # fmt: skip
    def test_shared_memory_is_for_large_batches(self, wrap: Any, size: int, context: str) -> None:
        data: Any = [wrap(Wide(size)[i]) for i in range(8)]
        made = partial(counting, size)
        for d in DataLoader(data, 4, num_workers=1, collate_fn=made, multiprocessing_context=context):
            check_invariants(d)
            large = size > BY_VALUE
            assert d.is_packed and d.nbytes == size and d["x"].is_shared() == large
            d["x"].fill_(1.0)  # it is writable
            assert d["y"][1, 0] in (1.0, 5.0)

    @pytest.mark.parametrize("method", ["thread", "multiprocessing", None])
    def test_a_worker_that_is_a_thread_sends_nothing(self, method: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
        """After torch 2.15 a worker may be a thread, and `worker_method` says so. Older versions have no such name."""
        look_like_a_worker(monkeypatch, **({} if method is None else {"worker_method": method}))
        samples = [{"x": torch.ones(BY_VALUE), "o": object()} for _ in range(2)]
        is_thread, unsendable = method == "thread", partial(collate, samples, objects="keep")
        plain = [{"x": sample["x"]} for sample in samples]
        with ThreadPoolExecutor(1) as pool:
            if is_thread:
                assert pool.submit(unsendable).result()["o"][0] is samples[0]["o"]
            batches = [
                pool.submit(collate, plain).result(),
                collate(DeviceDict(plain[0]).rows.__getitems__([0, 1] * BY_VALUE)),
            ]
        assert [d["x"].is_shared() for d in batches] == [not is_thread] * 2

    @pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
    def test_pinning(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Tensor, "pin_memory", lambda self, device=None: self.clone())
        for d in DataLoader(Wide(1 << 16), 4, num_workers=1, collate_fn=collate, pin_memory=True):
            assert isinstance(d, DeviceDict) and d["y"][1, 0] in (1.0, 5.0)


def counting(size: int, samples: Any) -> DeviceDict[Any]:
    """`collate`, which allocates shared memory only for a large batch."""
    made: list[int] = []
    storage: Any = torch.UntypedStorage
    real = storage._new_shared
    storage._new_shared = lambda nbytes, **options: made.append(nbytes) or real(nbytes, **options)
    try:
        d = collate(samples)
    finally:
        storage._new_shared = real
    assert made == ([size] if size > BY_VALUE else [])
    return d
