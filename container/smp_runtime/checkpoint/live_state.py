"""What this rank has of a training, for saving and loading: live tensors with their place in the whole, random numbers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_runtime.checkpoint.files.tensor_regions import TensorRegion
from smp_runtime.data.position import SourcePositions
from smp_runtime.errors import CheckpointError, SMPUserError
from smp_runtime.tensor_parallel.random_tracker import tracker_state
from smp_runtime.tensors.parameter_attributes import get_data
from smp_runtime.tensors.torch_private import DisableTorchFunctionSubclass

if TYPE_CHECKING:
    from smp_runtime.job.session import Session
    from smp_runtime.model.distributed_model import DistributedModel
    from smp_runtime.optim.distributed_optimizer import DistributedOptimizer
    from smp_runtime.parameters.registry import ParameterRecord

logger = logging.getLogger("smp")


@dataclass
class Holding:
    """A live tensor of this rank.

    Attributes:
        tensor: the values, flat or shaped like the region's slice; writing into it changes the model.
        record: of the parameter; None for a buffer.
        counted: the same elements, in a tensor whose counter of changes shows writes into them; None for ``tensor`` itself.
    """

    name: str
    tensor: torch.Tensor
    region: TensorRegion
    record: ParameterRecord | None = None
    counted: torch.Tensor | None = None

    @property
    def is_split(self) -> bool:
        """Return whether tensor parallel ranks have different parts."""
        return self.record is not None and self.record.placement.tensor_axis is not None


@dataclass
class Updated:
    """What the inner optimizer updates of one parameter.

    Attributes:
        updated: what the optimizer has in its place: itself, its master or a part of it; None if another rank has it.
    """

    name: str
    group: int
    parameter: nn.Parameter
    updated: nn.Parameter | None
    region: TensorRegion
    record: ParameterRecord


def region_of(record: ParameterRecord, flat: tuple[int, int] | None = None) -> TensorRegion:
    """Return the region of a part of this rank's slice of a parameter; all of the slice by default."""
    return TensorRegion.of(record.shape, record.placement.tensor_axis, record.placement.tensor_slice, flat)


def saved_records(model: DistributedModel) -> list[ParameterRecord]:
    """Return the records of the parameters in the ``state_dict``; a hook of a module may leave some out."""
    saved = model.module.state_dict(keep_vars=True)
    return [record for record in model.registry if any(name in saved for name in record.names)]


def local_records(model: DistributedModel) -> Iterator[ParameterRecord]:
    """Return the saved records of this stage's parameters."""
    local = {id(parameter) for parameter in model.local_parameters()}
    return (record for record in saved_records(model) if id(record.parameter) in local)


class LiveNames:
    """What of a model is saved, looked up once: to walk through all modules takes as long as all the rest of a plan.

    Attributes:
        saved: the names of the ``state_dict``, in its order.
        records: those of :func:`local_records`.
    """

    def __init__(self, model: DistributedModel) -> None:
        self.saved = dict.fromkeys(model.module.state_dict(keep_vars=True))
        local = {id(parameter) for parameter in model.local_parameters()}
        mine = [record for record in model.registry if id(record.parameter) in local]
        self.records = [record for record in mine if any(name in self.saved for name in record.names)]


def live_weights(model: DistributedModel, names: LiveNames | None = None) -> Iterator[Holding]:
    """Yield this rank's parameters as the model keeps them; a sharded one only if part of it is on this rank."""
    model.adopt_writes()
    places = model.shards.places if model.shards is not None else {}
    for record in local_records(model) if names is None else names.records:
        parameter = record.parameter
        if parameter not in places:
            yield Holding(record.name, get_data(parameter), region_of(record), record)
        elif places[parameter][0] < places[parameter][1]:
            yield Holding(record.name, parameter.ds_tensor, region_of(record, places[parameter]), record)  # type: ignore[attr-defined]


def live_masters(model: DistributedModel) -> Iterator[Holding]:
    """Yield the float32 master weights that exist beside the model's own weights."""
    model.adopt_writes()
    for shard in (model.optimizer_shards or {}).values():
        if shard is None:
            continue
        has_master = shard.optimized.data_ptr() != shard.stored.data_ptr()
        if has_master:
            record = model.registry.record_of(shard.parameter)
            with DisableTorchFunctionSubclass():
                counted = shard.optimized.detach()
            region = region_of(record, (shard.start, shard.stop))
            yield Holding(record.name, get_data(shard.optimized), region, record, counted)


