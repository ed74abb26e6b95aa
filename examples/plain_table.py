"""The same program as `table.py`, with plain dicts: one NumPy file per column, and JSON for the names and row count."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap
from table import BATCH, NAMES, limited_memory, main, new_model, pixels, stripes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

CODES = {name: code for code, name in enumerate(NAMES)}
CAPTION = 32  # bytes
Columns = dict[str, Any]


def encoded(batch: dict[str, Any]) -> Columns:
    captions = [caption.encode() for caption in batch["caption"]]
    if max(map(len, captions)) > CAPTION:  # NumPy would truncate the caption
        raise ValueError(f"a caption has more than {CAPTION} bytes")
    return {
        "image": batch["image"].numpy(),
        "direction": np.array([CODES[name] for name in batch["direction"]]),
        "caption": np.array(captions, dtype=f"S{CAPTION}"),
    }


def write(folder: Path, rows: int) -> None:
    folder.mkdir(parents=True)
    columns: Columns = {}
    done = 0
    for batch in map(encoded, stripes(rows)):
        for name, values in batch.items():
            if name not in columns:
                shape = (rows, *values.shape[1:])
                columns[name] = open_memmap(folder / f"{name}.npy", "w+", values.dtype, shape)
            columns[name][done : done + len(values)] = values
        done += len(batch["direction"])
    for column in columns.values():
        column.flush()
    schema = {"columns": list(columns), "rows": done, "directions": NAMES}
    (folder / "table.json").write_text(json.dumps(schema))  # written last: a folder without this file is incomplete


def load(folder: Path) -> Columns:
    schema = json.loads((folder / "table.json").read_text())
    return {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in schema["columns"]}


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, columns: Columns, count: int) -> None:
        self.columns, self.count = columns, count

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        return {name: torch.from_numpy(column[indices]) for name, column in self.columns.items()}


def as_it_is(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch


def train(table: Columns, workers: int) -> nn.Module:
    model = new_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    training = Rows({name: table[name] for name in ("image", "direction")}, len(table["direction"]) * 4 // 5)
    loader = DataLoader(training, BATCH, shuffle=True, num_workers=workers, collate_fn=as_it_is)
    for batch in loader:
        loss = F.cross_entropy(model(pixels(batch["image"])), batch["direction"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@torch.no_grad()
def accuracy(model: nn.Module, table: Columns) -> float:
    count = len(table["direction"])
    right = 0
    for first in range(count * 4 // 5, count, BATCH):
        image = torch.from_numpy(np.array(table["image"][first : first + BATCH]))
        direction = torch.from_numpy(np.array(table["direction"][first : first + BATCH]))
        right += int((model(pixels(image)).argmax(1) == direction).sum())
    return right / (count - count * 4 // 5)


def run(folder: Path, rows: int, limit: int, workers: int) -> float:
    torch.manual_seed(0)
    start = time.perf_counter()
    with limited_memory(limit):
        write(folder, rows)
    wrote = time.perf_counter()
    print(f"wrote {rows / (wrote - start):,.0f} rows a second")
    table = load(folder)
    with limited_memory(limit):
        try:
            np.ones_like(table["image"])
            print("an array of the size of the table: fits in the memory")
        except MemoryError:
            print(f"an array of the size of the table: refused, as it takes more than {limit} MiB")
        model = train(table, workers)
        print(f"trained on {rows * 4 // 5 / (time.perf_counter() - wrote):,.0f} rows a second")
        print(f"row 7: {table['caption'][7].decode()!r}")
        return accuracy(model, table)


if __name__ == "__main__":
    main(run)
