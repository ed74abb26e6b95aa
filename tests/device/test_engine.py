"""The engine on the device: no value is stale, nobody waits without need, and little memory is pinned."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import strict
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tensordict_lite import DeviceDict, collate, prefetch
from tensordict_lite._memory import device as device_module
from tensordict_lite._memory import staging
from tensordict_lite._memory.buffer import gaps_have_content
from tensordict_lite._memory.device import capabilities
from tensordict_lite._memory.layout import SMALL, may_share
from tensordict_lite._memory.packed import arrange
from tensordict_lite._memory.staging import SLOT, SLOTS, Slot, Staging, staging_of
from tensordict_lite._memory.transfer import COALESCED_TENSOR, STAGED_MOVE, STAGED_PINNED

D0, D1 = torch.device("sim", 0), torch.device("sim", 1)
KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(autouse=True)
def counted() -> Iterator[None]:
    """Each test starts without pinned memory, and counts from its start."""
    staging._stagings.clear()
    assert capabilities(D0).pinned_memory and capabilities(D1).pinned_memory
    strict.reset()
    torch.ops.strict.free_pinned()
    strict.reset()
    yield
    strict.reset()


def batch(count: int, nbytes: int, start: int = 0) -> DeviceDict:
    return DeviceDict({f"k{i}": torch.full((nbytes // 4,), float(start + i)) for i in range(count)})


def is_batch(d: DeviceDict, start: float = 0) -> bool:
    return all(bool(t.cpu().eq(start + i).all()) for i, t in enumerate(d.values()))


def keep_little(d: DeviceDict) -> bool:
    """Whether each field keeps itself alive, or at most a small buffer."""
    return all((kept := t.untyped_storage().nbytes()) == t.nbytes or kept <= SMALL for t in d.values())


def main(device: torch.device = D0) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def overwrite(d: DeviceDict) -> None:
    for value in d.values():
        value.fill_(-1)


def reads_late(d: DeviceDict) -> bool:
    """Whether much of a pinned dict is copied from where it is, with a wait."""
    large = [t.nbytes for t in d.values() if d.is_packed or t.nbytes > COALESCED_TENSOR]
    return sum(large) > STAGED_PINNED


SHAPES = {
    "one small": (1, 64), "two small": (2, 64), "40 x 100 kB": (40, 100_000), "one of 3 MiB": (1, 3 * MIB),
    "200 x 4 KiB": (200, 4 * KIB), "3 x 5 MiB": (3, 5 * MIB),
}  # fmt: skip


class TestToTheDevice:
    @pytest.mark.parametrize("non_blocking", [False, True])
    @pytest.mark.parametrize("pack", [False, True])
    @pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
    def test_nobody_waits_for_a_busy_stream_and_a_pageable_source_is_free(
        self, shape: tuple[int, int], pack: bool, non_blocking: bool
    ) -> None:
        d = batch(*shape).pack() if pack else batch(*shape)
        with strict.held() as stream:
            moved = d.to(D0, non_blocking=non_blocking)
            overwrite(d)
        assert stream.in_time and strict.counts().waits == 0 and is_batch(moved)
        assert moved.is_packed == (d.is_packed or d.nbytes <= SMALL) and (pack or keep_little(moved))

    @pytest.mark.parametrize("pack", [False, True])
    @pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
    def test_a_pinned_source_is_free_too(self, shape: tuple[int, int], pack: bool) -> None:
        d = (batch(*shape).pack() if pack else batch(*shape)).pin_memory()
        late = reads_late(d)
        with strict.held(seconds=0.05 if late else 10.0) as stream:
            moved = d.to(D0)
            overwrite(d)
        assert stream.in_time is not late and is_batch(moved)

    @pytest.mark.parametrize("pack", [False, True])
    def test_a_large_pinned_source_that_nobody_waits_for_is_read_from_where_it_is(self, pack: bool) -> None:
        d = batch(3, 5 * MIB)
        d = (d.pack() if pack else d).pin_memory()
        strict.reset()
        with strict.held() as stream:
            moved = d.to(D0, non_blocking=True)
            assert strict.counts().pins == 0, "nothing is copied on the host"
            for i, value in enumerate(d.values()):
                value.fill_(i + 7)
        assert stream.in_time and is_batch(moved, 7)

    @pytest.mark.parametrize("pin", [False, True])
    @pytest.mark.parametrize("pack", [False, True])
    def test_a_larger_move_waits_and_its_source_is_free(self, pack: bool, pin: bool) -> None:
        d = batch(3, STAGED_MOVE // 3 + 64)
        d = d.pack() if pack else d
        d = d.pin_memory() if pin else d
        strict.reset()
        with strict.held(seconds=0.05):
            moved = d.to(D0)
            overwrite(d)
        waits = strict.counts().waits
        assert is_batch(moved) and waits == (1 if pack or pin else 4)

    @pytest.mark.parametrize("device", [D0, D1])
    def test_tensors_that_cannot_be_packed_wait_once(self, device: torch.device) -> None:
        d = DeviceDict({f"k{i}": torch.full((9,), float(i)).pin_memory().requires_grad_() for i in range(5)})
        with strict.held(str(device), seconds=0.05):
            moved = d.to(device)
            with torch.no_grad():
                overwrite(d)
        assert is_batch(moved) and moved["k0"].grad_fn is not None

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
    @pytest.mark.parametrize("pack", [False, True])
    @pytest.mark.parametrize("shape", [(1, 64), (9, 100_000), (1, 3 * MIB)])
    @pytest.mark.parametrize("pin", [False, True])
    def test_casts(self, shape: tuple[int, int], pack: bool, dtype: torch.dtype, pin: bool) -> None:
        d = batch(*shape).pack() if pack else batch(*shape)
        d = d.pin_memory() if pin else d
        with strict.held() as stream:
            moved = d.to(D0, dtype)
            overwrite(d)
        assert stream.in_time and is_batch(moved) and all(t.dtype == dtype for t in moved.values())

    @pytest.mark.parametrize("non_blocking", [False, True])
    def test_any_strides_arrive(self, non_blocking: bool) -> None:
        base = torch.arange(300_000.0).reshape(3, 100, 1000)
        views = {
            "transposed": base.transpose(0, 2), "gaps": base[..., ::2], "row": base[1], "expanded": base[:1].expand(4, 100, 1000),
            "channels": base[None].contiguous(memory_format=torch.channels_last), "number": torch.tensor(3.0),
            "empty": torch.ones(0, 5), "bytes": torch.arange(200_001).to(torch.uint8),
        }  # fmt: skip
        for count in (1, len(views)):
            for name in views:
                d = DeviceDict({name: views[name], **(views if count > 1 else {})})
                expected = {key: value.clone() for key, value in d.items()}
                with strict.held() as stream:
                    moved = d.to(D0, non_blocking=non_blocking)
                assert stream.in_time
                for key, value in expected.items():
                    assert moved[key].cpu().equal(value) and moved[key].stride() == torch.empty_like(d[key]).stride()

    def test_a_field_that_is_kept_keeps_no_other(self) -> None:
        moved = batch(5, 100_000).to(D0)
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in moved.values())

    def test_on_a_side_stream(self) -> None:
        """The copy runs there, and the pinned memory is kept until that stream has read it."""
        d, side = batch(9, 100_000), torch.Stream(device=D0)
        with side, strict.held() as stream:
            moved = [d.to(D0) for _ in range(10)]
            assert main().query() is False and torch.accelerator.current_stream(D0) == side
        assert stream.in_time
        with side:
            assert all(is_batch(each) for each in moved)

    def test_to_the_device_that_is_not_current(self) -> None:
        with strict.held() as first:
            moved = batch(9, 100_000).to(D1)
            assert is_batch(moved) and moved.device == D1
        assert first.in_time and torch.accelerator.current_device_index() == 0

    def test_the_memory_of_a_copy_to_another_device_is_not_used_again_before(self) -> None:
        with strict.held("sim:1") as stream:
            moved = [batch(1, SLOT, i).to(D1) for i in range(4)]
        assert stream.in_time and all(is_batch(d, i) for i, d in enumerate(moved))


class TestToTheHost:
    @pytest.mark.parametrize("pack", [False, True])
    @pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
    @pytest.mark.parametrize("take", [DeviceDict.cpu, lambda d: DeviceDict(d.numpy())])
    def test_results_are_complete(
        self, shape: tuple[int, int], pack: bool, take: Callable[[DeviceDict], DeviceDict]
    ) -> None:
        d = batch(*shape).to(D0)
        d = d.pack() if pack else d
        with strict.held(seconds=0.02):
            for value in d.values():
                value.add_(1)
            back = take(d)
            overwrite(d)
        assert is_batch(back, 1) and not any(t.is_pinned() for t in back.values())
        assert pack or keep_little(back)

    @pytest.mark.parametrize(("count", "nbytes", "waits"), [(300, 512, 1), (100, COALESCED_TENSOR, 2), (2, 64, 1)])
    def test_small_tensors_share_a_wait(self, count: int, nbytes: int, waits: int) -> None:
        d = DeviceDict({f"k{i}": torch.full((nbytes // 4,), float(i), device=D0) for i in range(count)})
        strict.reset()
        back = d.cpu()
        assert is_batch(back) and strict.counts().waits == strict.counts().d2h == waits
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in back.values())

    @pytest.mark.parametrize(("count", "nbytes"), [(300, 512), (200, 4 * KIB), (30, 100_000)])
    def test_each_storage_is_copied_whole(self, count: int, nbytes: int) -> None:
        d = batch(count, nbytes).to(D0)
        storages = len({t.untyped_storage().data_ptr() for t in d.values()})
        strict.reset()
        assert is_batch(d.cpu()) and strict.counts().waits == strict.counts().d2h == storages
        assert strict.counts().pins == 0

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
    @pytest.mark.parametrize(("count", "nbytes"), [(200, 4 * KIB), (300, 516), (20, COALESCED_TENSOR)])
    @pytest.mark.parametrize("added", [None, torch.float32, torch.int64])
    @pytest.mark.parametrize("pack", [False, True])
    def test_storages_that_are_cast_wait_once_each(
        self, count: int, nbytes: int, dtype: torch.dtype, added: torch.dtype | None, pack: bool
    ) -> None:
        """Tensors that fill a storage do so afterwards, and the gaps between them have no content."""
        d = batch(count, nbytes).to(D0)
        d = d.pack() if pack else d
        if added is not None:
            d["added"] = torch.full((7,), count, dtype=added, device=D0)
        storages = len({t.untyped_storage().data_ptr() for t in d.values()})
        strict.reset()
        with strict.held(seconds=0.02):
            for value in d.values():
                value.add_(1)
            back = d.to("cpu", dtype)
            overwrite(d)
        assert 0 < strict.counts().waits <= storages and is_batch(back, 1)
        assert strict.counts().pins == 0 and not any(t.is_pinned() for t in back.values())
        assert all(t.dtype == dtype for key, t in back.items() if key != "added")
        assert pack or all(may_share(t.untyped_storage().nbytes(), t.nbytes) for t in back.values())
        tensors = list(back.values())
        blocks = arrange(tensors).blocks
        outgrow = not pack and nbytes == 516 and dtype == torch.float64
        assert bool(blocks) is not outgrow and not any(gaps_have_content(tensors, block) for block in blocks)
        assert back.is_packed or not pack or added is not None

    def test_larger_tensors_are_copied_one_by_one(self) -> None:
        d = batch(3, COALESCED_TENSOR + 4).to(D0)
        strict.reset()
        assert is_batch(d.cpu()) and strict.counts().waits == 3

    @pytest.mark.parametrize("options", [{"copy": True}, {"dtype": torch.float64}])
    def test_a_single_tensor_is_complete(self, options: dict[str, Any]) -> None:
        d = batch(1, 4000).to(D0)
        with strict.held(seconds=0.05):
            d["k0"].add_(1)
            back = d.to("cpu", **options).clone()
        assert is_batch(back, 1)

    @pytest.mark.parametrize("pack", [False, True])
    def test_from_the_device_that_is_not_current(self, pack: bool) -> None:
        for d in (batch(9, 100_000).to(D1), batch(9, 64).to(D1)):
            there = d.pack() if pack else d
            with strict.held("sim:1", seconds=0.05):
                for value in there.values():
                    value.add_(1)
                assert is_batch(there.cpu(), 1)

    def test_from_a_full_device(self) -> None:
        d = batch(20, 512).to(D0)
        with strict.memory_left(100), strict.held(seconds=0.02):
            back = d.cpu()
        assert is_batch(back)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
    @pytest.mark.parametrize("pins", [False, True])
    def test_casts_from_a_full_device(self, pins: bool, dtype: torch.dtype) -> None:
        d = batch(200, 4 * KIB).to(D0)
        with strict.memory_left(100), strict.held(seconds=0.02), nullcontext() if pins else strict.no_pinning():
            back = d.to("cpu", dtype)
        assert is_batch(back) and all(t.dtype == dtype and not t.is_pinned() for t in back.values())


@pytest.mark.parametrize("pack", [False, True])
def test_between_two_devices(pack: bool) -> None:
    d = batch(20, 512).to(D0)
    d = d.pack() if pack else d
    with strict.held() as here, strict.held("sim:1") as there:
        for value in d.values():
            value.add_(1)
        moved = d.to(D1)
        overwrite(d)
    assert here.in_time and there.in_time and is_batch(moved, 1)


def test_memory_that_another_stream_reads_is_kept() -> None:
    d = DeviceDict({f"k{i}": torch.full((1000,), float(i), device=D0) for i in range(3)})
    here, side = main(), torch.Stream(device=D0)
    here.synchronize()
    with side:
        with strict.held() as stream:
            late = DeviceDict({key: value.clone() for key, value in d.items()})
            d.record_stream(side)
            d.clear()
            here.synchronize()
        assert stream.in_time and is_batch(late)


class TestPinnedMemory:
    def test_it_is_bounded_with_threads_on_one_stream(self) -> None:
        wrong: list[int] = []

        def move(first: int) -> None:
            for i in range(first, first + 300, 10):
                d = batch(2, 500_000, i).pack()
                moved = d.to(D0)
                overwrite(d)
                if not is_batch(moved, i):
                    wrong.append(i)

        threads = [threading.Thread(target=move, args=(1000 * i,)) for i in range(8)]
        with strict.delays(0, 300):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not wrong and strict.counts().pinned <= SLOT * SLOTS

    def test_it_is_bounded_while_another_stream_stands_still(self) -> None:
        side = torch.Stream(device=D0)
        with side, strict.held(seconds=10) as stream:
            late = [batch(2, 500_000, i).to(D0) for i in range(8)]
            with main_stream():
                for i in range(100):
                    d = batch(2, 500_000, i).pack()
                    moved = d.to(D0)
                    overwrite(d)
                    assert is_batch(moved, i)
        assert stream.in_time and strict.counts().pinned <= SLOT * SLOTS
        with side:
            assert all(is_batch(d, i) for i, d in enumerate(late))

    def test_two_streams_never_share_a_slot(self) -> None:
        """The event of a slot is on one stream, and tells nothing about copies on another."""
        batch(9, 512).to(D0)  # leaves room in its slot
        main().synchronize()
        side = torch.Stream(device=D0)
        with side, strict.held(seconds=10) as stream:
            late = batch(9, 512, 5).to(D0)
            with main_stream():
                for _ in range(8):
                    batch(1, 600_000, 99).to(D0)
                    main().synchronize()
        with side:
            assert stream.in_time and is_batch(late, 5)

    def test_a_stream_does_not_wait_for_the_memory_of_another(self) -> None:
        """If another stream has all of it, copies go without, and wait for their own stream alone."""
        side = torch.Stream(device=D0)
        with side, strict.held(seconds=10) as stream:
            late = [batch(1, SLOT, i).to(D0) for i in range(SLOTS)]
            with main_stream():
                for d in (batch(1, SLOT, 50), batch(9, 512, 50), batch(3, 100_000, 50).pack()):
                    moved = d.to(D0)
                    overwrite(d)
                    assert is_batch(moved, 50) and is_batch(moved.cpu(), 50)
                many = batch(9, 512, 50).to(D0)
                assert is_batch(many.cpu(), 50) and is_batch(batch(3, 200_000, 9).to(D0).cpu(), 9)
        assert stream.in_time and strict.counts().pinned == SLOT * SLOTS
        with side:
            assert all(is_batch(d, i) for i, d in enumerate(late))

    def test_a_host_that_runs_ahead_waits_for_its_own_oldest_copies(self) -> None:
        gate = torch.ops.strict.hold(30.0, D0)
        moved: list[DeviceDict] = []
        for i in range(SLOTS + 8):
            if i == SLOTS:
                assert strict.counts().event_waits == 0
                threading.Timer(0.1, torch.ops.strict.release, [gate]).start()
            d = batch(1, SLOT, i)
            moved.append(d.to(D0))
            overwrite(d)
        assert all(is_batch(d, i) for i, d in enumerate(moved))
        assert strict.counts().pinned == SLOT * SLOTS and strict.counts().event_waits > 0

    def test_a_host_waits_for_its_oldest_copy_alone(self) -> None:
        gate = torch.ops.strict.hold(30.0, D0)
        moved = [batch(1, SLOT).to(D0)]
        with strict.held() as stream:
            moved += [batch(1, SLOT, i).to(D0) for i in range(1, SLOTS)]
            threading.Timer(0.1, torch.ops.strict.release, [gate]).start()
            moved.append(batch(1, SLOT, SLOTS).to(D0))
        assert stream.in_time and all(is_batch(d, i) for i, d in enumerate(moved))

    def test_a_slot_that_is_in_use_is_left_alone(self) -> None:
        """Two threads are about to make copies from one slot. Another stream gets it after both copies."""
        staging, side = staging_of(D0), torch.Stream(device=D0)
        first, second = staging.take(64), staging.take(64)
        assert first is not None and second is not None and first[0] is second[0]
        staging.release(first[0])
        with side:
            other = staging.take(64)
        assert other is not None and other[0] is not first[0]
        staging.release(second[0])
        staging.release(other[0])
        first[0].stream.synchronize()
        with side:
            assert (staging.take(SLOT) or other)[0] is first[0]
        staging.release(first[0])

    def test_one_thread_at_a_time_changes_the_slots(self) -> None:
        staging = staging_of(D0)
        taken = staging.take(64)
        assert taken is not None
        for work in (lambda: staging.take(64), lambda: staging.release(taken[0])):
            thread = threading.Thread(target=work)
            with staging.lock:
                thread.start()
                thread.join(0.1)
                assert thread.is_alive()
            thread.join()
        staging.release(taken[0])

    def test_what_is_released_is_not_read_any_more(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another thread may take it at once."""
        real = Staging.release

        def release(self: Staging, slot: Slot) -> None:
            real(self, slot)
            if not slot.users:
                slot.stream.synchronize()
                slot.memory.fill_(0xDB)

        monkeypatch.setattr(Staging, "release", release)
        for d in (batch(9, 100_000), batch(9, 64), batch(3, MIB).pack(), batch(1, 3 * MIB)):
            assert is_batch(d.to(D0).cpu())

    def test_an_idle_device_needs_few_slots(self) -> None:
        for i in range(50):
            assert is_batch(batch(9, 100_000, i).to(D0).cpu(), i)
        assert strict.counts().pinned <= 4 * SLOT, "a worker thread may be late"

    def test_it_is_used_in_and_outside_of_inference_mode(self) -> None:
        with torch.inference_mode():
            assert is_batch(batch(3, 100_000).to(D0).cpu())
        assert is_batch(batch(3, 100_000).to(D0).cpu())
        with torch.inference_mode():
            assert is_batch(batch(3, 100_000).to(D0).cpu())

    def test_where_none_can_be_pinned(self) -> None:
        with strict.no_pinning():
            for d in (batch(9, 512), batch(200, 4 * KIB), batch(9, 100_000), batch(3, MIB).pack(), batch(1, 64)):
                moved = d.to(D0)
                for value in moved.values():
                    value.add_(1)
                overwrite(d)
                assert is_batch(moved.cpu(), 1) and is_batch(moved.to("cpu", torch.float16), 1)
        assert strict.counts().pinned == 0

    def test_after_an_error_it_is_used_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def copy(self: Tensor, other: Any, *args: Any, **options: Any) -> Tensor:
                moved = real(self, other, *args, **options)
                if moved.device == D0:
                    raise RuntimeError("broken")
                return moved

            return copy

        for d in (batch(3, 200_000), batch(9, 64), batch(1, 3 * MIB)):
            for name in ("to", "copy_"):
                monkeypatch.setattr(Tensor, name, broken(getattr(Tensor, name)))
            with strict.held(seconds=0.02), pytest.raises(RuntimeError, match="broken"):
                d.to(D0)
            monkeypatch.undo()
        main().synchronize()
        assert all(not slot.users and slot.event.query() for slot in staging_of(D0).slots)  # pyright: ignore


