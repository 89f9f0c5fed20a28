"""The results of a rehearsal in the form that pictures use: memory over a step, and the partition of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_estimator.figures.partition import Partition
from smp_estimator.timeline.memory import MemoryCurve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smp_records.rehearsal import KindReport


def memory_curves(kinds: Sequence[KindReport], gpu_memory_bytes: int | None) -> list[MemoryCurve]:
    """Return the memory of a rank of each stage over the last step, without the script's data in host memory."""
    made = []
    for kind in kinds:
        owners = {owner: held for owner, held in kind.curve.owners.items() if owner != "other"}
        if kind.curve.seconds and owners:
            label = f"stage {kind.stage}, as {kind.stands_for} ranks"
            where = " ".join(filter(None, (kind.peak_phase, kind.peak_module)))
            made.append(MemoryCurve(label, kind.curve.seconds, owners, gpu_memory_bytes, where))
    return made


def partition_of(kinds: Sequence[KindReport]) -> Partition:
    """Return the modules that run in a step.

    Each has the stage that it takes the most time on, and its part of that stage's time.
    """
    most: dict[str, tuple[float, int]] = {}
    for kind in kinds:
        here: dict[str, float] = {}
        for work in kind.work:
            if work.module:
                here[work.module] = here.get(work.module, 0.0) + work.seconds
        for path, seconds in here.items():
            most[path] = max(most.get(path, (-1.0, 0)), (seconds, kind.stage))
    stages = max((kind.stage for kind in kinds), default=0) + 1
    return Partition(
        stages,
        {path: stage for path, (_, stage) in most.items()},
        {path: seconds for path, (seconds, _) in most.items()},
        "time of a step, by the stated rates",
    )
