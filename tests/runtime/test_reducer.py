"""Gradient reduction in the cases that break naive reducers."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.matrix import sampled
from torch import nn

SMALL = {"bucket_cap_mb": 40 / 2**20}  # ten elements: nearly every parameter has a bucket of its own


class Branches(nn.Module):
    """Which layers run depends on the call."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x, path):
        for index in path:
            x = self.layers[index](x)
        return x


def _inputs(rank):
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(50 + rank))


def _expected(paths_by_rank, world):
    """Average of every rank's own gradients, computed in one process."""
    total: dict[str, torch.Tensor] = {}
    for rank in range(world):
        model = Branches()
        for path in paths_by_rank[rank]:
            model(_inputs(rank), path).sum().backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                total[name] = total.get(name, 0) + p.grad / world
    return total


def _assert_gradients(model, expected):
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], msg=lambda m, n=name: f"{n}: {m}")


def _run_paths(steps, options):
    """Each step is {rank: [path of each backward]}; gradients are checked after each."""
    import smdistributed.modelparallel.torch as smp

    model = smp.DistributedModel(Branches(), **options)

    @smp.step(non_split_inputs=["paths"])
    def step(x, paths):
        for path in paths:
            model.backward(model(x, path).sum())

    for paths_by_rank in steps:
        model.zero_grad()
        step(_inputs(smp.rank()), paths_by_rank[smp.rank()])
        _assert_gradients(model, _expected(paths_by_rank, smp.size()))
    return True


ALL = [[0, 1, 2, 3]]


#: Which layers run on each rank, step by step.
GRAPHS = {
    "plain": [{0: ALL, 1: ALL}] * 4,
    "unused-everywhere": [{0: ALL, 1: ALL}, {0: [[0, 3]], 1: [[0, 3]]}, {0: ALL, 1: ALL}],
    "another-path-each-rank": [{0: [[0, 1]], 1: [[0, 2]]}, {0: [[3]], 1: [[1, 1]]}, {0: ALL, 1: [[2]]}],
    "more-backwards-than-before": [{0: ALL, 1: ALL}] * 3 + [{0: ALL + ALL, 1: ALL + ALL}],
    "more-backwards-on-one-rank": [{0: ALL, 1: ALL}] * 3 + [{0: ALL + ALL, 1: ALL}],
    "layer-used-twice": [{0: [[1, 1, 2]], 1: [[1, 1, 2]]}] * 3,
}
OPTIONS = {
    "overlapping": {},
    "after backward": {"overlapping_allreduce": False},
    "views": {"gradient_as_bucket_view": True},
}
#: Every graph while buckets travel during backward, where orders differ; the other options where ranks differ most.
SAMPLE = [
    *((graph, "overlapping") for graph in GRAPHS),
    *(
        (graph, kind)
        for graph in ("unused-everywhere", "another-path-each-rank")
        for kind in ("after backward", "views")
    ),
]


@pytest.mark.parametrize(("graph", "kind"), sampled(itertools.product(GRAPHS, OPTIONS), SAMPLE))
def test_gradients_are_the_average_whatever_graph_ran(ranks, graph, kind):
    ranks(_run_paths, 2, GRAPHS[graph], {**SMALL, **OPTIONS[kind]}, config={"ddp": True})


