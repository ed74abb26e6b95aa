"""The manifest: the structure of a dict as JSON data. Files, tables, messages, pickles and ``torch.save`` contain it.

A manifest contains the tree, the policies and the encoders of the dicts, and the kept values that JSON can hold. A
number replaces each tensor and each other kept object. A manifest names registered encoders, but no class and no
function. It may be damaged or forged, so `Reader` validates every part of a manifest before it uses the part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from types import NoneType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .._encoders.builtin import Utf8
from .._encoders.protocol import StringEncoder, encoder_from_json, encoder_to_json, runs_code
from .._errors import DEPTH, Path, described, dotted, refuse_deeper, shown
from .missing import holds, missing_key
from .policy import Encoders, Policy, options_from_json
from .ragged import Lengths, Ragged, validated
from .tree import TreeDict, reduces_itself
from .walk import only_tensors

MANIFEST_VERSION = 1
"""The version of the format of a manifest."""
OF_ITS_CLASS = -1
"""Replaces the number of a policy if the dict has the policy of its class."""

Manifest = dict[str, Any]
Leaves = list[tuple[Path, Any]]
"""The leaves of a tree, in its order: the path and the value of each leaf."""
Instead = Callable[[StringEncoder, "TypeError | None"], Any]
"""Returns the entry of an encoder without a safe JSON form. The second argument is the error of its `to_json`, or
None if its JSON form runs code."""
Shape = tuple[Any, ...]
"""A dict without its values: the number of its policy, and its items. An item is the key and the number of a leaf, the
`Shape` of a nested dict, the text of a kept value, or for a ragged field the numbers of its values and offsets and its
longest row or None."""


class InvalidManifest(ValueError):
    """The reason why data is not a valid manifest. The caller adds whether the data is a file or a message."""


def describe(d: TreeDict[Any], instead: Instead) -> tuple[Manifest, Leaves]:
    """Build the manifest of a dict. Returns the manifest, and the leaves in the order of their numbers.

    ``instead``: returns the entry of an encoder that has no JSON form, or whose JSON form runs code. If the function
    raises ``TypeError``, the path is added to the error. Raises ``TooDeep``.
    """
    outline = Outline(d)
    entries = outline.entries(lambda encoder: encoder_entry(encoder, instead))
    return {**json.loads(outline.text()), "encoders": entries}, outline.leaves()


class Outline:
    """The shape of a tree, its policies, its encoders, its leaves and its dicts.

    Args:
        pickled: a dict with the policy of its class gets `OF_ITS_CLASS`. A nested dict with a reduction of its own is a
            leaf.

    Raises ``TooDeep``: pytree can make a tree that is too deep.
    """

    def __init__(self, d: TreeDict[Any], pickled: bool = False) -> None:
        self._pickled = pickled
        self.values: list[Any] = []
        self.nodes: list[TreeDict[Any]] = []
        self._offsets: dict[Lengths, int] = {}
        self._policies: list[Policy] = []
        self._policy_entries: list[dict[str, Any]] = []
        self.encoders: list[StringEncoder] = []
        self._encoder_paths: list[Path] = []
        self._shape = self._shape_of(d, ())

    def text(self) -> str:
        """The manifest as text, without the entries of the encoders."""
        return _text(self._shape, json.dumps(self._policy_entries) if self._policy_entries else "[]")

    def entries(self, entry: Callable[[StringEncoder], Any]) -> list[Any]:
        """``entry(encoder)`` for each encoder. If it raises ``TypeError``, the path is added to the error."""
        found: list[Any] = []
        for encoder, path in zip(self.encoders, self._encoder_paths, strict=True):
            try:
                found.append(entry(encoder))
            except TypeError as error:
                raise TypeError(f"{dotted(path)}: {error}") from error
        return found

    def leaves(self) -> Leaves:
        """The leaves in the order of their numbers. Reads the text of the manifest."""
        return list(zip(paths_of(json.loads(self.text())), self.values, strict=True))

    def _shape_of(self, one: TreeDict[Any], at: Path) -> Shape:
        refuse_deeper(at)
        self.nodes.append(one)
        if only_tensors(one.values()):
            items = tuple(zip(one, count(len(self.values)), strict=False))
            self.values += one.values()
        else:
            items = tuple([(key, self._item(value, (*at, key))) for key, value in one.items()])
        own = self._pickled and one._policy is one._class_policy
        number = OF_ITS_CLASS if own else self._policy_number(one._policy, at)
        return number, items

    def _item(self, value: Any, path: Path) -> Any:
        if isinstance(value, TreeDict) and not (self._pickled and reduces_itself(value)):
            return self._shape_of(value, path)
        number = len(self.values)
        if not isinstance(value, Ragged):
            if not self._pickled and not isinstance(value, Tensor):
                with suppress(TypeError, ValueError, RecursionError):  # a value without a JSON form, or too deep
                    return json.dumps(_kept_to_json(value))
            self.values.append(value)
            return number
        lengths = value._lengths
        self.values.append(value.values)
        if lengths not in self._offsets:
            self._offsets[lengths] = number + 1
            self.values.append(lengths.offsets)
        return number, self._offsets[lengths], lengths.longest

    def _policy_number(self, one: Policy, at: Path) -> int:
        if one not in self._policies:  # equal policies share one entry
            default = one.default_encoder
            entry = {
                "encoders": {key: self._encoder_number(given, (*at, key)) for key, given in one.encoders.items()},
                "default": None if default == Utf8() else self._encoder_number(default, (*at, "*")),
                **one.options_to_json(),
            }
            self._policies.append(one)
            self._policy_entries.append(entry)
        return self._policies.index(one)

    def _encoder_number(self, one: StringEncoder, path: Path) -> int:
        if one not in self.encoders:
            self.encoders.append(one)
            self._encoder_paths.append(path)
        return self.encoders.index(one)


@lru_cache(maxsize=64)  # a program mostly pickles and sends dicts of the same few shapes
def _text(shape: Shape, policies: str) -> str:
    root = json.dumps(_tree(shape), separators=(",", ":"))
    return f'{{"version":{MANIFEST_VERSION},"root":{root},"policies":{policies},"encoders":[]}}'


def _tree(shape: Shape) -> dict[str, Any]:
    """The JSON form of a shape."""
    return {"policy": shape[0], "items": [(key, _item_to_json(one)) for key, one in shape[1]]}


def _item_to_json(one: Any) -> Any:
    if type(one) is str:
        return {"kept": json.loads(one)}
    return _tree(one) if type(one) is tuple and len(one) == 2 else one


def _kept_to_json(value: Any) -> Any:
    """The JSON form of a kept value: tuples and dicts are tagged. Raises ``TypeError`` for a value without one."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_kept_to_json(item) for item in value]
    if type(value) is tuple:
        return {"tuple": [_kept_to_json(item) for item in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: _kept_to_json(item) for key, item in value.items()}}
    raise TypeError(described(value))


