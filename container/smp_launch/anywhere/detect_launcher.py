"""Detection of the launcher around ``smp-launch run``: a batch system, an operator, another launcher or none.

Everything is read from the environment. Two answers are possible. Either this process *is* a rank, because its launcher
has started one process for each rank. Or it stands for a host, and starts the ranks of that host.

A launcher is added to the list of detections, or to the table of what ranks know of their host.
"""

from __future__ import annotations

import enum
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from smp_config.errors import ConfigError
from smp_config.formats.values import is_count
from smp_config.machine.launchers import (
    ADDRESS_VARIABLE,
    ELASTIC_VARIABLE,
    POD_PROCESSES_VARIABLE,
    PORT_VARIABLE,
    TRAITS,
    Launcher,
    Started,
    place_of,
    started_by,
)
from smp_launch.machine.network import derived_port, first_host
from smp_launch.sagemaker.environment import HOST_VARIABLE, gpu_count
from smp_launch.sagemaker.platform_files import check_resources
from smp_launch.sagemaker.tree import Tree

#: The same in every task of a step, by which its port is derived.
_STEP_VARIABLES = ("SLURM_JOB_ID", "SLURM_STEP_ID")

#: Of torchrun's arguments, as an operator of Kubernetes hands them to pods.
_POD_RANK, _PODS, _RENDEZVOUS = "PET_NODE_RANK", "PET_NNODES", "PET_RDZV_ENDPOINT"
_POD_ADDRESS, _POD_PORT = "PET_MASTER_ADDR", "PET_MASTER_PORT"


class LauncherKind(str, enum.Enum):
    """The kind of launcher that was detected; the value is its name for people."""

    OPTIONS = "--hosts and --host-rank"
    MPI = "mpirun"
    TORCH = "torchrun, or another launcher that sets RANK and WORLD_SIZE"
    SLURM_STEP = "a step of SLURM (srun)"
    SLURM_ALLOCATION = "an allocation of SLURM, before srun"
    KUBERNETES = "a pod of Kubernetes' training operator"
    SAGEMAKER = "a SageMaker job"
    MACHINE = "this machine alone"


@dataclass(frozen=True)
class TaskStarter:
    """The command of a batch system that starts one process for each host or rank.

    Attributes:
        command: the words before the command that is started.
        variable: of the environment, by which the allocation was detected.
        place: the name of the allocation for people.
    """

    command: tuple[str, ...]
    variable: str
    place: str


_STARTERS: Mapping[LauncherKind, TaskStarter] = {
    # A task that fails ends the step. By default SLURM lets the others go on, unless its administrator set otherwise.
    LauncherKind.SLURM_ALLOCATION: TaskStarter(
        ("srun", "--kill-on-bad-exit=1"), "SLURM_JOB_ID", "an allocation of SLURM"
    ),
}


@dataclass(frozen=True)
class LauncherSettings:
    """Options of the command line; None if an option is missing.

    Attributes:
        processes: number of ranks on this host; None for one per GPU, or 1 without a GPU.
        hosts: number of hosts.
        host_rank: number of this host, from 0.
        master: ``ADDRESS:PORT`` on the first host, where the ranks meet.
    """

    processes: int | None = None
    hosts: int | None = None
    host_rank: int | None = None
    master: str | None = None


