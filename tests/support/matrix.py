"""A matrix of cases of which the normal run takes a sample; the rest is marked ``full``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
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
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in sample else pytest.mark.full)
        for case in cases
    ]
