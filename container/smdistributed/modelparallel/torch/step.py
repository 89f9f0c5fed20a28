"""``@smp.step`` and what it returns."""

from smp_runtime.step import step
from smp_runtime.step_output import StepOutput

__all__ = ["StepOutput", "step"]
