"""Delayed creation of parameters."""

from smp_version2.delayed_parameters import DelayedParamIniter

__all__ = ["DelayedParamIniter"]
