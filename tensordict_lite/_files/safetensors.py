"""Save a dict as a safetensors file, and load it.

The format is https://github.com/huggingface/safetensors: the length of a JSON header, the header, and the bytes of the
tensors. The safetensors library reads and validates files. This module writes the files itself. The writer of the
library

- renames the file before its bytes are on disk,
- needs all tensors on the host at the same time.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import stat
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from io import BufferedReader
from itertools import chain, count
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .._encoders.protocol import StringEncoder
from .._errors import InvalidFileError, Path, dotted, dtype_name
from .._memory.buffer import view_over
from .._memory.dense import dense_bytes, not_dense
from .._memory.device import CPU
from .._memory.dtypes import STORED
from .._memory.layout import ALIGNMENT, row_major
from .._memory.mapped import map_file
from .._memory.packed import MAX_DIMENSIONS
from .._memory.transfer import transfer
from .._tree.manifest import Manifest, Reader, describe, invalid, refuse_kept
from .._tree.missing import refuse_unknown_encoders
from .._tree.policy import Encoders, Policy
from .._tree.tree import TreeDict
from .atomic_write import FilePath, atomic_write

MANIFEST = "tensordict_lite"
"""The key of the manifest in the metadata."""
MAX_MANIFEST = 16 << 20
"""The largest manifest in characters, far above any real manifest. Parsing takes at most a few hundred MB."""
_MAX_BRACKETS = 500_000
"""The largest number of brackets in a manifest. A tensor needs one bracket. Empty lists take the most memory: 64 bytes
for 2 characters."""
_CHUNK = 64 << 20
"""The number of bytes that `write` copies from a device to the host at a time."""
PAIRS = {"complex128": torch.float64, "complex32": torch.float16}
"""Dtypes that safetensors has no name for. They are stored as pairs of real numbers."""


def import_library() -> Any:
    """Import safetensors, which is optional. Raises ``ImportError`` if it is missing or too old."""
    try:
        library = importlib.import_module("safetensors")
        library.TensorSpec  # noqa: B018  (versions before 0.8 do not have this class)
    except (ImportError, AttributeError) as error:
        raise ImportError('files need safetensors: pip install "safetensors>=0.8"') from error
    return library


@cache
def _codes() -> dict[torch.dtype, str]:
    """The name of each dtype in safetensors files."""
    spec = import_library().TensorSpec
    names = {dtype: name for name, dtype in STORED.items() if name not in PAIRS}
    return {dtype: spec(dtype=name, shape=[], data_ptr=0, data_len=0).dtype for dtype, name in names.items()}


def stored_as(dtype: torch.dtype, shape: Sequence[int]) -> tuple[str, list[int]]:
    """The name of the dtype and the shape that a file has for a tensor."""
    pair = PAIRS.get(dtype_name(dtype))
    return (_codes()[dtype], [*shape]) if pair is None else (_codes()[pair], [*shape, 2])


# --- writing ---


def write(d: TreeDict[Any], path: FilePath) -> None:
    """Save ``d``: see `DeviceDict.save`."""
    import_library()
    manifest, leaves = describe(d, by_name)
    refuse_unwritable(leaves)
    tensors = [value for _, value in leaves]
    names = field_names([path for path, _ in leaves])
    dtypes = [dtype_name(tensor.dtype) for tensor in tensors]
    manifest["tensors"] = [[name, dtype] if dtype in PAIRS else name for name, dtype in zip(names, dtypes, strict=True)]
    text = json.dumps(manifest, separators=(",", ":"))
    if is_too_long(text):
        raise ValueError(
            f"the structure and encoders of this dict take {len(text)} characters, and a file holds {MAX_MANIFEST}; "
            "save fewer fields to a file, or give large encoders a registered name of their own"
        )
    # Tensors with a large item size come first, so that every tensor is aligned.
    order = sorted(range(len(tensors)), key=lambda i: -tensors[i].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {MANIFEST: text}}
    end = 0
    for i in order:
        dtype, shape = stored_as(tensors[i].dtype, tensors[i].shape)
        start, end = end, end + tensors[i].nbytes
        header[names[i]] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-(8 + len(encoded)) % ALIGNMENT)  # align the first tensor
    data = map(bytes_of, _on_host(tensors[i] for i in order))
    atomic_write(path, chain([len(encoded).to_bytes(8, "little") + encoded], data))


def by_name(
    encoder: StringEncoder, error: TypeError | None, way_out: str = "save(d.to_dict(), path)"
) -> dict[str, Any]:
    """The manifest entry of an encoder that `load` does not build: its name. With ``error``, raises ``TypeError``."""
    if error is not None:
        raise TypeError(f"{error}; or {way_out}, the tensors alone") from error
    return {"name": encoder.name}  # the user passes this encoder to load(): building it would run code


def refuse_unwritable(leaves: Sequence[tuple[Path, Any]], way_out: str = "d.drop({}).save(path)") -> None:
    """Raise ``TypeError`` for the first leaf that a file cannot hold.

    ``way_out``: what to do about kept objects. ``{}`` stands for their keys.
    """
    refuse_kept(leaves, way_out)
    for path, tensor in leaves:
        if reason := not_dense(tensor):
            raise TypeError(f"{dotted(path)}: files take dense tensors, got one that is {reason}; convert or drop it")
        if tensor.dtype not in STORED.values():
            raise TypeError(f"{dotted(path)}: files take no {tensor.dtype}; save .view(torch.uint8) of it")
    if sys.byteorder != "little":
        raise NotImplementedError("files are written on little-endian machines only")


def field_names(paths: Sequence[Path]) -> list[str]:
    """A name for each tensor: its dotted path, made distinct."""
    taken = {"__metadata__"}
    return [distinct(".".join(path).encode("utf-8", "replace").decode(), taken) for path in paths]


def distinct(name: str, taken: set[str], fold: Callable[[str], str] = str) -> str:
    """``name``, with a number if it is in ``taken``. Names are compared after ``fold``, and added to ``taken``."""
    out = next(one for n in count(1) if fold(one := name if n == 1 else f"{name}~{n}") not in taken)
    taken.add(fold(out))
    return out


def _on_host(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Copy the tensors to the CPU, in chunks of about `_CHUNK` bytes."""
    waiting: list[Tensor] = []
    nbytes = 0
    for tensor in tensors:
        waiting.append(tensor.detach())
        nbytes += tensor.nbytes
        if tensor.is_cpu or nbytes >= _CHUNK:
            yield from transfer(waiting, CPU)
            waiting, nbytes = [], 0
    yield from transfer(waiting, CPU)


