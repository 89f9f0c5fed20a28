"""Models whose forward pass puts modules in the place of others: alike on all stages, or an error on all of them."""

from __future__ import annotations

import pytest
import torch
from support.training.closeness import close
from support.training.reference import divided, train_alone
from torch import nn

WIDTH, STEPS, BATCH = 8, 3, 4


class Long(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return self.linear(x).tanh()


class Short(Long):
    """What stands in its place for short samples, with the same parameters and a module more."""

    def __init__(self, linear):
        super().__init__(linear)
        self.norm = nn.Softsign()

    def forward(self, x):
        return self.norm(super().forward(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Long(nn.Linear(WIDTH, WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.out(self.inner(x))


class Switching(nn.Module):
    """As some models of Transformers do, it switches its layers to another kind when a sample is short."""

    def __init__(self):
        super().__init__()
        self.kind = Long
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x):
        if x.shape[1] < 4 and self.kind is Long:
            self.kind = Short
            for layer in self.layers:
                layer.inner = Short(layer.inner.linear)
        for layer in self.layers:
            x = layer(x)
        return x


class Restless(Switching):
    def forward(self, x):
        for layer in self.layers:
            layer.inner = Long(layer.inner.linear)
        return super().forward(x)


class Renovated(Layer):
    """With a module that it makes anew in every call."""

    def forward(self, x):
        self.inner = Long(self.inner.linear)
        return super().forward(x)


class Renovating(Switching):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Renovated() for _ in range(4))


class Renewing(Switching):
    """With new parameters."""

    def forward(self, x):
        if self.kind is Long:
            self.kind = Short
            self.layers[0].inner = Short(nn.Linear(WIDTH, WIDTH))
        return super().forward(x)


KINDS = {kind.__name__: kind for kind in (Switching, Restless, Renovating, Renewing)}


def _model(kind):
    torch.manual_seed(0)
    return KINDS[kind]()


def _batch(length, step):
    return (torch.randn(BATCH, length, WIDTH, generator=torch.Generator().manual_seed(step)),)


def _loss(model, x):
    return model(x).square().mean()


def _optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def _train(kind, lengths):
    """Losses, the state, and the stages that have parameters; or what a rank raises."""
    import smdistributed.modelparallel.torch as smp

    model = smp.DistributedModel(_model(kind))
    optimizer = smp.DistributedOptimizer(_optimizer(model.parameters()))

    @smp.step
    def step(x):
        loss = _loss(model, x)
        model.backward(loss)
        return loss

    losses = []
    try:
        for number, length in enumerate(lengths):
            optimizer.zero_grad()
            losses.append(float(step(*_batch(length, number)).reduce_mean()))
            optimizer.step()
    except RuntimeError as error:  # of another stage
        return str(error)
    except ValueError as error:
        return str(error)
    stages = {record.placement.stage for record in model.registry}
    return losses, model.state_dict(), stages, type(model.module.layers[0].inner).__name__


CONFIG = {"pipeline_parallel_degree": 2, "microbatches": 2}


@pytest.mark.parametrize(("kind", "length", "inner"), [("Switching", 3, "Short"), ("Renovating", 5, "Long")])
def test_the_partition_survives_what_calls_change(ranks, kind, length, inner):
    trained = train_alone(_model(kind), _optimizer, [])
    for number in range(STEPS):
        trained.step(divided(_batch(length, number), 2), _loss)
    for losses, state, stages, found in ranks(_train, 2, kind, [length] * STEPS, config=CONFIG):
        assert losses == pytest.approx(trained.losses, abs=1e-6)
        assert stages == {0, 1}
        assert found == inner
        for name, value in trained.model.state_dict().items():
            close(state[name], value, name)


@pytest.mark.parametrize(
    ("kind", "lengths", "said"),
    [
        ("Restless", [5], "replaced modules in 'layers."),
        ("Renewing", [5], "its parameters are others then"),
        ("Switching", [5, 3], "replaced modules in 'layers."),
    ],
)
def test_what_it_cannot_survive_is_an_error_on_every_rank(ranks, kind, lengths, said):
    for found in ranks(_train, 2, kind, lengths, config=CONFIG, timeout=30):
        assert said in found
