"""What rooms below the wrappers may ask of a wrapped model and of a wrapped optimizer."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import functools

    import torch
    from torch import nn

    from smp_config import Group
    from smp_runtime.parameters.optimizer_shards import OptimizerShard
    from smp_runtime.parameters.precision import Precision
    from smp_runtime.parameters.registry import ParameterRegistry


class SharedState(Protocol):
    """Optimizer state that replicas share out among them; all of them call its methods together.

    Attributes:
        sharing: the kind of the group that shares it.
        optimizer_shards: what this rank's optimizer updates of each parameter, or None.
    """

    optimizer_shards: dict[nn.Parameter, OptimizerShard | None]

    @property
    def sharing(self) -> Group: ...

    def clear_gradients(self) -> None: ...

    def gather_parameters(self) -> None: ...

    def gather_whole(
        self, values: Mapping[nn.Parameter, torch.Tensor], *, keep: bool = True
    ) -> dict[nn.Parameter, torch.Tensor]: ...

    def gather_objects(self, values: Mapping[nn.Parameter, Any]) -> dict[nn.Parameter, Any]: ...

    def gather_names(self, names: set[str]) -> list[set[str]]: ...

    def sum_over_shards(self, vector: torch.Tensor) -> torch.Tensor: ...

    def counts(self, shard: OptimizerShard) -> bool:
        """Whether this rank is the one that counts an optimizer shard in norms."""
        ...


class SharedParameters(SharedState, Protocol):
    """The same with the parameters themselves.

    Attributes:
        clipping: norm that every update clips its gradients to.
    """

    @property
    def clipping(self) -> float: ...


class Stages(Protocol):
    """On which stage of a pipeline each module lies."""

    def stage_of(self, path: str) -> int: ...


class StepRunner(Protocol):
    """Runs the microbatches of a step through the stages of a pipeline."""

    def run_step(self, kind: Any, microbatches: Sequence[functools.partial[Any]], call: Any) -> list[Any]: ...


class TrainedModel(Hashable, Protocol):
    """A wrapped model.

    Attributes:
        module: the script's.
        training: its mode.
        registry: names and places of all parameters.
        precision: what it computes in.
        optimizer_shards: what the optimizer updates instead of parameters; None when it updates these.
        sharded_state: how optimizer state is shared out, or None.
        shards: the same with parameters and gradients, or None.
        assignment: which stage has which module; None without a pipeline, or before it is decided.
        pipeline: runs its steps, or None.
    """

    module: nn.Module
    training: bool
    precision: Precision

    @property
    def registry(self) -> ParameterRegistry: ...

    @property
    def optimizer_shards(self) -> dict[nn.Parameter, OptimizerShard | None] | None: ...

    @property
    def sharded_state(self) -> SharedState | None: ...

    @property
    def shards(self) -> SharedParameters | None: ...

    @property
    def assignment(self) -> Stages | None: ...

    @property
    def pipeline(self) -> StepRunner | None: ...

    def partition(self, microbatch: functools.partial[Any]) -> None: ...

    def begin_step(self) -> None: ...

    def finish_step(self) -> bool: ...

    def abandon_step(self) -> None: ...

    def leave(self) -> None: ...

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]: ...

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any: ...


class TrainedOptimizer(Protocol):
    """A wrapped optimizer."""

    @property
    def loss_scale(self) -> float: ...

    @property
    def defaults(self) -> dict[str, Any]: ...

    def bind(self, model: TrainedModel) -> None: ...

    def updates(self, model: TrainedModel) -> bool: ...

    def drop_gradients_of(self, model: TrainedModel) -> None: ...

    def original_groups(self) -> list[list[nn.Parameter]]: ...