def refuse_kept(leaves: Sequence[tuple[Path, Any]], way_out: str) -> None:
    """Raise ``TypeError`` if one of the leaves is a kept value, because JSON cannot hold it.

    ``way_out``: what to do about the kept values. ``{}`` stands for their keys.
    """
    if kept := [(path, value) for path, value in leaves if not isinstance(value, Tensor)]:
        where = ", ".join(dotted(path) for path, _ in kept)
        got = ", ".join(_without_json(value) for _, value in kept)
        keys = ", ".join(repr(path if len(path) > 1 else next(iter(path))) for path, _ in kept)
        raise TypeError(f"{where}: expected what JSON can hold, got {got}; {way_out.format(keys)}")


def _without_json(value: Any) -> str:
    """Describe a kept value that JSON cannot hold, and the part of it that is the reason."""
    whole, part = described(value), ""
    with suppress(RecursionError):
        try:
            _kept_to_json(value)
        except TypeError as error:
            part = str(error)
    return whole if part in ("", whole) else f"{whole} with {part}"


def _kept_from_json(form: Any) -> Any:
    if type(form) is list:
        return [_kept_from_json(item) for item in form]
    if type(form) is not dict:
        return form
    if list(form) == ["tuple"] and type(form["tuple"]) is list:
        return tuple(_kept_from_json(form["tuple"]))
    if list(form) == ["dict"] and type(form["dict"]) is dict:
        return {key: _kept_from_json(item) for key, item in form["dict"].items()}
    return invalid("a kept value is neither a tuple nor a dict")


