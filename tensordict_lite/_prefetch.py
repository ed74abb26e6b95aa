"""`prefetch`: the next batches on their way to the device while this one is worked on."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar, cast

import torch

from ._devices import DeviceLike, resolve
from ._items import parts
from ._plain import tensors_inside, to_device

B = TypeVar("B")
_STREAMS = ("cuda", "xpu")


class prefetch(Generic[B]):
    """``loader`` with its batches on ``device``, the next ``depth`` of them already on their way.

    The copies run on a stream of their own, beside the work on the current one. Each batch is handed over when its copy
    is done for the current stream, so that it can be used at once. Without streams (on the CPU, on ``mps``) every batch
    is moved as it is asked for.

    Args:
        loader: a DataLoader, or any other iterable of batches. It is iterated anew each time this is.
        device: where the batches go.
        depth: batches that are fetched and moved ahead.

    Batches may be `DeviceDict`, tensors, or plain containers, which `to_device` goes through. ``len``, and every other
    attribute that this does not have, such as ``dataset``, ``sampler`` and ``batch_sampler``, are the loader's. An
    exception of the loader is raised at the batch where it happened, after those before it. After a ``break`` nothing
    stays behind: no thread is used, and the loader's iterator and the batches ahead go with this one's.

    If the loader has ``state_dict``, as torchdata's StatefulDataLoader has, ``state_dict()`` describes the last batch
    that was handed over, not the batches ahead of it: a run that resumes from it skips none. Before the first batch and
    after the end it is the loader's own. ``load_state_dict`` goes to the loader; call it before you iterate.

    Raises: ``TypeError`` for a loader that is not iterable;
    ``ValueError`` for a ``depth`` that is no int of at least 1; torch's own error for a device that is not
    there.
    Cost: one copy a batch, fastest from pinned memory (``DataLoader(..., pin_memory=True)``) and of packed batches (see
    `collate`); memory on the device for ``depth`` batches beside the current one. The host waits for the copy of a
    batch before it asks the loader for the one after, so that a loader may use its memory again. Where batches are
    fetched ahead, one ``state_dict`` of the loader a batch, copied, if it has one.

    >>> from tensordict_lite import collate, prefetch
    >>> from torch.utils.data import DataLoader
    >>> loader = DataLoader([{"x": float(i)} for i in range(4)], batch_size=2, collate_fn=collate)
    >>> batches = prefetch(loader, "cpu")
    >>> len(batches), [batch["x"] for batch in batches]
    (2, [tensor([0., 1.]), tensor([2., 3.])])
    """

    def __init__(self, loader: Iterable[B], device: DeviceLike, *, depth: int = 2) -> None:
        if not isinstance(cast(object, depth), int) or depth < 1:
            raise ValueError(f"prefetch takes a depth of at least 1, an int, got {depth!r}")
        if not isinstance(cast(object, loader), Iterable) and not hasattr(loader, "__getitem__"):
            raise TypeError(f"prefetch takes a loader or another iterable of batches, got {type(loader).__name__}")
        self.loader = loader
        self.device = resolve(device)
        self.depth = depth
        self._handed_over: Any = None  # the loader's state as of the last batch; None where that is its state now

    def __len__(self) -> int:
        return len(cast(Any, self.loader))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "loader" not in self.__dict__:  # while it is unpickled, say
            raise AttributeError(name)
        found = getattr(self.loader, name)
        # Not methods of the class: who asks whether there is a state is told what the loader would say.
        if name == "state_dict":
            return self._state_dict
        return self._load_state_dict if name == "load_state_dict" else found

    def _state_dict(self) -> Any:
        return cast(Any, self.loader).state_dict() if self._handed_over is None else copy.deepcopy(self._handed_over)

    def _load_state_dict(self, state: Any) -> None:
        cast(Any, self.loader).load_state_dict(state)
        self._hand_over(None)

    def _hand_over(self, state: Any) -> None:
        self._handed_over = state

    def __iter__(self) -> Iterator[B]:
        self._hand_over(None)
        if self.device.type not in _STREAMS:
            return (to_device(batch, self.device) for batch in self.loader)
        module, batches = torch.get_device_module(self.device), iter(self.loader)
        if not hasattr(self.loader, "state_dict"):
            return _ahead(batches, self.device, self.depth, module)
        state_of: Callable[[], Any] = cast(Any, self.loader).state_dict
        return _ahead(batches, self.device, self.depth, module, state_of, self._hand_over)


def _nothing(_: Any = None) -> None:
    return None


def _ahead(
    batches: Iterator[B],
    device: torch.device,
    depth: int,
    module: Any,
    state_of: Callable[[], Any] = _nothing,
    hand_over: Callable[[Any], None] = _nothing,
) -> Iterator[B]:
    """A batch as soon as its copy is done for the current stream, with ``depth`` more under way.

    ``state_of`` is asked for the loader's state after each batch, and ``hand_over`` is given that of the batch that is
    yielded next, or None at the end.
    """
    side = module.Stream(device)
    ready: deque[tuple[Any, Any, Any]] = deque()  # batches, the event of their copy, the state; or an exception, None
    source: Any = None  # the last batch of the loader, kept until its copy is done
    last: Any = None  # the event of that copy
    fetching = True
    batch: Any = None
    try:
        while True:
            while fetching and len(ready) <= depth:
                if last is not None:
                    last.synchronize()  # from here on the loader may write to the memory that the last batch came from
                try:
                    source = next(batches)
                    state = copy.deepcopy(state_of())  # which may hold what the loader goes on to change
                    if any(tensor.device.type == device.type for tensor in tensors_inside(source)):
                        side.wait_stream(module.current_stream(device))  # it may still be computed there
                    with module.stream(side):
                        moved = to_device(source, device, non_blocking=True)
                        last = module.Event()
                        last.record(side)
                except StopIteration:
                    fetching = False
                except Exception as error:  # it is raised in its turn
                    ready.append((error, None, None))
                    fetching = False
                else:
                    ready.append((moved, last, state))
                    del moved
            if not ready:
                hand_over(None)
                return
            batch, copied, handed = ready.popleft()
            if copied is None:
                raise batch
            current = module.current_stream(device)
            current.wait_event(copied)  # not for the whole side stream, which goes on with the batches after
            for tensor in tensors_inside(batch):
                for part in parts(tensor):
                    part.record_stream(current)  # not given to the side stream again while this one uses it
            hand_over(handed)
            yield batch
            batch = None  # or it would be in memory while the next ones are fetched
    finally:
        if last is not None:
            last.synchronize()
        ready.clear()  # an exception, there or in `batch`, would keep this frame, and so the loader's iterator, alive
        batch = None
