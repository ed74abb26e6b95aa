"""Whether the core operations still cost what they cost when the committed results were measured.

    python benchmarks/guard.py [--margin 1.3] [--quick] [--rounds N] [--against PATH]

Measures them again and compares the ratios to a plain dict, which are about the same on every machine, with the
committed ones. Fails if one is larger by more than the margin; those are measured a second time first, as machines are
noisy.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench_core import DICT, core_lines
from common import aligned, parser

COMMITTED = Path(__file__).parent / "results" / "core-cpu.json"
Ratios = dict[tuple[str, int | None], float]


def ratios(lines: list[dict[str, Any]]) -> Ratios:
    """Of every operation and size, ours to a plain dict."""
    return {(one["operation"], one["fields"]): one["ratios"][DICT]["median"] for one in lines if DICT in one["ratios"]}


def slower(now: Ratios, before: Ratios, margin: float) -> set[tuple[str, int | None]]:
    return {case for case in now.keys() & before.keys() if now[case] > before[case] * margin}


def main() -> None:
    options = parser("Whether the core operations cost what they cost before.")
    options.add_argument(
        "--margin", type=float, default=1.3, help="how many times a committed ratio is still right (1.3)"
    )
    options.add_argument("--against", type=Path, default=COMMITTED, metavar="PATH", help="the committed results")
    args = options.parse_args()
    before = ratios(json.loads(args.against.read_text())["results"])
    now = ratios(core_lines(args.rounds))
    suspects = slower(now, before, args.margin)
    if suspects:
        again = ratios(core_lines(args.rounds))
        now |= {case: min(now[case], again[case]) for case in suspects}
        suspects = slower(now, before, args.margin)
    print("How many times as long as a plain dict's, as committed and now:\n")
    rows = [["operation", "fields", "committed", "now", "now / committed", ""]]
    for case in before.keys() & now.keys():
        change = now[case] / before[case]
        verdict = "SLOWER" if case in suspects else ""
        rows.append([case[0], str(case[1] or ""), f"{before[case]:.3f}", f"{now[case]:.3f}", f"{change:.2f}", verdict])
    print(aligned([rows[0], *sorted(rows[1:])]))
    if suspects:
        sys.exit(f"{len(suspects)} ratios are more than {args.margin} times what they were")
    print(f"\nall are within {args.margin} times what was committed")


if __name__ == "__main__":
    main()
