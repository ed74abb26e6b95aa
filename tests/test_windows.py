"""`rows.windows`: what a loop over the offsets of each row would gather, with a mask of what lies in the sequence."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import check_invariants, fails
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tensordict_lite import (
    BatchOrder,
    DeviceDict,
    MissingKeyError,
    Ragged,
    TypedDeviceDict,
    Vocabulary,
    collate,
    load,
    prefetch,
)
from tensordict_lite.tables import RowWriter

OFFSETS = st.lists(st.integers(-4, 4), min_size=1, max_size=4)


def series(episodes: list[int], **more: Any) -> DeviceDict:
    count = len(episodes)
    obs = {"x": torch.arange(2.0 * count).view(count, 2), "name": [f"n{i}" for i in range(count)]}
    return DeviceDict({"episode": torch.tensor(episodes), "obs": obs, "action": torch.arange(count), **more})


def by_hand(episodes: list[int], at: int, offsets: Any) -> tuple[list[int], list[bool]]:
    """The rows of a window, and which of them lie in the sequence."""
    rows: list[int] = []
    inside: list[bool] = []
    for offset in offsets:
        row = at
        while row != at + offset:
            step = 1 if offset > 0 else -1
            if not 0 <= row + step < len(episodes) or episodes[row + step] != episodes[at]:
                break
            row += step
        rows.append(row)
        inside.append(row == at + offset)
    return rows, inside


class TestWindows:
    def test_it_shows_what_is_written_later(self) -> None:
        d = series([0, 0, 1, 1])
        windows = d.rows.windows({"action": [-1, 0, 1]}, within="episode")
        assert windows[[1, 2]]["mask", "action"].tolist() == [[True, True, False], [False, True, True]]
        d["episode"][2] = 0
        assert windows[[1, 2]]["mask", "action"].tolist() == [[True, True, True], [True, True, False]]
        d.update(series([0, 0, 0, 0, 0, 2]))
        assert len(windows) == 6 and windows[4]["action"].tolist() == [3, 4, 4]

    def test_the_default_device_does_not_matter(self) -> None:
        d = series([0, 0, 1, 1])
        with torch.device("meta"):
            windows = d.rows.windows({"action": [-1, 0, 1]}, within="episode")
            assert windows[2]["action"].tolist() == [2, 2, 3]

    @settings(max_examples=60)
    @given(st.lists(st.integers(0, 1), min_size=1, max_size=12), OFFSETS, OFFSETS, st.data())
    def test_each_is_that_of_a_loop(self, episodes: list[int], of: Any, ahead: Any, data: st.DataObject) -> None:
        d = series(episodes)
        windows = d.rows.windows({("obs", "x"): of, "action": ahead}, within="episode")
        indices = data.draw(st.lists(st.integers(-len(episodes), len(episodes) - 1), min_size=1, max_size=5))
        batch = collate(windows.__getitems__(indices))
        check_invariants(batch)
        assert len(windows) == len(episodes) and list(batch) == ["episode", "obs", "action", "mask"]
        assert batch.decode(("obs", "name")) == [f"n{i % len(episodes)}" for i in indices]
        assert batch["episode"].tolist() == [episodes[i] for i in indices]
        assert windows[indices] == batch and windows[1:] == collate(windows.__getitems__(range(1, len(episodes))))
        for i, index in enumerate(indices):
            rows, inside = by_hand(episodes, index % len(episodes), of)
            assert torch.equal(batch["obs", "x"][i], d["obs", "x"][rows])
            assert batch["mask", "obs", "x"][i].tolist() == inside
            rows, inside = by_hand(episodes, index % len(episodes), ahead)
            assert batch["action"][i].tolist() == rows and batch["mask", "action"][i].tolist() == inside
            assert windows[index] == batch.rows[i]

    def test_a_nested_dict_and_all_fields(self) -> None:
        d = series([0, 0, 0])
        batch = collate(d.rows.windows({"obs": range(-1, 1)}).__getitems__([0, 2]))
        assert batch["obs", "x"].tolist() == [[[0, 1], [0, 1]], [[2, 3], [4, 5]]]
        assert batch.decode(("obs", "name")) == [["n0", "n0"], ["n1", "n2"]]
        assert batch["mask"].tolist() == {"obs": [[False, True], [True, True]]}
        only = d.select("action").rows.windows({"action": [0, 1]}, mask="real")[2]
        assert only.tolist() == {"action": [2, 2], "real": {"action": [True, False]}}

    def test_sequences(self, device: torch.device) -> None:
        """By numbers or strings; the same value in two places is two sequences. On an accelerator too."""
        d = series([7, 7, 3, 7], task=["a", "b", "b", "b"]).to(device)
        for within, rows in (("episode", [0, 1, 2, 3]), ("task", [0, 2, 3, 3]), (None, [1, 2, 3, 3])):
            batch = collate(d.rows.windows({"action": [1]}, within=within).__getitems__([0, 1, 2, 3]))
            assert batch.device == device
            expected = [1, 1, 2, 3] if within == "episode" else rows
            assert batch["action"].flatten().tolist() == expected

    def test_strings_at_the_top_level(self) -> None:
        d = DeviceDict({"task": ["a", "b", "c"], "s": ["x", "yy", "z"]}, encoders={"task": Vocabulary(["a", "b", "c"])})
        batch = collate(d.rows.windows({"task": range(2), "s": range(-1, 1)}).__getitems__([0, 2]))
        assert batch.tolist() == {
            "task": [["a", "b"], ["c", "c"]],
            "s": [["x", "x"], ["yy", "z"]],
            "mask": {"task": [[True, True], [True, False]], "s": [[False, True], [True, True]]},
        }

    def test_kept_objects_and_typed_dicts(self) -> None:
        class Step(TypedDeviceDict, objects="keep"):
            x: torch.Tensor
            note: object

        step = Step(x=torch.arange(3), note=[None, {1}, None])
        batch = collate(step.rows.windows({"x": [-1, 0]}).__getitems__([2, 1]))
        assert batch["x"].tolist() == [[1, 2], [0, 1]] and batch["note"] == [None, {1}]

    @pytest.mark.parametrize("workers", [0, 1])
    def test_a_table_on_disk_through_an_order(self, workers: int, tmp_path: Path) -> None:
        episodes = [i // 7 for i in range(40)]
        with RowWriter(tmp_path / "t", like=series(episodes)) as writer:
            writer.write(series(episodes))
        windows = load(tmp_path / "t").rows.windows({"action": range(3)}, within="episode")
        order = BatchOrder(windows, 8, shuffle=True)
        found: list[int] = []
        for batch in prefetch(DataLoader(windows, batch_sampler=order, num_workers=workers, collate_fn=collate), "cpu"):
            assert batch["action"].tolist() == [by_hand(episodes, int(i), range(3))[0] for i in batch["action"][:, 0]]
            found += batch["action"][:, 0].tolist()
        assert sorted(found) == list(range(40))
        assert pickle.loads(pickle.dumps(windows))[5]["action"].tolist() == [5, 6, 6]

    @pytest.mark.parametrize(("spans", "options", "error", "message"), [
        ([], {}, TypeError, "windows takes a mapping from keys to offsets, got a list"),
        ({}, {}, TypeError, "windows takes a mapping from keys to offsets, got a mapping"),
        ({"action": 3}, {}, TypeError, "'action': windows takes a range or a list of ints, got 3"),
        ({"action": [0.5]}, {}, TypeError, "'action': windows takes a range or a list of ints, got [0.5]"),
        ({"action": range(0)}, {}, ValueError, "'action': windows takes at least one offset, got range(0, 0)"),
        ({"nope": [0]}, {}, MissingKeyError, "nope"),
        ({"action": [0]}, {"within": "nope"}, MissingKeyError, "nope"),
        ({"action": [0]}, {"within": "obs"}, TypeError, "within= takes a dense tensor"),
        ({"action": [0]}, {"mask": "episode"}, ValueError, "'episode' is a field already; give windows another name"),
        ({"obs": [0], ("obs", "x"): [0]}, {}, ValueError, "'obs.x' and 'obs' are windows of the same field"),
        ({("obs", "x"): [0], "obs": [0]}, {}, ValueError, "'obs' and 'obs.x' are windows of the same field"),
        ({"k": [0]}, {}, TypeError, "'k': windows takes rows of one shape, got a list"),
        ({"j": [0]}, {}, TypeError, "'j': windows takes rows of one shape, got a Ragged"),
    ])  # fmt: skip
    def test_errors(self, spans: Any, options: Any, error: type[Exception], message: str) -> None:
        ragged = Ragged.from_rows([torch.ones(1), torch.ones(2), torch.ones(3)])
        d = DeviceDict({**series([0, 0, 1]), "j": ragged, "k": [None] * 3}, objects="keep")
        fails(error, re.escape(message), lambda: d.rows.windows(spans, **options))

    def test_rows_that_are_not_there(self) -> None:
        windows = series([0, 0]).rows.windows({"action": [0]})
        fails(IndexError, "row 2 is out of range, there are 2", lambda: windows[2])
        fails(TypeError, "rows are indexed by int, slice, mask or indices", lambda: windows["x"])
        with pytest.raises(TypeError, match="__getitems__ takes a mask or indices, got int"):
            windows.__getitems__(1)  # pyright: ignore[reportArgumentType]
        assert repr(windows) == "DeviceDict.rows.windows(2)"
        assert len(DeviceDict({"x": torch.ones(0, 2)}).rows.windows({"x": [0]})) == 0
