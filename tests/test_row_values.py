"""One way to fit a value to a row: row writes and tables store Python numbers as ``tensor[i] = number`` does."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checks import NOT_TRACED
from files import DTYPES as STORED
from files import OPAQUE
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tensordict_lite import DeviceDict, Ragged, StringEncoder, Utf8, Vocabulary, collate, load
from tensordict_lite.tables import RowWriter

UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
DTYPES = [torch.bool, *UNSIGNED, torch.int8, torch.int16, torch.int32, torch.int64,
          torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]  # fmt: skip
EDGES = [
    0, 1, -1, 127, 128, 255, 256, 300, 2**15, 2**16, 2**31, 2**32, 2**53 + 1, 2**63 - 1, -(2**63), 2**63, 2**70,
    1700000000.123, 0.1, -0.0, 1e10, 1e39, 1e300, float("inf"), float("nan"), 1.5, 1j, 1e39j, True, False,
]  # fmt: skip
NUMBERS = st.sampled_from(EDGES) | st.integers(-(2**64), 2**64) | st.floats() | st.booleans() | st.complex_numbers()


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bits."""
    return a.dtype == b.dtype and torch.equal(a.reshape(1).view(torch.uint8), b.reshape(1).view(torch.uint8))


def by_torch(number: Any, dtype: torch.dtype) -> Tensor | None:
    """What ``tensor[i] = number`` stores. None if it refuses the number, or would lose its kind or its sign."""
    target = torch.zeros(2, dtype=dtype)
    if dtype is torch.uint64 and type(number) is int and 1 << 63 <= number < 1 << 64:
        return torch.from_numpy(np.array(number, np.uint64))  # torch takes it from an array only
    try:
        if not torch.can_cast(torch.tensor(number).dtype, dtype) or (dtype in UNSIGNED and number < 0):
            return None
        target[1] = number
    except (ValueError, OverflowError, RuntimeError):
        return None
    return target[1]


@given(NUMBERS, st.sampled_from(DTYPES), st.sampled_from([1, -1, [1], slice(1, 2)]))
def test_a_number_is_stored_as_by_torch(number: Any, dtype: torch.dtype, index: Any) -> None:
    d = DeviceDict({"x": torch.zeros(2, dtype=dtype), "y": torch.zeros(2)})
    expected = by_torch(number, dtype)
    if expected is None:
        with pytest.raises(ValueError, match=r"^'x': "):
            d.rows[index] = {"y": 1.0, "x": number}
        assert not d["x"].any() and not d["y"].any()
    else:
        d.rows[index] = {"y": 1.0, "x": number}
        assert same(d["x"][1], expected) and not d["x"][0].any() and d["y"][1] == 1


@pytest.mark.parametrize(
    "value", [1700000000.123, [1700000000.123], np.float64(1700000000.123), np.array([1700000000.123])]
)
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_a_time_keeps_its_digits(value: Any, dtype: torch.dtype | None, tmp_path: Path) -> None:
    """It went through the default dtype."""
    d = DeviceDict({"t": torch.zeros(1, dtype=torch.float64)}, dtype=dtype)
    d.rows[:] = {"t": value}
    assert d["t"].item() == 1700000000.123
    for name, rows in (("dense", value), ("ragged", [[1700000000.123]])):
        like = d if name == "dense" else DeviceDict({"t": Ragged.from_rows([d["t"]])}, dtype=dtype)
        with RowWriter(tmp_path / name, like=like) as writer:
            writer.write({"t": rows})
        stored = load(tmp_path / name)["t"]
        assert (stored if name == "dense" else stored.values).item() == 1700000000.123


@pytest.mark.parametrize(("value", "text"), [
    (300, "'x': uint8 cannot hold 300; torch says: value cannot be converted to type uint8 without overflow"),
    ([[1, 300]],
     "'x': uint8 cannot hold [[1, 300]]; torch says: value cannot be converted to type uint8 without overflow"),
    (-1, "'x': uint8 cannot hold the negative numbers of -1"),
    ([[0, -1]], "'x': uint8 cannot hold the negative numbers of [[0, -1]]"),
    (np.int64(300), "'x': uint8 cannot hold 300; torch says: value cannot be converted to type uint8 without overflow"),
    (1.5, "'x': expected numbers that uint8 can hold, got float32; convert it first"),
    (torch.full((1, 2), 0.5), "'x': expected numbers that uint8 can hold, got float32; convert it first"),
    ("ab", "'x': expected numbers, got strings; encode them first"),
    (torch.eye(2).to_sparse(), "'x': expected a dense tensor, got a sparse one; convert it first"),
])  # fmt: skip
def test_rows_and_tables_refuse_the_same_values(value: Any, text: str, tmp_path: Path) -> None:
    d = DeviceDict({"y": torch.zeros(1, 2), "x": torch.zeros(1, 2, dtype=torch.uint8)})
    with RowWriter(tmp_path, like=d) as writer:
        for write in (lambda row: d.rows.__setitem__(slice(0, 1), row), writer.write):
            with pytest.raises(ValueError) as caught:  # noqa: PT011
                write({"y": torch.ones(1, 2), "x": value})
            assert str(caught.value) == text
        assert len(writer) == 0 and not d["x"].any() and not d["y"].any()


