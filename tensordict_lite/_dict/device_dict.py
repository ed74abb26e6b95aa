"""`DeviceDict`, the public class: a dict whose tensors all live on one device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import is_
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from typing_extensions import Never, Self, Unpack

from .._encoders.protocol import StringEncoder, as_given
from .._errors import Path, described, dotted, optional_module, refuse_deeper, with_path
from .._files import safetensors
from .._files.atomic_write import FilePath
from .._look.describe import Description, find, statistics
from .._look.page import as_html, as_text
from .._look.progress import Progress
from .._look.tree import title_of, tree_page
from .._memory.arguments import to_arguments
from .._memory.cast import host_array, pin
from .._memory.compare import values_agree
from .._memory.device import CPU, DeviceLike, canonical, record_stream, resolve
from .._memory.dtypes import CASTABLE
from .._memory.packed import can_pack, is_packed, map_storages, pack
from .._memory.transfer import clone_tensors, transfer
from .._memory.write import Call, write_all
from .._tree import encoding, sendable
from .._tree.compare import equal_trees
from .._tree.fields import refuse_ragged, tolist
from .._tree.frames import arrow_items, pandas_items
from .._tree.inside import Opened, kept_tensors, move_itself, numpy_inside, stay
from .._tree.kinds import KEPT, Field, kind_of
from .._tree.missing import missing_key, rows_hint
from .._tree.policy import OPTIONS, Encoders, Options, refuse_option, refuse_positional
from .._tree.ragged import Ragged
from .._tree.tree import TreeDict, V, builtin_dict, data_in, dicts_of
from .._tree.walk import Items, as_dict, as_path, components, leaves, nbytes, only_tensors, refuse_key
from . import arithmetic, by_value, torch_functions
from .fill import fill_
from .insert import insert, refuse_misspelled
from .rows import Rows

Number = complex  # type checkers accept an int and a float for a complex
Real = float  # in the class, `float` is a method
_MISSING: Any = object()


class DeviceDict(TreeDict[V]):
    """A dict whose tensors all live on one device.

    A subclass of ``dict``: ``isinstance`` checks pass, reads run at C speed, keys keep their order, and ``len`` is the
    number of keys. Every insert validates the device. A tensor on another device raises an error at the line that
    inserts it.

    **Dict**: ``d[key]``, ``d[path]``, ``get``, ``pop``, ``setdefault``, ``update``, ``|``, ``|=``, ``==``, ``copy``,
    ``fromkeys``, `select`, `drop`, `map`, `flatten`, `unflatten`, `to_dict`, `tolist`, `allclose`, ``nbytes``.
    **Device**: ``device``, ``is_cuda``, `to`, `to_`, `cpu`, `cuda`, `numpy`, `pin_memory`, `is_pinned`,
    `share_memory_`, `record_stream`, `pack`, ``is_packed``.
    **Tensor**: `half`, `float`, `double`, `bfloat16`, `detach`, `clone`, `new_zeros`, `new_empty`, `requires_grad_`,
    `contiguous`.
    **Arithmetic**: `zero_`, `add_`, `sub_`, `mul_`, `div_`, `lerp_`, `copy_`, `fill_`, `total_norm`, and functions of
    torch such as ``torch.stack`` and ``torch.zeros_like``.
    **Strings**: `decode`, ``encoders``. **Batch**: `rows`, `equal`. **Looking**: `describe`, `find`. **Files**: `save`,
    `load`.

    Each kind of value is stored as follows. Any other value raises ``TypeError``.

    - A tensor on the device: the tensor itself.
    - A number: a 0-d tensor.
    - A NumPy array or a nested list of numbers: the tensor of ``torch.as_tensor``. On the CPU the tensor shares the
      memory of the array, unless the array is read-only. A ``range`` and an object with ``__array__`` or a buffer, such
      as a PIL image, are stored as their array.
    - An array of another library with ``__dlpack__`` or ``__cuda_array_interface__``: a tensor that shares its memory,
      with the device rule of a tensor.
    - A string or a nested list of strings: the tensor or tensors of the key's encoder.
    - A mapping: a new nested dict. Its tensors are shared, its structure is copied.

    A key is a ``str``. A tuple of keys is a path: ``d["obs", "image"]``. Setting a path creates the missing dicts on
    that path. Dicts nest up to 64 levels, the outermost dict included. Lists and kept objects have the same limit.

    Args:
        data: a mapping or an iterable of pairs.
        device: the device of the dict. Tensors on other devices are moved there. None: the device of the first tensor;
            tensors on different devices raise an error. The device of a dict without tensors is None until the first
            tensor is stored. The dict then keeps this device, even if all items are deleted. Host values alone, and
            nested dicts without tensors, put the dict on torch's default device; give ``device=`` to choose another.
        encoders: a mapping from key to string encoder, or a single encoder for all keys. The encoder of a key serves
            that key at any depth. Copies, pickles and the results of methods keep the encoders. The default encoder is
            `Utf8`. A bare callable can encode, but not decode. Values of a `DeviceDict` that are encoded, also nested
            ones, keep their encoder.
        on_mismatch: ``"error"``: a tensor on another device raises. ``"move"``: the tensor is moved to the device of
            the dict.
        objects: ``"error"``: an object of any other type raises. ``"keep"``: only tensors are tensors. A plain dict
            with str keys becomes a nested dict, a key with an encoder of its own is encoded, and every other value is
            kept as it is given, mappings of other classes too. Tensors in kept lists, tuples, mappings and dataclasses
            follow the rule for devices and move with the dict; an object with a method ``to(device)`` is moved by it,
            on a ``copy.copy``.
        dtype: the dtype of tensors that are created from floating-point host values. Tensors are never cast.

    A class can declare options: ``class Batch(DeviceDict, on_mismatch="move")``. Class options survive frameworks that
    rebuild a dict as ``type(d)({...})``. Plain dicts nested in a ``Batch`` become ``Batch`` too. The state of a dict is
    its items, device and options. Methods do not copy other attributes of an instance.

    Raises:
        DeviceMismatchError: for a tensor on another device.
        TypeError, ValueError: for a key or value that cannot be stored. Every message names the path. The dict is
            unchanged.
        ValueError: if ``data`` is a `DeviceDict`, for a key in ``encoders`` whose value another encoder encoded; for a
            key in ``encoders`` that is absent, and close to the key of a field of strings without an encoder.

    Cost: a check per field. Tensors that are on the device already are not copied. No synchronization.

    >>> import torch
    >>> from tensordict_lite import DeviceDict
    >>> d = DeviceDict({"x": [[1.0, 2.0], [3.0, 4.0]], "obs": {"step": 3}})
    >>> d
    DeviceDict(cpu, 2 fields, 24 B)
    ├─ x        float32[2, 2]
    └─ obs
       └─ step  int64[]        3
    >>> d["y"] = torch.zeros(2, device="meta")
    Traceback (most recent call last):
    ...
    tensordict_lite.DeviceMismatchError: 'y' is on meta, this DeviceDict is on cpu; move it with .to('cpu'), or ...
    """

    # No `__getattr__` to say what to write instead of `d.shape`: it would slow down every attribute, for `make guard` a
    # write by 10 % and `to` by 20 %. No descriptors either: `isinstance(d, Stateful)` would be True.
    __slots__ = ()

    __module__ = "tensordict_lite"  # set before pytree registers the class: exported programs store this name

    # --- construction ---

    def __init__(
        self,
        data: Items | None = None,
        /,
        *more: Never,
        device: DeviceLike | None = None,
        **options: Unpack[Options],
    ) -> None:
        if more:
            refuse_positional(type(self).__name__, more)
        self._begin(data, device, options)
        if data is not None:
            insert(self, as_dict(data), consent=device is not None)
            if options:
                refuse_misspelled(self, options.get("encoders"))

    def _begin(self, data: Items | None, device: DeviceLike | None, options: Mapping[str, Any]) -> None:
        """Set the device and the policy of a new dict, before ``data`` is inserted."""
        # In torch 2.10, Dynamo puts the data into the new dict before it calls `__init__`.
        used = self or (hasattr(self, "_device") and self._device is not None)
        if used and not torch.compiler.is_compiling():
            raise TypeError(f"this {type(self).__name__} is already constructed; use update to add items")
        policy = self._class_policy
        target = None if device is None else resolve(device)
        if type(data) is not dict and isinstance(data, TreeDict):  # a copy, maybe of another class
            policy = self._policy_of_copy(data._policy, data)
            target = data._device if device is None else target
        if options:
            for name in options:
                if name not in OPTIONS:
                    refuse_option(type(self).__name__, name)
            keys = data if isinstance(data, TreeDict) else ()
            policy = policy.override_of_copy(keys, **options)
        self._policy = policy
        self._device = target

    # --- reading (`dict` itself reads plain keys; the methods here add paths) ---

    if TYPE_CHECKING:  # pragma: no cover

        def __getitem__(self, key: str | Path, /) -> V: ...

    def __missing__(self, key: Any) -> V:
        node = self._holder(key) if type(key) is tuple else None
        if node is None:
            raise missing_key(self, key)
        return builtin_dict.__getitem__(node, key[-1])

    def __contains__(self, key: object) -> bool:
        return builtin_dict.__contains__(self, key) or (type(key) is tuple and self._holder(key) is not None)

    def get(self, key: str | Path, default: Any = None, /) -> Any:
        """Return the value at a key or path, or ``default``. Raises no ``KeyError``, copies nothing.

        >>> from tensordict_lite import DeviceDict
        >>> d = DeviceDict({"obs": {"x": 1}})
        >>> d.get(("obs", "x")), d.get("y")
        (tensor(1), None)
        """
        if type(key) is not tuple:
            return builtin_dict.get(self, key, default)
        node = self._holder(key)
        return default if node is None else builtin_dict.__getitem__(node, key[-1])

    # --- writing (the methods of `dict` itself would skip validation) ---

    def __setitem__(self, key: str | Path, value: Any, /) -> None:
        # No call for a plain tensor on the device, and no `device ==` on the CPU: "write" of `make guard`.
        if (
            type(value) is Tensor
            and type(key) is str
            and (value.is_cpu if self._device is CPU else value.device == self._device)
        ):
            builtin_dict.__setitem__(self, key, value)
        else:
            self._set(key, value)

    def __delitem__(self, key: str | Path, /) -> None:
        self._refuse_without(key)
        if type(key) is tuple:
            node, last = self._walk(key)
            del node[last]
        else:
            try:
                builtin_dict.__delitem__(self, key)
            except KeyError:
                raise missing_key(self, key) from None
            except TypeError:  # the key has no hash
                refuse_key(key, (), rows_hint(key))

    def pop(self, key: str | Path, default: Any = _MISSING, /) -> Any:
        """Remove a key or path and return its value. Copies nothing.

        If the key is missing, return ``default``.

        Raises: ``KeyError`` if the key is missing and there is no ``default``.

        >>> from tensordict_lite import DeviceDict
        >>> d = DeviceDict({"obs": {"x": 1, "y": 2}})
        >>> d.pop(("obs", "x")), list(d["obs"])
        (tensor(1), ['y'])
        """
        value = self.get(key, _MISSING)
        if value is not _MISSING:
            del self[key]
            return value
        if default is _MISSING:
            raise missing_key(self, key)
        return default

    def _refuse_without(self, key: Any) -> None:
        """Raise ``TypeError`` if this class needs the item."""

    def setdefault(self, key: str | Path, default: Any = None, /) -> Any:
        """Return the value at ``key``. If the key is missing, store ``default`` there first.

        Raises the errors of ``d[key] = default``, and has its cost.

        >>> from tensordict_lite import DeviceDict
        >>> d = DeviceDict()
        >>> d.setdefault("x", 1.5)
        tensor(1.5000)
        """
        if key not in self:
            self[key] = default
        return self.get(key)

    def update(self, data: Items = (), /, **fields: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Store all items. If an item is invalid, store none of them.

        If ``data`` is a `DeviceDict`, the encoders of its keys are stored too.

        Args:
            data: a mapping or an iterable of pairs.
            fields: more items, by keyword.

        Raises: the error of ``d[key] = value`` for the first invalid item; the error of ``dict.update`` if ``data`` is
            neither a mapping nor pairs.
        Cost: a check per item. A tensor on the device is not copied.

        >>> from tensordict_lite import DeviceDict
        >>> d = DeviceDict({"x": 0})
        >>> try:
        ...     d.update(x=1, y=None)
        ... except TypeError:
        ...     print(d["x"])
        tensor(0)
        """
        items = as_dict(data)
        if fields:
            items = {**items, **fields}
        brought: dict[str, StringEncoder] | None = None
        if type(data) is not dict and isinstance(data, TreeDict):
            encoders = data._policy.carried(data)
            brought = {key: encoders[key] for key in encoders if key in data and key not in fields}
        insert(self, items, encoders=brought)

    def __ior__(self, other: Items, /) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.update(other)
        return self

    def __or__(self, other: Any, /) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not isinstance(other, Mapping):
            return NotImplemented
        out = self.copy()
        out.update(other)
        return out

    def __ror__(self, other: Any, /) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not isinstance(other, Mapping):
            return NotImplemented
        out = self._new((), self._device, self._policy)
        out.update({**other, **self})
        return out

    def copy(self) -> Self:
        """A new dict with the same tensors. Copies the structure at every level and no tensor.

        >>> from tensordict_lite import DeviceDict
        >>> d = DeviceDict({"obs": {"x": 1}})
        >>> c = d.copy()
        >>> del c["obs", "x"]
        >>> d["obs", "x"] is not None
        True
        """
        items: Any = self
        if not only_tensors(self.values()):
            items = {key: value.copy() if isinstance(value, TreeDict) else value for key, value in self.items()}
        return self._new(items, self._device, self._policy)

    @classmethod
    def fromkeys(cls, keys: Iterable[str], value: Any = None, /) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Create a dict with the same ``value`` at each key. Raises the errors of ``d[key] = value``.

        >>> from tensordict_lite import DeviceDict
        >>> DeviceDict.fromkeys(["x", "y"], 0.0)["y"]
        tensor(0.)
        """
        return cls(dict.fromkeys(keys, value))

    # --- structure ---

    def select(self, *keys: str | Path) -> Self:
        """Return a dict of these keys only, in the given order. A path selects one field of a nested dict.

        Raises: ``KeyError`` for a key or path that is missing. Cost: no tensor is copied.

        >>> d = DeviceDict({"x": 1, "obs": {"a": 2, "b": 3}})
        >>> d.select(("obs", "b"), "x").to_dict()
        {'obs': {'b': tensor(3)}, 'x': tensor(1)}
        """
        out = self._untyped_subset(())
        for key in keys:
            path = as_path(key)
            value: Any = self[key]
            node: TreeDict[Any] = out
            source: TreeDict[Any] = self
            for part in path[:-1]:
                source = builtin_dict.__getitem__(source, part)
                node = builtin_dict.setdefault(node, part, source._untyped_subset(()))
            builtin_dict.__setitem__(node, path[-1], value.copy() if isinstance(value, TreeDict) else value)
        return out

    def drop(self, *keys: str | Path) -> Self:
        """Return a dict without these keys or paths.

        Raises: ``KeyError`` for a key or path that is missing. Cost: no tensor is copied.

        >>> DeviceDict({"x": 1, "obs": {"a": 2, "b": 3}}).drop("x", ("obs", "a")).to_dict()
        {'obs': {'b': tensor(3)}}
        """
        out = self._untyped_subset(self.copy())
        for key in keys:
            path = as_path(key)
            out.__getitem__(key)  # raises KeyError
            node: TreeDict[Any] = out
            for part in path[:-1]:
                inner: TreeDict[Any] = builtin_dict.__getitem__(node, part)
                builtin_dict.__setitem__(node, part, inner._untyped_subset(inner))
                node = builtin_dict.__getitem__(node, part)
            builtin_dict.__delitem__(node, path[-1])
        return out

    def map(self, function: Callable[..., Any], /, *others: Mapping[str, Any]) -> Self:
        """Apply ``function`` to every tensor at every depth, and return a dict of the results.

        Each result is inserted as by ``d[key] = result``. The device of the new dict is that of the first tensor among
        the results, so ``function`` can move all tensors. Kept objects are inserted too.

        Args:
            function: takes a tensor of this dict, and the tensor at the same path of each other mapping.
            others: dicts or plain mappings of tensors on the device of this dict. They have the keys of this dict, in
                any order, at every level.

        Raises: the errors of ``function``, with the path of the field; the errors of ``d[key] = result``;
            ``ValueError`` that names the path of a missing or extra key of the others; ``TypeError`` for another value
            than a tensor; ``DeviceMismatchError``.
        Cost: one call per tensor.

        >>> DeviceDict({"x": [1.0, 2.0], "n": {"y": [3.0]}}).map(torch.sum).to_dict()
        {'x': tensor(3.), 'n': {'y': tensor(3.)}}
        >>> d = DeviceDict({"x": 1, "y": 2})
        >>> d.map(torch.add, {"y": torch.tensor(10), "x": torch.tensor(20)}).to_dict()
        {'x': tensor(21), 'y': tensor(12)}
        """
        if not callable(function):
            raise TypeError(f"map takes a function of a tensor, got {type(function).__name__}")
        results = arithmetic.call_each(self, function, *[arithmetic.match(self, other, "map") for other in others])
        first = next((canonical(result.device) for result in results if isinstance(result, Tensor)), self._device)
        out = self._new(self, first, self._policy)
        insert(out, self._replace_data(iter(results), None))
        out._validate(self)
        return out

    def flatten(self, sep: str = ".") -> DeviceDict[V]:
        """Return a dict of one level, with nested keys joined by ``sep``.

        Fields keep their encoders. An empty nested dict stays an empty dict, and a `Ragged` is one field. `unflatten`
        with the same ``sep`` is the inverse.

        Raises: ``ValueError`` for a key that contains ``sep``, such as those of a ``state_dict``: give another ``sep``.
        Cost: no tensor is copied.

        >>> list(DeviceDict({"obs": {"a": 1, "b": {"c": 2}}}).flatten())
        ['obs.a', 'obs.b.c']
        """
        items: dict[str, Any] = {}
        encoders: dict[str, Any] = {}
        flatten_into(items, encoders, self, sep)
        out: Any = DeviceDict._new(items, self._device, self._policy.with_encoders(encoders))
        return out

    @classmethod
    def unflatten(cls, mapping: Mapping[str, Any], sep: str = ".") -> Self:
        """Create a nested dict from joined keys: the inverse of `flatten`. Encoders of a `DeviceDict` are kept.

        Raises: ``ValueError`` if a key is also the prefix of another key; the errors of the constructor.
        Cost: no tensor is copied.

        >>> DeviceDict.unflatten({"obs.a": 1, "obs.b.c": 2}).to_dict()
        {'obs': {'a': tensor(1), 'b': {'c': tensor(2)}}}
        """
        if not isinstance(mapping, TreeDict):
            return cls(_split_keys(as_dict(mapping), sep))
        known = mapping._policy.encoders
        policy = replace(mapping._policy, encoders={key: known[key] for key in known if sep not in key})
        out = cls._new((), mapping._device, cls._policy_of_copy(policy, [key for key in mapping if sep not in key]))
        insert(out, _split_keys(mapping, sep))
        for key, encoder in known.items():
            if sep in key and (path := tuple(key.split(sep))) in out:
                node, last = out._walk(path)
                node._policy = node._policy.with_encoders({last: encoder})
        return out

    def to_dict(self) -> dict[str, Any]:
        """Return a plain nested dict of the same tensors and kept objects. No tensor is copied.

        >>> DeviceDict({"n": {"y": 3}}).to_dict()
        {'n': {'y': tensor(3)}}
        """
        return {key: value.to_dict() if isinstance(value, DeviceDict) else value for key, value in self.items()}

    @property
    def nbytes(self) -> int:
        """The total size of all tensors in bytes: elements times element size. Reads no value.

        Memory that two tensors share counts twice.

        >>> DeviceDict({"x": [1.0, 2.0], "n": {"y": 3}}).nbytes
        16
        """
        return sum(map(nbytes, self._tensors_inside()))

    def allclose(
        self, other: Mapping[str, Any], rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
    ) -> bool:
        """Whether ``other`` has the same keys, dtypes and shapes, and values that are close by ``torch.allclose``.

        ``==`` requires equal values instead. Dicts on two devices are compared on the CPU. Tensors on ``meta`` have no
        values, so they are close to no tensor.

        Raises: ``TypeError`` if ``other`` is not a mapping. Cost: on an accelerator, one synchronization per field.

        >>> DeviceDict({"x": 1.0}).allclose({"x": torch.tensor(1.0 + 1e-7)})
        True
        """
        if not isinstance(other, Mapping):
            raise TypeError(f"allclose compares with a mapping, got {type(other).__name__}")

        def close(x: Tensor, y: Tensor) -> bool:
            if x.is_floating_point() and x.dtype.itemsize == 1:  # torch has no arithmetic for float8
                x, y = x.float(), y.float()
            return torch.allclose(x, y, rtol, atol, equal_nan)

        return equal_trees(self, other, lambda x, y: values_agree(x, y, close))

    # --- device ---

    @property
    def device(self) -> torch.device | None:
        """The device of every tensor, with its index.

        None until a tensor is stored or a device is given. Also None if ``tree_map`` returned tensors on several
        devices, until `to` moves them to one device.

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
        device: DeviceLike | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
        copy: bool = False,
    ) -> Self: ...
    @overload
    def to(self, dtype: torch.dtype, non_blocking: bool = False, copy: bool = False) -> Self: ...
    @overload
    def to(self, other: Tensor | TreeDict[Any], non_blocking: bool = False, copy: bool = False) -> Self: ...
    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move this dict to a device, cast it to a dtype, or both.

        The forms are ``to(device)``, ``to(dtype)``, ``to(device, dtype)``, ``to(tensor)`` (its device and dtype) and
        ``to(other_dict)`` (its device).

        Args:
            non_blocking: False: when this returns, the source may be changed or freed, and the result can be used. On
                the host the result is complete. On an accelerator it is ready for later work on the current stream;
                another stream must wait for the current stream. True: torch's contract for asynchronous copies. A copy
                to MPS always blocks.
            copy: True: copy every tensor, also if nothing changes.

        Returns: a new dict with the same keys and policy, or ``self`` if nothing changes. Tensors in kept containers
        move too, and so do kept objects with a method ``to(device)`` of their own; an error of such a method has a note
        with the key.
        As in ``nn.Module.to``, a dtype must be floating-point or complex and casts only such tensors. So ids and masks
        keep their dtypes.

        Raises: ``TypeError`` for arguments that fit no form. Torch's own error if the device is absent or out of
        memory; this dict is then unchanged.

        Cost: nothing on the current device, for any number of fields. A packed dict (see `pack`) is copied as one
        tensor. Other dicts: tensors of up to 32 KiB are coalesced in buffers, each of which is copied at once. Larger
        tensors are copied one by one. A cast copies each tensor that changes. In a packed dict it is one copy into a
        new storage, on the side where it makes the copy smaller.

        Waits: up to 16 MiB go to an accelerator with pinned memory without a wait for other work on the stream; the
        coalesced tensors do not count. The host waits if it moves more, or more than 1 MiB of pinned memory, if a
        tensor cannot be packed, or if 32 MiB are on their way. A copy to the host waits for the stream.

        >>> d = DeviceDict({"x": [0.5], "id": [7]})
        >>> d.to("cpu") is d
        True
        >>> d.to("meta").device, d.to(torch.float64)["x"].dtype, d.to(torch.float64)["id"].dtype
        (device(type='meta'), torch.float64, torch.int64)
        """
        device, dtype, non_blocking, copy = to_arguments(args, kwargs)
        if device is not None and device != self._device:
            device = resolve(device)
        stays = device is None or device == self._device
        if stays and dtype is None and not copy:
            return self
        kept: list[Opened | None] = []
        tensors, flat = self._tensors_and_kind(kept)
        moved = transfer(tensors, None if stays else device, dtype, non_blocking, copy, self._device)
        if stays and not copy and all(map(is_, tensors, moved)):
            return self
        if stays or device is None:
            return self._replace_tensors(moved, self._device, flat, kept, stay)
        move = partial(move_itself, device=device, non_blocking=non_blocking)
        return self._replace_tensors(moved, device, flat, kept, move)

    @overload
    def to_(
        self,
        device: DeviceLike | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
        copy: bool = False,
    ) -> Self: ...
    @overload
    def to_(self, dtype: torch.dtype, non_blocking: bool = False, copy: bool = False) -> Self: ...
    @overload
    def to_(self, other: Tensor | TreeDict[Any], non_blocking: bool = False, copy: bool = False) -> Self: ...
    def to_(self, *args: Any, **kwargs: Any) -> Self:
        """Move or cast this dict in place, as `to` does to a copy. Returns ``self``.

        For code that calls ``batch.to(device)`` as a statement. The nested dicts stay the same objects; the tensors are
        replaced by those that `to` returns. Arguments, waits and cost are those of `to`.

        Raises the errors of `to`. This dict is then unchanged.

        >>> d = DeviceDict({"x": [0.5], "n": {"y": 1}})
        >>> inner = d["n"]
        >>> d.to_("meta") is d, d.device, inner.device
        (True, device(type='meta'), device(type='meta'))
        """
        moved = self.to(*args, **kwargs)
        calls: list[Call] = []
        for old, new in zip(dicts_of(self), dicts_of(moved), strict=True):
            items = {key: value for key, value in new.items() if not isinstance(value, TreeDict)}
            calls += [partial(builtin_dict.update, old, items), partial(setattr, old, "_device", new._device)]
        write_all(calls)
        return self

    def cpu(self) -> Self:
        """``to("cpu")``. The result is complete on return and lies in pageable memory.

        Raises the errors of `to`, and has its cost.

        >>> DeviceDict({"x": 1.0}).cpu().device
        device(type='cpu')
        """
        return self.to(CPU)

    def cuda(self, index: int | None = None, *, non_blocking: bool = False) -> Self:
        """``to("cuda")``: the current CUDA device, or the CUDA device ``index``. ``non_blocking`` as in `to`.

        Raises the errors of `to`, and has its cost.

        >>> d = DeviceDict({"x": 1.0})
        >>> moved = d.cuda() if torch.cuda.is_available() else d
        """
        return self.to("cuda" if index is None else torch.device("cuda", index), non_blocking=non_blocking)

    def numpy(self, copy: bool = False) -> dict[str, Any]:
        """A plain nested dict of NumPy arrays and of the kept objects.

        Tensors are detached. Arrays share memory with tensors on the CPU, unless ``copy``. Tensors on another device
        are first moved, as `cpu` does.

        Raises: ``TypeError`` that names the key for a dtype or layout NumPy does not have (bfloat16, sparse);
        ``NotImplementedError`` from torch on ``meta``, where there are no values.
        Cost: no copy on the CPU; elsewhere the copies of `cpu`, and a synchronization.

        >>> DeviceDict({"x": [1.0, 2.0], "n": {"y": 3}}).numpy()
        {'x': array([1., 2.], dtype=float32), 'n': {'y': array(3)}}
        """
        d = self if self._device is None or self._device == CPU else self.cpu()
        return _numpy(d, copy, ())

    def pin_memory(self, device: DeviceLike | None = None) -> Self:
        """Copy the tensors to pinned (page-locked) memory. Tensors that are pinned already are kept. The copy of an
        expanded tensor is dense.

        ``device`` is ignored. The argument exists because DataLoader passes it.

        Raises: torch's ``RuntimeError`` without an accelerator, or if the tensors are not on the CPU.
        Cost: an allocation and a copy for each storage that several tensors fill, and for each other tensor.

        >>> d = DeviceDict({"x": 1.0})
        >>> pinned = d.pin_memory() if torch.cuda.is_available() else d
        """
        kept: list[Opened | None] = []
        tensors, flat = self._tensors_and_kind(kept)
        pinned = map_storages(tensors, self._device, pin) or [pin(t) for t in tensors]
        return self._replace_tensors(pinned, self._device, flat, kept, _pinned)

    def is_pinned(self) -> bool:
        """Whether all tensors are in pinned memory. False if there are no tensors. Cost: a driver call per tensor.

        >>> DeviceDict({"x": 1.0}).is_pinned()
        False
        """
        tensors = self._tensors_inside()
        return bool(tensors) and all(tensor.is_pinned() for tensor in tensors)

    def share_memory_(self) -> Self:
        """Move the tensors' storages to shared memory, in place; no effect on CUDA. Returns ``self``.

        Raises: ``RuntimeError`` that names the field if a tensor has no storage (sparse, for example). No tensor is
            moved then. Torch's own error if no shared memory is left. Cost: a copy and a segment for each storage.

        >>> DeviceDict({"x": [1.0]}).share_memory_()["x"].is_shared()
        True
        """
        _refuse_any(self, _unshareable)
        for tensor in self._tensors_inside():
            tensor.share_memory_()
        return self

    def record_stream(self, stream: Any) -> None:
        """Call ``Tensor.record_stream`` once for each storage.

        When a storage is freed, its memory is reused only after the work that ``stream`` has at that time.

        Raises: torch's ``NotImplementedError`` for tensors on the CPU, which has no streams. Cost: O(fields).

        >>> DeviceDict().record_stream(None)
        """
        # The memory of a sparse tensor belongs to its indices and values.
        record_stream((part for tensor in self._tensors_inside() for part in components(tensor)), stream)

    @property
    def is_packed(self) -> bool:
        """Whether the tensors fill one storage, whoever put them there. A small batch of `collate` does.

        The addresses of the tensors are inspected each time. A field that is replaced, added, removed, resized or given
        another storage makes it False. An in-place write to a field does not. Tensors that cannot be packed are
        ignored. False if no tensor can be packed. Cost: O(fields), no synchronization.

        >>> d = DeviceDict({"x": [1.0, 2.0], "y": [3]}).pack()
        >>> d.is_packed, d.select("x").is_packed
        (True, False)
        """
        return is_packed(self._tensors(), self._device)

    def pack(self) -> Self:
        """Copy the tensors into one storage. Returns ``self`` if the dict is packed already.

        These operations then handle one tensor and keep the dict packed: `to`, `cpu`, `clone`, `pin_memory`,
        `share_memory_`, ``pickle`` and ``torch.save``. A dict that is sent to another process needs one shared-memory
        segment and one file descriptor. A field that you keep then keeps the bytes of all fields alive.

        Packed fields are ordinary tensors in a common storage. Each has its own version counter, so autograd accepts
        an in-place write to one field after it saved another. Fields are dense and start at multiples of 64 bytes.
        Dense strides are kept, so channels_last stays channels_last. The storage stays allocated while any field is
        referenced.

        These tensors cannot be packed and stay as they are: tensors that require grad, subclasses, sparse, nested and
        quantized tensors, and views with the conjugate or negative bit set. Nothing is packed on ``meta``, ``mps`` and
        XLA devices. Nothing is packed under ``torch.compile``, a functorch transform, forward-mode autograd,
        ``torch.jit.trace`` or a ``TorchDispatchMode``.

        Raises: torch's own error if the device is out of memory. Cost: one allocation, a copy of every tensor, no
        synchronization.

        >>> d = DeviceDict({"x": [1.0, 2.0], "n": {"y": [3]}}).pack()
        >>> d["x"].untyped_storage().data_ptr() == d["n", "y"].untyped_storage().data_ptr()
        True
        """
        device = self._device
        if device is None or not can_pack(device):
            return self
        tensors, flat = self._tensors_and_kind()
        packed = pack(tensors, device)
        return self if all(map(is_, tensors, packed)) else self._replace_tensors(packed, device, flat)

    # --- dtype, autograd and memory, as on a tensor ---

    def half(self) -> Self:
        """``to(torch.float16)``. Raises the errors of `to`, and has its cost.

        >>> DeviceDict({"x": 1.0}).half()["x"].dtype
        torch.float16
        """
        return self.to(torch.float16)

    def float(self) -> Self:
        """``to(torch.float32)``. Raises the errors of `to`, and has its cost.

        >>> DeviceDict({"x": 1.0}).half().float()["x"].dtype
        torch.float32
        """
        return self.to(torch.float32)

    def double(self) -> Self:
        """``to(torch.float64)``. Raises the errors of `to`, and has its cost.

        >>> DeviceDict({"x": 1.0}).double()["x"].dtype
        torch.float64
        """
        return self.to(torch.float64)

    def bfloat16(self) -> Self:
        """``to(torch.bfloat16)``. Raises the errors of `to`, and has its cost.

        >>> DeviceDict({"x": 1.0}).bfloat16()["x"].dtype
        torch.bfloat16
        """
        return self.to(torch.bfloat16)

    def detach(self) -> Self:
        """Detach every tensor from the autograd graph. The results share the memory; nothing is copied.

        >>> DeviceDict({"x": torch.ones(2, requires_grad=True)}).detach()["x"].requires_grad
        False
        """
        return self._map_data(Tensor.detach, kept=True)

    def clone(self) -> Self:
        """Copy every tensor, as ``Tensor.clone`` does. Autograd records the copies.

        Cost: a copy of each tensor; a single copy for all packed tensors.

        >>> d = DeviceDict({"x": [1.0]})
        >>> d.clone()["x"].add_(1) is not None, d["x"]
        (True, tensor([1.]))
        """
        kept: list[Opened | None] = []
        tensors, flat = self._tensors_and_kind(kept)
        return self._replace_tensors(clone_tensors(tensors, self._device), self._device, flat, kept, stay)

    def new_zeros(self, *lead: int) -> Self:
        """Create a dict of zeros with the same keys, dtypes, device and encoders.

        For example, ``step.new_zeros(128)`` is a rollout buffer for 128 dicts like ``step``.

        Args:
            lead: the sizes of new dimensions, which precede the shape of every field.

        Raises: ``TypeError`` that names the field, for kept objects and for ragged and nested fields; torch's error for
            a size that is not an int of 0 or more.
        Cost: one allocation per field. The new dict is not packed.

        >>> step = DeviceDict({"obs": [1.0, 2.0], "done": False})
        >>> buffer = step.new_zeros(128)
        >>> buffer.rows[0] = step
        >>> buffer["obs"].shape, buffer["done"].dtype
        (torch.Size([128, 2]), torch.bool)
        """
        return self._new_like(Tensor.new_zeros, lead)

    def new_empty(self, *lead: int) -> Self:
        """Create a dict as `new_zeros` does, of tensors whose memory is not initialized.

        Arguments, errors and cost are those of `new_zeros`.

        >>> DeviceDict({"obs": [1.0, 2.0]}).new_empty(128, 8)["obs"].shape
        torch.Size([128, 8, 2])
        """
        return self._new_like(Tensor.new_empty, lead)

    def _new_like(self, create: Callable[..., Tensor], lead: Sequence[int]) -> Self:
        for path, value in leaves(self):
            if not isinstance(value, Tensor) or value.is_nested:
                got = "a nested tensor" if isinstance(value, Tensor) else described(value)
                raise TypeError(f"{dotted(path)}: expected a tensor of one shape, got {got}; drop or pad it first")
        return self._map_data(lambda tensor: create(tensor, (*lead, *tensor.shape)))

    def contiguous(self) -> Self:
        """Make every tensor contiguous. Cost: a copy of each tensor that is not contiguous.

        >>> DeviceDict({"x": torch.zeros(2, 3).t()}).contiguous()["x"].is_contiguous()
        True
        """
        return self._map_data(Tensor.contiguous, kept=True)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set ``requires_grad`` of the floating-point and complex tensors, in place. Returns ``self``.

        Raises: ``RuntimeError`` that names the field, before any tensor is changed: for False and a tensor that is not
            a leaf, or True and an inference tensor outside ``torch.inference_mode``. Cost: no copy.

        >>> d = DeviceDict({"x": [1.0], "id": [1]}).requires_grad_()
        >>> d["x"].requires_grad, d["id"].requires_grad
        (True, False)
        """
        _refuse_any(self, _unable_to_require if requires_grad else _unable_to_stop)
        for tensor in self._tensors_inside():
            if tensor.dtype in CASTABLE:
                tensor.requires_grad_(requires_grad)
        return self

    # --- batch ---

    @property
    def rows(self) -> Rows[Self]:
        """The batch view: index the first dimension of all fields at once. ``len(d)`` stays the number of keys.

        - ``len(d.rows)``: the number of rows.
        - ``d.rows[3]``, ``d.rows[8:16]``, iteration: views.
        - ``d.rows[mask_or_indices]``: a copy.
        - ``d.rows[index] = other``: write rows in place, all fields at once.
        - ``d.rows.split(n)``, ``d.rows.split(sizes)``: a list of views.
        - ``d.rows.shuffle(generator=None)``: a copy in random order.
        - ``d.rows.batches(size, shuffle=, drop_last=, generator=)``: an iterator of batches.
        - ``d.rows.flatten(dims=2)``: merge the first dimensions.
        - ``d.rows.group_by(*keys)``: a dict from each distinct value to its rows.
        - ``d.rows.sort_by(*keys, descending=False)``: a copy in the order of the values.
        - ``d.rows.tolist()``: a plain dict for each row.
        - ``DataLoader(d.rows, batch_size)``: ``d.rows`` is a dataset that copies all rows of a batch at once.

        Each result is a dict of the same class, with the same encoders. A kept list with one element per row is indexed
        like a tensor. Other kept objects stay as they are.

        Raises: ``ValueError`` that lists the shapes if the first dimensions differ; ``IndexError`` for a row that is
        out of range; ``TypeError`` for an invalid index.
        Cost: the cost of indexing every tensor. On an accelerator, a mask needs a synchronization.

        >>> d = DeviceDict({"x": [[1, 2], [3, 4], [5, 6]], "name": ["a", "b", "c"]})
        >>> len(d), len(d.rows), d.rows[1:].decode("name"), d.rows[0]["x"]
        (2, 3, ['b', 'c'], tensor([1, 2]))
        """
        return Rows(self)

    def equal(self, key: str | Path, value: Any) -> Tensor:
        """Return a bool mask: where a field is ``value``, or any item of a list of values.

        The mask has the shape of the field; for strings, the shape of the strings. It selects rows:
        ``d.rows[d.equal("species", "cat")]``.

        Args:
            key: the key or path of a tensor field.
            value: a number, a string, or a flat list, array or tensor of them. Strings are encoded with the encoder of
                the key. Python numbers are compared in the dtype of the field.

        Raises: ``KeyError`` for a missing key; ``TypeError`` or ``ValueError`` that names the field, if the field or
            the value cannot be compared, such as a string that is not in a `Vocabulary`; `DeviceMismatchError` for a
            tensor on another device.
        Cost: a comparison of the field for each value. No synchronization.

        >>> d = DeviceDict({"species": ["cat", "dog", "ox"], "age": [1, 2, 1]})
        >>> d.equal("age", 1), d.equal("species", ["ox", "dog"])
        (tensor([ True, False,  True]), tensor([False,  True,  True]))
        >>> d.rows[d.equal("species", "cat")]["age"]
        tensor([1])
        """
        return by_value.equal_to(self, key, value)

    # --- looking ---

    def describe(self, progress: Progress = None) -> Description:
        """Statistics of each field: min, mean, max, the shares of NaN, infinities and zeros, and a histogram.

        Of strings: how many are distinct, the shortest, the longest and the most frequent one. Of ragged fields also
        the lengths. Use it to look at a batch or a table, also one that is larger than the memory. See `Description`.

        Args:
            progress: a function that is called with the bytes done and the total, or True for a bar of tqdm.

        Cost: reads every value once, in chunks of at most 64 MiB. On an accelerator the kernels run there, strings are
        copied to the host, and one synchronization is needed; one to three more for each chunk with NaN or infinities.

        >>> DeviceDict({"x": [0.0, 1.0, 2.0, float("nan")], "name": ["Ada", "Bo", "Bo", "Cy"]}).describe()
        DeviceDict(cpu, 4 rows, 2 fields, 28 B)
        field  dtype[shape]  min  mean  max  nan   zero  values
        x      float32[4]    0    1     2    25 %  25 %  █   █  █
        name   uint8[4, 3]                               3 distinct, Bo to Ada, Bo 50 %
        """
        return statistics([self], title_of(self), progress)

    def find(self, function: Callable[[Tensor], Tensor]) -> dict[str | Path, Tensor]:
        """Return the rows where a function holds anywhere: for each key or path, int64 row numbers on the CPU.

        Fields where it holds nowhere are left out, so ``assert not batch.find(torch.isnan)`` tests a batch. A field
        without dimensions is row 0. Strings, kept objects, and fields for which the function raises are skipped.

        Args:
            function: takes the tensor of a field, of a ragged field the values, and returns a bool tensor of the same
                rows, such as ``torch.isnan`` or ``lambda t: t.abs() > 1e4``.

        Raises: ``TypeError`` if every field is skipped, and for a function that returns anything else.
        Cost: the function for each field. One copy to the host, with a synchronization.

        >>> d = DeviceDict({"x": [[1.0, 2.0], [float("nan"), 0.0]], "n": {"y": [1.0, 2.0]}, "name": ["Ada", "Bo"]})
        >>> d.find(torch.isnan)
        {'x': tensor([1])}
        >>> d.find(lambda t: t > 1)
        {'x': tensor([0]), ('n', 'y'): tensor([1])}
        """
        return find(self, function)

    # --- strings ---

    @property
    def encoders(self) -> Mapping[str, StringEncoder]:
        """A read-only mapping from key to encoder: the given encoders, and the encoder of every field of strings.

        Each nested dict has its own encoders. ``DeviceDict(d, encoders=...)`` is a copy of ``d`` with other encoders
        for its own keys. The codes do not change, so the new encoders must be able to decode them.
        Cost: a copy of this small mapping.

        >>> DeviceDict({"name": "Ada"}).encoders
        mappingproxy({'name': Utf8()})
        """
        return MappingProxyType({key: as_given(encoder) for key, encoder in self._policy.encoders.items()})

    def decode(self, key: str | Path) -> Any:
        """Decode a field of encoded strings: a ``str``, or nested lists with the shape of the leading dimensions.

        Raises: ``KeyError`` if the key is missing; ``TypeError`` or ``ValueError`` that names the field if its encoder
        cannot decode it. Cost: a copy of the field to the CPU, with a synchronization.

        >>> DeviceDict({"name": [["a", "bc"], ["", "d"]]}).decode("name")
        [['a', 'bc'], ['', 'd']]
        """
        path = as_path(key)
        codes: Any = self[key]
        node, last = self._walk(path)
        encoder: Any = node._policy.encoder(last)
        own, data = last in node._policy.encoders, data_in(codes)
        if not own and data is not None and data.is_floating_point() and not data.numel():
            encoder = None  # of empty lists: they are float32, and have no strings
        kind = kind_of(codes, encoder)
        if kind is KEPT:
            raise TypeError(f"{dotted(path)}: expected encoded strings, got {described(codes)}")
        hint = "" if own else f"; {last!r} has no encoder of its own, give one as encoders="
        try:
            return kind.tolist(Field(path, node, codes, encoder, kind), None)
        except (TypeError, ValueError) as error:
            raise with_path(error, path, hint) from error

    # --- arithmetic ---

    def zero_(self) -> Self:
        """Fill every tensor with zeros, in place. Returns ``self``. Kept objects stay as they are.

        Raises the errors of `add_`, and has its cost.

        >>> DeviceDict({"x": [1.0, 2.0]}).zero_()["x"]
        tensor([0., 0.])
        """
        return arithmetic.zero_(self)

    def add_(self, other: Mapping[str, Any] | Tensor | Number, *, alpha: Number = 1) -> Self:
        """Add ``alpha * other`` to every tensor, in place. Returns ``self``. Kept objects stay as they are.

        Every field follows the rules of ``Tensor.add_``: broadcasting, dtypes, autograd. A tensor under two keys is
        changed twice.

        Args:
            other: a number or a tensor for all fields; or a mapping of tensors on the device of this dict. A mapping
                has the keys of this dict, in any order, at every level.
            alpha: the factor of ``other``.

        Raises: all errors before the first tensor is changed, with the path. ``ValueError`` for a missing or extra key
            of ``other``; ``TypeError`` for fields of encoded strings, and values that are no tensors;
            ``DeviceMismatchError``; ``RuntimeError`` for what torch refuses: shapes, dtypes, leaves that require grad.
        Cost: a check per field, and one ``torch._foreach_add_`` for each pair of dtypes. Tensors with a gradient
            history, subclasses and sparse tensors take one call each, and a copy of their old values. The operation
            first runs on a copy of subclasses and sparse tensors. Under ``torch.compile`` and functorch transforms all
            fields take one call each, and errors come from torch.

        Ctrl-C leaves all fields changed, or none.

        >>> d = DeviceDict({"x": [1.0, 2.0], "n": {"y": [3.0]}})
        >>> d.add_({"n": {"y": torch.ones(1)}, "x": torch.ones(2)}, alpha=2).add_(1).to_dict()
        {'x': tensor([4., 5.]), 'n': {'y': tensor([6.])}}
        >>> d.add_({"x": torch.ones(2)})
        Traceback (most recent call last):
        ...
        ValueError: the other mapping lacks 'n', which this DeviceDict has
        """
        return arithmetic.combine(self, "add_", other, alpha=alpha)

    def sub_(self, other: Mapping[str, Any] | Tensor | Number, *, alpha: Number = 1) -> Self:
        """Subtract ``alpha * other`` from every tensor, in place. Returns ``self``.

        Arguments, errors and cost are those of `add_`.

        >>> DeviceDict({"x": [1.0, 2.0]}).sub_(1)["x"]
        tensor([0., 1.])
        """
        return arithmetic.combine(self, "sub_", other, alpha=alpha)

    def mul_(self, other: Mapping[str, Any] | Tensor | Number) -> Self:
        """Multiply every tensor by ``other``, in place. Returns ``self``.

        ``other``, the errors and the cost are those of `add_`.

        >>> DeviceDict({"x": [1.0, 2.0]}).mul_(0.5)["x"]
        tensor([0.5000, 1.0000])
        """
        return arithmetic.combine(self, "mul_", other)

    def div_(self, other: Mapping[str, Any] | Tensor | Number) -> Self:
        """Divide every tensor by ``other``, in place. Returns ``self``.

        ``other``, the errors and the cost are those of `add_`.

        >>> DeviceDict({"x": [1.0, 2.0]}).div_({"x": torch.tensor([2.0, 4.0])})["x"]
        tensor([0.5000, 0.5000])
        """
        return arithmetic.combine(self, "div_", other)

    def lerp_(self, other: Mapping[str, Any] | Tensor, weight: Number) -> Self:
        """Move every tensor towards ``other``, in place: ``tensor + weight * (other - tensor)``. Returns ``self``.

        Integer and bool fields are copied from ``other``, as the moving average of a model needs for its counters.

        Args:
            other: a mapping of tensors as in `add_`, or a tensor for all fields. A floating-point field takes a tensor
                of its own dtype only.
            weight: a number. 0 keeps the floating-point fields, 1 copies ``other``.

        Raises: the errors of `add_`; ``TypeError`` if ``weight`` is not a number.
        Cost: as `add_` with a mapping.

        >>> model = torch.nn.Linear(2, 1)
        >>> average = DeviceDict(model.state_dict()).clone()
        >>> average.lerp_(model.state_dict(), 0.01) is average
        True
        """
        if isinstance(other, (int, float)) and isinstance(weight, (Mapping, Tensor)):
            raise TypeError(f"lerp_ takes the other mapping first and the weight second: lerp_(other, {other!r})")
        return arithmetic.combine(self, "lerp_", other, weight=weight)

    def copy_(self, other: Mapping[str, Any] | Tensor) -> Self:
        """Copy ``other`` into every tensor, in place, with the dtype of the field. Returns ``self``.

        `copy` makes a new dict; `copy_` writes into the memory of this dict.

        Args:
            other: a mapping of tensors as in `add_`, or a tensor for all fields.

        Raises: the errors of `add_`. Cost: as `add_` with a mapping.

        >>> d = DeviceDict({"x": [1.0, 2.0]})
        >>> d.copy_({"x": torch.tensor([3, 4])})["x"]
        tensor([3., 4.])
        """
        return arithmetic.combine(self, "copy_", other)

    def fill_(self, other: Mapping[str, Any], non_blocking: bool = False) -> Self:
        """Copy the contents of ``other`` into the memory of this dict. Returns ``self``.

        For static inputs: a CUDA graph, and a compiled function that owns its inputs, read the same memory again in
        each step. Every tensor of this dict stays the same tensor. Nothing is cast or broadcast. Strings are copied as
        their codes, and shorter ones are padded to the width of their field. Kept objects are replaced.

        Args:
            other: a dict on any device, with the keys, dtypes, shapes and encoders of this dict. A plain mapping is
                converted first, with the options of this dict.
            non_blocking: as in `to`. True: do not change a pinned source before the copy is complete.

        Raises: ``ValueError`` that names the field for other keys, dtypes, shapes or encoders; ``TypeError`` for a
            value of another kind, such as a number for a ragged field; ``RuntimeError`` for a field that cannot be
            written, such as an expanded tensor; the errors of `to`. Nothing is written then.
        Cost: the copies and waits of `to`, then one ``torch._foreach_copy_`` for each dtype, on the device.

        >>> static = DeviceDict({"x": torch.zeros(2), "name": ["Grace", "Bo"]})
        >>> x = static["x"]
        >>> static.fill_({"x": torch.ones(2), "name": ["Ada", "Cy"]}).decode("name"), x
        (['Ada', 'Cy'], tensor([1., 1.]))
        """
        return fill_(self, other, non_blocking)

    def total_norm(self, ord: Real = 2) -> Tensor:
        """The norm over the elements of all fields, as ``torch.nn.utils.get_total_norm`` computes it.

        Args:
            ord: the order of the norm, above 0; ``inf`` gives the largest absolute value. Fields without elements
                change nothing.

        Returns: a 0-d tensor on the device. Zero if there are no elements. Autograd records the operations.

        Raises: ``TypeError`` that names the field, for integers and encoded strings; ``ValueError`` for another
            ``ord``.
        Cost: one ``torch._foreach_norm`` for each dtype, and two operations on the norms; no synchronization.

        >>> DeviceDict({"x": [3.0], "n": {"y": [0.0, 4.0]}}).total_norm()
        tensor(5.)
        """
        return arithmetic.total_norm(self, ord)

    def tolist(self) -> dict[str, Any]:
        """A plain nested dict of Python numbers and lists, as ``Tensor.tolist`` gives them, with strings decoded.

        Kept objects stay as they are. ``json.dumps(metrics.tolist())`` works for dicts of numbers and strings.

        Raises: the errors of `decode`; ``TypeError`` or ``ValueError`` that names the field for a layout that torch
            cannot list. Cost: the copies of `cpu`, then one Python object per element.

        >>> DeviceDict({"loss": 0.5, "n": {"ids": [1, 2]}, "name": ["Ada", "Bo"]}).tolist()
        {'loss': 0.5, 'n': {'ids': [1, 2]}, 'name': ['Ada', 'Bo']}
        """
        return tolist(self if self._device is None or self._device == CPU else self.cpu())

    # --- functions of torch ---

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return torch_functions.call(function, args, kwargs or {})

    # --- files and other containers ---

    def save(self, path: FilePath) -> None:
        """Save tensors, nesting, encoders and options to a safetensors file for `load`. Needs ``safetensors``.

        The save is atomic: the new file replaces an older file when all bytes are on the disk. If the save fails, the
        older file stays and no temporary file remains. A killed process can leave one hidden temporary file.

        Other programs find each tensor under its dotted path. Tensors that share memory are written separately.
        Tensors on a device are copied to the host in parts, to limit the host memory.

        Raises: ``TypeError`` that names the field or encoder: kept objects, sparse, nested, quantized and meta tensors,
        and encoders without a registered JSON form; ``ImportError`` without safetensors; ``OSError``.
        Cost: writes every byte and waits for the disk.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     DeviceDict({"x": [1, 2], "name": ["Ada", "Bo"]}).save(f"{folder}/d.safetensors")
        ...     DeviceDict.load(f"{folder}/d.safetensors").decode("name")
        ['Ada', 'Bo']
        """
        safetensors.write(self, path)

    @classmethod
    def load(
        cls,
        path: FilePath,
        device: DeviceLike | None = None,
        *,
        keys: Sequence[str | Path] | None = None,
        encoders: Encoders | None = None,
        rows: int | None = None,
    ) -> Self:
        """Load a safetensors file of `save` or of any other program, or a table of `RowWriter`. Needs ``safetensors``.

        A file of another program gives one level of keys. `load` imports and calls nothing that a file names, except
        registered encoders. These encoders must consist of plain data, so `Tokenizer` is excluded. The dict takes the
        options of the file, unless this class declares options. A typed class validates the fields.

        Args:
            path: the path of a regular file or of a table, which is a folder; not a file descriptor. A loaded table has
                the rows of the last ``flush``. It does not see rows that are added later.
            device: the target device; tensors are read directly onto it. None and ``"cpu"``: the file is memory-mapped,
                and a field is read from the disk on first use. Writing to a field changes the memory, not the file. A
                field that another program did not align to its element size is copied.
            keys: load these keys and paths only.
            encoders: encoders that replace those of the file, by key or for every key. The file has each key.
            rows: load the first rows of a table only. Since rows never change, it is the table as it was with so many
                rows.

        Raises: `InvalidFileError`, a ``ValueError``, for a damaged, forged or unknown file; ``KeyError`` if the file
        lacks one of ``keys`` or ``encoders``; ``ValueError`` if a table has fewer ``rows``, and for ``rows`` of a file;
        ``ImportError`` without safetensors; ``OSError``, also for pipes, sockets, devices and other folders;
        ``TypeError`` for a file descriptor; the errors of a typed class.
        Cost: a few microseconds per field, and the time to read the fields.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     DeviceDict({"x": 1, "n": {"y": 2, "z": 3}}).save(f"{folder}/d.safetensors")
        ...     DeviceDict.load(f"{folder}/d.safetensors", keys=[("n", "z")]).to_dict()
        {'n': {'z': tensor(3)}}
        """
        if isinstance(path, (list, tuple)):
            raise TypeError("load takes one path; cat([load(path) for path in paths]) joins the dicts of several files")
        where = CPU if device is None else resolve(device)
        wanted = safetensors.Wanted(keys, encoders, rows)
        if os.path.isdir(path):
            from ..tables.reader import read_table  # noqa: PLC0415  (only here does the core need tables)

            out = read_table(cls, path, wanted).to(where)
        else:
            out = safetensors.read_file(cls, path, wanted).to(where)
        out._validate()
        return out

    @classmethod
    def from_tensordict(cls, td: Mapping[str, Any], **options: Any) -> Self:
        """Create a dict from a ``tensordict.TensorDict``. Nested TensorDicts become nested dicts.

        The batch size is dropped. Non-tensor data is inserted like any value: strings are encoded, numbers become
        tensors, other objects need ``objects="keep"``. ``options`` are the options of the constructor.

        Raises: ``TypeError`` if ``td`` is not a mapping; the errors of the constructor. Cost: as the constructor.

        >>> try:
        ...     from tensordict import TensorDict
        ... except ImportError:
        ...     TensorDict = lambda fields, batch_size: fields
        >>> DeviceDict.from_tensordict(TensorDict({"x": torch.ones(2)}, batch_size=[2]))["x"]
        tensor([1., 1.])
        """
        return cls(_nested_items(td), **options)

    @classmethod
    def from_arrow(cls, table: Any, *, nulls: Any = "error", **options: Any) -> Self:
        """Create a dict from a ``pyarrow.Table`` or ``RecordBatch``, with options for nulls. Needs ``pyarrow``.

        A list column of numbers becomes a `Ragged`, which ``pyarrow.array`` turns back into a list column. A list
        column of fixed size becomes a dense tensor. Every other column is converted as by the constructor, which also
        takes tables without nulls.

        Args:
            table: the table.
            nulls: ``"error"``: a null raises. ``"mask"``: a null becomes 0, False, an empty string or an empty list,
                and the bool field ``<column>_valid`` is False there. Any other value replaces nulls. A mapping from
                columns to these sets the option for each column that it names; ``"mask"`` then adds the mask even if
                the column has no nulls.
            options: the options of the constructor.

        Raises: ``ValueError`` that names the column for a null, and for a mask whose name is a column; ``TypeError``
            for another object, and for a fill value that the column cannot hold; the errors of the constructor.
        Cost: as the constructor; a copy of list columns, and of columns with nulls.

        >>> try:
        ...     import pyarrow
        ... except ImportError:
        ...     d = DeviceDict({"age": [30, 0], "age_valid": [True, False]})
        ... else:
        ...     d = DeviceDict.from_arrow(pyarrow.table({"age": [30, None]}), nulls="mask")
        >>> d["age"], d["age_valid"]
        (tensor([30,  0]), tensor([ True, False]))
        """
        return cls(arrow_items(table, nulls, options.get("dtype") or cls._class_policy.dtype, Ragged), **options)

    @classmethod
    def from_pandas(cls, frame: Any, *, nulls: Any = "error", **options: Any) -> Self:
        """Create a dict from a ``pandas.DataFrame``, with options for missing values. Needs ``pandas``.

        The arguments, errors and cost are those of `from_arrow`. Missing values are those of ``DataFrame.isna``. With
        ``nulls="error"``, NaN in a NumPy column of floats is a number; with any other option, it is a missing value.

        >>> try:
        ...     import pandas
        ... except ImportError:
        ...     d = DeviceDict({"name": ["Ada", "?"]})
        ... else:
        ...     d = DeviceDict.from_pandas(pandas.DataFrame({"name": ["Ada", None]}), nulls="?")
        >>> d.decode("name")
        ['Ada', '?']
        """
        return cls(pandas_items(frame, nulls), **options)

    def to_tensordict(self, batch_size: Sequence[int] | None = None) -> Any:
        """Return a ``tensordict.TensorDict`` of the same tensors on the same device. Needs ``tensordict``.

        Strings stay encoded, and their encoders are dropped.

        Args:
            batch_size: the batch size of the TensorDict. None: the size of the first dimension if all fields share it,
                otherwise ``[]``.

        Raises: ``ImportError`` without tensordict; the error of TensorDict if a field does not fit ``batch_size``.
        Cost: no tensor is copied.

        >>> d = DeviceDict({"x": [1, 2]})
        >>> try:
        ...     print(d.to_tensordict().batch_size)
        ... except ImportError:
        ...     print(torch.Size([2]))
        torch.Size([2])
        """
        tensordict = optional_module("tensordict", "to_tensordict needs TensorDict: pip install tensordict")
        refuse_ragged(self, "a TensorDict takes tensors", "store its nested() or padded() there first")
        if batch_size is None:
            counts = {tensor.shape[:1] for tensor in self._tensors()}
            batch_size = counts.pop() if len(counts) == 1 else ()
        return tensordict.TensorDict(self.to_dict(), batch_size=batch_size, device=self._device)

    def __copy__(self) -> Self:
        return self.copy()

    _reduction = encoding.reduction
    _sent = staticmethod(sendable.sent)

    # --- display ---

    def __repr__(self) -> str:
        return as_text(tree_page(self))

    def _repr_html_(self) -> str:
        return as_html(tree_page(self))

    # --- paths ---

    def _walk(self, key: Any) -> tuple[DeviceDict[Any], Any]:
        """Return the nested dict that holds the last key of a path, and that key.

        Raises ``MissingKeyError`` if the path does not exist.
        """
        node = self._holder(key) if type(key) is tuple else None
        if node is None:
            raise missing_key(self, key)
        return node, key[-1]

    def _holder(self, path: Path) -> DeviceDict[Any] | None:
        """Return the nested dict that holds the last key of ``path``; None if the path does not exist."""
        node: DeviceDict[Any] = self
        for part in path[:-1]:
            inner = builtin_dict.get(node, part)
            if not isinstance(inner, DeviceDict):
                return None
            node = inner
        return node if path and builtin_dict.__contains__(node, path[-1]) else None

    def _set(self, key: str | Path, value: Any) -> None:
        if type(key) is tuple:
            self._set_path(key, value)
        elif isinstance(key, str):
            insert(self, {key: value})
        else:
            refuse_key(key, (), rows_hint(key))

    def _set_path(self, path: Path, value: Any, at: Path = ()) -> None:
        """Insert at a path. Missing dicts are inserted with the value, as one nested mapping."""
        if not path:
            raise missing_key(self, path)
        if len(path) > 1:
            inner: Any = builtin_dict.get(self, path[0], _MISSING)
            if isinstance(inner, DeviceDict):
                inner._set_path(path[1:], value, (*at, path[0]))
                return
            if inner is not _MISSING:
                raise TypeError(
                    f"{dotted((*at, path[0]))}: expected a nested dict to put {dotted((*at, *path))} into, got "
                    f"{described(inner)}; delete or rename it first"
                )
            for part in reversed(path[1:]):
                value = {part: value}
        insert(self, {path[0]: value}, at=at)  # pyright: ignore[reportGeneralTypeIssues]  (it is not empty)


