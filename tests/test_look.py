"""Rows as a table, statistics of fields, and the rows where a function holds."""

from __future__ import annotations

import json
import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

from tensordict_lite import (
    BatchOrder,
    DeviceDict,
    Hashing,
    JoinedRows,
    Ragged,
    StringEncoder,
    TypedDeviceDict,
    Utf8,
    Vocabulary,
    collate,
    load,
    prefetch,
)
from tensordict_lite._look import describe as describe_module
from tensordict_lite.tables import RowWriter

HOSTILE = ["<script>", "a\nb", "\x1b[31mred", "\u202egnp.exe", "", "tab\t"]


def cells(d: DeviceDict[Any]) -> list[list[str]]:
    """The rows of a table, cut at two spaces or more."""
    return [re.split(" {2,}", line) for line in repr(d.rows).splitlines()[2:]]


class TestRows:
    def test_values_of_every_kind(self) -> None:
        d = DeviceDict(
            {
                "x": [0.53124, 1e-8, 3.0],
                "name": ["Ada", "Bo", "a\nb"],
                "image": torch.zeros(3, 3, 224, 224),
                "ids": Ragged.from_rows([[3, 1], [], list(range(12))]),
            }
        )
        assert repr(d.rows) == (
            "DeviceDict.rows(3)\n"
            "   x       name    image                   ids\n"
            "0  0.5312  Ada     float32[3, 224, 224]    [3, 1]\n"
            "1  1e-08   Bo      float32[3, 224, 224]    []\n"
            "2  3       'a\\nb'  float32[3, 224, 224]    [0, 1, 2, … 12 values]"
        ).replace("224]    ", "224]  ").replace("image                   ", "image                 ")

    def test_strings_are_decoded_by_their_encoder(self) -> None:
        class Odd(StringEncoder):
            def encode(self, strings: Any) -> Tensor:
                return torch.tensor([len(s) for s in strings])

            def decode(self, codes: Any) -> list[str]:
                raise KeyError("no")

        encoders = {"v": Vocabulary(["cat", "dog"]), "h": Hashing(7), "odd": Odd(), "tags": Vocabulary(["a", "b"])}
        d = DeviceDict(
            {"v": ["cat", "dog"], "h": ["x", "y"], "odd": ["abc", "d"], "n": [["p", "q"], ["r", ""]]}, encoders=encoders
        )
        assert cells(d)[1][:4] == ["1", "dog", str(int(d["h"][1])), "1"] and cells(d)[0][-1] == "[p, q]"
        bad = DeviceDict({"v": ["cat"]}, encoders=encoders)
        bad["v"].fill_(9)
        assert cells(bad) == [["0", "9"]]

    def test_long_strings_are_cut_between_characters(self, tmp_path: Path) -> None:
        wide = ["ä" * 200, "b" * 300, "c"]
        assert [row[1][-1] for row in cells(DeviceDict({"t": wide}))] == ["…", "…", "c"]
        assert cells(DeviceDict({"t": wide}))[0][1] == "ä" * 32 + "…"
        assert cells(DeviceDict({"t": ["b" * 64]}))[0][1] == "b" * 64
        with RowWriter(tmp_path / "t", like={"t": ["a"], "tags": [["a"]]}, ragged=["t", "tags"]) as writer:
            writer.write({"t": wide, "tags": [["x", "y"], ["z"] * 9, []]})
        shown = cells(load(tmp_path / "t"))
        assert [row[1][-1] for row in shown] == ["…", "…", "c"] and shown[0][1] == "ä" * 32 + "…"
        assert [row[2] for row in shown] == ["[x, y]", "[z, z, z, … 9 values]", "[]"]

    @pytest.mark.parametrize("text", HOSTILE, ids=ascii)
    def test_hostile_strings(self, text: str) -> None:
        d = DeviceDict({text: [text, "b"]})
        assert len(repr(d.rows).splitlines()) == 4 and all(map(str.isprintable, repr(d.rows).splitlines()))
        assert d.rows._repr_html_().isprintable() and "<script" not in d.rows._repr_html_()

    def test_dtypes(self) -> None:
        named = {
            "u": torch.tensor([2**64 - 1], dtype=torch.uint64),
            "f8": torch.tensor([1.5]).to(torch.float8_e5m2),
            "h": torch.tensor([1.5]).bfloat16(),
            "z": torch.tensor([1 + 2j]),
            "b": torch.tensor([True]),
        }
        assert cells(DeviceDict(named)) == [["0", "18446744073709551615", "1.5", "1.5", "1+2j", "True"]]

    def test_no_rows_and_no_agreement(self) -> None:
        assert repr(DeviceDict({"x": torch.zeros(0, 2)}).rows) == "DeviceDict.rows(0)"
        shown = repr(DeviceDict({"x": torch.zeros(2), "y": torch.zeros(3)}).rows)
        assert shown.startswith("DeviceDict.rows(none)\nrows need fields") and shown.endswith("'x'\n[2], 'y' [3]")
        assert repr(DeviceDict().rows).startswith("DeviceDict.rows(none)")
        meta = DeviceDict({"x": torch.zeros(2, device="meta")})
        assert cells(DeviceDict({"r": Ragged.from_rows([[1.0], []]).to("meta")})) == [
            ["0", "float32[…]"],
            ["1", "float32[…]"],
        ]
        assert cells(meta) == [["0", "float32[…]"], ["1", "float32[…]"]]

    def test_kept_objects_and_empty_ragged_fields(self) -> None:
        d = DeviceDict({
            "x": torch.tensor([1.0, 2.0]),
            "file": ["a.png", None],
            "all": {1},
            "crop": np.array([1.5, 2.0], np.float32),
            "map": np.zeros((2, 3)),
            "r": Ragged.from_rows([torch.zeros(0, 4)] * 2),
        }, objects="keep")  # fmt: skip
        assert cells(d) == [
            ["0", "1", "a.png", "object set", "1.5", "[0, 0, 0]", "float32[0, 4]"],
            ["1", "2", "None", "object set", "2", "[0, 0, 0]", "float32[0, 4]"],
        ]
        assert "map   ndarray float64[2, 3]\n" in repr(d)
        some = {"x": torch.zeros(1), "size": (480, 640), "big": 10**9999, "no": (set(), 1), "at": np.arange(2)[None]}
        assert cells(DeviceDict({**some, "of": (["a"], 1)}, objects="keep"))[0][1:] == [
            *("0", "(480, 640)", "object int", "object tuple", "[0, 1]", "object tuple")
        ]
        text = {"x": torch.zeros(1), "text": "<b>\n" + 99 * "a"}
        assert cells(DeviceDict(text, objects="keep"))[0][2] == f"'<b>\\n{24 * 'a'}…{28 * 'a'}'"
        assert repr(DeviceDict({"o": ["a", None, 1.5]}, objects="keep")).endswith("o  object list  [a, None, 1.5]")
        empty = DeviceDict({"r": Ragged(torch.zeros(0), torch.zeros(3, dtype=torch.int32))})
        assert cells(empty) == [["0", "[]"], ["1", "[]"]]

    def test_one_copy_to_the_host(self, copies: Any) -> None:
        d = DeviceDict(
            {"x": [1.0] * 9, "s": ["a"] * 9, "r": Ragged.from_rows([[1], [2, 3]] + [[]] * 7), "i": torch.zeros(9, 99)},
            device="sim",
        )
        copies.clear()
        assert "[2, 3]" in repr(d.rows)
        assert copies["d2h"] == 1

    def test_many_fields_leave_columns_out(self) -> None:
        d = DeviceDict({f"k{i}": torch.zeros(3, 2) for i in range(10_000)})
        lines = repr(d.rows).splitlines()
        assert lines[-1] == "… 9991 more fields" and all(len(line) <= 80 for line in lines)
        assert "… 9988 more fields" in d.rows._repr_html_()

    def test_pictures(self) -> None:
        pytest.importorskip("PIL")
        d = DeviceDict(
            {
                "chw": torch.randint(0, 255, (6, 3, 100, 200), dtype=torch.uint8),
                "hwc": torch.randint(0, 255, (6, 20, 30, 3), dtype=torch.uint8),
                "codes": torch.zeros(6, 4, 5, 6, dtype=torch.uint8),
            }
        )
        page = d.rows._repr_html_()
        assert page.count("<img ") == 8 and 'alt="uint8[3, 100, 200]"' in page and "uint8[20, 30, 3]</td>" in page
        assert "<img" not in DeviceDict({"x": torch.zeros(2, 3, 0, 4, dtype=torch.uint8)}).rows._repr_html_()
        import base64  # noqa: PLC0415
        import io  # noqa: PLC0415

        from PIL import Image  # noqa: PLC0415

        data = base64.b64decode(page.split("base64,")[1].split('"')[0])
        image = Image.open(io.BytesIO(data))
        assert image.size == (50, 25) and image.getpixel((1, 1)) == tuple(d["chw"][0, :, 4, 4].tolist())

    def test_no_pictures_without_pillow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
        page = DeviceDict({"x": torch.zeros(2, 3, 4, 4, dtype=torch.uint8)}).rows._repr_html_()
        assert "<img" not in page and "uint8[3, 4, 4]" in page


