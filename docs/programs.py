"""What the site has beside the files of `docs`: the programs and notebooks in `examples`, the changelog, the charts.

The links of the repository become links of the site, and a page with Markdown that was not rendered is a warning.
"""

from __future__ import annotations

import importlib
import json
import logging
import posixpath
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

EXAMPLES = Path(__file__).parent.parent / "examples"
LINK = re.compile(r"\]\(\.\./examples/([\w/]+)\.(py|ipynb)\)")
CHANGELOG = Path(__file__).parent.parent / "CHANGELOG.md"
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))
plot: Any = importlib.import_module("plot")
CHART = re.compile(r"<!-- chart: (\w+), (.*) -->")
BACK = "[Back to the gallery]({}gallery.md)\n"
# What a page counts in a search: the changelog and the reference have every word. Programs stay out.
BOOST = {"changelog": 0.2, "contributors/": 0.3, "reference": 0.5, "gallery": 0.7, "examples/": 0.5}
log = logging.getLogger("mkdocs.hooks.programs")


def program(path: Path) -> str:
    """The code, on a page without a table of contents, so that lines have more room."""
    code = path.read_text(encoding="utf-8")
    head = "---\nhide: [toc]\nsearch: {exclude: true}\n---\n\n"
    return f"{head}# {path.name}\n\n{BACK.format('../')}\n```python\n{code}```\n"


def notebook(path: Path) -> str:
    """The cells as Markdown, with their outputs. A table of a DeviceDict stays HTML."""
    parts = [BACK.format("../../")]
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {"text/plain": output.get("text", "")})
            text = "".join(data["text/plain"]).rstrip()
            parts.append("".join(data["text/html"]) if "text/html" in data else f"```text\n{text}\n```")
    return "\n\n".join(parts) + "\n"


def chart(name: str) -> str:
    """The chart of the committed results."""
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder, "chart.svg")
        plot.draw(BENCHMARKS / "results" / f"{name}-cpu.json", drawn)
        return drawn.read_text(encoding="utf-8")


def on_files(files: Files, config: Any) -> Files:
    for path in sorted([*EXAMPLES.glob("*.py"), *EXAMPLES.glob("notebooks/*.ipynb")]):
        content = notebook(path) if path.suffix == ".ipynb" else program(path)
        page = path.relative_to(EXAMPLES.parent).with_suffix(".md").as_posix()
        files.append(File.generated(config, page, content=content))
    files.append(File.generated(config, "changelog.md", content=CHANGELOG.read_text(encoding="utf-8")))
    for name, _ in CHART.findall((EXAMPLES.parent / "docs" / "performance.md").read_text(encoding="utf-8")):
        files.append(File.generated(config, f"charts/{name}-cpu.svg", content=chart(name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of the repository become links of the site."""
    name = page.file.src_uri
    page.meta.setdefault("search", {"boost": next((BOOST[start] for start in BOOST if name.startswith(start)), 1)})
    to_root = posixpath.relpath(".", posixpath.dirname(name) or ".")
    markdown = CHART.sub(r"[![\2](charts/\1-cpu.svg)](charts/\1-cpu.svg)", markdown)
    return LINK.sub(rf"]({to_root}/examples/\1.md)", markdown).replace("](../CHANGELOG.md)", "](changelog.md)")


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Warn of a backtick outside code: there, Markdown was not rendered. `make docs` takes a warning for an error."""
    text = re.sub(r"<(pre|code)\b.*?</\1>", "", html, flags=re.DOTALL)
    for line in re.findall(r"[^\n]*`[^\n]*", re.sub(r"<[^>]*>", "", text)):
        log.warning("%s: not rendered: %s", page.file.src_uri, line.strip())
    return html
