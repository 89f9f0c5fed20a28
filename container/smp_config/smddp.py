"""When the all-gather of SMDDP is used by itself: the supported configurations of its documentation."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smp_config.parameters import ModelParallelParameters

#: Name of the backend of ``torch.distributed``.
BACKEND = "smddp"

#: The instance that the documentation names.
SUPPORTED_INSTANCE = "ml.p4d.24xlarge"


def is_automatic(parameters: ModelParallelParameters, instance_type: str | None, hosts: int) -> bool:
    """Whether ``ddp_dist_backend="auto"`` means SMDDP collectives: several hosts, sharded, no tensor parallelism."""
    return (
        parameters.ddp_dist_backend == "auto"
        and parameters.sharded_data_parallel_degree > 1
        and parameters.tensor_parallel_degree == 1
        and instance_type == SUPPORTED_INSTANCE
        and hosts > 1
    )


def is_chosen(parameters: ModelParallelParameters, instance_type: str | None, hosts: int) -> bool:
    """Whether a job's collectives are SMDDP's: asked for by name, which works anywhere, or by itself."""
    return parameters.ddp_dist_backend == BACKEND or is_automatic(parameters, instance_type, hosts)
