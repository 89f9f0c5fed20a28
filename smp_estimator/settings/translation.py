"""The typed distribution as the hyperparameters and MPI options that the training platform reads, and back."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from smp_config import ConfigError, JobSettings
from smp_config.job import DATA_PARALLEL_ENABLED, DEFAULT_MPI_OPTIONS, MPI_OPTIONS, MpiSettings
from smp_config.machine.instances import instance
from smp_config.mpi_options import MpiOption, exported_variables, parse_mpi_options

#: Makes NCCL use the Elastic Fabric Adapter.
EFA_VARIABLES = {"FI_PROVIDER": "efa", "NCCL_PROTO": "simple"}

#: Lets GPUs read each other's memory over the adapter, where the instance can.
RDMA_VARIABLES = {"FI_EFA_USE_DEVICE_RDMA": "1"}

#: Parameters of ``--mca`` that the training toolkit of the stock images sets itself; a second one stops mpirun 4.1.
_OF_THE_TOOLKIT = frozenset(
    """btl btl_tcp_if_include btl_vader_single_copy_mechanism oob_tcp_if_include orte_abort_on_non_zero_status
    plm_rsh_no_tree_spawn pml""".split()
)

#: Variables of the collectives that must reach the ranks however they are started.
_MIRRORED_PREFIX = "SMDDP_"
_MIRRORED_NAMES = ("SMP_NCCL_THROTTLE_LIMIT",)


def hyperparameters(
    settings: JobSettings, environment: Mapping[str, Any] | None = None, later: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the job's hyperparameters as Python values (the SDK encodes each as JSON).

    Both ``partitions`` and ``pipeline_parallel_degree`` are in ``mp_parameters``, since client libraries look for
    the old name, and the switch of the data parallel library is always present, as the SDK sends it.

    Args:
        environment: the estimator's; its variables of the collectives become ``-x`` options too. Variables that it sets
            get no default.
        later: pipeline variables by the hyperparameter that carries them.
    """
    sent = settings.to_hyperparameters()
    if settings.version_2 is not None:
        sent.setdefault(DATA_PARALLEL_ENABLED, False)
    if settings.model_parallel is not None:
        sent.setdefault(DATA_PARALLEL_ENABLED, False)
        custom = settings.mpi.custom_mpi_options if settings.mpi is not None else ""
        sent[MPI_OPTIONS] = _joined(_added_options(settings.instance_type, custom, environment or {}), custom)
    return {**sent, **(later or {})}


def for_stock_launcher(settings: JobSettings, environment: Mapping[str, Any] | None = None) -> JobSettings:
    """Return the settings of a data parallel job for a stock image's launcher: mpirun, with the platform's options.

    With the data parallel library alone, that launcher would start the ranks with a program of the library that few
    images have. Without a number of processes it starts one on each GPU.
    """
    if settings.data_parallel is None:
        return settings
    mpi = settings.mpi or MpiSettings(enabled=True)
    custom = f"{mpi.custom_mpi_options} {settings.data_parallel.custom_mpi_options}"
    options = _joined(_added_options(settings.instance_type, custom, environment or {}), custom)
    return settings.model_copy(update={"mpi": mpi.model_copy(update={"custom_mpi_options": options})})


