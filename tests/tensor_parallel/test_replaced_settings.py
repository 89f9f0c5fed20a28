"""What scripts set on a module before it is replaced: its distributed form has it, or a warning says what is lost."""

from __future__ import annotations

import contextlib

import pytest
import torch
from support.logs import heard
from support.training.pipeline_training import summing_step
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.errors import SMPUserError

CONFIG = {"tensor_parallel_degree": 2, "ddp": True}


def _gpt2(**settings):
    import transformers

    sizes = {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 8, "vocab_size": 11}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **quiet, **settings))


def _marked(module, **overrides):
    smp.set_tensor_parallelism(module, True, **overrides)
    return module


class _Around(nn.Module):
    """A model that looks at a part of the one inside it."""

    def __init__(self, inside, name, part):
        super().__init__()
        self.inside = inside
        self.add_module(name, part)


# -- ties ----------------------------------------------------------------------------------------------------------


def test_a_tie_by_module_reference_is_left_alone(solo):
    solo({})
    inside = _gpt2()
    net = _marked(_Around(inside, "emb", inside.transformer.wte))
    smp.set_tensor_parallelism(net.emb, False)
    model, warnings = heard(lambda: smp.DistributedModel(net))
    assert type(model.module.inside).__name__ == "GPT2LMHeadModel"
    assert model.module.emb is model.module.inside.transformer.wte
    assert warnings == [
        "inside (GPT2LMHeadModel) is not distributed: it shares a weight with another module; tie them inside one "
        "distributed module"
    ]


def test_a_module_that_is_met_twice_and_cannot_be_replaced_is_told_once(solo):
    solo({})
    odd = nn.Embedding(4, 4, max_norm=1.0)
    both = nn.Sequential(odd, nn.Sequential(odd))
    model, warnings = heard(lambda: smp.DistributedModel(_marked(both, distribute_embedding=True)))
    assert model.module[0] is model.module[1][0] is odd
    assert len(warnings) == 1


# -- requires_grad, hooks, checkpointing ------------------------------------------------------------------------------


def test_single_frozen_parameters_stay_frozen(solo):
    solo({})
    net = nn.Sequential(nn.Embedding(4, 6), nn.Linear(6, 4), nn.Linear(4, 4))
    net[1].bias.requires_grad_(False)
    net[2].weight.requires_grad_(False)
    model, warnings = heard(lambda: smp.DistributedModel(_marked(net, distribute_embedding=True)))
    assert type(model.module[1]).__name__ == "DistributedLinear"
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == {"1.bias", "2.weight"}
    assert not warnings


def _frozen_gpt2():
    net = _gpt2(tie_word_embeddings=False)
    net.transformer.wte.requires_grad_(False)
    net.transformer.h[1].requires_grad_(False)
    net.transformer.h[0].attn.c_attn.weight.requires_grad_(False)
    model, warnings = heard(lambda: smp.DistributedModel(_marked(net)))
    ids = torch.arange(8).reshape(2, 4) + smp.tp_rank()
    model(input_ids=ids, labels=ids).loss.backward()
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert all((p.grad is None) == (name in frozen) for name, p in model.named_parameters())
    return frozen, warnings, {name for name, _ in model.named_parameters()}


def test_frozen_parameters_of_a_language_model_stay_frozen(ranks):
    for frozen, warnings, names in ranks(_frozen_gpt2, 2, config=CONFIG, timeout=150.0):
        layer = {name for name in names if name.startswith("transformer.seq_layers.1.")}
        first = {f"transformer.seq_layers.0.attention.{part}.weight" for part in ("query", "key", "value")}
        assert len(layer) == 16
        assert frozen == {"word_embedding.weight", *layer, *first}
        assert not warnings


def test_hooks_and_parameters_that_are_lost_are_told(solo):
    solo({})

    @smp.tp_register(smp.nn.DistributedLinear, init_hook=lambda: ((4, 4), {}))
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4), requires_grad=False)
            self.weight = nn.Parameter(torch.ones(4))

    net = _marked(nn.Sequential(nn.Linear(4, 4), Own()))
    net[0].register_forward_hook(lambda *_: None)
    _, warnings = heard(lambda: smp.DistributedModel(net))
    assert len(warnings) == 3, warnings
    assert warnings[0].startswith("0 (Linear) is distributed, but hooks were registered on 'Linear'")
    assert warnings[1].startswith(
        "1 (Own) is distributed with new weights: its own do not fit DistributedLinear (scale has"
    )
    assert warnings[2].startswith("1 (Own) is distributed, but it has no parameter for 'scale'")


