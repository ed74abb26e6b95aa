"""`collate(ragged=)`: samples of any length as `Ragged` fields."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from checks import check_invariants, fails
from torch import Tensor
from torch.utils.data import DataLoader

from tensordict_lite import DeviceDict, DeviceMismatchError, Ragged, TypedDeviceDict, Utf8, Vocabulary, collate

LENGTHS = (2, 1, 3, 0)


class Typed(TypedDeviceDict):
    ids: Ragged
    n: DeviceDict[Any]
    y: Tensor | None = None


def samples() -> list[dict[str, Any]]:
    return [{"box": torch.arange(2.0 * n).view(n, 2), "y": n, "k": {"ids": list(range(n))}} for n in LENGTHS]


def rows(field: Ragged) -> list[Any]:
    return [row.tolist() for row in field.unbind()]


class TestRagged:
    def test_what_collate_makes(self) -> None:
        d: Any = collate(samples(), ragged=["box", ("k", "ids")])
        check_invariants(d)
        assert type(d["box"]) is Ragged and rows(d["box"]) == [s["box"].tolist() for s in samples()]
        assert rows(d["k", "ids"]) == [[0, 1], [0], [0, 1, 2], []] and list(d) == ["box", "y", "k"] and d.is_packed
        assert d["k", "ids"].values.dtype == torch.int64 and d["y"].tolist() == [2, 1, 3, 0]
        assert d["box"].offsets.dtype == torch.int32
        assert d["box"]._lengths.longest == d["k", "ids"]._lengths.longest == 3
        assert d["box"].offsets is d["k", "ids"].offsets, "rows of the same lengths"

    @pytest.mark.parametrize("pack", [True, False])
    def test_equal_and_empty_samples(self, pack: bool) -> None:
        for lengths in ([2, 2], [0, 0], [3]):
            d: Any = collate([{"x": torch.ones(n), "z": [1] * n} for n in lengths], ragged=("x", "z"), pack=pack)
            check_invariants(d)
            assert d["x"].lengths.tolist() == d["z"].lengths.tolist() == lengths
            assert d["x"].max_length == max(lengths) and d["x"].offsets is d["z"].offsets
            assert d.is_packed or not max(lengths)

    def test_only_fields_of_equal_lengths_share_offsets(self) -> None:
        d: Any = collate(
            [{"a": [1], "b": [1, 2], "c": [3]}, {"a": [1, 2], "b": [1], "c": [4, 5]}], ragged=["a", "b", "c"]
        )
        assert d["a"].offsets is d["c"].offsets is not d["b"].offsets
        assert d["a"].lengths.tolist() == [1, 2] and d["b"].lengths.tolist() == [2, 1]

    @pytest.mark.parametrize(("made", "dtype"), [
        (lambda n: [0.5] * n, torch.float32),
        (lambda n: [True] * n, torch.bool),
        (lambda n: np.full(n, 3, np.uint16), torch.uint16),
        (lambda n: torch.full((n, 2), 3, dtype=torch.bfloat16), torch.bfloat16),
        (lambda n: tuple(range(n, 2 * n)), torch.int64),
        (lambda n: [[1, 2]] * n, torch.int64),
        (lambda n: np.ones((n, 1, 2), np.float64), torch.float64),
    ])  # fmt: skip
    def test_kinds_of_samples(self, made: Any, dtype: torch.dtype) -> None:
        given = [{"x": made(n)} for n in (1, 3, 2)]
        d: Any = collate(given, ragged=["x"])
        check_invariants(d)
        assert d["x"].values.dtype is dtype and d["x"].lengths.tolist() == [1, 3, 2]
        assert torch.equal(d.rows[1]["x"], DeviceDict(given[1])["x"])

    def test_gradients_flow(self) -> None:
        w = torch.ones(2, requires_grad=True)
        batch: Any = collate([{"x": w}, {"x": w[:1] * 3}], ragged=["x"])
        batch["x"].values.sum().backward()
        assert w.grad is not None and w.grad.tolist() == [4, 1]

    def test_typed_fields_need_no_mention(self) -> None:
        given = [{"ids": [1, 2], "n": {"ids": 1}, "y": 0.5}, {"ids": [], "n": {"ids": 2}, "y": 1.5}]
        assert collate(given, cls=Typed) == collate(given, cls=Typed, ragged=[("ids",)])
        d: Any = collate(given, cls=Typed)
        check_invariants(d)
        assert type(d) is Typed and d.ids.max_length == 2 and rows(d.ids) == [[1, 2], []]
        assert d.n["ids"].tolist() == [1, 2], "only the declared field is ragged"

    @pytest.mark.parametrize("workers", [0, 1])
    def test_loaders(self, workers: int) -> None:
        loader = DataLoader(samples(), 2, num_workers=workers, collate_fn=partial(collate, ragged=["box", "ids"]))  # type: ignore[arg-type]
        batches = list(loader)
        assert [row for d in batches for row in rows(d["k", "ids"])] == [list(range(n)) for n in LENGTHS]
        assert all(d.is_packed and d["box"].offsets is d["k", "ids"].offsets for d in batches)
        assert [d["box"]._lengths.longest for d in batches] == [2, 3]

    @pytest.mark.parametrize(("given", "options", "error", "message"), [
        ([{"x": [1]}], {"ragged": "x"}, TypeError,
         r"^collate takes a list of keys or paths as ragged=, as \[\"box\"\], got 'x'$"),
        ([{"x": [1]}], {"ragged": 3}, TypeError, "^collate takes a list of keys or paths as ragged=.*, got 3$"),
        ([{"x": [1]}], {"ragged": [3]}, TypeError, "^ragged= of collate takes keys and paths, got 3$"),
        ([{"x": [1]}], {"ragged": ["x"], "pad": {"x": 0}}, ValueError,
         "^'x' stands in pad= and in ragged=; a field is either padded or ragged$"),
        ([{"x": [1]}], {"ragged": [("x",)], "pad": {"x": 0}}, ValueError,
         r"^\('x',\) stands in pad= and in ragged=; a field is either padded or ragged$"),
        ([{"x": [1]}], {"ragged": ["x"], "pad": {("x",): 0}}, ValueError,
         "^'x' stands in pad= and in ragged=; a field is either padded or ragged$"),
        ([{"x": 1}], {"ragged": ["x"]}, ValueError,
         r"^'x': a ragged field takes dense samples of at least one dimension, got int64\[\] in sample 0$"),
        ([{"x": torch.ones(1)}, {"x": torch.ones(1).to_sparse()}], {"ragged": ["x"]}, ValueError,
         "^'x': a ragged field takes dense samples of at least one dimension, got "),
        ([{"x": torch.ones(1, 2)}, {"x": torch.ones(1, 3)}], {"ragged": ["x"]}, ValueError,
         r"^'x': sample 1 has float32\[1, 3\], sample 0 has float32\[1, 2\]; "
         r"ragged= lets the first dimension differ only$"),
        ([{"x": torch.ones(1)}, {"x": torch.ones(1).long()}], {"ragged": ["x"]}, ValueError,
         r"^'x': sample 1 has int64\[1\], sample 0 has float32\[1\]; "
         r"convert the samples to one dtype, such as float32$"),
        ([{"x": torch.ones(1)}, {"x": torch.ones(1, 1)}], {"ragged": ["x"]}, ValueError,
         r"^'x': sample 1 has float32\[1, 1\], sample 0 has float32\[1\]; ragged= lets"),
        ([{"x": torch.ones(1)}, {"x": torch.ones(1, device="meta")}], {"ragged": ["x"]}, DeviceMismatchError,
         "^'x' is on meta"),
        ([{"x": "a"}, {"x": 1}], {"ragged": ["x"]}, ValueError, "^'x': "),
        ([{"x": "a"}, {"x": "b\0"}], {"ragged": ["x"]}, ValueError, r"^sample 1: 'x': 'b\\x00' holds a NUL"),
        ([{"x": "a"}, {"x": "Ada"}], {"ragged": ["x"], "encoders": {"x": Utf8(2)}}, ValueError,
         "^sample 1: 'x': 'Ada' is 3 bytes in UTF-8, over max_length=2"),
        ([{"x": {"a": [1]}}], {"ragged": ["y"]}, ValueError, "^ragged= names 'y', which no sample has"),
        ([{"x": {"a": [1], "b": 2}}], {"ragged": ["x"]}, ValueError,
         "^ragged= names 'x', which is a nested dict; name its fields: a, b$"),
        ([{"k": {"x": {"a": [1]}}}], {"pad": {("k", "x"): 0}}, ValueError,
         r"^pad= names \('k', 'x'\), which is a nested dict; name its fields: a$"),
        ([{"x": Ragged.from_rows([[1]])}] * 2, {}, ValueError,
         r"^'x': collate takes one row of each sample, got a ragged field; cat\(\[\.\.\.\]\) joins the rows"),
        ([{"x": torch.ones(1)}, {"x": Ragged.from_rows([[1]])}], {"ragged": ["x"]}, ValueError,
         r"^'x': collate takes one row of each sample, got a ragged field; cat\(\[\.\.\.\]\) joins the rows"),
        ([Ragged.from_rows([[1]])] * 2, {}, TypeError,
         r"^collate takes samples that are mappings, sample 0 is a Ragged;"),
    ])  # fmt: skip
    def test_errors(self, given: Any, options: Any, error: type[Exception], message: str) -> None:
        fails(error, message, lambda: collate(given, **options))


def test_a_stream_is_recorded_for_each_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    d: Any = collate([{"b": torch.ones(2)}, {"b": torch.ones(3)}], ragged=["b"]).map(torch.clone)
    seen: list[int] = []
    monkeypatch.setattr(Tensor, "record_stream", lambda self, _: seen.append(self.numel()))
    d.record_stream(None)
    assert seen == [5, 3]
    memory = torch.zeros(9)
    DeviceDict({"x": memory[:4], "y": memory[4:], "b": d["b"]}).record_stream(None)
    assert seen[2:] == [4, 5, 3], "once for each storage"


def test_a_stream_is_recorded_for_each_part_of_a_nested_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A nested tensor of torch has no storage of its own: its values and offsets have."""
    batch: Any = collate([{"b": torch.ones(2)}, {"b": torch.ones(3)}], ragged=["b"])
    nested = batch["b"].nested()
    seen: list[int] = []
    monkeypatch.setattr(Tensor, "record_stream", lambda self, _: seen.append(self.numel()))
    DeviceDict({"b": nested}).record_stream(None)
    assert seen == [5, 3] and type(nested) is not Tensor


