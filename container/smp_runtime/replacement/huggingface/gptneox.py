"""GPT-NeoX."""

from __future__ import annotations

from typing import Any

from smp_runtime.replacement.huggingface.causal import activation, register_causal, rotary_settings
from smp_runtime.replacement.huggingface.translation import CausalNames, LayerNames, translators

NAMES = CausalNames(
    root="gpt_neox",
    layers="layers",
    head="embed_out.weight",
    head_bias="embed_out.bias",
    outer={
        "embed_in.weight": "word_embedding.weight",
        "final_layer_norm.weight": "layernorm.weight",
        "final_layer_norm.bias": "layernorm.bias",
    },
    layer=LayerNames(
        {
            "input_layernorm.weight": "attention.pre_layernorm.weight",
            "input_layernorm.bias": "attention.pre_layernorm.bias",
            "post_attention_layernorm.weight": "output.pre_layernorm.weight",
            "post_attention_layernorm.bias": "output.pre_layernorm.bias",
            "attention.query_key_value.weight": "attention.query_key_value.weight",
            "attention.query_key_value.bias": "attention.query_key_value.bias",
            "attention.dense.weight": "attention.dense.weight",
            "attention.dense.bias": "attention.dense.bias",
            "mlp.dense_h_to_4h.weight": "output.dense1.weight",
            "mlp.dense_h_to_4h.bias": "output.dense1.bias",
            "mlp.dense_4h_to_h.weight": "output.dense2.weight",
            "mlp.dense_4h_to_h.bias": "output.dense2.bias",
        }
    ),
)


def settings(config: Any) -> dict[str, Any]:
    """Arguments of the distributed model for a ``GPTNeoXConfig``."""
    size = config.hidden_size // config.num_attention_heads
    return {
        "num_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "attention_head_size": size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "num_positions": 0,
        "causal_mask_size": config.max_position_embeddings,
        "attention_dropout_prob": config.attention_dropout,
        "hidden_dropout_prob": config.hidden_dropout,
        "embedding_dropout_prob": config.hidden_dropout,
        "activation": activation(config.hidden_act),
        "layernorm_epsilon": config.layer_norm_eps,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "pre_layernorm": True,
        "post_layernorm": False,
        "final_layernorm": True,
        "tie_word_embeddings": config.tie_word_embeddings,
        "parallel_attn_output": config.use_parallel_residual,
        "fused_qkv": True,
        "use_qkv_bias": config.attention_bias,
        "use_attn_dense_bias": config.attention_bias,
        **rotary_settings(config, size),
    }


def register_model(kind: type) -> None:
    """Register GPT-NeoX's class ``kind``."""
    register_causal(kind, settings, NAMES)


translate_hf_state_dict_to_smdistributed_gptneox, translate_state_dict_to_hf_gptneox = translators(
    NAMES, "Hugging Face's GPT-NeoX"
)
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptneox
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptneox
