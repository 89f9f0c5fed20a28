"""Blocks in place that take or return something for each head: each rank has its heads', and the whole where it is used."""

from __future__ import annotations

import contextlib
import copy
import pickle
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from support.models import own_blocks
from support.models.biased_blocks import BiasedNet, ByWidth, Latent, NormedHeads, biased_loss
from support.models.own_blocks import Net, batches
from support.training.closeness import close
from support.training.rank_training import training_step, updates
from support.training.reference import train_alone

from smp_runtime.tensor_parallel.norm_statistics import SharedStatistics

STEPS = 4
_IDS = torch.arange(12).view(2, 6)


def _optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def _net(kind):
    torch.manual_seed(0)
    return (
        BiasedNet()
        if kind == "biased"
        else Net(attention={"latent": Latent, "normed": NormedHeads, "width": ByWidth}[kind])
    )


def _loss(kind):
    return biased_loss if kind == "biased" else own_blocks.loss


def _train(kind):
    import smdistributed.modelparallel.torch as smp

    net = _net(kind)
    smp.set_tensor_parallelism(net)
    model = smp.DistributedModel(net)
    if kind == "biased":
        smp.set_activation_checkpointing(model.module.layers[1]) if smp.pp_size() == 1 else None
    torch.manual_seed(smp.rank())
    optimizer = smp.DistributedOptimizer(_optimizer(model.parameters()))
    losses = list(updates(training_step(model, _loss(kind)), optimizer, batches(0, STEPS)))
    here = {name: parameter.numel() for name, parameter in model.named_parameters()}
    state = model.state_dict()
    with torch.no_grad():
        copied = _flat(model.cpu().eval()(_IDS)) if smp.pp_size() == 1 else None
    parts = model.module.named_modules()
    joined = [
        name for name, part in parts if "attention" in name and getattr(getattr(part, "split", None), "joins", False)
    ]
    return losses, state, here, copied, joined


def _flat(results):
    return results if isinstance(results, torch.Tensor) else torch.cat([result.flatten() for result in results])


@pytest.mark.parametrize(
    ("kind", "world", "config"),
    [
        pytest.param("biased", 2, {"prescaled_batch": True}, marks=pytest.mark.full),
        ("biased", 2, {"prescaled_batch": False}),
        ("biased", 4, {"prescaled_batch": True, "pipeline_parallel_degree": 2, "microbatches": 2}),
        pytest.param("latent", 2, {"prescaled_batch": True}, marks=pytest.mark.full),
        ("latent", 2, {"prescaled_batch": False}),
        ("normed", 2, {"prescaled_batch": True}),
        pytest.param("normed", 2, {"prescaled_batch": False}, marks=pytest.mark.full),
        ("width", 2, {"prescaled_batch": False}),
    ],
)
def test_training_is_that_of_one_process(ranks, kind, world, config):
    alone = train_alone(_net(kind), _optimizer, batches(0, STEPS), _loss(kind))
    whole = {name: parameter.numel() for name, parameter in alone.model.named_parameters()}
    config = {"tensor_parallel_degree": 2, "ddp": True, **config}
    with torch.no_grad():
        expected = _flat(alone.model.eval()(_IDS))
    for losses, state, here, copied, joined in ranks(_train, world, kind, config=config):
        assert losses == pytest.approx(alone.losses, abs=1e-5)
        for name, value in alone.model.state_dict().items():
            close(state[name], value, name)
        if copied is not None:
            close(copied, expected, "a whole copy's results")
        assert not joined  # its maps are pairs
        split = {name for name, count in here.items() if count < whole[name]}
        attention = "layers.0.attention"
        wanted = {
            "biased": {f"{attention}.{name}.weight" for name in ("q", "k", "v", "o", "distance")},
            "latent": {f"{attention}.{name}.weight" for name in ("q_up", "kv_up", "o")},
            "normed": {
                f"{attention}.{name}.weight" for name in ("q", "k", "v", "o", "q_norm", "k_norm", "v_norm", "inner")
            },
            "width": {f"{attention}.{name}.weight" for name in ("projection", "o")},
        }[kind]
        assert wanted <= split | (whole.keys() - here.keys())
        if kind == "biased" and "layers.0.other.q.weight" in here:
            assert "layers.0.other.q.weight" in split  # nobody calls it, but it is like those that are called


def _deferred():
    import smdistributed.modelparallel.torch as smp
    from smp_runtime.tensor_parallel.deferred import Deferred, defer_gather, part_of
    from smp_runtime.tensor_parallel.group import TensorGroup

    group = TensorGroup.of(smp.init().ranks)
    whole = torch.arange(16.0).view(2, 4, 2).requires_grad_()
    mine = whole[:, 2 * group.rank : 2 * group.rank + 2]
    found = {}
    with _counted() as gathers:
        later = defer_gather(mine, group, 1)
        assert later.shape == whole.shape
        assert later.requires_grad
        assert part_of(later, group, 1) is mine
        assert part_of(later, group, 0) is None
        found["untouched"] = len(gathers)
        (later * torch.arange(16.0).view(2, 4, 2)).sum().backward()
        assert later[1, 3, 1] == 15  # what was gathered is kept
        found["used"] = len(gathers)
    found["gradient"] = whole.grad
    rows = defer_gather(mine.detach(), group, 1, by_rows=True)
    assert isinstance(rows, Deferred)
    found["rows"] = rows + 0
    found["copies"] = [copy.deepcopy(rows) + 0, pickle.loads(pickle.dumps(defer_gather(mine.detach(), group, 1)))]
    return found


@contextlib.contextmanager
def _counted():
    """The gathers that are called meanwhile."""
    from smp_runtime.tensor_parallel.group import TensorGroup

    calls, usual = [], TensorGroup.gather

    def gather(self, tensor, dim):
        calls.append(dim)
        return usual(self, tensor, dim)

    with mock.patch.object(TensorGroup, "gather", gather):
        yield calls


def test_a_tensor_in_parts_is_gathered_once_and_only_where_it_is_used(ranks):
    whole = torch.arange(16.0).view(2, 4, 2)
    for rank, found in enumerate(ranks(_deferred, 2, config={"tensor_parallel_degree": 2, "ddp": True})):
        assert (found["untouched"], found["used"]) == (0, 1)
        expected = torch.zeros(2, 4, 2)
        expected[:, 2 * rank : 2 * rank + 2] = whole[:, 2 * rank : 2 * rank + 2]
        assert torch.equal(found["gradient"], expected)
        assert torch.equal(found["rows"], whole[rank : rank + 1])
        assert torch.equal(found["copies"][0], whole[rank : rank + 1])
        assert torch.equal(found["copies"][1], whole)


def test_a_call_that_fails_before_a_mode_is_entered_leaves_other_modes_alone():
    net = torch.nn.LayerNorm(4)

    def refuses(*_):
        raise ValueError("no")

    net.register_forward_pre_hook(refuses)
    outer, inner = (SharedStatistics(SimpleNamespace(size=1)) for _ in range(2))
    inner.watch(net)
    with outer:
        with pytest.raises(ValueError, match="no"):
            net(torch.ones(2, 4))
        assert _is_on(outer)
    assert not _is_on(outer)


def _is_on(mode):
    from torch.overrides import _get_current_function_mode

    return _get_current_function_mode() is mode