def from_hyperparameters(carried: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the ``distribution`` dictionary of a running job, or None if it uses no strategy of this package.

    This is the inverse of :func:`hyperparameters`, for ``attach()``; options that were added for the platform are removed
    again.
    """
    settings = JobSettings.from_hyperparameters(carried)
    distribution: dict[str, Any] = {}
    if settings.model_parallel is not None:
        parameters = settings.model_parallel.to_mp_parameters()
        distribution["smdistributed"] = {"modelparallel": {"enabled": True, "parameters": parameters}}
    elif settings.data_parallel is not None:
        data: dict[str, Any] = {"enabled": True}
        if settings.data_parallel.custom_mpi_options:
            data["custom_mpi_options"] = settings.data_parallel.custom_mpi_options
        distribution["smdistributed"] = {"dataparallel": data}
    elif settings.version_2 is not None and settings.torchrun is not None:
        parameters = settings.version_2.to_mp_parameters()
        distribution["smdistributed"] = {"modelparallel": {"enabled": True, "parameters": parameters}}
        distribution["torch_distributed"] = settings.torchrun.model_dump(exclude_none=True)
    mpi = _mpi_as_given(settings)
    if mpi and (settings.data_parallel is None or len(mpi) > 1):  # else only what for_stock_launcher has added
        distribution["mpi"] = mpi
    if distribution and settings.instance_groups:
        distribution["instance_groups"] = list(settings.instance_groups)
    return distribution or None


def _mpi_as_given(settings: JobSettings) -> dict[str, Any]:
    """Return ``distribution["mpi"]`` without the options that were added for the platform; empty if mpi is off."""
    if settings.mpi is None or not settings.mpi.enabled:
        return {}
    mpi: dict[str, Any] = {"enabled": True}
    if settings.mpi.processes_per_host is not None:
        mpi["processes_per_host"] = settings.mpi.processes_per_host
    custom = settings.mpi.custom_mpi_options
    if settings.model_parallel is not None or settings.data_parallel is not None:
        custom = _without(custom, _default_options(settings.instance_type))
    if settings.data_parallel is not None:
        custom = custom.removesuffix(_without_repetition(settings.data_parallel.custom_mpi_options)).rstrip()
    if custom:
        mpi["custom_mpi_options"] = custom
    return mpi


def mirrored_environment(settings: JobSettings, environment: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return ``environment`` with the variables of the collectives that ``custom_mpi_options`` sets with ``-x``.

    Raises:
        ConfigError: both set one variable, to different values.
    """
    merged = dict(environment or {})
    if settings.model_parallel is None or settings.mpi is None:
        return merged
    for name, value in exported_variables(parse_mpi_options(settings.mpi.custom_mpi_options)).items():
        if not _is_mirrored(name):
            continue
        if name in merged and merged[name] != value:
            raise ConfigError(
                f"{name} is {merged[name]!r} in environment and {value!r} in custom_mpi_options ('-x {name}={value}'); both "
                f"reach the ranks and only one can hold: remove one, for example environment[{name!r}]",
                code="SMP103",
            )
        merged[name] = value
    return merged


def with_options_of_all(
    settings: JobSettings, instance_types: Sequence[str | None], environment: Mapping[str, Any] | None
) -> tuple[JobSettings, list[str]]:
    """Return settings with the MPI options that each of several instance types needs.

    Returns:
        The settings, and the names of options that only some of the types need; these are not set.
    """
    if settings.mpi is None:
        return settings, []
    custom = settings.mpi.custom_mpi_options
    wanted = []
    for kind in instance_types:
        options = _added_options(kind, custom, environment or {})
        wanted.append({str(option): option for option in options})
    in_all = set.intersection(*(set(options) for options in wanted))
    shared = [option for text, option in wanted[0].items() if text in in_all]
    keys: set[str] = set()
    for options_by_text in wanted:
        keys.update(option.key for option in options_by_text.values())
    missing = sorted(keys - {option.key for option in shared})
    mpi = settings.mpi.model_copy(update={"custom_mpi_options": _joined(shared, custom)})
    return settings.model_copy(update={"mpi": mpi}), missing


def stock_image_conflicts(settings: JobSettings) -> list[str]:
    """Return sentences about options that the launcher of a stock image sets too; mpirun would not start.

    Raises:
        ConfigError: an option that this launcher would break apart: it splits at spaces and does not support quotes.
    """
    if settings.mpi is None:
        return []
    given = parse_mpi_options(_without_repetition(settings.mpi.custom_mpi_options))
    for option in given:
        if any(_needs_quotes(word) for word in option.arguments()):
            way = f"environment={{{option.key!r}: {option.value!r}}}" if option.name == "x" else "image_uri"
            raise ConfigError(
                f"custom_mpi_options has {option}, and the stock image's launcher splits at every blank and keeps quotes, so "
                f"mpirun would get {str(option).split()[-1]!r} as a word of its own; give {way} instead"
                + ("" if option.name == "x" else ", an image with a launcher of your own"),
                code="SMP103",
            )
    return [
        f"custom_mpi_options has '{option}', and the stock image's launcher sets {option.key} itself; Open MPI 4.1 does not "
        "start when a parameter is listed twice: remove it, or give image_uri, an image with a launcher of your own"
        for option in given
        if option.name == "mca" and option.key in _OF_THE_TOOLKIT
    ]


def _default_options(instance_type: str | None) -> list[MpiOption]:
    """Return the options that the platform needs on this instance, besides those that it sets itself."""
    known = instance(instance_type or "")
    if known is None or not known.efa:
        return []
    wanted = dict(EFA_VARIABLES)
    if known.rdma:
        wanted |= RDMA_VARIABLES
    return [MpiOption("x", name, value) for name, value in wanted.items()]


def _added_options(instance_type: str | None, custom: str, environment: Mapping[str, Any]) -> list[MpiOption]:
    """Return the platform's options and the mirrored variables, without those that the user sets in either place."""
    added = {option.subject: option for option in _default_options(instance_type)}
    for name in environment:
        added.pop(("x", name), None)
    for name, value in _mirrored(environment):
        option = MpiOption("x", name, value)
        added[option.subject] = option
    for given in parse_mpi_options(custom):
        added.pop(given.subject, None)
    return list(added.values())


def _mirrored(environment: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the variables of a job that its ranks get as MPI options."""
    for name, value in sorted(environment.items()):
        if not _is_mirrored(name):
            continue
        # The stock images' launcher splits the options at spaces.
        if isinstance(value, str) and not _needs_quotes(value):
            yield name, value


def _joined(options: Sequence[MpiOption], custom: str) -> str:
    """Join options to one line with as few quotes as possible: the stock images' launcher splits at spaces.

    The option that every launcher sets itself is removed. mpirun 4.1 refuses to start if a parameter of ``--mca`` is listed
    twice, even with the same value.
    """
    words = []
    for option in options:
        words += option.arguments()
    words.append(_without_repetition(custom))
    return " ".join(words).strip()


def _without_repetition(custom: str) -> str:
    words, (_, name, value) = _words(custom), DEFAULT_MPI_OPTIONS.split()
    at = 0
    while at < len(words):
        if words[at] in ("--mca", "-mca") and words[at + 1 : at + 3] == [name, value]:
            del words[at : at + 3]
        else:
            at += 1
    return " ".join(words)


def _without(text: str, defaults: Sequence[MpiOption]) -> str:
    words = _words(text)
    for option in defaults:
        expected = option.arguments()
        if words[: len(expected)] == expected:
            del words[: len(expected)]
    return " ".join(words)


def _words(text: str) -> list[str]:
    """Return the words of a command line, quoted only if necessary."""
    words = []
    for word in shlex.split(text):
        words.append(shlex.quote(word) if _needs_quotes(word) else word)
    return words


def _needs_quotes(word: str) -> bool:
    return not word or re.search(r"[\s'\"\\]", word) is not None


def _is_mirrored(name: str) -> bool:
    return name.startswith(_MIRRORED_PREFIX) or name in _MIRRORED_NAMES
