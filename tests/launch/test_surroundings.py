"""What ``smp-launch run`` recognises around it, from environments as the launchers leave them."""

from __future__ import annotations

import json
import socket

import pytest

from smp_config import ConfigError
from smp_config.machine.interfaces import LOOPBACK, interface_towards, list_addresses
from smp_launch.anywhere.detect_launcher import LauncherKind, LauncherSettings, recognise
from smp_launch.anywhere.plain_rank import prepare, rank_variables
from smp_launch.machine.network import derived_port, first_host

HERE = socket.gethostname()
MEETING = {"MASTER_ADDR": "node01", "MASTER_PORT": "29400"}
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "node02",
}
#: Task 3 of 4, two for each host; and the only one of the second host.
TASK = {
    **STEP,
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
HOST = {
    **STEP,
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
POD = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "MASTER_ADDR": "gpt-master-0",
    "MASTER_PORT": "23456",
    "RANK": "1",
    "PET_NODE_RANK": "1",
    "PET_NNODES": "2",
}
STEP_PORT = derived_port("4711", "0")


def seen(environ, **given):
    found = recognise(
        {"SAGEMAKER_BASE_DIR": "/nowhere", "CUDA_VISIBLE_DEVICES": "", **environ}, LauncherSettings(**given)
    )
    place = (found.kind, found.is_rank, found.first_rank, found.ranks, found.size)
    return place, (found.host, found.address, found.port)


@pytest.mark.parametrize(
    ("environ", "given", "place", "where"),
    [
        ({}, {}, (LauncherKind.MACHINE, False, 0, 1, 1), (HERE, "127.0.0.1", 0)),
        ({}, {"processes": 4}, (LauncherKind.MACHINE, False, 0, 4, 4), (HERE, "127.0.0.1", 0)),
        (
            {},
            {"processes": 2, "hosts": 3, "host_rank": 1, "master": "10.0.0.5:29400"},
            (LauncherKind.OPTIONS, False, 2, 2, 6),
            (f"{HERE}-1", "10.0.0.5", 29400),
        ),
        (TASK, {}, (LauncherKind.SLURM_STEP, True, 3, 2, 4), ("node02", "node01", STEP_PORT)),
        ({**TASK, **MEETING}, {}, (LauncherKind.SLURM_STEP, True, 3, 2, 4), ("node02", "node01", 29400)),
        # srun --mpi=pmi2, which may be the default of a cluster.
        (
            {**TASK, "PMI_RANK": "3", "PMI_SIZE": "4"},
            {},
            (LauncherKind.SLURM_STEP, True, 3, 2, 4),
            ("node02", "node01", STEP_PORT),
        ),
        (HOST, {"processes": 4}, (LauncherKind.SLURM_STEP, False, 4, 4, 8), ("node02", "node01", STEP_PORT)),
        (HOST, {}, (LauncherKind.SLURM_STEP, False, 1, 1, 2), ("node02", "node01", STEP_PORT)),
        # A shell inside a step of one task.
        (
            {**HOST, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": "0"},
            {"processes": 2},
            (LauncherKind.SLURM_STEP, False, 0, 2, 2),
            ("node02", "127.0.0.1", 0),
        ),
        (
            {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
            {},
            (LauncherKind.SLURM_ALLOCATION, False, 0, 0, 0),
            (HERE, "", 0),
        ),
        (
            {
                "TORCHELASTIC_RUN_ID": "x",
                "RANK": "3",
                "WORLD_SIZE": "4",
                "LOCAL_RANK": "1",
                "LOCAL_WORLD_SIZE": "2",
                **MEETING,
            },
            {},
            (LauncherKind.TORCH, True, 3, 2, 4),
            (HERE, "node01", 29400),
        ),
        # Agents of torchrun are hosts, whatever their names.
        (
            {
                "TORCHELASTIC_RUN_ID": "x",
                "RANK": "3",
                "WORLD_SIZE": "4",
                "LOCAL_RANK": "1",
                "LOCAL_WORLD_SIZE": "2",
                "GROUP_RANK": "1",
                "GROUP_WORLD_SIZE": "2",
                **HOST,
                **MEETING,
                "SLURMD_NODENAME": "",
            },
            {},
            (LauncherKind.TORCH, True, 3, 2, 4),
            (f"{HERE}-1", "node01", 29400),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            {},
            (LauncherKind.MPI, True, 3, 2, 4),
            (HERE, "", 0),
        ),
        # WORLD_SIZE is that of ranks, RANK that of pods.
        (
            {**POD, "WORLD_SIZE": "8", "PET_NPROC_PER_NODE": "4"},
            {},
            (LauncherKind.KUBERNETES, False, 4, 4, 8),
            (HERE, "gpt-master-0", 23456),
        ),
        (
            {**POD, "WORLD_SIZE": "2", "PET_NPROC_PER_NODE": "auto"},
            {"processes": 2},
            (LauncherKind.KUBERNETES, False, 2, 2, 4),
            (HERE, "gpt-master-0", 23456),
        ),
        # An operator that sets the variables of torch.distributed alone.
        (
            {
                "KUBERNETES_SERVICE_HOST": "10.0.0.1",
                "RANK": "1",
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "gpt-master-0",
                "MASTER_PORT": "23456",
            },
            {},
            (LauncherKind.KUBERNETES, False, 1, 1, 2),
            (HERE, "gpt-master-0", 23456),
        ),
        # The second version of the operator: torchrun's arguments.
        (
            {
                "PET_NODE_RANK": "0",
                "PET_NNODES": "2",
                "PET_NPROC_PER_NODE": "2",
                "PET_MASTER_ADDR": "gpt-node-0-0.gpt",
                "PET_MASTER_PORT": "29400",
            },
            {},
            (LauncherKind.KUBERNETES, False, 0, 2, 4),
            (HERE, "gpt-node-0-0.gpt", 29400),
        ),
    ],
)
def test_what_is_recognised(environ, given, place, where):
    assert seen(environ, **given) == (place, where)


def test_a_sagemaker_job(tmp_path):
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True)
    (config / "resourceconfig.json").write_text(json.dumps({"hosts": ["algo-1", "algo-2"], "current_host": "algo-1"}))
    environ = {"SAGEMAKER_BASE_DIR": str(tmp_path), "CURRENT_HOST": "algo-2", "TRAINING_JOB_NAME": "gpt"}
    place, where = seen(environ, processes=2)
    assert place == (LauncherKind.SAGEMAKER, False, 2, 2, 4)
    assert where == ("algo-2", "algo-1", derived_port("gpt", "algo-1", "algo-2"))
    assert seen({**environ, "MASTER_PORT": "7777"})[1] == ("algo-2", "algo-1", 7777)
    with pytest.raises(ConfigError, match="this host is 'algo-3'"):
        seen({**environ, "CURRENT_HOST": "algo-3"})


@pytest.mark.parametrize(
    ("environ", "given", "words"),
    [
        ({"RANK": "1"}, {}, ["RANK is 1", "WORLD_SIZE is not set"]),
        ({"RANK": "1", "WORLD_SIZE": "2"}, {}, ["MASTER_ADDR is ''", "RANK=1 and WORLD_SIZE=2"]),
        (TASK, {"processes": 2}, ["--processes is 2", "SLURM_PROCID=3 and SLURM_STEP_NUM_TASKS=4"]),
        ({**TASK, "SLURM_JOB_ID": ""}, {}, ["SLURM_JOB_ID and SLURM_STEP_ID", "MASTER_PORT"]),
        ({**TASK, **MEETING, "MASTER_PORT": "http"}, {}, ["MASTER_PORT is 'http'"]),
        ({**TASK, **MEETING, "RANK": "0", "WORLD_SIZE": "4"}, {}, ["SLURM_PROCID=3", "RANK=0 and WORLD_SIZE=4"]),
        ({}, {"hosts": 2}, ["--host-rank and --master are missing"]),
        ({}, {"hosts": 2, "host_rank": 2, "master": "a:1"}, ["--host-rank is 2", "--hosts is 2"]),
        ({}, {"hosts": 2, "host_rank": 1, "master": "a"}, ["--master is 'a'", "ADDRESS:PORT"]),
        (
            {"PET_RDZV_ENDPOINT": "gpt-worker-0:29400", "PET_NNODES": "1:2"},
            {},
            ["elasticPolicy", "torchrun --no-python"],
        ),
        ({**POD, "PET_NNODES": "1"}, {}, ["pod is number '1' of '1'", "PET_NODE_RANK and PET_NNODES"]),
        ({**POD, "MASTER_ADDR": ""}, {}, ["pod 1 of 2", "MASTER_ADDR is ''"]),
        (
            {**HOST, "SLURM_STEP_NODELIST": "", "MASTER_PORT": "29400"},
            {},
            ["SLURM_STEP_NODELIST is ''", "MASTER_ADDR and MASTER_PORT"],
        ),
    ],
)
def test_a_wrong_environment_is_named_by_its_variables(environ, given, words):
    with pytest.raises(ConfigError) as raised:
        seen(environ, **given)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node01", "node01"),
        ("node[03-05,09],gpu1", "node03"),
        ("gpu1,node[03-05]", "gpu1"),
        ("rack[1-2]node[07,09]", "rack1node07"),
        ("n[1-2].cluster", "n1.cluster"),
    ],
)
def test_the_first_host_of_a_list_of_slurm(hosts, first):
    assert first_host(hosts) == first


