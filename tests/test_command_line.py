"""``python -m tensordict_lite``: in this process, and in a pipe."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tensordict_lite import DeviceDict, Ragged, StringEncoder, Vocabulary, register_encoder
from tensordict_lite.tables import RowWriter

main: Any = importlib.import_module("tensordict_lite.__main__").main


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def batch() -> DeviceDict[Any]:
    return DeviceDict(
        {"x": torch.arange(6.0), "name": ["Ada", "Bo", "Cy"] * 2, "obs": {"ids": Ragged.from_rows([[1], [2, 3]] * 3)}},
        encoders={"name": Vocabulary(["Ada", "Bo", "Cy"])},
    )


def table(folder: str, **options: Any) -> None:
    with RowWriter(folder, like=batch(), **options) as writer:
        writer.write(batch())


def test_the_tree_of_a_file_and_of_a_table(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch().save("d.safetensors")
    table("runs/table")
    assert main(["d.safetensors"]) == 0
    assert capsys.readouterr().out == f"{batch()!r}\n"
    assert main(["runs/table", "d.safetensors"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("runs/table:\nDeviceDict(cpu, 6 rows, 3 fields, ") and "mapped from runs/table)" in out
    assert "d.safetensors:\nDeviceDict" in out


def test_rows_statistics_and_keys(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table("t")
    assert main(["t", "--rows", "2", "--describe", "--key", "obs", "--key", "x"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "DeviceDict.rows(6): the first 2\n   x  obs.ids\n0  0  [1]\n1  1  [2, 3]\nDeviceDict(cpu, 6 rows"
    )
    assert "int64[6, 1 to 2]" in out and "name" not in out
    assert main(["t", "--key", "obs.id"]) == 2
    assert capsys.readouterr().err == "t: \"no field 'obs.id'; did you mean 'obs.ids'?\"\n".replace('"', "")


def test_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table("t")
    assert main(["t", "--json", "--rows", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == [{"x": 0.0, "name": "Ada", "obs": {"ids": [1]}}]
    assert found["fields"][1] == {
        "path": ["name"], "dtype": "int64", "shape": [6], "encoder": "Vocabulary(['Ada', 'Bo', 'Cy'])",
    }  # fmt: skip
    assert found["fields"][2]["path"] == ["obs", "ids"] and found["fields"][2]["shape"] == [6, None]
    assert main(["t", "t", "--json", "--describe"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["fields"][0]["mean"] for line in lines] == [2.5, 2.5]


def test_parts(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(2):
        table("parts", part=rank, parts=2, checksums=True)
    assert main(["parts"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("JoinedRows(12 rows of 2 ") and "mapped from parts/part-00000" in out
    assert main(["parts", "--rows", "7", "--describe"]) == 0
    out = capsys.readouterr().out
    assert "DeviceDict.rows(12): the first 7" in out and "\n6  0 " in out and "float32[12]" in out
    assert out.count("JoinedRows(12 rows of 2 ") == 1, "the title of the statistics"
    assert main(["parts", "--verify"]) == 0
    assert capsys.readouterr().out == "parts: no damage found\n"
    with monkeypatch.context() as patched:
        patched.setattr(sys.stderr, "isatty", lambda: True)
        assert main(["parts", "--verify"]) == 0
    assert "%|" in capsys.readouterr().err
    with open("parts/part-00001/x.safetensors", "r+b") as file:
        file.seek(4097)
        file.write(b"?")
    assert main(["parts", "--verify"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "rows 0 to 5 of the column 'x' have changed" in error and "part-00001" in error
    shutil.rmtree("parts/part-00000")
    assert main(["parts", "--verify"]) == 2
    assert "has 1 of 2 parts; part 0 is missing" in capsys.readouterr().err


def test_files_of_torch_save(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = {"w": torch.ones(2, 3)}
    torch.save({"model": weights, 0: [torch.zeros(2), {"lr": 0.5}], "epoch": 3, "none": None}, "c.pt")
    torch.save(batch(), "d.pt")
    torch.save(weights, "old.pt", _use_new_zipfile_serialization=False)
    torch.save(torch.ones(3), "one.pt")
    assert main(["c.pt"]) == 0
    assert capsys.readouterr().out == (
        "DeviceDict(cpu, 2 rows, 5 fields, 32 B)\n├─ model\n│  └─ w      float32[2, 3]\n├─ 0\n│  ├─ 0      float32[2]\n"
        "│  └─ 1\n│     └─ lr  object float     0.5\n├─ epoch     object int       3\n└─ none      object NoneType\n"
    )
    assert main(["d.pt"]) == 0
    assert capsys.readouterr().out == f"{batch()!r}\n"
    assert main(["old.pt", "one.pt", "--describe"]) == 0
    assert "float32[3]" in capsys.readouterr().out
    assert main(["c.pt", "old.pt", "--verify"]) == 0
    said = "c.pt: no damage found\nold.pt: it can be opened; files of this format have no checksums\n"
    assert capsys.readouterr().out == said
    data = bytearray(Path("c.pt").read_bytes())
    at = data.index(torch.ones(2, 3).numpy().tobytes())
    data[at] ^= 1
    Path("bad.pt").write_bytes(data)
    assert main(["bad.pt", "--verify"]) == 1
    assert "is damaged" in capsys.readouterr().err
    whole = Path("c.pt").read_bytes()
    for damaged in (b"\x80\x02evil", *(whole[:size] for size in (8, 100, len(whole) // 2, len(whole) - 1))):
        Path("bad.pt").write_bytes(damaged)
        assert main(["bad.pt"]) == 1
        assert capsys.readouterr().err.startswith("bad.pt: not a file that torch.load(weights_only=True) reads: ")


def test_a_file_of_torch_save_that_runs_code_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"x": torch.nn.Linear(2, 2)}, "bad.pt")
    assert main(["bad.pt"]) == 1
    error = capsys.readouterr().err
    assert error == "bad.pt: not a file that torch.load(weights_only=True) reads: Weights only load failed\n"


@register_encoder
class Unbuilt(StringEncoder):
    """An encoder that `load` does not build."""

    name = "command_line.unbuilt"
    runs_code = True

    def encode(self, strings: Any) -> torch.Tensor:
        return torch.tensor([len(s) for s in strings])

    def to_json(self) -> dict[str, Any]:
        return {}


def test_an_encoder_that_load_does_not_build(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    DeviceDict({"x": ["a", "b"]}, encoders={"x": Unbuilt()}).save("d.safetensors")
    assert main(["d.safetensors", "--rows", "1"]) == 0
    assert capsys.readouterr().out == "DeviceDict.rows(2): the first 1\n   x\n0  1\n"


@pytest.mark.parametrize(("name", "reason"), [
    ("nope", "No such file or directory"),
    (".", "Is a directory, and no table: it has no table.json"),
    ("a\nb", "No such"),
])  # fmt: skip
def test_a_wrong_path_is_an_error_of_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], name: str, reason: str
) -> None:
    batch().save("d.safetensors")
    assert main([name, "d.safetensors"]) == 2
    out, error = capsys.readouterr()
    assert error.startswith(f"{name if name.isprintable() else repr(name)}: {reason}") and error.count("\n") == 1
    assert "DeviceDict" in out, "the other paths are shown"


LIES = [
    b"", b"hello" * 100, (2**40).to_bytes(8, "little") + b"{}", (10).to_bytes(8, "little") + b"{" * 10,
    (8).to_bytes(8, "little") + b'{"a":1} ', b"PK\x03\x04" + b"\xff" * 90, b"\x80\x02" + b"\xff" * 90,
]  # fmt: skip


@pytest.mark.parametrize("data", LIES, ids=range(len(LIES)))
def test_damage_is_named(here: Path, capsys: pytest.CaptureFixture[str], data: bytes) -> None:
    Path("f").write_bytes(data)
    assert main(["f"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("f: ") and error.count("\n") == 1 and error.strip().isprintable()


def test_a_header_that_lies(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for end, shape in ((10**15, [10**15 // 4]), (8, [3]), (8, [-1])):
        header = json.dumps({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}).encode()
        Path("f").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
        assert main(["f"]) == 1
    name = "\x1b[2J\u202e<b>\n"
    header = json.dumps({name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    Path("f").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    capsys.readouterr()
    assert main(["f", "--rows", "1", "--describe"]) == 0 and main(["f"]) == 0
    assert all(map(str.isprintable, capsys.readouterr().out.splitlines()))


def test_a_file_of_10_000_fields(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    DeviceDict({f"k{i}": torch.zeros(1) for i in range(10_000)}).save("many.safetensors")
    assert main(["many.safetensors"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 100


def test_wrong_options(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--rows", "-1", "x"], ["--rows", "two", "x"], []):
        with pytest.raises(SystemExit) as caught:
            main(options)
        assert caught.value.code == 2


@pytest.mark.slow
def test_a_pipe_that_closes_early_is_no_error(here: Path) -> None:
    table("t")
    command = f"{sys.executable} -m tensordict_lite {'t ' * 3000} --json | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stderr == "" and len(done.stdout.splitlines()) == 1
    environment = {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = f"{sys.executable} -m tensordict_lite t --describe"
    plain = subprocess.run(command.split(), capture_output=True, check=True, env=environment)
    assert plain.stdout.isascii() and not plain.stderr and b"\x1b" not in plain.stdout, "no colour, no progress"
    closed = subprocess.run(f"{command} >&-", shell=True, capture_output=True, check=False)
    assert closed.returncode == 0 and not closed.stderr
