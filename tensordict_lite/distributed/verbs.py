"""The public functions: point-to-point and collective communication of dicts."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from .._dict.arithmetic import refuse_encoded
from .._dict.device_dict import DeviceDict
from .._errors import Path, described, dotted
from .._memory.device import DeviceLike, canonical
from .._memory.layout import may_share
from .._memory.transfer import transfer
from .._tree.fields import data_paths, refuse_ragged
from .channel import Channel, Destination, Errors, ProcessGroup, Work, accepted, dist, rank_error, ranks_of, together
from .message import LARGE, Header, Message, header_of, message_of, read_header

D = TypeVar("D", bound=DeviceDict[Any])
Op = Literal["sum", "mean", "max", "min"]
_OPS = ("sum", "mean", "max", "min")
_ALL = "every rank"
_TAG = 0x7464
"""The tag of messages from `scatter` and `gather`. It keeps them separate from the messages of `send`."""


# --- point to point ---


def send(d: DeviceDict[Any], dst: int, tag: int = 0, group: ProcessGroup = None) -> None:
    """Send a dict to rank ``dst``. Rank ``dst`` calls `recv`.

    Args:
        d: the dict to send.
        dst: the global rank of the receiver.
        tag: a number that `recv` must give too, as in ``torch.distributed.send``.
        group: the process group. None: the default group.

    Raises: ``TypeError`` that names the field that cannot be sent. The receiver raises a ``RuntimeError`` with the same
    text.
    Cost: two messages, or three if the schema is new to ``dst``, and one for each buffer of more than 64 KiB. One copy
    of the tensors, except those of 1 MiB or more, and of packed dicts of more than 64 KiB.
    """
    isend(d, dst, tag, group).wait()


def isend(d: DeviceDict[Any], dst: int, tag: int = 0, group: ProcessGroup = None) -> Work:
    """Send a dict asynchronously, like `send`. Do not change the dict before ``wait()`` returns.

    ``wait()`` raises the errors of `send`.
    """
    errors = Errors()
    message = errors.attempt(lambda: message_of(_checked(d, "send")))
    return _started(Channel(group, "to", dst, tag), message, errors, "send")


def _started(channel: Channel, message: Message | None, errors: Errors, verb: str) -> Work:
    """Start to send a message, or the text of an error if there is no message. ``wait()`` raises that error."""
    what = f"{verb} to rank {channel.peer}"
    with channel.explained(what):
        parts = channel.tensors_of(message, errors)
        works = [dist.isend(part, channel.peer, group=channel.group, tag=channel.tag) for part in parts]

    def finish() -> None:
        with errors, channel.explained(what):
            for work in works:
                work.wait()
        parts.clear()  # the tensors had to stay alive until the transfer was complete
        errors.raise_first()

    return Work(finish)


def recv(
    src: int,
    tag: int = 0,
    like: DeviceDict[Any] | None = None,
    group: ProcessGroup = None,
    *,
    cls: type[D] = DeviceDict,
    device: DeviceLike | None = None,
) -> D:
    """Receive a dict from rank ``src``. Rank ``src`` calls `send`.

    Args:
        src: the global rank of the sender.
        tag: the number that `send` gives.
        like: a dict with the expected schema. It may be on meta. None accepts any schema.
        group: the process group. None: the default group.
        cls: the class of the result. A `TypedDeviceDict` class validates the names and kinds of its fields.
        device: the device of the result. None: the device that the group communicates on.

    Raises: ``RuntimeError`` that names the rank, if the sender raised an error or the header is invalid. ``ValueError``
    that names the field, if the schema differs from the schema of ``like``.
    """
    return irecv(src, tag, like, group, cls=cls, device=device).wait()


def irecv(
    src: int,
    tag: int = 0,
    like: DeviceDict[Any] | None = None,
    group: ProcessGroup = None,
    *,
    cls: type[D] = DeviceDict,
    device: DeviceLike | None = None,
) -> Work:
    """Receive a dict asynchronously, like `recv`. ``wait()`` receives the message and returns the dict."""
    return _receiving(Channel(group, "from", src, tag), cls, device, "receive", like)


def _receiving(channel: Channel, cls: Any, device: DeviceLike | None, verb: str, like: Any = None) -> Work:
    """The receipt of a message. ``wait()`` returns the dict."""
    errors, src, what = Errors(), channel.peer, f"{verb} from rank {channel.peer}"
    target = errors.attempt(lambda: Destination(cls, device))
    expected = errors.attempt(
        lambda: None if like is None else header_of(_checked(like, "like=", "the rank that receives"), False)
    )
    earlier = list(channel.pending)  # messages arrive in order, and each has several parts

    def finish() -> DeviceDict[Any]:
        while earlier:
            with suppress(Exception):  # the `wait()` of the earlier receive raises the error to its caller
                earlier.pop(0).wait()
        received: Any = None
        with errors, channel.explained(what):
            received = channel.receive()
        errors.raise_first()
        schema, buffers = received
        different = "" if expected is None else schema.difference(expected)
        if different:
            raise ValueError(f"rank {dist.get_rank()}: rank {src} sent a schema that differs from like=: {different}")
        return cast(Destination, target).build(schema, buffers, src)

    return Work(finish, channel.pending)


# --- collectives ---


def broadcast(
    d: DeviceDict[Any] | None,
    src: int = 0,
    group: ProcessGroup = None,
    *,
    cls: type[D] = DeviceDict,
    device: DeviceLike | None = None,
) -> D:
    """Broadcast the dict of rank ``src`` to every rank. The other ranks ignore their ``d``; pass None.

    Rank ``src`` returns ``d`` itself. ``cls`` and ``device`` have the same meaning as in `recv`.

    Raises: ``TypeError`` on ``src`` for a dict that cannot be sent. The other ranks raise ``RuntimeError`` that names
    ``src``.
    Cost: two collectives, or three for a new schema, and one for each buffer of more than 64 KiB. One copy of the
    tensors, except those of 1 MiB or more, and of packed dicts of more than 64 KiB.
    """
    errors, channel = Errors(), Channel(group, "broadcast", src)
    if dist.get_rank() != src:
        return _receiving(channel, cls, device, "broadcast").wait()
    message = errors.attempt(lambda: message_of(_checked(d, "broadcast")))
    with channel.explained(f"broadcast from rank {src}"):
        channel.share(channel.tensors_of(message, errors))
    errors.raise_first()
    return cast(D, d)


def scatter(
    d: DeviceDict[Any] | None,
    src: int = 0,
    group: ProcessGroup = None,
    *,
    uneven: bool = False,
    cls: type[D] = DeviceDict,
    device: DeviceLike | None = None,
) -> D:
    """Split the rows of the dict of rank ``src`` equally, one part for each rank in the order of the group.

    The other ranks ignore their ``d``; pass None. Rank ``src`` returns a view of its rows.

    Args:
        uneven: allow a number of rows that the number of ranks does not divide. The first ranks get one more row.
        cls: the class of the result on the other ranks, as in `recv`.
        device: the device of the result on the other ranks, as in `recv`.

    Raises: ``ValueError`` on ``src`` if the parts are not equal and ``uneven`` is False. ``TypeError`` on ``src`` for a
    dict that cannot be sent. In both cases the other ranks raise ``RuntimeError`` that names ``src``.
    Cost: one `send` from ``src`` to each other rank.
    """
    if dist.get_rank() != src:
        return _receiving(Channel(group, "from", src, _TAG), cls, device, "scatter").wait()
    ranks, errors = ranks_of(group), Errors()
    parts: list[Any] = []
    messages: list[Message | None] = [None] * len(ranks)
    with errors:
        parts = _split_rows(_checked(d, "scatter"), len(ranks), uneven)
        messages = [message_of(part) for part in parts]  # before anything is sent
    works: list[Work] = []
    for message, other in zip(messages, ranks, strict=True):
        if other != src:
            with errors:  # if one peer is lost, the other peers still get their parts
                works.append(_started(Channel(group, "to", other, _TAG), message, errors, "scatter"))
    errors.results(works)
    return parts[ranks.index(src)]


def gather(
    d: D, dst: int = 0, group: ProcessGroup = None, *, cls: type[D] | None = None, device: DeviceLike | None = None
) -> list[D] | None:
    """Gather the dicts of all ranks on rank ``dst``, in the order of the group. The other ranks return None.

    The dicts may differ in fields and sizes. ``cls`` is the class of the received dicts; None: the class of ``d``.

    Raises: an error on every rank, if the dict or the arguments of one rank are invalid. If a received dict is invalid,
    only rank ``dst`` raises, after it has received all dicts.
    Cost: one small collective, and a `send` from each rank.
    """
    errors, here = Errors(), dist.get_rank() == dst
    everyone = Channel(group, "all")
    kind: Any = _class_of(d, cls)
    with errors:
        if here:
            Destination(kind, device)
    with everyone.explained(f"gather to rank {dst}"):
        make: Any = header_of if here else message_of  # the dict of rank ``dst`` stays there
        made, _ = everyone.agreed(lambda: make(_checked(d, "gather", _ALL)), errors)
    if isinstance(made, Message):
        _started(Channel(group, "to", dst, _TAG), made, errors, "gather").wait()
        return None
    ranks = ranks_of(group)
    channels = [Channel(group, "from", src, _TAG) for src in ranks if src != dst]
    gathered = errors.results([_receiving(channel, kind, device, "gather") for channel in channels])
    gathered.insert(ranks.index(dst), d)
    return gathered


def all_gather(
    d: D, group: ProcessGroup = None, *, cls: type[D] | None = None, device: DeviceLike | None = None
) -> list[D]:
    """Gather the dicts of all ranks on every rank, in the order of the group. The entry of this rank is ``d`` itself.

    The dicts may differ in fields and sizes. ``cls`` is the class of the received dicts; None: the class of ``d``.

    Raises: an error on every rank, if the dict or the arguments of one rank are invalid. If a received dict is invalid
    on one rank, only this rank raises, after the last collective.
    Cost: two collectives, or four if a schema is new. One copy of the tensors. If every dict is smaller than 1 MiB,
    each rank sends as many bytes as the largest dict has. Otherwise each rank broadcasts its dict. If the schemas are
    equal, each buffer of more than 64 KiB then has a collective of its own.
    """
    channel, errors = Channel(group, "all"), Errors()
    target: Any = errors.attempt(lambda: Destination(_class_of(d, cls), device))
    with channel.explained("all_gather"):
        message, announced = channel.agreed(lambda: message_of(_checked(d, "all_gather", _ALL)), errors)
        schemas: list[Any] = [channel.known.get(digest) for digest, _ in announced]
        if None in schemas:
            texts = channel.texts_of_all(message.schema.text)
            schemas = [channel.learn(text, digest) for text, (digest, _) in zip(texts, announced, strict=True)]
        for (digest, _), schema in zip(announced, schemas, strict=True):
            channel.remember(digest, schema)
        received = _from_all_ranks(message, announced, channel)
    out: list[D] = []
    for src, schema, given, (_, nbytes) in zip(ranks_of(group), schemas, received, announced, strict=True):
        if given is None:
            out.append(d)
            continue
        valid = accepted(schema, nbytes, src)
        joined = isinstance(given, Tensor)
        buffers = valid.split(given) if joined else valid.buffers(given, channel.comm_device)
        out.append(target.build(valid, buffers, src))
    return out


def _from_all_ranks(
    message: Message, announced: list[tuple[int, int]], channel: Channel
) -> list[Tensor | list[Tensor] | None]:
    """Gather the buffers of all ranks, in the order of the group: joined, or the parts of the message.

    None for this rank, which has its dict. Each rank broadcasts large buffers. A collective ``all_gather`` would copy
    them twice more in some backends, also on the rank that sends them, and would need buffers of one size.
    """
    parts, device = transfer(message.parts, channel.comm_device), channel.comm_device
    rank, ranks = dist.get_rank(), ranks_of(channel.group)
    largest = max(nbytes for _, nbytes in announced)
    if largest < LARGE:
        mine = _one_buffer(message.schema, parts, largest, device)
        gathered = channel.of_all(mine) if largest else [mine] * len(ranks)
        return [None if src == rank else buffer for src, buffer in zip(ranks, gathered, strict=True)]
    alike = len(set(announced)) == 1
    out: list[Tensor | list[Tensor] | None] = []
    sent: list[tuple[int, Tensor]] = []
    for src, (_, nbytes) in zip(ranks, announced, strict=True):
        if src == rank:
            theirs = parts if alike else [_one_buffer(message.schema, parts, nbytes, device)]
            out.append(None)
        else:
            sizes = [size for _, size in message.schema.parts] if alike else [nbytes]
            theirs = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
            out.append(theirs if alike else theirs[0])
        sent += [(src, part) for part in theirs if part.nbytes]
    together(lambda part: dist.broadcast(part[1], part[0], group=channel.group, async_op=True), sent)
    return out


def _one_buffer(schema: Header, parts: list[Tensor], nbytes: int, device: torch.device) -> Tensor:
    """The buffers of a message, joined to ``nbytes``, which are more if another rank sends more bytes."""
    if len(parts) == 1 and parts[0].nbytes == nbytes:
        return parts[0]
    out = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    for (start, size), part in zip(schema.parts, parts, strict=True):
        out[start : start + size] = part
    return out


def all_reduce(d: D, op: Op = "sum", group: ProcessGroup = None, *, weight: str | Path | None = None) -> D:
    """Reduce the dicts of all ranks to a new dict: the elementwise sum, mean, maximum or minimum.

    All dicts must have the same schema: fields in the same order, dtypes, shapes, encoders and options.

    Args:
        d: the dict of this rank. It does not change.
        op: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.
        group: a process group; None: all ranks.
        weight: with ``"mean"``, the key of a field with one number, such as the number of tokens. Every other field of
            the rank is a mean over these tokens. The result has the means over the tokens of all ranks, and the sum of
            the weights. A rank with the weight 0 contributes nothing, even if its means are NaN. If the sum is 0, the
            means are NaN.

    Sums, maxima and minima are computed in the dtype of the field, so a sum of small integers can wrap, as in torch.
    Means are computed in float32 or wider, and have the dtype of the field. The sum of the weights is an int64, or a
    float32 or wider.

    Raises: ``ValueError`` for an invalid ``op`` or ``weight``, and ``RuntimeError`` on the other ranks. Every rank
    raises ``RuntimeError`` that names the rank and the field, if schemas differ or a field has encoded strings. Every
    rank raises ``RuntimeError`` that names the field, if its dtype does not support ``op``. Integers have no mean,
    bools no sum, complex numbers no order.
    Cost: one small collective, one collective for each dtype, and one for each tensor of 1 MiB or more. A copy of the
    tensors.
    """
    errors, channel, mark, path = Errors(), Channel(group, "all"), 0, None
    with errors:
        if op not in _OPS:
            raise ValueError(f"op is 'sum', 'mean', 'max' or 'min', got {op!r}")
        mark = _OPS.index(op)
        if weight is not None:
            if op != "mean":
                raise ValueError(f"weight= belongs to op='mean', got op={op!r}")
            path = weight if isinstance(weight, tuple) else (weight,)
            _require_weight(_reducible(d), path)
            op, mark = "sum", len(_OPS) + list(d).index(path[0])
    with channel.explained("all_reduce"):
        schema, announced = channel.agreed(lambda: header_of(_reducible(d)), errors, mark)
        digests = [digest for digest, _ in announced]
        if len(set(digests)) > 1:
            _refuse_differing(schema, digests, channel)
        names, tensors = list(map(dotted, schema.paths)), [tensor.detach() for tensor in d._tensors()]
        at = None if path is None else schema.paths.index(path)
        if at is not None:
            tensors = _weighted(tensors, at)
        groups: dict[Any, list[int]] = {}  # one collective each: the small tensors of a dtype, or a large tensor
        for i, tensor in enumerate(tensors):
            if reason := _irreducible(tensor.dtype, op):
                raise rank_error(f"{names[i]} is {tensor.dtype}: {reason}")
            groups.setdefault(tensor.dtype if tensor.nbytes < LARGE else i, []).append(i)
        out: list[Any] = [None] * len(tensors)

        def start(members: list[int]) -> Work:
            what = f"{op} of {tensors[members[0]].dtype}, which {names[members[0]]} is, in all_reduce"
            return _started_reduction(torch.cat([tensors[i].reshape(-1) for i in members]), op, channel, what)

        for members, flat in zip(groups.values(), together(start, groups.values()), strict=True):
            split = torch.split_with_sizes(flat, [tensors[i].numel() for i in members])
            apart = not may_share(flat.untyped_storage().nbytes(), min([part.nbytes for part in split]))
            for i, part in zip(members, split, strict=True):
                own = part.clone() if apart else part
                out[i] = own.view(tensors[i].shape).data  # .data has its own version counter
    if at is not None:
        fields = enumerate(zip(out, d._tensors(), strict=True))
        out = [total if i == at else (total / out[at]).to(given.dtype) for i, (total, given) in fields]
    return d._replace_tensors(out, d._device)


def _require_weight(d: DeviceDict[Any], path: Path) -> None:
    """Raise ``ValueError`` unless the field at ``path`` is one number, and every other field has a mean."""
    number: Any = d.get(path)
    if not isinstance(number, Tensor) or number.dim():
        got = "no such field" if number is None else described(number)
        raise ValueError(f"weight= names a field with one number, {dotted(path)} is {got}")
    for where, tensor in data_paths(d):
        if where != path and (reason := _irreducible(tensor.dtype, "mean")):
            raise ValueError(f"{dotted(where)} is {tensor.dtype}: {reason}")


def _weighted(tensors: list[Tensor], at: int) -> list[Tensor]:
    """The tensors times the number at the index ``at``, and this number itself, all in the dtypes of `_wide`."""
    wide = [tensor.to(_wide(tensor.dtype)) for tensor in tensors]
    number = wide[at]
    none = number == 0  # NaN * 0 is NaN, and the mean over no tokens is NaN
    return [tensor if i == at else (tensor * number).masked_fill_(none, 0) for i, tensor in enumerate(wide)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype for a sum that is part of a mean: float32 or wider, or int64."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.int64
    return torch.float32 if dtype.itemsize == 1 else torch.promote_types(dtype, torch.float32)  # never of float8


def _checked(d: Any, verb: str, on: str = "the rank that sends") -> DeviceDict[Any]:
    """``d`` itself. Raises ``TypeError`` unless ``d`` is a `DeviceDict`."""
    if not isinstance(d, DeviceDict):
        raise TypeError(f"{verb} takes a DeviceDict on {on}, got {type(d).__name__}")
    return d


def _reducible(d: Any) -> DeviceDict[Any]:
    """``d`` itself. Raises ``TypeError`` for encoded strings, and for a ragged field, whose rows belong to one rank."""
    refuse_ragged(_checked(d, "all_reduce", _ALL), "all_reduce takes tensors", "leave it out: drop(...)")
    refuse_encoded(d, "all_reduce")
    return d


def _class_of(d: Any, cls: Any) -> Any:
    """The class of the received dicts: ``cls``, or the class of ``d`` if ``cls`` is None."""
    of_d = type(d) if isinstance(d, DeviceDict) else DeviceDict
    return of_d if cls is None else cls


def _split_rows(d: DeviceDict[Any], count: int, uneven: bool) -> list[DeviceDict[Any]]:
    """Split the rows of ``d`` into ``count`` parts. If ``uneven``, the first parts may have one more row."""
    each, more = divmod(len(d.rows), count)
    if more and not uneven:
        raise ValueError(f"{len(d.rows)} rows cannot be split evenly over {count} ranks; set uneven=True")
    return d.rows.split([each + (i < more) for i in range(count)])


def _refuse_differing(mine: Header, digests: list[int], channel: Channel) -> None:
    """Raise ``RuntimeError`` that names the first rank whose schema differs, and the field."""
    texts = channel.texts_of_all(mine.text)
    first, *others = [read_header(text, digest) for text, digest in zip(texts, digests, strict=True)]
    lead, *ranks = ranks_of(channel.group)
    for rank, schema in zip(ranks, others, strict=True):  # pragma: no branch  (one schema differs)
        different = schema.strict_difference(first)
        if different:  # pragma: no branch  (else with more than two ranks only)
            raise rank_error(f"all_reduce needs one schema, and rank {rank} differs from rank {lead}: {different}")


def _irreducible(dtype: torch.dtype, op: Op) -> str:
    """The reason why a dtype does not support ``op``; empty if it does."""
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        return "integers have no mean; convert it to float first"
    if op == "sum" and dtype == torch.bool:
        return "bools have no sum; convert it to int first"
    if op in ("max", "min") and dtype.is_complex:
        return "complex numbers have no order"
    return ""


def _started_reduction(flat: Tensor, op: Op, channel: Channel, what: str) -> Work:
    """Start to reduce ``flat`` over all ranks. Overwrites ``flat``. ``what``: the reduction, for the error of torch."""
    kind = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
    home, dtype = canonical(flat.device), flat.dtype
    flat = transfer([flat.to(_wide(dtype)) if op == "mean" else flat], channel.comm_device)[0]
    # Some backends support neither bools nor complex numbers.
    view = (
        flat.view(torch.uint8) if flat.dtype == torch.bool else torch.view_as_real(flat) if flat.is_complex() else flat
    )
    with channel.explained(what):
        work = dist.all_reduce(view, kind, group=channel.group, async_op=True) if flat.numel() else None

    def finish() -> Tensor:
        with channel.explained(what):
            if work is not None:
                work.wait()
        reduced = flat.div_(len(ranks_of(channel.group))).to(dtype) if op == "mean" else flat
        return transfer([reduced], home)[0]

    return Work(finish)
