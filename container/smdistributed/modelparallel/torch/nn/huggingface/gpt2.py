"""``smp.nn.huggingface.gpt2``: states of GPT-2, and hooks for its blocks."""

from smp_runtime.module_conversion.huggingface.gpt2 import (
    get_hf_gpt2_transformer_layer_hooks,
    translate_hf_block_state_dict_to_smdistributed,
    translate_hf_state_dict_to_smdistributed,
    translate_hf_state_dict_to_smdistributed_gpt2,
    translate_layer_state_dict_to_hf_gpt2_block,
    translate_state_dict_to_hf_gpt2,
    translate_state_dict_to_smdistributed,
)

__all__ = [
    "get_hf_gpt2_transformer_layer_hooks",
    "translate_hf_block_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gpt2",
    "translate_layer_state_dict_to_hf_gpt2_block",
    "translate_state_dict_to_hf_gpt2",
    "translate_state_dict_to_smdistributed",
]
