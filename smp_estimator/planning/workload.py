"""What the training script does, as far as memory depends on it: everything that ``mp_parameters`` does not say."""

from __future__ import annotations

import re
from dataclasses import dataclass

from smp_config import ConfigError

#: Bytes of optimizer state per parameter, in fp32: two moments, one, or none.
OPTIMIZER_BYTES = {"adam": 8, "adamw": 8, "lamb": 8, "momentum": 4, "sgd": 0}


@dataclass(frozen=True)
class Workload:
    """The script's side of a plan.

    Attributes:
        batch: samples that a rank (with ``prescaled_batch`` a tensor parallel group) reads at a time.
        accumulation: backward passes per optimizer step.
        activation_checkpointing: None, ``"each"``, ``"contiguous"`` or ``"group_N"``, the ``strategy`` of
            ``smp.set_activation_checkpointing`` over the model's layers.
        fused_attention: attention that keeps no [seq, seq] maps.
        dropout: the model drops activations and keeps the masks.
        optimizer: one of :data:`OPTIMIZER_BYTES`.
        distribute_embedding: the word embedding is divided by tensor parallelism; sharded data parallelism with
            tensor parallelism turns it on by itself.
        fp32_loss: the script computes the loss on logits turned into fp32.
        gradient_as_bucket_view: one set of reduction buffers stays for all steps.
    """

    batch: int = 1
    accumulation: int = 1
    activation_checkpointing: str | None = None
    fused_attention: bool = True
    dropout: bool = True
    optimizer: str = "adam"
    distribute_embedding: bool = False
    fp32_loss: bool = False
    gradient_as_bucket_view: bool = False

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZER_BYTES:
            raise ConfigError(
                f"optimizer is {self.optimizer!r}; its state per parameter is unknown: use one of {', '.join(OPTIMIZER_BYTES)}"
            )
        self.checkpointed_layers(1)

    def checkpointed_layers(self, layers: int) -> int:
        """Layers that are recomputed together; 0 when nothing is.

        Raises:
            ConfigError: an unknown strategy.
        """
        strategy = self.activation_checkpointing
        if strategy is None:
            return 0
        if strategy == "each":
            return 1
        if strategy == "contiguous":
            return layers
        group = re.fullmatch(r"group_([1-9]\d*)", str(strategy))
        if group is None:
            raise ConfigError(
                f"activation_checkpointing is {strategy!r}; it is the strategy over the model's layers: use 'each', "
                "'contiguous', 'group_2' (or another number), or None"
            )
        return min(layers, int(group[1]))
