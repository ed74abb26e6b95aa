"""How a writer makes rows durable: threads flush the columns at the same time, then the index is replaced."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tensordict_lite import RowWriter, load
from tensordict_lite._files import atomic_write, table_writer  # pyright: ignore[reportPrivateUsage]

LIKE = {f"c{i}": torch.zeros(1, 4) for i in range(5)}


def rows(count: int, value: float = 1.0) -> dict[str, Any]:
    return {key: torch.full((count, 4), value) for key in LIKE}


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the column files that were flushed to disk, and ``index`` when table.json was replaced."""
    calls: list[str] = []
    sync, replace = atomic_write._sync, os.replace

    def record(descriptor: int) -> None:
        sync(descriptor)
        calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))

    def replaced(source: str, target: str) -> None:
        calls.append("index")
        replace(source, target)

    monkeypatch.setattr(atomic_write, "_sync", record)
    monkeypatch.setattr(os, "replace", replaced)
    return calls


COLUMNS = {f"{key}.safetensors" for key in LIKE}
on_linux = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs the names of descriptors")


@on_linux
def test_every_column_is_on_the_disk_before_the_index(tmp_path: Path, synced: list[str]) -> None:
    with RowWriter(tmp_path / "t", like=LIKE) as writer:
        for _ in range(3):
            synced.clear()
            writer.write(rows(10))
            writer.flush()
            assert set(synced[:-1]) == COLUMNS and len(synced) == 6 and synced[-1] == "index"
        synced.clear()
    assert set(synced) == COLUMNS  # the rows were flushed, and the unused bytes are removed
    assert len(load(tmp_path / "t").rows) == 30


def test_the_columns_are_flushed_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together, threads = threading.Barrier(len(LIKE)), threading.active_count()
    sync = atomic_write._sync

    def wait(descriptor: int) -> None:
        together.wait(20)
        sync(descriptor)

    with RowWriter(tmp_path / "t", like=LIKE) as writer:
        writer.write(rows(10))
        monkeypatch.setattr(atomic_write, "_sync", wait)
        writer.flush()
        monkeypatch.undo()
    assert not together.broken and threading.active_count() == threads


@on_linux
def test_more_columns_than_threads(tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic_write, "_THREADS", 2)
    with RowWriter(tmp_path / "t", like=LIKE) as writer:
        writer.write(rows(10))
    assert set(synced) - {"index"} == COLUMNS


@on_linux
def test_without_threads(tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with RowWriter(tmp_path / "t", like=LIKE) as writer:
        writer.write(rows(10))
        writer.flush()
        assert set(synced) - {"index"} == COLUMNS
    assert len(load(tmp_path / "t").rows) == 10


def fails(descriptor: int) -> None:
    raise OSError(5, "Input/output error")


def interrupts(descriptor: int) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("name", "fail", "error", "message"),
    [
        ("_sync", fails, OSError, "Input/output error; the table keeps the 10 rows of the last flush: "),
        ("_sync", interrupts, KeyboardInterrupt, None),
        ("fsync", fails, OSError, "Input/output error; the table keeps the 10 rows of the last flush: "),
        ("fsync", interrupts, KeyboardInterrupt, None),
    ],
)
def test_an_error_leaves_the_table_as_it_was(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    fail: Callable[[int], None],
    error: type[BaseException],
    message: str | None,
) -> None:
    with RowWriter(tmp_path / "t", like=LIKE) as writer:
        writer.write(rows(10))
        writer.flush()
        writer.write(rows(5, 2.0))
        threads = threading.active_count()
        with monkeypatch.context() as patch:
            patch.setattr(os if name == "fsync" else atomic_write, name, fail)
            with pytest.raises(error, match=message):
                writer.flush()
        assert threading.active_count() == threads
        assert len(load(tmp_path / "t").rows) == 10 and set(os.listdir(tmp_path / "t")) == COLUMNS | {"table.json"}
        writer.flush()
        assert len(load(tmp_path / "t").rows) == 15
    assert load(tmp_path / "t")["c3"][10:].eq(2).all()


def test_one_column_of_several_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def fail_once(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")

    writer = RowWriter(tmp_path / "t", like=LIKE)
    writer.write(rows(10))
    with monkeypatch.context() as patch:
        patch.setattr(atomic_write, "_sync", fail_once)
        with pytest.raises(OSError, match="No space left on device; the table keeps the 0 rows of the last flush"):
            writer.flush()
    assert len(load(tmp_path / "t").rows) == 0
    writer.close()
    assert len(load(tmp_path / "t").rows) == 10


def test_a_process_that_exits_can_close_its_writer(tmp_path: Path) -> None:
    program = (
        "import atexit, sys, torch\nfrom tensordict_lite import RowWriter\n"
        "writer = RowWriter(sys.argv[1], like={'x': [0], 'y': [0]})\n"
        "writer.write({'x': [1, 2], 'y': [3, 4]})\natexit.register(writer.close)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "t")], capture_output=True, text=True, check=False
    )
    assert not done.returncode and not done.stderr
    assert load(tmp_path / "t")["y"].tolist() == [3, 4]


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no advice")
@pytest.mark.parametrize("refused", [False, True])
def test_the_disk_starts_large_writes_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    advised: list[tuple[int, int]] = []
    advise = os.posix_fadvise

    def record(descriptor: int, start: int, count: int, advice: int) -> None:
        advised.append((start, count))
        if refused:
            raise OSError(22, "Invalid argument")
        advise(descriptor, start, count, advice)

    monkeypatch.setattr(os, "posix_fadvise", record)
    image, label = torch.randint(256, (700, 3, 32, 32), dtype=torch.uint8), torch.arange(700)
    with RowWriter(tmp_path / "t", like={"image": image[:1], "label": label[:1]}) as writer:
        for part, number in zip(image.split(100), label.split(100), strict=True):
            writer.write({"image": part, "label": number})
        assert not advised or min(count for _, count in advised) >= table_writer._EARLY
        writer.write({"image": image, "label": label})
    assert (4096 + 700 * 3072, 700 * 3072) in advised
    table = load(tmp_path / "t")
    assert table["image"].equal(image.repeat(2, 1, 1, 1)) and table["label"].equal(label.repeat(2))
