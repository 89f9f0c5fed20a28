"""Helpers that older training scripts import."""

from smp_config.whereabouts import long_phase
from smp_runtime.job.older_names import rmsg
from smp_runtime.replacement.placing import get_distribution_axis

__all__ = ["get_distribution_axis", "long_phase", "rmsg"]
