"""A training as scripts for version 2 of the library write it: transform, FSDP, PyTorch's optimizer."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import torch
from torch import nn

STEPS = 6
_WRAPPERS = re.compile(r"_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.")
#: Rows of a batch per data parallel rank, and tokens of a row.
BATCH, LENGTH, VOCABULARY = 2, 12, 64


def draw_ids(step: int, rows: int) -> torch.Tensor:
    """Return the tokens of a step's whole batch, ``[rows, LENGTH]``."""
    return torch.randint(0, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(step))


def compute_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean loss in the type of the logits; Transformers' own is computed in float32."""
    more = {"decoder_input_ids": ids} if getattr(getattr(model, "config", None), "is_encoder_decoder", False) else {}
    logits = model(input_ids=ids, use_cache=False, **more).logits  # recomputed blocks would fill a cache twice
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))


def train_whole(model: nn.Module, replicas: int, clip: Any = None, eps: float = 1e-8) -> dict[str, torch.Tensor]:
    """Train in one process on the batches of all replicas; returns the parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=eps)
    for step in range(STEPS):
        optimizer.zero_grad()
        compute_loss(model, draw_ids(step, BATCH * replicas)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def train_split(
    config: dict[str, Any], make: Any, dtype: torch.dtype, shards_by: str = "wrapper", eps: float = 1e-8
) -> dict[str, Any]:
    """Train on this rank beside a copy in one process, with clipping.

    Args:
        shards_by: ``wrapper`` for FullyShardedDataParallel, ``function`` for fully_shard.
        eps: of AdamW. With a small one it makes whole updates of rounding where a gradient is next to nothing.

    Returns:
        By parameter, the greatest difference of this rank's part from that of the copy, relative to the copy's greatest value; the
        number of elements on this rank and of the whole; and the full state dict (rank 0), by parameter the same difference.
    """
    import torch.sagemaker as tsm

    import torch_sagemaker_finder  # noqa: F401
    from smp_version2.clipping import clip_grad_norm_
    from smp_version2.split_parameters import find_slices

    torch.manual_seed(0)
    tsm.init(config)
    model = make().to(dtype)
    whole = copy.deepcopy(model)
    split = tsm.transform(model)
    found = find_slices(split)
    slices = {name: found.get(parameter) for name, parameter in split.named_parameters()}
    wrapped = _wrap(split) if shards_by == "wrapper" else _shard(split)
    if shards_by == "wrapper":  # as the original's clients do, behind FSDP
        _checkpoint(wrapped)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2, eps=eps)
    tensor = tsm.state.tp_size
    replicas, mine = tsm.state.world_size // tensor, tsm.state.rank // tensor
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        ids = draw_ids(step, BATCH * replicas)[BATCH * mine : BATCH * (mine + 1)]
        compute_loss(wrapped, ids).backward()
        norms.append(float(clip_grad_norm_(wrapped, 0.3)))
        optimizer.step()
    wanted = train_whole(whole, replicas, 0.3, eps)
    apart = {}
    for name, value in _full_parameters(wrapped):
        part = wanted[name] if slices[name] is None else slices[name].cut(wanted[name])
        apart[name] = _distance(value, part)
    held = sum(_local(parameter).numel() for parameter in wrapped.parameters())
    return {
        "apart": apart,
        "held": held,
        "whole": sum(value.numel() for value in wanted.values()),
        "norms": norms,
        "saved": _compare_saved(wrapped, whole) if shards_by == "wrapper" else {},
    }


def _wrap(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    from smp_version2.layer_classes import TransformerLayer

    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={TransformerLayer})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True)


def _checkpoint(model: nn.Module) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )

    from smp_version2.layer_classes import TransformerLayer

    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
        check_fn=lambda module: isinstance(module, TransformerLayer),
    )


def _shard(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    from smp_version2.layer_classes import TransformerLayer

    for module in model.modules():
        if isinstance(module, TransformerLayer):
            fully_shard(module)
    fully_shard(model)
    return model


def _local(value: Any) -> torch.Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def _full_parameters(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    if not isinstance(model, FullyShardedDataParallel):
        return [(name, parameter.full_tensor().detach()) for name, parameter in model.named_parameters()]
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return [(_WRAPPERS.sub("", name), parameter.detach().clone()) for name, parameter in model.named_parameters()]


def _compare_saved(model: nn.Module, whole: nn.Module) -> dict[str, float]:
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

    config = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        saved = model.state_dict()
    wanted = whole.state_dict()
    return {name: _distance(value, wanted[name]) for name, value in saved.items()}


def _distance(mine: torch.Tensor, wanted: torch.Tensor) -> float:
    # Parameters without influence, such as biases of keys, move by rounding alone.
    return float((mine - wanted).abs().max() / max(float(wanted.abs().max()), 1e-2))


def cut_zigzag(batch: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a batch, as scripts for version 2 cut it."""
    import torch.sagemaker as tsm

    size, rank = tsm.state.cp_size, tsm.state.cp_rank
    chunks = batch.chunk(2 * size, 1)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], 1)


