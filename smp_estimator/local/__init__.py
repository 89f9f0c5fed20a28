"""Training jobs as processes of this machine: no Docker, no AWS account, no network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_estimator.local.session import ProcessSession

__all__ = ["ProcessSession"]


def __getattr__(name: str) -> Any:
    if name != "ProcessSession":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from smp_estimator.sdk.installed import require

    require(2)
    from smp_estimator.local.session import ProcessSession

    globals()[name] = ProcessSession
    return ProcessSession
