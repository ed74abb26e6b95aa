"""What crosses a process group, and what its ends remember: prefixes, texts, blocks, and the schemas already sent."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed
from torch import Tensor

from ._device_dict import DeviceDict
from ._devices import DeviceLike, resolve
from ._message import (
    PREFIX,
    Message,
    Schema,
    failure,
    message_of,
    prefix_of,
    read_prefix,
    schema_of,
    text_of,
)
from ._transfer import transfer

Group = Any
dist: Any = torch.distributed  # half of its functions have no types
_KEPT = 64
"""Schemas that a channel remembers. Both ends forget the same ones, as both see the same messages in the same order."""
_channels: WeakKeyDictionary[Any, dict[tuple[Any, ...], dict[int, Schema]]] = WeakKeyDictionary()
"""By process group, so that one that is made after another was destroyed knows nothing; then by what the channel is."""


class Channel:
    """One way through a group: to or from one rank, or among all of them."""

    def __init__(self, group: Group, *of: Any) -> None:
        pg = dist.group.WORLD if group is None else group
        if pg is None:
            raise RuntimeError("there is no process group; call torch.distributed.init_process_group first")
        self.known = _channels.setdefault(pg, {}).setdefault(of, {})
        self.where = where(group)

    def remember(self, schema: Schema) -> None:
        """Make a schema the last one used."""
        self.known.pop(schema.digest, None)
        self.known[schema.digest] = schema
        if len(self.known) > _KEPT:
            del self.known[next(iter(self.known))]

    def parts(self, message: Message) -> list[Tensor]:
        """The tensors that are given for a message: a prefix, a header if it is new here, a block if there is one."""
        text = b"" if message.schema.digest in self.known else message.schema.text
        self.remember(message.schema)
        header = [as_tensor(text, self.where)] if text else []
        block = [transfer([message.block], self.where)[0]] if message.schema.nbytes else []
        return [prefix_of(message.schema, text, self.where), *header, *block]

    def failed(self, error: Exception) -> list[Tensor]:
        """The tensors that are given instead when there can be no message."""
        text = failure(error)
        return [prefix_of(None, text, self.where), as_tensor(text, self.where)]

    def empty_prefix(self) -> Tensor:
        return torch.zeros(PREFIX, dtype=torch.int64, device=self.where)

    def receive(self, prefix: Tensor, take: Callable[[Tensor], Any], src: int) -> tuple[Schema, Tensor]:
        """The schema and the block of the message that a prefix announces, the rest of which ``take`` fills in."""
        rank = dist.get_rank()
        try:
            failed, digest, size = read_prefix(prefix)
            if size:
                text = torch.empty(size, dtype=torch.uint8, device=self.where)
                take(text)
                if failed:
                    raise RuntimeError(f"rank {rank}: rank {src} could not send: {text_of(text)}")
                self.remember(schema_of(bytes(text.cpu().numpy()), digest))
            elif digest not in self.known:
                raise ValueError("a schema that was not announced; do all ranks make the same calls?")
        except ValueError as error:
            raise RuntimeError(f"rank {rank}: from rank {src}: {error}") from error
        schema = self.known[digest]
        self.remember(schema)
        block = torch.empty(schema.nbytes, dtype=torch.uint8, device=self.where)
        if schema.nbytes:
            take(block)
        return schema, block


def where(group: Group) -> torch.device:
    """The device of what crosses a group: the CPU if its backend takes it there, else the current accelerator."""
    backend = str(dist.get_backend(group))
    if any(name in backend for name in ("gloo", "mpi", "cpu")):
        return resolve("cpu")
    return resolve(torch.accelerator.current_accelerator() or "cuda")


def as_tensor(text: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)


def at_home(block: Tensor, device: DeviceLike | None) -> Tensor:
    """A block where the result is to be."""
    return block if device is None else transfer([block], resolve(device))[0]


def ranks_of(group: Group) -> list[int]:
    """The global ranks of a group, in its order."""
    return dist.get_process_group_ranks(dist.group.WORLD if group is None else group)


@contextmanager
def named(what: str) -> Generator[None]:
    """An error of torch's own, as when a peer is gone, with the rank that it is raised on and what it was doing."""
    try:
        yield
    except RuntimeError as error:
        if str(error).startswith("rank "):
            raise
        kind: Any = type(error)
        raise kind(f"rank {dist.get_rank()}: {what}: {error}") from error


def agreed(d: Any, group: Group) -> tuple[Message, list[int]]:
    """This rank's message and the digests of all, if no rank has anything against its dict; else an error on each."""
    device = where(group)
    message: Message | None = None
    text = b""
    try:
        if not isinstance(d, DeviceDict):
            raise TypeError(f"a DeviceDict is needed, got {type(d).__name__}")
        message = message_of(cast("DeviceDict[Any]", d))
    except (TypeError, ValueError) as error:
        text = failure(error)
    prefix = prefix_of(None if message is None else message.schema, text, device)
    prefixes = [torch.empty_like(prefix) for _ in ranks_of(group)]
    dist.all_gather(prefixes, prefix, group=group)
    read = [read_prefix(one) for one in prefixes]
    if message is None or any(failed for failed, _, _ in read):
        said = zip(ranks_of(group), texts_of_all(text, group), strict=True)
        reasons = "; ".join(f"rank {rank} has {reason.decode(errors='replace')}" for rank, reason in said if reason)
        raise RuntimeError(f"rank {dist.get_rank()}: {reasons}")
    return message, [digest for _, digest, _ in read]


def texts_of_all(mine: bytes, group: Group) -> list[bytes]:
    """A text of each rank, on every rank."""
    device = where(group)
    size = torch.tensor([len(mine)], device=device)
    sizes = [torch.empty_like(size) for _ in ranks_of(group)]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(one) for one in sizes]
    padded = as_tensor(mine.ljust(max(*lengths, 1), b"\0"), device)
    texts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(texts, padded, group=group)
    return [bytes(text.cpu().numpy())[:length] for text, length in zip(texts, lengths, strict=True)]
