"""Which species is this penguin? One `DeviceDict` holds the table, strings and gaps and all, from file to answer.

    python examples/penguins.py [--epochs 40] [--seed 0] [--out examples/out]

Trains a small network on four fifths of the Palmer Penguins, names the species of the rest, and draws where it errs.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from tensordict_lite import DeviceDict, Vocabulary

HERE = Path(__file__).parent
NA = "NA"  # how the file writes a missing value
MEASURED = ("bill_length_mm", "bill_depth_mm", "flipper_length_mm", "body_mass_g")
REQUIRED_ACCURACY = 0.95
DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")


def read_table(path: Path) -> DeviceDict:
    """Every row of the file. A missing number is NaN, a missing sex is "missing"."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    gaps = ", ".join(f"{name} {values.count(NA)}" for name, values in columns.items())
    print(f"{path.name}: {len(rows)} rows, all kept. Missing values:\n{gaps}\n")
    encoders = {
        "species": Vocabulary.fit(columns["species"]),
        "island": Vocabulary.fit(columns["island"]),
        "sex": Vocabulary.fit({*columns["sex"]} - {NA}, unknown="missing"),
    }
    strings = {name: columns[name] for name in encoders}
    year = [int(value) for value in columns["year"]]
    measured = {name: [float("nan" if value == NA else value) for value in columns[name]] for name in MEASURED}
    table = DeviceDict({**strings, "year": year, "measured": measured}, encoders=encoders)
    table["missing"] = table["measured"].map(torch.isnan)
    return table


def standardise(column: Tensor, training: Tensor) -> Tensor:
    """Gaps filled, then shifted and scaled, with the median, mean and deviation of the training rows alone."""
    gap = column.isnan()
    known = column[training & ~gap]
    return (torch.where(gap, known.median(), column) - known.mean()) / known.std()


def network_input(table: DeviceDict) -> Tensor:
    """float32 ``[rows, 14]``: what was measured, what is missing, and island and sex as one-hot codes."""
    measured = table["measured"].map(lambda column: standardise(column, table["training"]))
    numbers = torch.stack([*measured.values(), *table["missing"].values()], dim=1)
    one_hot = [F.one_hot(table[key], len(table.encoders[key].tokens)) for key in ("island", "sex")]
    return torch.cat([numbers, *one_hot], dim=1)


def train(model: nn.Module, rows: DeviceDict, epochs: int) -> None:
    """Train ``model`` to predict the species of ``rows``, in shuffled batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    samples = rows.select("input", "species")
    for epoch in range(epochs):
        right = torch.zeros((), device=rows.device)
        for batch in samples.rows.batches(64, shuffle=True):
            logits = model(batch["input"])
            loss = F.cross_entropy(logits, batch["species"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += (logits.argmax(dim=1) == batch["species"]).sum()
        if (epoch + 1) % 10 == 0:
            print(f"epoch {epoch + 1}: training accuracy {right / len(rows.rows):.3f}")


def run(epochs: int, seed: int) -> tuple[list[str], list[str]]:
    """Run the program. Returns the true and the predicted species of the held-out penguins."""
    torch.manual_seed(seed)
    table = read_table(HERE / "data" / "penguins.csv")
    table["training"] = torch.randperm(len(table.rows)) < round(0.8 * len(table.rows))  # 80 % of the rows, at random
    table["input"] = network_input(table)
    print(table, end="\n\n")
    table = table.to(DEVICE)  # every column, in one call

    species = table.encoders["species"]
    model = nn.Sequential(nn.Linear(table["input"].shape[1], 32), nn.ReLU(), nn.Linear(32, len(species.tokens)))
    train(model.to(DEVICE), table.rows[table["training"]], epochs)

    # Add the predictions, with their encoder, to the held-out rows. So `decode` gives the names of the species.
    held_out = table.rows[~table["training"]]
    with torch.no_grad():
        predicted = model(held_out["input"]).argmax(dim=1)
    answers = held_out | DeviceDict({"predicted": predicted}, encoders={"predicted": species})
    guesses, truths, islands, sexes = (answers.decode(key) for key in ("predicted", "species", "island", "sex"))
    lengths = answers["measured", "bill_length_mm"].tolist()
    print("\nevery tenth held-out penguin, predicted / true:")
    for i in range(0, len(truths), 10):
        print(f"  {guesses[i]} / {truths[i]}  ({islands[i]}, sex {sexes[i]}, bill {lengths[i]:.1f} mm)")
    return truths, guesses


def draw_confusion(truths: list[str], guesses: list[str], title: str, path: Path) -> None:
    """A picture of how many penguins of each species (a row) were taken for each species (a column)."""
    names, cells = sorted(set(truths) | set(guesses)), Counter(zip(truths, guesses, strict=True))
    counts = [[cells[truth, guess] for guess in names] for truth in names]
    size, most = len(names), max(cells.values())
    figure = Figure(figsize=(5, 5), layout="tight")
    axes = figure.subplots()
    axes.pcolormesh(range(size), range(size), counts, cmap="Blues", vmin=-most / 10, edgecolors="white", linewidth=3)
    for row, line in enumerate(counts):
        for column, count in enumerate(line):
            color = "white" if count > 0.6 * most else "#111111"  # on the colour of the cell, also in the dark
            axes.text(column, row, str(count), ha="center", va="center", size=18, color=color)
    axes.set_title(title, pad=12)
    axes.set(xlabel="predicted species", ylabel="true species", aspect="equal")
    axes.set_xticks(range(size), names, size=12)
    axes.set_yticks(range(size), names, size=12, rotation="vertical", va="center")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.invert_yaxis()  # the first species on top
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(run: Callable[..., tuple[list[str], list[str]]] = run) -> None:
    parser = argparse.ArgumentParser(description="Tell the species of penguins from their measurements.")
    parser.add_argument("--epochs", type=int, default=40, help="passes over the rows (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the split and the network (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=HERE / "out", metavar="DIR", help="where the picture goes")
    options = parser.parse_args()
    truths, guesses = run(options.epochs, options.seed)
    right = sum(truth == guess for truth, guess in zip(truths, guesses, strict=True))
    accuracy, picture = right / len(truths), options.out / "confusion.png"
    print(f"\nheld-out accuracy {accuracy:.3f}, {right} of {len(truths)} penguins")
    draw_confusion(truths, guesses, f"Accuracy {accuracy:.1%} on {len(truths)} held-out penguins", picture)
    print(f"drawn to {picture}")
    if accuracy < REQUIRED_ACCURACY:
        sys.exit(f"held-out accuracy {accuracy:.3f} is under the required {REQUIRED_ACCURACY}")


if __name__ == "__main__":
    main()
