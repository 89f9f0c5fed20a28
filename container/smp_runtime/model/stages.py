"""The pipeline stages of a wrapped model: it is partitioned at the first step, then each rank keeps its part."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_config import Group
from smp_runtime.activations.marking import recomputed_parts
from smp_runtime.comm.devices import channel_backend, release_cached_memory
from smp_runtime.errors import SMPUserError
from smp_runtime.job.backend_implementations import implementation_of
from smp_runtime.microbatch_state.remote_stubs import (
    RemoteStubAttributes,
    absent_attributes_of,
    absent_parameter,
    make_absent_in_place,
)
from smp_runtime.model.creation import manual_of
from smp_runtime.model.staged_regions import RegionPlacement
from smp_runtime.parameters.deferred_creation import Deferrals
from smp_runtime.parameters.late_values import materialize
from smp_runtime.pipeline.agreement.sharing import PipelineAgreement
from smp_runtime.pipeline.execution.failures import FirstStepFailures
from smp_runtime.pipeline.execution.rank_pipeline import Pipeline, PipelineSettings
from smp_runtime.pipeline.observe.module_recorder import ModuleRecorder
from smp_runtime.pipeline.observe.recorder import recorder_of_job
from smp_runtime.pipeline.partition.decision import Tracing, decide
from smp_runtime.pipeline.schedule.policies import policy_named
from smp_runtime.pipeline.transport.pair_groups import PairGroup, pair_groups
from smp_runtime.sharding.sharded_parameters import ShardedParameters, create_shards, make_stand_ins
from smp_runtime.tensors.torch_private import swap_contents, tree_map

if TYPE_CHECKING:
    from smp_runtime.job.ranks import Ranks
    from smp_runtime.job.session import Session
    from smp_runtime.job.trained import TrainedOptimizer
    from smp_runtime.model.local_part import LocalPart
    from smp_runtime.parameters.precision import Precision
    from smp_runtime.parameters.registry import ParameterRecord
    from smp_runtime.pipeline.partition.assignment import Assignment


@dataclass(frozen=True)
class TracingOptions:
    """Options of tracing: the device, and whether module times and memory are measured."""

    device: str  # "gpu" or "cpu"
    times: bool
    memory: bool


class Stages:
    """The pipeline stages of a model: decided at its first step, then each rank keeps its part.

    Attributes:
        partitioned: whether every rank knows its part; without pipeline parallelism from the beginning.
        pipeline: runs the steps; None without pipeline parallelism.
        assignment: stage of each module; None without pipeline parallelism.
        regions: stages of checkpointed modules; None without pipeline parallelism.
    """

    def __init__(self, part: LocalPart, session: Session, precision: Precision, tracing: TracingOptions) -> None:
        self.part = part
        self.precision = precision
        self._session = session
        self._ranks = session.ranks
        self._tracing = tracing
        self.partitioned = self._ranks.size(Group.PP) == 1
        self.pipeline: Pipeline | None = None
        self.assignment: Assignment | None = None
        self.regions: RegionPlacement | None = None
        self._absent_attributes: RemoteStubAttributes | None = None
        if self.partitioned:
            self._record_modules()

    def _record_modules(self) -> None:
        """Record the modules of a rank without a pipeline, if the environment asks for a timeline."""
        session, step = self._session, self._ranks.step
        if step.watch is not None:  # another model's wrapper has seen to it
            return
        recorder = recorder_of_job(0, self._ranks.control, replica=self._ranks.rank)
        if recorder is None:
            return
        watch = ModuleRecorder(recorder, lambda: [model.module for model in session.models], self._ranks.device)
        step.watch = watch
        session.before_step.append(lambda: watch.begin_step(step.count))
        session.after_step.append(lambda _: watch.end_step())
        session.at_leave.append(watch.close)

    def decide(self, microbatch: functools.partial[Any] | None, *, first_step: bool = True) -> Assignment:
        """Decide which stage gets which module, tracing the microbatch; every rank calls it.

        Args:
            microbatch: runs the step function on the first microbatch, to trace it; None partitions without tracing.
            first_step: whether every rank has a microbatch with values; otherwise rank 0 has one without.
        """
        ranks, module = self._ranks, self.part.module
        device = ranks.device if self._tracing.device == "gpu" else torch.device("cpu")
        is_meta = any(parameter.is_meta for parameter in module.parameters())
        tracing_stage = (ranks.cfg.tracing_rank or 0) if first_step else 0
        measures = first_step and not ranks.cfg.deterministic
        tracing_rank = ranks.topology.group_of(Group.PP, 0)[tracing_stage]
        assignment = decide(
            module,
            Tracing(
                None if microbatch is None else functools.partial(self._traced_run, microbatch, device),
                device,
                # Measured times vary between runs, so the partition would too.
                self._tracing.times and measures,
                self._tracing.memory and measures,
                recomputed_parts(module),
                contextlib.nullcontext if is_meta else functools.partial(_wholly_on, module, device),
            ),
            ranks.cfg,
            manual_of(self._session),
            ranks.control,
            FirstStepFailures(tracing_stage, tracing_rank),
            tracing_rank=tracing_rank,
            optimizer_bytes=_state_bytes(self._session.optimizer) + (4.0 if self.precision.is_half else 0.0),
        )
        # What tracing has left in reference cycles would keep parameters from being swapped out.
        gc.collect()
        return assignment

    def _traced_run(self, microbatch: functools.partial[Any], device: torch.device) -> object:
        """Run the step function on the first microbatch; the model's own backward does nothing meanwhile."""
        step = self._ranks.step
        args, kwargs = tree_map(
            lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) and not leaf.is_meta else leaf,
            (microbatch.args, microbatch.keywords),
        )
        step.is_tracing, step.microbatch = True, 0
        try:
            return microbatch.func(*args, **kwargs)
        finally:
            step.is_tracing, step.microbatch = False, None

    def assign(self, assignment: Assignment) -> None:
        """Make the modules of this rank's stage its part.

        Raises:
            SMPUserError: the decision does not fit this model or this number of stages.
        """
        assignment.check(self.part.module, self._ranks.size(Group.PP))
        self.assignment = assignment
        self._session.at_leave.append(self.leave)  # also if the script no longer holds its model
        self.part.stage_of = assignment.stage_of
        self.part.registry.place_stages(assignment.stage_of)

    def start(self, shards: ShardedParameters | None) -> None:
        """Start the pipeline, after this rank's part has been placed, with these sharded parameters."""
        ranks, assignment = self._ranks, self.assignment
        if assignment is None:
            raise AssertionError("the model was not assigned to stages")
        if ranks.step.watch is not None:  # of the time before these stages; the pipeline has one of its own
            ranks.step.watch.close()
            ranks.step.watch = None
        release_cached_memory(ranks.device)
        self.pipeline = Pipeline(
            ranks.control,
            ranks.members(Group.PP),
            ranks.device,
            self.part.module,
            assignment.stage_of,
            PipelineSettings(
                policy=policy_named(ranks.cfg.pipeline),
                active=min(ranks.cfg.active_microbatches or 1, ranks.cfg.microbatches),
                # Ranks that share sequences out draw the same random numbers.
                replica=ranks.rank_in(Group.BATCH_DP),
                predicts=ranks.cfg.fast_mode,
                has_programs=ranks.cfg.step_program,
                begins=self._task_begins,
                runs_forward=contextlib.nullcontext if shards is None else shards.forward,
                share=self._sharing(),
                meet=self._meeting(),
                repeatable=ranks.cfg.deterministic,
                make_group=_groups_of_pairs(ranks),
                watch=recorder_of_job(
                    self.part.stage,
                    ranks.control,
                    replica=ranks.members(Group.PP)[0],
                    updates=lambda: self._session.progress.step,
                ),
            ),
        )
        self.regions = RegionPlacement(self.pipeline, is_manual=not ranks.cfg.auto_partition)
        self.partitioned = True

    def _sharing(self) -> PipelineAgreement | None:
        """Return the agreement with all pipelines that must plan the same order, or None if there is no other.

        Every root rank calls it at the same step. It exchanges values between pipelines of tensor parallel peers, and of
        ranks that gather each other's parameters as they run, or on request.
        """
        ranks = self._ranks
        repeats = ranks.cfg.deterministic_server or ranks.cfg.deterministic
        # Ranks that gather each other's parameters or positions must run the same modules in the same order.
        gathers = ranks.cfg.sharded_data_parallel_degree > 1 or ranks.cfg.context_parallel_degree > 1
        if repeats or gathers:
            return PipelineAgreement(ranks.control, ranks.members(Group.DP))
        members = ranks.members(Group.TP)
        if len(members) == 1:
            return None
        return PipelineAgreement(ranks.control, members)

    def _meeting(self) -> PipelineAgreement | None:
        """Return the agreement with the pipelines that join this rank's collectives while modules run, or None."""
        ranks = self._ranks
        sharing = {ranks.rank}
        if ranks.cfg.sharded_data_parallel_degree > 1:
            sharing = set(ranks.members(Group.SHARD))
        for kind in (Group.CONTEXT, Group.TP):
            groups = [ranks.topology.group_of(kind, rank) for rank in sharing]
            sharing = set().union(*groups)
        if len(sharing) == 1:
            return None
        return PipelineAgreement(ranks.control, sorted(sharing))

    def _task_begins(self, microbatch: int | None) -> None:
        self._ranks.step.microbatch = microbatch

    def leave(self) -> None:
        """End the pipeline in good order, when the rank leaves the job."""
        if self.pipeline is not None:
            self.pipeline.close()
            self.pipeline = self.regions = None
        if self._absent_attributes is not None:
            self._absent_attributes.remove()
            self._absent_attributes = None

    def withdraw(self) -> None:
        """Leave the stages now, and not again with the job: the model is laid out anew."""
        if self.leave in self._session.at_leave:
            self._session.at_leave.remove(self.leave)
        self.leave()

    def drop_others(self) -> None:
        """Free the parameters of other stages' modules.

        They keep identity and shape, and have the type in which they are trained.
        """
        part = self.part
        if part.stage_of is None or self.assignment is None:
            return
        modules = dict(part.module.named_modules(remove_duplicate=False))
        for path, module in modules.items():
            if not part.has(path):
                absent_attributes_of(module, path, part.stage_of(path))
        self._absent_attributes = RemoteStubAttributes(modules, self.assignment.attributes, part.stage_of, part.has)
        scripted: set[int] = set()
        for module in modules.values():
            if isinstance(module, torch.jit.ScriptModule):
                scripted.update(map(id, module.parameters()))
        local = {id(parameter) for parameter in part.parameters()}
        wide = self.precision.wide_parameters(part.module.modules())
        for record in part.registry:
            parameter = record.parameter
            if id(parameter) in local:
                continue
            dtype = parameter.dtype if id(parameter) in wide else self.precision.type_of(parameter)
            if id(parameter) in scripted:
                make_absent_in_place(parameter, record.name, record.placement.stage, dtype)
            else:
                _make_absent(record, dtype)

    def cast_buffers_of_others(self) -> None:
        """Cast the buffers of other stages' modules too: a module may read their type."""
        part = self.part
        if part.stage_of is not None:
            named = part.module.named_modules(remove_duplicate=False)
            self.precision.convert_buffers(module for path, module in named if not part.has(path))

    def created(self) -> Callable[[nn.Parameter, torch.Tensor], None] | None:
        """Return a function that sets the value of a parameter that is created late.

        On a stage it keeps only the values of its own parameters. It is None if all parameters get theirs.
        """
        if self.part.stage_of is None:
            return None
        local = {id(parameter) for parameter in self.part.parameters()}

        def take(parameter: nn.Parameter, value: torch.Tensor) -> None:
            parameter.data = value.to(self._ranks.device) if id(parameter) in local else value
            if id(parameter) not in local:  # at once, so that the model never exists as a whole
                _without_storage(parameter)

        return take

    def move(self, device: torch.device) -> None:
        """Move this rank's part, and all buffers, to its device."""
        part = self.part
        if part.stage_of is None:
            nn.Module.to(part.module, device)
            return
        own = {id(tensor) for tensor in (*part.parameters(), *part.buffers())}

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            stays = tensor.is_meta and id(tensor) not in own
            return tensor if stays else tensor.to(device)

        # As module.to() does, with what modules do themselves when they move; other stages' parameters have no memory.
        part.module._apply(moved)  # noqa: SLF001 - what module.to() itself calls