def encoder_entry(encoder: StringEncoder, instead: Instead) -> Any:
    """The JSON form of an encoder; the result of ``instead`` if it has no safe JSON form."""
    if encoder.runs_code:
        return instead(encoder, None)
    try:
        return encoder_to_json(encoder)
    except TypeError as error:
        return instead(encoder, error)


class Node(dict[str, Any]):
    """A validated dict of a manifest. Each value is the number of a leaf, a `RaggedNode`, a `KeptNode`, or a node."""

    __slots__ = ("policy",)

    def __init__(self, policy: int, items: Mapping[str, Any]) -> None:
        super().__init__(items)
        self.policy = policy


class KeptNode(NamedTuple):
    """A kept value of a manifest."""

    form: Any
    """Its JSON form."""


class RaggedNode(NamedTuple):
    """A validated ragged field of a manifest: the numbers of its tensors. Fields may share their offsets."""

    values: int
    offsets: int
    longest: int | None
    """The length of its longest row."""


class Reader:
    """Validate and read a manifest from a file or from another process.

    Args:
        manifest: the data.
        count: the number of leaves; None if any number is valid. The manifest must contain each number below ``count``
            exactly once.
        given: encoders of the caller for some keys or for all keys. They replace the encoders in the manifest, and the
            replaced encoders are not read.

    The constructor and the methods raise `InvalidManifest` if the data is not a valid manifest.
    """

    numbers: list[int]
    """The numbers of the leaves, in the order of the tree. Offsets that are shared come once."""
    paths: list[Path]
    """The paths of the leaves. Those of a ragged field end with ``values`` and ``offsets``."""
    count: int
    """The number of dicts in the manifest."""

    def __init__(self, manifest: Any, count: int | None, given: Encoders | None = None) -> None:
        refuse_other_version(manifest, MANIFEST_VERSION)
        fields = members(manifest, "a manifest", version=int, root=dict, policies=list, encoders=list)
        self.policies, self.encoders, self.given = list(map(_policy, fields["policies"])), fields["encoders"], given
        self.count = 0
        self.root = self._node(fields["root"], 0)
        self._number_leaves()
        count = len(self.numbers) if count is None else count
        if sorted(self.numbers) != list(range(count)):
            if len(set(self.numbers)) != len(self.numbers):
                invalid("its tree contains a tensor twice")
            invalid(f"its tree does not contain each of the {count} tensors exactly once")

    @property
    def names(self) -> dict[str, Any]:
        """The keys of the tree as a nested dict."""
        return _names_in(self.root)

    def keep(self, paths: Sequence[Path], owner: str) -> Reader:
        """A reader of only the values at these paths.

        Raises ``KeyError`` for a missing path; the message names ``owner``.
        """
        for path in paths:
            if not holds(self.root, path):
                raise missing_key(self.names, path if len(path) != 1 else path[0], owner)
        kept = copy(self)
        kept.root = _kept(self.root, paths)
        kept._number_leaves()
        return kept

    def _number_leaves(self) -> None:
        leaves = list(_leaves_of(self.root, (), set()))
        self.paths, self.numbers = [path for path, _ in leaves], [number for _, number in leaves]

    def build(
        self,
        cls: Any,
        leaf: Callable[[int], Any],
        device: torch.device | None,
        trusted: bool = True,
        pickled: tuple[Iterator[Any], Sequence[Any]] | None = None,
    ) -> TreeDict[Any]:
        """Build the dict. The device of every dict in the tree is set to ``device``. Does not validate the values.

        Args:
            cls: the class of the dict. A nested dict gets the class that the class of its parent declares for the key,
                or else the class of its parent. A class with its own options keeps them, and takes only the encoders.
                Its options hold for the dicts nested in it too, unless their class has options.
            leaf: returns the tensor or object with a number.
            trusted: False: validate the ragged fields. Raises ``ValueError`` that names the field.
            pickled: from a pickle: the classes of the nested dicts in the order of the tree, and the entries of the
                encoders. Then the dicts get the policies of the manifest unchanged.
        """
        classes, encoders = pickled or (None, self.encoders)
        return _Builder(self, leaf, device, trusted, classes, encoders).dict_of(self.root, cls, ())

    def _node(self, node: Any, depth: int) -> Node:
        if depth >= DEPTH:
            invalid(f"it is nested {DEPTH} levels deep or more")
        self.count += 1
        items: dict[str, Any] = {}
        for item in members(node, "a dict", policy=int, items=list)["items"]:
            key, value = item if type(item) is list and len(item) == 2 else (None, None)
            if type(key) is not str:
                invalid("an item of a dict is not a pair of key and value")
            if key in items:
                invalid("a dict has a key twice")
            if type(value) is int:
                items[key] = value
            elif type(value) is dict:
                is_kept = list(value) == ["kept"]
                items[key] = KeptNode(value["kept"]) if is_kept else self._node(value, depth + 1)
            elif type(value) is list:
                items[key] = _ragged(key, value)
            else:
                invalid(f"{key!r} is neither a tensor nor a dict")
        return Node(node["policy"], items)


