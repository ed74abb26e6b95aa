"""Files: what is saved is loaded, a failed save leaves no trace, and a bad file is an error and nothing else."""

from __future__ import annotations

import contextlib
import enum
import io
import json
import os
import pickle
import random
import signal
import socket
import stat
import subprocess
import sys
import time
import tracemalloc
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tensordict_lite import (
    DeviceDict,
    Hashing,
    InvalidFileError,
    TypedDeviceDict,
    Utf8,
    Vocabulary,
    load,
    register_encoder,
    save,
)
from tensordict_lite._errors import DEPTH

safetensors = pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file  # noqa: E402

GOLDEN = Path(__file__).parent / "golden"
sys.path.insert(0, str(GOLDEN))
import make  # noqa: E402


class Key(str, enum.Enum):
    b = "b"


class Own(DeviceDict):
    """One that has a way of its own."""

    def __reduce__(self) -> Any:
        return own, (dict(self),)


def own(items: Any) -> Any:
    return Own({**items, "mark": 1})


class Moved(DeviceDict):
    pass


Moved.__module__ = "shown_elsewhere"


class Batch(DeviceDict, on_mismatch="move", encoders={"s": Vocabulary(["a", "b"])}):
    """At module level, as `torch.save` names it."""


class Keeping(DeviceDict, objects="keep"):
    pass


class Obs(TypedDeviceDict):
    state: Tensor


class Typed(TypedDeviceDict):
    x: Tensor
    obs: Obs
    w: Tensor | None = None


def sample() -> DeviceDict:
    return DeviceDict(
        {"x": torch.arange(6.0).reshape(2, 3), "name": ["Ada", "Bo"], "n": {"y": 1, "e": {}, "m": {"z": [True]}}}
    )


def saved(d: Any, path: Path) -> Path:
    save(d, path)
    return path


class TestRoundTrip:
    def test_everything_a_dict_has(self, tmp_path: Path) -> None:
        d = sample()
        for one in (d, d.pack(), d.clone()):
            again = load(saved(one, tmp_path / "d.safetensors"))
            again._check()
            assert (
                type(again) is DeviceDict
                and again == d
                and list(again) == list(d)
                and again.decode("name") == ["Ada", "Bo"]
            )
            assert again._policy == one._policy and again["n", "e"].device == torch.device("cpu")
        empty = load(saved(DeviceDict(), tmp_path / "empty"))
        assert empty == {} and load(saved({"n": {}}, tmp_path / "empty"), device="meta").device == torch.device("meta")

    def test_unusual_tensors(self, tmp_path: Path) -> None:
        base = torch.arange(24.0).reshape(2, 3, 4)
        c = torch.tensor([1 + 2j, 3j])
        d = DeviceDict({
            "t": base.transpose(0, 2), "part": base[:, 1], "same": base, "again": base, "overlap": base.flatten()[3:9], "wide": base[:1].expand(5, 3, 4),
            "grad": torch.ones(2, requires_grad=True), "parameter": torch.nn.Parameter(torch.ones(1)), "conj": c.conj(), "neg": c.conj().imag,
            "empty": torch.zeros(0, 2), "scalar": torch.tensor(True), "channels": torch.rand(1, 3, 2, 2).to(memory_format=torch.channels_last), "c128": c.to(torch.complex128)[None],
        })  # fmt: skip
        again = load(saved(d, tmp_path / "d"))
        again._check()
        assert again == d and not any(t.requires_grad for t in again.values()) and again["t"].is_contiguous()
        assert again["c128"].dtype == torch.complex128

    @given(data=st.data())
    def test_any_tree(self, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
        dtypes = [
            torch.bool,
            torch.uint8,
            torch.int16,
            torch.uint64,
            torch.bfloat16,
            torch.float8_e5m2,
            torch.float64,
            torch.complex64,
        ]
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
        again._check()
        assert again == d and sum(t.nbytes for t in load_file(path).values()) == d.nbytes

    def test_other_programs_read_it_and_are_read(self, tmp_path: Path) -> None:
        d = DeviceDict({"a": {"b": 1, "c": {"d": [2.0]}}, "a.b": 3, "x": torch.ones(2, dtype=torch.bfloat16)})
        plain = load_file(saved(d, tmp_path / "ours"))
        assert (
            set(plain) == {"a.b", "a.b~2", "a.c.d", "x"}
            and plain["a.b"] == 1
            and plain["a.b~2"] == 3
            and plain["x"].dtype == torch.bfloat16
        )
        save_file(plain, tmp_path / "theirs", metadata={"format": "pt"})
        again = load(tmp_path / "theirs")
        assert (
            type(again) is DeviceDict
            and again == plain
            and again.unflatten(again.drop("a.b", "a.b~2"))["a", "c", "d"] == 2
        )
        save_file({}, tmp_path / "none")
        assert load(tmp_path / "none") == {}

    def test_onto_a_device(self, tmp_path: Path, device: torch.device) -> None:
        d = sample()
        path = saved(d.to(device), tmp_path / "d")
        again = load(path, device=device)
        again._check()
        assert again.device == device and again.cpu() == d and load(path) == d
        assert DeviceDict.load(path, "meta").device == torch.device("meta")

    def test_some_keys(self, tmp_path: Path) -> None:
        path = saved(sample(), tmp_path / "d")
        assert load(path, keys=["x"]).to_dict().keys() == {"x"}
        part = load(path, keys=["name", ("n", "m")])
        part._check()
        assert list(part) == ["name", "n"] and list(part["n"]) == ["m"] and part.decode("name") == ["Ada", "Bo"]
        assert load(path, keys=[("n", "e")]).to_dict() == {"n": {"e": {}}} and load(path, keys=[]) == {}
        for keys in (["nope"], [("n", "nope")], [("x", "y")]):
            with pytest.raises(KeyError):
                load(path, keys=keys)  # type: ignore[arg-type]
        for keys in ([()], [["x"]], 5, [5]):
            with pytest.raises(TypeError, match=r"^keys= is a list of keys and paths"):
                load(path, keys=keys)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"^keys= is a list of keys and paths, got 'x'; write \['x'\]$"):
            load(path, keys="x")
        with pytest.raises(TypeError, match=r"^an encoder is "):
            load(path, encoders={"x": Utf8})

    def test_classes_choose(self, tmp_path: Path) -> None:
        d = Batch({"s": ["b"], "t": "x", "n": {"s": "a"}}, encoders={"t": Utf8(3)}, dtype=torch.float16)
        path = saved(d, tmp_path / "d")
        plain = load(path)
        assert (
            type(plain) is DeviceDict
            and type(plain["n"]) is DeviceDict
            and plain._policy == d._policy
            and plain.decode("s") == ["b"]
        )
        own = Batch.load(path)
        assert (
            type(own) is Batch
            and type(own["n"]) is Batch
            and own._policy.on_mismatch == "move"
            and own._policy.dtype is None
        )
        assert own.decode("t") == "x" and own.encoders["t"] == Utf8(3)

    def test_typed(self, tmp_path: Path) -> None:
        path = saved(Typed.from_dict({"x": [1.0], "obs": {"state": [2.0]}}), tmp_path / "d")
        again = Typed.load(path)
        assert (
            type(again.obs) is Obs
            and again.obs.state == 2
            and again.w is None
            and type(load(path)["obs"]) is DeviceDict
        )
        with pytest.raises(TypeError, match=r"^Typed lacks the required field 'obs'"):
            Typed.load(path, keys=["x"])
        with pytest.raises(TypeError, match=r"^Obs has no field 'obs'\. Its fields are state$"):
            Obs.load(path)

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
        for again in (load(saved(d, tmp_path / "d")), TestTorchSave().again(d)):
            assert again == {"a": torch.tensor(1), "b": torch.tensor(2)} and set(map(type, again)) == {str}

    def test_foreign_dtypes_and_many_dimensions(self, tmp_path: Path) -> None:
        four = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        save_file({"x": four, "y": torch.ones(2)}, tmp_path / "four")
        assert (
            load(tmp_path / "four")["x"].dtype == torch.float4_e2m1fn_x2
            and load(tmp_path / "four", keys=["y"])["y"].sum() == 2
        )
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
                with pytest.raises(OSError, match=f"^{str(path)!r} is no regular file, and only those can be loaded$"):
                    load(path, keys=keys)
        with pytest.raises(IsADirectoryError, match=str(tmp_path)):
            load(tmp_path, keys=keys)

    def test_a_pipe_that_takes_the_name_is_not_waited_for(self, tmp_path: Path, monkeypatch: Any) -> None:
        os.mkfifo(tmp_path / "fifo")
        regular = os.stat(__file__)
        monkeypatch.setattr(os, "stat", lambda *_, **__: regular)
        with pytest.raises(OSError, match="is no regular file"):
            load(tmp_path / "fifo")


