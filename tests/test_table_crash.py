"""A writer that is killed or interrupted at any moment: flushed rows stay, no torn row shows, nothing is left over."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import NOT_TRACED
from safetensors import safe_open

from tensordict_lite import DeviceDict, Utf8, load
from tensordict_lite.tables import RowWriter, verify
from tensordict_lite.tables import folder as table_folder
from tensordict_lite.tables import table as table_writer

# `TIMES=300 STEP=1 pytest tests/test_table_crash.py` for more.
TIMES = int(os.environ.get("TIMES", "25"))
STEP = int(os.environ.get("STEP", "41"))
"""How many bytecodes lie between two that are interrupted."""
LIKE = DeviceDict(
    {"i": [0], "wide": torch.zeros(1, 300, dtype=torch.float64), "s": ["0"], "text": ["0"]}, encoders={"s": Utf8(12)}
)
FILES = ("i", "wide", "s", "text.values", "text.offsets")


def rows(first: int, count: int) -> dict[str, Any]:
    """Rows whose values follow from their number, so that a torn row shows."""
    i = torch.arange(first, first + count)
    texts = [text(n) for n in i.tolist()]
    return {"i": i, "wide": i.double()[:, None].expand(count, 300), "s": list(map(str, i.tolist())), "text": texts}


def text(n: int) -> str:
    return f"{'é' * (n % 13)}{n}" if n % 3 else ""


def check(folder: Path, least: int) -> int:
    """The number of rows. Every row is whole, and there are at least ``least``."""
    table = load(folder)
    count = len(table.rows)
    assert count >= least
    assert torch.equal(table["i"], torch.arange(count))
    assert torch.equal(table["wide"], torch.arange(count).double()[:, None].expand(count, 300))
    assert table.decode("s") == [str(n) for n in range(count)]
    assert table.decode("text") == [text(n) for n in range(count)]
    return count


def check_plainly(folder: Path, count: int) -> None:
    """safetensors itself reads every column, with the rows of the table."""
    values = sum(len(text(n).encode()) for n in range(count))
    for name, length in zip(FILES, (count, count, count, values, count + 1), strict=True):
        with safe_open(str(folder / f"{name}.safetensors"), "pt") as file:
            assert list(file.keys()) == [name] and file.get_slice(name).get_shape()[0] == length


def write_forever(folder: Path, acknowledge: Callable[[int], object], seed: int) -> None:
    choose = random.Random(seed)
    append = (folder / "table.json").exists()
    with RowWriter(folder, append=True) if append else RowWriter(folder, like=LIKE, ragged=["text"]) as writer:
        if append:
            acknowledge(len(writer))
        stop = len(writer) + 3_000
        while len(writer) < stop:
            writer.write(rows(len(writer), choose.choice((1, 3, 50, 400))))
            if choose.random() < 0.4:
                writer.flush()
                acknowledge(len(writer))
    acknowledge(len(writer))


def in_a_child(work: Callable[[Callable[[int], object]], None]) -> tuple[int, Any]:
    """Start a forked process. Returns its id, and a function for the last number that it acknowledged."""
    reading, writing = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    pid = os.fork()
    if not pid:
        try:
            os.close(reading)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            work(lambda n: os.write(writing, n.to_bytes(8, "little")))
        finally:
            os._exit(0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    os.close(writing)

    def last() -> int:
        with open(reading, "rb") as pipe:
            data = pipe.read()
        return int.from_bytes(data[-8:], "little")

    return pid, last


def attack(folder: Path, number: int, seed: int) -> None:
    """Run a writer, and send it a signal at a random moment."""
    table_writer.BUFFER = 300_000  # small, so that the files grow often
    pid, last = in_a_child(lambda acknowledge: write_forever(folder, acknowledge, seed))
    time.sleep(random.Random(seed).random() * 0.12)
    with suppress(ProcessLookupError):
        os.kill(pid, number)
    os.waitpid(pid, 0)
    least = last()
    if not (folder / "table.json").exists():
        assert not least
        return
    check(folder, least)


@pytest.fixture
def small_steps() -> Any:
    before = table_writer.BUFFER
    yield
    table_writer.BUFFER = before


def left_over(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"table.json", *(f"{n}.safetensors" for n in FILES)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=NOT_TRACED)])
def test_a_signal_at_any_moment(
    tmp_path: Path, number: int, small_steps: None, record_property: Callable[[str, int], None]
) -> None:
    record_property("kills" if number == signal.SIGKILL else "interrupts", TIMES)
    folder = tmp_path / "0"
    for seed in range(TIMES):
        if seed % 10 == 0:
            folder = tmp_path / str(seed)  # the creation of a table is interrupted too
        attack(folder, number, seed)
        if number == signal.SIGINT and folder.exists():
            assert not left_over(folder)
    for folder in tmp_path.iterdir():
        if not (folder / "table.json").exists():
            assert set(os.listdir(folder)) <= {".table.json.tmp"}
            RowWriter(folder, like=LIKE, ragged=["text"]).close()  # a new table takes its place
        with RowWriter(folder, append=True) as writer:
            writer.write(rows(len(writer), 10))
        assert not left_over(folder)
        check_plainly(folder, check(folder, 10))
        assert (folder / "wide.safetensors").stat().st_size == 4096 + len(writer) * 2400


def interrupted_at(stop: int, call: Callable[[], object]) -> bool:
    """Call, with an interrupt at the bytecode ``stop`` of the package. Returns False if the call executes fewer."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if "tensordict_lite/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        if count == stop and event == "opcode":
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flushes to disk do nothing, and buffers are small."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda _: None)
    monkeypatch.setattr(table_writer, "BUFFER", 20_000)


