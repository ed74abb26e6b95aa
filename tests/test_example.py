"""The examples, run as a user runs them, with every warning an error."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tensordict_lite import DeviceDict

EXAMPLES = Path(__file__).parent.parent / "examples"
SPECIES = {"Adelie", "Chinstrap", "Gentoo"}


def run(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(EXAMPLES / "penguins.py"), "--out", str(out), *options]
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", env={**os.environ, "PYTHONUTF8": "1"}, timeout=120, check=False
    )


def held_out_accuracy(printed: str) -> float:
    found = re.search(r"^held-out accuracy ([\d.]+), (\d+) of (\d+) penguins$", printed, flags=re.MULTILINE)
    assert found, printed
    accuracy, right, count = map(float, found.groups())
    assert accuracy == pytest.approx(right / count, abs=5e-4)
    return accuracy


def test_the_table_is_the_published_one() -> None:
    with (EXAMPLES / "data" / "penguins.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 344
    assert {row["species"] for row in rows} == SPECIES
    assert sum(value == "NA" for row in rows for value in row.values()) == 2 * 4 + 11


@pytest.mark.slow
def test_it_tells_the_species_and_shows_its_work(tmp_path: Path) -> None:
    done = run(tmp_path / "new")
    assert done.returncode == 0, done.stderr
    assert held_out_accuracy(done.stdout) >= 0.95

    assert "344 rows" in done.stdout and "bill_length_mm 2," in done.stdout and "sex 11," in done.stdout
    assert done.stdout.count("DeviceDict(") == 1
    assert re.search(r"^├─ species +int64\[344\] +Vocabulary\(\['Adelie', ", done.stdout, flags=re.MULTILINE)
    assert re.search(r"^│  ├─ bill_length_mm +float32\[344\]$", done.stdout, flags=re.MULTILINE)
    assert re.search(r"^training on \w+", done.stdout, flags=re.MULTILINE)

    decoded = re.findall(r"^  (\S+) / (\S+)  \(", done.stdout, flags=re.MULTILINE)
    assert len(decoded) == 7
    assert {name for pair in decoded for name in pair} <= SPECIES

    picture = tmp_path / "new" / "confusion.png"
    assert str(picture) in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.slow
def test_it_fails_where_the_network_has_not_learnt(tmp_path: Path) -> None:
    done = run(tmp_path, "--epochs", "1")
    assert done.returncode == 1
    assert held_out_accuracy(done.stdout) < 0.95
    assert re.search(r"^held-out accuracy 0\.\d+ is under the required 0\.95$", done.stderr, flags=re.MULTILINE)


@pytest.mark.slow
def test_a_table_over_the_memory_limit(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLES / "table.py"), "--out", str(tmp_path), "--rows", "60000"]
    environment = {**os.environ, "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "an array of the size of the table: refused, as it takes more than 128 MiB" in done.stdout
    assert re.search(r"^trained on 48000 rows, [\d,]+ rows a second$", done.stdout, flags=re.MULTILINE)
    assert re.search(r"^row 7: '\w+ stripes, number 7'$", done.stdout, flags=re.MULTILINE)
    assert float(re.findall(r"^held-out accuracy ([\d.]+)$", done.stdout, flags=re.MULTILINE)[0]) >= 0.95


@pytest.mark.ranks
def test_on_two_processes() -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(EXAMPLES / "ddp_penguins.py"),
        "--epochs",
        "20",
    ]
    environment = {**os.environ, "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "epoch 20: 276 rows on all ranks" in done.stdout
    found = re.search(r"^held-out accuracy ([\d.]+), (\d+) of 69 penguins on 2 ranks$", done.stdout, flags=re.MULTILINE)
    assert found and float(found[1]) >= 0.95 and "rank 1: 34 penguins, the first a" in done.stdout


@pytest.mark.slow
def test_a_checkpoint_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLES / "checkpoint.py"), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "the weights and their moving average are equal, bit for bit" in done.stdout
    lines = re.findall(r"^step 60, .*: +(\{.*\})$", done.stdout, flags=re.MULTILINE)
    assert len(lines) == 2 and lines[0] == lines[1] and "'grad_norm': " in lines[0] and "'step': 59" in lines[0]
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert set(state) == {"model", "average", "optimizer", "scheduler", "step", "rng"}
    assert type(state["model"]) is DeviceDict and type(state["optimizer"]) is dict and state["step"] == 30
    assert state["average"] != state["model"] and state["average"]["1.num_batches_tracked"] == 30
