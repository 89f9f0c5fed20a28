"""What models do with their parameters: read others', share them, freeze them, recompute, raise, return anything."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.training.sharded_training import Block, Blocks, check_sharded, settings
from torch import nn
from torch.utils.checkpoint import checkpoint

import smdistributed.modelparallel.torch as smp
from smp_runtime.errors import SMPUserError

HIDDEN = 16


@dataclasses.dataclass
class Answer:
    hidden: torch.Tensor
    note: str


class Odd(nn.Module):
    """Parameters used outside the module that holds them, in every way that scripts do it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, HIDDEN)
        self.attention = nn.MultiheadAttention(HIDDEN, 2, batch_first=True)  # reads its child's weight
        self.parts = nn.ParameterList([nn.Parameter(torch.full((HIDDEN,), 0.1 * i)) for i in range(3)])
        self.frozen = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.unused = nn.Linear(HIDDEN, HIDDEN)
        self.scale = nn.Parameter(torch.ones(HIDDEN))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(HIDDEN, HIDDEN))
        self.inner = Inner()
        self.latents = Latents()

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, seq, 8] -> [batch, seq, 8]
        x = self.first(x) * self.scale
        x = x + self.attention(x, x, x, need_weights=False)[0]
        for part in self.parts:
            x = x + part
        x = self.frozen(torch.tanh(x))
        x = self.normed(self.normed(x))
        x = self.inner(inputs={"x": [x]}).hidden
        x = x + self.latents(x.shape[0])["all"][0]
        return x @ self.first.weight  # of a module that has long been left


class Inner(nn.Module):
    """Takes and returns structures."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, inputs: dict) -> Answer:
        return Answer(torch.tanh(self.layer(inputs["x"][0])), "done")


class Latents(nn.Module):
    """Returns a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.full((3, HIDDEN), 0.1))

    def forward(self, batch: int) -> dict:
        return {"all": [self.values.expand(batch, -1, -1)], "sparse": torch.eye(2).to_sparse()}


class Held(nn.Module):
    """Returns a view in an object of its own kind."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.ones(3, HIDDEN))

    def forward(self) -> Answer:
        return Answer(self.values.t(), "a view")


class Recomputing(Blocks):
    """Blocks that are computed again in backward: one by one, or all together."""

    def __init__(self, together: bool) -> None:
        super().__init__(layers=3, hidden=HIDDEN)
        self.together = together

    def forward(self, x):
        x = self.enter(x)
        if self.together:
            x = checkpoint(self._run_all, x, use_reentrant=False)
        else:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
        return self.leave(x)

    def _run_all(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def _gradients(make, inputs, steps=3, **config):
    """One rank: train, evaluate in between, and compare with plain PyTorch on the same rank."""
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    model = smp.DistributedModel(make())
    ours = smp.DistributedOptimizer(torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1))
    theirs = torch.optim.SGD((p for p in plain.parameters() if p.requires_grad), lr=0.1)
    for step in range(steps):
        torch.manual_seed(10 + step)
        x = torch.randn(*inputs)
        ours.zero_grad(), theirs.zero_grad()
        loss, expected = model(x).square().mean(), plain(x).square().mean()
        loss.backward(), expected.backward()
        torch.testing.assert_close(loss, expected)
        ours.step(), theirs.step()
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x))
        model.eval(), plain.eval()
        torch.testing.assert_close(model(x).detach(), plain(x).detach())
        model.train(), plain.train()
    check_sharded(model)
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, msg=lambda m, n=name: f"{n}: {m}")
    return model.shards.scheduler.peak


def test_parameters_used_in_every_odd_way(ranks):
    ranks(_gradients, 2, Odd, (2, 3, 8), config=settings(Odd(), 2, sdp_max_live_parameters=10**6))


def test_a_view_that_cannot_be_copied_is_refused(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp
        from smp_runtime.errors import SMPUserError

        model = smp.DistributedModel(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), Held()))
        with pytest.raises(
            SMPUserError, match=r"^1 returns an Answer with a view of its parameter.*return view.clone\(\)"
        ):
            model.module[1]()

    ranks(run, 2, config=settings(Odd(), 2, sdp_max_live_parameters=10**6))


@pytest.mark.parametrize("together", [False, True])
def test_activation_checkpointing_gathers_again(ranks, together):
    config = settings(Recomputing(together), 2)
    ranks(_gradients, 2, lambda: Recomputing(together), (4, 8), config=config)


class External(nn.Module):
    """The documented example: the second layer is handed the first one's weight, which a module names as its own too."""

    def __init__(self, register: str | None) -> None:
        super().__init__()
        self.layer1 = nn.Linear(8, 8)
        self.layer2 = Second()
        if register:
            smp.register_parameter({"parent": self, "user": self.layer2}[register], self.layer1.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer2(self.layer1(x), dict.__getitem__(self.layer1._parameters, "weight"))


class Second(nn.Module):
    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight


def test_a_registered_parameter_is_there_and_one_that_is_not_is_loudly_nan(ranks):
    config = settings(External(None), 2)
    for module in ("parent", "user"):
        ranks(_gradients, 2, lambda module=module: External(module), (2, 8), config=config)

    def unregistered():
        import smdistributed.modelparallel.torch as smp

        model = smp.DistributedModel(External(None))
        assert bool(model.layer1.weight.isnan().any())  # outside a call a rank has its own part of it
        assert model.layer1.weight.shape == (8, 8)
        return bool(model(torch.ones(1, 8)).isnan().all())

    assert ranks(unregistered, 2, config=config) == [True, True]


def test_register_parameter_refuses_what_is_none():
    with pytest.raises(SMPUserError, match="register_parameter got a Linear and a Tensor"):
        smp.register_parameter(nn.Linear(1, 1), torch.ones(1))


def test_an_error_in_forward_leaves_nothing_gathered_and_the_job_goes_on(ranks):
    class Failing(Blocks):
        fails = False

        def forward(self, x):
            x = self.blocks[0](self.enter(x))
            if self.fails:
                raise KeyError("nothing to see")
            return self.leave(x)

    def run():
        import smdistributed.modelparallel.torch as smp

        model = smp.DistributedModel(Failing())

        @smp.step
        def step(x):
            model.backward(model(x).mean())

        step(torch.ones(2, 8))
        model.module.fails = True
        with pytest.raises(KeyError):
            step(torch.ones(2, 8))
        assert model.shards.scheduler.elements == 0
        model.module.fails = False
        step(torch.ones(2, 8))
        check_sharded(model)
        return model.shards.touched

    ranks(run, 2, config=settings(Blocks(), 2))


def test_a_model_that_calls_its_modules_in_another_order_each_time(ranks):
    class Shuffled(Blocks):
        count = 0

        def forward(self, x):
            self.count += 1
            x = self.enter(x)
            for index in torch.randperm(4, generator=torch.Generator().manual_seed(self.count)).tolist():
                x = self.blocks[index](x)
            return self.leave(x)

    ranks(_gradients, 2, Shuffled, (2, 8), 6, config=settings(Blocks(), 2))


def test_frozen_blocks_are_sharded_too(ranks):
    def make():
        model = Blocks()
        model.blocks[1].requires_grad_(False)
        model.enter.requires_grad_(False)
        return model

    ranks(_gradients, 2, make, (2, 8), config=settings(Blocks(), 2))


def test_a_block_of_its_own_can_be_saved_and_copied():
    import copy
    import pickle

    block = Block(4)
    assert pickle.loads(pickle.dumps(copy.deepcopy(block))).norm.weight.shape == (4,)
