"""What a forward pass without backward leaves gathered, or an error does, disturbs nothing that follows."""

from __future__ import annotations

import copy

import pytest
import torch
from support.training.sharded_training import Blocks, check_sharded, settings
from torch import nn

LAYERS = 6


class _Pair:
    """A sharded model and the same one in plain PyTorch, on every rank with the same samples."""

    def __init__(self, make) -> None:
        import smdistributed.modelparallel.torch as smp

        torch.manual_seed(0)
        self.plain = make()
        self.model = smp.DistributedModel(copy.deepcopy(self.plain))
        self.ours = smp.DistributedOptimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.theirs = torch.optim.SGD(self.plain.parameters(), lr=0.1)
        self._steps = 0

        @smp.step
        def step(x):
            loss = self.model(x).square().mean()
            self.model.backward(loss)
            return loss

        self._step = step

    def train(self, steps: int, *, decorated: bool, between=lambda: None) -> None:
        for _ in range(steps):
            self._steps += 1
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(self._steps))
            self.ours.zero_grad(), self.theirs.zero_grad()
            expected = self.plain(x).square().mean()
            expected.backward()
            if decorated:
                loss = self._step(x).reduce_mean()
            else:
                loss = self.model(x).square().mean()
                loss.backward()
            torch.testing.assert_close(loss, expected)
            between()
            self.ours.step(), self.theirs.step()

    def check(self) -> None:
        check_sharded(self.model)
        state = self.model.state_dict()
        for name, value in self.plain.state_dict().items():
            torch.testing.assert_close(state[name], value, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("how", "decorated"), [("whole", True), ("whole", False), ("checkpoint", False)])
def test_a_state_is_loaded_after_a_forward_pass_without_backward(ranks, tmp_path, how, decorated):
    def run():
        import smdistributed.modelparallel.torch as smp

        pair = _Pair(lambda: Blocks(LAYERS))
        pair.train(2, decorated=decorated)
        good, expected = pair.model.state_dict(), copy.deepcopy(pair.plain.state_dict())
        if how == "checkpoint":
            smp.save_checkpoint(str(tmp_path), tag="good")
        pair.train(2, decorated=decorated)
        assert pair.model(torch.ones(4, 8)).isfinite().all()  # a script that finds NaN here would go back
        if how == "checkpoint":
            smp.resume_from_checkpoint(str(tmp_path), tag="good")
        else:
            pair.model.load_state_dict(good)
        pair.plain.load_state_dict(expected)
        pair.train(3, decorated=decorated)
        pair.check()

    ranks(run, 2, config=settings(Blocks(), 2))


def test_an_update_after_a_forward_pass_without_backward_is_seen(ranks):
    def run():
        pair = _Pair(lambda: Blocks(LAYERS))
        for _ in range(3):
            pair.train(1, decorated=False, between=lambda: pair.model(torch.ones(4, 8)))
        pair.check()

    ranks(run, 2, config=settings(Blocks(), 2))


