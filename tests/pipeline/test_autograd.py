"""What scripts do with autograd and with the modes of modules inside a step, against one process."""

from __future__ import annotations

import pytest
import torch
from support.training.rank_training import training_step, updates


def _run(case, steps=5):
    """Train four layers, two of them on another stage than the model; returns what this rank has found, by step."""
    import torch
    from support.models.pipeline_models import WIDTH
    from torch import nn

    import smdistributed.modelparallel.torch as smp
    from smp_runtime.context import functions

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.gain = nn.Linear(WIDTH, WIDTH) if case in ("eval inside", "eval of children", "eval left") else None
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            y = self.linear(x) if self.gain is None else self.gain(self.linear(x) * (2.0 if self.training else 0.5))
            if case == "number":
                return y, 1 if self.calls < 14 else 2
            return y * (1.5 if self.training else 1.0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d = (Layer() for _ in range(4))

        def forward(self, x):
            for layer in (self.a, self.b, self.c, self.d):
                x = layer(x)
                x = torch.tanh(x[0] if case == "number" else x)
            return x

    torch.manual_seed(0)
    net = Net().double()
    if smp.pp_size() > 1:
        for path, stage in {"": 0, "a": 1, "b": 0, "c": 1, "d": 0}.items():
            smp.set_partition(net.get_submodule(path), stage)
        if net.a.gain is not None:
            smp.set_partition(net.a.gain, 0)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.005))
    seen = []

    def distance(out, y):
        return (out - y).square().mean()

    def hooked(model, x, y):
        m = model.module
        h, k = m.a(x), m.a(x + 1)
        late = m.c(h)  # handed on before the hook, which sees the gradients of all uses
        h.register_hook(lambda g: g * 3)
        k.register_hook(lambda g: g * 2)
        k.mul_(2.0)
        k.register_hook(lambda g: g + 0.1)
        return distance(m.d(m.c(h) + m.c(k)) + late + h, y), None

    def retaining(model, x, y):
        m = model.module
        h = m.a(x)
        k = m.c(h)
        changed = m.a(x + 1)
        changed.retain_grad()
        changed.mul_(2.0)
        h.retain_grad()
        return distance(m.d(k) + m.c(changed) + h, y), (h, changed)

    def detached(model, x, y):
        m = model.module
        h, k = m.a(x), m.a(x + 1)
        before = k.sum()
        h.detach_()
        k.detach_()
        assert not h.requires_grad
        return distance(m.d(m.c(h)) + h + m.c(k) * k, y) + before, None

    def leaf(model, x, y):
        m = model.module
        with torch.no_grad():
            h, k = m.a(x), m.a(x + 1)
        h.requires_grad_()
        k.requires_grad = True
        return distance(m.d(m.c(h) + m.c(k)) + h, y), (h, k)

    def unrecorded(model, x, y):
        m = model.module
        h = m.a(x)
        with torch.no_grad():
            h.mul_(2.0)
        return distance(m.d(m.c(h)), y), None

    def adversarial(model, x, y):
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(distance(model(x), y), x)
        distance(model(x), y).backward(inputs=[x])
        return distance(model(x.detach() + 0.1 * gradient.sign()), y), (x,)

    def of_result(model, x, y):
        m = model.module
        h = m.a(x)
        (gradient,) = torch.autograd.grad(distance(m.d(m.c(h)) + h, y), h)
        return distance(model(x + gradient), y), None

    def penalty(model, x, y):
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return gradient.square().mean(), None

    def evaluating(model, x, y):
        model.eval()
        with torch.no_grad():
            target = model(x)
        model.train()
        return distance(model(x), y + target), None

    def evaluating_children(model, x, y):
        m = model.module
        h = m.a(x)
        m.c.eval()
        shift = float(h.detach().sum())  # another microbatch may run meanwhile
        m.c.linear.train()
        m.a.gain.eval()
        z = m.d(m.c(h)) + m.a(h)
        model.train()
        return distance(model(z), y + shift), None

    def plain(model, x, y):
        if seen and case == "freeze inside" and not smp.state.is_tracing and len(seen) > 3:
            model.module.a.requires_grad_(False)
        return distance(model(x), y), None

    bodies = {
        "hooks": hooked,
        "retain_grad": retaining,
        "detach_": detached,
        "requires_grad_": leaf,
        "in place without graph": unrecorded,
        "autograd.grad": adversarial,
        "grad of a result": of_result,
        "grad of a result as context parallelism has it": of_result,
        "penalty": penalty,
        "eval inside": evaluating,
        "eval of children": evaluating_children,
    }
    body = bodies.get(case, plain)
    if "context parallelism" in case:
        functions.install()

    @smp.step
    def train(x, y):
        loss, kept = body(model, x, y)
        model.backward(loss)
        gradients = [] if kept is None or smp.state.is_tracing else [t.grad.clone() for t in kept]
        if case == "eval left":
            model.eval()
            model.module.b.train()
        return loss, gradients

    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randn(4, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
        if case in ("freeze", "unfreeze"):
            model.module.a.requires_grad_((step < 4) == (case == "freeze"))
            model.module.d.requires_grad_((step < 4) == (case == "unfreeze"))
        if case in ("freeze owner", "freeze root") and step == 4 and smp.rank() == (case == "freeze owner"):
            model.module.a.requires_grad_(False)
        if case == "eval left" and step % 2:
            model.train()
        optimizer.zero_grad()
        loss, gradients = train(x, y)
        found = {n: p.grad.clone() for n, p in model.local_named_parameters() if p.grad is not None}
        flags = [module.training for module in model.modules()]
        seen.append(([float(each) for each in loss.outputs], [g.outputs for g in gradients], found, flags))
        optimizer.step()
    return seen


def _compared(ranks, case, settings, steps=5):
    expected = ranks(_run, 1, case, steps, config={"microbatches": settings["microbatches"]})[0]
    results = ranks(_run, 2, case, steps, config={"partitions": 2, "auto_partition": False, **settings})
    for step, (losses, gradients, parameters, flags) in enumerate(expected):
        names = set()
        for rank, result in enumerate(results):
            assert result[step][0] == pytest.approx(losses, abs=1e-9), f"step {step}, rank {rank}"
            assert result[step][3] == flags, f"step {step}, rank {rank}"
            torch.testing.assert_close(result[step][1], gradients, rtol=1e-9, atol=1e-9)
            for name, gradient in result[step][2].items():
                torch.testing.assert_close(gradient, parameters[name], rtol=1e-9, atol=1e-9, msg=f"{step}: {name}")
                names.add(name)
        assert names == parameters.keys(), f"step {step}: gradients of {names ^ parameters.keys()}"


SETTINGS = {"microbatches": 2, "default_partition": 0}


@pytest.mark.parametrize(
    "case",
    [
        *("hooks", "retain_grad", "detach_", "requires_grad_", "in place without graph"),
        *("autograd.grad", "grad of a result", "eval inside", "eval of children"),
        "grad of a result as context parallelism has it",
    ],
)
def test_equal_to_one_process(ranks, case):
    _compared(ranks, case, SETTINGS)


def test_flags_that_a_step_leaves_are_those_of_all_ranks(ranks):
    _compared(ranks, "eval left", {**SETTINGS, "microbatches": 1})


@pytest.mark.parametrize("case", ["freeze", "unfreeze"])
def test_parameters_may_be_frozen_between_steps(ranks, case):
    _compared(ranks, case, SETTINGS, steps=7)


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("penalty", ["module 'c' lies on pipeline stage 1", "create_graph=True on stage 0", "smp.set_partition"]),
        (
            "freeze owner",
            ["parameter 'a.linear.weight' has requires_grad=False on pipeline stage 1", "on every rank alike"],
        ),
        (
            "freeze root",
            ["parameter 'a.linear.weight' has requires_grad=True on pipeline stage 1", "on every rank alike"],
        ),
        ("freeze inside", ["module 'a' of pipeline stage 1", "parameter 'weight' was set to False inside the step"]),
        ("number", ["returned (float64[2, 6] with requires_grad, 2) and not (float64[2, 6] with requires_grad, 1)"]),
    ],
)
def test_what_cannot_be_done_is_said(ranks, case, parts):
    errors = ranks(_error, 2, case, config={"partitions": 2, "auto_partition": False, **SETTINGS})
    for error in errors:
        for part in parts:
            assert part in error


