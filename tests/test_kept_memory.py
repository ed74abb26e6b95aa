"""What a kept field keeps alive: at most 64 KiB, or four times its own bytes. This holds on every way to a dict."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import re
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import option_paths
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import on_ranks
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tensordict_lite import DeviceDict, JoinedRows, TypedDeviceDict, cat, collate, load, prefetch, stack, to_device

SMALL, TIMES = 64 << 10, 4
"""The documented limits: bytes, and times the bytes of the field."""
PROCESSES = {"loader", "queues", "distributed", "ragged", "1 worker", "2 workers"}
"""Paths that start processes, and so take long."""


def kept(tensor: Tensor) -> int:
    """The bytes that a tensor keeps alive. A view keeps what it views."""
    return tensor.untyped_storage().nbytes()


def excess(found: Any, source: Any = ()) -> list[str]:
    """The fields of all dicts in ``found`` that keep too much alive. Views of the fields of ``source`` may."""
    given_storages = {one.untyped_storage().data_ptr() for d in option_paths.dicts(source) for one in d._tensors()}
    out: list[str] = []
    for d in option_paths.dicts(found):
        for key, value in d.flatten("/").items():
            for t in value._tensors() if isinstance(value, DeviceDict) else [value]:
                if not isinstance(t, Tensor):
                    continue
                if t.is_meta or t.layout is not torch.strided or t.untyped_storage().data_ptr() in given_storages:
                    continue
                field = t if t._base is None else t._base
                if kept(field) > max(SMALL, TIMES * field.nbytes):
                    out.append(f"{key} has {field.nbytes} bytes and keeps {kept(field)}")
    return out


def data(x: int, y: int, z: int, letters: int) -> dict[str, Any]:
    """The data of `option_paths`, in other sizes: the number of elements of a row, and of letters."""
    return {
        "x": torch.arange(3.0 * x).reshape(3, x),
        "n": {"y": torch.ones(3, y), "m": {"z": torch.zeros(3, z)}},
        "s": ["a" * letters] * 3,
    }


class Typed(TypedDeviceDict):
    x: Tensor
    n: DeviceDict[Tensor]
    s: Tensor


def through_pickle(d: Any, protocol: int) -> Any:
    """``d`` from a pickle whose buffers, if any, have their own memory."""
    buffers: list[Any] = []
    data = pickle.dumps(d, protocol, buffer_callback=buffers.append if protocol == 5 else None)
    return pickle.loads(data, buffers=[bytearray(buffer) for buffer in buffers])


def samples(d: Any) -> list[Any]:
    """Samples as plain dicts, with a field of rows of several lengths."""
    return [{**row, "r": row["x"][: i + 1]} for i, row in enumerate(d.rows)]


def batches(d: Any, workers: int) -> list[Any]:
    """Batches of the rows of a dict, of a table and of several dicts, and of samples: typed, nested, padded, ragged."""

    def loaded(rows: Any, **options: Any) -> list[Any]:
        context = "fork" if workers else None
        given = partial(collate, **options)
        return list(DataLoader(rows, 2, num_workers=workers, multiprocessing_context=context, collate_fn=given))

    with tempfile.TemporaryDirectory() as folder:
        option_paths.write_table(d, Path(folder) / "table")
        sources = [d.rows, load(Path(folder) / "table").rows, JoinedRows([d, d])]
        return [
            *[batch for rows in sources for batch in loaded(rows)],
            *(*loaded(samples(d), pad={"r": 0}), *loaded(samples(d), ragged=["r"]), *loaded([*d.rows], cls=Typed)),
        ]


PATHS: dict[str, Callable[[Any], Any]] = {
    **option_paths.PATHS,
    "0 workers": lambda d: batches(d, 0),
    "1 worker": lambda d: batches(d, 1),
    "2 workers": lambda d: batches(d, 2),
    "in place": lambda d: [d.clone().to_(torch.float64), d.clone().to_("sim"), d.clone().to_("sim").to_("cpu")],
    "moves": lambda d: [
        *(d.to("sim"), d.to("sim").cpu(), d.to("sim").to("sim:1"), d.to("sim", non_blocking=True), d.to(copy=True)),
        *(d.to("sim", torch.float64), d.to("sim").double(), d.to("sim").to("cpu", torch.float16), d.clone().to("sim")),
        *(to_device([d, {"x": d}], "sim"), to_device(to_device((d, d), "sim"), "cpu"), *prefetch([d], "sim")),
    ],
    "casts": lambda d: [d.double(), d.half(), d.half().double(), d.to(torch.complex128), d.clone().double().clone()],
    "pickles": lambda d: [through_pickle(one, n) for one in (d, d.drop("s"), d.rows[1:]) for n in range(2, 6)],
    "forking pickles": lambda d: [pickle.loads(ForkingPickler.dumps(one)) for one in (d, d.drop("s"), d.rows[1:])],
    "saved parts": lambda d: [option_paths.in_memory(d.drop("x")), option_paths.in_memory(d.rows[1:])],
    "batches": lambda d: [
        *(collate(samples(d), pad={"r": 0}), collate(samples(d), ragged=["r"]), collate([*d.rows], cls=Typed)),
        *(cat([d, d]), stack([d, d]), d.rows[[0, 2]], d.rows[torch.tensor([True, False, True])], collate([d] * 5)),
        *(
            collate(d.rows.__getitems__([0, 1])),
            collate([{"a": [{"b": row["x"]}] * 2} for row in d.rows], ragged=["a"]),
        ),
    ],
    "batches on a device": lambda d: [collate(samples(d.to("sim")), pad={"r": 0}), collate([d.to("sim")] * 2)],
}
SIZES = st.sampled_from([0, 1, 2, 5, 100, 1365, 5000, 5461, 6001, 20_000, 70_001])


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The method `pack` does nothing: what is packed by name may keep more."""
    monkeypatch.setattr(DeviceDict, "pack", lambda self: self)


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize("name", [name for name in PATHS if name not in PROCESSES])
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(x=SIZES, y=SIZES, z=SIZES, letters=st.sampled_from([1, 30, 5000, 100_000]), collated=st.booleans())
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning")
def test_a_field_keeps_only_itself(name: str, x: int, y: int, z: int, letters: int, collated: bool) -> None:
    d = DeviceDict(data(x, y, z, letters))
    if collated:
        d = collate([*d.rows])
    assert not excess(d)
    assert not excess(PATHS[name](d), d)


