"""Llama."""

from __future__ import annotations

import functools
from typing import Any

from smp_runtime.module_conversion.huggingface.causal import activation_name, register_causal, rotary_settings
from smp_runtime.module_conversion.huggingface.translation import CausalNames, LayerNames, parameter_names, translators

NAMES = CausalNames(
    root="model",
    layers="layers",
    outer=parameter_names({"embed_tokens": "word_embedding", "norm": "layernorm"}, "weight"),
    layer=LayerNames(
        {
            **parameter_names(
                {
                    "self_attn.q_proj": "attention.query",
                    "self_attn.k_proj": "attention.key",
                    "self_attn.v_proj": "attention.value",
                    "self_attn.o_proj": "attention.dense",
                    "mlp.gate_proj": "output.gate",
                    "mlp.up_proj": "output.dense1",
                    "mlp.down_proj": "output.dense2",
                }
            ),
            "input_layernorm.weight": "attention.pre_layernorm.weight",
            "post_attention_layernorm.weight": "output.pre_layernorm.weight",
        }
    ),
)


def settings(config: Any) -> dict[str, Any]:
    """Return the arguments of the distributed model for a ``LlamaConfig``."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "num_key_value_heads": config.num_key_value_heads,
        "attention_head_size": size,
        "intermediate_size": config.intermediate_size,
        "padding_idx": config.pad_token_id,
        "attention_dropout_prob": config.attention_dropout,
        "hidden_dropout_prob": 0.0,
        "activation": activation_name(config.hidden_act),
        "layernorm_epsilon": config.rms_norm_eps,
        "rms_norm": True,
        "gated_mlp": True,
        "use_qkv_bias": config.attention_bias,
        "use_attn_dense_bias": config.attention_bias,
        "use_mlp_bias": config.mlp_bias,
        **rotary_settings(config, size),
    }


register_model = functools.partial(register_causal, settings=settings, names=NAMES)
translate_hf_state_dict_to_smdistributed_llama, translate_state_dict_to_hf_llama = translators(
    NAMES, "Hugging Face's Llama"
)
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_llama
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_llama