for _name, _refuse in torch_functions.refused_operators():  # not in the class, so that type checkers refuse them too
    setattr(DeviceDict, _name, _refuse)


def _nested_items(td: Any) -> dict[str, Any]:
    """A plain nested dict of the items of a TensorDict. ``td[key]`` unwraps non-tensor data."""
    if not hasattr(td, "keys"):
        raise TypeError(f"expected a TensorDict or another mapping, got {type(td).__name__}")
    out: dict[str, Any] = {}
    for key in td.keys():  # noqa: SIM118  (iterating a TensorDict gives its rows)
        value = td[key]
        out[key] = _nested_items(value) if hasattr(value, "keys") else value
    return out


def _refuse_any(d: TreeDict[Any], reason: Callable[[Tensor], str]) -> None:
    """Raise ``RuntimeError`` for the first tensor with a ``reason``, before any tensor is changed."""
    for path, value in leaves(d):
        for tensor in kept_tensors(value):
            if said := reason(tensor):
                raise RuntimeError(f"{dotted(path)} {said}")


def _pinned(value: Any) -> Any:
    """An object in pinned memory, if it has a method for that, as DataLoader calls it."""
    return value.pin_memory() if hasattr(value, "pin_memory") else value


def _unable_to_require(tensor: Tensor) -> str:
    if not (tensor.dtype in CASTABLE and tensor.is_inference()) or torch.is_inference_mode_enabled():
        return ""
    return "is an inference tensor, which cannot require grad outside torch.inference_mode(); clone() it first"


