"""TypedDeviceDict: the annotations of a class as its fields, at run time."""

# Fields that are declared in jaxtyping's words, and classes that a test makes: a checker sees neither as a client does.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import copy
import pickle
import re
import sys
import traceback
import types
from collections.abc import Callable
from functools import partial
from itertools import combinations, product
from typing import Annotated, Any, ClassVar, Generic, Literal, NewType, Optional, Protocol, TypeVar, get_type_hints

import numpy as np
import pytest
import torch
from checks import check_invariants, fails
from files import OLD_DYNAMO, compiles
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, default_collate, default_convert
from typing_extensions import TypeAliasType

from tensordict_lite import (
    BatchOrder,
    DeviceDict,
    DeviceMismatchError,
    Ragged,
    TypedDeviceDict,
    Utf8,
    Vocabulary,
    cat,
    collate,
    field,
    prefetch,
    stack,
)

jaxtyping = pytest.importorskip("jaxtyping")
from jaxtyping import Bool, Float, Float16, Float64, Int, UInt8  # noqa: E402

T = TypeVar("T")


class Obs(TypedDeviceDict):
    state: Float[Tensor, "batch n"]
    goal: Tensor | None = None


class Batch(TypedDeviceDict):
    image: Float[Tensor, "batch 3 h w"]
    label: Int[Tensor, "batch"]
    obs: Obs
    weight: Float[Tensor, "batch"] | None = None
    kept: ClassVar[int] = 3


class More(Batch, on_mismatch="move"):
    extra: Tensor
    weight: Tensor  # pyright: ignore[reportGeneralTypeIssues, reportIncompatibleVariableOverride]  # now required


class Loose(TypedDeviceDict, objects="keep", encoders={"s": Vocabulary(["a", "b"])}):
    x: Tensor
    s: Tensor
    any: DeviceDict | None = None
    meta: dict_keys | None = None  # pyright: ignore[reportInvalidTypeForm]
    anything: Any = None


dict_keys = type({}.keys())
OPTIONAL = Optional[Tensor]  # noqa: UP045  (the form before Python 3.10)


class Tree(TypedDeviceDict):
    value: Tensor
    left: Tree | None = None
    right: Optional[Tree] = None  # noqa: UP045


def items(n: int = 2) -> dict[str, Any]:
    return {"image": torch.zeros(n, 3, 4, 4), "label": torch.arange(n), "obs": {"state": torch.ones(n, 5)}}


def batch(n: int = 2) -> Batch:
    return Batch(**items(n))


def unchanged(d: DeviceDict[Any], change: Callable[[], Any]) -> pytest.ExceptionInfo[Exception]:
    """That ``change`` raises, and leaves ``d`` as it was, at every level."""
    before = [(id(node), list(node.items()), node.device, node.encoders) for node in (d, d.get("obs", d))]
    with pytest.raises(Exception) as caught:  # noqa: PT011  (the caller asserts which)
        change()
    after = [(id(node), list(node.items()), node.device, node.encoders) for node in (d, d.get("obs", d))]
    for old, new in zip(before, after, strict=True):
        assert [k for k, _ in old[1]] == [k for k, _ in new[1]]
        assert all(x is y for (_, x), (_, y) in zip(old[1], new[1], strict=True))
        assert (old[0], *old[2:]) == (new[0], *new[2:])
    check_invariants(d)
    return caught


class TestMaking:
    @pytest.mark.parametrize("make", [
        Batch, lambda i: Batch(**i), lambda i: Batch(i.items()), lambda i: Batch((k, i[k]) for k in i), Batch.from_dict,
        lambda i: Batch(DeviceDict(i)), lambda i: Batch(DeviceDict(i).select("image", "obs"), label=i["label"]),
    ])  # fmt: skip
    def test_every_way(self, make: Any) -> None:
        d = make(items())
        check_invariants(d)
        assert type(d) is Batch and type(d.obs) is Obs and d == items() and set(d) == {"image", "label", "obs"}

    def test_options(self) -> None:
        d = Batch(**items(), device="meta")
        assert d.device == torch.device("meta") and d.obs.state.is_meta
        d = Batch.from_dict({**items(), "weight": [0.5, 1.5]}, dtype=torch.float64, device="cpu")
        assert d.weight is not None and d.weight.dtype == torch.float64
        with pytest.raises(DeviceMismatchError):
            Batch(**{**items(), "label": torch.arange(2, device="meta")})
        moved = More(**{**items(), "weight": torch.ones(2, device="cpu")}, extra=1)
        assert moved._policy.on_mismatch == "move" and moved.extra == 1

    def test_host_values_and_class_policy(self) -> None:
        d = Loose(x=[1, 2], s=["a", "b"], meta={}.keys())
        assert d.x.tolist() == [1, 2] and d.s.tolist() == [0, 1] and d.decode("s") == ["a", "b"] and d.meta == {}.keys()
        outer = type("Outer", (TypedDeviceDict,), {"__annotations__": {"loose": Loose, "name": Tensor}})
        nested: Any = outer(loose={"x": 0, "s": "b"}, name="Ada")
        assert nested.loose.decode("s") == "b" and type(nested.loose) is Loose and nested.decode("name") == "Ada"

    def test_none_says_absent(self) -> None:
        d = Batch(**items(), weight=None)
        assert d.weight is None and "weight" not in d and len(d) == 3
        assert Obs(state=torch.ones(1, 1), goal=None).goal is None
        assert "goal" not in Batch(**{**items(), "obs": {"state": torch.ones(2, 5), "goal": None}}).obs
        with pytest.raises(TypeError, match=r"^Batch\.image: expected Float\[Tensor, 'batch 3 h w'\], got None$"):
            Batch(**{**items(), "image": None})

    def test_any_dict_and_anything(self) -> None:
        d = Loose(x=0, s="a", any={"q": {"r": 1}}, anything=object)
        assert type(d.any) is DeviceDict and type(d.any["q"]) is DeviceDict and d.anything is object
        assert type(Loose(x=0, s="a", any=batch()).any) is Batch

    def test_recursive(self) -> None:
        t = Tree(value=1, left={"value": 2, "right": {"value": 3}})
        assert t.left is not None and type(t.left.right) is Tree and t.left.right.value == 3 and t.right is None
        with pytest.raises(
            TypeError, match=r"^'left\.right': 'value' is missing; the fields of Tree are value, left, right$"
        ):
            Tree(value=1, left={"value": 2, "right": {}})

    def test_a_schema_without_fields_is_empty(self) -> None:
        empty = type("Empty", (TypedDeviceDict,), {})
        assert empty() == {} and empty.from_dict({}) == {}
        fails(TypeError, r"^Empty has no field 'x'\. Its fields are none$", lambda: empty(x=1))


class TestAttributes:
    def test_they_are_the_items(self) -> None:
        d = batch()
        d.label = torch.ones(2, dtype=torch.int64)
        assert d.label is d["label"] and d.label.sum() == 2
        d.obs = {"state": torch.zeros(2, 1)}  # type: ignore[assignment]
        assert type(d.obs) is Obs and d.obs.state.shape == (2, 1)
        d.weight = torch.ones(2)
        assert list(d) == ["image", "label", "obs", "weight"]
        d.weight = None
        assert "weight" not in d
        d["weight"] = torch.ones(2)
        del d.weight
        with pytest.raises(AttributeError, match=r"^Batch\.weight is absent already$"):
            del d.weight
        d["weight"] = None  # type: ignore[assignment]  (there is none to delete)
        assert Batch.image.__doc__ == "The item 'image'." and "image" in dir(d) and Batch.kept == 3

    @pytest.mark.parametrize("name", ["lable", "__dict__"])
    def test_nothing_else_can_be_set(self, name: str) -> None:
        with pytest.raises(AttributeError):
            setattr(batch(), name, torch.ones(2))

    def test_nothing_else_can_be_read(self) -> None:
        d: Any = batch()
        with pytest.raises(AttributeError, match="lable"):
            d.lable  # noqa: B018
        assert not hasattr(d, "__dict__")


