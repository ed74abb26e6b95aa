"""The numbers of the pages and of the charts are those of the committed results."""

from __future__ import annotations

import html
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import tensordict_lite

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
sys.path.append(str(BENCHMARKS))
figures: Any = importlib.import_module("figures")
harness: Any = importlib.import_module("harness")
PAGES: list[Path] = figures.PAGES

AGAIN = "; run `make figures`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tables_are_those_of_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for _, name, table in figures.MARKED.findall(text):
        assert table == figures.markdown(figures.TABLES[name]()), f"{page.name}: {name}{AGAIN}"
    assert figures.with_figures(text) == text


def test_a_ratio_is_that_of_its_two_times() -> None:
    for path in sorted(RESULTS.glob("*-cpu.json")):
        results = figures.results(path.stem.removesuffix("-cpu"))["results"]
        for line in results if isinstance(results, list) else []:
            reference, *_ = line["medians"].values()
            for who, ratio in line["ratios"].items():
                expected = line["medians"][who] / reference
                assert ratio["median"] == pytest.approx(expected), f"{path.name}: {line['operation']}: {who}"


def test_a_changed_number_is_noticed() -> None:
    """Every number of every table: the test above fails where one differs."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for marked in figures.MARKED.finditer(text):
            wrong = re.sub(r"\d", lambda digit: str((int(digit[0]) + 1) % 10), marked[3])
            assert wrong != marked[3]
            assert figures.with_figures(text[: marked.start(3)] + wrong + text[marked.end(3) :]) == text


def test_every_table_is_on_a_page_and_every_marker_has_a_table() -> None:
    names = [name for page in PAGES for _, name, _ in figures.MARKED.findall(page.read_text(encoding="utf-8"))]
    assert sorted(names) == sorted(figures.TABLES)
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        if page not in PAGES:
            assert "<!-- figures" not in page.read_text(encoding="utf-8"), f"{page.name} is not in PAGES"


def test_no_measured_number_stands_outside_a_table() -> None:
    """Times and ratios stand in tables made of the results. A new result would make a number in the text wrong."""
    measured = re.compile(r"\d+ ?(x our|x faster|times (as|our|their|faster)|µs|ms|%)(?!\w)")
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for line in text.splitlines():
            assert line.startswith("|") or not measured.search(re.sub(r"`[^`]*`", "", line)), f"{page.name}: {line}"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*-*.json")), ids=lambda path: path.stem)
def test_the_results_of_a_release_are_those_of_its_code(path: Path) -> None:
    """Between releases, results may be older than the code: a version with "dev" says so."""
    results = json.loads(path.read_text(encoding="utf-8"))
    assert results["commit"]
    if "dev" not in tensordict_lite.__version__:
        assert results["code"] == harness.code_of_package(), f"{path.name} is of older code; measure again"


def test_the_chart_of_the_readme_is_that_of_the_results() -> None:
    assert figures.CHART.read_text(encoding="utf-8") == figures.bars(), f"{figures.CHART.name}{AGAIN}"
    assert figures.CHART.name in (ROOT / "README.md").read_text(encoding="utf-8")


CHARTS = re.findall(r"<!-- chart: (\w+), .* -->", (ROOT / "docs" / "performance.md").read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_has_every_operation_of_the_results(name: str, tmp_path: Path) -> None:
    """`make docs` draws the charts, so that no picture is committed with each new result."""
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context():
        importlib.import_module("plot").draw(RESULTS / f"{name}-cpu.json", drawn := tmp_path / "chart.svg")
    svg = html.unescape(drawn.read_text(encoding="utf-8"))
    shown = [line["operation"].replace("`", "") for line in figures.lines(name) if line["ratios"]]
    assert len(shown) > 1 and not [operation for operation in shown if operation not in svg]
    assert "prefers-color-scheme: dark" in svg


def test_a_program_with_plain_dicts_is_one_that_the_gallery_compares() -> None:
    twins = {path.stem.removeprefix("plain_") for path in (ROOT / "examples").glob("plain_*.py")}
    assert twins == {*figures.PROGRAMS.values()}


def test_only_code_changes_the_digest_of_the_code() -> None:
    source = '"""About."""\n\nx = 1  # one\n\n# why\ndef f():\n    """Two\n    lines."""\n    return x\n'
    assert harness.code_lines(source) == {3: "x = 1  # one", 6: "def f():", 9: "    return x"}