def main_stream() -> torch.Stream:
    """The default stream, for a block within the block of another stream."""
    return torch.Stream(stream_id=0, device_index=0, device_type=main().device_type)


@pytest.mark.parametrize("more", [{}, {"x": torch.ones(3)}])
def test_expanded_fields_can_be_pinned(more: dict[str, Tensor]) -> None:
    """torch pins the strides of a tensor, and cannot write to memory that overlaps."""
    expanded = {
        "row": torch.arange(3.0).expand(2, 3),
        "one": torch.ones(1).expand(4),
        "grad": torch.ones(1, requires_grad=True).expand(2),
    }
    d = DeviceDict({**expanded, **more, "gaps": torch.arange(6.0)[::2], "t": torch.ones(2, 3).t()})
    pinned = d.pin_memory()
    assert pinned == d and pinned.is_pinned() and pinned["row"].is_contiguous() and pinned["t"].stride() == (1, 3)
    assert all(a is b for a, b in zip(pinned.pin_memory().values(), pinned.values(), strict=True))
    kept = DeviceDict({"x": pinned["row"][:1].expand(5, 3)})
    assert kept.pin_memory()["x"] is kept["x"]


@pytest.mark.skipif(not hasattr(torch.accelerator, "Graph"), reason="this torch captures on CUDA only")
class TestCapture:
    @pytest.mark.parametrize("pack", [False, True])
    @pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
    def test_each_replay_reads_pinned_sources_again(self, shape: tuple[int, int], pack: bool) -> None:
        d = batch(*shape).pack() if pack else batch(*shape)
        d = d.pin_memory()
        kept, filled = batch(*shape).to(D0), batch(*shape).to(D0)
        with strict.captured() as graph:
            for into, value in zip(kept.values(), d.to(D0, non_blocking=True).values(), strict=True):
                into.copy_(value)
            filled.fill_(d, non_blocking=True)
        for start in (5, 7):
            for i, value in enumerate(d.values()):
                value.fill_(start + i)
            graph.replay()
            assert is_batch(kept, start) and is_batch(filled, start)

    def test_work_on_the_device_is_recorded(self) -> None:
        d, kept = batch(3, 600).to(D0), batch(3, 600).to(D0)
        with strict.captured() as graph:
            kept.fill_(d)
        for start in (5, 7):
            for i, value in enumerate(d.values()):
                value.fill_(start + i)
            graph.replay()
            assert is_batch(kept, start)

    @pytest.mark.parametrize("non_blocking", [False, True])
    @pytest.mark.parametrize("work", [lambda d, there, late: d.to(D0, non_blocking=late), lambda d, there, late: there.to("cpu", non_blocking=late), lambda d, there, late: there.fill_(d, late)], ids=["to", "back", "fill"])  # fmt: skip
    @pytest.mark.parametrize("count", [1, 9])
    def test_what_cannot_be_captured_is_an_error(
        self, work: Callable[[DeviceDict, DeviceDict, bool], DeviceDict], count: int, non_blocking: bool
    ) -> None:
        """No result that no replay would change, as of a copy that is made at once."""
        d = batch(count, 600)
        there = d.to(D0)
        with (
            pytest.raises(RuntimeError, match="the capture ended with an error before"),
            strict.captured(),
            pytest.raises(RuntimeError, match="is not permitted when a stream is capturing"),
        ):
            work(d, there, non_blocking)
        assert is_batch(there) and is_batch(d) and is_batch(d.to(D0))

    def test_a_device_is_not_tried_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        known = dict(device_module._capabilities)
        monkeypatch.setattr(device_module, "_capabilities", {**known})
        del device_module._capabilities[D0]
        with strict.captured():
            can = capabilities(D0)
        assert can.accelerator and not can.streams and not can.pinned_memory, "an error would end the capture"
        assert capabilities(D0) == known[D0]


