"""Ragged fields of tables: rows of any length, as two files each. Text, numbers, damage."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import warnings
from contextlib import suppress
from itertools import pairwise
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from checks import check_invariants, fails
from files import write_index
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader

from tensordict_lite import DeviceDict, InvalidFileError, Ragged, TypedDeviceDict, Utf8, Vocabulary, cat, collate, load
from tensordict_lite.tables import RowWriter, add_column
from tensordict_lite.tables import table as table_writer

pytestmark = pytest.mark.usefixtures("torch_mode")

SPECIES = Vocabulary(["cat", "dog"])
LIKE: dict[str, Any] = {"text": ["a"], "n": {"ids": [[0]], "box": torch.zeros(1, 1, 2)}, "y": [0], "s": [["cat"]]}
KEYS = ["text", "ids", ("n", "box"), "s"]


def texts(count: int, first: int = 0) -> list[str]:
    return ["é" * (n % 4) + str(n) * (n % 3) for n in range(first, first + count)]


def sample(count: int, first: int = 0) -> dict[str, Any]:
    """Rows whose values follow from their number, as lists."""
    i = range(first, first + count)
    return {
        "text": texts(count, first),
        "n": {"ids": [list(range(n % 5)) for n in i], "box": [torch.full((n % 3, 2), float(n)) for n in i]},
        "y": list(i),
        "s": [["cat"] * (n % 2) + ["dog"] for n in i],
    }


def plain(d: DeviceDict[Any]) -> Any:
    return {**d.drop("s").tolist(), "s": d.decode("s")}


def expected(count: int, first: int = 0) -> Any:
    made = sample(count, first)
    return {**made, "n": {**made["n"], "box": [row.tolist() for row in made["n"]["box"]]}}


def new(folder: Path, **options: Any) -> RowWriter:
    return RowWriter(folder, like=LIKE, ragged=KEYS, encoders={"s": SPECIES}, **options)


def written(folder: Path, count: int = 3) -> Path:
    with new(folder) as writer:
        if count:
            writer.write(sample(count))
    return folder


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_writer, "BUFFER", 1000)


class TestRoundTrip:
    @pytest.mark.parametrize("sizes", [(3,), (1, 2, 3, 500, 7), (1000,), (1,) * 30, (5, 0, 5)])
    def test_batches_of_any_size(self, tmp_path: Path, small_buffers: None, sizes: tuple[int, ...]) -> None:
        with new(tmp_path / "t") as writer:
            for size in sizes:
                batch = sample(size, len(writer))
                if not size:
                    batch = load(written(tmp_path / "u")).rows[:0]
                writer.write(batch)
        found = load(tmp_path / "t")
        assert plain(found) == expected(sum(sizes)) and found.encoders == {"text": Utf8(), "s": SPECIES}
        check_invariants(found)

    def test_one_row_after_another(self, tmp_path: Path) -> None:
        whole = load(written(tmp_path / "t", 12))
        with new(tmp_path / "u") as writer:
            for row in whole.rows:
                writer.write(row)
            writer.write({"text": "é", "n": {"ids": [], "box": torch.zeros(0, 2)}, "y": 12, "s": []})
            writer.write({"text": "", "n": {"ids": [7, 8], "box": [[1, 2]]}, "y": 13, "s": ["dog"]})
        found = plain(load(tmp_path / "u"))
        assert {key: found[key][:12] for key in ("text", "y", "s")} == {
            key: expected(12)[key] for key in ("text", "y", "s")
        }
        assert found["text"][12:] == ["é", ""] and found["n"]["ids"][12:] == [[], [7, 8]]
        assert found["n"]["box"][12:] == [[], [[1, 2]]] and found["s"][12:] == [[], ["dog"]]

    def test_appending(self, tmp_path: Path, small_buffers: None) -> None:
        folder = written(tmp_path / "t")
        for first in (3, 103):
            with RowWriter(folder, append=True) as writer:
                writer.write(sample(100, first))
        assert plain(load(folder)) == expected(203)

    def test_batches_with_ragged_fields(self, tmp_path: Path) -> None:
        """A batch with ragged fields gives the columns, and is written; its views and copies too."""
        batch = collate([
            {"ids": [1, 2], "box": [[0.5]]},
            {"ids": [], "box": torch.zeros(0, 1)},
            {"ids": [3], "box": [[1.0], [2.0]]},
        ], ragged=["ids", "box"])  # fmt: skip
        with RowWriter(tmp_path / "t", like=batch) as writer:
            writer.write(batch)
            writer.write(batch.rows[1:])
            writer.write(batch.rows[torch.tensor([2, 0])])
            writer.write({"ids": Ragged.from_rows([[0, 1], [], [10]]), "box": batch["box"].to(torch.float64)})
            writer.write(batch.rows[0])
        found = load(tmp_path / "t").tolist()
        assert found["ids"] == [[1, 2], [], [3], [], [3], [3], [1, 2], [0, 1], [], [10], [1, 2]]
        assert found["box"][:3] == [[[0.5]], [], [[1], [2]]] == found["box"][-4:-1] and found["box"][-1] == [[0.5]]

    def test_columns_are_what_a_batch_has(self, tmp_path: Path) -> None:
        """Ragged fields need no mention, and a table is its own schema."""
        found = load(written(tmp_path / "t"))
        with RowWriter(tmp_path / "u", like=found) as writer:
            writer.write(found)
        again = load(tmp_path / "u")
        assert again == found and type(again["n", "box"]) is Ragged and again["text"].max_length == 6
        assert again.rows[[2, 1]].clone() == found.rows[[2, 1]]

    def test_padded_codes_lose_their_padding(self, tmp_path: Path) -> None:
        d = DeviceDict({"text": ["Ada", "", "Grace", "é"]})
        with RowWriter(tmp_path / "t", like=d, ragged=["text"]) as writer:
            writer.write(d)
            writer.write(d.rows[0])
            writer.write({"text": np.array(["NumPy", "x"])})
            writer.write({"text": ("tuple",)})
        found = load(tmp_path / "t")
        assert found.decode("text") == ["Ada", "", "Grace", "é", "Ada", "NumPy", "x", "tuple"]
        assert found["text"].values.numel() == sum(len(s.encode()) for s in found.decode("text"))

    def test_codes_without_padding_stay(self, tmp_path: Path) -> None:
        with RowWriter(tmp_path / "t", like={"ids": [[1]]}, ragged=["ids"]) as writer:
            writer.write({"ids": [[1, 0], [0, 0]]})
            writer.write({"ids": torch.zeros(1, 3, dtype=torch.int32)})
        assert load(tmp_path / "t").tolist() == {"ids": [[1, 0], [0, 0], [0, 0, 0]]}

    def test_one_long_text_takes_no_room_in_other_rows(self, tmp_path: Path) -> None:
        long = "x" * 5_000_000
        with RowWriter(tmp_path / "t", like={"text": ["a"]}, ragged=["text"]) as writer:
            writer.write({"text": ["a", long, *["b"] * 300]})
        found = load(tmp_path / "t")
        assert found.rows[1].decode("text") == long and found["text"].values.numel() == 5_000_301

    def test_no_rows(self, tmp_path: Path) -> None:
        new(tmp_path / "t").close()
        found = load(tmp_path / "t")
        assert len(found.rows) == 0 and type(found["text"]) is Ragged and found.rows[:].decode("text") == []
        for name in ("text.values", "text.offsets", "n.ids.values"):  # a writer that was killed may have left files out
            (tmp_path / "t" / f"{name}.safetensors").unlink()
        assert len(load(tmp_path / "t").rows) == 0
        with RowWriter(tmp_path / "t", append=True) as writer:
            writer.write(sample(2))
        assert plain(load(tmp_path / "t")) == expected(2)

    @pytest.mark.parametrize("x", [None, 0, 2])
    def test_a_list_of_strings_is_a_batch(self, tmp_path: Path, x: int | None) -> None:
        """Without strings it has no rows. It was one empty row."""
        like: dict[str, Any] = {"text": ["a"], **({} if x is None else {"x": [0.0]})}
        with RowWriter(tmp_path / "t", like=like, ragged=["text"]) as writer:
            for texts in ([], (), ["é", ""], []):
                count = len(texts)
                if x in (None, count):
                    writer.write({"text": texts, **({} if x is None else {"x": torch.zeros(count)})})
                else:
                    with pytest.raises(ValueError, match=rf"^'x' has {x} rows, and 'text' has {count} rows$"):
                        writer.write({"text": texts, "x": torch.zeros(x)})
        assert load(tmp_path / "t").decode("text") == (["é", ""] if x != 0 else [])

    @pytest.mark.parametrize("encoder", [Vocabulary(["cat", "dog"]), Utf8(3)])
    def test_a_row_is_a_list_of_strings(self, tmp_path: Path, encoder: Any) -> None:
        with RowWriter(tmp_path / "t", like={"s": [["cat"]]}, ragged=["s"], encoders={"s": encoder}) as writer:
            for row in ([], ["dog"], ["cat", "dog"]):
                writer.write({"s": row})
            writer.write({"s": [["cat"], []]})
        assert load(tmp_path / "t").decode("s") == [[], ["dog"], ["cat", "dog"], ["cat"], []]

    def test_rows_without_values(self, tmp_path: Path) -> None:
        with RowWriter(tmp_path / "t", like={"text": [""]}, ragged=["text"]) as writer:
            writer.write({"text": ["", ""]})
        found = load(tmp_path / "t")
        assert found.decode("text") == ["", ""] and found.rows[[1, 0, 1]].decode("text") == ["", "", ""]

    @pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
    @pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.bfloat16, torch.complex64, torch.complex128])
    def test_dtypes(self, tmp_path: Path, dtype: torch.dtype) -> None:
        x = torch.arange(12).reshape(2, 3, 2).to(dtype)
        with RowWriter(tmp_path / "t", like={"x": x}, ragged=["x"]) as writer:
            writer.write({"x": x})
            writer.write({"x": x[0]})
        found = load(tmp_path / "t")
        assert found["x"].values.dtype is dtype and torch.equal(found.rows[1]["x"], x[1]) and len(found.rows) == 3
        assert [row.tolist() for row in found.rows[[2, 1]]["x"].unbind()] == [x[0].tolist(), x[1].tolist()]

    def test_typed(self, tmp_path: Path) -> None:
        class Doc(TypedDeviceDict):
            text: Ragged
            y: Tensor

        with RowWriter(tmp_path / "t", like=collate([{"text": "a", "y": 1}], cls=Doc)) as writer:
            writer.write({"text": ["Grace", "Bo"], "y": [1, 2]})
        found = Doc.load(tmp_path / "t")
        assert type(found) is Doc and found.rows[[1, 0]].decode("text") == ["Bo", "Grace"]
        assert found.text.max_length == 5

    def test_keys_and_devices(self, tmp_path: Path) -> None:
        folder = written(tmp_path / "t")
        (folder / "n.ids.offsets.safetensors").unlink()
        assert load(folder, keys=["text"]).decode("text") == texts(3)
        assert load(folder, "meta", keys=["text", "y"])["text"].values.is_meta
        fails(InvalidFileError, r"the file 'n.ids.offsets.safetensors' is missing", lambda: load(folder))


class TestReaders:
    def test_other_programs_read_both_files(self, tmp_path: Path, small_buffers: None) -> None:
        folder = tmp_path / "t"
        new(folder).close()
        assert load_file(folder / "text.offsets.safetensors")["text.offsets"].tolist() == [0]
        with RowWriter(folder, append=True) as writer:
            for first in range(0, 900, 100):
                writer.write(sample(100, first))
                writer.flush()
                assert load(folder).decode("text") == texts(first + 100)
        values = load_file(folder / "text.values.safetensors")["text.values"].numpy().tobytes()
        ends = cast("list[int]", load_file(folder / "text.offsets.safetensors")["text.offsets"].tolist())
        assert [values[a:b].decode() for a, b in pairwise(ends)] == texts(900)

    def test_a_reader_keeps_its_view(self, tmp_path: Path, small_buffers: None) -> None:
        with new(tmp_path / "t") as writer:
            writer.write(sample(5))
            writer.flush()
            found = load(tmp_path / "t")
            writer.write(sample(300, 5))
            assert plain(found) == expected(5) == plain(load(tmp_path / "t"))
        assert plain(found) == expected(5) and plain(load(tmp_path / "t")) == expected(305)

    def test_rows_are_not_copies_of_the_column(self, tmp_path: Path) -> None:
        found = load(written(tmp_path / "t", 50))
        storage = found["text"].values.untyped_storage().data_ptr()
        assert found.rows[7]["text"].untyped_storage().data_ptr() == storage
        for i in (0, 49, -1, -50):
            assert found.rows[i].decode("text") == texts(50)[i]
        with pytest.raises(IndexError):
            found.rows[50]

    @pytest.mark.slow
    @pytest.mark.parametrize("method", ["fork", "forkserver"])
    @pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
    def test_workers(self, tmp_path: Path, method: str) -> None:
        rows: Any = load(written(tmp_path / "t", 40)).rows
        loader = DataLoader(rows, 16, num_workers=1, multiprocessing_context=method, collate_fn=collate)
        assert [text for batch in loader for text in batch.decode("text")] == texts(40)

    @pytest.mark.slow
    def test_another_process_gets_the_names_of_the_files(self, tmp_path: Path) -> None:
        with RowWriter(tmp_path / "t", like={"text": ["a"], "x": [0]}, ragged=["text"]) as writer:
            writer.write({"text": ["x" * 2000, "y"] * 1000, "x": [1] * 2000})
        found = load(tmp_path / "t")
        data = bytes(ForkingPickler.dumps(found.rows))
        assert len(data) < 30_000 < found["text"].values.nbytes  # the small columns go by value
        program = """
