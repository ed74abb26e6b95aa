"""Prefetching: batches ahead on a stream of their own, in order, and nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import simulated
import torch
from torch.utils.data import DataLoader, IterableDataset
from tqdm import tqdm

from tensordict_lite import DeviceDict, collate, prefetch
from tensordict_lite._batch import prefetch as prefetch_module


def samples(n: int = 8) -> list[dict[str, Any]]:
    return [{"x": torch.full((2,), float(i)), "i": i} for i in range(n)]


def loader(workers: int = 0, **options: Any) -> DataLoader[Any]:
    return DataLoader(samples(), batch_size=2, num_workers=workers, collate_fn=collate, **options)  # pyright: ignore[reportArgumentType]


class TestOnAnyDevice:
    @pytest.mark.parametrize("workers", [0, 1])
    def test_every_epoch_has_all_batches_in_order(self, device: torch.device, workers: int) -> None:
        for where in (device, "cpu"):
            batches = prefetch(loader(workers), where)
            for _ in range(2):
                got = list(batches)
                assert [d["i"].tolist() for d in got] == [[0, 1], [2, 3], [4, 5], [6, 7]]
                for d in got:
                    d._check()
                    assert d.device == torch.device(where) and d.is_packed

    def test_it_stands_for_the_loader(self) -> None:
        inner = loader()
        batches = prefetch(inner, "cpu", depth=3)
        assert len(batches) == 4 and batches.dataset is inner.dataset and batches.sampler is inner.sampler
        assert batches.batch_sampler is inner.batch_sampler and batches.batch_size == 2 and batches.loader is inner
        with pytest.raises(AttributeError, match="nonsense"):
            _ = batches.nonsense
        bar = tqdm(batches, disable=False, leave=False)
        assert bar.total == 4 and len(list(bar)) == 4

    def test_without_a_length(self) -> None:
        class Stream(IterableDataset[Any]):
            def __iter__(self) -> Iterator[Any]:
                return iter(samples())

        batches = prefetch(DataLoader(Stream(), batch_size=2, collate_fn=collate), "cpu")
        with pytest.raises(TypeError):
            len(batches)
        assert len(list(batches)) == 4 and tqdm(batches, disable=False, leave=False).total is None

    def test_plain_containers(self, device: torch.device) -> None:
        pairs = prefetch([({"x": torch.ones(2)}, "label", [torch.zeros(1)])], device)
        (moved,) = list(pairs)
        assert moved[0]["x"].device == moved[2][0].device == device and moved[1] == "label"

    def test_what_is_no_depth_and_no_device(self) -> None:
        with pytest.raises(ValueError, match=r"prefetch takes a depth of at least 1, an int, got 1\.5"):
            prefetch([], "cpu", depth=1.5)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="nonsense"):
            prefetch([], "nonsense")

    def test_nothing_is_left_behind_after_a_break(self, device: torch.device) -> None:
        threads, children = set(threading.enumerate()), set(multiprocessing.active_children())
        for _ in prefetch(loader(workers=1), device):
            break
        gc.collect()
        end = time.monotonic() + 30  # the loader's own queue lets its thread end in its own time
        while set(threading.enumerate()) - threads and time.monotonic() < end:
            time.sleep(0.01)
        assert set(threading.enumerate()) <= threads and set(multiprocessing.active_children()) <= children


class Module:
    """Stands in for ``torch.cuda``: notes what is asked of streams and events. The device is simulated."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.streams = ["main"]
        module = self

        class Event:
            count = 0

            def __init__(self) -> None:
                self.name = f"copy {Event.count}"
                Event.count += 1

            def record(self, stream: Any) -> None:
                module.log.append(f"{self.name} under way")

            def synchronize(self) -> None:
                module.log.append(f"host waits for {self.name}")

        class Stream:
            def __init__(self, device: Any = None) -> None:
                pass

            def wait_stream(self, other: Any) -> None:
                module.log.append("side waits for main")

        class Current:
            def wait_event(self, event: Any) -> None:
                module.log.append(f"main waits for {event.name}")

        self.Event, self.Stream, self.current = Event, Stream, Current()

    def current_stream(self, device: Any = None) -> Any:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.streams.append("side")
        yield
        self.streams.pop()


