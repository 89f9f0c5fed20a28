"""20,000 hostile configurations of an estimator: each is accepted as it stands or refused with an error of ours, at once."""

from __future__ import annotations

import json
import logging
import math
import random
from pathlib import Path
from typing import Any

import pytest
from support.faults import hostile
from support.faults.random_configurations import _right
from support.platform.fake_jobs import FAKE_BOOTSTRAP, forget_account, source_folder

from smp_config import ConfigError, JobSettings
from smp_estimator import ProcessSession, SMPEstimator
from smp_estimator.settings import checks, plain_values
from smp_estimator.settings.distribution import SettingsReader
from smp_launch.errors import LaunchError

SEED = 20
COUNT = 4_000
SAMPLE = 60


def given(source: random.Random, number: int, script: Path) -> dict[str, Any]:
    """Arguments of an estimator that are right but for one to three places."""
    right = _right(source, number)
    arguments: dict[str, Any] = {
        "entry_point": "train.py",
        "source_dir": str(script),
        "instance_type": right.instance_type or "local",
        "instance_count": right.hosts,
        "distribution": right.distribution,
        "environment": {**right.environment, "MINE": "1"},
        "hyperparameters": {"steps": 3, "lr": 0.5, "name": "tiny", "list": [1, {"a": None}]},
        "output_path": f"file://{script.parent / 'out'}",
        "checkpoint_s3_uri": f"file://{script.parent / 'checkpoints'}",
        "base_job_name": "job",
        "dependencies": [str(script / "helper.py")],
        "max_run": 3600,
    }
    for _ in range(source.choice((0, 1, 1, 1, 2, 3))):
        part = source.choice(["distribution"] * 6 + ["environment"] * 3 + ["hyperparameters"] * 3 + [""])
        if part and isinstance(arguments.get(part), dict):
            arguments[part] = hostile.mutated(source, arguments[part])
        else:
            name = source.choice(
                [
                    "instance_count",
                    "instance_type",
                    "entry_point",
                    "source_dir",
                    "hyperparameters",
                    "distribution",
                    "environment",
                ]
                + ["output_path", "checkpoint_s3_uri", "base_job_name", "dependencies"]
            )
            arguments[name] = hostile.value(source)
    return arguments


def asked(arguments: dict[str, Any], session: ProcessSession) -> None:
    """What the constructor and ``fit()`` ask before anything is started, and whether what would be sent is what was given."""
    if not isinstance(arguments["instance_type"], str) or not arguments["instance_type"].startswith("ml."):
        estimator = SMPEstimator(sagemaker_session=session, **arguments)
        read = estimator._check_settings()
        estimator._check_code()
        estimator._prepare_for_training(job_name=None)
        sent = estimator.hyperparameters()
        environment = estimator.environment
    else:
        # What every estimator asks, whatever the session; a session of the cloud would want an account.
        for name in ("hyperparameters", "environment"):
            checks.require_mapping(arguments[name], name)
        checks.require_count(arguments["instance_count"], "instance_count")
        plain_values.check_hyperparameters(arguments["hyperparameters"] or {})
        checks.check_environment(arguments["environment"])
        if arguments["distribution"] is None:
            return
        where = {
            "instance_type": arguments["instance_type"],
            "hosts": arguments["instance_count"],
            "process_mode": False,
        }
        read = SettingsReader().read(
            arguments["distribution"], stock_image=False, environment=arguments["environment"], **where
        )
        sent = {name: json.dumps(value) for name, value in read.settings.to_hyperparameters().items()}
        sent |= {name: json.dumps(value) for name, value in (arguments["hyperparameters"] or {}).items()}
        environment = arguments["environment"]
    if read is not None and not read.later:
        carried = JobSettings.from_hyperparameters(sent)
        assert carried.model_parallel == read.settings.model_parallel
        assert (carried.mpi and carried.mpi.processes_per_host) == (
            read.settings.mpi and read.settings.mpi.processes_per_host
        )
    for name, value in (arguments["hyperparameters"] or {}).items():
        assert _same(json.loads(sent[name]), value), name
    for name, value in (arguments["environment"] or {}).items():
        assert environment[name] == value
        assert "=" not in name
        assert "\0" not in name + value


def _same(received: Any, value: Any) -> bool:
    if isinstance(value, float) and math.isnan(value):
        return isinstance(received, float) and math.isnan(received)
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, list):
        return len(received) == len(value) and all(map(_same, received, value))
    if isinstance(value, dict):
        return received == json.loads(json.dumps(value))
    return type(received) is type(value) and received == value


@pytest.mark.parametrize(
    ("first", "count"),
    [(0, SAMPLE), *[pytest.param(n, 2000, marks=pytest.mark.full) for n in range(0, COUNT, 2000)]],
)
@pytest.mark.timeout(900)
def test_hostile_configurations(
    first: int,
    count: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: Any,
) -> None:
    forget_account(monkeypatch, tmp_path / "home")
    caplog.set_level(logging.CRITICAL)
    script = source_folder(tmp_path)
    monkeypatch.chdir(script)
    session = ProcessSession(root=tmp_path / "jobs", launcher=FAKE_BOOTSTRAP)
    tally = hostile.Tally((ConfigError, LaunchError))
    before = sorted(tmp_path.rglob("*"))
    for number in range(first, first + count):
        arguments = given(random.Random(f"{SEED}-{number}"), number, script)
        tally.judge((number, arguments), lambda arguments=arguments: asked(arguments, session))
    with capsys.disabled():
        if count > SAMPLE:
            print(f"\nconfigurations {first} to {first + count - 1}: {tally}")
    assert not tally.wrong, str(tally)
    assert sorted(tmp_path.rglob("*")) == before, "nothing was made"
    assert tally.counts["accepted"] > count / 20
    assert tally.counts["refused"] > count / 4
