"""How much the memory of this process grows while code runs, on Linux."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_growth(code: str, known: dict[str, Any]) -> int | None:
    """Of the resident memory at most, in bytes, while ``code`` runs; None where the system does not tell.

    Not from ``resource.getrusage``: its peak begins with that of the process that started this one.
    """
    try:
        RESET.write_text("5")  # the peak begins anew (Linux, proc(5))
        before = int(re.findall(r"VmRSS:\s*(\d+) kB", STATUS.read_text())[0])
    except OSError:
        exec(code, known)
        return None
    exec(code, known)
    return 1024 * (int(re.findall(r"VmHWM:\s*(\d+) kB", STATUS.read_text())[0]) - before)
