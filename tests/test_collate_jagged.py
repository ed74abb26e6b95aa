"""`collate(jagged=)`: ragged fields as nested tensors of layout ``torch.jagged``."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

from tensordict_lite import DeviceDict, DeviceMismatchError, Vocabulary, collate

# torch says so itself when a nested tensor is printed or compiled code is near
pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")

LENGTHS = (2, 1, 3, 0)


def samples() -> list[dict[str, Any]]:
    return [{"box": torch.arange(2.0 * n).view(n, 2), "y": n, "k": {"ids": list(range(n))}} for n in LENGTHS]


def rows(tensor: Tensor) -> list[Any]:
    return [row.tolist() for row in tensor.unbind()]


def nested(parts: list[Tensor]) -> Tensor:
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


class TestJagged:
    def test_what_collate_makes(self) -> None:
        d = collate(samples()[:3], jagged=["box", ("k", "ids")])
        d._check()
        assert d["box"].layout is torch.jagged and rows(d["box"]) == [s["box"].tolist() for s in samples()[:3]]
        assert rows(d["k", "ids"]) == [[0, 1], [0], [0, 1, 2]] and list(d) == ["box", "y", "k"] and d.is_packed
        assert d["k", "ids"].dtype == torch.int64 and d["y"].tolist() == [2, 1, 3]

    @pytest.mark.parametrize("pack", [True, False])
    def test_equal_and_empty_samples(self, pack: bool) -> None:
        for lengths in ([2, 2], [0, 0], [3]):
            d = collate([{"x": torch.ones(n)} for n in lengths], jagged=("x",), pack=pack)
            assert d["x"].layout is torch.jagged and [len(row) for row in d["x"].unbind()] == lengths

    def test_gradients_flow(self) -> None:
        w = torch.ones(2, requires_grad=True)
        collate([{"x": w}, {"x": w[:1] * 3}], jagged=["x"])["x"].values().sum().backward()
        assert w.grad is not None and w.grad.tolist() == [4, 1]

    def test_copies(self) -> None:
        d = collate(samples(), jagged=["box", "ids"])
        copies = [d.clone(), copy.deepcopy(d), d.to("cpu"), d.pack(), d.detach(), pickle.loads(pickle.dumps(d))]
        for other in [*copies, pickle.loads(ForkingPickler.dumps(d))]:
            assert rows(other["box"]) == rows(d["box"]) and rows(other["k", "ids"]) == rows(d["k", "ids"])
        assert d.to(torch.float64)["box"].dtype == torch.float64 and d.to("meta")["box"].is_meta

    def test_rows(self) -> None:
        d = collate(samples(), jagged=["box", "ids"])
        assert len(d.rows) == 4 and d.rows[2]["box"].tolist() == samples()[2]["box"].tolist()
        assert [len(row["box"]) for row in d.rows] == list(LENGTHS)

    def test_strings(self) -> None:
        words = [["a", "b"], ["b"], []]
        d = collate([{"s": w} for w in words], jagged=["s"], encoders={"s": Vocabulary(["a", "b"])})
        assert d.decode("s") == words and rows(d["s"]) == [[0, 1], [1], []]
        texts = [["ab", "c"], ["def"]]
        assert collate([{"s": w} for w in texts], jagged=["s"]).decode("s") == texts

    @pytest.mark.parametrize("workers", [0, 1])
    def test_loaders(self, workers: int) -> None:
        loader = DataLoader(samples(), 2, num_workers=workers, collate_fn=partial(collate, jagged=["box", "ids"]))  # type: ignore[arg-type]
        batches = list(loader)
        assert [row for d in batches for row in rows(d["k", "ids"])] == [list(range(n)) for n in LENGTHS]

    @pytest.mark.parametrize(
        ("given", "options", "error", "message"),
        [
            (
                [{"x": [1]}],
                {"jagged": "x"},
                TypeError,
                r"collate takes a list of keys or paths as jagged=, as \[\"box\"\], got 'x'",
            ),
            ([{"x": [1]}], {"jagged": [3]}, TypeError, "jagged= of collate takes keys and paths, got 3"),
            (
                [{"x": [1]}],
                {"jagged": ["x"], "pad": {"x": 0}},
                ValueError,
                "'x' stands in pad= and in jagged=; a field is either padded or jagged",
            ),
            (
                [{"x": [1]}],
                {"jagged": [("x",)], "pad": {"x": 0}},
                ValueError,
                r"\('x',\) stands in pad= and in jagged=; a field is either padded or jagged",
            ),
            (
                [{"x": [1]}],
                {"jagged": ["x"], "pad": {("x",): 0}},
                ValueError,
                "'x' stands in pad= and in jagged=; a field is either padded or jagged",
            ),
            (
                [{"x": 1}],
                {"jagged": ["x"]},
                ValueError,
                r"'x': a jagged field takes dense samples of at least one dimension, sample 0 has int64\[\]",
            ),
            (
                [{"x": torch.ones(1, 2)}, {"x": torch.ones(1, 3)}],
                {"jagged": ["x"]},
                ValueError,
                r"'x': sample 1 has float32\[1, 3\], sample 0 has float32\[1, 2\]; "
                r"jagged= lets the first dimension differ only",
            ),
            (
                [{"x": torch.ones(1)}, {"x": torch.ones(1).long()}],
                {"jagged": ["x"]},
                ValueError,
                r"'x': sample 1 has int64\[1\]",
            ),
            (
                [{"x": torch.ones(1)}, {"x": torch.ones(1, device="meta")}],
                {"jagged": ["x"]},
                DeviceMismatchError,
                "'x' is on meta",
            ),
        ],
    )
    def test_errors(self, given: Any, options: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            collate(given, **options)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.data())
def test_rows_by_slice_mask_and_index(lengths: list[int], data: st.DataObject) -> None:
    parts = [torch.rand(n, 2) for n in lengths]
    d, count = DeviceDict({"x": nested(parts)}), len(parts)
    for index in (
        slice(data.draw(st.integers(-count, count)), data.draw(st.integers(-count, count))),
        torch.tensor(data.draw(st.lists(st.integers(-count, count - 1), min_size=1, max_size=6))),
        torch.tensor(data.draw(st.lists(st.booleans(), min_size=count, max_size=count))),
    ):
        wanted = torch.arange(count)[index].tolist()
        if wanted:  # torch has no nested tensor without rows
            assert rows(d.rows[index]["x"]) == [parts[i].tolist() for i in wanted]


def test_a_typed_check_of_the_dict() -> None:
    d = DeviceDict({"x": nested([torch.ones(1), torch.ones(2)])})
    d._check()
    assert "jagged" in repr(d) and not d.is_packed


def test_a_stream_is_recorded_for_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A nested tensor has no storage of its own: its values and offsets have."""
    nested = collate([{"b": torch.ones(2)}, {"b": torch.ones(3)}], jagged=["b"])["b"]
    seen: list[int] = []
    monkeypatch.setattr(Tensor, "record_stream", lambda self, _: seen.append(self.numel()))
    DeviceDict({"b": nested}).record_stream(None)
    assert seen == [5, 3] and type(nested) is not Tensor
    memory = torch.zeros(9)
    DeviceDict({"x": memory[:4], "y": memory[4:], "b": nested}).record_stream(None)
    assert seen[2:] == [4, 5, 3], "once for each storage"


@pytest.mark.parametrize("index", [0, slice(0, 1), [0]], ids=repr)
def test_rows_of_a_nested_tensor_cannot_be_set(index: Any) -> None:
    d = collate([{"x": 1, "b": torch.ones(2)}, {"x": 2, "b": torch.ones(3)}], jagged=["b"])
    with pytest.raises(
        ValueError, match=r"^'b' is a nested tensor, whose rows cannot be set; replace the whole field$"
    ):
        d.rows[index] = d.rows[index]
    assert d["x"].tolist() == [1, 2]
