"""What rows of any length cost: `collate`, rows, iteration and a training step, as ratios of times.

    python benchmarks/bench_ragged.py [--quick] [--rounds N] [--only TEXT] [--json PATH]

The batch has 64 rows of 16 to 256 token ids and as many labels. "by hand" is the code with `torch.cat`, offsets and
slices that a user writes. torch's nested tensors have the layout `torch.jagged`. TensorDict stores such tensors, made
by `densify`. The training step is that of `examples/packed.py`. All contenders compute with one thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import OURS, PEER, Case, Fields, Prepare, folder, main, optional, statement, statements
from torch import Tensor

from tensordict_lite import DeviceDict, collate, load
from tensordict_lite.tables import RowWriter

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import packed
import plain_packed

HAND, NESTED, PADDED, BY_VALUE = "by hand", "nested tensors", "padded", "index of every value"
COUNT, KEYS = 64, ["ids", "labels"]
TensorDict, lazy_stack = optional("tensordict", "TensorDict"), optional("tensordict", "lazy_stack")


def samples_of(count: int) -> list[Fields]:
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(16, 257, (count,), generator=g).tolist()
    return [{key: torch.randint(30_000, (n,), generator=g) for key in KEYS} for n in lengths]


def nested(rows: list[Tensor]) -> Any:
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def by_hand(samples: list[Fields]) -> Fields:
    """The values of each field, and the offsets that they share."""
    offsets = torch.zeros(len(samples) + 1, dtype=torch.int32)
    torch.cumsum(torch.tensor([len(sample["ids"]) for sample in samples]), 0, out=offsets[1:])
    return {**{key: torch.cat([sample[key] for sample in samples]) for key in KEYS}, "offsets": offsets}


def rows_of(batch: Any) -> list[list[Tensor]]:
    """The rows of each field of a batch of any kind."""
    if isinstance(batch, list):  # of rows
        return [[torch.as_tensor(row[key]) for row in batch] for key in KEYS]
    if "offsets" in {*batch.keys()}:  # TensorDict has no `in`
        ends = batch["offsets"].tolist()
        return [[torch.as_tensor(batch[key][a:b]) for a, b in pairwise(ends)] for key in KEYS]
    return [list(batch[key].unbind()) for key in KEYS]


def as_nested(samples: list[Fields]) -> dict[str, Any]:
    return {key: nested([sample[key] for sample in samples]) for key in KEYS}


def as_tensordict(samples: list[Fields]) -> Any:
    return lazy_stack([TensorDict(sample) for sample in samples]).densify(layout=torch.jagged)


MAKERS: dict[str, Callable[[list[Fields]], Any]] = {
    OURS: lambda samples: collate(samples, ragged=KEYS),
    HAND: by_hand,
    NESTED: as_nested,
    PEER: as_tensordict,
}
UNBIND = {
    OURS: "out = x['ids'].unbind()",
    HAND: "out = x['ids'].split(x['offsets'].diff().tolist())",
    NESTED: "out = x['ids'].unbind()",
    PEER: "out = x['ids'].unbind()",
}
ITERATE = {
    OURS: "out = [row for row in x.rows]",
    HAND: "out = [{k: x[k][a:b] for k in keys} for a, b in pairwise(x['offsets'].tolist())]",
    NESTED: "out = [dict(zip(keys, row)) for row in zip(*(x[k].unbind() for k in keys))]",
    PEER: "out = list(x.unbind(0))",
}


def in_numpy(table: dict[str, Any], index: Tensor) -> dict[str, Any]:
    """A slice of the mapped values for each row. The offsets are in memory."""
    spans = [(table["offsets"][i], table["offsets"][i + 1]) for i in index.tolist()]
    ends = np.cumsum([0, *(b - a for a, b in spans)])
    return {"offsets": ends} | {key: np.concatenate([table[key][a:b] for a, b in spans]) for key in KEYS}


def by_value(table: dict[str, Any], index: Tensor) -> dict[str, Any]:
    """An index for each value, as for dense fields."""
    starts, lengths = table["offsets"][index], table["offsets"].diff()[index]
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    at = (starts - ends[:-1]).repeat_interleave(lengths) + torch.arange(int(ends[-1]))
    return {"offsets": ends} | {key: table[key].index_select(0, at) for key in KEYS}


def nested_rows(rows: dict[str, Any], index: Tensor) -> dict[str, Any]:
    """Rows of nested tensors that ``unbind`` has split before. An index into a nested tensor takes seconds."""
    return {key: nested([rows[key][i] for i in index.tolist()]) for key in KEYS}


def joined(batch: DeviceDict[Any]) -> Fields:
    return {"offsets": batch["ids"].offsets, **{key: batch[key].values for key in KEYS}}


TAKE: dict[str, tuple[str, Callable[[DeviceDict[Any]], Any]]] = {
    OURS: ("out = x.rows[index]", lambda x: x),
    HAND: ("out = in_numpy(x, index)", lambda x: {key: one.numpy() for key, one in joined(x).items()}),
    BY_VALUE: ("out = by_value(x, index)", joined),
    NESTED: ("out = nested_rows(x, index)", lambda x: {key: x[key].nested().unbind() for key in KEYS}),
}


def table_case(size: int) -> Case:
    """Random rows of a table on disk."""

    def make() -> Any:
        path, samples = folder() / f"ragged {size}", samples_of(8192)
        with RowWriter(path, like=collate(samples[:1], ragged=KEYS)) as writer:
            writer.write(collate(samples, ragged=KEYS))
        return load(path)

    index = torch.randint(8192, (size,), generator=torch.Generator().manual_seed(1))
    names: dict[str, Any] = {"index": index, "in_numpy": in_numpy, "by_value": by_value, "nested_rows": nested_rows}
    contenders = {
        who: statement(code, made, "rows_of(out)", rows_of=rows_of, **names) for who, (code, made) in TAKE.items()
    }
    return Case("`rows[index]` of a table", f"{size} of 8192 rows", contenders, make)


def step_case() -> Case:
    """The loss and the gradients of a batch of texts of 4 to 300 bytes."""
    samples = packed.make_samples(COUNT, 0)

    def contender(loss_of: Callable[..., Tensor], batch: Any) -> Prepare:
        def make(_: Any) -> Any:
            torch.manual_seed(0)
            return packed.Model()

        return statement("loss = loss_of(x, batch); loss.backward()", make, "loss.item()", loss_of=loss_of, batch=batch)

    mine, plain = packed.collate_texts(samples), plain_packed.collate_texts(samples)
    contenders = {
        OURS: contender(packed.loss_packed, mine),
        HAND: contender(plain_packed.loss_packed, plain),
        PADDED: contender(packed.loss_padded, mine),
    }
    return Case("a training step", f"{COUNT} texts", contenders, equal=lambda x, y: abs(x - y) < 1e-4)


def cases() -> list[Case]:
    samples = samples_of(COUNT)
    names: dict[str, Any] = {"keys": KEYS, "pairwise": pairwise, "rows_of": rows_of}
    collating = {
        who: statement("out = join(x)", result="rows_of(out)", join=make, **names) for who, make in MAKERS.items()
    }
    return [
        Case("collate", f"{COUNT} samples", collating, lambda: samples),
        Case("unbind", f"{COUNT} rows", statements(UNBIND, MAKERS, result="out", **names), lambda: samples),
        Case("iterate", f"{COUNT} rows", statements(ITERATE, MAKERS, result="rows_of(out)", **names), lambda: samples),
        table_case(64),
        table_case(1024),
        step_case(),
    ]


if __name__ == "__main__":
    main(__doc__, cases, ["tensordict"])
