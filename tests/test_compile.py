"""Under ``torch.compile(fullgraph=True)``: no graph break, the same results, no recompilation for a stable schema."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import check_invariants
from files import OLD_DYNAMO, compiles
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.while_loop import while_loop
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten, treespec_dumps, treespec_loads

from tensordict_lite import DeviceDict, DeviceMismatchError, Ragged, Vocabulary

pytestmark = compiles


class Batch(DeviceDict, on_mismatch="move"):
    pass


def sample() -> DeviceDict:
    return DeviceDict({"x": torch.ones(2), "y": torch.zeros(2), "n": {"x": torch.ones(3)}})


def after(change: Callable[[DeviceDict], Any]) -> Callable[[DeviceDict], DeviceDict]:
    def run(d: DeviceDict) -> DeviceDict:
        change(d)
        return d

    return run


def empty_then_set(d: DeviceDict) -> DeviceDict:
    out = DeviceDict()
    out["x"] = d["x"] + 1
    return out


def caught(d: DeviceDict) -> Any:
    for key in ("nope", ("n", "nope")):
        try:
            return d[key]
        except KeyError:
            continue
    return d["x"]


OPERATIONS: dict[str, Callable[[DeviceDict], Any]] = {
    "read": lambda d: d["x"] + 1,
    "path read": lambda d: d["n", "x"] + 1,
    "get": lambda d: d.get("x") + d.get("nope", 1),
    "membership": lambda d: d["x"] + (1 if "x" in d and ("n", "x") in d and ("n", "q") not in d else 2),
    "splat": lambda d: (lambda x, **rest: x + len(rest))(**d),  # pyright: ignore[reportArgumentType, reportOperatorIssue]
    "a miss": lambda d: caught(d) + (1 if hasattr(d, "shape") or hasattr(d, "nope") else 2),
    "keys": lambda d: d["x"] + len([k for k in d]),  # noqa: C416
    "values": lambda d: sum(v.sum() for v in d["n"].values()),
    "items": lambda d: sum(v.sum() for k, v in d.items() if k != "n"),
    "device": lambda d: d["x"] + (1 if d.device.type == "cpu" else 2),  # pyright: ignore[reportOptionalMemberAccess]
    "write": after(lambda d: d.__setitem__("w", d["x"] * 2)),
    "write a number": after(lambda d: d.__setitem__("w", 2.0)),
    "write a list": after(lambda d: d.__setitem__("w", [1.0, 2.0])),
    "path write": after(lambda d: d.__setitem__(("n", "x"), d["x"] * 2)),
    "new path write": after(lambda d: d.__setitem__(("m", "q"), d["x"] * 2)),
    "delete": after(lambda d: d.__delitem__("x")),
    "pop": lambda d: d.pop("x") + 1,
    "path pop": lambda d: d.pop(("n", "x")) + 1,
    "update": after(lambda d: d.update({"z": d["x"] + 1})),
    "update keywords": after(lambda d: d.update(z=d["x"] + 1)),
    "ior": after(lambda d: d.__ior__({"z": d["x"] + 1})),
    "or": lambda d: d | {"z": d["x"] + 1},
    "setdefault": after(lambda d: d.setdefault("q", d["x"])),
    "construct": lambda d: DeviceDict({"q": d["x"] + 1}),
    "construct on a device": lambda d: DeviceDict({"q": d["x"] + 1}, device="cpu"),
    "construct from pairs": lambda d: DeviceDict([("a", d["x"])]),
    "construct from a generator": lambda d: DeviceDict((k, d[k]) for k in ["x", "y"]),
    "fromkeys": lambda d: DeviceDict.fromkeys(["a", "b"], d["x"]),
    "empty, then set": empty_then_set,
    "nest": lambda d: DeviceDict({"q": d["x"] + 1, "m": {"z": d["y"]}}),
    "copy": lambda d: d.copy(),
    "to the same device": lambda d: d.to("cpu"),
    "to a dtype": lambda d: d.to(torch.float64),
    "to another device": lambda d: d.to("meta"),
    "half": lambda d: d.half(),
    "detach": lambda d: d.detach(),
    "clone": lambda d: d.clone(),
    "contiguous": lambda d: d.contiguous(),
    "map": lambda d: d.map(lambda t: t * 2),
    "map two": lambda d: d.map(torch.add, d),
    "map two without nested dicts": lambda d: d.drop("n").map(torch.add, d.drop("n")),
    "add_": lambda d: d.clone().add_(d, alpha=2),
    "add_ without nested dicts": lambda d: d.drop("n").clone().add_(d.drop("n")),
    "mul_ by a mapping": lambda d: d.drop("n").clone().mul_({"x": d["x"] + 1, "y": d["y"]}),
    "div_ by a number": lambda d: d.clone().div_(2),
    "copy_": lambda d: d.drop("n").clone().copy_(d.drop("n")),
    "lerp_": lambda d: d.drop("n").clone().lerp_(d.drop("n"), 0.5),
    "zero_": lambda d: d.clone().zero_(),
    "total_norm": lambda d: d.total_norm(),
    "select": lambda d: d.select("x", ("n", "x")),
    "drop": lambda d: d.drop("x"),
    "flatten": lambda d: d.flatten(),
    "unflatten": lambda d: DeviceDict.unflatten({"a.b": d["x"], "a.c": d["y"]}),
    "host values alone": lambda d: DeviceDict({"n": 1, "x": [1.0]}),
    "to_dict": lambda d: d.to_dict(),
    "rows": lambda d: d.drop("n").rows[0:1],
    "one row": lambda d: d.drop("n").rows[1],
    "values of a tree": lambda d: [v * 2 for v in d["n"].values()][0],  # noqa: RUF015
    "give it back": lambda d: d,
    "a packed one": lambda d: DeviceDict({"q": d["x"] * 2}).to(torch.float64)["q"],
    "tree_map": lambda d: tree_map(lambda t: t + 1, d),
}


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run, id=name, marks=OLD_DYNAMO if name == "construct from a generator" else ())
        for name, run in OPERATIONS.items()
    ],
)
def test_in_one_graph_with_the_same_result(run: Callable[[DeviceDict], Any]) -> None:
    torch._dynamo.reset()
    expected = run(sample())
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    for d in (sample(), sample().pack()):
        got = compiled(d)
        assert type(got) is type(expected)
        if isinstance(expected, DeviceDict):
            check_invariants(got)
            assert repr(got).replace(", packed", "") == repr(expected)
            assert got == expected or got.device == torch.device("meta")
        elif isinstance(expected, torch.Tensor):
            assert torch.equal(got, expected)
        else:
            assert DeviceDict(got) == DeviceDict(expected)


def inductor(test: Callable[..., None]) -> Callable[..., None]:
    """Where there is a compiler for what it writes; the warnings are torch's own. One process compiles its headers."""
    needs = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++")
    return needs(pytest.mark.xdist_group("inductor")(pytest.mark.filterwarnings("ignore")(test)))


