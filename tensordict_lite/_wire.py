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
    prefix_of,
    read_prefix,
    schema_of,
    schema_to_send,
    text_of,
)
from ._transfer import transfer

Group = Any
dist: Any = torch.distributed  # half of its functions have no types
_KEPT = 64
"""Schemas that a channel remembers. Both ends forget the same ones, as both see the same messages in the same order."""
_DRAINED = 1 << 30
"""Bytes of a block that is taken and thrown away after a header that was refused, so that what follows is in step."""
_channels: WeakKeyDictionary[Any, dict[tuple[Any, ...], tuple[dict[int, Schema], list[Any]]]] = WeakKeyDictionary()
"""By process group, so that one that is made after another was destroyed knows nothing; then by what the channel is:
the schemas that it knows, and the receives that are under way."""


class Work:
    """A transfer under way, as `torch.distributed`'s: ``wait()`` returns when it is done, with what was received."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None
        self._error: Exception | None = None

    def wait(self) -> Any:
        """Wait for the end: None of `isend`, the dict of `irecv`. Raises what the transfer does; again, the same."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            try:
                self._result = finish()
            except Exception as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return self._result


class Channel:
    """One way through a group: to or from one rank, or among all of them."""

    def __init__(self, group: Group, *of: Any) -> None:
        state = _channels.setdefault(process_group(group), {}).setdefault(of, ({}, []))
        self.known: dict[int, Schema]
        self.pending: list[Any]
        self.known, self.pending = state
        self.where = where(group)

    def remember(self, schema: Schema) -> None:
        """Make a schema the last one used."""
        self.known.pop(schema.digest, None)
        self.known[schema.digest] = schema
        if len(self.known) > _KEPT:
            del self.known[next(iter(self.known))]

    def parts(self, message: Message) -> list[Tensor]:
        """The tensors that are given for a message: a prefix, a header if it is new here, a block if there is one."""
        schema = message.schema
        text = b"" if schema.digest in self.known else schema.text
        header = [as_tensor(text, self.where)] if text else []
        block = [transfer([message.block], self.where)[0]] if schema.nbytes else []
        out = [prefix_of(schema, len(text), self.where), *header, *block]
        self.remember(schema)  # when nothing can fail any more
        return out

    def failed(self, error: Exception) -> list[Tensor]:
        """The tensors that are given instead when there can be no message."""
        text = failure(error)
        return [prefix_of(None, len(text), self.where), as_tensor(text, self.where)]

    def empty_prefix(self) -> Tensor:
        return torch.zeros(PREFIX, dtype=torch.int64, device=self.where)

    def receive(self, prefix: Tensor, take: Callable[[Tensor], Any], src: int) -> tuple[Schema, Tensor]:
        """The schema and the block of the message that a prefix announces, the rest of which ``take`` fills in."""
        rank = dist.get_rank()
        try:
            failed, digest, size, nbytes = read_prefix(prefix)
        except ValueError as error:
            raise RuntimeError(f"rank {rank}: from rank {src}: {error}") from error
        text = torch.empty(size, dtype=torch.uint8, device=self.where)
        if size:
            take(text)
        if failed:
            raise RuntimeError(f"rank {rank}: rank {src} could not send: {text_of(text)}")
        try:
            if size:
                self.remember(schema_of(bytes(text.cpu().numpy()), digest))
            elif digest not in self.known:
                raise ValueError("a schema that was not announced; do all ranks make the same calls?")
            schema = self.known[digest]
            if schema.nbytes != nbytes:
                raise ValueError("a block that is not as large as its header says")
        except ValueError as error:
            if 0 < nbytes <= _DRAINED:
                take(torch.empty(nbytes, dtype=torch.uint8, device=self.where))
            raise RuntimeError(f"rank {rank}: from rank {src}: {error}") from error
        self.remember(schema)
        block = torch.empty(nbytes, dtype=torch.uint8, device=self.where)
        if nbytes:
            take(block)
        return schema, block


def process_group(group: Group) -> Any:
    pg = dist.group.WORLD if group is None else group
    if pg is None:
        raise RuntimeError("there is no process group; call torch.distributed.init_process_group first")
    if not isinstance(pg, dist.ProcessGroup):  # what new_group gives to those outside
        raise ValueError(f"rank {dist.get_rank()} is not in this group")
    return pg


def where(group: Group) -> torch.device:
    """The device of what crosses a group: the CPU if its backend takes it there, else the current accelerator."""
    if "cpu:" in str(dist.get_backend_config(process_group(group))):
        return resolve("cpu")
    return resolve(torch.accelerator.current_accelerator() or "cuda")


def as_tensor(text: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)


def at_home(block: Tensor, device: DeviceLike | None) -> Tensor:
    """A block where the result is to be."""
    return block if device is None else transfer([block], resolve(device))[0]


def ranks_of(group: Group) -> list[int]:
    """The global ranks of a group, in its order."""
    return dist.get_process_group_ranks(process_group(group))


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


def agreed(d: Any, group: Group, mark: int = 0, refused: Exception | None = None) -> tuple[Schema, list[int]]:
    """This rank's schema and the digests of all, if no rank has anything against its dict; else an error on each.

    ``mark``: what must be the same on every rank too; ``refused``: something else that this one has against it.
    """
    device, ranks = where(group), ranks_of(group)
    schema: Schema | None = None
    text = b""
    try:
        if refused is not None:
            raise refused
        if not isinstance(d, DeviceDict):
            raise TypeError(f"a DeviceDict is needed, got {type(d).__name__}")
        schema = schema_to_send(cast("DeviceDict[Any]", d))
    except Exception as error:  # whatever it is, the others wait to hear of it
        text = failure(error)
    prefix = prefix_of(schema, mark, device)
    prefixes = [torch.empty_like(prefix) for _ in ranks]
    dist.all_gather(prefixes, prefix, group=group)
    read = [read_prefix(one) for one in prefixes]
    if schema is None or any(failed for failed, *_ in read):
        said = zip(ranks, texts_of_all(text, group), strict=True)
        reasons = "; ".join(f"rank {rank} has {reason.decode(errors='replace')}" for rank, reason in said if reason)
        raise RuntimeError(f"rank {dist.get_rank()}: {reasons}")
    if len({marked for _, _, marked, _ in read}) > 1:
        raise RuntimeError(f"rank {dist.get_rank()}: ranks make this call in different ways, such as with another op")
    return schema, [digest for _, digest, _, _ in read]


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
