"""Convert a dict to a message and back: a header with the schema, and the buffers with the tensors.

The sender decides which tensors share a buffer. The header has the layout of each buffer, so the receiver makes the
same buffers. The small buffers travel as one part of the message, and the receiver copies them out of it. So a tensor
that is kept keeps its buffer alive, and not the message. Each other buffer is a part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch import Tensor

from .._encoders.protocol import StringEncoder
from .._errors import Path, dotted, dtype_name
from .._memory.buffer import buffer_of, clear_gaps, copy_into, new_buffer, regions, views_of
from .._memory.dense import dense_bytes
from .._memory.device import CPU, canonical
from .._memory.dtypes import DTYPES
from .._memory.layout import SMALL, Group, Layout, aligned, lay_out, lay_out_apart, nbytes_of
from .._memory.packed import arrange, is_saved_group
from .._tree.manifest import Manifest, Outline, Reader, encoder_entry, paths_of, refuse_kept
from .._tree.tree import TreeDict

PREFIX = 6
"""The number of int64 values in the prefix of a message: a failure flag, the digest of the schema, the size of the text
in bytes, the size of the buffer in bytes, the number of its parts, and `_MAGIC`."""
_MAGIC = 0x7464_6C32
"""Identifies this protocol."""
LARGE = 1 << 20
"""The size in bytes of the smallest tensor that is sent without a copy, in a buffer of its own."""
_LARGEST = 16 << 20
"""The maximum size of a header in bytes, equal to the maximum size of the manifest in a file."""


@dataclass
class Header:
    """The schema of a dict: its tree and encoders, the dtype and shape of each tensor, and the layouts of buffers."""

    text: bytes
    digest: int
    manifest: Manifest
    layouts: list[Layout]
    """Small buffers come first."""
    _built: dict[Any, Any] = field(default_factory=dict[Any, Any])
    """By class, a dict on meta that `build` made, so that the manifest is read once."""

    @cached_property
    def starts(self) -> list[int]:
        """Where each buffer starts in bytes, if all are joined."""
        return [0, *accumulate([aligned(layout.nbytes) for layout in self.layouts[:-1]])]

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers, joined."""
        return self.starts[-1] + self.layouts[-1].nbytes

    @cached_property
    def small(self) -> int:
        """The number of small buffers, which are joined to one part of the message."""
        return [*map(_is_large, self.layouts)].count(False)

    @cached_property
    def joined(self) -> int:
        """The bytes of the small buffers, joined."""
        return self.starts[self.small - 1] + self.layouts[self.small - 1].nbytes if self.small else 0

    @cached_property
    def parts(self) -> list[tuple[int, int]]:
        """The start and the size in bytes of each part: the small buffers, if they have bytes, then each large one."""
        large = zip(self.starts[self.small :], self.layouts[self.small :], strict=True)
        return [*([(0, self.joined)] if self.joined else []), *[(start, layout.nbytes) for start, layout in large]]

    def buffers(self, parts: list[Tensor], device: torch.device) -> list[Tensor]:
        """The buffers in the parts of a message on ``device``. Small ones are copies, unless there is only one."""
        joined = parts[0] if self.joined else torch.empty(0, dtype=torch.uint8, device=device)
        return [*self.split(joined, self.small), *parts[bool(self.joined) :]]

    def split(self, joined: Tensor, count: int | None = None) -> list[Tensor]:
        """The first ``count`` buffers, or all of them, which were joined: copies, unless there is only one."""
        layouts = self.layouts[:count]
        if len(layouts) == 1 and joined.nbytes == layouts[0].nbytes:
            return [joined]
        return [joined[start:][: layout.nbytes].clone() for start, layout in zip(self.starts, layouts, strict=False)]

    @cached_property
    def paths(self) -> list[Path]:
        """The path of each tensor, in the order of the tree."""
        return paths_of(self.manifest)

    def build(self, cls: Any, buffers: list[Tensor]) -> Any:
        """Build a dict of class ``cls`` with the tensors in ``buffers``. Reads the manifest once for each class.

        A typed class validates names and kinds, but not shapes, because `scatter` sends parts of the rows.
        """
        tensors: list[Any] = [None] * len(self.paths)
        for layout, buffer in zip(self.layouts, buffers, strict=True):
            views_of(layout, regions(buffer, layout), tensors)
        if cls not in self._built:
            made = Reader(self.manifest, None).build(cls, tensors.__getitem__, None)
            self._built[cls] = made._replace_tensors([tensor.to("meta") for tensor in tensors], torch.device("meta"))
        out = self._built[cls]._replace_tensors(tensors, canonical(buffers[0].device))
        out._validate(out)
        return out

    def difference(self, other: Header) -> str:
        """Describe the first field that differs from ``other``; empty if no field differs. Ignores the order."""
        mine, theirs = self._fields(), other._fields()
        for path in [*theirs, *mine]:
            if mine.get(path) != theirs.get(path):
                expected, got = (fields.get(path, "no field") for fields in (theirs, mine))
                return f"{dotted(path)}: expected {expected}, got {got}"
        return ""

    def strict_difference(self, other: Header) -> str:
        """Like `difference`, but also compares the order of the fields, the encoders, the options and empty dicts.

        Both headers are those of `header_of`, so equal schemas have equal layouts.
        """
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
            for layout in self.layouts
            for run in layout.runs
            for i in run.members
        }
        return {path: found[i] for i, path in enumerate(self.paths)}


