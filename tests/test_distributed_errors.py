"""After an error on any one rank, every rank is in step for the next call, and no rank waits for the timeout."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from test_distributed import Typed, only_here, sample

from tensordict_lite import DeviceDict
from tensordict_lite import distributed as d_
from tensordict_lite._files.manifest import InvalidManifest
from tensordict_lite.distributed import channel as channel_module
from tensordict_lite.distributed import message as message_module
from tensordict_lite.distributed.message import read_header

Told = dict[int, str]


def succeeds(verb: str, rank: int, world: int) -> None:
    """A successful call: a rank that is a message behind gets another dict, or waits."""
    good = DeviceDict({"x": torch.full((2,), float(rank))})
    if verb == "broadcast":
        assert d_.broadcast(good, world - 1)["x"][0] == world - 1
    elif verb == "scatter":
        assert d_.scatter(DeviceDict({"x": torch.arange(world)}) if rank == 0 else None)["x"].tolist() == [rank]
    elif verb == "gather":
        gathered = d_.gather(good)
        assert gathered is None or [one["x"][0] for one in gathered] == list(range(world))
    elif verb == "all_gather":
        assert [one["x"][0] for one in d_.all_gather(good)] == list(range(world))
    elif verb == "all_reduce":
        assert d_.all_reduce(good)["x"][0] == sum(range(world))
    elif rank < 2:  # both ways, at once and not
        work = d_.isend(good, 1 - rank)
        assert d_.irecv(1 - rank).wait()["x"][0] == 1 - rank and work.wait() is None
        if rank == 0:
            d_.send(good, 1)
        else:
            assert d_.recv(0)["x"][0] == 0


VERBS = ("broadcast", "scatter", "gather", "all_gather", "all_reduce", "send")
_others = cycle(VERBS)


def check(rank: int, world: int, verb: str, call: Callable[[], Any], told: Told) -> None:
    """``call`` raises on the ranks in ``told``, with that text, and on no other; then it works, and another verb."""
    start = time.monotonic()
    if rank in told:
        with pytest.raises(Exception) as caught:  # noqa: PT011 the text tells
            call()
        assert told[rank] in str(caught.value), f"{told[rank]!r} in {caught.value!r}"
    else:
        call()
    succeeds(verb, rank, world)
    succeeds(next(_others), rank, world)
    assert time.monotonic() - start < 30, f"{verb} waited for the timeout of the group"


def everywhere(world: int, said: str) -> Told:
    return dict.fromkeys(range(world), said)


def cannot_be_sent(rank: int, world: int) -> None:
    good = sample(0)
    refused: list[tuple[Any, str]] = [
        (DeviceDict({"o": object}, objects="keep"), "'o': kept objects cannot be sent"),
        (DeviceDict({"x": torch.ones(2, device="meta")}), "a dict on meta has no values to send"),
        (7, "takes a DeviceDict on"),
    ]
    for bad, said in refused:
        for wrong in (0, 1):  # the rank that receives the results, and another one
            mine = bad if rank == wrong else good
            all_raise = everywhere(world, said)
            check(rank, world, "broadcast", lambda: d_.broadcast(mine, wrong), all_raise)  # noqa: B023
            scattered = "" if isinstance(bad, DeviceDict) else said
            check(rank, world, "scatter", lambda: d_.scatter(mine, wrong), everywhere(world, scattered))  # noqa: B023
            for call in (d_.gather, d_.all_gather, d_.all_reduce):
                check(rank, world, call.__name__, lambda: call(mine), all_raise)  # noqa: B023

        def one_to_one(bad: Any = bad) -> None:
            if rank == 0:
                d_.isend(bad, 1).wait()
            elif rank == 1:
                d_.irecv(0).wait()

        check(
            rank,
            world,
            "send",
            one_to_one,
            {0: said, 1: f"rank 0 could not send: TypeError: {said if bad != 7 else ''}"},
        )


def wrong_arguments(rank: int, world: int) -> None:
    rows = DeviceDict({"x": torch.arange(world)})
    arguments: list[tuple[dict[str, Any], str]] = [
        ({"device": "nonsense"}, "device"),
        ({"cls": Typed}, "Typed has no field 'x0'"),
        ({"cls": int}, "cls= takes DeviceDict or a subclass of it, got <class 'int'>"),
    ]
    for given, said in arguments:
        for wrong in (0, 1):
            mine = given if rank == wrong else {}
            own = DeviceDict({"x0": torch.arange(world)})
            early = said != "Typed has no field 'x0'"  # known before the first message
            other = 1 - wrong
            check(rank, world, "broadcast", lambda: d_.broadcast(own, other, **mine), {wrong: said})  # noqa: B023
            check(rank, world, "scatter", lambda: d_.scatter(own, other, **mine), {wrong: said})  # noqa: B023
            told = everywhere(world, said) if early else {wrong: said}
            check(rank, world, "gather", lambda: d_.gather(own, wrong, **mine), told)  # noqa: B023
            check(rank, world, "all_gather", lambda: d_.all_gather(own, **mine), told)  # noqa: B023

        def one_to_one(given: Any = given) -> None:
            if rank == 0:
                d_.send(DeviceDict({"x0": [1]}), 1)
            elif rank == 1:
                d_.recv(0, **given)

        check(rank, world, "send", one_to_one, {1: said})
    for like, said in ((DeviceDict({"y": 1}), "a schema that differs from like="), (5, "like= takes a DeviceDict on")):

        def unlike(like: Any = like) -> None:
            if rank == 0:
                d_.send(rows, 1)
            elif rank == 1:
                work = d_.irecv(0, like=like)
                with pytest.raises((ValueError, TypeError)):
                    work.wait()
                work.wait()  # the same error again

        check(rank, world, "send", unlike, {1: said})
    for op in ("product", ["sum"], torch.ones(2)):
        told = everywhere(world, "op is 'sum', 'mean', 'max' or 'min', got")
        if not isinstance(op, torch.Tensor):
            check(rank, world, "all_reduce", lambda: d_.all_reduce(rows, op if rank == 1 else "sum"), told)  # pyright: ignore[reportArgumentType]  # noqa: B023
    check(rank, world, "scatter", lambda: d_.scatter(rows.rows[1:] if rank == 0 else None), everywhere(world, "evenly"))


def refused_on_arrival(rank: int, world: int) -> None:
    """An encoder that one rank alone has registered, and a header that one rank refuses, twice each."""
    plain, size = sample(0), 2 * world
    strange = plain
    if rank == 1:
        strange = DeviceDict({"q": torch.zeros(size)}, encoders={"q": only_here()})
    text = "no encoder is registered as"
    others = {other: text for other in range(world) if other != 1}
    for _ in range(2):
        check(rank, world, "broadcast", lambda: d_.broadcast(strange, 1), others)
        check(rank, world, "scatter", lambda: d_.scatter(strange, 1), others)
        check(rank, world, "gather", lambda: d_.gather(strange), {0: text})
        check(rank, world, "all_gather", lambda: d_.all_gather(strange), others)
    dist.barrier()
    if rank == 0:  # it reads headers as an older version would

        def refuses(header: bytes, digest: int) -> Any:
            if b"too-new" in header:
                raise InvalidManifest("it is too new")
            return read_header(header, digest)

        channel_module.read_header = refuses  # pyright: ignore[reportAttributeAccessIssue]
    said = "it is too new"
    large = {"a": torch.rand(size, 1 << 17), "too-new": torch.arange(size), "b": torch.rand(size, 1 << 17)}
    for new in (DeviceDict({"too-new": torch.arange(size)}), DeviceDict(large)):  # in one part, and in several
        for _ in range(3):  # the sender sends the header once
            check(rank, world, "broadcast", lambda: d_.broadcast(new, 1), {0: said})  # noqa: B023
            check(rank, world, "scatter", lambda: d_.scatter(new, 1), {0: said})  # noqa: B023
            check(rank, world, "gather", lambda: d_.gather(new), {0: said})  # noqa: B023
            check(rank, world, "all_gather", lambda: d_.all_gather(new), {0: said})  # noqa: B023

            def one_to_one(new: Any = new) -> None:
                if rank == 1:
                    d_.send(new, 0)
                elif rank == 0:
                    d_.recv(1)

            check(rank, world, "send", one_to_one, {0: said})


def every_family(rank: int, world: int) -> None:
    cannot_be_sent(rank, world)
    wrong_arguments(rank, world)
    refused_on_arrival(rank, world)


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_is_in_step_after_an_error(world: int) -> None:
    on_ranks(every_family, world, count=world)


def test_a_buffer_of_another_size_than_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    schema = message_module.header_for(DeviceDict({"x": torch.ones(2)}))
    with pytest.raises(RuntimeError, match=r"^rank 1: from rank 0: the size of the buffer differs from its header$"):
        channel_module.accepted(schema, schema.nbytes + 1, 0)


def test_a_schema_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_module, "_LARGEST", 100)
    with pytest.raises(
        ValueError, match=r"^the structure and encoders of this dict take \d+ bytes, a message holds 100$"
    ):
        message_module.header_for(DeviceDict({"too_large": torch.ones(2)}))


def test_the_cache_of_schemas_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_module, "_headers", {})
    for i in range(300):
        message_module.header_for(DeviceDict({f"k{i}": torch.ones(2)}))
    assert len(message_module._headers) <= 257
