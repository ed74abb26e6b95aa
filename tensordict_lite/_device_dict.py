"""`DeviceDict`: what can be done with a whole dict of tensors at once, in a line or two a method over `CheckedDict`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import is_
from typing import Any, cast, overload

import torch
from torch import Tensor
from typing_extensions import Self

from ._arguments import to_arguments
from ._core import CheckedDict, V, agree, comparable
from ._display import field_count, html, size, tree
from ._errors import Path, dotted
from ._strings import decode_nested
from ._transfer import CPU, DeviceLike, canonical, host_array, resolve, transfer

Float = float  # in the class, `float` is the method


class DeviceDict(CheckedDict[V]):
    """A dict whose tensors all live on one device.

    A real ``dict``: it is accepted wherever one is asked for, reads at C speed, keeps its order, and ``len`` is the
    number of keys. Every insert is checked against the device, so that a tensor on the wrong one is refused where it
    is inserted.

    **Dict**: ``d[key]``, ``d[path]``, ``get``, ``pop``, ``setdefault``, ``update``, ``|``, ``|=``, ``==``, ``copy``,
    ``fromkeys``, `select`, `drop`, `map`, `flatten`, `unflatten`, `to_dict`, `allclose`, ``nbytes``.
    **Device**: ``device``, ``is_cuda``, `to`, `cpu`, `cuda`, `numpy`, `pin_memory`, `is_pinned`, `share_memory_`,
    `record_stream`.
    **Tensor**: `half`, `float`, `double`, `bfloat16`, `detach`, `clone`, `requires_grad_`, `contiguous`.
    **Strings**: `decode`.

    Values: a tensor on the device is stored itself. A number becomes a 0-d tensor, a NumPy array, or a nested list of
    numbers, a tensor as ``torch.as_tensor`` makes it (an array on the CPU is shared, unless it is read-only), strings
    are encoded, and a mapping becomes a nested dict, taken in by value. Anything else is a ``TypeError``.
    Keys are ``str``; a tuple is a path: ``d["obs", "image"]``. Setting a path makes the dicts that are missing on it.

    Args:
        data: a mapping or an iterable of pairs.
        device: where everything is to be, and is moved. None: the device of the first tensor; tensors that disagree
            raise. A dict that holds no tensor yet has the device None and takes that of the first one stored, which
            it then keeps, emptied or not. Values from the host alone go to ``torch.get_default_device()``.
        encoders: a mapping from key to string encoder, good for that key at any depth, or one encoder for every key.
            A bare callable encodes only. A key without one uses `Utf8`. The encoder stays with the key through every
            method, copies and pickle.
        on_mismatch: ``"error"``, or ``"move"`` to move a tensor on another device in instead of refusing it.
        objects: ``"error"``, or ``"keep"`` to keep any other object that holds no tensor, on the host, never moved.
        dtype: the floating-point dtype that host values with floating-point content are created in. Tensors are
            never cast.

    The options can be given per class, ``class Batch(DeviceDict, on_mismatch="move")``, and then survive frameworks
    that rebuild a dict as ``type(d)({...})``. Plain dicts nested in a ``Batch`` become ``Batch`` too. Items are all
    the state there is: methods do not carry other attributes of an instance along.

    Raises:
        DeviceMismatchError: for a tensor on another device.
        TypeError, ValueError: for what cannot be stored. Every message names the path; the dict is unchanged.

    Cost: a check per field, no copy of a tensor that is in place, no synchronisation.

    >>> import torch
    >>> from tensordict_lite import DeviceDict
    >>> d = DeviceDict({"x": [[1.0, 2.0], [3.0, 4.0]], "obs": {"step": 3}})
    >>> d
    DeviceDict(cpu, 2 fields, 24 B)
    ├─ x        float32[2, 2]
    └─ obs
       └─ step  int64[]
    >>> d["y"] = torch.zeros(2, device="meta")
    Traceback (most recent call last):
    ...
    tensordict_lite.DeviceMismatchError: 'y' is on meta, this DeviceDict is on cpu; move it with .to('cpu'), or ...
    """

    __slots__ = ()

    # --- device ---

    @property
    def device(self) -> torch.device | None:
        """The device of every tensor, index included; None while nothing was stored or asked for.

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
    def to(self, other: Tensor | CheckedDict[Any], non_blocking: bool = ..., copy: bool = ...) -> Self: ...
    def to(self, *args: Any, **kwargs: Any) -> Self:
        """This dict on a device, or in a dtype, or both: ``to(device)``, ``to(dtype)``, ``to(device, dtype)``,
        ``to(tensor)`` (its device and dtype), ``to(other_dict)`` (its device).

        Args:
            non_blocking: False: when this returns, the result is complete and the source may be changed or freed.
                True: torch's own contract for asynchronous copies. Always blocking to MPS.
            copy: True: new tensors even where nothing changes.

        Returns: a new dict with the same keys and policy, or ``self`` if nothing changes. Kept objects are not moved.
        A dtype, as in ``nn.Module.to``, casts floating-point and complex tensors only and must itself be one: ids and
        masks stay what they are.

        Raises: ``RuntimeError`` from torch for a device that is not there, or is out of memory; this dict is intact.

        Cost: nothing for the device it is on, whatever the number of fields; else one copy a tensor that changes.

        >>> d = DeviceDict({"x": [0.5], "id": [7]})
        >>> d.to("cpu") is d
        True
        >>> d.to("meta").device, d.to(torch.float64)["x"].dtype, d.to(torch.float64)["id"].dtype
        (device(type='meta'), torch.float64, torch.int64)
        """
        device, dtype, non_blocking, copy = to_arguments(*args, **kwargs)
        if device is not None and device != self._device:
            device = resolve(device)
        if device is None or device == self._device:
            if dtype is None and not copy:
                return self
            device = None
        tensors = self._tensors()
        moved = transfer(tensors, device, dtype, non_blocking=non_blocking, copy=copy)
        if device is None and all(map(is_, tensors, moved)) and not copy:
            return self
        return self._with(moved, self._device if device is None else device)

    def cpu(self) -> Self:
        """``to("cpu")``: complete on return, under a busy stream too.

        >>> DeviceDict({"x": 1.0}).cpu().device
        device(type='cpu')
        """
        return self.to(CPU)

    def cuda(self, index: int | None = None, *, non_blocking: bool = False) -> Self:
        """``to("cuda")``: the current CUDA device, or the one with ``index``.

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

        Raises: ``TypeError`` that names the key for a dtype or layout NumPy does not have (bfloat16, sparse).

        >>> DeviceDict({"x": [1.0, 2.0], "n": {"y": 3}}).numpy()
        {'x': array([1., 2.], dtype=float32), 'n': {'y': array(3)}}
        """
        d = self if self._device is None or self._device == CPU else self.cpu()
        return _numpy(d, copy, ())

    def pin_memory(self, device: DeviceLike | None = None) -> Self:
        """This dict with its tensors copied to pinned (page-locked) memory; what is pinned already is kept.

        ``device`` is taken, and ignored, because DataLoader passes it.

        Raises: torch's ``RuntimeError`` without an accelerator, or if the tensors are not on the CPU.
        Cost: an allocation and a copy a tensor.

        >>> d = DeviceDict({"x": 1.0})
        >>> pinned = d.pin_memory() if torch.cuda.is_available() else d
        """
        return self._with([tensor.pin_memory() for tensor in self._tensors()], self._device)

    def is_pinned(self) -> bool:
        """Whether there are tensors and all are in pinned memory. Asks the driver, once a tensor.

        >>> DeviceDict({"x": 1.0}).is_pinned()
        False
        """
        tensors = self._tensors()
        return bool(tensors) and all(tensor.is_pinned() for tensor in tensors)

    def share_memory_(self) -> Self:
        """Move the tensors' storages to shared memory, in place; no effect on CUDA. Returns ``self``.

        >>> DeviceDict({"x": [1.0]}).share_memory_()["x"].is_shared()
        True
        """
        for tensor in self._tensors():
            tensor.share_memory_()
        return self

    def record_stream(self, stream: Any) -> None:
        """``Tensor.record_stream`` for every tensor: its memory is not reused before the work on ``stream`` is done.

        Raises: torch's ``NotImplementedError`` for tensors on the CPU, which has no streams.

        >>> DeviceDict().record_stream(None)
        """
        for tensor in self._tensors():
            tensor.record_stream(stream)

    # --- like a tensor ---

    def half(self) -> Self:
        """``to(torch.float16)``.

        >>> DeviceDict({"x": 1.0}).half()["x"].dtype
        torch.float16
        """
        return self.to(torch.float16)

    def float(self) -> Self:
        """``to(torch.float32)``.

        >>> DeviceDict({"x": 1.0}).half().float()["x"].dtype
        torch.float32
        """
        return self.to(torch.float32)

    def double(self) -> Self:
        """``to(torch.float64)``.

        >>> DeviceDict({"x": 1.0}).double()["x"].dtype
        torch.float64
        """
        return self.to(torch.float64)

    def bfloat16(self) -> Self:
        """``to(torch.bfloat16)``.

        >>> DeviceDict({"x": 1.0}).bfloat16()["x"].dtype
        torch.bfloat16
        """
        return self.to(torch.bfloat16)

    def detach(self) -> Self:
        """The same tensors cut from the autograd graph, sharing memory; none is copied.

        >>> DeviceDict({"x": torch.ones(2, requires_grad=True)}).detach()["x"].requires_grad
        False
        """
        return self._with([tensor.detach() for tensor in self._tensors()], self._device)

    def clone(self) -> Self:
        """Every tensor copied, as ``Tensor.clone``: autograd records it.

        >>> d = DeviceDict({"x": [1.0]})
        >>> d.clone()["x"].add_(1) is not None, d["x"]
        (True, tensor([1.]))
        """
        return self._with([tensor.clone() for tensor in self._tensors()], self._device)

    def contiguous(self) -> Self:
        """Every tensor contiguous; those that are already are kept.

        >>> DeviceDict({"x": torch.zeros(2, 3).t()}).contiguous()["x"].is_contiguous()
        True
        """
        return self._with([tensor.contiguous() for tensor in self._tensors()], self._device)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set ``requires_grad`` of the floating-point and complex tensors, in place. Returns ``self``.

        >>> d = DeviceDict({"x": [1.0], "id": [1]}).requires_grad_()
        >>> d["x"].requires_grad, d["id"].requires_grad
        (True, False)
        """
        for tensor in self._tensors():
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.requires_grad_(requires_grad)
        return self

    # --- like a dict ---

    def select(self, *keys: str | Path) -> Self:
        """A dict of only these keys, in the order given; a path brings only that field of a nested dict.

        Raises: ``KeyError`` for one that is not there. No tensor is copied.

        >>> d = DeviceDict({"x": 1, "obs": {"a": 2, "b": 3}})
        >>> d.select(("obs", "b"), "x").to_dict()
        {'obs': {'b': tensor(3)}, 'x': tensor(1)}
        """
        out = self._new((), self._device, self._policy)
        for key in keys:
            path = key if isinstance(key, tuple) else (key,)
            value: Any = self[key]
            node, source = out, self
            for part in path[:-1]:
                source = dict.__getitem__(source, part)
                if not dict.__contains__(node, part):
                    dict.__setitem__(node, part, source._new((), source._device, source._policy))
                node = dict.__getitem__(node, part)
            dict.__setitem__(node, path[-1], value.copy() if isinstance(value, CheckedDict) else value)
        return out

    def drop(self, *keys: str | Path) -> Self:
        """A dict without these keys, or paths.

        Raises: ``KeyError`` for one that is not there. No tensor is copied.

        >>> DeviceDict({"x": 1, "obs": {"a": 2, "b": 3}}).drop("x", ("obs", "a")).to_dict()
        {'obs': {'b': tensor(3)}}
        """
        out = self.copy()
        for key in keys:
            del out[key]
        return out

    def map(self, function: Callable[[Tensor], Any], /) -> Self:
        """A dict of ``function(tensor)`` for every tensor, at every depth; kept objects as they are.

        The results are stored by the rule of ``d[key] = ...``; the device is that of the first tensor among them, so
        ``function`` may move all of them.

        >>> DeviceDict({"x": [1.0, 2.0], "n": {"y": [3.0]}}).map(torch.sum).to_dict()
        {'x': tensor(3.), 'n': {'y': tensor(3.)}}
        """
        results = [function(tensor) for tensor in self._tensors()]
        first = next((canonical(result.device) for result in results if isinstance(result, Tensor)), self._device)
        out = self._new((), first, self._policy)
        out._take(self._with(results, None))
        return out

    def flatten(self, sep: str = ".") -> DeviceDict[V]:
        """One level: nested keys joined with ``sep``, encoders with their fields; an empty nested dict stays one.

        Raises: ``ValueError`` if two fields would get one name. No tensor is copied.

        >>> list(DeviceDict({"obs": {"a": 1, "b": {"c": 2}}}).flatten())
        ['obs.a', 'obs.b.c']
        """
        items: dict[str, Any] = {}
        encoders: dict[str, Any] = {}
        _flatten(self, "", sep, items, encoders)
        return DeviceDict[V]._new(items, self._device, self._policy.with_encoders(encoders))

    @classmethod
    def unflatten(cls, mapping: Mapping[str, Any], sep: str = ".") -> Self:
        """The nested dict of one level of joined keys: `flatten` undone.

        Raises: ``ValueError`` if a key is both a field and the start of another. No tensor is copied.

        >>> DeviceDict.unflatten({"obs.a": 1, "obs.b.c": 2}).to_dict()
        {'obs': {'a': tensor(1), 'b': {'c': tensor(2)}}}
        """
        nested: dict[str, Any] = {}
        for key, value in mapping.items():
            *parents, last = key.split(sep)
            node = nested
            for part in parents:
                node = node.setdefault(part, {})
                if not isinstance(node, dict):
                    raise ValueError(f"{key!r}: {part!r} is a field already, so it cannot be a nested dict too")
            if last in node:
                raise ValueError(f"{key!r} is the start of another key, so it cannot be a field too")
            node[last] = value
        return cls(nested)

    def to_dict(self) -> dict[str, Any]:
        """A plain nested dict of the same tensors and kept objects; no tensor is copied.

        >>> DeviceDict({"n": {"y": 3}}).to_dict()
        {'n': {'y': tensor(3)}}
        """
        return {key: value.to_dict() if isinstance(value, DeviceDict) else value for key, value in self.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: elements times element size, memory that two share counted twice.

        >>> DeviceDict({"x": [1.0, 2.0], "n": {"y": 3}}).nbytes
        16
        """
        return sum(tensor.nbytes for tensor in self._tensors())

    def allclose(
        self, other: Mapping[str, Any], rtol: Float = 1e-05, atol: Float = 1e-08, equal_nan: bool = False
    ) -> bool:
        """Whether ``other`` has the same keys, dtypes and shapes, and values that ``torch.allclose`` finds close.

        ``==`` is the same with equal values. Dicts on two devices are compared on the CPU.
        Cost: a synchronisation a field on an accelerator. Tensors on ``meta`` have no values and are close to none.

        >>> DeviceDict({"x": 1.0}).allclose({"x": torch.tensor(1.0 + 1e-7)})
        True
        """

        def close(x: Tensor, y: Tensor) -> bool:
            pair = comparable(x, y)
            return pair is not None and torch.allclose(*pair, rtol=rtol, atol=atol, equal_nan=equal_nan)

        return agree(self, other, close)

    # --- strings ---

    def decode(self, key: str | Path) -> Any:
        """The strings of a field that was encoded: a ``str``, or lists nested as the field's leading dimensions are.

        Raises: ``KeyError`` for a key that is not there, ``TypeError`` or ``ValueError`` that name it for a field that
        its encoder cannot decode. Cost: the field is copied to the CPU, with a synchronisation.

        >>> DeviceDict({"name": [["a", "bc"], ["", "d"]]}).decode("name")
        [['a', 'bc'], ['', 'd']]
        """
        node, last = self._walk(key) if isinstance(key, tuple) else (self, key)
        codes: Any = dict.__getitem__(node, last)
        path = key if isinstance(key, tuple) else (key,)
        encoder = node._policy.encoder(last)
        if not isinstance(codes, Tensor | CheckedDict):
            raise TypeError(f"{dotted(path)} is a kept {type(codes).__name__}, not encoded strings")
        try:
            return decode_nested(encoder, cast(Any, codes))
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{dotted(path)}: {error}") from error

    # --- looking ---

    def __repr__(self) -> str:
        return tree(self, _title(self), _note)

    def _repr_html_(self) -> str:
        return html(self, _title(self), _note)


