"""No reference cycle holds a tensor: without the garbage collector, every public call and error frees what it used."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed
from torch import Tensor
from torch.utils import _pytree as pytree

import tensordict_lite
import tensordict_lite.distributed as ranks
from tensordict_lite import (
    BatchOrder,
    DeviceDict,
    Hashing,
    JoinedRows,
    Pad,
    Ragged,
    TypedDeviceDict,
    Utf8,
    Vocabulary,
    cat,
    collate,
    encoder_from_json,
    encoder_to_json,
    load,
    prefetch,
    save,
    stack,
    to_device,
    to_numpy,
    view_read_only,
)
from tensordict_lite.tables import RowWriter, add_column, drop_column, join_parts, load_parts, repair, verify
from tensordict_lite.unpickle import Rows

META = torch.device("meta")


class Inner(TypedDeviceDict):
    y: Tensor


class Batch(TypedDeviceDict):
    x: Tensor
    n: Inner


def made(**more: Any) -> DeviceDict:
    """A nested dict whose tensors have four rows. Its schema differs in each call, so no cache knows it."""
    made.count += 1  # type: ignore[attr-defined]
    width = 1000 + made.count  # type: ignore[attr-defined]
    data = {"x": torch.zeros(4, width), "i": torch.arange(4), "n": {"y": torch.ones(4, 2), "s": ["a", "b", "c", "d"]}}
    return DeviceDict({**data, **more})


made.count = 0  # type: ignore[attr-defined]


def flat() -> DeviceDict:
    return DeviceDict({"x": torch.rand(4, 3), "y": torch.rand(4)})


def batch() -> Batch:
    return Batch(x=torch.ones(2), n=Inner(y=torch.ones(2)))


def written(path: Path) -> Path:
    made().save(path)
    return path


def in_parts(folder: Path) -> Path:
    for part in range(2):
        with RowWriter(folder, like={"x": torch.zeros(1, 3)}, part=part, parts=2) as writer:
            writer.write({"x": torch.ones(2, 3)})
    return folder


def table(folder: Path) -> Path:
    with RowWriter(folder, like={"x": torch.zeros(1, 3), "ids": [[0]]}, ragged=["ids"]) as writer:
        writer.write({"x": torch.ones(2, 3), "ids": [[1], [2, 3]]})
        writer.flush()
        writer.write({"x": torch.ones(1, 3), "ids": [[]]})
        assert len(writer) == 3
    return folder


def with_ragged() -> Any:
    d = collate([{"x": torch.ones(n), "s": "a" * n} for n in (2, 0, 3)], ragged=["x", "s"])
    field = Ragged.from_rows([torch.ones(2), torch.ones(1)])
    d.rows[0] = {"x": [1, 2], "s": "bc"}
    with suppress(ValueError):
        Ragged(field.values, [1, 2])
    with suppress(ValueError):
        d.rows[0] = {"x": [1], "s": "a"}
    return [
        *(d.rows[1], d.rows[1:], d.rows[[2, 0]], cat([d, d]), d.map(torch.neg), d.decode("s"), d.tolist(), sent(d)),
        *(
            field.padded(),
            field.mask(),
            field.positions(),
            field.row_ids(),
            field.unbind(),
            copy.copy(field),
            repr(field),
        ),
        *(field.with_values(torch.ones(3)), pickle.loads(pickle.dumps(field)), list(d.rows), d.to("meta"), d.pack()),
    ]


def torch_saved(protocol: int) -> Any:
    file = io.BytesIO()
    torch.save(made(), file, pickle_protocol=protocol)
    file.seek(0)
    return torch.load(file, weights_only=protocol == 2)


def sent(d: Any) -> Any:
    return pickle.loads(ForkingPickler.dumps(d))


def viewed() -> Any:
    buffers: list[Any] = []
    data = pickle.dumps(made(), 5, buffer_callback=buffers.append)
    with view_read_only():
        return pickle.loads(data, buffers=[bytes(buffer) for buffer in buffers])


def with_encoder() -> Any:
    d = DeviceDict({"s": ["a"], "h": ["b"]}, encoders={"s": Vocabulary(["a"]), "h": Hashing(4)})
    return d.decode("s"), encoder_from_json(encoder_to_json(Utf8())), d.encoders


def ordered() -> list[Any]:
    d = made()
    order = BatchOrder(d.rows, tokens=4, lengths=[1, 2, 3, 4], shuffle=True)
    batches = prefetch(torch.utils.data.DataLoader(d.rows, batch_sampler=order), "cpu")
    half = [next(iter(batches)), batches.state_dict()]
    batches.load_state_dict(batches.state_dict())
    return [half, list(batches), len(order)]


# By the name of the method. Each is called on a new dict, with some arguments, and frees all that it used.
METHODS: dict[str, Callable[[DeviceDict], Any]] = {
    "add_": lambda d: d.drop("n", "i").add_(1),
    "allclose": lambda d: d.allclose(d.clone()),
    "copy_": lambda d: flat().copy_(flat()),
    "cuda": lambda d: d.cuda(),
    "decode": lambda d: d.decode(("n", "s")),
    "div_": lambda d: flat().div_(2.0),
    "drop": lambda d: d.drop("x"),
    "fill_": lambda d: [flat().fill_(flat()), flat().fill_({"x": torch.ones(4, 3), "y": torch.ones(4)})],
    "flatten": lambda d: DeviceDict.unflatten(d.flatten()),
    "from_arrow": lambda d: [DeviceDict.from_arrow(d)],
    "from_pandas": lambda d: [DeviceDict.from_pandas(d)],
    "from_tensordict": lambda d: DeviceDict.from_tensordict(d.to_tensordict()),
    "fromkeys": lambda d: DeviceDict.fromkeys(["a", "b"], torch.ones(3)),
    "equal": lambda d: d.equal("i", [1, 2]),
    "get": lambda d: d.get("x"),
    "lerp_": lambda d: flat().lerp_(flat(), 0.5),
    "map": lambda d: d.map(torch.add, d),
    "mul_": lambda d: flat().pack().mul_(flat()),
    "new_empty": lambda d: d.new_empty(2),
    "new_zeros": lambda d: d.new_zeros(2),
    "numpy": lambda d: [d.numpy(), d.numpy(copy=True)],
    "pop": lambda d: d.pop("x"),
    "record_stream": lambda d: [d.record_stream(None)],
    "requires_grad_": lambda d: flat().requires_grad_(),
    "rows": lambda d: [rows(d)],
    "select": lambda d: [d.select("x", ("n", "y")), d["n", "y"]],
    "setdefault": lambda d: d.setdefault("z", {"a": torch.ones(2)}),
    "sub_": lambda d: flat().sub_(flat()),
    "to": lambda d: [d.to(torch.float64), d.to("meta"), d.to("cpu", copy=True), d.pack().to(torch.float64)],
    "tolist": lambda d: d.drop("x").tolist(),
    "total_norm": lambda d: flat().total_norm(),
    "unflatten": lambda d: DeviceDict.unflatten({"a.b": torch.ones(2), "a.c": torch.ones(3)}),
    "update": lambda d: d.update({"x": torch.ones(3), "n": {"y": [1.0]}}),
    "zero_": lambda d: flat().zero_(),
}


def rows(d: DeviceDict) -> list[Any]:
    d.rows[1:3] = d.rows[:2].clone()
    d.rows[[0, 2]] = d.rows[[1, 3]]
    picked = [d.rows[0], d.rows[1:], d.rows[[0, 2]], d.rows[d["i"] > 1], list(d.rows), d.rows.__getitems__([0, 1])]
    return [*picked, [method(d.rows) for method in ROWS.values()]]


ROWS: dict[str, Callable[[Any], Any]] = {
    "batches": lambda rows: list(rows.batches(2, shuffle=True)),
    "flatten": lambda rows: DeviceDict({"x": torch.ones(2, 3, 4)}).rows.flatten(2),
    "group_by": lambda rows: [rows.group_by(("n", "s")), rows.group_by("i", ("n", "s"))],
    "shuffle": lambda rows: rows.shuffle(),
    "sort_by": lambda rows: rows.sort_by(("n", "s"), "i"),
    "split": lambda rows: rows.split(2),
    "tolist": lambda rows: rows.tolist(),
    "windows": lambda rows: rows.windows({"x": range(2), ("n", "y"): [0, -1]}, within="i").__getitems__([0, 1]),
}

# By the name of a public function or class. Each gets a folder.
FUNCTIONS: dict[str, Callable[[Path], Any]] = {
    "DeviceDict": lambda _: [DeviceDict(made(), device=META), DeviceDict(made().items()), made() | made()],
    "BatchOrder": lambda _: ordered(),
    "Hashing": lambda _: with_encoder(),
    "Pad": lambda _: collate([{"x": torch.ones(n)} for n in (2, 3)], pad={"x": Pad(0.0, mask="m", lengths="l")}),
    "Ragged": lambda _: with_ragged(),
    "RowWriter": lambda folder: (table(folder / "t"), load(folder / "t"), sent(load(folder / "t"))),
    "add_column": lambda folder: add_column(table(folder / "t"), ("n", "y"), [torch.ones(2), torch.ones(1)]),
    "drop_column": lambda folder: drop_column(table(folder / "t"), "ids"),
    "repair": lambda folder: repair(table(folder / "t")),
    "load_parts": lambda folder: load_parts(in_parts(folder))[[2, 0]],
    "JoinedRows": lambda folder: JoinedRows([flat(), flat()])[[1, 0]],
    "join_parts": lambda folder: join_parts(in_parts(folder), folder / "whole"),
    "verify": lambda folder: verify(table(folder / "t")),
    "TypedDeviceDict": lambda _: [batch(), Batch.from_dict(batch().to_dict()), Batch.wrap(batch()), batch().x],
    "cat": lambda _: [cat([flat(), flat()]), torch.cat([flat(), flat()])],  # pyright: ignore
    "collate": lambda _: [
        collate([flat(), flat()]),
        collate([made().drop("x").rows[0], made().drop("x").rows[1]]),
        collate([{"s": "a", "t": torch.ones(2)}, {"s": "bc", "t": torch.ones(3)}], pad={"t": 0}),
        collate([batch(), batch()]),
        torch.utils.data.default_collate([flat(), flat()]),
    ],
    "load": lambda folder: [load(written(folder / "d")), load(folder / "d", keys=["x"]), load(folder / "d", "meta")],
    "prefetch": lambda _: [
        list(prefetch([flat(), flat(), flat()], "cpu", slots=2)),
        list(prefetch([made(), made()], "cpu")),
        next(iter(prefetch([made(), made()], "cpu"))),
    ],
    "save": lambda folder: save({"x": torch.ones(3), "n": {"y": torch.ones(2)}}, folder / "d"),
    "stack": lambda _: [stack([flat(), flat()]), torch.stack([flat(), flat()])],  # pyright: ignore
    "to_device": lambda _: [to_device([{"x": torch.ones(2)}, made()], "meta"), to_device((flat(),), "cpu")],
    "to_numpy": lambda _: to_numpy([{"x": torch.ones(2)}, made()]),
    "view_read_only": lambda _: viewed(),
    # What frameworks call.
    "pickle": lambda _: [pickle.loads(pickle.dumps(d(), p)) for p in (2, 3, 4, 5) for d in (made, packed, batch)],
    "ForkingPickler": lambda _: [sent(made()), sent(made().pack()), sent(DeviceDict({"x": torch.ones(2)}).pack())],
    "copy": lambda _: [copy.copy(made()), copy.deepcopy(made()), copy.deepcopy(packed())],
    "torch.save": lambda _: [torch_saved(2), torch_saved(4), torch_saved(5)],
    "pytree": lambda _: pytree.tree_map(lambda t: t + 1, made().drop("n")),
    "repr": lambda _: [repr(made()), made()._repr_html_(), made() == made()],
}
RANKS: dict[str, Callable[[], Any]] = {
    "all_gather": lambda: ranks.all_gather(made()),
    "all_reduce": lambda: ranks.all_reduce(flat()),
    "broadcast": lambda: ranks.broadcast(made()),
    "gather": lambda: ranks.gather(made()),
    "irecv": lambda: ranks.irecv(0, like=made()),
    "isend": lambda: ranks.isend(made(), 0),
    "recv": lambda: ranks.recv(0, like=made()),
    "scatter": lambda: ranks.scatter(made()),
    "send": lambda: ranks.send(made(), 0),
}
ELSEWHERE = {"Work", "DeviceMismatchError", "InvalidFileError", "MissingKeyError", "StringEncoder", "Tokenizer", "Utf8",
             "Vocabulary", "encoder_from_json", "encoder_to_json", "field", "register_encoder"}  # fmt: skip
"""Public names that hold no tensor, or that the calls above use."""


def packed() -> DeviceDict:
    return made().pack()


def refused(folder: Path) -> None:
    with RowWriter(folder, like=made()) as writer:
        writer.write(flat())


def unflushed(use: Callable[[], Any]) -> None:
    """The disk fails."""

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    with mock.patch("os.fdatasync", fail):
        use()


def other_encoder(folder: Path) -> None:
    RowWriter(folder, like=made()).close()
    RowWriter(folder, append=True, encoders={"s": Hashing(4)})


def odd(d: DeviceDict) -> DeviceDict:
    """A dict that cannot be pickled or saved."""
    return DeviceDict({**d, "w": torch.ones(3, requires_grad=True) * 2, "o": lambda: 0}, objects="keep")


ERRORS: dict[str, Callable[[Path], Any]] = {
    "construct": lambda _: DeviceDict({"x": torch.ones(3), "y": torch.ones(2, device=META)}),
    "write": lambda _: made().update({"x": torch.ones(3), "y": torch.ones(2, device=META)}),
    "read": lambda _: made()["n", "z"],
    "map": lambda _: made().map(torch.mm),
    "add_": lambda _: flat().add_(made()),
    "decode": lambda _: made().decode("x"),
    "rows": lambda _: made().rows[[9]],
    "row write": lambda _: made().rows.__setitem__(0, {"x": torch.ones(2)}),
    "stack": lambda _: stack([made(), made()]),
    "cat": lambda _: cat([flat(), made()]),
    "collate": lambda _: collate([made(), made()]),
    "collate strings": lambda _: collate([{"x": torch.ones(2)}, {"x": "a"}]),
    "typed": lambda _: Batch(x=torch.ones(2)),  # pyright: ignore[reportCallIssue]
    "pickle": lambda _: pickle.dumps(odd(made())),
    "another process": lambda _: ForkingPickler.dumps(odd(made())),
    "torch.save": lambda _: torch.save(odd(made()), io.BytesIO()),
    "deepcopy": lambda _: copy.deepcopy(odd(made())),
    "save": lambda folder: odd(made()).save(folder / "d"),
    "save to a missing folder": lambda folder: made().save(folder / "no" / "d"),
    "load": lambda folder: load(written(folder / "d"), keys=["z"]),
    "save to a failing disk": lambda folder: unflushed(lambda: made().save(folder / "d")),
    "RowWriter": lambda folder: [refused(folder)],
    "RowWriter on a failing disk": lambda folder: unflushed(lambda: table(folder / "t")),
    "RowWriter with another encoder": other_encoder,
    "prefetch": lambda _: list(prefetch([made(), odd(made())], "nowhere")),
    "numpy": lambda _: DeviceDict({"x": torch.ones(3), "y": torch.ones(2).bfloat16()}).numpy(),
    "to": lambda _: made().to("nowhere"),
    "pytree": lambda _: pytree.tree_map(lambda t: t.nowhere, made()),
    "unpickle": lambda _: pickle.loads(pickle.dumps(made(), 5, buffer_callback=[].append), buffers=[b""]),
}


@contextmanager
def without_collector(patience: float = 2.0) -> Iterator[None]:
    """Fail if the block leaves a tensor alive, or garbage that holds a tensor. The collector does not run inside.

    ``patience``: the seconds that a thread of Gloo may take to free the tensors of a call.
    """
    gc.disable()
    gc.collect()
    gc.freeze()  # the objects below are those of the block; what is alive here stays frozen
    try:
        yield
        end = time.monotonic() + patience
        while (kept := sizes_in(gc.get_objects())) and time.monotonic() < end:
            time.sleep(0.01)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        garbage = sizes_in(gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not garbage, f"a reference cycle holds tensors of the shapes {garbage}"
    assert not kept, f"tensors are alive after the call, of the shapes {kept}"


def sizes_in(objects: list[Any]) -> list[tuple[int, ...]]:
    """The sizes of the tensors with memory of their own: caches keep tensors on meta, and tensors without elements."""
    found = [one for one in objects if issubclass(type(one), Tensor)]
    return [tuple(one.size()) for one in found if not one.is_meta and one.numel()]


def names_of(cls: type) -> set[str]:
    found = {name for name in dir(cls) if not name.startswith("_")}
    return {name for name in found if callable(getattr(cls, name, None)) or isinstance(vars(cls).get(name), property)}


METHOD_NAMES = sorted((names_of(DeviceDict) - names_of(dict)) | METHODS.keys())


def test_every_public_name_is_called() -> None:
    assert names_of(Rows) == set(ROWS), "add a call to ROWS"
    assert set(tensordict_lite.__all__) - FUNCTIONS.keys() == ELSEWHERE - {"Work"}, "add a call to FUNCTIONS"
    assert set(ranks.__all__) - RANKS.keys() == {"Work"}, "add a call to RANKS"


def test_the_test_finds_a_cycle() -> None:
    def hold() -> None:
        cycle: list[Any] = [torch.ones(3)]
        cycle.append(cycle)

    with pytest.raises(AssertionError, match="a reference cycle holds tensors"), without_collector(0.1):
        hold()
    tensors: list[Tensor] = []
    with pytest.raises(AssertionError, match="tensors are alive"), without_collector(0.1):
        tensors.append(torch.ones(3))


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_a_method(name: str) -> None:
    call = METHODS.get(name, lambda d: getattr(d, name)() if callable(getattr(d, name)) else getattr(d, name))
    for make in (made, packed):
        with suppress(Exception):  # CUDA, or a library, may be missing
            call(make())  # torch caches what the first call imports
        with without_collector(), suppress(Exception):
            call(make())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function(name: str, tmp_path: Path) -> None:
    for attempt in ("a", "b"):
        (tmp_path / attempt).mkdir()
    FUNCTIONS[name](tmp_path / "a")
    with without_collector():
        FUNCTIONS[name](tmp_path / "b")


@pytest.mark.parametrize("name", ERRORS)
def test_an_error(name: str, tmp_path: Path) -> None:
    for attempt in ("a", "b"):
        (tmp_path / attempt).mkdir()
    with pytest.raises(Exception):  # noqa: B017, PT011
        ERRORS[name](tmp_path / "a")
    with without_collector(), suppress(Exception):
        ERRORS[name](tmp_path / "b")


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    meeting = tmp_path_factory.mktemp("group") / "meeting"
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", RANKS)
def test_a_call_of_ranks(name: str, group: None) -> None:
    for _ in range(2):
        with suppress(Exception):  # a rank cannot send to itself
            RANKS[name]()
    with without_collector(), suppress(Exception):
        RANKS[name]()


@pytest.mark.parametrize("make", [flat, lambda: flat().pack(), lambda: collate([{"x": [1.0], "n": {"y": 2}}] * 2)])
def test_a_pickle_leaves_nothing_to_the_collector(make: Callable[[], Any]) -> None:
    """Garbage of each batch, even without a tensor, spreads the batches of a loader over more and more new memory."""

    def garbage() -> int:
        gc.collect()
        gc.freeze()  # the objects below are those of the pickles
        for dumps in (lambda d: pickle.dumps(d, 5), ForkingPickler.dumps):
            assert pickle.loads(dumps(make())).keys() == make().keys()
        return gc.collect()

    gc.disable()
    try:
        assert min(garbage() for _ in range(4)) == 0  # the first call, and threads of other tests, may leave some
    finally:
        gc.enable()
