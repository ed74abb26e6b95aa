"""`TypedDeviceDict`: a class whose annotations are its fields."""

from __future__ import annotations

import sys
from abc import ABCMeta
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, overload

import torch
from torch import Tensor
from typing_extensions import Self, dataclass_transform

from ._checked import CheckedDict
from ._device_dict import DeviceDict
from ._devices import DeviceLike
from ._errors import Path, located
from ._items import Items, as_dict  # pyright: ignore[reportUnusedImport]  (used where it does not look)
from ._missing import NoAttribute
from ._policy import OPTIONS, Encoders, Objects, OnMismatch
from ._schema import Field, Schema, Shaped, names_of, read, unfit
from ._strings import StringEncoder
from ._tree import TreeDict, raw

Given = TypeVar("Given")
Read = TypeVar("Read")

if TYPE_CHECKING:  # pragma: no cover
    # What the type checkers take for fields of every class, so that its constructor has the options beside the fields.
    # A field that is a descriptor may be given as one type and read as another, or, as most here, not be read at all.
    # (`InitVar` was the alternative: pyright cannot read `batch.device` then.)

    class _Option(Generic[Given]):
        def __get__(self, instance: None, owner: Any) -> Given | None: ...
        def __set__(self, instance: None, value: Given | None) -> None: ...

    class _Property(Generic[Given, Read]):
        @overload
        def __get__(self, instance: None, owner: Any) -> Given | None: ...
        @overload
        def __get__(self, instance: object, owner: Any) -> Read: ...
        def __get__(self, instance: Any, owner: Any) -> Any: ...
        def __set__(self, instance: None, value: Given | None) -> None: ...


