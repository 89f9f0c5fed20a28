"""Backward passes in two halves: every gradient is that of PyTorch's own, once what was left for later has been computed."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from support.matrix import sampled
from torch import nn
from torch.utils.checkpoint import checkpoint

from smp_runtime.tensors.split_operations import SplitOperations
from smp_runtime.tensors.weight_gradients import WeightGradients, split_inside, weight_gradient_later

WIDTH = 6


class Conv1D(nn.Module):
    """Transformers' linear layer of GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return torch.addmm(self.bias, x.reshape(-1, WIDTH), self.weight).view(x.shape)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return x @ self.weight + torch.matmul(x, self.weight)  # twice the same


class Convolved(nn.Module):
    def __init__(self, dimensions: int, **options) -> None:
        super().__init__()
        self.dimensions = dimensions
        self.inner = getattr(nn, f"Conv{dimensions}d")(WIDTH, WIDTH, 3, **options)

    def forward(self, x):
        shape = (x.shape[0], WIDTH, *([5] * self.dimensions))
        grown = x.flatten(1)[:, :WIDTH].reshape(x.shape[0], WIDTH, *([1] * self.dimensions)).expand(shape)
        return x + self.inner(grown * 1.5).flatten(1).mean(1)[:, None, None]


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GroupNorm(2, 4)

    def forward(self, x):
        return self.inner(x)


class Chunked(nn.Module):
    """One weight for three uses, by chunks of its result and of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        first, *_ = self.qkv.weight.chunk(3, 0)  # no leaf: it stays whole
        return F.scaled_dot_product_attention(q, k, v) + F.linear(x, first)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return x + self.second(torch.tanh(self.first(x)))


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH, padding_idx=2)
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        ids = torch.arange(x.shape[1]).expand(x.shape[:2]) % 7
        return x + self.table(ids) * self.head(x).logsumexp(-1, keepdim=True)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.reentrant = reentrant

    def forward(self, x):
        return x + checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Unused(nn.Module):
    """Some outputs and parameters get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.dropped, self.frozen = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.frozen.weight.requires_grad_(False)

    def forward(self, x):
        self.dropped(x)
        return self.frozen(self.used(x))


class Listened(nn.Module):
    """Somebody listens to the gradient of a weight, which must come whole."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.inner.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    def forward(self, x):
        return self.inner(x) + self.inner(x * 2)


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors

        def of_weight():
            return (gradient * x).flatten(0, -2).sum(0)

        return gradient * weight, None if weight_gradient_later(weight, of_weight) else of_weight()


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return Own.apply(x, self.weight)


class Penalised(nn.Module):
    """A gradient inside the forward pass, which is differentiated again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        inner = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.inner(inner).sum(), inner, create_graph=True)
        return self.inner(x) + slope


class Batched(nn.Module):
    """A layer inside ``vmap``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.vmap(self.inner)(x)


PARTS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "without bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "conv1d of transformers": Conv1D,
    "product": Product,
    "convolution 1": lambda: Convolved(1, padding=1),
    "convolution 2": lambda: Convolved(2, stride=2, groups=2, bias=False),
    "convolution 3": lambda: Convolved(3, padding="valid"),
    "same": lambda: Convolved(1, padding="same"),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "layer norm over two": lambda: nn.LayerNorm((4, WIDTH)),
    "group norm": Grouped,
    "chunks": Chunked,
    "tied": Tied,
    "embedding": Embedded,
    "checkpointed": lambda: Checkpointed(False),
    "checkpointed, reentrant": lambda: Checkpointed(True),
    "unused": Unused,
    "listened": Listened,
    "own function": OwnFunction,
    "penalised": Penalised,
    "vmap": Batched,
    "recurrent": lambda: _Recurrent(),
    "multihead attention": lambda: Multihead(True),
    "multihead attention over others": lambda: Multihead(False),
}


class Multihead(nn.Module):
    """PyTorch's attention, whose products are inside one function."""

    def __init__(self, to_itself: bool) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.to_itself = to_itself

    def forward(self, x):
        others = x if self.to_itself else x.flip(1)
        return self.inner(x, others, others, need_weights=self.to_itself)[0]


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.inner(x)[0]


