"""`save` and `load`: what is saved is loaded, on any device and in any class."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import pickle
import socket
import sys
import time
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checks import check_invariants, fails
from files import Batch, Obs, Typed, sample, saved, torch_saved_and_loaded
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tensordict_lite import (
    DeviceDict,
    Hashing,
    InvalidFileError,
    Ragged,
    StringEncoder,
    Utf8,
    Vocabulary,
    load,
    register_encoder,
    save,
)
from tensordict_lite.tables import RowWriter

safetensors = pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file  # noqa: E402


class Key(str, enum.Enum):
    b = "b"


class TestRoundTrip:
    def test_everything_a_dict_has(self, tmp_path: Path) -> None:
        d = sample()
        for one in (d, d.pack(), d.clone()):
            again = load(saved(one, tmp_path / "d.safetensors"))
            check_invariants(again)
            assert type(again) is DeviceDict and again == d and list(again) == list(d)
            assert again.decode("name") == ["Ada", "Bo"]
            assert again._policy == one._policy and again["n", "e"].device == torch.device("cpu")
        empty = load(saved(DeviceDict(), tmp_path / "empty"))
        assert empty == {} and load(saved({"n": {}}, tmp_path / "empty"), device="meta").device == torch.device("meta")

    def test_unusual_tensors(self, tmp_path: Path) -> None:
        base = torch.arange(24.0).reshape(2, 3, 4)
        c = torch.tensor([1 + 2j, 3j])
        d = DeviceDict(
            {
                "t": base.transpose(0, 2),
                "part": base[:, 1],
                "same": base,
                "again": base,
                "overlap": base.flatten()[3:9],
                "wide": base[:1].expand(5, 3, 4),
                "grad": torch.ones(2, requires_grad=True),
                "parameter": torch.nn.Parameter(torch.ones(1)),
                "conj": c.conj(),
                "neg": c.conj().imag,
                "empty": torch.zeros(0, 2),
                "scalar": torch.tensor(True),
                "channels": torch.rand(1, 3, 2, 2).to(memory_format=torch.channels_last),
                "c128": c.to(torch.complex128)[None],
            }
        )
        again = load(saved(d, tmp_path / "d"))
        check_invariants(again)
        assert again == d and not any(t.requires_grad for t in again.values()) and again["t"].is_contiguous()
        assert again["c128"].dtype == torch.complex128

    @pytest.mark.parametrize("dtype", [torch.float32, torch.uint16, torch.complex128], ids=str)
    @pytest.mark.parametrize(
        ("shape", "stride"),
        [((1,), (4,)), ((1,), (0,)), ((1, 1), (5, 7)), ((1, 3), (5, 2)), ((3, 1), (1, 0)), ((0,), (3,)), ((), ())],
    )
    def test_a_dimension_of_one_may_have_any_stride(self, dtype: Any, shape: Any, stride: Any, tmp_path: Path) -> None:
        x = torch.arange(16).to(dtype).as_strided(shape, stride, 1)
        d = DeviceDict({"x": x})
        if shape:
            d = DeviceDict({**d, "r": Ragged(x, torch.tensor([0, len(x)])), "x": x[None]})
            large = DeviceDict({**d, "image": torch.zeros(1, 1 << 18)})  # a table writes large batches without a copy
            with RowWriter(tmp_path / "t", like=large) as writer:
                writer.write(large)
            assert load(tmp_path / "t") == large
        assert load(saved(d, tmp_path / "d")) == load(saved(d.pack(), tmp_path / "p")) == d

    @pytest.mark.slow
    @given(data=st.data())
    def test_any_tree(self, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
        dtypes = [
            torch.bool, torch.uint8, torch.int16, torch.uint64, torch.bfloat16, torch.float8_e5m2, torch.float64,
            torch.complex64,
        ]  # fmt: skip
        key = st.text(st.characters(codec="utf-8"), max_size=4) | st.sampled_from(
            ["a.b", "__metadata__", "a.b~2", "\ud800", "\0"]
        )
        tensor = st.builds(
            lambda dtype, shape: torch.randint(0, 2, shape, dtype=torch.uint8).to(dtype),
            st.sampled_from(dtypes),
            st.lists(st.integers(0, 3), max_size=3),
        )
        tree = st.recursive(
            st.dictionaries(key, tensor, max_size=4),
            lambda inner: st.dictionaries(key, tensor | inner, max_size=4),
            max_leaves=8,
        )
        d = DeviceDict(data.draw(tree), device="cpu")
        path = saved(d, tmp_path_factory.mktemp("any") / "d")
        again = load(path)
        check_invariants(again)
        assert again == d and sum(t.nbytes for t in load_file(path).values()) == d.nbytes

    def test_other_programs_read_it_and_are_read(self, tmp_path: Path) -> None:
        d = DeviceDict({"a": {"b": 1, "c": {"d": [2.0]}}, "a.b": 3, "x": torch.ones(2, dtype=torch.bfloat16)})
        plain = load_file(saved(d, tmp_path / "ours"))
        assert set(plain) == {"a.b", "a.b~2", "a.c.d", "x"} and plain["a.b"] == 1 and plain["a.b~2"] == 3
        assert plain["x"].dtype == torch.bfloat16
        save_file(plain, tmp_path / "theirs", metadata={"format": "pt"})
        again = load(tmp_path / "theirs")
        assert type(again) is DeviceDict and again == plain
        assert again.unflatten(again.drop("a.b", "a.b~2"))["a", "c", "d"] == 2
        save_file({}, tmp_path / "none")
        assert load(tmp_path / "none") == {}

    def test_onto_a_device(self, tmp_path: Path, device: torch.device) -> None:
        d = sample()
        path = saved(d.to(device), tmp_path / "d")
        again = load(path, device=device)
        check_invariants(again)
        assert again.device == device and again.cpu() == d and load(path) == d
        assert DeviceDict.load(path, "meta").device == torch.device("meta")

    def test_a_device_is_copied_in_chunks(self, tmp_path: Path, copies: Any, monkeypatch: Any) -> None:
        monkeypatch.setattr("tensordict_lite._files.safetensors._CHUNK", 1000)
        d = DeviceDict({f"x{i}": torch.full((100,), float(i)) for i in range(5)})
        on = d.to("sim")
        copies.clear()
        path = saved(on, tmp_path / "d")
        assert copies["d2h"] == 2 and load(path) == d

    def test_some_keys(self, tmp_path: Path) -> None:
        path = saved(sample(), tmp_path / "d")
        assert load(path, keys=["x"]).to_dict().keys() == {"x"}
        part = load(path, keys=["name", ("n", "m")])
        check_invariants(part)
        assert list(part) == ["name", "n"] and list(part["n"]) == ["m"] and part.decode("name") == ["Ada", "Bo"]
        assert load(path, keys=[("n", "e")]).to_dict() == {"n": {"e": {}}} and load(path, keys=[]) == {}

    @pytest.mark.parametrize(
        ("keys", "error", "message"),
        [
            (["nope"], KeyError, "'nope'"),
            ([("n", "nope")], KeyError, "nope"),
            ([("x", "y")], KeyError, "y"),
            ([()], TypeError, "^keys= is a list of keys and paths"),
            ([["x"]], TypeError, "^keys= is a list of keys and paths"),
            (5, TypeError, "^keys= is a list of keys and paths"),
            ([5], TypeError, "^keys= is a list of keys and paths"),
            ("x", TypeError, r"^keys= is a list of keys and paths, got 'x'; write \['x'\]$"),
        ],
        ids=["a key", "a path", "a path below a tensor", "an empty path", "a list", "a number", "numbers", "one key"],
    )
    def test_keys_that_are_none(self, tmp_path: Path, keys: Any, error: type[Exception], message: str) -> None:
        path = saved(sample(), tmp_path / "d")
        fails(error, message, lambda: load(path, keys=keys))

    def test_an_encoder_that_is_a_class(self, tmp_path: Path) -> None:
        path = saved(sample(), tmp_path / "d")
        fails(TypeError, r"^an encoder is ", lambda: load(path, encoders={"x": Utf8}))

    def test_classes_choose(self, tmp_path: Path) -> None:
        d = Batch({"s": ["b"], "t": "x", "n": {"s": "a"}}, encoders={"t": Utf8(3)}, dtype=torch.float16)
        path = saved(d, tmp_path / "d")
        plain = load(path)
        assert type(plain) is DeviceDict and type(plain["n"]) is DeviceDict and plain._policy == d._policy
        assert plain.decode("s") == ["b"]
        own = Batch.load(path)
        assert type(own) is Batch and type(own["n"]) is Batch and own._policy.on_mismatch == "move"
        assert own._policy.dtype is None
        assert own.decode("t") == "x" and own.encoders["t"] == Utf8(3)

    def test_typed(self, tmp_path: Path) -> None:
        path = saved(Typed.from_dict({"x": [1.0], "obs": {"state": [2.0]}}), tmp_path / "d")
        again = Typed.load(path)
        assert type(again.obs) is Obs and again.obs.state == 2 and again.w is None
        assert type(load(path)["obs"]) is DeviceDict
        fails(TypeError, r"^'obs' is missing; the fields of Typed are x, obs, w$", lambda: Typed.load(path, keys=["x"]))
        fails(TypeError, r"^Obs has no field 'x'\. Its fields are state$", lambda: Obs.load(path))

    def test_encoders(self, tmp_path: Path) -> None:
        path = saved(DeviceDict({"a": "x", "b": "x"}, encoders=Hashing(8)), tmp_path / "d")
        assert load(path)._policy.default_encoder == Hashing(8)
        assert load(path, encoders={"a": Hashing(9)}).encoders["a"] == Hashing(9)
        assert load(path, encoders=Utf8(9))._policy.default_encoder == Utf8(9)
        save_file({"s": torch.tensor([1, 0])}, tmp_path / "foreign")
        assert Batch.load(tmp_path / "foreign", encoders=Vocabulary(["b", "a"])).decode("s") == ["a", "b"]
        d = Batch({"q": "x"}, encoders=Hashing(8))
        assert Batch.load(saved(d, tmp_path / "own")).encoders["q"] == Hashing(8)
        for dtype in (torch.float8_e5m2, torch.bfloat16):
            d = DeviceDict({"x": torch.ones(1)}, dtype=dtype)
            assert load(saved(d, tmp_path / "own"))._policy == d._policy

    def test_keys_of_a_class_of_their_own(self, tmp_path: Path) -> None:
        d = DeviceDict({np.str_("a"): 1, Key.b: 2})
        for again in (load(saved(d, tmp_path / "d")), torch_saved_and_loaded(d)):
            assert again == {"a": torch.tensor(1), "b": torch.tensor(2)} and set(map(type, again)) == {str}

    @pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no dtype of 4 bits")
    def test_foreign_dtypes_and_many_dimensions(self, tmp_path: Path) -> None:
        four = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        save_file({"x": four, "y": torch.ones(2)}, tmp_path / "four")
        assert load(tmp_path / "four")["x"].dtype == torch.float4_e2m1fn_x2
        assert load(tmp_path / "four", keys=["y"])["y"].sum() == 2
        header = json.dumps({"x": {"dtype": "F32", "shape": [1] * 40_000, "data_offsets": [0, 4]}}).encode()
        (tmp_path / "dims").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
        start = time.monotonic()
        with contextlib.suppress(InvalidFileError):
            load(tmp_path / "dims")
        assert time.monotonic() - start < 2


class TestPaths:
    def test_every_kind_of_path_is_taken_by_both(self, tmp_path: Path) -> None:
        for path in (tmp_path / "p", str(tmp_path / "s"), os.fsencode(tmp_path / "b")):
            save({"x": 1, "y": 2}, path)
            assert load(path, keys=["x"]) == {"x": torch.tensor(1)}
        assert sorted(os.listdir(tmp_path)) == ["b", "p", "s"]

    def test_a_descriptor_is_no_path_and_stays_open(self, tmp_path: Path) -> None:
        path = saved({"x": 1}, tmp_path / "d")
        with open(path, "rb") as file:
            for use in (lambda: load(file.fileno()), lambda: save({"x": 1}, file.fileno())):  # type: ignore[arg-type]
                with pytest.raises(TypeError, match=r"expected str, bytes or os\.PathLike object, not int"):
                    use()
            assert len(file.read()) == path.stat().st_size

    @pytest.mark.parametrize("keys", [None, ["x"]])
    def test_what_is_no_regular_file_is_refused_at_once(self, tmp_path: Path, keys: Any) -> None:
        os.mkfifo(tmp_path / "fifo")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(tmp_path / "s"))
            (tmp_path / "link").symlink_to(tmp_path / "fifo")
            for path in (tmp_path / "fifo", tmp_path / "link", tmp_path / "s", Path("/dev/zero"), Path(os.devnull)):
                with pytest.raises(
                    OSError, match=f"^{str(path)!r} is not a regular file; only regular files can be loaded$"
                ):
                    load(path, keys=keys)
        fails(IsADirectoryError, str(tmp_path), lambda: load(tmp_path, keys=keys))

    def test_a_pipe_that_takes_the_name_is_not_waited_for(self, tmp_path: Path, monkeypatch: Any) -> None:
        os.mkfifo(tmp_path / "fifo")
        regular = os.stat(__file__)
        monkeypatch.setattr(os, "stat", lambda *_, **__: regular)
        fails(OSError, "is not a regular file", lambda: load(tmp_path / "fifo"))


class TestMemory:
    def test_a_field_is_read_when_it_is_used_and_the_file_never_written(self, tmp_path: Path) -> None:
        path = saved({"big": torch.ones(64 << 20, dtype=torch.uint8), "x": [1.0]}, tmp_path / "d")

        def resident() -> int:
            return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        before = resident()
        d = load(path)
        if sys.platform == "linux":
            assert resident() - before < 16 << 20
        d["x"].zero_()
        d["big"].zero_()
        again = load(path)
        assert again["x"] == 1 and again["big"].all()
        save(again, path)  # over the file that it is mapped from
        assert again["big"].all() and load(path)["big"].all()

    def test_a_field_is_no_more_than_itself(self, tmp_path: Path) -> None:
        path = saved({"big": torch.zeros(8 << 20, dtype=torch.uint8), "x": torch.ones(2), "y": 1}, tmp_path / "d")
        d = load(path)
        assert d["x"].untyped_storage().nbytes() == 8
        assert len(pickle.dumps(load(path, keys=["x"]).requires_grad_())) < 3000
        part = load(path, keys=["x", "y"])
        for copied in (part.pack(), part.share_memory_(), pickle.loads(ForkingPickler.dumps(part))):
            assert copied == {"x": torch.ones(2), "y": torch.tensor(1)}
        received = list(DataLoader(Loading(path), batch_size=None, num_workers=1))
        assert [one["x"].tolist() for one in received] == [[1, 1]] * 3

    def test_the_mapping_outlives_the_file(self, tmp_path: Path) -> None:
        path = saved({"x": torch.arange(1000)}, tmp_path / "d")
        d = load(path)
        path.unlink()
        assert d["x"].sum() == 499500


class Loading(Dataset[DeviceDict]):
    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> DeviceDict:
        if index >= 3:
            raise IndexError
        return load(self.path)


def test_a_registered_encoder_of_the_user(tmp_path: Path) -> None:
    @register_encoder
    class Length(StringEncoder):
        name = "test-disk-length"
        code_ndim = 0

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Length)

        __hash__ = None  # type: ignore[assignment]

        def encode(self, strings: Any) -> Tensor:
            return len_of(strings)

        def decode(self, codes: Tensor) -> list[str]:
            return ["?" * n for n in codes.tolist()]

        def to_json(self) -> dict[str, Any]:
            return {}

        @classmethod
        def from_json(cls, state: Any) -> Length:
            return cls()

    d = DeviceDict({"s": ["a", "bb"]}, encoders={"s": Length()})
    assert load(saved(d, tmp_path / "d")).decode("s") == ["?", "??"]
    assert torch_saved_and_loaded(d).decode("s") == ["?", "??"]


def len_of(strings: Any) -> Tensor:
    return torch.tensor([len(s) for s in strings])
