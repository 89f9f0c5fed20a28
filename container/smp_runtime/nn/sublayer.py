"""The common part of attention and output layer: norms, residual, and entering and leaving a block."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from smp_config import Group
from smp_runtime.nn.distributed_module import DistributedModule
from smp_runtime.nn.norm import RowNorm
from smp_runtime.tensor_parallel.activation_layout import choose_flow, split_dropout

if TYPE_CHECKING:
    import torch
    from torch import nn

    from smp_runtime.nn.settings import LayerSettings
    from smp_runtime.tensor_parallel.group import TensorGroup


class HalfBlock(DistributedModule):
    """A layer that reads the residual stream and adds to it.

    Attributes:
        settings: of the layer.
        flow: how activations lie.
        converts: whether it brings its inputs in and its output out itself; an outer distributed layer does it for
            those inside.
    """

    def __init__(self, settings: LayerSettings) -> None:
        super().__init__()
        self.settings = settings
        self.flow = choose_flow(self.tensor_group)
        self.converts = True
        #: Of parameters that work on rows.
        self.row_reduction = Group.RDP if self.flow.rows_see_all else Group.DP

    #: The compiled method. Entry and exit stay outside, since the ranks may agree on shapes there.
    compiled_method = "_inside"

    def around_compiled(self) -> contextlib.AbstractContextManager[None]:
        """Run a compiled call with this rank's own random numbers.

        Numbers that must be the same on all ranks are drawn by :meth:`.ActivationFlow.dropout`.
        """
        return split_dropout(
            self.tensor_group, self.tensor_group.device, self.training and self.settings.attention_dropout_prob > 0.0
        )

    def become_whole(self, alone: TensorGroup) -> None:
        """See :class:`DistributedModule`."""
        super().become_whole(alone)
        self.flow = choose_flow(alone)

    def _add_norms(self, with_pre: bool = True) -> None:
        settings = self.settings

        def make(wanted: bool) -> RowNorm | None:
            size, epsilon = settings.hidden_size, settings.layernorm_epsilon
            return RowNorm(size, epsilon, rms=settings.rms_norm, reduction=self.row_reduction) if wanted else None

        self.pre_layernorm = make(settings.pre_layernorm and with_pre)
        self.layernorm = make(settings.post_layernorm)

    def _weight_std(self, ends_in_residual: bool = False) -> float | None:
        settings = self.settings
        if not settings.use_normal_initialization:
            return None
        if ends_in_residual and settings.output_initializer_range is not None:
            return settings.output_initializer_range
        return settings.initializer_range

    def _row_parameters(self, *biases: nn.Parameter | None) -> list[torch.Tensor | None]:
        """Return weight and bias of the norm before, of the norm after, then ``biases``; ready for use on rows."""
        norms = [
            (None, None) if norm is None else (norm.weight, norm.bias) for norm in (self.pre_layernorm, self.layernorm)
        ]
        return self.flow.shared(*norms[0], *norms[1], *biases)

    def normed(self, states: torch.Tensor, ready: list[torch.Tensor | None]) -> torch.Tensor:
        """Return the layer's input after the norm in front of it, if there is one."""
        return states if self.pre_layernorm is None else self.pre_layernorm(states, ready[0], ready[1])

    def added(self, states: torch.Tensor, *changes: torch.Tensor) -> torch.Tensor:
        """Return the residual sum; under ``fp32_residual_addition`` in float32."""
        if self.settings.fp32_residual_addition:
            states, changes = states.float(), tuple(change.float() for change in changes)
        return sum(changes, start=states)

    def _residual(self, states: torch.Tensor, change: torch.Tensor, norm: list[torch.Tensor | None]) -> torch.Tensor:
        """Return ``states + change``, normalized if the layer has a norm after it.

        ``norm`` is the weight and bias of that norm. Under ``fp32_residual_addition`` a sum that no norm follows stays in
        float32, for the next half of the layer around this one.
        """
        total = self.added(states, change)
        is_wide = self.settings.fp32_residual_addition
        if self.layernorm is None:
            return total.to(states.dtype) if is_wide and self.converts else total
        weight, bias = norm
        if not is_wide:
            return self.layernorm(total, weight, bias)
        if weight is not None:
            weight = weight.float()
        if bias is not None:
            bias = bias.float()
        return self.layernorm(total, weight, bias).to(states.dtype)
