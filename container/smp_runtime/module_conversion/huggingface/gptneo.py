"""GPT-Neo."""

from __future__ import annotations

import functools
from typing import Any

from smp_runtime.module_conversion.huggingface.causal import activation_name, register_causal
from smp_runtime.module_conversion.huggingface.translation import CausalNames, LayerNames, parameter_names, translators

NAMES = CausalNames(
    root="transformer",
    layers="h",
    outer={
        **parameter_names({"wte": "word_embedding", "wpe": "position_embedding"}, "weight"),
        **parameter_names({"ln_f": "layernorm"}),
    },
    layer=LayerNames(
        {
            **parameter_names({"ln_1": "attention.pre_layernorm"}),
            "attn.attention.k_proj.weight": "attention.key.weight",
            "attn.attention.v_proj.weight": "attention.value.weight",
            "attn.attention.q_proj.weight": "attention.query.weight",
            **parameter_names({"attn.attention.out_proj": "attention.dense", "ln_2": "output.pre_layernorm"}),
            **parameter_names({"mlp.c_fc": "output.dense1", "mlp.c_proj": "output.dense2"}),
        }
    ),
)


def settings(config: Any) -> dict[str, Any]:
    """Return the arguments of the distributed model for a ``GPTNeoConfig``."""
    return {
        "intermediate_size": config.intermediate_size or 4 * config.hidden_size,
        "num_positions": config.max_position_embeddings,
        "attention_dropout_prob": float(config.attention_dropout),
        "hidden_dropout_prob": float(config.resid_dropout),
        "embedding_dropout_prob": float(config.embed_dropout),
        "activation": activation_name(config.activation_function),
        "layernorm_epsilon": config.layer_norm_epsilon,
        "attention_in_fp32": True,
        "scale_attention_scores": False,
        "use_qkv_bias": False,
        "window_sizes": [config.window_size if kind == "local" else None for kind in config.attention_layers],
    }


register_model = functools.partial(register_causal, settings=settings, names=NAMES)
translate_hf_state_dict_to_smdistributed_gptneo, translate_state_dict_to_hf_gptneo = translators(
    NAMES, "Hugging Face's GPT-Neo"
)
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptneo
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptneo
translate_hf_gptneo_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptneo
translate_hf_gptneo_state_dict_to_smdistributed_gptneo = translate_hf_state_dict_to_smdistributed_gptneo
