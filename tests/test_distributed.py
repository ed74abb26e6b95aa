"""Whole dicts between real ranks: every call, on two, three and four of them, errors and a peer that dies included."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checks import check_invariants, fails
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from ranks import meet, on_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree

from tensordict_lite import DeviceDict, Ragged, StringEncoder, TypedDeviceDict, Utf8, Vocabulary, cat, register_encoder
from tensordict_lite import distributed as d_
from tensordict_lite.distributed import channel as channel_module
from tensordict_lite.distributed.message import failure, message_of, prefix_of, read_header, read_prefix, read_sizes


class Obs(TypedDeviceDict):
    y: Tensor


class Typed(TypedDeviceDict):
    x: Tensor
    obs: Obs


def sample(rank: int) -> DeviceDict:
    return DeviceDict({
        "x": torch.arange(6.0).reshape(2, 3) + rank, "s": ["a", "bb"], "n": {"y": torch.ones(2) * rank, "e": {}},
        "b": [True, rank > 0], "i": [rank, 7],
    }, encoders={"q": Vocabulary(["z"])}, dtype=torch.float32)  # fmt: skip


def text(call: Callable[[], Any], kind: Any) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert caught.type is kind or isinstance(kind, tuple)
    return str(caught.value)


def only_here() -> Any:
    """An encoder that one rank alone has registered."""

    @register_encoder
    class Here(StringEncoder):
        name = "test-distributed-here"
        code_ndim = 0

        def encode(self, strings: Any) -> Tensor:
            return torch.zeros(len(strings))

        def decode(self, codes: Any) -> list[str]:
            return [""] * len(codes)

        def to_json(self) -> dict[str, Any]:
            return {}

        @classmethod
        def from_json(cls, state: Any) -> Here:
            return cls()

    return Here()


def every_call(rank: int, world: int) -> None:
    ranks = range(world)
    for _ in range(3):  # the second and third time the schemas are known
        for src in (0, world - 1):
            got = d_.broadcast(sample(7) if rank == src else None, src)
            check_invariants(got)
            assert got == sample(7) and got._policy == sample(7)._policy and got.decode("s") == ["a", "bb"]
        assert d_.broadcast(sample(1).pack() if rank == 0 else None) == sample(1)
        typed = d_.broadcast(Typed.from_dict({"x": 1, "obs": {"y": 2}}) if rank == 0 else None, cls=Typed)
        assert type(typed) is Typed and type(typed.obs) is Obs and typed.obs.y == 2
        assert d_.broadcast(DeviceDict() if rank == 0 else None) == {}

        if rank == 0:
            work = d_.isend(sample(2), 1)
            d_.send(DeviceDict({"z": torch.zeros(0, 3)}), 1, tag=5)
            assert work.wait() is None and work.wait() is None
        if rank == 1:
            other = d_.irecv(0, like=sample(0))
            assert d_.recv(0, tag=5)["z"].shape == (0, 3)
            got = other.wait()
            check_invariants(got)
            assert got == sample(2) and other.wait() is got

        gathered = d_.gather(sample(rank) if rank else sample(0).drop("b"), dst=world - 1)
        assert (gathered is None) == (rank != world - 1)
        if gathered is not None:
            assert gathered == [sample(r) if r else sample(0).drop("b") for r in ranks]
        everyone = d_.all_gather(DeviceDict({"x": torch.full((rank + 1,), rank), "n": {f"r{rank}": 1}}))
        assert [one["x"].tolist() for one in everyone] == [[r] * (r + 1) for r in ranks]
        assert [list(one["n"]) for one in everyone] == [[f"r{r}"] for r in ranks]
        assert [type(one) for one in d_.all_gather(Obs(y=torch.ones(rank)))] == [Obs] * world

        rows = DeviceDict({"x": torch.arange(2 * world), "s": [f"r{i}" for i in range(2 * world)]})
        part = d_.scatter(rows if rank == 0 else None)
        check_invariants(part)
        assert part["x"].tolist() == [2 * rank, 2 * rank + 1]
        assert part.decode("s") == [f"r{2 * rank}", f"r{2 * rank + 1}"]
        part = d_.scatter(rows.rows[: world + 1] if rank == 1 else None, 1, uneven=True)
        assert part["x"].tolist() == ([0, 1] if rank == 0 else [rank + 1])

        reduced = d_.all_reduce(sample(rank).drop("b", "s"))
        check_invariants(reduced)
        assert reduced["n", "y"].tolist() == [sum(ranks)] * 2 and reduced["i"].tolist() == [sum(ranks), 7 * world]
        assert reduced["x"].shape == (2, 3)
        assert d_.all_reduce(sample(rank).drop("s"), "max")["b"].tolist() == [True, True]
        assert d_.all_reduce(sample(rank).drop("s"), "min")["b"].tolist() == [True, False]
        mean = d_.all_reduce(
            DeviceDict(
                {"h": torch.tensor([rank], dtype=torch.bfloat16), "c": torch.tensor([1j * rank]), "e": torch.zeros(0)}
            ),
            "mean",
        )
        assert mean["h"] == torch.tensor(sum(ranks) / world).bfloat16() and mean["c"] == 1j * sum(ranks) / world
        assert mean["h"].dtype == torch.bfloat16
        mine = DeviceDict(
            {"loss": float(rank), "n": {"tokens": rank + 1}, "h": torch.tensor([rank], dtype=torch.bfloat16)}
        )
        mean = d_.all_reduce(mine, "mean", weight=("n", "tokens"))
        check_invariants(mean)
        total = sum(r + 1 for r in ranks)
        expected = sum(r * (r + 1) for r in ranks) / total
        assert mean["loss"].item() == pytest.approx(expected) and mean["n", "tokens"] == total
        assert mean["h"] == torch.tensor(expected).bfloat16() and mine["loss"] == float(rank)
        nothing = d_.all_reduce(DeviceDict({"loss": 0.0, "tokens": 0}), "mean", weight="tokens")
        assert nothing["loss"].isnan() and nothing["tokens"] == 0
        given_ = DeviceDict({"w": torch.nn.Parameter(torch.ones(2)), "v": torch.ones(2)})
        out = d_.all_reduce(given_)
        assert given_["w"].tolist() == [1, 1] and not out["w"].requires_grad
        out["w"].zero_()
        assert out["v"].tolist() == [world] * 2


def errors(rank: int, world: int) -> None:
    kept = DeviceDict({"n": {"o": object}}, objects="keep")
    told = text(lambda: d_.all_reduce(DeviceDict({"x": torch.ones(2 + (rank == 1)), "y": 1.0})), RuntimeError)
    assert (
        told == f"rank {rank}: all_reduce needs one schema, and rank 1 differs from rank 0: 'x': expected float32[2], "
        "got float32[3]"
    )
    told = text(lambda: d_.all_reduce(DeviceDict({"x": 1.0} if rank else {"x": 1.0, "z": {"y": 1}})), RuntimeError)
    assert told.endswith("rank 1 differs from rank 0: 'z.y': expected int64[], got no field")
    told = text(lambda: d_.all_reduce(sample(0).drop("s"), "mean"), RuntimeError)
    assert told == f"rank {rank}: 'b' is torch.bool: integers have no mean; convert it to float first"
    assert text(lambda: d_.all_reduce(DeviceDict({"b": True})), RuntimeError).endswith(
        "bools have no sum; convert it to int first"
    )
    assert text(lambda: d_.all_reduce(DeviceDict({"c": 1j}), "max"), RuntimeError).endswith(
        "complex numbers have no order"
    )
    told = text(lambda: d_.all_reduce(DeviceDict({"f": torch.ones(2, dtype=torch.float8_e5m2)})), RuntimeError)
    assert told.startswith(f"rank {rank}: sum of torch.float8_e5m2, which 'f' is, in all_reduce among ranks 0, 1")
    assert (
        text(lambda: d_.all_reduce(sample(0), "product"), ValueError)  # pyright: ignore[reportArgumentType]
        == "op is 'sum', 'mean', 'max' or 'min', got 'product'"
    )
    weighted = DeviceDict({"x": 1.0, "w": 2.0, "i": 1, "v": torch.ones(2)})
    for op, weight, message in (
        ("sum", "w", "weight= belongs to op='mean', got op='sum'"),
        ("mean", "v", "weight= names a field with one number, 'v' is float32[2]"),
        ("mean", "tokens", "weight= names a field with one number, 'tokens' is no such field"),
        ("mean", "w", "'i' is torch.int64: integers have no mean; convert it to float first"),
    ):
        reduce: Any = d_.all_reduce
        assert text(lambda: reduce(weighted, op, weight=weight), ValueError) == message  # noqa: B023
    told = text(lambda: d_.all_reduce(weighted.drop("i"), "mean", weight="w" if rank else None), RuntimeError)
    assert told == f"rank {rank}: the ranks make this call with different arguments, such as op"
    assert d_.all_reduce(weighted.select("x", "w"), "mean", weight="w")["x"] == 1  # type: ignore[arg-type]

    for call in (
        lambda: d_.all_gather(kept if rank == 1 else sample(0)),
        lambda: d_.gather(kept if rank == 1 else sample(0)),
    ):
        told = text(call, RuntimeError)
        assert (
            told == f"rank {rank}: rank 1 has TypeError: 'n.o': expected what JSON can hold, got a type; "
            "drop it first, d.drop(('n', 'o'))"
        )
    sparse, hook = (
        DeviceDict({"m": torch.eye(2).to_sparse()}),
        DeviceDict({"s": "a"}, encoders={"s": lambda strings: torch.ones(len(strings))}),
    )
    cases: list[tuple[Any, type[Exception], str]] = [
        (kept, TypeError, "'n.o': expected what JSON can hold, got a type; drop it first, d.drop(('n', 'o'))"),
        (None, TypeError, "broadcast takes a DeviceDict on the rank that sends, got NoneType"),
        (sparse, TypeError,
         "'m' cannot be sent: a torch.sparse_coo Tensor of torch.float32 has more state than its bytes"),
        (hook, TypeError, "'s': <lambda> has no JSON form"),
        (DeviceDict({"x": torch.ones(2, device="meta")}), TypeError, "a dict on meta has no values to send"),
    ]  # fmt: skip
    for bad, kind, message in cases:
        told = text(lambda bad=bad: d_.broadcast(bad if rank == 0 else None), kind if rank == 0 else RuntimeError)
        assert message in told
        assert rank == 0 or told.startswith(f"rank {rank}: rank 0 could not send: {kind.__name__}: ")
    told = text(
        lambda: d_.scatter(DeviceDict({"x": torch.arange(world + 1)}) if rank == 0 else None),
        ValueError if rank == 0 else RuntimeError,
    )
    assert f"{world + 1} rows cannot be split evenly over {world} ranks; set uneven=True" in told
    if rank == 0:
        text(lambda: d_.send(kept, 1), TypeError)
        d_.send(sample(0), 1)
        dist.send(torch.zeros(5, dtype=torch.int64), 1)
        d_.send(Obs(y=torch.ones(1)), 1)
    elif rank == 1:
        assert "rank 0 could not send: TypeError: 'n.o'" in text(lambda: d_.recv(0), RuntimeError)
        told = text(lambda: d_.recv(0, like=sample(0).drop("i")), ValueError)
        assert told == "rank 1: rank 0 sent a schema that differs from like=: 'i': expected no field, got int64[2]"
        assert "the message is not from tensordict_lite" in text(lambda: d_.recv(0), RuntimeError)
        assert text(lambda: d_.recv(0, cls=Typed), TypeError).startswith("Typed has no field 'y'")
    again(rank, world, kept)
    assert d_.broadcast(sample(3) if rank == 0 else None) == sample(3)  # and all goes on


def again(rank: int, world: int, kept: DeviceDict) -> None:
    """Errors after which the channels must still be in step, and calls that differ where a look does not show it."""
    told = text(lambda: d_.all_reduce(sample(0).drop("s"), "max" if rank else "min"), RuntimeError)
    assert told.endswith("the ranks make this call with different arguments, such as op")
    a, b = torch.ones(2), torch.ones(2) * 10
    told = text(lambda: d_.all_reduce(DeviceDict({"x": a, "y": b} if rank == 0 else {"y": b, "x": a})), RuntimeError)
    assert "'y' is at the position of 'x': the order of the keys must match" in told
    told = text(
        lambda: d_.all_reduce(DeviceDict({"a.b": a, "a": {"b": b}} if rank == 0 else {"a": {"b": b}, "a.b": a})),
        RuntimeError,
    )
    assert "the order of the keys must match" in told
    for options in ({"objects": "keep"}, {"encoders": {"s": Vocabulary(["a"])}}):
        mine: Any = options if rank else {}
        told = text(lambda mine=mine: d_.all_reduce(DeviceDict({"x": a}, **mine)), RuntimeError)
        assert told.endswith("its encoders, options or empty dicts differ")
    run = "'n.run': all_reduce takes numbers, got encoded strings; leave the field out: drop('run') shares the tensors"
    for encoder in (Utf8(), Vocabulary(["a"])):
        for op in ("sum", "max"):
            named: Any = DeviceDict({"x": a, "n": {"run": "a"}}, encoders={"run": encoder})
            assert run in text(lambda named=named, op=op: d_.all_reduce(named, op), RuntimeError)
            one: Any = named if rank else DeviceDict({"x": a})
            assert f"rank 1 has TypeError: {run}" in text(lambda one=one, op=op: d_.all_reduce(one, op), RuntimeError)
    weighed: Any = DeviceDict({"loss": 1.0, "w": 1.0, "run": "a"})
    assert "'run': all_reduce takes numbers" in text(
        lambda: d_.all_reduce(weighed, "mean", weight="w"), (RuntimeError, TypeError)
    )

    good, meta = DeviceDict({"x": torch.ones(3)}), DeviceDict({"x": torch.ones(3, device="meta")})
    odd: Any = DeviceDict({"m": torch.eye(4).to_sparse()})
    for bad in (meta, odd):
        for call in (
            lambda bad=bad: d_.all_reduce(bad if rank == 1 else good),
            lambda bad=bad: d_.all_gather(bad if rank == 1 else good),
        ):
            assert "rank 1 has TypeError" in text(call, RuntimeError)
        text(
            lambda bad=bad: d_.scatter(bad if rank == 0 else None),
            (NotImplementedError, RuntimeError, TypeError, ValueError),
        )
        if rank == 0:
            d_.send(good, 1)
            text(lambda bad=bad: d_.send(bad, 1), TypeError)
            d_.send(good, 1)
        if rank == 1:
            assert d_.recv(0) == good
            assert "rank 0 could not send: TypeError" in text(lambda: d_.recv(0), RuntimeError)
            assert d_.recv(0) == good
    held = None
    if rank < 2:  # several under way at once, one of them refused, and all in step
        waits = [d_.irecv(1 - rank) for _ in range(4)]
        sends = [d_.isend(one, 1 - rank) for one in (sample(1), kept, sample(2).drop("i"), good)]
        assert waits[3].wait() == good and waits[0].wait() == sample(1)
        assert "could not send" in text(waits[1].wait, RuntimeError)
        assert "could not send" in text(waits[1].wait, RuntimeError)
        assert waits[2].wait() == sample(2).drop("i")
        text(sends.pop(1).wait, TypeError)
        for work in sends:
            work.wait()
        held = d_.irecv(1 - rank)  # and a gather beside one that waits
    d_.gather(good)
    if held is not None:
        sent = d_.isend(sample(4), 1 - rank)
        assert held.wait() == sample(4)
        sent.wait()
    if rank == 0:
        d_.send(DeviceDict({"q": "a"}, encoders={"q": only_here()}), 1)
        d_.send(good, 1)
    elif rank == 1:
        assert "no encoder is registered as" in text(lambda: d_.recv(0), RuntimeError)
        assert d_.recv(0) == good
    outside = dist.new_group([0])
    if rank == 1:
        for call in (
            lambda: d_.broadcast(good, group=outside),
            lambda: d_.all_reduce(good, group=outside),
            lambda: d_.recv(0, group=outside),
        ):
            assert text(call, ValueError) == "rank 1 is not in this group"
    rows = Typed.from_dict({"x": torch.ones(world, 2), "obs": {"y": torch.ones(world)}})
    assert type(d_.scatter(rows if rank == 0 else None, cls=Typed)) is Typed


def groups(rank: int, world: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own, lead = pairs[rank // 2], rank // 2 * 2
    assert d_.broadcast(sample(lead) if rank == lead else None, lead, own) == sample(lead)
    assert [one["i"][0] for one in d_.all_gather(sample(rank), own)] == [lead, lead + 1]
    assert d_.all_reduce(sample(rank).select("x"), group=own)["x"][0, 0] == 2 * lead + 1
    assert d_.scatter(DeviceDict({"x": [5, 6]}) if rank == lead + 1 else None, lead + 1, own)["x"].tolist() == [
        5 + rank - lead
    ]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    assert d_.all_reduce(DeviceDict({"x": float(rank)}), "max", mesh.get_group("b"))["x"] == lead + 1
    assert d_.all_reduce(DeviceDict({"x": float(rank)}), "max", mesh.get_group("a"))["x"] == 2 + rank % 2
    undefined = init_device_mesh("cpu", (4,))  # whose backend has no name
    assert d_.all_reduce(DeviceDict({"x": 1.0}), group=undefined.get_group())["x"] == 4
    channel_module._MOST_SCHEMAS = 2
    assert len(d_.all_gather(DeviceDict({"x": torch.ones(rank + 5)}))) == 4  # more schemas than a channel remembers
    dist.barrier()
    dist.destroy_process_group()  # a new group knows nothing of the schemas of the old one
    meet(rank, world, os.environ["MEETING"], "again")
    assert d_.broadcast(sample(1) if rank == 0 else None) == sample(1)
    a, b, c = (DeviceDict({key: 1.0}) for key in "abc")
    for d in (a, b, a, c, a):  # all ranks forget the schema that was not used for the longest time
        assert d_.broadcast(d if rank == 0 else None) == d


def rows_of_any_length(rank: int, world: int) -> None:
    d = DeviceDict({"ids": Ragged.from_rows([[i] * i for i in range(1, world + 1)])})
    got: Any = d_.broadcast(d if rank == 0 else None)
    assert got == d and got["ids"]._lengths.longest == world
    part: Any = d_.scatter(d if rank == 0 else None)
    assert part["ids"].tolist() == [[rank + 1] * (rank + 1)] and cat(d_.all_gather(part)) == d
    assert "'ids': all_reduce takes tensors, got a ragged field" in text(lambda: d_.all_reduce(d), RuntimeError)
    weighed = DeviceDict({"ids": d["ids"], "w": 1.0})
    told = text(lambda: d_.all_reduce(weighed, "mean", weight="w"), (RuntimeError, TypeError))
    assert "'ids': all_reduce takes tensors, got a ragged field" in told


def means(rank: int, world: int) -> None:
    """No means on a rank without tokens, narrow dtypes, and views whose conjugate or negative bit is set."""
    share = {"loss": torch.tensor([2.0, 3.0]) if rank == 0 else torch.tensor([torch.nan, torch.inf])}
    share |= {"half": share["loss"].half(), "c": share["loss"] * 1j, "tokens": torch.tensor(0 if rank else 10)}
    mean = d_.all_reduce(DeviceDict(share), "mean", weight="tokens")
    assert mean["loss"].tolist() == mean["half"].tolist() == [2, 3] and mean["c"].tolist() == [2j, 3j]
    assert mean["half"].dtype == torch.float16 and mean["tokens"] == 10

    integers = (torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int32, torch.uint64, torch.int64)
    for dtype in (*integers, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        tokens, large = torch.tensor(112).to(dtype), torch.tensor([57344.0, float(rank)])
        mean = d_.all_reduce(DeviceDict({"x": large.half(), "tokens": tokens}), "mean", weight="tokens")
        assert mean["x"].tolist() == torch.tensor([57344.0, (world - 1) / 2]).half().tolist(), dtype
        assert mean["tokens"] == world * int(tokens), dtype
        wide = torch.int64 if dtype in integers else torch.float64 if dtype == torch.float64 else torch.float32
        assert mean["tokens"].dtype == wide and mean["x"].dtype == torch.float16
        if dtype not in integers:
            plain = d_.all_reduce(DeviceDict({"x": torch.full((2,), 57344.0).to(dtype)}), "mean")["x"]
            assert plain.dtype == dtype and plain.tolist() == [57344.0] * 2
    assert d_.all_reduce(DeviceDict({"n": torch.tensor(200, dtype=torch.uint8)}))["n"] == world * 200 % 256

    conjugated = torch.tensor([1 + 2j, 3j]).conj()
    views = DeviceDict({"c": conjugated, "i": conjugated.imag, "f": 1.0})
    values = DeviceDict({"c": [1 - 2j, -3j], "i": [-2.0, -3.0], "f": 1.0})
    assert conjugated.is_conj() and views["i"].is_neg()
    assert d_.all_gather(views) == [values] * world and d_.all_reduce(views, "mean") == values
    assert d_.broadcast(views if rank == 0 else None) == values
    assert d_.all_reduce(views if rank else values, "mean", weight="f") == values | {"f": float(world)}


def on_some(rank: int, world: int) -> None:
    every_call(rank, world)
    means(rank, world)
    errors(rank, world)
    rows_of_any_length(rank, world)
    if world == 4:
        groups(rank, world)


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3, 4])
def test_on_ranks(world: int) -> None:
    on_ranks(on_some, world, count=world)


def large_tensors(rank: int) -> None:
    """Every call with several parts: large tensors, and the small ones before, between and behind them."""

    @cache
    def made(of: int) -> DeviceDict:
        generator = torch.Generator().manual_seed(of)

        def rand(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator)

        return DeviceDict(
            {
                "flag": [True, False],
                "large": rand(4, 100_001),
                "small": rand(4, 3),
                "n": {"t": rand(600, 700).t(), "bf": rand(2, 600_001).bfloat16(), "slice": rand(4, 600_000)[:, 1:]},
                "channels": rand(2, 3, 300, 301).to(memory_format=torch.channels_last),
                "same shape": rand(4, 100_001),
                "none": torch.ones(0, 4),
                "last": of,
            }
        )

    def check(d: DeviceDict, of: int) -> None:
        check_invariants(d)
        packed = mine.is_packed  # on both ranks
        assert d == made(of), of
        assert d.is_packed == packed, (of, packed)
        assert not packed or torch.equal(buffer(d), buffer(made(of).pack()))

    def buffer(d: DeviceDict) -> Tensor:
        """The whole storage, with the gaps, where nothing old may stand."""
        return torch.empty(0, dtype=torch.uint8).set_(d["flag"].untyped_storage())

    for mine in (made(rank), made(rank).pack()):  # with the header, and without it
        versions = [t._version for t in mine._tensors()]
        if rank:
            d_.send(mine, 0)
            check(d_.recv(0), 0)
        else:
            check(d_.recv(1), 1)
            d_.send(mine, 1)
        works = [d_.irecv(1 - rank), d_.irecv(1 - rank)]
        sent = [d_.isend(mine, 1 - rank), d_.isend(DeviceDict({"x": rank}), 1 - rank)]
        check(works[0].wait(), 1 - rank)
        assert works[1].wait()["x"] == 1 - rank
        for work in sent:
            work.wait()
        check(d_.broadcast(mine, 1), 1)
        everyone = d_.all_gather(mine)
        check(everyone[1 - rank], 1 - rank)
        assert everyone[rank] is mine
        different = d_.all_gather(mine if rank else mine.drop("large"))
        assert different[1 - rank] == (made(0).drop("large") if rank else made(1))
        check_invariants(different[1 - rank])
        of_one = d_.all_gather(mine if rank else DeviceDict({"x": 7}))[1 - rank]
        assert of_one == (DeviceDict({"x": 7}) if rank else made(1))
        assert of_one.is_packed == (bool(rank) or mine.is_packed)
        assert [len(one) for one in d_.all_gather(mine if rank else DeviceDict())] == [0, len(mine)]
        gathered = d_.gather(mine)
        assert (gathered is None) == (rank == 1)
        if gathered is not None:
            check(gathered[1], 1)
        rows = DeviceDict({"x": mine["n", "slice"], "y": mine["small"]})
        part = d_.scatter(rows, 0)
        assert part == DeviceDict({"x": made(0)["n", "slice"], "y": made(0)["small"]}).rows[2 * rank : 2 * rank + 2]
        summed = d_.all_reduce(mine.drop("flag"))
        both = pytree.tree_map(torch.add, made(0).drop("flag"), made(1).drop("flag"))
        assert summed.allclose(both)
        mean = d_.all_reduce(mine.select("large", "channels", "same shape"), "mean")
        assert mean["large"].sub(summed["large"] / 2).abs().max() < 1e-6
        mean["large"].zero_()
        assert mean["same shape"].any() and mine["large"].any()
        refused = DeviceDict({"x": torch.ones(1 << 20), "f": torch.ones(1 << 21).to(torch.float8_e5m2)})
        failing = f"rank {rank}: sum of torch.float8_e5m2, which 'f' is, in all_reduce among ranks 0, 1: "
        with pytest.raises(RuntimeError, match=failing):
            d_.all_reduce(refused)
        assert d_.all_reduce(DeviceDict({"x": 1}))["x"] == 2
        assert mine == made(rank) and [t._version for t in mine._tensors()] == versions


@pytest.mark.slow
@pytest.mark.ranks
def test_large_tensors() -> None:
    on_ranks(large_tensors)


def test_large_tensors_are_not_copied() -> None:
    d = DeviceDict({"a": [1, 2], "x": torch.rand(1 << 18), "b": torch.ones(7), "y": torch.rand(3, 1 << 18).t()})
    parts = message_of(d).parts
    assert [part.nbytes for part in parts] == [128, 1 << 20, 3 << 20], "the small ones together"
    assert [part.data_ptr() for part in parts[1:]] == [d["x"].data_ptr(), d["y"].data_ptr()]
    packed = d.pack()
    assert [part.data_ptr() for part in message_of(packed).parts] == [packed["a"].data_ptr()]
    middle = DeviceDict({f"k{i}": torch.rand(1 << 17) for i in range(5)})
    assert [part.nbytes for part in message_of(middle).parts] == [4 << 19, 1 << 19], "by four"
    many = DeviceDict({f"k{i}": torch.rand(512) for i in range(200)})
    assert [part.nbytes for part in message_of(many).parts] == [200 * 2048], "buffers of 64 KiB, one after the other"


DTYPES = (
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64,
    torch.uint32,
)  # fmt: skip
KEYS = st.text(st.characters(codec="utf-8"), max_size=3)
TENSORS = st.builds(
    lambda dtype, shape: torch.randint(0, 2, shape).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3),
)
TREES = st.recursive(
    st.dictionaries(KEYS, TENSORS, max_size=5),
    lambda inner: st.dictionaries(KEYS, TENSORS | inner, max_size=4),
    max_leaves=8,
)


def any_schema(rank: int) -> None:
    """The same examples on both ranks, and none that is made smaller, which would be on one of them only."""

    @settings(
        max_examples=80,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
        deadline=None,
    )
    @given(tree=TREES, pack=st.booleans(), op=st.sampled_from(["max", "min"]))
    def run(tree: Any, pack: bool, op: Any) -> None:
        torch.manual_seed(0)
        d = DeviceDict(tree, device="cpu")
        d = d.pack() if pack else d
        got = d_.broadcast(d if rank == 0 else None)
        check_invariants(got)
        both = d_.all_gather(d)
        assert got == d and both == [d, d] and list(got) == list(d)
        if not any(t.is_complex() or t.dtype in (torch.int16, torch.uint32) for t in d._tensors()):
            assert d_.all_reduce(d, op) == d

    run()


@pytest.mark.ranks
def test_any_schema() -> None:
    on_ranks(any_schema)


def dies(rank: int) -> None:
    assert d_.broadcast(sample(1) if rank == 0 else None) == sample(1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)
    start = time.monotonic()
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("broadcast from rank 1 among ranks 0, 1", lambda: d_.broadcast(None, 1)),
        ("all_reduce among ranks 0, 1", lambda: d_.all_reduce(sample(0), "max")),
        ("receive from rank 1", lambda: d_.recv(1)),
    ]
    for what, call in calls:
        with pytest.raises(RuntimeError, match=f"^rank 0: {what}: "):
            call()
    assert time.monotonic() - start < 30
    os._exit(7)  # there is no one to say goodbye to


@pytest.mark.ranks
def test_a_peer_that_dies() -> None:
    fails(Exception, r"signal SIGKILL|exit code 7", lambda: on_ranks(dies))


# By what is wrong with it: a header, made of a valid one.
HEADERS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda text: b"",
    "an empty dict": lambda text: b"{}",
    "a list": lambda text: b"[1]",
    "an empty manifest": lambda text: b'{"manifest":{},"buffers":[]}',
    "a dtype": lambda text: text.replace(b"float32", b"float99"),
    "a negative size": lambda text: text.replace(b"[2,3]", b"[2,-3]"),
    "a huge size": lambda text: text.replace(b"[2,3]", b"[4611686018427387904,4]"),
    "a newer version": lambda text: text.replace(b'"version":1', b'"version":2'),
    "members out of range": lambda text: text.replace(b"[0]", b"[1]"),
    "a bool for a member": lambda text: text.replace(b"[0]", b"[true]"),
    "deep brackets": lambda text: b"[" * 100_000,
    "no members": lambda text: text.replace(b"[0]", b"[]"),
    "too few strides": lambda text: text.replace(b"[3,1]", b"[1]"),
    "swapped tensors": lambda text: text.replace(b'["x",0]', b'["x",1]').replace(b'["s",1]', b'["s",0]'),
}
# By what is wrong with it: the numbers of a prefix, with the magic number.
PREFIXES: dict[str, Callable[[int], list[int]]] = {
    "no magic number": lambda magic: [0, 0, 0, 0, 0, 0],
    "a flag that is no bool": lambda magic: [2, 0, 0, 0, 0, magic],
    "text of a negative size": lambda magic: [0, 0, -1, 0, 0, magic],
    "text of a huge size": lambda magic: [0, 0, 1 << 40, 0, 0, magic],
    "a buffer of a negative size": lambda magic: [0, 0, 0, -1, 0, magic],
    "a negative number of parts": lambda magic: [0, 0, 0, 8, -1, magic],
    "too many parts": lambda magic: [0, 0, 0, 8, 2, magic],
}


class TestHeaders:
    def test_a_header_is_checked(self) -> None:
        schema = message_of(sample(0)).schema
        assert (
            read_header(schema.text, schema.digest).paths
            == schema.paths
            == [("x",), ("s",), ("n", "y"), ("b",), ("i",)]
        )
        with pytest.raises(ValueError, match=r"^not a valid message: the header does not match its announced digest"):
            read_header(schema.text + b" ", schema.digest)

    @pytest.mark.parametrize("name", HEADERS)
    def test_a_damaged_header(self, name: str) -> None:
        wrong = HEADERS[name](message_of(sample(0)).schema.text)
        reasons = "'|list|Expecting|maximum rec|its version is 2, |its (layout is damaged|tensors are not in the order)"
        message = f"^not a valid message: a damaged header: ({reasons})"
        fails(ValueError, message, lambda: read_header(wrong, _digest(wrong)))

    def test_a_prefix_is_checked(self) -> None:
        cpu = torch.device("cpu")
        schema = message_of(sample(0)).schema
        assert read_prefix(prefix_of(schema, 3, cpu)) == (False, schema.digest, 3, schema.nbytes, 1)
        assert read_prefix(prefix_of(None, 1, cpu))[0]
        fails(ValueError, "the message is not from", lambda: read_sizes(torch.tensor([-1, 9]), 8))
        assert failure(ValueError("\ud800")) == b"ValueError: ?", "a text that UTF-8 cannot encode"

    @pytest.mark.parametrize("name", PREFIXES)
    def test_a_damaged_prefix(self, name: str) -> None:
        magic = int(prefix_of(None, 0, torch.device("cpu"))[-1])
        with pytest.raises(ValueError, match=r"the message is not from tensordict_lite"):
            read_prefix(torch.tensor(PREFIXES[name](magic)))

    def test_without_a_group(self) -> None:
        fails((RuntimeError, ValueError), r"process.group", lambda: d_.broadcast(sample(0)))


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)
