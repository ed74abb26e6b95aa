"""Tables on disk: what a writer accepts, what a reader sees, and what a damaged folder does."""

from __future__ import annotations

import copy
import errno
import importlib
import json
import os
import pickle
import random
import re
import resource
import shutil
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import check_invariants, fails
from files import DTYPES, GOLDEN, write_index
from safetensors import safe_open
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from tensordict_lite import (
    DeviceDict,
    Hashing,
    InvalidFileError,
    TypedDeviceDict,
    Utf8,
    Vocabulary,
    cat,
    collate,
    load,
    save,
)
from tensordict_lite._memory import row_copies  # pyright: ignore[reportPrivateUsage]
from tensordict_lite.tables import RowWriter, add_column, drop_column, repair, verify
from tensordict_lite.tables import folder as table_folder
from tensordict_lite.tables import reader as table_reader
from tensordict_lite.tables import table as table_writer

sys.path.insert(0, str(GOLDEN))
import make  # pyright: ignore[reportMissingImports]

pytestmark = pytest.mark.usefixtures("torch_mode")

SPECIES = Vocabulary(["cat", "dog"])
TIMES = int(os.environ.get("TIMES", "60"))


class Obs(TypedDeviceDict):
    state: Tensor


class Step(TypedDeviceDict):
    x: Tensor
    obs: Obs
    w: Tensor | None = None


def sample(count: int = 3, first: int = 0) -> DeviceDict:
    i = torch.arange(first, first + count)
    return DeviceDict({
        "x": torch.stack([i, -i], 1).float(),
        "name": [f"row {n}" for n in i.tolist()],
        "species": ["cat" if n % 2 else "dog" for n in i.tolist()],
        "n": {"z": i.to(torch.complex128) * 1j, "empty": {}},
    }, encoders={"name": Utf8(12), "species": SPECIES})  # fmt: skip


def written(folder: Path, d: Any, *batches: Any) -> Path:
    with RowWriter(folder, like=d) as writer:
        for batch in batches or (d,):
            writer.write(batch)
    return folder


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_writer, "BUFFER", 500)


CHANGES: dict[str, Callable[[DeviceDict], Any]] = {
    "tensor": lambda d: d["x"].add_(1),
    "one row of the tensor": lambda d: d["x"][7].zero_(),
    "add_": lambda d: d.add_(1),
    "mul_": lambda d: d.mul_(d.clone()),
    "lerp_": lambda d: d.lerp_(d.clone().add_(1), 0.5),
    "zero_": lambda d: d.zero_(),
    "copy_": lambda d: d.copy_(d.clone().add_(1)),
    "row": lambda d: d.rows.__setitem__(3, {"x": [1.0, 2.0]}),
    "slice of rows": lambda d: d.rows.__setitem__(slice(0, 9), d.rows[9:18].clone()),
    "index of rows": lambda d: d.rows.__setitem__([1, 5], d.rows[9:11].clone()),
    "rows of rows": lambda d: d.rows[100:].rows.__setitem__([0, 1], d.rows[9:11].clone()),
}
"""What writes to the field ``x`` of a table."""


class TestRoundTrip:
    @pytest.mark.parametrize("sizes", [(3,), (1, 2, 3, 500, 0, 7), (1000,), (1,) * 50])
    def test_batches_of_any_size(self, tmp_path: Path, small_buffers: None, sizes: tuple[int, ...]) -> None:
        with RowWriter(tmp_path / "t", like=sample()) as writer:
            for size in sizes:
                writer.write(sample(size, len(writer)))
        table = load(tmp_path / "t")
        assert table == sample(sum(sizes)) and table.encoders == sample().encoders
        assert table.rows[-1].decode("name") == f"row {sum(sizes) - 1}"
        check_invariants(table)

    @pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
    def test_every_dtype(self, tmp_path: Path) -> None:
        d = DeviceDict(
            {name: torch.arange(8).reshape(4, 2).to(torch.float32).to(dtype) for name, dtype in DTYPES.items()}
        )
        again = load(written(tmp_path / "t", d))
        for name, value in d.items():
            assert again[name].dtype == value.dtype
            assert torch.equal(again[name].view(torch.uint8), value.view(torch.uint8))

    def test_rows_one_by_one(self, tmp_path: Path) -> None:
        d = sample(5)
        with RowWriter(tmp_path / "t", like=d) as writer:
            for row in d.rows:
                writer.write(row)
            writer.write({"x": [5, -5], "name": "row 5", "species": "cat", "n": {"z": 5j, "empty": {}}})
            writer.write(sample(2, 6).rows)
            writer.write({**sample(2, 8), "name": ["row 8", "row 9"], "species": ["dog", "cat"]})
        assert load(tmp_path / "t") == sample(10)

    def test_appending_to_a_table(self, tmp_path: Path, small_buffers: None) -> None:
        folder = written(tmp_path / "t", sample(3))
        for first in (3, 203):
            with RowWriter(folder, append=True) as writer:
                assert len(writer) == first
                writer.write(sample(200, first))
        assert load(folder) == sample(403)

    def test_values_are_copied(self, tmp_path: Path) -> None:
        x = torch.zeros(2, 1)
        with RowWriter(tmp_path / "t", like={"x": x}) as writer:
            for i in range(3):
                writer.write({"x": x.fill_(i)})
        assert load(tmp_path / "t")["x"].flatten().tolist() == [0, 0, 1, 1, 2, 2]

    def test_values_are_converted_and_cast_as_for_rows(self, tmp_path: Path) -> None:
        like = DeviceDict({"f": torch.zeros(1, dtype=torch.float16), "i": torch.zeros(1, dtype=torch.int32)})
        with RowWriter(tmp_path / "t", like=like) as writer:
            writer.write({"f": [1.5, 2], "i": torch.tensor([3, 4])})
            writer.write({"f": torch.tensor([3.0], requires_grad=True) * 2, "i": [5]})
            writer.write({"f": torch.arange(8.0).reshape(4, 2)[:, 1], "i": torch.arange(8)[::2]})
        table = load(tmp_path / "t")
        assert table["f"].tolist() == [1.5, 2, 6, 1, 3, 5, 7] and table["f"].dtype == torch.float16
        assert table["i"].tolist() == [3, 4, 5, 0, 2, 4, 6] and table["i"].dtype == torch.int32

    def test_in_inference_mode(self, tmp_path: Path) -> None:
        with RowWriter(tmp_path / "t", like=sample()) as writer:
            with torch.inference_mode():
                writer.write(sample())
            writer.write(sample(2, 3))
        assert load(tmp_path / "t") == sample(5)

    def test_views_with_conjugate_bits(self, tmp_path: Path, small_buffers: None) -> None:
        z = (torch.arange(50) * 1j).to(torch.complex64)
        assert torch.equal(
            load(written(tmp_path / "t", {"z": z}, {"z": z.conj()}, {"z": z[:2].conj()}))["z"], torch.cat([-z, -z[:2]])
        )

    def test_rows_without_bytes(self, tmp_path: Path) -> None:
        d = DeviceDict({"a": torch.zeros(4, 0), "b": ["", "", "", ""]})
        assert load(written(tmp_path / "t", d, d, d))["a"].shape == (8, 0)

    def test_no_rows(self, tmp_path: Path) -> None:
        RowWriter(tmp_path / "t", like=sample()).close()
        table = load(tmp_path / "t")
        assert table == sample(0) and len(table.rows) == 0

    def test_names_that_file_systems_refuse(self, tmp_path: Path) -> None:
        keys = [
            "a/b", "../c", "", ".", "x" * 300, "X", "x", "ß", "table.json", "unused", "__metadata__", "\ud800", '"',
            "é",
        ]  # fmt: skip
        d = DeviceDict({key: torch.tensor([i]) for i, key in enumerate(keys)})
        folder = written(tmp_path / "t", d)
        assert load(folder) == d and set(os.listdir(tmp_path)) == {"t"}
        files = [path.name for path in folder.iterdir()]
        assert len({name.casefold() for name in files}) == len(keys) + 1

    def test_typed(self, tmp_path: Path) -> None:
        like = Step(x=torch.zeros(2, 3), obs=Obs(state=torch.ones(2)))
        folder = written(tmp_path / "t", like)
        table = Step.load(folder)
        assert type(table) is Step and type(table.obs) is Obs and table.w is None
        with RowWriter(folder, append=True) as writer:
            writer.write({"x": [[1, 2, 3]], "obs": {"state": [4]}})
            with pytest.raises(ValueError, match="the given mapping has 'w', which the table lacks"):
                writer.write({"x": [[1, 2, 3]], "obs": {"state": [4]}, "w": [1]})
        assert Step.load(folder).x[-1].tolist() == [1, 2, 3]
        written(tmp_path / "other", {"x": [1]})
        fails(TypeError, "obs", lambda: Step.load(tmp_path / "other"))

    def test_keys_device_and_encoders(self, tmp_path: Path) -> None:
        folder = written(tmp_path / "t", sample())
        os.unlink(folder / "x.safetensors")
        assert list(load(folder, keys=["name", ("n", "z")])) == ["name", "n"]
        assert load(folder, "meta", keys=["name"])["name"].device.type == "meta"
        assert load(folder, keys=["species"], encoders={"species": Hashing(4)}).encoders["species"] == Hashing(4)
        fails(KeyError, "nme", lambda: load(folder, keys=["nme"]))
        fails(InvalidFileError, r"the file 'x.safetensors' is missing", lambda: load(folder))

    def test_the_mapping_is_private(self, tmp_path: Path) -> None:
        folder = written(tmp_path / "t", sample())
        table = load(folder)
        table["x"].zero_()
        assert load(folder) == sample()


