"""``@smp.step`` and what it returns."""

from smp_runtime.step.microbatches import StepOutput
from smp_runtime.step.step import step

__all__ = ["StepOutput", "step"]
