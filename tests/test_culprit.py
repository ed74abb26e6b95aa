"""Which sample was it? An error of a loop over `prefetch` says the epoch, the batch and the row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Annotated, Any

import pytest
import simulated
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tensordict_lite import BatchOrder, TypedDeviceDict, collate, prefetch
from tensordict_lite._errors import add_note

BAD = 17


class Batch(TypedDeviceDict):
    x: Annotated[Tensor, "batch 2"]


class Samples(Dataset[Any]):
    """Row 17 is ``bad``. An exception is raised, anything else is the sample."""

    def __init__(self, bad: Any) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 23

    def __getitem__(self, row: int) -> Any:
        if row == BAD and isinstance(self.bad, Exception):
            raise self.bad
        return self.bad if row == BAD else {"x": torch.zeros(2)}


def orders(**options: Any) -> BatchOrder:
    return BatchOrder(23, 4, shuffle=True, **options)


def message(error: BaseException) -> str:
    """All that a person sees below the traceback."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def caught(batches: Iterable[Any]) -> Exception:
    """The error of a loop, without the frames that keep the workers: the collector would wait 5 s for each of them."""
    try:
        list(batches)
    except Exception as error:
        error.__traceback__ = error.__cause__ = error.__context__ = None
        return error
    raise AssertionError


def error_of(samples: Any, order: BatchOrder, workers: int = 0, where: str = "cpu", **options: Any) -> str:
    """The error of the second epoch."""
    options = {"collate_fn": collate, **options}
    batches = prefetch(DataLoader(samples, batch_sampler=order, num_workers=workers, **options), where)
    order.set_epoch(1)
    return message(caught(batches))


def place(order: BatchOrder) -> tuple[int, int, list[int]]:
    """The batch of the second epoch that has the bad row, the row's place in the batch, and the batch."""
    order.set_epoch(1)
    for number, rows in enumerate(order):
        if BAD in rows:
            return number, rows.index(BAD), rows
    raise AssertionError


def test_the_place_is_within_an_epoch() -> None:
    assert place(orders())[0] > 0 < place(orders())[1]


WHERE = pytest.mark.parametrize("where", ["cpu", "sim:0"])


@WHERE
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("bad", "options"),
    [
        ({"x": torch.zeros(3)}, {}),
        ({"x": torch.zeros(2), "y": 1}, {}),
        ({}, {}),
        ({"x": None}, {}),
        ({"x": ["text", 1]}, {}),
        (3, {}),
        ({"x": torch.zeros(2, 2)}, {"pad": {"x": 0}}),
        ({"x": torch.zeros(2, dtype=torch.int64)}, {"ragged": ["x"]}),
        ({"x": torch.zeros(3)}, {"cls": Batch}),
        ({"z": torch.zeros(2)}, {"cls": Batch}),
    ],
    ids=["shape", "more keys", "no keys", "None", "a list", "no mapping", "pad", "ragged", "typed", "typed, missing"],
)
def test_collate_names_the_row(bad: Any, options: Any, workers: int, where: str, streams: Any) -> None:
    number, sample, _ = place(orders())
    text = error_of(Samples(bad), orders(), workers, where, collate_fn=partial(collate, **options))
    expected = f"batch {number} of epoch 1, sample {sample}: row {BAD}; loader.dataset[{BAD}] is this sample"
    assert text.splitlines()[-1] == expected, text


@WHERE
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("error", [ValueError("sample 3 is broken"), KeyError("image"), OSError(2, "no such file")])
def test_an_error_of_the_dataset_names_the_rows(error: Exception, workers: int, where: str, streams: Any) -> None:
    """What it says about samples is not about those of the batch."""
    number, _, rows = place(orders())
    text = error_of(Samples(error), orders(), workers, where)
    shown = ", ".join(map(str, rows))
    assert text.replace("\\n", "\n").strip("'").splitlines()[-1] == (  # before Python 3.11, in the repr of a KeyError
        f"batch {number} of epoch 1: rows {shown}; loader.dataset[row] is a sample, order.batch({number}) the rows"
    )


def only_good(samples: list[Any]) -> Any:
    return collate([sample for sample in samples[1:] if sample])


def test_a_function_around_collate_may_leave_samples_out() -> None:
    number, _, rows = place(orders())
    text = error_of(Samples({"x": torch.zeros(3)}), orders(), collate_fn=only_good)
    assert text.splitlines()[-1].startswith(f"batch {number} of epoch 1: rows {rows[0]}, ")


