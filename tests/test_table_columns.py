"""Columns that are added to a table and dropped from it: at once or not at all, and the other columns stay."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from weakref import ref

import numpy as np
import pytest
import torch
from checks import fails
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from test_encoders import Words
from torch import Tensor

from tensordict_lite import DeviceDict, InvalidFileError, Ragged, Tokenizer, TypedDeviceDict, Utf8, Vocabulary, load
from tensordict_lite.tables import RowWriter, add_column, drop_column, load_parts, repair, verify
from tensordict_lite.tables import columns as table_columns
from tensordict_lite.tables import folder as table_folder
from tensordict_lite.tables import table as table_writer

pytestmark = [pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning"), pytest.mark.usefixtures("torch_mode")]

COUNT = 7
TIMES = int(os.environ.get("TIMES", "25"))
LIKE: dict[str, Any] = {"x": [0], "n": {"s": ["a"]}, "text": ["a"]}


def rows(first: int, count: int) -> dict[str, Any]:
    i = list(range(first, first + count))
    return {"x": i, "n": {"s": [f"{n}" for n in i]}, "text": [f"row {n}" * (n % 3) for n in i]}


def written(folder: Path, **options: Any) -> Path:
    with RowWriter(folder, like=LIKE, ragged=["text"], checksums=True, **options) as writer:
        writer.write(rows(0, 4))
        writer.flush()
        writer.write(rows(4, COUNT - 4))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def check_at_rest(folder: Path) -> None:
    """The table is whole, safetensors reads every file, and nothing else is in the folder."""
    verify(folder)
    assert '"open"' not in (folder / "table.json").read_text()
    columns = {path.stem for path in folder.iterdir()} - {"table", "checksums"}
    expected: set[str] = set()
    for key, value in load(folder).flatten().items():
        expected |= {f"{key}.values", f"{key}.offsets"} if isinstance(value, Ragged) else {key}
    assert columns == expected
    for path in folder.glob("*.safetensors"):
        with safe_open(str(path), "pt") as file:
            assert list(file.keys()) == [path.stem]


# --- values ---

VALUES: dict[str, tuple[list[Any], dict[str, Any], Any]] = {
    "tensors": ([torch.ones(3, 2, dtype=torch.float16), torch.zeros(4, 2)], {}, [[1.0, 1.0]] * 3 + [[0.0, 0.0]] * 4),
    "arrays": ([np.arange(5), np.arange(2, dtype=np.int32)], {}, [0, 1, 2, 3, 4, 0, 1]),
    "lists, and rows": ([[1, 2], *range(5)], {}, [1, 2, 0, 1, 2, 3, 4]),
    "with a gradient": ([torch.ones(7, requires_grad=True) * 2], {}, [2.0] * 7),
    "strings": ([["abc", "b"], ["é"] * 4, "x"], {}, ["abc", "b", "é", "é", "é", "é", "x"]),
    "an encoder": ([["a"] * 6, ["wide"]], {"encoders": Utf8(4)}, ["a"] * 6 + ["wide"]),
    "encoders": ([["u", "v", "u"], ["v"] * 4], {"encoders": {"new": Vocabulary(["u", "v"])}}, ["u", "v", "u", *"vvvv"]),
    "texts": ([["a", "", "long"], ["longer"] * 4], {"ragged": True}, ["a", "", "long"] + ["longer"] * 4),
    "boxes": ([[[], [[1, 2], [3, 4]]], [[[0, 0]]] * 5], {"ragged": True}, [[], [[1, 2], [3, 4]]] + [[[0, 0]]] * 5),
    "rows": ([[torch.ones(2), torch.ones(0), torch.zeros(1)], [torch.ones(1)] * 4], {"ragged": True},
             [[1.0, 1.0], [], [0.0]] + [[1.0]] * 4),
    "ragged": ([Ragged.from_rows([[1.0], [], [2.0, 3.0]]), [[], [], [4.0], [5.0]]], {},
               [[1.0], [], [2.0, 3.0], [], [], [4.0], [5.0]]),
    "dense ragged": ([torch.arange(14).view(7, 2)], {"ragged": True}, [[2 * n, 2 * n + 1] for n in range(7)]),
    "no texts": ([[], ["a", ""], (), ["b"] * 5, []], {"ragged": True}, ["a", "", *"bbbbb"]),
    "no lists": ([[], [[1], []], (), [[2, 3]] * 5, []], {"ragged": True}, [[1], [], *[[2, 3]] * 5]),
    "empty rows": ([[[], []], [[]] * 5], {"ragged": True}, [[]] * 7),
}  # fmt: skip


def plain(d: Any, key: str = "new") -> Any:
    """A field as a list of plain values: strings, numbers or lists."""
    return d[key].tolist() if key not in d._policy.encoders else d.decode(key)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("at", [(), ("n",), ("a", "b")])
def test_values(tmp_path: Path, name: str, at: tuple[str, ...]) -> None:
    path = (*at, "new")
    batches, options, expected = VALUES[name]
    before = contents(written(tmp_path / "t"))
    add_column(tmp_path / "t", path if at else "new", iter(batches), **options)
    check_at_rest(tmp_path / "t")
    table = load(tmp_path / "t")
    holder: Any = table[at] if at else table
    found = plain(holder)
    assert [each.tolist() if isinstance(each, Tensor) else each for each in found] == expected
    assert plain(table, "x") == list(range(COUNT)) and plain(table["n"], "s") == rows(0, COUNT)["n"]["s"]
    after = contents(tmp_path / "t")
    assert all(after[name] == data for name, data in before.items() if name.endswith(".safetensors"))
    drop_column(tmp_path / "t", path)
    check_at_rest(tmp_path / "t")
    assert set(before) == set(contents(tmp_path / "t")) and list(load(tmp_path / "t")) == ["x", "n", "text"]


def test_from_its_own_rows_one_batch_at_a_time(tmp_path: Path) -> None:
    folder = written(tmp_path / "t")
    model = torch.nn.Embedding(7, 3)  # its values do not depend on the number of rows, as those of a product may
    alive: list[int] = []

    def embeddings() -> Iterator[Tensor]:
        for batch in load(folder, keys=["x"]).rows.batches(2):
            assert "embedding" not in load(folder)
            alive.append(len(batch.rows))
            yield model(batch["x"])

    add_column(folder, ("n", "embedding"), embeddings())
    assert alive == [2, 2, 2, 1]
    table = load(folder)
    assert torch.equal(table["n", "embedding"], model(table["x"]).detach())
    first = load(folder, rows=3)
    assert torch.equal(first["n", "embedding"], table["n", "embedding"][:3]), "all rows, so the first rows too"


def test_it_keeps_no_batch_that_is_written(tmp_path: Path) -> None:
    with RowWriter(tmp_path / "t", like={"i": [0]}) as writer:
        writer.write({"i": range(6)})
    made: list[ref[Tensor]] = []
    alive: list[int] = []

    def batches() -> Iterator[Tensor]:
        for _ in range(3):
            alive.append(sum(one() is not None for one in made))
            batch = torch.ones(2)
            made.append(ref(batch))
            yield batch
            del batch

    add_column(tmp_path / "t", "y", batches())
    assert alive == [0, 1, 1], "only the batch that was written last"


def test_dicts_become_a_nested_dict(tmp_path: Path) -> None:
    folder = written(tmp_path / "t")
    add_column(folder, "copy", (batch.rows for batch in load(folder).rows.batches(3)))
    check_at_rest(folder)
    table = load(folder)
    assert table["copy"].decode("text") == table.decode("text") and table["copy"]["n"].decode("s") == list("0123456")
    drop_column(folder, ("copy", "n"))
    assert list(load(folder)["copy"]) == ["x", "text"]
    drop_column(folder, "copy")
    check_at_rest(folder)
    assert list(load(folder)) == ["x", "n", "text"]


def test_values_on_an_accelerator(tmp_path: Path, device: torch.device) -> None:
    folder = written(tmp_path / "t")
    add_column(folder, "y", (torch.full((n,), float(n)).to(device) for n in (3, 4)))
    add_column(folder, "r", [Ragged.from_rows([torch.ones(n) for n in range(COUNT)]).to(device)])
    table = load(folder)
    assert table["y"].tolist() == [3.0] * 3 + [4.0] * 4 and table["r"].lengths.tolist() == list(range(COUNT))
    assert table.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("batches", "rows"),
    [
        ([[torch.ones(n) for n in part] for part in (range(3), range(3, COUNT))], [[1.0] * n for n in range(COUNT)]),
        ([torch.ones(COUNT, 2)], [[1.0, 1.0]] * COUNT),
    ],
    ids=["rows", "rows of one length"],
)
def test_a_ragged_column_of_tensors(tmp_path: Path, batches: Any, rows: Any) -> None:
    folder = written(tmp_path / "t")
    add_column(folder, "r", batches, ragged=True)
    verify(folder)
    assert load(folder)["r"].tolist() == rows


# --- the table afterwards ---


def test_append_needs_the_new_key(tmp_path: Path) -> None:
    folder = written(tmp_path / "t")
    add_column(folder, "y", [[0.5] * COUNT])
    add_column(folder, "tag", [["a"] * COUNT], ragged=True)
    drop_column(folder, ("n", "s"))
    with RowWriter(folder, append=True) as writer:
        with pytest.raises(ValueError, match=r"^the given mapping lacks 'y', which the table has$"):
            writer.write({"x": [7], "text": ["t"], "tag": ["g"]})
        writer.write({"x": [7], "text": ["t"], "tag": ["g"], "y": [1.5]})
    verify(folder)
    table = load(folder)
    assert table["y"].tolist() == [0.5] * COUNT + [1.5] and table.decode("tag")[-1] == "g" and "n" not in table
    assert (folder / "checksums.jsonl").read_text().count("\n") == 5


def test_loaded_dicts_do_not_change(tmp_path: Path) -> None:
    folder = written(tmp_path / "t")
    before = load(folder)
    add_column(folder, "y", [[0] * COUNT])
    between = load(folder)
    drop_column(folder, "x")
    drop_column(folder, "text")
    add_column(folder, "x", [["other"] * COUNT])
    assert list(before) == ["x", "n", "text"] and list(between) == ["x", "n", "text", "y"]
    assert before["x"].tolist() == between["x"].tolist() == list(range(COUNT))
    assert before.decode("text") == rows(0, COUNT)["text"] and load(folder).decode("x") == ["other"] * COUNT
    assert not (folder / "text.values.safetensors").exists()


def test_a_typed_class(tmp_path: Path) -> None:
    class Before(TypedDeviceDict):
        x: Tensor
        n: DeviceDict[Any]
        text: Ragged

    class After(Before, on_mismatch="move"):
        y: Tensor

    folder = written(tmp_path / "t")
    assert len(Before.load(folder).rows) == COUNT
    fails(TypeError, "'y' is missing", lambda: After.load(folder))
    add_column(folder, "y", [torch.ones(COUNT)])
    found = After.load(folder)
    assert found.y.tolist() == [1.0] * COUNT and found.n.decode("s") == list("0123456")
    fails((TypeError, ValueError), "'y'", lambda: Before.load(folder))
    drop_column(folder, "y")
    assert len(Before.load(folder).rows) == COUNT


def test_options_and_encoders_stay(tmp_path: Path) -> None:
    encoders = {"s": Vocabulary(["cat", "dog"]), "t": Utf8(9)}
    like = DeviceDict({"s": ["cat"], "t": ["a"]}, encoders=encoders, on_mismatch="move", dtype=torch.float64)
    with RowWriter(tmp_path / "t", like=like) as writer:
        writer.write({"s": ["dog", "cat"], "t": ["a", "b"]})
    add_column(tmp_path / "t", "y", [[1.0, 2.0]])
    add_column(tmp_path / "t", ("deep", "s"), [["cat", "cat"]])
    table = load(tmp_path / "t")
    assert table._policy.on_mismatch == "move" and table["y"].dtype == torch.float64
    assert table._policy.encoders["s"] == encoders["s"] and table["deep"].decode("s") == ["cat", "cat"]
    drop_column(tmp_path / "t", "s")
    assert load(tmp_path / "t")["deep"].decode("s") == ["cat", "cat"], "another dict has the key"
    drop_column(tmp_path / "t", "deep")
    add_column(tmp_path / "t", "s", [["free", "text"]])  # the encoder was dropped with the last column of the key
    assert load(tmp_path / "t").decode("s") == ["free", "text"] and load(tmp_path / "t").decode("t") == ["a", "b"]


def test_a_table_with_an_encoder_that_load_does_not_build(tmp_path: Path) -> None:
    ids = Tokenizer(Words("a b c"))
    with RowWriter(tmp_path / "t", like=DeviceDict({"ids": ["a b"], "x": [0]}, encoders={"ids": ids})) as writer:
        writer.write({"ids": ["a b", "c a"], "x": [0, 1]})
    fails(InvalidFileError, r"'ids' was encoded with a .*; pass it", lambda: add_column(tmp_path / "t", "y", [[1, 2]]))
    add_column(tmp_path / "t", "y", [[1, 2]], encoders={"ids": ids})
    assert load(tmp_path / "t", encoders={"ids": ids}).decode("ids") == ["a b", "c a"]
    drop_column(tmp_path / "t", "x")
    drop_column(tmp_path / "t", "ids")
    assert load(tmp_path / "t")["y"].tolist() == [1, 2], "nothing needs the encoder any more"


def test_parts(tmp_path: Path) -> None:
    for part in range(2):
        written(tmp_path, part=part, parts=2)
    for part, d in enumerate(load_parts(tmp_path).parts):
        add_column(tmp_path / f"part-{part:05}", "y", (batch["x"] + 100 * part for batch in d.rows.batches(3)))
    joined = load_parts(tmp_path)
    assert joined[[8, 2]]["y"].tolist() == [101, 2] and len(joined) == 2 * COUNT
    drop_column(tmp_path / "part-00001", "y")
    fails(ValueError, r"^dict 1 lacks 'y', which dict 0 has$", lambda: load_parts(tmp_path))
    fails(IsADirectoryError, "no table", lambda: add_column(tmp_path, "y", [[1]]))


def test_a_table_without_rows(tmp_path: Path) -> None:
    RowWriter(tmp_path / "t", like=LIKE, ragged=["text"], checksums=True).close()
    add_column(tmp_path / "t", "y", [torch.empty(0, 3)])
    add_column(tmp_path / "t", "r", [torch.empty(0, 2)], ragged=True)
    check_at_rest(tmp_path / "t")
    with RowWriter(tmp_path / "t", append=True) as writer:
        writer.write({**rows(0, 2), "y": [[1, 2, 3]] * 2, "r": [[1.0], []]})
    check_at_rest(tmp_path / "t")
    assert load(tmp_path / "t")["r"].lengths.tolist() == [1, 0]


# --- errors ---

ERRORS: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
    ("x", [], {}, ValueError, "'x' is in this table already; drop_column removes it, or choose another key"),
    (("n", "s"), [], {}, ValueError, "'n.s' is in this table already; drop_column removes it, or choose another key"),
    (("text", "values"), [], {}, TypeError,
     "'text': expected a nested dict to put 'text.values' into, got a Ragged; delete or"),
    (("x", "y"), [], {}, TypeError, "'x': expected a nested dict to put 'x.y' into, got int64[0]; delete or rename"),
    (5, [], {}, TypeError, "keys are str, got 5 of type int; use '5'"),
    (["y"], [], {}, TypeError, "keys are str, got list"),
    ((), [], {}, KeyError, "a path needs at least one key, got ()"),
    ("y", [], {}, ValueError, "'y': there is no batch; the first batch gives the dtype and the shape"),
    ("y", [[1, 2], [3]], {}, ValueError, "'y': the table has 7 rows, and the batches have 3; the table is unchanged"),
    ("y", [[1, 2], [3] * 4], {}, ValueError, "'y': the table has 7 rows, and the batches have 6; the table is unch"),
    ("y", [[1]] * 8, {}, ValueError, "'y': the table has 7 rows, and the batches have 8 or more; the table is unch"),
    ("y", [[1] * 9], {}, ValueError, "'y': the table has 7 rows, and the batches have 9 or more; the table is unch"),
    ("y", torch.ones(7), {}, TypeError,
     "add_column takes an iterable of batches, got float32[7]; give [values] for on"),
    ("y", "abcdefg", {}, TypeError, "add_column takes an iterable of batches, got a str; give [values] for one batch"),
    ("y", 5, {}, TypeError, "add_column takes an iterable of batches, got an int; give [values] for one batch"),
    ("y", {"a": 1}, {}, TypeError, "add_column takes an iterable of batches, got a mapping; give [values] for one b"),
    ("y", [0.5] * 7, {}, ValueError,
     "'y': a batch has a dimension for the rows, got a float; for a single row or a whole column, give [values]"),
    ("y", [{"a": "abcdefg"}], {}, ValueError, "'y.a': a batch has a dimension for the rows, got a mapping; for a sing"),
    ("y", ["abcdefg"], {}, ValueError, "'y': a batch has a dimension for the rows, got a str; for a single row or"),
    ("y", [[1] * 7], {"ragged": True}, ValueError,
     "'y': a batch has a dimension for the rows and one in each row, got a list; for a single row or a whole column"),
    ("y", [{"a": [[1]] * 7}], {"ragged": True}, ValueError,
     "'y': ragged=True is for one field; in a mapping, give a Ragged for each field"),
    ("y", [{}], {}, ValueError, "'y': a column needs tensors, got a mapping without any"),
    ("y", [{"a": [1, 2], "b": [1]}], {}, ValueError, "'y.b' has 1 row, and 'y.a' has 2 rows"),
    ("y", [[1, 2], ["a", "b"]], {}, ValueError, "'y': expected numbers, got strings; encode them first"),
    ("y", [[1, 2], [0.5]], {}, ValueError, "'y': expected numbers that int64 can hold, got float32; convert it first"),
    ("y", [[[1]], [[1, 2]]], {}, ValueError, "'y': expected rows [..., 1] or one row [1], got int64[1, 2]"),
    (("n", "y"), [["a"], ["bb"]], {}, ValueError, "'n.y': a string takes 2 codes of Utf8(), the rows of this field"),
    (("n", "y"), [[1], {"a": [1]}], {}, ValueError, "'n.y': expected a tensor, got a mapping"),
    ("y", [[object()]], {}, TypeError, "'y': expected a tensor"),
    ("y", [torch.ones(7).to_sparse()], {}, TypeError, "'y': files take dense tensors, got one"),
    ("y", [torch.ones(7, device="meta")], {}, ValueError, "'y': expected a tensor with values, got one on meta"),
    ("y", [["a"]], {"encoders": {"z": Utf8()}}, KeyError, "'z' is not in this table"),
    ("y", [["a"]], {"encoders": 5}, TypeError, "an encoder has encode and decode, or is a callable; got an int: 5"),
    ("y", [["a"]], {"encoders": {"s": Vocabulary(["a"])}}, ValueError, "'n.s' of this table is encoded with "),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_errors_of_add_column(tmp_path: Path, number: int) -> None:
    key, batches, options, kind, message = ERRORS[number]
    before = contents(written(tmp_path / "t"))
    with pytest.raises(kind) as caught:
        add_column(tmp_path / "t", key, batches, **options)
    assert str(caught.value).startswith(message)
    assert contents(tmp_path / "t") == before
    add_column(tmp_path / "t", "y", [[1] * COUNT])  # no lock remains


@pytest.mark.parametrize(("key", "kind", "message"), [
    ("test", KeyError, "'test' is not in this table; did you mean 'text'?"),
    (("n", "t"), KeyError, "'n.t' is not in this table: 'n' has no 't'; its keys are 's'"),
    (("x", "y"), KeyError, "'x.y' is not in this table: 'x' is a tensor, not a nested dict; it is d['x']"),
    (("text", "values"), KeyError,
     "'text.values' is not in this table: 'text' is a Ragged, not a nested dict; it is d['text'].values"),
    (5, TypeError, "keys are str, got 5 of type int; use '5'"),
    ([], TypeError, "keys are str, got list"),
    ((), KeyError, "a path needs at least one key, got ()"),
])  # fmt: skip
def test_errors_of_drop_column(tmp_path: Path, key: Any, kind: type[Exception], message: str) -> None:
    before = contents(written(tmp_path / "t"))
    with pytest.raises(kind) as caught:
        drop_column(tmp_path / "t", key)
    assert str(caught.value).startswith(message) and contents(tmp_path / "t") == before


def test_the_last_column_stays(tmp_path: Path) -> None:
    folder = written(tmp_path / "t")
    drop_column(folder, "x")
    drop_column(folder, "n")
    with pytest.raises(ValueError, match=r"^'text' has the last columns of this table; remove the folder '.*t'$"):
        drop_column(folder, "text")
    assert load(folder).decode("text") == rows(0, COUNT)["text"]


@pytest.mark.parametrize("error", [ValueError("of the model"), KeyboardInterrupt(), GeneratorExit()])
def test_an_error_of_the_batches(tmp_path: Path, error: BaseException) -> None:
    before = contents(written(tmp_path / "t"))

    def batches() -> Iterator[Any]:
        yield torch.ones(5, 1000)
        assert "y.safetensors" in os.listdir(tmp_path / "t")
        raise error

    with pytest.raises(type(error)):
        add_column(tmp_path / "t", "y", batches())
    assert contents(tmp_path / "t") == before


@pytest.mark.parametrize("work", [lambda f: add_column(f, "z", []), lambda f: drop_column(f, "x"), repair])
def test_one_writer_at_a_time(tmp_path: Path, work: Callable[[Path], object]) -> None:
    folder = written(tmp_path / "t")
    with RowWriter(folder, append=True), pytest.raises(BlockingIOError, match=r"is open in a RowWriter"):
        work(folder)

    def batches() -> Iterator[Any]:
        fails(BlockingIOError, r"is open in a RowWriter", lambda: work(folder))
        yield [0] * COUNT

    add_column(folder, "y", batches())
    assert list(load(folder)) == ["x", "n", "text", "y"]


@pytest.mark.parametrize("fails", [False, True])
def test_another_writer_where_locks_do_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    folder = written(tmp_path / "t")
    monkeypatch.setattr(table_folder.fcntl, "flock", refuse)

    def batches() -> Iterator[Any]:
        yield [0] * COUNT
        with RowWriter(folder, append=True) as writer:
            writer.write(rows(COUNT, 1))
        if fails:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError if fails else BlockingIOError):
        add_column(folder, "y", batches())
    check_at_rest(folder)
    assert len(load(folder).rows) == COUNT + 1 and "y" not in load(folder), "the other writer keeps its row"


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_process_leaves_the_column_to_its_parent(tmp_path: Path) -> None:
    folder, parent = written(tmp_path / "t"), os.getpid()

    def batches() -> Iterator[Any]:
        yield [0] * 3
        child = os.fork()
        if not child:
            raise ZeroDivisionError
        os.waitpid(child, 0)
        yield [0] * 4

    try:
        add_column(folder, "y", batches())
    finally:
        if os.getpid() != parent:
            os._exit(0)
    check_at_rest(folder)
    assert load(folder)["y"].tolist() == [0] * COUNT


# --- crashes ---


@pytest.mark.parametrize("name", ["y.safetensors", "checksums.jsonl", ".table.json.tmp", "t"])
def test_an_error_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder = written(tmp_path / "t")
    for call in ("fdatasync", "fsync"):
        plain_call: Callable[[int], None] = getattr(os, call)

        def fail(descriptor: int, plain_call: Callable[[int], None] = plain_call) -> None:
            if os.readlink(f"/proc/self/fd/{descriptor}").endswith(f"/{name}"):
                raise OSError(5, "Input/output error")
            plain_call(descriptor)

        monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="Input/output error; the table keeps the 7 rows of the last flush"):
        add_column(folder, "y", [[1] * COUNT])
    monkeypatch.undo()
    assert list(load(folder)) == ["x", "n", "text"]
    add_column(folder, "y", [[1] * COUNT])
    check_at_rest(folder)


def test_a_disk_that_is_full_at_the_end_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path / "t")
    before = sorted(os.listdir(folder))
    with monkeypatch.context() as patch:
        patch.setattr(table_writer.TableWriter, "_write", Mock(side_effect=OSError(28, "No space left on device")))
        fails(OSError, "No space left on device; the table keeps", lambda: add_column(folder, "y", [[1] * COUNT]))
    assert sorted(os.listdir(folder)) == before
    check_at_rest(folder)


def test_a_table_that_a_writer_left_is_repaired_first(tmp_path: Path) -> None:
    for number, work in enumerate([lambda f: add_column(f, "y", [[1] * COUNT]), lambda f: drop_column(f, "x")]):
        folder = tmp_path / str(number)
        writer = RowWriter(written(tmp_path / "w"), append=True)
        writer.write(rows(COUNT, 3))
        writer._table._write_buffers()  # rows that were not flushed
        shutil.copytree(tmp_path / "w", folder)
        writer._table.release()
        shutil.rmtree(tmp_path / "w")
        assert '"open"' in (folder / "table.json").read_text()
        work(folder)
        check_at_rest(folder)
        assert len(load(folder).rows) == COUNT


def change(folder: Path, seed: int) -> None:
    """Add and drop columns for ever."""
    table_writer.BUFFER = 20_000
    table_columns._RANGE = 50_000
    choose = random.Random(seed)
    while True:
        found = [key for key in load(folder) if key.startswith("new")]
        if found and choose.random() < 0.5:
            drop_column(folder, choose.choice(found))
        else:
            key = f"new{choose.randrange(10_000)}"
            with suppress(ValueError):
                add_column(folder, key, (torch.full((100, 50), int(key[3:])) for _ in range(COUNT)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_it_is_killed_at_any_moment(tmp_path: Path, record_property: Callable[[str, int], None]) -> None:
    """`TIMES=500 pytest tests/test_table_columns.py` for more."""
    record_property("kills", TIMES)
    folder = tmp_path / "t"
    with RowWriter(folder, like={"x": [0]}, checksums=True) as writer:
        writer.write({"x": torch.arange(100 * COUNT)})
    for seed in range(TIMES):
        pid = os.fork()
        if not pid:
            try:
                change(folder, seed)
            finally:
                os._exit(0)
        time.sleep(random.Random(seed).random() * 0.1)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        table = load(folder)
        assert torch.equal(table["x"], torch.arange(100 * COUNT))
        for key in table:
            assert key == "x" or torch.equal(table[key], torch.full((100 * COUNT, 50), int(key[3:])))
        verify(folder)
        if seed % 5 == 0:
            repair(folder)
            check_at_rest(folder)
            assert list(load(folder)) == list(table)


# --- checksums ---


def test_verify_names_the_column_and_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_columns, "_RANGE", 80)
    folder = written(tmp_path / "t")
    add_column(folder, "y", [[[n] * 5] for n in range(COUNT)])  # a range has two rows of 40 bytes
    add_column(folder, "r", [["é" * n] for n in range(COUNT)], ragged=True)
    whole = contents(folder)
    for name, at, message in [
        ("y.safetensors", 4096 + 40 * 3, "rows 2 to 3 of the column 'y' have changed: 'y.safetensors' is damaged"),
        ("y.safetensors", 4096 + 40 * 7 - 1, "rows 6 to 6 of the column 'y' have changed"),
        ("r.values.safetensors", 4096 + 41, "of the column 'r.values' have changed"),
        ("r.offsets.safetensors", 4096 + 16, "of the column 'r.offsets' have changed"),
        ("x.safetensors", 4096, "rows 0 to 3 of the column 'x' have changed"),
        ("y.safetensors", 30, "'y.safetensors' is no safetensors file with the 7 rows of 'y'"),
    ]:
        data = bytearray(whole[name])
        data[at] ^= 4
        (folder / name).write_bytes(data)
        fails(InvalidFileError, message, lambda: verify(folder))
        (folder / name).write_bytes(whole[name])
    verify(folder)


# --- any order of changes ---


@st.composite
def changes(draw: st.DrawFn) -> list[tuple[str, str, int]]:
    """What to do, with which column, and a number that its values follow from."""
    kinds = st.sampled_from(["add", "ragged", "fail", "drop", "append"])
    keys = st.sampled_from(["x", "y", "z", "n.a", "n.b", "n"])
    return draw(st.lists(st.tuples(kinds, keys, st.integers(0, 3)), min_size=1, max_size=7))


def values(kind: str, seed: int, count: int) -> list[Any]:
    return [["ab"[: (i + seed) % 3] for i in range(count)] if kind == "ragged" else [seed + i for i in range(count)]][0]


@pytest.fixture(scope="module")
def memory() -> Iterator[None]:
    """Nothing waits for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, lambda _: None)
        yield


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(changes())
def test_any_changes(tmp_path_factory: pytest.TempPathFactory, memory: None, steps: list[tuple[str, str, int]]) -> None:
    folder = tmp_path_factory.mktemp("any") / "t"
    with RowWriter(folder, like={"x": [0], "n": {"a": [0]}}, checksums=True) as writer:
        writer.write({"x": [0, 1, 2], "n": {"a": [0, 1, 2]}})
    model: dict[str, Any] = {"x": [0, 1, 2], "n.a": [0, 1, 2]}
    kinds = {"x": "add", "n.a": "add"}
    count = 3
    for kind, name, seed in steps:
        path = tuple(name.split("."))
        inside = [key for key in model if key == name or key.startswith(f"{name}.")]
        if kind == "append":
            with RowWriter(folder, append=True) as writer:
                writer.write(DeviceDict.unflatten({key: values(kinds[key], seed, 2) for key in model}))
            model = {key: before + values(kinds[key], seed, 2) for key, before in model.items()}
            count += 2
        elif kind == "drop":
            if not inside or len(inside) == len(model):
                with pytest.raises((KeyError, ValueError)):
                    drop_column(folder, path)
                continue
            drop_column(folder, path)
            model = {key: value for key, value in model.items() if key not in inside}
        else:
            given = values(kind, seed, count)
            batches = [given[:1], given[1:]] if kind != "fail" else [given[:1]]
            if kind == "fail" or path in load(folder):
                with pytest.raises(ValueError, match=r"the table has|in this table already"):
                    add_column(folder, path, batches)
            elif name != "n":
                add_column(folder, path, batches, ragged=kind == "ragged")
                model[name], kinds[name] = given, kind
        table = load(folder)
        verify(folder)
        assert len(table.rows) == count
        for key, expected in model.items():
            holder: Any = table["n"] if "." in key else table
            assert plain(holder, key.split(".")[-1]) == expected
        assert sorted(path for path in os.listdir(folder) if path.endswith(".safetensors")) == sorted(
            f"{key}{part}.safetensors"
            for key in model
            for part in ([".values", ".offsets"] if kinds[key] == "ragged" else [""])
        )
