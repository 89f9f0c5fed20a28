"""Helpers of the first library's tests: they say what to use."""

from smp_runtime.job.older_names import dump_model, verify

__all__ = ["dump_model", "verify"]
