"""``@smp.step`` and the class of its results."""

from smp_runtime.step.microbatches import StepOutput
from smp_runtime.step.step import step

__all__ = ["StepOutput", "step"]
