"""After an error on any one rank, every rank is in step for the next call, and no rank waits for the timeout."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checks import fails
from ranks import on_ranks
from test_distributed import Typed, only_here, sample
from torch.multiprocessing.spawn import ProcessRaisedException

from tensordict_lite import DeviceDict, Vocabulary
from tensordict_lite import distributed as d_
from tensordict_lite.distributed import channel as channel_module
from tensordict_lite.distributed import message as message_module
from tensordict_lite.distributed.channel import Errors
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
        (DeviceDict({"o": object}, objects="keep"), "'o': expected what JSON can hold, got a type; drop it first"),
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
                raise channel_module.InvalidManifest("it is too new")
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


def right_on_rank_0(rank: int) -> None:
    assert rank == 0, "this rank differs"


@pytest.mark.ranks
def test_an_assertion_on_one_rank_fails_the_test() -> None:
    """So a test may have its assertions in the function that the ranks run."""
    with pytest.raises(ProcessRaisedException, match="this rank differs"):
        on_ranks(right_on_rank_0)


def every_family(rank: int, world: int) -> None:
    cannot_be_sent(rank, world)
    wrong_arguments(rank, world)
    refused_on_arrival(rank, world)


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_is_in_step_after_an_error(world: int) -> None:
    on_ranks(every_family, world, count=world)


def stuck(rank: int, world: int) -> None:
    """A receiver that dies while the first of many large parts is on its way: gloo tells it to no part."""
    group: Any = dist.new_group(timeout=timedelta(seconds=3))
    warm = DeviceDict({"x": torch.ones(2)})
    large = DeviceDict({f"x{i}": torch.ones(world, 1 << 23) for i in range(4)})
    d_.gather(warm, 1, group)
    if rank == 0:
        d_.send(warm, 1, group=group)
        start = time.monotonic()
        for call in (lambda: d_.send(large, 1, group=group), lambda: d_.scatter(large, 0, group)):
            with pytest.raises(RuntimeError, match=r"^rank 0: (send|scatter) to rank 1: "):
                call()
        assert time.monotonic() - start < 3 + 2, "waited for more than one timeout"
        os._exit(7)
    elif rank == 1:
        d_.recv(0, group=group)
        prefix = torch.empty(6, dtype=torch.int64)
        dist.recv(prefix, 0, group)
        sizes = torch.empty(int(prefix[4]), dtype=torch.int64)
        dist.recv(sizes, 0, group)
        dist.recv(torch.empty(int(prefix[2]), dtype=torch.uint8), 0, group)
        kept = [dist.irecv(torch.empty(int(size), dtype=torch.uint8), 0, group) for size in sizes]
        assert len(kept) == 4
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.ranks
def test_a_receiver_that_dies_costs_one_timeout() -> None:
    fails(Exception, r"signal SIGKILL|exit code 7", lambda: on_ranks(stuck, 2))


def test_no_part_waits_after_one_that_failed() -> None:
    waited: list[int] = []

    class Transfer:
        def __init__(self, part: int) -> None:
            self.part = part

        def wait(self) -> None:
            waited.append(self.part)
            if self.part == 1:
                raise RuntimeError("timed out")

    fails(RuntimeError, "timed out", lambda: channel_module.together(Transfer, range(4)))
    assert waited == [0, 1]


def frees(rank: int) -> None:
    """Neither a call nor its error keeps a tensor until the collector runs."""
    peer = 1 - rank

    def crossed(*sent: Any, **given: Any) -> None:
        works = [d_.irecv(peer, **given) for _ in sent]
        sends = [d_.isend(d, peer) for d in sent]
        errors = Errors()
        for work in (works, sends):
            with errors:
                errors.results(work)
        errors.raise_first()

    kept = DeviceDict({"o": object}, objects="keep")
    calls: list[tuple[str, Callable[[DeviceDict], Any]]] = [
        ("", lambda d: crossed(d, d, d)),
        ("'o': expected what JSON can hold", lambda d: crossed(d, kept, d)),
        ("like=", lambda d: crossed(d, d, like=kept.drop("o"))),
        ("cls=", lambda d: crossed(d, d, cls=int)),
        ("", d_.broadcast),
        ("has no field" if rank else "", lambda d: d_.broadcast(d, cls=Typed)),
        ("evenly|could not send", lambda d: d_.scatter(d.rows[:3])),
        ("has no field" if rank else "", lambda d: d_.scatter(d, cls=Typed)),
        ("", d_.gather),
        (f"^rank {rank}: rank 0 has TypeError: 'o': expected what JSON", lambda d: d_.gather(d if rank else kept)),
        ("", d_.all_gather),
        ("has no field", lambda d: d_.all_gather(d, cls=Typed)),
        ("", d_.all_reduce),
        ("differs", lambda d: d_.all_reduce(d if rank else d.rows[:2])),
        ("op is", lambda d: d_.all_reduce(d, "product")),  # pyright: ignore[reportArgumentType]
    ]
    for _ in range(2):  # the schema is new, and known
        for said, call in calls:
            d = DeviceDict({"n": {"small": torch.ones(4)}, "x": torch.ones(4, 1 << 18), "y": torch.ones(4, 1 << 18)})
            gone = [weakref.ref(t) for t in (d["n", "small"], d["x"], d["y"])]
            with pytest.raises(Exception, match=said) if said else nullcontext():
                call(d)
            del d
            assert [ref() is None for ref in gone] == [True] * 3, said


def frees_without_the_collector(rank: int) -> None:
    gc.collect()
    gc.disable()
    frees(rank)


@pytest.mark.ranks
def test_tensors_are_freed_at_once() -> None:
    on_ranks(frees_without_the_collector)


def test_a_buffer_of_another_size_than_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    schema = message_module.header_of(DeviceDict({"x": torch.ones(2)}))
    with pytest.raises(RuntimeError, match=r"^rank 1: from rank 0: the size of the buffer differs from its header$"):
        channel_module.accepted(schema, schema.nbytes + 1, 0)


def test_a_schema_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_module, "_LARGEST", 100)
    with pytest.raises(
        ValueError, match=r"^the structure and encoders of this dict take \d+ bytes, a message holds 100$"
    ):
        message_module.header_of(DeviceDict({"too_large": torch.ones(2)}))


def test_the_header_of_a_schema_is_made_once() -> None:
    words = Vocabulary(["a", "b"])
    one, two = (DeviceDict({"x": torch.ones(2), "s": s}, encoders={"s": words}) for s in ("a", "b"))
    header = message_module.header_of(one)
    assert message_module.header_of(two) is header
    other = message_module.header_of(DeviceDict({"x": torch.ones(2), "s": "a"}, encoders={"s": Vocabulary(["b", "a"])}))
    assert other.digest != header.digest


def test_no_header_keeps_a_tensor_or_a_dict() -> None:
    d = DeviceDict({"kept_by_no_header": torch.ones(2)})
    message_module.header_of(d)
    watched = [weakref.ref(d), weakref.ref(d["kept_by_no_header"])]
    del d
    gc.collect()
    assert [ref() for ref in watched] == [None, None]
