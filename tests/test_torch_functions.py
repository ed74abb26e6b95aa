"""Functions of torch that are called with whole dicts, and what `__torch_function__` must leave as it is."""

# The stubs of torch know tensors only, so type checkers refuse these calls; see docs/whole.md.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import inspect
import io
import operator
import shutil
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checks import check_invariants, fails
from files import compiles
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import get_overridable_functions, get_testing_overrides, is_tensor_like, resolve_name
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, default_collate

from tensordict_lite import DeviceDict, DeviceMismatchError, TypedDeviceDict, Vocabulary, cat, stack

LOST = pytest.mark.xfail(
    torch.__version__ >= "2.15",
    strict=True,
    reason="under fullgraph=True torch 2.15 does not find the __torch_function__ of a subclass of dict that it has "
    "read",
)


class Point(TypedDeviceDict):
    x: Tensor


def sample() -> Any:
    return DeviceDict({"x": torch.arange(6.0).reshape(3, 2), "n": {"y": torch.arange(3)}})


class TestTable:
    def test_joining(self) -> None:
        d = sample()
        assert torch.stack([d, d]) == stack([d, d]) and torch.stack((d, d), dim=1) == stack([d, d], 1)
        for function in (torch.cat, torch.concat, torch.concatenate):
            assert function([d, d]) == cat([d, d]) and type(function([d, d])) is DeviceDict
        named = DeviceDict({"name": ["Ada", "Grace"]})
        assert torch.stack([named, DeviceDict({"name": ["a", "b"]})]).decode("name") == [["Ada", "Grace"], ["a", "b"]]
        assert type(torch.stack([Point(x=1), Point(x=2)])) is Point
        fails(ValueError, r"^dict 1 lacks 'n', which dict 0 has$", lambda: torch.stack([d, d.drop("n")]))
        fails(TypeError, "unexpected keyword argument 'out'", lambda: torch.stack([d, d], out=d))

    def test_like(self) -> None:
        d = sample()
        zeros = torch.zeros_like(d)
        check_invariants(zeros)
        assert zeros["n", "y"].tolist() == [0, 0, 0] and zeros["n", "y"].dtype == torch.int64
        assert type(zeros["n"]) is DeviceDict
        assert torch.ones_like(d)["x"].sum() == 6 and torch.full_like(d, 7)["n", "y"].tolist() == [7] * 3
        assert torch.empty_like(d, device="meta").device == torch.device("meta")
        for function in (torch.rand_like, torch.randn_like):
            made = function(d.drop("n"))
            assert made["x"].shape == (3, 2) and not torch.equal(made["x"], function(d.drop("n"))["x"])
            with pytest.raises(RuntimeError, match=r"^'n\.y': "):
                function(d)
        assert torch.zeros_like(d, dtype=torch.float64, requires_grad=True)["x"].requires_grad
        named = DeviceDict({"s": ["a", "b"], "o": 3.0}, encoders={"s": Vocabulary(["a", "b"])})
        assert torch.zeros_like(named).decode("s") == ["a", "a"]  # room for strings, as in a buffer
        fails(TypeError, r"^'s': torch\.ones_like takes numbers, got encoded strings", lambda: torch.ones_like(named))
        kept = torch.zeros_like(DeviceDict({"x": torch.tensor(1.0), "o": object}, objects="keep"))
        assert kept["o"] is object and kept["x"] == 0 and torch.zeros_like(DeviceDict()) == {}

    def test_comparing(self) -> None:
        d = sample()
        near = d.map(lambda t: t * (1 + 1e-6) if t.is_floating_point() else t)
        assert torch.allclose(d, near) and not torch.allclose(d, near, rtol=0, atol=1e-12)
        assert torch.equal(d, d.clone()) and not torch.equal(d, near) and not torch.equal(d, d.drop("n"))
        fails(TypeError, r"^torch\.equal compares two mappings, got Tensor$", lambda: torch.equal(d, torch.ones(1)))

    def test_where(self) -> None:
        d, zero = sample(), torch.zeros_like(sample())
        mask = d.map(lambda t: t > 1)
        assert torch.where(mask, d, zero)["x"].tolist() == [[0, 0], [2, 3], [4, 5]]
        assert torch.where(torch.tensor(True), d, zero) == d and torch.where(torch.tensor(False), 0, d) == d
        assert torch.where(mask, d, 0)["n", "y"].tolist() == [0, 0, 2]
        with pytest.raises(ValueError, match=r"^the other mapping lacks 'n', which this DeviceDict has$"):
            torch.where(mask, d, d.drop("n"))
        fails(RuntimeError, r"^'x': ", lambda: torch.where(torch.ones(4, dtype=torch.bool), d, zero))

    def test_parts(self) -> None:
        d = sample()
        assert [len(part.rows) for part in torch.split(d, 2)] == [2, 1] and torch.cat(torch.split(d, [1, 2])) == d
        assert type(torch.split(d, 2)) is tuple and [len(p.rows) for p in torch.chunk(d, 2)] == [2, 1]
        rows = torch.unbind(d)
        assert len(rows) == 3 and rows[1]["x"].tolist() == [2, 3] and torch.stack(rows) == d
        rows[0]["x"].zero_()  # views
        assert d["x"][0].sum() == 0
        times = DeviceDict({"a": torch.arange(6).reshape(2, 3), "s": [["a", "b", "c"], ["d", "e", "f"]]})
        columns = torch.unbind(times, dim=1)
        assert columns[2]["a"].tolist() == [2, 5] and columns[2].decode("s") == ["c", "f"]
        assert torch.unbind(times, -1) == columns
        with pytest.raises(
            ValueError, match=r"^torch\.split: the fields differ in their size along dim=0: 'a' 2, 'b' 3$"
        ):
            torch.split(DeviceDict({"a": torch.ones(2), "b": torch.ones(3)}), 1)
        with pytest.raises(IndexError, match=r"^'n\.y': expected a dim=1 to chunk along, got 1 dimensions$"):
            torch.chunk(d, 2, dim=1)
        with pytest.raises(TypeError, match=r"^'o': torch\.unbind takes tensors, got a list; use d\.rows\.split"):
            torch.unbind(DeviceDict({"x": torch.ones(1), "o": [object]}, objects="keep"))

    def test_clone_and_detach(self) -> None:
        d = sample()
        assert torch.clone(d) == d and torch.clone(d)["x"] is not d["x"]
        assert not torch.detach(DeviceDict({"x": torch.ones(1, requires_grad=True)}))["x"].requires_grad


