"""The same program as `penguins.py`, with plain dicts."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from penguins import DEVICE, HERE, MEASURED, NA, main, standardise
from torch import Tensor, nn
from torch.nn import functional as F

Columns = dict[str, Tensor]


def read_table(path: Path) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """The columns, and the names of the codes in each column of strings."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    gaps = ", ".join(f"{name} {values.count(NA)}" for name, values in columns.items())
    print(f"{path.name}: {len(rows)} rows, all kept. Missing values:\n{gaps}\n")
    names = {
        "species": sorted(set(columns["species"])),
        "island": sorted(set(columns["island"])),
        "sex": ["missing", *sorted(set(columns["sex"]) - {NA})],
    }
    codes = {name: {value: code for code, value in enumerate(values)} for name, values in names.items()}
    codes["sex"][NA] = codes["sex"]["missing"]
    table: dict[str, Any] = {name: torch.tensor([codes[name][value] for value in columns[name]]) for name in names}
    table["year"] = torch.tensor([int(value) for value in columns["year"]])
    table["measured"] = {
        name: torch.tensor([float("nan" if value == NA else value) for value in columns[name]]) for name in MEASURED
    }
    table["missing"] = {name: column.isnan() for name, column in table["measured"].items()}
    return table, names


def network_input(table: dict[str, Any], names: dict[str, list[str]]) -> Tensor:
    measured = [standardise(column, table["training"]) for column in table["measured"].values()]
    numbers = torch.stack([*measured, *table["missing"].values()], dim=1)
    one_hot = [F.one_hot(table[key], len(names[key])) for key in ("island", "sex")]
    return torch.cat([numbers, *one_hot], dim=1)


def to_device(table: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {
        key: to_device(value, device) if isinstance(value, dict) else value.to(device) for key, value in table.items()
    }


def take(table: dict[str, Any], rows: Tensor) -> dict[str, Any]:
    return {
        key: take(value, rows) if isinstance(value, dict) else value.index_select(0, rows)
        for key, value in table.items()
    }


def batches(samples: Columns, size: int) -> Iterator[Columns]:
    first = next(iter(samples.values()))
    for rows in torch.randperm(len(first)).to(first.device).split(size):
        yield {key: value.index_select(0, rows) for key, value in samples.items()}


def train(model: nn.Module, samples: Columns, epochs: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    count = len(samples["species"])
    for epoch in range(epochs):
        right = torch.zeros((), device=samples["species"].device)
        for batch in batches(samples, 64):
            logits = model(batch["input"])
            loss = F.cross_entropy(logits, batch["species"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += (logits.argmax(dim=1) == batch["species"]).sum()
        if (epoch + 1) % 10 == 0:
            print(f"epoch {epoch + 1}: training accuracy {right / count:.3f}")


def run(epochs: int, seed: int) -> tuple[list[str], list[str]]:
    torch.manual_seed(seed)
    table, names = read_table(HERE / "data" / "penguins.csv")
    count = len(table["species"])
    table["training"] = torch.randperm(count) < round(0.8 * count)
    table["input"] = network_input(table, names)
    table = to_device(table, DEVICE)

    model = nn.Sequential(nn.Linear(table["input"].shape[1], 32), nn.ReLU(), nn.Linear(32, len(names["species"])))
    training = table["training"].nonzero().squeeze(1)
    train(model.to(DEVICE), take({key: table[key] for key in ("input", "species")}, training), epochs)

    answers = take(table, (~table["training"]).nonzero().squeeze(1))
    with torch.no_grad():
        answers["predicted"] = model(answers["input"]).argmax(dim=1)
    names["predicted"] = names["species"]
    guesses, truths, islands, sexes = (
        [names[key][code] for code in answers[key].tolist()] for key in ("predicted", "species", "island", "sex")
    )
    lengths = answers["measured"]["bill_length_mm"].tolist()
    print("\nevery tenth held-out penguin, predicted / true:")
    for i in range(0, len(truths), 10):
        print(f"  {guesses[i]} / {truths[i]}  ({islands[i]}, sex {sexes[i]}, bill {lengths[i]:.1f} mm)")
    return truths, guesses


if __name__ == "__main__":
    main(run)
