"""Memory of NCCL's communicators between pipeline stages, and between ranks that share sequences out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_config.machine.collective_backends import traits_on_gpus
from smp_config.machine.instances import has_gpus

if TYPE_CHECKING:
    from smp_estimator.planning.request import Request

#: At one end of a communicator of two ranks. Two stages that shared an H100 (benchmarks/gpu/2026-11-26-h100.json) used 664 MiB more
#: than two data parallel ranks, without PyTorch's own memory. Each had two communicators.
COMMUNICATOR_BYTES = 166 * 2**20


def talking_stages(stages: int, pieces: int = 1) -> set[tuple[int, int]]:
    """Return the pairs of stages that send each other tensors, source first, if the model is a chain.

    The script's step function runs on the last stage. It sends inputs to the first stage, and results to all stages.

    Args:
        pieces: of the model on each stage, in turn.
    """
    last = stages - 1
    forward = {(stage, stage + 1) for stage in range(last)}
    # From the last stage a microbatch goes to the first one again, for the next piece.
    has_ring = pieces > 1 and stages > 1
    if has_ring:
        forward.add((last, 0))
    backward = {(target, source) for source, target in forward}
    results = {(last, stage) for stage in range(last)}
    return forward | backward | results


def communicator_bytes(request: Request, stage: int) -> int:
    """Return the bytes of the communicators of a stage; 0 if its tensors do not travel over NCCL."""
    parameters = request.parameters
    has_communicators = traits_on_gpus(parameters.ddp_dist_backend).has_communicators
    if not has_communicators or not has_gpus(request.instance_type):
        return 0
    pairs = talking_stages(parameters.pipeline_parallel_degree, parameters.virtual_stages)
    # Ranks that share sequences out have a group of their own, beside that of gradients.
    of_context = parameters.context_parallel_degree > 1
    return COMMUNICATOR_BYTES * (sum(stage in pair for pair in pairs) + of_context)
