"""The wrapper around the user's script in every rank: ``isolated.py smp_launch.ranks.rank -- train.py --epochs 3``.

It sets the environment of the rank's host, and has the script run to its end.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from smp_config.machine.launchers import PROCESS_MODE_VARIABLE, TRAITS
from smp_config.recovery import FOLDER_VARIABLE, PARAMETERS_VARIABLE
from smp_launch.errors import LaunchError
from smp_launch.machine.hosts import LAYOUT_VARIABLE, Layout, ScriptKind
from smp_launch.machine.network import network_defaults, usable_interface
from smp_launch.machine.rank_pipes import REPORT_VARIABLE
from smp_launch.ranks.script import Program, RankPlace, Wrapper, run_to_end
from smp_launch.ranks.torch_entry_points import make_findable
from smp_launch.sagemaker.environment import HOST_VARIABLE, TrainingEnvironment, cpu_count
from smp_launch.sagemaker.tree import BASE_VARIABLE, Tree

#: Variables in which the known launchers set this rank's number.
_RANK_VARIABLES = (*(traits.place[0] for traits in TRAITS.values() if traits.speaks_mpi), "PMIX_RANK")

_LOCALHOST = "127.0.0.1"


def main(arguments: Sequence[str]) -> int:
    """Run the script of this rank.

    Args:
        arguments: ``["--", script, *words]``.

    Returns:
        The exit code; where mpirun runs the ranks, a failing script ends the process instead.
    """
    place = RankPlace()
    return run_to_end(place, lambda: enter(place, arguments), Wrapper("smp_launch.ranks.rank", arguments))


def enter(place: RankPlace, arguments: Sequence[str]) -> Program:
    """Make this process the rank of its environment, fill ``place`` and return the rank's program."""
    words = list(arguments)
    if words[:1] == ["--"]:
        words = words[1:]
    layout = Layout.from_environment(os.environ)
    place.is_alone = layout.kind is ScriptKind.SCRIPT
    place.rank = _rank_of(layout, os.environ)
    place.host = layout.host_of(place.rank)
    place.has_input = False
    if not place.is_alone and REPORT_VARIABLE in os.environ:
        place.pipes = Path(os.environ[REPORT_VARIABLE])
    tree = _prepare(layout, place.rank, os.environ)
    os.chdir(tree.code_dir)
    return Program(tree.code_dir / words[0], [tree.place(word) for word in words[1:]], tree.code_dir)


def rank_variables(layout: Layout, rank: int, interface: str, cores: int) -> dict[str, str]:
    """Return the variables that place this rank, for the runtime, for libraries and for scripts.

    ``LOCAL_RANK`` is only for the data parallel library, and for version 2 of the model parallel one. With version 1 it would
    make the Transformers ``Trainer`` start a second, contradicting way of distributing.
    """
    local = str(layout.local_rank_of(rank))
    values = {
        "SMP_RANK": str(rank),
        "SMP_WORLD_SIZE": str(layout.world_size),
        "SMP_LOCAL_RANK": local,
        "SMP_LOCAL_SIZE": str(layout.processes_per_host),
        "SMP_HOST": layout.host_of(rank),
        PROCESS_MODE_VARIABLE: str(int(layout.simulated and len(layout.hosts) == 1)),
        "OMP_NUM_THREADS": str(layout.threads_per_rank(cores)),
        "MASTER_ADDR": _LOCALHOST if layout.one_machine else layout.leader,
        "GLOO_SOCKET_IFNAME": interface,
    }
    if layout.kind is not ScriptKind.SCRIPT:
        # Open MPI counts per machine; simulated hosts share one.
        values |= {"OMPI_COMM_WORLD_LOCAL_RANK": local, "OMPI_COMM_WORLD_LOCAL_SIZE": str(layout.processes_per_host)}
    if layout.kind in (ScriptKind.DATA_PARALLEL, ScriptKind.VERSION_2):
        values |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(layout.world_size),
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": str(layout.processes_per_host),
        }
    if layout.kind is ScriptKind.DATA_PARALLEL:
        values["SMDATAPARALLEL_LOCAL_RANK"] = local
    if layout.kind is ScriptKind.VERSION_2:
        values |= {
            "GROUP_RANK": str(layout.hosts.index(layout.host_of(rank))),
            "GROUP_WORLD_SIZE": str(len(layout.hosts)),
        }
    return values


#: Variables that keep the user's own value.
_USER_MAY_SET = frozenset({"OMP_NUM_THREADS", "MASTER_ADDR", "GLOO_SOCKET_IFNAME"})


def _prepare(layout: Layout, rank: int, environ: MutableMapping[str, str]) -> Tree:
    """Make ``environ`` the environment of this rank on its host, and return the host's tree."""
    host = layout.host_of(rank)
    here = environ.get(HOST_VARIABLE) or layout.leader
    tree = Tree.from_environment(environ)
    if layout.simulated:
        tree = tree.of_host(host, here)
    elif here != host:
        raise LaunchError(
            f"rank {rank} runs on host {here!r}, but belongs to {host!r}: with {layout.processes_per_host} process(es) per host "
            "the ranks are laid over the hosts in blocks, and mpirun was told otherwise; remove options such as --map-by "
            "and --rank-by from custom_mpi_options",
            code="SMP202",
        )
    training = TrainingEnvironment.read(tree, environ, host)
    if layout.kind is not ScriptKind.SCRIPT and tuple(training.hosts) != layout.hosts:
        now = environ.get(PARAMETERS_VARIABLE)
        parameters = json.loads(now) if now else None
        training = training.over(layout.hosts, parameters)
    if layout.simulated and environ.get(FOLDER_VARIABLE):
        # The memory of a host is its own, and ends with it.
        folder = Path(environ[FOLDER_VARIABLE], host)
        folder.mkdir(mode=0o700, exist_ok=True)
        environ[FOLDER_VARIABLE] = str(folder)
    interface = usable_interface(training.network_interface, layout.one_machine)
    wanted = rank_variables(layout, rank, interface, cpu_count())
    for name in _USER_MAY_SET & environ.keys():
        wanted.pop(name)
    if layout.kind is ScriptKind.MODEL_PARALLEL:
        environ.pop("LOCAL_RANK", None)
    environ.pop(LAYOUT_VARIABLE, None)
    hosts = 1 if layout.one_machine else len(layout.hosts)
    for name, value in network_defaults(training.instance_type, interface, hosts).items():
        environ.setdefault(name, value)
    environ.update(training.variables())
    environ.update(wanted)
    environ[HOST_VARIABLE] = host
    environ[BASE_VARIABLE] = str(tree.base)
    environ["SMP_CHECKPOINT_DIR"] = str(tree.base / "checkpoints")
    make_findable(
        environ,
        tree.code_dir,
        smddp=layout.kind is ScriptKind.DATA_PARALLEL,
        libraries=layout.kind is ScriptKind.MODEL_PARALLEL,
    )
    return tree


def _rank_of(layout: Layout, environ: MutableMapping[str, str]) -> int:
    if layout.kind is ScriptKind.SCRIPT:
        return 0
    for name in _RANK_VARIABLES:
        if name in environ:
            return int(environ[name])
    raise LaunchError(
        f"this process does not know its rank: none of {', '.join(_RANK_VARIABLES)} is set, as mpirun of Open MPI does for "
        "every process it starts; start the job with 'python -m smp_launch train'",
        code="SMP202",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
