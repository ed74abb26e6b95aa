"""`prefetch`: copy the next batches to the device while the model works on the current batch."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar, cast

import torch

from .._memory.device import DeviceLike, resolve
from .._tree.walk import components
from .containers import tensors_inside, to_device

B = TypeVar("B")
_STREAMS = ("cuda", "xpu")


class prefetch(Generic[B]):
    """Iterate over ``loader`` with its batches on ``device``, and copy ``depth`` batches ahead.

    The copies run on a side stream, in parallel with the work on the current stream. The current stream waits for the
    copy of a batch, so you can use the batch at once. Devices without streams (the CPU, ``mps``) get no copies ahead:
    each batch moves when you ask for it.

    Args:
        loader: a DataLoader, or any other iterable of batches. Every new iteration iterates over it again.
        device: where the batches go.
        depth: the number of batches to fetch and copy ahead.

    A batch may be a `DeviceDict`, a tensor, or a plain container that `to_device` visits. ``len`` and other attributes,
    such as ``dataset``, ``sampler`` and ``batch_sampler``, come from the loader. An exception of the loader is raised
    after the batches that came before it. No thread is used. After a ``break``, the loader's iterator and the batches
    ahead are released with the iterator.

    If the loader has ``state_dict``, as torchdata's StatefulDataLoader has, ``state_dict()`` describes the last batch
    that you received. Batches ahead do not count, so a resumed run skips none. Before the first batch and after the
    end, the state is the loader's own. ``load_state_dict`` goes to the loader; call it before you iterate.

    Raises: ``TypeError`` for a loader that is not iterable; ``ValueError`` if ``depth`` is not an int of at least 1;
    torch's own error for a device that does not exist.
    Cost: one copy per batch, and memory on the device for ``depth`` more batches. Copies are fastest from pinned memory
    (``DataLoader(..., pin_memory=True)``) and of packed batches (see `collate`). The host waits for the copy of a batch
    before it asks the loader for the next one, so the loader may reuse its memory. With streams, the loader's
    ``state_dict`` is copied once per batch.

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
        self._handed_over: Any = None  # the loader's state at the last batch; None: ask the loader

    def __len__(self) -> int:
        return len(cast(Any, self.loader))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "loader" not in self.__dict__:  # unpickling asks before the attributes are there
            raise AttributeError(name)
        found = getattr(self.loader, name)
        # Not methods of the class, so that hasattr answers as it does for the loader.
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
    """Yield each batch once the current stream waits for its copy, with ``depth`` more copies running.

    ``state_of`` returns the loader's state, and is called after each batch is fetched. ``hand_over`` receives the state
    of a batch just before the batch is yielded, and None at the end.
    """
    side = module.Stream(device)
    ready: deque[tuple[Any, Any, Any]] = deque()  # (batch, event of its copy, state), or (exception, None, None)
    source: Any = None  # the last batch of the loader, kept until its copy is done
    last: Any = None  # the event of that copy
    fetching = True
    batch: Any = None
    try:
        while True:
            while fetching and len(ready) <= depth:
                if last is not None:
                    last.synchronize()  # the loader may now reuse the memory of the last batch
                try:
                    source = next(batches)
                    state = copy.deepcopy(state_of())  # the loader may change parts of it
                    if any(tensor.device.type == device.type for tensor in tensors_inside(source)):
                        side.wait_stream(module.current_stream(device))  # a kernel may still write it there
                    with module.stream(side):
                        moved = to_device(source, device, non_blocking=True)
                        last = module.Event()
                        last.record(side)
                except StopIteration:
                    fetching = False
                except Exception as error:  # raised below, after the batches before it
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
            current.wait_event(copied)  # only this copy: the side stream goes on with later batches
            for tensor in tensors_inside(batch):
                for part in components(tensor):
                    part.record_stream(current)  # the allocator keeps the memory until this stream is done
            hand_over(handed)
            yield batch
            batch = None  # free it before the next batches are fetched
    finally:
        if last is not None:
            last.synchronize()
        ready.clear()  # an exception here or in `batch` would keep this frame and the loader's iterator alive
        batch = None