import pickle, sys, warnings
warnings.simplefilter("ignore")
rows = pickle.loads(sys.stdin.buffer.read())
assert len(rows) == 2000 and rows[1998].decode("text") == "x" * 2000 and rows[[1]].decode("text") == ["y"]
assert "/t/text.values.safetensors" in open("/proc/self/maps").read()
"""
        subprocess.run([sys.executable, "-c", program], input=data, check=True)
        again: Any = pickle.loads(ForkingPickler.dumps(found.rows))
        assert again[3].decode("text") == "y"
        found["text"].values[0] = 65  # a write is sent by value
        assert pickle.loads(ForkingPickler.dumps(found.rows))[0].decode("text") == "A" + "x" * 1999

    def test_a_dense_and_a_ragged_column_are_not_joined(self, tmp_path: Path) -> None:
        dense = written(tmp_path / "d", 2)
        other = {**load(dense), "text": torch.zeros(2, 1).byte()}
        for one, two, message in (
            (load(dense), other, r"^'text': dict 1 has uint8\[2, 1\], dict 0 has a Ragged"),
            (other, load(dense), r"^'text': dict 1 has a Ragged.*, dict 0 has uint8\[2, 1\]$"),
        ):
            with pytest.raises(ValueError, match=message):
                cat([one, two])


def test_the_default_device_changes_nothing(tmp_path: Path) -> None:
    torch.set_default_device("meta")
    try:
        with RowWriter(tmp_path / "t", like={"box": [[[0.0, 0.0]]], "text": [""]}, ragged=["box", "text"]) as writer:
            writer.write({"box": [[[1.0, 2.0]], []], "text": ["a", ""]})
    finally:
        torch.set_default_device(None)
    assert load(tmp_path / "t").decode("text") == ["a", ""]


class TestRefused:
    @pytest.mark.parametrize(("change", "message"), [
        ({"text": ["a", "b\0", "c"]}, r"^'text': 'b\\x00' holds a NUL character"),
        ({"text": ["a", "b"]}, "^'n.ids' has 3 rows, and 'text' has 2 rows$"),
        ({"text": torch.zeros(3).byte()}, r"^'n.ids' has 3 rows, and 'text' has no dimension for rows$"),
        ({"text": torch.zeros(3, 1, 1).byte()},
         r"^'text': expected rows \[..., \*\] or one row \[\*\], got uint8\[3, 1, 1\]$"),
        ({"n": {"ids": [[1], [2], [3]], "box": torch.zeros(3, 1, 3)}},
         r"^'n.box': expected rows \[..., \*, 2\] or one row \[\*, 2\], got float32\[3, 1, 3\]$"),
        ({"n": {"ids": [[1], 2, [3]], "box": torch.zeros(3, 1, 2)}},
         r"^'n.ids': row 1: expected int64\[\*\], as row 0, got int64\[\]; rows have"),
        ({"n": {"ids": [[1], [[2]], [3]], "box": torch.zeros(3, 1, 2)}},
         r"^'n.ids': row 1: expected int64\[\*\], as row 0, got int64\[1, 1\]; rows have"),
        ({"n": {"ids": [[1], [0.5], [3]], "box": torch.zeros(3, 1, 2)}},
         "^'n.ids': expected numbers that int64 can hold, got float32; convert it first$"),
        ({"n": {"ids": ["a", "b", "c"], "box": torch.zeros(3, 1, 2)}},
         "^'n.ids': expected numbers, got strings; encode them first$"),
        ({"n": {"ids": [["a"], ["b"], ["c"]], "box": torch.zeros(3, 1, 2)}},
         "^'n.ids': expected numbers, got strings; encode them first$"),
        ({"n": {"ids": None, "box": torch.zeros(3, 1, 2)}}, "^'n.ids': expected a tensor, .*, got a NoneType"),
        ({"s": [["cat"], ["cow"], []]}, "^'s': 'cow' is not among the 2 tokens"),
        ({"text": {"a": 1}}, "^'text': expected rows of any length, got a mapping$"),
        ({"text": torch.zeros(3, 2).to_sparse()}, "^'text': expected a dense tensor, got a sparse one"),
        ({"text": torch.zeros(3, 2, device="meta")}, "^'text': expected a tensor with values, got one on meta"),
        ({"y": torch.nested.as_nested_tensor([torch.zeros(2)] * 3, layout=torch.jagged)},
         "^'y': expected a dense tensor, got a nested one; convert it first$"),
    ])  # fmt: skip
    def test_a_batch_that_does_not_fit_is_refused_whole(self, tmp_path: Path, change: Any, message: str) -> None:
        with new(tmp_path / "t") as writer:
            writer.write(sample(3))
            fails((TypeError, ValueError), message, lambda: writer.write({**sample(3), **change}))
            assert len(writer) == 3
        assert plain(load(tmp_path / "t")) == expected(3)

    def test_the_limit_of_an_encoder(self, tmp_path: Path) -> None:
        options: Any = {"like": {"text": ["a"]}, "ragged": ["text"], "encoders": {"text": Utf8(3)}}
        with (
            RowWriter(tmp_path / "t", **options) as writer,
            pytest.raises(ValueError, match=r"^'text': 'Grace' is 5 bytes in UTF-8, over max_length=3"),
        ):
            writer.write({"text": ["Ada", "Grace"]})

    @pytest.mark.parametrize(("options", "error", "message"), [
        ({"ragged": "text"}, TypeError,
         r"^RowWriter takes a list of keys or paths as ragged=, as \[\"box\"\], got 'text'$"),
        ({"ragged": [3]}, TypeError, "^ragged= of RowWriter takes keys and paths, got 3$"),
        ({"ragged": ["txt"]}, KeyError, "'txt'.*text"),
        ({"ragged": ["y"]}, ValueError, r"^'y': rows of a ragged field have a dimension, like= has int64\[1\]$"),
        ({"ragged": ["text"], "like": None, "append": True}, TypeError,
         "^RowWriter takes ragged= with like=; a table that exists knows its ragged fields$"),
    ])  # fmt: skip
    def test_options(self, tmp_path: Path, options: Any, error: type[Exception], message: str) -> None:
        fails(error, message, lambda: RowWriter(tmp_path / "t", **{"like": LIKE, **options}))
        assert not (tmp_path / "t").exists()

    @pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
    def test_nested_tensors_of_torch(self, tmp_path: Path) -> None:
        rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        way_out = r"^'x': expected a field with rows, got a nested tensor; store Ragged.from_rows\(it\)$"
        fails(TypeError, way_out, lambda: RowWriter(tmp_path / "t", like={"x": rows}))
        assert not (tmp_path / "t").exists()
        with RowWriter(tmp_path / "t", like={"x": [[0.5]]}, ragged=["x"]) as writer:
            writer.write({"x": rows})
            writer.write({"x": Ragged.from_rows(rows)})
        assert load(tmp_path / "t").tolist() == {"x": [[1, 1], [1, 1, 1]] * 2}


def overwrite(folder: Path, name: str, position: int, number: int) -> None:
    with open(folder / f"{name}.safetensors", "r+b") as file:
        file.seek(4096 + 8 * position)
        file.write((number % (1 << 64)).to_bytes(8, "little"))


def refused(folder: Path, index: Any, message: str) -> None:
    write_index(folder, index)
    for call in (lambda: load(folder), lambda: RowWriter(folder, append=True)):
        with pytest.raises(InvalidFileError, match=message):
            call()


class TestDamaged:
    @pytest.mark.parametrize(("position", "number", "message"), [
        (0, 1, "'offsets': expected (0 as the first, got 1|ascending offsets, got 0 after 1 at row 0)"),
        (0, -1, "'offsets'(: expected 0 as the first, got -1| does not start at 0)"),
        (4, -1, "'offsets': expected ascending offsets, got -1 after 9 at row 3"),
        (4, -(1 << 63), "'offsets': expected ascending offsets, got -9223372036854775808 after 9 at row 3"),
        (4, 1 << 62, "'offsets': expected ascending offsets, got 16 after 4611686018427387904 at row 4"),
        (4, (1 << 32) + 4, "'offsets': expected ascending offsets, got 16 after 4294967300 at row 4"),
        (9, 1 << 40, r"has \d+ bytes, and 1099511627776 rows take 1099511631872"),
        (9, (1 << 63) - 1, r"has \d+ bytes, and 9223372036854775807 rows take"),
        (9, 0, "'offsets': expected ascending offsets, got 0 after 31 at row 8"),
        (9, -5, "-5"),
    ])  # fmt: skip
    def test_offsets(self, tmp_path: Path, position: int, number: int, message: str) -> None:
        folder = written(tmp_path / "t", 9)
        overwrite(folder, "text.offsets", position, number)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        for call in (lambda: load(folder), lambda: RowWriter(folder, append=True)):
            with pytest.raises(InvalidFileError, match=rf"not a valid file: 'text(\.\w+\.safetensors)?'.*{message}"):
                call()
        assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
        assert plain(load(folder, keys=["n", "s"]))["n"] == expected(9)["n"]

    @pytest.mark.parametrize(("name", "size"), [("text.offsets", 4096 + 79), ("text.values", 4096 + 3)])
    def test_a_file_that_is_too_short(self, tmp_path: Path, name: str, size: int) -> None:
        folder = written(tmp_path / "t", 9)
        whole = (folder / f"{name}.safetensors").read_bytes()
        os.truncate(folder / f"{name}.safetensors", size)
        for call in (lambda: load(folder), lambda: RowWriter(folder, append=True)):
            with pytest.raises(InvalidFileError, match=f"'{name}.safetensors' has {size} bytes"):
                call()
        (folder / f"{name}.safetensors").write_bytes(whole)
        assert plain(load(folder)) == expected(9)

    @pytest.mark.parametrize(("column", "change", "message"), [
        (0, {"kind": None}, "'kind' of a column is not a str"),
        (0, {"kind": "rows"}, "the values and the offsets of a ragged field are not side by side"),
        (0, {"kind": "offsets"}, "the kind of the column 'text.values' is damaged"),
        (1, {"kind": "rows"}, "the values and the offsets of a ragged field are not side by side"),
        (1, {"kind": "values"}, "the values and the offsets of a ragged field are not side by side"),
        (1, {"dtype": "int32"}, "the kind of the column 'text.offsets' is damaged"),
        (1, {"shape": [1]}, "the kind of the column 'text.offsets' is damaged"),
        (1, {"file": "../x"}, r"'../x' is no name of a column file"),
        (1, {"file": "text.values.safetensors"}, "two columns have the same file"),
        (1, {"file": "Y.safetensors"}, "two columns have the same file"),
        (1, {"extra": 1}, "expected a column with the fields file, name, dtype, shape, kind, id"),
    ])  # fmt: skip
    def test_a_forged_index(self, tmp_path: Path, column: int, change: Any, message: str) -> None:
        folder = written(tmp_path / "t")
        index = json.loads((folder / "table.json").read_text())
        index["columns"][column] |= change
        refused(folder, index, message)

    def test_a_forged_tree(self, tmp_path: Path) -> None:
        """The manifest and the columns may disagree about which fields are ragged."""
        folder = written(tmp_path / "t")
        whole = (folder / "table.json").read_text()
        for entry in (
            [0, 1, -1], [0, 1, True], [0, 1, "3"], [0, 1, 1.0], [0, 1, []], [0, 1], [], [-1, 1, 3], [0, {}, 3],
        ):  # fmt: skip
            index = json.loads(whole)
            index["manifest"]["root"]["items"][0][1] = entry
            refused(folder, index, "'text' is not described as a ragged field: by the numbers of its tensors and ")
        index = json.loads(whole)
        index["manifest"]["root"]["items"][0][1][2] = 1 << 40  # not trusted: found anew
        write_index(folder, index)
        assert load(folder)["text"].max_length == 6
        for entry, message in (
            ([1, 0, 6], "'text': 'offsets': expected int32 or int64 .*, got uint8"),  # the columns in the wrong places
            ([0, 0, 6], "its tree contains a tensor twice"),
            (0, "its tree does not contain each of the 9 tensors exactly once"),
        ):
            index["manifest"]["root"]["items"][0][1] = entry
            refused(folder, index, message)

    @pytest.mark.slow
    def test_random_damage(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Any change of any byte gives a table or `InvalidFileError`, for readers and for writers."""
        for name in ("fsync", "fdatasync"):  # they take most of the time
            monkeypatch.setattr(os, name, lambda _: None)
        whole = written(tmp_path / "whole", 9)
        chance = random.Random(0)
        files = sorted(path.name for path in whole.iterdir() if "text" in path.name or "ids" in path.name)
        refused = 0
        for _ in range(300):
            folder = tmp_path / "t"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(whole, folder)
            name = chance.choice([*files, "table.json"])
            data = bytearray((folder / name).read_bytes())
            data_at = 4096 if name != "table.json" else 0
            for _ in range(chance.choice((1, 1, 3))):
                start, end = chance.choice([(data_at, len(data)), (0, min(200, len(data)))])
                if start < end:
                    at = chance.randrange(start, end)
                    data[at] = chance.choice((chance.randrange(256), 0, 255, 128))
            if chance.random() < 0.1:
                del data[chance.randrange(len(data)) :]
            (folder / name).write_bytes(data)
            try:
                found = load(folder)
                found.rows[:].clone()
                found.rows[torch.arange(len(found.rows)).flip(0)]
                if "text" in found and len(found.rows) and found["text"].values.dtype is torch.uint8:
                    with suppress(ValueError):  # of bytes that are no UTF-8
                        found.decode("text")
                with warnings.catch_warnings():
                    RowWriter(folder, append=True).close()
            except (InvalidFileError, IsADirectoryError):
                refused += 1
        assert 20 < refused < 290