def failing_block(writer: RowWriter, *batches: Any) -> None:
    """Raise an error in the block of a writer that has written some batches."""

    def block() -> None:
        with writer:
            for batch in batches:
                writer.write(batch)
            raise KeyError("mine")

    fails(KeyError, "mine", block)


class TestRefused:
    @pytest.mark.parametrize(("change", "message"), [
        ({"x": torch.zeros(3, 3)}, r"^'x': expected rows \[..., 2\] or one row \[2\], got float32\[3, 3\]$"),
        ({"x": torch.zeros(4, 2)}, r"^'name' has 3 rows, and 'x' has 4 rows$"),
        ({"x": torch.zeros(2)}, r"^'name' has 3 rows, and 'x' has no dimension for rows$"),
        ({"x": torch.zeros(3, 2, dtype=torch.complex64)},
         "^'x': expected numbers that float32 can hold, got complex64; convert it first$"),
        ({"x": {"y": 1}}, "^'x': expected a tensor, got a mapping$"),
        ({"n": [1, 2, 3]}, r"^'n': expected a nested dict, got a list$"),
        ({"n": {"z": [1, 2, 3]}}, "^the given mapping lacks 'n.empty', which the table has$"),
        ({"y": [1]}, "^the given mapping has 'y', which the table lacks$"),
        ({"name": ["a", "b", "thirteen bytes"]},
         r"^'name': 'thirteen bytes' is 14 bytes in UTF-8, over max_length=12; raise max_length, "
         r"strings are never cut$"),
        ({"name": torch.zeros(3, 14, dtype=torch.uint8)},
         r"^'name': a string takes 14 codes of Utf8\(12\), the rows of this field have 12; shorten the string, "
         r"or make the field anew, wide enough for it$"),
        ({"species": ["cat", "dog", "cow"]}, "^'species': 'cow' is not among the 2 tokens"),
        ({"n": {"z": None, "empty": {}}}, "'n.z'"),
        ({"x": torch.zeros(3, 2).to_sparse()}, "^'x': expected a dense tensor, got a sparse one; convert it"),
        ({"x": torch.zeros(3, 2, device="meta")}, "^'x': expected a tensor with values, got one on meta"),
        ({"x": torch.nested.as_nested_tensor([torch.zeros(2)] * 3, layout=torch.jagged)},
         "^'x': expected a dense tensor, got a nested one"),
    ])  # fmt: skip
    def test_a_batch_that_does_not_fit_is_refused_whole(self, tmp_path: Path, change: Any, message: str) -> None:
        with RowWriter(tmp_path / "t", like=sample()) as writer:
            writer.write(sample())
            fails((TypeError, ValueError), message, lambda: writer.write({**sample(), **change}))
            assert len(writer) == 3
        assert load(tmp_path / "t") == sample()

    def test_another_encoder(self, tmp_path: Path) -> None:
        with (
            RowWriter(tmp_path / "t", like=sample()) as writer,
            pytest.raises(
                ValueError,
                match=r"^'species': expected strings of Vocabulary\(\['cat', 'dog'\]\), got strings of Hashing",
            ),
        ):
            writer.write(
                DeviceDict({**sample(), "species": ["a"] * 3}, encoders={"species": Hashing(4), "name": Utf8(12)})
            )

    @pytest.mark.parametrize(("encoders", "error", "message"), [
        ({"species": Vocabulary(["dog", "cat"])}, ValueError,
         "'species' of this table is encoded with {'tokens': ['cat', 'dog'], 'unknown': None, 'name': "
         "'vocabulary'}, encoders= has {'tokens': ['dog', 'cat'], 'unknown': None, 'name': 'vocabulary'}; "
         "leave it out: load reads all rows of a column with one encoder"),
        ({"name": Utf8(20)}, ValueError, "'name' of this table is encoded with"),
        (Vocabulary(["dog", "cat"]), ValueError,
         "'x' of this table is encoded with Utf8(), encoders= has {'tokens': ['dog', 'cat']"),
        ({"x": Hashing(4)}, ValueError, "'x' of this table is encoded with Utf8(), encoders= has {'buckets': 4"),
        ({"z": Hashing(4)}, ValueError, "'n.z' of this table is encoded with Utf8(), encoders= has"),
        ({"name": lambda s: torch.zeros(len(s))}, ValueError,
         "'name' of this table is encoded with {'max_length': 12, 'name': 'utf8'}, encoders= has {'name': "
         "'<lambda>'}; leave it out"),
        ({"spcies": SPECIES}, KeyError, "'spcies' is not in this table; did you mean 'species'?"),
    ])  # fmt: skip
    def test_appending_with_another_encoder(
        self, tmp_path: Path, encoders: Any, error: type[Exception], message: str
    ) -> None:
        """The rows of the table would be decoded with an encoder that did not encode them."""
        folder = written(tmp_path / "t", sample())
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(error) as caught:
            RowWriter(folder, append=True, encoders=encoders)
        assert str(caught.value).startswith(message)
        assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
        with RowWriter(folder, append=True, encoders={"species": SPECIES, "name": Utf8(12)}) as writer:  # the same
            writer.write({**sample(3, 3), "species": ["cat", "dog", "cat"]})
        assert load(folder) == sample(6)

    def test_appending_with_one_encoder_for_every_key(self, tmp_path: Path) -> None:
        with RowWriter(tmp_path / "t", like={"x": [1.0], "n": {"s": ["a"]}}, encoders=Utf8(5)):
            pass
        with RowWriter(tmp_path / "t", append=True, encoders=Utf8(5)) as writer:
            writer.write({"x": [2.0], "n": {"s": ["Ada"]}})
        assert load(tmp_path / "t", encoders=Utf8(5))["n"].decode("s") == ["Ada"]

    def test_like_with_another_encoder(self, tmp_path: Path) -> None:
        for like in (sample(), sample().rows, DeviceDict({"m": {"d": sample()}})):
            with pytest.raises(
                ValueError,
                match=r"species': expected strings of Hashing\(buckets=4, seed=0\), got strings of "
                r"Vocabulary\(\['cat', 'dog'\]\) of like=; give the strings themselves: decode it first$",
            ):
                RowWriter(tmp_path / "t", like=like, encoders={"species": Hashing(4)})
            with pytest.raises(KeyError, match="'nam' is not in the batch that RowWriter got as like="):
                RowWriter(tmp_path / "t", like=like, encoders={"nam": Utf8(4)})
        assert not (tmp_path / "t").exists()
        RowWriter(tmp_path / "t", like=sample(), encoders={"species": SPECIES}).close()
        strings = {**sample(), "species": ["cat"] * 3, "name": ["a"] * 3}
        RowWriter(tmp_path / "u", like=strings, encoders={"species": Hashing(4)}).close()

    def test_a_list_of_samples_is_no_batch(self, tmp_path: Path) -> None:
        samples: Any = [{"x": 1, "y": 2}, {"x": 3, "y": 4}]
        fails(TypeError, r"collate\(samples\) makes a batch$", lambda: RowWriter(tmp_path / "t", like=samples))
        with RowWriter(tmp_path / "t", like=collate(samples)) as writer:
            fails(TypeError, r"collate\(samples\) makes a batch$", lambda: writer.write(samples))
            writer.write(collate(samples))
        assert load(tmp_path / "t").tolist() == {"x": [1, 3], "y": [2, 4]}

    def test_load_names_an_encoder_without_a_column(self, tmp_path: Path) -> None:
        d = DeviceDict({"n": {"label": ["cat"]}, "x": [1]})
        RowWriter(tmp_path / "t", like=d).close()
        save(d, tmp_path / "d")
        for path in (tmp_path / "t", tmp_path / "d"):
            with pytest.raises(KeyError, match=r"^'x2' is not in .*; did you mean 'x'\?$"):
                load(path, encoders={"x2": Utf8()})
            kept = load(path, keys=["x"], encoders={"label": Utf8()})
            assert list(kept) == ["x"], "an encoder of a column that is not loaded is no mistake"

    def test_like_is_no_single_row(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"^'n\.s': expected a string for each row, got one string; collate"):
            RowWriter(tmp_path / "t", like={"x": [1, 2, 3], "n": {"s": "Ada"}})
        assert not (tmp_path / "t").exists()

    def test_the_width_of_strings_is_that_of_like(self, tmp_path: Path) -> None:
        with RowWriter(tmp_path / "t", like={"name": ["Ada", "Bo"]}) as writer:
            writer.write({"name": ["Cy"]})
            with pytest.raises(
                ValueError, match=r"^'name': a string takes 5 codes of Utf8\(\), the rows of this field have 3; shorten"
            ):
                writer.write({"name": ["Grace"]})
        with RowWriter(tmp_path / "u", like={"name": ["Ada", "Bo"]}, encoders={"name": Utf8(5)}) as writer:
            writer.write({"name": ["Grace"]})
        assert load(tmp_path / "u").decode("name") == ["Grace"]

    def test_a_second_writer(self, tmp_path: Path) -> None:
        with RowWriter(tmp_path / "t", like=sample()):
            several: tuple[dict[str, Any], ...] = ({"append": True}, {"like": sample()})
            for options in several:
                said = r"is open in a RowWriter, add_column or drop_column, in this process or another; close it, or "
                with pytest.raises(BlockingIOError, match=rf"{said}wait for it$"):
                    RowWriter(tmp_path / "t", **options)
            with get_context("forkserver").Pool(1) as pool, pytest.raises(BlockingIOError):
                pool.apply(RowWriter, (tmp_path / "t",), {"append": True})
        RowWriter(tmp_path / "t", append=True).close()

    def test_folders(self, tmp_path: Path) -> None:
        folder = written(tmp_path / "a" / "t", sample())
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(
            FileExistsError, match=r"t' has a table already; append=True adds rows to it, mode='overwrite'"
        ):
            RowWriter(folder, like=sample())
        assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "x").touch()
        with pytest.raises(FileExistsError, match=r"mine' is not empty; a table needs a folder of its own$"):
            RowWriter(tmp_path / "mine", like=sample())
        assert os.listdir(tmp_path / "mine") == ["x"]
        fails(IsADirectoryError, r"no table: it has no table.json", lambda: RowWriter(tmp_path / "mine", append=True))
        with pytest.raises(FileNotFoundError):
            RowWriter(tmp_path / "none", append=True)
        with pytest.raises(FileExistsError):
            RowWriter(tmp_path / "mine" / "x", like=sample())

    def test_fields_that_files_do_not_hold(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="rows need fields that agree on their first dimension"):
            RowWriter(tmp_path / "t", like={"x": [1, 2], "y": [1]})
        with pytest.raises(
            TypeError, match=r"^'o': expected what JSON can hold, got an object; pass like=d.drop\('o'\)$"
        ):
            RowWriter(tmp_path / "t", like=DeviceDict({"x": torch.ones(1), "o": object()}, objects="keep"))
        with pytest.raises(TypeError, match=r"^'x': files take dense tensors, got one that is sparse"):
            RowWriter(tmp_path / "t", like={"x": torch.zeros(2, 2).to_sparse()})
        with pytest.raises(
            TypeError, match=r"has no JSON form; register its class with register_encoder; or pass like=d.to_dict\(\)"
        ):
            RowWriter(tmp_path / "t", like=DeviceDict({"x": ["a"]}, encoders={"x": lambda s: torch.zeros(len(s))}))
        assert not (tmp_path / "t").exists()
        several: tuple[dict[str, Any], ...] = ({}, {"like": sample(), "append": True})
        for options in several:
            with pytest.raises(
                TypeError,
                match=r"^RowWriter takes like=, a batch with the fields of a new table, or append=True; give one$",
            ):
                RowWriter(tmp_path / "t", **options)

    def test_more_columns_than_open_files(self, tmp_path: Path) -> None:
        many = {f"c{i}": [i] for i in range(150)}
        folder = written(tmp_path / "u", many)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (120, before[1]))
        several: tuple[Any, ...] = ((tmp_path / "t", {"like": many}), (folder, {"append": True}))
        try:
            for path, options in several:
                with pytest.raises(OSError, match="keeps one for each column: raise the limit, see ulimit -n"):
                    RowWriter(path, **options)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert os.listdir(tmp_path) == ["u"]
        with RowWriter(folder, append=True) as writer:
            writer.write(many)
        assert len(load(folder).rows) == 2

    def test_a_closed_writer(self, tmp_path: Path) -> None:
        writer = RowWriter(tmp_path / "t", like=sample())
        assert repr(writer) == f"RowWriter({str(tmp_path / 't')!r}, 0 rows)" and bool(writer)
        writer.close()
        writer.close()
        for call in (writer.flush, lambda: writer.write(sample())):
            with pytest.raises(ValueError, match=r"^this RowWriter is closed$"):
                call()
        with pytest.raises(TypeError, match=r"^a RowWriter cannot be pickled; send the folder, and load it there$"):
            pickle.dumps(writer)

    def test_a_writer_that_is_not_closed(self, tmp_path: Path) -> None:
        writer = RowWriter(tmp_path / "t", like=sample())
        writer.write(sample())
        message = (
            f"a RowWriter of {str(tmp_path / 't')!r} was not closed, and 3 rows are flushed only now; close it, or w"
        )
        with pytest.warns(RuntimeWarning, match=re.escape(message)):
            del writer
        assert load(tmp_path / "t") == sample()
        assert load(tmp_path / "t" / "x.safetensors")["x"].shape == (3, 2), "at rest"
        RowWriter(tmp_path / "t", append=True).close()

    @pytest.mark.parametrize("kind", ["new", "append", "overwrite"])
    @pytest.mark.parametrize("flushed", [0, 4])
    def test_an_exception_in_the_block(self, tmp_path: Path, small_buffers: None, kind: str, flushed: int) -> None:
        """The table has what was flushed, and it is at rest. The warning counts the other rows."""
        folder = tmp_path / "t"
        if kind != "new":
            with RowWriter(folder, like=sample()) as writer:
                writer.write(sample(2))
        before = 2 * (kind == "append")
        message = (
            f"^an exception left the block of a RowWriter of {re.escape(repr(str(folder)))}: 400 rows were not flush"
        )
        options: Any = {"append": True} if kind == "append" else {"like": sample()}
        writer = RowWriter(folder, **options, mode="overwrite" if kind == "overwrite" else None)
        if flushed:
            writer.write(sample(flushed, before))
            writer.flush()
        with pytest.warns(RuntimeWarning, match=message):
            failing_block(writer, sample(400, before + flushed))
        table = load(folder)
        assert table == sample(2 if kind == "overwrite" and not flushed else before + flushed)
        assert load(next(folder.glob("x*.safetensors")))["x"].shape == table["x"].shape, "at rest"
        assert len(os.listdir(folder)) == 5, "nothing is left over"
        writer = RowWriter(folder, append=True)
        writer.write(sample(5))
        writer.flush()
        failing_block(writer)  # without a warning, as no row is lost
        assert len(load(folder).rows) == len(table.rows) + 5

    @pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
    def test_a_forked_process_is_refused_at_once(self, tmp_path: Path) -> None:
        """Its rows would be lost in its copy of the buffers, without a word."""
        writer = RowWriter(tmp_path / "t", like=sample())
        writer.write(sample())
        parent = os.getpid()

        def leave(error: BaseException | None = None) -> None:
            with writer:
                if error:
                    raise error

        def in_the_child() -> None:
            for call in (lambda: writer.write(sample()), writer.flush, writer.close, leave, writer.flush):
                with pytest.raises(RuntimeError) as caught:
                    call()
                assert str(caught.value) == (
                    f"this RowWriter belongs to process {parent}, and this process was forked from it; "
                    "write, flush and close there, or write another table here"
                )
                writer._table.closed = False
            fails(KeyError, "mine", lambda: leave(KeyError("mine")))
            for copy_of in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(TypeError, match=r"^a RowWriter cannot be pickled"):
                    copy_of(writer)

        pid = os.fork()
        if not pid:
            try:
                in_the_child()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        with pytest.raises(BlockingIOError):
            RowWriter(tmp_path / "t", append=True)
        writer.close()
        assert load(tmp_path / "t") == sample()

    @pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
    def test_the_lock_is_released_while_a_forked_process_lives(self, tmp_path: Path) -> None:
        writer = RowWriter(tmp_path / "t", like=sample())
        pid = os.fork()
        if not pid:
            time.sleep(30)
            os._exit(0)
        writer.close()
        RowWriter(tmp_path / "t", append=True).close()
        os.kill(pid, 9)
        assert os.waitpid(pid, 0)[1] == 9


