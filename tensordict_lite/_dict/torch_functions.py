"""Functions of torch that take whole dicts: the table behind ``__torch_function__``.

torch calls ``__torch_function__`` if a dict is an argument of one of its functions. A table has an implementation for
some of these functions. Every other function that computes raises an error, because its result for a dict would be a
guess. A function that does not compute takes the dict as it takes any dict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, overrides

from .._errors import Path, described, dotted
from .._memory.compare import equal
from .._memory.device import canonical
from .._tree.compare import equal_trees
from .._tree.fields import fields
from .._tree.tree import TreeDict, data_of
from . import arithmetic

_F = TypeVar("_F", bound=Callable[..., Any])
_table: dict[Any, Callable[..., Any]] = {}
"""For each function of torch, the implementation for dicts."""


def implements(*functions: Any) -> Callable[[_F], _F]:
    """Decorator: register the implementation of functions of torch for dicts."""

    def register(implementation: _F) -> _F:
        for function in functions:
            _table[function] = implementation
        return implementation

    return register


def call(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call the implementation of a function of torch, or the function itself if it does not compute.

    Raises ``TypeError`` for a function that computes and has no implementation.
    """
    found = _table.get(function)
    if found is not None:
        return found(*args, **kwargs)
    if _computes(function):
        _refuse_function(function, args, kwargs)
    # A method of TorchScript, or under torch.compile `checkpoint` and `while_loop`.
    with torch._C.DisableTorchFunctionSubclass():  # torch documents this name for implementations of the protocol
        return function(*args, **kwargs)


def _computes(function: Any) -> bool:
    """Whether torch has the function in its list of functions, methods and properties that compute on tensors."""
    return overrides.resolve_name(function) is not None


# What `torch.compiler.assume_constant_result` sets. A call of it would import torch's compiler with this package.
vars(_computes)["_dynamo_marked_constant"] = True


