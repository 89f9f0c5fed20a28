"""Requirements of a model parallel job on its hosts' accelerators.

A missing requirement raises an error; an unwise setting logs a warning.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from smp_config import ConfigError
from smp_config.errors import suggest
from smp_config.machine.collective_backends import AUTOMATIC, needs_gpu, traits_on_gpus
from smp_config.machine.instances import Instance, has_gpus, instances, require_usable
from smp_launch.sagemaker.environment import gpu_count, has_unusual_gpu

if TYPE_CHECKING:
    from smp_config import JobSettings


def find_instance(instance_type: Any, say: Callable[[str], None]) -> Instance | None:
    """Return the instance's row of the catalogue, or None for CPU instances and for unknown ones.

    Unknown instances are logged as a warning.

    Raises:
        ConfigError: an accelerator that the library does not run on.
    """
    known = require_usable(instance_type)
    is_of_cloud = isinstance(instance_type, str) and instance_type.startswith("ml.")
    if known is not None or not is_of_cloud:
        return known
    is_unknown = has_gpus(instance_type) is None
    if is_unknown:
        hint = suggest(instance_type, [row.name for row in instances()])
        say(f"instance_type {instance_type} is not in this version's catalogue{hint}: its GPUs are not checked")
    return None


def check_accelerators(
    settings: JobSettings,
    known: Instance | None,
    say: Callable[[str], None],
    *,
    hosts: int | None,
    process_mode: bool,
    environment: Mapping[str, Any],
) -> None:
    """Check the processes and the backend of a model parallel job against the GPUs of its hosts.

    Args:
        known: the instance's row of the catalogue.
        hosts: None when only a pipeline knows.
        process_mode: all hosts are this machine.
        environment: the estimator's.

    Raises:
        ConfigError: more processes than GPUs on an instance of the cloud, or a backend that this hardware cannot run.
    """
    parameters, processes = settings.model_parallel, settings.mpi.processes_per_host if settings.mpi else None
    if parameters is None:
        return
    require_usable(settings.instance_type, processes)
    if known is not None and processes is not None and processes < known.gpus:
        say(
            f"distribution: mpi.processes_per_host is {processes}, and {known.name} has {known.gpus} GPUs: "
            f"{known.gpus - processes} of each host stay idle"
        )
    if parameters.bf16 and known is not None and not known.gpu_facts.has_bf16:
        say(
            f"distribution: bf16 is true, and the {known.gpu} GPUs of {known.name} have no units for it: it is computed in float32 "
            "and is slower than that; use fp16, or instances with A10G, A100 or newer GPUs (g5, p4d, p5)"
        )
    backend = parameters.ddp_dist_backend
    takes_one_rank = backend != AUTOMATIC and traits_on_gpus(backend).takes_one_rank_per_gpu
    if not takes_one_rank and not parameters.host_collectives:
        return
    gpus, where = count_gpus(settings.instance_type, known, process_mode=process_mode, environment=environment)
    if parameters.host_collectives and gpus:
        raise ConfigError(
            f"host_collectives is true, which has ranks share host memory in jobs on CPUs, but {where} has {gpus} "
            f"GPU{'s' * (gpus != 1)}; remove host_collectives",
            code="SMP105",
        )
    if not takes_one_rank:
        return
    if needs_gpu(backend) and gpus == 0:
        raise ConfigError(
            f'ddp_dist_backend is "{backend}", which moves tensors between GPUs, but {where} has none; use "auto", which takes '
            'NCCL where there are GPUs, or "gloo"',
            code="SMP105",
        )
    ranks = (processes or 1) * (hosts or 1) if process_mode else (processes or 1)
    if gpus and ranks > gpus:
        raise ConfigError(
            f'ddp_dist_backend is "{backend}", which takes one rank per GPU, but {ranks} processes run on {where}, which has '
            f'{gpus} GPU{"s" * (gpus != 1)}; start at most one process per GPU, or set ddp_dist_backend to "auto" or "gloo"',
            code="SMP105",
        )


def count_gpus(
    instance_type: str | None, known: Instance | None, *, process_mode: bool, environment: Mapping[str, Any]
) -> tuple[int | None, str]:
    """Return the number of GPUs that the ranks of one machine see, or None if it is not known, and the machine's name."""
    if known is not None:
        return known.gpus, known.name
    if process_mode:
        own = {name: value for name, value in environment.items() if isinstance(value, str)}
        count = gpu_count({**os.environ, **own})
        is_unknown = not count and has_unusual_gpu()
        return (None if is_unknown else count), "this machine"
    if instance_type == "local":
        return 0, "a container of instance_type 'local' (with GPUs: 'local_gpu')"
    has_none = has_gpus(instance_type) is False
    return (0 if has_none else None), str(instance_type)
