"""No path loses an option: each is walked with a copy of the package in which `Policy` has one field more."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import option_paths
import pytest

import tensordict_lite
from tensordict_lite._tree.policy import OPTIONS, Options, Policy

PACKAGE = Path(tensordict_lite.__file__).parent
POLICY = PACKAGE / "_tree" / "policy.py"
LAST = "    dtype: torch.dtype | None = field("
NEW = '    tag: str = field(default="default", metadata=_choice("tag", "default", "kept"))\n'


@pytest.mark.slow
def test_a_new_option_takes_one_line_and_no_path_loses_it(tmp_path: Path) -> None:
    folder = tmp_path
    shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    text = POLICY.read_text(encoding="utf-8")
    assert text.count(LAST) == 1, "add the option of this test below another one"
    copy = folder / POLICY.relative_to(PACKAGE.parent)
    copy.write_text(text.replace(LAST, NEW + LAST), encoding="utf-8")
    run = [sys.executable, "-W", "ignore", option_paths.__file__]
    done = subprocess.run(
        run, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(folder)}
    )
    assert not done.returncode, done.stderr
    walked = json.loads(done.stdout.splitlines()[-1])  # torch 2.10 prints a warning before it
    assert walked.keys() == option_paths.PATHS.keys()
    lost = {path: what for path, what in walked.items() if what}
    assert not lost, "build the new dict with the policy of the old one, or with dataclasses.replace of it"


def test_type_checkers_know_every_option() -> None:
    assert (*Options.__annotations__,) == OPTIONS[1:], "add the option to the class Options"
    options = [one.name for one in fields(Policy) if one.metadata]
    classes = [
        node for node in ast.walk(ast.parse(POLICY.read_text(encoding="utf-8"))) if isinstance(node, ast.ClassDef)
    ]
    typed = next(node for node in classes if node.name == "OptionFields")
    names = [
        node.target.id for node in typed.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    assert names == options, "add the option to the class OptionFields"
