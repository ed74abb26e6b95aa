"""Every way to make a dict of another one, and every way in for values.

Run by test_option_paths.py with a package that has two options more. ``tag`` refuses the key "forbidden". ``levels`` is
the number of levels of dicts that may be inside of a dict.
"""

from __future__ import annotations

import copy
import inspect
import io
import json
import multiprocessing
import pickle
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from ranks import on_ranks
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, default_collate

from tensordict_lite import (
    DeviceDict,
    Ragged,
    StringEncoder,
    TypedDeviceDict,
    Vocabulary,
    cat,
    collate,
    load,
    prefetch,
    register_encoder,
    save,
    stack,
    to_device,
)
from tensordict_lite.tables import RowWriter

LETTERS = Vocabulary(["a", "b"])
OPTION: Any = {"tag": "kept", "levels": 4} if __name__ == "__main__" else {}
LEVELS: Any = {"levels": 2} if OPTION else {}


class Typed(TypedDeviceDict):
    x: Tensor
    n: DeviceDict[Tensor]
    s: Tensor | None = None


class Rebuilt(DeviceDict[Any], **OPTION):
    """A framework rebuilds a dict as ``type(d)({...})``."""


class Strict(TypedDeviceDict, **OPTION):
    n: DeviceDict[Any]


class Shallow(DeviceDict[Any], **LEVELS):
    """Two levels of dicts."""


class TypedShallow(TypedDeviceDict, **LEVELS):
    n: DeviceDict[Any]


@register_encoder
class Zeros(StringEncoder):
    name = "zeros"

    def encode(self, strings: Sequence[str], /) -> dict[str, Tensor]:
        return {"z": torch.zeros(len(strings))}

    def to_json(self) -> dict[str, Any]:
        return {}


def data() -> dict[str, Any]:
    return {
        "x": torch.arange(6.0).reshape(3, 2),
        "n": {"y": torch.ones(3, 2), "m": {"z": torch.zeros(3, 2)}},
        "s": [*"aba"],
    }


def numbers(d: DeviceDict[Any]) -> Any:
    return d.select("x", "n")


def in_memory(d: Any) -> Any:
    file = io.BytesIO()
    torch.save(d, file)
    file.seek(0)
    return torch.load(file)


def on_disk(write: Callable[[Any, Any], None], d: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        write(d, Path(folder) / "d")
        return load(Path(folder) / "d")


def write_table(d: Any, path: Any) -> None:
    with RowWriter(path, like=d) as writer:
        writer.write(d)


def echo(inbox: Any, outbox: Any) -> None:
    outbox.put(inbox.get(timeout=60))
    inbox.get(timeout=60)  # the shared memory lives until the other side has it


def through_queues(d: Any) -> Any:
    context = torch.multiprocessing.get_context("fork")
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=echo, args=(inbox, outbox))
    process.start()
    inbox.put(d)
    found = outbox.get(timeout=60)
    inbox.put(None)
    process.join()
    return found


def in_a_worker(d: Any, **options: Any) -> Any:
    context = multiprocessing.get_context("fork")
    return list(DataLoader(d.rows, 2, num_workers=1, multiprocessing_context=context, **options))


def exchange(rank: int, d: Any, folder: str) -> None:
    from tensordict_lite.distributed import all_gather, broadcast, scatter  # noqa: PLC0415  (starts torch.distributed)

    given = d if rank == 0 else None
    found = [broadcast(given, src=0), scatter(given, src=0, uneven=True), *all_gather(d)]
    torch.save(found, Path(folder) / f"{rank}.pt")


