"""Count the batches that a loader yields, so that its `BatchOrder` has a state after each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from .order import BatchOrder, Trail
from .shuffle import random_words

B = TypeVar("B")

_END = object()

Taken = tuple[Trail, "int | None"]
"""A number of steps since the place of a trail. None: the epoch is at its end."""


def data_loader(loader: Any) -> Any:
    """The DataLoader inside a loader that accelerate or Fabric has wrapped; another loader as it is."""
    for name in ("base_dataloader", "_dataloader"):  # Fabric has no public name for it
        loader = getattr(loader, name, loader)
    return loader


def ordered(loader: Any) -> OrderedLoader | None:
    """A loader that counts, if ``loader`` takes its batches from a `BatchOrder`."""
    sampler: Any = getattr(data_loader(loader), "batch_sampler", None)
    steps, skipped = 1, 0
    if hasattr(loader, "split_batches"):  # accelerate's dispatcher: only the first rank iterates over the order
        return None
    while not isinstance(sampler, BatchOrder):
        if not hasattr(sampler, "batch_sampler"):
            return None
        # accelerate's samplers: one gives the batches to the ranks in turn, the other skips some of them.
        if not getattr(sampler, "split_batches", False):
            steps, skipped = (count * getattr(sampler, "num_processes", 1) for count in (steps, skipped))
        skipped += getattr(sampler, "skip_batches", 0)
        sampler = sampler.batch_sampler
    return OrderedLoader(loader, sampler, steps, skipped)


class OrderedLoader:
    """A loader over a `BatchOrder`, with the state after the batches that it has yielded.

    Args:
        loader: the loader.
        order: its order.
        steps: the steps of the order for each batch of the loader.
        skipped: the steps that the loader skips at the beginning of a pass.
    """

    def __init__(self, loader: Any, order: BatchOrder, steps: int, skipped: int) -> None:
        self.loader, self.order, self.steps, self.skipped = loader, order, steps, skipped
        self.taken: Taken = order._trail, 0
        self._changes = 0

    def __iter__(self) -> Iterator[Any]:
        order, inner = self.order, data_loader(self.loader)
        trail = order._prepare()
        place = trail[0]
        self._set_epoch_of_loader()
        self.taken, self._changes = (trail, 0), order._changes
        # accelerate and Fabric count the epochs of their loader from 0, and set them when an iteration begins.
        given, order._held = inner.generator, True
        if given is None:  # DataLoader draws a seed for its workers, otherwise from the global generator
            key = (*order._visits.key, place.epoch, 4, place.position)
            inner.generator = torch.Generator().manual_seed(int(random_words(key, 1)[0] >> 1))
        try:
            batches = iter(self.loader)
            batch = next(batches, _END)
        finally:
            inner.generator, order._held = given, False
        number = self.skipped
        while batch is not _END:
            number += self.steps
            self.taken = trail, number
            yield batch
            batch = next(batches, _END)
        self.taken = trail, None

    def guarded(self, batches: Iterator[B]) -> Iterator[B]:
        """The batches of a pass. Raises instead of a batch if an epoch was set or a state was loaded."""
        for batch in batches:
            self.order._require(self._changes)
            yield batch

    def set_epoch(self, epoch: int) -> None:
        self.order.set_epoch(epoch)
        self._set_epoch_of_loader()

    def _set_epoch_of_loader(self) -> None:
        if hasattr(self.loader, "set_epoch"):
            self.loader.set_epoch(self.order.epoch)

    def state_dict(self, taken: Taken | None = None) -> dict[str, Any]:
        """The state after ``taken``, or after the last batch that was yielded."""
        trail, steps = taken or self.taken
        inner = data_loader(self.loader)
        if inner.num_workers and not inner.in_order:
            raise ValueError("a DataLoader with in_order=False has no state; make the DataLoader with in_order=True")
        chosen = steps is None and self.order._next is not None  # this epoch again
        if chosen or trail is not self.order._trail:  # since then, an epoch was chosen or a state was loaded
            return self.order._state(self.order._coming())
        return self.order._state(self.order._after(trail, steps, clamp=True))  # accelerate may repeat some batches

    def load_state_dict(self, state: Any) -> None:
        self.order.load_state_dict(state)
        self._set_epoch_of_loader()
