"""What torch itself does to a batch: parallel modules on real ranks, scatter, gather, functional transforms, export."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from checks import check_invariants, claims, fails, protocols
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.utils import _recursive_to
from torch.func import functional_call, grad, vmap
from torch.nn.parallel import DistributedDataParallel, scatter_gather
from torch.nn.parallel.scatter_gather import gather, scatter

from tensordict_lite import DeviceDict, DeviceMismatchError, Ragged, TypedDeviceDict


class Obs(TypedDeviceDict):
    x: Tensor


class Net(nn.Module):
    """Takes and gives a DeviceDict; one layer is only used on some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.sometimes = nn.Linear(2, 1), nn.Linear(2, 1)
        self.seen: Any = None

    def forward(self, batch: DeviceDict, both: bool = True) -> DeviceDict:
        self.seen = batch
        out = (
            type(batch)({"x": self.used(batch["x"])})
            if isinstance(batch, Obs)
            else DeviceDict({"x": self.used(batch["x"])})
        )
        if not isinstance(batch, Obs):
            out["n"] = {"z": batch["n"]["y"].sum()}
            if both:
                out["w"] = self.sometimes(batch["x"])
        return out


def sample(rank: int, step: int = 0) -> DeviceDict:
    x = torch.tensor([[float(rank + 1), float(step)]])
    return DeviceDict({"x": x, "n": {"y": torch.ones(1)}}, encoders={"s": len}, objects="keep")


def loss(out: DeviceDict) -> Tensor:
    return out["x"].sum() + (out["w"].sum() if "w" in out else 0)


def ddp(rank: int, mode: str, typed: bool) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), **({} if mode == "plain" else {mode: True}))
    for step in range(2):
        batch: Any = Obs(x=sample(rank, step)["x"]) if typed else sample(rank, step)
        out = model(batch, mode != "find_unused_parameters")
        check_invariants(out)
        assert type(out) is type(batch) and type(model.module.seen) is type(batch)
        model.zero_grad()
        loss(out).backward()
        # The gradient of a linear layer's weight is its input: the mean over both ranks, if they were synchronised.
        assert model.module.used.weight.grad.tolist() == [[1.5, float(step)]], (mode, rank)


@pytest.mark.parametrize(
    ("mode", "typed"),
    [("plain", False), ("find_unused_parameters", False), ("find_unused_parameters", True), ("static_graph", False)],
)
def test_ddp_with_a_device_dict_in_and_out(mode: str, typed: bool) -> None:
    on_ranks(ddp, mode, typed)


def fsdp2(rank: int, reshard: bool) -> None:
    torch.manual_seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model.used, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    for step in range(2):
        model.zero_grad()
        out = model(sample(rank, step))
        check_invariants(out)
        assert type(out) is DeviceDict and type(model.seen) is DeviceDict and model.seen["n", "y"] == 1
        loss(out).backward()
        got: Any = model.used.weight.grad
        assert got.full_tensor().tolist() == [[1.5, float(step)]], rank
    # Its mixed precision casts with functions that know plain dicts only.
    for policy, dtypes, kinds in (
        (MixedPrecisionPolicy(param_dtype=torch.bfloat16), (torch.bfloat16, torch.bfloat16), (dict, DeviceDict)),
        (MixedPrecisionPolicy(output_dtype=torch.float64), (torch.float32, torch.float64), (DeviceDict, dict)),
    ):
        model = copy.deepcopy(plain)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        out = model(sample(rank))
        assert (type(model.seen), type(out)) == kinds and (model.seen["x"].dtype, out["x"].dtype) == dtypes


@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2_with_a_device_dict_in_and_out(reshard: bool) -> None:
    on_ranks(fsdp2, reshard)


class RaggedNet(nn.Module):
    """Takes a dict with a ragged field, and gives a ragged field: alone, or in a dict."""

    def __init__(self, bare: bool) -> None:
        super().__init__()
        self.bare, self.used, self.sometimes = bare, nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, batch: DeviceDict[Any], both: bool = True) -> Any:
        field = batch["r"]
        values = self.used(field.values) + (self.sometimes(field.values) if both else 0)
        out = field.with_values(values)
        return out if self.bare else DeviceDict({"r": out})


def ragged_outputs(rank: int, mode: str) -> None:
    for bare in (False, True):
        torch.manual_seed(0)
        model: Any = RaggedNet(bare)
        if mode == "fsdp2":
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        else:
            model = DistributedDataParallel(model, **({} if mode == "plain" else {mode: True}))
        for step in range(2):
            model.zero_grad()  # first, as FSDP2 keeps the parameters of the root unsharded until the backward pass
            field = Ragged.from_rows([torch.full((rank + 1, 1), 2.0), torch.ones(step, 1)])
            out = model(DeviceDict({"r": field}), mode != "find_unused_parameters")
            out = out if bare else out["r"]
            assert type(out) is Ragged and out.lengths.tolist() == [rank + 1, step] and out.max_length == rank + 1
            out.values.sum().backward()
            layer = model.used if mode == "fsdp2" else model.module.used
            got: Any = layer.weight.grad
            got = got.full_tensor() if mode == "fsdp2" else got
            assert got.tolist() == [[3.0 + step]], (mode, rank, bare)  # the mean of the sums of both ranks


