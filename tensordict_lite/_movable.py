"""Moving, casting and the other things that a tensor does, for a whole dict: each a line or two a method."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any, cast, overload

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from ._arguments import to_arguments
from ._checked import CheckedDict
from ._devices import CPU, DeviceLike, resolve
from ._errors import Path, dotted, located
from ._items import parts
from ._packing import blockwise, is_packed, once, pack, packs
from ._singly import host_array
from ._transfer import clone, transfer
from ._tree import TreeDict, V, tensor_paths


class MovableDict(CheckedDict[V]):
    """The device and tensor methods of `DeviceDict`."""

    __slots__ = ()

    # --- device ---

    @property
    def device(self) -> torch.device | None:
        """The device of every tensor, index included; None while nothing was stored or asked for.

        None too after a ``tree_map`` that left tensors on several devices, until `to` gathers them.

        >>> DeviceDict({"x": 1.0}).device, DeviceDict().device
        (device(type='cpu'), None)
        """
        return self._device

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a CUDA device.

        >>> DeviceDict({"x": 1.0}).is_cuda
        False
        """
        return self._device is not None and self._device.type == "cuda"

    @overload
    def to(
        self,
        device: DeviceLike | None = ...,
        dtype: torch.dtype | None = ...,
        non_blocking: bool = ...,
        copy: bool = ...,
    ) -> Self: ...
    @overload
    def to(self, dtype: torch.dtype, non_blocking: bool = ..., copy: bool = ...) -> Self: ...
    @overload
    def to(self, other: Tensor | TreeDict[Any], non_blocking: bool = ..., copy: bool = ...) -> Self: ...
    def to(self, *args: Any, **kwargs: Any) -> Self:
        """This dict on a device, or in a dtype, or both: ``to(device)``, ``to(dtype)``, ``to(device, dtype)``,
        ``to(tensor)`` (its device and dtype), ``to(other_dict)`` (its device).

        Args:
            non_blocking: False: when this returns, the source may be changed or freed, and the result can be used. On
                the host it is complete; on CUDA it is for whatever follows on the current stream, and another stream
                waits for this one, as for every result. True: torch's own contract for asynchronous copies. Always
                blocking to MPS.
            copy: True: new tensors even where nothing changes.

        Returns: a new dict with the same keys and policy, or ``self`` if nothing changes. Kept objects are not moved.
        A dtype, as in ``nn.Module.to``, casts floating-point and complex tensors only and must itself be one: ids and
        masks stay what they are.

        Raises: ``TypeError`` for arguments that fit no form; torch's own error for a device that is not there, or that
        is out of memory. This dict is then as it was.

        Cost: nothing for the device it is on, whatever the number of fields. A packed dict (see `pack`) is copied as
        one tensor. Else, between the host and a device, tensors of up to 64 KiB are gathered in a private block of up
        to 1 MiB, pinned for CUDA, and copied together, larger ones one by one; results on the host own their memory. To
        CUDA the call waits only for what was not gathered. A cast is a copy of each tensor that changes; in a packed
        dict it is one of all, into a new storage, made where they arrive.

        >>> d = DeviceDict({"x": [0.5], "id": [7]})
        >>> d.to("cpu") is d
        True
        >>> d.to("meta").device, d.to(torch.float64)["x"].dtype, d.to(torch.float64)["id"].dtype
        (device(type='meta'), torch.float64, torch.int64)
        """
        device, dtype, non_blocking, copy = to_arguments(args, kwargs)
        if device is not None and device != self._device:
            device = resolve(device)
        if device is None or device == self._device:
            if dtype is None and not copy:
                return self
            device = None
        tensors, flat = self._listed()
        moved = transfer(tensors, device, dtype, non_blocking, copy, self._device)
        if device is None:
            if not copy and all(map(is_, tensors, moved)):
                return self
            device = self._device
        return self._with(moved, device, flat)

    def cpu(self) -> Self:
        """``to("cpu")``: complete on return, under a busy stream too, in pageable memory. Raises and costs what that
        does.

        >>> DeviceDict({"x": 1.0}).cpu().device
        device(type='cpu')
        """
        return self.to(CPU)

    def cuda(self, index: int | None = None, *, non_blocking: bool = False) -> Self:
        """``to("cuda")``: the current CUDA device, or the one with ``index``. Raises and costs what that does.

        >>> d = DeviceDict({"x": 1.0})
        >>> moved = d.cuda() if torch.cuda.is_available() else d
        """
        return self.to(
            torch.device("cuda") if index is None else torch.device("cuda", index), non_blocking=non_blocking
        )

    def numpy(self, copy: bool = False) -> dict[str, Any]:
        """A plain nested dict of NumPy arrays; kept objects as they are.

        Tensors are detached. Those on the CPU share their memory with the arrays, unless ``copy``; others are moved
        first, as `cpu` does.

        Raises: ``TypeError`` that names the key for a dtype or layout NumPy does not have (bfloat16, sparse);
        ``NotImplementedError`` from torch on ``meta``, where there are no values.
        Cost: nothing a tensor on the CPU; elsewhere a copy each, and a synchronisation.

        >>> DeviceDict({"x": [1.0, 2.0], "n": {"y": 3}}).numpy()
        {'x': array([1., 2.], dtype=float32), 'n': {'y': array(3)}}
        """
        d = self if self._device is None or self._device == CPU else self.cpu()
        return _numpy(d, copy, ())

    def pin_memory(self, device: DeviceLike | None = None) -> Self:
        """This dict with its tensors copied to pinned (page-locked) memory; what is pinned already is kept.

        ``device`` is taken, and ignored, because DataLoader passes it.

        Raises: torch's ``RuntimeError`` without an accelerator, or if the tensors are not on the CPU.
        Cost: an allocation and a copy a tensor, or one for all that are packed.

        >>> d = DeviceDict({"x": 1.0})
        >>> pinned = d.pin_memory() if torch.cuda.is_available() else d
        """
        tensors = self._tensors()
        pinned = blockwise(tensors, self._device, Tensor.pin_memory)
        return self._with([t.pin_memory() for t in tensors] if pinned is None else pinned, self._device)

    def is_pinned(self) -> bool:
        """Whether there are tensors and all are in pinned memory. Asks the driver, once a tensor.

        >>> DeviceDict({"x": 1.0}).is_pinned()
        False
        """
        tensors = self._tensors()
        return bool(tensors) and all(tensor.is_pinned() for tensor in tensors)

    def share_memory_(self) -> Self:
        """Move the tensors' storages to shared memory, in place; no effect on CUDA. Returns ``self``.

        Raises: ``RuntimeError`` that names the field for a tensor without a storage, such as a sparse one, before any
            is moved; torch's own error where there is no shared memory left. Cost: a copy and a segment a storage.

        >>> DeviceDict({"x": [1.0]}).share_memory_()["x"].is_shared()
        True
        """
        _refuse_any(self, _unshareable)
        for tensor in self._tensors():
            tensor.share_memory_()
        return self

    @property
    def is_packed(self) -> bool:
        """Whether the tensors lie in one storage, in the order and at the places where `pack` puts them.

        Read from where they lie. A field that was replaced, added, removed, moved to another place in the order,
        resized or given other storage makes it False; writing into one in place does not. Tensors that are never packed
        do not count; False if there are no others. Cost: O(fields), no synchronisation.

        >>> d = DeviceDict({"x": [1.0, 2.0], "y": [3]}).pack()
        >>> d.is_packed, d.select("x").is_packed
        (True, False)
        """
        return is_packed(self._tensors(), self._device)

    def pack(self) -> Self:
        """This dict with its tensors in one storage; ``self`` if they are already.

        What then costs one tensor: `to`, `cpu`, `clone`, `pin_memory`, `share_memory_`, ``pickle``, ``torch.save``, and
        sending it to another process, with one shared-memory segment and one file descriptor. All keep it packed.

        Packed fields are ordinary tensors that share nothing but the storage. Each has its own version counter, so
        that writing into one in place does not disturb what autograd saved of another. They are dense, with the strides
        they had if those were (channels_last stays so), and begin at multiples of 64 bytes. Keeping one of them keeps
        the whole storage.

        Tensors that require grad, subclasses, sparse, nested and quantised tensors, and views with the conjugate or
        negative bit set stay as they are, beside the storage. On ``meta``, ``mps`` and XLA devices all do, and also
        where something must see each operation on a tensor: while ``torch.compile``, a functorch transform,
        forward-mode autograd or a ``TorchDispatchMode`` looks on.

        Raises: torch's own error if the device is out of memory. Cost: one allocation, a copy of every tensor, no
        synchronisation.

        >>> d = DeviceDict({"x": [1.0, 2.0], "n": {"y": [3]}}).pack()
        >>> d["x"].untyped_storage().data_ptr() == d["n", "y"].untyped_storage().data_ptr()
        True
        """
        device = self._device
        if device is None or not packs(device):
            return self
        tensors, flat = self._listed()
        packed = once(tensors, lambda distinct: pack(distinct, device))
        return self if all(map(is_, tensors, packed)) else self._with(packed, device, flat)

    def record_stream(self, stream: Any) -> None:
        """``Tensor.record_stream`` for every tensor: its memory is not reused before the work on ``stream`` is done.

        Raises: torch's ``NotImplementedError`` for tensors on the CPU, which has no streams.

        >>> DeviceDict().record_stream(None)
        """
        for tensor in self._tensors():
            for part in parts(tensor):  # a sparse one has no memory of its own
                part.record_stream(stream)

    # --- like a tensor ---

    def half(self) -> Self:
        """``to(torch.float16)``, with what that raises and costs.

        >>> DeviceDict({"x": 1.0}).half()["x"].dtype
        torch.float16
        """
        return self.to(torch.float16)

    def float(self) -> Self:
        """``to(torch.float32)``, with what that raises and costs.

        >>> DeviceDict({"x": 1.0}).half().float()["x"].dtype
        torch.float32
        """
        return self.to(torch.float32)

    def double(self) -> Self:
        """``to(torch.float64)``, with what that raises and costs.

        >>> DeviceDict({"x": 1.0}).double()["x"].dtype
        torch.float64
        """
        return self.to(torch.float64)

    def bfloat16(self) -> Self:
        """``to(torch.bfloat16)``, with what that raises and costs.

        >>> DeviceDict({"x": 1.0}).bfloat16()["x"].dtype
        torch.bfloat16
        """
        return self.to(torch.bfloat16)

    def detach(self) -> Self:
        """The same tensors cut from the autograd graph, sharing memory; none is copied.

        >>> DeviceDict({"x": torch.ones(2, requires_grad=True)}).detach()["x"].requires_grad
        False
        """
        return self._each(Tensor.detach, self._device)

    def clone(self) -> Self:
        """Every tensor copied, as ``Tensor.clone``: autograd records it.

        Cost: a copy a tensor, or one for all that are packed.

        >>> d = DeviceDict({"x": [1.0]})
        >>> d.clone()["x"].add_(1) is not None, d["x"]
        (True, tensor([1.]))
        """
        tensors, flat = self._listed()
        return self._with(clone(tensors, self._device, plain=flat), self._device, flat)

    def contiguous(self) -> Self:
        """Every tensor contiguous; those that are already are kept. Cost: a copy of each other one.

        >>> DeviceDict({"x": torch.zeros(2, 3).t()}).contiguous()["x"].is_contiguous()
        True
        """
        return self._each(Tensor.contiguous, self._device)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set ``requires_grad`` of the floating-point and complex tensors, in place. Returns ``self``.

        Raises: ``RuntimeError`` that names the field, before any is changed: where False is asked of a tensor that is
            not a leaf, or True of an inference tensor outside ``torch.inference_mode``. No copy.

        >>> d = DeviceDict({"x": [1.0], "id": [1]}).requires_grad_()
        >>> d["x"].requires_grad, d["id"].requires_grad
        (True, False)
        """
        _refuse_any(self, _unable_to_require if requires_grad else _unable_to_stop)
        for tensor in self._tensors():
            if _differentiable(tensor):
                tensor.requires_grad_(requires_grad)
        return self


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _refuse_any(d: TreeDict[Any], reason: Callable[[Tensor], str]) -> None:
    """Raise for the first tensor that there is a ``reason`` against, while none is changed yet."""
    for path, tensor in tensor_paths(d):
        if said := reason(tensor):
            raise RuntimeError(f"{dotted(path)} {said}")


def _unable_to_require(tensor: Tensor) -> str:
    if not (_differentiable(tensor) and tensor.is_inference()) or torch.is_inference_mode_enabled():
        return ""
    return "is an inference tensor, which cannot require grad outside torch.inference_mode(); clone() it first"


def _unable_to_stop(tensor: Tensor) -> str:
    if tensor.is_leaf:
        return ""
    return "is no leaf: it was computed from tensors that require grad, and keeps requiring it; detach() it first"


def _unshareable(tensor: Tensor) -> str:
    try:
        tensor.untyped_storage()
    except NotImplementedError:
        layout = str(tensor.layout).removeprefix("torch.").lstrip("_")
        return f"is {layout}, which has no storage to be moved to shared memory; to_dense() it first"
    return ""


def _numpy(d: TreeDict[Any], copy: bool, at: Path) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in d.items():
        if isinstance(value, Tensor):
            try:
                array = value.numpy()  # most are ready for it, and to call `host_array` takes a tenth as long
            except (TypeError, RuntimeError):
                array = _host_array(value, (*at, key))
            out[key] = np.array(array) if copy else array
        elif isinstance(value, TreeDict):
            out[key] = _numpy(cast("TreeDict[Any]", value), copy, (*at, key))
        else:
            out[key] = value
    return out


def _host_array(tensor: Tensor, path: Path) -> np.ndarray[Any, Any]:
    try:
        return host_array(tensor)
    except TypeError as error:
        raise located(error, path) from error
