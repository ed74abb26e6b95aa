"""Pickle a dict for another process, small buffers by value. If pickling fails, send the error in place of the dict.

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
from threading import main_thread
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor
from torch._utils import ExceptionWrapper  # a DataLoader raises the error inside when it receives one

from .._encoders.protocol import StringEncoder, as_given
from .._errors import Path, TooDeep, dotted
from .._memory.buffer import goes_by_value
from .._memory.cast import host_array
from .._memory.mapped import by_file, is_any_mapped, is_candidate
from .tree import PackedState, TreeDict, dicts_of, packed_state, reduce_args
from .walk import only_tensors

_OBJECTS = frozenset((type(None), bool, int, float, complex, str, bytes))
"""The classes of objects that can always be pickled."""
_DEPTH = 32
"""The depth of nesting that pickle always supports, even if another container holds the dict."""
_look = attrgetter("layout", "requires_grad")
_PLAIN_FACTS = {(torch.strided, False)}
"""The result of `_look` for a plain tensor."""
_has_names: Callable[[Tensor], bool] | None = getattr(Tensor, "has_names", None)
"""Tests for named dimensions, which some versions of torch have. A tensor with named dimensions cannot be pickled."""
_DEVICES = ("cpu", "cuda")
"""Devices whose memory can be shared between processes."""
_MOST_PICKLED = 32
"""The largest number of encoders in `_pickled`."""
_pickled: list[object] = []
"""The last encoders that this process pickled. They need no second trial, which may take longer than the batch."""


def sent(d: TreeDict[Any]) -> tuple[Any, ...]:
    """The reduction of ``d`` for another process.

    Raises an error that names the field or class if ``d`` cannot be pickled. In the thread of a queue, which drops
    errors, sends the error to the receiver. Cost: O(fields), and a copy of the buffer if it goes by value. A dict that
    is not plain is pickled here.
    """
    try:
        # Another process maps a file again, so a reference replaces each large tensor of a mapped file.
        mapped = is_any_mapped() and any(map(is_candidate, d._tensors()))
        given = d._map_tensors(by_file, d._device) if mapped else d
        state = _sent_state(given, alone=not mapped)
        if is_plain(d, state[2]):
            return reduce_args(given, state)
        data = _dumps(_Pickler, given)
    except Exception as error:
        return _in_place_of(d, _error_with_field(d, error), error)
    for one in dicts_of(d):
        for _, encoder in _encoders(one, ()):
            _remember(encoder)
    return pickle.loads, (data,)


def _sent_state(d: TreeDict[Any], alone: bool = True) -> PackedState:
    """`packed_state`, with the bytes of the buffer in its place if the buffer goes by value."""
    buffer, specs, numbers = packed_state(d, alone=alone)
    if buffer is None or not (buffer.is_cpu and goes_by_value(buffer.nbytes)):
        return buffer, specs, numbers
    if buffer.untyped_storage().is_shared():  # the receiver must see the same memory
        return buffer, specs, numbers
    return host_array(buffer).tobytes(), specs, numbers


def is_plain(d: TreeDict[Any], packed: Container[int] = (), depth: int = _DEPTH) -> bool:
    """Whether pickling ``d`` cannot fail: plain tensors, ``str`` keys, known encoders, importable classes.

    ``packed``: the ids of the tensors in the buffer of a packed dict. They need no test.
    """
    if not depth or set(map(type, d)) - {str} or not _is_importable(type(d)):
        return False
    if d._device is None or d._device.type not in _DEVICES:
        return False
    if d._policy is not d._class_policy and not all(_is_known(encoder) for _, encoder in _encoders(d, ())):
        return False
    left = [value for value in d.values() if id(value) not in packed] if packed else d.values()
    if only_tensors(left):
        return _are_plain(left)
    for value in left:
        if isinstance(value, TreeDict):
            if not is_plain(value, packed, depth - 1):
                return False
        elif not _is_plain_value(value):
            return False
    return True


def _are_plain(tensors: Iterable[Tensor]) -> bool:
    return _PLAIN_FACTS.issuperset(map(_look, tensors)) and not (_has_names and any(map(_has_names, tensors)))


def refuse_unsendable(d: TreeDict[Any], at: Path = ()) -> None:
    """Raise ``TypeError`` for the first class, key, encoder, tensor or object in ``d`` that cannot be pickled."""
    cls = type(d)
    if not _is_importable(cls):
        where = f"{dotted(at)}: the" if at else "the"
        _try(cls, f"{where} class {cls.__qualname__}", "define it at the top of a module")
    if d._policy is not d._class_policy:
        for path, encoder in _encoders(d, at):
            if not _is_known(encoder):
                which = f"{dotted(path)}: the" if path else "the default"
                _try(encoder, f"{which} encoder {encoder!r}", "use a function or class of a module")
                _remember(encoder)
    for key, value in d.items():
        path = (*at, key)
        if type(key) is not str:
            _try(key, f"{dotted(path)}: the key, of type {type(key).__qualname__},", "use a plain str")
        if isinstance(value, TreeDict):
            refuse_unsendable(value, path)
        elif not _is_plain_value(value):
            what, way_out = _what_and_way_out(value)
            _try(value, f"{dotted(path)}: {what}", way_out)


def _what_and_way_out(value: Any) -> tuple[str, str]:
    """What a value is, and what to do about it, for an error message."""
    if not isinstance(value, Tensor):
        return f"the kept {type(value).__qualname__}", "drop it, or keep an object that can be pickled"
    if value.requires_grad and not value.is_leaf:
        return "the tensor, which autograd computes,", "call .detach()"
    cls, layout = type(value).__qualname__, str(value.layout).removeprefix("torch.")
    return f"the {layout} {cls} on {value.device}", "convert it to a plain tensor on the CPU"


def _is_plain_value(value: Any) -> bool:
    if isinstance(value, Tensor):
        return type(value) is Tensor and value.device.type in _DEVICES and _are_plain([value])
    kind = type(value)
    return kind in _OBJECTS or (kind in (list, tuple) and _OBJECTS.issuperset(map(type, value)))


def _is_importable(cls: type[Any]) -> bool:
    """Whether pickle finds the class by its name."""
    return getattr(sys.modules.get(cls.__module__), cls.__qualname__, None) is cls


def _encoders(d: TreeDict[Any], at: Path) -> Iterator[tuple[Path, StringEncoder]]:
    """The encoders of ``d`` with the paths of their keys. The path of the default encoder is empty."""
    for key, encoder in d._policy.encoders.items():
        yield (*at, key), encoder
    yield (), d._policy.default_encoder


def _is_known(encoder: StringEncoder) -> bool:
    """Whether the encoder can be pickled, without a trial: it is plain data, or was pickled before."""
    given = as_given(encoder)  # each batch may have a wrapper object of its own
    return encoder.is_data or any(given is other for other in _pickled)


def _remember(encoder: StringEncoder) -> None:
    if not _is_known(encoder):
        _pickled[:] = [*_pickled[1 - _MOST_PICKLED :], as_given(encoder)]


class _Pickler(ForkingPickler):
    """Pickles a dict. Its nested dicts are pickled directly, without a trial for each of them."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, TreeDict):
            return NotImplemented
        d = obj
        return reduce_args(d, _sent_state(d))


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
    """Pickle an object, without its tensors. Raises ``TypeError`` with ``what`` and ``way_out`` if pickling fails."""
    try:
        _dumps(_Trial, obj)
    except Exception as error:
        raise TypeError(
            f"{what} cannot be pickled, so the dict cannot be sent to another process; {way_out}: {error}"
        ) from error