class TestReaders:
    def test_a_reader_keeps_its_view(self, tmp_path: Path, small_buffers: None) -> None:
        with RowWriter(tmp_path / "t", like=sample()) as writer:
            writer.write(sample())
            assert len(load(tmp_path / "t").rows) == 0
            writer.flush()
            table = load(tmp_path / "t")
            assert table == sample()
            writer.write(sample(500, 3))
            assert table == sample() == load(tmp_path / "t")
            writer.flush()
            assert table == sample() and load(tmp_path / "t") == sample(503)
        assert table == sample()

    def test_other_programs_read_every_column_at_rest(self, tmp_path: Path, small_buffers: None) -> None:
        folder = tmp_path / "t"
        for first in range(0, 900, 300):
            with RowWriter(folder, append=True) if first else RowWriter(folder, like=sample()) as writer:
                writer.write(sample(300, first))
                writer.flush()
                assert load(folder) == sample(first + 300)
            with safe_open(str(folder / "x.safetensors"), "pt") as file:
                assert set(file.keys()) == {"x"} and torch.equal(file.get_tensor("x"), sample(first + 300)["x"])
        assert load(folder / "x.safetensors")["x"].shape == (900, 2)

    def test_the_header_means_nothing_while_a_writer_is_open(self, tmp_path: Path) -> None:
        with RowWriter(tmp_path / "t", like=sample()) as writer:
            writer.write(sample())
            writer.flush()
            with open(tmp_path / "t" / "x.safetensors", "r+b") as file:
                file.write(b"!" * 4096)
            assert load(tmp_path / "t") == sample()
        assert load(tmp_path / "t" / "x.safetensors")["x"].shape == (3, 2)

    @pytest.mark.slow
    def test_loading_beside_a_writer(self, tmp_path: Path, record_property: Callable[[str, int], None]) -> None:
        folder = tmp_path / "t"
        program = f"""
import torch
from tensordict_lite.tables import RowWriter
from tensordict_lite.tables import table as table_writer
table_writer.BUFFER = 20_000
with RowWriter({str(folder)!r}, like={{"i": [0], "j": [[0] * 7]}}, checksums=True) as writer:
    while len(writer) < {300 * TIMES}:
        i = torch.arange(len(writer), len(writer) + 100)
        writer.write({{"i": i, "j": i[:, None].expand(100, 7)}})
        writer.flush()
"""
        with subprocess.Popen([sys.executable, "-c", program]) as process:
            seen: set[int] = set()
            loads = 0
            while process.poll() is None:
                if (folder / "table.json").exists():
                    table = load(folder)
                    i = torch.arange(len(table.rows))
                    assert torch.equal(table["i"], i) and torch.equal(table["j"], i[:, None].expand(-1, 7))
                    seen.add(len(i))
                    verify(folder)
                    loads += 1
        assert process.returncode == 0 and len(seen) > 20 and len(load(folder).rows) == 300 * TIMES
        record_property("loads", loads)

    @pytest.mark.parametrize("method", ["fork", "forkserver"])
    @pytest.mark.slow
    def test_workers(self, tmp_path: Path, method: str) -> None:
        x = torch.arange(600_000.0).reshape(-1, 2)
        folder = written(tmp_path / "t", {"x": x, "n": {"i": torch.arange(len(x))}})
        rows: Any = load(folder).rows
        loader = DataLoader(
            Subset(rows, range(0, len(x), 100)), 500, num_workers=2, multiprocessing_context=method, collate_fn=collate
        )
        found = [batch for batch in loader]  # noqa: C416
        assert torch.equal(torch.cat([batch["x"] for batch in found]), x[::100])

    @pytest.mark.slow
    def test_another_process_gets_the_name_of_the_file(self, tmp_path: Path) -> None:
        x = torch.rand(400_000, 2)
        folder = written(tmp_path / "t", {"x": x, "n": {"y": x.double()}, "small": x[:, 0].to(torch.bool)})
        table = load(folder)
        program = f"""
import pickle, sys, torch
rows = pickle.loads(sys.stdin.buffer.read())
whole = rows[:]
assert len(rows) == 400_000 and whole["n", "y"][7, 1] == {x[7, 1].item()!r}
assert "/t/x.safetensors" in open("/proc/self/maps").read()
whole["x"].zero_()
"""
        table = load(folder, keys=["x", "n"])  # the small field is sent by value
        data = bytes(ForkingPickler.dumps(table.rows))
        assert len(data) < 4000
        subprocess.run([sys.executable, "-c", program], input=data, check=True)
        assert torch.equal(table["x"], x)
        again: Any = pickle.loads(data)
        assert again[:] == table
        again = pickle.loads(ForkingPickler.dumps(table.rows[1:]))
        assert torch.equal(again["x"], x[1:]) and len(ForkingPickler.dumps(again)) < 3000, "a handle again"

    @pytest.mark.parametrize(("count", "huge"), [(256, False), (1000, True)])
    def test_only_a_large_result_gets_huge_pages(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, huge: bool
    ) -> None:
        """By the size of the result, not of the table."""
        with RowWriter(tmp_path / "t", like={"x": torch.zeros(1, 10_000), "n": [0]}) as writer:
            writer.write({"x": torch.rand(300, 10_000), "n": torch.arange(300)})
        table = load(tmp_path / "t")
        made: list[int] = []
        new_buffer = row_copies.new_buffer

        def record(nbytes: int, device: torch.device) -> Tensor:
            made.append(nbytes)
            return new_buffer(nbytes, device)

        monkeypatch.setattr(row_copies, "new_buffer", record)
        index = torch.randint(300, (count,))
        found = table.rows[index]
        assert made == ([count * 40_000] if huge else [])
        assert found["x"].equal(table["x"][index]) and found["n"].equal(index)

    @pytest.mark.parametrize("name", CHANGES)
    def test_a_field_that_was_written_is_sent_by_value(self, tmp_path: Path, name: str) -> None:
        x = torch.rand(400_000, 2)
        table = load(written(tmp_path / "t", {"x": x}))
        sent = bytes(ForkingPickler.dumps(table.rows))
        view = table.rows[1:]
        CHANGES[name](table)
        assert not torch.equal(table["x"], x)
        for d in (table, table.rows[:], view, table.detach(), table.copy(), table.select("x")):
            again: Any = pickle.loads(ForkingPickler.dumps(d))
            assert torch.equal(again["x"], d["x"])
        assert torch.equal(pickle.loads(sent)[:]["x"], x), "not the changed mapping of this process"

    def test_a_write_to_a_tensor_with_a_version_of_its_own(self, tmp_path: Path) -> None:
        table = load(written(tmp_path / "t", {"x": torch.rand(400_000, 2)}))
        alias = DeviceDict({"x": table["x"].data})
        alias["x"][0] = -1
        again: Any = pickle.loads(ForkingPickler.dumps(alias))
        assert again["x"][0, 0] == -1 and len(ForkingPickler.dumps(table)) < 3000

    def test_a_file_that_was_replaced_is_not_mapped_again(self, tmp_path: Path) -> None:
        x = torch.rand(400_000, 2)
        folder = written(tmp_path / "t", {"x": x})
        table = load(folder)
        sent = bytes(ForkingPickler.dumps(table))
        shutil.move(folder, tmp_path / "old")
        again: Any = pickle.loads(ForkingPickler.dumps(table))
        assert torch.equal(again["x"], x), "by value"
        written(folder, {"x": x * 0})
        with pytest.raises(
            OSError, match="was replaced after a dict that maps it was sent to this process; load it here"
        ):
            pickle.loads(sent)

    def test_a_table_larger_than_the_memory(self, tmp_path: Path) -> None:
        with RowWriter(tmp_path / "t", like={"x": torch.zeros(1, 1 << 20, dtype=torch.uint8)}) as writer:
            writer.write({"x": torch.ones(1, 1 << 20, dtype=torch.uint8)})
        rows = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 2 >> 20
        column = tmp_path / "t" / "x.safetensors"
        with open(column, "r+b") as file:  # a file with a hole
            file.truncate(4096 + (rows << 20))
        edited(tmp_path / "t", lambda index: index.update(rows=rows))
        RowWriter(tmp_path / "t", append=True).close()  # writes the header
        table = load(tmp_path / "t")
        assert len(table.rows) == rows and table["x"][0, -1] == 1 and table["x"][-1, 0] == 0
        assert len(ForkingPickler.dumps(table.select("x"))) < 3000
        with safe_open(str(column), "np") as file:  # with "pt", safetensors maps no file that is larger than the memory
            assert file.get_slice("x").get_shape() == [rows, 1 << 20]


