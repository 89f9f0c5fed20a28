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
