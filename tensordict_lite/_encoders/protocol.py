"""The `StringEncoder` protocol, the JSON form of encoders, and the encoding of nested lists of strings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from .._errors import dtype_name
from .._memory.jagged import is_plain_jagged, values_of

Codes = Tensor | Mapping[str, Tensor]


@runtime_checkable
class StringEncoder(Protocol):
    """Protocol of an object that encodes strings as tensors and decodes them. Two methods are required.

    `encode` takes a flat sequence of ``n`` strings. It returns a CPU tensor whose first dimension is ``n``, or a
    mapping of such tensors. `decode` takes codes of the same form and returns ``n`` strings.

    An encoder class may also define these attributes:

    - ``code_ndim``: an int, the number of dimensions in the code of a single string. With ``code_ndim``, fields of any
      leading shape can be decoded. Without ``code_ndim``, the first dimension is the number of strings.
    - ``padding``: a number. The container may pad codes with this number at the end of their last dimension. Padded
      codes must decode to the same strings, and every instance must decode the codes of every other instance.
      Requires ``code_dtype``, the dtype of the codes.
    - ``encode_jagged(strings)``: codes without padding, for columns of tables whose rows differ in length. Returns the
      codes of all strings, one string after the other, and the length of each string, int64 ``[n]``.
    - ``decode_jagged(codes, offsets)``: the strings of such codes. String ``i`` has the codes from ``offsets[i]`` to
      ``offsets[i + 1]``.
    - ``is_data``: True if every instance consists of plain data, so that pickling never fails.

    >>> from tensordict_lite import StringEncoder, Utf8
    >>> isinstance(Utf8(), StringEncoder)
    True
    """

    def encode(self, strings: Sequence[str], /) -> Codes:
        """The codes of ``n`` strings, on the CPU. The first dimension of each tensor is ``n``."""
        ...

    def decode(self, codes: Any, /) -> list[str]:
        """The ``n`` strings of codes. The first dimension of each tensor is ``n``."""
        ...


@dataclass(frozen=True, slots=True)
class EncodeOnly:
    """Wraps a plain callable as an encoder. It can encode strings, but `decode` raises ``TypeError``."""

    function: Callable[[Sequence[str]], Codes]

    def encode(self, strings: Sequence[str], /) -> Codes:
        return self.function(strings)

    def decode(self, codes: Any, /) -> list[str]:
        raise TypeError(f"{self!r} only encodes; give an object with encode and decode to get strings back")

    def __repr__(self) -> str:
        return getattr(self.function, "__name__", repr(self.function))


def padding(encoder: object, *codes: object) -> int | None:
    """The padding number for ``codes`` of an encoder; None if one of the codes cannot be padded."""
    number: int | None = getattr(encoder, "padding", None)
    if number is None:
        return None
    dtype: torch.dtype = cast(Any, encoder).code_dtype
    fits = all(isinstance(one, Tensor) and one.dtype is dtype and one.dim() for one in codes)
    return number if fits else None


def decode_alike(a: StringEncoder, b: StringEncoder) -> bool:
    """Whether two encoders decode each other's codes."""
    return a == b or (type(a) is type(b) and getattr(a, "padding", None) is not None)


def as_encoder(given: object) -> StringEncoder:
    """``given`` itself if it is a `StringEncoder`; a plain callable is wrapped in `EncodeOnly`.

    Raises ``TypeError`` for a class and for any other object.
    """
    if isinstance(given, type):
        raise TypeError(f"an encoder is an instance, got the class {given.__name__}; call it: {given.__name__}(...)")
    if isinstance(given, StringEncoder):
        return given
    if callable(given):
        return EncodeOnly(cast(Any, given))
    raise TypeError(
        f"an encoder has encode and decode, or is a callable; got {type(given).__name__}: {given!r}. "
        "Use Utf8(), Vocabulary(tokens), Hashing(buckets) or Tokenizer(hf_tokenizer)"
    )


# --- the JSON form: a registered name and plain data. It contains no import path. ---

_registry: dict[str, type[Any]] = {}
_E = TypeVar("_E", bound=type[Any])