class TestSeveral:
    """`cat` of several files and tables of one schema."""

    def files(self, folder: Path) -> list[Path]:
        sample(3).save(folder / "a")
        written(folder / "b", sample(2, 3))
        DeviceDict({**sample(4, 5), "name": ["wide"] * 3 + ["row 8"]}, encoders={"species": SPECIES}).save(folder / "c")
        return [folder / name for name in "abc"]

    def test_files_and_tables(self, tmp_path: Path) -> None:
        whole = cat([load(path) for path in self.files(tmp_path)])
        assert torch.equal(whole["x"], sample(9)["x"]) and torch.equal(whole["n", "z"], sample(9)["n", "z"])
        assert whole.decode("species") == sample(9).decode("species") and whole["n", "empty"] == {}
        assert whole.decode("name") == [*(f"row {i}" for i in range(5)), "wide", "wide", "wide", "row 8"]

    def test_typed(self, tmp_path: Path) -> None:
        for name in "ab":
            written(tmp_path / name, Step(x=torch.zeros(2, 3), obs=Obs(state=torch.ones(2))))
        whole = cat([Step.load(tmp_path / name) for name in "ab"])
        assert type(whole) is Step and type(whole.obs) is Obs and len(whole.rows) == 4 and whole.w is None

    @pytest.mark.parametrize(("change", "message"), [
        ({"x": torch.zeros(3, 3)}, r"^'x': dict 3 has float32\[3, 3\], dict 0 has float32\[3, 2\]$"),
        ({"n": {"z": [1]}}, r"^dict 3 lacks 'n.empty', which dict 0 has$"),
        ({"y": [1]}, r"^dict 3 has 'y', which dict 0 lacks$"),
        ({"x": ["a"]}, r"^'x': dict 3 has uint8\[1, 1\], dict 0 has float32\[3, 2\]$"),
    ])  # fmt: skip
    def test_another_schema_is_named_with_its_position(self, tmp_path: Path, change: Any, message: str) -> None:
        DeviceDict({**sample(3), **change}, encoders=sample().encoders).save(tmp_path / "d")
        fails(ValueError, message, lambda: cat([load(path) for path in [*self.files(tmp_path), tmp_path / "d"]]))

    def test_a_list_of_paths_is_refused_with_the_way_out(self, tmp_path: Path) -> None:
        several: Any = [tmp_path, tmp_path]
        with pytest.raises(
            TypeError,
            match=r"^load takes one path; cat\(\[load\(path\) for path in paths\]\) joins the dicts of several files$",
        ):
            load(several)


