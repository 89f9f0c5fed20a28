"""RoBERTa."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smp_runtime.nn.huggingface.encoder import NAMES, register_encoder


def register_model(kind: type) -> None:
    """Register RoBERTa's encoder ``kind``."""
    register_encoder(kind)


def translate_hf_state_dict_to_smdistributed_roberta(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> dict[str, Any]:
    """A state of a Hugging Face RoBERTa model for ``model.load_state_dict``; ``max_seq_len`` is accepted."""
    return NAMES.to_ours(state_dict)


def translate_state_dict_to_hf_roberta(state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
    """A full ``model.state_dict()`` for the Hugging Face RoBERTa model; ``max_seq_len`` is accepted."""
    return NAMES.to_theirs(state_dict)


translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_roberta
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_roberta
