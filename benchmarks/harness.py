"""Time contenders beside each other, and write the results as JSON. All benchmarks use this module.

A benchmark is a list of cases. A case is one operation on data of one size, and the contenders that do it. The first
contender is the reference of the ratios. For each case the harness

1. makes every contender, asserts that all results are equal, and runs each once more to warm up;
2. measures all contenders in every round, one right after the other, so that other load on the machine cancels out
   in the ratios;
3. takes the median over the rounds, and the ratio to the reference in each round.

A peer that is not installed, or that fails, is left out and named. An error of a DeviceDict is raised.
"""

from __future__ import annotations

import argparse
import ast
import atexit
import hashlib
import importlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.utils.benchmark import Timer, select_unit

SECONDS = 0.04  # seconds for one contender in one round
OURS, PACKED, DICT, PEER = "DeviceDict", "DeviceDict, packed", "dict", "TensorDict"
Fields = dict[str, Tensor]
Rounds = dict[str, list[float]]  # by contender: one number for each round


class Missing:
    """Stands for a package that is not installed. Every call raises its ImportError, so its contenders are left out."""

    def __init__(self, error: ImportError) -> None:
        self.error = error

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise self.error

    def __getattr__(self, _: str) -> Any:
        return self


def optional(module: str, name: str | None = None) -> Any:
    """A module, or a name in it. `Missing` if the package is not installed."""
    try:
        found = importlib.import_module(module)
        return getattr(found, name) if name else found
    except ImportError as error:
        return Missing(error)


def equal_fields(count: int, *shape: int) -> Fields:
    """A number of float32 fields with one shape. Every call returns the same values."""
    generator = torch.Generator().manual_seed(0)
    return {f"k{i}": torch.rand(shape, generator=generator) for i in range(count)}


def plain(x: Any) -> Any:
    """Containers as plain dicts and lists, for comparison. TensorDict maps files to a subclass of Tensor."""
    if isinstance(x, (list, tuple)):
        return [plain(value) for value in x]
    if hasattr(x, "items"):
        return {key: plain(value) for key, value in x.items()}
    return x.as_subclass(Tensor) if isinstance(x, Tensor) else x


def same(x: Any, y: Any) -> bool:
    """Whether two plain results are equal: the keys; and type, dtype, shape, device and values of each leaf."""
    if isinstance(x, dict):
        return isinstance(y, dict) and x.keys() == y.keys() and all(same(x[key], y[key]) for key in x)
    if isinstance(x, list):
        return isinstance(y, list) and len(x) == len(y) and all(map(same, x, y))
    if not hasattr(x, "dtype"):
        return x == y
    alike = type(x) is type(y) and all(getattr(x, a, 0) == getattr(y, a, 0) for a in ("dtype", "shape", "device"))
    return alike and bool((x == y).all())


def same_values(x: Any, y: Any) -> bool:
    """As `same` for dicts, where an array equals a tensor. Dtypes may differ, because Arrow widens them."""
    first, second = ({key: as_tensor(value) for key, value in d.items()} for d in (x, y))
    return same(first, {key: value.to(first[key].dtype) for key, value in second.items() if key in first})


def as_tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.from_numpy(np.array(value, order="C"))


@dataclass(frozen=True)
class Run:
    """A contender that is ready. ``result`` runs it once and returns its result. ``measure`` measures it once."""

    result: Callable[[], Any]
    measure: Callable[[], float]


Prepare = Callable[[Any], Run]  # from the data of the case


@dataclass(frozen=True)
class Case:
    """An operation on data of one size. ``fields`` describes the data."""

    operation: str
    fields: str
    contenders: Mapping[str, Prepare]
    data: Callable[[], Any] = lambda: None
    equal: Callable[[Any, Any], bool] = same
    """Whether two results are equal, given as plain dicts and lists."""
    unit: str = "seconds"
    at_most: int = 1000
    """The most rounds, for cases that take long or hardly vary."""
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    """What must run meanwhile. It is started once for consecutive cases."""


def statement(
    code: str, make: Callable[[Any], Any] = lambda data: data, result: str = "", setup: str = "pass", **names: Any
) -> Prepare:
    """A contender whose code is timed. ``make`` makes the variable ``x`` of the code from the data of the case.

    The result is the value of the expression ``result`` after the code has run, or that of the code itself. ``setup``
    runs before each measurement.
    """

    def prepare(data: Any) -> Run:
        known = {"torch": torch, **names, "x": make(data)}
        # The clock of Timer would synchronize. Code that needs it synchronizes by itself.
        timer = Timer(code, setup, timer=perf_counter, globals=known)

        def run_once() -> Any:
            exec(setup, known)
            if not result:
                return eval(code, known)
            exec(code, known)
            return eval(result, known)

        return Run(run_once, lambda: timer.blocked_autorange(min_run_time=SECONDS).median)

    return prepare


