"""Draw the pictures of the gallery from the examples: `python docs/pictures.py`. Needs matplotlib."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

ROOT = Path(__file__).parent.parent
ASSETS = ROOT / "docs" / "assets"
sys.path += [str(ROOT / "examples"), str(ROOT / "benchmarks")]
plot: Any = importlib.import_module("plot")


def save(figure: Any, name: str) -> None:
    """An SVG that is the same in each run, in the colours of the reader's theme."""
    with rc_context({"svg.hashsalt": name}):
        figure.savefig(drawn := io.StringIO(), format="svg", metadata={"Date": None})
    (ASSETS / f"{name}.svg").write_text(plot.themed(drawn.getvalue()), encoding="utf-8")


def output(example: str, *options: str) -> str:
    """What an example prints."""
    module: Any = importlib.import_module(example)
    sys.argv = [example, *options]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        module.main()
    return printed.getvalue()


def classifier() -> None:
    """Three images with their boxes, and the mask of the padded boxes."""
    module: Any = importlib.import_module("classifier")
    dataset = module.Boxes(1_000_000, 3)  # the first held-out images
    batch = module.collate_boxes([dataset[i] for i in range(3)])
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    *images, mask = figure.subplots(1, 4)
    for axes, row in zip(images, batch.rows, strict=True):
        axes.imshow(row["image"].permute(1, 2, 0))
        for left, top, right, bottom in row["box"][row["is_box"]].tolist():
            axes.add_patch(Rectangle((left - 0.5, top - 0.5), right - left, bottom - top, fill=False, ec="#c00", lw=2))
        axes.set_title(f"{row.decode('id')}: {row.decode('texture')}", size=10)
        axes.set_axis_off()
    count = batch["is_box"].shape[1]
    mask.pcolormesh(range(count), range(3), batch["is_box"], cmap="Blues", vmin=0, vmax=1.5, ec=plot.PAPER, lw=3)
    mask.set_title('batch["is_box"]', size=10)
    mask.set_xticks(range(count))
    mask.set_yticks(range(3), batch.decode("id"))
    mask.tick_params(length=0)
    mask.spines[:].set_visible(False)
    mask.set_aspect("equal")
    mask.invert_yaxis()
    save(figure, "classifier")


def ppo() -> None:
    """The mean length of the episodes that ended in an update."""
    module: Any = importlib.import_module("ppo")
    learn, lengths = module.learn, list[float]()

    def record(agent: Any, optimizer: Any, samples: Any) -> Any:
        lengths.append(samples["length"][samples["done"]].mean().item())
        return learn(agent, optimizer, samples)

    module.learn = record
    output("ppo")
    figure = Figure(figsize=(5, 2.6), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(lengths) + 1), lengths, marker="o", color="#3f51b5")
    axes.set_xlabel("update")
    axes.set_ylabel("mean length (steps)")
    axes.set_ylim(0)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, "ppo")


def penguins() -> None:
    """The confusion matrix, which the example draws."""
    module: Any = importlib.import_module("penguins")
    draw, drawn = module.draw_confusion, ASSETS / "penguins.svg"
    module.draw_confusion = lambda truths, guesses, title, path: draw(truths, guesses, title, drawn)
    with rc_context({"svg.hashsalt": "penguins"}):
        output("penguins")
    drawn.write_text(plot.themed(drawn.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with rc_context(plot.DRAWN_IN):
        classifier()
        ppo()
        penguins()
