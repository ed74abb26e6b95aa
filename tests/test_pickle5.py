"""Pickle protocol 5: the bytes of a dict are buffers, in band and out of band."""

from __future__ import annotations

import copy
import importlib
import io
import mmap
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checks import check_invariants, fails
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tensordict_lite import DeviceDict, Hashing, TypedDeviceDict, Utf8, Vocabulary, unpickle, view_read_only

SMALL = 64 << 10
"""Bytes of the largest tensor, and of the largest buffer, that is copied."""
LARGE = 40_000
"""Float32 elements of a tensor that gets a buffer of its own."""


class Obs(TypedDeviceDict):
    state: Tensor


class Batch(TypedDeviceDict, objects="keep"):
    x: Tensor
    obs: Obs


class Own(DeviceDict, encoders={"s": Vocabulary(["a"])}):
    pass


class Reduced(DeviceDict):
    def __reduce__(self) -> tuple[Any, ...]:
        return Reduced, ({"reduced": 1},)


def dumped(x: Any) -> tuple[bytes, list[Any]]:
    buffers: list[Any] = []
    return pickle.dumps(x, 5, buffer_callback=buffers.append), buffers


def received(x: Any, kind: Any = bytearray) -> Any:
    """``x`` from another process, which gets each buffer as a ``kind``."""
    data, buffers = dumped(x)
    return pickle.loads(data, buffers=[kind(buffer) for buffer in buffers])


def start(x: Any) -> int:
    return np.frombuffer(x, np.uint8).__array_interface__["data"][0]


def flat(count: int = 40) -> DeviceDict:
    return DeviceDict({f"k{i}": torch.rand(16) for i in range(count)})


def mixed() -> DeviceDict:
    return DeviceDict(
        {"b": [1, 2], "a": torch.rand(3), "large": torch.rand(LARGE), "n": {"c": True, "e": {}, "z": torch.ones(0, 2)}}
    )


def _filled(d: DeviceDict) -> list[Tensor]:
    return [t for t in d._tensors() if t.numel()]


def fits(d: DeviceDict) -> bool:
    """Whether the tensors are copied into one small buffer, which is all that a packed dict is."""
    return (
        bool(_filled(d)) and d.nbytes < SMALL and not any(type(t) is not Tensor or t.requires_grad for t in _filled(d))
    )


def same(x: DeviceDict, y: DeviceDict) -> bool:
    check_invariants(x)
    tensors = zip(x._tensors(), y._tensors(), strict=True)
    kinds = [(type(s), s.dtype, s.stride()) == (type(t), t.dtype, t.stride()) for s, t in tensors]
    return type(x) is type(y) and x == y and all(kinds) and x.encoders == y.encoders and x._policy == y._policy


