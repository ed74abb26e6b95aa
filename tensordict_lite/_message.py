"""A dict as a message: its schema as a header, and its tensors as one block of bytes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from ._block import DTYPES, arrange, block_of, clear_gaps, gather, new_block, regions
from ._devices import canonical
from ._errors import InvalidFileError, Path, dotted, dtype_name
from ._items import only_tensors
from ._layout import Group, Layout, lay_out
from ._packing import block_layout, from_block, is_spec
from ._plan import Plan, Reader, choose_from, describe, paths_of, refuse
from ._strings import StringEncoder, encoder_to_json, runs_code
from ._tree import TreeDict

PREFIX = 5
"""int64 numbers that go ahead of every message: whether it is a failure, the digest of the schema, the sizes of the
text and of the block that follow, and a number that tells this protocol from others."""
_MAGIC = 0x7464_6C31
_LARGEST = 16 << 20
"""Bytes of a header; as for the plan of a file."""


@dataclass
class Schema:
    """What a dict is without its values: its tree and encoders, and the dtype, shape and place of each tensor."""

    text: bytes
    digest: int
    plan: Plan
    groups: list[Group]
    layout: Layout
    count: int
    """Of the tensors."""
    _built: dict[Any, Any] = field(default_factory=dict[Any, Any])

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    @cached_property
    def paths(self) -> list[Path]:
        """Of each tensor, in the order of the tree."""
        return paths_of(self.plan)

    def build(self, cls: Any, block: Tensor) -> Any:
        """The dict of class ``cls`` whose tensors are ``block``. Cost: the tensors; the tree is read once a class.

        A typed class checks names and kinds: what was sent may be a row, or a cast, of what had its shapes.
        """
        fields = from_block(block, [(*spec, members) for spec, members in self.groups]) if self.layout.runs else {}
        tensors = [fields[i] for i in range(self.count)]
        if cls not in self._built:
            reader = Reader(self.plan, self.count)
            made = reader.build(choose_from(cls), tensors.__getitem__, None, own=False)
            self._built[cls] = made._with([tensor.to("meta") for tensor in tensors], torch.device("meta"))
        out = self._built[cls]._with(tensors, canonical(block.device))
        out._conform(out, None, deep=True, shapes=False)
        return out

    def difference(self, other: Schema) -> str:
        """The first field in which this one differs from another; empty if none does, whatever their order."""
        mine, theirs = self._fields(), other._fields()
        for path in [*theirs, *mine]:
            if mine.get(path) != theirs.get(path):
                expected = theirs.get(path, "nothing there")
                return f"{dotted(path)} is {mine.get(path, 'not there')}, expected {expected}"
        return ""

    def strict_difference(self, other: Schema) -> str:
        """The same, and then the order of the fields, encoders, options and empty dicts."""
        fields = self.difference(other)
        if fields or self.digest == other.digest:
            return fields
        for mine, theirs in zip(self.paths, other.paths, strict=True):
            if mine != theirs:
                return f"{dotted(mine)} stands where {dotted(theirs)} is expected, and the order of the keys counts"
        return "its encoders, options or empty dicts are others"

    def _fields(self) -> dict[Path, str]:
        found: dict[int, str] = {}
        for (dtype, shape, _), members in self.groups:
            for i in members:
                found[i] = f"{dtype_name(dtype)}[{', '.join(map(str, shape))}]"
        return {path: found[i] for i, path in enumerate(self.paths)}


@dataclass(frozen=True)
class Message:
    """A dict, ready to be sent."""

    schema: Schema
    block: Tensor


_known: dict[Any, tuple[Any, Schema]] = {}


def message_of(d: TreeDict[Any]) -> Message:
    """The message of a dict. Raises ``TypeError`` or ``ValueError`` that name what cannot be sent.

    Cost: one copy of the tensors, none if they are packed; a schema is described once.
    """
    tensors, groups, beside = _arranged(d)
    schema = _sendable(tensors, _schema(d, tensors, groups, beside))
    device = tensors[0].device if tensors else torch.device("cpu")
    if not schema.nbytes:
        return Message(schema, torch.empty(0, dtype=torch.uint8, device=device))
    if block_layout(tensors, groups) is not None:
        return Message(schema, block_of(tensors, schema.layout))
    block = clear_gaps(new_block(schema.nbytes, device), schema.layout)
    gather(tensors, schema.layout, regions(block, schema.layout))
    return Message(schema, block)


def schema_to_send(d: TreeDict[Any]) -> Schema:
    """The schema of a dict that could be sent. Raises as `message_of`; copies nothing."""
    tensors, groups, beside = _arranged(d)
    return _sendable(tensors, _schema(d, tensors, groups, beside))


def schema_for(d: TreeDict[Any]) -> Schema:
    """The schema of a dict, which may be one on meta. Raises ``TypeError`` or ``ValueError`` as `message_of`."""
    return _schema(d, *_arranged(d))


def _arranged(d: TreeDict[Any]) -> tuple[list[Tensor], list[Group], list[int]]:
    tensors = [tensor.detach() for tensor in d._tensors()]
    return (tensors, *arrange(tensors))


def _sendable(tensors: list[Tensor], schema: Schema) -> Schema:
    if any(tensor.is_meta for tensor in tensors):
        raise TypeError("a dict on meta has no values to send")
    return schema


def _schema(d: TreeDict[Any], tensors: list[Tensor], groups: list[Group], beside: list[int]) -> Schema:
    key = (_shape_of(d), tuple((spec, tuple(members)) for spec, members in groups))
    known = None if beside else _known.get(key)
    if known is not None:
        return known[1]
    schema = _described(d, tensors, groups, beside)
    if len(_known) > 256:
        _known.clear()
    _known[key] = (d.copy()._with([tensor.to("meta") for tensor in tensors], None), schema)  # keeps ids in key alive
    return schema


def _shape_of(d: TreeDict[Any]) -> tuple[Any, ...]:
    """The keys and policies of a tree, to tell it from others."""
    if only_tensors(d.values()):
        return (*d, id(d._policy))
    nested = ((key, _shape_of(cast("TreeDict[Any]", v)) if isinstance(v, TreeDict) else None) for key, v in d.items())
    return (*nested, id(d._policy))


def _described(d: TreeDict[Any], tensors: list[Tensor], groups: list[Group], beside: list[int]) -> Schema:
    plan, leaves, _ = describe(d, _encoder_entry, own=False)
    kept = [dotted(path) for path, value in leaves if not isinstance(value, Tensor)]
    if kept:
        raise TypeError(f"{', '.join(kept)}: kept objects cannot be sent, only tensors; drop them first")
    if beside:
        path, tensor = leaves[beside[0]]
        raise TypeError(
            f"{dotted(path)} cannot be sent: a {tensor.layout} {type(tensor).__name__} of {tensor.dtype} is more than "
            "its bytes; convert it first"
        )
    layout = lay_out(groups)
    specs = [[dtype_name(spec[0]), *map(list, spec[1:]), members] for spec, members in layout.groups]
    text = json.dumps({"plan": plan, "specs": specs}, separators=(",", ":")).encode()
    if len(text) > _LARGEST:
        raise ValueError(f"the structure and encoders of this dict take {len(text)} bytes, a message holds {_LARGEST}")
    return Schema(text, _digest(text), plan, layout.groups, layout, len(leaves))


def _encoder_entry(encoder: StringEncoder) -> dict[str, Any]:
    if runs_code(encoder):
        raise TypeError(f"{encoder!r} is not sent, as it would run code where it arrives; encode with it there")
    return encoder_to_json(encoder)


def _digest(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def schema_of(text: bytes, digest: int) -> Schema:
    """The schema of a header. Raises ``InvalidFileError``, a ``ValueError``, for what is none."""
    if _digest(text) != digest:
        refuse("a header that is not the one announced")
    try:
        header: Any = json.loads(text)
        plan, listed = header["plan"], header["specs"]
        groups: list[Group] = []
        for dtype, shape, stride, members in listed:
            spec = (DTYPES[dtype], tuple(shape), tuple(stride), members)
            if not is_spec(spec):
                refuse("a header whose layout is damaged")
            groups.append((spec[:3], list(members)))
        layout = lay_out(groups)
        count = len(layout.members)
        if sorted(layout.members) != list(range(count)) or layout.nbytes > 1 << 46:
            refuse("a header whose layout is damaged")
        reader = Reader(plan, count)
        if reader.numbers != list(range(count)):
            refuse("a header whose tensors are not in the order of its tree")
    except (KeyError, TypeError, IndexError, RecursionError, OverflowError, ValueError) as error:
        if isinstance(error, InvalidFileError):
            raise
        raise InvalidFileError(f"not a valid file: a damaged header: {error}") from error
    return Schema(text, digest, plan, layout.groups, layout, count)


def prefix_of(schema: Schema | None, text: int, where: torch.device) -> Tensor:
    """The numbers ahead of a message with so many bytes of text; without a schema, of a failure, whose text follows."""
    known = (0, 0) if schema is None else (schema.digest, schema.nbytes)
    return torch.tensor([schema is None, known[0], text, known[1], _MAGIC], device=where)


def read_prefix(prefix: Tensor) -> tuple[bool, int, int, int]:
    """Whether it is a failure, the digest, and the sizes of the text and of the block."""
    failed, digest, text, block, magic = cast("list[int]", cast(Any, prefix).tolist())
    if magic != _MAGIC or failed not in (0, 1) or not 0 <= text <= _LARGEST or block < 0:
        raise ValueError("what came is not from tensordict_lite; do all ranks make the same calls?")
    return bool(failed), digest, text, block


def failure(error: Exception) -> bytes:
    return f"{type(error).__name__}: {error}".encode(errors="replace")[:4096]


def text_of(text: Tensor) -> str:
    return bytes(text.cpu().numpy()).decode(errors="replace")
