"""A process that leaves its job and joins again, under each launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import smp_launch
from smp_launch.machine.network import reserved_port

pytestmark = [pytest.mark.job, pytest.mark.timeout(120)]

SCRIPT = """
import torch
import smdistributed.modelparallel.torch as smp

for turn in range(3):
    smp.init({"ddp": True})
    total = torch.ones(())
    torch.distributed.all_reduce(total)
    found = smp.allgather((smp.rank(), total.item()), smp.WORLD)
    smp.barrier()
    if smp.rank() == 0:
        print("turn", turn, found, flush=True)
    smp.shutdown()
    assert not smp.is_initialized()
"""
LAUNCH = ["-m", "smp_launch", "run"]


def _by_variables(script, environ):
    with reserved_port() as port:
        place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [
            subprocess.Popen(
                [sys.executable, script],
                env={**environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        said = [rank.communicate(timeout=90)[0] for rank in ranks]
    return max(rank.returncode for rank in ranks), "".join(said)


def _by_command(command, environ):
    done = subprocess.run(
        command,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=90,
    )
    return done.returncode, done.stdout


def _by_mpirun(words, environ):
    from smp_launch.mpirun.command import OpenMpi

    as_root = {f"{name}_ALLOW_RUN_AS_ROOT{end}": "1" for name in ("OMPI", "PRTE") for end in ("", "_CONFIRM")}
    mpirun = [str(OpenMpi.find(os.environ).path), "-np", "2", "--oversubscribe", "--bind-to", "none"]
    return _by_command([*mpirun, "-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS", *words], {**environ, **as_root})


LAUNCHERS = {
    "variables": _by_variables,
    "torchrun": lambda script, environ: _by_command(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script], environ
    ),
    "smp-launch": lambda script, environ: _by_command([sys.executable, *LAUNCH, "--processes", "2", script], environ),
    "mpirun": lambda script, environ: _by_mpirun([sys.executable, script], environ),
    "mpirun smp-launch": lambda script, environ: _by_mpirun([sys.executable, *LAUNCH, script], environ),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_process_leaves_and_joins_again(launcher, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    others = ("RANK", "WORLD_SIZE", "LOCAL_", "SMP_", "SM_", "OMPI_", "PMI", "MASTER_", "TORCHELASTIC")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    path = str(Path(smp_launch.__file__).parents[1])
    code, said = LAUNCHERS[launcher](
        str(script), {**inherited, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "SMP_TIMEOUT_SECONDS": "30"}
    )
    assert code == 0, said
    turns = [line for line in said.splitlines() if line.startswith("turn")]
    assert turns == [f"turn {turn} [(0, 2.0), (1, 2.0)]" for turn in range(3)]
