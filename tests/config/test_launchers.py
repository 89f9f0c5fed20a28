"""What a process's environment says of the launcher that started it, and what it leaves open."""

from __future__ import annotations

import pytest

from smp_config import ConfigError
from smp_config.machine.launchers import Launcher, Started, is_process_mode, require_meeting_place, started_by

MEETING = {"MASTER_ADDR": "node1", "MASTER_PORT": "29400"}
TORCH = {"RANK": "1", "WORLD_SIZE": "4", **MEETING}
ELASTIC = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "1", **TORCH}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}
#: One task of two, in which a launcher starts two ranks.
SRUN_OF_HOSTS = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        (TORCH, Launcher.TORCH),
        (ELASTIC, Launcher.TORCH),
        (MPIRUN, Launcher.OPEN_MPI),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, Launcher.PMI),
        (SRUN, Launcher.SLURM),
        # srun --mpi=pmi2: its ranks meet like all others where there is a place, else through MPI.
        ({**SRUN, **MEETING, "PMI_RANK": "1", "PMI_SIZE": "4"}, Launcher.SLURM),
        ({**SRUN, "PMI_RANK": "1", "PMI_SIZE": "4"}, Launcher.PMI),
        # Launchers inside others.
        ({**SRUN_OF_HOSTS, **ELASTIC}, Launcher.TORCH),
        ({**SRUN_OF_HOSTS, **TORCH}, Launcher.TORCH),
        ({**SRUN, **TORCH}, Launcher.TORCH),
        ({**SRUN_OF_HOSTS, **MPIRUN}, Launcher.OPEN_MPI),
        ({**MPIRUN, **TORCH}, Launcher.OPEN_MPI),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", **TORCH}, Launcher.TORCH),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", **ELASTIC}, Launcher.TORCH),
        # Ranks of this project's launcher, in tasks that count otherwise.
        ({**SRUN, **TORCH, "SLURM_PROCID": "3", "SMP_RANK": "1", "SMP_WORLD_SIZE": "4"}, Launcher.TORCH),
    ],
)
def test_the_innermost_launcher_holds(environ, launcher):
    assert started_by(environ) == Started(launcher, 1, 4)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        # The shell of an allocation: nothing was started in it yet.
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
    ],
)
def test_a_process_may_be_alone(environ):
    assert started_by(environ) is None


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({"RANK": "1"}, ["RANK is 1", "WORLD_SIZE is not set", "unset RANK"]),
        ({"WORLD_SIZE": "4"}, ["WORLD_SIZE is 4", "RANK is not set"]),
        ({"RANK": "4", "WORLD_SIZE": "4"}, ["RANK is '4'", "WORLD_SIZE is '4'", "count from 0"]),
        ({"RANK": "one", "WORLD_SIZE": "4"}, ["RANK is 'one'"]),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, ["OMPI_COMM_WORLD_SIZE is 4", "OMPI_COMM_WORLD_RANK is not set"]),
        ({"SLURM_STEP_NUM_TASKS": "4"}, ["SLURM_PROCID is not set"]),
        # Exported in the shell from which the job was started: every task would be rank 0.
        ({**SRUN, **TORCH, "RANK": "0"}, ["SLURM_PROCID=1", "RANK=0 and WORLD_SIZE=4", "unset RANK and WORLD_SIZE"]),
        ({**SRUN, **TORCH, "WORLD_SIZE": "2"}, ["SLURM_STEP_NUM_TASKS=4", "RANK=1 and WORLD_SIZE=2"]),
        ({**MPIRUN, **TORCH, "RANK": "0"}, ["OMPI_COMM_WORLD_RANK=1", "RANK=0 and WORLD_SIZE=4"]),
        ({**MPIRUN, **TORCH, "WORLD_SIZE": "8"}, ["OMPI_COMM_WORLD_SIZE=4", "WORLD_SIZE=8"]),
    ],
)
def test_what_is_incomplete_or_contradicts_itself_is_named(environ, names):
    with pytest.raises(ConfigError) as raised:
        started_by(environ)
    for name in names:
        assert name in str(raised.value)


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        (
            {"RANK": "1", "WORLD_SIZE": "4"},
            ["MASTER_ADDR and MASTER_PORT are not set", "RANK=1 and WORLD_SIZE=4", "torchrun"],
        ),
        ({**TORCH, "MASTER_PORT": ""}, ["MASTER_PORT is not set"]),
        (SRUN, ["MASTER_ADDR and MASTER_PORT are", "SLURM_PROCID=1", "srun smp-launch run", "scontrol show hostnames"]),
        ({**SRUN, "MASTER_ADDR": "node1"}, ["MASTER_PORT is not set", "SLURM_STEP_NUM_TASKS=4"]),
        ({**TORCH, "PET_NPROC_PER_NODE": "2"}, ["PET_NPROC_PER_NODE is 2", "WORLD_SIZE is 4", "smp-launch run"]),
    ],
)
def test_ranks_that_could_not_meet_are_told_what_is_missing(environ, names):
    with pytest.raises(ConfigError) as raised:
        require_meeting_place(started_by(environ), environ)
    for name in names:
        assert name in str(raised.value)


@pytest.mark.parametrize("environ", [TORCH, {**SRUN, **MEETING}, {**ELASTIC, "PET_NPROC_PER_NODE": "2"}])
def test_ranks_that_can_meet(environ):
    require_meeting_place(started_by(environ), environ)


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({"SMP_PROCESS_MODE": "1", "SMP_RANK": "1", "SMP_WORLD_SIZE": "4"}, True),
        ({"SMP_PROCESS_MODE": "0", "SMP_RANK": "1", "SMP_WORLD_SIZE": "4"}, False),
        ({"SMP_RANK": "1", "SMP_WORLD_SIZE": "4"}, False),
        # Inherited by a rank that another launcher has started below one of ours.
        ({"SMP_PROCESS_MODE": "1", "SMP_RANK": "0", "SMP_WORLD_SIZE": "1", **TORCH}, False),
        ({}, False),
    ],
)
def test_process_mode_is_that_of_the_launcher_that_started_this_rank(environ, found):
    assert is_process_mode(environ, 1, 4) is found