class TestRefusals:
    @pytest.mark.parametrize(("change", "error", "message"), [
        ({"label": None}, TypeError, "Batch.label: expected Int[Tensor, 'batch'], got None"),
        ({"label": object()}, TypeError, "'label': expected a tensor"),
        ({"image": {"a": 1}}, TypeError, "Batch.image: expected Float[Tensor, 'batch 3 h w'], got DeviceDict"),
        ({"obs": torch.ones(2)}, TypeError, "Batch.obs: expected Obs, got float32[2]"),
        ({"obs": {}}, TypeError, "'obs': 'state' is missing; the fields of Obs are state, goal"),
        ({"obs": {"state": torch.ones(2, 5), "gaol": 1}}, TypeError,
         "'obs': Obs has no field 'gaol', did you mean 'goal'? Its fields are state, goal"),
        ({"lable": torch.ones(2)}, TypeError,
         "Batch has no field 'lable', did you mean 'label'? Its fields are image, label, obs, weight"),
        ({"qq": object(), 5: 2}, TypeError, "Batch has no field 'qq'. Its fields are"),
        ({5: 2}, TypeError, "keys are str, got 5 of type int; use '5'"),
        ({"label": torch.ones(2)}, ValueError,
         "Batch.label: expected Int[Tensor, 'batch'], got float32[2]: this array has dtype float32"),
        ({"image": torch.ones(2, 1, 4, 4)}, ValueError,
         "Batch.image: expected Float[Tensor, 'batch 3 h w'], got float32[2, 1, 4, 4]: "
         "the dimension size 1 does not equal 3"),
        ({"image": torch.ones(2, 3)}, ValueError,
         "Batch.image: expected Float[Tensor, 'batch 3 h w'], got float32[2, 3]: this array has 2 dimensions, "
         "not the 4 expected"),
        ({"label": torch.arange(5)}, ValueError,
         "Batch.label: expected Int[Tensor, 'batch'], got int64[5]: "
         "the size of dimension batch is 5 which does not equal the existing value of 2, from Batch.image, "
         "which is float32[2, 3, 4, 4]"),
        ({"obs": {"state": torch.ones(7, 5)}}, ValueError,
         "Batch.obs.state: expected Float[Tensor, 'batch n'], got float32[7, 5]: "
         "the size of dimension batch is 7 which does not equal the existing value of 2, from Batch.image, "
         "which is float32[2, 3, 4, 4]"),
    ])  # fmt: skip
    def test_wherever_values_come_in(self, change: dict[Any, Any], error: type[Exception], message: str) -> None:
        d = batch()
        ways: list[Callable[[], Any]] = [
            lambda: d.update(change),
            lambda: d.__ior__(change),
            lambda: d | change,
            lambda: Batch({**items(), **change}),
            lambda: Batch.from_dict([*items().items(), *change.items()]),
        ]
        if len(change) == 1:
            ((key, value),) = change.items()
            ways += [lambda: d.__setitem__(key, value), lambda: d.__setitem__((key,), value)]
            if key in Batch._declared:
                ways.append(lambda: setattr(d, key, value))
            else:
                ways.append(lambda: d.setdefault(key, value))
        for way in ways:
            caught = unchanged(d, way)
            assert caught.type is error and str(caught.value).startswith(message)

    @pytest.mark.parametrize(
        "given_items",
        [{}, (), None, {"obs": None}, {"obs": {"state": torch.ones(2, 5)}}],
        ids=["a dict", "a tuple", "None", "a field is None", "other fields"],
    )
    def test_missing(self, given_items: Any) -> None:
        with pytest.raises(
            TypeError,
            match=r"^'\w+', .* are missing; the fields of Batch are image, label, obs, weight$|^Batch\.obs: "
            r"expected Obs, got None$",
        ):
            Batch(given_items)

    def test_missing_are_all_named(self) -> None:
        with pytest.raises(
            TypeError, match=r"^'label', 'obs' are missing; the fields of Batch are image, label, obs, weight$"
        ):
            Batch(image=torch.zeros(2, 3, 4, 4))  # type: ignore[call-arg]

    def test_what_is_required_is_not_deleted(self) -> None:
        d = batch()
        nested: Any = DeviceDict({"b": d})
        for way in (
            lambda: d.__delitem__("label"),
            lambda: d.__delattr__("label"),
            lambda: d.pop("label"),
            lambda: d.pop("label", None),
            lambda: d.__delitem__(("label",)),
            d.clear,
            lambda: d.__delitem__(("obs", "state")),
            lambda: d.pop(("obs", "state")),
            d.popitem,
            lambda: nested.__delitem__(("b", "obs", "state")),
        ):
            caught = unchanged(d, way)
            assert caught.type is TypeError
            assert str(caught.value).startswith(("Batch.", "Obs.state"))
            assert "is required and cannot be deleted; drop('" in str(caught.value)
        d.weight = torch.ones(2)
        assert d.popitem()[0] == "weight" and d.pop("weight", 1) == 1 and d.setdefault("weight") is None
        with pytest.raises(KeyError):
            d.pop("nope")
        with pytest.raises(KeyError):
            del d["nope"]
        optional = type("AllOptional", (TypedDeviceDict,), {"__annotations__": {"x": OPTIONAL}, "x": None})(x=1)
        optional.clear()
        assert optional == {}

    def test_update_checks_the_end_state(self) -> None:
        d = batch(2)
        unchanged(d, lambda: d.update(image=torch.zeros(4, 3, 4, 4)))
        d.update(items(4))
        assert len(d.rows) == 4
        unchanged(d, lambda: d.update({**items(6), "weight": torch.ones(5)}))
        d.weight = torch.ones(4)
        unchanged(d, lambda: d.update(image=torch.zeros(6, 3, 4, 4), weight=None))
        d.update(items(6), weight=None)
        assert len(d.rows) == 6 and "weight" not in d

    def test_a_path_is_checked_at_every_level(self) -> None:
        d = batch()
        caught = unchanged(d, lambda: d.__setitem__(("obs", "state"), torch.ones(3, 5)))
        assert str(caught.value).startswith("Batch.obs.state: expected Float[Tensor, 'batch n'], got float32[3, 5]")
        caught = unchanged(d, lambda: d.__setitem__(("obs", "state"), torch.ones(2)))
        assert str(caught.value).startswith("Obs.state: ")
        unchanged(d, lambda: d.__setitem__(("obs", "nope"), 1))
        unchanged(d, lambda: d.__setitem__(("nope", "x"), 1))
        plain: Any = DeviceDict({"b": d})
        unchanged(plain["b"], lambda: plain.__setitem__(("b", "obs", "state"), torch.ones(3, 5)))
        obs = d.obs
        d["obs", "state"] = torch.full((2, 1), 7.0)
        assert d.obs is obs and obs.state[0] == 7
        d["obs", "goal"] = 1.0
        d["obs", "goal"] = None
        assert obs.goal is None

    def test_objects_may_stand_in_for_tensors_where_they_are_kept(self) -> None:
        info = types.SimpleNamespace(shape=(2,))  # as accelerate puts in, when it sends the structure ahead
        d = Loose({"x": info, "s": info})
        assert d.x is info
        fails(TypeError, r"Loose\.x: expected Tensor, got None", lambda: Loose({"x": None, "s": info}))
        with pytest.raises(TypeError, match=r"Loose\.meta: expected dict_keys, got a dict_values"):
            Loose({"x": info, "s": info, "meta": {}.values()})


