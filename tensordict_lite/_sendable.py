"""Whether a batch can leave the worker that made it."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

from ._encoders import Hashing, Utf8, Vocabulary
from ._errors import Path, dotted
from ._strings import EncodeOnly, StringEncoder
from ._tree import TreeDict

_PLAIN = (Utf8, Vocabulary, Hashing)
"""The encoders that are made of plain data, so that each can be pickled."""
_sendable: list[object] = []
"""The last that were found to be so in this process, as pickling a large one takes longer than its batch does."""
_KEPT = 32


def refuse_unsendable(batch: TreeDict[Any], at: Path) -> None:
    """Raise for an encoder that cannot be pickled: the batch would be lost on its way, and the loader wait for ever."""
    policy = batch._policy
    if policy is not batch._class_policy:  # which goes with its class, by name
        for key, encoder in policy.encoders.items():
            _refuse(encoder, f"{dotted((*at, key))}: the")
        _refuse(policy.default_encoder, "the default")
    for key, value in batch.items():
        if isinstance(value, TreeDict):
            refuse_unsendable(cast("TreeDict[Any]", value), (*at, key))


def _refuse(encoder: StringEncoder, which: str) -> None:
    if type(encoder) in _PLAIN:
        return
    what = encoder.function if isinstance(encoder, EncodeOnly) else encoder  # the wrapper is another one in each batch
    if any(what is other for other in _sendable):
        return
    try:
        ForkingPickler.dumps(what)
    except Exception as error:
        raise TypeError(
            f"{which} encoder {encoder!r} cannot be pickled, so the batch cannot leave its worker; use a function of a "
            f"module, or collate in the main process: {error}"
        ) from error
    _sendable[:] = [*_sendable[1 - _KEPT :], what]
