"""The settings of a distributed transformer layer: the documented arguments, and what Hugging Face's models need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F

from smp_config.errors import suggest
from smp_runtime.errors import SMPUserError
from smp_runtime.job import session as sessions

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "swish": F.silu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "tanh": torch.tanh,
}


_KERNELS = "PyTorch chooses its kernels itself, fused ones where it has them"

#: Switches without effect here. Each has the value that requests nothing, and the text for the warning.
WITHOUT_EFFECT: Mapping[str, tuple[bool, str]] = {
    "fused_softmax": (True, _KERNELS),
    "fused_dropout": (False, _KERNELS),
    "fused_bias_gelu": (False, _KERNELS),
    "flash_attention": (False, _KERNELS),
    "query_key_layer_scaling": (False, "PyTorch's attention keeps scores in float32, so they stay in range without it"),
    "zero_init": (
        False,
        "distributed modules start with the weights of those that they replace, or as their arguments say",
    ),
}


def tell_without_effect(given: Mapping[str, Any]) -> None:
    """Warn, once per job, about switches in ``given`` that are set but have no effect."""
    for name, (usual, why) in WITHOUT_EFFECT.items():
        if given.get(name, usual) is not usual:
            sessions.say_once(f"{name}={given[name]} ignored: {why}")


@dataclass(frozen=True)
class LayerSettings:
    """One transformer layer; all sizes are those of the whole layer.

    Attributes:
        causal_mask_size: longest sequence under a causal mask; None attends everywhere.
        fp32_residual_addition: add residuals in float32. A sum that no norm follows stays in float32 between
            the halves of a layer. The output of the layer has the type of its input.
        attention_in_fp32: compute attention in float32.
        query_key_layer_scaling: keeps scores of half precision in range by dividing them by the layer's number and
            multiplying inside the softmax; PyTorch's kernels keep scores in float32, so the result is the same and
            the switch has no effect, as a warning reports.
        fused_softmax, fused_dropout, fused_bias_gelu, flash_attention: choose kernels; PyTorch's attention is fused
            in any case, as a warning reports.
        use_alibi: add linear biases to attention scores, with base ``alibi_bias_max``.
        scale_attention_scores: divide scores by √head size.
        scale_attn_by_layer_idx: divide scores by the layer's number, ``layer_idx + 1``.
        num_key_value_heads: fewer heads of keys and values than of queries; None means as many.
        rotary_frequencies: angle per position of each pair of channels; None means no rotary embedding.
        rotary_interleaved: pairs are neighbors; else channel i goes with i + rotary dim / 2.
        rotary_scale: factor of the rotated channels.
        window_size: each token attends to so many last tokens.
        fused_qkv: queries, keys and values in one matrix, head by head.
        use_qkv_bias, use_attn_dense_bias, use_mlp_bias: whether the linear maps have biases.
        parallel_attn_output: attention and output layer both read the layer's input.
        single_pre_layernorm: and with one norm for both.
        gated_mlp: the activation multiplies a second map of the input.
        rms_norm: root mean square norm instead of layer norm.
        output_initializer_range: standard deviation of the maps that end in the residual.
    """

    num_attention_heads: int = 32
    attention_head_size: int = 32
    hidden_size: int = 1024
    intermediate_size: int = 4096
    attention_dropout_prob: float = 0.1
    hidden_dropout_prob: float = 0.1
    activation: str = "gelu"
    layernorm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    use_normal_initialization: bool = False
    causal_mask_size: int | None = None
    add_cross_attention: bool = False
    pre_layernorm: bool = False
    post_layernorm: bool = True
    fp32_residual_addition: bool = False
    attention_in_fp32: bool = False
    query_key_layer_scaling: bool = False
    fused_softmax: bool = True
    fused_dropout: bool = False
    fused_bias_gelu: bool = False
    flash_attention: bool = False
    use_alibi: bool = False
    alibi_bias_max: int = 8
    scale_attention_scores: bool = True
    scale_attn_by_layer_idx: bool = False
    layer_idx: int | None = None
    num_key_value_heads: int | None = None
    rotary_frequencies: tuple[float, ...] | None = None
    rotary_interleaved: bool = True
    rotary_scale: float = 1.0
    window_size: int | None = None
    fused_qkv: bool = False
    use_qkv_bias: bool = True
    use_attn_dense_bias: bool = True
    use_mlp_bias: bool = True
    parallel_attn_output: bool = False
    single_pre_layernorm: bool = False
    gated_mlp: bool = False
    rms_norm: bool = False
    output_initializer_range: float | None = None

    def __post_init__(self) -> None:
        if not (self.pre_layernorm or self.post_layernorm):
            raise SMPUserError(
                "pre_layernorm and post_layernorm are both false; a transformer layer needs one of them: set one to true",
                code="SMP307",
            )
        if self.activation not in ACTIVATIONS:
            raise SMPUserError(
                f"activation is {self.activation!r}{suggest(self.activation, ACTIVATIONS)}; use one of {', '.join(ACTIVATIONS)}",
                code="SMP307",
            )
        self._check_parallel()
        if self.scale_attn_by_layer_idx and self.layer_idx is None:
            raise SMPUserError(
                "scale_attn_by_layer_idx is true but layer_idx is None; pass the layer's number, from 0", code="SMP307"
            )

    def _check_parallel(self) -> None:
        if self.single_pre_layernorm and not (self.parallel_attn_output and self.pre_layernorm):
            raise SMPUserError(
                f"single_pre_layernorm is true, with parallel_attn_output {self.parallel_attn_output} and pre_layernorm "
                f"{self.pre_layernorm}; attention and output layer share the norm in front of both, so set both to true, or "
                "single_pre_layernorm to false",
                code="SMP307",
            )
        for name in ("post_layernorm", "add_cross_attention"):
            if self.parallel_attn_output and getattr(self, name):
                raise SMPUserError(
                    f"parallel_attn_output and {name} are both true; attention and output layer then add to the layer's input "
                    f"at once, and nothing comes between or behind them: set {name} to false, or parallel_attn_output to false",
                    code="SMP307",
                )

    @classmethod
    def of(cls, constructor: Mapping[str, Any]) -> LayerSettings:
        """Return the settings from the arguments of a layer's constructor.

        Args:
            constructor: its ``locals()``.

        Raises:
            SMPUserError: an unknown name; the nearest known one is named.
        """
        settings, known = cls.given(constructor), cls.names()
        for name in settings:
            if name not in known:
                raise SMPUserError(
                    f"a distributed transformer layer has no argument {name!r}{suggest(name, known)}", code="SMP307"
                )
        tell_without_effect(settings)
        return cls(**settings)

    @classmethod
    def given(cls, constructor: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings for an inner layer from a constructor's ``locals()``: those by name, and all ``options``."""
        return {name: constructor[name] for name in cls.names() if name in constructor} | constructor["options"]

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of all settings."""
        return [field.name for field in fields(cls)]

    def as_arguments(self) -> dict[str, Any]:
        """Return keyword arguments that make a layer like this."""
        return asdict(self)
