"""A training as scripts for version 2 of the library write it: transform, FSDP, PyTorch's optimizer."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn

STEPS = 6
#: Rows of a batch per data parallel rank, and tokens of a row.
BATCH, LENGTH, VOCABULARY = 2, 12, 64


def draw_ids(step: int, rows: int) -> torch.Tensor:
    """Return the tokens of a step's whole batch, ``[rows, LENGTH]``."""
    return torch.randint(0, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(step))


def compute_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean loss in the type of the logits; Transformers' own is computed in float32."""
    logits = model(input_ids=ids).logits
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))


def train_whole(model: nn.Module, replicas: int, clip: Any = None) -> dict[str, torch.Tensor]:
    """Train in one process on the batches of all replicas; returns the parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        compute_loss(model, draw_ids(step, BATCH * replicas)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def train_split(config: dict[str, Any], make: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Train on this rank beside a copy in one process.

    Returns:
        By parameter, the greatest difference of this rank's part from that of the copy, relative to the copy's greatest value; and
        the number of elements on this rank and of the whole.
    """
    import torch.sagemaker as tsm
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    import torch_sagemaker_finder  # noqa: F401
    from smp_version2.layer_classes import TransformerLayer

    torch.manual_seed(0)
    tsm.init(config)
    model = make().to(dtype)
    whole = copy.deepcopy(model)
    split = tsm.transform(model)
    slices = {
        f"{path}.{name}": where
        for path, module in split.named_modules()
        for name, where in getattr(module, "tensor_slices", {}).items()
    }
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={TransformerLayer})
    wrapped = FullyShardedDataParallel(split, auto_wrap_policy=policy, use_orig_params=True)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    tensor = tsm.state.tp_size
    replicas, mine = tsm.state.world_size // tensor, tsm.state.rank // tensor
    for step in range(STEPS):
        optimizer.zero_grad()
        ids = draw_ids(step, BATCH * replicas)[BATCH * mine : BATCH * (mine + 1)]
        compute_loss(wrapped, ids).backward()
        optimizer.step()
    wanted = train_whole(whole, replicas)
    apart = {}
    with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False):
        for path, parameter in wrapped.named_parameters():
            name = path.replace("_fsdp_wrapped_module.", "")
            whole_value = wanted[name]
            part = slices[name].cut(whole_value) if name in slices else whole_value
            apart[name] = float((parameter.detach() - part).abs().max() / whole_value.abs().max())
    held = sum(parameter.numel() for parameter in wrapped.parameters())
    return {"apart": apart, "held": held, "whole": sum(value.numel() for value in wanted.values())}
