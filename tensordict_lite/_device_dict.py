"""`DeviceDict`, the public class: what a dict of tensors does as a dict, on top of storing, checking and moving."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import Self

from . import _disk, _saved
from ._compare import agree, values_agree
from ._devices import CPU, DeviceLike, canonical, resolve
from ._display import field_count, html, size, tree
from ._errors import Path, dotted, located
from ._items import as_dict, nbytes, refuse_key
from ._movable import MovableDict
from ._packing import packed_layout
from ._policy import Encoders
from ._rows import Rows
from ._strings import StringEncoder, decode_nested
from ._tree import TreeDict, V, raw


class DeviceDict(MovableDict[V]):
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
    __module__ = "tensordict_lite"  # before pytree registers the name, which exported programs keep

    # --- like a dict ---

    def select(self, *keys: str | Path) -> Self:
        """A dict of only these keys, in the order given; a path brings only that field of a nested dict.

        Raises: ``KeyError`` for one that is not there. No tensor is copied.

        >>> d = DeviceDict({"x": 1, "obs": {"a": 2, "b": 3}})
        >>> d.select(("obs", "b"), "x").to_dict()
        {'obs': {'b': tensor(3)}, 'x': tensor(1)}
        """
        out = self._some(())
        for key in keys:
            path = key if isinstance(key, tuple) else (key,)
            value: Any = self[key]
            node: TreeDict[Any] = out
            source: TreeDict[Any] = self
            for part in path[:-1]:
                source = raw.__getitem__(source, part)
                if not raw.__contains__(node, part):
                    raw.__setitem__(node, part, source._some(()))
                node = raw.__getitem__(node, part)
            raw.__setitem__(node, path[-1], value.copy() if isinstance(value, TreeDict) else value)
        return out

    def drop(self, *keys: str | Path) -> Self:
        """A dict without these keys, or paths.

        Raises: ``KeyError`` for one that is not there. No tensor is copied.

        >>> DeviceDict({"x": 1, "obs": {"a": 2, "b": 3}}).drop("x", ("obs", "a")).to_dict()
        {'obs': {'b': tensor(3)}}
        """
        out = self._some(self.copy())
        for key in keys:
            path = key if isinstance(key, tuple) else (key,)
            out._walk(path)  # raises KeyError
            node: TreeDict[Any] = out
            for part in path[:-1]:
                inner: TreeDict[Any] = raw.__getitem__(node, part)
                raw.__setitem__(node, part, inner._some(inner))
                node = raw.__getitem__(node, part)
            raw.__delitem__(node, path[-1])
        return out

    def map(self, function: Callable[[Tensor], Any], /) -> Self:
        """A dict of ``function(tensor)`` for every tensor, at every depth; kept objects as they are.

        The results are stored by the rule of ``d[key] = ...``; the device is that of the first tensor among them, so
        ``function`` may move all of them.

        Raises: what ``function`` does; for a result, as ``d[key] = ...``. Cost: the calls.

        >>> DeviceDict({"x": [1.0, 2.0], "n": {"y": [3.0]}}).map(torch.sum).to_dict()
        {'x': tensor(3.), 'n': {'y': tensor(3.)}}
        """
        results = [function(tensor) for tensor in self._tensors()]
        first = next((canonical(result.device) for result in results if isinstance(result, Tensor)), self._device)
        out = self._new(self, first, self._policy)
        out._take(self._with(results, None))
        out._conform(out, self, deep=True)
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
        return cast("DeviceDict[V]", DeviceDict._new(items, self._device, self._policy.with_encoders(encoders)))

    @classmethod
    def unflatten(cls, mapping: Mapping[str, Any], sep: str = ".") -> Self:
        """The nested dict of one level of joined keys: `flatten` undone, with its encoders if given a `DeviceDict`.

        Raises: ``ValueError`` if a key is both a field and the start of another. No tensor is copied.

        >>> DeviceDict.unflatten({"obs.a": 1, "obs.b.c": 2}).to_dict()
        {'obs': {'a': tensor(1), 'b': {'c': tensor(2)}}}
        """
        if not isinstance(mapping, TreeDict):
            return cls(_unflatten(as_dict(mapping), sep))
        known = mapping._policy.encoders
        policy = replace(mapping._policy, encoders={key: known[key] for key in known if sep not in key})
        out = cls._new((), mapping._device, policy)
        out._take(_unflatten(mapping, sep))
        for key, encoder in known.items():
            if sep in key and (path := tuple(key.split(sep))) in out:
                node, last = out._walk(path)
                node._policy = node._policy.with_encoders({last: encoder})
        return out

    def to_dict(self) -> dict[str, Any]:
        """A plain nested dict of the same tensors and kept objects; no tensor is copied.

        >>> DeviceDict({"n": {"y": 3}}).to_dict()
        {'n': {'y': tensor(3)}}
        """
        return {key: value.to_dict() if isinstance(value, DeviceDict) else value for key, value in self.items()}

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
        place, all fields at once), ``len(d.rows)``, iteration (views), ``d.rows.split(n)`` (views),
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

    # --- files ---

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file that `load` reads: tensors, nesting, encoders, and options. Needs ``safetensors``.

        The file takes the place of an older one once it is whole and on the disk; if anything fails, the old one stays
        and nothing else is left. Other programs find the tensors under their dotted paths. Tensors that share memory
        are written each by itself; ones on a device are copied to the host some at a time.

        Raises: ``TypeError`` that names kept objects, sparse, nested, quantized and meta tensors, and encoders that
        have no registered JSON form; ``ValueError`` for more than 64 levels; ``ImportError``; ``OSError``.
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
        path: str | os.PathLike[str],
        device: DeviceLike | None = None,
        *,
        keys: Sequence[str | Path] | None = None,
        encoders: Encoders | None = None,
    ) -> Self:
        """Read a safetensors file: one of `save`'s, or anybody's, which gives one level of keys. Needs ``safetensors``.

        Nothing that the file names is imported or called but registered encoders, and those only if they are made of
        data (so not `Tokenizer`). Its options are taken, unless this class has its own. A typed class checks them.

        Args:
            path: the file.
            device: where the tensors go, without a stop elsewhere. None and ``"cpu"``: the memory of the file itself,
                which is read when a field is used; writing a field changes the memory and not the file.
            keys: only these keys and paths.
            encoders: for some keys, or for all, instead of those of the file.

        Raises: `InvalidFileError`, a ``ValueError``, for a file that is damaged, forged or not understood; ``KeyError``
        for ``keys`` that are not in it; ``ImportError``; ``OSError``; what a typed class raises.
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
        return _saved.taken_apart(self) if protocol == _saved.PROTOCOL else self.__reduce__()

    # --- looking ---

    def __repr__(self) -> str:
        return tree(self, _title(self), _note)

    def _repr_html_(self) -> str:
        return html(self, _title(self), _note)