class TestDeclaring:
    @pytest.mark.parametrize(("fields", "message"), [
        ({"items": Tensor}, "Bad.items: a field cannot have the name of a method or property of DeviceDict; rename it"),
        ({"rows": Tensor}, "Bad.rows: a field cannot have the name of a method"),
        ({"from_dict": Tensor}, "Bad.from_dict: a field cannot have the name of a method"),
        ({"dtype": Tensor}, "Bad.dtype: a field cannot have the name of a constructor option; rename it"),
        ({"device": Tensor}, "Bad.device: a field cannot"),
        ({"_x": Tensor}, "Bad._x: a field cannot start with an underscore; rename it"),
        ({"x": int}, "Bad.x: values of int are stored as tensors; annotate it as Tensor"),
        ({"x": np.ndarray}, "Bad.x: values of ndarray are stored as tensors"),
        ({"x": str}, "Bad.x: values of str are stored as tensors"),
        ({"x": dict[str, Tensor]}, "Bad.x: mappings are stored as DeviceDicts; annotate it as"),
        ({"x": Float[np.ndarray, "a"]}, "Bad.x: arrays are stored as tensors; annotate it as Float[Tensor, ...]"),
        ({"x": Literal["a"]},
         "Bad.x: a field cannot be annotated with typing.Literal; use Tensor, a jaxtyping annotation of a tensor"),
        ({"x": Tensor | None}, "Bad.x: declare an optional field as `x: ... | None = None`"),
        ({"x": Obs | Batch}, "Bad.x: a field takes one class of nested dicts, and this annotation names several"),
    ])  # fmt: skip
    def test_what_is_refused(self, fields: dict[str, Any], message: str) -> None:
        with pytest.raises(TypeError) as caught:
            type("Bad", (TypedDeviceDict,), {"__annotations__": fields})
        assert str(caught.value).startswith(message)

    def test_defaults_and_clashes(self) -> None:
        with pytest.raises(TypeError, match=r"^Bad\.x has the default 3; declare it as `x: \.\.\. = field"):
            type("Bad", (TypedDeviceDict,), {"__annotations__": {"x": Tensor}, "x": 3})
        with pytest.raises(TypeError, match=r"^Bad\.x: declare an optional field as"):
            type("Bad", (TypedDeviceDict,), {"__annotations__": {"x": Tensor}, "x": None})
        with pytest.raises(TypeError, match=r"^Bad\.image is a field, and something else in Bad; rename one of them$"):
            type("Bad", (Batch,), {"image": None})
        mixin = type("Mixin", (), {"image": lambda self: 1})
        for bases in ((mixin, Batch), (Batch, mixin)):
            with pytest.raises(TypeError, match=r"^Bad\.image is a field, and something else in Mixin"):
                type("Bad", bases, {})
        helper = type("Helper", (TypedDeviceDict,), {"mean": lambda self: 1})
        with pytest.raises(TypeError, match=r"^Bad\.mean is a field, and something else in Helper"):
            type("Bad", (helper,), {"__annotations__": {"mean": Tensor}})

    def test_inheritance(self) -> None:
        assert list(More._declared) == ["image", "label", "obs", "weight", "extra"] and issubclass(More, Batch)
        with pytest.raises(
            TypeError, match=r"^'weight', 'extra' are missing; the fields of More are image, label, obs, weight, extra$"
        ):
            More(**items())  # type: ignore[call-arg]
        d = More(**items(), weight=torch.ones(7), extra=1)
        assert d.weight.shape == (7,) and type(d.obs) is Obs

        class Left(TypedDeviceDict, dtype=torch.float64):
            a: Tensor

        class Right(TypedDeviceDict):
            b: Tensor

            def total(self) -> Tensor:
                return self.b.sum()

        class Both(Left, Right):
            pass

        both = Both(a=1.0, b=[1.5, 2.5])
        assert both.total() == 4 and both.a.dtype == torch.float64

    def test_other_ways_to_write_an_annotation(self) -> None:
        Image = NewType("Image", Tensor)

        class Pair(TypedDeviceDict, Generic[T], objects="keep"):
            a: Annotated[Tensor, "note"]
            b: T
            c: Image
            d: Float[Tensor, "n"] | Int[Tensor, "n m"]
            e: set[int] | Tensor | None = None

        for d in (torch.ones(2), torch.ones(2, 3, dtype=torch.int64)):
            assert Pair[int](a=1, b=object, c=1.0, d=d, e={1}.copy() and None).d is d
        with pytest.raises(
            ValueError,
            match=r"^Pair\.d: expected Float\[Tensor, 'n'\] \| Int\[Tensor, 'n m'\], got float32\[2, 3\]: "
            r"this array has 2 dimensions",
        ):
            Pair(a=1, b=1, c=1, d=torch.ones(2, 3))

    @pytest.mark.parametrize("future", ["from __future__ import annotations\n", ""])
    def test_of_strings_and_of_what_comes_later(self, future: str) -> None:
        source = future + (
            "import typing\nfrom torch import Tensor\nfrom tensordict_lite import TypedDeviceDict\n"
            "class A(TypedDeviceDict):\n    n: typing.ClassVar[int] = 1\n    b: 'B'\n"
            "    x: 'typing.Optional[Tensor]' = None\n    m: 'typing.ClassVar[int]' = 2\n"
            "early = None\ntry:\n    A(b={'y': 1})\nexcept NameError as error:\n    early = str(error)\n"
            "class B(TypedDeviceDict):\n    y: Tensor\n"
            "def local():\n    class Inner(TypedDeviceDict):\n        z: Tensor\n    class Outer(TypedDeviceDict):\n"
            "        inner: Inner\n    return Outer\n"
        )
        module = types.ModuleType("schemas")
        sys.modules["schemas"] = module
        try:
            exec(compile(source, "schemas", "exec", dont_inherit=True), vars(module))
            assert (
                module.early == "A: an annotation uses 'B', which is not defined in schemas; "
                "define or import it at the top level of that module, not only under TYPE_CHECKING"
            )
            assert type(module.A(b={"y": 1}).b) is module.B and list(module.A._declared) == ["b", "x"]
            outer = module.local()
            derived = type("Derived", (outer,), {"__module__": "schemas"})
            for cls in (outer, derived):
                assert type(cls(inner={"z": 1}).inner).__name__ == "Inner"
        finally:
            del sys.modules["schemas"]

    def test_names_are_looked_up_where_python_would(self) -> None:
        class Obs(TypedDeviceDict):  # not the one of the module
            pos: Tensor

        class Holder(TypedDeviceDict):
            obs: Obs
            Obs: Obs | None = None

        assert type(Holder(obs={"pos": 1}).obs) is Obs and Holder(obs={"pos": 1}, Obs={"pos": 2}).Obs.pos == 2  # pyright: ignore[reportOptionalMemberAccess]

        class Chain(TypedDeviceDict):  # pyright: ignore[reportRedeclaration]
            value: Tensor
            rest: Chain | None = None

        first = Chain

        class Chain(TypedDeviceDict):  # as in a notebook, run again
            value: Tensor
            rest: Chain | None = None

        assert type(Chain(value=1, rest={"value": 2}).rest) is Chain
        assert type(first(value=1, rest={"value": 2}).rest) is first

        class Named(TypedDeviceDict):
            register: Tensor
            mro: Tensor

        assert Named(register=1, mro=2).mro == 2
        assert "image" in get_type_hints(Batch, include_extras=True)

    def test_classes_that_cannot_be_asked(self) -> None:
        class Shape(Protocol):
            shape: Any

        with pytest.raises(
            TypeError, match=r"^Bad\.x: Shape cannot be checked at run time: Instance and class checks can only be used"
        ):
            type("Bad", (TypedDeviceDict,), {"__annotations__": {"x": Shape}})

    @pytest.mark.parametrize("listed", [list[str], list[int], tuple[float, ...]], ids=repr)
    def test_lists_of_host_values(self, listed: Any) -> None:
        with pytest.raises(
            TypeError, match=r"^Bad\.x: lists of strings and numbers are stored as tensors; annotate it as Tensor"
        ):
            type("Bad", (TypedDeviceDict,), {"__annotations__": {"x": listed}})