@pytest.mark.parametrize("index", [0, [0]])
@pytest.mark.parametrize("number", [2**63, 2**64 - 1, np.uint64(2**63)])
def test_uint64_has_numbers_that_int64_lacks(number: Any, index: Any) -> None:
    d = DeviceDict({"x": np.array([1, 2], dtype=np.uint64)})
    d.rows[index] = {"x": number if index == 0 else [int(number)]}
    assert d["x"].tolist() == [int(number), 2]
    assert d.equal("x", number).tolist() == [True, False]
    with pytest.raises(
        ValueError, match=r"^'x': uint64 cannot hold \[.*9223372036854775808\)?\]; torch says: an integer"
    ):
        d.rows[[0]] = {"x": [np.uint64(2**63)]}
    with pytest.raises(ValueError, match=r"^'x': uint64 cannot hold 18446744073709551616; torch says: int too big"):
        d.rows[0] = {"x": 2**64}
    with pytest.raises(
        ValueError, match=r"^'x': uint64 cannot hold the negative numbers of \[18446744073709551616, -1"
    ):
        d.rows[[0, 1]] = {"x": [2**64, -1]}


def test_the_error_of_a_width_names_the_encoder_in_use(tmp_path: Path) -> None:
    class Letters(StringEncoder):
        padding, code_dtype, code_ndim = 0, torch.int64, 1

        def encode(self, strings: Any) -> Tensor:
            width = max(map(len, strings), default=0)
            return torch.tensor([[ord(c) for c in s.ljust(width, "\0")] for s in strings])

        def decode(self, codes: Any) -> list[str]:
            return ["".join(map(chr, row)).rstrip("\0") for row in codes.tolist()]

        def __repr__(self) -> str:
            return "Letters()"

    d = DeviceDict({"s": ["abc"]}, encoders={"s": Letters()})
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        d.rows[0] = {"s": "abcd"}
    assert str(caught.value) == (
        "'s': a string takes 4 codes of Letters(), the rows of this field have 3; shorten the string, or make the "
        "field anew, wide enough for it"
    )
    d.rows[0] = {"s": "x"}
    assert d.decode("s") == ["x"]


def test_encoders_that_decode_alike_fit() -> None:
    d = DeviceDict({"s": ["abc", "d"]})
    d.rows[1] = DeviceDict({"s": "ef"}, encoders={"s": Utf8(3)})
    assert d.decode("s") == ["abc", "ef"]
    d = DeviceDict({"s": ["a"]}, encoders={"s": Vocabulary(["a", "b"])})
    with pytest.raises(ValueError, match=r"^'s': expected strings of Vocabulary.*give the strings themselves"):
        d.rows[0] = DeviceDict({"s": "b"}, encoders={"s": Vocabulary(["b", "a"])})


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("index", [-1, slice(0, 2), slice(0, 3, 2), [2, 0], [True, False, True]], ids=repr)
def test_a_write_that_fails_is_undone_for_every_dtype(index: Any) -> None:
    """Kernels for an index lack some dtypes, in the write and in what undoes it."""

    def filled(dtype: torch.dtype, byte: int, *shape: int) -> Tensor:
        return torch.full((*shape, dtype.itemsize), byte, dtype=torch.uint8).view(dtype)[..., 0]

    def bits(d: DeviceDict) -> list[Any]:
        return [
            leaf.clone(memory_format=torch.contiguous_format).view(torch.uint8).tolist()
            for leaf in tree_leaves(d.drop("w"))
        ]

    rows = np.arange(3)[index].shape
    for dtype in {**STORED, **OPAQUE}.values():
        offsets = torch.tensor([0, 2, 4, 6])
        fields = {
            "flat": filled(dtype, 1, 3),
            "wide": filled(dtype, 1, 3, 2),
            "gaps": filled(dtype, 1, 3, 2)[:, 0],
            "ragged": Ragged(filled(dtype, 1, 6), offsets),
        }
        flat, wide = filled(dtype, 0, *rows), filled(dtype, 0, *rows, 2)
        ragged = Ragged(wide.flatten(), offsets[: rows[0] + 1]) if rows else wide
        step = {"flat": flat, "wide": wide, "gaps": flat, "ragged": ragged, "w": torch.ones(rows)}
        d = DeviceDict({**fields, "w": torch.zeros(3, requires_grad=True)})
        before = bits(d)
        with pytest.raises(RuntimeError, match=r"^'w': a (leaf|view of a leaf) Variable that requires grad"):
            d.rows[index] = step
        assert bits(d) == before, dtype
        with torch.no_grad():
            d.rows[index] = step
        assert bits(d) != before, dtype