def register_encoder(cls: _E) -> _E:
    """Class decorator: register an encoder class, so that its instances can be saved and sent.

    The class needs three attributes: ``name``, a unique string; ``to_json(self)``, which returns a dict of JSON values;
    and the classmethod ``from_json(cls, state)``. If ``from_json`` runs code outside this package, set
    ``runs_code = True`` on the class; then `load` never builds the encoder from a file.

    Raises: ``TypeError`` if one of the attributes is missing; ``ValueError`` if another class has the same name.

    >>> from tensordict_lite import encoder_from_json, encoder_to_json, register_encoder
    >>> @register_encoder
    ... class Length:
    ...     name = "length"
    ...     code_ndim = 0
    ...     def encode(self, strings): return torch.tensor([len(s) for s in strings])
    ...     def decode(self, codes): return ["?" * n for n in codes.tolist()]
    ...     def to_json(self): return {}
    ...     @classmethod
    ...     def from_json(cls, state): return cls()
    >>> encoder_to_json(Length())
    {'name': 'length'}
    """
    name: Any = getattr(cls, "name", None)
    if not isinstance(cls, type) or not isinstance(name, str):
        raise TypeError(f"register_encoder takes a class with a str attribute `name`, got {cls!r:.60}")
    known = _registry.get(name, cls)
    if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):  # else a notebook cell run again
        raise ValueError(f"the encoder name {name!r} is taken by {known.__qualname__}; choose another")
    for method in ("to_json", "from_json"):
        if not hasattr(cls, method):
            raise TypeError(f"the encoder class {cls.__name__} has no {method}, which its JSON form needs")
    _registry[name] = cls
    return cls


def runs_code(encoder: object) -> bool:
    """Whether building this encoder from its JSON form runs code outside this package.

    ``encoder``: an encoder or its JSON form. The encoder class declares this with its attribute ``runs_code``.
    """
    name: Any = encoder.get("name") if isinstance(encoder, Mapping) else getattr(encoder, "name", None)
    return isinstance(name, str) and getattr(_registry.get(name), "runs_code", False) is True


def encoder_to_json(encoder: StringEncoder) -> dict[str, Any]:
    """The JSON form of an encoder: its registered name and its state, as plain JSON values.

    Raises: ``TypeError`` if the class of the encoder is not registered, for example for a plain callable.
    Cost: proportional to the size of the encoder.

    >>> from tensordict_lite import Vocabulary, encoder_to_json
    >>> encoder_to_json(Vocabulary(["cat", "dog"]))
    {'tokens': ['cat', 'dog'], 'unknown': None, 'name': 'vocabulary'}
    """
    if _registry.get(str(getattr(encoder, "name", ""))) is not type(encoder):
        raise TypeError(f"{encoder!r} has no JSON form; register its class with register_encoder")
    return {**cast(Any, encoder).to_json(), "name": cast(Any, encoder).name}