def _ragged(key: str, entry: list[Any]) -> RaggedNode:
    kinds = list(map(type, entry))
    if kinds not in ([int, int, int], [int, int, NoneType]) or min(entry[:2]) < 0 or (entry[2] or 0) < 0:
        invalid(f"{key!r} is not described as a ragged field: by the numbers of its tensors and its longest row")
    return RaggedNode(*entry)


def _leaves_of(node: Node, at: Path, offsets: set[int]) -> Iterator[tuple[Path, int]]:
    """The path and the number of each leaf, in the order of the tree. ``offsets``: of the leaves before this node."""
    for key, one in node.items():
        if type(one) is int:
            yield (*at, key), one
        elif type(one) is Node:
            yield from _leaves_of(one, (*at, key), offsets)
        elif type(one) is RaggedNode:
            yield (*at, key, "values"), one.values
            if one.offsets not in offsets:
                offsets.add(one.offsets)
                yield (*at, key, "offsets"), one.offsets


@lru_cache(maxsize=64)  # every dict of a stream has the same few manifests
def read_text(text: str) -> Reader:
    """The reader of `Outline.text`. Nothing changes a reader, so calls share it."""
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidManifest(f"its manifest: {error}") from error
    return Reader(manifest, None)


def _policy(entry: Any) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """A validated policy: the number of the encoder of each key, that of the default encoder or None, the options."""
    options: dict[str, Any] = dict(entry) if type(entry) is dict else {}
    numbers = {name: options.pop(name) for name in ("encoders", "default") if name in options}
    fields = members(numbers, "a policy", encoders=dict, default=object)
    try:
        return fields["encoders"], fields["default"], options_from_json(options)
    except (TypeError, ValueError) as error:
        raise InvalidManifest(str(error)) from error


