"""`collate` decides as the constructor does: its batch is the stack of what the class makes of each sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import simulated
import torch
from checks import check_invariants
from torch import Tensor

from tensordict_lite import DeviceDict, DeviceMismatchError, Hashing, TypedDeviceDict, Utf8, Vocabulary, collate, stack

SIM = simulated.SIM
WORDS, OTHERS = Vocabulary(["a", "b"]), Vocabulary(["b", "a", "c"])


class Base(DeviceDict[Any]):
    pass


class Moves(DeviceDict[Any], on_mismatch="move"):
    pass


class Keeps(DeviceDict[Any], objects="keep"):
    pass


class Doubles(DeviceDict[Any], dtype=torch.float64):
    pass


class Encodes(DeviceDict[Any], encoders={"s": WORDS}):
    pass


class EncodesAll(DeviceDict[Any], encoders=WORDS):
    pass


class Inner(TypedDeviceDict, encoders={"s": OTHERS}, dtype=torch.float64):
    s: Tensor
    y: Tensor | None = None


class Typed(TypedDeviceDict):
    n: Inner
    x: Tensor | None = None
    m: DeviceDict[Any] | None = None


class TypedMoves(TypedDeviceDict, on_mismatch="move", encoders={"s": WORDS}):
    n: DeviceDict[Any]
    x: Tensor | None = None


def tree(d: Any) -> Any:
    """The class, the device and the policy of a dict and of those in it, beside the values."""
    if not isinstance(d, DeviceDict):
        return type(d)
    nested = {key: tree(value) for key, value in d.items()}
    policy = d._policy
    return type(d), d.device, dict(policy.encoders), policy.default_encoder, policy.on_mismatch, policy.objects, \
        policy.dtype, nested  # fmt: skip


def on(device: Any) -> Tensor:
    return torch.ones(2, device=device)


PLAIN: dict[str, Callable[[], Any]] = {
    "numbers": lambda: {"x": 1.5, "n": {"s": "a", "y": 2.5}},
    "arrays": lambda: {"x": np.ones(2, np.float32), "n": {"s": "b", "y": np.ones(2)}},
    "NumPy numbers": lambda: {"x": np.float32(1), "n": {"s": np.str_("a"), "y": np.float64(2)}},
    "lists": lambda: {"x": [[1.0, 2.0]], "n": {"s": ["a", "b"], "y": [True]}},
    "a dict": lambda: {"x": 1.5, "n": DeviceDict({"s": "b", "y": 1.0})},
    "a dict with an encoder": lambda: {"x": 1.5, "n": DeviceDict({"s": "b"}, encoders={"s": Hashing(4)})},
    "a dict with one for all": lambda: {"x": 1.5, "n": DeviceDict({"s": "b"}, encoders=Vocabulary(["b"]))},
    "a dict with options": lambda: {"x": 1, "n": DeviceDict({"s": "b"}, dtype=torch.float16)},
    "a dict of a class": lambda: {"x": 1.5, "n": Encodes({"s": "b"})},
    "deeper": lambda: {"n": {"s": "a"}, "m": {"n": {"s": "a"}, "d": Encodes({"s": "a", "n": {"s": "b"}})}},
    "a typed dict": lambda: {"n": Inner(s=torch.tensor(1), y=torch.ones(1)), "x": torch.ones(1)},
    "whole": lambda: DeviceDict({"x": 1.5, "n": {"s": "a"}}),
    "whole, one encoder for all": lambda: DeviceDict({"x": 1.5, "n": {"s": "a"}}, encoders=OTHERS),
    "whole, with encoders": lambda: DeviceDict({"x": 1.5, "n": {"s": "a"}}, encoders={"s": OTHERS}),
    "whole, with options": lambda: DeviceDict(
        {"x": 1.5, "n": {"s": "a"}}, on_mismatch="move", dtype=torch.float16
    ),
    "whole, of a class": lambda: Encodes({"x": 1.5, "n": {"s": "a"}}),
    "on a device": lambda: {"x": on(SIM), "n": {"s": "a"}},
    "whole, on a device": lambda: DeviceDict({"x": on(SIM), "n": {"s": "a"}}),
    "whole, without a tensor": lambda: DeviceDict({"n": {}, "m": {}}, device=SIM),
}  # fmt: skip
CLASSES = [DeviceDict, Base, Moves, Doubles, Encodes, EncodesAll, Typed, TypedMoves]


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("encoders", [None, {"s": Vocabulary(["a", "b", "c"])}, Utf8(8)])
def test_collate_is_the_stack_of_what_the_class_makes(name: str, cls: Any, encoders: Any) -> None:
    def outcome(make: Callable[[], Any]) -> Any:
        try:
            return make()
        except (TypeError, ValueError, RuntimeError) as error:
            return type(error)

    one, two = PLAIN[name](), PLAIN[name]()
    own = isinstance(one, cls)  # a sample of the class keeps its own
    kind = type(one) if own else cls
    has_strings = name != "whole, without a tensor"  # collate refuses encoders of keys that no sample has
    given = {"encoders": encoders} if encoders is not None and has_strings else {}
    expected = outcome(lambda: stack([s if own and not given else kind(s, **given) for s in (one, two)]))
    got = outcome(lambda: collate([one, two], cls=cls, **given))
    if isinstance(expected, type):
        assert got is expected
        return
    assert isinstance(got, DeviceDict) and got == expected
    assert tree(got) == tree(expected)
    check_invariants(got)


class TestMoving:
    @pytest.mark.parametrize("make", [
        lambda: [{"x": on("cpu"), "y": on(SIM)}] * 2,
        lambda: [{"x": on("cpu"), "y": on("cpu")}, {"x": on(SIM), "y": on("cpu")}],
        lambda: [{"x": on("cpu"), "n": {"y": on(SIM)}}, {"x": on(SIM), "n": {"y": on("cpu")}}],
        lambda: [{"x": 1.0, "y": on(SIM)}, {"x": 2.0, "y": on("cpu")}],
        lambda: [{"x": 1.0, "y": on(SIM)}, {"x": on("cpu")[0], "y": on("cpu")}],
        lambda: [{"x": on("cpu")}, DeviceDict({"x": on(SIM)})],
        lambda: [{"x": torch.ones(1)}, {"x": on(SIM)}],
    ])  # fmt: skip
    @pytest.mark.parametrize("pack", [True, False])
    def test_as_the_class_says(self, make: Callable[[], Any], pack: bool) -> None:
        samples = make()
        ragged = (
            samples[0].get("x") is not None and isinstance(samples[0]["x"], Tensor) and samples[0]["x"].shape == (1,)
        )
        pad = {"x": 0.0} if ragged else None
        got = collate(samples, cls=Moves, pad=pad, pack=pack)
        device = next(t for t in DeviceDict(samples[0], on_mismatch="move")._tensors()).device
        check_invariants(got)
        assert got.device == device and type(got) is Moves
        if not ragged:
            assert got.cpu() == stack([Moves(sample, device=device) for sample in samples]).cpu()

    @pytest.mark.parametrize("pack", [True, False])
    @pytest.mark.parametrize("devices", [("cpu", "meta"), ("meta", "cpu")])
    def test_refused_otherwise(self, pack: bool, devices: Any) -> None:
        samples = [{"n": {"x": on(device)}} for device in devices]
        with pytest.raises(
            DeviceMismatchError, match=rf"^'n\.x' is on {devices[1]}, this DeviceDict is on {devices[0]};"
        ):
            collate(samples, pack=pack)
        if devices[0] == "meta":  # nothing comes back from there
            assert collate(samples, cls=Moves, pack=pack).device == torch.device("meta")

    def test_as_the_samples_say(self) -> None:
        one, two = (DeviceDict({"x": on(d)}, on_mismatch="move") for d in ("cpu", SIM))
        got = collate([one, two])
        assert got.device == torch.device("cpu") and got["x"].tolist() == [[1.0, 1.0]] * 2


class TestObjects:
    @pytest.mark.parametrize(
        "values",
        [[{1}, {2}], [None, {3}], [[None], [1]], [np.array([None]), np.array([{1}])]],
        ids=["sets", "None and a set", "lists", "arrays"],
    )
    def test_kept_or_refused(self, values: list[Any]) -> None:
        samples = [{"o": value} for value in values]
        got = collate(samples, cls=Keeps)
        assert type(got["o"]) is list and all(a is b for a, b in zip(got["o"], values, strict=True))
        assert got.rows[0:0]["o"] == [] if got._tensors() else True
        with pytest.raises(TypeError):
            collate(samples)

    def test_a_number_and_none_stay_host_values(self) -> None:
        assert collate([{"y": 1}, {"y": None}], cls=Keeps)["y"] == [1, None]

    def test_table_columns_are_joined_whatever_is_kept(self) -> None:
        pandas = pytest.importorskip("pandas")
        samples = [{"x": pandas.Series([1.0, 2.0])}, {"x": pandas.Series([3.0, 4.0])}]
        got = collate(samples)
        assert got == stack([DeviceDict(sample) for sample in samples]) and isinstance(got["x"], Tensor)
        assert all(one is sample["x"] for one, sample in zip(collate(samples, cls=Keeps)["x"], samples, strict=True))
