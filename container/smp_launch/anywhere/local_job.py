"""The ranks of one host without SageMaker: started, supervised and ended together, without MPI."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from smp_config.errors import ConfigError
from smp_config.machine.launchers import SECRET_VARIABLE, job_secret
from smp_config.recovery import COUNT_VARIABLE, RESTARTS_VARIABLE, max_restarts, restart_count
from smp_config.version2.parameters import Version2Parameters
from smp_config.version2.which_version import VERSION_VARIABLE
from smp_launch.anywhere.local_ranks import LOCAL_RANK
from smp_launch.anywhere.plain_rank import PARAMETERS_VARIABLE, SURROUNDINGS_VARIABLE, prepare, to_text
from smp_launch.errors import LaunchError
from smp_launch.failures.failure import Cause, FailureCollector
from smp_launch.isolated import isolated_command
from smp_launch.machine.locked_folders import private_dir
from smp_launch.machine.network import reserved_port, shared_memory_warning
from smp_launch.machine.rank_pipes import REPORT_VARIABLE
from smp_launch.machine.signals import LIFELINE_VARIABLE, StopRequests
from smp_launch.remote.leader import cause_of
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
from smp_launch.watch.hang_timeout import HangTimeout
from smp_launch.watch.local_ranks import LocalRanks
from smp_launch.watch.report import cause_of_hang, last_seen, last_step, write_report
from smp_launch.watch.watch import HangWatch
from smp_records.rank_record import FOLDER_VARIABLE

if TYPE_CHECKING:
    from smp_config.parameters import ModelParallelParameters
    from smp_launch.anywhere.detect_launcher import DetectedLauncher
from smp_config.formats.secrets import mask_secrets, masked_words


@dataclass(frozen=True)
class LocalJob:
    """All that is known before the first process starts.

    Attributes:
        surroundings: the placement of the ranks.
        script: a Python or shell script, as it was written.
        words: its command line.
        parameters: parameters of the model parallel library; None if the script has its own, or none.
        again: command for each task of an allocation: this very command.
    """

    surroundings: DetectedLauncher
    script: str
    words: tuple[str, ...]
    parameters: ModelParallelParameters | Version2Parameters | None
    again: tuple[str, ...]

    def check(self) -> None:
        """Raise ConfigError if the degrees do not fit the number of ranks."""
        if self.parameters is not None and self.surroundings.size:
            self.parameters.topology(self.surroundings.size)

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that all ranks of this host inherit."""
        passed = {name: value for name, value in environ.items() if name != LIFELINE_VARIABLE}
        if self.parameters is not None:
            passed[PARAMETERS_VARIABLE] = json.dumps(self.parameters.to_mp_parameters())
            passed[VERSION_VARIABLE] = "2" if isinstance(self.parameters, Version2Parameters) else "1"
            passed = {**self.parameters.variables, **passed}
        return passed

    def command(self, ready: Standby | None = None, *, is_restart: bool = False) -> list[str]:
        """Return the command line that this process runs, or becomes.

        ``ready`` is the standby with the imports that restarted ranks need not repeat.
        """
        surroundings = self.surroundings
        if surroundings.starter is not None:
            return [*surroundings.starter.command, *self.again]
        local = str(surroundings.local_rank) if surroundings.is_rank else LOCAL_RANK
        rank = isolated_command("smp_launch.anywhere.plain_rank", local, "--", self.script, *self.words)
        if surroundings.is_rank:
            return rank
        if ready is not None:
            rank = ready.program(rank, is_restart=is_restart, whose="process")
        return isolated_command("smp_launch.anywhere.local_ranks", str(surroundings.ranks), "--", *rank)

    def describe(self, environ: Mapping[str, str]) -> list[str]:
        """Return lines that describe the detected launcher and the command that would start."""
        surroundings = self.surroundings
        lines = [f"surroundings: {surroundings.describe()}"]
        if self.parameters is not None:
            lines.append(f"parameters: {json.dumps(self.parameters.to_mp_parameters(), sort_keys=True)}")
        if surroundings.size:
            after = self.environment(environ)
            prepare(surroundings, surroundings.local_rank, after)
            # The line above already shows the parameters.
            new = {
                name: value
                for name, value in after.items()
                if environ.get(name) != value and name not in (PARAMETERS_VARIABLE, VERSION_VARIABLE)
            }
            if not surroundings.port and not surroundings.uses_mpi:
                new["MASTER_PORT"] = "(a free port)"
            lines.append(
                f"variables of rank {surroundings.first_rank}: "
                + " ".join(f"{k}={mask_secrets(k, v)}" for k, v in sorted(new.items()))
            )
        return [*lines, f"command: {shlex.join(masked_words(self.command()))}"]

    def become(self, environ: Mapping[str, str]) -> NoReturn:
        """Replace this process by the rank, or by srun, so that its parent signals it and sees its exit code.

        Raises:
            LaunchError: there is no srun.
        """
        command, passed = self.command(), dict(environ)
        if self.surroundings.is_rank:
            passed = {**self.environment(environ), SURROUNDINGS_VARIABLE: to_text(self.surroundings)}
        elif shutil.which(command[0], path=environ.get("PATH")) is None:
            starter = self.surroundings.starter
            if starter is None:
                raise AssertionError("this process is neither a rank nor before the ranks")
            raise LaunchError(
                f"{starter.variable} is {environ.get(starter.variable)}, so this is {starter.place}, but no folder of PATH has "
                f"{command[0]}, which starts its tasks; add the folder, or unset {starter.variable} to run on this machine alone",
                code="SMP107",
            )
        else:
            passed = with_secret(passed)  # srun hands it on to all tasks
        if self.surroundings.first_rank == 0:
            write_own_line(self.surroundings.describe())
        os.execvpe(command[0], command, passed)

    def run(self, stop: StopRequests, environ: Mapping[str, str]) -> tuple[int, Cause | None]:
        """Run the ranks of this host to their end.

        Returns:
            The exit code, and why the job failed when it is not 0.
        """
        limit = max_restarts(environ)
        if limit and not self.surroundings.one_host:
            write_own_line(
                f"{RESTARTS_VARIABLE}={limit} has no effect: this launcher has {self.surroundings.ranks} of "
                f"{self.surroundings.size} ranks, and those of the others would have to be started again with them"
            )
            limit = 0
        write_own_line(f"{self.surroundings.describe()}; they run {self.script}")
        if warning := shared_memory_warning(self.surroundings.ranks):
            write_own_line(warning)
        if emulates_cuda(environ):
            write_own_line(EMULATION_LINE)
        with (
            memory_folder(environ) as memory,
            keep_standby(self.environment(environ), self.script, Path.cwd(), wanted=limit > 0) as ready,
        ):
            passed = {**environ, **memory, **ready.variables()}
            restarts = Restarts(limit, stop)
            return restarts.run(
                lambda count: self._start(stop, {**passed, COUNT_VARIABLE: str(count)}, ready, keeps=limit > 0)
            )

    def _start(self, stop: StopRequests, environ: Mapping[str, str], ready: Standby, *, keeps: bool) -> Attempt:
        """Run the ranks to their end, once.

        Args:
            ready: the standby with the imports of restarted ranks.
            keeps: whether ranks record their positions even without a watch for hangs.
        """
        with _meeting_place(self.surroundings) as surroundings, private_dir(Path(tempfile.gettempdir())) as reports:
            collector = FailureCollector(lambda rank: surroundings.host, mpirun=False)
            supervisor = Supervisor(
                stop,
                collector,
                failure_patience=FAILURE_PATIENCE_ALONE if surroundings.size == 1 else FAILURE_PATIENCE,
                ranks=surroundings.ranks,
                first_rank=surroundings.first_rank,
                grace=grace_seconds(environ),
                spare=ready.pids,
                pipes=reports,
            )
            passed = self.environment(environ)
            passed = {
                **(with_secret(passed) if surroundings.one_host else passed),
                SURROUNDINGS_VARIABLE: to_text(surroundings),
                REPORT_VARIABLE: str(reports),
            }
            patience = HangTimeout.from_environment(environ)
            if patience.watches or keeps:
                passed[FOLDER_VARIABLE] = str(reports)
            if patience.watches:
                supervisor.watch = HangWatch([LocalRanks(reports, wakes=True)], patience, surroundings.size)
            is_restart = restart_count(environ) > 0
            if is_restart:
                ready.hurry()
            command = self.command(ready, is_restart=is_restart)
            outcome = supervisor.run(command, passed, os.getcwd())
            collector.read_reports(reports)
            collector.last_seen = last_seen(reports)
            show(collector.finish(), 2)
            code, cause = self._verdict(outcome, collector)
            step = last_step(reports, cause.rank) if cause else None
            return Attempt(code, cause, step, outcome.stopped_by is not None)

    def _verdict(self, outcome: ProgramOutcome, collector: FailureCollector) -> tuple[int, Cause | None]:
        if outcome.hang is not None:
            report = write_report(Path.cwd(), outcome.hang)
            if report is not None:
                write_own_line(f"the report on the hang is {report}")
            return 1, cause_of_hang(outcome.hang, lambda rank: self.surroundings.host)
        has_succeeded = outcome.returncode == 0 and not collector.records
        if has_succeeded:
            return 0, None
        return exit_code(outcome), cause_of(collector, outcome, self.script)


