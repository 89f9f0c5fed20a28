"""A distribution is read once, and anew as soon as anything that it is read from has changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from support.platform.jobs import model_parallel

from smp_config import ConfigError
from smp_estimator.settings import distribution as strategies
from smp_estimator.settings.distribution import SettingsReader

_WHERE = {"instance_type": "local", "hosts": 1, "process_mode": True, "environment": {"A": "1"}}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was really read."""
    made, read = [], strategies.read

    def and_count(distribution: Any, **where: Any) -> Any:
        made.append(copy.deepcopy(distribution))
        return read(distribution, **where)

    monkeypatch.setattr(strategies, "read", and_count)
    return made


def test_what_has_not_changed_is_read_once(reads: list[Any]) -> None:
    own, distribution = SettingsReader(), model_parallel(2, ddp=True)
    first = own.read(distribution, stock_image=False, **_WHERE)
    assert own.read(copy.deepcopy(distribution), stock_image=False, **_WHERE) is first
    assert len(reads) == 1


def test_a_change_inside_the_dictionary_is_seen(reads: list[Any]) -> None:
    own, distribution = SettingsReader(), model_parallel(2, ddp=True)
    own.read(distribution, stock_image=False, **_WHERE)
    distribution["mpi"]["processes_per_host"] = 4
    changed = own.read(distribution, stock_image=False, **_WHERE)
    assert changed.settings.mpi is not None
    assert changed.settings.mpi.processes_per_host == 4


@pytest.mark.parametrize("change", [{"hosts": 2}, {"environment": {"A": "2"}}, {"instance_type": "local_gpu"}])
def test_a_change_around_it_is_seen(reads: list[Any], change: dict[str, Any]) -> None:
    own, distribution = SettingsReader(), model_parallel(2, ddp=True)
    own.read(distribution, stock_image=False, **_WHERE)
    own.read(distribution, stock_image=False, **{**_WHERE, **change})
    assert len(reads) == 2


def test_equal_is_not_the_same_type() -> None:
    own, distribution = SettingsReader(), model_parallel(1, ddp=True)
    own.read(distribution, stock_image=False, **_WHERE)
    distribution["mpi"]["processes_per_host"] = True  # equals 1, and is refused
    with pytest.raises(ConfigError, match="processes_per_host"):
        own.read(distribution, stock_image=False, **_WHERE)


def test_what_was_refused_is_refused_again() -> None:
    own, distribution = SettingsReader(), model_parallel(0)
    for _ in range(2):
        with pytest.raises(ConfigError, match="processes_per_host is 0"):
            own.read(distribution, stock_image=False, **_WHERE)
