"""Fine-tune a tiny Hugging Face language model: dynamic padding, then `generate`.

    python examples/finetune.py [--epochs 30] [--device cpu]

The model is a GPT-2 of one layer, made from a config: nothing is downloaded. It learns which sound an animal makes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from tensordict_lite import DeviceDict, Pad, collate, prefetch

SOUNDS = {
    "the cat": "says meow",
    "the small dog": "says woof",
    "the cow": "says moo moo",
    "a duck": "says quack quack",
    "a very old horse": "says neigh",
    "an owl in the night": "says hoo hoo",
}
PAD, END = 0, 1
WORDS = ["<pad>", "<end>", *sorted({word for pair in SOUNDS.items() for text in pair for word in text.split()})]
CODES = {word: code for code, word in enumerate(WORDS)}
IGNORED = -100  # transformers computes no loss at these labels

# For training, the tokens end with padding. For `generate`, they begin with it.
collate_training = partial(
    collate, pad={"input_ids": Pad(PAD, multiple_of=4, mask="attention_mask"), "labels": Pad(IGNORED, multiple_of=4)}
)
collate_prompts = partial(collate, pad={"input_ids": Pad(PAD, side="left", mask="attention_mask")})


def encode(text: str) -> list[int]:
    return [CODES[word] for word in text.split()]


def decode(ids: list[int]) -> str:
    return " ".join(WORDS[i] for i in ids if i not in (PAD, END))


def training_samples() -> list[DeviceDict]:
    """Prompt and answer in one sequence. The loss counts the answer alone."""
    samples = []
    for prompt, answer in SOUNDS.items():
        asked, wanted = encode(prompt), [*encode(answer), END]
        samples.append(DeviceDict({"input_ids": asked + wanted, "labels": [IGNORED] * len(asked) + wanted}))
    return samples


def make_model() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=len(WORDS), n_positions=32, n_embd=32, n_layer=1, n_head=2,
        pad_token_id=PAD, eos_token_id=END, bos_token_id=END,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def train(model: GPT2LMHeadModel, epochs: int, device: torch.device) -> list[float]:
    """Train ``model``. Returns the loss at the end of each epoch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(training_samples(), batch_size=3, shuffle=True, collate_fn=collate_training)
    model.train()
    losses: list[float] = []
    for epoch in range(epochs):
        for batch in prefetch(loader, device):
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
        if (epoch + 1) % 10 == 0:
            print(f"epoch {epoch + 1}: loss {losses[-1]:.3f}")
    return losses


def answer(model: GPT2LMHeadModel, prompts: list[str], device: torch.device) -> list[str]:
    """What the model says to all prompts, as one batch."""
    model.eval()
    batch = collate_prompts([{"input_ids": encode(prompt)} for prompt in prompts]).to(device)
    tokens = model.generate(**batch, max_new_tokens=6, do_sample=False)
    return [decode(ids) for ids in tokens[:, batch["input_ids"].shape[1] :].tolist()]


def run(epochs: int, device: torch.device) -> tuple[list[float], list[str]]:
    """Run the program. Returns the losses of training, and the answer to each prompt."""
    print(collate_training(training_samples()[:2]))
    print(collate_prompts([{"input_ids": encode(prompt)} for prompt in SOUNDS]))
    torch.manual_seed(0)
    model = make_model().to(device)
    return train(model, epochs, device), answer(model, list(SOUNDS), device)


def main(run: Callable[..., tuple[list[float], list[str]]] = run) -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a tiny language model.")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    options = parser.parse_args()

    _, answers = run(**vars(options))
    for prompt, said in zip(SOUNDS, answers, strict=True):
        print(f"{prompt} -> {said}")
    right = sum(wanted == said for wanted, said in zip(SOUNDS.values(), answers, strict=True))
    print(f"{right} of {len(SOUNDS)} right")
    if right < len(SOUNDS):
        sys.exit("the model has not learnt all answers")


if __name__ == "__main__":
    main()
