"""The manifest: the structure of a dict as JSON data. Files, tables, messages, pickles and ``torch.save`` contain it.

A manifest contains the tree, the policies and the encoders of the dicts. A number replaces each tensor and each kept
object. A manifest names registered encoders, but no class and no function. It may be damaged or forged, so `Reader`
validates every part of a manifest before it uses the part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple, NoReturn

import torch

from .._encoders.builtin import Utf8
from .._encoders.protocol import StringEncoder, encoder_from_json, encoder_to_json, runs_code
from .._errors import DEPTH, Path, dotted, refuse_deeper
from .missing import missing_key
from .policy import Encoders, Policy, options_from_json
from .tree import TreeDict, ragged_class, reduces_itself
from .walk import only_tensors

MANIFEST_VERSION = 1
"""The version of the format of a manifest."""
OF_ITS_CLASS = -1
"""Replaces the number of a policy if the dict has the policy of its class."""
_HERE = object()
"""Marks the end of a path in a tree of keys."""

Manifest = dict[str, Any]
Leaves = list[tuple[Path, Any]]
"""The leaves of a tree, in its order: the path and the value of each leaf."""
Instead = Callable[[StringEncoder, "TypeError | None"], Any]
"""Returns the entry of an encoder without a safe JSON form. The second argument is the error of its `to_json`, or
None if its JSON form runs code."""
Shape = tuple[Any, ...]
"""A dict without its values: the number of its policy, and its items. An item is a key, or the key and the `Shape` of a
nested dict. A ragged field has a third entry: the length of its longest row, or None."""


class InvalidManifest(ValueError):
    """The reason why data is not a valid manifest. The caller adds whether the data is a file or a message."""


def describe(d: TreeDict[Any], instead: Instead) -> tuple[Manifest, Leaves]:
    """Build the manifest of a dict. Returns the manifest, and the leaves in the order of their numbers.

    ``instead``: returns the entry of an encoder that has no JSON form, or whose JSON form runs code. If the function
    raises ``TypeError``, the path is added to the error. Raises ``TooDeep``.
    """
    made = Outline(d, lambda encoder: encoder_entry(encoder, instead))
    manifest = {
        "version": MANIFEST_VERSION,
        "root": _tree(made.shape, count()),
        "policies": made.policies.entries,
        "encoders": made.encoders.entries,
    }
    return manifest, list(zip(paths_of(manifest), made.values, strict=True))


class Outline:
    """The shape of a tree, its policies, its encoders, its leaves and its dicts.

    Args:
        entry: returns the entry of an encoder in the manifest.
        pickled: a dict with the policy of its class gets `OF_ITS_CLASS`. A nested dict with a reduction of its own is a
            leaf.

    Raises ``TooDeep``: pytree can make a tree that is too deep.
    """

    def __init__(self, d: TreeDict[Any], entry: Callable[[StringEncoder], Any], pickled: bool = False) -> None:
        self._entry, self._pickled = entry, pickled
        self.values: list[Any] = []
        self.nodes: list[TreeDict[Any]] = []
        self.policies, self.encoders = _Numbering(), _Numbering()
        self.shape = self._shape(d, ())

    def text(self) -> str:
        """The manifest as text, without the entries of the encoders."""
        return with_encoders(self.head())

    def head(self) -> str:
        """The text of the manifest up to the entries of the encoders."""
        return _head(self.shape, json.dumps(self.policies.entries) if self.policies.entries else "[]")

    def _shape(self, one: TreeDict[Any], at: Path) -> Shape:
        refuse_deeper(at)
        self.nodes.append(one)
        items: tuple[Any, ...] = tuple(one)
        if only_tensors(one.values()):
            self.values += one.values()
        else:
            items = tuple([self._item(key, value, at) for key, value in one.items()])
        policy = one._policy
        own = self._pickled and policy is one._class_policy
        number = OF_ITS_CLASS if own else self.policies.number(policy, lambda: self._policy(policy, at))
        longest: Any = one
        return (number, items, longest._max_length) if one._is_ragged else (number, items)

    def _item(self, key: str, value: Any, at: Path) -> Any:
        if isinstance(value, TreeDict) and not (self._pickled and reduces_itself(value)):
            return key, self._shape(value, (*at, key))
        self.values.append(value)
        return key

    def _policy(self, one: Policy, at: Path) -> dict[str, Any]:
        default = one.default_encoder
        return {
            "encoders": {_plain_str(key): self._encoder(given, (*at, key)) for key, given in one.encoders.items()},
            "default": None if default == Utf8() else self._encoder(default, (*at, "*")),
            **one.options_to_json(),
        }

    def _encoder(self, one: StringEncoder, path: Path) -> int:
        try:
            return self.encoders.number(one, lambda: self._entry(one))
        except TypeError as error:
            raise TypeError(f"{dotted(path)}: {error}") from error


@lru_cache(maxsize=64)  # a program mostly pickles and sends dicts of the same few shapes
def _head(shape: Shape, policies: str) -> str:
    root = json.dumps(_tree(shape, count()), separators=(",", ":"))
    return f'{{"version":{MANIFEST_VERSION},"root":{root},"policies":{policies},"encoders":'


def with_encoders(head: str, entries: Sequence[str] = ()) -> str:
    """The text of a manifest from `Outline.head` and the JSON texts of the entries of its encoders."""
    return f"{head}[{','.join(entries)}]}}"


def _tree(shape: Shape, numbers: Iterator[int]) -> dict[str, Any]:
    """The JSON form of a shape. ``numbers``: the numbers of its leaves."""
    items: list[Any] = []
    for one in shape[1]:
        key, value = (one[0], _tree(one[1], numbers)) if type(one) is tuple else (one, next(numbers))
        items.append([_plain_str(key), value])
    return {"policy": shape[0], "items": items, **({"max_length": shape[2]} if len(shape) > 2 else {})}


def encoder_entry(encoder: StringEncoder, instead: Instead) -> Any:
    """The JSON form of an encoder; the result of ``instead`` if it has no safe JSON form."""
    if encoder.runs_code:
        return instead(encoder, None)
    try:
        return encoder_to_json(encoder)
    except TypeError as error:
        return instead(encoder, error)


def _plain_str(key: str) -> str:
    """The key as a plain ``str``. Its class may be a subclass of ``str``, such as an enum or a NumPy string."""
    return key if type(key) is str else str.__str__(key)


class _Numbering:
    """Numbers objects, and lists the entry of each. Equal objects share one entry."""

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self._seen: list[Any] = []

    def number(self, one: Any, entry: Callable[[], Any]) -> int:
        for i, other in enumerate(self._seen):
            if one is other or one == other:
                return i
        self.entries.append(entry())
        self._seen.append(one)
        return len(self._seen) - 1


class Node(NamedTuple):
    """A validated dict of a manifest. Each value is the number of a leaf, or a node."""

    policy: int
    keys: tuple[str, ...]
    values: tuple[Any, ...]
    flat: bool
    """Whether no value is a node."""
    ragged: dict[str, int | None]
    """``max_length`` of a ragged field: the length of its longest row, or None. Any other dict has no entry."""


class _PolicyEntry(NamedTuple):
    """A validated policy of a manifest."""

    encoders: dict[str, Any]
    """The number of the encoder of each key."""
    default: Any
    """The number of the default encoder; None for ``Utf8()``."""
    options: dict[str, Any]


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
    """The numbers of the leaves, in the order of the tree."""
    count: int
    """The number of dicts in the tree."""

    def __init__(self, manifest: Any, count: int | None, given: Encoders | None = None) -> None:
        version = manifest.get("version") if isinstance(manifest, dict) else None
        if type(version) is not int:
            invalid("it has no version")
        if version != MANIFEST_VERSION:
            invalid(f"its version is {version}, and this package reads version {MANIFEST_VERSION}; update the package")
        fields = _fields(manifest, "a manifest", version=int, root=dict, policies=list, encoders=list)
        self._policies, self._encoders, self._given = list(map(_policy, fields["policies"])), fields["encoders"], given
        self.numbers, self.count = [], 0
        self._root = self._node(fields["root"], 0)
        count = len(self.numbers) if count is None else count
        if sorted(self.numbers) != list(range(count)):
            invalid(f"its tree does not contain each of the {count} tensors exactly once")

    def keep(self, paths: Sequence[Path], owner: str) -> None:
        """Keep only the values at these paths. Raises ``KeyError`` for a missing path; the message names ``owner``."""
        asked: dict[Any, Any] = {}
        for path in paths:
            inside = asked
            for key in path:
                inside = inside.setdefault(key, {})
            inside[_HERE] = {}
        found: set[Path] = set()
        kept = _kept(self._root, asked, False, (), found)
        for path in paths:
            if path not in found:
                raise missing_key(_names_in(self._root), path if len(path) != 1 else next(iter(path)), owner)
        self.numbers, self.count = [], 0
        self._root = self._node(kept, 0)

    def build(
        self,
        choose: Callable[[Any, str], Any],
        leaf: Callable[[int], Any],
        device: torch.device | None,
        encoders: Sequence[Any] | None = None,
        trusted: bool = True,
    ) -> TreeDict[Any]:
        """Build the dict. The device of every dict in the tree is set to ``device``. Does not validate the values.

        Args:
            choose: returns the class of a dict, given the class of its parent (None for the root) and its key. It is
                called in the order of the tree.
            leaf: returns the tensor or object with a number.
            encoders: the entries of the encoders, from a pickle. Then the dicts get the policies of the manifest
                unchanged. If None, a class with its own options keeps its options and takes only the encoders.
            trusted: whether ragged fields get the ``max_length`` of the manifest. Else `validate_ragged` finds it.
        """
        pickled = encoders is not None
        policies = _Policies(self._policies, encoders if pickled else self._encoders, self._given, pickled)
        return _build(self._root, choose(None, ""), choose, leaf, device, policies, trusted)

    def _node(self, node: Any, depth: int) -> Node:
        if depth >= DEPTH:
            invalid(f"it is nested {DEPTH} levels deep or more")
        self.count += 1
        items, ragged = _items(node)
        values: list[Any] = []
        for _, value in items:
            if type(value) is int:
                self.numbers.append(value)
                values.append(value)
            else:
                values.append(self._node(value, depth + 1))
        flat = not any(type(value) is Node for value in values)
        return Node(node["policy"], tuple([key for key, _ in items]), tuple(values), flat, ragged)


@lru_cache(maxsize=64)  # a program mostly receives dicts of the same few shapes
def read_text(text: str) -> Reader:
    """The reader of `Outline.text`. Do not change it."""
    try:
        return Reader(json.loads(text), None)
    except InvalidManifest:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidManifest(f"its manifest: {error}") from error


def _policy(entry: Any) -> _PolicyEntry:
    options: dict[str, Any] = dict(entry) if type(entry) is dict else {}
    numbers = {name: options.pop(name) for name in ("encoders", "default") if name in options}
    try:
        return _PolicyEntry(
            **_fields(numbers, "a policy", encoders=dict, default=object), options=options_from_json(options)
        )
    except (TypeError, ValueError) as error:
        raise InvalidManifest(str(error)) from error


def _build(
    node: Node,
    cls: Any,
    choose: Callable[[Any, str], Any],
    leaf: Callable[[int], Any],
    device: torch.device | None,
    policies: _Policies,
    trusted: bool,
) -> TreeDict[Any]:
    if node.ragged and not cls._is_ragged:
        cls = ragged_class()
    policy = policies.of(node, cls)
    if node.flat:
        out = cls._new(zip(node.keys, map(leaf, node.values), strict=True), device, policy)
        if node.ragged and trusted:
            out._max_length = node.ragged["max_length"]
        return out
    items = {
        key: _build(value, choose(cls, key), choose, leaf, device, policies, trusted)
        if type(value) is Node
        else leaf(value)
        for key, value in zip(node.keys, node.values, strict=True)
    }
    return cls._new(items, device, policy)


class _Policies:
    """The policies of a manifest. Each is read when a dict needs it, once."""

    def __init__(
        self, policies: list[_PolicyEntry], encoders: Sequence[Any], given: Encoders | None, pickled: bool
    ) -> None:
        self._policies, self._encoders, self._given, self._pickled = policies, encoders, given, pickled
        self._known: dict[int, Policy] = {}
        self._merged: dict[tuple[int, Any], Policy] = {}
        self._made: dict[int, StringEncoder] = {}

    def of(self, node: Node, cls: Any) -> Policy:
        """The policy of a dict of class ``cls``."""
        number = node.policy
        if self._pickled and number == OF_ITS_CLASS:
            return cls._class_policy
        if number not in self._known:
            self._known[number] = self._read(_at(self._policies, number, "policy"))
        policy = self._known[number]
        if self._pickled or not cls._has_policy():
            return policy
        if (number, cls) not in self._merged:  # merged once for all dicts that share the policy
            self._merged[number, cls] = cls._class_policy.with_encoders(policy.encoders)
        return self._merged[number, cls].with_default_of(policy, node.keys)

    def _read(self, entry: _PolicyEntry) -> Policy:
        own = Policy() if self._given is None else Policy().override(self._given)
        encoders, default = dict(own.encoders), own.default_encoder
        if self._given is None or isinstance(self._given, Mapping):
            encoders |= {key: self._encoder(n, key) for key, n in entry.encoders.items() if key not in own.encoders}
            default = default if entry.default is None else self._encoder(entry.default, "*")
        return Policy(encoders, default).override(**entry.options)

    def _encoder(self, number: Any, key: str) -> StringEncoder:
        entry = _at(self._encoders, number, "encoder")
        if number not in self._made:
            made = _make_encoder(entry, key) if isinstance(entry, dict) else entry
            if not isinstance(made, StringEncoder):
                invalid(f"its entry for {key!r} is not an encoder")
            self._made[number] = made
        return self._made[number]


_TENSOR = torch.empty(0, device="meta")
"""Placeholder for any tensor."""


def _names_in(node: Node) -> dict[str, Any]:
    """The keys of a node as a nested dict."""
    pairs = zip(node.keys, node.values, strict=True)
    return {key: _names_in(value) if type(value) is Node else _TENSOR for key, value in pairs}


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


def choose_from(cls: Any) -> Callable[[Any, str], Any]:
    """The argument ``choose`` of `Reader.build` for a root of class ``cls``.

    A nested dict gets the class that the class of its parent declares for the key. If no class is declared, the nested
    dict gets the class of its parent.
    """

    def choose(parent: Any, key: str) -> Any:
        return cls if parent is None else parent._nested_class(key) or parent

    return choose


def paths_of(manifest: Manifest) -> list[Path]:
    """The paths of the tensors of a valid manifest, in the order of the tree."""

    return list(_paths_in(manifest["root"], ()))


def _paths_in(node: Any, at: Path) -> Iterator[Path]:
    for key, value in node["items"]:
        if type(value) is int:
            yield (*at, key)
        else:
            yield from _paths_in(value, (*at, key))


def _kept(node: Node, asked: Mapping[Any, Any], everything: bool, at: Path, found: set[Path]) -> dict[str, Any]:
    """The JSON form of a node with only the items in ``asked``, or with all items if ``everything`` is True.

    ``asked`` is a tree of keys; `_HERE` marks the end of a path. The paths that end in this node are added to
    ``found``.
    """
    items: list[Any] = []
    for key, value in zip(node.keys, node.values, strict=True):
        inside = asked.get(key, {})
        if not (inside or everything):
            continue
        path = (*at, key)
        if _HERE in inside:
            found.add(path)
        nested = type(value) is Node
        items.append([key, _kept(value, inside, everything or _HERE in inside, path, found) if nested else value])
    whole = len(items) == len(node.keys)  # a part of a ragged field is not ragged
    return {"policy": node.policy, "items": items, **(node.ragged if whole else {})}


def _cut(value: object) -> str:
    """A value from a file for a message, shortened."""
    return repr(value)[:60] if isinstance(value, (str, int, float)) else f"a {type(value).__name__}"


def invalid(reason: str) -> NoReturn:
    """Raise `InvalidManifest`."""
    raise InvalidManifest(reason)


def _at(entries: Sequence[Any], number: Any, what: str) -> Any:
    """The entry with a number. Raises `InvalidManifest` if there is none."""
    if type(number) is not int or not 0 <= number < len(entries):
        invalid(f"it has no {what} {_cut(number)}")
    return entries[number]


def _fields(value: Any, what: str, **kinds: type) -> dict[str, Any]:
    """``value``, validated: a dict with exactly these fields, of these classes. Raises `InvalidManifest`."""
    if type(value) is not dict or set(value) != set(kinds):
        invalid(f"expected {what} with the fields {', '.join(kinds)}")
    fields = value
    for name, kind in kinds.items():
        if kind is not object and type(fields[name]) is not kind:
            invalid(f"{name!r} of {what} is not a {kind.__name__}")
    return fields


def _items(node: Any) -> tuple[list[tuple[str, Any]], dict[str, int | None]]:
    """The validated items of a node, and `Node.ragged`. Raises `InvalidManifest`."""
    ragged: dict[str, int | None] = {}
    if type(node) is dict and "max_length" in node:
        node = dict(node)
        ragged["max_length"] = longest = node.pop("max_length")
        if longest is not None and not (type(longest) is int and longest >= 0):
            invalid(f"'max_length' of a ragged field is {_cut(longest)}")
    items = _fields(node, "a dict", policy=int, items=list)["items"]
    for item in items:
        pair = item if type(item) is list else []
        if len(pair) != 2 or type(pair[0]) is not str:
            invalid("an item of a dict is not a pair of key and value")
        key, value = pair
        if type(value) not in (int, dict):
            invalid(f"{key!r} is neither a tensor nor a dict")
    if len({key for key, _ in items}) != len(items):
        invalid("a dict has a key twice")
    return items, ragged
