"""A wrapped model that lies on the stages of a pipeline: partitioned at the first step, then each rank keeps its part."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from smp_config import Group
from smp_runtime.activations.marking import recomputed_parts
from smp_runtime.comm.devices import lane_backend, release_cached_memory
from smp_runtime.errors import SMPUserError
from smp_runtime.job.trained import TrainedOptimizer
from smp_runtime.model.creation import manual_of
from smp_runtime.model.replicas import ReplicatedModel
from smp_runtime.model.staged_regions import Placement
from smp_runtime.module_state.absent_tensors import (
    AbsentAttributes,
    absent_attributes_of,
    absent_parameter,
    make_absent_in_place,
)
from smp_runtime.parameters.precision import Precision
from smp_runtime.parameters.registry import ParameterRecord
from smp_runtime.pipeline.execution.rank_pipeline import Pipeline
from smp_runtime.pipeline.observe.recorder import recorder_of_job
from smp_runtime.pipeline.partition.assignment import Assignment
from smp_runtime.pipeline.partition.decision import Tracing, decide
from smp_runtime.pipeline.transport.tensor_channels import directed_groups
from smp_runtime.tensors.swapping import swap_contents
from smp_runtime.tensors.torch_private import tree_map

logger = logging.getLogger("smp")


class StagedModel(ReplicatedModel):
    """A wrapped model that may be split over pipeline stages.

    Attributes:
        partitioned: whether every rank knows its part; without pipeline parallelism from the beginning.
        pipeline: runs the steps; None without pipeline parallelism.
        assignment: which stage has which module; None without pipeline parallelism.
    """

    partitioned: bool
    pipeline: Pipeline | None
    assignment: Assignment | None
    precision: Precision
    _absent_attributes: AbsentAttributes | None = None
    _staged_regions: Placement | None
    _trace_device: str
    _traces_times: bool
    _traces_memory: bool
    _post_partition_hooks: OrderedDict[int, Callable[..., Any]]

    def _place(self) -> None:
        """Give this rank's part of the model its place: device, precision, replicas."""
        raise NotImplementedError

    def partition(self, microbatch: functools.partial[Any]) -> None:
        """Decide which stage gets which module, if that has not been done; every rank calls it in its first step.

        Args:
            microbatch: runs the step function on the first microbatch, to trace it.
        """
        if self.partitioned:
            return
        if torch.is_inference_mode_enabled():  # what is made now must serve training later
            with torch.inference_mode(False), torch.no_grad():
                self.partition(microbatch)
            return
        session = self._session
        device = session.ranks.device if self._trace_device == "gpu" else torch.device("cpu")
        is_meta = any(parameter.is_meta for parameter in self.module.parameters())
        # Shapes are all that there is before the parameters are created.
        inputs_on = torch.device("meta") if is_meta else device
        assignment = decide(
            self.module,
            Tracing(
                functools.partial(self._traced_run, microbatch, inputs_on),
                device,
                self._traces_times,
                self._traces_memory,
                recomputed_parts(self.module),
                contextlib.nullcontext if is_meta else functools.partial(_wholly_on, self.module, device),
            ),
            session.ranks.cfg,
            manual_of(session),
            session.ranks.control,
            tracing_rank=session.ranks.topology.group_of(Group.PP, 0)[session.ranks.cfg.tracing_rank or 0],
            optimizer_bytes=_state_bytes(session.optimizer) + (4.0 if self.precision.is_half else 0.0),
        )
        # What tracing has left in reference cycles would keep parameters from being swapped out.
        gc.collect()
        self.adopt(assignment)

    def _traced_run(self, microbatch: functools.partial[Any], device: torch.device) -> object:
        """The step function on the first microbatch; the model's own backward does nothing meanwhile."""
        session = self._session
        args, kwargs = tree_map(
            lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf,
            (microbatch.args, microbatch.keywords),
        )
        training = self.training
        session.ranks.step.is_tracing, session.ranks.step.microbatch = True, 0
        try:
            return microbatch.func(*args, **kwargs)
        finally:
            session.ranks.step.is_tracing, session.ranks.step.microbatch = False, None
            self.training = training  # the step function may switch it; tracing puts back what is inside

    def adopt(self, assignment: Assignment) -> None:
        """Keep this rank's part of the model, and start the pipeline; every rank calls it with the same decision.

        Raises:
            SMPUserError: the decision does not fit this model or this number of stages.
        """
        session = self._session
        assignment.check(self.module, session.ranks.size(Group.PP))
        self.assignment = assignment
        self._stage_of, self._stage = assignment.stage_of, session.ranks.rank_in(Group.PP)
        self.registry.place_stages(assignment.stage_of)
        self._place()
        release_cached_memory(session.ranks.device)
        backend = lane_backend(session.ranks.device, session.ranks.backend)
        groups = directed_groups(session.ranks.topology.groups(Group.PP), backend) if backend is not None else None
        self.pipeline = Pipeline(
            session.ranks.control,
            session.ranks.members(Group.PP),
            session.ranks.device,
            self.module,
            assignment.stage_of,
            policy=session.ranks.cfg.pipeline,
            active=min(session.ranks.cfg.active_microbatches or 1, session.ranks.cfg.microbatches),
            replica=session.ranks.rank_in(Group.DP),
            predicts=session.ranks.cfg.fast_mode,
            begins=self._task_begins,
            share=self._shared if self._must_agree_on_order else None,
            make_group=groups,
            recorder=recorder_of_job(self._stage, session.ranks.control, replica=session.ranks.members(Group.PP)[0]),
        )
        self._staged_regions = Placement(self.pipeline, is_manual=not session.ranks.cfg.auto_partition)
        self.partitioned = True
        for hook in list(self._post_partition_hooks.values()):
            hook(self, session.optimizer)

    @property
    def _must_agree_on_order(self) -> bool:
        """Whether other pipelines must run their work in the same order: tensor parallel peers, or all on request.

        All must that gather each other's parameters as they run.
        """
        return self._ranks.size(Group.TP) > 1 or self._all_agree_on_order

    @property
    def _all_agree_on_order(self) -> bool:
        return self._ranks.cfg.deterministic_server or self._ranks.cfg.sharded_data_parallel_degree > 1

    def _shared(self, value: Any) -> list[Any]:
        """The values of all pipelines that must agree; every root rank calls it at the same step."""
        session = self._session
        group = Group.DP if self._all_agree_on_order else Group.TP
        return session.ranks.control.allgather(value, session.ranks.members(group))

    def _task_begins(self, microbatch: int | None) -> None:
        self._ranks.step.microbatch = microbatch

    def leave(self) -> None:
        """The rank leaves the job: end the pipeline in good order."""
        if self.pipeline is not None:
            self.pipeline.close()
            self.pipeline = None
        if self._absent_attributes is not None:
            self._absent_attributes.remove()
            self._absent_attributes = None

    def _drop_other_stages(self) -> None:
        """Free the parameters of other stages' modules; they keep their identity, shape and type."""
        if self._stage_of is None:
            return
        modules = dict(self.module.named_modules(remove_duplicate=False))
        for path, module in modules.items():
            if not self._is_local(path):
                absent_attributes_of(module, path, self._stage_of(path))
        if self.assignment is not None:
            attributes = self.assignment.attributes
            self._absent_attributes = AbsentAttributes(modules, attributes, self._stage_of, self._is_local)
        scripts = [module for module in modules.values() if isinstance(module, torch.jit.ScriptModule)]
        scripted = {id(parameter) for script in scripts for parameter in script.parameters()}
        local = {id(parameter) for parameter in self.local_parameters()}
        for record in self.registry:
            if id(record.parameter) not in local:
                if id(record.parameter) in scripted:
                    make_absent_in_place(record.parameter, record.name, record.placement.stage)
                else:
                    _make_absent(record)

    def _created(self) -> Callable[[nn.Parameter, torch.Tensor], None] | None:
        """What gives parameters that are created late their values: on a stage, only its own; None where all get them."""
        if self._stage_of is None:
            return None
        local = {id(parameter) for parameter in self.local_parameters()}

        def take(parameter: nn.Parameter, value: torch.Tensor) -> None:
            parameter.data = value.to(self._ranks.device) if id(parameter) in local else value
            if id(parameter) not in local:  # at once, so that the model never exists as a whole
                _without_storage(parameter)

        return take

    def _moved(self, device: torch.device) -> None:
        """Move this rank's part, and all buffers, to its device."""
        if self._stage_of is None:
            nn.Module.to(self, device)
            return
        own = {id(tensor) for tensor in (*self.local_parameters(), *self.local_buffers())}

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if tensor.is_meta and id(tensor) not in own else tensor.to(device)

        # As module.to() does, with what modules do themselves when they move; other stages' parameters have no memory.
        self.module._apply(moved)


