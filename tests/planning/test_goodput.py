"""Hours with failures: the simulation beside closed forms, and in a plan."""

from __future__ import annotations

import math
import random
import statistics
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.documents import training_hours

from smp_config import ConfigError
from smp_estimator.cli.main import main
from smp_estimator.planning import plan
from smp_estimator.planning.timing.goodput import (
    FAILURES_PER_GPU_HOUR,
    JobFailures,
    best_interval,
    expected_seconds,
    goodput,
    simulated_seconds,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "how-it-works" / "planning.md"


def test_the_document_shows_the_hours_of_a_training() -> None:
    shown = "\n".join(training_hours.table())
    assert shown in DOCUMENT.read_text(encoding="utf-8"), shown


@pytest.mark.parametrize("gpus", [1_024, 16_384])
@pytest.mark.parametrize("pause", [5.0, 60.0])
@pytest.mark.parametrize("restart", [10.0, 600.0])
def test_the_simulation_agrees_with_dalys_closed_form(gpus: int, pause: float, restart: float) -> None:
    between = 3600 / (gpus * FAILURES_PER_GPU_HOUR)
    failures = JobFailures(between, best_interval(pause, between), pause, 0.0, restart)
    work = 300 * between  # 300 failures, so one run is exact within 1/√300 of a small part
    chance = random.Random(1)
    mean = statistics.fmean(simulated_seconds(work, failures, chance)[0] for _ in range(20))
    assert mean == pytest.approx(expected_seconds(work, failures), rel=0.02)


@pytest.mark.parametrize("gpus", [1_024, 16_384])
def test_no_other_interval_costs_less_than_the_best_one(gpus: int) -> None:
    between, pause = 3600 / (gpus * FAILURES_PER_GPU_HOUR), 30.0
    best = best_interval(pause, between)
    assert best == pytest.approx(math.sqrt(2 * pause * between), rel=0.05)  # Young 1974

    def cost(interval: float) -> float:
        return expected_seconds(1e6, JobFailures(between, interval, pause, 0.0, 0.0))

    assert cost(best) <= min(cost(0.8 * best), cost(1.25 * best))


def test_work_that_was_not_written_is_lost() -> None:
    lost = JobFailures(10_000.0, 500.0, 0.0, 400.0, 0.0)
    chance, other = random.Random(2), random.Random(2)
    late = statistics.fmean(simulated_seconds(1e6, lost, chance)[0] for _ in range(50))
    at_once = statistics.fmean(
        simulated_seconds(1e6, JobFailures(10_000.0, 500.0, 0.0, 0.0, 0.0), other)[0] for _ in range(50)
    )
    # Each of 100 failures loses 400 s more.
    assert late - at_once == pytest.approx(100 * 400, rel=0.15)


def test_the_training_of_llama_3_makes_progress_in_more_than_nine_tenths_of_its_time() -> None:
    found = goodput(0.9 * 54 * 86_400, JobFailures.of_job(16_384, 4e8))
    assert found.part > 0.9  # as published
    assert found.failures == pytest.approx(419, rel=0.1)


def test_a_plan_of_a_whole_training_has_hours_with_failures() -> None:
    settings = {"ddp": True, "bf16": True, "sharded_data_parallel_degree": 64}
    made = plan("llama-3.1-8b", "ml.p5.48xlarge", 128, settings, 2, steps=20_000, engine="fsdp2")
    found = made.goodput
    assert found is not None
    assert made.training is not None
    assert found.work == pytest.approx(made.training.seconds)
    assert found.low < found.work < found.seconds < found.high
    assert found.model.between == pytest.approx(3600 / (1024 * FAILURES_PER_GPU_HOUR))
    assert made.to_dict()["goodput"]["usd"] > made.training.usd
    assert "failures" in str(made)
    never = made.changed(failures_per_gpu_hour=1e-12)
    assert never.goodput is not None
    assert never.goodput.failures == 0
    with pytest.raises(ConfigError, match=r"^failures_per_gpu_hour is 0; .*give more than 0"):
        plan("gpt2", "ml.p5.48xlarge", 1, steps=10, failures_per_gpu_hour=0)


def test_a_job_that_fails_before_each_checkpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^a failure is expected every 10 s.*fewer GPUs\n"):
        goodput(1e6, JobFailures(10.0, 100.0, 0.0, 0.0, 600.0))
    with pytest.raises(ConfigError, match=r"^a failure is expected every 1 s"):
        plan("gpt2", "ml.p5.48xlarge", 1, steps=10, failures_per_gpu_hour=450)


def test_few_tokens_are_refused_before_a_plan_is_made() -> None:
    with pytest.raises(ConfigError, match="tokens is 9, less than one sample of 1024"):
        plan("gpt2", "ml.p5.48xlarge", 1, tokens=9)


def test_a_training_of_many_failures_is_simulated_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = JobFailures(1000.0, 100.0, 1.0, 5.0, 60.0)
    work = 400 * failures.between
    whole = goodput(work, failures)
    monkeypatch.setattr("smp_estimator.planning.timing.goodput.MOST_FAILURES", 50)
    parts = goodput(work, failures)
    assert parts.seconds == pytest.approx(whole.seconds, rel=0.01)
    assert parts.failures == pytest.approx(whole.failures, rel=0.02)
    assert parts.high - parts.low == pytest.approx(whole.high - whole.low, rel=0.3)
    monkeypatch.undo()
    # A million failures in each of 200 trainings would take minutes.
    assert goodput(1e9, failures).failures > 1e6


def test_the_command_takes_rates_of_failures() -> None:
    words = ["plan", "gpt2", "--instance-type", "ml.p5.48xlarge", "--steps", "1000000", "--batch", "8"]
    words += ["--failures-per-gpu-hour", "0.001", "--save-interval", "60", "--restart-seconds", "30"]
    said = CliRunner().invoke(main, words)
    assert said.exit_code == 0, said.output
    assert "a checkpoint every 60 s, restarts of 30 s" in " ".join(said.output.split())