def _error_with_field(d: TreeDict[Any], error: Exception) -> Exception:
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
    """Send the error instead of the dict if a queue's thread pickles the dict, since that thread drops errors.

    In any other thread, raises ``named``. For a message of a DataLoader, the whole batch is replaced: an error inside
    the batch would end its unpickling, and the DataLoader would wait for the batch forever.
    """
    feed = _frame_of("_feed", sys._getframe())
    dropped = cast(Any, Queue)._on_queue_feeder_error
    if feed is None or feed.f_locals.get("onerror") is not dropped:  # the queue of ProcessPoolExecutor reports errors
        try:
            raise named from cause
        finally:
            del named  # its traceback holds this frame: a cycle, which would keep the tensors of the dict
    waiting = feed.f_locals["buffer"]  # the messages that the thread sends next
    loop = _frame_of("_worker_loop", sys._current_frames().get(main_thread().ident or 0))
    if loop is None or getattr(loop.f_locals.get("data_queue"), "_buffer", None) is not waiting:
        return arrive, (named, "in a process that sends to this one")
    named.__cause__ = None  # the message is complete without the traceback of the trial
    batch = _wrapped(named, f"in DataLoader worker process {loop.f_locals['worker_id']}")
    index, content = feed.f_locals["obj"]
    # The StatefulDataLoader of torchdata sends the state of the worker beside the batch.
    stateful = loop.f_globals["__name__"].startswith("torchdata.")
    waiting.appendleft((index, (batch, *content[1:]) if stateful else batch))
    raise IndexError  # the thread takes this error for an empty buffer, and continues with the new message


def arrive(error: Exception, where: str) -> None:
    """Raise the error of the sender in the receiver."""
    _wrapped(error, where).reraise()


def _wrapped(error: Exception, where: str) -> ExceptionWrapper:
    return ExceptionWrapper((type(error), error, None), where)  # pyright: ignore[reportArgumentType]


def _frame_of(function: str, frame: FrameType | None) -> FrameType | None:
    """The innermost call of ``function`` on the stack that ends at ``frame``; None if there is none."""
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame
