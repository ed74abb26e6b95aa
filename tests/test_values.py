"""What ``d[key] = value`` stores, and what it refuses, with the whole message."""

from __future__ import annotations

import array
import copy
import ctypes
import dataclasses
import enum
import re
from typing import Any, NamedTuple

import numpy as np
import pytest
import simulated
import torch
from checks import check_invariants, fails
from PIL import Image
from torch import Tensor, nn

from tensordict_lite import DeviceDict, DeviceMismatchError, TypedDeviceDict, Utf8, collate

ACCEPTED = "a tensor, number, NumPy array, list of numbers, string, list of strings or mapping"
KEEP = 'or build with objects="keep" to keep it as it is, on the host'
SIM = simulated.SIM


class Plain(TypedDeviceDict):
    x: Tensor


class TestTensors:
    def test_on_the_device_it_is_stored_itself(self, device: torch.device) -> None:
        for t in (torch.ones(2), nn.Parameter(torch.ones(2)), torch.ones(2, device=device), torch.eye(2).to_sparse(),
                  torch.ones(1, dtype=torch.complex64).conj()):  # fmt: skip
            d = DeviceDict({"x": t})
            assert d["x"] is t and d.device == t.device
            d["y"] = t
            assert d["y"] is t
            check_invariants(d)

    def test_elsewhere_it_is_refused(self, device: torch.device) -> None:
        d = DeviceDict({"x": torch.ones(2)})
        with pytest.raises(DeviceMismatchError) as caught:
            d["y"] = torch.ones(2, device=device)
        error = caught.value
        assert str(error) == (
            f"'y' is on {device}, this DeviceDict is on cpu; move it with .to('cpu'), "
            'or build with on_mismatch="move"'
        )
        assert isinstance(error, RuntimeError)
        assert (error.key, error.expected, error.actual) == ("y", torch.device("cpu"), device)

    def test_tensors_that_disagree(self, device: torch.device) -> None:
        with pytest.raises(DeviceMismatchError, match=rf"^'n\.y' is on {device}, this DeviceDict is on cpu"):
            DeviceDict({"x": torch.ones(1), "n": {"y": torch.ones(1, device=device)}})
        with pytest.raises(DeviceMismatchError, match=rf"^'y' is on cpu, this DeviceDict is on {device}"):
            DeviceDict({"s": 1, "x": torch.ones(1, device=device), "y": torch.ones(1)})

    @pytest.mark.parametrize("nested", [False, True])
    def test_of_several_tensors_the_odd_one_is_refused(self, nested: bool, device: torch.device) -> None:
        odd: Any = {"y": torch.ones(1, device=device)} if nested else torch.ones(1, device=device)
        for items in ({"n": odd, "x": torch.ones(1), "z": torch.ones(2)}, {"x": torch.ones(1), "n": odd, "z": odd}):
            first = next(iter(items)) == "n"
            name, actual, expected = ("n.y" if nested else "n", device, "cpu") if first else ("x", "cpu", device)
            with pytest.raises(DeviceMismatchError) as caught:
                DeviceDict(items)
            assert str(caught.value) == (
                f"{name!r} is on {actual}, this DeviceDict is on {expected}; move it with .to('{expected}'), "
                f"or build with device='{expected}'"
            )
            error = caught.value
            assert error.key == (("n", "y") if nested and first else name)
            assert (str(error.actual), str(error.expected)) == (str(actual), str(expected))
            assert DeviceDict(items, device=str(error.expected)).device == error.expected

    @pytest.mark.parametrize("path", [("x",), ("n", "y")])
    def test_fields_do_not_move_one_by_one(self, path: tuple[str, ...], device: torch.device) -> None:
        """Helpers call `batch[key] = batch[key].to(device)`. With on_mismatch="move" that would change nothing."""
        d = DeviceDict({"x": torch.ones(2), "n": {"y": torch.zeros(3).half()}})
        moved = d[path].to(device)
        nested: Any = moved
        for key in reversed(path):
            nested = {key: nested}
        for write in (lambda: d.__setitem__(path, moved), lambda: d.update(nested), lambda: d.__ior__(nested)):
            with pytest.raises(DeviceMismatchError) as caught:
                write()
            assert str(caught.value) == (
                f"'{'.'.join(path)}' is on {device}, this DeviceDict is on cpu; move the whole dict, "
                f"d = d.to('{device}'), or this tensor, .to('cpu')"
            )
        assert d.to(str(device)).device == device
        for other in (moved.float() if path == ("n", "y") else moved.half(), moved[:1]):
            with pytest.raises(DeviceMismatchError, match=r'build with on_mismatch="move"$'):
                d[path] = other

    def test_asking_for_a_device_is_consent(self, device: torch.device, copies: Any) -> None:
        t = torch.ones(2)
        d = DeviceDict({"x": t, "n": {"y": torch.zeros(1, device=device), "again": t}}, device=device)
        check_invariants(d)
        assert d.device == device and d["n", "again"] is d["x"], "what was one tensor is still one"
        if device.type == "sim":
            assert copies == {"h2d": 1}
        with pytest.raises(DeviceMismatchError):
            d["z"] = t

    def test_on_mismatch_move(self, device: torch.device) -> None:
        d = DeviceDict({"x": torch.ones(2, device=device)}, on_mismatch="move")
        d["y"] = torch.zeros(2)
        d.update(z={"w": torch.ones(1)})
        d["z"]["v"] = torch.ones(1)  # pyright: ignore[reportArgumentType]
        check_invariants(d)
        assert d["z", "v"].device == device
        mixed = DeviceDict({"a": torch.ones(1), "b": torch.ones(1, device=device)}, on_mismatch="move")
        assert mixed.device == torch.device("cpu")
        check_invariants(mixed)

    def test_meta_and_indices(self) -> None:
        d = DeviceDict({"x": 1}, device="meta")
        d["y"] = torch.zeros(1, device="meta:0")
        assert d.device == torch.device("meta")
        assert DeviceDict(device="cpu:0").device == torch.device("cpu")

    def test_a_device_without_an_index_is_the_current_one(self) -> None:
        assert DeviceDict(device="sim").device == torch.device("sim:0")
        assert DeviceDict({"x": 1}).to("sim").device == torch.device("sim:0")
        with simulated.sim.device(1):
            d = DeviceDict(device="sim")
            assert d.device == torch.device("sim:1")
            d["x"] = torch.ones(1, device="sim")
            d["y"] = torch.ones(1, device="sim:1")
            assert d.to("sim") is d
        assert d.to("sim:1") is d and d.to("sim").device == torch.device("sim:0")


