"""Files: a dict as a safetensors file, and back.

The format is that of https://github.com/huggingface/safetensors: the length of a JSON header, the header, the bytes of
the tensors. Reading, and so checking, is the library's. Writing is done here, since the library's writer gives the file
its name before its bytes are on the disk, leaves its temporary file behind when it is killed, and wants all tensors on
the host at once.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import stat
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedReader
from itertools import chain
from math import prod
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from .._encoders.protocol import StringEncoder
from .._errors import InvalidFileError, Path, dotted, dtype_name
from .._memory.buffer import DTYPES, PACKABLE
from .._memory.device import CPU
from .._memory.layout import ALIGNMENT, row_major
from .._memory.packed import MAX_DIMENSIONS
from .._memory.transfer import transfer
from .._tree.policy import Encoders, Policy
from .._tree.tree import TreeDict
from .atomic_write import FilePath, atomic_write
from .manifest import Manifest, Reader, choose_from, describe, invalid

MANIFEST = "tensordict_lite"
"""The key of the manifest in the metadata."""
_MAX_MANIFEST = 16 << 20
"""Characters. No legitimate manifest is near it. Parsing a forged one takes at most some hundred MB."""
_MAX_BRACKETS = 500_000
"""Brackets in a manifest. A tensor takes one. Empty lists grow most when they are parsed: 2 characters to 64 bytes."""
_AT_ONCE = 64 << 20
"""Bytes of tensors of a device that `write` has on the host at the same time."""
_PAIRS = {"complex128": torch.float64, "complex32": torch.float16}
"""Dtypes that safetensors has no name for. They are stored as pairs of real numbers."""
_STORED = {name: dtype for name, dtype in DTYPES.items() if name not in _PAIRS}


def _library() -> Any:
    """safetensors, which is optional."""
    try:
        library = importlib.import_module("safetensors")
        library.TensorSpec  # noqa: B018  (versions before 0.8 have none)
    except (ImportError, AttributeError) as error:
        raise ImportError('files need safetensors: pip install "safetensors>=0.8"') from error
    return library


# --- writing ---


def write(d: TreeDict[Any], path: FilePath) -> None:
    """Save ``d``: see `DeviceDict.save`."""
    specs = _library().TensorSpec
    manifest, leaves, _ = describe(d, _by_name, own=False)
    _refuse_unwritable(leaves)
    tensors = [cast(Tensor, value) for _, value in leaves]
    names = _names([path for path, _ in leaves])
    dtypes = [dtype_name(tensor.dtype) for tensor in tensors]
    manifest["tensors"] = [
        [name, dtype] if dtype in _PAIRS else name for name, dtype in zip(names, dtypes, strict=True)
    ]
    text = json.dumps(manifest, separators=(",", ":"))
    if len(text) > _MAX_MANIFEST or _brackets(text) > _MAX_BRACKETS:
        raise ValueError(
            f"the structure and encoders of this dict take {len(text)} characters, and a file holds {_MAX_MANIFEST}; "
            "save fewer fields to a file, or give large encoders a registered name of their own"
        )
    # Wide dtypes first, so that each tensor is aligned.
    order = sorted(range(len(tensors)), key=lambda i: -tensors[i].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {MANIFEST: text}}
    end = 0
    for i in order:
        dtype, shape = dtypes[i], list(tensors[i].shape)
        if dtype in _PAIRS:
            dtype, shape = dtype_name(_PAIRS[dtype]), [*shape, 2]
        start, end = end, end + tensors[i].nbytes
        code = specs(dtype=dtype, shape=shape, data_ptr=0, data_len=end - start).dtype
        header[names[i]] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-(8 + len(encoded)) % ALIGNMENT)  # so that the bytes begin aligned
    data = map(_bytes_of, _on_host(tensors[i] for i in order))
    atomic_write(path, chain([len(encoded).to_bytes(8, "little") + encoded], data))


def _by_name(encoder: StringEncoder, error: TypeError | None) -> dict[str, Any]:
    if error is not None:
        raise TypeError(f"{error}; or save(d.to_dict(), path), the tensors alone") from error
    return {"name": cast(Any, encoder).name}  # loading asks the caller for it, since it would run code


def _refuse_unwritable(leaves: Sequence[tuple[Path, Any]]) -> None:
    kept = [path for path, value in leaves if not isinstance(value, Tensor)]
    if kept:
        paths = ", ".join(repr(path if len(path) > 1 else next(iter(path))) for path in kept)
        raise TypeError(
            f"{', '.join(map(dotted, kept))}: kept objects cannot be saved, only tensors; d.drop({paths}).save(path)"
        )
    for path, tensor in leaves:
        if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            what = "on meta, without values" if tensor.is_meta else "sparse, nested or quantized"
            raise TypeError(f"{dotted(path)} is {what}, and files hold dense tensors; convert it first, or drop it")
        if tensor.dtype not in PACKABLE:
            raise TypeError(f"{dotted(path)} is {tensor.dtype}, which files do not hold; save .view(torch.uint8) of it")
    if sys.byteorder != "little":
        raise NotImplementedError("files are written on little-endian machines only")


def _names(paths: Sequence[Path]) -> list[str]:
    """A name for each tensor: its dotted path, with a number if another tensor has that name."""
    taken = {"__metadata__"}
    counts: dict[str, int] = {}
    names: list[str] = []
    for path in paths:
        plain = name = ".".join(path).encode("utf-8", "replace").decode()
        while name in taken:
            counts[plain] = counts.get(plain, 1) + 1
            name = f"{plain}~{counts[plain]}"
        taken.add(name)
        names.append(name)
    return names


def _on_host(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors on the CPU. They are copied in parts of about `_AT_ONCE` bytes."""
    waiting: list[Tensor] = []
    nbytes = 0
    for tensor in tensors:
        waiting.append(tensor.detach())
        nbytes += tensor.nbytes
        if tensor.is_cpu or nbytes >= _AT_ONCE:
            yield from transfer(waiting, CPU)
            waiting, nbytes = [], 0
    yield from transfer(waiting, CPU)


