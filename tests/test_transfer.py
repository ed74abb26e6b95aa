"""The engine: what is planned, that it is carried out so, and that no source is needed, and none lost, afterwards."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import simulated
import torch
from checks import check_invariants
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tensordict_lite
from tensordict_lite import DeviceDict, to_device, to_numpy
from tensordict_lite._memory import staging as staging_module
from tensordict_lite._memory.device import CPU
from tensordict_lite._memory.packed import pack
from tensordict_lite._memory.staging import SLOT, staging_of
from tensordict_lite._memory.transfer import COALESCED_TENSOR as SMALL
from tensordict_lite._memory.transfer import STAGED_MOVE, plan_copies, transfer
from tensordict_lite._memory.transfer import CopyPlan as Plan

SIM, OTHER = simulated.SIM, simulated.OTHER
META, MPS = torch.device("meta"), torch.device("mps")
BLOCK = 64 << 10
"""The largest buffer in bytes for tensors of any size."""


def plan(tensors: list[Tensor], source: torch.device, target: torch.device, *args: Any, **kwargs: Any) -> Plan:
    how = plan_copies(tensors, source, target, *args, **kwargs)
    assert how is not None, "no operation is intercepted here"
    return how


def small(n: int, device: Any = "cpu") -> list[Tensor]:
    return [torch.full((4, 4), float(i), device=device) for i in range(n)]


def large(n: int, device: Any = "cpu") -> list[Tensor]:
    return [torch.full((SMALL // 4 + 1,), float(i), device=device) for i in range(n)]


def members(how: Plan) -> list[list[int]]:
    return [[*layout.members] for chunk in how.coalesced for layout in chunk.parts]


def whole(how: Plan) -> list[list[int]]:
    """The tensors of each storage that is copied whole."""
    items = [*how.one_by_one, *how.staged]
    return [sorted(item.members) for item in items if not isinstance(item, int) and len(item.members) > 1]


class TestPlan:
    def test_small_tensors_go_together_and_large_ones_singly(self) -> None:
        tensors = [*small(3), *large(2), *small(2)]
        for source, target in ((CPU, SIM), (SIM, CPU), (SIM, OTHER)):
            how = plan(tensors, source, target)
            assert members(how) == [[0, 1, 2, 5, 6]] and [*how.one_by_one, *how.staged] == [3, 4]

    @pytest.mark.without_streams
    def test_the_largest_small_one(self) -> None:
        edge = [torch.zeros(SMALL + i, dtype=torch.uint8) for i in (0, 0, 1)]
        how = plan([*small(1), *edge], CPU, SIM)
        assert members(how) == [[1, 2]] and how.one_by_one == (0, 3)

    def test_packed_tensors_are_one_block(self) -> None:
        packed = pack([*small(3), *large(2)], CPU)
        for target in (SIM, OTHER):
            assert whole(plan(packed, CPU, target)) == [[0, 1, 2, 3, 4]]
        weight = torch.ones(2, requires_grad=True)
        assert plan([*packed, weight], CPU, SIM).one_by_one[0] == 5 and whole(plan([*packed, weight], CPU, SIM))
        assert not whole(plan(packed[:-1], CPU, SIM)), "the block has more in it"
        assert whole(plan([*packed, torch.ones(1)], CPU, SIM)) == [[0, 1, 2, 3, 4]]

    @pytest.mark.without_streams
    def test_no_block_outgrows_its_limit(self) -> None:
        full = BLOCK // 512
        tensors = [torch.zeros(512, dtype=torch.uint8) for _ in range(2 * full + 1)]
        how = plan(tensors, CPU, SIM)
        assert [len(part) for part in members(how)] == [full] * 2 and how.one_by_one == (2 * full,)
        before = simulated.live_bytes()
        moved = transfer(tensors[:full], SIM)
        assert simulated.live_bytes() - before == BLOCK == moved[0].untyped_storage().nbytes()
        large = [torch.zeros(SMALL, dtype=torch.uint8) for _ in range(9)]
        assert [len(part) for part in members(plan(large, CPU, SIM))] == [4, 4], "four times the bytes of each"

    def test_two_hundred_small_ones_are_a_copy_for_each_64_kib(self) -> None:
        how = plan([torch.zeros(16, 32) for _ in range(200)], CPU, SIM)
        assert [len(part) for part in members(how)] == [*[32] * 6, 8] and how.one_by_one == ()

    @pytest.mark.without_streams
    def test_one_alone_goes_singly(self) -> None:
        assert plan(small(1), CPU, SIM) == Plan(one_by_one=(0,)) and plan([], CPU, SIM) == Plan()
        assert plan([*small(1), *large(1)], CPU, SIM) == Plan(one_by_one=(0, 1))

    def test_what_is_more_than_its_bytes_goes_singly(self) -> None:
        special = [torch.ones(2, requires_grad=True), torch.eye(2).to_sparse(), torch.tensor([1j]).conj()]
        how = plan([*special, *small(2)], CPU, SIM)
        assert members(how) == [[3, 4]] and how.one_by_one == (0, 1, 2)

    def test_where_bytes_are_not_trusted_nothing_is_gathered(self) -> None:
        singly = Plan(one_by_one=(0, 1, 2))
        assert plan(small(3), CPU, MPS) == plan(small(3), CPU, META) == singly
        assert plan(pack(small(3), CPU), CPU, MPS) == singly
        late = plan(small(3, SIM), SIM, CPU, non_blocking=True)
        assert late._replace(pins=False) == singly, "it is for the caller to wait"

    @pytest.mark.without_streams
    def test_a_cast_is_planned_with_the_dtype_that_comes_out(self) -> None:
        tensors = [torch.zeros(SMALL // 16, dtype=torch.float64), *small(2), torch.zeros(3, dtype=torch.int64)]
        how = plan(tensors, CPU, SIM, torch.float32)
        assert [sorted(part) for part in members(how)] == [[0, 1, 2, 3]]
        assert {run.dtype for run in how.coalesced[0].together.runs} == {torch.float32, torch.int64}
        assert plan([torch.zeros(SMALL // 4), *small(1)], CPU, SIM, torch.float64).one_by_one == (0, 1), (
            "too large when cast"
        )

    def test_a_plan_is_a_value(self) -> None:
        tensors = [*small(3), *large(1)]
        assert plan(tensors, CPU, SIM) == plan([t.clone() for t in tensors], CPU, SIM)


class TestCopies:
    def test_to_a_device_and_back(self, copies: Any) -> None:
        d = DeviceDict({f"k{i}": t for i, t in enumerate(small(200))})
        moved = d.to("sim")
        assert copies == {"h2d": 1}
        copies.clear()
        assert moved.to("sim") is moved and not copies
        assert moved.cpu() == d and copies["d2h"] == 1 and copies.total() <= 2, "gathered on the device, by one kernel"
        copies.clear()
        moved.numpy()
        to_numpy([moved, moved])
        assert copies["d2h"] == 2

    def test_a_mixed_batch(self, copies: Any) -> None:
        d = DeviceDict({"image": large(1)[0], **{f"k{i}": t for i, t in enumerate(small(20))}})
        assert d.to("sim").cpu() == d and copies["h2d"] == 2 and copies["d2h"] == 2

    def test_a_packed_dict_among_others(self, copies: Any) -> None:
        packed = DeviceDict({"x": [1.0], "y": large(1)[0]}).pack()
        moved = to_device({"a": packed, "b": small(3), "c": DeviceDict({"z": 1})}, "sim")
        assert copies == {"h2d": 2} and moved["a"].is_packed and moved["a"].cpu() == packed
        assert [t.cpu().mean() for t in moved["b"]] == [0, 1, 2] and moved["c"]["z"].item() == 1

    def test_tensors_on_several_devices(self, copies: Any) -> None:
        mixed = [*small(3), *small(2, OTHER), *small(2, SIM)]
        copies.clear()
        moved = transfer(mixed, SIM)
        assert all(t.device == SIM for t in moved) and all(a is b for a, b in zip(moved[5:], mixed[5:], strict=True))
        assert [t.cpu().mean().item() for t in moved] == [0, 1, 2, 0, 1, 0, 1]
        copies.clear()
        assert [t.device for t in transfer(mixed, CPU)] == [CPU] * 7 and copies["d2h"] == 2

    def test_one_that_is_there_twice_is_copied_once(self, copies: Any) -> None:
        t = large(1)[0]
        moved = to_device({"a": t, "b": [t]}, "sim")
        assert copies == {"h2d": 1} and moved["a"] is moved["b"][0]


class TestResults:
    @given(st.data())
    def test_any_tensors_arrive(self, data: st.DataObject) -> None:
        dtypes = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.int64, torch.bool, torch.uint8])
        shapes = st.lists(st.sampled_from([0, 1, 2, 3, 17]), max_size=3)
        kinds = st.sampled_from(["plain", "grad", "transposed", "channels", "gaps", "tied"])
        tensors: list[Tensor] = []
        for dtype, shape, kind in data.draw(st.lists(st.tuples(dtypes, shapes, kinds), max_size=12)):
            t = torch.arange(max(1, torch.Size(shape).numel()), dtype=torch.float32)[: torch.Size(shape).numel()]
            t = t.reshape(shape).to(dtype)
            if kind == "grad" and dtype.is_floating_point:
                t = t.requires_grad_()
            elif kind == "transposed" and t.dim() >= 2:
                t = t.transpose(0, 1)
            elif kind == "gaps" and t.dim():
                t = t[..., ::2]
            elif kind == "tied" and tensors:
                t = tensors[0]
            tensors.append(t)
        cast = data.draw(st.sampled_from([None, torch.float32, torch.float16]))
        there = transfer(tensors, SIM, cast, source=data.draw(st.sampled_from([None, CPU])))
        back = transfer(there, CPU)
        for before, on_device, after in zip(tensors, there, back, strict=True):
            expected = before.to(cast) if cast is not None and before.is_floating_point() else before
            assert on_device.device == SIM and after.device == CPU and after.dtype == on_device.dtype == expected.dtype
            assert torch.equal(after, expected) and after.requires_grad == before.requires_grad
            assert after.stride() == before.to("sim").cpu().stride() or 1 in before.shape or before.numel() == 0

    def test_the_source_can_be_changed_at_once(self, device: torch.device) -> None:
        tensors = [*small(5), *large(2)]
        for source in (tensors, pack(tensors, CPU)):
            if device.type == "cuda":
                source = list(DeviceDict(enumerate_keys(source)).pin_memory().values())  # noqa: PLW2901
            expected = [t.clone() for t in source]
            moved = transfer(source, device)
            for t in source:
                t.fill_(-1)
            assert all(torch.equal(a.cpu(), b) for a, b in zip(moved, expected, strict=True))

    def test_own_version_counters(self, device: torch.device) -> None:
        """Fields of a block must not share one, or writing the mask would invalidate what autograd saved of x."""
        moved = DeviceDict({"x": torch.ones(3), "mask": torch.ones(3)}).to(device)
        weight = torch.ones(3, device=device, requires_grad=True)
        loss = (weight * moved["x"]).sum()
        moved["mask"].zero_()
        loss.backward()
        assert weight.grad is not None and moved["x"]._version == 0

    def test_on_the_host_each_owns_its_memory(self, device: torch.device) -> None:
        for back in (DeviceDict(enumerate_keys(small(5, device))).cpu(), to_device(small(5, device), "cpu")):
            tensors = list(back.values()) if isinstance(back, dict) else back
            assert all(t.untyped_storage().nbytes() == t.nbytes and not t.is_pinned() for t in tensors)

    def test_keeping_one_keeps_no_large_batch(self) -> None:
        d = DeviceDict(enumerate_keys([*small(3), *large(4), *[t.flatten() for t in small(1000)]]))
        before = simulated.live_bytes()
        moved = d.to("sim")
        kept = moved["k0"]
        del moved
        assert 0 < simulated.live_bytes() - before <= BLOCK and kept.cpu().sum() == 0
        del kept
        assert simulated.live_bytes() == before

    def test_gathered_is_packed_if_it_is_small(self) -> None:
        """Small fields share a block, so a small dict is packed then. A larger one is not."""
        moved = DeviceDict(enumerate_keys(small(5))).to("sim")
        assert moved.is_packed and moved.pack() is moved
        moved = DeviceDict(enumerate_keys([torch.rand(512) for _ in range(40)])).to("sim")
        assert not moved.is_packed and moved.pack().is_packed and moved.pack().to("sim:1").is_packed

    def test_a_field_can_be_saved_by_itself(self) -> None:
        """torch.load refuses a tensor whose storage is no multiple of the item size, and torch.save writes it whole."""
        moved = DeviceDict(
            {"b": torch.ones(3, dtype=torch.bool), "x": torch.ones(5), "z": torch.ones(2).to(torch.complex128)}
        )
        for tensor in moved.to("sim").values():
            assert tensor.untyped_storage().nbytes() % 16 == 0


def enumerate_keys(tensors: list[Tensor]) -> dict[str, Tensor]:
    return {f"k{i}": t for i, t in enumerate(tensors)}


class TestOutOfMemory:
    @pytest.mark.parametrize("allowed", [0, 100, SMALL * 2, SMALL * 4])
    @pytest.mark.parametrize("packed", [False, True])
    def test_in_the_middle_of_a_move(self, allowed: int, packed: bool) -> None:
        d = DeviceDict({**enumerate_keys([*small(20), *large(6)]), "w": torch.ones(2, requires_grad=True)})
        d = d.pack() if packed else d
        expected, live = d.clone(), simulated.live_bytes()
        with simulated.memory_left(allowed), pytest.raises(torch.OutOfMemoryError, match="sim out of memory"):
            d.to("sim")
        assert simulated.live_bytes() == live, "nothing of it is left on the device"
        assert d == expected and d.is_packed == packed
        assert d.to("sim").cpu() == expected

    def test_what_cannot_be_gathered_on_a_full_device_comes_one_by_one(self, copies: Any) -> None:
        """A dict may be moved because the device is full."""
        moved = DeviceDict(enumerate_keys(small(20, SIM)))
        live = simulated.live_bytes()
        copies.clear()
        with simulated.memory_left(100):
            assert moved.cpu() == enumerate_keys(small(20))
        assert copies == {"d2h": 20} and simulated.live_bytes() == live


def test_nothing_leaks() -> None:
    """Neither on the device nor in Python: many moves leave behind what a few leave."""
    d = DeviceDict({**enumerate_keys([*small(10), *large(1)]), "n": {"z": 1}})
    packed = d.pack()
    gc.collect()  # what other tests left behind in cycles
    live = simulated.live_bytes()

    def left_behind() -> tuple[int, int]:
        for _ in range(25):
            for source in (d, packed):
                assert source.to("sim").cpu() is not None and source.to("sim", torch.float16) is not None
        assert simulated.live_bytes() == live
        ours = tracemalloc.Filter(True, str(Path(tensordict_lite.__file__).parent / "*"))
        traces = tracemalloc.take_snapshot().filter_traces([ours]).traces
        return sum(trace.size for trace in traces), sum(type(thing) is Tensor for thing in gc.get_objects())

    tracemalloc.start()
    try:
        memory, tensors = left_behind()
        memory_then, tensors_then = left_behind()
    finally:
        tracemalloc.stop()
    assert tensors_then == tensors
    assert memory_then - memory < 8_000, "80 bytes a move: what Python's free lists keep is less, a tensor object more"


def test_threads_move_at_once() -> None:
    d = DeviceDict(enumerate_keys([*small(50), *large(1)]))
    wrong: list[int] = []

    def move(i: int) -> None:
        mine = d.map(lambda t: t + i)
        for _ in range(10):
            if mine.pack().to("sim").cpu() != mine or mine.to("sim").cpu() != mine:
                wrong.append(i)

    threads = [threading.Thread(target=move, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_to_mps_every_copy_is_blocking(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch may read the source of an asynchronous copy to Metal after it was changed or freed."""
    asked: list[Any] = []

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        asked.append((args[0], kwargs.get("non_blocking", False)))
        return self

    monkeypatch.setattr(Tensor, "to", to)
    transfer(small(3), MPS, non_blocking=True, source=CPU)
    transfer(pack(small(3), CPU), MPS, torch.float16, non_blocking=True, source=CPU)
    assert asked == [(MPS, False)] * 6


