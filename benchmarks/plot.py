"""Draw the results of a benchmark.

    python benchmarks/plot.py PATH.json OUT.svg

If each operation is measured on one size, as in bench_peers.py: a line for each operation, with a mark for each
contender. Otherwise a chart for each operation and size, with a bar for each contender. A mark or bar shows the time as
a multiple of the time of the first contender. The thin line shows the smallest and the largest ratio of all rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
from math import fsum
from pathlib import Path
from typing import Any

try:
    import matplotlib
except ImportError:
    sys.exit("matplotlib is not installed, no picture is drawn")
matplotlib.use("agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

OURS_COLOUR, EDGE = "#1b6ca8", "#444444"

# --- a line for each operation, with marks ---

# By contender: its mark, its colour, and the package whose version stands in the legend.
MARKS = {
    "dict": ("o", "#444444", None),
    "dict, packed": ("X", "#999999", None),
    "TensorDict": ("s", "#d1603d", "tensordict"),
    "tianshou Batch": ("^", "#8f6bb3", "tianshou"),
    "BatchFeature": ("D", "#d9a520", "transformers"),
    "send_to_device": ("v", "#3d8f5f", "accelerate"),
    "pytree": ("P", "#4c8fbf", None),
}
WIDTH, LINE, AROUND = 8.4, 0.42, 1.8  # inches: figure width, height of an operation, margins
APART = 0.13  # share of an operation between the marks of two contenders that would cover each other
LEAST, MOST = 0.05, 100.0  # a mark outside this range is drawn at the edge, with its number


def marks(results: dict[str, Any], lines: list[dict[str, Any]]) -> Figure:
    figure, axes = pyplot.subplots(figsize=(WIDTH, AROUND + LINE * len(lines)), layout="constrained")
    axes.set_xscale("log")
    axes.set_xlim(LEAST / 1.35, MOST * 1.9)
    axes.axvspan(1, MOST * 2, color=OURS_COLOUR, alpha=0.12, lw=0)
    axes.axvline(1, color=OURS_COLOUR, lw=1.4)
    for below, line in enumerate(lines):
        axes.axhline(below + 0.5, color="#dddddd", lw=0.6, zorder=0)
        for i, (who, (mark, colour, _)) in enumerate(MARKS.items()):
            y = below + APART * (i - (len(MARKS) - 1) / 2)
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
    axes.set_yticks(range(len(lines)), [line["operation"] for line in lines])
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_xticks(ticks := [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100], [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("times what DeviceDict takes")
    where = f"{results['fields']} fields; {results['cpu']}, torch {results['torch']}"
    axes.set_title(f"Time as a multiple of DeviceDict's: where it is blue DeviceDict takes less\n{where}", fontsize=9.5)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    versions = {who: results.get(package or "") for who, (_, _, package) in MARKS.items()}
    named = [f"{who} ({versions[who]})" if versions[who] else who for who in map(str, handles)]
    figure.legend(handles.values(), named, loc="outside lower center", ncols=3)
    return figure


# --- a chart for each operation and size, with bars ---

OTHERS_COLOUR = {
    "DeviceDict": "#6fb1dd",
    "one tensor": "#8a8a8a",
}  # those of the first contender and the peers are fixed
PEER_COLOUR = "#d9a25f"
LONGEST = 3
"""The longest bar is at most this many times as long as the next one. An arrow marks a bar that is cut off."""
NAMES, CHART, GAP = 1.75, 2.1, 0.35  # inches: width of the names, width of a chart, space between charts
TOP, HEAD, BAR = 0.6, 0.75, 0.21  # inches: height of the title, of the titles of a row and its charts, and of a bar


def draw(axes: Axes, line: dict[str, Any], named: bool) -> None:
    """Draw one chart. ``named``: write the names of the contenders; the charts to the right have the same order."""
    ratios = line["ratios"]
    first, *others = whos = list(ratios)
    middle = [ratios[who]["median"] for who in whos]
    most = sorted(ratios[who]["max"] for who in whos)
    limit = min(most[-1], LONGEST * most[-2:][0])  # a bar that is much longer than all others would hide them
    shown = [min(value, limit) for value in middle]
    spread = [[max(0, value - ratios[who]["min"]) for value, who in zip(shown, whos, strict=True)]]
    spread += [[max(0, min(ratios[who]["max"], limit) - value) for value, who in zip(shown, whos, strict=True)]]
    colours = {first: OURS_COLOUR, **{who: OTHERS_COLOUR.get(who, PEER_COLOUR) for who in others}}
    axes.barh(whos, shown, xerr=spread, color=[*colours.values()], height=0.72, error_kw={"lw": 0.8, "ecolor": EDGE})
    for y, who in enumerate(whos):
        value = ratios[who]["median"]
        text = f" {value:.{0 if value >= 9.95 else 1 if value >= 1.95 else 2}f}"
        if value > limit:
            text = f" \u2192{text}"
        axes.text(min(ratios[who]["max"], limit), y, text, va="center")
    axes.set_xlim(0, 1.35 * limit)  # leave room for the numbers
    axes.set_ylim(len(whos) - 0.4, -0.6)
    axes.tick_params(left=False, labelleft=named)
    axes.set_xticks([])
    axes.set_title(line["fields"], fontsize=9)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def bars(results: dict[str, Any], lines: list[dict[str, Any]]) -> Figure:
    """A row of charts for each operation, one chart for each size."""
    operations: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        operations.setdefault(line["operation"], []).append(line)
    heights = [BAR * max(len(line["ratios"]) for line in row) for row in operations.values()]
    width = NAMES + (CHART + GAP) * max(map(len, operations.values()))
    height = TOP + fsum(HEAD + bars for bars in heights) + GAP / 2  # `sum` rounds otherwise before Python 3.12
    figure = pyplot.figure(figsize=(width, height))
    where = f"{results['gpu'] or 'CPU only'}, {results['cpu']}, torch {results['torch']}"
    title = f"Time as a multiple of that of the first contender: shorter is faster\n{where}"
    figure.text(0.1 / width, 1 - 0.1 / height, title, va="top", fontsize=9.5)
    bottom = height - TOP
    for bars, (operation, row) in zip(heights, operations.items(), strict=True):
        figure.text(0.1 / width, (bottom - 0.2) / height, operation, va="top", fontsize=9.5, fontweight="bold")
        bottom -= HEAD + bars
        for column, line in enumerate(row):
            left = NAMES + (CHART + GAP) * column
            box = (left / width, bottom / height, CHART / width, bars / height)
            draw(figure.add_axes(box), line, named=column == 0)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the results of a benchmark.")
    parser.add_argument("json", type=Path, help="what the benchmark wrote")
    parser.add_argument("out", type=Path, help="the picture; its suffix says of which kind")
    args = parser.parse_args()
    pyplot.rcParams.update({"font.size": 8, "svg.hashsalt": "results"})  # equal results give equal files
    results = json.loads(args.json.read_text())
    found = [line for line in results["results"] if line["ratios"]]
    lines = [{**line, "operation": line["operation"].replace("`", "")} for line in found]
    chart = bars if any(line["fields"] for line in lines) else marks
    metadata = {"Date": None} if args.out.suffix == ".svg" else None
    chart(results, lines).savefig(args.out, metadata=metadata)


if __name__ == "__main__":
    main()