def test_gradient_checkpointing_before_and_after_wrapping(solo):
    import transformers

    from smp_runtime.activations.marking import is_marked

    solo({})
    ids = torch.arange(8).reshape(2, 4)

    def layers(model):
        return [part for part in model.modules() if type(part).__name__ == "DistributedTransformerLayer"]

    def runs(model, **inputs):
        count = []
        for layer in layers(model):
            layer.output.register_forward_pre_hook(lambda *_: count.append(1))
        model.train()
        model(**inputs)[0].sum().backward()
        return len(count)

    before = _gpt2()
    before.gradient_checkpointing_enable({"preserve_rng_state": False})
    model, warnings = heard(lambda: smp.DistributedModel(_marked(before)))
    assert not warnings
    assert runs(model, input_ids=ids, labels=ids) == 4
    model.module.gradient_checkpointing_disable()
    assert not any(is_marked(layer) for layer in layers(model))

    after = smp.DistributedModel(_marked(_gpt2()))
    assert not any(is_marked(layer) for layer in layers(after))
    after.gradient_checkpointing_enable()
    assert runs(after, input_ids=ids, labels=ids) == 4

    config = transformers.BertConfig(
        vocab_size=16, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=8,
    )  # fmt: skip
    bert = smp.DistributedModel(_marked(transformers.BertModel(config, add_pooling_layer=False)))
    bert.module.gradient_checkpointing_enable()
    assert runs(bert, input_ids=ids) == 4
    bert.module.gradient_checkpointing_disable()
    assert not any(is_marked(layer) for layer in layers(bert))


def test_the_names_of_transformers_5_checkpoint_too(solo):
    from smp_runtime.activations.marking import is_marked, say_offloading_is_ours

    solo({})
    say_offloading_is_ours.cache_clear()

    def marked(model):
        return [is_marked(part) for part in model.modules() if type(part).__name__ == "DistributedTransformerLayer"]

    model = smp.DistributedModel(_marked(_gpt2()))
    _, warnings = heard(lambda: model.activation_checkpointing_enable({"preserve_rng_state": False}, 2, offload=True))
    assert marked(model) == [True, False]
    assert model.module.is_activation_checkpointing
    assert len(warnings) == 1
    assert '"offload_activations": True' in warnings[0]
    model.activation_checkpointing_enable()
    assert marked(model) == [True, True]
    model.activation_checkpointing_disable()
    assert not model.module.is_gradient_checkpointing

    before = _gpt2()
    if not hasattr(before, "activation_checkpointing_enable"):
        return
    say_offloading_is_ours.cache_clear()
    before.activation_checkpointing_enable(every_n_layers=2, offload=True)
    model, warnings = heard(lambda: smp.DistributedModel(_marked(before)))
    assert marked(model) == [True, False]
    assert len(warnings) == 1


# -- types ---------------------------------------------------------------------------------------------------------------


def test_parameters_keep_the_type_of_the_original(solo):
    solo({})
    with smp.model_creation(tensor_parallelism=True, dtype=torch.bfloat16, distribute_embedding=True):
        net = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4), _gpt2())
    model = smp.DistributedModel(net)
    assert type(model.module[2]).__name__ == "CausalModel"
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.module[2](torch.zeros(1, 2, dtype=torch.long)).logits.dtype is torch.bfloat16


@pytest.mark.parametrize(("config", "made"), [({"bf16": True}, torch.float32), ({"fp16_params": True}, torch.float16)])
def test_master_weights_start_unrounded(solo, config, made):
    from smp_runtime.module_conversion.replacing import distribute
    from smp_runtime.nn.distributed_module import current_group

    solo(config)
    with smp.model_creation(tensor_parallelism=True, dtype=torch.bfloat16):
        net = _gpt2()
    assert {p.dtype for p in distribute(net, current_group()).parameters()} == {made}


# -- sharding ------------------------------------------------------------------------------------------------------------


def _sharded():
    from smp_runtime.module_conversion.replacing import distribute
    from smp_runtime.nn.distributed_module import current_group

    def made(**overrides):
        net = _marked(nn.Sequential(_gpt2(), nn.Embedding(4, 4)), **overrides)
        net = distribute(net, current_group())
        return net[0].distributes_vocabulary, type(net[1]).__name__

    return made(), made(distribute_embedding=False)