def opened(folder: Path) -> RowWriter:
    if (folder / "table.json").exists():
        return RowWriter(folder, append=True)
    return RowWriter(folder, like=LIKE, ragged=["text"], checksums=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt just after open()
@pytest.mark.parametrize("name", ["flush", "close"])
def test_an_interrupt_at_any_bytecode(
    tmp_path: Path, memory: None, record_property: Callable[[str, int], None], name: str
) -> None:
    """The table has whole flushes, and the writer goes on, or another one if `close` was interrupted."""
    stop, tried, folder = 1, 0, tmp_path / "t"
    while True:
        writer = opened(folder)
        writer.write(rows(0, 3))
        writer.flush()
        writer.write(rows(3, 4))
        interrupted = interrupted_at(stop, getattr(writer, name))
        assert check(folder, 3) in (3, 7)
        verify(folder)
        if writer._table.closed:
            writer.close()  # releases what the interrupt left open
            writer = opened(folder)
        with writer:
            writer.write(rows(len(writer), 10))
        check_plainly(folder, check(folder, 13))
        verify(folder)
        shutil.rmtree(folder)
        if not interrupted:
            break
        stop, tried = stop + STEP, tried + 1
    assert stop > 500
    record_property("bytecodes", tried)


@pytest.mark.parametrize("flushed", [0, 3])
def test_a_full_disk_at_any_call(
    tmp_path: Path,
    memory: None,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, int], None],
    flushed: int,
) -> None:
    """Two calls in a row fail. Then there is room, and the same calls of the writer succeed."""
    left = 0

    def full(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left in (0, -1):
            raise OSError(28, "No space left on device")
        return call(*args, **options)

    class FullFile(FileIO):
        def write(self, *args: Any) -> int:
            return full(super().write, *args)

        def truncate(self, *args: Any) -> int:
            return full(super().truncate, *args)

    def until_it_works(call: Callable[[], Any], rows: int) -> Any:
        while True:
            try:
                return call()
            except OSError:
                if (folder / "table.json").exists():
                    assert check(folder, rows) == rows

    monkeypatch.setattr(table_folder, "FileIO", FullFile)
    monkeypatch.setattr(os, "replace", partial(full, os.replace))
    folder, number = tmp_path / "t", 0
    while left <= 0:  # the call was reached
        number += 1
        shutil.rmtree(folder, ignore_errors=True)
        left = number
        writer = until_it_works(lambda: opened(folder), 0)
        for first, count in ((0, flushed), (flushed, 30), (flushed + 30, 4)):
            until_it_works(lambda: writer.write(rows(first, count)), first)  # noqa: B023
            until_it_works(writer.flush, first)
        writer.write(rows(flushed + 34, 2))
        try:
            writer.close()
        except OSError:  # the table is released, with the rows of the last flush
            with until_it_works(lambda: opened(folder), flushed + 34) as writer:
                writer.write(rows(len(writer), 2))
        assert check(folder, 0) == flushed + 36
        verify(folder)
    assert number > 30
    record_property("full disks", number)