def one(value: Any, **options: Any) -> dict[str, Any]:
    return DeviceDict({"x": value}, **options).describe().tolist()[0]


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128, torch.complex32,
]  # fmt: skip


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(describe_module, "_ON_HOST", 32)


class TestDescribe:
    @pytest.mark.filterwarnings("ignore:ComplexHalf")
    @settings(deadline=None, max_examples=150)
    @given(st.data())
    def test_statistics_are_exact(self, data: st.DataObject) -> None:
        dtype = data.draw(st.sampled_from(DTYPES))
        count = data.draw(st.integers(0, 20))
        size = dtype.itemsize
        raw = data.draw(st.binary(min_size=count * size, max_size=count * size))
        if dtype is torch.bool:
            raw = bytes(byte & 1 for byte in raw)
        x = torch.tensor(bytearray(raw), dtype=torch.uint8).view(dtype) if count else torch.zeros(0, dtype=dtype)
        found = one(x)
        values = x.to(torch.complex128).abs().tolist() if dtype.is_complex else x.tolist()
        finite = [value for value in values if math.isfinite(value)]
        nans = sum(value != value for value in values)
        assert (found.get("min"), found.get("max")) == ((min(finite), max(finite)) if finite else (None, None))
        if values:
            assert found["nan"] == nans / count and found["inf"] == (count - nans - len(finite)) / count
            assert found["zero"] == sum(value == 0 for value in values) / count
        if finite:
            exact = float(sum(map(Fraction, finite)) / len(finite))
            largest = max(abs(value) for value in finite)
            precision = 1e-6 if dtype.is_floating_point and size < 8 else 1e-12
            assert found["mean"] == pytest.approx(exact, rel=precision, abs=largest * precision)
            assert sum(found["histogram"]) == len(finite)
        json.dumps(found)

    @pytest.mark.usefixtures("small_chunks")
    def test_chunks_give_the_same(self) -> None:
        torch.manual_seed(0)
        x = torch.randn(50, 6, dtype=torch.float64)
        x[3, 2], x[40] = math.nan, math.inf
        views = [x, x.T.contiguous().T, x[:, ::2], x.to(torch.float16), x[:0]]
        for view in views:
            found, values = one(view), view.double()[view.isfinite()]
            if len(values):
                assert found["mean"] == pytest.approx(values.mean().item(), rel=1e-12)
                assert (found["min"], found["max"]) == (values.min().item(), values.max().item())
                assert found["nan"] == view.isnan().sum().item() / view.numel()
        assert one(Ragged.from_rows([[0] * n for n in range(9)]))["lengths"]["mean"] == 4.0

    def test_numbers_at_the_ends_of_their_dtype(self) -> None:
        ends = one(torch.tensor([2**63 - 1, 2**63 - 1, -(2**63)]))
        assert (ends["min"], ends["max"]) == (-(2**63), 2**63 - 1)
        assert ends["mean"] == float(Fraction(2**64 - 2 - 2**63, 3))
        unsigned = one(torch.tensor([2**64 - 1, 2**63, 0], dtype=torch.uint64))
        assert (unsigned["min"], unsigned["max"], unsigned["zero"]) == (0, 2**64 - 1, 1 / 3)
        big = one(torch.tensor([1.7e308] * 3 + [-1.7e308], dtype=torch.float64))
        assert big["mean"] == pytest.approx(0.85e308) and big["histogram"] == [1, 0, 0, 0, 0, 0, 0, 3]
        assert str(DeviceDict({"x": [0.0, 1.0, 1.0, 1.0]}).describe()).endswith("▃      █"), "a bar for each bin"
        assert one(torch.full((1 << 20,), 3e38))["mean"] == pytest.approx(3e38, rel=1e-6)
        nan = one(torch.full((3,), math.nan))
        assert nan == {"path": ["x"], "dtype": "float32", "shape": [3], "nan": 1.0, "inf": 0.0, "zero": 0.0}
        assert one(torch.tensor(2.5))["mean"] == 2.5 and one(torch.zeros(0)).keys() == {"path", "dtype", "shape"}

    def test_strings(self) -> None:
        found = one(["cat", "ox", "cat", "antelope"])
        assert found == {
            "path": ["x"], "dtype": "uint8", "shape": [4, 8], "encoder": "Utf8()", "distinct": 3, "exact": True,
            "shortest": "ox", "longest": "antelope", "most": "cat", "share": 0.5,
        }  # fmt: skip
        assert one(["a", "b", "b"], encoders={"x": Vocabulary(["b", "a"])})["most"] == "b"
        assert one(["a", "b", "b"], encoders={"x": Hashing(1000)})["distinct"] == 2
        assert one("Ada")["most"] == "Ada" and one([["a", "bb"], ["a", ""]])["shortest"] == ""
        assert one(["", ""])["distinct"] == 1
        assert repr(DeviceDict({"x": ["cat", "dog", "cat"]}).describe()).endswith("2 distinct, cat, cat 66.7 %")
        shown = repr(DeviceDict({"x": ["a\nb", "<i>"]}).describe())
        assert "'a\\nb'" in shown and len(shown.splitlines()) == 3

    @pytest.mark.usefixtures("small_chunks")
    def test_ragged_fields(self, tmp_path: Path) -> None:
        r = Ragged.from_rows([[1, 2], [], list(range(30))])
        found = one(r)
        assert found["shape"] == [3, None] and found["max"] == 29
        assert (found["lengths"]["min"], found["lengths"]["mean"], found["lengths"]["max"]) == (0, 32 / 3, 30)
        assert "int64[3, 0 to 30]" in repr(DeviceDict({"x": r}).describe())
        with RowWriter(tmp_path / "t", like={"t": ["a"], "tags": [["a"]]}, ragged=["t", "tags"]) as writer:
            writer.write({"t": ["ä" * 40, "b", "b"], "tags": [["x", "y"], ["y"] * 9, []]})
        text, tags = load(tmp_path / "t").describe().tolist()
        assert (text["longest"], text["most"], text["distinct"]) == ("ä" * 40, "b", 2)
        assert (tags["most"], tags["share"], tags["lengths"]["max"]) == ("y", 10 / 11, 9)
        alone = r.describe()
        assert repr(alone).startswith("Ragged(cpu, 3 rows, int64, 32 values)\n")
        [whole], [found] = DeviceDict({"values": r}).describe().tolist(), alone.tolist()
        assert found == whole

    def test_joined_rows_are_one_table(self) -> None:
        parts = [{"x": [1.0, 2.0], "s": ["a", "b"]}, {"x": [6.0], "s": ["long"]}, {"x": torch.zeros(0), "s": ["a"][:0]}]
        found = JoinedRows([DeviceDict(one) for one in parts[:2]]).describe().tolist()
        assert found[0]["mean"] == 3 and found[0]["shape"] == [3]
        assert found[1]["distinct"] == 3 and found[1]["longest"] == "long"
        ragged = [DeviceDict({"r": Ragged.from_rows(rows)}) for rows in ([[1, 2], []], [[3]])]
        [found] = JoinedRows(ragged).describe().tolist()
        assert (found["shape"], found["lengths"]["mean"], found["mean"]) == ([3, None], 1, 2)

    def test_what_has_no_statistics(self) -> None:
        d = DeviceDict({"o": {1, 2}, "m": None, "s": torch.eye(3).to_sparse()}, objects="keep")
        assert [field.keys() for field in d.describe().tolist()] == [{"path", "object"}] * 2 + [
            {"path", "dtype", "shape"}
        ]
        assert "object set" in repr(d.describe()) and repr(DeviceDict().describe()).startswith("DeviceDict(no device")
        assert one(torch.zeros(3, device="meta")).keys() == {"path", "dtype", "shape"}

    def test_the_text_fits_in_120_columns(self) -> None:
        names = {("k" * 90) + str(i): torch.randn(4) * 10**i for i in range(12)}
        d = DeviceDict({**names, "big": [2**63 - 1], "<b>": ["x" * 300]})
        assert all(len(line) <= 120 for line in repr(d.describe()).splitlines())
        page = d.describe()._repr_html_()
        assert "<b>" not in page and "&lt;b&gt;" in page
        d = DeviceDict({f"k{i}": torch.zeros(1) for i in range(1_000)})
        assert len(repr(d.describe()).splitlines()) == 1_002

    def test_a_typed_dict(self) -> None:
        class Batch(TypedDeviceDict):
            x: Tensor

        assert repr(Batch(x=torch.ones(1)).describe()).startswith("Batch(cpu, 1 row")

    def test_one_copy_from_a_device(self, copies: Any) -> None:
        d = DeviceDict(
            {"x": [1.0] * 9, "i": list(range(9)), "s": ["a"] * 9, "r": Ragged.from_rows([[1]] * 9)}, device="sim"
        )
        copies.clear()
        found = d.describe().tolist()
        assert copies["d2h"] == 1 and [one.get("mean") for one in found] == [1, 4, None, 1] and found[2]["most"] == "a"

    def test_progress(self) -> None:
        seen: list[tuple[int, int]] = []
        d = DeviceDict({"x": torch.zeros(10), "r": Ragged.from_rows([[1.0], [2.0]])})
        d.describe(progress=lambda done, total: seen.append((done, total)))
        assert seen[-1] == (d.nbytes, d.nbytes) and seen == sorted(seen)
        d.describe(progress=True)
        with pytest.raises(TypeError, match=r"progress= is a function of \(done, total\), or True for tqdm, got 3"):
            d.describe(progress=3)  # type: ignore[arg-type]

    def test_a_bar_ends_at_the_total(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bar = Mock(n=0, update=lambda more: setattr(bar, "n", bar.n + more))
        monkeypatch.setattr("tqdm.auto.tqdm", lambda total, **_: bar)
        d = DeviceDict({"x": torch.zeros(10), "y": torch.zeros(10)})
        d.describe(progress=True)
        assert bar.n == d.nbytes and bar.close.called

    def test_progress_needs_tqdm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "tqdm.auto", None)
        with pytest.raises(ImportError, match=r"tqdm: pip install tqdm, or give a function of \(done, total\)$"):
            DeviceDict({"x": 1}).describe(progress=True)

    def test_many_distinct_strings_are_counted_up_to_a_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(describe_module, "_MOST_STRINGS", 3)
        found = one(["a", "b", "c", "d", "a"])
        assert (found["distinct"], found["exact"]) == (3, False) and "most" not in found
        assert "3 or more distinct" in repr(DeviceDict({"x": ["a", "b", "c", "d"]}).describe())
        monkeypatch.setattr(describe_module, "_ON_HOST", 3)
        assert one(["a", "b", "c"] * 2)["exact"], "a string that is counted already may come in a later chunk"


