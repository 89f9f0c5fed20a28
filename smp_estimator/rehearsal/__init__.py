"""Rehearsals: the script of a large job on this machine without its GPUs, with every rank's memory, traffic and computation.

The script runs in processes of ``smp_runtime``, which are started here; nothing here imports torch.
"""

from smp_estimator.rehearsal.rehearse import rehearse
from smp_estimator.rehearsal.result import RehearsalFailed, Rehearsed
from smp_records.rehearsal import Rehearsal

__all__ = ["Rehearsal", "RehearsalFailed", "Rehearsed", "rehearse"]
