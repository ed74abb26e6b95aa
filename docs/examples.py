"""Docstrings become Markdown.

Examples stand as plain paragraphs, which Markdown would take for quotations: they become code. The parser would take
the first line of ``Raises: text``, if further lines are indented, for a title: it gets a bold label.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

PARAGRAPH = re.compile(r"(?m)^([ \t]*)(>>> .*(?:\n(?![ \t]*$).*)*)")
LABELLED = re.compile(r"(?m)^([A-Z][a-z]+): (\S.*(?:\n(?![A-Z][a-z]+: |```)[ \t]*\S.*)*)")


def labelled(found: re.Match[str]) -> str:
    """A paragraph of its own with a bold label."""
    text = " ".join(line.strip() for line in found[2].splitlines())
    return f"\n**{found[1]}:** {text}\n"


class Examples(griffe.Extension):
    """Puts a fence around every paragraph of a docstring that begins with a prompt."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = PARAGRAPH.sub(r"\1```pycon\n\1\2\n\1```", obj.docstring.value)
            obj.docstring.value = LABELLED.sub(labelled, text)