def live_buffers(model: DistributedModel, names: LiveNames | None = None) -> Iterator[Holding]:
    """Yield this stage's persistent buffers, under each of their names."""
    persistent = (names or LiveNames(model)).saved
    for name, buffer in model.local_named_buffers(remove_duplicate=False):
        if name in persistent:
            yield Holding(name, buffer, TensorRegion.of(tuple(buffer.shape)))


def live_extras(model: DistributedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield this stage's modules with an extra state, by its name in a ``state_dict``."""
    for path, module in model.local_named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{path}." * bool(path) + "_extra_state", module


def updated_parameters(model: DistributedModel, optimizer: DistributedOptimizer) -> list[Updated]:
    """Return every parameter of the optimizer in its order, including those of other stages and ranks.

    Raises:
        SMPUserError: the optimizer has a parameter that the model does not have.
    """
    found = []
    for index, group in enumerate(optimizer.original_groups()):
        for parameter in group:
            try:
                record = model.registry.record_of(parameter)
            except SMPUserError:
                raise SMPUserError(
                    f"the optimizer has a parameter of shape {list(parameter.shape)} that is none of the model's "
                    f"{len(model.registry)}; a checkpoint names parameters by the model's names: pass optimizer= one that was "
                    "made from model.parameters()",
                    code="SMP402",
                ) from None
            mine: nn.Parameter | None = parameter
            flat: tuple[int, int] | None = None
            if optimizer.updates(model) and parameter in (shards := model.optimizer_shards or {}):
                shard = shards[parameter]
                mine, flat = (None, (0, 0)) if shard is None else (shard.optimized, (shard.start, shard.stop))
            found.append(Updated(record.name, index, parameter, mine, region_of(record, flat), record))
    return found


def random_file(rank: int) -> str:
    """Return the name of the file with a rank's random state."""
    return f"rng_{rank}.pt"


def random_state(session: Session) -> dict[str, Any]:
    """Return the states of this rank's generators and of the tensor parallel random tracker."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if session.ranks.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(session.ranks.device)
    tracker = tracker_state(session.ranks)
    if tracker is not None:
        state["tensor_parallel"] = tracker
    return state


@dataclass(frozen=True)
class ScriptPosition:
    """The state that a script's calls change between two steps without touching the model.

    A later save can use it to save this state as it was.

    Attributes:
        random: of this rank, as :func:`random_state` returns it.
        positions: in the data sets of ``smp.data``, by name.
    """

    random: dict[str, Any]
    positions: dict[str, dict[str, Any]]

    @classmethod
    def now(cls, session: Session) -> ScriptPosition:
        """Return the current position of the script: random state and positions in data sets."""
        return cls(random_state(session), SourcePositions.of(session.ranks).state())


def _is_random_state(state: Any) -> bool:
    if not isinstance(state, Mapping) or "cpu" not in state:
        return False
    found = [state[key] for key in ("cpu", "cuda") if key in state]
    return all(isinstance(value, torch.Tensor) and value.dtype == torch.uint8 for value in found)


def check_random_state(state: Any) -> None:
    """Make sure that what a file has is a random state; None, for no file, is.

    Raises:
        CheckpointError: it is something else.
    """
    if state is None:
        return
    if not _is_random_state(state):
        raise CheckpointError(
            f"the file of this rank's random state holds {type(state).__name__} without PyTorch's state of a generator; the "
            "checkpoint is damaged or written by something else: resume from another tag"
        )


def restore_random_state(session: Session, state: dict[str, Any] | None, same_topology: bool) -> None:
    """Restore a rank's random state.

    With other degrees every rank keeps its own, since no saved rank corresponds to it.
    """
    if state is None or not same_topology:
        if session.ranks.rank == 0:
            logger.info("random numbers go on from this job's seeds: the checkpoint was saved with other degrees")
        return
    try:
        torch.set_rng_state(state["cpu"])
        if session.ranks.device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], session.ranks.device)
        tracker_state(session.ranks, state.get("tensor_parallel"))
    except (RuntimeError, TypeError, KeyError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"the random state of rank {session.ranks.rank} cannot be taken from the checkpoint ({type(error).__name__}: {error}); "
            "it is damaged or of another version of PyTorch: resume from another tag"
        ) from error
