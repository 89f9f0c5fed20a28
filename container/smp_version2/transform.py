"""``tsm.transform``: splits a model's blocks over the tensor parallel ranks, and shares experts out."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_config import Group
from smp_config.errors import kind_of
from smp_runtime.comm.collectives import broadcast_tensors
from smp_runtime.context.own_slices import run_on_slices
from smp_runtime.errors import SMPUserError
from smp_runtime.fp8.autocast import running_layers
from smp_runtime.model.recipe import apply_tensor_parallelism
from smp_runtime.module_conversion.scopes import mark_in_place
from smp_runtime.nn.distributed_module import DistributedModule, ReadByOthers
from smp_version2.eight_bits.job import adopt_layers
from smp_version2.layer_classes import find_blocks, note_blocks, note_mixtures
from smp_version2.modules import empty_module_params
from smp_version2.moe.config import MoEConfig
from smp_version2.moe.mixtures import convert, find_mixtures
from smp_version2.split_parameters import SplitRecord
from smp_version2.state import state

if TYPE_CHECKING:
    from smp_runtime.job.ranks import Ranks

logger = logging.getLogger("smp")

#: Ways to exchange keys and values of a split sequence.
CP_COMM_TYPES = {"p2p": "ring", "all_gather": "all_gather"}


def transform(
    model: nn.Module,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    config: Any = None,
    load_state_dict_from_rank0: bool = False,
    cp_comm_type: str = "p2p",
) -> nn.Module:
    """Split a model's blocks over the tensor parallel ranks, and return it; all ranks call it, before FSDP wraps the model.

    Modules keep their classes and names; split parameters hold this rank's part. Each split is proven in float64 against the
    whole block.

    Args:
        model: any model; blocks that cannot be split stay whole, with a warning.
        device: where to put it; None leaves it.
        dtype: type of its parameters; None leaves it.
        config: a :class:`.MoEConfig` for the model's mixtures of experts; None leaves their routing.
        load_state_dict_from_rank0: only rank 0 has the model's weights. FSDP's ``sync_module_states`` then brings them to the
            other ranks.
        cp_comm_type: ``p2p`` or ``all_gather``, for context parallelism.

    Raises:
        SMPUserError: no module, an unknown ``cp_comm_type``, another ``config``, or mixtures that cannot be shared out.
        NotInitializedError: before ``tsm.init``.
    """
    if not isinstance(model, nn.Module):
        raise SMPUserError(f"tsm.transform got {kind_of(model)}; pass the model, an nn.Module", code="SMP303")
    if cp_comm_type not in CP_COMM_TYPES:
        raise SMPUserError(f"cp_comm_type is {cp_comm_type!r}; choose one of {', '.join(CP_COMM_TYPES)}", code="SMP303")
    ranks = state.joined
    _check_config(config)
    for kind in (Group.TP, Group.EP) if load_state_dict_from_rank0 else ():
        # First within rank 0's tensor parallel group, then from each of its members to ranks with other experts.
        sources = {0} if kind is Group.TP else set(range(state.tp_size))
        if ranks.size(kind) > 1 and ranks.members(kind)[0] in sources:
            _bring_from_first(model, ranks, kind)
    blocks, mixtures = find_blocks(model), find_mixtures(model)
    if state.tp_size > 1:
        model = _split(model)
    note_mixtures(convert(model, mixtures, config))
    note_blocks(blocks)
    if device is not None or dtype is not None:
        model = model.to(device=device, dtype=dtype)
    adopt_layers(model)
    if state.cp_size > 1:
        run_on_slices(model, ranks, CP_COMM_TYPES[cp_comm_type])
        model.register_forward_pre_hook(_refuse_eight_bits)
    return model


def _refuse_eight_bits(module: nn.Module, args: Any) -> None:
    """Raise an error inside ``fp8_autocast``: ranks would scale their slices of a sequence differently."""
    layers = running_layers()
    if layers is not None and layers.open_window is not None:
        raise SMPUserError(
            f"the model was called inside fp8_autocast, and context_parallel_degree is {state.cp_size}, which do not go together: "
            "remove one of the two",
            code="SMP321",
        )


def _check_config(config: Any) -> None:
    """Raise an error for a configuration of another kind, or one that cannot be had with tensor parallelism."""
    if config is None:
        return
    if not isinstance(config, MoEConfig):
        raise SMPUserError(
            f"tsm.transform got config={kind_of(config)}; pass a MoEConfig of torch.sagemaker.moe.moe_config",
            code="SMP303",
        )
    if state.tp_size > 1 and config.smp_moe:
        raise SMPUserError(
            f"tsm.transform got a MoEConfig, and tensor_parallel_degree is {state.tp_size}: routers balance without tensor "
            "parallelism only; leave config out, or set tensor_parallel_degree to 1",
            code="SMP303",
        )


def _bring_from_first(model: nn.Module, ranks: Ranks, kind: Group) -> None:
    """Give the other ranks of a group its first one's weights, before all of them split the model."""
    source = ranks.members(kind)[0]
    has_late_weights = any(parameter.is_meta for parameter in model.parameters())
    is_source = ranks.rank == source
    if has_late_weights and not is_source:
        _allocate_late_weights(model)
    tensors = [*model.parameters(), *model.buffers()]
    broadcast_tensors([each.detach() for each in tensors], source, ranks.process_group(kind), ranks.collectives)


def _allocate_late_weights(model: nn.Module) -> None:
    """Give all parameters memory on the CPU, so that weights can be received that only the first rank has made."""
    device = torch.device("cpu")
    for module in model.modules():
        empty_module_params(module, device)
        for name, buffer in module._buffers.items():  # such as the vectors of a spectral norm of late weights
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    # Each place of a shared parameter got memory of its own.
    tie = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()


def _split(model: nn.Module) -> nn.Module:
    """Split a model in place; parameters on the meta device stay there, for :class:`.DelayedParamIniter`."""
    late = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    mark_in_place(model)
    notes = _without_notes_on_values() if late else contextlib.nullcontext()
    with notes:
        model = apply_tensor_parallelism(model, state.joined)
    for path, module in model.named_modules():
        if isinstance(module, ReadByOthers):
            module.replaced_class = ""  # FSDP reads weights while passes run, and wants this rank's parts
        if not isinstance(module, DistributedModule):
            continue
        if any(f"{path}.{name}" in late for name in module.tensor_slices):
            empty_module_params(module, "meta")
    SplitRecord.of(state.joined).note(model)
    return model


@contextlib.contextmanager
def _without_notes_on_values() -> Iterator[None]:
    """Leave out warnings that new weights are drawn: those are dropped again."""

    def is_other(record: logging.LogRecord) -> bool:
        return "on the meta device" not in str(record.msg)

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)
