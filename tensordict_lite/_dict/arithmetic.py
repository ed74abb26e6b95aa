"""Arithmetic on whole dicts: match the fields of several mappings, write all fields in place, norms and lists.

A write has two steps. The first step finds every reason for which torch would refuse a field. The second step writes:
one ``torch._foreach_*`` call for all fields of one dtype, and a call for each field that those functions do not take.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from .._encoders.protocol import decode_nested
from .._errors import DeviceMismatchError, Path, described, dotted, dtype_name, is_out_of_memory, with_path
from .._memory.buffer import FOREACH_DTYPES
from .._memory.device import intercepted
from .._memory.overlap import is_expanded, overlap_partly
from .._tree.missing import refuse_other_keys
from .._tree.tree import TreeDict, tensor_paths
from .._tree.walk import only_tensors

_autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009  (not in its type stubs)
_FOREACH_CLASSES = frozenset((Tensor, Parameter))
"""The classes of tensors that ``torch._foreach_*`` takes."""


# --- matching ---


def match(d: TreeDict[Any], other: Any, called: str) -> list[Tensor]:
    """The tensors of a mapping with the keys of ``d``, in the order of ``d._tensors()``.

    Raises ``ValueError`` for a missing or an extra key, and ``DeviceMismatchError``. Raises ``TypeError`` for a value
    that is not a tensor where ``d`` has a tensor.

    ``called``: the name of the method, for messages.
    """
    if not isinstance(other, Mapping):
        raise TypeError(
            f"{called} takes mappings with the keys of this {type(d).__name__}, got {described(other)}; "
            "bind any other value in a lambda"
        )
    found: list[Tensor] = []
    _match_level(d, other, d._device, (), found)
    return found


def _match_level(
    d: TreeDict[Any], other: Mapping[str, Any], device: torch.device | None, at: Path, found: list[Tensor]
) -> None:
    if list(d) == list(other):
        values = list(other.values())
    else:
        refuse_other_keys(d, other, at, "the other mapping", f"this {type(d).__name__}")
        values = [other[key] for key in d]
    if only_tensors((*d.values(), *values)) and [t.device for t in values].count(device) == len(values):
        found += values
        return
    for (key, value), theirs in zip(d.items(), values, strict=True):
        path = (*at, key)
        if isinstance(value, Tensor):
            if not isinstance(theirs, Tensor):
                _refuse_kind(path, theirs, "a tensor; DeviceDict(other) makes tensors of numbers")
            if device is not None and theirs.device != device:
                _refuse_device(path, device, theirs.device)
            found.append(theirs)
        elif isinstance(value, TreeDict):
            if not isinstance(theirs, Mapping):
                _refuse_kind(path, theirs, "a mapping")
            _match_level(value, theirs, device, path, found)
        elif isinstance(theirs, (Tensor, Mapping)):
            _refuse_kind(path, theirs, f"an object: it is a kept {type(value).__name__} in this dict")


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
    return _is_float_dtype(tensor.dtype)


def _is_float_dtype(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def raise_at(d: TreeDict[Any], i: int, error: Exception) -> NoReturn:
    """Raise ``error`` of tensor ``i`` of ``d._tensors()`` with its path. Errors of classes of users stay unchanged."""
    if type(error) not in (RuntimeError, TypeError, ValueError, IndexError) or is_out_of_memory(error):
        raise error
    raise type(error)(f"{dotted(_path(d, i))}: {error}") from error


def _path(d: TreeDict[Any], i: int) -> Path:
    return next(path for j, (path, _) in enumerate(tensor_paths(d)) if j == i)


# --- writing in place ---


class _Operation(NamedTuple):
    """An operation that writes to tensors in place."""

    name: str
    each: Callable[[Tensor, Any], Any]
    """Write to one tensor. The second argument is a tensor, a number, or None."""
    many: Callable[[list[Tensor], Any], Any] | None
    """The same for a list of tensors. The second argument is a list too, a number, or None. None if torch has no such
    function."""


class _Step(NamedTuple):
    """An operation on some of the tensors of a dict."""

    operation: _Operation
    tensors: list[Tensor]
    others: Any
    """A tensor for each of ``tensors``; or one number, or None, for all."""
    dtypes: list[torch.dtype]
    """The dtype of each of ``tensors``."""
    indices: Sequence[int]
    """The index of each of ``tensors`` in ``d._tensors()``, for messages."""


Refuse = Callable[..., NoReturn]
"""Raise an error for a tensor. Takes its index, the rest of the message, the cause and the class of the error."""


def zero_(d: TreeDict[Any]) -> None:
    refuse_encoded(d, "zero_")
    write(d, _ZERO, None)


def add_(d: TreeDict[Any], other: Any, alpha: complex) -> None:
    _add_scaled(d, "add_", Tensor.add_, torch._foreach_add_, other, alpha)


def sub_(d: TreeDict[Any], other: Any, alpha: complex) -> None:
    _add_scaled(d, "sub_", Tensor.sub_, torch._foreach_sub_, other, alpha)


def _add_scaled(d: TreeDict[Any], name: str, each: Any, many: Any, other: Any, alpha: Any) -> None:
    _refuse_unless_number(alpha, "alpha")
    others = _operands(d, other, name)

    def each_scaled(tensor: Tensor, value: Any) -> None:
        each(tensor, value, alpha=alpha)

    def many_scaled(tensors: list[Tensor], values: list[Tensor]) -> None:
        many(tensors, values, alpha=alpha)

    if alpha == 1:
        operation = _Operation(name, each, many)
    else:  # the function for lists and a number takes no alpha
        operation = _Operation(name, each_scaled, many_scaled if isinstance(others, list) else None)
    write(d, operation, others)


def mul_(d: TreeDict[Any], other: Any) -> None:
    write(d, _Operation("mul_", Tensor.mul_, torch._foreach_mul_), _operands(d, other, "mul_"))


def div_(d: TreeDict[Any], other: Any) -> None:
    write(d, _Operation("div_", Tensor.div_, torch._foreach_div_), _operands(d, other, "div_"))


def copy_(d: TreeDict[Any], other: Any) -> None:
    write(d, _COPY, _operands(d, other, "copy_", numbers=False))


def lerp_(d: TreeDict[Any], other: Any, weight: Any) -> None:
    if isinstance(other, (int, float)) and isinstance(weight, (Mapping, Tensor)):
        raise TypeError(f"lerp_ takes the other mapping first and the weight second: lerp_(other, {other!r})")
    _refuse_unless_number(weight, "weight")

    def each(tensor: Tensor, end: Tensor) -> None:
        tensor.lerp_(end, weight)

    def many(tensors: list[Tensor], ends: list[Tensor]) -> None:
        torch._foreach_lerp_(tensors, ends, weight)

    others = _operands(d, other, "lerp_", numbers=False)
    write(d, _Operation("lerp_", each, many), others, integers=_COPY._replace(name="lerp_"))


_ZERO = _Operation("zero_", lambda tensor, _: tensor.zero_(), lambda tensors, _: torch._foreach_zero_(tensors))
_COPY = _Operation("copy_", Tensor.copy_, torch._foreach_copy_)


def _refuse_unless_number(value: Any, name: str) -> None:
    if not isinstance(value, (int, float, complex)):
        raise TypeError(f"{name} is a number, got {described(value)}; use .item() for a tensor of one element")


def _operands(d: TreeDict[Any], other: Any, called: str, numbers: bool = True) -> Any:
    """The other operand of each tensor of ``d``, as a list. A number stays itself."""
    refuse_encoded(d, called)
    if isinstance(other, Mapping):
        values = match(d, other, called)
        if isinstance(other, TreeDict):
            refuse_encoded(other, called)
        return values
    if isinstance(other, Tensor):
        if d._device is not None and other.device != d._device and not (other.dim() == 0 and other.is_cpu):
            _refuse_device((), d._device, other.device)
        return [other] * len(d._tensors())
    if not (numbers and isinstance(other, (int, float, complex))):
        kinds = "a mapping, a tensor or a number" if numbers else "a mapping or a tensor"
        raise TypeError(f"{called} takes {kinds}, got {described(other)}")
    return other


def write(d: TreeDict[Any], operation: _Operation, others: Any, integers: _Operation | None = None) -> None:
    """Validate all fields, then write to all of them.

    ``others``: see `_Step`. ``integers``: the operation for integer and bool fields, if it differs.
    """
    tensors = d._tensors()
    dtypes = [t.dtype for t in tensors]
    steps = [_Step(operation, tensors, others, dtypes, range(len(tensors)))]
    if integers is not None and not all(map(_is_float_dtype, set(dtypes))):
        steps.clear()
        for one, kind in ((operation, True), (integers, False)):
            chosen = [i for i, dtype in enumerate(dtypes) if _is_float_dtype(dtype) is kind]
            steps.append(_Step(one, _pick(tensors, chosen), _pick(others, chosen), _pick(dtypes, chosen), chosen))
    if intercepted():  # transforms and compilers see one call for each field, and validate it themselves
        calls = [call for step in steps for call in _singly(step, step.tensors, step.others)]
    else:
        calls = [call for step in steps if step.tensors for call in _validated(d, step)]
    for function, targets, values in calls:
        function(targets, values)


_Call = tuple[Callable[[Any, Any], Any], Any, Any]
"""A function of an `_Operation` and its arguments."""


def _singly(step: _Step, tensors: Sequence[Tensor], others: Any) -> list[_Call]:
    listed = isinstance(others, list)
    return [(step.operation.each, tensor, others[i] if listed else others) for i, tensor in enumerate(tensors)]


def _pick(values: Any, chosen: Sequence[int]) -> Any:
    """The items of a list at these indices, in ascending order. A single operand for all tensors stays itself."""
    if not isinstance(values, list) or len(chosen) == len(values):
        return values
    return [values[i] for i in chosen]


def _validated(d: TreeDict[Any], step: _Step) -> list[_Call]:
    """The calls of a step. Raises the error of the first tensor that torch would refuse to write to."""
    operation, tensors, others, dtypes, indices = step
    given: list[Tensor] | None = None
    if isinstance(others, list):  # kernels of some dtypes cannot read a tensor with the negative bit
        given = others = [t.resolve_neg() for t in others]

    def refuse(i: int, reason: str, error: Exception | None = None, kind: type[Exception] = RuntimeError) -> NoReturn:
        raise kind(f"{dotted(_path(d, indices[i]))} {reason}") from error

    _refuse_inference(operation, tensors, refuse)
    theirs = dtypes if given is None else [t.dtype for t in given]
    alone = _taken_alone(tensors, given, dtypes, theirs)
    foreign: list[int] = []
    if alone:
        _refuse_autograd(operation, tensors, given, alone, refuse)
        foreign = [i for i in alone if _is_foreign(tensors[i]) or (given is not None and _is_foreign(given[i]))]
    plain = [i for i in range(len(tensors)) if i not in set(foreign)] if foreign else range(len(tensors))
    pairs = _pairs(tensors, given, dtypes, theirs, plain)
    _refuse_memory(operation, _pick(tensors, plain), None if given is None else _pick(given, plain), plain, refuse)
    _refuse_dtypes(operation, tensors, others, pairs, refuse)
    for i in foreign:
        _refuse_foreign(operation, tensors[i], others if given is None else given[i], i, refuse)
    many = operation.many
    if many is None:
        return _singly(step, tensors, others)
    calls = _singly(step, _pick(tensors, alone), _pick(others, alone))
    for members in pairs.values():
        # Grouped by dtypes, because the CUDA kernel of some versions misreads a list of mixed dtypes.
        together = [i for i in members if i not in set(alone)] if alone else members
        if together:
            calls.append((many, _pick(tensors, together), _pick(others, together)))
    return calls


def _refuse_inference(operation: _Operation, tensors: list[Tensor], refuse: Refuse) -> None:
    """Raise the error for the first inference tensor, outside of inference mode."""
    if torch.is_inference_mode_enabled():
        return
    try:
        _ = [t._version for t in tensors]  # raises for inference tensors, in 0.5x the time of `is_inference`
    except RuntimeError:
        i = [t.is_inference() for t in tensors].index(True)
        refuse(i, f"is an inference tensor; clone() it before {operation.name}, or use torch.inference_mode()")


def _taken_alone(
    tensors: list[Tensor], others: list[Tensor] | None, dtypes: list[torch.dtype], theirs: list[torch.dtype]
) -> list[int]:
    """The tensors that need a call of their own, since they or their operands are `_is_special`."""
    # One comprehension for each attribute. A call of `_is_special` for each tensor takes longer.
    every = tensors if others is None else [*tensors, *others]
    found = {*dtypes, *theirs}
    if (
        _FOREACH_CLASSES.issuperset(map(type, every))
        and found <= FOREACH_DTYPES
        and [t.layout for t in every].count(torch.strided) == len(every)
        and True not in [t.is_nested for t in every]
        and not (torch.is_grad_enabled() and True in [t.requires_grad for t in every])
        and True not in [t.is_neg() for t in tensors]
        and not (not _COMPLEX.isdisjoint(found) and True in [t.is_conj() for t in every])
    ):
        return []
    special = list(map(_is_special, tensors))
    if others is not None:
        special = [mine or _is_special(other) for mine, other in zip(special, others, strict=True)]
    return [i for i, one in enumerate(special) if one]


_COMPLEX = frozenset((torch.complex64, torch.complex128))
"""The dtypes of `FOREACH_DTYPES` whose tensors can have the conjugate bit."""


def _is_special(tensor: Tensor) -> bool:
    """Whether ``torch._foreach_*`` does not take a tensor: it has a gradient history, or its class, layout, dtype or
    conjugate or negative bit is not supported."""
    return (
        _is_foreign(tensor)
        or tensor.dtype not in FOREACH_DTYPES
        or tensor.is_conj()
        or tensor.is_neg()
        or (tensor.requires_grad and torch.is_grad_enabled())
    )


def _is_foreign(tensor: Tensor) -> bool:
    """Whether a tensor has rules of its own: it is a subclass, sparse, nested or quantized."""
    return (
        type(tensor) not in _FOREACH_CLASSES
        or tensor.layout != torch.strided
        or tensor.is_nested
        or tensor.is_quantized
    )


def _refuse_autograd(
    operation: _Operation, tensors: list[Tensor], others: list[Tensor] | None, alone: Sequence[int], refuse: Refuse
) -> None:
    """Raise an error for a tensor that autograd does not let an operation change."""
    if not torch.is_grad_enabled():
        return
    for i in alone:
        tensor = tensors[i]
        if not (tensor.requires_grad or (others is not None and others[i].requires_grad)):
            continue
        if tensor.requires_grad and tensor.is_leaf:
            refuse(
                i, f"is a leaf that requires grad; call {operation.name} in torch.no_grad(), or detach() the dict first"
            )
        if tensor._is_view() and (
            _autograd._get_creation_meta(tensor) != _autograd.CreationMeta.DEFAULT
            or (tensor.requires_grad and tensor._base is not None and tensor._base.is_leaf)
        ):
            refuse(i, f"is a view that autograd does not let {operation.name} change; clone() it first")


def _refuse_foreign(operation: _Operation, tensor: Tensor, other: Any, i: int, refuse: Refuse) -> None:
    """Raise the error of torch for a tensor with rules of its own. The operation runs on a copy of the tensor."""
    if tensor.layout == torch.strided and not tensor.is_nested:
        if is_expanded(tensor):
            _refuse_expanded(operation, i, refuse)
        if isinstance(other, Tensor) and other.layout == torch.strided and not other.is_nested:
            overlap: list[int] = []
            with suppress(RuntimeError):  # some subclasses have no memory of their own
                overlap = overlap_partly([tensor], [other])
            if overlap:
                _refuse_overlap(operation, i, refuse)
    with torch.no_grad():
        try:
            operation.each(tensor.detach().clone(), other.detach() if isinstance(other, Tensor) else other)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            _reword(operation, tensor, other, i, error, refuse)


def _pairs(
    tensors: list[Tensor],
    others: list[Tensor] | None,
    dtypes: list[torch.dtype],
    theirs: list[torch.dtype],
    plain: Sequence[int],
) -> Mapping[Hashable, Sequence[int]]:
    """The tensors grouped by their dtype and that of their operand."""
    keys: list[Any] = dtypes
    if others is not None and dtypes != theirs:
        # The dtype of a result can depend on whether a tensor has dimensions.
        keys = [
            (mine, other.dtype, not tensor.dim(), not other.dim())
            for tensor, mine, other in zip(tensors, dtypes, others, strict=True)
        ]
    if len(plain) == len(keys) == keys.count(keys[0]):
        return {keys[0]: plain}
    groups: dict[Hashable, list[int]] = {}
    for i in plain:
        groups.setdefault(keys[i], []).append(i)
    return groups


def _refuse_dtypes(
    operation: _Operation,
    tensors: list[Tensor],
    others: Any,
    pairs: Mapping[Hashable, Sequence[int]],
    refuse: Refuse,
) -> None:
    """Raise the error of torch for a pair of dtypes that torch refuses. Tries every pair once, on one element."""
    for i in sorted(members[0] for members in pairs.values()):  # the first field that fails is named
        other = others[i] if isinstance(others, list) else others
        try:
            operation.each(_one(tensors[i]), _one(other) if isinstance(other, Tensor) else other)
        except (RuntimeError, TypeError, ValueError) as error:
            _reword(operation, tensors[i], other, i, error, refuse)


def _one(tensor: Tensor) -> Tensor:
    """A tensor of one element, with the dtype and device of ``tensor``. 0-d if ``tensor`` is 0-d."""
    return torch.ones((1,) if tensor.dim() else (), dtype=tensor.dtype, device=tensor.device)


def _reword(operation: _Operation, tensor: Tensor, other: Any, i: int, error: Exception, refuse: Refuse) -> NoReturn:
    if is_out_of_memory(error):
        raise error
    beside = "" if other is None else f" and {described(other) if isinstance(other, Tensor) else repr(other)}"
    said = str(error).splitlines()[0]
    kind = TypeError if isinstance(error, TypeError) else RuntimeError
    refuse(i, f"is {described(tensor)}; torch refuses {operation.name} of it{beside}: {said}", error, kind)


def _refuse_memory(
    operation: _Operation, tensors: list[Tensor], others: list[Tensor] | None, indices: Sequence[int], refuse: Refuse
) -> None:
    """Raise an error for an expanded tensor, and for an operand that does not broadcast or overlaps the tensor.

    ``indices``: the index of each of ``tensors``, for ``refuse``.
    """
    contiguous = [t.is_contiguous() for t in tensors]
    if False in contiguous:
        for i, tensor in zip(indices, tensors, strict=True):
            if is_expanded(tensor):
                _refuse_expanded(operation, i, refuse)
    if others is None:
        return
    alike = [t.shape for t in tensors] == [t.shape for t in others]
    if not alike:
        for i, tensor, other in zip(indices, tensors, others, strict=True):
            if tensor.shape != other.shape and not _broadcasts(other.shape, tensor.shape):
                refuse(i, f"is {described(tensor)}; {operation.name} cannot broadcast {described(other)} to it")
    # Contiguous tensors of one shape that begin their storages do not overlap, or are the same. So most need no search.
    if (
        not alike
        or False in contiguous
        or False in [t.is_contiguous() for t in others]
        or any([t.storage_offset() for t in (*tensors, *others)])  # noqa: C419  (faster)
    ):
        for i in overlap_partly(tensors, others):
            _refuse_overlap(operation, indices[i], refuse)


def _refuse_expanded(operation: _Operation, i: int, refuse: Refuse) -> NoReturn:
    refuse(i, f"is expanded: its elements share memory; clone() it before {operation.name}")


def _refuse_overlap(operation: _Operation, i: int, refuse: Refuse) -> NoReturn:
    refuse(i, f"overlaps its operand in memory; clone() the operand before {operation.name}")


def _broadcasts(shape: torch.Size, target: torch.Size) -> bool:
    try:
        return torch.broadcast_shapes(shape, target) == target
    except RuntimeError:
        return False


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
        together = not (_is_foreign(tensor) or intercepted()) and tensor.dtype in FOREACH_DTYPES
        groups.setdefault(tensor.dtype if together else torch.bool, []).append(tensor)
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