class TestShapes:
    def test_the_values_of_a_ragged_field(self) -> None:
        class Tokens(TypedDeviceDict):
            ids: Annotated[Ragged, Int[Tensor, "total"]]
            states: Annotated[Ragged, Float[Tensor, "total d"]]
            w: Float[Tensor, "n d"]

        ids = Ragged.from_rows([[1, 2], [3]])
        states = ids.with_values(torch.ones(3, 4))
        good: Any = {"ids": ids, "states": states, "w": torch.ones(2, 4)}
        assert Tokens(**good).rows[1:].states.values.shape == (1, 4)
        rows = [{"ids": [1], "states": torch.ones(1, 4), "w": torch.ones(4)}] * 2
        assert type(collate(rows, cls=Tokens).ids) is Ragged
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"ids": ids.with_values(torch.ones(3))}, r"Tokens\.ids\.values: expected Int\[.*, got float32\[3\]"),
            ({"w": torch.ones(2, 5)}, r"Tokens\.w: .*size of dimension d is 5 .* from Tokens\.states\.values"),
        ]
        for change, message in wrong:
            with pytest.raises(ValueError, match=message):
                Tokens(**{**good, **change})

    def test_json_lists_become_ragged(self) -> None:
        class Tokens(TypedDeviceDict, encoders={"words": Utf8()}):
            ids: Annotated[Ragged, Float[Tensor, "total"]]
            words: Ragged | None = None
            label: Int[Tensor, "n"]

        class More(Tokens):
            more: DeviceDict[Any]

        class Boxes(TypedDeviceDict):
            boxes: Annotated[Ragged, Float[Tensor, "total 2"]]

        data = {"ids": [[1, 2], [], [3]], "words": ["ab", "", "c"], "label": [0, 1, 2]}
        batch = Tokens.from_dict(data)
        samples = [dict(zip(data, values, strict=True)) for values in zip(*data.values(), strict=True)]
        check_invariants(batch)
        assert batch == collate(samples, cls=Tokens) and batch.tolist() == data
        assert Tokens.from_dict(batch.tolist()) == batch and batch.ids.values.dtype == torch.float32
        check_invariants(Boxes.from_dict({"boxes": [[[1, 2]], []]}))
        batch.ids = [[5], [6], [7, 8]]
        assert batch.ids.tolist() == [[5], [6], [7, 8]]
        assert len(Tokens.from_dict({"ids": [], "label": torch.ones(0, dtype=torch.int64)}).ids.lengths) == 0
        row: Any
        inside: Any = {"ids": [1, 2], "label": 0, "more": {"q": [1.0, 2.0], "m": {"z": 3}}}
        assert collate([inside], cls=More).rows[0].more.tolist() == inside["more"]
        for sample, row in zip(samples, Tokens.from_dict(data).rows, strict=True):
            made = collate([sample], cls=Tokens).rows[0]
            assert made == row == collate([dict(row)], cls=Tokens, encoders=row.encoders).rows[0]
            assert torch.equal(made.map(lambda t: t + 1).ids, row.ids + 1)
            made["ids"] = torch.ones(4)
            assert len(made.ids) == 4
        row = collate([{"boxes": [[1, 2], [3, 4], [5, 6]]}], cls=Boxes).rows[0]
        row["boxes"] = [[1.0, 2.0]]
        assert row == Boxes.from_dict({"boxes": [[[1.0, 2.0]]]}).rows[0]
        with pytest.raises(TypeError, match=r"^Tokens\.ids: expected Ragged, got float32\[2\]$"):
            Tokens.from_dict({**data, "ids": [1, 2]})
        with pytest.raises(ValueError, match=r"^'ids': a ragged field takes dense samples of at least one dimension, "):
            collate([{**samples[0], "ids": 1}], cls=Tokens)
        with pytest.raises(TypeError, match=r"^'ids': item \[[01]\]: expected .*, got"):
            Tokens.from_dict({**data, "ids": [[1, "a"], [], []]})
        with pytest.raises(ValueError, match=r"^Tokens\.ids\.values: expected Float\[.*, got int64\[2\]"):
            collate([{**samples[0], "ids": torch.tensor([1, 2])}], cls=Tokens)
        unchanged(batch, lambda: batch.update(ids=torch.ones(3)))

    @pytest.mark.parametrize("other", [Ragged, DeviceDict, slice])
    def test_a_union_with_another_class_validates_tensors(self, other: Any) -> None:
        hints = {"x": Float[Tensor, "n"], "y": Float[Tensor, "n"] | other}
        kind: Any = type("Kind", (TypedDeviceDict,), {"__annotations__": hints}, objects="keep")
        assert len(kind(x=torch.ones(2), y=torch.ones(2))) == 2
        for wrong in (torch.ones(3), torch.ones(2, dtype=torch.int64)):
            with pytest.raises(ValueError, match=r"^Kind\.y: expected Float\[Tensor, 'n'\] \| "):
                kind(x=torch.ones(2), y=wrong)

    def test_an_annotation_of_values_is_for_ragged_fields(self) -> None:
        with pytest.raises(TypeError, match=r"Wrong\.x: only a Ragged has an annotation for its values; annotate a"):

            class Wrong(TypedDeviceDict):
                x: Annotated[Tensor, Int[Tensor, "n"]]

    def test_what_jaxtyping_can_say(self) -> None:
        class Shapes(TypedDeviceDict):
            a: Float[Tensor, "*batch n"]
            b: Bool[Tensor, "*batch n-1"]
            c: UInt8[Tensor, "... _ 2"] | None = None
            d: Float[Tensor, "m+1"] | None = None  # of what is said later
            m: Float[Tensor, "m"] | None = None

        Shapes(
            a=torch.ones(2, 3, 4), b=torch.ones(2, 3, 3, dtype=torch.bool), c=torch.ones(9, 9, 9, 2, dtype=torch.uint8)
        )
        some = {"a": torch.ones(2, 3, 4), "b": torch.ones(2, 3, 3, dtype=torch.bool), "m": torch.ones(3)}
        assert Shapes(**some, d=torch.ones(4)).d is not None
        with pytest.raises(
            ValueError,
            match=r"^Shapes\.d: expected .* the dimension size 3 does not equal the existing value of m\+1=4, "
            r"from Shapes\.m, which is float32\[3\]$",
        ):
            Shapes(**some, d=torch.ones(3))
        with pytest.raises(
            ValueError,
            match=r"^Shapes\.b: expected Bool\[Tensor, '\*batch n-1'\], got bool\[2, 3, 4\]: "
            r"the dimension size 4 does not equal",
        ):
            Shapes(a=torch.ones(2, 3, 4), b=torch.ones(2, 3, 4, dtype=torch.bool))
        with pytest.raises(
            ValueError,
            match=r"^Shapes\.b: .* variadic dimensions '\*batch' is .*, from Shapes\.a, which is float32\[2, 3, 4\]$",
        ):
            Shapes(a=torch.ones(2, 3, 4), b=torch.ones(5, 3, dtype=torch.bool))

        assert Shapes(a=some["a"], b=some["b"], d=torch.ones(9)).d is not None  # "m", which it speaks of, is absent
        wrong = type("Wrong", (TypedDeviceDict,), {"__annotations__": {"x": Float[Tensor, "?n"]}})
        fails(TypeError, r"^Wrong\.x: Cannot use `\?` annotations", lambda: wrong(x=torch.ones(2)))

    def test_names_are_of_one_instance(self) -> None:
        first, second = batch(2), batch(5)
        with jaxtyping.jaxtyped("context"):
            assert isinstance(torch.ones(9), Float[Tensor, "batch"])
            assert len(Batch(first).rows) == 2 and len(Batch(second).rows) == 5
            assert not isinstance(torch.ones(8), Float[Tensor, "batch"])

    def test_they_can_be_switched_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        assert Batch(**{**items(), "label": torch.ones(9)}).label.shape == (9,)
        fails(TypeError, r"^'image', 'label', 'obs' are missing; the fields of Batch", Batch)  # type: ignore[call-arg]

    @given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.booleans())
    def test_they_agree_or_it_is_said(self, a: int, b: int, c: int, nested: bool) -> None:
        given = {"image": torch.zeros(a, 3, 1, 1), "label": torch.arange(b), "obs": {"state": torch.ones(c, 1)}}
        if a == b == c:
            assert len(Batch(given).rows) == a
        else:
            with pytest.raises(ValueError, match=f"from Batch.image, which is float32\\[{a}, 3, 1, 1\\]$") as caught:
                Batch({**given, "obs": Obs(given["obs"])} if nested else given)
            assert ("Batch.label" if a != b else "Batch.obs.state") in str(caught.value)


CHOICES: dict[str, list[Any]] = {
    "x": [torch.ones(2, 3), torch.ones(2, 3).double(), torch.ones(2, 4), torch.ones(2),
          torch.nn.Parameter(torch.ones(2, 3))],
    "name": [["a", "b"], torch.zeros(2, 4, dtype=torch.uint8), torch.zeros(2, 4), None],
    "kind": [["a", "b"], torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32), torch.zeros(2)],
    "ids": [Ragged.from_rows([[1], [2, 3]]), Ragged.from_rows([[1.5], [2.5]]), torch.zeros(2, dtype=torch.int64)],
    "obs": [{"state": torch.ones(2, 5)}, {"state": torch.ones(3, 5)}, DeviceDict({"state": torch.ones(2, 5)}), {}],
    "any": [None, {"a": 1}, torch.ones(1)],
    "weight": [torch.ones(2), torch.ones(5), None, 1.5],
}  # fmt: skip


def test_the_quick_check_accepts_what_the_checks_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Every(TypedDeviceDict):
        x: Float[Tensor, "batch 3"]
        name: Annotated[Tensor, Utf8()]
        kind: Annotated[Tensor, Vocabulary(["a", "b"])]
        ids: Annotated[Ragged, Int[Tensor, "total"]]
        obs: Obs
        any: DeviceDict | None = None
        weight: Float[Tensor, "batch"] | None = None

    def outcome(change: dict[str, Any], cls: Any) -> Any:
        try:
            return cls.from_dict({**{key: values[0] for key, values in CHOICES.items()}, **change})
        except (TypeError, ValueError) as error:
            return type(error), str(error)

    schema = type(Every._schema())
    quick, seen = schema.fits, set[Any]()
    for first, second in combinations(CHOICES, 2):
        for change in product(CHOICES[first], CHOICES[second]):
            changes = dict(zip((first, second), change, strict=True))
            monkeypatch.setattr(schema, "fits", quick)
            one = outcome(changes, Every)
            monkeypatch.setattr(schema, "fits", lambda *_: False)
            assert one == outcome(changes, Every), changes
            seen.add(type(one))
    assert seen == {Every, tuple}
    monkeypatch.setattr(schema, "fits", quick)
    monkeypatch.setattr(schema, "check_kinds", None)
    assert type(outcome({}, Every)) is Every, "what fits is looked at once"


