"""Examples in docstrings stand as plain paragraphs, which Markdown would take for quotations: here they become code."""

from __future__ import annotations

import re
from typing import Any

import griffe

PARAGRAPH = re.compile(r"(?m)^([ \t]*)(>>> .*(?:\n(?![ \t]*$).*)*)")


class Examples(griffe.Extension):
    """Puts a fence around every paragraph of a docstring that begins with a prompt."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = PARAGRAPH.sub(r"\1```pycon\n\1\2\n\1```", obj.docstring.value)