@dataclass(frozen=True)
class DetectedLauncher:
    """Placement of a job's ranks, seen from one process.

    Attributes:
        host: name of this host, the same for all of its ranks and for no other host.
        ranks: number of ranks on this host. This process starts them, or is one of them.
        first_rank: number of the first rank on this host; if this process is a rank, its own number.
        size: number of ranks of the job; 0 in an allocation, before its steps set the number.
        is_rank: whether this process is a rank.
        local_rank: number of this rank on its host, if this process is a rank.
        address: address where the ranks meet; empty if MPI connects them.
        port: port at ``address``; 0 for any free port.
    """

    kind: LauncherKind
    host: str
    ranks: int
    first_rank: int
    size: int
    is_rank: bool = False
    local_rank: int = 0
    address: str = ""
    port: int = 0

    @property
    def uses_mpi(self) -> bool:
        """Return whether MPI connects the ranks."""
        return self.kind is LauncherKind.MPI

    @property
    def starter(self) -> TaskStarter | None:
        """Return the command that starts the job's processes, if this one is before all of them."""
        return _STARTERS.get(self.kind)

    @property
    def is_platform_job(self) -> bool:
        """Return whether the platform has written the job's hyperparameters on this host."""
        return self.kind is LauncherKind.SAGEMAKER

    @property
    def is_process_mode(self) -> bool:
        """Return whether this process starts all ranks of the job, with no other launcher around it."""
        return self.kind is LauncherKind.MACHINE

    @property
    def one_host(self) -> bool:
        """Return whether all ranks run on this host."""
        return self.ranks == self.size

    def describe(self) -> str:
        """Describe the placement for the log.

        For example, ``a step of SLURM (srun): 2 ranks here (2 to 3 of 4), which meet at node1:29400``.
        """
        if self.starter is not None:
            return f"{self.kind.value}, on {self.host}"
        last = self.first_rank + self.ranks - 1
        if self.is_rank:
            here = f"rank {self.first_rank} of {self.size}, on {self.host}"
        elif self.ranks == 1:
            here = f"1 rank on {self.host} ({self.first_rank} of {self.size})"
        else:
            here = f"{self.ranks} ranks on {self.host} ({self.first_rank} to {last} of {self.size})"
        if self.uses_mpi:
            return f"{self.kind.value}: {here}; MPI brings the ranks together"
        meet = f"; they meet at {self.address}:{self.port or 'a free port'}" if self.size > 1 else ""
        return f"{self.kind.value}: {here}{meet}"


def recognise(environ: Mapping[str, str], given: LauncherSettings) -> DetectedLauncher:
    """Detect the launcher or batch system around this process.

    Raises:
        ConfigError: the environment is incomplete or contradicts itself, or the command line contradicts it.
    """
    for detect in _DETECTIONS:
        found = detect(environ, given)
        if found is not None:
            return found
    return _of_machine(environ, given)


def _of_started_rank(environ: Mapping[str, str], given: LauncherSettings) -> DetectedLauncher | None:
    """Detect a launcher that has started one process for each rank."""
    # A step always has a place to meet, so that its tasks need no MPI, whatever srun sets for one.
    has_place = {ADDRESS_VARIABLE: "the first host", PORT_VARIABLE: "1"} if environ.get("SLURM_STEP_ID") else {}
    started = started_by({**has_place, **environ})
    if started is None:
        return None
    # One task of a step for each host is a host; several are ranks.
    if started.launcher is Launcher.SLURM and _tasks_are_hosts(environ):
        return None
    if (given.processes or 1) > 1:
        raise ConfigError(
            f"--processes is {given.processes}, but {started.said}: {started.launcher.value} has started one process for each rank "
            "already, and this is one of them; leave --processes out, and let the outer launcher start as many, or start one per "
            "host",
            code="SMP107",
        )
    return _of_rank(started, environ)


def _of_allocation(environ: Mapping[str, str], given: LauncherSettings) -> DetectedLauncher | None:
    """Detect a batch system that has started nothing yet."""
    if environ.get(ELASTIC_VARIABLE):
        return None  # torchrun has started this process
    for kind, starter in _STARTERS.items():
        if environ.get(starter.variable):
            return DetectedLauncher(kind, _host_name(environ), 0, 0, 0)
    return None


def place_of_step(environ: Mapping[str, str]) -> Started | None:
    """Return this process's place among the tasks of its SLURM step, or None outside a step.

    A step may have only one task.
    """
    if not environ.get("SLURM_STEP_ID"):
        return None
    tasks = environ.get("SLURM_STEP_NUM_TASKS")
    if not tasks:
        return None
    if tasks == "1":
        return Started(Launcher.SLURM, 0, 1)
    return place_of(Launcher.SLURM, environ)


# -- each of them ------------------------------------------------------------------------------------------------------


