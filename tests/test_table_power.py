"""A power failure at any moment: the table has the rows of the last flush that returned, or of the one that ran.

The same holds for a column that is added or dropped, and for parts that become one table.

A writer runs once, over files that record what it does. Then every moment is replayed. Until a file is flushed to disk,
the disk may have any of its pages and any of its sizes, in any order. Until a folder is flushed, the disk may have any
of its new, renamed and removed names. `CHOICES=200 pytest tests/test_table_power.py` replays more states.
"""

from __future__ import annotations

import io
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from checks import fails
from safetensors import safe_open

from tensordict_lite import InvalidFileError, load
from tensordict_lite._files import atomic_write  # pyright: ignore[reportPrivateUsage]
from tensordict_lite.tables import RowWriter, add_column, drop_column, join_parts, parts, repair, verify
from tensordict_lite.tables import columns as table_columns
from tensordict_lite.tables import folder as table_folder
from tensordict_lite.tables import table as table_writer

CHOICES = int(os.environ.get("CHOICES", "3"))
"""How many states of the disk are tried for each moment."""
PAGE = 512
"""The bytes that a disk writes at once."""
LIKE: dict[str, Any] = {"i": [0], "wide": [[0] * 40], "text": ["a"]}
RAGGED = {"text", "words"}


def rows(first: int, count: int, keys: Iterable[str] = LIKE) -> dict[str, Any]:
    """Rows whose values follow from their number."""
    i = list(range(first, first + count))
    values: dict[str, Any] = {
        "i": i, "wide": [[n] * 40 for n in i], "text": [f"row {n}" * (n % 3) for n in i], "late": [[n] * 30 for n in i],
        "words": [f"{n} " * (n % 5) for n in i],
    }  # fmt: skip
    return {key: values[key] for key in keys}


class Op(NamedTuple):
    """One change of the disk: a write, a size, a name, the flush of a file or a folder, or what the writer returned."""

    kind: str
    node: int
    """The file, or the folder of the name."""
    value: Any = None


