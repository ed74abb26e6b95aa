"""The same program as `classifier.py`, with plain dicts."""

from __future__ import annotations

from typing import Any

import torch
from classifier import TEXTURES, Boxes, Classifier, main
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

CODES = {name: code for code, name in enumerate(TEXTURES)}


def collate_boxes(samples: list[dict[str, Any]]) -> dict[str, Any]:
    n_boxes = torch.tensor([len(sample["box"]) for sample in samples])
    box = pad_sequence([sample["box"] for sample in samples], batch_first=True)
    return {
        "image": torch.stack([sample["image"] for sample in samples]),
        "box": box,
        "n_boxes": n_boxes,
        "is_box": torch.arange(box.shape[1]) < n_boxes[:, None],
        "texture": torch.tensor([CODES[sample["texture"]] for sample in samples]),
        "id": [sample["id"] for sample in samples],
    }


def to_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {
        key: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value for key, value in batch.items()
    }


def predict(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    with torch.autocast(batch["image"].device.type, dtype=torch.bfloat16):
        return model(**{key: batch[key] for key in ("image", "box", "is_box", "n_boxes")})


def train(model: nn.Module, count: int, epochs: int, workers: int, device: torch.device) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    pin = device.type != "cpu"
    loader = DataLoader(
        Boxes(0, count), batch_size=32, shuffle=True, num_workers=workers, collate_fn=collate_boxes, pin_memory=pin
    )
    losses: list[float] = []
    for epoch in range(epochs):
        total = 0.0
        for host_batch in loader:
            batch = to_device(host_batch, device)
            loss = F.cross_entropy(predict(model, batch).float(), batch["texture"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch["image"])
        losses.append(total / count)
        print(f"epoch {epoch + 1}: loss {losses[-1]:.3f}")
    return losses


@torch.no_grad()
def evaluate(model: nn.Module, count: int, device: torch.device) -> dict[str, Any]:
    samples = Boxes(1_000_000, count)
    batch = to_device(collate_boxes([samples[i] for i in range(count)]), device)
    answers = {key: batch[key] for key in ("id", "texture", "n_boxes")}
    answers["predicted"] = predict(model, batch).argmax(dim=1)
    return answers


def group_by_count(answers: dict[str, Any]) -> dict[int, dict[str, Tensor]]:
    order = answers["n_boxes"].argsort(stable=True)
    counts, sizes = answers["n_boxes"].unique(return_counts=True)
    groups = zip(*(answers[key][order].split(sizes.tolist()) for key in ("predicted", "texture")), strict=True)
    return {
        count: {"predicted": predicted, "texture": texture}
        for count, (predicted, texture) in zip(counts.tolist(), groups, strict=True)
    }


def report(answers: dict[str, Any]) -> float:
    for i in range(3):
        texture, predicted = TEXTURES[answers["texture"][i]], TEXTURES[answers["predicted"][i]]
        print(f"{answers['id'][i]}: {answers['n_boxes'][i]} boxes, {texture}, predicted {predicted}")
    for count, group in group_by_count(answers).items():
        right = group["predicted"] == group["texture"]
        print(f"images with {count} boxes: {right.sum()} of {len(right)} right")
    return (answers["predicted"] == answers["texture"]).float().mean().item()


def run(images: int, epochs: int, workers: int, device: torch.device) -> tuple[list[float], float]:
    torch.manual_seed(0)
    model = Classifier().to(device)
    losses = train(model, images, epochs, workers, device)
    return losses, report(evaluate(model, 200, device))


if __name__ == "__main__":
    main(run)
