"""``smp.nn.huggingface.gptneo``: states of GPT-Neo."""

from smp_runtime.module_conversion.huggingface.gptneo import (
    translate_hf_gptneo_state_dict_to_smdistributed,
    translate_hf_gptneo_state_dict_to_smdistributed_gptneo,
    translate_hf_state_dict_to_smdistributed,
    translate_hf_state_dict_to_smdistributed_gptneo,
    translate_state_dict_to_hf_gptneo,
    translate_state_dict_to_smdistributed,
)

__all__ = [
    "translate_hf_gptneo_state_dict_to_smdistributed",
    "translate_hf_gptneo_state_dict_to_smdistributed_gptneo",
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gptneo",
    "translate_state_dict_to_hf_gptneo",
    "translate_state_dict_to_smdistributed",
]
