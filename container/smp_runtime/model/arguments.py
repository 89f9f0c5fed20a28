"""The arguments of ``smp.DistributedModel``, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from smp_runtime.errors import SMPUserError


def check_arguments(
    module: Any, trace_device: str, trace_execution_times: bool, backward_passes_per_step: int, bucket_cap_mb: float
) -> None:
    """Refuse arguments of the wrapper that cannot work.

    Raises:
        SMPUserError: one is out of its range.
    """
    if not isinstance(module, nn.Module):
        raise SMPUserError(
            f"smp.DistributedModel wraps an nn.Module, but got a {type(module).__name__}: pass the model"
        )
    if trace_device not in ("cpu", "gpu"):
        raise SMPUserError(f"trace_device is {trace_device!r}; it must be 'gpu' or 'cpu'")
    if trace_execution_times and trace_device == "cpu":
        raise SMPUserError(
            "trace_execution_times is true but trace_device is 'cpu', whose times say nothing about the GPU; "
            "use trace_device='gpu' or leave execution times off"
        )
    if backward_passes_per_step < 1:
        raise SMPUserError(
            f"backward_passes_per_step is {backward_passes_per_step}; it counts accumulated steps: use 1 or more"
        )
    if bucket_cap_mb <= 0:
        raise SMPUserError(f"bucket_cap_mb is {bucket_cap_mb}; it is a bucket's size in MiB: use for example 25")


def refuse_if_partial(rank: int, reasons: Mapping[str, bool]) -> None:
    """Refuse to move a model to the CPU of which a rank has a part.

    Args:
        reasons: by kind of parallelism, whether it leaves a part of the model on this rank only.

    Raises:
        SMPUserError: one of them does.
    """
    if why := [reason for reason, holds in reasons.items() if holds]:
        raise SMPUserError(
            f"model.cpu() moves the full model, but with {' and '.join(why)} rank {rank} holds a part; call model.state_dict() on "
            "every rank, which gives the full state, and load it into an unwrapped model on the CPU"
        )
