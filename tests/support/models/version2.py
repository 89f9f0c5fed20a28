"""Small models of Transformers for version 2."""

from __future__ import annotations

from typing import Any


def make_llama(layers: int = 2) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = _size() | {"num_hidden_layers": layers}
    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, intermediate_size=64, **size))


def make_neox() -> Any:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(GPTNeoXConfig(intermediate_size=64, **_size()))


def make_mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return _with_any_type(
        MixtralForCausalLM(MixtralConfig(num_key_value_heads=2, num_local_experts=4, intermediate_size=64, **_size()))
    )


def _size() -> dict[str, int]:
    return {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def make_gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, **dropout))


def make_qwen_moe() -> Any:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    sizes = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "intermediate_size": 64}
    config = Qwen2MoeConfig(num_experts=4, num_experts_per_tok=2, num_key_value_heads=2, **sizes, **_size())
    return _with_any_type(Qwen2MoeForCausalLM(config))


def _with_any_type(model: Any) -> Any:
    """Let experts of Transformers 5 compute in float64, which its grouped kernel does not."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model
