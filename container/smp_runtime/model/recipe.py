"""The recipe of a wrapped model: applies the strategies in order, one call each. Each strategy decides inside its call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_runtime.activations import marking
from smp_runtime.microbatch_state import compiled_blocks
from smp_runtime.model.placement import strategies
from smp_runtime.module_conversion.replacing import distribute
from smp_runtime.tensor_parallel.group import TensorGroup

if TYPE_CHECKING:
    from torch import nn

    from smp_runtime.job.ranks import Ranks
    from smp_runtime.model.stages import Stages
    from smp_runtime.pipeline.partition.assignment import Assignment


def apply_tensor_parallelism(module: nn.Module, ranks: Ranks) -> nn.Module:
    """Replace modules by their tensor parallel forms, and return the model.

    This step comes first, so that all other strategies see the new modules. A new module inherits the marks of the one that it
    replaces: whether it is checkpointed, and whether it is compiled.
    """
    checkpointed = marking.find_marks(module)
    compiled = compiled_blocks.find_compile_marks(module)
    module = distribute(module, TensorGroup.of(ranks))
    marking.carry_over(checkpointed, module)
    return compiled_blocks.carry_over(compiled, module)


def partition(stages: Stages, assignment: Assignment) -> None:
    """Make the modules of this rank's pipeline stage its part of the model."""
    stages.assign(assignment)


def place(parts: strategies.ModelParts) -> None:
    """Place this rank's part of the model: create, shard, move, agree, cast, shard the state, average gradients."""
    # The order matters: replicas agree in full precision, then weights are cast, then their storage is flattened.
    created = strategies.create_parameters(parts)
    strategies.make_replicas_equal(parts, created)
    masters = strategies.cast_weights(parts, created)
    roles = strategies.sort_parameters(parts, created)
    state = strategies.place_optimizer_state(parts, created, roles, masters)
    strategies.keep_records(parts, created, roles, state, has_masters=bool(masters))
    strategies.average_gradients(parts, roles, state)
    strategies.scale_gradients(parts, roles)


def prepare_modules(parts: strategies.ModelParts) -> None:
    """Prepare the placed modules to be called: install the script's hook, watch its writes, split sequences, compile blocks."""
    parts.accumulation.install_hook()
    parts.placed.watch_writes(parts.part)
    strategies.share_sequences_out(parts)
    parts.part.compile(parts.ranks, parts.placed)
    # Modules are followed as they run, so after they were compiled.
    parts.placed.follow_calls(parts.part)
    parts.backward.follow_calls(parts.part.module)
