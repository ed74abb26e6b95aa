"""Rows: reading, writing, splitting and iterating over the first dimension."""

from __future__ import annotations

import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
from batches import Batch, batch
from checks import check_invariants, fails
from files import DTYPES

from tensordict_lite import DeviceDict, DeviceMismatchError, StringEncoder, Utf8, Vocabulary, cat, collate


def inference_tensor(size: int = 2) -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(size)


class Characters(StringEncoder):
    """As `Tokenizer`, a nested dict with one dimension for a string."""

    code_ndim = 1

    def encode(self, strings: Any, /) -> Any:
        return {"input_ids": torch.tensor([[ord(character) for character in string] for string in strings])}


class TestRows:
    def test_one_row_is_a_view(self) -> None:
        d = batch()
        row = d.rows[2]
        check_invariants(row)
        assert type(row) is Batch and type(row["n"]) is Batch and row["x"].tolist() == [4.0, 5.0]
        assert row["n", "id"] == 2
        assert row.decode("s") == "c" and row.decode("name") == "n2" and row.decode(("n", "file")) == "f2f2f2"
        row["x"].zero_()
        assert not d["x"][2].any() and d.rows[-1]["n", "id"] == 5 and d.rows[np.int64(1)]["n", "id"] == 1
        assert d.rows[torch.tensor(1)]["n", "id"] == 1 and len(d) == 6 and len(d.rows) == 6
        assert d.rows[5]["o"] == {1} and d.rows[0]["o"] is None and row["meta"] is object

    def test_a_slice_is_a_view(self) -> None:
        d = batch()
        part = d.rows[1:5:2]
        check_invariants(part)
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
        check_invariants(taken)
        assert taken["n", "id"].tolist() == [0, 3, 5] and taken["o"] == [None, None, {1}]
        assert taken.decode("name") == ["n0", "n3", "n5"]
        taken["x"].zero_()
        assert d["x"][3].any() and len(d.rows[[]].rows) == 0

    def test_huge_rows(self) -> None:
        """Buffers above 32 MiB are allocated in another way."""
        image = torch.arange(64 << 10, dtype=torch.int32).reshape(64, 1024).repeat(1, 160)
        d = DeviceDict({"image": image, "label": torch.arange(64), "u": image.view(torch.uint32)})
        index = torch.arange(63, -1, -1)
        for one in (d.rows[index], d.rows[index].pack(), d.pack().clone()):
            check_invariants(one)
            assert len(one.rows) == 64 and one["image"].data_ptr() % 64 == 0
            same = torch.arange(64) if one["label"][0] == 0 else index
            assert torch.equal(one["image"], image[same]) and torch.equal(one["u"].view(torch.int32), image[same])
        shared = d.rows[index].pack().share_memory_()
        assert shared.is_packed and shared["image"].is_shared() and torch.equal(shared["image"], image[index])
        assert pickle.loads(pickle.dumps(shared)) == shared

    @pytest.mark.parametrize(("index", "error", "message"), [
        (6, IndexError, "row 6 is out of range, there are 6"),
        (-7, IndexError, "row -7 is out of range"),
        ([9], IndexError, "out of"),
        (True, TypeError, "got one bool"),
        (np.bool_(True), TypeError, "got one bool"),
        ((1, 2), TypeError,
         "rows are indexed by int, slice, mask or indices (a tensor, array or list), got tuple; "
         "use d[key] for a field"),
        ("x", TypeError,
         "rows are indexed by int, slice, mask or indices (a tensor, array or list), got str; use d[key] for a field"),
        (None, TypeError, "got NoneType"),
        (1.5, TypeError, "got float"),
        (torch.tensor([1.0]), TypeError, "got float32[1]"),
        (torch.zeros(2, 2).long(), TypeError, "got int64[2, 2]"),
        (["a"], TypeError, "a list of ints"),
        ([[1], [2, 3]], TypeError, "a list of ints"),
        ([True], IndexError, "a mask for 6 rows has the shape [6], got [1]"),
        (torch.tensor([1, 0, 0, 1, 0, 1], dtype=torch.uint8), TypeError,
         "an index of dtype uint8[6] may be a mask or row numbers; use .bool() for a mask, "
         "and .long() for row numbers"),
        (np.array([1, 0], dtype=np.uint8), TypeError, "an index of dtype uint8[2] may be a mask or row numbers"),
    ])  # fmt: skip
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
        with pytest.raises(
            ValueError, match=r"\[2\], 'n.s' \[\]; 'n.s' has one value for all rows: drop it first, or .*$"
        ):
            use(DeviceDict({"x": torch.ones(2), "n": {"s": 1.0}}).rows)
        with pytest.raises(ValueError, match=r"has 'x' \[\], 'y' \[\]; collate\(\[row\]\) makes a batch$"):
            use(DeviceDict({"x": 1, "y": 2}).rows)
        fails(ValueError, r"has no tensors$", lambda: use(DeviceDict().rows))

    @pytest.mark.parametrize("n", [0, 1, 64, 130])
    def test_iterating_is_indexing(self, n: int) -> None:
        d = DeviceDict(
            {"x": torch.arange(n), "y": torch.rand(n, 3)}, encoders={"x": Vocabulary(map(str, range(n or 1)))}
        )
        rows = list(d.rows)
        assert len(rows) == n and all(row == d.rows[i] and row._policy is d._policy for i, row in enumerate(rows))
        for row in rows:
            check_invariants(row)
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

    def test_rows_that_overlap_are_copied_first(self) -> None:
        d = DeviceDict({"x": torch.arange(4.0), "y": torch.arange(4.0)})
        d.rows[0:3] = d.rows[1:4]
        assert d["x"].tolist() == d["y"].tolist() == [1, 2, 3, 3]
        d.rows[:] = {"x": d["y"] * 0, "y": d["x"]}
        assert d["x"].tolist() == [0] * 4 and d["y"].tolist() == [1, 2, 3, 3]

    @pytest.mark.parametrize("index", [0, slice(0, 1), [0]], ids=["a row", "a slice", "indices"])
    def test_a_refused_leaf_leaves_no_history_in_other_fields(self, index: Any) -> None:
        """The rows of the field before the leaf had been written and restored, but their gradient went to the value."""
        x, leaf, value = (torch.zeros(3, requires_grad=True) for _ in range(3))
        d = DeviceDict({"plain": torch.zeros(3), "made": x * 2, "leaf": leaf})
        with pytest.raises(RuntimeError, match=r"^'leaf': .* leaf"):
            d.rows[index] = {"plain": value[index], "made": value[index], "leaf": torch.ones(3)[index]}
        assert not d["plain"].requires_grad
        d["made"].sum().backward()
        assert x.grad is not None and x.grad.tolist() == [2, 2, 2] and value.grad is None

    def test_an_index_needs_no_default_device(self) -> None:
        d = DeviceDict({"x": [1, 2, 3]})
        torch.set_default_device("sim:0")
        try:
            assert sorted(d.rows.shuffle()["x"].tolist()) == [1, 2, 3] and d.rows[[0, 2]]["x"].tolist() == [1, 3]
        finally:
            torch.set_default_device(None)

    @pytest.mark.parametrize(("other", "error", "message"), [
        ({"x": torch.ones(2)}, ValueError, "the given mapping lacks 'n', which this DeviceDict has"),
        ({"x": torch.ones(2), "n": {"y": 1, "z": 2}}, ValueError,
         "the given mapping has 'n.z', which this DeviceDict lacks"),
        ({"x": torch.ones(3), "n": {"y": 1}}, ValueError, "'x': expected [2] for these rows, got [3]"),
        ({"x": torch.ones(2), "n": {"y": [1, 2]}}, ValueError, "'n.y': expected [] for these rows, got [2]"),
        ({"x": torch.ones(2), "n": 1}, ValueError, "'n': expected a nested dict, got an int"),
        ({"x": torch.ones(2, device="meta"), "n": {"y": 1}}, DeviceMismatchError, "'x' is on meta"),
        ([1], TypeError, "rows are set from a mapping with the keys of the dict, got list"),
    ])  # fmt: skip
    def test_what_cannot_be_set_leaves_the_dict_as_it_was(
        self, other: Any, error: type[Exception], message: str
    ) -> None:
        d = DeviceDict({"x": torch.zeros(4, 2), "n": {"y": torch.zeros(4).long()}})
        with pytest.raises(error) as caught:
            d.rows[1] = other
        assert message in str(caught.value) and not d["x"].any() and not d["n", "y"].any()

    @pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
    @pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
    def test_every_dtype_can_be_set(self, dtype: torch.dtype) -> None:
        data = torch.arange(5 * 3 * dtype.itemsize).to(torch.uint8).remainder(2)
        d = DeviceDict({"x": data.view(dtype).reshape(5, 3), "y": data.view(dtype)[:5].clone()})
        for index in (
            1,
            slice(1, 4, 2),
            [4, 0],
            [-1, -3],
            [True, False, False, True, False],
            np.array([2], dtype=np.int8),
        ):
            part, target = d.rows[index].clone(), d.new_zeros()
            before = target.clone()
            target.rows[index] = part
            for key in ("x", "y"):
                got, old = (t.reshape(5, -1).view(torch.uint8) for t in (target[key], before[key]))
                at = torch.arange(5)[index if not isinstance(index, list) else torch.tensor(index)]
                assert torch.equal(got[at].reshape(-1), part[key].reshape(-1).view(torch.uint8))
                rest = [i for i in range(5) if i not in at.reshape(-1).tolist()]
                assert torch.equal(got[rest], old[rest])

    def test_values_that_share_memory_are_copied_first(self) -> None:
        """Storages may share memory without being one storage, and an index may be a field of the dict."""
        array = np.arange(6.0)
        d = DeviceDict({"x": torch.from_numpy(array)[:4], "y": torch.arange(4.0)})
        d.rows[1:4] = {"x": torch.from_numpy(array[:3]), "y": d["y"][:3]}
        assert d["x"].tolist() == [0, 0, 1, 2] == d["y"].tolist()
        swapped = DeviceDict({"a": torch.zeros(3), "b": torch.ones(3)}).pack()
        swapped.rows[0] = {"a": swapped["b"][0], "b": swapped["a"][0]}
        assert (swapped["a"][0], swapped["b"][0]) == (1, 0) and swapped.is_packed
        d = DeviceDict({"i": [2, 0, 1], "x": [0, 0, 0]})
        d.rows[d["i"]] = {"i": [5, 6, 7], "x": [1, 2, 3]}
        assert d["i"].tolist() == [6, 7, 5] and d["x"].tolist() == [2, 3, 1]
        d = DeviceDict({"i": torch.arange(4), "j": torch.arange(4)})
        d.rows[0:2] = {"i": d["j"][2:4], "j": d["i"][0:2]}  # the value of j is in the rows of i
        assert d["i"].tolist() == [2, 3, 2, 3] and d["j"].tolist() == [0, 1, 2, 3]

    def test_kept_objects_are_set(self) -> None:
        d = batch()
        d.rows[0] = {**batch().rows[1], "o": {2}}
        assert d["o"][:2] == [{2}, None] and d["n", "id"].tolist()[0] == 1 and d.decode("name")[0] == "n1"
        d.rows[[0, -1]] = {**batch().rows[[1, 2]], "o": [7, [8]]}
        assert d["o"] == [7, None, None, None, None, [8]], "objects as they are, numbers too"
        d.rows[1:3] = d.rows[0:1].rows[[0, 0]]
        assert d["o"][:3] == [7, 7, 7]
        with pytest.raises(ValueError, match=r"^'o': expected a list of 2 objects for these rows, got \[1\]$"):
            d.rows[0:2] = {**d.rows[0:2], "o": [1]}

    @pytest.mark.parametrize(("change", "error", "message"), [
        ({"meta": 1}, ValueError,
         "'meta': expected the kept value of all rows, <class 'object'>, got 1; rows cannot change it, so "
         "replace the whole field"),
        ({"o": [torch.ones(1, device="meta")]}, DeviceMismatchError,
         "'o' is on meta, this DeviceDict is on cpu; move it with .to('cpu'), or build with " 'on_mismatch="move"'),
    ])  # fmt: skip
    def test_what_a_kept_list_refuses(self, change: Any, error: type[Exception], message: str) -> None:
        d = batch()
        with pytest.raises(error) as caught:
            d.rows[0] = {**d.rows[0], **change}
        assert str(caught.value) == message

    def test_autograd_sees_what_is_set(self) -> None:
        w = torch.ones(2, requires_grad=True)
        d = DeviceDict({"x": torch.zeros(3, 2), "y": torch.zeros(3)})
        d.rows[1] = {"x": w * 2, "y": w.sum()}
        (d["x"].sum() + d["y"].sum()).backward()
        assert w.grad is not None and w.grad.tolist() == [3, 3]
        for row in DeviceDict({"x": torch.zeros(3, 2)}).rows:
            row["x"].copy_(w)
            assert row["x"].requires_grad
        saved = torch.ones(3, requires_grad=True)
        d = DeviceDict({"x": torch.ones(3), "y": torch.ones(3)}).pack()
        product = saved * d["x"]
        d.rows[0] = {"x": 5.0, "y": 5.0}
        fails(RuntimeError, "modified by an inplace operation", lambda: product.sum().backward())

    @pytest.mark.parametrize("index", [0, slice(0, 1), [0]], ids=repr)
    @pytest.mark.parametrize(("make", "message"), [
        (lambda: torch.zeros(2, requires_grad=True), "^'w': .* leaf"),
        (inference_tensor,
         r"^'w' is an inference tensor; clone\(\) it before rows\[\.\.\.\] =, or use torch.inference_mode\(\)$"),
        (lambda: torch.zeros(1).expand(2),
         r"^'w' is expanded: its elements share memory; clone\(\) it before rows\[\.\.\.\] =$"),
    ], ids=["a leaf", "an inference tensor", "an expanded tensor"])  # fmt: skip
    def test_what_cannot_be_written_leaves_the_dict_as_it_was(self, index: Any, make: Any, message: str) -> None:
        d = DeviceDict({"x": torch.zeros(2), "w": make(), "y": torch.zeros(2)})
        with pytest.raises(RuntimeError, match=message):
            d.rows[index] = {"x": [1.0], "w": [1.0], "y": [1.0]} if index != 0 else {"x": 1.0, "w": 1.0, "y": 1.0}
        assert not d["x"].any() and not d["y"].any()

    def test_split_in_sizes(self) -> None:
        d = DeviceDict({"x": torch.arange(6)})
        parts = d.rows.split([1, 0, 5])
        assert [part["x"].tolist() for part in parts] == [[0], [], [1, 2, 3, 4, 5]]
        parts[2]["x"].zero_()
        assert not d["x"].any(), "views"
        assert len(d.rows.split(np.array([2, 4]))) == 2 and len(d.rows.split([torch.tensor(6, dtype=torch.uint8)])) == 1  # pyright: ignore[reportArgumentType]
        wide = DeviceDict({"x": torch.arange(300)})
        assert [len(part.rows) for part in wide.rows.split([np.uint8(200), np.uint8(100)])] == [200, 100]  # pyright: ignore[reportArgumentType]
        with pytest.raises(TypeError, match=r"^shuffle takes a torch\.Generator, got int$"):
            d.rows.shuffle(0)  # pyright: ignore[reportArgumentType]

    @pytest.mark.parametrize("wrong", ["6", [1.0, 5.0], None], ids=repr)
    def test_what_is_no_list_of_sizes(self, wrong: Any) -> None:
        with pytest.raises(TypeError, match="split takes a size or a list of sizes, got "):
            DeviceDict({"x": torch.arange(6)}).rows.split(wrong)

    @pytest.mark.parametrize("sizes", [[1, 2], [7, -1], []], ids=repr)
    def test_sizes_that_do_not_add_up(self, sizes: list[int]) -> None:
        with pytest.raises(ValueError, match=re.escape(f"split takes sizes that add up to the 6 rows, got {sizes}")):
            DeviceDict({"x": torch.arange(6)}).rows.split(sizes)

    def test_split_and_shuffle(self, device: torch.device) -> None:
        d = batch().drop("o", "meta").to(device)
        parts = d.rows.split(4)
        assert [len(part.rows) for part in parts] == [4, 2] and cat(parts) == d
        assert parts[1]["n", "id"].tolist() == [4, 5]
        shuffled = d.rows.shuffle(torch.Generator().manual_seed(1))
        assert shuffled == d.rows.shuffle(torch.Generator().manual_seed(1)) and shuffled.device == device
        assert sorted(shuffled["n", "id"].tolist()) == list(range(6))
        assert sorted(d.rows.shuffle()["n", "id"].tolist()) == list(range(6))
        fails(ValueError, "a size of at least 1, got 0", lambda: d.rows.split(0))
        assert repr(d.rows).startswith("Batch.rows(6): the first 5\n")

    def test_rows_of_a_packed_dict_write_into_it(self) -> None:
        packed = DeviceDict({"x": torch.zeros(4, 2), "y": torch.zeros(4)}).pack()
        packed.rows[1:3]["x"].fill_(1)
        packed.rows[0] = {"x": 2.0, "y": 3.0}
        assert packed.is_packed and packed["x"].tolist() == [[2, 2], [1, 1], [1, 1], [0, 0]]

    @pytest.mark.parametrize(("data", "key"), [
        ({"input_ids": [3, 2], "name": "nl"}, "name"),
        ({"name": "nl"}, "name"),
        ({"x": [1, 2], "n": {"name": "nl"}}, "n.name"),
        ({"x": [1, 2], "text": "nl"}, "text"),
        ({"x": [1, 2], "n": {"text": "nl"}}, "n.text"),
    ])  # fmt: skip
    def test_one_string_is_no_batch_of_characters(self, data: Any, key: str) -> None:
        """The first row of ``{"input_ids": [3, 2], "name": "nl"}`` decoded to "n"."""
        d = DeviceDict(data, encoders={"text": Characters()})
        message = rf"^'{key}': expected a string for each row, got one string; collate\(\[row\]\) makes a batch$"
        for use in (len, lambda rows: rows[:1], lambda rows: rows[[0]], list, lambda rows: rows.__setitem__(0, data)):
            with pytest.raises(ValueError, match=message):
                use(d.rows)
        assert len(collate([d, d]).rows) == 2

    def test_numbers_under_the_key_of_strings_have_rows(self) -> None:
        assert len(DeviceDict({"name": torch.ones(2)}, encoders={"name": Utf8()}).rows) == 2


