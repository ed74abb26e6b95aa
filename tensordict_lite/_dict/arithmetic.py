"""Arithmetic on whole dicts: match the fields of several mappings, write all fields in place, norms and lists.

A write has two steps. The first step finds every reason for which torch would refuse a field. The second step writes,
in as few calls as possible: one for the buffer of a packed dict, one ``torch._foreach_*`` call, or one for each field.
A plan stores the result of the first step. Later calls with the same keys and the same metadata use the plan.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from math import inf, isfinite
from operator import is_
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from .._encoders.protocol import decode_nested
from .._errors import DeviceMismatchError, Path, described, dotted, dtype_name, with_path
from .._memory.buffer import FOREACH_DTYPES
from .._memory.cast import CASTABLE
from .._memory.device import CPU, intercepted
from .._memory.packed import as_one
from .._memory.snapshot import have_strides, plan_key, remember, snapshot
from .._tree.tree import TreeDict, tensor_paths
from .._tree.walk import only_tensors

_autograd = cast(Any, torch._C)._autograd
_FOREACH_CLASSES = frozenset((Tensor, Parameter))
"""The classes of tensors that ``torch._foreach_*`` takes."""


# --- matching ---


def match(d: TreeDict[Any], other: Any, called: str, flat: bool = False) -> list[Tensor]:
    """The tensors of a mapping with the keys of ``d``, in the order of ``d._tensors()``.

    Raises ``ValueError`` for a missing or an extra key, and ``DeviceMismatchError``. Raises ``TypeError`` for a value
    that is not a tensor where ``d`` has a tensor.

    ``called``: the name of the method, for messages. ``flat``: the caller knows that all values of ``d`` are plain
    tensors.
    """
    if not isinstance(other, Mapping):
        raise TypeError(
            f"{called} takes mappings with the keys of this {type(d).__name__}, got {described(other)}; "
            "bind any other value in a lambda"
        )
    mapping = other
    known = _is_on_device_of(d, other)
    values = _match_flat(d, mapping, known) if flat or only_tensors(d.values()) else None
    if values is not None:
        return values
    found: list[Tensor] = []
    _match_level(d, mapping, None if known else d._device, (), found)
    return found


def _is_on_device_of(d: TreeDict[Any], other: Any) -> bool:
    """Whether ``other`` is a dict whose tensors are all on the device of ``d``."""
    return isinstance(other, TreeDict) and d._device is not None and other._device == d._device


def _match_flat(d: TreeDict[Any], other: Mapping[str, Any], known: bool) -> list[Tensor] | None:
    """The values of a mapping that has the keys of ``d``, in the same order, and plain tensors on the device of ``d``.

    None for any other mapping. ``known``: the result of `_is_on_device_of`.
    """
    if not (known or type(other) is dict) or list(d) != list(other):
        return None
    values = list(other.values())
    if not only_tensors(values):
        return None
    if not known and (d._device is not CPU or False in [value.is_cpu for value in values]):
        return None
    return values


def _match_level(
    d: TreeDict[Any], other: Mapping[str, Any], device: torch.device | None, at: Path, found: list[Tensor]
) -> None:
    if len(d) != len(other) or any(key not in other for key in d):
        for key in d:
            if key not in other:
                raise ValueError(f"the other mapping lacks {dotted((*at, key))}")
        extra = next(key for key in other if key not in d)
        raise ValueError(f"the other mapping has {dotted((*at, extra))}, which this {type(d).__name__} lacks")
    for key, value in d.items():
        theirs: Any = other[key]
        if isinstance(value, Tensor):
            if not isinstance(theirs, Tensor):
                _refuse_kind((*at, key), theirs, "a tensor; DeviceDict(other) makes tensors of numbers")
            if device is not None and theirs.device != device:
                _refuse_device((*at, key), device, theirs.device)
            found.append(theirs)
        elif isinstance(value, TreeDict):
            if not isinstance(theirs, Mapping):
                _refuse_kind((*at, key), theirs, "a mapping")
            _match_level(value, theirs, device, (*at, key), found)
        elif isinstance(theirs, (Tensor, Mapping)):
            _refuse_kind((*at, key), theirs, f"an object: it is a kept {type(value).__name__} in this dict")


def _refuse_kind(path: Path, value: Any, expected: str) -> NoReturn:
    raise TypeError(f"{dotted(path)} is {described(value)} in the other mapping, expected {expected}")


def _refuse_device(path: Path, expected: torch.device, actual: torch.device) -> NoReturn:
    where = dotted(path) if path else "the other tensor"
    raise DeviceMismatchError(
        f"{where} is on {actual}{' in the other mapping' if path else ''}, this DeviceDict is on {expected}; "
        f"move it with .to({str(expected)!r})",
        key=(path[0] if len(path) == 1 else path) if path else None,
        expected=expected,
        actual=actual,
    )


def refuse_encoded(d: TreeDict[Any], called: str, at: Path = ()) -> None:
    """Raise ``TypeError`` for the first field of encoded strings: arithmetic would make other strings of them."""
    encoders = d._policy.encoders
    if not encoders and only_tensors(d.values()):
        return
    for key, value in d.items():
        nested = isinstance(value, TreeDict)
        if key in encoders and (nested or (isinstance(value, Tensor) and not _is_float(value))):
            raise TypeError(
                f"{dotted((*at, key))} holds encoded strings, which {called} would change; "
                f"leave it out: drop({key!r}) shares the tensors of the other fields"
            )
        if nested:
            refuse_encoded(value, called, (*at, key))


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


# --- writing in place ---


class _Operation(NamedTuple):
    """An operation that writes to tensors in place."""

    name: str
    each: Callable[[Tensor, Any], Any]
    """Write to one tensor. The second argument is a tensor or a number."""
    many: Callable[[list[Tensor], Any], Any] | None
    """The same for lists of tensors. None if torch has no such function."""
    zero_stays: bool = False
    """Whether the operation with a number maps zero to zero. Only then may it write to the gaps of a buffer."""
    casts: bool = False
    """Whether the operation takes every pair of dtypes."""
    scale: complex = 1
    """The number ``alpha`` or ``weight`` in ``each`` and ``many``."""


class _Write(NamedTuple):
    """The writes of one operation, validated."""

    operation: _Operation
    tensors: list[Tensor]
    others: Any
    """A tensor for each of ``tensors``; or one number, or None, for all."""
    dtypes: list[torch.dtype]
    """The dtype of each of ``tensors``."""
    one_dtype: bool
    """Whether ``dtypes`` are all the same."""
    singly: Sequence[int]
    """The tensors that need a call of their own."""
    alike: bool
    """Whether all tensors are contiguous, and the others have the same shapes and the same dtypes."""


def zero_(d: TreeDict[Any]) -> None:
    operands = _planned(d, 0)  # `zero_` has no operand: the number is not used
    if operands is None or operands.plan is None:
        refuse_encoded(d, "zero_")
        tensors, flat = d._tensors_and_kind()
        operands = _Operands(tensors, None, flat, None if operands is None else operands.key)
    _run(d, _ZERO, operands._replace(others=None))


def add_(d: TreeDict[Any], other: Any, alpha: complex) -> None:
    _add_scaled(d, "add_", Tensor.add_, torch._foreach_add_, other, alpha)


def sub_(d: TreeDict[Any], other: Any, alpha: complex) -> None:
    _add_scaled(d, "sub_", Tensor.sub_, torch._foreach_sub_, other, alpha)


def _add_scaled(d: TreeDict[Any], name: str, each: Any, many: Any, other: Any, alpha: Any) -> None:
    _refuse_unless_number(alpha, "alpha")
    operands = _operands(d, other, name)
    listed = isinstance(operands.others, list)

    def each_scaled(tensor: Tensor, value: Any) -> None:
        each(tensor, value, alpha=alpha)

    def many_scaled(tensors: list[Tensor], values: list[Tensor]) -> None:
        many(tensors, values, alpha=alpha)

    if alpha == 1:
        operation = _Operation(name, each, many)
    else:  # the function for lists and a number takes no alpha
        operation = _Operation(name, each_scaled, many_scaled if listed else None, scale=alpha)
    _run(d, operation, operands)


def mul_(d: TreeDict[Any], other: Any) -> None:
    operands = _operands(d, other, "mul_")
    by = operands.others
    stays = isinstance(by, (int, float)) and by > 0 and isfinite(by)
    _run(d, _Operation("mul_", Tensor.mul_, torch._foreach_mul_, stays), operands)


def div_(d: TreeDict[Any], other: Any) -> None:
    operands = _operands(d, other, "div_")
    by = operands.others
    stays = isinstance(by, (int, float)) and by > 0 and isfinite(by)
    _run(d, _Operation("div_", Tensor.div_, torch._foreach_div_, stays), operands)


def copy_(d: TreeDict[Any], other: Any) -> None:
    _run(d, _COPY, _operands(d, other, "copy_", numbers=False))


def lerp_(d: TreeDict[Any], other: Any, weight: Any) -> None:
    _refuse_unless_number(weight, "weight")

    def each(tensor: Tensor, end: Tensor) -> None:
        tensor.lerp_(end, weight)

    def many(tensors: list[Tensor], ends: list[Tensor]) -> None:
        torch._foreach_lerp_(tensors, ends, weight)

    operation = _Operation("lerp_", each, many, scale=weight)
    _run(d, operation, _operands(d, other, "lerp_", numbers=False), integers=_COPY_IN_LERP)


def _zero_each(tensor: Tensor, _: None) -> None:
    tensor.zero_()


def _zero_many(tensors: list[Tensor], _: None) -> None:
    torch._foreach_zero_(tensors)


_ZERO = _Operation("zero_", _zero_each, _zero_many, casts=True)
_COPY = _Operation("copy_", Tensor.copy_, torch._foreach_copy_, casts=True)
_COPY_IN_LERP = _COPY._replace(name="lerp_")


def _refuse_unless_number(value: Any, name: str) -> None:
    if not isinstance(value, (int, float, complex)):
        raise TypeError(f"{name} is a number, got {described(value)}; use .item() for a tensor of one element")


class _Operands(NamedTuple):
    """The tensors that an operation writes to, and the other operands."""

    tensors: list[Tensor]
    others: Any
    """A tensor for each of ``tensors``; or one number, or None, for all."""
    plain: bool
    """Whether the class of all tensors is known to be Tensor."""
    key: Any = None
    """The cache key of a plan for these operands. None if no plan is possible."""
    plan: _ArithmeticPlan | None = None
    """The plan for tensors with this metadata, if there is one."""


class _ArithmeticPlan(NamedTuple):
    """The result of validation: all tensors are contiguous, and the other operands have the same dtypes and shapes."""

    same: Callable[..., bool | None]
    """Tells whether other operands have the same metadata. See `snapshot`."""
    groups: list[tuple[torch.dtype, list[int]]]
    """The indices of the tensors of each dtype."""


_ARITHMETIC_PLANS: dict[Any, _ArithmeticPlan] = {}
_ORDERED = frozenset((dict, OrderedDict))
"""The classes of mappings, besides dicts of this package, that can be operands with a plan."""


def _planned(d: TreeDict[Any], other: Any) -> _Operands | None:
    """The operands with the key of their plan, and with the plan if it is valid. None if no plan is possible."""
    if d._policy.encoders or intercepted():
        return None
    others = None
    listed = isinstance(other, dict)
    if listed:
        theirs = other
        encoded = isinstance(theirs, TreeDict) and theirs._policy.encoders
        if encoded or not (isinstance(theirs, TreeDict) or type(theirs) in _ORDERED) or list(theirs) != list(d):
            return None
        others = list(theirs.values())
    elif not _is_moderate(other):
        return None
    tensors: list[Any] = list(d.values())
    key = (plan_key(d), listed)
    plan = _ARITHMETIC_PLANS.get(key)
    if plan is not None and not plan.same(*tensors, *(others or ())):
        plan = None
    return _Operands(tensors, others if listed else other, False, key, plan)


def _operands(d: TreeDict[Any], other: Any, called: str, numbers: bool = True) -> _Operands:
    """The tensors of ``d``, and the other operand of each, as a list. A number stays itself."""
    planned = _planned(d, other) if numbers or isinstance(other, dict) else None
    if planned is not None and planned.plan is not None:
        return planned
    key = None if planned is None else planned.key
    tensors, flat = d._tensors_and_kind()
    if not flat or d._policy.encoders:
        refuse_encoded(d, called)
    if isinstance(other, Mapping):
        mapping = other
        values = _match_flat(d, mapping, _is_on_device_of(d, other)) if flat else None
        plain = values is not None
        if values is None:
            values = match(d, mapping, called, flat)
        if isinstance(other, TreeDict) and (not flat or other._policy.encoders):
            refuse_encoded(other, called)
        return _Operands(tensors, values, plain, key)
    if isinstance(other, Tensor):
        if d._device is not None and other.device != d._device and not (other.dim() == 0 and other.is_cpu):
            _refuse_device((), d._device, other.device)
        return _Operands(tensors, [other] * len(tensors), False)
    if not (numbers and isinstance(other, (int, float, complex))):
        kinds = "a mapping, a tensor or a number" if numbers else "a mapping or a tensor"
        raise TypeError(f"{called} takes {kinds}, got {described(other)}")
    return _Operands(tensors, other, flat, key)


def _run(d: TreeDict[Any], operation: _Operation, operands: _Operands, integers: _Operation | None = None) -> None:
    """Validate all fields, then write. ``integers``: the operation for integer and bool fields, if it differs."""
    tensors, others, plain, key, plan = operands
    if not tensors:
        return
    planned = None if plan is None else _planned_writes(operation, operands, plan, integers)
    if planned is not None:
        for write in planned:
            _execute(write)
        return
    dtypes = [t.dtype for t in tensors]
    one_dtype = dtypes.count(dtypes[0]) == len(dtypes)
    writes: list[_Write] = []
    if integers is None or (one_dtype and _is_float_dtype(dtypes[0])):
        writes.append(_validated(d, operation, operands, dtypes, one_dtype, range(len(tensors))))
    else:
        for step, floats in ((operation, True), (integers, False)):
            chosen = [i for i, dtype in enumerate(dtypes) if _is_float_dtype(dtype) is floats]
            if chosen:
                picked, their = _Operands(_pick(tensors, chosen), _pick(others, chosen), plain), _pick(dtypes, chosen)
                writes.append(_validated(d, step, picked, their, len(set(their)) == 1, chosen))
    for write in writes:
        _execute(write)
    if key is not None and plan is None and all(write.alike for write in writes):
        _remember_operands(d, operands, dtypes)


def _remember_operands(d: TreeDict[Any], operands: _Operands, dtypes: list[torch.dtype]) -> None:
    """Store a plan for operands that are alike. A dict with nested dicts gets no plan: its key has no nested keys."""
    tensors, others = operands.tensors, operands.others
    if len(tensors) != len(d) or not all(map(is_, tensors, d.values())):
        return
    theirs = others if isinstance(others, list) else []
    same = snapshot([*tensors, *theirs], have_strides)
    if same is None:
        return
    groups: dict[torch.dtype, list[int]] = {}
    for i, dtype in enumerate(dtypes):
        groups.setdefault(dtype, []).append(i)
    remember(_ARITHMETIC_PLANS, operands.key, _ArithmeticPlan(same, list(groups.items())))


def _planned_writes(
    operation: _Operation, operands: _Operands, plan: _ArithmeticPlan, integers: _Operation | None
) -> list[_Write] | None:
    """The writes of an operation with a plan. None if torch may refuse the operation for these dtypes or numbers."""
    tensors, others = operands.tensors, operands.others
    if not (_is_moderate(operation.scale) and (others is None or isinstance(others, list) or _is_moderate(others))):
        return None
    writes: list[_Write] = []
    for dtype, members in plan.groups:
        step = operation if integers is None or _is_float_dtype(dtype) else integers
        if not (step.casts or dtype in _COMMON):
            return None
        if len(members) == len(tensors):
            return [_Write(step, tensors, others, [dtype], True, (), True)]
        writes.append(_Write(step, _pick(tensors, members), _pick(others, members), [dtype], True, (), True))
    return writes


def _pick(values: Any, chosen: Sequence[int]) -> Any:
    """The items of a list at these indices. A single operand for all tensors stays itself."""
    return [values[i] for i in chosen] if isinstance(values, list) else values


def _is_float_dtype(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


Refuse = Callable[..., NoReturn]
"""Raise an error for a tensor. Takes its index, the rest of the message, the cause and the class of the error."""


def _validated(
    d: TreeDict[Any],
    operation: _Operation,
    operands: _Operands,
    dtypes: list[torch.dtype],
    one_dtype: bool,
    indices: Sequence[int],
) -> _Write:
    """Validate an operation: raise the error of the first tensor that it cannot write to.

    ``indices``: the index of each tensor in ``d._tensors()``, for messages.
    """
    tensors, others, plain_classes = operands[:3]
    if intercepted():  # transforms and compilers see one call for each field, and validate it themselves
        return _Write(operation, tensors, others, dtypes, one_dtype, range(len(tensors)), False)
    given = others if isinstance(others, list) else None

    def refuse(i: int, reason: str, error: Exception | None = None, kind: type[Exception] = RuntimeError) -> NoReturn:
        path = next(path for j, (path, _) in enumerate(tensor_paths(d)) if j == indices[i])
        raise kind(f"{dotted(path)} {reason}") from error

    _refuse_inference(operation, tensors, refuse)
    same = _are_alike(tensors, given, dtypes, plain_classes)
    if same is not None:
        number = others
        moderate = _is_moderate(operation.scale) and (same if given is not None else _is_moderate(number))
        if not (one_dtype and dtypes[0] in _COMMON and moderate):
            every = range(len(tensors))
            _validate_dtypes(operation, tensors, given, others, every, refuse)
            _validate_shapes(operation, tensors, given, every, refuse)
        return _Write(operation, tensors, others, dtypes, one_dtype, (), same)
    singly: list[int] = []
    plain: list[int] = []
    for i, tensor in enumerate(tensors):
        theirs = None if given is None else given[i]
        if _is_special(tensor) or (theirs is not None and _is_special(theirs)):
            _refuse_special(operation, tensor, theirs, others, i, refuse)
            singly.append(i)
        else:
            plain.append(i)
            if torch._debug_has_internal_overlap(tensor) == 1:
                refuse(i, f"is expanded: its elements share memory; clone() it before {operation.name}")
    _validate_dtypes(operation, tensors, given, others, plain, refuse)
    _validate_shapes(operation, tensors, given, plain, refuse)
    return _Write(operation, tensors, others, dtypes, one_dtype, singly, False)


def _refuse_inference(operation: _Operation, tensors: list[Tensor], refuse: Refuse) -> None:
    """Raise the error for the first inference tensor, outside of inference mode."""
    if torch.is_inference_mode_enabled():
        return
    try:
        _ = [t._version for t in tensors]  # raises for inference tensors, in 0.5x the time of `is_inference`
    except RuntimeError:
        i = [t.is_inference() for t in tensors].index(True)
        refuse(i, f"is an inference tensor; clone() it before {operation.name}, or use torch.inference_mode()")


def _are_alike(
    tensors: list[Tensor], others: list[Tensor] | None, dtypes: list[torch.dtype], plain: bool
) -> bool | None:
    """Whether the others have the dtypes and shapes of the tensors. None if a tensor is `_is_special` or has gaps.

    ``plain``: whether the class of all tensors is known to be Tensor.
    """
    # One list comprehension for each attribute. A loop over the tensors takes longer.
    grad = torch.is_grad_enabled()
    if not plain and not _FOREACH_CLASSES.issuperset(map(type, tensors)):
        return None
    if grad and True in [t.requires_grad for t in tensors]:
        return None
    try:
        if False in [t.is_contiguous() for t in tensors]:
            return None
        if not _COMPLEX.isdisjoint(dtypes) and True in [t.is_conj() for t in (*tensors, *(others or ()))]:
            return None
        if others is None:
            return None if True in [t.is_nested for t in tensors] else True
        if not plain and not _FOREACH_CLASSES.issuperset(map(type, others)):
            return None
        if grad and True in [t.requires_grad for t in others]:
            return None
        if [t.layout for t in others].count(torch.strided) != len(others):
            return None
        return dtypes == [t.dtype for t in others] and [t.shape for t in tensors] == [t.shape for t in others]
    except RuntimeError:  # sparse tensors are not contiguous, nested tensors have no shape
        return None


def _is_special(tensor: Tensor) -> bool:
    """Whether a tensor needs a call of its own: it has a gradient history, or is a subclass, sparse, nested or
    conjugated."""
    return (
        type(tensor) not in _FOREACH_CLASSES
        or tensor.layout != torch.strided
        or tensor.is_nested
        or tensor.is_quantized
        or tensor.is_conj()
        or (tensor.requires_grad and torch.is_grad_enabled())
    )


def _refuse_special(
    operation: _Operation, tensor: Tensor, other: Tensor | None, others: Any, i: int, refuse: Refuse
) -> None:
    """Raise the error of torch if torch refuses to write to this tensor.

    The rules of autograd are tested here. For all other rules, the operation runs on a copy of the tensor.
    """
    name = operation.name
    if torch.is_grad_enabled() and (tensor.requires_grad or (other is not None and other.requires_grad)):
        if tensor.requires_grad and tensor.is_leaf:
            refuse(i, f"is a leaf that requires grad; call {name} in torch.no_grad(), or detach() the dict first")
        if tensor._is_view() and (
            _autograd._get_creation_meta(tensor) != _autograd.CreationMeta.DEFAULT
            or (tensor.requires_grad and cast(Tensor, tensor._base).is_leaf)
        ):
            refuse(i, f"is a view that autograd does not let {name} change; clone() it first")
    with torch.no_grad():
        try:
            operation.each(tensor.detach().clone(), others if other is None else other.detach())
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            _reword(operation, tensor, others if other is None else other, i, error, refuse)


def _validate_dtypes(
    operation: _Operation,
    tensors: list[Tensor],
    others: list[Tensor] | None,
    number: Any,
    plain: Sequence[int],
    refuse: Refuse,
) -> None:
    """Raise the error of torch for a pair of dtypes that torch refuses. Tries every pair once, on one element."""
    if operation.casts:
        return
    if others is None:
        pairs: dict[Any, int] = {}
        for i in reversed(plain):
            pairs[tensors[i].dtype] = i
    else:
        mine, theirs = [t.dtype for t in tensors], [t.dtype for t in others]
        # The dtype of a result can depend on whether a tensor has dimensions.
        pairs = {(mine[i], theirs[i], not tensors[i].dim(), not others[i].dim()): i for i in reversed(plain)}
    for i in sorted(pairs.values()):  # the first field that fails is named
        mine_, other = tensors[i], number if others is None else others[i]
        try:
            operation.each(_one(mine_), _one(other) if others is not None else other)
        except (RuntimeError, TypeError, ValueError) as error:
            _reword(operation, mine_, other, i, error, refuse)


_ONE_BUFFER_FROM = 16
"""The number of fields from which one operation on the buffer of a packed dict is faster than ``torch._foreach_*``."""
_MODERATE = 65504
"""The largest number of float16, so every dtype of `_COMMON` can represent it."""
_COMMON = FOREACH_DTYPES & CASTABLE
"""Dtypes for which torch has every operation of this module, if both operands have the same dtype."""
_COMPLEX = frozenset(dtype for dtype in CASTABLE if dtype.is_complex)
"""Dtypes of tensors that can be conjugated views, which ``torch._foreach_*`` refuses."""


def _is_moderate(number: Any) -> bool:
    return type(number) in (int, float) and abs(number) <= _MODERATE


def _one(tensor: Tensor) -> Tensor:
    """A tensor of one element, with the dtype and device of ``tensor``. 0-d if ``tensor`` is 0-d."""
    return torch.ones((1,) if tensor.dim() else (), dtype=tensor.dtype, device=tensor.device)


def _reword(operation: _Operation, tensor: Tensor, other: Any, i: int, error: Exception, refuse: Refuse) -> NoReturn:
    beside = "" if other is None else f" and {described(other) if isinstance(other, Tensor) else repr(other)}"
    said = str(error).splitlines()[0]
    kind = TypeError if isinstance(error, TypeError) else RuntimeError
    refuse(i, f"is {described(tensor)}; torch refuses {operation.name} of it{beside}: {said}", error, kind)


def _validate_shapes(
    operation: _Operation, tensors: list[Tensor], others: list[Tensor] | None, plain: Sequence[int], refuse: Refuse
) -> None:
    """Raise an error for an other tensor that does not broadcast to the shape of the field."""
    if others is None:
        return
    for i in plain:
        if tensors[i].shape != others[i].shape and not _broadcasts(others[i].shape, tensors[i].shape):
            refuse(i, f"is {described(tensors[i])}; {operation.name} cannot broadcast {described(others[i])} to it")


def _broadcasts(shape: torch.Size, target: torch.Size) -> bool:
    try:
        return torch.broadcast_shapes(shape, target) == target
    except RuntimeError:
        return False


def _execute(write: _Write) -> None:
    """Write to all tensors, in as few calls as possible."""
    operation, tensors, others, dtypes, one_dtype, singly, alike = write
    many = operation.many
    listed = isinstance(others, list)
    for i in range(len(tensors)) if many is None else singly:
        operation.each(tensors[i], others[i] if listed else others)
    if many is None or len(singly) == len(tensors):
        return
    if singly:
        rest = sorted(set(range(len(tensors))).difference(singly))
        tensors, others, dtypes = _pick(tensors, rest), _pick(others, rest), _pick(dtypes, rest)
        one_dtype = len(set(dtypes)) == 1
    number = isinstance(others, (int, float, complex))
    if alike and one_dtype and number and _execute_on_buffer(operation, tensors, others):
        return
    if one_dtype and (alike or not listed):
        many(tensors, others)
        return
    # Grouped by dtypes, because the CUDA kernel of some versions misreads a list of mixed dtypes.
    groups: dict[Any, list[int]] = {}
    for i, dtype in enumerate(dtypes):
        theirs = cast("list[Tensor]", others)[i].dtype if listed else None
        groups.setdefault((dtype, theirs), []).append(i)
    for members in groups.values():
        many(_pick(tensors, members), _pick(others, members))


def _execute_on_buffer(operation: _Operation, tensors: list[Tensor], number: complex) -> bool:
    """Write to the buffer of packed tensors in one operation. False if the tensors do not allow it.

    Note: for numbers only. With a list of other tensors, and for `zero_`, `as_one` takes longer than it saves.
    """
    found = as_one(tensors) if len(tensors) >= _ONE_BUFFER_FROM else None
    if found is None or (found.gaps and not operation.zero_stays):
        return False
    # Packed fields have version counters of their own, which autograd compares.
    torch.autograd.graph.increment_version(tensors)
    with torch.no_grad():
        operation.each(found.flat, number)
    return True


# --- norms and lists ---


def total_norm(d: TreeDict[Any], order: float) -> Tensor:
    if not isinstance(order, (int, float)) or not order > 0:
        raise ValueError(f"ord is a number above 0, or inf, got {order!r}")
    refuse_encoded(d, "total_norm")
    for path, tensor in tensor_paths(d):
        if not _is_float(tensor):
            raise TypeError(
                f"{dotted(path)} is {dtype_name(tensor.dtype)}, a norm needs floating-point or complex fields; "
                "leave it out with drop()"
            )
    tensors = d._tensors()
    if order == inf:  # torch raises for a tensor without elements
        tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return torch.zeros((), device=d._device)
    # Note: not torch.nn.utils.get_total_norm, which records no gradient.
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        together = type(tensor) in _FOREACH_CLASSES and tensor.layout == torch.strided and tensor.dtype in _COMMON
        groups.setdefault(tensor.dtype if together and not intercepted() else torch.bool, []).append(tensor)
    norms = [torch.linalg.vector_norm(tensor, order) for tensor in groups.pop(torch.bool, ())]
    for group in groups.values():
        norms += torch._foreach_norm(group, order)
    return torch.linalg.vector_norm(torch.stack(norms), order)


def tolist(d: TreeDict[Any], at: Path = ()) -> dict[str, Any]:
    """The fields of a dict on the CPU as Python numbers, lists and strings: see `DeviceDict.tolist`."""
    out: dict[str, Any] = {}
    encoders = d._policy.encoders
    for key, value in d.items():
        path = (*at, key)
        if key in encoders and isinstance(value, (Tensor, TreeDict)) and _is_encoded(value):
            try:
                out[key] = decode_nested(encoders[key], value)
            except (TypeError, ValueError) as error:
                raise with_path(error, path) from error
        elif isinstance(value, Tensor):
            out[key] = _tensor_to_list(value, path)
        elif isinstance(value, TreeDict):
            out[key] = tolist(value, path)
        else:
            out[key] = value
    return out


def _is_encoded(value: Any) -> bool:
    return isinstance(value, TreeDict) or not _is_float(value)


def _tensor_to_list(tensor: Tensor, path: Path) -> Any:
    try:
        return [one.tolist() for one in tensor.unbind()] if tensor.is_nested else tensor.tolist()
    except (RuntimeError, TypeError) as error:
        raise with_path(error, path, "; convert it first") from error
