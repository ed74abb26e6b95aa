"""Pickle a dict for another process, small tensors by value. If pickling fails, send the error in place of the dict.

A DataLoader worker sends batches through a ``multiprocessing.Queue``, which pickles them in a thread. That thread drops
an object that cannot be pickled, and the receiver waits forever. So this module first pickles every dict that may fail.
"""

from __future__ import annotations

import pickle
import sys
from multiprocessing.reduction import ForkingPickler
from threading import current_thread
from typing import Any

import torch
from torch import Tensor
from torch._utils import ExceptionWrapper  # a DataLoader raises the error inside when it receives one
from torch.utils.data import get_worker_info

from .._errors import Path, TooDeep, dotted
from .._memory.mapped import by_file
from .encoding import arguments, for_process
from .manifest import Outline
from .ragged import Ragged
from .tree import TreeDict

_OBJECTS = frozenset((type(None), bool, int, float, complex, str, bytes))
"""The classes of objects that can always be pickled."""
_QUEUE_THREAD = "QueueFeederThread"
"""The name of the thread in which a ``multiprocessing.Queue`` pickles. It drops errors."""
_DEVICES = ("cpu", "cuda")
"""Devices whose memory can be shared between processes."""


def sent(d: TreeDict[Any]) -> tuple[Any, ...]:
    """The reduction of ``d`` for another process.

    Raises an error that names the field or class if ``d`` cannot be pickled. In the thread of a queue, which drops
    errors, sends an `Unsent` in place of the dict. Cost: O(fields), and a copy of the small tensors. A dict that is
    not plain is pickled here.
    """
    try:
        reduced, plain = _reduction(d)
        return reduced if plain else (pickle.loads, (bytes(_Pickler.dumps(d)),))
    except Exception as error:
        named = _error_with_field(d, error)
        try:
            if current_thread().name != _QUEUE_THREAD:
                raise named from error
            worker = get_worker_info()
            where = "a process that sends to this one" if worker is None else f"DataLoader worker process {worker.id}"
            return Unsent, (named, f"in {where}")
        finally:
            del named  # its traceback holds this frame: a cycle, which would keep the tensors of the dict


class Unsent(ExceptionWrapper):
    """Arrives in place of a dict that could not be pickled. A DataLoader raises its error, and so does every use."""

    def __init__(self, error: Exception, where: str) -> None:
        self._args = error, where
        super().__init__((type(error), error, None), where)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._args

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python asks for these itself
            raise AttributeError(name)
        self.reraise()

    def _use(self, *_: Any) -> Any:
        self.reraise()

    __getitem__ = __contains__ = __iter__ = __len__ = _use


def _reduction(d: TreeDict[Any]) -> tuple[tuple[Any, ...], bool]:
    """The reduction of ``d``, and whether pickling it cannot fail."""
    outline = Outline(d, pickled=True)
    # Another process maps a file again, so a reference replaces each large tensor of a mapped file.
    values = [by_file(value) if isinstance(value, Tensor) else value for value in outline.values]
    carried = for_process(values, d._device)
    plain = (
        (d._device is not None and d._device.type in _DEVICES)
        and all(map(_is_importable, set(map(type, outline.nodes))))
        and all(encoder.is_data for encoder in outline.encoders)
        and (carried[1] is None or all(map(_is_plain, outline.values)))
    )
    return arguments(d, outline, carried), plain


def _is_plain(value: Any) -> bool:
    """Whether a value can be pickled without a trial."""
    if not isinstance(value, Tensor):
        return _OBJECTS.issuperset(map(type, value) if type(value) in (list, tuple) else (type(value),))
    named = getattr(value, "has_names", None)  # such a tensor cannot be pickled; not every torch has them
    usual = type(value) is Tensor and value.layout is torch.strided and not value.requires_grad
    return usual and value.device.type in _DEVICES and not (named is not None and named())


def _refuse_unsendable(d: TreeDict[Any], at: Path = ()) -> None:
    """Raise ``TypeError`` for the first class, encoder, tensor or object in ``d`` that cannot be pickled."""
    if not _is_importable(type(d)):
        where = f"{dotted(at)}: the" if at else "the"
        _try_pickling(type(d), f"{where} class {type(d).__qualname__}", "define it at the top of a module")
    if d._policy is not d._class_policy:
        given = {f"{dotted((*at, key))}: the": encoder for key, encoder in d._policy.encoders.items()}
        for which, encoder in {**given, "the default": d._policy.default_encoder}.items():
            _try_pickling(encoder, f"{which} encoder {encoder!r}", "use a function or class of a module")
    for key, field in d.items():
        path, value = (*at, key), field.values if isinstance(field, Ragged) else field
        if isinstance(value, TreeDict):
            _refuse_unsendable(value, path)
        elif not _is_plain(value):
            what, way_out = _what_and_way_out(value)
            _try_pickling(value, f"{dotted(path)}: {what}", way_out)


def _what_and_way_out(value: Any) -> tuple[str, str]:
    """What a value is, and what to do about it, for an error message."""
    if not isinstance(value, Tensor):
        return f"the kept {type(value).__qualname__}", "drop it, or keep an object that can be pickled"
    if value.requires_grad and not value.is_leaf:
        return "the tensor, which autograd computes,", "call .detach()"
    cls, layout = type(value).__qualname__, str(value.layout).removeprefix("torch.")
    return f"the {layout} {cls} on {value.device}", "convert it to a plain tensor on the CPU"


def _is_importable(cls: type[Any]) -> bool:
    """Whether pickle finds the class by its name."""
    return getattr(sys.modules.get(cls.__module__), cls.__qualname__, None) is cls


class _Pickler(ForkingPickler):
    """Pickles a dict. Its nested dicts are pickled directly, without a trial for each of them."""

    def reducer_override(self, obj: Any) -> Any:
        return _reduction(obj)[0] if isinstance(obj, TreeDict) else NotImplemented


class _Trial(_Pickler):
    """Skips tensors, because pickling them allocates shared memory or file descriptors that only a receiver frees."""

    def persistent_id(self, obj: Any) -> Any:
        is_storage = isinstance(obj, torch.UntypedStorage) and obj.device.type == "cpu"
        return True if is_storage or (isinstance(obj, Tensor) and _is_plain(obj)) else None


def _try_pickling(obj: Any, what: str, way_out: str) -> None:
    """Pickle an object, without its tensors. Raises ``TypeError`` with ``what`` and ``way_out`` if pickling fails."""
    try:
        _Trial.dumps(obj)
    except Exception as error:
        raise TypeError(
            f"{what} cannot be pickled, so the dict cannot be sent to another process; {way_out}: {error}"
        ) from error


def _error_with_field(d: TreeDict[Any], error: Exception) -> Exception:
    """The error to raise after pickling ``d`` raised ``error``. It names the field or class."""
    if isinstance(error, TooDeep):
        return error
    try:
        _refuse_unsendable(d)
    except TypeError as named:
        return named
    return TypeError(f"this {type(d).__qualname__} cannot be sent to another process: {error}")
