"""The launcher that started this process and the rank it assigned, read from the environment alone.

A new launcher is a member of :class:`Launcher` and a record of its traits here, and in
:mod:`smp_launch.anywhere.detect_launcher` what its ranks know of their host.

Launchers nest: a batch system starts ``mpirun`` or ``torchrun``, which starts the ranks. Each passes its variables
to all processes below it. The innermost launcher counts. If it cannot be determined, every rank would assume a
wrong rank and wait for ranks that never come. So that is an error, which names both launchers.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from smp_config.errors import ConfigError
from smp_config.formats.values import is_count


class Launcher(str, enum.Enum):
    """What starts ranks; the value is its name for people."""

    OPEN_MPI = "mpirun of Open MPI"
    PMI = "a launcher with PMI (mpiexec of MPICH, srun --mpi=pmi2)"
    TORCH = "torchrun, or another that sets RANK and WORLD_SIZE"
    SLURM = "srun of SLURM"

    @property
    def speaks_mpi(self) -> bool:
        """Return whether its ranks meet through MPI; all others meet at ``MASTER_ADDR`` and ``MASTER_PORT``."""
        return TRAITS[self].speaks_mpi


@dataclass(frozen=True)
class LauncherTraits:
    """What this project asks of a launcher.

    Attributes:
        place: the variables that hold a process's rank and how many there are.
        local_rank: the one with the rank's number on its host; empty if it sets none.
        local_size: the one with the number of ranks of that host; empty if it sets none.
        speaks_mpi: its ranks meet through MPI.
        prefixes: of variables that misplace ranks that another launcher starts below it.
        has_rank_before: the variable of the rank is also set before it has started ranks.
        starts_hosts: its processes may be hosts, on which another launcher starts ranks.
        gives_way: without a place to meet, its ranks meet through the MPI that it offers them.
        meeting_remedy: how its ranks get a place to meet, with the missing variables in braces.
    """

    place: tuple[str, str]
    local_rank: str = ""
    local_size: str = ""
    speaks_mpi: bool = False
    prefixes: tuple[str, ...] = ()
    has_rank_before: bool = False
    starts_hosts: bool = False
    gives_way: bool = False
    meeting_remedy: str = ""


#: What error messages recommend.
_OUR_COMMAND = "smp-launch run SCRIPT"

#: By launcher, its traits; those that may start others come later.
TRAITS: Mapping[Launcher, LauncherTraits] = {
    Launcher.TORCH: LauncherTraits(
        ("RANK", "WORLD_SIZE"),
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        prefixes=("PET_",),
        meeting_remedy=f"start the job with torchrun or '{_OUR_COMMAND}', which set them, or set them to the host and a free port "
        "of rank 0",
    ),
    Launcher.OPEN_MPI: LauncherTraits(
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        speaks_mpi=True,
        prefixes=("OMPI_COMM_WORLD_", "PMIX_"),
    ),
    Launcher.SLURM: LauncherTraits(
        # Of the step, which srun starts; SLURM_NTASKS is also that of an allocation in which nothing was started yet.
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        "SLURM_LOCALID",
        has_rank_before=True,
        starts_hosts=True,
        gives_way=True,
        meeting_remedy=f"start it with 'srun {_OUR_COMMAND}', which sets them, or export {{}} before srun "
        "(the first host of 'scontrol show hostnames', and a port that is free there)",
    ),
    Launcher.PMI: LauncherTraits(("PMI_RANK", "PMI_SIZE"), speaks_mpi=True, prefixes=("PMI_",)),
}

#: Prefixes of variables left by outer launchers. They contradict the place of ranks that those have not started.
FOREIGN_PREFIXES = tuple(prefix for traits in TRAITS.values() for prefix in traits.prefixes)

#: Rendezvous of ranks without MPI.
ADDRESS_VARIABLE = "MASTER_ADDR"
PORT_VARIABLE = "MASTER_PORT"

#: Set by ``torchrun`` and others, and by this project's launcher: the ranks of this host.
LOCAL_SIZE_VARIABLE = "LOCAL_WORLD_SIZE"

#: A text that only the ranks of one job know: with it they know each other's messages from those of strangers.
SECRET_VARIABLE = "SMP_JOB_SECRET"

#: Its characters, at least: shorter ones are guessed.
_SECRET_CHARACTERS = 16

#: Set by ``torchrun`` in every rank.
ELASTIC_VARIABLE = "TORCHELASTIC_RUN_ID"

#: Set by this project's launcher in every rank.
OWN_VARIABLES = ("SMP_RANK", "SMP_WORLD_SIZE")

#: Variables with a rank, its number on its host and the number of ranks there, the innermost launcher's first.
RANK_VARIABLES = (OWN_VARIABLES[0], *(traits.place[0] for traits in TRAITS.values()))
LOCAL_RANK_VARIABLES = ("SMP_LOCAL_RANK", *(traits.local_rank for traits in TRAITS.values() if traits.local_rank))
LOCAL_SIZE_VARIABLES = ("SMP_LOCAL_SIZE", *(traits.local_size for traits in TRAITS.values() if traits.local_size))

#: Set by this project's launcher in every rank: 1 in process mode, else 0. In process mode the launcher has started all ranks of
#: the job itself, as processes of this machine and as one host: no container, no batch system, no other launcher around it.
PROCESS_MODE_VARIABLE = "SMP_PROCESS_MODE"

#: Processes that a pod of Kubernetes' training operator is to start. It is set in the pod; no launcher sets it in ranks.
POD_PROCESSES_VARIABLE = "PET_NPROC_PER_NODE"


@dataclass(frozen=True)
class Started:
    """The rank of a process and the size of its job, as its launcher reports them."""

    launcher: Launcher
    rank: int
    size: int

    @property
    def said(self) -> str:
        """Return the variables that hold rank and size, with their values."""
        rank, size = TRAITS[self.launcher].place
        return f"{rank}={self.rank} and {size}={self.size}"

    def is_same_place(self, other: Started) -> bool:
        """Return whether two launchers report the same rank and size."""
        return (self.rank, self.size) == (other.rank, other.size)


def started_by(environ: Mapping[str, str]) -> Started | None:
    """Return the innermost launcher of this process; None if no launcher started it, or if it runs alone.

    Raises:
        ConfigError: variables are incomplete or not numbers, or two launchers contradict each other.
    """
    torch = place_of(Launcher.TORCH, environ)
    mpi = place_of(Launcher.OPEN_MPI, environ)
    if torch is not None and _is_from_inside(torch, environ) and not _is_same(torch, mpi):
        return _several(torch)
    outer = _outer(environ)
    if torch is None:
        return _several(outer)
    if outer is not None and not _may_be_inside(torch, outer):
        raise ConfigError(
            f"two launchers say what this process is: {outer.said} come from {outer.launcher.value}, {torch.said} from "
            "another, or from the shell in which the job was started; ranks that believe one would wait for ranks of the "
            f"other: unset {' and '.join(TRAITS[torch.launcher].place)} before the job starts, or start the ranks with one "
            "launcher",
            code="SMP107",
        )
    meets_through_mpi = outer is not None and outer.launcher.speaks_mpi
    return _several(outer if meets_through_mpi and _is_same(torch, outer) else torch)


def _outer(environ: Mapping[str, str]) -> Started | None:
    """Return the innermost launcher that torchrun or another may run below."""
    without_place = None
    for launcher, traits in TRAITS.items():
        if launcher is Launcher.TORCH:
            continue
        place = place_of(launcher, environ)
        if place is None:
            continue
        if traits.gives_way and _missing_meeting_place(environ):
            without_place = without_place or place
            continue
        return place
    return without_place


def is_first_rank(environ: Mapping[str, str]) -> bool:
    """Return whether this process is rank 0 of a job, or is alone."""
    return rank_text(environ) == "0"


def rank_text(environ: Mapping[str, str]) -> str:
    """Return this process's rank as the innermost launcher has written it; ``"0"`` without one."""
    return next((environ[name] for name in RANK_VARIABLES if environ.get(name)), "0")


