"""Trainings whose expert parallel ranks share the experts of mixtures out, beside a copy in one process."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import torch
from torch import nn

STEPS, BATCH, LENGTH = 5, 2, 10
_WRAPPERS = re.compile(r"_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.")


def draw(step: int, rank: int, vocabulary: int) -> torch.Tensor:
    """Return a rank's tokens in a step."""
    seed = 1000 * step + rank
    return torch.randint(0, vocabulary, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def compute_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the next tokens."""
    found = model(ids)
    logits = found if isinstance(found, torch.Tensor) else found.logits
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


def train_whole(model: nn.Module, ranks: int, vocabulary: int, losses: list[torch.Tensor]) -> list[float]:
    """Train in one process; each rank's batch is routed by itself, as on the ranks. Return the norms of gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(ranks):
            losses.clear()
            loss = compute_loss(model, draw(step, rank, vocabulary))
            ((loss + sum(losses)) / ranks).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    return norms


def wrap(model: nn.Module, kind: type[nn.Module] | None = None, **given: Any) -> Any:
    """Wrap a model as scripts do, each block by itself; without ``kind`` blocks are known by the original's class."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    from smp_version2.layer_classes import TransformerLayer

    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={kind or TransformerLayer})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, **given)


def train(
    config: dict[str, Any], make: Any, settings: dict[str, Any] | None, vocabulary: int, recompute: bool = False
) -> dict[str, Any]:
    """Train on this rank, and compare parameters, norms and the full state dict with those of one process."""
    import torch.sagemaker as tsm

    import torch_sagemaker_finder  # noqa: F401
    from smp_version2.clipping import clip_grad_norm_
    from smp_version2.moe.config import MoEConfig
    from support.models.version2_mixtures import use_reference

    torch.manual_seed(0)
    tsm.init(config)
    model = make().double()
    whole = copy.deepcopy(model)
    moe = None if settings is None else MoEConfig(**settings)
    losses = use_reference(whole, moe) if moe is not None else []
    model = tsm.transform(model, config=moe)
    names = set(model.state_dict())
    wrapped = wrap(model)
    if recompute:
        from support.training.version2_training import _checkpoint

        _checkpoint(wrapped)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        compute_loss(wrapped, draw(step, tsm.state.rank, vocabulary)).backward()
        norms.append(float(clip_grad_norm_(wrapped, 0.5)))
        optimizer.step()
    wanted_norms = train_whole(whole, tsm.state.world_size, vocabulary, losses)
    wanted = {name: value.detach() for name, value in whole.state_dict().items()}
    saved = full_state(wrapped)
    return {
        "apart": {name: distance(value, wanted[name]) for name, value in saved.items()},
        "norms": max(abs(one / other - 1) for one, other in zip(norms, wanted_norms, strict=True)),
        "missing": sorted(wanted.keys() ^ saved.keys()),
        "held": sum(parameter.numel() for parameter in wrapped.parameters()),
        "whole": sum(parameter.numel() for parameter in whole.parameters()),
        "names": names,
        "places": (tsm.state.ep_rank, tsm.state.ep_size, tsm.state.ranker.get_rep_rank(tsm.state.rank)),
    }


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the full state dict, on every rank."""
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

    kind, config = StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True)
    with FullyShardedDataParallel.state_dict_type(model, kind, config):
        return {name: value.clone() for name, value in model.state_dict().items()}


def distance(mine: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the greatest difference, relative to the greatest value."""
    return float((mine - wanted).abs().max() / wanted.abs().max())
