"""Count the batches that a loader yields, so that its `BatchOrder` has a state after each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from traceback import format_exception
from typing import Any, TypeVar

import torch

from .._errors import add_note
from .collate import collate
from .order import BatchOrder, Trail
from .shuffle import random_words

B = TypeVar("B")

_END = object()
_SHOWN = 16
"""The rows of a batch that an error names."""
_COLLATED = re.compile(rf'collate_fn\(data\)\n(?:[ ^~]*\n)?  File "{re.escape(collate.__code__.co_filename)}"')
"""In a traceback: torch's fetcher called `collate`, so its samples are the rows of the batch. Of an error in a worker,
only the text of the traceback arrives."""

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
    steps, skipped, own = 1, 0, 0
    if hasattr(loader, "split_batches"):  # accelerate's dispatcher: only the first rank iterates over the order
        return None
    while not isinstance(sampler, BatchOrder):
        if not hasattr(sampler, "batch_sampler"):
            return None
        # accelerate's samplers: one gives the batches to the ranks in turn, the other skips some of them.
        if not getattr(sampler, "split_batches", False):
            steps, skipped = (count * getattr(sampler, "num_processes", 1) for count in (steps, skipped))
            own += getattr(sampler, "process_index", 0)
        skipped += getattr(sampler, "skip_batches", 0)
        sampler = sampler.batch_sampler
    return OrderedLoader(loader, sampler, steps, skipped, own)


class OrderedLoader:
    """A loader over a `BatchOrder`, with the state after the batches that it has yielded.

    Args:
        loader: the loader.
        order: its order.
        steps: the steps of the order for each batch of the loader.
        skipped: the steps that the loader skips at the beginning of a pass.
        own: which of the ``steps`` is that of this process.
    """

    def __init__(self, loader: Any, order: BatchOrder, steps: int, skipped: int, own: int) -> None:
        self.loader, self.order, self.steps, self.skipped, self.own = loader, order, steps, skipped, own
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

    def explain(self, error: Exception, moving: bool) -> None:
        """Add to an error its batch and its rows. ``moving``: it came after the loader gave the batch."""
        (trail, taken), order = self.taken, self.order
        if taken is None or order._changes != self._changes or not data_loader(self.loader).in_order:
            return
        step = taken + self.own - (self.steps if moving else 0)
        where = f"batch {step} of epoch {trail[0].epoch}" + (" since it was resumed" if trail[0].position else "")
        rows, _ = next(order._steps(order._after(trail, step, clamp=True)), ([], None))
        sample = _sample_at_fault(error)
        if sample is not None and sample < len(rows):
            row = rows[sample]
            add_note(error, f"{where}, sample {sample}: row {row}; loader.dataset[{row}] is this sample")
        elif rows:
            more = ", ..." if len(rows) > _SHOWN else ""
            shown = ", ".join(map(str, rows[:_SHOWN]))
            add_note(
                error, f"{where}: rows {shown}{more}; loader.dataset[row] is a sample, order.batch({step}) the rows"
            )
        else:
            add_note(error, where)

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


def _sample_at_fault(error: Exception) -> int | None:
    """The number of the sample that `collate` refused, if it did."""
    text = "".join(format_exception(error))
    if (collated := _COLLATED.search(text)) is None:
        return None
    message = [line for line in text[collated.end() :].splitlines() if not line.startswith(" ")]
    found = re.search(r"\bsample (\d+)", "\n".join(message))
    return int(found[1]) if found else None
