"""Schemas: read the annotations of a class as fields, and validate items against the fields."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, ClassVar, ForwardRef, NamedTuple, TypeVar, Union, get_args, get_origin

import numpy as np
from torch import Tensor
from typing_extensions import Format, get_annotations, get_type_hints

from .._errors import described
from .._tree.missing import closest
from .._tree.policy import OPTIONS
from .._tree.tree import TreeDict

_STORED_AS_TENSORS = (bool, int, float, complex, str, bytes, np.ndarray, np.generic)
_CLASS_VAR = re.compile(r"""['"]?(\w+\.)*ClassVar\b""")


class Default(NamedTuple):
    """The default of a field, as `field` declares it."""

    value: Any
    factory: Callable[[], Any] | None

    def make(self) -> Any:
        return self.value if self.factory is None else self.factory()


_UNSET: Any = object()
_SHARED = (Tensor, np.ndarray, list, dict, set, Mapping)


def field(*, default: Any = _UNSET, default_factory: Callable[[], Any] | None = None) -> Any:
    """Declare the default of a field of a `TypedDeviceDict`. Type checkers then accept a call without the field.

    The constructor, ``from_dict``, ``wrap`` and ``load`` store the default if the field is absent. `collate` adds it to
    each sample that lacks the field. The field cannot be deleted.

    Args:
        default: a number, a string, or a tuple of these. It is stored as by ``d[key] = default``. None makes the field
            optional, as ``= None`` does.
        default_factory: a function without arguments that returns the value, called for each instance. A tensor that it
            returns is moved to the device of the dict.

    Raises: ``TypeError`` if neither or both arguments are given, for a mutable default, which all instances would
    share, and for a ``default_factory`` that cannot be called.
    Cost: for each instance without the field, one conversion of the default or one call of ``default_factory``.

    >>> import torch
    >>> from torch import Tensor
    >>> from tensordict_lite import TypedDeviceDict, field
    >>> class Batch(TypedDeviceDict):
    ...     image: Tensor
    ...     scale: Tensor = field(default=1.0)
    ...     mean: Tensor = field(default_factory=lambda: torch.zeros(3))
    >>> Batch(image=torch.zeros(2, 3)).scale
    tensor(1.)
    """
    if (default is _UNSET) == (default_factory is None):
        raise TypeError("field takes either default= or default_factory=")
    if default_factory is not None and not callable(default_factory):
        raise TypeError(f"default_factory is a function without arguments, got {described(default_factory)}")
    if isinstance(default, _SHARED):
        raise TypeError(
            f"the default is {described(default)}, which all instances would share; use default_factory=lambda: ..."
        )
    return Default(default, default_factory)


class Field(NamedTuple):
    """A field, as its annotation declares it."""

    kinds: tuple[Any, ...]
    """The alternatives of the annotation: classes and jaxtyping annotations. ``object`` accepts any value."""
    optional: bool
    shown: str
    """The alternatives as text, for error messages."""

    def takes(self, value: Any) -> bool:
        """Whether a value is an instance of one of the kinds. Ignores shape and dtype."""
        if any(_is_kind(value, kind) for kind in self.kinds):
            return True
        if isinstance(value, (Tensor, TreeDict)):
            return False
        # Only kept objects come here. In a batch, the field is a list with one object per row.
        if isinstance(value, list) and all(map(self.takes, value)):
            return True
        # Frameworks may replace a tensor by an object of their own.
        return value is not None and all(issubclass(kind, Tensor) or _is_shaped(kind) for kind in self.kinds)


class Schema:
    """The fields of a class."""

    def __init__(self, cls: type, fields: Mapping[str, Field]) -> None:
        self.name = cls.__name__
        self.fields = fields
        self.required = frozenset(name for name, field in fields.items() if not field.optional)
        self.nested = {name: kind for name, field in fields.items() for kind in field.kinds if _is_tree(kind)}
        # A nested dict may have shapes. Its schema cannot be asked: it may be this schema, which is incomplete here.
        self.shaped = bool(self.nested) or any(_is_shaped(kind) for field in fields.values() for kind in field.kinds)

    def check_names(self, items: Mapping[str, Any]) -> None:
        """Raise ``TypeError`` for names that are not fields, and for None unless the field accepts any object."""
        unknown = sorted(name for name in items if isinstance(name, str) and name not in self.fields)
        if unknown:
            # It may be a misspelled option.
            close = closest(unknown[0], self.fields) or closest(unknown[0], OPTIONS, 0.8)
            option = "the option " if close in OPTIONS else ""
            guess = f", did you mean {option}{close!r}?" if close else "."
            raise TypeError(
                f"{self.name} has no field {unknown[0]!r}{guess} Its fields are {', '.join(self.fields) or 'none'}"
            )
        for name, value in items.items():
            if value is None and not any(kind in (object, NoneType) for kind in self.fields[name].kinds):
                raise TypeError(f"{self.name}.{name}: expected {self.fields[name].shown}, got None")

    def check_required(self, items: Mapping[str, Any]) -> None:
        """Raise ``TypeError`` for missing required fields."""
        missing = [name for name in self.fields if name in self.required and name not in items]
        if missing:
            names = ", ".join(map(repr, missing))
            verb = "is" if len(missing) == 1 else "are"
            raise TypeError(f"{names} {verb} missing; the fields of {self.name} are {', '.join(self.fields)}")

    def check_kinds(self, items: Mapping[str, Any]) -> None:
        """Raise ``TypeError`` for a value whose class does not fit its field. Ignores shapes and dtypes."""
        for name, value in items.items():
            field = self.fields[name]
            if not field.takes(value):
                raise TypeError(f"{self.name}.{name}: expected {field.shown}, got {_called(value)}")


class Declared(NamedTuple):
    """A field as its class declares it, before its annotation is evaluated."""

    optional: bool
    default: Default | None


def declared_by(cls: type) -> dict[str, Declared]:
    """The fields that ``cls`` itself declares, without its bases. Evaluates no annotation.

    Raises ``TypeError`` for a default other than None and `field`.
    """
    found: dict[str, Declared] = {}
    for name, annotation in get_annotations(cls, format=Format.FORWARDREF).items():
        text = getattr(annotation, "__forward_arg__", annotation)  # a string, if Python did not evaluate it
        if _CLASS_VAR.match(text) if isinstance(text, str) else ClassVar in (text, get_origin(text)):
            continue
        given = cls.__dict__.get(name)
        if given is not None and not isinstance(given, Default):
            raise TypeError(
                f"{cls.__name__}.{name} has the default {given!r}; declare it as "
                f"`{name}: ... = field(default=...)`, or `{name}: ... | None = None` for an optional field"
            )
        default = None if given is None or (given.factory is None and given.value is None) else given
        found[name] = Declared(name in cls.__dict__ and default is None, default)
    return found


def read_annotations(cls: type, declared: Mapping[str, Declared], names: Mapping[str, Any]) -> dict[str, Field]:
    """Evaluate the annotations of the fields that ``cls`` itself declares.

    Args:
        declared: the result of `declared_by`.
        names: local names that annotations may use, in addition to the names of the module.

    Raises: ``NameError`` while an annotation uses an undefined name; ``TypeError`` for an annotation that a field
    cannot have.
    """
    annotations = get_annotations(cls)
    # `get_type_hints(cls)` would include the bases, and evaluate the annotations of DeviceDict in the wrong module.
    own = SimpleNamespace(__annotations__={name: annotations[name] for name in declared})
    module = vars(sys.modules[cls.__module__]) if cls.__module__ in sys.modules else {}
    inside = {name: value for name, value in vars(cls).items() if name not in declared}
    try:
        hints = get_type_hints(own, {**module, **names, cls.__name__: cls}, inside, include_extras=True)
    except NameError as error:
        raise NameError(
            f"{cls.__name__}: an annotation uses {error.name!r}, which is not defined in {cls.__module__}; "
            "define or import it at the top level of that module, not only under TYPE_CHECKING"
        ) from error
    return {name: _field(f"{cls.__name__}.{name}", hints[name], one.optional) for name, one in declared.items()}


def _field(where: str, hint: Any, optional: bool) -> Field:
    """The field of an evaluated annotation."""
    kinds = tuple(dict.fromkeys(_kinds(where, hint)))
    if (NoneType in kinds) != optional and object not in kinds:
        raise TypeError(
            f"{where}: declare an optional field as `{where.split('.')[-1]}: ... | None = None`; "
            "a field with another default takes no None"
        )
    kinds = tuple(kind for kind in kinds if kind is not NoneType)
    if sum(map(_is_tree, kinds)) > 1:
        raise TypeError(f"{where}: a field takes one class of nested dicts, and this annotation names several")
    return Field(kinds, optional, " | ".join(kind.__name__ for kind in kinds))


def _kinds(where: str, hint: Any) -> Iterator[Any]:
    """Yield the classes that an annotation accepts. ``where``: the class and field, for messages."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        for alternative in get_args(hint):
            yield from _kinds(where, alternative)
    elif origin is Annotated:
        yield from _kinds(where, get_args(hint)[0])
    elif isinstance(hint, TypeVar):
        yield from _kinds(where, object if isinstance(hint.__bound__, (NoneType, ForwardRef)) else hint.__bound__)
    elif origin in (list, tuple) and {str, bool, int, float, complex}.issuperset({*get_args(hint)} - {...}):
        raise TypeError(f"{where}: lists of strings and numbers are stored as tensors; annotate it as Tensor")
    elif hasattr(hint, "__value__"):  # `type Image = ...`
        yield from _kinds(where, hint.__value__)
    elif hasattr(hint, "__supertype__"):  # a NewType
        yield from _kinds(where, hint.__supertype__)
    elif hint is Any:
        yield object
    else:
        yield _kind(where, hint if origin is None else origin)


def _kind(where: str, kind: Any) -> Any:
    """A class of an annotation, if a field can have it. Raises ``TypeError`` otherwise."""
    if not isinstance(kind, type):
        raise TypeError(
            f"{where}: a field cannot be annotated with {kind!r}; use Tensor, a jaxtyping annotation of a tensor, "
            "a DeviceDict class, or the class of a kept object"
        )
    if _is_shaped(kind) and not issubclass(kind.array_type, Tensor):
        raise TypeError(
            f"{where}: arrays are stored as tensors; annotate it as {kind.__name__.split('[')[0]}[Tensor, ...]"
        )
    if issubclass(kind, _STORED_AS_TENSORS):
        raise TypeError(f"{where}: values of {kind.__name__} are stored as tensors; annotate it as Tensor")
    try:
        isinstance(None, kind)
    except TypeError as error:
        raise TypeError(f"{where}: {kind.__name__} cannot be checked at run time: {error}") from error
    if issubclass(kind, Mapping) and not _is_tree(kind):
        raise TypeError(f"{where}: mappings are stored as DeviceDicts; annotate it as a DeviceDict or TypedDeviceDict")
    return kind


def _is_tree(kind: Any) -> bool:
    return issubclass(kind, TreeDict)


def _jaxtyping() -> Any:
    """The module jaxtyping, or None. A user with jaxtyping annotations has imported it."""
    return sys.modules.get("jaxtyping")


def _is_shaped(kind: Any) -> bool:
    jaxtyping = _jaxtyping()
    return jaxtyping is not None and issubclass(kind, jaxtyping.AbstractArray)


def _is_kind(value: Any, kind: Any) -> bool:
    return isinstance(value, Tensor if _is_shaped(kind) else kind)


def _called(value: Any) -> str:
    return type(value).__name__ if isinstance(value, TreeDict) else described(value)


Shaped = tuple[str, Tensor, tuple[Any, ...]]
"""A field to check: its name such as ``Batch.obs.state``, the tensor, and the alternatives of its annotation."""


def shape_error(fields: Iterable[Shaped]) -> str:
    """Check dtypes and shapes with jaxtyping. Return the error message, or ``""`` if all tensors fit.

    All tensors are checked in one jaxtyping context, so dimensions with the same name must have the same size.
    """
    jaxtyping = _jaxtyping()
    if jaxtyping is None or jaxtyping.config.jaxtyping_disable:
        return ""
    passed: list[Shaped] = []
    later: list[Shaped] = []
    with _jaxtyping_context(jaxtyping):
        for field in fields:
            try:
                reason = _reason(field)
            except jaxtyping.AnnotationError as error:
                if not isinstance(error.__cause__, NameError):
                    raise TypeError(f"{field[0]}: {error}") from error
                later.append(field)  # "n+1", before a field defines n
                continue
            if reason:
                return _message(jaxtyping, field, reason, passed)
            passed.append(field)
        for field in later:
            reason = ""
            with suppress(jaxtyping.AnnotationError):  # the optional field that defines n may be absent
                reason = _reason(field)
            if reason:
                return _message(jaxtyping, field, reason, passed)
    return ""


def _message(jaxtyping: Any, field: Shaped, reason: str, passed: Iterable[Shaped]) -> str:
    """The error message. If the field conflicts with an earlier field, the message names that field too."""
    where, value, kinds = field
    expected = " | ".join(kind.__name__ for kind in kinds)
    alone = _conflict(jaxtyping, [field])
    partner = None if alone else next((one for one in passed if _conflict(jaxtyping, [one, field])), None)
    other = "" if partner is None else f", from {partner[0]}, which is {described(partner[1])}"
    return f"{where}: expected {expected}, got {described(value)}: {reason}{other}"


def _jaxtyping_context(jaxtyping: Any) -> AbstractContextManager[Any]:
    """A new jaxtyping context, independent of the dimension names that the caller's code uses."""
    return jaxtyping.jaxtyped("context")


def _reason(field: Shaped) -> str:
    """The reason why a tensor does not fit its annotations; ``""`` if it fits."""
    _, value, kinds = field
    first = ""
    for kind in kinds:
        reason = str(kind.__instancecheck_str__(value)) if _is_shaped(kind) else ""
        if not reason:
            return ""
        first = first or reason
    return first


def _conflict(jaxtyping: Any, fields: Iterable[Shaped]) -> bool:
    """Whether these fields alone do not fit their annotations."""
    with _jaxtyping_context(jaxtyping), suppress(jaxtyping.AnnotationError):
        return any(map(_reason, fields))
    return False
