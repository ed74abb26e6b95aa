"""The arithmetic of a block: nothing overlaps, everything is aligned, and a layout follows from the specs alone."""

from __future__ import annotations

import math
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from files import DTYPES, OPAQUE
from hypothesis import given
from hypothesis import strategies as st

from tensordict_lite._memory.dtypes import PACKABLE
from tensordict_lite._memory.layout import (
    ALIGNMENT,
    SHARE,
    SMALL,
    Group,
    aligned,
    cast_groups,
    dense_stride,
    lay_out,
    lay_out_apart,
    read_layout,
    row_major,
)
from tensordict_lite._memory.packed import packable

F, D, L, B = torch.float32, torch.float64, torch.int64, torch.bool


shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def group_lists(draw: st.DrawFn) -> list[Group]:
    specs = draw(st.lists(st.tuples(st.sampled_from([F, D, L, B]), shapes), max_size=6, unique=True))
    groups: list[Group] = [((dtype, shape, row_major(shape)), ()) for dtype, shape in specs]
    if groups:
        for i, which in enumerate(draw(st.lists(st.integers(0, len(groups) - 1), min_size=len(groups), max_size=20))):
            groups[which] = (groups[which][0], (*groups[which][1], i))
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
    end = max((end for _, end in ordered), default=0)
    assert layout.end == end and layout.nbytes == (aligned(end) if len(ordered) > 1 else end), "nothing after the last"


@given(group_lists())
def test_a_layout_lays_out_to_itself(groups: list[Group]) -> None:
    """What was packed by it is found packed by it."""
    layout = lay_out(groups)
    assert lay_out(layout.groups) == layout


def test_specs_that_become_equal_are_one_run() -> None:
    """A field with gaps and one without, and fields that are cast to one dtype, lie side by side in the end."""
    gaps = [((F, (2, 3), (3, 1)), [0, 3]), ((L, (2,), (1,)), [1]), ((F, (2, 3), (8, 1)), [2])]
    assert [(run.dtype, run.members) for run in lay_out(gaps).runs] == [(F, (0, 2, 3)), (L, (1,))]
    assert lay_out(gaps).runs[0].stride == (3, 1)
    mixed = [((F, (2,), (1,)), (0,)), ((L, (2,), (1,)), (1,)), ((D, (2,), (1,)), (2,))]
    cast = lay_out(cast_groups(mixed, {D: F}))
    assert [(run.dtype, run.members) for run in cast.runs] == [(F, (0, 2)), (L, (1,))]


large_shapes = st.lists(st.sampled_from([1, 2, 3, 64, 1000, 5000]), max_size=2).map(tuple)


@given(st.lists(st.tuples(st.sampled_from([F, D, L, B]), shapes | large_shapes), max_size=30))
def test_fields_share_a_buffer_that_is_small_or_at_most_four_times_each(specs: list[tuple[torch.dtype, Any]]) -> None:
    groups: list[Group] = [((dtype, shape, row_major(shape)), (i,)) for i, (dtype, shape) in enumerate(specs)]
    layouts = lay_out_apart(tuple(groups))
    assert sorted(i for layout in layouts for i in layout.members) == list(range(len(specs)))
    sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in specs]
    for layout in layouts:
        assert layout == lay_out(layout.groups), "a receiver computes it"
        assert all(layout.nbytes <= max(SMALL, SHARE * sizes[i]) for i in layout.members)
    small = [layout for layout in layouts if layout.nbytes and all(sizes[i] <= SMALL // 2 for i in layout.members)]
    assert len(small) <= 2 * sum(aligned(n) for n in sizes if n <= SMALL // 2) // SMALL + 1, "at least half full"


@pytest.mark.parametrize(("sizes", "parts"), [
    ([64] * 1000, [1000]),
    ([2048] * 40, [32, 8]),
    ([16 << 10] * 6, [4, 2]),
    ([1 << 20] * 9, [4, 4, 1]),
    ([1 << 20] * 4, [4]),
    ([(1 << 20) + 1] * 4, [3, 1]),
    ([150_528 * 32, 256, 1024, 8], [1, 3]),
    ([1 << 20, 1 << 18, 1 << 18, 100], [1, 2, 1]),
    ([3 << 20, 1 << 20], [2]),
    ([(3 << 20) + 1, 1 << 20], [1, 1]),
    ([0, 8, 0], [3]),
    ([0, 1 << 20, 0], [1, 2]),
    ([0, 0], [2]),
    ([], []),
])  # fmt: skip
def test_how_many_fields_share_a_buffer(sizes: list[int], parts: list[int]) -> None:
    groups: list[Group] = [((torch.uint8, (size,), (1,)), (i,)) for i, size in enumerate(sizes)]
    assert [len(layout.members) for layout in lay_out_apart(tuple(groups))] == parts


@given(group_lists())
def test_a_layout_is_read_from_the_memory_that_it_describes(groups: list[Group]) -> None:
    layout = lay_out(groups)
    fields = [
        (run.offset + n * run.step, i, run.dtype, run.shape, run.stride)
        for run in layout.runs
        if run.nbytes
        for n, i in enumerate(run.members)
    ]
    filled = lay_out([group for group in groups if 0 not in group[0][1]])
    if fields:
        assert read_layout(tuple(fields), layout.nbytes) == read_layout(tuple(fields), layout.nbytes, True) == filled
        assert read_layout(tuple(fields), layout.nbytes + ALIGNMENT) is None, "more is there"
    if len(fields) > 2:
        assert read_layout(tuple(fields[1:]), layout.nbytes) is None, "the first is missing"
        assert read_layout((*fields[:1], *fields[2:]), layout.nbytes) is None, "the second is missing"
        assert read_layout(tuple(fields[:-1]), layout.nbytes) is None, "the last is missing"


def test_other_layouts_are_read_too_but_a_receiver_cannot_compute_them() -> None:
    fields = tuple((12 * i, 3 - i, F, (3,), (1,)) for i in range(4))
    found = read_layout(fields, 48)
    assert found is not None and [(run.members, run.step) for run in found.runs] == [((3, 2, 1, 0), 12)]
    assert read_layout(fields, 48, True) is None
    assert read_layout(fields, 47) is None and read_layout((*fields, (47, 4, B, (1,), (1,))), 48) is None, "overlap"
    assert read_layout(((0, 0, F, (2, 2), (1, 3)),), 28) is None, "gaps"


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
