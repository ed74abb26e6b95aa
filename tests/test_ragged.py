"""`Ragged`: the class itself, its rows, and what every other part of the package does with it."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checks import check_invariants, fails
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter  # pyright: ignore[reportPrivateImportUsage]
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, default_collate

from tensordict_lite import (
    DeviceDict,
    DeviceMismatchError,
    JoinedRows,
    Ragged,
    Tokenizer,
    TypedDeviceDict,
    Utf8,
    Vocabulary,
    cat,
    collate,
    load,
    prefetch,
    stack,
    to_device,
)
from tensordict_lite.tables import RowWriter

LENGTHS = [2, 0, 3, 1]
ROWS = [[0, 1], [], [2, 3, 4], [5]]


class Typed(TypedDeviceDict):
    """At module level, as what is pickled must be."""

    ids: Ragged
    y: Tensor


def ragged() -> Ragged:
    return Ragged.from_rows([torch.tensor(row, dtype=torch.float32) for row in ROWS])


def made() -> Any:
    """Two fields with the same offsets, one with others, one nested; and dense and encoded fields."""
    samples = [
        {
            "x": float(i),
            "ids": torch.arange(n) + 0.5,
            "box": torch.ones(n, 2) * i,
            "s": "ab"[: i % 3],
            "n": {"e": [i] * i},
        }
        for i, n in enumerate(LENGTHS)
    ]
    return collate(samples, ragged=["ids", "box", "s", ("n", "e")])


def plain(field: Ragged) -> list[Any]:
    return [row.tolist() for row in field.unbind()]


def through_torch_save(d: Any) -> Any:
    file = io.BytesIO()
    torch.save(d, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class TestClass:
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_constructor(self, dtype: torch.dtype) -> None:
        values, offsets = torch.arange(6), torch.tensor([0, 2, 2, 5, 6], dtype=dtype)
        field = Ragged(values, offsets)
        check_invariants(field)
        assert field.values is values and field.device == values.device and field.dtype is torch.int64
        assert field.offsets.dtype is torch.int32 and (field.offsets is offsets) == (dtype is torch.int32)
        assert field._lengths.longest == field.max_length == 3 and field.lengths.tolist() == LENGTHS
        assert Ragged([0, 1, 2, 3, 4, 5], offsets.numpy()) == Ragged(np.arange(6), offsets.tolist()) == field

    def test_rows_that_need_int64(self) -> None:
        many = 1 << 31
        field = Ragged(torch.zeros(1).expand(many), torch.tensor([0, 5, many]))
        assert field.offsets.dtype is torch.int64 and field.max_length == many - 5
        assert len(field[0]) == 5 and field[:1].offsets.dtype is torch.int32

    def test_without_rows_and_without_values(self) -> None:
        none = Ragged(torch.zeros(0, 2), torch.tensor([0]))
        assert none.max_length == 0 and none.lengths.tolist() == none.unbind() == none.tolist() == []
        assert none.padded().shape == (0, 0, 2) and none.mask().shape == (0, 0) and len(none) == 0
        assert none.positions().shape == none.row_ids().shape == (0,) and list(none) == []
        empty = Ragged.from_rows([[], []])
        assert empty.values.dtype is torch.float32 and empty.max_length == 0 and plain(empty) == [[], []]
        assert empty.padded().shape == (2, 0) and empty[[1, 0, 1]].tolist() == [[], [], []]

    @pytest.mark.parametrize(("rows", "expected"), [
        (ROWS, ROWS),
        ([[], [0.5]], [[], [0.5]]),
        ((np.arange(2), np.arange(0)), [[0, 1], []]),
        ([torch.ones(1, 2), torch.ones(0, 2)], [[[1, 1]], []]),
        ([[], torch.ones(1, 2)], [[], [[1, 1]]]),
        ([range(2), (3,)], [[0, 1], [3]]),
        (torch.arange(4).view(2, 2), [[0, 1], [2, 3]]),
        (iter([[1], [2]]), [[1], [2]]),
        ([[True], [False, True]], [[True], [False, True]]),
        ([[1], [0.5]], [[1.0], [0.5]]),
    ])  # fmt: skip
    def test_from_rows(self, rows: Any, expected: Any) -> None:
        field = Ragged.from_rows(rows)
        check_invariants(field)
        assert field.tolist() == expected and field.offsets.dtype is torch.int32
        assert Ragged.from_rows(expected, "meta").device == torch.device("meta")

    @pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
    def test_nested_tensors_in_and_out(self) -> None:
        nested = ragged().nested()
        assert nested.layout is torch.jagged and [row.tolist() for row in nested.unbind()] == ROWS
        assert Ragged.from_rows(nested) == ragged()
        d: Any = DeviceDict({"x": nested})
        with pytest.raises(
            TypeError, match=r"^'x': expected a field with rows, got a nested tensor; store Ragged.from_rows"
        ):
            len(d.rows)

    @pytest.mark.parametrize(("rows", "error", "message"), [
        ([], ValueError, r"^from_rows takes at least one row, got none; without rows, Ragged\(values, \[0\]\)$"),
        ("text", TypeError, "^from_rows takes a list of rows, got "),
        (3, TypeError, "^from_rows takes a list of rows, got "),
        ({"a": [1]}, TypeError, "^from_rows takes a list of rows, got a mapping$"),
        ([[1], "a"], TypeError, "^row 1: expected numbers, got a str; collate"),
        ([[1], {"a": 1}], TypeError, "^row 1: expected numbers, got a mapping; collate"),
        ([[1], None], TypeError, "^row 1: "),
        ([[1], 2], ValueError, r"^row 1: expected int64\[\*\], as row 0, got int64\[\]; rows have"),
        ([2], ValueError, r"^row 0: expected int64\[\*\], as row 0, got int64\[\]"),
        ([torch.ones(1), torch.tensor([1])], ValueError, r"^row 1: expected float32.*, got int64\[1\]"),
        ([["a"], ["b", "c"]], TypeError, "^row 0: expected numbers, got a list; collate"),
        ([torch.ones(1), torch.ones(1, 1)], ValueError, r"^row 1: expected float32.*, got float32\[1, 1\]"),
        ([torch.ones(1), torch.ones(1, device="meta")], DeviceMismatchError,
         r"^row 1 is on meta, row 0 is on cpu; move it with .to\('cpu'\)$"),
    ])  # fmt: skip
    def test_from_rows_refuses(self, rows: Any, error: type[Exception], message: str) -> None:
        fails(error, message, lambda: Ragged.from_rows(rows))

    @pytest.mark.parametrize(("change", "message"), [
        ({"values": 3}, r"^'values': expected a dense tensor \[total, \.\.\.\], the values of all rows, got an int$"),
        ({"values": torch.tensor(3)}, r"^'values': expected a dense tensor"),
        ({"values": torch.ones(6).to_sparse()}, "^'values': expected a dense tensor"),
        ({"values": {"a": 1}}, "^'values': expected a dense tensor"),
        ({"offsets": [0.0, 6.0]}, r"^'offsets': expected int32 or int64 \[rows \+ 1\], got float32\[2\]$"),
        ({"offsets": torch.tensor([0, 6], dtype=torch.int16)},
         r"^'offsets': expected int32 or int64 \[rows \+ 1\], got int16\[2\]$"),
        ({"offsets": [[0, 6]]}, r"^'offsets': expected int32 or int64"),
        ({"offsets": None}, "^'offsets': expected int32 or int64"),
        ({"offsets": torch.ones(0).int()},
         r"^'offsets': expected \[rows \+ 1\] offsets, got none; for no rows give \[0\]$"),
        ({"offsets": [1, 6]}, "^'offsets': expected 0 as the first, got 1$"),
        ({"offsets": [0, 7]}, "^'offsets': expected 6 as the last, the number of values, got 7$"),
        ({"offsets": [0]}, "^'offsets': expected 6 as the last, the number of values, got 0$"),
        ({"offsets": [0, 4, 3, 6]}, "^'offsets': expected ascending offsets, got 3 after 4 at row 1$"),
        ({"offsets": [0, -(1 << 63), 6]},
         "^'offsets': expected ascending offsets, got -9223372036854775808 after 0 at row 0"),
        ({"offsets": [0, (1 << 32) + 1, 6]}, "^'offsets': expected ascending offsets, got 6 after 4294967297 at row 1"),
    ])  # fmt: skip
    def test_invalid_rows(self, change: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Ragged(**{"values": torch.arange(6), "offsets": torch.tensor([0, 2, 2, 5, 6]), **change})

    def test_two_devices(self) -> None:
        with pytest.raises(
            DeviceMismatchError, match=r"^'offsets' is on meta, 'values' is on cpu; move one of them with .to\(...\)$"
        ):
            Ragged(torch.ones(2), torch.zeros(2, dtype=torch.int32, device="meta"))

    def test_attributes_can_be_set(self) -> None:
        """As frameworks set the fields of a dataclass, which they find and copy."""
        field, other = ragged(), ragged()
        assert [one.name for one in dataclasses.fields(field)] == ["values", "offsets"]
        shared = field.with_values(field.values)
        field.values, field.offsets = torch.arange(3), torch.tensor([0, 1, 3], dtype=torch.int32)
        assert field.tolist() == [[0], [1, 2]] and field.max_length == 2 and shared == other

    @pytest.mark.parametrize("way", ["attribute", "pytree"])
    def test_a_dict_stores_no_invalid_offsets(self, way: str) -> None:
        """An attribute and pytree validate nothing, so insertion does."""

        def with_offsets(*offsets: int) -> Ragged:
            new = torch.tensor(offsets, dtype=torch.int32)
            if way == "pytree":
                return pytree.tree_map(lambda t: new if t.dtype == torch.int32 else t, ragged())
            field = ragged()
            field.offsets = new
            return field

        d: Any = DeviceDict({"n": {"r": ragged()}})
        for offsets, message in (
            ([0, 4, 3, 6], "'offsets': expected ascending offsets, got 3 after 4 at row 1"),
            ([1, 6], "'offsets': expected 0 as the first, got 1"),
            ([0, 5], "'offsets': expected 6 as the last, the number of values, got 5"),
        ):
            calls: list[Callable[[Any], Any]] = [
                lambda wrong: d.update(n={"r": wrong}),
                lambda wrong: d.__setitem__(("n", "r"), wrong),
                lambda wrong: DeviceDict({"n": {"r": wrong}}),
            ]
            for call in calls:
                with pytest.raises(ValueError, match=f"^'n.r': {message}$"):
                    call(with_offsets(*offsets))
            with pytest.raises(ValueError, match=f"^'r': {message}$"):
                d["n"]["r"] = with_offsets(*offsets)
        assert d["n", "r"] == ragged()
        d["n", "r"] = with_offsets(0, 1, 6)
        assert d["n", "r"]._lengths.longest == 5

    def test_what_a_tensor_has(self) -> None:
        field = ragged()
        assert type(field.to(torch.float64)) is Ragged and field.to(torch.float64).dtype is torch.float64
        assert field.to("cpu") is field.cpu() is field.to(torch.ones(1)) is field
        assert field.to("cpu", copy=True) is not field and field.to("cpu", copy=True) == field
        assert torch.ones(3).to(field.device).device == DeviceDict({"x": 1}).to(field).device == field.device  # type: ignore[arg-type]
        assert field.requires_grad_() is field and field.values.requires_grad
        assert not field.detach().values.requires_grad and field.detach().offsets is field.offsets
        copied = field.detach().clone()
        assert copied.offsets is not field.offsets and copied == field
        shared, own = field.detach().numpy(), field.detach().numpy(copy=True)
        field.detach().values[0] = 9
        assert shared["values"][0] == 9 and own["values"][0] == 0 and own["offsets"].tolist() == [0, 2, 2, 5, 6]
        fails(TypeError, r"^unhashable type: 'Ragged'$", lambda: hash(field))
        fails(TypeError, "^rows are indexed by int, slice, mask or indices", lambda: field["values"])
        fails(RuntimeError, "only Tensors of floating point", lambda: Ragged.from_rows([[1]]).requires_grad_())
        assert not hasattr(field, "rows")
        with pytest.raises(
            AttributeError, match=r"^a Ragged is a value and has no \.rows: r\[3\] is a row, .*; for the methods of"
        ):
            field.rows  # type: ignore[attr-defined]  # noqa: B018

    def test_equality(self) -> None:
        assert ragged() == ragged() and ragged() != ragged()[:3] and ragged() != ragged().to(torch.float64)
        assert ragged() != Ragged(ragged().values, [0, 1, 2, 5, 6]) and (ragged() == 3) is False

    def test_what_it_says_of_its_rows(self) -> None:
        field = ragged()
        assert field.lengths.tolist() == LENGTHS and field.lengths.dtype is torch.int32 and field.max_length == 3
        assert field.positions().tolist() == [0, 1, 0, 1, 2, 0] and field.positions().dtype is torch.int64
        assert field.row_ids().tolist() == [0, 0, 2, 2, 2, 3] and field.row_ids().dtype is torch.int64
        assert plain(field) == ROWS and all(row._base is field.values for row in field.unbind())

    @pytest.mark.parametrize("shape", [(), (2,), (1, 2)])
    @pytest.mark.parametrize("side", ["right", "left"])
    def test_padded(self, side: Any, shape: tuple[int, ...]) -> None:
        field = ragged().with_values(torch.rand(6, *shape))
        out, mask = field.padded(-1, side), field.mask(side)
        assert out.shape == (4, 3, *shape) and mask.shape == (4, 3) and mask.dtype is torch.bool
        assert torch.equal(out[mask], field.values) and (out[~mask] == -1).all()
        assert mask.sum(1).tolist() == LENGTHS
        assert (mask[:, 0 if side == "right" else -1]).tolist() == [n > 0 for n in LENGTHS]
        for call in (partial(field.padded, 0), field.mask):
            with pytest.raises(ValueError, match=r'^side is "right" or "left", got \'top\'$'):
                call("top")  # type: ignore[arg-type]

    @pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.float8_e5m2])
    def test_padded_of_any_dtype(self, dtype: torch.dtype) -> None:
        out = Ragged(torch.tensor([1, 0, 1]).to(dtype), [0, 2, 3]).padded(1)
        assert out.dtype is dtype and out.to(torch.float32).tolist() == [[1, 0], [1, 1]]

    def test_with_values(self) -> None:
        field = ragged()
        other = field.with_values(torch.arange(12).view(6, 2))
        check_invariants(other)
        assert other.offsets is field.offsets and other._lengths is field._lengths and type(other) is Ragged
        for wrong in (torch.ones(5), torch.tensor(1.0), [1] * 6):
            with pytest.raises(
                ValueError,
                match=r"^'values': expected a tensor \[6, \.\.\.\], got .*; a ragged field keeps the number of",
            ):
                field.with_values(wrong)  # type: ignore[arg-type]
        fails(DeviceMismatchError, "^'values' is on meta", lambda: field.with_values(torch.ones(6, device="meta")))

    def test_gradients(self) -> None:
        w = torch.ones(6, requires_grad=True)
        field = ragged().with_values(w * 2)
        (field.padded(5).sum() + field[[2, 2]].values.sum() + field[1:3].values.sum()).backward()
        assert w.grad is not None and w.grad.tolist() == [2, 2, 8, 8, 8, 2]

    def test_meta_has_no_values_to_read(self) -> None:
        field = Ragged(torch.ones(4, device="meta"), torch.zeros(3, dtype=torch.int32, device="meta"))
        assert field._lengths.longest is None and field.lengths.shape == (2,)
        assert ragged().to("meta").max_length == 3 and ragged().to("meta").padded().shape == (4, 3)

    def test_display(self) -> None:
        d: Any = made()
        assert repr(ragged()) == "Ragged(cpu, 4 rows, float32, 6 values)"
        assert repr(d["box"]) == "Ragged(cpu, 4 rows, float32, 6 values of shape [2])"
        assert "ids   float32[4, *] of 6 values" in repr(d) and "box   float32[4, *, 2] of 6 values" in repr(d)
        assert ", 5 fields, " in repr(d) and "offsets" not in repr(d) and "float32[4, *] of 6 values" in d._repr_html_()
        assert repr(Ragged.from_rows([[1]])) == "Ragged(cpu, 1 row, int64, 1 value)"
        assert "Ragged('a', 'b')" in repr(pytree.tree_unflatten(["a", "b"], pytree.tree_structure(ragged())))
        d = pytree.tree_map(lambda t: None if t.ndim == 1 else t, DeviceDict({"r": ragged(), "x": torch.ones(3, 1)}))
        assert "object Ragged" in repr(d) and d.detach()["r"] is d["r"] and d.detach()["x"].equal(d["x"])

    def test_offsets_on_an_accelerator_are_not_read(self, device: torch.device) -> None:
        wrong = torch.tensor([0, 9, 3], dtype=torch.int32).to(device)
        field = Ragged(torch.ones(6).to(device), wrong)
        assert field._lengths.longest is None
        good = ragged().to(device)
        assert good._lengths.longest == 3 and good.lengths.cpu().tolist() == LENGTHS
        assert Ragged(good.values, good.offsets).max_length == 3, "computed, once"
        assert torch.equal(good.padded(7).cpu(), ragged().padded(7))
        assert torch.equal(good.mask("left").cpu(), ragged().mask("left"))
        assert good.positions().cpu().tolist() == ragged().positions().tolist() and plain(good) == ROWS
        assert Ragged.from_rows(ROWS, device).device == device


COPIES: dict[str, Callable[[Any], Any]] = {
    "to": lambda d: d.to("cpu"),
    "to, copied": lambda d: d.to("cpu", copy=True),
    "to meta": lambda d: d.to("meta"),
    "to dtype": lambda d: d.to(torch.float64),
    "clone": lambda d: d.clone(),
    "copy": lambda d: d.copy(),
    "copy.copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "detach": lambda d: d.detach(),
    "pack": lambda d: d.pack(),
    "contiguous": lambda d: d.contiguous(),
    **{f"pickle {n}": lambda d, n=n: pickle.loads(pickle.dumps(d, n)) for n in range(2, 6)},
    "pickle, packed": lambda d: pickle.loads(pickle.dumps(d.pack())),
    "queue": lambda d: pickle.loads(ForkingPickler.dumps(d)),
    "queue, packed": lambda d: pickle.loads(ForkingPickler.dumps(d.pack())),
    "torch.save": through_torch_save,
    "pytree": lambda d: pytree.tree_map(torch.clone, d),
    "map": lambda d: d.map(torch.clone),
    "constructor": lambda d: type(d)(dict(d)),
    "arithmetic": lambda d: d.clone().mul_(1),
    "cat": lambda d: cat([d]),
    "rows": lambda d: d.rows[:],
    "rows, copied": lambda d: d.rows[list(range(4))],
    "shuffled twice": lambda d: d.rows[[2, 0, 3, 1]].rows[[1, 3, 0, 2]],
    "default_collate": lambda d: default_collate(d.rows.__getitems__([0, 1, 2, 3])),
    "collate of rows": lambda d: collate(list(d.rows), ragged=["ids", "box"]),
    "__getitems__": lambda d: collate(d.rows.__getitems__([0, 1, 2, 3])),
    "prefetch": lambda d: next(iter(prefetch([d], "cpu"))),
    "to_device": lambda d: to_device({"d": [d]}, "cpu")["d"][0],
    "torch.clone": torch.clone,
    "in a list": lambda d: through_torch_save({"state": [d]})["state"][0],
}


class TestWholeDicts:
    @pytest.mark.parametrize("name", COPIES)
    def test_every_copy(self, name: str) -> None:
        """A copy has the same rows, one tensor for offsets that were shared, and the length of the longest row."""
        d: Any = made().select("x", "ids", "box")
        out = COPIES[name](d)
        check_invariants(out)
        assert type(out["ids"]) is type(out["box"]) is Ragged
        assert out["ids"]._lengths.longest == (None if name == "pytree" else 3) and out["ids"].max_length == 3
        if name not in ("pytree", "clone", "torch.clone", "arithmetic", "to meta"):
            assert out["ids"].offsets.untyped_storage()._cdata == out["box"].offsets.untyped_storage()._cdata
        if not name.endswith("meta"):
            assert out.tolist() == d.tolist() and out["ids"].offsets.dtype is torch.int32

    def test_files(self, tmp_path: Path) -> None:
        d: Any = made()
        d.save(tmp_path / "d")
        out: Any
        for out in (load(tmp_path / "d"), DeviceDict.load(tmp_path / "d", keys=["ids", "box"])):
            check_invariants(out)
            assert out["ids"]._lengths.longest == 3 and type(out["ids"]) is Ragged and out["ids"] == d["ids"]
        both = load(tmp_path / "d")
        assert both == d and both.decode("s") == d.decode("s") and both["ids"]._lengths is both["box"]._lengths
        only = load(tmp_path / "d", keys=["box"])
        assert only["box"] == d["box"] and list(only) == ["box"], "with the offsets that it shares"
        with pytest.raises(
            KeyError, match=r"'ids.values' is not in .*: 'ids' is a Ragged, not a nested dict; it is d\['ids'\].values"
        ):
            load(tmp_path / "d", keys=[("ids", "values")])
        assert load(tmp_path / "d", "meta")["ids"].max_length == 3

    def test_moves(self, device: torch.device) -> None:
        d: Any = made()
        there = d.to(device)
        check_invariants(there)
        assert there["ids"]._lengths.longest == 3 and there["ids"].offsets.device == device
        assert there.rows[1:3]["ids"].lengths.tolist() == [0, 3] and there.rows[[3, 2]]["ids"]._lengths.longest == 3
        assert there.rows[[3, 2]].cpu() == d.rows[[3, 2]] and there.rows[2].cpu() == d.rows[2]
        assert cat([there, there]).cpu() == cat([d, d]) and there.cpu() == d and there.decode("s") == d.decode("s")
        (batch,) = prefetch([d], device)
        assert batch.cpu() == d and to_device(d, device).device == device

    def test_a_packed_batch_moves_with_one_copy(self, device: torch.device, copies: Any) -> None:
        d: Any = made().pack()
        copies.clear()
        d.to(device)
        assert copies["h2d"] == 1

    def test_arithmetic_leaves_the_offsets_alone(self) -> None:
        d: Any = made().select("x", "ids", "box")
        offsets = d["ids"].offsets
        doubled = d.map(lambda t: t * 2)
        results = [
            doubled, d.map(torch.add, d), d.double(), torch.zeros_like(d), d.clone().mul_(2), d.clone().lerp_(d, 0.5),
        ]  # fmt: skip
        out: Any
        for out in (*results, torch.where(d.map(lambda t: t > 0), d, d)):
            assert out["ids"].offsets.tolist() == offsets.tolist() and out["ids"].offsets.dtype is torch.int32
            assert out["ids"]._lengths.longest == 3
        assert doubled["ids"].offsets is offsets and d["ids"].with_values(d["ids"].values * 2) == doubled["ids"]
        assert d.map(torch.add, d) == doubled == d.clone().add_(d) == d.clone().mul_(2)
        norm = made()["ids"].values.norm()
        assert torch.allclose(made().select("ids").total_norm(), norm)
        with pytest.raises(TypeError, match=r"^'r': a norm takes floating-point"):
            DeviceDict({"r": Ragged.from_rows([[1]])}).total_norm()

    def test_lengths_that_differ_are_refused(self) -> None:
        one = DeviceDict({"r": Ragged.from_rows([[1.0, 2.0], [3.0]])})
        two = DeviceDict({"r": Ragged.from_rows([[1.0], [2.0, 3.0]])})
        message = "^'r': expected rows of the same lengths, got other lengths in the other mapping$"
        for call in (lambda: one.add_(two), lambda: one.map(torch.add, two), lambda: one.copy_(two)):
            with pytest.raises(ValueError, match=message):
                call()
        assert one["r"].tolist() == [[1, 2], [3]] and one != two and not one.allclose(two)
        message = r"^'r': expected a tensor \[3, \.\.\.\], got float32\[2\]; a ragged field keeps the number of its"
        fails(ValueError, message, lambda: one.map(lambda t: t[:2]))
        with pytest.raises(TypeError, match=r"^'r': expected a Ragged, got a mapping in the other mapping$"):
            one.add_({"r": {"values": torch.ones(3), "offsets": torch.tensor([0, 2, 3])}})
        with pytest.raises(DeviceMismatchError, match=r"^'r' is on meta, this DeviceDict is on cpu"):
            one.add_({"r": one["r"].to("meta")})
        same = {"r": Ragged(torch.ones(3), [0, 2, 3])}
        assert one.map(torch.add, same)["r"].tolist() == [[2, 3], [4]], "a mapping with equal offsets"

    def test_comparisons(self) -> None:
        assert made() == made()
        one, near, far, other = (
            DeviceDict({"r": Ragged(torch.arange(3.0) + by, [0, *ends, 3])})
            for by, ends in ((0, [1]), (1e-9, [1]), (1, [1]), (0, [2]))
        )
        assert one.allclose(near) and not one.allclose(far) and not one.allclose(other) and one != other
        assert one != {"r": one["r"].values} and torch.equal(one, DeviceDict({"r": one["r"].clone()}))  # type: ignore[arg-type]

    def test_fill(self) -> None:
        buffer, other = made(), made()
        values, offsets = buffer["ids"].values, buffer["ids"].offsets
        other["ids"].values.mul_(3)
        buffer.fill_(other)
        assert buffer == other and buffer["ids"].values is values and buffer["ids"].offsets is offsets
        d: Any = DeviceDict({"r": Ragged.from_rows([[1, 2], [3]])})
        d.fill_({"r": Ragged.from_rows([[1], [2, 3]])})
        assert d["r"].tolist() == [[1], [2, 3]] and d["r"].max_length == 2
        longer = Ragged.from_rows([[1, 2, 3], []])
        d.fill_({"r": longer})
        assert d["r"]._lengths.longest == 3 and d["r"].tolist() == [[1, 2, 3], []]
        for wrong, message in (
            (Ragged.from_rows([[1], [2]]), r"^'r': expected int64\[3\], got int64\[2\]; fill_ casts and "),
            (Ragged.from_rows([[1], [2], [3]]), r"^'r': expected int32\[3\], got int32\[4\]; fill_ casts"),
            (
                {"values": longer.values, "offsets": longer.offsets},
                "^'r': expected a Ragged, got a mapping in the given mapping$",
            ),
            (longer.values, r"^'r': expected a Ragged, got int64\[3\] in the given mapping$"),
        ):
            with pytest.raises((TypeError, ValueError), match=message):
                d.fill_({"r": wrong})
        broken = longer.with_values(longer.values)
        broken.offsets = torch.tensor([0, 4, 3], dtype=torch.int32)
        with pytest.raises(ValueError, match=r"^'r': 'offsets': expected ascending offsets, got 3 after 4 at row 1"):
            d.fill_({"r": broken})
        assert d["r"] == longer and d["r"].max_length == 3

    @pytest.mark.parametrize("method", ["fill_", "update"])
    def test_an_interrupt_leaves_rows_and_max_length_as_before_or_as_after(self, method: str) -> None:
        def fields(rows: list[list[int]]) -> Any:
            first = Ragged.from_rows(rows)
            odd = first.with_values(first.values.to(torch.uint16))  # copied by itself, with an undo
            return DeviceDict({"odd": odd, "r": first, "own": first.clone(), "x": first.values + 1})

        old, new = fields([[1, 2], [3]]), fields([[4, 5, 6], []])
        seen = {"before": 0, "after": 0}
        tracing = sys.gettrace()

        def interrupted(stop: int) -> bool:
            d, lines = old.clone(), 0

            def trace(frame: Any, event: str, _: Any) -> Any:
                nonlocal lines
                lines += event == "line" and "tensordict_lite" in frame.f_code.co_filename
                if lines == stop:
                    sys.settrace(None)
                    raise KeyboardInterrupt
                return trace

            sys.settrace(trace)
            try:
                getattr(d, method)(new)
                return False
            except KeyboardInterrupt:
                return True
            finally:
                sys.settrace(tracing)
                expected = new if d["x"].tolist() == new["x"].tolist() else old
                seen["after" if expected is new else "before"] += 1
                assert d == expected, stop
                assert all(d[key].max_length == expected[key].max_length for key in ("odd", "r", "own")), stop

        with torch.enable_grad():  # an interrupt may come before the end of a no_grad()
            assert next(stop for stop in count(1) if not interrupted(stop)) == sum(seen.values()) > 20
        assert seen["after"] >= 1

    @pytest.mark.parametrize("share", ["with_values", "detach", "pickle"])
    def test_fill_of_fields_that_share_their_lengths(self, share: str) -> None:
        first = Ragged.from_rows([[1, 2, 3], []])
        two = DeviceDict({"a": first, "b": first.with_values(torch.zeros(3))})
        two = {"with_values": two, "detach": two.detach(), "pickle": pickle.loads(pickle.dumps(two))}[share]
        with pytest.raises(
            ValueError, match=r"^'b' has rows of the same lengths as another field of this DeviceDict, and the given "
        ):
            two.fill_({"a": first, "b": Ragged.from_rows([[1.0], [2.0, 3.0]])})
        assert two["b"].values.tolist() == [0, 0, 0] and two["a"] == first
        new = Ragged.from_rows([[1], [2, 3]])
        two.fill_({"a": new, "b": new.clone().to(torch.float64).with_values(torch.ones(3))})
        assert two["a"] == new and two["b"].tolist() == [[1], [1, 1]] and two["b"].max_length == 2

    @pytest.mark.parametrize("way", ["tree_map", "NumPy", "a dense field"])
    def test_fill_refuses_offsets_in_the_memory_of_another_field(self, way: str) -> None:
        first = Ragged.from_rows([[1, 2, 3], []])
        d: Any = DeviceDict({"a": first})
        if way == "tree_map":
            d["b"] = pytree.tree_map(torch.detach, first)
        elif way == "NumPy":
            d["b"] = Ragged(**first.numpy())
        else:
            d["b"] = first.offsets[1:]
        given = {"a": Ragged.from_rows([[1], [2, 3]]), "b": d.clone()["b"]}
        before = d.clone()
        with pytest.raises(
            ValueError, match=r"^'a' has offsets in the memory of another field of this DeviceDict; clone"
        ):
            d.fill_(given)
        assert d == before and d["a"].max_length == 3
        clone = d.clone()
        assert clone.fill_(given) == DeviceDict(given)

    @pytest.mark.parametrize("bare", [False, True])
    def test_prefetch_into_slots(self, bare: bool) -> None:
        batches = [Ragged.from_rows(rows) for rows in ([[1, 2], [3]], [[1], [2, 3]], [[1, 2, 3], []])]
        given: list[Any] = batches if bare else [DeviceDict({"r": batch}) for batch in batches]
        seen: list[Any] = []
        for batch, expected in zip(prefetch(given, "cpu", slots=1), batches, strict=True):
            found: Any = batch if bare else batch["r"]
            assert found == expected and found.max_length == expected.max_length
            seen.append(found)
        assert seen[0] is seen[2] and batches[0].tolist() == [[1, 2], [3]]
        for batch, expected in zip(prefetch(batches, "cpu"), batches, strict=True):
            assert batch == expected and batch._lengths.longest == expected.max_length

    def test_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        d: Any = made()
        with pytest.raises(
            TypeError, match=r"^'ids': expected a tensor of one shape, got a Ragged; drop or pad it first"
        ):
            d.new_zeros(2)
        for call in (lambda: torch.split(d, 2), lambda: torch.unbind(d)):
            with pytest.raises(
                TypeError, match=r"^'ids': torch.\w+ takes tensors, got a Ragged; use d.rows.split\(\.\.\.\)$"
            ):
                call()
        module = SimpleNamespace(TensorDict=None)
        monkeypatch.setitem(sys.modules, "tensordict", module)
        with pytest.raises(
            TypeError, match=r"^'ids': a TensorDict takes tensors, got a ragged field; store its nested\(\) or"
        ):
            d.to_tensordict()
        with pytest.raises(
            TypeError, match=r"^'ids': flatten takes fields with dimensions, got a Ragged; drop it first$"
        ):
            d.select("ids").rows.flatten()
        fails(TypeError, "^'ids': group_by takes a dense tensor, got a Ragged$", lambda: d.rows.group_by("ids"))

    def test_flatten_keeps_it_as_one_field(self) -> None:
        d = collate(
            [{"obs": {"ids": [1, 2], "text": "ab"}}, {"obs": {"ids": [3], "text": "abc"}}], ragged=["ids", "text"]
        )
        flat = d.flatten()
        assert list(flat) == ["obs.ids", "obs.text"] and len(flat.rows) == 2 and type(flat["obs.ids"]) is Ragged
        assert flat.decode("obs.text") == ["ab", "abc"]
        assert DeviceDict.unflatten(flat) == d


class TestJoin:
    @pytest.mark.parametrize("call", [
        cat,
        stack,
        JoinedRows,
        lambda fields: RowWriter("never", like=fields[0]),
        lambda fields: DeviceDict(fields[0]),
        lambda fields: DeviceDict({"x": 1}).update(fields[0]),
    ])  # fmt: skip
    def test_a_dict_is_asked_for(self, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        pairs = Ragged.from_rows([torch.ones(2), torch.ones(2)])  # each row may be taken for a key and a value
        fails(TypeError, r' Ragged; give (it|the value) a key: \{"x": (rows|value)\}$', lambda: call([pairs, pairs]))
        assert not list(tmp_path.iterdir())

    def test_codes_of_other_widths(self) -> None:
        """Each value is a string of an object. Its codes are padded as in a dense field."""
        batches = [collate([{"o": [{"s": text}]}, {"o": []}], ragged=["o"]) for text in ("cat", "zebra")]
        assert cat(batches).decode(("o", "s")) == [["cat"], [], ["zebra"], []]
        assert JoinedRows(batches)[[2, 0]].decode(("o", "s")) == [["zebra"], ["cat"]]

    def test_pad_is_refused(self) -> None:
        d = made().select("ids")
        with pytest.raises(ValueError, match=r"^'ids': pad= takes tensors, got a ragged field; leave it out of pad=$"):
            cat([d, d], pad={"ids": 0})

    def test_a_field_without_values_does_not_decide_the_dtype(self) -> None:
        joined: Any
        empty, numbers = (collate(rows, ragged=["x"]) for rows in ([{"x": []}] * 2, [{"x": [(1 << 24) + 1]}]))
        assert empty["x"].dtype == torch.float32
        for joined in (cat([empty, numbers]), cat([numbers, empty])):
            assert joined["x"].values.dtype == torch.int64 and [(1 << 24) + 1] in joined.tolist()["x"]
        assert cat([empty, empty])["x"].values.dtype == torch.float32
        half = DeviceDict({"x": Ragged.from_rows([torch.ones(1).half()])})
        assert cat([numbers, half, empty])["x"].values.dtype == torch.float16, "as torch promotes the others"

    @pytest.mark.parametrize(("call", "message"), [
        (lambda: stack([made(), made()]),
         r"^'ids': stack takes rows of one shape, got a ragged field; cat\(\[\.\.\.\]\) "),
        (lambda: cat([made().select("ids")] * 2, dim=1),
         r"'ids': \w+ takes rows of one shape, got a ragged field; cat along dim=0$"),
        (lambda: cat([{"r": Ragged.from_rows([torch.ones(1, n)])} for n in (1, 2)]),
         r"^'r': dict 1 has float32\[1, 2\], dict 0 has float32\[1, 1\]$"),
        (lambda: cat([{"r": ragged()}, {"r": torch.ones(1)}]), r"^'r': dict 1 has float32\[1\], dict 0 has "),
        (lambda: cat([{"r": torch.ones(1)}, {"r": ragged()}]), r"^'r': dict 1 has .*, dict 0 has float32\[1\]$"),
        (lambda: cat([{"r": ragged()}, {"r": {"a": 1}}]), "^'r': dict 1 has a mapping, dict 0 has a Ragged"),
    ])  # fmt: skip
    def test_refused(self, call: Callable[[], Any], message: str) -> None:
        fails(ValueError, message, call)

    def test_unknown_lengths_stay_unknown(self) -> None:
        unknown = pytree.tree_map(torch.clone, DeviceDict({"r": ragged()}))
        joined: Any = cat([{"r": ragged()}, unknown])["r"]
        assert unknown["r"]._lengths.longest is joined._lengths.longest is None and joined.max_length == 3


INDEXES: list[Any] = [
    slice(None), slice(1, 3), slice(-2, None), slice(3, 1), slice(None, None, 2), slice(None, None, 3), slice(1, 99),
    [], [0], [3, 0, 0, -1], range(2), np.array([2, 1]), torch.tensor([1, 1]), torch.tensor([2], dtype=torch.int32),
    torch.tensor([True, False, False, True]), [False] * 4, np.array([True] * 4),
]  # fmt: skip


class TestRows:
    @pytest.mark.parametrize("index", INDEXES)
    def test_several(self, index: Any) -> None:
        d: Any = made()
        at = index if isinstance(index, slice) else torch.as_tensor(list(index) or np.array([], int))
        wanted = torch.from_numpy(np.arange(4)[at if isinstance(at, slice) else at.numpy()]).tolist()
        out = d.rows[index]
        check_invariants(out)
        assert len(out.rows) == len(wanted) and out["x"].tolist() == wanted
        assert plain(out["ids"]) == [plain(made()["ids"])[i] for i in wanted]
        assert out["ids"].offsets.dtype is torch.int32
        assert out["ids"]._lengths.longest == max((LENGTHS[i] for i in wanted), default=0)
        assert out["ids"].offsets is out["box"].offsets is not out["s"].offsets, "shared offsets stay shared"
        assert out.decode("s") == [made().decode("s")[i] for i in wanted] and type(out["n", "e"]) is Ragged
        is_view = isinstance(index, slice) and index.step is None
        shares = out["ids"].values.untyped_storage().data_ptr() == d["ids"].values.untyped_storage().data_ptr()
        assert shares == is_view

    @pytest.mark.parametrize("grad", [True, False])
    def test_one(self, grad: bool) -> None:
        d: Any = made()
        with torch.set_grad_enabled(grad):
            rows = list(d.rows)
        for i, row in enumerate(rows):
            assert row == d.rows[i] == d.rows[i - 4] == d.rows[torch.tensor(i)] == d.rows[np.int64(i)]
            assert type(row["ids"]) is Tensor
            assert row["ids"].untyped_storage()._cdata == d["ids"].values.untyped_storage()._cdata
            assert row["ids"].tolist() == plain(d["ids"])[i] and row["box"].shape == (LENGTHS[i], 2)
            assert row.decode("s") == d.decode("s")[i]
        for wrong in (4, -5, [4], [-5]):
            with pytest.raises(IndexError):
                d.rows[wrong]

    def test_writes_to_a_row_are_seen(self) -> None:
        d: Any = made()
        d.rows[2]["ids"][:] = 9
        d.rows[3:]["ids"].values[:] = 8
        assert plain(d["ids"])[2:] == [[9, 9, 9], [8]]

    def test_fields_that_disagree(self) -> None:
        d: Any = DeviceDict({"x": torch.ones(3), "r": ragged()})
        fails(
            ValueError,
            r"^rows need fields that agree on .*, this DeviceDict has 'x' \[3\], 'r' \[4, \*\]$",
            lambda: len(d.rows),
        )

    @pytest.mark.parametrize("workers", [0, 2])
    def test_loader(self, workers: int) -> None:
        d: Any = made()
        batches = list(DataLoader(d.rows, 3, num_workers=workers, collate_fn=collate))  # type: ignore[arg-type]
        assert cat(batches) == d and [len(batch.rows) for batch in batches] == [3, 1]
        assert [batch["ids"]._lengths.longest for batch in batches] == [3, 1]
        assert all(batch["ids"].offsets is batch["box"].offsets or workers for batch in batches)
        if workers:
            assert all(batch.is_packed for batch in batches)


ASSIGN: list[tuple[Any, Any]] = [
    (2, [7, 8, 9]),
    (-2, torch.tensor([7.0, 8, 9])),
    (2, np.array([7, 8, 9])),
    (1, []),
    (slice(1, 3), [[], [7, 8, 9]]),
    (slice(1, 3), Ragged.from_rows([[], [7.0, 8, 9]])),
    ([3, 0], [[7], [8, 9]]),
    ([3, 0], Ragged.from_rows([[7.0], [8.0, 9.0]])),
    (slice(None, None, 2), [np.array([7.0, 8.0]), [1, 2, 3]]),
    (torch.tensor([True, False, True, False]), [torch.tensor([7, 8]), torch.tensor([1, 2, 3])]),
    ([0], torch.tensor([[7.0, 8.0]])),
    (slice(0, 1), torch.tensor([[7, 8]])),
    ([], Ragged.from_rows([[1.0]])[:0]),
]


class TestAssignment:
    @pytest.mark.parametrize(("index", "given"), ASSIGN)
    def test_rows(self, index: Any, given: Any) -> None:
        d: Any = DeviceDict({"x": torch.zeros(4), "r": ragged()})
        values, expected = d["r"].values, list(ROWS)
        d.rows[index] = {"x": 1, "r": given}
        wanted = torch.arange(4)[index].tolist() if not isinstance(index, list) or index else []
        rows = [given] if isinstance(wanted, int) else given.tolist() if isinstance(given, Ragged) else given
        for i, row in zip([wanted] if isinstance(wanted, int) else wanted, rows, strict=True):
            expected[i] = torch.as_tensor(row).tolist()
        assert d["r"].tolist() == expected and d["r"].values is values and d["r"].max_length == 3
        assert d["x"].nonzero().flatten().tolist() == sorted([wanted] if isinstance(wanted, int) else wanted)
        check_invariants(d)

    @pytest.mark.parametrize(("index", "given", "message"), [
        (2, [1], "^'r': expected 3 values for row 0 of these, got 1; rows keep their lengths, so"),
        (slice(2, 4), [[1, 2, 3], []], "^'r': expected 1 values for row 1 of these, got 0; rows"),
        (slice(2, 4), [[1, 2, 3]], "^'r': expected 2 rows, got 1 rows$"),
        (slice(2, 4), [1, 2], "^'r': expected 2 rows, got one row$"),
        (2, [[1, 2, 3]], "^'r': expected one row, got 1 rows$"),
        ([2], torch.ones(3), "^'r': expected 1 rows, got one row$"),
        (2, torch.ones(3, 2, 2), r"^'r': expected rows \[\.\.\., \*\] or one row \[\*\], got float32\[3, 2, 2\]$"),
        (2, torch.ones(3, dtype=torch.complex64),
         "^'r': expected numbers that float32 can hold, got complex64; convert it first$"),
        (2, ["a", "b", "c"], "^'r': expected numbers, got strings; encode them first$"),
        (2, {"a": 1}, "^'r': expected rows of any length, got a mapping$"),
        (2, torch.ones(3, device="meta"), "^'r': expected a tensor with values, got one on meta"),
        (2, None, "^'r': expected a tensor, .*, got a NoneType"),
    ])  # fmt: skip
    def test_a_value_that_does_not_fit_changes_nothing(self, index: Any, given: Any, message: str) -> None:
        d: Any = DeviceDict({"x": torch.zeros(4), "r": ragged(), "y": torch.zeros(4)})
        with pytest.raises((TypeError, ValueError), match=message):
            d.rows[index] = {"x": 1, "r": given, "y": 1}
        assert d["r"] == ragged() and not d["x"].any() and not d["y"].any()
        with pytest.raises((TypeError, ValueError)):
            d.rows[0] = {"x": 1, "r": [1, 2], "y": [1, 2]}
        assert d["r"] == ragged() and not d["x"].any()

    def test_a_write_that_torch_refuses_is_undone(self) -> None:
        d: Any = DeviceDict({"r": ragged(), "leaf": torch.zeros(4, requires_grad=True)})
        for index in (0, slice(0, 1), [0]):
            with pytest.raises(RuntimeError, match=r"^'leaf': "):
                d.rows[index] = {"r": [9, 9] if index == 0 else [[9, 9]], "leaf": 1}
            assert d["r"] == ragged()

    def test_texts(self) -> None:
        d: Any = collate([{"s": "abc"}, {"s": ""}, {"s": "Zoë"}], ragged=["s"])
        d.rows[0] = {"s": "xyz"}
        d.rows[[1, 2]] = {"s": ["", "four"]}
        assert d.decode("s") == ["xyz", "", "four"]
        d.rows[1:] = d.rows[1:].map(torch.clone)
        d.rows[[0]] = DeviceDict({"s": ["abc"]})
        d.rows[1:] = DeviceDict({"s": ["", "nine"]})  # without the padding of dense codes
        assert d.decode("s") == ["abc", "", "nine"]
        for text, message in (("ab", "expected 3 values for row 0 of these, got 2"), ("a\0b", "holds a NUL character")):
            with pytest.raises(ValueError, match=message):
                d.rows[0] = {"s": text}
        words = collate([{"w": ["a"]}, {"w": ["b", "a"]}], ragged=["w"], encoders={"w": Vocabulary(["a", "b"])})
        words.rows[1] = {"w": ["b", "b"]}
        words.rows[[0]] = {"w": [["b"]]}
        assert words.decode("w") == [["b"], ["b", "b"]]
        with pytest.raises(ValueError, match="'c' is not among the 2 tokens"):
            words.rows[0] = {"w": ["c"]}

    @pytest.mark.parametrize("nothing", [[], torch.zeros(4, dtype=torch.bool), slice(2, 2)], ids=str)
    def test_no_rows(self, nothing: Any) -> None:
        d: Any = DeviceDict({"x": torch.zeros(4), "r": ragged()})
        d["s"] = collate([{"s": "ab"}] * 4, ragged=["s"])["s"]
        for none in ([], torch.zeros(0)):
            d.rows[nothing] = {"x": [], "r": none, "s": []}
        assert d["r"] == ragged() and not d["x"].any()

    def test_strings_of_objects(self) -> None:
        d: Any = collate([{"o": [{"s": "zebra"}, {"s": "ox"}]}, {"o": [{"s": "cat"}]}], ragged=["o"])
        other = collate([{"o": [{"s": "a"}]}], ragged=["o"])
        d.rows[1:] = other
        assert d.decode(("o", "s")) == [["zebra", "ox"], ["a"]]
        d.rows[[1]] = {"o": {"s": [["b"]]}}
        assert d.decode(("o", "s")) == [["zebra", "ox"], ["b"]]
        d.fill_(cat([d.rows[:1], other]))
        assert d.decode(("o", "s")) == [["zebra", "ox"], ["a"]]
        with pytest.raises(
            ValueError, match=r"^'o.s': a string takes 6 codes of Utf8\(\), the rows of this field have 5; shorten"
        ):
            d.rows[[1]] = {"o": {"s": [["badger"]]}}

    def test_rows_of_itself(self) -> None:
        d: Any = DeviceDict({"r": Ragged.from_rows([[1, 2], [3, 4]])})
        d.rows[[0, 1]] = d.rows[[1, 0]]
        assert d["r"].tolist() == [[3, 4], [1, 2]]
        d.rows[0:1] = d.rows[1:2]
        assert d["r"].tolist() == [[1, 2], [1, 2]]

    def test_autograd_records_the_write(self) -> None:
        w = torch.ones(2, requires_grad=True)
        d: Any = DeviceDict({"r": ragged().with_values(torch.zeros(6))})
        d.rows[0] = {"r": w * 3}
        d["r"].values.sum().backward()
        assert w.grad is not None and w.grad.tolist() == [3, 3]


class Letters:
    """A tokenizer of transformers, as far as the encoder calls it."""

    def __call__(self, strings: list[str], padding: bool = True, **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(letter) for letter in text] for text in strings]}

    def batch_decode(self, ids: Any, skip_special_tokens: bool) -> list[str]:
        rows = ids.tolist() if isinstance(ids, Tensor) else ids
        return ["".join(chr(n) for n in row if n) for row in rows]


class TestTexts:
    def test_a_tokenizer(self) -> None:
        texts = ["Ada", "", "Grace"]
        d: Any = collate([{"t": text} for text in texts], ragged=["t"], encoders={"t": Tokenizer(Letters())})
        assert plain(d["t"]) == [[ord(letter) for letter in text] for text in texts] and d["t"].max_length == 5
        assert d.decode("t") == d.tolist()["t"] == texts and d.rows[[2, 0]].decode("t") == ["Grace", "Ada"]
        generated = DeviceDict({"a": d["t"].padded()}, encoders={"a": Tokenizer(Letters())})
        assert generated.decode("a") == texts
        ids = DeviceDict({"a": Ragged.from_rows([[72, 105], []])}, encoders={"a": Tokenizer(Letters())})
        assert ids.decode("a") == ["Hi", ""]

    def test_broken_codes(self) -> None:
        d: Any = DeviceDict({"s": Ragged.from_rows([torch.tensor([255], dtype=torch.uint8)])}, encoders={"s": Utf8()})
        fails(ValueError, "^'s'", lambda: d.decode("s"))


class TestTyped:
    def test_fields(self) -> None:
        samples = [{"ids": [1, 2], "y": 0.5}, {"ids": [], "y": 1.0}]
        d: Any = collate(samples, cls=Typed)
        check_invariants(d)
        assert type(d.ids) is Ragged and d.rows[[1, 0]].ids.tolist() == [[], [1, 2]] and type(d.rows[1:]) is Typed
        made: Any = Typed
        built = Typed(ids=Ragged.from_rows([[1, 2], []]), y=torch.tensor([0.5, 1.0]))
        assert built == d == pickle.loads(pickle.dumps(d)) and type(d.to("meta").ids) is Ragged
        for wrong in (torch.ones(2), {"values": torch.ones(2)}):
            with pytest.raises(TypeError, match="ids: expected Ragged, got"):
                made(ids=wrong, y=torch.ones(2))
            with pytest.raises(TypeError, match="ids: expected Ragged, got"):
                d.ids = wrong
        assert d == built


class TestCompiledAndTransformed:
    @pytest.mark.slow
    def test_few_graphs_for_many_lengths(self) -> None:
        def step(d: Any) -> Any:
            field = d["r"]
            made = field.with_values(field.values * 2 + field.positions())
            return made, field.row_ids(), made.padded(7), field.mask("left"), field.lengths

        counter = CompileCounter()
        compiled = torch.compile(step, backend=counter, fullgraph=True)
        for lengths in (
            [2, 3], [4, 2], [5, 6], [7, 8], [1, 9], [3, 3], [10, 2], [6, 1], [11, 4], [12, 5], [4, 9], [8, 8],
        ):  # fmt: skip
            d: Any = collate([{"r": torch.rand(n)} for n in lengths], ragged=["r"])
            out, *others = compiled(d)
            expected, *rest = step(d)
            assert type(out) is Ragged and out == expected and out._lengths.longest == max(lengths)
            assert out._lengths is d["r"]._lengths
            assert all(torch.equal(a, b) for a, b in zip(others, rest, strict=True))
        assert counter.frame_count <= 2

    def test_functorch(self) -> None:
        field = ragged()

        def loss(values: Tensor) -> Tensor:
            return (field.with_values(values).padded() ** 2).sum()

        assert torch.func.grad(loss)(field.values).tolist() == (2 * field.values).tolist()
        w = torch.func.vmap(loss)(torch.stack([field.values] * 2))
        assert w.tolist() == [loss(field.values).item()] * 2

    def test_pytree(self) -> None:
        leaves, spec = pytree.tree_flatten(made())
        out = pytree.tree_unflatten(leaves, spec)
        assert type(out["ids"]) is Ragged and out["ids"]._lengths.longest is None and out["ids"].max_length == 3
        assert out == made()


class TestArrow:
    def test_both_ways(self) -> None:
        arrow = pytest.importorskip("pyarrow")
        for field in (ragged(), ragged()[1:3], Ragged.from_rows([[True], []])):
            array = arrow.array(field)
            back = DeviceDict.from_arrow(arrow.table({"r": array}))["r"]
            assert array.to_pylist() == field.tolist() and type(back) is Ragged and back == field
        boxes = Ragged.from_rows([torch.rand(2, 3, 1), torch.rand(0, 3, 1)])
        assert arrow.array(boxes).to_pylist() == boxes.tolist()
        for shape in ((2, 3, 1), (0, 3, 1), (2, 4)):
            boxes = Ragged.from_rows([torch.rand(shape), torch.rand(1, *shape[1:])])
            for part in (arrow.table({"b": arrow.array(boxes)}), arrow.table({"b": arrow.array(boxes)}).slice(1)):
                assert DeviceDict.from_arrow(part)["b"] == boxes[-len(part) :]
        dense = arrow.FixedSizeListArray.from_arrays(arrow.array(boxes).flatten().flatten(), 4)
        assert DeviceDict.from_arrow(arrow.table({"b": dense}))["b"].tolist() == boxes.values.tolist()
        null = arrow.array([[[1.0, None]], []], type=arrow.list_(arrow.list_(arrow.float32(), 2)))
        with pytest.raises(ValueError, match=r"^column 'b': 1 nulls inside of lists; fill them in Arrow first$"):
            DeviceDict.from_arrow(arrow.table({"b": null}))
        table = arrow.table({"r": arrow.array([[1], [2, 3], [], [4, 5, 6]]), "x": [1, 2, 3, 4]})
        for part in (table, table.slice(1, 2), table.slice(4)):
            d = DeviceDict.from_arrow(part)
            check_invariants(d)
            assert d["r"].tolist() == part["r"].to_pylist() and len(d.rows) == len(part)
        large = arrow.array(ragged(), type=arrow.large_list(arrow.float64()))
        assert large.type == arrow.large_list(arrow.float64()) and large.to_pylist() == ROWS
        with pytest.raises(ValueError, match="nulls inside of lists; fill them in Arrow first"):
            DeviceDict.from_arrow(arrow.table({"r": arrow.array([[1, None]])}))


LISTS = st.lists(st.lists(st.integers(-9, 9), max_size=4), min_size=1, max_size=6)


def build(rows: list[list[int]]) -> Ragged:
    return Ragged.from_rows([torch.tensor(row, dtype=torch.int64) for row in rows])


STEPS = ["index", "slice", "mask", "cat", "add", "pickle", "torch.save", "set", "values"]


def step(field: Any, model: list[list[int]], data: st.DataObject) -> tuple[Any, list[list[int]]]:
    """An operation on rows, and the same on plain lists."""
    kind, count = data.draw(st.sampled_from(STEPS)), len(model)
    if kind == "index":
        index = data.draw(st.lists(st.integers(-count, count - 1), max_size=6)) if count else []
        return field[torch.tensor(index, dtype=torch.int64)], [model[i] for i in index]
    if kind == "slice":
        bound = st.none() | st.integers(-count - 1, count + 1)
        part = slice(data.draw(bound), data.draw(bound), data.draw(st.none() | st.integers(1, 3)))
        return field[part], model[part]
    if kind == "mask":
        mask = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
        return field[torch.tensor(mask, dtype=torch.bool)], [row for row, keep in zip(model, mask, strict=True) if keep]
    if kind == "cat":
        more = data.draw(LISTS)
        joined: Any = cat([{"r": field}, {"r": build(more)}, {"r": field}])
        return joined["r"], [*model, *more, *model]
    if kind == "add":
        return DeviceDict({"r": field}).map(lambda t: t + 1)["r"], [[number + 1 for number in row] for row in model]
    if kind == "pickle":
        return pickle.loads(pickle.dumps(field, data.draw(st.integers(2, 5)))), model
    if kind == "torch.save":
        return through_torch_save(field), model
    if kind == "set" and count:
        i = data.draw(st.integers(-count, count - 1))
        d: Any = DeviceDict({"r": field.clone()})
        d.rows[i] = {"r": field[i] * 2}
        return d["r"], [[2 * number for number in row] if at == i % count else row for at, row in enumerate(model)]
    return field.with_values(field.values.clone()), model


@given(LISTS, st.data())
def test_it_behaves_as_a_list_of_lists(rows: list[list[int]], data: st.DataObject) -> None:
    """Any sequence of operations on rows, beside the same on plain lists."""
    field: Any = build(rows)
    model = rows
    for _ in range(data.draw(st.integers(1, 4))):
        field, model = step(field, model, data)
        check_invariants(field)
        assert field.tolist() == model == plain(field) and field.offsets.dtype is torch.int32
        assert field.lengths.tolist() == list(map(len, model)) and field.max_length == max(map(len, model), default=0)
        padded, mask = field.padded(99, "left"), field.mask("left")
        assert [row[keep].tolist() for row, keep in zip(padded, mask, strict=True)] == model
        assert [row.tolist() for row in field] == model
        assert field.row_ids().tolist() == [i for i, row in enumerate(model) for _ in row]
