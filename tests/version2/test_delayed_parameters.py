"""Models that are created without values start as others do, whatever the degrees; rank 0's weights reach all ranks."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from support.models.version2 import make_gpt2, make_llama, make_mixtral


def _wrap_late(make: Any, config: dict[str, Any], from_rank0: bool = False) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a model that was created on the meta device, and rank 0's weights."""
    import functools

    import torch.sagemaker as tsm
    from accelerate import init_empty_weights
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
    from torch.sagemaker.delayed_param import DelayedParamIniter
    from torch.sagemaker.tensor_parallel.transformer import TransformerLayer

    import torch_sagemaker_finder  # noqa: F401

    torch.manual_seed(5)
    tsm.init(config)
    has_weights = from_rank0 and tsm.state.rank == 0
    with contextlib.nullcontext() if has_weights else init_empty_weights():
        model = make()
    first = {name: value.clone() for name, value in model.state_dict().items()} if has_weights else {}
    model = tsm.transform(model, load_state_dict_from_rank0=from_rank0)
    initer = DelayedParamIniter(model)
    with initer.validate_params_and_buffers_inited(not from_rank0):
        wrapped = FullyShardedDataParallel(
            model,
            auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={TransformerLayer}),
            use_orig_params=True,
            param_init_fn=initer.get_param_init_fn(),
            post_param_init_fn=initer.get_post_param_init_fn(),
            sync_module_states=from_rank0,
        )
    return wrapped, first


def _loss(make: Any, config: dict[str, Any]) -> float:
    """Return the mean loss of all tokens of a sequence, of which each rank computes its slices."""
    import torch.distributed as dist
    from support.training.version2_training import cut_zigzag

    model, _ = _wrap_late(make, config)
    ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    logits = model(input_ids=cut_zigzag(ids)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), cut_zigzag(ids.roll(-1, 1)).flatten())
    loss.backward()
    mean = loss.detach().double()
    dist.all_reduce(mean)
    return float(mean / dist.get_world_size())


def _start(make: Any, config: dict[str, Any], from_rank0: bool = False) -> dict[str, torch.Tensor]:
    """Return the full state of a model that was created on the meta device, on rank 0."""
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

    wrapped, first = _wrap_late(make, config, from_rank0)
    with FullyShardedDataParallel.state_dict_type(
        wrapped, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    ):
        found = wrapped.state_dict()
    for name, value in first.items():
        assert torch.equal(found[name], value), name
    return found


@pytest.mark.parametrize("make", [make_llama, pytest.param(make_gpt2, marks=pytest.mark.full)])
def test_every_topology_starts_with_the_same_weights(ranks: Any, make: Any) -> None:
    one, *_ = ranks(lambda: _start(make, {"hybrid_shard_degree": 2}), 2, init=False, timeout=120)
    two, *_ = ranks(lambda: _start(make, {"tensor_parallel_degree": 2}), 2, init=False, timeout=120)
    assert len(one) > 10
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(value, two[name]), name
    weights = torch.cat([value.flatten() for name, value in one.items() if value.dim() == 2])
    assert float(weights.std()) == pytest.approx(0.02, rel=0.05)  # initializer_range of the models


def test_sequences_are_shared_out_in_models_that_are_created_late(ranks: Any) -> None:
    wanted = ranks(_loss, 2, make_llama, {"hybrid_shard_degree": 2}, init=False, timeout=120)
    found = ranks(
        _loss, 2, make_llama, {"hybrid_shard_degree": 2, "context_parallel_degree": 2}, init=False, timeout=120
    )
    assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.full)])
def test_experts_that_are_shared_out_start_as_others(ranks: Any, tensor: int) -> None:
    one, *_ = ranks(lambda: _start(make_mixtral, {"hybrid_shard_degree": 2}), 2, init=False, timeout=120)
    config = {"expert_parallel_degree": 2, "tensor_parallel_degree": tensor}
    two, *_ = ranks(lambda: _start(make_mixtral, config), 2 * tensor, init=False, timeout=120)
    assert one.keys() == two.keys()
    assert any("experts" in name for name in one)
    for name, value in one.items():
        assert torch.equal(value, two[name]), name


@pytest.mark.parametrize(
    ("make", "config"),
    [
        (make_llama, {"tensor_parallel_degree": 2}),
        (make_llama, {"hybrid_shard_degree": 2}),
        (make_mixtral, {"expert_parallel_degree": 2}),
        pytest.param(make_mixtral, {"expert_parallel_degree": 2, "tensor_parallel_degree": 2}, marks=pytest.mark.full),
    ],
)
def test_weights_of_rank_0_reach_all_ranks(ranks: Any, make: Any, config: dict[str, Any]) -> None:
    found = ranks(lambda: _start(make, config, from_rank0=True), 4, init=False, timeout=120)
    assert len(found[0]) > 10


def _normed() -> dict[str, torch.Tensor]:
    """Return the state of a map with a spectral norm, of which only rank 0 had weights and vectors."""
    import torch.sagemaker as tsm
    from accelerate import init_empty_weights
    from torch import nn

    tsm.init({"tensor_parallel_degree": 2})
    torch.manual_seed(tsm.state.rank)
    with contextlib.nullcontext() if tsm.state.rank == 0 else init_empty_weights():
        model: Any = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6)), nn.Linear(6, 4))
    model = tsm.transform(model, load_state_dict_from_rank0=True)
    return {name: value.detach().clone() for name, value in model[0].state_dict().items()}  # which is not divided


def test_buffers_of_late_weights_come_from_rank_0_too(ranks: Any) -> None:
    first, second = ranks(_normed, 2, init=False, timeout=120)
    assert sum(name.endswith(("_u", "_v")) for name in first) == 2
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