LARGE_AND_SMALL = [(2, 3, 5, 1), (70_001, 2, 5000, 30), (90_000, 90_000, 90_000, 100_000)]


@pytest.mark.slow
@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize("name", sorted(PROCESSES - {"distributed"}))
@pytest.mark.parametrize("sizes", LARGE_AND_SMALL)
def test_from_another_process(name: str, sizes: tuple[int, ...]) -> None:
    d = DeviceDict(data(*sizes))
    assert not excess(PATHS[name](d), d)


def verbs(rank: int) -> None:
    from tensordict_lite import distributed as verbs_  # noqa: PLC0415  (starts torch.distributed)

    many = {f"k{i}": torch.full((700,), float(i)) for i in range(200)}
    fields = [data(*sizes) for sizes in LARGE_AND_SMALL] + [
        many,
        {"a": torch.ones(4, 50_000), "b": torch.ones(4, 12_500)},
    ]
    for each in fields:
        plain = DeviceDict(each)
        for d in (plain, plain.clone(), collate([plain, plain]), plain.drop(next(iter(plain)))):
            received = [
                verbs_.broadcast(d if rank == 0 else None),
                verbs_.scatter(d if rank == 0 else None, uneven=True),
                *verbs_.all_gather(d),
                *(verbs_.gather(d) or ()),
            ]
            numbers = d.drop("s") if "s" in d else d
            received += [verbs_.all_reduce(numbers, op) for op in ("sum", "mean", "max")]
            if rank == 0:
                verbs_.send(d, 1)
                verbs_.isend(d, 1).wait()
            else:
                received += [verbs_.recv(0), verbs_.irecv(0).wait()]
                assert received[-1] == received[-2] == d
            assert all(one == d for one in (received[0], *received[2:4])), "values"
            assert not excess(received, d)
    packed = DeviceDict(many).pack()
    assert verbs_.broadcast(packed if rank == 0 else None).is_packed, "it was asked for"


@pytest.mark.ranks
def test_between_ranks() -> None:
    on_ranks(verbs)


# --- what a loop that keeps labels keeps ---


class Images(Dataset[Any]):
    def __init__(self, count: int, fields: int = 1) -> None:
        self.count, self.fields = count, fields

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        images = {f"image{i}": torch.full((3, 100, 100), index % 250, dtype=torch.uint8) for i in range(self.fields)}
        return {**images, "label": index, "box": torch.full((4,), float(index))}


