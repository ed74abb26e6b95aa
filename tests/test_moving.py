"""Moving, casting, NumPy, and the other things a tensor does, on a device with real values; copies are counted."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simulated
import torch
from checks import check_invariants
from torch import nn

from tensordict_lite import DeviceDict, collate, prefetch, to_device

SIM = simulated.SIM


def sample(device: torch.device | str = "cpu") -> DeviceDict:
    return DeviceDict(
        {"x": torch.arange(6.0).reshape(2, 3), "id": torch.tensor([1, 2]), "n": {"m": torch.tensor([True]), "e": {}}},
        device=device,
    )


class TestTo:
    def test_there_and_back(self, device: torch.device) -> None:
        d = sample()
        moved = d.to(device)
        check_invariants(moved)
        assert moved.device == device and moved["n", "e"].device == device and d.device == torch.device("cpu")
        assert type(moved["n"]) is DeviceDict and list(moved) == list(d)
        back = moved.to("cpu")
        assert back == d and back["x"] is not d["x"]

    def test_one_copy_for_small_tensors_and_none_where_nothing_changes(self, copies: Any) -> None:
        d = sample()
        moved = d.to("sim")
        assert copies == {"h2d": 1}
        copies.clear()
        assert moved.to("sim") is moved and moved.to("sim:0") is moved and moved.to(torch.device("sim", 0)) is moved
        assert moved.to(moved["x"]) is moved and moved.to(moved) is moved and moved.to(DeviceDict()) is moved
        assert moved.to(torch.float32) is moved and moved.to("sim", torch.float32) is moved and moved.to() is moved
        assert moved.float() is moved and moved.to(None) is moved and moved.is_packed
        assert not copies
        assert moved.to("sim:1").device == torch.device("sim:1")
        assert copies == {"d2d": 1}, "they fill one storage"

    def test_rows_at_an_index_on_the_device_are_copied_without_the_host(self, copies: Any) -> None:
        d = DeviceDict({"id": [1, 2], "n": {"m": [True, False], "e": {}}}, device="sim")
        at = torch.tensor([1, 0]).to("sim")
        copies.clear()
        rows, batch = d.rows[at], collate(d.rows.__getitems__(at))
        assert not copies
        assert rows.cpu()["id"].tolist() == batch.cpu()["id"].tolist() == [2, 1]
        meta = d.to("meta")
        assert meta.rows[torch.tensor([1, 0], device="meta")]["n", "m"].shape == (2,)

    def test_every_form_of_the_arguments(self, device: torch.device) -> None:
        d = sample()
        target = torch.zeros(1, device=device, dtype=torch.float64)
        for moved in (
            d.to(device, torch.float64), d.to(device=device, dtype=torch.float64), d.to(target), d.to(other=target),
            d.to(device, torch.float64, False, True), d.to(target, True), d.to(str(device), dtype=torch.float64),
            d.to(device, dtype=torch.float64, non_blocking=True, copy=True),
        ):  # fmt: skip
            check_invariants(moved)
            assert moved.device == device and moved["x"].dtype == torch.float64
        assert d.to(sample(device)).device == device and d.to(sample(device))["x"].dtype == torch.float32
        assert d.to(torch.zeros(1, dtype=torch.int64, device=device))["x"].dtype == torch.float32
        assert d.to(device, True)["x"].dtype == torch.float32, "as Tensor.to(device, non_blocking)"  # pyright: ignore[reportArgumentType, reportCallIssue]
        assert d.to(torch.float64, True, True)["x"].dtype == torch.float64

    def test_a_dtype_leaves_ids_and_masks_alone(self) -> None:
        d = DeviceDict({"x": [1.5], "id": [1], "mask": [True], "u": np.ones(1, np.uint8), "c": [1j]})
        cast = d.to(torch.complex128)
        assert {k: str(v.dtype) for k, v in cast.items()} == {
            "x": "torch.complex128", "id": "torch.int64", "mask": "torch.bool", "u": "torch.uint8",
            "c": "torch.complex128",
        }  # fmt: skip
        half = d.drop("c").half()
        assert half["x"].dtype == torch.float16 and half["id"] is d["id"]
        assert [getattr(d.drop("c"), name)()["x"].dtype for name in ("float", "double", "bfloat16")] == [
            torch.float32, torch.float64, torch.bfloat16,
        ]  # fmt: skip

    def test_copy_makes_new_tensors(self) -> None:
        d = sample()
        for again in (d.to("cpu", copy=True), d.to(copy=True), d.to(torch.float32, copy=True)):
            assert again == d and again is not d
            assert not any(a is b for a, b in zip(again._tensors(), d._tensors(), strict=True))

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            ((3.5,), "to(): expected a device, got a float: 3.5; write to(device), to(dtype)"),
            ((True,), "to(): expected a device, got a bool: True"),
            (("cpu", "float32"), "to(): expected a torch.dtype as the dtype, got 'float32'"),
            ((torch.int64,), "to(): expected a floating-point or complex dtype, which casts tensors of that kind, got "
             "torch.int64; to cast every tensor use .map(lambda t: t.to(torch.int64))"),
            (("cpu", torch.float32, False, False, 1), "with non_blocking= and copy=, got 5 positional arguments"),
        ],
    )  # fmt: skip
    def test_arguments_that_fit_no_form(self, args: tuple[Any, ...], message: str) -> None:
        with pytest.raises(TypeError) as caught:
            sample().to(*args)
        assert message in str(caught.value)

    def test_accelerates_retry_is_never_provoked(self, device: torch.device) -> None:
        """accelerate calls ``to(device, non_blocking=...)`` and takes any TypeError for a missing parameter."""
        assert sample().to(device, non_blocking=True).device == device
        with pytest.raises(RuntimeError):
            sample().to("nonsense", non_blocking=True)

    def test_an_empty_dict_moves_too(self, device: torch.device) -> None:
        d = DeviceDict().to(device)
        assert d.device == device
        d["x"] = torch.ones(1, device=device)
        check_invariants(d)

    def test_autograd_records_the_move(self, device: torch.device) -> None:
        leaf = torch.ones(3, requires_grad=True)
        d = DeviceDict({"w": leaf, "x": torch.ones(3)})
        moved = d.to(device)
        (moved["w"] * moved["x"] * 2).sum().backward()
        assert leaf.grad is not None and leaf.grad.tolist() == [2.0] * 3
        assert d.to("cpu")["w"] is leaf and d.to(torch.float32)["w"] is leaf
        assert d.to(torch.float64)["w"].grad_fn is not None and d.clone()["w"].grad_fn is not None

    def test_special_tensors_move(self, device: torch.device) -> None:
        d = DeviceDict(
            {
                "p": nn.Parameter(torch.ones(2)),
                "c": torch.tensor([1j]).conj(),
                "z": torch.zeros(0, 3),
                "s": 1,
                "t": torch.ones(2, 3).t(),
                "l": torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last),
            }
        )
        moved = d.to(device)
        assert moved.cpu() == d
        assert moved["t"].stride() == d["t"].stride() and moved["l"].is_contiguous(memory_format=torch.channels_last)

    def test_cpu_cuda_and_is_cuda(self, device: torch.device) -> None:
        moved = sample(device)
        assert moved.cpu().device == torch.device("cpu") and sample().cpu() is not None
        assert moved.is_cuda == (device.type == "cuda") and not sample().is_cuda and not DeviceDict().is_cuda
        if torch.cuda.is_available():
            assert sample().cuda().device == sample().cuda(0).device == torch.device("cuda:0")
        else:
            with pytest.raises((RuntimeError, AssertionError)):
                sample().cuda()

    @pytest.mark.parametrize(("args", "options"), [
        ((torch.float16, "sim:0"), {}),
        ((torch.float16, torch.float64), {}),
        (("cpu",), {"device": "sim:0"}),
        ((torch.float16,), {"dtype": torch.float64}),
        ((torch.zeros(1),), {"device": "sim:0"}),
        (("cpu", torch.float16, 1), {}),
        (("cpu",), {"copy": "yes"}),
        (("cpu",), {"memory_format": torch.channels_last}),
    ])  # fmt: skip
    def test_an_argument_that_would_be_ignored_is_refused(self, args: Any, options: Any) -> None:
        """``to(torch.float16, "cuda")`` took "cuda" for ``non_blocking`` and stayed on the CPU."""
        with pytest.raises(TypeError, match=r"^to\(\)(: expected .*, got| got an unexpected)"):
            DeviceDict({"x": 1.0}).to(*args, **options)


class TestNumpy:
    def test_a_plain_nested_dict_sharing_memory(self) -> None:
        d = sample()
        arrays = d.numpy()
        assert type(arrays) is dict and type(arrays["n"]) is dict and arrays["n"]["e"] == {}
        arrays["x"][0, 0] = 9
        assert d["x"][0, 0] == 9
        copied = d.numpy(copy=True)
        copied["x"][0, 0] = 8
        assert d["x"][0, 0] == 9 and copied["n"]["m"].tolist() == [True]

    def test_from_a_device(self, device: torch.device) -> None:
        arrays = sample(device).numpy()
        assert arrays["x"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] and arrays["n"]["m"].tolist() == [True]

    def test_grad_conj_and_neg(self) -> None:
        d = DeviceDict({
            "g": torch.ones(1, requires_grad=True), "c": torch.tensor([1j]).conj(), "i": torch.tensor([1j]).conj().imag,
        })  # fmt: skip
        assert d.numpy()["g"].tolist() == [1.0] and d.numpy()["c"].tolist() == [-1j]
        assert d.numpy()["i"].tolist() == [-1.0]

    @pytest.mark.parametrize(("tensor", "message"), [
        (torch.ones(1, dtype=torch.bfloat16), "'n.x': NumPy has no bfloat16; call .float() first"),
        (torch.eye(2).to_sparse(), "'n.x': NumPy has no float32, torch.sparse_coo; convert it first"),
    ])  # fmt: skip
    def test_what_numpy_does_not_have(self, tensor: torch.Tensor, message: str) -> None:
        with pytest.raises(TypeError) as caught:
            DeviceDict({"n": {"x": tensor}}).numpy()
        assert str(caught.value) == message

    def test_numpy_of_layouts_it_does_not_have(self) -> None:
        jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        with pytest.raises(TypeError, match=r"^'n': NumPy has no float32, torch\.jagged; convert it first$"):
            DeviceDict({"n": jagged}).numpy()


class TestLikeATensor:
    def test_clone_detach_contiguous_requires_grad(self, device: torch.device) -> None:
        d = sample(device)
        c = d.clone()
        c["x"].zero_()
        c["n", "z"] = 1
        assert d["x"].sum() == 15 and "z" not in d["n"]
        assert d.requires_grad_() is d and d["x"].requires_grad and not d["id"].requires_grad
        assert d.detach()["x"].data_ptr() == d["x"].data_ptr() and not d.detach()["x"].requires_grad
        assert not d.requires_grad_(False)["x"].requires_grad
        t = DeviceDict({"t": torch.ones(2, 3).t(), "x": torch.ones(2)})
        assert t.contiguous()["t"].is_contiguous() and t.contiguous()["x"] is t["x"]

    def test_pinning(self) -> None:
        assert not sample().is_pinned() and not DeviceDict().is_pinned()
        if torch.cuda.is_available():
            d = sample()
            pinned = d.pin_memory()
            assert pinned == d and pinned.is_pinned() and not d.is_pinned()
            assert all(a is b for a, b in zip(pinned.pin_memory()._tensors(), pinned._tensors(), strict=True))

    def test_record_stream(self) -> None:
        if torch.cuda.is_available():
            sample("cuda").record_stream(torch.cuda.Stream())
        assert DeviceDict().record_stream(None) is None


def test_no_insert_asks_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """``is_pinned`` is a driver query and may create a context in a DataLoader worker."""

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("asked the driver")

    monkeypatch.setattr(torch.Tensor, "is_pinned", forbidden)
    monkeypatch.setattr(torch.cuda, "_lazy_init", forbidden)
    d = sample()
    d["y"] = [1, 2]
    d.update(z="text", p=torch.nn.Parameter(torch.ones(1)))
    assert set(d.copy().to(torch.float64).numpy()) == {*sample(), "y", "z", "p"}


@pytest.mark.parametrize("make", [lambda d: d, lambda d: d.to("sim"), lambda d: d.copy(), lambda d: d.map(lambda t: t)])
def test_tensors_are_freed_without_the_garbage_collector(make: Any) -> None:
    gc.disable()
    try:
        d = make(sample())
        refs = [weakref.ref(t) for t in d._tensors()]
        itself = weakref.ref(d)
        del d
        assert itself() is None and all(ref() is None for ref in refs)
    finally:
        gc.enable()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_every_way_raises_the_error_of_torch(tmp_path: Path) -> None:
    with pytest.raises((RuntimeError, AssertionError)) as torchs:
        torch.ones(1).to("cuda:0")
    file = tmp_path / "d.safetensors"
    one, two = DeviceDict({"x": 1.0}), DeviceDict({"x": [1.0], "n": {"y": [2]}})
    two.save(file)
    calls: list[Callable[[], Any]] = [
        lambda: to_device({"a": torch.ones(1), "b": torch.ones(1)}, "cuda:0"),
        lambda: DeviceDict.load(file, device="cuda:0"),
        lambda: DeviceDict({"x": torch.ones(1), "y": torch.ones(1)}, device="cuda:0"),
        lambda: DeviceDict({"x": [1.0]}, device="cuda"),
    ]
    for d in (one, two, two.pack()):
        calls += [partial(d.to, "cuda:0"), partial(d.to, "cuda"), partial(d.to, "cuda:0", torch.float16)]
        calls += [partial(d.to, "cuda:0", non_blocking=True), d.cuda, partial(d.cuda, 0)]
    for call in calls:
        with pytest.raises(torchs.type) as ours:
            call()
        assert str(ours.value) == str(torchs.value)
    with pytest.raises(torchs.type) as ours:
        list(prefetch([two], "cuda:0"))
    assert str(ours.value) == str(torchs.value)


def test_other_is_a_tensor_or_a_dict() -> None:
    wrong: Any = 3
    with pytest.raises(TypeError, match=r"^to\(\): expected a tensor or a dict as other=, got an int; write "):
        DeviceDict({"x": 1.0}).to(other=wrong)


def test_a_vectorized_function_moves_tensors_one_by_one() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert torch.vmap(lambda row: to_device({"x": row, "n": [row]}, "cpu")["n"][0] + 1)(x).equal(x + 1)
