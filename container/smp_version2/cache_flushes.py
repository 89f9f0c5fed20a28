"""Warnings when PyTorch's memory allocator empties its cache, which makes a step wait for the device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

logger = logging.getLogger("smp")

#: The allocator's counter: it increases when memory is found only after the cache was emptied.
_RETRIES = "num_alloc_retries"


def install(device: torch.device) -> Callable[[], None]:
    """Look at the counter after each optimizer's step; return the function that ends it. A CPU has no such cache."""
    if device.type != "cuda":
        return lambda: None
    seen = _count(device)

    def look(*_: Any) -> None:
        nonlocal seen
        now = _count(device)
        if now > seen:
            logger.warning(
                "the memory allocator of %s emptied its cache %d times in a step, and each time waited for the device: use "
                'a smaller batch, a higher hybrid_shard_degree or activation checkpointing; "fsdp_cache_flush_warnings": False '
                "turns this warning off",
                device,
                now - seen,
            )
        seen = now

    return register_optimizer_step_post_hook(look).remove


def _count(device: torch.device) -> int:
    return int(torch.cuda.memory_stats(device).get(_RETRIES, 0))
