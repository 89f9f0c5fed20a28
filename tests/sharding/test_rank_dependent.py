"""Ranks whose batches use other parameters of the same modules, and ranks whose losses use other modules."""

from __future__ import annotations

import pytest
import torch
from support.training.reference import Alone, train_alone
from support.training.sharded_training import settings
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, LAYERS, STEPS, WORLD = 8, 3, 4, 2
#: By step, whether a rank's batch has images.
PATTERNS = {
    "first window": lambda step, rank: step > 0 or rank == 1,
    "later windows": lambda step, rank: step == 0 or rank == 0,
    "appears late": lambda step, rank: step > 1 and rank == 1,
    "alternating": lambda step, rank: step % WORLD == rank,
}


class Layer(nn.Module):
    """A block with a token, and a projection, that only images need."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.token = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.projection = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: torch.Tensor, images: bool) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if images:
            hidden = hidden * self.token + x @ self.projection
        return x + self.second(hidden)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, images: bool) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x, images and number == 1)
        return self.last(x)


def _inputs(step, number, rank, microbatches):
    return torch.randn(
        2 * microbatches, WIDTH, generator=torch.Generator().manual_seed(100 * step + 10 * number + rank)
    )


def _sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def _train(uses, microbatches, passes):
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    model = smp.DistributedModel(Net(), backward_passes_per_step=passes)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step(non_split_inputs=["images"])
    def step(x, images):
        model.backward(model(x, images).square().mean() / passes)

    for index in range(STEPS):
        optimizer.zero_grad()
        for number in range(passes):
            images = uses(index, smp.rank()) and number == 0
            step(_inputs(index, number, smp.rank(), microbatches), images)
        optimizer.step()
    return model.state_dict()


def _alone(uses, microbatches, passes):
    torch.manual_seed(0)
    alone = Alone(Net(), _sgd)
    for index in range(STEPS):
        pieces = [
            (_inputs(index, number, rank, microbatches), uses(index, rank) and number == 0)
            for number in range(passes)
            for rank in range(WORLD)
        ]
        alone.step(pieces, lambda model, *piece: model(*piece).square().mean())
    return alone.weights


@pytest.mark.parametrize(
    ("bucket", "microbatches", "passes"),
    [(5e8, 2, 2), *(pytest.param(*each, marks=pytest.mark.full) for each in [(1, 1, 1), (5e8, 1, 1), (1, 2, 2)])],
)
def test_parameters_that_only_some_ranks_use(ranks, bucket, microbatches, passes):
    """With the smallest bucket every unit has collectives of its own."""
    config = settings(Net(), WORLD, microbatches=microbatches, sdp_reduce_bucket_size=int(bucket))

    def run():
        return {name: _train(uses, microbatches, passes) for name, uses in PATTERNS.items()}

    for found in ranks(run, WORLD, config=config):
        for name, uses in PATTERNS.items():
            for key, value in _alone(uses, microbatches, passes).items():
                torch.testing.assert_close(found[name][key], value, atol=1e-5, rtol=1e-5, msg=f"{name}: {key}")


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = torch.tanh(self.body(x))
        return [torch.tanh(self.a(x)), torch.tanh(self.b(x))]


class Exits(nn.Module):
    """Blocks with two results each, and a head behind every block: a loss takes some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(TwoHeads() for _ in range(LAYERS))
        self.exits = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, how: str, chosen: int) -> torch.Tensor:
        x = self.embedding(x)
        exits, extra = [], torch.zeros_like(x)
        for number, block in enumerate(self.blocks):
            x, other = checkpoint(block, x, use_reentrant=False) if how == "checkpointed" else block(x)
            exits.append(self.exits[number](x))
            if chosen >> number & 1:
                extra = extra + other
        if how == "results":  # blocks' second results only
            return self.exits[-1](x + extra)
        if how == "nothing":  # the blocks not at all
            return exits[0].sum() * 0 if chosen == 0 else exits[-1]
        return exits[chosen % LAYERS]


#: By kind, what a rank's loss takes: by step, microbatch and rank.
CHOICES = {
    "results": lambda *where: [5, 5, 0, 4, 4, 5, 0, 5, 1, 4, 5, 0][(4 * where[0] + 2 * where[2] + where[1]) % 12],
    "exits": lambda step, number, rank: step + number + 2 * rank,
    "same exits": lambda step, number, rank: rank,
    "checkpointed": lambda step, number, rank: step + number + rank,
    "nothing": lambda step, number, rank: rank,
}


def _exit(kind, index, number, rank):
    return kind.split()[-1], CHOICES[kind](index, number, rank)


