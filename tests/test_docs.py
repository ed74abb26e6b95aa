"""What is written is true: every public name has an example, and every example runs."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tensordict_lite
from tensordict_lite import DeviceDict, distributed

ROOT = Path(__file__).parent.parent
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def _public() -> list[tuple[str, Any]]:
    names = [(name, getattr(tensordict_lite, name)) for name in tensordict_lite.__all__]
    own = {name: member for base in reversed(DeviceDict.__mro__[:5]) for name, member in vars(base).items()}
    methods = [
        (f"DeviceDict.{name}", member)
        for name, member in own.items()
        if not name.startswith("_") and hasattr(DeviceDict, name)
    ]
    return names + methods


@pytest.mark.parametrize(("name", "member"), _public(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_public_name_has_an_example_that_runs(name: str, member: Any) -> None:
    documented = member.fget if isinstance(member, property) else inspect.unwrap(getattr(member, "__func__", member))
    text = inspect.getdoc(documented) or ""
    assert ">>>" in text, f"{name} has no runnable example"
    globs = {"torch": torch, "DeviceDict": DeviceDict}
    example = doctest.DocTestParser().get_doctest(text, globs, name, None, 0)
    output: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS).run(example, out=output.append)
    assert not output, "".join(output)
    if "." not in name:
        assert f"{name}" in text, "the example of a top-level name uses it"


def test_the_example_of_distributed_runs() -> None:
    output: list[str] = []
    example = doctest.DocTestParser().get_doctest(distributed.__doc__ or "", {}, "distributed", None, 0)
    assert len(example.examples) > 5
    doctest.DocTestRunner(optionflags=FLAGS).run(example, out=output.append)
    assert not output, "".join(output)


def test_all_is_exactly_what_is_public() -> None:
    assert len(set(tensordict_lite.__all__)) == len(tensordict_lite.__all__)
    found = vars(tensordict_lite).items()
    public = {name for name, value in found if not name.startswith("_") and not inspect.ismodule(value)}
    assert public == set(tensordict_lite.__all__)


def _blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("page", "least"), [("README.md", 40), ("docs/index.md", 1)])
def test_a_page_runs(page: str, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks are one session. After a statement, ``# -> value`` is its repr, ``# SomeError: text`` what it raises."""
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "readme"}
    checked = 0
    for block in _blocks(ROOT / page):
        # Without a GPU the examples run on the simulated one.
        source = block if torch.cuda.is_available() else block.replace("cuda", "sim")
        lines = source.splitlines()
        for node in ast.parse(source).body:
            code = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            comment = code.rpartition("  # ")[2]
            error = re.match(r"(\w+Error): (.*)", comment)
            if error:
                with pytest.raises((TypeError, ValueError, RuntimeError), match=re.escape(error[2])) as caught:
                    exec(compile(code, page, "exec"), scope)
                assert caught.type.__name__ == error[1]
            elif comment.startswith("-> "):
                assert repr(eval(code, scope)) == comment.removeprefix("-> "), code
            else:
                exec(compile(code, page, "exec"), scope)
                continue
            checked += 1
    assert checked >= least


def test_the_readme_shows_the_tree_as_it_is() -> None:
    state = DeviceDict({"x": torch.zeros(2, 2), "species": ["cat", "dog"], "obs": {"step": 3}},
                       encoders={"species": tensordict_lite.Vocabulary(["cat", "dog"])})  # fmt: skip
    shown = repr(state).replace("(cpu", "(cuda:0")
    assert shown in (ROOT / "README.md").read_text(encoding="utf-8")