FIRST: dict[str, Any] = {
    "lists": [[1, 2], [3]], "an empty list first": [[], [3]], "ints beside floats": [[1], [2.5, 3.0]],
    "tensors": [torch.ones(2), torch.ones(3)], "tuples": ([1, 2], [3]), "arrays": [np.ones(2), np.ones(3)],
    "an array of arrays": np.array([np.ones(2), np.ones(3)], dtype=object), "matrices": [torch.ones(2, 3), []],
    "an array of strings": np.array(["a", "bcd"], dtype=object), "strings": ["a", "bcd"],
    "lists of strings": [["a", "b"], ["c"]], "an empty list of strings": [[], ["c"]],
}  # fmt: skip


@pytest.mark.parametrize("rows", FIRST.values(), ids=FIRST)
def test_the_first_batch_may_be_like(tmp_path: Path, rows: Any) -> None:
    """`like=` takes every form of rows that `write` takes, and `add_column` too."""
    like = {"a": {"r": rows}, "n": [0, 1]}
    for name in ("r", ("a", "r")):
        with RowWriter(tmp_path / f"{name}", like=like, ragged=[name]) as writer:
            writer.write(like)
    with RowWriter(tmp_path / "r", like=like, ragged=["r"], mode="append") as writer:
        writer.write(like)
    with RowWriter(tmp_path / "t", like={"n": [0]}) as writer:
        writer.write({"n": [0, 1]})
    add_column(tmp_path / "t", "r", [rows], ragged=True)
    first = load(tmp_path / "t")["r"]
    check_invariants(load(tmp_path / "r"))
    assert load(tmp_path / "r")["a", "r"].tolist() == first.tolist() * 2
    assert load(tmp_path / "('a', 'r')")["a", "r"] == first
    assert first.lengths.tolist() == [len(row) for row in rows]
    if first.dtype != torch.uint8:
        assert first.tolist() == [torch.as_tensor(row, device="cpu").tolist() for row in rows]