def place_of(launcher: Launcher, environ: Mapping[str, str]) -> Started | None:
    """Return the rank and size from one launcher's variables; None if they are not set.

    Raises:
        ConfigError: one of two is missing, or they are not a rank and a number of ranks.
    """
    traits = TRAITS[launcher]
    names = traits.place
    if traits.has_rank_before and names[1] not in environ:
        return None
    given = {name: environ[name] for name in names if environ.get(name, "") != ""}
    if not given or given == {names[1]: "1"}:
        return None
    if len(given) < len(names):
        (there, text), (missing,) = next(iter(given.items())), [name for name in names if name not in given]
        raise ConfigError(
            f"{there} is {text}, but {missing} is not set; {launcher.value} sets both in every rank, so this one is left over "
            f"from another job, or was set by hand: set {missing} too, or unset {there}",
            code="SMP107",
        )
    try:
        rank, size = (int(given[name]) for name in names)
    except ValueError:
        rank, size = -1, -1
    if not 0 <= rank < size:
        raise ConfigError(
            f"{names[0]} is {given[names[0]]!r} and {names[1]} is {given[names[1]]!r}; ranks count from 0 to one less than their "
            f"number: correct them where the job is started, or leave them to {launcher.value}",
            code="SMP107",
        )
    return Started(launcher, rank, size)


