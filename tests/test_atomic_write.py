"""`save` replaces a file or leaves it: after an error or an interrupt nothing else stays, after a kill one file."""

from __future__ import annotations

import errno
import os
import random
import signal
import stat
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from checks import NOT_TRACED, fails
from files import DEPTH, saved

from tensordict_lite import DeviceDict, Vocabulary, load, save

safetensors = pytest.importorskip("safetensors")


# Not in torch 2.7.
FLOAT4: list[Any] = [
    (
        {"n": {"f": torch.zeros(4, dtype=torch.uint8).view(getattr(torch, name))}},
        TypeError,
        "'n.f': files take no torch.float4_e2m1fn_x2; save .view(torch.uint8) of it",
    )
    for name in ("float4_e2m1fn_x2",)
    if hasattr(torch, name)
]


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

    @pytest.mark.parametrize("name", ["fdatasync", "replace", "chmod"])
    def test_a_failure_leaves_the_old_file_and_nothing_else(
        self, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = saved({"x": 1}, tmp_path / "d")

        def fail(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            fails(OSError, "No space left", lambda: save({"x": 3}, path))
        assert os.listdir(tmp_path) == ["d"] and load(path)["x"] == 1

    def test_a_failed_flush_of_the_folder_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = saved({"x": 1}, tmp_path / "d")
        descriptors = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0

        def fail(number: int, descriptor: int) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", partial(fail, errno.EIO))
        with pytest.raises(OSError) as caught:  # noqa: PT011
            save({"x": 2}, path)
        assert str(caught.value) == (
            "[Errno 5] Input/output error; the new file is in place, "
            "and a crash of the machine may bring back the old file: "
            f"'{path}'"
        )
        assert os.listdir(tmp_path) == ["d"] and load(path)["x"] == 2
        assert not descriptors or len(os.listdir("/proc/self/fd")) == descriptors
        monkeypatch.setattr(os, "fsync", partial(fail, errno.EINVAL))  # a file system that flushes files only
        assert load(saved({"x": 3}, path))["x"] == 3

    def test_what_is_no_regular_file_stays(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            save({"x": 1}, tmp_path / "nowhere" / "d")
        fails(OSError, "exists and is not a regular file, so it cannot be replaced", lambda: save({"x": 1}, tmp_path))
        os.mkfifo(tmp_path / "fifo")
        fails(OSError, "is not a regular file", lambda: save({"x": 1}, tmp_path / "fifo"))
        assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)

    @pytest.mark.slow
    def test_a_full_disk_and_a_kill(self, tmp_path: Path) -> None:
        path = saved({"x": 1}, tmp_path / "d")
        program = (
            "import resource, sys, torch\nfrom tensordict_lite import save\n"
            "import signal, time\nfrom tensordict_lite._files import safetensors\n"
            "d = {'a': torch.ones(1 << 20), 'b': torch.ones(1 << 20)}\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nhard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))\n"
            "try:\n    save(d, sys.argv[1])\nexcept OSError:\n    print('full', flush=True)\nsys.stdin.readline()\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))\n"
            "def slow(tensor):\n    print('half', flush=True)\n    time.sleep(60)\n"
            "safetensors.bytes_of = slow\nsave(d, sys.argv[1])\n"
        )
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen([sys.executable, "-c", program, str(path)], **pipes) as killed:
            assert killed.stdin is not None and killed.stdout is not None and killed.stdout.readline() == "full\n"
            assert os.listdir(tmp_path) == ["d"] and load(path)["x"] == 1
            killed.stdin.write("\n")
            killed.stdin.flush()
            assert killed.stdout.readline() == "half\n"
            killed.send_signal(signal.SIGKILL)
        left = set(os.listdir(tmp_path)) - {"d"}
        assert len(left) == 1 and left.pop().startswith(".tensordict_lite-") and load(path)["x"] == 1

    @NOT_TRACED
    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the result of open() may be lost
    def test_interrupts_come_out_and_leave_nothing(self, tmp_path: Path) -> None:
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
    @pytest.mark.parametrize("step", ["fdatasync", "fsync", "replace", "open", "chmod"])
    def test_an_interrupt_right_after_each_step(
        self, tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As the interpreter has it: what was called is done, and its result is lost."""
        path = saved({"x": 1}, tmp_path / "d")
        real = getattr(os, step)

        def interrupted(*args: Any, **options: Any) -> None:
            out = real(*args, **options)
            if step == "open":
                os.close(out)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(os, step, interrupted)
            with pytest.raises(KeyboardInterrupt):
                save({"x": 2}, path)
        assert os.listdir(tmp_path) == ["d"] and load(path)["x"] in (1, 2)

    @pytest.mark.parametrize(
        ("data", "error", "message"),
        [
            (
                {"o": object, "n": {"p": {1}}, "x": 1},
                TypeError,
                "'o', 'n.p': expected what JSON can hold, got a type, a set; d.drop('o', ('n', 'p')).save(path)",
            ),
            (
                {"n": {"m": torch.ones(1, device="meta")}},
                TypeError,
                "'n.m': files take dense tensors, got one that is on meta, without values; convert or drop it",
            ),
            (
                {"m": torch.eye(2).to_sparse()},
                TypeError,
                "'m': files take dense tensors, got one that is sparse, nested or quantized",
            ),
            *FLOAT4,
            (
                {"f": torch.zeros(4, dtype=torch.uint8).view(getattr(torch, "uint7"))},  # noqa: B009  (not in its stubs)
                TypeError,
                "'f': files take no torch.uint7",
            ),
        ],
    )
    def test_what_cannot_be_saved(self, tmp_path: Path, data: Any, error: type[Exception], message: str) -> None:
        d = DeviceDict(data, objects="keep")
        with pytest.raises(error) as caught:
            d.save(tmp_path / "d")
        assert str(caught.value).startswith(message) and not os.listdir(tmp_path)

    def test_encoders_without_a_form_and_deep_dicts(self, tmp_path: Path) -> None:
        d = DeviceDict({"n": {"s": "a"}}, encoders={"s": lambda strings: torch.zeros(len(strings))})
        with pytest.raises(
            TypeError,
            match=r"^'n\.s': .* has no JSON form; register its class with register_encoder; or save\(d.to_dict\(\), "
            r"path\), the tensors alone$",
        ):
            d.save(tmp_path / "d")
        assert load(saved(d.to_dict(), tmp_path / "d")) == d.to_dict()
        deep: Any = {"x": 1}
        for _ in range(DEPTH):
            deep = {"n": deep}
        fails(ValueError, rf"^'n.n.n.….n' is nested more than {DEPTH} levels deep", lambda: save(deep, tmp_path / "d"))
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


def test_a_system_that_opens_no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows."""
    real = os.open

    def refuse(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if os.path.isdir(path):
            raise PermissionError(13, "Permission denied", path)
        return real(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", refuse)
    save({"x": 1.0}, tmp_path / "d")
    assert os.listdir(tmp_path) == ["d"] and load(tmp_path / "d") == {"x": torch.tensor(1.0)}
