"""The tracing step: what it records, and that it leaves no mark."""

from __future__ import annotations

import copy
import random
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.models.models import TiedNet, loss_of, token_batch
from torch import nn
from torch.utils.checkpoint import checkpoint

from smp_runtime.errors import SMPUserError
from smp_runtime.pipeline.partition.module_tree import (
    ForeignUse,
    ModuleFlow,
    together_with_reasons,
    tree_without_tracing,
)
from smp_runtime.pipeline.partition.tracing import trace
from smp_runtime.tensors.nested import tensors_in


def nodes_of(model, run=None, **settings):
    x = torch.ones(2, 4)
    return trace(model, run or (lambda: model(x)), device="cpu", **settings).nodes()


def bound_in(found):
    return [paths for paths, _ in together_with_reasons(found)]


# -- what is recorded ----------------------------------------------------------------------------------------------


def test_calls_in_their_order():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(4, 4)
            self.first = nn.Linear(4, 4)
            self.never = nn.Linear(4, 4)
            self.list = nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])

        def forward(self, x):
            x = self.list[0](self.first(x))
            return self.last(self.list[0](x))

    model = Net()
    found = trace(model, lambda: model(torch.ones(2, 4)), device="cpu")
    assert [child.path for child in found.root.children] == ["first", "list", "last", "never"]
    nodes = found.nodes()
    assert [nodes[path].calls for path in ("", "first", "list.0", "list.1", "last", "never")] == [1, 1, 2, 0, 1, 0]
    assert nodes["list"].is_container
    assert not nodes["never"].is_container
    assert nodes["list.0"].input_bytes == nodes["list.0"].output_bytes == 2 * 4 * 4
    assert nodes[""].elements == 4 * 20
    assert found.root.elements == sum(parameter.numel() for parameter in model.parameters())


def test_operations_forward_and_backward():
    model = nn.Sequential(nn.Linear(256, 512, bias=False), nn.ReLU(), nn.Linear(512, 256, bias=False))
    model[0].weight.requires_grad_(False)
    x = torch.ones(64, 256)
    nodes = nodes_of(model, lambda: model(x))
    product = 2 * 64 * 256 * 512
    # The first needs no gradient at all, the last one for its weight only: nothing before it is trained.
    assert nodes["0"].flops == product
    assert nodes["2"].flops == 2 * product
    assert nodes["1"].flops > 0
    again = nodes_of(model, lambda: model(x))
    assert all(again[path].flops == node.flops for path, node in nodes.items())
    x.requires_grad_()
    assert nodes_of(model, lambda: model(x))["2"].flops == 3 * product
    with torch.no_grad():
        assert nodes_of(model, lambda: model(x))["2"].flops == product


def test_attention_counts_though_the_registry_does_not_know_it_on_cpu():
    class Attend(nn.Module):
        def forward(self, q):
            return F.scaled_dot_product_attention(q, q, q)

    model = Attend()
    q = torch.ones(2, 4, 128, 64)
    assert nodes_of(model, lambda: model(q))[""].flops == 2 * 2 * (2 * 4) * 128 * 128 * 64


def test_a_lookup_does_not_touch_the_whole_table():
    small, large = nn.Embedding(10, 8), nn.Embedding(10_000, 8)
    ids = torch.zeros(16, dtype=torch.long)
    assert nodes_of(small, lambda: small(ids))[""].flops == nodes_of(large, lambda: large(ids))[""].flops


def test_bytes_kept_for_backward():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Identity(), nn.Linear(8, 4))
    x = torch.ones(2, 4)
    measured = nodes_of(model, lambda: model(x), memory=True)
    # Linear keeps its input, ReLU its output; the last layer keeps what ReLU keeps already.
    assert [measured[str(i)].activation_bytes for i in range(4)] == [2 * 4 * 4, 2 * 8 * 4, 0, 0]
    estimated = nodes_of(model, lambda: model(x), memory=False)
    assert [estimated[str(i)].activation_bytes for i in range(4)] == [2 * 8 * 4, 2 * 8 * 4, 0, 2 * 4 * 4]
    wrapped = nn.Sequential(nn.Sequential(nn.Linear(4, 8)))
    estimated = nodes_of(wrapped, lambda: wrapped(x))
    assert [estimated[path].activation_bytes for path in ("0.0", "0", "")] == [2 * 8 * 4, 0, 0]


def test_checkpointed_modules_keep_their_input_only():
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 4))
    x = torch.ones(2, 4, requires_grad=True)
    kept = nodes_of(model, lambda: checkpoint(model, x, use_reentrant=False), memory=True)
    assert sum(node.activation_bytes for node in kept.values()) <= 2 * 4 * 4


def test_seconds_are_those_of_the_own_code():
    class Sleeps(nn.Module):
        def __init__(self, seconds, inner=None):
            super().__init__()
            self.seconds, self.inner = seconds, inner or nn.Identity()

        def forward(self, x):
            time.sleep(self.seconds)
            return self.inner(x)

    model = Sleeps(0.02, Sleeps(0.06))
    found = trace(model, lambda: model(torch.ones(1)), device="cpu", times=True)
    nodes = found.nodes()
    assert found.timed
    assert nodes[""].calls == 1
    assert 0.02 <= nodes[""].seconds < nodes["inner"].seconds
    assert nodes["inner"].seconds >= 0.06
    assert nodes_of(model)[""].seconds == 0


