"""The encoder that wraps a Hugging Face tokenizer."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from ._strings import register_encoder

_JSON_ATTRIBUTES = ("model_input_names", "padding_side", "truncation_side", "model_max_length")


@register_encoder
class Tokenizer:
    """Strings as a nested dict of what a Hugging Face tokenizer gives: ``input_ids``, ``attention_mask``, ...

    Each is int64 ``[..., L]``, padded to the longest string encoded together unless ``call`` says otherwise.

    Args:
        tokenizer: any tokenizer of ``transformers``, which the caller imported; this package does not need it.
        call: keyword arguments of every call (``truncation``, ``max_length``, ...); ``padding`` is True unless given.

    Equal to another with an equal tokenizer and call. The JSON form holds the whole tokenizer and needs a fast one.
    Decoding is ``batch_decode(input_ids, skip_special_tokens=True)`` and as exact as the tokenizer is.

    Example (``bert`` is a ``transformers`` tokenizer)::

        d = DeviceDict({"text": ["a cat", "dogs"]}, encoders={"text": Tokenizer(bert, truncation=True)})
        d["text", "input_ids"]     # int64 [2, L]
        d.decode("text")           # ['a cat', 'dogs']

    >>> from tensordict_lite import DeviceDict, Tokenizer
    >>> class Characters:  # anything that is called and decodes as a tokenizer does
    ...     def __call__(self, strings, return_tensors, padding):
    ...         return {"input_ids": torch.tensor([[ord(c) for c in s] for s in strings])}
    ...     def batch_decode(self, ids, skip_special_tokens):
    ...         return ["".join(map(chr, row)) for row in ids.tolist()]
    >>> d = DeviceDict({"text": ["cat", "dog"]}, encoders={"text": Tokenizer(Characters())})
    >>> d["text", "input_ids"].shape, d.decode("text")
    (torch.Size([2, 3]), ['cat', 'dog'])
    """

    name: ClassVar[str] = "tokenizer"
    code_ndim: ClassVar[int] = 1

    __slots__ = ("call", "tokenizer")
    tokenizer: Any
    call: Mapping[str, Any]

    def __init__(self, tokenizer: Any, **call: Any) -> None:
        if not callable(tokenizer) or not hasattr(tokenizer, "batch_decode"):
            raise TypeError(f"expected a Hugging Face tokenizer, got {type(tokenizer).__name__}")
        if "return_tensors" in call:
            raise TypeError("return_tensors is always 'pt' here; leave it out")
        object.__setattr__(self, "tokenizer", tokenizer)
        object.__setattr__(self, "call", {"padding": True, **call})

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Tokenizer is immutable; make another instead of setting {name!r}")

    def encode(self, strings: Sequence[str], /) -> Mapping[str, Tensor]:
        """The tokenizer's tensors for ``n`` strings, each ``[n, L]``."""
        return {**self.tokenizer(list(strings), return_tensors="pt", **self.call)}

    def decode(self, codes: Mapping[str, Tensor], /) -> list[str]:
        """The ``n`` strings of ``codes["input_ids"]``."""
        if not isinstance(codes, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  (a caller's mistake)
            raise TypeError(f"{self!r} decodes a mapping with input_ids, got {type(codes).__name__}")
        return self.tokenizer.batch_decode(codes["input_ids"], skip_special_tokens=True)

    def to_json(self) -> dict[str, Any]:
        """The state, as JSON values. ``TypeError`` for a slow tokenizer, which has no such form."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TypeError(f"{type(self.tokenizer).__name__} is no fast tokenizer, so it has no JSON form")
        return {
            "backend": backend.to_str(),
            "special_tokens": {key: str(token) for key, token in self.tokenizer.special_tokens_map.items()},
            "attributes": {key: getattr(self.tokenizer, key) for key in _JSON_ATTRIBUTES},
            "call": dict(self.call),
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Tokenizer:
        """The encoder of `to_json`'s state. ``ImportError`` without ``transformers``."""
        try:
            tokenizers: Any = importlib.import_module("tokenizers")  # optional, and slow to import
            transformers: Any = importlib.import_module("transformers")
        except ImportError as error:
            raise ImportError('this data holds a Tokenizer; pip install "tensordict_lite[transformers]"') from error
        backend = tokenizers.Tokenizer.from_str(state["backend"])
        attributes = {key: state["attributes"][key] for key in _JSON_ATTRIBUTES}
        options = {**state["special_tokens"], **attributes}
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **options)
        return cls(tokenizer, **state["call"])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tokenizer):
            return NotImplemented
        if self.call != other.call:
            return False
        if self.tokenizer is other.tokenizer:
            return True
        try:
            return self.to_json() == other.to_json()
        except TypeError:
            return bool(self.tokenizer == other.tokenizer)

    def __hash__(self) -> int:
        return hash((type(self), tuple(sorted(self.call))))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.tokenizer, dict(self.call))

    def __repr__(self) -> str:
        return f"Tokenizer({type(self.tokenizer).__name__})"


def _rebuild(tokenizer: Any, call: dict[str, Any]) -> Tokenizer:
    return Tokenizer(tokenizer, **call)
