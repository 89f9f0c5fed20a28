"""The host that runs mpirun for all hosts, or the script alone where there is none."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from smp_config.mpi_options import MergedOptions, MpiOption, merge, parse_mpi_options, variables
from smp_config.recovery import COUNT_VARIABLE, SHARED_MEMORY, max_restarts, restart_count
from smp_config.secrets import masked_words
from smp_config.smddp import BufferSizes
from smp_config.whereabouts import FOLDER_VARIABLE
from smp_launch.command import OpenMpi, PrivateDirs, as_root, check_size, mpi_options, mpirun_command, without_scheduler
from smp_launch.environment import EMULATION_LINE, HOST_VARIABLE, TrainingEnvironment, cpu_count, emulates_cuda
from smp_launch.failure import REPORT_VARIABLE, Cause, FailureCollector
from smp_launch.followers import Followers
from smp_launch.hosts import LAYOUT_VARIABLE, Kind, Layout
from smp_launch.locked_folders import STATUS_VARIABLE, LeaderStatus, private_dir
from smp_launch.memory_folder import memory_folder
from smp_launch.network import PORT_VARIABLE, reserved_port, shared_memory_warning, usable_interface
from smp_launch.restarts import Attempt, Restarts
from smp_launch.signals import LIFELINE_VARIABLE, StopRequests
from smp_launch.ssh import Client
from smp_launch.supervise import (
    FAILURE_PATIENCE,
    FAILURE_PATIENCE_ALONE,
    GRACE_VARIABLE,
    Outcome,
    Supervisor,
    exit_code,
    grace_seconds,
    say,
    show,
)
from smp_launch.warm.standby import Standby, standby
from smp_launch.watch.local_ranks import LocalRanks
from smp_launch.watch.patience import Patience
from smp_launch.watch.report import cause_of_hang, last_seen, last_step, write_report
from smp_launch.watch.watch import Watch

if TYPE_CHECKING:
    from smp_config.job import JobSettings

#: Seconds within which a rank's failure may be the consequence of a host's end that was noticed later.
_SAME_MOMENT = 2.0

#: The command line shown in the log is cut after this many characters.
_SHOWN_CHARACTERS = 160


@dataclass(frozen=True)
class Job:
    """All that is known before the first process starts."""

    training: TrainingEnvironment
    layout: Layout
    entry_point: str
    custom: tuple[MpiOption, ...]
    buffers: BufferSizes
    mpi: OpenMpi | None
    patience: Patience
    restarts: int

    @classmethod
    def read(
        cls, training: TrainingEnvironment, settings: JobSettings, layout: Layout, environ: Mapping[str, str]
    ) -> Job:
        """Check everything that can be checked without starting a rank.

        Raises:
            ConfigError: the entry point, a channel, an MPI option or a buffer size cannot work.
            LaunchError: there is no usable mpirun.
        """
        entry_point = training.entry_point
        training.check_channels()
        texts = [
            settings.mpi.custom_mpi_options if settings.mpi else "",
            settings.data_parallel.custom_mpi_options if settings.data_parallel else "",
        ]
        custom = tuple(option for text in texts for option in parse_mpi_options(text))
        merge((), custom).raise_for_conflicts()
        buffers = BufferSizes.from_environment(variables(custom), environ)
        mpi = None if layout.kind is Kind.SCRIPT else OpenMpi.find(environ)
        patience, restarts = Patience.from_environment(environ), max_restarts(environ)
        job = cls(training, layout, entry_point, custom, buffers, mpi, patience, restarts)
        if mpi is not None:
            job.options(PrivateDirs()).raise_for_conflicts()
        return job

    def options(self, dirs: PrivateDirs) -> MergedOptions:
        """All options of mpirun, merged."""
        if self.mpi is None:
            return MergedOptions(())
        interface = usable_interface(self.training.network_interface, self.layout.one_machine)
        return mpi_options(self.mpi.dialect, self.layout, self.custom, interface, dirs)

    def program(self) -> list[str]:
        """What every rank runs: the wrapper around the user's script."""
        return [sys.executable, "-m", "smp_launch.rank", "--", self.entry_point, *self.training.user_arguments()]

    def environment(self, environ: Mapping[str, str], announced: Mapping[str, str]) -> dict[str, str]:
        """What mpirun and the ranks inherit: the user's variables, ``announced``, and what the wrapper needs to know."""
        own = (LIFELINE_VARIABLE, GRACE_VARIABLE, STATUS_VARIABLE)
        inherited = {name: value for name, value in as_root(environ).items() if name not in own}
        if self.mpi is not None:
            inherited = without_scheduler(inherited)
        return {**inherited, **announced, HOST_VARIABLE: self.training.current_host}

    @contextmanager
    def announced(self, environ: Mapping[str, str]) -> Iterator[dict[str, str]]:
        """What ranks on other hosts must get from the leader; the rest of their environment is their own host's."""
        values = {**self.buffers.to_environment(), LAYOUT_VARIABLE: self.layout.to_text(), "PYTHONUNBUFFERED": "1"}
        values[COUNT_VARIABLE] = environ.get(COUNT_VARIABLE, "0")
        if self.layout.kind is not Kind.DATA_PARALLEL or PORT_VARIABLE in environ:
            yield values
        else:
            # The first rank, which the others connect to, is on this host.
            with reserved_port() as port:
                yield {**values, PORT_VARIABLE: str(port)}

    def watched(self, records: Path, others: Followers | None, passed: dict[str, str]) -> Watch | None:
        """The watch over all ranks, which are told in ``passed`` where to keep their records; None where it is not wanted."""
        if self.patience.watches or self.restarts:
            passed[FOLDER_VARIABLE] = str(records)
        if not self.patience.watches:
            return None
        return Watch([LocalRanks(records, wakes=True), *(others.ranks() if others is not None else ())], self.patience)

    def forget_failure(self) -> None:
        """Remove the failure files that scripts have written of a failure after which they are started again."""
        tree, here = self.training.tree, self.training.current_host
        hosts = self.layout.hosts if self.layout.simulated else (here,)
        for host in hosts:
            tree.of_host(host, here).failure_file.unlink(missing_ok=True)

    def describe(self) -> str:
        """One line for the log: hosts, processes, program."""
        layout = self.layout
        threads = os.environ.get("OMP_NUM_THREADS") or str(layout.threads_per_rank(cpu_count()))
        words = " ".join(masked_words([self.entry_point, *self.training.user_arguments()]))
        shown = words if len(words) <= _SHOWN_CHARACTERS else words[: _SHOWN_CHARACTERS - 1] + "…"
        by = f"{layout.kind.value}, {self.mpi}" if self.mpi else "no mpirun"
        each = f"{threads} thread{'s' * (threads != '1')} each"
        return f"{layout.describe()} ({by}; {each}) run {shown}"


