"""LoRA of PEFT in a loop of a script's own: losses of one process; adapters saved small, and loaded again, here and there."""

from __future__ import annotations

import pytest
import torch
from support.models.huggingface import tiny_config

import smdistributed.modelparallel.torch as smp

STEPS, VOCABULARY = 2, 48
SHARDS = {"sdp_param_persistence_threshold": 100, "sdp_gradient_clipping": 1e6}
STRATEGIES = {
    "pp 2": (2, {"pipeline_parallel_degree": 2, "microbatches": 2}),
    "tp 2": (2, {"tensor_parallel_degree": 2, "prescaled_batch": True}),
    "sdp 2": (2, {"sharded_data_parallel_degree": 2, **SHARDS}),
    "dp 2": (2, {}),
    "cp 2": (2, {"context_parallel_degree": 2}),
    "tp 2 × dp 2": (4, {"tensor_parallel_degree": 2}),
    "pp 2 × tp 2": (4, {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "microbatches": 2}),
    "pp 2 × sdp 2": (4, {"pipeline_parallel_degree": 2, "sharded_data_parallel_degree": 2, **SHARDS}),
    "tp 2 × sdp 2": (
        4,
        {"tensor_parallel_degree": 2, "prescaled_batch": True, "sharded_data_parallel_degree": 2, **SHARDS},
    ),
}
#: By name, the model and how adapters are put around it.
ADAPTERS = {
    "gpt2": ("gpt2", {"target_modules": "all-linear"}),
    "llama": ("llama", {"target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "whole modules": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "tied embeddings": ("gpt2", {"target_modules": ["wte", "c_attn"]}),
    "dora": ("llama", {"target_modules": ["q_proj"], "use_dora": True}),
}

SAMPLE = {
    ("gpt2", "pp 2"),
    ("gpt2", "sdp 2"),
    ("llama", "tp 2"),
    ("llama", "dp 2"),
    ("whole modules", "pp 2"),
    ("tied embeddings", "sdp 2"),
    ("dora", "tp 2"),
}


def _model(name, seed=5):
    """A base that is always the same, with adapters of their own per seed."""
    import transformers as hf
    from peft import LoraConfig, get_peft_model

    family, how = ADAPTERS[name]
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(tiny_config(family, VOCABULARY))
    torch.manual_seed(seed)
    settings = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", "fan_in_fan_out": family == "gpt2"}
    return get_peft_model(model, LoraConfig(**settings, init_lora_weights=False, **how))


def _batch(number):
    return torch.randint(VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(number))


def _optimizer(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def _wrapped(name, seed=5):
    original = _model(name, seed)
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(original)
    model = smp.DistributedModel(original)
    return model, smp.DistributedOptimizer(_optimizer(model))


@smp.step
def _step(model, ids):
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    model.backward(loss)
    return loss


@smp.step
def _logits(model, ids):
    return model(input_ids=ids, use_cache=False).logits


def _steps(model, optimizer, numbers):
    """Losses of the whole batches."""
    prescaled = smp.state.cfg.prescaled_batch
    size, rank = (smp.rdp_size(), smp.rdp_rank()) if prescaled else (smp.dp_size(), smp.dp_rank())
    losses = []
    for number in numbers:
        optimizer.zero_grad()
        loss = _step(model, _batch(number).chunk(size)[rank]).reduce_mean()
        optimizer.step()
        losses.append(torch.tensor(smp.allgather(float(loss), smp.WORLD)).mean().item())
    return losses


def _train(name, folder):
    model, optimizer = _wrapped(name)
    losses = _steps(model, optimizer, range(STEPS))
    if smp.rdp_size() < smp.size() or smp.state.cfg.sharded_data_parallel_degree > 1 or smp.rank() == 0:
        model.save_pretrained(f"{folder}/adapters")
    smp.save_checkpoint(f"{folder}/checkpoints", tag="t", partial=True, model=model, optimizer=optimizer)
    losses += _steps(model, optimizer, range(STEPS, 2 * STEPS))
    kinds = [type(part).__name__ for part in model.modules()]
    # Adapters go back to where they were, also between steps.
    smp.barrier()
    smp.resume_from_checkpoint(folder, tag="adapters", partial=False, load_optimizer=False)
    model.eval()
    with torch.no_grad():
        return losses, kinds, _logits(model, _batch(99)).concat()


def _resume(name, folder):
    """Adapters that were drawn otherwise, and the same again from a checkpoint or from what PEFT writes."""
    model, optimizer = _wrapped(name, seed=6)
    smp.resume_from_checkpoint(f"{folder}/checkpoints", partial=True)
    losses = _steps(model, optimizer, range(STEPS, 2 * STEPS))
    return losses, sum(1 for p in model.parameters() if p.requires_grad)


def _load(name, folder):
    model, _ = _wrapped(name, seed=6)
    smp.resume_from_checkpoint(folder, tag="adapters", partial=False, load_optimizer=False)
    model.eval()
    with torch.no_grad():
        return _logits(model, _batch(99)).concat()


def _alone(name):
    """Losses, and logits after the first half of the steps."""
    model = _model(name)
    optimizer, losses, logits = _optimizer(model), [], None
    for number in range(2 * STEPS):
        if number == STEPS:
            model.eval()
            logits = model(input_ids=_batch(99)).logits.detach()
            model.train()
        ids = _batch(number)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, logits, sum(1 for p in model.parameters() if p.requires_grad)


def _marked(name, strategy):
    features = {
        "gpt2": ("LoRA, train", "LoRA, adapters saved", "LoRA, resume"),
        "llama": ("LoRA, train", "LoRA, adapters saved", "LoRA, resume"),
        "whole modules": ("LoRA with modules_to_save",),
        "tied embeddings": ("LoRA of tied embeddings",),
        "dora": ("DoRA",),
    }[name]
    marks = [pytest.mark.client("PEFT", feature, strategy) for feature in features]
    return pytest.param(name, strategy, marks=marks if (name, strategy) in SAMPLE else [*marks, pytest.mark.full])


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        _marked(name, strategy)
        for name in ADAPTERS
        for strategy in STRATEGIES
        if name in ("gpt2", "llama") or strategy in ("pp 2", "tp 2", "sdp 2")
    ],
)
def test_lora_is_that_of_one_process(ranks, tmp_path, name, strategy):
    from peft import PeftModel

    size, config = STRATEGIES[strategy]
    expected, logits, trained = _alone(name)
    run = {"config": {"ddp": True, **config}, "timeout": 110.0}
    for losses, kinds, found in ranks(_train, size, name, str(tmp_path), **run):
        assert losses == pytest.approx(expected, abs=1e-5)
        torch.testing.assert_close(found, logits, atol=1e-5, rtol=1e-5)
        if "tp" in strategy:
            assert any(kind in ("DistributedLinear", "DistributedConv1D") for kind in kinds)
    # Saved small, and as PEFT saves it.
    base = _model(name, seed=7).get_base_model()
    saved = tmp_path / "adapters" / "adapter_model.safetensors"
    assert saved.stat().st_size < sum(4 * p.numel() for p in base.parameters()) / 2 or name != "llama"
    plain = PeftModel.from_pretrained(_plain_base(name), tmp_path / "adapters").eval()
    torch.testing.assert_close(plain(input_ids=_batch(99)).logits.detach(), logits, atol=1e-5, rtol=1e-5)
    for losses, count in ranks(_resume, size, name, str(tmp_path), **run):
        assert losses == pytest.approx(expected[STEPS:], abs=1e-5)
        assert count == trained
    for found in ranks(_load, size, name, str(tmp_path), **run):
        torch.testing.assert_close(found, logits, atol=1e-5, rtol=1e-5)


def _plain_base(name):
    import transformers as hf

    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(tiny_config(ADAPTERS[name][0], VOCABULARY))


def _wrong_adapters(folder):
    from smp_runtime.errors import CheckpointError

    model, _ = _wrapped("llama")
    model.save_pretrained(f"{folder}/adapters")
    smp.barrier()
    model.module.add_adapter("second", model.module.peft_config["default"])
    for part in model.modules():  # another kind of adapter than the saved one
        if hasattr(part, "lora_A") and "second" in part.lora_A and "default" in part.lora_A:
            del part.lora_A["default"]
    try:
        smp.resume_from_checkpoint(folder, tag="adapters", partial=False, load_optimizer=False)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.client("PEFT", "LoRA, resume", "dp 2")
def test_adapters_of_another_model_are_refused(ranks, tmp_path):
    for said in ranks(_wrong_adapters, 2, str(tmp_path), config={"ddp": True}):
        assert "are not those of 'default' in this model" in said
