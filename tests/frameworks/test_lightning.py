"""Lightning: a Trainer that fits, validates and predicts with DeviceDict batches, and the functions that move them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checks import check_invariants
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tensordict_lite import DeviceDict, Ragged, TypedDeviceDict, collate

pytest.importorskip("lightning")
import lightning
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.fabric.utilities.load import _lazy_load, _materialize_tensors
from lightning_utilities.core.apply_func import apply_to_collection


class Typed(TypedDeviceDict):
    x: Tensor
    y: Tensor


class Module(lightning.LightningModule):
    def __init__(self, cls: type[Any]) -> None:
        super().__init__()
        self.layer, self.cls = nn.Linear(2, 1), cls
        self.seen = 0

    def training_step(self, batch: Any, index: int) -> DeviceDict:
        assert type(batch) is self.cls
        check_invariants(batch)
        self.seen += len(batch.rows)
        loss = (self.layer(batch["x"]).squeeze(1) - batch["y"]).square().mean()
        self.log("loss", loss, batch_size=len(batch.rows))
        return DeviceDict({"loss": loss, "out": {"y": batch["y"]}})

    def validation_step(self, batch: Any, index: int) -> None:
        assert type(batch) is self.cls

    def predict_step(self, batch: Any, index: int) -> DeviceDict:
        return DeviceDict({"y": self.layer(batch["x"])})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize("cls", [DeviceDict, Typed])
def test_a_trainer(cls: type[Any], tmp_path: Path) -> None:
    samples: Any = [cls({"x": torch.rand(2), "y": torch.rand(())}) for _ in range(8)]
    loader: Any = DataLoader(samples, batch_size=2, num_workers=1)
    module = Module(cls)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, loader, DataLoader(samples, batch_size=4, collate_fn=collate))
    assert module.seen == 16
    ((first, *_),) = (trainer.predict(module, loader),)
    assert type(first) is DeviceDict and first["y"].shape == (2, 1)


def test_moving() -> None:
    d = DeviceDict({"x": torch.ones(2), "n": {"y": 1}})
    moved = move_data_to_device(d, torch.device("meta"))
    assert type(moved) is DeviceDict and moved.device == torch.device("meta")
    assert move_data_to_device([d], torch.device("cpu"))[0] is d
    applied: Any = apply_to_collection(d, Tensor, lambda t: t + 1)
    check_invariants(applied)
    assert type(applied) is DeviceDict and applied["n", "y"] == 2
    floats: Any = apply_to_collection(d, Tensor, lambda t: float(t.sum()))
    assert type(floats) is DeviceDict and floats["x"] == 2


def test_ragged_fields() -> None:
    """`apply_to_collection` copies a dataclass, and sets its fields."""
    field = Ragged.from_rows([[1.0, 2.0], [], [3.0]])
    for given in (field, DeviceDict({"r": field})):
        applied: Any = apply_to_collection(given, Tensor, lambda t: t * 1)
        out = applied["r"] if isinstance(applied, dict) else applied
        assert type(applied) is type(given) and applied == given and out.max_length == 2
        assert out.values is not field.values and field.offsets is not out.offsets
    meta: Any = apply_to_collection([field], Tensor, lambda t: t.to("meta"))
    assert meta[0].device == torch.device("meta") and field.device == torch.device("cpu")
    moved: Any = move_data_to_device({"r": field}, torch.device("meta"))["r"]
    assert type(moved) is Ragged and moved.device == torch.device("meta") and moved.max_length == 2


def test_fabric_saves_it_as_a_dict(tmp_path: Path) -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    saved, loaded = DeviceDict({"x": [1.0], "n": {"y": 2}}), DeviceDict({"x": [0.0], "n": {"y": 0}})
    fabric.save(tmp_path / "state", {"d": saved, "step": 3})
    state: dict[str, Any] = {"d": loaded, "step": 0}
    fabric.load(tmp_path / "state", state)
    assert state == {"d": saved, "step": 3}
    assert type(fabric.load(tmp_path / "state")["d"]["x"]) is Tensor  # loaded at once


class Keeps(DeviceDict, objects="keep"):
    pass


@pytest.mark.parametrize("cls", [DeviceDict, Typed, Keeps])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("protocol", [2, 4])
def test_lazily_loaded_checkpoints(cls: type[Any], packed: bool, protocol: int, tmp_path: Path) -> None:
    # A checkpoint of FSDP is read so: tensors are stand-ins, read when they are needed.
    d = cls({"x": torch.arange(6.0).view(2, 3), "y": torch.arange(4)})
    if cls is not Typed:
        d["n"] = {"w": nn.Parameter(torch.ones(2)), "b": torch.ones(2, dtype=torch.bfloat16)}
        d["e"] = {}
    if cls is Keeps:
        d["o"] = ["kept", None]
    d = d.pack() if packed else d
    torch.save({"model": {"w": torch.ones(1)}, "data": [d]}, tmp_path / "c.ckpt", pickle_protocol=protocol)
    checkpoint = _lazy_load(tmp_path / "c.ckpt")
    assert type(checkpoint["model"]["w"]).__name__ == "_NotYetLoadedTensor"
    if (cls, protocol) != (Keeps, 4):  # there a stand-in may be a kept object
        check_invariants(checkpoint["data"][0])
    again = _materialize_tensors(checkpoint)["data"][0]
    check_invariants(again)
    assert type(again) is cls and again == d and checkpoint["data"][0].device == torch.device("cpu")
    if cls is not Typed and protocol == 2:
        assert type(checkpoint["data"][0]["n", "w"]) is nn.Parameter and checkpoint["data"][0].is_packed == packed
