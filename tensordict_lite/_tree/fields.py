"""`fields`: every field of a dict, with what an operation on it has to know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from torch import Tensor

from .._encoders.protocol import StringEncoder
from .._errors import Path, described, dotted, with_path
from .kinds import CODES, CODES_PART, DENSE, RAGGED, Field, kind_of
from .missing import refuse_other_keys
from .ragged import Ragged
from .tree import TreeDict, builtin_dict, data_in, field_encoder


def fields(d: TreeDict[Any], at: Path = ()) -> list[Field]:
    """Every field of the tree, depth first: of a nested dict, the fields in it."""
    found: list[Field] = []
    _list_fields(d, at, None, found)
    return found


def _list_fields(d: TreeDict[Any], at: Path, outer: StringEncoder | None, found: list[Field]) -> None:
    """``outer``: the encoder of ``d``, if it is a nested dict of codes."""
    for key, value in d.items():  # no generator: torch.compile traces this loop
        if isinstance(value, Tensor):
            encoder = outer or field_encoder(d, key)
            kind = DENSE if encoder is None else CODES_PART if outer else CODES
            found.append(Field((*at, key), d, value, encoder, kind))
        elif isinstance(value, TreeDict):
            _list_fields(value, (*at, key), field_encoder(d, key), found)
        else:
            found.append(field_of(d, key, at))


def field_of(d: TreeDict[Any], key: str, at: Path = ()) -> Field:
    """One field. ``at``: the path of ``d``. A nested dict of codes is a field of strings."""
    value, encoder = builtin_dict.__getitem__(d, key), field_encoder(d, key)
    return Field((*at, key), d, value, encoder, kind_of(value, encoder))


def tolist(d: TreeDict[Any], count: int | None = None, at: Path = ()) -> dict[str, Any]:
    """The fields of a dict on the CPU as Python numbers, lists and strings: see `DeviceDict.tolist`.

    ``count``: the number of rows, to list an item of a kept object for each.
    """
    out: dict[str, Any] = {}
    for key, value in d.items():
        field = field_of(d, key, at)
        if isinstance(value, TreeDict) and field.encoder is None:
            out[key] = tolist(value, count, field.path)
            continue
        try:
            out[key] = field.kind.tolist(field, count)
        except (TypeError, ValueError) as error:
            raise with_path(error, field.path) from error
    return out


def data_paths(d: TreeDict[Any]) -> Iterator[tuple[Path, Tensor]]:
    """The tensors of `data_of`, each with the path of its field."""
    return ((field.path, data) for field in fields(d) if (data := data_in(field.value)) is not None)


def ragged_paths(d: TreeDict[Any]) -> list[Path]:
    """The path of every ragged field, depth first."""
    return [field.path for field in fields(d) if field.kind is RAGGED]


def refuse_ragged(d: TreeDict[Any], expected: str, way_out: str) -> None:
    """Raise ``TypeError`` for the first ragged field."""
    for path in ragged_paths(d):
        raise TypeError(f"{dotted(path)}: {expected}, got a ragged field; {way_out}")


def refuse_other_trees(d: TreeDict[Any], other: Mapping[str, Any], name: str, owner: str, at: Path = ()) -> None:
    """Raise ``ValueError`` unless another tree has the keys of ``d``, and ``TypeError`` for a value of another kind.

    ``name``, ``owner``: the names of ``other`` and ``d`` in messages.
    """
    if list(d) != list(other):
        refuse_other_keys(d, other, at, name, owner)
    for key, value in d.items():
        given = other[key]
        if type(value) is Tensor and type(given) is Tensor:
            continue
        wanted = next((kind for kind in _NAMES if isinstance(value, kind)), None)
        if isinstance(given, tuple(_NAMES)) if wanted is None else not isinstance(given, wanted):
            expected = "an object" if wanted is None else _NAMES[wanted]
            is_host = wanted is Tensor and not isinstance(given, (Ragged, Mapping))
            way_out = "; DeviceDict(...) makes tensors of numbers" if is_host else ""
            where = dotted((*at, key))
            raise TypeError(f"{where}: expected {expected}, got {described(given)} in {name}{way_out}")
        if isinstance(value, TreeDict):
            refuse_other_trees(value, cast(Any, given), name, owner, (*at, key))


_NAMES = {Tensor: "a tensor", Ragged: "a Ragged", Mapping: "a mapping"}
