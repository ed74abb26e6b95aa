"""Ten tasks and the recipes, beside the same code with plain dicts.

    python benchmarks/bench_tasks.py [--quick] [--rounds N] [--only TEXT] [--json PATH]

A task is a function NAME of this file, and ``plain_NAME`` does the same without this package; some have a third with
TensorDict. All return the same result. Times are those of the processor. docs/gallery.md shows lines and times,
docs/recipes.md those of RECIPES.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter, process_time
from timeit import Timer
from typing import Annotated, Any

import numpy as np
import torch
from harness import DICT, OURS, PEER, Case, Prepare, Run, folder, main, optional, same
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import ConcatDataset, DataLoader

from tensordict_lite import (
    BatchOrder,
    DeviceDict,
    Pad,
    TypedDeviceDict,
    Utf8,
    Vocabulary,
    collate,
    load,
    prefetch,
    stack,
)
from tensordict_lite.tables import RowWriter, load_parts

TensorDict = optional("tensordict", "TensorDict")
pad_tensordicts = optional("tensordict", "pad_sequence")
Sample = dict[str, Any]
KINDS, STEPS, ENVS = ["cat", "dog", "bird"], 64, 16
random = torch.Generator().manual_seed(0)
net = torch.nn.Linear(4, 3)


# --- a classifier of images with boxes: pad, encode, move, read the names ---

PHOTOS: list[Sample] = [
    {
        "image": torch.rand(3, 32, 32, generator=random),
        "box": torch.rand(i % 5, 4, generator=random),
        "kind": KINDS[i % 3],
        "name": f"img_{i}",
    }
    for i in range(128)
]


def loss_of(batch: Any) -> float:
    return (batch["image"].mean() + (batch["box"].sum(2) * batch["is_box"]).sum() + batch["kind"].sum()).item()


def boxes() -> Any:
    pad, encoders = {"box": Pad(0.0, mask="is_box")}, {"kind": Vocabulary(KINDS)}
    losses, names = [], []
    for batch in prefetch(DataLoader(PHOTOS, 32, collate_fn=partial(collate, pad=pad, encoders=encoders)), "cpu"):
        losses.append(loss_of(batch))
        names += batch.decode("name")
    return losses, names


def plain_boxes() -> Any:
    index = {kind: i for i, kind in enumerate(KINDS)}

    def to_batch(rows: list[Sample]) -> Sample:
        longest = max(len(row["box"]) for row in rows)
        box = torch.zeros(len(rows), longest, 4)
        is_box = torch.zeros(len(rows), longest, dtype=torch.bool)
        for i, row in enumerate(rows):
            box[i, : len(row["box"])] = row["box"]
            is_box[i, : len(row["box"])] = True
        return {
            "image": torch.stack([row["image"] for row in rows]),
            "box": box,
            "is_box": is_box,
            "kind": torch.tensor([index[row["kind"]] for row in rows]),
            "name": [row["name"] for row in rows],
        }

    losses, names = [], []
    for data in DataLoader(PHOTOS, 32, collate_fn=to_batch):
        names += data.pop("name")
        batch = {key: value.to("cpu") for key, value in data.items()}
        losses.append(loss_of(batch))
    return losses, names


def peer_boxes() -> Any:
    index = {kind: i for i, kind in enumerate(KINDS)}

    def to_batch(rows: list[Sample]) -> Any:
        tds = [TensorDict({**row, "kind": torch.tensor([index[row["kind"]]])}) for row in rows]
        batch = pad_tensordicts([td.exclude("name") for td in tds], return_mask=True)
        batch["is_box"] = batch["masks", "box"]
        return batch.set_non_tensor("name", [td["name"] for td in tds])

    losses, names = [], []
    for batch in DataLoader(PHOTOS, 32, collate_fn=to_batch):
        losses.append(loss_of(batch.to("cpu")))
        names += batch["name"]
    return losses, names


# --- PPO: collect a rollout, compute advantages, draw minibatches ---


class Game:
    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.obs = torch.rand(ENVS, 4, generator=self.random)

    def step(self, action: Tensor) -> Sample:
        self.obs = torch.rand(ENVS, 4, generator=self.random)
        return {"reward": action.float(), "done": self.obs[:, 0] < 0.1}


@torch.no_grad()
def act(obs: Tensor) -> Sample:
    logits, value = net(obs).split([2, 1], 1)
    action = logits.argmax(1)
    return {"obs": obs, "action": action, "log_prob": logits.log_softmax(1)[:, 0], "value": value[:, 0]}


def advantage(reward: Tensor, value: Tensor, done: Tensor) -> Tensor:
    out, last, on = torch.zeros_like(reward), torch.zeros(ENVS), (~done).float()
    for t in range(STEPS - 2, -1, -1):
        last = out[t] = reward[t] - value[t] + on[t] * (0.99 * value[t + 1] + 0.95 * last)
    return out


def rollout() -> Any:
    game, kept = Game(), None
    for t in range(STEPS):
        step = act(game.obs)
        step |= game.step(step["action"])
        if kept is None:
            kept = DeviceDict(step).new_zeros(STEPS)
        kept.rows[t] = step
    assert kept
    kept["advantage"] = advantage(kept["reward"], kept["value"], kept["done"])
    sizes = [len(batch["obs"]) for batch in kept.rows.flatten().rows.batches(256, shuffle=True)]
    return sizes, kept


def plain_rollout() -> Any:
    game, kept = Game(), {}
    for t in range(STEPS):
        step = act(game.obs)
        step |= game.step(step["action"])
        if not kept:
            kept = {key: value.new_zeros(STEPS, *value.shape) for key, value in step.items()}
        for key, value in step.items():
            kept[key][t] = value
    kept["advantage"] = advantage(kept["reward"], kept["value"], kept["done"])
    flat = {key: value.flatten(0, 1) for key, value in kept.items()}
    sizes = []
    for rows in torch.randperm(STEPS * ENVS).split(256):
        batch = {key: value[rows] for key, value in flat.items()}
        sizes.append(len(batch["obs"]))
    return sizes, kept


def peer_rollout() -> Any:
    game, kept = Game(), None
    for t in range(STEPS):
        step = act(game.obs)
        step |= game.step(step["action"])
        if kept is None:
            kept = TensorDict(step, [ENVS]).new_zeros(STEPS, ENVS)
        kept[t] = TensorDict(step, [ENVS])
    kept["advantage"] = advantage(kept["reward"], kept["value"], kept["done"])
    flat = kept.flatten()
    sizes = [len(flat[rows]["obs"]) for rows in torch.randperm(STEPS * ENVS).split(256)]
    return sizes, kept


# --- a Hugging Face model: pad token ids, mask, labels ---

TEXTS: list[Sample] = [
    {"input_ids": [*range(1, n)], "labels": [*range(1, n)]} for n in (9 + i % 32 for i in range(128))
]


def language_model(input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> float:
    return ((input_ids * attention_mask).sum() + labels[labels != -100].sum()).item()


def padding() -> Any:
    pad = {"input_ids": Pad(0, mask="attention_mask"), "labels": -100}
    batches = prefetch(DataLoader(TEXTS, 32, collate_fn=partial(collate, pad=pad)), "cpu")
    return [language_model(**batch) for batch in batches]


def plain_padding() -> Any:
    def to_batch(rows: list[Sample]) -> Sample:
        ids = [torch.tensor(row["input_ids"]) for row in rows]
        labels = [torch.tensor(row["labels"]) for row in rows]
        return {
            "input_ids": pad_sequence(ids, batch_first=True),
            "attention_mask": pad_sequence([torch.ones_like(one) for one in ids], batch_first=True),
            "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        }

    losses = []
    for data in DataLoader(TEXTS, 32, collate_fn=to_batch):
        batch = {key: value.to("cpu") for key, value in data.items()}
        losses.append(language_model(**batch))
    return losses


# --- a moving average of the weights, a checkpoint in the middle of an epoch, and the run that resumes ---

POINTS: list[Sample] = [{"x": x, "y": x.sum(0, keepdim=True)} for x in torch.rand(256, 8, generator=random)]
CHECKPOINT = folder() / "checkpoint.pt"


def fresh() -> tuple[Any, Any]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 1)]
    model = torch.nn.Sequential(*layers)
    return model, torch.optim.Adam(model.parameters())


def train(model: Any, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(batch["x"]), batch["y"]).backward()
    optimizer.step()


def resume() -> Any:
    def run(resumed: bool) -> Any:
        model, optimizer = fresh()
        weights = DeviceDict(model.state_dict())
        average = weights.clone()
        order = BatchOrder(POINTS, 16, shuffle=True)
        loader = prefetch(DataLoader(POINTS, batch_sampler=order, collate_fn=collate), "cpu")
        if resumed:
            saved = torch.load(CHECKPOINT, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            loader.load_state_dict(saved["order"])
            average = saved["average"]
        for step, batch in enumerate(loader):
            train(model, optimizer, batch)
            average.lerp_(weights, 0.01)
            if step == 9 and not resumed:
                saved = {"model": weights, "optimizer": optimizer.state_dict(), "average": average}
                torch.save(saved | {"order": loader.state_dict()}, CHECKPOINT)
        return average

    return run(False) == run(True)


def plain_resume() -> Any:
    def run(resumed: bool) -> Any:
        model, optimizer = fresh()
        weights = model.state_dict()
        average = {key: value.clone() for key, value in weights.items()}
        batches = torch.randperm(len(POINTS), generator=torch.Generator().manual_seed(0)).split(16)
        if resumed:
            saved = torch.load(CHECKPOINT, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            batches = batches[saved["step"] :]
            average = saved["average"]
        rows = [batch.tolist() for batch in batches]
        for step, data in enumerate(DataLoader(POINTS, batch_sampler=rows)):
            batch = {key: value.to("cpu") for key, value in data.items()}
            train(model, optimizer, batch)
            for key, value in average.items():
                if value.is_floating_point():
                    value.lerp_(weights[key], 0.01)
                else:
                    value.copy_(weights[key])
            if step == 9 and not resumed:
                saved = {"model": weights, "optimizer": optimizer.state_dict(), "average": average}
                torch.save(saved | {"step": step + 1}, CHECKPOINT)
        return average

    first, second = run(False), run(True)
    return all(torch.equal(value, second[key]) for key, value in first.items())


# --- a table that two ranks write, of which two ranks read the rows of one kind ---

CHUNKS: list[Sample] = [
    {"x": torch.randint(9, (256, 16), generator=random), "kind": [KINDS[i * i % 3] for i in range(256)]}
    for _ in range(16)
]


def parts() -> Any:
    shutil.rmtree(folder() / "parts", ignore_errors=True)
    for rank in range(2):
        like = DeviceDict(CHUNKS[0], encoders={"kind": Vocabulary(KINDS)})
        with RowWriter(folder() / "parts", like=like, part=rank, parts=2) as writer:
            for chunk in CHUNKS[rank::2]:
                writer.write(chunk)
    rows = load_parts(folder() / "parts")
    dogs = rows.equal("kind", "dog").nonzero().flatten()
    total = 0
    for rank in range(2):
        order = BatchOrder(dogs, 64, shuffle=True, rank=rank, world=2)
        for batch in prefetch(DataLoader(rows, batch_sampler=order, collate_fn=collate), "cpu"):
            total += batch["x"].sum().item()
    return len(dogs), total


class Parts:
    def __init__(self, paths: list[Path]) -> None:
        self.parts: list[Any] = []
        for path in paths:
            meta = json.loads((path / "meta.json").read_text())
            self.parts.append(
                {key: np.memmap(path / key, dt, "r").reshape(-1, *row) for key, (dt, row) in meta.items()}
            )
        self.starts = np.cumsum([0, *(len(part["kind"]) for part in self.parts)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitems__(self, numbers: list[int]) -> Sample:
        rows = np.asarray(numbers)
        part = np.searchsorted(self.starts, rows, side="right") - 1
        batch = {}
        for key, first in self.parts[0].items():
            batch[key] = np.empty((len(rows), *first.shape[1:]), first.dtype)
            for i, one in enumerate(self.parts):
                batch[key][part == i] = one[key][rows[part == i] - self.starts[i]]
        return {key: torch.from_numpy(value) for key, value in batch.items()}


def plain_parts() -> Any:
    shutil.rmtree(folder() / "plain_parts", ignore_errors=True)
    index, paths = (
        {kind: i for i, kind in enumerate(KINDS)},
        [folder() / "plain_parts" / str(rank) for rank in range(2)],
    )
    for rank, path in enumerate(paths):
        path.mkdir(parents=True)
        meta, files = {}, {key: (path / key).open("wb") for key in CHUNKS[0]}
        for chunk in CHUNKS[rank::2]:
            for key, value in chunk.items():
                array = np.array([index[kind] for kind in value]) if key == "kind" else value.numpy()
                array.tofile(files[key])
                meta[key] = array.dtype.str, array.shape[1:]
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        (path / "meta.json").write_text(json.dumps(meta))
    rows: Any = Parts(paths)
    dogs = (np.concatenate([part["kind"] for part in rows.parts]) == index["dog"]).nonzero()[0]
    shuffled = dogs[torch.randperm(len(dogs), generator=torch.Generator().manual_seed(0)).numpy()]
    batches = np.split(shuffled, range(64, len(dogs), 64))
    total = 0
    for rank in range(2):
        for data in DataLoader(rows, batch_sampler=batches[rank::2], collate_fn=lambda batch: batch):
            batch = {key: value.to("cpu") for key, value in data.items()}
            total += batch["x"].sum().item()
    return len(dogs), total


# --- texts without padding, in batches of at most 4096 tokens ---

LENGTHS = torch.randint(5, 300, (1000,), generator=random)
PACKED: list[Sample] = [{"ids": torch.arange(n), "labels": torch.arange(n)} for n in LENGTHS.tolist()]


def packed_model(ids: Tensor, labels: Tensor, offsets: Tensor, longest: int) -> int:
    return int(ids.sum() + labels.sum() + offsets[-1]) * (longest > 0)


def tokens() -> Any:
    order = BatchOrder(PACKED, tokens=4096, lengths=LENGTHS, shuffle=True)
    loader = DataLoader(PACKED, batch_sampler=order, collate_fn=partial(collate, ragged=["ids", "labels"]))
    total = 0
    for batch in prefetch(loader, "cpu"):
        ids = batch["ids"]
        total += packed_model(ids.values, batch["labels"].values, ids.offsets, ids.max_length)
    return total


def plain_tokens() -> Any:
    batches, room = [[]], 4096
    for row in torch.randperm(len(PACKED), generator=torch.Generator().manual_seed(0)).tolist():
        if len(PACKED[row]["ids"]) > room:
            batches.append([])
            room = 4096
        batches[-1].append(row)
        room -= len(PACKED[row]["ids"])

    def to_batch(rows: list[Sample]) -> tuple[Sample, int]:
        lengths = torch.tensor([len(row["ids"]) for row in rows], dtype=torch.int32)
        batch = {key: torch.cat([row[key] for row in rows]) for key in ("ids", "labels")}
        batch["offsets"] = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return batch, int(lengths.max())

    total = 0
    for data, longest in DataLoader(PACKED, batch_sampler=batches, collate_fn=to_batch):
        batch = {key: value.to("cpu") for key, value in data.items()}
        total += packed_model(batch["ids"], batch["labels"], batch["offsets"], longest)
    return total


# --- a service: JSON requests, validated, to JSON answers ---

BODIES = [json.dumps({"x": [0.5 * i, 1, 2, 3.5], "name": f"request {i}"}) for i in range(8)]


class Request(TypedDeviceDict):
    x: Float[Tensor, "batch 4"]
    name: Annotated[Tensor, Utf8()]


def service() -> Any:
    batch = collate([json.loads(body) for body in BODIES], cls=Request)
    with torch.inference_mode():
        score, kind = net(batch.x).max(1)
    answers = DeviceDict({"kind": kind, "score": score}, encoders={"kind": Vocabulary(KINDS)})
    return [json.dumps(answer) for answer in (batch.select("name") | answers).rows.tolist()]


def plain_service() -> Any:
    requests = [json.loads(body) for body in BODIES]
    for i, request in enumerate(requests):
        if request.keys() != {"x", "name"}:
            raise ValueError(f"request {i}: expected x and name, got {sorted(request)}")
        x, name = request["x"], request["name"]
        if not isinstance(x, list) or len(x) != 4 or not all(isinstance(one, (int, float)) for one in x):
            raise ValueError(f"request {i}: x: expected 4 numbers, got {x}")
        if not isinstance(name, str):
            raise ValueError(f"request {i}: name: expected a string, got {name}")
    with torch.inference_mode():
        score, kind = net(torch.tensor([request["x"] for request in requests])).max(1)
    answers = zip(requests, kind.tolist(), score.tolist(), strict=True)
    return [json.dumps({"name": one["name"], "kind": KINDS[k], "score": s}) for one, k, s in answers]


# --- the first NaN: the step, the field, the rows of the dataset ---

READINGS: list[Sample] = [{"x": x, "y": x.sum(), "name": f"row {i}"} for i, x in enumerate(torch.rand(1024, 4))]
READINGS[1000]["x"][3] = float("nan")


def nan() -> Any:
    order = BatchOrder(READINGS, 64)
    for step, batch in enumerate(prefetch(DataLoader(READINGS, batch_sampler=order, collate_fn=collate), "cpu")):
        if not net(batch["x"]).sum().isfinite():
            found = batch.find(torch.isnan)["x"]
            return step, batch.rows[found].decode("name"), [order.batch(step)[i] for i in found]
    return None


def plain_nan() -> Any:
    for step, data in enumerate(DataLoader(READINGS, 64)):
        batch = {key: value.to("cpu") if isinstance(value, Tensor) else value for key, value in data.items()}
        if not net(batch["x"]).sum().isfinite():
            found = batch["x"].isnan().flatten(1).any(1).nonzero().flatten().tolist()
            return step, [batch["name"][i] for i in found], [64 * step + i for i in found]
    return None


def peer_nan() -> Any:
    def to_batch(rows: list[Sample]) -> Any:
        return torch.stack([TensorDict(row) for row in rows])

    for step, data in enumerate(DataLoader(READINGS, 64, collate_fn=to_batch)):
        batch = data.to("cpu")
        if not net(batch["x"]).sum().isfinite():
            found = batch["x"].isnan().flatten(1).any(1).nonzero().flatten().tolist()
            return step, [batch["name"][i] for i in found], [64 * step + i for i in found]
    return None


# --- a mix of three sources in shares, stopped and resumed ---

SOURCES: list[list[Sample]] = [[{"x": torch.ones(16), "source": s}] * n for s, n in enumerate((3000, 1000, 500))]
SHARES = [0.5, 0.25, 0.25]


def mix() -> Any:
    def batches_of(state: Any = None) -> Any:
        orders = [BatchOrder(source, 1, shuffle=True) for source in SOURCES]
        mixed = BatchOrder.mix(orders, weights=SHARES, size=64)
        loader = prefetch(DataLoader(ConcatDataset(SOURCES), batch_sampler=mixed, collate_fn=collate), "cpu")
        if state:
            loader.load_state_dict(state)
        return loader

    seen, loader = torch.zeros(3, dtype=torch.int64), batches_of()
    for batch in islice(loader, 10):
        seen += batch["source"].bincount(minlength=3)
    for batch in islice(batches_of(loader.state_dict()), 10):
        seen += batch["source"].bincount(minlength=3)
    return seen


def plain_mix() -> Any:
    starts = np.cumsum([0, *map(len, SOURCES)]).tolist()

    def rows() -> Iterator[int]:
        shuffled = [torch.randperm(len(one), generator=torch.Generator().manual_seed(0)).tolist() for one in SOURCES]
        drawn = [0, 0, 0]
        while True:
            behind = [share * (sum(drawn) + 1) - count for share, count in zip(SHARES, drawn, strict=True)]
            source = behind.index(max(behind))
            if drawn[source] == len(SOURCES[source]):
                return
            yield starts[source] + shuffled[source][drawn[source]]
            drawn[source] += 1

    def batches_of(done: int) -> Any:
        left = list(rows())[64 * done :]
        batches = [left[i : i + 64] for i in range(0, len(left), 64)]
        return DataLoader(ConcatDataset(SOURCES), batch_sampler=batches)

    seen = torch.zeros(3, dtype=torch.int64)
    for done in (0, 10):
        for data in islice(batches_of(done), 10):
            batch = {key: value.to("cpu") for key, value in data.items()}
            seen += batch["source"].bincount(minlength=3)
    return seen


# --- a look at a large table: its fields, its first rows, statistics, NaN ---


def large() -> Path:
    """A table of 100 MB, and the same as arrays."""
    path = folder() / "large"
    if not path.exists():
        made = {"x": torch.rand(200_000, 128, generator=random), "y": torch.arange(200_000)}
        made["x"][150_000, 7] = float("nan")
        with RowWriter(path, like=DeviceDict(made).rows[:1]) as writer:
            writer.write(made)
        for key, value in made.items():
            np.save(folder() / f"{key}.npy", value.numpy())
    return path


def look() -> Any:
    table = load(large())
    assert str(table) and str(table.rows) and str(table.describe())
    return table.find(torch.isnan)["x"].tolist()


def plain_look() -> Any:
    large()
    for key in ("x", "y"):
        column, bad = np.load(folder() / f"{key}.npy", mmap_mode="r"), list[int]()
        least, most, total, nans, zeros = np.inf, -np.inf, 0.0, 0, 0
        counts = np.zeros(8, int)
        for start in range(0, len(column), 1 << 14):
            chunk = column[start : start + (1 << 14)]
            least, most = min(least, np.nanmin(chunk)), max(most, np.nanmax(chunk))
            total += np.nansum(chunk, dtype=float)
            wrong = np.isnan(chunk).reshape(len(chunk), -1).any(1).nonzero()[0] + start
            bad += wrong.tolist()
            nans += int(np.isnan(chunk).sum())
            zeros += int((chunk == 0).sum())
        for start in range(0, len(column), 1 << 14):
            counts += np.histogram(column[start : start + (1 << 14)], 8, (least, most))[0]
        mean = total / (column.size - nans)
        assert str((key, column.dtype, column.shape, column[:5], least, mean, most, nans, zeros, counts))
        if bad:
            return bad
    return []


TASKS = {
    "images with boxes": "boxes",
    "a rollout for PPO": "rollout",
    "token ids, padded": "padding",
    "moving average, checkpoint, resume": "resume",
    "a table of two ranks, filtered": "parts",
    "texts by tokens, without padding": "tokens",
    "a JSON service": "service",
    "the first NaN": "nan",
    "a mix of three sources, resumed": "mix",
    "a look at a large table": "look",
}


def fastest(timer: Any) -> float:
    """The least processor time of the runs of half a second: other load on the machine only adds to it."""
    end, number = perf_counter() + 0.5, 20 if timer.timeit(1) < 1e-3 else 1
    least = timer.timeit(number)
    while perf_counter() < end:
        least = min(least, timer.timeit(number))
    return least / number


def task_case(operation: str, name: str) -> Case:
    def contender(run: Callable[[], Any]) -> Prepare:
        return lambda _: Run(run, lambda: fastest(Timer(run, timer=process_time)))

    module = sys.modules[__name__]
    named = {DICT: f"plain_{name}", OURS: name, PEER: f"peer_{name}"}
    return Case(operation, name, {who: contender(getattr(module, n)) for who, n in named.items() if hasattr(module, n)})


# --- the recipes: what is one line here, and the same with plain dicts ---

Recipe = tuple[Callable[[], Any], str, str]


def rows_of(count: int) -> Sample:
    return {"x": torch.rand(count, 4), "label": torch.arange(count) % 2, "n": torch.arange(count)}


def weights_of() -> Sample:
    return fresh()[0].state_dict()


RECIPES: dict[str, Recipe] = {
    "Filter rows": (
        lambda: rows_of(10_000),
        'x.rows[x["label"] == 1]',
        '(lambda mask: {key: value[mask] for key, value in x.items()})(x["label"] == 1)',
    ),
    "Sort rows": (
        lambda: rows_of(10_000),
        'x.rows.sort_by("label", descending=True)',
        "(lambda index: {key: value[index] for key, value in x.items()})"
        '(x["label"].argsort(stable=True, descending=True))',
    ),
    "Split into a training set and a test set": (
        lambda: rows_of(100),
        "[x.rows[:80], x.rows[80:]]",
        "[{key: value[part] for key, value in x.items()} for part in (slice(80), slice(80, None))]",
    ),
    "Pad token ids: 32 samples": (
        dict,
        'collate(texts, pad={"ids": 0})',
        '{"ids": torch.nn.utils.rnn.pad_sequence([torch.tensor(one["ids"]) for one in texts], batch_first=True)}',
    ),
    "Pack sequences without padding: 32 samples": (
        dict,
        '(lambda ids: {"ids": ids.values, "offsets": ids.offsets})(collate(texts, ragged=["ids"])["ids"])',
        '(lambda rows: {"ids": torch.cat(rows), "offsets": torch.tensor([0, *map(len, rows)]).cumsum(0).int()})'
        '([torch.tensor(one["ids"]) for one in texts])',
    ),
    "Accumulate gradients: 4 parts": (
        lambda: rows_of(100),
        "x.rows.split(25)",
        "[dict(zip(x, part)) for part in zip(*(value.split(25) for value in x.values()))]",
    ),
    "Collect a rollout: a row": (
        lambda: {key: torch.zeros(64, 16, 4) for key in "abcdef"},
        "x.rows.__setitem__(3, step)",
        "[x[key].__setitem__(3, value) for key, value in step.items()]",
    ),
    "Keep a replay buffer: draw 32 rows": (
        lambda: rows_of(1000),
        "x.rows[rows]",
        "{key: value[rows] for key, value in x.items()}",
    ),
    "Average models: a moving average": (
        weights_of,
        "x.lerp_(other, 0.01)",
        "[value.lerp_(other[key], 0.01) if value.is_floating_point() else value.copy_(other[key])"
        " for key, value in x.items()]",
    ),
    "Average models: a soup of three": (
        weights_of,
        "stack([x, x, x]).map(lambda t: t.float().mean(0).to(t.dtype))",
        "{key: torch.stack([x[key]] * 3).float().mean(0).to(x[key].dtype) for key in x}",
    ),
    "Sum metrics over an epoch: a step": (
        lambda: {"loss": torch.zeros(()), "right": torch.zeros(()), "seen": torch.zeros(())},
        "x.add_({key: one for key in x})",
        "[value.add_(one) for value in x.values()]",
    ),
    "Serve a model: 32 requests": (
        dict,
        'DeviceDict({"score": collate(requests)["x"].sum(1)}).rows.tolist()',
        '[{"score": s} for s in torch.tensor([r["x"] for r in requests]).sum(1).tolist()]',
    ),
    "Decode predictions: 1000": (
        lambda: {"guess": torch.arange(1000) % 3},
        'x.decode("guess")',
        '[KINDS[i] for i in x["guess"].tolist()]',
    ),
}


def recipe_case(operation: str) -> Case:
    make, ours, plain = RECIPES[operation]
    names: Sample = {
        "step": {key: torch.ones(16, 4) for key in "abcdef"},
        "rows": torch.arange(32) * 7,
        "other": weights_of(),
        "one": torch.ones(()),
        "requests": [{"x": [1.0, float(i)]} for i in range(32)],
        "texts": [{"ids": [*range(5 + i)]} for i in range(32)],
        "KINDS": KINDS,
        "DeviceDict": DeviceDict,
        "collate": collate,
        "stack": stack,
    }
    written = "__setitem__" in ours or "_(" in ours  # in place: the result is the dict

    def made() -> Sample:
        torch.manual_seed(0)
        return make()

    encoders: Any = {"guess": Vocabulary(KINDS)} if operation.startswith("Decode") else None

    def contender(code: str, x: Any) -> Prepare:
        known = {"torch": torch, "x": x, **names}
        run: Callable[[], Any] = eval(f"lambda: {code}", known)
        return lambda _: Run(
            lambda: run() is None if written else run(), lambda: fastest(Timer(run, timer=process_time))
        )

    contenders = {DICT: contender(plain, made()), OURS: contender(ours, DeviceDict(made(), encoders=encoders))}
    return Case(operation, "recipe", contenders, equal=lambda a, b: written or same(a, b))


def cases() -> list[Case]:
    return [*(task_case(*named) for named in TASKS.items()), *map(recipe_case, RECIPES)]


if __name__ == "__main__":
    main(__doc__, cases, ["tensordict", "jaxtyping"])
