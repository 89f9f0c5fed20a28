"""Mixtures of experts and functions of autograd run on slices where positions do not depend on each other, else on the whole."""

from __future__ import annotations

import copy

import pytest
import torch
from support.ranks.context_threads import cut, run_context, see_sequences, whole_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from smp_runtime.context.proofs.position_wise import prepare

B, T, D = 2, 24, 6


@pytest.fixture(autouse=True)
def functions_see_sequences(monkeypatch):
    see_sequences(monkeypatch)


class TinyExperts(nn.Module):
    """Each position goes to one of two experts, as libraries write it: sorted by expert, and scattered back."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(D, 2), nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def keep(self, chosen: torch.Tensor) -> torch.Tensor:
        """Return the positions of an expert that it takes."""
        return chosen.nonzero()[:, 0]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        flat = hidden.view(-1, D)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            places = self.keep(chosen == number)
            out = out.index_add(0, places, expert(flat[places]) * weights[places, None])
        return out.view(hidden.shape)


class ExpertsWithCapacity(TinyExperts):
    def keep(self, chosen: torch.Tensor) -> torch.Tensor:
        return super().keep(chosen)[: int(chosen.numel() * 0.4)]


class ExpertsWithRoom(TinyExperts):
    """A capacity that shows only if nearly all positions choose one expert."""

    def keep(self, chosen: torch.Tensor) -> torch.Tensor:
        return super().keep(chosen)[: int(chosen.numel() * 0.9) + 1]


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


class ScaleByLargest(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.largest = x.abs().max()
        return x / ctx.largest

    @staticmethod
    def backward(ctx, gradient):
        return gradient / ctx.largest


class SpreadInBlocks(torch.autograd.Function):
    """Move positions away from the mean of their block of four; those of no whole block, and equal ones, stay."""

    @staticmethod
    def forward(ctx, x):
        count = x.shape[1] // 4 * 4
        blocks = x[:, :count].unflatten(1, (-1, 4))
        return torch.cat([(2 * blocks - blocks.mean(2, keepdim=True)).flatten(1, 2), x[:, count:]], 1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Root(torch.autograd.Function):
    """The root of positive numbers; backward a bounded derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient / (4 * x).clip(min=1e-6).sqrt()


class ChangeGradient(torch.autograd.Function):
    """Forward the same; backward what ``change`` makes of the gradient."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.change(gradient), None


class Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, torch.einsum("btd,bte->de", x, gradient)


class AddLoss(torch.autograd.Function):
    """Forward the same; backward a loss beside it has its gradient, as libraries of experts add theirs."""

    @staticmethod
    def forward(ctx, x, loss):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient.new_ones(())


class Projection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return AddLoss.apply(Project.apply(x, self.weight), self.weight.square().sum())


def weights_swapped(_module, _given, weights):
    """Change the results of a router, as a hook."""
    return weights.flip(-1)


class Observed(nn.Module):
    """A loss of all positions that experts leave behind: stored, noted, counted, or of what a hook has seen."""

    class Experts(TinyExperts):
        way: str = ""
        noted: list

        def forward(self, hidden):
            weights = self.router(hidden).softmax(-1)
            balance = weights.mean((0, 1)).square().sum()
            if self.way == "stored":
                self.balance = balance
            if self.way == "stored in training" and self.training:
                self.balance = balance
            if self.way == "noted":
                self.noted.append(balance)
            if self.way == "numbered":
                self.number += hidden.numel()
            if self.way == "counted":
                self.count += weights.detach().sum((0, 1))
            return super().forward(hidden)

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.inner = way, self.Experts()
        self.inner.way, self.inner.noted, self.inner.number = way, [], 0
        self.inner.register_buffer("count", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "stored in training":
            self.inner.eval()(x)
            self.inner.train()
        noted = self.inner.noted
        watch = weights_swapped if self.way == "changed" else lambda _, __, weights: noted.append(weights)
        hook = self.inner.router.register_forward_hook(watch)
        if self.way not in ("seen", "changed"):
            hook.remove()
        y = self.inner(x)
        hook.remove()
        found = {
            "stored": lambda: self.inner.balance,
            "stored in training": lambda: self.inner.balance,
            "noted": lambda: noted[-1],
            "counted": lambda: self.inner.count,
            "numbered": lambda: torch.tensor(float(self.inner.number)),
            "changed": lambda: torch.ones(1),
            "seen": lambda: noted[-1].softmax(-1).mean(-2).square().sum(),
        }[self.way]()
        return y * found.sum() + len(noted)


class Net(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.middle, self.last = nn.Linear(D, D), middle, nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)) + x)


class OfFunction(nn.Module):
    def __init__(self, function, *more) -> None:
        super().__init__()
        self.function, self.more = function, more

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(x, *self.more)


class OfPositive(OfFunction):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.sigmoid())


class Recomputed(nn.Module):
    """A block that runs again in backward, in PyTorch's older way or its newer one; attention inside sees all positions."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant, self.scale = reentrant, nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.attend, x, 2.0, use_reentrant=self.reentrant)

    def attend(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        x = self.scale(x)
        return nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None] * factor, is_causal=True)[
            :, 0
        ]