def statements(
    codes: Mapping[str, str], makers: Mapping[str, Callable[[Any], Any]], **options: Any
) -> dict[str, Prepare]:
    """A contender for each code, whose ``make`` is that of its name. ``options`` are those of `statement`."""
    return {who: statement(code, makers[who], **options) for who, code in codes.items()}


def measured(case: Case, rounds: int) -> tuple[Rounds, dict[str, str]]:
    """The measurements of a case, and the reason for each contender that was left out."""
    data, left_out = case.data(), {}
    ready: dict[str, Run] = {}
    found: dict[str, Any] = {}

    def attempt(who: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:
            if who.startswith(OURS):
                raise
            where = who if isinstance(error, ImportError) else f"{who} in {case.operation}, {case.fields}"
            left_out[where] = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            ready.pop(who, None)

    def prepare(who: str) -> None:
        ready[who] = case.contenders[who](data)
        found[who] = plain(ready[who].result())

    for who in case.contenders:
        attempt(who, partial(prepare, who))
    reference = next(iter(found.values()))
    for who, result in found.items():
        assert case.equal(reference, result), f"{case.operation}, {case.fields}: {who} gives another result"
    found.clear()
    warm = case.unit == "seconds"  # a round that is dropped; sizes need none
    values: Rounds = {who: [] for who in ready}
    for i in range(min(rounds, case.at_most) + warm):
        first = i % len(ready)  # each round begins with another contender
        for who in [*ready][first:] + [*ready][:first]:
            values[who].append(attempt(who, ready[who].measure))
    return {who: values[who][warm:] for who in ready}, left_out


def ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """The ratio of the medians of two contenders; and over all rounds, the range and the quartiles of their ratio.

    It is not the median of the ratios: a reader who divides the two times of a table must get the ratio beside them.
    """
    values = [x / y for x, y in zip(over, under, strict=True)]
    low, high = np.quantile(values, [0.25, 0.75]).tolist()
    middle = median(over) / median(under)
    return {"median": middle, "min": min(values), "max": max(values), "low": low, "high": high}


def line_of(case: Case, values: Rounds) -> dict[str, Any]:
    """A line of the results: the median of each contender, and its ratio to the reference, with its quartiles."""
    reference = next(iter(values.values()))
    return {
        "operation": case.operation,
        "fields": case.fields,
        "unit": case.unit,
        "medians": {who: median(numbers) for who, numbers in values.items()},
        "ratios": {who: ratio(numbers, reference) for who, numbers in values.items()} if all(reference) else {},
    }


def run(cases: Iterable[Case], rounds: int) -> dict[str, Any]:
    """The results of the cases, and the contenders that were left out."""
    lines: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for within, group in groupby(cases, key=lambda case: case.within):
        with within():
            for case in group:
                print(f"measuring {case.operation}, {case.fields}".rstrip(", "), file=sys.stderr, flush=True)
                values, missing = measured(case, rounds)
                lines.append(line_of(case, values))
                left_out |= missing
    return {"left_out": left_out, "results": lines}


def accelerator() -> torch.device | None:
    """The accelerator of this machine, with its index."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else torch.empty(0, device=found).device


def code_lines(source: str) -> dict[int, str]:
    """The lines of code of a module, by number: all but blank lines, comments and docstrings."""
    lines = {i: line for i, line in enumerate(source.splitlines(), 1) if line.strip() and line.strip()[0] != "#"}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for i in range(node.lineno, (node.end_lineno or 0) + 1):
                lines.pop(i, None)
    return lines


def code_of_package() -> str:
    """A digest of the package's lines of code. Another one means that results may be those of older code.

    It leaves out the version: a release has the results of the code that it was made of.
    """
    found = hashlib.sha256()
    for path in sorted((Path(__file__).parent.parent / "tensordict_lite").rglob("*.py")):
        code = code_lines(path.read_text(encoding="utf-8")).values()
        found.update("\n".join(line for line in code if not line.startswith("__version__")).encode())
    return found.hexdigest()[:16]


def commit() -> str | None:
    """The commit of this checkout; with "-dirty" if files differ. None without git."""
    if shutil.which("git") is None:
        return None
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or None


def setting(packages: Iterable[str]) -> dict[str, str | None]:
    """The commit, a digest of the package's code, the processor, the accelerator and the versions.

    None for a package that is not installed.
    """
    cpuinfo = Path("/proc/cpuinfo")
    cpu = re.findall(r"model name\s*: (.+)", cpuinfo.read_text() if cpuinfo.exists() else "") or [platform.processor()]
    device = accelerator()
    gpu = None if device is None else getattr(torch.get_device_module(device), "get_device_name", str)(device)
    out: dict[str, str | None] = {"commit": commit()}
    out |= {"code": code_of_package(), "cpu": cpu[0] or "unknown", "gpu": gpu}
    out |= {"python": platform.python_version(), "torch": torch.__version__}
    for package in packages:
        try:
            out[package] = version(package)
        except PackageNotFoundError:
            out[package] = None
    return out


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Format a table as text. Each column is as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def table(lines: Iterable[Mapping[str, Any]]) -> str:
    """A row for each contender of each operation. The first is the reference of the ratios."""
    rows = [["operation", "fields", "contender", "median", "as a multiple of the first (min..max)"]]
    for line in lines:
        where = [line["operation"], line["fields"]]
        for who, middle in line["medians"].items():
            r = line["ratios"].get(who)
            shown = f"{r['median']:8.3f} ({r['min']:.3f}..{r['max']:.3f})" if r else ""
            unit, scale = select_unit(middle) if line["unit"] == "seconds" else (line["unit"], 1)
            rows.append([*where, who, f"{middle / scale:.4g} {unit}", shown])
            where = ["", ""]
    return aligned(rows)


def write(path: Path | None, results: Mapping[str, Any]) -> None:
    """Write the results as JSON, if a path is given."""
    if path:
        path.write_text(json.dumps(results, indent=1) + "\n")


def main(
    description: str | None,
    cases: Callable[..., Iterable[Case]],
    packages: Iterable[str] = (),
    threads: int | None = 1,
    **options: Any,
) -> None:
    """Run a benchmark as a command. ``options``: more options of the command, by name, with their defaults.

    ``cases`` is called with the options. ``packages``: the peers whose versions are written.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="how often each contender is measured (9)")
    parser.add_argument("--quick", action="store_const", dest="rounds", const=3, help="three rounds, for a first look")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the operations with this in their name")
    parser.add_argument("--json", type=Path, help="write the results there too")
    for name, default in options.items():
        how: Any = {"action": "store_true"} if default is False else {"type": type(default), "default": default}
        parser.add_argument(f"--{name}", help=f"({default})", **how)
    given = parser.parse_args()
    if threads:
        torch.set_num_threads(threads)
    here = setting(packages)
    print(", ".join(f"{what} {name}" for what, name in here.items()), flush=True)
    chosen = {name: getattr(given, name) for name in options}
    results = run([case for case in cases(**chosen) if given.only in case.operation], given.rounds)
    print(f"\nThe median of {given.rounds} rounds. A ratio above 1: the first contender takes less.\n")
    print(table(results["results"]))
    for what, reason in results["left_out"].items():
        print(f"left out: {what}: {reason}")
    write(given.json, {**here, **chosen, "rounds": given.rounds, **results})


