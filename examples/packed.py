"""Train a small language model on texts of any length: packed, without padding, and padded, for comparison.

    python examples/packed.py [--epochs 4] [--device cpu]

The texts count: "three four five". The model predicts the next byte. Packed, it computes the bytes of the texts alone.
Padded, it computes as many bytes for each text as the longest text has. Both give the same losses.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader

from tensordict_lite import DeviceDict, Ragged, collate, prefetch

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
WIDTH, HEADS, LONGEST = 64, 4, 300
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # queries, keys and values: [..., heads, size]
Result = tuple[dict[str, list[float]], list[Any]]

collate_texts = partial(collate, ragged=["ids", "labels"])


def make_samples(count: int, seed: int) -> list[dict[str, str]]:
    """Texts, most of them short, and the byte that follows each byte. `collate` encodes strings as bytes."""
    draw = random.Random(seed)
    spans = [(draw.randrange(13), min(50, 2 + int(draw.expovariate(1 / 8)))) for _ in range(count)]
    texts = [" ".join(NUMBERS[(first + i) % 13] for i in range(words)) for first, words in spans]
    return [{"ids": text[:-1], "labels": text[1:]} for text in texts]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        x = x + self.out(attend(q, k, v).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """A transformer for ids of any shape. The attention alone knows which of them form a row."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.block, self.head = Block(), nn.Linear(WIDTH, 256)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        return self.block(self.tokens(ids) + self.places(positions), attend)


def attend_padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of padded rows. Padding on the right needs no mask, as no value looks ahead."""
    heads = [x.transpose(-3, -2) for x in (q, k, v)]
    return scaled_dot_product_attention(*heads, is_causal=True).transpose(-3, -2)


def attend_packed(rows: Ragged, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention inside each row: one kernel for all rows on CUDA, a call for each row elsewhere."""
    if q.is_cuda:
        offsets, longest, half = rows.offsets, rows.max_length, [x.bfloat16() for x in (q, k, v)]
        return varlen_attn(*half, offsets, offsets, longest, longest, window_size=(-1, 0)).to(q.dtype)
    parts = (rows.with_values(x).unbind() for x in (q, k, v))
    return torch.cat([attend_padded(*row) for row in zip(*parts, strict=True)])


def hidden_packed(model: Model, ids: Ragged) -> Ragged:
    """What the model computes for each byte, with the rows of ``ids``."""
    return ids.with_values(model(ids.values.long(), ids.positions(), partial(attend_packed, ids)))


def loss_packed(model: Model, batch: DeviceDict[Any]) -> Tensor:
    return cross_entropy(model.head(hidden_packed(model, batch["ids"]).values), batch["labels"].values.long())


def loss_padded(model: Model, batch: DeviceDict[Any]) -> Tensor:
    ids, labels = batch["ids"].padded().long(), batch["labels"].with_values(batch["labels"].values.long())
    hidden = model(ids, torch.arange(ids.shape[1], device=ids.device), attend_padded)
    return cross_entropy(model.head(hidden).flatten(0, 1), labels.padded(-100).flatten())  # -100: no loss


def train(model: Model, loss_of: Callable[..., Tensor], epochs: int, device: torch.device) -> tuple[list[float], float]:
    """Train ``model``. Returns the losses, and the number of bytes a second."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(make_samples(64, 0), batch_size=16, shuffle=True, collate_fn=collate_texts)
    losses, seen, start = [], 0, perf_counter()
    for _ in range(epochs):
        for batch in prefetch(loader, device):
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            seen += len(batch["ids"].values)
    return losses, seen / (perf_counter() - start)


def embed(model: Model, ids: Ragged) -> tuple[list[Tensor], Tensor]:
    """The vectors of each text, one for each byte, and their mean: [texts, width]."""
    with torch.no_grad():
        hidden = hidden_packed(model, ids).cpu()
    return hidden.unbind(), torch.segment_reduce(hidden.values, "mean", lengths=hidden.lengths)


def run(epochs: int, device: torch.device) -> Result:
    """Run the program. Returns the losses of both ways, and the vectors of some texts."""
    torch.set_num_threads(1)  # the tensors are small
    losses: dict[str, list[float]] = {}
    for name, loss_of in {"padded": loss_padded, "packed": loss_packed}.items():
        torch.manual_seed(0)
        model = Model().to(device)
        losses[name], speed = train(model, loss_of, epochs, device)
        print(f"{name}: loss {losses[name][0]:.3f} to {losses[name][-1]:.3f}, {speed:,.0f} tokens a second")
    batch = collate_texts(make_samples(4, 1)).to(device)
    vectors, means = embed(model, batch["ids"])
    for text, rows, mean in zip(batch.decode("ids"), vectors, means, strict=True):
        print(f"{len(rows)} vectors, their mean has {len(mean)} numbers: {text[:40]}")
    return losses, [rows.tolist() for rows in [*vectors, means]]


def main(run: Callable[..., Result] = run) -> None:
    parser = argparse.ArgumentParser(description="Train a language model on packed texts.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    options = parser.parse_args()

    losses, _ = run(**vars(options))
    rtol = 1e-3 if options.device.type == "cpu" else 0.1  # the kernel of CUDA computes in bfloat16
    assert torch.allclose(*map(torch.tensor, losses.values()), rtol=rtol), losses
    print("the same losses, packed and padded")


if __name__ == "__main__":
    main()
