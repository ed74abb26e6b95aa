"""Dicts that cannot be pickled: a DataLoader or a queue raises an error that names the field, and never hangs."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

import pytest
import torch
from checks import check_invariants, fails
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from tensordict_lite import DeviceDict, TypedDeviceDict, Utf8, collate, unpickle
from tensordict_lite._memory.buffer import BY_VALUE
from tensordict_lite._tree import sendable as sendable_module

WAIT = 60  # seconds after which a loader or a queue that waits is a failure


UNNAMED: Any = (lambda: lambda strings: torch.zeros(len(strings), 2))()


class Keeps(DeviceDict, objects="keep"):
    pass


def computed() -> DeviceDict:
    return DeviceDict({"a": torch.ones(2), "n": {"x": nn.Linear(2, 2)(torch.ones(2))}})


def parameter() -> DeviceDict:
    return DeviceDict({"x": nn.Parameter(torch.ones(2))})


def local_class() -> DeviceDict:
    class Local(DeviceDict):
        pass

    return Local({"x": torch.ones(2)})


def local_typed() -> DeviceDict:
    class Local(TypedDeviceDict):
        x: Tensor

    return Local({"x": torch.ones(2)})  # pyright: ignore[reportCallIssue]


def local_nested() -> DeviceDict:
    return DeviceDict({"n": DeviceDict({"m": 1.0})})._new(
        {"n": local_class()}, torch.device("cpu"), DeviceDict._class_policy
    )


@functools.cache
def own_class() -> type[Tensor]:
    class Own(Tensor):
        pass

    return Own


def local_tensor() -> DeviceDict:
    return DeviceDict({"x": torch.ones(2).as_subclass(own_class())})


def deep() -> DeviceDict:
    d = DeviceDict({"x": torch.ones(2)})
    for _ in range(280):
        d = DeviceDict._new({"a": d}, d.device, DeviceDict._class_policy)
    return d


def kept() -> DeviceDict:
    return Keeps({"x": torch.ones(2), "f": lambda: 0})


def kept_list() -> DeviceDict:
    return Keeps({"x": torch.ones(2), "f": [1, {"a": lambda: 0}]})


def encoder() -> DeviceDict:
    return DeviceDict({"s": "abc"}, encoders={"s": UNNAMED})


def any_encoder() -> DeviceDict:
    return DeviceDict({"n": {"s": "abc"}}, encoders=UNNAMED)


def mkldnn() -> DeviceDict:
    return DeviceDict({"x": torch.ones(2, 2).to_mkldnn()})


END = "cannot be pickled, so the dict cannot be sent to another process"
BAD: dict[Callable[[], DeviceDict], str] = {
    computed: rf"'n\.x': the tensor, which autograd computes, {END}; call \.detach\(\)",
    local_class: rf"the class local_class\.<locals>\.Local {END}; define it at the top of a module",
    local_typed: rf"the class local_typed\.<locals>\.Local {END}",
    local_nested: rf"'n': the class local_class\.<locals>\.Local {END}",
    local_tensor: rf"'x': the strided own_class\.<locals>\.Own on cpu {END}; convert it to a plain tensor",
    deep: r"is nested more than 64 levels deep, or holds itself; flatten it first",
    kept: rf"'f': the kept function {END}; drop it",
    kept_list: rf"'f': the kept list {END}",
    encoder: rf"'s': the encoder <lambda> {END}; use a function or class of a module",
    any_encoder: rf"the default encoder <lambda> {END}",
    mkldnn: rf"'x': the _mkldnn Tensor on cpu {END}",
}
NAMES = [make.__name__ for make in BAD]


def error_of(name: str) -> tuple[type[Exception], str]:
    return (ValueError if name == "deep" else TypeError), BAD[globals()[name]]


class Good(DeviceDict):
    pass


class Made(Dataset[Any]):
    """What a function of this module makes: in the second of three samples, or in all."""

    def __init__(self, name: str, within: str = "alone", everywhere: bool = False) -> None:
        self.name, self.within, self.everywhere = name, within, everywhere

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> Any:
        if i >= 3:
            raise IndexError
        d = globals()[self.name]() if i == 1 or self.everywhere else Good({"i": i})
        return {"alone": d, "tuple": (i, d), "dict": {"a": [d]}, "sample": (d, i)}[self.within]


class Puts(Dataset[Any]):
    """Sends a pair through a queue of its own: a message of the form that a loader sends."""

    def __init__(self, queue: Any) -> None:
        self.queue = queue

    def __len__(self) -> int:
        return 1

    def __getitem__(self, i: int) -> int:
        if i:
            raise IndexError
        self.queue.put((i, computed()))
        self.queue.close()
        self.queue.join_thread()  # a queue pickles in a thread, which may outlive the number of the worker
        return i


def inside(batch: Any) -> Any:
    """The dict in a batch of `Made`."""
    return batch[1] if isinstance(batch, (tuple, list)) else batch["a"][0]


def only(samples: list[Any]) -> Any:
    (sample,) = samples
    return sample


class Loader(DataLoader[Any]):
    """Its iterators are shut down when the test ends, and not when the last traceback that holds one is collected."""

    opened: ClassVar[list[Any]] = []

    def __iter__(self) -> Any:
        iterator: Any = super().__iter__()
        self.opened.append(iterator)
        return iterator


@pytest.fixture(autouse=True)
def _shut_down() -> Iterator[None]:
    yield
    for iterator in Loader.opened:
        iterator._shutdown_workers()
    Loader.opened.clear()
    gc.collect()  # or the workers of the next test would collect them


@pytest.fixture(params=[False, True], ids=["unpinned", "pinned"])
def pin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    # With the simulated accelerator a loader has its pinning thread.
    monkeypatch.setattr(Tensor, "pin_memory", lambda self, device=None: self.clone())
    return bool(request.param)


def loader_of(dataset: Any, pin: bool = False, **options: Any) -> DataLoader[Any]:
    given: dict[str, Any] = {"batch_size": None, "num_workers": 1, "multiprocessing_context": "fork", **options}
    return Loader(dataset, pin_memory=pin, timeout=WAIT, **given)


class TestLoader:
    @pytest.mark.parametrize("name", NAMES)
    def test_a_sample_is_named_and_the_loader_goes_on(self, name: str, pin: bool) -> None:
        error, message = error_of(name)
        batches = iter(loader_of(Made(name), pin))
        assert next(batches)["i"] == 0
        fails(error, f"(?s)in DataLoader worker process 0.*{message}", lambda: next(batches))
        assert next(batches)["i"] == 2

    @pytest.mark.parametrize("within", ["tuple", "dict"])
    @pytest.mark.parametrize("name", ["computed", "local_class", "deep", "kept"])
    def test_inside_of_other_containers(self, name: str, within: str, pin: bool) -> None:
        """The error comes with the batch, or where the dict is used, and the next batch arrives."""
        error, message = error_of(name)
        batches = iter(loader_of(Made(name, within), pin))
        next(batches)
        fails(error, f"(?s)in DataLoader worker process 0.*{message}", lambda: inside(next(batches))["x"])
        assert inside(next(batches))["i"] == 2
        with pytest.raises(StopIteration):
            next(batches)

    @pytest.mark.parametrize("within", ["tuple", "dict"])
    def test_inside_of_other_containers_of_a_batch(self, within: str, pin: bool) -> None:
        """A custom collate_fn returns another container: each bad batch raises, and the next ones arrive in order."""
        loader = loader_of(Made("computed", within), pin, batch_size=1, collate_fn=only, num_workers=2)
        batches = iter(loader)
        first = inside(next(batches))
        fails(TypeError, f"(?s)in DataLoader worker process 1.*{BAD[computed]}", lambda: len(inside(next(batches))))
        assert [int(first["i"]), int(inside(next(batches))["i"])] == [0, 2]
        assert list(batches) == []

    @pytest.mark.parametrize("within", ["tuple", "dict"])
    def test_a_bad_dict_in_every_batch(self, within: str, pin: bool) -> None:
        batches = iter(loader_of(Made("kept", within, everywhere=True), pin))
        for _ in range(3):
            fails(TypeError, "'f': the kept function", lambda: dict(**inside(next(batches))))
        with pytest.raises(StopIteration):
            next(batches)

    @pytest.mark.parametrize("use", [lambda d: d["x"], lambda d: d.to("cpu"), len, list, lambda d: "x" in d, dict])
    def test_every_use_of_the_stand_in_raises(self, use: Callable[[Any], Any]) -> None:
        one = unpickle.Unsent(TypeError("'x': no"), "in a worker")
        for unsent in (one, pickle.loads(pickle.dumps(one)), copy.copy(one)):
            with pytest.raises(TypeError, match=r"(?s)^Caught TypeError in a worker\..*'x': no"):
                use(unsent)

    def test_a_queue_of_the_dataset(self) -> None:
        queue = torch.multiprocessing.get_context("fork").Queue()
        (batch,) = loader_of(Puts(queue))
        assert batch == 0
        with pytest.raises(TypeError, match=f"(?s)in DataLoader worker process 0.*{BAD[computed]}"):
            queue.get(timeout=WAIT)[1]["n"]

    @pytest.mark.parametrize("collate_fn", [collate, default_collate])
    @pytest.mark.parametrize("name", [name for name in NAMES if name not in ("local_nested", "mkldnn")])
    def test_a_batch_is_named(self, name: str, collate_fn: Any, pin: bool) -> None:
        loader = loader_of(Made(name, everywhere=True), pin, batch_size=2, collate_fn=collate_fn)
        error, message = error_of(name)
        fails(error, message.replace("kept function", "kept list"), lambda: list(loader))

    def test_parameters_are_named_where_they_are_stacked(self, pin: bool) -> None:
        for collate_fn in (collate, default_collate):
            loader = loader_of(Made("parameter", everywhere=True), pin, batch_size=2, collate_fn=collate_fn)
            with pytest.raises(TypeError, match=r"'x': the tensor, which autograd computes, .* call \.detach\(\)"):
                list(loader)
        (first, *_) = list(loader_of(Made("parameter", everywhere=True), pin))
        assert first["x"].requires_grad or pin

    def test_beside_a_label_under_default_collate(self, pin: bool) -> None:
        batches = iter(loader_of(Made("kept", "sample", everywhere=True), pin, batch_size=2))
        fails(TypeError, "'f': the kept list", lambda: next(batches)[0]["x"])

    @pytest.mark.parametrize("name", ["computed", "local_class"])
    def test_persistent_workers(self, name: str, pin: bool) -> None:
        loader = loader_of(Made(name), pin, num_workers=2, persistent_workers=True)
        for _ in range(2):
            batches = iter(loader)
            next(batches)
            with pytest.raises(TypeError, match=error_of(name)[1]):
                next(batches)
            assert next(batches)["i"] == 2 and list(batches) == []

    @pytest.mark.slow
    @pytest.mark.parametrize("within", ["alone", "tuple"])
    def test_a_worker_that_is_not_forked_from_here(self, within: str, pin: bool) -> None:
        loader = loader_of(Made("computed", within), pin, multiprocessing_context="forkserver")
        with pytest.raises(TypeError, match=error_of("computed")[1]):
            _ = [batch["n"] if within == "alone" else inside(batch)["n"] for batch in list(loader)[1:]]

    @pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own, where it builds the tensor again
    @pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
    def test_what_is_odd_and_can_be_pickled_arrives(self, strategy: str) -> None:
        before = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy(strategy)
        try:
            for d in loader_of(Made("odd", everywhere=True)):
                check_invariants(d)
                assert type(d) is Keeps and d["w"].requires_grad and d["s"].is_sparse and d["o"] == {"a": {1, 2}}
                assert type(d["n", "m"]) is nn.Parameter and d["n", "m"].tolist() == [1, 1]
        finally:
            torch.multiprocessing.set_sharing_strategy(before)


def odd() -> DeviceDict:
    w = torch.ones(2, requires_grad=True)
    return Keeps({"w": w, "s": torch.eye(2).to_sparse(), "o": Odd({1, 2}), "n": {"m": nn.Parameter(torch.ones(2))}})


class Odd:
    def __init__(self, a: set[int]) -> None:
        self.a = a

    def __eq__(self, other: object) -> bool:
        return other == {"a": self.a}

    __hash__ = None  # type: ignore[assignment]


def put(queue: Any, name: str) -> None:
    queue.put(globals()[name]())
    queue.put("after")


def echo(x: Any) -> Any:
    return x


def make(name: str) -> Any:
    return globals()[name]()


class TestElsewhere:
    @pytest.mark.parametrize("name", ["computed", "local_class", "deep"])
    def test_a_queue_raises_where_it_would_arrive(self, name: str) -> None:
        context = torch.multiprocessing.get_context("fork")
        queue = context.Queue()
        process = context.Process(target=put, args=(queue, name), daemon=True)
        process.start()
        error, message = error_of(name)
        fails(error, f"(?s)in a process that sends to this one.*{message}", lambda: queue.get(timeout=WAIT)["x"])
        assert queue.get(timeout=WAIT) == "after"
        process.join(WAIT)

    def test_a_pipe_raises_where_it_is_sent(self) -> None:
        a, b = torch.multiprocessing.get_context("fork").Pipe()
        fails(TypeError, error_of("computed")[1], lambda: a.send(computed()))
        a.close()
        b.close()

    def test_pools_tell_their_caller(self) -> None:
        context = torch.multiprocessing.get_context("fork")
        with context.Pool(1) as pool:
            fails(TypeError, error_of("local_class")[1], lambda: pool.apply_async(echo, (local_class(),)).get(WAIT))
            fails(Exception, error_of("local_class")[1], lambda: pool.apply_async(make, ("local_class",)).get(WAIT))
            assert pool.apply_async(echo, (1,)).get(WAIT) == 1
        with ProcessPoolExecutor(1, mp_context=context) as executor:
            fails(TypeError, error_of("local_class")[1], lambda: executor.submit(len, local_class()).result(WAIT))
            fails(TypeError, error_of("local_class")[1], lambda: executor.submit(make, "local_class").result(WAIT))
            assert executor.submit(echo, 1).result(WAIT) == 1


class TestCost:
    def test_what_is_plainly_safe_is_not_tried(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sendable_module, "_Pickler", None)
        plain = {"x": torch.ones(2), "n": {"s": "abc", "y": 1}}
        keeps = Keeps({**plain, "o": None, "p": ["a", 1.5], "t": (True, b"")})
        for d in (DeviceDict(plain), DeviceDict(plain, encoders={"s": Utf8(8)}), keeps, keeps.pack()):
            assert pickle.loads(ForkingPickler.dumps(d)) == d

    def test_a_trial_opens_no_file(self) -> None:
        d = Keeps({"w": torch.ones(2, requires_grad=True), "x": torch.ones(2), "o": Odd({1})})
        before = d["x"].is_shared(), d["w"].is_shared()
        sendable_module._refuse_unsendable(d)
        assert (d["x"].is_shared(), d["w"].is_shared()) == before == (False, False)

    def test_the_copy_for_files_raises_as_ever(self) -> None:
        with pytest.raises((AttributeError, pickle.PicklingError)):
            pickle.dump(local_class(), io.BytesIO())


class Unsteady:
    """Its first pickle fails, and the second does not."""

    def __init__(self) -> None:
        self.tries = 0

    def __reduce__(self) -> Any:
        self.tries += 1
        if self.tries == 1:
            raise ValueError("not yet")
        return Unsteady, ()


class TestOtherErrors:
    def test_an_error_that_the_trial_does_not_repeat(self) -> None:
        with pytest.raises(TypeError, match=r"^this Keeps cannot be sent to another process: not yet$"):
            ForkingPickler.dumps(Keeps({"o": Unsteady()}))


DTYPES = (torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128)


def packed(nbytes: int = 0) -> DeviceDict:
    fields = {str(dtype): torch.arange(3).to(dtype) for dtype in DTYPES}
    return DeviceDict({**fields, "n": {"s": "abc"}, "more": torch.arange(nbytes).to(torch.uint8)}).pack()


def small(d: DeviceDict) -> bool:
    """Whether a message has the bytes of the buffer."""
    return len(ForkingPickler.dumps(d)) > sum(t.nbytes for t in d._tensors())


def write(there: Any, back: Any) -> None:
    d = there.get(timeout=WAIT)
    d["x"].fill_(7.0)
    back.put((d.is_packed, d["x"].is_shared()))


class TestByValue:
    def test_the_receiver_owns_an_aligned_writable_buffer(self) -> None:
        d = packed(100)
        again = pickle.loads(ForkingPickler.dumps(d))
        check_invariants(again)
        assert again == d and again.is_packed and again.decode(("n", "s")) == "abc"
        assert small(d) and not any(t.is_shared() for t in [*d._tensors(), *again._tensors()])
        for t in again._tensors():
            assert t.data_ptr() % 64 == 0
            t.fill_(1)
        assert d == packed(100) and again != d, "the sender does not see the writes"
        before = again["torch.float32"]._version
        again["torch.float64"].fill_(0)
        assert again["torch.float32"]._version == before, "each field has its own version counter"

    @pytest.mark.parametrize("more", [0, 1])
    def test_the_size_decides(self, more: int) -> None:
        size = BY_VALUE - 64
        d = DeviceDict(
            {"x": torch.zeros(size, dtype=torch.uint8), "y": torch.zeros(64 + more, dtype=torch.uint8)}
        ).pack()
        message = ForkingPickler.dumps(d)
        assert (len(message) > size) == (not more) and d["x"].is_shared() == bool(more)
        if more:
            pickle.loads(message)["x"].fill_(3)
            assert (d["x"] == 3).all(), "a large one is shared"

    def test_one_tensor(self) -> None:
        d = DeviceDict({"x": torch.ones(20)})
        again = pickle.loads(ForkingPickler.dumps(d))
        assert small(d) and again == d and again.is_packed and not d["x"].is_shared()

    def test_what_is_shared_stays_shared(self) -> None:
        d = packed().share_memory_()
        again = pickle.loads(ForkingPickler.dumps(d))
        again["torch.float32"].fill_(9.0)
        assert (d["torch.float32"] == 9).all() and again.is_packed and again["torch.bool"].is_shared()

    def test_what_is_large_is_shared(self) -> None:
        d = DeviceDict({"x": torch.ones(400_000), "y": torch.ones(2000)})
        again = pickle.loads(ForkingPickler.dumps(d))
        assert again == d and not small(d) and d["x"].is_shared() and not d["y"].is_shared()

    def test_fields_beside_the_buffer_travel_as_before(self) -> None:
        w, p = torch.ones(3, requires_grad=True), nn.Parameter(torch.ones(2))
        d = Keeps(
            {"a": torch.ones(2), "b": torch.ones(3), "w": w, "n": {"p": p}, "o": Odd({1}), "e": torch.ones(0)}
        ).pack()
        again = pickle.loads(ForkingPickler.dumps(d))
        check_invariants(again)
        assert again.is_packed and again["w"].requires_grad and type(again["n", "p"]) is nn.Parameter
        assert w.is_shared() and not d["a"].is_shared() and again["o"] == {"a": {1}} and list(again) == list(d)

    def test_queues_and_pools(self) -> None:
        context = torch.multiprocessing.get_context("fork")
        there, back = context.Queue(), context.Queue()
        process = context.Process(target=write, args=(there, back), daemon=True)
        process.start()
        d = DeviceDict({"x": torch.ones(4), "y": 1}).pack()
        there.put(d)
        assert back.get(timeout=WAIT) == (True, False) and (d["x"] == 1).all()
        process.join(WAIT)
        with context.Pool(1) as pool:
            again = pool.apply_async(echo, (d,)).get(WAIT)
            assert again == d and again.is_packed and not again["x"].is_shared()

    @pytest.mark.parametrize("data", [b"", b"abc", bytes(1000)])
    def test_bytes_that_do_not_fit_are_refused(self, data: bytes) -> None:
        function, (text, classes, encoders, device, ((_, specs),), leaves) = DeviceDict._sent(packed())
        with pytest.raises(ValueError, match=rf"a buffer of a pickled dict: expected \d+ bytes, got {len(data)}"):
            function(text, classes, encoders, device, [(data, specs)], leaves)
