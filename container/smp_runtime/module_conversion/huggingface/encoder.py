"""BERT's encoder, which RoBERTa shares: embeddings, pooler and heads around it stay Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from smp_runtime.errors import SMPUserError
from smp_runtime.module_conversion.huggingface.causal import (
    activation_name,
    given_arguments,
    refuse_cross_attention,
    was_initialised,
)
from smp_runtime.module_conversion.huggingface.translation import EncoderNames, LayerNames, parameter_names
from smp_runtime.module_conversion.registration import Arguments, Registration, register
from smp_runtime.nn.distributed_module import NotDistributableError
from smp_runtime.nn.transformer import DistributedTransformer

NAMES = EncoderNames(
    LayerNames(
        parameter_names(
            {
                "attention.self.query": "attention.query",
                "attention.self.key": "attention.key",
                "attention.self.value": "attention.value",
                "attention.output.dense": "attention.dense",
                "attention.output.LayerNorm": "attention.layernorm",
                "intermediate.dense": "output.dense1",
                "output.dense": "output.dense2",
                "output.LayerNorm": "output.layernorm",
            }
        )
    )
)


class Encoder(DistributedTransformer):
    """A distributed transformer with the original's names of its parameters."""

    state_names = NAMES


def init_hook(config: Any, *_: Any, **__: Any) -> Arguments:
    """Return the arguments of the distributed transformer for a ``BertConfig`` or ``RobertaConfig``."""
    refuse_cross_attention(config)
    kind = getattr(config, "position_embedding_type", "absolute")
    if kind != "absolute":
        raise NotDistributableError(f"its position_embedding_type is {kind!r}; distributed layers have 'absolute'")
    return (), {
        "num_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "attention_head_size": config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "attention_dropout_prob": config.attention_probs_dropout_prob,
        "hidden_dropout_prob": config.hidden_dropout_prob,
        "activation": activation_name(config.hidden_act),
        "layernorm_epsilon": config.layer_norm_eps,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "causal_mask_size": config.max_position_embeddings if config.is_decoder else None,
        "pre_layernorm": False,
        "post_layernorm": True,
    }


def _forward_hook(kind: type) -> Callable[..., Arguments]:
    """Return a hook that translates the arguments of ``kind.forward``.

    Arguments that only the layers of some versions take are not needed.
    """
    bind = given_arguments(kind)

    def hook(*args: Any, **kwargs: Any) -> Arguments:
        given = bind(*args, **kwargs)
        masks = given.get("head_mask")
        masks = masks if isinstance(masks, list | tuple) else [masks]
        asked = {
            "head_mask": any(mask is not None for mask in masks),
            "past_key_values": given.get("past_key_values") is not None,
            "output_attentions": bool(given.get("output_attentions")),
            "output_hidden_states": bool(given.get("output_hidden_states")),
        }
        for name, is_asked in asked.items():
            if is_asked:
                raise SMPUserError(
                    f"the encoder is distributed and takes no {name}; leave it out, or create the model outside of "
                    "smp.tensor_parallelism()",
                    code="SMP307",
                )
        return ((given["hidden_states"], given.get("attention_mask")),), {}

    return hook


def return_hook(result: tuple[Any, ...]) -> Any:
    """Return the output in the original encoder's type."""
    from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

    return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=result[0])


def register_model(kind: type) -> None:
    """Register an encoder's class."""
    register(
        kind,
        Registration(
            Encoder,
            init_hook,
            _forward_hook(kind),
            return_hook,
            arguments=lambda module: ((module.config,), {}),
            is_whole_model=True,
            translations=(NAMES.to_theirs, NAMES.to_ours),
            was_initialised=was_initialised,
        ),
    )
