"""The partition decision of a job: traced and made on one rank, the same on all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from smp_config import ModelParallelParameters
from smp_config.in_flight import in_flight_counts
from smp_runtime.comm.control import ControlPlane
from smp_runtime.errors import SMPRuntimeError, SMPUserError
from smp_runtime.pipeline.assignment import Assignment
from smp_runtime.pipeline.costs import CostSettings
from smp_runtime.pipeline.manual import ManualAssignment
from smp_runtime.pipeline.partition import partition
from smp_runtime.pipeline.report import describe
from smp_runtime.pipeline.trace import trace
from smp_runtime.pipeline.tree import Trace, note_recomputed, untraced

logger = logging.getLogger("smp")


@dataclass(frozen=True)
class Tracing:
    """How the tracing step runs.

    Attributes:
        run: the step function with the first microbatch.
        device: where it runs.
        times: whether execution times are measured.
        memory: whether activation memory is measured, not estimated.
        recomputed: paths of modules that backward computes again, and whether their inputs are kept.
    """

    run: Callable[[], object]
    device: torch.device
    times: bool = False
    memory: bool = False
    recomputed: Mapping[str, bool] = field(default_factory=dict)


def decide(
    module: nn.Module,
    tracing: Tracing,
    parameters: ModelParallelParameters,
    manual: ManualAssignment,
    control: ControlPlane,
    *,
    tracing_rank: int = 0,
    optimizer_bytes: float = 8.0,
) -> Assignment:
    """Which stage gets which module; every rank of the job calls it and gets the same answer.

    Args:
        module: the whole model.
        tracing: used on one rank, unless ``skip_tracing`` or a manual or loaded partition makes it unnecessary.
        manual: what the script has set by hand.
        control: brings the decision to every rank.
        tracing_rank: global rank that decides.
        optimizer_bytes: state per element of a trained parameter.

    Raises:
        SMPUserError: a partition that does not fit, on every rank with the same message.
    """
    decision: tuple[Any, str, BaseException | None] = (None, "", None)
    if control.rank == tracing_rank:
        try:
            assignment, text = _decided(module, tracing, parameters, manual, optimizer_bytes)
            decision = (assignment.to_dict(), text, None)
        except Exception as error:  # the others wait for the decision
            decision = (None, f"{type(error).__name__}: {error}", error)
    everyone = [tracing_rank, *(rank for rank in range(control.size) if rank != tracing_rank)]
    if control.rank == tracing_rank:
        control.broadcast(decision[:2], everyone)
    else:
        decision = (*control.broadcast(None, everyone), None)
    answer, text, failure = decision
    if failure is not None:
        raise failure
    if answer is None:
        kind = SMPUserError if text.startswith(SMPUserError.__name__) else SMPRuntimeError
        raise kind(f"the model could not be partitioned on rank {tracing_rank}: {text}")
    if control.rank == tracing_rank:
        logger.info(text)
    return Assignment.from_dict(answer)


def _decided(
    module: nn.Module,
    tracing: Tracing,
    parameters: ModelParallelParameters,
    manual: ManualAssignment,
    optimizer_bytes: float,
) -> tuple[Assignment, str]:
    stages = parameters.pipeline_parallel_degree
    active = min(parameters.active_microbatches or stages + 2, parameters.microbatches)
    settings = CostSettings(
        memory_weight=0.8 if parameters.memory_weight is None else parameters.memory_weight,
        in_flight=in_flight_counts(
            stages, parameters.microbatches, active, backward_first=parameters.pipeline == "interleaved"
        ),
        optimizer_bytes=optimizer_bytes,
    )
    if parameters.load_partition and parameters.partition_file:
        assignment = Assignment.load(parameters.partition_file)
        assignment.check(module, stages)
        return assignment, describe(untraced(module), assignment, settings)
    seen = _traced(module, tracing, parameters)
    if parameters.auto_partition:
        if manual.used_contexts:
            logger.warning(
                "smp.partition was used, but auto_partition is true, so the model is partitioned automatically; set "
                "auto_partition to false to keep the script's partition, or use smp.set_partition to place single modules"
            )
        assignment = partition(seen, stages, settings, pinned=manual.pins(module))
    else:
        assignment = manual.resolve(module, seen)
    if parameters.partition_file:
        assignment.save(parameters.partition_file)
    return assignment, describe(seen, assignment, settings)


def _traced(module: nn.Module, tracing: Tracing, parameters: ModelParallelParameters) -> Trace:
    if parameters.skip_tracing:
        return untraced(module)
    seen = trace(module, tracing.run, device=tracing.device, times=tracing.times, memory=tracing.memory)
    note_recomputed(seen, tracing.recomputed)
    return seen
