"""``smp.nn.huggingface.gptneox``: states of GPT-NeoX."""

from smp_runtime.module_conversion.huggingface.gptneox import (
    translate_hf_state_dict_to_smdistributed,
    translate_hf_state_dict_to_smdistributed_gptneox,
    translate_state_dict_to_hf_gptneox,
    translate_state_dict_to_smdistributed,
)

__all__ = [
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gptneox",
    "translate_state_dict_to_hf_gptneox",
    "translate_state_dict_to_smdistributed",
]