class TestObjects:
    """Lists of mappings, as the objects that are marked in an image."""

    def test_a_ragged_field_for_each_key(self) -> None:
        cat = {"box": [0.0, 1.0], "label": "cat", "n": {"z": 1}}
        dog = {"box": [2.0, 3.0], "label": "dog", "n": {"z": 2}}
        samples = [{"y": 1, "objects": [cat, dog]}, {"y": 2, "objects": []}, {"y": 3, "objects": [dog]}]
        d: Any = collate(samples, ragged=["objects"], encoders={"label": Vocabulary(["cat", "dog"])})
        check_invariants(d)
        labels, boxes = [["cat", "dog"], [], ["dog"]], [[[0, 1], [2, 3]], [], [[2, 3]]]
        assert d.is_packed and d.decode(("objects", "label")) == labels
        assert d.tolist()["objects"] == {"box": boxes, "label": labels, "n": {"z": [[1, 2], [], [2]]}}
        assert d["objects", "box"].offsets is d["objects", "n", "z"].offsets and len(d.rows) == 3
        assert d.rows[0]["objects", "box"].tolist() == boxes[0]

    def test_the_options_of_a_declared_class(self) -> None:
        class Marks(TypedDeviceDict, encoders={"label": Vocabulary(["cat", "dog"])}):
            label: Ragged

        class Scene(TypedDeviceDict):
            marks: Marks

        d = collate([{"marks": [{"label": "dog"}]}, {"marks": []}], cls=Scene, ragged=["marks"])
        assert d.marks.label.values.tolist() == [1] and d.decode(("marks", "label")) == [["dog"], []]

    @pytest.mark.parametrize(("samples", "error", "message"), [
        ([{"o": [{"a": 1}]}, {"o": [{"b": 1}]}], ValueError,
         "sample 1 lacks 'o.a', which sample 0 has, and has 'o.b'; give each sample the same keys; "
         "these samples are the items of the lists at "),
        ([{"o": [{"a": None}]}], TypeError, "these samples are the items of the lists at 'o'"),
    ], ids=["keys", "None"])  # fmt: skip
    def test_errors(self, samples: Any, error: type[Exception], message: str) -> None:
        fails(error, re.escape(message), lambda: collate(samples, ragged=["o"]))

    def test_kept_objects_are_refused(self) -> None:
        with pytest.raises(TypeError, match=r"^'o.a': expected tensors for a ragged field, got kept objects"):
            collate([{"o": [{"a": None}]}], ragged=["o"], objects="keep")