DICTS = {
    "flat": flat,
    "packed": lambda: flat().pack(),
    "mixed": mixed,
    "mixed packed": lambda: mixed().pack(),
    "one": lambda: DeviceDict({"x": [1, 2]}),
    "one large": lambda: DeviceDict({"x": torch.rand(LARGE)}),
    "empty": DeviceDict,
    "no elements": lambda: DeviceDict({"x": torch.ones(0, 3)}),
    "strings": lambda: DeviceDict({"v": ["a"], "h": ["b"], "u": ["c"], "n": {"v": ["a"]}},
                                  encoders={"v": Vocabulary(["a"]), "h": Hashing(4), "u": Utf8(8)}),
    "kept": lambda: DeviceDict({"o": {1}, "x": 1, "n": {"o": None, "i": 7, "t": (1,), "l": [1, 2, 3]}}, objects="keep"),
    "class": lambda: Own({"s": "a", "n": {"s": "a"}}),
    "typed": lambda: Batch(x=torch.ones(2), obs=Obs(state=torch.ones(LARGE))),
    "typed packed": lambda: Batch(x=torch.ones(2), obs=Obs(state=torch.ones(LARGE))).pack(),
    "unusual": lambda: DeviceDict({"bfloat16": torch.rand(4).bfloat16(), "transposed": torch.rand(3, 4).t(),
                                   "large transposed": torch.rand(LARGE, 2).t(),
                                   "channels last": torch.rand(2, 3, 100, 100).to(memory_format=torch.channels_last),
                                   "0-d": 1, "grad": torch.ones(2).requires_grad_(),
                                   "parameter": torch.nn.Parameter(torch.ones(2)), "sparse": torch.ones(2).to_sparse(),
                                   "conj": torch.ones(2, dtype=torch.complex64).conj()}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", DICTS)
class TestEveryDict:
    def test_arrives_equal(self, name: str) -> None:
        d: Any = DICTS[name]()
        for kind in (bytearray, bytes, memoryview, lambda buffer: buffer):
            if name == "unusual":  # `==` has no rule for sparse tensors
                again = received(d, kind)
                assert [(t.dtype, t.layout, t.requires_grad) for t in again.values()] == [
                    (t.dtype, t.layout, t.requires_grad) for t in d.values()
                ]
                dense = [t.to_dense() for t in d.values()]
                assert all(map(torch.equal, [t.to_dense() for t in again.values()], dense))
                assert isinstance(again["parameter"], torch.nn.Parameter)
                continue
            assert same(received(d, kind), d)
            assert received(d, kind).is_packed == (d.is_packed or fits(d))

    def test_arrives_equal_in_band(self, name: str) -> None:
        d: Any = DICTS[name]()
        again = pickle.loads(pickle.dumps(d, 5))
        assert list(again) == list(d) and again.is_packed == (d.is_packed or fits(d))
        assert name == "unusual" or same(again, d)

    def test_is_pickled_again_and_saved(self, name: str) -> None:
        d = received(DICTS[name]())
        again = received(d)
        file = io.BytesIO()
        torch.save(again, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=name != "kept" and name != "unusual")
        assert list(loaded) == list(d) and type(loaded) is type(d)
        assert list(pickle.loads(pickle.dumps(d, 4))) == list(copy.deepcopy(again)) == list(d)


class TestBuffers:
    def test_a_packed_dict_is_one(self) -> None:
        d = flat().pack()
        _, buffers = dumped(d)
        (buffer,) = buffers
        assert start(buffer) == d["k0"].data_ptr() and memoryview(buffer).nbytes == d["k0"].untyped_storage().nbytes()

    def test_the_cached_layout_of_a_packed_dict_is_not_used_for_tensors_that_lie_elsewhere(self) -> None:
        def make() -> DeviceDict:
            return DeviceDict({"a": torch.rand(20), "b": torch.rand(20), "n": torch.arange(3), "c": torch.rand(20)})

        for nest in (False, True):
            for change in (
                lambda d: d.update({"a": d["b"], "b": d["a"]}),
                lambda d: d.update({"a": d["b"]}),
                lambda d: d.update({"b": torch.rand(20)}),
                lambda d: d["c"].set_(torch.rand(20)),
                lambda d: setattr(d["n"], "data", torch.arange(3) + 5),
                lambda d: d["b"].requires_grad_(),
                lambda d: d.update({"n": d["n"].flip(0)}),
                lambda d: d.pop("c"),
                lambda d: d.update({"e": torch.zeros(0)}),
            ):
                d = make()
                d = (DeviceDict({"inner": d, "z": torch.ones(20)}) if nest else d).pack()
                assert len(dumped(d)[1]) == 1 and same(received(d), d) and received(d).is_packed
                change(d["inner"] if nest else d)
                again = received(d)
                assert again == d
                assert not any(t.data_ptr() == s.data_ptr() for t, s in zip(_filled(again), _filled(d), strict=True))

    def test_an_unpacked_dict_is_one_for_the_small_tensors_and_one_for_each_large(self) -> None:
        large = {f"l{i}": torch.rand(LARGE) for i in range(3)}
        d = DeviceDict({f"k{i}": torch.rand(16) for i in range(40)}) | large
        _, buffers = dumped(d)
        pointers = {start(buffer) for buffer in buffers}
        assert len(buffers) == 4 and {t.data_ptr() for t in large.values()} < pointers

    def test_small_tensors_share_at_most_64_kib_or_four_times_each(self) -> None:
        d = DeviceDict({f"k{i}": torch.rand(10_000) for i in range(60)})
        _, buffers = dumped(d)
        assert len(buffers) == 15 and max(memoryview(b).nbytes for b in buffers) <= 4 * 40_000
        assert same(received(d), d)
        d = DeviceDict({f"k{i}": torch.rand(128) for i in range(200)})
        _, buffers = dumped(d)
        assert [memoryview(b).nbytes for b in buffers] == [SMALL, 200 * 512 - SMALL]
        assert same(received(d), d)

    def test_nested_dicts_share_the_buffer(self) -> None:
        _, buffers = dumped(DeviceDict({"a": 1, "n": {"b": 2, "m": {"c": 3}}}))
        assert len(buffers) == 1

    def test_only_the_bytes_of_a_slice_are_sent(self) -> None:
        d = DeviceDict({"x": torch.rand(100, LARGE), "y": torch.rand(100, 2)}).rows[3:4]
        data, buffers = dumped(d)
        assert sum(memoryview(b).nbytes for b in buffers) == LARGE * 4 + 8 and len(data) < 1000
        assert same(received(d), d)

    def test_gaps_are_not_sent(self) -> None:
        x = torch.rand(LARGE, 4)
        d = DeviceDict({"x": x[:, ::2], "wide": torch.rand(1).expand(LARGE)})
        data, buffers = dumped(d)
        assert [memoryview(b).nbytes for b in buffers] == [LARGE * 8, LARGE * 4] and len(data) < 1000
        assert received(d) == d

    def test_equal_dicts_are_equal_bytes(self) -> None:
        d = DeviceDict({"a": torch.ones(3), "b": torch.ones(9000), "c": torch.ones(8001, dtype=torch.float64)})
        junk = [torch.full((200_000,), 7, dtype=torch.uint8) for _ in range(20)]
        del junk
        assert pickle.dumps(d, 5) == pickle.dumps(copy.deepcopy(d), 5)
        d = DeviceDict({"a": torch.ones(3), "b": torch.ones(2, 5), "c": torch.ones(1)})
        (buffer,) = dumped(d)[1]
        assert bytes(buffer)[40:64] == bytes(24) and bytes(buffer)[76:128] == bytes(52) == bytes(buffer)[132:184]

    def test_in_band_is_one_block_without_a_second_copy(self) -> None:
        d = DeviceDict({"x": torch.zeros(LARGE), "y": torch.zeros(LARGE)}).pack()
        assert len(pickle.dumps(d, 5)) < 2 * 4 * LARGE + 1000
        again = pickle.loads(pickle.dumps(d, 5))
        memory: Any = again["x"].untyped_storage()
        assert again.is_packed and memory.nbytes() == 2 * 4 * LARGE

    def test_a_tensor_that_occurs_twice_is_sent_once(self) -> None:
        x, y = torch.rand(LARGE), torch.ones(2)
        d = DeviceDict({"x": x, "y": y, "n": {"x": x, "y": y}})
        _, buffers = dumped(d)
        again = received(d)
        assert len(buffers) == 2 and again["x"] is again["n", "x"] and again["y"] is again["n", "y"]

    def test_a_large_tensor_of_several_dicts_is_sent_once(self) -> None:
        x = torch.rand(LARGE)
        dicts = [DeviceDict({"x": x, "y": i}) for i in range(5)]
        data, buffers = dumped(dicts)
        again = received(dicts)
        assert sum(memoryview(b).nbytes for b in buffers) < LARGE * 4 + 500 and len(data) < 2000
        assert all(d["x"] is again[0]["x"] for d in again) and again == dicts
        assert len(pickle.dumps(dicts, 5)) < LARGE * 4 + 2000

    def test_a_tensor_that_changed_between_two_pickles_is_sent_as_it_is(self) -> None:
        d = DeviceDict({"x": torch.zeros(LARGE)})
        first = received(d)
        d["x"] += 1
        assert received(d)["x"][0] == 1 and first["x"][0] == 0
        d["x"].data = torch.full((LARGE,), 2.0)
        assert received(d)["x"][0] == 2
        d["x"] = torch.full((LARGE,), 3.0)
        assert received(d)["x"][0] == 3


class TestMemoryOfTheReceiver:
    def test_writable_memory_is_used_as_it_is(self) -> None:
        for d in (flat().pack(), mixed()):
            data, buffers = dumped(d)
            memory = [bytearray(buffer) for buffer in buffers]
            again = pickle.loads(data, buffers=memory)
            assert {t.data_ptr() for t in again._tensors()} >= {start(m) for m in memory}
            again[next(iter(again))].fill_(5)
            assert any(5 in m[:4] or 5 in np.frombuffer(m, np.float32, 1) for m in memory)

    def test_read_only_memory_is_copied(self) -> None:
        data, buffers = dumped(flat().pack())
        memory = bytes(buffers[0])
        before = bytes(bytearray(memory))
        first, second = (pickle.loads(data, buffers=[memory]) for _ in range(2))
        first["k0"].fill_(5)
        assert memory == before and second["k0"].max() <= 1 and first.is_packed

    def test_a_file_mapped_read_only_is_copied(self, tmp_path: Path) -> None:
        data, buffers = dumped(flat().pack())
        path = tmp_path / "buffer"
        path.write_bytes(buffers[0])
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            d = pickle.loads(data, buffers=[mapped])
            d["k0"].fill_(5)
        assert path.read_bytes() == bytes(buffers[0])

    def test_read_only_memory_is_viewed_on_request(self) -> None:
        for made in (flat().pack(), mixed()):
            data, buffers = dumped(made)
            memory = [bytes(buffer) for buffer in buffers]
            with view_read_only():
                d = pickle.loads(data, buffers=memory)
            assert {start(m) for m in memory} <= {t.data_ptr() for t in d._tensors()}
            del memory
            assert same(d, made)
            clone = d.clone()
            clone["new"] = 1
            again = pickle.loads(data, buffers=[bytes(buffer) for buffer in buffers])
            again[next(iter(again))].fill_(2)  # not viewed any more

    def test_the_request_nests_and_ends_with_an_error(self) -> None:
        def views() -> bool:
            data, buffers = dumped(flat().pack())
            memory = bytes(buffers[0])
            return pickle.loads(data, buffers=[memory])["k0"].data_ptr() == start(memory)

        assert not views()
        with view_read_only():
            assert views()
            with view_read_only(False):
                assert not views()
            assert views()
        with pytest.raises(ZeroDivisionError), view_read_only():
            raise ZeroDivisionError
        assert not views()
        view_read_only(True)
        try:
            assert views()
        finally:
            view_read_only(False)
        assert not views()
        with pytest.raises(TypeError, match="view_read_only takes True or False, got 1"):
            view_read_only(1)  # pyright: ignore[reportArgumentType]

    def test_threads_do_not_share_the_request(self) -> None:
        data, buffers = dumped(flat().pack())
        memory = bytes(buffers[0])

        def views() -> bool:
            return pickle.loads(data, buffers=[memory])["k0"].data_ptr() == start(memory)

        def overlap(first: bool) -> tuple[bool, bool]:
            if not first:
                entered.wait()  # the second thread enters before the first leaves, and leaves after it
            with view_read_only():
                (entered if first else both).wait()
                if first:
                    both.wait()
                else:
                    left.wait()
                inside = views()
            if first:
                left.wait()
            return inside, views()

        entered, both, left = (threading.Barrier(2, timeout=60) for _ in range(3))
        with ThreadPoolExecutor(2) as executor:
            done = [executor.submit(overlap, first) for first in (True, False)]
        assert [one.result() for one in done] == [(True, False)] * 2 and not views()

    def test_misaligned_memory_is_copied(self) -> None:
        def shifted(buffer: Any) -> memoryview:
            memory = bytearray(len(bytes(buffer)) + 1)
            memory[1:] = bytes(buffer)
            return memoryview(memory)[1:]

        for made in (flat().pack(), mixed()):
            d = received(made, shifted)
            assert same(d, made) and all(t.data_ptr() % t.itemsize == 0 for t in d._tensors())
            with view_read_only():
                d = received(made, lambda buffer: shifted(buffer).toreadonly())
            assert same(d, made) and all(t.data_ptr() % t.itemsize == 0 for t in d._tensors())

    def test_tensors_outlive_the_buffers(self) -> None:
        d = received(mixed())
        tensor = d["n", "c"]
        del d
        torch.ones(100_000)
        assert tensor.item() is True

    def test_fields_have_version_counters_of_their_own(self) -> None:
        d = received(flat())
        w = torch.ones(16, requires_grad=True)
        y = (w * d["k0"]).sum()
        d["k1"].add_(1)
        y.backward()
        assert w.grad is not None


class TestFallsBack:
    def test_on_another_device(self) -> None:
        d = DeviceDict({"x": torch.ones(2, device="meta")})
        data, buffers = dumped(d)
        assert not buffers and pickle.loads(data).device == torch.device("meta")

    def test_while_operations_are_intercepted(self) -> None:
        d = flat().pack()
        with torch.autograd.forward_ad.dual_level():
            _, buffers = dumped(d)
        assert not buffers

    def test_a_class_with_its_own_reduction(self) -> None:
        assert received(Reduced({"x": 1})) == {"reduced": torch.tensor(1)}
        assert received(DeviceDict({"n": Reduced({"x": 1})}))["n"] == {"reduced": torch.tensor(1)}

    def test_a_forking_pickler_shares_memory_that_is_shared_or_large(self) -> None:
        for protocol in (4, 5):
            for d in (flat().share_memory_(), DeviceDict({"k0": torch.rand(1 << 19)})):
                again: Any = pickle.loads(ForkingPickler.dumps(d, protocol))
                again["k0"].fill_(3)
                assert d["k0"][0] == 3
            small = flat()
            again = pickle.loads(ForkingPickler.dumps(small, protocol))
            again["k0"].fill_(3)
            assert small["k0"][0] != 3, "a small dict goes by value"

    @pytest.mark.parametrize("protocol", [2, 4, 5])
    def test_torch_save(self, protocol: int) -> None:
        """In protocol 5 the bytes are in the pickle, so that ``map_location`` has no effect."""
        for d in (flat(), flat().pack(), DeviceDict({"n": {"x": [1.0]}})):
            file = io.BytesIO()
            torch.save([d], file, pickle_protocol=protocol)
            file.seek(0)
            (again,) = torch.load(file, map_location="meta", weights_only=False)
            check_invariants(again)
            assert again.device == torch.device("cpu" if protocol == 5 else "meta") and (again == d or protocol < 5)


def part(data: Any, *groups: Any) -> Any:
    return data, groups


GROUP = (torch.float32, (1,), (1,), (0,))
FORGED: dict[str, tuple[Any, type[Exception], str]] = {
    "part": ([1], ValueError, "the buffers of a pickled dict are damaged"),
    "three": ([(b"", (), 1)], ValueError, "the buffers of a pickled dict are damaged"),
    "specs": ([(b"", 1)], ValueError, "the layout of a pickled dict is damaged"),
    "spec": ([part(b"", 1)], ValueError, "the layout of a pickled dict is damaged"),
    "list": ([part(b"", [])], ValueError, "the layout of a pickled dict is damaged"),
    "dtype": ([part(b"", (torch.qint8, *GROUP[1:]))], ValueError, "the layout of a pickled dict is damaged"),
    "negative": ([part(b"1234", (torch.float32, (-1,), (1,), (0,)))], ValueError, "the layout of a pickled dict is da"),
    "twice": ([part(b"12345678", (*GROUP[:3], (0, 0)))], ValueError, "the layout of a pickled dict is damaged"),
    "in two": ([part(b"1234", GROUP)] * 2, ValueError, "two buffers of a pickled dict contain the same field"),
    "short": ([part(b"123", GROUP)], ValueError,
              "expected 4 bytes, got 3; pass the buffers to pickle.loads in the ord"),
    "huge": ([part(b"123", (torch.float32, (1 << 61,), (1,), (0,)))], ValueError, "bytes, got 3"),
    "no buffer": ([part(3, GROUP)], TypeError, "expected a contiguous buffer of bytes for a pickled dict, got int"),
    "gaps": ([part(memoryview(b"12345678")[::2], GROUP)], TypeError,
             "expected a contiguous buffer of bytes for a pick"),
}  # fmt: skip


class TestForged:
    @pytest.mark.parametrize("name", FORGED)
    def test_buffers_are_validated(self, name: str) -> None:
        parts, kind, message = FORGED[name]
        rebuild, (*head, _, _) = DeviceDict({"x": [1.0]}).__reduce_ex__(5)
        assert rebuild(*head, [part(b"1234", GROUP)], None)["x"].shape == (1,)
        with pytest.raises(kind) as caught:
            rebuild(*head, parts, None)
        assert message in str(caught.value)

    def test_fields(self) -> None:
        with pytest.raises(ValueError, match="the layout of a pickled dict is damaged"):
            unpickle.rebuild_tensor(b"1234", torch.float32, [1], (1,))
        with pytest.raises(ValueError, match="the layout of a pickled dict is damaged"):
            unpickle.rebuild_tensor(b"1234", "float32", (1,), (1,))
        with pytest.raises(ValueError, match="expected 8 bytes, got 4"):
            unpickle.rebuild_tensor(b"1234", torch.float32, (2,), (1,))

    def test_strides_cannot_leave_the_buffer(self) -> None:
        t = unpickle.rebuild_tensor(bytearray(16), torch.float32, (2, 2), (1000, 1000))
        assert t.untyped_storage().nbytes() == 16 and t.is_contiguous()

    def test_buffers_in_another_order(self) -> None:
        data, buffers = dumped(mixed())
        fails(ValueError, "in the order in which they were made", lambda: pickle.loads(data, buffers=buffers[::-1]))


DTYPES = [torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex128, torch.bool]


@st.composite
def tensors(draw: Any) -> Tensor:
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 70, 300]), max_size=3))
    while np.prod(shape) > 100_000:
        shape = shape[1:]
    t = torch.randint(0, 2, shape).to(draw(st.sampled_from(DTYPES)))
    change = draw(st.sampled_from(["", "transpose", "slice", "expand"]))
    if change == "transpose" and t.dim() > 1:
        return t.transpose(0, -1)
    if change == "slice" and t.dim() and len(t) > 1:
        return t[1:]
    return t.expand(2, *t.shape) if change == "expand" else t