@dataclass_transform(kw_only_default=True, eq_default=False)
class _Typed(ABCMeta):
    """Tells the type checkers that annotations are fields, and keeps instances without other attributes."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> _Typed:
        namespace.setdefault("__slots__", ())  # so that a misspelt field cannot be set
        out: Any = super().__new__(cls, name, bases, namespace, **options)
        with suppress(NameError):  # of what is defined further down; asked again when an instance is made
            out._schema(sys._getframe(1).f_locals)  # annotations that are strings may name what a function has
        return out


class TypedDeviceDict(DeviceDict[Tensor], metaclass=_Typed):
    """A `DeviceDict` whose fields are the annotations of its class, known to type checkers and checked at run time.

    ``batch.image`` reads, writes and deletes ``batch["image"]``. A field is annotated as

    - ``Tensor``, or with jaxtyping, ``Float[Tensor, "batch 3 h w"]``: its dtype and shape are checked, and dimensions
      of one name agree across all fields of an instance, those of nested dicts included. jaxtyping is not imported
      here, and not needed for anything else.
    - another `TypedDeviceDict`, into which a mapping is converted, or ``DeviceDict`` for any fields.
    - any other class, for objects, in a class that keeps them; a batch may have a list of them.
    - ``... | None = None``: may be absent. It then reads as None and is no key; None deletes it.

    Schemas inherit, and take the options of a `DeviceDict` class: ``class Batch(TypedDeviceDict, dtype=...)``.

    Fields are checked wherever values come in from outside: at construction, on set and delete, in `update` (once, at
    its end), `map`, ``|``, and `collate` with ``cls=``. What is made from a checked dict is not checked again: `to` and
    its like, `rows` (which have no batch dimension), `stack`, `cat`, copies, pickle, pytree; and if its dtypes and
    dimensions are no longer those of the schema, it is held to the names and kinds of its fields only. A nested dict
    that is changed by itself is checked by itself. `select` and `drop` give a plain `DeviceDict`. Nothing is checked
    while torch.compile traces.

    Args:
        data: a mapping or pairs, for frameworks, which rebuild a dict as ``type(d)({...})``; type checkers refuse it,
            and know `from_dict`.
        fields: the fields, by keyword; and the options of `DeviceDict`.

    Raises: ``TypeError`` that names the class and the field for one that is missing, unknown, deleted though required,
    or of another kind; ``ValueError`` for dtypes and dimensions; what `DeviceDict` raises. The dict is unchanged.
    Cost: that of a `DeviceDict`, and a look at each field; with jaxtyping some microseconds a field.

    >>> import torch
    >>> from torch import Tensor
    >>> from tensordict_lite import TypedDeviceDict
    >>> class Batch(TypedDeviceDict):
    ...     image: Tensor
    ...     weight: Tensor | None = None
    >>> batch = Batch(image=torch.zeros(4, 3))
    >>> batch.image.shape, batch.weight, "weight" in batch
    (torch.Size([4, 3]), None, False)
    >>> batch.weight = torch.ones(4)
    >>> list(batch)
    ['image', 'weight']
    >>> Batch(imgae=torch.zeros(4, 3))
    Traceback (most recent call last):
    ...
    TypeError: Batch has no field 'imgae', did you mean 'image'? Its fields are image, weight
    """

    __slots__ = ()
    __module__ = "tensordict_lite"
    # Without annotations, which would be looked for in the public module.
    _own = cast("Mapping[str, bool]", {})  # the fields of one class's own annotations, and whether they may be absent
    _optional = cast("Mapping[str, bool]", {})  # the same of it and its bases
    _read = cast("Schema | None", None)  # what those annotations say, once they could be evaluated

    if TYPE_CHECKING:  # pragma: no cover
        device: _Property[DeviceLike, torch.device | None] = _Property()  # pyright: ignore
        encoders: _Property[Encoders, Mapping[str, StringEncoder]] = _Property()  # pyright: ignore
        on_mismatch: _Option[OnMismatch] = _Option()
        objects: _Option[Objects] = _Option()
        dtype: _Option[torch.dtype] = _Option()

        def select(self, *keys: str | Path) -> DeviceDict[Tensor]: ...
        def drop(self, *keys: str | Path) -> DeviceDict[Tensor]: ...

    else:

        def __init__(
            self, data=None, /, *, device=None, encoders=None, on_mismatch=None, objects=None, dtype=None, **fields
        ) -> None:
            self._begin(data, device, encoders, on_mismatch, objects, dtype)
            items = {**({} if data is None else as_dict(data)), **fields}
            if type(data) is type(self):  # which is held to no more than it fits
                raw.update(self, data)
            self._take(items, consent=device is not None)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._own = names_of(cls)
        optional: dict[str, bool] = {}
        for base in reversed(cls.__mro__):
            optional |= base.__dict__.get("_own", {})
        cls._optional = optional
        _refuse_collisions(cls)
        for name, absent in cls._own.items():
            setattr(cls, name, _attribute(name, absent))
        cls._read = None

    @classmethod
    def _schema(cls, names: Mapping[str, Any] = MappingProxyType({})) -> Schema:
        if cls._read is None:
            fields: dict[str, Field] = {}
            for base in reversed(cls.__mro__[1:]):
                if issubclass(base, TypedDeviceDict):
                    fields |= {name: base._schema().fields[name] for name in base._own}
            cls._read = Schema(cls, fields | read(cls, cls._own, names))
        return cls._read

    @classmethod
    def from_dict(
        cls,
        data: Items,
        /,
        *,
        device: DeviceLike | None = None,
        encoders: Encoders | None = None,
        on_mismatch: OnMismatch | None = None,
        objects: Objects | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """A batch of the items of a mapping, or of pairs, that no type checker knows the fields of.

        Raises, and costs, what the constructor does.

        >>> class Point(TypedDeviceDict):
        ...     x: Tensor
        >>> Point.from_dict({"x": [1.0, 2.0]}, dtype=torch.float64).x
        tensor([1., 2.], dtype=torch.float64)
        """
        given = {"encoders": encoders, "on_mismatch": on_mismatch, "objects": objects, "dtype": dtype}
        return cls(data, device=device, **given)  # pyright: ignore[reportCallIssue]

    # --- what comes in is checked, whatever way it takes ---

    def _conform(
        self, items: Mapping[str, Any], before: Mapping[str, Any] | None, deep: bool = False, shapes: bool = True
    ) -> None:
        if torch.compiler.is_compiling():
            return
        super()._conform(items, before, deep, shapes)
        before = before if isinstance(before, TypedDeviceDict) else {}
        schema = self._schema()
        schema.check_names(items)
        schema.check_kinds({key: value for key, value in items.items() if before.get(key) is not value})
        reason = unfit(_shaped(type(self), items, schema.name)) if shapes and schema.shaped else ""
        # What did not fit before is what is made of a checked dict: a row, or one of another dtype.
        if reason and not (before and unfit(_shaped(type(self), before, schema.name))):
            raise ValueError(reason)

    def _commit(
        self, staged: Mapping[str, Any], device: torch.device | None, encoders: Mapping[str, StringEncoder] | None
    ) -> None:
        self._conform({**self, **staged}, self)
        super()._commit(staged, device, encoders)

    def _convert(
        self, data: Mapping[str, Any], home: torch.device, moved: Mapping[int, Tensor], at: Path
    ) -> tuple[dict[str, Any], dict[str, StringEncoder]]:
        data = self._without_absences(data)
        if not torch.compiler.is_compiling():
            try:
                self._schema().check_given(data)
            except TypeError as error:
                raise (located(error, at) if at else error) from None
        return super()._convert(data, home, moved, at)

    def _take(self, data: Mapping[str, Any], **options: Any) -> None:
        given = self._without_absences(data)
        gone = [key for key in data if key in self and key not in given]
        if not gone:
            super()._take(given, **options)
            return
        with _undone_if_refused(self):
            for key in gone:
                raw.pop(self, key)
            super()._take(given, **options)

    @classmethod
    def _without_absences(cls, data: Mapping[str, Any]) -> Mapping[str, Any]:
        if not any(value is None for value in data.values()):
            return data
        return {key: value for key, value in data.items() if value is not None or not cls._optional.get(key, False)}

    def __setitem__(self, key: str | Path, value: Any, /) -> None:
        self._set(key, value)

    def _set_path(self, path: Path, value: Any, at: Path = ()) -> None:
        node: CheckedDict[Any] = self  # the one that will be changed
        for part in path[:-1]:
            inner: Any = raw.get(node, part)
            if not isinstance(inner, CheckedDict):
                break
            node = cast("CheckedDict[Any]", inner)
        before = None if node is self else self.copy()
        with _undone_if_refused(node):
            super()._set_path(path, value, at)
            if node is not self:  # which knows nothing of the dimensions here
                self._conform(self, before)

    def __delitem__(self, key: str | Path, /) -> None:
        self._refuse_without(key)
        super().__delitem__(key)

    def pop(self, key: str | Path, *default: Any) -> Any:
        self._refuse_without(key)
        return super().pop(key, *default)

    def popitem(self) -> tuple[str, Tensor]:
        self._refuse_without(next(reversed(self), None))
        return super().popitem()

    def clear(self) -> None:
        for key in self:
            self._refuse_without(key)
        super().clear()

    def _refuse_without(self, key: object) -> None:
        if key in self and self._optional.get(cast(str, key)) is False:
            name = f"{type(self).__name__}.{key}"
            raise TypeError(f"{name} is required and cannot be deleted; drop({key!r}) gives a DeviceDict without it")

    # --- what is made of it ---

    @classmethod
    def _declared(cls, key: str) -> type[CheckedDict[Any]]:
        return cls._schema().nested.get(key, DeviceDict)

    def _some(self, items: Any) -> Any:
        return DeviceDict._new(items, self._device, self._policy)


def _attribute(name: str, optional: bool) -> Any:
    """The attribute that is a view of an item."""

    def write(self: TypedDeviceDict, value: Any) -> None:
        self[name] = value

    def delete(self: TypedDeviceDict) -> None:
        if name not in self:
            raise AttributeError(f"{type(self).__name__}.{name} is absent already")
        del self[name]

    def get(self: TypedDeviceDict) -> Any:
        return self[name]

    def get_or_none(self: TypedDeviceDict) -> Any:
        return raw.get(self, name)

    # `itemgetter(name)` takes two thirds of the time of `get` (1.4 and 2.2 reads of the item), but torch.compile cannot
    # trace it.
    return property(get_or_none if optional else get, write, delete, f"The item {name!r}.")


def _refuse_collisions(cls: type[TypedDeviceDict]) -> None:
    for name in cls._optional:
        where = f"{cls.__name__}.{name}"
        if name.startswith("_"):
            raise TypeError(f"{where}: a field cannot start with an underscore; rename it")
        if name in OPTIONS:
            raise TypeError(f"{where}: a field cannot be named as an option of the constructor; rename it")
        if any(_taken(base, name) for base in TypedDeviceDict.__mro__):
            raise TypeError(f"{where}: a field cannot be named as a method or property of DeviceDict; rename it")
        for base in cls.__mro__:
            if _taken(base, name) and name not in base.__dict__.get("_own", {}):
                raise TypeError(f"{where} is a field, and something else in {base.__name__}; rename one of them")


def _taken(base: type, name: str) -> bool:
    return name in base.__dict__ and not isinstance(base.__dict__[name], NoAttribute)


def _shaped(cls: type[TypedDeviceDict], items: Mapping[str, Any], where: str) -> Iterator[Shaped]:
    """Every tensor with its annotations, in their order, those of nested dicts that have a schema included."""
    for name, field in cls._schema().fields.items():
        value = items.get(name)
        if isinstance(value, Tensor):
            yield f"{where}.{name}", value, field.kinds
        elif isinstance(value, TypedDeviceDict):
            yield from _shaped(type(value), value, f"{where}.{name}")


@contextmanager
def _undone_if_refused(d: TreeDict[Any]) -> Generator[None]:
    items, device, policy = dict(d), d._device, d._policy
    try:
        yield
    except BaseException:
        raw.clear(d)
        raw.update(d, items)
        d._device, d._policy = device, policy
        raise
