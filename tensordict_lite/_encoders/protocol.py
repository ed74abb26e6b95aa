"""The base class `StringEncoder`, the JSON form of encoders, and the encoding of nested lists of strings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from .._errors import Path, described, dotted, dtype_name, shown

Codes = Tensor | Mapping[str, Tensor]


class StringEncoder:
    """Base class of objects that encode strings as tensors and decode them.

    Override `encode`; override `decode` if codes can be decoded. Every other attribute and method has a default. An
    object of another class with ``encode`` and ``decode``, and a callable that encodes, are wrapped in an encoder with
    these defaults.

    Attributes:
        name: the name of a class that `register_encoder` registers. It stands in files.
        code_ndim: the number of dimensions in the code of a single string. Then fields of any leading shape can be
            decoded. None: the first dimension is the number of strings.
        padding: the container may pad codes with this number at the end of their last dimension. Padded codes must
            decode to the same strings, and every instance must decode the codes of every other instance. None: codes
            cannot be padded.
        code_dtype: the dtype of the codes. A field of another dtype has numbers, not strings. None: the codes are
            integers, and cannot be padded.
        is_data: True if every instance consists of plain data, so that pickling never fails.
        runs_code: True if `from_json` runs code outside this package. Then `load` never builds the encoder from a file.

    >>> from tensordict_lite import DeviceDict, StringEncoder
    >>> class Length(StringEncoder):
    ...     def encode(self, strings): return torch.tensor([len(s) for s in strings])
    >>> d = DeviceDict({"word": ["a", "four"]}, encoders={"word": Length()})
    >>> d["word"]
    tensor([1, 4])
    """

    __slots__ = ()

    name: ClassVar[str] = ""
    code_ndim: ClassVar[int | None] = None
    padding: ClassVar[int | None] = None
    code_dtype: ClassVar[torch.dtype | None] = None
    is_data: ClassVar[bool] = False
    runs_code: ClassVar[bool] = False

    def encode(self, strings: Sequence[str], /) -> Codes:
        """The codes of a flat sequence of ``n`` strings: a CPU tensor, or a mapping of CPU tensors.

        The first dimension of each tensor is ``n``.
        """
        raise NotImplementedError(f"the encoder class {type(self).__name__} has no encode")

    def decode(self, codes: Any, /) -> list[str]:
        """The ``n`` strings of codes in the form of `encode`. Raises ``TypeError`` if codes cannot be decoded."""
        raise TypeError(f"{self!r} only encodes; give an object with encode and decode to get strings back")

    def encode_ragged(self, strings: Sequence[str], /) -> tuple[Tensor, Tensor] | None:
        """Codes without padding: those of all strings, one after the other, and the length of each, int64 ``[n]``.

        None, the default: this encoder has no such codes.
        """
        return None

    def decode_ragged(self, codes: Tensor, offsets: Tensor, /) -> list[str] | None:
        """The strings of `encode_ragged`: string ``i`` has ``codes[offsets[i] : offsets[i + 1]]``. None as there."""
        return None

    def to_json(self) -> dict[str, Any]:
        """The state, as JSON values. Raises ``TypeError`` if there is no JSON form."""
        raise TypeError(f"{self!r} has no to_json")

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> StringEncoder:
        """Build the encoder from a `to_json` state. The default passes its items to the constructor."""
        return cls(**state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """The encoder itself, since encoders are immutable: a deep copy of a dict shares its encoders."""
        return self


@dataclass(frozen=True, slots=True, repr=False)
class WrappedEncoder(StringEncoder):
    """The encoder of an object that is no `StringEncoder`: one with ``encode`` and ``decode``, or a callable."""

    given: Any

    def encode(self, strings: Sequence[str], /) -> Codes:
        return (self.given.encode if _has_both(self.given) else self.given)(strings)

    def decode(self, codes: Any, /) -> list[str]:
        return self.given.decode(codes) if _has_both(self.given) else StringEncoder.decode(self, codes)

    def __eq__(self, other: object) -> bool:
        # Tuples: an object in a tuple equals itself, whatever its `==` says. Dataclasses do so before 3.13 only.
        return isinstance(other, WrappedEncoder) and (self.given,) == (other.given,)

    def __hash__(self) -> int:
        return hash((self.given,))

    def __repr__(self) -> str:
        return getattr(self.given, "__name__", repr(self.given))


def _has_both(given: object) -> bool:
    return hasattr(given, "encode") and hasattr(given, "decode")


def padding(encoder: Any, *codes: object) -> int | None:
    """The padding number for ``codes`` of an encoder; None if one of the codes cannot be padded."""
    if encoder is None or encoder.padding is None:
        return None
    fits = all(isinstance(one, Tensor) and one.dtype is encoder.code_dtype and one.dim() for one in codes)
    return encoder.padding if fits else None


def decode_alike(a: StringEncoder, b: StringEncoder) -> bool:
    """Whether two encoders decode each other's codes."""
    return a == b or (type(a) is type(b) and a.padding is not None)