def gradients(model, splits):
    """Two microbatches through forward and backward; what each parameter gets, and how much was left for later."""
    left, most = WeightGradients(), 0
    left.is_open = True
    for number in range(2):
        x = torch.randn(
            3, 4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(number)
        ).requires_grad_()
        if splits:
            with split_inside(left, SplitOperations()):
                model(x).square().mean().backward()
        else:
            model(x).square().mean().backward()
        most += bool(left)
        yield_input = x.grad.clone()
        left.run()
    found = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found, yield_input, most


def same(model):
    expected, wanted, _ = gradients(model, False)
    found, got, times = gradients(model, True)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    for name, value in expected.items():
        assert (value is None) == (found[name] is None), name
        if value is not None:
            torch.testing.assert_close(
                found[name], value, rtol=1e-11, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}"
            )
    return times


#: Nothing of these can come later.
WHOLE = {"same", "listened", "vmap", "recurrent"}


@pytest.mark.parametrize("name", PARTS)
def test_gradients_are_those_of_a_whole_backward_pass(name):
    torch.manual_seed(3)
    assert (same(PARTS[name]().double()) == 0) == (name in WHOLE)


def test_what_attention_projects_is_taken_apart_too():
    for to_itself, late in ((True, 4), (False, 2)):  # a chunk of its weight is no leaf
        attention, x, left = Multihead(to_itself), torch.randn(2, 4, WIDTH), WeightGradients()
        left.is_open = True
        with split_inside(left, SplitOperations()):
            attention(x).sum().backward()
        missing = [name for name, parameter in attention.named_parameters() if parameter.grad is None]
        left.run()
        assert len(missing) == late
        assert all(parameter.grad is not None for parameter in attention.parameters())


@pytest.mark.parametrize(
    ("first", "second"),
    sampled(list(itertools.product(PARTS, PARTS)), {("tied", "chunks"), ("penalised", "checkpointed")}),
)
def test_parts_after_each_other_and_around_a_residual(first, second):
    torch.manual_seed(5)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = PARTS[first](), PARTS[second]()

        def forward(self, x):
            middle = self.first(x)
            return self.second(middle * 0.5) + middle + self.first(x.cos())

    same(Two().double())


def test_only_a_pass_that_adds_to_leaves_leaves_anything():
    layer, x, left = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True), WeightGradients()
    with split_inside(left, SplitOperations()):
        (of_weight,) = torch.autograd.grad(layer(x).sum(), layer.weight)
        assert not left
        layer(x).sum().backward()  # not under model.backward
        assert not left
        left.is_open = True
        (again,) = torch.autograd.grad(layer(x).sum(), layer.weight)
        layer(x).sum().backward(inputs=[x])
        assert not left
        layer(x).sum().backward()
        assert left
    torch.testing.assert_close(of_weight, again)
    before = layer.weight.grad.clone()
    left.run()
    torch.testing.assert_close(layer.weight.grad, before + of_weight)


@pytest.mark.parametrize("ours", [True, False])
def test_who_listens_to_a_weight_hears_its_gradient_once_it_is_there(ours):
    layer, seen, left = nn.Linear(4, 4), [], WeightGradients()

    def hook(weight):
        seen.append(None if weight.grad is None else weight.grad.unique().tolist())

    hook.__module__ = "smp_runtime.of_some_room" if ours else "train"
    layer.weight.register_post_accumulate_grad_hook(hook)
    left.is_open = True
    with split_inside(left, SplitOperations()):
        (layer(torch.ones(2, 4)) + layer(torch.ones(2, 4))).sum().backward()
    assert seen == ([None] if ours else [[4.0]])  # a script's hook waits for nothing
    left.run()
    assert seen == ([None, [4.0]] if ours else [[4.0]])


def test_what_is_left_holds_nothing_once_it_has_run():
    import gc
    import weakref

    layer, x, left = nn.Linear(4, 4), torch.randn(2, 4), WeightGradients()
    left.is_open = True
    with split_inside(left, SplitOperations()):
        hidden = layer(x * 2)
        hidden.sum().backward()
    gone = weakref.ref(hidden.grad_fn)
    del hidden
    gc.collect()
    assert gone() is None  # the graph is freed by backward, not kept by what it has left
    left.run()
    assert not left
