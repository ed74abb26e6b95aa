"""The names in pickles and files: public ones only, and those of every earlier version are still read."""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from checks import check_invariants
from files import compiles
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import tensordict_lite
from tensordict_lite import (
    DeviceDict,
    Hashing,
    InvalidFileError,
    Ragged,
    Tokenizer,
    TypedDeviceDict,
    Utf8,
    Vocabulary,
    prefetch,
    unpickle,
)

GOLDEN = Path(__file__).parent / "golden"
FILES = sorted(path for path in GOLDEN.iterdir() if path.suffix in (".pickle", ".pt"))
STRINGS = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE")
MEMOIZED = ("MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT")
RECALLED = ("BINGET", "LONG_BINGET", "GET")


class Obs(TypedDeviceDict):
    state: Tensor


class Batch(TypedDeviceDict, objects="keep"):
    x: Tensor
    obs: Obs


class Own(DeviceDict, encoders={"s": Vocabulary(["a"])}):
    pass


def encode(strings: Any) -> Tensor:
    return torch.zeros(len(strings), 1)


def encoded() -> DeviceDict:
    tokenizer: Any = partial(dict)
    tokenizer.batch_decode = list
    encoders = {"v": Vocabulary(["a"]), "h": Hashing(4), "u": Utf8(8), "f": encode, "t": Tokenizer(tokenizer)}
    return DeviceDict({"v": ["a"], "h": ["b"], "u": ["c"], "f": ["d"], "n": {"v": ["a"], "e": {}}}, encoders=encoders)


