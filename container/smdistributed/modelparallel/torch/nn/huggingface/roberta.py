"""``smp.nn.huggingface.roberta``: states of RoBERTa."""

from smp_runtime.module_conversion.huggingface.roberta import (
    translate_hf_state_dict_to_smdistributed,
    translate_hf_state_dict_to_smdistributed_roberta,
    translate_state_dict_to_hf_roberta,
    translate_state_dict_to_smdistributed,
)

__all__ = [
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_roberta",
    "translate_state_dict_to_hf_roberta",
    "translate_state_dict_to_smdistributed",
]
