"""How a private name is looked up, and what is said of one that a release lacks."""

from __future__ import annotations

from typing import Any

import torch

from smp_runtime.errors import SMPRuntimeError

#: The oldest and the newest release that all tests of the runtime run with. setup.cfg lists the limits of older ones.
TESTED = ("2.8", "2.15")


def find_private(purpose: str, *paths: str) -> Any:
    """Return the first of ``paths`` that torch has, or else a function that raises an error when called."""
    for path in paths:
        found: Any = torch
        for name in path.split("."):
            found = getattr(found, name, None)
        if found is not None:
            return found

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise SMPRuntimeError(
            f"PyTorch {torch.__version__} has no torch.{paths[0]}, by which the runtime {purpose}; the runtime is tested with "
            f"PyTorch {TESTED[0]} to {TESTED[1]}: install one of these"
        )

    return missing