class Colour(enum.IntEnum):
    RED = 3


class Point(NamedTuple):
    x: float
    y: float


class TestNumbers:
    @pytest.mark.parametrize(("value", "dtype", "expected"), [
        (True, torch.bool, True),
        (3, torch.int64, 3),
        (1.5, torch.float32, 1.5),
        (2j, torch.complex64, 2j),
        (np.float64(1.5), torch.float64, 1.5),
        (np.float32(1.5), torch.float32, 1.5),
        (np.int16(7), torch.int16, 7),
        (np.bool_(True), torch.bool, True),
        (Colour.RED, torch.int64, 3),
        ([1, 2], torch.int64, [1, 2]),
        ([[1.0], [2.5]], torch.float32, [[1.0], [2.5]]),
        ((1, 2.5, True), torch.float32, [1.0, 2.5, 1.0]),
        ([np.float64(1), 2], torch.float64, [1.0, 2.0]),
        (Point(1.0, 2.0), torch.float32, [1.0, 2.0]),
        ([Point(1.0, 2.0)], torch.float32, [[1.0, 2.0]]),
        ([], torch.float32, []),
        ([np.array([1, 2]), np.array([3, 4])], torch.int64, [[1, 2], [3, 4]]),
        ([[np.array([1.0])], [[2.0]]], torch.float64, [[[1.0]], [[2.0]]]),
        (torch.Size([2, 3]), torch.int64, [2, 3]),
    ])  # fmt: skip
    def test_become_tensors(self, value: Any, dtype: torch.dtype, expected: Any, device: torch.device) -> None:
        for where in ("cpu", device):
            d = DeviceDict({"x": value}, device=where)
            check_invariants(d)
            assert d["x"].dtype == dtype
            assert d["x"].cpu().tolist() == expected

    def test_arrays_are_shared_as_torch_shares_them(self) -> None:
        array = np.arange(3.0)
        d = DeviceDict({"x": array})
        array[0] = 9
        assert d["x"].dtype == torch.float64 and d["x"][0] == 9

    def test_arrays_that_cannot_be_shared_are_copied_without_a_warning(self) -> None:
        frozen = np.arange(3)
        frozen.flags.writeable = False
        backwards = np.arange(3)[::-1]
        swapped = np.arange(3).astype(">i4")
        record = np.zeros(3, dtype=[("a", "i1"), ("b", "i4")])
        d = DeviceDict(
            {"f": frozen, "b": backwards, "s": swapped, "r": record["b"], "bc": np.broadcast_to(1.0, (2, 2))}
        )
        assert d["b"].tolist() == [2, 1, 0] and d["s"].tolist() == [0, 1, 2] and d["s"].dtype == torch.int32
        d["f"][0] = 7
        d["r"][0] = 7
        d["bc"][0, 0] = 7
        assert frozen[0] == 0 and record["b"][0] == 0 and d["bc"].tolist() == [[7.0, 1.0], [1.0, 1.0]]

    def test_dtype_is_for_host_values_with_floating_point_content(self) -> None:
        d = DeviceDict({
            "a": np.ones(2), "l": [0.1], "n": 0.1, "s": np.float64(0.5), "i": [1], "j": np.arange(2), "b": True,
            "c": 1j, "t": torch.ones(1, dtype=torch.float16), "d": {"x": 1.0}, "e": np.ones(1, np.float16),
        }, dtype=torch.float64)  # fmt: skip
        got = {key: str(t.dtype).removeprefix("torch.") for key, t in d.flatten().items()}
        assert got == {"a": "float64", "l": "float64", "n": "float64", "s": "float64", "i": "int64", "j": "int64",
                       "b": "bool", "c": "complex64", "t": "float16", "d.x": "float64", "e": "float64"}  # fmt: skip
        assert d["l"].item() == 0.1 and d["n"].item() == 0.1, "created in the dtype, not cast to it from float32"
        assert DeviceDict({"x": np.ones(1)}, dtype=torch.float32)["x"].dtype == torch.float32

    def test_the_default_dtype_and_device_of_torch_are_honoured(self, device: torch.device) -> None:
        torch.set_default_dtype(torch.float64)
        try:
            assert DeviceDict({"x": 1.0})["x"].dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        with torch.device(device):
            d = DeviceDict({"x": 1.0, "s": "a", "n": {}})
        assert d.device == device
        check_invariants(d)

    def test_a_host_value_does_not_decide_the_device_if_a_tensor_can(self, device: torch.device) -> None:
        d = DeviceDict({"a": 1.0, "n": {"s": "text", "t": torch.ones(1, device=device)}})
        check_invariants(d)
        assert d.device == device


