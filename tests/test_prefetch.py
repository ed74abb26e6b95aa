"""Prefetching: batches ahead on a stream of their own, in order, and nothing left behind."""

from __future__ import annotations

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
from checks import check_invariants, fails
from torch.utils.data import DataLoader, IterableDataset
from tqdm import tqdm

from tensordict_lite import DeviceDict, collate, prefetch


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
                    check_invariants(d)
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

    def test_any_iterable(self, device: torch.device) -> None:
        def batches() -> Iterator[Any]:
            for i in range(3):
                yield torch.full((2,), float(i))

        class Indexed:
            def __getitem__(self, i: int) -> Any:
                if i == 3:
                    raise IndexError
                return torch.full((2,), float(i))

        sources: list[Any] = [
            batches(), list(batches()), map(torch.clone, batches()), Indexed(), prefetch(list(batches()), "cpu"),
        ]  # fmt: skip
        for source in sources:
            moved = prefetch(source, device, max_bytes=1 << 20)
            assert [t.tolist() for t in moved] == [[0, 0], [1, 1], [2, 2]]
        with pytest.raises(TypeError):
            len(prefetch(batches(), device))

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
        with pytest.raises(ValueError, match=r"prefetch takes a depth of at least 1, an int, or None, got 1\.5"):
            prefetch([], "cpu", depth=1.5)  # type: ignore[arg-type]
        fails(RuntimeError, "nonsense", lambda: prefetch([], "nonsense"))

    @pytest.mark.parametrize("wrong", [0, 1.5, "1"], ids=repr)
    def test_what_is_no_number_of_bytes(self, wrong: Any) -> None:
        with pytest.raises(ValueError, match=r"prefetch takes max_bytes of at least 1, an int, or None, got "):
            prefetch([], "cpu", max_bytes=wrong)

    def test_nothing_is_left_behind_after_a_break(self, device: torch.device) -> None:
        threads, children = set(threading.enumerate()), set(multiprocessing.active_children())
        for _ in prefetch(loader(workers=1), device):
            break
        gc.collect()
        end = time.monotonic() + 30  # the loader's own queue lets its thread end in its own time
        while set(threading.enumerate()) - threads and time.monotonic() < end:
            time.sleep(0.01)
        assert set(threading.enumerate()) <= threads and set(multiprocessing.active_children()) <= children


SIM = simulated.SIM


def told(streams: simulated.Streams) -> list[str]:
    """What was asked of streams and events, without the copies."""
    return [line for line in streams.log if "h2d" not in line and "pinned" not in line]