class TestEverythingElse:
    @pytest.mark.parametrize(("call", "text"), [
        (torch.relu,
         "torch.relu takes no DeviceDict; call it for every field: d.map(torch.relu), or for one field: d[key]"),
        (F.relu,
         "torch.nn.functional.relu takes no DeviceDict; call it for every field: d.map(lambda t: "
         "torch.nn.functional.relu(t, ...))"),
        (lambda d: torch.add(d, 1),
         "torch.add takes no DeviceDict; call it for every field: d.map(lambda t: torch.add(t, ...))"),
        (nn.Linear(2, 1), "torch.nn.functional.linear takes no DeviceDict"),
        (torch.sum, "d.map(torch.sum)"),
        (lambda d: torch.ones(2).add_(d),
         "torch.Tensor.add_ takes no DeviceDict; call it for every field: d.map(lambda t: t.add_(...))"),
        (lambda d: torch.ones(2)[d], "torch.Tensor.__getitem__ takes no DeviceDict"),
        (lambda d: torch.lerp(torch.ones(2), d, 0.5), "torch.lerp takes no"),
    ])  # fmt: skip
    def test_functions(self, call: Callable[[Any], Any], text: str) -> None:
        d = sample()
        with pytest.raises(TypeError) as caught:
            call(d)
        assert text in str(caught.value)
        fails(TypeError, "takes no Point", lambda: torch.relu(Point(x=1)))

    @pytest.mark.parametrize(("symbol", "sign"), [
        ("add", "+"), ("sub", "-"), ("mul", "*"), ("truediv", "/"), ("floordiv", "//"), ("mod", "%"), ("pow", "**"),
        ("matmul", "@"),
    ])  # fmt: skip
    def test_operators(self, symbol: str, sign: str) -> None:
        d, function = sample(), getattr(operator, symbol)
        for other in (2, torch.ones(2)):
            with pytest.raises(TypeError) as caught:
                function(d, other)
            assert str(caught.value).startswith(
                f"DeviceDict has no operator {sign}; use d.map(lambda t: t {sign} other)"
            )
            with pytest.raises(TypeError) as caught:
                function(other, d)
            assert str(caught.value) == f"DeviceDict has no operator {sign}; use d.map(lambda t: other {sign} t)"
        fails(TypeError, r"use d\.map\(torch\.\w+, other\)", lambda: function(d, d))
        before = d
        with pytest.raises(TypeError):
            getattr(operator, f"i{symbol}")(d, 2)
        assert d is before

    def test_the_way_out_works(self) -> None:
        d = sample()
        with pytest.raises(
            TypeError,
            match=r"^DeviceDict has no operator \+; use d\.map\(lambda t: t \+ other\), or d\.add_\(other\) in place$",
        ):
            operator.add(d, 1)
        fails(TypeError, "has no operator", lambda: sum([d, d]))  # type: ignore[list-item]
        fails(TypeError, "has no operator", lambda: np.ones(2) + d)  # type: ignore[operator]
        assert d.map(torch.add, d)["x"][1, 1] == 6 and d.map(torch.neg)["x"][1, 1] == -3
        assert (d | {"z": 1}).keys() == {"x", "n", "z"}  # merging is what it was


