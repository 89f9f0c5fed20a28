"""The notebook side: estimators that train with the model parallel library, in the cloud or on this machine.

Nothing heavy is imported here; the SageMaker SDK loads when a name is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_config import ConfigError
    from smp_config.version import __version__
    from smp_estimator.local.session import ProcessSession
    from smp_estimator.sdk_v2.estimator import SMPEstimator, SMPHuggingFace
    from smp_estimator.settings.strategies import MPI, ModelParallel

__all__ = ["MPI", "ConfigError", "ModelParallel", "ProcessSession", "SMPEstimator", "SMPHuggingFace", "__version__"]

_HOMES = {
    "ConfigError": "smp_config",
    "MPI": "smp_estimator.settings.strategies",
    "ModelParallel": "smp_estimator.settings.strategies",
    "ProcessSession": "smp_estimator.local.session",
    "SMPEstimator": "smp_estimator.sdk_v2.estimator",
    "SMPHuggingFace": "smp_estimator.sdk_v2.estimator",
    "__version__": "smp_config.version",
}

#: Names that extend classes of version 2 of the SDK.
_OF_SDK_2 = ("ProcessSession", "SMPEstimator", "SMPHuggingFace")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _OF_SDK_2:
        from smp_estimator.sdk.installed import require

        require(2)
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
