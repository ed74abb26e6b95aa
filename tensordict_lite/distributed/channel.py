"""Channels: send the tensors of a message through a process group, and cache the schemas on both sides."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed
from torch import Tensor

from .._dict.device_dict import DeviceDict
from .._memory.device import DeviceLike, resolve
from .._memory.transfer import transfer
from .._tree.manifest import InvalidManifest
from .message import PREFIX, Header, Message, failure, prefix_of, read_header, read_prefix, read_sizes

ProcessGroup = Any
T = TypeVar("T")
M = TypeVar("M", Header, Message, Header | Message)
dist: Any = torch.distributed  # many of its functions have no types
_MOST_SCHEMAS = 64
"""The size of the schema cache. Both sides evict the same schemas, because both see the same messages in order."""
_UNANNOUNCED = "a schema that was not announced; do all ranks make the same calls?"
_WRONG_SIZE = "the size of the buffer differs from its header"
_channels: WeakKeyDictionary[Any, dict[tuple[str, int, int], tuple[dict[int, Header | str], list[Any]]]] = (
    WeakKeyDictionary()
)
"""By process group, then by the arguments of the channel: its cached schemas and its pending receives. A new process
group starts with an empty cache."""


class Work:
    """An asynchronous transfer, like ``torch.distributed.Work``. ``wait()`` blocks and returns the received dict."""

    def __init__(self, finish: Callable[[], Any], queue: list[Work] | None = None) -> None:
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None
        self._error: Exception | None = None
        self._queue = [] if queue is None else queue
        """The transfers under way on a channel, in order. A transfer leaves the queue at its end."""
        self._queue.append(self)

    def wait(self) -> Any:
        """Wait for the transfer. Returns None for `isend` and the dict for `irecv`.

        Raises the errors of `send` or `recv`. A second call returns or raises the same.
        """
        try:
            if self._finish is not None:
                finish, self._finish = self._finish, None
                try:
                    self._result = finish()
                except Exception as error:
                    self._error = error
                finally:
                    self._queue.remove(self)
            if self._error is not None:
                raise self._error
            return self._result
        finally:
            del self  # otherwise a reference cycle of frame and error keeps the tensors of the call alive


class Errors:
    """The first error of this rank in one call. The rank raises it after its last message, so that no rank waits.

    Code that can fail on a single rank runs in ``with errors:``. If an error occurs before the first message, the rank
    sends the text of the error in place of a dict. A receiver always receives every message that is sent to it.
    """

    def __init__(self) -> None:
        self.first: Exception | None = None

    def __enter__(self) -> Errors:
        return self

    def __exit__(self, _: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        if self.first is None:
            self.first = error
        return True

    def attempt(self, make: Callable[[], T]) -> T | None:
        """The result of ``make``, or None after an error."""
        with self:
            return make()
        return None

    def raise_first(self, told: Exception | None = None) -> None:
        """Raise the first error, if any. Or raise ``told``, with the first error as its cause.

        Call it when no other rank waits for this rank.
        """
        first, self.first = self.first, None
        try:
            if told is not None:
                raise told from first
            if first is not None:
                raise first
        finally:
            del first, told  # otherwise a reference cycle of frame and error keeps the tensors of the call alive

    def results(self, works: list[Work]) -> list[Any]:
        """The result of each transfer. Waits for all transfers before it raises an error. Empties ``works``."""
        out: list[Any] = []
        while works:  # the frame of an error must not keep the transfer that has the error
            with self:
                out.append(works.pop(0).wait())
        self.raise_first()
        return out


class Destination:
    """The class and device of a received dict. Raises ``TypeError`` for the class, torch's error for the device."""

    def __init__(self, cls: Any, device: DeviceLike | None) -> None:
        if not (isinstance(cls, type) and issubclass(cls, DeviceDict)):
            raise TypeError(f"cls= takes DeviceDict or a subclass of it, got {cls!r}")
        self.cls: Any = cls
        self.device = None if device is None else resolve(device)

    def build(self, schema: Header, buffers: list[Tensor], src: int) -> Any:
        """Build the dict that rank ``src`` sent. Raises ``RuntimeError`` if its manifest is invalid."""
        buffers = buffers if self.device is None else transfer(buffers, self.device)
        try:
            return schema.build(self.cls, buffers)
        except InvalidManifest as error:  # for example an encoder that is not registered on this rank
            raise rank_error(f"from rank {src}: not a valid message: {error}") from error