@dataclass(frozen=True)
class Message:
    """The header of a dict, and its bytes in parts, ready to send: those of `Header.parts`."""

    schema: Header
    parts: list[Tensor]


def message_of(d: TreeDict[Any]) -> Message:
    """The message of a dict. Raises ``TypeError`` or ``ValueError`` that names the field that cannot be sent.

    A conjugated or negated view is sent by its values, which are copied.
    Cost: a copy of the tensors below 1 MiB. No copy of larger tensors, nor of tensors of more than 64 KiB that fill a
    storage, such as those of a packed dict. The header of a schema is built once.
    """
    tensors, schema, blocks = _with_header(d)
    device = tensors[0].device if tensors else CPU
    small = torch.zeros(schema.joined, dtype=torch.uint8, device=device)
    parts = [small] if len(small) else []
    for i, (start, layout) in enumerate(zip(schema.starts, schema.layouts, strict=True)):
        into = small[start : start + layout.nbytes] if i < schema.small else None
        if layout in blocks:
            buffer = buffer_of(tensors, layout)
            buffer = buffer if into is None else into.copy_(buffer)
        elif into is None and len(layout.members) == 1:
            buffer = dense_bytes(tensors[layout.members[0]])
        else:
            buffer = clear_gaps(new_buffer(layout.nbytes, device), layout) if into is None else into
            copy_into(buffer, layout, tensors)
        parts += [buffer] if into is None else []
    return Message(schema, parts)


def header_of(d: TreeDict[Any], values: bool = True) -> Header:
    """The header of a dict, whatever storages its tensors lie in. Raises the errors of `message_of`.

    ``values``: the dict must have values, so it cannot be on meta.
    """
    return _with_header(d, values, False)[1]


def _with_header(
    d: TreeDict[Any], values: bool = True, lie: bool = True
) -> tuple[list[Tensor], Header, Sequence[Layout]]:
    outline = Outline(d)
    encoders = outline.entries(lambda encoder: _encoder_text(_Identity(encoder)))
    tensors = [tensor.detach().resolve_conj().resolve_neg() for tensor in d._tensors()]
    found = arrange([*tensors], sent=True)
    if found.unpackable or len(outline.values) != len(tensors):
        _refuse(outline, *found.unpackable[:1])
    blocks, groups = (found.blocks, found.groups) if lie else ((), found.every)
    groups = tuple(sorted(groups, key=lambda group: min(group[1])))
    schema = _header(outline.text(), tuple(encoders), blocks, groups)
    if values and any(tensor.is_meta for tensor in tensors):
        raise TypeError("a dict on meta has no values to send")
    return tensors, schema, blocks


def _refuse(outline: Outline, unpackable: int = 0) -> NoReturn:
    """Raise ``TypeError`` for the kept objects of a dict, or for the tensor with the number ``unpackable``."""
    leaves = outline.leaves()
    refuse_kept(leaves, "drop it first, d.drop({})")
    path, tensor = leaves[unpackable]
    raise TypeError(
        f"{dotted(path)} cannot be sent: a {tensor.layout} {type(tensor).__name__} of {tensor.dtype} has more "
        "state than its bytes; convert it first"
    )