def _calls() -> Iterator[tuple[Any, int]]:
    """The functions that torch lists as overridable, and the number of arguments that each needs."""
    for function, dummy in get_testing_overrides().items():
        if callable(function):
            given = inspect.signature(dummy).parameters.values()
            yield function, max(1, sum(p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD for p in given))


RANDOM = {"torch.rand_like", "torch.randn_like"}
"""Up to torch 2.7 they are in the list of torch too."""


class TestEveryFunctionOfTorch:
    def test_what_torch_lists_is_in_the_table_or_refused(self) -> None:
        """The way that C++ takes, for each of the 1,400 functions, methods and properties."""
        implemented: set[str] = set()
        for functions in get_overridable_functions().values():
            for function in functions:
                name = resolve_name(function)
                try:
                    DeviceDict.__torch_function__(function, (DeviceDict,), (sample(),))
                except TypeError as error:
                    if str(error).startswith(f"{name} takes no DeviceDict; call it for every field: "):
                        continue
                implemented.add(name)
        names = (
            "stack cat concat concatenate zeros_like ones_like empty_like full_like allclose equal chunk unbind "
            "where clone detach functional.split"
        )
        assert implemented - RANDOM == {f"torch.{name}" for name in names.split()}

    @pytest.mark.filterwarnings("ignore")
    def test_no_call_computes_for_a_dict(self) -> None:
        """A dict for every argument: an error, or the result of the table, and the dict is as it was."""
        d, returned = sample().map(torch.Tensor.float), set[str]()
        for function, count in _calls():
            try:
                result = function(*[d] * count)
            except (TypeError, ValueError):
                continue  # ours, torch's own for an int or a process group, einsum's
            if result is not NotImplemented:
                returned.add(resolve_name(function))
        names = "allclose clone detach empty_like equal ones_like unbind zeros_like"
        assert returned - RANDOM == {f"torch.{name}" for name in names.split()}
        assert d == sample().map(torch.Tensor.float)

    def test_a_dict_in_another_place(self) -> None:
        fails(TypeError, r"full_like.* DeviceDict", lambda: torch.full_like(torch.ones(2), sample()))
        fails(TypeError, r"^aten\.add takes no DeviceDict", lambda: torch.ops.aten.add(torch.ones(2), sample()))
        fails(TypeError, r"^aten\.add\.Tensor takes no DeviceDict", lambda: torch.ops.aten.add.Tensor(sample(), 1))
        assert (torch.ones(2) == sample()) is False