class TestStreams:
    """The order of things on a device with streams, on a machine without one."""

    def ahead(self, batches: Any, depth: int = 2, max_bytes: int | None = None) -> Iterator[Any]:
        return iter(prefetch(batches, SIM, depth=depth, max_bytes=max_bytes))

    def test_the_next_ones_are_under_way_before_one_is_handed_over(self, streams: simulated.Streams) -> None:
        batches = self.ahead([DeviceDict({"x": float(i)}) for i in range(4)])
        assert next(batches)["x"].item() == 0
        assert told(streams) == [
            "copy 0 under way", "host waits for copy 0", "copy 1 under way", "host waits for copy 1",
            "copy 2 under way", "recorded",
        ]  # fmt: skip
        streams.log.clear()
        assert next(batches)["x"].item() == 1
        assert told(streams) == ["host waits for copy 2", "copy 3 under way", "recorded"]
        streams.log.clear()
        assert [d["x"].item() for d in batches] == [2, 3]
        assert "under way" not in "".join(streams.log) and told(streams)[-1] == "host waits for copy 3"

    @pytest.mark.parametrize("max_bytes", [None, 1, 8, 20, 1000])
    @pytest.mark.parametrize("depth", [1, 2, 5])
    @pytest.mark.parametrize("fails_at", [None, 3])
    def test_a_batch_is_complete_when_it_is_handed_over(
        self, streams: simulated.Streams, depth: int, max_bytes: int | None, fails_at: int | None
    ) -> None:
        """Then the current stream needs no event to wait for. It fails if the host asks the loader without a wait."""

        def source() -> Iterator[Any]:
            for i in range(7):
                if i == fails_at:
                    raise KeyError("broken")
                yield {"x": torch.full((1 + i % 4,), float(i)), "y": torch.zeros(0)}

        batches = self.ahead(source(), depth, max_bytes)
        for i in range(7 if fails_at is None else fails_at):
            assert (next(batches)["x"] == i).all()
            assert f"host waits for copy {i}" in streams.log, "before the batch is handed over"
        with pytest.raises(StopIteration if fails_at is None else KeyError):
            next(batches)

    @pytest.mark.parametrize(("max_bytes", "ahead"), [(4, 0), (8, 1), (17, 2), (24, 3), (1000, 5)])
    def test_no_more_bytes_are_copied_ahead_than_allowed(
        self, streams: simulated.Streams, max_bytes: int, ahead: int
    ) -> None:
        batches = [{"x": torch.full((2,), float(i))} for i in range(20)]  # 8 bytes each
        for i, d in enumerate(self.ahead(batches, 5, max_bytes)):
            copied = sum("under way" in line for line in streams.log)
            assert d["x"].tolist() == [i, i] and copied == min(20, i + 1 + ahead)

    def test_a_batch_that_waits_on_the_host_is_released_with_the_iterator(self, streams: simulated.Streams) -> None:
        made: list[Any] = []

        def source() -> Iterator[Any]:
            while True:
                batch = {"x": torch.zeros(100)}
                made.append(weakref.ref(batch["x"]))
                yield batch
                del batch

        batches = self.ahead(source(), 5, 8)
        gc.disable()
        try:
            next(batches)
            assert len(made) == 2 and made[1]() is not None
            batches.close()  # pyright: ignore[reportAttributeAccessIssue]
            assert made[1]() is None
        finally:
            gc.enable()

    def test_a_storage_is_recorded_once(self, streams: simulated.Streams) -> None:
        """Small fields share a buffer and packed fields a storage, and the allocator knows whole blocks."""
        fields = {f"k{i}": torch.full((4,), float(i)) for i in range(200)}
        large = {f"large{i}": torch.zeros(100_000) for i in range(3)}
        for batch, storages in (
            (DeviceDict(fields), 1),
            (DeviceDict({**fields, **large}).pack(), 1),
            ({"a": fields, "b": large, "c": dict(list(fields.items())[:3])}, 4),
        ):
            streams.log.clear()
            list(self.ahead([batch]))
            assert streams.log.count("recorded") == storages

    @pytest.mark.without_streams
    def test_a_device_without_streams_gets_each_batch_when_it_is_asked_for(self) -> None:
        fetched: list[int] = []

        def source() -> Iterator[Any]:
            for i in range(3):
                fetched.append(i)
                yield {"x": torch.full((1,), float(i))}

        for i, d in enumerate(prefetch(source(), SIM, max_bytes=1)):
            assert d["x"].device == SIM and d["x"].item() == i and len(fetched) == i + 1

    @pytest.mark.parametrize("depth", [1, 2, 5])
    def test_so_many_and_no_more_are_fetched_ahead(self, streams: simulated.Streams, depth: int) -> None:
        fetched: list[int] = []

        def source() -> Iterator[Any]:
            for i in range(10):
                fetched.append(i)
                yield {"x": torch.full((1,), float(i))}

        for i, d in enumerate(self.ahead(source(), depth)):
            assert d["x"].item() == i and len(fetched) == min(10, i + 1 + depth)

    def test_an_exception_comes_at_its_batch(self, streams: simulated.Streams) -> None:
        def source() -> Iterator[Any]:
            yield {"x": torch.zeros(1)}
            yield {"x": torch.ones(1)}
            raise KeyError("broken")

        batches = self.ahead(source(), depth=5)
        assert next(batches)["x"].item() == 0 and next(batches)["x"].item() == 1
        fails(KeyError, "broken", lambda: next(batches))
        assert list(batches) == []

    def test_what_is_on_the_device_already_may_still_be_computed_there(self, streams: simulated.Streams) -> None:
        list(self.ahead([{"x": torch.ones(1, device="sim:1")}]))
        assert streams.log[0] == "copy waits for main"

    def test_a_failing_copy_comes_at_its_batch(self, streams: simulated.Streams) -> None:
        batches = self.ahead([{"x": torch.zeros(n)} for n in (10, 10, 10_000)], depth=5)
        with simulated.memory_left(2000):
            assert len(next(batches)["x"]) == len(next(batches)["x"]) == 10
            with pytest.raises(torch.OutOfMemoryError):
                next(batches)

    def test_a_loader_that_uses_its_memory_again(self, streams: simulated.Streams) -> None:
        memory = torch.zeros(2)

        def source() -> Iterator[Any]:
            for i in range(5):
                memory.fill_(i)
                yield {"x": memory}

        assert [d["x"].tolist() for d in self.ahead(source())] == [[i, i] for i in range(5)]

    @pytest.mark.parametrize("to_the_end", [False, True])
    def test_a_break_or_an_error_lets_go_of_all_without_the_garbage_collector(
        self, streams: simulated.Streams, to_the_end: bool
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
            batches = self.ahead(source, depth=5)
            kept = weakref.ref(next(batches))
            del source
            if to_the_end:
                with pytest.raises(ValueError, match="broken"):
                    list(batches)
            else:
                batches.close()  # pyright: ignore[reportAttributeAccessIssue]  # as a loop does that is left by break
            del batches
            assert gone() is None and kept() is None and told(streams)[-1] == "host waits for copy 1"
        finally:
            gc.enable()
