"""Options of ``DistributedModel`` and their validation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from smp_config.errors import kind_of
from smp_runtime.errors import SMPUserError

if TYPE_CHECKING:
    from smp_runtime.job.ranks import Ranks
    from smp_runtime.job.trained import TrainedModel
    from smp_runtime.model.stages import TracingOptions


@dataclass(frozen=True)
class WrapperOptions:
    """The options of a wrapper; see :class:`.DistributedModel`."""

    tracing: TracingOptions
    backward_passes_per_step: int
    bucket_bytes: int
    overlaps: bool
    bucket_view: bool
    averages_microbatches: bool
    broadcasts_buffers: bool


def check_arguments(
    module: Any, trace_device: str, trace_execution_times: bool, backward_passes_per_step: int, bucket_cap_mb: float
) -> None:
    """Refuse arguments of the wrapper that cannot work.

    Raises:
        SMPUserError: one is out of its range.
    """
    if not isinstance(module, nn.Module):
        raise SMPUserError(
            f"smp.DistributedModel wraps an nn.Module, but got {kind_of(module)}: pass the model", code="SMP303"
        )
    if trace_device not in ("cpu", "gpu"):
        raise SMPUserError(f"trace_device is {trace_device!r}; it must be 'gpu' or 'cpu'", code="SMP303")
    if trace_execution_times and trace_device == "cpu":
        raise SMPUserError(
            "trace_execution_times is true but trace_device is 'cpu', whose times say nothing about the GPU; "
            "use trace_device='gpu' or leave execution times off",
            code="SMP303",
        )
    if backward_passes_per_step < 1:
        raise SMPUserError(
            f"backward_passes_per_step is {backward_passes_per_step}; it counts accumulated steps: use 1 or more",
            code="SMP303",
        )
    if bucket_cap_mb <= 0:
        raise SMPUserError(
            f"bucket_cap_mb is {bucket_cap_mb}; it is a bucket's size in MiB: use for example 25", code="SMP303"
        )


def register_hook(hooks: OrderedDict[int, Callable[..., Any]], hook: Callable[..., Any]) -> RemovableHandle:
    """Register a hook of the script, and return a handle that removes it."""
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def check_shared(module: nn.Module, others: Sequence[TrainedModel], ranks: Ranks) -> None:
    """Refuse a module that shares parameters with a wrapped one, if wrapping gives parameters other memory or masters.

    Raises:
        SMPUserError: names the shared parameters.
    """
    cfg = ranks.cfg
    settings = {
        "sharded_data_parallel_degree": cfg.sharded_data_parallel_degree > 1,
        "shard_optimizer_state": cfg.shard_optimizer_state,
        "bf16": cfg.bf16,
        "fp16": cfg.fp16,
    }
    active = [name for name, is_set in settings.items() if is_set]
    known = {id(record.parameter) for model in others for record in model.registry}
    shared = [name for name, parameter in module.named_parameters() if id(parameter) in known]
    if active and shared:
        more = f" and {len(shared) - 3} more" if len(shared) > 3 else ""
        raise SMPUserError(
            f"{', '.join(shared[:3])}{more} of the {type(module).__name__} belong to another wrapped model, too, but with "
            f"{' and '.join(active)} a parameter has one place, one shard and one optimizer; make both models parts of one "
            "nn.Module, and wrap that",
            code="SMP303",
        )
