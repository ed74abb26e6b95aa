"""Convert a dict to a message and back: a header with the schema, and one buffer with the tensors."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .._encoders.protocol import StringEncoder
from .._errors import Path, dotted, dtype_name
from .._memory.buffer import buffer_of, clear_gaps, copy_into, new_buffer, regions, views_of
from .._memory.dense import dense_bytes
from .._memory.device import canonical
from .._memory.dtypes import DTYPES
from .._memory.layout import Group, Layout, lay_out
from .._memory.packed import arrange, find_buffer, is_saved_group
from .._tree.manifest import Manifest, Outline, Reader, encoder_entry, paths_of
from .._tree.tree import TreeDict

PREFIX = 6
"""The number of int64 values in the prefix of a message: a failure flag, the digest of the schema, the size of the text
in bytes, the size of the buffer in bytes, the number of its parts, and `_MAGIC`."""
_MAGIC = 0x7464_6C32
"""Identifies this protocol."""
LARGE = 1 << 20
"""The size in bytes of the smallest tensor that is sent without a copy, in a message of its own."""
_LARGEST = 16 << 20
"""The maximum size of a header in bytes, equal to the maximum size of the manifest in a file."""


@dataclass
class Header:
    """The schema of a dict: its tree and encoders, and the dtype, shape and offset of each tensor."""

    text: bytes
    digest: int
    manifest: Manifest
    layout: Layout
    _built: dict[Any, Any] = field(default_factory=dict[Any, Any])
    """By class, a dict on meta that `build` made, so that the manifest is read once."""

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    @cached_property
    def count(self) -> int:
        """The number of tensors."""
        return len(self.layout.members)

    @cached_property
    def parts(self) -> list[Part]:
        """The parts of the buffer, in order. A small buffer is one part. A receiver computes the same parts."""
        parts: list[Part] = []
        between = False
        for run in self.layout.runs:
            spec = (run.dtype, run.shape, run.stride)
            if run.nbytes >= LARGE:
                parts += [Part(run.offset + i * run.step, [(spec, [member])]) for i, member in enumerate(run.members)]
                between = False
            elif run.nbytes:
                if not between:
                    parts.append(Part(run.offset, []))
                    between = True
                parts[-1].groups.append((spec, run.members))
        return parts

    def new_buffer(self, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        """A buffer for the tensors on ``device``, and its parts, which a message fills."""
        buffer = new_buffer(self.nbytes, device)
        if len(self.parts) > 1:  # no message fills the gaps between two parts
            clear_gaps(buffer, self.layout)
        return buffer, [buffer[part.start : part.start + part.nbytes] for part in self.parts]

    @cached_property
    def paths(self) -> list[Path]:
        """The path of each tensor, in the order of the tree."""
        return paths_of(self.manifest)

    def build(self, cls: Any, buffer: Tensor) -> Any:
        """Build a dict of class ``cls`` with the tensors in ``buffer``. Reads the manifest once for each class.

        A typed class validates names and kinds, but not shapes, because `scatter` sends parts of the rows.
        """
        tensors: list[Any] = [None] * self.count
        views_of(self.layout, regions(buffer, self.layout), tensors)
        if cls not in self._built:
            made = Reader(self.manifest, self.count).build(cls, tensors.__getitem__, None)
            self._built[cls] = made._replace_tensors([tensor.to("meta") for tensor in tensors], torch.device("meta"))
        out = self._built[cls]._replace_tensors(tensors, canonical(buffer.device))
        out._validate(shapes=False)
        return out

    def difference(self, other: Header) -> str:
        """Describe the first field that differs from ``other``; empty if no field differs. Ignores the order."""
        mine, theirs = self._fields(), other._fields()
        for path in [*theirs, *mine]:
            if mine.get(path) != theirs.get(path):
                expected = theirs.get(path, "nothing there")
                return f"{dotted(path)} is {mine.get(path, 'not there')}, expected {expected}"
        return ""

    def strict_difference(self, other: Header) -> str:
        """Like `difference`, but also compares the order of the fields, the encoders, the options and empty dicts."""
        fields = self.difference(other)
        if fields or self.digest == other.digest:
            return fields
        for mine, theirs in zip(self.paths, other.paths, strict=True):
            if mine != theirs:
                return f"{dotted(mine)} is at the position of {dotted(theirs)}: the order of the keys must match"
        return "its encoders, options or empty dicts differ"

    def _fields(self) -> dict[Path, str]:
        found = {
            i: f"{dtype_name(run.dtype)}[{', '.join(map(str, run.shape))}]"
            for run in self.layout.runs
            for i in run.members
        }
        return {path: found[i] for i, path in enumerate(self.paths)}


@dataclass(frozen=True)
class Message:
    """The header of a dict, and its bytes in parts, ready to send. The parts are those of `Header.parts`."""

    schema: Header
    parts: list[Tensor]


class Part(NamedTuple):
    """A part of a buffer, which is a message of its own: a large tensor, or the tensors between two large ones."""

    start: int
    """Bytes from the start of the buffer."""
    groups: list[Group]

    @property
    def nbytes(self) -> int:
        return lay_out(self.groups).nbytes


def message_of(d: TreeDict[Any]) -> Message:
    """The message of a dict. Raises ``TypeError`` or ``ValueError`` that names the field that cannot be sent.

    A conjugated or negated view is sent by its values, which are copied.
    Cost: one copy of the tensors below 1 MiB; no copy if the dict is packed. The header of a schema is built once.
    """
    tensors, schema = _with_header(d)
    if not schema.nbytes:
        return Message(schema, [])
    if find_buffer(tensors, tensors[0].device, alone=True) is not None:
        buffer = buffer_of(tensors, schema.layout)
        return Message(schema, [buffer[part.start : part.start + part.nbytes] for part in schema.parts])
    parts: list[Tensor] = []
    for _, part in schema.parts:
        layout = lay_out(part)
        if len(layout.members) == 1:
            parts.append(dense_bytes(tensors[layout.members[0]]))
            continue
        buffer = clear_gaps(new_buffer(layout.nbytes, tensors[0].device), layout)
        copy_into(buffer, layout, tensors)
        parts.append(buffer)
    return Message(schema, parts)


def header_of(d: TreeDict[Any], values: bool = True) -> Header:
    """The header of a dict, without its buffer. Raises the errors of `message_of`.

    ``values``: the dict must have values, so it cannot be on meta.
    """
    return _with_header(d, values)[1]


def _with_header(d: TreeDict[Any], values: bool = True) -> tuple[list[Tensor], Header]:
    outline = Outline(d)
    encoders = outline.entries(lambda encoder: _encoder_text(_Identity(encoder)))
    tensors = [tensor.detach().resolve_conj().resolve_neg() for tensor in d._tensors()]
    groups, unpackable = arrange(tensors)
    if unpackable or len(outline.values) != len(tensors):
        _refuse(outline, *unpackable[:1])
    specs = tuple([(spec, tuple(members)) for spec, members in groups])
    schema = _header(outline.text(), tuple(encoders), specs)
    if values and any(tensor.is_meta for tensor in tensors):
        raise TypeError("a dict on meta has no values to send")
    return tensors, schema


def _refuse(outline: Outline, unpackable: int = 0) -> NoReturn:
    """Raise ``TypeError`` for the kept objects of a dict, or for the tensor with the number ``unpackable``."""
    leaves = outline.leaves()
    kept = [dotted(path) for path, value in leaves if not isinstance(value, Tensor)]
    if kept:
        raise TypeError(f"{', '.join(kept)}: kept objects cannot be sent, only tensors; drop them first")
    path, tensor = leaves[unpackable]
    raise TypeError(
        f"{dotted(path)} cannot be sent: a {tensor.layout} {type(tensor).__name__} of {tensor.dtype} has more "
        "state than its bytes; convert it first"
    )


@lru_cache(maxsize=64)  # a program mostly sends dicts of the same few schemas
def _header(outline: str, encoders: tuple[str, ...], groups: tuple[Any, ...]) -> Header:
    """The header of a dict with this `Outline.text`, the entries of these encoders, and these groups of tensors."""
    manifest = {**json.loads(outline), "encoders": list(map(json.loads, encoders))}
    layout = lay_out(groups)
    specs = [[dtype_name(spec[0]), *map(list, spec[1:]), members] for spec, members in layout.groups]
    text = json.dumps({"manifest": manifest, "specs": specs}, separators=(",", ":")).encode()
    if len(text) > _LARGEST:
        raise ValueError(f"the structure and encoders of this dict take {len(text)} bytes, a message holds {_LARGEST}")
    return Header(text, _digest(text), manifest, layout)


class _Identity:
    """An object as the key of a cache: equal to itself only, so that no two large vocabularies are compared."""

    __slots__ = ("of",)

    def __init__(self, of: Any) -> None:
        self.of = of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.of is other.of

    def __hash__(self) -> int:
        return id(self.of)


@lru_cache(maxsize=64)
def _encoder_text(encoder: _Identity) -> str:
    """The entry of an encoder in a manifest, as JSON text. Encoders are immutable."""
    return json.dumps(encoder_entry(encoder.of, _refuse_encoder))


def _refuse_encoder(encoder: StringEncoder, error: TypeError | None) -> NoReturn:
    raise error or TypeError(
        f"{encoder!r} cannot be sent, because building it would run code on the receiver; encode there"
    )


def _digest(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def read_header(text: bytes, digest: int) -> Header:
    """Parse and validate the text of a header. Raises ``ValueError`` for a damaged header."""
    if _digest(text) != digest:
        raise ValueError("not a valid message: the header does not match its announced digest")
    try:
        header: Any = json.loads(text)
        manifest, listed = header["manifest"], header["specs"]
        groups: list[Group] = []
        for dtype, shape, stride, members in listed:
            spec = (DTYPES[dtype], tuple(shape), tuple(stride), tuple(members))
            if not is_saved_group(spec):
                raise ValueError("its layout is damaged")
            groups.append((spec[:3], list(spec[3])))
        layout = lay_out(groups)
        count = len(layout.members)
        if sorted(layout.members) != list(range(count)) or layout.nbytes > 1 << 46:
            raise ValueError("its layout is damaged")
        if Reader(manifest, count).numbers != list(range(count)):
            raise ValueError("its tensors are not in the order of its tree")
    except (KeyError, TypeError, IndexError, RecursionError, OverflowError, ValueError) as error:
        raise ValueError(f"not a valid message: a damaged header: {error}") from error
    return Header(text, digest, manifest, layout)


def prefix_of(schema: Header | None, text: int, device: torch.device) -> Tensor:
    """The prefix of a message with ``text`` bytes of text. If ``schema`` is None, the message is a failure."""
    known = (0, 0, 0) if schema is None else (schema.digest, schema.nbytes, len(schema.parts))
    return torch.tensor([schema is None, known[0], text, known[1], known[2], _MAGIC], device=device)


def read_prefix(prefix: Tensor) -> tuple[bool, int, int, int, int]:
    """The failure flag, the digest of the schema, the sizes of the text and the buffer in bytes, the number of parts.

    Raises ``ValueError`` if the sender is not this package.
    """
    failed, digest, text, buffer, count, magic = prefix.tolist()
    plausible = 0 <= text <= _LARGEST and buffer >= 0 and 0 <= count <= min(buffer, 2 * buffer // LARGE + 1)
    if magic != _MAGIC or failed not in (0, 1) or not plausible:
        raise ValueError("the message is not from tensordict_lite; do all ranks make the same calls?")
    return bool(failed), digest, text, buffer, count


def sizes_of(schema: Header, device: torch.device) -> list[Tensor]:
    """The message with the sizes of the parts in bytes. A buffer of one part needs no such message.

    With the sizes, a receiver that cannot read the header can still receive every part, and the next call works.
    """
    sizes = [part.nbytes for part in schema.parts]
    return [torch.tensor(sizes, device=device)] if len(sizes) > 1 else []


def read_sizes(sizes: Tensor, nbytes: int) -> list[int]:
    """The sizes of the parts of a buffer of ``nbytes``. Raises ``ValueError`` if the sender is not this package."""
    read = sizes.tolist()
    if min(read) < 0 or sum(read) > nbytes:
        raise ValueError("the message is not from tensordict_lite; do all ranks make the same calls?")
    return read


def failure(error: Exception) -> bytes:
    """The text of an error, as a message in place of a dict."""
    return f"{type(error).__name__}: {error}".encode(errors="replace")[:4096]


def text_of(text: Tensor) -> str:
    """The text of a received `failure`."""
    return bytes(text.cpu().numpy()).decode(errors="replace")