class TestSurvival:
    @pytest.mark.parametrize("make", [
        lambda d: pickle.loads(pickle.dumps(d)),
        lambda d: pickle.loads(pickle.dumps(d.pack())),
        copy.copy,
        copy.deepcopy,
        lambda d: d.copy(),
        lambda d: type(d)({k: v.clone() for k, v in d.items()}),
        lambda d: type(d)(tuple(d.items())),
        lambda d: tree_map(lambda t: t, d),
        lambda d: d.to("cpu", copy=True),
        lambda d: d.pack(),
        lambda d: d.clone(),
        lambda d: d | {},
        lambda d: {} | d,
        lambda d: d.rows[:],
        Batch,
        lambda d: d.detach(),
        lambda d: collate(list(d.rows)),
        lambda d: collate([r.to_dict() for r in d.rows], cls=Batch),
        lambda d: stack(list(d.rows)),
        lambda d: cat([d.rows[:1], d.rows[1:]]),
        lambda d: default_collate(list(d.rows)),
        lambda d: d.map(torch.clone),
        lambda d: Batch.unflatten(d.flatten()),
        lambda d: d.contiguous(),
        lambda d: d.double().float(),
    ])  # fmt: skip
    def test_it_stays_what_it_is(self, make: Callable[[Any], Any]) -> None:
        d = make(batch())
        check_invariants(d)
        assert type(d) is Batch and type(d.obs) is Obs and d == items() and d.weight is None
        with pytest.raises(TypeError, match="Batch has no field"):
            d["nope"] = 1

    def test_pytree_takes_anything_unchecked(self) -> None:
        d = tree_map(lambda t: None, batch())
        assert type(d) is Batch and d.image is None and type(d.obs) is Obs
        moved = tree_map(lambda t: t.to("meta"), batch())
        assert moved.device == torch.device("meta") and moved.obs.state.is_meta

    def test_rows_have_no_batch_dimension(self) -> None:
        d = batch(4)
        row = d.rows[1]
        assert type(row) is Batch and row.image.shape == (3, 4, 4)
        assert row.to(torch.float64).clone().image.dtype == torch.float64
        held = DeviceDict({"row": row})  # nor is one checked when it is put somewhere
        assert type(held["row"]) is Batch and held["row"].image is row.image
        row.label = torch.tensor(7)  # what does not fit as it is is not held to dimensions; names and kinds count
        row["obs", "goal"] = 1.0
        row.weight = None
        assert (row | {}).label == 7 and type(row)(row).label == 7 and Batch(row, weight=1.0).weight == 1
        assert default_convert(row).obs.goal == 1 and row.map(torch.clone).label == 7
        for change in ({"label": {}}, {"nope": 1}):
            with pytest.raises(TypeError, match=r"^Batch\.label: expected|^Batch has no field"):
                row.update(change)
        d.rows[0] = d.rows[1].clone()
        d.rows[1:3] = {**{k: v[:2] for k, v in items(4).items() if k != "obs"}, "obs": {"state": torch.zeros(2, 5)}}
        assert d.obs.state[1:3].sum() == 0 and d.obs.state[3].sum() == 5

    def test_of_some_fields_it_is_a_plain_dict(self) -> None:
        d = batch()
        for some in (
            d.select("image", ("obs", "state")),
            d.drop("label"),
            d.drop(("obs", "state")),
            DeviceDict({"b": d}).drop(("b", "obs", "state"))["b"],
        ):
            assert type(some) is DeviceDict
        assert type(d.drop(("obs", "state"))["obs"]) is DeviceDict and d.obs.state.shape == (2, 5)
        assert type(d.drop("label")["obs"]) is Obs and type(d.select("obs")["obs"]) is Obs
        assert type(d.flatten()) is DeviceDict
        strings = Loose(x=1, s="b").select("s")
        assert strings.decode("s") == "b"

    @staticmethod
    def samples() -> list[dict[str, Any]]:
        image, obs = np.ones((3, 4, 4), np.float32), {"state": [1.0, 2.0], "goal": None}
        return [{"image": image.copy(), "label": i, "obs": {**obs}, "weight": None} for i in range(3)]

    def test_collate_converts(self) -> None:
        samples = self.samples()
        d = collate(samples, cls=Batch)
        check_invariants(d)
        assert type(d.obs) is Obs and d.is_packed and d.label.tolist() == [0, 1, 2] and d.weight is None
        with pytest.raises(
            ValueError, match=r"^sample 1 lacks 'weight', which sample 0 has; give each sample the same keys$"
        ):
            collate([{**samples[0], "weight": 1.0}, samples[1]], cls=Batch)
        bare = {key: value for key, value in samples[0].items() if key != "weight"}
        assert "weight" not in collate([samples[0], bare, bare], cls=Batch)
        assert "weight" not in collate([d.rows[0], {**d.rows[0], "weight": None}])
        own = collate([Loose(x=i, s="b", any={"q": 1}) for i in range(2)])
        assert type(own) is Loose and own.decode("s") == ["b", "b"] and type(own.any) is DeviceDict

    def test_an_encoder_of_several_tensors(self) -> None:
        class Tokens(TypedDeviceDict):
            ids: Tensor
            mask: Tensor

        def encode(strings: list[str]) -> dict[str, Tensor]:
            return {"ids": torch.zeros(len(strings), 4), "mask": torch.ones(len(strings), 4)}

        class Prompt(TypedDeviceDict, encoders={"text": encode}):
            text: Tokens

        assert type(Prompt.from_dict({"text": ["a", "b"]}).text) is Tokens
        assert collate([{"text": "a"}, {"text": "b"}], cls=Prompt).text.ids.shape == (2, 4)
        wrong = type("Wrong", (TypedDeviceDict,), {"__annotations__": {"text": Tensor}}, encoders={"text": encode})
        fails(TypeError, r"^Wrong\.text: expected Tensor, got DeviceDict", lambda: wrong(text=["a"]))

    def test_kept_objects_are_lists_in_a_batch(self) -> None:
        class Kept(TypedDeviceDict, objects="keep"):
            x: Tensor
            meta: types.SimpleNamespace

        metas = [types.SimpleNamespace(i=i) for i in range(2)]
        for d in (
            collate([{"x": 1.0, "meta": m} for m in metas], cls=Kept),
            stack([Kept(x=1.0, meta=m) for m in metas]),
            cat([Kept(x=[1.0], meta=[m]) for m in metas]),
        ):
            d.x = torch.zeros(2)
            assert d.meta == metas and type(d)(dict(d)).meta == metas and d.rows[1].meta is metas[1]
        with pytest.raises(ValueError, match=r"^'meta': expected one kept value in all dicts, got namespace\(i=1\) in"):
            cat([Kept(x=[1.0], meta=m) for m in metas])
        fails(TypeError, r"^Kept\.meta: expected SimpleNamespace, got a list", lambda: Kept(x=1, meta=[metas[0], {1}]))
        with pytest.raises(TypeError, match=r"^Kept\.x: expected Tensor, got a list$"):
            collate([{"x": None, "meta": metas[0]}], cls=Kept)

    def test_map_is_checked_at_every_level(self) -> None:
        with pytest.raises(TypeError, match=r"^'obs': Obs\.state: expected .*, got DeviceDict"):
            batch().map(lambda t: {"m": t} if t.shape[-1] == 5 else t)
        fails(ValueError, r"^Batch\.image: expected", lambda: batch().map(torch.sum))

    def test_rows_are_set_with_the_encoders_of_nested_dicts(self) -> None:
        class Holder(TypedDeviceDict):
            v: Loose
            x: Tensor

        d = Holder.from_dict({"v": {"x": [1, 2], "s": ["a", "b"]}, "x": [1.0, 2.0]})
        d.rows[0] = {"v": {"x": 5, "s": "b"}, "x": 5.0}
        assert d.v.decode("s") == ["b", "b"] and d.v.x.tolist() == [5, 2]

    @pytest.mark.parametrize("context", ["fork", "forkserver"])
    def test_through_a_loader(self, context: str) -> None:
        loader: Any = DataLoader(
            [batch(1).rows[0] for _ in range(4)], batch_size=2, num_workers=1, multiprocessing_context=context
        )  # type: ignore[arg-type]
        for d in loader:
            assert type(d) is Batch and type(d.obs) is Obs and d.obs.state.shape == (2, 5) and d.is_packed

    def test_strings(self) -> None:
        class Named(TypedDeviceDict, encoders={"name": Utf8(8)}):
            name: UInt8[Tensor, "batch bytes"]
            x: Float[Tensor, "batch"]

        d = Named.from_dict({"name": ["Ada", "Grace"], "x": [1.0, 2.0]})
        assert d.decode("name") == ["Ada", "Grace"] and d.rows[1].decode("name") == "Grace"
        with pytest.raises(ValueError, match=r"^Named\.x: .*batch is 1 .* of 2, from Named\.name"):
            d.x = torch.ones(1)


