"""The file format: files of every version are read, and a bad file is an `InvalidFileError` and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import re
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import check_invariants, fails
from files import DEPTH, GOLDEN, saved
from torch import Tensor

from tensordict_lite import DeviceDict, Hashing, InvalidFileError, Tokenizer, Utf8, load, save
from tensordict_lite._files import safetensors as reading
from tensordict_lite._files.safetensors import invalid_file  # pyright: ignore[reportPrivateUsage]
from tensordict_lite._tree.manifest import Reader, describe, paths_of

safetensors = pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file  # noqa: E402

sys.path.insert(0, str(GOLDEN))
import make  # pyright: ignore[reportMissingImports]  # noqa: E402


def forged(path: Path, plan: Any, tensors: dict[str, Tensor] | None = None) -> Path:
    """A file with this plan, a string as it is, beside these tensors."""
    metadata = {"tensordict_lite": plan if isinstance(plan, str) else json.dumps(plan)}
    save_file({"x": torch.ones(2)} if tensors is None else tensors, path, metadata=metadata)
    return path


def plan(**changes: Any) -> dict[str, Any]:
    policy = {"encoders": {}, "default": None, "on_mismatch": "error", "objects": "error", "dtype": None}
    return {
        "version": 1, "root": {"policy": 0, "items": [["x", 0]]}, "policies": [policy], "encoders": [],
        "tensors": ["x"], **changes,
    }  # fmt: skip


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
        ("", "Expecting value"),
        ("[" * 100_000, ""),
        ("[" * 600_000, "its manifest takes 600000 characters"),
        ("null", "it does not list its tensors"),
        (" " * (17 << 20), "its manifest takes"),
        ('{"version": 1e999}', "it does not list its tensors"),
        ("[]", "it does not list its tensors"),
        (plan(version=2), "its version is 2, and this package reads version 1; update the package"),
        (plan(version="1"), "it has no version"),
        (plan(version=True), "it has no version"),
        (plan(extra=1), "expected a manifest with the fields version, root, policies, encoders"),
        (plan(root=[]), "'root' of a manifest is not a dict"),
        (plan(root={}), "expected a dict with the fields policy, items"),
        (plan(policies={}), "'policies' of a manifest is not a list"),
        (plan(root={"policy": 0, "items": [["x"]]}), "an item of a dict is not a pair of key and value"),
        (plan(root={"policy": 0, "items": [[1, 0]]}), "an item of a dict is not a pair of key and value"),
        (plan(root={"policy": 0, "items": [["x", "y"]]}), "'x' is neither a tensor nor a dict"),
        (plan(root={"policy": 0, "items": [["x", 0.0]]}), "'x' is neither"),
        (plan(root={"policy": 0, "items": [["x", True]]}), "'x' is neither"),
        (plan(root={"policy": 0, "items": [["x", 1]]}), "its tree does not contain each of the 1 tensors exactly once"),
        (plan(root={"policy": 0, "items": [["x", 0], ["y", 0]]}), "its tree contains a tensor twice"),
        (plan(root={"policy": 0, "items": []}), "its tree does not contain each of the 1 tensors exactly once"),
        (plan(root={"policy": 0, "items": [["x", 0], ["x", {"policy": 0, "items": []}]]}), "a dict has a key twice"),
        (plan(root={"policy": 1, "items": [["x", 0]]}), "it has no policy 1"),
        (plan(root={"policy": -1, "items": [["x", 0]]}), "it has no policy -1"),
        (nested(DEPTH), f"it is nested {DEPTH} levels deep or more"),
        (nested(300), f"it is nested {DEPTH} levels deep or more"),
        (plan(tensors=["y"]), "its tree and its tensors have different names"),
        (plan(tensors=["x", "x"]), "its tree and its tensors have different names"),
        (plan(tensors=[["x", "float32"]]), "its list of tensors is damaged"),
        (plan(tensors=[["x"]]), "its list of tensors is damaged"),
        (plan(tensors=[["x", []]]), "its list of tensors is damaged"),
        (plan(tensors=[["x", "complex128"]]),
         "complex128 is stored as pairs of torch.float64, got torch.float32 of shape [2]"),
        (plan(tensors=[[{}, None]]), "its tree and its tensors have different names"),
        (plan(tensors=["x", [3, None]]), "its tree and its tensors have different names"),
        (with_policy(on_mismatch="explode"), "on_mismatch is 'error' or 'move', got 'explode'"),
        (with_policy(objects=3), "objects is 'error' or 'keep', got 3"),
        (with_policy(dtype="int64"), "'int64' is not a floating-point dtype"),
        (with_policy(dtype=[]), "[] is not a floating-point dtype"),
        (with_policy(encoders={"x": 0}), "it has no encoder 0"),
        (with_policy(default="x"), "it has no encoder 'x'"),
        (with_policy(encoders=[]), "'encoders' of a policy is not a dict"),
        ({**with_policy(encoders={"x": 0}), "encoders": [{"name": "os.system"}]},
         "the encoder of 'x': no encoder is registered as 'os.system'; known are"),
        ({**with_policy(encoders={"x": 0}), "encoders": [{"name": ["utf8"]}]},
         "the encoder of 'x': no encoder is registered as ['utf8']"),
        ({**with_policy(encoders={"x": 0}), "encoders": ["utf8"]}, "its entry for 'x' is not an encoder"),
        ({**with_policy(encoders={"x": 0}), "encoders": [{"name": "utf8", "max_length": "x"}]}, "the encoder of 'x':"),
        ({**with_policy(encoders={"x": 0}), "encoders": [{"name": "vocabulary", "tokens": 3, "unknown": None}]},
         "the encoder of 'x':"),
        ({**with_policy(encoders={"x": 0}), "encoders": [{"name": "tokenizer", "files": {}, "call": {}}]},
         "'x' was encoded with a tokenizer; load does not build it, "
         "since that would run code that the file names; pass it: load(..., encoders={'x': ...})"),
    ])  # fmt: skip
    def test_every_part_is_checked(self, tmp_path: Path, wrong: Any, message: str) -> None:
        with pytest.raises(InvalidFileError) as caught:
            load(forged(tmp_path / "d", wrong))
        assert str(caught.value).startswith(f"{tmp_path / 'd'}: not a valid file: {message}")
        assert issubclass(InvalidFileError, ValueError)

    def test_a_file_of_torch_save_is_told(self, tmp_path: Path) -> None:
        torch.save({"x": torch.ones(1)}, tmp_path / "d")
        with pytest.raises(InvalidFileError, match=r"d \(a file of torch\.save: torch\.load reads it\): not a"):
            load(tmp_path / "d")

    def test_a_folder_that_is_missing_is_named(self, tmp_path: Path) -> None:
        fails(FileNotFoundError, r"No such file or directory: '.*/no/'$", lambda: save({"x": 1}, tmp_path / "no" / "d"))
        (tmp_path / "file").touch()
        fails(NotADirectoryError, r"'.*/file/'$", lambda: save({"x": 1}, tmp_path / "file" / "d"))

    def test_an_encoder_that_the_caller_gives_is_not_looked_at(self, tmp_path: Path) -> None:
        bad = {**with_policy(encoders={"x": 0}, default=0), "encoders": [{"name": "tokenizer"}]}
        path = forged(tmp_path / "d", bad)
        assert load(path, encoders=Utf8())._policy.default_encoder == Utf8()
        fails(InvalidFileError, r"'\*' was encoded with a tokenizer", lambda: load(path, encoders={"x": Utf8()}))
        only = forged(tmp_path / "only", {**with_policy(encoders={"x": 0}), "encoders": [{"name": "tokenizer"}]})
        assert load(only, encoders={"x": Utf8(7)}).encoders["x"] == Utf8(7)

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"\0",
            b"\xff" * 8,
            (1 << 62).to_bytes(8, "little"),
            (200 << 20).to_bytes(8, "little") + b"{}",
            (2).to_bytes(8, "little") + b"{}x",
            pickle.dumps({"x": 1}),
            (80).to_bytes(8, "little")
            + b'{"x":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,4]}}'.ljust(80)
            + b"\0" * 4,
            (80).to_bytes(8, "little")
            + b'{"x":{"dtype":"F32","shape":[0,9223372036854775807],"data_offsets":[0,0]}}'.ljust(80),
            (80).to_bytes(8, "little") + b'{"x":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}'.ljust(80) + b"\0" * 2,
        ],
    )
    def test_what_is_no_safetensors_file(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "d"
        path.write_bytes(content)
        with contextlib.suppress(InvalidFileError):
            for value in load(path).values():
                assert value.numel() <= 4
        with pytest.raises(FileNotFoundError):
            load(tmp_path / "nope")

    @pytest.mark.slow
    def test_mutated_files(self, tmp_path: Path) -> None:
        """Bits, cuts, repeats and numbers in 2,400 files: each is read, or is one error, soon and in little memory."""
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
                check_invariants(d)
                repr(d)
                read += 1
            except InvalidFileError:
                refused += 1
        assert read + refused == 2400 and read > 100 and refused > 1000 and time.monotonic() - start < 120
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024 < 200 << 20

    @pytest.mark.parametrize("name", make.MAKE)
    def test_golden_files(self, name: str, tmp_path: Path) -> None:
        d, made = load(GOLDEN / name), make.MAKE[name]()
        check_invariants(d)
        assert d == made
        assert all(d[key]._policy == made[key]._policy for key in made if isinstance(made[key], DeviceDict))
        assert d._policy == made._policy
        assert saved(made, tmp_path / name).read_bytes() == (GOLDEN / name).read_bytes(), (
            "what is written has changed: that is another version of the format"
        )


class TestAlignment:
    """Kernels crash on complex128 that does not lie on a multiple of 16, and may on any other."""

    def test_files_of_writers_that_align_less(self, tmp_path: Path) -> None:
        d = DeviceDict(
            {
                "a": torch.ones(3, dtype=torch.float64),
                "c": torch.arange(5).to(torch.complex128),
                "e": torch.zeros(0, 2, dtype=torch.complex128),
                "s": torch.tensor(2j, dtype=torch.complex128),
                "x": torch.ones(2),
            }
        )
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
        d = DeviceDict({"c": torch.ones(3, dtype=torch.complex128), "x": torch.ones(2)}).pack()
        rebuild, (*head, ((block, specs),), leaves) = d.__reduce_ex__(2)
        memory = torch.zeros(block.numel() + 24, dtype=torch.uint8).untyped_storage()
        at = 8 if memory.data_ptr() % 16 == 0 else 16
        moved = (
            torch.empty(0, dtype=torch.uint8).set_(memory[at : at + block.numel()], 0, block.shape, (1,)).copy_(block)
        )
        again = rebuild(*head, [(moved, specs)], leaves)
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


@pytest.mark.slow
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
        assert again.encoders == expected and again["0"].encoders["y"] == Hashing(8) and "x" not in again["0"].encoders  # pyright: ignore[reportAttributeAccessIssue]
        assert pickle.loads(pickle.dumps(again))._policy == again._policy == again.clone()._policy


def test_brackets_of_both_kinds_count(tmp_path: Path) -> None:
    with pytest.raises(InvalidFileError, match="its manifest takes 1800000 characters"):
        load(forged(tmp_path / "d", '[{"a":' * 300_000))


def test_memory_that_is_short_is_not_the_fault_of_the_file() -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"^short$"), invalid_file("d", RuntimeError):
        raise torch.OutOfMemoryError("short")


def test_equal_encoders_share_an_entry() -> None:
    d = DeviceDict({"s": "a"}, encoders={"s": Hashing(8)})
    d["n"] = DeviceDict({"t": "a"}, encoders={"t": Hashing(8)})
    manifest, leaves = describe(d, lambda encoder, error: None)
    assert len(manifest["encoders"]) == 1
    assert paths_of(manifest) == [path for path, _ in leaves] == [("s",), ("n", "t")]


class NeverEqual:
    """An encoder whose ``==`` is False, even with itself, as that of an encoder that holds NaN."""

    def encode(self, strings: Any) -> Tensor:
        return torch.zeros(len(strings))

    def decode(self, codes: Any) -> list[str]:
        return [""] * len(codes)

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


def test_one_encoder_of_two_keys_is_written_once() -> None:
    encoder = NeverEqual()
    d = DeviceDict({"s": "a", "t": "b"}, encoders={"s": encoder, "t": encoder})
    manifest, _ = describe(d, lambda encoder, error: {})
    assert len(manifest["encoders"]) == 1


def test_an_encoder_without_a_json_form_is_named(tmp_path: Path) -> None:
    for d, key in (
        (DeviceDict({"s": "a"}, encoders={"s": NeverEqual()}), "s"),
        (DeviceDict({"x": 1.0}, encoders=NeverEqual()), "*"),
    ):
        with pytest.raises(TypeError, match=rf"^'{re.escape(key)}': <.*NeverEqual .*> has no JSON form; register"):
            save(d, tmp_path / "d")


def test_a_dict_that_pytree_made_too_deep_is_refused(tmp_path: Path) -> None:
    d = DeviceDict({"x": 1.0})
    for _ in range(DEPTH):
        d = DeviceDict._new({"n": d}, d.device, DeviceDict._class_policy)
    fails(ValueError, "is nested more than 64 levels deep", lambda: save(d, tmp_path / "d"))


class TestKeys:
    """`load(path, keys=...)` reads parts of the tree."""

    def test_a_key_reads_everything_below_it(self, tmp_path: Path) -> None:
        d = DeviceDict({"x": 1.0, "n": {"y": 2.0, "m": {"z": 3.0, "w": 4.0}, "e": {}}})
        path = saved(d, tmp_path / "d")
        for keys in (["n"], ["n", ("n", "m", "z")], [("n", "m", "z"), ("n",)], [("n", "y"), "n", ("n", "m")]):
            assert load(path, keys=keys) == d.select("n"), keys
        part = load(path, keys=[("n", "m", "w"), ("n", "e")])
        assert part == DeviceDict({"n": {"m": {"w": 4.0}, "e": {}}}) and list(part["n"]) == ["m", "e"]

    def test_at_the_deepest_level(self, tmp_path: Path) -> None:
        path = forged(tmp_path / "d", nested(DEPTH - 1))
        assert load(path, keys=["n"]) == load(path)

    def test_the_reader_lists_the_kept_numbers(self) -> None:
        reader = Reader({key: value for key, value in nested(3).items() if key != "tensors"}, 1)
        assert (reader.count, reader.numbers) == (4, [0])
        kept = reader.keep([("n", "n")], "the file")
        assert (kept.numbers, kept.keep([], "the file").numbers) == ([0], [])
        assert (list(reader.root), reader.numbers) == (["n"], [0]), "pickles share a reader, so nothing changes it"

    def test_a_missing_key_is_named_with_the_keys_of_the_file(self, tmp_path: Path) -> None:
        path = saved(DeviceDict({"image": 1.0, "n": {"y": 2.0}}), tmp_path / "d")
        fails(KeyError, r"'imgae' is not in .*/d; did you mean 'image'", lambda: load(path, keys=["imgae"]))
        with pytest.raises(KeyError, match=r"'n\.z' is not in .*/d: 'n' has no 'z'; its keys are 'y'"):
            load(path, keys=[("n", "z")])


class TestReading:
    @pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are listed in /proc only")
    def test_a_file_that_is_replaced_by_another_kind_is_closed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = forged(tmp_path / "d", plan())
        calls: list[str] = []

        def refuse_the_second(found: os.stat_result, path: str) -> None:
            calls.append(path)
            if len(calls) == 2:
                raise OSError("replaced")

        monkeypatch.setattr(reading, "_refuse_irregular", refuse_the_second)
        before = os.listdir("/proc/self/fd")
        with pytest.raises(OSError, match=r"^replaced$") as caught:
            load(path)
        assert os.listdir("/proc/self/fd") == before, "closed, although the error keeps the frames alive"
        assert len(calls) == 2 and caught

    @pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="files are mapped through /proc only")
    def test_the_library_reads_only_tensors_without_elements(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        d = DeviceDict({"x": torch.arange(3.0), "e": torch.zeros(0, 2), "y": torch.arange(4)})
        path = saved(d, tmp_path / "d")
        real, read = safetensors.safe_open, list[str]()

        class Spy:
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                assert args[0].startswith("/proc/self/fd/"), "the open file, since the path may be replaced"
                self.file = real(*args, **kwargs)

            def __enter__(self) -> Spy:
                self.file.__enter__()
                return self

            def __exit__(self, *error: Any) -> None:
                self.file.__exit__(*error)

            def __getattr__(self, name: str) -> Any:
                return getattr(self.file, name)

            def get_tensor(self, name: str) -> Tensor:
                read.append(name)
                return self.file.get_tensor(name)

        monkeypatch.setattr(safetensors, "safe_open", Spy)
        assert load(path) == d and read == ["e"]

    @pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="mapped files are listed in /proc only")
    def test_an_aligned_tensor_is_the_mapped_memory(self, tmp_path: Path) -> None:
        path = saved(DeviceDict({"x": torch.arange(3.0), "y": torch.ones(2)}), tmp_path / "d")
        d = load(path)
        maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
        spans = [[int(end, 16) for end in line[0].split("-")] for line in maps]
        assert all(any(start <= x.data_ptr() < end for start, end in spans) for x in d.values())

    def test_a_default_device_has_no_effect(self, tmp_path: Path) -> None:
        path = saved(DeviceDict({"x": torch.arange(3.0), "e": torch.zeros(0)}, device="cpu"), tmp_path / "d")
        with torch.device("meta"):
            d = load(path)
        assert d.device == torch.device("cpu") and d["x"].tolist() == [0, 1, 2]

    def test_many_dimensions_are_refused(self, tmp_path: Path) -> None:
        header = json.dumps({"x": {"dtype": "F32", "shape": [1] * 65, "data_offsets": [0, 4]}}).encode()
        (tmp_path / "d").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
        fails(InvalidFileError, "'x' has 65 dimensions", lambda: load(tmp_path / "d"))

    def test_the_most_dimensions(self, tmp_path: Path) -> None:
        d = DeviceDict({"x": torch.ones([1] * 64)})
        assert load(saved(d, tmp_path / "d")) == d

    @pytest.mark.parametrize("shape", [(), (3,), (2, 1)])
    def test_pairs_that_are_none(self, tmp_path: Path, shape: tuple[int, ...]) -> None:
        path = forged(
            tmp_path / "d", plan(tensors=[["x", "complex128"]]), {"x": torch.ones(shape, dtype=torch.float64)}
        )
        with pytest.raises(InvalidFileError) as caught:
            load(path)
        expected = f"complex128 is stored as pairs of torch.float64, got torch.float64 of shape {list(shape)}"
        assert str(caught.value) == f"{path}: not a valid file: {expected}"

    def test_a_manifest_of_the_largest_size(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path, text = forged(tmp_path / "d", plan()), json.dumps(plan())
        monkeypatch.setattr(reading, "MAX_MANIFEST", len(text))
        monkeypatch.setattr(reading, "_MAX_BRACKETS", text.count("[") + text.count("{"))
        assert load(path) == {"x": torch.ones(2)}
        for limit in ("MAX_MANIFEST", "_MAX_BRACKETS"):
            with monkeypatch.context() as patch:
                patch.setattr(reading, limit, getattr(reading, limit) - 1)
                fails(InvalidFileError, f"its manifest takes {len(text)} characters", lambda: load(path))

    def test_a_write_to_a_loaded_dict_does_not_change_the_file(self, tmp_path: Path) -> None:
        path = saved(DeviceDict({"x": torch.ones(1000)}), tmp_path / "d")
        load(path)["x"].zero_()
        assert load(path)["x"].sum() == 1000


def test_files_are_written_on_little_endian_machines_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(NotImplementedError, match=r"^files are written on little-endian machines only$"):
        save({"x": 1.0}, tmp_path / "d")
    assert not os.listdir(tmp_path)


class Characters:
    def __call__(self, strings: list[str], **_: Any) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([[ord(c) for c in string] for string in strings])}

    def batch_decode(self, ids: Tensor, **_: Any) -> list[str]:
        return ["".join(map(chr, row)) for row in ids.tolist()]


def test_a_tokenizer_is_given_to_load(tmp_path: Path) -> None:
    encoder = Tokenizer(Characters())
    path = saved(DeviceDict({"n": {"t": ["ab", "cd"]}}, encoders={"t": encoder}), tmp_path / "d")
    fails(InvalidFileError, r"'t' was encoded with a tokenizer; load does not build it", lambda: load(path))
    assert load(path, encoders={"t": encoder}).decode(("n", "t")) == ["ab", "cd"]
