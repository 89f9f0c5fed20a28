"""Loaders of ranks that work on the same batch draw it in the same order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import RandomSampler

from smp_config import Group

if TYPE_CHECKING:
    from smp_runtime.job.ranks import Ranks


def share_order(loader: Any, ranks: Ranks) -> None:
    """Give a loader that shuffles a generator that is seeded alike on all ranks, if it has none; all ranks call it."""
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, RandomSampler) and sampler.generator is None:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        everyone = ranks.control.allgather(seed, ranks.members(Group.WORLD))
        sampler.generator = torch.Generator().manual_seed(everyone[0])
