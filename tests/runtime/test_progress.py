"""Progress lines: printed by rank 0 alone, at most once a second, with what the display shows."""

from __future__ import annotations

import pytest
import torch

import smdistributed.modelparallel.torch as smp
from smp_records.records import parse_progress, parse_usage
from smp_runtime.job import progress as module
from smp_runtime.job.progress import ProgressReporter


def _records(capsys):
    return [r for r in map(parse_progress, capsys.readouterr().out.splitlines()) if r]


class _Clock:
    now = 0.0

    def monotonic(self):
        return self.now


def test_rates_come_from_the_time_between_lines(capsys, monkeypatch):
    clock = _Clock()
    monkeypatch.setattr(module, "time", clock)
    reporter = ProgressReporter(enabled=True, total_steps=4)
    for step in range(4):
        reporter.step_begins()
        clock.now += 0.6
        reporter.note_samples(12)
        reporter.note_loss([torch.tensor(1.0), torch.tensor(float(step))])
        reporter.optimizer_stepped()
    records = _records(capsys)
    assert [r.step for r in records] == [1, 3, 4]  # the first, one after more than a second, the last
    assert [round(r.samples_per_second, 6) for r in records] == [20.0] * 3
    assert [r.loss for r in records] == [0.5, 1.5, 2.0]
    assert records[-1].total_steps == 4
    assert records[-1].memory_bytes > 0


def test_a_job_reports_without_help_of_its_script(solo, capsys, monkeypatch):
    monkeypatch.setenv("SM_HPS", '{"max_steps": 2, "lr": 0.1}')
    solo({"microbatches": 2})
    model = smp.DistributedModel(torch.nn.Linear(1, 1))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))

    @smp.step
    def step(x):
        out = model(x).mean()
        model.backward(out)
        return {"count": 3, "loss": out}

    for _ in range(2):
        step(torch.ones(8, 1))
        optimizer.step()
    last = _records(capsys)[-1]
    assert (last.step, last.total_steps) == (2, 2)
    assert last.loss == float(model(torch.ones(1, 1)).detach())


def test_outside_a_job_and_on_other_ranks_nothing_is_printed(ranks, capsys):
    ProgressReporter(enabled=False).optimizer_stepped()
    reporter = ProgressReporter.from_environment(enabled=True, device=torch.device("cpu"), environ={})
    reporter.optimizer_stepped()
    assert _records(capsys) == []


@pytest.mark.parametrize("failed", [False, True])
def test_the_last_step_is_printed_when_the_rank_leaves(capsys, monkeypatch, failed):
    """Also where nobody said how many steps there are; after an error no loss is waited for."""
    clock = _Clock()
    monkeypatch.setattr(module, "time", clock)
    reporter = ProgressReporter(enabled=True, rank=0)
    for step in range(3):
        reporter.note_loss([torch.tensor(float(step))])
        reporter.optimizer_stepped()
    clock.now += 0.5
    reporter.close(failed=failed)
    reporter.close()
    out = capsys.readouterr().out
    records = [r for r in map(parse_progress, out.splitlines()) if r]
    assert [(r.step, r.total_steps) for r in records] == [(1, None), (3, None)]
    assert records[-1].loss == (None if failed else 2.0)
    (used,) = [r for r in map(parse_usage, out.splitlines()) if r]
    assert (used.rank, used.memory_bytes) == (0, records[-1].memory_bytes)
    assert used.cpu_cores >= 0


@pytest.mark.parametrize(
    ("words", "hyperparameters", "total"),
    [
        ([], "{}", None),
        (["--max-steps", "7", "-x"], "{}", 7),
        (["--lr", "0.1", "--num_steps=9"], '{"lr": 0.1}', 9),
        (["--steps", "7"], '{"max_steps": 5}', 5),
        (["--steps"], '{"steps": -1}', None),
    ],
)
def test_the_number_of_steps_is_found_where_scripts_get_it(monkeypatch, words, hyperparameters, total):
    monkeypatch.setattr("sys.argv", ["train.py", *words])
    environ = {"SM_HPS": hyperparameters}
    reporter = ProgressReporter.from_environment(enabled=True, device=torch.device("cpu"), environ=environ)
    assert reporter.total_steps == total


def test_nothing_is_printed_twice_nor_before_the_first_step(capsys):
    reporter = ProgressReporter(enabled=True, total_steps=1)
    reporter.set_position(7)
    reporter.close()
    assert _records(capsys) == []
    reporter = ProgressReporter(enabled=True, total_steps=1)
    reporter.optimizer_stepped()
    reporter.close()
    assert [r.step for r in _records(capsys)] == [1]


def test_a_number_of_steps_that_is_passed_was_none(capsys):
    reporter = ProgressReporter(enabled=True, total_steps=5)
    reporter.set_position(5)
    reporter.optimizer_stepped()
    (record,) = _records(capsys)
    assert (record.step, record.total_steps) == (6, None)


@pytest.mark.parametrize(("loads_optimizer", "position"), [(True, 3), (False, 0)])
def test_resuming_restores_the_position(solo, tmp_path, loads_optimizer, position):
    def made():
        solo({})
        model = smp.DistributedModel(torch.nn.Linear(1, 1))
        return model, smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))

    model, optimizer = made()

    @smp.step
    def step(x):
        model.backward(model(x).mean())

    for _ in range(3):
        step(torch.ones(1, 1))
        optimizer.step()
    smp.save_checkpoint(str(tmp_path), tag="three", user_content={"anything": 1})
    smp.shutdown()
    model, optimizer = made()
    assert smp.state.progress.step == 0
    smp.resume_from_checkpoint(str(tmp_path), load_optimizer=loads_optimizer)
    assert smp.state.progress.step == position
