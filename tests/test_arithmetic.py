"""Arithmetic on whole dicts: every method does what a loop over the fields does, or changes nothing."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from checks import check_invariants, fails
from files import compiles
from torch import Tensor, nn
from torch.nn import Parameter

from tensordict_lite import DeviceDict, DeviceMismatchError, Hashing, TypedDeviceDict, Utf8, Vocabulary
from tensordict_lite._dict import arithmetic

METHODS = ["add_", "sub_", "mul_", "div_"]


def sample(dtype: torch.dtype = torch.float32, seed: int = 0) -> DeviceDict:
    generator = torch.Generator().manual_seed(seed)

    def of(*shape: int) -> Tensor:
        return (torch.rand(shape, generator=generator) + 0.5).to(dtype)

    return DeviceDict({"a": of(2, 3), "n": {"b": of(5), "m": {"c": of()}}, "d": of(4)})


def state(d: DeviceDict) -> tuple[Any, ...]:
    """The tensors by identity, their values and their version counters."""
    tensors = d._tensors()
    return tensors, [t.detach().clone() for t in tensors], [None if t.is_inference() else t._version for t in tensors]


def unchanged(d: DeviceDict, call: Callable[[], Any], error: type[Exception], text: str) -> None:
    tensors, values, versions = state(d)
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value), str(caught.value)
    after, now, counted = state(d)
    assert all(x is y for x, y in zip(tensors, after, strict=True)) and versions == counted
    assert all(torch.equal(x, y) for x, y in zip(values, now, strict=True))
    check_invariants(d)


def reordered(d: Any) -> Any:
    """A plain mapping of the same tensors, with the keys the other way round at every level."""
    return OrderedDict((k, reordered(v) if isinstance(v, dict) else v) for k, v in reversed(d.items()))


class TestMap:
    def test_others_are_matched_by_key_in_any_order(self) -> None:
        d, e = sample(), sample(seed=1)
        expected = [x + y for x, y in zip(d._tensors(), e._tensors(), strict=True)]
        for other in (e, reordered(e), e.to_dict()):
            out = d.map(torch.add, other)
            check_invariants(out)
            assert list(out) == list(d) and all(map(torch.equal, out._tensors(), expected))
        three = d.map(lambda x, y, z: x + y * z, e, reordered(d))
        assert torch.equal(three["n", "b"], d["n", "b"] + e["n", "b"] * d["n", "b"])

    @pytest.mark.parametrize(("change", "error", "text"), [
        (lambda e: e["n"].pop("b"), ValueError, "the other mapping lacks 'n.b'"),
        (lambda e: e.pop("d"), ValueError, "the other mapping lacks 'd'"),
        (lambda e: e["n"]["m"].update(q=torch.ones(1)), ValueError,
         "the other mapping has 'n.m.q', which this DeviceDict lacks"),
        (lambda e: e.update(d=1.5), TypeError,
         "'d': expected a tensor, got a float in the other mapping; DeviceDict(...) makes tensors of numbers"),
        (lambda e: e.update(d={"x": 1}), TypeError, "'d': expected a tensor, got a mapping in the other mapping"),
        (lambda e: e.update(n=torch.ones(1)), TypeError,
         "'n': expected a mapping, got float32[1] in the other mapping"),
        (lambda e: e["n"].update(b=torch.ones(5, device="meta")), DeviceMismatchError,
         "'n.b' is on meta, this DeviceDict is on cpu; move the other with .to('cpu')"),
    ])  # fmt: skip
    @pytest.mark.parametrize("method", ["map", "add_", "copy_", "lerp_"])
    def test_what_does_not_match(self, method: str, change: Any, error: type[Exception], text: str) -> None:
        d, other = sample(), sample(seed=1).to_dict()
        change(other)
        calls: dict[str, Callable[[], Any]] = {
            "map": lambda: d.map(torch.add, other),
            "add_": lambda: d.add_(other),
            "copy_": lambda: d.copy_(other),
            "lerp_": lambda: d.lerp_(other, 0.5),
        }
        unchanged(d, calls[method], error, text)

    def test_another_value_than_a_mapping(self) -> None:
        unchanged(
            d := sample(),
            lambda: d.map(torch.add, 1),  # type: ignore[arg-type]
            TypeError,
            "map takes mappings with the keys of this DeviceDict, got an int; bind any other value in a lambda",
        )
        other = sample().to("meta")
        with pytest.raises(DeviceMismatchError, match=r"^'a' is on meta, this DeviceDict is on cpu; move the other"):
            d.map(torch.add, other)

    def test_kept_objects_stay_and_typed_dicts_are_validated(self) -> None:
        d = DeviceDict({"x": torch.tensor(1.0), "o": object}, objects="keep")
        assert d.map(torch.add, {"x": torch.ones(()), "o": 3})["o"] is object
        with pytest.raises(TypeError, match=r"^'o': expected an object, got float32\[1\] in the other mapping$"):
            d.map(torch.add, {"x": torch.ones(()), "o": torch.ones(1)})

        class Point(TypedDeviceDict):
            x: Tensor

        assert type(Point(x=torch.ones(2)).map(torch.add, {"x": torch.ones(2)})) is Point
        with pytest.raises(TypeError, match=r"^Point\.x: expected Tensor, got"):
            Point(x=torch.ones(2)).map(lambda x, y: {"y": x + y}, {"x": torch.ones(2)})


class TestAsALoop:
    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
    @pytest.mark.parametrize("method", METHODS)
    def test_with_mappings_tensors_and_numbers(self, method: str, dtype: torch.dtype, packed: bool) -> None:
        others: list[Any] = [sample(dtype, 1), reordered(sample(dtype, 1)), 3, 0.5, -2, 0, torch.tensor(0.25)]
        for other in others:
            d = sample(dtype)
            expected = d.clone()
            d = d.pack() if packed else d
            before = d._tensors()
            versions = [t._version for t in before]
            values = [other] * 4 if not isinstance(other, dict) else expected.map(lambda _, o: o, other)._tensors()
            for t, o in zip(expected._tensors(), values, strict=True):
                getattr(t, method)(o)
            assert getattr(d, method)(other) is d
            assert all(x is y for x, y in zip(d._tensors(), before, strict=True)) and d.is_packed == packed
            for x, y, old in zip(d._tensors(), expected._tensors(), versions, strict=True):
                assert x._version > old and torch.allclose(x, y, equal_nan=True)

    @pytest.mark.parametrize("packed", [False, True])
    def test_alpha_lerp_zero_and_copy(self, packed: bool) -> None:
        def fresh() -> DeviceDict:
            return sample().pack() if packed else sample()

        d, e = sample(), sample(seed=1)
        x, y = d["n", "b"], e["n", "b"]
        assert torch.allclose(fresh().add_(e, alpha=2)["n", "b"], x + 2 * y)
        assert torch.allclose(fresh().sub_(e, alpha=0.5)["n", "b"], x - 0.5 * y)
        assert torch.allclose(fresh().add_(3, alpha=2)["n", "b"], x + 6)
        assert torch.equal(fresh().lerp_(e, 0.1)["n", "b"], torch.lerp(x, y, 0.1))
        assert torch.equal(fresh().lerp_(torch.tensor(1.0), 0.1)["n", "b"], torch.lerp(x, torch.tensor(1.0), 0.1))
        assert torch.equal(fresh().copy_(e)["n", "b"], y)
        assert torch.equal(fresh().copy_(torch.tensor(7))["a"], torch.full((2, 3), 7.0))
        assert all(not t.any() for t in fresh().zero_()._tensors())
        assert fresh().copy_(e.to(torch.float64)) == e  # the dtype of the field stays

    def test_integers(self) -> None:
        d = DeviceDict({"w": torch.ones(2), "count": torch.tensor(3), "mask": torch.tensor([True, False])})
        other = {"mask": torch.tensor([False, True]), "count": torch.tensor(9), "w": torch.zeros(2)}
        d.lerp_(other, 0.25)
        assert d.to_dict()["w"].tolist() == [0.75, 0.75] and d["count"] == 9 and d["mask"].tolist() == [False, True]
        d.copy_({"w": torch.tensor([5, 6]), "count": torch.tensor(1), "mask": torch.tensor([1, 0])})
        assert d["w"].tolist() == [5, 6] and d["w"].dtype == torch.float32 and d["mask"].tolist() == [True, False]
        ids = DeviceDict({"i": torch.tensor([1, 2]), "u": torch.tensor([1], dtype=torch.uint8)})
        assert ids.add_(2).mul_(3).sub_(1).to_dict()["i"].tolist() == [8, 11] and ids["u"].tolist() == [8]
        unchanged(
            ids, lambda: ids.div_(2), RuntimeError, "'i' is int64[2]; torch refuses div_ of it and 2: result type"
        )
        unchanged(
            ids, lambda: ids.mul_(0.5), RuntimeError, "'i' is int64[2]; torch refuses mul_ of it and 0.5: result type"
        )
        unchanged(
            d, lambda: d.sub_(d), RuntimeError, "'mask' is bool[2]; torch refuses sub_ of it and bool[2]: Subtraction"
        )
        unchanged(
            d,
            lambda: d.add_({**other, "count": torch.tensor(1.5)}),
            RuntimeError,
            "'count' is int64[]; torch refuses add_ of it and float32[]",
        )

    def test_an_average_of_a_model(self) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Conv1d(4, 2, 1))
        average = DeviceDict(model.state_dict()).clone()
        by_hand = {k: v.clone() for k, v in model.state_dict().items()}
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            model[:2](torch.rand(5, 3)).sum().backward()
            optimizer.step()
            average.lerp_(model.state_dict(), 0.1)
            for k, v in model.state_dict().items():
                by_hand[k].lerp_(v, 0.1) if v.is_floating_point() else by_hand[k].copy_(v)
        assert average == by_hand and average["1.num_batches_tracked"] == 3
        weights = DeviceDict(dict(model.named_parameters()))
        with torch.no_grad():  # parameters are a class of their own
            weights.lerp_(
                dict(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Conv1d(4, 2, 1)).named_parameters()), 1.0
            )
        assert isinstance(weights["0.weight"], Parameter)

    def test_broadcasting_other_strides_and_no_elements(self) -> None:
        d = DeviceDict({"x": torch.zeros(2, 3), "t": torch.zeros(3, 2).t(), "e": torch.zeros(0, 3)})
        d.add_({"x": torch.arange(3.0), "t": torch.arange(6.0).reshape(3, 2).t(), "e": torch.zeros(1)})
        assert d["x"].tolist() == [[0, 1, 2]] * 2 and d["t"].tolist() == [[0, 2, 4], [1, 3, 5]]
        assert DeviceDict().add_(1) == {} and DeviceDict({"n": {}}).zero_() == {"n": {}}

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_nested_tensors(self) -> None:
        for layout in (torch.strided, torch.jagged):
            d = DeviceDict(
                {"x": torch.ones(2), "j": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=layout)}
            )
            d.mul_(3)
            assert [part.tolist() for part in d["j"].unbind()] == [[3], [3, 3]] and d["x"].tolist() == [3, 3]
            d.add_({"x": torch.ones(2), "j": d["j"].clone()}).zero_()
            assert [part.tolist() for part in d["j"].unbind()] == [[0], [0, 0]]

    def test_a_tensor_under_two_keys_is_changed_twice(self) -> None:
        x = torch.ones(2)
        DeviceDict({"a": x, "b": x}).mul_(3)
        assert x.tolist() == [9, 9]

    def test_another_class_is_called_for_each_field(self) -> None:
        calls: list[str] = []

        class Odd(Tensor):
            @classmethod
            def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                calls.append(getattr(func, "__name__", ""))
                return super().__torch_function__(func, types, args, kwargs or {})

        odd = torch.ones(2).as_subclass(Odd)
        d = DeviceDict({"x": torch.ones(2), "odd": odd, "s": torch.eye(2).to_sparse()})
        d.mul_(2)
        assert d["odd"] is odd and d["odd"].tolist() == [2, 2] and d["s"].to_dense().tolist() == [[2, 0], [0, 2]]
        assert "mul_" in calls
        unchanged(
            e := d.drop("s"),
            lambda: e.add_({"x": torch.ones(2), "odd": torch.ones(3)}),
            RuntimeError,
            "'odd' is float32[2]; torch refuses add_ of it and float32[3]",
        )


class TestPacked:
    def test_the_gaps_of_the_buffer_stay_zero(self) -> None:
        for change in (
            lambda d: d.add_(1),
            lambda d: d.mul_(-1),
            lambda d: d.mul_(math.inf),
            lambda d: d.mul_(2),
            lambda d: d.div_(0),
            lambda d: d.div_(d),
            lambda d: d.mul_(0.0),
            lambda d: d.zero_(),
        ):
            d = DeviceDict({f"k{i}": torch.rand(1 + i % 3) + 1 for i in range(40)})
            expected = change(d.clone())
            packed = d.pack()
            assert change(packed) is packed and packed.is_packed and packed == expected
            buffer = np.frombuffer(bytes(packed["k0"].untyped_storage()), dtype=np.uint8).copy()
            base = min(t.data_ptr() for t in packed._tensors())
            for t in packed._tensors():
                start = t.data_ptr() - base
                buffer[start : start + t.nbytes] = 0
            assert not buffer.any()

    @pytest.mark.parametrize(
        "change", ["none", "key order", "transposed", "one replaced", "gap", "other dtype", "itself"]
    )
    def test_two_packed_dicts_of_one_layout(self, change: str) -> None:
        """The result is that of a loop, whatever the layouts."""
        d = DeviceDict({f"k{i}": torch.rand(4, 4) + i for i in range(20)}).pack()
        e = DeviceDict({f"k{i}": torch.rand(4, 4) - i for i in range(20)}).pack()
        if change == "key order":
            e = DeviceDict({key: e[key] for key in reversed(e)})
        elif change == "transposed":
            e["k3"] = e["k3"].t()
        elif change == "one replaced":
            e["k3"] = torch.rand(4, 4)
        elif change == "gap":
            e["k3"] = e["k4"].clone().set_(e["k4"].untyped_storage(), 5 * 16, (4, 4), (4, 1))  # pyright: ignore[reportArgumentType]
        elif change == "other dtype":
            e = e.double()
        elif change == "itself":
            e = d
        for method, arguments in (
            ("lerp_", (0.25,)),
            ("copy_", ()),
            ("add_", ()),
            ("mul_", ()),
            ("div_", ()),
            ("sub_", ()),
        ):
            expected = {key: value.clone() for key, value in d.items()}
            others = {key: value.clone() for key, value in e.items()}
            versions = [value._version for value in d.values()]
            for key, value in expected.items():
                other = others[key] if method != "lerp_" else others[key].to(value.dtype)
                getattr(value, method)(other, *arguments)
            if change == "other dtype" and method == "lerp_":
                with pytest.raises(RuntimeError, match="torch refuses lerp_"):
                    d.lerp_(e, *arguments)
                assert [value._version for value in d.values()] == versions
                continue
            getattr(d, method)(e, *arguments)
            assert all(torch.allclose(d[key], expected[key], equal_nan=True) for key in d), method
            assert all(value._version > version for value, version in zip(d.values(), versions, strict=True))
        check_invariants(d)
        assert d.is_packed

    def test_a_conjugated_field(self) -> None:
        """Its elements are not those of the buffer, and torch's functions of lists refuse it."""
        d = DeviceDict({f"k{i}": torch.full((8,), 1 + 2j) for i in range(20)}).pack()
        d["k0"] = d["k0"].conj()
        d.mul_(1j)
        assert d["k0"].tolist() == [2 + 1j] * 8 and d["k1"].tolist() == [-2 + 1j] * 8
        d.copy_({key: value.conj() for key, value in d.items()}).lerp_(d.clone(), 0.5)
        assert d["k0"].tolist() == [2 - 1j] * 8 and d["k1"].tolist() == [-2 - 1j] * 8

    def test_autograd_sees_the_write(self) -> None:
        d = DeviceDict({f"k{i}": torch.rand(16) for i in range(40)}).pack()
        w = torch.ones(16, requires_grad=True)
        loss = (w * d["k3"]).sum()
        d.mul_(2)
        fails(RuntimeError, "modified by an inplace operation", loss.backward)

    def test_a_part_of_a_packed_dict_leaves_the_rest_alone(self) -> None:
        d = DeviceDict({f"k{i}": torch.ones(16) for i in range(40)}).pack()
        d.drop("k5", "k39", "k0").mul_(2)
        assert d["k5"].sum() == d["k39"].sum() == d["k0"].sum() == 16 and d["k6"].sum() == 32
        again = DeviceDict({k: d[k] for k in reversed(d)})
        again.add_(1)  # the same buffer, in another order
        assert d["k5"].sum() == 32

    def test_two_dtypes(self) -> None:
        d = DeviceDict({f"k{i}": torch.ones(4, dtype=torch.float64 if i % 2 else torch.float32) for i in range(40)})
        p = d.pack().mul_(3)
        assert p.is_packed and all(t.sum() == 12 for t in p._tensors())