@dataclasses.dataclass
class Holder:
    t: Any = None


REFUSED = {
    "None": (None, f"'n.x': expected {ACCEPTED}, got a NoneType; leave the key out, {KEEP}"),
    "object": (object(), f"'n.x': expected {ACCEPTED}, got an object; convert it first, {KEEP}"),
    "bytes": (b"ab", f"'n.x': expected {ACCEPTED}, got a bytes; convert it first, {KEEP}"),
    "bytearray": (bytearray(b"ab"), f"'n.x': expected {ACCEPTED}, got a bytearray; convert it first, {KEEP}"),
    "set": ({1, 2}, f"'n.x': expected {ACCEPTED}, got a set; convert it first, {KEEP}"),
    "list of None": (
        [1, None],
        f"'n.x': expected {ACCEPTED}, got a list of NoneType, int; fill missing values first, {KEEP}",
    ),
    "list of dicts": (
        [{"a": 1}],
        f"'n.x': expected {ACCEPTED}, got a list of dict; convert it to numbers or strings, {KEEP}",
    ),
    "datetimes": (
        np.array(["2020-01-01"], dtype="M8[D]"),
        f"'n.x': expected {ACCEPTED}, got an array of dtype datetime64[D]; convert it first, {KEEP}",
    ),
    "datetime": (
        np.datetime64("2020-01-01"),
        f"'n.x': expected {ACCEPTED}, got an array of dtype datetime64[D]; convert it first, {KEEP}",
    ),
    "records": (
        np.zeros(1, dtype=[("a", "i4")]),
        f"'n.x': expected {ACCEPTED}, got an array of dtype [('a', '<i4')]; convert it first, {KEEP}",
    ),
    "bytes array": (
        np.array([b"a"]),
        f"'n.x': expected {ACCEPTED}, got an array of dtype |S1; convert it first, {KEEP}",
    ),
    "longdouble": (
        np.ones(1, np.longdouble),
        f"'n.x': expected {ACCEPTED}, got an array of dtype {np.dtype(np.longdouble)}; convert it first, {KEEP}",
    ),
    "list of tensors": (
        [torch.ones(1), torch.ones(1)],
        f"'n.x': expected {ACCEPTED}, got a list that holds a tensor at [0], which would escape the device rule; "
        "join it with torch.stack or pad_sequence, or store it as a mapping",
    ),
    "tensor deep in a list": (
        [[1.0, torch.ones(())]],
        f"'n.x': expected {ACCEPTED}, got a list that holds a tensor at [0][1], which would escape the device rule; "
        "join it with torch.stack or pad_sequence, or store it as a mapping",
    ),
}