def job_secret(environ: Mapping[str, str]) -> str | None:
    """Return the secret of a job, or None if it has none.

    Raises:
        ConfigError: If it is so short that it can be guessed.
    """
    text = environ.get(SECRET_VARIABLE, "")
    if 0 < len(text) < _SECRET_CHARACTERS:
        raise ConfigError(
            f"{SECRET_VARIABLE} has {len(text)} characters, which can be guessed; the ranks of a job know each other by it: let it "
            f"have at least {_SECRET_CHARACTERS}, the same on every host, for example those of 'openssl rand -hex 32'",
            code="SMP107",
        )
    return text or None


def is_process_mode(environ: Mapping[str, str], rank: int, size: int) -> bool:
    """Return whether this project's launcher started all ranks as processes of this machine, as one host.

    Args:
        rank: of this process; a rank that another launcher has started below one of ours inherits its variables.
        size: ranks of the job.
    """
    own = tuple(environ.get(name) for name in OWN_VARIABLES) == (str(rank), str(size))
    return own and environ.get(PROCESS_MODE_VARIABLE) == "1"


def require_meeting_place(started: Started, environ: Mapping[str, str]) -> None:
    """Raise ConfigError where ranks without MPI could not find one another, naming the variables.

    The pods of Kubernetes' training operator are such a case: they know how many ranks there are to be, but each has one process.
    """
    pod = environ.get(POD_PROCESSES_VARIABLE, "")
    if is_count(pod) and int(pod) > 1 and not _is_from_inside(started, environ):
        raise ConfigError(
            f"{POD_PROCESSES_VARIABLE} is {pod} and WORLD_SIZE is {started.size}: this pod is to run {pod} ranks, but its script "
            "was started directly, as one; the training operator leaves the ranks to a launcher: let the container's command "
            f"be '{_OUR_COMMAND}' or 'torchrun SCRIPT', or leave nprocPerNode out",
            code="SMP107",
        )
    missing = _missing_meeting_place(environ)
    if not missing:
        return
    remedy = TRAITS[started.launcher].meeting_remedy or TRAITS[Launcher.TORCH].meeting_remedy
    by_hand = remedy.format(" and ".join(missing))
    raise ConfigError(
        f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not set, though {started.said} say that this is one of "
        f"{started.size} ranks; without MPI they meet at {ADDRESS_VARIABLE}:{PORT_VARIABLE}: {by_hand}",
        code="SMP107",
    )


def _missing_meeting_place(environ: Mapping[str, str]) -> list[str]:
    return [name for name in (ADDRESS_VARIABLE, PORT_VARIABLE) if not environ.get(name)]


def _is_from_inside(torch: Started, environ: Mapping[str, str]) -> bool:
    """Return whether ``RANK`` and ``WORLD_SIZE`` certainly come from the launcher of this very process."""
    if ELASTIC_VARIABLE in environ:
        return True
    # This project's launcher repeats both under names of its own.
    own = tuple(environ.get(name) for name in OWN_VARIABLES)
    is_own = own == (str(torch.rank), str(torch.size))
    return is_own and ADDRESS_VARIABLE in environ


def _may_be_inside(torch: Started, outer: Started) -> bool:
    """Return whether ranks of ``torch`` may be the processes of ``outer``, or their children (one per host)."""
    if torch.is_same_place(outer) or outer.size == 1:
        return True
    return TRAITS[outer.launcher].starts_hosts and torch.size > outer.size


def _is_same(torch: Started, other: Started | None) -> bool:
    return other is not None and torch.is_same_place(other)


def _several(started: Started | None) -> Started | None:
    if started is None or started.size == 1:
        return None
    return started
