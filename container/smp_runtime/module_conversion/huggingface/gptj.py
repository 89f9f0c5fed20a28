"""GPT-J."""

from __future__ import annotations

import functools
from typing import Any

import torch

from smp_runtime.module_conversion.huggingface.causal import activation_name, register_causal
from smp_runtime.module_conversion.huggingface.translation import CausalNames, LayerNames, parameter_names, translators
from smp_runtime.nn.distributed_module import NotDistributableError

NAMES = CausalNames(
    root="transformer",
    layers="h",
    outer={**parameter_names({"wte": "word_embedding"}, "weight"), **parameter_names({"ln_f": "layernorm"})},
    layer=LayerNames(
        {
            **parameter_names({"ln_1": "attention.pre_layernorm"}),
            "attn.k_proj.weight": "attention.key.weight",
            "attn.v_proj.weight": "attention.value.weight",
            "attn.q_proj.weight": "attention.query.weight",
            "attn.out_proj.weight": "attention.dense.weight",
            **parameter_names({"mlp.fc_in": "output.dense1", "mlp.fc_out": "output.dense2"}),
        }
    ),
)


def settings(config: Any) -> dict[str, Any]:
    """Return the arguments of the distributed model for a ``GPTJConfig``."""
    size = config.n_embd // config.n_head
    if config.rotary_dim is None or config.rotary_dim > size:
        raise NotDistributableError(f"its rotary_dim is {config.rotary_dim}; use a number up to the head size, {size}")
    steps = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64, device="cpu")
    return {
        "intermediate_size": config.n_inner if config.n_inner is not None else 4 * config.n_embd,
        "attention_dropout_prob": config.attn_pdrop,
        "hidden_dropout_prob": config.resid_pdrop,
        "embedding_dropout_prob": config.embd_pdrop,
        "activation": activation_name(config.activation_function),
        "layernorm_epsilon": config.layer_norm_epsilon,
        "lm_head_bias": True,
        "attention_in_fp32": True,
        "parallel_attn_output": True,
        "single_pre_layernorm": True,
        "use_qkv_bias": False,
        "use_attn_dense_bias": False,
        "rotary_frequencies": tuple((1.0 / (10000 ** (steps / config.rotary_dim))).tolist()),
        "rotary_interleaved": True,
    }


register_model = functools.partial(register_causal, settings=settings, names=NAMES)
translate_hf_state_dict_to_smdistributed_gptj, translate_state_dict_to_hf_gptj = translators(
    NAMES, "Hugging Face's GPT-J"
)
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptj
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptj
translate_hf_gptj_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptj
translate_hf_gptj_state_dict_to_smdistributed_gptj = translate_hf_state_dict_to_smdistributed_gptj
