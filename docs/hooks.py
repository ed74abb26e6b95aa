"""For `make docs`: links from a page to the results of the benchmarks, which lie beside `docs` in the repository."""

from __future__ import annotations

from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """On GitHub the results are at ``../benchmarks``; among the built pages they are at ``benchmarks``, by a link."""
    return markdown.replace("](../benchmarks/", "](benchmarks/")
