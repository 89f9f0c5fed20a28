"""Every option changes what it says and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.logs import heard
from support.training.sharded_training import UNCLIPPED, Blocks, settings
from torch import nn

from smp_config import ConfigError, ModelParallelParameters, Topology
from smp_config.topology import Group

BLOCK = sum(p.numel() for p in Blocks().blocks[0].parameters())


def _trained(hosts=1):
    """What three updates give, and how they went."""
    import os

    os.environ["SMP_HOST"] = f"algo-{int(os.environ['RANK']) * hosts // int(os.environ['WORLD_SIZE'])}"
    import smdistributed.modelparallel.torch as smp
    from smp_runtime.comm.collectives import TorchCollectives

    class Watched(TorchCollectives):
        def __init__(self):
            self.calls = []

        def all_gather(self, full, shard, group):
            self.calls.append(("gather", shard.numel(), tuple(torch.distributed.get_process_group_ranks(group))))
            return super().all_gather(full, shard, group)

        def reduce_scatter(self, shard, full, group):
            self.calls.append(("reduce", full.numel(), None))
            return super().reduce_scatter(shard, full, group)

    session = smp.init(_trained.config)
    watched = Watched()
    session.ranks = replace(session.ranks, collectives=watched)
    torch.manual_seed(0)
    model = smp.DistributedModel(Blocks())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    for index in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * index + smp.rank()))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    live = model.shards.scheduler
    calls = list(watched.calls)
    return {
        "weights": model.state_dict(),
        "peak": live.peak,
        "gathers": [(count, ranks) for what, count, ranks in calls if what == "gather"],
        "reductions": [count for what, count, _ in calls if what == "reduce"],
        "elements": model.shards.elements,
        "norm": optimizer._global_grad_norm,
    }


def _run(ranks, world, hosts=1, **options):
    config = settings(Blocks(), options.pop("degree", 2), **options)

    def run():
        _trained.config = config
        return _trained(hosts)

    return ranks(run, world, init=False)


def _equal(one, other, exactly=True):
    for name, value in one["weights"].items():
        if exactly:
            assert torch.equal(value, other["weights"][name]), name
        else:
            torch.testing.assert_close(value, other["weights"][name], atol=1e-6, rtol=1e-5)


def test_reduce_bucket_size_bounds_what_one_collective_carries(ranks):
    large, small = _run(ranks, 2)[0], _run(ranks, 2, sdp_reduce_bucket_size=BLOCK // 4)[0]
    assert max(small["reductions"]) <= BLOCK // 4 < max(large["reductions"])
    assert len(small["reductions"]) > len(large["reductions"])
    assert small["gathers"] == large["gathers"]
    assert small["peak"] == large["peak"]
    _equal(small, large)


def test_persistence_threshold_keeps_smaller_parameters_whole(ranks):
    # 128 elements: the bias of the first linear layer of a block, which is not fewer and so is sharded.
    all_sharded, some = _run(ranks, 2)[0], _run(ranks, 2, sdp_param_persistence_threshold=128)[0]
    expected = sum(p.numel() for p in Blocks().parameters() if p.numel() < 128)
    assert all_sharded["elements"][1] == 0
    assert some["elements"] == (sum(all_sharded["elements"]) - expected, expected)
    _equal(all_sharded, some, exactly=False)


def test_max_live_parameters_bounds_what_is_gathered_at_once(ranks):
    found = {cap: _run(ranks, 2, sdp_max_live_parameters=cap)[0] for cap in (BLOCK, 2 * BLOCK, 10 * BLOCK)}
    assert found[BLOCK]["peak"] <= BLOCK < found[2 * BLOCK]["peak"] <= 2 * BLOCK < found[10 * BLOCK]["peak"]
    for other in found.values():
        _equal(other, found[BLOCK], exactly=False)


def test_hierarchical_allgather_sends_every_shard_to_another_host_once(ranks):
    plain = _run(ranks, 4, 2, degree=4, sdp_hierarchical_allgather=False)[0]
    phased = _run(ranks, 4, 2, degree=4)[0]
    one_host = _run(ranks, 4, 1, degree=4)[0]
    assert {group for _, group in plain["gathers"]} == {(0, 1, 2, 3)} == {group for _, group in one_host["gathers"]}
    between = [count for count, group in phased["gathers"] if group == (0, 2)]
    inside = [count for count, group in phased["gathers"] if group == (0, 1)]
    assert len(between) == len(inside) == len(plain["gathers"])
    # This rank's shard alone travels between hosts; in one phase three of the host's four transfers would.
    assert between == [count for count, _ in plain["gathers"]]
    assert inside == [2 * count for count in between]
    _equal(phased, plain, exactly=False)
    assert phased["reductions"] == plain["reductions"]
    assert phased["peak"] == plain["peak"]


def test_gradient_clipping_is_on_by_default_and_measures_the_norm_before(ranks):
    free, clipped = _run(ranks, 2)[0], _run(ranks, 2, sdp_gradient_clipping=1e-3)[0]
    assert any(not torch.equal(free["weights"][name], value) for name, value in clipped["weights"].items())
    assert clipped["norm"] > 1e-3  # what the gradient was
    assert clipped["gathers"] == free["gathers"]
    assert ModelParallelParameters().sdp_gradient_clipping == 1.0


def test_a_module_above_the_cap_is_divided_and_one_layer_above_it_gathered_alone(ranks):
    layer = 32 * 128 + 128

    def run():
        import smdistributed.modelparallel.torch as smp

        torch.manual_seed(0)
        model, said = heard(lambda: smp.DistributedModel(Blocks()))
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        live, together = model.shards.scheduler, []
        start = live._start

        def started(unit):
            start(unit)
            if live.elements > live._most:
                together.append(len(live._gathered))

        live._start = started
        for _ in range(3):  # from the second on, units are fetched ahead
            optimizer.zero_grad()
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
        return [unit.name for unit in model.shards.units], said, live.peak, together, model.state_dict()

    names, said, peak, together, expected = ranks(run, 2, config=settings(Blocks(), 2, sdp_max_live_parameters=layer))[
        0
    ]
    assert {"blocks.0.norm", "blocks.0.mlp.0", "blocks.0.mlp.2", "enter", "leave"} <= set(names)
    assert not any("sdp_max_live_parameters" in sentence for sentence in said)
    assert peak == layer
    assert together == []
    for rank, (_, said, peak, together, weights) in enumerate(
        ranks(run, 2, config=settings(Blocks(), 2, sdp_max_live_parameters=layer - 1))
    ):
        told = [sentence for sentence in said if "sdp_max_live_parameters" in sentence]
        assert len(told) == (rank == 0)
        for sentence in told:
            assert "the 4,224 parameters of blocks.0.mlp.0 are needed at the same time and are more than" in sentence
            assert "sdp_max_live_parameters (4,223), and so are 3 more" in sentence
            assert "set it to at least 4,224, or to 8,448" in sentence
        assert peak == layer
        assert len(together) > 8
        assert set(together) == {1}  # nothing else was there
        for name, value in weights.items():
            assert torch.equal(value, expected[name]), name


def test_what_is_needed_at_once_above_the_cap_is_gathered_and_named_once(ranks):
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.outer = nn.Linear(8, 8)
            self.inner = nn.Linear(8, 8)
            self.outer.inner = self.inner

        def forward(self, x):
            return self.outer.weight @ x + self.inner.weight @ x

    def run():
        import smdistributed.modelparallel.torch as smp

        torch.manual_seed(0)
        plain = Nested()
        model, x = smp.DistributedModel(plain), torch.ones(8, 1)
        expected = model.state_dict()
        wanted = expected["outer.weight"] @ x + expected["inner.weight"] @ x

        def twice():
            for _ in range(2):
                found = model(x)
                torch.testing.assert_close(found, wanted)
                found.sum().backward()

        return heard(twice)[1], model.shards.scheduler.peak, model.shards.scheduler.elements

    config = settings(Blocks(), 2, sdp_max_live_parameters=72)
    for rank, (said, peak, left) in enumerate(ranks(run, 2, config=config)):
        assert (peak, left) == (144, 0)
        told = [sentence for sentence in said if "sdp_max_live_parameters" in sentence]
        assert len(told) == (rank == 0)
        assert all("144 at once, more than sdp_max_live_parameters (72)" in sentence for sentence in told)


def test_autocast_keeps_no_casts_of_sharded_weights(ranks):
    """Microbatches of a pipeline, which run on threads, would share them by chance."""

    def run():
        import smdistributed.modelparallel.torch as smp

        class Layer(nn.Linear):
            def forward(self, x):
                seen.append(torch.is_autocast_cache_enabled())
                if x.shape[0] == 3:
                    raise ValueError("three rows")
                return super().forward(x)

        seen = []
        model = smp.DistributedModel(nn.Sequential(Layer(8, 8), Layer(8, 8)))
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(2, 8))
            with pytest.raises(ValueError, match="three rows"):
                model(torch.randn(3, 8))
            seen.append(torch.is_autocast_cache_enabled())
        return seen

    config = {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}
    for seen in ranks(run, 2, config=config):
        assert seen == [False, False, False, True]


@pytest.mark.parametrize("half", [False, True])
def test_autocast_is_warned_of_once_where_it_copies_weights(ranks, half):
    def run():
        import smdistributed.modelparallel.torch as smp

        model = smp.DistributedModel(Blocks())

        def train():
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(torch.ones(2, 8)).float().mean()
                loss.backward()

        return [sentence for sentence in heard(train)[1] if "autocast" in sentence]

    first, second = ranks(run, 2, config=settings(Blocks(), 2, bf16=half))
    assert second == []
    assert len(first) == (not half)
    assert all("use 'bf16: true'" in sentence for sentence in first)


def test_optimizers_that_look_at_whole_tensors_are_refused_and_unknown_ones_warned_of(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        class Lamb(torch.optim.SGD):
            pass

        class LayeredLARS(torch.optim.SGD):
            pass

        class Inherits(Lamb):
            pass

        class Mine(torch.optim.SGD):
            def step(self, closure=None):
                return super().step(closure)

        class Renamed(torch.optim.SGD):
            pass

        class MyFusedLAMB(smp.optimizers.FusedLAMB):
            pass

        said = {}
        for kind in (Lamb, LayeredLARS, Inherits, torch.optim.LBFGS, Mine, Renamed, MyFusedLAMB, torch.optim.AdamW):
            model = smp.DistributedModel(Blocks())

            def wrap(kind=kind, model=model):
                smp.DistributedOptimizer(kind(model.parameters(), lr=0.1))

            try:
                said[kind.__name__] = heard(wrap)[1]
            except smp.exceptions.SMPUserError as error:
                said[kind.__name__] = str(error)
        return said

    said = ranks(run, 2, config=settings(Blocks(), 2))[0]
    for name in ("Lamb", "LayeredLARS", "Inherits", "LBFGS"):
        assert f"{name} looks at whole tensors, but with sharding" in said[name]
    assert len(said["Mine"]) == 1
    assert "Mine" in said["Mine"][0]
    assert said["Renamed"] == said["MyFusedLAMB"] == said["AdamW"] == []


@pytest.mark.parametrize(
    ("parameters", "world", "said"),
    [
        ({"ddp": True, "sharded_data_parallel_degree": 3}, 4, "use one of 1, 2, 4"),
        ({"ddp": True, "sharded_data_parallel_degree": 8}, 4, "use one of 1, 2, 4"),
        ({"ddp": True, "sharded_data_parallel_degree": 2, "shard_optimizer_state": True}, 4, "shard_optimizer_state"),
        ({"sharded_data_parallel_degree": 2}, 4, "ddp"),
    ],
)
def test_degrees_and_combinations_that_cannot_be(parameters, world, said):
    with pytest.raises(ConfigError, match=said):
        ModelParallelParameters.from_mp_parameters(parameters).topology(world)


def test_options_without_sharding_are_said_to_be_ignored():
    parameters = ModelParallelParameters.from_mp_parameters({"ddp": True, "sdp_max_live_parameters": 1000})
    assert any("sdp_max_live_parameters ignored" in sentence for sentence in parameters.warnings())


def test_the_documented_layout_of_32_ranks():
    topology = Topology(32, tensor=4, sharded=4)
    assert topology.group_of(Group.TP, 0) == [0, 1, 2, 3]
    assert topology.group_of(Group.RDP, 0) == list(range(0, 32, 4))
    assert [g for g in topology.groups(Group.SHARD) if 0 in g or 16 in g] == [[0, 4, 8, 12], [16, 20, 24, 28]]
    assert topology.group_of(Group.REPLICA, 0) == [0, 16]


@pytest.mark.full
def test_the_documented_example_runs_with_8_ranks(ranks):
    from support.ranks.rank_pool import RankPool

    config = {
        "ddp": True,
        "sharded_data_parallel_degree": 2,
        "sdp_reduce_bucket_size": int(5e8),
        "sdp_param_persistence_threshold": int(1e6) // 10**4,
        "sdp_max_live_parameters": int(1e9),
        "sdp_hierarchical_allgather": True,
        "sdp_gradient_clipping": 1.0,
    }

    def run():
        _trained.config = config
        return _trained()["norm"]

    with RankPool(8) as pool:
        norms = pool.run(run, 8, init=False, timeout=100.0)
    assert len(set(norms)) == 1
    assert UNCLIPPED > norms[0] > 0
