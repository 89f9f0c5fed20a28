"""The host that runs mpirun for all hosts, or the script alone without mpirun."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from smp_config.machine.disk_space import has_room
from smp_config.recovery import COUNT_VARIABLE, RESTARTS_VARIABLE, SHARED_MEMORY, restart_count
from smp_config.recovery import FOLDER_VARIABLE as MEMORY_FOLDER_VARIABLE
from smp_launch.failures.failure import Cause, FailureCollector
from smp_launch.machine.locked_folders import LeaderStatus, private_dir
from smp_launch.machine.network import shared_memory_warning
from smp_launch.machine.rank_pipes import REPORT_VARIABLE
from smp_launch.mpirun.command import PrivateDirs, check_size, mpirun_command
from smp_launch.remote.remaining_hosts import OtherHosts, RemainingHosts, lost_of
from smp_launch.remote.remote_hosts import RemoteHosts
from smp_launch.remote.ssh import Client
from smp_launch.sagemaker.environment import EMULATION_LINE, emulates_cuda
from smp_launch.supervision.memory_folder import memory_folder
from smp_launch.supervision.restarts import Attempt, Restarts
from smp_launch.supervision.supervise import (
    FAILURE_PATIENCE,
    FAILURE_PATIENCE_ALONE,
    ProgramOutcome,
    Supervisor,
    exit_code,
    grace_seconds,
    show,
    write_own_line,
)
from smp_launch.warm.standby import Standby, keep_standby
from smp_launch.watch.local_ranks import LocalRanks
from smp_launch.watch.report import cause_of_hang, last_seen, last_step, write_report
from smp_launch.watch.watch import HangWatch
from smp_records.rank_record import FOLDER_VARIABLE

if TYPE_CHECKING:
    from smp_launch.machine.signals import StopRequests
    from smp_launch.mpirun.job import Job

#: Bytes of shared memory that Open MPI takes for each rank, rounded up.
_MPI_BYTES = 20 << 20

#: A limit of open files below which it is likely the reason why nothing starts: mpirun has some 30, and some for each rank.
_FEW_FILES = 128

#: Seconds within which a rank's failure may be the consequence of a host's end that was noticed later.
_SAME_MOMENT = 2.0


def run_over_hosts(job: Job, stop: StopRequests, environ: Mapping[str, str]) -> tuple[int, Cause | None]:
    """Wait until every other host accepts the leader, run the ranks of all, and send the hosts the outcome.

    Returns:
        The exit code, and why the job failed if it is not 0.

    Raises:
        LaunchError: a host cannot be reached.
        Stopped: a request to stop came before the first rank ran.
    """
    others = [host for host in (*job.layout.hosts, *job.spares) if host != job.layout.leader]
    with (
        private_dir(Path(tempfile.gettempdir())) as folder,
        RemoteHosts.reach(others, Client.create(folder, environ), stop, environ) as followers,
    ):
        code, cause = run_job(job, stop, environ, followers)
        followers.publish(LeaderStatus(code, cause.headline if cause else ""))
        return code, cause


def run_job(
    job: Job, stop: StopRequests, environ: Mapping[str, str], others: OtherHosts | None = None
) -> tuple[int, Cause | None]:
    """Run the ranks to their end; needs ``others`` when the job has hosts on other machines.

    Returns:
        The exit code, and why the job failed when it is not 0.
    """
    write_own_line(job.describe())
    if job.spares:
        write_own_line(
            f"spare until another host is lost: {', '.join(job.spares)}"
            + ("" if job.restarts else f"; without {RESTARTS_VARIABLE} none is ever needed")
        )
    warning = None if job.layout.simulated else shared_memory_warning(job.layout.processes_per_host)
    if warning:
        write_own_line(warning)
    if emulates_cuda(environ):
        write_own_line(EMULATION_LINE)
    for default, custom in job.options(PrivateDirs()).replaced:
        write_own_line(f"custom_mpi_options: '{custom}' instead of '{default}'")
    wanted = job.restarts > 0 and others is None
    with (
        memory_folder(environ) as memory,
        keep_standby(environ, job.entry_point, job.training.tree.code_dir, wanted=wanted) as ready,
    ):
        passed = {**environ, **memory, **ready.variables()}
        left = RemainingHosts(job, others, memory.get(MEMORY_FOLDER_VARIABLE))
        restarts = Restarts(job.restarts, stop, left.forget_failure)
        return restarts.run(
            lambda count: _start(left.job_now(), stop, {**passed, COUNT_VARIABLE: str(count)}, others, ready)
        )


def _start(
    job: Job, stop: StopRequests, environ: Mapping[str, str], others: OtherHosts | None, ready: Standby
) -> Attempt:
    """Run the ranks once, to their end; remove everything that this start has made, so that the next one finds none of it."""
    collector = FailureCollector(job.layout.host_of, mpirun=job.mpi is not None)
    supervisor = Supervisor(
        stop,
        collector,
        lambda: bool(lost_of(job, others)),
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
        if job.mpi is not None:
            supervisor.pipes = dirs.session
        supervisor.watch = _watch(job, records, others, passed)
        is_restart = restart_count(environ) > 0
        if is_restart:
            ready.hurry()
        whose = "group" if job.mpi else "process"
        command = ready.program(job.program(), is_restart=is_restart, whose=whose)
        if job.mpi is not None:
            command = mpirun_command(job.mpi, job.layout, job.options(dirs), command, exported=announced)
        check_size(command, passed)
        outcome = supervisor.run(command, passed, job.training.tree.code_dir)
        if dirs.session:
            collector.read_reports(dirs.session)
        collector.last_seen = last_seen(records)
        show(collector.finish(), 2)
        code, cause = _verdict(job, outcome, collector, others)
        lost = lost_of(job, others)
        is_final = cause is None or outcome.stopped_by is not None or (bool(lost) and job.without(lost) is None)
        step = last_step(records, cause.rank) if cause else None
        return Attempt(code, cause, step, is_final, is_host_lost=bool(lost))


def _watch(job: Job, records: Path, others: OtherHosts | None, passed: dict[str, str]) -> HangWatch | None:
    """Return the watch over all ranks, or None if the job does not want one.

    ``passed`` gets the variable that names the folder for the ranks' records.
    """
    watches = job.patience.watches
    # Restarts need the records too: they have the step that each start has reached.
    if watches or job.restarts:
        passed[FOLDER_VARIABLE] = str(records)
    if not watches:
        return None
    there = others.ranks(job.layout.ranks_of()) if others is not None else ()
    return HangWatch([LocalRanks(records, wakes=True), *there], job.patience)


def _verdict(
    job: Job, outcome: ProgramOutcome, collector: FailureCollector, others: OtherHosts | None
) -> tuple[int, Cause | None]:
    """Return the exit code of a start, and why it failed, if it did."""
    if outcome.hang is not None:
        write_report(job.training.tree.output_data_dir, outcome.hang)
        return 1, cause_of_hang(outcome.hang, job.layout.host_of)
    lost = lost_of(job, others)
    # If the daemon of a host is gone, mpirun may end with 0 as if the ranks had succeeded.
    if outcome.returncode == 0 and not collector.records and not lost:
        return 0, None
    lost_when = None if others is None else others.lost_when
    cause = _lost_host(lost, lost_when, collector)
    if cause is None:
        program = job.mpi.path.name if job.mpi else job.entry_point
        cause = cause_of(collector, outcome, program)
    return exit_code(outcome), cause


def _lost_host(lost: list[str], when: float | None, collector: FailureCollector) -> Cause | None:
    """Return the loss of a host as the cause, unless one of its ranks failed, or another rank failed well before.

    A lost host makes ranks on other hosts fail.
    """
    if not lost or when is None:
        return None
    for record in collector.records:
        came_before = 0 < record.when < when - _SAME_MOMENT
        if record.host in lost or came_before:
            return None
    return Cause(
        f"host {', '.join(lost)} is gone: its connection to the leader ended while the ranks were running; "
        "see its own log; often the machine ran out of memory, or the container was stopped",
        collector.consequences(),
    )


def cause_of(collector: FailureCollector, outcome: ProgramOutcome, program: str) -> Cause:
    """Return why a run of ``program`` failed, from how it ended and from its ranks' reports."""
    if outcome.overdue and not collector.records and outcome.stopped_by:
        return Cause(
            f"the job was stopped by {outcome.stopped_by}, and its processes {outcome.overdue}, so they were killed; "
            "let the script save less or sooner when it gets SIGTERM, and exit"
        )
    if outcome.overdue and not collector.failing and not outcome.first_failed and not outcome.stopped_by:
        return Cause(
            f"all ranks have ended, but {program} had not ended after them, and was killed: it could not tell whether they ended "
            "well; look for a rank's error in the log, and start the job again"
        )
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    is_silent = not (outcome.stopped_by or outcome.first_failed or collector.failing or collector.started)
    if is_silent and outcome.returncode and 0 <= most < _FEW_FILES:
        return Cause(
            f"{program} ended with code {outcome.returncode} before any script began, and may have only {most:,} files open: "
            "raise the limit with 'ulimit -n 4096' before the job starts",
            "\n".join(collector.messages),
        )
    return collector.first_cause(
        outcome.returncode,
        outcome.stopped_by,
        program,
        outcome.first_ended,
        outcome.ended_unheard,
        outcome.first_failed,
    )


@contextmanager
def _private_dirs(job: Job, others: OtherHosts | None) -> Iterator[PrivateDirs]:
    """Make folders for sockets and shared memory that vanish with the job, even if its ranks were killed.

    With other machines mpirun would look for them there too, so they stay where it puts them itself.
    """
    if not job.layout.one_machine:
        yield PrivateDirs(agent=others.agent if others else None)
        return
    with ExitStack() as stack:
        session = stack.enter_context(private_dir(Path(tempfile.gettempdir())))
        memory = None
        if job.mpi is not None and os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
            # In a full one MPI would end every rank.
            is_full = not has_room(SHARED_MEMORY, _MPI_BYTES * job.layout.world_size)
            parent = Path(tempfile.gettempdir()) if is_full else SHARED_MEMORY
            memory = stack.enter_context(private_dir(parent))
        yield PrivateDirs(session, memory)