class TestAutograd:
    def test_it_is_that_of_a_loop(self) -> None:
        for method, arguments in (("add_", ()), ("mul_", ()), ("div_", ()), ("copy_", ()), ("lerp_", (0.3,))):
            grads = []
            for whole in (True, False):
                leaf = DeviceDict({"x": torch.ones(2), "y": torch.full((3,), 2.0)}).requires_grad_()
                other = DeviceDict({"x": torch.full((2,), 3.0), "y": torch.full((3,), 4.0)}).requires_grad_()
                d = leaf.map(lambda t: t * 2)
                if whole:
                    getattr(d, method)(other, *arguments)
                else:
                    for k, v in d.items():
                        getattr(v, method)(other[k], *arguments)
                torch.stack([v.pow(2).sum() for v in d.values()]).sum().backward()
                grads.append([t.grad for t in (*leaf._tensors(), *other._tensors())])
            assert all(x is y is None or torch.equal(x, y) for x, y in zip(*grads, strict=True)), method

    def test_leaves_and_views(self) -> None:
        d = DeviceDict({"x": torch.ones(2), "w": torch.ones(2, requires_grad=True)})
        unchanged(
            d,
            lambda: d.add_(1),
            RuntimeError,
            "'w' is a leaf that requires grad; call add_ in torch.no_grad(), or detach() the dict first",
        )
        with torch.no_grad():
            d.add_(1)
        assert d["w"].tolist() == [2, 2] and d["w"].requires_grad and d["w"].is_leaf
        d.detach().mul_(2)
        assert d["w"].tolist() == [4, 4]
        part = DeviceDict({"x": torch.ones(2), "v": d["w"][0:1]})
        unchanged(
            part, part.zero_, RuntimeError, "'v' is a view that autograd does not let zero_ change; clone() it first"
        )
        many = DeviceDict({"x": torch.ones(1), "v": (d["w"] * 1).unbind()[0]})
        unchanged(many, lambda: many.mul_(2), RuntimeError, "'v' is a view that autograd does not let mul_ change")
        many = DeviceDict(dict(zip("ab", torch.zeros(2, 2).unbind(), strict=True)))
        operand = {"a": torch.ones(2), "b": torch.ones(2, requires_grad=True)}
        unchanged(
            many,
            lambda: many.add_(operand),
            RuntimeError,
            "'b' is a view that autograd does not let add_ change; clone() it first",
        )
        leaf = torch.ones(2, requires_grad=True)  # the other operand may require grad
        plain = DeviceDict({"x": torch.ones(2)})
        plain.add_({"x": leaf})["x"].sum().backward()
        assert leaf.grad is not None and leaf.grad.tolist() == [1, 1]

    @pytest.mark.parametrize("method", ["add_", "mul_", "copy_", "lerp_", "rows of a slice", "rows of indices"])
    @pytest.mark.parametrize("slices", [
        (slice(2), slice(2, 4)),
        (slice(4), slice(2)),
        (slice(2), slice(4)),
        (slice(3), slice(1, 4)),
        (slice(4), slice(4)),
    ], ids=["halves", "whole and part", "part and whole", "overlap", "twice"])  # fmt: skip
    def test_views_of_one_tensor_with_operands_that_require_grad(
        self, slices: tuple[slice, slice], method: str
    ) -> None:
        """A write gives the base a history. torch took the next view of it for a leaf then, and raised."""
        if method.startswith("rows") and len({part.stop - (part.start or 0) for part in slices}) > 1:
            return  # such fields have no rows in common

        def call(target: Any, other: Any) -> None:
            if method.startswith("rows"):
                at: Any = slice(0, 2) if "slice" in method else [1, 0]
                target[at] = other[at]
            else:
                getattr(target, method)(other, *([0.25] if method == "lerp_" else []))

        results: list[Any] = []
        for by_hand in (False, True):
            base = torch.arange(1.0, 5.0)
            parts = [base[part] for part in slices]
            others = [torch.full_like(part, 3.0 + i).requires_grad_() for i, part in enumerate(parts)]
            if by_hand:
                for part, other in zip(slices, others, strict=True):
                    call(base[part], other)  # torch knows the history of a view that it makes anew
            else:
                d, given = DeviceDict({"a": parts[0], "n": {"b": parts[1]}}), {"a": others[0], "n": {"b": others[1]}}
                call(d.rows, DeviceDict(given).rows) if method.startswith("rows") else call(d, given)
            (base * torch.arange(1.0, 5.0)).sum().backward()
            results.append((base.tolist(), [other.grad for other in others]))
        (values, grads), (expected, expected_grads) = results
        assert values == expected
        assert all(torch.equal(x, y) for x, y in zip(grads, expected_grads, strict=True))

    def test_inference_tensors(self) -> None:
        with torch.inference_mode():
            made = torch.ones(2)
        d = DeviceDict({"x": torch.ones(2), "i": made})
        unchanged(
            d,
            lambda: d.mul_(2),
            RuntimeError,
            "'i' is an inference tensor; clone() it before mul_, or use torch.inference_mode()",
        )
        with torch.inference_mode():
            d.mul_(2)
        assert made.tolist() == [2, 2]

    def test_expanded_tensors_and_shapes(self) -> None:
        d = DeviceDict({"x": torch.ones(2), "e": torch.ones(1, 3).expand(2, 3)})
        unchanged(
            d, lambda: d.add_(1), RuntimeError, "'e' is expanded: its elements share memory; clone() it before add_"
        )
        d = DeviceDict({"x": torch.ones(2), "n": {"y": torch.ones(3)}})
        unchanged(
            d,
            lambda: d.add_({"x": torch.ones(2), "n": {"y": torch.ones(2, 3)}}),
            RuntimeError,
            "'n.y' is float32[3]; add_ cannot broadcast float32[2, 3] to it",
        )
        unchanged(
            d,
            lambda: d.lerp_(d.to(torch.float64), 0.5),
            RuntimeError,
            "'x' is float32[2]; torch refuses lerp_ of it and float64[2]: expected dtype",
        )
        for ours, theirs in ((torch.float32, torch.bfloat16), (torch.float16, torch.float32)):
            average, other = (
                DeviceDict({"x": torch.ones(2, dtype=ours)}),
                DeviceDict({"x": torch.ones(2, dtype=theirs)}),
            )
            for operand in (other, other.to_dict(), other["x"]):
                with pytest.raises(RuntimeError, match=rf"; cast the other to {str(ours)[6:]} first$"):
                    average.lerp_(operand, 0.5)
            average.lerp_(other.to(ours), 0.5)
        with pytest.raises(RuntimeError, match=r"can't be cast to the desired output type Long$"):
            DeviceDict({"i": [1]}).add_(0.5)

    def test_a_field_that_fails_late_leaves_a_mixed_dict_alone(self) -> None:
        d = DeviceDict({"i": torch.tensor(1), "x": torch.ones(2), "y": torch.ones(3)})
        other = {"i": torch.tensor(5), "x": torch.zeros(2), "y": torch.zeros(4)}
        unchanged(
            d, lambda: d.lerp_(other, 0.5), RuntimeError, "'y' is float32[3]; lerp_ cannot broadcast float32[4] to it"
        )
        other = {"i": torch.tensor([5, 6]), "x": torch.zeros(2), "y": torch.zeros(3)}
        unchanged(d, lambda: d.lerp_(other, 0.5), RuntimeError, "'i' is int64[]; lerp_ cannot broadcast int64[2] to it")


