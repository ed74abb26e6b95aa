"""Shared part of the plots: a command that draws a figure from the JSON file of a benchmark."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
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

__all__ = ["Axes", "Figure", "pyplot", "script"]


def script(chart: Callable[[dict[str, Any]], Figure], description: str) -> None:
    """Run the command. ``chart`` makes the figure of the results."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("json", type=Path, help="what the benchmark wrote")
    parser.add_argument("out", type=Path, help="the picture; its suffix says of which kind")
    args = parser.parse_args()
    pyplot.rcParams.update({"font.size": 8, "svg.hashsalt": "results"})  # equal results give equal files
    chart(json.loads(args.json.read_text())).savefig(
        args.out, metadata={"Date": None} if args.out.suffix == ".svg" else None
    )