def test_flows_are_who_computes_with_whose_values():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            a = self.a(x)
            return a + self.c(self.b(a))

    model = Residual()
    flows = trace(model, lambda: model(torch.ones(2, 4)), device="cpu").flows
    size = 2 * 4 * 4
    assert flows == [
        ModuleFlow("", ("a",), size),
        ModuleFlow("a", ("b", ""), size),
        ModuleFlow("b", ("c",), size),
        ModuleFlow("c", ("",), size),
    ]


def test_a_module_under_two_names_is_one():
    model = nn.ModuleDict({"one": nn.Sequential(nn.Linear(4, 4)), "two": nn.ReLU()})
    model["again"] = model["one"]
    nodes = nodes_of(model, lambda: model["again"](model["two"](model["one"](torch.ones(2, 4)))))
    assert set(nodes) == {"", "one", "one.0", "two"}
    assert nodes["one"].calls == 2
    assert nodes["one"].aliases == ["again"]
    assert nodes["one.0"].aliases == ["again.0"]


# -- parameters of others ------------------------------------------------------------------------------------------


class Holder(nn.Module):
    """Returns its parameter, as position embeddings do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self):
        return self.weight


class Uses(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.inner, self.holder, self.how = nn.Linear(4, 4), Holder(), how

    def forward(self, x):
        return self.how(self, x)


@pytest.mark.parametrize(
    ("how", "together"),
    [
        (lambda m, x: F.linear(x, m.inner.weight), [("inner", "")]),
        (lambda m, x: x @ m.inner.weight.data.t(), [("inner", "")]),
        (lambda m, x: x * float(m.inner.bias.detach()[0]), [("inner", "")]),
        (lambda m, x: torch.cat([x, m.holder.weight[None]]), [("holder", "")]),
        (lambda m, x: x * m.holder(), []),
        (lambda m, x: m.inner(x.to(m.inner.weight.dtype).view(-1, m.inner.weight.size(1))), []),
        (lambda m, x: m.inner(x) if m.inner.weight.requires_grad and m.inner.weight.is_contiguous() else x, []),
    ],
)
def test_foreign_uses(how, together):
    model = Uses(how)
    found = trace(model, lambda: model(torch.ones(2, 4)), device="cpu")
    assert bound_in(found) == together


def test_a_step_function_that_uses_parameters_does_so_for_the_root():
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    found = trace(model, lambda: model(torch.ones(2, 4)).sum() + model[0].weight.norm(), device="cpu")
    assert found.foreign_uses == [ForeignUse("", "0", "0.weight")]


def test_tied_weights_and_attention_that_reads_its_projection():
    model = TiedNet()
    ids, targets = token_batch(0, 2)
    found = trace(model, lambda: loss_of(model(ids), targets), device="cpu")
    assert bound_in(found) == [("embedding", "head")]
    attention = nn.MultiheadAttention(4, 2)
    x = torch.ones(3, 2, 4)
    found = trace(attention, lambda: attention(x, x, x), device="cpu")
    assert set(bound_in(found)[0]) == {"", "out_proj"}
    assert not found.root.is_divisible


# -- no mark -------------------------------------------------------------------------------------------------------


class Restless(nn.Module):
    """Changes everything that a forward pass can change."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(1))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.count += 1
        self.last = x
        self.register_buffer("late", torch.ones(1))
        random.random()
        np.random.rand()
        self.dropout.eval()
        return self.dropout(self.norm(x))


def test_the_model_and_the_random_numbers_are_as_before():
    model = Restless()
    seen = []
    model.norm.register_forward_hook(lambda *_: seen.append(1))
    model.norm.weight.grad = torch.full((4,), 7.0)
    gradient, keys = model.norm.weight.grad, set(vars(model))
    state, buffers = copy.deepcopy(model.state_dict()), [id(buffer) for buffer in model.buffers()]
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    call = nn.Module.__call__

    def step():
        loss = model(torch.randn(8, 4)).sum()
        loss.backward()
        model.zero_grad()

    trace(model, step, device="cpu", times=True, memory=True)
    assert set(seen) == {1}
    assert len(seen) > 2
    assert set(model.state_dict()) == set(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [id(buffer) for buffer in model.buffers()] == buffers
    assert set(vars(model)) == keys
    assert model.calls == 0
    assert model.dropout.training
    assert model.norm.weight.grad is gradient
    assert torch.equal(gradient, torch.full((4,), 7.0))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])
    assert nn.Module.__call__ is call
    x = torch.ones(2, 4, requires_grad=True)
    (x * 2).sum().backward()
    assert x.grad is not None


def test_an_error_of_the_model_comes_through_and_leaves_no_mark():
    model = Restless()
    call, backward = nn.Module.__call__, torch.autograd.backward

    def step():
        model(torch.ones(8, 4))
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trace(model, step, device="cpu")
    assert (nn.Module.__call__, torch.autograd.backward) == (call, backward)
    assert model.calls == 0
    assert model.count == 0


