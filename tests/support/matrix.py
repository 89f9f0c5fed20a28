"""What the normal run leaves out, marked ``full``: the rest of a matrix of which it takes a sample, and tests that take long."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

#: Whether whole matrices run; said by ``conftest.py``.
is_whole = True


def examples(sample: int, whole: int) -> int:
    """How many examples hypothesis makes: ``whole`` where whole matrices run."""
    return whole if is_whole else sample


def sampled(cases: Iterable[Any], sample: Collection[Any]) -> list[Any]:
    """``cases`` for ``parametrize``, those that are not in ``sample`` as part of the whole matrix.

    Args:
        cases: a tuple each where there are several parameters.
        sample: chosen by hand, so that every value of each parameter occurs, and every pair of values where they meet.

    Raises:
        AssertionError: a case of the sample is not one of the matrix, which would be a check that nobody runs.
    """
    cases = list(cases)
    unknown = [case for case in sample if case not in cases]
    assert not unknown, f"the sample's {unknown} are not among the {len(cases)} cases of the matrix"
    if not is_whole and sample:  # what would only be left out again need not be made
        cases = [case for case in cases if case in sample]
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in sample else pytest.mark.full)
        for case in cases
    ]


class LongerTests:
    """Marks the tests that a file names, one a line; lines that begin with ``#`` are for readers."""

    def __init__(self, file: Path) -> None:
        self._file = file
        lines = file.read_text(encoding="utf-8").splitlines()
        self._names = {line for line in lines if line and not line.startswith("#")}

    @pytest.hookimpl(tryfirst=True)  # before -m takes its choice
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Mark them.

        Raises:
            pytest.UsageError: a file that was collected whole has no such test.
        """
        found = {item.nodeid for item in items}
        for item in items:
            if item.nodeid in self._names:
                item.add_marker(pytest.mark.full)
        if any("::" in argument for argument in config.args):
            return
        files = {name.partition("::")[0] for name in found}
        unknown = sorted(name for name in self._names - found if name.partition("::")[0] in files)
        if unknown:
            raise pytest.UsageError(f"{self._file.name} names what is no test: {', '.join(unknown)}")