def test_other_objects_say_their_size_and_their_place(tmp_path: Path) -> None:
    rows = DeviceDict({"x": list(range(10))}).rows
    order = BatchOrder(rows, 4, rank=1, world=2)
    assert repr(order) == "BatchOrder(10 rows, batches of 4, rank 1 of 2, epoch 0)"
    order.load_state_dict(order.state_dict(1))
    assert repr(order) == "BatchOrder(10 rows, batches of 4, rank 1 of 2, epoch 0 from row 8 on)"
    assert repr(BatchOrder(rows, tokens=9, lengths=[1] * 10)) == "BatchOrder(10 rows, 9 tokens a batch, epoch 0)"
    loader = prefetch(DataLoader(rows, batch_sampler=BatchOrder(rows, 4), collate_fn=collate), "cpu")
    assert repr(loader).startswith(
        "prefetch(DataLoader, cpu, 2 batches ahead, BatchOrder(10 rows, batches of 4, epoch 0))"
    )
    next(iter(loader))
    assert "2 batches ahead, batch 1, BatchOrder" in repr(loader)
    assert repr(prefetch([1, 2], "cpu", slots=3)).startswith("prefetch(list, cpu, 3 slots)")
    with RowWriter(tmp_path / "t", like=rows[:1]) as writer:
        writer.write(rows[:3])
        assert repr(writer) == f"RowWriter({str(tmp_path / 't')!r}, 3 rows, 3 not flushed)"
        writer.flush()
        assert repr(writer) == f"RowWriter({str(tmp_path / 't')!r}, 3 rows)"
    assert repr(writer) == f"RowWriter({str(tmp_path / 't')!r}, 3 rows, closed)"
    assert repr(JoinedRows([rows, rows])) == "JoinedRows(20 rows of 2 dicts, 160 B)"


