"""Inputs of recomputed blocks wait in CPU memory and come back ahead of use, in models that ``offload_wrapper`` has wrapped."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

LAYERS, STEPS = 5, 3


def _train(config: dict[str, Any], implementation: str, order: str = "inside", accumulation: int = 1) -> dict[str, Any]:
    """Train a Llama as scripts do.

    Args:
        order: whether ``checkpoint_wrapper`` is inside of FSDP's units or around them.
        accumulation: backward passes before an update; 0 for one of two forward passes.
    """
    import torch.sagemaker as tsm
    from support.models.version2 import make_llama
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    import torch_sagemaker_finder  # noqa: F401
    from smp_version2.layer_classes import TransformerLayer
    from smp_version2.recomputation import OffloadedInputs

    torch.manual_seed(0)
    tsm.init(config)
    net = make_llama(LAYERS).double()
    for layer in net.model.layers:  # dropout, which the second run must draw again
        layer.mlp.down_proj = torch.nn.Sequential(layer.mlp.down_proj, torch.nn.Dropout(0.1))
    net = tsm.transform(net)
    wrap = functools.partial(
        FullyShardedDataParallel,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={TransformerLayer}),
        use_orig_params=True,
    )
    if implementation != "none":
        recompute = functools.partial(
            wrappers.apply_activation_checkpointing,
            checkpoint_wrapper_fn=functools.partial(
                wrappers.checkpoint_wrapper, checkpoint_impl=wrappers.CheckpointImpl[implementation]
            ),
            check_fn=lambda module: isinstance(module, TransformerLayer),
        )
        if order == "inside":
            model = wrap(net)
            recompute(model)
        else:
            recompute(net)
            model = wrap(net)
        trained = wrappers.offload_wrapper(model)
    else:
        trained = model = wrap(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ranks = tsm.state.joined
    figures = []
    for step in range(STEPS):
        losses = []
        for part in range(max(2 - accumulation, accumulation)):
            generator = torch.Generator().manual_seed(10 * step + part)
            ids = torch.randint(0, 64, (2, 12), generator=generator)
            torch.manual_seed(100 * step + part + tsm.state.rank)
            losses.append(trained(input_ids=ids, labels=ids, use_cache=True).loss)
            if accumulation:
                losses.pop().backward()
        if losses:
            sum(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
        offloader = OffloadedInputs.of(ranks, 2).offloader
        figures.append(dict(vars(offloader.figures)))
        offloader.figures.left = offloader.figures.came = offloader.figures.late = offloader.figures.peak = 0
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        found = [parameter.detach().clone() for parameter in model.parameters()]
    tsm.shutdown()
    return {"found": found, "figures": figures}


@pytest.mark.parametrize(
    ("implementation", "order", "horizon", "accumulation"),
    [
        ("REENTRANT", "inside", 2, 1),
        ("NO_REENTRANT", "inside", 3, 2),
        ("NO_REENTRANT", "around", 2, 1),
        ("REENTRANT", "inside", 2, 0),
    ],
)
def test_inputs_leave_and_come_back_in_time(
    ranks: Any, implementation: str, order: str, horizon: int, accumulation: int
) -> None:
    config = {"hybrid_shard_degree": 2, "activation_loading_horizon": horizon}
    plain = ranks(_train, 2, config, "none", "inside", accumulation, init=False, timeout=120)
    found = ranks(_train, 2, config, implementation, order, accumulation, init=False, timeout=120)
    unit = 2 * 12 * 32 * 8  # of a block's input
    for mine, wanted in zip(found, plain, strict=True):
        for one, other in zip(mine["found"], wanted["found"], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
        assert all(figures["left"] == 0 for figures in wanted["figures"])
        for figures in mine["figures"][1:]:  # by the order of the step before
            assert figures["left"] == figures["came"] > 0
            assert figures["late"] == figures["resident"] == 0
            assert figures["peak"] <= (horizon + 1) * unit


def test_without_the_setting_it_is_pytorchs_own(ranks: Any) -> None:
    config = {"hybrid_shard_degree": 2, "sm_activation_offloading": False}
    for mine in ranks(_train, 2, config, "NO_REENTRANT", init=False, timeout=120):
        assert all(figures["left"] == 0 for figures in mine["figures"])
