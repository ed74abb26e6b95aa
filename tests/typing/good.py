"""What type checkers must know of DeviceDict and TypedDeviceDict. Checked, and never run: see test_typing.py."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import assert_type

from tensordict_lite import DeviceDict, TypedDeviceDict, Vocabulary, cat, collate, field, prefetch, stack


class Obs(TypedDeviceDict):
    state: Float[Tensor, "batch n"]


class Batch(TypedDeviceDict, encoders={"name": Vocabulary(["a"])}, on_mismatch="move"):
    image: Float[Tensor, "batch 3 h w"]
    label: Int[Tensor, "batch"]
    obs: Obs
    weight: Tensor | None = None

    def total(self) -> Tensor:
        return self.image.sum() + self.obs.state.sum()


class More(Batch):
    extra: Tensor


class Scaled(TypedDeviceDict):
    x: Float[Tensor, "n"]
    scale: Tensor = field(default=1.0)
    mean: Tensor = field(default_factory=lambda: torch.zeros(3))


class Sample(TypedDeviceDict, objects="keep"):
    image: Tensor
    split: str
    size: tuple[int, int]
    hidden: tuple[Tensor, ...]
    path: Path | None = None


x = torch.zeros(1)
sample = Sample(image=x, split="train", size=(480, 640), hidden=(x, x))
assert_type(sample.split, str)
assert_type(sample.size, tuple[int, int])
assert_type(sample.hidden, tuple[Tensor, ...])
assert_type(sample.path, "Path | None")
assert_type(sample.to("cuda").hidden[0], Tensor)
assert_type(sample.to_("cuda"), Sample)
assert_type(sample.to_(torch.float16, copy=True), Sample)
assert_type(sample.to_(x), Sample)
batch = Batch(image=x, label=x, obs=Obs(state=x))
Batch(image=x, label=x, obs=Obs(state=x), weight=None, device="cuda", dtype=torch.float16)
Batch(image=x, label=x, obs=Obs(state=x), weight=x, device=torch.device("cpu"), on_mismatch="error", objects="keep")
Batch(image=x, label=x, obs=Obs(state=x), device=0, encoders={"name": Vocabulary(["b"])})
more = More(image=x, label=x, obs=Obs(state=x), extra=x)
assert_type(Batch.from_dict({"image": x}, device="cuda", dtype=torch.float16), Batch)
assert_type(More.from_dict([("image", x)]), More)

assert_type(Scaled(x=x).scale, Tensor)
assert_type(Scaled(x=x, scale=x, mean=x, device="cuda"), Scaled)
assert_type(Scaled.wrap(DeviceDict({"x": x})), Scaled)

assert_type(batch.image, Tensor)
assert_type(batch.obs, Obs)
assert_type(batch.obs.state, Tensor)
assert_type(batch.weight, "Tensor | None")
assert_type(batch.device, "torch.device | None")
assert_type(batch["image"], Tensor)
assert_type(batch["obs", "state"], Tensor)
assert_type(batch.total(), Tensor)
assert_type(more.extra, Tensor)
assert_type(batch.decode("name"), Any)
assert_type(len(batch.encoders), int)

assert_type(batch.to("cuda"), Batch)
assert_type(batch.to(torch.float16), Batch)
assert_type(batch.to(x), Batch)
assert_type(batch.to(device="cuda", non_blocking=True), Batch)
assert_type(batch.cpu(), Batch)
assert_type(batch.cuda(), Batch)
assert_type(batch.clone(), Batch)
assert_type(batch.detach(), Batch)
assert_type(batch.half(), Batch)
assert_type(batch.pack(), Batch)
assert_type(batch.copy(), Batch)
assert_type(batch.pin_memory(), Batch)
assert_type(batch.rows[0], Batch)
assert_type(batch.rows[0:2], Batch)
assert_type(batch.rows[x > 0], Batch)
assert_type(batch.rows.split(2), "list[Batch]")
assert_type(next(iter(batch.rows)), Batch)
assert_type(batch | {"weight": x}, Batch)
assert_type(more.to("cuda").rows[0].cpu(), More)
assert_type(batch.map(torch.sum), Batch)
assert_type(batch.map(torch.add, batch), Batch)
assert_type(batch.map(torch.lerp, {"image": x}, more), Batch)
assert_type(batch.add_(batch, alpha=2).mul_(0.5).sub_(x).div_(2), Batch)
assert_type(batch.lerp_({"image": x}, 0.01).copy_(batch).zero_(), Batch)
assert_type(batch.total_norm(2.0), Tensor)
assert_type(batch.tolist(), dict[str, Any])
assert_type(batch.select("image"), "DeviceDict[Tensor]")
assert_type(batch.drop("label"), "DeviceDict[Tensor]")
assert_type(collate([{"image": x}], cls=Batch), Batch)
tokens: DeviceDict[Any] = collate([{"ids": [1]}], ragged=["ids"])  # its fields are not tensors
assert_type(tokens["ids"].max_length, Any)

batch.image = x
batch.obs = Obs(state=x)
batch.weight = None
del batch.weight
batch["image"] = x
batch.update(image=x)


def model(**tensors: Tensor) -> Tensor:
    return tensors["image"]


def step(inputs: dict[str, Tensor]) -> Tensor:
    return inputs["image"]


model(**batch)
step(batch)
for key, value in batch.items():
    assert_type(key, str)
    assert_type(value, Tensor)

d = DeviceDict({"x": x})
assert_type(d["x"], Tensor)
assert_type(d.to("cuda").rows[1:], "DeviceDict[Tensor]")
samples: Any = [{"image": x}]
loader: DataLoader[Any] = DataLoader(samples, collate_fn=partial(collate, cls=Batch))
for loaded in prefetch(loader, "cuda"):
    print(loaded)
stack([batch, batch])
cat([d, d])