class TestEveryKindOfIndex:
    """For each dtype and shape of a field, and after a field was added or removed."""

    DTYPES = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 3), (5, 2, 3)])
    def test_every_kernel_refuses_numbers_that_are_no_rows(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        value = torch.arange(5).reshape(5, *[1] * (len(shape) - 1)).expand(shape).to(dtype)
        for field in (value, value.clone()):
            d = DeviceDict({"x": field})
            for wrong in ([5], [0, 5], [-6], [*range(5)] * 60 + [7]):
                with pytest.raises(IndexError, match=r"row -?\d is out of range, there are 5"):
                    d.rows[torch.tensor(wrong)]
                with pytest.raises(IndexError, match=r"row -?\d is out of range, there are 5"):
                    d.rows.__getitems__(wrong)
            assert torch.equal(d.rows[torch.tensor([-1, 0])]["x"], value[[4, 0]])

    @pytest.mark.parametrize("field", [torch.zeros(3, 0), torch.zeros(0), torch.zeros(0, 2)])
    def test_fields_without_elements(self, field: torch.Tensor) -> None:
        d = DeviceDict({"x": field})
        fails(IndexError, f"row 3 is out of range, there are {len(field)}", lambda: d.rows[torch.tensor([3])])
        assert d.rows[torch.tensor([], dtype=torch.int64)]["x"].shape == (0, *field.shape[1:])
        with pytest.raises(IndexError, match=r"row 3 is out of range, there are 3"):
            DeviceDict({"x": torch.zeros(3, 0), "y": torch.zeros(3)}).rows[torch.tensor([3])]

    def test_a_field_that_changes_in_place_between_two_calls(self) -> None:
        d = DeviceDict({"x": torch.arange(4.0), "y": torch.arange(8).reshape(4, 2)})
        index = torch.tensor([3, 0])
        assert d.rows[index]["x"].tolist() == [3.0, 0.0]
        d["x"].resize_(3)
        fails(ValueError, r"rows need fields that agree .* 'x' \[3\], 'y' \[4, 2\]", lambda: d.rows[index])
        with pytest.raises(ValueError, match=r"rows need fields that agree"):
            d.rows[index] = {"x": [1.0, 2.0], "y": [[1, 2], [3, 4]]}
        d["x"].set_(torch.arange(4.0) + 1)  # pyright: ignore[reportArgumentType]
        assert d.rows[index]["x"].tolist() == [4.0, 1.0]
        d["x"].data = torch.arange(4).double() * 2
        assert d.rows[index]["x"].tolist() == [6.0, 0.0] and d.rows[index]["x"].dtype == torch.float64
        d["x"].data = torch.arange(4).to(torch.uint16)
        assert d.rows[index]["x"].tolist() == [3, 0]
        d["z"] = torch.zeros(4, requires_grad=True)
        del d["y"]
        part = d.rows[index]
        assert list(part) == ["x", "z"] and part["z"].requires_grad
        d["n"] = {"q": torch.zeros(3)}
        fails(ValueError, r"rows need fields that agree", lambda: d.rows[index])

    def test_lists_are_what_numpy_reads(self) -> None:
        d = DeviceDict({"x": torch.arange(2)})
        assert d.rows[[1, True, -1]]["x"].tolist() == [1, 1, 1] and d.rows[[True, False]]["x"].tolist() == [0]
        assert d.rows[[1, np.int32(0)]]["x"].tolist() == [1, 0] and d.rows[[]]["x"].tolist() == []

    @pytest.mark.parametrize("index", [[1, 0.5], [1, None], [1, "a"], [1, [0]], [1, 1 << 80]], ids=repr)
    def test_lists_that_are_no_index(self, index: Any) -> None:
        with pytest.raises(TypeError, match="rows are indexed by a mask or by a list of ints"):
            DeviceDict({"x": torch.arange(2)}).rows[index]

    @pytest.mark.parametrize("width", [(), (3,), (40, 40)])
    @pytest.mark.parametrize("dtype", [*DTYPES, torch.uint16, torch.float64])
    def test_written_rows_are_those_of_a_loop(self, dtype: torch.dtype, width: tuple[int, ...]) -> None:
        index = torch.tensor([3, 0, 3, 2])  # the last value of a row stays
        values = torch.arange(1, 5).reshape(4, *[1] * len(width)).expand(4, *width).to(dtype)
        d = DeviceDict({"x": torch.zeros(5, *width).to(dtype)})
        version = d["x"]._version
        d.rows[index] = {"x": values}
        first = d["x"].flatten(1)[:, 0] if width else d["x"]
        assert first.tolist() == torch.tensor([2, 0, 4, 3, 0]).to(dtype).tolist()
        assert d["x"]._version > version
        for at in (1, slice(1, 3), slice(0, 4, 2)):
            expected = d["x"].clone()
            value = torch.ones(5, *width).to(dtype)[at]
            expected[at] = value
            d.rows[at] = {"x": value}
            assert d["x"].tolist() == expected.tolist()

    @pytest.mark.parametrize("index", [slice(0, 2), [0, 1]], ids=repr)
    def test_nothing_is_written_before_a_sparse_value(self, index: Any) -> None:
        d = DeviceDict({"x": torch.zeros(4, 2), "y": torch.zeros(4, 2)})
        with pytest.raises(ValueError, match=r"^'y': expected a dense tensor, got a sparse one; convert it first$"):
            d.rows[index] = {"x": torch.ones(2, 2), "y": torch.ones(2, 2).to_sparse()}
        assert not d["x"].any()


class Folded:
    """Decodes the codes of upper and lower case letters alike."""

    code_ndim = 0

    def encode(self, strings: Any) -> torch.Tensor:
        return torch.tensor([ord(string) for string in strings])

    def decode(self, codes: torch.Tensor) -> list[str]:
        return [chr(code).lower() for code in codes.tolist()]


class TestGroups:
    def test_codes_that_decode_alike_are_one_group(self) -> None:
        d = DeviceDict({"s": ["b", "A", "a", "B", "a"], "i": [0, 1, 2, 3, 4]}, encoders={"s": Folded()})
        assert {key: part["i"].tolist() for key, part in d.rows.group_by("s").items()} == {"a": [1, 2, 4], "b": [0, 3]}

    @pytest.mark.parametrize("encoder", [None, Vocabulary(["a", "b"]), Folded()])
    def test_no_rows(self, encoder: Any) -> None:
        d = DeviceDict({"s": ["a", "b"]}, encoders=None if encoder is None else {"s": encoder})
        assert d.rows[:0].rows.group_by("s") == {} and d.rows[[]].rows.group_by("s") == {}

    def test_what_has_no_order(self) -> None:
        d = DeviceDict({"z": torch.ones(2, dtype=torch.complex64), "x": [1, 2]})
        fails(TypeError, r"^'z': group_by takes values that torch sorts, got complex64", lambda: d.rows.group_by("z"))


@pytest.mark.parametrize(("name", "text"), [
    ("where", 'use rows[mask_or_indices], such as rows[d["x"] > 0]'), ("filter", "use rows[mask_or_indices]"),
    ("sample", "use rows[torch.randint(len(rows), (n,))], or rows.shuffle() for all rows"),
    ("append", "use cat([d, other]), or a RowWriter for a table on disk"), ("suffle", "did you mean 'shuffle'?"),
    ("s", "a field is d['s']"), ("zzz", "rows[index] is a dict of these rows"),
])  # fmt: skip
def test_unknown_attributes_show_the_way_out(name: str, text: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(batch().rows, name)
    assert str(caught.value).startswith(f"'Rows' object has no attribute {name!r}; ") and text in str(caught.value)
    assert not hasattr(batch().rows, "__array__")