class Recorder:
    """Records the changes below ``root``, and replays what a disk may have of them."""

    def __init__(self, root: Path) -> None:
        self.root, self.ops = root, list[Op]()
        self._nodes: dict[int, int] = {}
        self._new = 0
        self.top = self._node(os.stat(root))

    def acknowledged(self, folder: Path, count: int, keys: Iterable[str] = LIKE) -> None:
        """A call returned that left a table with these rows and keys."""
        self.ops.append(Op("returned", 0, (folder, (set(keys), count))))

    def _node(self, found: os.stat_result, fresh: bool = False) -> int:
        """The number of a file or folder. An inode is used again after its file is removed."""
        if fresh or found.st_ino not in self._nodes:
            self._new += 1
            self._nodes[found.st_ino] = self._new
        return self._nodes[found.st_ino]

    def _name(self, path: Any, folder: int | None) -> tuple[int, str]:
        parent = os.fstat(folder) if folder is not None else os.stat(os.path.dirname(path))
        return self._node(parent), os.path.basename(path)

    @contextmanager
    def recording(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        recorder, ops = self, self.ops
        replace, unlink, mkdir, opened = os.replace, os.unlink, os.mkdir, os.open

        def record_open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            descriptor = opened(path, flags, mode, dir_fd=dir_fd)
            if flags & os.O_EXCL:
                folder, name = recorder._name(path, dir_fd)
                ops.append(Op("name", folder, {name: recorder._node(os.fstat(descriptor), fresh=True)}))
            return descriptor

        def record_replace(old: Any, new: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
            folder, source = recorder._name(old, src_dir_fd)
            node = recorder._node(os.stat(old, dir_fd=src_dir_fd))
            ops.append(Op("name", folder, {source: None, os.path.basename(new): node}))
            replace(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

        def record_unlink(path: Any, *, dir_fd: int | None = None) -> None:
            unlink(path, dir_fd=dir_fd)
            folder, name = recorder._name(path, dir_fd)
            ops.append(Op("name", folder, {name: None}))

        def record_mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            mkdir(path, mode, dir_fd=dir_fd)
            folder, name = recorder._name(path, dir_fd)
            ops.append(Op("name", folder, {name: -recorder._node(os.stat(path), fresh=True)}))

        def record_sync(descriptor: int) -> None:
            ops.append(Op("sync", recorder._node(os.fstat(descriptor))))

        class RecordedFile(io.FileIO):
            def write(self, data: Any) -> int:
                at, node = self.tell(), recorder._node(os.fstat(self.fileno()))
                plain = bytes(data)
                for start in range(0, len(plain), PAGE):
                    ops.append(Op("write", node, (at + start, plain[start : start + PAGE])))
                return super().write(data)

            def truncate(self, size: int | None = None) -> int:
                ops.append(Op("size", recorder._node(os.fstat(self.fileno())), size))
                return super().truncate(size)

        def open_recorded(path: Any, mode: str, _: int, *, opener: Any) -> Any:
            return io.BufferedWriter(RecordedFile(path, mode, opener=opener))

        with patch.context() as p:
            for name, function in {
                "open": record_open,
                "replace": record_replace,
                "unlink": record_unlink,
                "mkdir": record_mkdir,
                "fsync": record_sync,
                "fdatasync": record_sync,
            }.items():
                p.setattr(os, name, function)
            p.setattr(table_folder, "FileIO", RecordedFile)
            p.setattr(atomic_write, "open", open_recorded, raising=False)
            yield

    def replay(self, stop: int, choose: random.Random, keep: float) -> dict[str, Any]:
        """What the disk may have after ``stop`` changes: a name to the bytes of its file, or to the names of a folder.

        ``keep``: how likely the disk has a change that was not flushed.
        """
        last = {op.node: i for i, op in enumerate(self.ops[:stop]) if op.kind == "sync"}
        names: dict[int, dict[str, int]] = {self.top: {}}
        files: dict[int, bytearray] = {}
        for i, op in enumerate(self.ops[:stop]):
            if op.kind in ("sync", "returned") or (i > last.get(op.node, -1) and choose.random() >= keep):
                continue
            if op.kind == "name":
                folder = names.setdefault(op.node, {})
                for name, node in op.value.items():
                    folder.pop(name, None)
                    if node is not None:
                        folder[name] = node
                continue
            data = files.setdefault(op.node, bytearray())
            if op.kind == "size":
                del data[op.value :]
                data.extend(bytes(op.value - len(data)))
            else:
                at, new = op.value
                data.extend(bytes(max(0, at - len(data))))
                data[at : at + len(new)] = new

        def tree(node: int) -> dict[str, Any]:
            return {
                name: tree(-inner) if inner < 0 else bytes(files.get(inner, b""))
                for name, inner in names.get(node, {}).items()
            }

        return tree(self.top)


def write_tree(tree: dict[str, Any], into: Path) -> None:
    into.mkdir(parents=True)
    for name, value in tree.items():
        if isinstance(value, dict):
            write_tree(value, into / name)
        else:
            (into / name).write_bytes(value)


def check(folder: Path, first: int) -> Any:
    """The keys and the number of rows, each of them whole. ``first``: the number of the first row."""
    table = load(folder)
    count = len(table.rows)
    for key, expected in rows(first, count, table).items():
        assert (table.decode(key) if key in RAGGED else table[key].tolist()) == expected
    return set(table), count


def check_at_rest(folder: Path, keys: set[str], count: int) -> None:
    """safetensors reads every column, and nothing else is in the folder."""
    names = dict.fromkeys(keys - RAGGED, count) | {f"{key}.offsets": count + 1 for key in keys & RAGGED}
    files = {path.name for path in folder.iterdir()} - {"table.json", "checksums.jsonl"}
    stems = {name.removesuffix(".safetensors").split("~")[0] for name in files}
    assert stems == {*names, *(f"{key}.values" for key in keys & RAGGED)} and len(files) == len(stems)
    for name in files:
        with safe_open(str(folder / name), "np") as file:
            (key,) = file.keys()
            assert key not in names or file.get_slice(key).get_shape()[0] == names[key]


def replay_all(record: Recorder, folders: Sequence[Path], tmp: Path, patch: pytest.MonkeyPatch) -> int:
    """Replay every moment. The keys and the row count must be those of the last call that returned, or of the next.

    ``folders``: the tables. A part has six rows.
    """
    choose = random.Random(0)
    acknowledged = [(i, op.value) for i, op in enumerate(record.ops) if op.kind == "returned"]
    seen: set[Any] = set()
    for name in ("fsync", "fdatasync"):
        patch.setattr(os, name, lambda _: None)
    for stop in range(1, len(record.ops) + 1):
        for number in range(CHOICES):
            tree = record.replay(stop, choose, (0.0, 1.0, 0.5, 0.9, 0.1)[number % 5])
            for folder in folders:
                states = [(i < stop, state) for i, (of, state) in acknowledged if of == folder]
                before, after = ([state for returned, state in states if returned is want] for want in (True, False))
                inside = tree
                for name in folder.relative_to(record.root).parts:
                    inside = inside.get(name, {})
                key = folder, len(before), repr(inside)
                if key in seen:
                    continue
                seen.add(key)
                where = tmp / "disk" / folder.name
                write_tree(inside, where)
                check_state(where, before, after)
                shutil.rmtree(tmp / "disk")
    return len(seen)


def check_state(where: Path, before: list[Any], after: list[Any]) -> None:
    """Check a table as a disk may have it. ``before``, ``after``: what it was when the calls returned."""
    first = 6 * int(where.name.removeprefix("part-")) if where.name.startswith("part-") else 0
    if not (where / "table.json").exists():
        assert not before, "the table is lost"
        RowWriter(where, like=LIKE, ragged=["text"]).close() if not _files(where) else None
        return
    found = check(where, first)
    verify(where)
    assert found in [*(before[-1:] or [(set(LIKE), 0)]), *after[:1]]
    repair(where)
    assert check(where, first) == found
    verify(where)
    check_at_rest(where, *found)


def _files(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name != ".table.json.tmp"] if folder.exists() else []


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setattr(table_writer, "BUFFER", 3000)
    (tmp_path / "root").mkdir()
    return Recorder(tmp_path / "root")


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")]


def create_flush_append_and_close(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    folder = recorder.root / "a" / "t"
    with recorder.recording(monkeypatch):
        writer = RowWriter(folder, like=LIKE, ragged=["text"], checksums=True)
        recorder.acknowledged(folder, 0)
        for count in (3, 20):
            writer.write(rows(len(writer), count))
            writer.flush()
            recorder.acknowledged(folder, len(writer))
        writer.close()
        with RowWriter(folder, append=True) as writer:
            writer.write(rows(23, 5))
            writer.write(rows(28, 2))
        recorder.acknowledged(folder, 30)
    return [folder]


@pytest.mark.parametrize("name", ["sync_files", "sync_names"])
def test_each_flush_to_disk_is_needed(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Without it, some state of the disk has lost rows. So the replay finds such states."""
    with monkeypatch.context() as patch:
        patch.setattr(table_folder.TableFolder, name, lambda *_: None)
        folders = create_flush_append_and_close(recorder, monkeypatch)
    with pytest.raises((AssertionError, InvalidFileError)):
        replay_all(recorder, folders, tmp_path, monkeypatch)


def overwrite(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    folder = recorder.root / "t"
    with recorder.recording(monkeypatch):
        with RowWriter(folder, like=LIKE, ragged=["text"]) as writer:
            writer.write(rows(0, 7))
        recorder.acknowledged(folder, 7)
        with RowWriter(folder, like=LIKE, ragged=["text"], mode="overwrite") as writer:
            writer.write(rows(0, 4))
            writer.flush()
            recorder.acknowledged(folder, 4)
            writer.write(rows(4, 4))
        recorder.acknowledged(folder, 8)
    return [folder]


def new_columns(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    folder = recorder.root / "t"
    monkeypatch.setattr(table_columns, "_RANGE", 900)

    def batches(key: str, count: int) -> Iterator[Any]:
        for first in range(0, count, 3):
            yield rows(first, min(3, count - first), [key])[key]

    with recorder.recording(monkeypatch):
        with RowWriter(folder, like=LIKE, ragged=["text"], checksums=True) as writer:
            writer.write(rows(0, 7))
        recorder.acknowledged(folder, 7)
        fails(ValueError, "the batches have 4", lambda: add_column(folder, "late", batches("late", 4)))
        recorder.acknowledged(folder, 7)
        add_column(folder, "late", batches("late", 7))
        recorder.acknowledged(folder, 7, [*LIKE, "late"])
        add_column(folder, "words", batches("words", 7), ragged=True)
        recorder.acknowledged(folder, 7, [*LIKE, "late", "words"])
        drop_column(folder, "text")
        recorder.acknowledged(folder, 7, ["i", "wide", "late", "words"])
        with RowWriter(folder, append=True) as writer:
            writer.write(rows(7, 2, ["i", "wide", "late", "words"]))
        recorder.acknowledged(folder, 9, ["i", "wide", "late", "words"])
        drop_column(folder, "late")
        recorder.acknowledged(folder, 9, ["i", "wide", "words"])
        add_column(folder, "late", batches("late", 9))
        recorder.acknowledged(folder, 9, ["i", "wide", "words", "late"])
    return [folder]


def parts_and_one_table(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    root = recorder.root / "parts"
    monkeypatch.setattr(parts, "_WRITTEN_AT_ONCE", 4)
    folders = [root / "part-00000", root / "part-00001", recorder.root / "whole"]
    with recorder.recording(monkeypatch):
        writers = [RowWriter(root, like=LIKE, ragged=["text"], part=part, parts=2) for part in (0, 1)]
        for count in (4, 2):  # in turn, as on two ranks
            for first, writer, folder in zip((0, 6), writers, folders, strict=False):
                writer.write(rows(first + len(writer), count))
                writer.flush()
                recorder.acknowledged(folder, len(writer))
        for writer in writers:
            writer.close()
        join_parts(root, folders[-1])
        recorder.acknowledged(folders[-1], 12)
    return folders


@pytest.mark.parametrize(
    ("work", "page"),
    [(create_flush_append_and_close, 512), (overwrite, 512), (new_columns, 2048), (parts_and_one_table, 2048)],
)
def test_any_moment(
    recorder: Recorder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, int], None],
    work: Callable[..., list[Path]],
    page: int,
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PAGE", page)
    states = replay_all(recorder, work(recorder, monkeypatch), tmp_path, monkeypatch)
    assert states > 150
    record_property("power", states)
