"""Packing: one storage for a whole dict, whose fields stay tensors of their own, and no stale memory is ever used."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import pickletools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import simulated
import torch
from checks import check_invariants, fails
from files import DTYPES, compiles
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from tensordict_lite import DeviceDict, Vocabulary


class Batch(DeviceDict, objects="keep", encoders={"s": Vocabulary(["a", "b"])}):
    """At module level, as what is pickled must be."""


def sample(**more: Any) -> DeviceDict:
    return DeviceDict(
        {
            "x": torch.arange(6.0).reshape(2, 3),
            "id": [1, 2, 3],
            "n": {"m": [True], "e": {}, "y": torch.ones(2, 3)},
            **more,
        }
    )


def storages(d: DeviceDict) -> int:
    """The storages under the tensors of ``d`` that have elements."""
    return len({t.untyped_storage()._cdata for t in d._tensors() if t.numel()})


def beside() -> dict[str, Tensor]:
    """One of each kind of tensor that is more than its bytes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each of these layouts says that it is in beta
        complex_ = torch.tensor([1j, 2.0])
        return {
            "grad": torch.ones(2, requires_grad=True),
            "nonleaf": torch.ones(2, requires_grad=True) * 2,
            "parameter": nn.Parameter(torch.ones(2)),
            "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
            "conj": complex_.conj(),
            "neg": complex_.conj().imag,
            "coo": torch.eye(2).to_sparse(),
            "csr": torch.eye(2).to_sparse_csr(),
            "strided_nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            "quantised": torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8),
        }  # fmt: skip