def with_secret(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` with a secret of this job, if it has none. The process that starts all ranks calls this."""
    return {**environ, SECRET_VARIABLE: environ.get(SECRET_VARIABLE) or secrets.token_hex(32)}


def plan(
    surroundings: DetectedLauncher,
    script: str,
    words: Sequence[str],
    parameters: ModelParallelParameters | Version2Parameters | None,
    again: Sequence[str],
    environ: Mapping[str, str],
) -> LocalJob:
    """Return the job of a script.

    Raises:
        ConfigError: the script is missing or is neither .py nor .sh, the degrees do not fit the number of ranks,
            or the job's secret can be guessed.
    """
    path = Path(script)
    if not path.is_file():
        raise ConfigError(
            f"SCRIPT {script!r} is no file in {Path.cwd()}; give its path from there, and its own words behind it",
            code="SMP107",
        )
    if path.suffix not in (".py", ".sh"):
        raise ConfigError(
            f"SCRIPT {script!r} ends in {path.suffix or 'nothing'!r}; .py is run with Python and .sh with bash: rename it, or "
            "call it from a shell script",
            code="SMP107",
        )
    job = LocalJob(surroundings, script, tuple(words), parameters, tuple(again))
    job.check()
    job_secret(environ)
    return job


@contextlib.contextmanager
def _meeting_place(surroundings: DetectedLauncher) -> Iterator[DetectedLauncher]:
    """Yield ``surroundings`` with a reserved port, or unchanged if they have a port."""
    if surroundings.port:
        yield surroundings
        return
    with reserved_port() as port:
        yield replace(surroundings, port=port)
