"""`Tokenizer`, the encoder that wraps a Hugging Face tokenizer."""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .._errors import described, optional_module
from .protocol import StringEncoder, register_encoder

# Fields of a tokenizer's files for its last call and its origin. They are not saved: equal tokenizers may differ there.
_PASSING = {"tokenizer.json": ("padding", "truncation"), "tokenizer_config.json": ("is_local", "local_files_only")}


@register_encoder
class Tokenizer(StringEncoder):
    """Encode strings with a Hugging Face tokenizer, as a nested dict: ``input_ids``, ``attention_mask``, ...

    Each tensor is int64 ``[..., L]``. ``L`` is the length of the longest string in the call, unless ``call`` sets
    another padding.

    Args:
        tokenizer: any tokenizer of ``transformers``. This package does not require ``transformers``.
        call: keyword arguments for every call of the tokenizer, such as ``truncation`` or ``max_length``. ``padding``
            is True by default.

    Raises:
        TypeError: for an object that is not a tokenizer, and for ``return_tensors`` in ``call``.
        ValueError: on encoding an empty list. Errors of the tokenizer are raised unchanged.

    Cost: the cost of the tokenizer. The JSON form writes temporary files, and so does a comparison of encoders with
    different tokenizer objects.

    Two encoders are equal if their tokenizers and their ``call`` are equal. The JSON form contains the files that
    ``save_pretrained`` writes. Decoding calls ``batch_decode(input_ids, skip_special_tokens=True)``; the tokenizer
    determines whether the result is exact. It also decodes ids alone, padded ``[n, L]`` or ragged: store what a model
    generated with this encoder, as ``DeviceDict({"answer": ids}, encoders={"answer": tokenizer})``, and decode it.

    In a ragged field, ``collate(samples, ragged=["text"])``, the ids are the values of a `Ragged`. There is no
    ``attention_mask``, as there is no padding.

    Example (``bert`` is a ``transformers`` tokenizer)::

        d = DeviceDict({"text": ["a cat", "dogs"]}, encoders={"text": Tokenizer(bert, truncation=True)})
        d["text", "input_ids"]     # int64 [2, L]
        d.decode("text")           # ['a cat', 'dogs']

    >>> from tensordict_lite import DeviceDict, Tokenizer
    >>> class Characters:  # any class with the methods of a tokenizer
    ...     def __call__(self, strings, return_tensors, padding):
    ...         return {"input_ids": torch.tensor([[ord(c) for c in s] for s in strings])}
    ...     def batch_decode(self, ids, skip_special_tokens):
    ...         return ["".join(map(chr, row)) for row in ids.tolist()]
    >>> d = DeviceDict({"text": ["cat", "dog"]}, encoders={"text": Tokenizer(Characters())})
    >>> d["text", "input_ids"].shape, d.decode("text")
    (torch.Size([2, 3]), ['cat', 'dog'])
    """

    name = "tokenizer"
    runs_code = True
    code_ndim = 1

    __slots__ = ("call", "tokenizer")
    tokenizer: Any
    call: Mapping[str, Any]

    def __init__(self, tokenizer: Any, **call: Any) -> None:
        if not callable(tokenizer) or not hasattr(tokenizer, "batch_decode"):
            raise TypeError(f"expected a Hugging Face tokenizer, got {type(tokenizer).__name__}")
        if "return_tensors" in call:
            raise TypeError("return_tensors is always 'pt' here; leave it out")
        object.__setattr__(self, "tokenizer", tokenizer)
        object.__setattr__(self, "call", MappingProxyType({"padding": True, **call}))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Tokenizer is immutable; make another instead of setting {name!r}")

    def encode(self, strings: Sequence[str], /) -> Mapping[str, Tensor]:
        """The tensors of the tokenizer for ``n`` strings, each ``[n, L]``."""
        if not strings:
            raise ValueError("no strings to tokenize, so the width of their codes is not known")
        return {**self.tokenizer(list(strings), return_tensors="pt", **self.call)}

    def decode(self, codes: Mapping[str, Tensor] | Tensor, /) -> list[str]:
        """The ``n`` strings of ``codes["input_ids"]``, or of ids alone, such as those that a model generated."""
        ids = codes["input_ids"] if isinstance(codes, Mapping) else codes
        if not isinstance(ids, Tensor) or ids.is_floating_point():
            raise TypeError(f"{self!r} decodes ids, or a mapping with input_ids, got {described(ids)}")
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True)

    def encode_ragged(self, strings: Sequence[str], /) -> tuple[Tensor, Tensor]:
        """The ids of ``n`` strings without padding, one string after the other, and the number of ids of each."""
        rows: list[list[int]] = self.tokenizer(list(strings), **{**self.call, "padding": False})["input_ids"]
        lengths = torch.tensor(list(map(len, rows)), dtype=torch.int64, device="cpu")
        return torch.tensor([*chain.from_iterable(rows)], dtype=torch.int64, device="cpu"), lengths

    def decode_ragged(self, codes: Tensor, offsets: Tensor, /) -> list[str]:
        """The strings of ids without padding. String ``i`` has ``codes[offsets[i] : offsets[i + 1]]``."""
        ids: list[int] = codes.tolist()
        rows = [ids[start:end] for start, end in pairwise(offsets.tolist())]
        return self.tokenizer.batch_decode(rows, skip_special_tokens=True)

    def to_json(self) -> dict[str, Any]:
        """The state, as JSON values: ``call`` and the files of the tokenizer. Binary files are encoded in base64.

        Raises ``TypeError`` if the tokenizer has no ``save_pretrained``.
        """
        if not hasattr(self.tokenizer, "save_pretrained"):
            raise TypeError(f"{type(self.tokenizer).__name__} has no save_pretrained, so it has no JSON form")
        with tempfile.TemporaryDirectory() as folder:
            self.tokenizer.save_pretrained(folder)
            paths = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
            files = {path.relative_to(folder).as_posix(): _read(path) for path in paths}
        return {"files": files, "call": dict(self.call)}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Tokenizer:
        """The encoder from a `to_json` state. Runs code of ``transformers`` only.

        Raises ``ImportError`` if ``transformers`` is not installed, and ``ValueError`` for a file outside the folder.
        """
        transformers = optional_module("transformers", "this data holds a Tokenizer; pip install transformers")
        with tempfile.TemporaryDirectory() as folder:
            for name, content in state["files"].items():
                path = PurePosixPath(name)
                if path.is_absolute() or not path.parts or ".." in path.parts or "\\" in name:
                    raise ValueError(f"the path of a tokenizer's file must be inside its folder, got {name!r}")
                text = content["text"].encode() if "text" in content else base64.b64decode(content["base64"])
                (Path(folder) / path).parent.mkdir(parents=True, exist_ok=True)
                (Path(folder) / path).write_bytes(text)
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        return cls(tokenizer, **state["call"])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tokenizer):
            return NotImplemented
        if self.call != other.call or type(self.tokenizer) is not type(other.tokenizer):
            return False
        if self.tokenizer is other.tokenizer:
            return True
        if hasattr(self.tokenizer, "save_pretrained"):
            return self.to_json() == other.to_json()
        return bool(self.tokenizer == other.tokenizer)

    def __hash__(self) -> int:
        return hash((type(self), tuple(sorted(self.call))))

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_tokenizer, (self.tokenizer, dict(self.call))

    def __repr__(self) -> str:
        return f"Tokenizer({type(self.tokenizer).__name__})"


def rebuild_tokenizer(tokenizer: Any, call: dict[str, Any]) -> Tokenizer:
    """Rebuild the encoder from a pickle."""
    return Tokenizer(tokenizer, **call)


def _read(path: Path) -> dict[str, str]:
    content = path.read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode("ascii")}
    passing = _PASSING.get(path.name)
    if passing:
        kept = {key: value for key, value in json.loads(text).items() if key not in passing}
        text = json.dumps(kept, ensure_ascii=False)
    return {"text": text}
