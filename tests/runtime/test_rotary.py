"""Rotary frequencies in half precision training: they stay in float32, everything else is cast."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp

LENGTH = 2048


def _llama(layers, heads):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    settings = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=64,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(settings)


@pytest.fixture
def llama():
    # No residual layer hides what attention does with the positions: one layer, of one head.
    return _llama(1, 1)


def _cosine(model, positions):
    return model.model.rotary_emb(torch.zeros(1, 1, 32), positions)[0]


@pytest.mark.parametrize(("half", "later"), [("bf16", None), ("fp16", None), ("bf16", "to"), ("fp16", "half")])
def test_angles_at_late_positions_are_those_of_float32(solo, llama, half, later):
    solo({half: True})
    reference = copy.deepcopy(llama)
    model = smp.DistributedModel(llama)
    if later == "to":
        model.to(model.module.lm_head.weight.dtype)
    elif later == "half":
        model.half()
    frequencies = model.module.model.rotary_emb.inv_freq
    assert frequencies.dtype is torch.float32
    positions = torch.arange(LENGTH - 8, LENGTH)[None]
    torch.testing.assert_close(_cosine(model.module, positions), _cosine(reference, positions))
    ids = torch.randint(64, (1, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = model(input_ids=ids, position_ids=positions).logits
        expected = reference(input_ids=ids, position_ids=positions).logits
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.02)


def test_deferred_creation_and_pipelines_keep_them_too(ranks):
    def run(deferred):
        import smdistributed.modelparallel.torch as smp

        with smp.delay_param_initialization(enabled=deferred):
            model = _llama(2, 2)
        model = smp.DistributedModel(model)

        @smp.step
        def step(ids):
            loss = model(input_ids=ids, labels=ids).loss
            model.backward(loss)
            return loss

        step(torch.zeros(2, 4, dtype=torch.long))
        expected = 1.0 / 10000 ** (torch.arange(0, 16, 2) / 16)
        torch.testing.assert_close(model.module.model.rotary_emb.inv_freq, expected)

    ranks(run, 2, True, config={"ddp": True, "bf16": True, "microbatches": 2})
    ranks(run, 2, False, config={"pipeline_parallel_degree": 2, "ddp": True, "bf16": True, "microbatches": 2})


def test_other_buffers_are_cast(solo):
    solo({"bf16": True})

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 2))
            self.register_buffer("mask", torch.zeros(2, 2))
            self.register_buffer("original_inv_freq", torch.ones(2), persistent=False)

        def forward(self, x):
            return x @ self.weight + self.mask

    model = smp.DistributedModel(Masked())
    assert model.module.mask.dtype is torch.bfloat16
    assert model.module.original_inv_freq.dtype is torch.float32
    assert model(torch.ones(2, 2)).dtype is torch.float32