trees = st.recursive(
    st.dictionaries(st.text(max_size=3), tensors(), max_size=5),
    lambda inner: st.dictionaries(st.text(max_size=3), tensors() | inner, max_size=4),
    max_leaves=12,
)


@given(trees, st.booleans(), st.sampled_from([bytes, bytearray, None]))
@settings(max_examples=100, deadline=None)
def test_every_tree_arrives(tree: Any, pack: bool, kind: Any) -> None:
    d = DeviceDict(tree)
    d = d.pack() if pack else d
    again = pickle.loads(pickle.dumps(d, 5)) if kind is None else received(d, kind)
    check_invariants(again)
    assert again == d and (again.is_packed == d.is_packed or not pack)
    assert list(again) == list(d) and [t.dtype for t in again._tensors()] == [t.dtype for t in d._tensors()]
    if kind is not None:
        for t in again._tensors():
            t.zero_()
        assert again == received(again, kind)


class TestPicklersOfOthers:
    @pytest.mark.parametrize("name", ["cloudpickle", "dill"])
    def test_arrives_equal(self, name: str) -> None:
        module = pytest.importorskip(name, reason=f"{name} is not installed")
        for d in (flat(), flat().pack(), mixed(), Batch(x=torch.ones(2), obs=Obs(state=torch.ones(LARGE)))):
            data = module.dumps(d, protocol=5)
            assert same(module.loads(data), d)

    def test_joblib(self) -> None:
        joblib = pytest.importorskip("joblib", reason="joblib is not installed")
        importlib.import_module("joblib.externals.loky")
        dicts = [flat(), flat().pack(), mixed(), DeviceDict({"name": ["Ada", "Bo"]})]
        before = copy.deepcopy(dicts)
        try:
            done = joblib.Parallel(n_jobs=2, timeout=100)(joblib.delayed(zeroed)(d) for d in dicts)
        finally:
            joblib.externals.loky.get_reusable_executor().shutdown(wait=True, kill_workers=True)
        assert dicts == before
        assert all(not t.any() for d in done for t in d._tensors()) and done[1].is_packed


def zeroed(d: DeviceDict) -> DeviceDict:
    """Write to every tensor. Runs in another process."""
    for tensor in d._tensors():
        tensor.zero_()
    return d
