"""The arithmetic of a block: nothing overlaps, everything is aligned, and a layout follows from the specs alone."""

from __future__ import annotations

import math
from itertools import pairwise, product

import pytest
import torch
from files import DTYPES, OPAQUE
from hypothesis import given
from hypothesis import strategies as st

from tensordict_lite._memory.dtypes import PACKABLE
from tensordict_lite._memory.layout import (
    ALIGNMENT,
    Group,
    aligned,
    cast_groups,
    dense_stride,
    distribute,
    lay_out,
    row_major,
    with_spare,
)
from tensordict_lite._memory.packed import packable

F, D, L, B = torch.float32, torch.float64, torch.int64, torch.bool


shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def group_lists(draw: st.DrawFn) -> list[Group]:
    specs = draw(st.lists(st.tuples(st.sampled_from([F, D, L, B]), shapes), max_size=6, unique=True))
    groups: list[Group] = [((dtype, shape, row_major(shape)), []) for dtype, shape in specs]
    if groups:
        for i, which in enumerate(draw(st.lists(st.integers(0, len(groups) - 1), min_size=len(groups), max_size=20))):
            groups[which][1].append(i)
    return [group for group in groups if group[1]]


def spans(groups: list[Group]) -> dict[int, tuple[int, int]]:
    """Start and end of each field, by its number."""
    found = {}
    for run in lay_out(groups).runs:
        nbytes = math.prod(run.shape) * run.dtype.itemsize
        for j, i in enumerate(run.members):
            found[i] = (run.offset + j * run.step, run.offset + j * run.step + nbytes)
    return found


@given(group_lists())
def test_fields_are_aligned_apart_and_within(groups: list[Group]) -> None:
    layout, where = lay_out(groups), spans(groups)
    assert sorted(where) == sorted(layout.members) == sorted(i for _, members in groups for i in members)
    assert all(start % ALIGNMENT == 0 for start, _ in where.values())
    ordered = sorted(span for span in where.values() if span[0] < span[1])
    assert all(end <= start for (_, end), (start, _) in pairwise(ordered))
    assert layout.nbytes == max((end for _, end in ordered), default=0), "nothing after the last field"


@given(group_lists())
def test_a_layout_lays_out_to_itself(groups: list[Group]) -> None:
    """What was packed by it is found packed by it."""
    layout = lay_out(groups)
    assert lay_out(layout.groups) == layout


def test_specs_that_become_equal_are_one_run() -> None:
    """A field with gaps and one without, and fields that are cast to one dtype, lie side by side in the end."""
    gaps = [((F, (2, 3), (3, 1)), [0, 3]), ((L, (2,), (1,)), [1]), ((F, (2, 3), (8, 1)), [2])]
    assert [(run.dtype, run.members) for run in lay_out(gaps).runs] == [(F, [0, 2, 3]), (L, [1])]
    assert lay_out(gaps).runs[0].stride == (3, 1)
    mixed = [((F, (2,), (1,)), [0]), ((L, (2,), (1,)), [1]), ((D, (2,), (1,)), [2])]
    cast = lay_out(cast_groups(mixed, {D: F}))
    assert [(run.dtype, run.members) for run in cast.runs] == [(F, [0, 2]), (L, [1])]
    assert mixed[0][1] == [0], "the groups are not changed"


@given(group_lists(), st.integers(1, 300), st.integers(400, 700))
def test_buffers_keep_to_the_limits(groups: list[Group], largest: int, limit: int) -> None:
    parts = distribute(groups, largest, limit)
    sizes = {i: math.prod(shape) * dtype.itemsize for (dtype, shape, _), members in groups for i in members}
    taken = [i for part in parts for i in part.members]
    fit = {i for i, size in sizes.items() if 0 < size <= largest}
    assert len(set(taken)) == len(taken) and fit.issuperset(taken), "each once, none that is large"
    if 2 * aligned(largest) <= limit - ALIGNMENT:
        assert len(fit.difference(taken)) <= 1, "only the last may have a buffer of its own"
    for part in parts:
        assert with_spare(part.nbytes) <= aligned(limit) and len(part.members) > 1


def test_a_buffer_is_filled_before_the_next() -> None:
    group: Group = ((torch.uint8, (64,), (1,)), list(range(9)))
    assert [part.members for part in distribute([group], 64, 320)] == [[0, 1, 2, 3], [4, 5, 6, 7]], "8 is left alone"
    assert distribute([], 64, 320) == distribute([group], 63, 320) == []


@given(st.data())
def test_dense_strides_are_those_of_empty_like(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    gaps = data.draw(st.lists(st.integers(0, 2), min_size=len(shape), max_size=len(shape)))
    base = torch.empty([n + gap for n, gap in zip(shape, gaps, strict=True)])
    t = base[tuple(slice(0, n) for n in shape)].permute(*order) if shape else base
    strides = zip(t.shape, torch.empty_like(t).stride(), dense_stride(t.shape, t.stride()), strict=True)
    assert all(torchs == ours for size, torchs, ours in strides if size != 1), "that of a dimension of 1 is never used"


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_dense_strides_of_overlapping_tensors_are_those_of_empty_like(ndim: int) -> None:
    memory = torch.empty(100)
    for shape in product((1, 2, 3), repeat=ndim):
        for stride in product((1, 2, 3, 6), repeat=ndim):
            expected = torch.empty_like(memory.as_strided(shape, stride)).stride()
            strides = zip(shape, expected, dense_stride(shape, stride), strict=True)
            assert all(torchs == ours for size, torchs, ours in strides if size != 1), (shape, stride)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (4, 1, 3), (2, 3, 4, 5)])
def test_row_major_strides_are_those_of_a_contiguous_tensor(shape: tuple[int, ...]) -> None:
    assert row_major(shape) == torch.empty(shape).stride()


@pytest.mark.parametrize(
    ("shape", "stride", "dense"),
    [
        ((2, 3), (1, 2), (1, 2)),  # transposed
        ((2, 3, 4, 4), (48, 1, 12, 3), (48, 1, 12, 3)),  # channels_last
        ((2, 3), (6, 2), (3, 1)),  # every other column
        ((3, 4), (0, 1), (4, 1)),  # expanded
        ((3, 4), (0, 0), (4, 1)),
        ((1, 3), (100, 1), (100, 1)),  # the stride of a dimension of one is never used
        ((0, 3), (7, 9), (7, 9)),
        ((), (), ()),
    ],
)
def test_dense_stride(shape: tuple[int, ...], stride: tuple[int, ...], dense: tuple[int, ...]) -> None:
    assert dense_stride(shape, stride) == dense


def test_the_tests_cover_every_dtype() -> None:
    assert {*DTYPES.values(), *OPAQUE.values()} == PACKABLE


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
def test_what_is_packable() -> None:
    complex_ = torch.ones(2, dtype=torch.complex64)
    tensors = [
        torch.ones(2),
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
        torch.eye(2).to_sparse(),
        torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        complex_,
        complex_.conj(),
        complex_.conj().imag,
        torch.ones(2, dtype=torch.bfloat16),
    ]
    assert [i for i, t in enumerate(tensors) if not packable(t)] == [1, 2, 3, 4, 5, 7, 8]