def between_ranks(d: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(exchange, d, folder)
        return [torch.load(path) for path in sorted(Path(folder).iterdir())]


def own_class(d: Any) -> Any:
    made = Typed.wrap(d)
    made["s"] = ["b"] * 3
    return [made, made.copy(), pickle.loads(pickle.dumps(made)), collate(list(made.rows), cls=Typed), made.double()]


def with_ragged(d: Any) -> Any:
    """Every way to make a batch with a ragged field of another one."""
    d["r"] = Ragged.from_rows([[1.0], [2.0, 3.0], []])
    d["k", "r"] = d["r"]
    ways = [
        *(d.rows[1:], d.rows[[2, 0]], *d.rows.split(2), d.rows.shuffle(), *d.rows.batches(2), d.rows.__getitems__([1])),
        *(d.copy(), d.clone(), d.pack(), d.to("meta"), d.double(), d.map(torch.clone), copy.deepcopy(d), cat([d, d])),
        *(pickle.loads(pickle.dumps(d)), pickle.loads(pickle.dumps(d.rows)), in_memory(d), in_memory(d.pack())),
        *(on_disk(save, d), on_disk(write_table, d), pytree.tree_map(torch.clone, d), torch.zeros_like(d)),
        *(in_a_worker(d)[0], through_queues(d), collate(list(d.rows), ragged=["r"]), DeviceDict.unflatten(d.flatten())),
    ]
    d.rows[0] = d.rows[0]
    return [d, *ways]


def written(d: Any) -> Any:
    d["t"] = ["b"] * 3
    d["k", "l"] = {"t": "text"}
    d.update(u="text")
    d |= {"v": "text"}
    d.setdefault("w", {"t": "b"})
    return d


# Arguments of the methods that need some. A method that returns a dict and is missing here is called without arguments.
ARGUMENTS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    **{name: lambda d: (numbers(d),) for name in ("add_", "sub_", "mul_", "div_", "copy_")},
    "fill_": lambda d: (d.copy(),),
    "lerp_": lambda d: (numbers(d), 0.5),
    "drop": lambda d: ("x",),
    "select": lambda d: ("x", ("n", "m")),
    "map": lambda d: (torch.clone,),
    "to": lambda d: ("meta",),
    "new_zeros": lambda d: (2,),
    "new_empty": lambda d: (2,),
    "rows.split": lambda d: (2,),
    "rows.batches": lambda d: (2,),
    "rows.flatten": lambda d: (1,),
    "rows.group_by": lambda d: ("s",),
    "rows.sort_by": lambda d: ("s",),
    "rows.windows": lambda d: ({"x": [0]},),
}  # fmt: skip
NO_PINNED_MEMORY = {"pin_memory", "cuda"} if not torch.cuda.is_available() else set[str]()


def methods() -> dict[str, Callable[[Any], Any]]:
    """A call of every public method whose annotation says that it returns a dict."""
    calls: dict[str, Callable[[Any], Any]] = {}
    for prefix, owner in (("", DeviceDict), ("rows.", type(DeviceDict().rows))):
        for name, member in inspect.getmembers(owner, inspect.isfunction):
            returned = str(inspect.signature(member).return_annotation)
            if name.startswith("_") or name in NO_PINNED_MEMORY:
                continue
            if any(kind in returned for kind in ("Self", "DeviceDict", "D]", "Rows")) or returned == "D":
                calls[prefix + name] = lambda d, prefix=prefix, name=name: _call(d, prefix, name)
    return calls


def _call(d: Any, prefix: str, name: str) -> Any:
    if name.endswith("_") and name not in ("requires_grad_", "share_memory_", "fill_"):
        d = numbers(d).clone()  # arithmetic refuses encoded strings
    owner, given = (d.rows if prefix else d), ARGUMENTS.get(prefix + name, lambda d: ())(d)
    return getattr(owner, name)(*given)


