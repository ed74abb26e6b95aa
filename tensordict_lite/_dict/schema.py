"""Schemas: read the annotations of a class as fields, and validate items against the fields."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from keyword import iskeyword
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, ClassVar, ForwardRef, NamedTuple, TypeVar, Union, get_args, get_origin

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Format, get_annotations, get_type_hints

from .._encoders.protocol import StringEncoder, agree
from .._errors import described, shown
from .._tree.missing import closest
from .._tree.policy import OPTIONS
from .._tree.ragged import Ragged
from .._tree.tree import TreeDict, builtin_dict

_STORED_AS_TENSORS = (bool, int, float, complex, str, bytes, np.ndarray, np.generic)
_CLASS_VAR = re.compile(r"""['"]?(\w+\.)*ClassVar\b""")


class Default(NamedTuple):
    """The default of a field, as `field` declares it. None makes the field optional."""

    value: Any = None
    factory: Callable[[], Any] | None = None

    @property
    def is_none(self) -> bool:
        return self.value is None and self.factory is None

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


class DeclaredField(NamedTuple):
    """A field, as its annotation declares it."""

    kinds: tuple[Any, ...]
    """The alternatives of the annotation: classes and jaxtyping annotations. ``object`` accepts any value."""
    optional: bool
    shown: str
    """The alternatives as text, for error messages."""
    classes: tuple[Any, ...]
    """The classes of the alternatives: ``Tensor`` for a jaxtyping annotation."""
    plain: tuple[int | str, ...] | None
    """The dimensions of the only alternative, if it is a jaxtyping annotation whose meaning is clear without jaxtyping,
    such as ``Float[Tensor, "batch 3"]``: names and numbers."""
    dtypes: frozenset[torch.dtype]
    """The dtypes of the only alternative, if it is a jaxtyping annotation that names dtypes."""
    encoder: StringEncoder | None
    """The encoder of ``Annotated[Tensor, encoder]``: the field takes strings or their codes, and nothing else."""
    values: DeclaredField | None
    """The values of a ragged field, as ``Annotated[Ragged, Int[Tensor, "total"]]`` declares them."""

    def takes(self, value: Any) -> bool:
        """Whether a value is an instance of one of the kinds. Ignores shape and dtype."""
        if isinstance(value, self.classes):
            return True
        if isinstance(value, (Tensor, Ragged, TreeDict)):
            return False
        # Only kept objects come here. In a batch, the field is a list with one object per row.
        if isinstance(value, list):
            return all(map(self.takes, value))
        # Frameworks may replace a tensor by an object of their own.
        return value is not None and all(issubclass(kind, Tensor) for kind in self.classes)

    def fits(self, value: Any, sizes: dict[Any, int]) -> bool:
        """Whether a value fits for sure. ``sizes``: the dimensions known so far; new ones are added."""
        if self.plain is None:
            if isinstance(value, TreeDict):
                typed: Any = value
                known = self.kinds == (type(value),) and value._has_fields
                return known and typed._schema().fits(value, value._policy.encoders, sizes)
            if self.values is not None:
                return type(value) is Ragged and self.values.fits(value.values, sizes)
            return self.classes == self.kinds and isinstance(value, self.classes)
        if not isinstance(value, Tensor):
            return False
        shape = value.shape
        if value.dtype not in self.dtypes or len(shape) != len(self.plain):
            return False
        for dim, size in zip(self.plain, shape, strict=True):
            if dim != size and (type(dim) is int or sizes.setdefault(dim, size) != size):
                return False
        return True

    def dtype_of_numbers(self, dtype: torch.dtype, filled: bool, wanted: torch.dtype | None) -> torch.dtype | None:
        """The dtype for Python numbers that become a tensor of ``dtype``; None to leave them as they are.

        Numbers become floating-point numbers only. An empty list has no numbers, so it may have any dtype.

        Args:
            filled: whether there are numbers.
            wanted: the floating-point dtype that a dict uses; None: torch's default.
        """
        dtypes = self.dtypes
        if not dtypes or dtype in dtypes or dtype.is_complex or dtype is torch.bool:
            return None
        if filled and not all(one.is_floating_point for one in dtypes):
            return None
        found = [one for one in (wanted or torch.get_default_dtype(), torch.int64) if one in dtypes] or list(dtypes)
        return found[0] if len(found) == 1 else None


class Schema:
    """The fields of a class."""

    def __init__(self, cls: type, fields: Mapping[str, DeclaredField]) -> None:
        self.name = cls.__name__
        self.fields = fields
        self.encoders = {name: one.encoder for name, one in fields.items() if one.encoder is not None}
        self.nested = {name: kind for name, field in fields.items() for kind in field.kinds if _is_tree(kind)}
        # A nested dict may have shapes. Its schema cannot be asked: it may be this schema, which is incomplete here.
        self.shaped = bool(self.nested) or any(_is_shaped(kind) for field in fields.values() for kind in field.kinds)
        self.ragged = frozenset(name for name, field in fields.items() if Ragged in field.kinds)

    def fits(self, items: dict[str, Any], encoders: Mapping[str, StringEncoder], sizes: dict[Any, int]) -> bool:
        """Whether the complete set of items fits for sure. If not, the checks below decide, and find the words.

        ``sizes``: see `DeclaredField.fits`.
        """
        found = 0
        for name, field in self.fields.items():
            if field.optional and builtin_dict.get(items, name) is None:
                continue
            found, value = found + 1, builtin_dict.get(items, name)
            if not field.fits(value, sizes):
                return False
            if (encoder := field.encoder) is not None:
                codes = encoder.code_dtype or torch.int64
                if encoders.get(name, encoder) is not encoder or value.dtype is not codes:
                    return False
        return found == len(items)

    def check_names(self, items: Mapping[str, Any]) -> None:
        """Raise ``TypeError`` for names that are not fields, and for None unless the field accepts any object."""
        for name, value in items.items():
            field = self.fields.get(name)
            if field is None and isinstance(name, str):
                # It may be a misspelled option.
                close = closest(name, self.fields) or closest(name, OPTIONS, 0.8)
                guess = f", did you mean {'the option ' if close in OPTIONS else ''}{close!r}?" if close else "."
                known = ", ".join(self.fields) or "none"
                raise TypeError(f"{self.name} has no field {name!r}{guess} Its fields are {known}")
            if value is None and field is not None and object not in field.kinds:
                raise TypeError(f"{self.name}.{name}: expected {field.shown}, got None")

    def check_required(self, items: Mapping[str, Any]) -> None:
        """Raise ``TypeError`` for missing required fields."""
        missing = [name for name, field in self.fields.items() if not field.optional and name not in items]
        if missing:
            names = ", ".join(map(repr, missing))
            verb = "is" if len(missing) == 1 else "are"
            raise TypeError(f"{names} {verb} missing; the fields of {self.name} are {', '.join(self.fields)}")

    def check_kinds(self, items: Mapping[str, Any], before: Mapping[str, Any]) -> None:
        """Raise ``TypeError`` for a value whose class does not fit its field. Ignores shapes and dtypes.

        ``before``: the items before the change. One row of a ragged field is a tensor, and may stay one.
        """
        for name, value in items.items():
            field = self.fields[name]
            if not field.takes(value) and not (
                isinstance(value, Tensor) and isinstance(before.get(name), Tensor) and Ragged in field.kinds
            ):
                raise TypeError(f"{self.name}.{name}: expected {field.shown}, got {_called(value)}")
            encoder = field.encoder
            if encoder is None or not isinstance(value, Tensor):
                continue
            if value.is_floating_point() or encoder.code_dtype not in (None, value.dtype):
                raise TypeError(f"{self.name}.{name}: expected strings for {shown(encoder)}, got {_called(value)}")

    def check_encoders(self, encoders: Mapping[str, StringEncoder]) -> None:
        """Raise ``ValueError`` for a field whose codes another encoder decodes."""
        for name, declared in self.encoders.items():
            if name in encoders:
                agree(declared, encoders[name], f"{self.name}.{name}")


def declared_by(cls: type) -> dict[str, Default | None]:
    """The fields that ``cls`` itself declares, without its bases, and their defaults. Evaluates no annotation.

    Raises ``TypeError`` for a default other than None and `field`.
    """
    found: dict[str, Default | None] = {}
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
        found[name] = Default() if name in cls.__dict__ and given is None else given
    return found


def read_annotations(
    cls: type[TreeDict[Any]], declared: Mapping[str, Default | None], names: Mapping[str, Any]
) -> dict[str, DeclaredField]:
    """Evaluate the annotations of the fields that ``cls`` itself declares.

    Args:
        declared: the result of `declared_by`.
        names: local names that annotations may use, in addition to the names of the module.

    Raises: ``NameError`` while an annotation uses an undefined name; ``TypeError`` for an annotation that a field
    cannot have.
    """
    annotations, keeps = get_annotations(cls), cls._class_policy.objects == "keep"
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
    return {
        name: _declared_field(f"{cls.__name__}.{name}", hints[name], keeps, one is not None and one.is_none)
        for name, one in declared.items()
    }


def _declared_field(where: str, hint: Any, keeps: bool, optional: bool = False) -> DeclaredField:
    """The field of an evaluated annotation. ``keeps``: the class keeps objects of any class."""
    metadata: list[Any] = []
    kinds = tuple(dict.fromkeys(_kinds(where, hint, metadata, keeps)))
    if (NoneType in kinds) != optional and object not in kinds:
        raise TypeError(
            f"{where}: declare an optional field as `{where.split('.')[-1]}: ... | None = None`; "
            "a field with another default takes no None"
        )
    kinds = tuple(kind for kind in kinds if kind is not NoneType)
    if sum(map(_is_tree, kinds)) > 1:
        raise TypeError(f"{where}: a field takes one class of nested dicts, and this annotation names several")
    encoders = [one for one in metadata if isinstance(one, StringEncoder)]
    if encoders and (kinds != (Tensor,) or len(encoders) > 1):
        raise TypeError(
            f"{where}: declare a field of strings as Annotated[Tensor, encoder], with one encoder; "
            "for a ragged field, declare a Ragged, and give the encoder to the class: encoders={...}"
        )
    values = tuple(one for one in metadata if isinstance(one, type) and _is_shaped(one))
    if values and kinds != (Ragged,):
        raise TypeError(
            f"{where}: only a Ragged has an annotation for its values; annotate a tensor with {values[0].__name__}"
        )
    classes = tuple(Tensor if _is_shaped(kind) else kind for kind in kinds)
    shaped = kinds[0] if len(kinds) == 1 and _is_shaped(kinds[0]) else None
    dtypes = frozenset[torch.dtype]() if shaped is None else _dtypes(shaped)
    return DeclaredField(
        kinds,
        optional,
        shown=" | ".join(kind.__name__ for kind in kinds),
        classes=classes,
        plain=None if shaped is None else _plain_shape(shaped),
        dtypes=dtypes,
        encoder=encoders[0] if encoders else None,
        values=_declared_field(where, Union[values], keeps) if values else None,  # noqa: UP007  (of a tuple)
    )


def _dtypes(kind: Any) -> frozenset[torch.dtype]:
    """The dtypes of a jaxtyping annotation; none if it takes any dtype."""
    names: Any = kind.dtypes if isinstance(kind.dtypes, (list, tuple)) else ()
    dtypes = {getattr(torch, name, None) for name in names}
    return frozenset(dtype for dtype in dtypes if isinstance(dtype, torch.dtype))


def _plain_shape(kind: Any) -> tuple[int | str, ...] | None:
    """The dimensions of a jaxtyping annotation of ``Tensor``, if they are names and numbers; None for any other."""
    dims = kind.dim_str.split()
    plain = all(dim.isdecimal() or (dim.isidentifier() and dim[0] != "_" and not iskeyword(dim)) for dim in dims)
    if not plain or kind.array_type is not Tensor:
        return None
    return tuple(int(dim) if dim.isdecimal() else dim for dim in dims)


def _kinds(where: str, hint: Any, metadata: list[Any], keeps: bool) -> Iterator[Any]:
    """Yield the classes that an annotation accepts, and append what stands in ``Annotated`` to ``metadata``.

    ``where``: the class and field, for messages.
    """
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        for alternative in get_args(hint):
            yield from _kinds(where, alternative, metadata, keeps)
    elif origin is Annotated:
        metadata += hint.__metadata__
        yield from _kinds(where, get_args(hint)[0], metadata, keeps)
    elif isinstance(hint, TypeVar):
        bound = object if isinstance(hint.__bound__, (NoneType, ForwardRef)) else hint.__bound__
        yield from _kinds(where, bound, metadata, keeps)
    elif (
        not keeps and origin in (list, tuple) and {str, bool, int, float, complex}.issuperset({*get_args(hint)} - {...})
    ):
        raise TypeError(f"{where}: lists of strings and numbers are stored as tensors; annotate it as Tensor")
    elif hasattr(hint, "__value__"):  # `type Image = ...`
        yield from _kinds(where, hint.__value__, metadata, keeps)
    elif hasattr(hint, "__supertype__"):  # a NewType
        yield from _kinds(where, hint.__supertype__, metadata, keeps)
    elif hint is Any:
        yield object
    else:
        yield _kind(where, hint if origin is None else origin, keeps)


def _kind(where: str, kind: Any, keeps: bool) -> Any:
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
    if issubclass(kind, _STORED_AS_TENSORS) and not keeps:
        raise TypeError(f"{where}: values of {kind.__name__} are stored as tensors; annotate it as Tensor")
    try:
        isinstance(None, kind)
    except TypeError as error:
        raise TypeError(f"{where}: {kind.__name__} cannot be checked at run time: {error}") from error
    if issubclass(kind, Mapping) and not _is_tree(kind) and not keeps:
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


def _called(value: Any) -> str:
    return type(value).__name__ if isinstance(value, TreeDict) else described(value)


Shaped = tuple[str, Tensor, DeclaredField, bool]
"""A tensor to check: its name such as ``Batch.obs.state``, the tensor, its field, and whether errors show a row."""


def shape_error(tensors: Iterable[Shaped]) -> str:
    """Check dtypes and shapes with jaxtyping. Return the error message, or ``""`` if all tensors fit.

    All tensors are checked in one jaxtyping context, so dimensions with the same name must have the same size. If all
    annotations are plain, jaxtyping is not asked: it takes ten times as long for a request that a server validates.
    """
    jaxtyping, queue, sizes = _jaxtyping(), list(tensors), dict[str, int]()
    if jaxtyping is None or jaxtyping.config.jaxtyping_disable:
        return ""
    if all(field.fits(tensor, sizes) for _, tensor, field, _ in queue):
        return ""
    count, passed = len(queue), list[Shaped]()
    with jaxtyping.jaxtyped("context"):  # independent of the dimension names that the caller's code uses
        for i, one in enumerate(queue):
            try:
                reason = _misfit(one)
            except jaxtyping.AnnotationError as error:
                if not isinstance(error.__cause__, NameError):
                    raise TypeError(f"{one[0]}: {error}") from error
                if i < count:  # "n+1", before a field defines n; the optional field that defines it may be absent
                    queue.append(one)
                continue
            if reason:
                return _message(jaxtyping, one, reason, passed)
            passed.append(one)
    return ""


def _message(jaxtyping: Any, shaped: Shaped, reason: str, passed: Iterable[Shaped]) -> str:
    """The error message. If the field conflicts with an earlier field, the message names that field too."""
    where, _, field, is_row = shaped
    alone = _conflict(jaxtyping, [shaped])
    partner = None if alone else next((one for one in passed if _conflict(jaxtyping, [one, shaped])), None)
    other = "" if partner is None else f", from {partner[0]}, which is {_given(partner)}"
    expected, reason = (f"a row of {field.shown}", f"as a batch, {reason}") if is_row else (field.shown, reason)
    return f"{where}: expected {expected}, got {_given(shaped)}: {reason}{other}"


def _given(shaped: Shaped) -> str:
    """The tensor that the caller gave, in words."""
    _, value, _, is_row = shaped
    return described(value[0] if is_row else value)


def _misfit(shaped: Shaped) -> str:
    """The reason why a tensor does not fit its annotations; ``""`` if it fits."""
    _, value, field, _ = shaped
    first = ""
    for kind in field.kinds:
        if not _is_shaped(kind):
            if isinstance(value, kind):
                return ""
            continue
        reason = str(kind.__instancecheck_str__(value))
        if not reason:
            return ""
        first = first or reason
    return first


def _conflict(jaxtyping: Any, tensors: Iterable[Shaped]) -> bool:
    """Whether these tensors alone do not fit their annotations."""
    with jaxtyping.jaxtyped("context"), suppress(jaxtyping.AnnotationError):
        return any(map(_misfit, tensors))
    return False
