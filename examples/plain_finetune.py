"""The same program as `finetune.py`, with plain dicts."""

from __future__ import annotations

import torch
from finetune import END, IGNORED, PAD, SOUNDS, decode, encode, main, make_model
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2LMHeadModel


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


def training_samples() -> list[dict[str, list[int]]]:
    samples = []
    for prompt, answer in SOUNDS.items():
        asked, wanted = encode(prompt), [*encode(answer), END]
        samples.append({"input_ids": asked + wanted, "labels": [IGNORED] * len(asked) + wanted})
    return samples


def train(model: GPT2LMHeadModel, epochs: int, device: torch.device) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(
        training_samples(), batch_size=3, shuffle=True, collate_fn=collate_training, pin_memory=device.type != "cpu"
    )
    model.train()
    losses: list[float] = []
    for epoch in range(epochs):
        for batch in loader:
            loss = model(**to_device(batch, device)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
        if (epoch + 1) % 10 == 0:
            print(f"epoch {epoch + 1}: loss {losses[-1]:.3f}")
    return losses


def answer(model: GPT2LMHeadModel, prompts: list[str], device: torch.device) -> list[str]:
    model.eval()
    batch = to_device(collate_prompts([{"input_ids": encode(prompt)} for prompt in prompts]), device)
    tokens = model.generate(**batch, max_new_tokens=6, do_sample=False)
    return [decode(ids) for ids in tokens[:, batch["input_ids"].shape[1] :].tolist()]


def run(epochs: int, device: torch.device) -> tuple[list[float], list[str]]:
    torch.manual_seed(0)
    model = make_model().to(device)
    return train(model, epochs, device), answer(model, list(SOUNDS), device)


if __name__ == "__main__":
    main(run)
