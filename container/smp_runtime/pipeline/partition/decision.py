"""The partition decision of a job: traced and made on one rank, the same on all ranks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from smp_config.schedules import in_flight_counts
from smp_runtime.errors import SMPError, SMPRuntimeError, SMPUserError
from smp_runtime.pipeline.partition.assignment import Assignment, idle_stages, list_first
from smp_runtime.pipeline.partition.costs import CostSettings
from smp_runtime.pipeline.partition.module_tree import Trace, note_recomputed, note_replaced, tree_without_tracing
from smp_runtime.pipeline.partition.partitioner import partition
from smp_runtime.pipeline.partition.report import describe
from smp_runtime.pipeline.partition.tracing import ValuesNeededError, module_that_raised, settle, trace

if TYPE_CHECKING:
    from smp_config import ModelParallelParameters
    from smp_runtime.comm.control import ControlPlane
    from smp_runtime.pipeline.partition.manual_stages import ManualAssignment

logger = logging.getLogger("smp")


@dataclass(frozen=True)
class Tracing:
    """The settings of the tracing step."""

    #: The step function with the first microbatch; None partitions without tracing.
    run: Callable[[], object] | None
    device: torch.device  # the device of that run
    times: bool = False  # whether execution times are measured
    memory: bool = False  # whether activation memory is measured, not estimated
    #: Paths of modules that backward computes again, and whether their inputs are kept.
    recomputed: Mapping[str, bool] = field(default_factory=dict)
    #: Context in which the model is on ``device``; entered on the rank that traces alone.
    placed: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


class Failures(Protocol):
    """The propagation of an error of one rank to all ranks."""

    def told(self, error: Exception, module: str) -> object:
        """Return the report for the other ranks about an error of the script.

        Args:
            module: the path of the module that raised; empty for the step function.
        """
        ...

    def own(self, error: Exception, told: Any, module: str) -> Exception:
        """Return the error to raise on the rank where it occurred."""
        ...

    def heard(self, told: Any) -> Exception:
        """Return the error to raise on the other ranks."""
        ...

    def attribute(self, error: SMPError, told: Any) -> SMPError:
        """Return ``error``, which this library raises on another rank, as a consequence of the reported error."""
        ...


@dataclass(frozen=True)
class _Decision:
    answer: dict[str, Any] | None = None  # the assignment
    text: str = ""  # for the log; or why there is no answer, if this library reports the error
    told: Any = None  # of an error
    is_users: bool = False  # whether that is the script's fault
    is_unsettled: bool = False  # whether the first call changes the model's tree, which all ranks must do alike first


class _Unsettled(Exception):
    """A signal that the first call of the model has replaced modules."""


def decide(
    module: nn.Module,
    tracing: Tracing,
    parameters: ModelParallelParameters,
    manual: ManualAssignment,
    control: ControlPlane,
    failures: Failures,
    *,
    tracing_rank: int = 0,
    optimizer_bytes: float = 8.0,
    is_settled: bool = False,
) -> Assignment:
    """Decide which stage gets which module; every rank of the job calls it and gets the same answer.

    Args:
        module: the whole model.
        tracing: used on one rank, unless ``skip_tracing`` or a manual or loaded partition makes it unnecessary.
        failures: how an error of the script in the tracing step is reported on all ranks.
        tracing_rank: global rank that decides.
        optimizer_bytes: state per element of a trained parameter.
        is_settled: whether the model's first call has already made its changes to the model's tree.

    Raises:
        SMPUserError: a partition that does not fit, on every rank with the same message.
    """
    decision = _Decision()
    failure: Exception | None = None
    if control.rank == tracing_rank:
        try:
            assignment, text = _decided(module, tracing, parameters, manual, optimizer_bytes, is_settled)
            decision = _Decision(assignment.to_dict(), text)
        except _Unsettled:
            decision = _Decision(is_unsettled=True)
        except Exception as error:  # the others wait for the decision
            path = module_that_raised(error)
            told = failures.told(error, path)
            if isinstance(error, SMPError):  # this library's own errors need no explanation
                decision, failure = _Decision(None, str(error), told, isinstance(error, SMPUserError)), error
            else:
                decision, failure = _Decision(told=told), failures.own(error, told, path)
    everyone = [tracing_rank, *(rank for rank in range(control.size) if rank != tracing_rank)]
    decision = control.broadcast(decision, everyone)
    if failure is not None:
        raise failure
    if decision.is_unsettled:
        _settle(module, tracing, control, failures)
        return decide(
            *(module, tracing, parameters, manual, control, failures),
            tracing_rank=tracing_rank,
            optimizer_bytes=optimizer_bytes,
            is_settled=True,
        )
    if decision.answer is None and not decision.text:
        raise failures.heard(decision.told)
    if decision.answer is None:
        words = f"the model could not be partitioned on rank {tracing_rank}: {decision.text}"
        echo = SMPUserError(words, code="SMP305") if decision.is_users else SMPRuntimeError(words)
        raise failures.attribute(echo, decision.told)
    answer, text = decision.answer, decision.text
    if control.rank == tracing_rank:
        logger.info(text)
    return Assignment.from_dict(answer)


def _settle(module: nn.Module, tracing: Tracing, control: ControlPlane, failures: Failures) -> None:
    """Make, on every rank, the changes that the first call makes to the model's tree.

    Raises:
        SMPUserError: the models differ afterwards, or have other parameters, on every rank with the same message.
    """
    before = {name: id(parameter) for name, parameter in module.named_parameters()}
    failure, others, told = "", False, None
    try:
        if tracing.run is None:
            raise SMPUserError("its script has not called a training step whose arguments still exist", code="SMP305")
        with tracing.placed():
            settle(module, tracing.run)
        others = {name: id(parameter) for name, parameter in module.named_parameters()} != before
    except Exception as error:  # the other ranks wait for the outcome
        failure, told = f"{type(error).__name__}: {error}", failures.told(error, module_that_raised(error))
    tree = [(path, type(part).__name__) for path, part in module.named_modules()]
    found = control.allgather((failure, told, others, tree), range(control.size))
    what = "the first call of the model puts modules in the place of others"
    way_out = "call it once with such a batch before smp.DistributedModel, on every rank"
    for rank, (failed, told, has_others, theirs) in enumerate(found):
        if failed:
            echo = SMPUserError(f"{what}, and rank {rank} could not do so: {failed}; {way_out}", code="SMP305")
            raise failures.attribute(echo, told)
        if has_others:
            raise SMPUserError(
                f"{what}, and its parameters are others then, which the optimizer does not have; {way_out}",
                code="SMP305",
            )
        if theirs != found[0][3]:
            differing = sorted({path for path, _ in set(theirs) ^ set(found[0][3])})
            raise SMPUserError(
                f"{what}, and ranks 0 and {rank} have other modules then ({list_first(map(repr, differing))}), since their batches "
                f"differ; {way_out}",
                code="SMP305",
            )


def _decided(
    module: nn.Module,
    tracing: Tracing,
    parameters: ModelParallelParameters,
    manual: ManualAssignment,
    optimizer_bytes: float,
    is_settled: bool,
) -> tuple[Assignment, str]:
    stages = parameters.pipeline_parallel_degree
    active = min(parameters.active_microbatches or stages, parameters.microbatches)  # its default is resolved
    settings = CostSettings(
        memory_weight=0.8 if parameters.memory_weight is None else parameters.memory_weight,
        in_flight=in_flight_counts(parameters.pipeline, stages, parameters.microbatches, active),
        optimizer_bytes=optimizer_bytes,
    )
    if parameters.load_partition and parameters.partition_file:
        assignment = Assignment.load(parameters.partition_file)
        assignment.check(module, stages)
        manual.review(module, assignment)
        _warn_of_idle(
            assignment,
            tree_without_tracing(module),
            "partition_file has no module there; let the model be partitioned anew",
        )
        return assignment, describe(tree_without_tracing(module), assignment, settings)
    seen = _traced(module, tracing, parameters)
    if seen.replaced and not is_settled:
        raise _Unsettled
    note_replaced(seen)
    manual.review(module)
    if parameters.auto_partition:
        if manual.used_contexts:
            logger.warning(
                "smp.partition was used, but auto_partition is true, so the model is partitioned automatically; set "
                "auto_partition to false to keep the script's partition, or use smp.set_partition to place single modules"
            )
        assignment = partition(seen, stages, settings, pinned=manual.pins(module), pieces=parameters.virtual_stages)
    else:
        assignment = manual.resolve(module, seen)
        how = (
            f"the script placed no module there, and default_partition is {manual.default}; place some with smp.partition or "
            "smp.set_partition, set auto_partition to true"
        )
        _warn_of_idle(assignment, seen, how)
    assignment.attributes = list(seen.attributes)
    _tell_bound(seen)
    _tell_called_in_functions(seen)
    if parameters.partition_file:
        files = assignment.save(parameters.partition_file)
        logger.info("the partition is written to %s", " and ".join(map(str, files)))
    return assignment, describe(seen, assignment, settings)


def _tell_bound(seen: Trace) -> None:
    """Warn of attributes passed between modules outside of calls; they keep the modules on one stage."""
    uses = [use for use in seen.foreign_uses if use.kind == "attribute"]
    if not uses:
        return
    paths: dict[str, None] = {}
    for use in uses:
        paths.update({use.holder: None, use.user: None})
    shown = ", ".join(repr(path) if path else "the model itself" for path in list(paths)[:4])
    hidden = len(paths) - 4
    logger.warning(
        "%s%s are on one stage, since attributes such as %s are set by one module and used by another while they run; "
        "return these values from forward instead to let the modules lie apart",
        shown,
        f" and {hidden} more" if hidden > 0 else "",
        uses[0].parameter,
    )


def _tell_called_in_functions(seen: Trace) -> None:
    """Warn of modules that an autograd function calls, since they must be on one stage.

    They may be most of a model, and then one stage has most of the work.
    """
    inside = {use.parameter: use.user for use in seen.foreign_uses if use.kind == "function"}
    for name, user in inside.items():
        count = sum(use.parameter == name and use.kind == "function" for use in seen.foreign_uses)
        logger.warning(
            "%s and %d modules in it are on one stage, since the autograd function %s calls them and may call them again in its "
            "backward, as reversible layers do; stages are the more alike the less lies there",
            repr(user) if user else "the model itself",
            count,
            name.partition(" ")[0],
        )


def _warn_of_idle(assignment: Assignment, trace: Trace, how: str) -> None:
    """Warn of stages without modules; ``how`` is the text that explains the reason and the remedy."""
    used = {assignment.stage_of(node.path) for node in trace.root.walk() if not node.is_container}
    idle = [stage for stage in range(assignment.stages) if stage not in used]
    if idle:
        logger.warning("%s: %s, or lower pipeline_parallel_degree", idle_stages(idle), how)


def _traced(module: nn.Module, tracing: Tracing, parameters: ModelParallelParameters) -> Trace:
    if parameters.skip_tracing or tracing.run is None:
        return tree_without_tracing(module)
    try:
        with tracing.placed():
            seen = trace(module, tracing.run, device=tracing.device, times=tracing.times, memory=tracing.memory)
    except ValuesNeededError as error:
        logger.warning(
            "%s, so the model is partitioned by its modules alone, as with skip_tracing; set delayed_parameter_initialization to "
            "false to have it traced",
            str(error).partition("\n")[0],
        )
        return tree_without_tracing(module)
    except torch.cuda.OutOfMemoryError as error:
        size = sum(parameter.nbytes for parameter in module.parameters()) / 2**30
        raise SMPUserError(
            f"the tracing step ran out of memory on {tracing.device} ({str(error).splitlines()[0]}): it runs the whole model, "
            f'{size:.1f} GiB of parameters, with one microbatch on one rank; pass trace_device="cpu" to '
            "smp.DistributedModel, or set skip_tracing to true",
            code="SMP305",
        ) from error
    note_recomputed(seen, tracing.recomputed)
    return seen
