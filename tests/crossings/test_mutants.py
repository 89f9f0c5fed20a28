"""The mutants fit the runtime as it is: each changes one place, and what it makes compiles."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from crossings.case import AXES, EVENTS, TOPOLOGIES, draw
from crossings.mutants import in_order, read_mutants, words_of
from crossings.patching import CannotPatchError, can_patch, patch
from crossings.version2_case import AXES as VERSION2_AXES
from crossings.version2_case import draw_version2


def test_every_mutant_changes_one_place() -> None:
    mutants = read_mutants()
    assert len({mutant.id for mutant in mutants}) == len(mutants) >= 60
    for mutant in mutants:
        assert mutant.old != mutant.new
        compile(mutant.text(), mutant.file, "exec")  # text() counts the old text
        # A copy of the runtime costs ten times as much.
        changes_functions = can_patch(mutant.path.read_text(encoding="utf-8"), mutant.text())
        assert changes_functions or mutant.id == "own-batch-not-summed"


def test_cases_that_a_mutant_asks_for_come_first() -> None:
    values = {value for choices in AXES.values() for value in choices if isinstance(value, str)}
    values |= {value for choices in VERSION2_AXES.values() for value in choices if isinstance(value, str)}
    some = [words_of(draw(1, number)) for number in range(60)] + [words_of(draw_version2(1, n)) for n in range(60)]
    known = values.union(AXES, EVENTS, TOPOLOGIES, *some)
    assert {word for mutant in read_mutants() for word in mutant.first} <= known
    cases = [draw(1, number) for number in range(60)]
    order = in_order(cases, ("tp", "reload_state"))
    assert sorted(order) == list(range(60))
    assert {"tp", "reload_state"} <= words_of(cases[order[0]])


def test_code_of_functions_is_replaced_wherever_they_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = """
import functools
FACTOR = 2

def doubled(f):
    @functools.wraps(f)
    def run(x):
        return FACTOR * f(x)
    return run

class Kept:
    LIMIT = 1

    @property
    def one(self):
        return 1

    @staticmethod
    @doubled
    def two(x):
        return [each + 1 for each in x]
"""
    file = tmp_path / "patched_module.py"
    file.write_text(before)
    monkeypatch.syspath_prepend(str(tmp_path))
    known = importlib.import_module("patched_module").Kept
    after = before.replace("return 1", "return 7").replace("each + 1", "each + 2").replace("FACTOR * f", "3 * f")
    undo = patch(str(file), after)
    assert (known().one, known.two([1])) == (7, [3, 3, 3])
    undo()
    assert (known().one, known.two([1])) == (1, [2, 2])
    with pytest.raises(CannotPatchError, match="no function"):
        patch(str(file), before)
    for old, new in (("FACTOR = 2", "FACTOR = 3"), ("LIMIT = 1", "LIMIT = 2"), ("    @property\n", "")):
        assert not can_patch(before, before.replace(old, new))
