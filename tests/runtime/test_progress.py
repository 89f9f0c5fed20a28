"""Progress lines: printed by rank 0 alone, at most once a second, with what the display shows."""

from __future__ import annotations

import torch

import smdistributed.modelparallel.torch as smp
from smp_config.records import parse_progress
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