def raised(call: Callable[[], Any]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("it raised nothing")


def too_deep() -> Any:
    data: Any = {}
    for _ in range(100):
        data = {"a": data}
    return DeviceDict(data)


PICKLED: dict[str, Callable[[], Any]] = {
    "flat": lambda: DeviceDict({"x": [1, 2]}),
    "encoders": encoded,
    "packed": lambda: encoded().pack(),
    "kept": lambda: DeviceDict({"o": {1}, "n": {"o": None}}, objects="keep"),
    "class": lambda: Own({"s": "a", "n": {"s": "a"}}),
    "typed": lambda: Batch(x=torch.ones(2), obs=Obs(state=torch.ones(2))),
    "typed packed": lambda: Batch(x=torch.ones(2), obs=Obs(state=torch.ones(2))).pack(),
    "rows": lambda: encoded().rows,
    "ragged": lambda: [Ragged([1, 2], [0, 2]), DeviceDict({"r": Ragged([1, 2], [0, 2])})],
    "policy": lambda: encoded()._policy,
    "structure": lambda: pytree.tree_structure(encoded()),
    "prefetch": lambda: prefetch([encoded()], "cpu"),
    "missing key": lambda: raised(lambda: DeviceDict({"x": 1})["n", "y"]),
    "device": lambda: raised(lambda: DeviceDict({"x": torch.ones(1), "y": torch.ones(1, device="meta")})),
    "file": lambda: raised(lambda: (_ for _ in ()).throw(InvalidFileError("not a valid file"))),
    "too deep": lambda: raised(too_deep),
    "public names": lambda: [getattr(tensordict_lite, name) for name in tensordict_lite.__all__],
    "unpickle": lambda: [getattr(unpickle, name) for name in unpickle.__all__],
}


def globals_in(data: bytes) -> Iterator[str]:
    """The functions and classes that a pickle names, also those of a pickle inside it."""
    memo: dict[int, Any] = {}
    pushed: list[Any] = [None, None]
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name == "GLOBAL":
            yield str(argument).replace(" ", ".")
        elif name == "STACK_GLOBAL":
            yield ".".join(pushed[-2:])
        if name in MEMOIZED:
            memo[len(memo) if argument is None else argument] = pushed[-1]
        else:
            pushed.append(memo[cast(int, argument)] if name in RECALLED else argument if name in STRINGS else None)
        if isinstance(argument, bytes) and argument[:1] == b"\x80":
            yield from globals_in(argument)


def assert_public(data: bytes) -> set[str]:
    found = set(globals_in(data))
    private = [name for name in found if name.startswith("tensordict_lite") and "._" in name]
    assert not private
    assert not re.findall(rb"tensordict_lite(?:\.\w+)*\._\w+", data)  # names in strings too
    return found


@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # of torch, where a structure is unpickled
@pytest.mark.parametrize("name", PICKLED)
def test_no_pickle_names_a_private_module(name: str) -> None:
    made = PICKLED[name]()
    for protocol in range(2, 6):
        data = pickle.dumps(made, protocol)
        assert any(found.startswith(("tensordict_lite", __name__)) for found in assert_public(data))
        again = pickle.loads(data)
        assert type(again) is type(made)
    if isinstance(made, DeviceDict):
        assert_public(bytes(ForkingPickler.dumps(made)))


def test_nor_does_a_dict_that_is_pickled_by_itself_first() -> None:
    d = DeviceDict({"x": torch.ones(2).to_sparse(), "n": {"y": 1}})
    found = assert_public(bytes(ForkingPickler.dumps(d)))
    assert {"_pickle.loads", "tensordict_lite.unpickle.rebuild"} <= found


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("name", [name for name in PICKLED if isinstance(PICKLED[name](), DeviceDict)])
def test_nor_does_a_file_of_torch_save(name: str, protocol: int) -> None:
    file = io.BytesIO()
    made = PICKLED[name]()
    torch.save(made, file, pickle_protocol=protocol)
    with zipfile.ZipFile(file) as archive:
        pickled = next(archive.read(member) for member in archive.namelist() if member.endswith("data.pkl"))
    assert "tensordict_lite.unpickle.rebuild" in assert_public(pickled)


@compiles
def test_nor_does_an_exported_program(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def forward(self, d: DeviceDict) -> DeviceDict:
            return DeviceDict({"y": d["x"] + d["n", "x"], "n": {"z": d["x"]}})

    program = torch.export.export(Sum(), (DeviceDict({"x": torch.ones(2), "n": {"x": torch.ones(2)}}),))
    torch.export.save(program, tmp_path / "program.pt2")
    with zipfile.ZipFile(tmp_path / "program.pt2") as archive:
        contents = [archive.read(member) for member in archive.namelist()]
    assert any(b"tensordict_lite.DeviceDict" in content for content in contents)
    assert not [found for content in contents for found in re.findall(rb"tensordict_lite(?:\.\w+)*\._\w+", content)]


class TestGolden:
    def read(self, path: Path, **options: Any) -> Any:
        return torch.load(path, **options) if path.suffix == ".pt" else pickle.loads(path.read_bytes())

    def named(self, name: str, *more: str) -> list[Path]:
        return [path for path in FILES if path.name.split("-")[0] in (name, *more)]

    def test_every_form_is_there(self) -> None:
        names = ("unpacked", "packed", "kept", "tokenizer", "rows", "ragged")
        pickles = {f"{name}-protocol{protocol}-1.pickle" for name in names for protocol in range(2, 6)}
        files = {f"{name}-1.pt" for name in names if name != "rows"}
        assert {path.name for path in FILES} == pickles | files | {"large-protocol5-1.pickle"}

    @pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
    def test_they_name_nothing_private(self, path: Path) -> None:
        data = path.read_bytes()
        if path.suffix == ".pt":
            with zipfile.ZipFile(path) as archive:
                data = next(archive.read(member) for member in archive.namelist() if member.endswith("data.pkl"))
        assert any(name.startswith("tensordict_lite.unpickle.") for name in assert_public(data))

    @pytest.mark.parametrize("weights_only", [True, False])
    def test_dicts(self, weights_only: bool) -> None:
        for path in self.named("unpacked", "packed"):
            d = self.read(path, weights_only=weights_only)
            check_invariants(d)
            assert type(d) is DeviceDict and list(d) == ["x", "name", "n", "c"], path
            assert torch.equal(d["x"], torch.arange(6.0).reshape(2, 3)) and d.decode("name") == ["Ada", "Bo"]
            assert d["n", "y"].tolist() == 3 and d["n", "e"] == {} and d.decode("c") == ["red"]
            assert dict(d.encoders) == {"c": Vocabulary(["red", "green"]), "name": Utf8()}
            nested: Any = d["n"]
            assert d._policy.dtype == nested._policy.dtype == torch.float16
            assert d.is_packed or not path.name.startswith("packed")
            d["new"] = 1.5
            assert d["new"].dtype == torch.float16

    def test_kept_objects_and_bare_callables(self) -> None:
        for path in self.named("kept"):
            d = self.read(path, weights_only=False)
            check_invariants(d)
            assert d["x"].tolist() == [1, 2] and d["k"] == {1, 2} and d._policy.objects == "keep"
            assert d.encoders["s"] is len and type(d._policy.encoders["s"]) is unpickle.WrappedEncoder

    def test_tokenizers(self) -> None:
        for path in self.named("tokenizer"):
            d = self.read(path, weights_only=False)
            encoder = d.encoders["text"]
            assert type(encoder) is Tokenizer and dict(encoder.call) == {"padding": True, "truncation": True}
            assert encoder.tokenizer.func is dict and encoder.tokenizer.batch_decode is list

    def test_rows(self) -> None:
        for path in self.named("rows"):
            assert self.read(path)[1]["x"].tolist() == 2

    @pytest.mark.parametrize("weights_only", [True, False])
    def test_ragged_fields(self, weights_only: bool) -> None:
        for path in self.named("ragged"):
            found = self.read(path, weights_only=weights_only)
            check_invariants(found["dict"])
            ids, box = found["dict"]["ids"], found["dict"]["n", "box"]
            assert ids == found["alone"] == Ragged([1, 2, 3], [0, 2, 2, 3]) and ids._lengths.longest == 2, path
            assert box == ids.with_values(torch.ones(3, 2)) and box._lengths is ids._lengths

    def test_large_tensors(self) -> None:
        for path in self.named("large"):
            d = self.read(path)
            check_invariants(d)
            x = torch.arange(40_000).remainder(251).to(torch.int16).reshape(2, -1)
            assert torch.equal(d["x"], x) and d["n", "same"] is d["x"] and d["y"].tolist() == [1, 2]
            assert d["n", "z"].tolist() == 3 and d["n", "e"].shape == (0, 3) and not d.is_packed
            d["n", "z"] += 1
            d["x"] += 1
            assert d["y"].tolist() == [1, 2] and path.stat().st_size < 100_000

    def test_moved_to_another_device(self) -> None:
        for path in self.named("unpacked", "packed"):
            if path.suffix == ".pt":
                moved = self.read(path, map_location="meta")
                check_invariants(moved)
                assert moved.device == moved["n", "e"].device == torch.device("meta")

    def test_only_one_function_is_allowed(self) -> None:
        for path in self.named("kept", "tokenizer"):
            if path.suffix == ".pt":
                with pytest.raises(pickle.UnpicklingError):
                    self.read(path, weights_only=True)

    def test_in_a_process_that_imported_nothing_else(self) -> None:
        pickles = [path for path in FILES if path.suffix == ".pickle" and "protocol2" not in path.name]
        program = (
            "import pickle\n"
            f"for path in {list(map(str, pickles))!r}: print(type(pickle.load(open(path, 'rb'))).__name__)"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        kinds = {"rows": "Rows", "ragged": "dict"}
        assert done.stdout.split() == [kinds.get(path.name.split("-")[0], "DeviceDict") for path in pickles]


def test_what_unpickling_calls_has_one_home() -> None:
    assert {getattr(unpickle, name).__module__ for name in unpickle.__all__} == {"tensordict_lite.unpickle"}
    for name in unpickle.__all__:
        assert f"``{name}``" in (unpickle.__doc__ or "")
        assert getattr(unpickle, name).__qualname__ == name


def test_the_list_of_safe_functions_has_three() -> None:
    ours = [
        one for one in torch.serialization.get_safe_globals() if getattr(one, "__module__", "") == unpickle.__name__
    ]
    assert {*ours} == {unpickle.rebuild, unpickle.rebuild_ragged, unpickle.rebuild_lengths}
