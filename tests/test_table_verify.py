"""Checksums of tables: `verify` finds every change of a byte, and names the column and the rows."""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import fails
from files import write_index

from tensordict_lite import InvalidFileError, Vocabulary, load
from tensordict_lite.tables import RowWriter, add_column, drop_column, repair, verify

pytestmark = [pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning"), pytest.mark.usefixtures("torch_mode")]

LIKE: dict[str, Any] = {"x": [0], "n": {"wide": [[0.0] * 40]}, "text": ["a"]}


def rows(first: int, count: int) -> dict[str, Any]:
    i = list(range(first, first + count))
    return {"x": i, "n": {"wide": torch.tensor(i)[:, None].expand(-1, 40)}, "text": [f"row {n}" * (n % 3) for n in i]}


def written(folder: Path, **options: Any) -> Path:
    """A table of 30 rows, in three flushes by two writers."""
    with RowWriter(folder, like=LIKE, ragged=["text"], **{"checksums": True, **options}) as writer:
        for first in (0, 10):
            writer.write(rows(first, 10))
            writer.flush()
    with RowWriter(folder, append=True) as writer:
        writer.write(rows(20, 10))
    return folder


def change(file: Path, at: int, byte: int | None = None) -> None:
    data = bytearray(file.read_bytes())
    data[at] = data[at] ^ 1 if byte is None else byte
    file.write_bytes(data)


@pytest.mark.parametrize(("name", "at", "message"), [
    ("x.safetensors", 4096 + 8 * 15, "rows 10 to 19 of the column 'x' have changed: 'x.safetensors' is damaged"),
    ("n.wide.safetensors", 4096 + 160 * 30 - 1, "rows 20 to 29 of the column 'n.wide' have changed"),
    ("text.values.safetensors", 4096, "rows 0 to 9 of the column 'text.values' have changed"),
    ("text.offsets.safetensors", 4096 + 8 * 30, "rows 20 to 29 of the column 'text.offsets' have changed"),
    ("text.offsets.safetensors", 4096, "rows 0 to 9 of the column 'text.offsets' have changed"),
    ("x.safetensors", 30, "'x.safetensors' is no safetensors file with the 30 rows of 'x'; repair the table"),
])  # fmt: skip
def test_the_column_and_the_rows_are_named(tmp_path: Path, name: str, at: int, message: str) -> None:
    folder = written(tmp_path / "t")
    verify(folder)
    change(folder / name, at)
    with pytest.raises(InvalidFileError, match=message) as caught:
        verify(folder)
    assert str(caught.value).startswith(f"{folder}: not a valid file: ")
    if at == 30:  # a header is made anew
        repair(folder)
        verify(folder)


@pytest.mark.slow
def test_every_kind_of_damage_is_found(tmp_path: Path) -> None:
    """Bits, bytes, blocks of zeros, swapped and moved blocks, missing ends, in any file."""
    whole = written(tmp_path / "whole")
    add_column(whole, "late", torch.arange(30.0).view(3, 10, 1).unbind())
    chance = random.Random(0)
    files = sorted(path.name for path in whole.iterdir())
    for _ in range(400):
        folder = tmp_path / "t"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        path = folder / chance.choice(files)
        before = path.read_bytes()
        data = bytearray(before)
        at, other = chance.randrange(len(data)), chance.randrange(len(data))
        count = chance.choice((1, 8, 64))
        match chance.randrange(5):
            case 0:
                data[at] ^= 1 << chance.randrange(8)
            case 1:
                data[at : at + count] = bytes(len(data[at : at + count]))
            case 2:
                data[at : at + count], data[other : other + count] = data[other : other + count], data[at : at + count]
            case 3:
                del data[at:]
            case _:
                data[at:at] = data[other : other + count]
        path.write_bytes(data)
        if data == before:
            continue
        with pytest.raises(InvalidFileError):
            verify(folder)


def test_every_bit_of_the_index(tmp_path: Path) -> None:
    """The index has the schema and the encoders: "cat" is not "cau"."""
    with RowWriter(tmp_path / "t", like={"s": ["cat"]}, encoders={"s": Vocabulary(["cat", "dog"])}) as writer:
        writer.write({"s": ["cat", "dog"]})
    path = tmp_path / "t" / "table.json"
    text = path.read_bytes()
    path.write_bytes(text.replace(b"cat", b"cau"))
    for call in (verify, load, repair):
        with pytest.raises(InvalidFileError, match=r"its table.json has changed: it does not have its checksum$"):
            call(tmp_path / "t")
    for at in range(8 * len(text)):
        path.write_bytes(text[: at // 8] + bytes([text[at // 8] ^ 1 << at % 8]) + text[at // 8 + 1 :])
        with pytest.raises(InvalidFileError):
            load(tmp_path / "t")


@pytest.mark.slow
def test_every_bit_of_the_checksums(tmp_path: Path) -> None:
    """The row numbers too, which only the text of an error shows."""
    folder = written(tmp_path / "t")
    path = folder / "checksums.jsonl"
    text = path.read_bytes()
    for at in range(8 * len(text)):
        path.write_bytes(text[: at // 8] + bytes([text[at // 8] ^ 1 << at % 8]) + text[at // 8 + 1 :])
        with pytest.raises(InvalidFileError):
            verify(folder)


def test_damaged_checksums(tmp_path: Path) -> None:
    folder = written(tmp_path / "t")
    index, sums = folder / "table.json", folder / "checksums.jsonl"
    text, lines = index.read_text(), sums.read_bytes()
    for number, message in [
        (len(lines) + 1, r"its checksums have \d+ bytes, and table.json counts \d+"),
        (len(lines.splitlines(True)[0]), r"the checksums of 'x.safetensors' cover 10 of 30 rows"),
        (len(lines) - 9, "Expecting|Unterminated|delimiter"),
    ]:
        write_index(folder, json.loads(text.replace(f'"bytes":{len(lines)}', f'"bytes":{number}')))
        fails(InvalidFileError, message, lambda: verify(folder))
    for entry in ('{"file":"x"}', '{"file":"../x.jsonl","bytes":1}', '{"file":"checksums.jsonl","bytes":-1}', "3"):
        write_index(folder, json.loads(text.replace(f'{{"file":"checksums.jsonl","bytes":{len(lines)}}}', entry)))
        for call in (lambda: verify(folder), lambda: load(folder)):
            with pytest.raises(InvalidFileError, match=r"'checksums'|size of the checksums|no name of a column file"):
                call()
    index.write_text(text)
    for wrong in (b"[11,20,", b"[10, 9,"):
        sums.write_bytes(lines.replace(b'"x.safetensors":[10,20,', b'"x.safetensors":' + wrong))
        fails(InvalidFileError, r"the checksums of 'x.safetensors' do not follow each other$", lambda: verify(folder))
    last = len(b"".join(lines.splitlines(True)[:-1]))
    sums.write_bytes(lines[:last] + lines[last:].replace(b"values", b"VALUES"))
    fails(InvalidFileError, r"the checksums of 'text.values.safetensors' cover 20 of 30 rows$", lambda: verify(folder))
    for line in (b"[]\n", b'{"rows":[0,1],"files":{"x.safetensors":[0]}}\n', b'{"files":3,"rows":[]}\n'):
        sums.write_bytes(line)
        write_index(folder, json.loads(text.replace(f'"bytes":{len(lines)}', f'"bytes":{len(line)}')))
        with pytest.raises(InvalidFileError):
            verify(folder)
    sums.unlink()
    for call in (lambda: verify(folder), lambda: RowWriter(folder, append=True)):
        with pytest.raises(InvalidFileError, match=r"the file 'checksums.jsonl' is missing$"):
            call()
    assert len(load(folder).rows) == 30, "load reads no checksum"


def test_a_column_in_the_file_of_a_column_that_was_dropped(tmp_path: Path) -> None:
    folder = written(tmp_path / "t")
    drop_column(folder, "x")
    add_column(folder, "x", [[0.5] * 30])
    verify(folder)
    change(folder / "x.safetensors", 4096)
    fails(InvalidFileError, "rows 0 to 29 of the column 'x' have changed: 'x.safetensors'", lambda: verify(folder))


def test_a_table_without_checksums(tmp_path: Path) -> None:
    folder = written(tmp_path / "t", checksums=False)
    verify(folder)
    change(folder / "x.safetensors", 4096 + 8)
    verify(folder)  # only the rows have changed
    change(folder / "text.offsets.safetensors", 4096 + 8 * 7, 255)
    with pytest.raises(
        InvalidFileError, match=r"'text.offsets.safetensors': 'offsets': expected ascending offsets, got"
    ):
        verify(folder)
    RowWriter(tmp_path / "empty", like=LIKE).close()
    change(tmp_path / "empty" / "x.safetensors", 30)
    fails(InvalidFileError, "no safetensors file with the 0 rows of 'x'", lambda: verify(tmp_path / "empty"))
    os.truncate(folder / "x.safetensors", 4096 + 8 * 30 + 1)
    fails(InvalidFileError, "no safetensors file with the 30 rows of 'x'; repair the table$", lambda: verify(folder))
    (folder / "x.safetensors").unlink()
    fails(InvalidFileError, r"the file 'x.safetensors' is missing$", lambda: verify(folder))


def test_a_ragged_column_that_begins_with_empty_rows(tmp_path: Path) -> None:
    """Two flushes begin at its value 0."""
    with RowWriter(tmp_path / "t", like={"r": [[1]]}, ragged=["r"], checksums=True) as writer:
        for values in ([[], []], [[], []], [[1, 2], []], [[3]]):
            writer.write({"r": values})
            writer.flush()
            verify(tmp_path / "t")
    verify(tmp_path / "t")
    assert load(tmp_path / "t")["r"].lengths.tolist() == [0, 0, 0, 0, 2, 0, 1]


def test_beside_a_writer(tmp_path: Path) -> None:
    with RowWriter(tmp_path / "t", like=LIKE, ragged=["text"], checksums=True) as writer:
        verify(tmp_path / "t")
        for first in (0, 5, 10):
            writer.write(rows(first, 5))
            verify(tmp_path / "t")
            writer.flush()
            verify(tmp_path / "t")
            assert len(load(tmp_path / "t").rows) == first + 5
    verify(tmp_path / "t")


@pytest.mark.parametrize("closes", [False, True])
def test_a_writer_opens_while_verify_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closes: bool) -> None:
    """`verify` has read that the table is at rest, and then a writer appends."""
    folder, writers = written(tmp_path / "t"), list[RowWriter]()
    module = importlib.import_module("tensordict_lite.tables.verify")
    real = module.check_size

    def append_first(*args: Any) -> Any:
        if not writers:
            writers.append(RowWriter(folder, append=True))
            writers[0].write(rows(30, 5))
            writers[0].flush()
            if closes:
                writers[0].close()
        return real(*args)

    monkeypatch.setattr(module, "check_size", append_first)
    verify(folder)
    writers[0].close()
    assert len(load(folder).rows) == 35


def test_overwrite_keeps_the_old_checksums_until_it_is_replaced(tmp_path: Path) -> None:
    folder = written(tmp_path / "t")
    for _ in range(2):
        with RowWriter(folder, like=LIKE, ragged=["text"], checksums=True, mode="overwrite") as writer:
            writer.write(rows(0, 3))
            verify(folder)
        verify(folder)
        assert len(os.listdir(folder)) == 6 and len(load(folder).rows) == 3


def test_options(tmp_path: Path) -> None:
    folder = written(tmp_path / "t", checksums=False)
    with pytest.raises(
        TypeError, match=r"^RowWriter takes checksums= with like=; a table that exists has checksums already or never$"
    ):
        RowWriter(folder, append=True, checksums=True)
    with pytest.raises(ValueError, match=r"^this table has no checksums; only a new table can start them$"):
        RowWriter(folder, like=LIKE, ragged=["text"], checksums=True, mode="append")
    RowWriter(written(tmp_path / "u"), like=LIKE, ragged=["text"], checksums=True, mode="append").close()
    with pytest.raises(FileNotFoundError):
        verify(tmp_path / "none")
