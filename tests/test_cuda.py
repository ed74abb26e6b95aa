"""What only a GPU can show: copies under a busy stream, pinned memory that is used again, a graph that is captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tensordict_lite import DeviceDict, to_numpy

pytestmark = pytest.mark.device

BUSY = 50_000_000  # clock cycles: tens of milliseconds, in which every copy below would be done


def fields(n: int = 20, device: str = "cpu") -> DeviceDict:
    """Small ones, which are gathered, and a large one, which is not."""
    return DeviceDict(
        {**{f"k{i}": torch.full((4, 4), float(i)) for i in range(n)}, "large": torch.zeros(1 << 20)}, device=device
    )


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize(
    "take",
    [
        lambda d: d.cpu(),
        lambda d: d.to("cpu"),
        lambda d: DeviceDict(d.numpy()),
        lambda d: DeviceDict(to_numpy(dict(d))),
    ],
)
def test_results_on_the_host_are_complete_under_a_busy_stream(
    take: Callable[[DeviceDict], DeviceDict], pack: bool
) -> None:
    d = fields(device="cuda")
    d = d.pack() if pack else d
    expected = {key: value.cpu() + 1 for key, value in d.items()}
    torch.cuda._sleep(BUSY)
    for value in d.values():
        value.add_(1)
    result = take(d)
    assert all(torch.equal(result[key], expected[key]) for key in expected)
    assert not any(value.is_pinned() for value in result.values())


@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize("pack", [False, True])
def test_small_dicts_do_not_wait_for_a_busy_stream_and_their_sources_are_free(pack: bool, pin: bool) -> None:
    """Fifty moves at once through pinned memory, none of it used again before the GPU has read it."""
    d = fields().drop("large")
    d = d.pack() if pack else d
    d = d.pin_memory() if pin else d
    d.to("cuda")  # the first pinned memory is asked of the driver
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY)
    moved = []
    for i in range(50):
        for value in d.values():
            value.fill_(float(i))
        moved.append(d.to("cuda"))
    assert not torch.cuda.current_stream().query(), "the calls returned while the stream was busy"
    for i, result in enumerate(moved):
        assert all((value == i).all() for value in result.values())


@pytest.mark.parametrize("pack", [False, True])
def test_a_pinned_source_of_large_fields_is_free_on_return(pack: bool) -> None:
    d = DeviceDict({"x": torch.ones(1 << 22), "y": torch.ones(1 << 22)})
    d = (d.pack() if pack else d).pin_memory()
    torch.cuda._sleep(BUSY)
    moved = d.to("cuda")
    for value in d.values():
        value.zero_()
    assert all((value == 1).all() for value in moved.values())


def test_on_a_side_stream() -> None:
    d = fields()
    with torch.cuda.stream(torch.cuda.Stream()):
        moved = d.to("cuda")
        assert moved.cpu() == d
    torch.cuda.synchronize()


def test_a_captured_graph_reads_its_inputs_again() -> None:
    static = {key: torch.zeros(4, pin_memory=True) for key in "abc"}
    d = DeviceDict(static)
    d.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moved = d.to("cuda", non_blocking=True)
        total = moved["a"] + moved["b"] + moved["c"]
    for value in (1.0, 2.0):
        for tensor in static.values():
            tensor.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert total.tolist() == [3 * value] * 4


def test_nothing_leaks() -> None:
    d = fields()
    packed = d.pack()

    def work() -> None:
        for source in (d, packed):
            source.to("cuda", torch.float16)
            source.to("cuda").cpu()

    work()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        work()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_out_of_memory_in_the_middle_of_a_move() -> None:
    d = DeviceDict({**fields(), "huge": torch.zeros(1 << 28)})
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 256e6) / total)
    before = torch.cuda.memory_allocated()
    try:
        for source in (d, d.pack()):
            with pytest.raises(torch.OutOfMemoryError):
                source.to("cuda")
            assert torch.cuda.memory_allocated() == before and (source["k3"] == 3).all()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize(
    "dtype", [torch.uint16, torch.uint32, torch.float8_e4m3fn, torch.bfloat16, torch.bool, torch.complex64]
)
def test_dtypes_that_not_every_kernel_takes(dtype: torch.dtype) -> None:
    tensors = {f"k{i}": (torch.arange(48, dtype=torch.uint8) % 2).view(dtype) for i in range(5)}
    d = DeviceDict({**tensors, "odd": torch.zeros(3, dtype=torch.int16)})

    def same(x: Any, y: Any) -> bool:
        return all(x[key].view(torch.uint8).equal(y[key].view(torch.uint8)) for key in y)

    for source in (d, d.pack(), d.to("cuda"), d.to("cuda").pack(), d.pack().to("cuda").clone()):
        assert same(source.cpu(), d) and same(source.to("cuda").cpu(), d) and same(source.to("cuda").pack().cpu(), d)
