"""The layout of flat units: shards are equal, fragments tile every parameter, and what is read back is what was put in."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from smp_runtime.parameters.optimizer_shards import OptimizerShard, store_all
from smp_runtime.sharding.flat_unit import ALIGNMENT, ShardedUnit, WholeUnit

SHAPES = [(3, 5), (1,), (40,), (0,), (7, 2, 3)]


def _parameters():
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


@pytest.mark.parametrize("shards", [1, 2, 3, 16])
def test_fragments_tile_every_parameter(shards):
    units = [WholeUnit(_parameters(), shards, position) for position in range(shards)]
    assert len({unit.shard_elements for unit in units}) == 1
    assert 0 <= shards * units[0].shard_elements - units[0].filled < shards * ALIGNMENT
    for index, parameter in enumerate(units[0].parameters):
        found = [unit.fragments[index] for unit in units if unit.fragments[index] is not None]
        bounds = [0, *(fragment.stop for fragment in found)]
        assert [(fragment.start, fragment.stop) for fragment in found] == list(itertools.pairwise(bounds))
        assert bounds[-1] == parameter.numel()


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_the_shards_of_all_ranks_are_the_whole(shards):
    torch.manual_seed(0)
    values = [parameter.detach().clone() for parameter in _parameters()]
    parts = []
    for position in range(shards):
        unit = ShardedUnit("", None, _parameters(), torch.float32, shards, position, torch.device("cpu"))
        for index, value in enumerate(values):
            unit.take(index, value)
        unit.fill_from_shard()
        for parameter, value, fragment in zip(unit.parameters, values, unit.fragments, strict=True):
            there = torch.zeros(value.numel(), dtype=torch.bool)
            if fragment is not None:
                there[fragment.start : fragment.stop] = True
                assert torch.equal(parameter.view(-1)[there], value.view(-1)[there])
            assert parameter.view(-1)[~there].isnan().all()
        parts.append(unit.shard)
    assert all(map(torch.equal, unit.views_of(torch.cat(parts)), values))


def test_parameters_of_a_whole_unit_are_views_of_it():
    parameters = _parameters()
    values = [parameter.detach().clone() for parameter in parameters]
    unit = WholeUnit(parameters, 2, 1)
    assert all(map(torch.equal, parameters, values))
    unit.data.fill_(3.0)
    assert all(bool((parameter == 3.0).all()) for parameter in parameters)
    assert unit.shard.data_ptr() == unit.data[unit.shard_elements :].data_ptr()


def test_an_optimizer_shard_takes_the_gradient_that_its_owner_was_given():
    parameter = nn.Parameter(torch.arange(6.0).view(2, 3))
    parameter.grad = torch.ones(2, 3)
    stored = parameter.detach().view(-1)[2:5]
    shard = OptimizerShard(parameter, 2, 5, nn.Parameter(stored.clone()), stored, number=0, is_fragment=True)
    assert shard.gradient is None  # the parameter's is that of one rank
    shard.reduced = torch.full((3,), 2.0)
    assert torch.equal(shard.gradient, torch.full((3,), 2.0))
    shard.take(10 * parameter.detach())
    store_all([shard])
    assert torch.equal(parameter.detach().view(-1), torch.tensor([0.0, 1.0, 20.0, 30.0, 40.0, 5.0]))
    whole = OptimizerShard(parameter, 0, 6, parameter, parameter.data)
    assert whole.gradient is parameter.grad
    assert whole.is_whole
    assert not shard.is_whole