class Odd(Tensor):
    pass


def leaf(*shape: int) -> Tensor:
    return torch.ones(shape, requires_grad=True)


FIELDS: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: torch.full((2, 3), 2.0),
    "int": lambda: torch.full((2, 3), 2),
    "bool": lambda: torch.ones(2, 3, dtype=torch.bool),
    "half": lambda: torch.ones(2, 3, dtype=torch.float16),
    "unsigned": lambda: torch.ones(2, 3, dtype=torch.uint16),
    "complex": lambda: torch.full((2, 3), 1 + 2j),
    "conjugated": lambda: torch.full((2, 3), 1 + 2j).conj(),
    "negative": lambda: torch._neg_view(torch.ones(2, 3)),
    "expanded": lambda: torch.ones(2, 1).expand(2, 3),
    "expanded, complex": lambda: torch.ones(2, 1, dtype=torch.complex64).expand(2, 3),
    "expanded, conjugated": lambda: torch.full((2, 1), 1 + 2j).expand(2, 3).conj(),
    "expanded subclass": lambda: torch.ones(2, 1).as_subclass(Odd).expand(2, 3),
    "transposed": lambda: torch.ones(3, 2).t(),
    "window": lambda: torch.ones(3, 4)[1:, 1:],
    "subclass": lambda: torch.ones(2, 3).as_subclass(Odd),
    "sparse": lambda: torch.ones(2, 3).to_sparse(),
    "history": lambda: leaf(2, 3) * 2,
    "leaf": lambda: leaf(2, 3),
    "view of a leaf": lambda: leaf(3, 3)[1:],
    "one": lambda: torch.tensor(2.0),
    "empty": lambda: torch.ones(0, 3),
}
OPERANDS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda t: torch.full((2, 3), 3.0),
    "like it": lambda t: t.detach().to_dense().clone(),
    "int": lambda t: torch.full((2, 3), 3),
    "double": lambda t: torch.full((2, 3), 3.0, dtype=torch.float64),
    "complex": lambda t: torch.full((2, 3), 1 + 2j),
    "conjugated": lambda t: torch.full((2, 3), 1 + 2j).conj(),
    "negative": lambda t: torch._neg_view(torch.ones(2, 3)),
    "leaf": lambda t: leaf(2, 3),
    "subclass": lambda t: torch.ones(2, 3).as_subclass(Odd),
    "sparse": lambda t: torch.ones(2, 3).to_sparse(),
    "row": lambda t: torch.ones(3),
    "one": lambda t: torch.tensor(3.0),
    "too wide": lambda t: torch.ones(2, 4),
    "more dimensions": lambda t: torch.ones(1, 2, 3),
    "itself": lambda t: t,
    "its first row": lambda t: t.detach()[:1],
    "its next rows": lambda t: (
        t.detach().as_strided((2, 3), (3, 1), 1)
        if t.layout is torch.strided and t.untyped_storage().nbytes() >= 7 * t.itemsize
        else t
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("field", FIELDS)
def test_any_field_and_operand_as_a_loop_or_not_at_all(field: str, operand: str) -> None:
    def made() -> tuple[DeviceDict, dict[str, Tensor]]:
        d = DeviceDict({"before": torch.ones(2, dtype=torch.complex64), "x": FIELDS[field]()})
        return d, {"before": torch.ones(2, dtype=torch.complex64), "x": OPERANDS[operand](d["x"])}

    def values(d: DeviceDict) -> str:
        return str([t.detach().to_dense().resolve_neg().resolve_conj() for t in d.values()])

    try:
        made()
    except (RuntimeError, IndexError):
        return  # no such operand of this field
    for method, arguments in (("add_", ()), ("mul_", ()), ("copy_", ()), ("lerp_", (0.5,)), ("zero_", None)):
        (looped, others), (d, other) = made(), made()
        unwritten, error = values(d), None
        try:
            for key, tensor in looped.items():
                copies = method == "lerp_" and not (tensor.is_floating_point() or tensor.is_complex())
                call = getattr(tensor, "copy_" if copies else method)
                call(*(() if arguments is None else (others[key].resolve_neg(), *(() if copies else arguments))))
        except (RuntimeError, TypeError, IndexError) as caught:
            error = caught
        whole = getattr(d, method)
        stricter = "expanded" in field or "its " in operand  # torch lets some operations through, and writes too often
        if error is None and not stricter:
            whole(*(() if arguments is None else (other, *arguments)))
            assert values(d) == values(looped), method
        else:
            said = ""
            try:
                whole(*(() if arguments is None else (other, *arguments)))
            except (RuntimeError, TypeError) as caught:
                said = str(caught)
            assert said.startswith("'x' ") if said else error is None, (method, error)
            assert values(d) == (unwritten if said else values(looped)), (method, error)


UNARY = "floor_ ceil_ round_ trunc_ frac_ sign_ sigmoid_ lgamma_ erf_ exp_ sqrt_ rsqrt_ reciprocal_ neg_ abs_ log_"


@pytest.mark.parametrize("name", UNARY.split())
def test_a_new_operation_needs_no_list_of_dtypes(name: str) -> None:
    """Each function of torch takes other dtypes. A field that it refuses leaves all fields as they were."""
    each, many = getattr(Tensor, name), getattr(torch, f"_foreach_{name}")
    operation = arithmetic._Operation(name, each, many)
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64):
        d = DeviceDict({"a": torch.full((3,), 1.5), "x": torch.ones(3).to(dtype)})
        expected = d["x"].clone()
        try:
            each(expected)
        except (RuntimeError, TypeError):
            unchanged(d, lambda d=d: arithmetic.write_fields(d, operation, ()), RuntimeError, "'x' is")
        else:
            arithmetic.write_fields(d, operation, ())
            assert torch.equal(d["x"], expected) and torch.equal(d["a"], each(torch.full((3,), 1.5)))