def _of_options(environ: Mapping[str, str], given: LauncherSettings) -> DetectedLauncher | None:
    is_given = any(option is not None for option in (given.hosts, given.host_rank, given.master))
    if not is_given:
        return None
    hosts, mine = given.hosts, given.host_rank
    if hosts is None or mine is None or not given.master:
        missing = [
            name
            for name, value in (("--hosts", hosts), ("--host-rank", mine), ("--master", given.master))
            if value is None
        ]
        raise ConfigError(
            f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing: --hosts, --host-rank and --master together "
            "say where this host stands among others; give all three on every host, with another --host-rank on each, or none",
            code="SMP107",
        )
    if not 0 <= mine < hosts:
        raise ConfigError(
            f"--host-rank is {mine}, but --hosts is {hosts}: hosts count from 0 to {hosts - 1}; correct one",
            code="SMP107",
        )
    address, colon, port = given.master.rpartition(":")
    if not colon or not address or not is_count(port):
        raise ConfigError(
            f"--master is {given.master!r}; the ranks of all hosts meet there: write ADDRESS:PORT, with an address of the host of "
            "--host-rank 0 that all reach, and a port that is free there",
            code="SMP107",
        )
    ranks = _ranks(environ, given)
    host = environ.get("SMP_HOST") or f"{socket.gethostname()}-{mine}"
    return DetectedLauncher(
        LauncherKind.OPTIONS, host, ranks, mine * ranks, hosts * ranks, address=address, port=int(port)
    )


def _is_pod(environ: Mapping[str, str]) -> bool:
    """Return whether an operator has numbered this pod among several and no ranks run in it yet."""
    of_ranks = (ELASTIC_VARIABLE, TRAITS[Launcher.TORCH].local_rank, TRAITS[Launcher.OPEN_MPI].place[1])
    has_ranks = not environ.keys().isdisjoint(of_ranks)
    if has_ranks:
        return False
    is_numbered = not environ.keys().isdisjoint((_POD_RANK, _RENDEZVOUS, POD_PROCESSES_VARIABLE))
    if is_numbered:
        return True
    # Operators before 1.6 set only the names that torchrun uses too, so these count in a cluster alone.
    return environ.keys() >= {"KUBERNETES_SERVICE_HOST", "RANK", "WORLD_SIZE"}


def _of_pod(environ: Mapping[str, str], given: LauncherSettings) -> DetectedLauncher | None:
    if not _is_pod(environ):
        return None
    pods, mine = environ.get(_PODS, ""), environ.get(_POD_RANK, "")
    if not mine and _RENDEZVOUS in environ:
        raise ConfigError(
            f"{_RENDEZVOUS} is {environ[_RENDEZVOUS]} and {_POD_RANK} is not set: the job has an elasticPolicy, and its pods get "
            "their numbers from torchrun's rendezvous; let the container's command be 'torchrun --no-python smp-launch run "
            "SCRIPT', or replace elasticPolicy by a Master replica",
            code="SMP107",
        )
    if not mine or not pods:  # operators before 1.6 set RANK and WORLD_SIZE only, of pods
        mine = mine or environ.get("RANK", "")
        pods = pods or environ.get("WORLD_SIZE", "")
    has_numbers = is_count(mine) and is_count(pods)
    if not has_numbers or int(mine) >= int(pods):
        raise ConfigError(
            f"this pod is number {mine!r} of {pods!r}, by {_POD_RANK} and {_PODS}, or by RANK and WORLD_SIZE; the operator sets "
            "them where the job has a Master replica: give it one, or say --hosts, --host-rank and --master",
            code="SMP107",
        )
    address = environ.get(_POD_ADDRESS) or environ.get(ADDRESS_VARIABLE, "")
    port = environ.get(_POD_PORT) or environ.get(PORT_VARIABLE, "")
    has_place = bool(address) and is_count(port)
    if int(pods) > 1 and not has_place:
        raise ConfigError(
            f"this is pod {mine} of {pods}, but {ADDRESS_VARIABLE} is {address!r} and {PORT_VARIABLE} is {port!r}; the operator "
            "sets both where the job has a Master replica with a container named pytorch: give it one, or set them",
            code="SMP107",
        )
    ranks = given.processes or _processes_of_pod(environ) or _ranks(environ, given)
    return _of_hosts(LauncherKind.KUBERNETES, environ, ranks, int(pods), int(mine), address, int(port or 0))


