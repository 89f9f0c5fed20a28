"""Jobs that cannot start: the bootstrap says why in the log and in the failure file, and ends with an error code."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.job

SCRATCH = "SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES"


def remove(name):
    def change(job):
        (job.tree() / name).unlink()

    return change


def set_hyperparameter(name, value):
    def change(job):
        path = job.tree() / "input" / "config" / "hyperparameters.json"
        values = json.loads(path.read_text())
        values.pop(name, None)
        if value is not None:
            values[name] = json.dumps(value)
        path.write_text(json.dumps(values))

    return change


OPTIONS = "sagemaker_mpi_custom_mpi_options"


@pytest.mark.parametrize(
    ("change", "environment", "parts"),
    [
        (remove("code/train.py"), {}, ["entry point 'train.py' does not exist", "relative to source_dir"]),
        (remove("input/config/resourceconfig.json"), {}, ["resourceconfig.json cannot be read"]),
        (
            set_hyperparameter("sagemaker_mpi_num_of_processes_per_host", None),
            {},
            ["processes_per_host is missing"],
        ),
        (None, {SCRATCH: "8193"}, [f"{SCRATCH} is 8193", "8192 or 16384"]),
        (set_hyperparameter(OPTIONS, f"-x {SCRATCH}=1"), {SCRATCH: "8192"}, [f"{SCRATCH} is 1;", "set it to 8192"]),
        (set_hyperparameter(OPTIONS, "--mca btl self --mca btl tcp"), {}, ["'--mca btl self' and '--mca btl tcp'"]),
        (None, {"SMP_LAUNCH_MPIRUN": "/nowhere/mpirun"}, ["/nowhere/mpirun", "pip install"]),
    ],
)
def test_refusals(launcher, change, environment, parts):
    job = launcher.job('print("must not run")')
    if change:
        change(job)
    code, log = launcher.run(job, environment=environment)
    assert code == 2
    said = job.failure()
    assert said.startswith("the job cannot start: ")
    assert all(part in said for part in parts), said
    assert f"smp-launch: failed: {said.strip()}" in log
    assert "must not run" not in log


def test_a_worker_learns_that_its_leader_refused(launcher):
    job = launcher.job("", hosts=2)
    remove("code/train.py")(job)
    leader, worker = launcher.start(job), launcher.start(job, host="algo-2")
    assert (leader.wait(), worker.wait()) == (2, 2)
    assert job.failure("algo-2") == job.failure()


def test_buffer_sizes_reach_the_ranks(launcher):
    job = launcher.job(f'import os; print("scratch", os.environ["{SCRATCH}"])', processes=1, mpi=f"-x {SCRATCH}=16384")
    code, log = launcher.run(job)
    assert (code, "scratch 16384" in log) == (0, True), log
