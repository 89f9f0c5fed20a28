"""RoBERTa."""

from __future__ import annotations

from smp_runtime.module_conversion.huggingface.encoder import NAMES
from smp_runtime.module_conversion.huggingface.translation import translators

translate_hf_state_dict_to_smdistributed_roberta, translate_state_dict_to_hf_roberta = translators(
    NAMES, "a Hugging Face RoBERTa model"
)
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_roberta
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_roberta
