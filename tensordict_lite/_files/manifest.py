"""The manifest: the structure of a dict as JSON data, for files and messages.

A manifest contains the tree, the policies and the encoders of the dicts. A number replaces each tensor. A manifest
names registered encoders, but no class and no function. A file may be damaged or forged, so `Reader` validates every
part of a manifest before it uses the part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from .._encoders.builtin import Utf8
from .._encoders.protocol import StringEncoder, encoder_from_json, encoder_to_json, runs_code
from .._errors import DEPTH, Path, dotted, refuse_deeper
from .._tree.missing import missing_key
from .._tree.policy import Encoders, Policy, options_from_json
from .._tree.tree import TreeDict

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


class InvalidManifest(ValueError):
    """The reason why data is not a valid manifest. The caller adds whether the data is a file or a message."""


def describe(d: TreeDict[Any], instead: Instead, own: bool) -> tuple[Manifest, Leaves, list[TreeDict[Any]]]:
    """Build the manifest of a dict. Returns the manifest, the leaves in the order of their numbers, and all dicts.

    Args:
        instead: returns the entry of an encoder that has no JSON form, or whose JSON form runs code. If the function
            raises ``TypeError``, the path is added to the error.
        own: write `OF_ITS_CLASS` in place of a policy that is the policy of the dict's class.

    Raises ``TooDeep``.
    """
    made = _Description(instead, own)
    root = made.node(d, ())
    policies, encoders = made.policies.entries, made.encoders.entries
    return (
        {"version": MANIFEST_VERSION, "root": root, "policies": policies, "encoders": encoders},
        made.leaves,
        made.nodes,
    )


class _Description:
    """What `describe` collects. Not closures: one that calls itself is a reference cycle, which would keep tensors."""

    def __init__(self, instead: Instead, own: bool) -> None:
        self.instead, self.own = instead, own
        self.leaves: Leaves = []
        self.nodes: list[TreeDict[Any]] = []
        self.policies, self.encoders = _Numbering(), _Numbering()

    def node(self, one: TreeDict[Any], at: Path) -> dict[str, Any]:
        refuse_deeper(at)  # pytree can make a tree that is too deep
        self.nodes.append(one)
        items: list[Any] = []
        for key, value in one.items():
            if isinstance(value, TreeDict):
                items.append([_plain_str(key), self.node(value, (*at, key))])
            else:
                items.append([_plain_str(key), len(self.leaves)])
                self.leaves.append(((*at, key), value))
        policy = one._policy
        if self.own and policy is one._class_policy:
            return {"policy": OF_ITS_CLASS, "items": items}
        return {"policy": self.policies.number(policy, lambda: self._policy(policy, at)), "items": items}

    def _policy(self, one: Policy, at: Path) -> dict[str, Any]:
        default = one.default_encoder
        return {
            "encoders": {_plain_str(key): self._encoder(given, (*at, key)) for key, given in one.encoders.items()},
            "default": None if default == Utf8() else self._encoder(default, (*at, "*")),
            **one.options_to_json(),
        }

    def _encoder(self, one: StringEncoder, path: Path) -> int:
        try:
            return self.encoders.number(one, lambda: _encoder_entry(one, self.instead))
        except TypeError as error:
            raise TypeError(f"{dotted(path)}: {error}") from error


def _encoder_entry(encoder: StringEncoder, instead: Instead) -> Any:
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


class Reader:
    """Validate and read a manifest from a file or from another process.

    Args:
        manifest: the data.
        count: the number of tensors and objects. The manifest must contain each number below ``count`` exactly once.
        given: encoders of the caller for some keys or for all keys. They replace the encoders in the manifest, and the
            replaced encoders are not read.

    The constructor and the methods raise `InvalidManifest` if the data is not a valid manifest.
    """

    numbers: list[int]
    """The numbers of the tensors, in the order of the tree."""
    count: int
    """The number of dicts in the tree."""

    def __init__(self, manifest: Any, count: int, given: Encoders | None = None) -> None:
        version = manifest.get("version") if isinstance(manifest, dict) else None
        if type(version) is not int:
            invalid("it has no version")
        if version != MANIFEST_VERSION:
            invalid(f"its version is {version}, and this package reads version {MANIFEST_VERSION}; update the package")
        self._manifest = _fields(manifest, "a manifest", version=int, root=dict, policies=list, encoders=list)
        self._given = Policy() if given is None else Policy().override(given)
        self._all_given = given is not None and not isinstance(given, Mapping)
        self._known: dict[int, Policy] = {}
        self._merged: dict[tuple[int, Any], Policy] = {}
        self._encoders: dict[int, StringEncoder] = {}
        self._root = self._manifest["root"]
        self.numbers, self.count = [], 0
        _refuse_sharing(manifest, set())
        self._walk(self._root, 0)
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
        self._root, self.numbers, self.count = kept, [], 0
        self._walk(kept, 0)

    def build(
        self,
        choose: Callable[[Any, str], Any],
        leaf: Callable[[int], Any],
        device: torch.device | None,
        own: bool,
    ) -> TreeDict[Any]:
        """Build the dict. The device of every dict in the tree is set to ``device``. Does not validate the values.

        Args:
            choose: returns the class of a dict, given the class of its parent (None for the root) and its key. It is
                called in the order of the tree.
            leaf: returns the tensor or object with a number.
            own: use the policies of the manifest unchanged. If False, a class with its own options keeps its options
                and takes only the encoders from the manifest.

        Raises `InvalidManifest` for an object in a dict whose policy does not allow objects.
        """
        return self._build(self._root, choose(None, ""), choose, leaf, device, own)

    def _walk(self, node: Any, depth: int) -> None:
        if depth >= DEPTH:
            invalid(f"it is nested {DEPTH} levels deep or more")
        self.count += 1
        for _, value in _items(node):
            if type(value) is int:
                self.numbers.append(value)
            else:
                self._walk(value, depth + 1)

    def _build(
        self,
        node: Any,
        cls: Any,
        choose: Callable[[Any, str], Any],
        leaf: Callable[[int], Any],
        device: torch.device | None,
        own: bool,
    ) -> TreeDict[Any]:
        listed: list[tuple[str, Any]] = node["items"]
        policy = self._policy(node["policy"], cls, own, (key for key, _ in listed))
        items: dict[str, Any] = {}
        for key, value in listed:
            if type(value) is int:
                items[key] = found = leaf(value)
                if policy.objects != "keep" and not isinstance(found, Tensor):
                    invalid(f"{key!r} is an object, but its dict keeps no objects")
            else:
                items[key] = self._build(value, choose(cls, key), choose, leaf, device, own)
        return cls._new(items, device, policy)

    def _policy(self, number: int, cls: Any, own: bool, keys: Iterable[str]) -> Policy:
        if own and number == OF_ITS_CLASS:
            return cls._class_policy
        entry = _at(self._manifest["policies"], number, "policy")
        if number not in self._known:
            self._known[number] = self._read_policy(entry)
        policy = self._known[number]
        if own or not cls._has_policy():
            return policy
        if (number, cls) not in self._merged:  # merged once for all dicts that share the policy
            self._merged[number, cls] = cls._class_policy.with_encoders(policy.encoders)
        return self._merged[number, cls].with_default_of(policy, keys)

    def _read_policy(self, entry: Any) -> Policy:
        options: dict[str, Any] = dict(entry) if type(entry) is dict else {}
        entry = {name: options.pop(name) for name in ("encoders", "default") if name in options}
        entry = _fields(entry, "a policy", encoders=dict, default=object)
        given = self._given.encoders
        encoders = dict(given)
        if self._all_given:
            default = self._given.default_encoder
            encoders = dict.fromkeys(entry["encoders"], default)
        else:
            encoders |= {key: self._encoder(n, key) for key, n in entry["encoders"].items() if key not in given}
            default = None if entry["default"] is None else self._encoder(entry["default"], "*")
        try:
            policy = Policy().override(encoders or None, **options_from_json(options))
            return policy if default is None else policy.override(default)
        except (TypeError, ValueError) as error:
            raise InvalidManifest(str(error)) from error

    def _encoder(self, number: Any, key: str) -> StringEncoder:
        entry = _at(self._manifest["encoders"], number, "encoder")
        if number not in self._encoders:
            made = _make_encoder(entry, key) if isinstance(entry, dict) else entry
            if not isinstance(made, StringEncoder):
                invalid(f"its entry for {key!r} is not an encoder")
            self._encoders[number] = made
        return self._encoders[number]


_TENSOR = torch.empty(0, device="meta")
"""Placeholder for any tensor."""


def _names_in(node: Any) -> dict[str, Any]:
    """The keys of a node as a nested dict."""
    return {key: _TENSOR if type(value) is int else _names_in(value) for key, value in node["items"]}


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


def _kept(node: Any, asked: Mapping[Any, Any], everything: bool, at: Path, found: set[Path]) -> Any:
    """A node of the manifest with only the items in ``asked``, or with all items if ``everything`` is True.

    ``asked`` is a tree of keys; `_HERE` marks the end of a path. The paths that end in this node are added to
    ``found``.
    """
    items: list[Any] = []
    for key, value in node["items"]:
        inside = asked.get(key)
        if inside is None:
            if everything:
                items.append([key, value])
            continue
        path = (*at, key)
        if _HERE in inside:
            found.add(path)
        nested = type(value) is dict
        items.append([key, _kept(value, inside, everything or _HERE in inside, path, found) if nested else value])
    return {**node, "items": items}


def _refuse_sharing(value: Any, seen: set[int], depth: int = 0) -> None:
    """Raise `InvalidManifest` if a list or dict occurs twice, as a forged pickle allows.

    A walk over such data could take exponential time.
    """
    if type(value) not in (list, dict):
        return
    if id(value) in seen:
        invalid("a list or dict occurs twice in it")
    if depth > 4 * DEPTH:  # each dict takes three levels, and policies a few
        invalid(f"it is nested {DEPTH} levels deep or more")
    seen.add(id(value))
    inside = value if type(value) is list else list(value.values())
    for one in inside:
        _refuse_sharing(one, seen, depth + 1)


def _cut(value: object) -> str:
    """A value from a file for a message, shortened."""
    return repr(value)[:60] if isinstance(value, (str, int, float)) else f"a {type(value).__name__}"


def invalid(reason: str) -> NoReturn:
    """Raise `InvalidManifest`."""
    raise InvalidManifest(reason)


def _at(entries: list[Any], number: Any, what: str) -> Any:
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


def _items(node: Any) -> list[tuple[str, Any]]:
    """The validated items of a node. Raises `InvalidManifest`."""
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
    return items