@compiles
class TestCompiled:
    OPERATIONS: ClassVar[dict[str, Callable[[Batch], Any]]] = {
        "read": lambda d: d.image + d.obs.state.sum(),
        "read what is absent": lambda d: d.image if d.weight is None else d.weight,
        "write": lambda d: (setattr(d, "image", d.image * 2), d)[1],
        "path write": lambda d: (d.__setitem__(("obs", "state"), d.obs.state * 2), d)[1],
        "delete": lambda d: (setattr(d, "weight", d.label.float()), d.__delattr__("weight"), d)[2],
        "update": lambda d: (d.update(image=d.image + 1, weight=d.label.float()), d)[1],
        "construct": lambda d: Batch(image=d.image * 2, label=d.label, obs=Obs(state=d.obs.state)),
        "construct from a dict": lambda d: Batch(
            {"image": d.image * 2, "label": d.label, "obs": {"state": d.obs.state}}
        ),
        "from_dict": lambda d: Batch.from_dict({**d}),
        "move": lambda d: d.to(torch.float64),
        "rows": lambda d: d.rows[0:1].image,
        "unchecked": lambda d: Batch(image=d.label, label=d.image, obs=d.obs),  # no checking while it traces
    }

    @pytest.mark.parametrize(
        "name", [pytest.param(name, marks=OLD_DYNAMO if name == "delete" else ()) for name in OPERATIONS]
    )
    def test_it_traces_whole(self, name: str) -> None:
        torch._dynamo.reset()
        operation = self.OPERATIONS[name]
        got = torch.compile(operation, fullgraph=True, backend="eager")(batch())
        if name == "unchecked":
            assert got.image.dtype == torch.int64
            return
        expected = operation(batch())
        assert type(got) is type(expected)
        assert torch.equal(got, expected) if isinstance(got, Tensor) else got == expected


class Codes(TypedDeviceDict):
    ids: Tensor


class Text(TypedDeviceDict, encoders={"text": lambda strings: {"idz": torch.ones(len(strings))}}):
    text: Codes


def test_codes_that_do_not_fit_the_field_are_told_with_its_path() -> None:
    fails(TypeError, r"^'text': Codes has no field 'idz', did you mean 'ids'\?", lambda: Text.from_dict({"text": "a"}))


Pixels = TypeAliasType("Pixels", Tensor)


def test_an_alias_of_a_type_is_that_type() -> None:
    scope: dict[str, Any] = {"TypedDeviceDict": TypedDeviceDict, "Pixels": Pixels}
    exec("class Aliased(TypedDeviceDict):\n    x: Pixels\n", scope)
    assert scope["Aliased"](x=torch.ones(2))["x"].tolist() == [1, 1]
    fails(TypeError, "Aliased", lambda: scope["Aliased"](x=None))


class Scaled(TypedDeviceDict, encoders={"unit": Vocabulary(["m", "cm"])}):
    x: Tensor
    scale: Tensor = field(default=0.5)
    mean: Tensor = field(default_factory=lambda: torch.zeros(3))
    unit: Tensor = field(default="cm")


class Outer(TypedDeviceDict):
    inner: Scaled
    extra: Tensor | None = None


class TestDefaults:
    def test_a_default_of_tensors_moves_to_the_instance(self) -> None:
        class Made(TypedDeviceDict):
            x: Tensor
            ids: Ragged = field(default_factory=lambda: Ragged.from_rows([[1]]))
            n: DeviceDict[Any] = field(default_factory=lambda: DeviceDict({"q": torch.zeros(2)}))

        made = Made(x=torch.ones(2, device="meta"))
        assert made.ids.device == made.n.device == torch.device("meta")

    def test_every_way_of_making(self, tmp_path: Any) -> None:
        pytest.importorskip("safetensors")
        x = torch.ones(2)
        DeviceDict({"x": x}).save(tmp_path / "d")
        torch.save(Scaled(x=x), tmp_path / "t")
        for d in (
            Scaled(x=x),
            Scaled({"x": x}),
            Scaled.from_dict({"x": [1.0, 1.0]}),
            Scaled.wrap(DeviceDict({"x": x})),
            Scaled.load(tmp_path / "d"),
            torch.load(tmp_path / "t", weights_only=True),
            Outer(inner={"x": x}).inner,
            Outer.from_dict({"inner": {"x": x}}).inner,
        ):
            check_invariants(d)
            assert type(d) is Scaled and set(d) == {"x", "scale", "mean", "unit"} and d.scale == 0.5
            assert d.mean.shape == (3,) and d.decode("unit") == "cm" and torch.equal(d.x, x)
        given = Scaled(x=x, scale=2, mean=x, unit="m")
        assert given.scale == 2 and given.mean is x and given.decode("unit") == "m"

    def test_collate_gives_it_to_each_sample(self) -> None:
        batch = collate([{"x": 1.0}, {"x": 2.0, "scale": 3.0, "unit": "m"}], cls=Scaled)
        assert batch.scale.tolist() == [0.5, 3.0] and batch.decode("unit") == ["cm", "m"] and batch.mean.shape == (2, 3)
        assert batch.is_packed and batch == stack([Scaled(x=1.0), Scaled(x=2.0, scale=3.0, unit="m")])

    def test_a_factory_is_called_for_each_instance_and_follows_the_device(self) -> None:
        a, b = Scaled(x=torch.ones(1)), Scaled(x=torch.ones(1))
        a.mean.add_(1)
        assert not b.mean.any() and a.mean is not b.mean
        assert Scaled(x=torch.ones(1, device="meta")).mean.is_meta and Scaled(x=[1.0], device="meta").scale.is_meta

    def test_it_is_always_there(self) -> None:
        d = Scaled(x=1.0)
        for way in (
            lambda: d.pop("scale"),
            lambda: d.__delitem__("scale"),
            lambda: d.update(scale=None),
            lambda: Scaled(x=1.0, scale=None),
        ):
            caught = unchanged(d, way)
            assert caught.type is TypeError
        d.update(x=2.0)  # an update gives no default
        assert d.scale == 0.5
        assert type(d.to(torch.float64)) is Scaled and tree_map(torch.clone, d) == d
        assert pickle.loads(pickle.dumps(d)) == d

    def test_inheritance(self) -> None:
        class Other(Scaled):
            scale: Tensor  # pyright: ignore[reportGeneralTypeIssues]  # required again
            mean: Tensor = field(default=3.0)

        fails(TypeError, r"^'scale' is missing; the fields of Other are x, scale, mean, unit$", lambda: Other(x=1.0))
        assert Other(x=1.0, scale=1.0).mean == 3 and Other(x=1.0, scale=1.0).decode("unit") == "cm"

    @pytest.mark.parametrize(("make", "message"), [
        (field, "field takes either default= or default_factory="),
        (lambda: field(default=1, default_factory=dict), "field takes either"),
        (lambda: field(default=[1]), "the default is a list, which all instances would share; use default_factory="),
        (lambda: field(default=torch.ones(1)), "the default is float32[1], which"),
        (lambda: field(default_factory=3), "default_factory is a function without arguments, got an int"),
        (lambda: type("Bad", (TypedDeviceDict,), {"__annotations__": {"x": OPTIONAL}, "x": field(default=1)}),
         "Bad.x: declare an optional field as `x: ... | None = None`; a field with another default takes no None"),
    ])  # fmt: skip
    def test_what_is_refused(self, make: Any, message: str) -> None:
        with pytest.raises(TypeError) as caught:
            make()
        assert str(caught.value).startswith(message)

    def test_none_as_a_default_is_an_optional_field(self) -> None:
        made = type("Made", (TypedDeviceDict,), {"__annotations__": {"x": OPTIONAL}, "x": field(default=None)})
        assert made().x is None and "x" not in made()

    def test_a_default_is_validated(self) -> None:
        bad = type("Bad", (TypedDeviceDict,), {"__annotations__": {"x": Int[Tensor, "3"]}, "x": field(default=1.5)})
        fails(ValueError, r"^Bad\.x: expected Int\[Tensor, '3'\], got float32\[\]", bad)

    @compiles
    def test_in_one_graph(self) -> None:
        torch._dynamo.reset()
        run = torch.compile(lambda x: Scaled(x=x * 2).x + 1, fullgraph=True, backend="eager")
        assert run(torch.ones(1)) == 3


