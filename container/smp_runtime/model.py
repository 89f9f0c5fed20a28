"""``DistributedModel``: the wrapper around the user's module that a script trains."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from smp_config import Group
from smp_config.buckets import effective_bucket_bytes
from smp_runtime import session as sessions
from smp_runtime.data_parallel.joining import JoinedModel
from smp_runtime.data_parallel.reducer import GradientReducer
from smp_runtime.data_parallel.transports import HookTransport
from smp_runtime.deferred import materialize
from smp_runtime.errors import SMPUserError
from smp_runtime.pieces import Piece, whole_piece
from smp_runtime.precision import Precision
from smp_runtime.registry import ParameterRegistry
from smp_runtime.replicated_model import ReplicatedModel
from smp_runtime.sharding.optimizer_state import ShardedState

logger = logging.getLogger("smp")

PARTIAL_KEY = "_smp_is_partial"


class DistributedModel(ReplicatedModel):
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
        self.precision = Precision.of(self._session.cfg)
        self.module = module
        self._alias_module()
        self._averages_microbatches = average_grads_across_microbatches
        self._broadcasts_buffers = broadcast_buffers
        self._passes_per_reduction = backward_passes_per_step
        self._passes = 0
        self._in_backward = False
        self._joined: JoinedModel | None = None
        self._closing_is_queued = False
        self._loads = 0
        self._post_partition_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._post_step_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()

        materialize(self._session.deferrals, module, self._session.device)
        self.registry = ParameterRegistry(module)
        self.partitioned = True
        #: What the optimizer updates instead of the parameters; None when it updates the parameters.
        self.pieces: dict[nn.Parameter, Piece | None] | None = None
        self.sharded_state: ShardedState | None = None
        self._reducer: GradientReducer | None = None

        # The order matters: replicas agree in full precision, then weights are cast, then their storage is flattened.
        super().to(self._session.device)
        replicated = self._session.cfg.ddp and self._session.size(Group.DP) > 1
        if replicated:
            self._replicate([*module.parameters(), *module.buffers()])
        masters = self.precision.convert(module)
        trained = [record.parameter for record in self.registry if record.parameter.requires_grad]
        updates_by_pieces = bool(masters) or (replicated and self._session.cfg.shard_optimizer_state)
        known = replicated or updates_by_pieces
        self._frozen = [r.parameter for r in self.registry if not r.parameter.requires_grad] if known else []
        held = sum(parameter.numel() * parameter.element_size() for parameter in trained)
        bucket_bytes = effective_bucket_bytes(held, int(bucket_cap_mb * 2**20))
        if replicated and self._session.cfg.shard_optimizer_state:
            self.sharded_state = self._shard_state(trained, masters, bucket_bytes)
            self.pieces = self.sharded_state.pieces
            self.registry.place_shards({p: (k.start, k.stop) if k else (0, 0) for p, k in self.pieces.items()})
        elif masters:
            self.pieces = {parameter: whole_piece(parameter, masters[parameter]) for parameter in trained}
        if replicated:
            self._reducer = GradientReducer(
                trained,
                self._session.groups.group(Group.DP),
                self._session.members(Group.DP),
                self._session.collectives,
                bucket_bytes=bucket_bytes,
                overlap=overlapping_allreduce and self._session.cfg.overlapping_allreduce,
                reduce_dtype=self.precision.reduce,
                bucket_view=gradient_as_bucket_view,
                buckets=self.sharded_state.buckets if self.sharded_state else None,
                transport=self.sharded_state,
            )
            self._open_window()
            self._watch_backward_outside_steps()
        if self._session.cfg.fp16 or (self._averages_microbatches and self._session.cfg.microbatches > 1):
            self._scale_foreign_gradients()
        self._follow_loads()
        self._session.adopt_model(self)
        if self._session.rank == 0:
            logger.info(
                "Partition assignments:\n  %s: %s parameters, rank 0",
                type(module).__name__,
                f"{self.registry.elements:,}",
            )

    # -- calls -----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; inside a step, with one microbatch."""
        if self._session.microbatch is None and self.training and torch.is_grad_enabled():
            if self._closing_is_queued:  # left by a backward pass that raised
                self._closing_is_queued = False
                self._open_window()
            self._begin_training_pass()
        return self.precision.leave(self.module(*self.precision.enter(args), **self.precision.enter(kwargs)))

    def backward(self, tensors: Any, grad_tensors: Any = None) -> None:
        """Backward from ``tensors``, as ``torch.autograd.backward``; inside a step, of one microbatch.

        Gradients are averaged over the microbatches unless ``average_grads_across_microbatches=False``.

        Raises:
            SMPUserError: an output that is not a scalar, without its gradient in ``grad_tensors``.
        """
        outputs = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        given = [grad_tensors] if isinstance(grad_tensors, torch.Tensor) else grad_tensors
        gradients = [None] * len(outputs) if given is None else list(given)
        scale = self._gradient_scale()
        for index, (output, gradient) in enumerate(zip(outputs, gradients, strict=True)):
            if gradient is None and output.numel() != 1:
                raise SMPUserError(
                    f"backward got an output of shape {list(output.shape)} without a gradient; reduce it to a scalar "
                    "loss, or pass its gradient in grad_tensors"
                )
            if scale != 1.0:
                seed = torch.ones_like(output) if gradient is None else gradient
                gradients[index] = seed * scale
        self._in_backward = True
        try:
            torch.autograd.backward(outputs, gradients)
        finally:
            self._in_backward = False

    def _gradient_scale(self) -> float:
        """What a loss is multiplied with: the loss scale of fp16, and one over the microbatches that are averaged."""
        optimizer = self._session.optimizer
        scale = optimizer.loss_scale if optimizer is not None else 1.0
        inside = self._session.microbatch is not None
        return scale / self._session.cfg.microbatches if inside and self._averages_microbatches else scale

    def _shard_state(
        self, trained: list[nn.Parameter], masters: Mapping[nn.Parameter, torch.Tensor], unit_bytes: int
    ) -> ShardedState:
        return ShardedState(
            trained,
            self._session.groups.group(Group.DP),
            self._session.members(Group.DP),
            self._session.rank_in(Group.DP),
            self._session.collectives,
            self._session.control,
            unit_bytes=unit_bytes,
            masters=masters,
            reduce_dtype=self.precision.reduce,
        )

    def _scale_foreign_gradients(self) -> None:
        """``loss.backward()`` inside a step, instead of ``model.backward(loss)``, averages over microbatches too."""

        weak = weakref.ref(self)

        def scaled(gradient: torch.Tensor) -> torch.Tensor | None:
            model = weak()
            scale = 1.0 if model is None or model._in_backward else model._gradient_scale()
            return None if scale == 1.0 else gradient * scale

        for record in self.registry:
            if record.parameter.requires_grad:
                record.parameter.register_hook(scaled)

    # -- the step --------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """A step-decorated function begins."""
        if self.training and torch.is_grad_enabled():
            self._begin_training_pass()
        self._open_window()

    def finish_step(self) -> bool:
        """All microbatches are done: reduce gradients, run the hooks; returns whether backward ran."""
        trained = True if self._reducer is None else self._reducer.touched
        if self._reducer is not None:
            if trained:
                self._passes += 1
                self._reducer.finish_window()
            self._open_window()
        for hook in list(self._post_step_hooks.values()):
            hook(self, self._session.optimizer)
        return trained and torch.is_grad_enabled()

    def abandon_step(self) -> None:
        """A microbatch raised: its gradients are not reduced."""
        self._open_window()

    def _open_window(self) -> None:
        """Gradients that come from now on belong to the next pass, which reduces if it completes a group of passes."""
        if self._reducer is not None:
            self._reducer.begin_window(reduces=(self._passes + 1) % self._passes_per_reduction == 0)

    def _close_window(self) -> None:
        """A backward pass outside a step has ended."""
        self._closing_is_queued = False
        if self._reducer is not None:
            self._passes += 1
            self._reducer.finish_window()
            self._open_window()

    def _watch_backward_outside_steps(self) -> None:
        """``loss.backward()`` without a step is a window of its own, closed when the backward pass ends."""
        weak = weakref.ref(self)

        def gradient_comes(_: torch.Tensor) -> None:
            model = weak()
            if model is not None and model._session.microbatch is None and not model._closing_is_queued:
                model._closing_is_queued = True
                torch.autograd.Variable._execution_engine.queue_callback(model._close_window)

        for record in self.registry:
            if record.parameter.requires_grad:
                record.parameter.register_post_accumulate_grad_hook(gradient_comes)

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, gather_to_rank0: bool = False, **kwargs: Any) -> Any:
        """The full state under the unwrapped module's names.

        With ``gather_to_rank0`` only the first rank of each model parallel group gets it, the others ``{}``.
        """
        if gather_to_rank0 and self._session.rank_in(Group.MP) != 0:
            return {}
        return self.module.state_dict(*args, **kwargs)

    def local_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The state of this rank's stage, marked by the key ``_smp_is_partial``."""
        return {**self.module.state_dict(*args, **kwargs), PARTIAL_KEY: True}

    def load_state_dict(  # type: ignore[override]
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        same_partition_load: bool = False,
        assign: bool = False,
    ) -> Any:
        """Load a full or partial state; names may carry the ``module.`` prefix of other wrappers."""
        state = {name: value for name, value in state_dict.items() if name != PARTIAL_KEY}
        own = self.module.state_dict()
        if state and not own.keys() & state.keys() and all(name.startswith("module.") for name in state):
            state = {name.removeprefix("module."): value for name, value in state.items()}
        if assign and (self._reducer is not None or self.pieces is not None):
            raise SMPUserError(
                "load_state_dict(assign=True) replaces parameters, which gradient reduction and the optimizer already know; "
                "leave assign at False"
            )
        result = self.module.load_state_dict(state, strict=strict, assign=assign)
        for record in self.registry:  # masters take a float32 state unrounded
            piece = (self.pieces or {}).get(record.parameter)
            value = next((state[name] for name in record.names if name in state), None)
            if piece is not None and isinstance(value, torch.Tensor):
                piece.take(value)
        return result

    def to(self, *args: Any, **kwargs: Any) -> DistributedModel:
        """Dtype changes apply; a device is ignored, because placement is this wrapper's work."""
        _, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is None:
            return self
        changes = any(p.is_floating_point() and p.dtype is not dtype for p in self.module.parameters())
        if changes and (self._reducer is not None or self.pieces is not None):
            raise SMPUserError(
                f"the model cannot become {dtype} after it was wrapped: gradient reduction and the optimizer already know its "
                'parameters; cast it before smp.DistributedModel, or train with "fp16" or "bf16"'
            )
        return super().to(dtype=dtype)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, also those that were reduced to their owner already."""
        super().zero_grad(set_to_none)
        for optimizer in self._session.optimizers:
            optimizer.drop_gradients_of(self)
        if self.sharded_state is not None:
            self.sharded_state.clear_gradients()

    def cpu(self) -> DistributedModel:
        """Move the full model to CPU memory."""
        return super().to("cpu")

    def cuda(self, device: Any = None) -> DistributedModel:
        """Ignored: the model is on this rank's device already."""
        return self

    # -- hooks -----------------------------------------------------------------------------------------------------

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Let a communication hook of PyTorch's DDP average the gradients; ``hook(state, bucket)`` gives a future.

        The hook averages over the data parallel ranks itself. Call it before the first step.

        Raises:
            SMPUserError: gradients are not all-reduced: no data parallelism, or sharded optimizer state.
        """
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

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate gradients without reducing them; for loops without ``smp.step``."""
        before, self._passes_per_reduction = (self._passes_per_reduction, self._passes), 2**62
        self._open_window()
        try:
            yield
        finally:
            self._passes_per_reduction, self._passes = before
            self._open_window()


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