class TestStreams:
    """The order of things on a device with streams, on a machine without one."""

    @pytest.fixture
    def module(self, monkeypatch: pytest.MonkeyPatch) -> Module:
        module = Module()
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: module.log.append("recorded"))
        return module

    def ahead(self, batches: Any, module: Module, depth: int = 2) -> Iterator[Any]:
        return prefetch_module._ahead(iter(batches), torch.device("sim:0"), depth, module)

    def test_the_next_ones_are_under_way_before_one_is_handed_over(self, module: Module) -> None:
        batches = self.ahead([DeviceDict({"x": float(i)}) for i in range(4)], module)
        assert next(batches)["x"].item() == 0
        assert module.log == [
            "copy 0 under way", "host waits for copy 0", "copy 1 under way", "host waits for copy 1", "copy 2 under way",
            "main waits for copy 0", "recorded",
        ]  # fmt: skip
        module.log.clear()
        assert next(batches)["x"].item() == 1
        assert module.log == ["host waits for copy 2", "copy 3 under way", "main waits for copy 1", "recorded"]
        module.log.clear()
        assert [d["x"].item() for d in batches] == [2, 3]
        assert "under way" not in "".join(module.log) and module.log[-1] == "host waits for copy 3"

    @pytest.mark.parametrize("depth", [1, 2, 5])
    def test_so_many_and_no_more_are_fetched_ahead(self, module: Module, depth: int) -> None:
        fetched: list[int] = []

        def source() -> Iterator[Any]:
            for i in range(10):
                fetched.append(i)
                yield {"x": torch.full((1,), float(i))}

        for i, d in enumerate(self.ahead(source(), module, depth)):
            assert d["x"].item() == i and len(fetched) == min(10, i + 1 + depth)

    def test_an_exception_comes_at_its_batch(self, module: Module) -> None:
        def source() -> Iterator[Any]:
            yield {"x": torch.zeros(1)}
            yield {"x": torch.ones(1)}
            raise KeyError("broken")

        batches = self.ahead(source(), module, depth=5)
        assert next(batches)["x"].item() == 0 and next(batches)["x"].item() == 1
        with pytest.raises(KeyError, match="broken"):
            next(batches)
        assert list(batches) == []

    def test_what_is_on_the_device_already_may_still_be_computed_there(self, module: Module) -> None:
        list(self.ahead([{"x": torch.ones(1, device="sim:1")}], module))
        assert module.log[0] == "side waits for main"

    def test_a_failing_copy_comes_at_its_batch(self, module: Module) -> None:
        batches = self.ahead([{"x": torch.zeros(n)} for n in (10, 10, 10_000)], module, depth=5)
        with simulated.memory_left(2000):
            assert len(next(batches)["x"]) == len(next(batches)["x"]) == 10
            with pytest.raises(torch.OutOfMemoryError):
                next(batches)

    def test_a_loader_that_uses_its_memory_again(self, module: Module) -> None:
        memory = torch.zeros(2)

        def source() -> Iterator[Any]:
            for i in range(5):
                memory.fill_(i)
                yield {"x": memory}

        assert [d["x"].tolist() for d in self.ahead(source(), module)] == [[i, i] for i in range(5)]

    @pytest.mark.parametrize("to_the_end", [False, True])
    def test_a_break_or_an_error_lets_go_of_all_without_the_garbage_collector(
        self, module: Module, to_the_end: bool
    ) -> None:
        class Source:
            def __init__(self) -> None:
                self.left = 3

            def __iter__(self) -> Source:
                return self

            def __next__(self) -> Any:
                self.left -= 1
                if not self.left:
                    raise ValueError("broken")
                return DeviceDict({"x": torch.ones(1)})

        gc.disable()
        try:
            source = Source()
            gone = weakref.ref(source)
            batches = self.ahead(source, module, depth=5)
            kept = weakref.ref(next(batches))
            del source
            if to_the_end:
                with pytest.raises(ValueError, match="broken"):
                    list(batches)
            else:
                batches.close()  # pyright: ignore[reportAttributeAccessIssue]  # as a loop does that is left by break
            del batches
            assert gone() is None and kept() is None and module.log[-1] == "host waits for copy 1"
        finally:
            gc.enable()


@pytest.mark.device
class TestOnCuda:
    @pytest.mark.parametrize("pin", [False, True])
    def test_batches_are_whole_under_busy_streams(self, pin: bool) -> None:
        n = 1 << 20
        batches = [DeviceDict({"x": torch.full((n,), float(i)), "y": torch.full((n,), i)}).pack() for i in range(20)]
        source = [d.pin_memory() for d in batches] if pin else batches
        totals = []
        for d in prefetch(source, "cuda"):
            torch.cuda._sleep(1_000_000)
            totals.append((d["x"] * 1.0).mean() + d["y"].double().mean())
        assert [total.item() for total in totals] == [2.0 * i for i in range(20)]

    def test_it_leaves_no_memory_behind(self) -> None:
        before = torch.cuda.memory_allocated()
        for _ in prefetch(loader(), "cuda"):
            break
        gc.collect()
        assert torch.cuda.memory_allocated() == before
