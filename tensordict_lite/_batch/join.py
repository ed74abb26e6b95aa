"""`stack` and `cat`: join many dicts into one, field by field. `collate` shares the checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor

from .._dict.device_dict import DeviceDict
from .._dict.torch_functions import implements
from .._encoders.protocol import agree, padding
from .._errors import DeviceMismatchError, Path, described, dotted, is_out_of_memory
from .._memory.ragged import cat_offsets
from .._tree.missing import refuse_other_keys
from .._tree.policy import Policy
from .._tree.ragged import Lengths, Ragged
from .._tree.tree import TreeDict, field_encoder
from .pad import Pad, Pads, pad_rows, widened


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

    The rules are those of `stack`. In addition, kept lists are concatenated, and so are the rows of ragged fields. A
    ragged field without values takes the dtype of the others.

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
    if pads:
        trees = pad_rows(trees, pads)
    return cast("DeviceDict[Any]", _Join(verb, getattr(torch, verb), dim, device, {}).dicts(trees, ()))


class _Join(NamedTuple):
    """Joins dicts at every level."""

    verb: str
    """``"stack"`` or ``"cat"``."""
    join: Callable[..., Tensor]
    dim: int
    device: torch.device | None
    known: dict[tuple[int, ...], Lengths]
    """The joined lengths of ragged fields, by the ids of the lengths. Fields of the same lengths share them."""

    def dicts(self, trees: Sequence[TreeDict[Any]], at: Path) -> TreeDict[Any]:
        """Join dicts at one level, and their nested dicts."""
        policy = merged_policy(trees, at, "dict")
        items: dict[str, Any] = {}
        join, dim = self.join, self.dim
        for key, values in values_by_key(trees, at, "dict"):
            path = (*at, key)
            if isinstance(values[0], Tensor):
                encoder = policy.encoders.get(key)
                encoded = encoder is not None and any(field_encoder(tree, key) for tree in trees)
                if encoded and not all(_may_join(value, values[0]) for value in values):  # torch would promote codes
                    raise_mismatch(values, path, "dict", may_differ=_may_join)
                along = dim if encoder is None else self.leading_dim(values[0], encoder, path)
                try:
                    items[key] = join(values, along)
                except (IndexError, RuntimeError, TypeError) as error:
                    items[key] = self.widened(values, encoder, along, path, error)
            elif isinstance(values[0], TreeDict) and all(isinstance(value, TreeDict) for value in values):
                items[key] = self.dicts(values, path)
            elif isinstance(values[0], Ragged) and all(isinstance(value, Ragged) for value in values):
                items[key] = self.ragged(values, policy.encoders.get(key), path)
            elif any(isinstance(value, (Tensor, Ragged, TreeDict)) for value in values):
                raise_mismatch(values, path, "dict")
            elif self.verb == "cat" and all(isinstance(value, list) for value in values):
                items[key] = [item for value in values for item in value]
            else:
                items[key] = list(values)
        return trees[0]._new(items, self.device, policy)

    def widened(self, values: Sequence[Tensor], encoder: object, dim: int, path: Path, error: Exception) -> Tensor:
        """Join codes of different widths, after torch refused the tensors with ``error``. Else name the tensor."""
        if isinstance(error, IndexError):  # the dimension does not exist
            raise IndexError(f"{dotted(path)}: {error}") from error
        if self.verb == "cat" and not values[0].dim():
            raise ValueError(
                f"{dotted(path)} is one number a dict, without a dimension to cat along; use stack"
            ) from error
        wide = widened(values, encoder)
        if wide is not None:
            return self.join(wide, dim)
        may_differ = partial(_can_cat, along=dim) if self.verb == "cat" else None
        raise_mismatch(values, path, "dict", error, "", may_differ)

    def ragged(self, fields: Sequence[Ragged], encoder: object, path: Path) -> Ragged:
        """Concatenate the rows of ragged fields."""
        if self.verb == "stack" or self.dim:
            hint = "cat([...]) joins the rows" if self.verb == "stack" else "cat along dim=0"
            raise ValueError(
                f"{dotted(path)} is ragged: its rows differ in length, so they have no other dimension; {hint}"
            )
        values = decided_values(fields)
        try:
            joined = torch.cat(values)
        except RuntimeError as error:
            joined = self.widened(values, encoder, 0, path, error)
        ids = tuple([id(field._lengths) for field in fields])
        if ids not in self.known:
            longest = [field._lengths.longest for field in fields]
            offsets = cat_offsets([field.offsets for field in fields], list(map(len, values)))
            self.known[ids] = Lengths(offsets, None if None in longest else max(cast("list[int]", longest)))
        return Ragged._new(joined, self.known[ids])

    def leading_dim(self, codes: Tensor, encoder: object, path: Path) -> int:
        """``dim`` as a dimension of the codes. The last dimension of codes holds the bytes of one string."""
        if padding(encoder, codes) is None:
            return self.dim
        dims, dim, verb = codes.dim() - 1 + (self.verb == "stack"), self.dim, self.verb
        if not -dims <= dim < dims:
            raise IndexError(
                f"{dotted(path)}: strings of {codes.dim() - 1} dimensions have no dim={dim} to {verb} along"
            )
        return dim % dims


def decided_values(fields: Sequence[Ragged]) -> list[Tensor]:
    """The values of ragged fields. A field without values does not decide the dtype: empty lists are float32."""
    values = [field.values for field in fields]
    dtype = next((one.dtype for one in values if len(one)), None)
    return [one if dtype is None or len(one) else one.to(dtype) for one in values]


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


def raise_mismatch(
    values: Sequence[Any],
    path: Path,
    noun: str,
    error: Exception | None = None,
    hint: str = "",
    may_differ: Callable[[Any, Any], bool] | None = None,
) -> NoReturn:
    """Raise a ``ValueError`` that names the first value whose shape, dtype, layout or type differs from value 0.

    ``error``: the error of torch, which is raised itself if memory is exhausted.

    ``may_differ``: whether a value may differ from value 0 all the same.
    """
    if error is not None and is_out_of_memory(error):
        raise error
    for i, value in enumerate(values):
        if described(value) != described(values[0]) and not (may_differ and may_differ(value, values[0])):
            message = f"{dotted(path)}: {noun} {i} has {described(value)}, {noun} 0 has {described(values[0])}{hint}"
            raise ValueError(message) from error
    raise ValueError(f"{dotted(path)}: torch cannot join these {noun}s; it says: {error}") from error


def _may_join(value: object, first: Tensor) -> bool:
    """Whether codes have the dtype of the first ones. Other errors are those of torch."""
    return not isinstance(value, Tensor) or value.dtype == first.dtype


def differ_in_length(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors differ in their first dimension only."""
    return a.dtype == b.dtype and _can_cat(a, b, 0)


def _can_cat(a: Any, b: Any, along: int) -> bool:
    """Whether two values are tensors with shapes that differ in one dimension only. Their dtypes may differ."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or not a.dim() or a.dim() != b.dim():
        return False
    if a.layout is not b.layout or a.is_nested or b.is_nested or a.is_quantized is not b.is_quantized:
        return False
    along %= a.dim()
    return a.shape[:along] == b.shape[:along] and a.shape[along + 1 :] == b.shape[along + 1 :]
