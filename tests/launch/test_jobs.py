"""Whole jobs with a real mpirun over a temporary tree: what a script sees, and what a host's bootstrap gives back."""

from __future__ import annotations

import json
import time

import pytest

pytestmark = pytest.mark.job

REPORT = """
    import json, os, sys
    import helper
    keep = ("SM_", "SMP_", "OMPI_COMM_WORLD_LOCAL", "RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_", "MASTER_", "GLOO_", "MY_")
    shown = {k: v for k, v in os.environ.items() if k.startswith(keep)}
    shown |= {"argv": sys.argv, "path0": sys.path[0], "cwd": os.getcwd(), "helper": helper.VALUE, "name": __name__}
    print("report", json.dumps(shown))
"""


def reports(log):
    """What the ranks saw, by rank."""
    seen = [json.loads(line.removeprefix("report ")) for line in log if line.startswith("report ")]
    return {int(report["SMP_RANK"]): report for report in seen}


def with_helper(job):
    for host in job.hosts:
        (job.tree(host) / "code" / "helper.py").write_text("VALUE = 7\n")
    return job


def test_two_ranks_print_whole_lines(launcher):
    job = launcher.job(
        """
        import os, sys
        for n in range(200):
            print("rank", os.environ["SMP_RANK"], "of", os.environ["SMP_WORLD_SIZE"], "says", n, "." * 60)
        """
    )
    code, log = launcher.run(job)
    assert (code, job.failure()) == (0, "")
    for rank in (0, 1):
        said = [line for line in log if line.startswith(f"rank {rank} ")]
        assert said == [f"rank {rank} of 2 says {n} {'.' * 60}" for n in range(200)]
    others = [line for line in log if not line.startswith("rank ")]
    assert len(others) == 1
    assert others[0].startswith("smp-launch: 1 host (algo-1) × 2 processes = 2 ranks (mpi, Open MPI ")


def test_a_rank_sees_its_environment_and_arguments(launcher):
    job = with_helper(launcher.job(REPORT, hyperparameters={"lr": 0.1, "epochs": 3, "name": "a b", "x": True}))
    code, log = launcher.run(job, environment={"MY_SETTING": "kept"})
    assert code == 0, log
    seen = reports(log)
    assert sorted(seen) == [0, 1]
    rank = seen[1]
    words = ["--epochs", "3", "--lr", "0.1", "--name", "a b", "-x", "True"]
    code_dir = str(job.tree() / "code")
    assert rank["argv"] == [f"{code_dir}/train.py", *words]
    assert (rank["path0"], rank["cwd"], rank["helper"], rank["name"]) == (code_dir, code_dir, 7, "__main__")
    assert json.loads(rank["SM_USER_ARGS"]) == words
    assert rank["SM_HP_LR"] == "0.1"
    assert json.loads(rank["SM_FRAMEWORK_PARAMS"])["sagemaker_mpi_enabled"] is True
    assert rank["MY_SETTING"] == "kept"
    assert (rank["SMP_LOCAL_RANK"], rank["SMP_LOCAL_SIZE"], rank["SMP_HOST"]) == ("1", "2", "algo-1")
    assert (rank["MASTER_ADDR"], rank["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")
    assert rank["SMP_PROCESS_MODE"] == "1"
    assert int(rank["OMP_NUM_THREADS"]) >= 1
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "SMP_LAUNCH_LAYOUT"} & rank.keys()


def test_two_hosts_on_one_machine(launcher):
    job = with_helper(launcher.job(REPORT, hosts=2))
    worker = launcher.start(job, host="algo-2")
    leader = launcher.start(job, host="algo-1")
    assert (leader.wait(), worker.wait()) == (0, 0), leader.log + worker.log
    seen = reports(leader.log)
    places = {rank: (r["SMP_HOST"], r["SMP_LOCAL_RANK"], r["SM_CURRENT_HOST"]) for rank, r in seen.items()}
    assert places == {
        0: ("algo-1", "0", "algo-1"),
        1: ("algo-1", "1", "algo-1"),
        2: ("algo-2", "0", "algo-2"),
        3: ("algo-2", "1", "algo-2"),
    }
    for report in seen.values():
        tree = str(job.tree(report["SMP_HOST"]))
        assert report["SM_MODEL_DIR"] == f"{tree}/model"
        assert report["cwd"] == f"{tree}/code"
        assert report["OMPI_COMM_WORLD_LOCAL_RANK"] == report["SMP_LOCAL_RANK"]
        assert json.loads(report["SM_RESOURCE_CONFIG"])["current_host"] == report["SMP_HOST"]
        assert report["SM_HOSTS"] == '["algo-1","algo-2"]'


def test_a_worker_tells_the_leader_s_failure(launcher):
    job = launcher.job('import os\nif os.environ["SMP_RANK"] == "3": raise ValueError("boom")', hosts=2)
    leader, worker = launcher.start(job), launcher.start(job, host="algo-2")
    assert (leader.wait(), worker.wait()) == (1, 1)
    for host in job.hosts:
        assert job.failure(host).startswith("rank 3 (algo-2): ValueError: boom\n")


