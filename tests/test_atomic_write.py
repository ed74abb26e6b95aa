"""`save` replaces a file or leaves it: after an error, an interrupt or a kill nothing else stays."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from files import saved

from tensordict_lite import (
    DeviceDict,
    Vocabulary,
    load,
    save,
)
from tensordict_lite._errors import DEPTH
from tensordict_lite._files import atomic_write as atomic_write_module

safetensors = pytest.importorskip("safetensors")


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
        with pytest.raises(OSError, match="exists and is not a regular file, so it cannot be replaced"):
            save({"x": 1}, tmp_path)
        os.mkfifo(tmp_path / "fifo")
        with pytest.raises(OSError, match="is not a regular file"):
            save({"x": 1}, tmp_path / "fifo")
        assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)

    @pytest.mark.slow
    @pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="killed elsewhere, a process leaves a temporary file")
    def test_a_full_disk_and_a_kill(self, tmp_path: Path) -> None:
        path = saved({"x": 1}, tmp_path / "d")
        program = (
            "import resource, sys, torch\nfrom tensordict_lite import save\n"
            "if sys.argv[2] == 'full': resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)); import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "class Slow(dict):\n    pass\n"
            "from tensordict_lite._files import safetensors\nreal = safetensors.bytes_of\n"
            "def slow(tensor):\n    if sys.argv[2] == 'kill': print('half', flush=True); import time; time.sleep(60)\n    return real(tensor)\n"
            "safetensors.bytes_of = slow\n"
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

    @pytest.mark.slow
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

    @pytest.mark.slow
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

    @pytest.mark.slow
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

    @pytest.mark.slow
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
        ({"f": torch.zeros(4, dtype=torch.uint8).view(torch.uint7)}, TypeError, "'f' is torch.uint7, which files do not hold"),  # pyright: ignore[reportAttributeAccessIssue]
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


class TestOtherSystems:
    """File systems and systems without unnamed files or locks, simulated."""

    def test_without_a_link_to_an_open_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.path.exists
        monkeypatch.setattr(os.path, "exists", lambda path: "/proc/self/fd" not in str(path) and real(path))
        save({"x": 1.0}, tmp_path / "d")
        monkeypatch.undo()
        assert os.listdir(tmp_path) == ["d"] and load(tmp_path / "d") == {"x": torch.tensor(1.0)}

    @pytest.mark.parametrize("error", [OSError, BlockingIOError])
    def test_without_locks_or_with_the_lock_of_a_sweep(
        self, error: type[OSError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No unnamed files; and the first lock of a file fails."""
        failures, real = [error("no lock")], atomic_write_module.fcntl.flock

        def lock(*arguments: Any) -> None:
            if failures:
                raise failures.pop()
            real(*arguments)

        monkeypatch.setattr(atomic_write_module, "_nameless", lambda folder: None)
        monkeypatch.setattr(atomic_write_module.fcntl, "flock", lock)
        save({"x": 1.0}, tmp_path / "d")
        left = [name for name in os.listdir(tmp_path) if name != "d"]
        # The sweep that has the lock would remove the first file.
        assert load(tmp_path / "d") == {"x": torch.tensor(1.0)} and len(left) == (error is BlockingIOError)

    def test_without_fcntl(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(atomic_write_module, "_nameless", lambda folder: None)
        monkeypatch.setattr(atomic_write_module, "fcntl", None)
        for value in (1.0, 2.0):
            save({"x": value}, tmp_path / "d")
        assert os.listdir(tmp_path) == ["d"] and load(tmp_path / "d") == {"x": torch.tensor(2.0)}

    def test_the_list_of_swept_folders_stays_small(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(atomic_write_module, "_MOST_SWEPT", 2)
        monkeypatch.setattr(atomic_write_module, "_swept", set())
        for name in "abc":
            (tmp_path / name).mkdir()
            save({"x": 1.0}, tmp_path / name / "d")
        assert len(atomic_write_module._swept) == 1