class TestPack:
    def test_one_storage_for_every_depth(self, device: torch.device) -> None:
        d = sample().to(device)
        assert d.is_packed and storages(d) == 1
        packed = d.pack()
        check_invariants(packed)
        assert packed == d and packed.is_packed and storages(packed) == 1
        assert packed.device == device and type(packed["n"]) is DeviceDict and list(packed) == list(d)
        assert packed.pack() is packed is d
        assert all(("packed" in repr(one)) == one.is_packed for one in (packed, d))

    def test_fields_are_aligned_and_nothing_else_is_there(self) -> None:
        packed = sample().pack()
        first, *_ = packed._tensors()
        assert all(t.data_ptr() % 64 == 0 for t in packed._tensors())
        # Two of 24 bytes side by side, then the ids and the mask, each from a multiple of 64, and so the end.
        assert first.untyped_storage().nbytes() == 4 * 64 and first.storage_offset() == 0

    def test_what_is_packed_already_is_kept(self) -> None:
        alone = DeviceDict({"x": torch.ones(3)})
        assert alone.is_packed and alone.pack() is alone, "one tensor in a storage of its own"
        assert "packed" not in repr(alone)
        part = DeviceDict({"x": torch.ones(10)[2:5]})
        assert not part.is_packed and part.pack()["x"].untyped_storage().nbytes() == 12, "a part of another storage"

    @pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
    @pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
    def test_every_dtype(self, dtype: torch.dtype) -> None:
        source = torch.arange(48, dtype=torch.uint8) % 2  # as bools too
        tensors = {f"{n}": source[: n * dtype.itemsize].view(dtype) for n in (1, 2, 3)}
        packed = DeviceDict({**tensors, "2nd": tensors["2"].clone()}).pack()
        assert packed.is_packed
        for key, tensor in tensors.items():
            assert packed[key].dtype == dtype and torch.equal(packed[key].view(torch.uint8), tensor.view(torch.uint8))

    @given(st.data())
    def test_any_values_shapes_and_strides(self, data: st.DataObject) -> None:
        kinds = st.sampled_from([np.float32, np.float64, np.int64, np.int8, np.bool_, np.complex64])
        shapes = arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
        made = data.draw(st.lists(kinds.flatmap(lambda kind: arrays.arrays(kind, shapes)), min_size=1, max_size=8))
        views: list[Callable[[Tensor], Tensor]] = [
            lambda t: t, lambda t: t.T if t.dim() == 2 else t, lambda t: t[..., ::2] if t.dim() else t,
            lambda t: t.unsqueeze(-1).expand(*t.shape, 2), lambda t: t.movedim(0, -1) if t.dim() else t,
        ]  # fmt: skip
        d = DeviceDict({f"{i}": data.draw(st.sampled_from(views))(torch.from_numpy(a)) for i, a in enumerate(made)})
        packed = d.pack()
        check_invariants(packed)
        assert packed.is_packed or not any(t.numel() for t in d.values())
        for key, tensor in d.items():
            out = packed[key]
            assert out.shape == tensor.shape and torch.equal(out.nan_to_num(), tensor.nan_to_num())
            strides = zip(out.shape, out.stride(), torch.empty_like(tensor).stride(), strict=True)
            if 0 not in tensor.shape and 0 not in tensor.stride():
                assert all(ours == torchs for size, ours, torchs in strides if size != 1)
        moved = packed.to("sim")
        assert moved.is_packed == packed.is_packed and packed.map(torch.nan_to_num) == moved.cpu().map(torch.nan_to_num)

    def test_strides_are_dense_and_memory_formats_kept(self) -> None:
        image = torch.rand(2, 3, 4, 5)
        d = DeviceDict(
            {"plain": image, "last": image.to(memory_format=torch.channels_last), "t": torch.rand(3, 2).t(),
             "gaps": torch.rand(4, 6)[:, ::2], "wide": torch.rand(3, 1).expand(3, 4)}
        )  # fmt: skip
        packed = d.pack()
        assert packed == d
        assert packed["last"].is_contiguous(memory_format=torch.channels_last) and packed["t"].stride() == (1, 2)
        assert packed["gaps"].stride() == (3, 1) and packed["wide"].stride() == (4, 1)

    def test_no_size_and_no_dimensions(self) -> None:
        d = DeviceDict({"a": torch.zeros(0, 3), "b": torch.tensor(2.5), "c": torch.zeros(2, 0), "d": torch.tensor(7)})
        packed = d.pack()
        assert packed == d and packed.is_packed and packed["b"].shape == () and packed["a"].shape == (0, 3)
        assert packed.to("sim").cpu() == d
        empty = DeviceDict({"a": torch.zeros(0, 3), "b": torch.zeros(0)})
        assert empty.pack() is empty and empty.to("sim")["a"].shape == (0, 3)

    def test_what_is_more_than_its_bytes_stays_beside(self) -> None:
        for kind, tensor in beside().items():
            d = DeviceDict({kind: tensor, "x": torch.ones(2), "y": torch.zeros(3)})
            packed = d.pack()
            assert packed[kind] is tensor, kind
            assert packed.is_packed and storages(packed.drop(kind)) == 1, kind
            for again in (packed.clone(), packed.to(copy=True), copy.copy(packed)):
                assert storages(again.drop(kind)) == 1 and again["x"].equal(d["x"]) and again["y"].equal(d["y"]), kind
        grad = DeviceDict({"w": torch.ones(2, requires_grad=True), "x": torch.ones(2), "y": torch.zeros(3)}).pack()
        (grad.to("sim")["w"] * 3).sum().backward()
        assert grad["w"].grad.tolist() == [3.0, 3.0] and grad.is_packed  # pyright: ignore[reportOptionalMemberAccess]

    def test_a_tensor_under_two_keys_stays_one(self, device: torch.device) -> None:
        t = torch.ones(3)
        d = DeviceDict({"a": t, "b": torch.zeros(2), "n": {"c": t}})
        for again in (
            d.pack(),
            d.pack().to(device),
            d.to(device),
            pickle.loads(pickle.dumps(d.pack())),
            d.pack().clone(),
            d.pack().to(device, torch.float64).to(torch.float32),
        ):
            assert again["a"] is again["n", "c"] and again["b"] is not again["a"] and again.cpu() == d
        assert d.pack().is_packed and d.pack().to(device).is_packed

    def test_where_there_is_nothing_to_pack_nothing_is(self) -> None:
        for d in (sample().to("meta"), DeviceDict(), DeviceDict(device="cpu"), DeviceDict({"z": torch.zeros(0)}),
                  DeviceDict({"w": torch.ones(1, requires_grad=True)})):  # fmt: skip
            assert d.pack() is d and not d.is_packed
        assert sample().pack().to("meta").device == torch.device("meta")

    def test_out_of_memory_leaves_the_dict_as_it_was(self) -> None:
        d = sample().to("sim").map(torch.clone)
        live = simulated.live_bytes()
        with simulated.memory_left(100), pytest.raises(torch.OutOfMemoryError, match="sim out of memory"):
            d.pack()
        assert d == sample() and simulated.live_bytes() == live