def _bytes_of(tensor: Tensor) -> memoryview:
    plain = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return cast(Any, plain.view(torch.uint8).numpy()).data if plain.numel() else memoryview(b"")


# --- reading ---


def read(
    cls: Any,
    path: FilePath,
    device: torch.device,
    keys: Sequence[str | Path] | None,
    encoders: Encoders | None,
) -> Any:
    """Load a dict of class ``cls``, which has not validated it yet: see `DeviceDict.load`."""
    library = _library()
    paths = None if keys is None else _paths(keys)
    Policy().override(encoders)  # raises if an argument is wrong, which is not the file's fault
    path = os.fsdecode(path)
    with _opened(path) as opened:
        # Through the open file: another file may take the name between reading the header and the tensors.
        same = f"/proc/self/fd/{opened.fileno()}"
        linked = os.path.exists(same)
        of = _named(path, opened)
        with _invalid(of, library.SafetensorError):
            file = library.safe_open(same if linked else path, framework="pt", device="cpu")
        with file, _invalid(of, library.SafetensorError, RuntimeError):
            manifest, stored = _manifest_of(cast("dict[str, str]", file.metadata() or {}), list(file.keys()))
            reader = Reader(manifest, len(stored), encoders)
            if paths is not None:
                reader.keep(paths, of)
            names = {stored[i][0] for i in reader.numbers}
            found = _mapped(library, file, opened, same, names) if linked else _read_each(file, names)
            tensors = [_as(found[stored[i][0]], stored[i][1]) for i in reader.numbers]
    moved = dict(zip(reader.numbers, transfer(tensors, device), strict=True))
    with _invalid(of, library.SafetensorError):
        return reader.build(choose_from(cls), moved.__getitem__, device, own=False)


def _opened(path: str) -> BufferedReader:
    """Open the file. Raises ``OSError`` if it is not regular: opening a pipe would wait for a writer."""
    _refuse_irregular(os.stat(path), path)
    opened = open(path, "rb", opener=_without_waiting)  # noqa: SIM115
    try:
        _refuse_irregular(os.fstat(opened.fileno()), path)  # another file may have taken the name
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
        raise OSError(f"{path!r} is no regular file, and only those can be loaded")


def _read_each(file: Any, names: set[Any]) -> dict[Any, Tensor]:
    return {name: file.get_tensor(name) for name in names}


