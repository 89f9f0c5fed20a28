"""Scales of FP8 in sharded and local checkpoints, under a key of their own."""

from __future__ import annotations

import json
from typing import Any

from smp_runtime.errors import CheckpointError
from smp_runtime.fp8 import autocast

#: The scales' key in checkpoints.
KEY = "smp_fp8_scales"


def values_to_save() -> dict[str, Any]:
    """Return what a checkpoint has beside the script's state: the scales as text, or nothing."""
    scales = autocast.scales_to_save()
    return {KEY: json.dumps(scales)} if scales else {}


def go_on_with(text: Any) -> None:
    """Go on with the scales of a checkpoint.

    Raises:
        CheckpointError: they are damaged.
    """
    try:
        found = json.loads(text)
    except (ValueError, TypeError):
        raise CheckpointError(
            f"the scales of FP8 in this checkpoint are {str(text)[:60]!r}, which is no JSON; load another checkpoint",
            code="SMP401",
        ) from None
    autocast.go_on_with(found)
