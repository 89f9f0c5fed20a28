"""The layout of a job's ranks over its hosts, real or simulated on one machine."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from smp_config.errors import ConfigError
from smp_config.limits import MOST_RANKS
from smp_config.machine.instances import require_usable

if TYPE_CHECKING:
    from smp_config.job import JobSettings

#: Set when several hosts of the job are processes on this machine.
SIMULATED_VARIABLE = "SMP_LAUNCH_HOSTS_ON_ONE_MACHINE"

#: Carries a layout from the leader to its ranks.
LAYOUT_VARIABLE = "SMP_LAUNCH_LAYOUT"


class ScriptKind(str, enum.Enum):
    """The way in which the script is started, and the library that it may import."""

    #: One process per host, started directly.
    SCRIPT = "script"
    MPI = "mpi"
    MODEL_PARALLEL = "model parallel"
    DATA_PARALLEL = "data parallel"
    #: Of the model parallel library, with the variables that torchrun sets.
    VERSION_2 = "model parallel, version 2"


@dataclass(frozen=True)
class Layout:
    """Ranks in blocks: host ``h`` of the list holds ranks ``h · processes_per_host`` and following."""

    hosts: tuple[str, ...]
    processes_per_host: int
    kind: ScriptKind
    simulated: bool = False

    @classmethod
    def of(cls, settings: JobSettings, hosts: list[str], current_host: str, gpus: int, simulated: bool) -> Layout:
        """Decide a job's layout.

        Args:
            gpus: GPUs of this host; the data parallel library runs one process on each.

        Raises:
            ConfigError: no number of processes, or degrees that do not fit the processes.
        """
        if settings.version_2 is not None:
            return cls._of_version_2(settings, hosts, gpus, simulated)
        mpi = settings.mpi if settings.mpi and settings.mpi.enabled else None
        if settings.model_parallel is not None and mpi is None:
            world = len(hosts)
            degrees = settings.model_parallel
            model = degrees.pipeline_parallel_degree * degrees.tensor_parallel_degree
            context = degrees.context_parallel_degree
            if max(model, degrees.sharded_data_parallel_degree, context, world) > 1:
                raise ConfigError(
                    f"the model parallel library is enabled but mpi is not, so every one of the {world} host(s) would run one "
                    f"process on its own; the degrees are pipeline {degrees.pipeline_parallel_degree}, tensor "
                    f"{degrees.tensor_parallel_degree}, sharded {degrees.sharded_data_parallel_degree}, context "
                    f'{context}; add "mpi": {{"enabled": True, "processes_per_host": {max(model * context, 2)}}} to distribution',
                    code="SMP201",
                )
        if not settings.uses_mpi:
            # Without mpirun the hosts know nothing of each other; each is a world of one.
            return cls((current_host,), 1, ScriptKind.SCRIPT, simulated)
        processes = mpi.processes_per_host if mpi else None
        if processes is None and _kind_under_mpi(settings) is ScriptKind.DATA_PARALLEL:
            processes = max(gpus, 1)
        if processes is None:
            raise ConfigError(
                "processes_per_host is missing: mpi is enabled, and without the number the launcher cannot tell how many "
                f'ranks to start on {len(hosts)} host(s); add "processes_per_host": {max(gpus, 2)} to '
                'distribution["mpi"]',
                code="SMP201",
            )
        if processes < 1:
            raise ConfigError(
                f"processes_per_host is {processes}; every one of the {len(hosts)} host(s) starts that many ranks; "
                "set it to 1 or more",
                code="SMP201",
            )
        if settings.model_parallel is not None:
            require_usable(settings.instance_type, processes)
        _refuse_too_many(processes, len(hosts))
        layout = cls(tuple(hosts), processes, _kind_under_mpi(settings), simulated)
        if settings.model_parallel is not None:
            settings.model_parallel.topology(layout.world_size)
        return layout

    @classmethod
    def _of_version_2(cls, settings: JobSettings, hosts: list[str], gpus: int, simulated: bool) -> Layout:
        """Return the layout of a job of version 2: one process on each GPU unless it says how many."""
        given = settings.torchrun.processes_per_host if settings.torchrun is not None else None
        processes = max(gpus, 1) if given is None else given
        require_usable(settings.instance_type, processes)
        _refuse_too_many(processes, len(hosts))
        layout = cls(tuple(hosts), processes, ScriptKind.VERSION_2, simulated)
        if settings.version_2 is not None:
            settings.version_2.topology(layout.world_size)
        return layout

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the job."""
        return len(self.hosts) * self.processes_per_host

    @property
    def leader(self) -> str:
        """Return the host that starts mpirun."""
        return self.hosts[0]

    @property
    def one_machine(self) -> bool:
        """Return whether all ranks run on this machine."""
        return self.simulated or len(self.hosts) == 1

    def host_of(self, rank: int) -> str:
        """Return the host on which a rank runs."""
        return self.hosts[rank // self.processes_per_host]

    def ranks_of(self) -> dict[str, range]:
        """Return the ranks of each host."""
        each = self.processes_per_host
        return {host: range(place * each, (place + 1) * each) for place, host in enumerate(self.hosts)}

    def local_rank_of(self, rank: int) -> int:
        """Return a rank's number on its host."""
        return rank % self.processes_per_host

    def threads_per_rank(self, cores: int) -> int:
        """Return the threads for each rank of a machine with ``cores`` cores, which simulated hosts share."""
        ranks = self.world_size if self.simulated else self.processes_per_host
        return max(1, cores // ranks)

    def over(self, hosts: Sequence[str]) -> Layout:
        """Return the same layout over other hosts."""
        return replace(self, hosts=tuple(hosts))

    def describe(self) -> str:
        """Describe the layout, as in ``2 hosts (algo-1, algo-2) × 2 processes = 4 ranks``."""
        hosts = "1 host" if len(self.hosts) == 1 else f"{len(self.hosts)} hosts"
        processes = "1 process" if self.processes_per_host == 1 else f"{self.processes_per_host} processes"
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"{hosts} ({', '.join(self.hosts)}) × {processes} = {ranks}"

    def to_text(self) -> str:
        """Return the layout as JSON, for an environment variable."""
        return json.dumps(asdict(self))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Layout:
        """Return the layout that the leader handed to this rank."""
        given = json.loads(environ[LAYOUT_VARIABLE])
        return cls(**{**given, "hosts": tuple(given["hosts"]), "kind": ScriptKind(given["kind"])})


def _kind_under_mpi(settings: JobSettings) -> ScriptKind:
    """Return what mpirun, or what replaces it, starts for a job."""
    if settings.data_parallel is not None and settings.data_parallel.enabled:
        return ScriptKind.DATA_PARALLEL
    return ScriptKind.MPI if settings.model_parallel is None else ScriptKind.MODEL_PARALLEL


def _refuse_too_many(processes: int, hosts: int) -> None:
    if hosts * processes > MOST_RANKS:
        raise ConfigError(
            f"the job has {hosts * processes} ranks = processes_per_host {processes} × {hosts} host(s), and no job has more than "
            f"{MOST_RANKS:,}: lower one of the two",
            code="SMP201",
        )
