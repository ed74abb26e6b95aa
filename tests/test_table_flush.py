"""How a writer makes rows durable: threads flush the columns at the same time, then the index is replaced.

After an error of a flush to disk, Linux may have dropped the rows, and the next flush may raise no error. PostgreSQL
lost data so until 2018. So such an error is final.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import fails

from tensordict_lite import load
from tensordict_lite.tables import RowWriter, add_column
from tensordict_lite.tables import folder as table_folder

LIKE = {f"c{i}": torch.zeros(1, 4) for i in range(5)}


def rows(count: int, value: float = 1.0) -> dict[str, Any]:
    return {key: torch.full((count, 4), value) for key in LIKE}


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were flushed to disk: a column, the new index, or the folder."""
    calls: list[str] = []
    for name in ("fdatasync", "fsync"):
        monkeypatch.setattr(os, name, lambda descriptor: calls.append(os.path.basename(name_of(descriptor))))
    return calls


def name_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


COLUMNS = {f"{key}.safetensors" for key in LIKE}
on_linux = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs the names of descriptors")


@on_linux
def test_every_column_is_on_the_disk_before_the_index(tmp_path: Path, synced: list[str]) -> None:
    with RowWriter(tmp_path / "t", like=LIKE) as writer:
        for _ in range(3):
            synced.clear()
            writer.write(rows(10))
            writer.flush()
            assert set(synced[:5]) == COLUMNS and synced[5:] == [".table.json.tmp", "t"]
        synced.clear()
    assert set(synced[:5]) == COLUMNS and synced[5:] == [".table.json.tmp", "t"]  # the headers, and no open writer
    assert len(load(tmp_path / "t").rows) == 30


@on_linux
def test_the_columns_are_flushed_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together, threads = threading.Barrier(len(LIKE)), threading.active_count()
    sync = os.fdatasync

    def wait(descriptor: int) -> None:
        if name_of(descriptor).endswith(".safetensors"):
            together.wait(20)
        sync(descriptor)

    with RowWriter(tmp_path / "t", like=LIKE) as writer:
        writer.write(rows(10))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", wait)
            writer.flush()
    assert not together.broken and threading.active_count() == threads


@on_linux
def test_more_columns_than_threads(tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_folder, "_THREADS", 2)
    with RowWriter(tmp_path / "t", like=LIKE) as writer:
        writer.write(rows(10))
    assert set(synced) - {".table.json.tmp", "t", tmp_path.name} == COLUMNS