def encoder_from_json(data: Mapping[str, Any]) -> StringEncoder:
    """Build an encoder from its JSON form. Imports nothing that ``data`` names.

    Raises: ``ValueError`` if no encoder is registered under the name, or if ``data`` is malformed.
    Cost: proportional to the size of the encoder.

    >>> from tensordict_lite import encoder_from_json
    >>> encoder_from_json({"name": "hashing", "buckets": 16, "seed": 0})
    Hashing(buckets=16, seed=0)
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"the JSON form of an encoder is an object, got {type(data).__name__}")
    state = dict(data)
    name = state.pop("name", None)
    cls = _registry.get(name) if isinstance(name, str) else None
    if cls is None:
        raise ValueError(f"no encoder is registered as {name!r}; known are {', '.join(sorted(_registry))}")
    try:
        return cls.from_json(state)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"the JSON form of the encoder {name!r} is malformed: {error}") from error


# --- nested lists of strings ---


def flatten_strings(value: Any) -> tuple[list[str], tuple[int, ...]]:
    """Flatten a ``str``, a string array or a rectangular nested list: its strings in order, and its shape.

    Raises ``TypeError`` for an item that is not a string, and ``ValueError`` for a ragged list. Both name the index.
    """
    if isinstance(value, str):
        return [value], ()
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, str):  # a 0-d array
        return [value], ()
    shape: list[int] = []
    level = value
    while isinstance(level, (list, tuple)):
        shape.append(len(level))
        level = level[0] if level else None
    flat: list[str] = []
    _flatten_strings(value, tuple(shape), (), flat)
    return flat, tuple(shape)


def _flatten_strings(value: Any, shape: tuple[int, ...], index: tuple[int, ...], out: list[str]) -> None:
    """Append the strings of ``value`` to ``out``. ``shape``: the expected shape; ``index``: the place of ``value``."""
    at = "".join(f"[{i}]" for i in index)
    if not shape:
        if not isinstance(value, str):
            hint = "; fill missing values first" if value is None or value != value else ""
            raise TypeError(f"item {at} is {type(value).__name__}, expected str as for the others{hint}")
        out.append(value)
        return
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"item {at} is {type(value).__name__}, expected a list of {shape[0]}")
    items = value
    if len(items) != shape[0]:
        raise ValueError(f"item {at} has length {len(items)}, expected {shape[0]}: nested lists must be rectangular")
    if len(shape) == 1 and {str}.issuperset(map(type, items)):
        out.extend(items)
        return
    for i, item in enumerate(items):
        _flatten_strings(item, shape[1:], (*index, i), out)


def encode_nested(encoder: StringEncoder, strings: list[str], shape: tuple[int, ...]) -> Codes:
    """Encode ``strings`` and reshape the codes to the leading ``shape``.

    Raises ``TypeError`` if the encoder returns anything but tensors whose first dimension is the number of strings.
    """
    codes = encoder.encode(strings)
    if isinstance(codes, Mapping):
        return {key: _with_leading(encoder, value, strings, shape) for key, value in codes.items()}
    return _with_leading(encoder, codes, strings, shape)


def encode_jagged(encoder: object, strings: Any) -> tuple[Tensor, Tensor] | None:
    """The codes of a list of strings without padding, and their lengths. None for other values and other encoders."""
    method = getattr(encoder, "encode_jagged", None)
    if method is None or not isinstance(strings, (list, tuple)):
        return None
    flat = strings
    return method(flat) if {str}.issuperset(map(type, flat)) else None


def _with_leading(encoder: StringEncoder, codes: Any, strings: list[str], shape: tuple[int, ...]) -> Tensor:
    """Validate a tensor of codes, and replace its first dimension by ``shape``."""
    if not isinstance(codes, Tensor):
        raise TypeError(
            f"{short(encoder)}.encode gave {type(codes).__name__}, expected a Tensor or a mapping of tensors "
            "(wrap a Hugging Face tokenizer in Tokenizer)"
        )
    if codes.ndim == 0 or codes.shape[0] != len(strings):
        raise TypeError(
            f"{short(encoder)}.encode gave shape {list(codes.shape)} for {len(strings)} strings; "
            f"the first dimension must be {len(strings)}"
        )
    return codes.reshape((*shape, *codes.shape[1:]))


def decode_nested(encoder: StringEncoder, codes: Codes) -> Any:
    """Decode ``codes`` to a ``str``, or to nested lists with one level for each leading dimension."""
    ndim: int | None = getattr(encoder, "code_ndim", None)
    if isinstance(codes, Mapping):
        first = next(iter(codes.values()), None)
        if first is None or not all(isinstance(value, Tensor) for value in codes.values()):
            raise TypeError(f"{short(encoder)} decodes tensors, got a nested dict that is not codes")
    else:
        first = codes
    if not isinstance(codes, Mapping) and codes.is_nested:
        decode = getattr(encoder, "decode_jagged", None)
        if decode is not None and is_plain_jagged(codes) and codes.dim() == 2:
            return decode(values_of(codes).detach().cpu(), cast(Any, codes).offsets().cpu())
        return [decode_nested(encoder, row) for row in codes.unbind()]
    # Without code_ndim, the first dimension is the number of strings.
    lead = first.ndim - ndim if ndim is not None else min(first.ndim, 1)
    if lead < 0:
        raise ValueError(f"{encoder!r} decodes codes of {ndim} dimensions or more, got shape {list(first.shape)}")
    shape = tuple(first.shape[:lead])

    def rows(tensor: Tensor) -> Tensor:
        host = tensor.detach().cpu()
        return host.reshape((math.prod(shape), *host.shape[lead:]))

    flat = {key: rows(value) for key, value in codes.items()} if isinstance(codes, Mapping) else rows(codes)
    return _nest(encoder.decode(flat), shape)


def _nest(strings: list[str], shape: tuple[int, ...]) -> Any:
    """The strings as nested lists of this shape; a single string for the shape ``()``."""
    if not shape:
        return strings[0]
    if len(shape) == 1:
        return list(strings)
    step = math.prod(shape[1:])
    return [_nest(strings[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]


def short(encoder: object) -> str:
    """The repr of an encoder, truncated for messages: the repr of a user's encoder may be long."""
    text = repr(encoder)
    return text if len(text) <= 60 else f"{text[:59]}…"


def tensor_codes(encoder: object, codes: object) -> Tensor:
    """Return ``codes``. Raises ``TypeError`` unless ``codes`` is a tensor."""
    if not isinstance(codes, Tensor):
        raise TypeError(f"{encoder!r} decodes a tensor of codes, got {type(codes).__name__}")
    return codes


def integer_codes(encoder: object, codes: Tensor) -> list[int]:
    """1-d integer codes as Python ints. Raises ``TypeError`` unless the codes are a tensor of integers."""
    tensor_codes(encoder, codes)
    if codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
        raise TypeError(f"{encoder!r} decodes integer codes, got {dtype_name(codes.dtype)}")
    return codes.tolist()