def reusing_memory(pin: bool) -> Iterator[DeviceDict]:
    """A loader that fills the same memory with each of its 12 batches."""
    memory = batch(3, 100_000)
    memory = memory.pin_memory() if pin else memory
    for i in range(12):
        for key in memory:
            memory[key].fill_(i)
        yield memory


class TestPrefetch:
    @pytest.mark.parametrize("pin", [False, True])
    @pytest.mark.parametrize("consume", [0.0, 0.004])
    @pytest.mark.parametrize("max_bytes", [None, 1, 300_000])
    def test_a_loader_may_use_its_memory_again(self, pin: bool, consume: float, max_bytes: int | None) -> None:
        with strict.delays(0, 2000):
            sums: list[Tensor] = []
            for d in prefetch(reusing_memory(pin), D0, depth=3, max_bytes=max_bytes):
                torch.ops.strict.busy(consume, D0)
                sums.append(torch.empty(3, device=D0).copy_(torch.stack([t[:1] for t in d.values()]).flatten()))
                del d
        assert [s.tolist() for s in sums] == [[float(i)] * 3 for i in range(12)]

    @pytest.mark.parametrize("device", [D0, D1])
    def test_a_batch_is_not_overwritten_while_the_consumer_reads_it(self, device: torch.device) -> None:
        """Its memory belongs to the side stream, which does not wait for the consumer."""
        late: list[Tensor] = []
        with strict.held(str(device), seconds=0.3):
            for d in prefetch([batch(1, 200_000, i) for i in range(8)], device):
                late.append(d["k0"].clone())
                del d
        assert [t.mean().item() for t in late] == list(range(8))

    def test_batches_of_the_device_are_complete_before_they_are_read(self) -> None:
        def source() -> Iterator[DeviceDict]:
            for i in range(4):
                d = DeviceDict({"x": torch.zeros(1000, device=D0)})
                torch.ops.strict.busy(0.02, D0)
                d["x"].add_(i)
                yield d

        with strict.delays(0, 500):
            got = [d["x"].clone() for d in prefetch(source(), D1)]
        assert [t.mean().item() for t in got] == [0, 1, 2, 3]

    def test_the_copies_do_not_wait_for_the_consumer(self) -> None:
        batches = iter(prefetch([batch(3, 100_000, i) for i in range(6)], D0, depth=2))
        with strict.held() as stream:
            got = [next(batches) for _ in range(4)]
        assert stream.in_time and all(is_batch(d, i) for i, d in enumerate(got))

    @pytest.mark.parametrize("options", [{}, {"slots": 2}])
    def test_pinned_batches_are_copied_from_where_they_are(self, options: dict[str, Any]) -> None:
        source = [batch(1, 3 * MIB, i).pin_memory() for i in range(5)]
        strict.reset()
        assert all(is_batch(d, i) for i, d in enumerate(prefetch(source, D0, **options)))
        assert strict.counts().pins == 0

    def test_batches_of_the_device_do_not_become_slots(self) -> None:
        source = [batch(1, 64, i).to(D0) for i in range(3)]
        assert all(is_batch(d, i) for i, d in enumerate(prefetch(source, D0, slots=1)))
        assert all(is_batch(d, i) for i, d in enumerate(source))

    def test_a_loader_that_pins_its_batches(self) -> None:
        """Its workers send packed batches, and its thread pins each of them."""
        samples = [{"x": torch.full((100,), float(i)), "n": {"y": i}} for i in range(24)]
        loader = DataLoader(samples, 4, num_workers=1, collate_fn=collate, pin_memory=True)  # pyright: ignore[reportArgumentType]
        assert all(d.is_packed and d.is_pinned() for d in loader)
        with strict.delays(0, 1000):
            seen = [(d["x"].mean(1).cpu().tolist(), d["n", "y"].cpu().tolist()) for d in prefetch(loader, D0)]
        assert seen == [(list(range(i, i + 4)),) * 2 for i in range(0, 24, 4)]

    def test_a_break_leaves_no_copy_under_way(self) -> None:
        memory = batch(1, 3 * MIB).pin_memory()
        batches = iter(prefetch([memory] * 5, D0))
        with strict.delays(20_000, 20_000):
            d = next(batches)
            waits = strict.counts().event_waits
            del batches
        assert strict.counts().event_waits == waits + 1, "the memory of the last batch may be unmapped"
        memory["k0"].fill_(5)
        assert is_batch(d)