def _mapped(library: Any, file: Any, opened: BinaryIO, path: str, names: set[Any]) -> dict[Any, Tensor]:
    """The named tensors of a file that the library has validated, mapped from the file.

    Each tensor has a storage of its own, a slice of one mapping, so that pickle and copies write that tensor only. This
    takes 4 us a tensor; the library takes 11 us.
    """
    dtypes = {
        library.TensorSpec(dtype=name, shape=[], data_ptr=0, data_len=0).dtype: dtype for name, dtype in _STORED.items()
    }
    memory = cast(Any, torch.UntypedStorage).from_file(path, False, os.fstat(opened.fileno()).st_size)
    start = 8 + int.from_bytes(opened.read(8), "little")
    out: dict[Any, Tensor] = {}
    for name in file.offset_keys():  # the tensors lie side by side, which the library has checked
        part = file.get_slice(name)
        shape, dtype = tuple(part.get_shape()), dtypes.get(part.get_dtype())
        if len(shape) > MAX_DIMENSIONS:
            invalid(f"{name[:60]!r} has {len(shape)} dimensions")
        if dtype is None:  # one that only the library knows the size of
            return _read_each(file, names)
        end = start + prod(shape) * dtype.itemsize
        if name not in names:
            pass
        elif end == start:
            out[name] = file.get_tensor(name)
        else:
            empty: Any = torch.empty(0, dtype=dtype, device="cpu")
            out[name] = empty.set_(memory[start:end], 0, shape, row_major(shape))
        start = end
    return out


def _named(path: str, opened: BufferedReader) -> str:
    """The file, as an error names it."""
    saved = b"data.pkl" in opened.peek(512)[:512]  # the first file of the archive
    return f"{path}{' (a file of torch.save: torch.load reads it)' if saved else ''}"


@contextmanager
def _invalid(of: str, *errors: type[Exception]) -> Generator[None]:
    """Turn every error about the content of a file into an ``InvalidFileError`` that names the file."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (*errors, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidFileError(f"{of}: not a valid file: {error}") from error


def _manifest_of(metadata: Mapping[str, str], names: Sequence[str]) -> tuple[Manifest, list[tuple[Any, Any]]]:
    """The manifest of a file, and for each number in it the name of the tensor and the dtype of its pairs, or None."""
    if MANIFEST not in metadata:  # a file of another program: one level, with its names as keys
        manifest, _, _ = describe(TreeDict[Any]._new((), None, Policy()), _by_name, own=False)
        manifest["root"]["items"] = [[name, i] for i, name in enumerate(names)]
        return manifest, [(name, None) for name in names]
    text = metadata[MANIFEST]
    if len(text) > _MAX_MANIFEST or _brackets(text) > _MAX_BRACKETS:
        invalid(f"its manifest takes {len(text)} characters")
    manifest: Any = json.loads(text)
    listed: Any = manifest.pop("tensors", None) if isinstance(manifest, dict) else None  # pyright: ignore
    if not isinstance(listed, list):
        invalid("it does not list its tensors")
    stored: list[tuple[Any, Any]] = []
    for one in cast("list[Any]", listed):
        pair = cast("list[Any]", one if isinstance(one, list) else [one, None])
        if len(pair) != 2 or pair[1] not in (None, *_PAIRS):
            invalid("its list of tensors is damaged")
        stored.append((pair[0], pair[1]))
    if not all(type(name) is str for name, _ in stored) or sorted(name for name, _ in stored) != sorted(names):
        invalid("its tree and its tensors have different names")
    return cast("Manifest", manifest), stored


def _brackets(text: str) -> int:
    return text.count("[") + text.count("{")


def _as(tensor: Tensor, pairs: str | None) -> Tensor:
    """A tensor of a file; ``pairs``: the complex dtype that it is stored for, or None."""
    if pairs is None:
        return _aligned(tensor, tensor.itemsize)
    if tensor.dtype is not _PAIRS[pairs] or not tensor.dim() or tensor.shape[-1] != 2:
        invalid(f"{pairs} is stored as pairs of {_PAIRS[pairs]}, got {tensor.dtype} of shape {list(tensor.shape)}")
    return torch.view_as_complex(_aligned(tensor, 2 * tensor.itemsize))


def _aligned(tensor: Tensor, size: int) -> Tensor:
    """The tensor, or a copy if it does not begin on a multiple of ``size`` bytes: not every writer aligns."""
    if tensor.data_ptr() % size == 0:
        return tensor
    out = torch.empty_like(tensor)
    out.untyped_storage().copy_(tensor.untyped_storage())  # byte by byte: other kernels need alignment
    return out


def _paths(keys: Any) -> list[Path]:
    if isinstance(keys, str) or not isinstance(keys, Iterable):
        raise TypeError(f"keys= is a list of keys and paths, got {keys!r}; write [{keys!r}]")
    paths: list[Path] = []
    for key in cast("Iterable[Any]", keys):
        path = cast("tuple[Any, ...]", key) if isinstance(key, tuple) else (key,)
        if not path or not all(isinstance(part, str) for part in path):
            raise TypeError(f"keys= is a list of keys and paths, which are str and tuples of str; got {key!r}")
        paths.append(path)
    return paths
