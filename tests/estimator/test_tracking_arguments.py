"""The arguments about trackers and profiles become variables of the job, and what cannot work is refused on the notebook."""

from __future__ import annotations

from typing import Any

import pytest

from smp_config import ConfigError
from smp_estimator.settings.tracking import with_tracking
from smp_records import tracking
from smp_records.profiling import Profile


@pytest.fixture(autouse=True)
def _all_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "_can_import", lambda package: package != "wandb")


@pytest.mark.parametrize(
    ("given", "variables"),
    [
        ({"loggers": "tensorboard"}, {"SMP_LOGGERS": "tensorboard"}),
        ({"loggers": ["tensorboard", "mlflow"]}, {"SMP_LOGGERS": "tensorboard,mlflow"}),
        ({"profile": "10-12,memory"}, {"SMP_PROFILE": "10-12,memory"}),
        (
            {"profile": {"steps": (10, 12), "memory": True, "shapes": False, "ranks": [0, 3]}},
            {"SMP_PROFILE": "steps=10-12,memory,ranks=0/3"},
        ),
        ({"profile": {"steps": 7}}, {"SMP_PROFILE": "steps=7"}),
    ],
)
def test_arguments_become_variables(make: Any, given: dict[str, Any], variables: dict[str, str]) -> None:
    assert make(environment={"A": "b"}, **given).environment == {"A": "b", **variables}


def test_without_them_the_environment_is_what_was_given() -> None:
    given = {"A": "b"}
    assert with_tracking(given, None, None) is given


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loggers": 3}, r'loggers is 3; .* write \["tensorboard"\]'),
        ({"loggers": "tensorbord"}, "'tensorbord' is no tracker.*tensorboard"),
        ({"loggers": "wandb"}, "names wandb, which this Python cannot import; .* pip install wandb"),
        ({"environment": {"SMP_LOGGERS": "x"}}, "'x' is no tracker"),
        ({"environment": {"SMP_LOG_EVERY": "0"}}, "SMP_LOG_EVERY is '0'.*from 1 to 1,000,000"),
        ({"environment": {"SMP_PEAK_TFLOPS": "-1"}}, "SMP_PEAK_TFLOPS is '-1'"),
        ({"environment": {"SMP_RANK_RECORDS": "often"}}, "SMP_RANK_RECORDS is 'often'"),
        ({"environment": {"SMP_RANK_RECORDS": "nan"}}, "SMP_RANK_RECORDS is 'nan'"),
        ({"profile": True}, "profile is True"),
        ({"profile": {"memory": True}}, "profile is {'memory': True}"),
        ({"profile": {"steps": (12, 10)}}, "steps 12 to 10 are no window"),
        ({"profile": "memory"}, "the steps are missing"),
        ({"profile": "0"}, None),
        ({"profile": "1-1001"}, "no window of 1 to 1,000 steps"),
        ({"profile": "1,ranks=200000"}, "no job has rank 200000"),
        ({"profile": "1,memry"}, "'memry' is unknown"),
        ({"loggers": "mlflow", "environment": {"SMP_LOGGERS": "tensorboard"}}, "both mean the same setting"),
    ],
)
def test_what_cannot_work_is_refused(make: Any, arguments: dict[str, Any], message: str | None) -> None:
    if message is None:
        make(**arguments)
        return
    with pytest.raises(ConfigError, match=message):
        make(**arguments)


@pytest.mark.parametrize(
    ("text", "profile"),
    [
        ("", None),
        ("0", None),
        ("5", Profile(5, 5)),
        ("steps=2-4, shapes,stacks", Profile(2, 4, shapes=True, stacks=True)),
        ("ranks=3/1/3,memory,1-2", Profile(1, 2, memory=True, ranks=(1, 3))),
    ],
)
def test_profiles_are_read(text: str, profile: Profile | None) -> None:
    assert Profile.of({"SMP_PROFILE": text}) == profile
    if profile is not None:
        assert [rank for rank in range(4) if profile.takes(rank)] == list(profile.ranks or range(4))
