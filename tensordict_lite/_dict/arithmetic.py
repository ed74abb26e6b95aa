"""Arithmetic on whole dicts: match the fields of several mappings, write all fields in place, norms and lists.

A write has two steps. The first step finds every reason for which torch would refuse a field. The second step writes:
one ``torch._foreach_*`` call for all fields of one dtype, and a call for each field that those functions do not take.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import partial, reduce
from math import inf
from operator import getitem
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .._errors import Path, described, device_mismatch, dotted, dtype_name, is_out_of_memory
from .._memory.dense import is_dense
from .._memory.device import CPU, intercepted
from .._memory.dtypes import CASTABLE, FOREACH_DTYPES, dtype_of
from .._memory.write import FOREACH_CLASSES, Call, Risky, overlap_partly, plain, refusal, unlike, write_all
from .._tree.fields import data_paths, fields, refuse_other_trees
from .._tree.kinds import KEPT, RAGGED
from .._tree.tree import TreeDict, data_in, data_of
from .._tree.walk import only_tensors

_autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009  (not in its type stubs)
D = TypeVar("D", bound=TreeDict[Any])


# --- matching ---


def match(d: TreeDict[Any], other: Any, called: str) -> list[Tensor]:
    """The tensors of a mapping with the keys of ``d``, in the order of `data_of`.

    Raises ``ValueError`` for a missing or an extra key, and ``DeviceMismatchError``. Raises ``TypeError`` for a value
    that is not a tensor where ``d`` has a tensor.

    ``called``: the name of the method, for messages.
    """
    if not isinstance(other, Mapping):
        raise TypeError(
            f"{called} takes mappings with the keys of this {type(d).__name__}, got {described(other)}; "
            "bind any other value in a lambda"
        )
    device, values = d._device, list(other.values())
    flat = list(d) == list(other) and only_tensors(d.values()) and only_tensors(values)
    # In a loop, because torch.compile cannot trace `attrgetter`.
    if flat and (False not in [t.is_cpu for t in values] if device is CPU else {t.device for t in values} == {device}):
        return values
    found: list[Any] = []
    refuse_other_trees(d, other, "the other mapping", f"this {type(d).__name__}")
    for field in fields(d):
        if field.kind is KEPT:
            continue
        theirs: Any = reduce(getitem, field.path, other)
        if device is not None and theirs.device != device:
            raise device_mismatch(field.path, device, theirs.device, f"move the other with .to({str(device)!r})")
        if field.kind is RAGGED:
            _refuse_other_lengths(field.value.offsets, theirs.offsets, field.path)
        found.append(data_in(theirs))
    return found


def _refuse_other_lengths(ours: Tensor, theirs: Tensor, path: Path) -> None:
    """Compare the offsets of the ragged field at ``path``, where that does not synchronize."""
    if ours is not theirs and ours.is_cpu and not intercepted() and not torch.equal(ours.long(), theirs.long()):
        raise ValueError(f"{dotted(path)}: expected rows of the same lengths, got other lengths in the other mapping")


def refuse_encoded(d: TreeDict[Any], called: str) -> None:
    """Raise ``TypeError`` for the first field of encoded strings: arithmetic would make other strings of them."""
    encoders = d._policy.encoders
    if not encoders and only_tensors(d.values()):
        return
    for field in fields(d):
        if field.encoder is not None:
            raise TypeError(
                f"{dotted(field.strings)}: {called} takes numbers, got encoded strings; leave the field out: "
                f"drop({field.strings[-1]!r}) shares the tensors of the others"
            )


def call_each(d: TreeDict[Any], function: Callable[..., Any], *others: Sequence[Any]) -> list[Any]:
    """Call ``function`` with each tensor of ``d``, and with the value of each of ``others`` at its index.

    Errors name the path of the tensor. Errors of classes of users stay unchanged.
    """
    results: list[Any] = []
    try:
        for group in zip(data_of(d), *others, strict=True):
            results.append(function(*group))
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        known = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError)
        if type(error) not in known or is_out_of_memory(error):
            raise
        raise type(error)(f"{dotted(_path_of(d, len(results)))}: {error}") from error
    return results


def _path_of(d: TreeDict[Any], i: int) -> Path:
    return next(path for j, (path, _) in enumerate(data_paths(d)) if j == i)


# --- writing in place ---


class _Operation(NamedTuple):
    """An operation that writes to tensors in place."""

    name: str
    each: Callable[..., Any]
    """Write to one tensor. A second argument is a tensor or a number."""
    many: Callable[..., Any]
    """The same for a list of tensors. A second argument is a list too, or a number."""
    integers: _Operation | None = None
    """The operation for integer and bool tensors, if it differs."""

    def on(self, dtype: torch.dtype) -> _Operation:
        return self if self.integers is None or dtype in CASTABLE else self.integers


_ZERO = _Operation("zero_", Tensor.zero_, torch._foreach_zero_)
_COPY = _Operation("copy_", Tensor.copy_, torch._foreach_copy_)
_MANY: Mapping[str, Callable[..., Any]] = {
    "add_": torch._foreach_add_,
    "sub_": torch._foreach_sub_,
    "mul_": torch._foreach_mul_,
    "div_": torch._foreach_div_,
    "lerp_": torch._foreach_lerp_,
    "copy_": torch._foreach_copy_,
}
"""For each method of tensors with an operand, the function of torch for a list of tensors."""
_Operands = list[Tensor] | tuple[Any, ...]
"""A list with a tensor for each tensor of a dict; or a tuple with a number for all of them, or with nothing."""
_ERRORS = (RuntimeError, TypeError, ValueError, IndexError)


def zero_(d: D) -> D:
    refuse_encoded(d, "zero_")
    return write_fields(d, _ZERO, ())


def combine(d: D, called: str, other: Any, **scale: Any) -> D:
    """Call a method of `_MANY` for every tensor of ``d``, with the operand ``other``. Returns ``d``.

    ``scale``: the number ``alpha`` or ``weight``, as the method takes it.
    """
    for name, number in scale.items():
        if not isinstance(number, (int, float, complex)):
            raise TypeError(f"{name} is a number, got {described(number)}; use .item() for a tensor of one element")
    others = _operands(d, other, called)
    if "alpha" in scale and (scale["alpha"] == 1 or not isinstance(others, list)):
        alpha = scale.pop("alpha")  # torch's function for lists and a number takes none
        others = others if isinstance(others, list) else (others[0] * alpha,)
    each, many = partial(getattr(Tensor, called), **scale), partial(_MANY[called], **scale)
    integers = _COPY._replace(name=called) if called == "lerp_" else None
    return write_fields(d, _Operation(called, each, many, integers), others)


def _operands(d: TreeDict[Any], other: Any, called: str) -> _Operands:
    """The other operand of each tensor of ``d``."""
    refuse_encoded(d, called)
    if isinstance(other, Mapping):
        values = match(d, other, called)
        if isinstance(other, TreeDict):
            refuse_encoded(other, called)
        return values
    if isinstance(other, Tensor):
        if d._device is not None and other.device != d._device and not (other.dim() == 0 and other.is_cpu):
            way_out = f"move it with .to({str(d._device)!r})"
            raise device_mismatch("the other tensor", d._device, other.device, way_out)
        return [other] * len(data_of(d))
    numbers = called not in ("copy_", "lerp_")
    if not (numbers and isinstance(other, (int, float, complex))):
        kinds = "a mapping, a tensor or a number" if numbers else "a mapping or a tensor"
        raise TypeError(f"{called} takes {kinds}, got {described(other)}")
    return (other,)


def write_fields(d: D, operation: _Operation, others: _Operands) -> D:
    """Validate all fields, then write to all of them. Returns ``d``."""
    tensors = data_of(d)
    if intercepted():  # transforms and compilers see one call for each field, and validate it themselves
        for i, tensor in enumerate(tensors):
            operation.on(tensor.dtype).each(*_arguments(tensors, others, i))
        return d
    if isinstance(others, list):
        indices, is_one = unlike(tensors, others)
    else:
        indices, is_one = [i for i, t in enumerate(tensors) if not plain(t)], len(set(map(dtype_of, tensors))) == 1
    odd, groups = set(indices), [list(range(len(tensors)))]
    if odd or not is_one:
        groups = _groups(tensors, others, odd)
    if len(groups) == 1 and not odd:
        try:
            operation.on(tensors[0].dtype).many(tensors, *((others,) if isinstance(others, list) else others))
            return d
        except _ERRORS as error:  # torch refuses all of these or none, before it writes
            if is_out_of_memory(error):
                raise
            _try(d, operation, 0, _arguments(tensors, others, 0))
            groups = _groups(tensors, others, odd)
            if not odd:
                raise
    calls: list[Call] = []
    risky: list[Risky] = []
    for i in sorted(odd):
        if isinstance(others, list):  # kernels of some dtypes cannot read a tensor with the negative bit
            others[i] = others[i].resolve_neg()
        given = _arguments(tensors, others, i)
        if reason := _reason(operation.name, *given):
            raise RuntimeError(f"{dotted(_path_of(d, i))} {reason}")
        _try(d, operation, i, given)
        operands = [one for one in given if isinstance(one, Tensor)]
        if any(map(_is_foreign, operands)) or (torch.is_grad_enabled() and any(t.requires_grad for t in operands)):
            risky.append((tensors[i], None, partial(_call, d, operation, i, given, given)))
        else:
            calls.append(partial(operation.on(tensors[i].dtype).each, *given))
    for members in groups:
        _try(d, operation, members[0], _arguments(tensors, others, members[0]))
        operand = ([others[i] for i in members],) if isinstance(others, list) else others
        many = operation.on(tensors[members[0]].dtype).many
        calls.append(partial(many, [tensors[i] for i in members], *operand))
    write_all(calls, risky)
    return d


def _arguments(tensors: list[Tensor], others: _Operands, i: int) -> tuple[Any, ...]:
    """The arguments of an operation on one tensor: the tensor, and its operand if there is one."""
    return tensors[i], *((others[i],) if isinstance(others, list) else others)


def _groups(tensors: list[Tensor], others: _Operands, odd: set[int]) -> list[list[int]]:
    """The indices of all but the odd tensors, in groups: torch refuses each tensor of a group, or none.

    Adds the tensors with the negative bit to ``odd``: `unlike` does not look for it.
    """
    odd.update([i for i, tensor in enumerate(tensors) if tensor.is_neg()])
    groups: dict[Hashable, list[int]] = {}
    for i in range(len(tensors)):
        if i not in odd:  # the dtype of a result can depend on whether a tensor has dimensions
            given = _arguments(tensors, others, i)
            kinds = [(one.dtype, not one.dim()) for one in given if isinstance(one, Tensor)]
            groups.setdefault(tuple(kinds), []).append(i)
    return list(groups.values())


def _reason(called: str, tensor: Tensor, other: Any = None) -> str:
    """Why an operation must not write to a tensor. ``""`` if there is no reason, or if only a trial can find it."""
    operands = (tensor, other) if isinstance(other, Tensor) else (tensor,)
    if torch.is_grad_enabled() and any(t.requires_grad for t in operands):
        if tensor.requires_grad and tensor.is_leaf:
            return f"is a leaf that requires grad; call {called} in torch.no_grad(), or detach() the dict first"
        if tensor._is_view() and (
            _autograd._get_creation_meta(tensor) != _autograd.CreationMeta.DEFAULT
            or (tensor.requires_grad and tensor._base is not None and tensor._base.is_leaf)
        ):
            return f"is a view that autograd does not let {called} change; clone() it first"
    if reason := refusal(tensor, called):
        return reason
    if len(operands) == 1 or any(t.layout is not torch.strided or t.is_nested for t in operands):
        return ""
    if not any(map(_is_foreign, operands)) and not _broadcasts(other.shape, tensor.shape):
        return f"is {described(tensor)}; {called} cannot broadcast {described(other)} to it"
    with suppress(RuntimeError):  # some subclasses have no memory of their own
        if overlap_partly(tensor, other):
            return f"overlaps its operand in memory; clone() the operand before {called}"
    return ""


def _is_foreign(tensor: Tensor) -> bool:
    """Whether a tensor has rules of its own: it is a subclass, sparse, nested or quantized."""
    return type(tensor) not in FOREACH_CLASSES or not is_dense(tensor)


def _broadcasts(shape: torch.Size, target: torch.Size) -> bool:
    sizes = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(size in (1, wanted) for size, wanted in sizes)


def _try(d: TreeDict[Any], operation: _Operation, i: int, given: tuple[Any, ...]) -> None:
    """Raise the error of torch if it refuses an operation on a tensor. Tries one element, or a foreign copy."""
    operands = [one for one in given if isinstance(one, Tensor)]
    trial = (lambda one: one.detach().clone()) if any(map(_is_foreign, operands)) else _one
    _call(d, operation, i, given, [trial(one) if isinstance(one, Tensor) else one for one in given])


def _call(d: TreeDict[Any], operation: _Operation, i: int, given: tuple[Any, ...], used: Sequence[Any]) -> None:
    """Write to a tensor. Errors name its path, and show what was ``given``. ``used``: the arguments of the call."""
    tensor, *other = given
    try:
        operation.on(tensor.dtype).each(*used)
    except _ERRORS as error:
        if is_out_of_memory(error):
            raise
        beside = "".join(f" and {described(one) if isinstance(one, Tensor) else repr(one)}" for one in other)
        said = str(error).splitlines()[0]
        if len({one.dtype for one in (tensor, *other) if isinstance(one, Tensor) and one.is_floating_point()}) > 1:
            said += f"; cast the other to {dtype_name(tensor.dtype)} first"
        kind = TypeError if isinstance(error, TypeError) else RuntimeError
        message = f"is {described(tensor)}; torch refuses {operation.name} of it{beside}: {said}"
        raise kind(f"{dotted(_path_of(d, i))} {message}") from error


def _one(tensor: Tensor) -> Tensor:
    """A tensor of one element, with the dtype and device of ``tensor``. 0-d if ``tensor`` is 0-d."""
    return torch.ones((1,) if tensor.dim() else (), dtype=tensor.dtype, device=tensor.device)


# --- norms and lists ---


def total_norm(d: TreeDict[Any], order: float) -> Tensor:
    if not isinstance(order, (int, float)) or not order > 0:
        raise ValueError(f"ord is a number above 0, or inf, got {order!r}")
    refuse_encoded(d, "total_norm")
    for path, tensor in data_paths(d):
        if tensor.dtype not in CASTABLE:
            raise TypeError(
                f"{dotted(path)}: a norm takes floating-point or complex fields, got {dtype_name(tensor.dtype)}; "
                "leave it out with drop()"
            )
    tensors = data_of(d)
    if order == inf:  # torch raises for a tensor without elements
        tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return torch.zeros((), device=d._device)
    # Note: not torch.nn.utils.get_total_norm, which records no gradient.
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    norms: list[Tensor] = []
    for dtype, group in groups.items():
        together = dtype in FOREACH_DTYPES and not (intercepted() or any(map(_is_foreign, group)))
        norms += torch._foreach_norm(group, order) if together else [torch.linalg.vector_norm(t, order) for t in group]
    return torch.linalg.vector_norm(torch.stack(norms), order)