def test_sharding_distributes_embeddings_unless_the_script_says_otherwise(ranks):
    config = {**CONFIG, "sharded_data_parallel_degree": 2, "prescaled_batch": True}
    for automatic, refused in ranks(_sharded, 4, config=config, timeout=150.0):
        assert automatic == (True, "DistributedEmbedding")
        assert refused == (False, "Embedding")
    for without, _ in ranks(_sharded, 2, config=CONFIG, timeout=150.0):
        assert without == (False, "Embedding")


# -- the residual sum ------------------------------------------------------------------------------------------------------


def _layers_error(plain=False, parallel=False, cross=False):
    """How far a layer in bfloat16 is from the same in float32, with and without ``fp32_residual_addition``."""
    sizes = {"num_attention_heads": 2, "attention_head_size": 8, "hidden_size": 16, "intermediate_size": 32}
    quiet = {"attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "pre_layernorm": True, "post_layernorm": False}
    generator = torch.Generator().manual_seed(smp.dp_rank())
    states = (300 * torch.randn(4, 32, 16, generator=generator)).bfloat16()
    inputs = (states, states / 300, None, None) if cross else (states, None)
    outputs, state = [], None
    for switch, dtype in ((False, torch.float32), (False, torch.bfloat16), (True, torch.bfloat16)):
        layer = smp.nn.DistributedTransformerLayer(
            **sizes, **quiet, parallel_attn_output=parallel, fp32_residual_addition=switch, add_cross_attention=cross
        )
        if state is None:
            state = {name: 2 * value.bfloat16() for name, value in layer.state_dict().items()}
        layer.load_state_dict(state)
        layer.to(dtype)
        output = layer(tuple(part if part is None else part.to(dtype) for part in inputs))[0]
        assert output.dtype is dtype
        output.float().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
        outputs.append(output.detach().double())
    return [float((output - outputs[0]).abs().mean()) for output in outputs[1:]]


def _errors():
    return {how: _layers_error(**{how: True}) for how in ("plain", "parallel", "cross")}


@pytest.mark.parametrize("optimize", ["speed", "memory"])
def test_the_residual_stays_in_float32_between_the_halves(ranks, optimize):
    for errors in ranks(_errors, 2, config={**CONFIG, "optimize": optimize}, timeout=150.0):
        for how, (narrow, wide) in errors.items():
            assert 0 < wide < 0.85 * narrow, (how, narrow, wide)


def test_forms_of_a_layer_that_exclude_each_other(solo):
    solo({})
    sizes = {"num_attention_heads": 2, "attention_head_size": 8, "hidden_size": 16, "intermediate_size": 32}
    for settings, message in (
        ({"parallel_attn_output": True}, "parallel_attn_output and post_layernorm are both true"),
        (
            {"parallel_attn_output": True, "post_layernorm": False, "pre_layernorm": True, "add_cross_attention": True},
            "parallel_attn_output and add_cross_attention are both true",
        ),
        (
            {"single_pre_layernorm": True, "pre_layernorm": True},
            "single_pre_layernorm is true, with parallel_attn_output",
        ),
    ):
        with pytest.raises(SMPUserError, match=message):
            smp.nn.DistributedTransformerLayer(**sizes, **settings)


def _placed(how):
    with smp.tensor_parallelism():
        parts = []
        for stage in (1, 0, 1):
            with smp.partition(stage) if how == "contexts" else contextlib.nullcontext():
                parts.append(nn.Linear(8, 8))
        net = nn.Sequential(*parts)
    if how == "calls":
        for part, stage in zip(parts, (1, 0, 1), strict=True):
            smp.set_partition(part, stage)
    model = smp.DistributedModel(net)
    summing_step(model)(torch.ones(4, 8))
    return smp.pp_rank(), sorted({name.partition(".")[0] for name, _ in model.local_named_parameters()})


@pytest.mark.parametrize(("how", "automatic"), [("contexts", False), ("calls", False), ("calls", True)])
def test_replaced_modules_go_where_the_originals_were_placed(ranks, how, automatic):
    config = {**CONFIG, "partitions": 2, "microbatches": 2, "prescaled_batch": True, "auto_partition": automatic}
    config |= {} if automatic else {"default_partition": 0}
    for stage, parts in ranks(_placed, 4, how, config=config):
        assert parts == (["1"] if stage == 0 else ["0", "2"])