def test_like_of_other_keys_than_the_table(tmp_path: Path) -> None:
    RowWriter(tmp_path / "t", like={"x": [1.0], "n": {"r": [[1]]}}, ragged=["r"]).close()
    rows = Ragged([1], [0, 1])
    for like, message in (
        ({"x": [1.0]}, "the given mapping lacks 'n', which the table has"),
        ({"x": [1.0], "n": {"s": [1]}}, "the given mapping lacks 'n.r', which the table has, and has 'n.s'"),
        ({"x": [1.0], "n": {"r": rows}, "y": rows}, "the given mapping has 'y', which the table lacks"),
        ({"x": [1.0], "n": {"r": [[1]]}},
         "'n.r': expected a ragged field as in this table, got a tensor of like= and ragged="),
    ):  # fmt: skip
        fails(ValueError, message, lambda like=like: RowWriter(tmp_path / "t", like=like, mode="append"))


def test_rows_of_like_that_do_not_fit(tmp_path: Path) -> None:
    for rows, message in (
        ([[1], [[2]]], r"^'a\.r': row 1: .*, got int64\[1, 1\]; rows have one dtype, and may differ in their first"),
        ([torch.ones(1), torch.ones(1).long()], r"^'a\.r': row 1: expected float32\[\*\], as row 0, got int64\[1\]"),
        ([[1], ["a"]], r"^'a\.r': row 1: expected numbers, got a list; collate\(samples, ragged=\[key\]\) encodes"),
        ([1, 2], r"^'a\.r': rows of a ragged field have a dimension, like= has int64\[2\]"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            RowWriter(tmp_path / "t", like={"a": {"r": rows}}, ragged=["r"])