@lru_cache(maxsize=64)  # a program mostly sends dicts of the same few schemas
def _header(outline: str, encoders: tuple[str, ...], blocks: tuple[Layout, ...], groups: tuple[Group, ...]) -> Header:
    """The header of a dict with this `Outline.text`, the entries of these encoders, and these tensors."""
    manifest = {**json.loads(outline), "encoders": list(map(json.loads, encoders))}
    large = [(spec, (i,)) for spec, members in groups if nbytes_of(spec) >= LARGE for i in members]
    apart = lay_out_apart(tuple([group for group in groups if nbytes_of(group[0]) < LARGE]))
    layouts = [*blocks, *apart, *[lay_out([group]) for group in large]] or [lay_out([])]
    layouts.sort(key=_is_large)
    specs = [[[dtype_name(spec[0]), *map(list, spec[1:]), members] for spec, members in x.groups] for x in layouts]
    text = json.dumps({"manifest": manifest, "buffers": specs}, separators=(",", ":")).encode()
    if len(text) > _LARGEST:
        raise ValueError(f"the structure and encoders of this dict take {len(text)} bytes, a message holds {_LARGEST}")
    return Header(text, _digest(text), manifest, layouts)


def _is_large(layout: Layout) -> bool:
    return layout.nbytes > SMALL


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
        manifest = header["manifest"]
        layouts = [lay_out(map(_read_group, listed)) for listed in header["buffers"]]
        members = [i for layout in layouts for i in layout.members]
        out = Header(text, digest, manifest, layouts)
        ordered = layouts and sorted(layouts, key=_is_large) == layouts
        if sorted(members) != list(range(len(members))) or not ordered or out.nbytes > 1 << 46:
            raise ValueError("its layout is damaged")
        if Reader(manifest, len(members)).numbers != list(range(len(members))):
            raise ValueError("its tensors are not in the order of its tree")
    except (KeyError, TypeError, IndexError, RecursionError, OverflowError, ValueError) as error:
        raise ValueError(f"not a valid message: a damaged header: {error}") from error
    return out


def _read_group(listed: Any) -> Group:
    """A group of tensors in a header. Raises ``ValueError`` if it is damaged."""
    dtype, shape, stride, members = listed
    saved = (DTYPES[dtype], tuple(shape), tuple(stride), tuple(members))
    if not is_saved_group(saved):
        raise ValueError("its layout is damaged")
    return saved[:3], saved[3]


def prefix_of(schema: Header | None, text: int, device: torch.device) -> Tensor:
    """The prefix of a message with ``text`` bytes of text. If ``schema`` is None, the message is a failure."""
    known = (0, 0, 0) if schema is None else (schema.digest, schema.nbytes, len(schema.parts))
    return torch.tensor([schema is None, known[0], text, known[1], known[2], _MAGIC], device=device)


def read_prefix(prefix: Tensor) -> tuple[bool, int, int, int, int]:
    """The failure flag, the digest of the schema, the sizes of the text and the buffers in bytes, the number of parts.

    Raises ``ValueError`` if the sender is not this package.
    """
    failed, digest, text, buffer, count, magic = prefix.tolist()
    plausible = 0 <= text <= _LARGEST and buffer >= 0 and 0 <= count <= min(buffer, buffer // SMALL + 1)
    if magic != _MAGIC or failed not in (0, 1) or not plausible:
        raise ValueError("the message is not from tensordict_lite; do all ranks make the same calls?")
    return bool(failed), digest, text, buffer, count


def read_sizes(sizes: Tensor, nbytes: int) -> list[int]:
    """The sizes of the parts of a message of ``nbytes``. Raises ``ValueError`` if the sender is not this package."""
    read = sizes.tolist()
    if min(read) < 0 or sum(read) > nbytes:
        raise ValueError("the message is not from tensordict_lite; do all ranks make the same calls?")
    return read


def failure(error: Exception) -> bytes:
    """The text of an error, as a message in place of a dict."""
    return f"{type(error).__name__}: {error}".encode(errors="replace")[:4096]
