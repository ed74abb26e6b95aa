"""The examples, run as a user runs them, with every warning an error."""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import free_port, meet, on_ranks

from tensordict_lite import DeviceDict, Ragged

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
    assert re.search(r"^├─ species +int64\[344\] +Vocabulary\(\['Adeli", done.stdout, flags=re.MULTILINE)
    assert re.search(r"^│  ├─ bill_length_mm +float32\[344\]$", done.stdout, flags=re.MULTILINE)
    assert re.search(r"^epoch 40: training accuracy (0.9\d+|1.000)$", done.stdout, flags=re.MULTILINE)

    decoded = re.findall(r"^  (\S+) / (\S+)  \(", done.stdout, flags=re.MULTILINE)
    assert len(decoded) == 7
    assert {name for pair in decoded for name in pair} <= SPECIES

    picture = tmp_path / "new" / "confusion.png"
    assert str(picture) in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.slow
def test_a_table_over_the_memory_limit(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLES / "table.py")]
    command += ["--out", str(tmp_path), "--rows", "48000"]
    environment = {**os.environ, "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "an array of the size of the table: refused, as it takes more than 128 MiB" in done.stdout
    assert re.search(r"^trained on [\d,]+ rows a second$", done.stdout, flags=re.MULTILINE)
    assert re.search(r"^row 7: '\w+ stripes, number 7'$", done.stdout, flags=re.MULTILINE)
    assert float(re.findall(r"^held-out accuracy ([\d.]+)$", done.stdout, flags=re.MULTILINE)[0]) >= 0.95


@pytest.mark.slow
def test_a_killed_training_goes_on_bit_for_bit_and_on_other_ranks() -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLES / "resume.py")]
    environment = {**os.environ, "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "killed after step 25\n" in done.stdout
    assert "on two ranks: the same weights, bit for bit\n" in done.stdout
    assert "on three ranks: 591 of 600 texts came once, the last step is left out\n" in done.stdout
    batches = re.findall(r"^(.*): step (\d+), (\d+) batches in", done.stdout, re.MULTILINE)
    assert batches == [("whole", "60", "60"), ("two ranks again", "60", "40"), ("three ranks", "46", "26")]
    assert len(re.findall(r"^  waiting .* ms a step", done.stdout, re.MULTILINE)) == 3
    assert len((EXAMPLES / "resume.py").read_text(encoding="utf-8").splitlines()) < 130


# The gallery. Each example runs in this process, which has imported torch already. `plain_NAME` does the same with
# plain dicts.
GALLERY = Path(__file__).parent.parent / "docs" / "gallery.md"
CPU = torch.device("cpu")
# The arguments of `run`. FOLDER stands for a new folder.
FOLDER = object()
PROGRAMS: dict[str, tuple[Any, ...]] = {
    "classifier": (96, 2, 2, CPU),
    "ppo": (2, CPU),
    "finetune": (3, CPU),
    "packed": (1, CPU),
    "checkpoint": (FOLDER, "cpu"),
    "soup": (3,),
    "rows": (20_000, 10, 2),
    "table": (FOLDER, 1500, 256, 2),
    "typed": (200, 2),
    "penguins": (12, 1),
}
TREE = re.compile(r"^(DeviceDict\(|[├│└]).*\n\n?", flags=re.MULTILINE)
sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
figures: Any = importlib.import_module("figures")


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the examples, on the path for this test alone."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    threads = torch.get_num_threads()
    yield EXAMPLES
    torch.set_num_threads(threads)
    for path in EXAMPLES.rglob("*.py"):
        sys.modules.pop(path.stem, None)


def twin(name: str) -> Any:
    return importlib.import_module(f"plain_{name}")


def printed_by(example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any, *options: str) -> str:
    monkeypatch.setattr(sys, "argv", [example.__name__, *options])
    example.main()
    return capsys.readouterr().out


def ran(program: Any, arguments: tuple[Any, ...], folder: Path, capsys: Any) -> tuple[Any, str]:
    """What ``run`` of a program returns, and what it prints: no tree of a DeviceDict, no speed."""
    result = program.run(*(folder if one is FOLDER else one for one in arguments))
    return result, re.sub(r"[\d,]+ (rows|tokens) a second", "speed", TREE.sub("", capsys.readouterr().out))


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_the_same_with_plain_dicts(examples: Path, name: str, tmp_path: Path, capsys: Any) -> None:
    if name == "finetune":
        pytest.importorskip("transformers")
    arguments = PROGRAMS[name]
    mine = ran(importlib.import_module(name), arguments, tmp_path / "mine", capsys)
    other = ran(twin(name), arguments, tmp_path / "plain", capsys)
    assert mine == other


# The options that make each program with plain dicts short, and what it prints. The tests above run `run` of each.
RUN: dict[str, tuple[list[str], str]] = {
    "classifier": (["--workers", "0"], "held-out accuracy "),
    "ppo": ([], "update 16: "),
    "finetune": ([], "6 of 6 right"),
    "packed": (["--epochs", "2"], "the same losses, packed and padded"),
    "checkpoint": (["--out", "."], "equal, bit for bit"),
    "soup": (["--models", "2"], "greedy soup: error "),
    "rows": (["--rows", "20000", "--batches", "10", "--workers", "0"], "5 people: mean fare "),
    "table": (["--out", ".", "--rows", "20000", "--workers", "0"], "held-out accuracy "),
    "typed": ([], "loss "),
    "penguins": (["--out", "."], "drawn to "),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_a_program_with_plain_dicts_runs_by_itself(
    examples: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    if name == "finetune":
        pytest.importorskip("transformers")
    options, printed = RUN[name]
    program = examples / f"plain_{name}.py"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(program), *options])
    runpy.run_path(str(program), run_name="__main__")
    assert printed in capsys.readouterr().out


def printed_on_a_rank(name: str) -> str:
    """What a program prints that torchrun has started, as far as its environment says. It makes and ends the group."""
    sys.argv = [f"{name}.py", "--epochs", "20"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return printed.getvalue()


def penguins_on_a_rank(rank: int, ports: Sequence[int]) -> None:
    sys.path.insert(0, str(EXAMPLES))
    dist.destroy_process_group()
    outputs: list[str] = []
    for name, port in zip(("ddp_penguins", "plain_ddp_penguins"), ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        outputs.append(TREE.sub("", printed_on_a_rank(name)))
    printed, plain = outputs
    meet(rank, 2, os.environ["MEETING"], "after")
    assert printed == plain
    if rank == 0:
        assert "epoch 20: 276 rows on all ranks" in printed and "rank 1: 34 penguins, the first a" in printed
        found = re.search(r"^held-out accuracy ([\d.]+), (\d+) of 69 penguins on 2 ranks$", printed, flags=re.MULTILINE)
        assert found and float(found[1]) >= 0.95


@pytest.mark.ranks
def test_penguins_on_two_processes() -> None:
    """Both programs print the same, so they do the same."""
    on_ranks(penguins_on_a_rank, [free_port(), free_port()])


@pytest.mark.slow
def test_penguins_where_the_network_has_not_learnt(
    examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    with pytest.raises(SystemExit, match=r"^held-out accuracy 0\.\d+ is under the required 0\.95$"):
        printed_by(importlib.import_module("penguins"), monkeypatch, capsys, "--out", str(tmp_path), "--epochs", "1")
    assert held_out_accuracy(capsys.readouterr().out) < 0.95


@pytest.mark.slow
def test_a_checkpoint_is_resumed_bit_for_bit(
    examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    printed = printed_by(importlib.import_module("checkpoint"), monkeypatch, capsys, "--out", str(tmp_path))
    assert "the weights and their moving average are equal, bit for bit" in printed
    lines = re.findall(r"^step 60, .*: +(\{.*\})$", printed, flags=re.MULTILINE)
    assert len(lines) == 2 and lines[0] == lines[1] and "'grad_norm': " in lines[0] and "'step': 60" in lines[0]
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert set(state) == {"model", "average", "optimizer", "scheduler", "step", "rng"}
    assert type(state["model"]) is DeviceDict and type(state["optimizer"]) is dict and state["step"] == 30
    assert state["average"] != state["model"] and state["average"]["1.num_batches_tracked"] == 30


@pytest.mark.slow
def test_the_classifier(examples: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    example: Any = importlib.import_module("classifier")
    printed = printed_by(example, monkeypatch, capsys)
    assert float(re.findall(r"^held-out accuracy ([\d.]+)$", printed, flags=re.MULTILINE)[0]) >= 0.9
    assert len(re.findall(r"^images with \d boxes: \d+ of \d+ right$", printed, flags=re.MULTILINE)) == 5

    plain, model = twin("classifier"), example.Classifier()
    mine, other = example.evaluate(model, 20, CPU), plain.evaluate(model, 20, CPU)
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

    plain, agent, results = twin("ppo"), example.Agent(), []
    for module in (example, plain):
        torch.manual_seed(0)
        carts = example.CartPoles(4, CPU)
        results.append(module.with_advantages(module.collect(agent, carts), agent.value(carts.state)))
    assert results[0] == DeviceDict(results[1])
    flat = plain.flatten(results[1])
    assert results[0].rows.flatten() == DeviceDict(flat)
    rewards = torch.cat([batch["value"] for batch in plain.batches(flat, 100)])
    assert torch.equal(rewards.sort().values, flat["value"].sort().values)


@pytest.mark.slow
def test_rows_in_memory(examples: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    example: Any = importlib.import_module("rows")
    printed = printed_by(example, monkeypatch, capsys, "--rows", "100000", "--batches", "98")
    assert re.search(r"^trained on [\d,]+ rows a second$", printed, flags=re.MULTILINE)
    assert float(re.findall(r"^loss ([\d.]+)$", printed, flags=re.MULTILINE)[0]) < 10
    means = re.findall(r"^  (\d) people: mean fare ([\d.]+)$", printed, flags=re.MULTILINE)
    assert [people for people, _ in means] == list("12345") and all(23 < float(mean) < 24 for _, mean in means)


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

    plain = twin("soup")
    weights = [DeviceDict(example.new_model().state_dict()) for _ in range(3)]
    assert example.soup(weights) == DeviceDict(plain.soup([dict(one) for one in weights]))
    other = plain.greedy_soup(example.new_model(), [dict(one) for one in weights])
    assert example.greedy_soup(example.new_model(), weights) == DeviceDict(other)


@pytest.mark.slow
def test_packed_texts_give_the_losses_of_padded_texts(
    examples: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    example: Any = importlib.import_module("packed")
    printed = printed_by(example, monkeypatch, capsys)
    speed = dict(re.findall(r"^(\w+): .*, ([\d,]+) tokens a second$", printed, flags=re.MULTILINE))
    assert speed.keys() == {"padded", "packed"}
    assert float(re.findall(r"^packed: loss [\d.]+ to ([\d.]+),", printed, flags=re.MULTILINE)[0]) < 2
    assert "39 vectors, their mean has 64 numbers: two three four" in printed

    plain, samples = twin("packed"), example.make_samples(5, 2)
    mine, other = example.collate_texts(samples), plain.collate_texts(samples)
    assert mine["ids"].offsets is mine["labels"].offsets and mine["ids"].max_length == other["longest"]
    assert mine["ids"] == Ragged(other["ids"], other["offsets"])
    assert torch.equal(mine["ids"].positions(), plain.positions_of(other))


@pytest.mark.slow
def test_typed_batches(examples: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    printed = printed_by(importlib.import_module("typed"), monkeypatch, capsys)
    assert float(re.findall(r"^loss ([\d.]+)$", printed, flags=re.MULTILINE)[0]) < 0.3
    assert "ValueError: Batch.action: expected Int[Tensor, 'batch'], got int64[3]" in printed
    assert "ValueError: Batch.weight: expected Float[Tensor, 'batch'], got int64[2]" in printed
    assert "TypeError: Batch has no field 'acton', did you mean 'action'?" in printed


def pyright(files: list[Path], folder: Path) -> str:
    """What pyright says of these files, which can import the examples."""
    config = {"include": list(map(str, files)), "executionEnvironments": [{"root": str(EXAMPLES)}]}
    (folder / "pyrightconfig.json").write_text(json.dumps(config), encoding="utf-8")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "-p", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@pytest.mark.slow
def test_pyright_reads_the_typed_example(examples: Path, tmp_path: Path) -> None:
    source = (examples / "typed.py").read_text(encoding="utf-8")
    wrong = source.replace("policy(batch.obs)", "policy(batch.ops)").replace("action=torch.tensor([0, 1]), ", "")
    (tmp_path / "wrong.py").write_text(wrong, encoding="utf-8")
    said = pyright([examples / "typed.py", examples / "plain_typed.py", tmp_path / "wrong.py"], tmp_path)
    assert "typed.py:" not in said
    assert 'Cannot access attribute "ops" for class "Batch"' in said
    assert 'Argument missing for parameter "action"' in said


def test_the_plain_typed_batch_is_validated(examples: Path) -> None:
    plain = twin("typed")
    batch = importlib.import_module("typed").make_columns(3)
    with pytest.raises(ValueError, match=r"^Batch\.action: expected Int\[Tensor, 'batch'\], got int64\[2\]$"):
        plain.validated({**batch, "action": torch.zeros(2, dtype=torch.int64)})
    with pytest.raises(TypeError, match=r"^Batch has no field \['acton'\], its fields are "):
        plain.validated({**batch, "acton": 1})
    with pytest.raises(TypeError, match=r"^Batch lacks the fields \['obs'\]$"):
        plain.validated({key: value for key, value in batch.items() if key != "obs"})


@pytest.mark.parametrize("name", figures.PROGRAMS.values())
def test_a_program_has_fewer_lines_than_with_plain_dicts(name: str) -> None:
    mine, other = figures.lines_of(name)
    assert 10 < mine < other


def test_lines_of_code_are_counted(tmp_path: Path) -> None:
    source = """
        X, Y = 1, 2  # used
        UNUSED = 3

        @cache
        def shared():
            '''No code.'''

            # no code
            return X

        def run():
            '''Two lines
            of no code.'''
            return shared() + Y

        def main():
            run()
        """
    path = tmp_path / "some.py"
    path.write_text(textwrap.dedent(source), encoding="utf-8")
    found = figures.definitions(path)
    counts = {name: lines for name, (lines, _) in found.items()}
    assert counts == {"X": 1, "Y": 0, "UNUSED": 1, "shared": 3, "run": 2, "main": 2}
    assert figures.reached(found, {"run"}) == {"run", "shared", "X", "Y"}
    assert figures.reached(found, {"shared", "missing"}) == {"shared", "X", "Y"}  # one statement assigns X and Y


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
    programs = {*EXAMPLES.glob("*.py"), *EXAMPLES.glob("notebooks/*.ipynb")}
    assert {path.resolve() for path in programs} <= linked


@pytest.mark.slow
def test_the_tasks_and_recipes_of_the_gallery_do_the_same_with_plain_dicts() -> None:
    harness, tasks = importlib.import_module("harness"), importlib.import_module("bench_tasks")
    for case in tasks.cases():
        runs = {who: case.contenders[who](None) for who in (harness.DICT, harness.OURS)}
        plain, ours = (harness.plain(runs[who].result()) for who in runs)
        assert case.equal(plain, ours), case.operation


def test_every_picture_of_the_gallery_exists() -> None:
    pictures = re.findall(r"!\[.+?\]\((.*?)\)", GALLERY.read_text("utf-8"))
    assert len(pictures) == 3 and all((GALLERY.parent / picture).is_file() for picture in pictures)


def test_examples_are_short() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) < 150, path.name
