"""``DistributedModel``: the wrapper around the user's module that a script trains."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_config import Group
from smp_records.rank_record import FORWARD, current_record
from smp_runtime.activations.marking import begin_step
from smp_runtime.context.inputs import SequenceInputs
from smp_runtime.errors import SMPUserError
from smp_runtime.job import session as sessions
from smp_runtime.job.invariants import invariants_of
from smp_runtime.microbatch_state.blueprint import Blueprint
from smp_runtime.model import eight_bits, recipe
from smp_runtime.model.backward import Backward
from smp_runtime.model.gradient_accumulation import GradientAccumulation
from smp_runtime.model.local_part import LocalPart, ParallelState, own_attributes
from smp_runtime.model.options import WrapperOptions, check_arguments, check_shared
from smp_runtime.model.placement.report import describe_placement
from smp_runtime.model.placement.strategies import ModelParts
from smp_runtime.model.replicas import Replicas
from smp_runtime.model.stages import Stages, TracingOptions, agree_on_late_values
from smp_runtime.model.state_dict import PARTIAL_KEY, ModelState, TensorShape
from smp_runtime.model.wrapped_module import WrappedModule
from smp_runtime.nn.attention import DistributedAttentionLayer
from smp_runtime.optim.accumulated import reduce_before_updates
from smp_runtime.optim.clipping import clip_over_ranks
from smp_runtime.parameters.known_parameters import KnownParameters
from smp_runtime.parameters.late_values import LateWrites
from smp_runtime.parameters.precision import Precision
from smp_runtime.parameters.registry import Successors

if TYPE_CHECKING:
    from smp_runtime.parameters.optimizer_shards import OptimizerShard
    from smp_runtime.pipeline.execution.rank_pipeline import Pipeline
    from smp_runtime.pipeline.partition.assignment import Assignment
    from smp_runtime.sharding.sharded_parameters import ShardedParameters
    from smp_runtime.sharding.sharded_state import ShardedState

logger = logging.getLogger("smp")

#: Called with every model that is wrapped; packages above register their extensions of a wrapped module here.
when_wrapped: list[Callable[[DistributedModel], None]] = []


class DistributedModel(WrappedModule):
    """A wrapper that trains ``module`` over all processes of the job; gradients are averaged once per step.

    It moves to this rank's device with the weights of the first data parallel rank; the wrapper has its attributes.

    Args:
        module: any ``nn.Module``.
        trace_device: ``"gpu"`` or ``"cpu"``: device of the tracing step.
        trace_execution_times: measure times while tracing; not with ``trace_device="cpu"``.
        overlapping_allreduce: reduce gradients while backward still runs.
        backward_passes_per_step: steps that accumulate gradients before one reduction.
        average_grads_across_microbatches: False leaves the sum over them.
        bucket_cap_mb: size of a gradient bucket, in MiB.
        trace_memory_usage: measure memory while tracing.
        broadcast_buffers: copy buffers from the first data parallel rank at every training step.
        gradient_as_bucket_view: gradients of all steps share one buffer; one that is kept sees the next step's.
        find_unused_parameters: has no effect: unused parameters are found with either value.

    Raises:
        SMPUserError: (a ``ValueError``) an argument out of its range.

    Example:
        >>> model = smp.DistributedModel(nn.Linear(4, 2))
    """

    def __init__(  # noqa: PLR0913 - the arguments that scripts pass
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
        if isinstance(module, DistributedModel):
            raise SMPUserError("this model is already wrapped in smp.DistributedModel; wrap it once", code="SMP303")
        check_arguments(module, trace_device, trace_execution_times, backward_passes_per_step, bucket_cap_mb)
        self._session = session = sessions.current_session()
        self._ranks = ranks = session.ranks
        if ranks.size(Group.PP) > 1 and session.models:
            raise SMPUserError(
                "a second model was wrapped in smp.DistributedModel, but with pipeline parallelism a script has one; make both "
                "parts of one nn.Module and wrap that",
                code="SMP303",
            )
        check_shared(module, session.models, ranks)
        self._post_partition_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._post_step_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self.precision = Precision.of(ranks.cfg)
        self._options = WrapperOptions(
            TracingOptions(trace_device, trace_execution_times, trace_memory_usage),
            backward_passes_per_step=backward_passes_per_step,
            bucket_bytes=int(bucket_cap_mb * 2**20),
            overlaps=overlapping_allreduce,
            bucket_view=gradient_as_bucket_view,
            averages_microbatches=average_grads_across_microbatches,
            broadcasts_buffers=broadcast_buffers,
        )
        self.blueprint = Blueprint(module)
        self._wrap(module)
        session.adopt_model(self)
        for tell in when_wrapped:
            tell(self)

    def _wrap(self, module: nn.Module, *, are_equal: bool = False) -> None:
        """Let every strategy take its part of a model.

        Args:
            are_equal: whether replicas have equal weights already.
        """
        session, ranks, options = self._session, self._ranks, self._options
        clip_over_ranks(session, accumulates=options.backward_passes_per_step > 1)
        if options.backward_passes_per_step > 1:
            reduce_before_updates(session)
        own_attributes(session)
        originals = dict(module.named_parameters())
        self.module = recipe.apply_tensor_parallelism(module, ranks)
        agree_on_late_values(ranks, self.module)
        if not are_equal:  # else the values are still to come
            invariants_of(ranks).check_replaced(originals, self.module)
        del originals
        self.blueprint.note_wrapped(self.module, ranks.keep(Successors, Successors).note_freed)
        if ranks.cfg.checkpoint_attentions and not any(
            isinstance(p, DistributedAttentionLayer) for p in self.module.modules()
        ):
            sessions.say_once(
                "checkpoint_attentions ignored: the model has no distributed attention, the only one that it is for; for other "
                "layers call smp.set_activation_checkpointing"
            )
        self._alias_module()
        # Weak, since a part must not keep the wrapper alive.
        trains, loss_scale = weakref.WeakMethod(self._trains), weakref.WeakMethod(self._loss_scale)
        self._part = part = LocalPart(self.module, ranks.rank_in(Group.PP))
        self._placed = placed = ParallelState()
        self._stages = Stages(part, session, self.precision, options.tracing)
        self._accumulation = accumulation = GradientAccumulation(
            ranks,
            lambda: (ask := trains()) is not None and ask(),
            passes_per_reduction=options.backward_passes_per_step,
            bucket_bytes=options.bucket_bytes,
            overlap=options.overlaps and ranks.cfg.overlapping_allreduce,
            bucket_view=options.bucket_view,
        )
        self._replicas = Replicas(part, placed, ranks, accumulation, broadcasts_buffers=options.broadcasts_buffers)
        self._replicas.are_equal = are_equal
        self._backward = Backward(
            ranks,
            self._stages,
            lambda: 1.0 if (ask := loss_scale()) is None else ask(),
            averages_microbatches=options.averages_microbatches,
        )
        self._state = ModelState(part, placed, ranks)
        if self.partitioned:
            self._place()
            if ranks.rank == 0:
                logger.info(
                    "Model: %s, %s parameters, one stage", type(self.module).__name__, f"{self.registry.elements:,}"
                )
        self._late_writes = LateWrites(self.module)
        self._replicas.follow_loads()

    def rebuild(self, module: nn.Module) -> None:
        """Lay out ``module``, the script's, after :meth:`leave_stages`; every rank calls it, and then loads every tensor."""
        mode, hook = self.training, self._accumulation.hook
        if self.partitioned:  # hooks that have run may load the initial weights: never run them again
            self._post_partition_hooks.clear()
        self._wrap(module, are_equal=True)
        self.training, self._accumulation.hook = mode, hook
        if hook is not None and self.partitioned:
            self._accumulation.install_hook()

    def leave_stages(self) -> None:
        """End the pipeline; nothing runs until the model is laid out anew."""
        self._stages.withdraw()

    def _place(self) -> None:
        checks, has_values = invariants_of(self._ranks), not self._replicas.are_equal
        if has_values:
            checks.note_whole(self._part, self.precision)
        eight_bits.adopt_layers(self._session, self._part.module)
        parts = ModelParts(self._ranks, self._stages, self._replicas, self._accumulation, self._backward, self._placed)
        recipe.place(parts)
        if has_values:
            checks.check_shards(self._part, self._placed)
        checks.begin_again()
        if self._ranks.rank_in(Group.DP) == 0:  # the first of each stage
            for text in describe_placement(self._part, self._placed.shards, self._ranks):
                logger.info("%s", text)
        eight_bits.note_weights(self._ranks, self._part.module)
        recipe.prepare_modules(parts)
        is_divided = self._ranks.size(Group.PP) > 1 or self._ranks.size(Group.TP) > 1
        if is_divided or self._accumulation.reduces or self.optimizer_shards is not None:
            self._placed.known = KnownParameters(self._part.module, self)
        self.blueprint.note_settings(self._ranks.device, self.precision.compute)

    # -- its parts -------------------------------------------------------------------------------------------------

    @property
    def optimizer_shards(self) -> dict[nn.Parameter, OptimizerShard | None] | None:
        """Return the shards that the optimizer updates in place of parameters; None if it updates parameters."""
        return self._placed.optimizer_shards

    @property
    def sharded_state(self) -> ShardedState | ShardedParameters | None:
        """Return the sharding of the optimizer state over the replicas, or None."""
        return self._placed.sharded_state

    @property
    def shards(self) -> ShardedParameters | None:
        """Return the sharding of parameters, gradients and optimizer state under sharded data parallelism, or None."""
        return self._placed.shards

    @property
    def partitioned(self) -> bool:
        """Return whether every rank knows its part; without pipeline parallelism, True from the beginning."""
        return self._stages.partitioned

    @property
    def pipeline(self) -> Pipeline | None:
        """Return the pipeline that runs the steps; None without pipeline parallelism."""
        return self._stages.pipeline

    @property
    def assignment(self) -> Assignment | None:
        """Return the stage of each module; None without pipeline parallelism."""
        return self._stages.assignment

    # -- the partition ---------------------------------------------------------------------------------------------

    def partition(self, microbatch: functools.partial[Any] | None, *, first_step: bool = True) -> None:
        """Decide which stage gets which module, if that has not been done; every rank calls it, see :meth:`.Stages.decide`."""
        if self.partitioned:
            return
        if torch.is_inference_mode_enabled():  # tensors made now must serve training later
            with torch.inference_mode(False), torch.no_grad():
                self.partition(microbatch, first_step=first_step)
            return
        self._late_writes.refuse()
        training = self.training
        try:
            assignment = self._stages.decide(microbatch, first_step=first_step)
        finally:
            self.training = training  # the step function may switch it; tracing restores only the modules inside
        self.adopt(assignment)

    def adopt(self, assignment: Assignment) -> None:
        """Keep this rank's part of the model, and start the pipeline; every rank calls it with the same decision.

        Raises:
            SMPUserError: the decision does not fit this model or this number of stages.
        """
        recipe.partition(self._stages, assignment)
        self._place()
        for optimizer in self._session.optimizers:
            optimizer.bind(self)
        self._state.load_what_waited()
        self._stages.start(self._placed.shards)
        for hook in list(self._post_partition_hooks.values()):
            hook(self, self._session.optimizer)

    # -- steps -----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; inside a step, with one microbatch."""
        if self._placed.is_copied:
            if self._trains():
                self._replicas.begin_training_pass()  # raises, with the reason
            return self.precision.leave(self.module(*self.precision.enter(args), **self.precision.enter(kwargs)))
        step = self._ranks.step
        if step.is_tracing:
            return self.module(*args, **kwargs)
        is_outside = step.microbatch is None
        if is_outside:
            current_record().enter(FORWARD)
        if not self.partitioned or (self.pipeline is not None and is_outside):
            raise SMPUserError(
                "the model was called outside a step, but with pipeline parallelism its modules are on several ranks, which only "
                "work together inside a step; call it in a function decorated with smp.step, also for evaluation",
                code="SMP303",
            )
        if is_outside:
            self.adopt_writes()
        if is_outside and self._trains():
            self._accumulation.open_after_failure()
            begin_step(self.module, None)
            self._replicas.begin_training_pass((args, kwargs))
        with self._accumulation.forward(evaluates=is_outside and not self._trains()):
            args, kwargs = self.precision.enter(args), self.precision.enter(kwargs)
            if (inputs := SequenceInputs.of(self._ranks)) is not None:
                args, kwargs = inputs.cut(args, kwargs)
            return self.precision.leave(self.module(*args, **kwargs))

    def backward(
        self,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        *,
        inputs: Any = None,
    ) -> None:
        """Run backward from ``tensors``, as ``torch.autograd.backward``; inside a step, of one microbatch.

        Gradients are averaged over the microbatches unless ``average_grads_across_microbatches=False``.

        Args:
            tensors: the loss, or several outputs.
            grad_tensors: gradients of outputs that are not scalars.
            retain_graph: keep the graph for another backward pass; not with pipeline parallelism.
            create_graph: give gradients a graph of their own; not with pipeline parallelism.
            inputs: the only tensors that get gradients; not with pipeline parallelism.

        Raises:
            SMPUserError: an output that is not a scalar, without its gradient in ``grad_tensors``; an argument that pipeline
                parallelism does not support; or a second backward pass through a graph that the first has freed.
        """
        self._backward.run(tensors, grad_tensors, retain_graph, create_graph, inputs)

    def begin_step(self) -> None:
        """Prepare for a step-decorated function that begins."""
        begin_step(self.module, self._stages.regions)
        self.adopt_writes()
        if self._trains():
            self._replicas.begin_training_pass()
        elif not self._replicas.are_joined and self._ranks.step.count == 0:
            # Later evaluation steps must not wait for other replicas: some ranks may have fewer, or evaluate alone.
            self._replicas.share_loaded_state()
        self._backward.begin_step()
        self._accumulation.begin_step(agrees=self._trains() and not self._replicas.are_joined)

    def finish_step(self) -> bool:
        """Reduce gradients and run the hooks, after all microbatches; return whether backward ran."""
        trained = self._accumulation.finish_step()
        hooks = list(self._post_step_hooks.values())
        self._post_step_hooks.clear()
        for hook in hooks:
            hook(self, self._session.optimizer)
        return trained and torch.is_grad_enabled()

    def abandon_step(self) -> None:
        """Abandon a step in which a microbatch raised an error: its gradients are not reduced."""
        self._accumulation.abandon_step()

    def _trains(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def _loss_scale(self) -> float:
        """Return the loss scale of the optimizer that updates this model, or of the only one."""
        optimizer = next((o for o in self._session.optimizers if o.updates(self)), self._session.optimizer)
        return optimizer.loss_scale if optimizer is not None else 1.0

    @property
    def has_accumulated(self) -> bool:
        """Return whether gradients have accumulated without a reduction, as ``backward_passes_per_step`` requests."""
        return self._accumulation.is_incomplete

    def reduce_accumulated(self) -> None:
        """Reduce the gradients of an incomplete group of passes; every rank calls it."""
        self._accumulation.complete()

    def check_parameters(self) -> None:
        """Refuse parameters that were added, replaced or removed after the model was laid out."""
        if self._placed.known is not None:
            self._placed.known.check()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Accumulate gradients of backward passes inside without reducing them; for loops without ``smp.step``."""
        return self._accumulation.no_sync()

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        """Train with uneven numbers of steps: a rank that has left the loop answers the others until all have.

        Gradients are divided by the number of all ranks, also of those that are done. At the end every rank has the
        weights of one that trained longest; the optimizer's state of a rank that was done earlier stays behind.

        Args:
            divide_by_initial_world_size: only True is supported.
            enable: False makes the context do nothing.

        Raises:
            SMPUserError: ``divide_by_initial_world_size=False``; sharded optimizer state, which every rank must update; or
                fp16, in which all ranks agree on overflows in every step.
        """
        return self._replicas.join(divide_by_initial_world_size, enable)

    # -- state -----------------------------------------------------------------------------------------------------

    def adopt_writes(self) -> None:
        """Let training continue from values that the script has written into parameters since the last call."""
        self._placed.adopt_writes()
        for optimizer in self._session.optimizers:
            if optimizer.updates(self) and optimizer.store_writes():
                self._placed.must_gather = True

    def state_dict(self, *args: Any, gather_to_rank0: bool = False, **kwargs: Any) -> Any:
        """Return the full state under the unwrapped module's names.

        With pipeline or tensor parallelism every rank of a model parallel group calls it.

        Args:
            gather_to_rank0: only the first rank of each model parallel group gets it, the others ``{}``.
        """
        if self._placed.is_copied:
            keeps = not gather_to_rank0 or self._ranks.rank_in(Group.MP) == 0
            return self.module.state_dict(*args, **kwargs) if keeps else {}
        return self._state.gathered(self._state.local(*args, **kwargs), to_first=gather_to_rank0)

    def state_to_save(self) -> dict[str, Any]:
        """Return the full state on the first rank of the job; every rank calls it.

        Gathered tensors are on the CPU. The other ranks get ``{}``: they only take part, with one flat unit at a time.
        """
        return self._state.to_save()

    def whole_tensors(
        self, only: Container[str] | None = None
    ) -> tuple[list[TensorShape] | None, Iterator[tuple[str, torch.Tensor]]]:
        """Return the contents of the full state, and an iterator over its tensors, on the first rank of the job.

        Every rank calls it and iterates to the end; the others get nothing.

        Args:
            only: names of the tensors to return; the same on all ranks.
        """
        return self._state.described(only), self._state.stream(only)

    def local_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the state of this rank's stage, marked by the key ``_smp_is_partial``."""
        return {**self._state.local(*args, **kwargs), PARTIAL_KEY: True}

    def load_state_dict(  # type: ignore[override]
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        same_partition_load: bool = False,
        assign: bool = False,
    ) -> Any:
        """Load a full or partial state; names may carry the ``module.`` prefix of other wrappers.

        Before the model is partitioned, a state is kept and loaded when its parameters have a place.

        Args:
            state_dict: from :meth:`state_dict` or, of the same number of ranks, from :meth:`local_state_dict`.
            strict: whether all names must agree.
            same_partition_load: of a partial state with pipeline parallelism: it is of this very partition. Otherwise the
                stages of a replica, which all load theirs, give each other what the partition has moved.
            assign: put the state's tensors in place of the parameters; only before anything knows these.
        """
        if self._placed.is_copied:
            raise SMPUserError(
                "model.cpu() has put a whole copy in the place of this rank's part, so load_state_dict would change the copy "
                "only; call model.cuda() first, which goes back to the part, or model.module.load_state_dict for the copy",
                code="SMP303",
            )
        return self._state.load(
            state_dict,
            strict,
            assign,
            same_partition=same_partition_load,
            partitioned=self.partitioned,
            known=self._accumulation.reduces or self.optimizer_shards is not None,
        )

    def load_when_partitioned(self, load: Callable[[], Any]) -> None:
        """Call ``load`` when the parameters have a place."""
        self._state.when_placed(load)

    # -- like any module -------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, also those that were reduced to their owner already."""
        super().zero_grad(set_to_none)
        for optimizer in self._session.optimizers:
            optimizer.drop_gradients_of(self, to_zero=not set_to_none)
        if self.sharded_state is not None:
            self.sharded_state.clear_gradients(to_zero=not set_to_none)