@on_linux
def test_without_threads(tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(table_folder, "start_new_thread", refuse)
    with RowWriter(tmp_path / "t", like=LIKE) as writer:
        writer.write(rows(10))
        writer.flush()
        assert set(synced) - {".table.json.tmp", "t", tmp_path.name} == COLUMNS
    assert len(load(tmp_path / "t").rows) == 10


def failing(monkeypatch: pytest.MonkeyPatch, ending: str, error: BaseException) -> None:
    """Let the flush of each file whose name has this ending raise an error once, as the system does."""
    left = {ending}
    for name in ("fdatasync", "fsync"):
        sync = getattr(os, name)

        def fail(descriptor: int, sync: Callable[[int], None] = sync) -> None:
            sync(descriptor)
            if name_of(descriptor).endswith(ending) and left:
                left.clear()
                raise error

        monkeypatch.setattr(os, name, fail)


@on_linux
@pytest.mark.parametrize("ending", ["/c0.safetensors", "/c4.safetensors", "/.table.json.tmp", "/t"])
def test_a_failed_flush_to_disk_is_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    """A second call of the system raises no error, so the writer itself must refuse."""
    writer = RowWriter(tmp_path / "t", like=LIKE)
    writer.write(rows(10))
    writer.flush()
    writer.write(rows(5, 2.0))
    failing(monkeypatch, ending, OSError(5, "Input/output error"))
    for call in (writer.flush, writer.flush, lambda: writer.write(rows(1)), writer.close):
        with pytest.raises(OSError) as caught:  # noqa: PT011
            call()
        assert str(caught.value) == (
            "[Errno 5] Input/output error; the table keeps the 10 rows of the last flush, "
            "and the system may have dropped "
            "later rows that it could not flush to disk; close this RowWriter, and open the table again with "
            f"append=True: '{tmp_path / 't'}'"
        )
    writer.close()
    assert set(os.listdir(tmp_path / "t")) == COLUMNS | {"table.json"}
    kept = 15 if ending == "/t" else 10  # the index is in place when its folder cannot be flushed
    with RowWriter(tmp_path / "t", append=True) as writer:
        assert len(writer) == kept
        writer.write(rows(5, 3.0))
    table = load(tmp_path / "t")
    assert len(table.rows) == kept + 5 and table["c3"][kept:].eq(3).all() and table["c0"][:10].eq(1).all()


@on_linux
@pytest.mark.parametrize("ending", ["/c2.safetensors", "/.table.json.tmp", "/t"])
def test_an_interrupt_is_not_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    with RowWriter(tmp_path / "t", like=LIKE) as writer:
        writer.write(rows(10))
        threads = threading.active_count()
        failing(monkeypatch, ending, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            writer.flush()
        assert threading.active_count() == threads
        assert set(os.listdir(tmp_path / "t")) == COLUMNS | {"table.json"}
        synced: list[str] = []
        with monkeypatch.context() as patch:
            for name in ("fdatasync", "fsync"):
                patch.setattr(os, name, lambda descriptor: synced.append(name_of(descriptor)))
            writer.flush()
        assert len(synced) == 7  # the columns, the index and its folder
    assert len(load(tmp_path / "t").rows) == 10


@on_linux
def test_an_error_that_an_interrupt_hides_is_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()
    error = OSError(5, "Input/output error")

    def sync(descriptor: int) -> None:
        if name_of(descriptor).endswith("c0.safetensors"):
            assert failed.wait(20)
            raise KeyboardInterrupt
        if name_of(descriptor).endswith("c4.safetensors"):
            failed.set()
            raise error

    writer = RowWriter(tmp_path / "t", like=LIKE)
    writer.write(rows(10))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", sync)
        with pytest.raises(KeyboardInterrupt):
            writer.flush()
    fails(OSError, "Input/output error; the table keeps the 0 rows", writer.flush)
    lost = "10 rows were not flushed, and the table does not have them"
    with pytest.warns(RuntimeWarning, match=rf"an exception left the block of a RowWriter of .*t': {lost}"):
        leave_with(KeyError("mine"), writer)
    assert writer._table.closed


@on_linux
def test_a_writer_that_nobody_closed_after_an_error_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RowWriter(tmp_path / "t", like=LIKE)
    writer.write(rows(10))
    writer.flush()
    writer.write(rows(5))
    with monkeypatch.context() as patch, suppress(OSError):
        failing(patch, "/c0.safetensors", OSError(5, "Input/output error"))
        writer.flush()
    lost = "5 rows were not flushed, and the table does not have them"
    del writer  # the error of `failing` has a cycle with it
    with pytest.warns(RuntimeWarning, match=rf"a RowWriter of .*t' was not closed after an error of the disk: {lost}"):
        gc.collect()
    assert len(load(tmp_path / "t").rows) == 10


def leave_with(error: Exception, writer: RowWriter) -> None:
    with pytest.raises(KeyError, match="mine"), writer:
        raise error


@on_linux
def test_the_files_stay_open_between_two_flushes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a file is closed, the system may forget the error of a write to the disk."""
    whole = table_folder.TableFolder.open

    def only_the_index(folder: Any, name: str, mode: str) -> Any:
        assert name == "table.json"
        return whole(folder, name, mode)

    with RowWriter(tmp_path / "t", like=LIKE) as writer:
        inodes = {os.fstat(file.fileno()).st_ino for file in writer._table.folder.files}
        for _ in range(2):
            writer.write(rows(10))
            synced: list[int] = []
            with monkeypatch.context() as patch:
                patch.setattr(os, "fdatasync", synced.append)
                patch.setattr(table_folder.TableFolder, "open", only_the_index)
                writer.write(rows(200_000))
                writer.flush()
            assert {os.fstat(descriptor).st_ino for descriptor in synced[:5]} == inodes


def test_a_folder_that_cannot_be_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems flush files only, and say so with this error."""

    def refuse(descriptor: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    with RowWriter(tmp_path / "t", like=LIKE) as writer:
        writer.write(rows(10))
    assert len(load(tmp_path / "t").rows) == 10


def test_a_full_disk_for_the_index_is_not_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row was flushed in vain: only the system's flush may drop rows."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with RowWriter(tmp_path / "t", like=LIKE) as writer:
        writer.write(rows(10))
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", full)
            fails(OSError, "No space left on device; the table keeps the 0 rows of the last flush: ", writer.flush)
        assert set(os.listdir(tmp_path / "t")) == COLUMNS | {"table.json"}
    assert len(load(tmp_path / "t").rows) == 10


@pytest.mark.parametrize("name", ["create", "overwrite", "add"])
def test_a_full_disk_for_a_new_file_leaves_the_folder_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder, real = tmp_path / "t", table_folder.TableFolder.open
    if name != "create":
        with RowWriter(folder, like=LIKE) as writer:
            writer.write(rows(3))
    before = sorted(os.listdir(folder)) if folder.exists() else []
    made: list[str] = []

    def full(folder: Any, file: str, mode: str = "r+b") -> Any:
        if mode == "x+b":
            made.append(file)
            if len(made) == 2:
                raise OSError(28, "No space left on device")
        return real(folder, file, mode)

    monkeypatch.setattr(table_folder.TableFolder, "open", full)
    calls: dict[str, Callable[[], object]] = {
        "create": lambda: RowWriter(folder, like=LIKE),
        "overwrite": lambda: RowWriter(folder, like=LIKE, mode="overwrite"),
        "add": lambda: add_column(folder, "new", [{"a": [1, 2, 3], "b": [4, 5, 6]}]),
    }
    with pytest.raises(OSError, match="No space left on device"):
        calls[name]()
    assert len(made) == 2 and (sorted(os.listdir(folder)) if folder.exists() else []) == before
    if before:
        assert len(load(folder).rows) == 3 and '"open"' not in (folder / "table.json").read_text()
        add_column(folder, "new", [[1, 2, 3]])


def full_before(replace: Callable[..., None], *args: Any, **options: Any) -> None:
    raise OSError(28, "No space left on device")


def interrupt_before(replace: Callable[..., None], *args: Any, **options: Any) -> None:
    raise KeyboardInterrupt


def interrupt_after(replace: Callable[..., None], *args: Any, **options: Any) -> None:
    replace(*args, **options)
    raise KeyboardInterrupt


FAILURES = [full_before, interrupt_before, interrupt_after]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("failures", [*product(FAILURES, repeat=2), *product(FAILURES, repeat=3)])
def test_failed_flushes_in_a_row(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, int], None],
    failures: Sequence[Callable[..., None]],
    overwrite: bool,
) -> None:
    """The writer knows each index that may be on the disk, so none is taken for the index of another writer."""
    folder, replace = tmp_path / "t", os.replace
    record_property("failed flushes", 1)
    if overwrite:
        with RowWriter(folder, like=LIKE) as writer:
            writer.write(rows(3, 2.0))
    writer = RowWriter(folder, like=LIKE, mode="overwrite" if overwrite else None)
    for failure in failures:
        writer.write(rows(10))
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", partial(failure, replace))
            fails((OSError, KeyboardInterrupt), r"^$|the table keeps the ", writer.flush)
    writer.write(rows(10))
    writer.flush()
    table = load(folder)
    assert len(table.rows) == 10 * len(failures) + 10 and all(table[key].eq(1).all() for key in LIKE)
    index = (folder / "table.json").read_text()
    (folder / "table.json").write_text(index.replace('"writer":"', '"writer":"f'))
    fails(BlockingIOError, "another RowWriter has written to this table", writer.close)


def test_an_interrupt_after_the_index_is_replaced_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader may have them already, so the block must not take them back."""
    writer = RowWriter(tmp_path / "t", like=LIKE)
    writer.write(rows(10))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", partial(interrupt_after, os.replace))
        with pytest.raises(KeyboardInterrupt) as caught:
            writer.flush()
    writer.__exit__(caught.value)
    assert writer._table.closed and len(load(tmp_path / "t").rows) == 10


FORGOTTEN = """
import multiprocessing, sys
from tensordict_lite.tables import RowWriter

def work(folder, how):
    global writer
    writer = RowWriter(folder, like={"x": [0]})
    writer.write({"x": [1]})
    writer.flush()
    writer.write({"x": [2, 3]})
    if how == "raise":
        raise KeyError("mine")

if __name__ == "__main__":
    folder, own, *children = sys.argv[1:]
    for name in children:
        method, how = name.split("-")
        child = multiprocessing.get_context(method).Process(target=work, args=(f"{folder}/{name}", how))
        child.start()
        child.join()
        assert child.exitcode == (how == "raise"), name
    work(f"{folder}/main-{own}", own)
"""


@pytest.mark.slow
@pytest.mark.parametrize("names", [
    ["main-end", "fork-end", "spawn-end", "forkserver-raise"],
    ["main-raise"],
], ids=["end", "raise"])  # fmt: skip
def test_a_writer_that_nobody_closed(tmp_path: Path, names: list[str]) -> None:
    """Its process flushes it at the end, and says so."""
    (tmp_path / "program.py").write_text(FORGOTTEN)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path), names[0].removeprefix("main-"), *names[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == (names == ["main-raise"]), done.stderr
    for folder in (tmp_path / name for name in names):
        said = f"RuntimeWarning: a RowWriter of {str(folder)!r} was not closed, and 2 rows are flushed only now"
        assert done.stderr.count(said) == 1
        assert load(folder)["x"].tolist() == load(folder / "x.safetensors")["x"].tolist() == [1, 2, 3]


def test_a_process_that_exits_can_close_its_writer(tmp_path: Path) -> None:
    program = (
        "import atexit, sys, torch\nfrom tensordict_lite.tables import RowWriter\n"
        "writer = RowWriter(sys.argv[1], like={'x': [0], 'y': [0]})\n"
        "writer.write({'x': [1, 2], 'y': [3, 4]})\natexit.register(writer.close)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "t")], capture_output=True, text=True, check=False
    )
    assert not done.returncode and not done.stderr
    assert load(tmp_path / "t")["y"].tolist() == [3, 4]