def _state_bytes(optimizer: TrainedOptimizer | None) -> float:
    """State per element of a trained parameter, in bytes: two moments unless the optimizer is known to need less."""
    settings = optimizer.defaults if optimizer is not None else {}
    if optimizer is None or "betas" in settings:
        return 8.0
    return 4.0 if settings.get("momentum") else 0.0


@contextlib.contextmanager
def _wholly_on(module: nn.Module, device: torch.device) -> Iterator[None]:
    """The whole model on ``device``, and then every tensor where it was, so that all ranks go on alike."""
    parameters = [
        (tensor, tensor.data)
        for parameter in module.parameters()
        for tensor in (parameter, parameter.grad)
        if tensor is not None
    ]
    buffers = [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    try:
        module.to(device)
        yield
    finally:
        for tensor, before in parameters:
            tensor.data = before
        for owner, name, buffer in buffers:
            owner._buffers[name] = buffer


def _make_absent(record: ParameterRecord) -> None:
    """Free a parameter of another stage; what is left tells its name and stage where it is used."""
    record.parameter.grad = None
    try:
        swap_contents(record.parameter, absent_parameter(record.parameter, record.name, record.placement.stage))
    except RuntimeError as error:
        raise SMPUserError(
            f"parameter {record.name} lies on pipeline stage {record.placement.stage}, but this rank cannot free it ({error}): "
            "something that was computed from it is still held; do not keep results of the parameters on the model or in the "
            "script before the first step, or keep them detached"
        ) from error


def _without_storage(parameter: nn.Parameter) -> None:
    empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
    parameter.grad = None
    swap_contents(parameter, empty)
