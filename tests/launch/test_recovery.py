"""Whole jobs whose ranks are killed: they go on in place, repeat a step at most, and end with the same parameters bit for bit."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.scripts.pooled_script import run_script

pytestmark = pytest.mark.job

SCRIPT = Path(__file__).with_name("recovering_script.py")

#: By name: processes, and the parameters of the library.
TOPOLOGIES = {
    "dp 2": (2, {"ddp": True}),
    "pp 2 × dp 2": (4, {"partitions": 2, "microbatches": 2, "ddp": True}),
    "tp 2 × dp 2": (4, {"tensor_parallel_degree": 2, "ddp": True}),
    # Four numbers are summed in another order by gloo; the job would choose shared memory, and the one beside it not.
    "sharding 4": (4, {"sharded_data_parallel_degree": 4, "ddp": True, "host_collectives": True}),
    "pp 4": (4, {"partitions": 4, "microbatches": 4, "ddp": True}),
}
#: No job of these tests takes longer after the last kill, unless it hangs.
PATIENCE = 150.0
RECOVERS = {
    "SMP_MAX_RESTARTS": "1000",
    "SMP_MEMORY_CHECKPOINT": "1",
    "SMP_MEMORY_CHECKPOINT_STEPS": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Line:
    """A line of a rank's ledger; ``step`` is the next one at a start, and one that is over otherwise."""

    kind: str
    step: int
    pid: int
    when: float


def ledgers(job):
    """What each rank has told so far."""
    found = []
    for path in sorted(output_of(job).glob("ledger.*")):
        lines = [line.split() for line in path.read_text().splitlines()]
        found.append([Line(kind, int(step), int(pid), float(when)) for kind, step, pid, when in lines])
    return found


def states(folder, processes):
    return [torch.load(folder / f"state.{rank}.pt") for rank in range(processes)]


def output_of(job):
    return job.tree() / "output" / "data"


def starts_of(ledger):
    """The lines of each start of a rank."""
    found = []
    for line in ledger:
        if line.kind == "start":
            found.append([])
        found[-1].append(line)
    return found


def most_repeated(job):
    """Steps that any restart has repeated, at most: from the last that a rank had finished to the first that it made again."""
    repeated = 0
    for ledger in ledgers(job):
        for before, after in pairwise(starts_of(ledger)):
            last = max((line.step for line in before if line.kind == "step"), default=before[0].step - 1)
            repeated = max(repeated, last + 1 - after[0].step)
    return repeated


def to_end(running):
    """Wait for a job, which ends well; gives its log."""
    code = running.process.wait(timeout=PATIENCE)
    running.wait()
    assert code == 0, "\n".join(running.log[-60:])
    return "\n".join(running.log)


@pytest.fixture
def train(launcher):
    """Makes the job of a topology: ``train(name, steps, folder)``."""

    def make(name, steps, folder, pause=0.0, loop="own"):
        processes, parameters = TOPOLOGIES[name]
        launcher.folder = folder
        folder.mkdir()
        hyperparameters = {"mp_parameters": parameters, "steps": steps, "pause": pause, "loop": loop}
        return launcher.job(SCRIPT.read_text(), processes, hyperparameters=hyperparameters)

    return make


@pytest.fixture
def undisturbed(ranks, tmp_path):
    """The parameters that a topology has after so many steps without a fault, in a job that nothing supervises."""

    def run(name, steps):
        processes, parameters = TOPOLOGIES[name]
        run_script(ranks, SCRIPT, processes, parameters, tmp_path / "undisturbed", steps=steps)
        return states(tmp_path / "undisturbed", processes)

    return run


def assert_same(found, expected):
    for mine, other in zip(found, expected, strict=True):
        assert mine.keys() == other.keys()
        assert mine
        assert all(torch.equal(mine[name], other[name]) for name in mine)


@pytest.mark.timeout(330)
@pytest.mark.parametrize(
    ("loop", "phase"),
    [
        pytest.param("own", "save", marks=pytest.mark.full),
        pytest.param("steps", "save", marks=pytest.mark.full),
        ("range", "optimizer"),  # smp.auto_resume in a loop of the script's own, which copies when the next step begins
    ],
)
def test_ranks_that_die_between_and_within_steps(launcher, train, undisturbed, tmp_path, loop, phase):
    expected = undisturbed("dp 2", 6)
    job = train("dp 2", 6, tmp_path / "killed", loop=loop)
    faults = f"kill@rank=1,step=3,phase=backward;kill@rank=0,step=5,phase={phase},restart=1"
    text = to_end(launcher.start(job, environment={**RECOVERS, "SMP_FAULTS": faults}))
    assert "failed in step 3: rank 1 (algo-1): was killed by signal 9 (SIGKILL) in backward of step 3" in text
    assert "failed in step 5: rank 0 (algo-1): was killed by signal 9 (SIGKILL)" in text
    assert [line.step for line in ledgers(job)[0] if line.kind == "start"] == [0, 2, 4]
    # Of two ranks in three starts, all but the first are without imports of their own.
    assert [text.count(f"is forked: {forked}") for forked in (False, True)] == [2, 4]
    assert most_repeated(job) <= 1
    assert_same(states(output_of(job), 2), expected)
    assert not [path for path in Path("/dev/shm").glob("smp-launch-*/**/*.head") if path.stat().st_uid == os.geteuid()]


def kill_at_random(launcher, running, job, kills, seed):
    """SIGKILL a rank again and again, each after a step or more; seconds from each kill to the next step that all have finished."""
    chance, seconds, size = random.Random(seed), [], None
    while len(seconds) < kills and running.process.poll() is None:
        time.sleep(0.002)
        found = ledgers(job)
        size = size or len(list(output_of(job).glob("ledger.*")))
        alive = [ledger[-1] for ledger in found if ledger and ledger[-1].kind == "step"]
        if len(alive) < 2 or len(alive) < len(found):
            continue
        time.sleep(chance.uniform(0.0, 0.15))
        victim = chance.choice(alive)
        try:
            os.kill(victim.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        killed = time.monotonic()
        while running.process.poll() is None:
            time.sleep(0.005)
            gone = {old[-1].pid for old in found}
            later = [
                [line.when for line in ledger if line.kind == "step" and line.when > killed and line.pid not in gone]
                for ledger in ledgers(job)
            ]
            if all(later):
                seconds.append(max(map(min, later)) - killed)
                break
    return seconds


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_ranks_that_are_killed_at_random(launcher, train, undisturbed, tmp_path, name):
    kills = int(os.environ.get("SMP_TEST_KILLS", "6"))
    steps = 25 * kills
    expected = undisturbed(name, steps)
    job = train(name, steps, tmp_path / "killed", pause=0.05)
    running = launcher.start(job, environment=RECOVERS)
    seconds = kill_at_random(launcher, running, job, kills, seed=name)
    to_end(running)
    assert len(seconds) >= kills // 2
    assert most_repeated(job) <= 1
    assert_same(states(output_of(job), TOPOLOGIES[name][0]), expected)
    quantile = sorted(seconds)[int(0.95 * (len(seconds) - 1))]
    print(f"\n{name}: {len(seconds)} kills, median {statistics.median(seconds):.2f} s, p95 {quantile:.2f} s")
