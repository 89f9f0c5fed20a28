"""GPT-2."""

from __future__ import annotations

import math
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
            "attn.c_attn.weight": ("attention.query.weight", "attention.key.weight", "attention.value.weight"),
            "attn.c_attn.bias": ("attention.query.bias", "attention.key.bias", "attention.value.bias"),
            "attn.c_proj.weight": "attention.dense.weight",
            "attn.c_proj.bias": "attention.dense.bias",
            "ln_2.weight": "output.pre_layernorm.weight",
            "ln_2.bias": "output.pre_layernorm.bias",
            "mlp.c_fc.weight": "output.dense1.weight",
            "mlp.c_fc.bias": "output.dense1.bias",
            "mlp.c_proj.weight": "output.dense2.weight",
            "mlp.c_proj.bias": "output.dense2.bias",
        },
        transposed=frozenset({"attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"}),
    ),
)


def settings(config: Any) -> dict[str, Any]:
    """Arguments of the distributed model for a ``GPT2Config``."""
    return {
        "num_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "attention_head_size": config.n_embd // config.n_head,
        "hidden_size": config.n_embd,
        "intermediate_size": config.n_inner if config.n_inner is not None else 4 * config.n_embd,
        "vocab_size": config.vocab_size,
        "num_positions": config.n_positions,
        "causal_mask_size": config.n_positions,
        "attention_dropout_prob": config.attn_pdrop,
        "hidden_dropout_prob": config.resid_pdrop,
        "embedding_dropout_prob": config.embd_pdrop,
        "activation": activation(config.activation_function),
        "layernorm_epsilon": config.layer_norm_epsilon,
        "initializer_range": config.initializer_range,
        "output_initializer_range": config.initializer_range / math.sqrt(2 * config.n_layer),
        "use_normal_initialization": True,
        "pre_layernorm": True,
        "post_layernorm": False,
        "final_layernorm": True,
        "tie_word_embeddings": config.tie_word_embeddings,
        "scale_attention_scores": config.scale_attn_weights,
        "scale_attn_by_layer_idx": config.scale_attn_by_inverse_layer_idx,
        "attention_in_fp32": config.reorder_and_upcast_attn,
    }


def register_model(kind: type) -> None:
    """Register GPT-2's class ``kind``."""
    register_causal(kind, settings, NAMES, has_cross=True)


translate_hf_state_dict_to_smdistributed_gpt2, translate_state_dict_to_hf_gpt2 = translators(
    NAMES, "Hugging Face's GPT-2"
)
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gpt2
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gpt2