INDUCED = ("read", "path write", "update", "construct", "nest", "to a dtype", "rows", "map", "or", "copy", "delete")


@pytest.mark.slow
@inductor
@pytest.mark.parametrize("name", INDUCED)
def test_by_inductor(name: str) -> None:
    torch._dynamo.reset()
    run = OPERATIONS[name]
    expected: Any = run(sample())
    compiled = torch.compile(run, fullgraph=True)
    for d in (sample(), sample().pack(), sample().clone()):
        got: Any = compiled(d)
        assert type(got) is type(expected)
        assert torch.equal(got, expected) if isinstance(got, torch.Tensor) else got == expected


@pytest.mark.slow
@inductor
def test_a_packed_field_is_written_in_place() -> None:
    """Fields that share a storage, one written and another read: both are right, packed or not."""
    torch._dynamo.reset()

    @torch.compile(fullgraph=True)
    def step(d: DeviceDict) -> torch.Tensor:
        before = d["y"] * 1
        d["x"].add_(1)
        d["n", "x"].mul_(3)
        return d["x"].sum() + before.sum() + d["n", "x"].sum()

    for d in (sample(), sample().pack(), sample().pack()):
        assert step(d) == 13 and d["x"].tolist() == [2, 2] and d["n", "x"].tolist() == [3, 3, 3]
        assert d["y"].tolist() == [0, 0]


@pytest.mark.slow
def test_a_mismatch_is_our_error_and_leaves_what_is_compiled_right() -> None:
    torch._dynamo.reset()

    @torch.compile(backend="eager")
    def step(d: DeviceDict, value: torch.Tensor) -> DeviceDict:
        d["z"] = value * 2
        return d

    good = torch.ones(2)
    assert step(sample(), good)["z"].tolist() == [2, 2]
    d = sample()
    with pytest.raises(DeviceMismatchError, match="'z' is on meta, this DeviceDict is on cpu"):
        step(d, torch.ones(2, device="meta"))
    assert list(d) == list(sample()) and d == sample()
    assert step(sample(), good)["z"].tolist() == [2, 2]


@pytest.fixture
def graphs() -> list[Any]:
    """What `counting` was given to compile."""
    torch._dynamo.reset()
    return []


def counting(graphs: list[Any]) -> Callable[[Any, Any], Any]:
    """A backend that runs a graph as it is, and keeps it in ``graphs``."""

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    return backend


def test_successive_batches_do_not_recompile(graphs: list[Any]) -> None:
    @torch.compile(fullgraph=True, backend=counting(graphs))
    def step(d: DeviceDict) -> DeviceDict:
        d["z"] = d["x"] + d["n", "x"].sum()
        return DeviceDict({"out": d["z"] * 2}).to("cpu")

    for _ in range(3):
        assert step(sample())["out"].tolist() == [8.0, 8.0]
        assert step(sample().clone())["out"].tolist() == [8.0, 8.0]
        assert step(sample().pack())["out"].tolist() == [8.0, 8.0]
    assert len(graphs) == 1