def test_large_batches_are_cut_short() -> None:
    text = error_of(Samples(ValueError("bad")), BatchOrder(23, 23))
    first = ", ".join(map(str, range(16)))
    assert (
        "batch 0 of epoch 1: rows " + first + ", ...; loader.dataset[row] is a sample, order.batch(0) the rows" in text
    )


def test_it_can_be_had_again() -> None:
    """As the note says."""
    order = orders()
    batches = prefetch(DataLoader(Samples({"x": torch.zeros(3)}), batch_sampler=order, collate_fn=collate), "cpu")
    order.set_epoch(1)
    note = message(caught(batches)).splitlines()[-1]
    number, sample = int(note.split()[1]), int(note.split()[6].rstrip(":"))
    assert order.batch(number)[sample] == BAD and batches.dataset[BAD]["x"].shape == (3,)


def test_a_resumed_run_counts_from_where_it_began() -> None:
    number, sample, _ = place(orders())
    before = orders()
    before.set_epoch(1)
    order = orders()
    order.load_state_dict(before.state_dict(1))
    loader: Any = DataLoader(Samples({"x": torch.zeros(3)}), batch_sampler=order, collate_fn=collate)
    error = caught(prefetch(loader, "cpu"))
    where = f"batch {number - 1} of epoch 1 since it was resumed, sample {sample}: row {BAD}"
    assert message(error).splitlines()[-1].startswith(where) and order.batch(number - 1)[sample] == BAD


def test_a_process_names_the_batch_of_its_own() -> None:
    order = BatchOrder(23, 3)
    shard: Any = type("Shard", (list,), {"batch_sampler": order, "num_processes": 2, "process_index": 1})  # accelerate
    sampler = shard([*order][1::2])
    order.set_epoch(0)
    loader: Any = DataLoader(Samples({"x": torch.zeros(3)}), batch_sampler=sampler, collate_fn=collate)
    assert "\nbatch 5 of epoch 0, sample 2: row 17; " in message(caught(prefetch(loader, "cpu")))


def refuse(samples: list[Any]) -> Any:
    bad = any(sample["x"].shape != (2,) for sample in samples)
    return {"x": torch.zeros(2_000 if bad else 2)}


@pytest.mark.parametrize("ordered", [True, False])
def test_a_move_names_the_batch(ordered: bool, streams: Any) -> None:
    number, _, rows = place(orders())
    loader: Any = DataLoader(Samples({"x": torch.zeros(3)}), batch_sampler=orders(), collate_fn=refuse)
    order = loader.batch_sampler
    order.set_epoch(1)
    batches = prefetch(loader if ordered else (batch for batch in loader), "sim:0")
    expected = (
        f"batch {number} of epoch 1: rows {rows[0]}, " if ordered else f"batch {number} of this pass over prefetch"
    )
    with simulated.memory_left(4000):
        error = caught(batches)
    assert isinstance(error, torch.OutOfMemoryError) and message(error).splitlines()[-1].startswith(expected)


@pytest.mark.without_streams
def test_a_move_to_a_device_without_streams_names_the_batch() -> None:
    test_a_move_names_the_batch(True, None)


def test_an_iterable_counts_its_batches() -> None:
    def source() -> Iterator[Any]:
        yield {"x": 1}
        raise KeyError("broken")

    assert "batch 1 of this pass over prefetch" in message(caught(prefetch(source(), "cpu")))


def test_the_rows_are_not_guessed() -> None:
    """If a state is loaded meanwhile, or batches come in any order."""
    order = orders()
    batches = prefetch(DataLoader(Samples({"x": torch.zeros(2)}), batch_sampler=order, collate_fn=collate), "cpu")
    error = caught(order.set_epoch(number) for number, _ in enumerate(batches, 5))
    assert "while an iteration" in str(error) and not getattr(error, "__notes__", None)
    text = error_of(Samples(ValueError("bad")), orders(), workers=2, in_order=False)
    assert "of epoch" not in text


@pytest.mark.parametrize(("kind", "args", "expected"), [
    (ValueError, ("x: bad", 3), "('x: bad\\nbatch 3', 3)"),
    (OSError, (2, "no file"), "[Errno 2] no file\nbatch 3"),
    (ValueError, (), ""),
    (ValueError, (3,), "3"),
])  # fmt: skip
def test_python_without_notes(kind: Any, args: Any, expected: str) -> None:
    """Before 3.11, the message has it."""

    def absent(_: Any) -> None:
        raise AttributeError

    error = type("Old", (kind,), {"add_note": property(absent)})(*args)
    add_note(error, "batch 3")
    assert str(error) == expected
