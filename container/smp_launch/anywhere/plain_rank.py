"""The wrapper of a rank of ``smp-launch run``: ``… smp_launch.anywhere.plain_rank 0 -- train.py --epochs 3``.

It sets the rank's variables, whatever launcher the job has, and has the script run to its end. There is no folder tree
of a platform, and the script stays in the folder in which the job was started.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict
from pathlib import Path

from smp_config.machine.interfaces import LOOPBACK, interface_towards
from smp_config.machine.launchers import ADDRESS_VARIABLE, FOREIGN_PREFIXES, PORT_VARIABLE, PROCESS_MODE_VARIABLE
from smp_config.version2.which_version import VERSION_VARIABLE
from smp_launch.anywhere.detect_launcher import DetectedLauncher, LauncherKind
from smp_launch.ranks.script import Program, RankPlace, Wrapper, run_to_end
from smp_launch.ranks.torch_entry_points import make_findable
from smp_launch.sagemaker.environment import cpu_count

#: Passes the detected launcher on to its ranks.
SURROUNDINGS_VARIABLE = "SMP_LAUNCH_SURROUNDINGS"

#: As the training toolkit calls them; the runtime, Transformers and Accelerate read them.
PARAMETERS_VARIABLE = "SM_HP_MP_PARAMETERS"
FRAMEWORK_VARIABLE = "SM_FRAMEWORK_PARAMS"

#: Makes Transformers and Accelerate see that there are ranks.
_WITH_RANKS = '{"sagemaker_mpi_enabled": true}'


def main(arguments: Sequence[str]) -> int:
    """Run the script of this rank.

    Args:
        arguments: ``[local rank, "--", script, *words]``.

    Returns:
        The exit code. If there are other ranks, a failing script ends the process instead.
    """
    place = RankPlace()
    wrapper = Wrapper("smp_launch.anywhere.plain_rank", arguments)
    return run_to_end(place, lambda: enter(place, arguments), wrapper)


def enter(place: RankPlace, arguments: Sequence[str]) -> Program:
    """Make this process the rank of its environment, fill ``place`` and return the rank's program."""
    local, _, script, *words = arguments
    # Taken out: a job that the script itself starts must not take it for its own.
    surroundings = from_text(os.environ.pop(SURROUNDINGS_VARIABLE))
    place.is_supervised = not surroundings.is_rank
    place.is_alone = surroundings.size == 1
    place.host = surroundings.host
    place.rank = rank_of(surroundings, int(local))
    place.has_input = not (surroundings.uses_mpi and _reads_null(os.getppid()))
    prepare(surroundings, int(local), os.environ)
    path = Path(script).absolute()
    make_findable(os.environ, None, smddp=False, libraries=_is_of_version_1(os.environ))
    return Program(path, words, path.parent)


def _reads_null(pid: int) -> bool:
    """Return whether a process has no input: Open MPI 5 holds that of its first rank open without an end then."""
    try:
        return os.readlink(f"/proc/{pid}/fd/0") == os.devnull
    except OSError:
        return False


def rank_of(surroundings: DetectedLauncher, local: int) -> int:
    """Return the number in the job of a rank of this host."""
    return surroundings.first_rank if surroundings.is_rank else surroundings.first_rank + local


def rank_variables(surroundings: DetectedLauncher, local: int, with_parameters: bool) -> dict[str, str]:
    """Return the variables that place this rank, for the runtime, for libraries and for scripts.

    ``LOCAL_RANK`` is left out if the job has parameters of version 1 of the library, as in a job of the platform.
    It would make the Transformers ``Trainer`` start a second, contradicting way of distributing.
    """
    rank = str(rank_of(surroundings, local))
    values = {
        "SMP_RANK": rank,
        "SMP_WORLD_SIZE": str(surroundings.size),
        "SMP_LOCAL_RANK": str(local),
        "SMP_LOCAL_SIZE": str(surroundings.ranks),
        "SMP_HOST": surroundings.host,
        PROCESS_MODE_VARIABLE: str(int(surroundings.is_process_mode)),
    }
    if not surroundings.uses_mpi:
        values |= {
            "RANK": rank,
            "WORLD_SIZE": str(surroundings.size),
            "LOCAL_WORLD_SIZE": str(surroundings.ranks),
            ADDRESS_VARIABLE: surroundings.address,
            PORT_VARIABLE: str(surroundings.port),
        }
    return values if with_parameters else {**values, "LOCAL_RANK": str(local)}


def _is_of_version_1(environ: Mapping[str, str]) -> bool:
    """Return whether the job has parameters of version 1 of the library; those of version 2 leave PyTorch's launch as it is."""
    return bool(environ.get(PARAMETERS_VARIABLE)) and environ.get(VERSION_VARIABLE) != "2"


def prepare(surroundings: DetectedLauncher, local: int, environ: MutableMapping[str, str]) -> None:
    """Make ``environ`` the environment of a rank. The user's settings of threads and interfaces stay."""
    if not surroundings.uses_mpi:
        foreign = [name for name in environ if name.startswith(FOREIGN_PREFIXES)]
        for name in foreign:
            del environ[name]
    with_parameters = _is_of_version_1(environ)
    if with_parameters:
        environ.pop("LOCAL_RANK", None)
        environ.setdefault(FRAMEWORK_VARIABLE, _WITH_RANKS)
    environ.update(rank_variables(surroundings, local, with_parameters))
    threads = max(1, cpu_count() // surroundings.ranks)
    environ.setdefault("OMP_NUM_THREADS", str(threads))
    interface = _interface(surroundings)
    if interface:
        environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _interface(surroundings: DetectedLauncher) -> str | None:
    """Return the network interface over which the ranks meet, or None if gloo may choose it."""
    if not surroundings.one_host:
        return interface_towards(surroundings.address) if surroundings.address else None
    return None if surroundings.uses_mpi else LOOPBACK


def to_text(surroundings: DetectedLauncher) -> str:
    """Return ``surroundings`` as JSON, for an environment variable."""
    return json.dumps(asdict(surroundings))


def from_text(text: str) -> DetectedLauncher:
    """Parse the text that :func:`to_text` returned."""
    given: Mapping[str, object] = json.loads(text)
    return DetectedLauncher(**{**given, "kind": LauncherKind(given["kind"])})  # type: ignore[arg-type]  # as they were written


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
