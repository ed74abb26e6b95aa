"""Insertion: validate and convert values, then store them. A call stores all of its items or none.

An insert has two steps. The first step prepares: it validates every key and converts every value, and does not change
the dict. The second step commits: it stores the prepared values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from .._encoders.builtin import Utf8
from .._encoders.protocol import StringEncoder, encode_ragged
from .._errors import DeviceMismatchError, Path, device_mismatch, refuse_deeper, with_path
from .._memory.device import canonical
from .._memory.ragged import offsets_of
from .._memory.transfer import transfer
from .._tree.convert import Converted, convert, holds_numbers, holds_strings
from .._tree.inside import kept_tensors, nests, path_off
from .._tree.kinds import KEPT, NESTED, Home, Misplaced, kind_of
from .._tree.missing import closest, keys_in
from .._tree.policy import Encoders
from .._tree.ragged import Ragged, rows_of
from .._tree.tree import TreeDict, dicts_of, field_encoder, kind_nested
from .._tree.walk import NO_EXPORTS, all_on, as_shared, leaves, refuse_key

_HOST = NO_EXPORTS - {Tensor, dict}
"""Types of values that are converted, or kept."""


def insert(
    d: TreeDict[Any],
    data: Mapping[str, Any],
    *,
    consent: bool = False,
    at: Path = (),
    encoders: Mapping[str, StringEncoder] | None = None,
) -> None:
    """Store all of ``data`` and the ``encoders`` of its keys. If an error is raised, ``d`` is unchanged.

    Args:
        consent: True: move tensors that are on other devices. False: follow ``on_mismatch``.
        at: the path of ``d`` in the caller's tree, for error messages.
        encoders: encoders to store in addition to those of the fields of strings.
    """
    given, removed = data, ()
    if d._has_fields:
        typed: Any = d
        given = typed._given(data, at)
        if given is not data:  # None deletes an optional field
            removed = [key for key in data if key not in given and key in d]
    device, policy = d._device, d._policy
    keeps = policy.objects == "keep" and not (policy.encoders or d._has_fields) and policy.default_encoder == Utf8()
    if device is None:
        if d and d._tensors_inside():  # see `_infer_device`
            raise DeviceMismatchError(f"this {type(d).__name__} has tensors on several devices; .to(device) it first")
        first = next(iter(given.values()), None)
        if keeps and type(first) is not Tensor:
            first = next((value for value in given.values() if type(value) is Tensor), None)
        device = canonical(first.device) if type(first) is Tensor else None
    # Fast path: all values are tensors on the device, or kept ones without tensors. A single host value, as in
    # `d["x"] = array`, skips the test.
    if (keeps or len(given) != 1 or isinstance(next(iter(given.values())), Tensor)) and all_on(given, device, keeps):
        d._commit(given, device, encoders, removed)
    else:
        staged, device, used = _prepare(d, given, consent, at)
        d._commit(staged, device, {**used, **encoders} if encoders else used, removed)


def refuse_misspelled(d: TreeDict[Any], encoders: Encoders | None) -> None:
    """Raise ``ValueError`` for a key of ``encoders`` that is not in ``d``, but close to strings without an encoder.

    An encoder for a key that comes later is allowed.
    """
    known: set[str] = keys_in(d) if isinstance(encoders, Mapping) else set()
    given = cast("Mapping[str, Any]", encoders) if known else {}
    later = [key for key in given if key not in known]
    if not later:
        return
    strings: list[str] = []
    for node in dicts_of(d):
        declared = type(node)._class_policy.encoders
        strings += [key for key in node if key not in given and key not in declared and _has_default(node, key)]
    for name in later:
        # At 0.8 "lable" is close to "label". A smaller number would refuse more pairs of keys that are both meant.
        if close := closest(name, strings, 0.8):
            raise ValueError(
                f"encoders= has {name!r}, which is no key, and the strings of {close!r} have no encoder; did you mean "
                f"{close!r}? If {name!r} comes later, give {close!r} an encoder too, such as Utf8()"
            )


def _has_default(d: TreeDict[Any], key: str) -> bool:
    """Whether a field has strings that the default encoder encoded."""
    encoder = field_encoder(d, key)
    return encoder is not None and encoder == d._policy.default_encoder


def _prepare(
    d: TreeDict[Any], data: Mapping[str, Any], consent: bool, at: Path
) -> tuple[dict[str, Any], torch.device | None, dict[str, StringEncoder]]:
    """Convert all values. Return the converted items, their device, and the encoder of each field of strings."""
    device = d._device
    target = device
    copies: Mapping[int, Tensor] = {}
    keeps = d._policy.objects == "keep"
    moves = consent or d._policy.on_mismatch == "move"
    if moves or device is None:  # collect all tensors: to find the device, and to move them in one transfer
        tensors: list[Tensor] = []
        data = _snapshot(data, at, tensors, keeps)
        if device is None and tensors:
            device = canonical(tensors[0].device)
        # If there is no tensor, host values go to torch's default device.
        target = canonical(torch.empty(0).device) if device is None else device
        if moves:
            misplaced = {id(tensor): tensor for tensor in tensors if tensor.device != target}
            copies = dict(zip(misplaced, transfer(list(misplaced.values()), target), strict=True))
    try:
        staged, encoders = _convert_items(d, data, Home(cast(torch.device, target), copies, {}, moves), at)
    except Misplaced as misplaced:
        raise _mismatch(d, data, at, *misplaced.args) from None
    if device is None and any(isinstance(value, (Tensor, Ragged, TreeDict)) for value in staged.values()):
        device = target
    return staged, device, encoders


def _snapshot(data: Mapping[str, Any], at: Path, tensors: list[Tensor], keeps: bool) -> dict[str, Any]:
    """Copy ``data`` and its nested mappings into dicts, and append every tensor to ``tensors``.

    Each mapping is read once, because a lazy mapping may return new tensors on every read. ``keeps``: other values may
    be kept, and hold tensors.
    """
    refuse_deeper(at)
    out = {
        key: value if keeps or type(value) in NO_EXPORTS else as_shared(value, (*at, key))
        for key, value in data.items()
    }
    for key, value in out.items():
        if type(value) in _HOST and not keeps:
            continue
        if isinstance(value, TreeDict):
            tensors += value._tensors_inside()
        elif nests(value) or (isinstance(value, Mapping) and not keeps):
            out[key] = _snapshot(value, (*at, key), tensors, keeps)
        else:
            tensors += kind_of(value).tensors(value)
    return out


def _convert_items(
    d: TreeDict[Any], data: Mapping[str, Any], home: Home, at: Path
) -> tuple[dict[str, Any], dict[str, StringEncoder]]:
    """Convert every value. Return the converted items and the encoder of each field of strings."""
    staged: dict[str, Any] = {}
    encoders: dict[str, StringEncoder] = {}
    keeps = d._policy.objects == "keep"
    for key, given in list(data.items()):  # a list, because an encoder may change the mapping
        if not isinstance(key, str):
            refuse_key(key, at)
        value, kind, path = given, KEPT, (*at, key)
        if keeps and is_kept(d, key, given):
            staged[key] = KEPT.placed(given, home, path)
            continue
        if type(given) not in _HOST:
            value = as_shared(given, path)
            kind = NESTED if isinstance(value, Mapping) else kind_of(value)
        if kind is NESTED:
            staged[key] = _insert_nested(d, value, home, path)
        elif kind is not KEPT:
            staged[key] = kind.placed(value, home, path)
        else:
            rows = _ragged_rows(d, value, home.device, path) if d._has_fields else None
            stored, encoder = rows or convert_for(d, value, home.device, path)
            if encoder is not None:
                encoders[key] = encoder
                stored = stored if rows else place_codes(d, stored, home.device, path)
            staged[key] = KEPT.placed(stored, home, path) if stored is value else stored
    return staged, encoders


def is_kept(d: TreeDict[Any], key: str, value: Any) -> bool:
    """Whether ``objects="keep"`` keeps a value as it is given.

    Strings with an encoder of their own are encoded, and a field that is declared as a tensor or as a dict becomes one:
    both were asked for.
    """
    policy, typed = d._policy, cast(Any, d)
    if policy.objects != "keep" or kind_of(value) is not KEPT:
        return False
    if key in policy.encoders or (d._has_fields and typed._converts(key)):
        return False
    return policy.default_encoder == Utf8() or not holds_strings(value)


def convert_for(d: TreeDict[Any], value: Any, target: torch.device, path: Path) -> Converted:
    """`convert` a value for a field of ``d``. Python numbers get the dtype that the class of ``d`` declares."""
    typed: Any = d
    made = convert(value, target, d._policy, path)
    if d._has_fields and type(value) in (int, float, list, tuple) and isinstance(made.value, Tensor):
        dtype = typed._declared_dtype(path[-1], made.value.dtype, made.value.numel() > 0)
        if dtype is not None and holds_numbers(value):  # an array is never cast
            return convert(value, target, d._policy, path, dtype)
    return made


def _ragged_rows(
    d: TreeDict[Any], value: Any, target: torch.device, path: Path
) -> tuple[Ragged, StringEncoder | None] | None:
    """The rows of a list for a field that a typed dict declares as ragged, and their encoder or None. Else None.

    A row of such a field is a tensor, and stays one.
    """
    typed: Any = d
    if not isinstance(value, list) or path[-1] not in typed._schema().ragged or isinstance(d.get(path[-1]), Tensor):
        return None
    rows: list[Any] = value
    encoder = d._policy.encoder(path[-1])
    codes = encode_ragged(encoder, rows) if rows else None
    if codes is not None:
        return Ragged(codes[0].to(target), offsets_of(codes[1].tolist()).to(target)), encoder
    if not all(isinstance(row, (list, tuple)) for row in rows):
        return None
    values, lengths = rows_of(rows, lambda row, _: convert_for(d, row, target, path).value, path)
    return Ragged(values, offsets_of(lengths).to(target)), None


def _mismatch(
    d: TreeDict[Any], data: Mapping[str, Any], at: Path, path: Path, tensor: Tensor, expected: torch.device
) -> DeviceMismatchError:
    """The error for a misplaced tensor of ``data``."""
    way_out = ""
    if d._device is None:  # right is the device that most tensors are on, of two that of the first tensor
        found = [((*at, *way), value, one) for way, value in leaves(data) for one in kept_tensors(value)]
        expected = canonical(Counter(one.device for _, _, one in found).most_common(1)[0][0])
        path, value, tensor = next(each for each in found if each[2].device != expected)
        path = path_off(value, path, expected)
        way_out = f"move it with .to({str(expected)!r}), or build with device={str(expected)!r}"
    stored: Any = d
    for part in path[len(at) :]:
        stored = stored.get(part) if isinstance(stored, TreeDict) else None
    if isinstance(stored, Tensor) and (stored.shape, stored.dtype) == (tensor.shape, tensor.dtype):
        # `d[key] = d[key].to(device)`, as helpers do: with on_mismatch="move" it would change nothing.
        way_out = f"move the whole dict, d = d.to({str(tensor.device)!r}), or this tensor, .to({str(expected)!r})"
    return device_mismatch(path, expected, tensor.device, way_out)


def place_codes(d: TreeDict[Any], codes: Any, target: torch.device, path: Path) -> Any:
    """Move the codes of an encoder from the host to ``target``. A mapping of codes becomes a nested dict."""
    if isinstance(codes, Tensor):
        return codes if codes.device == target else transfer([codes], target)[0]
    refuse_deeper(path)
    cls, policy = kind_nested(type(d), d._policy, path[-1], dict)
    nested = cls._new((), target, policy)
    insert(nested, codes, consent=True, at=path)
    return nested


def _insert_nested(d: TreeDict[Any], value: Mapping[str, Any], home: Home, path: Path) -> Any:
    """Convert a mapping to a nested dict. A `DeviceDict` keeps its encoders and the policy of its class."""
    refuse_deeper(path)
    kind: Any = type(value)
    given = value._policy if isinstance(value, TreeDict) else None
    cls, policy = kind_nested(type(d), d._policy, path[-1], kind, given, value)
    nested: Any = cls._new((), home.device, policy)
    validated = cls is kind  # a second validation would reject a row of a typed batch, which lost its batch dimension
    data = nested._given(value, path) if nested._has_fields and not validated else value
    staged, encoders = _convert_items(nested, data, home, path)
    if validated:
        TreeDict._commit(nested, staged, home.device, encoders)
        return nested
    try:
        nested._commit(staged, home.device, encoders)
    except (TypeError, ValueError) as error:
        raise with_path(error, path) from error
    return nested
