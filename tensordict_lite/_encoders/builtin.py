"""The built-in string encoders `Utf8`, `Vocabulary` and `Hashing`: immutable and compared by value."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._errors import dtype_name
from .protocol import StringEncoder, integer_codes, register_encoder, tensor_codes


def _strings_only(tokens: Iterable[str]) -> tuple[str, ...]:
    if isinstance(tokens, str):
        raise TypeError(
            f"tokens are an iterable of strings, got the one string {tokens!r}; for its characters use list()"
        )
    kept = tuple(tokens)
    for token in kept:
        if not isinstance(token, str):
            hint = "; fill missing values first" if token is None or token != token else ""
            raise TypeError(f"tokens are str, got {type(token).__name__}: {token!r}{hint}")
    return kept


def _is_count(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


@register_encoder
@dataclass(frozen=True, slots=True, repr=False)
class Utf8(StringEncoder):
    """Encode strings as their UTF-8 bytes: uint8 ``[..., L]``, padded with zeros. Decoding is exact.

    ``Utf8()`` is the default encoder of every key.

    Args:
        max_length: the width ``L`` in bytes. None: the width of the longest string in the call.

    Raises:
        ValueError: for a string with a NUL character, with a lone surrogate, or with more than ``max_length`` bytes.
            Strings are never truncated.

    Cost: two copies of the bytes, no Python loop over characters. Decoding copies the field to the CPU.

    >>> from tensordict_lite import DeviceDict, Utf8
    >>> d = DeviceDict({"name": ["Ada", "Grace"]})
    >>> d["name"].shape, d.decode("name")
    (torch.Size([2, 5]), ['Ada', 'Grace'])
    >>> Utf8(max_length=4).encode(["Grace"])
    Traceback (most recent call last):
    ...
    ValueError: 'Grace' is 5 bytes in UTF-8, over max_length=4; raise max_length, strings are never cut
    """

    name = "utf8"
    code_ndim = 1
    padding = 0
    code_dtype = torch.uint8
    is_data = True

    max_length: int | None = None

    def __post_init__(self) -> None:
        if self.max_length is not None and not _is_count(self.max_length, 0, 2**63):
            raise ValueError(f"max_length is a number of bytes, 0 or more, or None; got {self.max_length!r}")

    def __repr__(self) -> str:
        return "Utf8()" if self.max_length is None else f"Utf8({self.max_length})"

    def encode(self, strings: Sequence[str], /) -> Tensor:
        """The codes of ``n`` strings: uint8 ``[n, L]``."""
        encoded, _ = self._encoded(strings)
        width = max(map(len, encoded), default=0) if self.max_length is None else self.max_length
        if width == 0:  # NumPy has no zero-width byte strings
            return torch.zeros(len(encoded), 0, dtype=torch.uint8, device="cpu")
        # NumPy pads an `S` array with zeros in C. The array is writable, so torch shares its memory.
        packed = np.array(encoded, dtype=f"S{width}")
        return torch.from_numpy(packed.view(np.uint8).reshape(len(encoded), width))

    def decode(self, codes: Tensor, /) -> list[str]:
        """The ``n`` strings of uint8 ``[n, L]``."""
        if tensor_codes(self, codes).dtype != torch.uint8:
            raise TypeError(f"{self!r} decodes uint8 codes, got {dtype_name(codes.dtype)}")
        count, width = codes.shape
        if width == 0:
            return [""] * count
        array = codes.contiguous().numpy()
        rows: list[bytes] = array.view(f"S{width}").reshape(count).tolist()
        return [row.decode() for row in rows]

    def encode_ragged(self, strings: Sequence[str], /) -> tuple[Tensor, Tensor]:
        """The codes of ``n`` strings without padding, one string after the other, and the length of each string."""
        encoded, joined = self._encoded(strings)
        lengths = torch.tensor(list(map(len, encoded)), dtype=torch.int64, device="cpu")
        # A copy of the bytes, since a tensor can be written to.
        return torch.as_tensor(np.frombuffer(bytearray(joined), np.uint8), device="cpu"), lengths

    def decode_ragged(self, codes: Tensor, offsets: Tensor, /) -> list[str]:
        """The strings of codes without padding. String ``i`` has ``codes[offsets[i] : offsets[i + 1]]``."""
        if tensor_codes(self, codes).dtype != torch.uint8:
            raise TypeError(f"{self!r} decodes uint8 codes, got {dtype_name(codes.dtype)}")
        ends: list[int] = offsets.tolist()
        first = ends[0]
        data: bytes = codes[first : ends[-1]].numpy().tobytes()
        return [data[start - first : end - first].rstrip(b"\0").decode() for start, end in pairwise(ends)]

    def _encoded(self, strings: Sequence[str]) -> tuple[list[bytes], bytes]:
        """The bytes of each string, and of all strings joined. Raises ``ValueError`` for the first invalid string."""
        strings = list(strings)
        try:
            encoded = [string.encode() for string in strings]
        except UnicodeEncodeError:
            encoded = [self._bytes(string) for string in strings]  # raises an error that names the string
        joined = b"".join(encoded)
        limit = self.max_length
        # One test of all bytes, not one of each string.
        if b"\0" in joined or (limit is not None and max(map(len, encoded), default=0) > limit):
            for string in strings:  # pragma: no branch  (one of the strings is invalid)
                self._bytes(string)  # raises an error for the first invalid string
        return encoded, joined

    def _bytes(self, string: str) -> bytes:
        try:
            encoded = string.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{string!r} is not valid Unicode text (a lone surrogate)") from error
        if b"\0" in encoded:
            raise ValueError(f"{string!r} holds a NUL character, which UTF-8 codes use as padding")
        if self.max_length is not None and len(encoded) > self.max_length:
            raise ValueError(
                f"{string!r} is {len(encoded)} bytes in UTF-8, over max_length={self.max_length}; "
                "raise max_length, strings are never cut"
            )
        return encoded

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.max_length,)

    def to_json(self) -> dict[str, Any]:
        """The state, as JSON values."""
        return {"max_length": self.max_length}


@register_encoder
@dataclass(frozen=True, slots=True, init=False, repr=False)
class Vocabulary(StringEncoder):
    """Encode strings as their index in a list of tokens: int64 ``[...]``. Decoding is exact.

    Args:
        tokens: the distinct tokens, in the order of their codes.
        unknown: the token that replaces any string outside ``tokens``; it must be in ``tokens``. None: a string outside
            ``tokens`` raises an error.

    Raises:
        TypeError: for a set of tokens, whose order differs between processes.
        ValueError: for repeated tokens, and for an ``unknown`` that is not in ``tokens``. Encoding raises it for a
            string outside ``tokens`` and names the string. Decoding raises it for a code outside
            ``0 .. len(tokens) - 1``.

    Cost: one dictionary lookup per string. Decoding copies the field to the CPU.

    >>> from tensordict_lite import DeviceDict, Vocabulary
    >>> d = DeviceDict({"species": ["dog", "cat"]}, encoders={"species": Vocabulary(["cat", "dog"])})
    >>> d["species"], d.decode("species")
    (tensor([1, 0]), ['dog', 'cat'])
    >>> d["species"] = "cow"
    Traceback (most recent call last):
    ...
    ValueError: 'species': 'cow' is not among the 2 tokens of Vocabulary(['cat', 'dog']); add it, or give unknown=
    """

    name = "vocabulary"
    code_ndim = 0
    is_data = True

    tokens: tuple[str, ...]
    unknown: str | None = None
    _codes: dict[str, int] = field(init=False, compare=False)

    # An explicit constructor, because `tokens` may be any iterable and is stored as a tuple.
    def __init__(self, tokens: Iterable[str], unknown: str | None = None) -> None:
        if isinstance(tokens, (set, frozenset)):
            raise TypeError(
                f"tokens must be in order, got a {type(tokens).__name__}, whose order differs between processes; "
                "Vocabulary.fit sorts the tokens"
            )
        tokens = _strings_only(tokens)
        codes = {token: code for code, token in enumerate(tokens)}
        if len(codes) != len(tokens):
            repeated = next(token for code, token in enumerate(tokens) if codes[token] != code)
            raise ValueError(
                f"tokens must be distinct, {repeated!r} is repeated; Vocabulary.fit takes repeated strings"
            )
        if unknown is not None and unknown not in codes:
            raise ValueError(f"unknown={unknown!r} must be one of the tokens")
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "unknown", unknown)
        object.__setattr__(self, "_codes", codes)

    @classmethod
    def fit(cls, strings: Iterable[str], unknown: str | None = None) -> Vocabulary:
        """Build a vocabulary of the distinct ``strings``. Sorts the tokens, so the order of the data is irrelevant.

        If ``unknown`` is not among the strings, it becomes the first token.

        >>> from tensordict_lite import Vocabulary
        >>> Vocabulary.fit(["dog", "cat", "dog"], unknown="<unk>")
        Vocabulary(['<unk>', 'cat', 'dog'], unknown='<unk>')
        """
        tokens = sorted(set(_strings_only(strings)))
        return cls(tokens if unknown is None or unknown in tokens else [unknown, *tokens], unknown)

    def __len__(self) -> int:
        return len(self.tokens)

    def __contains__(self, token: object) -> bool:
        return token in self._codes

    def encode(self, strings: Sequence[str], /) -> Tensor:
        """The codes of ``n`` strings: int64 ``[n]``."""
        codes = self._codes
        if self.unknown is not None:
            other = codes[self.unknown]
            return torch.tensor([codes.get(string, other) for string in strings], dtype=torch.int64, device="cpu")
        try:
            return torch.tensor([codes[string] for string in strings], dtype=torch.int64, device="cpu")
        except KeyError as error:
            raise ValueError(
                f"{error.args[0]!r} is not among the {len(self)} tokens of {self!r}; add it, or give unknown="
            ) from None

    def decode(self, codes: Tensor, /) -> list[str]:
        """The ``n`` tokens of integer codes ``[n]``."""
        tokens = self.tokens
        wanted = integer_codes(self, codes)
        for code in wanted:
            if not 0 <= code < len(tokens):
                raise ValueError(f"code {code} is outside {self!r}, whose codes are 0 to {len(tokens) - 1}")
        return [tokens[code] for code in wanted]

    def to_json(self) -> dict[str, Any]:
        """The state, as JSON values."""
        return {"tokens": list(self.tokens), "unknown": self.unknown}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.tokens, self.unknown)  # the constructor rebuilds the lookup table

    def __repr__(self) -> str:
        shown = repr(list(self.tokens)) if len(self) <= 6 else f"<{len(self)} tokens>"
        return f"Vocabulary({shown})" if self.unknown is None else f"Vocabulary({shown}, unknown={self.unknown!r})"


@register_encoder
@dataclass(frozen=True, slots=True)
class Hashing(StringEncoder):
    """Encode strings as a hash in ``0 .. buckets - 1``: int64 ``[...]``. A hash cannot be decoded.

    Every process and every platform computes the same codes: BLAKE2b (RFC 7693) of the UTF-8 bytes with an 8-byte
    digest and the seed as the salt. The digest is read as a little-endian integer, modulo ``buckets``.

    Args:
        buckets: the number of codes, from 1 to ``2**63``.
        seed: selects an independent hash function; ``0 <= seed < 2**64``.

    Raises:
        ValueError: for ``buckets`` or ``seed`` outside its range.
        TypeError: on decoding.

    Cost: about one microsecond per string.

    >>> from tensordict_lite import Hashing
    >>> Hashing(1000).encode(["cat", "dog", "cat"])
    tensor([939, 465, 939])
    """

    name = "hashing"
    code_ndim = 0
    is_data = True

    buckets: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not _is_count(self.buckets, 1, 2**63):
            raise ValueError(f"buckets is a whole number from 1 to 2**63, got {self.buckets!r}")
        if not _is_count(self.seed, 0, 2**64 - 1):
            raise ValueError(f"seed is a whole number from 0 to 2**64 - 1, got {self.seed!r}")

    def encode(self, strings: Sequence[str], /) -> Tensor:
        """The codes of ``n`` strings: int64 ``[n]``."""
        salt = self.seed.to_bytes(8, "little")
        digests = (
            hashlib.blake2b(string.encode("utf-8", "surrogatepass"), digest_size=8, salt=salt).digest()
            for string in strings
        )
        codes = [int.from_bytes(digest, "little") % self.buckets for digest in digests]
        return torch.tensor(codes, dtype=torch.int64, device="cpu")

    def decode(self, codes: Tensor, /) -> list[str]:
        """Raises ``TypeError``, since a hash cannot be decoded."""
        raise TypeError(f"{self!r} is one way and cannot be decoded; use Vocabulary to get strings back")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.buckets, self.seed)

    def to_json(self) -> dict[str, Any]:
        """The state, as JSON values."""
        return {"buckets": self.buckets, "seed": self.seed}
