"""Faults on purpose: what ``SMP_FAULTS`` may say, and a matrix of them over phases, ranks and topologies."""

from __future__ import annotations

import itertools
import re

import pytest

from smp_config import ConfigError
from smp_records.faults import Fault, parse

KINDS = ("raise", "kill", "stop", "lose_connection")
#: Phase and step.
MOMENTS = [
    ("forward", 1),
    ("forward", 4),
    ("backward", 4),
    ("reduction", 4),
    ("optimizer", 4),
    ("save", 2),
    ("between", 4),
]
TOPOLOGIES = ("pp 2 × dp 2", "sharding 4", "tp 2 × dp 2")
CELLS = list(itertools.product(KINDS, MOMENTS, (0, 3), TOPOLOGIES))
#: Of two ranks, which start in half of the time. Errors and kills through ``fit()`` are in tests/jobs/test_headlines.py, too, and a
#: stopped rank in test_hangs.py.
SAMPLE = [("lose_connection", ("forward", 4), 1, "dp 2")]
#: In a planned step without requests, on the stage that does not run the step function.
IN_PROGRAM = [(kind, ("backward", 7), 0, "pp 2 program") for kind in ("raise", "kill")]

#: What the failure says of each kind.
WORDS = {
    "raise": "InjectedFault",
    "kill": "SIGKILL",
    "stop": "is stopped",
    "lose_connection": "connection",
}


def test_faults_are_read():
    assert parse("") == []
    assert parse("kill@rank=2,step=30,phase=backward; slow_link@seconds=0.5,phase=between;disk_full@bytes=100") == [
        Fault("kill", 2, 30, "backward"),
        Fault("slow_link", phase="between steps", seconds=0.5),
        Fault("disk_full", size=100),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("die", "of no kind among raise, kill, stop"),
        ("kill@when=3", "nothing that a fault has; use phase, rank, step"),
        ("kill@rank=x", "needs a number from 0"),
        ("kill@rank=-1", "needs a number from 0"),
        ("slow_link@seconds=nan", "needs a number from 0"),
        ("stop@phase=lunch", "is no phase; use forward, backward, reduction, optimizer, save, between"),
    ],
)
def test_words_that_mean_no_fault(text, said):
    with pytest.raises(ConfigError, match=said):
        parse(f"kill@rank=1;{text}")


@pytest.mark.job
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kind", "moment", "rank", "topology"),
    [
        pytest.param(*cell, id=f"{cell[0]} {cell[1][0]} {cell[1][1]} rank {cell[2]} {cell[3]}", marks=marks)
        for cell in [*SAMPLE, *IN_PROGRAM, *CELLS]
        for marks in [() if cell in SAMPLE + IN_PROGRAM[:1] else pytest.mark.full]
    ],
)
def test_every_fault_ends_the_job_with_its_rank_and_cause(hanging_job, kind, moment, rank, topology):
    phase, step = moment
    faults = f"{kind}@rank={rank},phase={phase},step={step}"
    ended = hanging_job("", topology, 6.0, {"SMP_FAULTS": faults})
    assert f"rank {rank} " in re.split(r": (?:as rank|SMPRuntimeError)", ended.headline)[0], ended.error
    assert WORDS[kind] in ended.headline, ended.error
    assert f"SMP_FAULTS: in {'between steps' if phase == 'between' else phase} of step {step}" in ended.output
