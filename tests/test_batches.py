"""Rows, stack, cat and collate: many samples in one dict, and back."""

from __future__ import annotations

import copy
import os
import pickle
import re
from collections import OrderedDict, UserDict
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import simulated
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from tensordict_lite import DeviceDict, DeviceMismatchError, Utf8, Vocabulary, cat, collate, stack
from tensordict_lite._sendable import refuse_unsendable


class Batch(DeviceDict, objects="keep", encoders={"s": Vocabulary(["a", "b", "c"])}):
    """At module level, as what is pickled must be."""


def batch(n: int = 6) -> Batch:
    return Batch({"x": torch.arange(2.0 * n).reshape(n, 2), "s": ["a", "b", "c"] * (n // 3), "name": [f"n{i}" for i in range(n)],
                  "n": {"id": torch.arange(n), "file": [f"f{i}" * (1 + i) for i in range(n)], "e": {}}, "o": [None] * (n - 1) + [{1}],
                  "meta": object})  # fmt: skip


class TestRows:
    def test_one_row_is_a_view(self) -> None:
        d = batch()
        row = d.rows[2]
        row._check()
        assert (
            type(row) is Batch and type(row["n"]) is Batch and row["x"].tolist() == [4.0, 5.0] and row["n", "id"] == 2
        )
        assert row.decode("s") == "c" and row.decode("name") == "n2" and row.decode(("n", "file")) == "f2f2f2"
        row["x"].zero_()
        assert not d["x"][2].any() and d.rows[-1]["n", "id"] == 5 and d.rows[np.int64(1)]["n", "id"] == 1
        assert d.rows[torch.tensor(1)]["n", "id"] == 1 and len(d) == 6 and len(d.rows) == 6
        assert d.rows[5]["o"] == {1} and d.rows[0]["o"] is None and row["meta"] is object

    def test_a_slice_is_a_view(self) -> None:
        d = batch()
        part = d.rows[1:5:2]
        part._check()
        assert part["n", "id"].tolist() == [1, 3] and part.decode("s") == ["b", "a"] and part["o"] == [None, None]
        part["x"].zero_()
        assert not d["x"][1].any() and d["x"][2].any() and len(d.rows[9:]) == 6 and len(d.rows[9:].rows) == 0
        plain = DeviceDict({"x": torch.arange(4), "y": torch.arange(8).reshape(4, 2)}, on_mismatch="move")
        assert plain.rows[1:3].to_dict()["x"].tolist() == [1, 2] and plain.rows[1:3]._policy is plain._policy

    @pytest.mark.parametrize(
        "index",
        [[0, 3, -1], torch.tensor([0, 3, -1]), np.array([0, 3, 5]), torch.tensor([0, 3, -1], dtype=torch.int32),
         torch.tensor([True, False, False, True, False, True]), [True, False, False, True, False, True],
         np.array([1, 0, 0, 1, 0, 1], dtype=bool)],
    )  # fmt: skip
    def test_masks_and_indices_are_copies(self, index: Any) -> None:
        d = batch()
        assert d.rows[range(0, 6, 3)]["n", "id"].tolist() == [0, 3]
        taken = d.rows[index]
        taken._check()
        assert (
            taken["n", "id"].tolist() == [0, 3, 5]
            and taken["o"] == [None, None, {1}]
            and taken.decode("name") == ["n0", "n3", "n5"]
        )
        taken["x"].zero_()
        assert d["x"][3].any() and len(d.rows[[]].rows) == 0

    @pytest.mark.parametrize(
        ("index", "error", "message"),
        [
            (6, IndexError, "row 6 is out of range, there are 6"), (-7, IndexError, "row -7 is out of range"),
            ([9], IndexError, "out of"), (True, TypeError, "got one bool"), (np.bool_(True), TypeError, "got one bool"),
            ((1, 2), TypeError, "rows are taken by int, slice, mask or indices (a tensor, array or list), got tuple; fields by d[key]"),
            ("x", TypeError, "rows are taken by int, slice, mask or indices (a tensor, array or list), got str; fields by d[key]"),
            (None, TypeError, "got NoneType"), (1.5, TypeError, "got float"), (torch.tensor([1.0]), TypeError, "got float32[1]"),
            (torch.zeros(2, 2).long(), TypeError, "got int64[2, 2]"),
            (["a"], TypeError, "a list of ints"), ([[1], [2, 3]], TypeError, "a list of ints"),
            ([True], IndexError, "a mask for 6 rows has the shape [6], got [1]"),
        ],
    )  # fmt: skip
    def test_what_is_no_index(self, index: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error) as caught:
            batch().rows[index]
        assert message in str(caught.value)

    @pytest.mark.parametrize(
        "use",
        [len, list, lambda r: r[0], lambda r: r[0:1], lambda r: r[[0]], lambda r: r.split(1), lambda r: r.shuffle()],
    )
    def test_fields_that_disagree(self, use: Any) -> None:
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            use(DeviceDict({"x": torch.ones(2, 3), "n": {"y": torch.ones(3)}}).rows)
        assert str(caught.value) == (
            "rows need fields that agree on their first dimension, this DeviceDict has 'x' [2, 3], 'n.y' [3]"
        )
        with pytest.raises(ValueError, match=r"has 'x' \[2\], 's' \[\]$"):
            use(DeviceDict({"x": torch.ones(2), "s": 1.0}).rows)
        with pytest.raises(ValueError, match=r"has no tensors$"):
            use(DeviceDict().rows)

    @pytest.mark.parametrize("n", [0, 1, 64, 130])
    def test_iterating_is_indexing(self, n: int) -> None:
        d = DeviceDict(
            {"x": torch.arange(n), "y": torch.rand(n, 3)}, encoders={"x": Vocabulary(map(str, range(n or 1)))}
        )
        rows = list(d.rows)
        assert len(rows) == n and all(row == d.rows[i] and row._policy is d._policy for i, row in enumerate(rows))
        for row in rows:
            row._check()
            row["y"].zero_()
        assert not d["y"].any()
        nested = list(batch().rows)
        assert [row["n", "id"].item() for row in nested] == list(range(6)) and nested[5]["o"] == {1}

    def test_rows_of_what_requires_grad_can_be_written(self) -> None:
        w = torch.ones(3, 2, requires_grad=True)
        d = DeviceDict({"x": w * 1, "y": torch.ones(3)})
        for row in d.rows:
            row["x"].mul_(2)
        d["x"].sum().backward()
        assert w.grad is not None and (w.grad == 2).all()

    def test_setting_rows(self, device: torch.device) -> None:
        d = DeviceDict({"x": torch.zeros(4, 2), "n": {"y": torch.zeros(4).long()}}, device=device)
        d.rows[1] = {"x": torch.ones(2, device=device), "n": {"y": 7}}
        d.rows[2:4] = DeviceDict({"x": [[2.0, 2.0], [3.0, 3.0]], "n": {"y": [8, 9]}}, device=device)
        assert d["x"].cpu().tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]] and d["n", "y"].tolist() == [0, 7, 8, 9]
        d.rows[torch.tensor([True, False, False, True])] = d.rows[[1, 1]]
        d.rows[[2]] = {"x": 5.0, "n": {"y": 5}}
        assert d["n", "y"].tolist() == [7, 7, 5, 7] and d["x"][2].tolist() == [5, 5]

    def test_strings_are_set_whole(self) -> None:
        d = DeviceDict({"name": ["Grace", "Ada"], "s": ["a", "b"]}, encoders={"s": Vocabulary(["a", "b"])})
        d.rows[0] = {"name": "Jo", "s": "b"}
        assert d.decode("name") == ["Jo", "Ada"] and d.decode("s") == ["b", "b"]
        d.rows[0:2] = {"name": ["X", "Y"], "s": ["a", "b"]}
        assert d.decode("name") == ["X", "Y"]
        with pytest.raises(ValueError, match="'name': a string of 6 bytes does not fit this field of 5"):
            d.rows[0] = {"name": "Gracie", "s": "a"}
        with pytest.raises(ValueError, match="'s' is encoded with"):
            d.rows[:] = DeviceDict({"name": ["X", "Y"], "s": ["a", "b"]}, encoders={"s": Vocabulary(["b", "a"])})

    def test_rows_that_overlap_are_copied_first(self) -> None:
        d = DeviceDict({"x": torch.arange(4.0), "y": torch.arange(4.0)})
        d.rows[0:3] = d.rows[1:4]
        assert d["x"].tolist() == d["y"].tolist() == [1, 2, 3, 3]
        d.rows[:] = {"x": d["y"] * 0, "y": d["x"]}
        assert d["x"].tolist() == [0] * 4 and d["y"].tolist() == [1, 2, 3, 3]

    def test_what_fails_halfway_is_undone(self) -> None:
        d = DeviceDict({"x": torch.zeros(2), "w": torch.zeros(2, requires_grad=True)})
        with pytest.raises(RuntimeError, match="leaf"):
            d.rows[0] = {"x": 1.0, "w": 1.0}
        assert not d["x"].any()
        with pytest.raises(ValueError, match=r"'i': torch.float32 cannot be written into torch.int64"):
            DeviceDict({"i": [1, 2]}).rows[0] = {"i": 1.7}

    def test_an_index_needs_no_default_device(self) -> None:
        d = DeviceDict({"x": [1, 2, 3]})
        torch.set_default_device("sim:0")
        try:
            assert sorted(d.rows.shuffle()["x"].tolist()) == [1, 2, 3] and d.rows[[0, 2]]["x"].tolist() == [1, 3]
        finally:
            torch.set_default_device(None)

    @pytest.mark.parametrize(
        ("other", "error", "message"),
        [
            ({"x": torch.ones(2)}, ValueError, "rows are set from all fields at once; what was given lacks 'n'"),
            ({"x": torch.ones(2), "n": {"y": 1, "z": 2}}, ValueError, "what was given has 'n.z', which is new"),
            ({"x": torch.ones(3), "n": {"y": 1}}, ValueError, "'x': expected [2] for these rows, got [3]"),
            ({"x": torch.ones(2), "n": {"y": [1, 2]}}, ValueError, "'n.y': expected [] for these rows, got [2]"),
            ({"x": torch.ones(2), "n": 1}, ValueError, "'n' cannot be set by rows: it is no tensor"),
            ({"x": torch.ones(2, device="meta"), "n": {"y": 1}}, DeviceMismatchError, "'x' is on meta"),
            ([1], TypeError, "rows are set from a mapping with the keys of the dict, got list"),
        ],
    )  # fmt: skip
    def test_what_cannot_be_set_leaves_the_dict_as_it_was(
        self, other: Any, error: type[Exception], message: str
    ) -> None:
        d = DeviceDict({"x": torch.zeros(4, 2), "n": {"y": torch.zeros(4).long()}})
        with pytest.raises(error) as caught:
            d.rows[1] = other
        assert message in str(caught.value) and not d["x"].any() and not d["n", "y"].any()

    def test_split_in_sizes(self) -> None:
        d = DeviceDict({"x": torch.arange(6)})
        parts = d.rows.split([1, 0, 5])
        assert [part["x"].tolist() for part in parts] == [[0], [], [1, 2, 3, 4, 5]]
        parts[2]["x"].zero_()
        assert not d["x"].any(), "views"
        assert len(d.rows.split(np.array([2, 4]))) == 2 and len(d.rows.split([torch.tensor(6, dtype=torch.uint8)])) == 1
        wide = DeviceDict({"x": torch.arange(300)})
        assert [len(part.rows) for part in wide.rows.split([np.uint8(200), np.uint8(100)])] == [200, 100]
        for wrong in ("6", [1.0, 5.0], None):
            with pytest.raises(TypeError, match="split takes a size or a list of sizes, got "):
                d.rows.split(wrong)
        for sizes in ([1, 2], [7, -1], []):
            with pytest.raises(
                ValueError, match=re.escape(f"split takes sizes that add up to the 6 rows, got {sizes}")
            ):
                d.rows.split(sizes)
        with pytest.raises(TypeError, match=r"^shuffle takes a torch\.Generator, got int$"):
            d.rows.shuffle(0)  # pyright: ignore[reportArgumentType]

    def test_split_and_shuffle(self, device: torch.device) -> None:
        d = batch().drop("o", "meta").to(device)
        parts = d.rows.split(4)
        assert (
            [len(part.rows) for part in parts] == [4, 2] and cat(parts) == d and parts[1]["n", "id"].tolist() == [4, 5]
        )
        shuffled = d.rows.shuffle(torch.Generator().manual_seed(1))
        assert shuffled == d.rows.shuffle(torch.Generator().manual_seed(1)) and shuffled.device == device
        assert sorted(shuffled["n", "id"].tolist()) == list(range(6)) and sorted(
            d.rows.shuffle()["n", "id"].tolist()
        ) == list(range(6))
        with pytest.raises(ValueError, match="a size of at least 1, got 0"):
            d.rows.split(0)
        assert repr(d.rows) == "Batch.rows(6)"

    def test_rows_of_a_packed_dict_write_into_it(self) -> None:
        packed = DeviceDict({"x": torch.zeros(4, 2), "y": torch.zeros(4)}).pack()
        packed.rows[1:3]["x"].fill_(1)
        packed.rows[0] = {"x": 2.0, "y": 3.0}
        assert packed.is_packed and packed["x"].tolist() == [[2, 2], [1, 1], [1, 1], [0, 0]]


