"""A job as it is known before its first process starts, and with the hosts that are left after one was lost."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from smp_config.formats.secrets import masked_words
from smp_config.mpi_options import MergedOptions, MpiOption, exported_variables, merge, parse_mpi_options
from smp_config.recovery import COUNT_VARIABLE, PARAMETERS_VARIABLE, READERS_VARIABLE, max_restarts
from smp_config.shrink_degrees import count_readers, shrink_to
from smp_config.smddp import BufferSizes
from smp_launch.isolated import isolated_command
from smp_launch.machine.hosts import LAYOUT_VARIABLE, Layout, ScriptKind
from smp_launch.machine.locked_folders import STATUS_VARIABLE
from smp_launch.machine.network import PORT_VARIABLE, reserved_port, usable_interface
from smp_launch.machine.signals import LIFELINE_VARIABLE
from smp_launch.mpirun.command import OpenMpi, PrivateDirs, as_root, mpi_options, without_scheduler
from smp_launch.sagemaker.environment import HOST_VARIABLE, TrainingEnvironment, cpu_count
from smp_launch.supervision.supervise import GRACE_VARIABLE
from smp_launch.watch.hang_timeout import HangTimeout

if TYPE_CHECKING:
    from smp_config.job import JobSettings
    from smp_config.parameters import ModelParallelParameters

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
    patience: HangTimeout
    restarts: int
    parameters: ModelParallelParameters | None = None
    #: Hosts without ranks, which take the place of lost ones.
    spares: tuple[str, ...] = ()
    #: Among how many ranks a batch was divided when the job began; None as long as it has as many.
    readers: int | None = None

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
        buffers = BufferSizes.from_environment(exported_variables(custom), environ)
        mpi = None if layout.kind is ScriptKind.SCRIPT else OpenMpi.find(environ)
        patience, restarts = HangTimeout.from_environment(environ), max_restarts(environ)
        spares = tuple(training.hosts[len(layout.hosts) :]) if mpi is not None else ()
        parameters = settings.model_parallel
        job = cls(training, layout, entry_point, custom, buffers, mpi, patience, restarts, parameters, spares)
        if mpi is not None:
            job.options(PrivateDirs()).raise_for_conflicts()
        return job

    def options(self, dirs: PrivateDirs) -> MergedOptions:
        """Return all options of mpirun, merged."""
        if self.mpi is None:
            return MergedOptions(())
        interface = usable_interface(self.training.network_interface, self.layout.one_machine)
        return mpi_options(self.mpi.dialect, self.layout, self.custom, interface, dirs)

    def program(self) -> list[str]:
        """Return the command line of every rank: the wrapper around the user's script."""
        return isolated_command("smp_launch.ranks.rank", "--", self.entry_point, *self.training.user_arguments())

    def environment(self, environ: Mapping[str, str], announced: Mapping[str, str]) -> dict[str, str]:
        """Return the environment that mpirun and the ranks inherit.

        It holds the user's variables, ``announced``, and the variables that the wrapper needs.
        """
        own = (LIFELINE_VARIABLE, GRACE_VARIABLE, STATUS_VARIABLE)
        inherited = {name: value for name, value in as_root(environ).items() if name not in own}
        if self.mpi is not None:
            inherited = without_scheduler(inherited)
        return {**inherited, **announced, HOST_VARIABLE: self.training.current_host}

    @contextmanager
    def announced(self, environ: Mapping[str, str]) -> Iterator[dict[str, str]]:
        """Yield the variables that ranks on other hosts must get from the leader.

        The rest of their environment comes from their own host. The reserved port is free until the block ends.
        """
        values = {**self.buffers.to_environment(), LAYOUT_VARIABLE: self.layout.to_text(), "PYTHONUNBUFFERED": "1"}
        values[COUNT_VARIABLE] = environ.get(COUNT_VARIABLE, "0")
        if self.parameters is not None:
            values |= {name: environ.get(name, value) for name, value in self.parameters.variables.items()}
        if self.readers is not None and self.parameters is not None:
            values[PARAMETERS_VARIABLE] = json.dumps(self.parameters.to_mp_parameters())
            values[READERS_VARIABLE] = str(self.readers)
        if self.layout.kind not in (ScriptKind.DATA_PARALLEL, ScriptKind.VERSION_2) or PORT_VARIABLE in environ:
            yield values
        else:
            # The first rank, which the others connect to, is on this host.
            with reserved_port() as port:
                yield {**values, PORT_VARIABLE: str(port)}

    def forget_failure(self) -> None:
        """Remove the failure files that scripts have written of a failure after which they are started again."""
        tree, here = self.training.tree, self.training.current_host
        hosts = self.layout.hosts if self.layout.simulated else (here,)
        for host in hosts:
            tree.of_host(host, here).failure_file.unlink(missing_ok=True)

    def without(self, lost: Collection[str]) -> Job | None:
        """Return the job without the lost hosts.

        Spares replace lost hosts. Without enough spares, the job has fewer hosts, at degrees that fit them.

        Returns:
            None if the job cannot go on.
        """
        spares = [host for host in self.spares if host not in lost]
        hosts = []
        for host in self.layout.hosts:
            if host not in lost:
                hosts.append(host)
            elif spares:
                hosts.append(spares.pop(0))
        if not hosts or hosts[0] != self.layout.leader:
            return None
        layout = self.layout.over(hosts)
        parameters, readers_ = self.parameters, self.readers
        is_smaller = layout.world_size < self.layout.world_size
        if is_smaller and layout.kind is ScriptKind.VERSION_2:
            return None  # PyTorch shards, and its degrees are not changed while a job runs
        if is_smaller and parameters is not None:
            fitting = shrink_to(parameters, layout.world_size)
            if fitting is None:
                return None
            readers_ = readers_ or count_readers(parameters, self.layout.world_size)
            parameters = fitting
        given = None
        if readers_ is not None and parameters is not None:
            given = parameters.to_mp_parameters()
        training = self.training.over(hosts, given)
        return replace(
            self, training=training, layout=layout, parameters=parameters, spares=tuple(spares), readers=readers_
        )

    def describe(self) -> str:
        """Return one line for the log: hosts, processes, program."""
        layout = self.layout
        threads = os.environ.get("OMP_NUM_THREADS") or str(layout.threads_per_rank(cpu_count()))
        words = " ".join(masked_words([self.entry_point, *self.training.user_arguments()]))
        shown = words if len(words) <= _SHOWN_CHARACTERS else words[: _SHOWN_CHARACTERS - 1] + "…"
        by = f"{layout.kind.value}, {self.mpi}" if self.mpi else "no mpirun"
        each = f"{threads} thread{'s' * (threads != '1')} each"
        return f"{layout.describe()} ({by}; {each}) run {shown}"
