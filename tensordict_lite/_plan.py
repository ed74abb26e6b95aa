"""A dict as plain data beside its tensors, and back: what files hold.

A plan is what JSON can say: the tree, with a number where a tensor stands, and the policies and encoders of its dicts.
It names no class and no function but the registered names of encoders. Whoever reads one, from a file that may be
damaged or forged, checks every part of it before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, cast

from ._block import DTYPES
from ._encoders import Utf8
from ._errors import DEPTH, InvalidFileError, Path, dotted, dtype_name, refuse_deeper
from ._policy import Encoders, Policy
from ._strings import StringEncoder, encoder_from_json, runs_code
from ._tree import TreeDict

VERSION = 1
OF_ITS_CLASS = -1
"""In place of a policy's number: the policy of the class."""
_DTYPES = {name: dtype for name, dtype in DTYPES.items() if dtype.is_floating_point}


Plan = dict[str, Any]
Leaves = list[tuple[Path, Any]]


def describe(
    d: TreeDict[Any], encoder: Callable[[StringEncoder], Any], own: bool
) -> tuple[Plan, Leaves, list[TreeDict[Any]]]:
    """The plan of a dict, what its numbers stand for, and its dicts, in the order in which they come.

    Args:
        encoder: what the plan has for an encoder; a ``TypeError`` of it is given the path.
        own: the policy of a class is left to the class.

    Raises ``TooDeep``.
    """
    leaves: Leaves = []
    nodes: list[TreeDict[Any]] = []
    policies, encoders = _Table(), _Table()

    def number(one: StringEncoder, path: Path) -> int:
        try:
            return encoders.number(one, lambda: encoder(one))
        except TypeError as error:
            raise TypeError(f"{dotted(path)}: {error}") from error

    def policy(one: Policy, at: Path) -> dict[str, Any]:
        default = one.default_encoder
        return {
            "encoders": {_plain(key): number(given, (*at, key)) for key, given in one.encoders.items()},
            "default": None if default == Utf8() else number(default, (*at, "*")),
            "on_mismatch": one.on_mismatch,
            "objects": one.objects,
            "dtype": None if one.dtype is None else dtype_name(one.dtype),
        }

    def node(one: TreeDict[Any], at: Path) -> dict[str, Any]:
        refuse_deeper(at)  # one that was made from within can be deeper
        nodes.append(one)
        items: list[Any] = []
        for key, value in one.items():
            if isinstance(value, TreeDict):
                items.append([_plain(key), node(cast("TreeDict[Any]", value), (*at, key))])
            else:
                items.append([_plain(key), len(leaves)])
                leaves.append(((*at, key), value))
        of_its_class = own and one._policy is one._class_policy
        given = OF_ITS_CLASS if of_its_class else policies.number(one._policy, lambda: policy(one._policy, at))
        return {"policy": given, "items": items}

    root = node(d, ())
    plan = {"version": VERSION, "root": root, "policies": policies.entries, "encoders": encoders.entries}
    return plan, leaves, nodes


def _plain(key: str) -> str:
    """A key of a class of its own, such as an enum's or NumPy's, as the string that it is."""
    return key if type(key) is str else str.__str__(key)