class TestFieldsAreOrdinaryTensors:
    def test_each_has_its_own_version_counter(self) -> None:
        """With one counter for all, writing the mask would invalidate what autograd saved of x."""
        for d in (sample(), sample().to("sim")):
            packed = d.pack()
            x, mask = packed["x"], packed["n", "m"]
            weight = torch.ones(2, 3, device=packed.device, requires_grad=True)
            loss = (weight * x).sum()
            mask.fill_(False)
            packed["n", "y"].zero_()
            loss.backward()
            assert weight.grad.cpu().tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]  # pyright: ignore[reportOptionalMemberAccess]
            assert x._version == 0 and not x._is_view() and x.is_leaf

    def test_the_check_that_autograd_does_is_still_done(self) -> None:
        packed = sample().pack()
        loss = (torch.ones(2, 3, requires_grad=True) * packed["x"]).sum()
        packed["x"].zero_()
        fails(RuntimeError, "modified by an inplace operation", loss.backward)

    def test_writes_in_place_are_in_what_is_sent(self, device: torch.device) -> None:
        packed = sample().pack()
        packed["x"].mul_(2)
        packed["n", "m"][0] = False
        packed["id"].data.add_(1)
        packed["n", "y"].numpy()[...] = 5
        assert packed.is_packed
        for sent in (packed.to(device), pickle.loads(pickle.dumps(packed)), packed.clone(), packed.to(torch.float64)):
            assert sent.is_packed and sent["x"].cpu().tolist() == [[0, 2, 4], [6, 8, 10]]
            assert not sent["n", "m"].any() and sent["id"].tolist() == [2, 3, 4] and (sent["n", "y"] == 5).all()

    def test_they_can_start_to_require_grad(self) -> None:
        packed = sample().pack()
        packed["x"].requires_grad_()
        moved = packed.to("sim")
        moved["x"].sum().backward()
        assert packed["x"].grad.tolist() == [[1.0] * 3] * 2 and not packed.is_packed and moved.cpu() == packed  # pyright: ignore[reportOptionalMemberAccess]

    def test_freed_without_the_garbage_collector(self) -> None:
        gc.disable()
        try:
            packed = sample().pack()
            refs = [weakref.ref(t) for t in packed._tensors()]
            before, moved = simulated.live_bytes(), packed.to("sim")
            del packed, moved
            assert all(ref() is None for ref in refs) and simulated.live_bytes() == before
        finally:
            gc.enable()

    def test_in_inference_mode(self) -> None:
        with torch.inference_mode():
            packed = sample().pack()
            assert packed.is_packed and packed.to("sim").cpu() == sample() and packed.clone().is_packed
        outside = packed.pack().to("sim")
        assert outside.cpu() == sample() and outside.is_packed


def nine() -> Tensor:
    return torch.full((2, 3), 9.0)


