"""Tables keep every number: a number that the dtype of its column cannot hold is an error."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from files import DTYPES
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tensordict_lite import DeviceDict, Ragged, load
from tensordict_lite.tables import RowWriter, add_column

pytestmark = [
    pytest.mark.usefixtures("torch_mode"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning"),
]
INF, NAN = math.inf, math.nan
EXACT = {name: dtype for name, dtype in DTYPES.items() if not name.startswith("float8")}
"""Without the dtypes whose casts may return the largest number in the place of an infinity."""
PAIRS = [(one, two) for one in EXACT for two in EXACT if torch.can_cast(EXACT[one], EXACT[two])]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def as_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def made(numbers: list[float], dtype: torch.dtype) -> Tensor:
    """A tensor of a dtype with numbers that are near these."""
    if dtype.is_complex:
        return torch.tensor([complex(x, -x / 2) for x in numbers], dtype=torch.complex128).to(dtype)
    if dtype.is_floating_point:
        return torch.tensor(numbers, dtype=torch.float64).to(dtype)
    if dtype is torch.bool:
        return torch.tensor([bool(x) for x in numbers])
    info = torch.iinfo(dtype)
    whole = [int(x) if math.isfinite(x) else 0 for x in numbers]
    return torch.tensor([(x - info.min) % (1 << info.bits) + info.min for x in whole], dtype=dtype)


def is_lost(given: Tensor, dtype: torch.dtype) -> bool:
    """Whether the cast of torch wraps a number, or makes a finite number infinite."""
    numbers = torch.view_as_real(given) if given.is_complex() else given
    floating = dtype.is_floating_point or dtype.is_complex
    after = numbers.to(dtype.to_real() if floating else dtype).flatten().tolist()
    pairs = zip(numbers.flatten().tolist(), after, strict=True)
    return any(math.isfinite(x) and not math.isfinite(y) if floating else x != y for x, y in pairs)


EDGES = [s * ((1 << n) + more) for n in (0, 7, 8, 15, 16, 31, 32, 63, 64) for more in (-1, 0, 1) for s in (-1, 1)]
LIMITS = [65504.0, 65519.996, 65520.0, 3.3895e38, 3.3961e38, 3.3962e38, 3.4028235677973362e38, 3.4028235677973366e38]
NUMBERS = st.sampled_from([*EDGES, *LIMITS, *(-x for x in LIMITS), INF, -INF, NAN]) | st.floats() | st.integers()


def test_every_pair_of_dtypes(tmp_path: Path) -> None:
    like = {name: torch.zeros(1, dtype=dtype) for name, dtype in EXACT.items()}
    written: list[dict[str, Tensor]] = []
    writer = RowWriter(tmp_path / "t", like=like)

    @settings(max_examples=400, deadline=None)
    @given(st.sampled_from(PAIRS), st.lists(NUMBERS, min_size=1, max_size=3))
    def check(pair: tuple[str, str], numbers: list[float]) -> None:
        source, name = pair
        given = made([x if abs(x) < 1e308 else math.copysign(INF, x) for x in numbers], EXACT[source])
        batch = {**{key: column.expand(len(numbers)) for key, column in like.items()}, name: given}
        if is_lost(given, EXACT[name]):
            with pytest.raises(ValueError, match=rf"^'{name}': {name} cannot hold [-+.e\d]+; .* anew as {source}$"):
                writer.write(batch)
        else:
            writer.write(batch)
            written.append({key: value.to(EXACT[key]) for key, value in batch.items()})
        assert len(writer) == sum(len(rows["bool"]) for rows in written)

    check()
    writer.close()
    table = load(tmp_path / "t")
    for name in EXACT:
        assert as_bytes(table[name]) == as_bytes(torch.cat([rows[name] for rows in written])), name


@pytest.mark.parametrize(("name", "held", "lost"), [
    ("float8_e4m3fn", [448.0, -463.9, 1e-9, NAN], [465.0, -1e9, INF]),
    ("float8_e5m2", [57344.0, -61439.0, INF, NAN], [61440.0, -1e9]),
    ("float8_e8m0fnu", [1.0, 1e38, 0.0, NAN], [-1.0, INF]),
    ("complex32", [1e4 + 1j, complex(INF, 1), complex(NAN, 1)], [complex(NAN, 1e6), complex(-1e6, INF)]),
])  # fmt: skip
@pytest.mark.parametrize("kind", [np.array, torch.tensor, list], ids=["array", "tensor", "list"])
def test_dtypes_of_few_bits(
    tmp_path: Path, name: str, held: list[Any], lost: list[Any], kind: Callable[..., Any]
) -> None:
    if name not in DTYPES:
        pytest.skip("this version of torch lacks the dtype")
    with RowWriter(tmp_path / "t", like={"x": torch.ones(1, dtype=DTYPES[name])}) as writer:
        writer.write({"x": kind(held)})
        for number in lost:
            with pytest.raises(ValueError, match=f"^'x': {name} cannot hold "):
                writer.write({"x": kind([held[0], number])})
        writer.write({"x": torch.tensor(held).to(DTYPES[name])})
    found = load(tmp_path / "t")["x"]
    assert as_bytes(found) == as_bytes(torch.tensor(held).to(DTYPES[name]).repeat(2))


LARGE = (1 << 40) + 3
MESSAGE = "'n.x': {} cannot hold {}; convert the values first, or make the column anew as {}"
DENSE: list[tuple[str, Any, str]] = [
    ("int32", torch.tensor([1, LARGE]), MESSAGE.format("int32", LARGE, "int64")),
    ("int32", torch.tensor([1, LARGE])[1], MESSAGE.format("int32", LARGE, "int64")),
    ("int8", torch.tensor([200, 0]).byte(), MESSAGE.format("int8", 200, "uint8")),
    ("uint64", np.array([-1, 1]), MESSAGE.format("uint64", -1, "int64")),
    ("int64", torch.tensor([1, (1 << 64) - 1], dtype=torch.uint64), MESSAGE.format("int64", (1 << 64) - 1, "uint64")),
    ("float16", torch.tensor([1e6, 5]), MESSAGE.format("float16", 1e6, "float32")),
    ("float16", torch.tensor([NAN, -1e6, INF], requires_grad=True), MESSAGE.format("float16", -1e6, "float32")),
    ("float16", torch.tensor([70000, 0]), MESSAGE.format("float16", 70000, "int64")),
    ("float16", [1e6, 5], MESSAGE.format("float16", 1e6, "float64")),
    ("float32", [0.5, -1e300], MESSAGE.format("float32", -1e300, "float64")),
    ("float32", 1e300, "'n.x': float32 cannot hold 1e+300; torch says: value cannot be converted to type float with"),
    ("float16", 1e6, MESSAGE.format("float16", 1e6, "float64")),
    ("float16", np.float32(1e6), MESSAGE.format("float16", 1e6, "float64")),
    ("complex64", [1e300j], MESSAGE.format("complex64", 1e300, "complex128")),
    ("complex64", torch.tensor([1e300j], dtype=torch.complex128).conj(),
     MESSAGE.format("complex64", -1e300, "complex128")),
    ("int8", [300], "'n.x': int8 cannot hold [300]; torch says: value cannot be converted to type int8 without over"),
    ("int64", [0.5], "'n.x': expected numbers that int64 can hold, got float32; convert it first"),
]  # fmt: skip
RAGGED: list[tuple[str, Any, str]] = [
    ("int32", [[], [1, 2], torch.tensor([LARGE])], MESSAGE.format("int32", LARGE, "int64")),
    ("float16", [torch.ones(1).half(), torch.tensor([70000])], MESSAGE.format("float16", 70000, "int64")),
    ("uint16", [torch.ones(1).short(), torch.tensor([70000])], MESSAGE.format("uint16", 70000, "int64")),
    ("int32", Ragged.from_rows([torch.tensor([LARGE]), torch.empty(0).long()]),
     MESSAGE.format("int32", LARGE, "int64")),
    ("int32", np.array([[1, LARGE]]), MESSAGE.format("int32", LARGE, "int64")),
    ("int32", torch.tensor([[1, LARGE]]), MESSAGE.format("int32", LARGE, "int64")),
    ("float16", [[0.5], [1e6]], MESSAGE.format("float16", 1e6, "float64")),
    ("int32", np.array([[0.5]]), "'n.x': expected numbers that int32 can hold, got float64; convert it first"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "value", "message", "ragged"), [(*case, False) for case in DENSE] + [(*case, True) for case in RAGGED]
)
def test_errors(tmp_path: Path, dtype: str, value: Any, message: str, ragged: bool) -> None:
    zero = torch.zeros((1, 1) if ragged else 1, dtype=DTYPES[dtype])
    like = {"n": {"x": zero}, "y": zero}
    with RowWriter(tmp_path / "t", like=like, ragged=["x"] * ragged) as writer:
        writer.write(like)
    with RowWriter(tmp_path / "u", like={"y": [0]}) as writer:
        writer.write({"y": [0, 0, 0]})
    before = contents(tmp_path / "t"), contents(tmp_path / "u")

    with RowWriter(tmp_path / "t", append=True) as writer, pytest.raises(ValueError, match="^" + re.escape(message)):
        writer.write({"n": {"x": value}, "y": zero})
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        add_column(tmp_path / "u", ("n", "x"), [zero, value], ragged=ragged)
    assert before == (contents(tmp_path / "t"), contents(tmp_path / "u"))


def test_values_on_an_accelerator(tmp_path: Path, device: torch.device) -> None:
    with RowWriter(tmp_path / "t", like={"x": torch.zeros(1).half(), "i": torch.zeros(1).int()}) as writer:
        writer.write({"x": torch.tensor([1.5]).to(device), "i": torch.tensor([3]).to(device)})
        with pytest.raises(ValueError, match=r"^'i': int32 cannot hold 1099511627779; convert the values first, or "):
            writer.write({"x": torch.tensor([1.5]).to(device), "i": torch.tensor([LARGE]).to(device)})
    assert load(tmp_path / "t").tolist() == {"x": [1.5], "i": [3]}


def test_rounding_is_no_error(tmp_path: Path) -> None:
    like = {"x": torch.zeros(1, dtype=torch.float16), "y": torch.zeros(1)}
    with RowWriter(tmp_path / "t", like=like) as writer:
        writer.write({"x": [0.1, 65519.0, 1e-30], "y": np.array([0.1, 3.4028235e38, 1e-300])})
        writer.write({"x": 1 / 3, "y": (1 << 24) + 1})
    table = load(tmp_path / "t")
    assert table["x"].tolist() == torch.tensor([0.1, 65504.0, 0.0, 1 / 3]).half().tolist()
    assert table["y"].tolist() == torch.tensor([0.1, torch.finfo(torch.float32).max, 0.0, 1 << 24]).tolist()


@pytest.mark.parametrize(("dtype", "rows"), [
    (torch.uint16, [torch.ones(1).short(), torch.tensor([60000]), [1]]),
    (torch.float64, [torch.ones(1).half(), torch.tensor([LARGE]), [0.5]]),
])  # fmt: skip
def test_rows_of_several_dtypes(tmp_path: Path, dtype: torch.dtype, rows: list[Any]) -> None:
    with RowWriter(tmp_path / "t", like={"x": torch.zeros(1, 1, dtype=dtype)}, ragged=["x"]) as writer:
        writer.write({"x": rows})
    d = DeviceDict({"x": Ragged.from_rows([torch.zeros(1, dtype=dtype)] * 3)})
    d.rows[:] = {"x": rows}
    assert load(tmp_path / "t").tolist() == d.tolist() == {"x": [torch.as_tensor(row).tolist() for row in rows]}


def test_a_tensor_without_values_fits_every_column(tmp_path: Path) -> None:
    first: Any = {"i": [1], "ids": torch.ones(1, 1, dtype=torch.int32)}
    for like in (
        first,
        {"i": torch.empty(0, dtype=torch.complex64), "ids": torch.empty(0, 5)},
        {"i": [], "ids": torch.empty(0, 0)},
    ):
        with RowWriter(tmp_path / "t", like=like, ragged=["ids"], mode="append") as writer:
            writer.write({"i": torch.empty(0, dtype=torch.complex64), "ids": np.empty((0, 5))})
            writer.write({"i": [], "ids": torch.empty(0, 5)})
            writer.write({"i": [1, 2], "ids": Ragged.from_rows([torch.empty(0)] * 2)})
    table = load(tmp_path / "t")
    assert table["i"].tolist() == [1, 2] * 3 and table["ids"].tolist() == [[]] * 6
    assert table["i"].dtype == torch.int64 and table["ids"].values.dtype == torch.int32


@pytest.mark.parametrize(("like", "message"), [
    ({"x": torch.zeros(1, dtype=torch.int32)}, "'n.x': this table has int64, like= has int32; convert it first, "),
    ({"x": [0.5]}, "'n.x': this table has int64, like= has float32; convert it first, or open the table with app"),
    ({"ids": [[0.5]]}, "'n.ids': this table has int64, like= has float32; convert it first, or open the table"),
    ({"ids": Ragged.from_rows([[0.5]])}, "'n.ids': this table has int64, like= has float32; convert it first,"),
])  # fmt: skip
def test_like_of_another_dtype(tmp_path: Path, like: Any, message: str) -> None:
    first: Any = {"x": [1], "ids": [[1]]}
    with RowWriter(tmp_path / "t", like={"n": first}, ragged=["ids"]) as writer:
        writer.write({"n": first})
    before = contents(tmp_path / "t")
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        RowWriter(tmp_path / "t", like={"n": {**first, **like}}, ragged=["ids"], mode="append")
    assert contents(tmp_path / "t") == before
    RowWriter(tmp_path / "t", like={"n": first}, ragged=["ids"], mode="append").close()


@pytest.mark.parametrize(("batches", "ragged", "expected"), [
    ([[[], []], [[]], [[16777217], [5]]], True, [[], [], [], [16777217], [5]]),
    ([[], (), [16777217, 1, 2, 3], [5]], False, [16777217, 1, 2, 3, 5]),
])  # fmt: skip
def test_lists_without_values_do_not_decide_the_dtype(
    tmp_path: Path, batches: list[Any], ragged: bool, expected: list[Any]
) -> None:
    with RowWriter(tmp_path / "t", like={"x": [0]}) as writer:
        writer.write({"x": range(5)})
    add_column(tmp_path / "t", "y", batches, ragged=ragged)
    table = load(tmp_path / "t")
    assert table["y"].tolist() == expected
    assert (table["y"].values if ragged else table["y"]).dtype == torch.int64
    with pytest.raises(ValueError, match=r"^'z': expected numbers that int64 can hold, got float32; convert it first$"):
        add_column(tmp_path / "t", "z", [*batches, [[0.5]] if ragged else [0.5]], ragged=ragged)


def test_rows_in_memory_are_cast_as_by_torch() -> None:
    d = DeviceDict({"x": torch.zeros(2, dtype=torch.uint8), "h": torch.zeros(2).half()})
    d.rows[0] = {"x": torch.tensor(300), "h": torch.tensor(1e6)}
    assert d.tolist() == {"x": [44, 0], "h": [INF, 0.0]}
    r = DeviceDict({"ids": Ragged.from_rows([torch.tensor([1, 2], dtype=torch.uint8)])})
    r.rows[:] = {"ids": [torch.tensor([300, 1])]}
    assert r["ids"].tolist() == [[44, 1]]
    with pytest.raises(ValueError, match=r"^'ids': expected numbers that uint8 can hold, got float64; convert it"):
        r.rows[:] = {"ids": np.array([[0.5, 1.5]])}