def mapped_and_open() -> tuple[int, int]:
    """The bytes of shared memory that this process maps, and its open files."""
    gc.collect()
    spans = re.findall(r"^(\w+)-(\w+) \S+ \S+ \S+ \S+ +/dev/shm/", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return sum(int(end, 16) - int(start, 16) for start, end in spans), len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc")
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_five_hundred_labels_keep_no_image(workers: int) -> None:
    loader = DataLoader(Images(4000), 8, num_workers=workers, collate_fn=collate)
    before, labels = mapped_and_open(), list[Tensor]()
    for _ in range(1):
        labels += [batch["label"] for batch in loader]
    assert len(labels) == 500 and torch.cat(labels).tolist() == list(range(4000))
    assert sum({t.untyped_storage().data_ptr(): kept(t) for t in labels}.values()) <= 500 * 8 * 64
    mapped, opened = mapped_and_open()
    assert mapped <= before[0] and opened <= before[1] + 4


@pytest.mark.parametrize("fields", [1, 4, 9])
def test_large_fields_of_a_worker_are_a_quarter_of_the_segments(fields: int) -> None:
    (batch,) = DataLoader(Images(40, fields), 40, num_workers=1, collate_fn=collate)
    segments = {t.untyped_storage().data_ptr() for key, t in batch.items() if t.is_shared()}
    assert len(segments) == -(-fields // 4) and not batch["label"].is_shared() and not excess(batch)
    assert batch["box"][3].tolist() == [3.0] * 4 and (batch["image0"][7] == 7).all()


# --- what is dropped is not sent ---

SECRET = b"never to be sent"


def with_secret() -> Iterator[DeviceDict]:
    """Dicts that lost a field with `SECRET`, in memory that other fields share with it."""
    secret = torch.frombuffer(bytearray(SECRET), dtype=torch.uint8)
    fields = {"a": torch.ones(5), "secret": secret, "b": torch.zeros(3, dtype=torch.int64), "c": torch.ones(5)}
    for d in (DeviceDict(fields).pack(), collate([fields] * 2), DeviceDict(fields).pack().to("sim").cpu()):
        yield d.drop("secret")
    memory = torch.zeros(192, dtype=torch.uint8)
    memory[40:56] = secret
    inside = {"a": memory[:40], "b": memory[64:128], "c": memory[128:]}
    yield DeviceDict(inside)  # in a gap where a packed dict has alignment
    yield DeviceDict({**inside, "c": memory[128:188]})
    memory = torch.zeros(64, dtype=torch.uint8)
    memory[-16:] = secret
    yield DeviceDict({"a": memory[:48]})
    yield DeviceDict({"a": memory[:24], "b": memory[24:48]})
    large = torch.zeros(1 << 20, dtype=torch.uint8)
    large[-16:] = secret
    yield DeviceDict({"a": large[:-16]})
    yield DeviceDict({"a": large[:-16], "b": large[: 1 << 19]})


@pytest.mark.parametrize("number", range(9))
def test_a_dropped_field_is_never_sent(number: int) -> None:
    d = [*with_secret()][number]
    expected = d.clone()
    for protocol in range(2, 6):
        buffers: list[Any] = []
        data = pickle.dumps(d, protocol, buffer_callback=buffers.append if protocol == 5 else None)
        assert not any(SECRET in bytes(part) for part in (data, *buffers)), protocol
        assert pickle.loads(data, buffers=buffers) == expected
    file = io.BytesIO()
    torch.save(d, file)
    assert SECRET not in file.getvalue()
    file.seek(0)
    assert torch.load(file) == expected
    again: Any = pickle.loads(ForkingPickler.dumps(d))
    assert again == expected
    for tensor in again._tensors():
        stored = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        assert SECRET not in stored.numpy().tobytes()


def test_a_packed_dict_stays_one_storage_because_it_was_asked_for() -> None:
    many = {f"k{i}": torch.full((700,), float(i)) for i in range(200)}
    for d in (DeviceDict(many).pack(), collate([many, many], pack=True)):
        ways = [d.clone(), d.to("sim"), d.to("sim").cpu(), d.half(), d.to("sim", torch.float64), copy.deepcopy(d)]
        ways += [through_pickle(d, n) for n in range(2, 6)] + [pickle.loads(ForkingPickler.dumps(d))]
        assert all(one.is_packed for one in (d, *ways)) and all(one == d for one in ways[5:])


def test_tensors_that_a_user_put_together_travel_together(copies: Any) -> None:
    """Whoever fills a storage: rows of one tensor, parts of another size, in any order."""
    for parts in (torch.rand(7, 30).unbind(), torch.rand(70_001).split(10_001), torch.rand(70).split([3, 60, 7])[::-1]):
        d = DeviceDict({f"k{i}": part for i, part in enumerate(parts)})
        assert d.is_packed
        copies.clear()
        moved = d.to("sim")
        assert copies == {"h2d": 1} and moved.is_packed and moved.cpu() == d
        assert d.clone().is_packed and d.drop("k0").to("sim").cpu() == d.drop("k0")


def test_a_field_of_a_batch_can_be_saved_by_itself() -> None:
    """torch.load refuses a tensor whose storage is no multiple of its item size."""
    d = DeviceDict({"x": torch.ones(5), "z": torch.ones(2).to(torch.complex128), "b": torch.ones(3, dtype=torch.bool)})
    for one in (d, collate([d, d]), d.pack(), d.to("sim").cpu(), pickle.loads(pickle.dumps(d, 5))):
        for tensor in one.values():
            assert option_paths.in_memory(tensor).equal(tensor)


def test_groups_and_batches_are_views() -> None:
    """As `docs/moving.md` says: the groups are views of one copy, and batches without a shuffle of the dict."""
    d = DeviceDict({"x": torch.rand(4, 50_000), "k": [0, 1, 0, 1]})
    own = d["x"].untyped_storage().data_ptr()
    groups = d.rows.group_by("k")
    assert len({group["x"].untyped_storage().data_ptr() for group in groups.values()} - {own}) == 1
    assert kept(groups[1]["x"]) == d["x"].nbytes and kept(groups[1].clone()["x"]) == groups[1]["x"].nbytes
    assert {part["x"].untyped_storage().data_ptr() for part in d.rows.batches(2)} == {own}
    shuffled = list(d.rows.batches(2, shuffle=True))
    assert own not in {part["x"].untyped_storage().data_ptr() for part in shuffled} and not excess(shuffled)
