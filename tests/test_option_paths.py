"""An option holds on every path: each is walked with a copy of the package in which `Policy` has one field more."""

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
NEW = """
    tag: str = field(default="default", metadata=_choice("tag", "default", "kept"))
    levels: int = field(default=99, metadata={"check": int, "from_json": int})
"""

RULE = """
    def refuse(self, items: Mapping[str, Any]) -> None:
        if self.tag == "kept" and "forbidden" in items:
            raise ValueError("the key is forbidden")

    def below(self, above: Policy) -> Policy:
        if not above.levels:
            raise ValueError("it is too deep")
        return replace(self, levels=above.levels - 1)
"""
END_OF_POLICY = "\n\n_DEFAULTS = Policy()"
TREE = PACKAGE / "_tree" / "tree.py"
GATES = {  # of `_commit` and of `_validate`: the first line of each
    "        # Conversion runs code of the user": "        self._policy.refuse(staged)\n",
    "        for key, value in self.items():\n            if isinstance(value, TreeDict):\n                nested = ": (
        "        self._policy.refuse(self)\n"
    ),
    # Both give a nested dict its policy: `kind_nested` and `_validate`.
    "    return cls, policy\n": "    policy = policy.below(above)\n",
    "                nested = before.get": "                value._policy = value._policy.below(self._policy)\n",
}


def with_texts(path: Path, texts: dict[str, str]) -> str:
    """The text of a module with each of these texts in front of another one."""
    text = path.read_text(encoding="utf-8")
    for place, added in texts.items():
        assert text.count(place) == 1, f"{place!r} is not in {path.name}"
        text = text.replace(place, added + place)
    return text


@pytest.mark.slow
def test_a_new_option_takes_one_line_and_holds_on_every_path(tmp_path: Path) -> None:
    """Two options with rules for both gates: no path loses them, and no way in for values skips their rules."""
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    for path, texts in ((POLICY, {LAST: NEW, END_OF_POLICY: RULE}), (TREE, GATES)):
        (tmp_path / path.relative_to(PACKAGE.parent)).write_text(with_texts(path, texts), encoding="utf-8")
    run = [sys.executable, "-W", "ignore", option_paths.__file__]
    done = subprocess.run(
        run, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    assert not done.returncode, done.stderr
    walked, errors, deeper = json.loads(done.stdout.splitlines()[-1])  # torch 2.10 prints a warning before it
    assert walked.keys() == option_paths.PATHS.keys()
    lost = {path: what for path, what in walked.items() if what}
    assert not lost, "build the new dict with the policy of the old one, or with dataclasses.replace of it"
    skipped = {way: errors[way] for way in option_paths.WAYS_IN if not errors[way].endswith("the key is forbidden")}
    assert not skipped, "let the values go through TreeDict._commit, or call _validate of the new dict"
    assert not any(errors[way] for way in option_paths.UNSEEN), "name in CONTRIBUTING.md what no rule sees"
    assert deeper.keys() == option_paths.BUILT.keys()
    passed = {way: why for way, why in deeper.items() if why}
    assert not passed, "let `kind_nested` or `_validate` give a nested dict its policy"


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
