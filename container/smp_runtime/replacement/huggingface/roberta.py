"""RoBERTa."""

from __future__ import annotations

from smp_runtime.replacement.huggingface.encoder import NAMES, register_encoder
from smp_runtime.replacement.huggingface.translation import translators


def register_model(kind: type) -> None:
    """Register RoBERTa's encoder ``kind``."""
    register_encoder(kind)


translate_hf_state_dict_to_smdistributed_roberta, translate_state_dict_to_hf_roberta = translators(
    NAMES, "a Hugging Face RoBERTa model"
)
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_roberta
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_roberta
