"""`DeviceDict`, the public class: what a dict of tensors does as a dict, on top of storing, checking and moving."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from typing_extensions import Self

from . import _disk, _saved, _sendable
from ._compare import agree, values_agree
from ._devices import CPU, DeviceLike, resolve
from ._display import field_count, html, size, tree
from ._errors import Path, dotted, located
from ._items import nbytes
from ._missing import NoAttribute
from ._packing import packed_layout
from ._policy import Encoders
from ._replace import FilePath
from ._rows import Rows
from ._shaping import ShapedDict, flatten_into
from ._strings import StringEncoder, decode_nested
from ._tree import TreeDict, V, raw


class DeviceDict(ShapedDict[V]):
    """A dict whose tensors all live on one device.

    A real ``dict``: it is accepted wherever one is asked for, reads at C speed, keeps its order, and ``len`` is the
    number of keys. Every insert is checked against the device, so that a tensor on the wrong one is refused where it
    is inserted.

    **Dict**: ``d[key]``, ``d[path]``, ``get``, ``pop``, ``setdefault``, ``update``, ``|``, ``|=``, ``==``, ``copy``,
    ``fromkeys``, `select`, `drop`, `map`, `flatten`, `unflatten`, `to_dict`, `allclose`, ``nbytes``.
    **Device**: ``device``, ``is_cuda``, `to`, `cpu`, `cuda`, `numpy`, `pin_memory`, `is_pinned`, `share_memory_`,
    `record_stream`, `pack`, ``is_packed``.
    **Tensor**: `half`, `float`, `double`, `bfloat16`, `detach`, `clone`, `requires_grad_`, `contiguous`.
    **Strings**: `decode`, ``encoders``. **Batch**: `rows`. **Files**: `save`, `load`.

    Values: a tensor on the device is stored itself. A number becomes a 0-d tensor, a NumPy array, or a nested list of
    numbers, a tensor as ``torch.as_tensor`` makes it (an array on the CPU is shared, unless it is read-only), strings
    are encoded, and a mapping becomes a nested dict, taken in by value. Anything else is a ``TypeError``.
    Keys are ``str``; a tuple is a path: ``d["obs", "image"]``. Setting a path makes the dicts that are missing on it.
    Dicts nest up to 64 levels, the outermost included, and so do lists and kept objects.

    Args:
        data: a mapping or an iterable of pairs.
        device: where everything is to be, and is moved. None: the device of the first tensor; tensors that disagree
            raise. A dict without tensors has the device None until the first one is stored, and then keeps that device,
            emptied or not. Values from the host alone, and nested dicts without tensors, put it on torch's default
            device; give ``device=`` where that is not meant.
        encoders: a mapping from key to string encoder, good for that key at any depth, or one encoder for every key.
            A bare callable encodes only. A key without one uses `Utf8`. The encoder stays with the key through every
            method, copies and pickle.
        on_mismatch: ``"error"``, or ``"move"`` to move a tensor on another device in instead of refusing it.
        objects: ``"error"``, or ``"keep"`` to keep any other object, on the host, never moved. One that holds a tensor
            is refused: standard containers, dataclasses and modules are searched, attributes of other objects are not.
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
    __module__ = "tensordict_lite"  # before pytree registers the name, which exported programs keep

    if not TYPE_CHECKING:
        shape = NoAttribute("d[key].shape, or len(d.rows) for the number of rows")
        batch_size = NoAttribute("len(d.rows), the number of rows")
        dtype = NoAttribute("d[key].dtype; a DeviceDict has no dtype of its own")

    # --- like a dict ---

    def flatten(self, sep: str = ".") -> DeviceDict[V]:
        """One level: nested keys joined with ``sep``, encoders with their fields; an empty nested dict stays one.

        Raises: ``ValueError`` if two fields would get one name. No tensor is copied.

        >>> list(DeviceDict({"obs": {"a": 1, "b": {"c": 2}}}).flatten())
        ['obs.a', 'obs.b.c']
        """
        items: dict[str, Any] = {}
        encoders: dict[str, Any] = {}
        flatten_into(items, encoders, self, sep)
        return cast("DeviceDict[V]", DeviceDict._new(items, self._device, self._policy.with_encoders(encoders)))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: elements times element size, memory that two share counted twice. Reads no value.

        >>> DeviceDict({"x": [1.0, 2.0], "n": {"y": 3}}).nbytes
        16
        """
        return sum(map(nbytes, self._tensors()))

    def allclose(
        self, other: Mapping[str, Any], rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
    ) -> bool:
        """Whether ``other`` has the same keys, dtypes and shapes, and values that ``torch.allclose`` finds close.

        ``==`` is the same with equal values. Dicts on two devices are compared on the CPU.
        Tensors on ``meta`` have no values and are close to none.
        Raises: ``TypeError`` for what is no mapping. Cost: a synchronisation a field on an accelerator.

        >>> DeviceDict({"x": 1.0}).allclose({"x": torch.tensor(1.0 + 1e-7)})
        True
        """
        if not isinstance(cast(object, other), Mapping):
            raise TypeError(f"allclose compares with a mapping, got {type(other).__name__}")

        def close(x: Tensor, y: Tensor) -> bool:
            if x.is_floating_point() and x.dtype.itemsize == 1:  # torch has no arithmetic for float8
                x, y = x.float(), y.float()
            return torch.allclose(x, y, rtol, atol, equal_nan)

        return agree(self, other, lambda x, y: values_agree(x, y, close))

    # --- like a batch ---

    @property
    def rows(self) -> Rows[Self]:
        """The batch view: the first dimension of the fields as rows. ``len(d)`` stays the number of keys.

        ``d.rows[3]``, ``d.rows[8:16]`` (views), ``d.rows[mask_or_indices]`` (copies), ``d.rows[index] = other`` (in
        place, all fields at once), ``len(d.rows)``, iteration (views), ``d.rows.split(n)`` or of sizes (views),
        ``d.rows.shuffle(generator=None)`` (a copy). Every result is a dict of the same class, with the encoders. Of a
        kept object that is a list of one for each row, rows have theirs; other objects are kept as they are.

        Raises: ``ValueError`` that lists the shapes, for fields that disagree on the first dimension; ``IndexError``,
        ``TypeError`` for rows that are not there, or an index that is none. Cost: that of indexing every tensor; a mask
        on an accelerator synchronises.

        >>> d = DeviceDict({"x": [[1, 2], [3, 4], [5, 6]], "name": ["a", "b", "c"]})
        >>> len(d), len(d.rows), d.rows[1:].decode("name"), d.rows[0]["x"]
        (2, 3, ['b', 'c'], tensor([1, 2]))
        """
        return Rows(self)

    # --- strings ---

    @property
    def encoders(self) -> Mapping[str, StringEncoder]:
        """The encoders by key, read only: those that were given, and the ones that strings were encoded with.

        Nested dicts have their own. ``DeviceDict(d, encoders=...)`` is ``d`` with others for its own keys; codes that
        are there stay as they are, so give it encoders that can read them. Cost: a copy of this small mapping.

        >>> DeviceDict({"name": "Ada"}).encoders
        mappingproxy({'name': Utf8()})
        """
        return MappingProxyType(dict(self._policy.encoders))

    def decode(self, key: str | Path) -> Any:
        """The strings of a field that was encoded: a ``str``, or lists nested as the field's leading dimensions are.

        Raises: ``KeyError`` for a key that is not there, ``TypeError`` or ``ValueError`` that name it for a field that
        its encoder cannot decode. Cost: the field is copied to the CPU, with a synchronisation.

        >>> DeviceDict({"name": [["a", "bc"], ["", "d"]]}).decode("name")
        [['a', 'bc'], ['', 'd']]
        """
        if not isinstance(cast(object, key), (str, tuple)):
            raise TypeError(f"decode takes one key or path, got {type(key).__name__}")
        node, last = self._walk(key) if isinstance(key, tuple) else (self, key)
        codes: Any = raw.__getitem__(node, last)
        path = key if isinstance(key, tuple) else (key,)
        encoder = node._policy.encoder(last)
        if not isinstance(codes, (Tensor, TreeDict)):
            raise TypeError(f"{dotted(path)} is a kept {type(codes).__name__}, not encoded strings")
        try:
            return decode_nested(encoder, cast(Any, codes))
        except (TypeError, ValueError) as error:
            hint = (
                "" if last in node._policy.encoders else f"; {last!r} has no encoder of its own, give one as encoders="
            )
            raise located(error, path, hint) from error

    # --- other containers ---

    @classmethod
    def from_tensordict(cls, td: Mapping[str, Any], **options: Any) -> Self:
        """The fields of a ``tensordict.TensorDict``, nested ones as nested dicts; its batch size is not kept.

        Non-tensor data is stored as any value is: strings are encoded, numbers become tensors, objects are kept if the
        class does. ``options`` are those of the constructor.

        Raises, and costs, what the constructor does; ``TypeError`` for what is no mapping.

        >>> try:
        ...     from tensordict import TensorDict
        ... except ImportError:
        ...     TensorDict = lambda fields, batch_size: fields
        >>> DeviceDict.from_tensordict(TensorDict({"x": torch.ones(2)}, batch_size=[2]))["x"]
        tensor([1., 1.])
        """
        return cls(_plain(td), **options)

    def to_tensordict(self, batch_size: Sequence[int] | None = None) -> Any:
        """A ``tensordict.TensorDict`` of the same tensors, on the same device. Needs ``tensordict``.

        Args:
            batch_size: None: the first dimension if all fields share it, and else none.

        Raises: ``ImportError``; what TensorDict does for fields that do not have the ``batch_size``.
        Cost: no copy of a tensor. Strings stay codes: their encoders do not come along.

        >>> d = DeviceDict({"x": [1, 2]})
        >>> try:
        ...     print(d.to_tensordict().batch_size)
        ... except ImportError:
        ...     print(torch.Size([2]))
        torch.Size([2])
        """
        try:
            tensordict: Any = importlib.import_module("tensordict")  # optional, and slow to import
        except ImportError as error:
            raise ImportError("to_tensordict needs TensorDict: pip install tensordict") from error
        if batch_size is None:
            counts = {tensor.shape[:1] for tensor in self._tensors()}
            batch_size = counts.pop() if len(counts) == 1 else ()
        return tensordict.TensorDict(self.to_dict(), batch_size=batch_size, device=self._device)

    # --- files ---

    def save(self, path: FilePath) -> None:
        """Write a safetensors file that `load` reads: tensors, nesting, encoders, and options. Needs ``safetensors``.

        The file takes the place of an older one once it is whole and on the disk; if anything fails, the old one stays
        and nothing else is left. What a kill can leave, the first save of another process to that folder removes. Other
        programs find the tensors under their dotted paths. Tensors that share memory are written each by itself; ones
        on a device are copied to the host some at a time.

        Raises: ``TypeError`` that names kept objects, sparse, nested, quantized and meta tensors, and encoders that
        have no registered JSON form; ``ImportError``; ``OSError``.
        Cost: writing every byte, and waiting for the disk.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     DeviceDict({"x": [1, 2], "name": ["Ada", "Bo"]}).save(f"{folder}/d.safetensors")
        ...     DeviceDict.load(f"{folder}/d.safetensors").decode("name")
        ['Ada', 'Bo']
        """
        _disk.write(self, path)

    @classmethod
    def load(
        cls,
        path: FilePath,
        device: DeviceLike | None = None,
        *,
        keys: Sequence[str | Path] | None = None,
        encoders: Encoders | None = None,
    ) -> Self:
        """Read a safetensors file: one of `save`'s, or anybody's, which gives one level of keys. Needs ``safetensors``.

        Nothing that the file names is imported or called but registered encoders, and those only if they are made of
        data (so not `Tokenizer`). Its options are taken, unless this class has its own. A typed class checks them.

        Args:
            path: the path of a regular file. Descriptors are not taken.
            device: where the tensors go, without a stop elsewhere. None and ``"cpu"``: the memory of the file itself,
                which is read when a field is used; writing a field changes the memory and not the file. A field that
                another program has not aligned to its element size is copied.
            keys: only these keys and paths.
            encoders: for some keys, or for all, instead of those of the file.

        Raises: `InvalidFileError`, a ``ValueError``, for a file that is damaged, forged or not understood; ``KeyError``
        for ``keys`` that are not in it; ``ImportError``; ``OSError``, for pipes, sockets and devices too; ``TypeError``
        for a descriptor; what a typed class raises.
        Cost: a few microseconds a field, and what is read of the file.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     DeviceDict({"x": 1, "n": {"y": 2, "z": 3}}).save(f"{folder}/d.safetensors")
        ...     DeviceDict.load(f"{folder}/d.safetensors", keys=[("n", "z")]).to_dict()
        {'n': {'z': tensor(3)}}
        """
        out = _disk.read(cls, path, CPU if device is None else resolve(device), keys, encoders)
        out._conform(out, None, deep=True)
        return out

    def __reduce_ex__(self, protocol: Any, /) -> Any:
        if protocol == _saved.PROTOCOL and type(self).__reduce__ is TreeDict.__reduce__:
            with suppress(_saved.NotKept):
                return _saved.taken_apart(self)
        return self.__reduce__()

    _sent = staticmethod(_sendable.sent)

    # --- looking ---

    def __repr__(self) -> str:
        return tree(self, _title(self), _note)

    def _repr_html_(self) -> str:
        return html(self, _title(self), _note)


# All that torch.load(weights_only=True) may call: it takes data only, and checks it.
cast(Any, torch.serialization).add_safe_globals([_saved.rebuild])


def _plain(td: Any) -> dict[str, Any]:
    """The items of a TensorDict, and of those in it, by ``td[key]``, which unwraps what is no tensor."""
    if not hasattr(td, "keys"):
        raise TypeError(f"expected a TensorDict or another mapping, got {type(td).__name__}")
    out: dict[str, Any] = {}
    for key in td.keys():  # noqa: SIM118  (iterating a TensorDict gives its rows)
        value = td[key]
        out[key] = _plain(value) if hasattr(value, "keys") else value
    return out


def _title(d: TreeDict[Any]) -> str:
    count, total = field_count(d), sum(map(nbytes, d._tensors()))
    device = "no device yet" if d._device is None else str(d._device)
    packed = "" if packed_layout(d._tensors(), d._device) is None else ", packed"
    return f"{type(d).__name__}({device}, {count} field{'' if count == 1 else 's'}, {size(total)}{packed})"


def _note(d: Mapping[str, Any], key: str) -> str:
    encoder = d._policy.encoders.get(key) if isinstance(d, TreeDict) else None
    return "" if encoder is None else repr(encoder)
