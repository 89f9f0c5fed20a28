"""Runs what other tests run on ranks on emulated CUDA devices, whose streams are checked."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

#: Functions that give a rank its batch, by module: what they give goes to the rank's device.
_BATCHES = {
    "support.training.rank_training": ("part",),
    "support.training.pipeline_training": ("part",),
    "support.training.sharded_training": ("token_batch",),
    "support.training.checkpoint_training": ("token_batch", "part"),
    "support.training.activation_training": ("token_batch",),
}


def on_devices(
    seed: int, config: dict[str, Any], function: Callable[..., Any], *args: Any, devices: int | None = None
) -> Any:
    """``function(*args)`` on this rank, after ``smp.init(config)`` with an emulated device for each rank.

    Args:
        seed: of the order in which work is executed.
        devices: number of emulated devices, if not one for each rank.

    Returns:
        What the function has returned, in host memory.

    Raises:
        StreamFault: also one that the function has caught.
    """
    import importlib

    from smp_emulation.checked import emulated
    from smp_runtime.job import session

    def there(result: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(session.current_session().ranks.device), result)

    def moved(own: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **named: there(own(*given, **named))

    before = []
    with emulated(seed, devices=devices or int(os.environ.get("WORLD_SIZE", "1"))) as emulation:
        try:
            session.init(config)
            for name, functions in _BATCHES.items():
                module = importlib.import_module(name)
                for each in functions:
                    if hasattr(module, each):
                        before.append((module, each, getattr(module, each)))
                        setattr(module, each, moved(getattr(module, each)))
            result = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), function(*args))
            for number in range(torch.cuda.device_count()):
                torch.cuda.synchronize(number)
            session.shutdown()
        finally:
            for module, each, own in before:
                setattr(module, each, own)
        if isinstance(result, dict):
            result["waits"] = dict(emulation.waits)
        return result


def on_host(config: dict[str, Any], function: Callable[..., Any], *args: Any) -> Any:
    """The same on the CPU."""
    from smp_runtime.job import session

    session.init(config)
    result = function(*args)
    session.shutdown()
    return result