def agree(ours: StringEncoder | None, theirs: StringEncoder | None, path: Path | str, whose: str = "") -> None:
    """Raise ``ValueError`` unless values with the encoder ``theirs`` are what a field with the encoder ``ours`` holds.

    None is the encoder of numbers. ``whose``: the owner of the values, for the message.
    """
    if ours is theirs or (ours is not None and theirs is not None and decode_alike(ours, theirs)):
        return
    expected, got = ["numbers" if one is None else f"strings of {shown(one)}" for one in (ours, theirs)]
    where = path if isinstance(path, str) else dotted(path)
    way_out = "encode both alike" if None in (ours, theirs) else "give the strings themselves: decode it first"
    raise ValueError(f"{where}: expected {expected}, got {got}{whose}; {way_out}")


def as_encoder(given: object) -> StringEncoder:
    """``given`` itself if it is a `StringEncoder`; another encoder or a callable is wrapped.

    Raises ``TypeError`` for a class and for any other object.
    """
    if isinstance(given, type):
        raise TypeError(f"an encoder is an instance, got the class {given.__name__}; call it: {given.__name__}(...)")
    if isinstance(given, StringEncoder):
        return given
    if callable(given) or _has_both(given):
        return WrappedEncoder(given)
    raise TypeError(
        f"an encoder has encode and decode, or is a callable; got {described(given)}: {given!r}; "
        "use Utf8(), Vocabulary(tokens), Hashing(buckets) or Tokenizer(hf_tokenizer)"
    )


def as_given(encoder: StringEncoder) -> Any:
    """The object that `as_encoder` took."""
    return encoder.given if isinstance(encoder, WrappedEncoder) else encoder


# --- the JSON form: a registered name and plain data. It contains no import path. ---

_registry: dict[str, type[StringEncoder]] = {}
_E = TypeVar("_E", bound=type[StringEncoder])


def register_encoder(cls: _E) -> _E:
    """Class decorator: register a subclass of `StringEncoder`, so that its instances can be saved and sent.

    The class needs a ``name``, a unique string, and ``to_json``, which returns a dict of JSON values. It also needs
    ``from_json``, if its constructor does not take the items of that dict as keywords.

    Raises: ``TypeError`` for another class, and if ``name`` or ``to_json`` is missing; ``ValueError`` if another class
    has the same name.

    >>> from tensordict_lite import StringEncoder, encoder_from_json, encoder_to_json, register_encoder
    >>> @register_encoder
    ... class Length(StringEncoder):
    ...     name = "length"
    ...     code_ndim = 0
    ...     def encode(self, strings): return torch.tensor([len(s) for s in strings])
    ...     def decode(self, codes): return ["?" * n for n in codes.tolist()]
    ...     def to_json(self): return {}
    >>> encoder_to_json(Length())
    {'name': 'length'}
    """
    if not isinstance(cls, type) or not issubclass(cls, StringEncoder):
        raise TypeError(f"register_encoder takes a subclass of StringEncoder, got {cls!r:.60}")
    name = cls.name
    if not isinstance(name, str) or not name:
        raise TypeError(f"the encoder class {cls.__name__} has no name; set `name`, a unique str for files")
    if cls.to_json is StringEncoder.to_json:
        raise TypeError(f"the encoder class {cls.__name__} has no to_json, which its JSON form needs")
    known = _registry.get(name, cls)
    if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):  # else a notebook cell run again
        raise ValueError(f"the encoder name {name!r} is taken by {known.__qualname__}; choose another")
    _registry[name] = cls
    return cls


def runs_code(entry: Mapping[Any, Any]) -> bool:
    """Whether building an encoder from this JSON form runs code outside this package."""
    name = entry.get("name")
    return isinstance(name, str) and name in _registry and _registry[name].runs_code