@pytest.mark.parametrize("mode", ["plain", "find_unused_parameters", "static_graph", "fsdp2"])
def test_a_ragged_field_as_an_output(mode: str) -> None:
    on_ranks(ragged_outputs, mode)


class KeptNet(nn.Module):
    """Gives kept values beside tensors: strings, numbers, and a tuple of tensors that require grad."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.sometimes = nn.Linear(1, 1), nn.Linear(1, 1)
        self.seen: Any = None

    def forward(self, batch: DeviceDict[Any], both: bool = True) -> DeviceDict[Any]:
        self.seen = batch
        hidden = (self.used(batch["x"]), self.sometimes(batch["x"]) if both else None)
        kept = {"split": batch["split"], "names": batch["names"], "size": batch["size"]}
        return DeviceDict({**kept, "hidden": hidden, "n": {"pair": [hidden[0], "a"]}}, objects="keep")


def kept_outputs(rank: int, mode: str) -> None:
    torch.manual_seed(0)
    model: Any = KeptNet()
    if mode == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    else:
        model = DistributedDataParallel(model, **({} if mode == "plain" else {mode: True}))
    both = mode != "find_unused_parameters"
    for step in range(2):
        model.zero_grad()  # first, as FSDP2 keeps the parameters of the root unsharded until the backward pass
        kept = {"split": "train", "names": [f"rank {rank}", "b"], "size": (480, 640)}
        x = torch.tensor([[rank + 1.0], [float(step)]])
        out = model(DeviceDict({"x": x, **kept}, objects="keep"), both)
        check_invariants(out)
        net = model if mode == "fsdp2" else model.module
        assert type(out) is DeviceDict and type(net.seen) is DeviceDict
        for d in (out, net.seen):
            assert {key: d[key] for key in kept} == kept and type(d["size"]) is tuple
        used, other = out["hidden"]
        assert type(out["hidden"]) is tuple and (other is None) != both and out["n", "pair"][1] == "a"
        (used.sum() + out["n", "pair"][0].sum() + (other.sum() if both else 0)).backward()
        for layer, times in ((net.used, 2), (net.sometimes, 1)):
            got: Any = layer.weight.grad
            got = got.full_tensor() if mode == "fsdp2" else got
            if times == 2 or both:
                assert got.tolist() == [[times * (1.5 + step)]], (mode, rank)  # the mean of both ranks
            else:
                assert got is None or got.tolist() == [[0.0]]


@pytest.mark.parametrize("mode", ["plain", "find_unused_parameters", "static_graph", "fsdp2"])
def test_kept_values_as_outputs(mode: str) -> None:
    on_ranks(kept_outputs, mode)


def test_a_wrapper_with_a_device_moves_tensors_only() -> None:
    """DDP with ``device_ids`` and FSDP2 move their inputs so. A ragged field in a dict raises, and none is lost."""
    meta, field = torch.device("meta"), Ragged.from_rows([[1.0, 2.0], [3.0]])
    d = DeviceDict({"x": torch.ones(2), "r": field})
    assert _recursive_to(field, meta, False)[0] is field
    fails(DeviceMismatchError, r"^'x' is on meta, this DeviceDict is on cpu", lambda: _recursive_to(d, meta, False))
    (moved,) = _recursive_to(d.to(meta), meta, False)
    assert type(moved) is DeviceDict and moved["r"].device == meta and moved["r"].max_length == 2


class Use(nn.Module):
    """Calls a method of a ragged field."""

    def __init__(self, name: str, *args: Any) -> None:
        super().__init__()
        self.name, self.args, self.layer = name, args, nn.Linear(2, 2)

    def forward(self, d: Any) -> Any:
        field = d["r"] if isinstance(d, dict) else d
        values = self.layer(field.values)
        return field.with_values(values) if self.name == "with_values" else getattr(field, self.name)(*self.args)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize(
    "call", [("with_values",), ("padded",), ("padded", 1.0, "left"), ("mask",), ("row_ids",), ("positions",)]
)
def test_export_with_dynamic_shapes(call: tuple[Any, ...], bare: bool, strict: bool) -> None:
    example, other = (Ragged.from_rows([torch.rand(n, 2) for n in lengths]) for lengths in ((3, 4), (1, 0, 6, 2)))
    module = Use(*call)
    dynamic: Any = [{0: torch.export.Dim.DYNAMIC}, {0: torch.export.Dim.DYNAMIC}]
    program = torch.export.export(
        module,
        (example if bare else DeviceDict({"r": example}),),
        dynamic_shapes=(dynamic if bare else [dynamic],),
        strict=strict,
    )
    given = other if bare else DeviceDict({"r": other})
    got, expected = program.module()(given), module(given)
    assert type(got) is type(expected) and len(got) == len(expected)
    assert got == expected if isinstance(got, Ragged) else torch.equal(got, expected)


def fsdp1(rank: int) -> None:
    model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), use_orig_params=True)
    out = model(sample(rank))
    # It rebuilds the dicts of an output as plain ones, and with mixed precision those of the input too, as documented.
    assert type(model.module.seen) is DeviceDict and type(out) is dict and type(out["n"]) is dict
    loss(out).backward()
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    half = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), mixed_precision=precision)
    check_invariants(DeviceDict(half(sample(rank))))
    assert type(half.module.seen) is dict and half.module.seen["x"].dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore")
def test_fsdp1_and_what_it_takes_away() -> None:
    on_ranks(fsdp1)


def test_data_parallel_scatters_and_gathers() -> None:
    """Its own functions; they hand tensors to GPUs, so that without one the tensors are kept where they are."""
    d = DeviceDict({"x": torch.arange(4.0), "n": {"y": torch.arange(8.0).reshape(4, 2)}})
    if torch.cuda.is_available():
        on_gpu = d.to("cuda")
        parts = scatter(on_gpu, [0])
        assert type(parts[0]) is DeviceDict and gather(parts, 0) == on_gpu
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scatter_gather.Scatter, "apply", lambda targets, sizes, dim, t: t.chunk(len(targets), dim))
        patch.setattr(scatter_gather.Gather, "apply", lambda target, dim, *ts: torch.cat(ts, dim))
        parts = scatter(d, [0, 1])
        for part in parts:
            check_invariants(part)
            assert type(part) is DeviceDict and type(part["n"]) is DeviceDict and len(part.rows) == 2
        joined = gather(parts, 0)
        check_invariants(joined)
        assert type(joined) is DeviceDict and joined == d


PACKAGES = ("accelerate", "datasets", "fastapi", "jax", "lightning", "pandas", "polars", "pyarrow", "tensordict")


@pytest.mark.parametrize("package", [*PACKAGES, "torchdata", "transformers"])
def test_it_claims_no_protocol_of_a_framework(package: str) -> None:
    pytest.importorskip(package)
    kinds = protocols(package)
    assert kinds or package not in ("jax", "lightning", "polars", "torchdata"), "these define protocols"
    for d in (DeviceDict({"x": 1}), Obs(x=torch.ones(1))):
        assert claims(d, kinds) == claims({}, kinds)


@pytest.mark.parametrize("make", [lambda x: DeviceDict({"x": x, "n": {"y": x * 2}}), lambda x: Obs(x=x)])
def test_distributed_checkpoints(make: Any, tmp_path: Any) -> None:
    saved, loaded = make(torch.ones(2)), make(torch.zeros(2))
    writer = dcp.FileSystemWriter(tmp_path, per_thread_copy_ahead=0)  # the simulated device has no streams of torch
    dcp.save({"model": saved, "step": 3}, storage_writer=writer)
    state = {"model": loaded, "step": 0}
    dcp.load(state, checkpoint_id=tmp_path)
    assert state["model"] is loaded and loaded == saved and state["step"] == 3
    check_invariants(loaded)


def test_custom_fwd_gives_a_plain_dict() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float16)
        def forward(ctx: Any, d: Any) -> Any:
            assert type(d) is dict and d["x"].dtype == torch.float16
            return d["x"] * 2

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert Double.apply(DeviceDict({"x": torch.ones(2)})).tolist() == [2, 2]


class TestFunctional:
    def test_vmap(self) -> None:
        d = DeviceDict({"x": torch.arange(6.0).reshape(3, 2), "n": {"y": torch.arange(3.0)}})
        out: Any = vmap(lambda d: DeviceDict({"s": d["x"].sum() + d["n", "y"], "x": d["x"]}))(d)
        assert type(out) is DeviceDict and out["s"].tolist() == [1, 6, 11] and out["x"].shape == (3, 2)
        typed: Any = vmap(lambda o: Obs(x=o.x * 2))(Obs(x=d["x"]))
        assert type(typed) is Obs and torch.equal(typed.x, d["x"] * 2)

    def test_grad_and_functional_call(self) -> None:
        net = nn.Linear(2, 1)
        weights = DeviceDict(dict(net.named_parameters()))
        x = torch.ones(1, 2)
        out: Any = grad(lambda w: functional_call(net, w, (x,)).sum())(weights.detach())
        assert type(out) is DeviceDict and out["weight"].tolist() == [[1, 1]] and out["bias"].tolist() == [1]

    def test_load_state_dict(self) -> None:
        net, other = Net(), Net()
        state = DeviceDict(net.state_dict())
        assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
        torch.testing.assert_close(other.state_dict(), net.state_dict())
        torch.testing.assert_close(state, DeviceDict(other.state_dict()))
        with pytest.raises(AssertionError, match="x"):
            torch.testing.assert_close(DeviceDict({"x": torch.ones(1)}), DeviceDict({"x": torch.zeros(1)}))

    def test_export_is_saved_and_loaded(self, tmp_path: Any) -> None:
        class Module(nn.Module):
            def forward(self, d: DeviceDict) -> Tensor:
                return d["x"] * 2

        d = DeviceDict({"x": torch.ones(2)})
        torch.export.save(torch.export.export(Module(), (d,)), tmp_path / "p.pt2")
        assert torch.export.load(tmp_path / "p.pt2").module()(d).tolist() == [2, 2]
