"""``smp.nn.huggingface.bert``: states of BERT."""

from smp_runtime.module_conversion.huggingface.bert import (
    translate_hf_state_dict_to_smdistributed,
    translate_hf_state_dict_to_smdistributed_bert,
    translate_state_dict_to_hf_bert,
    translate_state_dict_to_smdistributed,
)

__all__ = [
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_bert",
    "translate_state_dict_to_hf_bert",
    "translate_state_dict_to_smdistributed",
]
