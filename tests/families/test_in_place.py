"""Models of Transformers that no distributed class stands for: split in place, they train as in one process."""

from __future__ import annotations

import pytest
import torch
from support.models.huggingface import T5
from support.training.closeness import close

VOCABULARY, BATCH, SEQ, STEPS = 48, 4, 8, 3
_SIZES = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA_LIKE = {
    **_SIZES,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "head_dim": 8,
    "max_position_embeddings": 32,
}
_OPT_LIKE = {
    **_SIZES,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "word_embed_proj_dim": 32,
    "max_position_embeddings": 32,
    "dropout": 0.0,
}
_EXPERTS = {**_LLAMA_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2}

#: By the name of a model's class: the name of its configuration's, its settings, and which maps of its first block are columns
#: and rows of Megatron's kind.
FAMILIES = {
    "Qwen3ForCausalLM": ("Qwen3Config", _LLAMA_LIKE, 7),
    "Gemma2ForCausalLM": ("Gemma2Config", _LLAMA_LIKE, 7),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", _LLAMA_LIKE, 7),
    "MistralForCausalLM": ("MistralConfig", _LLAMA_LIKE, 7),
    "MixtralForCausalLM": ("MixtralConfig", _EXPERTS, 16),  # the router's results are gathered
    "Olmo2ForCausalLM": ("Olmo2Config", _LLAMA_LIKE, 3),  # queries and keys are normed over all heads
    "Phi3ForCausalLM": ("Phi3Config", _LLAMA_LIKE, 0),  # packed
    "OPTForCausalLM": ("OPTConfig", _OPT_LIKE, 6),
    "T5ForConditionalGeneration": ("T5Config", {**_SIZES, **T5}, 2),
}
SAMPLE = {("Qwen3ForCausalLM", False)}


def _model(name):
    import transformers as hf

    config, settings, _ = FAMILIES[name]
    torch.manual_seed(0)
    return getattr(hf, name)(getattr(hf, config)(**settings)).train()


def _batches():
    for step in range(STEPS):
        yield torch.randint(3, VOCABULARY, (BATCH, SEQ), generator=torch.Generator().manual_seed(step))


def _optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def _alone(name):
    model = _model(name)
    optimizer = _optimizer(model.parameters())
    losses = []
    for ids in _batches():
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model


def _train(name, folder=None):
    import smdistributed.modelparallel.torch as smp

    net = _model(name)
    smp.set_tensor_parallelism(net)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(_optimizer(model.parameters()))

    @smp.step
    def step(ids):
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    losses = []
    for ids in _batches():
        optimizer.zero_grad()
        mine = ids if smp.state.cfg.prescaled_batch else ids.chunk(smp.dp_size())[smp.dp_rank()]
        loss = float(step(mine).reduce_mean())
        optimizer.step()
        losses.append(sum(smp.allgather(loss, smp.DP_GROUP)) / smp.dp_size())
    if folder is not None:
        model.module.save_pretrained(folder)
    splits = [part.split for part in model.modules() if type(part).__name__ == "PlannedLinear"]
    return losses, model.state_dict(), sum(not split.joins for split in splits)


@pytest.mark.parametrize(
    ("name", "prescaled"),
    [
        pytest.param(name, prescaled, marks=[] if (name, prescaled) in SAMPLE else pytest.mark.full)
        for name in FAMILIES
        for prescaled in (True, False)
    ],
)
def test_a_family_trains_as_in_one_process(ranks, name, prescaled):
    expected, model = _alone(name)
    config = {"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": prescaled}
    for losses, state, pairs in ranks(_train, 2, name, config=config):
        assert losses == pytest.approx(expected, abs=1e-5)
        assert state.keys() == model.state_dict().keys()
        for key, value in model.state_dict().items():
            close(state[key], value, key, 1e-4)
        assert pairs >= 2 * FAMILIES[name][2]


@pytest.mark.full
def test_what_is_saved_is_a_model_of_its_class(ranks, tmp_path):
    import transformers as hf

    ranks(_train, 2, "Qwen3ForCausalLM", str(tmp_path), config={"tensor_parallel_degree": 2, "ddp": True})
    _, model = _alone("Qwen3ForCausalLM")
    loaded = hf.Qwen3ForCausalLM.from_pretrained(tmp_path)
    for key, value in model.state_dict().items():
        close(loaded.state_dict()[key], value, key, 1e-4)
