"""Draw the results of a benchmark.

    python benchmarks/plot.py PATH.json OUT.svg

A line for each operation and size, with a mark for each contender: its time as a multiple of the time of the first
contender. The thin line shows the smallest and the largest ratio of all rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

try:
    import matplotlib
except ImportError:
    sys.exit("matplotlib is not installed, no picture is drawn")
matplotlib.use("agg")
from matplotlib import pyplot
from matplotlib.figure import Figure

# The mark and the colour of each contender but the first, in the order of their first occurrence.
MARKS = tuple("osX^DvP*<>ph")
COLOURS = (
    *("#444444", "#d1603d", "#999999", "#8f6bb3", "#d9a520", "#3d8f5f"),
    *("#4c8fbf", "#b0508f", "#7a9a2e", "#8c564b", "#2aa198", "#c2185b"),
)
FIRST_COLOUR = "#1b6ca8"
WIDTH, LINE, AROUND = 8.4, 0.42, 1.8  # inches: figure width, height of an operation, margins
APART = 0.75  # share of an operation over which its marks are spread, so that they do not cover each other
LEAST, MOST = 0.05, 100.0  # a mark outside this range is drawn at the edge, with its number


def chart(results: dict[str, Any]) -> Figure:
    lines = [line for line in results["results"] if line["ratios"]]
    first = next(iter(lines[0]["ratios"]))
    others = [who for who in dict.fromkeys(who for line in lines for who in line["ratios"]) if who != first]
    figure, axes = pyplot.subplots(figsize=(WIDTH, AROUND + LINE * len(lines)), layout="constrained")
    axes.set_xscale("log")
    axes.set_xlim(LEAST / 1.35, MOST * 1.9)
    axes.axvspan(1, MOST * 2, color=FIRST_COLOUR, alpha=0.12, lw=0)
    axes.axvline(1, color=FIRST_COLOUR, lw=1.4)
    for below, line in enumerate(lines):
        axes.axhline(below + 0.5, color="#dddddd", lw=0.6, zorder=0)
        for i, (who, mark, colour) in enumerate(zip(others, MARKS, COLOURS, strict=False)):
            y = below + APART * ((i + 0.5) / len(others) - 0.5)
            r = line["ratios"].get(who)
            if r is None:
                continue
            x = min(max(r["median"], LEAST), MOST)
            if x == r["median"]:
                axes.hlines(y, r["min"], r["max"], color=colour, lw=1.2)
            else:
                number = f"← {r['median']:.2g}" if r["median"] < 1 else f"{r['median']:.0f} →"
                axes.annotate(
                    number, (x, y), xytext=(6, -0.5), textcoords="offset points", va="center", color=colour, fontsize=7
                )
            axes.plot(x, y, mark, color=colour, ms=4.8, mec="white", mew=0.5, label=who)
    names = [", ".join(filter(None, (line["operation"].replace("`", ""), line["fields"]))) for line in lines]
    axes.set_yticks(range(len(lines)), names)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_xticks(ticks := [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100], [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel(f"times what {first} takes")
    where = f"{results['gpu'] or 'CPU only'}, {results['cpu']}, torch {results['torch']}"
    axes.set_title(f"Time as a multiple of {first}: where it is blue {first} takes less\n{where}", fontsize=9.5)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend([handles[who] for who in others], others, loc="outside lower center", ncols=3)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the results of a benchmark.")
    parser.add_argument("json", type=Path, help="what the benchmark wrote")
    parser.add_argument("out", type=Path, help="the picture; its suffix says of which kind")
    args = parser.parse_args()
    pyplot.rcParams.update({"font.size": 8, "svg.hashsalt": "results"})  # equal results give equal files
    metadata = {"Date": None} if args.out.suffix == ".svg" else None
    chart(json.loads(args.json.read_text())).savefig(args.out, metadata=metadata)


if __name__ == "__main__":
    main()