# All that torch.load(weights_only=True) may call: it takes data only, and checks it.
cast(Any, torch.serialization).add_safe_globals([_saved.rebuild])


def _flatten(d: TreeDict[Any], prefix: str, sep: str, items: dict[str, Any], encoders: dict[str, Any]) -> None:
    for key, value in d.items():
        name = prefix + key
        if name in items:
            raise ValueError(f"two fields would be named {name!r}; flatten with another sep than {sep!r}")
        if isinstance(value, TreeDict) and value:
            _flatten(cast("TreeDict[Any]", value), name + sep, sep, items, encoders)
            continue
        items[name] = value.copy() if isinstance(value, TreeDict) else value
        if key in d._policy.encoders:
            encoders[name] = d._policy.encoders[key]


def _unflatten(mapping: Mapping[str, Any], sep: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for key, value in mapping.items():
        if not isinstance(cast(object, key), str):
            refuse_key(key, ())
        head, nested, rest = key.partition(sep)
        if (head in groups) != bool(nested) and head in out:
            raise ValueError(f"{head!r} cannot be both a field and a nested dict, as {key!r} has it")
        if nested:
            out[head] = groups.setdefault(head, {})
            groups[head][rest] = value
        else:
            out[head] = value
    for head, group in groups.items():
        out[head] = _unflatten(group, sep)
    return out


def _title(d: TreeDict[Any]) -> str:
    count, total = field_count(d), sum(map(nbytes, d._tensors()))
    device = "no device yet" if d._device is None else str(d._device)
    packed = "" if packed_layout(d._tensors(), d._device) is None else ", packed"
    return f"{type(d).__name__}({device}, {count} field{'' if count == 1 else 's'}, {size(total)}{packed})"


def _note(d: Mapping[str, Any], key: str) -> str:
    encoder = d._policy.encoders.get(key) if isinstance(d, TreeDict) else None
    return "" if encoder is None else repr(encoder)
