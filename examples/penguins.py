"""Which species is this penguin? One `DeviceDict` holds the table, strings and gaps and all, from file to answer.

    python examples/penguins.py [--epochs 40] [--seed 0] [--out examples/out]

Trains a small network on four fifths of the Palmer Penguins, names the species of the rest, and draws where it errs.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from tqdm import tqdm

from tensordict_lite import DeviceDict, Vocabulary, prefetch

HERE = Path(__file__).parent
NA = "NA"  # how the file writes a missing value
MEASURED = ("bill_length_mm", "bill_depth_mm", "flipper_length_mm", "body_mass_g")
REQUIRED_ACCURACY = 0.95


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


def train(model: nn.Module, rows: DeviceDict, device: torch.device, epochs: int) -> None:
    """Fit the species of ``rows``. The DataLoader copies random rows, and `prefetch` moves them ahead of time."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    loader = DataLoader(rows.select("input", "species").rows, batch_size=64, shuffle=True)
    progress = tqdm(range(epochs), desc="training", unit="epoch")
    for _ in progress:
        right = 0
        for batch in prefetch(loader, device):
            logits = model(batch["input"])
            loss = F.cross_entropy(logits, batch["species"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += (logits.argmax(dim=1) == batch["species"]).sum()
        progress.set_postfix(accuracy=f"{right / len(rows.rows):.3f}", refresh=False)


def draw_confusion(answers: DeviceDict, names: tuple[str, ...], title: str, path: Path) -> None:
    """A picture of how many penguins of each species (a row) were taken for each species (a column)."""
    size = len(names)
    cells = answers["species"] * size + answers["predicted"]
    counts = cells.bincount(minlength=size * size).reshape(size, size).tolist()
    most = max(map(max, counts))
    figure = Figure(figsize=(5, 5), layout="tight")
    axes = figure.subplots()
    axes.pcolormesh(range(size), range(size), counts, cmap="Blues", vmin=-most / 10, edgecolors="white", linewidth=3)
    for row, line in enumerate(counts):
        for column, count in enumerate(line):
            color = "white" if count > 0.6 * most else "black"
            axes.text(column, row, str(count), ha="center", va="center", size=18, color=color)
    axes.set_title(title, pad=12)
    axes.set(xlabel="predicted species", ylabel="true species")
    axes.set_xticks(range(size), names, size=12)
    axes.set_yticks(range(size), names, size=12, rotation="vertical", va="center")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_aspect("equal")
    axes.invert_yaxis()  # the first species on top
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tell the species of penguins from their measurements.")
    parser.add_argument("--epochs", type=int, default=40, help="passes over the rows (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the split and the network (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=HERE / "out", metavar="DIR", help="where the picture goes")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    table = read_table(HERE / "data" / "penguins.csv")
    count = len(table.rows)
    table["training"] = torch.randperm(count) < round(0.8 * count)  # a random four fifths of the rows
    table["input"] = network_input(table)
    print(table)

    species = table.encoders["species"]
    model = nn.Sequential(nn.Linear(table["input"].shape[1], 32), nn.ReLU(), nn.Linear(32, len(species.tokens)))
    print(f"\ntraining on {device}")
    train(model.to(device), table.rows[table["training"]], device, options.epochs)

    # All rows that were held out, with every column, move to the device in one call.
    held_out = table.rows[~table["training"]].to(device)

    # The predictions join the held-out rows and bring their encoder along, so that they read as names.
    with torch.no_grad():
        predicted = model(held_out["input"]).argmax(dim=1)
    answers = held_out | DeviceDict({"predicted": predicted}, encoders={"predicted": species})
    strings = [answers.decode(key) for key in ("predicted", "species", "island", "sex")]
    lengths = answers["measured", "bill_length_mm"].tolist()
    print("\nevery tenth held-out penguin, predicted / true:")
    for guess, truth, island, sex, length in list(zip(*strings, lengths, strict=True))[::10]:
        print(f"  {guess} / {truth}  ({island}, sex {sex}, bill {length:.1f} mm)")
    right = answers["predicted"] == answers["species"]
    accuracy = right.float().mean().item()
    print(f"\nheld-out accuracy {accuracy:.3f}, {right.sum()} of {len(right)} penguins")
    picture = options.out / "confusion.png"
    draw_confusion(answers, species.tokens, f"Accuracy {accuracy:.1%} on {len(right)} held-out penguins", picture)
    print(f"drawn to {picture}")
    if accuracy < REQUIRED_ACCURACY:
        sys.exit(f"held-out accuracy {accuracy:.3f} is under the required {REQUIRED_ACCURACY}")


if __name__ == "__main__":
    main()