def _numpy(d: CheckedDict[Any], copy: bool, at: Path) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in d.items():
        if isinstance(value, Tensor):
            try:
                array = host_array(value)
            except TypeError as error:
                raise TypeError(f"{dotted((*at, key))}: {error}") from error
            out[key] = array.copy() if copy else array
        elif isinstance(value, CheckedDict):
            out[key] = _numpy(cast("CheckedDict[Any]", value), copy, (*at, key))
        else:
            out[key] = value
    return out


def _flatten(d: CheckedDict[Any], prefix: str, sep: str, items: dict[str, Any], encoders: dict[str, Any]) -> None:
    for key, value in d.items():
        name = prefix + key
        if name in items:
            raise ValueError(f"two fields would be named {name!r}; flatten with another sep than {sep!r}")
        if isinstance(value, CheckedDict) and value:
            _flatten(cast("CheckedDict[Any]", value), name + sep, sep, items, encoders)
            continue
        items[name] = value.copy() if isinstance(value, CheckedDict) else value
        if key in d._policy.encoders:
            encoders[name] = d._policy.encoders[key]


def _title(d: CheckedDict[Any]) -> str:
    count, nbytes = field_count(d), sum(tensor.nbytes for tensor in d._tensors())
    device = "no device yet" if d._device is None else str(d._device)
    return f"{type(d).__name__}({device}, {count} field{'' if count == 1 else 's'}, {size(nbytes)})"


def _note(d: Mapping[str, Any], key: str) -> str:
    encoder = d._policy.encoders.get(key) if isinstance(d, CheckedDict) else None
    return "" if encoder is None else repr(encoder)