class Reads(nn.Module):
    def forward(self, d: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": d["x"] * 2}


def hold(module: nn.Module, d: Any) -> nn.Module:
    module.register_buffer("s", d)
    return module


def doubled(d: dict[str, Tensor]) -> Tensor:
    return d["x"] * 2


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
class TestFunctionsThatDoNotCompute:
    """torch asks ``__torch_function__`` for more than computations. For these a DeviceDict is a dict."""

    def test_torchscript(self) -> None:
        d, plain = sample(), {"x": sample()["x"]}
        file = io.BytesIO()
        torch.jit.save(torch.jit.script(Reads()), file)
        file.seek(0)
        loaded = torch.jit.load(file)
        modules = [torch.jit.script(Reads()), torch.jit.freeze(torch.jit.script(Reads().eval())), loaded]
        modules += [torch.jit.trace(Reads(), (example,), strict=False) for example in (plain, DeviceDict(plain))]
        for module in modules:
            for given in (d.drop("n"), Point(x=d["x"])):
                assert torch.equal(module(given)["y"], d["x"] * 2) and torch.equal(module(d=given)["y"], d["x"] * 2)
            assert torch.equal(module.forward(d.drop("n"))["y"], d["x"] * 2)
        assert torch.equal(torch.jit.script(doubled)(d.drop("n")), d["x"] * 2)
        assert torch.equal(torch.jit.wait(torch.jit.fork(modules[0], d.drop("n")))["y"], d["x"] * 2)
        with pytest.raises(RuntimeError, match="Unable to cast DeviceDict"):  # TorchScript's own error: a nested dict
            modules[0](d)

    def test_autocast(self) -> None:
        d = DeviceDict({"x": torch.ones(2, 2)})
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.stack([d, d])["x"].dtype == torch.float32
            assert nn.Linear(2, 2)(d["x"]).dtype == torch.bfloat16
        cast = torch.amp.custom_fwd(lambda ctx, d: d["x"].dtype, device_type="cpu", cast_inputs=torch.float16)
        with torch.autocast("cpu"):
            assert cast(SimpleNamespace(), d) == torch.float16
        assert torch.autocast("cpu")(lambda d: d)(d) is d

    def test_odd_callers(self) -> None:
        d = sample()
        assert torch._assert(d, "not empty") is None and torch.typename(d) == "tensordict_lite.DeviceDict"
        assert nn.Identity()(d) is d and torch.fx.symbolic_trace(Reads())(d)["y"].equal(d["x"] * 2)
        assert torch.func.functional_call(
            nn.Linear(2, 1, bias=False), DeviceDict({"weight": torch.ones(1, 2)}), d["x"]
        ).shape == (3, 1)
        torch.testing.assert_close(d, d.clone())
        assert d == sample()

    @pytest.mark.parametrize(("call", "text"), [
        (lambda d: torch.utils.swap_tensors(d, d.clone()), "_use_count"),
        (torch.autograd.backward, "torch.Tensor|^$"),
        (lambda d: torch.autograd.grad(torch.ones(1, requires_grad=True).sum(), d), "DeviceDict"),
        (lambda d: nn.utils.rnn.pad_sequence([d]), "expected Tensor"),
        (lambda d: torch.nn.utils.clip_grad_norm_(d, 1.0), "has no attribute 'grad'"),
        (nn.Parameter, "DeviceDict"),
    ], ids=["swap_tensors", "backward", "grad", "pad_sequence", "clip_grad_norm_", "Parameter"])  # fmt: skip
    def test_callers_that_need_a_tensor(self, call: Callable[[Any], Any], text: str) -> None:
        d = sample()
        fails((AttributeError, TypeError, AssertionError, RuntimeError), text, lambda: call(d))
        assert d == sample()

    def test_what_a_module_holds(self) -> None:
        """A module holds tensors. From torch 2.13 on it takes any object with ``__torch_function__`` as a buffer."""
        module, d = nn.Linear(2, 1), sample()
        with pytest.raises(TypeError, match=r"cannot assign 'tensordict_lite\.DeviceDict' as parameter 'weight'"):
            module.weight = d
        with pytest.raises(TypeError, match=r"cannot assign 'tensordict_lite\.DeviceDict' object to parameter 's'"):
            module.register_parameter("s", d)
        refused = r"no attribute 'is_floating_point'$|object to buffer 's'"
        fails((AttributeError, TypeError), refused, lambda: hold(module, d).to(torch.float64))
        module = nn.Linear(2, 1)
        with pytest.raises(AttributeError, match=r"no attribute 'shape'$"):
            module.load_state_dict({"weight": d, "bias": torch.zeros(1)})
        assert module.load_state_dict(DeviceDict(module.state_dict())).missing_keys == []


def block(d: DeviceDict) -> DeviceDict:
    return DeviceDict({"y": stack([d, d.map(torch.ones_like)])["x"].exp()})


def with_argument(d: DeviceDict, reentrant: bool) -> Any:
    return checkpoint(block, d, use_reentrant=reentrant)


def with_capture(d: DeviceDict, reentrant: bool) -> Any:
    return checkpoint(lambda: block(d), use_reentrant=reentrant)


class TestWhatStays:
    def test_it_is_no_tensor(self) -> None:
        d = sample()
        assert not torch.is_tensor(d) and not isinstance(d, Tensor) and is_tensor_like(d)
        assert default_collate([d, d]) == stack([d, d]) and repr(d).startswith("DeviceDict(cpu")
        for refuses in (torch.as_tensor, torch.tensor):
            with pytest.raises((TypeError, RuntimeError)):
                refuses(d)
        assert next(iter(DataLoader([d, d], batch_size=2))) == stack([d, d])  # type: ignore[arg-type]

    def test_a_forged_pickle_with_a_dict_for_a_buffer(self) -> None:
        rebuild, (*head, _, leaves) = DeviceDict({"x": 1}).__reduce__()
        with pytest.raises(TypeError, match="expected a contiguous buffer of bytes for a pickled dict, got DeviceDict"):
            rebuild(*head, [(sample(), ())], leaves)

    def test_modes(self) -> None:
        d = sample()
        with torch.device("cpu"):  # a mode that sees every function first
            assert torch.stack([d, d]) == stack([d, d])
            fails(TypeError, r"d\.map\(torch\.relu\)", lambda: torch.relu(d))
        with torch._C.DisableTorchFunctionSubclass(), pytest.raises(TypeError):
            torch.relu(d)

    def test_pytree_and_transforms(self) -> None:
        d = sample()
        assert tree_map(lambda t: t * 2, d)["x"][1, 1] == 6
        out: Any = torch.func.vmap(torch.zeros_like)(d)
        assert type(out) is DeviceDict and out["x"].shape == (3, 2)
        stacked: Any = torch.func.vmap(lambda d: torch.stack([d, d]))(d)
        assert stacked["n", "y"].shape == (3, 2)
        gradient: Any = torch.func.grad(lambda d: torch.cat([d, d])["x"].sum())(d.drop("n"))
        assert type(gradient) is DeviceDict and gradient["x"].tolist() == [[2, 2]] * 3

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_checkpoint(self, reentrant: bool) -> None:
        x = torch.ones(2, requires_grad=True)

        def block(d: DeviceDict, scale: Tensor) -> Any:
            return torch.stack([d, torch.ones_like(d)])["x"].exp().sum() * scale

        checkpoint(block, DeviceDict({"x": x}), torch.ones((), requires_grad=True), use_reentrant=reentrant).backward()
        assert reentrant or torch.allclose(x.grad, x.exp())

    @compiles
    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    @pytest.mark.parametrize("reentrant", [True, False])
    @pytest.mark.parametrize("call", [pytest.param(with_argument, marks=LOST), with_capture])
    def test_checkpoint_in_one_graph(self, call: Callable[..., Any], reentrant: bool, backend: str) -> None:
        torch._dynamo.reset()
        x = torch.ones(2, requires_grad=True)
        torch.compile(call, fullgraph=True, backend=backend)(DeviceDict({"x": x}), reentrant)["y"].sum().backward()
        assert torch.allclose(x.grad, x.exp())

    def test_a_computation_under_compile_is_refused(self) -> None:
        torch._dynamo.reset()
        with pytest.raises(TypeError, match=r"^torch\.relu takes no DeviceDict; .* d\.map\(torch\.relu\)"):
            torch.compile(lambda d: d | {"r": torch.relu(d)}, backend="eager")(sample())


COMPILED: dict[str, Callable[[Any], Any]] = {
    "read and write": lambda d: DeviceDict({"q": d["x"] + 1, "w": d["n", "y"] * 2}),
    "stack": lambda d: torch.stack([d, d]),
    "cat": lambda d: torch.cat([d, d]),
    "zeros_like": torch.zeros_like,
    "where": lambda d: torch.where(torch.ones((), dtype=torch.bool), d, torch.zeros_like(d)),
    "split": lambda d: torch.split(d, 2)[0],
    "unbind": lambda d: torch.unbind(d)[1],
    "clone": torch.clone,
    "map with others": lambda d: d.map(torch.add, d),
    "arithmetic": lambda d: d.clone().add_(1).mul_(d).lerp_(d, 0.5),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "run", [pytest.param(run, id=name, marks=LOST if name == "where" else ()) for name, run in COMPILED.items()]
)
@compiles
def test_in_one_graph(run: Callable[[Any], Any], backend: str) -> None:
    torch._dynamo.reset()
    got, expected = torch.compile(run, fullgraph=True, backend=backend)(sample()), run(sample())
    assert type(got) is DeviceDict and got == expected
    check_invariants(got)


@pytest.mark.slow
@pytest.mark.xdist_group("inductor")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("join", [pytest.param(torch.stack, marks=LOST), stack], ids=["torch", "ours"])
def test_with_inductor(join: Callable[..., Any]) -> None:
    torch._dynamo.reset()

    def run(d: Any) -> Any:
        out: Any = join([d, d.map(torch.ones_like)]).lerp_(join([d, d]), 0.5)
        out["z"] = out["x"] * 2
        return out

    assert torch.compile(run, fullgraph=True)(sample()).allclose(run(sample()))


def test_devices_that_disagree() -> None:
    fails(DeviceMismatchError, "dict 1 is on meta", lambda: torch.stack([sample(), sample().to("meta")]))
