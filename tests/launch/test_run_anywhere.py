"""``smp-launch run``: ranks of this machine and of a step of SLURM, their first failure, a stop, and the dry run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.scripts import fake_slurm

from smp_launch.anywhere.run_command import run_script

pytestmark = pytest.mark.job

PACKAGES = Path(__file__).resolve().parents[2] / "container"

#: No job of these tests takes longer, unless it hangs.
PATIENCE = 40.0

SCRIPT = """
import json, os, signal, sys, time
rank, (what, *_) = int(os.environ["SMP_RANK"]), sys.argv[1:]
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE SMP_HOST MASTER_ADDR MASTER_PORT SM_HP_MP_PARAMETERS SMP_JOB_SECRET".split()
if what == "tell":
    with open(f"{rank}.json", "w") as file:
        json.dump({"argv": sys.argv[1:], "pid": os.getpid(), **{name: os.environ.get(name) for name in names}}, file)
    sys.exit()
if what == "save" or (what == "raise" and rank != 1):
    def save(*_):
        open(f"{rank}.saved", "w").close()
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
print("rank", rank, "is there", flush=True)
if rank != 1:
    open(f"{rank}.there", "w").close()
if rank == 1:
    if what == "raise":
        until = time.monotonic() + 30
        while not (os.path.exists("0.there") and os.path.exists("2.there")) and time.monotonic() < until:
            time.sleep(0.01)
        raise ValueError("boom")
    if what == "exit":
        os._exit(7)
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
time.sleep(100)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of a script; commands run in it, and see nothing of a batch system or a platform."""
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    fake_slurm.install(tmp_path)
    for name in list(os.environ):
        if name.startswith(("SLURM", "OMPI", "PMI", "PET_", "SM_", "SMP_")) or name in (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
        ):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(PACKAGES))
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path / "no-tree"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*words):
    return [sys.executable, "-m", "smp_launch", "run", *map(str, words)]


def run(*words, environ=None):
    """Exit code and log of a command that ends."""
    done = subprocess.run(
        command(*words),
        env={**os.environ, **(environ or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return done.returncode, done.stdout


def told(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("[0-9].json"))]


def test_ranks_of_this_machine(folder):
    parameters = '{"pipeline_parallel_degree": 2, "ddp": True}'
    code, log = run(
        "--processes", 2, "--parameters", parameters, "train.py", "tell", "--lr", "0.1", "{}", "a{}", "--help"
    )
    assert code == 0, log
    ranks = told(folder)
    assert [rank["RANK"] for rank in ranks] == ["0", "1"]
    assert all(rank["argv"] == ["tell", "--lr", "0.1", "{}", "a{}", "--help"] for rank in ranks)
    assert all(rank["WORLD_SIZE"] == rank["LOCAL_WORLD_SIZE"] == "2" for rank in ranks)
    assert json.loads(ranks[1]["SM_HP_MP_PARAMETERS"])["pipeline_parallel_degree"] == 2
    assert ranks[0]["MASTER_ADDR"] == "127.0.0.1"
    assert ranks[0]["MASTER_PORT"] == ranks[1]["MASTER_PORT"]
    assert ranks[0]["SMP_JOB_SECRET"] == ranks[1]["SMP_JOB_SECRET"]
    assert len(ranks[0]["SMP_JOB_SECRET"]) == 64
    assert ranks[0]["SMP_JOB_SECRET"] not in log


def test_a_secret_that_can_be_guessed_starts_nothing(folder):
    done = CliRunner().invoke(run_script, ["train.py", "tell"], env={"SMP_JOB_SECRET": "hunter2"})
    assert done.exit_code == 2
    assert not told(folder)


@pytest.mark.parametrize(
    ("what", "expected", "cause"),
    [
        pytest.param("raise", 1, "ValueError: boom", id="raise"),
        pytest.param("exit", 7, "ended with exit code 7", id="exit", marks=pytest.mark.full),
        pytest.param("die", 137, "was killed by signal 9 (SIGKILL)", id="die", marks=pytest.mark.full),
    ],
)
def test_the_first_failure_ends_all_ranks_and_is_told(folder, what, expected, cause):
    started = time.monotonic()
    code, log = run("--processes", 3, "--failure-file", "out/failure", "train.py", what)
    assert code == expected, log
    assert time.monotonic() - started < PATIENCE / 2
    assert f"{cause}" in (folder / "out" / "failure").read_text().splitlines()[0]
    assert "smp-launch: failed: rank 1 (" in log
    if what == "raise":  # the others got SIGTERM
        assert (folder / "0.saved").exists()
        assert (folder / "2.saved").exists()


def test_a_stop_reaches_every_rank(folder):
    with subprocess.Popen(command("--processes", 2, "train.py", "save"), stdout=subprocess.PIPE, text=True) as job:
        for _ in range(2):
            assert job.stdout.readline().startswith("rank ")
        job.send_signal(signal.SIGTERM)
        assert job.wait(PATIENCE) == 0
    assert (folder / "0.saved").exists()
    assert (folder / "1.saved").exists()


@pytest.mark.full
def test_ranks_do_not_outlive_a_launcher_that_is_killed(folder):
    with subprocess.Popen(command("--processes", 2, "train.py", "save"), stdout=subprocess.PIPE, text=True) as job:
        for _ in range(2):
            assert job.stdout.readline().startswith("rank ")
        job.kill()
        job.wait(PATIENCE)
    deadline = time.monotonic() + PATIENCE
    while not ((folder / "0.saved").exists() and (folder / "1.saved").exists()):
        assert time.monotonic() < deadline, "SIGTERM has not reached the ranks"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        pytest.param(2, (), id="a task for each rank", marks=pytest.mark.full),
        pytest.param(1, ("--processes", 2), id="a task for each host"),
    ],
)
def test_an_allocation_of_slurm(folder, tasks, words):
    """The command of a batch script, which starts srun by itself; names of hosts are addresses of this machine."""
    code, log = run(
        *words, "train.py", "tell", environ=fake_slurm.allocation(folder, ["127.0.0.1", "127.0.0.2"], tasks)
    )
    assert code == 0, log
    ranks = told(folder)
    assert [rank["RANK"] for rank in ranks] == ["0", "1", "2", "3"]
    assert [rank["LOCAL_RANK"] for rank in ranks] == ["0", "1", "0", "1"]
    assert [rank["SMP_HOST"] for rank in ranks] == ["127.0.0.1"] * 2 + ["127.0.0.2"] * 2
    assert {(rank["WORLD_SIZE"], rank["MASTER_ADDR"]) for rank in ranks} == {("4", "127.0.0.1")}
    assert len({rank["MASTER_PORT"] for rank in ranks}) == 1
    (secret,) = {rank["SMP_JOB_SECRET"] for rank in ranks}
    assert len(secret) == 64


@pytest.mark.full
@pytest.mark.parametrize("tasks", [1, 2])
def test_a_failing_task_of_slurm_ends_the_step(folder, tasks):
    environ = fake_slurm.allocation(folder, ["127.0.0.1", "127.0.0.2"], tasks)
    code, log = run("--processes", 3 - tasks, "train.py", "raise", environ=environ)
    assert code in (1, 143), log  # srun gives the greatest of all tasks
    assert "ValueError: boom" in log


def test_the_dry_run_starts_nothing(folder):
    environ = fake_slurm.allocation(folder, ["node1"])
    environ |= {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "1"}
    environ |= {"SLURM_STEP_NODELIST": "node[1-2]", "SLURMD_NODENAME": "node2", "MASTER_PORT": "29400"}
    words = ["--print", "--processes", "2", "--parameters", '{"ddp": true, "deterministic": true}', "train.py", "tell"]
    done = CliRunner().invoke(run_script, words, env=environ)
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert lines[0] == (
        "surroundings: a step of SLURM (srun): 2 ranks on node2 (2 to 3 of 4); they meet at node1:29400"
    )
    assert lines[1].startswith('parameters: {"ddp": true')
    assert lines[2].startswith("variables of rank 2: ")
    for variable in ("RANK=2", "WORLD_SIZE=4", "SMP_HOST=node2", "MASTER_ADDR=node1", "PYTHONHASHSEED=0"):
        assert f" {variable} " in lines[2] + " "
    assert lines[3].endswith("-- train.py tell")
    assert not told(folder)


@pytest.mark.parametrize(
    ("words", "environ", "said"),
    [
        (("missing.py",), {}, "SCRIPT 'missing.py' is no file in "),
        (("srun",), {}, "SCRIPT 'srun' ends in 'nothing'"),
        (("--processes", 3, "--parameters", '{"pipeline_parallel_degree": 2}', "train.py"), {}, "3 processes"),
        (("--parameters", '{"pipeline_degree": 2}', "train.py"), {}, "pipeline_parallel_degree"),
        (("train.py",), {"SM_HP_MP_PARAMETERS": "{ddp}"}, "SM_HP_MP_PARAMETERS is no JSON"),
        (("train.py",), {"RANK": "0"}, "RANK is 0, but WORLD_SIZE is not set"),
        (("train.py",), {"SLURM_JOB_ID": "1", "PATH": "/nowhere"}, "no folder of PATH has srun"),
    ],
)
def test_what_cannot_start_is_told_before_anything_does(folder, capfd, words, environ, said):
    done = CliRunner().invoke(run_script, list(map(str, words)), env=environ)
    assert done.exit_code == 2
    assert said in capfd.readouterr().err


SHARED = '{"activation_loading_horizon": 3}'
IMPORTS = {
    "2": "import torch.sagemaker as tsm",
    "1": "import smdistributed.modelparallel.torch as smp",
    "helper": "import helper",  # which imports version 2
    "both": "import smdistributed.modelparallel, torch.sagemaker.utils",
    "neither": "import torch",
}


@pytest.mark.parametrize(
    ("imports", "parameters", "version", "said"),
    [
        ("2", SHARED, 2, "imports torch.sagemaker, so the job is one of version 2"),
        ("helper", SHARED, 2, "imports torch.sagemaker, so the job is one of version 2"),
        ("2", "{}", 2, None),
        ("1", SHARED, 1, None),
        ("both", SHARED, 1, "imports both, so they count as version 1"),
        ("neither", SHARED, 1, "shows no import of either, so they count as version 1"),
        ("neither", "{}", 1, None),
        ("2", '{"tensor_parallel_degree": 2}', 2, "tensor_parallel_degree: both versions"),
        ("neither", '{"tensor_parallel_degree": 2, "hybrid_shard_degree": 0}', 2, None),
        ("2", '{"tensor_parallel_degree": 2, "ddp": true}', 1, None),
    ],
)
def test_the_script_decides_on_parameters_of_both_versions(folder, capfd, imports, parameters, version, said):
    (folder / "train.py").write_text(f"def main():\n    {IMPORTS[imports]}\n")
    (folder / "helper.py").write_text("from torch import sagemaker\n")
    words = ["--print", "--processes", "2", "--parameters", parameters, "train.py"]
    done = CliRunner().invoke(run_script, words)
    assert done.exit_code == 0, done.output
    variables = next(line for line in done.output.splitlines() if line.startswith("variables of rank 0"))
    assert ("SM_FRAMEWORK_PARAMS" in variables) == (version == 1), variables
    lines = [line for line in capfd.readouterr().err.splitlines() if "version 2" in line]
    assert (len(lines), said is None or said in lines[0]) == (said is not None, True), lines


FAILS = """
import os, sys, time
from smp_records.rank_record import current_record
count = int(os.environ["SMP_RESTART_COUNT"])
current_record().begin_step()
print("rank", os.environ["SMP_RANK"], "start", count, len(os.environ["SMP_JOB_SECRET"]), flush=True)
started = f"started-{count}"  # rank 1 must not fail before rank 0 has said that it is there
if os.environ["SMP_RANK"] == "0":
    open(started, "w").close()
while not os.path.exists(started):
    time.sleep(0.01)
if os.environ["SMP_RANK"] == "1" and (count == 0 or sys.argv[1] == "always"):
    raise ConnectionError(f"lost after {time.monotonic()} s")
time.sleep(100 if count == 0 else 0)
"""


@pytest.mark.parametrize("when", ["once", pytest.param("always", marks=pytest.mark.full)])
def test_ranks_are_started_again(folder, when):
    (folder / "train.py").write_text(FAILS)
    code, log = run("--processes", 2, "train.py", when, environ={"SMP_MAX_RESTARTS": "5"})
    assert "failed in step 1: rank 1" in log
    assert "(restart 1 of 5)" in log
    assert "rank 0 start 1 64" in log
    assert code == (0 if when == "once" else 1), log
    assert ("the same fault came in step 1 before: the ranks are not started again" in log) == (when == "always")
    assert "restart 2" not in log
