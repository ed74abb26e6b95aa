"""`to_device` and `to_numpy` for plain containers: lists, dicts, dataclasses and others."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor

from .._errors import add_note, dotted
from .._memory.device import CPU, DeviceLike, resolve
from .._memory.transfer import transfer
from .._tree.inside import kept_tensors, move_itself, numpy_inside, open_container, open_value, path_inside, tensors_of
from .._tree.tree import TreeDict

T = TypeVar("T")


def to_device(obj: T, device: DeviceLike, *, non_blocking: bool = False) -> T:
    """Move every tensor in ``obj`` to ``device``.

    Visits dicts, lists, tuples, named tuples, dataclasses, ``OrderedDict``, ``defaultdict``, `DeviceDict`, other
    mappings, and every container registered with PyTorch's pytree. An object with a method ``to(device)`` of its own,
    such as a ``PackedSequence``, is moved by it, on a ``copy.copy``. The result has new containers of the same types;
    ``obj`` is not changed. What holds nothing to move is returned itself: strings, None, sets, modules, a list of
    numbers.

    Args:
        obj: a tensor, or a container of tensors at any depth.
        device: the target device.
        non_blocking: as in `DeviceDict.to`. By default the copies are complete on return.

    Raises: torch's own error for a device that does not exist or is out of memory. An error of the method ``to`` of an
        object has a note with the path of the object.
    Cost: one `DeviceDict.to` for all tensors together. A packed `DeviceDict` moves as one tensor.

    >>> import torch
    >>> from tensordict_lite import to_device
    >>> batch = to_device({"x": torch.zeros(2), "names": ["a", "b"], "pair": (torch.ones(1), None)}, "meta")
    >>> batch["x"].device, batch["names"], type(batch["pair"])
    (device(type='meta'), ['a', 'b'], <class 'tuple'>)
    """
    target = resolve(device)
    inside = open_container(obj)
    if inside is None:
        return obj

    def move(item: Any) -> Any:
        try:
            return move_itself(item, target, non_blocking)
        except Exception as error:
            if path := path_inside(obj, (), lambda one: one is item):
                add_note(error, f"the object is {dotted(path)}")
            raise

    moved = transfer(inside.tensors(), target, non_blocking=non_blocking)
    return inside.place(iter(moved), target, {}, move)


def tensors_inside(obj: Any) -> list[Tensor]:
    """The tensors that `to_device` would move. Of an object that moves itself, those that its attributes hold."""
    found: list[Any] = []
    open_value(obj, found)
    return [tensor for item in found for tensor in tensors_of(item) or _tensors_of_object(item)]


def _tensors_of_object(item: Any) -> list[Tensor]:
    inside = list(item) if isinstance(item, tuple) else vars(item) if hasattr(item, "__dict__") else None
    return [] if isinstance(item, TreeDict) else kept_tensors(inside)


def to_numpy(obj: Any) -> Any:
    """Convert every tensor in ``obj`` to a NumPy array: detached, on the CPU. CPU tensors share their memory.

    Visits the same containers as `to_device`. A `DeviceDict` becomes a plain dict. A ``PackedSequence`` cannot hold
    arrays, so it is only moved to the CPU.

    Args:
        obj: a tensor, or a container of tensors at any depth.

    Raises: ``TypeError`` for a dtype or layout that NumPy lacks (bfloat16, sparse).
    Cost: no copy for tensors on the CPU; for other tensors the cost of `to_device`.

    >>> import torch
    >>> from tensordict_lite import to_numpy
    >>> to_numpy([torch.ones(2), {"y": torch.tensor(3)}, "z"])
    [array([1., 1.], dtype=float32), {'y': array(3)}, 'z']
    """
    return numpy_inside(to_device(obj, CPU))