@dataclass(eq=False)
class _Builder:
    """Builds the dicts of a `Reader`. Each policy and each encoder is read when a dict needs it, once."""

    _reader: Reader
    _leaf: Callable[[int], Any]
    _device: torch.device | None
    _trusted: bool
    _classes: Iterator[Any] | None
    _encoders: Sequence[Any]
    _known: dict[int, Policy] = field(default_factory=dict)
    _merged: dict[tuple[int, Any], Policy] = field(default_factory=dict)
    _lengths: dict[int, Lengths] = field(default_factory=dict)
    """By the number of the offsets."""
    _made: dict[int, StringEncoder] = field(default_factory=dict)

    def dict_of(self, node: Node, cls: Any, at: Path, outer: Any = None) -> TreeDict[Any]:
        """The dict of a node, of class ``cls``. ``outer``: the class around it whose options hold for it, or None."""
        items: dict[str, Any] = {}
        outer = cls if cls._has_policy() else outer
        for key, one in node.items():
            if type(one) is int:
                items[key] = self._leaf(one)
            elif isinstance(one, RaggedNode):
                items[key] = self._ragged(one, (*at, key))
            elif isinstance(one, KeptNode):
                items[key] = _kept_from_json(one.form)
            else:
                items[key] = self.dict_of(one, self._nested_class(cls, key), (*at, key), outer)
        policy = self._policy(node, cls, outer)
        kept = [key for key, one in node.items() if isinstance(one, KeptNode)]
        if kept and policy.objects != "keep":
            invalid(f'{dotted((*at, kept[0]))} is a kept value; load it into a class with objects="keep"')
        return cls._new(items, self._device, policy)

    def _ragged(self, node: RaggedNode, path: Path) -> Ragged:
        if node.offsets not in self._lengths:
            self._lengths[node.offsets] = Lengths(self._leaf(node.offsets), node.longest)
        rows = Ragged._new(self._leaf(node.values), self._lengths[node.offsets])
        return rows if self._trusted else validated(rows, path)

    def _nested_class(self, cls: Any, key: str) -> Any:
        return cls._nested_class(key) or cls if self._classes is None else next(self._classes)

    def _policy(self, node: Node, cls: Any, outer: Any) -> Policy:
        number = node.policy
        if self._classes is not None and number == OF_ITS_CLASS:
            return cls._class_policy
        if number not in self._known:
            self._known[number] = self._read(*_entry_at(self._reader.policies, number, "policy"))
        policy = self._known[number]
        if self._classes is not None or outer is None:
            return policy
        if (number, outer) not in self._merged:  # merged once for all dicts that share the policy
            self._merged[number, outer] = outer._class_policy.with_encoders(policy.encoders)
        return self._merged[number, outer].with_default_of(policy, node)

    def _read(self, numbers: Mapping[str, Any], default_number: Any, options: Mapping[str, Any]) -> Policy:
        given = self._reader.given
        own = Policy().override(given)
        encoders, default = dict(own.encoders), own.default_encoder
        if given is None or isinstance(given, Mapping):
            encoders |= {key: self._encoder(n, key) for key, n in numbers.items() if key not in own.encoders}
            default = default if default_number is None else self._encoder(default_number, "*")
        return Policy(encoders, default).override(**options)

    def _encoder(self, number: Any, key: str) -> StringEncoder:
        entry = _entry_at(self._encoders, number, "encoder")
        if number not in self._made:
            made = _make_encoder(entry, key) if isinstance(entry, dict) else entry
            if not isinstance(made, StringEncoder):
                invalid(f"its entry for {key!r} is not an encoder")
            self._made[number] = made
        return self._made[number]


_TENSOR = torch.empty(0, device="meta")
_RAGGED = Ragged._new(_TENSOR, Lengths(_TENSOR))
"""Placeholders for any tensor and any ragged field."""


def _names_in(node: Node) -> dict[str, Any]:
    """The keys of a node as a nested dict."""
    return {
        key: _names_in(one) if isinstance(one, Node) else _RAGGED if isinstance(one, RaggedNode) else _TENSOR
        for key, one in node.items()
    }


