"""Jobs over several hosts of which one dies for good: the others go on from memory, with a spare or at a smaller topology."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from support.platform import namespaced_hosts
from support.scripts.pooled_script import run_script

SCRIPT = Path(__file__).with_name("recovering_script.py")
STEPS = 10
#: Seconds in which the training must go on. These tests wait longer, and tell how long it was.
PATIENCE = 150.0
RECOVERS = {
    "SMP_MAX_RESTARTS": "10",
    "SMP_MEMORY_CHECKPOINT": "1",
    "SMP_MEMORY_CHECKPOINT_STEPS": "1",
    "OMP_NUM_THREADS": "1",
}
PP4 = {"partitions": 4, "microbatches": 4, "ddp": True}
SHARDING = {"sharded_data_parallel_degree": 4, "sdp_param_persistence_threshold": 0, "ddp": True}

#: By name: hosts, processes on each, spares, parameters; of the job that goes on: processes, parameters, batch, words of the log.
CASES = {
    "two ranks": (2, 1, 0, {**SHARDING, "sharded_data_parallel_degree": 2}, 1, {**SHARDING, "sharded_data_parallel_degree": 1}, 8,
                  "sharded_data_parallel_degree 2 → 1, replicas 2 → 1"),
    "sharding 4": (2, 2, 0, SHARDING, 2, {**SHARDING, "sharded_data_parallel_degree": 2}, 8,
                   "sharded_data_parallel_degree 4 → 2, replicas 4 → 2"),
    "pp 4": (2, 2, 0, PP4, 2, {**PP4, "partitions": 2}, 4, "pipeline_parallel_degree 4 → 2, replicas 1 → 1"),
    "pp 2 × dp 2": (2, 2, 0, {**PP4, "partitions": 2}, 2, {**PP4, "partitions": 2}, 8, "the same degrees, replicas 2 → 1"),
    "tp 2 × dp 2": (2, 2, 0, {"tensor_parallel_degree": 2, "ddp": True}, 2, {"tensor_parallel_degree": 2, "ddp": True}, 8,
                    "the same degrees, replicas 2 → 1"),
    "three hosts": (3, 1, 0, {**PP4, "partitions": 3}, 2, {**PP4, "partitions": 2}, 4, "pipeline_parallel_degree 3 → 2"),
    "a spare": (3, 1, 1, {**SHARDING, "sharded_data_parallel_degree": 2}, 2, {**SHARDING, "sharded_data_parallel_degree": 2}, 4,
                "algo-3, which was spare, takes its place"),
}  # fmt: skip


def ledger(job, rank, host):
    """What a rank of a host has told so far: kind, step, process and time."""
    path = job.tree(host) / "output" / "data" / f"ledger.{rank}"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(kind, int(step), int(pid), float(when)) for kind, step, pid, when in lines]


def kill_host(job, worker, host, processes):
    """SIGKILL a host's launcher and its ranks, when each has finished four steps; gives when."""
    number = job.hosts.index(host)
    ranks = range(number * processes, (number + 1) * processes)
    deadline = time.monotonic() + PATIENCE
    while not all(any(kind == "step" and step >= 3 for kind, step, *_ in ledger(job, rank, host)) for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    worker.process.send_signal(signal.SIGKILL)
    for rank in ranks:
        os.kill(ledger(job, rank, host)[-1][2], signal.SIGKILL)
    return time.monotonic()


def states(folders, processes):
    """The parameters at the end of all ranks, which may lie in several folders."""
    found = []
    for rank in range(processes):
        paths = [folder / f"state.{rank}.pt" for folder in folders]
        found.append(torch.load(next(path for path in paths if path.exists())))
    return found


@pytest.mark.job
@pytest.mark.timeout(330)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "two ranks" else pytest.mark.full) for name in CASES]
)
def test_a_host_that_dies_for_good(launcher, ranks, tmp_path, name):
    hosts, processes, spares, parameters, left, smaller, batch, said = CASES[name]
    files = tmp_path / "files"
    launcher.folder = tmp_path / "lost"
    launcher.folder.mkdir()
    hyperparameters = {"mp_parameters": parameters, "steps": STEPS, "pause": 0.1, "files": str(files)}
    job = launcher.job(SCRIPT.read_text(), processes, hosts=hosts, hyperparameters=hyperparameters)
    environment = {**RECOVERS, "SMP_SPARE_HOSTS": str(spares)}
    leader, *workers = [launcher.start(job, host=host, environment=environment) for host in job.hosts]
    killed = kill_host(job, workers[0], "algo-2", processes)
    code = leader.process.wait(timeout=PATIENCE)
    text = "\n".join(leader.log)
    assert code == 0, text
    assert [worker.wait() for worker in workers[1:]] == [0] * (hosts - 2)
    assert "host algo-2 is lost; " in text
    assert said in text
    assert "going on from the state in memory, after" in text
    lines = ledger(job, 0, "algo-1")
    begin = [step for kind, step, *_ in lines if kind == "start"]
    last = max(step for kind, step, *_, when in lines if kind == "step" and when < killed)
    assert begin[0] == 0
    assert begin[1] in (last, last + 1, last + 2)  # one that was on its way to the next host is lost with the host
    seconds = min(when for kind, _, _, when in lines if kind == "step" and when > killed + 1) - killed
    print(
        f"\n{name}: {seconds:.1f} s from the loss to the next step, {begin[1]} of {last + 1} finished steps in memory"
    )
    # A job that is resumed from the checkpoint of that step, which nothing supervises, goes on the same.
    resumed_in = tmp_path / "resumed"
    words = {"files": files, "resume": begin[1], "batch": batch, "steps": STEPS}
    run_script(ranks, SCRIPT, left, smaller, resumed_in, **words)
    found = states([job.tree(host) / "output" / "data" for host in job.hosts], left)
    for mine, resumed in zip(found, states([resumed_in], left), strict=True):
        assert mine.keys() == resumed.keys() != set()
        assert all(torch.equal(mine[key], resumed[key]) for key in mine)


