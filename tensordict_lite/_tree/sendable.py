"""Pickle a dict for another process. If pickling fails, send the error instead of the dict.

A DataLoader worker sends batches through a ``multiprocessing.Queue``, which pickles them in a thread. That thread drops
an object that cannot be pickled, and the receiver waits forever. So this module first pickles every dict that may fail.
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
from torch._utils import ExceptionWrapper  # a DataLoader raises the error inside when it receives one
from torch.utils.data import get_worker_info

from .._encoders.protocol import EncodeOnly, StringEncoder
from .._errors import Path, TooDeep, dotted
from .._memory.mapped import by_file, is_any_mapped, is_candidate
from .tree import TreeDict, packed_state, reduce_args
from .walk import only_tensors

_OBJECTS = frozenset((type(None), bool, int, float, complex, str, bytes))
_DEPTH = 32
"""The depth of nesting that pickle always supports, even if another container holds the dict."""
_look = attrgetter("layout", "requires_grad")
_PLAIN = {(torch.strided, False)}
_has_names: Callable[[Tensor], bool] | None = getattr(Tensor, "has_names", None)
"""Tests for named dimensions, which some versions of torch have. A tensor with named dimensions cannot be pickled."""
_DEVICES = ("cpu", "cuda")
"""Devices whose memory can be shared between processes."""
_KEPT = 32
_pickled: list[object] = []
"""The last encoders that this process pickled. A second trial of a large encoder may take longer than the batch."""


def sent(d: TreeDict[Any]) -> tuple[Any, ...]:
    """The reduction of ``d`` for another process.

    Raises an error that names the field or class if ``d`` cannot be pickled. The thread of a queue would drop the
    error: there, returns the reduction of the error. Cost: O(fields). A dict that is not plain is pickled here.
    """
    try:
        state = packed_state(d)
        if is_plain(d, state[2]):
            return reduce_args(_by_file(d), state)
        data = _dumps(_Pickler, _by_file(d))
    except Exception as error:
        return _in_place_of(d, _named(d, error), error)
    for _, encoder in _encoders(d, ()):
        _remember(encoder)
    return pickle.loads, (data,)


def _by_file(d: TreeDict[Any]) -> TreeDict[Any]:
    """``d``, with a reference in place of each large tensor of a mapped file: another process maps the file again."""
    if not is_any_mapped() or not any(map(is_candidate, d._tensors())):
        return d
    return d._map_tensors(by_file, d._device)


def is_plain(d: TreeDict[Any], packed: Container[int] = (), depth: int = _DEPTH) -> bool:
    """Whether pickling ``d`` cannot fail: plain tensors, ``str`` keys, known encoders, importable classes.

    ``packed``: the ids of the tensors in the buffer of a packed dict. They need no test.
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
    return encoder.function if isinstance(encoder, EncodeOnly) else encoder  # each batch has its own wrapper object


class _Pickler(ForkingPickler):
    """Pickles a dict. Its nested dicts are pickled directly, without a trial for each of them."""

    def reducer_override(self, obj: Any) -> Any:
        return reduce_args(cast("TreeDict[Any]", obj)) if isinstance(obj, TreeDict) else NotImplemented


class _Trial(_Pickler):
    """Skips tensors, because pickling them allocates shared memory or file descriptors that only a receiver frees."""

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
    """The error to raise after pickling ``d`` raised ``error``. It names the field or class."""
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
    """The reduction of the error, if a queue's thread pickles ``d`` and would drop the error. Else raises ``named``."""
    feed = _frame_of("_feed")
    dropped = cast(Any, Queue)._on_queue_feeder_error
    if feed is None or feed.f_locals.get("onerror") is not dropped:  # the queue of ProcessPoolExecutor reports errors
        raise named from cause
    worker = get_worker_info()
    where = "in a process that sends to this one" if worker is None else f"in DataLoader worker process {worker.id}"
    message = feed.f_locals.get("obj")  # a DataLoader sends (index, batch)
    alone = worker is not None and type(message) is tuple and len(cast(Any, message)) == 2 and message[1] is d
    return arrive, (named, where, alone)


def arrive(error: Exception, where: str, alone: bool) -> Any:
    """Raise the error of the sender in the receiver.

    ``alone``: the dict was the whole batch of a DataLoader. Then return an `ExceptionWrapper`, and the DataLoader
    raises its error. The DataLoader does not search for wrappers inside a batch.
    """
    wrapped = ExceptionWrapper((type(error), error, None), where)  # pyright: ignore[reportArgumentType]
    if alone:
        return wrapped
    if _frame_of("_pin_memory_loop") is not None:  # an exception here would end the thread silently
        return _Unpinnable(wrapped)
    wrapped.reraise()


class _Unpinnable:
    """Replaces a part of a batch. Raises in ``pin_memory``, where the DataLoader catches errors and reports them."""

    def __init__(self, error: ExceptionWrapper) -> None:
        self._error = error

    def pin_memory(self, device: object = None) -> None:
        self._error.reraise()


def _frame_of(function: str) -> FrameType | None:
    """The innermost frame of ``function`` on the stack of this thread; None if there is none."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame
