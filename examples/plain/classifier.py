"""The parts of `classifier.py` that differ with plain dicts."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from classifier import TEXTURES, Boxes
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

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


@torch.no_grad()
def evaluate(model: nn.Module, count: int, device: torch.device) -> dict[str, Any]:
    samples = Boxes(1_000_000, count)
    batch = to_device(collate_boxes([samples[i] for i in range(count)]), device)
    answers = {key: batch[key] for key in ("id", "texture", "n_boxes")}
    answers["predicted"] = predict(model, batch).argmax(dim=1)
    return answers


def group_by_count(answers: dict[str, Any]) -> dict[int, dict[str, Tensor]]:
    groups: dict[int, list[int]] = defaultdict(list)
    for row, count in enumerate(answers["n_boxes"].tolist()):
        groups[count].append(row)
    return {
        count: {key: answers[key][rows] for key in ("predicted", "texture")} for count, rows in sorted(groups.items())
    }