def _processes_of_pod(environ: Mapping[str, str]) -> int:
    """Return the number of processes that the operator asks for in this pod, or 0."""
    asked = environ.get(POD_PROCESSES_VARIABLE, "")
    return int(asked) if is_count(asked) else 0


def _tasks_are_hosts(environ: Mapping[str, str]) -> bool:
    return environ.get("SLURM_STEP_NUM_TASKS") == environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES"))


def _of_hosts_of_step(environ: Mapping[str, str], given: LauncherSettings) -> DetectedLauncher | None:
    place = place_of_step(environ)
    if place is None:
        return None
    address, port = _meeting_place_of_step(environ)
    return _of_hosts(LauncherKind.SLURM_STEP, environ, _ranks(environ, given), place.size, place.rank, address, port)


def _meeting_place_of_step(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the address and port where the ranks of a SLURM step meet, on the host of task 0.

    The user's variables come first. The default is the first host of the step, and a port derived from the step.

    Raises:
        ConfigError: SLURM's variables do not name the hosts or the step, and the user has not set the address or the port.
    """
    node_lists = [environ.get(name) for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")]
    hosts = next(filter(None, node_lists), "")
    address = environ.get(ADDRESS_VARIABLE) or first_host(hosts)
    names = [environ.get(name, "") for name in _STEP_VARIABLES]
    port = environ.get(PORT_VARIABLE)
    can_derive_port = all(names)
    if not address or not (port or can_derive_port):
        raise ConfigError(
            f"this is a task of SLURM, but {' and '.join(_STEP_VARIABLES)} are {names} and SLURM_STEP_NODELIST is {hosts!r}; "
            "srun sets them, and the host and port where the ranks meet come of them: start it with srun, or set "
            f"{ADDRESS_VARIABLE} and {PORT_VARIABLE}",
            code="SMP107",
        )
    if port:
        return address, _port(port)
    return address, derived_port(*names)


@dataclass(frozen=True)
class _HostFacts:
    """What a rank's launcher reports of its host and of the place where ranks meet; empty if it does not.

    Attributes:
        host: the name of the host, if it is not the machine's.
        ranks: their number on the host, if it is not in the launcher's variable.
    """

    kind: LauncherKind
    address: str
    port: str
    host: str = ""
    ranks: str = ""


def _facts_of_mpi(environ: Mapping[str, str]) -> _HostFacts:
    return _HostFacts(LauncherKind.MPI, environ.get(ADDRESS_VARIABLE, ""), environ.get(PORT_VARIABLE, ""))


def _facts_of_torchrun(environ: Mapping[str, str]) -> _HostFacts:
    host = ""
    if int(environ.get("GROUP_WORLD_SIZE", "1")) > 1 and "SMP_HOST" not in environ:
        host = f"{_host_name(environ)}-{environ['GROUP_RANK']}"  # agents are hosts; containers may have one name
    return _HostFacts(LauncherKind.TORCH, environ.get(ADDRESS_VARIABLE, ""), environ.get(PORT_VARIABLE, ""), host)


def _facts_of_step(environ: Mapping[str, str]) -> _HostFacts:
    address, port = _meeting_place_of_step(environ)
    return _HostFacts(LauncherKind.SLURM_STEP, address, str(port), ranks=_tasks_here(environ))


_FACTS_OF_HOST: Mapping[Launcher, Callable[[Mapping[str, str]], _HostFacts]] = {
    Launcher.OPEN_MPI: _facts_of_mpi,
    Launcher.PMI: _facts_of_mpi,
    Launcher.TORCH: _facts_of_torchrun,
    Launcher.SLURM: _facts_of_step,
}


def _of_rank(started: Started, environ: Mapping[str, str]) -> DetectedLauncher:
    facts, traits = _FACTS_OF_HOST[started.launcher](environ), TRAITS[started.launcher]
    address, port = facts.address, facts.port
    local, ranks = environ.get(traits.local_rank, ""), facts.ranks or environ.get(traits.local_size, "")
    if not traits.speaks_mpi and not (address and port):
        raise ConfigError(
            f"{started.said}, but {ADDRESS_VARIABLE} is {address!r} and {PORT_VARIABLE} is {port!r}, where the ranks are to meet: "
            f"{started.launcher.value} sets them; set both to the host and a free port of rank 0",
            code="SMP107",
        )
    return DetectedLauncher(
        facts.kind,
        facts.host or _host_name(environ),
        ranks=_count(ranks, 1),
        first_rank=started.rank,
        size=started.size,
        is_rank=True,
        local_rank=_count(local, 0),
        address=address,
        port=_port(port) if port else 0,
    )


def _count(text: str, default: int) -> int:
    return int(text) if is_count(text) else default


def _tasks_here(environ: Mapping[str, str]) -> str:
    """Return the number of a step's tasks on this host: the entry of ``SLURM_NODEID`` in ``2(x3),1``."""
    counts: list[str] = []
    for word in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        count, _, times = word.partition("(x")
        if is_count(count):
            repeats = int(times.rstrip(")") or 1)
            counts += [count] * repeats
    here = environ.get("SLURM_NODEID", "")
    if is_count(here) and int(here) < len(counts):
        return counts[int(here)]
    return ""


def _of_sagemaker(environ: Mapping[str, str], given: LauncherSettings) -> DetectedLauncher | None:
    tree = Tree.from_environment(environ)
    if not (tree.config_dir / "resourceconfig.json").is_file():
        return None
    resources = tree.read_config("resourceconfig")
    check_resources(resources, tree.config_dir / "resourceconfig.json")
    hosts, here = resources["hosts"], environ.get(HOST_VARIABLE) or resources.get("current_host")
    if here not in hosts:
        raise ConfigError(
            f"this host is {here!r}, which is not among the hosts {hosts} of {tree.config_dir / 'resourceconfig.json'}; the name "
            f"comes from {HOST_VARIABLE} or from current_host there; set {HOST_VARIABLE} to one of the hosts",
            code="SMP107",
        )
    asked = environ.get(PORT_VARIABLE)
    port = _port(asked) if asked else derived_port(environ.get("TRAINING_JOB_NAME", ""), *hosts)
    named = {**environ, "SMP_HOST": str(here)}
    return _of_hosts(
        LauncherKind.SAGEMAKER, named, _ranks(environ, given), len(hosts), hosts.index(here), str(hosts[0]), port
    )


def _of_machine(environ: Mapping[str, str], given: LauncherSettings) -> DetectedLauncher:
    ranks = _ranks(environ, given)
    return _of_hosts(LauncherKind.MACHINE, environ, ranks, 1, 0, "", 0)


def _of_hosts(
    kind: LauncherKind, environ: Mapping[str, str], ranks: int, hosts: int, mine: int, address: str, port: int
) -> DetectedLauncher:
    """Return the placement of one of several hosts that all have the same number of ranks."""
    if hosts == 1:
        address, port = "127.0.0.1", 0
    return DetectedLauncher(kind, _host_name(environ), ranks, mine * ranks, hosts * ranks, address=address, port=port)


def _ranks(environ: Mapping[str, str], given: LauncherSettings) -> int:
    if given.processes:
        return given.processes
    return gpu_count(environ) or 1


def _host_name(environ: Mapping[str, str]) -> str:
    given = environ.get("SMP_HOST") or environ.get("SLURMD_NODENAME")
    return given or socket.gethostname()


def _port(text: str) -> int:
    if not is_count(text) or not 0 < int(text) < 2**16:
        raise ConfigError(
            f"{PORT_VARIABLE} is {text!r}; the ranks meet there: set a port that is free on the host of rank 0",
            code="SMP107",
        )
    return int(text)


#: In the order in which they are asked; the first that detects its launcher decides. Without any, the job is this machine's.
_DETECTIONS: tuple[Callable[[Mapping[str, str], LauncherSettings], DetectedLauncher | None], ...] = (
    _of_options,
    _of_pod,
    _of_started_rank,
    _of_hosts_of_step,
    _of_allocation,
    _of_sagemaker,
)
