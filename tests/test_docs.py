"""What is written is true: every public name has an example, and every example runs."""

from __future__ import annotations

import doctest
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tensordict_lite
from tensordict_lite import DeviceDict

ROOT = Path(__file__).parent.parent
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def _public() -> list[tuple[str, Any]]:
    names = [(name, getattr(tensordict_lite, name)) for name in tensordict_lite.__all__]
    own = {name: member for base in reversed(DeviceDict.__mro__[:4]) for name, member in vars(base).items()}
    methods = [(f"DeviceDict.{name}", member) for name, member in own.items() if not name.startswith("_")]
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


def test_all_is_exactly_what_is_public() -> None:
    assert len(set(tensordict_lite.__all__)) == len(tensordict_lite.__all__)
    public = {name for name in vars(tensordict_lite) if not name.startswith("_")}
    assert public == set(tensordict_lite.__all__)


def _blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks are one session, in order; a trailing ``# value`` comment is what the expression gives."""
    monkeypatch.chdir(tmp_path)
    blocks = _blocks(ROOT / "README.md")
    assert blocks
    scope: dict[str, Any] = {"__name__": "readme"}
    checked = 0
    for block in blocks:
        # Without a GPU the examples run on the device that has no values but all the rules.
        source = block if torch.cuda.is_available() else block.replace('"cuda"', '"meta"').replace("cuda:0", "meta")
        lines = source.splitlines(keepends=True)
        for node in __import__("ast").parse(source).body:
            code = "".join(lines[node.lineno - 1 : node.end_lineno])
            comment = re.search(r"#\s*(.*)$", code.rstrip("\n"))
            expected = comment.group(1) if comment else ""
            error = re.match(r"(\w+Error): (.*)", expected)
            if error:
                with pytest.raises(Exception, match=re.escape(error.group(2))) as caught:
                    exec(compile(code, "README.md", "exec"), scope)
                assert caught.type.__name__ == error.group(1)
                checked += 1
            elif expected.startswith("-> "):
                assert repr(eval(code, scope)) == expected.removeprefix("-> "), code
                checked += 1
            else:
                exec(compile(code, "README.md", "exec"), scope)
    assert checked >= 5