def test_a_number_that_changes_does_not_recompile_for_every_value(graphs: list[Any]) -> None:
    """``torch.as_tensor`` made a constant of each: a step counter recompiled until the limit."""

    @torch.compile(fullgraph=True, backend=counting(graphs))
    def step(d: DeviceDict, count: int) -> torch.Tensor:
        d["step"] = count
        d["size"] = d["x"].shape[0]
        return d["x"] + d["step"] + d["size"]

    for count in range(6):
        d = DeviceDict({"x": torch.ones(count + 2)})
        assert step(d, count)[0].item() == 1 + count + count + 2
    assert len(graphs) <= 3


def spoken() -> DeviceDict:
    return DeviceDict({"x": torch.ones(2), "n": {"y": torch.ones(2)}, "s": ["a", "b"]}, encoders=Vocabulary(["a", "b"]))


@pytest.mark.parametrize("kind", [DeviceDict, Batch])
class TestControlFlow:
    """The bodies take and return dicts. Dynamo rebuilds these from their items: options of an instance are lost."""

    def test_cond(self, kind: type[DeviceDict]) -> None:
        d = kind(spoken().drop("s"))
        for up, expected in ((True, d.map(lambda t: t + 1)), (False, d.map(lambda t: t - 1))):
            torch._dynamo.reset()
            out = torch.cond(torch.tensor(up), lambda: d.map(lambda t: t + 1), lambda: d.map(lambda t: t - 1))
            assert type(out) is kind and out == expected
            check_invariants(out)

    @pytest.mark.filterwarnings("ignore")
    def test_while_loop_and_map(self, kind: type[DeviceDict]) -> None:
        torch._dynamo.reset()
        d = kind(spoken())
        (out,) = while_loop(lambda d: d["x"].sum() < 9, lambda d: (d.map(lambda t: t + 1),), (d,))
        assert type(out) is kind and out == d.map(lambda t: t + 4) and type(out["n"]) is DeviceDict
        check_invariants(out)
        rows: Any = map_rows  # its stub wants the arguments of the function as one tuple
        each = rows(lambda d: kind({"q": d["x"] + d["n", "y"]}), d)
        assert type(each) is kind and each["q"].tolist() == [2, 2]
        check_invariants(each)

    @pytest.mark.parametrize("strict", [True, False])
    def test_export(self, kind: type[DeviceDict], strict: bool) -> None:
        class Model(torch.nn.Module):
            def forward(self, d: DeviceDict) -> Any:
                return d.map(torch.neg), DeviceDict({"sum": d["x"].sum(), "n": {"z": d["n", "y"] * 2}})

        torch._dynamo.reset()
        d = kind(spoken())
        file = io.BytesIO()
        torch.export.save(torch.export.export(Model(), (d,), strict=strict), file)
        file.seek(0)
        negated, made = torch.export.load(file).module()(d)
        assert type(negated) is kind and negated == d.map(torch.neg) and negated.device == torch.device("cpu")
        assert type(made) is DeviceDict and made == {"sum": torch.tensor(2.0), "n": {"z": torch.full((2,), 2.0)}}

    def test_dynamic_shapes_are_a_list_in_the_order_of_the_fields(self, kind: type[DeviceDict]) -> None:
        rows = torch.export.Dim("rows")
        d = kind(spoken())
        program = torch.export.export(Sums(), (d,), dynamic_shapes=([{0: rows}, [{0: rows}], {0: rows}],))
        assert program.module()(d.rows[[0, 1, 1]]).item() == 6
        with pytest.raises((RuntimeError, ValueError), match="list"):
            torch.export.export(Sums(), (d,), dynamic_shapes=({"x": {0: rows}, "n": {"y": {0: rows}}, "s": {0: rows}},))


class Sums(torch.nn.Module):
    def forward(self, d: DeviceDict) -> torch.Tensor:
        return d["x"].sum() + d["n", "y"].sum()


@OLD_DYNAMO
def test_encoders_survive_tree_map_in_a_graph() -> None:
    torch._dynamo.reset()
    d = spoken()
    assert torch.compile(lambda d: tree_map(torch.clone, d), fullgraph=True, backend="eager")(d).decode("s") == [
        "a",
        "b",
    ]


@pytest.mark.parametrize("run", [lambda d: d.rows[torch.tensor([2, 0])], lambda d: d.rows.sort_by("x")])
def test_rows_of_ragged_fields_break_the_graph_and_are_right(run: Callable[[Any], Any]) -> None:
    d = DeviceDict({"x": [2.0, 1.0, 0.0], "r": Ragged.from_rows([[1], [2, 3], []])})
    assert torch.compile(run, backend="eager")(d) == run(d)


def test_a_context_compares_keys_alone() -> None:
    (_, spec), (_, moved), (_, other) = (
        tree_flatten(d) for d in (spoken(), DeviceDict(spoken().to_dict(), device="meta"), spoken().drop("s"))
    )
    assert spec == moved and hash(spec.context) == hash(moved.context) and spec != other
    exported = treespec_loads(treespec_dumps(spec))
    assert exported == spec and spec == exported and tree_unflatten([1, 2, 3], exported).device is None
