"""Loaders of ranks that work on the same batch draw it in the same order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import RandomSampler

from smp_config import Group
from smp_runtime.data.position import SampleSource
from smp_runtime.errors import SMPUserError

if TYPE_CHECKING:
    from smp_runtime.job.ranks import Ranks


def share_order(loader: Any, ranks: Ranks) -> None:
    """Give a loader that shuffles a generator that is seeded alike on all ranks, if it has none; all ranks call it."""
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, RandomSampler) and sampler.generator is None:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        everyone = ranks.control.allgather(seed, ranks.members(Group.WORLD))
        sampler.generator = torch.Generator().manual_seed(everyone[0])


def refuse_divided(loader: Any) -> None:
    """Check that a loader has the samples of all ranks, because Accelerate divides them between the ranks.

    Raises:
        SMPUserError: the loader has only this rank's samples, and Accelerate would divide them again.
    """
    parts = (getattr(loader, "dataset", None), getattr(loader, "sampler", None))
    within = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    source = next((each for each in (*parts, within) if isinstance(each, SampleSource)), None)
    if source is not None:
        raise SMPUserError(
            f"the loader that Accelerate was given to prepare reads a smp.data.{type(source).__name__}, which has divided the "
            "samples among the ranks already: Accelerate would divide them once more; use the smp.data.DataLoader as it is, or "
            "prepare one of PyTorch's without this sampler",
            code="SMP312",
        )
