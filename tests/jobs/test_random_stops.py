"""SIGTERM at any moment of a job: it ends with a whole checkpoint or says that it was stopped, and leaves nothing behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from smp_runtime.checkpoint.files.manifest import whole_checkpoints

pytestmark = pytest.mark.job

PACKAGES = Path(__file__).resolve().parents[2] / "container"
PATIENCE = 60.0
#: Seconds within which a job is stopped: after its start, or, every other time, after its first step.
LATEST = (6.0, 2.0)

SCRIPT = """
import signal
import torch
import smdistributed.modelparallel.torch as smp

smp.init()
model = smp.DistributedModel(torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)]))
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))

@smp.step
def step(x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss

number = 0
while not any(smp.allgather(bool(stopped), smp.WORLD)):
    optimizer.zero_grad()
    step(torch.randn(4, 8))
    optimizer.step()
    number += 1
    if number == 1:
        open(f"trains-{smp.rank()}", "w").close()
    if number % 20 == 0:
        smp.save_checkpoint("checkpoints", tag=str(number), model=model, optimizer=optimizer, num_kept_partial_checkpoints=2)
if number:
    smp.save_checkpoint("checkpoints", tag="last", model=model, optimizer=optimizer, num_kept_partial_checkpoints=2)
print("saved", number, flush=True)
"""


def _alive(mark):
    """Processes that have ``mark`` in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue  # gone, or another user's
    return found


def _stopped(folder, seed):
    """Start a job and stop it at a moment that follows from the seed; gives how it ended."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    mark = f"SMP_TEST_MARK={os.getpid()}-{seed}-{random.SystemRandom().getrandbits(64):x}"
    name, _, value = mark.partition("=")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SM_", "SMP_", "SLURM", "OMPI"))}
    environ |= {"PYTHONPATH": str(PACKAGES), "OMP_NUM_THREADS": "1", name: value}
    command = [sys.executable, "-m", "smp_launch", "run", "--processes", "2", "--failure-file", "failure"]
    parameters = '{"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": true}'
    with (folder / "log").open("w") as log:
        job = subprocess.Popen(
            [*command, "--parameters", parameters, "train.py"],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        until = time.monotonic() + PATIENCE
        while seed % 2 and not (folder / "trains-0").exists() and job.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(random.Random(seed).uniform(0.0, LATEST[seed % 2]))
        job.send_signal(signal.SIGTERM)
        code = job.wait(PATIENCE)
    said = (folder / "log").read_text()
    assert _alive(mark) == [], f"seed {seed}: left over after {code}\n{said}"
    whole = [found.name for found in whole_checkpoints(folder / "checkpoints")]
    left = [p.name for p in (folder / "checkpoints").glob(".*tmp")] if (folder / "checkpoints").is_dir() else []
    if code == 0:
        assert said.count("saved") == 2, said
        assert "saved 0" in said or "last_partial" in whole, f"seed {seed}: {whole}\n{said}"
        assert left == []
        return "saved"
    if code == -signal.SIGTERM:  # before the launcher could hear of it
        assert "smp-launch" not in said, f"seed {seed}\n{said}"
        return "not yet started"
    assert code == 143, f"seed {seed}: {code}\n{said}"
    headline = (folder / "failure").read_text().splitlines()[0]
    assert "stopped by SIGTERM" in headline, f"seed {seed}: {headline}\n{said}"
    return "stopped"


@pytest.mark.full  # one stop runs always: in test_train_gpt.py
@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [12])
def test_a_stop_at_any_moment(tmp_path, count):
    ends = [_stopped(tmp_path / str(seed), seed) for seed in range(1, count + 1)]
    print({end: ends.count(end) for end in set(ends)})
    # Those that trained; the others too, where they came so far.
    assert ends.count("saved") >= count // 2
