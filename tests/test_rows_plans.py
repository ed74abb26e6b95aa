"""Plans of row writes and of arithmetic: a second call validates less, and does exactly what a first call does."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tensordict_lite import DeviceDict
from tensordict_lite._dict import arithmetic, row_writes, rows
from tensordict_lite._memory import snapshot as snapshots
from tensordict_lite._memory.snapshot import addresses, have_strides, snapshot

INDICES: list[Any] = [2, -1, slice(1, 4), slice(0, 5, 2), torch.tensor([4, 0, 2]), [4, 0, 2]]


def clear() -> None:
    for plans in (arithmetic._ARITHMETIC_PLANS, row_writes._WRITE_PLANS):
        plans.clear()


@pytest.fixture(autouse=True)
def fresh_plans() -> Iterator[None]:
    clear()
    yield
    clear()


def table(seed: int = 0) -> DeviceDict:
    g = torch.Generator().manual_seed(seed)
    return DeviceDict({"a": torch.rand(6, 2, generator=g), "b": torch.randint(9, (6,), generator=g), "c": torch.rand(6, generator=g)})  # fmt: skip


def values_for(index: Any, seed: int = 1) -> dict[str, Tensor]:
    return {key: value[index].clone() for key, value in table(seed).items()}


def outcome(d: DeviceDict, call: Callable[[], Any]) -> Any:
    """The error of a call, the values after it, and by how much each version counter grew."""

    def versions() -> list[int]:
        return [0 if t.is_inference() else t._version for t in d._tensors()]

    before, said = versions(), ""
    try:
        call()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return said, str([t.detach() for t in d._tensors()]), [y - x for x, y in zip(before, versions(), strict=True)]


def expanded(t: Tensor) -> Tensor:
    return t[:1].expand(t.shape)


def of_data(t: Tensor, new: Tensor) -> Tensor:
    t.data = new
    return t


ELSE: dict[str, Callable[[], Any]] = {
    "another shape": lambda: torch.rand(3, 2),
    "another number of dimensions": lambda: torch.rand(6),
    "strides": lambda: torch.rand(3, 2).t(),
    "expanded": lambda: torch.rand(2, 1).expand(2, 3),
    "dtype": lambda: torch.rand(2, 3).double(),
    "device": lambda: torch.rand(2, 3, device="meta"),
    "requires grad": lambda: torch.rand(2, 3, requires_grad=True),
    "Parameter": lambda: Parameter(torch.rand(2, 3), requires_grad=False),
    "sparse": lambda: torch.rand(2, 3).to_sparse(),
    "negative bit": lambda: torch._neg_view(torch.rand(2, 3)),
    "nested": lambda: torch.nested.nested_tensor([torch.rand(3), torch.rand(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.rand(3), torch.rand(3)], layout=torch.jagged),
    "opaque": lambda: torch.rand(2, 3).to_mkldnn(),
    "sparse rows": lambda: torch.rand(2, 3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.rand(2, 3), 0.1, 0, torch.qint8),
    "resized": lambda: torch.rand(2, 3).resize_(1, 2),
    "transposed in place": lambda: torch.rand(2, 3).t_(),
    "set": lambda: torch.rand(2, 3).set_(torch.rand(3, 2)),  # type: ignore[arg-type]
    "data": lambda: of_data(torch.rand(2, 3), torch.rand(3, 2)),
    "a list": lambda: [[1.0] * 3] * 2,
    "None": lambda: None,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", ELSE)
@pytest.mark.parametrize("look", [have_strides, addresses])
def test_a_snapshot_tells_other_metadata(what: str, look: Any) -> None:
    x, y = torch.rand(2, 3), torch.rand(4)
    same = snapshot([x, y], look)
    assert same is not None and same(x, y) and same(torch.rand(2, 3), torch.rand(4))
    assert not same(ELSE[what](), y)


def test_a_snapshot_tells_modes_and_repeats() -> None:
    x = torch.rand(3)
    same = snapshot([x, x.clone()], have_strides)
    assert same is not None and not same(x, x), "the same tensor twice"
    assert snapshot([x, x], have_strides) is None and snapshot([x] * 9999, have_strides) is None
    complex_ = torch.rand(3, dtype=torch.complex64)
    conjugate = snapshot([complex_], have_strides)
    assert conjugate is not None and not conjugate(complex_.conj())
    with torch.inference_mode():
        of_inference = torch.rand(3)
    assert not same(x, of_inference)
    assert not same(x, torch.rand(3, requires_grad=True))


@pytest.mark.parametrize("index", INDICES, ids=str)
class TestRowWrites:
    def test_the_second_write_uses_the_plan(self, index: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        d = table()
        write = torch.tensor(index) if isinstance(index, list) else index
        d.rows[write] = values_for(index)
        monkeypatch.setattr(row_writes, "_Writes", None)
        monkeypatch.setattr(rows, "write_rows", None)
        for other in (
            values_for(index, 2),
            DeviceDict(values_for(index, 3)),
            dict(reversed(values_for(index, 4).items())),
        ):
            expected = d.clone()
            for key, value in expected.items():
                value[index] = other[key]
            if isinstance(other, dict) and list(other) != list(d):  # another order has no plan, since keys find it
                monkeypatch.undo()
            versions = [t._version for t in d.values()]
            d.rows[index] = other
            assert d == expected and all(t._version > old for t, old in zip(d.values(), versions, strict=True))

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("where", ["value", "field"])
    @pytest.mark.parametrize("change", [
        lambda t: t[:1], lambda t: t.double(), lambda t: t.to(torch.int32), lambda t: t.unsqueeze(0), lambda t: t.numpy(), lambda t: t.tolist(),
        lambda t: t.float().requires_grad_(), lambda t: (t.float().requires_grad_() * 2), lambda t: Parameter(t.float()), expanded, lambda t: t.to("meta"),
        lambda t: t.float().to_sparse(), lambda t: of_data(t, torch.zeros(9)), lambda t: of_data(t, t[:0]), lambda t: t.clone().resize_(1), lambda t: torch._neg_view(t.float()), lambda t: "text",
    ])  # fmt: skip
    def test_after_a_change_the_outcome_is_that_of_a_first_write(self, index: Any, change: Any, where: str) -> None:
        outcomes = []
        for planned in (True, False):
            d, other = table(), values_for(index)
            if planned:
                d.rows[index] = values_for(index)
                d.update(table())
            try:
                if where == "value":
                    other = {**other, "b": change(other["b"])}
                else:
                    dict.__setitem__(d, "b", change(d["b"]))
            except (RuntimeError, IndexError):
                pytest.skip("torch has no such tensor")
            if not all(
                isinstance(value, Tensor) and not value.is_meta and value.layout is torch.strided
                for value in d.values()
            ):
                pytest.skip("not a field")
            if not planned:
                clear()
            before = str([t.detach() for t in d._tensors()])
            outcomes.append(outcome(d, lambda d=d, other=other: d.rows.__setitem__(index, other)))
            assert not outcomes[-1][0] or outcomes[-1][1] == before, "an error leaves the dict unchanged"
        assert outcomes[0][:2] == outcomes[1][:2]

    def test_other_keys_and_indices(self, index: Any) -> None:
        bad: list[Any] = [6, -7, slice(0, 6), slice(9, 9), torch.tensor([0, 1, 6]), torch.tensor([0, -1, 3]), torch.tensor([-7, 0, 1]),
                          torch.tensor([0, 1]), [0, 1, 9], [True, False, True], torch.tensor([1.0, 2.0, 3.0]), None, "b", True]  # fmt: skip
        for at in bad:
            for other in (
                values_for(index),
                {**values_for(index), "more": torch.ones(1)},
                {"a": torch.ones(2)},
                {"a": 1, "b": 2, "d": 3},
            ):
                d, e = table(), table()
                d.rows[index] = values_for(index)
                e.rows[index] = values_for(index)
                planned = outcome(d, lambda d=d, other=other, at=at: d.rows.__setitem__(at, other))
                clear()
                assert planned == outcome(e, lambda e=e, other=other, at=at: e.rows.__setitem__(at, other))

    def test_values_that_share_memory_with_the_table(self, index: Any) -> None:
        d = table()
        usual = values_for(index)
        for make in (
            lambda d: {"a": d["a"][-3:], "b": d["b"][-3:], "c": d["c"][-3:]},
            lambda d: {"a": d["a"].flip(0)[:3], "b": d["b"][:3], "c": d["a"].flatten()[3:6]},
            lambda d: {"a": d["a"].new_ones(3, 2), "b": d["b"][1:4], "c": torch.from_numpy(d["c"].numpy()[2:5])},
        ):
            d.update(table())
            for _ in range(3):  # the plan, and the addresses of values that do not overlap
                d.rows[index] = usual
            for key, value in table().items():
                d[key].copy_(value)
            before = make(table())
            if isinstance(index, int):
                before = {key: value[0] for key, value in before.items()}
            expected = d.clone()
            for key, value in expected.items():
                value[index] = before[key]
            given = make(d)
            d.rows[index] = {key: value[0] for key, value in given.items()} if isinstance(index, int) else given
            assert d == expected
            d.rows[index] = usual
            assert all(torch.equal(d[key][index], usual[key]) for key in d)

    def test_new_memory_of_a_field_is_seen(self, index: Any) -> None:
        d = table()
        other = values_for(index)
        for _ in range(3):
            d.rows[index] = other
        memory = torch.rand(6, 2)
        d["a"].data = memory  # same metadata, other address; the value lies in it
        other["a"] = memory[-3:] if not isinstance(index, int) else memory[3]
        expected = d.clone()
        for key, value in expected.items():
            value[index] = other[key].clone()
        d.rows[index] = other
        assert d == expected

    def test_inference_tensors(self, index: Any) -> None:
        d = table()
        with torch.inference_mode():
            inside = d.clone()
            inside.rows[index] = values_for(index)
            d.rows[index] = values_for(index)
        for plan_first in (True, False):
            if not plan_first:
                clear()
            elif not isinstance(index, list):
                d.rows[index] = values_for(index)
            said, *_ = outcome(inside, lambda: inside.rows.__setitem__(index, values_for(index)))
            assert said == "RuntimeError: 'a' is an inference tensor; clone() it, or use torch.inference_mode()"
        mixed = table()
        dict.__setitem__(mixed, "c", inside["c"])
        said, *_ = outcome(mixed, lambda: mixed.rows.__setitem__(index, values_for(index)))
        assert said == "RuntimeError: 'c' is an inference tensor; clone() it, or use torch.inference_mode()"

    def test_autograd_notices_the_write(self, index: Any) -> None:
        d = table()
        d.rows[index] = values_for(index)
        weight = torch.ones(6, requires_grad=True)
        product = (weight * d["c"]).sum()
        d.rows[index] = values_for(index)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()

    def test_without_snapshots(self, index: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (row_writes, arithmetic):
            monkeypatch.setattr(module, "snapshot", lambda *_: None)
        d = table()
        for seed in (1, 2):
            d.rows[index] = values_for(index, seed)
            assert d.rows[index] == values_for(index, seed)
            d.add_(table()).sub_(table())
        assert not (row_writes._WRITE_PLANS or arithmetic._ARITHMETIC_PLANS)


def test_a_field_under_two_keys() -> None:
    x = torch.zeros(4)
    d = DeviceDict({"x": x, "y": x})
    for _ in range(2):
        d.rows[1] = {"x": torch.tensor(1.0), "y": torch.tensor(2.0)}
        assert x.tolist() == [0, 2, 0, 0]
    d = DeviceDict({"x": x, "y": x[2:4], "z": torch.zeros(4)[:2]}).drop("x")
    d.rows[0] = {"y": torch.tensor(3.0), "z": torch.tensor(4.0)}
    d.rows[0] = {"y": d["z"][1], "z": d["y"][0]}
    assert d["y"].tolist() == [0, 0] and d["z"].tolist() == [3, 0]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_values_of_another_dtype_are_cast(index: Any) -> None:
    """Kernels for an index of many rows refused them, after the first fields were written."""
    d = table()
    for other in (
        {**values_for(index), "c": values_for(index)["b"]},
        {**values_for(index), "a": values_for(index)["a"].double()},
    ):
        d.rows[index] = other
        assert all(torch.equal(d[key][index], other[key].to(d[key].dtype)) for key in d)


def test_fields_that_overlap() -> None:
    for _ in range(2):
        x = torch.zeros(4)
        d = DeviceDict({"x": x[:3], "y": x[1:]})
        d.rows[1] = {"x": torch.tensor(1.0), "y": torch.tensor(2.0)}
        d.rows[1] = {"x": d["x"][2], "y": d["y"][0]}
        assert x.tolist() == [0, 2, 1, 0]


def test_plans_hold_no_tensor_and_are_few() -> None:
    d, e = table(), table(1)
    d.lerp_(e, 0.5)
    d.rows[0] = values_for(0)
    assert d.rows[1] and arithmetic._ARITHMETIC_PLANS and row_writes._WRITE_PLANS
    alive = [weakref.ref(t) for t in (*d.values(), *e.values())]
    del d, e
    gc.collect()
    assert not any(one() is not None for one in alive)
    for i in range(100):
        d = DeviceDict({f"k{i}": torch.rand(3)})
        d.mul_(2).rows[0] = {f"k{i}": torch.ones(())}
        assert d.rows[0][f"k{i}"] == 1
    for plans in (arithmetic._ARITHMETIC_PLANS, row_writes._WRITE_PLANS):
        assert len(plans) <= snapshots._MOST_PLANS


def test_tables_with_the_same_keys_keep_their_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(tensors: Any, look: Any) -> Any:
        made.append(len(tensors))
        return snapshot(tensors, look)

    monkeypatch.setattr(row_writes, "snapshot", counted)
    monkeypatch.setattr(arithmetic, "snapshot", counted)
    small, large = table(), DeviceDict(dict(table())).rows[[0] * 9]
    for _ in range(3):
        for d in (small, large):
            d.rows[0] = values_for(0)
            d.rows[1:4] = values_for(slice(1, 4))
            d.lerp_(d.clone(), 0.5)
    assert made == [6] * 6


def test_rows_of_fields_that_stop_to_agree() -> None:
    d = table()
    assert d.rows[5]["b"] == d["b"][5] and len(d.rows[1:3].rows) == 2 and d.rows[torch.tensor([1])]["b"] == d["b"][1]
    d["b"].resize_(5)
    for index in (0, slice(0, 2), torch.tensor([0]), [0]):
        with pytest.raises(ValueError, match=r"^rows need fields that agree on their first dimension"):
            d.rows[index]
        with pytest.raises(ValueError, match=r"^rows need fields that agree on their first dimension"):
            d.rows[index] = values_for(index)
    with pytest.raises(IndexError, match=r"^row 6 is out of range, there are 6$"):
        table().rows[6]


class TestArithmetic:
    def test_the_second_call_uses_the_plan(self, monkeypatch: pytest.MonkeyPatch) -> None:
        d, e, expected = table(), table(1), table()
        d.lerp_(e, 0.25).mul_(2) if False else d.lerp_(e, 0.25).zero_()
        monkeypatch.setattr(arithmetic, "_validated", None)
        d.update(table())
        versions = [t._version for t in d.values()]
        for other in (e, dict(e)):
            d.lerp_(other, 0.25)
            for key, value in expected.items():
                value.lerp_(e[key], 0.25) if value.is_floating_point() else value.copy_(e[key])
        assert all(map(torch.equal, d.values(), expected.values()))
        d.copy_(e)
        assert d == e and all(t._version > old for t, old in zip(d.values(), versions, strict=True))
        assert not any(t.any() for t in d.zero_().values())

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("method", ["lerp_", "add_", "copy_", "mul_", "div_"])
    @pytest.mark.parametrize("what", ELSE)
    def test_after_a_change_the_outcome_is_that_of_a_first_call(self, what: str, method: str) -> None:
        def call(d: DeviceDict, other: Any) -> Any:
            return getattr(d, method)(other, *([0.5] if method == "lerp_" else []))

        for where in ("other", "field"):
            outcomes = []
            for planned in (True, False):
                torch.manual_seed(0)
                d, other = (
                    DeviceDict({"x": torch.rand(3), "y": torch.rand(2, 3)}),
                    {"x": torch.rand(3), "y": torch.rand(2, 3)},
                )
                if planned:
                    call(d.clone(), other)
                torch.manual_seed(1)
                changed = ELSE[what]()
                if where == "other":
                    other["y"] = changed
                elif (
                    isinstance(changed, Tensor)
                    and not changed.is_meta
                    and changed.layout is torch.strided
                    and not changed.is_nested
                ):
                    dict.__setitem__(d, "y", changed)
                else:
                    continue
                if not planned:
                    clear()
                outcomes.append(outcome(d, lambda d=d, other=other: call(d, other)))
            assert str(outcomes[:1]) == str(outcomes[1:])

    def test_numbers_that_dtypes_lack_are_validated_again(self) -> None:
        d = table()
        d.drop("b").mul_(2)
        for number, text in (
            (2j, "'a' is float32[6, 2]; torch refuses mul_ of it and 2j"),
            ("x", "mul_ takes a mapping, a tensor or a number"),
        ):
            for _ in range(2):
                said, *_ = outcome(d, lambda number=number: d.drop("b").mul_(number))  # type: ignore[arg-type]
                assert text in said
        d.zero_()
        said, *_ = outcome(d, lambda: d.div_(2))
        assert "'b' is int64[6]; torch refuses div_ of it and 2" in said
        said, *_ = outcome(d, lambda: d.copy_(2))  # type: ignore[arg-type]
        assert said == "TypeError: copy_ takes a mapping or a tensor, got an int"
        said, *_ = outcome(d, lambda: d.add_(None))  # type: ignore[arg-type]
        assert said == "TypeError: add_ takes a mapping, a tensor or a number, got a NoneType"

    def test_gradients_and_inference_tensors(self) -> None:
        d, e = DeviceDict({"x": torch.ones(2)}), DeviceDict({"x": torch.zeros(2)})
        d.lerp_(e, 0.5)
        leaf = DeviceDict({"x": torch.ones(2, requires_grad=True)})
        with torch.no_grad():
            assert leaf.lerp_(e, 0.5)["x"].tolist() == [0.5, 0.5]
        said, *_ = outcome(leaf, lambda: leaf.lerp_(e, 0.5))
        assert said.startswith("RuntimeError: 'x' is a leaf that requires grad; call lerp_ in torch.no_grad()")
        d.lerp_(leaf, 0.5)
        assert d["x"].requires_grad, "autograd records the operand"
        with torch.inference_mode():
            inside = DeviceDict({"x": torch.ones(2)})
            inside.lerp_(e, 0.5)
        for method in (lambda: inside.lerp_(e, 0.5), inside.zero_, lambda: inside.mul_(2)):
            said, *_ = outcome(inside, method)
            assert "RuntimeError: 'x' is an inference tensor; clone() it before" in said

    def test_packed_numbers_still_take_one_operation(self) -> None:
        d = DeviceDict({f"k{i}": torch.rand(3) for i in range(40)}).pack()
        for _ in range(3):
            expected = [t * 2 for t in d.values()]
            versions = [t._version for t in d.values()]
            with torch.profiler.profile() as profile:
                d.mul_(2)
            assert not any("_foreach_" in event.key for event in profile.key_averages())
            assert all(map(torch.equal, d.values(), expected)) and d.is_packed
            assert all(t._version > old for t, old in zip(d.values(), versions, strict=True))