class TestFind:
    def test_rows_by_field(self) -> None:
        nan = math.nan
        d = DeviceDict(
            {
                "x": [[1.0, nan], [2.0, 3.0], [nan, nan]],
                "n": {"y": [1.0, nan, 2.0], "ids": [1, 2, 3]},
                "r": Ragged.from_rows([[1.0], [], [2.0, nan]]),
                "box": Ragged.from_rows([torch.zeros(0, 2), torch.tensor([[1.0, nan]]), torch.zeros(1, 2)]),
                "name": ["a", "b", "c"],
                "loss": nan,
                "empty": torch.zeros(3, 0),
            }
        )
        found = d.find(torch.isnan)
        assert {key: rows.tolist() for key, rows in found.items()} == {
            "x": [0, 2], ("n", "y"): [1], "r": [2], "box": [1], "loss": [0],
        }  # fmt: skip
        assert all(rows.dtype is torch.int64 and rows.is_cpu for rows in found.values())
        assert all(key in d for key in found)
        assert not d.drop("x", "n", "r", "box", "loss").find(torch.isnan)
        assert not DeviceDict().find(torch.isnan)

    def test_fields_that_the_function_cannot_take(self) -> None:
        d = DeviceDict({"x": [[1.0, 2.0]], "y": [1.0]})
        assert d.find(lambda t: t[:, 1] > 1)["x"].tolist() == [0]
        with pytest.raises(
            TypeError, match=r"'x': find can call the function for no field; the error is: too many"
        ) as caught:
            d.find(lambda t: t[:, :, 9] > 1)
        assert isinstance(caught.value.__cause__, IndexError)
        with pytest.raises(TypeError, match=r"'s': find can call the function for no field; .*it has no numbers"):
            DeviceDict({"s": ["a"]}).find(torch.isnan)

    @pytest.mark.parametrize("function", [torch.abs, lambda t: True, lambda t: (t > 0).any(), lambda t: t[:1] > 0])
    def test_a_function_that_returns_anything_else(self, function: Any) -> None:
        with pytest.raises(
            TypeError, match=r"'x': expected a bool tensor for float32\[2\], got .*; give find a function"
        ):
            DeviceDict({"x": [1.0, 2.0]}).find(function)

    def test_one_copy_from_a_device(self, copies: Any) -> None:
        d = DeviceDict({"x": [1.0, math.nan], "r": Ragged.from_rows([[1.0], [math.nan]])}, device="sim")
        copies.clear()
        assert {key: rows.tolist() for key, rows in d.find(torch.isnan).items()} == {"x": [1], "r": [1]}
        assert copies["d2h"] == 1

    def test_out_of_memory_is_no_field_to_skip(self) -> None:
        def raises(_: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("full")

        with pytest.raises(torch.OutOfMemoryError):
            DeviceDict({"x": [1.0]}).find(raises)

    def test_find_with_an_encoder_of_another_dtype(self) -> None:
        d = DeviceDict({"s": ["a"]}, encoders={"s": Utf8(3)})
        d["s"] = torch.tensor([math.nan])
        assert d.find(torch.isnan)["s"].tolist() == [0]