@pytest.mark.job
@pytest.mark.full
@pytest.mark.timeout(330)
@pytest.mark.skipif(
    not namespaced_hosts.can_be_made(), reason="hosts with names of their own take root, and an interface"
)
@pytest.mark.parametrize(("hosts", "spares"), [(2, 0), (3, 0), (3, 1)])
def test_a_host_behind_ssh_that_dies_for_good(launcher, tmp_path, hosts, spares):
    """As above with daemons of mpirun, followers and a memory for each host; only ssh and the network are stood in for."""
    namespaced_hosts.make_stand_ins(tmp_path / "ssh")
    hyperparameters = {"mp_parameters": {**SHARDING, "sharded_data_parallel_degree": 2}, "steps": STEPS, "pause": 0.2}
    job = launcher.job(SCRIPT.read_text(), 2, hosts=hosts, hyperparameters=hyperparameters)
    running = []
    for host in job.hosts:
        config = job.tree(host) / "input" / "config" / "resourceconfig.json"
        resources = {**json.loads(config.read_text()), "network_interface_name": namespaced_hosts.interface()[0]}
        job.write_config("resourceconfig", resources, host)
        environment = {
            **RECOVERS,
            "SMP_SPARE_HOSTS": str(spares),
            "SMP_LAUNCH_HOSTS_ON_ONE_MACHINE": "0",
            "SMP_LAUNCH_STATUS_DIR": "",
            "SMP_LAUNCH_TRUSTED_ADDRESSES": "127.0.0.1",
            "SMP_LAUNCH_SSH_PORT": str(free_port()),
            "PATH": f"{tmp_path}/ssh/bin:{os.environ['PATH']}",
        }
        within = partial(namespaced_hosts.command, tmp_path / "ssh", host, job.hosts)
        running.append(launcher.start(job, host=host, environment=environment, within=within))
    leader, lost, *others = running
    deadline = time.monotonic() + PATIENCE
    while not all(
        any(kind == "step" and step >= 3 for kind, step, *_ in ledger(job, rank, "algo-2")) for rank in (2, 3)
    ):
        assert time.monotonic() < deadline, "\n".join(leader.log)
        time.sleep(0.01)
    for pid in namespaced_hosts.processes_of(lost.process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    assert leader.process.wait(timeout=PATIENCE) == 0, "\n".join(leader.log)
    text = "\n".join(leader.log)
    assert "failed in step 4: host algo-2 is gone" in text or "failed in step 5: host algo-2 is gone" in text
    assert "host algo-2 is lost; " in text
    assert "(restart 2 of" not in text  # nor are records of the first start taken for ranks that hang
    assert [other.wait() for other in others] == [0] * (hosts - 2)
    lines = ledger(job, 0, "algo-1")
    assert [step for kind, step, *_ in lines if kind == "start"][1] in (3, 4, 5)
    assert {step for kind, step, *_ in lines if kind == "step"} == set(range(STEPS))
    seconds = min(when for kind, _, _, when in lines if kind == "step" and when > killed + 1) - killed
    print(f"\n{hosts} hosts, {spares} spare: {seconds:.1f} s from the loss to the next step")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