def test_operands_that_overlap_their_field() -> None:
    x = torch.arange(6.0)
    d = DeviceDict({"a": torch.zeros(3), "n": {"x": x[:3]}})
    other = {"a": torch.ones(3), "n": {"x": x[1:4]}}
    unchanged(
        d, lambda: d.add_(other), RuntimeError, "'n.x' overlaps its operand in memory; clone() the operand before add_"
    )
    pairs = torch.arange(8.0).reshape(4, 2)  # not the same memory, though between each other
    assert DeviceDict({"x": pairs[:, 0]}).add_({"x": pairs[:, 1]})["x"].tolist() == [1, 5, 9, 13]


def test_memory_between_the_fields_stays() -> None:
    """Fields may be windows of the memory of someone else."""
    memory = torch.ones(16, 20)
    windows = DeviceDict({f"k{i}": memory[i, :15] for i in range(16)})
    windows.mul_(2).div_(4)
    assert (memory[:, :15] == 0.5).all() and (memory[:, 15:] == 1).all()
    assert windows.rows[:0].mul_(2).rows[:0] == windows.rows[:0]


def test_out_of_memory_is_no_refusal() -> None:
    def full(tensor: Any) -> None:
        raise torch.OutOfMemoryError("no memory") if tensor.numel() else AssertionError

    d = DeviceDict({"x": torch.ones(2).as_subclass(Odd), "y": torch.ones(2)})
    unchanged(
        d,
        lambda: arithmetic.write_fields(d, arithmetic._Operation("fill_", full, full), ()),
        torch.OutOfMemoryError,
        "no memory",
    )