CASES = {
    "recomputed with re-entry": (lambda: Recomputed(True), True),
    "recomputed without": (lambda: Recomputed(False), True),
    "experts": (TinyExperts, True),
    "experts with capacity": (ExpertsWithCapacity, False),
    "experts with a capacity that few reach": (ExpertsWithRoom, False),
    "function": (lambda: OfFunction(Scale, 3.0), True),
    "experts that store a loss": (lambda: Observed("stored"), False),
    "experts that store a loss in training": (lambda: Observed("stored in training"), False),
    "experts that note a loss elsewhere": (lambda: Observed("noted"), False),
    "experts that count": (lambda: Observed("counted"), False),
    "experts that keep a number": (lambda: Observed("numbered"), False),
    "experts whose hooks change": (lambda: Observed("changed"), True),
    "experts whose hooks see positions": (lambda: Observed("seen"), True),
    "function of the largest": (lambda: OfFunction(ScaleByLargest), False),
    "function with limits in backward": (lambda: OfFunction(ChangeGradient, lambda g: g.clamp(-0.001, 0.001)), True),
    "function that adds in backward": (lambda: OfFunction(ChangeGradient, lambda g: g + 0.1), True),
    "function of the norm in backward": (lambda: OfFunction(ChangeGradient, lambda g: g / g.norm()), False),
    "function of positive numbers": (lambda: OfPositive(Root), True),
    "functions with parameters": (Projection, True),
}


def test_too_few_positions_prove_nothing():
    net = Net(OfFunction(SpreadInBlocks)).double()
    x = torch.randn(B, 6, D, dtype=torch.float64)
    expected = net(x).detach()
    for out in run_context(2, lambda group: whole_of(net(cut(x, group))).detach()):
        torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_equal_the_whole(case):
    make, runs_on_slices = CASES[case]
    torch.manual_seed(0)
    net = Net(make()).double()
    x = torch.randn(B, T, D, dtype=torch.float64)
    copies = [copy.deepcopy(net) for _ in range(3)]
    expected = net(x)
    expected.square().mean().backward()

    def run(group):
        model = copies[group.rank]
        prepare(model.modules())
        out = model(cut(x, group))
        out.square().mean().backward()
        gathered = set(group.gathered)
        return whole_of(out).detach(), gathered

    for out, gathered in run_context(3, run):
        torch.testing.assert_close(out, expected.detach(), atol=1e-12, rtol=1e-12)
        assert bool(gathered) != runs_on_slices
    for name, parameter in net.named_parameters():
        mine = torch.stack([dict(model.named_parameters())[name].grad for model in copies]).mean(0)
        torch.testing.assert_close(mine, parameter.grad, atol=1e-12, rtol=1e-12)


