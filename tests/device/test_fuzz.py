"""A short run of `fuzz`, which also says how to repeat a failure."""

from __future__ import annotations

import fuzz
import pytest


def test_random_moves_and_loaders() -> None:
    for number in range(50):
        fuzz.run_case(0, number)


def test_a_case_depends_on_its_numbers_alone() -> None:
    logs = [fuzz.run_case(3, number) for number in range(8)]
    assert [fuzz.run_case(3, number) for number in range(8)] == logs and fuzz.run_case(4, 0) != logs[0]


def test_a_failure_says_what_was_done_and_how_to_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz.Moves, "check", lambda self: fuzz.check("the dict", {}, self.values))
    number = next(i for i in range(100) if fuzz.Random(f"5, {i}").random() < 0.5)
    with pytest.raises(fuzz.Failure, match=r"the dict has other keys") as caught:
        fuzz.run_case(5, number)
    assert str(caught.value).endswith(f"Run it again: python tests/device/fuzz.py 5 --case {number}")
    assert "tensors, " in str(caught.value) and "bytes" in str(caught.value)
