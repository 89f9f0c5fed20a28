"""GPT-2: the whole model, or its blocks one by one."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from smp_runtime.errors import SMPUserError
from smp_runtime.module_conversion.huggingface.causal import (
    activation_name,
    common_settings,
    refuse_cross_attention,
    register_causal,
)
from smp_runtime.module_conversion.huggingface.translation import (
    BlockNames,
    CausalNames,
    LayerNames,
    parameter_names,
    translators,
)
from smp_runtime.nn.settings import LayerSettings

if TYPE_CHECKING:
    import torch

    from smp_runtime.module_conversion.registration import Arguments

NAMES = CausalNames(
    root="transformer",
    layers="h",
    outer={
        **parameter_names({"wte": "word_embedding", "wpe": "position_embedding"}, "weight"),
        **parameter_names({"ln_f": "layernorm"}),
    },
    layer=LayerNames(
        parameter_names(
            {
                "ln_1": "attention.pre_layernorm",
                "attn.c_attn": ("attention.query", "attention.key", "attention.value"),
                "attn.c_proj": "attention.dense",
                "ln_2": "output.pre_layernorm",
                "mlp.c_fc": "output.dense1",
                "mlp.c_proj": "output.dense2",
            }
        ),
        transposed=frozenset({"attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"}),
    ),
)


def settings(config: Any) -> dict[str, Any]:
    """Return the arguments of the distributed model for a ``GPT2Config``."""
    return {
        "intermediate_size": config.n_inner if config.n_inner is not None else 4 * config.n_embd,
        "num_positions": config.n_positions,
        "attention_dropout_prob": config.attn_pdrop,
        "hidden_dropout_prob": config.resid_pdrop,
        "embedding_dropout_prob": config.embd_pdrop,
        "activation": activation_name(config.activation_function),
        "layernorm_epsilon": config.layer_norm_epsilon,
        "output_initializer_range": config.initializer_range / math.sqrt(2 * config.n_layer),
        "scale_attention_scores": config.scale_attn_weights,
        "scale_attn_by_layer_idx": config.scale_attn_by_inverse_layer_idx,
        "attention_in_fp32": config.reorder_and_upcast_attn,
    }


register_model = functools.partial(register_causal, settings=settings, names=NAMES, has_cross=True)
translate_hf_state_dict_to_smdistributed_gpt2, translate_state_dict_to_hf_gpt2 = translators(
    NAMES, "Hugging Face's GPT-2"
)
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gpt2
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gpt2


# -- blocks of the model, each distributed by itself -------------------------------------------------------------------

BLOCKS = BlockNames("h", NAMES.layer)
translate_hf_block_state_dict_to_smdistributed, translate_layer_state_dict_to_hf_gpt2_block = translators(
    BLOCKS, "Hugging Face's GPT-2 whose blocks are distributed"
)


def get_hf_gpt2_transformer_layer_hooks() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Return the hooks that make ``smp.nn.DistributedTransformerLayer`` the distributed form of a ``GPT2Block``.

    ``smp.tp_register_with_module(GPT2Block, smp.nn.DistributedTransformerLayer, *get_hf_gpt2_transformer_layer_hooks())``
    applies to existing blocks, too, and these keep their weights.

    Returns:
        ``init_hook``, ``forward_hook`` and ``return_hook``.
    """
    return _BlockArguments(), _block_inputs, _block_output


class _BlockArguments:
    """The ``init_hook``: a layer's arguments from those of ``GPT2Block``."""

    def __call__(self, config: Any, layer_idx: int | None = None) -> Arguments:
        refuse_cross_attention(config)
        wanted = {**common_settings(config), **settings(config), "layer_idx": layer_idx}
        return (), {name: wanted[name] for name in LayerSettings.names() if name in wanted}

    @staticmethod
    def arguments(block: Any) -> Arguments:
        """Return the constructor arguments of a block."""
        return (block.attn.config, block.attn.layer_idx), {}

    @staticmethod
    def state_hook(state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a block's state under the names of the layer."""
        return BLOCKS.to_ours(state)


def _block_inputs(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Arguments:
    """Translate a block's arguments, in any order that a version of Transformers has; the ``forward_hook``."""
    given = dict(_block_signature().bind(None, hidden_states, *args, **kwargs).arguments)
    given |= given.pop("kwargs", {})
    asked = [
        name
        for name in ("head_mask", "encoder_hidden_states", "output_attentions")
        if given.get(name) is not None and given[name] is not False
    ]
    positions = given.get("cache_position")
    # One token at a later position, as in generation: the tokens before it are not in the cache.
    if positions is not None and positions.numel() == 1 and not positions.is_meta and int(positions) > 0:
        asked.append("past_key_values")
    if asked:
        raise SMPUserError(
            f"GPT2Block is distributed and takes no {asked[0]}; leave it out, or do not register the block"
            + ("; generate with a model that loads the translated state" if "past_key_values" in asked else ""),
            code="SMP307",
        )
    return ((hidden_states, given.get("attention_mask")),), {}


def _block_output(result: tuple[Any, ...]) -> Any:
    """Return the output as a block of this version of Transformers does; the ``return_hook``."""
    return (result[0],) if "tuple" in str(_block_signature().return_annotation).lower() else result[0]


@functools.cache
def _block_signature() -> inspect.Signature:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    return inspect.signature(GPT2Block.forward)
