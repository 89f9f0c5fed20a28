"""Jobs that hang in many ways: ``fit()`` names the rank and the script's line within the patience and ten seconds."""

from __future__ import annotations

import re

import pytest
from watch.conftest import marked

pytestmark = [pytest.mark.job, pytest.mark.timeout(120)]

SECONDS = 6.0

#: Kinds on every topology: what a script of its own does on one rank, between two steps.
OWN = """sleep poll spin spin_c spin_torch lock thread_lock join event queue future process_queue pool input select fifo process
    socket sigwait stop generator dataset worker workers_lock at_end""".split()
#: Ranks that call different things.
CALLS = """extra_barrier extra_allgather dp_barrier branch send recv skipped_barrier torch_barrier torch_extra_reduce torch_swapped
    save_one save_all_but_one step_only_one uneven""".split()
INSIDE = "step_function forward forward_spin backward".split()

#: A stopped rank is found in tests/watch/test_verdicts.py, too.
SAMPLE = [("forward", "pp 2")]
ALL = [
    *((kind, "dp 2") for kind in (*OWN, *CALLS, *INSIDE)),
    *(
        (kind, "pp 2")
        for kind in ("sleep", "lock", "dataset", "save_one", "forward", "backward", "stop", "extra_state")
    ),
    *((kind, "pp 2 × dp 2") for kind in ("event", "forward_spin", "extra_barrier", "stop", "skip_step", "uneven")),
    *((kind, "sharding 4") for kind in ("queue", "skip_optimizer", "forward", "stop", "save_all_but_one")),
    *((kind, "tp 2 × dp 2") for kind in ("spin", "recv", "step_function", "stop", "worker", "skipped_barrier")),
]


@pytest.mark.parametrize(
    ("topology", "steps"),
    [
        pytest.param("dp 2", 30),
        pytest.param("dp 2", 1_000, marks=[pytest.mark.full, pytest.mark.timeout(400)]),
        pytest.param("pp 2", 400, marks=[pytest.mark.full, pytest.mark.timeout(400)]),
        pytest.param("sharding 4", 400, marks=[pytest.mark.full, pytest.mark.timeout(400)]),
    ],
)
def test_slow_ranks_are_no_hang(hanging_job, topology, steps):
    """Each rank is late by up to eight median steps, whenever it likes; rank 0 evaluates alone; the patience is ten and more."""
    ended = hanging_job("", topology, 2.0, steps=steps, delay=0.01, rank=99)
    assert not ended.error
    assert "rank 0 is done" in ended.output


@pytest.mark.full
def test_a_stopped_mpirun_is_told(hanging_job):
    ended = hanging_job("stop_mpirun", "dp 2", SECONDS)
    assert re.match(r"hang: process \d+, \w+, through which the ranks run, is stopped", ended.headline), ended.error


def test_a_stopped_launcher_is_told(hanging_job):
    """It stops with the first step's words, before it could notice anything itself."""
    ended = hanging_job("stop_launcher", "dp 2", SECONDS)
    assert re.match(r"hang: the launcher of algo-1, process \d+, is stopped", ended.headline), ended.error


@pytest.mark.parametrize(
    ("kind", "rank"),
    [
        ("piece", 0),
        pytest.param("forward", 1, marks=pytest.mark.full),
        pytest.param("backward", 1, marks=pytest.mark.full),
    ],
)
def test_a_hang_in_a_step_program_names_its_rank_and_line(hanging_job, kind, rank):
    """Rank 1 runs the step function; rank 0 gets no request in such a step, only tensors."""
    ended = hanging_job(kind, "pp 2 program", SECONDS, rank=rank, step=6)
    assert "rank 1 has followed a step program" in ended.output
    assert f"rank {rank}" in ended.headline, ended.error
    assert ended.lines & marked(kind), ended.error


@pytest.mark.parametrize(
    ("kind", "topology"),
    [pytest.param(*cell, id=" ".join(cell), marks=() if cell in SAMPLE else pytest.mark.full) for cell in ALL],
)
def test_a_hang_names_its_rank_and_line(hanging_job, kind, topology):
    ended = hanging_job(kind, topology, SECONDS)
    assert ended.headline, ended.output[-3000:]
    assert "rank 1" in ended.headline, ended.error
    assert ended.lines & marked(kind), ended.error