def write_on(writer: RowWriter, count: int) -> None:
    while True:
        writer.write({"x": torch.ones(count, 1000)})


class TestFullDisk:
    def fill(self, folder: Path, limit: int | None = None) -> None:
        with RowWriter(folder, like={"x": torch.zeros(1, 1000)}) as writer:
            writer.write({"x": torch.ones(300, 1000)})
            writer.flush()
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            if limit:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
            try:
                with pytest.raises(OSError, match=r"; the table keeps the 300 rows of the last flush: ") as caught:
                    write_on(writer, 400)
                assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
                held = len(writer)
                fails(OSError, "the 300 rows", lambda: write_on(writer, 2000))
                assert torch.equal(load(folder)["x"], torch.ones(300, 1000))
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
            if limit is None:
                os.unlink(folder.parent / "ballast")
            writer.flush()  # now there is room
            assert len(writer) == held
        assert torch.equal(load(folder)["x"], torch.ones(held, 1000))
        with safe_open(str(folder / "x.safetensors"), "pt") as file:
            assert file.get_slice("x").get_shape() == [held, 1000]
        assert set(os.listdir(folder)) == {"table.json", "x.safetensors"}

    def test_the_limit_of_a_file(self, tmp_path: Path) -> None:
        self.fill(tmp_path / "t", 6_000_000)

    def test_a_small_file_system(self, tmp_path: Path) -> None:
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=20m", "none", str(tmp_path)], capture_output=True, check=False
        )
        if made.returncode:
            pytest.skip("cannot mount a file system")
        try:
            (tmp_path / "ballast").write_bytes(bytes(13 << 20))
            self.fill(tmp_path / "t")
        finally:
            subprocess.run(["umount", str(tmp_path)], check=True)

    def test_a_close_that_fails_releases_the_table(self, tmp_path: Path) -> None:
        writer = RowWriter(tmp_path / "t", like={"x": torch.zeros(1, 1000)})
        writer.write({"x": torch.ones(200, 1000)})
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        try:
            fails(OSError, "the table keeps the 0 rows of the last flush", writer.close)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        with RowWriter(tmp_path / "t", append=True) as writer:
            assert len(writer) == 0
            writer.write({"x": torch.ones(2, 1000)})
        assert (tmp_path / "t" / "x.safetensors").stat().st_size == 4096 + 8000


