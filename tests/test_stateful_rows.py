"""Random programs on rows: fields of every kind against plain lists of Python rows, checked at every step."""

from __future__ import annotations

import copy
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import check_invariants
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tensordict_lite import DeviceDict, JoinedRows, Ragged, Utf8, Vocabulary, cat, collate, load, stack
from tensordict_lite.tables import RowWriter

DEVICES = ("cpu", "sim:0")
WORDS = ("a", "bc", "")
NUMBER = st.integers(-9, 9)
CELLS: dict[str, Any] = {
    "number": NUMBER,
    "pair": st.tuples(NUMBER, NUMBER).map(list),
    "flag": st.booleans(),
    "name": st.text("aé ", max_size=3),
    "word": st.sampled_from(WORDS),
    "names": st.tuples(st.text("aé", max_size=2), st.text("b", max_size=2)).map(list),
    "ragged": st.lists(NUMBER, max_size=3),
    "boxes": st.lists(st.tuples(NUMBER, NUMBER).map(list), max_size=3),
    "text": st.text("aé ", max_size=3),
    "words": st.lists(st.sampled_from(WORDS), max_size=3),
    "kept": st.tuples(st.just("p"), NUMBER),
}
"""A row of each kind of field, by its key. ``number`` is always there, so that a dict has rows."""
ENCODERS: dict[str, Any] = {
    "name": Utf8(), "names": Utf8(), "text": Utf8(), "word": Vocabulary(WORDS), "words": Vocabulary(WORDS),
}  # fmt: skip
RAGGED = frozenset({"ragged", "boxes", "text", "words"})
PATHS = st.builds(lambda key, nested: ("n", key) if nested else (key,), st.sampled_from([*CELLS][1:]), st.booleans())
Rows = list[Any]
Model = dict[tuple[str, ...], Rows]


def value_of(key: str, rows: Rows, device: str) -> Any:
    """What a dict takes for some rows of a field."""
    if key in ("text", "words", "ragged", "boxes"):
        codes: Any = rows
        if key == "text":
            codes = [list(row.encode()) for row in rows]
        elif key == "words":
            codes = [[WORDS.index(word) for word in row] for row in rows]
        values = torch.tensor(
            [one for row in codes for one in row], dtype=torch.uint8 if key == "text" else torch.int64
        )
        offsets = torch.tensor([0, *(len(row) for row in codes)]).cumsum(0)
        return Ragged(values.reshape(-1, 2) if key == "boxes" else values, offsets).to(device)
    if key in ("number", "pair", "flag"):
        value = torch.tensor(rows, dtype=torch.bool if key == "flag" else torch.int64, device=device)
        return value.reshape(-1, 2) if key == "pair" else value
    if key == "names" and not rows:
        return Utf8().encode([]).reshape(0, 2, 0).to(device)
    return list(rows)


def made(model: Model, device: str) -> Any:
    """A dict with the rows of the model."""
    d: Any = DeviceDict(encoders=ENCODERS, objects="keep", device=device)
    for path, rows in model.items():
        d[path] = value_of(path[-1], rows, device)
    return d


