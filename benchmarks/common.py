"""Shared parts of the benchmarks: rounds of timing, ratios, tables, and a description of the machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Hashable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from subprocess import PIPE
from typing import Any, TypeVar

import torch
from torch.utils.benchmark import Timer

SECONDS = 0.04  # seconds for one contender in one round
Case = TypeVar("Case", bound=Hashable)
Seconds = dict[str, list[float]]  # by contender: one number for each round


def parser(description: str) -> argparse.ArgumentParser:
    """The options of every benchmark."""
    out = argparse.ArgumentParser(description=description)
    out.add_argument("--rounds", type=int, default=9, help="how often each statement is timed (9)")
    out.add_argument("--quick", action="store_const", dest="rounds", const=3, help="three rounds, for a first look")
    out.add_argument("--json", type=Path, help="write the results there too")
    return out


def setting(**peers: Any) -> dict[str, str | None]:
    """The processor and the versions. ``peers``: version by package, None for a package that cannot be imported."""
    cpuinfo = Path("/proc/cpuinfo")
    cpu = re.findall(r"model name\s*: (.+)", cpuinfo.read_text() if cpuinfo.exists() else "") or [platform.processor()]
    out = {"cpu": cpu[0] or "unknown", "python": platform.python_version(), "torch": torch.__version__}
    return out | {package: None if peer is None else version(package) for package, peer in peers.items()}


def same(x: Any, y: Any) -> bool:
    """Whether two results are equal: the keys in order; and type, dtype, shape, device and values of each leaf."""
    if isinstance(x, Mapping):
        return isinstance(y, Mapping) and same(list(x.items()), list(y.items()))
    if isinstance(x, (list, tuple)):
        return type(x) is type(y) and len(x) == len(y) and all(map(same, x, y))
    if not hasattr(x, "dtype"):
        return x == y
    alike = type(x) is type(y) and all(getattr(x, a, 0) == getattr(y, a, 0) for a in ("dtype", "shape", "device"))
    return alike and (getattr(x, "is_meta", False) or bool((x == y).all()))


def interleaved(cases: Mapping[Case, Mapping[str, Timer]], rounds: int) -> dict[Case, Seconds]:
    """The median time of each contender in each round. The contenders are timed one right after the other."""
    seconds: dict[Case, Seconds] = {case: {who: [] for who in cases[case]} for case in cases}
    for i in range(rounds):
        for case, contenders in cases.items():
            for who in in_turn(contenders, i):
                seconds[case][who].append(contenders[who].blocked_autorange(min_run_time=SECONDS).median)
    return seconds


def in_turn(contenders: Mapping[str, Any], i: int) -> list[str]:
    """The names of the contenders in the order of round ``i``. Each round begins with another contender."""
    return list(reversed(contenders) if i % 2 else contenders)


def fresh(*arguments: str) -> list[float]:
    """The numbers that a new interpreter prints. It can import the benchmarks, and it caches bytecode."""
    left_alone = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    command, env = [sys.executable, *arguments], {**left_alone, "PYTHONPATH": path}
    return [
        float(number) for number in subprocess.run(command, stdout=PIPE, text=True, check=True, env=env).stdout.split()
    ]


def cause(error: Exception) -> str:
    """The reason why a contender is left out, in one line."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """The ratio of the times of two contenders in each round. Other load on the machine cancels out."""
    values = [x / y for x, y in zip(over, under, strict=True)]
    return {"median": median(values), "min": min(values), "max": max(values)}


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Format a table as text. Each column is as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def ratio_table(lines: Sequence[Mapping[str, Any]], heading: str, goal: str, against: str) -> str:
    """A line for each contender of each operation: the ratio, and whether its goal is met."""
    rows = [["operation", "fields", heading, "", goal]]
    for line in lines:
        where = [line["operation"], line["fields"]]
        for who, r in line["ratios"].items():
            met = {None: "", True: "yes", False: "NO"}[line["met"]] if who == against else ""
            rows.append([*where, who, f"{r['median']:7.3f} ({r['min']:.3f}..{r['max']:.3f})", met])
            where = ["", ""]
    return aligned(rows)


def write(path: Path | None, results: Mapping[str, Any]) -> None:
    """Write the results as JSON, if a path is given."""
    if path:
        path.write_text(json.dumps(results, indent=1) + "\n")
