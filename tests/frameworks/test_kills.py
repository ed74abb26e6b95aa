"""A training that ends in any place goes on with the rows that are left, in each framework. A process is killed too."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import resume_programs
import torch.distributed as dist
from ranks import on_ranks
from resume_programs import EPOCHS, PROGRAMS, SIZE, STEPS, TABLE, Run, Stop

from tensordict_lite import BatchOrder

FRAMEWORKS = {"plain": "torch", "fabric": "lightning", "trainer": "transformers"}
"""What a program needs, if it is not its name."""
ROOT = Path(__file__).parents[2]
CUTS = ["accelerate", "trainer"]
"""They give the batches of an order of one rank to the ranks."""


@pytest.fixture(params=PROGRAMS)
def name(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(FRAMEWORKS.get(request.param, request.param))
    return request.param


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    """accelerate's state belongs to the process."""
    yield
    if "accelerate" in sys.modules:
        state = sys.modules["accelerate.state"]
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def run(name: str, folder: Path, **options: Any) -> list[Any]:
    """Run a training, and return all of its steps."""
    folder.mkdir(parents=True, exist_ok=True)
    training = Run(folder, **options)
    try:
        PROGRAMS[name](training)
    except Stop:
        assert training.done == training.stop
    else:
        assert training.stop is None
    return training.steps


def whole() -> list[list[int]]:
    order = BatchOrder(TABLE.rows, SIZE, shuffle=True, seed=3)
    return [rows for _ in order.epochs(EPOCHS) for rows in order]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stopped_training_goes_on(name: str, workers: int, tmp_path: Path) -> None:
    """In the middle of an epoch, and after its last batch: the same rows, and the same bits of the losses."""
    expected = run(name, tmp_path / "whole", workers=workers)
    assert [rows for rows, _ in expected] == whole()
    for stop in (STEPS - 3, STEPS):
        folder = tmp_path / str(stop)
        assert run(name, folder, workers=workers, stop=stop) == expected[:stop]
        assert run(name, folder, workers=workers) == expected, f"stopped after step {stop}"


@pytest.mark.parametrize("stop", [STEPS - 3, STEPS])
@pytest.mark.parametrize("killed", ["plain", "lightning"])
def test_a_killed_training_goes_on(killed: str, stop: int, tmp_path: Path) -> None:
    pytest.importorskip(FRAMEWORKS.get(killed, killed))
    expected = run(killed, tmp_path / "whole")
    command = [sys.executable, resume_programs.__file__, killed, str(tmp_path), "2", str(stop)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert run(killed, tmp_path, workers=2) == expected


def on_rank(rank: int, name: str, folder: Path, runs: list[tuple[str, int | None]]) -> None:
    """Trainings on two ranks, each in a folder, which end after so many steps."""
    for where, stop in runs:
        with contextlib.suppress(Stop):
            PROGRAMS[name](Run(folder / where, stop=stop, log=f"log-{rank}"))
        dist.barrier()  # the first rank may still write the checkpoint that the next run loads


@pytest.mark.ranks
@pytest.mark.parametrize("cuts", CUTS)
def test_two_ranks_go_on(cuts: str, tmp_path: Path) -> None:
    """On each rank with the same rows and losses, after a stop in an epoch, and after a stop at its end."""
    pytest.importorskip(FRAMEWORKS.get(cuts, cuts))
    for folder in ("whole", "stopped"):
        (tmp_path / folder).mkdir()
    in_an_epoch, at_its_end = ("stopped", STEPS // 2 - 1), ("stopped", 1)
    on_ranks(on_rank, cuts, tmp_path, [("whole", None), in_an_epoch, at_its_end, ("stopped", None)])
    for rank in range(2):
        expected, seen = (Run(tmp_path / folder, log=f"log-{rank}").steps for folder in ("whole", "stopped"))
        assert seen == expected and [rows for rows, _ in seen] == whole()[rank::2]


@pytest.mark.parametrize("ours", [each for each in PROGRAMS if each not in CUTS])
def test_another_number_of_ranks(ours: str, tmp_path: Path) -> None:
    """From one rank to two: every row comes once."""
    pytest.importorskip(FRAMEWORKS.get(ours, ours))
    before = run(ours, tmp_path, stop=3)
    after: list[Any] = []
    kept = {file: file.read_bytes() for file in tmp_path.iterdir()}
    for rank in range(2):
        for file, content in kept.items():
            file.write_bytes(content)
        after += run(ours, tmp_path, rank=rank, world=2)[3:]
    rows = sorted(chain(*[rows for rows, _ in before + after]))
    assert rows == sorted([*range(24)] * EPOCHS)


@pytest.mark.ranks
def test_accelerate_on_another_number_of_ranks(tmp_path: Path) -> None:
    """From two ranks to one: every row comes once."""
    pytest.importorskip("accelerate")
    on_ranks(on_rank, "accelerate", tmp_path, [(".", 3)])
    before = [step for rank in range(2) for step in Run(tmp_path, log=f"log-{rank}").steps]
    after = run("accelerate", tmp_path)
    assert sorted(chain(*[rows for rows, _ in before + after])) == sorted([*range(24)] * EPOCHS)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="older frameworks are tested there")
def test_the_page_names_the_versions_that_were_tested() -> None:
    page = (ROOT / "docs" / "order.md").read_text(encoding="utf-8")
    found = dict(re.findall(r"^- \*\*(\w[\w ]*) (\d[\d.]*)\*\*", page, re.MULTILINE))
    packages = {"PyTorch": "torch", "Fabric": "lightning", "HF Trainer": "transformers"}
    assert len(found) == len(PROGRAMS)
    for name, tested in found.items():
        assert tested == version(packages.get(name, name.lower())).split("+")[0], name
