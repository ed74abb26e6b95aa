"""Other trees of the same tensors: some fields, changed fields, one level or many."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from torch import Tensor
from typing_extensions import Self

from ._devices import canonical
from ._errors import Path, refuse_deeper
from ._items import as_dict, refuse_key
from ._movable import MovableDict
from ._tree import TreeDict, V, raw


class ShapedDict(MovableDict[V]):
    """What changes which fields there are, and where."""

    __slots__ = ()

    def select(self, *keys: str | Path) -> Self:
        """A dict of only these keys, in the order given; a path brings only that field of a nested dict.

        Raises: ``KeyError`` for one that is not there. No tensor is copied.

        >>> d = DeviceDict({"x": 1, "obs": {"a": 2, "b": 3}})
        >>> d.select(("obs", "b"), "x").to_dict()
        {'obs': {'b': tensor(3)}, 'x': tensor(1)}
        """
        out = self._some(())
        for key in keys:
            path = _path(key)
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
            path = _path(key)
            out.__getitem__(key)  # raises KeyError
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
        if not callable(cast(object, function)):
            raise TypeError(f"map takes a function of a tensor, got {type(function).__name__}")
        results = [function(tensor) for tensor in self._tensors()]
        first = next((canonical(result.device) for result in results if isinstance(result, Tensor)), self._device)
        out = self._new(self, first, self._policy)
        out._take(self._with(results, None))
        out._conform(out, self, deep=True)
        return out

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
        return {key: value.to_dict() if isinstance(value, ShapedDict) else value for key, value in self.items()}


def _path(key: str | Path) -> Path:
    if not isinstance(cast(object, key), (str, tuple)):
        raise TypeError(f"keys are given one by one, as str or paths, got a {type(key).__name__}: {key!r}")
    return key if isinstance(key, tuple) else (key,)


def flatten_into(items: dict[str, Any], encoders: dict[str, Any], d: TreeDict[Any], sep: str, prefix: str = "") -> None:
    """Add every field of ``d`` and its encoder, under the joined names."""
    for key, value in d.items():
        name = prefix + key
        if name in items:
            raise ValueError(f"two fields would be named {name!r}; flatten with another sep than {sep!r}")
        if isinstance(value, TreeDict) and value:
            flatten_into(items, encoders, cast("TreeDict[Any]", value), sep, name + sep)
            continue
        items[name] = value.copy() if isinstance(value, TreeDict) else value
        if key in d._policy.encoders:
            encoders[name] = d._policy.encoders[key]


def _unflatten(mapping: Mapping[str, Any], sep: str, at: Path = ()) -> dict[str, Any]:
    refuse_deeper(at)
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
        out[head] = _unflatten(group, sep, (*at, head))
    return out