class TestAlignment:
    """Kernels crash on complex128 that does not lie on a multiple of 16, and may on any other."""

    def test_files_of_writers_that_align_less(self, tmp_path: Path) -> None:
        d = DeviceDict({
            "a": torch.ones(3, dtype=torch.float64), "c": torch.arange(5).to(torch.complex128), "e": torch.zeros(0, 2, dtype=torch.complex128),
            "s": torch.tensor(2j, dtype=torch.complex128), "x": torch.ones(2),
        })  # fmt: skip
        path = saved(d, tmp_path / "d")
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata()
        save_file({name: tensor.clone() for name, tensor in load_file(path).items()}, tmp_path / "again", metadata)
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        for more in range(17):
            header = content[8 : 8 + size] + b" " * more
            (tmp_path / "d").write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
            for name in ("d", "again"):
                again = load(tmp_path / name)
                assert all(tensor.data_ptr() % tensor.itemsize == 0 for tensor in again.values())
                assert again.clone() == again.pack() == d and (again["c"] + 1).sum() == 15

    def test_a_packed_block_that_lies_anywhere(self) -> None:
        rebuild, (plan, classes, leaves, device, block, specs) = (
            DeviceDict({"c": torch.ones(3, dtype=torch.complex128), "x": torch.ones(2)}).pack().__reduce_ex__(2)
        )
        memory = torch.zeros(block.numel() + 24, dtype=torch.uint8).untyped_storage()
        at = 8 if memory.data_ptr() % 16 == 0 else 16
        moved = (
            torch.empty(0, dtype=torch.uint8).set_(memory[at : at + block.numel()], 0, block.shape, (1,)).copy_(block)
        )
        again = rebuild(plan, classes, leaves, device, moved, specs)
        assert moved.data_ptr() % 16 and again["c"].data_ptr() % 16 == 0
        assert again.is_packed and again.clone() == {"c": torch.ones(3, dtype=torch.complex128), "x": torch.ones(2)}


class Optioned(DeviceDict, on_mismatch="move", encoders={"k": Utf8()}):
    pass


