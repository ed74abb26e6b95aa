"""Functions of whole dicts beside a loop over a plain dict, ``torch._foreach_*`` by hand, and TensorDict.

    python benchmarks/bench_whole.py [--quick] [--rounds N] [--json PATH]

Tensors are on the CPU. "small" fields are float32 of 16 to 320 elements, "large" ones have a million. A model has 400
fields. In every round the contenders of a row are timed right after each other and their ratio is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from common import aligned, interleaved, parser, ratio, same, setting, write
from torch.utils.benchmark import Timer

from tensordict_lite import DeviceDict

try:
    from tensordict import TensorDict
except ImportError:
    TensorDict = None

OURS, PACKED, DICT, BY_HAND, PEER = "DeviceDict", "DeviceDict, packed", "dict", "foreach", "TensorDict"
CONTAINERS = {OURS: "d", PACKED: "p", DICT: "s", BY_HAND: "s", PEER: "td"}
OTHERS = {OURS: "e", PACKED: "q", DICT: "o", BY_HAND: "o", PEER: "te"}


@dataclass(frozen=True)
class Goal:
    """To take at most ``limit`` times as long as ``against``."""

    limit: float
    against: str = DICT
    of: str = OURS


@dataclass(frozen=True, eq=False)
class Row:
    """An operation: the statement of each contender, with ``{d}`` for its container and ``{e}`` for another one."""

    name: str
    fields: int
    size: str
    codes: Mapping[str, str]
    goals: tuple[Goal, ...] = ()
    in_place: bool = True


def methods(code: str, *who: str) -> dict[str, str]:
    return dict.fromkeys(who or (OURS, PACKED, PEER), code)


LOOP = "for k, v in {d}.items(): v.%s"
LERP = {
    **methods("{d}.lerp_({e}, 0.01)"),
    DICT: LOOP % "lerp_({e}[k], 0.01)",
    BY_HAND: "torch._foreach_lerp_(list({d}.values()), list({e}.values()), 0.01)",
}
MUL = {**methods("{d}.mul_(0.99)"), DICT: LOOP % "mul_(0.99)"}
ADD = {**methods("{d}.add_({e})"), DICT: LOOP % "add_({e}[k])"}
ZERO = {**methods("{d}.zero_()"), DICT: LOOP % "zero_()"}
COPY = {**methods("{d}.copy_({e})", OURS, PACKED), DICT: LOOP % "copy_({e}[k])", PEER: "{d}.update_({e})"}
HALF = {**methods("{d}.to(torch.float16)", OURS, PEER), DICT: "{{k: v.to(torch.float16) for k, v in {d}.items()}}"}
STACK = {
    OURS: "torch.stack({d}s)",
    DICT: "{{k: torch.stack([x[k] for x in {d}s]) for k in {d}}}",
    PEER: "torch.stack({d}s)",
}
FASTER, AS_LOOP, AS_PEER = Goal(0.75), Goal(1.05), Goal(1, PEER)
ROWS = (
    Row("lerp_ (EMA)", 400, "small", LERP, (FASTER, AS_PEER, Goal(1, PEER, PACKED), Goal(0.75, of=PACKED))),
    Row("lerp_ (EMA)", 8, "small", LERP),
    Row("lerp_ (EMA)", 8, "large", LERP, (AS_LOOP,)),
    Row("add_ (mapping)", 400, "small", ADD),
    Row("mul_ (number)", 400, "small", MUL, (FASTER, Goal(0.3, of=PACKED))),
    Row("mul_ (number)", 8, "large", MUL, (AS_LOOP,)),
    Row("zero_", 400, "small", ZERO),
    Row("copy_", 400, "small", COPY),
    Row("to(float16)", 8, "tiny", HALF, (AS_PEER,), in_place=False),
    Row("to(float16)", 100, "tiny", HALF, (AS_PEER,), in_place=False),
    Row("stack 8", 8, "tiny", STACK, (Goal(0.6, PEER),), in_place=False),
    Row("stack 8", 100, "tiny", STACK, (Goal(1.1), Goal(0.6, PEER)), in_place=False),
)


def tensors(row: Row) -> dict[str, torch.Tensor]:
    shapes = {"tiny": lambda i: (2,), "small": lambda i: (1 + i % 20, 16), "large": lambda i: (1 << 20,)}
    return {f"k{i}": torch.rand(shapes[row.size](i)) for i in range(row.fields)}


def scope(row: Row) -> dict[str, Any]:
    """What the statements name: equal containers, and others of the same structure."""
    s, o = tensors(row), tensors(row)
    known: dict[str, Any] = {"torch": torch, "s": s, "o": o}
    known |= {"d": DeviceDict(s).clone(), "e": DeviceDict(o)}
    known |= {"p": known["d"].pack(), "q": known["e"].pack()}
    if TensorDict is not None:
        size = [2] if row.size == "tiny" else []
        known |= {"td": TensorDict(s, batch_size=size).clone(), "te": TensorDict(o, batch_size=size)}
    for name in ("s", "d", "td"):
        if name in known and not row.in_place:
            known[f"{name}s"] = [known[name]] * 8
    return known


def timers(row: Row) -> dict[str, Timer]:
    """A timer for each contender, after an assertion that all do the same."""
    known = scope(row)
    out, expected = {}, None
    for who, code in row.codes.items():
        if who == PEER and TensorDict is None:
            continue
        container = CONTAINERS.get(who, "d")
        statement = code.format(d=container, e=OTHERS.get(who, "e"))
        if row.in_place:
            torch.manual_seed(0)
            fresh = scope(row)
            exec(statement, fresh)
            result = dict(fresh[container].items())
        else:
            result = dict(eval(statement, known).items())
        expected = result if expected is None else expected
        assert result.keys() == expected.keys(), who
        close = all(torch.allclose(result[k], expected[k]) for k in result)
        assert close and (row.in_place or same(result, expected)), f"{row.name}: {who} gives another result"
        out[who] = Timer(statement, globals=known)
    return out


def lines_of(row: Row, times: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    """The ratios of a row, for each of our containers, and whether the goals are met."""
    lines = []
    for ours in (OURS, PACKED):
        if ours not in times:
            continue
        ratios = {who: ratio(times[ours], values) for who, values in times.items() if who not in (OURS, PACKED)}
        goals = [goal for goal in row.goals if goal.of == ours and goal.against in ratios]
        met = {f"<= {g.limit:g} x {g.against}": ratios[g.against]["median"] <= g.limit for g in goals}
        lines.append({"operation": row.name, "fields": row.fields, "size": row.size, "ours": ours, "ratios": ratios,
                      "median_seconds": median(times[ours]), "goals": met})  # fmt: skip
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    columns = [who for who in (DICT, BY_HAND, PEER) if any(who in one["ratios"] for one in lines)]
    rows = [["operation", "fields", "ours", "us", *(f"ours / {who}" for who in columns), "goal", "met"]]
    for one in lines:
        shown = [one["ratios"].get(who) for who in columns]
        left = [f"{one['operation']}, {one['size']}", str(one["fields"]), one["ours"]]
        left.append(f"{one['median_seconds'] * 1e6:.0f}")
        left += ["" if r is None else f"{r['median']:.2f} ({r['min']:.2f}..{r['max']:.2f})" for r in shown]
        for goal, met in one["goals"].items() or [("", None)]:
            rows.append([*left, goal, {True: "yes", False: "NO", None: ""}[met]])
            left = [""] * len(left)
    return aligned(rows)


def main() -> None:
    args = parser("Functions of whole dicts, as ratios of times.").parse_args()
    measured = setting(tensordict=TensorDict)
    print(", ".join(f"{what} {name or 'is not installed, its column is left out'}" for what, name in measured.items()))
    print(f"median (least..greatest) of {args.rounds} ratios; below 1 ours is faster\n", flush=True)
    with torch.no_grad():
        seconds = interleaved({row: timers(row) for row in ROWS}, args.rounds)
    lines = [line for row, times in seconds.items() for line in lines_of(row, times)]
    print(table(lines))
    write(args.json, {**measured, "rounds": args.rounds, "results": lines})


if __name__ == "__main__":
    main()
