"""Draw the results of a benchmark.

    python benchmarks/plot.py PATH.json OUT.svg

A line for each operation and size, with a mark for each contender: its time as a multiple of the time of the first
contender. The thin line shows the smallest and the largest ratio of all rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
from io import StringIO
from pathlib import Path
from typing import Any

try:
    import matplotlib
except ImportError:
    sys.exit("matplotlib is not installed, no picture is drawn")
matplotlib.use("agg")
from matplotlib import pyplot
from matplotlib.figure import Figure

# The mark and the colour of each contender but the first, in the order of their first occurrence. The colours are
# legible on a light and on a dark page.
MARKS = tuple("osX^DvP*<>ph")
COLOURS = (
    *("#7d848c", "#d1603d", "#a88532", "#8f6bb3", "#c9780a", "#3d8f5f"),
    *("#4c8fbf", "#b0508f", "#7a9a2e", "#a5665b", "#2a958d", "#d6406f"),
)
FIRST_COLOUR = "#3b82c4"
# What changes with the theme of the reader: text, background, rules. The chart is drawn in the colours of a light page.
THEMES = {"ink": ("#24292f", "#e6edf3"), "paper": ("#fefefe", "#161b22"), "rule": ("#d9dde1", "#3d444d")}
INK, PAPER, RULE = (light for light, _ in THEMES.values())
DRAWN_IN = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
DRAWN_IN |= dict.fromkeys(("figure.facecolor", "axes.facecolor"), PAPER)
# Inches: the width, which a narrow screen shows without scaling it much, the height of an operation, the margins.
WIDTH, LINE, AROUND = 4.7, 0.6, 1.9
APART = 0.58  # share of an operation, below its name, over which its marks are spread
LEAST, MOST = 0.05, 100.0  # a mark outside this range is drawn at the edge, with its number


def chart(results: dict[str, Any]) -> Figure:
    lines = [line for line in results["results"] if line["ratios"]]
    first = next(iter(lines[0]["ratios"]))
    others = [who for who in dict.fromkeys(who for line in lines for who in line["ratios"]) if who != first]
    figure, axes = pyplot.subplots(figsize=(WIDTH, AROUND + LINE * len(lines)), layout="constrained")
    axes.set_xscale("log")
    axes.set_xlim(LEAST / 1.6, MOST * 2.2)
    axes.axvspan(1, MOST * 3, color=FIRST_COLOUR, alpha=0.12, lw=0)
    axes.axvline(1, color=FIRST_COLOUR, lw=1.4)
    for below, line in enumerate(lines):
        axes.axhline(below + 0.5, color=RULE, lw=0.6, zorder=0)
        name = ", ".join(filter(None, (line["operation"].replace("`", ""), line["fields"])))
        axes.text(0.01, below - 0.32, name, transform=axes.get_yaxis_transform(), va="center", weight="bold")
        here = [who for who in others if who in line["ratios"]]
        for i, who in enumerate(here):
            mark, colour, r = MARKS[others.index(who)], COLOURS[others.index(who)], line["ratios"][who]
            y = below + 0.13 + APART * ((i + 0.5) / len(here) - 0.5)
            x = min(max(r["median"], LEAST), MOST)
            if x == r["median"]:
                axes.hlines(y, r["min"], r["max"], color=colour, lw=1.2)
            else:
                number = f"← {r['median']:.2g}" if r["median"] < 1 else f"{r['median']:.0f} →"
                axes.annotate(
                    number, (x, y), xytext=(6, -0.5), textcoords="offset points", va="center", color=colour, fontsize=8
                )
            axes.plot(x, y, mark, color=colour, ms=5.2, mec=PAPER, mew=0.5, label=who)
    axes.set_yticks([])
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_xticks(ticks := [0.1, 0.5, 1, 2, 5, 10, 20, 50, 100], [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel(f"times what {first} takes")
    where = f"{results['gpu'] or 'CPU only'}, {results['cpu']}, torch {results['torch']}"
    axes.set_title(f"Time as a multiple of {first}\nIn the blue area {first} takes less\n{where}", fontsize=9.5)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(
        [handles[who] for who in others], others, loc="outside lower center", ncols=2, frameon=False, columnspacing=1
    )
    return figure


def themed(svg: str) -> str:
    """The picture with its text, background and rules in the colours of the reader's theme."""
    for name, (light, _) in THEMES.items():
        svg = svg.replace(light, f"var(--{name})")
    light, dark = (" ".join(f"--{name}: {pair[i]};" for name, pair in THEMES.items()) for i in (0, 1))
    style = f"<style>svg {{ {light} }} @media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}</style>"
    return svg.replace(" <defs>", f" {style}\n <defs>", 1)


def draw(source: Path, target: Path) -> None:
    """Draw the results in a JSON file. The suffix of the target says of which kind the picture is."""
    pyplot.rcParams.update({"font.size": 9, **DRAWN_IN})
    pyplot.rcParams.update({"svg.hashsalt": "results", "svg.fonttype": "none"})  # equal results give equal files
    figure = chart(json.loads(source.read_text(encoding="utf-8")))
    if target.suffix == ".svg":
        figure.savefig(drawn := StringIO(), format="svg", metadata={"Date": None})
        target.write_text(themed(drawn.getvalue()), encoding="utf-8")
    else:
        figure.savefig(target)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the results of a benchmark.")
    parser.add_argument("json", type=Path, help="what the benchmark wrote")
    parser.add_argument("out", type=Path, help="the picture; its suffix says of which kind")
    args = parser.parse_args()
    draw(args.json, args.out)


if __name__ == "__main__":
    main()