def test_the_order_of_arguments_and_the_field_of_an_error() -> None:
    d = sample()
    unchanged(
        d,
        lambda: d.lerp_(0.01, d),  # type: ignore[arg-type]
        TypeError,
        "lerp_ takes the other mapping first and the weight second: lerp_(other, 0.01)",
    )
    wrong = d.to_dict()
    wrong["n"]["b"] = torch.ones(7)
    unchanged(
        d,
        lambda: d.map(torch.add, wrong),
        RuntimeError,
        "'n.b': The size of tensor a (5) must match the size of tensor b (7)",
    )

    class Mine(RuntimeError):
        pass

    def fail(_: Tensor) -> Tensor:
        raise Mine("as it is")

    unchanged(d, lambda: d.map(fail), Mine, "as it is")


class TestRefusals:
    def strings(self) -> DeviceDict:
        return DeviceDict({"x": 1.0, "n": {"name": ["Ada"]}, "s": "a"}, encoders={"s": Vocabulary(["a", "b"])})

    @pytest.mark.parametrize("method", [*METHODS, "zero_", "lerp_", "copy_", "total_norm"])
    def test_encoded_strings(self, method: str) -> None:
        d = self.strings()
        arguments: dict[str, tuple[Any, ...]] = {"zero_": (), "lerp_": (d, 0.5), "copy_": (d,), "total_norm": ()}
        text = f"'n.name': {method} takes numbers, got encoded strings; leave the field out: drop('name') shares"
        unchanged(d, lambda: getattr(d, method)(*arguments.get(method, (1,))), TypeError, text)
        numbers = d.drop("s", "n").zero_()
        assert numbers["x"] is d["x"] and d["x"] == 0

    def test_an_encoder_for_every_key_leaves_numbers_alone(self) -> None:
        d = DeviceDict({"x": [1.0, 2.0], "name": "Ada"}, encoders=Hashing(8))
        e: Any = DeviceDict({"n": d})["n"]
        assert e.drop("name").mul_(2)["x"].tolist() == [2, 4]

    def test_other_operands(self) -> None:
        d = sample()
        unchanged(d, lambda: d.add_("1"), TypeError, "add_ takes a mapping, a tensor or a number, got a str")  # type: ignore[arg-type]
        unchanged(d, lambda: d.copy_(1), TypeError, "copy_ takes a mapping or a tensor, got an int")  # type: ignore[arg-type]
        unchanged(d, lambda: d.lerp_(d, torch.tensor(0.5)), TypeError, "weight is a number, got float32[]; use .item()")  # type: ignore[arg-type]
        unchanged(d, lambda: d.add_(d, alpha="2"), TypeError, "alpha is a number, got a str")  # type: ignore[arg-type]
        unchanged(
            d,
            lambda: d.add_(torch.ones(1, device="meta")),
            DeviceMismatchError,
            "the other tensor is on meta, this DeviceDict is on cpu",
        )
        unchanged(d, lambda: d.mul_(1j), RuntimeError, "'a' is float32[2, 3]; torch refuses mul_ of it and 1j")

    def test_numbers_that_a_dtype_cannot_hold(self) -> None:
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            for number in (65504, 1e30, math.inf, math.nan, 10**18):
                d = DeviceDict({"x": torch.ones(2, dtype=dtype), "y": torch.ones(1, dtype=dtype)})
                expected: Any = torch.ones(2, dtype=dtype)
                try:
                    expected.mul_(number)
                except RuntimeError:
                    unchanged(d, lambda d=d, n=number: d.mul_(n), RuntimeError, "'x' is")
                else:
                    assert torch.equal(d.mul_(number)["x"].nan_to_num(1), expected.nan_to_num(1))

    def test_none_is_no_operand(self) -> None:
        d = sample()
        for method in METHODS:
            unchanged(d, lambda m=method: getattr(d, m)(None), TypeError, f"{method} takes a mapping")


