"""Write a table that is larger than the memory that this program may use, then train a network from it.

    python examples/table.py [--rows 100000] [--limit 128] [--workers 2] [--out examples/out]

The program generates small pictures of stripes, in four directions and under noise. It limits its own memory with
`resource.setrlimit`, which Linux enforces. A plain array of the size of the table is then refused.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

from tensordict_lite import DeviceDict, Utf8, Vocabulary, collate, load
from tensordict_lite.tables import RowWriter

HERE = Path(__file__).parent
NAMES = ["horizontal", "vertical", "rising", "falling"]
REQUIRED_ACCURACY = 0.95
BATCH = 256


def stripes(rows: int) -> Iterator[dict[str, Any]]:
    """Batches of pictures, uint8 ``[batch, 3, 32, 32]``, with the names of the directions and captions."""
    generator = torch.Generator().manual_seed(0)
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    directions = torch.stack([y, x, (x + y) / 2**0.5, (x - y) / 2**0.5])
    for first in range(0, rows, BATCH):
        count = min(BATCH, rows - first)
        code = torch.randint(4, (count,), generator=generator)
        phase = torch.rand(count, 1, 1, generator=generator) * 6.3
        light = 0.5 + 0.25 * torch.sin(directions[code] * 0.8 + phase)
        noise = torch.randn(count, 3, 32, 32, generator=generator) * 0.3
        image = (light[:, None] + noise).clamp(0, 1).mul(255).to(torch.uint8)
        names = [NAMES[i] for i in code.tolist()]
        captions = [f"{name} stripes, number {first + i}" for i, name in enumerate(names)]
        yield {"image": image, "direction": names, "caption": captions}


@contextmanager
def limited_memory(mib: int) -> Iterator[None]:
    """Allow this process, and the workers that it starts, ``mib`` MiB more than it has allocated now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    resource.setrlimit(resource.RLIMIT_DATA, (pages * resource.getpagesize() + (mib << 20), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def new_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 7, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 49, 4))


def pixels(image: Tensor) -> Tensor:
    return image.float().div_(255).sub_(0.5)


def write(folder: Path, rows: int) -> None:
    encoders = {"direction": Vocabulary(NAMES), "caption": Utf8(32)}
    batches = (DeviceDict(batch, encoders=encoders) for batch in stripes(rows))
    first = next(batches)
    with RowWriter(folder, like=first) as writer:
        writer.write(first)
        for batch in batches:
            writer.write(batch)


def train(table: DeviceDict, workers: int) -> nn.Module:
    model = new_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    training = Subset(table.select("image", "direction").rows, range(len(table.rows) * 4 // 5))
    loader = DataLoader(training, BATCH, shuffle=True, num_workers=workers, collate_fn=collate)
    for batch in loader:
        loss = F.cross_entropy(model(pixels(batch["image"])), batch["direction"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@torch.no_grad()
def accuracy(model: nn.Module, table: DeviceDict) -> float:
    held_out = table.rows[len(table.rows) * 4 // 5 :]
    right = 0
    for batch in held_out.rows.batches(BATCH):
        right += int((model(pixels(batch["image"])).argmax(1) == batch["direction"]).sum())
    return right / len(held_out.rows)


def run(folder: Path, rows: int, limit: int, workers: int) -> float:
    """Run the program. Returns the accuracy on the held-out rows."""
    torch.manual_seed(0)
    start = time.perf_counter()
    with limited_memory(limit):
        write(folder, rows)
    wrote = time.perf_counter()
    print(f"wrote {rows / (wrote - start):,.0f} rows a second")
    # The limit counts a whole mapped file, even pages that are not in memory. So map the table, then set the limit.
    table = load(folder)
    print(table)
    with limited_memory(limit):
        try:
            torch.ones_like(table["image"])
            print("an array of the size of the table: fits in the memory")
        except RuntimeError:
            print(f"an array of the size of the table: refused, as it takes more than {limit} MiB")
        model = train(table, workers)
        print(f"trained on {rows * 4 // 5 / (time.perf_counter() - wrote):,.0f} rows a second")
        print(f"row 7: {table.rows[7].decode('caption')!r}")
        return accuracy(model, table)


def main(run: Callable[..., float] = run) -> None:
    options = argparse.ArgumentParser(description="Write a table that is larger than the memory, and train from it.")
    options.add_argument("--rows", type=int, default=100_000)
    options.add_argument("--limit", type=int, default=128, help="MiB that the program may allocate (128)")
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--out", type=Path, default=HERE / "out")
    given = options.parse_args()
    torch.set_num_threads(1)
    folder = given.out / "stripes"
    shutil.rmtree(folder, ignore_errors=True)
    found = run(folder, given.rows, given.limit, given.workers)
    print(f"held-out accuracy {found:.3f}")
    if found < REQUIRED_ACCURACY:
        sys.exit(f"held-out accuracy {found:.3f} is under the required {REQUIRED_ACCURACY}")


if __name__ == "__main__":
    main()