def _make_encoder(entry: dict[Any, Any], key: str) -> StringEncoder:
    if runs_code(entry):
        invalid(
            f"{key!r} was encoded with a {entry['name']}; load does not build it, since that would run code that "
            f"the file names; pass it: load(..., encoders={{{key!r}: ...}})"
        )
    try:
        return encoder_from_json(entry)
    except (ValueError, OverflowError, RecursionError) as error:
        raise InvalidManifest(f"the encoder of {key!r}: {str(error)[:1000]}") from error


def paths_of(manifest: Manifest) -> list[Path]:
    """The paths of the tensors of a valid manifest, in the order of the tree."""
    return Reader(manifest, None).paths


def without(manifest: Manifest, path: Path) -> tuple[Manifest, list[int]]:
    """A valid manifest without the values at ``path``, and without the dicts that would be empty then.

    Returns it, and the old number of each leaf that it has. The policies lose the encoders of keys that are in no dict
    any more.
    """
    reader = Reader(manifest, None)
    others: list[Path] = []
    node = reader.root
    for depth, part in enumerate(path):
        others += [(*path[:depth], key) for key in node if key != part]
        node = node[part]
    reader = reader.keep(others, "this manifest")
    keys: set[str] = set()
    root = _to_json(reader.root, {old: new for new, old in enumerate(reader.numbers)}, keys)
    policies = [
        {**policy, "encoders": {key: number for key, number in policy["encoders"].items() if key in keys}}
        for policy in manifest["policies"]
    ]
    return {**manifest, "root": root, "policies": policies}, reader.numbers


def _to_json(node: Node, numbers: Mapping[int, int], keys: set[str]) -> dict[str, Any]:
    """The JSON form of a node, with other ``numbers`` for its leaves. Its keys go to ``keys``."""
    keys.update(node)
    items: list[Any] = []
    for key, one in node.items():
        if isinstance(one, RaggedNode):
            items.append([key, [numbers[one.values], numbers[one.offsets], one.longest]])
        elif isinstance(one, KeptNode):
            items.append([key, {"kept": one.form}])
        else:
            items.append([key, numbers[one] if type(one) is int else _to_json(one, numbers, keys)])
    return {"policy": node.policy, "items": items}


def _kept(node: Node, paths: Sequence[Path]) -> Node:
    """A node with only the values at these paths, which it has."""
    asked: dict[str, list[Path]] = {}
    for path in paths:
        asked.setdefault(path[0], []).append(path[1:])
    items = {
        key: value if () in asked[key] else _kept(value, asked[key]) for key, value in node.items() if key in asked
    }
    return Node(node.policy, items)


def refuse_other_version(data: Any, version: int, name: str = "it") -> None:
    """Raise `InvalidManifest` unless ``data`` is a dict of this version. ``name``: what has no version otherwise."""
    found = data.get("version") if isinstance(data, dict) else None
    if type(found) is not int:
        invalid(f"{name} has no version")
    if found != version:
        invalid(f"its version is {found}, and this package reads version {version}; update the package")


def invalid(reason: str) -> NoReturn:
    """Raise `InvalidManifest`."""
    raise InvalidManifest(reason)


def _entry_at(entries: Sequence[Any], number: Any, what: str) -> Any:
    """The entry with a number. Raises `InvalidManifest` if there is none."""
    if type(number) is not int or not 0 <= number < len(entries):
        invalid(f"it has no {what} {shown(number)}")
    return entries[number]


def members(value: Any, what: str, **kinds: type) -> dict[str, Any]:
    """``value``, validated: a dict with exactly these fields, of these classes. Raises `InvalidManifest`."""
    if type(value) is not dict or set(value) != set(kinds):
        invalid(f"expected {what} with the fields {', '.join(kinds)}")
    for name, kind in kinds.items():
        if kind is not object and type(value[name]) is not kind:
            invalid(f"{name!r} of {what} is not a {kind.__name__}")
    return value