def _unable_to_stop(tensor: Tensor) -> str:
    if tensor.is_leaf:
        return ""
    return "is not a leaf: it was computed from tensors that require grad; detach() it first"


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
        if type(value) is not Tensor and isinstance(value, TreeDict):
            out[key] = _numpy(value, copy, (*at, key))
            continue
        try:
            out[key] = host_array(value, copy) if isinstance(value, Tensor) else numpy_inside(value, copy)
        except TypeError as error:
            raise with_path(error, (*at, key)) from error
    return out


def flatten_into(items: dict[str, Any], encoders: dict[str, Any], d: TreeDict[Any], sep: str, at: Path = ()) -> None:
    """Add every field of ``d`` to ``items`` and its encoder to ``encoders``, under the joined keys."""
    for key, value in d.items():
        path = (*at, key)
        name = sep.join(path)
        if tuple(name.split(sep)) != path:
            where = f" in {dotted(at)}" if at else ""
            raise ValueError(
                f"unflatten could not restore the key {key!r}{where} from keys joined by {sep!r}; flatten with another "
                "sep, such as '/'"
            )
        if isinstance(value, TreeDict) and value:
            flatten_into(items, encoders, value, sep, path)
            continue
        items[name] = value.copy() if isinstance(value, TreeDict) else value
        if key in d._policy.encoders:
            encoders[name] = d._policy.encoders[key]


def _split_keys(mapping: Mapping[str, Any], sep: str, at: Path = ()) -> dict[str, Any]:
    """Split joined keys into nested dicts: see `DeviceDict.unflatten`."""
    refuse_deeper(at)
    out: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for key, value in mapping.items():
        if not isinstance(key, str):
            refuse_key(key, ())
        head, nested, rest = key.partition(sep)
        if (head in groups) != bool(nested) and head in out:
            raise ValueError(f"{head!r} cannot be both a field and a nested dict; the conflicting key is {key!r}")
        if nested:
            out[head] = groups.setdefault(head, {})
            groups[head][rest] = value
        else:
            out[head] = value
    for head, group in groups.items():
        out[head] = _split_keys(group, sep, (*at, head))
    return out
