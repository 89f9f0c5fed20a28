"""What a training tells trackers and its log by itself, and what its script adds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import smdistributed.modelparallel.torch as smp
from smp_config import ConfigError
from smp_records import tracking
from smp_records.records import parse_pace, parse_progress
from smp_runtime.job import session as sessions
from smp_tools.tracking import run, start
from smp_tools.tracking.loggers import making

SAMPLES, LENGTH = 4, 8


class Recorded:
    """A tracker that remembers what it gets, by step."""

    name = "tensorboard"

    def __init__(self) -> None:
        self.values: dict[int, dict[str, float]] = {}
        self.closed: list[bool] = []

    def write(self, points: Any) -> None:
        for point in points:
            self.values.setdefault(point.step, {}).update(point.values)

    def flush(self) -> None: ...

    def close(self, *, failed: bool) -> None:
        self.closed.append(failed)


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    made = Recorded()
    monkeypatch.setitem(making.KINDS, "tensorboard", lambda told: made)
    monkeypatch.setattr(tracking, "_can_import", lambda package: True)
    monkeypatch.setenv("SMP_LOGGERS", "tensorboard")
    monkeypatch.setenv("SM_HPS", "{}")
    return made


def train(steps: int, save: Any = None, rate: float = 0.5) -> list[float]:
    torch.manual_seed(0)
    model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16)))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=rate))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, 0.5)

    @smp.step
    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        model.backward(loss)
        return loss

    @smp.step
    def evaluate(ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()) + 100

    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        losses.append(float(step(torch.randint(16, (SAMPLES, LENGTH))).reduce_mean()))
        optimizer.clip_master_grads(0.5)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            evaluate(torch.randint(16, (SAMPLES, LENGTH)))
        if save is not None and number == 1:
            save(number)
    return losses


def test_trackers_get_the_losses_of_the_script_and_of_the_log(solo, tracker, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("SMP_PEAK_TFLOPS", "0.001")
    solo({"microbatches": 2})
    losses = train(5, save=lambda number: smp.save_checkpoint(str(tmp_path / "ckpt"), tag="a"))
    smp.log(accuracy=torch.tensor(0.75), step=3)
    smp.log(nothing=math.nan)
    sessions.shutdown()
    values = tracker.values
    assert list(values) == [1, 2, 3, 4, 5]
    assert [values[step]["loss"] for step in values] == pytest.approx(losses, rel=1e-6)
    assert [values[step]["learning_rate"] for step in values] == [0.5, 0.25, 0.125, 0.0625, 0.03125]
    assert all(values[step]["gradient_norm"] > 0 for step in values)
    assert values[3]["accuracy"] == 0.75
    assert math.isnan(values[5]["nothing"])
    assert values[3]["checkpoint_seconds"] > 0  # saved after the second update
    assert "checkpoint_seconds" not in values[4]
    for step in (3, 4, 5):
        tokens = values[step]["tokens_per_second"]
        assert tokens == pytest.approx(LENGTH * values[step]["samples_per_second"])
        parameters = 16 * 8 + 8 * 16 + 16
        assert values[step]["mfu"] == pytest.approx(6 * parameters * tokens / 1e9)
    assert values[5]["memory_gib/rank0"] > 0.05
    assert tracker.closed == [False]
    records = [r for r in map(parse_progress, capsys.readouterr().out.splitlines()) if r is not None]
    for record in records:
        assert record.loss == pytest.approx(losses[record.step - 1], rel=1e-6)
        assert record.learning_rate == values[record.step]["learning_rate"]
        assert record.gradient_norm == values[record.step]["gradient_norm"]
    assert records[-1].values is None  # nothing was logged of the last step that a line can have
    assert records[-1].idle_share == 0.0


def test_points_are_made_as_often_as_is_asked(solo, tracker, monkeypatch):
    monkeypatch.setenv("SMP_LOG_EVERY", "3")
    solo()
    train(7)
    sessions.shutdown()
    assert [step for step, values in tracker.values.items() if "loss" in values] == [1, 3, 6]


def test_without_trackers_the_log_has_it(solo, monkeypatch, capsys):
    monkeypatch.setenv("SM_HPS", '{"max_steps": 2}')
    monkeypatch.setenv("SMP_RANK_RECORDS", "0.001")
    solo()
    smp.log(accuracy=0.5, other=torch.tensor([2.0]))
    train(2)
    sessions.shutdown()
    out = capsys.readouterr().out.splitlines()
    records = [r for r in map(parse_progress, out) if r is not None]
    assert records[-1].learning_rate == 0.25
    assert records[-1].tokens_per_second == pytest.approx(LENGTH * records[-1].samples_per_second, rel=1e-6)
    assert records[-1].values == {"accuracy": 0.5, "other": 2.0}
    paces = [r for r in map(parse_pace, out) if r is not None]
    assert sum(record.steps for record in paces) == 4  # evaluations are steps, too
    assert paces[-1].memory_bytes > 1 << 20
    for record in paces:
        spent = record.compute + record.collectives + record.waiting + record.data + record.saving
        assert spent <= record.seconds * (1 + 1e-9)


def test_a_job_that_fails_tells_its_trackers(solo, tracker):
    session = solo()
    train(2)
    session.has_failed = True
    sessions.shutdown()
    assert list(tracker.values) == [1, 2]
    assert tracker.closed == [True]


def test_only_the_first_rank_writes(solo, tracker, monkeypatch):
    monkeypatch.setenv("SMP_LOGGERS", "")
    monkeypatch.delenv("SM_HPS")
    session = solo()
    monkeypatch.setenv("SMP_LOGGERS", "tensorboard")
    session.ranks.rank = 1
    start._begin(session)
    session.ranks.rank = 0
    smp.log(accuracy=0.5)
    train(2)
    sessions.shutdown()
    assert tracker.values == {}


@pytest.mark.parametrize("step", [-1, 1.5, True, "3"])
def test_a_step_is_a_number_of_updates(solo, step):
    solo()
    with pytest.raises(ValueError, match="it counts updates"):
        smp.log(step, accuracy=0.5)


def test_a_tracker_that_cannot_begin_ends_the_job_at_its_start(solo, monkeypatch):
    def fails(told):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setitem(making.KINDS, "mlflow", fails)
    monkeypatch.setattr(tracking, "_can_import", lambda package: True)
    monkeypatch.setenv("SMP_LOGGERS", "mlflow")
    with pytest.raises(ValueError, match="the tracker mlflow cannot begin: PermissionError.*SMP_LOG_FOLDER"):
        solo()


def test_a_package_that_is_missing_is_told_before_anything_runs(solo, monkeypatch):
    monkeypatch.setattr(tracking, "_can_import", lambda package: package != "mlflow")
    monkeypatch.setenv("SMP_LOGGERS", "tensorboard, MLflow")
    with pytest.raises(ConfigError, match="names mlflow, which this Python cannot import.*pip install mlflow"):
        solo()


def test_settings_are_told_without_secrets(solo):
    session = solo({"microbatches": 2})
    environ = {"SM_HPS": '{"lr": 0.1, "api_token": "s3cret", "mp_parameters": {}}', "TRAINING_JOB_NAME": "job"}
    told = run.TrackedRun.of(session.ranks, environ)
    assert told.settings["lr"] == "0.1"
    assert "s3cret" not in str(told)
    assert "mp_parameters" not in told.settings
    assert (told.settings["smp.processes"], told.settings["smp.microbatches"]) == ("1", "2")
    assert (told.name, str(told.folder)) == ("job", "tracking")
