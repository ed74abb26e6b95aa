"""`collate`: many samples in one packed dict."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from checks import check_invariants, fails
from torch import Tensor
from torch.utils.data import default_collate

from tensordict_lite import DeviceDict, DeviceMismatchError, Utf8, Vocabulary, collate, stack


class Batch(DeviceDict, objects="keep", encoders={"s": Vocabulary(["a", "b", "c"])}):
    """At module level, as what is pickled must be."""


def plain_samples(n: int = 4) -> list[dict[str, Any]]:
    return [
        {
            "x": torch.full((3,), float(i)),
            "y": i,
            "f": i / 2,
            "flag": bool(i % 2),
            "c": 1j * i,
            "a": np.full((2, 2), i, dtype=np.int16),
            "scalar": np.float64(i),
            "list": [i, i + 1],
            "name": "n" * i,
            "words": ["a", "b" * i],
            "n": {"z": torch.tensor(i), "t": f"t{i}"},
        }
        for i in range(n)
    ]


class TestCollate:
    @pytest.mark.parametrize("pack", [True, False])
    def test_everything_a_dict_takes(self, pack: bool) -> None:
        samples = plain_samples()
        before = copy.deepcopy(samples)
        d = collate(samples, pack=pack)
        check_invariants(d)
        assert d.is_packed and list(d) == list(samples[0]) and type(d["n"]) is DeviceDict
        assert d["x"].tolist() == [[float(i)] * 3 for i in range(4)] and d["x"].dtype == torch.float32
        assert d["y"].tolist() == [0, 1, 2, 3] and d["f"].tolist() == [0.0, 0.5, 1.0, 1.5]
        assert d["f"].dtype == torch.float32
        assert d["flag"].dtype == torch.bool and d["c"].dtype == torch.complex64 and d["a"].dtype == torch.int16
        assert d["a"].shape == (4, 2, 2) and d["scalar"].dtype == torch.float64
        assert d["list"].tolist() == [[i, i + 1] for i in range(4)]
        assert d.decode("name") == ["", "n", "nn", "nnn"] and d.decode("words") == [["a", "b" * i] for i in range(4)]
        assert d["n", "z"].tolist() == [0, 1, 2, 3] and d.decode(("n", "t")) == ["t0", "t1", "t2", "t3"]
        assert all(
            type(a) is type(b)
            for s, t in zip(samples, before, strict=True)
            for a, b in zip(s.values(), t.values(), strict=True)
        )

    def test_it_is_what_a_dict_would_store_stacked(self) -> None:
        samples = plain_samples()
        assert collate(samples) == stack([DeviceDict(s) for s in samples])

    def test_classes_encoders_and_policy(self) -> None:
        samples: list[Any] = [{"s": letter, "x": 1.0, "o": None, "n": {"s": letter}} for letter in "abc"]
        d = collate(samples, cls=Batch)
        assert type(d) is Batch and type(d["n"]) is Batch and d["s"].tolist() == [0, 1, 2] and d["o"] == [None] * 3
        assert d.decode(("n", "s")) == ["a", "b", "c"]
        other = collate(samples, cls=Batch, encoders={"s": Utf8(4)})
        assert other["s"].shape == (3, 4) and other.decode("s") == ["a", "b", "c"]
        again = collate([Batch(s, encoders={"x": Utf8(3)}) for s in samples])
        assert type(again) is Batch and again["s"].tolist() == [0, 1, 2] and "x" in again.encoders
        names = collate([DeviceDict({"name": "a" * i}) for i in range(1, 4)])
        assert names.decode("name") == ["a", "aa", "aaa"]
        half = collate([{"x": 1.5, "a": np.ones(2)}] * 2, cls=type("Half", (DeviceDict,), {}, dtype=torch.float16))
        assert half["x"].dtype == half["a"].dtype == torch.float16  # pyright: ignore[reportAttributeAccessIssue]

    def test_an_encoder_of_several_tensors(self) -> None:
        class Tokens:
            def encode(self, strings: Any) -> dict[str, Tensor]:
                ids = torch.tensor([[len(s), 1] for s in strings])
                return {"ids": ids, "mask": ids > 0}

            def decode(self, codes: Any) -> list[str]:
                return ["?" * n for n in codes["ids"][..., 0].tolist()]

        d = collate([{"t": "a", "x": 1}, {"t": "bcd", "x": 2}], encoders={"t": Tokens()})
        check_invariants(d)
        assert d.is_packed and d["t", "ids"].tolist() == [[1, 1], [3, 1]] and d.decode("t") == ["?", "???"]

    @pytest.mark.parametrize("wrap", [dict, DeviceDict])
    @pytest.mark.parametrize(
        ("samples", "error", "message"),
        [
            ([{"x": torch.ones(2)}, {"x": torch.ones(3)}], ValueError,
             "'x': sample 1 has float32[3], sample 0 has float32[2]; to fill the shorter ones up, give pad={'x': 0}"),
            ([{"x": torch.ones(2)}, {"x": torch.ones(2)}, {"x": torch.ones(2).long()}], ValueError,
             "'x': sample 2 has int64[2], sample 0 has float32[2]; convert the samples to one dtype, such as float32$"),
            ([{"x": torch.ones(2), "y": 1.5}, {"x": torch.ones(2).half(), "y": 1.5}], ValueError,
             "'x': sample 1 has float16[2], sample 0 has float32[2]; "
             "convert the samples to one dtype, such as float32$"),
            ([{"n": {"x": torch.ones(2, 2)}}, {"n": {"x": torch.ones(2, 3)}}], ValueError,
             "'n.x': sample 1 has float32[2, 3], sample 0 has float32[2, 2]"),
            ([{"x": 1, "y": 2}, {"x": 1}], ValueError,
             "sample 1 lacks 'y', which sample 0 has; give each sample the same keys$"),
            ([{"x": 1}, {"x": 1, "y": 2}], ValueError,
             "sample 1 has 'y', which sample 0 lacks; give each sample the same keys$"),
            ([{"n": {"x": 1}}, {"n": {}}], ValueError, "sample 1 lacks 'n.x', which sample 0 has"),
            ([{"x": [1, 2]}, {"x": [1]}], ValueError, "'x': sample 1 has int64[1], sample 0 has int64[2]"),
            ([{"x": {"y": 1}}, {"x": 1}], ValueError, "'x': sample 1 has"),
            ([{"x": torch.eye(2)}, {"x": torch.eye(2).to_sparse()}], ValueError,
             "'x': sample 1 has sparse_coo float32[2, 2], sample 0 has float32[2, 2]$"),
            ([{"x": torch.eye(2).to_sparse()}, {"x": torch.eye(2)}], ValueError,
             "'x': sample 1 has float32[2, 2], sample 0 has sparse_coo float32[2, 2]$"),
        ],
    )  # fmt: skip
    def test_samples_that_disagree(self, wrap: Any, samples: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error) as caught:
            collate([wrap(s) for s in samples])
        assert message in f"{caught.value}$"  # so that a message can name the end

    @pytest.mark.parametrize(("samples", "error", "message"), [
        ([], ValueError, "collate takes a list of at least one sample, got an empty list"),
        ({"x": 1}, TypeError, "collate takes a list of samples, got a mapping; for one sample write [sample]"),
        ([{"x": 1}, (1, 2)], TypeError,
         "collate takes samples that are mappings, sample 1 is a tuple; torch's default_collate"),
        ([{"x": 1}, {"x": None}], TypeError, "sample 1: 'x': expected a tensor"),
        ([{"x": "a"}, {"x": 3}], ValueError, "'x': sample 1 has an int, sample 0 has a str"),
        ([{"x": np.ma.array([1.0], mask=[True])}] * 2, TypeError, "sample 0: 'x': expected an array without"),
        ([{1: 2.0}, {1: 3.0}], TypeError, "keys are str, got 1"),
        ([{1: 2.0, "a": 1}, {"b": 3.0}], ValueError, "sample 1 lacks"),
        ([{"x": np.int64(1)}, {"x": np.float32(0.1)}], ValueError, "'x': sample 1 has float32[], sample 0 has int64[]"),
        ([{"x": np.str_("a")}, {"x": np.float64(1)}], ValueError, "'x': sample 1 has a float64, sample 0 has a str_"),
        ([{"x": np.zeros(2)}, {"x": np.zeros(3)}], ValueError, "'x': sample 1 has float64[3], sample 0 has float64[2]"),
        ([{"x": np.zeros(2)}, {"x": np.zeros(2, dtype=np.int64)}], ValueError,
         "'x': sample 1 has int64[2], sample 0 has float64[2]"),
        ([{"x": torch.ones(1)}, {"x": torch.ones(1, device="meta")}], DeviceMismatchError, "'x' is on meta"),
        ([{"x": torch.ones(1), "y": torch.ones(1, device="meta")}], DeviceMismatchError, "'y' is on meta"),
    ])  # fmt: skip
    def test_samples_that_are_none(self, samples: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error) as caught:
            collate(samples)
        assert message in str(caught.value)

    def test_arguments_that_do_not_fit(self) -> None:
        samples = [{"x": [1]}, {"x": [1, 2]}]
        with pytest.raises(
            TypeError, match=r"^collate takes a list of samples, and .* functools.partial\(collate, ...\)$"
        ):
            collate(pad={"x": 0})
        fails(ValueError, r"give pad=\{'x': 0\}; to keep the lengths, ragged=\['x'\]$", lambda: collate(samples))

    @pytest.mark.parametrize(("arguments", "expected"), [
        ({"pad": 5}, "a mapping from keys to fill values as pad="),
        ({"cls": dict}, "a DeviceDict class as cls="),
    ], ids=["pad", "cls"])  # fmt: skip
    def test_arguments_of_another_type(self, arguments: Any, expected: str) -> None:
        fails(TypeError, f"^collate takes {expected}", lambda: collate([{"x": [1]}, {"x": [1, 2]}], **arguments))

    def test_an_encoders_own_error_and_only_once(self) -> None:
        calls: list[Any] = []

        class Tokens:
            def encode(self, strings: Any) -> Any:
                calls.append(strings)
                if len({len(s) for s in strings}) > 1:
                    raise ValueError("activate padding")
                return {"ids": torch.tensor([[ord(c) for c in s] for s in strings])}

            def decode(self, codes: Any) -> list[str]:
                return []

        with pytest.raises(ValueError, match="'t': activate padding"):
            collate([{"t": "a"}, {"t": "bcd"}], encoders={"t": Tokens()})
        calls.clear()
        with pytest.raises(ValueError, match="'x': sample 1"):
            collate([{"t": "a", "x": torch.ones(1)}, {"t": "b", "x": torch.ones(2)}], encoders={"t": Tokens()})
        assert calls == [["a", "b"]]

    def test_the_class_that_is_asked_for_brings_its_policy(self) -> None:
        sample = DeviceDict({"x": 1.0, "n": {"s": torch.tensor(0)}})
        d = collate([sample] * 2, cls=Batch)
        assert type(d) is Batch and d._policy.objects == "keep"
        assert type(d["n"]) is type(Batch(sample)["n"]) is DeviceDict and d.decode(("n", "s")) == ["a", "a"]
        nested = collate([{"n": DeviceDict({"s": torch.tensor(1)})}] * 2, encoders={"s": Vocabulary(["x", "y"])})
        assert nested.decode(("n", "s")) == ["y", "y"]

    def test_a_vocabulary_that_lacks_a_word_says_whose(self) -> None:
        with pytest.raises(ValueError, match=r"^sample 1: 's': 'z' is not among the 3 tokens"):
            collate([{"s": "a"}, {"s": "z"}], cls=Batch)

    def test_tensors_that_require_grad_or_are_special_stay_beside(self) -> None:
        w = torch.ones(2, requires_grad=True)
        for second in (w * 2, torch.zeros(2)):
            d = collate([{"x": w, "y": 1.0, "z": 2.0}, {"x": second, "y": 2.0, "z": 1.0}])
            assert d.is_packed and d["x"].requires_grad and d["x"].shape == (2, 2)
        z = torch.ones(2, dtype=torch.complex64).conj().imag  # with its negative bit set
        for odd in (w, z, torch.nn.Parameter(torch.ones(2), requires_grad=False)):
            for keys in ("xab", "axb", "abx"):  # wherever it stands among those that look like it
                d = collate([{k: odd if k == "x" else torch.ones(2) for k in keys}] * 2)
                assert (d.is_packed or odd is not w) and torch.equal(d["x"], torch.stack([odd, odd]))
                assert torch.equal(d["a"], torch.ones(2, 2)) and torch.equal(d["b"], torch.ones(2, 2))
        mixed = [
            {"a": torch.ones(2), "y": 1, "w": t, "z": torch.ones(2)}
            for t in (torch.ones(3), torch.ones(3, requires_grad=True))
        ]
        assert collate(mixed).is_packed, "the fields keep their order in the buffer"
        late = collate([{"x": torch.zeros(2), "y": 1.0}, {"x": w, "y": 2.0}])
        late["x"].sum().backward()
        assert w.grad is not None and w.grad.tolist() == [1, 1]
        assert collate([{"x": torch.eye(2).to_sparse()}] * 2)["x"].is_sparse

    def test_on_a_device(self, device: torch.device) -> None:
        samples = [{"x": torch.full((2,), float(i), device=device), "y": i} for i in range(3)]
        d = collate(samples)
        check_invariants(d)
        assert d.device == device and d["y"].cpu().tolist() == [0, 1, 2] and d["x"].cpu().sum() == 6

    def test_default_collate_takes_the_same_path(self) -> None:
        samples = [Batch({"x": torch.full((2,), float(i)), "s": "abc"[i], "o": None}) for i in range(3)]
        before = [copy.copy(s) for s in samples]
        d = default_collate(samples)
        assert type(d) is Batch and d.is_packed and d["o"] == [None] * 3 and d.decode("s") == ["a", "b", "c"]
        assert samples == before
        pairs = default_collate([(s, i) for i, s in enumerate(samples)])
        assert type(pairs[0]) is Batch and pairs[1].tolist() == [0, 1, 2]