PATHS: dict[str, Callable[[Any], Any]] = {
    **methods(),
    "constructor": lambda d: [DeviceDict(d), DeviceDict(d, device="meta"), DeviceDict(d, dtype=torch.float64)],
    "written to": written,
    "ragged": with_ragged,
    "merged": lambda d: [d | {"t": "b"}, {"t": "b"} | d, d | DeviceDict({"t": "b"}, encoders=LETTERS)],
    "nested": lambda d: d.copy() | {"p": {"q": DeviceDict({"s": "b"}, encoders=LETTERS)}},
    "unflattened": lambda d: DeviceDict.unflatten(d.flatten()),
    "copies": lambda d: [copy.copy(d), copy.deepcopy(d)],
    **{
        f"pickle {n}": lambda d, n=n: [pickle.loads(pickle.dumps(one, n)) for one in (d, d.pack(), d.rows[1:])]
        for n in range(2, pickle.HIGHEST_PROTOCOL + 1)
    },
    "batch of windows": lambda d: d.rows.windows({("n", "m"): [0, 1]})[0],
    "pickle of rows": lambda d: pickle.loads(pickle.dumps(d.rows))[0],
    "pytree": lambda d: pytree.tree_map(torch.clone, d),
    "pytree, pickled": lambda d: pytree.tree_unflatten(
        d._tensors(), pickle.loads(pickle.dumps(pytree.tree_flatten(d)[1]))
    ),
    "torch.save": lambda d: [in_memory(d), in_memory(d.pack())],
    "save": lambda d: on_disk(save, d),
    "table": lambda d: on_disk(write_table, d),
    "rows": lambda d: [d.rows[0], d.rows[1:], d.rows[[2, 0]], d.rows[torch.tensor([True, False, True])], *d.rows],
    "rows written to": lambda d: [d.rows.__setitem__(0, d.rows[1]), d][1],
    "__getitems__": lambda d: collate(d.rows.__getitems__([0, 2])),
    "stack and cat": lambda d: [stack([d, d]), cat([d, d]), torch.stack([d, d]), torch.cat([d, d])],
    "functions of torch": lambda d: [
        torch.zeros_like(d),
        torch.clone(d),
        torch.detach(d),
        *torch.split(d, 1),
        *torch.unbind(d),
    ],
    "collate": lambda d: [collate([d, d]), collate(list(d.rows)), default_collate(list(d.rows))],
    "collate with encoders": lambda d: collate(
        [{**d.to_dict(), "s": [*"abb"], "t": "b"}] * 2, cls=Rebuilt, encoders={"s": LETTERS}
    ),
    "loader": lambda d: [in_a_worker(d), in_a_worker(d, collate_fn=collate)],
    "queues": lambda d: [through_queues(d), through_queues(d.pack())],
    "distributed": between_ranks,
    "prefetch": lambda d: list(prefetch([d, d.pack()], "cpu")),
    "to_device": lambda d: [to_device(d, "meta"), to_device([d], "meta")],
    "typed": own_class,
    "class": lambda d: [Rebuilt(dict(d)), type(Rebuilt(d))({"a": {"b": "text"}}), Rebuilt(d).double()],
}


BAD: Any = {"forbidden": {"z": 1.5}}
INSIDE: Any = {"n": {"m": BAD}}


def forbidden(d: Any) -> Any:
    d["forbidden"] = d["x"]
    return d


def encode(strings: list[str]) -> dict[str, Tensor]:
    return {"forbidden": torch.zeros(len(strings))}


def loaded(write: Callable[[Any, Any], None], cls: type[DeviceDict[Any]], value: Any = None) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        write(DeviceDict({"n": {"forbidden": [1.5]}} if value is None else value), Path(folder) / "d")
        return cls.load(Path(folder) / "d")