def moved_within(d: Any, *layout: Any) -> None:
    d["x"].set_(d["x"].untyped_storage(), *layout)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "replaced": lambda d: d.update(x=nine()),
    "deleted": lambda d: d.pop("x"),
    "added": lambda d: d["n"].update(z=nine()),
    "reordered": lambda d: d.update(x=d.pop("x")),
    "swapped": lambda d: d.update(x=d["n", "y"], n={**d["n"], "y": d["x"]}),
    "replaced in a nested dict": lambda d: d["n"].update(y=nine()),
    "given data": lambda d: setattr(d["x"], "data", nine()),
    "given data of another dtype": lambda d: setattr(d["x"], "data", d["x"].data.view(torch.int32)),
    "set to another storage": lambda d: d["x"].set_(nine()),
    "set within the storage": lambda d: moved_within(d, 16, (2, 3), (3, 1)),
    "set to another stride": lambda d: moved_within(d, 0, (2, 3), (1, 1)),
    "set to overlap": lambda d: d["x"].as_strided_((2, 3), (0, 1)),
    "storage grown": lambda d: d["x"].untyped_storage().resize_(1000),
    "set to another shape": lambda d: d["x"].resize_(3),
    "resized": lambda d: d["x"].resize_(100, 100).fill_(9.0),
    "transposed": lambda d: d["x"].t_(),
}
STILL_ALONE = {"reordered", "swapped", "given data of another dtype", "set to another shape", "transposed"}
"""After these changes the fields still fill the storage but for alignment."""


@pytest.mark.parametrize("change", CHANGES)
class TestNothingStaleIsSent:
    def test_a_change_of_fields_ends_it_and_shows_in_whatever_is_sent(self, change: str) -> None:
        packed = sample().pack()
        CHANGES[change](packed)
        check_invariants(packed)
        assert packed.is_packed == (change in STILL_ALONE)
        truth = {key: value.clone() for key, value in packed.flatten().items() if isinstance(value, Tensor)}
        for sent in (
            packed.to("sim").cpu(),
            packed.to("sim", torch.float64).cpu().to(torch.float32),
            packed.clone(),
            packed.to(copy=True),
            packed.pack(),
            pickle.loads(pickle.dumps(packed)),
            copy.deepcopy(packed),
            packed.copy(),
            packed.pack().to("sim").cpu(),
        ):
            check_invariants(sent)
            fields = {key: value for key, value in sent.flatten().items() if isinstance(value, Tensor)}
            assert list(fields) == list(truth)
            assert all(torch.equal(fields[key], truth[key]) for key in truth)

    def test_it_can_be_packed_again(self, change: str) -> None:
        packed = sample().pack()
        CHANGES[change](packed)
        again = packed.pack()
        assert again.is_packed and again == packed and storages(again) == 1


def test_a_field_over_the_same_memory_in_another_storage() -> None:
    """It may count as packed, as what lies there is the field, but nothing may go wrong with it."""
    packed = sample().pack()
    packed["id"] = torch.from_numpy(packed["id"].numpy())
    packed["id"].fill_(4)
    for sent in (packed.to("sim").cpu(), packed.clone(), pickle.loads(pickle.dumps(packed))):
        assert sent["id"].tolist() == [4, 4, 4] and sent == packed