def _refuse_function(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NoReturn:
    name: str = overrides.resolve_name(function) or getattr(function, "__name__", repr(function))
    kinds = [type(value).__name__ for value in (*args, *kwargs.values()) if isinstance(value, TreeDict)]
    kind = kinds[0] if kinds else "DeviceDict"
    if name.startswith("torch.Tensor."):
        shown = f"d.map(lambda t: t.{name.removeprefix('torch.Tensor.').removesuffix('.__get__')}(...))"
    elif len(args) == 1 and not kwargs:
        shown = f"d.map({name})"
    else:
        shown = f"d.map(lambda t: {name}(t, ...))"
    raise TypeError(f"{name} takes no {kind}; call it for every field: {shown}, or for one field: d[key]")


_OPERATORS = (
    ("add", "+", "torch.add", "add_"),
    ("sub", "-", "torch.sub", "sub_"),
    ("mul", "*", "torch.mul", "mul_"),
    ("truediv", "/", "torch.div", "div_"),
    ("floordiv", "//", "torch.floor_divide", ""),
    ("mod", "%", "torch.remainder", ""),
    ("pow", "**", "torch.pow", ""),
    ("matmul", "@", "torch.matmul", ""),
)
"""For each operator of two operands: its method, its symbol, the function of torch, and the method that is in place."""


def refused_operators() -> Iterator[tuple[str, Callable[..., NoReturn]]]:
    """The name of each method for an arithmetic operator of two operands, and a function that refuses the operator.

    Note: there are no arithmetic operators. ``|`` merges dicts and ``==`` gives one bool, as for every dict. An
    elementwise ``+`` beside these operators would mislead: some readers would expect it to merge, as for a Counter.
    """
    for name, symbol, function, in_place in _OPERATORS:
        yield f"__{name}__", _refuse_operator(symbol, function, in_place)
        yield f"__r{name}__", _refuse_operator(symbol, function, reflected=True)


def _refuse_operator(
    symbol: str, function: str, in_place: str = "", reflected: bool = False
) -> Callable[..., NoReturn]:
    """A method for an operator that raises ``TypeError`` and shows what to write. ``reflected``: for ``other + d``."""

    def refuse(self: TreeDict[Any], other: Any, *_: Any) -> NoReturn:
        kind = type(self).__name__
        if isinstance(other, Mapping):
            shown = f"d.map({function}, other)"
        else:
            shown = f"d.map(lambda t: {'other' if reflected else 't'} {symbol} {'t' if reflected else 'other'})"
        more = f", or d.{in_place}(other) in place" if in_place and not reflected else ""
        raise TypeError(f"{kind} has no operator {symbol}; use {shown}{more}")

    return refuse


# --- functions of every field ---


def _like(function: Any, fills: bool) -> Callable[..., Any]:
    """The implementation of a function such as ``torch.zeros_like``.

    ``fills``: the function fills in numbers other than zero. It then refuses fields of strings.
    """

    def each(d: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(d, TreeDict):  # torch.full_like(tensor, d)
            _refuse_function(function, (d, *args), kwargs)
        if fills:
            arithmetic.refuse_encoded(d, f"torch.{function.__name__}")
        made = arithmetic.call_each(d, lambda tensor: function(tensor, *args, **kwargs))
        device = canonical(made[0].device) if made else d._device
        return d._replace_data(iter(made), device)

    return each


for _function in (torch.zeros_like, torch.empty_like):
    implements(_function)(_like(_function, fills=False))
for _function in (torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like):
    implements(_function)(_like(_function, fills=True))


@implements(torch.clone)
def clone(input: Any) -> Any:
    return input.clone()


@implements(torch.detach)
def detach(input: Any) -> Any:
    return input.detach()


# --- comparisons ---


@implements(torch.allclose)
def allclose(input: Any, other: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
    first, second = _both("allclose", input, other)
    return first.allclose(second, rtol, atol, equal_nan)


@implements(torch.equal)
def equal_(input: Any, other: Any) -> bool:
    return equal_trees(*_both("equal", input, other), equal)


def _both(name: str, input: Any, other: Any) -> tuple[Any, Any]:
    """The arguments of a comparison, a `DeviceDict` first. Raises ``TypeError`` unless both are mappings."""
    for value in (input, other):
        if not isinstance(value, Mapping):
            raise TypeError(f"torch.{name} compares two mappings, got {type(value).__name__}")
    return (input, other) if isinstance(input, TreeDict) else (other, input)


@implements(torch.where)
def where(condition: Any, input: Any, other: Any) -> Any:
    trees: list[Any] = [value for value in (input, other, condition) if isinstance(value, TreeDict)]
    d: TreeDict[Any] = trees[0]
    for tree in trees:
        arithmetic.refuse_encoded(tree, "torch.where")
    count = len(data_of(d))

    def values(given: Any) -> Sequence[Any]:
        return arithmetic.match(d, given, "torch.where") if isinstance(given, Mapping) else [given] * count

    made = arithmetic.call_each(
        d, lambda _, *group: torch.where(*group), values(condition), values(input), values(other)
    )
    return d._replace_data(iter(made), d._device)


# --- parts ---


@implements(torch.split)
def split(tensor: Any, split_size_or_sections: Any, dim: int = 0) -> tuple[Any, ...]:
    return _cut_each(tensor, "split", lambda t, at: t.split(split_size_or_sections, at), dim)


@implements(torch.chunk)
def chunk(input: Any, chunks: int, dim: int = 0) -> tuple[Any, ...]:
    return _cut_each(input, "chunk", lambda t, at: t.chunk(chunks, at), dim)


@implements(torch.unbind)
def unbind(input: Any, dim: int = 0) -> tuple[Any, ...]:
    return _cut_each(input, "unbind", lambda t, at: t.unbind(at), dim)


def _cut_each(d: Any, name: str, cut: Callable[[Tensor, int], Sequence[Tensor]], dim: int) -> tuple[Any, ...]:
    """Cut every field along ``dim``. All fields must have the same size there. Kept lists are not cut: they raise."""
    found: list[tuple[Path, Tensor, int]] = []
    for field in fields(d):
        dims = field.kind.dims(field)
        if field.value is None:
            continue
        if dims is None:
            got = described(field.value)
            raise TypeError(f"{dotted(field.path)}: torch.{name} takes tensors, got {got}; use d.rows.split(...)")
        if not -dims <= dim < dims:
            raise IndexError(f"{dotted(field.path)}: expected a dim={dim} to {name} along, got {dims} dimensions")
        found.append((field.path, field.value, dim % dims))
    if len({tensor.shape[at] for _, tensor, at in found}) > 1:
        shown = ", ".join(f"{dotted(path)} {tensor.shape[at]}" for path, tensor, at in found)
        raise ValueError(f"torch.{name}: the fields differ in their size along dim={dim}: {shown}")
    if not found:
        raise ValueError(f"torch.{name} needs at least one tensor in the dict")
    cuts = [cut(tensor, at) for _, tensor, at in found]
    return tuple(d._replace_tensors(list(part), d._device) for part in zip(*cuts, strict=True))
