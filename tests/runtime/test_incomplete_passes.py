"""An update after an incomplete group of ``backward_passes_per_step`` passes takes what there is, reduced, as one process does."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

WIDTH, WORLD, PASSES = 6, 2, 3
UNCLIPPED = {"sdp_param_persistence_threshold": 0, "sdp_gradient_clipping": 1e9}
STRATEGIES = {
    "ddp": {},
    "state": {"shard_optimizer_state": True},
    "sharding": {"sharded_data_parallel_degree": 2, **UNCLIPPED},
    "bf16": {"bf16": True},
    "fp16 state": {"fp16": True, "shard_optimizer_state": True},
}
#: What a script does, one letter each: a pass, an update, clearing, clipping, halving gradients in place, setting halves,
#: dropping those of the last layer, a step that raises, a pass under ``no_sync``.
COURSES = {
    "end of an epoch": "pppucppucpuc",
    "cleared in the middle": "pcpppuc",
    "clipped": "plucpplucpppluc",
    "updated again": "pupuc",
    "after a step that raises": "pxucppxuc",
    "under no_sync": "nucnpuc",
    "halved": "phucpphpucppphuc",
    "halved after a whole group": "pppphuc",
    "replaced": "psucppspuc",
    "halved under no_sync": "nhnphuc",
    "dropped": "pducpdpuc",
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def _batch(number, rank):
    return torch.randn(2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * number + rank))


def _net():
    torch.manual_seed(0)
    return Net().double()


def _go(course, train, optimizer, clip, parameters, fail, no_sync):
    for number, action in enumerate(course):
        if action == "p":
            train(number)
        elif action == "n":
            with no_sync():
                train(number)
        elif action == "u":
            optimizer.step()
        elif action == "c":
            optimizer.zero_grad()
        elif action == "l":
            clip(parameters, 0.01)
        elif action == "h":
            for parameter in parameters:
                parameter.grad.mul_(0.5)
        elif action == "s":
            for parameter in parameters:
                parameter.grad = parameter.grad * 0.5
        elif action == "d":
            for parameter in parameters[2:]:
                parameter.grad = None
        else:
            fail()


def _together(courses, wraps, by_pytorch):
    import smdistributed.modelparallel.torch as smp

    found = {}
    for name, course in courses.items():
        half = smp.state.cfg.bf16 or smp.state.cfg.fp16
        model = smp.DistributedModel(_net().float() if half else _net(), backward_passes_per_step=PASSES)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer = smp.DistributedOptimizer(optimizer) if wraps else optimizer

        @smp.step
        def step(x, fails, model=model):
            if fails:
                raise ValueError("a batch that cannot be read")
            model.backward(model(x))

        def train(number, model=model, step=step):
            batch = _batch(number, smp.rank())
            step(batch.float() if smp.state.cfg.bf16 or smp.state.cfg.fp16 else batch, False)

        def fail(step=step):
            with contextlib.suppress(ValueError):
                step(_batch(0, 0), True)

        clip = (
            clip_grad_norm_ if by_pytorch else lambda _, limit, optimizer=optimizer: optimizer.clip_master_grads(limit)
        )
        _go(course, train, optimizer, clip, list(model.parameters()), fail, model.no_sync)
        found[name] = model.state_dict()
    return found


def _alone(course):
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

    def train(number):
        for rank in range(WORLD):
            (net(_batch(number, rank)) / WORLD).backward()

    _go(course, train, optimizer, clip_grad_norm_, list(net.parameters()), lambda: None, contextlib.nullcontext)
    return net.state_dict()


def _compare(found, courses, tolerance):
    for name, course in courses.items():
        for key, value in _alone(course).items():
            torch.testing.assert_close(
                found[name][key].double(),
                value,
                atol=tolerance,
                rtol=tolerance,
                msg=lambda text, n=name: f"{n}: {text}",
            )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_incomplete_group_of_passes_is_reduced_for_the_update(ranks, strategy):
    tolerance = 2e-2 if "16" in strategy else 1e-9
    by_pytorch = strategy != "state"
    courses = dict(COURSES)
    if strategy not in ("ddp", "bf16"):  # with sharded state an update takes the gradients away
        del courses["updated again"]
    for found in ranks(_together, WORLD, courses, True, by_pytorch, config={"ddp": True, **STRATEGIES[strategy]}):
        _compare(found, courses, tolerance)


def test_optimizers_that_are_not_wrapped_find_reduced_gradients(ranks):
    courses = {name: COURSES[name] for name in ("end of an epoch", "clipped")}
    for found in ranks(_together, WORLD, courses, False, True, config={"ddp": True}):
        _compare(found, courses, 1e-9)


def test_updates_inside_no_sync_stay_those_of_each_rank(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        model = smp.DistributedModel(_net())
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        with model.no_sync():
            model(_batch(0, smp.rank())).backward()
            optimizer.step()
        optimizer.step()
        return model.module.layers[0].weight.detach()

    first, second = ranks(run, WORLD, config={"ddp": True})
    assert not torch.equal(first, second)


@pytest.mark.parametrize("strategy", ["ddp", "state", "sharding"])
def test_a_parameter_that_only_an_earlier_pass_used_has_its_gradient(ranks, strategy):
    def go(net, train, optimizer):
        seen = []
        for update in range(3):
            for layer in (0, 1) if update < 2 else (1, 1):
                train(layer, 2 * update + layer)
            for parameter in net.parameters():
                seen.append(parameter.grad is not None)
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
            if update == 1:
                net.layers[0].bias.grad = None
            optimizer.step()
            optimizer.zero_grad()
        return seen

    def run():
        import smdistributed.modelparallel.torch as smp

        net = _net()
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

        def train(layer, number):
            net.forward = lambda x: torch.tanh(net.layers[layer](x)).square().mean()
            model(_batch(number, smp.rank())).backward()

        return go(net, train, optimizer), model.state_dict()

    def train(layer, number):
        for rank in range(WORLD):
            (torch.tanh(net.layers[layer](_batch(number, rank))).square().mean() / WORLD).backward()

    net = _net()
    expected = go(net, train, torch.optim.AdamW(net.parameters(), lr=0.01))
    for seen, found in ranks(run, WORLD, config={"ddp": True, **STRATEGIES[strategy]}):
        assert seen == expected
        torch.testing.assert_close(dict(found), dict(net.state_dict()), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("strategy", ["state", "sharding", "fp16 state"])
def test_updates_inside_no_sync_are_refused_with_sharded_state(ranks, strategy):
    def run():
        import smdistributed.modelparallel.torch as smp
        from smp_runtime.errors import SMPUserError

        model = smp.DistributedModel(_net().float())
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        with model.no_sync():
            model(_batch(0, smp.rank()).float()).backward()
            with pytest.raises(SMPUserError, match=r"inside model.no_sync\(\), where gradients are not averaged"):
                optimizer.step()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.step()
        return before, model.state_dict()

    (before, after), (_, other) = ranks(run, WORLD, config={"ddp": True, **STRATEGIES[strategy]})
    for name, value in after.items():
        assert torch.equal(value, other[name])
        assert not torch.equal(value, before[name])


def test_inside_join_an_incomplete_group_is_refused(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp
        from smp_runtime.errors import SMPUserError

        model = smp.DistributedModel(_net(), backward_passes_per_step=PASSES)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        with model.join():
            model(_batch(0, smp.rank())).backward()
            with pytest.raises(SMPUserError, match=r"after 1 of backward_passes_per_step=3 passes inside model.join"):
                optimizer.step()

    ranks(run, WORLD, config={"ddp": True})
