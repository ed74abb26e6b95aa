"""The device itself: a mistake that CUDA forgives on most days shows here every time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import strict
import torch

D0, D1 = torch.device("sim", 0), torch.device("sim", 1)


@pytest.fixture(autouse=True)
def counted() -> None:
    strict.reset()


def current(device: torch.device = D0) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def test_a_copy_from_pinned_memory_reads_it_late_and_waits_for_nothing() -> None:
    source = torch.ones(1000).pin_memory()
    with strict.held() as stream:
        moved = source.to(D0, non_blocking=True)
        source.fill_(2)
    assert stream.in_time and moved.cpu().eq(2).all()


def test_a_copy_from_pageable_memory_waits_for_the_stream_and_reads_it_at_once() -> None:
    source = torch.ones(1000)
    with strict.held(seconds=0.05) as stream:
        moved = source.to(D0, non_blocking=True)
        source.fill_(2)
    assert not stream.in_time and moved.cpu().eq(1).all()


@pytest.mark.parametrize("pin", [False, True])
def test_a_default_copy_waits_for_the_stream(pin: bool) -> None:
    source = torch.ones(1000).pin_memory() if pin else torch.ones(1000)
    with strict.held(seconds=0.05) as stream:
        source.to(D0)
    assert not stream.in_time and strict.counts().h2d == strict.counts().waits == 1


def test_a_copy_to_pinned_memory_arrives_late() -> None:
    there, here = torch.ones(1000, device=D0), torch.zeros(1000).pin_memory()
    with strict.held() as stream:
        there.add_(1)
        here.copy_(there, non_blocking=True)
        assert here.eq(0).all()
    assert stream.in_time
    current().synchronize()
    assert here.eq(2).all()


def test_a_copy_to_pageable_memory_is_complete() -> None:
    there, here = torch.ones(1000, device=D0), torch.zeros(1000)
    with strict.held(seconds=0.05) as stream:
        here.copy_(there.add_(1), non_blocking=True)
    assert not stream.in_time and here.eq(2).all()


def test_a_copy_between_the_devices_waits_for_both_streams_and_the_host_for_none() -> None:
    there = torch.ones(1000, device=D0)
    with strict.held(), strict.held("sim:1") as other:
        there.add_(1)
        moved = there.to(D1)
        there.add_(1)
    assert other.in_time and moved.cpu().eq(2).all()


@pytest.mark.parametrize("record", [False, True])
def test_freed_memory_is_overwritten_unless_another_stream_was_recorded(record: bool) -> None:
    tensor, side = torch.ones(1000, device=D0), torch.Stream(device=D0)
    main = current()
    main.synchronize()
    with side:
        with strict.held():
            late = tensor.clone()
            if record:
                tensor.record_stream(side)
            del tensor
            main.synchronize()
        assert bool(late.cpu().eq(1).all()) is record


def test_an_event_orders_two_streams() -> None:
    tensor, side = torch.ones(1000, device=D0), torch.Stream(device=D0)
    with strict.held():
        tensor.add_(1)
        event = current().record_event()
        assert not event.query()
        side.wait_event(event)
        with side:
            late = tensor.clone()
        tensor.record_stream(side)
    side.synchronize()
    with side:
        assert late.cpu().eq(2).all() and event.query()


def test_delays_come_before_each_piece_of_work() -> None:
    tensor = torch.ones(10, device=D0)
    with strict.delays(5_000, 10_000):
        start = time.perf_counter()
        for _ in range(10):
            tensor.add_(1)
        assert time.perf_counter() - start < 0.03
        current().synchronize()
        assert time.perf_counter() - start > 0.05
    assert tensor.cpu().eq(11).all()


def test_the_device_is_full_on_demand() -> None:
    before = torch.sim.memory_allocated()  # pyright: ignore[reportAttributeAccessIssue]
    with strict.memory_left(1000), pytest.raises(torch.OutOfMemoryError, match=r"^sim out of memory"):
        torch.zeros(1000, device=D0)
    torch.zeros(1000, device=D1)
    assert torch.sim.memory_allocated() == before  # pyright: ignore[reportAttributeAccessIssue]


def test_no_memory_can_be_pinned_on_demand() -> None:
    torch.ops.strict.free_pinned()
    with strict.no_pinning(), pytest.raises(RuntimeError, match="no more memory can be pinned"):
        torch.ones(1 << 20).pin_memory()
    assert strict.counts().pins == 0
    torch.ones(1000).pin_memory()
    assert strict.counts().pins == 1


def test_operators() -> None:
    a, b = torch.arange(6.0, device=D0).reshape(2, 3), torch.ones(2, 3, device=D0)
    assert (a + b).sum().item() == 21 and a.t().contiguous().stride() == (2, 1) and a[1, 2].item() == 5
    assert torch.stack([a, b]).shape == (2, 2, 3) and torch.cat([a, b])[3].eq(1).all() and a.half().dtype == torch.half
    assert torch.nonzero(a > 2).shape == (3, 2) and a[torch.tensor([1], device=D0)].tolist() == [[3, 4, 5]]
    torch._foreach_add_([a, b], 1)
    assert a.tolist() == [[1, 2, 3], [4, 5, 6]] and b.mean().item() == 2
    assert torch.arange(3, device=D1).device == D1 and a.to(D1).to(torch.int64).cpu().sum() == 21


@pytest.mark.skipif(not hasattr(torch.accelerator, "Graph"), reason="this torch captures on CUDA only")
class TestCapture:
    def test_work_is_recorded_and_runs_at_each_replay(self) -> None:
        total, source = torch.zeros(4, device=D0), torch.zeros(4).pin_memory()
        with strict.captured() as graph:
            assert current().is_capturing() and not current(D1).is_capturing()
            total.add_(torch.empty(4, device=D0).copy_(source, non_blocking=True))
        assert not current().is_capturing() and total.cpu().eq(0).all()
        for i in range(4):
            source.fill_(i)
            graph.replay()
            current().synchronize()
        assert total.cpu().eq(0 + 1 + 2 + 3).all()

    def test_memory_of_the_graph_is_never_used_again_outside(self) -> None:
        with strict.captured() as graph:
            inner = torch.empty(100, device=D0).fill_(1)
            again = torch.empty(100, device=D0)
            del inner
        outside = [torch.zeros(100, device=D0) for _ in range(5)]
        graph.replay()
        assert all(t.cpu().eq(0).all() for t in outside) and again.device == D0

    @pytest.mark.parametrize("work", [
        lambda: torch.ones(1).to(D0),
        lambda: torch.ones(1).to(D0, non_blocking=True),
        lambda: torch.empty(1, device=D0).cpu(),
        lambda: current().synchronize(),
        lambda: current().record_event(),
        lambda: current(D1).record_event().query(),
        lambda: current(D1).record_event().synchronize(),
        lambda: torch.ones(1 << 22).pin_memory(),
    ])  # fmt: skip
    def test_what_waits_or_asks_ends_the_capture(self, work: Callable[[], object]) -> None:
        with (
            pytest.raises(RuntimeError, match="the capture ended with an error before"),
            strict.captured(),
            pytest.raises(RuntimeError, match="is not permitted when a stream is capturing"),
        ):
            work()
        assert torch.ones(1, device=D0).item() == 1


def run(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)


def test_the_host_cannot_read_device_memory() -> None:
    done = run("import ctypes, strict, torch; ctypes.string_at(torch.ones(9, device='sim').data_ptr(), 4)")
    assert done.returncode == -11, done.stderr


def test_a_forked_process_cannot_use_it() -> None:
    code = """
import os, strict, torch
torch.ones(9, device="sim")
if os.fork() == 0:
    try:
        torch.ones(9, device="sim")
    except RuntimeError as error:
        assert "Cannot re-initialize sim in forked subprocess" in str(error)
        os._exit(7)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
