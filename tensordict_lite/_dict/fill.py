"""Fill the memory of a dict with the contents of another: static inputs of CUDA graphs and of compiled functions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import compress
from operator import not_
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._encoders.protocol import agree
from .._errors import Path, described, dotted, dtype_name
from .._memory.compare import equal
from .._memory.dense import not_dense
from .._memory.device import CPU
from .._memory.transfer import transfer
from .._memory.write import Call, copies, overlap, plain, refusal, share_memory, write_all
from .._tree.fields import fields, refuse_other_trees
from .._tree.kinds import KEPT, RAGGED, fit_codes
from .._tree.ragged import Lengths, Ragged, validated
from .._tree.tree import TreeDict, builtin_dict
from .insert import insert

D = TypeVar("D", bound=TreeDict[Any])


def fill_(d: D, other: Any, non_blocking: bool) -> D:
    """Validate all fields, then copy ``other`` into them: see `DeviceDict.fill_`. Returns ``d``."""
    if not isinstance(other, Mapping):
        raise TypeError(f"fill_ takes a mapping with the keys of this {type(d).__name__}, got {described(other)}")
    given = other if isinstance(other, TreeDict) else d._untyped_subset(())
    if given is not other:
        given._device = None
        insert(given, other)
    filling = _Filling(f"this {type(d).__name__}")
    with torch.no_grad():
        filling.add_dict(d, given)
        filling.run(d._device, given._device, non_blocking)
    return d


class _Filling:
    """The validated copies of one call, and the objects that replace kept objects."""

    def __init__(self, name: str) -> None:
        self.name = name  # of the dict that is filled, for messages
        self.targets: list[Tensor] = []
        self.fast: list[bool] = []
        """Whether the targets are `plain`."""
        self.values: list[Tensor] = []
        self.objects: list[Call] = []
        """What else changes: kept objects, and the lengths of the longest rows of ragged fields."""
        self.lengths: dict[int, tuple[Path, Lengths, Lengths]] = {}
        """The lengths of rows, and the new ones, by the index of their offsets in `targets`."""

    def add_dict(self, d: TreeDict[Any], other: TreeDict[Any]) -> None:
        refuse_other_trees(d, other, "the given mapping", self.name)
        given = {field.path: field for field in fields(other)}
        for field in fields(d):
            value = given[field.path].value
            if field.kind is KEPT:
                self.objects.append(partial(builtin_dict.__setitem__, field.owner, field.path[-1], value))
                continue
            agree(field.encoder, given[field.path].encoder, field.strings)
            if field.kind is RAGGED:
                self.add_ragged(field.value, value, field.encoder, field.path)
            else:
                self.add_tensor(field.value, fit_codes(field.value, value, field.encoder, field.path), field.path)

    def add_ragged(self, target: Ragged, value: Ragged, encoder: object, path: Path) -> None:
        self.add_tensor(target.values, fit_codes(target.values, value.values, encoder, path), path)
        ours, theirs = target._lengths, value._lengths
        given = next((given for _, lengths, given in self.lengths.values() if lengths is ours), None)
        if given is None:
            validated(value, path)  # also if they were valid, since somebody may have written to the offsets
            self.lengths[len(self.targets)] = path, ours, theirs
            self.add_tensor(ours.offsets, theirs.offsets, path)
            self.objects.append(partial(setattr, ours, "longest", theirs.longest))
        elif given is not theirs and not equal(given.offsets, theirs.offsets):
            raise ValueError(
                f"{dotted(path)} has rows of the same lengths as another field of {self.name}, and the given rows of "
                "the two differ in length; clone() one of them first"
            )

    def refuse_overlap(self) -> None:
        """Raise ``ValueError`` for offsets in the memory of another field: a write there would make them invalid."""
        offsets = [lengths.offsets for _, lengths, _ in self.lengths.values()]
        others = [target for i, target in enumerate(self.targets) if i not in self.lengths]
        if len(offsets) < 2 and not share_memory(offsets, others):
            return
        for i, (path, lengths, _) in self.lengths.items():
            if any(j != i and overlap(lengths.offsets, target) for j, target in enumerate(self.targets)):
                raise ValueError(
                    f"{dotted(path)} has offsets in the memory of another field of {self.name}; clone() it first"
                )

    def add_tensor(self, target: Tensor, value: Tensor, path: Path) -> None:
        where = dotted(path)
        reason = not_dense(target) or not_dense(value)
        if reason:
            raise ValueError(f"{where}: fill_ takes dense tensors, got one that is {reason}")
        if value.dtype is not target.dtype or value.shape != target.shape:
            raise ValueError(
                f"{where}: expected {_shown(target)}, got {_shown(value)}; fill_ casts and broadcasts nothing, so for "
                "a last batch that is smaller, give the loader drop_last=True"
            )
        fast = plain(target)
        if not fast and (reason := refusal(target, "fill_")):
            raise RuntimeError(f"{where} {reason}")
        self.fast.append(fast)
        self.targets.append(target)
        self.values.append(value.detach())

    def run(self, device: torch.device | None, source: torch.device | None, non_blocking: bool) -> None:
        """Copy all values, and store all objects."""
        self.refuse_overlap()
        targets, values = self.targets, self.values
        if device == source and share_memory(targets, values):
            values = [value.clone() for value in values]
        # A copy to the host is read at once. Not one copy from buffer to buffer, if both dicts are packed: the gaps
        # between the fields may be memory of other tensors.
        late = non_blocking and device != CPU
        values = transfer(values, device, non_blocking=late, source=source)
        fast = self.fast
        calls = copies(list(compress(targets, fast)), list(compress(values, fast)))
        odd = [(target, None, partial(target.copy_, value)) for target, value in zip(targets, values, strict=True)]
        write_all([*calls, *self.objects], list(compress(odd, map(not_, fast))))


def _shown(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
