"""Helpers that older training scripts import."""

from smp_records.rank_record import long_phase
from smp_runtime.job.older_names import rmsg
from smp_runtime.module_conversion.parameter_layout import get_distribution_axis

__all__ = ["get_distribution_axis", "long_phase", "rmsg"]
