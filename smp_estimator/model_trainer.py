"""SDK v3: ``ModelTrainer(..., distributed=ModelParallel(parameters={...}, processes_per_host=8))``.

This module imports nothing heavy. Version 3 of the SageMaker SDK loads when a name is first used. If it is not
installed, the error names the installed version.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from smp_estimator.sdk.installed import require

if TYPE_CHECKING:
    from smp_estimator.sdk_v3.model_parallel import ModelParallel
    from smp_estimator.sdk_v3.trainer import ModelTrainer

__all__ = ["ModelParallel", "ModelTrainer"]

_HOMES = {
    "ModelParallel": "smp_estimator.sdk_v3.model_parallel",
    "ModelTrainer": "smp_estimator.sdk_v3.trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require(3)
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
