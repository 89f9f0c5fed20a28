"""``smp.nn.huggingface.gpt2``: states of GPT-2."""

from smp_runtime.replacement.huggingface.gpt2 import (
    translate_hf_state_dict_to_smdistributed,
    translate_hf_state_dict_to_smdistributed_gpt2,
    translate_state_dict_to_hf_gpt2,
    translate_state_dict_to_smdistributed,
)

__all__ = [
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gpt2",
    "translate_state_dict_to_hf_gpt2",
    "translate_state_dict_to_smdistributed",
]