def _error(case):
    try:
        _run(case, 8)
    except Exception as error:
        return str(error)
    return "none"


def _reversible(batches):
    """Train a model whose layers run in an autograd function, and once more in its backward; returns the losses."""
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, layers):
            ctx.layers, ctx.x = layers, x.detach()
            for layer in layers:
                x = layer(x)
            return x

        @staticmethod
        def backward(ctx, gradient):
            with torch.enable_grad():
                x = y = ctx.x.requires_grad_()
                for layer in ctx.layers:
                    y = layer.again(y)
            y.backward(gradient)
            return x.grad, None

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.scale = nn.Linear(8, 8), None

        def forward(self, x):
            self.scale = float(x.abs().mean())  # its backward looks at what its forward has left
            return self.again(x)

        def again(self, x):
            return torch.tanh(self.linear(x)) * self.scale

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(4))

        def forward(self, x):
            return Again.apply(x, self.layers)

    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(8, 8), Chain(), nn.Linear(8, 8)))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    step = training_step(model, lambda model, x: model(x).square().mean())
    losses = list(updates(step, optimizer, ((batch,) for batch in batches)))
    if smp.pp_size() == 1:
        return losses, set()
    stage_of = model.pipeline.context.stage_of
    return losses, {stage_of(path) for path in ("1", "1.layers.0.linear", "1.layers.3")}


def test_layers_that_an_autograd_function_runs_again_stay_together(ranks):
    batches = list(torch.randn(4, 4, 8, generator=torch.Generator().manual_seed(1)))
    (alone, _), *_ = ranks(_reversible, 1, batches, config={"microbatches": 2})
    for losses, stages in ranks(_reversible, 2, batches, config={"partitions": 2, "microbatches": 2}):
        assert losses == pytest.approx(alone, rel=1e-5)
        assert len(stages) == 1
