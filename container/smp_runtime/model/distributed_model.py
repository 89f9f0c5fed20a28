"""``DistributedModel``: the wrapper around the user's module that a script trains."""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from smp_config import Group
from smp_config.buckets import effective_bucket_bytes
from smp_runtime.activations.begin_step import begin_step
from smp_runtime.activations.marking import carry_over, marks
from smp_runtime.data_parallel.bucket_transports import HookTransport
from smp_runtime.data_parallel.joining import JoinedModel
from smp_runtime.data_parallel.reducer_set import Reducer, make_reducer, sharing_group
from smp_runtime.errors import SMPUserError
from smp_runtime.job import session as sessions
from smp_runtime.model.gradient_window import SteppedModel
from smp_runtime.model.staged_regions import Placement
from smp_runtime.optim.clipping_watch import watch_clipping
from smp_runtime.parameters.deferred_creation import Deferrals, materialize
from smp_runtime.parameters.optimizer_shards import OptimizerShard, master_shard, parameter_shard
from smp_runtime.parameters.precision import Precision, is_rotary
from smp_runtime.parameters.registry import ParameterRegistry
from smp_runtime.pipeline.execution.rank_pipeline import Pipeline
from smp_runtime.pipeline.partition.assignment import Assignment
from smp_runtime.replacement.placing import place
from smp_runtime.replacement.replacing import distribute
from smp_runtime.sharding.sharded_parameters import ShardedParameters, create_shards, make_stand_ins
from smp_runtime.sharding.sharded_state import ShardedState
from smp_runtime.tensor_parallel.group import TensorGroup

logger = logging.getLogger("smp")


