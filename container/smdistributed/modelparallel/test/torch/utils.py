"""Helpers of the first library's tests: their errors name the replacement."""

from smp_runtime.job.older_names import dump_model, verify

__all__ = ["dump_model", "verify"]
