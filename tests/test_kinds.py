"""Each kind of field under each operation on rows, against plain lists of Python rows."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tensordict_lite import DeviceDict, JoinedRows, Ragged, StringEncoder, Utf8, Vocabulary, cat, collate, load, stack
from tensordict_lite._tree import kinds
from tensordict_lite._tree.fields import fields
from tensordict_lite.tables import RowWriter

ROWS = 6
Rows = list[Any]


class Kind:
    """A kind of field: Python rows, and the value that a dict takes for some rows."""

    def __init__(self, rows: Rows, value: Callable[[Rows], Any] = list, **options: Any) -> None:
        self.rows, self.value, self.options = rows, value, options

    def dict(self, rows: Rows, nested: bool) -> DeviceDict[Any]:
        value = self.value(rows)
        number = torch.arange(len(rows)) * 7 % ROWS
        return DeviceDict({"number": number, **({"n": {"x": value}} if nested else {"x": value})}, **self.options)


class Parts(StringEncoder):
    """Codes in a nested dict: eight bytes, and the length."""

    def encode(self, strings: Any) -> Any:
        codes = Utf8(8).encode(strings)
        return {"bytes": F.pad(codes, (0, 8 - codes.shape[1])), "length": torch.tensor(list(map(len, strings)))}

    def decode(self, codes: Any) -> list[str]:
        return Utf8(8).decode(codes["bytes"])


PARTS = Parts()


def ragged_strings(rows: Rows) -> Any:
    return collate([{"x": row} for row in rows], ragged=["x"])["x"] if rows else Ragged(torch.zeros(0).byte(), [0])


KINDS = {
    "numbers": Kind([3, 1, 4, 1, 5, 9]),
    "rows of numbers": Kind([[i / 2, -1.0] for i in range(ROWS)], lambda rows: torch.tensor(rows).reshape(-1, 2)),
    "bools": Kind([True, False, True, True, False, False]),
    "strings": Kind(["Ada", "Bo", "", "Grace", "é", "Bo"]),
    "vocabulary": Kind(["a", "b", "a", "c", "b", "a"], encoders={"x": Vocabulary(["a", "b", "c"])}),
    "codes in a nested dict": Kind(["Ada", "Bo", "", "Grace", "é", "Bo"], encoders={"x": PARTS}),
    "lists of strings": Kind([["a", "bc"], ["", "d"]] * 3),
    "ragged": Kind([[1, 2], [], [3], [4, 5, 6], [7], []], Ragged.from_rows),
    "ragged boxes": Kind([[[1.0, 2.0]] * n for n in (1, 2, 3, 1, 2, 4)], Ragged.from_rows),
    "ragged strings": Kind(["Ada", "Bo", "", "Grace", "é", "Bo"], ragged_strings, encoders={"x": Utf8()}),
    "objects": Kind([("p", i) for i in range(ROWS)], objects="keep"),
}
"""The kinds of fields. Each has six rows."""


def read(d: Any, nested: bool) -> Rows:
    """The rows of the field."""
    return [row["n"]["x"] if nested else row["x"] for row in d.rows.tolist()]


def table(kind: Kind, nested: bool, folder: Path, parts: int) -> Any:
    """A table of the rows, or of its two halves."""
    like = kind.dict(kind.rows, nested)
    found: list[Any] = []
    for i in range(parts):
        with RowWriter(folder / str(i), like=like) as writer:
            step = ROWS // parts
            writer.write(kind.dict(kind.rows[i * step : (i + 1) * step], nested))
        found.append(load(folder / str(i)))
    return found


INDEX = [4, 0, 5, 0]
MASK = [True, False, False, True, True, False]


def sorted_rows(rows: Rows) -> Rows:
    return [row for _, row in sorted(enumerate(rows), key=lambda pair: pair[0] * 7 % ROWS)]


OPERATIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Rows], Rows]]] = {
    "all": (lambda d: d, lambda rows: rows),
    "slice": (lambda d: d.rows[1:5], lambda rows: rows[1:5]),
    "slice with a step": (lambda d: d.rows[::2], lambda rows: rows[::2]),
    "indices": (lambda d: d.rows[INDEX], lambda rows: [rows[i] for i in INDEX]),
    "mask": (lambda d: d.rows[MASK], lambda rows: [row for row, kept in zip(rows, MASK, strict=True) if kept]),
    "no rows": (lambda d: d.rows[[]], lambda rows: []),
    "batches": (lambda d: cat(list(d.rows.batches(4))), lambda rows: rows),
    "split": (lambda d: cat(d.rows.split([1, 5])[::-1]), lambda rows: [*rows[1:], rows[0]]),
    "sort": (lambda d: d.rows.sort_by("number"), sorted_rows),
    "group": (lambda d: cat(list(d.rows.group_by("number").values())), sorted_rows),
    "shuffled batches": (lambda d: cat(list(d.rows.batches(4, shuffle=True))).rows.sort_by("number"), sorted_rows),
    "shuffle": (lambda d: d.rows.shuffle().rows.sort_by("number"), sorted_rows),
    "cat": (lambda d: cat([d, d.rows[:0], d.rows[2:4]]), lambda rows: [*rows, *rows[2:4]]),
    "torch.cat": (lambda d: torch.cat([d, d.rows[:1]]), lambda rows: [*rows, rows[0]]),
    "clone": (lambda d: d.clone(), lambda rows: rows),
    "to": (lambda d: d.to("cpu", copy=True), lambda rows: rows),
    "pack": (lambda d: d.pack(), lambda rows: rows),
    "pickle": (lambda d: pickle.loads(pickle.dumps(d)), lambda rows: rows),
    "pickle 5 of rows": (lambda d: pickle.loads(pickle.dumps(d.rows[1:5], 5)), lambda rows: rows[1:5]),
    "fill": (lambda d: d.rows[[5, 4, 3, 2, 1, 0]].fill_(d), lambda rows: rows),
    "pickled rows": (lambda d: pickle.loads(pickle.dumps(d.rows))[1:5], lambda rows: rows[1:5]),
    "joined": (lambda d: JoinedRows([d, d.rows[:2]])[[7, 0]], lambda rows: [rows[1], rows[0]]),
    "joined slice": (lambda d: JoinedRows([d.rows[:2], d.rows[2:]])[1:4], lambda rows: rows[1:4]),
}  # fmt: skip
"""Operations that take a dict and give a dict, and what they do to a list of rows."""


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_read(kind: str, operation: str, nested: bool) -> None:
    do, expected = OPERATIONS[operation]
    made, rows = KINDS[kind], KINDS[kind].rows
    assert read(made.dict(rows, nested), nested) == rows
    assert read(do(made.dict(rows, nested)), nested) == expected(rows)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_one_by_one(kind: str, nested: bool) -> None:
    made = KINDS[kind]
    d = made.dict(made.rows, nested)
    batch = collate(list(d.rows), ragged=[("n", "x") if nested else "x"] * (kind.startswith("ragged")))
    assert read(batch, nested) == made.rows
    if not kind.startswith("ragged"):
        assert read(stack([d.rows[i] for i in range(ROWS)]), nested) == made.rows
        if kind != "codes in a nested dict":  # this encoder decodes flat lists only
            assert read(stack([d, d.rows[[5, 4, 3, 2, 1, 0]]]), nested) == [made.rows, made.rows[::-1]]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("index", "places"),
    [(slice(1, 4), [1, 2, 3]), ([4, 0], [4, 0]), (MASK, [0, 3, 4]), (slice(4, 4), []), (slice(None), range(ROWS))],
)
@pytest.mark.parametrize("kind", KINDS)
def test_write(kind: str, index: Any, places: Any, nested: bool) -> None:
    """The rows that are written have the lengths of those that they replace, as ragged fields ask for."""
    made = KINDS[kind]
    reversed_cells: Any = {list: lambda row: row[::-1], str: lambda row: row[::-1], tuple: lambda row: row[::-1]}
    new = [reversed_cells.get(type(row), lambda row: row)(row) for row in made.rows]
    d = made.dict(made.rows, nested)
    given = made.dict(new, nested).rows[list(places)]
    d.rows[index] = given
    assert read(d, nested) == [new[i] if i in places else row for i, row in enumerate(made.rows)]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("objects", "codes in a nested dict")])
def test_tables(kind: str, nested: bool, tmp_path: Path) -> None:
    made = KINDS[kind]
    (whole,) = table(made, nested, tmp_path / "whole", 1)
    parts = table(made, nested, tmp_path / "parts", 2)
    assert read(whole, nested) == made.rows == read(cat(parts), nested)
    assert read(JoinedRows(parts)[INDEX], nested) == [made.rows[i] for i in INDEX]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_iterate_over_many_rows(kind: str, grad: bool) -> None:
    """Iteration makes the views of 64 rows at once."""
    made = KINDS[kind]
    rows = made.rows * 30
    with torch.set_grad_enabled(grad):
        got = [row["x"] for row in made.dict(rows, nested=False).rows]
    if kind in ("numbers", "rows of numbers", "bools"):
        assert [one.tolist() for one in got] == rows
    elif kind.startswith("ragged"):
        assert list(map(len, got)) == [len(row.encode() if isinstance(row, str) else row) for row in rows]
    assert len(got) == len(rows) and (kind != "objects" or got == rows)


def test_a_kept_list_has_an_item_for_each_row_and_a_tuple_belongs_to_all() -> None:
    wrong = DeviceDict({"x": torch.zeros(3), "n": {"names": ["a", "b"]}}, objects="keep")
    message = re.escape(
        "'n.names': expected a kept list with an item for each of the 3 rows, got 2; make it a tuple to keep it whole"
    )
    for use in (lambda: len(wrong.rows), lambda: wrong.rows[0], wrong.rows.tolist):
        with pytest.raises(ValueError, match=f"^{message}$"):
            use()
    names = (("a", 1), ("b", 2))
    d: Any = DeviceDict({"x": torch.tensor([1, 2, 3]), "names": names}, objects="keep")
    assert d.rows[1:]["names"] is names is d.rows[[0, 1]]["names"] is d.rows[0]["names"]
    assert [row["names"] for row in d.rows] == [names] * 3 == [row["names"] for row in d.rows.tolist()]
    with pytest.raises(
        ValueError, match=r"^'names': expected the kept value of all rows, .* got \(1, 2\); rows cannot"
    ):
        d.rows[1:] = {"x": [0, 0], "names": (1, 2)}
    d.rows[1:] = {"x": [0, 0], "names": names}
    assert d["x"].tolist() == [1, 0, 0] and d["names"] is names


LOOKS: dict[str, tuple[str, list[str], list[Any]]] = {
    "numbers": ("int64[6]", ["3"], [6]),
    "rows of numbers": ("float32[6, 2]", ["[0, -1]"], [6, 2]),
    "bools": ("bool[6]", ["True"], [6]),
    "strings": ("uint8[6, 5]  Utf8()", ["Ada"], [6, 5]),
    "vocabulary": ("int64[6]  Vocabulary(['a', 'b', 'c'])", ["a"], [6]),
    "codes in a nested dict": ("<", ["uint8[8]", "3"], [6, 8]),
    "lists of strings": ("uint8[6, 2, 2]  Utf8()", ["[a, bc]"], [6, 2, 2]),
    "ragged": ("int64[6, *] of 7 values", ["[1, 2]"], [6, None]),
    "ragged boxes": ("float32[6, *, 2] of 13 values", ["float32[1, 2]"], [6, None, 2]),
    "ragged strings": ("uint8[6, *] of 14 values  Utf8()", ["Ada"], [6, None]),
    "objects": ("object list", ["(p, 0)"], []),
}
"""What the looks show: the line of the field, its cells in the first row, and its shape in a description."""


@pytest.mark.parametrize("kind", KINDS)
def test_looks(kind: str) -> None:
    line, cells, shape = LOOKS[kind]
    d = KINDS[kind].dict(KINDS[kind].rows, nested=False)
    assert re.search(rf"─ x +{re.escape(line)}", repr(d))
    assert re.split(" {2,}", repr(d.rows).splitlines()[2]) == ["0", "0", *cells]
    described = d.describe().tolist()[1]
    assert described.get("shape", []) == shape and ("object" in described) is (kind == "objects")
    assert ("encoder" in described) is ("Utf8" in line or "Vocabulary" in line)


def test_every_kind_of_the_package_is_here() -> None:
    seen = {type(field.kind) for made in KINDS.values() for field in fields(made.dict(made.rows, nested=True))}
    known = {kind for kind in vars(kinds).values() if isinstance(kind, type) and issubclass(kind, kinds.Kind)}
    assert seen == known - {kinds.Kind}