class TestHowStreamsAreUsed:
    """What is asked of a device with streams and pinned memory: which copies wait, what is pinned, in which order."""

    def test_small_tensors_go_through_pinned_memory_and_nobody_waits(self, streams: simulated.Streams) -> None:
        moved = transfer(small(5), SIM, source=CPU)
        assert streams.log == [f"{SLOT} pinned on sim:0", "320 h2d"] and means(moved) == [0, 1, 2, 3, 4]

    def test_so_does_a_small_packed_dict(self, streams: simulated.Streams) -> None:
        packed = pack(small(5), CPU)
        moved = transfer(packed, SIM, source=CPU)
        packed[3].fill_(-1)
        assert streams.log == [f"{SLOT} pinned on sim:0", "320 h2d"] and means(moved) == [0, 1, 2, 3, 4]

    def test_memory_is_pinned_under_the_target_device(self, streams: simulated.Streams) -> None:
        """Else torch makes a context on the current device, and asks that device for the end of the copy."""
        for target in (OTHER, SIM):
            streams.log.clear()
            transfer(small(3), target, source=CPU)
            transfer(pack(small(3), CPU), target, source=CPU)
            transfer(small(3, target), CPU, source=target)
            assert [line for line in streams.log if "pinned" in line] == [f"{SLOT} pinned on sim:{target.index}"]
            assert simulated.sim.current == 0

    def test_all_of_a_move_of_some_megabytes_goes_through_pinned_memory(self, streams: simulated.Streams) -> None:
        transfer([*large(3), *small(2)], SIM, source=CPU)
        assert streams.log == [f"{SLOT} pinned on sim:0", "128 h2d", *[f"{SMALL + 4} h2d"] * 3]
        streams.log.clear()
        moved = transfer(small(1), SIM, source=CPU)
        assert streams.log == ["64 h2d"] and means(moved) == [0]

    def test_a_larger_move_waits_once(self, streams: simulated.Streams) -> None:
        count = STAGED_MOVE // (SMALL + 4) + 1
        transfer([*large(count), *small(2)], SIM, source=CPU)
        assert streams.log == [
            f"{SLOT} pinned on sim:0", "128 h2d", *[f"{SMALL + 4} h2d"] * count, "host waits for main",
        ]  # fmt: skip

    def test_to_the_host_small_ones_share_a_copy_and_end_in_memory_of_their_own(
        self, streams: simulated.Streams
    ) -> None:
        there = [*small(200, SIM), *large(2, SIM)]
        streams.log.clear()
        back = transfer(there, CPU, source=SIM)
        copies = [line for line in streams.log if "d2h" in line]
        assert copies == [f"{64 * 200} d2h and waits", *[f"{SMALL + 4} d2h and waits"] * 2]
        assert not any("pinned" in line for line in streams.log)
        assert means(back) == [*range(200), 0, 1] and all(t.untyped_storage().nbytes() == t.nbytes for t in back)

    def test_an_idle_device_reads_each_large_tensor_and_storage_from_where_it_is(
        self, streams: simulated.Streams, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One wait takes less time than a copy on the host."""
        packed = pack(small(5), CPU)
        for source, direct in (
            (large(3), [f"{SMALL + 4} h2d"] * 3),
            ([*packed, *large(1)], [f"{SMALL + 4} h2d", "320 h2d"]),
        ):
            for idle, late, expected in (
                (False, False, [f"{SLOT} pinned on sim:0", *direct]),
                (True, False, [*direct, "host waits for main"]),
                (True, True, direct),
            ):
                monkeypatch.setattr(staging_module, "_stagings", {})
                streams.current[0].idle = idle
                streams.log.clear()
                moved = transfer(source, SIM, non_blocking=late, source=CPU)
                assert streams.log == expected and means(moved) == means(source)

    def test_what_is_cast_goes_through_pinned_memory_to_an_idle_device_too(self, streams: simulated.Streams) -> None:
        """The cast writes into it, where torch would write into memory that is copied again."""
        streams.current[0].idle = True
        transfer([torch.zeros(SMALL) for _ in range(2)], SIM, torch.float16, source=CPU)
        assert streams.log == [f"{SLOT} pinned on sim:0", *[f"{2 * SMALL} h2d"] * 2]

    def test_the_structure_of_the_result_does_not_depend_on_the_stream(self, streams: simulated.Streams) -> None:
        source = [*pack(small(3), CPU), *small(3), *large(2)]
        found: list[list[int]] = []
        for idle in (False, True):
            streams.current[0].idle = idle
            moved = transfer(source, SIM, source=CPU)
            first: dict[int, int] = {}
            found.append([first.setdefault(t.untyped_storage().data_ptr(), i) for i, t in enumerate(moved)])
        assert found == [[0, 0, 0, 3, 3, 3, 6, 7]] * 2

    def test_a_packed_dict_of_some_megabytes_goes_in_chunks_and_nobody_waits(self, streams: simulated.Streams) -> None:
        packed = pack([torch.arange((1 << 20) + 5.0), torch.ones(3)], CPU)
        expected = packed[0].clone()
        moved = transfer(packed, SIM, source=CPU)
        packed[0].zero_()
        nbytes = 4 * ((1 << 20) + 5) + 44 + 64
        assert streams.log == [f"{SLOT} pinned on sim:0", f"{SLOT} h2d", f"{SLOT} h2d", f"{nbytes - 2 * SLOT} h2d"]
        assert torch.equal(moved[0].cpu(), expected) and moved[1].sum() == 3
        check_invariants(DeviceDict({"x": moved[0], "y": moved[1]}))

    def test_a_larger_one_is_copied_by_the_driver(self, streams: simulated.Streams) -> None:
        packed = pack([torch.zeros(STAGED_MOVE // 4), torch.zeros(1)], CPU)
        transfer(packed, SIM, source=CPU)
        assert streams.log == [f"{STAGED_MOVE + 64} h2d and waits"]

    def test_a_pinned_source_is_read_late_only_if_the_caller_says_so(
        self, streams: simulated.Streams, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Tensor, "is_pinned", lambda self: True)
        for source, direct in ((pack(small(5), CPU), "320 h2d"), (large(1), f"{SMALL + 4} h2d")):
            transfer(source, SIM, source=CPU)
            streams.log.clear()
            transfer(source, SIM, non_blocking=True, source=CPU)
            assert streams.log == [direct] and not any(slot.users for slot in staging_of(SIM).slots)
            used = [slot.used for slot in staging_of(SIM).slots]
            transfer(source, SIM, source=CPU)
            assert [slot.used for slot in staging_of(SIM).slots] > used

    def test_the_host_waits_though_a_copy_fails(
        self, streams: simulated.Streams, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            raise torch.OutOfMemoryError("out of memory")

        monkeypatch.setattr(Tensor, "to", to)
        with pytest.raises(torch.OutOfMemoryError):
            transfer([t.requires_grad_() for t in large(2)], SIM, source=CPU)
        assert streams.log == ["host waits for main"]

    @pytest.mark.parametrize("dtype", [None, torch.float16])
    @pytest.mark.parametrize("target", [SIM, OTHER])
    def test_while_a_graph_is_captured_nothing_is_gathered(
        self, streams: simulated.Streams, dtype: torch.dtype | None, target: torch.device
    ) -> None:
        """A replay reads again from where the copy read: that must be the tensors themselves.

        The stream of the device that takes part is asked, not the stream of the current device.
        """
        streams.current[target.index].capturing = True
        for source in (small(3), pack(small(3), CPU)):
            streams.log.clear()
            transfer(source, target, dtype, non_blocking=True, source=CPU)
            assert streams.log == ["64 h2d"] * 3
        there = small(3, target)
        assert plan(there, target, CPU, dtype) == plan(there, target, CPU, dtype, True) == Plan(one_by_one=(0, 1, 2))
        assert plan(there, target, OTHER if target == SIM else SIM) == Plan(one_by_one=(0, 1, 2))
        assert plan(small(3), CPU, OTHER if target == SIM else SIM).coalesced, "the other device captures nothing"

    def test_between_two_devices_small_tensors_are_one_copy(self, streams: simulated.Streams, copies: Any) -> None:
        there = [t.to(SIM) for t in small(200)]
        copies.clear()
        streams.log.clear()
        moved = transfer(there, OTHER, source=SIM)
        assert len(streams.log) == 1 and streams.log[0].split()[1] == "d2d" and copies.total() <= 2
        assert all(t.device == OTHER and t._version == 0 for t in moved) and means(moved) == list(range(200))
        assert moved[0].untyped_storage().nbytes() <= BLOCK
        for t in there:
            t.fill_(-1)
        assert means(moved) == list(range(200))

    def test_a_packed_dict_is_cast_where_that_makes_the_copy_smaller(self, streams: simulated.Streams) -> None:
        tensors = [torch.full((8, 4), float(i)) for i in range(3)]
        packed, there = pack(tensors, CPU), pack([t.to(SIM) for t in tensors], SIM)
        for dtype, sizes in ((torch.float16, (192, 192, 192)), (torch.float64, (384, 384, 384))):
            for (source, from_, to), nbytes in zip(
                ((packed, CPU, SIM), (there, SIM, CPU), (there, SIM, OTHER)), sizes, strict=True
            ):
                streams.log.clear()
                moved = transfer(source, to, dtype, source=from_)
                moves = [
                    line for line in streams.log if "h2d" in line or "d2h" in line or (to == OTHER and "d2d" in line)
                ]
                assert moves[-1].split()[0] == str(nbytes), (dtype, from_, to)
                assert all(t.dtype == dtype and t.device == to for t in moved) and means(moved) == [0, 1, 2]

    def test_one_that_nobody_waits_for_is_cast_on_the_device(self, streams: simulated.Streams) -> None:
        transfer(pack(small(3), CPU), SIM, torch.float16, non_blocking=True, source=CPU)
        assert streams.log[:2] == [f"{SLOT} pinned on sim:0", "192 h2d"]

    def test_on_the_way_to_the_host_without_a_wait_it_is_cast_on_the_device(
        self, streams: simulated.Streams, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = Tensor.to

        def to(self: Tensor, *args: Any, non_blocking: bool = False, **kwargs: Any) -> Tensor:
            streams.log.append(f"{self.nbytes} {non_blocking=}")
            return real(self, *args, **kwargs)  # torch would pin the result

        there = transfer(pack(small(3), CPU), SIM)
        streams.log.clear()
        monkeypatch.setattr(Tensor, "to", to)
        moved = transfer(there, CPU, torch.float64, True, source=SIM)
        assert "384 non_blocking=True" in streams.log and all(t.dtype == torch.float64 for t in moved)
        assert means(moved) == [0, 1, 2]

    def test_a_full_device_does_not_stop_a_cast_on_the_way_out(self, streams: simulated.Streams) -> None:
        there = pack(small(3, SIM), SIM)
        with simulated.memory_left(0):
            assert means(transfer(there, CPU, torch.float16, source=SIM)) == [0, 1, 2]

    def test_casts_of_large_ones_wait_so_that_they_are_done_on_the_host(self, streams: simulated.Streams) -> None:
        transfer([t.requires_grad_() for t in large(2)], SIM, torch.float64, source=CPU)
        assert [line.endswith("and waits") for line in streams.log] == [True] * 2
        streams.log.clear()
        transfer(large(2), SIM, torch.float64, source=CPU)
        assert streams.log == [f"{SLOT} pinned on sim:0", *[f"{2 * SMALL + 8} h2d"] * 2], "cast on the way"

    def test_where_no_memory_can_be_pinned(self, streams: simulated.Streams) -> None:
        streams.can_pin = False
        moved = transfer(small(3), SIM, source=CPU)
        assert streams.log == ["192 h2d and waits"] and means(moved) == [0, 1, 2]
        there = large(2, SIM)
        streams.log.clear()
        assert means(transfer(there, CPU, source=SIM)) == [0, 1] and all("and waits" in line for line in streams.log)
        packed = pack([torch.ones(BLOCK), torch.zeros(1)], CPU)
        assert means(transfer(packed, SIM, source=CPU)) == [1, 0]


def means(tensors: list[Tensor]) -> list[float]:
    return [t.cpu().float().mean().item() for t in tensors]