def test_parameters_that_forward_writes_are_put_back():
    class Writes(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.mul_(0.5)
            return super().forward(x)

    model = Writes(4, 4)
    before = model.weight.detach().clone()
    nodes_of(model)
    assert torch.equal(model.weight, before)


def test_gradients_inside_the_model():
    class Penalty(nn.Linear):
        def forward(self, x):
            x = x.requires_grad_()
            y = super().forward(x)
            return torch.autograd.grad(y.square().sum(), x, create_graph=True)[0]

    model = Penalty(4, 4)
    assert nodes_of(model)[""].flops > 0
    with pytest.raises(SMPUserError, match="trace_memory_usage=False"):
        nodes_of(model, memory=True)


# -- unusual models ------------------------------------------------------------------------------------------------


def test_modules_with_a_call_of_their_own():
    class Layer(nn.Linear):
        def __call__(self, *args, **kwargs):
            return super().__call__(*args, **kwargs)

    model = nn.Sequential(Layer(4, 4))
    nodes = nodes_of(model)
    assert nodes["0"].calls == 1
    assert nodes["0"].flops > 0


def test_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    x = torch.ones(64, 256, device="meta")
    nodes = nodes_of(model, lambda: model(x), memory=True)
    assert nodes["1"].flops == 3 * 2 * 64 * 256 * 256
    assert nodes["1"].activation_bytes == 64 * 256 * 4
    with pytest.raises(SMPUserError, match="reads values of parameters that have none yet"):
        trace(model, lambda: model(x).sum().item(), device="cpu")
    for runs in (lambda: model(x).cpu(), lambda: model(torch.ones(64, 256)), lambda: torch.ones(1).item() * model(x)):
        assert trace(model, runs, device="cpu").traced
    with pytest.raises(SMPUserError, match="nothing takes time"):
        trace(model, lambda: model(x), device="cpu", times=True)


def test_lazy_modules_and_cycles_are_refused():
    with pytest.raises(SMPUserError, match=r"parameter 0\.weight has no shape yet"):
        tree_without_tracing(nn.Sequential(nn.LazyLinear(4)))
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].parent = model
    with pytest.raises(SMPUserError, match=r"module '0\.parent\.0\.parent' is one of those that it lies in"):
        tree_without_tracing(model)


def test_the_tree_without_running():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(1000, 4)
            self.scales = nn.ParameterList([nn.Parameter(torch.ones(4))])
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 8)])

    found = tree_without_tracing(Net())
    nodes = found.nodes()
    assert not found.traced
    assert nodes["embedding"].flops < nodes["layers.0"].flops < nodes["layers.1"].flops
    assert nodes["layers"].is_container
    assert bound_in(found) == [("scales", "")]


def test_tensors_in_structures():
    class Cache:
        def __init__(self, tensor):
            self.layers = [{"keys": tensor}]

    a, b = torch.ones(1), torch.ones(2)
    assert [id(t) for t in tensors_in(((a, None, 3), {"x": Cache(b), "y": a}))] == [id(a), id(b)]


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_transformers_with_values_and_without(kind):
    import transformers as hf

    sizes = {"vocab_size": 31, "decoder_start_token_id": 0}
    if kind == "gpt2":
        make = lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=31, n_positions=16))  # noqa: E731
    else:
        make = lambda: hf.T5ForConditionalGeneration(  # noqa: E731
            hf.T5Config(num_layers=2, d_model=16, num_heads=2, d_kv=8, d_ff=32, **sizes)
        )
    model = make()
    state = copy.deepcopy(model.state_dict())
    ids = torch.zeros(2, 8, dtype=torch.long)
    found = trace(model, lambda: model(input_ids=ids, labels=ids).loss, device="cpu", memory=True)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    with torch.device("meta"):
        empty, ids = make(), ids.to("meta")
    on_meta = trace(empty, lambda: empty(input_ids=ids, labels=ids).loss, device="cpu", memory=True)
    assert set(on_meta.nodes()) == set(found.nodes())
    work = [sum(node.flops for node in t.root.walk()) for t in (found, on_meta)]
    assert work[1] == pytest.approx(work[0], rel=0.25)  # attention on the meta device is made of plain operations


def test_what_an_autograd_function_calls_is_bound_to_its_caller_but_a_checkpoint_s_region_is_not():
    class Run(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, part):
            return part(x)

        @staticmethod
        def backward(ctx, gradient):
            return gradient, None

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inside, self.region = (nn.Sequential(nn.Linear(4, 4)) for _ in range(3))

        def forward(self, x):
            x = Run.apply(self.first(x), self.inside)
            return checkpoint(self.region, x, use_reentrant=True)

    model = nn.Sequential(Net(), nn.Linear(4, 4))
    found = trace(model, lambda: model(torch.ones(2, 4)), device="cpu")
    assert together_with_reasons(found) == [(("0.inside", "0", "0.inside.0"), "function Run of 0")]
