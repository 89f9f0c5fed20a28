"""``model.join()``: ranks with fewer batches keep answering the others' collectives until all are done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch.distributed.algorithms.join import Joinable, JoinHook

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


class Replica(Protocol):
    """A wrapped model, as one of several."""

    def shadow_step(self) -> None:
        """Answer the collectives of one step of the others, with nothing to add."""

    def take_over(self, is_last: bool) -> None:
        """Copy the weights of a rank that was among the last to be done; every rank calls it."""


class JoinedModel(Joinable):
    """What PyTorch's ``Join`` context needs to know of a wrapped model."""

    def __init__(self, model: Replica, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self._model = model
        self._group = group
        self._device = device

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What a rank does that has run out of batches."""
        return _Shadow(self._model)

    @property
    def join_device(self) -> torch.device:
        """Where ``Join`` may put its own tensors."""
        return self._device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The ranks that wait for each other."""
        return self._group


class _Shadow(JoinHook):
    """Takes part in every step of the others with gradients of zero, then takes over their weights."""

    def __init__(self, model: Replica) -> None:
        self._model = model

    def main_hook(self) -> None:
        self._model.shadow_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._model.take_over(is_last_joiner)