def edited(folder: Path, change: Any) -> None:
    index = json.loads((folder / "table.json").read_text())
    change(index)
    write_index(folder, index)


def refused(folder: Path, message: str) -> None:
    for call in (lambda: load(folder), lambda: RowWriter(folder, append=True)):
        with pytest.raises(InvalidFileError, match=message) as caught:
            call()
        assert str(caught.value).startswith(f"{folder}: not a valid file: ")


class TestDamaged:
    @pytest.mark.parametrize(("change", "message"), [
        (lambda i: i.update(rows=4), r"has \d+ bytes, and 4 rows take \d+"),
        (lambda i: i.update(rows=1 << 62), "rows take"),
        (lambda i: i.update(rows=1 << 63), "the row count or the columns in its table.json are damaged"),
        (lambda i: i.update(rows=-1), "damaged"),
        (lambda i: i.update(rows=True), "damaged"),
        (lambda i: i.update(version=3), "its version is 3, and this package reads version 2; update the package"),
        (lambda i: i.pop("version"), "has no version"),
        (lambda i: i.update(version=1), "has other fields than"),
        (lambda i: i.update(part={"number": 2, "of": 2}), "the number of the part in its table.json is damaged"),
        (lambda i: i.update(part=1), "expected 'part' with the fields number, of"),
        (lambda i: i.update(part={"number": True, "of": 2}), "'number' of 'part' is not a int"),
        (lambda i: i.update(more=1), "has other fields than"),
        (lambda i: i.update(columns=[]), "it has no columns"),
        (lambda i: i["columns"].pop(), "tree does not contain each of the 3 tensors exactly once"),
        (lambda i: i["columns"][0].update(file="../x.safetensors"), "is no name of a column file"),
        (lambda i: i["columns"][0].update(file="/etc/passwd"), "is no name of a column file"),
        (lambda i: i["columns"][0].update(file="name.safetensors"), "two columns have the same file"),
        (lambda i: i["columns"][0].update(file="none.safetensors"), "the file 'none.safetensors' is missing"),
        (lambda i: i["columns"][0].update(dtype="float1"), "is no dtype of a column"),
        (lambda i: i["columns"][0].update(shape=[-1]), "the shape of the column 'x' is damaged"),
        (lambda i: i["columns"][0].update(shape=[1] * 64), "the shape of the column 'x' is damaged"),
        (lambda i: i["columns"][0].update(shape=[1 << 62, 1 << 62]), "rows take|overflowed"),
        (lambda i: i["columns"][0].pop("shape"),
         "expected a column with the fields file, name, dtype, shape, kind, id"),
        (lambda i: i["columns"][0].update(id=1), "'id' of a column is not a str"),
        (lambda i: i["columns"][0].update(name=1), "'name' of a column is not a str"),
        (lambda i: i["columns"].insert(0, 1), "expected a column with the fields"),
        (lambda i: i["manifest"].pop("root"), "expected a manifest with the fields"),
        (lambda i: i.update(manifest=[]), "it has no version"),
    ])  # fmt: skip
    def test_a_forged_index(self, tmp_path: Path, change: Any, message: str) -> None:
        folder = written(tmp_path / "t", sample())
        edited(folder, change)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        refused(folder, message)
        assert before == {path.name: path.read_bytes() for path in folder.iterdir()}

    def test_zero_width_with_many_rows(self, tmp_path: Path) -> None:
        folder = written(tmp_path / "t", {"x": torch.zeros(2, 0)})
        edited(
            folder, lambda index: (index["columns"][0].update(shape=[1 << 62, 0, 1 << 62]), index.update(rows=1 << 62))
        )
        with pytest.raises(InvalidFileError):
            load(folder)

    @pytest.mark.parametrize("size", [0, 7, 4000, 4096, 4096 + 23])
    def test_a_truncated_column(self, tmp_path: Path, size: int) -> None:
        folder = written(tmp_path / "t", sample())
        os.truncate(folder / "x.safetensors", size)
        refused(folder, f"'x.safetensors' has {size} bytes, and 3 rows take 4120")

    def test_things_that_are_no_files(self, tmp_path: Path) -> None:
        folder = written(tmp_path / "t", sample())
        (folder / "x.safetensors").unlink()
        os.mkfifo(folder / "x.safetensors")
        fails(OSError, "is not a regular file", lambda: load(folder))
        (folder / "table.json").unlink()
        os.mkfifo(folder / "table.json")
        fails(OSError, "is not a regular file", lambda: load(folder))

    @pytest.mark.parametrize("name", ["x.safetensors", "table.json"])
    @pytest.mark.parametrize("rows", [0, 3])
    @pytest.mark.parametrize("replace", [
        lambda path, victim: path.symlink_to(victim),
        lambda path, victim: path.symlink_to("../" + victim.name),
        lambda path, victim: path.hardlink_to(victim),
        lambda path, victim: os.mkfifo(path),
    ], ids=["symbolic", "relative", "hard", "pipe"])  # fmt: skip
    def test_a_writer_follows_no_link(self, tmp_path: Path, name: str, rows: int, replace: Any) -> None:
        """A forged table may have a link to any file of the user in the place of its own."""
        folder = written(tmp_path / "t", sample(rows))
        victim = tmp_path / "victim"
        shutil.copy(folder / name, victim)  # it passes every other check
        if name != "table.json":
            with open(victim, "ab") as file:
                file.write(b" " * 100)
        before = victim.read_bytes()
        (folder / name).unlink()
        replace(folder / name, victim)
        if rows or name == "table.json":
            with pytest.raises(OSError) as caught:  # noqa: PT011
                RowWriter(folder, append=True)
            assert str(caught.value) == (
                f"{str(folder / name)!r} is a link or no regular file, and a RowWriter changes only files of its own; "
                "copy the table to a new folder, with files in the place of links"
            )
            if (folder / name).is_file():
                assert load(folder) == sample(rows)  # as in the cache of a hub, whose files are links
        else:  # a table without rows gets new files
            with RowWriter(folder, append=True) as writer:
                writer.write(sample())
            assert load(folder) == sample()
        assert victim.read_bytes() == before

    def test_a_link_in_the_place_of_the_new_index(self, tmp_path: Path) -> None:
        folder = written(tmp_path / "t", sample())
        victim = tmp_path / "victim"
        victim.write_text("mine")
        (folder / ".table.json.tmp").symlink_to(victim)
        with RowWriter(folder, append=True) as writer:
            (folder / ".table.json.tmp").symlink_to(victim)
            writer.write(sample(3, 3))
        assert victim.read_text() == "mine" and load(folder) == sample(6)
        assert not (folder / ".table.json.tmp").is_symlink()

    def test_a_folder_that_is_replaced_while_a_writer_is_open(self, tmp_path: Path) -> None:
        folder = written(tmp_path / "t", sample())
        other = written(tmp_path / "u", sample(1, 7))
        with RowWriter(folder, append=True) as writer:
            folder.rename(tmp_path / "mine")
            folder.symlink_to(other)
            writer.write(sample(3, 3))
        assert load(other) == sample(1, 7) and load(tmp_path / "mine") == sample(6)

    def test_a_huge_index_is_not_parsed(self, tmp_path: Path) -> None:
        folder = written(tmp_path / "t", sample())
        (folder / "table.json").write_text("[" * 600_000)
        refused(folder, "its table.json is too long")
        with open(folder / "table.json", "wb") as file:
            file.truncate(1 << 40)
        refused(folder, "its table.json is too long")

    @pytest.mark.slow
    def test_random_damage(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Any change of any byte gives a table or `InvalidFileError`, for readers and for writers."""
        for name in ("fsync", "fdatasync"):  # they take most of the time
            monkeypatch.setattr(os, name, lambda _: None)
        whole = written(tmp_path / "whole", sample())
        chance, refusals = random.Random(0), 0
        files = sorted(path.name for path in whole.iterdir())
        for _ in range(500):
            folder = tmp_path / "t"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(whole, folder)
            name = chance.choice([*files, "table.json", "table.json"])
            data = bytearray((folder / name).read_bytes())
            limit = len(data) if name == "table.json" else 200
            for _ in range(chance.choice((1, 1, 3))):
                at = chance.randrange(limit)
                action = chance.randrange(4)
                if action == 0:
                    data[at] = chance.randrange(256)
                elif action == 1:
                    data[at : at + chance.randrange(1, 20)] = b""
                elif action == 2:
                    data[at:at] = chance.choice(
                        [b"9", b"0", b"-", b'"', b"[", b"null", b"1e9", b"99999999999", bytes(5)]
                    )
                else:
                    del data[at:]
                    break
                limit = max(1, min(limit, len(data)))
            (folder / name).write_bytes(data)
            try:
                table = load(folder)
                table.rows[:].clone()
                with warnings.catch_warnings():
                    RowWriter(folder, append=True).close()
            except (InvalidFileError, IsADirectoryError):
                refusals += 1
        assert 100 < refusals < 500


def test_rows_that_a_crash_left_are_removed(tmp_path: Path, small_buffers: None) -> None:
    folder = written(tmp_path / "t", sample())
    with open(folder / "x.safetensors", "ab") as file:
        file.write(bytes(1000))  # rows that were not flushed
    assert load(folder) == sample()
    (folder / ".table.json.tmp").touch()
    RowWriter(folder, append=True).close()
    assert (folder / "x.safetensors").stat().st_size == 4096 + 24
    assert ".table.json.tmp" not in os.listdir(folder)
    with RowWriter(folder, append=True) as writer:
        writer.write(sample(3, 3))
    assert load(folder) == sample(6)


def ragged(count: int = 3, first: int = 0) -> DeviceDict:
    """Jagged columns of numbers and of text beside a plain one."""
    i = range(first, first + count)
    samples = [{"x": n, "ids": torch.arange(n % 4), "text": torch.tensor([97] * (n % 5 + 1)).byte()} for n in i]
    return collate(samples, ragged=["ids", "text"], encoders={"text": Utf8()})


@pytest.mark.parametrize("sample", [sample, ragged])
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt just after open()
def test_an_interrupt_between_any_two_lines(
    tmp_path: Path, small_buffers: None, sample: Callable[..., DeviceDict]
) -> None:
    """An interrupt in any line of the writer leaves a table with whole rows, and the writer goes on."""

    def run(stop: int) -> bool:
        folder = tmp_path / str(stop)
        lines = 0

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal lines
            if "tensordict_lite/tables/" not in frame.f_code.co_filename or frame.f_code.co_name in (
                "_write_all",
                "release",
                "close",
            ):
                return trace if event == "call" else None
            lines += event == "line"
            if lines == stop and event == "line":
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        writer = RowWriter(folder, like=sample())
        writer.write(sample(40))
        writer.flush()
        expected = 40
        sys.settrace(trace)
        try:
            writer.write(sample(40, 40))
            expected = 80
            writer.flush()
            interrupted = False
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(None)
        assert load(folder) in (sample(40), sample(80))
        if len(writer) == 40:
            writer.write(sample(40, 40))
        assert len(writer) == 80 and expected in (40, 80)
        writer.write(sample(40, 80))
        writer.close()
        assert load(folder) == sample(120)
        with safe_open(str(folder / "x.safetensors"), "pt") as file:
            assert file.get_slice("x").get_shape()[0] == 120
        if "ids" in load(folder):
            with safe_open(str(folder / "ids.offsets.safetensors"), "pt") as file:
                assert file.get_slice("ids.offsets").get_shape()[0] == 121
        shutil.rmtree(folder)
        return interrupted

    stop = 1
    while run(stop):
        stop += 5
    assert stop > 80


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_the_golden_tables(tmp_path: Path) -> None:
    made = make.table()
    for version in (1, 2):
        shutil.copytree(GOLDEN / f"table-{version}", tmp_path / "old")
        table = load(tmp_path / "old")
        assert table == made and table.encoders == made.encoders and table.decode("name") == ["Ada", "Bo"]
        with RowWriter(tmp_path / "old", append=True) as writer:
            writer.write(made)
        verify(tmp_path / "old")
        assert load(tmp_path / "old") == cat([made, made])
        shutil.rmtree(tmp_path / "old")
        ragged = load(GOLDEN / f"ragged-{version}")
        assert ragged.decode("text") == ["Ada", "", "é"]
        assert ragged["n"].tolist() == {"ids": [[1, 2], [], [3]], "box": [[[0.5]], [], [[1], [2]]]}
    make.save_table(tmp_path)
    for name in (make.TABLE, make.RAGGED):
        edited(tmp_path / name, lambda index: [column.update(id="") for column in index["columns"]])  # they are random
        assert len(list((tmp_path / name).iterdir())) == len(list((GOLDEN / name).iterdir()))
        for path in (GOLDEN / name).iterdir():
            assert (tmp_path / name / path.name).read_bytes() == path.read_bytes()


class TestVersions:
    @pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
    @pytest.mark.parametrize("sample", [sample, ragged])
    def test_the_table_as_it_was(self, tmp_path: Path, sample: Callable[..., DeviceDict]) -> None:
        folder = tmp_path / "t"
        with RowWriter(folder, like=sample()) as writer:
            for first in (0, 3, 6):
                writer.write(sample(3, first))
                writer.flush()
            assert len(load(folder, rows=0).rows) == 0
            for count in (3, 7, 9):
                found = load(folder, rows=count), DeviceDict.load(folder, rows=count)
                assert [d.tolist() for d in found] == [sample(count).tolist()] * 2

    def test_refused(self, tmp_path: Path) -> None:
        folder = written(tmp_path / "t", sample())
        fails(ValueError, r"t' has 3 rows, and rows=4 asks for more$", lambda: load(folder, rows=4))
        for rows in (-1, True, 2.0):
            with pytest.raises(ValueError, match=r"^rows= is the number of rows to load, got "):
                load(folder, rows=rows)  # type: ignore[arg-type]
        sample().save(tmp_path / "f")
        with pytest.raises(ValueError, match=r"^rows= is for tables, which are folders; '.*f' is none: load\(path\)"):
            load(tmp_path / "f", rows=1)


class TestModes:
    def test_append_creates_or_appends(self, tmp_path: Path) -> None:
        for first in (0, 3, 6):
            with RowWriter(tmp_path / "t", like=sample(), mode="append") as writer:
                assert len(writer) == first
                writer.write(sample(3, first))
        assert load(tmp_path / "t") == sample(9)

    @pytest.mark.parametrize(("like", "message"), [
        ({"x": torch.zeros(1, 3)}, r"^'x': expected rows \[..., 2\] or one row \[2\], got float32\[0, 3\]$"),
        ({"y": [1]}, "^the given mapping has 'y', which the table lacks$"),
        ({"name": [1]}, r"^'name': expected rows \[..., 12\] or one row \[12\], got int64\[0\]$"),
    ])  # fmt: skip
    def test_append_with_other_fields(self, tmp_path: Path, like: Any, message: str) -> None:
        folder = written(tmp_path / "t", sample())
        other = DeviceDict({**sample(1).select("x", "species", "n"), "name": sample(1)["name"], **like})
        fails(ValueError, message, lambda: RowWriter(folder, like=other, mode="append"))
        RowWriter(folder, append=True).close()
        assert load(folder) == sample()

    @pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
    def test_append_with_other_ragged_columns(self, tmp_path: Path) -> None:
        like: Any = {"like": {"ids": [[1]]}, "mode": "append"}
        with RowWriter(tmp_path / "t", ragged=["ids"], **like) as writer:
            writer.write({"ids": [[1, 2], []]})
        with pytest.raises(ValueError, match=r"^'ids': expected a ragged field as in this table, got a tensor of like"):
            RowWriter(tmp_path / "t", **like)
        with RowWriter(tmp_path / "t", ragged=["ids"], **like) as writer:
            writer.write({"ids": [3]})
        assert load(tmp_path / "t").tolist() == {"ids": [[1, 2], [], [3]]}

    def test_overwrite_replaces_at_once(self, tmp_path: Path, small_buffers: None) -> None:
        folder = tmp_path / "t"
        before: Any = None
        for count in (300, 5, 0):
            with RowWriter(folder, like=sample(), mode="overwrite") as writer:
                writer.write(sample(count, 7))
                if before is not None:
                    assert before == load(folder)
            assert before is None or (len(before.rows) in (300, 5) and before["x"][-1].sum() == 0), "mapped rows stay"
            before = load(folder)
            assert before == sample(count, 7) and len(os.listdir(folder)) == 5
        with RowWriter(folder, like={"y": [0]}, mode="overwrite") as writer:
            writer.write({"y": [1, 2]})
            writer.flush()
            assert load(folder)["y"].tolist() == [1, 2] and len(os.listdir(folder)) == 2
        with RowWriter(folder, like={"z": [0]}, mode="overwrite") as writer:
            writer.flush()
            assert load(folder).tolist() == {"z": []}, "without rows too"

    @pytest.mark.parametrize("change", ["overwrite", "overwrite twice", "the same column again", "a new folder"])
    def test_a_table_that_is_replaced_while_it_is_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
    ) -> None:
        """Another process gives the names of the files to new columns, after `load` or `verify` opened one of them."""
        folder = tmp_path / "t"

        def replace() -> None:
            if change == "the same column again":
                drop_column(folder, ("n", "z"))
                return add_column(folder, ("n", "z"), [torch.ones(3, dtype=torch.complex128)])
            if change == "a new folder":
                shutil.rmtree(folder)
            for _ in range(2 if change == "overwrite twice" else 1):
                with RowWriter(folder, like=sample(), checksums=True, mode="overwrite") as writer:
                    writer.write(sample(5, 7))

        table_verify = importlib.import_module("tensordict_lite.tables.verify")
        for module, name, read in ((table_reader, "_map_field", load), (table_verify, "check_size", verify)):
            for at in (1, 2, 4):
                shutil.rmtree(folder, ignore_errors=True)
                with RowWriter(folder, like=sample(), checksums=True) as writer:
                    writer.write(sample())
                do, calls = getattr(module, name), list[int]()

                def replaced_first(*args: Any, do: Any = do, at: int = at, calls: list[int] = calls) -> Any:
                    calls.append(1)
                    if len(calls) == at:
                        replace()
                    return do(*args)

                with monkeypatch.context() as patch:
                    patch.setattr(module, name, replaced_first)
                    found = read(folder)
                assert len(calls) > 4 and (found is None or found == load(folder))

    def test_new_rows_do_not_start_a_reader_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder, calls = written(tmp_path / "t", sample()), list[int]()
        map_field = table_reader._map_field
        with RowWriter(folder, append=True) as writer:

            def append_first(*args: Any) -> Any:
                calls.append(1)
                writer.write(sample(1))
                writer.flush()
                return map_field(*args)

            monkeypatch.setattr(table_reader, "_map_field", append_first)
            assert load(folder) == sample() and len(calls) == 4

    def test_a_new_table_that_is_not_flushed(self, tmp_path: Path) -> None:
        folder = written(tmp_path / "t", sample())
        writer = RowWriter(folder, like={"x": [0]}, mode="overwrite")
        writer.write({"x": [1]})
        writer._table.release()  # as a kill does
        assert load(folder) == sample() and len(os.listdir(folder)) == 6
        again = RowWriter(folder, like={"x": [0]}, mode="overwrite")
        again._table.release()
        assert load(folder) == sample() and len(os.listdir(folder)) == 7
        repair(folder)
        assert load(folder) == sample() and len(os.listdir(folder)) == 5

    def test_overwrite_refuses_other_folders(self, tmp_path: Path) -> None:
        (tmp_path / "mine").touch()
        with pytest.raises(FileExistsError, match=r"is not empty; a table needs a folder of its own$"):
            RowWriter(tmp_path, like=sample(), mode="overwrite")
        folder = written(tmp_path / "t", sample())
        edited(folder, lambda index: index.update(rows=-1))
        with pytest.raises(InvalidFileError, match=r"the row count or the columns in its table.json are damaged"):
            RowWriter(folder, like=sample(), mode="overwrite")

    @pytest.mark.parametrize(("options", "error", "message"), [
        ({"mode": "w", "like": {"x": [0]}}, ValueError, "takes mode='append' or mode='overwrite', got 'w'$"),
        ({"mode": "append"}, TypeError, "takes mode='append' with like=, a batch with the fields of the table$"),
        ({"mode": "overwrite", "append": True}, TypeError, "takes mode='overwrite' with like="),
    ])  # fmt: skip
    def test_options(self, tmp_path: Path, options: Any, error: type[Exception], message: str) -> None:
        fails(error, f"^RowWriter {message}", lambda: RowWriter(tmp_path / "t", **options))
        assert not os.listdir(tmp_path)


def test_two_writers_where_locks_do_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_folder, "fcntl", None)
    folder = written(tmp_path / "t", sample())
    one, two = RowWriter(folder, append=True), RowWriter(folder, append=True)
    for writer in (one, two):
        writer.write(sample(3, 3))
    for call in (one.flush, one.close, lambda: one.write(sample())):
        with pytest.raises((BlockingIOError, ValueError)) as caught:
            call()
        if call == one.flush:
            assert str(caught.value) == (
                "[Errno 11] another RowWriter has written to this table, and the file system did not lock it out; let "
                f"one process write a table at a time: {str(folder)!r}"
            )
    two.close()
    assert load(folder) == sample(6)


class TestRepair:
    def test_it_needs_no_encoder(self, tmp_path: Path) -> None:
        tokens: Any = lambda strings: torch.zeros(len(strings), 2, dtype=torch.int64)  # noqa: E731
        folder = written(tmp_path / "t", {"x": [1, 2], "n": {"y": [3, 4]}})
        edited(folder, lambda index: index["manifest"]["encoders"].append({"name": "mine"}))
        edited(folder, lambda index: index["manifest"]["policies"][0]["encoders"].update(x=0))
        with open(folder / "x.safetensors", "ab") as file:
            file.write(bytes(100))
        repair(folder)
        assert load(folder / "x.safetensors")["x"].tolist() == [1, 2]
        assert load(folder, encoders={"x": tokens})["x"].tolist() == [1, 2]

    def test_errors(self, tmp_path: Path) -> None:
        folder = written(tmp_path / "t", sample())
        with RowWriter(folder, append=True), pytest.raises(BlockingIOError, match="is open in a RowWriter"):
            repair(folder)
        fails(IsADirectoryError, r"no table: it has no table.json", lambda: repair(tmp_path))
        with pytest.raises(FileNotFoundError):
            repair(tmp_path / "none")
        edited(folder, lambda index: index.update(rows=4))
        fails(InvalidFileError, r"has \d+ bytes, and 4 rows take \d+", lambda: repair(folder))