# Each must raise the error of the rule. `d` has the option.
WAYS_IN: dict[str, Callable[[Any], Any]] = {
    "constructor": lambda d: DeviceDict(INSIDE, **OPTION),
    "constructor of a class": lambda d: Rebuilt(INSIDE),
    "of a DeviceDict": lambda d: Rebuilt(DeviceDict(INSIDE)),
    "type(d)": lambda d: type(Rebuilt(d))(BAD),
    "typed": lambda d: Strict(n=BAD),
    "typed, from_dict": lambda d: Strict.from_dict(INSIDE),
    "typed, wrap": lambda d: Strict.wrap(DeviceDict({"n": BAD})),
    "typed, write": lambda d: setattr(Strict.from_dict({"n": {}}), "n", BAD),
    "typed, path": lambda d: Strict.from_dict({"n": {"m": {}}}).update({"n": INSIDE}),
    "write": lambda d: d.__setitem__("q", BAD),
    "write of a number": lambda d: d.__setitem__("forbidden", 1.5),
    "write of a string": lambda d: d.__setitem__("forbidden", "a"),
    "write of a Ragged": lambda d: d.__setitem__("forbidden", Ragged.from_rows([[1.0]])),
    "write of a DeviceDict": lambda d: d.__setitem__("q", DeviceDict(INSIDE)),
    "nested write": lambda d: d["n"]["m"].__setitem__("q", BAD),
    "nested write of a number": lambda d: d["n"]["m"].__setitem__("forbidden", 1.5),
    "path": lambda d: d.__setitem__(("n", "m", "forbidden", "z"), 1.5),
    "new path": lambda d: d.__setitem__(("q", "forbidden", "z"), d["x"]),
    "update": lambda d: d.update(forbidden=d["x"], y=d["x"]),
    "nested update": lambda d: d["n"].update(INSIDE),
    "setdefault": lambda d: d.setdefault("q", BAD),
    "|": lambda d: d | INSIDE,
    "|=": lambda d: d.__ior__(INSIDE),
    "reflected |": lambda d: {"q": BAD} | d,
    "fromkeys": lambda d: Rebuilt.fromkeys(["forbidden"], 1.5),
    "unflatten": lambda d: Rebuilt.unflatten({"n.forbidden": 1.5}),
    "map": lambda d: d.map(lambda _: BAD),
    "codes": lambda d: DeviceDict({"s": ["a"]}, encoders={"s": encode}, **OPTION),
    "collate": lambda d: collate([INSIDE], cls=Rebuilt),
    "collate, typed": lambda d: collate([INSIDE], cls=Strict),
    "collate of codes": lambda d: collate([{"s": "a"}], cls=Rebuilt, encoders={"s": encode}),
    "collate of objects": lambda d: collate([{"o": [{"forbidden": 1.5}]}], cls=Rebuilt, ragged=["o"]),
    "load": lambda d: loaded(save, Rebuilt),
    "load, typed": lambda d: loaded(save, Strict),
    "load of a table": lambda d: loaded(write_table, Rebuilt),
}  # fmt: skip
# No rule sees these: a plain tensor on the device of the dict, and what pytree and pickle rebuild.
UNSEEN: dict[str, Callable[[Any], Any]] = {
    "write of a tensor": lambda d: d.__setitem__("forbidden", d["x"]),
    "setdefault of a tensor": lambda d: d["n"].setdefault("forbidden", d["x"]),
    "pytree": lambda d: pytree.tree_map(torch.clone, forbidden(d)),
    "pickle": lambda d: pickle.loads(pickle.dumps(forbidden(d))),
}  # fmt: skip


def after(write: Callable[[Any], Any]) -> Any:
    d = DeviceDict({"x": [1.5]}, **LEVELS)
    write(d)
    return d


def with_strings(n: Any) -> Any:
    """A string in place of each innermost dict, for the encoder `Zeros`."""
    nested = any(isinstance(value, dict) for value in n.values())
    return {key: with_strings(value) for key, value in n.items()} if nested else ["a"]


# Each makes a dict with an item "n", and two levels of dicts in it.
BUILT: dict[str, Callable[[Any], Any]] = {
    "constructor": lambda n: DeviceDict({"n": n}, **LEVELS),
    "constructor of a class": lambda n: Shallow({"n": n}),
    "of a DeviceDict": lambda n: Shallow(DeviceDict({"n": n})),
    "of a nested DeviceDict": lambda n: Shallow({"n": DeviceDict({"n": n})["n"]}),
    "of its own class": lambda n: Shallow({"n": Shallow(n)}),
    "typed": lambda n: TypedShallow(n=n),
    "typed, from_dict": lambda n: TypedShallow.from_dict({"n": n}),
    "typed, wrap": lambda n: TypedShallow.wrap(DeviceDict({"n": n})),
    "write": lambda n: after(lambda d: d.__setitem__("n", n)),
    "nested write": lambda n: after(lambda d: (d.update(n={}), d["n"].__setitem__("m", n["m"]))),
    "path": lambda n: after(lambda d: d.__setitem__(("n", "m"), n["m"])),
    "update": lambda n: after(lambda d: d.update(n=n)),
    "setdefault": lambda n: after(lambda d: d.setdefault("n", n)),
    "|": lambda n: Shallow() | {"n": n},
    "reflected |": lambda n: {"n": n} | Shallow(),
    "|=": lambda n: after(lambda d: d.__ior__({"n": n})),
    "unflatten": lambda n: Shallow.unflatten(DeviceDict({"n": n}).flatten()),
    "map": lambda n: Shallow({"n": {"m": {"z": 1.5}}}).map(lambda _: n["m"]["z"]),
    "codes": lambda n: DeviceDict({"n": with_strings(n)}, encoders=Zeros(), **LEVELS),
    "collate": lambda n: collate([{"n": n}], cls=Shallow),
    "collate of dicts": lambda n: collate([DeviceDict({"n": n})], cls=Shallow),
    "collate, typed": lambda n: collate([{"n": n}], cls=TypedShallow),
    "load": lambda n: loaded(save, Shallow, {"n": n}),
    "load, typed": lambda n: loaded(save, TypedShallow, {"n": n}),
    "load of a table": lambda n: loaded(write_table, Shallow, {"n": n}),
}
COPIED: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda d: pickle.loads(pickle.dumps(d)),
    "torch.save": in_memory,
    "file": lambda d: on_disk(save, d),
    "pytree": lambda d: pytree.tree_map(torch.clone, d),
    "to": lambda d: d.to(torch.float64),
    "copy": lambda d: d.copy(),
    "map": lambda d: d.map(torch.clone),
    "select": lambda d: d.select(("n", "m")),
    "constructor": lambda d: type(d)(d),
    "stack": lambda d: stack([d, d]),
}
WRITTEN: dict[str, Callable[[Any], Any]] = {
    "nested write": lambda d: d["n"]["m"].__setitem__("q", {"z": 1.5}),
    "nested write of a DeviceDict": lambda d: d["n"].__setitem__("m", DeviceDict({"q": {"z": 1.5}})),
    "path": lambda d: d.__setitem__(("n", "m", "q", "z"), 1.5),
    "nested update": lambda d: d["n"].update(m={"q": {}}),
    "nested setdefault": lambda d: d["n"]["m"].setdefault("q", {"z": 1.5}),
    "nested |=": lambda d: d["n"]["m"].__ior__({"q": {"z": 1.5}}),
}


