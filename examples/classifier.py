"""Train an image classifier on samples with a ragged list of boxes, in mixed precision.

    python examples/classifier.py [--epochs 3] [--workers 2] [--device cpu]

Each generated image has one to five boxes, and all boxes of an image have one texture. The network looks at the boxes
alone. `collate` pads the boxes, counts them and marks the real ones. Workers make the batches; `prefetch` moves them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from tensordict_lite import DeviceDict, Pad, Vocabulary, collate, prefetch

TEXTURES = ["checked", "horizontal", "vertical"]
REQUIRED_ACCURACY = 0.9
collate_boxes = partial(
    collate,
    pad={"box": Pad(0.0, lengths="n_boxes", mask="is_box")},
    encoders={"texture": Vocabulary(TEXTURES)},
)


class Boxes(Dataset[dict[str, object]]):
    """Noise of 3 x 32 x 32 pixels, with textured boxes (left, top, right, bottom)."""

    def __init__(self, first: int, count: int) -> None:
        self.seeds = range(first, first + count)

    def __len__(self) -> int:
        return len(self.seeds)

    def __getitem__(self, index: int) -> dict[str, object]:
        generator = torch.Generator().manual_seed(self.seeds[index])
        image = torch.rand(3, 32, 32, generator=generator)
        texture = int(torch.randint(3, (), generator=generator))
        count = int(torch.randint(1, 6, (), generator=generator))
        corner = torch.randint(0, 20, (count, 2), generator=generator)
        size = torch.randint(8, 13, (count, 2), generator=generator)
        box = torch.cat([corner, corner + size], dim=1)
        y, x = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
        pattern = [(x + y) % 2, y % 2, x % 2][texture]
        for left, top, right, bottom in box.tolist():
            image[:, top:bottom, left:right] *= 0.7
            image[:, top:bottom, left:right] += 0.3 * pattern[top:bottom, left:right]
        return {"image": image.mul(255).byte(), "box": box.float(), "texture": TEXTURES[texture], "id": f"img_{index}"}


class Classifier(nn.Module):
    """Cuts 8 x 8 pixels out of each box, and averages the features of the boxes of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.AvgPool2d(4))
        self.answer = nn.Linear(32, len(TEXTURES))

    def forward(self, image: Tensor, box: Tensor, is_box: Tensor, n_boxes: Tensor) -> Tensor:
        of_image = is_box.nonzero()[:, 0]  # the image of each real box
        middle = (box[is_box][:, :2] + box[is_box][:, 2:]) / 2
        offsets = torch.arange(-4, 4, device=box.device)
        x = (middle[:, 0].long()[:, None] + offsets)[:, None, :]
        y = (middle[:, 1].long()[:, None] + offsets)[:, :, None]
        crops = image[of_image[:, None, None], :, y, x].permute(0, 3, 1, 2).float() / 255 - 0.5
        features = self.features(crops).flatten(1)
        summed = features.new_zeros(len(image), 32).index_add(0, of_image, features)
        return self.answer(summed / n_boxes[:, None])


def predict(model: nn.Module, batch: DeviceDict) -> Tensor:
    with torch.autocast(batch["image"].device.type, dtype=torch.bfloat16):
        return model(**batch.select("image", "box", "is_box", "n_boxes"))


def train(model: nn.Module, count: int, epochs: int, workers: int, device: torch.device) -> list[float]:
    """Train ``model``. Returns the mean loss of each epoch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    loader = DataLoader(Boxes(0, count), batch_size=32, shuffle=True, num_workers=workers, collate_fn=collate_boxes)
    losses: list[float] = []
    for epoch in range(epochs):
        total = 0.0
        for batch in prefetch(loader, device):
            loss = F.cross_entropy(predict(model, batch).float(), batch["texture"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch.rows)
        losses.append(total / count)
        print(f"epoch {epoch + 1}: loss {losses[-1]:.3f}")
    return losses


@torch.no_grad()
def evaluate(model: nn.Module, count: int, device: torch.device) -> DeviceDict:
    """The answers to new images, as one dict."""
    samples = Boxes(1_000_000, count)
    batch = collate_boxes([samples[i] for i in range(count)]).to(device)
    predicted = predict(model, batch).argmax(dim=1)
    encoders = {"predicted": batch.encoders["texture"]}  # so that the predictions read as names too
    return batch.select("id", "texture", "n_boxes") | DeviceDict({"predicted": predicted}, encoders=encoders)


def report(answers: DeviceDict) -> float:
    """Print some answers, and how many are right. Returns the accuracy."""
    for row in answers.rows[:3].rows:
        print(
            f"{row.decode('id')}: {row['n_boxes']} boxes, {row.decode('texture')}, predicted {row.decode('predicted')}"
        )
    for count, group in answers.rows.group_by("n_boxes").items():
        right = group["predicted"] == group["texture"]
        print(f"images with {count} boxes: {right.sum()} of {len(right)} right")
    return (answers["predicted"] == answers["texture"]).float().mean().item()


def run(images: int, epochs: int, workers: int, device: torch.device) -> tuple[list[float], float]:
    """Run the program. Returns the losses of training, and the accuracy on new images."""
    print(collate_boxes([Boxes(0, 3)[i] for i in range(3)]))
    torch.manual_seed(0)
    model = Classifier().to(device)
    losses = train(model, images, epochs, workers, device)
    return losses, report(evaluate(model, 200, device))


def main(run: Callable[..., tuple[list[float], float]] = run) -> None:
    parser = argparse.ArgumentParser(description="Classify images by the texture of their boxes.")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    options = parser.parse_args()

    _, accuracy = run(**vars(options))
    print(f"held-out accuracy {accuracy:.3f}")
    if accuracy < REQUIRED_ACCURACY:
        sys.exit(f"held-out accuracy {accuracy:.3f} is under the required {REQUIRED_ACCURACY}")


if __name__ == "__main__":
    main()