@pytest.mark.parametrize("packed", [False, True])
def test_a_scale_that_torch_refuses_is_an_error_with_the_path(packed: bool) -> None:
    d = DeviceDict({"n": {"x": torch.ones(3, dtype=torch.float16), "y": torch.ones(3, dtype=torch.float16)}})
    d = d.pack() if packed else d
    other = d.clone()
    unchanged(d, lambda: d.add_(other, alpha=1j), RuntimeError, "'n.x' is float16[3]; torch refuses add_ of it")
    unchanged(d, lambda: d.sub_(other, alpha=1e300), RuntimeError, "'n.x' is float16[3]; torch refuses sub_ of it")
    unchanged(d, lambda: d.lerp_(other, 1j), RuntimeError, "'n.x' is float16[3]; torch refuses lerp_ of it")


def test_total_norm() -> None:
    d = sample()
    flat = torch.cat([t.reshape(-1) for t in d._tensors()])
    for order in (1, 2, 3.0, math.inf):
        assert torch.allclose(d.total_norm(order), torch.linalg.vector_norm(flat, order))
    assert torch.equal(d.total_norm(), torch.nn.utils.get_total_norm(d._tensors()))
    assert torch.allclose(d.pack().total_norm(), d.total_norm()) and DeviceDict().total_norm() == 0
    mixed = DeviceDict({"x": torch.ones(3), "y": torch.ones(1, dtype=torch.float64)})
    assert mixed.total_norm().item() == pytest.approx(2)
    for order in (2, math.inf):
        assert DeviceDict({"x": torch.ones(0), "y": [-2.0]}).total_norm(order) == 2
        assert DeviceDict({"x": torch.ones(0)}).total_norm(order) == 0
    leaf = DeviceDict({"x": [3.0], "y": [4.0]}).requires_grad_()
    leaf.total_norm().backward()
    assert leaf["x"].grad is not None and leaf["x"].grad.tolist() == [pytest.approx(0.6)]
    with pytest.raises(TypeError, match=r"^'i': a norm takes floating-point or complex fields, got int64; leave"):
        DeviceDict({"i": 1}).total_norm()