def bytes_of(tensor: Tensor) -> memoryview:
    """The elements of a tensor on the CPU as bytes, in row-major order. Copies a tensor that is not contiguous."""
    # Not `.view(torch.uint8)`: a tensor of one element is contiguous with any stride, which a view of bytes keeps.
    plain = dense_bytes(tensor.resolve_conj().resolve_neg().contiguous())
    return plain.numpy().data if len(plain) else memoryview(b"")


# --- reading ---


class Wanted:
    """What to read of a file or a table: the arguments ``keys``, ``encoders`` and ``rows`` of `load`.

    Raises the errors about arguments, before those about the file, and ``ImportError`` without safetensors.
    """

    def __init__(self, keys: Sequence[str | Path] | None, encoders: Encoders | None, rows: int | None) -> None:
        self.library, self.rows = import_library(), rows
        self.paths = None if keys is None else as_paths(keys)
        self.encoders = encoders
        Policy().override(encoders)  # raises for an invalid argument

    def reader(self, manifest: Any, count: int, owner: str) -> Reader:
        """A reader of the selected values. Raises ``KeyError`` for what the manifest of ``owner`` lacks."""
        reader = Reader(manifest, count, self.encoders)
        refuse_unknown_encoders(self.encoders, reader.names, owner)
        return reader if self.paths is None else reader.keep(self.paths, owner)


def read_file(cls: Any, path: FilePath, wanted: Wanted) -> Any:
    """Load a dict of class ``cls`` on the CPU without validating it against the class: see `DeviceDict.load`."""
    path, error = os.fsdecode(path), wanted.library.SafetensorError
    if wanted.rows is not None:
        raise ValueError(f"rows= is for tables, which are folders; {path!r} is none: load(path).rows[:n]")
    with open_regular(path) as opened:
        # Read through the open file, since `path` may be replaced between reading the header and the tensors.
        same = f"/proc/self/fd/{opened.fileno()}"
        linked = os.path.exists(same)
        of = _path_for_errors(path, opened)
        with invalid_file(of, error):
            file = wanted.library.safe_open(same if linked else path, framework="pt", device="cpu")
        with file, invalid_file(of, error, RuntimeError):
            manifest, stored = _manifest_of((file.metadata() or {}), list(file.keys()))
            reader = wanted.reader(manifest, len(stored), of)
            names = {stored[i][0] for i in reader.numbers}
            found = _mapped(file, opened, names) if linked else {name: file.get_tensor(name) for name in names}
            leaves = {i: _as(found[stored[i][0]], stored[i][1]) for i in reader.numbers}
            return reader.build(cls, leaves.__getitem__, CPU, trusted=False)


def open_regular(path: str) -> BufferedReader:
    """Open a regular file. Raises ``OSError`` for any other kind of file: opening a pipe would wait for a writer."""
    _refuse_irregular(os.stat(path), path)
    opened = open(path, "rb", opener=_without_waiting)  # noqa: SIM115
    try:
        _refuse_irregular(os.fstat(opened.fileno()), path)  # `path` may have been replaced
    except OSError:
        opened.close()
        raise
    return opened


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _refuse_irregular(found: os.stat_result, path: str) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path!r} is not a regular file; only regular files can be loaded")