def shared_policy(n: int, default: int | None = None) -> dict[str, Any]:
    """``n`` dicts that share a policy with ``n`` encoders."""
    policy = {**plan()["policies"][0], "encoders": {f"k{i}": 0 for i in range(n)}, "default": default}
    items = [["x", 0], *([f"{i}", {"policy": 0, "items": [["y", {"policy": 0, "items": []}]]}] for i in range(n))]
    hashing = {"name": "hashing", "buckets": 8, "seed": 0}
    return plan(root={"policy": 0, "items": items}, policies=[policy], encoders=[hashing])


def deep_and_wide(n: int) -> dict[str, Any]:
    """``n`` dicts at the end of a long path of long keys."""
    node: Any = {"policy": 0, "items": [["x", 0], *([f"{i}", {"policy": 0, "items": []}] for i in range(n))]}
    for _ in range(DEPTH - 2):
        node = {"policy": 0, "items": [["k" * 1000, node]]}
    return plan(root=node)


class TestLinear:
    """A file of twice the size takes twice the memory and twice the calls."""

    @pytest.mark.parametrize("cls", [DeviceDict, Optioned])
    @pytest.mark.parametrize(
        "make", [shared_policy, lambda n: shared_policy(n, 0), deep_and_wide], ids=["shared", "default", "deep"]
    )
    def test_files(self, tmp_path: Path, cls: Any, make: Any) -> None:
        small, large = (self.cost(cls, forged(tmp_path / str(n), make(n))) for n in (500, 2000))
        assert all(after < 6 * before for before, after in zip(small, large, strict=True)), (small, large)

    def cost(self, cls: Any, path: Path) -> tuple[float, float]:
        """The least time of three, in seconds of this process, and the peak of memory, in bytes."""
        cls.load(path)
        took: list[float] = []
        for _ in range(3):
            start = time.process_time()
            cls.load(path)
            took.append(time.process_time() - start)
        tracemalloc.start()
        try:
            cls.load(path)
            return min(took) + 0.02, tracemalloc.get_traced_memory()[1] + 100_000
        finally:
            tracemalloc.stop()

    def test_a_default_encoder_is_carried_to_the_keys_that_are_there(self, tmp_path: Path) -> None:
        again = Optioned.load(forged(tmp_path / "d", shared_policy(2, 0)))
        expected = {"k": Utf8(), "k0": Hashing(8), "k1": Hashing(8), "x": Hashing(8), "0": Hashing(8), "1": Hashing(8)}
        assert again.encoders == expected and again["0"].encoders["y"] == Hashing(8) and "x" not in again["0"].encoders
        assert pickle.loads(pickle.dumps(again))._policy == again._policy == again.clone()._policy

    def test_many_dimensions_are_refused(self, tmp_path: Path) -> None:
        header = json.dumps({"x": {"dtype": "F32", "shape": [1] * 65, "data_offsets": [0, 4]}}).encode()
        (tmp_path / "d").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
        with pytest.raises(InvalidFileError, match="'x' has 65 dimensions"):
            load(tmp_path / "d")


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
        assert (
            d["x"].untyped_storage().nbytes() == 8 and len(pickle.dumps(load(path, keys=["x"]).requires_grad_())) < 3000
        )
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


