"""The ``distribution`` dictionary: checked on the notebook, turned into a job's hyperparameters.

Only the settings of the two ``smdistributed`` libraries are read here. The SDK's own code reads every other strategy (and
a plain ``mpi`` in the cloud).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from smp_config import ConfigError, Group, JobSettings, ModelParallelParameters, Topology, limits, recovery
from smp_config.errors import kind_of, show_value, suggest
from smp_config.job import HYPERPARAMETER_CHARACTERS, MP_PARAMETERS, MPI_PROCESSES
from smp_config.machine import emulation, shared_gpu
from smp_config.machine.instances import require_usable
from smp_config.mpi_options import MpiOption, check_mpi_options, exported_variables, merge
from smp_config.smddp import BufferSizes
from smp_estimator.settings.accelerators import check_accelerators, count_gpus, find_instance
from smp_estimator.settings.plain_values import require_plain
from smp_estimator.settings.translation import (
    for_stock_launcher,
    hyperparameters,
    mirrored_environment,
    stock_image_conflicts,
)
from smp_estimator.settings.variables import separate
from smp_records import faults, numerics, profiling, tracking
from smp_records.timeline import steps_to_keep

if TYPE_CHECKING:
    from smp_config.machine.instances import Instance

logger = logging.getLogger(__name__)

#: Every strategy that the SDK's PyTorch estimator reads from ``distribution``.
KNOWN_STRATEGIES = (
    "smdistributed",
    "mpi",
    "torch_distributed",
    "pytorchddp",
    "pytorchxla",
    "parameter_server",
    "multi_worker_mirrored_strategy",
    "instance_groups",
)

#: What process mode cannot start: these need a launcher other than mpirun.
_OTHER_LAUNCHERS = ("torch_distributed", "pytorchxla", "parameter_server", "multi_worker_mirrored_strategy")


#: Variables of what works on steps, models and optimizers of version 1 of the library.
_ONLY_VERSION_1 = (recovery.MEMORY_VARIABLE, numerics.VARIABLE, tracking.LOGGERS_VARIABLE, profiling.VARIABLE)


@dataclass(frozen=True)
class Distribution:
    """A distribution that was read and checked.

    Attributes:
        later: values that only a pipeline knows, by the hyperparameter that carries them.
    """

    settings: JobSettings
    later: Mapping[str, Any]


def is_ours(distribution: Mapping[str, Any] | None, *, process_mode: bool = False) -> bool:
    """Return whether this module, not the SDK, reads ``distribution``.

    True if it names ``smdistributed``. In process mode also for ``mpi`` alone, since this package's bootstrap reads it.
    """
    if not isinstance(distribution, Mapping):
        return distribution is not None
    if process_mode and "mpi" in distribution:
        return True
    if "smdistributed" not in distribution:
        return False
    if is_model_parallel(distribution):
        return True
    # torchrun starts other libraries, which is the SDK's business.
    torchrun = distribution.get("torch_distributed")
    is_by_torchrun = isinstance(torchrun, Mapping) and torchrun.get("enabled")
    return not is_by_torchrun


def is_model_parallel(distribution: Any) -> bool:
    """Return whether ``distribution`` turns on the model parallel library, even if other parts of it are invalid."""
    return _turns_on(distribution, "modelparallel")


def is_data_parallel(distribution: Any) -> bool:
    """Return whether ``distribution`` turns on the data parallel library, even if other parts of it are invalid."""
    return _turns_on(distribution, "dataparallel")


def is_version_2(distribution: Any) -> bool:
    """Return whether ``distribution`` describes a job of version 2, even if other parts of it are invalid."""
    torchrun = distribution.get("torch_distributed") if isinstance(distribution, Mapping) else None
    is_by_torchrun = isinstance(torchrun, Mapping) and bool(torchrun.get("enabled"))
    return is_by_torchrun and is_model_parallel(distribution)


def _turns_on(distribution: Any, library: str) -> bool:
    libraries = distribution.get("smdistributed") if isinstance(distribution, Mapping) else None
    part = libraries.get(library) if isinstance(libraries, Mapping) else None
    return isinstance(part, Mapping) and part.get("enabled") is True


def refuse_unknown_strategies(distribution: Any, *, process_mode: bool = False) -> None:
    """Raise ConfigError for entries that the SDK would drop silently: a misspelled strategy, or a value that is no dictionary."""
    if distribution is None:
        return
    if not isinstance(distribution, Mapping):
        raise ConfigError(
            f"distribution is {show_value(distribution)}, {kind_of(distribution)}; strategies are read from its keys: "
            'give a dictionary such as {"smdistributed": {"modelparallel": {"enabled": True}}, '
            '"mpi": {"enabled": True, "processes_per_host": 2}}',
            code="SMP103",
        )
    for key in distribution:
        if key not in KNOWN_STRATEGIES:
            raise ConfigError(
                f"unknown strategy {show_value(key)} in distribution{suggest(show_value(key), KNOWN_STRATEGIES)}; the keys "
                "given are "
                f"{show_value(sorted(map(show_value, distribution)))} and an unknown one would be dropped silently: use one of "
                f"{', '.join(KNOWN_STRATEGIES)}",
                code="SMP103",
            )
    if process_mode:
        for key in _OTHER_LAUNCHERS:
            part = distribution.get(key)
            if isinstance(part, Mapping) and part.get("enabled"):
                if key == "torch_distributed" and is_model_parallel(distribution):
                    continue
                raise ConfigError(
                    f"distribution enables {key!r}, but this job runs as processes of this machine, which are started "
                    'with mpirun: use {"mpi": {"enabled": True, "processes_per_host": 2}}, or give image_uri to run '
                    "the job in Docker",
                    code="SMP103",
                )


def read(
    distribution: Mapping[str, Any],
    *,
    instance_type: str | None,
    hosts: int | None,
    process_mode: bool,
    environment: Mapping[str, str] | None = None,
    say: Callable[[str], None] = logger.warning,
) -> Distribution:
    """Read and check an ``smdistributed`` (or process mode ``mpi``) distribution.

    Args:
        distribution: the dictionary of the estimator.
        instance_type: the value of ``sagemaker_instance_type``; None with instance groups.
        hosts: number of hosts, or None if it is only known at run time (a pipeline variable).
        process_mode: the job runs as processes of this machine; then ``processes_per_host`` may be absent.
        environment: the estimator's; its buffer sizes are checked.
        say: called with one sentence for each setting that is allowed but ignored or filled in.

    Returns:
        The distribution, typed; in process mode with ``processes_per_host`` filled in.

    Raises:
        ConfigError: any setting that would fail, or be dropped silently, after the job has started.
    """
    refuse_unknown_strategies(distribution, process_mode=process_mode)
    require_plain(distribution, "distribution")
    distribution, later = separate(distribution)
    known = find_instance(instance_type, say)
    settings = JobSettings.from_distribution(distribution, instance_type=instance_type)
    settings = _with_mpi(settings, distribution, say, known, process_mode=process_mode, later=later)
    settings = _check_version_2(
        settings, known, hosts, say, process_mode=process_mode, environment=environment or {}, later=later
    )
    _check_ranks(settings, hosts, process_mode=process_mode)
    spares = _check_variables(exported_variables(_check_mpi_options(settings)), environment or {}, hosts)
    # Spare hosts have no ranks until another host is lost.
    hosts = None if hosts is None else hosts - spares
    mirrored_environment(settings, environment)
    if settings.model_parallel is not None:
        for warning in settings.model_parallel.warnings():
            say(f"distribution: {warning}")
        check_accelerators(settings, known, say, hosts=hosts, process_mode=process_mode, environment=environment or {})
        processes = settings.mpi.processes_per_host if settings.mpi is not None else None
        if processes is not None and hosts is not None and MP_PARAMETERS not in later:
            _check_topology(settings.model_parallel, processes, hosts, say)
        _check_length(settings)
    return Distribution(settings, later)


class SettingsReader:
    """Reader of one estimator's distribution that caches the result.

    An estimator's attributes may be changed at any time, and its dictionaries from inside. So every step before a job starts
    reads again, and the result is cached with its source.
    """

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._source = ""
        self._kept: Distribution | None = None

    def say(self, sentence: str) -> None:
        """Warn, but only once about each finding."""
        if sentence not in self._said:
            self._said.add(sentence)
            logger.warning("%s", sentence)

    def read(self, distribution: dict[str, Any], *, stock_image: bool, **where: Any) -> Distribution:
        """Return the typed distribution.

        Args:
            stock_image: the launcher of a stock image starts the job.
            where: the other arguments of :func:`read`.

        Raises:
            ConfigError: as for :func:`read`; no result is cached then.
        """
        require_plain(distribution, "distribution")
        require_plain(where.get("environment"), "environment")
        # As text: it does not change with the user's dictionaries, and does not take True for 1.
        source = repr((distribution, stock_image, where))
        if self._kept is None or source != self._source:
            found = read(distribution, say=self.say, **where)
            if stock_image:
                _refuse_other_count(found.settings)
                found = replace(found, settings=for_stock_launcher(found.settings, where.get("environment")))
                for sentence in stock_image_conflicts(found.settings):
                    self.say(sentence)
            self._source, self._kept = source, found
        return self._kept


def group_names(distribution: Mapping[str, Any], instance_groups: Sequence[Any] | None) -> dict[str, Any]:
    """Return a copy of ``distribution`` with the names of the instance groups that train in a heterogeneous cluster.

    Raises:
        ConfigError: a group that the estimator does not have, or several groups without a choice.
    """
    settled = dict(distribution)
    chosen = list(settled.get("instance_groups") or ())
    available = {group.instance_group_name: group for group in instance_groups or ()}
    names = [str(getattr(group, "instance_group_name", group)) for group in chosen]
    if not available:
        if names:
            raise ConfigError(
                f"distribution names the instance groups {names}, but the estimator was made without instance_groups; "
                "give the same groups to the estimator, or remove them from distribution",
                code="SMP103",
            )
        return settled
    for name in names:
        if name not in available:
            raise ConfigError(
                f"distribution names the instance group {name!r}{suggest(name, available)}; the estimator has "
                f"{sorted(available)}: use one of these",
                code="SMP103",
            )
    if (not names and len(available) > 1) or len(names) > 1:
        raise ConfigError(
            f"distribution trains on {len(names)} instance groups, out of the estimator's {sorted(available)}; exactly "
            'one trains: set distribution["instance_groups"] to a list with one of them',
            code="SMP103",
        )
    settled["instance_groups"] = names or list(available)
    return settled


def _check_version_2(
    settings: JobSettings,
    known: Instance | None,
    hosts: int | None,
    say: Callable[[str], None],
    *,
    process_mode: bool,
    environment: Mapping[str, Any],
    later: Mapping[str, Any],
) -> JobSettings:
    """Check a job of version 2 of the library; on this machine, fill in its number of processes.

    Raises:
        ConfigError: accelerators that the library does not run on, or degrees that do not fit the processes.
    """
    parameters, torchrun = settings.version_2, settings.torchrun
    if parameters is None or torchrun is None:
        return settings
    processes = torchrun.processes_per_host
    if processes is None:
        gpus, _ = count_gpus(settings.instance_type, known, process_mode=process_mode, environment=environment)
        # Without GPUs, one process trains on the processor.
        processes = gpus if gpus is None else max(gpus, 1)
    require_usable(settings.instance_type, processes, "torch_distributed.processes_per_host")
    if process_mode and torchrun.processes_per_host is None:
        processes = processes or 1
        say(f"torch_distributed.processes_per_host was not given: {processes} per host")
        settings = settings.model_copy(
            update={"torchrun": torchrun.model_copy(update={"processes_per_host": processes})}
        )
    if processes is not None and hosts is not None and MP_PARAMETERS not in later:
        parameters.topology(processes * hosts)
    asked = [name for name in _ONLY_VERSION_1 if str(environment.get(name) or "0") != "0"]
    unused = f"{', '.join(asked)}: no effect on version 2 of the library, whose steps and optimizers are PyTorch's own"
    for warning in [*parameters.warnings(), *([unused] if asked else [])]:
        say(f"distribution: {warning}")
    return settings


def _refuse_other_count(settings: JobSettings) -> None:
    """Refuse a number of processes that the launcher of a stock image would ignore: it starts torchrun on all GPUs."""
    if settings.torchrun is None:
        return
    processes = settings.torchrun.processes_per_host
    known = find_instance(settings.instance_type, lambda _: None)
    if processes is None or known is None:
        return
    if processes != known.gpus:
        raise ConfigError(
            f"torch_distributed.processes_per_host is {processes}, and a stock image starts one process on each of the "
            f"{known.gpus} GPUs of {known.name}: leave processes_per_host out, or set it to {known.gpus}",
            code="SMP103",
        )


def _topology(parameters: ModelParallelParameters, per_host: int, hosts: int) -> Topology:
    """Lay the degrees over all processes of the job; raises ConfigError if they do not fit ``hosts`` × ``per_host``."""
    world = per_host * hosts
    pipeline, tensor = parameters.pipeline_parallel_degree, parameters.tensor_parallel_degree
    came_about = f"{world} processes = mpi.processes_per_host {per_host} × instance_count {hosts}"
    replica = pipeline * tensor
    try:
        return parameters.topology(world)
    except ConfigError as error:
        said = f"{error} ({came_about})"
        if world % replica:
            relation = "more than" if replica > world else "no divisor of"
            # The fewest processes per host with which all hosts together have whole replicas.
            fitting = replica // math.gcd(replica, hosts)
            said = (
                f"one model replica takes pipeline_parallel_degree {pipeline} × tensor_parallel_degree {tensor} = "
                f"{replica} processes, which is {relation} the {came_about}; set processes_per_host to {fitting} (or a "
                f"multiple of it), or choose degrees whose product divides {world}"
            )
        raise ConfigError(said).of_the_kind_of(error) from None


def _check_topology(parameters: ModelParallelParameters, per_host: int, hosts: int, say: Callable[[str], None]) -> None:
    topology = _topology(parameters, per_host, hosts)
    if topology.rdp_size > 1 and not parameters.ddp:
        say(
            f"distribution: ddp is false, and the job has {topology.rdp_size} replicas of the model that never "
            'exchange gradients; set "ddp": True, unless the script exchanges them itself'
        )
    spread = max(len({rank // per_host for rank in ranks}) for ranks in topology.groups(Group.TP))
    if spread > 1:
        last = topology.placement[-1]
        remedy = (
            f"keep tensor_parallel_degree at most {per_host}"
            if topology.tensor > per_host
            else f"use a placement_strategy that ends with T, for example 'DPT' (now {topology.placement}: {last} varies fastest)"
        )
        say(
            f"distribution: each tensor parallel group of {topology.tensor} processes is spread over {spread} hosts of "
            f"{per_host} processes, and exchanges activations in every layer over the network between them; {remedy}"
        )


def _with_mpi(
    settings: JobSettings,
    distribution: Mapping[str, Any],
    say: Callable[[str], None],
    known: Instance | None,
    *,
    process_mode: bool,
    later: Mapping[str, Any],
) -> JobSettings:
    """Check that a model parallel job has mpi with a number of processes; in process mode, fill in 1."""
    fitting = known.gpus if known is not None else 8
    if settings.model_parallel is not None and settings.mpi is None:
        state = "is disabled" if "mpi" in distribution else "is missing"
        raise ConfigError(
            f"smdistributed.modelparallel is enabled, but mpi {state} (distribution has {sorted(distribution)}); mpirun "
            f'starts the ranks: add "mpi": {{"enabled": True, "processes_per_host": {2 if known is None else fitting}}}, with the '
            "number of processes (on GPUs: of GPUs) of a host",
            code="SMP103",
        )
    if settings.mpi is None:
        return settings
    given = settings.mpi.processes_per_host
    if given is not None and given < 1:
        raise ConfigError(
            f"mpi.processes_per_host is {given}; it is the number of processes that each host starts: "
            "set it to 1 or more",
            code="SMP103",
        )
    if given is None and MPI_PROCESSES in later:
        return settings
    if given is None and settings.model_parallel is not None and not process_mode:
        raise ConfigError(
            "mpi.processes_per_host is missing; with modelparallel the platform needs the number of processes of a "
            f'host: set it to the number of its GPUs, for example "processes_per_host": {fitting}',
            code="SMP103",
        )
    if given is None and process_mode:
        say("mpi.processes_per_host was not given: one process per host")
        mpi = settings.mpi.model_copy(update={"processes_per_host": 1})
        return settings.model_copy(update={"mpi": mpi})
    return settings


def _check_ranks(settings: JobSettings, hosts: int | None, *, process_mode: bool) -> None:
    """Raise ConfigError for too many ranks, before any work that is done for each of them."""
    started_by = settings.torchrun or settings.mpi
    given = started_by.processes_per_host if started_by is not None else None
    processes = given or 1
    ranks = processes * (hosts or 1)
    if process_mode:
        most, where = limits.MOST_LOCAL_RANKS, "one machine, which all hosts of this job are"
    else:
        most, where = limits.MOST_RANKS, "one job"
    if ranks > most:
        strategy = "torch_distributed" if settings.torchrun is not None else "mpi"
        raise ConfigError(
            f"the job has {ranks} processes = {strategy}.processes_per_host {processes} × instance_count {hosts or 1}, and "
            f"{where}, has at most {most:,}: lower one of the two",
            code="SMP103",
        )


def _check_mpi_options(settings: JobSettings) -> list[MpiOption]:
    """Return the options of mpirun; raise ConfigError here, before mpirun, for one option with different values."""
    options = []
    for part in (settings.data_parallel, settings.mpi):
        if part is not None and part.custom_mpi_options:
            options += check_mpi_options(part.custom_mpi_options)
    merge((), options).raise_for_conflicts()
    return options


def _check_variables(exported: Mapping[str, str], environment: Mapping[str, Any], hosts: int | None) -> int:
    """Raise ConfigError for variables that the ranks would reject; ``-x`` overrides the environment.

    Returns:
        The number of spare hosts. Only the environment can set it: the launcher reads it.
    """
    BufferSizes.from_environment(exported, environment)
    given = {**{name: value for name, value in environment.items() if isinstance(value, str)}, **exported}
    limits.timeout_seconds(given)
    limits.hang_seconds(given)
    recovery.max_restarts(given)
    recovery.wants_memory(given)
    faults.parse(given.get(faults.VARIABLE, ""))
    limits.throttle_limit(given)
    emulation.is_asked_for(given)
    emulation.device_count(given)
    shared_gpu.read_shared_gpu(given)
    steps_to_keep(given)
    texts = {name: value for name, value in environment.items() if isinstance(value, str)}
    return recovery.spare_hosts(texts, hosts) if hosts is not None else 0


def _check_length(settings: JobSettings) -> None:
    text = json.dumps(hyperparameters(settings)[MP_PARAMETERS])
    if len(text) > HYPERPARAMETER_CHARACTERS:
        raise ConfigError(
            f"the parameters take {len(text)} characters as JSON, but the service accepts {HYPERPARAMETER_CHARACTERS} in "
            "one hyperparameter; leave out settings that hold their default, and shorten long paths by "
            f"{len(text) - HYPERPARAMETER_CHARACTERS} characters or more",
            code="SMP103",
        )