def test_derived_ports_differ_between_steps_and_stay_below_those_of_connections():
    ports = {derived_port(str(job), str(step)) for job in range(50) for step in range(4)}
    assert len(ports) > 190
    assert min(ports) >= 20000
    assert max(ports) < 32768


def test_what_a_rank_gets():
    here = recognise(HOST, LauncherSettings(processes=2))
    assert rank_variables(here, 1, with_parameters=False) == {
        "SMP_RANK": "3",
        "SMP_WORLD_SIZE": "4",
        "SMP_LOCAL_RANK": "1",
        "SMP_LOCAL_SIZE": "2",
        "SMP_HOST": "node02",
        "SMP_PROCESS_MODE": "0",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "node01",
        "MASTER_PORT": str(STEP_PORT),
    }
    assert (
        rank_variables(recognise({}, LauncherSettings(processes=2)), 1, with_parameters=False)["SMP_PROCESS_MODE"]
        == "1"
    )
    # Transformers' Trainer would distribute a second time.
    assert "LOCAL_RANK" not in rank_variables(here, 1, with_parameters=True)


def test_variables_of_other_launchers_do_not_reach_ranks_that_they_have_not_started():
    environ = {**HOST, "PMIX_RANK": "1", "PMI_RANK": "1", "PET_NNODES": "2", "OMP_NUM_THREADS": "3", "LOCAL_RANK": "0"}
    environ["SM_HP_MP_PARAMETERS"] = '{"ddp": true}'
    prepare(recognise(HOST, LauncherSettings(processes=2)), 0, environ)
    assert not {"PMIX_RANK", "PMI_RANK", "PET_NNODES", "LOCAL_RANK"} & environ.keys()
    assert environ["OMP_NUM_THREADS"] == "3"
    assert json.loads(environ["SM_FRAMEWORK_PARAMS"]) == {"sagemaker_mpi_enabled": True}


def test_the_interface_towards_another_host():
    assert interface_towards("127.0.0.1") is None  # it leads nowhere else
    for name, address in list_addresses().items():
        if name != LOOPBACK:
            assert interface_towards(address) == name
