"""`d.rows` as a dataset: batches through DataLoader and `batches`, with and without workers."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checks import check_invariants, fails
from files import DTYPES
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    default_collate,
    random_split,
)
from workers import look_like_a_worker

from tensordict_lite import DeviceDict, StringEncoder, TypedDeviceDict, Vocabulary, collate


class Point(TypedDeviceDict):
    x: Tensor
    name: Tensor
    n: DeviceDict


class Kept(DeviceDict, objects="keep"):
    """At module level, as what is pickled must be."""


def table(count: int = 23) -> DeviceDict[Any]:
    return DeviceDict({
        "x": torch.arange(2.0 * count).reshape(count, 2),
        "name": [f"n{i}" for i in range(count)],
        "n": {"id": torch.arange(count), "b": torch.arange(count) % 2 == 0, "u": torch.arange(count).to(torch.uint16)},
    })  # fmt: skip


def rows_as_lists(batch: DeviceDict[Any]) -> tuple[list[int], list[str], list[float], list[bool]]:
    return batch["n", "id"].tolist(), batch.decode("name"), batch["x"][:, 0].tolist(), batch["n", "b"].tolist()


def expected(index: list[int]) -> tuple[list[int], list[str], list[float], list[bool]]:
    return index, [f"n{i}" for i in index], [2.0 * i for i in index], [i % 2 == 0 for i in index]


def ids(batch: Any) -> Any:
    """A custom ``collate_fn``, which sees a sequence of rows."""
    return [row["n", "id"].item() for row in batch], len(batch), batch[-1]["n", "id"].item()


@pytest.fixture
def as_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    look_like_a_worker(monkeypatch)


class TestBatches:
    @pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
    @pytest.mark.parametrize("shape", [(7,), (7, 3), (7, 2, 2), (7, 0)])
    @pytest.mark.usefixtures("as_worker")
    @pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
    def test_any_dtype_in_a_worker(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        size = torch.Size(shape).numel() * dtype.itemsize
        x = torch.arange(size).to(torch.uint8).remainder(2).view(dtype).reshape(shape)
        d = DeviceDict(
            {"x": x, "y": x.clone(), "i": torch.arange(7), "f": x.transpose(0, -1).contiguous().transpose(0, -1)}
        )
        index = [3, 3, 0, -1]
        batch = d.rows.__getitems__(index)[:]
        assert isinstance(batch, DeviceDict) and batch.is_packed
        in_turn = torch.stack([x[i % 7 : i % 7 + 1].reshape(-1).view(torch.uint8) for i in index])
        for key in ("x", "y", "f"):
            assert batch[key].dtype == dtype
            assert torch.equal(batch[key].reshape(4, -1).view(torch.uint8), in_turn.reshape(4, -1))
        plain = d.rows[index]
        assert all(
            torch.equal(plain[key].reshape(4, -1).view(torch.uint8), in_turn.reshape(4, -1)) for key in ("x", "y", "f")
        )

    @given(st.lists(st.integers(-5, 4), max_size=9), st.booleans())
    def test_it_is_indexing(self, index: list[int], in_worker: bool) -> None:
        d = DeviceDict({"x": torch.arange(10.0).reshape(5, 2), "n": {"y": torch.arange(5), "e": {}}})
        with pytest.MonkeyPatch.context() as patch:
            if in_worker:
                look_like_a_worker(patch)
            forms: Any = (index, np.array(index, dtype=np.int64), torch.tensor(index, dtype=torch.int64))
            for form in forms:
                batch = collate(d.rows.__getitems__(form))
                check_invariants(batch)
                assert batch == d.map(lambda field: field[torch.tensor(index, dtype=torch.int64)])
                batch["x"].fill_(-1)
                assert d["x"][0, 1] == 1

    @pytest.mark.usefixtures("as_worker")
    def test_what_cannot_be_packed_travels_beside(self) -> None:
        w = torch.ones(4, 2, requires_grad=True)
        d = Kept({
            "w": w * 2, "x": torch.arange(4), "p": torch.nn.Parameter(torch.arange(4.0)), "s": torch.eye(4).to_sparse(),
            "o": [None, {1}, "x", ()], "m": object,
        })  # fmt: skip
        batch = collate(d.rows.__getitems__([1, 3]))
        assert type(batch) is Kept and batch["o"] == [{1}, ()] and batch["m"] is object
        assert batch["x"].tolist() == [1, 3]
        assert batch["s"].to_dense().tolist() == [[0, 1, 0, 0], [0, 0, 0, 1]] and batch["p"].tolist() == [1, 3]
        batch["w"].sum().backward()
        assert w.grad is not None and w.grad.tolist() == [[0, 0], [2, 2], [0, 0], [2, 2]]

    @pytest.mark.usefixtures("as_worker")
    def test_a_changed_table_changes_the_next_batch(self) -> None:
        """The layout is remembered by dtypes and shapes; nothing else is."""
        d = DeviceDict({"x": torch.zeros(4, 2), "y": torch.zeros(4)})
        assert collate(d.rows.__getitems__([0, 1]))["x"].shape == (2, 2)
        d["x"] = torch.ones(4, 3, dtype=torch.float64)
        batch = collate(d.rows.__getitems__([0, 1]))
        assert batch["x"].tolist() == [[1, 1, 1]] * 2 and batch["x"].dtype == torch.float64 and batch.is_packed
        d["y"].requires_grad_()
        assert collate(d.rows.__getitems__([0, 1]))["y"].requires_grad

    def test_what_is_no_index(self) -> None:
        rows = table().rows
        fails(IndexError, r"^row 23 is out of range, there are 23$", lambda: rows.__getitems__([0, 23]))
        fails(IndexError, r"^row -24 is out of range, there are 23$", lambda: rows.__getitems__([0, -24]))
        with pytest.raises(TypeError, match=r"^__getitems__ takes a mask or indices, got int$"):
            rows.__getitems__(3)  # pyright: ignore[reportArgumentType]

    def test_collate_returns_the_batch(self) -> None:
        d = table()
        batch = d.rows.__getitems__([2, 0])
        assert collate(batch) is batch._dict and default_collate(batch) is batch._dict  # pyright: ignore[reportArgumentType]
        point = collate(batch, cls=Point)
        assert type(point) is Point and point.x is batch._dict["x"]
        fails(TypeError, "name", lambda: collate(d.drop("name").rows, cls=Point))
        other = collate(batch, encoders={"x": Vocabulary(["a"])})
        assert "x" in other.encoders and other["x"] is batch._dict["x"]
        packed = collate(batch, pack=True)
        assert packed == batch._dict and packed.is_packed and not batch._dict.is_packed
        assert collate(batch, pad={"x": 0}) == batch._dict

    def test_an_error_of_collate_is_the_same(self) -> None:
        with pytest.raises(TypeError, match="collate takes a DeviceDict class as cls=, got dict"):
            collate(table().rows, cls=dict)  # pyright: ignore[reportArgumentType]


class TestLoader:
    @pytest.mark.parametrize("collate_fn", [None, collate, default_collate])
    @pytest.mark.parametrize("workers", [0, 1])
    def test_every_row_arrives_once(self, workers: int, collate_fn: Any) -> None:
        d = table()
        generator = torch.Generator().manual_seed(3)
        loader: Any = DataLoader(
            d.rows, 5, shuffle=True, num_workers=workers, collate_fn=collate_fn, generator=generator
        )
        seen: list[int] = []
        for batch in loader:
            assert type(batch) is DeviceDict and (batch.is_packed or not workers)
            check_invariants(batch)
            index = batch["n", "id"].tolist()
            assert rows_as_lists(batch) == expected(index)
            seen += index
        assert sorted(seen) == list(range(23)) and seen != sorted(seen)

    def test_a_custom_function_sees_rows(self) -> None:
        for workers in (0, 1):
            loader: Any = DataLoader(table(7).rows, 4, num_workers=workers, collate_fn=ids)
            assert list(loader) == [([0, 1, 2, 3], 4, 3), ([4, 5, 6], 3, 6)]

    def test_through_subsets_and_samplers(self) -> None:
        d = table()
        first, second = random_split(d.rows, [20, 3], torch.Generator().manual_seed(0))
        seen = [i for part in (first, second) for batch in DataLoader(part, 4) for i in batch["n", "id"].tolist()]
        assert sorted(seen) == list(range(23))
        nested: Any = Subset(Subset(d.rows, range(3, 20)), [0, 2, -1])
        assert [rows_as_lists(batch) for batch in DataLoader(nested, 2)] == [expected([3, 5]), expected([19])]
        sampler = BatchSampler(SequentialSampler(range(23)), 10, drop_last=True)
        assert [len(batch.rows) for batch in DataLoader(d.rows, batch_sampler=sampler)] == [10, 10]
        whole: Any = DataLoader(d.rows, sampler=BatchSampler(RandomSampler(range(23)), 10, False), batch_size=None)
        assert [len(batch.rows) for batch in whole] == [10, 10, 3], "an index list as one item"
        single: Any = DataLoader(d.rows, batch_size=None)
        assert [row["n", "id"].item() for row in single] == list(range(23))

    @pytest.mark.parametrize("workers", [0, 1])
    def test_typed_and_kept(self, workers: int) -> None:
        d = table(6)
        for batch in DataLoader(Point.from_dict(d).rows, 4, num_workers=workers):
            assert type(batch) is Point and batch.decode("name") == [f"n{i}" for i in batch.n["id"].tolist()]
        kept = Kept({"x": torch.arange(6), "o": [None, {1}, "x", (), 2, "y"]})
        batches = list(DataLoader(kept.rows, 4, num_workers=workers))
        assert [batch["o"] for batch in batches] == [[None, {1}, "x", ()], [2, "y"]]

    @pytest.mark.slow
    @pytest.mark.parametrize("context", ["fork", "forkserver"])
    @pytest.mark.parametrize("home", ["memory", "shared", "file"])
    def test_workers_of_any_kind(self, context: str, home: str, tmp_path: Path) -> None:
        d = table()
        if home == "shared":
            d = d.pack().share_memory_()
        if home == "file":
            pytest.importorskip("safetensors")
            d.save(tmp_path / "d.safetensors")
            d = DeviceDict.load(tmp_path / "d.safetensors")
        loader: Any = DataLoader(d.rows, 8, num_workers=2, multiprocessing_context=context, persistent_workers=True)
        for _ in range(2):
            assert [rows_as_lists(batch) for batch in loader] == [
                expected(list(range(i, min(i + 8, 23)))) for i in (0, 8, 16)
            ]

    @pytest.mark.parametrize("context", ["fork", "forkserver"])
    def test_workers_share_the_table(self, context: str) -> None:
        """A write of the trainer to a shared table is seen by workers: they have no copy."""
        d = DeviceDict({"x": torch.zeros(64), "y": torch.zeros(64)}).pack().share_memory_()
        loader: Any = DataLoader(d.rows, 1, num_workers=1, multiprocessing_context=context, prefetch_factor=2)
        batches = iter(loader)
        next(batches)
        d["x"].fill_(1)
        assert [batch["x"].item() for batch in batches][-1] == 1


class TestIterator:
    def test_in_order(self) -> None:
        d = table()
        assert [rows_as_lists(batch) for batch in d.rows.batches(10)] == [
            expected(list(range(10))),
            expected(list(range(10, 20))),
            expected([20, 21, 22]),
        ]
        assert [len(batch.rows) for batch in d.rows.batches(10, drop_last=True)] == [10, 10]
        next(d.rows.batches(4))["x"].zero_()
        assert not d["x"][:4].any() and d["x"][4:].all(), "views"
        assert [len(batch.rows) for batch in d.rows.batches(np.int64(23))] == [23]  # pyright: ignore[reportArgumentType]

    def test_shuffled(self, device: torch.device) -> None:
        d = table().to(device)
        seen = [batch.cpu() for batch in d.rows.batches(10, shuffle=True, generator=torch.Generator().manual_seed(1))]
        again = [batch.cpu() for batch in d.rows.batches(10, shuffle=True, generator=torch.Generator().manual_seed(1))]
        assert seen == again and [len(batch.rows) for batch in seen] == [10, 10, 3]
        order = [i for batch in seen for i in batch["n", "id"].tolist()]
        assert sorted(order) == list(range(23)) != order
        assert all(rows_as_lists(batch) == expected(batch["n", "id"].tolist()) for batch in seen)
        assert [len(batch.rows) for batch in d.rows.batches(10, shuffle=True, drop_last=True)] == [10, 10]
        assert list(d.rows[:0].rows.batches(3, shuffle=True)) == [] == list(d.rows[:0].rows.batches(3))

    @pytest.mark.parametrize(("arguments", "error", "message"), [
        ({"size": 0}, ValueError, "batches takes a size of at least 1, got 0"),
        ({"size": 1.5}, TypeError, "batches takes a size, got 1.5"),
        ({"size": 2, "generator": torch.Generator()}, TypeError, "batches takes a generator with shuffle=True only"),
        ({"size": 2, "shuffle": True, "generator": 1}, TypeError, "batches takes a torch.Generator, got int"),
    ])  # fmt: skip
    def test_arguments_are_checked_at_the_call(self, arguments: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error) as caught:
            table().rows.batches(**arguments)
        assert str(caught.value) == message
        fails(ValueError, "rows need fields that agree", lambda: DeviceDict({"x": [1], "y": [1, 2]}).rows.batches(1))


class Numbers(StringEncoder):
    """Encodes a string by its numbers, which may be padded."""

    code_dtype = torch.int64
    padding = 0

    def encode(self, strings: Any) -> torch.Tensor:
        return torch.tensor([[int(number) for number in string.split()] for string in strings])

    def decode(self, codes: torch.Tensor) -> list[str]:
        return [" ".join(map(str, row)) for row in codes.tolist()]


class TestGroups:
    def test_by_numbers_and_strings(self) -> None:
        d = DeviceDict({
            "s": ["dog", "cat", "dog", "ox"], "i": [3, 1, 3, 2], "v": [1.0, 2, 3, 4], "n": {"c": ["b", "a", "b", "b"]},
        }, encoders={"c": Vocabulary(["b", "a"])})  # fmt: skip
        groups = d.rows.group_by("s")
        assert {key: part["v"].tolist() for key, part in groups.items()} == {"cat": [2], "dog": [1, 3], "ox": [4]}
        assert list(d.rows.group_by("i")) == [1, 2, 3] and d.rows.group_by("i")[3] == groups["dog"]
        assert {key: part["i"].tolist() for key, part in d.rows.group_by(("n", "c")).items()} == {
            "b": [3, 3, 2],
            "a": [1],
        }
        assert list(d.rows.group_by("v")) == [1.0, 2.0, 3.0, 4.0]
        bools = DeviceDict({"b": [True, False, True], "v": [1, 2, 3]}).rows.group_by("b")
        assert {key: part["v"].tolist() for key, part in bools.items()} == {False: [2], True: [1, 3]}
        groups["dog"]["v"].zero_()
        assert d["v"].all(), "copies"
        assert d.rows[:0].rows.group_by("s") == {}
        zeros = DeviceDict({"f": [0.0, 1.0, -0.0, float("nan")], "v": [0, 1, 2, 3]}).rows.group_by("f")
        assert [part["v"].tolist() for part in zeros.values()] == [[0, 2], [1], [3]], "0 and -0 are one key of a dict"

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(st.text(st.sampled_from("ab\x01\x7féÿ中🦉"), max_size=20), min_size=1, max_size=30),
        st.sampled_from([1, 2, -1]),
    )
    def test_strings_in_the_order_of_their_bytes(self, values: list[str], step: int) -> None:
        d = DeviceDict({"s": values, "at": list(range(len(values)))})
        chosen = d.rows[::step] if step > 0 else d.rows[list(range(len(values)))[::-1]]
        groups = chosen.rows.group_by("s")
        left = values[::step]
        assert list(groups) == sorted(set(left), key=str.encode)
        for value, part in groups.items():
            assert part["at"].tolist() == [i for i in chosen["at"].tolist() if values[i] == value]

    def test_codes_of_several_integers(self) -> None:
        d = DeviceDict({"s": ["3 1", "-2 5", "3 0", "-2 5"], "at": [0, 1, 2, 3]}, encoders={"s": Numbers()})
        groups = d.rows.group_by("s")
        assert [(key, part["at"].tolist()) for key, part in groups.items()] == [
            ("-2 5", [1, 3]),
            ("3 0", [2]),
            ("3 1", [0]),
        ]

    def test_what_has_no_single_value(self) -> None:
        d = Kept({"x": torch.zeros(2, 2), "n": {"y": [1, 2]}, "o": [None, 1]})
        with pytest.raises(ValueError, match=r"^'x': group_by takes a field with one value per row, got \w+\[2, 2\]$"):
            d.rows.group_by("x")
        fails(TypeError, r"^'n': group_by takes a dense tensor, got a mapping$", lambda: d.rows.group_by("n"))
        fails(TypeError, r"^'o': group_by takes a dense tensor, got a list$", lambda: d.rows.group_by("o"))
        fails(KeyError, "'z'", lambda: d.rows.group_by("z"))
        fails(KeyError, r"n.*z", lambda: d.rows.group_by(("n", "z")))


class TestRollouts:
    def test_a_buffer_of_steps(self, device: torch.device) -> None:
        step = DeviceDict({
            "obs": {"x": torch.ones(4, 3), "t": 0}, "done": torch.zeros(4, dtype=torch.bool),
            "a": ["no", "ya", "", "n"],
        }, device=device)  # fmt: skip
        step["obs", "t"] = torch.zeros(4, device=device)
        buffer = step.new_zeros(8)
        check_invariants(buffer)
        assert buffer["obs", "x"].shape == (8, 4, 3) and buffer["done"].dtype == torch.bool and buffer.device == device
        for t in range(8):
            buffer.rows[t] = step.map(lambda field, t=t: field + t if field.is_floating_point() else field)
        flat = buffer.rows.flatten()
        assert flat["obs", "x"].shape == (32, 3) and flat["done"].shape == (32,)
        assert flat.decode("a")[:5] == ["no", "ya", "", "n", "no"]
        assert flat["obs", "x"][:, 0].tolist() == [1.0 + t for t in range(8) for _ in range(4)]
        flat["obs", "t"].fill_(7)
        assert (buffer["obs", "t"] == 7).all(), "views"
        assert len(list(flat.rows.batches(10, shuffle=True))) == 4
        assert step.new_empty(2, 3)["obs", "x"].shape == (2, 3, 4, 3) and step.new_zeros() == step.map(torch.zeros_like)
        assert buffer.rows.flatten(1) == buffer

    def test_zeros_are_new(self) -> None:
        d = DeviceDict({"x": torch.ones(2, requires_grad=True), "y": torch.nn.Parameter(torch.ones(1))})
        zeros = d.new_zeros(3)
        assert not zeros["x"].requires_grad and type(zeros["y"]) is Tensor and not zeros["x"].any()
        with pytest.raises(TypeError, match=r"^'n.o': expected a tensor of one shape, got a type; drop"):
            Kept({"x": torch.tensor(1), "n": {"o": object}}).new_zeros(2)
        nested = DeviceDict(
            {"n": {"b": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)}}
        )
        for create in (nested.new_zeros, nested.new_empty):
            with pytest.raises(
                TypeError, match=r"^'n.b': expected a tensor of one shape, got a nested tensor; drop or pad it first"
            ):
                create(2)
        with pytest.raises(RuntimeError):
            d.new_zeros(-1)

    @pytest.mark.parametrize(("d", "dims", "error", "message"), [
        (DeviceDict({"x": torch.zeros(2, 3), "n": {"y": torch.zeros(2)}}), 2, ValueError,
         "'n.y': flatten(2) takes fields that agree on their first 2 dimensions, [2, 3] as in the first"),
        (DeviceDict({"x": torch.zeros(2, 3), "s": ["a", "b"]}), 2, ValueError, "'s': flatten(2) takes"),
        (DeviceDict({"x": torch.zeros(2, 3)}), 0, ValueError, "flatten takes at least 1 dimension, got 0"),
        (DeviceDict({"x": torch.zeros(2, 3)}), "2", TypeError, "flatten takes a number of dimensions, got '2'"),
        (Kept({"x": torch.zeros(2, 3), "o": [None, 1]}), 2, TypeError,
         "'o': flatten takes fields with dimensions, got a list"),
    ])  # fmt: skip
    def test_what_cannot_be_flattened(self, d: Any, dims: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error) as caught:
            d.rows.flatten(dims)
        assert str(caught.value).startswith(message)


class TestShuffledBatches:
    def test_a_table_that_changes_between_batches(self) -> None:
        d = DeviceDict({"x": torch.arange(8), "y": torch.arange(8.0)})
        batches = d.rows.batches(2, shuffle=True)
        assert next(batches)["x"].dtype == torch.int64
        d["x"] += 100
        assert next(batches)["x"].min() >= 100
        d["x"] = torch.arange(8).to(torch.uint16)
        assert next(batches)["x"].dtype == torch.uint16
        d["n"] = {"z": torch.arange(8)}
        del d["y"]
        batch = next(batches)
        assert list(batch) == ["x", "n"] and batch["n", "z"].tolist() == batch["x"].tolist()

    def test_a_batch_is_freed_when_the_caller_is_done(self) -> None:
        d = DeviceDict({"x": torch.arange(8)})
        batches = d.rows.batches(2, shuffle=True)
        alive = weakref.ref(next(batches)["x"])
        assert alive() is None

    def test_a_field_that_changes_its_dtype_in_place(self) -> None:
        d = DeviceDict({"x": torch.arange(4)})
        batches = d.rows.batches(1, shuffle=True)
        next(batches)
        d["x"].data = torch.arange(4).to(torch.uint16)
        assert {next(batches)["x"].dtype for _ in range(3)} == {torch.uint16}