class TestStackAndCat:
    def test_rows_come_together_again(self, device: torch.device) -> None:
        d = batch().to(device)
        again = stack(list(d.rows))
        again._check()
        assert type(again) is Batch and type(again["n"]) is Batch and again.device == device
        assert again.drop("o", "meta") == d.drop("o", "meta") and again["o"] == d["o"] and again["meta"] == [object] * 6
        both = cat([d.rows[:2], d.rows[2:]])
        assert both.drop("meta") == d.drop("meta") and both.decode("s") == d.decode("s")

    def test_dimensions_generators_and_plain_mappings(self) -> None:
        dicts = [{"x": [1.0, 2.0]}, {"x": [3.0, 4.0]}]
        assert stack(dicts, dim=1)["x"].tolist() == [[1.0, 3.0], [2.0, 4.0]]
        assert cat(dict(d) for d in dicts)["x"].tolist() == [1, 2, 3, 4]
        assert stack([OrderedDict(x=1, y=2), UserDict(y=4, x=3)])["x"].tolist() == [1, 3]

    def test_utf8_of_different_widths_decodes_the_same(self) -> None:
        names = [["Ada", "Jo"], ["Grace", ""]]
        dicts = [DeviceDict({"name": pair, "n": {"one": pair[0]}}) for pair in names]
        stacked, catted = stack(dicts), cat([d.drop("n") for d in dicts])
        assert stacked.decode("name") == names and stacked.decode(("n", "one")) == ["Ada", "Grace"]
        assert catted.decode("name") == [*names[0], *names[1]]

    @pytest.mark.parametrize("join", [stack, cat])
    @pytest.mark.parametrize(
        ("dicts", "error", "message"),
        [
            ([], ValueError, "needs at least one dict"), ({"x": 1}, TypeError, "takes several dicts, in a list or another iterable"),
            ([{"x": [1]}, {"y": [1]}], ValueError, "dict 1 lacks 'x', which dict 0 has"),
            ([{"n": {"x": [1]}}, {"n": {"x": [1], "y": [1]}}], ValueError, "dict 1 has 'n.y', which dict 0 lacks"),
            ([{"n": {"x": [1]}}, {"n": [1]}], ValueError, "'n': dict 1 has int64[1], dict 0 has a mapping"),
            ([{"n": {"x": [[1, 2]]}}] * 2 + [{"n": {"x": [[1, 2, 3]]}}], ValueError, "'n.x': dict 2 has int64[1, 3], dict 0 has int64[1, 2]"),
            ([DeviceDict({"x": [1]}), DeviceDict({"x": [1]}, device="meta")], DeviceMismatchError,
             "dict 1 is on meta, others are on cpu; move it with .to('cpu')"),
            ([DeviceDict({"s": ["a"]}, encoders={"s": Vocabulary(["a"])}), DeviceDict({"s": ["b"]}, encoders={"s": Vocabulary(["b"])})],
             ValueError, "'s': dict 1 encodes it with Vocabulary(['b']), dict 0 with Vocabulary(['a'])"),
        ],
    )  # fmt: skip
    def test_dicts_that_disagree(self, join: Any, dicts: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error) as caught:
            join(dicts)
        assert message in str(caught.value)

    def test_a_dimension_that_is_not_there_is_named(self) -> None:
        with pytest.raises(IndexError, match=r"^'n\.x': Dimension out of range"):
            cat([DeviceDict({"n": {"x": [1]}})] * 2, dim=1)

    def test_the_dimension_is_that_of_the_strings(self) -> None:
        pair = [DeviceDict({"name": ["Ada", "Jo"]}), DeviceDict({"name": ["Bob", "Al"]})]
        assert stack(pair, dim=-1).decode("name") == stack(pair, dim=1).decode("name") == [["Ada", "Bob"], ["Jo", "Al"]]
        with pytest.raises(IndexError, match="'name': strings of 0 dimensions have no dim=0 to cat along"):
            cat([DeviceDict({"name": "Ada"}), DeviceDict({"name": "Jo"})])
        with pytest.raises(IndexError, match="'name': strings of 1 dimensions have no dim=1 to cat along"):
            cat(pair, dim=1)

    def test_no_tensor_hides_in_a_list_of_objects(self) -> None:
        with pytest.raises(ValueError, match=r"'o': dict 1 has int64\[\], dict 0 has a NoneType"):
            stack([Batch({"o": None}), Batch({"o": 3})])
        assert stack([Batch({"o": None}), Batch({"o": None}, device="meta")])["o"] == [None, None]

    def test_out_of_memory_stays_that(self) -> None:
        samples = [{"x": torch.zeros(1000, device="sim:0")} for _ in range(3)]
        for join in (stack, cat, collate, partial(collate, pack=False)):
            with simulated.memory_left(100), pytest.raises(torch.OutOfMemoryError):
                join(samples)

    def test_gradients_flow(self) -> None:
        w = torch.ones(2, requires_grad=True)
        stack([DeviceDict({"x": w}), DeviceDict({"x": w * 2})])["x"].sum().backward()
        assert w.grad is not None and w.grad.tolist() == [3, 3]


