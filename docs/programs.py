"""Pages of the site for the programs and notebooks in `examples`, to which the gallery links."""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

EXAMPLES = Path(__file__).parent.parent / "examples"
LINK = re.compile(r"\]\(\.\./examples/([\w/]+)\.(py|ipynb)\)")


def program(path: Path) -> str:
    """The code, on a page without a table of contents, so that lines have more room."""
    return f"---\nhide: [toc]\n---\n\n# {path.name}\n\n```python\n{path.read_text(encoding='utf-8')}```\n"


def notebook(path: Path) -> str:
    """The cells as Markdown, with their outputs. A table of a DeviceDict stays HTML."""
    parts: list[str] = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {"text/plain": output.get("text", "")})
            text = "".join(data["text/plain"]).rstrip()
            parts.append("".join(data["text/html"]) if "text/html" in data else f"```text\n{text}\n```")
    return "\n\n".join(parts) + "\n"


def on_files(files: Files, config: Any) -> Files:
    for path in sorted([*EXAMPLES.glob("*.py"), *EXAMPLES.glob("notebooks/*.ipynb")]):
        content = notebook(path) if path.suffix == ".ipynb" else program(path)
        page = path.relative_to(EXAMPLES.parent).with_suffix(".md").as_posix()
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of the repository become links of the site."""
    to_root = posixpath.relpath(".", posixpath.dirname(page.file.src_uri) or ".")
    return LINK.sub(rf"]({to_root}/examples/\1.md)", markdown)
