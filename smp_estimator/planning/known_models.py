"""Models that are known by name: the sizes of their public configurations, under their names in the model hub too."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from smp_config import ConfigError
from smp_config.errors import suggest
from smp_estimator.planning.model_config import shape_of
from smp_estimator.planning.model_shape import SHAPES, ModelShape, advise_for_hub_name


def _llama(layers: int, hidden: int, heads: int, feed_forward: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": feed_forward,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        **more,
    }


_LLAMA_2: Mapping[str, Any] = {"vocab_size": 32_000, "max_position_embeddings": 4096}
_LLAMA_3: Mapping[str, Any] = {"vocab_size": 128_256, "max_position_embeddings": 8192, "num_key_value_heads": 8}
_LLAMA_3_1: Mapping[str, Any] = {**_LLAMA_3, "max_position_embeddings": 131_072}
_MISTRAL: Mapping[str, Any] = {"vocab_size": 32_000, "max_position_embeddings": 32_768, "num_key_value_heads": 8}
_EXPERTS: Mapping[str, Any] = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}

#: Fields of the public configurations of Transformers, by name.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama-2-7b": _llama(32, 4096, 32, 11_008, **_LLAMA_2),
    "llama-2-13b": _llama(40, 5120, 40, 13_824, **_LLAMA_2),
    "llama-2-70b": _llama(80, 8192, 64, 28_672, num_key_value_heads=8, **_LLAMA_2),
    "llama-3-8b": _llama(32, 4096, 32, 14_336, **_LLAMA_3),
    "llama-3-70b": _llama(80, 8192, 64, 28_672, **_LLAMA_3),
    "llama-3.1-8b": _llama(32, 4096, 32, 14_336, **_LLAMA_3_1),
    "llama-3.1-70b": _llama(80, 8192, 64, 28_672, **_LLAMA_3_1),
    "llama-3.1-405b": _llama(126, 16_384, 128, 53_248, **_LLAMA_3_1),
    "llama-3.2-1b": _llama(16, 2048, 32, 8192, **{**_LLAMA_3_1, "head_dim": 64, "tie_word_embeddings": True}),
    "llama-3.2-3b": _llama(28, 3072, 24, 8192, **{**_LLAMA_3_1, "head_dim": 128, "tie_word_embeddings": True}),
    "llama-3.3-70b": _llama(80, 8192, 64, 28_672, **_LLAMA_3_1),
    "mistral-7b": _llama(32, 4096, 32, 14_336, **{**_MISTRAL, "model_type": "mistral"}),
    "mixtral-8x7b": _llama(32, 4096, 32, 14_336, **{**_MISTRAL, **_EXPERTS}),
    "mixtral-8x22b": _llama(56, 6144, 48, 16_384, **{**_MISTRAL, **_EXPERTS, "max_position_embeddings": 65_536}),
}

#: Names in the model hub, in small letters. Variants that were trained further, such as -Instruct, have the same sizes.
HUB_NAMES: dict[str, str] = {
    "openai-community/gpt2": "gpt2",
    "openai-community/gpt2-medium": "gpt2-medium",
    "openai-community/gpt2-large": "gpt2-large",
    "openai-community/gpt2-xl": "gpt2-xl",
    "eleutherai/gpt-j-6b": "gptj-6b",
    "eleutherai/gpt-neox-20b": "gpt-neox-20b",
    "meta-llama/llama-2-7b-hf": "llama-2-7b",
    "meta-llama/llama-2-13b-hf": "llama-2-13b",
    "meta-llama/llama-2-70b-hf": "llama-2-70b",
    "meta-llama/meta-llama-3-8b": "llama-3-8b",
    "meta-llama/meta-llama-3-70b": "llama-3-70b",
    "meta-llama/llama-3.1-8b": "llama-3.1-8b",
    "meta-llama/llama-3.1-70b": "llama-3.1-70b",
    "meta-llama/llama-3.1-405b": "llama-3.1-405b",
    "meta-llama/llama-3.2-1b": "llama-3.2-1b",
    "meta-llama/llama-3.2-3b": "llama-3.2-3b",
    "meta-llama/llama-3.3-70b": "llama-3.3-70b",
    "mistralai/mistral-7b-v0.1": "mistral-7b",
    "mistralai/mixtral-8x7b-v0.1": "mixtral-8x7b",
    "mistralai/mixtral-8x22b-v0.1": "mixtral-8x22b",
}


def short_name(name: str) -> str | None:
    """Return the name under which a model is known here; None for an unknown one."""
    if name in SHAPES or name in CONFIGURATIONS:
        return name
    return HUB_NAMES.get(name.lower().removesuffix("-instruct"))


def named_shape(name: str) -> ModelShape:
    """Return the shape of a model by its name here or in the model hub; raise ConfigError for an unknown one."""
    known = short_name(name)
    if known is None:
        names = [*SHAPES, *CONFIGURATIONS]
        near = suggest(name.rpartition("/")[2].lower(), names)
        raise ConfigError(
            f"there is no model named {name!r}{near}; {advise_for_hub_name(name)}known are {', '.join(names)}: use one "
            "of these, or give layers, hidden, heads, vocabulary and sequence, or the path of a configuration of Transformers",
            code="SMP110",
        )
    return SHAPES[known] if known in SHAPES else _of_configuration(known)


@cache
def _of_configuration(name: str) -> ModelShape:
    return shape_of(CONFIGURATIONS[name], f"the public one of {name}")
