"""``smp.nn.huggingface.gptj``: states of GPT-J."""

from smp_runtime.module_conversion.huggingface.gptj import (
    translate_hf_gptj_state_dict_to_smdistributed,
    translate_hf_gptj_state_dict_to_smdistributed_gptj,
    translate_hf_state_dict_to_smdistributed,
    translate_hf_state_dict_to_smdistributed_gptj,
    translate_state_dict_to_hf_gptj,
    translate_state_dict_to_smdistributed,
)

__all__ = [
    "translate_hf_gptj_state_dict_to_smdistributed",
    "translate_hf_gptj_state_dict_to_smdistributed_gptj",
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gptj",
    "translate_state_dict_to_hf_gptj",
    "translate_state_dict_to_smdistributed",
]