def test_an_undo_that_fails_does_not_stop_the_others() -> None:
    frozen = torch.nn.Parameter(torch.ones(3, dtype=torch.uint16), requires_grad=False)  # has no kernel for an index
    d = DeviceDict({"x": torch.zeros(3), "frozen": frozen, "y": torch.zeros(3)})
    with pytest.raises(RuntimeError, match=r"^'frozen': "):
        d.rows[[0, 1]] = {"x": [1.0, 1.0], "frozen": [7, 7], "y": [1.0, 1.0]}
    assert d.tolist() == {"x": [0, 0, 0], "frozen": [1, 1, 1], "y": [0, 0, 0]}


@pytest.mark.parametrize("ragged", [(), ("text",)])
def test_a_list_without_strings_is_no_row(ragged: tuple[str, ...]) -> None:
    d = collate([{"text": "abc"}, {"text": "d"}], ragged=ragged)
    for index in ([], slice(0, 0)):
        d.rows[index] = {"text": []}
    with pytest.raises(ValueError, match=r"^'text': expected "):
        d.rows[0] = {"text": []}
    assert d.decode("text") == ["abc", "d"]


@NOT_TRACED
@pytest.mark.parametrize("index", [2, slice(1, 3), [1, 3], [True, False, True, False]])
def test_ctrl_c_leaves_all_fields_or_none_written(index: Any) -> None:
    d = DeviceDict({f"k{i}": torch.zeros(4, 1 + i, dtype=torch.uint16 if i % 3 else torch.float32) for i in range(40)})
    step = {
        key: torch.ones_like(value[index if isinstance(index, int) else torch.arange(4)[index]])
        for key, value in d.items()
    }
    armed = False

    def interrupt(*_: Any) -> None:
        if armed:
            raise KeyboardInterrupt

    gc.disable()  # an interrupt in the finalizer of an object of another test would be lost
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(300):
            for value in d.values():
                value.zero_()
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 3e-4))
            with contextlib.suppress(KeyboardInterrupt), contextlib.suppress(KeyboardInterrupt):
                armed = True
                d.rows[index] = step
                armed = False
            armed = False
            assert len({bool(value.to(torch.int32).any()) for value in d.values()}) == 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()


@pytest.mark.parametrize("index", [1, slice(0, 2), slice(0, 3, 2), [2, 0]], ids=repr)
def test_numbers_and_tensors_in_one_write(index: Any) -> None:
    """Numbers go straight into the rows, after all values are validated."""
    fields = {"x": torch.zeros(3, 2), "done": torch.zeros(3, dtype=torch.bool), "n": {"id": torch.zeros(3).long()}}
    d, plain = DeviceDict(fields).clone(), DeviceDict(fields).clone()
    d.rows[index] = {"x": torch.ones(2), "done": True, "n": {"id": 7}}
    plain["x"][index], plain["done"][index], plain["n", "id"][index] = 1.0, True, 7
    assert d == plain
    for wrong, text in (
        ({"id": 2**63}, "'n.id': int64 cannot hold"),
        ({"id": 0.5}, "'n.id': expected numbers that int64 can hold, got float32"),
    ):
        with pytest.raises(ValueError, match=f"^{text}"):
            d.rows[index] = {"x": torch.zeros(2), "done": False, "n": wrong}
        assert d == plain


@pytest.mark.parametrize("index", [1, slice(0, 2), [2, 0]], ids=repr)
def test_a_field_with_the_negative_bit(index: Any) -> None:
    """torch's call for a list of tensors refuses it, and writes nothing: each field is written alone then."""
    number = torch.ones(3)
    d = DeviceDict({"x": torch.zeros(3), "y": torch._neg_view(number), "z": torch.zeros(3)})
    assert d["y"].is_neg()
    rows = torch.zeros(3)[index].shape
    d.rows[index] = {"x": torch.ones(rows), "y": torch.full(rows, 5.0), "z": 2.0}
    assert [d[key][index].unique().tolist() for key in d] == [[1], [5], [2]]
    assert number[index].unique().tolist() == [-5]
    with pytest.raises(ValueError, match=r"^'z': "):
        d.rows[index] = {"x": torch.zeros(rows), "y": torch.zeros(rows), "z": torch.zeros(9)}
    assert [d[key][index].unique().tolist() for key in d] == [[1], [5], [2]]


def test_a_number_for_rows_of_fields_that_do_not_agree() -> None:
    d = DeviceDict({"x": torch.zeros(3), "n": {"y": torch.zeros(4)}})
    for index in (0, 3, slice(0, 1), [0]):
        with pytest.raises(ValueError, match=r"^rows need fields that agree on their first dimension"):
            d.rows[index] = {"x": 1.0, "n": {"y": 1.0}}
    assert not d["x"].any() and not d["n", "y"].any()
