"""The parts of `finetune.py` that differ with plain dicts."""

from __future__ import annotations

import torch
from finetune import IGNORED, PAD
from torch import Tensor


def fill(rows: list[list[int]], value: int, multiple_of: int = 1, left: bool = False) -> Tensor:
    length = -(-max(map(len, rows)) // multiple_of) * multiple_of
    gaps = [[value] * (length - len(row)) for row in rows]
    return torch.tensor([gap + row if left else row + gap for row, gap in zip(rows, gaps, strict=True)])


def collate_training(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    ids = [sample["input_ids"] for sample in samples]
    return {
        "input_ids": fill(ids, PAD, 4),
        "attention_mask": fill([[1] * len(row) for row in ids], 0, 4).bool(),
        "labels": fill([sample["labels"] for sample in samples], IGNORED, 4),
    }


def collate_prompts(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    ids = [sample["input_ids"] for sample in samples]
    mask = fill([[1] * len(row) for row in ids], 0, left=True).bool()
    return {"input_ids": fill(ids, PAD, left=True), "attention_mask": mask}


def to_device(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {key: value.to(device, non_blocking=True) for key, value in batch.items()}
