"""Pickle a dict for another process, or send the error if that fails.

DataLoader workers send through ``multiprocessing.Queue``, which pickles in a thread. That thread drops an object that
cannot be pickled, and the receiver would wait for ever. So a dict that may fail is pickled here first, and if it fails
the error is sent in its place.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor
from torch._utils import ExceptionWrapper  # what a DataLoader raises where it arrives
from torch.utils.data import get_worker_info

from .._encoders.protocol import EncodeOnly, StringEncoder
from .._errors import Path, TooDeep, dotted
from .tree import TreeDict, packed_state, reduce_args
from .walk import only_tensors

_OBJECTS = frozenset((type(None), bool, int, float, complex, str, bytes))
_DEPTH = 32
"""Levels of nesting that pickle takes for sure, whatever container holds the dict."""
_look = attrgetter("layout", "requires_grad")
_PLAIN = {(torch.strided, False)}
_has_names: Callable[[Tensor], bool] | None = getattr(Tensor, "has_names", None)
"""In some versions of torch a tensor can have named dimensions. Such a tensor cannot be pickled."""
_DEVICES = ("cpu", "cuda")
"""Devices whose memory other processes can open."""
_KEPT = 32
_pickled: list[object] = []
"""The encoders that this process pickled last. To try a large one again would take longer than its batch."""


def sent(d: TreeDict[Any]) -> tuple[Any, ...]:
    """The reduction of ``d`` for another process.

    If it cannot be pickled, raises an error that names the field or class. In the thread of a queue, which would drop
    the error, returns the reduction of the error instead. Cost: a look at each field; a dict that is not plain is
    pickled here.
    """
    try:
        state = packed_state(d)
        if is_plain(d, state[2]):
            return reduce_args(d, state)
        data = _dumps(_Pickler, d)
    except Exception as error:
        return _in_place_of(d, _named(d, error), error)
    for _, encoder in _encoders(d, ()):
        _remember(encoder)
    return pickle.loads, (data,)


def is_plain(d: TreeDict[Any], packed: Container[int] = (), depth: int = _DEPTH) -> bool:
    """Whether ``d`` can be pickled for sure: plain tensors, ``str`` keys, known encoders, classes found by name.

    ``packed``: the ids of tensors in the buffer of a packed dict, which is plain.
    """
    if not depth or set(map(type, d)) - {str} or not _is_importable(type(d)):
        return False
    if d._device is None or d._device.type not in _DEVICES:
        return False
    if d._policy is not d._class_policy and not all(_is_known(encoder) for _, encoder in _encoders(d, (), deep=False)):
        return False
    left = [value for value in d.values() if id(value) not in packed] if packed else d.values()
    if only_tensors(left):
        return _are_plain(cast("Iterable[Tensor]", left))
    for value in left:
        if isinstance(value, TreeDict):
            if not is_plain(cast("TreeDict[Any]", value), packed, depth - 1):
                return False
        elif not _is_plain_value(value):
            return False
    return True


def _are_plain(tensors: Iterable[Tensor]) -> bool:
    return _PLAIN.issuperset(map(_look, tensors)) and not (_has_names and any(map(_has_names, tensors)))


def refuse_unsendable(d: TreeDict[Any], at: Path = ()) -> None:
    """Raise ``TypeError`` for the first class, key, encoder, tensor or object in ``d`` that cannot be pickled."""
    cls = type(d)
    if not _is_importable(cls):
        where = f"{dotted(at)}: the" if at else "the"
        _try(cls, f"{where} class {cls.__qualname__}", "define it at the top of a module")
    if d._policy is not d._class_policy:
        for path, encoder in _encoders(d, at, deep=False):
            if not _is_known(encoder):
                which = f"{dotted(path)}: the" if path else "the default"
                _try(encoder, f"{which} encoder {encoder!r}", "use a function or class of a module")
                _remember(encoder)
    for key, value in d.items():
        path = (*at, key)
        if type(key) is not str:
            _try(key, f"{dotted(path)}: the key, of type {type(key).__qualname__},", "use a plain str")
        if isinstance(value, TreeDict):
            refuse_unsendable(cast("TreeDict[Any]", value), path)
        elif not _is_plain_value(value):
            what, way_out = _described(value)
            _try(value, f"{dotted(path)}: {what}", way_out)


def _described(value: Any) -> tuple[str, str]:
    if not isinstance(value, Tensor):
        return f"the kept {type(value).__qualname__}", "drop it, or keep an object that can be pickled"
    if value.requires_grad and not value.is_leaf:
        return "the tensor, which autograd computes,", "call .detach()"
    cls, layout = type(value).__qualname__, str(value.layout).removeprefix("torch.")
    return f"the {layout} {cls} on {value.device}", "convert it to a plain tensor on the CPU"


def _is_plain_value(value: Any) -> bool:
    if isinstance(value, Tensor):
        return type(value) is Tensor and value.device.type in _DEVICES and _are_plain([value])
    kind = cast(Any, type(value))
    return kind in _OBJECTS or (kind in (list, tuple) and _OBJECTS.issuperset(map(type, value)))


def _is_importable(cls: type[Any]) -> bool:
    return getattr(sys.modules.get(cls.__module__), cls.__qualname__, None) is cls


def _encoders(d: TreeDict[Any], at: Path, *, deep: bool = True) -> Iterator[tuple[Path, StringEncoder]]:
    """The encoders of ``d`` with the paths of their keys; the path of the default encoder is empty."""
    for key, encoder in d._policy.encoders.items():
        yield (*at, key), encoder
    yield (), d._policy.default_encoder
    for key, value in d.items() if deep else ():
        if isinstance(value, TreeDict):
            yield from _encoders(cast("TreeDict[Any]", value), (*at, key))


def _is_known(encoder: StringEncoder) -> bool:
    what = _function(encoder)
    return getattr(type(encoder), "is_data", False) is True or any(what is other for other in _pickled)


def _remember(encoder: StringEncoder) -> None:
    if not _is_known(encoder):
        _pickled[:] = [*_pickled[1 - _KEPT :], _function(encoder)]


def _function(encoder: StringEncoder) -> object:
    return encoder.function if isinstance(encoder, EncodeOnly) else encoder  # each batch has a wrapper of its own


class _Pickler(ForkingPickler):
    """Pickles the inside of a dict. Nested dicts are not tried one by one."""

    def reducer_override(self, obj: Any) -> Any:
        return reduce_args(cast("TreeDict[Any]", obj)) if isinstance(obj, TreeDict) else NotImplemented


class _Trial(_Pickler):
    """Leaves out tensors that take file descriptors or shared memory, which only a receiver could free."""

    def persistent_id(self, obj: Any) -> Any:
        is_storage = isinstance(obj, torch.UntypedStorage) and obj.device.type == "cpu"
        return True if is_storage or (isinstance(obj, Tensor) and _is_plain_value(obj)) else None


def _dumps(pickler: type[ForkingPickler], obj: Any) -> bytes:
    buffer = io.BytesIO()
    pickler(buffer).dump(obj)
    return buffer.getvalue()


def _try(obj: Any, what: str, way_out: str) -> None:
    try:
        _dumps(_Trial, obj)
    except Exception as error:
        raise TypeError(
            f"{what} cannot be pickled, so the dict cannot be sent to another process; {way_out}: {error}"
        ) from error


def _named(d: TreeDict[Any], error: Exception) -> Exception:
    """The error to raise if ``error`` came from pickling ``d``: it names the field or class."""
    try:
        refuse_unsendable(d)
    except TypeError as named:
        return named
    except RecursionError as deeper:
        error = deeper
    if isinstance(error, TooDeep):
        return error
    name = type(d).__qualname__
    if isinstance(error, RecursionError):
        return ValueError(f"this {name} is nested too deep to be sent to another process; send d.flatten()")
    return TypeError(f"this {name} cannot be sent to another process: {error}")


def _in_place_of(d: TreeDict[Any], named: Exception, cause: Exception) -> tuple[Any, ...]:
    """The reduction of the error, if the thread of a queue pickles ``d`` and would drop it; else raise the error."""
    feed = _frame_of("_feed")
    dropped = cast(Any, Queue)._on_queue_feeder_error
    if feed is None or feed.f_locals.get("onerror") is not dropped:  # that of a ProcessPoolExecutor reports errors
        raise named from cause
    worker = get_worker_info()
    where = "in a process that sends to this one" if worker is None else f"in DataLoader worker process {worker.id}"
    message = feed.f_locals.get("obj")  # of a DataLoader: (index, batch)
    alone = worker is not None and type(message) is tuple and len(cast(Any, message)) == 2 and message[1] is d
    return arrive, (named, where, alone)


def arrive(error: Exception, where: str, alone: bool) -> Any:
    """Raise the error of the sender in the process that receives.

    ``alone``: the dict was the whole batch of a DataLoader. Then return an `ExceptionWrapper`, which the DataLoader
    raises itself; it does not look for one inside a batch.
    """
    wrapped = ExceptionWrapper((type(error), error, None), where)  # pyright: ignore[reportArgumentType]
    if alone:
        return wrapped
    if _frame_of("_pin_memory_loop") is not None:  # an exception here would end the thread unseen
        return _Unpinnable(wrapped)
    wrapped.reraise()


class _Unpinnable:
    """Replaces a part of a batch. Raises when the DataLoader pins it, as then the DataLoader catches errors."""

    def __init__(self, error: ExceptionWrapper) -> None:
        self._error = error

    def pin_memory(self, device: object = None) -> None:
        self._error.reraise()


def _frame_of(function: str) -> FrameType | None:
    """The frame of ``function`` on the stack of this thread; None if it is not there."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame
