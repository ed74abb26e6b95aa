"""`TypedDeviceDict`: a dict with a schema, which the annotations of its class declare."""

from __future__ import annotations

import sys
from abc import ABCMeta
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, overload

import torch
from torch import Tensor
from typing_extensions import Self, Unpack, dataclass_transform

from .._encoders.protocol import StringEncoder
from .._errors import Path, described, with_path
from .._memory.device import DeviceLike
from .._tree.policy import OPTIONS, Encoders, OptionFields, Options, refuse_positional
from .._tree.ragged import Ragged
from .._tree.tree import TreeDict, builtin_dict
from .._tree.walk import Items, as_dict, tensors_in
from .device_dict import DeviceDict
from .insert import insert, refuse_misspelled
from .schema import DeclaredField, Default, Schema, Shaped, declared_by, field, read_annotations, shape_error

Given = TypeVar("Given")
Read = TypeVar("Read")

if TYPE_CHECKING:  # pragma: no cover
    # Type checkers see the options as fields, so every constructor accepts them. With a descriptor, the type of the
    # argument differs from the type that is read. With `InitVar`, pyright could not read `batch.device`.

    class _Property(Generic[Given, Read]):
        @overload
        def __get__(self, instance: None, owner: Any) -> Given | None: ...
        @overload
        def __get__(self, instance: object, owner: Any) -> Read: ...
        def __get__(self, instance: Any, owner: Any) -> Any: ...
        def __set__(self, instance: None, value: Given | None) -> None: ...


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(field,))
class _Typed(ABCMeta):
    """Metaclass: type checkers see the annotations as fields, and instances have no other attributes."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> _Typed:
        namespace.setdefault("__slots__", ())  # so that setting a misspelled field raises
        out: Any = super().__new__(cls, name, bases, namespace, **options)
        with suppress(NameError):  # the name may be defined later; the first instance evaluates again
            out._schema(sys._getframe(1).f_locals)  # string annotations may use local names of a function
        return out


class TypedDeviceDict(DeviceDict[Tensor], OptionFields, metaclass=_Typed):
    """A `DeviceDict` with a schema: class annotations declare the fields, for type checkers and for validation.

    The attribute ``batch.image`` is the item ``batch["image"]``: read, set or delete it. Annotate a field as:

    - ``Tensor``: any tensor.
    - ``Float[Tensor, "batch 3 h w"]`` (jaxtyping): a tensor with this dtype and shape. Dimensions with the same name
      must have the same size in all fields of an instance, including nested dicts. jaxtyping is optional, and this
      package does not import it.
    - ``Annotated[Tensor, Utf8()]``: strings, and their codes, with this encoder.
    - another `TypedDeviceDict` class: a nested dict. A mapping is converted to that class.
    - ``DeviceDict``: a nested dict with any fields.
    - any other class: an object of that class, or a list of them in a batch. The class needs ``objects="keep"``. So
      ``split: str``, ``size: tuple[int, int]`` and ``hidden: tuple[Tensor, ...]`` are checked by their outer class.
    - ``... | None = None``: an optional field. While the field is absent, it reads as None and is not a key. Setting it
      to None deletes it.
    - ``... = field(default=...)`` or ``field(default_factory=...)``: a field with a default. See `field`.

    A subclass inherits the fields. A class can declare the options of `DeviceDict`:
    ``class Batch(TypedDeviceDict, dtype=...)``.

    Fields are validated when values enter: at construction, on set and delete, in `update` (once, at the end), `map`,
    ``|``, and `collate` with ``cls=``. These results of a valid dict are not validated again: `to` and the other casts
    and moves, `rows` (they may lack the batch dimension), `stack`, `cat`, `new_zeros`, `new_empty`, copies, pickle and
    pytree. If such a result no longer has the dtypes or shapes of the schema, later changes validate only names and
    kinds. A change to a nested dict validates that dict alone. `select` and `drop` return a plain `DeviceDict`. While
    torch.compile traces, nothing is validated.

    Args:
        data: a mapping or an iterable of pairs, for frameworks that rebuild a dict as ``type(d)({...})``. Type checkers
            reject this argument; use `from_dict` instead.
        given: the fields, by keyword, and the options of `DeviceDict`.

    Raises: ``TypeError`` that names the class and the field, if a field is missing, unknown or of another kind, or if a
    required field is deleted; ``ValueError`` for a wrong dtype or shape; the errors of `DeviceDict`. The dict is
    unchanged.
    Cost: as `DeviceDict`, and a check per field. With jaxtyping, some microseconds per field.

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
    # No annotations here: they would be evaluated in the public module, where these names are missing.
    _own = cast("Mapping[str, Default | None]", {})  # the fields that this class itself declares, and their defaults
    _declared = cast("Mapping[str, Default | None]", {})  # the fields of this class and its bases
    _optional = frozenset[str]()  # the fields that may be absent
    _defaults = cast("Mapping[str, Default]", {})  # the defaults of other fields
    _evaluated = cast("Schema | None", None)  # the schema; None until the annotations can be evaluated

    if TYPE_CHECKING:  # pragma: no cover
        device: _Property[DeviceLike, torch.device | None] = _Property()  # pyright: ignore
        encoders: _Property[Encoders, Mapping[str, StringEncoder]] = _Property()  # pyright: ignore

        def select(self, *keys: str | Path) -> DeviceDict[Tensor]: ...
        def drop(self, *keys: str | Path) -> DeviceDict[Tensor]: ...

    else:

        def __init__(self, data=None, /, *more, device=None, **given) -> None:
            if more:
                refuse_positional(type(self).__name__, more)
            options = {name: given.pop(name) for name in OPTIONS if name in given} if given else {}
            self._schema()  # before `_begin`: it may declare encoders, which belong to the policy
            self._begin(data, device, options)
            items = {**({} if data is None else as_dict(data)), **given}
            if type(data) is type(self):  # a copy: a row without its batch dimension stays valid
                builtin_dict.update(self, data)
            insert(self, items, consent=device is not None)
            if "encoders" in options:
                refuse_misspelled(self, options["encoders"])

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._own = declared_by(cls)
        declared: dict[str, Default | None] = {}
        for base in reversed(cls.__mro__):
            declared |= base.__dict__.get("_own", {})
        cls._declared = declared
        cls._optional = frozenset(name for name, one in declared.items() if one is not None and one.is_none)
        cls._defaults = {name: one for name, one in declared.items() if one is not None and not one.is_none}
        _refuse_collisions(cls)
        for name in cls._own:
            setattr(cls, name, _attribute(name, name in cls._optional))
        cls._evaluated = None

    @classmethod
    def _schema(cls, names: Mapping[str, Any] = MappingProxyType({})) -> Schema:
        if cls._evaluated is None:
            fields: dict[str, DeclaredField] = {}
            for base in reversed(cls.__mro__[1:]):
                if issubclass(base, TypedDeviceDict):
                    fields |= {name: base._schema().fields[name] for name in base._own}
            schema = Schema(cls, fields | read_annotations(cls, cls._own, names))
            if schema.encoders:
                cls._class_policy = cls._class_policy.override(schema.encoders)
            cls._evaluated = schema
        return cls._evaluated

    @classmethod
    def from_dict(
        cls,
        data: Items,
        /,
        *,
        device: DeviceLike | None = None,
        **options: Unpack[Options],
    ) -> Self:
        """Create an instance from a mapping or an iterable of pairs. Type checkers do not check its keys.

        Args:
            data: the fields, for example parsed JSON. Python numbers take the declared floating-point dtype of a field.
            device: as for the constructor. So are the options.

        Raises: the errors of the constructor. Cost: that of the constructor.

        >>> class Point(TypedDeviceDict):
        ...     x: Tensor
        >>> Point.from_dict({"x": [1.0, 2.0]}, dtype=torch.float64).x
        tensor([1., 2.], dtype=torch.float64)
        """
        return cls(data, device=device, **options)  # pyright: ignore[reportCallIssue]

    @classmethod
    def wrap(cls, d: DeviceDict[Any], /) -> Self:
        """Create an instance from the tensors of a `DeviceDict`, and validate all fields once.

        The instance and ``d`` share their tensors: an in-place write to a tensor changes both. They do not share their
        structure: setting a field changes one of them. A packed dict stays packed. Encoders are kept.

        Args:
            d: a dict with the fields of this class. Fields with a default may be absent.

        Raises: ``TypeError`` if ``d`` is not a `DeviceDict`; the errors of the constructor.
        Cost: a check per field. No tensor is copied.

        >>> class Point(TypedDeviceDict):
        ...     x: Tensor
        >>> d = DeviceDict({"x": [1.0, 2.0]})
        >>> Point.wrap(d).x is d["x"]
        True
        """
        if not isinstance(d, DeviceDict):
            raise TypeError(
                f"wrap takes a DeviceDict, got {described(d)}; {cls.__name__}.from_dict takes other mappings"
            )
        return cls(d)  # pyright: ignore[reportCallIssue]

    # --- validation ---

    _has_fields = True

    def _given(self, data: Mapping[str, Any], at: Path) -> Mapping[str, Any]:
        """``data`` without values that mean "absent". ``at``: the path of self.

        Raises ``TypeError`` for a key that is not a field.
        """
        # Only a dict under construction is empty. A field with a default cannot be deleted.
        given = self._drop_none(data, not self)
        if not torch.compiler.is_compiling():  # pragma: no branch  (traced, not executed)
            try:
                self._schema().check_names(given)
            except TypeError as error:
                raise (with_path(error, at) if at else error) from None
        return given

    def _converts(self, key: str) -> bool:
        """Whether a field is declared as a nested dict, or as a tensor or `Ragged` and as nothing else."""
        schema = self._schema()
        field = schema.fields.get(key)
        return key in schema.nested or (
            field is not None and all(issubclass(kind, (Tensor, Ragged)) for kind in field.classes)
        )

    def _declared_dtype(self, key: str, dtype: torch.dtype, filled: bool = True) -> torch.dtype | None:
        """The declared dtype for a field of Python numbers; None if it is theirs. ``filled``: there are numbers."""
        field = self._schema().fields.get(key)
        return None if field is None else (field.values or field).dtype_of_numbers(dtype, filled, self._policy.dtype)

    def _commit(
        self,
        staged: Mapping[str, Any],
        device: torch.device | None,
        encoders: Mapping[str, StringEncoder] | None,
        removed: Sequence[str] = (),
    ) -> None:
        if not torch.compiler.is_compiling():  # pragma: no branch  (traced, not executed)
            items, known = {**self, **staged}, self._policy.encoders
            for key in removed:
                del items[key]
            known = {**known, **encoders} if encoders else known
            if not self._schema().fits(items, known, {}):
                self._check_fields(items, self)
                self._schema().check_encoders(known)
        super()._commit(staged, device, encoders, removed)

    def _validate(self, before: Mapping[str, Any] | None = None, at: Path = ()) -> None:
        if torch.compiler.is_compiling():  # pragma: no cover  (traced, not executed)
            return
        if self._schema().fits(self, self._policy.encoders, {}):
            return
        super()._validate(before, at)
        try:
            if defaults := self._absent_defaults(self):
                insert(self, defaults)
            self._schema().check_names(self)
            self._check_fields(self, before)
            self._schema().check_encoders(self._policy.encoders)
        except (TypeError, ValueError) as error:
            if not at:
                raise
            raise with_path(error, at) from error

    def _validate_samples(self) -> None:
        """Validate a batch that was made of samples. An error of a shape shows the sample, which the caller gave."""
        try:
            self._validate()
        except ValueError:
            if reason := shape_error(_shaped(type(self), self, self._schema().name, True)):
                raise ValueError(reason) from None
            raise

    def _check_fields(self, items: Mapping[str, Any], before: Mapping[str, Any] | None) -> None:
        """Validate the complete set of items: required fields, kinds, dtypes and shapes. ``before``: see `_validate`.

        The kinds of values that are unchanged are not checked again.
        """
        schema = self._schema()
        schema.check_required(items)
        if before is items:
            schema.check_kinds(items, items)
            return
        before = before if isinstance(before, TypedDeviceDict) else {}
        changed = {k: v for k, v in items.items() if before.get(k) is not v} if before else items
        schema.check_kinds(changed, before)
        reason = shape_error(_shaped(type(self), items, schema.name)) if schema.shaped else ""
        # If the shapes did not fit before the change (a row, a cast), they may stay so.
        if reason and not (before and shape_error(_shaped(type(self), before, schema.name))):
            raise ValueError(reason)

    @classmethod
    def _drop_none(cls, data: Mapping[str, Any], complete: bool = True) -> Mapping[str, Any]:
        """``data`` without optional fields whose value is None. ``complete``: with the defaults of absent fields."""
        optional = cls._optional
        given = {k: v for k, v in data.items() if v is not None or k not in optional} if optional else data
        return {**given, **cls._absent_defaults(data)} if complete and cls._defaults else given

    @classmethod
    def _absent_defaults(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        """The defaults of the fields that ``data`` lacks, on the device of the tensors in ``data``."""
        made = {name: one.make() for name, one in cls._defaults.items() if name not in data}
        moved = {name: value for name, value in made.items() if isinstance(value, (Tensor, Ragged, DeviceDict))}
        if moved and (tensors := tensors_in(data)):
            made |= {name: value.to(tensors[0].device) for name, value in moved.items()}
        return made

    def __setitem__(self, key: str | Path, value: Any, /) -> None:
        self._set(key, value)

    def _set_path(self, path: Path, value: Any, at: Path = ()) -> None:
        node: DeviceDict[Any] = self  # becomes the nested dict that the insert changes
        for part in path[:-1]:
            inner: Any = builtin_dict.get(node, part)
            if not isinstance(inner, DeviceDict):
                break
            node = inner
        before = None if node is self else self.copy()
        with _undone_if_refused(node):
            super()._set_path(path, value, at)
            if node is not self:  # the insert validated `node` only, not the dimensions that it shares with `self`
                self._validate(before)

    def popitem(self) -> tuple[str, Tensor]:
        self._refuse_without(next(reversed(self), None))
        return super().popitem()

    def clear(self) -> None:
        for key in self:
            self._refuse_without(key)
        super().clear()

    def _refuse_without(self, key: Any) -> None:
        if key in self and key in self._declared and key not in self._optional:
            name = f"{type(self).__name__}.{key}"
            raise TypeError(f"{name} is required and cannot be deleted; drop({key!r}) gives a DeviceDict without it")

    # --- classes of nested dicts and subsets ---

    @classmethod
    def _nested_class(cls, key: str) -> type[DeviceDict[Any]]:
        return cls._schema().nested.get(key, DeviceDict)

    def _untyped_subset(self, items: Any) -> Any:
        return DeviceDict._new(items, self._device, self._policy)


def _attribute(name: str, optional: bool) -> Any:
    """A property that reads, sets and deletes the item ``name``."""

    def write(self: TypedDeviceDict, value: Any) -> None:
        self[name] = value

    def delete(self: TypedDeviceDict) -> None:
        if name not in self:
            raise AttributeError(f"{type(self).__name__}.{name} is absent already")
        del self[name]

    def get(self: TypedDeviceDict) -> Any:
        return self[name]

    def get_or_none(self: TypedDeviceDict) -> Any:
        return builtin_dict.get(self, name)

    # `itemgetter(name)` would be faster, but torch.compile cannot trace it.
    return property(get_or_none if optional else get, write, delete, f"The item {name!r}.")


def _refuse_collisions(cls: type[TypedDeviceDict]) -> None:
    """Raise ``TypeError`` for a field whose name has another meaning in the class."""
    for name in cls._declared:
        where = f"{cls.__name__}.{name}"
        if name.startswith("_"):
            raise TypeError(f"{where}: a field cannot start with an underscore; rename it")
        if name in OPTIONS:
            raise TypeError(f"{where}: a field cannot have the name of a constructor option; rename it")
        if any(name in base.__dict__ for base in TypedDeviceDict.__mro__):
            raise TypeError(f"{where}: a field cannot have the name of a method or property of DeviceDict; rename it")
        for base in cls.__mro__:
            if name in base.__dict__ and name not in base.__dict__.get("_own", {}):
                raise TypeError(f"{where} is a field, and something else in {base.__name__}; rename one of them")


def _shaped(
    cls: type[TypedDeviceDict], items: Mapping[str, Any], where: str, samples: bool = False
) -> Iterator[Shaped]:
    """Yield every tensor with its annotations, in the order of the schema. Nested typed dicts are included.

    ``samples``: each row is a sample that the caller gave.
    """
    for name, declared in cls._schema().fields.items():
        value = items.get(name)
        if isinstance(value, Tensor):
            yield f"{where}.{name}", value, declared, samples
        elif isinstance(value, TypedDeviceDict):
            yield from _shaped(type(value), value, f"{where}.{name}", samples)
        elif isinstance(value, Ragged) and declared.values:
            yield f"{where}.{name}.values", value.values, declared.values, False


@contextmanager
def _undone_if_refused(d: TreeDict[Any]) -> Generator[None]:
    """Restore ``d`` if the block raises an error."""
    items, device, policy = dict(d), d._device, d._policy
    try:
        yield
    except BaseException:
        builtin_dict.clear(d)
        builtin_dict.update(d, items)
        d._device, d._policy = device, policy
        raise