def _next_word_loss(
    model: nn.Module, ids: torch.Tensor, *, by_model: bool, cut: Any = lambda batch: batch
) -> torch.Tensor:
    """Return the mean loss of the tokens that ``cut`` returns: of the script, or of the model, of samples with padding."""
    if not by_model:
        logits = model(input_ids=cut(ids), use_cache=False).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), cut(ids.roll(-1, 1)).flatten())
    held = torch.ones_like(ids)
    held[::BATCH, -3:] = 0
    given = {"input_ids": ids, "attention_mask": held, "labels": ids.masked_fill(held == 0, -100)}
    return model(**{name: cut(value) for name, value in given.items()}, use_cache=False).loss


def train_on_slices(
    config: dict[str, Any], make: Any, shards_by: str, comm_type: str, by_model: bool
) -> dict[str, Any]:
    """Train on this rank's slices beside a copy in one process.

    Args:
        comm_type: of ``tsm.transform``.
        by_model: the model computes the loss, of labels that it shifts.

    Returns:
        The means of the losses over all ranks less those of one process, as of :func:`train_split` the parameters' distance, the
        method, bytes gathered by operation, and functions that were tried out on slices.
    """
    import torch.distributed as dist
    import torch.sagemaker as tsm

    import torch_sagemaker_finder  # noqa: F401
    from smp_runtime.context import functions
    from smp_runtime.context.exchange import ContextGroup
    from smp_version2.split_parameters import find_slices

    torch.manual_seed(0)
    tsm.init(config)
    model = make().double()
    whole = copy.deepcopy(model)
    split = tsm.transform(model, cp_comm_type=comm_type)
    found = find_slices(split)
    slices = {name: found.get(parameter) for name, parameter in split.named_parameters()}
    wrapped = _wrap(split) if shards_by == "wrapper" else _shard(split)
    if shards_by == "wrapper":
        _checkpoint(wrapped)
    state = tsm.state
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (wrapped, whole)]
    shared = state.tp_size * state.cp_size
    replicas, mine = state.world_size // shared, state.rank // shared
    losses = []
    for step in range(STEPS):
        everything = draw_ids(step, BATCH * replicas)
        ids = everything[BATCH * mine : BATCH * (mine + 1)]
        loss = _next_word_loss(wrapped, ids, by_model=by_model, cut=cut_zigzag)
        wanted = _next_word_loss(whole, everything, by_model=by_model)
        for each, optimizer in zip((loss, wanted), optimizers, strict=True):
            optimizer.zero_grad()
            each.backward()
            optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean / state.world_size - wanted.detach()))
    expected = {name: parameter.detach() for name, parameter in whole.named_parameters()}
    apart = {}
    for name, value in _full_parameters(wrapped):
        part = expected[name] if slices[name] is None else slices[name].cut(expected[name])
        apart[name] = _distance(value, part)
    group = ContextGroup.of(state.joined)
    tried = sorted(function.__name__ for function in functions._position_wise)
    return {"losses": losses, "apart": apart, "method": group.method, "gathered": dict(group.gathered), "tried": tried}
