"""Training as scripts write it, on every rank; runs inside rank processes after ``smp.init``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from support.models.models import part, token_loss

if TYPE_CHECKING:
    import torch


def training_step(model: Any, loss: Callable[..., torch.Tensor] = token_loss) -> Callable[..., Any]:
    """A step function that trains a wrapped model on ``loss(model, *batch)``."""
    import smdistributed.modelparallel.torch as smp

    @smp.step
    def step(*batch: torch.Tensor) -> torch.Tensor:
        found = loss(model, *batch)
        model.backward(found)
        return found

    return step


def updates(step: Callable[..., Any], optimizer: Any, batches: Iterable[tuple]) -> Iterator[float]:
    """Train this rank's part of every batch.

    Args:
        batches: whole ones, the same on all ranks.

    Yields:
        after every update the mean loss of the whole batch.
    """
    import smdistributed.modelparallel.torch as smp

    # Of a batch that tensor parallel ranks have in common, each of them takes the same part.
    common = smp.state.cfg.prescaled_batch
    rank, size = (smp.rdp_rank(), smp.rdp_size()) if common else (smp.dp_rank(), smp.dp_size())
    for batch in batches:
        optimizer.zero_grad()
        mean = float(step(*part(batch, rank, size)).reduce_mean())
        optimizer.step()
        yield sum(smp.allgather(mean, smp.RDP_GROUP if common else smp.DP_GROUP)) / size
