"""A module that was replaced, which scripts and libraries still hold: it answers what it did, but for its weights."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.errors import SMPUserError


class Net(nn.Module):
    """One module is replaced, and holds a frozen parameter."""

    def __init__(self):
        super().__init__()
        with smp.tensor_parallelism():
            self.first = nn.Linear(8, 6)
        self.last = nn.Linear(6, 2)
        self.first.bias.requires_grad_(False)

    def forward(self, x):
        return self.last(self.first(x))


def _gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    made = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    smp.set_tensor_parallelism(made)
    return made, made


def _part():
    made = Net()
    return made, made.first


def _counts(module):
    return {name: (p.shape, p.dtype, p.device, p.requires_grad, p.numel()) for name, p in module.named_parameters()}


@pytest.mark.parametrize("make", [_part, _gpt2])
def test_names_shapes_and_types_stay_and_weights_are_freed(solo, make):
    solo({})
    model, former = make()
    before, weight = _counts(former), weakref.ref(next(iter(former.parameters())))
    smp.DistributedModel(model)
    gc.collect()
    assert weight() is None
    assert _counts(former) == before
    assert set(former.state_dict()) >= set(before)
    assert _counts(copy.deepcopy(former)) == before
    former.to("cpu").half().train()  # ignored, as placement is that of the wrapped model
    assert _counts(former) == before
    with pytest.raises(SMPUserError, match="DistributedModel"):
        former.zero_grad()  # a move has not opened the way to gradients


@pytest.mark.parametrize("half", ["fp16", "bf16"])
def test_the_type_is_that_of_the_wrapped_model(solo, half):
    solo({half: True})
    model, former = _gpt2()
    wrapped = smp.DistributedModel(model)
    assert former.dtype is next(iter(wrapped.parameters())).dtype is not torch.float32
    assert former.num_parameters() == sum(p.numel() for p in former.parameters()) > 0


ASKS_FOR_ELEMENTS = {
    "forward": lambda m: m(torch.zeros(1, 8)),
    "read": lambda m: m.weight.sum(),
    "index": lambda m: m.weight[0],
    "number": lambda m: m.weight.tolist(),
    "pickle": lambda m: torch.save(m.state_dict(), "/dev/null"),
    "write": lambda m: m.weight.data.normal_(),
    "replace": lambda m: setattr(m.weight, "data", torch.zeros(6, 8)),
    "gradient": lambda m: m.weight.grad,
    "clip": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    "freeze": lambda m: m.requires_grad_(False),
    "hook": lambda m: m.weight.register_hook(lambda gradient: 0 * gradient),
}


@pytest.mark.parametrize("ask", ASKS_FOR_ELEMENTS)
def test_what_wants_elements_or_gradients_is_refused(solo, ask):
    """They would be those of the beginning, or do nothing to what is trained."""
    solo({})
    model, former = _part()
    smp.DistributedModel(model)
    with pytest.raises(SMPUserError, match="Linear that the script has made, but tensor parallelism has replaced"):
        ASKS_FOR_ELEMENTS[ask](former)


def test_an_optimizer_of_its_parameters_trains_the_wrapped_model(solo):
    solo({})
    model, former = _part()
    wrapped = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(former.parameters(), lr=1.0))
    weight = wrapped.module.first.weight
    before = weight.detach().clone()
    wrapped(torch.ones(3, 8)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(weight.detach(), before - weight.grad)


def test_it_saves_and_generates_what_is_trained(solo, tmp_path):
    from transformers import GPT2LMHeadModel

    solo({})
    model, former = _gpt2()
    wrapped = smp.DistributedModel(model).eval()
    with torch.no_grad():
        for parameter in wrapped.parameters():
            parameter.add_(torch.randn_like(parameter))
    former.save_pretrained(tmp_path)
    alone = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        torch.testing.assert_close(wrapped(input_ids=ids).logits, alone(input_ids=ids).logits)
    more = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert former.generate(ids, **more).tolist() == alone.generate(ids, **more).tolist()
