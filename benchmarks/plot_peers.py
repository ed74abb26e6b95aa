"""Draw the results of bench_peers.py: a line for each operation, with a mark for each contender.

    python benchmarks/plot_peers.py PATH.json OUT.svg

The position of a mark is the time of the contender as a multiple of the time of DeviceDict. The line through the mark
shows the smallest and the largest ratio of all rounds.
"""

from __future__ import annotations

from typing import Any

from peers import CONTENDERS
from plotting import Figure, pyplot, script

MARKS = {
    "dict": ("o", "#444444"),
    "dict, packed": ("X", "#999999"),
    "TensorDict": ("s", "#d1603d"),
    "tianshou Batch": ("^", "#8f6bb3"),
    "BatchFeature": ("D", "#d9a520"),
    "send_to_device": ("v", "#3d8f5f"),
    "pytree": ("P", "#4c8fbf"),
}
WIDTH, LINE, AROUND = 8.4, 0.42, 1.8  # inches: figure width, height of an operation, margins
APART = 0.13  # share of an operation between the marks of two contenders that would cover each other
LEAST, MOST = 0.05, 100.0  # a mark outside this range is drawn at the edge, with its number


def chart(results: dict[str, Any]) -> Figure:
    lines = results["results"]
    figure, axes = pyplot.subplots(figsize=(WIDTH, AROUND + LINE * len(lines)), layout="constrained")
    axes.set_xscale("log")
    axes.set_xlim(LEAST / 1.35, MOST * 1.9)
    axes.axvspan(1, MOST * 2, color="#1b6ca8", alpha=0.12, lw=0)
    axes.axvline(1, color="#1b6ca8", lw=1.4)
    for below, line in enumerate(lines):
        axes.axhline(below + 0.5, color="#dddddd", lw=0.6, zorder=0)
        for i, (who, (mark, colour)) in enumerate(MARKS.items()):
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
    axes.set_title(
        f"Time, or memory, as a multiple of DeviceDict's: where it is blue DeviceDict takes less\n{where}", fontsize=9.5
    )
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    packages = {one.name: one.package for one in CONTENDERS}
    named = {who: f"{who} ({results[package]})" for who, package in packages.items() if results.get(package)}
    figure.legend(
        handles.values(), [named.get(str(who), str(who)) for who in handles], loc="outside lower center", ncols=3
    )
    return figure


if __name__ == "__main__":
    script(chart, "Draw what bench_peers.py measured.")