def deeper(name: str) -> str:
    """The writes that put a dict too deep into what a way of `BUILT` makes; "" if each raises the error of the rule."""
    made = BUILT[name]({"m": {"z": torch.zeros(1)}})
    calls: dict[str, Callable[[], Any]] = {"itself": lambda: BUILT[name]({"m": {"z": {"q": torch.zeros(1)}}})}
    for how, copied in {"": lambda d: d.copy(), **COPIED}.items():
        for where, write in WRITTEN.items():
            calls[f"{how}, {where}"] = lambda copied=copied, write=write: write(copied(made))
    passed: list[str] = []
    for call, function in calls.items():
        try:
            function()
            passed.append(call)
        except Exception as error:
            passed += [] if str(error).endswith("it is too deep") else [f"{call}: {error}"]
    return "; ".join(passed)


def refused(way: Callable[[Any], Any]) -> str:
    """The error of a way in for a forbidden key; "" if there is none."""
    d = DeviceDict(data(), encoders={"s": LETTERS}, **OPTION)
    try:
        way(d)
    except Exception as error:
        return str(error) if d == DeviceDict(data(), encoders={"s": LETTERS}) else "the dict changed"
    return ""


def dicts(found: Any) -> list[DeviceDict[Any]]:
    """Every dict at any depth."""
    if isinstance(found, dict):
        inside = list(found.values())
    elif isinstance(found, (list, tuple)) or hasattr(found, "__next__"):
        inside = list(found)
    else:
        inside = [found[0:1]] if hasattr(found, "__getitems__") else []
    own = [found] if isinstance(found, DeviceDict) else []
    return own + [one for value in inside for one in dicts(value)]


def lost(name: str) -> str:
    """What is wrong with a path; "" if every dict that it gives has the option."""
    try:
        found = dicts(PATHS[name](DeviceDict(data(), encoders={"s": LETTERS}, **OPTION)))
        if not found:
            return "it gives no dict"
        return "; ".join(repr(one) for one in found if one._policy.tag != "kept" or not _lowered(one))  # pyright: ignore
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _lowered(d: Any) -> bool:
    """Whether each nested dict may have one level fewer than the dict around it."""
    nested: list[Any] = [one for one in d.values() if isinstance(one, DeviceDict)]
    return all(one._policy.levels == d._policy.levels - 1 for one in nested)


if __name__ == "__main__":
    torch.set_num_threads(1)
    errors = {name: refused(way) for name, way in {**WAYS_IN, **UNSEEN}.items()}
    print(json.dumps([{name: lost(name) for name in PATHS}, errors, {name: deeper(name) for name in BUILT}]))