def at(row: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        row = row[key]
    return row


def rows_of(d: Any, paths: Any) -> Model:
    """The rows of a dict, as the model has them."""
    rows = d.rows.tolist()
    return {path: [at(row, path) for row in rows] for path in paths}


class Programs(RuleBasedStateMachine):
    @initialize(count=st.integers(0, 5), device=st.sampled_from(DEVICES), data=st.data())
    def start(self, count: int, device: str, data: Any) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.device, self.count = device, count
        self.model: Model = {("number",): self.drawn(data, "number", count)}
        self.d = made(self.model, device)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    def drawn(self, data: Any, key: str, count: int) -> Rows:
        return data.draw(st.lists(CELLS[key], min_size=count, max_size=count), label=key)

    def index(self, data: Any) -> tuple[Any, list[int]]:
        """An index of rows, and the rows in it."""
        count, kinds = self.count, ["slice", "mask", "indices", "tensor"]
        kind = data.draw(st.sampled_from(kinds if count else kinds[:2]), label="index")
        if kind == "slice":
            bound = st.none() | st.integers(-count - 1, count + 1)
            chosen = slice(data.draw(bound), data.draw(bound), data.draw(st.sampled_from([None, 1, 2])))
            return chosen, list(range(count))[chosen]
        if kind == "mask":
            mask = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
            return torch.tensor(mask, dtype=torch.bool), [i for i in range(count) if mask[i]]
        indices = data.draw(st.lists(st.integers(-count, count - 1), max_size=4))
        return torch.tensor(indices) if kind == "tensor" and indices else indices, [i % count for i in indices]

    def keep(self, places: list[int]) -> None:
        self.model = {path: [rows[i] for i in places] for path, rows in self.model.items()}
        self.count = len(places)

    # --- fields ---

    @rule(path=PATHS, data=st.data())
    def insert(self, path: tuple[str, ...], data: Any) -> None:
        self.model[path] = self.drawn(data, path[-1], self.count)
        self.d[path] = value_of(path[-1], self.model[path], self.device)

    @rule(path=PATHS, whole=st.booleans())
    def delete(self, path: tuple[str, ...], whole: bool) -> None:
        path = path[:1] if whole else path
        gone = [known for known in self.model if known[: len(path)] == path]
        if not gone and path not in self.d:
            with pytest.raises(KeyError):
                del self.d[path]
            return
        del self.d[path]
        for known in gone:
            del self.model[known]

    # --- rows ---

    @rule(data=st.data())
    def take(self, data: Any) -> None:
        index, places = self.index(data)
        self.d = self.d.rows[index]
        self.keep(places)

    @rule(data=st.data(), how=st.sampled_from(["dict", "values", "one row"]))
    def write(self, data: Any, how: str) -> None:
        """Rows of ragged fields keep their lengths, and strings fit into their field; else nothing changes."""
        index, places = self.index(data)
        if how == "one row":
            if not self.count:
                return
            index = data.draw(st.integers(-self.count, self.count - 1))
            places = [index % self.count]
        new = {path: self.drawn(data, path[-1], len(places)) for path in self.model}
        if data.draw(st.booleans(), label="same lengths"):
            for path in new:
                if path[-1] in (*RAGGED, "name", "names"):
                    cells = [self.model[path][i] for i in places]
                    new[path] = [cell[::-1] for cell in cells]
        given: Any = made(new, self.device)
        if how == "values":
            given = {key: dict(value) if isinstance(value, DeviceDict) else value for key, value in given.items()}
        elif how == "one row":
            given = given.rows[0]
        before = copy.deepcopy(self.model)
        fits = True
        for path, rows in new.items():
            cells = [self.model[path][i] for i in places]
            if path[-1] in RAGGED:
                fits &= [len(_values(cell)) for cell in cells] == [len(_values(row)) for row in rows]
            elif path[-1] in ("name", "names"):
                width = at(self.d, path).shape[-1]
                fits &= all(
                    len(one.encode()) <= width for row in rows for one in ([row] if isinstance(row, str) else row)
                )
        if not fits:
            with pytest.raises(ValueError, match=r"rows keep their lengths|over|expected|wide|fit"):
                self.d.rows[index] = given
            assert self.model == before
            return
        self.d.rows[index] = given
        for path, rows in new.items():
            for i, row in zip(places, rows, strict=True):
                self.model[path][i] = row

    @rule(data=st.data(), how=st.sampled_from(["new", "own", "joined", "batches", "split"]))
    def join(self, data: Any, how: str) -> None:
        if how == "new":
            count = data.draw(st.integers(0, 2))
            more = {path: self.drawn(data, path[-1], count) for path in self.model}
            self.d = cat([self.d, made(more, self.device)]) if "n" not in self.d or self.nested() else self.d
            if "n" in self.d and not self.nested():
                return
            self.model = {path: [*rows, *more[path]] for path, rows in self.model.items()}
            self.count += count
        elif how == "batches":
            self.d = cat(list(self.d.rows.batches(2))) if self.count else self.d
        elif how == "split":
            at = data.draw(st.integers(0, self.count))
            self.d = cat(self.d.rows.split([at, self.count - at])[::-1])
            self.keep([*range(at, self.count), *range(at)])
        else:
            index, places = self.index(data)
            part = self.d.rows[index]
            if how == "own":
                self.d = cat([self.d, part])
                self.keep([*range(self.count), *places])
            else:
                self.d = JoinedRows([part, self.d])[:]
                self.keep([*places, *range(self.count)])
        while self.count > 12:
            self.d = self.d.rows[:6]
            self.keep([*range(6)])

    def nested(self) -> bool:
        return any(len(path) > 1 for path in self.model)

    @rule(descending=st.booleans())
    def sort(self, descending: bool) -> None:
        numbers = self.model["number",]
        self.d = self.d.rows.sort_by("number", descending=descending)
        self.keep(sorted(range(self.count), key=lambda i: -numbers[i] if descending else numbers[i]))

    @rule()
    def group(self) -> None:
        groups = self.d.rows.group_by("number")
        assert list(groups) == sorted(set(self.model["number",]))
        numbers = self.model["number",]
        for number, part in groups.items():
            places = [i for i in range(self.count) if numbers[i] == number]
            assert rows_of(part, self.model) == {path: [rows[i] for i in places] for path, rows in self.model.items()}

    @rule()
    def one_by_one(self) -> None:
        """The rows make the batch again. A row of strings without padding has its codes, so it is left out."""
        d = self.d.drop(*[path for path in self.model if path[-1] in ("text", "kept")])
        if not self.count:
            return
        paths = [path for path in self.model if path in d]
        batch = collate(list(d.rows), ragged=[path for path in paths if path[-1] in RAGGED])
        assert rows_of(batch, paths) == {path: self.model[path] for path in paths}
        dense = d.drop(*[path for path in paths if path[-1] in RAGGED])
        assert dense == stack(list(dense.rows)) == stack([dense, dense]).rows[1]

    # --- the whole dict ---

    @rule(there=st.sampled_from(DEVICES))
    def move(self, there: str) -> None:
        self.d, self.device = self.d.to(there), there

    @rule(how=st.sampled_from(["clone", "copy", "pickle", "pickle 5", "pack", "fill", "map", "rebuild"]))
    def same_again(self, how: str) -> None:
        before, host = self.d, self.d.cpu()
        if how.startswith("pickle"):
            self.d = pickle.loads(pickle.dumps(host, 5 if how[-1] == "5" else 2)).to(self.device)
        elif how == "fill":
            self.d = before.clone()
            assert self.d.fill_(before) is self.d
        elif how == "map":
            self.d = before.map(torch.clone)
        elif how == "rebuild":
            self.d = DeviceDict(dict(before), encoders=ENCODERS, objects="keep", device=self.device)
        else:
            self.d = getattr(before, how)()
        assert self.d == before

    @rule(how=st.sampled_from(["file", "table", "two writes", "row by row"]))
    def store(self, how: str) -> None:
        """Files have no kept objects."""
        kept = [path for path in self.model if path[-1] == "kept"]
        d = self.d.drop(*kept)
        paths = [path for path in self.model if path not in kept]
        folder = self.folder / f"{len(list(self.folder.iterdir()))}"
        if how == "file":
            d.save(folder)
        else:
            with RowWriter(folder, like=d) as writer:
                parts = [d] if how == "table" else [d.rows[:2], d.rows[2:]]
                for part in d.rows if how == "row by row" else parts:
                    writer.write(part)
        d = load(folder, device=self.device)
        assert rows_of(d, paths) == {path: self.model[path] for path in paths}

    # --- what must always hold ---

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "d"):
            return
        check_invariants(self.d)
        assert len(self.d.rows) == self.count
        assert rows_of(self.d, self.model) == self.model
        assert {"/".join(path) for path in self.model} <= set(self.d.flatten("/"))
        assert str(self.d.device) == self.device


def _values(row: Any) -> Any:
    """The values of a row of a ragged field: the bytes of a string."""
    return row.encode() if isinstance(row, str) else row


Programs.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
TestPrograms = Programs.TestCase
TestPrograms.pytestmark = [pytest.mark.slow]  # pyright: ignore[reportAttributeAccessIssue]
