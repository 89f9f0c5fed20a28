"""GPT-Neo."""

from __future__ import annotations

from typing import Any

from smp_runtime.replacement.huggingface.causal import activation, register_causal
from smp_runtime.replacement.huggingface.translation import CausalNames, LayerNames, translators

NAMES = CausalNames(
    root="transformer",
    layers="h",
    outer={
        "wte.weight": "word_embedding.weight",
        "wpe.weight": "position_embedding.weight",
        "ln_f.weight": "layernorm.weight",
        "ln_f.bias": "layernorm.bias",
    },
    layer=LayerNames(
        {
            "ln_1.weight": "attention.pre_layernorm.weight",
            "ln_1.bias": "attention.pre_layernorm.bias",
            "attn.attention.k_proj.weight": "attention.key.weight",
            "attn.attention.v_proj.weight": "attention.value.weight",
            "attn.attention.q_proj.weight": "attention.query.weight",
            "attn.attention.out_proj.weight": "attention.dense.weight",
            "attn.attention.out_proj.bias": "attention.dense.bias",
            "ln_2.weight": "output.pre_layernorm.weight",
            "ln_2.bias": "output.pre_layernorm.bias",
            "mlp.c_fc.weight": "output.dense1.weight",
            "mlp.c_fc.bias": "output.dense1.bias",
            "mlp.c_proj.weight": "output.dense2.weight",
            "mlp.c_proj.bias": "output.dense2.bias",
        }
    ),
)


def settings(config: Any) -> dict[str, Any]:
    """Arguments of the distributed model for a ``GPTNeoConfig``."""
    return {
        "num_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "attention_head_size": config.hidden_size // config.num_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size or 4 * config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_positions": config.max_position_embeddings,
        "causal_mask_size": config.max_position_embeddings,
        "attention_dropout_prob": float(config.attention_dropout),
        "hidden_dropout_prob": float(config.resid_dropout),
        "embedding_dropout_prob": float(config.embed_dropout),
        "activation": activation(config.activation_function),
        "layernorm_epsilon": config.layer_norm_epsilon,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "pre_layernorm": True,
        "post_layernorm": False,
        "final_layernorm": True,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_in_fp32": True,
        "scale_attention_scores": False,
        "use_qkv_bias": False,
        "window_sizes": [config.window_size if kind == "local" else None for kind in config.attention_layers],
    }


def register_model(kind: type) -> None:
    """Register GPT-Neo's class ``kind``."""
    register_causal(kind, settings, NAMES)


translate_hf_state_dict_to_smdistributed_gptneo, translate_state_dict_to_hf_gptneo = translators(
    NAMES, "Hugging Face's GPT-Neo"
)
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptneo
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptneo
translate_hf_gptneo_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptneo
translate_hf_gptneo_state_dict_to_smdistributed_gptneo = translate_hf_state_dict_to_smdistributed_gptneo