def test_mpi_works_between_simulated_hosts(launcher):
    job = launcher.job(
        """
        from mpi4py import MPI
        world = MPI.COMM_WORLD
        print("sum", world.allreduce(world.rank), len(world.allgather("x" * 100_000)))
        """,
        hosts=2,
        processes=1,
    )
    leader, worker = launcher.start(job), launcher.start(job, host="algo-2")
    assert (leader.wait(), worker.wait()) == (0, 0), leader.log
    assert leader.log.count("sum 1 2") == 2


@pytest.mark.parametrize("kind", ["modelparallel", "dataparallel"])
def test_local_rank_is_only_for_the_data_parallel_library(launcher, kind):
    model = kind == "modelparallel"
    parameters = {"mp_parameters": {"ddp": True}} if model else {"sagemaker_distributed_dataparallel_enabled": True}
    job = with_helper(launcher.job(REPORT, hyperparameters=parameters))
    code, log = launcher.run(job, environment={"LOCAL_RANK": "9"})
    assert code == 0, log
    seen = reports(log)[1]
    if model:
        assert "LOCAL_RANK" not in seen
        assert json.loads(seen["SM_HP_MP_PARAMETERS"]) == {"ddp": True}
        assert "--mp_parameters" in seen["argv"]
        assert "ddp=True" in seen["argv"]
    else:
        assert (seen["LOCAL_RANK"], seen["RANK"], seen["WORLD_SIZE"]) == ("1", "1", "2")


def test_a_job_without_mpi_runs_once_on_every_host(launcher):
    parameters = {"out": "/opt/ml/model/new", "of": "/opt/mlops"}
    job = with_helper(launcher.job(REPORT, processes=None, hosts=2, hyperparameters=parameters))
    hosts = [launcher.start(job, host=host) for host in job.hosts]
    assert [host.wait() for host in hosts] == [0, 0]
    for host, name in zip(hosts, job.hosts, strict=True):
        seen = reports(host.log)[0]
        assert seen["SM_CURRENT_HOST"] == name
        # What the platform calls /opt/ml is the tree of this host.
        there = f"{job.tree(name)}/model/new"
        assert (seen["SM_HP_OUT"], seen["SM_HP_OF"]) == (there, "/opt/mlops")
        assert json.loads(seen["SM_HPS"])["out"] == there
        assert json.loads(seen["SM_USER_ARGS"]) == ["--of", "/opt/mlops", "--out", there]
        assert there in seen["argv"]


def test_a_shell_script(launcher):
    job = launcher.job('echo "rank $SMP_RANK $1 $2"', entry_point="run.sh", hyperparameters={"lr": 1})
    code, log = launcher.run(job)
    assert code == 0, log
    assert {"rank 0 --lr 1", "rank 1 --lr 1"} <= set(log)


def test_a_failing_shell_script(launcher):
    job = launcher.job("exit 7", entry_point="run.sh", processes=1)
    assert launcher.run(job)[0] == 7
    assert job.failure().startswith("rank 0 (algo-1): ScriptError: run.sh ended with exit code 7")


def test_classes_of_the_script_can_be_pickled(launcher):
    job = launcher.job(
        """
        import atexit, pickle
        class Point:
            x = 3
        if __name__ == "__main__":
            print("point", pickle.loads(pickle.dumps(Point())).x)
            atexit.register(lambda: print("late", Point.x))
        """,
        processes=1,
    )
    code, log = launcher.run(job)
    assert (code, {"point 3", "late 3"} <= set(log)) == (0, True), log


def test_a_line_appears_at_once(launcher, tmp_path):
    """Not when a buffer is full or the script ends: it goes on when its line has come."""
    job = launcher.job(
        f"""
        import pathlib, time
        print("now")
        until = time.monotonic() + 60
        while not pathlib.Path({str(tmp_path / "seen")!r}).exists():
            assert time.monotonic() < until, "nobody has seen the line"
            time.sleep(0.01)
        """,
        processes=1,
    )
    running = launcher.start(job)
    running.wait_for("now")
    (tmp_path / "seen").touch()
    assert running.wait() == 0


def test_credentials_are_neither_printed_nor_written(launcher):
    secret = "s3cr3t-" + str(time.time())
    job = launcher.job("raise SystemExit(3)", processes=1)
    environment = {"AWS_SECRET_ACCESS_KEY": secret, "AWS_ACCESS_KEY_ID": "AKIA"}
    running = launcher.start(job, environment=environment)
    assert running.wait() == 3
    assert not any(secret in line for line in running.log)
    for path in job.root.rglob("*"):
        assert not path.is_file() or secret not in path.read_text()


def test_custom_options_reach_mpirun(launcher):
    options = "-verbose -bind-to none --mca orte_base_help_aggregate 0 -x MY_WORD=hello --mca btl_vader_single_copy_mechanism none"
    job = with_helper(launcher.job(REPORT, mpi=options))
    code, log = launcher.run(job)
    assert code == 0, log
    assert reports(log)[1]["MY_WORD"] == "hello"
