"""Tables in parts, and `JoinedRows`: several dicts as one dataset."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import fails
from files import DTYPES
from torch.utils.data import DataLoader

from tensordict_lite import BatchOrder, DeviceDict, JoinedRows, Ragged, Vocabulary, cat, collate, load
from tensordict_lite.tables import RowWriter, add_column, drop_column, join_parts, load_parts, repair, verify
from tensordict_lite.tables.table import TableWriter

pytestmark = [pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning"), pytest.mark.usefixtures("torch_mode")]

LARGE = (1 << 24) + 1
"""A number that float32 cannot hold."""

SIZES = (4, 0, 7, 1)
LIKE: dict[str, Any] = {"x": [0], "n": {"s": ["cat"]}, "text": [""]}


def rows(first: int, count: int) -> dict[str, Any]:
    i = list(range(first, first + count))
    names = [["cat", "dog"][n % 2] for n in i]
    return {"x": i, "n": {"s": names}, "text": ["é" * (n % 4) for n in i]}


def written(folder: Path) -> Path:
    first = 0
    for part, size in enumerate(SIZES):
        encoders = {"s": Vocabulary(["cat", "dog"])}
        with RowWriter(folder, like=LIKE, ragged=["text"], part=part, parts=len(SIZES), encoders=encoders) as writer:
            if size:
                writer.write(rows(first, size))
        first += size
    return folder


def plain(d: DeviceDict[Any]) -> dict[str, Any]:
    return {"x": d["x"].tolist(), "n": {"s": d["n"].decode("s")}, "text": d.decode("text")}


def expected(index: list[int]) -> dict[str, Any]:
    whole = rows(0, sum(SIZES))
    return {
        "x": [whole["x"][i] for i in index],
        "n": {"s": [whole["n"]["s"][i] for i in index]},
        "text": [whole["text"][i] for i in index],
    }


def test_any_index(tmp_path: Path) -> None:
    found = load_parts(written(tmp_path))
    assert len(found) == 12 and repr(found).startswith("JoinedRows(12 rows of 4 dicts, ") and len(found.parts) == 4
    for i in (0, 3, 4, 10, 11, -1, -12):
        assert found[i]["x"].item() == i % 12 and found[i].decode("text") == "é" * (i % 12 % 4)
    assert [row["x"].item() for row in found] == list(range(12))
    assert found[5]["x"].data_ptr() == found.parts[2].rows[1]["x"].data_ptr(), "a view"
    some = load_parts(tmp_path, keys=["x", ("n", "s")], encoders={"s": Vocabulary(["a", "b"])})
    assert some[5].tolist() == {"x": 5, "n": {"s": "b"}}
    for index in ([11, 0, 4, 4, 10, 3], [2, 1], [], [-1, -12], list(range(12))):
        for given in (index, torch.tensor(index, dtype=torch.int64)):
            assert plain(found[given]) == expected([i % 12 for i in index])
    assert plain(found[2:9:2]) == expected([2, 4, 6, 8]) and plain(found[torch.arange(12) > 9]) == expected([10, 11])
    for wrong, error in ((12, IndexError), ([-13], IndexError), ("x", TypeError), (0.5, TypeError)):
        with pytest.raises(error):
            found[wrong]
    with pytest.raises(TypeError, match=r"^__getitems__ takes a mask or indices, got int$"):
        found.__getitems__(3)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_as_a_dataset(tmp_path: Path, workers: int) -> None:
    found = load_parts(written(tmp_path))
    order = BatchOrder(len(found), 5, shuffle=True, seed=1)
    loader = DataLoader(found, batch_sampler=order, num_workers=workers, collate_fn=collate)
    batches = [(batch.is_packed, plain(batch)) for batch in loader]
    seen = [i for _, batch in batches for i in batch["x"]]
    assert sorted(seen) == list(range(12)) and batches[0][1] == expected(seen[:5])
    order.set_epoch(0)
    assert list(BatchOrder(found, 5, shuffle=True, seed=1)) == list(order)  # type: ignore[arg-type]


def test_it_is_sent_to_other_processes(tmp_path: Path) -> None:
    found = pickle.loads(pickle.dumps(load_parts(written(tmp_path), keys=["x", "n"])))
    assert found[[11, 2]]["x"].tolist() == [11, 2] and list(found[0]) == ["x", "n"]


def test_dicts_of_another_schema() -> None:
    one = DeviceDict({"x": [1], "s": ["a"]})
    joined = JoinedRows([one, DeviceDict({"x": [2], "s": ["wide"]}).rows, {"x": [3], "s": ["b"]}])
    assert joined[[2, 1]].decode("s") == ["b", "wide"]
    fails(ValueError, r"^dict 1 lacks 's', which dict 0 has$", lambda: JoinedRows([one, DeviceDict({"x": [1]})]))
    with pytest.raises(
        ValueError, match=r"^'x': dict 1 has int64\[1, 2\], dict 0 has int64\[1\]; the dtypes and dimensions must be"
    ):
        JoinedRows([one, DeviceDict({"x": [[1, 2]], "s": ["a"]})])
    fails(ValueError, r"needs at least one dict", lambda: JoinedRows([]))
    for key, kind in (("x", "str"), (("x", "y"), "tuple")):
        message = rf"^rows are .*, got {kind}; use d\[key\] for a field, and column\(key\) of JoinedRows$"
        fails(TypeError, message, lambda key=key: joined[key])


def test_one_table_of_the_parts(tmp_path: Path) -> None:
    written(tmp_path / "parts")
    join_parts(tmp_path / "parts", tmp_path / "whole")
    assert plain(load(tmp_path / "whole")) == expected(list(range(12)))
    fails(FileExistsError, r"has a table already", lambda: join_parts(tmp_path / "parts", tmp_path / "whole"))


def test_the_largest_width_of_strings(tmp_path: Path) -> None:
    for part, name in enumerate(["a", "wide", "be"]):
        with RowWriter(tmp_path / "parts", like={"n": {"s": [name]}}, part=part, parts=3) as writer:
            writer.write({"n": {"s": [name]}})
    join_parts(tmp_path / "parts", tmp_path / "whole")
    assert load(tmp_path / "whole")["n"].decode("s") == ["a", "wide", "be"]


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("method", ["append", "flush"])
def test_a_failed_join_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool, method: str
) -> None:
    written(tmp_path / "parts")
    if exists:
        (tmp_path / "whole").mkdir()
    real, calls = getattr(TableWriter, method), list[int]()

    def fail(*args: Any, **options: Any) -> None:
        real(*args, **options)
        calls.append(1)
        if len(calls) > 2 or method == "flush":
            raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(TableWriter, method, fail)
        fails(OSError, "the disk is full", lambda: join_parts(tmp_path / "parts", tmp_path / "whole"))
    assert (tmp_path / "whole").exists() == exists and not list(tmp_path.glob("whole/*"))
    join_parts(tmp_path / "parts", tmp_path / "whole")
    assert plain(load(tmp_path / "whole")) == expected(list(range(12)))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("ours", "theirs"), [("int32", "int64"), ("int64", "float32"), ("bfloat16", "float16")])
def test_parts_of_other_dtypes(tmp_path: Path, ours: str, theirs: str, ragged: bool) -> None:
    for part, dtype in enumerate((ours, ours, theirs)):
        batch = {"n": {"x": torch.ones(2 + part, 1, dtype=getattr(torch, dtype))}}
        with RowWriter(tmp_path / "parts", like=batch, ragged=["x"] * ragged, part=part, parts=3) as writer:
            writer.write(batch)
    sizes = ("4", "2") if ragged else ("4, 1", "2, 1")
    message = (
        rf"^'n.x': dict 2 has {theirs}\[{sizes[0]}\], dict 0 has {ours}\[{sizes[1]}\]; the dtypes and dimensions must "
        "be equal: convert one of them$"
    )
    dicts = [load(path) for path in sorted((tmp_path / "parts").iterdir())]
    for call in (
        lambda: load_parts(tmp_path / "parts"),
        lambda: JoinedRows(dicts),
        lambda: join_parts(tmp_path / "parts", tmp_path / "whole"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert not (tmp_path / "whole").exists()


@pytest.mark.parametrize("parts", [([[], []], [[LARGE], [1]]), ([[LARGE], [1]], [[], []])])
def test_a_part_without_values_does_not_decide_the_dtype(tmp_path: Path, parts: Any) -> None:
    for number, rows in enumerate(parts):
        like = {"x": rows, "s": ["", ""]}
        with RowWriter(tmp_path / "parts", like=like, ragged=["x", "s"], part=number, parts=2) as writer:
            writer.write({"x": rows, "s": ["a", "bc"]})
    join_parts(tmp_path / "parts", tmp_path / "whole")
    for found in (load(tmp_path / "whole"), load_parts(tmp_path / "parts")[:]):
        assert found["x"].values.dtype == torch.int64 and found.decode("s") == ["a", "bc"] * 2
        assert found["x"].tolist() == [*parts[0], *parts[1]]
    joined = load_parts(tmp_path / "parts")
    some = [joined[index] for index in ([0, 1], [2, 3], [1, 2], [], slice(0, 1), torch.zeros(4, dtype=torch.bool), 0)]
    values = [d["x"].values if isinstance(d["x"], Ragged) else d["x"] for d in [*some, *joined, *joined.parts]]
    assert all(one.dtype == torch.int64 for one in values), "in every batch, whatever parts its rows are from"


def test_a_dict_without_values_is_not_changed() -> None:
    empty, full = (DeviceDict({"n": {"x": Ragged.from_rows(rows)}, "y": [1, 2]}) for rows in ([[], []], [[1], [2]]))
    joined = JoinedRows([full, empty])
    found: Any = joined[2:]
    assert Ragged.from_rows([[]]).dtype == torch.float32 and joined.parts[0] is full
    assert empty["n", "x"].dtype == torch.float32 and found["n", "x"].dtype == torch.int64
    assert joined.parts[1]["y"] is empty["y"]


def test_offsets_of_other_dtypes() -> None:
    one, two = (collate([{"x": [n]}], ragged=["x"]) for n in (1, 2))
    field: Any = two["x"]
    field.offsets = field.offsets.long()
    assert JoinedRows([one, two])[[1, 0]].tolist() == {"x": [[2], [1]]}


def test_a_folder_of_parts_is_no_table(tmp_path: Path) -> None:
    message = r"no table: it has no table.json; it has parts, which load_parts reads as one dataset"
    for call in (load, verify, repair):
        with pytest.raises(IsADirectoryError, match=message):
            call(written(tmp_path / call.__name__))


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no parts; RowWriter\(folder, part=0, parts=1\) writes one$"):
        load_parts(tmp_path)
    wrong: list[tuple[Any, Any]] = [(-1, 2), (True, 2), ("0", 2), (2, 2), (0, None), (None, 1), (0, 0), (0, 2.0)]
    for part, parts in wrong:
        with pytest.raises(ValueError, match=r"^RowWriter takes part= and parts= together, .*; got part=.* and parts="):
            RowWriter(tmp_path, like=LIKE, part=part, parts=parts)


@pytest.mark.parametrize(("change", "error", "message"), [
    (lambda f: shutil.rmtree(f / "part-00001"), FileNotFoundError, r"has 3 of 4 parts; part 1 is missing$"),
    (lambda f: shutil.rmtree(f / "part-00003"), FileNotFoundError, r"has 3 of 4 parts; part 3 is missing$"),
    (lambda f: (f / "part-00001").rename(f / "part-1"), ValueError,
     r"part-1' is no part, whose name is 'part-00001'; remove or rename it$"),
    (lambda f: shutil.copytree(f / "part-00001", f / "part-000001"), ValueError,
     r"part-000001' is no part, whose name is 'part-00001'; remove or rename it$"),
    (lambda f: shutil.copytree(f / "part-00001", f / "part-00004"), ValueError,
     r"part-00004' is part 1 of 4, and no part 4 of 4; remove the parts of other runs$"),
    (lambda f: [RowWriter(f, like=LIKE, mode="overwrite", part=i, parts=2).close() for i in range(2)], ValueError,
     r"part-00002' is part 2 of 4, and no part 2 of 2; remove the parts of other runs$"),
    (lambda f: RowWriter(f / "part-00000", like=LIKE, mode="overwrite").close(), ValueError,
     r"part-00001' is part 1 of 4, and no part 1 of 0|part-00000' is no part, and no part 0 of"),
])  # fmt: skip
def test_parts_that_are_no_run(tmp_path: Path, change: Any, error: type[Exception], message: str) -> None:
    change(written(tmp_path / "parts"))
    for call in (lambda: load_parts(tmp_path / "parts"), lambda: join_parts(tmp_path / "parts", tmp_path / "whole")):
        with pytest.raises(error, match=message):
            call()
    assert not (tmp_path / "whole").exists()


def test_a_part_keeps_its_number(tmp_path: Path) -> None:
    folder = written(tmp_path / "parts")
    part = folder / "part-00002"
    with RowWriter(part, append=True) as writer:
        writer.write(rows(40, 1))
    with RowWriter(folder, append=True, part=2, parts=4) as writer:
        writer.write(rows(41, 1))
    encoders = {"s": Vocabulary(["cat", "dog"])}
    with RowWriter(folder, like=LIKE, ragged=["text"], mode="append", part=2, parts=4, encoders=encoders) as writer:
        writer.write(rows(42, 1))
    repair(part)
    add_column(part, "y", [[1] * 10])
    drop_column(part, "y")
    assert load_parts(folder).column("x")[-4:].tolist() == [40, 41, 42, 11]
    message = r"part-00002' is part 2 of 4, and RowWriter got part=2, parts=3; give the number of parts that it has"
    fails(ValueError, message, lambda: RowWriter(folder, append=True, part=2, parts=3))
    RowWriter(folder / "part-00004", like=LIKE).close()
    with pytest.raises(ValueError, match=r"part-00004' is no part, and RowWriter got part=4, parts=5; give "):
        RowWriter(folder, like=LIKE, mode="append", part=4, parts=5)


def killed(folder: Path, part: int, flushed: int) -> Path:
    """A part as a kill leaves it, with rows that were flushed and a row that was not."""
    writer = RowWriter(folder, like={"x": [0]}, part=part, parts=3)
    if flushed:
        writer.write({"x": range(flushed)})
        writer.flush()
    writer.write({"x": 9})
    writer._table.release()
    return folder / f"part-0000{part}"


@pytest.mark.parametrize("flushed", [0, 2])
def test_a_part_that_is_not_closed(tmp_path: Path, flushed: int) -> None:
    """Its rows after the last flush are missing, so a dataset of all parts must not hide it."""
    folder = tmp_path / "parts"
    RowWriter(folder, like={"x": [0]}, part=0, parts=3).close()  # a rank without rows
    parts = [killed(folder, 1, flushed), killed(folder, 2, 0)]
    for count, part in ((2, parts[0]), (1, parts[1])):
        said = (
            f"{count} of 3 parts are not closed: {str(part)!r} has only the {flushed if count > 1 else 0} rows of its "
            "last flush; wait for its writer, or if it was killed, write the part again, or keep these rows with "
            f"repair({str(part)!r})"
        )
        with pytest.warns(RuntimeWarning) as caught:
            assert len(load_parts(folder)) == flushed
        assert [(str(one.message), Path(one.filename).parent) for one in caught] == [(said, Path(__file__).parent)]
        with pytest.warns(RuntimeWarning) as caught:
            join_parts(folder, tmp_path / f"{count}")
        assert [str(one.message) for one in caught] == [said]
        repair(part) if count > 1 else RowWriter(folder, like={"x": [0]}, mode="overwrite", part=2, parts=3).close()
    assert len(load_parts(folder)) == flushed


def test_a_part_with_an_open_writer(tmp_path: Path) -> None:
    with RowWriter(tmp_path, like={"x": [0]}, part=0, parts=1) as writer:
        for rows in (0, 3):
            with pytest.warns(RuntimeWarning, match=rf"^1 of 1 parts are not closed: .* has only the {rows} rows of"):
                assert len(load_parts(tmp_path)) == rows
            writer.write({"x": [1, 2, 3]})
            writer.flush()
    assert len(load_parts(tmp_path)) == 6


def test_columns_of_all_parts(tmp_path: Path) -> None:
    found, whole = load_parts(written(tmp_path)), rows(0, sum(SIZES))
    assert found.column("x").tolist() == whole["x"] and found.column(("n", "s")).tolist() == [0, 1] * 6
    assert DeviceDict({"text": found.column("text")}).decode("text") == whole["text"]
    assert isinstance(found.column("text"), Ragged) and isinstance(found.column("n"), DeviceDict)
    assert plain(found[found.column("x") % 5 == 1]) == expected([1, 6, 11])
    assert plain(found[found.equal(("n", "s"), "dog")]) == expected([1, 3, 5, 7, 9, 11])
    assert found.equal("x", [3, 4, 99]).nonzero().flatten().tolist() == [3, 4]
    fails(ValueError, r"'n\.s': 'ox' is not among the 2 tokens", lambda: found.equal(("n", "s"), "ox"))
    fails(KeyError, r"'txt'.*did you mean 'text'", lambda: found.column("txt"))


SHAPES: list[tuple[int, ...]] = [(), (3,), (16,), (5, 7), (0,), (33,)]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_all_dtypes(tmp_path: Path, shape: tuple[int, ...], mapped: bool) -> None:
    """Fields of any alignment, with parts without rows: whether one call copies the rows or several."""
    dicts: list[DeviceDict[Any]] = []
    for size in (5, 0, 1, 30):
        values = torch.randint(0, 2, (size, *shape), dtype=torch.uint8)
        d = DeviceDict({"a": {name: values.to(dtype) for name, dtype in DTYPES.items()}, "b": torch.arange(size)})
        if mapped:
            with RowWriter(tmp_path / str(len(dicts)), like=d) as writer:
                writer.write(d)
            d = load(tmp_path / str(len(dicts)))
        dicts.append(d)
    found, whole = JoinedRows(dicts), cat(dicts)
    for index in ([35, 0, 5, 5, -1, 6], [], list(range(36)), torch.arange(36) % 2 == 1, slice(3, 9)):
        assert same(found[index], whole.rows[index])
    assert (found._spans() is not None) == (shape != (0,))


def test_rows_at_any_address() -> None:
    data = bytearray(range(100))
    found = JoinedRows([{"x": torch.frombuffer(data, dtype=torch.int32, count=4, offset=at)} for at in (3, 40)])
    whole = found.column("x")
    assert found._spans() is None and found[[7, 0, 5]]["x"].equal(whole[[7, 0, 5]])


def same(a: DeviceDict[Any], b: DeviceDict[Any]) -> bool:
    """Whether all bytes are equal: torch does not compare every dtype."""
    assert [*a["a"]] == [*b["a"]] and a["b"].equal(b["b"])
    return all(
        one.dtype is other.dtype
        and one.shape == other.shape
        and one.flatten().view(torch.uint8).equal(other.flatten().view(torch.uint8))
        for one, other in zip(a["a"].values(), b["a"].values(), strict=True)
    )


def test_a_field_that_is_replaced_shows(tmp_path: Path) -> None:
    found = JoinedRows([{"x": [1, 2], "n": {"y": [1, 2]}}, {"x": [3], "n": {"y": [3]}}])
    assert found[[2, 0]].tolist() == {"x": [3, 1], "n": {"y": [3, 1]}}
    found.parts[1]["x"] = torch.tensor([30])
    found.parts[0]["n"]["y"] = torch.tensor([10, 20])
    found.parts[0]["x"][1] = 20
    assert found[[2, 1, 0]].tolist() == {"x": [30, 20, 1], "n": {"y": [3, 20, 10]}}
    found.parts[0]["x"] = found.parts[0]["x"].float().requires_grad_()
    found.parts[1]["x"] = torch.tensor([5.0])
    assert found[[2, 0]]["x"].requires_grad == torch.is_grad_enabled()
    assert pickle.loads(pickle.dumps(found))[[2, 0]]["x"].tolist() == [5.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_worker_sends_rows_of_spans(method: str) -> None:
    found = JoinedRows([{"x": torch.arange(400.0).view(-1, 4) + i, "y": torch.arange(100)} for i in range(4)])
    loader = DataLoader(found, 64, num_workers=1, multiprocessing_context=method, collate_fn=collate)
    for i, batch in enumerate(loader):
        rows = list(range(64 * i, min(64 * i + 64, 400)))
        assert batch == found[rows] and found._spans() is not None


def test_progress(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []

    def note(done: int, total: int) -> None:
        calls.append((done, total))

    folder = written(tmp_path / "parts")
    load_parts(folder, progress=note)
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]
    calls.clear()
    join_parts(folder, tmp_path / "whole", progress=note)
    assert calls == [(4, 12), (11, 12), (12, 12)]
    calls.clear()
    add_column(tmp_path / "whole", "y", ([[n]] for n in range(12)), progress=note)
    assert calls == [(n + 1, 12) for n in range(12)]
    for checksums in (False, True):
        with RowWriter(tmp_path / f"{checksums}", like={"x": [0]}, checksums=checksums) as writer:
            writer.write({"x": range(300_000)})
        calls.clear()
        verify(tmp_path / f"{checksums}", progress=note)
        size = 4096 + 8 * 300_000
        assert calls[-1] == (size, size) and calls == sorted(calls) and (len(calls) > 2) == checksums
    with pytest.raises(TypeError, match="progress= is a function of"):
        verify(folder / "part-00000", progress=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ZeroDivisionError):
        verify(folder / "part-00000", progress=lambda done, total: 1 // 0)
