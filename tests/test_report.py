"""`prefetch(...).report()`: where the time of a loop went, and what to do about it. `tests/device` times a device."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tensordict_lite import BatchOrder, DeviceDict, collate, prefetch
from tensordict_lite._batch import report as report_module

BRIEF = 0.002
TEXTS: dict[str, Any] = {"texts": ["a"] * 20_000, "labels": [1] * 20_000}
TEXTS["itself"] = TEXTS


class Samples(Dataset[Any]):
    """``count`` samples, each of which takes so many seconds."""

    def __init__(self, count: int = 24, seconds: float = 0.0, held: Any = None) -> None:
        self.count, self.seconds, self.held = count, seconds, held

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> Any:
        time.sleep(self.seconds)
        return {"x": torch.zeros(3), "row": row}


def loop(samples: Any, workers: int = 0, step: float = 0.0, **options: Any) -> Any:
    """A loop over the samples, and its `prefetch`."""
    batches = prefetch(DataLoader(samples, 2, num_workers=workers, collate_fn=collate, **options), "cpu")
    for _ in batches:
        time.sleep(step)
    return batches


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, "_cores", lambda: 4)


class TestTimes:
    def test_they_are_those_of_the_last_pass(self) -> None:
        batches = loop(Samples(8, seconds=0.05))
        batches.loader.dataset.seconds = 0
        for _ in batches:
            time.sleep(5 * BRIEF)
        report = batches.report()
        assert report.batches == 4 and report.waiting < 8 * 0.05 and report.step >= 20 * BRIEF
        assert report.seconds == report.waiting + report.copying + report.step

    def test_at_any_time(self) -> None:
        batches = prefetch(DataLoader(Samples(8, seconds=BRIEF), 2, collate_fn=collate), "cpu")
        assert batches.report().batches == 0 and batches.report().advice == "no batch has come yet"
        seen: list[Any] = []
        for _ in batches:
            time.sleep(BRIEF)
            seen.append(batches.report())
        assert [report.batches for report in seen] == [1, 2, 3, 4] and seen[0].step == 0
        for number, report in enumerate(seen, 1):
            assert report.waiting >= 2 * BRIEF * number and report.step >= BRIEF * (number - 1)

    def test_of_a_loop_that_ends_early_or_with_an_error(self) -> None:
        def source() -> Iterator[Any]:
            yield {"x": torch.zeros(1)}
            raise KeyError("broken")

        batches = prefetch(source(), "cpu")
        with pytest.raises(KeyError):
            list(batches)
        assert batches.report().batches == 1

    def test_for_logs_and_for_people(self) -> None:
        batches = loop(Samples(8, seconds=BRIEF))
        report = batches.report()
        logged = json.loads(json.dumps(report.tolist()))
        names = ["batches", "waiting", "copying", "step", "seconds", "bytes", "bytes_per_second", "copies", "alone"]
        assert logged == {name: getattr(report, name) for name in [*names, "advice"]}
        first, waiting, copying, step, advice = str(report).splitlines()
        assert first == f"4 batches in {report.seconds:.2f} s" and advice == report.advice
        assert waiting == f"  waiting   {report.waiting / 4 * 1e3:10.2f} ms a step {report._share(report.waiting):>6}"
        assert copying.split()[0] == "copying" and step.split()[0] == "step" and repr(report) == str(report)

    def test_over_an_order(self) -> None:
        table = DeviceDict({"x": torch.zeros(10, 2)})
        batches = prefetch(
            DataLoader(table.rows, batch_sampler=BatchOrder(table.rows, 2), num_workers=1, collate_fn=collate), "cpu"
        )
        assert len(list(batches)) == batches.report().batches == 5


class TestAdvice:
    def test_slow_dataset_without_workers(self, cores: None) -> None:
        advice = loop(Samples(seconds=BRIEF)).report().advice
        share = advice.split()[4]
        assert int(share) >= 50
        assert advice == (
            f"the loader is late: {share} % of the time went to waiting for samples; "
            "num_workers=3 makes batches during the step"
        )

    @pytest.mark.parametrize(("making", "step", "cores", "workers"), [
        (14.56, 10.05, 16, 2),
        (3, 6, 16, 1),
        (30, 10, 16, 3),
        (31, 10, 16, 4),
        (100, 1, 16, 15),
        (100, 0, 16, 15),
        (100, 1, 2, 1),
        (5, 5, 1, 1),
    ])  # fmt: skip
    def test_as_many_workers_as_make_a_batch_in_each_step(
        self, monkeypatch: pytest.MonkeyPatch, making: float, step: float, cores: int, workers: int
    ) -> None:
        """The time to make a batch by the time of the rest of the step, rounded up; a core is left for the loop."""
        monkeypatch.setattr(report_module, "_cores", lambda: cores)
        batches = loop(Samples(8))
        assert batches._watch is not None
        batches._watch.seconds = [making, step / 2, step / 2]
        advice = batches.report().advice
        assert advice.endswith(f"; num_workers={workers} makes batches during the step")

    def test_slow_iterable(self) -> None:
        def source() -> Iterator[Any]:
            for _ in range(5):
                time.sleep(BRIEF)
                yield {"x": torch.zeros(1)}

        batches = prefetch(source(), "cpu")
        list(batches)
        assert batches.report().advice.endswith("; a DataLoader with num_workers= makes batches during the step")

    def test_too_few_workers(self, cores: None) -> None:
        advice = loop(Samples(60, seconds=2 * BRIEF), workers=1, persistent_workers=True).report().advice
        assert advice.startswith("the loader is late: ")
        assert advice.endswith(
            "; more workers help while cores are free: the loader has 1 worker, and there are 4 cores"
        )

    def test_slow_dataset_with_a_worker_on_each_core(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(report_module, "_cores", lambda: 1)
        advice = loop(Samples(60, seconds=2 * BRIEF), workers=1, persistent_workers=True).report().advice
        assert advice.startswith("the loader is late: ")
        assert advice.endswith("; each core has a worker, so make dataset[i] and collate_fn faster")

    def test_workers_that_start_for_each_pass(self, cores: None) -> None:
        advice = loop(Samples(6), workers=1).report().advice
        assert advice.endswith("; most of it until the workers had started, persistent_workers=True starts them once")
        batches = loop(Samples(6), workers=1, persistent_workers=True)
        assert "persistent_workers" not in batches.report().advice

    @pytest.mark.parametrize("held", [[{"text": "a"}] * 20_000, TEXTS])
    def test_a_dataset_of_python_objects(self, cores: None, held: Any) -> None:
        for samples in (Samples(8, BRIEF, held), torch.utils.data.Subset(Samples(8, BRIEF, held), range(8))):
            advice = loop(samples, workers=1).report().advice
            assert advice.startswith("the loader is late: ")
            assert advice.endswith(
                "; each worker copies the 20000 Python objects of the dataset, and shares a DeviceDict or a table"
            )
        listed = loop([{"x": 1.0}] * 10_000, workers=1, batch_sampler=None, sampler=range(20)).report().advice
        assert "each worker copies the 10000 Python objects" in listed

    def test_a_slow_step(self) -> None:
        advice = loop(Samples(8), step=200 * BRIEF).report().advice
        assert advice.endswith(" % of the time; the loader keeps up") and advice.startswith("the step takes ")


class Other(torch.Tensor):
    pass


class TestCopies:
    def test_what_travels_alone(self, streams: Any) -> None:
        """From the first batch: small fields of any number share a copy."""
        batch = {
            "small": torch.zeros(3),
            "obs": {"also": torch.zeros(5), "image": torch.zeros(100_000)},
            "learned": torch.zeros(3, requires_grad=True),
            "other": torch.zeros(3).as_subclass(Other),
            "pair": (torch.zeros(2), [torch.zeros(1)]),
        }
        batches = prefetch([batch] * 20, "sim:0")
        assert len(list(batches)) == 20
        report = batches.report()
        assert report.alone == {
            "'obs.image'": "is larger than 32 KiB",
            "'learned'": "requires grad",
            "'other'": "is no plain dense tensor",
        }
        assert report.copies == 4 and report.bytes == 4 * (3 + 5 + 100_000 + 3 + 3 + 3)
        assert "  'learned' travels alone: it requires grad" in str(report).splitlines()
        assert report.bytes_per_second > 0

    def test_a_batch_of_collate_is_one_copy(self, streams: Any) -> None:
        batches = prefetch([DeviceDict({"x": torch.zeros(4), "y": torch.zeros(4)}).pack()] * 3, "sim:0", slots=2)
        list(batches)
        assert batches.report().copies == 1 and batches.report().alone == {} and batches.report().bytes == 32

    def test_nothing_moves_to_where_it_is(self) -> None:
        report = loop(Samples()).report()
        assert (report.bytes, report.copies, report.bytes_per_second) == (0, 0, 0.0)

    @pytest.mark.without_streams
    def test_a_device_without_streams(self) -> None:
        batches = prefetch([{"x": torch.zeros(6)}] * 3, "sim:0")
        list(batches)
        assert batches.report().bytes == 24 and batches.report().copies == 1
        assert report_module.journey({"x": torch.zeros(6)}, torch.device("sim:0")).pageable == 0