def plain_samples(n: int = 4) -> list[dict[str, Any]]:
    return [{"x": torch.full((3,), float(i)), "y": i, "f": i / 2, "flag": bool(i % 2), "c": 1j * i, "a": np.full((2, 2), i, dtype=np.int16),
             "scalar": np.float64(i), "list": [i, i + 1], "name": "n" * i, "words": ["a", "b" * i], "n": {"z": torch.tensor(i), "t": f"t{i}"}}
            for i in range(n)]  # fmt: skip


class TestCollate:
    @pytest.mark.parametrize("pack", [True, False])
    def test_everything_a_dict_takes(self, pack: bool) -> None:
        samples = plain_samples()
        before = copy.deepcopy(samples)
        d = collate(samples, pack=pack)
        d._check()
        assert d.is_packed == pack and list(d) == list(samples[0]) and type(d["n"]) is DeviceDict
        assert d["x"].tolist() == [[float(i)] * 3 for i in range(4)] and d["x"].dtype == torch.float32
        assert (
            d["y"].tolist() == [0, 1, 2, 3]
            and d["f"].tolist() == [0.0, 0.5, 1.0, 1.5]
            and d["f"].dtype == torch.float32
        )
        assert d["flag"].dtype == torch.bool and d["c"].dtype == torch.complex64 and d["a"].dtype == torch.int16
        assert (
            d["a"].shape == (4, 2, 2)
            and d["scalar"].dtype == torch.float64
            and d["list"].tolist() == [[i, i + 1] for i in range(4)]
        )
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

    @given(st.data())
    def test_any_tensors(self, data: st.DataObject) -> None:
        dtypes = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool, torch.uint8])
        shapes = st.lists(st.integers(0, 3), max_size=3)
        fields = data.draw(st.lists(st.tuples(dtypes, shapes, st.booleans()), max_size=8))
        n = data.draw(st.integers(1, 5))

        def field(dtype: torch.dtype, shape: list[int], turned: bool) -> Tensor:
            t = torch.randint(0, 2, shape).to(dtype)
            return t.transpose(0, 1) if turned and t.dim() > 1 else t

        samples = [{f"k{i}": field(*spec) for i, spec in enumerate(fields)} for _ in range(n)]
        d = collate(samples)
        d._check()
        assert d.is_packed == any(0 not in shape for _, shape, _ in fields)
        assert all(torch.equal(d[key], torch.stack([s[key] for s in samples])) for key in samples[0])

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
        assert half["x"].dtype == half["a"].dtype == torch.float16

    def test_an_encoder_of_several_tensors(self) -> None:
        class Tokens:
            def encode(self, strings: Any) -> dict[str, Tensor]:
                ids = torch.tensor([[len(s), 1] for s in strings])
                return {"ids": ids, "mask": ids > 0}

            def decode(self, codes: Any) -> list[str]:
                return ["?" * n for n in codes["ids"][..., 0].tolist()]

        d = collate([{"t": "a", "x": 1}, {"t": "bcd", "x": 2}], encoders={"t": Tokens()})
        d._check()
        assert d.is_packed and d["t", "ids"].tolist() == [[1, 1], [3, 1]] and d.decode("t") == ["?", "???"]

    def test_padding(self) -> None:
        samples = [{"ids": torch.arange(n), "n": {"ids": [1.0] * n}, "x": n} for n in (3, 1, 2)]
        d = collate(samples, pad={"ids": -1})
        d._check()
        assert d.is_packed and d["ids"].tolist() == [[0, 1, 2], [0, -1, -1], [0, 1, -1]]
        assert d["n", "ids"].tolist() == [[1, 1, 1], [1, -1, -1], [1, 1, -1]]
        by_path = collate([{"n": {"ids": s["ids"]}} for s in samples], pad={("n", "ids"): 9})
        assert by_path["n", "ids"][1].tolist() == [0, 9, 9]
        assert collate([{"ids": torch.arange(2)}] * 2, pad={"ids": 0})["ids"].tolist() == [[0, 1], [0, 1]]
        two = collate([{"e": torch.ones(n, 2)} for n in (1, 2)], pad={"e": 0})
        assert two["e"].tolist() == [[[1, 1], [0, 0]], [[1, 1], [1, 1]]]

    @pytest.mark.parametrize("wrap", [dict, DeviceDict])
    @pytest.mark.parametrize(
        ("samples", "error", "message"),
        [
            ([{"x": torch.ones(2)}, {"x": torch.ones(3)}], ValueError,
             "'x': sample 1 has float32[3], sample 0 has float32[2]; to fill the shorter ones up, give pad={'x': 0}"),
            ([{"x": torch.ones(2)}, {"x": torch.ones(2)}, {"x": torch.ones(2).long()}], ValueError,
             "'x': sample 2 has int64[2], sample 0 has float32[2]$"),
            ([{"x": torch.ones(2), "y": 1.5}, {"x": torch.ones(2).half(), "y": 1.5}], ValueError,
             "'x': sample 1 has float16[2], sample 0 has float32[2]$"),
            ([{"n": {"x": torch.ones(2, 2)}}, {"n": {"x": torch.ones(2, 3)}}], ValueError,
             "'n.x': sample 1 has float32[2, 3], sample 0 has float32[2, 2]"),
            ([{"x": 1, "y": 2}, {"x": 1}], ValueError, "sample 1 lacks 'y', which sample 0 has"),
            ([{"x": 1}, {"x": 1, "y": 2}], ValueError, "sample 1 has 'y', which sample 0 lacks"),
            ([{"n": {"x": 1}}, {"n": {}}], ValueError, "sample 1 lacks 'n.x', which sample 0 has"),
            ([{"x": [1, 2]}, {"x": [1]}], ValueError, "'x': sample 1 has int64[1], sample 0 has int64[2]"),
            ([{"x": {"y": 1}}, {"x": 1}], ValueError, "'x': sample 1 has"),
        ],
    )  # fmt: skip
    def test_samples_that_disagree(self, wrap: Any, samples: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error) as caught:
            collate([wrap(s) for s in samples])
        assert message in f"{caught.value}$"  # so that a message can name the end

    @pytest.mark.parametrize(
        ("samples", "error", "message"),
        [
            ([], ValueError, "collate takes a list of at least one sample, got an empty list"), ({"x": 1}, TypeError, "collate takes a list of samples, got a mapping; for one sample write [sample]"),
            ([{"x": 1}, (1, 2)], TypeError, "collate takes samples that are mappings, sample 1 is a tuple; torch's default_collate"),
            ([{"x": 1}, {"x": None}], TypeError, "sample 1: 'x' is NoneType, expected a tensor"),
            ([{"x": "a"}, {"x": 3}], ValueError, "'x': sample 1 has a int, sample 0 has a str"),
            ([{"x": np.zeros(2)}, {"x": np.zeros(3)}], ValueError, "'x': sample 1 has float64[3], sample 0 has float64[2]"),
            ([{"x": np.zeros(2)}, {"x": np.zeros(2, dtype=np.int64)}], ValueError, "'x': sample 1 has int64[2], sample 0 has float64[2]"),
            ([{"x": torch.ones(1)}, {"x": torch.ones(1, device="meta")}], DeviceMismatchError, "'x' is on meta"),
            ([{"x": torch.ones(1), "y": torch.ones(1, device="meta")}], DeviceMismatchError, "'y' is on meta"),
        ],
    )  # fmt: skip
    def test_samples_that_are_none(self, samples: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error) as caught:
            collate(samples)
        assert message in str(caught.value)

    @pytest.mark.parametrize(
        ("samples", "error", "message"),
        [
            ([{"x": np.ma.array([1.0, 2.0], mask=[0, 1])}] * 2, TypeError, "sample 0: 'x' is a masked array"),
            ([{1: 2.0}, {1: 3.0}], TypeError, "keys are str, got 1"),
            ([{1: 2.0, "a": 1}, {"b": 3.0}], ValueError, "sample 1 lacks"),
            ([{"x": np.int64(1)}, {"x": np.float32(0.1)}], ValueError, "'x': sample 1 has float32[], sample 0 has int64[]"),
            ([{"x": np.str_("a")}, {"x": np.float64(1)}], ValueError, "'x': sample 1 has a float64, sample 0 has a str_"),
            ([{"x": "a"}, {"x": 1}], ValueError, "'x': sample 1 has a int, sample 0 has a str"),
        ],
    )  # fmt: skip
    def test_what_a_dict_would_not_take_either(self, samples: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error) as caught:
            collate(samples)
        assert message in str(caught.value)

    def test_arguments_that_do_not_fit(self) -> None:
        samples = [{"x": [1]}, {"x": [1, 2]}]
        for arguments, expected in (
            ({"pad": 5}, "a mapping from keys to fill values as pad="),
            ({"cls": dict}, "a DeviceDict class as cls="),
        ):
            with pytest.raises(TypeError, match=f"^collate takes {expected}"):
                collate(samples, **arguments)
        for fill in (1.5, 1 << 70, float("nan")):
            with pytest.raises(ValueError, match=r"'x': pad={'x': .*} does not fit torch.int64"):
                collate(samples, pad={"x": fill})

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
        assert (
            type(d) is Batch
            and d._policy.objects == "keep"
            and type(d["n"]) is type(Batch(sample)["n"]) is DeviceDict
            and d.decode(("n", "s")) == ["a", "a"]
        )
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
        late = collate([{"x": torch.zeros(2), "y": 1.0}, {"x": w, "y": 2.0}])
        late["x"].sum().backward()
        assert w.grad is not None and w.grad.tolist() == [1, 1]
        assert collate([{"x": torch.eye(2).to_sparse()}] * 2)["x"].is_sparse

    def test_on_a_device(self, device: torch.device) -> None:
        samples = [{"x": torch.full((2,), float(i), device=device), "y": i} for i in range(3)]
        d = collate(samples)
        d._check()
        assert d.device == device and d["y"].cpu().tolist() == [0, 1, 2] and d["x"].cpu().sum() == 6

    def test_default_collate_takes_the_same_path(self) -> None:
        samples = [Batch({"x": torch.full((2,), float(i)), "s": "abc"[i], "o": None}) for i in range(3)]
        before = [copy.copy(s) for s in samples]
        d = default_collate(samples)
        assert (
            type(d) is Batch
            and d.is_packed
            and d["o"] == [None] * 3
            and d.decode("s") == ["a", "b", "c"]
            and samples == before
        )
        pairs = default_collate([(s, i) for i, s in enumerate(samples)])
        assert type(pairs[0]) is Batch and pairs[1].tolist() == [0, 1, 2]