class _Table:
    """Entries that are made once for all that are equal, and known by their numbers."""

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
    """A plan that was read from somewhere, and is not trusted.

    Args:
        plan: the plan.
        count: how many things its numbers stand for; each must be there once.
        given: encoders that the caller has for some keys, or for all. What the plan has for them is not looked at.

    Raises ``InvalidFileError`` for what is no plan, here and in its methods.
    """

    leaves: list[tuple[Path, int]]
    """The paths of the tensors, and their numbers."""
    nodes: list[Path]
    """The paths of the dicts, in the order in which they are built."""

    def __init__(self, plan: Any, count: int, given: Encoders | None = None) -> None:
        version = cast("dict[Any, Any]", plan).get("version") if isinstance(plan, dict) else None
        if type(version) is not int:
            refuse("it has no version")
        if version != VERSION:
            refuse(f"its version is {version}, and this package reads version {VERSION}; update the package")
        self._plan = _fields(plan, "a plan", version=int, root=dict, policies=list, encoders=list)
        self._given = Policy() if given is None else Policy().override(given)
        self._all_given = given is not None and not isinstance(given, Mapping)
        self._known: dict[int, Policy] = {}
        self._encoders: dict[int, StringEncoder] = {}
        self.leaves, self.nodes = [], []
        _refuse_sharing(cast(Any, plan), set())
        self._walk(plan["root"], ())
        if sorted(number for _, number in self.leaves) != list(range(count)):
            refuse(f"its tree does not have each of the {count} tensors once")

    def build(
        self, classes: Iterator[Any], leaf: Callable[[int], Any], wanted: Callable[[Path], bool], own: bool
    ) -> TreeDict[Any]:
        """The dict, with what ``leaf`` has for the numbers at the paths that are ``wanted``; unchecked.

        Args:
            classes: of each of `nodes`, the class.
            own: the policy is that of the plan; else its encoders, with the options of the class if that has any.
        """
        return self._build(self._plan["root"], (), classes, leaf, wanted, own)

    def classes_from(self, cls: Any) -> Iterator[Any]:
        """The class of each dict, ``cls`` of the root: the one that its parent declares for it, or the parent's own."""
        known: dict[Path, Any] = {}
        for path in self.nodes:
            parent = known.get(path[:-1]) if path else None
            known[path] = cls if parent is None else parent._declared(path[-1]) or parent
            yield known[path]

    def _walk(self, node: Any, at: Path) -> None:
        if len(at) >= DEPTH:
            refuse(f"it is nested {DEPTH} levels deep or more")
        self.nodes.append(at)
        for key, value in _items(node):
            if type(value) is int:
                self.leaves.append(((*at, key), value))
            else:
                self._walk(value, (*at, key))

    def _build(
        self,
        node: Any,
        at: Path,
        classes: Iterator[Any],
        leaf: Callable[[int], Any],
        wanted: Callable[[Path], bool],
        own: bool,
    ) -> TreeDict[Any]:
        cls = next(classes)
        items: dict[str, Any] = {}
        for key, value in node["items"]:
            path = (*at, key)
            if type(value) is not int:
                nested = self._build(value, path, classes, leaf, wanted, own)
                if nested or wanted(path):
                    nested._settle(None)
                    items[key] = nested
            elif wanted(path):
                items[key] = leaf(value)
        return cls._new(items, None, self._policy(node["policy"], cls, own, items))

    def _policy(self, number: int, cls: Any, own: bool, keys: Iterable[str]) -> Policy:
        if own and number == OF_ITS_CLASS:
            return cls._class_policy
        entry = _at(self._plan["policies"], number, "policy")
        if number not in self._known:
            self._known[number] = self._read_policy(entry)
        policy = self._known[number]
        return policy if own or not cls._has_policy() else cls._class_policy.with_encoders(policy.carried(keys))

    def _read_policy(self, entry: Any) -> Policy:
        entry = _fields(entry, "a policy", encoders=dict, default=object, on_mismatch=str, objects=str, dtype=object)
        given = self._given.encoders
        if entry["dtype"] is not None and (type(entry["dtype"]) is not str or entry["dtype"] not in _DTYPES):
            refuse(f"{_cut(entry['dtype'])} is no dtype of host values")
        encoders = dict(given)
        if self._all_given:
            default = self._given.default_encoder
        else:
            encoders |= {key: self._encoder(n, key) for key, n in entry["encoders"].items() if key not in given}
            default = None if entry["default"] is None else self._encoder(entry["default"], "*")
        try:
            dtype = None if entry["dtype"] is None else _DTYPES[entry["dtype"]]
            policy = Policy().override(encoders or None, entry["on_mismatch"], entry["objects"], dtype)
            return policy if default is None else policy.override(default)
        except (TypeError, ValueError) as error:
            raise InvalidFileError(f"not a valid file: {error}") from error

    def _encoder(self, number: Any, key: str) -> StringEncoder:
        entry = _at(self._plan["encoders"], number, "encoder")
        if number not in self._encoders:
            made = _made(cast("dict[str, Any]", entry), key) if isinstance(entry, dict) else entry
            if isinstance(made, (str, bytes, type)) or not hasattr(made, "encode"):
                refuse(f"what it has for {key!r} is no encoder")
            self._encoders[number] = cast(StringEncoder, made)
        return self._encoders[number]


def _made(entry: dict[Any, Any], key: str) -> StringEncoder:
    if runs_code(entry):
        refuse(
            f"{key!r} was encoded with a {entry['name']}, which is not made from a file, since that would run what the "
            f"file says; give it: load(..., encoders={{{key!r}: ...}})"
        )
    try:
        return encoder_from_json(entry)
    except (ValueError, OverflowError, RecursionError) as error:
        raise InvalidFileError(f"not a valid file: the encoder of {key!r}: {str(error)[:1000]}") from error


def _refuse_sharing(value: Any, seen: set[int], depth: int = 0) -> None:
    """Refuse a list or dict that is in two places, as pickle can have it: walks would take the time of a tree's."""
    if type(value) not in (list, dict):
        return
    if id(value) in seen:
        refuse("a part of it is in two places")
    if depth > 4 * DEPTH:  # each dict takes three levels, and policies a few
        refuse(f"it is nested {DEPTH} levels deep or more")
    seen.add(id(value))
    inside = cast("list[Any]", value) if type(value) is list else list(cast("dict[Any, Any]", value).values())
    for one in inside:
        _refuse_sharing(one, seen, depth + 1)


def _cut(value: object) -> str:
    return repr(value)[:60] if isinstance(value, (str, int, float)) else f"a {type(value).__name__}"


def refuse(reason: str) -> NoReturn:
    raise InvalidFileError(f"not a valid file: {reason}")


def _at(entries: list[Any], number: Any, what: str) -> Any:
    if type(number) is not int or not 0 <= number < len(entries):
        refuse(f"it has no {what} {_cut(number)}")
    return entries[number]


def _fields(value: Any, what: str, **kinds: type) -> dict[str, Any]:
    if type(value) is not dict or set(cast("dict[Any, Any]", value)) != set(kinds):
        refuse(f"{what} has the fields {', '.join(kinds)}, and this has not")
    fields = cast("dict[str, Any]", value)
    for name, kind in kinds.items():
        if kind is not object and type(fields[name]) is not kind:
            refuse(f"{name!r} of {what} is no {kind.__name__}")
    return fields


def _items(node: Any) -> list[tuple[str, Any]]:
    items = cast("list[Any]", _fields(node, "a dict", policy=int, items=list)["items"])
    for item in items:
        pair = cast("list[Any]", item if type(item) is list else [])
        if len(pair) != 2 or type(pair[0]) is not str:
            refuse("an item of a dict is a key and a value, and one is not")
        key, value = pair
        if type(value) not in (int, dict):
            refuse(f"{key!r} is neither a tensor nor a dict")
    if len({key for key, _ in items}) != len(items):
        refuse("a dict has a key twice")
    return cast("list[tuple[str, Any]]", items)
