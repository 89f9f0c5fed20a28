"""What rooms below the wrappers may ask of a wrapped model and of a wrapped optimizer."""

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
    """Optimizer state that replicas share out among them; all of them call its methods together.

    Attributes:
        optimizer_shards: what this rank's optimizer updates of each parameter, or None.
    """

    optimizer_shards: dict[nn.Parameter, OptimizerShard | None]

    @property
    def sharing(self) -> Group:
        """The kind of the group that shares it."""

    def clear_gradients(self, *, to_zero: bool = False) -> None:
        """Forget gradients that were reduced to their owner, or set them to zero."""

    def take_back_gradients(self) -> None:
        """Let what the script has done to ``p.grad`` since the reduction count."""

    def complete_gradients(self) -> None:
        """Before an update: gradients are as the script has left them, those that it has set to zero too."""

    def gather_parameters(self) -> None:
        """After an update: every rank gets the parameters that the others have updated, at the latest when it reads them."""

    def settle(self) -> None:
        """Wait for what is under way to this rank."""

    def gather_whole(
        self, values: Mapping[nn.Parameter, torch.Tensor], *, keep: bool = True
    ) -> dict[nn.Parameter, torch.Tensor]:
        """Whole tensors of the parameters' shapes from those of the shards; nothing on ranks that do not ``keep`` them."""

    def gather_objects(self, values: Mapping[nn.Parameter, Any]) -> dict[nn.Parameter, Any]:
        """What the owners have of each parameter that is no tensor, from all ranks."""

    def gather_names(self, names: set[str]) -> list[set[str]]:
        """The names of all ranks."""

    def sum_over_shards(self, vector: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' vectors."""

    def counts(self, shard: OptimizerShard) -> bool:
        """Whether this rank is the one that counts an optimizer shard in norms."""


class SharedParameters(SharedState, Protocol):
    """The same with the parameters themselves."""

    @property
    def clipping(self) -> float:
        """The norm that every update clips its gradients to."""


class TrainedModel(Hashable, Protocol):
    """A wrapped model.

    Attributes:
        module: the script's.
        training: its mode.
        precision: what it computes in.
    """

    module: nn.Module
    training: bool
    precision: Precision

    @property
    def registry(self) -> ParameterRegistry:
        """Names and places of all parameters."""

    @property
    def optimizer_shards(self) -> dict[nn.Parameter, OptimizerShard | None] | None:
        """What the optimizer updates instead of parameters; None when it updates these."""

    @property
    def sharded_state(self) -> SharedState | None:
        """How optimizer state is shared out, or None."""

    @property
    def shards(self) -> SharedParameters | None:
        """The same with parameters and gradients, or None."""

    @property
    def assignment(self) -> Assignment | None:
        """Which stage has which module; None without a pipeline, or before it is decided."""

    @property
    def pipeline(self) -> Pipeline | None:
        """Runs its steps, or None."""

    def adopt_writes(self) -> None:
        """Let training continue from what the script has written into parameters."""

    def partition(self, microbatch: functools.partial[Any] | None, *, first_step: bool = True) -> None:
        """Decide which stage gets which module, if that has not been done."""

    def begin_step(self) -> None:
        """A step-decorated function begins."""

    def finish_step(self) -> bool:
        """All microbatches are done; returns whether backward ran."""

    def abandon_step(self) -> None:
        """A microbatch raised."""

    def check_parameters(self) -> None:
        """Refuse parameters that came or went after the model was laid out."""

    @property
    def has_accumulated(self) -> bool:
        """Whether there are gradients that only accumulated so far; the same on every rank."""

    def reduce_accumulated(self) -> None:
        """An update needs the gradients now: those that only accumulated so far are reduced; every rank calls it."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """All parameters."""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load a full or partial state."""


class TrainedOptimizer(Protocol):
    """A wrapped optimizer."""

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied with; 1 without fp16."""

    @property
    def gradient_norm(self) -> float | None:
        """Of the whole gradient, as the last clipping has measured it; None where nothing was clipped."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameters with their settings."""

    @property
    def defaults(self) -> dict[str, Any]:
        """The settings of parameters that have none of their own."""

    def bind(self, model: TrainedModel) -> None:
        """A model has been wrapped or partitioned: update what it wants to be updated."""

    def updates(self, model: TrainedModel) -> bool:
        """Whether it updates parameters of a model."""

    def store_writes(self) -> bool:
        """Write what a script has changed of what is updated into the model; returns whether other ranks must get it."""

    def clip_master_grads(
        self, max_norm: float, norm_type: float = 2.0, among: Iterable[nn.Parameter] | None = None
    ) -> float:
        """Clip gradients by their norm over all ranks, which it returns."""

    def clip_on_device(
        self, max_norm: float, norm_type: float = 2.0, among: Iterable[nn.Parameter] | None = None
    ) -> torch.Tensor:
        """The same; the host does not wait for the norm."""

    def norm_on_device(self, norm_type: float = 2.0, among: Iterable[nn.Parameter] | None = None) -> torch.Tensor:
        """Return the norm of gradients over all ranks."""

    def scale_on_device(self, max_norm: float, norm: torch.Tensor, among: Iterable[nn.Parameter] | None = None) -> None:
        """Scale gradients of a known norm down to another one."""

    def clamp_on_device(self, limit: float, among: Iterable[nn.Parameter] | None = None) -> None:
        """Bring every element of the gradients between ``-limit`` and ``limit``."""

    def drop_gradients_of(self, model: TrainedModel, *, to_zero: bool) -> None:
        """Forget the gradients of a model's parameters."""

    def original_groups(self) -> list[list[nn.Parameter]]:
        """The parameters of each group as the script has given them."""