def _state_bytes(optimizer: TrainedOptimizer | None) -> float:
    """Return the optimizer state per element of a trained parameter, in bytes.

    It assumes two moments unless the optimizer is known to need less.
    """
    settings = optimizer.defaults if optimizer is not None else {}
    if optimizer is None or "betas" in settings:
        return 8.0
    return 4.0 if settings.get("momentum") else 0.0


def agree_on_late_values(ranks: Ranks, module: nn.Module) -> None:
    """Agree on the random numbers that a late ``module`` is created from: those of the first rank of each stage.

    Every rank wraps the model. Later a single rank may ask for its state, so that is too late to agree.
    """
    has_replicas = ranks.cfg.ddp or ranks.cfg.sharded_data_parallel_degree > 1
    members = ranks.members(Group.DP if has_replicas else Group.TP)
    if len(members) > 1:
        ranks.keep(Deferrals, Deferrals).agree(module, lambda numbers: ranks.control.broadcast(numbers, members))


def create_late(ranks: Ranks, stages: Stages) -> ShardedParameters | None:
    """Create late parameters: whole weights at once, or stand-ins with values that go straight into shards."""
    part = stages.part
    if ranks.cfg.sharded_data_parallel_degree == 1:
        materialize(ranks.keep(Deferrals, Deferrals), part.module, ranks.device, take=stages.created())
        part.register()
        stages.drop_others()
        stages.cast_buffers_of_others()
        return None
    created_later = make_stand_ins(ranks, part.module)
    part.register()
    stages.drop_others()
    later = frozenset(id(parameter) for _, parameter in created_later)
    split = frozenset(id(r.parameter) for r in part.registry if r.placement.tensor_axis is not None)
    shards = ShardedParameters(part.module, [*part.parameters()], ranks, stages.precision, deferred=later, split=split)
    create_shards(ranks, part.module, created_later, shards)
    stages.cast_buffers_of_others()  # not before they have values
    return shards


