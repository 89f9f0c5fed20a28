"""Models with adapters in them, or with a forward of a script's own: what is inside is distributed, the rest goes on as it is."""

from __future__ import annotations

import pytest
import torch
from support.logs import heard
from support.models.huggingface import tiny_config
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.module_conversion.in_place.capture import used_by_others
from smp_runtime.nn.distributed_module import DistributedModule


class Adapted(nn.Module):
    """Around a linear map, as PEFT has it."""

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self, base, variant=None):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        inside, out = (base.nx, base.nf) if hasattr(base, "nx") else (base.in_features, base.out_features)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inside, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, out, bias=False)})
        self.lora_variant = {} if variant is None else {"default": variant}

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def _model(family, adapted=True, patched=False, variant=None):
    import transformers as hf

    torch.manual_seed(2)
    model = hf.AutoModelForCausalLM.from_config(tiny_config(family, 43))
    if adapted:
        for path, part in list(model.named_modules()):
            if path.endswith(("c_attn", "mlp.c_proj", "q_proj", "down_proj")):
                setattr(model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2], Adapted(part, variant))
    if patched:
        former = model.forward

        def forward(*args, **kwargs):
            result = former(*args, **kwargs)
            result.loss = result.loss + model.get_output_embeddings().weight.square().mean()
            return result

        model.forward = forward
    return model


def _kinds(model):
    return {path: type(part).__name__ for path, part in model.module.named_modules()}


def test_maps_inside_adapters_are_distributed_one_by_one(solo):
    solo({})
    original = _model("gpt2")
    smp.set_tensor_parallelism(original)
    model, warnings = heard(lambda: smp.DistributedModel(original))
    kinds = _kinds(model)
    assert model.module is original
    assert kinds["transformer.h.0.attn.c_attn"] == "Adapted"
    assert (
        kinds["transformer.h.0.attn.c_attn.base_layer"] == kinds["transformer.h.1.attn.c_proj"] == "DistributedConv1D"
    )
    assert kinds["transformer.h.0.attn.c_attn.lora_A.default"] == "Linear"
    assert any("as a whole it would lose the adapters in it" in w and "one by one" in w for w in warnings)
    assert sum("the adapters in it" in w for w in warnings) == 1


def test_a_forward_of_the_scripts_own_is_kept_with_what_it_reads(solo):
    solo({})
    original = _model("llama", adapted=False, patched=True)
    smp.set_tensor_parallelism(original)
    model, warnings = heard(lambda: smp.DistributedModel(original))
    kinds = _kinds(model)
    assert kinds["lm_head"] == "Linear"  # its weight is read past its forward
    assert isinstance(model.module.model, DistributedModule)  # the model inside has its own forward
    assert any("the forward that was set on it" in w for w in warnings)


def test_modules_that_a_forward_of_the_scripts_own_calls_use_their_weights_themselves():
    model = _model("gpt2", adapted=False, patched=True)
    inner = "transformer.h.0.mlp.c_fc"
    assert used_by_others(model, [inner, "lm_head"]) == {"lm_head"}
    assert not model.get_submodule(inner)._forward_hooks  # the trial leaves nothing behind


@pytest.mark.parametrize("variant", ["DoRA", None])
def test_adapters_that_read_the_whole_weight_keep_it(solo, variant):
    solo({})
    original = _model("llama", variant=variant)
    if variant is None:
        for part in original.modules():
            if isinstance(part, Adapted):
                part.__class__ = type("Other", (Adapted,), {"adapter_layer_names": ("ia3_l",)})
    smp.set_tensor_parallelism(original)
    model, warnings = heard(lambda: smp.DistributedModel(original))
    kinds = _kinds(model)
    assert kinds["model.layers.0.self_attn.q_proj.base_layer"] == "Linear"
    assert kinds["model.layers.0.self_attn.k_proj"] == "DistributedLinear"
    assert sum("its whole weight" in w for w in warnings) == 1


def _train(family, patched):
    """Loss, gradients and weights after a step; those of the wrapped model, whole."""
    config = smp.state.cfg
    original = _model(family, patched=patched)
    smp.set_tensor_parallelism(original)
    model = smp.DistributedModel(original)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(trained, lr=0.1))

    @smp.step
    def step(ids):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        model.backward(loss)
        return loss

    ids = _ids() if config.prescaled_batch else _ids().chunk(smp.tp_size())[smp.tp_rank()]
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(torch.tensor(smp.allgather(float(step(ids).reduce_mean()), smp.TP_GROUP)).mean().item())
        optimizer.step()
    distributed = sum(isinstance(part, DistributedModule) for part in model.modules())
    return losses, {name: value.clone() for name, value in model.state_dict().items()}, distributed


def _ids():
    return torch.randint(43, (4, 8), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("family", "patched", "prescaled"),
    [
        ("gpt2", False, False),
        pytest.param("llama", False, True, marks=pytest.mark.full),
        pytest.param("gpt2", True, True, marks=pytest.mark.full),
        pytest.param("llama", True, False, marks=pytest.mark.full),
        pytest.param("llama", True, True, marks=pytest.mark.full),
    ],
)
def test_training_equals_one_process(ranks, family, patched, prescaled):
    alone = _model(family, patched=patched)
    optimizer = torch.optim.SGD([p for p in alone.parameters() if p.requires_grad], lr=0.1)
    expected = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = alone(input_ids=_ids(), labels=_ids(), use_cache=False).loss
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    config = {"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": prescaled}
    for losses, state, distributed in ranks(_train, 2, family, patched, config=config):
        assert losses == pytest.approx(expected, abs=1e-5)
        assert distributed >= 8
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-5, rtol=1e-5)
