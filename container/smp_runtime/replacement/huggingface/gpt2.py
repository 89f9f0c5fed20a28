"""GPT-2."""

from __future__ import annotations

import functools
import math
from typing import Any

from smp_runtime.replacement.huggingface.causal import activation, register_causal
from smp_runtime.replacement.huggingface.translation import CausalNames, LayerNames, parameter_names, translators

NAMES = CausalNames(
    root="transformer",
    layers="h",
    outer={
        **parameter_names({"wte": "word_embedding", "wpe": "position_embedding"}, "weight"),
        **parameter_names({"ln_f": "layernorm"}),
    },
    layer=LayerNames(
        parameter_names(
            {
                "ln_1": "attention.pre_layernorm",
                "attn.c_attn": ("attention.query", "attention.key", "attention.value"),
                "attn.c_proj": "attention.dense",
                "ln_2": "output.pre_layernorm",
                "mlp.c_fc": "output.dense1",
                "mlp.c_proj": "output.dense2",
            }
        ),
        transposed=frozenset({"attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"}),
    ),
)


def settings(config: Any) -> dict[str, Any]:
    """Arguments of the distributed model for a ``GPT2Config``."""
    return {
        "intermediate_size": config.n_inner if config.n_inner is not None else 4 * config.n_embd,
        "num_positions": config.n_positions,
        "attention_dropout_prob": config.attn_pdrop,
        "hidden_dropout_prob": config.resid_pdrop,
        "embedding_dropout_prob": config.embd_pdrop,
        "activation": activation(config.activation_function),
        "layernorm_epsilon": config.layer_norm_epsilon,
        "output_initializer_range": config.initializer_range / math.sqrt(2 * config.n_layer),
        "scale_attention_scores": config.scale_attn_weights,
        "scale_attn_by_layer_idx": config.scale_attn_by_inverse_layer_idx,
        "attention_in_fp32": config.reorder_and_upcast_attn,
    }


register_model = functools.partial(register_causal, settings=settings, names=NAMES, has_cross=True)
translate_hf_state_dict_to_smdistributed_gpt2, translate_state_dict_to_hf_gpt2 = translators(
    NAMES, "Hugging Face's GPT-2"
)
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gpt2
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gpt2