class TestWrap:
    def test_it_shares_the_tensors(self) -> None:
        d = DeviceDict({**items(), "weight": torch.ones(2)}).pack()
        w = Batch.wrap(d)
        assert type(w) is Batch and type(w.obs) is Obs and w.is_packed
        assert all(x is y for x, y in zip(w._tensors(), d._tensors(), strict=True))
        w.weight.zero_()  # type: ignore[union-attr]
        assert not d["weight"].any()
        w["label"] = torch.ones(2, dtype=torch.int64)
        assert d["label"].tolist() == [0, 1]  # the structure is not shared
        named = DeviceDict({"x": 1.0, "unit": "m"}, encoders={"unit": Utf8()})
        assert Batch.wrap(w) == w and type(named["unit"]) is Tensor

    @pytest.mark.parametrize(("change", "message"), [
        ({"label": torch.arange(5)}, "Batch.label: expected Int"),
        ({"q": 1}, "Batch has no field 'q'"),
    ])  # fmt: skip
    def test_it_is_validated(self, change: Any, message: str) -> None:
        other: Any = DeviceDict(items()) | change
        with pytest.raises((TypeError, ValueError)) as caught:
            Batch.wrap(other)
        assert str(caught.value).startswith(message)

    def test_missing_fields_are_named(self) -> None:
        d = DeviceDict(items())
        with pytest.raises(TypeError, match=r"^'label' is missing; the fields of Batch are image, label"):
            Batch.wrap(d.drop("label"))
        with pytest.raises(
            TypeError, match=r"^wrap takes a DeviceDict, got a mapping; Batch\.from_dict takes other mappings$"
        ):
            Batch.wrap(items())  # type: ignore[arg-type]


def test_arithmetic_keeps_the_class() -> None:
    d = batch().drop("label").pack()
    typed = Obs(state=torch.ones(2, 5))
    assert typed.mul_(2) is typed and typed.state.sum() == 20 and d["image"].sum() == 0
    assert type(torch.stack([typed, typed])) is Obs and type(torch.zeros_like(typed)) is Obs


class Answer(TypedDeviceDict):
    text: Annotated[Tensor, Utf8()]
    kind: Annotated[Tensor | None, Vocabulary(["a", "b"])] = None


class Request(TypedDeviceDict):
    state: Float[Tensor, "batch n"]
    weight: Float64[Tensor, "batch"]
    answer: Answer


REQUEST: dict[str, Any] = {"state": [1, 2], "weight": 3, "answer": {"text": "yes", "kind": "b"}}


