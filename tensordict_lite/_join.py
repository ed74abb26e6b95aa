"""`stack` and `cat`: many dicts into one, field by field. And what it takes that their fields can be joined."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ._device_dict import DeviceDict
from ._encoders import Utf8
from ._errors import DeviceMismatchError, Path, dotted, dtype_name
from ._policy import Policy
from ._tree import TreeDict


def stack(dicts: Iterable[Mapping[str, Any]], dim: int = 0) -> DeviceDict[Any]:
    """One dict of the class of the first, each field the ``torch.stack`` of theirs along a new dimension ``dim``.

    Plain mappings are made a `DeviceDict` first. UTF-8 fields of different widths are padded, and decode as before:
    ``dim`` counts the dimensions of the strings. Kept objects become a list of them. Dtypes are promoted as by torch.

    Raises: ``ValueError`` that names the key and the dict if keys, shapes or encoders disagree, or if there are no
    dicts; ``DeviceMismatchError`` if the devices do; ``TypeError`` for what is no mapping; ``IndexError`` for a
    dimension that is not there.
    Cost: a copy of every tensor; no synchronisation.

    >>> from tensordict_lite import DeviceDict, stack
    >>> stack([DeviceDict({"x": 1, "name": "Ada"}), DeviceDict({"x": 2, "name": "Grace"})]).decode("name")
    ['Ada', 'Grace']
    """
    return _joined(dicts, "stack", dim)


def cat(dicts: Iterable[Mapping[str, Any]], dim: int = 0) -> DeviceDict[Any]:
    """One dict of the class of the first, each field the ``torch.cat`` of theirs along the dimension ``dim``.

    As `stack`, but for kept objects: lists are concatenated, others become a list of them.

    Raises, and costs, what `stack` does.

    >>> from tensordict_lite import DeviceDict, cat
    >>> cat([DeviceDict({"x": [1, 2]}), DeviceDict({"x": [3]})])["x"]
    tensor([1, 2, 3])
    """
    return _joined(dicts, "cat", dim)


def _joined(dicts: Iterable[Mapping[str, Any]], verb: str, dim: int) -> DeviceDict[Any]:
    if isinstance(cast(object, dicts), (Mapping, str)) or not isinstance(cast(object, dicts), Iterable):
        raise TypeError(f"{verb} takes several dicts, in a list or another iterable, got {described(dicts)}")
    trees: list[Any] = list(cast("Iterable[Any]", dicts))
    if not trees:
        raise ValueError(f"{verb} needs at least one dict")
    if not all(issubclass(kind, DeviceDict) for kind in set(map(type, trees))):
        for i, d in enumerate(trees):
            if not isinstance(d, Mapping):
                raise TypeError(f"{verb} takes mappings, dict {i} is {described(d)}; torch.{verb} joins tensors")
        trees = [d if isinstance(d, DeviceDict) else DeviceDict(d) for d in trees]
    home = next((d._device for d in trees if d._device is not None), None)
    for i, d in enumerate(trees):
        if d._device is not home and d._device is not None and d._device != home:
            message = f"dict {i} is on {d._device}, others are on {home}; move it with .to({str(home)!r})"
            raise DeviceMismatchError(message, expected=home, actual=d._device)
    return cast("DeviceDict[Any]", _join(trees, verb, dim, home, ()))


def _join(trees: Sequence[TreeDict[Any]], verb: str, dim: int, home: torch.device | None, at: Path) -> TreeDict[Any]:
    join = cast(Any, torch.stack if verb == "stack" else torch.cat)
    policy = merged_policy(trees, at, "dict")
    items: dict[str, Any] = {}
    for key, column in columns(trees, at, "dict"):
        path = (*at, key)
        if isinstance(column[0], Tensor):
            encoder = policy.encoders.get(key)
            along = dim if encoder is None else _leading(column[0], encoder, verb, dim, path)
            try:
                items[key] = join(column, along)
            except torch.OutOfMemoryError:
                raise
            except IndexError as error:  # a dimension that is not there
                raise IndexError(f"{dotted(path)}: {error}") from error
            except (RuntimeError, TypeError) as error:
                if verb == "cat" and not column[0].dim():
                    raise ValueError(
                        f"{dotted(path)} is one number a dict, without a dimension to cat along; use stack"
                    ) from error
                wide = widened(column, encoder)
                if wide is None:
                    refuse(column, path, "dict", error)
                items[key] = join(wide, along)
        elif isinstance(column[0], TreeDict):
            if not all(isinstance(value, TreeDict) for value in column):
                refuse(column, path, "dict", None)
            items[key] = _join(cast("Sequence[TreeDict[Any]]", column), verb, dim, home, path)
        elif any(isinstance(value, (Tensor, TreeDict)) for value in column):
            refuse(column, path, "dict", None)
        elif verb == "cat" and all(isinstance(value, list) for value in column):
            items[key] = [item for value in column for item in value]
        else:
            items[key] = list(column)
    return trees[0]._new(items, home, policy)


def _leading(codes: Tensor, encoder: object, verb: str, dim: int, path: Path) -> int:
    """``dim`` of strings, whose last dimension is their bytes and not one of theirs."""
    if not isinstance(encoder, Utf8) or codes.dtype != torch.uint8 or not codes.dim():
        return dim
    dims = codes.dim() - 1 + (verb == "stack")
    if not -dims <= dim < dims:
        raise IndexError(f"{dotted(path)}: strings of {codes.dim() - 1} dimensions have no dim={dim} to {verb} along")
    return dim % dims


def columns(mappings: Sequence[Mapping[str, Any]], at: Path, noun: str) -> Iterable[tuple[str, Sequence[Any]]]:
    """The values of every key, that of the first mapping first. ``ValueError`` if one has other keys than the first."""
    first = mappings[0]
    names = list(first)
    if list(map(list, mappings)).count(names) == len(mappings):
        return zip(names, zip(*[mapping.values() for mapping in mappings], strict=True), strict=True)
    for i, mapping in enumerate(mappings):
        missing, extra = first.keys() - mapping.keys(), mapping.keys() - first.keys()
        if missing:
            raise ValueError(f"{noun} {i} lacks {dotted((*at, str(min(missing, key=str))))}, which {noun} 0 has")
        if extra:
            raise ValueError(f"{noun} {i} has {dotted((*at, str(min(extra, key=str))))}, which {noun} 0 lacks")
    return ((name, [mapping[name] for mapping in mappings]) for name in names)


def merged_policy(trees: Sequence[TreeDict[Any]], at: Path, noun: str) -> Policy:
    """The policy of the first with the encoders of all. ``ValueError`` if two encode a key differently."""
    policy = trees[0]._policy
    if len({id(d._policy) for d in trees}) == 1:
        return policy
    for i, d in enumerate(trees):
        if d._policy is policy or d._policy.encoders == policy.encoders:
            continue
        for key, encoder in d._policy.encoders.items():
            known = policy.encoders.get(key)
            if known is not None and known != encoder and key in d and not isinstance(known, Utf8):
                raise ValueError(
                    f"{dotted((*at, key))}: {noun} {i} encodes it with {encoder!r}, {noun} 0 with {known!r}; "
                    "decode and encode one of them anew"
                )
        policy = policy.with_encoders({**d._policy.encoders, **policy.encoders})
    return policy


def widened(column: Sequence[Tensor], encoder: object) -> list[Tensor] | None:
    """UTF-8 codes with as many zeros after them as make all as wide as the widest; None if they are something else."""
    if not isinstance(encoder, Utf8) or not all(
        isinstance(cast(object, codes), Tensor) and codes.dtype == torch.uint8 and codes.dim() for codes in column
    ):
        return None
    widths = [codes.shape[-1] for codes in column]
    if len(set(widths)) == 1:
        return None
    most = max(widths)
    return [F.pad(codes, (0, most - width)) for codes, width in zip(column, widths, strict=True)]


def refuse(column: Sequence[Any], path: Path, noun: str, error: Exception | None, hint: str = "") -> NoReturn:
    """Raise a ``ValueError`` that says which of the values is unlike the first."""
    for i, value in enumerate(column):
        if described(value) != described(column[0]):
            message = f"{dotted(path)}: {noun} {i} has {described(value)}, {noun} 0 has {described(column[0])}{hint}"
            raise ValueError(message) from error
    if error is not None:
        raise error
    raise ValueError(f"{dotted(path)}: these cannot be joined")


def described(value: Any) -> str:
    """What a value is: ``float32[2, 3]``, a device that is not the CPU, or the name of its type."""
    if isinstance(value, Tensor):
        where = "" if value.is_cpu else f" on {value.device}"
        shape = "jagged" if value.is_nested else ", ".join(map(str, value.shape))
        return f"{dtype_name(value.dtype)}[{shape}]{where}"
    return "a mapping" if isinstance(value, Mapping) else f"a {type(value).__name__}"
