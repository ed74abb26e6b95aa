"""`prefetch`: copy the next batches to the device while the model works on the current batch."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader

from .._dict.device_dict import DeviceDict
from .._errors import add_note, described
from .._memory.device import DeviceLike, capabilities, intercepted, record_stream, resolve
from .._tree.ragged import Ragged
from .._tree.walk import components, nbytes
from .containers import tensors_inside, to_device
from .order import BatchOrder
from .ordered_loader import OrderedLoader, data_loader, ordered
from .report import COPYING, WAITING, Report, Watch

B = TypeVar("B")

_State = Callable[[], Any]

_DEPTH = 2
"""Batches to copy ahead by default: one is under way while the loader makes the next one."""


class prefetch(Generic[B]):
    """Iterate over ``loader`` with its batches on ``device``, and copy ``depth`` batches ahead.

    The copies run on a side stream, in parallel with the work on the current stream. The copy of a batch is complete
    when you receive the batch, so you can use it at once. This works on every accelerator whose backend has streams and
    events. Other devices (the CPU, ``mps``) get no copies ahead: each batch moves when you ask for it.

    Args:
        loader: a DataLoader, or any other iterable of batches, such as a generator. Every new iteration iterates over
            it again.
        device: the target device of the batches.
        depth: the number of batches to fetch and copy ahead.
        max_bytes: the most bytes of batches to copy ahead. None: no limit but ``depth``. A batch that is larger is
            copied when you ask for it.
        slots: the number of static dicts. Each batch is copied into one of them with ``fill_``, in turn, so the
            tensors of the first ``slots`` batches serve all others. A CUDA graph and a compiled function that owns its
            inputs need that. The work of the current stream on a slot ends before the slot is filled again. Then
            ``depth`` is ``slots - 1``, and every batch is a `DeviceDict` of the same keys, dtypes and shapes.

    A batch may be a `DeviceDict`, a tensor, or a plain container that `to_device` visits. ``len`` and other attributes,
    such as ``dataset``, ``sampler`` and ``batch_sampler``, come from the loader. An exception of the loader is raised
    after the batches that came before it. A note on it, or on an error of a copy, says which batch it is from; with a
    `BatchOrder`, also the rows of the batch, or the row that `collate` refused. `prefetch` starts no thread. After a
    ``break``, the loader's iterator and the batches ahead are released together with the iterator over ``prefetch``.

    If the loader is a DataLoader with a `BatchOrder` as ``batch_sampler``, ``state_dict()`` is the state of the order
    after the last batch that you received. Batches ahead do not count, so a resumed run skips none. Then the seed of
    the workers is not drawn from torch's global generator. It is the same for the same epoch and state. If the loader
    has its own ``state_dict``, as torchdata's StatefulDataLoader has, it is the state of the loader at that batch;
    before the first batch and after the end, the loader's own. Call ``load_state_dict`` before you iterate.

    Raises: ``TypeError`` for a loader that is not iterable, and with ``slots`` for a batch that is no `DeviceDict`;
    ``ValueError`` if ``depth``, ``max_bytes`` or ``slots`` is not an int of at least 1, and for ``slots`` beside
    ``depth``; the errors of ``fill_`` and of `BatchOrder`; torch's own error for a device that does not exist.
    Cost: one copy per batch, and memory on the device for ``depth`` more batches, or for ``max_bytes``. With
    ``max_bytes``, one more batch waits on the host. Copies are fastest from pinned memory
    (``DataLoader(..., pin_memory=True)``) and of packed batches (see `collate`). The host waits for the copy of a batch
    before it asks the loader for the next one, so the loader may reuse its memory. With streams, a
    ``state_dict`` of the loader's own is copied once per batch.

    >>> from tensordict_lite import collate, prefetch
    >>> from torch.utils.data import DataLoader
    >>> loader = DataLoader([{"x": float(i)} for i in range(4)], batch_size=2, collate_fn=collate)
    >>> batches = prefetch(loader, "cpu")
    >>> len(batches), [batch["x"] for batch in batches]
    (2, [tensor([0., 1.]), tensor([2., 3.])])
    """

    def __init__(
        self,
        loader: Iterable[B],
        device: DeviceLike,
        *,
        depth: int | None = None,
        max_bytes: int | None = None,
        slots: int | None = None,
    ) -> None:
        for name, given in (("a depth", depth), ("max_bytes", max_bytes), ("slots", slots)):
            if given is not None and (not isinstance(given, int) or given < 1):
                raise ValueError(f"prefetch takes {name} of at least 1, an int, or None, got {given!r}")
        if depth is not None and slots is not None:
            raise ValueError(f"prefetch takes depth= or slots=, got both; {slots} slots copy {slots - 1} batches ahead")
        if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
            raise TypeError(f"prefetch takes a loader or another iterable of batches, got {type(loader).__name__}")
        if isinstance(loader, DataLoader) and loader.batch_size is not None and isinstance(loader.sampler, BatchOrder):
            raise TypeError(
                "a BatchOrder yields whole batches; give it to the DataLoader as batch_sampler=, not as sampler="
            )
        self.loader: Any = loader
        # Not of `loader` itself: accelerate's loaders always have the method, and may have no state.
        has_own = hasattr(data_loader(loader), "state_dict")
        self._source: Any = loader if has_own else ordered(loader) or loader
        self._has_state = has_own or isinstance(self._source, OrderedLoader)
        self.device = resolve(device)
        self.depth = slots - 1 if slots is not None else _DEPTH if depth is None else depth
        self.max_bytes = max_bytes
        self.slots = slots
        self._handed_over: _State | None = None  # the loader's state at the last batch; None: ask the loader

    _watch: Watch | None = None
    """The times of the last pass."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_watch"}

    def __len__(self) -> int:
        return len(self.loader)

    def __repr__(self) -> str:
        order = f", {self._source.order!r}" if isinstance(self._source, OrderedLoader) else ""
        ahead = f"{self.slots} slots" if self.slots else f"{self.depth} batches ahead"
        at = f", batch {self._watch.batches}" if self._watch is not None else ""
        what = f"{type(self.loader).__name__}, {self.device}, {ahead}{at}{order}"
        return f"prefetch({what}); report() says where time goes"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "loader" not in self.__dict__:  # unpickling asks before the attributes are there
            raise AttributeError(name)
        # Not methods of the class, so that hasattr answers as it does for the loader.
        if name == "set_epoch":
            return getattr(self._source, name)
        if name in ("state_dict", "load_state_dict"):
            if not self._has_state:
                raise AttributeError(f"the loader has no {name}; give the DataLoader a BatchOrder as batch_sampler=")
            return self._state_dict if name == "state_dict" else self._load_state_dict
        return getattr(self.loader, name)

    def report(self) -> Report:
        """Where the time of the last pass went: waiting for the loader, copies, the step. And one sentence of advice.

        Call it after any batch, or at the end. The passes count all the time, at less than a microsecond per batch.

        >>> from tensordict_lite import prefetch
        >>> batches = prefetch([{"x": 1}, {"x": 2}], "cpu")
        >>> for batch in batches:
        ...     pass
        >>> batches.report().batches
        2
        """
        watch = self._watch or Watch(self.device, False, None)
        return watch.report(data_loader(self.loader))

    def _state_dict(self) -> Any:
        return self._source.state_dict() if self._handed_over is None else self._handed_over()

    def _load_state_dict(self, state: Any) -> None:
        self._source.load_state_dict(state)
        self._handed_over = None

    def _state_after_fetch(self) -> _State | None:
        """The state at the batch that was fetched last, as a function that returns it at any later time."""
        if isinstance(self._source, OrderedLoader):
            return partial(self._source.state_dict, self._source.taken)
        if not self._has_state:
            return None
        return partial(copy.deepcopy, copy.deepcopy(self._source.state_dict()))  # the loader may change parts of it

    def __iter__(self) -> Iterator[B]:
        # A generator, which asks for `iter(loader)` at the first batch: workers take the rows of the epoch then.
        slots = None if self.slots is None else _Slots(self.slots, self.device)
        streams = not intercepted() and capabilities(self.device).streams
        batches = self._ahead(slots) if streams else self._in_turn(slots)
        return self._source.guarded(batches) if isinstance(self._source, OrderedLoader) else batches

    def _begin(self, timed: bool = False) -> Watch:
        """A pass begins."""
        self._handed_over = None
        self._watch = Watch(self.device, timed, None if self._watch is None else self._watch.journey)
        return self._watch

    def _explain(self, error: Exception, moving: bool) -> None:
        """Add to an error which batch it is from. ``moving``: the loader gave the batch."""
        if isinstance(self._source, OrderedLoader):
            self._source.explain(error, moving)
        elif self._watch is not None:
            add_note(error, f"batch {self._watch.arrivals - moving} of this pass over prefetch")

    def _in_turn(self, slots: _Slots | None) -> Iterator[B]:
        watch, moving = self._begin(), False
        try:
            for batch in self._source:
                watch.arrived(batch)
                moving = True
                moved = slots.put(batch) if slots else to_device(batch, self.device)
                watch.step_begins()
                moving = False
                yield moved
                watch.step_ends()
        except Exception as error:
            self._explain(error, moving)
            raise

    def _ahead(self, slots: _Slots | None) -> Iterator[B]:
        """Yield each batch after its copy. Up to ``depth`` more batches of up to ``max_bytes`` are copied or under way.

        Before it asks the loader for a batch, the host waits for the last copy. It asks for the next batch before it
        yields one. So the copy of a batch is complete when the batch is yielded. With a depth of 0, the current stream
        waits.

        ``slots``: receive the batches. The slot that is filled next is the one that was yielded last, so the copy waits
        for the work on the current stream.
        """
        device, depth, max_bytes = self.device, self.depth, self.max_bytes
        watch = self._begin(capabilities(device).timed_events)
        batches = iter(self._source)
        side = torch.Stream(device=device)
        ready: deque[tuple[Any, int, Any]] = deque()  # (batch, bytes, state), or (exception, -1, None)
        fetched: tuple[Any, int, Any] | None = None  # a batch of the loader that is not copied yet
        source: Any = None  # the last batch of the loader, kept until its copy is done
        last: torch.Event | None = None  # the event of that copy
        fetching = True
        batch: Any = None
        try:
            while True:
                while fetching and len(ready) <= depth:
                    try:
                        if fetched is None:
                            if last is not None:
                                last.synchronize()  # the loader may now reuse the memory of the last batch
                            watch.lap(COPYING)
                            source = next(batches)
                            watch.arrived(source)
                            size = 0 if max_bytes is None else sum(map(nbytes, tensors_inside(source)))
                            fetched = source, size, self._state_after_fetch()
                        source, size, state = fetched
                        # The first batch that is ready is not ahead: it is yielded next.
                        if max_bytes is not None and ready and sum(b for _, b, _ in [*ready][1:]) + size > max_bytes:
                            break
                        # A kernel may still read the slot, or write the batch there.
                        if slots or any(tensor.device.type == device.type for tensor in tensors_inside(source)):
                            side.wait_stream(torch.accelerator.current_stream(device))
                        with side:
                            begin = watch.copy_begins(side)
                            moved = slots.put(source) if slots else to_device(source, device, non_blocking=True)
                            last = watch.copy_ends(side, begin)
                    except StopIteration:
                        watch.lap(WAITING)
                        fetching = False
                    except Exception as error:  # raised below, after the batches before it
                        self._explain(error, fetched is not None)
                        ready.append((error, -1, None))
                        fetching = False
                    else:
                        ready.append((moved, size, state))
                        del moved
                        fetched = None
                if not ready:
                    self._handed_over = None
                    return
                batch, size, handed = ready.popleft()
                if size < 0:
                    raise batch
                if not depth and last is not None:
                    torch.accelerator.current_stream(device).wait_event(last)
                # The allocator keeps the memory until the current stream is done with it.
                parts = [part for tensor in tensors_inside(batch) for part in components(tensor)]
                record_stream(parts, torch.accelerator.current_stream(device))
                self._handed_over = handed
                watch.step_begins()
                yield batch
                watch.step_ends()
                batch = None  # free it before the next batches are fetched
        finally:
            if last is not None:
                last.synchronize()
            ready.clear()  # an exception here or in `batch` would keep this frame and the loader's iterator alive
            batch = fetched = None


class _Slots:
    """Static dicts that receive the batches in turn. The first batches make them."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.count, self.device = count, device
        self.dicts: deque[DeviceDict[Any]] = deque()  # the one to fill next comes first

    def put(self, batch: Any) -> Any:
        """Copy a batch into the next slot, on the current stream. Returns the slot."""
        if isinstance(batch, Ragged):
            return self.put(DeviceDict({"rows": batch}))["rows"]
        if not isinstance(batch, DeviceDict):
            raise TypeError(
                f"prefetch with slots= takes batches that are DeviceDicts, got {described(batch)}; "
                "give the DataLoader collate_fn=collate"
            )
        if len(self.dicts) < self.count:
            self.dicts.append(batch.detach().to(self.device, non_blocking=True, copy=True))
        else:
            self.dicts.rotate(-1)
            self.dicts[-1].fill_(batch, non_blocking=True)
        return self.dicts[-1]
