"""``smp.nn.huggingface.llama``: states of Llama."""

from smp_runtime.module_conversion.huggingface.llama import (
    translate_hf_state_dict_to_smdistributed,
    translate_hf_state_dict_to_smdistributed_llama,
    translate_state_dict_to_hf_llama,
    translate_state_dict_to_smdistributed,
)

__all__ = [
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_llama",
    "translate_state_dict_to_hf_llama",
    "translate_state_dict_to_smdistributed",
]