@pytest.mark.both_transports
def test_several_passes_before_one_reduction(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        model = smp.DistributedModel(Branches(), backward_passes_per_step=2, **SMALL)

        @smp.step(non_split_inputs=["path"])
        def step(x, path):
            model.backward(model(x, path).sum())

        for _ in range(3):
            model.zero_grad()
            step(_inputs(smp.rank()), [0, 1])
            own = Branches()
            own(_inputs(smp.rank()), [0, 1]).sum().backward()
            torch.testing.assert_close(model.layers[0].weight.grad, own.layers[0].weight.grad)  # not reduced yet
            step(_inputs(smp.rank()), [0, 1])
            _assert_gradients(model, _expected({r: [[0, 1], [0, 1]] for r in range(2)}, 2))

    ranks(run, 2, config={"ddp": True})


def test_loops_without_a_step(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        model = smp.DistributedModel(Branches(), **SMALL)
        expected = _expected({0: ALL, 1: ALL}, 2)
        for _ in range(3):
            model.zero_grad()
            model(_inputs(smp.rank()), [0, 1, 2, 3]).sum().backward()
            _assert_gradients(model, expected)
        model.zero_grad()
        with model.no_sync():
            model(_inputs(smp.rank()), [0, 1, 2, 3]).sum().backward()
        model(_inputs(smp.rank()), [0, 1, 2, 3]).sum().backward()
        _assert_gradients(model, _expected({0: ALL + ALL, 1: ALL + ALL}, 2))

    ranks(run, 2, config={"ddp": True})


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("through_model", [True, False])
def test_microbatches_average_or_sum(ranks, average, through_model):
    def run():
        import smdistributed.modelparallel.torch as smp

        model = smp.DistributedModel(Branches(), average_grads_across_microbatches=average)

        @smp.step
        def step(x):
            loss = model(x, [0, 1]).sum()
            model.backward(loss) if through_model else loss.backward()

        step(_inputs(smp.rank()))
        expected = _expected({0: [[0, 1]], 1: [[0, 1]]}, 2)
        scale = 0.5 if average else 1.0
        _assert_gradients(model, {name: gradient * scale for name, gradient in expected.items()})

    ranks(run, 2, config={"ddp": True, "microbatches": 2})


def test_frozen_parameters_and_buffers(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        module[0].weight.requires_grad_(False)
        module[1].running_mean.fill_(float(smp.rank() + 5))
        model = smp.DistributedModel(module)
        assert float(module[1].running_mean[0]) == 5.0

        @smp.step
        def step(x):
            model.backward(model(x).square().sum())

        step(_inputs(smp.rank()) + smp.rank())
        step(_inputs(smp.rank()) + smp.rank())
        assert module[0].weight.grad is None
        return module[1].running_mean.clone(), module[2].weight.grad.clone()

    (_, first), (_, second) = ranks(run, 2, config={"ddp": True})
    torch.testing.assert_close(first, second)


def test_sparse_gradients_become_sparse_averages(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        torch.manual_seed(0)
        model = smp.DistributedModel(nn.Embedding(6, 2, sparse=True))
        model(torch.tensor([smp.rank()])).sum().backward()
        expected = torch.zeros(6, 2)
        expected[:2] = 0.5
        assert model.module.weight.grad.is_sparse
        torch.testing.assert_close(model.module.weight.grad.to_dense(), expected)

    ranks(run, 2, config={"ddp": True})


def test_a_rank_without_the_bucket_order_of_the_first_follows_it(ranks):
    """The measured order is the first rank's, also on a rank whose gradients arrive in another order."""

    def run():
        import smdistributed.modelparallel.torch as smp

        model = smp.DistributedModel(Branches(), **SMALL)

        @smp.step(non_split_inputs=["path"])
        def step(x, path):
            model.backward(model(x, path).sum())

        path = [0, 1, 2, 3] if smp.rank() == 0 else [3, 2, 1, 0]
        for _ in range(4):
            model.zero_grad()
            step(_inputs(smp.rank()), path)
            _assert_gradients(model, _expected({0: [[0, 1, 2, 3]], 1: [[3, 2, 1, 0]]}, 2))
        return model._accumulation.bucket_order

    first, second = ranks(run, 2, config={"ddp": True})
    assert first == second


def test_without_ddp_gradients_stay_local(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        torch.manual_seed(0)
        model = smp.DistributedModel(nn.Linear(2, 1))
        model(torch.full((1, 2), float(smp.rank() + 1))).sum().backward()
        return float(model.module.weight.grad[0, 0])

    assert ranks(run, 2, config={}) == [1.0, 2.0]