class Failing(Blocks):
    fails = False

    def __init__(self) -> None:
        super().__init__(LAYERS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if self.fails and index == 2:
                raise KeyError("nothing to see")
        return self.leave(x)


def test_an_error_in_an_evaluation_leaves_nothing_gathered_and_training_goes_on(ranks):
    decorated = False

    def run():
        pair = _Pair(Failing)
        pair.train(2, decorated=decorated)
        with torch.no_grad():
            pair.model(torch.ones(2, 8))  # now the next one fetches ahead
            pair.model.module.fails = True
            with pytest.raises(KeyError):
                pair.model(torch.ones(2, 8))
        assert pair.model.shards.scheduler.elements == 0
        pair.model.module.fails = False
        pair.train(3, decorated=decorated)
        pair.check()

    ranks(run, 2, config=settings(Blocks(), 2))


class Adapted(nn.Module):
    """A frozen layer with a trained one of low rank beside it, over what came before and a memory."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(2 * hidden, hidden).requires_grad_(False)
        self.down = nn.Linear(2 * hidden, 1)
        self.up = nn.Linear(1, hidden)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        both = torch.cat([x, memory], -1)
        return x + torch.tanh(self.frozen(both) + self.up(self.down(both)))


class Decoder(nn.Module):
    """Layers that all read what an encoder gives, as with adapters in an encoder-decoder."""

    def __init__(self, layers: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.encode = nn.Linear(8, hidden)
        self.layers = nn.ModuleList(Adapted(hidden) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = memory = self.encode(x)
        for layer in self.layers:
            x = layer(x, memory)
        return x


def test_frozen_layers_that_share_an_input_are_let_go_one_by_one(ranks):
    def run():
        pair = _Pair(Decoder)
        pair.train(3, decorated=True)
        pair.check()

    ranks(run, 2, config=settings(Decoder(), 2, sdp_max_live_parameters=3 * 528))


class Shifted(Blocks):
    """Multiplies by a parameter; in its second call it writes into that, or into what it has computed of it."""

    writes = ""

    def __init__(self) -> None:
        super().__init__(LAYERS)
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x * self.gain * self.gain)
        if self.writes == "gain":
            with torch.no_grad():
                self.gain.mul_(0.5)
        elif self.writes == "result":
            with torch.no_grad():
                x.add_(1.0)
        return super().forward(x)


def _assign(module: nn.Module, name: str) -> None:
    for each, parameter in module.named_parameters():
        if each.endswith(name):
            parameter.data = torch.full(parameter.shape, 0.25)


@torch.no_grad()
def _write_in_place(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.mul_(0.5)


def _view_and_assign(module: nn.Module) -> None:
    views = [parameter.detach().view(-1)[:1].view(1) for parameter in module.parameters()]
    _assign(module, "weight")
    del views


#: What happens between forward and backward, and what the error names.
LOST = {
    "assigned": (lambda module: _assign(module, "weight"), "leave.weight had in forward, but data was assigned"),
    "viewed and assigned": (_view_and_assign, "leave.weight had in forward, but data was assigned"),
    "written in place": (_write_in_place, "leave.weight had in forward, but it was written into"),
    "updated": (lambda module: None, "leave.weight had in forward, but the optimizer has updated it"),
    "written in a call": (lambda module: _call_writing(module, "gain"), "gain had in forward, but it was written into"),
    "a result is written in a call": (lambda module: setattr(module, "writes", "result"), "modified by an in-place operation"),
}  # fmt: skip


def _call_writing(module: nn.Module, what: str) -> None:
    module.writes = what
    module(torch.ones(4, 8))
    module.writes = ""


@pytest.mark.parametrize("how", LOST)
def test_a_value_that_backward_needs_and_no_rank_has_is_missed(ranks, how):
    change, words = LOST[how]

    def run():
        import smdistributed.modelparallel.torch as smp
        from smp_runtime.errors import SMPUserError

        pair = _Pair(Shifted)
        pair.train(2, decorated=False)
        before = how.startswith("a result")
        if before:
            change(pair.model.module)
        loss = pair.model(torch.ones(4, 8)).square().mean()
        if not before:
            change(pair.model.module)
        if how == "updated":
            pair.model(torch.ones(4, 8)).sum().backward()
            pair.ours.step()
        with pytest.raises(SMPUserError, match=words) as raised:
            loss.backward()
        assert raised.value.code == "SMP308"
        smp.barrier()  # a rank that leaves first would close the other's connections

    ranks(run, 2, config=settings(Shifted(), 2))


def test_values_that_backward_does_not_need_may_change(ranks):
    """Biases of linear layers, whose weights in the same units backward needs."""

    def run():
        pair = _Pair(Shifted)
        modules = (pair.model.module, pair.plain)
        modules[0].blocks[1].requires_grad_(False), modules[1].blocks[1].requires_grad_(False)
        pair.train(2, decorated=False)
        losses = [model(torch.ones(4, 8)).square().mean() for model in (pair.model, pair.plain)]
        pair.ours.zero_grad(), pair.theirs.zero_grad()
        for module in modules:
            _assign(module, "leave.bias"), _assign(module, "mlp.0.bias"), _assign(module, "mlp.2.bias")
        for loss in losses:
            loss.backward()
        pair.ours.step(), pair.theirs.step()
        pair.train(2, decorated=True)
        pair.check()

    ranks(run, 2, config=settings(Shifted(), 2))
