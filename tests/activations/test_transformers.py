"""Transformers' own ``gradient_checkpointing_enable()`` and its layers, on the stages of a pipeline."""

from __future__ import annotations

import functools

import pytest
import torch
from support.models.huggingface import tiny_model
from support.models.models import VOCABULARY, token_batch
from support.training.activation_training import same

TIMEOUT = 150.0
HOWS = ["smp", "before", "after", "not reentrant", "switched inside", "smp, switched inside"]
CASES = [(kind, how) for kind in ("gpt2", "llama") for how in HOWS]
SAMPLE = {("gpt2", "smp, switched inside"), ("llama", "before"), ("llama", "switched inside")}


def _train(kind: str, how: str | None) -> dict:
    import transformers as hf

    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(5)
    common = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        net = hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=16, n_head=2, n_layer=4, n_positions=8, **common))
        layers = net.transformer.h
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
        net = hf.LlamaForCausalLM(hf.LlamaConfig(max_position_embeddings=8, attention_dropout=0.2, **sizes, **common))
        layers = net.model.layers
    net.train()
    if how in ("before", "not reentrant", "switched inside"):
        net.gradient_checkpointing_enable({"use_reentrant": how == "before"})
    model = smp.DistributedModel(net)
    if how == "after":
        model.module.gradient_checkpointing_enable()
    elif how in ("smp", "smp, switched inside"):
        for layer in layers:
            smp.set_activation_checkpointing(layer)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    runs = []
    for layer in layers:
        layer.mlp.register_forward_pre_hook(lambda *_: runs.append(smp.is_tracing()))

    @smp.step
    def step(ids):
        loss = model(input_ids=ids, labels=ids).loss
        if how in ("switched inside", "smp, switched inside"):  # as TRL does around the forward pass of a reference
            net.gradient_checkpointing_disable()
            net.gradient_checkpointing_enable({"use_reentrant": False})
        model.backward(loss)
        return loss

    result: dict = {"losses": [], "gradients": []}
    torch.manual_seed(7)
    for index in range(3):
        ids, _ = token_batch(index, 4)
        optimizer.zero_grad()
        result["losses"].append(float(step(ids).reduce_mean()))
        named = {n: p.grad.clone() for n, p in model.local_named_parameters() if p.grad is not None}
        result["gradients"].append(named)
        optimizer.step()
    result["runs"] = runs.count(False)
    return result


@functools.cache
def _plain(ranks, kind):
    config = {"pipeline_parallel_degree": 2, "microbatches": 2}
    return ranks(_train, 2, kind, None, config=config, timeout=TIMEOUT)


@pytest.mark.parametrize(
    ("kind", "how"), [pytest.param(*case, marks=[] if case in SAMPLE else pytest.mark.full) for case in CASES]
)
def test_layers_are_checkpointed_where_they_run(ranks, kind, how):
    plain = _plain(ranks, kind)
    config = {"pipeline_parallel_degree": 2, "microbatches": 2}
    found = ranks(_train, 2, kind, how, config=config, timeout=TIMEOUT)
    same(found, plain)
    assert sum(rank["runs"] for rank in plain) == 3 * 2 * 4
    for with_regions, without in zip(found, plain, strict=True):
        assert with_regions["runs"] == 2 * without["runs"] > 0


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_what_the_script_switches_off_between_steps_is_kept(ranks, family):
    found = ranks(_switch_off, 2, family, config={"pipeline_parallel_degree": 2, "microbatches": 2}, timeout=TIMEOUT)
    for before, after, again in found:
        assert before == again == 2 * after > 0


def _switch_off(family: str) -> list[int]:
    """How often layers of this stage run in a step: checkpointed, switched off, and on again."""
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(1)
    net = tiny_model(family, VOCABULARY).train()
    runs = []
    for layer in net.transformer.h if family == "gpt2" else net.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: runs.append(smp.is_tracing()))
    net.gradient_checkpointing_enable()
    model = smp.DistributedModel(net)

    @smp.step
    def step(ids):
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    counts = []
    for switch in (lambda: None, net.gradient_checkpointing_disable, net.gradient_checkpointing_enable):
        switch()
        step(token_batch(0, 4)[0])
        counts.append(runs.count(False))
        runs.clear()
    return counts


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_cache_is_not_written_a_second_time_in_backward(solo, family):
    import smdistributed.modelparallel.torch as smp

    solo({})
    torch.manual_seed(1)
    model = tiny_model(family, VOCABULARY).train()
    ids = torch.randint(3, VOCABULARY, (2, 8))
    plain = _gradients(model, ids)
    smp.set_activation_checkpointing(model.transformer.h if family == "gpt2" else model.model.layers)
    torch.testing.assert_close(_gradients(model, ids), plain)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_part_of_a_layer_gets_no_cache(solo, family, caplog, monkeypatch):
    """A layer of Transformers drops its cache when it is checkpointed; its attention alone does not."""
    import smdistributed.modelparallel.torch as smp
    from smp_runtime.activations import caches
    from smp_runtime.errors import SMPUserError

    solo({})
    torch.manual_seed(1)
    model = tiny_model(family, VOCABULARY).train()
    ids = torch.randint(3, VOCABULARY, (2, 8))
    wanted = _gradients(model, ids)
    layers = model.transformer.h if family == "gpt2" else model.model.layers
    for layer in layers:
        smp.set_activation_checkpointing(layer.attn if family == "gpt2" else layer.self_attn)
    monkeypatch.setattr(caches.logger, "propagate", True)
    caches._report.cache_clear()
    for _ in range(2):
        torch.testing.assert_close(_gradients(model, ids), wanted)
    assert [record.getMessage().count("DynamicCache") for record in caplog.records if record.name == "smp"] == [1]
    with torch.no_grad():
        filled = model(input_ids=ids, use_cache=True).past_key_values
    assert filled.get_seq_length() == 8  # without gradients nothing runs again
    with pytest.raises(SMPUserError, match=r"has tokens already.*use_cache=False"):
        model(input_ids=ids, labels=ids, past_key_values=filled)


def _gradients(model, ids):
    model.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=True).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]