class TestWriting:
    def test_it_replaces_a_file_and_keeps_its_mode_and_links(self, tmp_path: Path) -> None:
        target = tmp_path / "real"
        saved({"x": 1}, target)
        umask = os.umask(0)
        os.umask(umask)
        assert stat.S_IMODE(target.stat().st_mode) == 0o666 & ~umask
        target.chmod(0o640)
        link = tmp_path / "link"
        link.symlink_to(target)
        saved({"x": 2}, link)
        assert link.is_symlink() and load(target)["x"] == 2 and stat.S_IMODE(target.stat().st_mode) == 0o640
        assert sorted(os.listdir(tmp_path)) == ["link", "real"]

    @pytest.mark.parametrize("nameless", [True, False])
    def test_a_failure_leaves_the_old_file_and_nothing_else(
        self, tmp_path: Path, nameless: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not nameless:
            monkeypatch.delattr(os, "O_TMPFILE", raising=False)
        path = saved({"x": 1}, tmp_path / "d")
        saved({"x": 2}, path)
        assert load(path)["x"] == 2

        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        for name in ("fsync", "replace"):
            with monkeypatch.context() as patch:
                patch.setattr(os, name, fail)
                with pytest.raises(OSError, match="No space left"):
                    save({"x": 3}, path)
            assert os.listdir(tmp_path) == ["d"] and load(path)["x"] == 2
        with pytest.raises(FileNotFoundError):
            save({"x": 1}, tmp_path / "nowhere" / "d")
        with pytest.raises(OSError, match="is there and is no regular file, so it cannot be replaced"):
            save({"x": 1}, tmp_path)
        os.mkfifo(tmp_path / "fifo")
        with pytest.raises(OSError, match="is no regular file"):
            save({"x": 1}, tmp_path / "fifo")
        assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)

    @pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="killed elsewhere, a process leaves a temporary file")
    def test_a_full_disk_and_a_kill(self, tmp_path: Path) -> None:
        path = saved({"x": 1}, tmp_path / "d")
        program = (
            "import resource, sys, torch\nfrom tensordict_lite import save\n"
            "if sys.argv[2] == 'full': resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)); import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "class Slow(dict):\n    pass\n"
            "from tensordict_lite._files import safetensors\nreal = safetensors._bytes_of\n"
            "def slow(tensor):\n    if sys.argv[2] == 'kill': print('half', flush=True); import time; time.sleep(60)\n    return real(tensor)\n"
            "safetensors._bytes_of = slow\n"
            "save({'a': torch.ones(1 << 20), 'b': torch.ones(1 << 20)}, sys.argv[1])\n"
        )
        full = subprocess.run(
            [sys.executable, "-c", program, str(path), "full"], capture_output=True, text=True, check=False
        )
        assert full.returncode and "OSError" in full.stderr, full.stderr
        with subprocess.Popen(
            [sys.executable, "-c", program, str(path), "kill"], stdout=subprocess.PIPE, text=True
        ) as killed:
            assert killed.stdout is not None and killed.stdout.readline() == "half\n"
            killed.send_signal(signal.SIGKILL)
        assert os.listdir(tmp_path) == ["d"] and load(path)["x"] == 1

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the result of open() may be lost
    @pytest.mark.parametrize("nameless", [True, False])
    def test_interrupts_come_out_and_leave_nothing(
        self, tmp_path: Path, nameless: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not nameless:
            monkeypatch.delattr(os, "O_TMPFILE", raising=False)
        rng, interrupted = random.Random(0), 0
        path = saved({"x": torch.ones(20_000)}, tmp_path / "d")
        start = time.monotonic()
        saved({"x": torch.ones(20_000)}, path)
        took = time.monotonic() - start
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            for i in range(50):
                new = tmp_path / "new"
                new.unlink(missing_ok=True)
                try:
                    signal.setitimer(signal.ITIMER_REAL, took * rng.random() + 1e-6)
                    save({"x": torch.ones(20_000)}, new if i % 2 else path)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    interrupted += 1
                assert set(os.listdir(tmp_path)) <= {"d", "new"} and load(path)["x"].all()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert interrupted

    @pytest.mark.parametrize("step", ["fsync", "link", "replace", "open"])
    @pytest.mark.parametrize("nameless", [True, False])
    def test_an_interrupt_right_after_each_step(
        self, tmp_path: Path, nameless: bool, step: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As the interpreter has it: what was called is done, and its result is lost."""
        if not nameless:
            monkeypatch.delattr(os, "O_TMPFILE", raising=False)
        path = saved({"x": 1}, tmp_path / "d")
        real = getattr(os, step)

        def interrupted(*args: Any, **options: Any) -> None:
            out = real(*args, **options)
            if step == "open":
                os.close(out)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(os, step, interrupted)
            with pytest.raises(KeyboardInterrupt) if nameless or step != "link" else contextlib.nullcontext():
                save({"x": 2}, path)
        assert os.listdir(tmp_path) == ["d"] and load(path)["x"] in (1, 2)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    @pytest.mark.parametrize("nameless", [True, False])
    def test_what_a_kill_leaves_is_swept(self, tmp_path: Path, nameless: bool) -> None:
        program = (
            "import os, random, signal, sys, time, torch\nfrom tensordict_lite import load, save\n"
            "torch.set_num_threads(1)\nfolder, nameless = sys.argv[1], sys.argv[2] == 'True'\n"
            "if not nameless and hasattr(os, 'O_TMPFILE'): del os.O_TMPFILE\n"
            "path, new, data = folder + '/d', folder + '/new', {'x': torch.ones(20_000)}\n"
            "save(data, path)\nstart = time.monotonic(); save(data, path); took, rng = time.monotonic() - start, random.Random(0)\n"
            "for i in range(50):\n"
            "    writer = os.fork()\n"
            "    while not writer:\n"
            "        save(data, new if i % 2 else path)\n"
            "    time.sleep(took * 5 * rng.random()); os.kill(writer, signal.SIGKILL); os.waitpid(writer, 0)\n"
            "    sweeper = os.fork()\n"
            "    if not sweeper:\n"
            "        save(data, path); os._exit(0)\n"
            "    assert os.waitpid(sweeper, 0)[1] == 0\n"
            "    assert set(os.listdir(folder)) <= {'d', 'new'}, os.listdir(folder)\n"
            "    assert all(load(os.path.join(folder, name))['x'].all() for name in os.listdir(folder))\n"
        )
        # A process sweeps a folder once: the writers by their first save, as the sweepers do.
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path), str(nameless)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    @pytest.mark.skipif(sys.platform == "win32", reason="there are no locks of this kind")
    def test_a_living_writers_file_and_strange_ones_stay(self, tmp_path: Path) -> None:
        program = (
            "import os, sys, torch\nfrom tensordict_lite import save\nfrom tensordict_lite._files.atomic_write import atomic_write\n"
            "if hasattr(os, 'O_TMPFILE'): del os.O_TMPFILE\n"
            "def pieces():\n    yield b'x'\n    print('half', flush=True)\n    sys.stdin.readline()\n"
            "atomic_write(sys.argv[1], pieces())\n"
        )
        command = [sys.executable, "-c", program, str(tmp_path / "slow")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == "half\n"
            (name,) = os.listdir(tmp_path)
            (tmp_path / ".other.tmp").touch()
            dead = tmp_path / f"{name[:-20]}{'0' * 16}.tmp"
            dead.touch()
            save({"x": 1}, tmp_path / "d")
            assert sorted(os.listdir(tmp_path)) == sorted([name, ".other.tmp", "d"])
            writer.communicate("go\n", timeout=60)
        assert writer.returncode == 0 and sorted(os.listdir(tmp_path)) == [".other.tmp", "d", "slow"]

    @pytest.mark.parametrize(("data", "error", "message"), [
        ({"o": object, "n": {"p": {1}}, "x": 1}, TypeError, "'o', 'n.p': kept objects cannot be saved, only tensors; d.drop('o', ('n', 'p')).save(path)"),
        ({"n": {"m": torch.ones(1, device="meta")}}, TypeError, "'n.m' is on meta, without values, and files hold dense tensors; convert it first, or drop it"),
        ({"m": torch.eye(2).to_sparse()}, TypeError, "'m' is sparse, nested or quantized, and files hold dense tensors"),
        ({"n": {"f": torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}}, TypeError, "'n.f' is torch.float4_e2m1fn_x2, which files do not hold; save .view(torch.uint8) of it"),
        ({"f": torch.zeros(4, dtype=torch.uint8).view(torch.uint7)}, TypeError, "'f' is torch.uint7, which files do not hold"),
    ])  # fmt: skip
    def test_what_cannot_be_saved(self, tmp_path: Path, data: Any, error: type[Exception], message: str) -> None:
        d = DeviceDict(data, objects="keep")
        with pytest.raises(error) as caught:
            d.save(tmp_path / "d")
        assert str(caught.value).startswith(message) and not os.listdir(tmp_path)

    def test_encoders_without_a_form_and_deep_dicts(self, tmp_path: Path) -> None:
        d = DeviceDict({"n": {"s": "a"}}, encoders={"s": lambda strings: torch.zeros(len(strings))})
        with pytest.raises(
            TypeError,
            match=r"^'n\.s': .* has no JSON form; register its class with register_encoder; or save\(d.to_dict\(\), path\), the tensors alone$",
        ):
            d.save(tmp_path / "d")
        assert load(saved(d.to_dict(), tmp_path / "d")) == d.to_dict()
        deep: Any = {"x": 1}
        for _ in range(DEPTH):
            deep = {"n": deep}
        with pytest.raises(ValueError, match=rf"^'n.n.n.….n' is nested more than {DEPTH} levels deep"):
            save(deep, tmp_path / "d")
        assert load(saved(deep["n"], tmp_path / "d")) == DeviceDict(deep["n"])
        with pytest.raises(ValueError, match="the structure and encoders of this dict take"):
            save(DeviceDict({"s": "a"}, encoders={"s": Vocabulary(["a", "b" * (17 << 20)])}), tmp_path / "large")
        assert os.listdir(tmp_path) == ["d"]

    @pytest.mark.parametrize("library", [None, ModuleType("safetensors")], ids=["missing", "old"])
    def test_without_the_library(self, library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "safetensors", library)
        for use in (lambda: save({"x": 1}, tmp_path / "d"), lambda: load(tmp_path / "d")):
            with pytest.raises(ImportError, match=r'^files need safetensors: pip install "safetensors>=0.8"$'):
                use()


def forged(path: Path, plan: Any, tensors: dict[str, Tensor] | None = None) -> Path:
    """A file with this plan, a string as it is, beside these tensors."""
    metadata = {"tensordict_lite": plan if isinstance(plan, str) else json.dumps(plan)}
    save_file({"x": torch.ones(2)} if tensors is None else tensors, path, metadata=metadata)
    return path


def plan(**changes: Any) -> dict[str, Any]:
    policy = {"encoders": {}, "default": None, "on_mismatch": "error", "objects": "error", "dtype": None}
    return {
        "version": 1,
        "root": {"policy": 0, "items": [["x", 0]]},
        "policies": [policy],
        "encoders": [],
        "tensors": ["x"],
        **changes,
    }


def with_policy(**changes: Any) -> dict[str, Any]:
    made = plan()
    made["policies"][0].update(changes)
    return made


def nested(depth: int) -> dict[str, Any]:
    node: dict[str, Any] = {"policy": 0, "items": [["x", 0]]}
    for _ in range(depth):
        node = {"policy": 0, "items": [["n", node]]}
    return plan(root=node)


class TestForgery:
    def test_the_base_is_right(self, tmp_path: Path) -> None:
        assert load(forged(tmp_path / "d", plan())) == {"x": torch.ones(2)}
        assert load(forged(tmp_path / "d", nested(DEPTH - 1)))["n", "n"]

    @pytest.mark.parametrize(("wrong", "message"), [
        ("", "Expecting value"), ("[" * 100_000, "not a valid file"), ("[" * 600_000, "its manifest takes 600000 characters"), ("null", "it does not list its tensors"), (" " * (17 << 20), "its manifest takes"),
        ('{"version": 1e999}', "it does not list its tensors"), ("[]", "it does not list its tensors"), (plan(version=2), "its version is 2, and this package reads version 1; update the package"),
        (plan(version="1"), "it has no version"), (plan(version=True), "it has no version"), (plan(extra=1), "a manifest has the fields version, root, policies, encoders, and this has not"),
        (plan(root=[]), "'root' of a manifest is no dict"), (plan(root={}), "a dict has the fields policy, items"), (plan(policies={}), "'policies' of a manifest is no list"),
        (plan(root={"policy": 0, "items": [["x"]]}), "an item of a dict is a key and a value"), (plan(root={"policy": 0, "items": [[1, 0]]}), "an item of a dict is a key and a value"),
        (plan(root={"policy": 0, "items": [["x", "y"]]}), "'x' is neither a tensor nor a dict"), (plan(root={"policy": 0, "items": [["x", 0.0]]}), "'x' is neither"), (plan(root={"policy": 0, "items": [["x", True]]}), "'x' is neither"),
        (plan(root={"policy": 0, "items": [["x", 1]]}), "its tree does not have each of the 1 tensors once"), (plan(root={"policy": 0, "items": [["x", 0], ["y", 0]]}), "its tree does not have each"),
        (plan(root={"policy": 0, "items": []}), "its tree does not have each of the 1 tensors once"), (plan(root={"policy": 0, "items": [["x", 0], ["x", {"policy": 0, "items": []}]]}), "a dict has a key twice"),
        (plan(root={"policy": 1, "items": [["x", 0]]}), "it has no policy 1"), (plan(root={"policy": -1, "items": [["x", 0]]}), "it has no policy -1"), (nested(DEPTH), f"it is nested {DEPTH} levels deep or more"),
        (nested(300), f"it is nested {DEPTH} levels deep or more"), (plan(tensors=["y"]), "its tree and its tensors have different names"), (plan(tensors=["x", "x"]), "its tree and its tensors have different names"),
        (plan(tensors=[["x", "float32"]]), "its list of tensors is damaged"), (plan(tensors=[["x"]]), "its list of tensors is damaged"), (plan(tensors=[["x", []]]), "its list of tensors is damaged"),
        (plan(tensors=[["x", "complex128"]]), "complex128 is stored as pairs of torch.float64, got torch.float32 of shape [2]"), (plan(tensors=[[{}, None]]), "its tree and its tensors have different names"),
        (with_policy(on_mismatch="explode"), "on_mismatch is 'error' or 'move', got 'explode'"), (with_policy(objects=3), "'objects' of a policy is no str"), (with_policy(dtype="int64"), "'int64' is no dtype of host values"),
        (with_policy(dtype=[]), "a list is no dtype of host values"), (with_policy(encoders={"x": 0}), "it has no encoder 0"), (with_policy(default="x"), "it has no encoder 'x'"), (with_policy(encoders=[]), "'encoders' of a policy is no dict"),
        ({**with_policy(encoders={"x": 0}), "encoders": [{"name": "os.system"}]}, "the encoder of 'x': no encoder is registered as 'os.system'; known are"),
        ({**with_policy(encoders={"x": 0}), "encoders": [{"name": ["utf8"]}]}, "the encoder of 'x': no encoder is registered as ['utf8']"), ({**with_policy(encoders={"x": 0}), "encoders": ["utf8"]}, "encoder"),
        ({**with_policy(encoders={"x": 0}), "encoders": [{"name": "utf8", "max_length": "x"}]}, "the encoder of 'x':"), ({**with_policy(encoders={"x": 0}), "encoders": [{"name": "vocabulary", "tokens": 3, "unknown": None}]}, "the encoder of 'x':"),
        ({**with_policy(encoders={"x": 0}), "encoders": [{"name": "tokenizer", "files": {}, "call": {}}]}, "'x' was encoded with a tokenizer, which is not made from a file, since that would run what the file says; give it: load(..., encoders={'x': ...})"),
    ])  # fmt: skip
    def test_every_part_is_checked(self, tmp_path: Path, wrong: Any, message: str) -> None:
        with pytest.raises(InvalidFileError) as caught:
            load(forged(tmp_path / "d", wrong))
        assert str(caught.value).startswith(f"{tmp_path / 'd'}: not a valid file: ") and message in str(caught.value)
        assert issubclass(InvalidFileError, ValueError)

    def test_a_file_of_torch_save_is_told(self, tmp_path: Path) -> None:
        torch.save({"x": torch.ones(1)}, tmp_path / "d")
        with pytest.raises(InvalidFileError, match=r"d \(a file of torch\.save: torch\.load reads it\): not a"):
            load(tmp_path / "d")

    def test_a_folder_that_is_missing_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"No such file or directory: '.*/no/'$"):
            save({"x": 1}, tmp_path / "no" / "d")
        (tmp_path / "file").touch()
        with pytest.raises(NotADirectoryError, match=r"'.*/file/'$"):
            save({"x": 1}, tmp_path / "file" / "d")

    def test_an_encoder_that_the_caller_gives_is_not_looked_at(self, tmp_path: Path) -> None:
        bad = {**with_policy(encoders={"x": 0}, default=0), "encoders": [{"name": "tokenizer"}]}
        path = forged(tmp_path / "d", bad)
        assert load(path, encoders=Utf8())._policy.default_encoder == Utf8()
        with pytest.raises(InvalidFileError, match=r"'\*' was encoded with a tokenizer"):
            load(path, encoders={"x": Utf8()})
        only = forged(tmp_path / "only", {**with_policy(encoders={"x": 0}), "encoders": [{"name": "tokenizer"}]})
        assert load(only, encoders={"x": Utf8(7)}).encoders["x"] == Utf8(7)

    @pytest.mark.parametrize("content", [b"", b"\0", b"\xff" * 8, (1 << 62).to_bytes(8, "little"), (200 << 20).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"{}x", pickle.dumps({"x": 1}),
        (80).to_bytes(8, "little") + b'{"x":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,4]}}'.ljust(80) + b"\0" * 4,
        (80).to_bytes(8, "little") + b'{"x":{"dtype":"F32","shape":[0,9223372036854775807],"data_offsets":[0,0]}}'.ljust(80),
        (80).to_bytes(8, "little") + b'{"x":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}'.ljust(80) + b"\0" * 2,
    ])  # fmt: skip
    def test_what_is_no_safetensors_file(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "d"
        path.write_bytes(content)
        with contextlib.suppress(InvalidFileError):
            for value in load(path).values():
                assert value.numel() <= 4
        for missing in (tmp_path / "nope",):
            with pytest.raises(FileNotFoundError):
                load(missing)

    def test_mutated_files(self, tmp_path: Path) -> None:
        """Bits, cuts, repeats and numbers in 2,400 files: each is read, or is one error, soon and without much memory."""
        resource = pytest.importorskip("resource")
        rng = random.Random(0)
        originals = [(GOLDEN / name).read_bytes() for name in make.MAKE] + [
            forged(tmp_path / "d", nested(5)).read_bytes()
        ]
        path = tmp_path / "mutated"
        peak, start, read, refused = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic(), 0, 0
        for _ in range(2400):
            content = bytearray(rng.choice(originals))
            head = 8 + int.from_bytes(content[:8], "little")
            for _ in range(rng.choice((1, 1, 2, 5))):
                at = rng.randrange(head) if rng.random() < 0.9 else rng.randrange(len(content))
                kind = rng.randrange(6)
                if kind == 0:
                    content[at] ^= 1 << rng.randrange(8)
                elif kind == 1:
                    del content[at:]
                elif kind == 2:
                    content[at:at] = content[at : at + rng.randrange(40)]
                elif kind == 3:
                    content[at : at + 1] = rng.choice(
                        (b"9", b"[", b"]", b"{", b"}", b'"', b"-", b"null", b"\0", b"99999999999999999999")
                    )
                elif kind == 4:
                    del content[at : at + rng.randrange(9)]
                else:
                    content[:8] = rng.choice((0, 1, head, 1 << 40, (1 << 64) - 1, len(content))).to_bytes(8, "little")
                if not content:
                    content = bytearray(b"\0")
                head = min(head, len(content))
            if rng.random() < 0.7:  # a header of the right length, so that what is in it is looked at
                body = bytes(content[8:head])
                content[:8] = len(body).to_bytes(8, "little")
            path.write_bytes(content)
            try:
                d = load(path)
                d._check()
                repr(d)
                read += 1
            except InvalidFileError:
                refused += 1
        assert read + refused == 2400 and read > 100 and refused > 1000 and time.monotonic() - start < 120
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024 < 200 << 20

    @pytest.mark.parametrize("name", make.MAKE)
    def test_golden_files(self, name: str, tmp_path: Path) -> None:
        d, made = load(GOLDEN / name), make.MAKE[name]()
        d._check()
        assert (
            d == made
            and all(d[key]._policy == made[key]._policy for key in made if isinstance(made[key], DeviceDict))
            and d._policy == made._policy
        )
        assert saved(made, tmp_path / name).read_bytes() == (GOLDEN / name).read_bytes(), (
            "what is written has changed: that is another version of the format"
        )


class TestTorchSave:
    def again(self, d: Any, **options: Any) -> Any:
        file = io.BytesIO()
        torch.save(d, file)
        file.seek(0)
        return torch.load(file, **{"weights_only": True, **options})

    @pytest.mark.parametrize("pack", [True, False])
    @pytest.mark.parametrize("location", [None, "cpu", "meta"])
    def test_without_any_setup(self, pack: bool, location: str | None) -> None:
        batch = Batch(
            {"s": ["a", "b"], "x": torch.ones(2), "n": {"e": {}, "h": torch.arange(2)}},
            encoders={"t": Hashing(4)},
            dtype=torch.float16,
        )
        for d in (
            sample(),
            batch,
            Typed.from_dict({"x": 1, "obs": {"state": [2.0]}}),
            DeviceDict(),
            DeviceDict({"b": batch, "t": Obs(state=torch.ones(1))}),
        ):
            for weights_only in (True, False):
                again = self.again(d.pack() if pack else d, map_location=location, weights_only=weights_only)
                again._check()
                assert (
                    type(again) is type(d)
                    and again._policy == d._policy
                    and (again == d or location == "meta" or not d)
                )
                assert again.is_packed == d.pack().is_packed or not pack or location == "meta"
                assert [type(v) for v in again.values()] == [type(v) for v in d.values()]

    def test_parts_and_ties(self) -> None:
        base = torch.arange(1000.0)
        d = DeviceDict({"a": base[:2], "b": base[5:7]})
        file = io.BytesIO()
        torch.save(d, file)
        assert len(file.getvalue()) < 4000 and self.again(d) == d
        tied = DeviceDict({"a": base, "b": base})
        again = self.again(tied)
        assert again["a"] is again["b"]

    def test_classes_with_ways_of_their_own(self) -> None:
        assert "mark" in self.again(Own({"x": 1}), weights_only=False)
        assert type(self.again(Moved({"x": 1}))) is Moved
        deep = DeviceDict({"x": 1})
        for _ in range(DEPTH - 1):
            deep = DeviceDict({"n": deep})
        assert self.again(deep) == self.again(deep, weights_only=False) == deep

    def test_what_is_shared_in_a_plan_is_no_bomb(self) -> None:
        start = time.monotonic()
        node: Any = {"policy": 0, "items": []}
        value: Any = []
        for _ in range(60):
            node, value = {"policy": 0, "items": [["a", node], ["b", node]]}, [value, value]
        _, (made, classes, leaves, device, block, specs) = (
            DeviceDict({"x": torch.ones(2), "y": torch.ones(2)}).pack().__reduce_ex__(2)
        )
        policy = {**made["policies"][0], "default": 0} if made["policies"] else None
        for bomb in (
            {**made, "root": node},
            {**made, "encoders": [{"name": "vocabulary", "tokens": [value], "unknown": None}]},
            {**made, "policies": [{"encoders": {}, "default": value}]},
            {**made, "encoders": value, "policies": [policy]},
        ):
            with pytest.raises(InvalidFileError, match="a part of it is in two places"):
                rebuild_of(bomb, classes, leaves, device, block, specs)
        for spec in ((torch.float32, (2**62,) * 60_000, (1,) * 60_000, [0]), ([], (1,), (1,), [0])):
            with pytest.raises(ValueError, match="a packed dict whose layout is damaged"):
                rebuild_of(made, classes, leaves, device, block, [spec])
        assert time.monotonic() - start < 5

    def test_what_is_not_data_takes_trust(self) -> None:
        kept = DeviceDict({"o": {1, 2}, "p": Path("x"), "x": 1}, objects="keep")
        again = self.again(kept, weights_only=False)
        assert again["o"] == {1, 2} and again["p"] == Path("x")
        with pytest.raises(pickle.UnpicklingError):
            self.again(kept)
        hooked = DeviceDict({"s": "a"}, encoders={"s": len_of})
        assert self.again(hooked, weights_only=False)._policy.encoders["s"].encode(["ab"]) == 2
        with pytest.raises(pickle.UnpicklingError):
            self.again(hooked)

    def test_classes_are_found_not_imported(self) -> None:
        file = io.BytesIO()
        torch.save(Batch({"x": 1}), file)
        assert file.getvalue().count(b"test_disk.Batch") == 1
        content = file.getvalue().replace(b"test_disk.Batch", b"nowhere__.Batch")
        for weights_only in (True, False):
            with pytest.raises(
                ValueError,
                match=r"the class 'nowhere__\.Batch' of a saved dict is not defined here; import its module first",
            ):
                torch.load(io.BytesIO(content), weights_only=weights_only)

    def test_it_checks_what_it_is_given(self) -> None:
        rebuild, (made, classes, leaves, device, block, specs) = sample().pack().__reduce_ex__(2)
        assert rebuild(made, classes, leaves, device, block, specs) == sample()
        wrong: list[tuple[Any, ...]] = [
            (None, classes, leaves, device, block, specs), (made, classes[1:], leaves, device, block, specs), (made, ["os.system"] * 4, leaves, device, block, specs),
            (made, classes, leaves[1:], device, block, specs), (made, classes, tuple(leaves), device, block, specs), (made, classes, leaves, 3, block, specs),
            (made, classes, leaves, "nowhere", block, specs), (made, classes, leaves, device, None, specs), (made, classes, leaves, device, block[1:].clone(), specs),
            (made, classes, leaves, device, block, specs[1:]), (made, classes, leaves, device, block, None), (made, classes, [*leaves[:-1], "x"], device, block, specs),
            (made, classes, [*leaves[:-1], 99], device, block, specs), (made, classes, [*leaves[:-1], ({"q": 1},)], device, block, specs), (made, classes, leaves, "cuda:999", block, specs),
            (made, ["tensordict_lite._tree.tree.TreeDict", *classes[1:]], leaves, device, block, specs), ({**made, "policies": [{"encoders": {"x": 0}, "default": None, "on_mismatch": "error", "objects": "error", "dtype": None}], "encoders": [torch.ones], "root": {**made["root"], "policy": 0}}, classes, leaves, device, block, specs), ({**made, "version": 9}, classes, leaves, device, block, specs), (made, None, leaves, device, block, specs),
        ]  # fmt: skip
        for arguments in wrong:
            with pytest.raises(ValueError):  # noqa: PT011
                rebuild(*arguments)
        rebuild, arguments = Typed.from_dict({"x": 1, "obs": {"state": [2.0]}}).__reduce_ex__(2)
        arguments[0]["root"]["items"][0][0] = "y"
        with pytest.raises(TypeError, match=r"^Typed has no field 'y'"):
            rebuild(*arguments)

    def test_objects_are_kept_where_the_policy_keeps_them(self) -> None:
        kept = Keeping({"o": [1, "x"], "x": 1})
        assert self.again(kept)["o"] == [1, "x"]
        rebuild, (made, classes, leaves, device, block, specs) = kept.__reduce_ex__(2)
        name = f"{__name__}.Keeping"
        assert classes == [name]
        with pytest.raises(InvalidFileError, match=r"^not a valid file: 'o' is an object, in a dict that keeps none$"):
            rebuild(made, ["tensordict_lite.DeviceDict"], leaves, device, block, specs)
        deep: Any = []
        for _ in range(100_000):
            deep = [deep]
        for inside in ([torch.ones(1, device="meta")], {"a": 1}, torch.ones(1), ([{"q": torch.ones(1)}],), deep):
            with pytest.raises(InvalidFileError, match="not a valid file: "):
                rebuild(made, classes, [(inside,), *leaves[1:]], device, block, specs)

    def test_what_pytree_puts_in_is_saved_with_trust(self) -> None:
        shapes = torch.utils._pytree.tree_map(lambda tensor: tuple(tensor.shape), DeviceDict({"x": torch.ones(2, 3)}))
        assert self.again(shapes, weights_only=False) == {"x": (2, 3)}
        with pytest.raises(pickle.UnpicklingError):
            self.again(shapes)


def rebuild_of(*arguments: Any) -> Any:
    return DeviceDict().__reduce_ex__(2)[0](*arguments)


def len_of(strings: Any) -> Tensor:
    return torch.tensor([len(s) for s in strings])


def test_a_registered_encoder_of_the_user(tmp_path: Path) -> None:
    @register_encoder
    class Length:
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
    assert load(saved(d, tmp_path / "d")).decode("s") == ["?", "??"] and TestTorchSave().again(d).decode("s") == [
        "?",
        "??",
    ]