class DistributedModel(SteppedModel):
    """Trains ``module`` over all processes of the job; gradients are averaged once per step.

    The module moves to this rank's device, and its parameters and buffers become those of the first data parallel
    rank. Attributes of the module can be read from the wrapper, and ``model.module``, ``model.module.module`` and so
    on are all the module itself.

    Args:
        module: any ``nn.Module``.
        trace_device: ``"gpu"`` or ``"cpu"``: where the tracing step runs.
        trace_execution_times: measure module times while tracing; not with ``trace_device="cpu"``.
        overlapping_allreduce: reduce gradients while backward still runs.
        backward_passes_per_step: steps whose gradients accumulate before one reduction.
        average_grads_across_microbatches: False leaves the sum over microbatches.
        bucket_cap_mb: size of a gradient bucket, in MiB.
        trace_memory_usage: measure memory while tracing.
        broadcast_buffers: copy buffers from the first data parallel rank at every training step.
        gradient_as_bucket_view: gradients of all steps share one buffer, which saves allocating it; a reference to a
            gradient that is kept over a step then sees the next step's values.
        find_unused_parameters: accepted; unused parameters are always found.

    Raises:
        SMPUserError: (a ``ValueError``) an argument out of its range.
    """

    def __init__(
        self,
        module: nn.Module,
        trace_device: str = "gpu",
        trace_execution_times: bool = False,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        bucket_cap_mb: float = 25,
        trace_memory_usage: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__()
        _check_arguments(module, trace_device, trace_execution_times, backward_passes_per_step, bucket_cap_mb)
        self._session = sessions.current()
        self._ranks = self._session.ranks
        watch_clipping(self._session)
        if self._ranks.size(Group.PP) > 1 and self._session.models:
            raise SMPUserError(
                "a second model was wrapped in smp.DistributedModel, but with pipeline parallelism a script has one; make both "
                "parts of one nn.Module and wrap that"
            )
        self.precision = Precision.of(self._ranks.cfg)
        checkpointed = marks(module)
        self.module = module = distribute(module, TensorGroup.of(self._ranks))
        carry_over(checkpointed, module)
        self._alias_module()
        self._averages_microbatches = average_grads_across_microbatches
        self._broadcasts_buffers = broadcast_buffers
        self._passes_per_reduction = backward_passes_per_step
        self._passes = 0
        self._in_backward = False
        self._joined: JoinedModel | None = None
        self._closing_is_queued = False
        self._agreement = None
        self._accumulation = None
        self._loads = 0
        self._is_away = False
        self._post_partition_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._post_step_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()

        self._bucket_cap_mb = bucket_cap_mb
        self._bucket_view = gradient_as_bucket_view
        self._overlaps = overlapping_allreduce and self._ranks.cfg.overlapping_allreduce
        self._trace_device = trace_device
        self._traces_times = trace_execution_times
        self._traces_memory = trace_memory_usage
        #: What the optimizer updates instead of the parameters; None when it updates the parameters.
        self.optimizer_shards: dict[nn.Parameter, OptimizerShard | None] | None = None
        self.sharded_state: ShardedState | ShardedParameters | None = None
        self.shards: ShardedParameters | None = None
        self.pipeline: Pipeline | None = None
        self.assignment: Assignment | None = None
        self._staged_regions: Placement | None = None
        self._stage_of: Callable[[str], int] | None = None
        self._stage = self._ranks.rank_in(Group.PP)
        self._reducer: Reducer | None = None
        self._frozen: list[nn.Parameter] = []
        self._waiting: list[Callable[[], Any]] = []
        self._comm_hook: tuple[Any, Callable[..., Any]] | None = None

        self.partitioned = self._ranks.size(Group.PP) == 1
        if self.partitioned:
            self._place()
        else:
            self.registry = ParameterRegistry(module)
            place(module, self.registry)
            self._follow_loads()
            self._session.adopt_model(self)

    def _place(self) -> None:
        """Give this rank's part of the model its place: the recipe of every strategy, in the order that they need."""
        module, options = self.module, self._ranks.cfg
        divided = options.sharded_data_parallel_degree > 1
        created_later = make_stand_ins(self._ranks, module) if divided else []
        if not divided:
            materialize(self._ranks.keep(Deferrals, Deferrals), module, self._ranks.device, take=self._created())
        self.registry = ParameterRegistry(module)
        place(module, self.registry)
        if self._stage_of is not None:
            self.registry.place_stages(self._stage_of)
            self._drop_other_stages()
        # The order matters: replicas agree in full precision, then weights are cast, then their storage is flattened.
        if divided:
            self.shards = ShardedParameters(
                module,
                list(self.local_parameters()),
                self._ranks,
                self.precision,
                deferred=frozenset(id(parameter) for _, parameter in created_later),
                split=frozenset(id(r.parameter) for r in self.registry if r.placement.tensor_axis is not None),
            )
            create_shards(self._ranks, module, created_later, self.shards)
        in_shards = self.shards.parameters if self.shards else set()
        self._moved(self._ranks.device)
        replicated = options.ddp and self._ranks.size(Group.DP) > 1
        if replicated:
            self._replicate([*(p for p in self.local_parameters() if p not in in_shards), *self.local_buffers()])
        masters = self.precision.convert(self.local_modules(), skip=in_shards)
        local = {id(parameter) for parameter in self.local_parameters()}
        here = [record.parameter for record in self.registry if id(record.parameter) in local]
        trained = [parameter for parameter in here if parameter.requires_grad]
        updates_by_shards = bool(masters) or divided or (replicated and options.shard_optimizer_state)
        known = replicated or updates_by_shards
        self._frozen = [parameter for parameter in here if not parameter.requires_grad] if known else []
        held = sum(parameter.numel() * parameter.element_size() for parameter in trained)
        bucket_bytes = effective_bucket_bytes(held, int(self._bucket_cap_mb * 2**20))
        if replicated and options.shard_optimizer_state:
            sharing = sharing_group(self._ranks)
            self.sharded_state = ShardedState(
                self._ranks, sharing, trained, self.precision, masters=masters, unit_bytes=bucket_bytes
            )
        elif self.shards is not None:
            whole = [parameter for parameter in trained if parameter not in in_shards]
            self.shards.add_whole(
                {p: master_shard(p, masters[p]) if p in masters else parameter_shard(p) for p in whole}
            )
            self.sharded_state = self.shards
        elif masters:
            self.optimizer_shards = {parameter: master_shard(parameter, masters[parameter]) for parameter in trained}
        if self.sharded_state is not None:
            self.optimizer_shards = self.sharded_state.optimizer_shards
            self.registry.place_shards(self.sharded_state.places)
        if len(here) < len(self.registry):  # the optimizer has nothing to do with other stages' parameters
            elsewhere = {r.parameter: None for r in self.registry if id(r.parameter) not in local}
            self.optimizer_shards = {**(self.optimizer_shards or {}), **elsewhere}
        if replicated:
            self._watch_backward(trained)
            self._reducer = make_reducer(
                self.registry,
                [parameter for parameter in trained if parameter not in in_shards],
                self._ranks,
                bucket_bytes=bucket_bytes,
                overlap=self._overlaps,
                reduce_dtype=self.precision.reduce,
                bucket_view=self._bucket_view,
                buckets=self.sharded_state.buckets if isinstance(self.sharded_state, ShardedState) else None,
                transport=self.sharded_state if isinstance(self.sharded_state, ShardedState) else None,
            )
            self._open_window()
            if self._comm_hook is not None:
                self._use_comm_hook(*self._comm_hook)
        if options.fp16 or options.microbatches > 1:
            self._scale_foreign_gradients(trained)
        if self._stage_of is None:
            self._follow_loads()
            self._session.adopt_model(self)
            if self._ranks.rank == 0:
                logger.info(
                    "Partition assignments:\n  %s: %s parameters, rank 0",
                    type(module).__name__,
                    f"{self.registry.elements:,}",
                )
        else:
            for optimizer in self._session.optimizers:
                optimizer.bind(self)
            self._load_what_waited()

    # -- calls -----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; inside a step, with one microbatch."""
        if self._ranks.step.is_tracing:
            return self.module(*args, **kwargs)
        if not self.partitioned or (self.pipeline is not None and self._ranks.step.microbatch is None):
            raise SMPUserError(
                "the model was called outside a step, but with pipeline parallelism its modules are on several ranks, which only "
                "work together inside a step; call it in a function decorated with smp.step, also for evaluation"
            )
        if self._ranks.step.microbatch is None and self.training and torch.is_grad_enabled():
            if self._closing_is_queued:  # left by a backward pass that raised
                self._closing_is_queued = False
                self._open_window()
            begin_step(self.module, None)
            self._begin_training_pass()
        with self._shards_in_use():
            return self.precision.leave(self.module(*self.precision.enter(args), **self.precision.enter(kwargs)))

    @contextlib.contextmanager
    def _shards_in_use(self) -> Iterator[None]:
        """Around the module's forward: parameters are gathered as they are used."""
        if self.shards is None:
            yield
            return
        evaluates = self._ranks.step.microbatch is None and not (self.training and torch.is_grad_enabled())
        if evaluates:
            self._open_window()
        try:
            with self.shards.forward():
                yield
        except BaseException:
            if evaluates:  # forget its order, and let go of what it had gathered
                self.shards.abandon_window()
                self._open_window()
            raise
        if evaluates:
            self.shards.finish_window(reduces=False)
            self._open_window()

    # -- like any module -------------------------------------------------------------------------------------------

    def to(self, *args: Any, **kwargs: Any) -> DistributedModel:
        """Dtype changes apply; a device is ignored, because placement is this wrapper's work."""
        _, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is None:
            return self
        changes = any(p.is_floating_point() and p.dtype is not dtype for p in self.module.parameters())
        if changes and (self._reducer is not None or self.optimizer_shards is not None):
            raise SMPUserError(
                f"the model cannot become {dtype} after it was wrapped: gradient reduction and the optimizer already know its "
                'parameters; cast it before smp.DistributedModel, or train with "fp16" or "bf16"'
            )
        return super().to(dtype=dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> DistributedModel:
        """What ``to``, ``half`` and the like do to every tensor; in half precision training rotary frequencies are not cast."""
        if not self.precision.is_half:
            return super()._apply(fn, recurse)
        kept = [
            (owner, name, buffer)
            for owner in self.module.modules()
            for name, buffer in owner.named_buffers(recurse=False)
            if is_rotary(name)
        ]
        super()._apply(fn, recurse)
        for owner, name, buffer in kept:
            setattr(owner, name, buffer.to(getattr(owner, name).device))
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, also those that were reduced to their owner already."""
        super().zero_grad(set_to_none)
        for optimizer in self._session.optimizers:
            optimizer.drop_gradients_of(self)
        if self.sharded_state is not None:
            self.sharded_state.clear_gradients()

    def cpu(self) -> DistributedModel:
        """Move the full model to CPU memory, to be saved or evaluated; before it is partitioned it stays where it is.

        Training on a GPU goes on after :meth:`cuda`, but not in half precision or with sharded optimizer state, where
        the weights have left the memory that is updated.

        Raises:
            SMPUserError: this rank holds a part of the model only: pipeline, tensor or sharded data parallelism.
        """
        if not self.partitioned:
            return self
        reasons = {
            "pipeline parallelism": self.pipeline is not None,
            "tensor parallelism": any(True for _ in self.distributed_modules()),
            "sharded data parallelism": self.shards is not None,
        }
        if why := [reason for reason, holds in reasons.items() if holds]:
            raise SMPUserError(
                f"model.cpu() moves the full model, but with {' and '.join(why)} rank {self._ranks.rank} holds a part; "
                "call model.state_dict() on every rank, which gives the full state, and load it into an unwrapped model on the CPU"
            )
        self._is_away = self._ranks.device.type != "cpu"
        return super().to("cpu")

    def cuda(self, device: Any = None) -> DistributedModel:
        """Ignored: the model is on this rank's device already, unless :meth:`cpu` has moved it."""
        if not self._is_away or self.optimizer_shards is not None:
            return self
        self._is_away = False
        return super().to(self._ranks.device)

    # -- hooks -----------------------------------------------------------------------------------------------------

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Let a communication hook of PyTorch's DDP average the gradients; ``hook(state, bucket)`` gives a future.

        The hook averages over the data parallel ranks itself. Call it before the first step.

        Raises:
            SMPUserError: gradients are not all-reduced: no data parallelism, or sharded optimizer state.
        """
        if self.partitioned:
            self._use_comm_hook(state, hook)
        else:
            self._comm_hook = (state, hook)

    def _use_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        if self._reducer is None or self.sharded_state is not None:
            why = "sharded optimizer state" if self.sharded_state else "no data parallelism over several ranks"
            raise SMPUserError(f"register_comm_hook replaces the all-reduce of gradients, but this job has {why}")
        self._reducer.use_transport(lambda parameters: HookTransport(state, hook, parameters))

    def register_post_partition_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call ``hook(model, optimizer)`` once the model is partitioned; at once when it already is."""
        handle = RemovableHandle(self._post_partition_hooks)
        self._post_partition_hooks[handle.id] = hook
        if self.partitioned:
            hook(self, self._session.optimizer)
        return handle

    def register_post_step_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call ``hook(model, optimizer)`` after every step-decorated call."""
        handle = RemovableHandle(self._post_step_hooks)
        self._post_step_hooks[handle.id] = hook
        return handle


def _check_arguments(
    module: Any, trace_device: str, trace_execution_times: bool, backward_passes_per_step: int, bucket_cap_mb: float
) -> None:
    if not isinstance(module, nn.Module):
        raise SMPUserError(
            f"smp.DistributedModel wraps an nn.Module, but got a {type(module).__name__}: pass the model"
        )
    if isinstance(module, DistributedModel):
        raise SMPUserError("this model is already wrapped in smp.DistributedModel; wrap it once")
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
