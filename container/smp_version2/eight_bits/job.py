"""FP8 in a job of version 2: in all passes with the parameter ``fp8``, or in the contexts of the script."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from smp_runtime.fp8 import autocast
from smp_runtime.fp8.group import ScriptGroup
from smp_runtime.fp8.layers import EightBitLayers
from smp_runtime.fp8.recipe import DelayedScaling

if TYPE_CHECKING:
    from torch import nn

    from smp_config.version2.parameters import Version2Parameters
    from smp_runtime.job.ranks import Ranks

logger = logging.getLogger("smp")


def install(parameters: Version2Parameters, ranks: Ranks) -> Callable[[], None]:
    """Begin FP8 if the parameters ask for it; return the function that ends it, and that of the script's contexts too."""
    autocast.end_all()  # of a process without a job
    if parameters.fp8:
        layers = EightBitLayers(DelayedScaling(), always=True, group=ScriptGroup(None), speaks=ranks.rank == 0)
        autocast.begin(layers, follows_optimizers=True)
    elif ranks.rank == 0 and is_transformer_engine_installed():
        logger.info(
            "transformer_engine is installed: its fp8_autocast is for its own modules, and the linear layers of a transformed "
            'model are PyTorch\'s; "fp8": true lets these multiply in emulated FP8'
        )
    return autocast.end_all


def adopt_layers(model: nn.Module) -> None:
    """Let the linear layers of a transformed model multiply in 8 bits where that is asked for."""
    autocast.note_model(model)


def is_transformer_engine_installed() -> bool:
    """Return whether ``transformer_engine`` is there, and not only what stands in for it."""
    loaded = sys.modules.get("transformer_engine")
    spec = importlib.util.find_spec("transformer_engine") if loaded is None else getattr(loaded, "__spec__", None)
    return spec is not None and "smp_transformer_engine" not in str(spec.origin)
