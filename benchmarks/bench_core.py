"""Compare the core operations of `DeviceDict` with a plain dict and with TensorDict, as ratios of times.

    python benchmarks/bench_core.py [--quick] [--rounds N] [--json PATH]

The fields are small (float32[2], on the CPU), so the time is that of the container. In every round, the contenders of
an operation are timed one right after the other. The ratio of the two times cancels other load on the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from common import aligned, fresh, interleaved, parser, ratio, same, setting, write
from torch.utils.benchmark import Timer

from tensordict_lite import DeviceDict, TypedDeviceDict

try:
    from tensordict import TensorDict
except ImportError:
    TensorDict = None

OURS, DICT, PEER, SMALL, ITEM = "ours", "dict", "TensorDict", "ours at 8", "ours[key]"
CONTAINERS = {OURS: "d", DICT: "s", PEER: "td"}  # the names of the contenders in statements
ABOUT_ONE = 1.2  # the largest ratio that counts as ~1: on a busy machine, equal statements of 15 ns differ so much


@dataclass(frozen=True)
class Goal:
    """The goal of an operation: at most ``limit`` times the time of ``against``. None: about the same time."""

    against: str
    limit: float | None = None
    sizes: tuple[int, ...] = (8, 100)

    def __str__(self) -> str:
        return f"{'~1' if self.limit is None else f'<= {self.limit:g}'} x {self.against}"


@dataclass(frozen=True)
class Row:
    """An operation: the statement of each contender; by default the statement of ours. ``{}`` is the container."""

    name: str
    ours: str
    plain: str = ""
    peer: str = ""
    goals: tuple[Goal, ...] = ()
    result: str = ""  # an expression that is true if the statement did its work; for a statement that is no expression
    sizes: tuple[int, ...] = (8, 100)
    item: str = ""  # reads a field of DeviceDict

    def statements(self) -> dict[str, str]:
        codes = {OURS: self.ours, DICT: self.plain or self.ours}
        if TensorDict is not None:
            codes[PEER] = self.peer or self.ours
        if self.item:
            codes[ITEM] = self.item
        return {who: code.format(CONTAINERS.get(who)) for who, code in codes.items()}


LOOP = "{{k: %s for k, v in s.items()}}"
CAST_FLOATS = LOOP % "v.to(torch.float64) if v.is_floating_point() or v.is_complex() else v"
WRITE = "for k, v in first: {0}[k] = v\nfor k, v in second: {0}[k] = v"
BUILD = 'DeviceDict(s, device="cpu")'
BUILD_PEER = 'TensorDict(s, batch_size=%s, device="cpu")'
CLONED = (Goal(DICT, 1.1, sizes=(8,)), Goal(DICT, 0.8, sizes=(100,)))
ABOUT_DICT, AS_LOOP = (Goal(DICT),), (Goal(DICT, 1.1),)
FLAT = (Goal(PEER, 0.25, sizes=(8,)), Goal(PEER, 1, sizes=(1000,)), Goal(SMALL, sizes=(1000,)))
ROWS = (
    Row("read", '{}["k3"]', goals=(Goal(DICT, 1.5),)),
    Row("attribute, typed", "t.k3", '{}["k3"]', '{}["k3"]', goals=(Goal(ITEM, 2),), item='t["k3"]'),
    Row("membership", '"k3" in {}', peer='"k3" in {}.keys()', goals=ABOUT_DICT),
    Row("iterate", "for k, v in {}.items(): pass", goals=ABOUT_DICT, result="list({}.items())"),
    Row("splat", "accept(**{})", goals=ABOUT_DICT),
    Row("write", WRITE, goals=(Goal(DICT, 5),), result="{}"),
    Row("construct", BUILD, "dict(s)", BUILD_PEER % "[2]", goals=(Goal(PEER, 0.35),)),
    Row("construct, no batch size", BUILD, "dict(s)", BUILD_PEER % "[]"),
    Row("to(same device)", '{}.to("cpu")', LOOP % 'v.to("cpu")', goals=FLAT, sizes=(8, 100, 1000)),
    Row("to(dtype), loop spares ids, as ours", "{}.to(torch.float64)", CAST_FLOATS, goals=AS_LOOP),
    Row("to(dtype), loop casts ids too", "{}.to(torch.float64)", LOOP % "v.to(torch.float64)"),
    Row("numpy, loop takes any tensor, as ours", "{}.numpy()", LOOP % "v.detach().cpu().numpy()", goals=AS_LOOP),
    Row("numpy, loop fails for grad or GPU", "{}.numpy()", LOOP % "v.numpy()", goals=(Goal(DICT, 0.9),)),
    Row("clone", "{}.clone()", LOOP % "v.clone()", goals=CLONED),
    Row("to(meta)", '{}.to("meta")', LOOP % 'v.to("meta")', goals=AS_LOOP),
)


def scope(size: int) -> dict[str, Any]:
    """The variables of the statements: three equal containers, and two sets of other tensors with the same keys."""
    # Intern the keys, as Python interns literals: finding an equal str with another address takes up to twice as long.
    keys = [sys.intern(f"k{i}") for i in range(size)]
    s, first, second = ({key: torch.rand(2) for key in keys} for _ in range(3))
    known: dict[str, Any] = {"s": s, "d": DeviceDict(s), "torch": torch, "DeviceDict": DeviceDict}
    typed = type("Typed", (TypedDeviceDict,), {"__annotations__": dict.fromkeys(keys, torch.Tensor)})
    known |= {
        "t": typed(s),
        "first": list(first.items()),
        "second": list(second.items()),
        "accept": lambda **fields: fields,
    }
    if TensorDict is not None:
        known |= {"td": TensorDict(s, batch_size=[2], device="cpu"), "TensorDict": TensorDict}
    return known


def timers(row: Row, size: int) -> dict[str, Timer]:
    """A timer for each contender. First asserts that all statements have the same result."""
    known, statements, results = scope(size), row.statements(), {}
    for who, code in statements.items():
        if row.result:
            exec(code, known)
        results[who] = eval(row.result.format(CONTAINERS.get(who)) or code, known)
        assert same(results[OURS], results[who]), f"{row.name}, {size} fields: {who} gives another result"
    return {who: Timer(code, globals=known) for who, code in statements.items()}


def import_seconds(module: str) -> float:
    """The seconds that the import of ``module`` takes after torch, in a new interpreter."""
    # Not torch.utils.benchmark: it repeats a statement in one process, where a second import does nothing.
    (seconds,) = fresh(
        "-c", f"import time, torch; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"
    )
    return seconds


def line(name: str, size: int | None, seconds: Mapping[str, list[float]], goals: tuple[Goal, ...]) -> dict[str, Any]:
    """A line of the results. ``seconds``: for each contender, one number for each round."""
    others = {who: times for who, times in seconds.items() if who != OURS}
    ratios = {who: ratio(seconds[OURS], times) for who, times in others.items()}
    met = {str(g): ratios[g.against]["median"] <= (g.limit or ABOUT_ONE) for g in goals if g.against in ratios}
    return {
        "operation": name,
        "fields": size,
        "median_seconds": {who: median(times) for who, times in seconds.items()},
        "ratios": ratios,
        "goals": met,
    }


def table(lines: list[dict[str, Any]]) -> str:
    columns = [who for who in (DICT, PEER, SMALL, ITEM) if any(who in one["ratios"] for one in lines)]
    rows = [["operation", "fields", *(f"ours / {who}" for who in columns), "goal", "met"]]
    for one in lines:
        shown = [one["ratios"].get(who) for who in columns]
        left = [one["operation"], str(one["fields"] or "")]
        left += ["" if r is None else f"{r['median']:7.3f} ({r['min']:.3f}..{r['max']:.3f})" for r in shown]
        for goal, met in one["goals"].items() or [("", None)]:
            rows.append([*left, goal, {True: "yes", False: "NO", None: ""}[met]])
            left = [""] * len(left)
    return aligned(rows)


def core_lines(rounds: int) -> list[dict[str, Any]]:
    """The ratios and goals of every operation and size."""
    cases = {(row, size): timers(row, size) for row in ROWS for size in row.sizes}
    seconds = interleaved(cases, rounds)
    lines = []
    for (row, size), times in seconds.items():
        small = {} if size == 8 else {SMALL: seconds[row, 8][OURS]}
        lines.append(line(row.name, size, {**times, **small}, tuple(g for g in row.goals if size in g.sizes)))
    return lines


def main() -> None:
    args = parser("Core operations beside a plain dict and TensorDict, as ratios.").parse_args()
    measured = setting(tensordict=TensorDict)
    print(", ".join(f"{what} {name or 'is not installed, its column is left out'}" for what, name in measured.items()))
    print(f"median (least..greatest) of {args.rounds} ratios; below 1 ours is faster; ~1: to {ABOUT_ONE}\n", flush=True)

    lines = core_lines(args.rounds)
    if TensorDict is not None:
        pairs = [(import_seconds("tensordict_lite"), import_seconds("tensordict")) for _ in range(args.rounds + 1)]
        imports = {OURS: [x for x, _ in pairs[1:]], PEER: [y for _, y in pairs[1:]]}  # the first call fills file caches
        lines.append(line("import, after torch", None, imports, (Goal(PEER, 0.05),)))

    print(table(lines))
    write(args.json, {**measured, "rounds": args.rounds, "results": lines})


if __name__ == "__main__":
    main()