def encoder_to_json(encoder: StringEncoder) -> dict[str, Any]:
    """The JSON form of an encoder: its registered name and its state, as plain JSON values.

    Raises: ``TypeError`` if the class of the encoder is not registered, for example for a plain callable.
    Cost: proportional to the size of the encoder.

    >>> from tensordict_lite import Vocabulary, encoder_to_json
    >>> encoder_to_json(Vocabulary(["cat", "dog"]))
    {'tokens': ['cat', 'dog'], 'unknown': None, 'name': 'vocabulary'}
    """
    if not isinstance(encoder, StringEncoder) or _registry.get(encoder.name) is not type(encoder):
        raise TypeError(f"{encoder!r} has no JSON form; register its class with register_encoder")
    return {**encoder.to_json(), "name": encoder.name}


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
    level: list[Any] = [value.tolist() if isinstance(value, np.ndarray) else value]
    shape: tuple[int, ...] = ()
    while level and isinstance(level[0], (list, tuple)):
        size = len(level[0])
        for i, item in enumerate(level):
            if not isinstance(item, (list, tuple)):
                raise TypeError(f"item {_place(i, shape)}: expected a list of {size}, got {described(item)}")
            if len(item) != size:
                raise ValueError(
                    f"item {_place(i, shape)}: expected a length of {size}, got {len(item)}; nested lists must be "
                    "rectangular"
                )
        level = list(chain.from_iterable(level))
        shape = (*shape, size)
    if not {str}.issuperset(map(type, level)):
        for i, item in enumerate(level):
            if not isinstance(item, str):
                hint = "; fill missing values first" if item is None or item != item else ""
                raise TypeError(
                    f"item {_place(i, shape)}: expected a str as for the others, got {described(item)}{hint}"
                )
    return level, shape


def _place(i: int, shape: tuple[int, ...]) -> str:
    """The place of item ``i`` of nested lists of this shape: ``[0][2]``."""
    return "".join(f"[{k}]" for k in np.unravel_index(i, shape))


def encode_nested(encoder: StringEncoder, strings: list[str], shape: tuple[int, ...]) -> Codes:
    """Encode ``strings`` and reshape the codes to the leading ``shape``.

    Raises ``TypeError`` if the encoder returns anything but tensors whose first dimension is the number of strings.
    """
    codes = encoder.encode(strings)
    if not isinstance(codes, Tensor) and isinstance(codes, Mapping):
        return {key: _with_leading(encoder, value, strings, shape) for key, value in codes.items()}
    return _with_leading(encoder, codes, strings, shape)


def encode_ragged(encoder: StringEncoder | None, strings: Any) -> tuple[Tensor, Tensor] | None:
    """The codes of a list of strings without padding, and their lengths. None for other values and other encoders."""
    flat = isinstance(strings, (list, tuple)) and {str}.issuperset(map(type, strings))
    return encoder.encode_ragged(strings) if flat and encoder is not None else None


def _with_leading(encoder: StringEncoder, codes: Any, strings: list[str], shape: tuple[int, ...]) -> Tensor:
    """Validate a tensor of codes, and replace its first dimension by ``shape``."""
    if not isinstance(codes, Tensor):
        raise TypeError(
            f"{shown(encoder)}.encode: expected a Tensor or a mapping of tensors, got {described(codes)}; wrap a "
            "Hugging Face tokenizer in Tokenizer"
        )
    if codes.ndim == 0 or codes.shape[0] != len(strings):
        raise TypeError(
            f"{shown(encoder)}.encode: expected a first dimension of {len(strings)}, that of the strings, got shape "
            f"{list(codes.shape)}"
        )
    return codes if len(shape) == 1 else codes.reshape((*shape, *codes.shape[1:]))


def decode_nested(encoder: StringEncoder, codes: Codes) -> Any:
    """Decode ``codes`` to a ``str``, or to nested lists with one level for each leading dimension."""
    ndim = encoder.code_ndim
    first: Any = codes
    if isinstance(codes, Mapping):
        first = next(iter(codes.values()), None)
        if first is None or not all(isinstance(value, Tensor) for value in codes.values()):
            raise TypeError(f"{shown(encoder)} decodes tensors, got a nested dict that is not codes")
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
    return np.array(strings, dtype=object).reshape(shape).tolist()


def decode_rows(encoder: StringEncoder, values: Tensor, offsets: Tensor) -> list[Any]:
    """Decode a ragged field of codes: a string for each row, or a list of strings if each value is a string."""
    if values.dim() == 1 and encoder.code_ndim != 0:
        strings = encoder.decode_ragged(values.detach().cpu(), offsets.cpu())
        if strings is not None:
            return strings
        return [decode_nested(encoder, row) for row in values.split(offsets.diff().tolist())]
    decoded, ends = decode_nested(encoder, values), offsets.tolist()
    return [decoded[start:end] for start, end in pairwise(ends)]


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
