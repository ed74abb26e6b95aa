"""`fill_`: the contents of a dict in the memory of another, for static inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks import check_invariants, fails
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tensordict_lite import DeviceDict, DeviceMismatchError, TypedDeviceDict, Vocabulary, prefetch

DTYPES = [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.bfloat16]


def static(device: Any = "cpu") -> DeviceDict:
    data = {"x": torch.zeros(2, 3), "s": ["Grace", "Bo"], "n": {"y": torch.zeros(2, dtype=torch.int64)}}
    return DeviceDict(data, device=device)


def batch(**changes: Any) -> dict[str, Any]:
    return {"x": torch.arange(6.0).reshape(2, 3), "s": ["Ada", "Cy"], "n": {"y": torch.tensor([3, 4])}, **changes}


def emptied(d: DeviceDict) -> DeviceDict:
    for tensor in d._tensors():
        tensor.zero_()
    return d


class TestFill:
    @pytest.mark.parametrize("non_blocking", [False, True])
    @pytest.mark.parametrize("pack", [False, True])
    def test_the_tensors_stay_the_same(self, device: torch.device, pack: bool, non_blocking: bool) -> None:
        for where in (device, "cpu"):
            d = static(where).pack() if pack else static(where)
            before, was_packed = d._tensors(), d.is_packed
            for source in ("cpu", device):
                other = DeviceDict(batch(s=["Ada", "Susan"])).to(source)
                assert emptied(d).fill_(other.pack() if pack else other, non_blocking) is d
                check_invariants(d)
                assert all(a is b for a, b in zip(d._tensors(), before, strict=True))
                assert d.cpu().tolist() == other.cpu().tolist() and d.is_packed is was_packed

    def test_a_plain_mapping_is_converted_with_the_options_of_the_dict(self) -> None:
        d = DeviceDict({"s": ["a", "b"], "x": [1.0]}, encoders={"s": Vocabulary(["a", "b"])}, dtype=torch.float64)
        assert d.fill_({"x": [2.5], "s": ["b", "b"]}).tolist() == {"s": ["b", "b"], "x": [2.5]}

    def test_shorter_strings_are_padded_and_other_keys_may_come_first(self) -> None:
        d = static().fill_({"n": {"y": torch.tensor([1, 2])}, "s": ["A", ""], "x": torch.ones(2, 3)})
        assert d.decode("s") == ["A", ""] and list(d) == ["x", "s", "n"]

    def test_kept_objects_are_replaced(self) -> None:
        d = DeviceDict({"x": 0.0, "o": None, "n": {"p": 1.5j, "q": {1}}}, objects="keep")
        d.fill_(DeviceDict({"x": 1.0, "o": {2}, "n": {"p": 2j, "q": None}}, objects="keep"))
        assert d["o"] == {2} and d["n", "q"] is None and d["x"] == 1

    def test_the_gaps_between_the_fields_are_not_written(self) -> None:
        """They may be memory of the user, if aligned parts of one tensor look like a packed dict."""
        memory = torch.full((35,), 7.0)
        d = DeviceDict({"a": memory[0:3], "b": memory[16:19], "c": memory[32:35]})
        assert d.is_packed
        d.fill_(DeviceDict({key: torch.full((3,), float(i)) for i, key in enumerate("abc")}).pack())
        assert d.tolist() == {"a": [0.0] * 3, "b": [1.0] * 3, "c": [2.0] * 3}
        assert memory[3:16].eq(7).all() and memory[19:32].eq(7).all()

    def test_memory_that_both_share(self) -> None:
        memory = torch.arange(6.0)
        d = DeviceDict({"x": memory[1:], "y": memory[:5].clone()})
        d.fill_(DeviceDict({"x": memory[:5], "y": memory[1:]}))
        assert d["x"].tolist() == [0, 1, 2, 3, 4] and d["y"].tolist() == [1, 2, 3, 4, 5]
        assert d.fill_(d) is d and d["x"].tolist() == [0, 1, 2, 3, 4]

    def test_autograd_records_nothing(self) -> None:
        leaf = torch.zeros(2, requires_grad=True)
        d = DeviceDict({"x": leaf, "y": torch.zeros(2)})
        d.fill_({"x": torch.ones(2), "y": torch.ones(2, requires_grad=True) * 2})
        assert leaf.is_leaf and leaf.tolist() == [1, 1] and not d["y"].requires_grad and d["y"].tolist() == [2, 2]

    def test_a_typed_dict_takes_its_class_and_others(self) -> None:
        class Inputs(TypedDeviceDict):
            x: Tensor

        d = Inputs(x=torch.zeros(2))
        x = d.x
        assert d.fill_(Inputs(x=torch.ones(2))).fill_({"x": torch.full((2,), 2.0)}).x is x and x.tolist() == [2, 2]

    @given(st.data())
    def test_any_fields(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, 6))
        specs = [
            (data.draw(st.sampled_from(DTYPES)), data.draw(st.lists(st.integers(0, 3), max_size=3)))
            for _ in range(count)
        ]

        def make(value: int) -> DeviceDict:
            made = DeviceDict({"n": {}}, device="cpu")
            for i, (dtype, shape) in enumerate(specs):
                made["n" if i % 2 else "m", str(i)] = torch.full(shape, value, dtype=dtype)
            return made.pack() if data.draw(st.booleans()) else made

        d, other = make(0), make(1)
        d.fill_(other)
        assert d == other
        other = emptied(other)
        assert all(tensor.eq(1).all() for tensor in d._tensors())


class TestErrors:
    @pytest.mark.parametrize(("changes", "kind", "message"), [
        ({"x": torch.ones(3, 3)}, ValueError,
         r"'x': expected float32\[2, 3\], got float32\[3, 3\]; "
         "fill_ casts and broadcasts nothing, so for a last batch that is smaller, give the loader drop_last"),
        ({"x": torch.ones(3)}, ValueError, r"'x': expected float32\[2, 3\], got float32\[3\]; fill_ casts"),
        ({"x": torch.ones(2, 3).half()}, ValueError, r"'x': expected float32\[2, 3\], got float16\[2, 3\]"),
        ({"n": {"y": 3}}, ValueError, r"'n\.y': expected int64\[2\], got int64\[\]; fill_ casts"),
        ({"n": torch.ones(2)}, TypeError, r"^'n': expected a mapping, got float32\[2\] in the given mapping$"),
        ({"n": {}}, ValueError, r"the given mapping lacks 'n\.y', which this DeviceDict has$"),
        ({"z": 1}, ValueError, "the given mapping has 'z', which this DeviceDict lacks$"),
        ({"s": ["A", "Bernadette"]}, ValueError,
         r"'s': a string takes 10 codes of Utf8\(\), the rows of this field "
         "have 5; shorten the string, or make the field anew, wide enough for it$"),
        ({"s": torch.zeros(2, 5, dtype=torch.uint8)}, None, ""),
        ({"x": torch.ones(2, 3).to_sparse()}, ValueError,
         "'x': fill_ takes dense tensors, got one that is sparse, nested or quantized"),
        ({"x": torch.ones(2, 3, device="meta")}, DeviceMismatchError, "'x'|'n.y'"),
    ])  # fmt: skip
    def test_nothing_is_written(self, changes: Any, kind: Any, message: str) -> None:
        d = static()
        if kind is None:
            d.fill_(batch(**changes))
            return
        fails(kind, message, lambda: d.fill_(batch(**changes)))
        assert d == static()

    def test_other_encoders(self) -> None:
        d = static()
        other = DeviceDict(batch(), encoders={"s": Vocabulary(["Ada", "Cy"])})
        message = r"'s': expected strings of Utf8\(\), got "
        with pytest.raises(ValueError, match=message + r"strings of Vocabulary\(\['Ada', 'Cy'\]\); give the strings"):
            d.fill_(other)
        plain = DeviceDict(batch(s=torch.zeros(2, 5, dtype=torch.uint8)))
        fails(ValueError, message + "numbers; encode both alike$", lambda: d.fill_(plain))
        assert d == static()

    def test_what_cannot_be_written(self) -> None:
        d = DeviceDict({"y": torch.zeros(2), "x": torch.zeros(1).expand(2)})
        with pytest.raises(
            RuntimeError, match=r"'x' is expanded: its elements share memory; clone\(\) it before fill_"
        ):
            d.fill_({"x": torch.ones(2), "y": torch.ones(2)})
        assert d["y"].tolist() == [0, 0]
        with torch.inference_mode():
            d = DeviceDict({"x": torch.zeros(2)})
            assert d.fill_({"x": torch.ones(2)})["x"].tolist() == [1, 1]
        with pytest.raises(
            RuntimeError, match=r"'x' is an inference tensor; clone\(\) it before fill_, or use torch\.inference_mode"
        ):
            d.fill_({"x": torch.ones(2)})

    def test_no_mapping(self) -> None:
        with pytest.raises(TypeError, match="fill_ takes a mapping with the keys of this DeviceDict, got float32"):
            static().fill_(torch.ones(1))  # type: ignore[arg-type]


class TestSlots:
    @pytest.mark.parametrize("slots", [1, 2, 3])
    def test_the_batches_take_turns(self, device: torch.device, slots: int) -> None:
        for where in (device, "cpu"):
            source = [DeviceDict({"x": torch.full((4,), float(i)), "s": [str(i)]}) for i in range(7)]
            got: list[Any] = []
            values: list[float] = []
            for d in prefetch(source, where, slots=slots):
                got.append(d)
                values.append(float(d["x"].cpu()[3]))
                assert d.cpu().decode("s") == [str(len(got) - 1)]
            assert values == list(range(7)) and len({id(d) for d in got}) == min(slots, 7)
            assert all(d is got[i % slots] for i, d in enumerate(got))
            assert [float(d["x"][0]) for d in source] == list(range(7)), "the batches of the loader are not written"

    def test_errors(self, device: torch.device) -> None:
        with pytest.raises(
            ValueError, match=r"prefetch takes depth= or slots=, got both; 3 slots copy 2 batches ahead"
        ):
            prefetch([], "cpu", depth=2, slots=3)
        with pytest.raises(ValueError, match="prefetch takes slots of at least 1, an int, or None, got 0"):
            prefetch([], "cpu", slots=0)
        for where in (device, "cpu"):
            with pytest.raises(
                TypeError, match=r"slots= takes batches that are DeviceDicts, got a mapping; give the Data"
            ):
                list(prefetch([{"x": torch.ones(2)}], where, slots=2))
            sizes = [DeviceDict({"x": torch.ones(n)}) for n in (2, 2, 1)]
            got = prefetch(sizes, where, slots=1)
            with pytest.raises(ValueError, match=r"'x': expected float32\[2\], got float32\[1\]; .*drop_last"):
                list(got)