class Channel:
    """A route of messages in a process group: to one rank, from one rank, or among all ranks.

    ``kind``: ``"to"``, ``"from"``, ``"broadcast"``, of which the peer is the sender, or ``"all"``.
    """

    def __init__(self, group: ProcessGroup, kind: str, peer: int = 0, tag: int = 0) -> None:
        state = _channels.setdefault(process_group(group), {}).setdefault((kind, peer, tag), ({}, []))
        self.group, self.kind, self.peer, self.tag = group, kind, peer, tag
        self.known: dict[int, Header | str]
        self.pending: list[Any]
        self.known, self.pending = state
        self.comm_device = comm_device(group)

    @contextmanager
    def explained(self, what: str) -> Generator[None]:
        """Add this rank and the operation ``what`` to the message of an error of torch, such as a lost peer.

        For a collective, add the ranks of the group too.
        """
        try:
            yield
        except RuntimeError as error:
            if str(error).startswith("rank "):
                raise
            kind: Any = type(error)
            among = f" among ranks {_listed(ranks_of(self.group))}" if self.kind in ("broadcast", "all") else ""
            raise kind(f"rank {dist.get_rank()}: {what}{among}: {error}") from error

    def remember(self, digest: int, schema: Header | str) -> None:
        """Cache a schema, or the reason why it is invalid, as the most recently used entry."""
        self.known.pop(digest, None)
        self.known[digest] = schema
        if len(self.known) > _MOST_SCHEMAS:
            del self.known[next(iter(self.known))]

    def learn(self, text: bytes, digest: int) -> Header | str:
        """The schema of a header, or the reason why the header is invalid.

        Caches the reason too: the other ranks do not know of the error and do not send the header again.
        """
        try:
            schema = read_header(text, digest)
        except ValueError as error:
            schema = str(error)
        self.remember(digest, schema)
        return schema

    def tensors_of(self, message: Message | None, errors: Errors) -> list[Tensor]:
        """The tensors to send: a prefix, the sizes of several parts, a header if the schema is new, and the parts.

        Without a message, after an error: a prefix and the text of the error.
        """
        with errors:
            if message is not None:
                schema = message.schema
                text = b"" if schema.digest in self.known else schema.text
                header = [as_tensor(text, self.comm_device)] if text else []
                parts = transfer(message.parts, self.comm_device)
                out = [prefix_of(schema, len(text), self.comm_device), *header, *parts]
                if len(parts) > 1:  # so that a receiver that cannot read the header can still receive every part
                    out.insert(1, torch.tensor([part.nbytes for part in parts], device=self.comm_device))
                self.remember(schema.digest, schema)  # last, because nothing can fail after it
                return out
        assert errors.first is not None
        text = failure(errors.first)
        return [prefix_of(None, len(text), self.comm_device), as_tensor(text, self.comm_device)]

    def share(self, parts: list[Tensor]) -> None:
        """Broadcast the parts of a message. The other ranks receive into them."""
        together(lambda part: dist.broadcast(part, self.peer, group=self.group, async_op=True), parts)

    def take(self, parts: list[Tensor]) -> None:
        """Receive the parts of a message."""
        if self.kind == "broadcast":
            return self.share(parts)
        together(lambda part: dist.irecv(part, self.peer, group=self.group, tag=self.tag), parts)

    def receive(self) -> tuple[Header, list[Tensor]]:
        """Receive a message: the schema and the buffers.

        Raises ``RuntimeError`` that names the sender if the sender failed or the message is invalid.
        """
        prefix = torch.zeros(PREFIX, dtype=torch.int64, device=self.comm_device)
        self.take([prefix])
        try:
            failed, digest, size, nbytes, count = read_prefix(prefix)
            sizes = [nbytes][:count]
            if count > 1:
                announced = torch.empty(count, dtype=torch.int64, device=self.comm_device)
                self.take([announced])
                sizes = read_sizes(announced, nbytes)
        except ValueError as error:
            raise rank_error(f"from rank {self.peer}: {error}") from error
        received = torch.empty(size, dtype=torch.uint8, device=self.comm_device)
        if size:
            self.take([received])
        text = bytes(received.cpu().numpy())
        if failed:
            raise rank_error(f"rank {self.peer} could not send: {text.decode(errors='replace')}")
        schema = self.learn(text, digest) if size else self.known.get(digest, _UNANNOUNCED)
        if not size and schema is not _UNANNOUNCED:
            self.remember(digest, schema)
        # Receive an invalid message too. Otherwise the next receive would read these bytes as its prefix.
        parts = [torch.empty(size, dtype=torch.uint8, device=self.comm_device) for size in sizes]
        self.take(parts)
        valid = accepted(schema, nbytes, self.peer, sizes)
        return valid, valid.buffers(parts, self.comm_device)

    def agreed(self, make: Callable[[], M], errors: Errors, mark: int = 0) -> tuple[M, list[tuple[int, int]]]:
        """Call ``make`` on every rank. Returns its result, and the digest and size in bytes of the dict of each rank.

        If a rank has an error, every rank raises a ``RuntimeError`` that names the rank and the error.

        Args:
            make: returns the message or the header of this rank.
            errors: the errors in the arguments of this rank. This rank raises them unchanged.
            mark: a number for the arguments of the call. If it differs, every rank raises a ``RuntimeError``.
        """
        invalid = errors.first is not None
        made: Any = None if invalid else errors.attempt(make)
        text = b"" if errors.first is None else failure(errors.first)
        prefix = prefix_of(getattr(made, "schema", made), mark, self.comm_device)
        read = [read_prefix(one) for one in self.of_all(prefix)]
        if any(failed for failed, *_ in read):
            said = zip(ranks_of(self.group), self.texts_of_all(text), strict=True)
            reasons = "; ".join(f"rank {rank} has {reason.decode(errors='replace')}" for rank, reason in said if reason)
            errors.raise_first(None if invalid else rank_error(reasons))
        if len({marked for _, _, marked, *_ in read}) > 1:
            raise rank_error("the ranks make this call with different arguments, such as op")
        return made, [(digest, nbytes) for _, digest, _, nbytes, _ in read]

    def texts_of_all(self, mine: bytes) -> list[bytes]:
        """Gather one text from each rank on every rank."""
        lengths = [int(one) for one in self.of_all(torch.tensor([len(mine)], device=self.comm_device))]
        texts = self.of_all(as_tensor(mine.ljust(max(*lengths, 1), b"\0"), self.comm_device))
        return [bytes(text.cpu().numpy())[:length] for text, length in zip(texts, lengths, strict=True)]

    def of_all(self, mine: Tensor) -> list[Tensor]:
        """Gather one tensor from each rank on every rank. All have the same dtype and shape."""
        out = [torch.empty_like(mine) for _ in ranks_of(self.group)]
        dist.all_gather(out, mine, group=self.group)
        return out


