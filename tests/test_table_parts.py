"""Tables in parts, and `JoinedRows`: several dicts as one dataset."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tensordict_lite import BatchOrder, DeviceDict, JoinedRows, Ragged, Vocabulary, collate, load
from tensordict_lite.tables import RowWriter, join_parts, load_parts, repair, verify
from tensordict_lite.tables.table import TableWriter

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning"),
    pytest.mark.usefixtures("torch_mode"),
]

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
        with RowWriter(folder, like=LIKE, ragged=["text"], part=part, encoders=encoders) as writer:
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
    assert len(found) == 12 and repr(found) == "JoinedRows(12 rows of 4 dicts)" and len(found.parts) == 4
    for i in (0, 3, 4, 10, 11, -1, -12):
        assert found[i]["x"].item() == i % 12 and found[i].decode("text") == "é" * (i % 12 % 4)
    assert [row["x"].item() for row in found] == list(range(12))
    assert found[5]["x"].data_ptr() == found.parts[2].rows[1]["x"].data_ptr(), "a view"
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
    assert found[[11, 2]]["x"].tolist() == [11, 2]


def test_dicts_of_another_schema() -> None:
    one = DeviceDict({"x": [1], "s": ["a"]})
    joined = JoinedRows([one, DeviceDict({"x": [2], "s": ["wide"]}).rows, {"x": [3], "s": ["b"]}])
    assert joined[[2, 1]].decode("s") == ["b", "wide"]
    with pytest.raises(ValueError, match=r"^dict 1 lacks 's', which dict 0 has$"):
        JoinedRows([one, DeviceDict({"x": [1]})])
    with pytest.raises(
        ValueError, match=r"^'x': dict 1 has int64\[1, 2\], dict 0 has int64\[1\]; the dtypes and dimensions must be"
    ):
        JoinedRows([one, DeviceDict({"x": [[1, 2]], "s": ["a"]})])
    with pytest.raises(ValueError, match=r"needs at least one dict"):
        JoinedRows([])


def test_one_table_of_the_parts(tmp_path: Path) -> None:
    written(tmp_path / "parts")
    join_parts(tmp_path / "parts", tmp_path / "whole")
    assert plain(load(tmp_path / "whole")) == expected(list(range(12)))
    with pytest.raises(FileExistsError, match=r"has a table already"):
        join_parts(tmp_path / "parts", tmp_path / "whole")


def test_the_largest_width_of_strings(tmp_path: Path) -> None:
    for part, name in enumerate(["a", "wide", "be"]):
        with RowWriter(tmp_path / "parts", like={"n": {"s": [name]}}, part=part) as writer:
            writer.write({"n": {"s": [name]}})
    join_parts(tmp_path / "parts", tmp_path / "whole")
    assert load(tmp_path / "whole")["n"].decode("s") == ["a", "wide", "be"]


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("method", ["append", "publish"])
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
        if len(calls) > 2 or method == "publish":
            raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(TableWriter, method, fail)
        with pytest.raises(OSError, match="the disk is full"):
            join_parts(tmp_path / "parts", tmp_path / "whole")
    assert (tmp_path / "whole").exists() == exists and not list(tmp_path.glob("whole/*"))
    join_parts(tmp_path / "parts", tmp_path / "whole")
    assert plain(load(tmp_path / "whole")) == expected(list(range(12)))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("ours", "theirs"), [("int32", "int64"), ("int64", "float32"), ("bfloat16", "float16")])
def test_parts_of_other_dtypes(tmp_path: Path, ours: str, theirs: str, ragged: bool) -> None:
    for part, dtype in enumerate((ours, ours, theirs)):
        batch = {"n": {"x": torch.ones(2 + part, 1, dtype=getattr(torch, dtype))}}
        with RowWriter(tmp_path / "parts", like=batch, ragged=["x"] * ragged, part=part) as writer:
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
        with RowWriter(tmp_path / "parts", like={"x": rows, "s": ["", ""]}, ragged=["x", "s"], part=number) as writer:
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
    assert (
        empty["n", "x"].dtype == torch.float32
        and found["n", "x"].dtype == torch.int64
        and joined.parts[1]["y"] is empty["y"]
    )


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
    with pytest.raises(FileNotFoundError, match=r"has no parts; RowWriter\(folder, part=0\) writes one$"):
        load_parts(tmp_path)
    wrong: tuple[Any, ...] = (-1, True, "0")
    for part in wrong:
        with pytest.raises(ValueError, match=r"^part= of RowWriter is a number from 0 on, such as a rank, got "):
            RowWriter(tmp_path, like=LIKE, part=part)