class TestWhatCostsOneTensor:
    def test_one_copy_each_way(self, copies: Any) -> None:
        d = DeviceDict({f"k{i}": torch.full((16, 32), float(i)) for i in range(200)}).pack()
        moved = d.to("sim")
        assert copies == {"h2d": 1} and moved.is_packed
        copies.clear()
        assert moved.to("sim") is moved and not copies
        assert moved.to("sim:1").is_packed and copies == {"d2d": 1}
        copies.clear()
        back = moved.cpu()
        assert copies == {"d2h": 1} and back.is_packed and back == d
        copies.clear()
        half = d.to("sim", torch.float16)
        assert half.is_packed and half["k3"].dtype == torch.float16 and copies == {"h2d": 1}, (
            "cast here: half the bytes"
        )
        copies.clear()
        assert d.to("sim", torch.float64).is_packed and copies == {"h2d": 1, "d2d": 1}, "cast over there"
        copies.clear()
        with simulated.memory_left(0):
            assert half.to("cpu", torch.float32) == d and copies == {"d2h": 1}
        copies.clear()
        assert d.to("sim", non_blocking=True).cpu() == d and copies == {"h2d": 1, "d2h": 1}

    def test_what_is_beside_is_copied_by_itself(self, copies: Any) -> None:
        d = sample(w=torch.ones(2, requires_grad=True)).pack()
        moved = d.to("sim")
        assert copies == {"h2d": 2} and moved.is_packed and moved["w"].grad_fn is not None

    def test_larger_than_what_is_gathered(self, copies: Any) -> None:
        d = DeviceDict({f"k{i}": torch.full((1 << 19,), float(i)) for i in range(3)}).pack()
        assert d.to("sim").cpu() == d and copies["d2h"] == 1
        assert copies["h2d"] in (1, 3), "one copy; through pinned memory one for each 2 MiB"

    def test_casts_keep_it_packed_and_ids_as_they_are(self) -> None:
        d = sample(w=torch.ones(2, requires_grad=True)).pack()
        half = d.half()
        check_invariants(half)
        assert half.is_packed and half["x"].dtype == torch.float16 and half["id"].dtype == torch.int64
        assert half["w"].dtype == torch.float16 and half["w"].grad_fn is not None
        assert half.float() == d and d.float() is d and d.to("cpu", torch.float32) is d
        assert d.to(torch.float32, copy=True).is_packed
        on = d.to("sim", torch.float64)
        assert on.is_packed and on["n", "y"].dtype == torch.float64 and on["w"].grad_fn is not None
        beside_alone = DeviceDict({"i": [1], "j": [2], "w": torch.ones(1, requires_grad=True)}).pack().half()
        assert beside_alone.is_packed and beside_alone["w"].dtype == torch.float16

    def test_a_cast_copies_a_block_that_keeps_its_dtype_when_asked(self) -> None:
        d = DeviceDict({"i": [1, 2], "j": [3]}).pack()
        d.to(torch.float64, copy=True)["i"].zero_()
        assert d["i"].tolist() == [1, 2] and d.to(torch.float64)["i"] is d["i"]

    def test_clone_is_one_allocation(self) -> None:
        packed = sample(w=torch.ones(2, requires_grad=True)).to("sim").pack()
        cloned = packed.clone()
        assert cloned == packed and cloned.is_packed and cloned["w"].grad_fn is not None
        cloned["x"].zero_()
        assert packed["x"].any() and storages(cloned) == 2

    def test_pinning_is_one_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pinned: list[Tensor] = []

        def pin(self: Tensor, device: Any = None) -> Tensor:
            pinned.append(self.clone())
            return pinned[-1]

        packed = sample().pack()
        if torch.cuda.is_available():
            assert packed.pin_memory().is_pinned() and packed.pin_memory().is_packed and packed.pin_memory() == packed
        monkeypatch.setattr(Tensor, "pin_memory", pin)
        result = packed.pin_memory()
        assert len(pinned) == 1 and result == packed and result.is_packed
        assert result["x"].untyped_storage().data_ptr() == pinned[0].data_ptr()
        monkeypatch.setattr(Tensor, "pin_memory", lambda self, device=None: self)
        assert packed.pin_memory()["x"] is packed["x"], "pinned already"

    def test_sharing_is_one_segment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        packed, before = sample().pack(), sample()
        shared: list[int] = []
        real = torch.UntypedStorage.share_memory_

        def share(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.is_shared():
                shared.append(self._cdata)
            return real(self, *args, **kwargs)

        monkeypatch.setattr(torch.UntypedStorage, "share_memory_", share)
        assert packed.share_memory_() is packed
        assert len(shared) == 1 and packed == before and packed.is_packed and packed["x"].is_shared()

    def test_what_only_looks_at_the_tensors_keeps_it_packed(self) -> None:
        packed = Batch(sample()).pack()
        for again in (
            packed.copy(), packed.detach(), packed.contiguous(), copy.copy(packed), copy.deepcopy(packed),
            Batch(packed), packed.flatten(), DeviceDict.unflatten(packed.flatten()), type(packed)(dict(packed)),
            pytree.tree_map(lambda t: t, packed), packed | {}, packed.map(lambda t: t),
        ):  # fmt: skip
            assert again.is_packed
        assert not packed.select("x", "id").is_packed and not packed.drop("x").is_packed
        assert copy.deepcopy(packed)["x"].data_ptr() != packed["x"].data_ptr()


def first(specs: Any, **changes: Any) -> Any:
    """The layout of a packed dict with another first group."""
    names = ("dtype", "shape", "stride", "members")
    return (tuple({**dict(zip(names, specs[0], strict=True)), **changes}.values()), *specs[1:])


# By what is wrong with it: a layout, made of a valid one.
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "None": lambda specs: None,
    "a list": lambda specs: [3],
    "a number": lambda specs: 3,
    "a list of None": lambda specs: [None],
    "one group too many": lambda specs: (*specs, (*specs[0][:3], [9])),
    "a huge shape": lambda specs: first(specs, shape=(1 << 70,), stride=(1,)),
    "a negative size": lambda specs: first(specs, shape=(-1, 3)),
    "too few strides": lambda specs: first(specs, stride=(1,)),
    "a member twice": lambda specs: first(specs, members=(0, 0)),
    "a negative member": lambda specs: first(specs, members=(-1, 1)),
    "strings for members": lambda specs: first(specs, members=("0", "1")),
    "no members": lambda specs: first(specs, members=()),
    "an endless tensor": lambda specs: first(specs, members=torch.zeros(1, dtype=torch.int64).expand(1 << 40)),
    "the name of a dtype": lambda specs: first(specs, dtype="float32"),
    "a quantized dtype": lambda specs: first(specs, dtype=torch.qint8),
    "a string in a shape": lambda specs: first(specs, shape=("2", 3)),
    "a huge shape of no elements": lambda specs: first(specs, shape=(0, 1 << 70)),
    "a group without members": lambda specs: (specs[0][:3], *specs[1:]),
    "a list for a group": lambda specs: (list(specs[0]), *specs[1:]),
}


