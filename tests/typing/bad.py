"""What type checkers must refuse: the lines that end in ``# error``. Checked, and never run: see test_typing.py."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from tensordict_lite import DeviceDict, TypedDeviceDict, field


class Obs(TypedDeviceDict):
    state: Float[Tensor, "batch n"]


class Batch(TypedDeviceDict):
    image: Float[Tensor, "batch 3 h w"]
    obs: Obs
    weight: Tensor | None = None


class Scaled(TypedDeviceDict):
    x: Tensor
    scale: Tensor = field(default=1.0)


class Sample(TypedDeviceDict, objects="keep"):
    split: str
    hidden: tuple[Tensor, ...]


x = torch.zeros(1)
Sample(split=3, hidden=(x,))  # error
Sample(split="train", hidden=[x])  # error
Sample(split="train", hidden=(x,)).split.sum()  # error
obs = Obs(state=x)
batch = Batch(image=x, obs=obs)
Batch(image=x)  # error
Batch()  # error
Batch(image=x, obs=obs, wieght=x)  # error
Batch(image=3, obs=obs)  # error
Batch(image=None, obs=obs)  # error
Batch(image=x, obs=x)  # error
Batch(x, obs)  # error
Batch(image=x, obs=obs, device=3.5)  # error
Batch(image=x, obs=obs, on_mismatch="shove")  # error
Batch.from_dict({"image": x}, divice="cuda")  # error
print(batch.imge)  # error
print(batch.obs.stat)  # error
print(batch.dtype)  # error
print(batch.weight.shape)  # error
batch.device = "cuda"  # error
batch.image = "a"  # error
batch.image = None  # error
batch.imge = x  # error
batch.to(3.5)  # error
batch.to("cuda", non_blokking=True)  # error
batch.cpu("cuda")  # error
batch.rows[0].imge.sum()  # error
d = DeviceDict({"x": x})
print(d.x)  # error
d.to(3.5)  # error
d.to_(3.5)  # error
d.to_("cuda", blocking=True)  # error
DeviceDict({"x": x}, "cpu")  # error
Scaled(scale=x)  # error
Scaled(x=x, scal=x)  # error
Scaled.wrap({"x": x})  # error
field(defualt=1)  # error
d.map(torch.add, 1)  # error
d.add_("a")  # error
d.lerp_(d)  # error
d.lerp_(d, "a")  # error
d + 1  # error
1 + d  # error