def rank_error(text: str) -> RuntimeError:
    """An error that names this rank."""
    return RuntimeError(f"rank {dist.get_rank()}: {text}")


def accepted(schema: Header | str, nbytes: int, src: int, sizes: list[int] | None = None) -> Header:
    """The schema, if it is valid and has ``nbytes``, in parts of ``sizes`` if given.

    Raises ``RuntimeError`` that names rank ``src``.
    """
    if isinstance(schema, Header) and schema.nbytes == nbytes and sizes in (None, [size for _, size in schema.parts]):
        return schema
    raise rank_error(f"from rank {src}: {schema if isinstance(schema, str) else _WRONG_SIZE}")


def process_group(group: ProcessGroup) -> Any:
    """The process group; the default group for None. Raises an error if there is none, or if this rank is outside."""
    pg = dist.group.WORLD if group is None else group
    if pg is None:
        raise RuntimeError("there is no process group; call torch.distributed.init_process_group first")
    if not isinstance(pg, dist.ProcessGroup):  # new_group returns another object on ranks outside the group
        raise ValueError(f"rank {dist.get_rank()} is not in this group")
    return pg


def comm_device(group: ProcessGroup) -> torch.device:
    """The device of tensors that a group sends: the CPU if the group has a backend for it, else its accelerator."""
    # The configuration is a text such as "cpu:gloo,cuda:nccl".
    types = [one.partition(":")[0] for one in str(dist.get_backend_config(process_group(group))).split(",")]
    return resolve("cpu" if "cpu" in types else types[0])


def as_tensor(text: bytes, device: torch.device) -> Tensor:
    """The bytes as uint8[len(text)] on ``device``."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)


def ranks_of(group: ProcessGroup) -> list[int]:
    """The global ranks of a group, in the order of the group."""
    return dist.get_process_group_ranks(process_group(group))


def together(start: Callable[[T], Any], parts: Iterable[T]) -> list[Any]:
    """Start a transfer for each part of a message, and wait for them. Returns the result of each ``wait()``.

    Raises the first error at once: the connection is broken then. Some of the other parts would wait for the whole
    timeout of the group, one after the other. The transfers start one by one, not as ``batch_isend_irecv``, since with
    NCCL that call needs every rank of the group.
    """
    works = [start(part) for part in parts]
    return [work.wait() for work in works]


def _listed(ranks: list[int]) -> str:
    """The ranks in words. A long list is shortened."""
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]} to {ranks[-1]}, {len(ranks)} in all"
