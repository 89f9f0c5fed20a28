"""Llama."""

from __future__ import annotations

from typing import Any

from smp_runtime.replacement.huggingface.causal import activation, register_causal, rotary_settings
from smp_runtime.replacement.huggingface.translation import CausalNames, LayerNames, translators

NAMES = CausalNames(
    root="model",
    layers="layers",
    outer={"embed_tokens.weight": "word_embedding.weight", "norm.weight": "layernorm.weight"},
    layer=LayerNames(
        {
            "self_attn.q_proj.weight": "attention.query.weight",
            "self_attn.q_proj.bias": "attention.query.bias",
            "self_attn.k_proj.weight": "attention.key.weight",
            "self_attn.k_proj.bias": "attention.key.bias",
            "self_attn.v_proj.weight": "attention.value.weight",
            "self_attn.v_proj.bias": "attention.value.bias",
            "self_attn.o_proj.weight": "attention.dense.weight",
            "self_attn.o_proj.bias": "attention.dense.bias",
            "mlp.gate_proj.weight": "output.gate.weight",
            "mlp.gate_proj.bias": "output.gate.bias",
            "mlp.up_proj.weight": "output.dense1.weight",
            "mlp.up_proj.bias": "output.dense1.bias",
            "mlp.down_proj.weight": "output.dense2.weight",
            "mlp.down_proj.bias": "output.dense2.bias",
            "input_layernorm.weight": "attention.pre_layernorm.weight",
            "post_attention_layernorm.weight": "output.pre_layernorm.weight",
        }
    ),
)


def settings(config: Any) -> dict[str, Any]:
    """Arguments of the distributed model for a ``LlamaConfig``."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "num_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "attention_head_size": size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "num_positions": 0,
        "padding_idx": config.pad_token_id,
        "causal_mask_size": config.max_position_embeddings,
        "attention_dropout_prob": config.attention_dropout,
        "hidden_dropout_prob": 0.0,
        "activation": activation(config.hidden_act),
        "layernorm_epsilon": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "pre_layernorm": True,
        "post_layernorm": False,
        "final_layernorm": True,
        "rms_norm": True,
        "gated_mlp": True,
        "tie_word_embeddings": config.tie_word_embeddings,
        "use_qkv_bias": config.attention_bias,
        "use_attn_dense_bias": config.attention_bias,
        "use_mlp_bias": config.mlp_bias,
        **rotary_settings(config, size),
    }


def register_model(kind: type) -> None:
    """Register Llama's class ``kind``."""
    register_causal(kind, settings, NAMES)


translate_hf_state_dict_to_smdistributed_llama, translate_state_dict_to_hf_llama = translators(
    NAMES, "Hugging Face's Llama"
)
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_llama
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_llama
