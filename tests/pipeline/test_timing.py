"""Traced execution times: several runs, of which the median counts, and equal modules count as equal."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from smp_runtime.pipeline.partition.module_times import RUNS, median_times, run_repeatedly
from smp_runtime.pipeline.partition.tracing import trace


def _runs(lengths, **settings):
    """What counts of runs that take so long, on a clock that they move."""
    now = [100.0]
    left = iter(lengths)

    def run():
        length = next(left)
        now[0] += length
        return length

    return run_repeatedly(run, clock=lambda: now[0], **settings)


def test_the_first_run_warms_up():
    assert _runs([9.0, *[0.1] * 20], runs=3, seconds=60.0) == [0.1, 0.1, 0.1]


def test_the_time_for_all_runs_is_bounded():
    assert _runs([2.0] * 20, runs=7, seconds=5.0) == [2.0, 2.0]
    assert _runs([60.0] * 20, runs=7, seconds=5.0) == [60.0]


def test_the_median_counts_and_equal_modules_share_it():
    rounds = [{"a": 1.0, "b": 5.0, "c": 1.2, "d": 9.0}, {"a": 1.1, "b": 1.0, "c": 1.1, "d": 2.0}]
    rounds.append({"a": 1.0, "b": 1.1, "c": 1.3, "d": 3.0})
    found = median_times(rounds, {"a": "block", "b": "block", "c": "block", "d": "head"})
    assert found == {"a": 1.1, "b": 1.1, "c": 1.1, "d": 3.0}


def test_a_module_that_is_clearly_slower_than_its_like_keeps_its_time():
    rounds = [{"a": 1.0, "b": 1.2, "c": 3.0, "d": 3.4}] * 3
    found = median_times(rounds, dict.fromkeys("abcd", "block"))
    assert found["a"] == found["b"] == pytest.approx(1.1)
    assert found["c"] == found["d"] == pytest.approx(3.2)


def test_a_module_that_did_not_always_run_is_measured_where_it_did():
    assert median_times([{"a": 1.0}, {}, {"a": 3.0}], {"a": "a"}) == {"a": 2.0}


class Late(nn.Module):
    """Slow when it runs for the first time, as what fills caches is."""

    runs = 0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        Late.runs += 1
        if Late.runs <= 4:
            time.sleep(0.05)
        return torch.tanh(self.linear(x))


def test_equal_blocks_have_equal_times():
    Late.runs, calls = -6, []  # the run that counts operations is quick, the first one that is timed is slow

    def run():
        calls.append(1)
        model(torch.ones(4, 16)).sum()

    model = nn.Sequential(*(Late() for _ in range(6)), nn.Linear(16, 4))
    nodes = trace(model, run, device="cpu", times=True).nodes()
    blocks = [nodes[str(number)].seconds for number in range(6)]
    assert len(set(blocks)) == 1
    assert 0 < blocks[0] < 0.05
    assert len({nodes[f"{number}.linear"].seconds for number in range(6)}) == 1
    assert nodes["6"].seconds > 0
    assert len(calls) == 2 + RUNS
