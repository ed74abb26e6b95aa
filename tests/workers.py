"""Make a process look like a worker of a DataLoader."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tensordict_lite._memory import buffer


def look_like_a_worker(monkeypatch: pytest.MonkeyPatch, **info: Any) -> None:
    """To the code that allocates batches. ``info``: more attributes of the worker info of torch."""
    monkeypatch.setattr(buffer, "get_worker_info", lambda: SimpleNamespace(id=0, **info))
