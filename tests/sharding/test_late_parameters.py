"""Sharded optimizer state: after an update the others' parts of parameters come while the script goes on, and nobody notices."""

from __future__ import annotations

import pytest
import torch
from support.training.closeness import close
from support.training.reference import train_alone
from torch import nn

LAYERS, STEPS, WIDTH = 4, 4, 8


def _net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def _batch(step):
    return (torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)),)


def _loss(model, x):
    return model(x).square().mean()


def _wrapped():
    import smdistributed.modelparallel.torch as smp

    # A unit for each layer.
    model = smp.DistributedModel(_net(), bucket_cap_mb=4 * WIDTH * (WIDTH + 1) / 2**20)
    return smp, model, smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))


def _waiting(model):
    """Which layers' values are still under way; asking does not wait for them."""
    from smp_runtime.parameters.pending_gather import PendingParameter

    return [type(layer._parameters["weight"]) is PendingParameter for layer in model.module]


def _update(smp, model, optimizer, step):
    optimizer.zero_grad()
    x = _batch(step)[0].chunk(smp.dp_size())[smp.dp_rank()]
    _loss(model, x).backward()
    optimizer.step()


def test_the_wait_is_where_the_values_are_needed(ranks):
    def run():
        smp, model, optimizer = _wrapped()
        during = []
        for number, layer in enumerate(model.module):
            layer.register_forward_hook(lambda *_, number=number: during.append(_waiting(model)))
        _update(smp, model, optimizer, 0)
        assert all(_waiting(model))
        during.clear()
        with torch.no_grad():
            model(_batch(1)[0])
        return during

    for during in ranks(run, 2, config={"ddp": True, "shard_optimizer_state": True}):
        # Behind each layer's call it has come, and those behind it have not.
        assert during == [[False] * (number + 1) + [True] * (LAYERS - number - 1) for number in range(LAYERS)]


@pytest.mark.parametrize(
    "reads", ["nothing", "held parameters", "the state", "an evaluation", "a state that is loaded"]
)
def test_training_equals_one_process_whoever_reads_in_between(ranks, reads):
    def run(reads):
        smp, model, optimizer = _wrapped()
        held, read = list(model.parameters()), []
        for step in range(STEPS):
            _update(smp, model, optimizer, step)
            assert all(_waiting(model))
            if reads == "held parameters":
                read.append([p.detach().clone() for p in held])
            elif reads == "the state":
                read.append([value.clone() for value in model.state_dict().values()])
            elif reads == "an evaluation":
                with torch.no_grad():
                    read.append([model(_batch(0)[0])])
            elif reads == "a state that is loaded":
                model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
                assert not any(_waiting(model))
        return read, {name: value.clone() for name, value in model.state_dict().items()}

    expected = train_alone(_net(), lambda p: torch.optim.AdamW(p, lr=1e-2), map(_batch, range(STEPS)), _loss)
    results = ranks(run, 2, reads, config={"ddp": True, "shard_optimizer_state": True})
    for read, weights in results:
        for name, value in expected.weights.items():
            close(weights[name], value, name, 1e-5)
        for mine, theirs in zip(read, results[0][0], strict=True):
            for one, other in zip(mine, theirs, strict=True):
                assert torch.equal(one, other)


class _Coming:
    waits = 0

    def wait(self):
        self.waits += 1


@pytest.mark.parametrize("failed", [False, True])
def test_a_rank_leaves_when_all_has_come_unless_it_has_failed(solo, failed):
    import smdistributed.modelparallel.torch as smp
    from smp_runtime.job import session
    from smp_runtime.parameters.pending_gather import PendingGathers

    solo({})
    flat, work, job = torch.zeros(4), _Coming(), session.current_session()
    parameter = nn.Parameter(flat)
    job.ranks.keep(PendingGathers, PendingGathers).expect(work, [parameter], flat)
    job.has_failed = failed
    smp.shutdown()
    assert work.waits == (not failed)


def test_what_torchscript_reads_is_there_at_once(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        net = _net()
        net[1] = torch.jit.script(net[1])
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
        _update(smp, model, optimizer, 0)
        return [type(p).__name__ for p in model.parameters()]

    for kinds in ranks(run, 2, config={"ddp": True, "shard_optimizer_state": True}):
        assert set(kinds) == {"Parameter"}
