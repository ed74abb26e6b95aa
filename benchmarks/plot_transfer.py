"""Draw the results of a benchmark: a chart for each operation and size, with a bar for each contender.

    python benchmarks/plot_transfer.py PATH.json OUT.svg

The JSON file comes from bench_transfer.py or bench_loader.py. A bar is the median time as a multiple of the time of the
packed DeviceDict. The thin line shows the smallest and the largest ratio.
"""

from __future__ import annotations

from math import fsum
from typing import Any

from plotting import Axes, Figure, pyplot, script

COLOURS = {
    "ours": "#1b6ca8",
    "prefetch": "#1b6ca8",
    "ours packed": "#1b6ca8",
    "ours unpacked": "#6fb1dd",
    "one tensor": "#8a8a8a",
}
OTHER = "#d9a25f"
LONGEST = 3
"""The longest bar is at most this many times as long as the next one. An arrow marks a bar that is cut off."""
NAMES, WIDTH, GAP = 1.75, 2.1, 0.35  # inches: width of the names, width of a chart, space between charts
TOP, HEAD, BAR = 0.6, 0.75, 0.21  # inches: height of the title, of the titles of a row and its charts, and of a bar


def draw(axes: Axes, line: dict[str, Any], named: bool) -> None:
    """Draw one chart. ``named``: write the names of the contenders; the charts to the right have the same order."""
    ratios = next(iter(line["ratios"].values()))  # ratios to our time; to the packed time if there are two
    whos = list(ratios)
    middle = [ratios[who]["median"] for who in whos]
    most = sorted(ratios[who]["max"] for who in whos)
    limit = min(most[-1], LONGEST * most[-2:][0])  # a bar that is much longer than all others would hide them
    shown = [min(value, limit) for value in middle]
    spread = [[max(0, value - ratios[who]["min"]) for value, who in zip(shown, whos, strict=True)]]
    spread += [[max(0, min(ratios[who]["max"], limit) - value) for value, who in zip(shown, whos, strict=True)]]
    colours = [COLOURS.get(who, OTHER) for who in whos]
    axes.barh(whos, shown, xerr=spread, color=colours, height=0.72, error_kw={"lw": 0.8, "ecolor": "#444444"})
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


def chart(results: dict[str, Any]) -> Figure:
    """A row of charts for each operation, one chart for each size."""
    operations: dict[str, list[dict[str, Any]]] = {}
    for line in results["results"]:
        operations.setdefault(line["operation"], []).append(line)
    heights = [BAR * max(len(line["median_seconds"]) for line in row) for row in operations.values()]
    width = NAMES + (WIDTH + GAP) * max(map(len, operations.values()))
    height = TOP + fsum(HEAD + bars for bars in heights) + GAP / 2  # `sum` rounds otherwise before Python 3.12
    figure = pyplot.figure(figsize=(width, height))
    where = f"{results['gpu'] or results['device'] or 'CPU only'}, {results['cpu']}, torch {results['torch']}"
    title = f"Time as a multiple of the packed DeviceDict's, or prefetch's: shorter is faster\n{where}"
    figure.text(0.1 / width, 1 - 0.1 / height, title, va="top", fontsize=9.5)
    bottom = height - TOP
    for bars, (operation, row) in zip(heights, operations.items(), strict=True):
        figure.text(0.1 / width, (bottom - 0.2) / height, operation, va="top", fontsize=9.5, fontweight="bold")
        bottom -= HEAD + bars
        for column, line in enumerate(row):
            left = NAMES + (WIDTH + GAP) * column
            box = (left / width, bottom / height, WIDTH / width, bars / height)
            draw(figure.add_axes(box), line, named=column == 0)
    return figure


if __name__ == "__main__":
    script(chart, "Draw what bench_transfer.py or bench_loader.py measured.")