class Samples(Dataset[dict[str, Any]]):
    def __init__(self, wrap: Any = dict, bad: int = -1) -> None:
        self.wrap, self.bad = wrap, bad

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return self.wrap(
            {"x": torch.full((3 + (index == self.bad),), float(index)), "name": "n" * index, "n": {"i": index}}
        )


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(Samples()[i] for i in range(12))


class OfItsClass(DeviceDict, encoders=lambda strings: torch.zeros(len(strings))):
    """It is found by name, and its encoder with it."""


class CountsPickles:
    code_ndim = 0

    def __init__(self) -> None:
        self.pickled = 0

    def encode(self, strings: Any) -> Tensor:
        return torch.zeros(len(strings))

    def decode(self, codes: Any) -> list[str]:
        return [""] * len(codes)

    def __reduce__(self) -> Any:
        self.pickled += 1
        return type(self), ()


class TestLoader:
    def check(self, loader: DataLoader[Any], workers: int, order: Any = range(12)) -> None:
        for _ in range(2):
            batches = list(loader)
            for d in batches:
                d._check()
                assert type(d) is DeviceDict and d.is_packed and (not workers or d["x"].is_shared())
            assert torch.cat([d["n", "i"] for d in batches]).tolist() == list(order)
            assert [name for d in batches for name in d.decode("name")] == ["n" * i for i in order]

    @pytest.mark.parametrize("wrap", [dict, DeviceDict])
    @pytest.mark.parametrize("workers", [0, 2])
    def test_in_the_process_and_in_workers(self, workers: int, wrap: Any) -> None:
        self.check(DataLoader(Samples(wrap), batch_size=4, num_workers=workers, collate_fn=collate), workers)

    def test_with_no_argument_at_all(self) -> None:
        self.check(DataLoader(Samples(DeviceDict), batch_size=4, num_workers=1), 1)

    @pytest.mark.parametrize("context", ["fork", "spawn"])
    def test_persistent_workers_and_a_partial(self, context: str) -> None:
        loader = DataLoader(Samples(), batch_size=5, num_workers=1, collate_fn=partial(collate, encoders={"name": Utf8(12)}),
                            multiprocessing_context=context, persistent_workers=True)  # fmt: skip
        self.check(loader, 1)

    @pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
    def test_sharing_strategies(self, strategy: str) -> None:
        before = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy(strategy)
        try:
            self.check(DataLoader(Samples(), batch_size=4, num_workers=1, collate_fn=collate), 1)
        finally:
            torch.multiprocessing.set_sharing_strategy(before)

    def test_an_iterable_dataset(self) -> None:
        self.check(DataLoader(Stream(), batch_size=4, num_workers=1, collate_fn=collate), 1)

    def test_an_error_in_a_worker_keeps_its_message(self) -> None:
        with pytest.raises(ValueError, match=r"'x': sample 1 has float32\[4\], sample 0 has float32\[3\]; to fill"):
            list(DataLoader(Samples(bad=5), batch_size=4, num_workers=1, collate_fn=collate))

    @pytest.mark.parametrize("encoders", [{"name": lambda strings: torch.zeros(len(strings))}, lambda strings: torch.zeros(len(strings))], ids=["key", "all"])  # fmt: skip
    def test_an_encoder_that_cannot_leave_a_worker_is_named(self, encoders: Any) -> None:
        made = partial(collate, encoders=encoders)
        assert made([Samples()[0]])["name"].tolist() == [0], "in the main process it may"
        loader = DataLoader(Samples(), batch_size=4, num_workers=1, collate_fn=made, multiprocessing_context="fork")
        with pytest.raises(
            TypeError,
            match="'name': the encoder <lambda> cannot be pickled, so the dict cannot be sent to another process",
        ):
            list(loader)
        with pytest.raises(TypeError, match=r"^the default encoder <lambda> cannot be pickled"):
            refuse_unsendable(DeviceDict({"x": 1}, encoders=lambda strings: torch.zeros(len(strings))))

    def test_encoders_that_leave_a_worker(self) -> None:
        found = CountsPickles()
        nested = {"a": "x", "n": {"b": "y", "a": "z"}}
        for _ in range(2):
            refuse_unsendable(collate([nested], encoders={"a": found, "b": found}))
        assert found.pickled == 1, "in this process, once"
        refuse_unsendable(collate([{"x": 1.0}], cls=OfItsClass))

        class Local(CountsPickles):
            pass

        with pytest.raises(TypeError, match=r"^'\*': the encoder .* cannot be pickled"):
            refuse_unsendable(collate([{"n": {"*": "x"}}], encoders={"*": Local()}))

    def test_a_batch_is_one_file_descriptor(self) -> None:
        loader = DataLoader(Samples(), batch_size=1, num_workers=1, collate_fn=collate)
        held = []
        before = len(os.listdir("/dev/fd"))
        for d in loader:
            held.append(d)
        assert len(os.listdir("/dev/fd")) - before <= len(held) + 4

    def test_pinning_is_one_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[Tensor] = []
        monkeypatch.setattr(Tensor, "pin_memory", lambda self, device=None: calls.append(self) or self.clone())
        pinned = collate([Samples()[i] for i in range(3)]).pin_memory()
        assert len(calls) == 1 and pinned.is_packed and pinned["n", "i"].tolist() == [0, 1, 2]

    def test_it_is_picklable(self) -> None:
        assert pickle.loads(pickle.dumps(partial(collate, pad={"x": 0})))([{"x": [1]}, {"x": [1, 2]}])["x"].shape == (
            2,
            2,
        )
