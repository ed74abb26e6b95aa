"""The examples, run as a user runs them, with every warning an error."""

from __future__ import annotations

import ast
import csv
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

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


# The gallery. Each example runs in this process, which has imported torch already; `plain_NAME` is its twin in plain dicts.
GALLERY = Path(__file__).parent.parent / "docs" / "gallery.md"
TWINS = ["classifier", "ppo", "finetune", "soup"]


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the examples, on the path for this test alone."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    threads = torch.get_num_threads()
    yield EXAMPLES
    torch.set_num_threads(threads)
    for path in EXAMPLES.rglob("*.py"):
        sys.modules.pop(path.stem, None)


def twin(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"plain_{name}", EXAMPLES / "plain" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed_by(example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any, *options: str) -> str:
    monkeypatch.setattr(sys, "argv", [example.__name__, *options])
    example.main()
    return capsys.readouterr().out


@pytest.mark.slow
def test_the_classifier(examples: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    example: Any = importlib.import_module("classifier")
    printed = printed_by(example, monkeypatch, capsys)
    assert float(re.findall(r"^held-out accuracy ([\d.]+)$", printed, flags=re.MULTILINE)[0]) >= 0.9
    assert len(re.findall(r"^images with \d boxes: \d+ of \d+ right$", printed, flags=re.MULTILINE)) == 5

    plain: Any = twin("classifier")
    model, cpu = example.Classifier(), torch.device("cpu")
    mine, other = example.evaluate(model, 20, cpu), plain.evaluate(model, 20, cpu)
    assert mine.decode("id") == other.pop("id")
    assert mine.drop("id") == DeviceDict(other)
    other["id"] = mine.decode("id")
    groups = {count: len(group.rows) for count, group in mine.rows.group_by("n_boxes").items()}
    assert {count: len(group["texture"]) for count, group in plain.group_by_count(other).items()} == groups
    samples = [example.Boxes(0, 5)[i] for i in range(5)]
    mine, other = example.collate_boxes(samples), plain.collate_boxes(samples)
    assert mine.decode("id") == other.pop("id") and mine.drop("id") == DeviceDict(other)


@pytest.mark.slow
def test_ppo_learns(examples: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    example: Any = importlib.import_module("ppo")
    printed = printed_by(example, monkeypatch, capsys)
    lengths = [int(found) for found in re.findall(r"mean length (\d+)", printed)]
    assert lengths[0] < 40 and lengths[-1] >= 100

    plain: Any = twin("ppo")
    agent, results = example.Agent(), []
    for module in (example, plain):
        torch.manual_seed(0)
        carts = example.CartPoles(4, torch.device("cpu"))
        rollout = module.collect(agent, carts, None)
        results.append(module.add_advantages(rollout, agent.value(carts.state)))
    assert results[0] == DeviceDict(results[1])
    flat = plain.flatten(results[1])
    assert results[0].rows.flatten() == DeviceDict(flat)
    rewards = torch.cat([batch["value"] for batch in plain.batches(flat, 100)])
    assert torch.equal(rewards.sort().values, flat["value"].sort().values)


@pytest.mark.slow
def test_rows_in_memory(examples: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    example: Any = importlib.import_module("rows")
    printed = printed_by(example, monkeypatch, capsys, "--rows", "20000", "--batches", "5", "--rounds", "1")
    assert len(re.findall(r"^[\w. -]+: [\d,]+ rows a second$", printed, flags=re.MULTILINE)) == 2
    table = example.make_table(100)
    for mine, other in zip(
        DataLoader(table.rows, batch_size=32), DataLoader(example.HandWritten(dict(table)), batch_size=32), strict=True
    ):
        assert mine == DeviceDict(other)


@pytest.mark.slow
def test_a_soup_is_better_than_its_models_in_the_mean(
    examples: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    example: Any = importlib.import_module("soup")
    printed = printed_by(example, monkeypatch, capsys)
    errors = [float(found) for found in re.findall(r"^model \d: error ([\d.]+)$", printed, flags=re.MULTILINE)]
    soup, greedy = (float(re.findall(rf"^{name}: error ([\d.]+)$", printed, flags=re.MULTILINE)[0])
                    for name in ("soup of all", "greedy soup"))  # fmt: skip
    assert soup < sum(errors) / len(errors) and greedy <= min(errors)

    plain: Any = twin("soup")
    weights = [DeviceDict(example.new_model().state_dict()) for _ in range(3)]
    assert example.soup(weights) == DeviceDict(plain.soup([dict(one) for one in weights]))
    other = plain.greedy_soup(example.new_model(), [dict(one) for one in weights])
    assert example.greedy_soup(example.new_model(), weights) == DeviceDict(other)


@pytest.mark.slow
def test_typed_batches(examples: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    printed = printed_by(importlib.import_module("typed"), monkeypatch, capsys)
    assert float(re.findall(r"^loss ([\d.]+)$", printed, flags=re.MULTILINE)[0]) < 0.3
    assert "ValueError: Batch.action: expected Int[Tensor, 'batch'], got int64[3]" in printed
    assert "ValueError: Batch.weight: expected Float[Tensor, 'batch'], got int64[2]" in printed
    assert "TypeError: Batch has no field 'acton', did you mean 'action'?" in printed


@pytest.mark.slow
def test_pyright_reads_the_typed_example(examples: Path, tmp_path: Path) -> None:
    source = (examples / "typed.py").read_text(encoding="utf-8")
    wrong = source.replace("policy(batch.obs)", "policy(batch.ops)").replace("action=torch.tensor([0, 1]), ", "")
    (tmp_path / "wrong.py").write_text(wrong, encoding="utf-8")
    run = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    done = subprocess.run(
        [*run, "typed.py", str(tmp_path / "wrong.py")], cwd=examples, capture_output=True, text=True, check=False
    )
    assert "typed.py:" not in done.stdout
    assert 'Cannot access attribute "ops" for class "Batch"' in done.stdout
    assert 'Argument missing for parameter "action"' in done.stdout


def code_lines(path: Path) -> dict[str, int]:
    """Lines of code of each definition of a file: no blank lines, comments or docstrings."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    counts: dict[str, int] = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            name, first = node.name, min([node.lineno, *(one.lineno for one in node.decorator_list)])
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, first = node.targets[0].id, node.lineno
        else:
            continue
        left_out = {
            number
            for inner in ast.walk(node)
            if isinstance(inner, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(inner) is not None
            for number in range(inner.body[0].lineno, (inner.body[0].end_lineno or 0) + 1)
        }
        counts[name] = sum(
            number not in left_out and bool(line.strip()) and not line.strip().startswith("#")
            for number, line in enumerate(lines[first - 1 : node.end_lineno], first)
        )
    return counts


def test_the_gallery_counts_the_lines_of_code() -> None:
    shown = re.findall(
        r"^\| \[.*?\]\(#.*?\) \| `(\w+)\.py` \| (\d+) \| (\d+) \|", GALLERY.read_text("utf-8"), re.MULTILINE
    )
    counted: list[tuple[str, int, int]] = []
    for name in TWINS:
        mine, other = code_lines(EXAMPLES / f"{name}.py"), code_lines(EXAMPLES / "plain" / f"{name}.py")
        counted.append((name, sum(mine.get(one, 0) for one in other), sum(other.values())))
    assert [(name, int(mine), int(other)) for name, mine, other in shown] == counted
    assert all(mine < other for _, mine, other in counted)


def test_the_gallery_shows_the_code_of_the_examples() -> None:
    page = GALLERY.read_text(encoding="utf-8")
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    checked = 0
    for section in sections:
        for name in re.findall(r"`examples/(\w+)\.py`", section)[:1]:
            source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
            for block in re.findall(r"^```py\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL):
                assert block in source, f"{name}.py has no such lines: {block}"
                checked += 1
    assert checked >= 6


def test_the_pages_link_to_programs_and_notebooks_that_exist() -> None:
    """`docs/programs.py` makes a page of the site for each."""
    pages = sorted(GALLERY.parent.glob("*.md"))
    links = {link for page in pages for link in re.findall(r"\]\((\.\./examples/.*?)\)", page.read_text("utf-8"))}
    assert all((GALLERY.parent / link).is_file() for link in links)
    linked = {(GALLERY.parent / link).resolve() for link in links}
    programs = {*EXAMPLES.glob("*.py"), *EXAMPLES.glob("plain/*.py"), *EXAMPLES.glob("notebooks/*.ipynb")}
    assert {path.resolve() for path in programs} <= linked


def test_every_picture_of_the_gallery_exists() -> None:
    pictures = re.findall(r"!\[.+?\]\((.*?)\)", GALLERY.read_text("utf-8"))
    assert len(pictures) == 3 and all((GALLERY.parent / picture).is_file() for picture in pictures)


def test_examples_are_short() -> None:
    for name in [*TWINS, "rows", "typed", "checkpoint", "table", "ddp_penguins"]:
        assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 150, name