class TestPickled:
    def test_nothing_but_the_layout_and_the_policy(self) -> None:
        d = DeviceDict(
            {f"k{i}": torch.full((4,), float(i)) for i in range(200)}, encoders={"s": Vocabulary(["a"])}
        ).pack()
        data = pickle.dumps(d, 4)
        again = pickle.loads(data)
        check_invariants(again)
        assert again == d and again.is_packed and again._policy == d._policy and list(again) == list(d)
        words = [str(argument) for _, argument, _ in pickletools.genops(data)]
        assert words.count("_rebuild_tensor_v2") == 1
        unpacked = pickle.dumps(DeviceDict({key: value.clone() for key, value in d.items()}), 4)
        assert len(data) - d["k0"].untyped_storage().nbytes() < len(unpacked) / 10

    @pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
    def test_structure_classes_objects_and_what_is_beside(self, protocol: int) -> None:
        plain = DeviceDict({"p": [1.0], "deep": {"e": {}}}, encoders={"t": Vocabulary(["z"])})
        d = Batch({"x": [1.0, 2.0], "s": ["b"], "n": plain, "none": None, "int": object, "list": [None], "e": {},
                   "g": torch.ones(1, requires_grad=True), "tuple": (None, "a")}, on_mismatch="move")  # fmt: skip
        again = pickle.loads(pickle.dumps(d.pack(), protocol))
        check_invariants(again)
        assert again == d and again.is_packed and list(again) == list(d) and again.decode("s") == ["b"]
        assert type(again) is Batch and type(again["n"]) is DeviceDict and type(again["e"]) is Batch
        assert again._policy == d._policy and again["n"]._policy == d["n"]._policy and again["g"].requires_grad  # pyright: ignore[reportAttributeAccessIssue]
        assert again["none"] is None and again["int"] is object and again["tuple"] == (None, "a")

    def test_on_a_device(self, device: torch.device) -> None:
        if device.type == "sim":
            pytest.skip("torch cannot pickle a bare storage of the simulated device")
        packed = sample().to(device).pack()
        again = pickle.loads(pickle.dumps(packed))
        assert again == packed and again.is_packed and again.device == device

    def test_torch_save_keeps_one_storage(self) -> None:
        packed = Batch({**sample(), "s": ["a"]}).pack()
        file = io.BytesIO()
        torch.save(packed, file)
        for weights_only in (False, True):
            for location in (None, "cpu", "meta"):
                file.seek(0)
                again = torch.load(file, map_location=location, weights_only=weights_only)
                check_invariants(again)
                assert type(again) is Batch and again.device == torch.device(location or "cpu")
                assert location == "meta" or (again == packed and again.is_packed and again.decode("s") == ["a"])

    @pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
    def test_a_queue_shares_one_storage(self, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
        before = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy(strategy)
        packed = sample().pack().share_memory_()  # a small buffer would be sent by value
        shared: list[Any] = []

        def counted(real: Callable[[Any], Any]) -> Callable[[Any], Any]:
            return lambda storage: shared.append(storage) or real(storage)

        for name in ("_share_fd_cpu_", "_share_filename_cpu_"):
            monkeypatch.setattr(torch.UntypedStorage, name, counted(getattr(torch.UntypedStorage, name)))
        context = torch.multiprocessing.get_context("fork")
        there, back = context.Queue(), context.Queue()

        def echo() -> None:
            d = there.get()
            back.put((d.is_packed, storages(d), float(d["x"].sum()), list(d)))
            d["x"].fill_(7.0)  # the memory is shared
            back.put("written")
            there.get()

        try:
            worker = context.Process(target=echo)
            worker.start()
            there.put(packed)
            assert back.get(timeout=60) == (True, 1, 15.0, ["x", "id", "n"])
            assert back.get(timeout=60) == "written" and (packed["x"] == 7.0).all() and packed.is_packed
            there.put(None)
            worker.join(60)
            assert worker.exitcode == 0 and len(shared) == 1
        finally:
            torch.multiprocessing.set_sharing_strategy(before)

    def test_what_it_is_made_of(self) -> None:
        rebuild, (*head, buffers, leaves) = sample().pack().__reduce__()
        assert rebuild(*head, buffers, leaves) == sample()

    @pytest.mark.parametrize("name", LAYOUTS)
    def test_a_damaged_layout(self, name: str) -> None:
        rebuild, (*head, ((block, specs),), leaves) = sample().pack().__reduce__()
        with pytest.raises(ValueError, match=r"^the layout of a pickled dict is damaged$"):
            rebuild(*head, [(block, LAYOUTS[name](specs))], leaves)

    @pytest.mark.parametrize("change", [
        lambda block, specs: (block, specs[:-1]),
        lambda block, specs: (block, first(specs, shape=(1 << 40, 1))),
        lambda block, specs: (block[:10].clone(), specs[:-1]),
        lambda block, specs: (block[:10], specs[:-1]),
    ], ids=["a missing group", "a huge shape", "a short buffer", "a part of the buffer"])  # fmt: skip
    def test_a_buffer_of_another_size(self, change: Any) -> None:
        rebuild, (*head, ((block, specs),), leaves) = sample().pack().__reduce__()
        with pytest.raises(ValueError, match="a buffer of a pickled dict: expected"):
            rebuild(*head, [change(block, specs)], leaves)

    @pytest.mark.parametrize(
        "change",
        [lambda block: block.to(torch.float32), lambda block: block.view(1, -1), torch.Tensor.to_sparse],
        ids=["a dtype", "a shape", "a sparse tensor"],
    )
    def test_a_buffer_of_another_kind(self, change: Any) -> None:
        rebuild, (*head, ((block, specs),), leaves) = sample().pack().__reduce__()
        with pytest.raises(ValueError, match=r"^the storage of a packed dict is damaged"):
            rebuild(*head, [(change(block), specs)], leaves)

    @pytest.mark.parametrize("buffer", ["block", 1, {}], ids=repr)
    def test_no_buffer(self, buffer: Any) -> None:
        rebuild, (*head, ((_, specs),), leaves) = sample().pack().__reduce__()
        with pytest.raises(TypeError, match=r"^expected a contiguous buffer of bytes for a pickled dict"):
            rebuild(*head, [(buffer, specs)], leaves)

    @pytest.mark.parametrize("leaf", [99, -1, True, False, (1, 2), [], None, "x", [DeviceDict, {}], 1.5], ids=repr)
    def test_a_missing_tensor(self, leaf: Any) -> None:
        rebuild, (*head, ((block, specs),), _) = sample().pack().__reduce__()
        with pytest.raises(ValueError, match="a tensor is missing"):
            rebuild(*head, [(block, specs)], [leaf, *range(1, len(block))])


class TestUnderTransforms:
    @compiles
    def test_compiled_code_takes_packed_and_unpacked_alike(self) -> None:
        """One compilation for both, and a write into one packed field is right."""
        compiled = []

        def backend(graph: Any, inputs: Any) -> Any:
            compiled.append(graph)
            return graph.forward

        @torch.compile(fullgraph=True, backend=backend)
        def step(d: DeviceDict) -> DeviceDict:
            d["x"].mul_(2)
            return DeviceDict({"y": d["x"] + d["n", "y"], "z": d["n", "m"].clone()})

        for d in (sample(), sample().pack(), sample(), sample().to(torch.float32).pack()):
            out = step(d)
            assert out["y"].tolist() == [[1, 3, 5], [7, 9, 11]] and d["x"].sum() == 30 and d["n", "y"].sum() == 6
        assert len(compiled) == 1

    @compiles
    def test_packing_within_compiled_code_does_nothing(self) -> None:
        @torch.compile(fullgraph=True, backend="eager")
        def step(d: DeviceDict) -> DeviceDict:
            return d.pack().clone().to(torch.float64)

        assert step(sample()) == sample().double() and step(sample().pack()) == sample().double()

    # Forward-mode AD's own; of newer versions of torch the second.
    @pytest.mark.filterwarnings("ignore:.torch.jit.script. is (deprecated|not supported):DeprecationWarning")
    @pytest.mark.filterwarnings("ignore:.torch.jit.script. is (deprecated|not supported):FutureWarning")
    def test_functorch_modes_and_traces(self) -> None:
        packed = DeviceDict({"x": torch.arange(6.0).reshape(3, 2), "y": torch.ones(3, 2)}).pack()
        out = torch.func.vmap(lambda d: d.pack().clone().to(torch.float64)["x"].sum())(packed)
        assert out.tolist() == [1.0, 5.0, 9.0]
        grad = torch.func.grad(lambda d: (d.pack().clone()["x"] ** 2).sum())(packed)
        assert grad["x"].tolist() == (packed["x"] * 2).tolist()
        with forward_ad.dual_level():
            dual = DeviceDict({"x": torch.ones(3), "y": torch.zeros(4)}).pack()
            dual["x"] = forward_ad.make_dual(dual["x"], torch.full((3,), 2.0))
            for again in (dual.clone(), dual.pack(), dual.to("sim").cpu(), dual.double(), dual.to(copy=True)):
                assert forward_ad.unpack_dual(again["x"]).tangent.tolist() == [2.0] * 3  # pyright: ignore[reportOptionalMemberAccess]
        from torch._subclasses import FakeTensorMode  # noqa: PLC0415  (private)

        with FakeTensorMode() as mode:
            fake = DeviceDict({"x": mode.from_tensor(packed["x"]), "y": mode.from_tensor(packed["y"])})
            assert fake.pack().clone().to(torch.float64)["x"].dtype == torch.float64
