"""The table of probes: every wrong configuration is refused in words that help, no right one is."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.faults.configurations import WRONG, Probe
from support.faults.right_configurations import RIGHT
from support.platform.cloud import Cloud, service

from smp_config import ConfigError
from smp_estimator import SMPEstimator


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    with service() as boto:
        yield Cloud(boto)


def _id(probe: Probe) -> str:
    return probe.name


@pytest.mark.parametrize("probe", WRONG, ids=_id)
def test_wrong(probe: Probe, cloud: Cloud, script: Path) -> None:
    arguments = cloud.arguments(script, **probe.made())
    with pytest.raises(ConfigError) as caught:
        SMPEstimator(**arguments)
    for part in probe.wrong:
        assert re.search(part, str(caught.value)), f"{part!r} is not in: {caught.value}"
    assert not cloud.requests


@pytest.mark.parametrize("probe", RIGHT, ids=_id)
def test_right(probe: Probe, cloud: Cloud, script: Path, caplog: pytest.LogCaptureFixture) -> None:
    arguments = cloud.arguments(script, **probe.made())
    with caplog.at_level(logging.WARNING, logger="smp_estimator"):
        estimator = SMPEstimator(**arguments)
        assert estimator.hyperparameters() is not None
        assert estimator.training_image_uri()
    said = [record.getMessage() for record in caplog.records if record.name.startswith("smp_")]
    for part in probe.warned:
        assert any(re.search(part, sentence) for sentence in said), f"{part!r} is not in: {said}"
    assert len(said) == len(probe.warned), said


def test_changes_after_the_constructor_are_checked_at_fit(cloud: Cloud, script: Path) -> None:
    def wrong(change: Any) -> str:
        from support.faults.configurations import smp

        estimator = cloud.estimator(script, **smp(8, ddp=True))
        change(estimator)
        with pytest.raises(ConfigError) as caught:
            estimator.fit("s3://bucket/data", wait=False)
        return str(caught.value)

    parts = "smdistributed", "modelparallel"
    assert "is 9, but" in wrong(lambda e: e.distribution["mpi"].update(processes_per_host=9))
    assert "unknown parameter" in wrong(lambda e: e.distribution[parts[0]][parts[1]]["parameters"].update(ddpp=True))
    assert "has 4 GPUs" in wrong(lambda e: setattr(e, "instance_type", "ml.p3.8xlarge"))
    assert "max_wait is missing" in wrong(lambda e: setattr(e, "use_spot_instances", True))
    assert "did you mean 'train.py'" in wrong(lambda e: setattr(e, "entry_point", "trian.py"))
    assert "instance_count is 1.5" in wrong(lambda e: setattr(e, "instance_count", 1.5))
    assert not cloud.requests


def test_the_table_is_whole() -> None:
    names = [probe.name for probe in (*WRONG, *RIGHT)]
    assert len(WRONG) >= 49
    assert len(names) == len(set(names))
    assert len([name for name in names if name.startswith("placement ")]) == 8
