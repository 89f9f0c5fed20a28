"""The argument about recorded numbers becomes variables of the job."""

from __future__ import annotations

from typing import Any

import pytest

from smp_config import ConfigError
from smp_estimator.settings.numerics import with_numerics

ON = {"SMP_RECORD_NUMERICS": "1"}


@pytest.mark.parametrize(
    ("given", "variables"),
    [
        (True, ON),
        (False, {"SMP_RECORD_NUMERICS": "0"}),
        ({}, ON),
        ({"every": 4}, {**ON, "SMP_RECORD_NUMERICS_EVERY": "4"}),
        (
            {"every": 1, "guards": "finite,spike=8"},
            {**ON, "SMP_RECORD_NUMERICS_EVERY": "1", "SMP_NUMERICS_GUARDS": "finite,spike=8"},
        ),
    ],
)
def test_the_argument_becomes_variables(make: Any, given: Any, variables: dict[str, str]) -> None:
    assert make(environment={"A": "b"}, record_numerics=given).environment == {"A": "b", **variables}
    assert make(environment={**variables}, record_numerics=given).environment == variables  # said twice alike


def test_without_it_the_environment_is_what_was_given(make: Any) -> None:
    given = {"SMP_RECORD_NUMERICS": "folder"}
    assert make(environment=given).environment == given
    assert with_numerics(given, None) is given


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"record_numerics": 1}, 'record_numerics is 1; .* write True, False, or {"every": 100'),
        ({"record_numerics": {"steps": 1}}, "record_numerics is {'steps': 1}"),
        ({"record_numerics": {"every": 0}}, "is 0; it is the number of updates .* from 1 to 1,000,000"),
        ({"record_numerics": {"every": True}}, "is True"),
        ({"record_numerics": {"guards": "finit"}}, "'finit' is unknown"),
        ({"record_numerics": {"guards": 3}}, "'3' is unknown"),
        (
            {"record_numerics": True, "environment": {"SMP_RECORD_NUMERICS": "x"}},
            "record_numerics says SMP_RECORD_NUMERICS=1, .* remove one",
        ),
        ({"environment": {"SMP_RECORD_NUMERICS_EVERY": "0"}}, "SMP_RECORD_NUMERICS_EVERY is '0'"),
        ({"environment": {"SMP_NUMERICS_GUARDS": "spike=0"}}, "spike=10"),
    ],
)
def test_arguments_that_say_something_else(make: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**arguments)
