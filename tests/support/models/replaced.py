"""Tiny models of the families of Transformers that tensor parallelism replaces as a whole."""

from __future__ import annotations

import torch

VOCABULARY = 43


def original_of(name):
    """A tiny model of the family ``name``, with random values everywhere."""
    import transformers as hf

    common = {"vocab_size": VOCABULARY, "attn_implementation": "eager"}
    gpt = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 16} | common
    quiet = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48} | common
    bert = sizes | {"max_position_embeddings": 18, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    make = {
        "gpt2": lambda: hf.GPT2Config(**gpt, **quiet),
        "gpt2 flags": lambda: hf.GPT2Config(
            **gpt, **quiet, scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True, n_inner=40
        ),
        "gptj": lambda: hf.GPTJConfig(**gpt, **quiet, rotary_dim=4),
        "gptneo": lambda: hf.GPTNeoConfig(
            hidden_size=32,
            num_heads=4,
            num_layers=2,
            attention_types=[[["global", "local"], 1]],
            window_size=3,
            max_position_embeddings=16,
            attention_dropout=0.0,
            resid_dropout=0.0,
            embed_dropout=0.0,
            **common,
        ),
        "gptneox": lambda: hf.GPTNeoXConfig(**sizes, max_position_embeddings=16, rotary_pct=0.5),
        "gptneox in turn": lambda: hf.GPTNeoXConfig(**sizes, max_position_embeddings=16, use_parallel_residual=False),
        "llama": lambda: hf.LlamaConfig(**sizes, max_position_embeddings=16, num_key_value_heads=4),
        "llama tied": lambda: hf.LlamaConfig(
            **sizes, max_position_embeddings=16, num_key_value_heads=2, tie_word_embeddings=True, pad_token_id=1
        ),
        "bert": lambda: hf.BertConfig(**bert),
        "roberta": lambda: hf.RobertaConfig(**bert),
    }
    torch.manual_seed(1)
    auto = hf.AutoModelForMaskedLM if name in ("bert", "roberta") else hf.AutoModelForCausalLM
    model = auto.from_config(make[name](), attn_implementation="eager")
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.1)
    return model


def translations_of(name):
    """Its translations of states: to the distributed form's names, and back."""
    import smdistributed.modelparallel.torch as smp

    family = name.split()[0]
    module = getattr(smp.nn.huggingface, family)
    to_ours = getattr(module, f"translate_hf_state_dict_to_smdistributed_{family}")
    return to_ours, getattr(module, f"translate_state_dict_to_hf_{family}")
