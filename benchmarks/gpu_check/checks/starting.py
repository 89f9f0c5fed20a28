"""Starting a job: plain Python, torchrun, the library's launcher and mpirun, each with three steps of a small model."""

from __future__ import annotations

import json
import shutil
import sys
from typing import Any

from gpu_check import environment
from gpu_check.device import is_real
from gpu_check.processes import run_program
from gpu_check.results import emit

#: Lets mpirun start as root, as it runs in containers.
_AS_ROOT = {f"{name}_ALLOW_RUN_AS_ROOT{more}": "1" for name in ("OMPI", "PRTE") for more in ("", "_CONFIRM")}

_MPI = """
import json
try:
    from mpi4py import MPI
    found = {"ok": True, "size": MPI.COMM_WORLD.size, "library": MPI.Get_library_version()[:60]}
except Exception as error:
    found = {"ok": None, "error": str(error).splitlines()[-1]}
print("RESULT " + json.dumps({"case": "mpi4py alone", **found}))
"""


def make_script(name: str, config: dict[str, Any] | None = None, *words: str) -> list[str]:
    """Return the script that trains three steps, with its arguments.

    Args:
        name: of the case.
        config: for ``smp.init``.
        words: more arguments.
    """
    script = environment.PACKAGE / "scripts" / "three_steps.py"
    # smp-launch replaces a pair of braces by a rank's number, so an empty configuration is left out.
    given = ["--config", json.dumps(config)] if config else []
    return [str(script), name, *given, "--device", "cuda" if is_real() else "cpu", *words]


def check_start_plain() -> None:
    """Start by plain Python, also in a script that has started torch.distributed before."""
    name = "plain python"
    run_program(name, [sys.executable, *make_script(name)])
    name = "torch.distributed started before"
    backend = "nccl" if is_real() else "gloo"
    run_program(name, [sys.executable, *make_script(name, {}, "--started", backend)])


def check_start_torchrun() -> None:
    """Start one rank by torchrun."""
    # Without --local-addr it looks up the machine's own name, which may take a minute if no names can be looked up.
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    run_program("torchrun", [*torchrun, "--nproc-per-node", "1", *make_script("torchrun")], timeout=80)


def check_start_launch() -> None:
    """Start one rank, and two, by the library's launcher."""
    configs: dict[int, dict[str, Any]] = {1: {}, 2: {"ddp": True}}
    for size, config in configs.items():
        name = f"smp-launch run, {size}"
        launcher = [sys.executable, "-m", "smp_launch", "run", "--processes", str(size)]
        run_program(name, [*launcher, *make_script(name, config)])


def check_start_mpi() -> None:
    """Import mpi4py without mpirun, then start two ranks by mpirun if there is one."""
    run_program("mpi4py alone", [sys.executable, "-c", _MPI], timeout=30)
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        emit(case="mpirun", ok=None, note="there is none")
        return
    command = [mpirun, "-n", "2", "--oversubscribe", sys.executable, *make_script("mpirun", {"ddp": True})]
    run_program("mpirun", command, environ=_AS_ROOT)
