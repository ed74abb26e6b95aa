"""`stack` and `cat`: join many dicts into one, field by field. `collate` shares the checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .._dict.device_dict import DeviceDict
from .._dict.torch_functions import implements
from .._encoders.protocol import agree
from .._errors import DeviceMismatchError, Path, described
from .._tree.alike import raise_mismatch
from .._tree.kinds import Join, kind_of
from .._tree.missing import refuse_other_keys
from .._tree.policy import Policy
from .._tree.ragged import Ragged
from .._tree.tree import TreeDict, field_encoder
from .pad import Pad, Pads, pad_rows


@implements(torch.stack)
def stack(dicts: Iterable[Mapping[str, Any]], dim: int = 0) -> DeviceDict[Any]:
    """Stack every field of the dicts with ``torch.stack``, along a new dimension ``dim``.

    ``torch.stack`` of dicts calls this function. The result has the class of the first dict. UTF-8 fields of different
    widths are padded, and decode as before. Kept objects become a list. Dtypes are promoted as by torch.

    Args:
        dicts: dicts with the same keys. Plain mappings are converted to `DeviceDict` first.
        dim: the new dimension. For a field of strings, it counts the dimensions of the nested lists of strings.

    Raises: ``ValueError`` that names the key and the dict if keys, shapes or encoders disagree, or if there are no
    dicts; ``DeviceMismatchError`` if the devices disagree; ``TypeError`` for anything that is not a mapping;
    ``IndexError`` for a dimension that does not exist.
    Cost: a copy of every tensor; no synchronization.

    >>> from tensordict_lite import DeviceDict, stack
    >>> stack([DeviceDict({"x": 1, "name": "Ada"}), DeviceDict({"x": 2, "name": "Grace"})]).decode("name")
    ['Ada', 'Grace']
    """
    return _joined(dicts, "stack", dim)


@implements(torch.cat, torch.concat, torch.concatenate)
def cat(
    dicts: Iterable[Mapping[str, Any]], dim: int = 0, *, pad: Mapping[Any, float | Pad] | None = None
) -> DeviceDict[Any]:
    """Concatenate every field of the dicts with ``torch.cat``, along the dimension ``dim``.

    The rules are those of `stack`. In addition, kept lists and arrays are concatenated, and so are the rows of ragged
    fields. Other kept values must be equal, and stay. A ragged field without values takes the dtype of the others.

    Args:
        dicts: as for `stack`.
        dim: the dimension to concatenate along, as for `stack`.
        pad: fill values for fields whose second dimensions differ, as for `collate`: numbers or `Pad`. Lengths and
            masks are joined if the dicts have them, and made otherwise. ``pad`` needs ``dim=0``.

    Raises: the errors of `stack`; ``ValueError`` for fields without dimensions, and for ``pad`` with another ``dim``.
    Cost: as `stack`. Padded fields are copied twice.

    >>> from tensordict_lite import DeviceDict, cat
    >>> cat([DeviceDict({"x": [1, 2]}), DeviceDict({"x": [3]})])["x"]
    tensor([1, 2, 3])
    """
    pads = Pads(pad, "cat")
    if pads and dim != 0:
        raise ValueError(f"pad= fills up the second dimension for cat along dim=0, got dim={dim!r}")
    out = _joined(dicts, "cat", dim, pads)
    pads.require_known(out, "dict")
    return out


def _joined(dicts: Iterable[Mapping[str, Any]], verb: str, dim: int, pads: Pads | None = None) -> DeviceDict[Any]:
    if isinstance(dicts, (Mapping, str)) or not isinstance(dicts, Iterable):
        raise TypeError(f"{verb} takes several dicts, in a list or another iterable, got {described(dicts)}")
    trees: list[Any] = list(dicts)
    if not trees:
        raise ValueError(f"{verb} needs at least one dict")
    if not all(issubclass(kind, DeviceDict) for kind in set(map(type, trees))):
        for i, d in enumerate(trees):
            if not isinstance(d, Mapping):
                way = 'give it a key: {"x": rows}' if isinstance(d, Ragged) else f"torch.{verb} joins tensors"
                raise TypeError(f"{verb} takes mappings, dict {i} is {described(d)}; {way}")
        trees = [d if isinstance(d, DeviceDict) else DeviceDict(d) for d in trees]
    device = next((d._device for d in trees if d._device is not None), None)
    for i, d in enumerate(trees):
        if d._device is not device and d._device is not None and d._device != device:
            message = f"dict {i} is on {d._device}, others are on {device}; move it with .to({str(device)!r})"
            raise DeviceMismatchError(message, expected=device, actual=d._device)
    how = Join(verb, getattr(torch, verb), dim, {})
    return cast("DeviceDict[Any]", _join(trees, device, how, pads, ()))


def _join(
    trees: Sequence[TreeDict[Any]], device: torch.device | None, how: Join, pads: Pads | None, at: Path
) -> TreeDict[Any]:
    """Join dicts at one level, and their nested dicts."""
    if pads:
        trees = pad_rows(trees, pads, at)
    policy = merged_policy(trees, at, "dict")
    call, dim, encoders = how.call, how.dim, policy.encoders
    items: dict[str, Any] = {}
    for key, values in values_by_key(trees, at, "dict"):
        encoder = encoders.get(key)
        if encoder is None and isinstance(values[0], Tensor):
            try:
                items[key] = call(values, dim)
                continue
            except (IndexError, RuntimeError, TypeError):
                pass  # the kind raises the error, which names the key
        elif encoder is not None and not any(field_encoder(tree, key) for tree in trees):
            encoder = None
        path, first = (*at, key), values[0]
        is_nested, kind = isinstance(first, TreeDict), kind_of(first, encoder)
        if not (is_nested and {type(first)}.issuperset(map(type, values))) and len(set(map(kind_of, values))) > 1:
            raise_mismatch(values, path, "dict")
        items[key] = _join(values, device, how, pads, path) if is_nested else kind.join(values, encoder, path, how)
    return trees[0]._new(items, device, policy)


def values_by_key(mappings: Sequence[Mapping[str, Any]], at: Path, noun: str) -> Iterable[tuple[str, Sequence[Any]]]:
    """Every key with its values, one for each mapping.

    Raises ``ValueError`` if a mapping has other keys than the first.
    """
    first = mappings[0]
    names = list(first)
    if list(map(list, mappings)).count(names) == len(mappings):
        return zip(names, zip(*[mapping.values() for mapping in mappings], strict=True), strict=True)
    for i, mapping in enumerate(mappings):
        hint = "; give each sample the same keys" if noun == "sample" else ""
        refuse_other_keys(first, mapping, at, f"{noun} {i}", f"{noun} 0", hint)
    return ((name, tuple([mapping[name] for mapping in mappings])) for name in names)


def merged_policy(trees: Sequence[TreeDict[Any]], at: Path, noun: str) -> Policy:
    """The policy of the first dict with the encoders of all dicts.

    Raises ``ValueError`` if two dicts have different encoders for a key.
    """
    policy = trees[0]._policy
    if len({id(d._policy) for d in trees}) == 1:
        return policy
    for i, d in enumerate(trees):
        if d._policy is policy or d._policy.encoders == policy.encoders:
            continue
        for key, encoder in d._policy.encoders.items():
            known = policy.encoders.get(key)
            if known is not None and key in d:
                agree(known, encoder, (*at, key), f" in {noun} {i}")
        policy = policy.with_encoders({**d._policy.encoders, **policy.encoders})
    return policy
