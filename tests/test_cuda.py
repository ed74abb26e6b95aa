"""What only a real accelerator can show: copies under a busy stream, reuse of pinned memory, a captured graph.

While the simulated device is registered, it is the current accelerator of torch, and CUDA goes the safe way. So one
test runs this file again in a process without it. By hand, on any accelerator:

    python -m pytest --noconftest tests/test_cuda.py
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checks import check_invariants
from torch.utils.data import DataLoader

from tensordict_lite import DeviceDict, DeviceMismatchError, Ragged, collate, prefetch, to_numpy
from tensordict_lite._memory.device import capabilities
from tensordict_lite._memory.staging import SLOT, SLOTS

ACCELERATOR = torch.accelerator.current_accelerator(check_available=True)
NAME = "cpu" if ACCELERATOR is None else ACCELERATOR.type
module: Any = torch.get_device_module(NAME)
pytestmark = pytest.mark.device
SIMULATED = NAME == "sim" and not hasattr(module, "_sleep")  # the device of `make test-device` has this name too
real = pytest.mark.skipif(NAME == "cpu" or SIMULATED, reason="needs an accelerator, and no simulated one beside it")
cuda = pytest.mark.skipif(NAME != "cuda", reason="needs CUDA, and no simulated device beside it")
graphs = pytest.mark.skipif(
    NAME != "cuda" and (SIMULATED or not hasattr(torch.accelerator, "Graph")), reason="needs graphs"
)
two = pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two devices")


def busy() -> None:
    """Keep the current stream busy for tens of milliseconds, in which every copy below would be done."""
    if not hasattr(module, "_sleep"):
        pytest.skip(f"nothing keeps a stream of {NAME} busy for a known time")
    module._sleep(50_000_000)


def wait() -> None:
    torch.accelerator.synchronize()


@pytest.mark.skipif(not SIMULATED, reason="this is the process without the simulated device")
def test_this_file_without_the_simulated_device() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:xdist", __file__]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


@cuda
@pytest.mark.parametrize("protocol", ["__dlpack__", "__cuda_array_interface__"])
def test_an_array_of_another_library_decides_the_device(protocol: str) -> None:
    t = torch.arange(3, device=NAME)
    exported: dict[str, Any] = {
        "__dlpack__": lambda _, **options: t.__dlpack__(**options),
        "__dlpack_device__": lambda _: t.__dlpack_device__(),
    }
    if protocol != "__dlpack__":
        exported = {protocol: property(lambda _: getattr(t, protocol))}
    array = type("Array", (), exported)()
    d = DeviceDict({"n": {"x": array}, "y": 1})
    check_invariants(d)
    assert d.device == t.device and d["n", "x"].data_ptr() == t.data_ptr(), "nothing is copied"
    assert collate([{"x": array, "y": 1}] * 2)["x"].tolist() == [[0, 1, 2]] * 2
    with pytest.raises(DeviceMismatchError, match=r"^'x' is on cuda:0, this DeviceDict is on cpu"):
        DeviceDict({"y": torch.ones(1), "x": array})


@real
def test_it_takes_the_fast_way() -> None:
    able = capabilities(torch.zeros(1, device=NAME).device)
    assert able.accelerator and able.streams and able.pinned_memory and able.byte_views


def fields(n: int = 20, device: str = "cpu") -> DeviceDict:
    """Small ones, which are gathered, and a large one, which is not."""
    return DeviceDict(
        {**{f"k{i}": torch.full((4, 4), float(i)) for i in range(n)}, "large": torch.zeros(1 << 20)}, device=device
    )


@real
@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("take", [
    lambda d: d.cpu(),
    lambda d: d.to("cpu"),
    lambda d: DeviceDict(d.numpy()),
    lambda d: DeviceDict(to_numpy(dict(d))),
])  # fmt: skip
def test_results_on_the_host_are_complete_under_a_busy_stream(
    take: Callable[[DeviceDict], DeviceDict], pack: bool
) -> None:
    d = fields(device=NAME)
    d = d.pack() if pack else d
    expected = {key: value.cpu() + 1 for key, value in d.items()}
    busy()
    for value in d.values():
        value.add_(1)
    result = take(d)
    assert all(torch.equal(result[key], expected[key]) for key in expected)
    assert not any(value.is_pinned() for value in result.values())


@real
@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize("pack", [False, True])
def test_small_dicts_do_not_wait_for_a_busy_stream_and_their_sources_are_free(pack: bool, pin: bool) -> None:
    """Fifty moves at once through pinned memory, none of it used again before the GPU has read it."""
    d = fields().drop("large")
    d = d.pack() if pack else d
    d = d.pin_memory() if pin else d
    d.to(NAME)  # the first pinned memory is asked of the driver
    wait()
    busy()
    moved = []
    for i in range(50):
        for value in d.values():
            value.fill_(float(i))
        moved.append(d.to(NAME))
    assert not torch.accelerator.current_stream().query(), "the calls returned while the stream was busy"
    for i, result in enumerate(moved):
        assert all((value == i).all() for value in result.values())


@real
@pytest.mark.parametrize("pack", [False, True])
def test_a_pinned_source_of_large_fields_is_free_on_return(pack: bool) -> None:
    d = DeviceDict({"x": torch.ones(1 << 22), "y": torch.ones(1 << 22)})
    d = (d.pack() if pack else d).pin_memory()
    busy()
    moved = d.to(NAME)
    for value in d.values():
        value.zero_()
    assert all((value == 1).all() for value in moved.values())


@real
def test_on_a_side_stream() -> None:
    d = fields()
    with torch.Stream(device=NAME):
        moved = d.to(NAME)
        assert moved.cpu() == d
    wait()


@contextlib.contextmanager
def captured() -> Iterator[Any]:
    """The graph of the work within the block."""
    graph: Any = torch.cuda.CUDAGraph() if NAME == "cuda" else torch.accelerator.Graph()
    wait()
    with torch.Stream(device=NAME):
        graph.capture_begin()
        try:
            yield graph
        finally:
            graph.capture_end()


@graphs
def test_a_captured_graph_reads_its_inputs_again() -> None:
    static = {key: torch.zeros(4).pin_memory() for key in "abc"}
    d = DeviceDict(static)
    total = d.to(NAME, non_blocking=True)["a"]
    with captured() as graph:
        moved = d.to(NAME, non_blocking=True)
        total.copy_(moved["a"]).add_(moved["b"]).add_(moved["c"])
    for value in (1.0, 2.0):
        for tensor in static.values():
            tensor.fill_(value)
        graph.replay()
        wait()
        assert total.tolist() == [3 * value] * 4


@real
@pytest.mark.parametrize("bare", [False, True])
def test_a_loader_pins_ragged_fields(bare: bool) -> None:
    samples: Any = [{"ids": torch.arange(n), "x": torch.ones(n)} for n in (1, 2, 3, 4)]

    def join(rows: Any) -> Any:
        batch: Any = collate(rows, ragged=["ids", "x"])
        return [batch["ids"]] if bare else batch

    for i, batch in enumerate(DataLoader(samples, 2, collate_fn=join, pin_memory=True)):
        field = batch[0] if bare else batch["ids"]
        assert type(field) is Ragged and field == Ragged.from_rows([torch.arange(n) for n in (2 * i + 1, 2 * i + 2)])
        assert field.values.is_pinned() and field.offsets.is_pinned() and field.max_length == 2 * i + 2
        assert bare or (batch["x"]._lengths is field._lengths and batch.is_pinned())
        assert field.to(NAME, non_blocking=True).cpu() == field


@graphs
@pytest.mark.parametrize("pin", [False, True])
def test_a_captured_graph_reads_a_static_dict_that_is_filled_outside(pin: bool) -> None:
    source = DeviceDict({"x": torch.zeros(9), "n": {"y": torch.zeros(3, 4)}})
    source = source.pin_memory() if pin else source
    static = source.to(NAME)
    total = torch.zeros(1, device=NAME)
    with captured() as graph:
        total.copy_(static["x"][:1]).add_(static["n", "y"][0, :1])
    for value in (1.0, 2.0):
        for tensor in (source["x"], source["n", "y"]):
            tensor.fill_(value)
        static.fill_(source)
        graph.replay()
        assert total.item() == 2 * value


@graphs
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_graph_for_each_slot_of_prefetch(slots: int) -> None:
    memory = DeviceDict({"x": torch.zeros(1000), "y": torch.zeros(70_000)}).pin_memory()

    def source() -> Iterator[DeviceDict]:
        for i in range(10):
            memory["x"].fill_(i)
            memory["y"].fill_(i)
            yield memory

    made: dict[int, Any] = {}
    total, seen = torch.zeros(1, device=NAME), torch.zeros(10, device=NAME)
    for i, d in enumerate(prefetch(source(), NAME, slots=slots)):
        key = d["x"].data_ptr()
        if key not in made:
            with captured() as made[key]:
                total.copy_(d["x"][:1]).add_(d["y"][-1:])
        busy()
        made[key].replay()
        seen[i : i + 1].copy_(total)
    assert len(made) == slots and seen.tolist() == [2.0 * i for i in range(10)]


@real
def test_nothing_leaks() -> None:
    d = fields()
    packed = d.pack()

    def work() -> None:
        for source in (d, packed):
            source.to(NAME, torch.float16)
            source.to(NAME).cpu()

    work()
    wait()
    before = module.memory_allocated()
    for _ in range(20):
        work()
    wait()
    assert module.memory_allocated() == before


@cuda
def test_out_of_memory_in_the_middle_of_a_move() -> None:
    d = DeviceDict({**fields(), "huge": torch.zeros(1 << 28)})
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 256e6) / total)
    before = module.memory_allocated()
    try:
        for source in (d, d.pack()):
            with pytest.raises(torch.OutOfMemoryError):
                source.to(NAME)
            assert module.memory_allocated() == before and (source["k3"] == 3).all()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@real
@pytest.mark.parametrize(
    "dtype", [torch.uint16, torch.uint32, torch.float8_e4m3fn, torch.bfloat16, torch.bool, torch.complex64]
)
def test_dtypes_that_not_every_kernel_takes(dtype: torch.dtype) -> None:
    tensors = {f"k{i}": (torch.arange(48, dtype=torch.uint8) % 2).view(dtype) for i in range(5)}
    d = DeviceDict({**tensors, "odd": torch.zeros(3, dtype=torch.int16)})

    def same(x: Any, y: Any) -> bool:
        return all(x[key].view(torch.uint8).equal(y[key].view(torch.uint8)) for key in y)

    for source in (d, d.pack(), d.to(NAME), d.to(NAME).pack(), d.pack().to(NAME).clone()):
        assert same(source.cpu(), d) and same(source.to(NAME).cpu(), d) and same(source.to(NAME).pack().cpu(), d)


@real
@pytest.mark.parametrize("pin", [False, True])
def test_prefetched_batches_are_whole_under_busy_streams(pin: bool) -> None:
    n = 1 << 18
    batches = [DeviceDict({"x": torch.full((n,), float(i)), "y": torch.full((n,), i)}).pack() for i in range(12)]
    source = [d.pin_memory() for d in batches] if pin else batches
    totals: list[Any] = []
    for d in prefetch(source, NAME):
        busy()
        totals.append((d["x"] * 1.0).mean() + d["y"].double().mean())
    assert [total.item() for total in totals] == [2.0 * i for i in range(12)]


@real
@pytest.mark.parametrize("max_bytes", [None, 1, 5_000])
def test_prefetch_of_a_generator_that_uses_its_memory_again(max_bytes: int | None) -> None:
    memory = torch.zeros(1000, device="cpu").pin_memory()
    small = {f"k{i}": torch.zeros(5) for i in range(10)}

    def source() -> Iterator[Any]:
        for i in range(20):
            memory.fill_(i)
            yield DeviceDict({"x": memory, **{key: t.fill_(i) for key, t in small.items()}})

    for i, d in enumerate(prefetch(source(), NAME, depth=3, max_bytes=max_bytes)):
        kept = [value.clone() for value in d.values()]
        del d
        assert all((value == i).all() for value in kept)


@real
def test_prefetch_leaves_no_memory_behind() -> None:
    wait()
    before = module.memory_allocated()
    batches = iter(prefetch([DeviceDict({"x": torch.ones(1000)}) for _ in range(5)], NAME))
    next(batches)
    del batches  # as a loop does that is left by break
    wait()
    assert module.memory_allocated() == before


@real
def test_a_packed_dict_of_some_megabytes_does_not_wait_for_a_busy_stream() -> None:
    d = DeviceDict({"x": torch.arange(1 << 20), "y": torch.ones(1 << 19)}).pack()
    expected = d.clone()
    d.to(NAME)
    wait()
    busy()
    moved = d.to(NAME)
    assert not torch.accelerator.current_stream().query(), "the call returned while the stream was busy"
    for value in d.values():
        value.zero_()
    assert moved.is_packed and moved.cpu() == expected


@real
def test_a_host_that_runs_ahead_pins_a_bounded_amount() -> None:
    d = DeviceDict({"x": torch.zeros((1 << 18) - 64), "y": torch.ones(3)}).pack()
    busy()
    moved: list[DeviceDict] = []
    for i in range(3 * SLOT * SLOTS // d.nbytes):
        d["x"].fill_(i)
        moved.append(d.to(NAME))
    assert all((result["x"] == i).all() for i, result in enumerate(moved))


@real
@pytest.mark.parametrize("count", [2, 30])
def test_large_fields_to_the_host_under_a_busy_stream(count: int) -> None:
    d = DeviceDict({f"k{i}": torch.full((100_000,), float(i)) for i in range(count)}).to(NAME)
    busy()
    for value in d.values():
        value.add_(1)
    back = d.cpu()
    d["k0"].zero_()
    assert all((value == i + 1).all() for i, value in enumerate(back.values()))
    assert not any(value.is_pinned() for value in back.values())


@real
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_casts_of_a_packed_dict_each_way(dtype: torch.dtype) -> None:
    d = DeviceDict({"x": torch.randn(300_000), "id": torch.arange(7)}).pack()
    for source in (d, d.pin_memory()):
        moved = source.to(NAME, dtype)
        back = d.to(NAME).to("cpu", dtype)
        assert moved.is_packed and back.is_packed and moved.cpu() == back == d.to(dtype)


@real
@two
@pytest.mark.parametrize("pack", [False, True])
def test_between_two_devices_under_busy_streams(pack: bool) -> None:
    d = fields(device=f"{NAME}:0")
    d = d.pack() if pack else d
    busy()
    for value in d.values():
        value.add_(1)
    moved = d.to(f"{NAME}:1")
    for value in d.values():
        value.zero_()
    assert all((moved[f"k{i}"] == i + 1).all() for i in range(20)) and moved["k0"].device.index == 1


@real
@two
def test_moves_to_another_device_than_the_current_one() -> None:
    d = fields()
    for source in (d, d.pack()):
        moved = source.to(f"{NAME}:1")
        assert moved.cpu() == d and moved["k0"].device.index == 1
        assert torch.accelerator.current_stream().device.index == 0
