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


Lines = set[tuple[str, int]]
"""The file and the number of each line with an error."""


def pyright(paths: list[str]) -> Lines:
    run = [sys.executable, "-m", "pyright", "--outputjson", "--pythonversion", f"3.{sys.version_info.minor}", *paths]
    found = json.loads(subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False).stdout)
    assert found["summary"]["filesAnalyzed"] == len(paths)
    errors = [one for one in found["generalDiagnostics"] if one["severity"] == "error"]
    return {(Path(one["file"]).name, one["range"]["start"]["line"] + 1) for one in errors}


def mypy(paths: list[str]) -> Lines:
    run = [sys.executable, "-m", "mypy", "--config-file", str(HERE / "mypy.ini"), "--no-error-summary", *paths]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    lines = [line for line in done.stdout.splitlines() if " error: " in line]
    assert all(line.startswith(tuple(paths)) for line in lines), done.stdout
    return {(Path(line.split(":")[0]).name, int(line.split(":")[1])) for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize("check", [pyright, mypy])
def test_clients(check: Callable[[list[str]], Lines]) -> None:
    """``good.py`` has no error. ``bad.py`` has one in each line that says so."""
    paths = [HERE / "good.py", HERE / "bad.py"]
    lines = [
        (path.name, i, line)
        for path in paths
        for i, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    ]
    expected = {(name, i) for name, i, line in lines if line.endswith("# error")}
    assert {name for name, _ in expected} == {"bad.py"}
    assert check([str(path.relative_to(ROOT)) for path in paths]) == expected
