"""pyright and mypy, both strict, know the classes as a client sees them, and flag the lines that they should."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "typing"
ROOT = HERE.parent.parent
pytest.importorskip("jaxtyping")


def pyright(path: str) -> set[int]:
    run = [sys.executable, "-m", "pyright", "--outputjson", "--pythonversion", f"3.{sys.version_info.minor}", path]
    found = json.loads(subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False).stdout)
    assert found["summary"]["filesAnalyzed"] == 1
    return {one["range"]["start"]["line"] + 1 for one in found["generalDiagnostics"] if one["severity"] == "error"}


def mypy(path: str) -> set[int]:
    run = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", path]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    lines = [line for line in done.stdout.splitlines() if " error: " in line]
    assert all(line.startswith(f"{path}:") for line in lines), done.stdout
    return {int(line.split(":")[1]) for line in lines}


@pytest.mark.slow
# One after the other on one worker: the second run of mypy takes what the first has read from its cache.
@pytest.mark.parametrize("check", [pyright, pytest.param(mypy, marks=pytest.mark.xdist_group("mypy"))])
@pytest.mark.parametrize("name", ["good.py", "bad.py"])
def test_a_client(check: Callable[[str], set[int]], name: str) -> None:
    lines = (HERE / name).read_text(encoding="utf-8").splitlines()
    expected = {number for number, line in enumerate(lines, 1) if line.endswith("# error")}
    assert bool(expected) == (name == "bad.py")
    assert check(str((HERE / name).relative_to(ROOT))) == expected
