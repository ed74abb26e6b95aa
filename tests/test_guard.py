"""`make guard`: what it compares, and what its operations do."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))
guard: Any = importlib.import_module("guard")
counts: Any = importlib.import_module("count_instructions")

COMMITTED: dict[str, Any] = json.loads((BENCHMARKS / "results" / "instructions.json").read_text(encoding="utf-8"))
INSTRUCTIONS: dict[str, int] = COMMITTED["instructions"]


def test_every_operation_does_the_same_as_its_loop() -> None:
    known = counts.scope()
    for statement in counts.statements("").values():
        counts.loop(statement, known)(30)
    assert counts.broken(known, "") == []


def test_every_operation_is_committed_and_below_its_ceiling(capsys: pytest.CaptureFixture[str]) -> None:
    """So nobody commits counts that a ceiling does not allow."""
    guard.compare(INSTRUCTIONS, INSTRUCTIONS)
    assert capsys.readouterr().out.endswith("No count is above its limit.\n")


def test_an_operation_may_not_take_much_more_than_committed() -> None:
    most = int(INSTRUCTIONS["read"] * 1.05 + 20)
    guard.compare({**INSTRUCTIONS, "read": most}, INSTRUCTIONS)
    with pytest.raises(SystemExit, match=rf"^read: expected {INSTRUCTIONS['read']} instructions, got {most + 1} "):
        guard.compare({**INSTRUCTIONS, "read": most + 1}, INSTRUCTIONS)


@pytest.mark.parametrize("committed", [True, False])
def test_an_operation_may_not_creep_above_its_ceiling(committed: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Each commit may raise a count by a few percent; the quotient to the plain loop stops the sum of them."""
    hand = INSTRUCTIONS["write rows, by hand"]
    most = int(counts.OPERATIONS["write rows"].ceiling * hand)
    text = rf"^write rows: expected at most [\d.]+ times the {hand:,} instructions of `for k in p8: .*`, got "
    for got, refused in ((most, False), (most + 1, True)):
        now = {**INSTRUCTIONS, "write rows": got}
        if refused:
            with pytest.raises(SystemExit, match=text):
                guard.compare(now, now if committed else None)
        else:
            guard.compare(now, now if committed else None)
        lines = capsys.readouterr().out.splitlines()
        (line,) = [line for line in lines if line.startswith("write rows  ")]
        assert line.split()[-2:] == [f"{got / hand:.2f}", f"{most / hand:.2f}"]


def test_a_new_operation_needs_a_committed_count() -> None:
    old = {name: number for name, number in INSTRUCTIONS.items() if name != "half"}
    with pytest.raises(SystemExit, match=r"^These counts are new or gone: gone, half\. Run `make guard-update`"):
        guard.compare(INSTRUCTIONS, {**old, "gone": 1})


def test_in_another_setting_only_quotients_are_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def count(only: str = "") -> dict[str, int]:
        asked.append(only)
        return {name: number for name, number in INSTRUCTIONS.items() if only in name}

    monkeypatch.setattr(guard.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(guard, "setting", lambda: {**COMMITTED["setting"], "torch": "1.0"})
    monkeypatch.setattr(guard, "count", count)
    monkeypatch.setattr(sys, "argv", ["guard.py"])
    guard.main()
    assert asked == [] and capsys.readouterr().out.startswith("Nothing is compared, as the counts were committed in")
    monkeypatch.setattr(sys, "argv", ["guard.py", "--quotients", "--only", "lerp_"])
    guard.main()
    shown = capsys.readouterr().out
    assert asked == ["lerp_"] and "lerp_ of 8 " in shown and "write rows" not in shown
