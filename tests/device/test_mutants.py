"""The list of mutants is true to the code. The program `mutants.py` runs them, not this module."""

from __future__ import annotations

import ast

import pytest
from mutants import MUTANTS, ROOT, Mutant, mutated, source_of


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.text.split("\n")[0])
def test_each_mutant_changes_one_place(mutant: Mutant) -> None:
    source = source_of(mutant)
    assert source.count(mutant.text) == 1, "change the mutant with the code, or drop it"
    ast.parse(mutated(mutant))


def test_each_mutant_names_a_test_or_says_why_none_can_fail() -> None:
    assert len({mutant[:3] for mutant in MUTANTS}) == len(MUTANTS) >= 25
    for mutant in MUTANTS:
        assert bool(mutant.test) is not bool(mutant.equivalent) and mutant.breaks
        if mutant.test:
            file, name = mutant.test.split("::")
            assert f"def {name}(" in (ROOT / file).read_text(), mutant
