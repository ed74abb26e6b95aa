"""The same program as `packed.py`, with plain dicts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch
from packed import Model, Result, attend_padded, main, make_samples
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

Batch = dict[str, Any]


def as_bytes(texts: list[str]) -> Tensor:
    return torch.frombuffer(bytearray("".join(texts).encode()), dtype=torch.uint8)


def collate_texts(samples: list[dict[str, str]]) -> Batch:
    lengths = [len(sample["ids"].encode()) for sample in samples]
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    offsets[1:] = torch.tensor(lengths).cumsum(0)
    return {
        "ids": as_bytes([sample["ids"] for sample in samples]),
        "labels": as_bytes([sample["labels"] for sample in samples]),
        "offsets": offsets,
        "lengths": lengths,
        "longest": max(lengths),
    }


def to_device(batch: Batch, device: torch.device) -> Batch:
    return {
        key: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value for key, value in batch.items()
    }


def positions_of(batch: Batch) -> Tensor:
    offsets, everything = batch["offsets"], torch.arange(len(batch["ids"]), device=batch["ids"].device)
    lengths = offsets[1:] - offsets[:-1]
    return everything - torch.repeat_interleave(offsets[:-1], lengths, output_size=len(everything))


def attend_packed(batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.is_cuda:
        offsets, longest, half = batch["offsets"], batch["longest"], [x.bfloat16() for x in (q, k, v)]
        return varlen_attn(*half, offsets, offsets, longest, longest, window_size=(-1, 0)).to(q.dtype)
    parts = (x.split(batch["lengths"]) for x in (q, k, v))
    return torch.cat([attend_padded(*row) for row in zip(*parts, strict=True)])


def hidden_packed(model: Model, batch: Batch) -> Tensor:
    return model(batch["ids"].long(), positions_of(batch), partial(attend_packed, batch))


def loss_packed(model: Model, batch: Batch) -> Tensor:
    return cross_entropy(model.head(hidden_packed(model, batch)), batch["labels"].long())


def loss_padded(model: Model, batch: Batch) -> Tensor:
    ids = pad_sequence(batch["ids"].long().split(batch["lengths"]), batch_first=True)
    labels = pad_sequence(batch["labels"].long().split(batch["lengths"]), batch_first=True, padding_value=-100)
    hidden = model(ids, torch.arange(ids.shape[1], device=ids.device), attend_padded)
    return cross_entropy(model.head(hidden).flatten(0, 1), labels.flatten())


def train(model: Model, loss_of: Callable[..., Tensor], epochs: int, device: torch.device) -> tuple[list[float], float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(
        make_samples(64, 0), batch_size=16, shuffle=True, collate_fn=collate_texts, pin_memory=device.type != "cpu"
    )
    losses, seen, start = [], 0, perf_counter()
    for _ in range(epochs):
        for batch in loader:
            loss = loss_of(model, to_device(batch, device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            seen += len(batch["ids"])
    return losses, seen / (perf_counter() - start)


def embed(model: Model, batch: Batch) -> tuple[list[Tensor], Tensor]:
    with torch.no_grad():
        hidden = hidden_packed(model, batch).cpu()
    means = torch.segment_reduce(hidden, "mean", lengths=torch.tensor(batch["lengths"]))
    return list(hidden.split(batch["lengths"])), means


def run(epochs: int, device: torch.device) -> Result:
    torch.set_num_threads(1)
    losses: dict[str, list[float]] = {}
    for name, loss_of in {"padded": loss_padded, "packed": loss_packed}.items():
        torch.manual_seed(0)
        model = Model().to(device)
        losses[name], speed = train(model, loss_of, epochs, device)
        print(f"{name}: loss {losses[name][0]:.3f} to {losses[name][-1]:.3f}, {speed:,.0f} tokens a second")
    samples = make_samples(4, 1)
    vectors, means = embed(model, to_device(collate_texts(samples), device))
    for sample, rows, mean in zip(samples, vectors, means, strict=True):
        print(f"{len(rows)} vectors, their mean has {len(mean)} numbers: {sample['ids'][:40]}")
    return losses, [rows.tolist() for rows in [*vectors, means]]


if __name__ == "__main__":
    main(run)
