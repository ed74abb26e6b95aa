"""`collate` of any samples: a packed batch has the values of a batch without a buffer, and raises the same errors."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from checks import check_invariants, fails
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import default_collate
from torch.utils.data._utils import collate as torch_collate

from tensordict_lite import DeviceDict, Pad, TypedDeviceDict, Utf8, Vocabulary, collate, field, stack


class Halves(DeviceDict[Any], dtype=torch.float64):
    pass


class Typed(TypedDeviceDict):
    a: Tensor
    b: Tensor | None = None


class Filled(TypedDeviceDict):
    a: Any
    k: Tensor = field(default=3.0)
    b: Any = None
    c: Any = None
    d: Any = None
    z: Any = None


def outcome(make: Callable[[], Any]) -> Any:
    """What a call gives: every fact about the batch, or the error with its message."""
    try:
        d = make()
    except (TypeError, ValueError, RuntimeError, LookupError) as error:
        return type(error), str(error)
    check_invariants(d)
    return facts(d)


def facts(d: Any) -> Any:
    if isinstance(d, DeviceDict):
        return type(d), d.device, d._policy, [(key, facts(value)) for key, value in d.items()]
    if isinstance(d, Tensor):
        values = None if d.is_meta else repr(d.to_dense().tolist())
        return type(d), d.dtype, d.shape, d.layout, d.requires_grad, d.is_inference(), values
    return repr(d)


def same(samples: Any, **options: Any) -> Any:
    """The outcome of `collate`. Without a buffer it is the same; and the batch is the stack of the samples."""
    got = outcome(lambda: collate(samples, **options))
    assert got == outcome(lambda: collate(samples, **options, pack=False))
    if isinstance(got[0], type) and issubclass(got[0], DeviceDict) and not options:
        stacked: Any = stack([DeviceDict(sample) for sample in samples])
        made: Any = collate(samples)
        assert [repr(t.to_dense().tolist()) for t in made._tensors() if not t.is_meta] == [
            repr(t.to_dense().tolist()) for t in stacked._tensors() if not t.is_meta
        ]
    return got


def conjugate() -> Tensor:
    return torch.tensor([1 + 2j, 3 - 1j]).conj()


VALUES: list[Callable[[], Any]] = [
    lambda: torch.ones(2),
    lambda: torch.zeros(2),
    lambda: torch.ones(2).double(),
    lambda: torch.ones(3),
    lambda: torch.ones(2, 3),
    lambda: torch.ones(3, 2).T,
    lambda: torch.ones(()),
    lambda: torch.ones(0),
    lambda: torch.ones(16),
    lambda: torch.arange(2),
    lambda: torch.ones(2, requires_grad=True),
    lambda: torch.nn.Parameter(torch.ones(2)),
    conjugate,
    lambda: conjugate().imag,
    lambda: torch.ones(2, dtype=torch.complex64),
    lambda: torch.eye(2).to_sparse(),
    lambda: torch.ones(2, device="meta"),
    lambda: torch.ones(2).expand(3, 2),
    lambda: torch.ones(1, 3, 4, 4).to(memory_format=torch.channels_last)[0],
    lambda: 1,
    lambda: 2,
    lambda: True,
    lambda: 1.5,
    lambda: 1e300,
    lambda: float("nan"),
    lambda: 1 << 70,
    lambda: 1j,
    lambda: None,
    lambda: "a",
    lambda: "bc",
    lambda: [1, 2],
    lambda: [3, 4],
    lambda: [1.5, 2],
    lambda: [1.5, 2.5],
    list,
    lambda: [[1], [2]],
    lambda: ["a", "b"],
    lambda: [torch.ones(1)],
    lambda: [np.float32(1), np.float32(2)],
    lambda: (1, 2),
    lambda: [True, False],
    lambda: np.ones(2),
    lambda: np.ones(2, np.float32),
    lambda: np.ones((2, 2)).T,
    lambda: np.arange(6).reshape(2, 3).T,
    lambda: np.float32(0.1),
    lambda: np.float64(0.1),
    lambda: np.int8(3),
    lambda: np.bool_(True),
    lambda: np.ones(2, ">f4"),
    lambda: np.array(["a", "b"]),
    lambda: np.ones(3, np.uint16),
    lambda: np.ma.array([1.0], mask=[True]),
    lambda: np.float16(2),
    dict,
    lambda: {"x": 1},
    lambda: {"x": torch.ones(2), "y": 2},
    lambda: DeviceDict({"x": torch.ones(2), "y": 2}),
    lambda: DeviceDict({"x": 1.0}, encoders={"x": Vocabulary(["a"])}),
    lambda: Halves({"x": 1.0}),
    lambda: {1: 2},
    lambda: DeviceDict({"s": "a"}),
    object,
]


RAGGED: list[Callable[[int], Any]] = [
    torch.arange,
    torch.ones,
    lambda n: torch.ones(n, 2),
    lambda n: torch.ones(2 * n)[::2],
    lambda n: torch.arange(4 * n).view(n, 2, 2),
    lambda n: torch.ones(n, 0),
    lambda n: torch.arange(2 * n).view(2, n).T,
    lambda n: torch.ones(n, dtype=torch.complex64).conj(),
    lambda n: torch.ones(n, requires_grad=True),
    lambda n: torch.ones(n).bool(),
    lambda n: list(range(n)),
    lambda n: [0.5] * n,
    lambda n: [True] * n,
    lambda n: [[1, 2]] * n,
    lambda n: (1,) * n,
    lambda n: "a" * n,
    lambda n: "é" * n,
    np.arange,
    lambda n: torch.ones(n, device="meta"),
    lambda n: {"a": [1] * n, "n": 3},
]


@st.composite
def sample_lists(draw: st.DrawFn) -> list[Any]:
    """Samples that mostly agree: some differ in one value, in the order of keys, in a key or in the class."""
    makes = draw(st.lists(st.sampled_from(VALUES), min_size=0, max_size=4))
    n = draw(st.integers(1, 4))
    samples: list[Any] = [{"abcd"[i]: make() for i, make in enumerate(makes)} for _ in range(n)]
    for key, make in draw(st.dictionaries(st.sampled_from("abcd"), st.sampled_from(RAGGED))).items():
        for sample in samples:
            sample[key] = make(draw(st.integers(0, 3)))
    if makes and draw(st.booleans()):
        samples[draw(st.integers(0, n - 1))]["abcd"[draw(st.integers(0, len(makes) - 1))]] = draw(
            st.sampled_from(VALUES)
        )()
    odd = draw(st.sampled_from(["", "", "", "order", "missing", "extra", "all dicts", "one dict", "typed"]))
    last = samples[-1]
    if odd == "order":
        samples[-1] = dict(reversed(last.items()))
    elif odd == "missing" and last:
        last.popitem()
    elif odd == "extra":
        last["z"] = 1
    elif odd:
        kind: Any = Typed if odd == "typed" else DeviceDict
        first = n - 1 if odd == "one dict" else 0
        with suppress(TypeError, ValueError, RuntimeError):  # for a value that no dict takes
            samples[first:] = [kind(sample, on_mismatch="move") for sample in samples[first:]]
    return samples


PADS = st.none() | st.dictionaries(
    st.sampled_from(["a", "b", ("c",), ("d", "a")]),
    st.sampled_from([0, -1, 0.5, True, float("inf"), 1 << 70]) | st.builds(
        Pad, st.sampled_from([0, 1, -0.5]), st.sampled_from(["left", "right"]), st.integers(1, 4),
        st.sampled_from([None, "d", "n"]), st.sampled_from([None, "m"]),
    ),
    max_size=3,
)  # fmt: skip
ENCODERS = st.sampled_from(
    [None, {"a": Vocabulary(["a", "aa", "aaa"])}, Utf8(3), {"b": lambda strings: torch.ones(len(strings))}]
)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@given(samples=sample_lists(), pad=PADS, encoders=ENCODERS)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_padded_and_encoded_batches(samples: Any, pad: Any, encoders: Any) -> None:
    same(samples, pad=pad, encoders=encoders)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@given(samples=sample_lists(), cls=st.sampled_from([DeviceDict, Halves, Typed, Filled]))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_batches_of_any_class(samples: Any, cls: Any) -> None:
    same(samples, **({} if cls is DeviceDict else {"cls": cls}))


PLAIN = [{"x": torch.full((16,), float(i)), "y": i, "z": float(i), "n": {"a": [i, i + 1]}} for i in range(4)]


FLAT = [{key: value for key, value in sample.items() if key != "n"} | {"a": np.arange(2)} for sample in PLAIN]


class TestWhatCouldFool:
    @pytest.mark.parametrize("names", [["x"], ["y"], ["z"], ["a"], ["x", "y"], ["a", "z", "y", "x"]])
    @pytest.mark.parametrize("change", [
        lambda sample: dict(sample, x=torch.ones(16).double()),
        lambda sample: dict(sample, x=torch.ones(4, 4)),
        lambda sample: dict(sample, x=torch.ones(0)),
        lambda sample: dict(sample, x=torch.ones(16, requires_grad=True)),
        lambda sample: dict(sample, x=torch.nn.Parameter(torch.ones(16))),
        lambda sample: dict(sample, x=torch.ones(32)[::2]),
        lambda sample: dict(sample, x=torch.ones(16, dtype=torch.complex64).conj().imag),
        lambda sample: dict(sample, x=torch.ones(16).to_sparse()),
        lambda sample: dict(sample, x=np.ones(16, np.float32)),
        lambda sample: dict(sample, x=torch.ones(16, device="meta")),
        lambda sample: dict(sample, y=1.0),
        lambda sample: dict(sample, y=True),
        lambda sample: dict(sample, y=1 << 70),
        lambda sample: dict(sample, y="a"),
        lambda sample: dict(sample, y=[1]),
        lambda sample: dict(sample, y=np.int64(1)),
        lambda sample: dict(sample, y=None),
        lambda sample: dict(sample, z=1),
        lambda sample: dict(sample, z=1e300),
        lambda sample: dict(sample, a=np.ones(2)),
        lambda sample: dict(sample, a=np.arange(3)),
        lambda sample: dict(sample, a=np.arange(2, dtype=np.uint16)),
        lambda sample: dict(sample, a=np.arange(4)[::2]),
        lambda sample: dict(reversed(sample.items())),
        lambda sample: dict(sample, more=1),
        lambda sample: dict(list(sample.items())[1:]),
        lambda sample: dict(sample, x={"y": 1}),
        DeviceDict,
        OrderedDict,
        lambda sample: defaultdict(int, sample),
    ])  # fmt: skip
    def test_samples_that_differ(self, names: Any, change: Any) -> None:
        usual = [{name: sample[name] for name in names} for sample in FLAT]
        for places in ({0}, {1}, {3}, set(range(4))):
            same([change(sample) if i in places else sample for i, sample in enumerate(usual)])

    def test_options_of_the_class(self) -> None:
        samples = [{"a": np.ones(2, np.float32), "z": 0.5} for _ in range(4)]
        for cls in (DeviceDict, Halves, Filled):
            same(samples, cls=cls)

    def test_default_dtype(self) -> None:
        before = torch.get_default_dtype()
        try:
            for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.float32):
                torch.set_default_dtype(dtype)
                same(PLAIN)
                assert collate(PLAIN)["z"].dtype == dtype
        finally:
            torch.set_default_dtype(before)

    def test_default_device(self) -> None:
        labels = [{"y": i} for i in range(4)]
        collate(labels)
        with torch.device("meta"):
            assert collate(labels).device == torch.device("meta")
            same(PLAIN)
        assert collate(labels)["y"].tolist() == [0, 1, 2, 3]

    @pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
    def test_modes_of_autograd(self, mode: Any) -> None:
        w = torch.ones(16, requires_grad=True)
        with mode():
            for place in range(4):
                samples = [dict(sample, x=w) if i == place else sample for i, sample in enumerate(PLAIN)]
                same(samples)
                same([{"x": sample["x"]} for sample in samples])
            for samples in (PLAIN, FLAT):
                d = collate(samples)
                assert {t.is_inference() for t in d._tensors()} == {mode is torch.inference_mode}

    def test_fake_tensors(self) -> None:
        with FakeTensorMode():
            fake = [{"x": torch.ones(16)} for _ in range(4)]
            assert type(collate(fake)["x"]) is not Tensor
        assert type(collate(PLAIN)["x"]) is Tensor

    def test_a_class_that_is_defined_again(self) -> None:
        def define(dtype: torch.dtype) -> Any:
            return type("Again", (DeviceDict,), {}, dtype=dtype)  # pyright: ignore[reportCallIssue]

        for dtype in (torch.float64, torch.float16, torch.float32):
            d = collate(PLAIN, cls=define(dtype))
            assert d["z"].dtype == dtype and d["x"].dtype == torch.float32

    def test_options_that_change(self) -> None:
        words = [{"x": torch.ones(16), "s": letter} for letter in "ab"]
        for tokens in (["a", "b"], ["b", "a"]):
            d = collate(words, encoders={"s": Vocabulary(tokens)})
            assert d.decode("s") == ["a", "b"] and d["s"].tolist() == [tokens.index("a"), tokens.index("b")]
        same(words)
        assert collate(PLAIN, objects="keep")._policy.objects == "keep"

    def test_later_writes_stay_apart(self) -> None:
        for samples in (PLAIN, FLAT, [{"x": s["x"], "w": s["x"]} for s in PLAIN], [{"x": s["x"]} for s in PLAIN]):
            one, two = collate(samples), collate(samples)
            before = [t._version for t in one._tensors()]
            one["x"].fill_(9.0)
            assert two["x"][0, 0] == 0.0 and samples[0]["x"][0] == 0.0, "batches and samples do not share memory"
            assert [t._version - v for t, v in zip(one._tensors(), before, strict=True)] == [
                1,
                *[0] * (len(one._tensors()) - 1),
            ]
            assert all(t.data_ptr() % 64 == 0 for t in one._tensors() if t.numel())
            assert all(t._base is None for t in one._tensors()), "autograd knows each field as a tensor of its own"

    def test_nothing_is_kept_alive(self) -> None:
        cls: Any = type("Gone", (DeviceDict,), {})
        tensors = [torch.ones(16) for _ in range(2)]
        dicts = [DeviceDict({"x": t}) for t in tensors]
        d = collate([{"x": t} for t in tensors], cls=cls)
        collate(dicts)
        for _ in range(3):
            collate([{"x": t, "y": 1} for t in tensors], cls=cls)
        watched = [weakref.ref(x) for x in (*tensors, *dicts, d)]
        del tensors, dicts, d
        gc.collect()
        assert [ref() for ref in watched] == [None] * len(watched)

    def test_threads(self) -> None:
        kinds = [[{f"k{j}": torch.full((w,), float(i)) for j in range(w)} for i in range(3)] for w in range(1, 9)]
        expected = [facts(collate(samples)) for samples in kinds]
        failures: list[int] = []

        def work(offset: int) -> None:
            for turn in range(200):
                i = (turn * 3 + offset) % len(kinds)
                if facts(collate(kinds[i])) != expected[i]:
                    failures.append(i)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []


@pytest.mark.parametrize("odd", [
    torch.ones(3).double(),
    torch.ones(2, 1),
    torch.ones(()),
    torch.ones(0, 3),
    torch.ones(3, requires_grad=True),
    torch.nn.Parameter(torch.ones(3)),
    torch.ones(6)[::2],
    torch.ones(3, device="meta"),
    torch.ones(3).to_sparse(),
    torch.ones(3, dtype=torch.complex64).conj().imag,
    [1.0, 2.0],
    [1],
    [],
    [True],
    [None],
    ["a"],
    np.ones(3),
    1.0,
    None,
    "ab",
    torch.ones(0),
    torch.ones(2, 2),
    torch.ones(0, 2),
    torch.ones(2, 0),
    torch.ones(2, 2).T,
    torch.ones(1, 2).double(),
])  # fmt: skip
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("pad", [0, Pad(1, "left", 4, "lengths", "mask")])
def test_one_padded_sample_that_differs(odd: Any, place: int, pad: Any) -> None:
    for make in (torch.ones, lambda n: [1.0] * n, lambda n: torch.ones(n, 2)):  # pyright: ignore[reportUnknownLambdaType, reportUnknownVariableType]
        samples = [{"x": odd if i == place else make(i + 1), "y": i} for i in range(3)]
        same(samples, pad={"x": pad})


@pytest.mark.parametrize("samples", [[{"a": torch.ones(2)}] * 2, [{"a": 1, "b": None}, {"a": 2, "k": 4.0}]])
def test_every_sample_gets_the_default_of_a_typed_class(samples: Any) -> None:
    d = collate(samples, cls=Filled)
    same(samples, cls=Filled)
    assert d["k"].shape == (2,) and d["k"][0] == 3.0


@pytest.mark.parametrize("keys", [1, 8, 9, 40])
@pytest.mark.parametrize("odd", ["none", "order", "missing", "extra", "other"])
def test_any_number_of_keys(keys: int, odd: str) -> None:
    samples: list[dict[str, Any]] = [{f"k{j}": torch.full((3,), i + j) for j in range(keys)} for i in range(3)]
    if odd == "order":
        samples[1] = dict(reversed(samples[1].items()))
    elif odd != "none":
        first = samples[1].pop("k0") if odd in ("missing", "other") else None
        samples[1] |= {} if odd == "missing" else {"z": first}
    got = same(samples)
    assert (got[0] is ValueError) == (odd in ("missing", "extra", "other"))


def test_strings_are_encoded_once() -> None:
    calls: list[Any] = []

    class Counts(Utf8):
        def encode(self, strings: Any, /) -> Tensor:
            calls.append(strings)
            return super().encode(strings)

    samples = [{"s": "a", "x": torch.ones(1)}, {"s": "bc", "x": torch.ones(1)}]
    assert collate(samples, encoders={"s": Counts()}).decode("s") == ["a", "bc"] and calls == [["a", "bc"]]


class Scan(Tensor):
    """A tensor with more than its values, as the images of medical libraries are."""

    origin: float

    @classmethod
    def at(cls, origin: float, shape: Any = (2,)) -> Scan:
        scan = torch.full(shape, origin).as_subclass(cls)
        scan.origin = origin
        return scan


class LaterScan(Scan):
    pass


class Box(NamedTuple):
    width: float


class Named:
    def __init__(self, name: str) -> None:
        self.name = name


class TestRegisteredTypes:
    """Types that somebody registered in torch's `default_collate_fn_map`."""

    @pytest.fixture(autouse=True)
    def registered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def join_scans(scans: Any, *, collate_fn_map: Any) -> Any:
            batch = collate_fn_map[Tensor]([scan.as_subclass(Tensor) for scan in scans]).as_subclass(Scan)
            batch.origin = [scan.origin for scan in scans]
            return batch

        known = torch_collate.default_collate_fn_map
        monkeypatch.setitem(known, Scan, join_scans)
        monkeypatch.setitem(known, Box, lambda boxes, **_: {"width": torch.tensor([box.width for box in boxes])})
        monkeypatch.setitem(known, (Named, bytearray), lambda named, **_: [one.name for one in named])

    @pytest.mark.parametrize("kind", [Scan, LaterScan])
    @pytest.mark.parametrize("pack", [True, False])
    def test_the_function_of_the_type_joins_the_samples(self, kind: Any, pack: bool) -> None:
        samples = [
            {
                "scan": kind.at(i),
                "x": torch.ones(2) * i,
                "in": {"scan": kind.at(i + 3)},
                "box": Box(i),
                "who": Named("a"),
            }
            for i in (1.0, 2.0)
        ]
        d: Any = collate(samples, pack=pack)
        check_invariants(d)
        assert type(d["scan"]) is Scan and d["scan"].origin == [1, 2] and d["in", "scan"].origin == [4, 5]
        assert d["scan"].as_subclass(Tensor).tolist() == d["x"].tolist() == [[1, 1], [2, 2]]
        assert d["box", "width"].tolist() == [1, 2] and d.decode("who") == ["a", "a"]
        made = default_collate([DeviceDict({"scan": sample["scan"]}) for sample in samples])
        scans: Any = made["scan"]
        assert type(made) is DeviceDict and scans.origin == [1, 2]

    @pytest.mark.parametrize(("values", "options", "error", "message"), [
        ([Scan.at(1.0), torch.ones(2)], {}, TypeError,
         "'x': sample 1 is of type Tensor, sample 0 of type Scan; convert"),
        ([torch.ones(2), Scan.at(1.0)], {}, TypeError,
         "'x': sample 1 is of type Scan, sample 0 of type Tensor; convert"),
        ([Scan.at(1.0), Scan.at(1.0, (3,))], {}, ValueError, "'x': sample 1 has float32[3], sample 0 has float32[2]"),
        ([Scan.at(1.0), Scan.at(1.0, (3,))], {"pad": {"x": 0}}, TypeError,
         "'x': pad= and ragged= do not take Scan, whose"),
        ([Scan.at(1.0), Scan.at(1.0)], {"ragged": ["x"]}, TypeError, "'x': pad= and ragged= do not take Scan, whose"),
    ])  # fmt: skip
    def test_errors_name_the_field(self, values: Any, options: Any, error: Any, message: str) -> None:
        fails(error, f"^{re.escape(message)}", lambda: collate([{"x": value} for value in values], **options))
