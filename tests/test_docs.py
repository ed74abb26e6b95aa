"""What is written is true: every public name has an example, and every example runs."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import textwrap
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import tensordict_lite
from tensordict_lite import DeviceDict, distributed, tables

ROOT = Path(__file__).parent.parent
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def _public() -> list[tuple[str, Any]]:
    names = [(name, getattr(tensordict_lite, name)) for name in tensordict_lite.__all__]
    bases = [base for base in reversed(DeviceDict.__mro__) if base.__module__.startswith("tensordict_lite")]
    own = {name: member for base in bases for name, member in vars(base).items()}
    methods = [
        (f"DeviceDict.{name}", member)
        for name, member in own.items()
        if not name.startswith("_") and hasattr(DeviceDict, name)
    ]
    return names + methods + [(name, getattr(tables, name)) for name in tables.__all__]


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


def test_every_public_name_has_an_entry_in_the_reference() -> None:
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    parts = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md"))
    for name in tensordict_lite.__all__:
        assert f"\n::: tensordict_lite.{name}\n" in parts, name
    for name in tables.__all__:
        # griffe finds the module of this name, not the function.
        assert f"\n::: tensordict_lite.tables.{'verify.verify' if name == 'verify' else name}\n" in parts, name
    table = text[: text.index("\n## Options")]
    assert all(f"`{name}`" in table for name in [*tensordict_lite.__all__, *tables.__all__, "Rows"])
    methods = {name for name, _ in _public() if "." in name}
    groups = text[text.index("## Methods of a DeviceDict") : text.index("## Functions of torch")]
    inherited = {name for name in methods if hasattr(dict, name.removeprefix("DeviceDict."))}
    assert not [name for name in methods - inherited if f"`{name.removeprefix('DeviceDict.')}`" not in groups]


def test_the_example_of_rows_runs() -> None:
    output: list[str] = []
    rows = type(DeviceDict().rows)
    for member in [rows, *(member for member in vars(rows).values() if inspect.isfunction(member))]:
        example = doctest.DocTestParser().get_doctest(inspect.getdoc(member) or "", {}, "Rows", None, 0)
        doctest.DocTestRunner(optionflags=FLAGS).run(example, out=output.append)
    assert not output, "".join(output)


def test_all_is_exactly_what_is_public() -> None:
    assert len(set(tensordict_lite.__all__)) == len(tensordict_lite.__all__)
    found = vars(tensordict_lite).items()
    public = {name for name, value in found if not name.startswith("_") and not inspect.ismodule(value)}
    assert public == set(tensordict_lite.__all__)


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```", flags=re.MULTILINE | re.DOTALL)


def _blocks(page: Path) -> list[str]:
    """The Python blocks of a page: those in list items, and in comments that hold the set-up, too."""
    return [textwrap.dedent(block) for _, block in BLOCK.findall(page.read_text(encoding="utf-8"))]


def _statements(source: str) -> Iterator[tuple[str, str]]:
    """Each statement with the comment behind it, or under it where the comment begins with an error."""
    lines = source.splitlines()
    for node in ast.parse(source).body:
        start = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
        end = cast(int, node.end_lineno)
        code = "\n".join(lines[start - 1 : end])
        under = [line.removeprefix("# ") for line in takewhile(lambda line: line.startswith("# "), lines[end:])]
        below = under and re.match(r"\w+Error: ", under[0])
        yield code, " ".join(under) if below else code.rpartition("  # ")[2]


@pytest.mark.parametrize("page", [page for page in PAGES if _blocks(page)], ids=lambda page: page.name)
def test_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page are one session, alone. ``# -> value`` is a repr, ``# SomeError: text`` what is raised."""
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": page.stem}
    checked = 0
    for block in _blocks(page):
        # Without a GPU the examples run on the simulated one.
        source = block if torch.cuda.is_available() else block.replace("cuda", "sim")
        for code, comment in _statements(source):
            error = re.match(r"(\w+Error): (.*)", comment)
            if error:
                with pytest.raises(Exception) as caught:  # noqa: PT011
                    exec(compile(code, page.name, "exec"), scope)
                assert caught.type.__name__ == error[1]
                raised, shown = " ".join(str(caught.value).split()), " ".join(error[2].split())
                shortened = shown.endswith(" ...") and raised.startswith(shown.removesuffix(" ..."))
                assert raised == shown or shortened, f"{code}\n{raised}"
            elif comment.startswith("-> "):
                assert repr(eval(code, scope)) == comment.removeprefix("-> "), code
            else:
                exec(compile(code, page.name, "exec"), scope)
                continue
            checked += 1
    assert checked, "a page with examples checks what one of them gives"


def test_every_page_of_the_guide_has_examples() -> None:
    guide = [
        "index", "start", "storing", "moving", "move", "batches", "order", "tables", "typed", "strings", "files",
        "whole", "ranks", "frameworks", "recipes", "limits",
    ]  # fmt: skip
    assert set(guide) <= {page.stem for page in PAGES if _blocks(page)}


def test_the_pages_show_the_tree_as_it_is() -> None:
    state = DeviceDict({"x": torch.zeros(2, 2), "species": ["cat", "dog"], "obs": {"step": 3}},
                       encoders={"species": tensordict_lite.Vocabulary(["cat", "dog"])}, device="sim")  # fmt: skip
    shown = repr(state).replace("(sim:0", "(cuda:0")  # a number on a device is not read
    assert shown in (ROOT / "docs" / "storing.md").read_text(encoding="utf-8")
    samples = [{"image": torch.rand(3, 8, 8), "label": i % 3, "name": f"img_{i}"} for i in range(64)]
    batch = tensordict_lite.collate(samples)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert repr(batch).replace("(cpu", "(cuda:0") in readme
    assert repr(batch.rows) in readme


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) < 1000


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#[^)\s]*)?\)", page.read_text(encoding="utf-8")):
            assert not target or (page.parent / target).exists(), f"{page.name}: {target}"


def test_headings_that_links_name_exist() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]*)\)", page.read_text(encoding="utf-8")):
            if target.endswith(".png"):  # Material shows one picture in light, and another one in dark
                assert anchor in ("only-light", "only-dark")
                continue
            text = (page.parent / target if target else page).read_text(encoding="utf-8")
            headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}
            assert anchor in anchors or f"::: {anchor}" in text, f"{page.name}: {target}#{anchor}"