class TestAtTheBorder:
    def test_fields_of_strings(self) -> None:
        d = Answer.from_dict({"text": ["yes", "no"], "kind": ["a", "b"]})
        check_invariants(d)
        assert d.decode("text") == ["yes", "no"] and d.decode("kind") == ["a", "b"] and d["kind"].tolist() == [0, 1]
        rebuilt = Answer(dict(d.items()))
        assert rebuilt.decode("kind") == ["a", "b"], "a framework passes the codes"
        assert collate([{"text": "x", "kind": "b"}], cls=Answer).decode("kind") == ["b"]
        assert Answer.wrap(DeviceDict({"text": ["x"]})).decode("text") == ["x"]
        sub = type("Sub", (Answer,), {"__annotations__": {"text": Annotated[Tensor, Vocabulary(["x"])]}})
        assert sub(text=["x"], kind="a").decode("text") == ["x"] and Answer(text="y").decode("text") == "y"

    @pytest.mark.parametrize(("value", "error", "message"), [
        (3, TypeError, r"^Answer\.text: expected strings for Utf8\(\), got int64\[\]$"),
        ([0.5], TypeError, r"^Answer\.text: expected strings for Utf8\(\), got float32\[1\]$"),
        (torch.ones(2), TypeError, r"^Answer\.text: expected strings for Utf8\(\), got float32\[2\]$"),
    ])  # fmt: skip
    def test_other_values_of_a_field_of_strings(self, value: Any, error: type[Exception], message: str) -> None:
        d = Answer(text="yes")
        caught = unchanged(d, lambda: d.update(text=value))
        assert caught.type is error and caught.match(message)

    def test_codes_of_another_encoder(self) -> None:
        for make in (
            lambda: Answer(DeviceDict({"text": "a", "kind": "b"}, encoders={"kind": Vocabulary(["b"])})),
            lambda: Answer(text="a", kind="b", encoders={"kind": Vocabulary(["b"])}),
        ):
            with pytest.raises(
                ValueError,
                match=r"^Answer\.kind: expected strings of Vocabulary\(\['a', 'b'\]\), got strings of "
                r"Vocabulary\(\['b'\]\); give the strings themselves: decode it first$",
            ):
                make()

    def test_annotations_that_declare_no_field_of_strings(self) -> None:
        for hint in (Annotated[Float[Tensor, "n"], Utf8()], Annotated[Tensor, Utf8(), Vocabulary(["a"])]):
            with pytest.raises(TypeError, match=r"^Bad\.x: declare a field of strings as Annotated\[Tensor, encoder"):
                type("Bad", (TypedDeviceDict,), {"__annotations__": {"x": hint}})

        with pytest.raises(
            TypeError, match=r"; for a ragged field, declare a Ragged, and give the encoder to the class"
        ):
            type("Bad", (TypedDeviceDict,), {"__annotations__": {"x": Annotated[Ragged, Utf8()]}})

    def test_numbers_of_json_take_the_declared_floating_dtype(self) -> None:
        for weight in (3, 0.1):
            d = Request.from_dict({**REQUEST, "state": [[1, 2]], "weight": [weight], "answer": {"text": ["a"]}})
            assert d.state.dtype == torch.float32 and d.weight.dtype == torch.float64 and d.weight.item() == weight
        d["state"] = [[3, 4]]
        assert d.state.tolist() == [[3.0, 4.0]]
        for value in (np.array([[1, 2]]), [np.array([1, 2])], [[True, False]], torch.ones(1, 2, dtype=torch.int64)):
            caught = unchanged(d, lambda value=value: d.update(state=value))
            assert caught.match(r"^Request\.state: expected Float\[Tensor, 'batch n'\], got (int64|bool)\[1, 2\]")
        wide = Request.from_dict(
            {**REQUEST, "state": [[1]], "weight": [1], "answer": {"text": ["a"]}}, dtype=torch.half
        )
        assert wide.state.dtype == torch.half

    @pytest.mark.parametrize("hint", [Float, Float64, Float16, Int, UInt8, Bool, None])
    def test_collate_takes_numbers_as_the_constructor_does(self, hint: Any) -> None:
        declared = Tensor if hint is None else hint[Tensor, "batch ..."]
        kind: Any = type("Kind", (TypedDeviceDict,), {"__annotations__": {"x": declared}})
        given = [1, 0.1, 2**62 + 3, 2**70, 1e300, True, 1j, [1, 2], [0.1, 1.0], [2**70, 0.5], (1, 0.1), [True, 2]]
        given += [[True, False], [], [[]], [[1, 2]]]
        made = 0
        for pair in product(given, repeat=2):
            samples = [{"x": value} for value in pair]
            try:
                expected = cat([kind.from_dict({"x": [value]}) for value in pair])
            except (TypeError, ValueError):
                continue
            batch = collate(samples, cls=kind)
            assert batch["x"].dtype == expected["x"].dtype and batch == expected, pair
            made += 1
        assert made >= 2

    def test_lists_that_differ_take_the_declared_dtype(self) -> None:
        class Sequences(TypedDeviceDict):
            ids: Annotated[Ragged, Int[Tensor, "total"]]
            x: Annotated[Ragged, Float64[Tensor, "total"]]
            y: Float[Tensor, "batch n"]
            flags: Bool[Tensor, "batch m"]

        for ids, x, y in (([], [], []), ([7], [0.1], [1]), ([7], [1], [2.5])):
            given = [{"ids": [], "x": [], "y": [], "flags": []}, {"ids": ids, "x": x, "y": y, "flags": []}]
            batch = collate(given, cls=Sequences, pad={"y": 0.5})
            assert batch.ids.values.dtype == torch.int64 and batch.x.values.dtype == torch.float64
            assert batch.ids.values.tolist() == ids and batch.x.values.tolist() == x
            assert batch.y.dtype == torch.float32 and batch.y.tolist() == [[0.5] * len(y), y]
            assert batch.flags.dtype == torch.bool and batch.flags.shape == (2, 0)
        one: Any = type("One", (TypedDeviceDict,), {"__annotations__": {"x": Int[Tensor, "n"]}})
        assert one.from_dict({"x": []}).x.dtype == torch.int64
        with pytest.raises(ValueError, match=r"^One\.x: expected Int\[Tensor, 'n'\], got float32\[1\]"):
            one.from_dict({"x": [1.0]})
        with pytest.raises(ValueError, match=r"^One\.x: expected Int\[Tensor, 'n'\], got float32\[0\]"):
            one.from_dict({"x": np.ones(0, np.float32)})  # an array is never cast

    def test_one_class_for_a_sample_and_a_batch(self) -> None:
        samples = [collate([REQUEST], cls=Request).rows[0] for _ in range(3)]
        sample = samples[0]
        check_invariants(sample)
        assert type(sample) is Request and sample.state.shape == (2,) and sample.answer.decode("text") == "yes"
        made = collate(samples)
        assert type(made) is Request and type(made.answer) is Answer and made.state.shape == (3, 2)
        assert made.rows[1] == sample and made.rows.tolist()[2]["answer"] == REQUEST["answer"]
        for change, message in (
            ({"state": 1},
             r"^Request\.state: expected a row of Float\[Tensor, 'batch n'\], got float32\[\]: as a batch"),
            ({"weight": [1]},
             r"^Request\.weight: expected a row of Float64\[Tensor, 'batch'\], got float64\[1\]: as a"),
            ({"wieght": 1}, r"^Request has no field 'wieght', did you mean 'weight'\?"),
            ({"answer": {}}, r"^'answer': 'text' is missing; the fields of Answer are text, kind$"),
            ({"answer": {"text": "a", "q": 1}}, r"^'answer': Answer has no field 'q'\. Its fields are text, kind$"),
        ):  # fmt: skip
            with pytest.raises((TypeError, ValueError), match=message):
                collate([{**REQUEST, **change}], cls=Request)
        with pytest.raises(ValueError, match=r"^Request\.state: expected Float\[Tensor, 'batch n'\], got float32\[2\]"):
            Request.from_dict(REQUEST)

    @pytest.mark.parametrize(("change", "message"), [
        ({"x": [0.5] * 7},
         "Outer.x: expected a row of Float[Tensor, 'batch 8'], got float32[7]: as a batch, the dimension size 7 "
         "does not equal 8 as expected by the type hint"),
        ({"x": [[0.5] * 8]}, "Outer.x: expected a row of Float[Tensor, 'batch 8'], got float32[1, 8]: as a batch, "),
        ({"inner": {"y": 1.5}}, "Outer.inner.y: expected a row of Int[Tensor, 'batch *n'], got float32[]: as a "),
        ({"z": [1]}, "Outer.z: expected a row of Int[Tensor, 'batch n'], got int64[1]: as a batch, the size of "),
    ])  # fmt: skip
    def test_an_error_of_a_shape_shows_what_the_sample_has(self, change: Any, message: str) -> None:
        class Inner(TypedDeviceDict):
            y: Int[Tensor, "batch *n"]

        class Outer(TypedDeviceDict):
            x: Float[Tensor, "batch 8"]
            w: Int[Tensor, "batch n"]
            z: Int[Tensor, "batch n"]
            inner: Inner

        sample = {"x": [0.5] * 8, "w": [1, 2], "z": [3, 4], "inner": {"y": 1}}
        collate([sample], cls=Outer)
        wrong = {**sample, **change}
        for count in (1, 3):
            said = message if count == 1 else f"sample 0: {message}"
            with pytest.raises(ValueError, match=f"^{re.escape(said)}") as caught:
                collate([wrong] * count, cls=Outer)
            if "z" in change:
                assert str(caught.value).endswith(", from Outer.w, which is int64[2]")

    def test_a_sample_of_a_class_that_declares_the_number_of_rows_is_not_blamed(self) -> None:
        """None fits by itself."""

        class Pair(TypedDeviceDict):
            x: Float[Tensor, "2 3"]
            label: Int[Tensor, "2"]

        sample = {"x": [1.0] * 3, "label": 1}
        assert collate([sample, sample], cls=Pair)["label"].tolist() == [1, 1]
        with pytest.raises(ValueError, match=r"^Pair\.label: expected a row of Int\[Tensor, '2'\], got float32\[\]: "):
            collate([sample, {**sample, "label": 1.5}], cls=Pair)

    @pytest.mark.parametrize(("change", "message"), [
        ({"x": [1.0]}, "Request.x: expected a row of Float[Tensor, 'batch 2'], got float32[1]: as a batch, "),
        ({"x": ["1", "2"]}, "Request.x: expected a row of Float[Tensor, 'batch 2'], got uint8[2, 1]: as a batch, "),
        ({"x": {"y": 1}}, "Request.x: expected Float[Tensor, 'batch 2'], got DeviceDict"),
        ({"x": None}, "'x': expected a tensor, number, "),
        ({"n": 3.0}, "Request.n: expected a row of Int[Tensor, 'batch'], got float32[]: as a batch, "),
        ({"n": 1 << 70}, "'n': int64 cannot hold 1180591620717411303424; "),
        ({"text": 3}, "Request.text: expected strings for Utf8(), got int64[1]"),
        ({"tags": 3}, "'tags': a ragged field takes dense samples of at least one dimension, got int64[]"),
        ({"inner": {}}, "'inner': 'kind' is missing; the fields of Inner are kind"),
        ({"inner": {"kind": "ox"}}, "'inner.kind': 'ox' is not among the 1 tokens of "),
        ({"inner": {"kind": "cat", "z": 1}}, "'inner': Inner has no field 'z'. Its fields are kind"),
        ({"txet": "a"}, "Request has no field 'txet', did you mean 'text'? Its fields are x, n, text, tags, inner"),
        ("n", "'n' is missing; the fields of Request are x, n, text, tags, inner"),
    ])  # fmt: skip
    def test_an_error_names_the_sample_that_does_not_fit(self, change: Any, message: str) -> None:
        """At every place, also at the first, with which the others are compared."""

        class Inner(TypedDeviceDict):
            kind: Annotated[Tensor, Vocabulary(["cat"])]

        class Request(TypedDeviceDict):
            x: Float[Tensor, "batch 2"]
            n: Int[Tensor, "batch"]
            text: Annotated[Tensor, Utf8()]
            tags: Ragged
            inner: Inner

        right: dict[str, Any] = {"x": [1, 2], "n": 3, "text": "a", "tags": [1], "inner": {"kind": "cat"}}
        wrong = {key: right[key] for key in right if key != change} if isinstance(change, str) else {**right, **change}
        for at in range(3):
            samples = [right, right, right]
            samples[at] = wrong
            fails(
                (TypeError, ValueError),
                f"^sample {at}: {re.escape(message)}",
                lambda s=samples: collate(s, cls=Request),
            )
        batches = prefetch(
            DataLoader(
                [right, wrong, right], batch_sampler=BatchOrder([2, 0, 1], 3), collate_fn=partial(collate, cls=Request)
            ),
            "cpu",
        )
        with pytest.raises((TypeError, ValueError)) as caught:
            next(iter(batches))
        assert "batch 0 of epoch 0, sample 2: row 1" in "".join(traceback.format_exception(caught.value))

    def test_samples_that_fit_but_differ(self) -> None:
        class Point(TypedDeviceDict):
            x: Tensor
            w: Tensor | None = None

        fails(ValueError, r"^'x': sample 1 has float32\[1\], sample 0 has float32\[2\]",
              lambda: collate([{"x": [1.0, 2.0]}, {"x": [1.0]}], cls=Point))  # fmt: skip
        fails(ValueError, r"^sample 1 has 'w', which sample 0 lacks; give each sample the same keys$",
              lambda: collate([{"x": 1}, {"x": 1, "w": 1}], cls=Point))  # fmt: skip
