"""Gradients of optimizer shards: brought from the model to what the optimizer updates, and again if more came after that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from smp_config import Group
from smp_runtime.errors import SMPUserError
from smp_runtime.optim.gradient_norms import clamp, elements_of, multiply
from smp_runtime.tensors.parameter_attributes import get_gradient, set_gradient
from smp_runtime.tensors.torch_private import unscale

if TYPE_CHECKING:
    from smp_runtime.job.ranks import Ranks
    from smp_runtime.parameters.optimizer_shards import OptimizerShard


class MasterGradients:
    """The gradients that the inner optimizer sees of this rank's shards.

    They are brought once per update, and what is done to them afterwards stays, unless backward adds to the model's
    gradients meanwhile: then those are brought again, with what :meth:`scale_down` has done to the earlier ones.

    Args:
        optimizer_shards: what the optimizer updates; may grow.
    """

    def __init__(self, ranks: Ranks, optimizer_shards: Sequence[OptimizerShard]) -> None:
        self._ranks = ranks
        self._optimizer_shards = optimizer_shards
        self._is_ready = False
        self._overflow = False
        #: By optimizer shard, the model's gradient that was brought, held so that nothing else gets its memory, and its version.
        self._brought: dict[OptimizerShard, tuple[torch.Tensor, int]] = {}

    @property
    def are_current(self) -> bool:
        """Return whether the gradients were brought and are unchanged since."""
        if not self._is_ready:
            return False
        return not any(self._is_new(shard, shard.gradient) for shard in self._optimizer_shards)

    @torch.no_grad()
    def bring(self, scale: float | None, *, edits_only: bool = False) -> bool | None:
        """Bring every optimizer shard its gradient, in the shard's type, divided by ``scale``; every rank calls it.

        Args:
            scale: the loss scale of fp16; None leaves the gradients as they are, and no rank waits for another.
            edits_only: only the script has changed sharded gradients since the last call. It has read them divided by ``scale``,
                so they are not divided again.

        Returns:
            Whether any rank of the job has a gradient that is not finite, if there is a scale; None if nothing has come
            since the last call.

        Raises:
            SMPUserError: gradients were added, with the loss scale, to ones that were divided by it already.
        """
        found = [(shard, shard.gradient) for shard in self._optimizer_shards]
        news = [(shard, gradient) for shard, gradient in found if self._is_new(shard, gradient)]
        # With a scale another rank may have news: the ranks look for overflows together.
        if self._is_ready and not news and (scale is None or self._ranks.size(Group.WORLD) == 1):
            return None
        unscaled, narrow = [], []
        for shard, gradient in news:
            former, held = self._brought.get(shard), get_gradient(shard.optimized)
            if gradient is None:
                set_gradient(shard.optimized, None)
                self._brought.pop(shard, None)
                continue
            is_same = former is not None and held is not None and _place(held) == _place(gradient)
            is_divided = edits_only and shard.is_fragment and gradient.dtype is shard.optimized.dtype
            if is_same and scale is not None and not is_divided:
                raise SMPUserError(
                    f"backward or the script changed the gradients of {len(news)} parts of parameters after update_master_grads "
                    f"or clip_master_grads, which had divided them by the loss scale {scale:g} already; call these once, after "
                    "the last backward pass and after what the script does to gradients",
                    code="SMP304",
                )
            self._brought[shard] = (gradient, gradient._version)
            if is_divided:
                set_gradient(shard.optimized, gradient.view(shard.optimized.shape))
                continue
            if gradient.dtype is shard.optimized.dtype:  # float32 gradients of a shard have no other owner
                brought = gradient if gradient.is_sparse else gradient.view(shard.optimized.shape)
                set_gradient(shard.optimized, brought)
                unscaled.append(brought)
            elif gradient.is_sparse:
                brought = gradient.to(shard.optimized.dtype)
                set_gradient(shard.optimized, brought)
                unscaled.append(brought)
            else:
                narrow.append((shard, gradient))
        unscaled += _widened(narrow)
        overflow = False if scale is None else self._unscale(unscaled, scale)
        self._overflow = overflow or (self._is_ready and self._overflow)
        self._is_ready = True
        self._note_versions()
        return self._overflow

    @torch.no_grad()
    def scale_down(self, factor: torch.Tensor, shards: Sequence[OptimizerShard]) -> None:
        """Multiply the gradients that were brought to some shards, and the model's, to which backward may add more."""
        held, sources = self._held(shards)
        multiply([*held, *sources], factor)
        self._note_versions()

    @torch.no_grad()
    def clamp(self, limit: float, shards: Sequence[OptimizerShard], scale: float) -> None:
        """Bring the elements of the same gradients between ``-limit`` and ``limit``; the model's have the loss scale still."""
        held, sources = self._held(shards)
        clamp(held, limit)
        clamp(sources, limit * scale)
        self._note_versions()

    def _held(self, shards: Sequence[OptimizerShard]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the gradients on the optimizer shards, and the model's gradients that lie elsewhere."""
        held = []
        for shard in shards:
            gradient = get_gradient(shard.optimized)
            if gradient is not None:
                held.append(gradient)
        places = {_place(gradient) for gradient in held}
        brought = [self._brought[shard][0] for shard in shards if shard in self._brought]
        elsewhere = [gradient for gradient in brought if _place(gradient) not in places]
        return held, elsewhere

    def drop(self) -> None:
        """Forget the gradients."""
        for shard in self._optimizer_shards:
            set_gradient(shard.optimized, None)
        self._brought.clear()
        self._is_ready = False

    def _is_new(self, shard: OptimizerShard, gradient: torch.Tensor | None) -> bool:
        if not self._is_ready:
            return True
        former = self._brought.get(shard)
        if former is None or gradient is None:
            return (former is None) != (gradient is None)
        brought, version = former
        has_moved = _place(gradient) != _place(brought)
        return has_moved or gradient._version != version

    def _unscale(self, gradients: Sequence[torch.Tensor], scale: float) -> bool:
        ranks = self._ranks
        found = torch.zeros(1, device=ranks.device)
        if gradients:
            inverse = torch.full((1,), 1.0 / scale, device=ranks.device)
            unscale([elements_of(gradient) for gradient in gradients], found, inverse)
        if ranks.size(Group.WORLD) > 1:
            ranks.collectives.all_reduce(found, ranks.groups.group(Group.WORLD)).wait()
        # The only wait of the host in an update of fp16. By now all work that needs no answer is queued: backward, the
        # reduction and this check. What follows depends on the answer: whether any optimizer steps, weights are stored and
        # gathered, and the loss scale, a number that the next step reads.
        return bool(found.item() > 0)

    def _note_versions(self) -> None:
        """Record the versions of the model's gradients after the library has changed them."""
        self._brought = {shard: (gradient, gradient._version) for shard, (gradient, _) in self._brought.items()}


def _place(gradient: torch.Tensor) -> int:
    """Return the address of a gradient's elements; a sparse tensor itself has no address."""
    return elements_of(gradient).data_ptr()


def _widened(pairs: Sequence[tuple[OptimizerShard, torch.Tensor]]) -> list[torch.Tensor]:
    """Copy gradients into the type of the updated tensors, which become their owners.

    One operation copies all gradients of a pair of types.
    """
    by_kind: dict[tuple[torch.dtype, torch.dtype], list[tuple[OptimizerShard, torch.Tensor]]] = {}
    for shard, gradient in pairs:
        by_kind.setdefault((gradient.dtype, shard.optimized.dtype), []).append((shard, gradient))
    made = []
    for alike in by_kind.values():
        copies = [torch.empty_like(shard.optimized) for shard, _ in alike]
        for (shard, _), copy in zip(alike, copies, strict=True):
            set_gradient(shard.optimized, copy)
        torch._foreach_copy_(copies, [gradient.view(shard.optimized.shape) for shard, gradient in alike])
        made += copies
    return made
