"""Protocols of a wrapped model and a wrapped optimizer, for packages below the wrappers."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import functools

    import torch
    from torch import nn

    from smp_config import Group
    from smp_runtime.parameters.optimizer_shards import OptimizerShard
    from smp_runtime.parameters.precision import Precision
    from smp_runtime.parameters.registry import ParameterRegistry
    from smp_runtime.pipeline.execution.rank_pipeline import Pipeline
    from smp_runtime.pipeline.partition.assignment import Assignment


class SharedState(Protocol):
    """Optimizer state that is sharded among replicas; all of them call its methods together.

    Attributes:
        optimizer_shards: the shard of each parameter that this rank's optimizer updates, or None.
    """

    optimizer_shards: dict[nn.Parameter, OptimizerShard | None]

    @property
    def sharing(self) -> Group:
        """Return the kind of the group that shares the state."""

    def clear_gradients(self, *, to_zero: bool = False) -> None:
        """Forget gradients that were reduced to their owner, or set them to zero."""

    def take_back_gradients(self) -> None:
        """Accept the script's changes to ``p.grad`` since the reduction."""

    def complete_gradients(self) -> None:
        """Make gradients as the script has left them, before an update; also those that it has set to zero."""

    def gather_parameters(self) -> None:
        """Let the next read of each parameter find its updated values, after an update of shards.

        If only the optimizer state is sharded, gathers of all parameters begin here, and a read waits for its own. If
        parameters are sharded too, nothing is gathered here: gathered values of before the update are freed, and each unit is
        gathered when it is used.
        """

    def settle(self) -> None:
        """Wait for pending transfers to this rank."""

    def gather_whole(
        self, values: Mapping[nn.Parameter, torch.Tensor], *, keep: bool = True
    ) -> dict[nn.Parameter, torch.Tensor]:
        """Gather whole tensors of the parameters' shapes from the shards; nothing on ranks that do not ``keep`` them."""

    def gather_objects(self, values: Mapping[nn.Parameter, Any]) -> dict[nn.Parameter, Any]:
        """Gather the owners' values that are not tensors, by parameter, from all ranks."""

    def gather_names(self, names: set[str]) -> list[set[str]]:
        """Return the names of all ranks."""

    def sum_over_shards(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' vectors."""

    def runs_of(self, parameter: nn.Parameter) -> list[tuple[int, int]] | None:
        """Return start and stop of each rank's part of a parameter, in the order of the group; None if all have all of it."""

    def counts(self, shard: OptimizerShard) -> bool:
        """Return whether this rank is the one that counts an optimizer shard in norms."""


class SharedParameters(SharedState, Protocol):
    """Optimizer state, parameters and gradients that are all sharded among replicas."""

    @property
    def clipping(self) -> float:
        """Return the norm to which every update clips its gradients."""


class TrainedModel(Hashable, Protocol):
    """A wrapped model.

    Attributes:
        module: the script's.
        training: its mode.
        precision: the precision that it computes in.
    """

    module: nn.Module
    training: bool
    precision: Precision

    @property
    def registry(self) -> ParameterRegistry:
        """Return names and places of all parameters."""

    @property
    def optimizer_shards(self) -> dict[nn.Parameter, OptimizerShard | None] | None:
        """Return the shards that the optimizer updates in place of parameters; None if it updates parameters."""

    @property
    def sharded_state(self) -> SharedState | None:
        """Return the sharding of the optimizer state, or None."""

    @property
    def shards(self) -> SharedParameters | None:
        """Return the sharding of parameters, gradients and optimizer state, or None."""

    @property
    def assignment(self) -> Assignment | None:
        """Return the stage of each module; None without a pipeline, or before the partition is decided."""

    @property
    def pipeline(self) -> Pipeline | None:
        """Return the pipeline that runs the model's steps, or None."""

    def adopt_writes(self) -> None:
        """Let training continue from values that the script has written into parameters."""

    def partition(self, microbatch: functools.partial[Any] | None, *, first_step: bool = True) -> None:
        """Decide which stage gets which module, if that has not been done."""

    def begin_step(self) -> None:
        """Prepare for a step-decorated function that begins."""

    def finish_step(self) -> bool:
        """Finish a step after all its microbatches; return whether backward ran."""

    def abandon_step(self) -> None:
        """Abandon a step in which a microbatch raised an error."""

    def check_parameters(self) -> None:
        """Refuse parameters that came or went after the model was laid out."""

    @property
    def has_accumulated(self) -> bool:
        """Return whether there are gradients that only accumulated so far; the same on every rank."""

    def reduce_accumulated(self) -> None:
        """Reduce gradients that only accumulated so far, before an update; every rank calls it."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return an iterator over all parameters."""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load a full or partial state."""


class TrainedOptimizer(Protocol):
    """A wrapped optimizer."""

    @property
    def loss_scale(self) -> float:
        """Return the factor by which losses are multiplied; 1 without fp16."""

    @property
    def gradient_norm(self) -> float | None:
        """Return the norm of the whole gradient at the last clipping; None if gradients were not clipped."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return parameter groups with their settings."""

    @property
    def defaults(self) -> dict[str, Any]:
        """Return the default settings of parameters."""

    def bind(self, model: TrainedModel) -> None:
        """Update the parameters or shards of a model that has been wrapped or partitioned, from now on."""

    def updates(self, model: TrainedModel) -> bool:
        """Return whether the optimizer updates parameters of a model."""

    def store_writes(self) -> bool:
        """Write the script's changes to updated values into the model; return whether other ranks must get them."""

    def clip_master_grads(
        self, max_norm: float, norm_type: float = 2.0, among: Iterable[nn.Parameter] | None = None
    ) -> float:
        """Clip gradients by their norm over all ranks, and return that norm."""

    def clip_on_device(
        self, max_norm: float, norm_type: float = 2.0, among: Iterable[nn.Parameter] | None = None
    ) -> torch.Tensor:
        """Clip gradients as :meth:`clip_master_grads` does, but without blocking the host for the norm."""

    def norm_on_device(self, norm_type: float = 2.0, among: Iterable[nn.Parameter] | None = None) -> torch.Tensor:
        """Return the norm of gradients over all ranks."""

    def scale_on_device(self, max_norm: float, norm: torch.Tensor, among: Iterable[nn.Parameter] | None = None) -> None:
        """Scale gradients of a known norm down to another one."""

    def clamp_on_device(self, limit: float, among: Iterable[nn.Parameter] | None = None) -> None:
        """Clamp every element of the gradients to between ``-limit`` and ``limit``."""

    def drop_gradients_of(self, model: TrainedModel, *, to_zero: bool) -> None:
        """Forget the gradients of a model's parameters."""

    def original_groups(self) -> list[list[nn.Parameter]]:
        """Return the parameters of each group as the script has passed them."""
