"""GPT-NeoX."""

from __future__ import annotations

import functools
from typing import Any

from smp_runtime.module_conversion.huggingface.causal import activation_name, register_causal, rotary_settings
from smp_runtime.module_conversion.huggingface.translation import (
    CausalNames,
    LayerNames,
    parameter_names,
    transformers_major,
    translators,
)

#: Transformers 5 calls the head like those of other models; states of either kind are read.
_HEADS = ("lm_head", "embed_out") if transformers_major() >= 5 else ("embed_out", "lm_head")

NAMES = CausalNames(
    root="gpt_neox",
    layers="layers",
    head=f"{_HEADS[0]}.weight",
    head_bias=f"{_HEADS[0]}.bias",
    other_head=_HEADS[1],
    outer={
        **parameter_names({"embed_in": "word_embedding"}, "weight"),
        **parameter_names({"final_layer_norm": "layernorm"}),
    },
    layer=LayerNames(
        parameter_names(
            {
                "input_layernorm": "attention.pre_layernorm",
                "post_attention_layernorm": "output.pre_layernorm",
                "attention.query_key_value": "attention.query_key_value",
                "attention.dense": "attention.dense",
                "mlp.dense_h_to_4h": "output.dense1",
                "mlp.dense_4h_to_h": "output.dense2",
            }
        )
    ),
)


def settings(config: Any) -> dict[str, Any]:
    """Return the arguments of the distributed model for a ``GPTNeoXConfig``."""
    return {
        "intermediate_size": config.intermediate_size,
        "attention_dropout_prob": config.attention_dropout,
        "hidden_dropout_prob": config.hidden_dropout,
        "embedding_dropout_prob": config.hidden_dropout,
        "activation": activation_name(config.hidden_act),
        "layernorm_epsilon": config.layer_norm_eps,
        "parallel_attn_output": config.use_parallel_residual,
        "fused_qkv": True,
        "use_qkv_bias": config.attention_bias,
        "use_attn_dense_bias": config.attention_bias,
        **rotary_settings(config, config.hidden_size // config.num_attention_heads),
    }


register_model = functools.partial(register_causal, settings=settings, names=NAMES)
translate_hf_state_dict_to_smdistributed_gptneox, translate_state_dict_to_hf_gptneox = translators(
    NAMES, "Hugging Face's GPT-NeoX"
)
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptneox
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptneox
