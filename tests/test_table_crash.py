"""A writer that is killed or interrupted at any moment: flushed rows stay, no torn row shows, nothing is left over."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tensordict_lite import DeviceDict, Utf8, load
from tensordict_lite.tables import RowWriter
from tensordict_lite.tables import table as table_writer

# `TIMES=500 pytest tests/test_table_crash.py` for more.
TIMES = int(os.environ.get("TIMES", "25"))
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
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_signal_at_any_moment(tmp_path: Path, number: int, small_steps: None) -> None:
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