class Helpers:
    """Other processes, which call functions for this one, each with one thread.

    ``start(rank, *arguments)`` runs first in each of them.
    """

    def __init__(self, count: int, start: Callable[..., Any] | None = None, *arguments: Any) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.connections: list[Any] = []
        for rank in range(count):
            near, far = context.Pipe()
            context.Process(target=serve, args=(far, start, rank, *arguments), daemon=True).start()
            far.close()  # so that nobody waits for a process that has died
            self.connections.append(near)

    def ask(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function in each process. Returns the answer of each, or raises the first error."""
        for connection in self.connections:
            connection.send((function, arguments))
        answers: list[Any] = []
        for connection in self.connections:
            answers.append(connection.recv())
            if isinstance(answers[-1], Exception):
                raise answers[-1]
        return answers


@cache
def two_ranks() -> Helpers:
    """Two gloo ranks in a group of their own."""
    return Helpers(2, join_group, str(folder()))


def join_group(rank: int, path: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}/meeting", rank=rank, world_size=2)


def serve(connection: Any, start: Callable[..., Any] | None, *arguments: Any) -> None:
    """Run in a helper: answer until the other process ends."""
    torch.set_num_threads(1)
    if start:
        start(*arguments)
    while True:
        try:
            function, given = connection.recv()
        except EOFError:
            return
        try:
            connection.send(function(*given))
        except Exception as error:
            connection.send(error)


@cache
def folder() -> Path:
    """A temporary folder, until this process ends. The environment variable ``TMPDIR`` says where."""
    made = tempfile.TemporaryDirectory()
    atexit.register(made.cleanup)
    return Path(made.name)


def fresh(*arguments: str) -> list[float]:
    """The numbers that a new interpreter prints. It caches bytecode."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return [float(number) for number in done.stdout.split()]
