"""Errors of the machine or the platform, as opposed to those of the user's settings."""

from __future__ import annotations


class LaunchError(RuntimeError):
    """The job cannot start here: a program, a file or another host is missing."""