#: Bucket sizes and most live elements; small ones give every unit collectives of its own, and few units room.
LIMITS = [(5e8, 1e9), (1, 1e9), (5e8, 300), (1, 300)]


@pytest.mark.parametrize(
    ("kind", "limits"),
    [
        pytest.param(kind, limits, marks=[] if number % 3 == index else pytest.mark.full)
        for number, kind in enumerate(CHOICES)
        for index, limits in enumerate(LIMITS[:2] if kind == "checkpointed" else LIMITS)
    ],
)
def test_losses_that_take_other_results_on_other_ranks(ranks, kind, limits):
    """Early exits: backward leaves out other modules on each rank."""

    def run():
        import smdistributed.modelparallel.torch as smp

        torch.manual_seed(0)
        model = smp.DistributedModel(Exits().double())
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        def backward(index, number):
            x = _inputs(index, number, smp.rank(), 1).double()
            model(x, *_exit(kind, index, number, smp.rank())).sum().backward()

        for index in range(STEPS):
            optimizer.zero_grad()
            with model.no_sync():
                backward(index, 0)
            backward(index, 1)
            optimizer.step()
        return model.state_dict()

    torch.manual_seed(0)
    alone = Exits().double()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for index in range(STEPS):
        optimizer.zero_grad()
        for number in range(2):
            for rank in range(WORLD):
                x = _inputs(index, number, rank, 1).double()
                (alone(x, *_exit(kind, index, number, rank)).sum() / WORLD).backward()
        optimizer.step()
    bucket, live = map(int, limits)
    config = settings(Exits(), WORLD, sdp_reduce_bucket_size=bucket, sdp_max_live_parameters=live)
    for found in ranks(run, WORLD, config=config):
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(found[name], value, msg=name)


def test_a_loss_that_depends_on_all_outputs_is_accepted(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        torch.manual_seed(0)
        model = smp.DistributedModel(TwoHeads())
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            optimizer.zero_grad()
            outputs = model(torch.ones(2, WIDTH))
            (outputs[smp.rank()].sum() + 0 * outputs[1 - smp.rank()].sum()).backward()
            optimizer.step()
        return model.state_dict()

    torch.manual_seed(0)
    batches = [(torch.ones(2, WIDTH),)] * 3
    alone = train_alone(TwoHeads(), _sgd, batches, lambda model, x: sum(output.sum() for output in model(x)) / 2)
    for state in ranks(run, WORLD, config=settings(TwoHeads(), WORLD)):
        for name, value in alone.weights.items():
            torch.testing.assert_close(state[name], value, atol=1e-5, rtol=1e-5)


class Mixture(nn.Module):
    """Each token goes to one expert; experts without tokens are not called."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [tokens, width]
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        result = x * 0.5
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero().flatten()
            result = result.index_add(0, rows, self.experts[number](x[rows]) * weights[rows, None])
        return result


class Mixtures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"mixture": Mixture()}) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer["mixture"](x)
        return x


def _routed(index, rank):
    """Tokens alike on a rank, so that they go to few experts, and others on each rank and in each step."""
    first = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(10 * index + rank))
    return 3 * first + 0.01 * torch.arange(4.0)[:, None]


@pytest.mark.parametrize("bucket", [5e8, 1])
def test_experts_that_only_some_ranks_have_tokens_for(ranks, bucket):
    def run():
        import smdistributed.modelparallel.torch as smp

        torch.manual_seed(0)
        model = smp.DistributedModel(Mixtures())
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        @smp.step
        def step(x):
            model.backward(model(x).square().mean())

        for index in range(8):
            optimizer.zero_grad()
            step(_routed(index, smp.rank()))
            optimizer.step()
        return model.state_dict()

    torch.manual_seed(0)
    alone = Alone(Mixtures(), _sgd)
    called = set()
    for part in range(2):
        for number, expert in enumerate(alone.model.layers[part]["mixture"].experts):
            expert.register_forward_hook(lambda *_, which=(part, number): called.add(which))
    seen = []
    for index in range(8):
        pieces = [(rows,) for rank in range(WORLD) for rows in _routed(index, rank).chunk(2)]
        alone.step(pieces, lambda model, x: model(x).square().mean())
        for rank in range(WORLD):
            called.clear()
            alone.model(_routed(index, rank))
            seen.append(frozenset(called))
    assert any(one != other for one, other in zip(seen[::2], seen[1::2], strict=True)), (
        "all ranks call the same experts"
    )
    config = settings(Mixtures(), WORLD, microbatches=2, sdp_reduce_bucket_size=int(bucket))
    for state in ranks(run, WORLD, config=config):
        for name, value in alone.weights.items():
            torch.testing.assert_close(state[name], value, atol=1e-5, rtol=1e-5)
