"""`Pad`: how to pad fields whose samples differ in length. `collate` and `cat` take it as ``pad=``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import inf
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from .._encoders.protocol import padding
from .._errors import Path, described, dotted
from .._memory.dtypes import NUMPY_DTYPES, as_bits
from .._memory.layout import Sizes
from .._memory.packed import packable
from .._tree.fields import ragged_paths
from .._tree.missing import closest
from .._tree.ragged import Ragged, Side
from .._tree.tree import TreeDict


@dataclass(frozen=True, slots=True, repr=False)
class Pad:
    """How to pad samples that differ in size: an immutable value for ``pad=`` of `collate` and `cat`.

    Args:
        value: the number to pad with.
        side: ``"right"`` pads after the sample, ``"left"`` before it.
        multiple_of: round the length of the batch up to a multiple of this number.
        lengths: the key of a new field for the lengths of the samples: int64 ``[n]``, or ``[n, dims]`` for several.
        mask: the key of a new bool field ``[n, length]``: True for the elements of a sample, False for the padding.
            For several dimensions, ``[n, height, width]`` and so on.
        dims: the dimensions of a sample to pad, for `collate`. A number: the first dimensions. A tuple: these
            dimensions, as ``(1, 2)`` for images ``[channels, height, width]``.
        optional: no sample need have the key, as labels that are missing at prediction. Otherwise a key in ``pad=``
            that no sample has is an error.

    The new fields are in the same dict as the padded field. A plain number in ``pad=`` is short for ``Pad(number)``.

    Raises: ``TypeError`` or ``ValueError`` for an invalid argument.
    Cost: on an accelerator, `collate` and `cat` copy the lengths from the host for each of ``lengths`` and ``mask``.

    >>> from tensordict_lite import Pad, collate
    >>> samples = [{"ids": [1, 2, 3]}, {"ids": [4]}]
    >>> batch = collate(samples, pad={"ids": Pad(0, side="left", multiple_of=2, lengths="n", mask="real")})
    >>> batch["ids"].tolist(), batch["n"].tolist()
    ([[0, 1, 2, 3], [0, 0, 0, 4]], [3, 1])
    >>> batch["real"].tolist()
    [[False, True, True, True], [False, False, False, True]]
    >>> images = [{"image": torch.ones(3, 4, 8)}, {"image": torch.ones(3, 6, 5)}]
    >>> collate(images, pad={"image": Pad(0, dims=(1, 2))})["image"].shape
    torch.Size([2, 3, 6, 8])
    """

    value: float = 0
    side: Side = "right"
    multiple_of: int = 1
    lengths: str | None = None
    mask: str | None = None
    optional: bool = False
    dims: int | tuple[int, ...] = 1

    def __post_init__(self) -> None:
        given: Any = self.dims
        if isinstance(given, int) and given < 1:
            raise ValueError(f"dims is 1 or more dimensions, or a tuple of dimensions, got {given!r}")
        each = tuple(given) if isinstance(given, (tuple, list)) else (given,)
        if not each or not all(type(dim) is int for dim in each):
            raise TypeError(f"dims is a number of dimensions, or a tuple of dimensions, got {given!r:.60}")
        if isinstance(given, list):  # from JSON
            object.__setattr__(self, "dims", each)
        if not isinstance(self.value, (bool, int, float)):
            raise TypeError(f"Pad takes a real number as value, got {self.value!r:.60}")
        if self.side not in ("left", "right"):
            raise ValueError(f"side is 'left' or 'right', got {self.side!r}")
        many = self.multiple_of
        if not isinstance(many, int) or isinstance(many, bool) or many < 1:
            raise ValueError(f"multiple_of is a whole number of 1 or more, got {many!r}")
        for name in ("lengths", "mask"):
            key = getattr(self, name)
            if key is not None and not isinstance(key, str):
                raise TypeError(f"{name} is the key of a new field, got {key!r:.60}")
        if not isinstance(self.optional, bool):
            raise TypeError(f"optional is True or False, got {self.optional!r:.60}")
        if self.lengths is not None and self.lengths == self.mask:
            raise ValueError(f"lengths and mask need different keys, got {self.mask!r} for both")

    def __repr__(self) -> str:
        given = [(option, getattr(self, option.name)) for option in fields(self)]
        options = [f"{option.name}={value!r}" for option, value in given[1:] if value != option.default]
        return f"Pad({', '.join([repr(self.value), *options])})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(self.to_json().values())

    def to_json(self) -> dict[str, Any]:
        """The state, as JSON values."""
        return {option.name: getattr(self, option.name) for option in fields(self)}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Pad:
        """Build the object from a `to_json` state."""
        return cls(**state)

    @property
    def _extras(self) -> dict[str, str]:
        """The new fields: the name of the option by key."""
        return {key: name for name in ("lengths", "mask") if (key := getattr(self, name)) is not None}

    @property
    def _always(self) -> bool:
        """Whether to pad samples of one length too."""
        return self.multiple_of > 1 or bool(self._extras)

    def _axes(self, dims: int) -> tuple[int, ...]:
        """The dimensions to pad of samples with ``dims`` dimensions, ascending. Raises ``ValueError``."""
        given = tuple(range(self.dims)) if isinstance(self.dims, int) else self.dims
        if not all(-dims <= dim < dims for dim in given):
            raise ValueError(f"{self!r} pads dimensions that samples of {dims} dimensions lack")
        return tuple(sorted({dim % dims for dim in given}))

    def _length(self, longest: int) -> int:
        """The length of the batch."""
        return -(-longest // self.multiple_of) * self.multiple_of


class Pads(dict[Any, Pad]):
    """The validated ``pad=`` of a call. A key applies at any depth, a path to one field."""

    def __init__(self, given: Any, function: str) -> None:
        if given is not None and not isinstance(given, Mapping):
            raise TypeError(
                f'{function} takes a mapping from keys to fill values as pad=, as {{"ids": 0}}, got {given!r}'
            )
        for key, pad in (given or {}).items():
            if not isinstance(pad, (Pad, bool, int, float)):
                raise TypeError(
                    f"pad= of {function} maps keys to real numbers or Pad objects; got {pad!r:.60} for {key!r}"
                )
            self[key] = pad if isinstance(pad, Pad) else Pad(pad)

    def at(self, path: Path) -> Pad | None:
        """The `Pad` of the field at ``path``, or None."""
        return self.get(path, self.get(path[-1]))

    def require_known(self, batch: TreeDict[Any], noun: str) -> None:
        """Raise ``ValueError`` for a key that no dict of the call has, unless its `Pad` is optional."""
        for key, pad in self.items():
            if not pad.optional:
                require_known("pad=", [key], batch, noun, f" Or allow it with Pad({pad.value!r}, optional=True)")
                refuse_nested("pad=", [key], batch)

    def require_new(self, names: Iterable[str], at: Path, owners: str) -> None:
        """Raise ``ValueError`` if a new field would have the name of another field of a dict with these keys."""
        known = set(names)
        for key in names:
            pad = self.at((*at, key)) if type(key) is str else None
            for extra, option in ({} if pad is None else pad._extras).items():
                if extra in known:
                    raise ValueError(
                        f"{dotted((*at, key))}: pad= puts its {option} at {extra!r}, which {owners} have too; "
                        "choose another key"
                    )
                known.add(extra)


def require_known(option: str, keys: Iterable[Any], batch: TreeDict[Any], noun: str, way_out: str = "") -> None:
    """Raise ``ValueError`` for a key or path of an option that is nowhere in ``batch``. The error names the closest.

    Fields that a class declares need not be there. ``way_out``: what to do for a key that may be absent.
    """
    for key in keys:
        if key in batch:
            continue
        paths = list(_paths_in(batch))
        names = paths if isinstance(key, tuple) else [path[-1:] for path in paths]
        path = key if isinstance(key, tuple) else (key,)
        if path not in names:
            texts = dict.fromkeys(map(dotted, names))
            guess = closest(dotted(path), texts)
            hint = f"did you mean {guess}?" if guess else f"its keys are {', '.join(texts) or 'none'}."
            raise ValueError(f"{option} names {key!r:.60}, which no {noun} has; {hint}{way_out}")


def refuse_nested(option: str, keys: Iterable[Any], batch: TreeDict[Any]) -> None:
    """Raise ``ValueError`` for a key of fields that names a dict of fields. Fields made of lists of mappings may."""
    for key in keys:
        found = batch.get(key)
        if isinstance(found, TreeDict) and found and not ragged_paths(found):
            raise ValueError(f"{option} names {key!r}, which is a nested dict; name its fields: {', '.join(found)}")


def _paths_in(tree: TreeDict[Any], at: Path = ()) -> Iterator[Path]:
    """Every path in a tree, with the fields that its classes declare."""
    for key in dict.fromkeys([*tree, *getattr(tree, "_declared", ())]):
        yield (*at, key)
        value = tree.get(key)
        if isinstance(value, TreeDict):
            yield from _paths_in(cast("TreeDict[Any]", value), (*at, key))


def require_fit(pad: Pad, dtype: torch.dtype, path: Path) -> None:
    """Raise ``ValueError`` unless the dtype can hold the fill value."""
    if not _fits(pad.value, dtype):
        shown = pad.value if pad == Pad(pad.value) else pad
        raise ValueError(f"{dotted(path)}: pad={{{path[-1]!r}: {shown!r}}} does not fit {dtype}")


def _fits(fill: float, dtype: torch.dtype) -> bool:
    if dtype.is_floating_point or dtype.is_complex:
        return abs(fill) == inf or not abs(fill) > torch.finfo(dtype.to_real()).max
    least, most = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return least <= fill <= most and fill == int(fill)


def _fill_value(like: Tensor, pad: Pad) -> float:
    """The fill value for the dtype of ``like``. Integers do not go through a double."""
    return float(pad.value) if like.is_floating_point() or like.is_complex() else pad.value


class Padded(NamedTuple):
    """A field to pad."""

    samples: Sequence[Tensor]
    """The samples; or one tensor for all, with the rows of one sample after the other."""
    sizes: Sequence[Sequence[int]]
    """For each of the ``axes``: the size of every sample."""
    axes: tuple[int, ...]
    pad: Pad

    @property
    def shape(self) -> Sizes:
        """The shape of the field."""
        shape = [len(self.sizes[0]), *self.samples[0].shape]
        for axis, sizes in zip(self.axes, self.sizes, strict=True):
            shape[axis + 1] = self.pad._length(max(sizes))
        return tuple(shape)

    def fill(self, field: Tensor) -> Tensor:
        """Write the field into a tensor of its dtype and shape. Autograd records the copies. Returns the tensor."""
        field.fill_(_fill_value(field, self.pad))
        rows = self.samples[0]
        if len(self.samples) == len(self.sizes[0]):
            for i, (sample, *sizes) in enumerate(zip(self.samples, *self.sizes, strict=True)):
                places = [slice(None)] * sample.dim()
                for axis, size in zip(self.axes, sizes, strict=True):
                    start = 0 if self.pad.side == "right" else field.shape[axis + 1] - size
                    places[axis] = slice(start, start + size)
                field[(i, *places)] = sample
        elif field.is_cpu and field.dtype in NUMPY_DTYPES and packable(rows):
            field.numpy()[self.mask()] = rows.numpy()  # in less than half the time of torch
        else:
            as_bits(field)[torch.from_numpy(self.mask())] = as_bits(rows)
        return field

    def mask(self) -> np.ndarray[Any, Any]:
        """True for elements of the samples, False for padding: bool ``[n, length]``, or with a size for each axis."""
        shape = self.shape
        inside: Any = True
        for i, (axis, sizes) in enumerate(zip(self.axes, self.sizes, strict=True)):
            places, own = np.arange(shape[axis + 1]), np.array(sizes)[:, None]
            along = places < own if self.pad.side == "right" else places >= len(places) - own
            inside = inside & along.reshape(shape[0], *[1] * i, -1, *[1] * (len(self.axes) - i - 1))
        return inside

    def extras(self) -> dict[str, np.ndarray[Any, Any]]:
        """The new fields that the `Pad` names, by key."""
        lengths = np.array(self.sizes, np.int64)
        lengths = lengths[0] if len(self.axes) == 1 else lengths.T.copy()
        return {key: lengths if option == "lengths" else self.mask() for key, option in self.pad._extras.items()}


def _filled_up(tensor: Tensor, length: int, pad: Pad) -> Tensor:
    """``tensor`` with the second dimension padded to ``length``."""
    rows, own, *rest = tensor.shape
    if own == length:
        return tensor
    gap = tensor.new_full((rows, length - own, *rest), _fill_value(tensor, pad))
    return torch.cat([tensor, gap] if pad.side == "right" else [gap, tensor], 1)


def pad_rows(trees: Sequence[TreeDict[Any]], pads: Pads, at: Path) -> Sequence[TreeDict[Any]]:
    """Pad the second dimension of the fields in ``pads`` to one length, before `cat` joins the dicts. One level.

    If a dict has the field for the lengths or the mask already, its values are kept. Otherwise the field is made.
    """
    out = [dict(tree) for tree in trees]
    for key in trees[0]:
        path, values = (*at, key), [items.get(key) for items in out]
        if (pad := pads.at(path)) is None:
            continue
        if any(isinstance(value, Ragged) for value in values):
            raise ValueError(f"{dotted(path)}: pad= takes tensors, got a ragged field; leave it out of pad=")
        if all(isinstance(value, Tensor) for value in values):
            _pad_field(out, key, cast("list[Tensor]", values), pad, path, trees[0]._policy.encoders.get(key))
    return [tree._new(items, tree._device, tree._policy) for tree, items in zip(trees, out, strict=True)]


def _pad_field(
    out: Sequence[dict[str, Any]], key: str, values: Sequence[Tensor], pad: Pad, path: Path, encoder: object
) -> None:
    if padding(encoder, *values) is not None:
        raise_encoded(path, pad)
        return
    for i, value in enumerate(values):
        if value.dim() < 2:
            raise ValueError(
                f"{dotted(path)}: pad= of cat takes two dimensions or more, got {described(value)} in dict {i}"
            )
    for value in values:
        require_fit(pad, value.dtype, path)
    if pad.dims != 1:
        raise ValueError(f"{dotted(path)}: cat takes a Pad for the second dimension only, got {pad!r}")
    length = pad._length(max(value.shape[1] for value in values))
    for i, (items, value) in enumerate(zip(out, values, strict=True)):
        rows, own = value.shape[:2]
        items[key] = _filled_up(value, length, pad)
        for name, option in pad._extras.items():
            dtype, shape, made = (torch.bool, (rows, own), 1) if option == "mask" else (torch.int64, (rows,), own)
            known = items.get(name)
            if known is None:
                known = torch.full(shape, made, dtype=dtype, device=value.device)
            if not isinstance(known, Tensor) or known.dtype is not dtype or known.shape != shape:
                raise ValueError(
                    f"{dotted(path)}: pad= puts its {option} at {name!r}, where dict {i} has {described(known)}; "
                    "choose another key"
                )
            items[name] = _filled_up(known, length, Pad(0, pad.side)) if option == "mask" else known


def raise_encoded(path: Path, pad: Pad) -> None:
    """Raise ``ValueError`` if ``pad``, for a field of strings, asks for more than the padding of the encoder."""
    if pad._always:
        raise ValueError(f"{dotted(path)}: {pad!r} is for numbers; the encoder of these strings pads its codes itself")