def run_over_hosts(job: Job, stop: StopRequests, environ: Mapping[str, str]) -> tuple[int, Cause | None]:
    """Wait until every other host lets us in, run the ranks of all, and tell the hosts how it ended.

    Returns:
        The exit code, and why the job failed when it is not 0.

    Raises:
        LaunchError: a host cannot be reached.
        Stopped: a request to stop came before the first rank ran.
    """
    others = [host for host in job.layout.hosts if host != job.layout.leader]
    with (
        private_dir(Path(tempfile.gettempdir())) as folder,
        Followers.reach(others, Client.create(folder, environ), stop, environ) as followers,
    ):
        code, cause = run_job(job, stop, environ, followers)
        followers.publish(LeaderStatus(code, cause.headline if cause else ""))
        return code, cause


def run_job(
    job: Job, stop: StopRequests, environ: Mapping[str, str], others: Followers | None = None
) -> tuple[int, Cause | None]:
    """Run the ranks to their end; needs ``others`` when the job has hosts on other machines.

    Returns:
        The exit code, and why the job failed when it is not 0.
    """
    say(job.describe())
    if not job.layout.simulated and (warning := shared_memory_warning(job.layout.processes_per_host)):
        say(warning)
    if emulates_cuda(environ):
        say(EMULATION_LINE)
    for default, custom in job.options(PrivateDirs()).replaced:
        say(f"custom_mpi_options: '{custom}' instead of '{default}'")
    wanted = job.restarts > 0 and others is None
    with (
        memory_folder(environ) as memory,
        standby(environ, job.entry_point, job.training.tree.code_dir, wanted=wanted) as ready,
    ):
        passed = {**environ, **memory, **ready.variables()}
        restarts = Restarts(job.restarts, stop, job.forget_failure)
        return restarts.run(lambda count: _start(job, stop, {**passed, COUNT_VARIABLE: str(count)}, others, ready))


