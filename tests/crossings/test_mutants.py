"""The mutants fit the runtime as it is: each changes one place, and what it makes compiles."""

from __future__ import annotations

from crossings.case import AXES, EVENTS, TOPOLOGIES, draw
from crossings.mutants import in_order, read_mutants, words_of


def test_every_mutant_changes_one_place() -> None:
    mutants = read_mutants()
    assert len({mutant.id for mutant in mutants}) == len(mutants) >= 60
    for mutant in mutants:
        assert mutant.old != mutant.new
        compile(mutant.text(), mutant.file, "exec")  # text() counts the old text


def test_cases_that_a_mutant_asks_for_come_first() -> None:
    values = {value for choices in AXES.values() for value in choices if isinstance(value, str)}
    some = [words_of(draw(1, number)) for number in range(60)]
    known = values.union(AXES, EVENTS, TOPOLOGIES, *some)
    assert {word for mutant in read_mutants() for word in mutant.first} <= known
    cases = [draw(1, number) for number in range(60)]
    order = in_order(cases, ("tp", "reload_state"))
    assert sorted(order) == list(range(60))
    assert {"tp", "reload_state"} <= words_of(cases[order[0]])