def test_objects_of_nested_mappings_alone() -> None:
    samples = [{"o": [{"a": {"b": 1}}, {"a": {"b": 2}}]}, {"o": []}]
    assert collate(samples, ragged=["o"]).tolist() == {"o": {"a": {"b": [[1, 2], []]}}}


def test_an_empty_list_beside_other_lists_in_a_field_of_one_length() -> None:
    """The error shows the dtype of the others, and the way out is that for lengths."""
    way_out = r"; to fill the shorter ones up, give pad=\{'x': 0\}; to keep the lengths, ragged=\['x'\]$"
    for other, kind in ((["ab"], r"uint8\[{}, 2\]"), ([1], r"int64\[{}\]"), ([[True] * 3], r"bool\[{}, 3\]")):
        fails(ValueError, rf"^'x': sample 1 has {kind.format(1)}, sample 0 has {kind.format(0)}{way_out}",
              lambda other=other: collate([{"x": []}, {"x": other}]))  # fmt: skip
        fails(ValueError, rf"^'x': sample 1 has {kind.format(0)}, sample 0 has {kind.format(1)}{way_out}",
              lambda other=other: collate([{"x": other}, {"x": ()}]))  # fmt: skip
    for other, shown in ((torch.zeros(0, 4), r"float32\[0, 4\]"), (3, r"float32\[\]"), (np.zeros(1), r"float64\[1\]")):
        fails(ValueError, rf"^'x': sample 1 has {shown}, sample 0 has float32\[0\]",
              lambda other=other: collate([{"x": []}, {"x": other}]))  # fmt: skip


def test_empty_lists_decode_to_no_strings() -> None:
    """Whatever the other batches have: empty lists are float32, and the default encoder decodes them."""
    empty, full = {"s": [], "n": {"s": []}}, {"s": ["a", "bc"], "n": {"s": ["d"]}}
    for samples in ([empty], [empty, empty], [empty, full], [full, empty]):
        batch: Any = collate(samples, ragged=["s"])
        assert batch.decode("s") == [sample["s"] for sample in samples]
        assert batch.decode(("n", "s")) == [sample["n"]["s"] for sample in samples]
        assert [row.decode("s") for row in batch.rows] == batch.decode("s")
    assert collate([empty, empty]).decode("s") == [[], []] and DeviceDict({"s": []}).decode("s") == []
    numbers = DeviceDict({"s": [1.0]})
    fails(
        TypeError, "^'s': Utf8\\(\\) decodes uint8 codes, got float32; 's' has no encoder", lambda: numbers.decode("s")
    )
    own = DeviceDict({"s": torch.zeros(0)}, encoders={"s": Vocabulary(["a"])})
    fails(TypeError, "^'s': Vocabulary.* decodes integer codes, got float32$", lambda: own.decode("s"))