@pytest.mark.parametrize("order", [0, -1, -math.inf, "2", math.nan], ids=repr)
def test_what_is_no_order_of_a_norm(order: Any) -> None:
    fails(ValueError, r"^ord is a number above 0, or inf, got", lambda: DeviceDict({"x": [3.0]}).total_norm(order))


class TestToList:
    def test_every_kind(self) -> None:
        d = DeviceDict({
            "loss": torch.tensor(0.5),
            "n": {"ids": torch.tensor([[1, 2]]), "ok": torch.tensor(True)},
            "name": ["Ada", "Bo"],
            "kind": "b",
            "o": None,
            "h": torch.ones(1, dtype=torch.bfloat16),
        }, encoders={"kind": Vocabulary(["a", "b"])}, objects="keep")  # fmt: skip
        got = d.tolist()
        expected = {
            "loss": 0.5, "n": {"ids": [[1, 2]], "ok": True}, "name": ["Ada", "Bo"], "kind": "b", "o": None, "h": [1.0],
        }  # fmt: skip
        assert got == expected and type(got) is dict and type(got["n"]) is dict and type(got["n"]["ok"]) is bool
        assert json.loads(json.dumps(got)) == got
        assert d.pack().tolist() == got
        assert DeviceDict({"x": torch.ones(1, requires_grad=True)}).tolist() == {"x": [1.0]}

    def test_what_cannot_be_listed(self) -> None:
        with pytest.raises(TypeError, match=r"^'name': .*Hashing"):
            DeviceDict({"name": "Ada"}, encoders={"name": Hashing(8)}).tolist()
        with pytest.raises((TypeError, ValueError), match=r"^'n\.s': .*; convert it first"):
            DeviceDict({"n": {"s": torch.eye(2).to_sparse()}}).tolist()
        nested = torch.nested.as_nested_tensor([torch.ones(1), torch.zeros(2)], layout=torch.jagged)
        assert DeviceDict({"x": nested}).tolist() == {"x": [[1.0], [0.0, 0.0]]}

    def test_one_copy_to_the_host(self, device: torch.device, copies: Any) -> None:
        d = DeviceDict({"a": [1.0, 2.0], "b": 3, "n": {"name": "Ada"}}, encoders={"name": Utf8()}).to(device)
        copies.clear()
        assert d.tolist() == {"a": [1.0, 2.0], "b": 3, "n": {"name": "Ada"}}
        if device.type == "sim":
            assert copies["d2h"] == 1, copies