def _mapped(file: Any, opened: BinaryIO, names: set[Any]) -> dict[Any, Tensor]:
    """Map the named tensors of a file into memory. The library has validated the file.

    Each tensor has its own storage, a slice of one mapping. So pickle and copies of a tensor write this tensor only.
    Cost: one view for each tensor.
    """
    dtypes = {code: dtype for dtype, code in _codes().items()}
    memory = map_file(opened.fileno(), os.fstat(opened.fileno()).st_size)
    size = int.from_bytes(opened.read(8), "little")
    header: dict[str, Any] = json.loads(opened.read(size))
    out: dict[Any, Tensor] = {}
    for name in names:
        shape, dtype = tuple(header[name]["shape"]), dtypes.get(header[name]["dtype"])
        start, end = header[name]["data_offsets"]
        if len(shape) > MAX_DIMENSIONS:
            invalid(f"{name[:60]!r} has {len(shape)} dimensions")
        if dtype is None or start == end:
            out[name] = file.get_tensor(name)
        else:
            out[name] = view_over(memory[8 + size + start : 8 + size + end], dtype, shape, row_major(shape), 0, CPU)
    return out


def _path_for_errors(path: str, opened: BufferedReader) -> str:
    """The name of the file for errors, with a hint if ``torch.save`` wrote the file."""
    saved = b"data.pkl" in opened.peek(512)[:512]  # the first entry of the zip archive
    return f"{path}{' (a file of torch.save: torch.load reads it)' if saved else ''}"


@contextmanager
def invalid_file(of: str, *errors: type[Exception]) -> Generator[None]:
    """Turn every error about the content of a file into an ``InvalidFileError`` that names the file."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (*errors, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidFileError(f"{of}: not a valid file: {error}") from error


def _manifest_of(metadata: Mapping[str, str], names: Sequence[str]) -> tuple[Manifest, list[tuple[Any, Any]]]:
    """The manifest of a file, and the stored name of each tensor with its complex dtype.

    The dtype is None unless the tensor is stored as pairs of real numbers.
    """
    if MANIFEST not in metadata:  # another program wrote the file: a flat dict, with the tensor names as keys
        manifest, _ = describe(TreeDict[Any]._new((), None, Policy()), by_name)
        manifest["root"]["items"] = [[name, i] for i, name in enumerate(names)]
        return manifest, [(name, None) for name in names]
    text = metadata[MANIFEST]
    if is_too_long(text):
        invalid(f"its manifest takes {len(text)} characters")
    manifest: Any = json.loads(text)
    listed: Any = manifest.pop("tensors", None) if isinstance(manifest, dict) else None  # pyright: ignore
    if not isinstance(listed, list):
        invalid("it does not list its tensors")
    stored: list[Any] = [one if isinstance(one, list) else [one, None] for one in listed]
    if not all(len(pair) == 2 and pair[1] in (None, *PAIRS) for pair in stored):
        invalid("its list of tensors is damaged")
    if not all(type(name) is str for name, _ in stored) or sorted(name for name, _ in stored) != sorted(names):
        invalid("its tree and its tensors have different names")
    return manifest, stored


def is_too_long(text: str) -> bool:
    """Whether the JSON of a manifest is too long to be parsed."""
    return len(text) > MAX_MANIFEST or text.count("[") + text.count("{") > _MAX_BRACKETS


def _as(tensor: Tensor, pairs: str | None) -> Tensor:
    """A tensor of a file in its own dtype. ``pairs``: the complex dtype if the tensor is stored as pairs, else None."""
    if pairs is None:
        return _aligned(tensor, tensor.itemsize)
    if tensor.dtype is not PAIRS[pairs] or not tensor.dim() or tensor.shape[-1] != 2:
        invalid(f"{pairs} is stored as pairs of {PAIRS[pairs]}, got {tensor.dtype} of shape {list(tensor.shape)}")
    return torch.view_as_complex(_aligned(tensor, 2 * tensor.itemsize))


def _aligned(tensor: Tensor, size: int) -> Tensor:
    """The tensor, or a copy if its address is not a multiple of ``size`` bytes. Not every program aligns tensors."""
    if tensor.data_ptr() % size == 0:
        return tensor
    out = torch.empty_like(tensor)
    out.untyped_storage().copy_(tensor.untyped_storage())  # copies bytes; kernels for wider dtypes need aligned memory
    return out


def as_paths(keys: Any) -> list[Path]:
    """The validated argument ``keys`` of `load`, as paths. Raises ``TypeError``."""
    if isinstance(keys, str) or not isinstance(keys, Iterable):
        raise TypeError(f"keys= is a list of keys and paths, got {keys!r}; write [{keys!r}]")
    paths: list[Path] = []
    for key in keys:
        path = key if isinstance(key, tuple) else (key,)
        if not path or not all(isinstance(part, str) for part in path):
            raise TypeError(f"keys= is a list of keys and paths, which are str and tuples of str; got {key!r}")
        paths.append(path)
    return paths
