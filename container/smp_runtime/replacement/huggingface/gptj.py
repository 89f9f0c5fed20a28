"""GPT-J."""

from __future__ import annotations

from typing import Any

import torch

from smp_runtime.nn.distributed_module import NotDistributableError
from smp_runtime.replacement.huggingface.causal import activation, register_causal
from smp_runtime.replacement.huggingface.translation import CausalNames, LayerNames, translators

NAMES = CausalNames(
    root="transformer",
    layers="h",
    outer={
        "wte.weight": "word_embedding.weight",
        "ln_f.weight": "layernorm.weight",
        "ln_f.bias": "layernorm.bias",
    },
    layer=LayerNames(
        {
            "ln_1.weight": "attention.pre_layernorm.weight",
            "ln_1.bias": "attention.pre_layernorm.bias",
            "attn.k_proj.weight": "attention.key.weight",
            "attn.v_proj.weight": "attention.value.weight",
            "attn.q_proj.weight": "attention.query.weight",
            "attn.out_proj.weight": "attention.dense.weight",
            "mlp.fc_in.weight": "output.dense1.weight",
            "mlp.fc_in.bias": "output.dense1.bias",
            "mlp.fc_out.weight": "output.dense2.weight",
            "mlp.fc_out.bias": "output.dense2.bias",
        }
    ),
)


def settings(config: Any) -> dict[str, Any]:
    """Arguments of the distributed model for a ``GPTJConfig``."""
    size = config.n_embd // config.n_head
    if config.rotary_dim is None or config.rotary_dim > size:
        raise NotDistributableError(f"its rotary_dim is {config.rotary_dim}; use a number up to the head size, {size}")
    steps = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64, device="cpu")
    return {
        "num_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "attention_head_size": size,
        "hidden_size": config.n_embd,
        "intermediate_size": config.n_inner if config.n_inner is not None else 4 * config.n_embd,
        "vocab_size": config.vocab_size,
        "num_positions": 0,
        "causal_mask_size": config.n_positions,
        "attention_dropout_prob": config.attn_pdrop,
        "hidden_dropout_prob": config.resid_pdrop,
        "embedding_dropout_prob": config.embd_pdrop,
        "activation": activation(config.activation_function),
        "layernorm_epsilon": config.layer_norm_epsilon,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "pre_layernorm": True,
        "post_layernorm": False,
        "final_layernorm": True,
        "tie_word_embeddings": config.tie_word_embeddings,
        "lm_head_bias": True,
        "attention_in_fp32": True,
        "parallel_attn_output": True,
        "single_pre_layernorm": True,
        "use_qkv_bias": False,
        "use_attn_dense_bias": False,
        "rotary_frequencies": tuple((1.0 / (10000 ** (steps / config.rotary_dim))).tolist()),
        "rotary_interleaved": True,
    }


def register_model(kind: type) -> None:
    """Register GPT-J's class ``kind``."""
    register_causal(kind, settings, NAMES)


translate_hf_state_dict_to_smdistributed_gptj, translate_state_dict_to_hf_gptj = translators(
    NAMES, "Hugging Face's GPT-J"
)
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptj
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptj
translate_hf_gptj_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptj
translate_hf_gptj_state_dict_to_smdistributed_gptj = translate_hf_state_dict_to_smdistributed_gptj