def test_on_an_accelerator(device: torch.device) -> None:
    d, e = sample(), sample(seed=1)
    on = d.to(device)
    on.lerp_(e.to(device), 0.25).mul_(2).add_(1).sub_(on.clone(), alpha=0.5).div_(on.clone().add_(1))
    d.lerp_(e, 0.25).mul_(2).add_(1).sub_(d.clone(), alpha=0.5).div_(d.clone().add_(1))
    assert on.cpu().allclose(d) and torch.allclose(on.total_norm().cpu(), d.total_norm())
    unchanged(d, lambda: d.add_(on), DeviceMismatchError, "'a' is on")


@compiles
def test_transforms_and_modes() -> None:
    d = sample()

    def loss(x: Tensor) -> Tensor:
        return DeviceDict({"x": x * 2}).mul_(3).add_({"x": x})["x"].sum()

    assert torch.func.grad(loss)(torch.ones(3)).tolist() == [7, 7, 7]
    assert torch.func.vmap(lambda x: DeviceDict({"x": x.clone()}).add_(1)["x"])(torch.zeros(2, 3)).sum() == 6
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()

        def step(d: DeviceDict, e: DeviceDict) -> Any:
            d = d.clone().lerp_(e, 0.5).mul_(2).add_(e, alpha=2)
            return d.map(torch.add, e), d.total_norm()

        compiled = torch.compile(step, fullgraph=True, backend=backend)
        got, norm = compiled(d, sample(seed=1))
        expected, other = step(d, sample(seed=1))
        assert got.allclose(expected) and torch.allclose(norm, other)
