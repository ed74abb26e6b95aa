"""Mappings in dicts of model code: configs, outputs of models, defaultdicts. ``objects="keep"`` keeps their class."""

from __future__ import annotations

import copy
import pickle
from collections import Counter, OrderedDict, UserDict, defaultdict
from typing import Any

import pytest
import simulated
import torch
from checks import fails

from tensordict_lite import DeviceDict, DeviceMismatchError, MissingKeyError, TypedDeviceDict, collate


class Kept(DeviceDict[Any], objects="keep"):
    pass


class Config(dict[str, Any]):
    """Reads its items as attributes, as the configs of many frameworks do."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Encoding(UserDict[str, Any]):
    """Moves itself, as the results of tokenizers do."""

    def to(self, device: Any) -> Encoding:
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


def mappings() -> dict[str, Any]:
    return {
        "config": Config(lr=0.1, weights=torch.ones(3)),
        "log": defaultdict(list, loss=[torch.ones(2)]),
        "tokens": Encoding(ids=torch.arange(2)),
        "count": Counter("aab"),
        "names": {0: "cat", 1: torch.ones(1)},
    }


@pytest.mark.parametrize("again", [
    lambda d: d,
    lambda d: d.clone(),
    lambda d: d.to(simulated.SIM),
    lambda d: d.double(),
    copy.copy,
    copy.deepcopy,
    lambda d: pickle.loads(pickle.dumps(d)),
    lambda d: d.rows[:2],
], ids=["insert", "clone", "to", "double", "copy", "deepcopy", "pickle", "rows"])  # fmt: skip
def test_a_mapping_that_is_no_plain_dict_keeps_its_class_and_moves_with_the_dict(again: Any) -> None:
    given = mappings()
    d = again(Kept({"x": torch.zeros(3), "deep": {"config": given["config"]}, **given}))
    assert {key: type(d[key]) for key in given} == {key: type(value) for key, value in given.items()}
    assert d["config"].lr == 0.1 and type(d["deep", "config"]) is Config
    assert d["log"]["later"] == [] and d["count"]["z"] == 0
    tensors = [d["config"].weights, d["log"]["loss"][0], d["tokens"]["ids"], d["names"][1], d["x"]]
    assert {tensor.device for tensor in tensors} == {d.device}
    assert given["tokens"]["ids"].is_cpu  # moved on a copy


def test_a_plain_dict_becomes_a_nested_dict() -> None:
    d = Kept({"obs": {"x": 1}, "features": OrderedDict(x=torch.ones(2)), "empty": {}})
    assert {type(value) for value in d.values()} == {Kept}


def test_a_declared_dict_takes_every_mapping() -> None:
    class Inputs(TypedDeviceDict, objects="keep"):
        ids: torch.Tensor

    class Batch(TypedDeviceDict, objects="keep"):
        inputs: Inputs
        config: Config

    batch = Batch.from_dict({"inputs": Encoding(ids=torch.arange(2)), "config": Config(lr=0.1)})
    assert type(batch["inputs"]) is Inputs and batch.inputs.ids.tolist() == [0, 1]
    assert type(batch.config) is Config and batch.config.lr == 0.1


def test_a_tensor_in_a_kept_mapping_on_another_device() -> None:
    with pytest.raises(DeviceMismatchError, match=r"^'config.weights' is on sim:0, this DeviceDict is on cpu; move it"):
        Kept({"x": torch.ones(1), "y": torch.ones(1), "config": Config(weights=torch.ones(3, device=simulated.SIM))})
    d = Kept({"x": torch.ones(1)})
    with pytest.raises(DeviceMismatchError, match=r"^'log.loss\[0\]' is on sim:0"):
        d["log"] = defaultdict(list, loss=[torch.ones(3, device=simulated.SIM)])
    assert list(d) == ["x"]


@pytest.mark.parametrize(("path", "message"), [
    (("config", "lr"), r"^'config.lr' is not in this Kept: 'config' is a kept Config, not a nested dict"),
    (("names", 0), r"^a path is made of str, got int: 'names' is a kept dict; index it as d\['names'\]\[...\]$"),
    (("names", "dog"), r"^'names.dog' is not in this Kept: 'names' is a kept dict"),
], ids=["attribute", "number", "name"])  # fmt: skip
def test_a_path_into_a_kept_mapping_says_how_to_read_it(path: Any, message: str) -> None:
    fails(MissingKeyError, message, lambda: Kept(mappings())[path])


def test_a_batch_joins_mappings_of_every_class() -> None:
    samples = [{"tokens": Encoding(ids=torch.arange(2)), "names": {0: "cat"}} for _ in range(3)]
    batch = collate(samples, cls=Kept)
    assert batch["tokens", "ids"].shape == (3, 2) and batch["names"] == [{0: "cat"}] * 3


def test_a_nested_dict_equals_a_mapping_of_every_class() -> None:
    assert DeviceDict({"obs": {"x": torch.ones(2)}}) == {"obs": UserDict(x=torch.ones(2))}