@pytest.mark.parametrize(("value", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_with_its_message(value: Any, message: str) -> None:
    d = DeviceDict({"n": {"y": 1}})
    with pytest.raises(TypeError) as caught:
        d["n", "x"] = value
    assert str(caught.value) == message
    assert list(d["n"]) == ["y"]


@pytest.mark.parametrize(("value", "message"), [
    ([[1, 2], [3]],
     r"^'x': item \[1\]: expected a length of 2, got 1; nested lists must be rectangular; to keep the lengths, "
     r"store Ragged\.from_rows\(rows\), or give collate ragged=\['x'\]; to fill the shorter ones up, give "
     r"collate pad=\{'x': 0\}$"),
    ([[[1, 2], [3, 4]], [[5, 6], (7,)]],
     r"^'x': item \[1\]\[1\]: expected a length of 2, got 1; nested lists must be rectangular$"),
    ([1, [2]], r"^'x': item \[1\]: expected a number, got a list; nested lists must be rectangular$"),
    ([[1], [2], 3], r"^'x': item \[2\]: expected a list, got a number; nested lists must be rectangular$"),
    ([[1.5], []], r"^'x': item \[1\]: expected a length of 1, got 0; nested lists must be rectangular; to keep"),
    (2**70, r"^'x': int64 cannot hold 1180591620717411303424; store float\(value\), or str\(value\)$"),
    ([[1], [-(2**63) - 1]], r"^'x': int64 cannot hold -9223372036854775809; store float\(value\), or str\(value\)$"),
    ([np.uint64(2**63)],
     r"^'x': int64 cannot hold 9223372036854775808; store float\(value\), or numpy\.array\(value, dtype='uint64'\)$"),
    ([np.ones(2), np.ones(3)], r"^'x': the arrays in this list differ in shape"),
])  # fmt: skip
def test_numbers_that_do_not_fit(value: Any, message: str) -> None:
    for device in [None, "meta"] if "rectangular" in message else [None]:
        with pytest.raises(ValueError, match=message):
            DeviceDict({"x": value}, device=device)


class Exported:
    """An array of another library, which exports the memory of a tensor."""

    def __init__(self, t: Tensor) -> None:
        self.t = t

    def __dlpack__(self, **options: Any) -> Any:
        return self.t.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.t.__dlpack_device__()


class TestOtherLibraries:
    def test_a_tensor_of_another_library_is_shared_and_keeps_the_device_rule(self, device: torch.device) -> None:
        t = torch.ones(2, 3)
        for made in (DeviceDict({"x": Exported(t), "y": 1}), collate([{"x": Exported(t)}], pack=False)):
            check_invariants(made)
            assert made["x"].dtype == torch.float32 and made.device == torch.device("cpu")
        d = DeviceDict({"x": Exported(t), "b": Exported(t.bfloat16())}, dtype=torch.float64)
        assert d["x"].data_ptr() == t.data_ptr(), "nothing is copied"
        assert (d["x"].dtype, d["b"].dtype) == (torch.float32, torch.bfloat16), "as for a tensor"
        d.rows[0] = {"x": Exported(torch.zeros(3)), "b": Exported(torch.ones(3))}
        assert t.tolist() == [[0, 0, 0], [1, 1, 1]]
        there = DeviceDict({"x": torch.ones(2, device=device)})
        for write in (lambda: there.update(y=Exported(t)), lambda: there.rows.__setitem__(0, {"x": Exported(t[0, 0])})):
            with pytest.raises(DeviceMismatchError, match=rf"^'[xy]' is on cpu, this DeviceDict is on {device}"):
                write()
        assert DeviceDict({"n": {"x": Exported(t)}}, device=device)["n", "x"].device == device
        moving = DeviceDict({"y": torch.ones(1, device=device)}, on_mismatch="move")
        moving["x"] = Exported(t)
        check_invariants(moving)

    def test_collate_takes_them(self) -> None:
        samples = [{"x": Exported(torch.arange(i + 1)), "y": Exported(torch.ones(2)), "r": range(3)} for i in range(2)]
        batch = collate(samples, pad={"x": 0})
        assert batch["x"].tolist() == [[0, 0], [0, 1]] and batch["y"].shape == (2, 2) and batch.is_packed
        assert batch["r"].tolist() == [[0, 1, 2]] * 2
        fails(ValueError, r"^'x': sample 1 has int64\[2\], sample 0 has int64\[1\]; ", lambda: collate(samples))

    def test_memory_that_torch_cannot_share(self) -> None:
        class Refuses(Exported):
            def __dlpack__(self, **options: Any) -> Any:
                raise BufferError("it lies on two devices")

        d = DeviceDict({"n": {"y": 1}})
        with pytest.raises(TypeError) as caught:
            d["n", "x"] = Refuses(torch.ones(1))
        assert str(caught.value) == (
            "'n.x': expected memory that torch can share, got Refuses; convert it to NumPy first; "
            "the error is: it lies on two devices"
        )
        assert list(d["n"]) == ["y"]

    @pytest.mark.filterwarnings("ignore:Exception ignored in PyObject_HasAttrString:Warning")  # of torch, which asks
    def test_an_array_interface_of_cuda_is_asked(self) -> None:
        class OnCuda:
            @property
            def __cuda_array_interface__(self) -> Any:
                raise ValueError("it is freed")

        with pytest.raises(TypeError, match=r"^'x': expected memory that torch can share, got OnCuda; convert it"):
            DeviceDict({"x": OnCuda()})

    def test_what_numpy_converts_is_an_array(self, device: torch.device) -> None:
        class Series:
            def __array__(self, *_: Any, **__: Any) -> Any:
                return np.array([0.5, 1.0])

        given = array.array("i", [1, 2])
        d = DeviceDict({
            "s": Series(), "a": given, "m": memoryview(b"ab"), "r": range(6, 0, -2), "none": range(0),
            "image": Image.new("RGB", (4, 3)), "c": (ctypes.c_float * 2)(1, 2),
        }, dtype=torch.float32)  # fmt: skip
        check_invariants(d)
        assert {key: str(t.dtype).removeprefix("torch.") + str(list(t.shape)) for key, t in d.items()} == {
            "s": "float32[2]", "a": "int32[2]", "m": "uint8[2]", "r": "int64[3]", "none": "int64[0]",
            "image": "uint8[3, 4, 3]", "c": "float32[2]",
        }  # fmt: skip
        d["a"][0] = 7
        assert given[0] == 7, "its memory is shared"
        assert DeviceDict({"a": given, "x": torch.ones(1, device=device)})["a"].device == device, "a host value"

    def test_an_object_that_numpy_cannot_convert_is_an_object(self) -> None:
        class Odd:
            def __array__(self, *_: Any, **__: Any) -> Any:
                raise RuntimeError("no")

        with pytest.raises(
            TypeError, match=re.escape("'x': expected " + ACCEPTED + ", got an Odd; pass numpy.asarray(value), ")
        ):
            DeviceDict({"x": Odd()})
        assert isinstance(DeviceDict[Any]({"x": Odd()}, objects="keep")["x"], Odd)


@pytest.mark.parametrize("key", [1, None, 1.5, b"x", ("a", "b")])
def test_keys_are_str(key: Any) -> None:
    d = DeviceDict({"n": {}})
    ways = {tuple: "; assign d[path] = value for a path", bytes: "; use key.decode()", type(None): ""}
    way_out = ways.get(type(key), f"; use {str(key)!r}")
    kind = type(key).__name__
    with pytest.raises(TypeError) as caught:
        d.update({key: 1})
    assert str(caught.value) == f"keys are str, got {key!r} of type {kind}{way_out}"
    with pytest.raises(TypeError) as caught:
        d["n"] = {key: 1}
    assert str(caught.value) == f"keys are str, got {key!r} of type {kind} in 'n'{way_out}"


@pytest.mark.parametrize(("data", "message"), [
    (3, "got int"),
    (object(), "got object"),
    ([1, 2], "got list: "),
    ([None], "got list: "),
    ([("a", 1), 2], "got list: "),
    (b"ab", "got bytes: "),
    ({1, 2}, "got set: "),
    ([([], 1)], "got list: "),
    ([()], "got list: "),
    ([("a",)], "got list: dictionary update sequence element #0 has length 1; 2 is required"),
    ([("a", 1, 2)], "got list: dictionary update sequence element #0 has length 3; 2 is required"),
    ([("a", 1), ("b",)], "got list: dictionary update sequence element #1 has length 1; 2 is required"),
])  # fmt: skip
def test_what_is_no_mapping_raises_what_dict_raises(data: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as expected:
        dict(data)
    d = DeviceDict({"x": 1})
    for write in (DeviceDict, Plain.from_dict, d.update, d.__ior__, lambda data: d.update(data, y=1)):
        said = message + str(expected.value) if message.endswith(": ") else message
        with pytest.raises(expected.type, match=re.escape(said)) as caught:
            write(data)
        assert str(caught.value).startswith("expected a mapping or an iterable of (key, value) pairs, got ")
    assert list(d) == ["x"]


@pytest.mark.parametrize("keys", [3, None, [[]], ["a", {}]])
def test_fromkeys_raises_what_dict_raises(keys: Any) -> None:
    with pytest.raises(TypeError) as expected:
        dict.fromkeys(keys)
    fails(TypeError, f"^{re.escape(str(expected.value))}$", lambda: DeviceDict.fromkeys(keys, 1))


def test_the_error_of_a_callers_generator_is_the_callers() -> None:
    def broken() -> Any:
        yield "x", 1
        raise ValueError("mine")

    fails(ValueError, r"^mine$", lambda: DeviceDict(broken()))


class TestObjects:
    def test_objects_alone_do_not_decide_the_device(self, device: torch.device) -> None:
        d = DeviceDict({"id": None}, objects="keep")
        assert d.device is None and d.to(device).device == device
        d["x"] = torch.ones(1, device=device)
        check_invariants(d)
        assert d.device == device

    def test_a_kept_object_may_lead_back_to_itself(self) -> None:
        loop: Any = [None]
        loop.append(loop)
        d = DeviceDict({"o": {"nested": 1}}, objects="keep")
        d["k"] = (loop, "text")
        assert d["k"][0] is loop and copy.deepcopy(d)["k"][0] is not loop
        loop.append({"x": torch.ones(1)})
        with pytest.raises(
            ValueError, match=r"^'again': expected a container that does not hold itself, got a tuple that does"
        ):
            d["again"] = (loop, "text")


class TestPolicy:
    @pytest.mark.parametrize(("options", "error", "message"), [
        ({"on_mismatch": "copy"}, ValueError, "on_mismatch is 'error' or 'move', got 'copy'"),
        ({"objects": True}, ValueError, "objects is 'error' or 'keep', got True"),
        ({"dtype": torch.int64}, TypeError,
         "dtype must be a floating-point torch.dtype (for floating-point host values), got torch.int64"),
        ({"dtype": "float32"}, TypeError, "got 'float32'"),
        ({"encoders": {("a", "b"): Utf8()}}, TypeError,
         "encoders= maps keys, which are str, to encoders; got the key "
         "('a', 'b'); a key's encoder serves that key in nested dicts too"),
        ({"encoders": {"a": 3}}, TypeError, "an encoder has encode and decode, or is a callable; got an int: 3"),
    ])  # fmt: skip
    def test_bad_options(self, options: Any, error: type[Exception], message: str) -> None:
        fails(error, re.escape(message), lambda: DeviceDict(**options))
        fails(error, re.escape(message), lambda: type("Batch", (DeviceDict,), {}, **options))


_BASE = np.arange(24, dtype=np.float32)
_RAW = np.arange(101, dtype=np.uint8)
_READ_ONLY = np.broadcast_to(_BASE, (1, 24))
ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "reversed": _BASE[::-1],
    "reversed in size 1": _BASE[:1][::-1],
    "reversed in the last dimension of size 1": _BASE.reshape(24, 1)[:, ::-1],
    "reversed in a dimension of size 1 in the middle": _BASE.reshape(2, 1, 12)[:, ::-1],
    "reversed and empty": np.zeros((0, 3))[:, ::-1],
    "reversed complex": np.ones((1, 2), np.complex128)[::-1],
    "stride 0": np.lib.stride_tricks.as_strided(_BASE, (3, 4), (0, 4)),
    "stride of no whole element": np.lib.stride_tricks.as_strided(_BASE, (3,), (6,)),
    "stride of no whole element in size 1": np.lib.stride_tricks.as_strided(_BASE, (1,), (3,)),
    "stride of no whole element, empty": np.lib.stride_tricks.as_strided(_BASE, (0, 2), (3, 6)),
    "field of records": np.zeros(3, [("a", np.int8), ("b", np.float32)])["b"],
    "big-endian": np.arange(3, dtype=">i8"),
    "big-endian, one number": np.array(1.5, ">f8"),
    "big-endian, reversed in size 1": np.ones((1, 2), ">c8")[::-1],
    "read-only": _READ_ONLY,
    "read-only, reversed in size 1": _READ_ONLY[::-1],
    "not aligned": _RAW[1:97].view(np.int64),
    "not aligned, reversed in size 1": _RAW[1:5].view(np.float32)[::-1],
    "in the order of Fortran": np.asfortranarray(_BASE.reshape(4, 6)),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_every_array_of_numbers_can_be_stored(array: np.ndarray[Any, Any]) -> None:
    before = array.copy()
    d = DeviceDict({"x": array, "n": {"x": [array, array]}}, device="cpu")
    assert np.array_equal(d["x"].numpy(), before) and d["x"].shape == array.shape
    assert np.array_equal(d["n", "x"].numpy(), np.stack([before, before]))
    d["x"].sum()
    if not array.flags.writeable:
        d["x"].add_(1)
    assert np.array_equal(array, before)


@pytest.mark.parametrize(
    "index", [np.array([2])[::-1], np.array([2, 0])[::-1], np.array([1], ">i4"), np.broadcast_to(1, 2)]
)
def test_every_array_of_ints_is_an_index(index: np.ndarray[Any, Any]) -> None:
    assert DeviceDict({"x": [0, 1, 2]}).rows[index]["x"].tolist() == index.tolist()


def test_an_array_of_records_is_refused() -> None:
    array = np.zeros(3, [("a", np.float32)])
    message = r"^'x': expected a tensor, .*, got an array of dtype \[\('a', '<f4'\)\]; convert it first, or build with"
    fails(TypeError, message, lambda: DeviceDict({"x": array}))
    assert DeviceDict({"x": array}, objects="keep")["x"] is array


@pytest.mark.parametrize("offset", [0, 1, 4, 8])
def test_arrays_that_are_not_aligned_are_copied(offset: int) -> None:
    """Kernels crash on complex128 that does not lie on a multiple of 16, where NumPy is content with 8."""
    for dtype in (np.complex128, np.complex64, np.float64, np.int16):
        memory = np.zeros(80, np.uint8)
        start = -memory.ctypes.data % 16 + offset
        array = memory[start : start + 48].view(dtype)
        aligned = offset % array.itemsize == 0
        for given in (array, array[:2].reshape(1, 2), array[1]):
            tensor = DeviceDict({"x": given})["x"]
            assert tensor.data_ptr() % tensor.itemsize == 0 and DeviceDict({"x": tensor}).clone()["x"].sum() == 0
        array[0] = 1
        assert (DeviceDict({"x": array})["x"].data_ptr() == array.ctypes.data) == aligned


class TestHostValues:
    def test_no_raw_mapping_gets_in_through_an_object_array(self) -> None:
        d = DeviceDict({"k": np.array({"a": 1}, dtype=object), "n": np.array(None, dtype=object)}, objects="keep")
        check_invariants(d)
        assert isinstance(d["k"], np.ndarray) and isinstance(d["n"], np.ndarray)

    @pytest.mark.parametrize(
        ("value", "error", "message"),
        [
            (
                [[], [1, 2]],
                ValueError,
                r"'x': item \[1\]: expected a length of 0, got 2; nested lists must be rectangular",
            ),
            ([np.array([1.5]), ["a"]], TypeError, "'x': expected a tensor"),
            ([np.array(1), None], TypeError, "'x': expected a tensor"),
            (np.ma.array([1, 999], mask=[0, 1]), TypeError, r"'x': expected an array .* use \.filled\(value\)"),  # pyright: ignore[reportArgumentType, reportCallIssue]
            ([10**400, 0.5], ValueError, "'x': expected numbers that torch can hold"),
        ],
    )
    def test_host_values_that_torch_would_change_are_refused(
        self, value: Any, error: type[Exception], message: str
    ) -> None:
        fails(error, f"^{message}", lambda: DeviceDict({"x": value}))
        assert DeviceDict({"x": np.ma.array([1, 2])})["x"].tolist() == [1, 2]

    @pytest.mark.parametrize(
        "value",
        [[np.ma.array([1, 9], mask=[0, 1]), np.ma.array([1, 2])], [1.0, np.ma.masked]],  # pyright: ignore[reportArgumentType, reportCallIssue]
        ids=["arrays", "a number"],
    )
    def test_masked_values_in_a_list(self, value: Any) -> None:
        with pytest.raises(TypeError, match="'x': expected numbers without a mask, got masked values; fill them first"):
            DeviceDict({"x": value})


def test_a_nested_device_dict_decides_the_device_and_moves_with_the_rest(device: torch.device) -> None:
    nested = DeviceDict({"m": DeviceDict({"x": torch.ones(2, device=device)})})
    made = DeviceDict({"n": nested, "y": torch.ones(1, device=device)})
    check_invariants(made)
    assert made.device == device and made["n", "m", "x"] is nested["m", "x"]
    for moved in (
        DeviceDict({"n": nested}, device="cpu"),
        DeviceDict({"y": torch.ones(1), "n": nested}, on_mismatch="move"),
    ):
        check_invariants(moved)
        assert moved.device == torch.device("cpu") and moved["n", "m", "x"].tolist() == [1.0, 1.0]
        assert nested.device == device


def test_columns_with_missing_values_are_named() -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.raises(TypeError, match=r"^'x': expected a tensor, .*, got a list of .*; fill missing values first"):
        DeviceDict({"x": pandas.Series([1, None], dtype="Int64")})
    kept: Any = DeviceDict({"x": pandas.Series([1, None], dtype="Int64")}, objects="keep")
    assert kept["x"].isna().tolist() == [False, True]
    assert DeviceDict({"s": pandas.Series(["a", "b"], dtype="string")}).decode("s") == ["a", "b"]


def test_arrow_tables_and_columns() -> None:
    arrow = pytest.importorskip("pyarrow")
    d = DeviceDict(arrow.table({"x": [1.0, 2.0], "s": ["a", "b"], "i": arrow.chunked_array([[1], [2]])}))
    assert d["x"].tolist() == [1, 2] and d.decode("s") == ["a", "b"] and d["i"].tolist() == [1, 2]
    with pytest.raises(
        TypeError, match=r"^'x': expected a tensor, .*, got a list of NoneType, float.*; fill missing values first"
    ):
        DeviceDict({"x": arrow.array([1.0, None])})
    twice = arrow.Table.from_arrays([arrow.array([1]), arrow.array([2])], names=["a", "a"])
    fails(ValueError, r"^the table has two columns 'a'; rename one$", lambda: DeviceDict(twice))


def test_an_error_that_is_not_about_the_value_is_raised_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no memory")

    d = DeviceDict({"x": 1.0})
    with monkeypatch.context() as patch:
        patch.setattr(torch, "tensor", fails)
        with pytest.raises(RuntimeError, match=r"^no memory$"):
            d["y"] = 2.0
    assert list(d) == ["x"]
