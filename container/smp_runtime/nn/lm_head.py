"""``DistributedTransformerLMHead``: embeddings, distributed transformer and language model head."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from smp_config import Group
from smp_runtime.errors import SMPUserError
from smp_runtime.nn.distributed_module import DistributedModule
from smp_runtime.nn.embedding import VocabularyEmbedding, WholeEmbedding
from smp_runtime.nn.norm import RowNorm
from smp_runtime.nn.settings import LayerSettings
from smp_runtime.nn.transformer import DistributedTransformer
from smp_runtime.tensor_parallel import collectives
from smp_runtime.tensor_parallel.initialisation import constant_fill, normal_fill
from smp_runtime.tensor_parallel.masks import agree_on_shape
from smp_runtime.tensor_parallel.random_tracker import RandomTracker
from smp_runtime.tensor_parallel.split_functions import split_cross_entropy

if TYPE_CHECKING:
    from smp_runtime.tensor_parallel.group import TensorGroup

#: Targets that do not count.
IGNORED = -100


class DistributedTransformerLMHead(DistributedModule):
    """A transformer with word, position and token type embeddings, and a head that shares the word embedding's weight.

    Args:
        num_layers: transformer layers.
        num_attention_heads, attention_head_size, hidden_size: as in :class:`DistributedTransformerLayer`.
        intermediate_size, attention_dropout_prob, hidden_dropout_prob: as there.
        activation, layernorm_epsilon, initializer_range: as there.
        use_normal_initialization, causal_mask_size, add_cross_attention: as there.
        pre_layernorm, post_layernorm: as there.
        vocab_size: rows of the word embedding.
        num_positions: rows of the position embedding; 0 for none.
        num_token_types: rows of the token type embedding; 0 for none.
        add_lm_head: False returns the transformer's output.
        distribute_embedding: split the vocabulary of embedding and head over the ranks, and compute the loss
            without whole logits; else every rank has both whole.
        final_layernorm: normalize the transformer's output.
        tie_word_embeddings: False gives the head a weight of its own.
        lm_head_bias: whether the head has a bias.
        embedding_dropout_prob: of the embeddings' sum; None means ``hidden_dropout_prob``.
        padding_idx: a row of the word embedding that gets no gradient from it.
        window_sizes: for each layer, to how many positions before it one attends, or None for all.
        gather_logits: with labels and ``distribute_embedding``, False returns None for the logits in training, which
            saves sending them.
        options: more of :class:`smp_runtime.nn.settings.LayerSettings`.

    Example:
        >>> sizes = {"num_attention_heads": 4, "attention_head_size": 16, "hidden_size": 64, "intermediate_size": 256}
        >>> model = smp.nn.DistributedTransformerLMHead(num_layers=2, vocab_size=100, num_positions=32, **sizes)
        >>> model.add_lm_head
        True
    """

    def __init__(  # noqa: PLR0913 - the documented signature
        self,
        num_layers: int = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        vocab_size: int = 30522,
        num_positions: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        num_token_types: int = 0,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        add_lm_head: bool = True,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        distribute_embedding: bool = False,
        final_layernorm: bool = False,
        tie_word_embeddings: bool = True,
        lm_head_bias: bool = False,
        embedding_dropout_prob: float | None = None,
        padding_idx: int | None = None,
        window_sizes: Sequence[int | None] | None = None,
        gather_logits: bool = True,
        **options: Any,
    ) -> None:
        settings = LayerSettings.given(locals())
        super().__init__()
        group = self.tensor_group
        #: Of what every rank has whole: with a batch per rank it works on this rank's own.
        own = Group.RDP if group.prescaled else Group.DP
        self.vocab_size = vocab_size
        self.add_cross_attention = add_cross_attention
        self.add_lm_head = add_lm_head
        self.shifts_labels = causal_mask_size is not None
        self.embedding_dropout_prob = hidden_dropout_prob if embedding_dropout_prob is None else embedding_dropout_prob
        self.distributes_vocabulary = distribute_embedding and group.size > 1
        self.gather_logits = gather_logits
        std = initializer_range
        if distribute_embedding:
            self.word_embedding: VocabularyEmbedding | WholeEmbedding = VocabularyEmbedding(
                vocab_size, hidden_size, std, padding_idx
            )
        else:
            self.word_embedding = WholeEmbedding(vocab_size, hidden_size, std, own, padding_idx)
        self.position_embedding = WholeEmbedding(num_positions, hidden_size, std, own) if num_positions else None
        self.token_type_embedding = WholeEmbedding(num_token_types, hidden_size, std, own) if num_token_types else None
        self.transformer = DistributedTransformer(num_layers, window_sizes=window_sizes, **settings)
        rms = bool(options.get("rms_norm", False))
        self.layernorm = RowNorm(hidden_size, layernorm_epsilon, rms=rms, reduction=own) if final_layernorm else None
        self.lm_head = None
        if add_lm_head and (lm_head_bias or not tie_word_embeddings):
            self.lm_head = _Head(
                vocab_size, hidden_size, std, lm_head_bias, tie_word_embeddings, distribute_embedding, own
            )

    def become_whole(self, alone: TensorGroup) -> None:
        """See :class:`DistributedModule`."""
        super().become_whole(alone)
        self.distributes_vocabulary = False

    def forward(self, inputs: tuple[Any, ...]) -> Any:
        """Return the logits, or with labels the loss and the logits; without the head the transformer's output.

        Args:
            inputs: ``(input_ids, attention_mask, token_type_ids, position_ids, labels)``; with cross attention
                ``(input_ids, attention_mask, token_type_ids, position_ids, cross_states, cross_mask, labels)``. Ids and
                labels are ``[batch, seq]``; masks are ``[batch, seq]`` with 1 for a position that is masked, or None;
                ``cross_states`` is ``[batch, seq, hidden]``. Labels of -100 do not count. Under a causal mask each
                label is compared with the logits of the position before it.

        Returns:
            ``[batch, seq, vocabulary]``, or ``(loss, [batch, seq, vocabulary])``, or ``[batch, seq, hidden]``.
        """
        ids, mask, token_types, positions, *cross, labels = inputs
        if len(cross) == 3:  # the public page names cross_states twice
            cross = cross[1:]
        self._agree_on_inputs(ids, token_types, labels)
        mask = additive_mask(mask, self.hidden_dtype)
        cross = [cross[0], additive_mask(cross[1], self.hidden_dtype)] if cross else []
        hidden = self.hidden_states(ids, mask, token_types, positions, cross)
        if not self.add_lm_head:
            return hidden
        if labels is None:
            return self.logits(hidden)
        return self.loss_and_logits(hidden, labels)

    def _agree_on_inputs(
        self, ids: torch.Tensor, token_types: torch.Tensor | None, labels: torch.Tensor | None
    ) -> None:
        """Check that the ranks' batches fit together if the vocabulary is split; else the transformer checks them."""
        if self.distributes_vocabulary:
            agree_on_shape(self.tensor_group, ids, token_type_ids=token_types, labels=labels)

    @property
    def hidden_dtype(self) -> torch.dtype:
        """Return the type of the activations."""
        return self.word_embedding.weight.dtype

    def hidden_states(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        token_types: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        cross: Sequence[torch.Tensor | None] = (),
        cache: Any = None,
        past: int = 0,
    ) -> torch.Tensor:
        """Return the transformer's output, ``[batch, seq, hidden]``; masks are additive here.

        Args:
            cache: keys and values of ``past`` tokens before these, to which the layers add theirs; or None.
        """
        hidden = self.word_embedding(ids)
        if self.position_embedding is not None:
            if positions is None:
                longest, end = self.position_embedding.weight.shape[0], past + ids.shape[1]
                if end > longest:
                    raise SMPUserError(
                        f"the sequence has {end} tokens, but num_positions is {longest}: shorten it, or make the model "
                        f"with at least {end} positions",
                        code="SMP307",
                    )
                hidden = hidden + self.position_embedding(torch.arange(past, end, device=ids.device))
            else:
                hidden = hidden + self.position_embedding(positions)
        if token_types is not None:
            table = self.token_type_embedding if self.token_type_embedding is not None else self.word_embedding
            hidden = hidden + table(token_types)
        hidden = self._drop(hidden)
        rotary: tuple[Any, ...] = () if positions is None or self.position_embedding is not None else (positions,)
        if cache is not None:
            rotary = (*(rotary or (torch.arange(past, past + ids.shape[1], device=ids.device)[None],)), cache)
        if self.add_cross_attention:
            states, cross_mask = cross
            hidden = self.transformer((hidden, states, mask, cross_mask))[0]
        else:
            hidden = self.transformer((hidden, mask, *rotary))[0]
        return hidden if self.layernorm is None else self.layernorm(hidden)

    def _drop(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.training or self.embedding_dropout_prob == 0.0:
            return hidden
        # Ranks that share a batch must drop the same elements; with a batch each, they must not.
        tracker = RandomTracker.of(self.tensor_group)
        is_shared = self.tensor_group.prescaled
        family = tracker.replicated if is_shared else tracker.split
        with family(hidden.device):
            return F.dropout(hidden, self.embedding_dropout_prob)

    # -- the head --------------------------------------------------------------------------------------------------

    def _head(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.lm_head is None:
            return self.word_embedding.weight, None
        weight = self.word_embedding.weight if self.lm_head.weight is None else self.lm_head.weight
        return weight, self.lm_head.bias

    def _local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of this rank's part of the vocabulary, for the batches of the whole group."""
        group = self.tensor_group
        own = not group.prescaled
        rows = (
            collectives.gather_slices(hidden, group, 0, partial=True)
            if own
            else collectives.use_replicated(hidden, group)
        )
        return F.linear(rows, *self._head())

    def _whole_logits(self, local: torch.Tensor) -> torch.Tensor:
        """Return the logits of this rank's batch, with the whole vocabulary."""
        group = self.tensor_group
        size = -(-self.vocab_size // group.size)
        if local.shape[-1] < size:
            local = F.pad(local, (0, size - local.shape[-1]))
        if group.prescaled:
            whole = collectives.gather_slices(local, group, -1, partial=False)
        else:
            whole = collectives.exchange_parts(local, group, split=0, joined=-1)
        return whole[..., : self.vocab_size]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, seq, hidden]`` to ``[batch, seq, vocabulary]``."""
        if not self.distributes_vocabulary:
            return F.linear(hidden, *self._head())
        return self._whole_logits(self._local_logits(hidden))

    def loss_and_logits(
        self, hidden: torch.Tensor, labels: torch.Tensor, count: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the mean loss over this rank's labels, and the logits.

        If ``count`` is passed, the sum is divided by it instead of by the number of labels.
        """
        if self.shifts_labels:
            labels = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        targets = labels.reshape(-1)
        if not self.distributes_vocabulary:
            logits = self.logits(hidden)
            how = "mean" if count is None else "sum"
            # In float32, since the sum over a vocabulary loses digits in half precision.
            loss = F.cross_entropy(logits.float().flatten(0, -2), targets, ignore_index=IGNORED, reduction=how)
            return loss if count is None else loss / count, logits
        group = self.tensor_group
        local = self._local_logits(hidden)
        every = targets if group.prescaled else group.gather(targets, 0)
        start = self.word_embedding.start if isinstance(self.word_embedding, VocabularyEmbedding) else 0
        losses = split_cross_entropy(local.flatten(0, -2), every.clamp_min(0), group, start)
        losses = losses if group.prescaled else collectives.take_slice(losses, group, 0)
        counts = targets != IGNORED
        loss = losses.masked_fill(~counts, 0.0).sum() / (counts.sum() if count is None else count)
        wanted = self.gather_logits or not torch.is_grad_enabled()
        return loss, self._whole_logits(local) if wanted else None


class _Head(DistributedModule):
    """Weight and bias of a head that has its own."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self, vocabulary: int, hidden: int, std: float, bias: bool, tied: bool, splits: bool, reduction: Group
    ) -> None:
        super().__init__()
        add: Any = functools.partial(self.add_whole, reduction=reduction)
        if splits:
            add = functools.partial(self.add_split, dim=0)
        add("weight", (vocabulary, hidden), fill=normal_fill(std), exists=not tied)
        add("bias", (vocabulary,), fill=constant_fill(0.0), exists=bias)


def additive_mask(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Turn ``[batch, seq]`` with 1 for a masked position into a summand for scores, ``[batch, 1, 1, seq]``."""
    if mask is None:
        return None
    lowest = torch.finfo(dtype).min
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask.bool(), lowest)[:, None, None, :]