def test_a_capacity_shows_although_samples_of_the_batch_choose_different_experts():
    net = Net(ExpertsWithRoom()).double()
    with torch.no_grad():
        net.first.weight.copy_(torch.eye(D)), net.first.bias.zero_()
        net.middle.router.weight.zero_()[:, 0] = torch.tensor([1.0, -1.0])
    x = torch.randn(B, T, D, dtype=torch.float64)
    x[0, :, 0], x[1, :, 0] = 20, -20  # more than the noise of a proof can turn
    copies = [copy.deepcopy(net) for _ in range(2)]

    def run(group):
        model = copies[group.rank]
        prepare(model.modules())
        out = model(cut(x, group)).detach()
        gathered = set(group.gathered)
        return whole_of(out), gathered

    for out, gathered in run_context(2, run):
        torch.testing.assert_close(out, net(x).detach(), atol=1e-12, rtol=1e-12)
        assert gathered


def decaying_scan(x, gate, shared, decay, state=None, return_state=False):
    """Remember ``[batch, positions, channels]`` with a decay for each channel."""
    state = torch.zeros_like(x[:, 0]) if state is None else state
    out = []
    for place in range(x.shape[1]):
        state = state * torch.exp(-decay.abs() * gate[:, place].sigmoid()) + x[:, place] * shared[:, place]
        out.append(torch.tanh(state))
    return torch.stack(out, 1), state if return_state else None


def mixing_scan(x, gate, shared, decay, return_state=False):
    out, state = decaying_scan(x, gate, shared, decay, return_state=return_state)
    return out + x.mean(2, keepdim=True), state


class Scanning(nn.Module):
    """Call a scan by the name in this file, or by an attribute."""

    def __init__(self, own=None) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.gate, self.decay = nn.Linear(D, D), nn.Parameter(torch.randn(D))
        self.own = own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scan = decaying_scan if self.own is None else self.own
        out, state = scan(x, self.gate(x), x[..., :1], self.decay, return_state=True)
        return out * 2 + state[:, None]


@pytest.mark.parametrize("ranks", [2, 3])
def test_scans_run_by_channel(monkeypatch, ranks):
    monkeypatch.setitem(globals(), "decaying_scan", decaying_scan)  # which is put back
    for received, gathered in _train_scan(Scanning(), ranks):
        assert not gathered
        # Four exchanges of a part of the channels in each pass, the column that all share, and the state.
        assert received < 8 * B * T * D * 8


def test_scans_that_mix_channels_run_whole(monkeypatch):
    monkeypatch.setitem(globals(), "decaying_scan", decaying_scan)
    for _, gathered in _train_scan(Scanning(mixing_scan), 2):
        assert gathered.keys() == {"mixing_scan"}


def test_modules_with_scans_are_copied(monkeypatch):
    monkeypatch.setitem(globals(), "mixing_scan", mixing_scan)
    net = Scanning(mixing_scan)
    prepare(net.modules())
    given = torch.randn(B, T, D)
    assert torch.equal(copy.deepcopy(net)(given), net(given))


def _train_scan(net, ranks):
    """Compare values and gradients with one process; return what each rank received, and what it gathered."""
    net = Net(net).double()
    given = torch.randn(B, T, D, dtype=torch.float64)
    wanted = net(given)
    (wanted * wanted).sum().backward()
    gradients = [one.grad for one in net.parameters()]
    copies = [copy.deepcopy(net) for _ in range(ranks)]

    def rank(group):
        mine = copies[group.rank]
        mine.zero_grad()
        prepare(mine.modules())
        found = mine(cut(given, group))
        (found * found).sum().backward()
        received, gathered = group.received, dict(group.gathered)
        return whole_of(found), [one.grad for one in mine.parameters()], received, gathered

    everyone = run_context(ranks, rank)
    for found, *_ in everyone:
        torch.testing.assert_close(found, wanted, atol=1e-10, rtol=1e-10)
    for place, gradient in enumerate(gradients):
        mean = sum(theirs[place] for _, theirs, *_ in everyone) / ranks
        torch.testing.assert_close(mean, gradient, atol=1e-10, rtol=1e-10)
    return [(received, gathered) for *_, received, gathered in everyone]