def _start(
    job: Job, stop: StopRequests, environ: Mapping[str, str], others: Followers | None, ready: Standby
) -> Attempt:
    """Run the ranks to their end, once: all that a start makes is gone afterwards, so that the next meets none of it."""
    collector = FailureCollector(job.layout.host_of, mpirun=job.mpi is not None)
    supervisor = Supervisor(
        stop,
        collector,
        lambda: bool(others and others.lost()),
        FAILURE_PATIENCE if job.mpi else FAILURE_PATIENCE_ALONE,
        ranks=job.layout.world_size,
        local=job.layout.one_machine,
        grace=grace_seconds(environ),
        tags=job.mpi.dialect.tags if job.mpi else None,
        apart=others.pids if others else (),
        spare=ready.pids,
    )
    with (
        _private_dirs(job, others) as dirs,
        job.announced(environ) as announced,
        private_dir(Path(tempfile.gettempdir())) as records,
    ):
        passed = job.environment(environ, announced)
        if dirs.session:
            passed[REPORT_VARIABLE] = str(dirs.session)
        supervisor.watch = job.watched(records, others, passed)
        is_restart = restart_count(environ) > 0
        if is_restart:
            ready.hurry()
        command = ready.program(job.program(), is_restart=is_restart, whose="group" if job.mpi else "process")
        if job.mpi is not None:
            command = mpirun_command(job.mpi, job.layout, job.options(dirs), command, exported=announced)
        check_size(command, passed)
        outcome = supervisor.run(command, passed, job.training.tree.code_dir)
        if dirs.session:
            collector.read_reports(dirs.session)
        collector.last_seen = last_seen(records)
        show(collector.finish(), 2)
        code, cause, is_final = _verdict(job, outcome, collector, others)
        return Attempt(code, cause, last_step(records, cause.rank) if cause else None, is_final)


def _verdict(
    job: Job, outcome: Outcome, collector: FailureCollector, others: Followers | None
) -> tuple[int, Cause | None, bool]:
    """The exit code of a start, why it failed, if it did, and whether that is the job's end."""
    stopped = outcome.stopped_by is not None
    if outcome.hang is not None:
        write_report(job.training.tree.output_data_dir, outcome.hang)
        return 1, cause_of_hang(outcome.hang, job.layout.host_of), stopped
    if outcome.returncode == 0 and not collector.records:
        return 0, None, True
    if others is not None and (cause := _lost_host(others, collector)) is not None:
        return exit_code(outcome), cause, True
    program = job.mpi.path.name if job.mpi else job.entry_point
    return exit_code(outcome), cause_of(collector, outcome, program), stopped or bool(others and others.lost())


def _lost_host(followers: Followers, collector: FailureCollector) -> Cause | None:
    """A host that is gone makes ranks on other hosts fail; it is the cause unless one of them failed well before."""
    lost, when = followers.lost(), followers.lost_when
    if not lost or when is None or any(r.host in lost or 0 < r.when < when - _SAME_MOMENT for r in collector.records):
        return None
    return Cause(
        f"host {', '.join(lost)} is gone: its connection to the leader ended while the ranks were running; "
        "see its own log; often the machine ran out of memory, or the container was stopped",
        collector.consequences(),
    )


def cause_of(collector: FailureCollector, outcome: Outcome, program: str) -> Cause:
    """Why a run of ``program`` failed, by how it ended and what its ranks have told."""
    if outcome.overdue and not collector.records and outcome.stopped_by:
        return Cause(
            f"the job was stopped by {outcome.stopped_by}, and its processes {outcome.overdue}, so they were killed; "
            "let the script save less or sooner when it gets SIGTERM, and exit"
        )
    return collector.first_cause(
        outcome.returncode, outcome.stopped_by, program, outcome.first_ended, outcome.ended_unheard
    )


@contextmanager
def _private_dirs(job: Job, others: Followers | None) -> Iterator[PrivateDirs]:
    """Folders for sockets and shared memory that vanish with the job, even when its ranks were killed.

    With other machines mpirun would look for them there too, so they stay where it puts them itself.
    """
    if not job.layout.one_machine:
        yield PrivateDirs(agent=others.agent if others else None)
        return
    with ExitStack() as stack:
        session = stack.enter_context(private_dir(Path(tempfile.gettempdir())))
        memory = None
        if job.mpi is not None and os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
            memory = stack.enter_context(private_dir(SHARED_MEMORY))
        yield PrivateDirs(session, memory)
