"""Read a table in parallel with Ray Data or Dask: each task maps the files, and reads its own range of rows.

    python examples/table_engines.py ray | dask

Both compute the mean mass of each species of penguins. Ray needs ``pip install "ray[data]"``, Dask needs
``pip install "dask[dataframe,distributed]"``.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch

from tensordict_lite import DeviceDict, Ragged, Vocabulary
from tensordict_lite.tables import RowWriter, load_parts

SPECIES = Vocabulary(["Adelie", "Chinstrap", "Gentoo"])


def write(folder: str, count: int = 10_000) -> None:
    """Write a table in two parts, as two writers leave them. A penguin was weighed one to three times."""
    for part in range(2):
        number = torch.arange(count) + part * count
        kind = (number % 3).tolist()
        fields: dict[str, Any] = {"number": number, "size": torch.rand(count, 4), "mass": 4.0 + number % 3}
        fields |= {"species": [SPECIES.tokens[i] for i in kind]}
        fields |= {"weighings": Ragged.from_rows([torch.full((1 + i,), 4.0 + i) for i in kind])}
        batch = DeviceDict(fields, encoders={"species": SPECIES})
        with RowWriter(folder, like=batch, part=part, parts=2) as writer:
            writer.write(batch)


def plain(d: DeviceDict) -> dict[str, Any]:
    """What Ray, Dask and pandas take: decoded strings, a list of arrays for a ragged field, and arrays."""
    out: dict[str, Any] = {}
    for key, value in d.items():
        if key in d.encoders:
            out[key] = d.decode(key)
        else:
            out[key] = [row.numpy() for row in value.unbind()] if isinstance(value, Ragged) else value.numpy()
    return out


def read(batch: dict[str, Any], folder: str, keys: Sequence[str] | None = None) -> dict[str, Any]:
    """The rows of a batch of row numbers. Opening the table maps its files, and reads no row."""
    return plain(load_parts(folder, keys=keys)[batch["id"]])


def ray_data(folder: str) -> dict[str, float]:
    import ray.data  # noqa: PLC0415  (an optional engine)

    if not ray.is_initialized():
        ray.init(num_cpus=2, object_store_memory=200 << 20, include_dashboard=False, log_to_driver=False)
    # Ray divides the row numbers among its tasks, and each task reads its rows.
    numbers = ray.data.range(len(load_parts(folder)))
    table = numbers.map_batches(read, batch_size=4096, fn_kwargs={"folder": folder, "keys": ["species", "weighings"]})
    found = table.to_pandas()
    return found["weighings"].map(lambda masses: float(masses.mean())).groupby(found["species"]).mean().to_dict()


def frame(rows: range, folder: str, columns: Sequence[str] | None = None) -> Any:
    """The rows of a range as a data frame. Dask passes the columns that a computation needs."""
    import pandas  # noqa: PLC0415  (comes with Dask's data frames)

    found = plain(load_parts(folder, keys=columns)[rows])
    return pandas.DataFrame({key: list(values) for key, values in found.items()})


def dask(folder: str, size: int = 4096) -> dict[str, float]:
    from dask.dataframe import from_map  # noqa: PLC0415  (an optional engine)
    from dask.distributed import Client, LocalCluster  # noqa: PLC0415

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None, memory_limit=None) as cluster,
        Client(cluster),
    ):
        count = len(load_parts(folder))
        ranges = [range(first, min(first + size, count)) for first in range(0, count, size)]
        table = from_map(frame, ranges, folder=folder)
        return table.groupby("species")["mass"].mean().compute().to_dict()


PROGRAMS = {"ray": ray_data, "dask": dask}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        write(folder)
        for name in sys.argv[1:] or PROGRAMS:
            print(name, PROGRAMS[name](folder))