class TestReport:
    @pytest.mark.parametrize("timed", [True, False])
    def test_it_waits_for_nothing(self, timed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """The host waits once for each copy, timed or not, and never for the stream of the step."""
        monkeypatch.setitem(device_module._capabilities, D0, dataclasses.replace(capabilities(D0), timed_events=timed))
        source = [batch(3, 1000, i).pin_memory() for i in range(30)]
        batches = prefetch(source, D0)
        strict.reset()
        with strict.held() as stream:
            for number, _ in enumerate(batches, 1):
                assert batches.report().batches == number
        assert stream.in_time and strict.counts().waits == 0 and strict.counts().event_waits == 31
        assert batches._watch and len(batches._watch.idle.pending) <= 3

    def test_the_device_works_while_the_host_waits(self) -> None:
        """On the host, all time goes to waiting for the loader. On the device, most of it is the step."""

        def source(seconds: float) -> Iterator[DeviceDict]:
            for i in range(40):
                time.sleep(seconds)
                yield batch(1, 1000, i).pin_memory()

        late, in_time = prefetch(source(0.004), D0), prefetch(source(0.001), D0)
        for batches, step in ((late, 0.001), (in_time, 0.004)):
            for _ in batches:
                torch.ops.strict.busy(step, D0)
                if step > 0.001:
                    torch.accelerator.current_stream(D0).synchronize()
            torch.accelerator.synchronize(0)
        assert late.report().waiting > 0.6 * late.report().seconds
        assert late.report().advice.startswith("the loader is late: ")
        ahead = prefetch(source(0.001), D0)
        for _ in ahead:
            torch.ops.strict.busy(0.004, D0)
        torch.accelerator.synchronize(0)
        assert ahead._watch
        host = ahead._watch.seconds
        assert host[0] > 0.6 * sum(host), "the host launches a step and waits for the loader"
        for report in (in_time.report(), ahead.report()):
            assert report.step > 0.6 * report.seconds, str(report)

    def test_speed_of_the_copies(self) -> None:
        batches = prefetch([batch(1, 100_000).pin_memory()] * 30, D0)
        with strict.delays(2000, 2000):
            list(batches)
        report = batches.report()
        assert report.bytes == 100_000 and report.copies == 1 and 1e6 < report.bytes_per_second < 1e8

    @pytest.mark.parametrize(("source", "expected"), [
        (lambda: batch(2, 100_000), "the batches lie in pageable memory, give the DataLoader pin_memory=True"),
        (lambda: dict(batch(40, 16)), "40 small fields are gathered one by one, collate_fn=collate puts them together"),
        (lambda: batch(2, 100_000).pin_memory(),
         "send fewer bytes, such as uint8 images, and convert them on the device"),
    ], ids=["pageable", "many small fields", "pinned"])  # fmt: skip
    def test_advice(self, source: Callable[[], Any], expected: str) -> None:
        batches = prefetch([source()] * 30, D0)
        with strict.delays(1000, 1000):
            list(batches)
        advice = batches.report().advice
        assert advice.startswith("copies to the device take ") and advice.endswith(f"; {expected}"), str(
            batches.report()
        )


class TestStaticInputs:
    @pytest.mark.parametrize("pin", [False, True])
    @pytest.mark.parametrize("pack", [False, True])
    @pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
    def test_a_source_is_free(self, shape: tuple[int, int], pack: bool, pin: bool) -> None:
        static = batch(*shape).to(D0)
        static = static.pack() if pack else static
        d = batch(*shape, start=5)
        d = d.pack() if pack else d
        d = d.pin_memory() if pin else d
        tensors = list(static.values())
        late = pin and reads_late(d)
        with strict.held(seconds=0.05 if late else 10.0) as stream:
            static.fill_(d, non_blocking=not pin)
            overwrite(d)
        assert stream.in_time is not late and is_batch(static, 5) and tensors == list(static.values())

    def test_one_copy_from_a_packed_dict(self) -> None:
        static, d = batch(9, 100_000).pack().to(D0), batch(9, 100_000, 3).pack().pin_memory()
        strict.reset()
        static.fill_(d, non_blocking=True)
        assert strict.counts().h2d == 1 and is_batch(static, 3)

    def test_on_the_device_and_back(self) -> None:
        static, other, host = batch(9, 64).to(D0), batch(9, 64, 3).to(D0), batch(9, 64)
        with strict.held() as stream:
            for value in other.values():
                value.add_(1)
            static.fill_(other)
            overwrite(other)
        assert stream.in_time and is_batch(static, 4)
        with strict.held(seconds=0.02):
            for value in static.values():
                value.add_(1)
            host.fill_(static, non_blocking=True)
            assert is_batch(host, 5)

    @pytest.mark.parametrize("pin", [False, True])
    @pytest.mark.parametrize("slots", [1, 2, 4])
    @pytest.mark.parametrize("consume", [0.0, 0.004])
    def test_a_slot_is_filled_after_the_work_on_it(self, consume: float, slots: int, pin: bool) -> None:
        """And a batch is read after its copy, while its loader uses its memory again."""
        sums: list[Tensor] = []
        slot_of: list[int] = []
        with strict.delays(0, 2000):
            for d in prefetch(reusing_memory(pin), D0, slots=slots):
                torch.ops.strict.busy(consume, D0)
                sums.append(torch.empty(3, device=D0).copy_(torch.stack([t[:1] for t in d.values()]).flatten()))
                slot_of.append(d["k0"].data_ptr())
            assert [s.cpu().tolist() for s in sums] == [[float(i)] * 3 for i in range(12)]
        assert slot_of == slot_of[:slots] * (12 // slots) and len(set(slot_of)) == slots

    def test_copies_run_ahead_of_the_work(self) -> None:
        """With two slots, one batch is on its way while the step runs: nobody waits for the step."""
        batches = iter(prefetch([batch(1, 200_000, i) for i in range(6)], D0, slots=2))
        first = next(batches)
        with strict.held(seconds=10) as stream:
            kept = first["k0"] + 1
            second = next(batches)
            assert second is not first
        assert stream.in_time and kept.cpu()[0] == 1 and is_batch(second, 1)