@contextlib.contextmanager
def _wholly_on(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Run the block with the whole model on ``device``, then put every tensor back where it was.

    So all ranks continue in the same state.
    """
    parameters: list[tuple[torch.Tensor, torch.Tensor]] = []
    for parameter in module.parameters():
        parameters.append((parameter, parameter.data))
        if parameter.grad is not None:
            parameters.append((parameter.grad, parameter.grad.data))
    buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                buffers.append((owner, name, buffer))
    try:
        module.to(device)
        yield
    finally:
        for tensor, before in parameters:
            tensor.data = before
        for owner, name, buffer in buffers:
            owner._buffers[name] = buffer


def _make_absent(record: ParameterRecord, dtype: torch.dtype) -> None:
    """Free a parameter of another stage; its stand-in reports its name and stage in errors."""
    record.parameter.grad = None
    absent = absent_parameter(record.parameter, record.name, record.placement.stage, dtype)
    vars(absent).update({**vars(record.parameter), **vars(absent)})  # keep the script's attributes
    try:
        swap_contents(record.parameter, absent)
    except RuntimeError as error:
        raise SMPUserError(
            f"parameter {record.name} lies on pipeline stage {record.placement.stage}, but this rank cannot free it ({error}): "
            "something that was computed from it is still held; do not keep results of the parameters on the model or in the "
            "script before the first step, or keep them detached",
            code="SMP303",
        ) from error


def _without_storage(parameter: nn.Parameter) -> None:
    empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
    vars(empty).update(vars(parameter))
    parameter.grad = None
    swap_contents(parameter, empty)


def _groups_of_pairs(ranks: Ranks) -> Callable[[str, bool], PairGroup] | None:
    """Return what connects two stages, or None if their tensors go through host memory."""
    backend = channel_backend(ranks.device, ranks.backend)
    if backend is None:
        return None
    implementation = implementation_of(backend)
    if implementation.connect_pair is None:
        return None
    return pair_groups(implementation.connect_pair, implementation.quiet_seconds)
